"""What all studies share: result rows, the search for a crossing, and what comes out of a run.

crossing   = an argument at which a difference changes its sign, by bisection between two
             neighbours of a grid that see different signs, to within 1 %
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar

from simcore.machine.trace import Trace
from simcore.ops.op import SourceKind
from simcore.studies.columns import COLUMNS, OF_FIGURE, WHOLE_RUN

# Shares of the device time from which on prices that nobody measured, or not so far, are warned of.
MOST_UNMEASURED, MOST_EXTRAPOLATED = 0.5, 0.05

# The source of prices by the datasheet alone.
BY_DATASHEET: SourceKind = "roofline"
# (what is being done, how much of it is done, of how much)
Progress = Callable[[str, int, int], None]
R = TypeVar("R")
# Bisection stops when the bracket is this narrow, relative to its place.
PRECISION = 1e-2
# How close to where a line crosses zero a gain is asked for, relative to that place.
MARGIN = PRECISION / 32.0


@dataclass(frozen=True, slots=True)
class Axes:
    """Where in a study a figure belongs; `COLUMNS` say what each field is."""

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
    """Where in a serving study a figure belongs; `COLUMNS` say what each field is. `arriving`: what comes at
    the rate, requests or, where these are turns, sessions."""

    strategy: str
    label: str
    devices: int
    ranks: int
    requests: int
    rate_per_s: float | None
    prompt_tokens: float
    output_tokens: float
    device: str = ""
    arriving: str = "requests"


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """Where in a study of a single operator a figure belongs; `COLUMNS` say what each field is. Decode
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
        """What decode attention calls its heads."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """What decode attention calls its dim."""
        return self.dim

    @property
    def context_tokens(self) -> int | None:
        """What decode attention calls its length."""
        return self.length


@dataclass(frozen=True, slots=True)
class TilingAxes:
    """Where in a tiling study a figure belongs; `COLUMNS` say what each field is."""

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
    """One figure of a study, as a line of results.csv. A value of None: there is none, `source` says why."""

    axes: Axes | ServingAxes | OperatorAxes | TilingAxes
    metric: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    source: str = ""
    op_kind: str = ""


# The metric of a case that cannot be ranked with the others at its place: see `Outcome.unranked`.
NOT_RANKED = "not_ranked"


def of_whole_runs(rows: Iterable[Row]) -> list[Row]:
    """The rows with figures of whole runs in the place of those of a part of them, under the plain names.
    With these is compared what others measured: clients of benchmarks have warm-up and drain in it."""
    rows = list(rows)
    whole = {row.metric.removesuffix(WHOLE_RUN) for row in rows if row.metric.endswith(WHOLE_RUN)}
    renamed = [
        replace(row, metric=row.metric.removesuffix(WHOLE_RUN)) for row in rows if row.metric not in whole
    ]
    return [row for row in renamed if not row.metric.startswith(("window_", "offered_"))]


# Columns that say the figure itself, beside those that say of what it is.
FIGURE = tuple(OF_FIGURE)


def flat(study: str, row: Row) -> dict[str, Any]:
    """A row as results.csv has it."""
    own = {name: value for name, value in asdict(row).items() if name != "axes"}
    values = {"study": study, **asdict(row.axes), "devices": row.axes.devices, **own}
    return {name: values[name] if name in values else getattr(row.axes, name) for name in COLUMNS[study]}


@dataclass(frozen=True, slots=True)
class Standing:
    """The best that one device does at one place of a study, by which devices are ranked. `at`: the place in
    words; `load`: how heavy it is, beside others of the study; `label`: the best strategy there; `figure`:
    what it takes, in words; `rank`: less is better; `seconds`: the time that is ranked; `enough`: what is
    promised is kept; `where`: the place by columns of results.csv."""

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
    """What a study found, before it is written.

    `trace` is that of the run shown on the timeline, `trace_title` its case in words; `sources` the share of
    predicted device time by origin of its price; `tables` are the columns of each Parquet file, by its name;
    `slo` what a service promises; `standings` the best at each place, harder places later; `unranked` the
    labels that can be ranked with the others nowhere, for their prices rest on another basis (where that is
    so at some places alone, rows NOT_RANKED say at which); `best` the label that the answer is about, where
    it names it otherwise, and `best_at` the place, by columns of results.csv.
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
        """The rows of a metric whose cases can be ranked with the others at their places."""
        out, labels = {row.axes for row in self.rows if row.metric == NOT_RANKED}, {*self.unranked}
        return [
            row
            for row in self.rows
            if row.metric == metric and row.axes.label not in labels and row.axes not in out
        ]


def on_device(outcome: Outcome, device: str) -> Outcome:
    """The same, with the device in the axes of all rows."""
    outcome.rows = [replace(row, axes=replace(row.axes, device=device)) for row in outcome.rows]
    return outcome


class Study(Protocol):
    """A scenario put together: what the command line runs, whatever the study. `laws`: names of those that
    it checks besides `simcore.machine.laws`."""

    @property
    def laws(self) -> tuple[str, ...]:
        """See above."""

    def run(self, progress: Progress) -> Outcome:
        """Simulates all of it. Raises InputError where nothing can be run."""

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """What each strategy launches, printed by the machine that prints."""

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Predictions beside published figures, as rows of comparison.csv; may add warnings."""


def middle_first(runs: Sequence[R], seconds: Callable[[R], float]) -> list[R]:
    """Several runs of the same, the one of median length first: it is the one that is reported, whole.

    >>> middle_first([5.0, 1.0, 3.0], lambda run: run)
    [3.0, 1.0, 5.0]
    """
    ordered = sorted(runs, key=seconds)
    middle = len(ordered) // 2
    return [ordered[middle], *ordered[:middle], *ordered[middle + 1 :]]


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    # A third of the time that `--help` takes would be the import of SciPy, which only intervals need.
    from scipy.special import stdtrit  # noqa: PLC0415

    return float(stdtrit(freedom, 0.975))


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a gain changes its sign, in ascending order, and whether it is positive at the low end."""

    places: tuple[float, ...]
    ahead_at_low: bool

    @property
    def at(self) -> float | None:
        """The first place, or None where there is none."""
        return self.places[0] if self.places else None

    @property
    def turns_once_to_ahead(self) -> bool:
        """Whether the gain is negative below one place and positive above it."""
        return len(self.places) == 1 and not self.ahead_at_low


def shares_of(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The share of all parts that those of a name have."""
    total: dict[str, float] = {}
    for name, part in parts:
        total[name] = total.get(name, 0.0) + part
    whole = sum(total.values())
    return {name: part / whole for name, part in total.items()} if whole else {}


def unmeasured(shares: Mapping[str, float], device: str) -> list[str]:
    """What to warn of where most of the device time is priced by nobody's measurements; `shares`: of it, by
    source of price."""
    share = shares.get("roofline", 0.0)
    if share <= MOST_UNMEASURED:
        return []
    priced = f"{share:.0%} of the device time is priced by datasheet and roofline"
    return [f"{priced}, not by measurements of {device}"]


def ranged(values: Sequence[float]) -> str:
    """From the least to the largest of some values, as people read it.

    >>> ranged([2.0, 1.234, 1.5]), ranged([1.2341, 1.2339])
    ('1.23 to 2', '1.23')
    """
    least, most = f"{min(values):.3g}", f"{max(values):.3g}"
    return least if least == most else f"{least} to {most}"


def crossing(
    gain: Callable[[float], float], grid: Sequence[float], *, whole: bool = False, straight: bool = False
) -> Crossing:
    """The arguments at which a gain changes its sign, one at most between two neighbours of a grid.

    `straight`: gains are nearly straight lines, and asked for as seldom as possible; the places are the same
    where there is one at most between two neighbours. `whole`: arguments are whole numbers. Between grid
    points the search is geometric, so all must be positive, the first may be 0.

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
    """Where bisection between two arguments whose gains are known comes to an end. Where gains are nearly
    straight lines, most of its steps need not ask for one: where such a line crosses zero tells where to
    ask."""
    low, high, ahead, last = below, above, known[below] > 0.0, below
    while high - low > max(1.0 if whole else 0.0, PRECISION * high):
        middle = math.sqrt(low * high) if low > 0.0 else high / 2.0
        if whole:
            middle = min(max(math.floor(middle), low + 1.0), high - 1.0)
        # A line that ends far away may miss; the second begins where the first one led to.
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
    """An argument between `middle` and where a line through two known ones crosses zero: close to the
    latter, so that the bracket becomes narrow, but short of it, so that it tells the sign at `middle`."""
    likely = _zero(known, last, min((x for x in known if x != last), key=lambda x: abs(x - last)))
    if not below < likely < above:
        likely = _zero(known, below, above)
    if likely > middle:
        near = likely * (1.0 - MARGIN)
        return max(middle, math.floor(near) if whole else near)
    near = likely * (1.0 + MARGIN)
    return min(middle, math.ceil(near) if whole else near)


def _zero(known: Mapping[float, float], one: float, other: float) -> float:
    """Where the line through two known arguments crosses zero."""
    rise = known[other] - known[one]
    return one - known[one] * (other - one) / rise if rise else math.inf
