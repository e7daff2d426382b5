"""What a user asks of the study `tiling`: a long-convolution model, a length, and the schedules to compare.

runs = strategies * layers * channels * batch * tokens            (Flash Inference, section 4)
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, count, distinct, single_valued
from simcore.studies.fields import HostOverheads, OnCpu, OnDevices

# Beyond these a file has a slip of the hand in it.
MOST_TOKENS = 1 << 22
MOST_LAYERS = 1024
MOST_CHANNELS = 65_536
MOST_BATCH = 65_536
MOST_RANK = 1024

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Channels = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
# As in simcore.ops.convolution, and the cheapest of them.
Tiles = Literal["hybrid", "conv", "flash_conv", "fft", "flash_fft"]
FloatDtype = Literal["fp16", "bf16", "fp32", "fp64"]


class LongConvolutionModel(Strict):
    """A long-convolution model: `layers` of a convolution as long as the sequence and a block each."""

    kind: Literal["long_convolution"]
    layers: Many[Layers]
    channels: Many[Channels]
    block: Literal["mlp", "gate"] = "mlp"


class Lazy(Strict):
    """Before each position, the contributions of its whole history. `parallel`: of all layers at once."""

    kind: Literal["lazy"]
    parallel: Many[bool] = [True]


class Eager(Strict):
    """After each position, its contributions to all later ones. `parallel`: of all layers at once."""

    kind: Literal["eager"]
    parallel: Many[bool] = [True]


class Fractal(Strict):
    """Algorithm 1. `tiles`: how they are computed, hybrid taking the cheapest for each side;
    `half_storage`: half of the activations are stored (App. D); `sequential_from`: tiles of that side and
    larger are done one layer after the other (App. E)."""

    kind: Literal["fractal"]
    tiles: Many[Tiles] = ["hybrid"]
    parallel: Many[bool] = [True]
    half_storage: Many[bool] = [False]
    sequential_from: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None


class Generic(Strict):
    """Algorithm 2, for any mixer that aggregates contributions. `rank`: of the keys of linear attention."""

    kind: Literal["generic"]
    mixer: Literal["convolution", "linear_attention"] = "convolution"
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Generic":
        if self.rank is not None and self.mixer == "convolution":
            raise FieldError("rank", "is of mixer: linear_attention; a convolution has none")
        return self


class Relaxed(Strict):
    """Algorithm 3, for filters that depend on the data (van der Hoeven 1997)."""

    kind: Literal["relaxed"]


TilingStrategies = Lazy | Eager | Fractal | Generic | Relaxed
TilingStrategy = Annotated[TilingStrategies, Field(discriminator="kind")]


class TilingScenario(OnDevices):
    """Study `tiling`: time of a generation by schedule, layers, channels, batch and length.

    `launching`: graph - each launch is a captured graph, of which a kernel costs the device's `kernel_s`
    besides its work; eager - every kernel is launched by itself, as PyTorch does without graphs, which costs
    `launch_s` and `launch_kernel_s` in its place.
    """

    study: Literal["tiling"]
    model: LongConvolutionModel
    profile: str | None = Field(None, description="a fitted profile of the device, or 'none'")
    batch: Many[Batch] = [1]
    tokens: Many[Tokens] = Field(description="positions in all, those of the prompt too")
    prompt_tokens: Annotated[int, Field(ge=0, lt=MOST_TOKENS)] = 0
    dtype: FloatDtype = Field("fp16", description="of activations, filters and weights")
    launching: Literal["graph", "eager"] = "graph"
    strategies: Annotated[list[TilingStrategy], Field(min_length=1)]
    price_interval: bool | None = Field(
        None, description="run each case at both ends of its prices too (default: those that are not long)"
    )
    overheads: HostOverheads = HostOverheads()
    published: Annotated[list[str], AfterValidator(distinct)] = []
    on_cpu: OnCpu = {}
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="nothing is drawn: for the record")

    @model_validator(mode="after")
    def _consistent(self) -> "TilingScenario":
        if self.prompt_tokens >= min(self.tokens):
            least = f"less than tokens, {min(self.tokens):,}, is needed"
            raise FieldError("prompt_tokens", f"is {self.prompt_tokens:,}; {least}")
        seen: set[str] = set()
        for i, strategy in enumerate(self.strategies):
            if self.prompt_tokens and isinstance(strategy, Generic | Relaxed):
                raise FieldError(
                    f"strategies[{i}]", f"{strategy.kind} takes no prompt: prompt_tokens: 0 is needed"
                )
            for name in map(label, single_valued(strategy)):
                if name in seen:
                    raise FieldError(f"strategies[{i}]", f"{name!r} is there already")
                seen.add(name)
        runs = sum(map(count, self.strategies)) * count(self.model) * len(self.batch) * len(self.tokens)
        if runs > MOST_RUNS:
            raise FieldError(
                "tokens", f"makes {runs:,} runs with the other lists; at most {MOST_RUNS:,} are allowed"
            )
        return self


def tiling_variants(strategy: TilingStrategy) -> Iterator[TilingStrategy]:
    """Copies of a strategy in which every list has one value, the last field varying fastest."""
    yield from single_valued(strategy)


def label(strategy: TilingStrategy) -> str:
    """A strategy in words, all lists of which have one value.

    >>> label(Fractal(kind="fractal", parallel=[False]))
    'fractal, hybrid, layer by layer'
    """
    words: list[str] = [strategy.kind]
    match strategy:
        case Fractal():
            words += strategy.tiles
            words += ["half stored"] if strategy.half_storage[0] else []
            if strategy.sequential_from is not None:
                words.append(f"in sequence from {strategy.sequential_from}")
        case Generic() if strategy.mixer != "convolution":
            words.append("linear attention" + (f" of rank {strategy.rank}" if strategy.rank else ""))
    if isinstance(strategy, Lazy | Eager | Fractal) and not strategy.parallel[0]:
        words.append("layer by layer")
    return ", ".join(words)
