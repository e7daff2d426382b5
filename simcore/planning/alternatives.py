"""From a plan's file to its alternatives: the ways of running that a question chooses from.

alternatives = points of `vary` * cases of the scenario at each (devices, strategies, variants, loads)

What cannot be (ranks that do not divide devices, a model that does not fit) is left out and counted, and so
is what is the same as another point.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from simcore.input.fields import TAGS, listed
from simcore.input.files import InputError, shown
from simcore.models.errors import ModelError
from simcore.planning.faults import of_value
from simcore.planning.points import Benches, Point, why_not
from simcore.planning.whatif import NONE, Asked
from simcore.scenario import put, scenario_of
from simcore.studies.serving.scenario import ServingScenario
from simcore.workload.spec import ClosedLoop, OfTenants, TraceArrivals, Workload

# Devices of a server that are tried where a scenario's strategy does not say how many.
RANKS = (1, 2, 4, 8)
# Why a point is not judged whose fields are those of one before, as beside a kind none.
SAME = "the same as one before, which is judged once"


@dataclass(frozen=True, eq=False)
class Alternative:
    """A way of running. `settings`: the values of the varied fields, None where one counts for
    nothing; `document`: the fields of its scenario,
    before what a search changes."""

    point: Point
    settings: Mapping[str, Any]
    document: Mapping[str, Any]

    @property
    def group(self) -> str:
        """What alternatives of one question have in common: the load."""
        return repr(self.point.case.point.workload)


@dataclass
class Alternatives:
    """All alternatives of a plan. `left_out`: why others cannot be, with how many each reason concerns."""

    every: list[Alternative] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Counts what cannot be."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def alternatives(asked: Asked, benches: Benches, *, any_devices: bool) -> Alternatives:
    """Returns the alternatives of a plan. `any_devices`: the question chooses the number of devices: then the
    scenario's own is left aside, and ranks that it does not give are `RANKS`. Raises InputError if none can
    run."""
    if any_devices and asked.document.get("fleets"):
        says = f"say their servers, which question {asked.question} searches; question grid takes them"
        raise InputError(f"{asked.where}: fleets: {says}, with vary: {{fleets.0.0.servers: [1, 2]}} say")
    found = Alternatives()
    first: ValueError | None = None
    seen: set[str] = set()
    for settings in asked.settings(asked.seed):
        try:
            document = asked.with_settings(settings)
            mark = repr(document)
            if mark in seen:
                found.leave_out(SAME)
                continue
            if any_devices:
                _open_devices(document, asked.where)
            scenario = scenario_of(copy.deepcopy(document), asked.where, asked.folder)
            if not isinstance(scenario, ServingScenario):
                raise InputError(f"{asked.where}: study: is {scenario.study!r}, which no plan may vary")
            points = benches.points(scenario)
            seen.add(mark)
        except (InputError, ModelError) as error:
            if (bad := of_value(asked, "", settings, error)) is not None:
                raise bad from None
            first = first or error
            found.leave_out(str(error))
            continue
        for point in points:
            reason = why_not(_smallest(benches, point) if any_devices else point)
            if reason is None:
                found.every.append(Alternative(point, _that_count(settings), document))
            else:
                found.leave_out(reason)
    if not found.every:
        raise first or InputError(f"{asked.where}: nothing can be run; {next(iter(found.left_out))}")
    return found


def _that_count(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the varied fields, None for those that are left aside beside a kind none."""
    tags = [path.rpartition(".") for path, value in settings.items() if value == NONE]
    aside = [(f"{place}.", f"{place}.{last}") for place, _, last in tags if last in TAGS]

    def counts(path: str) -> bool:
        return not any(path.startswith(begin) and path != tag for begin, tag in aside)

    return {path: value if counts(path) else None for path, value in settings.items()}


def _open_devices(document: dict[str, Any], where: str) -> None:
    """Gives each strategy the ranks that are tried, and the scenario a number of devices that all divide.
    Raises InputError if it has none that could be, though its number is left aside."""
    for own in listed(document.get("devices", 1)):
        if not isinstance(own, int) or isinstance(own, bool) or own < 1:
            raise InputError(f"{where}: devices: is {shown(own)}; a whole number, 1 or more, is needed")
    each: list[int] = [1]
    strategies = document.get("strategies")
    for strategy in strategies if isinstance(strategies, list) else ():
        if isinstance(strategy, dict):
            given = strategy.setdefault("ranks", list(RANKS))
            each += [one for one in listed(given) if isinstance(one, int)]
    rules = [rule for rule in listed(document.get("autoscaling")) if isinstance(rule, dict)]
    servers = [one for rule in rules for one in listed(rule.get("min_servers"))]
    most = max((one for one in servers if isinstance(one, int)), default=1)
    document["devices"] = max(1, most * lcm(*(one for one in each if one > 0)))


def fewest_servers(point: Point) -> int:
    """Returns the fewest servers that a point may have: those that its rule of autoscaling keeps."""
    rule = point.case.scaling
    return 1 if rule is None else rule.min_servers[0]


def _smallest(benches: Benches, point: Point) -> Point:
    return benches.at(point, devices=[fewest_servers(point) * point.case.ranks])


# -- loads -------------------------------------------------------------------------------------------------


def load_of(workload: Workload, where: str) -> float:
    """Returns what a search for the highest rate changes: the rate, or of a trace the speed of its replay; if
    tenants have arrivals of their own, how many times as fast as in the scenario all of them come. Raises
    InputError for a closed loop."""
    arrivals = workload.arrivals
    if _several(workload):
        return 1.0
    if isinstance(arrivals, ClosedLoop):
        needed = "constant, poisson, gamma or trace is needed"
        raise InputError(f"{where}: workload.arrivals: a closed_loop has no rate; {needed}")
    if isinstance(arrivals, TraceArrivals):
        return arrivals.rate_scale[0]
    assert not isinstance(arrivals, OfTenants)
    return arrivals.rates[0]


def longer(workload: Workload, times: int) -> Workload:
    """Returns a workload with `times` as many requests, the last of which comes as many times as late where a
    scenario says when."""

    def later(arrivals: Any) -> Any:
        span = getattr(arrivals, "span_intervals", None)
        return arrivals if span is None else arrivals.model_copy(update={"span_intervals": span * times})

    tenants = [one.model_copy(update={"arrivals": later(one.arrivals)}) for one in workload.tenants]
    return workload.model_copy(
        update={
            "requests": [times * each for each in workload.requests or ()] or None,
            "arrivals": later(workload.arrivals),
            "tenants": tenants,
        }
    )


def at_load(workload: Workload, value: float, times: int = 1) -> Workload:
    """Returns a workload at another load, see `load_of`, with `times` as many requests."""
    more = longer(workload, times)
    if not _several(workload):
        return more.model_copy(update={"arrivals": _at(more.arrivals, value)})
    tenants = [one.model_copy(update={"arrivals": _faster(one.arrivals, value)}) for one in more.tenants]
    return more.model_copy(update={"arrivals": _faster(more.arrivals, value), "tenants": tenants})


def _several(workload: Workload) -> bool:
    """Whether tenants have arrivals of their own."""
    return any(one.arrivals is not None for one in workload.tenants)


def _faster(arrivals: Any, times: float) -> Any:
    """Returns arrivals that come so many times as fast."""
    if arrivals is None or isinstance(arrivals, OfTenants):
        return arrivals
    now = arrivals.rate_scale[0] if isinstance(arrivals, TraceArrivals) else arrivals.rates[0]
    return _at(arrivals, now * times)


def _at(arrivals: Any, value: float) -> Any:
    if isinstance(arrivals, TraceArrivals):
        return arrivals.model_copy(update={"rate_scale": [value]})
    return arrivals.model_copy(update={"rate_per_s": [value], "interval_s": None})


def with_load(benches: Benches, alternative: Alternative, value: float, times: int = 1) -> Point:
    """Returns the point of an alternative at another rate, with `times` as many requests."""
    point = alternative.point
    return benches.at(point, workload=at_load(point.scenario.workload, value, times))


def with_times(benches: Benches, point: Point, times: int) -> Point:
    """Returns a point with `times` as many requests."""
    return point if times == 1 else benches.at(point, workload=longer(point.scenario.workload, times))


def with_servers(benches: Benches, alternative: Alternative, servers: int, times: int = 1) -> Point:
    """Returns the point of an alternative on another number of servers, with `times` as many requests."""
    point = benches.at(alternative.point, devices=[servers * alternative.point.case.ranks])
    return with_times(benches, point, times)


def with_field(
    asked: Asked, benches: Benches, alternative: Alternative, path: str, value: int, times: int = 1
) -> Point:
    """Returns the point of an alternative with another value of a field, with `times` as many requests.
    Raises InputError."""
    document = copy.deepcopy(dict(alternative.document))
    put(document, path, value, f"{asked.file}: over: {path}")
    scenario = scenario_of(document, asked.where, asked.folder)
    assert isinstance(scenario, ServingScenario)
    axes = alternative.point.case.axes
    fitting = [
        point
        for point in benches.points(scenario)
        if point.device == alternative.point.device
        and replace(point.case.axes, label="") == replace(axes, label="")
    ]
    if len(fitting) != 1:
        raise InputError(f"{asked.file}: over: {path}: leaves {len(fitting)} cases apart; one is needed")
    return with_times(benches, fitting[0], times)
