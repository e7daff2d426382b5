"""How well a kernel fills a device: its blocks run in waves, one block per processor at a time.

    waves   = ceil(blocks / processors)
    stretch = waves * processors / blocks

This is a model, not a bound: if a block gets one processor's share of a datasheet rate, a kernel of equal
blocks takes

    waves * (floor / blocks) / (1 / processors) = floor * stretch

16 blocks on 108 processors leave 92 of them idle: their stretch is 6.75. An op with the number of blocks in
its shape is priced with the stretch; the law that no price is below the datasheet's floor uses the plain
floor.
"""

import math

from simcore.ops.op import Op

# The dimension of an op's shape with the number of its kernel's blocks.
BLOCKS = "blocks"


def waves(blocks: int, processors: int) -> int:
    """Returns the number of waves until every block has had a processor.

    >>> waves(256, 108)
    3
    """
    return math.ceil(blocks / processors)


def stretch(op: Op, processors: int) -> float:
    """Returns an op's time over its floor by this model; 1 if its shape gives no number of blocks."""
    blocks = next((op[name] for name, _ in op.shape if name == BLOCKS), 0)
    return waves(blocks, processors) * processors / blocks if blocks else 1.0
