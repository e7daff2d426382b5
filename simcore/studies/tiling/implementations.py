"""Implementations of the tiles of a generation: one for all sides, or the cheapest for each side.

    Hybrid, for every side U:   argmin over implementations of the sum of prices of the run's tiles of side U

(Flash Inference, section 4.2, which uses measured times instead of prices.) If the length is no power of two,
the last tile of a side may have fewer outputs than the others; the choice prices it with its own outputs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simcore.models.long_convolution import half_length, tile_side
from simcore.ops import convolution as conv
from simcore.ops.convolution import IMPLEMENTATIONS, Implementation
from simcore.ops.op import Op, Price, Pricer

Choice = tuple[tuple[int, Implementation], ...]


def sides(generated: int) -> list[int]:
    """Returns the sides of the tiles of `generated` positions, ascending.

    >>> sides(8), sides(9), sides(1)
    ([1, 2, 4], [1, 2, 4, 8], [])
    """
    return [1 << i for i in range(half_length(generated).bit_length())] if generated > 1 else []


def tile_counts(generated: int) -> dict[int, Counter[int]]:
    """Returns the number of tiles by side and by number of outputs.

    >>> tile_counts(7)
    {1: Counter({1: 3}), 2: Counter({2: 1, 1: 1}), 4: Counter({3: 1})}
    """
    found: dict[int, Counter[int]] = {}
    for side in sides(generated):
        # The tiles of a side are at its odd multiples.
        number = (generated - 1 + side) // (2 * side)
        last = (2 * number - 1) * side
        assert tile_side(last) == side
        found[side] = Counter({side: number - 1}) if number > 1 else Counter()
        found[side][min(side, generated - last)] += 1
    return found


@dataclass(frozen=True, slots=True)
class Lanes:
    """The layers of a tile: `together` layers in one launch, `launches` such launches."""

    together: int
    launches: int
    batch: int
    channels: int
    dtype: str

    def tile(self, implementation: Implementation, side: int, outputs: int) -> Op:
        """Returns the tile of one launch."""
        return conv.tile(
            implementation,
            layers=self.together,
            batch=self.batch,
            channels=self.channels,
            side=side,
            outputs=outputs,
            dtype=self.dtype,
        )


def cheapest(lanes: Mapping[int, Lanes], generated: int, price: Pricer) -> Choice:
    """Returns Hybrid's choice for each side, the first of equals; `lanes`: the launches of a side's tiles."""
    found = []
    for side, counts in tile_counts(generated).items():
        cost = {
            name: sum(
                n * price(lanes[side].tile(name, side, outputs)).seconds for outputs, n in counts.items()
            )
            for name in IMPLEMENTATIONS
        }
        found.append((side, min(IMPLEMENTATIONS, key=lambda name: cost[name])))
    return tuple(found)


def tile_prices(lanes: Lanes, side: int, price: Pricer) -> Iterator[tuple[Implementation, Price]]:
    """Yields the price of a whole tile of a side by each implementation."""
    for name in IMPLEMENTATIONS:
        yield name, price(lanes.tile(name, side, side))


def ranges(choice: Choice) -> list[tuple[Implementation, int, int]]:
    """Returns a choice as runs of sides with one implementation: (implementation, first side, last side).

    >>> ranges(((1, "conv"), (2, "conv"), (4, "fft")))
    [('conv', 1, 2), ('fft', 4, 4)]
    """
    found: list[tuple[Implementation, int, int]] = []
    for side, name in choice:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], side)
        else:
            found.append((name, side, side))
    return found
