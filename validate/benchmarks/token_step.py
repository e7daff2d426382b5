"""Benchmarks of one token of all layers, and of moved cache slots, beside torch's kernels.

    token step   for each layer the red cell and the block       bytes: each matrix read once
    slot moves   cache[to] = cache[from] in every cache          bytes: the slots, read and written

Matrices, activations and taps are bf16. Each step of a graph has its own place, a position of a model: a
second step there would read the first one's results as sums, and gates would amplify them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, NamedTuple

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
from simcore.validate.benchmarks.cases import Compared, Goal, called, our_us
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import SEED, TORCH, Bench, Trial, Way, brief, compare

# Positions of a model; a graph has at most this many steps of one model.
ROOM = cases.LEAST_CALLS
FASTER = 3.0
ERROR_BAR = 1e-2
# Most microseconds of an H200 for one sequence, by layers and channels.
BARS_US = {(18, 256): 60.0, (36, 768): 150.0}


@dataclass(frozen=True, slots=True)
class Step:
    """One token of each of several sequences."""

    layers: int
    channels: int
    batch: int
    block: str
    op: ClassVar[str] = "token_step"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "dtype": "bf16"}

    @property
    def hbm_bytes(self) -> int:
        """All matrices, bf16: in each layer [2 D, D] and [D, 2 D] of an mlp, [D, D] of a gate."""
        return 2 * self.layers * self.channels**2 * (4 if self.block == "mlp" else 1)

    def __str__(self) -> str:
        return f"{self.block}, {self.layers} x {self.channels}, batch {self.batch}"


STEPS = tuple(
    Step(*model, batch, block) for block in ("mlp", "gate") for model in BARS_US for batch in (1, 8)
)


class Operands(NamedTuple):
    """One model: a [layers + 1, batch, ROOM, channels], taps [layers, 1, 1, channels], matrices, and the
    earlier contents of a."""

    a: Tensor
    taps: Tensor
    matrices: tuple[Tensor, ...]
    before: Tensor


def drawn(of: Step, generator: torch.Generator) -> Operands:
    """Returns random numbers whose size a layer preserves."""

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
    """A model and one of its positions."""

    model: Operands
    position: int


def places(sets: Sequence[Operands], calls: int) -> list[Place]:
    """Returns `calls` places, models in turn."""
    return [Place(sets[i % len(sets)], i // len(sets)) for i in range(calls)]


def truth(at: Place) -> Tensor:
    """Returns the last level after a step, in float64; a is rounded after it."""
    one, a = at.model, at.model.before.double()
    matrices = [matrix.double() for matrix in one.matrices]
    reference_token_step(a, one.taps.double(), matrices, at.position)
    return a[-1, :, at.position].to(torch.bfloat16).double()


def by_kernels(levels: Tensor, taps: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Runs the step as torch does, with several kernels a layer; levels [layers + 1, batch, channels]."""
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
    """Returns torch's calls."""

    def call(at: Place) -> Tensor:
        one = at.model
        return run(one.a[:, :, at.position], one.taps, one.matrices)

    return Candidate("", [partial(call, at) for at in steps])


def own_calls(steps: Sequence[Place]) -> Candidate:
    """Returns our calls."""
    first = steps[0].model.a
    config = config_for(first)
    positions = torch.arange(ROOM, dtype=torch.int32, device=first.device)
    space = workspace(first, steps[0].model.matrices, config)

    def call(at: Place) -> Tensor:
        one, t = at.model, at.position
        token_step(one.a, one.taps, one.matrices, positions[t : t + 1], space=space, config=config)
        return one.a[-1, :, t]

    return Candidate(brief(config), [partial(call, at) for at in steps])


def step_case(of: Step, bench: Bench) -> Compared:
    """Compares ours, torch's kernels one by one, and torch's compiled."""
    sets = bench.rotated(partial(drawn, of), of.hbm_bytes)
    steps = places(sets, cases.calls_of(len(sets)))
    compiled: Callable[..., Tensor] = torch.compile(by_kernels, fullgraph=True, dynamic=False)

    def restore() -> None:
        for one in sets:
            one.a.copy_(one.before)

    ways = [
        Way("", [own_calls(steps)], ERROR_BAR),
        Way("kernels", [torch_calls(by_kernels, steps)], version=TORCH),
        Way("compiled", [torch_calls(compiled, steps)], version=TORCH),
    ]
    truths = [truth(steps[0]), truth(steps[-1])]
    return compare(of, Trial(ways, truths, restore, len(sets), of.hbm_bytes), bench)


_SINGLE = {model: str(Step(*model, 1, "mlp")) for model in BARS_US}
STEP_GOALS = (
    *(
        Goal(f"{name} in {BARS_US[model]:.0f} us at most", our_us, called(name), ".1f", most=BARS_US[model])
        for model, name in _SINGLE.items()
    ),
    Goal(
        f"one sequence {FASTER} times as fast as torch's kernels", of=called(*_SINGLE.values()), least=FASTER
    ),
)


# -- slot moves ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """Moved slots of K and V in a decoder's layers."""

    layers: int
    slots: int
    kv_heads: int
    tokens: int
    head_dim: int
    moved: int
    op: ClassVar[str] = "slot_moves"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "dtype": "bf16"}

    @property
    def hbm_bytes(self) -> int:
        """Bytes read and written in bf16."""
        return 2 * 2 * 2 * self.layers * self.moved * self.kv_heads * self.tokens * self.head_dim

    def __str__(self) -> str:
        return f"{self.moved} of {self.slots} slots of {self.tokens} tokens, {self.layers} layers"


MOVES = tuple(Moves(32, 32, 8, tokens, 128, moved) for tokens in (128, 1024) for moved in (1, 8))


def moves_case(of: Moves, bench: Bench) -> Compared:
    """Compares ours with torch's copies, cache by cache."""
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

    expected = [caches[-1][of.slots - of.moved :].double()] * 2
    ways = [
        Way("", [Candidate("", [ours])], 0.0),
        Way("index_copy", [Candidate("", [torchs])], 0.0, TORCH),
    ]
    cached = 2 * of.layers * caches[0].numel() * 2
    state = f"the same slots each time, of {cached} bytes of caches"
    return compare(of, Trial(ways, expected, poison, 1, cached, cache_state=state), bench)


MOVE_GOALS = (Goal("slot moves never slower than torch's", least=1.0),)
