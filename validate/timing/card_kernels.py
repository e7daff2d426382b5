"""The kernels by which a card runs ops: those of the table, but rows, columns and tiles of long convolutions
as captured graphs run them, at a position that they read on the card.

Prices of a card are times of these, and they are compiled ahead of its runs.
"""

from collections.abc import Mapping

from simcore.kernels.kernel import Kernel
from simcore.kernels.long_convolution.placed_tiles import PLACED
from simcore.kernels.table import TABLE


def _placed(kind: str, kernel: Kernel) -> Kernel:
    return kernel._replace(run=PLACED[kind].run, inputs=PLACED[kind].inputs) if kind in PLACED else kernel


ON_CARDS: Mapping[str, Kernel] = {kind: _placed(kind, kernel) for kind, kernel in TABLE.items()}
