"""A decoder as a server runs it: the numbers of rows and cached tokens of a step are run-time sizes.

One step, per rank:

    tokens          rows of the projections: prompt tokens and one for each decoding sequence
    sequences       decoding sequences, one query token each, over kv_tokens cached tokens in all
    over_mean       tokens by which the longest of these exceeds their mean, rounded
    prompt_tokens   prompt tokens computed, over prompt_kv cached tokens, in prompt_pairs (query, key) pairs
    rows            rows that get a next token: decoding sequences and prompts that end

The graphs do not depend on these numbers, like the piecewise graphs of production engines: attention reads
them from device memory. `kv_tokens` grows by `sequences` from one decode step to the next, and `over_mean`
stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from simcore.models.decoder import Decoder, Dtypes, Quantized, Style
from simcore.models.decoder_config import DecoderConfig, ModelError
from simcore.models.mixers import SLIDING, STATEFUL
from simcore.ops import linear_layer
from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, Graph, Op, Size

FP32_BYTES = DTYPE_BYTES["fp32"]
# cuBLAS's workspace on Hopper: torch, aten/src/ATen/cuda/CublasHandlePool.cpp.
WORKSPACE_BYTES = 32 * 2**20

# Binary digits of `over_mean` that are not rounded away.
FINE_BITS = 2

TOKENS = Size("tokens")
ROWS = Size("rows")
SEQUENCES = Size("sequences")
KV_TOKENS = Size("kv_tokens")
OVER_MEAN = Size("over_mean")
PROMPT_TOKENS = Size("prompt_tokens")
PROMPT_KV = Size("prompt_kv")
PROMPT_PAIRS = Size("prompt_pairs")


@dataclass(frozen=True)
class ServedDecoder:
    """One rank's share of a decoder, for any batch; its graphs are made once.

    `whole`: an iteration is one op, and so is a prompt, for devices on which only these were timed. `host`:
    what the host of a serving engine adds to each step, as ops that no kernel runs. `marks`: what is added
    to the shape of every other op, by which prices know an engine's kernels. `quantized`: as of `Decoder`.
    `call_s`: for which an engine's host calls each op of a step with prompts.
    Its graphs raise ModelError if the model cannot be sharded over `ranks`.
    """

    config: DecoderConfig
    ranks: int = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    style: Style = "all_reduce"
    whole: bool = False
    host: tuple[Op, ...] = ()
    marks: tuple[tuple[str, int], ...] = ()
    quantized: tuple[Quantized, ...] = ()
    call_s: float = 0.0

    @cached_property
    def decode(self) -> Graph:
        """A token for each sequence. Sizes: tokens, rows, sequences (all equal), kv_tokens, over_mean."""
        if self.whole:
            return self._graph("decode", (self._iteration(),))
        return self._step("decode", decodes=True)

    @cached_property
    def prefill(self) -> Graph:
        """Prompt tokens alone. Sizes: tokens, rows, prompt_tokens, prompt_kv, prompt_pairs."""
        if self.whole:
            return self._graph("prefill", (self._pre_processing(),))
        return self._step("prefill", prompts=True)

    @cached_property
    def mixed(self) -> Graph:
        """Prompt tokens and a token for each sequence in one step. Sizes: all."""
        if self.whole:
            return self._graph("mixed", (self._pre_processing(), self._iteration()))
        return self._step("mixed", prompts=True, decodes=True)

    def called(self, step: Graph) -> int:
        """How many calls by an engine's host a step has: its ops, of which a product makes its own inputs.
        Also where prices are of whole iterations."""
        return self._called[step.name]

    @cached_property
    def _called(self) -> Mapping[str, int]:
        by_ops = replace(self, whole=False) if self.whole else self
        return {
            step.name: sum(op.kind != "quantize" for op in step.ops) - len(self.host)
            for step in (by_ops.prefill, by_ops.mixed)
        }

    @cached_property
    def move(self) -> Graph:
        """Moves `tokens` cached tokens to other slots."""
        return Graph("move", (ops.kv_copy(tokens=TOKENS, width=self._body.kv_width, dtype=self.dtypes.kv),))

    @property
    def weight_bytes(self) -> float:
        """Bytes of device memory for one rank's weights."""
        return self._body.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of device memory that one rank caches per token, in all layers."""
        return self._body.kv_width * DTYPE_BYTES[self.dtypes.kv]

    @property
    def state_bytes_per_sequence(self) -> float:
        """Bytes of device memory for one rank's states of one sequence, in all layers, at any context."""
        return self.config.state_bytes / self.ranks

    def activation_bytes(self, tokens: int, rows: int) -> float:
        """Bytes of device memory for the widest intermediate results of a step at once: for `tokens` rows the
        residual stream twice and the MLP's inputs, for `rows` rows the logits in fp32."""
        config = self.config
        wide = 2 * config.hidden + 2 * config.intermediate // self.ranks
        return tokens * wide * DTYPE_BYTES[self.dtypes.activation] + rows * config.vocab * 4.0

    @property
    def split_weight_bytes(self) -> float:
        """Bytes of device memory for one rank's weights if the rows of the embedding are also split over
        ranks, as in serving engines."""
        config = self.config
        embedding = config.vocab * config.hidden * DTYPE_BYTES[self.dtypes.of("embedding")]
        return self.weight_bytes - embedding * (1.0 - 1.0 / self.ranks)

    def profile_bytes(self, tokens: int, rows: int, processors: int) -> float:
        """Bytes of device memory for activations at the peak of the profile run by which vLLM sizes its KV
        cache: `tokens` rows through the layers, then the sampler with `rows` of them.

        layers   the MLP's gate, up and their product, and four times the hidden state (attention's output,
                 the residual stream before and after it is added, its norm)
        sampler  hidden states; for each row the logits as computed, the logits in fp32, their probabilities,
                 and random numbers for the choice; fp32 logits for each of the device's `processors` (a
                 kernel's buffer for top-k and top-p)
        both     cuBLAS's workspace, 32 MiB on Hopper

        Source: vLLM 0.19, v1/worker/gpu_model_runner.py (profile_run), v1/sample/sampler.py,
        v1/sample/ops/topk_topp_sampler.py and topk_topp_triton.py; the four hidden states were read off the
        peak of CodeLlama-7B in its logs.
        """
        config, wide = self.config, DTYPE_BYTES[self.dtypes.activation]
        mlp = (3 if config.gated else 2) * config.intermediate / self.ranks
        layers = tokens * (mlp + 4 * config.hidden) * wide
        logits = rows * (wide + 3 * FP32_BYTES) + min(processors, rows) * FP32_BYTES
        sampler = (tokens + rows) * config.hidden * wide + config.vocab * logits
        return max(layers, sampler) + WORKSPACE_BYTES

    @cached_property
    def _body(self) -> Decoder:
        return replace(self._tail, batch=TOKENS, quantized=self.quantized)

    @cached_property
    def _tail(self) -> Decoder:
        return Decoder(self.config, ranks=self.ranks, batch=ROWS, dtypes=self.dtypes, style=self.style)

    def _step(self, name: str, *, prompts: bool = False, decodes: bool = False) -> Graph:
        mixers, layers = self.config.layer_mixers, dict[str, tuple[Op, ...]]()
        for mixer in dict.fromkeys(mixers):
            first = (self._prompt_mixing(mixer),) if prompts else ()
            mixing = (*first, self._decode_mixing(mixer)) if decodes else first
            layers[mixer] = self._body.layer(mixer, mixing)
        whole = tuple(op for mixer in mixers for op in layers[mixer])
        return self._graph(name, (*self._body.embed.ops, *whole, *self._tail.head.ops))

    def _graph(self, name: str, kernels: tuple[Op, ...]) -> Graph:
        return Graph(name, (*map(self._marked, kernels), *self.host))

    def _marked(self, op: Op) -> Op:
        return replace(op, shape=(*op.shape, *self.marks)) if self.marks else op

    @property
    def _heads(self) -> dict[str, int]:
        config = self.config
        kv_heads = max(1, config.kv_heads // self.ranks)
        return {"q_heads": config.q_heads // self.ranks, "kv_heads": kv_heads, "head_dim": config.head_dim}

    def _decode_mixing(self, mixer: str) -> Op:
        if mixer in STATEFUL:
            return linear_layer.linear_attention_decode(
                batch=SEQUENCES, dtype=self.dtypes.activation, **self._body.linear_shape(mixer)
            )
        if mixer == SLIDING:
            raise ModelError(f"{self.config.name}: layers with a window are not served yet")
        return ops.paged_attention(
            sequences=SEQUENCES,
            kv_tokens=KV_TOKENS,
            over_mean=OVER_MEAN,
            dtype=self.dtypes.kv,
            **self._heads,
        )

    def _prompt_mixing(self, mixer: str) -> Op:
        if mixer in STATEFUL:
            return linear_layer.linear_attention_prompts(
                tokens=PROMPT_TOKENS,
                kv_tokens=PROMPT_KV,
                pairs=PROMPT_PAIRS,
                dtype=self.dtypes.activation,
                **self._body.linear_shape(mixer),
            )
        if mixer == SLIDING:
            raise ModelError(f"{self.config.name}: layers with a window are not served yet")
        return ops.prefill_attention(
            tokens=PROMPT_TOKENS,
            kv_tokens=PROMPT_KV,
            pairs=PROMPT_PAIRS,
            dtype=self.dtypes.kv,
            **self._heads,
        )

    @property
    def _model(self) -> dict[str, int]:
        config = self.config
        matrices = config.matrices + config.vocab * config.hidden
        return {
            "parameters": matrices // self.ranks,
            "width": config.attention_layers * config.q_heads * config.head_dim // self.ranks,
            "weight_bytes": int(self.weight_bytes),
            "kv_bytes": int(self.kv_bytes_per_token),
        }

    def _iteration(self) -> Op:
        return ops.iteration(sequences=SEQUENCES, kv_tokens=KV_TOKENS, **self._model)

    def _pre_processing(self) -> Op:
        return ops.pre_processing(prompt_tokens=PROMPT_TOKENS, kv_tokens=PROMPT_KV, **self._model)


def decode_sizes(sequences: int, kv_tokens: int, longest: int | None = None) -> dict[str, int]:
    """The sizes of a decode step: `kv_tokens` cached tokens in all and `longest` of the longest sequence,
    both including the tokens of this step. Without `longest`, lengths are spread evenly
    (`ops.longest_of_spread`)."""
    over = over_mean(sequences, kv_tokens, longest)
    return {
        "tokens": sequences,
        "rows": sequences,
        "sequences": sequences,
        "kv_tokens": kv_tokens,
        "over_mean": over,
    }


def over_mean(sequences: int, kv_tokens: int, longest: int | None = None) -> int:
    """Tokens by which the longest sequence exceeds the mean, at two values an octave: steps of nearly the
    same lengths then share their prices. Without `longest`, of lengths that are spread evenly.

    >>> over_mean(4, 400, 100), over_mean(4, 400, 107), over_mean(4, 400, 117), over_mean(4, 400, 250)
    (0, 8, 16, 128)
    """
    if sequences < 2:
        return 0
    if longest is None:
        longest = ops.longest_of_spread(kv_tokens, sequences)
    exact = max(0, longest + -kv_tokens // sequences)
    step = 1 << max(0, exact.bit_length() - FINE_BITS)
    return (exact + step // 2) // step * step


def prefill_pairs(tokens: int, cached: int) -> int:
    """(query, key) pairs of `tokens` prompt tokens after `cached` cached tokens under a causal mask.

    >>> prefill_pairs(3, 0), prefill_pairs(1, 9)
    (6, 10)
    """
    return tokens * cached + tokens * (tokens + 1) // 2


def step_sizes(
    sequences: int,
    kv_tokens: int,
    prompts: Iterable[tuple[int, int]],
    ends: int,
    longest: int | None = None,
) -> dict[str, int]:
    """The sizes of a step with prompts: `prompts` has (tokens now, tokens cached before) for each prompt;
    `ends` of them are computed to their end. `longest`: as in `decode_sizes`."""
    now = cached = pairs = 0
    for tokens, before in prompts:
        now += tokens
        cached += tokens + before
        pairs += prefill_pairs(tokens, before)
    return {
        "tokens": sequences + now,
        "rows": max(1, sequences + ends),
        "sequences": sequences,
        "kv_tokens": kv_tokens,
        "over_mean": over_mean(sequences, kv_tokens, longest),
        "prompt_tokens": now,
        "prompt_kv": cached,
        "prompt_pairs": pairs,
    }


def growth(sequences: int) -> dict[str, int]:
    """The growth of a decode step's sizes from replay to replay."""
    return {"kv_tokens": sequences}
