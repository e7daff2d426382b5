"""Answers of `plan` beside exhaustive search, on scenarios drawn by seed.

    python -m tests.plan_exhaustive --seed 1 --count 5 --question devices
    python -m tests.plan_exhaustive --seed 1 --count 5 --question rate
    python -m tests.plan_exhaustive --seed 1 --count 50 --question servers
    python -m tests.plan_exhaustive --seed 1 --count 250 --question verdict

devices  every number of servers of each way of running, from one until one holds: 30 replicas each, with
         twice as many requests until there is a steady state
rate     the rate at which a mean over 100 replicas crosses its limit, or too few requests come for a steady
         state, found in steps of 1 % around the plan's answer; its requests beside those of such a grid
         over a factor of four, in 25 points
servers  M/M/c: the fewest servers by Erlang's formula, at a limit between what they and one less give
verdict  "holds" of small systems near their limits, beside the mean over 1,000 other replicas
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

from simcore import compiled

if __name__ == "__main__":
    # Before anything of the core is imported.
    compiled.use()

from simcore.planning.alternatives import Alternative, alternatives, load_of, with_load, with_servers
from simcore.planning.limits import Limit
from simcore.planning.plan import Plan, run
from simcore.planning.points import Benches, Point
from simcore.planning.runs import Ask, InProcesses, Ran, Runner
from simcore.planning.searches import MOST_TIMES, drive, judge, too_few
from simcore.planning.store import Store
from simcore.planning.verdict import Rule
from simcore.planning.whatif import Asked, load_plan
from simcore.studies.processes import cores
from tests.test_planning import staffing

REPLICAS, MANY, GRID = 30, 100, 25
# Replicas that say where a system's mean lies, those that judge "holds", and how near limits are to means.
PILOT, ALL, NEAR = 40, 1000, (0.99, 1.15)
METRICS = ("ttft_p99_s", "ttft_mean_s", "tpot_p99_s", "itl_p99_s", "e2e_p95_s", "e2e_mean_s")


def silent(doing: str, done: int, total: int) -> None:
    del doing, done, total


def drawn(random: Random, question: str) -> dict[str, Any]:
    """A scenario that somebody may plan by."""
    model, ranks = random.choice([("llama-3.1-8b", [1, 2]), ("qwen3-14b", [1, 2]), ("llama-3.1-70b", [4, 8])])
    small = model == "llama-3.1-8b"
    prompt, output = random.randint(100, 2000), random.randint(50, 400)
    rate = 10.0 ** random.uniform(0.6, 1.7 if small else 1.2) / (1.0 if question == "devices" else 4.0)
    return {
        "name": "drawn", "study": "serving", "device": "h200-sxm", "model": model,
        "seed": random.randint(0, 10**6),
        "devices": ranks[0],
        "workload": {
            "requests": random.choice([300, 600]),
            "arrivals": {"kind": "poisson", "rate_per_s": round(rate, 2)},
            "prompt_tokens": {"kind": "lognormal", "mean": prompt, "cv": 0.6, "max": 4 * prompt},
            "output_tokens": {"kind": "uniform", "low": output // 2, "high": 2 * output},
        },
        "strategies": [
            {"kind": "continuous_batching", "ranks": ranks if question == "devices" else ranks[0]}
        ],
        "slo": {
            "ttft_s": round(10.0 ** random.uniform(-0.7, 0.3), 2),
            "tpot_s": round(10.0 ** random.uniform(-1.7, -1.1), 3),
        },
    }  # fmt: skip


def holds(asked: Asked, runner: Runner, at: Callable[[int], Point]) -> bool:
    """Whether the means over all replicas keep all limits, and the queue grows in at most half of them. `at`:
    the point with so many times as many requests, which are doubled until there is a steady state, or twice
    in a row every replica's queue grows and the means break a limit."""
    times, overloaded = 1, 0
    while True:
        ran = runner([Ask(at(times), replica) for replica in range(REPLICAS)])
        if not too_few(ran):
            break
        overloaded = overloaded + 1 if all(one.growing for one in ran) and _over(asked, ran) else 0
        if overloaded == 2 or times >= MOST_TIMES:
            return False
        times *= 2
    if 2 * sum(one.growing for one in ran) > len(ran):
        return False
    if any(one.figures["rejected"] for one in ran):
        return False
    return not _over(asked, ran)


def fewest(asked: Asked, benches: Benches, runner: Runner, one: Alternative, most: int) -> int | None:
    """The least number of devices that holds, of one way of running, tried one after the other."""
    ranks = one.point.case.axes.ranks
    for servers in range(1, most // ranks + 1):
        if holds(asked, runner, partial(with_servers, benches, one, servers)):
            return servers * ranks
    return None


def devices(asked: Asked, plan: Plan) -> tuple[bool, str]:
    """Whether a plan's number of devices is that of the exhaustive search, and both in words."""
    benches = Benches(asked.where, cores())
    runner = Runner(InProcesses(benches, cores()), Store(None), silent)
    best = next((line["devices"] for line in plan.lines if line["best"]), None)
    most = 64 if best is None else best + 8
    every = alternatives(asked, benches, any_devices=True).every
    found = [fewest(asked, benches, runner, one, most) for one in every]
    least = min((number for number in found if number is not None), default=None)
    return best == least, f"plan {best}, exhaustive {least} ({runner.requests:,} requests)"


def _over(asked: Asked, ran: Sequence[Ran]) -> list[str]:
    """The limits that means over runs break."""
    means = {limit: fmean(one.figures[limit.metric] or 0.0 for one in ran) for limit in asked.limits}
    return [limit.metric for limit, mean in means.items() if mean > limit.value]


def rate(asked: Asked, plan: Plan) -> tuple[bool, str]:
    """Whether a plan's rate is within 3 % of where the means over many replicas cross a limit."""
    benches = Benches(asked.where, cores())
    runner = Runner(InProcesses(benches, cores()), Store(None), silent)
    said = next((line["rate_per_s"] for line in plan.lines if line["best"]), None)
    (one,) = alternatives(asked, benches, any_devices=False).every
    if said is None:
        # Right where a single request at a time breaks a limit.
        least = with_load(benches, one, 0.01 * load_of(one.point.scenario.workload, asked.where))
        alone = runner([Ask(least, replica) for replica in range(MANY)])
        return _over(asked, alone) != [], f"plan: no rate; alone {', '.join(_over(asked, alone))} over"
    best = next(each for each in plan.result.winners if each is not None)
    assert best.value is not None
    requests = best.point.case.axes.requests
    times = requests // one.point.case.axes.requests
    likely = next(one.likely for group in plan.result.groups for one in group if one.best is best)
    edge, value = None, best.value * 0.97
    while edge is None and value < max(best.value * 1.3, 1.1 * (likely or 0.0)):
        ran = runner([Ask(with_load(benches, one, value, times), replica) for replica in range(MANY)])
        growing = 2 * sum(each.growing for each in ran) > len(ran)
        if growing or too_few(ran) or _over(asked, ran):
            edge = value
        value *= 1.01
    if edge is None:
        return False, f"plan {best.value:.4g}, no edge up to {value:.4g}"
    sure, off = (value / (edge / 1.005) - 1.0 for value in (best.value, likely or best.value))
    effort = f"requests 1/{MANY * GRID * requests / plan.requests:.1f} of a grid's of {requests:,}"
    text = f"plan {best.value:.4g}/s for sure, {sure:+.1%}, {likely or 0.0:.4g}/s by means, {off:+.1%}"
    return abs(off) <= 0.03 and sure <= 0.01, f"{text}; {effort}"


def erlang(random: Random) -> tuple[dict[str, Any], int]:
    """A capacity question of M/M/c, and the number of servers that Erlang's formula gives."""
    servers, load = random.randint(2, 7), random.uniform(0.6, 0.8)
    return staffing(servers, load, seed=random.randint(1, 10**6), requests=2000), servers


def small(random: Random) -> dict[str, Any]:
    """A small system, a few dozen to a few hundred requests, lightly loaded to full."""
    document = drawn(random, "rate")
    document["model"], document["devices"] = "llama-3.1-8b", 1
    document["strategies"] = [{"kind": "continuous_batching", "max_sequences": random.choice([4, 16, 64])}]
    document["workload"]["requests"] = random.randint(40, 200)
    answers = {"kind": "lognormal", "mean": random.randint(20, 100), "cv": 0.8, "max": 400}
    document["workload"]["output_tokens"] = answers
    document["workload"]["arrivals"]["rate_per_s"] = round(10.0 ** random.uniform(0.3, 1.6), 2)
    return {**document, "replicas": 30}


def verdict(asked: Asked, random: Random) -> tuple[bool, str]:
    """Whether "holds" was said of a mean that keeps its limit; another verdict is neither."""
    benches = Benches(asked.where, cores())
    runner = Runner(InProcesses(benches, cores()), Store(None), silent)
    (one,) = alternatives(asked, benches, any_devices=False).every
    metric = random.choice(METRICS)

    def mean(first: int, count: int) -> float:
        ran = runner([Ask(one.point, replica) for replica in range(first, first + count)])
        return fmean(each.figures[metric] or 0.0 for each in ran)

    limit = Limit(metric, mean(10**6, PILOT) * random.uniform(*NEAR), at_most=True)
    (found,) = drive([judge(one.point, [limit], Rule())], runner)
    if found.verdict != "holds":
        return True, f"{found.verdict}, {metric}"
    truth = mean(1000, ALL)
    return truth <= limit.value, f"holds, {metric}: {truth / limit.value - 1.0:+.2%} of the limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--question", choices=["devices", "rate", "servers", "verdict"], default="devices")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the draw")
    given = parser.parse_args()
    wrong = 0
    for number in given.only or range(given.count):
        right, words = answered(given.question, Random(f"{given.seed} {number}"))
        wrong += not right
        print(f"{number:3} {'right' if right else 'WRONG'} {words}", flush=True)
    print(f"{wrong} of {len(given.only or range(given.count))} wrong")
    sys.exit(1 if wrong else 0)


def answered(question: str, random: Random) -> tuple[bool, str]:
    """Whether one drawn question is answered rightly, and both answers in words."""
    servers = 0
    if question == "servers":
        document, servers = erlang(random)
    else:
        document = small(random) if question == "verdict" else drawn(random, question)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        asked = load_plan(path, {"servers": None, "verdict": "grid"}.get(question, question))
        if question == "verdict":
            return verdict(asked, random)
        begun_s = time.perf_counter()
        plan = run(asked, jobs=cores(), progress=silent)
        took_s = time.perf_counter() - begun_s
        if question == "servers":
            best = next((one.value for one in plan.result.winners if one is not None), None)
            right, words = best == servers, f"plan {best}, Erlang {servers}"
        else:
            right, words = (devices if question == "devices" else rate)(asked, plan)
    text = (
        "" if right or question == "servers" else f"\n    {document['model']} {document['slo']} {plan.answer}"
    )
    return right, f"{took_s:5.1f} s {words}{text}"


if __name__ == "__main__":
    main()
