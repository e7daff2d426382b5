"""Layouts of the collectives' launches, and checks of what each rank's part takes.

programs = min(most programs, ceil(words / block))        threads of a program = block / STORED_AT_ONCE
"""

from dataclasses import dataclass
from typing import Literal

import triton
from torch import Tensor

from simcore.kernels.collectives.memory import Inboxes
from simcore.kernels.decoder.checks import check_patience, check_powers

# What a launch does: send, take, or one after the other. Triton's interpreter runs launches one by one, so
# there all ranks first send, then take.
Half = Literal["both", "send", "take"]
# A thread stores so many neighbouring words at once.
STORED_AT_ONCE = 4
MOST_PROGRAMS = 32


@dataclass(frozen=True, slots=True)
class Layout:
    """Words of a block, warps of a program, and the most programs of a launch."""

    block: int
    warps: int
    programs: int


def layout_for(words: int) -> Layout:
    """Returns the layout for so many words: few threads for few words, since all of a program's warps meet at
    each look.

    >>> layout_for(64), layout_for(2048)
    (Layout(block=128, warps=1, programs=32), Layout(block=1024, warps=8, programs=32))
    """
    block = max(128, min(1024, int(triton.next_power_of_2(words))))
    return Layout(block, block // (32 * STORED_AT_ONCE), MOST_PROGRAMS)


def check_part(
    x: Tensor,
    inboxes: Inboxes,
    rank: int,
    patience: Tensor,
    error: Tensor | None,
    half: str,
) -> None:
    """Raises ValueError naming what does not fit in a rank's part of a collective."""
    if not 0 <= rank < inboxes.ranks:
        raise ValueError(f"rank: of {inboxes.ranks} ranks there is none {rank}")
    if x.device != inboxes.words[rank].device:
        raise ValueError(f"x is on {x.device}, the inbox of rank {rank} on {inboxes.words[rank].device}")
    if half not in ("both", "send", "take"):
        raise ValueError(f"half has to be both, send or take, not {half}")
    check_patience(x, patience, error)


def check_layout(layout: Layout) -> None:
    """Raises ValueError for a layout that cannot be."""
    check_powers(layout, "block", "warps")
    # With each word in one thread all warps see the same words, and leave together.
    if layout.block < 32 * layout.warps or layout.programs < 1:
        raise ValueError(f"layout: {layout} has fewer words of a block than threads, or no program")
