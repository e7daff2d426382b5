"""Benchmarks of attention: decode attention beside its peers, and speculative attention.

A kernel that waits for the early part of speculative attention shows when that part becomes visible.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simcore.kernels.decoder.dealt_parts import DealtConfig
from simcore.kernels.decoder.decode_attention import (
    DecodeConfig,
    config_for,
    decode_attention,
    reference_decode_attention,
    split_config_for,
    workspace,
)
from simcore.kernels.decoder.speculative_attention import (
    Speculation,
    early_workers,
    receive,
    reference_speculative_attention,
    speculation,
    speculative_attention,
    speculative_workspace,
)
from simcore.kernels.decoder.split_kv import Cache, Workspace, cache
from simcore.kernels.kernel import DTYPES
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, OWN, Case, Compared, Row, SpeculativeCase
from simcore.validate.benchmarks.peers import Candidate, Inputs
from simcore.validate.benchmarks.run import (
    Bench,
    Entry,
    Trial,
    Way,
    brief,
    captured,
    compare,
    nan_last,
    take_turns,
    worst_sequence,
)
from simcore.validate.benchmarks.timing import CUDA, event, one_line, wait

FP8 = torch.float8_e4m3fn
EARLY_RUNS, EARLY_WARM_UPS = 40, 3
THRESHOLD = 0.1
# Most bytes of K and V in float64 for one call of the reference.
TRUTH_BYTES = 4 << 30


def inputs_of(case: Case, generator: torch.Generator) -> Inputs:
    """Returns random numbers for one set of buffers; a sequence's pages lie in random order."""
    dtype, stored = DTYPES[case.dtype], FP8 if case.stored == "fp8" else DTYPES[case.stored]

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        drawn = torch.bfloat16 if dtype == FP8 else dtype
        return torch.randn(shape, generator=generator, device="cuda", dtype=drawn).to(dtype)

    q = random(case.batch, case.q_heads, case.head_dim, dtype=dtype)
    table = k_scale = v_scale = None
    shape = (case.batch, case.kv_heads, case.context, case.head_dim)
    if case.page:
        pages = -(-case.context // case.page)
        order = torch.randperm(case.batch * pages, generator=generator, device="cuda")
        table = order.view(case.batch, pages).to(torch.int32)
        shape = (case.batch * pages, case.page, case.kv_heads, case.head_dim)
    k, v = (random(*shape, dtype=stored) for _ in range(2))
    if case.stored == "fp8":
        k_scale, v_scale = (
            0.75 + 0.5 * torch.rand(case.kv_heads, generator=generator, device="cuda") for _ in range(2)
        )
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    return Inputs(q, k, v, lengths, torch.empty_like(q), table, k_scale, v_scale)


def options(case: Case, one: Inputs) -> dict[str, Any]:
    """Returns the arguments of decode attention besides the tensors."""
    return {
        "block_table": one.table,
        "sinks": case.sinks,
        "window": case.window,
        "k_scale": one.k_scale,
        "v_scale": one.v_scale,
    }


def wide(x: Tensor) -> Tensor:
    """Converts to float64; fp8 via fp32, which represents it exactly."""
    return (x.float() if x.dtype == FP8 else x).double()


def in_float64(run: Callable[..., Any], case: Case, one: Inputs, **more: Any) -> list[Any]:
    """Returns a reference's results in float64, computed for some sequences at a time."""
    each = max(1, TRUTH_BYTES * case.batch // (8 // cases.DTYPE_BYTES[case.stored] * case.kv_bytes))
    k, v = (wide(one.k), wide(one.v)) if case.page else (one.k, one.v)
    found = []
    for first in range(0, case.batch, each):
        some = slice(first, first + each)
        keywords = {**options(case, one), **more}
        if case.page:
            keywords["block_table"] = None if one.table is None else one.table[some]
        parts = (k, v) if case.page else (wide(k[some]), wide(v[some]))
        found.append(run(one.q[some].double(), *parts, one.lengths[some], **keywords))
    return found


def truth_of(case: Case, one: Inputs) -> Tensor:
    """Returns decode attention in float64."""
    return torch.cat(in_float64(reference_decode_attention, case, one))


def chosen(one: Inputs) -> DecodeConfig | DealtConfig:
    """Returns the layout that our kernels choose themselves."""
    return config_for(one.q, _cache_of(one))


def _cache_of(one: Inputs) -> Cache:
    return cache(one.q, one.k, one.v, one.lengths, one.table, (one.k_scale, one.v_scale))


def own_calls(case: Case, sets: Sequence[Inputs]) -> Candidate:
    """Returns our kernel with the layout that it chooses itself."""
    config = chosen(sets[0])
    return _laid_out(case, sets, config, workspace(sets[0].q, case.kv_heads, config))


def split_calls(case: Case, sets: Sequence[Inputs]) -> Candidate:
    """Returns our kernel with all sequences split alike."""
    config = split_config_for(sets[0].q, _cache_of(sets[0]))
    return _laid_out(case, sets, config, workspace(sets[0].q, case.kv_heads, config))


def _laid_out(
    case: Case, sets: Sequence[Inputs], config: DecodeConfig | DealtConfig, space: Workspace
) -> Candidate:
    calls = [
        partial(decode_attention, *one[:4], **options(case, one), out=one.out, space=space, config=config)
        for one in sets
    ]
    return Candidate(str(config), calls, brief(config))


def fill_with_nan(*outputs: Tensor) -> None:
    """Fills outputs with NaN, so that an unwritten number counts as wrong."""
    for x in outputs:
        x.fill_(float("nan"))


def attention_case(case: Case, bench: Bench, *, beside: bool = True, split: bool = False) -> Compared:
    """Runs a case of decode attention; `beside`: whether beside the peers; where lengths differ, only
    beside those that take lengths. `split`: whether also with as many parts for every sequence."""
    sets = bench.rotated(partial(inputs_of, case), case.read_bytes)
    truths = [truth_of(case, sets[0])]
    truths.append(truth_of(case, sets[-1]) if len(sets) > 1 else truths[0])

    def ways() -> Iterator[Way]:
        # `map` defers the construction to the place that catches its errors.
        yield Way("", map(partial(own_calls, case), [sets]), cases.ERROR_BARS[case.dtype])
        if split:
            yield Way("split alike", map(partial(split_calls, case), [sets]), cases.ERROR_BARS[case.dtype])
        for peer in bench.peers if beside else ():
            if case.drawn and not peer.ragged:
                continue
            yield Way(peer.name, peer.candidates(case, sets), version=peer.version)

    poison = partial(fill_with_nan, *(one.out for one in sets))
    found = compare(
        case, Trial(ways(), truths, poison, len(sets), case.read_bytes, error_of=worst_sequence), bench
    )
    own = sorted((found.ours, *found.rest), key=lambda row: row.implementation != OURS)
    # The default layout is what users get, be it the slower one.
    return replace(found, ours=own[0], rest=own[1:])


@dataclass(slots=True)
class Speculating:
    """A speculative case: buffers for a launch's outputs, and one call for each set."""

    case: Case
    into: Speculation
    calls: Sequence[Callable[[], Speculation]]
    config: str
    brief: str


def speculating(of: SpeculativeCase, sets: Sequence[Inputs]) -> Speculating:
    """Returns our speculative kernel with the layout that it chooses itself for decode attention."""
    case, q = of.case, sets[0].q
    config = split_config_for(q, _cache_of(sets[0]))
    workers = early_workers(2 * of.ends, case.context, config)
    room = q, case.kv_heads, config
    into, space = speculation(*room), speculative_workspace(*room)
    # On the device, as in a captured step; numbers would add a kernel each.
    ends = torch.full((1,), of.ends, dtype=torch.int32, device="cuda")
    keywords: dict[str, Any] = {
        "sinks": ends,
        "window": ends,
        "into": into,
        "space": space,
        "config": config,
        "workers": workers,
    }
    calls = [partial(speculative_attention, *one[:4], **keywords) for one in sets]
    return Speculating(case, into, calls, f"{config}, {workers} for the ends", brief(config))


def speculative_case(of: SpeculativeCase, bench: Bench) -> Compared:
    """Runs one speculative shape: its time beside plain decode attention, and the time of its early part."""
    case, bar = of.case, cases.ERROR_BARS[of.case.dtype]
    sets = bench.rotated(partial(inputs_of, case), case.read_bytes)
    mine, calls = speculating(of, sets), cases.calls_of(len(sets))
    pairs = [_speculative_truth(of, one) for one in (sets[0], sets[-1])]
    poison = partial(fill_with_nan, mine.into.exact, mine.into.early, *(one.out for one in sets))
    plain = replace(cases.row_of(of, OURS, OWN, bar), op=case.op)
    exacts = [pair[0] for pair in pairs]
    decode = captured(plain, own_calls(case, sets), exacts, calls, poison)
    entry = _captured(cases.row_of(of, OURS, OWN, bar), mine, pairs, calls, poison)
    rows = take_turns([decode, entry], cases.cold(len(sets), case.kv_bytes), quick=bench.quick)
    for row in rows:
        bench.judge(row)
    early_row, share = _early_row(of, mine, bench, rows[1])
    return Compared(str(of), rows[1], rows[:1], bench.floor_s(of), [early_row], share)


def _captured(
    row: Row, mine: Speculating, pairs: Sequence[Tensor], calls: int, poison: Callable[[], object]
) -> Entry:
    """Checks both outputs, stacked into one tensor; the timed graph is captured without the stacking."""

    def both(call: Callable[[], Speculation]) -> Tensor:
        left = call()
        return torch.stack((left.exact, left.early))

    def exact(call: Callable[[], Speculation]) -> Tensor:
        return call().exact

    checked = Candidate(mine.config, [partial(both, call) for call in mine.calls], mine.brief)
    entry = captured(row, checked, pairs, len(mine.calls), poison)
    if entry.graph is not None:
        bare = checked._replace(calls=[partial(exact, call) for call in mine.calls])
        error = entry.row.error or 0.0
        entry = captured(entry.row, bare, [pair[0] for pair in pairs], calls, poison)
        entry.row = replace(entry.row, error=max(error, entry.row.error or 0.0, key=nan_last))
    return entry


def _speculative_truth(of: SpeculativeCase, one: Inputs) -> Tensor:
    """Returns exact and early output in float64: [2, batch, q_heads, d]."""
    ends = {"sinks": of.ends, "window": of.ends, "threshold": THRESHOLD}
    found = in_float64(reference_speculative_attention, of.case, one, **ends)
    return torch.cat([torch.stack((some[0], some[1])) for some in found], 1)


def _early_row(of: SpeculativeCase, mine: Speculating, bench: Bench, whole: Row) -> tuple[Row, float | None]:
    """Returns when the early part is visible: seconds from the kernel's start, and share of its time."""
    row = cases.row_of(of, "early output visible", OWN, whole.error_bar)
    if whole.times is None:
        return replace(row, note="not measured: the kernel is not right"), None
    try:
        seen = early_seconds(mine, EARLY_RUNS // 4 if bench.quick else EARLY_RUNS)
    except Exception as error:
        bench.failed.append(f"early output of {of}: {one_line(error)}")
        return replace(row, note=f"failed: {one_line(error)}"), None
    shares = [early_s / whole_s for early_s, whole_s in seen]
    p10, share, p90 = (float(x) for x in np.percentile(shares, (10, 50, 90)))
    whole_s = statistics.median(seconds for _, seconds in seen)
    words = (
        f"{100 * share:.1f} % of the kernel's time (p10 {100 * p10:.1f}, p90 {100 * p90:.1f}), which was "
        f"{1e6 * whole_s:.1f} us here"
    )
    seconds = [early_s for early_s, _ in seen]
    half = len(seconds) // 2
    found = cases.times([seconds[:half], seconds[half:]])
    return replace(row, error=whole.error, times=found, cache_state=whole.cache_state, note=words), share


def early_seconds(mine: Speculating, runs: int) -> list[tuple[float, float]]:
    """Returns (early part visible, kernel ended) in seconds after the kernel's start, run by run.

    A kernel that waits for the early part starts first, on its own stream, and polls all the time. The
    measured kernel is queued between its two events behind a kernel that does nothing, so that no launch by
    the host falls between them. Raises RuntimeError if the received data is not the early part.
    """
    case, into = mine.case, mine.into
    x = torch.empty(case.batch, case.q_heads * case.head_dim, dtype=into.early.dtype, device="cuda")
    receiving, sending = CUDA.Stream(), CUDA.Stream()
    take = partial(receive, into.early, into.arrived, x)
    # Everything is compiled and loaded before a kernel waits: loading may have to wait for the device.
    wait()
    mine.calls[0]()
    into.arrived.fill_(case.q_heads)
    take()
    torch.cuda.synchronize()
    seen = []
    for run in range(EARLY_WARM_UPS + runs):
        into.arrived.zero_()
        x.fill_(float("nan"))
        before, there, after = event(), event(), event()
        torch.cuda.synchronize()
        with torch.cuda.stream(receiving):
            take()
            there.record()
        try:
            with torch.cuda.stream(sending):
                wait()
                before.record()
                mine.calls[run % len(mine.calls)]()
                after.record()
        except BaseException:
            # The early part would never arrive; this releases the waiting kernel.
            with torch.cuda.stream(sending):
                into.arrived.fill_(case.q_heads)
            raise
        torch.cuda.synchronize()
        if not torch.equal(x, into.early.view_as(x)):
            raise RuntimeError("what was received is not the early part")
        if run >= EARLY_WARM_UPS:
            seen.append((1e-3 * before.elapsed_time(there), 1e-3 * before.elapsed_time(after)))
    return seen
