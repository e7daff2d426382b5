"""What the benchmark of the decoding kernels measures and what it has to reach; nothing here needs a GPU.

    floor     = bytes that have to be moved / read bandwidth measured on the same card
    ratio     = time of the fastest peer / our time           > 1: ours is faster
    geomean   = exp(mean log ratio)
    cold      = between two uses of a buffer at least 3 L2 caches of others are read

A version whose error is above its bar has no time: it is written down as wrong.
"""

import csv
import io
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# ||out - truth|| / ||truth||, truth in fp64, by the dtype of the output.
ERROR_BARS: Mapping[str, float] = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
# Of others' kernels only so much: that they compute the same thing.
PEER_ERROR_BAR = 2e-2
# A buffer is used again once so many L2 caches of others were read; one that is itself so many need not wait.
L2_BETWEEN, L2_ALONE = 3, 4
LEAST_CALLS = 24
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of decode attention. `kv_dtype`: of K and V where it is not that of q; `page`: tokens of a
    page, 0 where the cache is contiguous; `sinks` and `window` in tokens, or None for all tokens."""

    batch: int
    q_heads: int
    kv_heads: int
    context: int
    head_dim: int = 128
    dtype: str = "bf16"
    kv_dtype: str = ""
    page: int = 0
    sinks: int | None = None
    window: int | None = None

    @property
    def stored(self) -> str:
        """The dtype of K and V."""
        return self.kv_dtype or self.dtype

    @property
    def attended(self) -> int:
        """Tokens of a sequence that are read."""
        if self.sinks is None and self.window is None:
            return self.context
        return min(self.context, (self.sinks or 0) + (self.window or 0))

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all tokens."""
        return 2 * self.batch * self.kv_heads * self.context * self.head_dim * DTYPE_BYTES[self.stored]

    @property
    def hbm_bytes(self) -> int:
        """The least to be moved: K and V of the attended tokens and q read, the output written."""
        ends = 2 * self.batch * self.q_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.kv_bytes * self.attended // self.context + ends

    @property
    def layout(self) -> str:
        """In words, how the cache lies and what of it is attended."""
        words = f"pages of {self.page}" if self.page else "contiguous"
        if self.attended < self.context:
            words += f", {self.sinks or 0} sinks, window {self.window or 0}"
        return words

    def __str__(self) -> str:
        return f"{self.batch} x {self.q_heads}/{self.kv_heads} x {self.context}"

    @property
    def special(self) -> str:
        """What sets it apart from bf16, contiguous, all tokens, 128 to a head."""
        words = [self.dtype] if self.dtype != "bf16" else []
        words += [f"KV {self.kv_dtype}"] if self.kv_dtype else []
        words += [f"d {self.head_dim}"] if self.head_dim != 128 else []
        words += [self.layout.removeprefix("contiguous, ")] if self.layout != "contiguous" else []
        return ", ".join(words)


# Batch, query heads, KV heads, context: where the fastest public kernels were measured before.
ANCHORS = tuple(
    Case(*shape)
    for shape in (
        (1, 32, 8, 1024),
        (1, 32, 8, 8192),
        (1, 32, 8, 32768),
        (1, 32, 8, 131072),
        (8, 32, 8, 8192),
        (32, 32, 8, 4096),
        (64, 32, 8, 1024),
        (1, 8, 2, 131072),
        (1, 4, 1, 131072),
        (256, 16, 2, 256),
        (16, 16, 2, 4096),
        (1, 16, 2, 65536),
    )
)
# Two of them have a bar of their own: one sequence of one KV head, and one of eight.
NARROW, LONG = Case(1, 4, 1, 131072), Case(1, 32, 8, 131072)
# The micro-benchmark of Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): the same KV bytes in nine shapes,
# then twice as many.
TABLE = (
    *(Case(65536 >> power, 16, 2, 1 << power, dtype="fp16") for power in range(8, 17)),
    Case(1, 16, 2, 131072, dtype="fp16"),
)
FLAT_ROWS = 9
_SHAPES = ((1, 32, 8, 8192), (8, 32, 8, 8192), (1, 32, 8, 131072))
VARIANTS = (
    *(Case(*shape, dtype="fp16") for shape in _SHAPES),
    *(Case(*shape, kv_dtype="fp8") for shape in _SHAPES),
    *(Case(*shape, page=16) for shape in _SHAPES),
    Case(1, 32, 8, 131072, sinks=4, window=4096),
    Case(8, 32, 8, 32768, sinks=128, window=1024),
    *(Case(8, 32, 8, 8192, head_dim=d) for d in (64, 96, 192, 256)),
    *(Case(1, 32, 8, 131072, head_dim=d) for d in (64, 256)),
    Case(1, 32, 8, 8192, dtype="fp32"),
)


@dataclass(frozen=True, slots=True)
class SpeculativeCase:
    """Attention that gives its first and last `ends` tokens' part early, beside plain decode attention."""

    case: Case
    ends: int


SPECULATIVE = tuple(
    SpeculativeCase(Case(*shape), ends)
    for shape in (
        (1, 32, 8, 1024),
        (1, 32, 8, 8192),
        (1, 32, 8, 32768),
        (1, 32, 8, 131072),
        (8, 32, 8, 8192),
        (1, 8, 2, 131072),
    )
    for ends in (128, 512)
)


@dataclass(frozen=True, slots=True)
class Projection:
    """y [rows, n] = x [rows, k] W [k, n]; `width`: how many cards share the model."""

    name: str
    width: int
    rows: int
    k: int
    n: int

    @property
    def hbm_bytes(self) -> int:
        """W and x read, y written, bf16."""
        return 2 * (self.k * self.n + self.rows * (self.k + self.n))

    def __str__(self) -> str:
        return f"{self.name} TP{self.width}, {self.rows} x {self.k} x {self.n}"


# Llama 3.1 8B: 4096 wide, 32 query and 8 KV heads of 128, 14336 in the MLP.
PROJECTIONS = tuple(
    Projection(name, width, rows, k // (width if by == "k" else 1), n // (width if by == "n" else 1))
    for width in (1, 4)
    for name, k, n, by in (
        ("qkv", 4096, 6144, "n"),
        ("o", 4096, 4096, "k"),
        ("gate+up", 4096, 28672, "n"),
        ("down", 14336, 4096, "k"),
    )
    for rows in (1, 8, 16, 64)
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, token by token."""

    batch: int
    context: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def hbm_bytes(self) -> int:
        """All matrices and the cache, bf16, once."""
        heads, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (heads + 2 * kv) + heads * self.hidden + 3 * self.hidden * self.intermediate
        return 2 * (matrices + 2 * self.batch * self.context * kv)


LAYER = Layer(1, 8192, 4096, 32, 8, 128, 14336)
# bf16 is rounded to nine times on the way.
LAYER_ERROR_BAR = 2e-2


def rotation(set_bytes: int, l2_bytes: int) -> int:
    """Sets of buffers to go round, so that none is in the L2 cache when its turn comes again.

    >>> rotation(4_000_000, 60_000_000), rotation(67_000_000, 60_000_000), rotation(537_000_000, 60_000_000)
    (46, 4, 1)
    """
    if set_bytes > L2_ALONE * l2_bytes:
        return 1
    return 1 + math.ceil(L2_BETWEEN * l2_bytes / set_bytes)


def calls_of(sets: int, least: int = LEAST_CALLS) -> int:
    """Calls in one graph: whole rounds of the sets, so many that the graph's own start counts little.

    >>> calls_of(1), calls_of(46), calls_of(5)
    (24, 46, 25)
    """
    return sets * math.ceil(least / sets)


def least_calls(call_s: float, graph_s: float) -> int:
    """Calls that make a graph at least so long, but no more than of short ones and no fewer than two.

    >>> least_calls(1e-6, 1e-3), least_calls(3e-4, 1e-3), least_calls(1.0, 1e-3)
    (24, 4, 2)
    """
    return max(2, min(LEAST_CALLS, math.ceil(graph_s / call_s)))


def cold(sets: int, set_bytes: int) -> str:
    """The column `cache_state`."""
    return f"cold: rotated over {sets} sets of {set_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: median, 10th and 90th percentile over n replays, and both rounds' medians."""

    median_s: float
    p10_s: float
    p90_s: float
    n: int
    first_s: float
    second_s: float

    @property
    def spread(self) -> float:
        """How far the medians of the two rounds lie apart, relative."""
        return abs(self.first_s - self.second_s) / min(self.first_s, self.second_s)


def times(rounds: Sequence[Sequence[float]]) -> Times:
    """Of seconds a call, replay by replay, in rounds that others' rounds lay between."""
    every = [seconds for each in rounds for seconds in each]
    p10_s, median_s, p90_s = (float(value) for value in np.percentile(every, (10, 50, 90)))
    first_s, *_, second_s = (statistics.median(each) for each in rounds)
    return Times(median_s, p10_s, p90_s, len(every), first_s, second_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one implementation does in one case. `times`: None where it failed or is wrong; `note` says so."""

    op: str
    implementation: str
    version: str
    shape: Mapping[str, object]
    hbm_bytes: int
    error: float | None
    error_bar: float
    times: Times | None = None
    cache_state: str = ""
    config: str = ""
    brief: str = ""
    note: str = ""

    @property
    def wrong(self) -> bool:
        """It ran, and what it gave is off by more than its bar, or no number."""
        return self.error is not None and not self.error <= self.error_bar


def timed(row: Row, found: Times, cache_state: str) -> Row:
    """A row with its times, or without and marked where its error is above the bar."""
    if row.wrong or row.error is None:
        return replace(row, times=None, note=row.note or f"WRONG: error {row.error}")
    return replace(row, times=found, cache_state=cache_state)


@dataclass(frozen=True, slots=True)
class Birth:
    """Where and when figures were measured; clocks as found, in MHz."""

    device: str
    driver: str
    torch: str
    triton: str
    date_utc: str
    sm_clock_mhz: str
    memory_clock_mhz: str
    read_bytes_per_s: float
    read_by: str
    node_s: float


# What each row of a table has of it.
BORN = ("device", "driver", "torch", "triton", "date_utc", "sm_clock_mhz", "memory_clock_mhz")


def csv_text(rows: Sequence[Row], birth: Birth) -> str:
    """A tidy table, one line for each row; numbers with all their digits."""
    lines = []
    for row in rows:
        found = row.times
        seconds = dict.fromkeys(Times.__slots__) if found is None else asdict(found)
        lines.append(
            {
                "op": row.op,
                "implementation": row.implementation,
                **row.shape,
                **seconds,
                "cache_state": row.cache_state,
                "hbm_bytes": row.hbm_bytes,
                "error": row.error,
                "reference_error_bar": row.error_bar,
                "config": row.config,
                "note": row.note,
                "version": row.version,
                **asdict(birth),
            }
        )
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is whole at any moment: beside it first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def file_name(device: str, part: str, family: str = "decode") -> str:
    """The file of a part about a family of kernels.

    >>> file_name("NVIDIA H200", "anchors")
    'h200_decode_kernels_anchors.csv'
    """
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return "_".join([*(word for word in words if word != "nvidia"), family, "kernels", part]) + ".csv"


@dataclass(frozen=True, slots=True)
class Compared:
    """One case: our row, the peers' rows, and the floor in seconds."""

    name: str
    ours: Row
    peers: Sequence[Row]
    floor_s: float

    @property
    def best_peer_s(self) -> float | None:
        """The fastest peer."""
        return min((row.times.median_s for row in self.peers if row.times), default=None)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's time over ours."""
        if self.ours.times is None or self.best_peer_s is None:
            return None
        return self.best_peer_s / self.ours.times.median_s

    @property
    def over_floor(self) -> float | None:
        """Our time over the floor."""
        return None if self.ours.times is None else self.ours.times.median_s / self.floor_s


def geomean(ratios: Iterable[float]) -> float:
    """The geometric mean.

    >>> round(geomean([1.0, 4.0]), 6)
    2.0
    """
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to reach: what was found, in words, and whether that is enough; None: it was not measured."""

    name: str
    found: str
    met: bool | None

    def __str__(self) -> str:
        verdict = "not measured" if self.met is None else "met" if self.met else "NOT MET"
        return f"{verdict:>12}  {self.name}: {self.found}"


def anchor_bars(compared: Sequence[Compared]) -> list[Bar]:
    """What the twelve anchor shapes have to reach. A case in which ours is wrong meets nothing."""
    ratios = {each.name: each.ratio for each in compared}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    wrong = [each.name for each in compared if each.ours.times is None]
    missing = (
        f", {len(ratios) - len(known)} of {len(ratios)} without a ratio" if len(known) < len(ratios) else ""
    )
    bars = []
    if known:
        mean, worst = geomean(known.values()), min(known, key=lambda name: known[name])
        bars = [
            Bar("geometric mean of peer / ours >= 1.05", f"{mean:.3f}{missing}", mean >= 1.05 and not wrong),
            Bar(
                "no shape under 0.95",
                f"{known[worst]:.3f} at {worst}{missing}",
                known[worst] >= 0.95 and not wrong,
            ),
        ]
    else:
        met = False if wrong else None
        bars = [Bar(name, "no ratio", met) for name in ("geometric mean >= 1.05", "no shape under 0.95")]
    found = {each.name: each for each in compared}
    return [*bars, _slowest(found.get(str(NARROW))), _bandwidth(found.get(str(LONG)))]


def at_least(name: str, found: Sequence[Compared], ratio: float) -> Bar:
    """Whether the best peer takes `ratio` times as long as ours, in each case."""
    if not found:
        return Bar(name, "not measured", None)
    worst = min(found, key=lambda one: one.ratio or 0.0)
    met = worst.ratio is not None and worst.ratio >= ratio
    return Bar(name, f"{number(worst.ratio, '.2f')} at {worst.name}", met)


def line_of(one: Compared, rest: Sequence[Row]) -> str:
    """A case in words: the best peer over ours, ours over the floor, and every way's microseconds; `rest`:
    ways of ours that are slower."""
    ways = [one.ours, *rest, *one.peers]
    times = ", ".join(f"{row.implementation.removeprefix(f'{OURS}, ')} {cell(row)}" for row in ways)
    ratio, floor = number(one.ratio, ".2f"), number(one.over_floor, ".2f")
    return f"{one.name}: {ratio} times as fast, {floor} of the floor; {times}"


def _slowest(of: Compared | None) -> Bar:
    name = f"{NARROW} in 21 us at most"
    if of is None:
        return Bar(name, "", None)
    found = of.ours.times
    return Bar(name, micro(found), found is not None and found.median_s <= 21e-6)


def _bandwidth(of: Compared | None) -> Bar:
    name = f"{LONG} at 95 % of read bandwidth"
    if of is None:
        return Bar(name, "", None)
    share = 1 / of.over_floor if of.over_floor else None
    return Bar(
        name, "no time" if share is None else f"{100 * share:.1f} %", share is not None and share >= 0.95
    )


def table_bars(compared: Sequence[Compared]) -> list[Bar]:
    """Flash-Decoding's shapes up to 65,536 tokens: the same bytes, about the same time."""
    name = "flat within 1.5 up to 65536 tokens"
    if len(compared) < FLAT_ROWS:
        return [Bar(name, f"{len(compared)} of {FLAT_ROWS} shapes", None)]
    seconds = [each.ours.times.median_s for each in compared[:FLAT_ROWS] if each.ours.times]
    if len(seconds) < FLAT_ROWS:
        return [Bar(name, f"{FLAT_ROWS - len(seconds)} shapes without a time", False)]
    ratio = max(seconds) / min(seconds)
    return [Bar(name, f"{ratio:.3f}", ratio <= 1.5)]


@dataclass(frozen=True, slots=True)
class Early:
    """A speculative case: its time over plain decode attention's, and when its early output was there, as a
    share of its own time. None: not measured, or wrong."""

    context: int
    name: str
    ratio: float | None
    share: float | None


def speculative_bars(found: Sequence[Early]) -> list[Bar]:
    """At most 5 % slower from 8,192 tokens on; early output before a quarter of the time at 131,072."""
    slower = [each for each in found if each.context >= 8192]
    late = [each for each in found if each.context >= 131072]
    return [
        _most("speculative at most 5 % slower from 8192 tokens on", 1.05, {e.name: e.ratio for e in slower}),
        _most("early output before 25 % of the time at 131072 tokens", 0.25, {e.name: e.share for e in late}),
    ]


def _most(name: str, limit: float, values: Mapping[str, float | None]) -> Bar:
    known = {at: value for at, value in values.items() if value is not None}
    if not values:
        return Bar(name, "", None)
    if len(known) < len(values):
        return Bar(name, f"{len(values) - len(known)} cases without a figure", False)
    worst = max(known, key=lambda at: known[at])
    return Bar(name, f"{known[worst]:.3f} at {worst}", known[worst] <= limit)


def layer_bars(executed: Times | None, skipped: Times | None) -> list[Bar]:
    """A layer whose gate is 0 has to cost less than 15 % of one that runs."""
    name = "a skipped layer under 15 % of an executed one"
    if executed is None or skipped is None:
        return [Bar(name, "no time", False)]
    share = skipped.median_s / executed.median_s
    return [Bar(name, f"{100 * share:.1f} %", share < 0.15)]


def micro(found: Times | None, missing: str = "-") -> str:
    """A median in microseconds."""
    return missing if found is None else f"{1e6 * found.median_s:.1f}"


def cell(row: Row) -> str:
    """A row's time, or in a word why it has none."""
    return micro(row.times, "WRONG" if row.wrong else "-")


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first and the last to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    last = len(head) - 1

    def line(cells: Sequence[str]) -> str:
        put = [
            c.ljust(w) if i in (0, last) else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(put).rstrip()

    return [line(head), *(line(cells) for cells in rows)]


def attention_table(compared: Sequence[Compared], peers: Sequence[str], read_bytes_per_s: float) -> list[str]:
    """The table of an attention part. Times in us; % of read bandwidth; ratio: fastest peer to ours; +-: what
    lies between the two rounds."""
    head = ["batch x heads x ctx", "ours", "TB/s", "%", *peers, "ratio", "/floor", "+-", "error", "config"]
    rows = []
    for each in compared:
        ours, by_name = each.ours, {row.implementation: row for row in each.peers}
        rate = ours.hbm_bytes / ours.times.median_s if ours.times else None
        rows.append(
            [
                each.name,
                cell(ours),
                number(None if rate is None else rate / 1e12, ".2f"),
                number(None if rate is None else 100 * rate / read_bytes_per_s, ".1f"),
                *(cell(by_name[name]) if name in by_name else "-" for name in peers),
                number(each.ratio, ".3f"),
                number(each.over_floor, ".2f"),
                number(None if ours.times is None else ours.times.spread, ".1%"),
                number(ours.error, ".0e"),
                ours.brief,
            ]
        )
    return lines_of(head, rows)


def summary(compared: Sequence[Compared]) -> str:
    """Geometric mean and worst of the ratios of a part."""
    known = {each.name: each.ratio for each in compared if each.ratio is not None}
    if not known:
        return "no ratio to a peer"
    worst = min(known, key=lambda name: known[name])
    return f"geometric mean of peer / ours {geomean(known.values()):.3f}; worst {known[worst]:.3f} at {worst}"
