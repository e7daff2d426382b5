"""Flover's memory shuffle: which slots to move so that the slots in use lie side by side again.

Kernels work on one contiguous region of slots, including finished requests in between. With k slots in use,
that region is shortest, k slots, if all of them lie in a window of k:

    moves(offset) = k - (slots in use within [offset, offset + k))
    offset        = the lowest offset with the fewest moves                (one sliding window, O(slots))

Flover (Yao et al. 2023), Algorithm 3. As printed it does not do that: `window_cost` starts at 0 instead of
the count of the first k slots, and the loop starts at i = k, whose window has offset 1. So the window at
offset 0 is no candidate, unless every slot is in use, and all costs are too high by the slots in use within
it (by the same number each, so the best of the others is found). If offset 0 needs the fewest moves, the
algorithm as printed makes too many: slots 1 1 0 0, in place already, go to offset 1 at the cost of a copy;
with no slot in use the offset is 1. Here the window at offset 0 is the first candidate. Whenever this code
chooses another offset than 0, the two agree.
"""

from collections.abc import Sequence

__all__ = ["shuffle", "window"]


def window(used: Sequence[bool]) -> tuple[int, int]:
    """(offset, size) of the region from the first to the last slot in use; (0, 0) if none is in use.

    >>> window([False, True, False, True])
    (1, 3)
    """
    slots = [slot for slot, taken in enumerate(used) if taken]
    return (slots[0], slots[-1] + 1 - slots[0]) if slots else (0, 0)


def shuffle(used: Sequence[bool]) -> tuple[int, list[tuple[int, int]]]:
    """The offset of the new contiguous region, and the fewest moves (from slot, to slot) that make it. Slots
    in use outside the region go into its free slots, both in ascending order; slots inside stay.

    >>> shuffle([True, False, False, True, True, False, True])
    (3, [(0, 5)])
    """
    size = sum(used)
    offset = _fullest(used, size)
    region = range(offset, offset + size)
    outside = [slot for slot, taken in enumerate(used) if taken and slot not in region]
    free = [slot for slot in region if not used[slot]]
    return offset, list(zip(outside, free, strict=True))


def _fullest(used: Sequence[bool], size: int) -> int:
    """The lowest offset of a window of `size` slots with the most in use."""
    best, held = 0, sum(used[:size])
    most = held
    for end in range(size, len(used)):
        held += used[end] - used[end - size]
        if held > most:
            best, most = end - size + 1, held
    return best
