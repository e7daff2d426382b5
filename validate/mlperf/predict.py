"""Predicts a published run: the highest rate at the published limits, and latencies at the submitted rate.

    one replica of tp cards at rate / replicas          as an even router sends a Poisson stream on
    requests = submitted rate per replica * RUN_S       those after the warm-up count

The load generator runs for 600 s or more and counts all requests. The lengths of the data sets and changes of
devices stand in `mlperf.yaml`, each with its source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from simcore.input.files import InputError, read_yaml
from simcore.planning.alternatives import at_load
from simcore.planning.limits import limits
from simcore.planning.points import Benches, Point
from simcore.planning.questions import RATES, TOLERANCE
from simcore.planning.runs import Ask, Ran, Runner
from simcore.planning.searches import Highest, Judged, drive, highest
from simcore.planning.slo import preset_of
from simcore.planning.store import Store
from simcore.planning.verdict import Rule
from simcore.scenario import parse_scenario
from simcore.sim.kept import cache_folder
from simcore.studies.serving.scenario import ServingScenario
from simcore.validate.mlperf.rows import MODELS, Row

FACTS = Path(__file__).resolve().parent / "mlperf.yaml"
ENGINE = "tensorrt-llm-1.2"
# A request of Llama 2 70B takes up to 200 s: the mean of them has ended after a third of this.
RUN_S = 180.0
CERTAINTY, REPLICAS = 0.95, 3
FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Rates are of the whole system. `highest_per_s`: None if no rate holds; `limited_by`: what fails above
    it; `at_submitted`: figures at the submitted rate, in seconds; `shares`: of device time by source."""

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
            "arrivals": {"kind": "poisson", "rate_per_s": rate},
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
                "memory": {"share": row.kv_share},
            }
        ],
        "price_interval": False,
        "seed": 1,
    }
    parsed = parse_scenario(document, row.label)
    assert isinstance(parsed, ServingScenario)
    return parsed


def predict_all(
    rows: Sequence[Row], jobs: int, progress: Callable[[str, int, int], None], *, loaded: bool = False
) -> list[Predicted]:
    """Predicts runs; equal ones are simulated once. Raises InputError."""
    benches, store = Benches("mlperf", jobs), Store(cache_folder())
    runner = Runner(benches, store, jobs, progress)
    try:
        points = [benches.points(scenario_of(row, loaded=loaded))[0] for row in rows]
        begins = _begins(rows)
        searches = [_search(benches, *each) for each in zip(points, rows, begins, strict=True)]
        found: list[Highest] = drive(searches, runner)
        asks = [Ask(point, replica) for point in points for replica in range(REPLICAS)]
        runs = runner(asks)
    finally:
        benches.close()
        store.close()
    several = [runs[i * REPLICAS : (i + 1) * REPLICAS] for i in range(len(rows))]
    return [_predicted(row, one, mine) for row, one, mine in zip(rows, found, several, strict=True)]


def _begins(rows: Sequence[Row]) -> list[float]:
    """Returns the rate of a replica at which each search begins: one for all rows of a way of running, whose
    searches then make the same runs."""
    ways = [
        (row.limits, row.card, row.ranks, row.max_num_tokens, row.max_batch_size, row.chunked, row.kv_share)
        for row in rows
    ]
    rates = [row.rate_per_s / row.replicas for row in rows]
    return [max(rate for rate, way in zip(rates, ways, strict=True) if way == mine) for mine in ways]


def _search(benches: Benches, point: Point, row: Row, begin: float) -> Any:
    workload = point.scenario.workload.model_copy(update={"requests": [round(begin * RUN_S)]})
    return highest(
        lambda value: benches.at(point, workload=at_load(workload, value)),
        begin,
        limits(preset_of(row.limits).limits, row.limits),
        Rule(CERTAINTY, REPLICAS),
        tolerance=TOLERANCE,
        between=RATES,
    )


def _predicted(row: Row, found: Highest, runs: Sequence[Ran]) -> Predicted:
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
        None if found.holds is None else found.holds * row.replicas,
        _first_beyond(found).why,
        figures,
        {source: seconds / whole for source, seconds in shares.items()},
    )


def _first_beyond(found: Highest) -> Judged:
    above = [value for value in found.judged if found.holds is None or value > found.holds]
    return found.judged[min(above)]
