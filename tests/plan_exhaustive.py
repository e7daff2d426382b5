"""Answers of `plan` beside exhaustive search, on scenarios drawn by seed.

    python -m tests.plan_exhaustive --seed 1 --count 5 --question devices
    python -m tests.plan_exhaustive --seed 1 --count 5 --question rate

devices  every number of servers of each way of running, from one until one holds: 30 replicas each
rate     the rate at which a mean over 100 replicas crosses its limit, or too few requests come for a steady
         state, found in steps of 1 % around the plan's answer; its requests beside those of such a grid
         over a factor of four, in 25 points
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import yaml

from simcore import compiled

if __name__ == "__main__":
    # Before anything of the core is imported.
    compiled.use()

from simcore.planning.alternatives import Alternative, alternatives, with_load, with_servers
from simcore.planning.plan import Plan, run
from simcore.planning.points import Benches, Point
from simcore.planning.runs import Ask, InProcesses, Runner
from simcore.planning.store import Store
from simcore.planning.whatif import Asked, load_plan
from simcore.studies.processes import cores

REPLICAS, MANY, GRID = 30, 100, 25


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


def holds(asked: Asked, runner: Runner, point: Point) -> bool:
    """Whether the means over all replicas keep all limits, and the queue grows in at most half of them."""
    ran = runner([Ask(point, replica) for replica in range(REPLICAS)])
    if 2 * sum(one.growing for one in ran) > len(ran) or any(one.figures["rejected"] for one in ran):
        return False
    means = {limit: fmean(one.figures[limit.metric] or 0.0 for one in ran) for limit in asked.limits}
    return all(mean <= limit.value for limit, mean in means.items())


def fewest(asked: Asked, benches: Benches, runner: Runner, one: Alternative, most: int) -> int | None:
    """The least number of devices that holds, of one way of running, tried one after the other."""
    ranks = one.point.case.axes.ranks
    for servers in range(1, most // ranks + 1):
        if holds(asked, runner, with_servers(benches, one, servers)):
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


def rate(asked: Asked, plan: Plan) -> tuple[bool, str]:
    """Whether a plan's rate is within 3 % of where the means over many replicas cross a limit."""
    benches = Benches(asked.where, cores())
    runner = Runner(InProcesses(benches, cores()), Store(None), silent)
    said = next((line["rate_per_s"] for line in plan.lines if line["best"]), None)
    if said is None:
        return False, "plan: no rate"
    (one,) = alternatives(asked, benches, any_devices=False).every
    best = next(each for each in plan.found.winners if each is not None)
    assert best.value is not None
    requests = best.point.case.axes.requests
    times = requests // one.point.case.axes.requests
    edge, value = None, best.value * 0.97
    while edge is None and value < best.value * 1.3:
        ran = runner([Ask(with_load(benches, one, value, times), replica) for replica in range(MANY)])
        growing = 2 * sum(each.growing or each.short for each in ran) > len(ran)
        over = [
            limit.metric
            for limit in asked.limits
            if fmean(each.figures[limit.metric] or 0.0 for each in ran) > limit.value
        ]
        if growing or over:
            edge = value
        value *= 1.01
    if edge is None:
        return False, f"plan {best.value:.4g}, no edge up to {value:.4g}"
    likely = next(one.likely for group in plan.found.groups for one in group if one.best is best)
    sure, off = (value / (edge / 1.005) - 1.0 for value in (best.value, likely or best.value))
    effort = f"requests 1/{MANY * GRID * requests / plan.requests:.1f} of a grid's of {requests:,}"
    told = f"plan {best.value:.4g}/s for sure, {sure:+.1%}, {likely or 0.0:.4g}/s by means, {off:+.1%}"
    return abs(off) <= 0.03 and sure <= 0.01, f"{told}; {effort}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--question", choices=["devices", "rate"], default="devices")
    given = parser.parse_args()
    wrong = 0
    for number in range(given.count):
        document = drawn(Random(f"{given.seed} {number}"), given.question)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "drawn.yaml"
            path.write_text(yaml.safe_dump(document), encoding="utf-8")
            asked = load_plan(path, given.question)
            begun_s = time.perf_counter()
            plan = run(asked, jobs=cores(), progress=silent)
            took_s = time.perf_counter() - begun_s
            right, words = (devices if given.question == "devices" else rate)(asked, plan)
        wrong += not right
        print(f"{number:3} {'right' if right else 'WRONG'} {took_s:5.1f} s {words}", flush=True)
        if not right:
            print(f"    {document['model']} {document['slo']} {plan.answer}", flush=True)
    print(f"{wrong} of {given.count} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
