"""A decoder as a server runs it: steps whose numbers of rows and cached tokens are read at run time.

One step, per rank:

    tokens          rows of the projections: prompt tokens and one for each sequence that decodes
    sequences       sequences that decode, one query token each, over kv_tokens cached tokens in all
    prompt_tokens   prompt tokens computed, over prompt_kv cached ones, prompt_pairs (query, key) pairs
    rows            rows that get a next token: sequences that decode and prompts that end

The graphs do not depend on these numbers, as the piecewise graphs of production engines do not: attention
reads them from device memory. `kv_tokens` grows by `sequences` from one decode step to the next.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from simcore import ops
from simcore.decoder_config import DecoderConfig
from simcore.models import Decoder, Dtypes, Style
from simcore.ops import DTYPE_BYTES, Graph, Op, Size

TOKENS = Size("tokens")
ROWS = Size("rows")
SEQUENCES = Size("sequences")
KV_TOKENS = Size("kv_tokens")
PROMPT_TOKENS = Size("prompt_tokens")
PROMPT_KV = Size("prompt_kv")
PROMPT_PAIRS = Size("prompt_pairs")


@dataclass(frozen=True)
class ServedDecoder:
    """One rank's share of a decoder, for any batch; its graphs are made once.

    `whole`: an iteration is one op, and so is a prompt, for devices on which only those were timed.
    Raises ModelError where the model cannot be sharded over `ranks`.
    """

    config: DecoderConfig
    ranks: int = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    style: Style = "all_reduce"
    whole: bool = False

    @cached_property
    def decode(self) -> Graph:
        """A token for each sequence. Sizes: tokens, rows, sequences (all the same), kv_tokens."""
        if self.whole:
            return Graph("decode", (self._iteration(),))
        return self._step("decode", (self._decode_attention(),))

    @cached_property
    def prefill(self) -> Graph:
        """Prompt tokens alone. Sizes: tokens, rows, prompt_tokens, prompt_kv, prompt_pairs."""
        if self.whole:
            return Graph("prefill", (self._pre_processing(),))
        return self._step("prefill", (self._prefill_attention(),))

    @cached_property
    def mixed(self) -> Graph:
        """Prompt tokens and a token for each sequence in one step. Sizes: all."""
        if self.whole:
            return Graph("mixed", (self._pre_processing(), self._iteration()))
        return self._step("mixed", (self._prefill_attention(), self._decode_attention()))

    @cached_property
    def move(self) -> Graph:
        """Moves `tokens` cached tokens to other slots."""
        return Graph("move", (ops.kv_copy(tokens=TOKENS, width=self._body.kv_width, dtype=self.dtypes.kv),))

    @property
    def weight_bytes(self) -> float:
        """Device memory that one rank's weights take."""
        return self._body.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Device memory that one rank caches of a token, in all layers."""
        return self._body.kv_width * DTYPE_BYTES[self.dtypes.kv]

    def activation_bytes(self, tokens: int, rows: int) -> float:
        """Device memory that the widest intermediate results of a step take at once: of `tokens` rows the
        residual stream twice and the MLP's inputs, of `rows` rows the logits in fp32."""
        config = self.config
        wide = 2 * config.hidden + 2 * config.intermediate // self.ranks
        return tokens * wide * DTYPE_BYTES[self.dtypes.activation] + rows * config.vocab * 4.0

    @cached_property
    def _body(self) -> Decoder:
        return Decoder(self.config, ranks=self.ranks, batch=TOKENS, dtypes=self.dtypes, style=self.style)

    @cached_property
    def _tail(self) -> Decoder:
        return Decoder(self.config, ranks=self.ranks, batch=ROWS, dtypes=self.dtypes, style=self.style)

    def _step(self, name: str, attention: tuple[Op, ...]) -> Graph:
        layer = (*self._body.before.ops, *attention, *self._body.after.ops)
        return Graph(name, (*self._body.embed.ops, *(layer * self.config.layers), *self._tail.head.ops))

    @property
    def _heads(self) -> dict[str, int]:
        config = self.config
        kv_heads = max(1, config.kv_heads // self.ranks)
        return {"q_heads": config.q_heads // self.ranks, "kv_heads": kv_heads, "head_dim": config.head_dim}

    def _decode_attention(self) -> Op:
        return ops.paged_attention(
            sequences=SEQUENCES, kv_tokens=KV_TOKENS, dtype=self.dtypes.kv, **self._heads
        )

    def _prefill_attention(self) -> Op:
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
        matrices = config.layers * sum(config.layer_weights.values()) + config.vocab * config.hidden
        return {
            "parameters": matrices // self.ranks,
            "width": config.layers * config.q_heads * config.head_dim // self.ranks,
            "weight_bytes": int(self.weight_bytes),
            "kv_bytes": int(self.kv_bytes_per_token),
        }

    def _iteration(self) -> Op:
        return ops.iteration(sequences=SEQUENCES, kv_tokens=KV_TOKENS, **self._model)

    def _pre_processing(self) -> Op:
        return ops.pre_processing(prompt_tokens=PROMPT_TOKENS, kv_tokens=PROMPT_KV, **self._model)


def decode_sizes(sequences: int, kv_tokens: int) -> dict[str, int]:
    """Sizes of a decode step: `kv_tokens` cached tokens in all, those of this step included."""
    return {"tokens": sequences, "rows": sequences, "sequences": sequences, "kv_tokens": kv_tokens}


def prefill_pairs(tokens: int, cached: int) -> int:
    """(query, key) pairs of `tokens` prompt tokens after `cached` ones under a causal mask.

    >>> prefill_pairs(3, 0), prefill_pairs(1, 9)
    (6, 10)
    """
    return tokens * cached + tokens * (tokens + 1) // 2


def step_sizes(
    sequences: int, kv_tokens: int, prompts: Iterable[tuple[int, int]], ends: int
) -> dict[str, int]:
    """Sizes of a step with prompts: `prompts` are (tokens now, tokens cached before) of each, of which `ends`
    are computed to their end."""
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
        "prompt_tokens": now,
        "prompt_kv": cached,
        "prompt_pairs": pairs,
    }


def growth(sequences: int) -> dict[str, int]:
    """What a replay of a decode step adds to its sizes."""
    return {"kv_tokens": sequences}
