"""Predicts a published run: the highest rate at the published limits, and latencies at the submitted rate.

    one replica of tp cards at rate / replicas          as an even router sends a Poisson stream on
    requests = submitted rate per replica * RUN_S       as long as the load generator's shortest run

All requests count, from an empty server on, as the load generator counts them. The search begins at an
estimate that knows nothing of the submitted rate: steps that all have the same tokens, a share f of the most,

    rate(f) = f * most tokens / ((prompt + answer - 1) * step_s(f))        the greatest with step_s(f) <= TPOT

The lengths of the data sets, changes of devices and the engine's kernels stand in `mlperf.yaml`, each with
its source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from simcore.input.files import InputError, read_yaml
from simcore.models.served_decoder import step_sizes
from simcore.planning.alternatives import at_load
from simcore.planning.limits import limits
from simcore.planning.points import Benches, Point
from simcore.planning.questions import RATES, TOLERANCE
from simcore.planning.runs import Ask, InProcesses, Ran, Runner
from simcore.planning.searches import Highest, drive, highest
from simcore.planning.slo import preset_of
from simcore.planning.store import Store
from simcore.planning.verdict import Rule
from simcore.scenario import parse_scenario
from simcore.sim.kept import cache_folder
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import host_of
from simcore.validate.mlperf.rows import MODELS, POLICIES, Row

FACTS = Path(__file__).resolve().parent / "mlperf.yaml"
ENGINE = "tensorrt-llm-1.2"
# Seconds that a run of the load generator lasts at least.
RUN_S = 600.0
# What is compared is an estimate, not a promise: the mean of two runs keeps each limit by one standard error.
CERTAINTY, REPLICAS = 0.5, 2
# Where a search begins if no step keeps the limit of TPOT, 1/s.
LEAST = 0.01
# Shares of the most tokens of a step that the estimate tries.
SHARES = 32
FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p50_s", "tpot_p99_s")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rates are of the whole system. `steady_per_s`: by steps of equal tokens; `highest_per_s`: by search,
    None if no rate holds; `limited_by`: what fails above it; `at_submitted`: figures at the submitted rate,
    in seconds; `shares`: of device time by source. All but the first are left out if nothing is simulated."""

    steady_per_s: float
    highest_per_s: float | None
    limited_by: str
    at_submitted: Mapping[str, float]
    shares: Mapping[str, float]


@cache
def facts() -> Mapping[str, Any]:
    """Returns data sets and cards by name, with their sources."""
    found: Mapping[str, Any] = read_yaml(FACTS)
    return found


def scenario_of(row: Row, *, replicas: int = 1, loaded: bool = False) -> ServingScenario:
    """Returns a run as a scenario of so many of its replicas, with their share of its rate. `loaded`: cards
    multiply as slowly as after seconds of nothing else. Raises InputError for a card without figures."""
    cards = facts()["cards"]
    if row.card not in cards:
        raise InputError(f"accelerator, form: {row.card!r} is unknown (allowed: {', '.join(cards)})")
    card = cards[row.card]
    rate = row.rate_per_s * replicas / row.replicas
    data = facts()["data_sets"][MODELS[row.model][0]]
    document = {
        "name": "mlperf",
        "study": "serving",
        "device": {"base": card["base"], "change": card["loaded" if loaded else "at_rest"]},
        "model": MODELS[row.model][0],
        "dtype": row.precision,
        "dtypes": {"lm_head": "bf16", "embedding": "bf16", "kv": row.kv_dtype},
        "devices": row.ranks * replicas,
        "workload": {
            "requests": round(rate * RUN_S),
            "arrivals": _arrivals(rate, row.replicas / replicas),
            "prompt_tokens": data["prompt_tokens"],
            "output_tokens": data["output_tokens"],
        },
        "strategies": [
            {
                "kind": "continuous_batching",
                "engine": ENGINE,
                "ranks": row.ranks,
                "token_budget": row.max_num_tokens,
                "max_sequences": row.max_batch_size,
                "prefill": "chunked" if row.chunked else "whole",
                "prefix_caching": False,
                "reserve": POLICIES[row.policy],
                "memory": {"share": row.kv_share},
                "ahead": facts()["engine"]["ahead"],
                "host": facts()["engine"]["host"],
            }
        ],
        "measure": {"kind": "whole_run"},
        "price_interval": False,
        "seed": 1,
    }
    parsed = parse_scenario(document, row.label)
    assert isinstance(parsed, ServingScenario)
    return parsed


def _arrivals(rate_per_s: float, streams: float) -> dict[str, Any]:
    """Returns the arrivals at one of several streams that a router makes of a Poisson stream: every n-th of
    its requests, if it is even, so that gaps have the coefficient of variation 1 / sqrt(n)."""
    if facts()["engine"]["router"] == "even" and streams > 1.0:
        return {"kind": "gamma", "rate_per_s": rate_per_s, "cv": streams**-0.5}
    return {"kind": "poisson", "rate_per_s": rate_per_s}


def predict_all(
    rows: Sequence[Row],
    jobs: int,
    progress: Callable[[str, int, int], None],
    *,
    loaded: bool = False,
    search: bool = True,
) -> list[Predicted]:
    """Predicts runs; equal ones are simulated once. `search`: else only the estimate. Raises InputError."""
    benches, store = Benches("mlperf", jobs), Store(cache_folder())
    runner = Runner(InProcesses(benches, jobs), store, progress)
    try:
        points = [benches.points(scenario_of(row, loaded=loaded))[0] for row in rows]
        steady = [_steady(point, row) for point, row in zip(points, rows, strict=True)]
        if not search:
            each = zip(rows, steady, strict=True)
            return [Predicted(rate * row.replicas, None, "", {}, {}) for row, rate in each]
        searches = [_search(benches, *each) for each in zip(points, rows, map(_round, steady), strict=True)]
        found: list[Highest] = drive(searches, runner)
        asks = [Ask(point, replica) for point in points for replica in range(REPLICAS)]
        runs = runner(asks)
    finally:
        benches.close()
        store.close()
    several = [runs[i * REPLICAS : (i + 1) * REPLICAS] for i in range(len(rows))]
    return [_predicted(*each) for each in zip(rows, steady, found, several, strict=True)]


def steady_rate(step_s: Callable[[float], float], most_per_step: float, limit_s: float) -> float:
    """Returns the greatest rate f * most_per_step / step_s(f) with step_s(f) <= limit_s, 1/s; 0 if there is
    none. `step_s`: seconds of a step by its share f of the most tokens; `most_per_step`: requests whose
    tokens fill a step."""
    tried = [(share / SHARES, step_s(share / SHARES)) for share in range(1, SHARES + 1)]
    return max((f * most_per_step / taken_s for f, taken_s in tried if taken_s <= limit_s), default=0.0)


def _steady(point: Point, row: Row) -> float:
    """Returns the estimate of a replica's highest rate."""
    bench, case = point.bench, point.case
    drawn = bench.draw(case, 0)
    prompt = float(drawn.prompt_tokens.mean())
    steps = drawn.output_tokens - 1.0
    # At a moment a decoding request is the likelier seen the longer it is, and halfway on average.
    cached = prompt + float((steps**2).mean() / (2.0 * steps.mean()))
    most = row.max_num_tokens / (prompt + float(steps.mean()))
    host = host_of(case.strategy)
    model, (price, _) = bench.model(row.ranks, host), bench.price(row.ranks, "value")

    def step_s(share: float) -> float:
        requests = share * most
        sequences = max(1, round(requests * float(steps.mean())))
        new = max(1, round(requests))
        tokens = max(1, round(requests * prompt / new))
        sizes = step_sizes(sequences, round(sequences * cached), [(tokens, 0)] * new, new)
        return sum(price(op.at(sizes)).seconds for op in model.mixed.ops)

    return steady_rate(step_s, most, preset_of(row.limits).limits["tpot_p99_s"])


def _round(rate: float) -> float:
    """Returns a rate with two digits, above 0: searches of one way of running then begin and go on alike."""
    return max(float(f"{rate:.2g}"), LEAST)


def _search(benches: Benches, point: Point, row: Row, begin: float) -> Any:
    def at(value: float, times: int) -> Point:
        # A run has as many seconds as MLPerf asks for, whatever else a steady state would need.
        del times
        workload = at_load(point.scenario.workload, value)
        return benches.at(
            point, workload=workload.model_copy(update={"requests": [max(1, round(value * RUN_S))]})
        )

    return highest(
        at,
        begin,
        limits(preset_of(row.limits).limits, row.limits),
        Rule(CERTAINTY, REPLICAS),
        tolerance=TOLERANCE,
        between=RATES,
        most_times=1,
    )


def _predicted(row: Row, steady: float, found: Highest, runs: Sequence[Ran]) -> Predicted:
    fault = next((run.fault for run in runs if run.fault), "")
    if fault:
        raise InputError(f"{row.label}: {fault}")
    figures = {name: fmean(run.figures[name] or 0.0 for run in runs) for name in FIGURES}
    shares: dict[str, float] = {}
    for run in runs:
        for source, seconds in run.shares.items():
            shares[source] = shares.get(source, 0.0) + seconds
    whole = sum(shares.values())
    return Predicted(
        steady * row.replicas,
        None if found.holds is None else found.holds * row.replicas,
        _why_beyond(found),
        figures,
        {source: seconds / whole for source, seconds in shares.items()},
    )


def _why_beyond(found: Highest) -> str:
    """Returns why the first rate beyond the highest one does not hold; empty if none was tried."""
    above = [value for value in found.judged if found.holds is None or value > found.holds]
    return found.judged[min(above)].why if above else ""
