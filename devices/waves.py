"""How far a kernel fills a device: its blocks run in waves, as many at a time as there are processors.

    waves   = ceil(blocks / processors)
    stretch = waves * processors / blocks

A model, no bound: if a block gets one processor's share of a datasheet rate, a kernel of equal blocks takes

    waves * (floor / blocks) / (1 / processors) = floor * stretch

16 blocks on 108 processors leave 92 of them idle: their stretch is 6.75. An op that says in its shape how
many blocks it has is priced with it; the law that no price is below the datasheet's floor keeps the plain
one.
"""

import math

from simcore.ops.op import Op

# The dimension of an op's shape that says how many blocks its kernel has.
BLOCKS = "blocks"


def waves(blocks: int, processors: int) -> int:
    """How many rounds it takes until every block has had a processor.

    >>> waves(256, 108)
    3
    """
    return math.ceil(blocks / processors)


def stretch(op: Op, processors: int) -> float:
    """How many times its floor an op takes, by this model; 1 where it does not say how many blocks it has."""
    blocks = next((op[name] for name, _ in op.shape if name == BLOCKS), 0)
    return waves(blocks, processors) * processors / blocks if blocks else 1.0
