"""Predicts a measured row: the same clients, engine and card, at the prices of a profile.

    TTFT, TPOT = means over the requests that the benchmark counts
    a step takes its ops' time + its sequences x sequence_s
    a request passes a serial front end in request_s + its prompt's tokens x prompt_token_s

`sequence_s` is the part of a step that the card does not hide: between two steps the engine schedules,
samples, prepares inputs and answers, one sequence after the other. These constants depend on the engine's
version and on the machines, so each series of measurements has its own, fitted to a tenth of its rows, drawn
by a seed, first the one and then, where at least FEWEST rows are drawn, the front end's (else 0: two
constants more are no fit to a handful of rows, and a front end that is too slow makes any TTFT):

    sequence_s = argmin of the mean over these rows of |log(predicted TPOT / measured TPOT)|
    front end  = argmin of the mean over these rows of |log(predicted TTFT / measured TTFT)| on a grid of
                 those that are busy for BUSY of these rows' time at most, as in `calibrate --from`

The fit never uses the other rows.
"""

import math
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from simcore.assembly import assemble
from simcore.devices.profile import NO_PROFILE
from simcore.machine.machine import Overheads
from simcore.ops.op import Op, Price
from simcore.scenario import parse_scenario
from simcore.studies.hardware import Hardware
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.studies.serving.runner import Bench, price_shares
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.study import cases
from simcore.validate.calibration.records import NAME
from simcore.validate.calibration.service import BUSY
from simcore.validate.engines.rows import FITTED, Row

# The share of rows to which a constant is fitted.
FITTED_SHARE = 0.1
# The search for host_s interpolates TPOT linearly between these values.
HOST_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4)
STEPS = 9601
# Rows that a front end is fitted to at least.
FEWEST = 8
# The front ends that are tried, in the order in which the first of equal ones is taken.
REQUEST_S, PROMPT_TOKEN_S = (0.0, 2e-3, 5e-3, 1e-2), (0.0, 2e-6, 5e-6, 1e-5)
FLOOR = "floor"
Numbers = NDArray[np.float64]
# An answer reaches its client, and the next request the engine, after the next step has begun.
CLIENT_S = 1e-4


@dataclass(frozen=True, slots=True)
class Predicted:
    """Results of a row's run in seconds. `waiting_s`: the part of TTFT before the prompt's first computation;
    `extrapolated`: the share of time at prices that are extrapolated or carried over from another card;
    `preemptions`: over all requests."""

    ttft_s: float
    tpot_s: float
    waiting_s: float
    extrapolated: float
    preemptions: int

    def cycle_s(self, row: Row) -> float:
        """Seconds from one request of a client to its next."""
        return self.ttft_s + (row.osl - 1) * self.tpot_s


def scenario_of(row: Row, profile: str, host: HostTime = NO_HOST_TIME) -> ServingScenario:
    """Returns the row as a scenario with a profile of its card: the default profile, another, or none."""
    known, weights = row.series, row.weights
    budget = known.by_lengths.get(row.lengths, known.token_budget)
    if known.budget_beyond_prompt is not None:
        budget = row.isl + known.budget_beyond_prompt
    strategy = {
        "kind": "continuous_batching",
        "token_budget": budget,
        "max_sequences": row.clients if known.max_sequences == "clients" else known.max_sequences,
        "prefill": known.prefill,
        "ahead": known.ahead,
        "prefix_caching": known.distinct_prompts is not None,
        "ranks": row.ranks,
        "host": host.model_dump(),
    }
    wait = known.wait
    if wait is not None and wait.lengths == row.lengths and row.ranks < wait.below_ranks:
        strategy |= {"wait_steps": wait.steps, "wait_tokens": math.ceil(wait.share * budget)}
    document = {
        "name": "silicon",
        "study": "serving",
        "device": row.card,
        "model": row.model,
        "profile": {NAME: None, FLOOR: NO_PROFILE}.get(profile, profile),
        "dtype": weights,
        "dtypes": {"lm_head": "bf16", "embedding": "bf16", "kv": row.kv_dtype},
        "devices": row.ranks,
        "memory_share": known.memory_share,
        "workload": {
            "requests": row.clients * known.rounds,
            "arrivals": {"kind": "closed_loop", "clients": row.clients, "think_s": CLIENT_S},
            "prompt_tokens": _lengths(row.isl, known.shortest),
            "output_tokens": _lengths(row.osl, known.shortest),
            "distinct_prompts": known.distinct_prompts,
        },
        "strategies": [strategy],
    }
    parsed = parse_scenario(document, row.id)
    assert isinstance(parsed, ServingScenario)
    return parsed


def _lengths(tokens: int, shortest: float) -> dict[str, object]:
    if shortest == 1.0:
        return {"kind": "constant", "value": tokens}
    return {"kind": "uniform", "low": int(tokens * shortest), "high": tokens}


def _at_datasheet(hardware: Hardware) -> Hardware:
    """Returns the device with its datasheet's bounds as prices and a host that takes no time."""

    def price(op: Op) -> Price:
        seconds = hardware.roofline(op).seconds
        return Price(seconds, seconds, seconds, "roofline", "the datasheet's bound")

    return replace(hardware, price=lambda ranks, latency_s, free: price, overheads=Overheads(), kept=None)


def predict(row: Row, profile: str, host: HostTime, like: Bench | None = None) -> tuple[Predicted, Bench]:
    """Returns the simulator's figures of a row, and its bench. `like`: the bench of a row with the same
    `_place`, whose graphs and prices are reused."""
    study = assemble(scenario_of(row, profile, host), row.id).study
    assert isinstance(study, DeviceStudy)
    known = study.bench.hardware if profile != FLOOR else _at_datasheet(study.bench.hardware)
    bench = replace(study.bench, hardware=replace(known, kept=None))
    if like is not None:
        bench = replace(bench, models=like.models, prices=like.prices)
    found = bench.run(next(cases(bench)), 0)
    served = found.served
    counted = served.finished & (served.id >= row.clients * row.series.warm_up)
    several = counted & (served.output_tokens > 1)
    decode_s = (served.finish_s - served.first_token_s)[several]
    figures = Predicted(
        float((served.first_token_s - served.arrival_s)[counted].mean()),
        float((decode_s / (served.output_tokens[several] - 1)).mean()),
        float((served.scheduled_s - served.arrival_s)[counted].mean()),
        sum(price_shares(found.trace.rows.sources).get(name, 0.0) for name in ("carried", "extrapolated")),
        int(served.preemptions.sum()),
    )
    return figures, bench


# -- many rows ---------------------------------------------------------------------------------------------


Task = tuple[Row, HostTime]


def predict_all(tasks: Sequence[Task], profile: str, jobs: int | None = None) -> list[Predicted]:
    """Predicts rows, each with a host; `jobs`: number of processes, default the number of cores."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (row, _) in enumerate(tasks):
        groups.setdefault(_place(row), []).append(i)
    # The longest groups first, so that no process ends long after the others.
    order = sorted(groups.values(), key=len, reverse=True)
    one = partial(_predict_group, profile)
    work = [[tasks[i] for i in group] for group in order]
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        found = list(map(one, work))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            found = list(pool.map(one, work))
    by_task = {
        i: ours for group, got in zip(order, found, strict=True) for i, ours in zip(group, got, strict=True)
    }
    return [by_task[i] for i in range(len(tasks))]


def _place(row: Row) -> tuple[object, ...]:
    """Returns the fields that determine prices."""
    return (row.card, row.model, row.ranks, row.weights, row.kv_dtype)


def _predict_group(profile: str, tasks: Sequence[Task]) -> list[Predicted]:
    known: Bench | None = None
    found = []
    for row, host in tasks:
        figures, known = predict(row, profile, host, known)
        found.append(figures)
    return found


def least(rows: Sequence[Row], jobs: int | None = None) -> list[Predicted]:
    """Returns all rows' figures with ops at the datasheet's rates, no time between them, no prefix cached."""
    plain = [replace(row, series=replace(cast(Any, row.series), distinct_prompts=None)) for row in rows]
    return predict_all([(row, NO_HOST_TIME) for row in plain], FLOOR, jobs)


def drawn(rows: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """Draws a tenth of the rows of each series, at least one, by a seed; of models that are FITTED."""
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        if row.model in FITTED:
            series.setdefault(row.series.name, []).append(row)
    return {
        name: random.Random(f"{seed} {name}").sample(mine, math.ceil(FITTED_SHARE * len(mine)))
        for name, mine in sorted(series.items())
    }


def fitted(chosen: Mapping[str, Sequence[Row]], profile: str, jobs: int | None = None) -> dict[str, HostTime]:
    """Fits the constants of each series to these rows."""
    sequence_s = _sequence_s(chosen, profile, jobs)
    tried = {
        name: [
            HostTime(sequence_s=sequence_s[name], request_s=request_s, prompt_token_s=token_s)
            for request_s, token_s in product(REQUEST_S, PROMPT_TOKEN_S)
            if all((request_s + token_s * row.isl) * row.clients <= BUSY * row.cycle_s for row in mine)
        ][: None if len(mine) >= FEWEST else 1]
        for name, mine in chosen.items()
    }
    told = {name: mine for name, mine in chosen.items() if len(tried[name]) > 1}
    tasks = [(row, host) for name, mine in told.items() for row in mine for host in tried[name]]
    found = iter(predict_all(tasks, profile, jobs))
    off = {
        name: [[abs(math.log(next(found).ttft_s / row.ttft_s)) for _ in tried[name]] for row in mine]
        for name, mine in told.items()
    }
    return {
        name: hosts[int(np.mean(off[name], axis=0).argmin()) if name in off else 0]
        for name, hosts in tried.items()
    }


def _sequence_s(chosen: Mapping[str, Sequence[Row]], profile: str, jobs: int | None) -> dict[str, float]:
    """Fits what a sequence adds to a step, of each series, in seconds."""
    rows = [row for mine in chosen.values() for row in mine]
    tasks = [(row, HostTime(sequence_s=seconds)) for row in rows for seconds in HOST_S]
    found = iter(predict_all(tasks, profile, jobs))
    ratios = {row.id: np.array([next(found).tpot_s / row.tpot_s for _ in HOST_S]) for row in rows}
    tried = np.linspace(HOST_S[0], HOST_S[-1], STEPS)
    return {name: _best(tried, [ratios[row.id] for row in mine]) for name, mine in chosen.items()}


def _best(tried: Numbers, ratios: Sequence[Numbers]) -> float:
    off = np.mean([np.abs(np.log(np.interp(tried, HOST_S, ratio))) for ratio in ratios], axis=0)
    return float(tried[int(off.argmin())])
