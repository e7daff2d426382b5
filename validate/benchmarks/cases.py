"""Cases and goals of the kernel benchmark; this module needs no GPU.

    floor     = bytes that must be moved / read bandwidth measured on the same card
    ratio     = time of the fastest peer / our time           > 1: ours is faster
    geomean   = exp(mean log ratio)
    cold      = between two uses of a buffer, at least 3 L2 caches of other buffers are read

A version whose error is above its bar gets no time; its row says that it is wrong.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import ClassVar, Protocol

import numpy as np

from simcore.validate.program import aligned

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# ||out - truth|| / ||truth||, truth in fp64, by the dtype of the output.
ERROR_BARS: Mapping[str, float] = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
# Bar of peers' kernels, which only has to show that they compute the same.
PEER_ERROR_BAR = 2e-2
# L2 caches of other buffers read before a buffer is used again; a buffer of L2_ALONE caches needs none.
L2_BETWEEN, L2_ALONE = 3, 4
LEAST_CALLS = 24
# Names of our own implementation and its version in tables.
OURS, OWN = "ours", "simcore"


class Shape(Protocol):
    """A case of any kind of op; `str` returns its name."""

    @property
    def op(self) -> str:
        """The kind of op."""

    @property
    def columns(self) -> dict[str, object]:
        """Returns its dimensions, as in tables."""

    @property
    def hbm_bytes(self) -> int:
        """The fewest bytes that must be moved."""


Draw = Callable[[Random, int], float]
# The most tokens of the others beside one long sequence.
LONGEST_SHORT = 2000
# Tokens of a sequence where the longest has so many.
DRAWN: Mapping[str, Draw] = {
    "": lambda random, most: most,
    "uniform": lambda random, most: random.uniform(0.1 * most, most),
    "lognormal": lambda random, most: random.lognormvariate(math.log(most / 6), 0.9),
    "one long": lambda random, most: random.uniform(200, LONGEST_SHORT),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of decode attention. `kv_dtype`: of K and V if it differs from q's; `page`: tokens of a page,
    0 for a contiguous cache; `sinks` and `window` in tokens, or None for all tokens; `drawn`: how lengths are
    drawn that are not all `context`, the length of the first and longest."""

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
    drawn: str = ""
    op: ClassVar[str] = "decode_attention"

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
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, the same at every call."""
        random, most = Random(f"{self.batch} {self.context} {self.drawn}"), self.context
        draw = DRAWN[self.drawn]
        return (most, *(max(1, min(most, round(draw(random, most)))) for _ in range(self.batch - 1)))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.stored]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of the whole cache."""
        return self.batch * self.context * self.token_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V of the attended tokens."""
        return sum(min(length, self.attended) for length in self.lengths) * self.token_bytes

    @property
    def hbm_bytes(self) -> int:
        """The fewest bytes that must be moved: attended K and V and q read, the output written."""
        return self.read_bytes + 2 * self.batch * self.q_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {
            "batch": self.batch,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "context": self.context,
            "dtype": self.dtype if self.stored == self.dtype else f"{self.dtype}, KV {self.stored}",
            "layout": self.layout,
        }

    @property
    def layout(self) -> str:
        """Describes the cache's layout and the attended tokens."""
        words = f"pages of {self.page}" if self.page else "contiguous"
        if self.attended < self.context:
            words += f", {self.sinks or 0} sinks, window {self.window or 0}"
        if self.drawn:
            words += f", lengths {self.drawn}, {sum(self.lengths)} tokens"
        return words

    def __str__(self) -> str:
        # Names only the differences from bf16, contiguous, all tokens, head dimension 128.
        words = [self.dtype] if self.dtype != "bf16" else []
        words += [f"KV {self.kv_dtype}"] if self.kv_dtype else []
        words += [f"d {self.head_dim}"] if self.head_dim != 128 else []
        words += [self.layout.removeprefix("contiguous, ")] if self.layout != "contiguous" else []
        return f"{self.batch} x {self.q_heads}/{self.kv_heads} x {self.context} {', '.join(words)}".rstrip()


# Batch, query heads, KV heads, context: shapes of earlier measurements of the fastest public kernels.
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
# Two anchors with their own bars: one sequence with one KV head, and one with eight.
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
# Batches that fill whole waves of programs, and such as leave the last one nearly empty.
BATCHES = tuple(
    Case(*shape)
    for shape in (
        (16, 32, 8, 1152),
        (17, 32, 8, 1152),
        (33, 32, 8, 1152),
        (34, 32, 8, 1152),
        (72, 32, 8, 1152),
        (9, 32, 8, 8192),
        (17, 32, 8, 8192),
        (40, 32, 8, 8192),
        (18, 64, 8, 4096),
        (100, 16, 2, 896),
    )
)
RAGGED = (
    Case(64, 32, 8, 8192, drawn="uniform"),
    Case(20, 64, 8, 4096, drawn="uniform"),
    Case(100, 16, 2, 1024, drawn="uniform"),
    Case(5, 4, 1, 65536, drawn="uniform"),
    Case(32, 32, 8, 16384, drawn="lognormal"),
    Case(128, 28, 4, 2048, drawn="lognormal"),
    Case(16, 8, 2, 32768, drawn="lognormal"),
    Case(32, 32, 8, 65536, drawn="one long"),
)

# Query and KV heads of models on one or several cards.
HEADS = ((32, 8), (64, 8), (28, 4), (16, 2), (8, 2), (4, 1))
# Of K and V of a drawn case: there are two sets of them, and their truth in float64.
MOST_BYTES = 8 << 30


def drawn(seed: int, count: int, *, ragged: bool = False) -> tuple[Case, ...]:
    """Draws shapes: 1 to 200 sequences of 200 to 150,000 tokens, each log-uniform; `ragged`: 4 sequences or
    more, of unequal lengths."""
    random, found = Random(f"{seed} {ragged}"), list[Case]()
    ways = [way for way in DRAWN if way] if ragged else [""]
    while len(found) < count:
        batch = round(math.exp(random.uniform(math.log(4 if ragged else 1), math.log(200))))
        context = round(math.exp(random.uniform(math.log(200), math.log(150_000))))
        case = Case(batch, *random.choice(HEADS), context, drawn=random.choice(ways))
        if case.kv_bytes <= MOST_BYTES and not (case.drawn == "one long" and context < 2 * LONGEST_SHORT):
            found.append(case)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SpeculativeCase:
    """Attention that returns its first and last `ends` tokens' part early, beside plain decode attention."""

    case: Case
    ends: int
    op: ClassVar[str] = "speculative_attention"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**self.case.columns, "ends": self.ends}

    @property
    def hbm_bytes(self) -> int:
        """The bytes of decode attention."""
        return self.case.hbm_bytes

    def __str__(self) -> str:
        return f"{self.case}, {self.ends}"


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
    """y [rows, n] = x [rows, k] W [k, n]; `width`: number of cards that share the model."""

    name: str
    width: int
    rows: int
    k: int
    n: int
    op: ClassVar[str] = "matmul"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        sizes = {"rows": self.rows, "k": self.k, "columns": self.n}
        return {"name": self.name, "width": self.width, **sizes, "dtype": "bf16"}

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


# Sizes of decoders: hidden, query and KV heads of 128, width of the MLP.
DECODERS = (
    (4096, 32, 8, 14336),
    (8192, 64, 8, 28672),
    (8192, 64, 8, 22016),
    (5120, 40, 8, 17408),
    (5120, 64, 8, 25600),
)


def drawn_products(seed: int, count: int) -> tuple[Projection, ...]:
    """Draws products of decoders' layers on 1 to 8 ranks, with 1 to 512 rows, log-uniform."""
    random, found = Random(f"products {seed}"), list[Projection]()
    for _ in range(count):
        hidden, heads, kv, inner = random.choice(DECODERS)
        width, rows = random.choice((1, 2, 4, 8)), round(math.exp(random.uniform(0.0, math.log(512))))
        name, k, n = random.choice(
            (
                ("qkv", hidden, 128 * (heads + 2 * kv) // width),
                ("o", 128 * heads // width, hidden),
                ("gate+up", hidden, 2 * inner // width),
                ("down", inner // width, hidden),
            )
        )
        found.append(Projection(name, width, rows, k, n))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer in a token step."""

    batch: int
    context: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    op: ClassVar[str] = "layer"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "dtype": "bf16"}

    @property
    def hbm_bytes(self) -> int:
        """All matrices and the cache once, bf16."""
        heads, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (heads + 2 * kv) + heads * self.hidden + 3 * self.hidden * self.intermediate
        return 2 * (matrices + 2 * self.batch * self.context * kv)


LAYER = Layer(1, 8192, 4096, 32, 8, 128, 14336)
# The layer rounds to bf16 nine times.
LAYER_ERROR_BAR = 2e-2


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each of several sequences: embedding, all layers, head and choice of the next token."""

    layer: Layer
    layers: int = 32
    vocab: int = 128_256
    op: ClassVar[str] = "decode_step"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**self.layer.columns, "layers": self.layers, "vocab": self.vocab}

    @property
    def hbm_bytes(self) -> int:
        """All matrices and caches once, bf16."""
        return self.layers * self.layer.hbm_bytes + 2 * self.layer.hidden * self.vocab

    def __str__(self) -> str:
        return f"{self.layer.batch} x {self.layer.context}"


def decode_step(batch: int, context: int) -> DecodeStep:
    """Returns a step of Llama 3.1 8B."""
    return DecodeStep(replace(LAYER, batch=batch, context=context))


DECODE_STEPS = (decode_step(1, 1024), decode_step(17, 21_000))
# Most bytes of matrices and caches of a drawn step.
MOST_STEP_BYTES = 80 << 30


def drawn_steps(seed: int, count: int) -> tuple[DecodeStep, ...]:
    """Draws steps of 1 to 128 sequences of 200 to 100,000 tokens, each log-uniform."""
    random, found = Random(f"steps {seed}"), list[DecodeStep]()
    while len(found) < count:
        batch = round(math.exp(random.uniform(0.0, math.log(128))))
        one = decode_step(batch, round(math.exp(random.uniform(math.log(200), math.log(100_000)))))
        if one.hbm_bytes <= MOST_STEP_BYTES:
            found.append(one)
    return tuple(found)


def rotation(set_bytes: int, l2_bytes: int) -> int:
    """Returns the number of sets of buffers with which no set is in the L2 cache at its next turn.

    >>> rotation(4_000_000, 60_000_000), rotation(67_000_000, 60_000_000), rotation(537_000_000, 60_000_000)
    (46, 4, 1)
    """
    if set_bytes > L2_ALONE * l2_bytes:
        return 1
    return 1 + math.ceil(L2_BETWEEN * l2_bytes / set_bytes)


def calls_of(sets: int, least: int = LEAST_CALLS) -> int:
    """Returns the calls in one graph: whole rounds of the sets, so many that the graph's own start is small.

    >>> calls_of(1), calls_of(46), calls_of(5)
    (24, 46, 25)
    """
    return sets * math.ceil(least / sets)


def least_calls(call_s: float, graph_s: float) -> int:
    """Returns the calls of a graph that lasts at least `graph_s`, between two and the number for short calls.

    >>> least_calls(1e-6, 1e-3), least_calls(3e-4, 1e-3), least_calls(1.0, 1e-3)
    (24, 4, 2)
    """
    return max(2, min(LEAST_CALLS, math.ceil(graph_s / call_s)))


def cold(sets: int, set_bytes: int) -> str:
    """Returns the text of the column `cache_state`."""
    return f"cold: rotated over {sets} sets of {set_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: median, 10th and 90th percentile over n replays, and each round's median."""

    median_s: float
    p10_s: float
    p90_s: float
    n: int
    first_s: float
    second_s: float

    @property
    def spread(self) -> float:
        """The relative difference between the medians of the two rounds."""
        return abs(self.first_s - self.second_s) / min(self.first_s, self.second_s)


def times(rounds: Sequence[Sequence[float]]) -> Times:
    """Summarizes seconds of a call, replay by replay, in rounds between those of other implementations."""
    every = [seconds for each in rounds for seconds in each]
    p10_s, median_s, p90_s = (float(value) for value in np.percentile(every, (10, 50, 90)))
    first_s, *_, second_s = (statistics.median(each) for each in rounds)
    return Times(median_s, p10_s, p90_s, len(every), first_s, second_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one implementation in one case. `version`: package and version, OWN for ours; `times`:
    None if it failed or is wrong; `note` states why."""

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
        """Whether it ran with an error above its bar, or NaN."""
        return self.error is not None and not self.error <= self.error_bar

    @property
    def median_s(self) -> float | None:
        """Seconds of a call; None without a time."""
        return None if self.times is None else self.times.median_s

    @property
    def label(self) -> str:
        """Its name among the implementations of its case."""
        return self.op if self.implementation == OURS else self.implementation.removeprefix(f"{OURS}, ")


def row_of(of: Shape, implementation: str, version: str, error_bar: float) -> Row:
    """Returns a row without times."""
    return Row(
        op=of.op,
        implementation=implementation,
        version=version,
        shape=of.columns,
        hbm_bytes=of.hbm_bytes,
        error=None,
        error_bar=error_bar,
    )


def timed(row: Row, found: Times, cache_state: str) -> Row:
    """Returns a row with its times, or marked and without them if its error is above the bar."""
    if row.wrong or row.error is None:
        return replace(row, times=None, note=row.note or f"WRONG: error {row.error}")
    return replace(row, times=found, cache_state=cache_state)


@dataclass(frozen=True, slots=True)
class Birth:
    """Device, software and time of a measurement; clocks as found, in MHz."""

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


# The fields of a birth record in each row of a table.
BORN = ("device", "driver", "torch", "triton", "date_utc", "sm_clock_mhz", "memory_clock_mhz")


def cells(row: Row, birth: Birth) -> dict[str, object]:
    """Returns a line of a table."""
    return {
        "op": row.op,
        "implementation": row.implementation,
        **row.shape,
        **(dict.fromkeys(Times.__slots__) if row.times is None else asdict(row.times)),
        "cache_state": row.cache_state,
        "hbm_bytes": row.hbm_bytes,
        "error": row.error,
        "reference_error_bar": row.error_bar,
        "config": row.config,
        "note": row.note,
        "version": row.version,
        **asdict(birth),
    }


def file_name(device: str, part: str, family: str = "decode") -> str:
    """Returns the file name of a part about a family of kernels.

    >>> file_name("NVIDIA H200", "anchors")
    'h200_decode_kernels_anchors.csv'
    """
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return "_".join([*(word for word in words if word != "nvidia"), family, "kernels", part]) + ".csv"


@dataclass(frozen=True, slots=True)
class Compared:
    """One case: our row, the peers' rows, and the floor in seconds; `rest`: our other ways. `early`:
    the share of the kernel's time after which its early part is visible, if it has one."""

    name: str
    ours: Row
    peers: Sequence[Row]
    floor_s: float
    rest: Sequence[Row] = ()
    early: float | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return (self.ours, *self.rest, *self.peers)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's time over ours."""
        return self.ratio_of(self.ours.label)

    def ratio_of(self, label: str) -> float | None:
        """The fastest peer's time over that of one of our ways."""
        best_s = min((row.times.median_s for row in self.peers if row.times), default=None)
        own_s = next((row.median_s for row in (self.ours, *self.rest) if row.label == label), None)
        return best_s / own_s if best_s and own_s else None

    @property
    def over_floor(self) -> float | None:
        """Our time over the floor."""
        return None if self.ours.median_s is None else self.ours.median_s / self.floor_s

    def __str__(self) -> str:
        # The best peer over ours, ours over the floor, and the microseconds of each way.
        times = ", ".join(f"{row.label} {cell(row)}" for row in self.rows)
        ratio, floor = number(self.ratio, ".2f"), number(self.over_floor, ".2f")
        return f"{self.name}: {ratio} times as fast, {floor} of the floor; {times}"


# -- goals -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One goal: the result in words, and whether it suffices; None: not measured."""

    name: str
    result: str
    met: bool | None

    def __str__(self) -> str:
        verdict = "not measured" if self.met is None else "met" if self.met else "NOT MET"
        return f"{verdict:>12}  {self.name}: {self.result}"


Figures = Mapping[str, float | None]


def bar(
    name: str,
    figures: Figures,
    form: str = ".2f",
    *,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> Bar:
    """Returns a bar for all figures, with the worst figure and its place. A missing figure fails it."""
    if not figures:
        return Bar(name, "not measured", None)
    known = {at: value for at, value in figures.items() if value is not None}
    if len(known) < len(figures):
        missing = ", ".join(at for at in figures if at not in known)
        return Bar(name, f"no figure at {missing}", False)
    worst = (max if least == -math.inf else min)(known, key=lambda at: known[at])
    value = known[worst]
    return Bar(name, f"{value:{form}} at {worst}", least <= value <= most and value < below)


@dataclass(frozen=True, slots=True)
class Goal:
    """A range from `least` to `most` for a figure of each of some cases. If ours is wrong, the figure is
    missing and the goal is not met."""

    name: str
    figure: Callable[[Compared], float | None] = lambda one: one.ratio
    of: Callable[[Compared], bool] = lambda one: True
    form: str = ".2f"
    least: float = -math.inf
    most: float = math.inf

    def bar(self, found: Iterable[Compared]) -> Bar:
        """Returns the result."""
        figures = {one.name: self.figure(one) for one in found if self.of(one)}
        return bar(self.name, figures, self.form, least=self.least, most=self.most)


def within(column: str, least: float, most: float = math.inf) -> Callable[[Compared], bool]:
    """Selects cases with a dimension in a range."""
    return lambda one: least <= float(str(one.ours.shape[column])) <= most


def called(*names: str) -> Callable[[Compared], bool]:
    """Selects cases by name."""
    return lambda one: one.name in names


def our_us(one: Compared) -> float | None:
    """Returns our time in microseconds."""
    return None if one.ours.median_s is None else 1e6 * one.ours.median_s


def bandwidth_share(one: Compared) -> float | None:
    """Returns our share of the read bandwidth."""
    return 1.0 / one.over_floor if one.over_floor else None


def _is_compared(one: Compared) -> bool:
    """Whether a case counts: a peer was measured, or ours has no time and therefore fails."""
    return one.ratio is not None or one.ours.times is None


ANCHOR_GOALS = (
    Goal("no shape under 0.95", of=_is_compared, form=".3f", least=0.95),
    Goal(f"{NARROW} in 21 us at most", our_us, called(str(NARROW)), ".1f", most=21.0),
    Goal(f"{LONG} at 95 % of read bandwidth", bandwidth_share, called(str(LONG)), ".1%", least=0.95),
)
SPECULATIVE_GOALS = (
    Goal(
        "speculative at most 5 % slower from 8192 tokens on", lambda one: one.ratio and 1.0 / one.ratio,
        within("context", 8192), ".3f", most=1.05,
    ),
    Goal(
        "early output before 25 % of the time at 131072 tokens", lambda one: one.early,
        within("context", 131072), ".3f", most=0.25,
    ),
)  # fmt: skip


PRODUCT_GOALS = (
    Goal("never below 0.97 of cuBLAS", lambda one: one.ratio, lambda one: True, ".3f", least=0.97),
)


# The rate at which the bars of decode steps read weights and caches.
STEP_BYTES_PER_S = 4.42e12


def over_floor(one: Compared) -> float | None:
    """Returns our time over that of reading weights and caches once."""
    seconds, moved = one.ours.median_s, one.ours.hbm_bytes
    return None if seconds is None or not moved else seconds * STEP_BYTES_PER_S / moved


DECODE_STEP_GOALS = tuple(
    Goal(f"{of} in at most {most} times the floor", over_floor, called(str(of)), ".3f", most=most)
    for of, most in zip(DECODE_STEPS, (1.22, 1.15), strict=True)
)


def drawn_step_bars(found: Sequence[Compared]) -> list[Bar]:
    """Returns the bar of drawn steps: 1.2 times the floor in the median."""
    known = [over_floor(one) for one in found]
    right = [value for value in known if value is not None]
    median = statistics.median(right) if right and len(right) == len(known) else None
    return [
        bar("at most 1.2 times the floor in the median", {f"{len(known)} steps": median}, ".3f", most=1.2)
    ]


def anchor_bars(found: Sequence[Compared]) -> list[Bar]:
    """Returns the bars of the twelve anchor shapes, together and one by one."""
    counted = [one.ratio for one in found if _is_compared(one)]
    known = [ratio for ratio in counted if ratio is not None]
    mean = statistics.geometric_mean(known) if len(known) == len(counted) and known else None
    together: Figures = {f"{len(known)} of {len(found)} shapes": mean} if counted else {}
    whole = bar("geometric mean of peer / ours >= 1.05", together, ".3f", least=1.05)
    return [whole, *(goal.bar(found) for goal in ANCHOR_GOALS)]


def table_bars(found: Sequence[Compared]) -> list[Bar]:
    """Returns the bar of Flash-Decoding's shapes up to 65,536 tokens: equal bytes, about equal times."""
    seconds = {one.name: one.ours.median_s for one in found[:FLAT_ROWS]}
    least_s = min((s for s in seconds.values() if s), default=math.nan)
    over = {at: s and s / least_s for at, s in seconds.items()} if len(found) >= FLAT_ROWS else {}
    return [bar("flat within 1.5 up to 65536 tokens", over, ".3f", most=1.5)]


def layer_bars(executed: Times | None, skipped: Times | None) -> list[Bar]:
    """Returns the bar of a skipped layer: with gate 0 it costs less than 15 % of an executed one."""
    share = skipped.median_s / executed.median_s if executed and skipped else None
    return [bar("a skipped layer under 15 % of an executed one", {"one layer": share}, ".1%", below=0.15)]


# -- printed tables --------------------------------------------------------------------------------------


def micro(found: Times | None, missing: str = "-") -> str:
    """Returns a median in microseconds."""
    return missing if found is None else f"{1e6 * found.median_s:.1f}"


def cell(row: Row) -> str:
    """Returns a row's time, or a word for its absence."""
    return micro(row.times, "WRONG" if row.wrong else "-")


def number(value: float | None, form: str) -> str:
    """Returns a number, or a dash."""
    return "-" if value is None else format(value, form)


def table(found: Sequence[Compared], read_bytes_per_s: float) -> Iterator[str]:
    """Yields the table of a part. Times in us; % of read bandwidth; ratio: fastest peer to ours; +-: between
    the two rounds."""
    others = list(dict.fromkeys(row.label for one in found for row in (*one.rest, *one.peers)))
    lines = [["case", "ours", "TB/s", "%", *others, "ratio", "/floor", "+-", "error", "config"]]
    for one in found:
        ours, by_name = one.ours, {row.label: cell(row) for row in (*one.rest, *one.peers)}
        rate = ours.hbm_bytes / ours.times.median_s if ours.times else None
        lines.append([
            one.name,
            cell(ours),
            number(rate and rate / 1e12, ".2f"),
            number(rate and 100 * rate / read_bytes_per_s, ".1f"),
            *(by_name.get(name, "-") for name in others),
            number(one.ratio, ".2f"),
            number(one.over_floor, ".2f"),
            number(None if ours.times is None else ours.times.spread, ".0%"),
            number(ours.error, ".0e"),
            "; ".join(dict.fromkeys(row.brief for row in one.rows if row.brief)),
        ])  # fmt: skip
    yield from aligned(lines)


def summary(found: Sequence[Compared]) -> str:
    """Returns geometric mean and worst of a part's ratios."""
    known = {one.name: one.ratio for one in found if one.ratio is not None}
    if not known:
        return "no ratio to a peer"
    means = [f"geometric mean of peer / ours {_mean_and_worst(known)}"]
    for label in dict.fromkeys(row.label for one in found for row in one.rest):
        ratios = {one.name: ratio for one in found if (ratio := one.ratio_of(label)) is not None}
        means += [f"of peer / {label} {_mean_and_worst(ratios)}"] if ratios else []
    return "\n".join(means)


def _mean_and_worst(ratios: Mapping[str, float]) -> str:
    worst = min(ratios, key=lambda name: ratios[name])
    return f"{statistics.geometric_mean(ratios.values()):.3f}; worst {ratios[worst]:.3f} at {worst}"
