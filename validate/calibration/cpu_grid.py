"""The shapes at which a calibration measures each kind of op: shapes of models that a CPU can run.

Hidden sizes 64 to 512, batches and prompts of 1 to 256 rows, contexts of 16 to 4096 tokens, tile sides of 1
to 1024. Sides are powers of two and a few others; the shapes of scenarios lie between them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from simcore.ops import convolution as conv
from simcore.ops import flash_decoding as flash
from simcore.ops import linear_attention as linear
from simcore.ops import linear_layer
from simcore.ops import op as ops
from simcore.ops.op import Op

Shapes = Callable[[str], Iterator[Op]]
Dims = Mapping[str, int]


def _dims(names: str, *values: Sequence[int]) -> tuple[Dims, ...]:
    """Returns groups of dimensions that vary together: a name for each number."""
    return tuple(dict(zip(names.split(), each, strict=True)) for each in values)


HIDDEN = (64, 128, 256, 512)
ROWS = (1, 2, 4, 16, 64, 256)
BATCH = (1, 4, 16)
CONTEXT = (16, 64, 256, 1024, 4096)
HEADS = _dims("q_heads kv_heads head_dim", (4, 4, 16), (4, 2, 32), (8, 2, 64))
KV_HEADS = _dims("kv_heads head_dim", (4, 16), (2, 32), (2, 64))
WEIGHTS = _dims(
    "n k", (64, 64), (192, 64), (128, 256), (256, 256), (1024, 256), (256, 1024), (512, 512), (2048, 512)
)
VOCAB = (256, 1024, 8192)
SIDES = (1, 2, 4, 16, 64, 256, 1024)
# For tiles and rows of long convolutions.
LANES = _dims("layers batch channels", (1, 1, 64), (4, 2, 64), (2, 1, 256))
STATES = (1, 4)
LINEAR = _dims("batch heads rank dim", (1, 2, 16, 16), (4, 4, 32, 32), (1, 8, 64, 64))
LENGTHS = (16, 64, 256, 512)
FLASH_CONTEXTS = _dims(
    "batch context", (1, 64), (1, 1024), (1, 16384), (4, 512), (4, 4096), (16, 256), (16, 2048)
)
FLASH_HEADS = _dims("q_heads kv_heads head_dim", (8, 2, 64), (16, 2, 64))
DTYPES = ("fp32", "bf16")


def _over(make: Callable[..., Op], **axes: Sequence[Any]) -> Shapes:
    """Returns a function that makes an op for each combination of values, with the last axis fastest. A value
    may set several dimensions."""

    def shapes(dtype: str) -> Iterator[Op]:
        for values in product(*axes.values()):
            dims: dict[str, int] = {}
            for name, value in zip(axes, values, strict=True):
                dims |= value if isinstance(value, Mapping) else {name: value}
            yield make(dtype=dtype, **dims)

    return shapes


# -- ops with dependent dimensions ---------------------------------------------------------------------------


def _matmul(dtype: str) -> Iterator[Op]:
    yield from _over(partial(ops.matmul, "matmul"), m=ROWS, weights=WEIGHTS)(dtype)
    yield from _over(partial(ops.matmul, "lm_head", k=256), m=(1, 4, 16), n=VOCAB)(dtype)


def speculative(*, context: int, **shape: Any) -> Op:
    """Attention whose early part is the first and last 128 tokens, or both halves of a shorter context."""
    return ops.speculative_attention(context=context, chunk=min(128, context // 2), **shape)


def paged(*, batch: int, context: int, **shape: Any) -> Op:
    """Attention of `batch` sequences with `context` tokens each in the mean."""
    return ops.paged_attention(sequences=batch, kv_tokens=batch * context, **shape)


def _prefill(*, tokens: int, past: int, **shape: Any) -> Op:
    pairs = tokens * past + tokens * (tokens + 1) // 2
    return ops.prefill_attention(tokens=tokens, kv_tokens=tokens + past, pairs=pairs, **shape)


def square_tile(implementation: conv.Implementation) -> Callable[..., Op]:
    """Returns a function that makes tiles with as many outputs as inputs, by their `side`."""
    return lambda *, side, **shape: conv.tile(implementation, side=side, outputs=side, **shape)


def _span(make: Callable[..., Op]) -> Callable[..., Op]:
    return lambda *, positions, **shape: make(inputs=positions, outputs=positions, **shape)


def _relaxed_tile(*, side: int, **shape: Any) -> Op:
    return conv.relaxed_tile(side=side, outputs=2 * side - 1, **shape)


def _generic_tile(*, side: int, state: int, **shape: Any) -> Op:
    return conv.generic_tile(state=state, separable=state > 1, side=side, outputs=side, **shape)


def _generic_cell(*, state: int, **shape: Any) -> Op:
    return conv.generic_cell(state=state, separable=state > 1, **shape)


def _step(*, batch: int, more: int, **shape: Any) -> Op:
    return linear.linear_attention_step(batch=batch * more, **shape)


def _decode(*, batch: int, more: int, **shape: Any) -> Op:
    return linear_layer.linear_attention_decode(batch=batch * more, **shape)


DECODER: Mapping[str, Shapes] = {
    "matmul": _matmul,
    "embedding": _over(ops.embedding, tokens=ROWS, hidden=HIDDEN),
    "norm": _over(partial(ops.norm, "norm"), tokens=ROWS, hidden=HIDDEN),
    "residual": _over(partial(ops.residual, "residual"), tokens=ROWS, hidden=HIDDEN),
    "activation": _over(ops.activation, tokens=ROWS, width=(128, 512, 2048), gated=(False, True)),
    "rotary": _over(ops.rotary, tokens=ROWS, heads=HEADS),
    "kv_append": _over(ops.kv_append, tokens=ROWS, heads=KV_HEADS),
    "decode_attention": _over(ops.decode_attention, batch=BATCH, heads=HEADS, context=CONTEXT),
    "speculative_attention": _over(speculative, batch=BATCH, heads=HEADS, context=CONTEXT),
    "receive_speculation": _over(ops.receive_speculation, tokens=BATCH, width=HIDDEN),
    "paged_attention": _over(paged, batch=BATCH, heads=HEADS, context=CONTEXT[:-1]),
    "prefill_attention": _over(_prefill, tokens=(4, 16, 64, 256), past=(0, 256), heads=HEADS),
    "kv_copy": _over(ops.kv_copy, tokens=(16, 64, 256), width=(128, 512, 2048)),
    "sample": _over(ops.sample, tokens=(1, 4, 16), vocab=VOCAB),
}
# A CPU has no half-precision transforms and few fast kernels, so the torch machine computes these in fp32.
SINGLE: Mapping[str, Shapes] = {
    "conv_row": _over(conv.conv_row, lanes=LANES, inputs=SIDES),
    "conv_column": _over(conv.conv_column, lanes=LANES, outputs=SIDES),
    "conv_cell": _over(conv.conv_cell, batch=BATCH, channels=HIDDEN),
    "gate": _over(conv.gate, rows=ROWS, channels=HIDDEN),
    "next_input": _over(conv.next_input, rows=ROWS, channels=HIDDEN),
    **{f"tile_{name}": _over(square_tile(name), lanes=LANES, side=SIDES) for name in conv.IMPLEMENTATIONS},
    **{
        name: _over(_span(make), batch=(1, 4), channels=(64, 256), positions=(4, 16, 64, 256, 1024))
        for name, make in (("conv_prefill", conv.conv_prefill), ("conv_carry", conv.conv_carry))
    },
    "filter_tap": _over(conv.filter_tap, batch=BATCH, channels=HIDDEN),
    "relaxed_cell": _over(conv.relaxed_cell, batch=BATCH, channels=HIDDEN),
    "relaxed_tile": _over(_relaxed_tile, lanes=LANES, side=SIDES, products=(1, 2)),
    "generic_cell": _over(_generic_cell, batch=BATCH, channels=HIDDEN, state=STATES),
    "generic_read": _over(conv.generic_read, batch=BATCH, channels=HIDDEN, state=STATES),
    "generic_tile": _over(_generic_tile, lanes=LANES, side=SIDES, state=STATES[::-1]),
    **{
        f"linear_attention_{method}": _over(
            partial(linear.linear_attention, method), sizes=LINEAR, length=LENGTHS, decay=(False, True)
        )
        for method in (*linear.METHODS, *linear.TORCH_METHODS)
    },
    "linear_attention_step": _over(_step, sizes=LINEAR, more=(1, 4, 16), decay=(False, True)),
    "linear_attention_decode": _over(_decode, sizes=LINEAR, more=(1, 4, 16)),
    "flash_attention_2": _over(flash.flash_attention_2, sizes=FLASH_CONTEXTS, heads=FLASH_HEADS),
    "flash_decoding": _over(partial(flash.flash_decoding, splits=8), sizes=FLASH_CONTEXTS, heads=FLASH_HEADS),
}
KINDS = frozenset({*DECODER, *SINGLE})


def grid(kinds: Collection[str], *, quick: bool = False) -> list[Op]:
    """Returns the ops to measure of those kinds that have shapes here, in each dtype of the kind; `quick`:
    every third op, and the last."""
    found: list[Op] = []
    for kind, shapes in {**DECODER, **SINGLE}.items():
        for dtype in DTYPES if kind in DECODER else DTYPES[:1]:
            each = list(shapes(dtype)) if kind in kinds else []
            found += [*each[:-1:3], *each[-1:]] if quick else each
    return found
