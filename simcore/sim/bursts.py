"""The price of a burst in closed form: k replays of a graph, some of whose sizes grow evenly.

Prices are piecewise linear in a size (rooflines, tables with interpolation), or nearly so on short stretches
(curves between measured points). So on each piece replay i of a burst takes s + g i, and

    work of the first n replays  =  n s + g n (n - 1) / 2

The pieces are found by pricing a few sizes for each power of two: the device model stays a plain function of
an op. A burst of any length then costs a handful of operations.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import copysign, inf, sqrt

from simcore.ops.op import SourceKind
from simcore.sim.contention import Demand

# Price, floor, and memory and arithmetic at the datasheet's rates, all in seconds.
Cost = tuple[float, float, float, float]
NOTHING: Cost = (0.0, 0.0, 0.0, 0.0)
# Demands are rounded to this fraction, so that replays that hardly differ ask the same. With coarser steps,
# streams that ask for a whole resource get up to 1 % more or less than the whole.
DEMAND_STEPS = 512
# A price that bends more often between a size and twice that size is not piecewise linear.
MOST_STRETCHES = 2048
# Prices this close to a straight line, relative to the price, lie on it.
STRAIGHT = 1e-11
# A price with more stretches than FEW in an octave is a curve, such as a curve between measured points: lines
# within CURVED of it, relative to the price, replace it.
FEW, CURVED = 256, 3e-4


def _add(a: Cost, b: Cost) -> Cost:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


def _scaled(a: Cost, factor: float) -> Cost:
    return (a[0] * factor, a[1] * factor, a[2] * factor, a[3] * factor)


class Piece:
    """`count` replays from replay `first` on: the first costs `cost`, each further one `growth` more;
    `before_s`: seconds of work before them."""

    __slots__ = ("before_s", "cost", "count", "first", "growth")

    def __init__(self, first: int, count: int, before_s: float, cost: Cost, growth: Cost) -> None:
        self.first = first
        self.count = count
        self.before_s = before_s
        self.cost = cost
        self.growth = growth

    def work_s(self, replays: int) -> float:
        """Seconds of work of the first `replays` replays of this piece."""
        return replays * self.cost[0] + self.growth[0] * (replays * (replays - 1) / 2.0)

    def floor_s(self) -> float:
        """The least seconds that the replays of this piece can take."""
        return self.count * self.cost[1] + self.growth[1] * (self.count * (self.count - 1) / 2.0)

    def demand_step(self, i: int) -> tuple[int, int]:
        """The demand of replay i of this piece on memory and arithmetic, in steps of 1 / DEMAND_STEPS."""
        cost, growth = self.cost, self.growth
        seconds = cost[0] + i * growth[0]
        if seconds <= 0.0:
            return 0, 0
        return (
            min(DEMAND_STEPS, round(DEMAND_STEPS * (cost[2] + i * growth[2]) / seconds)),
            min(DEMAND_STEPS, round(DEMAND_STEPS * (cost[3] + i * growth[3]) / seconds)),
        )

    def last_like(self, i: int) -> int:
        """The last replay of this piece, from i on, whose demand equals that of replay i."""
        wanted, low, high = self.demand_step(i), i, self.count - 1
        # Each share is a ratio of two straight lines, so it is monotonic.
        guess = min(self._leaves(wanted[0], 2, i), self._leaves(wanted[1], 3, i))
        if guess < high:
            for near in (guess - 1, guess, guess + 1):
                if low < near < high:
                    if self.demand_step(near) == wanted:
                        low = near
                    else:
                        high = near
                        break
        if high == self.count - 1 and self.demand_step(high) == wanted:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self.demand_step(middle) == wanted:
                low = middle
            else:
                high = middle
        return low

    def _leaves(self, step: int, share: int, i: int) -> int:
        """The replay beyond i at which a share leaves its step, roughly; `count` if none."""
        s, g, asked, more = self.cost[0], self.growth[0], self.cost[share], self.growth[share]
        at = (step + copysign(0.5, more * s - asked * g)) / DEMAND_STEPS
        rises = more - at * g
        left = (at * s - asked) / rises if rises else inf
        return int(left) if i <= left < self.count else self.count


UNKNOWN = (0.0, 0.0, Demand(0.0, 0.0), -1)
Shares = tuple[tuple[SourceKind, float], ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources of the price of each replay of a burst: `shares` in seconds; the remainder comes from
    `rest`."""

    shares: Shares = ()
    rest: SourceKind | None = None

    def count(
        self, total_s: float, replays: int, sources: dict[SourceKind, float], longer_s: float = 0.0
    ) -> None:
        """Adds `replays` replays that take `total_s` alone, and `longer_s` more under load, to `sources`,
        seconds by source. What takes longer is among `shares`."""
        if longer_s > 0.0:
            slowed = self.shares or ((self.rest, 1.0),)
            whole_s = sum([seconds for _, seconds in slowed])
            for source, seconds in slowed:
                if source is not None:
                    sources[source] = sources.get(source, 0.0) + longer_s * seconds / whole_s
        if self.rest is not None and len(self.shares) == 1 and self.shares[0][0] == self.rest:
            sources[self.rest] = sources.get(self.rest, 0.0) + total_s
            return
        shares_s = 0.0
        for source, seconds in self.shares:
            shares_s += seconds
            sources[source] = sources.get(source, 0.0) + seconds * replays
        if self.rest is not None:
            sources[self.rest] = sources.get(self.rest, 0.0) + total_s - shares_s * replays


NO_ORIGIN = Origin()


class BurstCost:
    """The work of a burst: pieces in order, whose prices come from `origin`. `launch_s`: host time of a
    launch; `since_s`: when its stream last began to work; `kernels`: kernels in a replay. `arithmetic_s`: the
    seconds of arithmetic of a replay alone, `clocked_s`: those that the card's clock decides, `waiting_s`:
    those of waiting (`power.clock_shares`), all without ops whose sizes grow."""

    __slots__ = (
        "_around",
        "_begins",
        "_longer_s",
        "arithmetic_s",
        "clocked_s",
        "kernels",
        "launch_s",
        "origin",
        "pieces",
        "replays",
        "since_s",
        "total_s",
        "waiting_s",
    )

    def __init__(
        self,
        pieces: list[Piece],
        origin: Origin = NO_ORIGIN,
        arithmetic_s: float = 0.0,
        clocked_s: float = 0.0,
        waiting_s: float = 0.0,
    ) -> None:
        self.pieces = pieces
        self.arithmetic_s = arithmetic_s
        self.clocked_s = clocked_s
        self.waiting_s = waiting_s
        # By how much each replay is longer under load; the last one counts for all that follow.
        self._longer_s: list[float] = []
        last = pieces[-1]
        count = last.count
        self.replays = last.first + count
        self.total_s = last.before_s + (last.cost[0] if count == 1 else last.work_s(count))
        self.origin = origin
        self.launch_s = self.since_s = 0.0
        self.kernels = 0
        self._around = UNKNOWN
        # The first replay of each piece, and the work before each piece.
        self._begins: tuple[list[int], list[float]] | None = None

    def _place(self, number: int, at: float) -> Piece:
        """The piece that contains a replay (`number` 0) or an amount of work (`number` 1)."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces[0]
        if self._begins is None:
            self._begins = [piece.first for piece in pieces], [piece.before_s for piece in pieces]
        return pieces[max(0, bisect_right(self._begins[number], at) - 1)]

    def _piece(self, replay: int) -> Piece:
        return self._place(0, replay)

    def end_s(self, replay: int) -> float:
        """Seconds of work after which a replay ends."""
        piece = self._piece(replay)
        return piece.before_s + piece.work_s(replay + 1 - piece.first)

    def replay_at(self, work_s: float) -> int:
        """The replay that runs after `work_s` of work: the first that ends later, or else the last."""
        piece = self._place(1, work_s)
        inside_s, s, g = work_s - piece.before_s, piece.cost[0], piece.growth[0]
        if s <= 0.0 and g <= 0.0:
            guess = piece.count - 1
        elif abs(g) * piece.count < 1e-9 * s:
            guess = int(inside_s / s)
        else:
            b = s - g / 2.0
            below = b + sqrt(max(0.0, b * b + 2.0 * g * inside_s))
            guess = int(2.0 * inside_s / below) if below > 0.0 else 0
        replay = piece.first + min(max(guess, 0), piece.count - 1)
        while replay > 0 and self.end_s(replay - 1) > work_s:
            replay -= 1
        while replay < self.replays - 1 and self.end_s(replay) <= work_s:
            replay += 1
        return min(replay, self.replays - 1)

    def demand(self, replay: int) -> Demand:
        """The demand of a replay on the device."""
        piece = self._piece(replay)
        i = replay - piece.first
        memory, compute = piece.demand_step(i)
        seconds = piece.cost[0] + i * piece.growth[0]
        if seconds <= 0.0:
            return Demand(0.0, 0.0, 0.0, self.since_s)
        launch, kernels_per_s = min(1.0, self.launch_s / seconds), self.kernels / seconds
        return Demand(memory / DEMAND_STEPS, compute / DEMAND_STEPS, launch, self.since_s, kernels_per_s)

    def next_change(self, replay: int) -> int:
        """The last replay of the same piece, from `replay` on, with the same demand."""
        piece = self._piece(replay)
        return piece.first + piece.last_like(replay - piece.first)

    def demand_at(self, work_s: float) -> tuple[float, Demand]:
        """The demand after `work_s` of work, preceded by the work until which that demand stays."""
        since_s, until_s, demand, last = self._around
        if since_s <= work_s < until_s:
            return until_s, demand
        # Usually the work has just reached `until_s`.
        replay = last + 1 if work_s == until_s and last + 1 < self.replays else self.replay_at(work_s)
        last = self.next_change(replay)
        until_s, demand = self.end_s(last), self.demand(replay)
        self._around = work_s, until_s, demand, last
        return until_s, demand

    def slow(self, factors: list[float]) -> None:
        """Makes what the clock decides of each replay so many times as long; the last factor is of all that
        follow. A slower clock keeps arithmetic as busy; the memory has as much to do in more time."""
        self._around, self._begins = UNKNOWN, None
        self._longer_s = longer = [(factor - 1.0) * self.clocked_s for factor in factors]
        pieces: list[Piece] = []
        before_s = 0.0
        for piece in self.pieces:
            done = 0
            while done < piece.count:
                replay = piece.first + done
                count = 1 if replay < len(longer) - 1 else piece.count - done
                more_s = longer[min(replay, len(longer) - 1)]
                cost, growth = _add(piece.cost, _scaled(piece.growth, done)), piece.growth
                busier = (cost[0] + more_s) / cost[0] if cost[0] > 0.0 else 1.0
                cost = (cost[0] + more_s, cost[1], cost[2], cost[3] * busier)
                growth = (growth[0], growth[1], growth[2], growth[3] * busier)
                pieces.append(Piece(replay, count, before_s, cost, growth))
                before_s += pieces[-1].work_s(count)
                done += count
        self.pieces, self.total_s = pieces, before_s

    @property
    def longer_s(self) -> float:
        """By how much all replays are longer under load."""
        own = self._longer_s
        if not own:
            return 0.0
        return sum(own[: self.replays]) + max(0, self.replays - len(own)) * own[-1]

    @property
    def arithmetic_under_load_s(self) -> float:
        """The seconds of arithmetic of all replays, as long as they take under load."""
        return self._under_load_s(self.arithmetic_s)

    @property
    def others_under_load_s(self) -> float:
        """The seconds of all replays under load that are neither arithmetic nor waiting."""
        return max(0.0, self.total_s - self._under_load_s(self.arithmetic_s + self.waiting_s))

    def _under_load_s(self, alone_s: float) -> float:
        share = alone_s / self.clocked_s if self.clocked_s > 0.0 else 0.0
        return alone_s * self.replays + share * self.longer_s

    def truncate(self, replays: int) -> None:
        """Keeps only the first `replays` replays."""
        self._around, self._begins = UNKNOWN, None
        if replays >= self.replays:
            return
        if replays == 0:
            self.pieces, self.replays, self.total_s = [Piece(0, 0, 0.0, NOTHING, NOTHING)], 0, 0.0
            return
        pieces = [piece for piece in self.pieces if piece.first < replays]
        last = pieces[-1]
        pieces[-1] = Piece(last.first, replays - last.first, last.before_s, last.cost, last.growth)
        self.pieces, self.replays = pieces, replays
        self.total_s = self.end_s(replays - 1)

    def floor_s(self) -> float:
        """The least seconds that all replays can take."""
        if self.replays == 1:
            return self.pieces[0].cost[1]
        return sum([piece.floor_s() for piece in self.pieces])


@dataclass(slots=True)
class Straight:
    """A stretch of sizes on which a cost grows evenly: `cost` at `start`, `slope` more per unit of size."""

    start: int
    end: int
    cost: Cost
    slope: Cost

    def beside(self, fixed: Cost) -> "Straight":
        """The same stretch plus a cost that does not grow."""
        return Straight(self.start, self.end, _add(fixed, self.cost), self.slope)

    def replays(self, size: int, by: int) -> int:
        """How many replays stay on this stretch if the size grows by `by`, not 0, in each."""
        return (self.end - size) // by + 1 if by > 0 else (size - self.start) // -by + 1

    def piece(self, size: int, by: int, replays: int) -> Piece:
        """The piece of `replays` replays, all on this stretch, whose size grows by `by` in each."""
        beyond = size - self.start
        (c0, c1, c2, c3), (m0, m1, m2, m3) = self.cost, self.slope
        growth = NOTHING if replays == 1 else (by * m0, by * m1, by * m2, by * m3)
        cost = (c0 + beyond * m0, c1 + beyond * m1, c2 + beyond * m2, c3 + beyond * m3)
        return Piece(0, replays, 0.0, cost, growth)


@dataclass(slots=True)
class Bends:
    """Whether prices were found to be curves; once `settled`, a price no longer decides it for later ones."""

    curved: bool = False
    settled: bool = False


# (octave, curved) -> the stretches of a cost in that octave: exact lines, or if `curved` lines close to it.
# None if there are too many lines.
Lines = Callable[[int, bool], list[Straight] | None]


@dataclass(slots=True)
class Curve:
    """A cost as a piecewise linear function of one size, computed when read, an octave at a time: the sizes
    with the same number of binary digits. `bends`: whether prices like this one are curves; such prices share
    the object."""

    lines: Lines
    bends: Bends = field(default_factory=Bends)
    octaves: dict[int, tuple[list[int], list[Straight]]] = field(default_factory=dict)

    def at(self, size: int) -> Straight:
        """The stretch that contains a size. Raises ValueError if the price bends too often."""
        octave = size.bit_length()
        found = self.octaves.get(octave)
        if found is None:
            stretches = self._octave(octave)
            found = self.octaves[octave] = ([s.start for s in stretches], stretches)
        starts, stretches = found
        return stretches[0] if len(starts) == 1 else stretches[bisect_right(starts, size) - 1]

    def _octave(self, octave: int) -> list[Straight]:
        stretches = None if self.bends.curved else self.lines(octave, False)
        if not self.bends.settled:
            self.bends.curved = stretches is None
        stretches = self.lines(octave, True) if stretches is None else stretches
        if stretches is None:
            low, high = _first_and_last(octave)
            raise ValueError(f"a price bends over {MOST_STRETCHES} times between {low} and {high}")
        return stretches


def lines(cost: Callable[[int], Cost], octave: int, curved: bool) -> list[Straight] | None:
    """The stretches of a cost in an octave, see Lines.

    A stretch counts as straight if its ends and three points between them lie on a line. That finds every
    bend of a roofline, because it is convex; it misses a bump of a table between two of the five points.
    """
    within, most = (CURVED, MOST_STRETCHES) if curved else (STRAIGHT, FEW)
    found = list(islice(_stretches(cost, *_first_and_last(octave), within), most + 1))
    return found if len(found) <= most else None


def _stretches(cost: Callable[[int], Cost], low: int, high: int, within: float) -> Iterator[Straight]:
    # What is left, each with the costs at both ends; the next one last.
    left = [(low, high, cost(low), cost(high))]
    while left:
        low, high, first, last = left.pop()
        if low == high:
            yield Straight(low, high, first, NOTHING)
            continue
        slope = _scaled(_add(last, _scaled(first, -1.0)), 1.0 / (high - low))
        if _is_straight(cost, low, high, first, slope, within):
            yield Straight(low, high, first, slope)
            continue
        middle = (low + high) // 2
        left.append((middle + 1, high, cost(middle + 1), last))
        left.append((low, middle, first, cost(middle)))


def _is_straight(
    cost: Callable[[int], Cost], low: int, high: int, first: Cost, slope: Cost, within: float
) -> bool:
    """Whether three points between two lie on the line between these."""
    for i in (1, 2, 3):
        x = low + (high - low) * i // 4
        if low < x < high and not _close(cost(x), _add(first, _scaled(slope, x - low)), within):
            return False
    return True


def _first_and_last(octave: int) -> tuple[int, int]:
    """The least and the largest size with `octave` binary digits."""
    return 1 << octave >> 1, (1 << octave) - 1


def _close(a: Cost, b: Cost, within: float) -> bool:
    return (
        abs(a[0] - b[0]) <= within * max(abs(a[0]), abs(b[0]))
        and abs(a[1] - b[1]) <= within * max(abs(a[1]), abs(b[1]))
        and abs(a[2] - b[2]) <= within * max(abs(a[2]), abs(b[2]))
        and abs(a[3] - b[3]) <= within * max(abs(a[3]), abs(b[3]))
    )


def pieces_of(
    fixed: Cost,
    curves: list[tuple[Curve, str, SourceKind]],
    sizes: Mapping[str, int],
    advance: Mapping[str, int],
    replays: int,
) -> list[Piece]:
    """The pieces of a burst, from the stretches of its curves and a cost that does not grow."""
    pieces: list[Piece] = []
    done, before_s = 0, 0.0
    while done < replays:
        s, floor, memory, compute = fixed
        gs = gf = gm = gc = 0.0
        count = replays - done
        for curve, name, _ in curves:
            by = advance[name]
            size = sizes[name] + done * by
            stretch = curve.at(size)
            beyond = size - stretch.start
            (c0, c1, c2, c3), (m0, m1, m2, m3) = stretch.cost, stretch.slope
            s, floor = s + c0 + beyond * m0, floor + c1 + beyond * m1
            memory, compute = memory + c2 + beyond * m2, compute + c3 + beyond * m3
            gs, gf, gm, gc = gs + by * m0, gf + by * m1, gm + by * m2, gc + by * m3
            count = min(count, stretch.replays(size, by))
        piece = Piece(done, count, before_s, (s, floor, memory, compute), (gs, gf, gm, gc))
        pieces.append(piece)
        before_s += piece.work_s(count)
        done += count
    return pieces
