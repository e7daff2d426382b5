"""The cases of a tiling scenario: each variant of a strategy at every size of model, batch and length.

The program of a case runs on a model with an implementation for each side of its tiles.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from simcore.input.fields import single_valued
from simcore.models.long_convolution import DEFAULT_RANK, LongConvolution, Mixer
from simcore.ops.op import Pricer
from simcore.studies.common import TilingAxes
from simcore.studies.own import name_of
from simcore.studies.tiling.implementations import Choice, Lanes, cheapest, sides
from simcore.studies.tiling.memory import Memory, memory
from simcore.studies.tiling.scenario import TilingScenario
from simcore.studies.tiling.strategies import Fractal, Generic, Relaxed, TilingStrategy

# Sources of the price of a step in one launch by which it may be chosen.
MEASURED = ("measured", "interpolated", "carried")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One strategy at one point; its list fields have one value. `axes`: the point; `dtype`: of the model;
    `step`, `tokens_per_launch`: how its positions are computed, as in a scenario."""

    axes: TilingAxes
    strategy: TilingStrategy
    dtype: str
    step: str = "auto"
    tokens_per_launch: int = 1

    @property
    def generated(self) -> int:
        """Number of positions that are computed one by one."""
        return self.axes.tokens - self.axes.prompt_tokens

    @property
    def point(self) -> tuple[int, int, int, int]:
        """(layers, channels, batch, tokens), the place at which cases are compared."""
        return (self.axes.layers, self.axes.channels, self.axes.batch, self.axes.tokens)


def cases(scenario: TilingScenario) -> Iterator[Case]:
    """Yields every strategy at every point, in the order of the file."""
    for model in single_valued(scenario.model):
        for batch in scenario.batch:
            for tokens in scenario.tokens:
                for strategy in scenario.strategies:
                    for variant in single_valued(strategy):
                        axes = TilingAxes(
                            name_of(variant.kind),
                            variant.label(),
                            model.layers[0],
                            model.channels[0],
                            model.block,
                            tokens,
                            scenario.prompt_tokens,
                            batch,
                        )
                        how = scenario.model.step, scenario.tokens_per_launch
                        yield Case(axes, variant, scenario.dtype, *how)


def lanes(case: Case, side: int) -> Lanes:
    """Returns how the tiles of a side of a tiled case are launched: all layers at once, or one after the
    other."""
    axes, strategy = case.axes, case.strategy
    assert isinstance(strategy, Fractal)
    first = strategy.sequential_from
    together = strategy.parallel[0] and (first is None or side < first)
    layers = axes.layers
    shape = (layers, 1) if together else (1, layers)
    return Lanes(*shape, axes.batch, axes.channels, case.dtype)


def choice(case: Case, price: Pricer) -> Choice:
    """Returns the implementation of each side of a case's tiles; empty if it has no such tiles."""
    if not isinstance(case.strategy, Fractal):
        return ()
    own, tiles = sides(case.generated), case.strategy.tiles[0]
    if tiles != "hybrid":
        return tuple((side, tiles) for side in own)
    return cheapest({side: lanes(case, side) for side in own}, case.generated, price)


def model_of(case: Case, tiles: Choice, price: Pricer) -> LongConvolution:
    """Returns the model of a case; `price` chooses how it steps. Raises ValueError if there is nothing to
    generate."""
    axes, strategy = case.axes, case.strategy
    mixer: Mixer = "convolution"
    rank = DEFAULT_RANK
    if isinstance(strategy, Relaxed):
        mixer = "data_dependent_convolution"
    elif isinstance(strategy, Generic):
        mixer, rank = strategy.mixer, strategy.rank or DEFAULT_RANK
    model = LongConvolution(
        axes.layers,
        axes.channels,
        axes.tokens,
        batch=axes.batch,
        prompt=axes.prompt_tokens,
        block=axes.block,
        mixer=mixer,
        dtype=case.dtype,
        tiles=tiles,
        rank=rank,
        tokens_per_launch=case.tokens_per_launch,
    )
    return replace(model, one_launch=mixer == "convolution" and steps_in_one_launch(case.step, model, price))


def steps_in_one_launch(step: str, model: LongConvolution, price: Pricer) -> bool:
    """Whether a model's step is one kernel: as the scenario says, or, if it leaves that open, if this is
    cheaper than kernels of each layer. Only a measured price of the one kernel chooses it: programs that wait
    for each other take many times their roofline. Short kernels of layers do too, so that against their
    rooflines, if they were not measured, it is never chosen too early."""
    if step != "auto":
        return step == "one_launch"
    one = price(model.token_step.without_place)
    if one.source not in MEASURED:
        return False
    count = Counter(op.without_place for op in model.layers_of_step)
    return one.seconds < sum(n * price(op).seconds for op, n in count.items())


def memory_of(case: Case, model: LongConvolution, **instead: Any) -> Memory:
    """Returns the device memory of a case; `instead`: storage options that replace its own."""
    strategy = case.strategy
    if not isinstance(strategy, Fractal):
        return memory(model, fractal=False)
    own: dict[str, Any] = {
        "parallel": strategy.parallel[0],
        "half_storage": strategy.half_storage[0],
        "sequential_from": strategy.sequential_from,
    }
    return memory(model, fractal=True, **{**own, **instead})


def refusal(case: Case, model: LongConvolution, most_bytes: float) -> str | None:
    """Returns the reason why a case does not fit into memory, and what would help; None if it fits."""
    needed = memory_of(case, model).total
    if needed <= most_bytes:
        return None
    axes = case.axes
    where = f"{axes.layers} layers of {axes.channels} channels, batch {axes.batch}, {axes.tokens:,} tokens"
    text = f"{axes.label}, {where}: needs {_gb(needed)}, more than the device's {_gb(most_bytes)}"
    if not isinstance(case.strategy, Fractal):
        return f"{text}; it is left out"
    one, half = memory_of(case, model, sequential_from=1), memory_of(case, model, half_storage=True)
    both = memory_of(case, model, half_storage=True, sequential_from=1)
    return (
        f"{text}; half_storage would need {_gb(half.total)}, sequential_from: 1 {_gb(one.total)}, both"
        f" {_gb(both.total)}; it is left out"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
