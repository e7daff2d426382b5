"""Predicts a measured row: the same clients, engine and card, at the prices of a profile.

    TTFT, TPOT = means over the requests that the benchmark counts
    the engine takes, beyond the profile, what `HostTime` says: between steps, for its kernels, on the ways in
    and out

These constants depend on the engine's version and on the machines, so each series of measurements has its
own, fitted to a third of its rows of FITTED models, drawn by a seed, as `calibrate --from` fits them to runs
of one's own (`service.py`). The fit never uses the other rows, and no row of other models.
"""

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, cast

from simcore.assembly import assemble
from simcore.devices.profile import NO_PROFILE
from simcore.machine.machine import Overheads
from simcore.ops.op import Op, Price
from simcore.scenario import parse_scenario
from simcore.studies.hardware import Hardware
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.engines.presets import load_engine
from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.studies.serving.runner import Bench, price_shares
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.study import cases
from simcore.validate.calibration.records import NAME
from simcore.validate.calibration.service import COSTS, FACTORS, LATE, Times, told_apart
from simcore.validate.calibration.service import fitted as to_runs
from simcore.validate.engines.rows import FITTED, Row

# The share of rows to which constants are fitted.
FITTED_SHARE = 1.0 / 3.0
# From so many times what a right simulation is off by, an error counts by its size and not by its square:
# some rows cannot be true.
HUBER = 2.0
# Fewer rows, of two figures each, tell only what steps take, and by how much prompts are late; one row tells
# the former alone.
FEWEST, OF_STEPS = 7, ("step_s", "sequence_s")
# Of fewer rows op times are the profile's: with constants of a host in them, factors were found that no
# other row bore out (collectives 1.85 times as long).
FOR_FACTORS = 10
# Tasks that a process is given at a time, so that none works long after the others.
AT_A_TIME = 12
# Hosts whose prices of graphs are kept at a time.
MOST_HOSTS = 24
FLOOR = "floor"
# What rows have of their engine's preset.
OF_ENGINE = ("block_tokens", "reserve", "preempted", "memory")
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
    known, weights, engine = row.series, row.weights, load_engine(row.series.engine).fields
    budget = known.by_lengths.get(row.lengths, known.token_budget)
    if known.budget_beyond_prompt is not None:
        budget = row.isl + known.budget_beyond_prompt
    strategy = {
        "kind": "continuous_batching",
        "token_budget": budget,
        "max_sequences": row.places,
        "prefill": known.prefill,
        "ahead": known.ahead,
        "prefix_caching": known.distinct_prompts is not None,
        **{name: engine[name] for name in OF_ENGINE},
        "ranks": row.ranks,
        "host": {**host.numbers, "products_of": row.series.products_of, "quantizes": row.series.quantizes},
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
    scenario = scenario_of(row, profile, host)
    bench = _bench(scenario, row.id, profile) if like is None else like.of(scenario)
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


def _bench(scenario: ServingScenario, name: str, profile: str) -> Bench:
    study = assemble(scenario, name).study
    assert isinstance(study, DeviceStudy)
    known = study.bench.hardware if profile != FLOOR else _at_datasheet(study.bench.hardware)
    bench: Bench = replace(study.bench, hardware=replace(known, kept=None))
    return bench


# -- many rows ---------------------------------------------------------------------------------------------


Task = tuple[Row, HostTime]


class Predictions(Protocol):
    """Predicts rows, each with a host, in this order."""

    def __call__(self, tasks: Sequence[Task], profile: str) -> list[Predicted]:
        """Returns their predictions."""


@contextmanager
def predictions(jobs: int | None = None) -> Iterator[Predictions]:
    """Gives what predicts rows in `jobs` processes, default the number of cores, which keep the prices that
    they have found."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        known: Known = {}
        yield lambda tasks, profile: _predict_tasks(tasks, profile, known)
        return
    with ProcessPoolExecutor(jobs) as pool:

        def predict_in_pool(tasks: Sequence[Task], profile: str) -> list[Predicted]:
            # Tasks at the same prices together.
            order = sorted(range(len(tasks)), key=lambda i: str(_place(tasks[i][0])))
            parts = [order[i : i + AT_A_TIME] for i in range(0, len(order), AT_A_TIME)]
            work = [[tasks[i] for i in part] for part in parts]
            found = pool.map(partial(_predict_part, profile), work)
            return [one for _, one in sorted(zip(order, chain(*found), strict=True), key=itemgetter(0))]

        yield predict_in_pool


def predict_all(tasks: Sequence[Task], profile: str, jobs: int | None = None) -> list[Predicted]:
    """Predicts rows, each with a host; `jobs`: number of processes, default the number of cores."""
    with predictions(jobs) as predicted:
        return predicted(tasks, profile)


def _place(row: Row) -> tuple[object, ...]:
    """Returns the fields that determine prices."""
    return (row.card, row.model, row.ranks, row.weights, row.kv_dtype)


# Benches by profile and place, whose prices are used again.
Known = dict[tuple[object, ...], Bench]
# Of a process of a pool.
_KNOWN: Known = {}


def _predict_part(profile: str, tasks: Sequence[Task]) -> list[Predicted]:
    return _predict_tasks(tasks, profile, _KNOWN)


def _predict_tasks(tasks: Sequence[Task], profile: str, known: Known) -> list[Predicted]:
    found = []
    for row, host in tasks:
        key = (profile, *_place(row))
        figures, bench = predict(row, profile, host, known.get(key))
        # Each host with other factors has prices of its own.
        many = len(bench.models) >= MOST_HOSTS
        known[key] = replace(bench, models={}, prices={}, groups={}) if many else bench
        found.append(figures)
    return found


def least(rows: Sequence[Row], jobs: int | None = None) -> list[Predicted]:
    """Returns all rows' figures with ops at the datasheet's rates, no time between them, no prefix cached, no
    place missing."""
    bound: dict[str, Any] = {"distinct_prompts": None, "places_missing": {}}
    plain = [replace(row, series=replace(cast(Any, row.series), **bound)) for row in rows]
    return predict_all([(row, NO_HOST_TIME) for row in plain], FLOOR, jobs)


def drawn(rows: Sequence[Row], seed: int) -> dict[str, list[Row]]:
    """Draws a third of the rows of each series, at least one, by a seed; of models that are FITTED."""
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        if row.model in FITTED:
            series.setdefault(row.series.name, []).append(row)
    return {
        name: random.Random(f"{seed} {name}").sample(mine, max(1, math.floor(FITTED_SHARE * len(mine))))
        for name, mine in sorted(series.items())
    }


def fitted(chosen: Mapping[str, Sequence[Row]], profile: str, jobs: int | None = None) -> dict[str, HostTime]:
    """Fits the constants of each series to these rows."""
    with predictions(jobs) as predicted:
        found = {
            name: to_runs(
                mine,
                lambda tasks: [Times(one.ttft_s, one.tpot_s) for one in predicted(tasks, profile)],
                names=_names(mine),
                most_slopes=1,
                huber=HUBER,
            )
            for name, mine in chosen.items()
        }
    return {name: fit.beside([*found.values()]) for name, fit in found.items()}


def _names(rows: Sequence[Row]) -> list[str]:
    """Returns the constants that rows of a series determine."""
    told = told_apart(rows)
    if len(rows) >= FOR_FACTORS:
        return [*told]
    if len(rows) >= FEWEST:
        return [name for name in told if name not in FACTORS]
    return [*(name for name in OF_STEPS if name in told), *[LATE] * (len(rows) > 1)]


def host_for(row: Row, chosen: Mapping[str, Sequence[Row]], hosts: Mapping[str, HostTime]) -> HostTime:
    """Returns the constants of a row's series; none if no row of it was drawn. Kernels of a number format
    that no row drawn has are other kernels: their factors are 1. What the host takes may be that of another
    series (`host_of`)."""
    mine = row.series.fitted_as
    if mine not in hosts:
        return NO_HOST_TIME
    theirs = hosts.get(row.series.host_of or mine, hosts[mine])
    host = hosts[mine].model_copy(update={name: getattr(theirs, name) for name in COSTS})
    if row.weights in {one.weights for one in chosen[mine]}:
        return host
    return host.model_copy(update={"arithmetic_factor": 1.0, "memory_factor": 1.0})
