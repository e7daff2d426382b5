"""The kernels by which a card runs ops: those of the table, but some as captured graphs run them: rows,
columns and tiles of long convolutions at a position, and linear attention of prompts with lengths, that
are read on the card.

Prices of a card are times of these, and they are compiled ahead of its runs.
"""

from collections.abc import Mapping

from simcore.kernels.kernel import Kernel
from simcore.kernels.linear_attention.layer import ON_A_CARD
from simcore.kernels.long_convolution.placed_tiles import PLACED
from simcore.kernels.table import TABLE


def _placed(kind: str, kernel: Kernel) -> Kernel:
    return kernel._replace(run=PLACED[kind].run, inputs=PLACED[kind].inputs) if kind in PLACED else kernel


ON_CARDS: Mapping[str, Kernel] = {
    **{kind: _placed(kind, kernel) for kind, kernel in TABLE.items()},
    **ON_A_CARD,
}
# Of which results are held against a reference: those of the table take the same tensors as their references,
# those at a position do not.
HELD: Mapping[str, Kernel] = {**TABLE, **ON_A_CARD}
