"""Shared by all studies: result rows, the search for a crossing, and the outcome of a run.

crossing   = an argument at which a difference changes its sign, by bisection between two
             neighbours of a grid with different signs, to within 1 %
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar

from simcore.machine.trace import Trace
from simcore.ops.op import SourceKind
from simcore.studies.columns import COLUMNS, OF_FIGURE, WHOLE_RUN

# Shares of the device time from which on unmeasured or extrapolated prices cause a warning.
MOST_UNMEASURED, MOST_EXTRAPOLATED = 0.5, 0.05

# The source of prices by the datasheet alone.
BY_DATASHEET: SourceKind = "roofline"
# (current work, count done, total)
Progress = Callable[[str, int, int], None]
R = TypeVar("R")
# Bisection stops when the bracket is this narrow, relative to its place.
PRECISION = 1e-2
# Distance of an evaluated argument from where a line crosses zero, relative to that place.
MARGIN = PRECISION / 32.0


@dataclass(frozen=True, slots=True)
class Axes:
    """The case of a study that a figure is of; `COLUMNS` describe the fields."""

    strategy: str
    label: str
    ranks: int
    groups: int
    context_tokens: int | None
    batch: int
    hit_rate: float | None = None
    device: str = ""

    @property
    def devices(self) -> int:
        """Devices that the strategy takes."""
        return self.ranks * self.groups


@dataclass(frozen=True, slots=True)
class ServingAxes:
    """The case of a serving study that a figure is of; `COLUMNS` describe the fields. `arriving`: the unit of
    the rate, requests or, if requests are turns, sessions; `ranks`: None where servers differ in them."""

    strategy: str
    label: str
    devices: int
    ranks: int | None
    requests: int
    rate_per_s: float | None
    prompt_tokens: float
    output_tokens: float
    device: str = ""
    arriving: str = "requests"


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """The case of a study of single operators that a figure is of; `COLUMNS` describe the fields. Decode
    attention has `kv_heads`, linear attention `rank` and `decay`."""

    strategy: str
    label: str
    batch: int
    heads: int
    length: int | None
    dim: int
    kv_heads: int | None = None
    rank: int | None = None
    decay: int | None = None
    rival: str = ""
    devices: int = 1
    device: str = ""

    @property
    def q_heads(self) -> int:
        """Decode attention's name for `heads`."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Decode attention's name for `dim`."""
        return self.dim

    @property
    def context_tokens(self) -> int | None:
        """Decode attention's name for `length`."""
        return self.length


@dataclass(frozen=True, slots=True)
class TilingAxes:
    """The case of a tiling study that a figure is of; `COLUMNS` describe the fields."""

    strategy: str
    label: str
    layers: int
    channels: int
    block: Literal["mlp", "gate"]
    tokens: int
    prompt_tokens: int
    batch: int
    devices: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a study, a line of results.csv. If the value is None, `source` gives the reason."""

    axes: Axes | ServingAxes | OperatorAxes | TilingAxes
    metric: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    source: str = ""
    op_kind: str = ""


# Metric that marks a case as not comparable with the others at its place: see `Outcome.unranked`.
NOT_RANKED = "not_ranked"


def of_whole_runs(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows with figures of whole runs, under the plain names, instead of figures of the measured
    window. Published figures are compared with these: benchmark clients include warm-up and drain."""
    rows = list(rows)
    whole = {row.metric.removesuffix(WHOLE_RUN) for row in rows if row.metric.endswith(WHOLE_RUN)}
    renamed = [
        replace(row, metric=row.metric.removesuffix(WHOLE_RUN)) for row in rows if row.metric not in whole
    ]
    return [row for row in renamed if not row.metric.startswith(("window_", "offered_"))]


# Columns of the figure itself; the others identify its case.
FIGURE = tuple(OF_FIGURE)


def flat(study: str, row: Row) -> dict[str, Any]:
    """Returns a row with the columns of results.csv."""
    own = {name: value for name, value in asdict(row).items() if name != "axes"}
    values = {"study": study, **asdict(row.axes), "devices": row.axes.devices, **own}
    return {name: values[name] if name in values else getattr(row.axes, name) for name in COLUMNS[study]}


@dataclass(frozen=True, slots=True)
class Standing:
    """The best result of one device at one place of a study, by which devices are ranked. `at`: the place in
    words; `load`: orders the places of the study, heavier ones higher; `label`: the best strategy there;
    `figure`: its result, in words; `rank`: less is better; `seconds`: the time that is ranked; `enough`:
    whether the SLOs are met; `where`: the place by columns of results.csv."""

    at: str
    load: tuple[float, ...]
    label: str
    figure: str
    rank: tuple[float, ...]
    seconds: float | None
    enough: bool = True
    where: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """The results of a study, before they are written.

    `trace` is of the run on the timeline, `trace_title` its case in words; `sources` the share of predicted
    device time by source of its price; `tables` the columns of each Parquet file, by its name; `slo` the
    SLOs; `standings` the best at each place, harder places later; `unranked` the labels that cannot be ranked
    with the others at any place, because their prices rest on another basis (rows NOT_RANKED mark single
    places); `best` the label that the answer is about, if the answer words it differently, and `best_at` its
    place, by columns of results.csv.
    """

    rows: list[Row]
    answer: str
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    baseline: str = ""
    hits: list[str] = field(default_factory=list)
    sources: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    slo: dict[str, float | None] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    trace_title: str = ""
    standings: list[Standing] = field(default_factory=list)
    unranked: list[str] = field(default_factory=list)
    best: str = ""
    best_at: Mapping[str, float | None] = field(default_factory=dict)

    def ranked(self, metric: str) -> list[Row]:
        """Returns the rows of a metric, except cases that cannot be ranked with others at their places."""
        out, labels = {row.axes for row in self.rows if row.metric == NOT_RANKED}, {*self.unranked}
        return [
            row
            for row in self.rows
            if row.metric == metric and row.axes.label not in labels and row.axes not in out
        ]


def on_device(outcome: Outcome, device: str) -> Outcome:
    """Puts the device into the axes of all rows, in place, and returns the outcome."""
    outcome.rows = [replace(row, axes=replace(row.axes, device=device)) for row in outcome.rows]
    return outcome


class Study(Protocol):
    """A scenario put together, as the command line runs it for every study. `laws`: names of the laws that it
    checks besides `simcore.machine.laws`."""

    @property
    def laws(self) -> tuple[str, ...]:
        """See above."""

    def run(self, progress: Progress) -> Outcome:
        """Runs all cases. Raises InputError if none can run."""

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """Returns the launches of each strategy, line by line, as the machine `record` prints them."""

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Compares predictions with published figures. Returns rows of comparison.csv; may add warnings and
        notes to the outcome."""


def middle_first(runs: Sequence[R], seconds: Callable[[R], float]) -> list[R]:
    """Returns several runs of a case, the run of median time first: that run is reported, whole.

    >>> middle_first([5.0, 1.0, 3.0], lambda run: run)
    [3.0, 1.0, 5.0]
    """
    ordered = sorted(runs, key=seconds)
    middle = len(ordered) // 2
    return [ordered[middle], *ordered[:middle], *ordered[middle + 1 :]]


def student_t(freedom: int) -> float:
    """Returns the two-sided 95 % quantile of Student's t."""
    # Importing SciPy would be a third of the time of `--help`, and only intervals need it.
    from scipy.special import stdtrit  # noqa: PLC0415

    return float(stdtrit(freedom, 0.975))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The places where a gain changes its sign, ascending, and whether it is positive at the low end."""

    crossings: tuple[float, ...]
    ahead_at_low: bool

    @property
    def at(self) -> float | None:
        """The first place, or None if there is none."""
        return self.crossings[0] if self.crossings else None

    @property
    def turns_once_to_ahead(self) -> bool:
        """Whether the gain is negative below one place and positive above it."""
        return len(self.crossings) == 1 and not self.ahead_at_low


def shares_of(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns each name's share of the sum of all parts."""
    total: dict[str, float] = {}
    for name, part in parts:
        total[name] = total.get(name, 0.0) + part
    whole = sum(total.values())
    return {name: part / whole for name, part in total.items()} if whole else {}


def unmeasured(shares: Mapping[str, float], device: str) -> list[str]:
    """Returns a warning if most of the device time is priced by the roofline; `shares`: of the device time,
    by source of price."""
    share = shares.get("roofline", 0.0)
    if share <= MOST_UNMEASURED:
        return []
    priced = f"{share:.0%} of the device time is priced by datasheet and roofline"
    return [f"{priced}, not by measurements of {device}"]


def extrapolated(shares: Mapping[str, float]) -> list[str]:
    """Returns a warning if much of the device time is priced beyond measured points."""
    share = shares.get("extrapolated", 0.0)
    if share <= MOST_EXTRAPOLATED:
        return []
    return [f"{share:.0%} of the device time is extrapolated beyond what was measured"]


def ranged(values: Sequence[float]) -> str:
    """Returns the range of values in words.

    >>> ranged([2.0, 1.234, 1.5]), ranged([1.2341, 1.2339])
    ('1.23 to 2', '1.23')
    """
    least, most = f"{min(values):.3g}", f"{max(values):.3g}"
    return least if least == most else f"{least} to {most}"


def crossing(
    gain: Callable[[float], float], grid: Sequence[float], *, whole: bool = False, straight: bool = False
) -> Crossing:
    """Returns the arguments at which a gain changes its sign, at most one between two neighbours of a grid.

    `straight`: gains are nearly straight lines and are evaluated as rarely as possible; the places are the
    same if there is at most one between two neighbours. `whole`: arguments are whole numbers. The search
    between grid points is geometric, so grid points must be positive, except that the first may be 0.

    >>> round(crossing(lambda x: x - 3.0, [1.0, 10.0]).at or 0.0, 1)
    3.0
    """
    known = {x: gain(x) for x in grid}
    places = [
        _bisect(gain, dict(known), below, above, whole, straight)
        for below, above in pairwise(grid)
        if (known[above] > 0.0) != (known[below] > 0.0)
    ]
    return Crossing(tuple(places), known[grid[0]] > 0.0)


def _bisect(
    gain: Callable[[float], float],
    known: dict[float, float],
    below: float,
    above: float,
    whole: bool,
    straight: bool,
) -> float:
    """Returns the end of a bisection between two arguments with known gains. If gains are nearly straight
    lines, most steps evaluate no gain: the zero of the line predicts where an evaluation narrows the bracket
    most."""
    low, high, ahead, last = below, above, known[below] > 0.0, below
    while high - low > max(1.0 if whole else 0.0, PRECISION * high):
        middle = math.sqrt(low * high) if low > 0.0 else high / 2.0
        if whole:
            middle = min(max(math.floor(middle), low + 1.0), high - 1.0)
        # A line between distant arguments may miss; the second line starts at the result of the first.
        for beside in (True, True, False) if straight else (False,):
            if below < middle < above:
                last = _beside(known, last, below, above, middle, whole) if beside else middle
                known[last] = gain(last)
                if (known[last] > 0.0) == ahead:
                    below = last
                else:
                    above = last
        if middle <= below:
            low = middle
        else:
            high = middle
    return high


def _beside(
    known: Mapping[float, float], last: float, below: float, above: float, middle: float, whole: bool
) -> float:
    """Returns an argument between `middle` and the zero of the line through two known arguments: close to the
    zero, so that the bracket becomes narrow, but on the side of `middle`, so that its sign holds there
    too."""
    likely = _zero(known, last, min((x for x in known if x != last), key=lambda x: abs(x - last)))
    if not below < likely < above:
        likely = _zero(known, below, above)
    if likely > middle:
        near = likely * (1.0 - MARGIN)
        return max(middle, math.floor(near) if whole else near)
    near = likely * (1.0 + MARGIN)
    return min(middle, math.ceil(near) if whole else near)


def _zero(known: Mapping[float, float], one: float, other: float) -> float:
    """Returns the zero of the line through two known arguments."""
    rise = known[other] - known[one]
    return one - known[one] * (other - one) / rise if rise else math.inf
