"""Scenarios of the study `tiling`: a long-convolution model, a length, and the schedules to compare.

runs = strategies * layers * channels * batch * tokens            (Flash Inference, section 4)
"""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, count
from simcore.input.files import listed, shown
from simcore.studies.fields import Costs, HostOverheads, OnCpu, OnDevices, ToCompare, Unused
from simcore.studies.own import OrOwn, check_labels
from simcore.studies.tiling.strategies import (
    MOST_TOKENS,
    Eager,
    Fractal,
    Generic,
    Lazy,
    Relaxed,
    TilingStrategies,
    TilingStrategy,
)

# Largest values: more is a mistake in the file.
MOST_LAYERS = 1024
MOST_CHANNELS = 65_536
MOST_BATCH = 65_536

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Channels = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
FloatDtype = Literal["fp16", "bf16", "fp32", "fp64"]
# Powers of two: then the same tiles come between the positions of every launch.
Several = Literal[1, 2, 4, 8, 16, 32, 64]


def _several(given: object) -> object:
    """Returns a number of tokens per launch. Raises ValueError if it is not allowed."""
    allowed = get_args(Several)
    if type(given) is int and given in allowed:
        return given
    raise ValueError(f"is {shown(given)} (allowed: {listed(map(str, allowed))})")


class LongConvolutionModel(Strict):
    """A long-convolution model: `layers` of a convolution as long as the sequence and a block each."""

    kind: Literal["long_convolution"]
    layers: Many[Layers] = Field(description="layers, of a convolution and a block each")
    channels: Many[Channels] = Field(description="width of a position")
    block: Literal["mlp", "gate"] = Field(
        "mlp", description="what follows a convolution: mlp, an MLP; gate, an elementwise product"
    )
    step: Literal["auto", "layers", "one_launch"] = Field(
        "auto",
        description="how a position goes through all layers if nothing else comes between them: as kernels of"
        " each layer (layers), as one kernel that stays for all (one_launch), or as is cheaper, if the one"
        " kernel was measured (auto)",
    )


class TilingScenario(OnDevices):
    """Study `tiling`: time of a generation by schedule, layers, channels, batch and length."""

    study: Literal["tiling"]
    model: LongConvolutionModel = Field(description="the long-convolution model that generates")
    profile: str | None = Field(None, description="a fitted profile of the device, or 'none'")
    batch: Many[Batch] = Field([1], description="sequences at a time")
    tokens: Many[Tokens] = Field(description="positions in all, those of the prompt too")
    prompt_tokens: int = Field(0, ge=0, lt=MOST_TOKENS, description="positions that are given, done by FFT")
    dtype: FloatDtype = Field("fp16", description="number format of activations, filters and weights")
    launching: Literal["graph", "eager"] = Field(
        "graph",
        description="graph: each launch is a captured graph, whose kernels cost the device's kernel_s each;"
        " eager: each kernel is launched by itself, for launch_s and launch_kernel_s",
    )
    tokens_per_launch: Annotated[Several, BeforeValidator(_several)] = Field(
        1,
        description="positions that one launch computes: its graph has their steps, and the rows, columns or"
        " tiles between them. The host waits once for all of them: they are done together. For launching:"
        " graph, and lazy, eager and fractal with parallel: true. Fewer at the end go one by one",
    )
    strategies: Annotated[
        list[Annotated[TilingStrategies, Field(discriminator="kind"), OrOwn(TilingStrategy)]],
        Field(min_length=1, description="schedules to compare"),
    ]
    price_interval: bool | None = Field(
        None, description="run each case at both ends of its prices too (default: those that are not long)"
    )
    overheads: Costs = HostOverheads()
    published: ToCompare = []
    on_cpu: OnCpu = {}
    seed: Unused = 0

    @model_validator(mode="after")
    def _consistent(self) -> "TilingScenario":
        if self.prompt_tokens >= min(self.tokens):
            least = f"less than tokens, {min(self.tokens):,}, is needed"
            raise FieldError("prompt_tokens", f"is {self.prompt_tokens:,}; {least}")
        for i, strategy in enumerate(self.strategies):
            if self.prompt_tokens and isinstance(strategy, Generic | Relaxed):
                reason = f"{strategy.kind} takes no prompt: prompt_tokens: 0 is needed"
                raise FieldError(f"strategies[{i}]", reason)
        self._check_tokens_per_launch()
        runs = sum(map(count, self.strategies)) * count(self.model) * len(self.batch) * len(self.tokens)
        if runs > MOST_RUNS:
            raise FieldError(
                "tokens", f"makes {runs:,} runs with the other lists; at most {MOST_RUNS:,} are allowed"
            )
        check_labels(enumerate(self.strategies), lambda strategy: strategy.label())
        return self

    def _check_tokens_per_launch(self) -> None:
        """Raises FieldError for several tokens per launch where a position takes several launches."""
        several = self.tokens_per_launch
        if several == 1:
            return
        if self.launching == "eager":
            says = f"is {several}; with launching: eager each kernel is a launch, so 1 is needed"
            raise FieldError("tokens_per_launch", says)
        for i, strategy in enumerate(self.strategies):
            if isinstance(strategy, Generic | Relaxed):
                says = f"{strategy.kind} computes one position at a time: tokens_per_launch: 1 is needed"
                raise FieldError(f"strategies[{i}]", says)
            if isinstance(strategy, Lazy | Eager | Fractal) and not all(strategy.parallel):
                says = f"false computes one position at a time; tokens_per_launch: {several} needs true"
                raise FieldError(f"strategies[{i}].parallel", says)
