"""The shapes of a CUDA card: those that a calibration measures, and others from the same ranges.

A family is one kind of op. Some of its dimensions come from models (`choices`: for example the matrices of
Llama 3.1 8B and 70B on 1 to 8 ranks and of CodeLlama 34B on one). The others lie in a range; `ranges` lists
the values that are measured:

    grid(...)     choices x ranges
    drawn(...)    a choice, and from each range any number, log-uniformly; never a shape of the grid

Prices between two values of a range are interpolated (`interpolation`), so values are close together where
kernels change, such as products beyond the rows of a tile.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from simcore.devices.interpolation import operand_bytes, place_of
from simcore.models.decoder import Decoder, why_not
from simcore.models.decoder_config import load_config
from simcore.ops import convolution as conv
from simcore.ops import linear_attention as linear
from simcore.ops import linear_layer
from simcore.ops import op as ops
from simcore.ops.op import Op, Shape
from simcore.validate.calibration.cpu_grid import paged, speculative, square_tile

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
LLAMA, CODELLAMA = ("llama-3.1-8b", "llama-3.1-70b"), "codellama-34b"
# Models whose layers keep states, all of them or three of four.
ON_ONE_RANK = (CODELLAMA, "hybrid-8b", "toy-retnet-1.3b")
QWEN, LARGEST = "qwen3-32b", "llama-3.1-405b"
MODELS_IN_BF16, MODELS_IN_FP8 = (*LLAMA, *ON_ONE_RANK, QWEN, LARGEST), (*LLAMA, QWEN, LARGEST)
MODELS_IN_BLOCKS = (*LLAMA, QWEN)
RANKS = (1, 2, 4, 8)
# Where not on all: few scenarios use some on several ranks, and on one or two the largest has no room.
RANKS_OF = {**dict.fromkeys(ON_ONE_RANK, (1,)), LARGEST: (4, 8)}
ATTENDS = "decode_attention"
# Rows of a decode step: first those of own kernels, then those to which products are padded.
ROWS = (
    1, 2, 3, 4, 6, 8, 10, 12, 16, 17, 20, 24, 28, 32, 33, 40, 48, 56, 64,
    *range(72, 257, 8), *range(272, 513, 16),
)  # fmt: skip
FP8_ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 33, 48, *ROWS[18:])
PROMPT_ROWS = (*range(576, 1025, 64), *range(1152, 4097, 128), *range(4352, 8193, 256))
FEW_ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Rows of a norm head by head: tokens times heads, of so many columns at most.
HEADS_ROWS = (16384, 32768, 65536, 131072, 262144, 524288, 1048576)
WIDEST_HEAD = 512
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Attention's programs fill a card unevenly, so almost every number of sequences and KV heads is needed.
SEQUENCES = (
    *range(1, 13), 14, 16, 17, 20, 22, 24, 28, 32, 33, 36, 40, 44, 48, 56, 64, 66, 67, 72, 80, 88, 96, 112,
    128, 132, 133, 160, 192, 256,
)  # fmt: skip
# On both sides of layout changes, and of 256, 512 and 1024, where each program of a short context has one
# whole block (512 takes a tenth less than 511 and 518); otherwise no round numbers: contexts are not round.
CONTEXT = (
    131, 255, 256, 257, 511, 512, 513, 777, 1023, 1024, 1025, 2047, 4095, 4097, 8201, 16411, 32771, 131201
)  # fmt: skip
# Of sequences in blocks. Their lengths differ, so no length is special.
PAGED_SEQUENCES = (
    1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256
)  # fmt: skip
PAGED_CONTEXT = (
    67, 95, 131, 185, 257, 363, 513, 1025, 1449, 2049, 2897, 4097, 5793, 8201, 11601, 16411, 23171, 65551
)  # fmt: skip
# Of sequences whose longest is another than of lengths spread evenly: percent of that; the ends stand for
# equal lengths, and for one that has all tokens but one of each other. In launches of more bytes the longest
# hardly counts. Layouts change with every sequence where contexts are short, and with every block where few
# are long: these are measured closer together, at fewer percentages.
LONGEST_PCT, FEW_PCT = (50, 75, 125, 150, 200, 300, 450, 800, 15_000), (50, 125, 200, 450, 15_000)
UNLIKE_SEQUENCES = (*range(2, 13), 14, 16, 18, 20, 22, *PAGED_SEQUENCES[11:])
UNLIKE_CONTEXT = (67, 131, 257, 513, 1025, 2049, 4097, 8201, 16411, 32771)
UNLIKE = (
    (UNLIKE_SEQUENCES, UNLIKE_CONTEXT, LONGEST_PCT),
    (UNLIKE_SEQUENCES, (95, 185, 363), FEW_PCT),
    ((33, 44, 112, 144, 224), (67, 95, 131, 185, 257, 363, 513), FEW_PCT),
    (UNLIKE_SEQUENCES[:11], (1449, 2897, 5793, 11601, 23171), FEW_PCT),
)
UNLIKE_HEADS = ((4, 1), (8, 2), (16, 4), (32, 8), (8, 1), (64, 8))
MOST_UNLIKE_BYTES = 6e8
SPECULATED_CONTEXT = (
    521, 649, 777, 1021, 1033, 1289, 1547, 2039, 2059, 2571, 3083, 4093, 4099, 5125, 6151, 8191, 8201,
    12301, 16381, 16411, 24593, 32749, 32771, 65543, 131201,
)  # fmt: skip
# Beyond 16,384 no kernel of its own transforms a tile.
SIDES = tuple(1 << power for power in range(17))
# Layers of a tile, by method; sides up to SHORT_SIDE also get the layers between.
LAYERS, LAYERS_BETWEEN, SHORT_SIDE = (1, 2, 3, 4, 6, 9, 12, 18, 24, 36), (3, 6, 12, 24), 256
FEW_LAYERS = {"flash_conv": LAYERS, "flash_fft": (1, 2, 4, 9, 18, 36)}
FEWEST_LAYERS = (1, 2, 3, 9, 36)
# While measured, inputs up to this size stay in the cache and larger ones do not: calls rotate through 128
# sets of them (`simcore.validate.timing.cuda_times`), and an H200 keeps 60 MiB.
KEPT_BYTES = 60 * 2**20 // 128
# Sequences of linear attention. Few sequences are cut into groups of rows: lengths on both sides of one more
# group, and also lengths that are not round, because groups of round ones are alike.
FEW_SEQUENCES, MANY_SEQUENCES = (1, 2, 3, 4), tuple(range(5, 17))
LENGTHS = (
    64, 128, 192, 256, 320, 384, 448, 500, 512, 520, 640, 740, 768, 780, 1000, 1024, 1040, 1200, 1700, 1960,
    2048, 2300, 3000, 4096, 4300, 6000, 8192, 8700, 12000, 16384, 16500, 19000, 23000, 32768, 33000, 46000,
    65536,
)  # fmt: skip
FEW_LENGTHS = (64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 16500, 65536)
# For slow methods, with a launch for each token or memory quadratic in the length, few numbers of sequences
# suffice. Lengths lie on both sides of one more step.
SLOW_LENGTHS = {
    "block_based": (
        64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 256, 320, 384, 512, 768, 1024, 2048,
    ),
    "fleet": (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096),
    "recursion": (64, 65, 96, 128, 129, 160, 192, 193, 224, 256),
    "vanilla": (
        64, 65, 96, 128, 129, 192, 256, 257, 320, 384, 385, 448, 512, 513, 640, 641, 768, 769, 896, 897,
        1024, 1025, 1280, 1281, 1536, 1537, 2048,
    ),
}  # fmt: skip
# Prompts of one step that serves, and rows of each, whole chunks.
SERVED_PROMPTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SERVED_ROWS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192)
# Sequences of one token; rows of elementwise ops, with every remainder by four.
ONE_TOKEN = (1, 2, 3, 4, 6, 8, 12, 16, 17, 20, 24, 32, 33, 48, 64)
# Tokens of prompts, few and many, and cached tokens before them.
SHORT_PROMPTS, SHORT_CACHED = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128), (0, 64, 256, 1024, 4096, 16384)
PROMPTS = (
    160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2560, 3072,
    4096, 5120, 6144, 8192,
)  # fmt: skip
CACHED = (0, 128, 512, 2048, 8192, 32768)
MOST_OF_PROMPTS = {"tokens": 16384, "kv_tokens": 150_000}
# Sequences that are sampled; positions of a history or a column; few sequences.
SAMPLED = (1, 2, 4, 8, 16, 32, 64, 96, 128, 132, 133, 192, 256, 264, 265, 384, 396, 397, 512)
LAGS = (
    1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 128, 192, 256, 384, 512,
    1024, 2048, 4096, 8192, 16384,
)  # fmt: skip
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
ROWS_BY_FOUR = (*range(1, 13), 14, 15, 17, 18, 19, 20, *range(29, 33), *range(61, 65))
BF16, FP16, FP32 = {"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "fp32"}
# Inputs and outputs of one op; larger ops are neither measured nor drawn.
MOST_BYTES = 36e9
MOST_CONV_BYTES, MOST_TILE_BYTES = 2e9, 4e9
SPARSE_BYTES = 2e10
TRIES = 1000
# Share of zeros in draws from a range that begins at 0.
NOTHING_SHARE = 0.5

Dims = Mapping[str, int]


@dataclass(frozen=True)
class Family:
    """One kind of op in one number format; see the head of this file. `make` takes a choice and one number
    from each range. `steps`: ranges whose listed values are the only ones (powers of two, for example).
    `refined`: ranges in which a calibration also measures between two values if necessary. `lines`: choices
    that get their own line of fits; default all. `most`: upper bounds of an op's dimensions. `besides`:
    returns additional values to measure for a choice and a value of each range.
    """

    kind: str
    make: Callable[..., Op]
    choices: Sequence[Dims]
    ranges: Mapping[str, Sequence[int]]
    steps: frozenset[str] = frozenset()
    most_bytes: float = MOST_BYTES
    options: Mapping[str, object] = field(default_factory=dict)
    refined: tuple[str, ...] = ()
    lines: tuple[str, ...] | None = None
    most: Mapping[str, int] = field(default_factory=dict)
    besides: Callable[[Dims, Dims], Iterable[Dims]] | None = None

    def at(self, choice: Dims, values: Dims) -> Op | None:
        """Returns the op of these dimensions; None if it is too large."""
        op = self.make(**choice, **values, **self.options)
        small = all(op[name] <= most for name, most in self.most.items())
        return op if small and op.work.hbm_bytes <= self.most_bytes else None

    def _is_measured(self, op: Op) -> bool:
        """Whether an op is measured: of long ops only powers of two of sequences, as time is proportional."""
        batch = dict(op.shape).get("batch", 1)
        return op.work.hbm_bytes < SPARSE_BYTES or (isinstance(batch, int) and batch.bit_count() == 1)

    def grid(self) -> Iterator[Op]:
        """Yields the ops of all choices at all measured values."""
        for choice, values in self.combinations():
            op = self.at(choice, values)
            if op is not None and self._is_measured(op):
                yield op

    def combinations(self) -> Iterator[tuple[Dims, Dims]]:
        """Yields each pair of a choice and a value of each range once."""
        for choice in self.choices:
            every = [dict(zip(self.ranges, values, strict=True)) for values in product(*self.ranges.values())]
            more = [each for values in every for each in self.besides(choice, values)] if self.besides else []
            ends = [
                end for axis in self.refined for values in every if (end := self._end(choice, values, axis))
            ]
            found = dict.fromkeys(tuple(each.items()) for each in (*every, *more, *ends))
            yield from ((choice, dict(values)) for values in found)

    def _end(self, choice: Dims, values: Dims, axis: str) -> Dims | None:
        """If the last value of a range makes an op too large, returns the largest possible value, because
        drawn shapes lie below it. Only the first value of the range returns it, so that it occurs once."""
        known = self.ranges[axis]

        def too_large(value: int) -> bool:
            return self.at(choice, {**values, axis: value}) is None

        if values[axis] != known[0] or too_large(known[0]) or not too_large(known[-1]):
            return None
        above = bisect_left(range(known[-1]), True, known[0], key=too_large)
        return {**values, axis: above - 1}

    def draw(self, draw: random.Random) -> Op | None:
        """Draws one op from the ranges."""
        values = {name: self._value(name, draw) for name in self.ranges}
        return self.at(draw.choice(self.choices), values)

    def _value(self, name: str, draw: random.Random) -> int:
        known = self.ranges[name]
        if name in self.steps:
            return draw.choice(known)
        if not known[0] and draw.random() < NOTHING_SHARE:
            return 0
        return round(math.exp(draw.uniform(math.log(max(1, known[0])), math.log(known[-1]))))


MATMUL = partial(ops.matmul, "matmul")


# -- ops that models launch --------------------------------------------------------------------------------


@cache
def _decoders(*names: str) -> tuple[Decoder, ...]:
    """Returns the decoders of these names on all numbers of ranks that are measured and possible."""
    found = list[Decoder]()
    for name in names:
        config = load_config(MODELS / f"{name}.json")
        possible = [ranks for ranks in RANKS_OF.get(name, RANKS) if why_not(config, ranks) is None]
        found += [Decoder(config, ranks=ranks) for ranks in possible]
    return tuple(found)


def _launched(
    kind: str, *dimensions: str, names: Sequence[str] = MODELS_IN_BF16, only: str = ""
) -> list[Dims]:
    """Returns the dimensions of a kind of op in the decoders, each once; `only`: ops of that name."""
    found: dict[tuple[int, ...], Dims] = {}
    for model in _decoders(*names):
        mixers = dict.fromkeys(model.config.layer_mixers)
        layers = [op for mixer in mixers for op in model.layer(mixer)]
        for op in (*model.embed.ops, *layers, *model.head.ops):
            if op.kind == kind and only in ("", op.name):
                shape = dict(op.shape)
                values = {name: size for name in dimensions if isinstance(size := shape[name], int)}
                found.setdefault(tuple(values.values()), values)
    return list(found.values())


def _prefill(*, prompts: int, length: int, cached: int, **heads: int) -> Op:
    pairs = prompts * (length * cached + length * (length + 1) // 2)
    tokens = prompts * length
    kv_tokens = tokens + prompts * cached
    return ops.prefill_attention(tokens=tokens, kv_tokens=kv_tokens, pairs=pairs, dtype="bf16", **heads)


def unlike(*, batch: int, context: int, longest_pct: int, **shape: Any) -> Op:
    """Attention of `batch` sequences with `context` tokens each in the mean, the longest of so many percent
    of the longest of lengths spread evenly, as far as there are tokens."""
    tokens = batch * context
    longest = min(tokens - batch + 1, round(longest_pct / 100 * ops.longest_of_spread(tokens, batch)))
    over = max(0, longest - context)
    return ops.paged_attention(sequences=batch, kv_tokens=tokens, over_mean=over, **shape)


def _in_blocks(dtype: str, matrix: Dims) -> bool:
    """Whether a matrix is whole blocks of weights, in a format that has a scale for each."""
    return dtype != "fp8_b128" or not any(size % ops.FP8_BLOCK for size in matrix.values())


def _decoder() -> Iterator[Family]:
    turned, heads_of = (_launched(kind, "q_heads", "kv_heads", "head_dim") for kind in ("rotary", ATTENDS))
    in_formats = {
        "bf16": (ROWS, MODELS_IN_BF16),
        "fp8": (FP8_ROWS, MODELS_IN_FP8),
        "fp8_b128": (FP8_ROWS, MODELS_IN_BLOCKS),
    }
    for dtype, (rows, names) in in_formats.items():
        matrices = [each for each in _launched("matmul", "n", "k", names=names) if _in_blocks(dtype, each)]
        yield Family("matmul", MATMUL, matrices, {"m": rows}, options={"dtype": dtype})
        # Only the last token of a prompt has logits.
        heads = _launched("matmul", "n", "k", names=names, only="lm_head")
        layers = [each for each in matrices if each not in heads]
        yield Family("matmul", MATMUL, layers, {"m": PROMPT_ROWS}, options={"dtype": dtype})
    yield _rows("embedding", ops.embedding, _launched("embedding", "hidden"))
    yield replace(
        _rows("norm", partial(ops.norm, "norm"), _launched("norm", "hidden")), besides=_head_by_head
    )
    yield _rows("residual", partial(ops.residual, "residual"), _launched("residual", "hidden"))
    of_inputs = {each["k"]: {"width": each["k"]} for each in _launched("matmul", "k", names=MODELS_IN_FP8)}
    yield replace(
        _rows("quantize", partial(ops.quantize, "quantize"), [*of_inputs.values()]), options={"dtype": "fp8"}
    )
    yield _rows("activation", ops.activation, _launched("activation", "width", "gated"))
    yield _rows("rotary", ops.rotary, turned)
    # K and V of a token, read and written.
    yield replace(
        _rows("kv_append", ops.kv_append, _launched("kv_append", "kv_heads", "head_dim")),
        besides=_both_sides("tokens", lambda op: 8 * op["kv_heads"] * op["head_dim"]),
    )
    yield replace(
        _rows("kv_copy", ops.kv_copy, [{"width": 8192}, {"width": 65536}]),
        besides=_both_sides("tokens", lambda op: 4 * op["width"]),
    )
    widths = sorted({each["q_heads"] * each["head_dim"] for each in heads_of})
    received = [{"width": width} for width in widths]
    yield _rows("receive_speculation", ops.receive_speculation, received, BATCH[:6])
    yield _rows("sample", ops.sample, _launched("sample", "vocab"), SAMPLED)
    yield Family(
        "decode_attention", ops.decode_attention, heads_of, {"batch": SEQUENCES, "context": CONTEXT},
        options=BF16, lines=(), besides=_attended_otherwise,
    )  # fmt: skip
    yield Family(
        "paged_attention", paged, heads_of, {"batch": PAGED_SEQUENCES, "context": PAGED_CONTEXT},
        options=BF16, lines=(),
    )  # fmt: skip
    heads_unlike = [{"q_heads": q, "kv_heads": kv, "head_dim": 128} for q, kv in UNLIKE_HEADS]
    for sequences, contexts, longest_pct in UNLIKE:
        yield Family(
            "paged_attention", unlike, heads_unlike,
            {"batch": sequences, "context": contexts, "longest_pct": longest_pct},
            most_bytes=MOST_UNLIKE_BYTES, options=BF16, lines=(),
        )  # fmt: skip
    yield Family(
        "speculative_attention", speculative, heads_of,
        {"batch": BATCH[:5], "context": SPECULATED_CONTEXT},
        # The kernel is compiled for each batch.
        frozenset({"batch"}), options=BF16, refined=("context",), lines=(),
    )  # fmt: skip
    for lengths, cached in ((SHORT_PROMPTS, SHORT_CACHED), (PROMPTS, CACHED)):
        yield Family(
            "prefill_attention", _prefill, heads_of,
            {"prompts": (1, 4, 16, 64), "cached": cached, "length": lengths},
            frozenset({"prompts"}), refined=("length",), lines=(), most=MOST_OF_PROMPTS,
        )  # fmt: skip


def _head_by_head(choice: Dims, values: Dims) -> Iterator[Dims]:
    """Yields more rows of a norm head by head, after the most of other norms."""
    if choice["hidden"] <= WIDEST_HEAD and values["tokens"] == FEW_ROWS[-1]:
        yield from ({"tokens": rows} for rows in HEADS_ROWS)


def _attended_otherwise(choice: Dims, values: Dims) -> Iterator[Dims]:
    """Yields both sides of where plain calls change their layout: the longest context up to which sequences
    are split alike, and the next one; numbers of sequences that crowd multiprocessors, and that do not."""
    # Shapes are drawn, and prices checked, where there is no Triton.
    from simcore.kernels.decoder.decode_attention import (  # noqa: PLC0415
        FEW_PAIRS,
        SHORT,
        is_crowded,
        longest_split,
    )

    heads, batch, context = choice["kv_heads"], values["batch"], values["context"]
    longest = longest_split(batch * heads, 2 * choice["head_dim"] * int(ops.DTYPE_BYTES["bf16"]))
    if batch > 1 and batch * heads > FEW_PAIRS:
        yield from ({**values, "context": each} for each in (longest, longest + 1))
    if batch == SEQUENCES[0] and context <= SHORT:
        crowded = [is_crowded(each * heads) for each in range(SEQUENCES[-1] + 1)]
        for each in (each for each in range(1, SEQUENCES[-1]) if crowded[each] != crowded[each + 1]):
            sides = product((each, each + 1), (context, SHORT))
            yield from ({"batch": sequences, "context": tokens} for sequences, tokens in sides)


def _both_sides(
    axis: str, step_bytes: Callable[[Dims], int], fixed_steps: float = 0.0
) -> Callable[[Dims, Dims], Iterator[Dims]]:
    """Returns a function that yields the largest value whose inputs stay in the cache, and the next one,
    because time jumps between them. Inputs take `step_bytes` for each step and for `fixed_steps` more."""

    def besides(choice: Dims, values: Dims) -> Iterator[Dims]:
        kept = math.floor(KEPT_BYTES / step_bytes(choice) - fixed_steps)
        if kept >= 1:
            yield from ({**values, axis: value} for value in (kept, kept + 1))

    return besides


def _rows(
    kind: str, make: Callable[..., Op], choices: Sequence[Dims], tokens: Sequence[int] = FEW_ROWS
) -> Family:
    return Family(kind, make, choices, {"tokens": tokens}, options=BF16, refined=("tokens",))


# -- sequence operators --------------------------------------------------------------------------------------

# Long convolutions of the papers: layers of one launch, and channels.
LANES = tuple({"layers": layers, "channels": c} for layers, c in ((1, 256), (18, 256), (1, 768), (36, 768)))
CHANNELS = tuple({"channels": channels} for channels in (256, 768))
# The MLPs between these layers have twice as many inner units, and one row for each sequence.
WIDER, SEQUENCES_OF_TILES = 2, (1, 2, 3, 4, 6, 8)
# Layers of a step in one launch: from two on, each takes as long as the one before.
STEP_LAYERS = (1, 2, 4, 8, 18, 36)
RETNET = {"heads": 8, "rank": 256, "dim": 512}
LINEAR = tuple({"heads": h, "rank": d, "dim": d} for h, d in ((32, 128), (8, 128), (16, 64)))


def _layers_besides(implementation: conv.Implementation) -> Callable[[Dims, Dims], Iterator[Dims]]:
    """Returns a function that yields the most layers of one launch whose inputs stay in the cache, and one
    more, because time jumps there."""
    make = partial(square_tile(implementation), dtype="fp32")

    def besides(choice: Dims, values: Dims) -> Iterator[Dims]:
        one = make(**choice, **{**values, "layers": 1})
        of_a_layer = operand_bytes(one.kind, {name: one[name] for name, _ in one.shape})
        assert of_a_layer, one.kind
        kept = KEPT_BYTES // of_a_layer
        layers = [kept, kept + 1] if 1 <= kept < LAYERS[-1] else []
        if implementation == "flash_fft" and values["side"] <= SHORT_SIDE:
            layers += LAYERS_BETWEEN
        yield from ({**values, "layers": count} for count in layers)

    return besides


def _token_step(*, gated: int, **shape: Any) -> Op:
    return conv.token_step(block="gate" if gated else "mlp", **shape)


def _sequence_operators() -> Iterator[Family]:
    for name in conv.IMPLEMENTATIONS:
        # The work of sums grows with the square of the side, so long tiles use other methods.
        sides = tuple(side for side in SIDES if side <= 1024 or name.endswith("fft"))
        layers = FEW_LAYERS.get(name, FEWEST_LAYERS)
        yield Family(
            f"tile_{name}", square_tile(name), CHANNELS,
            {"batch": (1, 2, 4, 8), "side": sides, "layers": layers},
            frozenset({"batch", "side"}), MOST_TILE_BYTES, FP32, ("layers",), besides=_layers_besides(name),
        )  # fmt: skip
    for kind, make, lags in (
        ("conv_row", conv.conv_row, "inputs"),
        ("conv_column", conv.conv_column, "outputs"),
    ):
        yield Family(
            kind, make, LANES, {"batch": (1,), lags: LAGS}, frozenset(), MOST_CONV_BYTES, FP32, (lags,),
            # For each lag an input and a weight for each channel, and the sum's target.
            besides=_both_sides(lags, lambda op: 8 * op["layers"] * op["channels"], 0.5),
        )  # fmt: skip
    inner = [(each["channels"], WIDER * each["channels"]) for each in CHANNELS]
    matrices = [{"n": n, "k": k} for pair in inner for n, k in (pair, pair[::-1])]
    yield Family("matmul", MATMUL, matrices, {"m": SEQUENCES_OF_TILES}, options=FP32)
    yield Family(
        "activation", ops.activation, [{"width": width, "gated": 0} for _, width in inner],
        {"tokens": SEQUENCES_OF_TILES}, options=FP32,
    )  # fmt: skip
    yield Family("conv_cell", conv.conv_cell, CHANNELS, {"batch": FEW}, options=FP32, refined=("batch",))
    for stored in (FP32, FP16):
        yield Family(
            "token_step", _token_step,
            [{**each, "gated": gated} for each in CHANNELS for gated in (0, 1)],
            {"layers": STEP_LAYERS, "batch": SEQUENCES_OF_TILES}, frozenset({"batch"}), options=stored,
        )  # fmt: skip
    for kind, elementwise in (("gate", conv.gate), ("next_input", conv.next_input)):
        yield Family(kind, elementwise, CHANNELS, {"rows": ROWS_BY_FOUR}, options=FP32)
    for method in linear.METHODS:
        yield from _linear_attention(method)
    yield Family(
        "linear_attention_step", linear.linear_attention_step, LINEAR, {"batch": ONE_TOKEN},
        options={**BF16, "decay": True}, refined=("batch",), lines=("rank", "dim"),
    )  # fmt: skip
    yield Family(
        "linear_attention_decode", linear_layer.linear_attention_decode, [*LINEAR, RETNET],
        {"batch": ONE_TOKEN}, options=BF16, refined=("batch",), lines=("rank", "dim"),
    )  # fmt: skip
    yield Family(
        linear_layer.PROMPTS, _chunks, [LINEAR[0], RETNET],
        {"prompts": SERVED_PROMPTS, "length": SERVED_ROWS},
        lines=("rank", "dim"), most={"tokens": MOST_OF_PROMPTS["tokens"]},
    )  # fmt: skip


def _chunks(*, prompts: int, length: int, **shape: int) -> Op:
    """A chunk of each of so many prompts, all of one length."""
    tokens, pairs = prompts * length, prompts * length * (length + 1) // 2
    return linear_layer.linear_attention_prompts(
        tokens=tokens, kv_tokens=tokens, pairs=pairs, dtype="bf16", **shape
    )


def _linear_attention(method: str) -> Iterator[Family]:
    batches: Sequence[tuple[Sequence[int], Sequence[int]]] = (
        (FEW_SEQUENCES, LENGTHS), (MANY_SEQUENCES, FEW_LENGTHS)
    )  # fmt: skip
    slow = method in SLOW_LENGTHS
    for batch, lengths in [((1, 4, 16), SLOW_LENGTHS[method])] if slow else batches:
        shapes = (LINEAR[0], RETNET) if slow else (*LINEAR, RETNET) if batch is FEW_SEQUENCES else LINEAR
        yield Family(
            f"linear_attention_{method}", partial(linear.linear_attention, method),
            shapes, {"batch": batch, "length": lengths},
            frozenset({"batch"} if slow else ()), MOST_CONV_BYTES, {**BF16, "decay": True}, ("length",),
            lines=("rank", "dim"),
        )  # fmt: skip


@cache
def families() -> tuple[Family, ...]:
    """Returns all families."""
    return (*_decoder(), *_sequence_operators())


def grid(kinds: Collection[str], *, quick: bool = False) -> list[Op]:
    """Returns the ops of some kinds to measure, one for each set of coordinates (`interpolation`); `quick`:
    every third value of a range, and the last."""
    return list(_grid(frozenset(kinds), quick))


@cache
def _grid(kinds: frozenset[str], quick: bool) -> tuple[Op, ...]:
    found: dict[tuple[object, ...], Op] = {}
    for family in families():
        if family.kind in kinds:
            for op in (_thinned(family) if quick else family).grid():
                found.setdefault(place_of(op), op)
    return tuple(found.values())


def _thinned(family: Family) -> Family:
    ranges = {name: (*values[:-1:3], values[-1]) for name, values in family.ranges.items()}
    return replace(family, ranges=ranges, refined=(), besides=None)


def drawn(
    kinds: Collection[str],
    count: int,
    seed: int,
    without: Collection[tuple[str, Shape, str]] = (),
    *,
    beside_grid: bool = True,
) -> list[Op]:
    """Draws `count` ops of each family by a seed; fewer if the ranges hold fewer. Excludes ops with kind,
    shape and dtype in `without` and, if `beside_grid`, the full grid."""
    known = {*without, *((op.kind, op.shape, op.dtype) for op in grid(kinds if beside_grid else ()))}
    found: list[Op] = []
    for family in families():
        draw, tries, left = random.Random(f"{seed} {family.kind}"), TRIES, count
        while family.kind in kinds and left and tries:
            op, tries = family.draw(draw), tries - 1
            if op is not None and (key := (op.kind, op.shape, op.dtype)) not in known:
                known.add(key)
                found.append(op)
                left, tries = left - 1, TRIES
    return found
