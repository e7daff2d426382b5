"""Times of collectives by pushed words on this machine's CUDA cards, and of NCCL's and torch's beside them.

    python -m simcore.validate.benchmarks.collectives [--out FILE.csv] [--peers] [--shared] [--layouts]

    us of a call = slowest rank's (event after - event before its graph) / CALLS,   median of REPLAYS

One rank a card, 2, 4 and 8 of them as far as there are cards; with --shared also as streams of the first
card. `bytes` are those of one rank's x, bf16, in either collective. A rank's graph holds CALLS collectives,
which alternate between two inboxes. Before each replay all ranks meet in one collective more, and all replays
are queued behind a kernel that only waits: so ranks begin together, and the host is ahead.

Beside the two: a sum with its residual and the norm behind it, [rows, HIDDEN], as one launch (`normed_sum`)
and as a decoder's three (`sum_add_norm`). Residuals go on from call to call.

Results are compared first, with those of float64, and between ranks to the bit: what is wrong gets no time.
Our ranks are streams of this process, and a rank that waits gives up after PATIENCE looks. --peers: NCCL's
collectives, and the one-shot sum of torch's symmetric memory, with a process a rank; they are ended after
LIMIT_S. NVLink multicast stays off for all of them. --layouts: ours also in other layouts.

FILE.csv gets each row as soon as it is there. Exit code: 0, 1 if ours failed, 2 without CUDA devices.
"""

import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from simcore.input.files import InputError
from simcore.kernels.collectives import (
    Inboxes,
    Layout,
    all_gather,
    all_reduce,
    inboxes,
    layout_for,
    reference_normed_sum,
    rows_layout_for,
)
from simcore.kernels.collectives.memory import settle, words_of
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.residual import residual
from simcore.terminal import BROKEN
from simcore.validate.benchmarks.run import relative_error, say
from simcore.validate.benchmarks.timing import CUDA, event, one_line, version_of, wait
from simcore.validate.program import aligned, check_out, run

BYTES = tuple(1 << n for n in range(11, 20))
RANKS = (2, 4, 8)
KINDS = ("all_reduce", "all_gather")
NORMS = ("normed_sum", "sum_add_norm")
NORM_ROWS, HIDDEN = (1, 2, 4, 8, 16, 32, 64, 128), 4096
CALLS, REPLAYS, WARM_UPS = 50, 30, 3
# Inboxes of the calls of a graph, in turn, and one pair more where ranks meet before it.
SITES = 2
DTYPE = torch.bfloat16
# Largest relative errors: of a sum that is rounded once, and of one that is rounded at each step.
OUR_BAR, PEER_BAR = 5e-3, 2e-2
# Looks, some tenths of a second: all of a graph's calls may have to give up.
PATIENCE = 100_000
# Of the kernel that only waits, some milliseconds: for few graphs, and, by rank, for all replays.
FEW_CYCLES, CYCLES_A_RANK = 2_000_000, 8_000_000
LAYOUTS = (
    Layout(512, 4, 32),
    Layout(512, 16, 32),
    Layout(1024, 8, 32),
    Layout(1024, 16, 32),
    Layout(1024, 32, 32),
    Layout(2048, 16, 32),
    Layout(1024, 8, 8),
    Layout(1024, 8, 16),
    Layout(1024, 8, 64),
)
# Seconds that the processes of one peer may take in all.
LIMIT_S = 300.0
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a collective by one method, microseconds of a call; `n` replays."""

    method: str
    kind: str
    ranks: int
    cards: int
    bytes: int
    layout: str
    median_us: float
    p10: float
    p90: float
    n: int
    card: str
    torch: str
    triton: str
    date: str


def row_of(
    method: str, kind: str, ranks: int, cards: int, size: int, layout: str, seconds: Sequence[float]
) -> Row:
    """Returns the row of a graph's seconds, replay by replay: two or more."""
    us = [1e6 * each / CALLS for each in seconds]
    tenths = statistics.quantiles(us, n=10, method="inclusive")
    return Row(
        method=method,
        kind=kind,
        ranks=ranks,
        cards=cards,
        bytes=size,
        layout=layout,
        median_us=round(statistics.median(us), 3),
        p10=round(tenths[0], 3),
        p90=round(tenths[-1], 3),
        n=len(us),
        card=CUDA.get_device_name(0) if torch.cuda.is_available() else "",
        torch=str(torch.__version__),
        triton=version_of("triton"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def begin(path: Path | None) -> None:
    """Writes the head of the file."""
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([each.name for each in fields(Row)])


def keep(row: Row, path: Path | None) -> None:
    """Prints a row and adds it to the file at once."""
    say(f"{row.method} {row.kind} {row.ranks} x {row.bytes} bytes {row.layout}: {row.median_us:.2f} us")
    if path is not None:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, list(asdict(row)), lineterminator="\n").writerow(asdict(row))


def drawn(ranks: int, size: int) -> list[Tensor]:
    """Returns the x of each rank, [1, elements], on the CPU; the same in all processes."""
    generator = torch.Generator().manual_seed(size)
    elements = size // DTYPE.itemsize
    return [torch.randn(1, elements, generator=generator).to(DTYPE) for _ in range(ranks)]


def check(kind: str, out: Tensor, xs: Sequence[Tensor], bar: float) -> None:
    """Raises ValueError if what came out is wrong."""
    if kind == "all_gather":
        if not torch.equal(out.cpu().view(-1), torch.cat([x.view(-1) for x in xs])):
            raise ValueError("WRONG: what was gathered is not what was sent")
        return
    error = relative_error(out.cpu(), torch.stack([x.double() for x in xs]).sum(0))
    if not error <= bar:
        raise ValueError(f"WRONG: error {error:.2e} > {bar:.0e}")


# -- ours ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """What a rank's calls with one inbox read and write; `total`, `residual` and `gain` are for norms."""

    x: Tensor
    out: Tensor
    total: Tensor
    residual: Tensor
    gain: Tensor

    def clear(self) -> None:
        """As before the first call."""
        self.out.fill_(float("nan"))
        self.residual.zero_()


def tensors(kind: str, x: Tensor, ranks: int) -> Tensors:
    """Makes room for the calls of a kind."""
    rows, columns = x.shape
    out = x.new_full((rows, columns * (ranks if kind == "all_gather" else 1)), float("nan"))
    gain = torch.linspace(0.5, 1.5, columns, dtype=DTYPE, device=x.device)
    return Tensors(x, out, torch.empty_like(x), torch.zeros_like(x), gain)


def launch_call(kind: str, t: Tensors, of: Inboxes, rank: int, **named: Any) -> None:
    """Launches one call of a kind."""
    if kind == "all_reduce":
        all_reduce(t.x, of, rank, out=t.out, **named)
    elif kind == "all_gather":
        all_gather(t.x, of, rank, out=t.out, **named)
    elif kind == "normed_sum":
        all_reduce(t.x, of, rank, residual=t.residual, gain=t.gain, normed=t.out, **named)
    else:
        all_reduce(t.x, of, rank, out=t.total, **named)
        residual(t.total, t.residual)
        norm(t.residual, t.gain, out=t.out)


def check_norms(t: Tensors, xs: Sequence[Tensor], calls: int) -> None:
    """Raises ValueError if what came out of so many calls is wrong."""
    expected, gain = torch.zeros_like(xs[0]), t.gain.cpu()
    for _ in range(calls):
        truth = reference_normed_sum(xs, expected, gain)
    if not torch.equal(t.residual.cpu(), expected):
        raise ValueError("WRONG: the residual is not what sums add up to")
    error = relative_error(t.out.cpu(), truth.double())
    if not error <= OUR_BAR:
        raise ValueError(f"WRONG: error {error:.2e} > {OUR_BAR:.0e}")


class GaveUpError(RuntimeError):
    """A rank waited in vain; so will the next ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A rank: `tensors` by site; the graph in which ranks meet, and that of the calls."""

    device: torch.device
    stream: torch.cuda.Stream
    patience: Tensor
    error: Tensor
    tensors: list[Tensors]
    meet: torch.cuda.CUDAGraph
    graph: torch.cuda.CUDAGraph
    # A graph holds only pointers.
    keeps: object


def member(
    kind: str, rank: int, device: torch.device, xs: Sequence[Tensor], sites: Sequence[Inboxes], layout: Layout
) -> Member:
    """Captures the graphs of a rank. No other rank is there yet, so nothing is waited for."""
    with torch.cuda.device(device):
        stream: torch.cuda.Stream = CUDA.Stream()
        patience = torch.zeros(1, dtype=torch.int32, device=device)
        error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        own = [tensors(kind, x.to(device), sites[0].ranks) for x in xs]
        word = torch.zeros(2, dtype=DTYPE, device=device)
        named: dict[str, Any] = {"patience": patience, "error": error, "chained": True}

        def meet() -> None:
            all_reduce(word, sites[SITES], rank, out=word, **named)

        def calls(count: int) -> None:
            for turn in range(count):
                site = turn % SITES
                launch_call(kind, own[site], sites[site], rank, layout=layout, **named)

        graphs = []
        for launch, warm_up in ((meet, meet), (partial(calls, CALLS), partial(calls, SITES))):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                warm_up()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            graphs.append(graph)
    return Member(device, stream, patience, error, own, graphs[0], graphs[1], (word, sites))


def played(members: Sequence[Member], replays: int, cycles: int) -> list[float]:
    """Returns the slowest rank's seconds of each replay. Raises GaveUpError if a rank gave up."""
    marks = list[list[tuple[Any, Any]]]()
    for one in members:
        with torch.cuda.stream(one.stream):
            wait(cycles)
    for _ in range(replays):
        marks.append([])
        for one in members:
            with torch.cuda.stream(one.stream):
                before, after = event(), event()
                one.meet.replay()
                before.record()
                one.graph.replay()
                after.record()
                marks[-1].append((before, after))
    settle([one.device for one in members])
    if any(int(one.error) for one in members):
        raise GaveUpError("a rank gave up waiting")
    return [max(1e-3 * before.elapsed_time(after) for before, after in each) for each in marks]


def measured(kind: str, devices: Sequence[torch.device], size: int, layout: Layout) -> list[float]:
    """Returns the seconds of replays, after a check of the results. Raises ValueError if they are wrong."""
    ranks = len(devices)
    drawn_xs = [drawn(ranks, size), [x.flip(-1) for x in drawn(ranks, size)]]
    if kind in NORMS:
        drawn_xs = [[x.view(-1, HIDDEN) for x in xs] for xs in drawn_xs]
    sites = [inboxes(devices, size // DTYPE.itemsize, DTYPE) for _ in range(SITES + 1)]
    members = [
        member(kind, rank, device, [xs[rank] for xs in drawn_xs], sites, layout)
        for rank, device in enumerate(devices)
    ]
    for each in sites:
        each.clear()
    for one in members:
        for held in one.tensors:
            held.clear()
        one.patience.fill_(PATIENCE)
    settle(devices)
    played(members, 1, FEW_CYCLES)
    for site, xs in enumerate(drawn_xs):
        _check_site(kind, members, site, xs, 1)
        first = members[0].tensors[site].out.cpu()
        if not all(torch.equal(one.tensors[site].out.cpu(), first) for one in members):
            raise ValueError("WRONG: ranks have different results")
    played(members, WARM_UPS, FEW_CYCLES)
    seconds = played(members, REPLAYS, CYCLES_A_RANK * ranks)
    for site, xs in enumerate(drawn_xs):
        _check_site(kind, members, site, xs, 1 + WARM_UPS + REPLAYS)
    return seconds


def _check_site(kind: str, members: Sequence[Member], site: int, xs: Sequence[Tensor], replays: int) -> None:
    for one in members:
        if kind in NORMS:
            check_norms(one.tensors[site], xs, replays * CALLS // SITES)
        else:
            check(kind, one.tensors[site].out, xs, OUR_BAR)


def our_cases(sizes: Sequence[int], layouts: Sequence[Layout]) -> Iterator[tuple[str, int, Layout]]:
    """Yields kinds with bytes and layouts: the usual layout, and the further ones for sums and gathers."""
    for kind in KINDS:
        for size in sizes:
            usual = layout_for(words_of(size // DTYPE.itemsize, DTYPE))
            for layout in dict.fromkeys((usual, *layouts)):
                yield kind, size, layout
    for rows in NORM_ROWS:
        elements = rows * HIDDEN
        of_rows, usual = rows_layout_for(words_of(HIDDEN, DTYPE)), layout_for(words_of(elements, DTYPE))
        for kind, layout in zip(NORMS, (of_rows, usual), strict=True):
            yield kind, elements * DTYPE.itemsize, layout


def ours(
    groups: Sequence[Sequence[torch.device]],
    sizes: Sequence[int],
    layouts: Sequence[Layout],
    out: Path | None,
) -> tuple[list[Row], list[str]]:
    """Measures groups of ranks on these devices; returns rows, and what failed."""
    rows, failed = list[Row](), list[str]()
    for devices in groups:
        cards = len(set(devices))
        try:
            for kind, size, layout in our_cases(sizes, layouts):
                words = f"{layout.block}/{layout.warps}/{layout.programs}"
                try:
                    found = measured(kind, devices, size, layout)
                except ValueError as error:
                    failed.append(f"{kind}, {len(devices)} ranks, {size} bytes, {words}: {error}")
                    say(failed[-1])
                    continue
                rows.append(row_of("words", kind, len(devices), cards, size, words, found))
                keep(rows[-1], out)
        except Exception as error:
            failed.append(f"{len(devices)} ranks on {cards} cards: {one_line(error)}")
            say(failed[-1])
    return rows, failed


# -- peers ---------------------------------------------------------------------------------------------------

Call = Callable[[], object]


def nccl_call(kind: str, x: Tensor, out: Tensor) -> Call:
    """Returns a call of NCCL's; a sum replaces x, and so `out` is x."""
    if kind == "all_gather":
        return partial(dist.all_gather_into_tensor, out, x)
    return partial(dist.all_reduce, out)


def symmetric_call(x: Tensor, out: Tensor) -> Call:
    """Returns torch's one-shot sum; x is symmetric memory."""
    world: Any = dist.group.WORLD
    return partial(torch.ops.symm_mem.one_shot_all_reduce_out, x, "sum", world.group_name, out)


def _symmetric_like(x: Tensor) -> Tensor:
    """Returns memory of the shape of x that all ranks see."""
    import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415 (only if asked for)

    made: Tensor = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
    world: Any = dist.group.WORLD
    symmetric.rendezvous(made, group=world)
    return made.view(x.shape)


def _captured(call: Call, count: int, stream: Any) -> torch.cuda.CUDAGraph:
    """Captures calls, after one that loads them. NCCL's own thread asks for events meanwhile."""
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    torch.cuda.synchronize()
    return graph


def _peer_times(method: str, kind: str, rank: int, ranks: int, size: int) -> list[float]:
    """Returns the slowest rank's seconds of each replay, on every rank. Raises ValueError on all ranks if the
    result of any is wrong."""
    device, stream = torch.device("cuda", rank), CUDA.Stream()
    xs = drawn(ranks, size)
    x = xs[rank].to(device)
    if method == "torch_symm_mem":
        x = _symmetric_like(x).copy_(x)
        out = torch.full_like(x, float("nan"))
        call = symmetric_call(x, out)
    else:
        out = x.new_full((1, ranks * x.numel()), float("nan")) if kind == "all_gather" else x.clone()
        call = nccl_call(kind, x, out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    wrong, why = torch.zeros(1, device=device), ""
    try:
        check(kind, out, xs, PEER_BAR)
    except ValueError as error:
        wrong, why = wrong + 1, str(error)
    dist.all_reduce(wrong)
    if float(wrong):
        raise ValueError(why or "WRONG on another rank")
    if method == "nccl" and kind == "all_reduce":
        # Sums in place would grow without end.
        out.zero_()
    torch.cuda.synchronize()
    word = torch.zeros(1, device=device)
    meet, graph = _captured(partial(dist.all_reduce, word), 1, stream), _captured(call, CALLS, stream)
    for replays in (WARM_UPS, REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        marks = [(event(), event()) for _ in range(replays)]
        with torch.cuda.stream(stream):
            wait(CYCLES_A_RANK)
            for before, after in marks:
                meet.replay()
                before.record()
                graph.replay()
                after.record()
        torch.cuda.synchronize()
    found = torch.tensor([1e-3 * before.elapsed_time(after) for before, after in marks], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found.cpu()]


def peer_rank(
    rank: int, method: str, ranks: int, sizes: tuple[int, ...], meeting: str, out: Path | None
) -> None:
    """One rank of a peer, in a process of its own; the first one keeps rows."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    for kind in KINDS if method == "nccl" else ("all_reduce",):
        for size in sizes:
            try:
                found = _peer_times(method, kind, rank, ranks, size)
            except ValueError as error:
                if rank == 0:
                    say(f"{method} {kind} {ranks} x {size} bytes: {error}")
                continue
            if rank == 0:
                keep(row_of(method, kind, ranks, ranks, size, "", found), out)
    dist.destroy_process_group()


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Processes started inside have NVLink multicast off, unless the environment says otherwise."""
    added = [name for name in NO_MULTICAST if name not in os.environ]
    os.environ.update({name: NO_MULTICAST[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def peer(method: str, ranks: int, sizes: tuple[int, ...], out: Path | None) -> None:
    """Runs a process a rank. Raises what one of them raised, and TimeoutError after LIMIT_S."""
    with tempfile.TemporaryDirectory() as folder, _without_multicast():
        given = (method, ranks, sizes, str(Path(folder) / "meeting"), out)
        started: Any = spawn(peer_rank, given, ranks, join=False)  # type: ignore[no-untyped-call]
        end = time.monotonic() + LIMIT_S
        try:
            while not started.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"not done after {LIMIT_S:.0f} s")
        finally:
            for process in started.processes:
                if process.is_alive():
                    process.kill()
                process.join()


# -- all -----------------------------------------------------------------------------------------------------


def table(path: Path) -> Iterator[str]:
    """Yields the rows of a file as a plain table."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    # Card, versions and date are the same for all.
    yield from aligned([line[:10] for line in lines])


def main(
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="also NCCL and torch's symmetric memory")] = False,
    shared: Annotated[bool, typer.Option("--shared", help="also ranks as streams of one card")] = False,
    layouts: Annotated[bool, typer.Option("--layouts", help="ours in several layouts")] = False,
) -> None:
    """Measures collectives by pushed words on this machine's CUDA cards."""
    check_out(out)
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards < (1 if shared else RANKS[0]):
        raise InputError(f"{RANKS[0]} CUDA devices are needed, or one with --shared; there are {cards}")
    groups = [[torch.device("cuda", rank) for rank in range(ranks)] for ranks in RANKS if ranks <= cards]
    if shared:
        groups += [[torch.device("cuda", 0)] * ranks for ranks in RANKS]
    with tempfile.TemporaryDirectory() as folder:
        path = out or Path(folder) / "rows.csv"
        begin(path)
        _, failed = ours(groups, BYTES, LAYOUTS if layouts else (), path)
        for ranks in RANKS if peers else ():
            for method in ("nccl", "torch_symm_mem"):
                if ranks > cards:
                    continue
                try:
                    peer(method, ranks, BYTES, path)
                except Exception as error:
                    # The trace of a process ends with its error.
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    say(f"{method}, {ranks} ranks failed: {lines[-1]}")
        for line in table(path):
            say(line)
    for line in failed:
        say(f"failed: {line}")
    if failed:
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(main)
