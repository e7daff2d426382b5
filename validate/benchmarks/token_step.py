"""The benchmark's parts about one token of all layers, and about moved cache slots, beside torch's kernels.

    token step   for each layer the red cell and the block       bytes: each matrix read once
    slot moves   cache[to] = cache[from] in every cache          bytes: what moves, read and written

Matrices, activations and taps are bf16. Each step of a graph is at a place of its own, a model's position:
what a step leaves is what another one there would take for sums, and gates make more and more of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from simcore.kernels.decoder.slot_moves import slot_caches, slot_moves
from simcore.kernels.long_convolution.token_step import (
    config_for,
    reference_token_step,
    token_step,
    workspace,
)
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, Bar, Compared, Row
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import SEED, Bench, brief, compared_part, take_turns, tried

# Positions of a model: a graph of one model has no more steps.
ROOM = cases.LEAST_CALLS
FASTER = 3.0
ERROR_BAR = 1e-2
# What an H200 has to reach, by layers and channels, for one sequence.
BARS_US = {(18, 256): 60.0, (36, 768): 150.0}


@dataclass(frozen=True, slots=True)
class Step:
    """One token of so many sequences."""

    layers: int
    channels: int
    batch: int
    block: str

    @property
    def hbm_bytes(self) -> int:
        """All matrices, bf16: [2 D, D] and [D, 2 D] of an mlp, [D, D] of a gate, a layer."""
        return 2 * self.layers * self.channels**2 * (4 if self.block == "mlp" else 1)

    def __str__(self) -> str:
        return f"{self.block}, {self.layers} x {self.channels}, batch {self.batch}"


STEPS = tuple(
    Step(*model, batch, block) for block in ("mlp", "gate") for model in BARS_US for batch in (1, 8)
)


class Operands(NamedTuple):
    """One model: a [layers + 1, batch, ROOM, channels], taps [layers, 1, 1, channels], matrices, and what was
    in a before."""

    a: Tensor
    taps: Tensor
    matrices: tuple[Tensor, ...]
    before: Tensor


def drawn(of: Step, generator: torch.Generator) -> Operands:
    """Random numbers whose size a layer keeps."""

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(size, generator=generator, device=generator.device)
        return x.mul_(scale).to(torch.bfloat16)

    m, d = of.layers, of.channels
    if of.block == "mlp":
        matrices: tuple[Tensor, ...] = normal(m, 2 * d, d, scale=d**-0.5), normal(m, d, 2 * d, scale=d**-0.5)
    else:
        matrices = (normal(m, d, d, scale=d**-0.5),)
    before = normal(m + 1, of.batch, ROOM, d, scale=0.5)
    return Operands(before.clone(), normal(m, 1, 1, d, scale=0.5), matrices, before)


@dataclass(frozen=True, slots=True)
class Place:
    """A model and a position of it."""

    model: Operands
    position: int


def places(sets: Sequence[Operands], calls: int) -> list[Place]:
    """So many, models in turn."""
    return [Place(sets[i % len(sets)], i // len(sets)) for i in range(calls)]


def truth(at: Place) -> Tensor:
    """The last level after a step, in float64; a is rounded after it."""
    one, a = at.model, at.model.before.double()
    matrices = [matrix.double() for matrix in one.matrices]
    reference_token_step(a, one.taps.double(), matrices, at.position)
    return a[-1, :, at.position].to(torch.bfloat16).double()


def by_kernels(levels: Tensor, taps: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """The step as torch runs it, a handful of kernels a layer; levels [layers + 1, batch, channels]."""
    y = levels[0]
    for layer in range(len(taps)):
        z = levels[layer + 1]
        z.addcmul_(y, taps[layer, :, 0])
        weights = [matrix[layer] for matrix in matrices]
        if len(weights) == 1:
            z.mul_(functional.linear(y, weights[0]))
        else:
            z.copy_(functional.linear(functional.gelu(functional.linear(z, weights[0])), weights[1]))
        y = z
    return y


def torch_calls(run: Callable[..., Tensor], steps: Sequence[Place]) -> Candidate:
    """torch's."""

    def call(at: Place) -> Tensor:
        one = at.model
        return run(one.a[:, :, at.position], one.taps, one.matrices)

    return Candidate("", [partial(call, at) for at in steps])


def own_calls(steps: Sequence[Place]) -> Candidate:
    """Ours."""
    first = steps[0].model.a
    config = config_for(first)
    positions = torch.arange(ROOM, dtype=torch.int32, device=first.device)
    space = workspace(first, steps[0].model.matrices, config)

    def call(at: Place) -> Tensor:
        one, t = at.model, at.position
        token_step(one.a, one.taps, one.matrices, positions[t : t + 1], space=space, config=config)
        return one.a[-1, :, t]

    return Candidate(brief(config), [partial(call, at) for at in steps])


def step_case(of: Step, bench: Bench) -> tuple[Compared, list[Row]]:
    """Ours, torch's kernels one by one, and compiled."""
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    sets = [drawn(of, generator) for _ in range(cases.rotation(of.hbm_bytes, bench.card.l2_bytes))]
    steps = places(sets, cases.calls_of(len(sets)))
    compiled: Callable[..., Tensor] = torch.compile(by_kernels, fullgraph=True, dynamic=False)
    ways = [
        (OURS, "simcore", own_calls(steps)),
        *(
            (name, f"torch {torch.__version__}", torch_calls(run, steps))
            for name, run in (("kernels", by_kernels), ("compiled", compiled))
        ),
    ]
    row = partial(
        Row, op="token_step", shape={**asdict(of), "dtype": "bf16"}, hbm_bytes=of.hbm_bytes, error=None
    )

    def restore() -> None:
        for one in sets:
            one.a.copy_(one.before)

    truths = [truth(steps[0]), truth(steps[-1])]
    entries = [
        tried(
            row(
                implementation=name,
                version=version,
                error_bar=ERROR_BAR if version == "simcore" else cases.PEER_ERROR_BAR,
            ),
            [candidate], truths, len(steps), restore,
        )
        for name, version, candidate in ways
    ]  # fmt: skip
    rows = take_turns(entries, cases.cold(len(sets), of.hbm_bytes), quick=bench.quick)
    bench.judge(rows[0])
    return Compared(str(of), rows[0], rows[1:], of.hbm_bytes / bench.card.read_bytes_per_s), []


def token_steps(bench: Bench) -> list[Bar]:
    """The part `token_step`."""
    found = {one.name: one for one in compared_part("token_step", "convolution", STEPS, step_case, bench)}
    bars = []
    for (layers, channels), most_us in BARS_US.items():
        name = str(Step(layers, channels, 1, "mlp"))
        one = found.get(name)
        times = None if one is None else one.ours.times
        words = cases.micro(times) if times else "not measured"
        met = None if one is None else times is not None and times.median_s <= 1e-6 * most_us
        bars.append(Bar(f"{name} in {most_us:.0f} us at most", words, met))
    single = [one for name, one in found.items() if name.endswith("batch 1") and name.startswith("mlp")]
    return [*bars, cases.at_least(f"one sequence {FASTER} times as fast as torch's kernels", single, FASTER)]


# -- slot moves ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """So many slots of K and V of a decoder's layers."""

    layers: int
    slots: int
    kv_heads: int
    tokens: int
    head_dim: int
    moved: int

    @property
    def hbm_bytes(self) -> int:
        """bf16, read and written."""
        return 2 * 2 * 2 * self.layers * self.moved * self.kv_heads * self.tokens * self.head_dim

    def __str__(self) -> str:
        return f"{self.moved} of {self.slots} slots of {self.tokens} tokens, {self.layers} layers"


MOVES = tuple(Moves(32, 32, 8, tokens, 128, moved) for tokens in (128, 1024) for moved in (1, 8))


def moves_case(of: Moves, bench: Bench) -> tuple[Compared, list[Row]]:
    """Ours, and torch's copies cache by cache."""
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    size = of.slots, of.kv_heads, of.tokens, of.head_dim
    caches = [
        torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(2 * of.layers)
    ]
    sources = torch.arange(of.slots - of.moved, of.slots, device="cuda")
    targets = torch.arange(of.moved, device="cuda")
    moves = torch.stack((sources, targets), 1).to(torch.int32)
    count = torch.full((1,), of.moved, dtype=torch.int32, device="cuda")
    table = slot_caches(caches)

    def ours() -> Tensor:
        slot_moves(table, moves, count)
        return caches[-1][: of.moved]

    def torchs() -> Tensor:
        for cache in caches:
            cache.index_copy_(0, targets, cache.index_select(0, sources))
        return caches[-1][: of.moved]

    def poison() -> None:
        for cache in caches:
            cache[: of.moved] = float("nan")

    row = partial(
        Row,
        op="slot_moves",
        shape={**asdict(of), "dtype": "bf16"},
        hbm_bytes=of.hbm_bytes,
        error=None,
        error_bar=0.0,
    )
    expected = [caches[-1][of.slots - of.moved :].double()] * 2
    calls = cases.calls_of(1)
    entries = [
        tried(row(implementation=name, version=version), [Candidate("", [call])], expected, calls, poison)
        for name, version, call in (
            (OURS, "simcore", ours),
            ("index_copy", f"torch {torch.__version__}", torchs),
        )
    ]
    cached = 2 * of.layers * caches[0].numel() * 2
    rows = take_turns(entries, f"the same slots each time, of {cached} bytes of caches", quick=bench.quick)
    bench.judge(rows[0])
    return Compared(str(of), rows[0], rows[1:], of.hbm_bytes / bench.card.read_bytes_per_s), []


def slots(bench: Bench) -> list[Bar]:
    """The part `slot_moves`."""
    found = compared_part("slot_moves", "serving", MOVES, moves_case, bench)
    return [cases.at_least("slot moves never slower than torch's", found, 1.0)]
