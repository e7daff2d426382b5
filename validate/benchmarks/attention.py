"""The benchmark's parts about attention: decode attention beside its peers, and speculative attention.

When the early part of speculative attention is visible is seen by a kernel that waits for it, beside it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.decode_attention import (
    DecodeConfig,
    config_for,
    decode_attention,
    reference_decode_attention,
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
from simcore.kernels.decoder.split_kv import cache
from simcore.kernels.kernel import DTYPES
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, Bar, Case, Compared, Row
from simcore.validate.benchmarks.peers import Candidate, Inputs, Peer
from simcore.validate.benchmarks.run import (
    SEED,
    Bench,
    Entry,
    brief,
    captured,
    free,
    nan_last,
    say,
    take_turns,
    tried,
)
from simcore.validate.benchmarks.timing import CUDA, Card, event, one_line, wait

FP8 = torch.float8_e4m3fn
EARLY_RUNS, EARLY_WARM_UPS = 40, 3
THRESHOLD = 0.1
# Bytes of K and V in float64 that the reference is given at once.
TRUTH_BYTES = 4 << 30


def inputs_of(case: Case, generator: torch.Generator) -> Inputs:
    """Random numbers for one set of buffers; pages of a sequence lie anywhere."""
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
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    return Inputs(q, k, v, lengths, torch.empty_like(q), table, k_scale, v_scale)


def sets_of(case: Case, card: Card) -> list[Inputs]:
    """As many sets of buffers as keep each of them out of the cache."""
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    read = case.kv_bytes * case.attended // case.context
    return [inputs_of(case, generator) for _ in range(cases.rotation(read, card.l2_bytes))]


def options(case: Case, one: Inputs) -> dict[str, Any]:
    """What decode attention is told beside the tensors."""
    return {
        "block_table": one.table,
        "sinks": case.sinks,
        "window": case.window,
        "k_scale": one.k_scale,
        "v_scale": one.v_scale,
    }


def wide(x: Tensor) -> Tensor:
    """In float64; fp8 by way of fp32, which holds all of it."""
    return (x.float() if x.dtype == FP8 else x).double()


def in_float64(run: Callable[..., Any], case: Case, one: Inputs, **more: Any) -> list[Any]:
    """What a reference gives in float64, some sequences at a time."""
    each = max(1, TRUTH_BYTES * case.batch // (8 // cases.DTYPE_BYTES[case.stored] * case.kv_bytes))
    k, v = (wide(one.k), wide(one.v)) if case.page else (one.k, one.v)
    found = []
    for first in range(0, case.batch, each):
        some = slice(first, first + each)
        told = {**options(case, one), **more}
        if case.page:
            told["block_table"] = None if one.table is None else one.table[some]
        parts = (k, v) if case.page else (wide(k[some]), wide(v[some]))
        found.append(run(one.q[some].double(), *parts, one.lengths[some], **told))
    return found


def truth_of(case: Case, one: Inputs) -> Tensor:
    """Decode attention in float64."""
    return torch.cat(in_float64(reference_decode_attention, case, one))


def chosen(one: Inputs) -> DecodeConfig:
    """The layout that our kernels choose themselves."""
    table, scales = one.table, (one.k_scale, one.v_scale)
    return config_for(one.q, cache(one.q, one.k, one.v, one.lengths, table, scales))


def own_calls(case: Case, sets: Sequence[Inputs]) -> tuple[Candidate, str]:
    """Our kernel with the layout that it chooses itself, and that layout in short."""
    config = chosen(sets[0])
    space = workspace(sets[0].q, case.kv_heads, config)
    calls = [
        partial(decode_attention, *one[:4], **options(case, one), out=one.out, space=space, config=config)
        for one in sets
    ]
    return Candidate(str(config), calls), brief(config)


def attention_row(case: Case, op: str, implementation: str, version: str = "simcore", **more: Any) -> Row:
    """A row without times."""
    shape = {
        "batch": case.batch,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "context": case.context,
        "dtype": case.dtype if case.stored == case.dtype else f"{case.dtype}, KV {case.stored}",
        "layout": case.layout,
        **more,
    }
    bar = cases.ERROR_BARS[case.dtype] if version == "simcore" else cases.PEER_ERROR_BAR
    return Row(
        op=op,
        implementation=implementation,
        version=version,
        shape=shape,
        hbm_bytes=case.hbm_bytes,
        error=None,
        error_bar=bar,
    )


def attention_case(case: Case, bench: Bench, peers: Sequence[Peer]) -> Compared:
    """Ours and the peers at one shape."""
    name = f"{case} {case.special}".rstrip()
    say(f"{name} ...")
    sets = sets_of(case, bench.card)
    truths = [truth_of(case, sets[0])]
    truths.append(truth_of(case, sets[-1]) if len(sets) > 1 else truths[0])
    calls = cases.calls_of(len(sets))

    def poison() -> None:
        for one in sets:
            one.out.fill_(float("nan"))

    row = attention_row(case, "decode_attention", OURS)
    try:
        mine, short = own_calls(case, sets)
        entries = [tried(replace(row, brief=short), [mine], truths, calls, poison)]
    except Exception as error:
        entries = [Entry(replace(row, note=f"failed: {one_line(error)}"))]
    for peer in peers:
        row = attention_row(case, "decode_attention", peer.name, peer.version)
        entries.append(tried(row, peer.candidates(case, sets), truths, calls, poison))
    read = case.kv_bytes * case.attended // case.context
    rows = take_turns(entries, cases.cold(len(sets), read), quick=bench.quick)
    bench.judge(rows[0])
    return Compared(name, rows[0], rows[1:], case.hbm_bytes / bench.card.read_bytes_per_s)


def attention_part(part: str, shapes: Sequence[Case], bench: Bench, peers: Sequence[Peer]) -> list[Compared]:
    """All shapes of a part; what is there is saved after each."""
    found, rows = list[Compared](), list[Row]()
    for case in shapes:
        try:
            compared = attention_case(case, bench, peers)
        except Exception as error:
            bench.failed.append(f"{case} {case.special}: {one_line(error)}")
            say(f"  failed: {one_line(error)}")
            row = attention_row(case, "decode_attention", OURS)
            row = replace(row, note=f"failed: {one_line(error)}")
            compared = Compared(str(case), row, (), case.hbm_bytes / bench.card.read_bytes_per_s)
        found.append(compared)
        rows += [compared.ours, *compared.peers]
        bench.save(part, rows)
        free()
    say("")
    names = [peer.name for peer in peers]
    for line in cases.attention_table(found, names, bench.card.read_bytes_per_s):
        say(line)
    say("us; % of read bandwidth; ratio: fastest peer / ours; config: as DecodeConfig")
    if peers:
        say(cases.summary(found))
    return found


def anchors(bench: Bench) -> list[Bar]:
    """The part `anchors`."""
    return cases.anchor_bars(attention_part("anchors", cases.ANCHORS, bench, bench.peers))


def table(bench: Bench) -> list[Bar]:
    """The part `table`."""
    return cases.table_bars(attention_part("table", cases.TABLE, bench, bench.peers))


def variants(bench: Bench) -> list[Bar]:
    """The part `variants`: nothing to reach but to be right."""
    attention_part("variants", cases.VARIANTS, bench, ())
    return []


@dataclass(slots=True)
class Speculating:
    """What one speculative case runs: room for what a launch leaves, and one call a set."""

    case: Case
    into: Speculation
    calls: Sequence[Callable[[], Speculation]]
    config: str
    brief: str


def speculating(of: cases.SpeculativeCase, sets: Sequence[Inputs]) -> Speculating:
    """Our speculative kernel with the layout that it chooses itself beside decode attention's."""
    case, q = of.case, sets[0].q
    config = chosen(sets[0])
    workers = early_workers(2 * of.ends, case.context, config)
    into, space = speculation(q), speculative_workspace(q, case.kv_heads, config)
    # On the device, as in a captured step: numbers would be one more kernel each.
    ends = torch.full((1,), of.ends, dtype=torch.int32, device="cuda")
    told: dict[str, Any] = {
        "sinks": ends,
        "window": ends,
        "threshold": torch.full((1,), THRESHOLD, dtype=torch.float32, device="cuda"),
        "into": into,
        "space": space,
        "config": config,
        "workers": workers,
    }
    calls = [partial(speculative_attention, *one[:4], **told) for one in sets]
    return Speculating(case, into, calls, f"{config}, {workers} for the ends", brief(config))


def speculative_case(of: cases.SpeculativeCase, bench: Bench) -> tuple[list[Row], cases.Early]:
    """One speculative shape: beside plain decode attention, and when its early part is visible."""
    case = of.case
    say(f"speculative {case}, {of.ends} sinks and window ...")
    sets = sets_of(case, bench.card)
    mine, calls = speculating(of, sets), cases.calls_of(len(sets))
    pairs = [_speculative_truth(of, one) for one in (sets[0], sets[-1])]
    row = replace(attention_row(case, "speculative_attention", OURS, ends=of.ends), brief=mine.brief)

    def poison() -> None:
        for x in (mine.into.exact, mine.into.early, *(one.out for one in sets)):
            x.fill_(float("nan"))

    def both(call: Callable[[], Speculation]) -> Tensor:
        left = call()
        return torch.stack((left.exact, left.early))

    def exact(call: Callable[[], Speculation]) -> Tensor:
        return call().exact

    # The outputs are put side by side to be compared; what is timed is captured without that.
    checked = Candidate(mine.config, [partial(both, call) for call in mine.calls])
    entry = captured(row, checked, pairs, len(sets), poison)
    if entry.graph is not None:
        bare = Candidate(mine.config, [partial(exact, call) for call in mine.calls])
        error = entry.row.error or 0.0
        entry = captured(entry.row, bare, [pair[0] for pair in pairs], calls, poison)
        entry.row = replace(entry.row, error=max(error, entry.row.error or 0.0, key=nan_last))
    plain, short = own_calls(case, sets)
    plain_row = replace(attention_row(case, "decode_attention", OURS, ends=of.ends), brief=short)
    decode = captured(plain_row, plain, [pair[0] for pair in pairs], calls, poison)
    rows = take_turns([decode, entry], cases.cold(len(sets), case.kv_bytes), quick=bench.quick)
    for each in rows:
        bench.judge(each)
    early_row, share = _early_row(of, mine, bench, rows[1])
    ratio = None
    if rows[0].times and rows[1].times:
        ratio = rows[1].times.median_s / rows[0].times.median_s
    return [*rows, early_row], cases.Early(case.context, f"{case}, {of.ends}", ratio, share)


def _speculative_truth(of: cases.SpeculativeCase, one: Inputs) -> Tensor:
    """Exact and early in float64: [2, batch, q_heads, d]."""
    found = []
    for some in in_float64(reference_speculative_attention, of.case, one, **_ends(of)):
        found.append(torch.stack((some[0], some[1])))
    return torch.cat(found, 1)


def _ends(of: cases.SpeculativeCase) -> dict[str, Any]:
    return {"sinks": of.ends, "window": of.ends, "threshold": THRESHOLD}


def _early_row(
    of: cases.SpeculativeCase, mine: Speculating, bench: Bench, whole: Row
) -> tuple[Row, float | None]:
    """When the early part is visible, in seconds from the start of the kernel, and as a share of its time."""
    row = attention_row(of.case, "speculative_attention", "early output visible", ends=of.ends)
    if whole.times is None:
        return replace(row, note="not measured: the kernel is not right"), None
    try:
        seen = early_seconds(mine, EARLY_RUNS // 4 if bench.quick else EARLY_RUNS)
    except Exception as error:
        bench.failed.append(f"early output of {of.case}, {of.ends}: {one_line(error)}")
        return replace(row, note=f"failed: {one_line(error)}"), None
    shares = sorted(early_s / whole_s for early_s, whole_s in seen)
    share, last = statistics.median(shares), len(shares) - 1
    p10, p90 = (100 * shares[round(q * last)] for q in (0.1, 0.9))
    whole_s = statistics.median(seconds for _, seconds in seen)
    words = (
        f"{100 * share:.1f} % of the kernel's time (p10 {p10:.1f}, p90 {p90:.1f}), which was "
        f"{1e6 * whole_s:.1f} us here"
    )
    seconds = [early_s for early_s, _ in seen]
    half = len(seconds) // 2
    found = cases.times([seconds[:half], seconds[half:]])
    return replace(row, error=whole.error, times=found, cache_state=whole.cache_state, note=words), share


def early_seconds(mine: Speculating, runs: int) -> list[tuple[float, float]]:
    """(early part visible, kernel ended) after the kernel's start, in seconds, run by run.

    A kernel that waits for the early part is launched first, on a stream of its own, so that it looks for it
    all the time. The other kernel is queued, between its two events, behind one that does nothing, so that no
    launch by the host comes between. Raises RuntimeError where what was received is not the early part.
    """
    case, into = mine.case, mine.into
    x = torch.empty(case.batch, case.q_heads * case.head_dim, dtype=into.early.dtype, device="cuda")
    receiving, sending = CUDA.Stream(), CUDA.Stream()
    take = partial(receive, into.early, into.arrived, x)
    # All is compiled and loaded before anything waits: loading a kernel may have to wait for the device.
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
            # Nothing would ever come: whoever waits is let go.
            with torch.cuda.stream(sending):
                into.arrived.fill_(case.q_heads)
            raise
        torch.cuda.synchronize()
        if not torch.equal(x, into.early.view_as(x)):
            raise RuntimeError("what was received is not the early part")
        if run >= EARLY_WARM_UPS:
            seen.append((1e-3 * before.elapsed_time(there), 1e-3 * before.elapsed_time(after)))
    return seen


def speculative(bench: Bench) -> list[Bar]:
    """The part `speculative`."""
    found, rows, lines = list[cases.Early](), list[Row](), list[list[str]]()
    for of in cases.SPECULATIVE:
        try:
            three, early = speculative_case(of, bench)
        except Exception as error:
            bench.failed.append(f"speculative {of.case}, {of.ends}: {one_line(error)}")
            say(f"  failed: {one_line(error)}")
            found.append(cases.Early(of.case.context, f"{of.case}, {of.ends}", None, None))
            free()
            continue
        found.append(early)
        rows += three
        decode, whole, seen = three
        lines.append(
            [
                early.name,
                cases.cell(decode),
                cases.cell(whole),
                cases.number(early.ratio, ".3f"),
                cases.cell(seen),
                cases.number(None if early.share is None else 100 * early.share, ".1f"),
                cases.number(whole.error, ".1e"),
                whole.brief,
            ]
        )
        bench.save("speculative", rows)
        for each in three:
            if each.times is None:
                say(f"  {each.op}, {each.implementation}: {each.note}")
        free()
    head = [
        "batch x heads x ctx, ends",
        "decode",
        "speculative",
        "ratio",
        "early at",
        "% of it",
        "error",
        "config",
    ]
    say("")
    for line in cases.lines_of(head, lines):
        say(line)
    return cases.speculative_bars(found)
