"""Question break_even: at which values of a field another case takes the lead, in any study.

gain(x)  = the metric of the case that leads at one of two neighbours of a grid, less that of the case that
           leads at the other; the lead passes where it is zero: by bisection, to 1 %
surely   = the same for the ends of their intervals taken apart: between both places neither leads for sure

Every value of the field is a whole run of the scenario, and so is every step of a bisection. Cases are told
apart by label and by their place (context, batch, load, ..) within a run. Several scenarios (`bases`),
perhaps of several studies, are run each at every value; each has one place then, and all cases are rivals.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, takewhile
from math import inf, sqrt
from typing import Any

from simcore.assembly import Place, assemble
from simcore.input.fields import count
from simcore.input.files import InputError, enumerated, plain, shown
from simcore.models.errors import ModelError
from simcore.planning.faults import of_value
from simcore.planning.leading import is_lower_better, metric_of, metrics_of
from simcore.planning.limits import value_text
from simcore.planning.whatif import Asked
from simcore.scenario import Scenario, put, resolved, scenario_of
from simcore.studies.common import PRECISION, Row
from simcore.studies.processes import in_processes
from simcore.studies.serving.scenario import ServingScenario
from simcore.workload.spec import ClosedLoop, ConstantArrivals, ConstantLength, Workload

# Values of the field that are run first: at equal ratios where the ends are this far apart.
VALUES, FAR = 5, 8.0
# Sentences of an answer.
MOST_SENTENCES = 6
# Said where figures are drawn once.
OF_ONE_REPLICA = (
    "How sure this is stays open: one replica has no interval; more `replicas` of the scenario"
    " would give one."
)
# How warnings of percentiles of few requests begin, which say how far chance goes.
TOO_FEW = "too few requests"
# Columns that tell cases of one place apart.
OF_CASE = ("strategy", "label", "ranks", "groups", "devices", "hit_rate", "device")
Axes = tuple[tuple[str, Any], ...]
# From one value of the field to another; None: the end of the range.
Stretch = tuple[float | None, float | None]
EVERYWHERE: tuple[Stretch, ...] = ((None, None),)


@dataclass(frozen=True)
class Case:
    """A case at one value of the field. `place`: what it shares with its rivals; `low`, `high`: the interval
    of the metric, the value itself where none is known; `base`: its scenario among several; `chance`: whether
    it is of a single replica of something drawn, without an interval."""

    label: str
    device: str
    devices: int
    strategy: str
    place: Axes
    value: float
    low: float
    high: float
    base: str = ""
    chance: bool = False


@dataclass(frozen=True)
class Lead:
    """The lead passes from one case to another. `at`: the value of the field; `between`: the values between
    which neither leads for sure, None where intervals leave it open to an end of the range; `chance`: whether
    one of both is of a single replica, so that they are not known."""

    settings: Mapping[str, Any]
    place: str
    before: str
    after: str
    at: float
    between: Stretch
    chance: bool = False


@dataclass(frozen=True)
class Equal:
    """Cases that lead together, with the same value of the metric, and where."""

    labels: tuple[str, ...]
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class First:
    """Who leads at the least value of the field, and the first and last value at which something runs.
    `unsure`: if it leads everywhere, where it does not lead for sure, but for cases that are equal;
    `equal`: those that lead together at two neighbours of the grid at least; `gaps`: values of the grid in
    between at which nothing runs; `chance`: whether some case is of a single replica, so that where it leads
    for sure is not known."""

    label: str
    since: float
    until: float
    unsure: tuple[Stretch, ...] = ()
    equal: tuple[Equal, ...] = ()
    gaps: tuple[float, ...] = ()
    chance: bool = False


@dataclass(frozen=True)
class Swept:
    """What was run with one set of settings. `runs`: the cases at each value of the field; `leads`: where the
    lead passes; `first`: who leads first, place by place; `names`: of the places; `warnings`: of all runs;
    `refused`: why nothing was run; `faulty`: because a value is no value of its field."""

    settings: Mapping[str, Any]
    runs: Mapping[float, tuple[Case, ...]]
    leads: tuple[Lead, ...]
    first: Mapping[str, First]
    names: Mapping[Axes, str]
    warnings: tuple[str, ...] = ()
    refused: str = ""
    faulty: bool = False


def grid(between: Sequence[float]) -> list[float]:
    """Returns the values of the field that are run first, both ends among them; whole where both ends are."""
    low, high = between
    far = is_far(between)
    shares = [i / (VALUES - 1) for i in range(VALUES)]
    found = [low * (high / low) ** share if far else low + (high - low) * share for share in shares]
    found[-1] = high
    if all(isinstance(end, int) for end in between):
        return list(dict.fromkeys(round(value) for value in found))
    return [float(value) for value in found]


def is_far(values: Sequence[float]) -> bool:
    """Whether the ends of some values are so far apart that ratios count, not differences."""
    return values[0] > 0 and values[-1] / values[0] >= FAR


def sweep(asked: Asked, jobs: int, progress: Callable[[str, int, int], None]) -> list[Swept]:
    """Runs a plan: the field's values with each set of settings. Raises InputError if nothing can run."""
    metric_of(asked)
    every = list(asked.settings(asked.seed))
    within = jobs if len(every) == 1 else 1

    def done(count: int) -> None:
        progress("settings" if len(every) > 1 else "run", count, len(every))

    found = in_processes(lambda i: _swept(asked, every[i], within), len(every), jobs, done)
    refused = [one for one in found if one.faulty] or [one for one in found if one.refused]
    if refused and (refused[0].faulty or len(refused) == len(found)):
        raise InputError(refused[0].refused)
    return found


def _swept(asked: Asked, settings: Mapping[str, Any], jobs: int) -> Swept:
    warnings: dict[str, None] = {}
    runs: dict[float, tuple[Case, ...]] = {}

    def cases(value: float) -> tuple[Case, ...]:
        if value not in runs:
            runs[value] = _cases(asked, settings, value, jobs, warnings)
        return runs[value]

    assert asked.whatif.between is not None
    values = grid(asked.whatif.between)
    try:
        places = list(dict.fromkeys(case.place for value in values for case in cases(value)))
        names = names_of(places)
        found = {
            name: _at_place(asked, settings, values, place, name, cases) for place, name in names.items()
        }
    except _ValueFaultError as error:
        return Swept(settings, {}, (), {}, {}, (), str(error), faulty=True)
    except (InputError, ModelError) as error:
        return Swept(settings, {}, (), {}, {}, (), str(error))
    first = {name: first for name, (first, _) in found.items()}
    leads = tuple(lead for _, own in found.values() for lead in own)
    return Swept(settings, dict(sorted(runs.items())), leads, first, names, tuple(warnings))


def _cases(
    asked: Asked, settings: Mapping[str, Any], value: float, jobs: int, warnings: dict[str, None]
) -> tuple[Case, ...]:
    """Runs each scenario at a value of the field, and returns the cases."""
    units: dict[str, str] = {}
    found: list[Case] = []
    for base, name in metrics_of(asked).items():
        try:
            scenario = scenario_at(asked, base, settings, value)
            parts = assemble(scenario, asked.every[base].where, Place(jobs=jobs))
        except InputError as error:
            if (bad := of_value(asked, base, settings, error)) is not None:
                raise _ValueFaultError(str(bad)) from None
            raise
        outcome = parts.study.run(lambda doing, done, total: None)
        begin = f"{base}: " if base else ""
        warnings.update((f"{begin}{each}", None) for each in parts.warnings)
        warnings.update((f"{begin}{each}", None) for each in _firm(outcome.warnings, scenario))
        rows = [row for row in outcome.ranked(name) if row.value is not None and not row.op_kind]
        if not rows:
            raise InputError(f"{asked.every[base].where}: metric: {name}: no case of this scenario has it")
        units[base] = rows[0].unit
        own = _of_base(asked, base, scenario, rows) if base else [_case(row, asked) for row in rows]
        found += [
            replace(case, chance=_by_chance(scenario, row)) for case, row in zip(own, rows, strict=True)
        ]
    if len({*units.values()}) > 1:
        listed = ", ".join(f"{base} has {unit or 'plain numbers'}" for base, unit in units.items())
        raise InputError(f"{asked.file}: metric: {listed}; one unit is needed")
    return tuple(_with_distinct_labels(found))


def _with_distinct_labels(cases: Sequence[Case]) -> Iterator[Case]:
    """Yields cases, those of one place with one label with their numbers of devices in it."""
    numbers: dict[tuple[Axes, str], set[int]] = {}
    for case in cases:
        numbers.setdefault((case.place, case.label), set()).add(case.devices)
    for case in cases:
        several = len(numbers[case.place, case.label]) > 1
        of = f", {case.devices:,} device{'s' if case.devices > 1 else ''}"
        yield replace(case, label=case.label + of) if several else case


class _ValueFaultError(InputError):
    """A value that varies, or is searched, is no value of its field."""


def scenario_at(asked: Asked, base: str, settings: Mapping[str, Any], value: float) -> Scenario:
    """Returns one of the scenarios at a value of the field. Raises InputError."""
    based, over = asked.every[base], asked.whatif.over
    assert over is not None
    document = asked.with_settings(settings, base)
    for path in asked.paths(over, base):
        put(document, path, value, f"{based.where}: over: {over}")
    # Comparisons and searches of the study's own say nothing here.
    document |= {name: [] for name in ("published", "crossover") if name in document}
    return scenario_of(document, based.where, based.folder)


def _firm(warnings: Iterable[str], scenario: Scenario) -> Iterator[str]:
    """Yields warnings, but those of chance only where something is drawn."""
    drawn = not isinstance(scenario, ServingScenario) or _draws(scenario.workload)
    yield from (each for each in warnings if drawn or not each.startswith(TOO_FEW))


def _by_chance(scenario: Scenario, row: Row) -> bool:
    """Whether a figure is that of a single replica of something drawn, and has no interval."""
    alone = isinstance(scenario, ServingScenario) and scenario.replicas == 1 and _draws(scenario.workload)
    return alone and row.low is None and row.high is None


def _draws(workload: Workload) -> bool:
    """Whether arrivals or lengths of requests are drawn."""
    fixed = isinstance(workload.arrivals, ConstantArrivals | ClosedLoop)
    lengths = (workload.prompt_tokens, workload.output_tokens)
    constant = all(isinstance(each, ConstantLength) for each in lengths)
    return not (fixed and constant) or bool(workload.tenants or workload.sessions)


def _of_base(asked: Asked, base: str, scenario: Scenario, rows: Sequence[Row]) -> list[Case]:
    """Returns the cases of one scenario among several, under its name; with their own label if it has several
    ways. Raises InputError if it has several places: which one would be compared?"""
    cases = [replace(_case(row, asked), base=base) for row in rows]
    places = [*dict.fromkeys(case.place for case in cases)]
    if len(places) > 1:
        listed = "; ".join(names_of(places).values())
        needed = "one is compared; a name of fields lets it vary"
        raise InputError(f"{asked.every[base].where}: has several places ({plain(listed)}): {needed}")
    ways = sum(map(count, getattr(scenario, "strategies", ()))) + len(getattr(scenario, "methods", ()))
    alone = ways == 1 and len({case.label for case in cases}) == 1
    return [replace(case, label=base if alone else f"{base}, {case.label}", place=()) for case in cases]


def _case(row: Row, asked: Asked) -> Case:
    axes = asdict(row.axes)
    over = (asked.whatif.over or "").rpartition(".")[2]
    # A field that is searched is no place: every value has another one.
    searched = {over, "rate_per_s" if over in ("interval_s", "rate_scale") else over}
    place = tuple((k, v) for k, v in axes.items() if k not in OF_CASE and k not in searched and v is not None)
    value = float(row.value or 0.0)
    low, high = (value if end is None else float(end) for end in (row.low, row.high))
    return Case(axes["label"], axes["device"], row.axes.devices, axes["strategy"], place, value, low, high)


def names_of(places: Sequence[Axes]) -> dict[Axes, str]:
    """Returns each place in words, by what differs between places: "context tokens 1,024"; empty if nothing
    does."""
    keys = list(dict.fromkeys(key for place in places for key, _ in place))
    varied = [key for key in keys if len({dict(place).get(key) for place in places}) > 1]

    def text(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value}"

    return {
        place: ", ".join(f"{key.replace('_', ' ')} {text(value)}" for key, value in place if key in varied)
        for place in places
    }


def by_place(cases: Sequence[Case]) -> dict[Axes, list[Case]]:
    """Returns the cases of each place."""
    places: dict[Axes, list[Case]] = {}
    for case in cases:
        places.setdefault(case.place, []).append(case)
    return places


def best(cases: Sequence[Case], asked: Asked) -> Case:
    """Returns the case that leads."""
    lower = is_lower_better(asked)
    return min(cases, key=lambda case: case.value if lower else -case.value)


def _leading(asked: Asked, cases: Sequence[Case]) -> tuple[str, ...]:
    """Returns the case that leads, and those that are equal to it."""
    value = best(cases, asked).value
    return tuple(dict.fromkeys(case.label for case in cases if case.value == value))


def _leaders(led: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns who leads at each value: of equal cases the one that leads longest; empty: nothing runs."""
    found: list[str] = []
    for i, labels in enumerate(led):

        def lasts(label: str, i: int = i) -> int:
            return sum(1 for _ in takewhile(lambda here: label in here, led[i:]))

        before = found[-1] if found else ""
        found.append(before if before in labels else max(labels, key=lasts, default=""))
    return found


def _equal(values: Sequence[float], leading: Callable[[float], tuple[str, ...]]) -> tuple[Equal, ...]:
    """Returns which cases lead together, and where."""
    both = (tuple(one for one in leading(a) if one in leading(b)) for a, b in pairwise(values))
    return tuple(
        Equal(labels, _stretches(lambda value, own={*labels}: own <= {*leading(value)}, values))  # type: ignore[misc]
        for labels in dict.fromkeys(both)
        if len(labels) > 1
    )


def _stretches(is_so: Callable[[float], bool], values: Sequence[float]) -> tuple[Stretch, ...]:
    """Returns where something is so, by bisection between values at which it changes."""
    found: list[Stretch] = []
    begin, open_ = None, is_so(values[0])
    for below, above in pairwise(values):
        if is_so(below) != is_so(above):
            at = _bisected(is_so, below, above, _apart(values))
            found += [(begin, at)] if open_ else []
            begin, open_ = at, not open_
    return (*found, *([(begin, None)] if open_ else []))


def _at_place(
    asked: Asked,
    settings: Mapping[str, Any],
    values: Sequence[float],
    place: Axes,
    name: str,
    cases: Callable[[float], tuple[Case, ...]],
) -> tuple[First, list[Lead]]:
    """Returns who leads first at a place, and where the lead passes from one case to another."""

    def own(value: float) -> list[Case]:
        return by_place(cases(value)).get(place, [])

    def leading(value: float) -> tuple[str, ...]:
        return _leading(asked, own(value)) if own(value) else ()

    runs = [value for value in values if own(value)]
    gaps = tuple(value for value in values if runs[0] < value < runs[-1] and value not in runs)
    # The lead may pass across a gap.
    values = [value for value in values if value not in gaps]
    led = _leaders([leading(value) for value in values])
    chance = {case.label for value in runs for case in own(value) if case.chance}
    begin, equals = led[values.index(runs[0])], _equal(runs, leading)
    first = First(begin, runs[0], runs[-1], equal=equals, gaps=gaps, chance=bool(chance))
    leads = []
    for i, (before, after) in enumerate(pairwise(led)):
        if before and after and before != after:
            both = {before, after}
            equal = both <= {*leading(values[i])} and any(both <= {*one.labels} for one in first.equal)
            at, between = _Gap(asked, cases, place, before, after, equal).passes(values, i)
            leads.append(Lead(settings, name, before, after, at, between, bool(both & chance)))
    if {*led} - {""} == {first.label}:
        first = replace(first, unsure=_stretches(lambda value: not _sure(asked, first, own(value)), runs))
    return first, leads


def _sure(asked: Asked, first: First, cases: Sequence[Case]) -> bool:
    """Whether a case leads for sure, apart from those that lead together with it."""
    own = {case.label: case for case in cases}
    if first.label not in own:
        return False
    leader = own.pop(first.label)
    together = {label for one in first.equal if first.label in one.labels for label in one.labels}
    rivals = [case for case in own.values() if not (case.label in together and case.value == leader.value)]
    if is_lower_better(asked):
        return all(leader.high < case.low for case in rivals)
    return all(leader.low > case.high for case in rivals)


def _apart(values: Sequence[float]) -> float | None:
    """Returns how near a bisection comes, None for a share of the value."""
    return None if is_far(values) else PRECISION * (values[-1] - values[0])


@dataclass(frozen=True)
class _Gap:
    """The metric of the case that leads above a place of the field, less that of the one that leads below.
    `equal`: whether both are equal where the lead of one ends, up to where that of the other begins."""

    asked: Asked
    cases: Callable[[float], tuple[Case, ...]]
    place: Axes
    before: str
    after: str
    equal: bool

    @property
    def _lower(self) -> bool:
        return is_lower_better(self.asked)

    def gain(self, value: float, of_before: str, of_after: str) -> float:
        """Returns by how much `before` is ahead; infinite where one of both cannot run. `of_before`,
        `of_after`: the ends of their intervals."""
        own = {case.label: case for case in by_place(self.cases(value)).get(self.place, ())}
        if self.before not in own or self.after not in own:
            return inf if self.before in own else -inf
        gain = getattr(own[self.after], of_after) - getattr(own[self.before], of_before)
        return float(gain if self._lower else -gain)

    def where(
        self, values: Sequence[float], i: int, of_before: str, of_after: str, *, equal: bool = False
    ) -> float | None:
        """Returns the value between the values i and i + 1 at which that changes its sign; None if it does
        not. `equal`: whether zero has the sign of what is before."""

        def ahead(value: float) -> bool:
            gain = self.gain(value, of_before, of_after)
            return gain >= 0.0 if equal else gain > 0.0

        below, above = values[i : i + 2]
        return _bisected(ahead, below, above, _apart(values)) if ahead(below) != ahead(above) else None

    def passes(self, values: Sequence[float], i: int) -> tuple[float, Stretch]:
        """Returns where the lead passes between the values i and i + 1, and between which values neither
        leads for sure."""
        # If both are as good at the first value, the lead passes there.
        at = self.where(values, i, "value", "value", equal=self.equal)
        at = values[i] if at is None else at
        worse, better = ("high", "low") if self._lower else ("low", "high")
        steps = range(len(values) - 1)
        until = [place for j in steps if (place := self.where(values, j, worse, better)) is not None]
        since = [
            place
            for j in steps
            if (place := self.where(values, j, better, worse, equal=self.equal)) is not None
        ]
        return at, (
            max((place for place in until if place <= at), default=None),
            min((place for place in since if place >= at), default=None),
        )


def _bisected(ahead: Callable[[float], bool], below: float, above: float, apart: float | None) -> float:
    """Returns the value between two at which a lead ends, to `apart`; to a share of it if that is None."""
    at_low, whole = ahead(below), isinstance(below, int)
    while above - below > max(1 if whole else 0, PRECISION * above if apart is None else apart):
        middle = sqrt(below * above) if apart is None else (below + above) / 2.0
        if whole:
            middle = min(max(int(middle), below + 1), above - 1)
        if ahead(middle) == at_low:
            below = middle
        else:
            above = middle
    return above


# -- what a plan says of it --------------------------------------------------------------------------------


def answer_of(asked: Asked, every: Sequence[Swept]) -> str:
    """Returns where the lead passes, in words."""
    sentences = [words for swept in every if not swept.refused for words in _sentences(asked, swept)]
    more = len(sentences) - MOST_SENTENCES
    rest = [f"And {more} more."] if more > 0 else []
    chance = any(first.chance for swept in every for first in swept.first.values())
    return " ".join([*sentences[:MOST_SENTENCES], *rest, *([OF_ONE_REPLICA] if chance else [])])


def _sentences(asked: Asked, swept: Swept) -> Iterator[str]:
    """Yields a sentence for each place."""
    with_ = ", ".join(_setting(asked, path, value) for path, value in swept.settings.items())
    field = _field(asked, str(asked.whatif.over))
    for place, first in swept.first.items():
        at = ", ".join(part for part in (with_, place) if part)
        begins = f"With {at}: " if at else ""
        leads = [lead for lead in swept.leads if lead.place == place]
        through = field.says(first.since, first.until)
        parts = [
            f"{'to' if i else 'up to'} {field.number(lead.at) if i else field.says(lead.at)}"
            f"{_open(lead, field)}, then {lead.after}"
            for i, lead in enumerate(leads)
        ]
        everywhere = "wherever anything runs" if first.gaps else "everywhere"
        gaps = _gaps(first, field)
        alike = next((one for one in first.equal if one.stretches == EVERYWHERE), None)
        if leads:
            yield f"{begins}{first.label} leads {' '.join(parts)}{gaps}."
        elif alike is None:
            yield f"{begins}{first.label} leads {everywhere} from {through}{_not_sure(first, field)}{gaps}."
        else:
            rivals = {case.label for case in _cases_at(swept, place)} - {*alike.labels}
            lead = f" and lead{_not_sure(first, field)}" if rivals else ""
            yield f"{begins}{enumerated(alike.labels)} are equal {everywhere} from {through}{lead}{gaps}."
        for one in first.equal:
            if one is not alike:
                yield f"{begins}{enumerated(one.labels)} are equal {_where(one.stretches, field.says)}."


@dataclass(frozen=True)
class _Field:
    """How values of a field are said: "batch 4", "4 requests/s", "latency 5 ms"."""

    name: str
    unit: str = ""
    of_seconds: bool = False

    def number(self, *ends: float) -> str:
        """Returns a value, or the first and last of a range, without the name; of seconds with the unit."""
        return " to ".join(value_text("_s", end) if self.of_seconds else number(end) for end in ends)

    def says(self, *ends: float) -> str:
        """Returns a value, or the first and last of a range, with name or unit."""
        return self.within(self.number(*ends))

    def within(self, text: str) -> str:
        """Returns values in words with name or unit."""
        return f"{text} {self.unit}" if self.unit else f"{self.name} {text}"


def _field(asked: Asked, path: str) -> _Field:
    """Returns how values of a field are said."""
    name = short(path)
    if path.endswith("arrivals.rate_per_s"):
        workloads = [based.document.get("workload") for based in asked.every.values()]
        of_sessions = any(isinstance(one, dict) and one.get("sessions") for one in workloads)
        return _Field(name, "sessions/s" if of_sessions else "requests/s")
    seconds = path.endswith("_s") and not path.endswith("per_s")
    return _Field(name.removesuffix(" s"), of_seconds=True) if seconds else _Field(name)


def _gaps(first: First, field: _Field) -> str:
    """Returns at which values nothing runs, in words."""
    at = enumerated([field.number(value) for value in first.gaps])
    return f"; nothing runs at {field.within(at)}" if at else ""


def _cases_at(swept: Swept, place: str) -> Iterator[Case]:
    return (case for cases in swept.runs.values() for case in cases if swept.names[case.place] == place)


def _setting(asked: Asked, path: str, value: Any) -> str:
    """Returns a value that varies, in words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _field(asked, path).says(value)
    return f"{short(path)} {shown(value)}"


def _open(lead: Lead, field: _Field) -> str:
    """Returns between which values neither leads for sure, in words."""
    low, high = lead.between
    if low == high == lead.at:
        return ""
    until = "the first value" if low is None else field.number(low)
    return f" (from {until} to {'the last' if high is None else field.number(high)} neither for sure)"


def _not_sure(first: First, field: _Field) -> str:
    """Returns where it does not lead for sure, in words."""
    if not first.unsure:
        return ""
    if first.unsure == EVERYWHERE:
        return ", but nowhere for sure"
    return f" ({_where(first.unsure, field.number)} not for sure)"


def _where(stretches: Sequence[Stretch], says: Callable[..., str]) -> str:
    """Returns stretches of the field that are not all of it, in words. `says`: how a value is said, or the
    first and last of a range."""
    parts = [
        f"up to {says(high)}" if low is None and high is not None
        else f"from {says(low or 0.0)} on" if high is None
        else f"from {says(low or 0.0, high)}"
        for low, high in stretches
    ]  # fmt: skip
    return " and ".join(parts)


def number(value: float) -> str:
    """Returns a value of the field for people."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def short(path: str) -> str:
    """Returns the last words of a dotted path, so that they say what it is.

    >>> short("strategies.1.hits.value"), short("context_tokens")
    ('hits value', 'context tokens')
    """
    words = [part for part in path.split(".") if not part.isdecimal()]
    own = words[-2:] if words[-1] in ("value", "times", "mean", "low", "high", "kind") else words[-1:]
    return " ".join(own).replace("_", " ")


def lines_of(asked: Asked, every: Sequence[Swept]) -> list[dict[str, Any]]:
    """Returns a row for each case at each value of the field."""
    name, over = metric_of(asked), asked.whatif.over
    lines = []
    for swept in every:
        for value, cases in swept.runs.items():
            for place, own in by_place(cases).items():
                name_of = swept.names[place]
                leader = best(own, asked)
                lines += [
                    {
                        "device": case.device, "label": case.label, "strategy": case.strategy,
                        "devices": case.devices, **{f"vary.{path}": v for path, v in swept.settings.items()},
                        f"vary.{over}": value, "place": name_of, "verdict": "holds",
                        "best": case is leader,
                        name: case.value, f"{name}.low": case.low, f"{name}.high": case.high,
                    }
                    for case in own
                ]  # fmt: skip
    return lines


def scenarios_of(asked: Asked, every: Sequence[Swept]) -> Iterator[dict[str, Any]]:
    """Yields the scenario of each row of `lines_of`, with all of its cases."""
    for swept in every:
        for value, cases in swept.runs.items():
            known = {
                base: resolved(scenario_at(asked, base, swept.settings, value))
                for base in dict.fromkeys(case.base for case in cases)
            }
            yield from (known[case.base] for own in by_place(cases).values() for case in own)


def everywhere_of(asked: Asked, every: Sequence[Swept]) -> list[dict[str, Any]]:
    """Returns who leads at every value, as summary.json has it; with the names of those that are equal."""
    field = _field(asked, str(asked.whatif.over))
    return [
        {
            **{"settings": dict(swept.settings), "place": name, **asdict(first)},
            "in_words": _with_equal(first, field) + _gaps(first, field),
        }
        for swept in every
        for name, first in swept.first.items()
        if all(lead.place != name for lead in swept.leads)
    ]


def _with_equal(first: First, field: _Field) -> str:
    """Returns who leads first, and which cases are equal to it."""
    equals = [
        f"{enumerated([label for label in one.labels if label != first.label])}"
        f"{'' if one.stretches == EVERYWHERE else f' {_where(one.stretches, field.number)}'}"
        for one in first.equal
        if first.label in one.labels
    ]
    return f"{first.label} (equal: {'; '.join(equals)})" if equals else first.label


def leads_of(every: Sequence[Swept]) -> list[dict[str, Any]]:
    """Returns where the lead passes, as summary.json has it."""
    return [asdict(lead) for swept in every for lead in swept.leads]
