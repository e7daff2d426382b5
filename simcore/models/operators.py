"""The methods of the two operator studies: their names, labels and ops.

A method of linear attention is one of simcore.ops.linear_attention, or FleetAttention with non-atomic sums
over the rank (LeetDecoding, appendix D: FA_modify), which may lose some of them: the same work by other
kernels.
"""

from collections.abc import Mapping
from dataclasses import replace

from simcore.ops import flash_decoding as ops_flash_decoding
from simcore.ops import linear_attention as ops_linear_attention
from simcore.ops.op import Op

NOT_ATOMIC = "fleet_modify"
LINEAR_ATTENTION = (*ops_linear_attention.METHODS, *ops_linear_attention.TORCH_METHODS, NOT_ATOMIC)
DECODE_ATTENTION = ops_flash_decoding.METHODS
LABELS: Mapping[str, str] = {
    "vanilla": "vanilla",
    "causal_dot_product": "causal dot product",
    "block_based": "block-based",
    "recursion": "recursion",
    "lightning": "Lightning Attention 2",
    "fleet": "FleetAttention",
    "causal_dot_product_torch": "causal dot product (torch)",
    "lightning_torch": "Lightning Attention 2 (torch)",
    "fleet_torch": "FleetAttention (torch)",
    NOT_ATOMIC: "FleetAttention, not atomic",
    **ops_flash_decoding.LABELS,
}


def linear_attention_op(
    method: str,
    *,
    batch: int,
    heads: int,
    length: int,
    rank: int,
    dim: int,
    dtype: str,
    decay: bool,
    mask_by_rows: bool,
    states: bool = True,
) -> Op:
    """The op of one of LINEAR_ATTENTION, at its default block. Raises ValueError for another name."""
    op = ops_linear_attention.linear_attention(
        "fleet" if method == NOT_ATOMIC else method,
        batch=batch,
        heads=heads,
        length=length,
        rank=rank,
        dim=dim,
        dtype=dtype,
        decay=decay,
        mask_by_rows=mask_by_rows,
        states=states,
    )
    # An extra dimension distinguishes its price from that of the atomic method.
    return replace(op, shape=(*op.shape, ("atomic", 0))) if method == NOT_ATOMIC else op
