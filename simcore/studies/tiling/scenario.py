"""What a user asks of the study `tiling`: a long-convolution model, a length, and the schedules to compare.

runs = strategies * layers * channels * batch * tokens            (Flash Inference, section 4)
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, count, distinct
from simcore.studies.fields import HostOverheads, OnCpu, OnDevices
from simcore.studies.own import OrOwn, check_labels
from simcore.studies.tiling.strategies import MOST_TOKENS, Generic, Relaxed, TilingStrategies, TilingStrategy

# Beyond these a file has a slip of the hand in it.
MOST_LAYERS = 1024
MOST_CHANNELS = 65_536
MOST_BATCH = 65_536

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Channels = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
FloatDtype = Literal["fp16", "bf16", "fp32", "fp64"]


class LongConvolutionModel(Strict):
    """A long-convolution model: `layers` of a convolution as long as the sequence and a block each."""

    kind: Literal["long_convolution"]
    layers: Many[Layers]
    channels: Many[Channels]
    block: Literal["mlp", "gate"] = "mlp"


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
    strategies: Annotated[
        list[Annotated[TilingStrategies, Field(discriminator="kind"), OrOwn(TilingStrategy)]],
        Field(min_length=1),
    ]
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
        for i, strategy in enumerate(self.strategies):
            if self.prompt_tokens and isinstance(strategy, Generic | Relaxed):
                told = f"{strategy.kind} takes no prompt: prompt_tokens: 0 is needed"
                raise FieldError(f"strategies[{i}]", told)
        runs = sum(map(count, self.strategies)) * count(self.model) * len(self.batch) * len(self.tokens)
        if runs > MOST_RUNS:
            raise FieldError(
                "tokens", f"makes {runs:,} runs with the other lists; at most {MOST_RUNS:,} are allowed"
            )
        check_labels(enumerate(self.strategies), lambda strategy: strategy.label())
        return self
