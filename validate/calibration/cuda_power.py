"""Measures how much longer products take under load: what `power_fit` fits the law of `simcore.sim.power` to.

    steady   products for a share of each period, for SECONDS; periods from SETTLED_S on count, in the mean
    begins   after rest, or after what memory bounds, products without a pause

Products that arithmetic bounds have ROWS rows, those that memory bounds FEW_ROWS of the same matrices, more
of them than the L2 cache holds. Times are in those of the profile's price, which is what the simulator
lengthens; in fp8, to which no constant is fitted, in those of this card after rest.

A card over its cap lowers its clock too far, raises it too far, and so on, about once a second: the median
product of a second takes 3 % less than the mean one, which is what adds up to the time of a service.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean, median

import torch

from simcore.ops.op import Pricer, matmul
from simcore.sim.power import PowerLimit
from simcore.validate.benchmarks.timing import capture, event
from simcore.validate.calibration import power_fit
from simcore.validate.calibration.power_fit import Beside, Row
from simcore.validate.timing.cuda_times import Call, has_fp8, scaled_product

# Llama 3.1 8B's gate and up.
WIDE, DEEP, MATRICES = 28_672, 4_096, 8
ROWS, FEW_ROWS, SEED = 2_048, 32, 0
# The product that arithmetic bounds.
PRODUCT = matmul("gate_up", m=ROWS, n=WIDE, k=DEEP, dtype="bf16")
# Share of arithmetic, period, and what comes beside it; of fp8 a few.
STEADY: tuple[tuple[float, float, Beside], ...] = (
    *((share / 10, 0.04, "memory") for share in range(10, 0, -1)),
    *((share, 0.04, "rest") for share in (0.8, 0.6, 0.4, 0.2)),
    *((share, 0.01, "memory") for share in (0.8, 0.6, 0.4, 0.2)),
    *((share, 0.16, "memory") for share in (0.7, 0.4)),
)
STEADY_FP8: tuple[tuple[float, float, Beside], ...] = (
    (1.0, 0.04, "memory"), (0.7, 0.04, "memory"), (0.4, 0.04, "memory"),
)  # fmt: skip
QUICK: tuple[tuple[float, float, Beside], ...] = (
    (1.0, 0.04, "memory"), (0.6, 0.04, "memory"), (0.3, 0.04, "memory"), (0.8, 0.04, "rest"),
)  # fmt: skip
# For the cap of another card: shares at which the law is within 0.8 % of its own card's rows, in times of the
# cap, and seconds of each: four swings of the clock count.
CAP_CASES: tuple[tuple[float, float, Beside], ...] = (
    (0.9, 0.04, "memory"), (0.7, 0.04, "memory"), (0.5, 0.04, "memory"),
)  # fmt: skip
CAP_SECONDS = 5.0
# Seconds of a steady case, those that do not count, and of rest before it: two swings of the clock count.
SECONDS, SETTLED_S, REST_S = 3.0, 1.0, 0.5
# Beginnings of a kind, graphs of one, products in a graph, seconds before.
BEGINNINGS, BEGUN, AT_A_TIME, BEFORE_S = 3, 150, 2, 1.0
# Seconds of all of it, and of the quick cases.
LASTS_S, QUICK_LASTS_S = 95.0, 30.0
# Alone: products in a graph, and repetitions, each after a rest.
ALONE, REPEATS, ALONE_REST_S = 8, 9, 0.3
# Host and card: periods that are queued ahead.
AHEAD = 3


class Products:
    """The products of one card. `alone_s`: seconds of each by itself, by number format, "memory" for those
    that memory bounds; of bf16 by the price."""

    def __init__(self, price: Pricer, *, fp8: bool = True) -> None:
        generator = torch.Generator("cuda").manual_seed(SEED)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

        matrices = [drawn(WIDE, DEEP).mul_(DEEP**-0.5).t() for _ in range(MATRICES)]
        self.calls: dict[str, Sequence[Call]] = {}
        self.alone_s = {"bf16": price(PRODUCT).seconds}
        for name, rows in (("bf16", ROWS), ("memory", FEW_ROWS)):
            x, out = drawn(rows, DEEP), torch.empty(rows, WIDE, device="cuda", dtype=torch.bfloat16)
            self.calls[name] = [partial(torch.mm, x, each, out=out) for each in matrices]
        if fp8 and has_fp8():
            self.calls["fp8"] = [scaled_product(ROWS, WIDE, DEEP) for _ in range(MATRICES // 2)]
        for name in [each for each in self.calls if each != "bf16"]:
            self.add(name, self.calls[name])

    def add(self, name: str, calls: Sequence[Call]) -> float:
        """Adds products, or others of that name. Returns the seconds of one by itself, which it measures."""
        self.calls[name] = calls
        self.alone_s[name] = self._alone_s(name)
        return self.alone_s[name]

    def graph(self, name: str, count: int) -> torch.cuda.CUDAGraph:
        """Captures `count` products, matrix after matrix."""
        calls = self.calls[name]
        return capture([calls[i % len(calls)] for i in range(count)])

    def _alone_s(self, name: str) -> float:
        graph, found = self.graph(name, ALONE), []
        for _ in range(REPEATS):
            time.sleep(ALONE_REST_S)
            found.append(_took_s(graph))
        return median(found) / ALONE


def _took_s(graph: torch.cuda.CUDAGraph) -> float:
    before, after = event(), event()
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    return 1e-3 * float(before.elapsed_time(after))


def lasts_s(*, quick: bool) -> float:
    """Returns about how many seconds `rows_here` takes."""
    return QUICK_LASTS_S if quick else LASTS_S


def cases(*, quick: bool) -> int:
    """Returns how many cases and beginnings are measured at most."""
    return len(QUICK) + 2 if quick else len(STEADY) + len(STEADY_FP8) + 2 * BEGINNINGS


def rows_here(price: Pricer, *, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Measures this card, in times of the prices. Raises RuntimeError if it has no room for the matrices."""
    products = Products(price)
    asked = [("bf16", case) for case in (QUICK if quick else STEADY)]
    if not quick and "fp8" in products.calls:
        asked += [("fp8", case) for case in STEADY_FP8]
    rows = []
    for name, (share, period_s, beside) in asked:
        say(f"{name}, {share:.0%} of {1e3 * period_s:g} ms beside {beside}")
        rows.append(steady(products, name, share, period_s, beside))
    before: tuple[Beside, ...] = ("rest", "memory")
    for number in range(2 * (1 if quick else BEGINNINGS)):
        say(f"after {before[number % 2]}")
        rows += beginning(products, before[number % 2], number + 1)
    return rows


def cap_times(limit: PowerLimit, price: Pricer) -> float:
    """Returns by how much this card's power cap is lower than that of the law's card, by CAP_CASES, in about
    25 s. Times are in those of the law's prices: by those of this card at rest, which differ by some
    percent from card to card, predictions would be off by as much. Raises RuntimeError as `rows_here`, and
    OffError as `power_fit.cap_times`."""
    products = Products(price, fp8=False)
    rows = [steady(products, "bf16", *case, seconds=CAP_SECONDS) for case in CAP_CASES]
    return power_fit.cap_times(limit, rows)


def steady(
    products: Products, name: str, share: float, period_s: float, beside: Beside, *, seconds: float = SECONDS
) -> Row:
    """Measures one steady case for so many seconds."""
    alone_s = products.alone_s[name]
    count = max(1, round(share * period_s / alone_s))
    graph, left_s, other = products.graph(name, count), (1.0 - share) * period_s, None
    if beside == "memory" and share < 1.0:
        other = products.graph("memory", max(1, round(left_s / products.alone_s["memory"])))
    time.sleep(REST_S)
    marks, settled = [], round(SETTLED_S / period_s)
    for _ in range(round(seconds / period_s)):
        before, after = event(), event()
        before.record()
        graph.replay()
        after.record()
        marks.append((before, after))
        if other is not None:
            other.replay()
        elif beside == "rest":
            after.synchronize()
            time.sleep(left_s)
        if len(marks) > AHEAD:
            marks[-AHEAD][1].synchronize()
    torch.cuda.synchronize()
    counted = marks[settled:]
    took_s = mean([1e-3 * before.elapsed_time(after) for before, after in counted])
    whole_s = 1e-3 * counted[0][0].elapsed_time(counted[-1][0]) / (len(counted) - 1)
    times, taken = took_s / count / alone_s, min(1.0, took_s / whole_s)
    return Row("steady", name, beside, whole_s, taken, 0.0, 0, times, len(counted) * count)


def beginning(products: Products, beside: Beside, series: int) -> list[Row]:
    """Measures products from the moment on at which they begin."""
    alone_s = products.alone_s["bf16"]
    graph = products.graph("bf16", AT_A_TIME)
    if beside == "memory":
        other = products.graph("memory", 100)
        for _ in range(round(BEFORE_S / (100 * products.alone_s["memory"]))):
            other.replay()
    else:
        time.sleep(BEFORE_S)
    marks = [event() for _ in range(BEGUN + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    rows = []
    for one, two in pairwise(marks):
        took_s, at_s = 1e-3 * one.elapsed_time(two), 1e-3 * marks[0].elapsed_time(one)
        times = took_s / AT_A_TIME / alone_s
        rows.append(Row("begins", "bf16", beside, AT_A_TIME * alone_s, 1.0, at_s, series, times, AT_A_TIME))
    return rows
