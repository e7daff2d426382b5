"""Plans: a question over scenarios, answered by search, with its certainty.

asked = load_plan(Path("whatif.yaml"), "devices")
plan = run(asked, jobs=2)             plan.answer, plan.lines
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from simcore import compiled
from simcore.assembly import code_mark, versions
from simcore.input.files import InputError
from simcore.planning import break_even
from simcore.planning.answer import answer, cost_per_million, devices
from simcore.planning.commands import how_to_run
from simcore.planning.leading import metric_of, metrics_of
from simcore.planning.limits import within
from simcore.planning.points import Benches
from simcore.planning.questions import (
    DEVICES,
    PlanResult,
    Tried,
    ask,
    joules_per_token,
    objectives,
    times_of,
)
from simcore.planning.runs import InProcesses, Maker, Runner
from simcore.planning.sensitivity import Gain, Swing, hinges, limiting, limits_beyond, sensitivity
from simcore.planning.store import Store
from simcore.planning.verdict import interval
from simcore.planning.whatif import BREAK_EVEN, Asked
from simcore.scenario import resolved
from simcore.sim.kept import cache_folder
from simcore.studies.columns import TENANT, split_tenant
from simcore.studies.common import extrapolated, shares_of, unmeasured
from simcore.studies.serving.certainty import needed

# Metrics of every line besides those with a limit.
SHOWN = (
    *("ttft_p99_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s", "goodput_per_s", "request_throughput_per_s"),
    *("output_throughput_tokens_per_s", "utilisation", "mean_batch", "max_kv_share", "mean_queue"),
)
# A scenario's name has at most 100 characters.
LONGEST_NAME = 90
NUMBER = re.compile(r"\d[\d,.]*")
PERCENT = re.compile(r"_p([\d.]+)_")
# Reasons for leaving points out that are said one by one.
MOST_REASONS = 3


@dataclass
class Plan:
    """An answered plan. `lines`: a row for each judged point; `simulated`, `known`: runs that were made, and
    that were known from before; `requests`: simulated ones; `made_by`: where runs were made, in words; `how`:
    how engines run the best points, each way once."""

    asked: Asked
    answer: str
    lines: list[dict[str, Any]]
    warnings: list[str]
    notes: list[str]
    simulated: int
    known: int
    requests: int
    shares: dict[str, float]
    origins: list[dict[str, Any]]
    made_by: str
    how: list[dict[str, Any]] = field(default_factory=list)
    result: PlanResult = field(repr=False, default_factory=PlanResult)
    swings: list[Swing] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    leads: list[dict[str, Any]] = field(default_factory=list)
    swept: Sequence[break_even.Swept] = field(repr=False, default=())

    def effort(self) -> str:
        """Returns how many runs it took, in words."""
        if self.asked.question == BREAK_EVEN:
            return f"{self.simulated:,} runs of the scenario"
        known = f", {self.known:,} known from before" if self.known else ""
        return f"{self.simulated:,} runs with {self.requests:,} requests in all{known}"

    def scenarios(self) -> list[dict[str, Any]]:
        """Returns the scenario of each line, by which `run --point` gives it a report of its own."""
        if self.asked.question == BREAK_EVEN:
            every: Iterable[dict[str, Any]] = break_even.scenarios_of(self.asked, self.swept)
        else:
            every = (resolved(one.point.scenario) for one in self.result.tried)
        return [
            {**fields, "name": f"{self.asked.name[:LONGEST_NAME]}-{i}"} for i, fields in enumerate(every, 1)
        ]

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json says: the same for the same question, whatever was known before."""
        return {
            "name": self.asked.name,
            "study": "plan",
            "question": self.asked.question,
            "answer": self.answer,
            "notes": self.notes,
            "warnings": self.warnings,
            "certainty": None if self.asked.rule.once else self.asked.whatif.certainty,
            "limits": [asdict(limit) for limit in self.asked.limits],
            "objectives": [name for name, _ in objectives(self.asked)],
            "price_shares": self.shares,
            **self._break_even(),
            **({"limiting": [asdict(gain) for gain in self.gains]} if self.gains else {}),
            **({"sensitivity": [asdict(swing) for swing in self.swings]} if self.swings else {}),
            "how_to_run": self.how,
        }

    def _break_even(self) -> dict[str, Any]:
        if self.asked.question != BREAK_EVEN:
            return {}
        over = str(self.asked.whatif.over)
        return {
            **{"over": over, "field": break_even.short(over), "metric": metric_of(self.asked)},
            **({"metrics": dict(metrics_of(self.asked))} if self.asked.bases else {}),
            **{"break_even": self.leads, "everywhere": break_even.everywhere_of(self.asked, self.swept)},
        }

    def provenance(self, command: str, wall_s: float) -> dict[str, Any]:
        """Returns where the figures come from."""
        return {
            "command": command,
            "machine": "sim",
            "wall_time_s": round(wall_s, 3),
            "seed": self.asked.document.get("seed", 0),
            "runs": {
                "simulated": self.simulated,
                "known": self.known,
                "requests": self.requests,
                "made_by": self.made_by,
            },
            "price_sources": self.shares,
            "devices": self.origins,
            "versions": versions(),
            "code": code_mark(),
            "event_loop": "compiled" if compiled.in_use() else "sources",
        }


def run(
    asked: Asked, *, jobs: int, progress: Callable[[str, int, int], None], dask: str | None = None
) -> Plan:
    """Answers a plan. `dask`: the address of a Dask scheduler whose workers make the runs; by default at most
    `jobs` processes do. Raises InputError."""
    if asked.question == BREAK_EVEN:
        if dask is not None:
            raise InputError(f"--dask: question {BREAK_EVEN} makes its runs here; leave it out")
        return _break_even(asked, jobs, progress)
    benches, store = Benches(asked.where, jobs), Store(cache_folder())
    try:
        maker = _maker(benches, jobs, dask)
        runner = Runner(maker, store, progress)
        try:
            result = ask(asked, benches, runner)
            gains = limiting(asked, result, benches, runner) if asked.searches_rate else []
            swings = sensitivity(asked, result, benches, runner) if asked.whatif.sensitivity else []
        finally:
            maker.close()
    finally:
        benches.close()
        store.close()
    # The answer rests on the best points; where there are none, on all.
    resting = [one for one in result.winners if one is not None] or result.tried
    shares = _shares(resting)
    device = ", ".join(dict.fromkeys(one.point.device for one in resting))
    reasons = list(result.left_out.items())
    left = [f"left out, {count:,} of them: {why}" for why, count in reasons[:MOST_REASONS]]
    if len(result.left_out) > MOST_REASONS:
        left.append(f"left out for {len(result.left_out) - MOST_REASONS} more reasons")
    return Plan(
        asked=asked,
        answer=answer(asked, result) + limits_beyond(gains) + hinges(swings),
        lines=[{"point": i, **_line(asked, one, result)} for i, one in enumerate(result.tried, 1)],
        warnings=[
            *_faults(result),
            *benches.warnings,
            *_few(asked, resting),
            *unmeasured(shares, device),
            *extrapolated(shares),
        ],
        notes=[*left, *result.left_out_early, *_more_requests(result), *_once(asked, result)],
        simulated=runner.simulated,
        known=runner.known,
        requests=runner.requests,
        shares=shares,
        origins=benches.origins,
        made_by=maker.about(),
        how=_how(result),
        result=result,
        swings=swings,
        gains=gains,
    )


def _maker(benches: Benches, jobs: int, dask: str | None) -> Maker:
    if dask is None:
        return InProcesses(benches, jobs)
    # Dask takes a while to import, and may not be installed.
    from simcore.planning.dask_cluster import OnDask  # noqa: PLC0415

    return OnDask(dask)


def _break_even(asked: Asked, jobs: int, progress: Callable[[str, int, int], None]) -> Plan:
    """Answers question break_even, which is of any study."""
    every = break_even.sweep(asked, jobs, progress)
    # Of warnings that differ in nothing but numbers the first one is enough.
    warnings: dict[str, str] = {}
    for warning in (each for swept in every for each in swept.warnings):
        warnings.setdefault(NUMBER.sub("", warning), warning)
    return Plan(
        asked=asked,
        answer=break_even.answer_of(asked, every),
        lines=[{"point": i, **line} for i, line in enumerate(break_even.lines_of(asked, every), 1)],
        warnings=list(warnings.values()),
        notes=[f"left out: {swept.refused}" for swept in every if swept.refused],
        simulated=sum(len(swept.runs) for swept in every) * len(asked.every),
        known=0,
        requests=0,
        shares={},
        origins=[],
        made_by=f"this machine, at most {jobs} processes",
        leads=break_even.leads_of(every),
        swept=every,
    )


def _how(result: PlanResult) -> list[dict[str, Any]]:
    """Returns how to run each of the best points; those that run alike once."""
    ways: dict[str, dict[str, Any]] = {}
    for one in result.winners:
        if one is not None:
            how = how_to_run(one.point)
            ways.setdefault(repr((one.point.device, how)), {"point": devices(one), **how})
    return list(ways.values())


def _faults(result: PlanResult) -> list[str]:
    """Returns a warning for each kind of fault that runs ended with."""
    faults = dict.fromkeys(ran.fault for one in result.tried for ran in one.judged.runs if ran.fault)
    return [f"a run failed: {fault}" for fault in faults]


def _more_requests(result: PlanResult) -> list[str]:
    """Returns a note if points have had more requests than their scenario has."""
    times = [times_of(one.alternative, one.judged) for one in result.tried]
    longer = [each for each in times if each > 1]
    if not longer:
        return []
    of = f"{len(longer):,} of {len(times):,} points {'has' if len(longer) == 1 else 'have'}"
    more = f"more requests than workload.requests, up to {max(longer)} times as many"
    return [f"for a steady state {of} {more}"]


def _once(asked: Asked, result: PlanResult) -> list[str]:
    """Returns a note if drawn requests ran once, so that nothing was judged."""
    once = [one.judged for one in result.tried if not one.point.same_in_every_run]
    if not asked.rule.once or not once:
        return []
    grew = sum(run.growing for judged in once for run in judged.runs)
    of = f"; in {grew:,} of {len(once):,} points requests came faster than they were answered" if grew else ""
    return [f"each point ran once, so nothing is judged{of}"]


def _few(asked: Asked, tried: Sequence[Tried]) -> list[str]:
    """Returns a warning if the best points have too few requests for the percentiles that are limited."""
    percents: dict[str, float] = {}
    for limit in asked.limits:
        if found := PERCENT.search(limit.metric):
            tenant, _ = split_tenant(limit.metric)
            percents[tenant] = max(percents.get(tenant, 0.0), float(found[1]))
    warnings = []
    for tenant, percent in percents.items():
        measured = f"{TENANT}.{tenant}.window_requests" if tenant else "window_requests"
        counts = [count for one in tried if (count := one.judged.mean(measured)) is not None]
        if counts and min(counts) < needed(percent):
            warnings.append(
                f"too few requests{tenant and f' of {tenant}'} for p{percent:g}: {min(counts):,.0f} in each"
                f" replica are measured; {needed(percent):,} make it firm (workload.requests)"
            )
    return warnings


def _shares(tried: Sequence[Tried]) -> dict[str, float]:
    parts = [part for one in tried for ran in one.judged.runs for part in ran.shares.items()]
    return dict(sorted(shares_of(parts).items()))


def _line(asked: Asked, one: Tried, result: PlanResult) -> dict[str, Any]:
    """Returns the row of a point: its place, the varied values, the verdict, its metrics with intervals."""
    axes, judged = one.point.case.axes, one.judged
    line: dict[str, Any] = {
        "device": one.point.device,
        "label": axes.label,
        "strategy": axes.strategy,
        "devices": axes.devices,
        "ranks": axes.ranks,
        "servers": one.point.case.servers,
        "rate_per_s": axes.rate_per_s,
        "requests": axes.requests,
        "prompt_tokens": axes.prompt_tokens,
        "output_tokens": axes.output_tokens,
        **{f"vary.{path}": value for path, value in one.alternative.settings.items()},
        **({f"vary.{over}": one.value} if (over := asked.whatif.over) not in (None, DEVICES) else {}),
        "verdict": judged.verdict,
        "best": one in result.winners,
        "replicas": len(judged.runs),
        "why": judged.why,
        "cost_per_hour": one.cost_per_hour,
        "cost_per_million_output_tokens": cost_per_million(one),
        "joules_per_output_token": joules_per_token(one),
    }
    for name in dict.fromkeys([*(limit.metric for limit in asked.limits), *SHOWN]):
        values = judged.values(name)
        ends = interval(values, asked.whatif.certainty)
        line[name] = judged.mean(name)
        line[f"{name}.low"], line[f"{name}.high"] = (None, None) if ends is None else within(name, *ends)
    return line
