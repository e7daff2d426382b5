"""The clock of a card at its power cap: under load ops take longer than alone, most where arithmetic bounds.

    a, b       shares of the time with arithmetic, and with other work: exponential moving averages, a moment
               t ago weighs exp(-t / over_s)
    factor  =  max(1, (a A / (1 - b B - (1 - a - b) I))^(1/3))

A, B and I are the powers of arithmetic at the full clock, of other work and of an idle card, in shares of the
power cap. A is of products that reach the share BUSY of peak arithmetic, B of products that reach the share
MOVING of the memory's peak; what does less in its time takes less power. So an op that arithmetic bounds
counts as arithmetic for its own share of the peak over BUSY, and for the rest of its time as other work. Any
other op counts as other work for its own share of the peak that bounds it over MOVING, and for the rest of
its time as waiting, which takes the power of an idle card; what it multiplies beside its traffic costs
nothing. Collectives and ops in one launch with them are other work throughout. A card over its cap throttles
its clock. Dynamic power grows with the third power of the clock, for the voltage follows it; so arithmetic
slows down by the cube root of its power over what the other ops leave.
Of other ops, what they take beyond their traffic at the memory's full rate is slowed down as much (starts,
waits, sums), and the traffic is not: the memory has a clock of its own. Attention over a cache is all traffic
here: what it takes beyond that was not measured by the clock. Neither it nor linear attention waits: both
multiply meanwhile. Shares are at most 1 in all: what several streams do at once beyond that costs no power
here.

Inside a launch of T seconds, a and b move from the past's to its own. Their means over the launch count:

    a  =  x + (a before - x) over_s / T (1 - exp(-T / over_s))         x = its own share of arithmetic

The constants are fitted to how much longer products take beside other work
(`simcore.validate.calibration.cuda_power`); power itself is not measured. BUSY and MOVING are of an H200,
whose profile is the one with the law; that power goes with the rates was seen in services, not in products of
several rates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp

from simcore.ops.op import DTYPE_BYTES, Floor, Op, multiplied_as

# Dynamic power over clock: clock times voltage squared.
EXPONENT = 3.0
# Share of peak, by number format, that products reach at the full clock if they take the power A. bf16: gate
# and up of 2,048 rows, which A is measured of (`validate.calibration.cuda_power`), 618 us of an H200 at rest.
# fp8: the mean of four products as engines run them, by what they reach at rest and how much longer they take
# under load (`validate.accuracy.fp8_products`). fp16, and int8, which has the rate of fp8, were not measured.
BUSY = {"bf16": 0.787, "fp16": 0.787, "fp8": 0.811, "int8": 0.811}
# The same of traffic, of the products beside them that B is measured of: 32 rows, 58.3 us.
MOVING = 0.845
# The same of all formats whose products slow down, by what they are multiplied as.
BUSY_OF = {name: BUSY[as_] for name in DTYPE_BYTES if (as_ := multiplied_as(name)) in BUSY}
# What is left for arithmetic at least, in shares of the cap, so that no clock is 0.
LEAST = 0.05
# Replays of a burst with arithmetic until their times have settled: later ones take as long as the last.
MOST_REPLAYS, SETTLED = 256, 1e-9
OVER_A_CACHE = frozenset({"decode_attention", "paged_attention", "speculative_attention"})
LINEAR = "linear_attention"

# Seconds of a replay alone: of arithmetic, those that the clock decides, of waiting, and all.
Alone = tuple[float, float, float, float]
# When a launch that still runs began, and its seconds of arithmetic and of other work so far.
Begun = tuple[float, float, float]
# Shares of the time of an op: arithmetic, what the clock decides, waiting.
Shares = tuple[float, float, float]


def clock_shares(
    op: Op, seconds: float, floor: Floor, of_part: Callable[[Op], tuple[float, Floor]]
) -> Shares:
    """The share of an op's time that counts as arithmetic, the share that the clock of the card decides, all
    where arithmetic bounds it, else the time beyond its floor, and the share that counts as waiting. Of a
    fused op that crosses no link by its parts, which are of one format. `of_part`: the seconds of a part, and
    its floor.

    >>> from simcore.ops.op import norm
    >>> op = norm("norm", tokens=1, hidden=8, dtype="bf16")
    >>> floor = Floor(0.0, 0.845 * 2e-6, 0.0)
    >>> [round(share, 4) for share in clock_shares(op, 4e-6, floor, lambda part: (0.0, floor))]
    [0.0, 0.5775, 0.5]
    """
    if op.axis or not op.parts or op.dtype not in BUSY_OF:
        return _own_shares(op, seconds, floor)
    whole_s = arithmetic_s = clocked_s = waiting_s = 0.0
    known: dict[int, tuple[float, Shares]] = {}
    for part in op.parts:
        if id(part) not in known:
            part_s, least = of_part(part)
            known[id(part)] = part_s, _own_shares(part, part_s, least)
        part_s, shares = known[id(part)]
        whole_s, arithmetic_s = whole_s + part_s, arithmetic_s + shares[0] * part_s
        clocked_s, waiting_s = clocked_s + shares[1] * part_s, waiting_s + shares[2] * part_s
    if whole_s <= 0.0:
        return 0.0, 0.0, 0.0
    return arithmetic_s / whole_s, clocked_s / whole_s, waiting_s / whole_s


def _own_shares(op: Op, seconds: float, floor: Floor) -> Shares:
    """`clock_shares` of an op as a whole; what crosses a link has no more than its arithmetic."""
    if floor.compute_s > floor.memory_s and op.dtype in BUSY_OF:
        return min(1.0, floor.compute_s / (BUSY_OF[op.dtype] * seconds)) if seconds > 0.0 else 0.0, 1.0, 0.0
    if op.axis or op.parts or op.kind in OVER_A_CACHE or seconds <= 0.0:
        return 0.0, 0.0, 0.0
    moving = floor.seconds / seconds
    waiting = 0.0 if op.kind.startswith(LINEAR) else max(0.0, 1.0 - moving / MOVING)
    return 0.0, max(0.0, 1.0 - moving), waiting


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """The constants of the law above; powers in shares of the limit, `over_s` in seconds."""

    arithmetic: float
    others: float
    idle: float
    over_s: float

    def factor(self, arithmetic: float, others: float) -> float:
        """How many times as long arithmetic takes if it has this share of the time, and other ops that one.

        >>> limit = PowerLimit(arithmetic=1.5, others=0.8, idle=0.2, over_s=0.05)
        >>> limit.factor(0.1, 0.9), round(limit.factor(1.0, 0.0) ** 3, 6)
        (1.0, 1.5)
        """
        others = min(others, 1.0 - arithmetic)
        left = 1.0 - others * self.others - max(0.0, 1.0 - arithmetic - others) * self.idle
        wanted = arithmetic * self.arithmetic
        return 1.0 if wanted <= left else max(1.0, float((wanted / max(LEAST, left)) ** (1.0 / EXPONENT)))

    def lower(self, times: float) -> "PowerLimit":
        """Returns the law under a cap that is so many times lower."""
        return PowerLimit(times * self.arithmetic, times * self.others, times * self.idle, self.over_s)


class Load:
    """What a device has done lately."""

    __slots__ = ("_arithmetic", "_at_s", "_limit", "_others")

    def __init__(self, limit: PowerLimit) -> None:
        self._limit = limit
        # Moving averages at `_at_s`.
        self._arithmetic = self._others = self._at_s = 0.0

    def is_cool(self, at_s: float, running: Sequence[Begun] = ()) -> bool:
        """Whether the clock stays at its full rate for what begins at `at_s` and has no arithmetic."""
        limit, arithmetic = self._limit, self._shares(at_s, running)[0]
        most = max(limit.others, limit.idle)
        return max(most, arithmetic * limit.arithmetic + (1.0 - arithmetic) * most) <= 1.0

    def factors(self, parts: Iterable[Alone], at_s: float, running: Sequence[Begun] = ()) -> list[float]:
        """How many times as long those seconds take that the clock decides, of the replays of a launch that
        begins at `at_s`. `running`: launches that run at `at_s`. Ends early once replays take equally long.
        """
        over_s, limit = self._limit.over_s, self._limit
        arithmetic, others = self._shares(at_s, running)
        found: list[float] = []
        for arithmetic_s, clocked_s, waiting_s, total_s in parts:
            if total_s <= 0.0:
                found.append(1.0)
                continue
            own, other = _shares_of(arithmetic_s, total_s - arithmetic_s - waiting_s, total_s)
            weight = over_s / total_s * (1.0 - exp(-total_s / over_s))
            factor = limit.factor(own + (arithmetic - own) * weight, other + (others - other) * weight)
            found.append(factor)
            if arithmetic_s <= 0.0 and factor == 1.0 and limit.others <= 1.0:
                # What went before fades, and nothing of its own takes the cap.
                break
            took_s = total_s + (factor - 1.0) * clocked_s
            others_s = took_s - factor * (arithmetic_s + waiting_s)
            own, other = _shares_of(factor * arithmetic_s, others_s, took_s)
            fades = exp(-took_s / over_s)
            before = arithmetic
            arithmetic, others = own + (arithmetic - own) * fades, other + (others - other) * fades
            if (len(found) >= MOST_REPLAYS and arithmetic_s > 0.0) or abs(arithmetic - before) < SETTLED:
                break
        return found

    def add(self, arithmetic_s: float, others_s: float, begun_s: float, end_s: float) -> None:
        """Adds a launch that has ended, by its seconds of arithmetic under load and of other work: beside
        others it takes longer than both and its waiting."""
        if end_s > begun_s:
            self._arithmetic, self._others = self._shares(end_s, ((begun_s, arithmetic_s, others_s),))
            self._at_s = max(self._at_s, end_s)

    def _shares(self, at_s: float, running: Sequence[Begun]) -> tuple[float, float]:
        """The moving averages at `at_s`, with launches that run until then; launches beside each other add
        up."""
        over_s = self._limit.over_s
        fades = exp(-max(0.0, at_s - self._at_s) / over_s)
        arithmetic, others = self._arithmetic * fades, self._others * fades
        for begun_s, arithmetic_s, others_s in running:
            took_s = at_s - begun_s
            if took_s > 0.0:
                own, other = _shares_of(arithmetic_s, others_s, took_s)
                weight = 1.0 - exp(-took_s / over_s)
                arithmetic, others = arithmetic + own * weight, others + other * weight
        return min(1.0, arithmetic), min(1.0, others)


def _shares_of(arithmetic_s: float, others_s: float, seconds: float) -> tuple[float, float]:
    """The shares of arithmetic and of other work in a launch of so many seconds."""
    arithmetic = min(1.0, arithmetic_s / seconds)
    return arithmetic, min(1.0 - arithmetic, max(0.0, others_s / seconds))
