"""A whole prompt through a model of linear attention, by one of the methods of computing it, as one op.

    parts   embedding; of each layer norm, projections, the method, gate, MLP, residuals; last norm, LM head
    memory  weights + the residual stream and its norm + the largest of: a layer's mixer (its method's q, k,
            v, out and temporaries, and the gate), its MLP (inputs and their product), the logits

Layers of full attention attend causally, whatever the method. `original` is the model's published code
(`simcore.models.original_mixers`).
"""

from dataclasses import dataclass
from functools import cached_property

from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig, ModelError
from simcore.models.mixers import SLIDING, STATEFUL, LinearMixer
from simcore.models.operators import LABELS, LINEAR_ATTENTION, linear_attention_op
from simcore.models.original_mixers import original, temporaries
from simcore.ops import linear_attention as ops_linear_attention
from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, Op, sum_of_parts

ORIGINAL = "original"
PROMPT_METHODS = (*LINEAR_ATTENTION, ORIGINAL)
PROMPT_LABELS = {**LABELS, ORIGINAL: "original"}
PROMPT = "prompt"


@dataclass(frozen=True)
class Prompt:
    """`batch` prompts of `length` tokens by a method. `mask_by_rows`, `states`: see
    `simcore.ops.linear_attention`; `all_logits`: of every token, as transformers computes them, not of the
    last ones alone. Raises ModelError for a model without linear attention."""

    config: DecoderConfig
    method: str
    batch: int
    length: int
    dtype: str
    mask_by_rows: bool = False
    states: bool = True
    all_logits: bool = False

    def __post_init__(self) -> None:
        if self.config.linear is None:
            raise ModelError(f"{self.config.name} has no layer of linear attention")

    @property
    def tokens(self) -> int:
        """Rows of all products but, perhaps, the LM head's."""
        return self.batch * self.length

    @cached_property
    def op(self) -> Op:
        """The prompt as one fused op; its parts are the launches, a method's whole stream one of them."""
        whole = self._model(self.tokens)
        layers = {mixer: whole.layer(mixer, self._mixing(mixer)) for mixer in {*self.config.layer_mixers}}
        inside = [each for mixer in self.config.layer_mixers for each in layers[mixer]]
        rows = self.tokens if self.all_logits else self.batch
        parts = (*whole.embed.ops, *inside, *self._model(rows).head.ops)
        shape = (("batch", self.batch), ("length", self.length), ("layers", self.config.layers))
        return Op(PROMPT, PROMPT, shape, self.dtype, sum_of_parts, "", parts)

    @property
    def memory_bytes(self) -> float:
        """Peak device memory, bytes: weights, the KV cache and states of all layers, and the widest results
        of one layer at once."""
        config, size = self.config, DTYPE_BYTES[self.dtype]
        mlp = self.tokens * (3 if config.gated else 2) * config.intermediate
        logits = (self.tokens if self.all_logits else self.batch) * config.vocab
        largest = max(mlp, logits, *(self._mixer_elements(mixer) for mixer in {*config.layer_mixers}))
        stream = 2 * self.tokens * config.hidden
        cached = 2 * config.kv_heads * config.head_dim * config.cached_tokens(self.length)
        kept = self.batch * (size * cached + config.state_bytes)
        return self._model(self.tokens).weight_bytes + kept + size * (stream + largest)

    def _model(self, rows: int) -> Decoder:
        formats = Dtypes(self.dtype, self.dtype, self.dtype)
        return Decoder(self.config, batch=rows, dtypes=formats)

    @property
    def _linear(self) -> LinearMixer:
        assert self.config.linear is not None
        return self.config.linear

    def _shape(self, mixer: str) -> dict[str, int]:
        own = self._linear
        of_state = {"rank": own.rank(mixer), "dim": own.value_dim}
        return {"batch": self.batch, "heads": own.heads, "length": self.length, **of_state}

    def _attention(self, mixer: str) -> Op:
        heads = {name: getattr(self.config, name) for name in ("q_heads", "kv_heads", "head_dim")}
        seen = min(self.length, self.config.window or self.length) if mixer == SLIDING else self.length
        pairs = self.batch * (seen * (seen + 1) // 2 + (self.length - seen) * seen)
        return ops.prefill_attention(
            tokens=self.tokens, kv_tokens=self.tokens, pairs=pairs, dtype=self.dtype, **heads
        )

    def _method(self, mixer: str) -> Op:
        return linear_attention_op(
            self.method,
            **self._shape(mixer),
            dtype=self.dtype,
            decay=True,
            mask_by_rows=self.mask_by_rows,
            states=self.states,
        )

    def _mixing(self, mixer: str) -> tuple[Op, ...]:
        if mixer not in STATEFUL:
            return (self._attention(mixer),)
        if self.method == ORIGINAL:
            return original(self.config, **self._shape(mixer), dtype=self.dtype)
        return (self._method(mixer),)

    def _mixer_elements(self, mixer: str) -> float:
        """Elements of a mixer's tensors at once, its gate and its normed input among them."""
        if mixer not in STATEFUL:
            heads = 2 * self.config.q_heads + 2 * self.config.kv_heads
            return self.tokens * heads * self.config.head_dim
        own, shape = self._linear, self._shape(mixer)
        gate = self.tokens * own.heads * own.value_dim if own.gated else 0
        if self.method != ORIGINAL:
            return gate + ops_linear_attention.memory_bytes(self._method(mixer)) / DTYPE_BYTES[self.dtype]
        n, r, d = shape["length"], shape["rank"], shape["dim"]
        groups = shape["batch"] * shape["heads"]
        return gate + groups * (2 * n * (r + d) + temporaries(self.config, n, r, d))
