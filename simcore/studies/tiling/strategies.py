"""The strategies of the study `tiling`: the fields, the label and the program of each.

A strategy is a class of fields that satisfies `TilingStrategy`: one in `TilingStrategies`, or one of a
user's own (docs/own_strategies.md).
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from simcore.input.fields import FieldError, Many, Strict
from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.generic_tiling import generic_tiling
from simcore.schedules.lazy import lazy
from simcore.schedules.relaxed_tiling import relaxed_tiling

# Largest values: more is a mistake in the file.
MOST_TOKENS = 1 << 22
MOST_RANK = 1024
# The implementations of simcore.ops.convolution, or the cheapest for each side.
Tiles = Literal["hybrid", "conv", "flash_conv", "fft", "flash_fft"]
Parallel = Annotated[
    Many[bool], Field(description="whether contributions are made for all layers at once, or layer by layer")
]


class TilingStrategy(Protocol):
    """A way of generating. When it is used, each field of `Many` values has one value."""

    @property
    def kind(self) -> str:
        """Its kind in a scenario."""

    def label(self) -> str:
        """Returns its name in results: a line of text, unique in a scenario."""

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        """Generates all positions after the prompt; appends the times to `ended_s` at which the prompt, if
        there is one, and each position are done."""


class Lazy(Strict):
    """Before each position, the contributions of its whole history."""

    kind: Literal["lazy"]
    parallel: Parallel = [True]

    def label(self) -> str:
        return "lazy" + _order(self.parallel)

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        return lazy(m, model, ended_s, parallel=self.parallel[0])


class Eager(Strict):
    """After each position, its contributions to all later ones."""

    kind: Literal["eager"]
    parallel: Parallel = [True]

    def label(self) -> str:
        return "eager" + _order(self.parallel)

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        return eager(m, model, ended_s, parallel=self.parallel[0])


class Fractal(Strict):
    """Tiles whose sides are powers of two (Algorithm 1)."""

    kind: Literal["fractal"]
    tiles: Many[Tiles] = Field(
        ["hybrid"],
        description="how a tile is computed: direct (conv), by FFT, either of them fused (flash_), or as is"
        " cheapest for its side (hybrid)",
    )
    parallel: Parallel = [True]
    half_storage: Many[bool] = Field(
        [False], description="whether half of the activations are stored (App. D)"
    )
    sequential_from: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = Field(
        None, description="tiles of this side and larger are done layer by layer (App. E); by default none"
    )

    def label(self) -> str:
        half, first = self.half_storage[0], self.sequential_from
        name = f"fractal, {self.tiles[0]}" + (", half stored" if half else "")
        return name + ("" if first is None else f", in sequence from {first}") + _order(self.parallel)

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        return fractal_tiling(
            m,
            model,
            ended_s,
            parallel=self.parallel[0],
            half_storage=self.half_storage[0],
            sequential_from=self.sequential_from,
        )


class Generic(Strict):
    """Fractal tiling of any mixer that aggregates contributions (Algorithm 2)."""

    kind: Literal["generic"]
    mixer: Literal["convolution", "linear_attention"] = Field(
        "convolution", description="what aggregates the contributions of positions"
    )
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] | None = Field(
        None, description="width of the keys of linear attention; a convolution has none"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Generic":
        if self.rank is not None and self.mixer == "convolution":
            raise FieldError("rank", "is of mixer: linear_attention; a convolution has none")
        return self

    def label(self) -> str:
        of = f" of rank {self.rank}" if self.rank else ""
        return "generic" + ("" if self.mixer == "convolution" else f", linear attention{of}")

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        return generic_tiling(m, model, ended_s)


class Relaxed(Strict):
    """Tiles for filters that depend on the data (Algorithm 3, van der Hoeven 1997)."""

    kind: Literal["relaxed"]

    def label(self) -> str:
        return "relaxed"

    def program(self, m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
        return relaxed_tiling(m, model, ended_s)


def _order(parallel: Sequence[bool]) -> str:
    return "" if parallel[0] else ", layer by layer"


# The strategies: add a new kind here.
TilingStrategies = Lazy | Eager | Fractal | Generic | Relaxed
