"""Times of captured calls on a CUDA device, and the rates that the card itself reaches.

    seconds of a call = (event after - event before a replay of the graph) / calls in the graph

A graph holds one call for each set of buffers. Replays are queued behind a kernel that only waits, so that
the host is ahead of the device and its gaps do not count; a gap between two nodes of a graph does count.
"""

import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from simcore.validate.benchmarks.cases import Birth
from simcore.validate.timing.reading_kernels import nothing_kernel, read_kernel

LEAST_REPLAYS, LEAST_S, MOST_REPLAYS = 20, 0.03, 400
QUICK_REPLAYS, QUICK_S = 5, 0.001
# Long enough for the host to queue some replays, and well under a millisecond; the most if other processes
# slow the host down. A host queues a graph of LONG_S while the graph before it runs.
WAIT_CYCLES, MOST_WAIT_CYCLES = 600_000, 10_000_000
LONG_S = 2e-4
READ_BYTES = 1 << 32

Call = Callable[[], object]
# torch's classes of streams and events are not typed.
CUDA: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class Card:
    """The device: L2 cache, multiprocessors, best read rate and its kernel, time of an empty node."""

    l2_bytes: int
    processors: int
    read_bytes_per_s: float
    read_by: str
    node_s: float


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Captures calls as a graph. Runs the first call before, so that everything is compiled and loaded."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except BaseException:
        # A failed capture leaves its own stream as the current one.
        torch.cuda.set_stream(stream)
        raise
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, calls: int, *, quick: bool = False) -> list[float]:
    """Returns seconds of a call, replay by replay."""
    least, least_s = (QUICK_REPLAYS, QUICK_S) if quick else (LEAST_REPLAYS, LEAST_S)
    (replay_s,) = replays_s(graph, 1)
    replays = min(MOST_REPLAYS, max(least, math.ceil(least_s / replay_s)))
    return [seconds / calls for seconds in replays_s(graph, replays)]


def once_s(call: Call) -> float:
    """Returns seconds of one call outside a graph, after a call that compiles it, behind a kernel that waits.
    If the host is ahead by then, the cost of its launches does not count."""
    call()
    before, after = event(), event()
    wait()
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(1e-3 * before.elapsed_time(after))


def replays_s(graph: torch.cuda.CUDAGraph, replays: int, *, ahead: bool = False) -> list[float]:
    """Returns seconds of each replay. `ahead`: if the wait ended before all replays of a short graph were
    queued, the device waited for the host within a replay; then all are measured again behind a wait of twice
    the length. Raises ValueError if no wait is long enough."""
    cycles = WAIT_CYCLES
    while cycles <= MOST_WAIT_CYCLES:
        found, late = _replayed_behind(cycles, graph, replays)
        if not (ahead and late) or min(found) > LONG_S:
            return found
        cycles *= 2
    raise ValueError("this host is too slow to queue graphs before they run")


def _replayed_behind(cycles: int, graph: torch.cuda.CUDAGraph, replays: int) -> tuple[list[float], bool]:
    """Returns seconds of replays behind a wait, and whether it ended before all were queued."""
    marks, waited = [(event(), event()) for _ in range(replays)], event()
    wait(cycles)
    waited.record()
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    late = _is_over(waited)
    torch.cuda.synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in marks], late


def event() -> torch.cuda.Event:
    """Returns an event with timing."""
    made: torch.cuda.Event = CUDA.Event(enable_timing=True)
    return made


def _is_over(passed: Any) -> bool:
    return bool(passed.query())


def wait(cycles: int = WAIT_CYCLES) -> None:
    """Runs a kernel that does nothing for a while, so that work queued behind it follows without gaps."""
    CUDA._sleep(cycles)


def _readers(x: torch.Tensor, processors: int) -> dict[str, Call]:
    """Returns ways to read all of x [many], bf16."""
    out = torch.empty(64 * processors, dtype=torch.float32, device=x.device)
    wide = x.view(torch.float32)
    ways: dict[str, Call] = {
        "torch sum": lambda: torch.sum(x, dtype=torch.float32),
        "torch sum of fp32": lambda: torch.sum(wide),
        "torch sum of rows": lambda: torch.sum(wide.view(8 * processors, -1), 1),
    }

    def read(each: int, block: int, stages: int, warps: int) -> Call:
        blocks = x.numel() // block
        return lambda: read_kernel[(each * processors,)](
            x, out, blocks, BLOCK=block, STAGES=stages, num_warps=warps
        )

    for each, block, stages, warps in (
        (2, 8192, 3, 8),
        (4, 8192, 2, 4),
        (4, 4096, 4, 4),
        (8, 4096, 2, 4),
        (2, 16384, 3, 8),
        (16, 4096, 1, 4),
    ):
        ways[f"triton {each} x {block} x {stages} stages"] = read(each, block, stages, warps)
    return ways


def measure_card(say: Callable[[str], None], read_bytes: int = READ_BYTES) -> Card:
    """Reads far more than the L2 cache in several ways, of which the best counts; times empty kernels."""
    properties: Any = torch.cuda.get_device_properties(0)
    processors = int(properties.multi_processor_count)
    # Whole rows for every way to read.
    count = read_bytes // 2 // (16 * processors * 16384) * (16 * processors * 16384)
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    for part in x.view(8, -1):
        part.normal_()
    found_s = dict[str, float]()
    for name, call in _readers(x, processors).items():
        try:
            found_s[name] = statistics.median(replayed(capture([call] * 4), 4))
        except Exception as error:
            say(f"reading by {name} failed: {one_line(error)}")
    best = min(found_s, key=found_s.__getitem__)
    torch_s = min(
        (seconds for name, seconds in found_s.items() if name.startswith("torch")), default=math.inf
    )
    say(f"torch's fastest sum reads {2e-12 * count / torch_s:.3f} TB/s")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    nodes = 1000
    node_s = statistics.median(replayed(capture([lambda: nothing_kernel[(1,)](flag)] * nodes), nodes))
    return Card(int(properties.L2_cache_size), processors, 2 * count / found_s[best], best, node_s)


def birth(card: Card) -> Birth:
    """Returns place and time of the measurement; fields that nvidia-smi lacks are empty."""
    fields = "driver_version,clocks.sm,clocks.mem"
    try:
        found = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        ).stdout.splitlines()[0]
        driver, sm, memory = (word.strip() for word in found.split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        driver = sm = memory = ""
    return Birth(
        device=torch.cuda.get_device_name(0),
        driver=driver,
        torch=str(torch.__version__),
        triton=version_of("triton"),
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        sm_clock_mhz=sm,
        memory_clock_mhz=memory,
        read_bytes_per_s=card.read_bytes_per_s,
        read_by=card.read_by,
        node_s=card.node_s,
    )


def version_of(package: str) -> str:
    """Returns the version of an installed package, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def one_line(error: BaseException) -> str:
    """Returns an error in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:120]}" if words else type(error).__name__
