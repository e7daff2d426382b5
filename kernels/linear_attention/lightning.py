"""Lightning Attention 2 (Qin et al. 2024, section 3.2): the masked product inside a block, and between blocks
a state that stays on chip.

On a GPU it is one kernel a head, whose loop over blocks is the loop of the block-based method; in plain torch
nothing stays on chip, and the two are one algorithm with different blocks.
"""

from torch import Tensor

from simcore.kernels.linear_attention.block_based import block_based
from simcore.kernels.linear_attention.terms import Result
from simcore.ops.op import Op


def lightning(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it; blocks of op["block"] rows."""
    return block_based(op, q, k, v, decay, state)
