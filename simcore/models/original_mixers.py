"""What the published code of a model computes in a layer of linear attention for whole prompts, op by op.

    retnet       parallel form: the mask gamma^(i-j) of all positions, in one go for each head, and
                 (q k^T o mask) v; for the generation after it, the state at the last row
    transnormer  blocks of 256 rows: inside a block as vanilla, all rows before it through the state

Sources: wac81/toy_retnet_1.3b, retnet/modeling_retnet.py (MultiScaleRetention, forward_impl parallel);
OpenNLPLab's modeling_transnormer.py (NormLinearAttention.inference). RetNet's state is read as the product
k^T v: as that file writes it, it would take more than the memory of the card on which the paper ran it.
"""

from simcore.models.decoder_config import DecoderConfig
from simcore.ops.linear_attention import batched_matmul, elementwise
from simcore.ops.op import Op

BLOCK = 256
# A number of the exponents i - j (int64), in numbers of fp32.
_WIDE = 2


def original(
    config: DecoderConfig, *, batch: int, heads: int, length: int, rank: int, dim: int, dtype: str
) -> tuple[Op, ...]:
    """The launches for prompts of `length` tokens; q, k [batch, heads, length, rank], v [.., dim]."""
    assert config.linear is not None
    stream = _retnet if config.linear.decays == "retnet" else _transnormer
    return stream(batch, heads, length, rank, dim, dtype)


def temporaries(config: DecoderConfig, length: int, rank: int, dim: int) -> int:
    """The most elements of one head in device memory at once beside q, k, v and out."""
    assert config.linear is not None
    if config.linear.decays == "retnet":
        return 3 * length * length + rank * dim
    rows = min(BLOCK, length)
    return 2 * rank * dim + 3 * rows * rows + rows * rank


def _retnet(batch: int, heads: int, n: int, r: int, d: int, dtype: str) -> tuple[Op, ...]:
    groups, mask = batch * heads, heads * n * n
    every = batch * mask

    def weigh(name: str, elements: int, read: int, operations: int = 1) -> Op:
        return elementwise(name, elements=elements, read=read, operations=operations, dtype=dtype)

    def multiply(name: str, m: int, columns: int, k: int) -> Op:
        return batched_matmul(name, groups=groups, m=m, n=columns, k=k, dtype=dtype)

    return (
        weigh("exponents", _WIDE * mask, 0),
        weigh("powers", mask, _WIDE * mask, 2),
        weigh("lower_triangle", mask, mask),
        weigh("mask_of_sequences", every, mask),
        multiply("scores", n, n, r),
        weigh("scaled_scores", every, every),
        weigh("masked_scores", every, 2 * every),
        multiply("output", n, d, n),
        weigh("weighed_keys", groups * n * r, groups * n * r),
        multiply("state", r, d, n),
    )


def _transnormer(batch: int, heads: int, n: int, r: int, d: int, dtype: str) -> tuple[Op, ...]:
    groups = batch * heads
    mask = elementwise("mask", elements=heads * BLOCK * BLOCK, read=0, operations=2, dtype=dtype)
    blocks, rest = divmod(n, BLOCK)
    whole = _transnormer_block(groups, BLOCK, r, d, dtype)
    return (mask, *whole * blocks, *(_transnormer_block(groups, rest, r, d, dtype) if rest else ()))


def _transnormer_block(groups: int, rows: int, r: int, d: int, dtype: str) -> tuple[Op, ...]:
    def weigh(name: str, elements: int, times_read: int = 1) -> Op:
        total = groups * elements
        return elementwise(name, elements=total, read=times_read * total, operations=1, dtype=dtype)

    def multiply(name: str, m: int, columns: int, k: int) -> Op:
        return batched_matmul(name, groups=groups, m=m, n=columns, k=k, dtype=dtype)

    return (
        weigh("own_queries", rows * r),
        weigh("own_keys", rows * r),
        weigh("own_values", rows * d),
        weigh("weighed_queries", rows * r),
        multiply("read_state", rows, d, r),
        multiply("scores", rows, rows, r),
        weigh("masked_scores", rows * rows),
        multiply("output", rows, d, rows),
        weigh("both", rows * d, 2),
        weigh("weighed_keys", rows * r),
        multiply("new_state", r, d, rows),
        weigh("decay", r * d),
        weigh("state", r * d, 2),
    )
