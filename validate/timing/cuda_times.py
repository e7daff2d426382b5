"""Times of ops on a CUDA card, one by one, in captured graphs; the rates of the card.

    seconds of an op = (time of a graph of (another kernel, call) - its start) / calls
                     - the other kernel between others

As in a model, another kernel runs before each call (`between`), small and on the same stream. Calls that
follow each other directly do not measure that: a kernel that starts while the launch before it ends (decode
attention) then obstructs itself and takes up to a quarter longer, and kernels that are already loaded start
sooner.

cold: the calls rotate through so many sets of operands that no set is in the L2 cache at its next turn, but
at most MOST_SETS sets; sets of small operands all stay in the cache. This is the price of an op. warm: all
calls use the same operands: the price of operands that a run uses again at once (`FittedProfile.in_cache`).
An op that takes only the fresh results of earlier ops (AS_WRITTEN) is priced from the cache, as far as it
fits: the calls rotate through so many sets as stay in a part of the cache, because one address may take
longer than another. The time of a graph between two of its nodes is part of an op's time; the start of the
graph is not.

All are times of a card at rest. A card that multiplies for long draws more power than its limit and lowers
its clock, by up to a quarter; the last tenths of a second decide. Products timed one after another, at
whatever clock, differ between two timings by 4 % in the median and at times by 10 %; at rest nine in ten
differ by less than 1.4 %. So before each timing the card rests until its recent share of time on loading ops
(an average that forgets by MEMORY_S) is at most REST_SHARE. `rates` measures how much slower products are
under load.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from simcore.devices.fitted import WRITTEN
from simcore.devices.interpolation import COLD, STAY, operand_bytes
from simcore.devices.making import Point
from simcore.input.files import InputError
from simcore.kernels.kernel import DTYPES, Kernel
from simcore.kernels.streams import one_stream
from simcore.ops.op import Op, Roofline, multiplied_as
from simcore.sim.garbage import no_collections
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.timing import Card, capture, once_s, one_line, replayed, replays_s
from simcore.validate.timing.captures import GraphPool
from simcore.validate.timing.op_times import point_of
from simcore.validate.timing.reading_kernels import nothing_kernel

SEED = 0
# The most sets of buffers: of small shapes some sets then stay in the L2 cache.
MOST_SETS = 128
# The length of a graph that is enough: long ops are called less often.
GRAPH_S = 3e-4
# An op bound by arithmetic with a floor above this loads the card.
LOADING_FLOOR_S = 5e-5
# The most of recent time spent on such ops before a timing; MEMORY_S weighs older time less.
REST_SHARE, MEMORY_S = 0.4, 0.2
# Products run for so long before their rate under load is taken.
LOADED_S = 1.0
# Rounds of replays; one round for ops that load the card; for ops longer than SLOW_S one round of fewer
# replays.
ROUNDS, REPLAYS, SLOW_S, SLOW_REPLAYS = 2, 5, 2e-3, 3
# How many pairs of the kernel between calls and of another kernel are timed, and the warps of both.
PAIRS, WARPS = (10, 50), (1, 4)
# For shorter ops the kernel between calls is timed anew.
SHORT_S = 2e-5
# The cache has to be more than so many times as large as warm operands, which stay in half of it
# (`devices.price.STAYS`), and as all sets of fresh operands, to which other ops leave less of it.
WARM_SHARE, WRITTEN_SHARE = 2, 4
# A card runs these on all positions of a model.
LINES = frozenset({"conv_row", "conv_column"})
# Sides of the square products that give the rate of a number format.
SIDE = 8192
CALLS_OF_RATES = 4

# Ops whose operands are activations.
AS_WRITTEN = frozenset({
    "norm", "residual", "activation", "rotary", "sample", "receive_speculation", "quantize",
    "gate", "next_input", "conv_cell",
})  # fmt: skip

Call = Callable[[], object]
# The errors of a shape that cannot be measured: too little memory, a layout that does not fit, no such
# kernel.
FAILURES = (RuntimeError, ValueError, TritonError)


def go_on() -> None:
    """Recovers after a shape that could not be measured. Raises InputError if the card no longer answers."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise InputError(f"--on cuda: the card answers no more: {one_line(error)}") from None


def operands(
    kernel: Kernel, op: Op, l2_bytes: int, device: torch.device | str = "cuda", *, stay: bool = False
) -> list[tuple[Tensor, ...]]:
    """Makes sets of random operands of an op: enough to rotate through L2, or as many as `stay` there."""
    first = kernel.inputs(op, torch.Generator(device).manual_seed(SEED), torch.device(device))
    set_bytes = _bytes_of(op, first)
    count = min(MOST_SETS, cases.rotation(set_bytes, l2_bytes))
    if stay:
        count = max(1, min(cases.LEAST_CALLS, l2_bytes // WRITTEN_SHARE // set_bytes))
    elif MOST_SETS * set_bytes <= l2_bytes:
        # All sets would stay in the cache as well.
        count = min(count, cases.LEAST_CALLS)
    return [first, *(tuple(map(_twin, first)) for _ in range(count - 1))]


def _bytes_of(op: Op, tensors: Sequence[Tensor]) -> int:
    """Returns the bytes that an op works on: a tile, a row or a column takes a part of its tensors."""
    every = sum(x.nbytes for x in tensors)
    if op.kind in LINES:
        return min(every, int(op.work.hbm_bytes))
    return operand_bytes(op.kind, {name: op[name] for name, _ in op.shape}) or every


def _twin(x: Tensor) -> Tensor:
    """Copies a tensor with all other elements of its storage: a kernel may rely on them."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def calls_over(kernel: Kernel, op: Op, sets: Sequence[tuple[Tensor, ...]]) -> tuple[list[Call], float]:
    """Returns the calls of one graph, whole rounds of the sets, and the seconds of a call outside graphs."""
    calls: list[Call] = [partial(kernel.run, op, *one) for one in sets]
    took_s = once_s(calls[-1])
    least = 1 if took_s > GRAPH_S else cases.least_calls(took_s, GRAPH_S)
    return [calls[i % len(calls)] for i in range(cases.calls_of(len(calls), least))], took_s


def measured(kernel: Kernel, op: Op, floor: Roofline, card: Card) -> Point:
    """Returns the point of an op. Raises any error of its kernel, or of the lack of memory."""
    with torch.inference_mode(), no_collections(), one_stream({}):
        written = op.kind in AS_WRITTEN
        sets = operands(kernel, op, card.l2_bytes, stay=written)
        set_bytes = _bytes_of(op, sets[0])
        calls, took_s = calls_over(kernel, op, sets)
        graph, slow, loading = _captured(_spaced(calls)), took_s >= SLOW_S, loads(op, floor)
        seconds = list[float]()
        if loading:
            # Two calls outside the graph, and the graph once.
            heat().add((2 + len(calls)) * took_s)
        heat().rest()
        other = between().seconds(again=took_s < SHORT_S)
        for _ in range(1 if slow or loading else ROUNDS):
            seconds += _times(graph, len(calls), other, SLOW_REPLAYS if slow else REPLAYS)
        if loading:
            heat().add(len(calls) * sum(seconds))
        del graph
        warm_s = None
        if not written and len(sets) > 1 and WARM_SHARE * set_bytes < card.l2_bytes:
            same = [calls[0]] * min(len(calls), cases.LEAST_CALLS)
            warm_s = statistics.median(_times(_captured(_spaced(same)), len(same), other))
    where = WRITTEN if written else cache_state(len(sets), set_bytes, card.l2_bytes)
    return replace(point_of(op, floor, seconds, where), warm_s=warm_s)


def _spaced(calls: Sequence[Call]) -> list[Call]:
    """Returns each call after the kernel between calls."""
    other = between().call
    return [each for call in calls for each in (other, call)]


def _times(
    graph: torch.cuda.CUDAGraph, calls: int, other: tuple[float, float], replays: int = REPLAYS
) -> list[float]:
    """Returns the seconds of a call, without the graph's start and the kernel before it, replay by replay."""
    start_s, other_s = other
    seconds = [(each - start_s) / calls - other_s for each in replays_s(graph, replays, ahead=True)]
    if min(seconds) <= 0.0:
        raise ValueError("is not told from the kernel between calls")
    return seconds


class _Between:
    """The kernel between calls: one block that does nothing, so that no address matters.

    It is timed alternating with another such kernel, because each of them then follows another kernel; half
    of the time is its own. Graphs of few and of many pairs separate the start of a graph from it. All of this
    depends on the card's clock, which depends on its load: for short ops it is timed each time."""

    def __init__(self) -> None:
        word = torch.zeros(1, dtype=torch.int32, device="cuda")
        calls: list[Call] = [partial(nothing_kernel[(1,)], word, num_warps=warps) for warps in WARPS]
        self.call = calls[0]
        for call in calls:
            call()
        self._graphs = [(len(calls) * pairs, _captured(calls * pairs)) for pairs in PAIRS]
        self._seconds = self.seconds(again=True)

    def seconds(self, *, again: bool) -> tuple[float, float]:
        """Returns the start of a graph and the kernel, in seconds, as last timed, or timed now if `again`."""
        if again:
            (few, few_s), (many, many_s) = (
                (calls, statistics.median(replays_s(graph, REPLAYS, ahead=True)))
                for calls, graph in self._graphs
            )
            other_s = (many_s - few_s) / (many - few)
            self._seconds = max(0.0, few_s - few * other_s), other_s
        return self._seconds


@cache
def between() -> _Between:
    """Returns the kernel between calls of this process."""
    return _Between()


def loads(op: Op, floor: Roofline) -> bool:
    """Whether an op computes so much, and moves so little, that the card's power decides its speed."""
    least = floor(op)
    return least.compute_s > max(LOADING_FLOOR_S, least.memory_s)


class _Heat:
    """The share of recent time that the card has spent on ops that load it."""

    def __init__(self) -> None:
        self._share, self._at_s = 0.0, time.perf_counter()

    def add(self, busy_s: float) -> None:
        """Notes that the card has been busy with such an op for `busy_s`, until now."""
        self._fade(busy_s)
        self._share = 1.0 - (1.0 - self._share) * math.exp(-busy_s / MEMORY_S)

    def rest(self) -> None:
        """Waits until the share is at most REST_SHARE."""
        self._fade(0.0)
        if self._share > REST_SHARE:
            time.sleep(MEMORY_S * math.log(self._share / REST_SHARE))
            self._fade(0.0)

    def _fade(self, busy_s: float) -> None:
        """Fades the share: of the time since the last call all except `busy_s` was rest."""
        now_s = time.perf_counter()
        self._share *= math.exp(min(0.0, busy_s - (now_s - self._at_s)) / MEMORY_S)
        self._at_s = now_s


@cache
def heat() -> _Heat:
    """Returns the heat of this process."""
    return _Heat()


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Captures calls that have run before, as `benchmarks.timing.capture` does, but from one shared pool:
    memory does not go back to the driver each time, which takes longer than to measure an op."""
    torch.cuda.synchronize()

    def all_of_them() -> None:
        for call in calls:
            call()

    try:
        graph = _pool().capture(all_of_them)
    except BaseException:
        _pool.cache_clear()
        raise
    graph.replay()
    torch.cuda.synchronize()
    return graph


@cache
def _pool() -> GraphPool:
    return GraphPool()


def cache_state(sets: int, set_bytes: int, l2_bytes: int) -> str:
    """Returns the source of operands in one word.

    >>> cache_state(128, 16_384, 60_000_000), cache_state(31, 4_000_000, 60_000_000)
    ('L2', 'cold')
    """
    return COLD if sets == 1 or sets * set_bytes > l2_bytes else STAY


# -- what the card reaches ---------------------------------------------------------------------------------


def rates(card: Card) -> dict[str, float]:
    """Returns the rates of this card: bytes/s of reading and of copying, flop/s of square products by number
    format (fp8: e4m3, one scale a tensor), at rest and, of bf16 and fp8, under load; seconds of a graph's
    node."""
    found = {"read_bytes_per_s": card.read_bytes_per_s, "copy_bytes_per_s": _copied(), "node_s": card.node_s}
    products: dict[str, tuple[int, Call]] = {}
    for name, dtype in DTYPES.items():
        side = SIDE // 4 if name in ("fp64", "fp32") else SIDE
        a = torch.randn(side, side, device="cuda").to(dtype)
        products[name] = side, partial(torch.mm, a, a)
    if has_fp8():
        products["fp8"] = SIDE, scaled_product(SIDE, SIDE, SIDE)
    for name, (side, product) in products.items():
        found[f"{name}_flops_per_s"] = 2.0 * side**3 / _typical_s(product)
        time.sleep(MEMORY_S)
    for name in ("bf16", "fp8"):
        if name in products:
            found[loaded(name)] = 2.0 * SIDE**3 / _loaded_s(products[name][1])
    return found


def loaded(name: str) -> str:
    """Returns the name of the rate of a number format's products under load in `rates`.

    >>> loaded("bf16")
    'bf16_loaded_flops_per_s'
    """
    return f"{name}_loaded_flops_per_s"


def _loaded_s(product: Call) -> float:
    graph, until_s = capture([product] * CALLS_OF_RATES), time.perf_counter() + LOADED_S
    while time.perf_counter() < until_s:
        graph.replay()
        torch.cuda.synchronize()
    seconds = statistics.median(replays_s(graph, REPLAYS)) / CALLS_OF_RATES
    heat().add(LOADED_S)
    return seconds


def has_fp8() -> bool:
    """Whether the card multiplies fp8 matrices."""
    return torch.cuda.get_device_capability() >= (8, 9)


def has_format(op: Op) -> bool:
    """Whether the card computes in an op's number format. cuBLAS has scales of blocks of 128 for compute
    capability 9.0 alone."""
    if op.dtype == "fp8_b128":
        return torch.cuda.get_device_capability() == (9, 0)
    return multiplied_as(op.dtype) != "fp8" or has_fp8()


def scaled_product(m: int, n: int, k: int) -> Call:
    """Makes a call of cuBLAS's product of fp8 matrices [m, k] and [k, n] that returns bf16, with fast
    accumulation, which engines set."""
    x = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    product: Any = torch._scaled_mm
    return partial(
        product, x, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _copied() -> float:
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _typical_s(partial(target.copy_, source))


def _typical_s(call: Call) -> float:
    seconds = replayed(capture([call] * CALLS_OF_RATES), CALLS_OF_RATES, quick=True)
    return statistics.median(seconds)
