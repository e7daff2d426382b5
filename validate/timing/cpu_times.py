"""Times of ops on this machine, one by one, and the rates of memory and matrix products.

Every op runs as on the torch machine, from a table of kernels and on random tensors: once to warm up, then
until its share of the time is spent (at least LEAST_RUNS times, but no run after the first starts later than
PATIENCE shares after the end of the op's own), in two rounds, so that a pause of the machine does not hit all
runs of one shape. The median counts. Before each run 2 MB of other memory are written. Operands then come
from the cache that cores share instead of a core's own, and so do Python's objects, as in a run, where other
ops have run in between.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from simcore.devices.making import Point
from simcore.kernels.kernel import DTYPES, Kernel
from simcore.ops.op import Op, Roofline
from simcore.sim.garbage import no_collections
from simcore.studies.common import Progress
from simcore.validate.timing.op_times import point_of

WARM_UPS = 1
LEAST_RUNS, MOST_RUNS = 3, 200
ROUNDS = 2
# After an op's share of the time and PATIENCE times as much again, a round makes no further run of it. Once
# the ops so far have taken LATE times their shares, as on a machine with other work, the next ones get one
# round, of as many runs as there is time for.
PATIENCE, LATE = 3, 1.5
# Larger than the caches of any CPU core; within a core's second-level cache.
MEMORY_BYTES, CACHE_BYTES = 1 << 28, 1 << 19
# More than a core's own caches hold, less than the shared cache.
OTHERS_BYTES = 1 << 21
CPU = torch.device("cpu")
# The source of operands here.
CACHE = "shared cache"

Clock = Callable[[], float]


def measure(
    table: Mapping[str, Kernel],
    shapes: Sequence[Op],
    floor: Roofline,
    total_s: float,
    progress: Progress,
    clock: Clock = time.perf_counter,
) -> list[Point]:
    """Returns a point of each op, within about `total_s` seconds plus the time to make inputs. Goes kind by
    kind, so that the two rounds of an op do not follow each other directly."""
    each_s = total_s / (ROUNDS * max(1, len(shapes)))
    generator = torch.Generator().manual_seed(0)
    by_kind: dict[str, list[Op]] = {}
    for op in shapes:
        by_kind.setdefault(op.kind, []).append(op)
    points: list[Point] = []
    begun_s = clock()
    for kind, ops in by_kind.items():
        progress(f"{len(ops)} shapes of {kind}", len(points), len(shapes))
        rounds: list[list[list[float]]] = []
        for _ in range(ROUNDS):
            late = clock() - begun_s > LATE * each_s * ROUNDS * (len(points) + len(ops))
            if not (rounds and late):
                least = 1 if late else LEAST_RUNS
                rounds.append([_runs(table[kind], op, generator, each_s, least, clock) for op in ops])
        for i, op in enumerate(ops):
            points.append(point_of(op, floor, [seconds for each in rounds for seconds in each[i]], CACHE))
    return points


def _runs(
    kernel: Kernel, op: Op, generator: torch.Generator, each_s: float, least: int, clock: Clock
) -> list[float]:
    """Returns the seconds of single runs, `least` of them unless that takes too long."""
    run, seconds = kernel.run, list[float]()
    with torch.inference_mode(), no_collections():
        tensors = kernel.inputs(op, generator, CPU)
        for _ in range(WARM_UPS):
            run(op, *tensors)
        others, end_s = np.zeros(OTHERS_BYTES // 8), clock() + each_s
        late_s = end_s + PATIENCE * each_s
        while _goes_on(len(seconds), least, clock(), end_s, late_s):
            np.add(others, 1.0, out=others)
            begun_s = clock()
            run(op, *tensors)
            seconds.append(clock() - begun_s)
    return seconds


def _goes_on(runs: int, least: int, now_s: float, end_s: float, late_s: float) -> bool:
    if runs < least:
        return runs == 0 or now_s < late_s
    return runs < MOST_RUNS and now_s < end_s


def rates(quick: bool) -> dict[str, float]:
    """Returns the rates of this machine: bytes/s of a copy (read and written) in memory and in a core's
    cache, flop/s of a matrix product of 512 (quick: 256) in each dtype. The best of a few runs."""
    found = {}
    for name, size in (("memory_bytes_per_s", MEMORY_BYTES >> 2 * quick), ("cache_bytes_per_s", CACHE_BYTES)):
        source = torch.ones(size // 8)
        target = torch.empty_like(source)
        found[name] = size / _best_s(partial(target.copy_, source))
    side = 256 if quick else 512
    for dtype in ("fp64", "fp32", "bf16", "fp16"):
        a = torch.ones(side, side, dtype=DTYPES[dtype])
        found[f"{dtype}_flops_per_s"] = 2.0 * side**3 / _best_s(partial(torch.matmul, a, a))
    return found


def _best_s(run: Callable[[], object]) -> float:
    run()
    best_s = float("inf")
    for _ in range(5):
        begun_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return best_s
