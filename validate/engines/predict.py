"""What the simulator says of a measured row: the same clients, engine and card, at prices of a profile.

    TTFT, TPOT = means over the requests that the benchmark counts
    a step takes its ops' time + its sequences x host_s, the one constant of a series

`host_s` is what of a step the card does not hide: the engine's scheduling, sampling, preparing of inputs and
answering between two steps, all of which go through the sequences one by one. It is that of an engine's
version on somebody's machines, and so of a series of measurements, of whose rows a tenth is drawn by a seed:

    host_s = argmin of the mean over these rows of |log(predicted TPOT / measured TPOT)|

The other rows are never looked at for it.
"""

import math
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from simcore.assembly import assemble
from simcore.devices.profile import NO_PROFILE
from simcore.machine.machine import Overheads
from simcore.ops.op import Op, Price, Pricer
from simcore.scenario import parse_scenario
from simcore.studies.hardware import Hardware
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.runner import Bench, price_shares
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.study import cases
from simcore.validate.calibration.records import NAME
from simcore.validate.engines.rows import Row

# The share of rows that a constant is fitted to.
FITTED_SHARE = 0.1
# host_s is looked for between these, TPOT being taken as linear from one to the next.
HOST_S = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4)
STEPS = 9601
FLOOR = "floor"
Numbers = NDArray[np.float64]
# An answer reaches its client, and the next request the engine, after the next step has begun.
CLIENT_S = 1e-4


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a row's run came to, in seconds. `waiting_s`: of TTFT, until the first of the prompt was computed;
    `extrapolated`: the share of its time at prices that are extrapolated, or of another card; `preemptions`
    of all requests."""

    ttft_s: float
    tpot_s: float
    waiting_s: float
    extrapolated: float
    preemptions: int

    def cycle_s(self, row: Row) -> float:
        """From one request of a client to its next."""
        return self.ttft_s + (row.osl - 1) * self.tpot_s


def scenario_of(row: Row, profile: str) -> ServingScenario:
    """The row as a scenario, by a profile of its card: the one that it has by default, another, or none."""
    known, weights = row.series, row.weights
    budget = known.by_lengths.get(row.lengths, known.token_budget)
    strategy = {
        "kind": "continuous_batching",
        "token_budget": budget,
        "max_sequences": row.clients if known.max_sequences == "clients" else known.max_sequences,
        "prefill": known.prefill,
        "ahead": known.ahead,
        "prefix_caching": known.distinct_prompts is not None,
        "ranks": row.ranks,
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
        "dtypes": {"lm_head": "bf16", "embedding": "bf16", "kv": known.kv_dtype},
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
    """The device with nothing but its datasheet's bounds, and a host that takes no time."""

    def price(op: Op) -> Price:
        seconds = hardware.roofline(op).seconds
        return Price(seconds, seconds, seconds, "roofline", "the datasheet's bound")

    return replace(hardware, price=lambda ranks, latency_s, free: price, overheads=Overheads(), kept=None)


def with_host(price: Pricer, host_s: float) -> Pricer:
    """Prices in which every step takes `host_s` more for each sequence: at its choice of tokens."""

    def priced(op: Op) -> Price:
        found = price(op)
        if op.kind != "sample":
            return found
        own_s = host_s * op["tokens"]
        return replace(found.longer(own_s), detail=f"{found.detail}; {own_s:.3g} s of the engine's host")

    return priced


def predict(row: Row, profile: str, host_s: float, like: Bench | None = None) -> tuple[Predicted, Bench]:
    """The simulator's figures of a row, and what it was run on. `like`: what a row of the same `_place` at
    the same host_s was run on, whose graphs and prices are taken."""
    study = assemble(scenario_of(row, profile), row.id).study
    assert isinstance(study, DeviceStudy)
    known = study.bench.hardware if profile != FLOOR else _at_datasheet(study.bench.hardware)
    plain = known.price
    priced = replace(
        known,
        price=lambda ranks, latency_s, free: with_host(plain(ranks, latency_s, free), host_s),
        kept=None,
    )
    bench = replace(study.bench, hardware=priced)
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


Task = tuple[Row, float]


def predict_all(tasks: Sequence[Task], profile: str, jobs: int | None = None) -> list[Predicted]:
    """The figures of rows, each with a host_s; `jobs`: processes, as many as cores if left out."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (row, _) in enumerate(tasks):
        groups.setdefault(_place(row), []).append(i)
    # The longest first, so that no process ends long after the others.
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
    """What graphs and prices depend on, besides host_s."""
    return (row.card, row.model, row.ranks, row.weights, row.series.kv_dtype)


def _predict_group(profile: str, tasks: Sequence[Task]) -> list[Predicted]:
    known: dict[float, Bench] = {}
    found = []
    for row, host_s in tasks:
        figures, known[host_s] = predict(row, profile, host_s, known.get(host_s))
        found.append(figures)
    return found


def least(rows: Sequence[Row], jobs: int | None = None) -> list[Predicted]:
    """The figures of all rows with every op at the datasheet's rates, nothing between them, and every prompt
    computed."""
    plain = [replace(row, series=replace(cast(Any, row.series), distinct_prompts=None)) for row in rows]
    return predict_all([(row, 0.0) for row in plain], FLOOR, jobs)


def drawn(rows: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """Of each series a tenth of its rows, at least one, by a seed."""
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        series.setdefault(row.series.name, []).append(row)
    return {
        name: random.Random(f"{seed} {name}").sample(mine, math.ceil(FITTED_SHARE * len(mine)))
        for name, mine in sorted(series.items())
    }


def fitted(chosen: Mapping[str, Sequence[Row]], profile: str, jobs: int | None = None) -> dict[str, float]:
    """host_s of each series from these rows alone."""
    rows = [row for mine in chosen.values() for row in mine]
    tasks = [(row, host_s) for row in rows for host_s in HOST_S]
    found = iter(predict_all(tasks, profile, jobs))
    ratios = {row.id: np.array([next(found).tpot_s / row.tpot_s for _ in HOST_S]) for row in rows}
    tried = np.linspace(HOST_S[0], HOST_S[-1], STEPS)
    return {name: _best(tried, [ratios[row.id] for row in mine]) for name, mine in chosen.items()}


def _best(tried: Numbers, ratios: Sequence[Numbers]) -> float:
    off = np.mean([np.abs(np.log(np.interp(tried, HOST_S, ratio))) for ratio in ratios], axis=0)
    return float(tried[int(off.argmin())])
