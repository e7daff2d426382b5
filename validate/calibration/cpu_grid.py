"""The shapes at which a calibration measures each kind of op: those of models that a CPU can run.

Hidden sizes 64 to 512, batches and prompts of 1 to 256 rows, contexts of 16 to 4096 tokens, tile sides of
1 to 1024. Sides are powers of two and a few more; what a scenario launches lies between them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product

from simcore.ops import convolution as conv
from simcore.ops import flash_decoding as flash
from simcore.ops import linear_attention as linear
from simcore.ops import op as ops
from simcore.ops.op import Op

Shapes = Callable[[str], Iterator[Op]]

HIDDEN = (64, 128, 256, 512)
ROWS = (1, 2, 4, 16, 64, 256)
BATCH = (1, 4, 16)
CONTEXT = (16, 64, 256, 1024, 4096)
# (query heads, KV heads, elements of a head)
HEADS = ((4, 4, 16), (4, 2, 32), (8, 2, 64))
# (columns, rows) of weight matrices.
WEIGHTS = ((64, 64), (192, 64), (128, 256), (256, 256), (1024, 256), (256, 1024), (512, 512), (2048, 512))
VOCAB = (256, 1024, 8192)
SIDES = (1, 2, 4, 16, 64, 256, 1024)
# (sequences, heads, rank, elements of a value).
LINEAR = ((1, 2, 16, 16), (4, 4, 32, 32), (1, 8, 64, 64))
LENGTHS = (16, 64, 256, 512)
DTYPES = ("fp32", "bf16")


def _matmul(dtype: str) -> Iterator[Op]:
    for m, (n, k) in product(ROWS, WEIGHTS):
        yield ops.matmul("matmul", m=m, n=n, k=k, dtype=dtype)
    for m, n in product((1, 4, 16), VOCAB):
        yield ops.matmul("lm_head", m=m, n=n, k=256, dtype=dtype)


def _embedding(dtype: str) -> Iterator[Op]:
    return (ops.embedding(tokens=m, hidden=h, dtype=dtype) for m, h in product(ROWS, HIDDEN))


def _norm(dtype: str) -> Iterator[Op]:
    return (ops.norm("norm", tokens=m, hidden=h, dtype=dtype) for m, h in product(ROWS, HIDDEN))


def _residual(dtype: str) -> Iterator[Op]:
    return (ops.residual("residual", tokens=m, hidden=h, dtype=dtype) for m, h in product(ROWS, HIDDEN))


def _activation(dtype: str) -> Iterator[Op]:
    for m, h, gated in product(ROWS, (128, 512, 2048), (False, True)):
        yield ops.activation(tokens=m, width=h, gated=gated, dtype=dtype)


def _rotary(dtype: str) -> Iterator[Op]:
    for m, (q, kv, d) in product(ROWS, HEADS):
        yield ops.rotary(tokens=m, q_heads=q, kv_heads=kv, head_dim=d, dtype=dtype)


def _kv_append(dtype: str) -> Iterator[Op]:
    for m, (_, kv, d) in product(ROWS, HEADS):
        yield ops.kv_append(tokens=m, kv_heads=kv, head_dim=d, dtype=dtype)


def _decode_attention(dtype: str) -> Iterator[Op]:
    for b, (q, kv, d), c in product(BATCH, HEADS, CONTEXT):
        yield ops.decode_attention(batch=b, q_heads=q, kv_heads=kv, head_dim=d, context=c, dtype=dtype)


def _speculative_attention(dtype: str) -> Iterator[Op]:
    for b, (q, kv, d), c in product(BATCH, HEADS, CONTEXT):
        yield ops.speculative_attention(
            batch=b, q_heads=q, kv_heads=kv, head_dim=d, context=c, chunk=min(128, c // 2), dtype=dtype
        )


def _receive_speculation(dtype: str) -> Iterator[Op]:
    return (ops.receive_speculation(tokens=b, width=h, dtype=dtype) for b, h in product(BATCH, HIDDEN))


def _paged_attention(dtype: str) -> Iterator[Op]:
    for b, (q, kv, d), c in product(BATCH, HEADS, CONTEXT[:-1]):
        yield ops.paged_attention(
            sequences=b, kv_tokens=b * c, q_heads=q, kv_heads=kv, head_dim=d, dtype=dtype
        )


def _prefill_attention(dtype: str) -> Iterator[Op]:
    for t, past, (q, kv, d) in product((4, 16, 64, 256), (0, 256), HEADS):
        pairs = t * past + t * (t + 1) // 2
        heads = {"q_heads": q, "kv_heads": kv, "head_dim": d}
        yield ops.prefill_attention(tokens=t, kv_tokens=t + past, pairs=pairs, dtype=dtype, **heads)


def _kv_copy(dtype: str) -> Iterator[Op]:
    return (ops.kv_copy(tokens=t, width=w, dtype=dtype) for t, w in product((16, 64, 256), (128, 512, 2048)))


def _sample(dtype: str) -> Iterator[Op]:
    return (ops.sample(tokens=m, vocab=v, dtype=dtype) for m, v in product((1, 4, 16), VOCAB))


def _lanes() -> Iterator[dict[str, int]]:
    """Layers, sequences and channels of a tile."""
    for layers, batch, channels in ((1, 1, 64), (4, 2, 64), (2, 1, 256)):
        yield {"layers": layers, "batch": batch, "channels": channels}


def _conv_row(dtype: str) -> Iterator[Op]:
    return (conv.conv_row(inputs=u, dtype=dtype, **each) for each, u in product(_lanes(), SIDES))


def _conv_column(dtype: str) -> Iterator[Op]:
    return (conv.conv_column(outputs=u, dtype=dtype, **each) for each, u in product(_lanes(), SIDES))


def _tiles(implementation: conv.Implementation) -> Shapes:
    def shapes(dtype: str) -> Iterator[Op]:
        for each, u in product(_lanes(), SIDES):
            yield conv.tile(implementation, side=u, outputs=u, dtype=dtype, **each)

    return shapes


def _per_layer(constructor: Callable[..., Op]) -> Shapes:
    def shapes(dtype: str) -> Iterator[Op]:
        for b, channels in product(BATCH, HIDDEN):
            yield constructor(batch=b, channels=channels, dtype=dtype)

    return shapes


def _spans(constructor: Callable[..., Op]) -> Shapes:
    def shapes(dtype: str) -> Iterator[Op]:
        for b, channels, p in product((1, 4), (64, 256), (4, 16, 64, 256, 1024)):
            yield constructor(batch=b, channels=channels, inputs=p, outputs=p, dtype=dtype)

    return shapes


def _elementwise(constructor: Callable[..., Op]) -> Shapes:
    return lambda dtype: (constructor(rows=m, channels=h, dtype=dtype) for m, h in product(ROWS, HIDDEN))


def _relaxed_tile(dtype: str) -> Iterator[Op]:
    for each, u, products in product(_lanes(), SIDES, (1, 2)):
        shape = {**each, "side": u, "products": products}
        yield conv.relaxed_tile(outputs=2 * u - 1, dtype=dtype, **shape)


def _generic_tile(dtype: str) -> Iterator[Op]:
    for each, u in product(_lanes(), SIDES):
        yield conv.generic_tile(state=4, separable=True, side=u, outputs=u, dtype=dtype, **each)
        yield conv.generic_tile(state=1, separable=False, side=u, outputs=u, dtype=dtype, **each)


def _generic_cell(dtype: str) -> Iterator[Op]:
    for b, channels, state in product(BATCH, HIDDEN, (1, 4)):
        yield conv.generic_cell(batch=b, channels=channels, state=state, separable=state > 1, dtype=dtype)


def _generic_read(dtype: str) -> Iterator[Op]:
    for b, channels, state in product(BATCH, HIDDEN, (1, 4)):
        yield conv.generic_read(batch=b, channels=channels, state=state, dtype=dtype)


def _linear_attention(method: str) -> Shapes:
    def shapes(dtype: str) -> Iterator[Op]:
        for (b, h, r, d), n, decay in product(LINEAR, LENGTHS, (False, True)):
            yield linear.linear_attention(
                method, batch=b, heads=h, length=n, rank=r, dim=d, dtype=dtype, decay=decay
            )

    return shapes


def _linear_attention_step(dtype: str) -> Iterator[Op]:
    for (b, h, r, d), more, decay in product(LINEAR, (1, 4, 16), (False, True)):
        yield linear.linear_attention_step(batch=b * more, heads=h, rank=r, dim=d, dtype=dtype, decay=decay)


def _flash(make: Callable[[dict[str, int], str], Op]) -> Shapes:
    def shapes(dtype: str) -> Iterator[Op]:
        for batch, context in ((1, 64), (1, 1024), (1, 16384), (4, 512), (4, 4096), (16, 256), (16, 2048)):
            for q_heads, kv_heads in ((8, 2), (16, 2)):
                sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 64}
                yield make({**sizes, "context": context}, dtype)

    return shapes


DECODER: Mapping[str, Shapes] = {
    "matmul": _matmul,
    "embedding": _embedding,
    "norm": _norm,
    "residual": _residual,
    "activation": _activation,
    "rotary": _rotary,
    "kv_append": _kv_append,
    "decode_attention": _decode_attention,
    "speculative_attention": _speculative_attention,
    "receive_speculation": _receive_speculation,
    "paged_attention": _paged_attention,
    "prefill_attention": _prefill_attention,
    "kv_copy": _kv_copy,
    "sample": _sample,
}
# Half precision has no transforms on a CPU, and few fast kernels: the torch machine computes these in fp32.
SINGLE: Mapping[str, Shapes] = {
    "conv_row": _conv_row,
    "conv_column": _conv_column,
    "conv_cell": _per_layer(conv.conv_cell),
    "gate": _elementwise(conv.gate),
    "next_input": _elementwise(conv.next_input),
    **{f"tile_{name}": _tiles(name) for name in conv.IMPLEMENTATIONS},
    "conv_prefill": _spans(conv.conv_prefill),
    "conv_carry": _spans(conv.conv_carry),
    "filter_tap": _per_layer(conv.filter_tap),
    "relaxed_cell": _per_layer(conv.relaxed_cell),
    "relaxed_tile": _relaxed_tile,
    "generic_cell": _generic_cell,
    "generic_read": _generic_read,
    "generic_tile": _generic_tile,
    **{
        f"linear_attention_{method}": _linear_attention(method)
        for method in (*linear.METHODS, *linear.TORCH_METHODS)
    },
    "linear_attention_step": _linear_attention_step,
    "flash_attention_2": _flash(lambda sizes, dtype: flash.flash_attention_2(**sizes, dtype=dtype)),
    "flash_decoding": _flash(lambda sizes, dtype: flash.flash_decoding(**sizes, splits=8, dtype=dtype)),
}
KINDS = frozenset({*DECODER, *SINGLE})


def grid(kinds: Collection[str], *, quick: bool = False) -> list[Op]:
    """The ops to measure of those kinds for which shapes are known, in every dtype; `quick`: every third of
    them, and the last one."""
    asked: list[tuple[Shapes, tuple[str, ...]]]
    asked = [(shapes, DTYPES) for kind, shapes in DECODER.items() if kind in kinds]
    asked += [(shapes, DTYPES[:1]) for kind, shapes in SINGLE.items() if kind in kinds]
    found: list[Op] = []
    for shapes, dtypes in asked:
        for dtype in dtypes:
            each = list(shapes(dtype))
            found += [*each[:-1:3], each[-1]] if quick else each
    return found
