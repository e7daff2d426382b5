"""The shapes of a CUDA card: those at which a calibration measures, and others of the same ranges.

A family is one kind of op. Some dimensions of it are taken as models have them (`choices`: the matrices of
Llama 3.1 8B and 70B and of CodeLlama 34B on 1 to 8 ranks, say), the others lie in a range, of which `ranges`
names the values that are measured:

    grid(...)     choices x ranges
    drawn(...)    a choice, and of each range any number in it, by its logarithm: none of them in the grid

Between two values of a range a price is interpolated (`devices.corrected`): they stand close where kernels
change, as products do beyond a tile's rows.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

from simcore import ops
from simcore import ops_convolution as conv
from simcore import ops_linear_attention as linear
from simcore.decoder_config import DecoderConfig, load_config
from simcore.models import Decoder, why_not
from simcore.ops import Op

MODELS = Path(__file__).resolve().parent.parent / "scenarios" / "models"
NAMES = ("llama-3.1-8b", "llama-3.1-70b", "codellama-34b")
RANKS = (1, 2, 4, 8)
# Tokens of a step: of a batch that decodes, and of prompts.
ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512)
PROMPT_ROWS = (*ROWS, 1024, 2048, 4096, 8192)
FEW_ROWS = (1, 4, 16, 64, 128, 256, 512, 2048, 8192)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = tuple(1 << power for power in range(7, 18))
SIDES = tuple(1 << power for power in range(15))
LENGTHS = tuple(1 << power for power in range(6, 17))
# Of methods that take a launch a token, or memory that grows with the square of the length.
MOST_LENGTHS = {"recursion": 256, "vanilla": 4096, "block_based": 4096}
# Of one op, inputs and what it makes: what is larger is neither measured nor drawn.
MOST_BYTES = 36e9
MOST_CONV_BYTES = 2e9
TRIES = 1000

Dims = Mapping[str, int]


@dataclass(frozen=True)
class Family:
    """One kind of op in one number format; see the head of this file. `make` takes a choice and one number of
    each range. `steps`: ranges of which only the values named exist (powers of two, say)."""

    kind: str
    make: Callable[..., Op]
    choices: Sequence[Dims]
    ranges: Mapping[str, Sequence[int]]
    steps: frozenset[str] = frozenset()
    most_bytes: float = MOST_BYTES
    options: Mapping[str, object] = field(default_factory=dict)

    def at(self, choice: Dims, values: Dims) -> Op | None:
        """The op of these dimensions; None for one that is too large."""
        op = self.make(**choice, **values, **self.options)
        return op if op.work.hbm_bytes <= self.most_bytes else None

    def grid(self) -> Iterator[Op]:
        """All choices at all values that are measured."""
        for choice, values in product(self.choices, product(*self.ranges.values())):
            op = self.at(choice, dict(zip(self.ranges, values, strict=True)))
            if op is not None:
                yield op

    def draw(self, draw: random.Random) -> Op | None:
        """One op of the ranges."""
        values = {name: self._value(name, draw) for name in self.ranges}
        return self.at(draw.choice(self.choices), values)

    def _value(self, name: str, draw: random.Random) -> int:
        known = self.ranges[name]
        if name in self.steps:
            return draw.choice(known)
        return round(math.exp(draw.uniform(math.log(known[0]), math.log(known[-1]))))


# -- what models launch ------------------------------------------------------------------------------------


@cache
def _configs() -> tuple[DecoderConfig, ...]:
    return tuple(load_config(MODELS / f"{name}.json") for name in NAMES)


def _launched(kind: str, *dimensions: str) -> list[Dims]:
    """The dimensions of a kind of op in the decoders, on any number of ranks, each once."""
    found: dict[tuple[int, ...], Dims] = {}
    for config, ranks in product(_configs(), RANKS):
        if why_not(config, ranks) is None:
            model = Decoder(config, ranks=ranks)
            for op in (*model.first.ops, *model.attend.ops, *model.after.ops, *model.head.ops):
                if op.kind == kind:
                    shape = dict(op.shape)
                    values = {name: size for name in dimensions if isinstance(size := shape[name], int)}
                    found.setdefault(tuple(values.values()), values)
    return list(found.values())


def _matmul(dtype: str) -> Callable[..., Op]:
    def make(*, m: int, n: int, k: int) -> Op:
        return ops.matmul("matmul", m=m, n=n, k=k, dtype=dtype)

    return make


def _speculative(**shape: int) -> Op:
    return ops.speculative_attention(chunk=min(128, shape["context"] // 2), dtype="bf16", **shape)


def _prefill(*, tokens: int, cached: int, **heads: int) -> Op:
    pairs = tokens * cached + tokens * (tokens + 1) // 2
    return ops.prefill_attention(
        tokens=tokens,
        kv_tokens=tokens + cached,
        pairs=pairs,
        dtype="bf16",
        **heads,
    )


def _heads_of(kind: str = "rotary") -> list[Dims]:
    return _launched(kind, "q_heads", "kv_heads", "head_dim")


def _decoder() -> Iterator[Family]:
    rows = {"tokens": ROWS}
    for dtype in ("bf16", "fp8"):
        yield Family("matmul", _matmul(dtype), _launched("matmul", "n", "k"), {"m": PROMPT_ROWS})
    yield _family("embedding", ops.embedding, _launched("embedding", "hidden"), {"tokens": FEW_ROWS})
    yield _named("norm", ops.norm, _launched("norm", "hidden"))
    yield _named("residual", ops.residual, _launched("residual", "hidden"))
    yield _family(
        "activation", ops.activation, _launched("activation", "width", "gated"), {"tokens": FEW_ROWS}
    )
    yield _family("rotary", ops.rotary, _heads_of(), {"tokens": FEW_ROWS})
    yield _family(
        "kv_append", ops.kv_append, _launched("kv_append", "kv_heads", "head_dim"), {"tokens": FEW_ROWS}
    )
    yield _family("decode_attention", ops.decode_attention, _heads_of(), {"batch": BATCH, "context": CONTEXT})
    yield Family(
        "speculative_attention", _speculative, _heads_of(), {"batch": BATCH[:5], "context": CONTEXT[2:]},
        # It is compiled for each batch.
        frozenset({"batch"}),
    )  # fmt: skip
    yield _family("receive_speculation", ops.receive_speculation, _received(), {"tokens": BATCH[:6]})
    lengths = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    yield Family(
        "prefill_attention",
        _prefill,
        _heads_of(),
        {"tokens": lengths, "cached": (0, 1024, 8192)},
        frozenset({"cached"}),
    )
    yield _family(
        "kv_copy",
        ops.kv_copy,
        [{"width": w} for w in (8192, 65536)],
        {"tokens": (16, 64, 256, 1024, 4096, 8192)},
    )
    yield _family("sample", ops.sample, _launched("sample", "vocab"), rows)


def _received() -> list[Dims]:
    return [
        {"width": width} for width in sorted({each["q_heads"] * each["head_dim"] for each in _heads_of()})
    ]


def _family(
    kind: str, make: Callable[..., Op], choices: Sequence[Dims], ranges: Mapping[str, Sequence[int]]
) -> Family:
    return Family(kind, make, choices, ranges, options={"dtype": "bf16"})


def _named(kind: str, make: Callable[..., Op], choices: Sequence[Dims]) -> Family:
    return Family(kind, make, choices, {"tokens": FEW_ROWS}, options={"dtype": "bf16", "name": kind})


# -- sequence operators --------------------------------------------------------------------------------------

# Of the papers' long convolutions: layers of one launch, and channels.
LANES = tuple({"layers": layers, "channels": c} for layers, c in ((1, 256), (18, 256), (1, 768), (36, 768)))
LINEAR = tuple({"heads": h, "rank": d, "dim": d} for h, d in ((32, 128), (8, 128), (16, 64)))


def _tile(implementation: conv.Implementation) -> Callable[..., Op]:
    def make(*, side: int, **lanes: int) -> Op:
        return conv.tile(implementation, side=side, outputs=side, dtype="fp32", **lanes)

    return make


def _linear(method: str) -> Callable[..., Op]:
    def make(*, batch: int, heads: int, length: int, rank: int, dim: int) -> Op:
        return linear.linear_attention(
            method, batch=batch, heads=heads, length=length, rank=rank, dim=dim, dtype="bf16", decay=True
        )

    return make


def _sequence_operators() -> Iterator[Family]:
    batches, single = (1, 4, 8), {"dtype": "fp32"}
    for name in conv.IMPLEMENTATIONS:
        # Sums grow with the square of the side: nobody takes them for long ones.
        sides = tuple(side for side in SIDES if side <= 1024 or name.endswith("fft"))
        yield Family(
            f"tile_{name}",
            _tile(name),
            LANES,
            {"batch": batches, "side": sides},
            frozenset({"side"}),
            MOST_CONV_BYTES,
        )
    long = (1, 16, 64, 256, 1024, 4096, 16384)
    yield Family(
        "conv_row",
        conv.conv_row,
        LANES,
        {"batch": (1,), "inputs": long},
        frozenset(),
        MOST_CONV_BYTES,
        single,
    )
    yield Family(
        "conv_column",
        conv.conv_column,
        LANES,
        {"batch": (1,), "outputs": long},
        frozenset(),
        MOST_CONV_BYTES,
        single,
    )
    per_layer = [{"channels": c} for c in (256, 768)]
    yield Family("conv_cell", conv.conv_cell, per_layer, {"batch": (1, 4, 8)}, options=single)
    for kind, make in (("gate", conv.gate), ("next_input", conv.next_input)):
        yield Family(kind, make, per_layer, {"rows": (1, 4, 8)}, options=single)
    for method in linear.METHODS:
        lengths = tuple(n for n in LENGTHS if n <= MOST_LENGTHS.get(method, LENGTHS[-1]))
        yield Family(
            f"linear_attention_{method}", _linear(method), LINEAR, {"batch": (1, 4, 16), "length": lengths},
            frozenset(), MOST_CONV_BYTES,
        )  # fmt: skip
    yield Family(
        "linear_attention_step", linear.linear_attention_step, LINEAR, {"batch": BATCH[:7]},
        options={"dtype": "bf16", "decay": True},
    )  # fmt: skip


@cache
def families() -> tuple[Family, ...]:
    """All of them."""
    return (*_decoder(), *_sequence_operators())


def grid(kinds: Collection[str], *, quick: bool = False) -> list[Op]:
    """The ops to measure of some kinds, each once; `quick`: every third value of a range, and the last."""
    found: dict[tuple[object, ...], Op] = {}
    for family in families():
        if family.kind in kinds:
            for op in (_thinned(family) if quick else family).grid():
                found.setdefault((op.kind, op.shape, op.dtype), op)
    return list(found.values())


def _thinned(family: Family) -> Family:
    ranges = {name: (*values[:-1:3], values[-1]) for name, values in family.ranges.items()}
    return Family(
        family.kind, family.make, family.choices, ranges, family.steps, family.most_bytes, family.options
    )


def drawn(kinds: Collection[str], count: int, seed: int, without: Collection[Op] = ()) -> list[Op]:
    """`count` ops of each kind, by a seed; fewer where there are not so many. None is in the full grid."""
    known = {(op.kind, op.shape, op.dtype) for op in (*grid(kinds), *without)}
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
