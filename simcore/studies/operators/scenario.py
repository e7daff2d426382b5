"""What a user asks of the studies of single operators: which methods, at which shapes, on which device.

runs of linear_attention = methods * batch * decay * length
runs of decode_attention = methods * (batch * context_tokens, or shapes)
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, distinct
from simcore.input.files import nearest
from simcore.models.operators import DECODE_ATTENTION, LINEAR_ATTENTION
from simcore.studies.fields import Dtype, HostOverheads, OnCpu, OnDevices

# Some methods are a launch a token and more: streams of ops beyond this take minutes to build.
MOST_LENGTH = 1_000_000
MOST_CONTEXT = 100_000_000
MOST_BATCH = 1_000_000
MOST_WIDTH = 65_536

Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Context = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]


def _known(name: str, allowed: Sequence[str]) -> str:
    if name not in allowed:
        raise ValueError(f"unknown method {name!r}{nearest(name, allowed)}")
    return name


def _linear(name: str) -> str:
    return _known(name, LINEAR_ATTENTION)


def _decode(name: str) -> str:
    return _known(name, DECODE_ATTENTION)


def _splits(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_CONTEXT
    if value != "auto" and not whole:
        raise ValueError(f"is {value!r}; 'auto' or a whole number from 1 on is allowed")
    return value


class OperatorCommon(OnDevices):
    """What both studies say: name, device and its prices, the number format, what to compare with."""

    profile: str | None = Field(None, description="a fitted profile of the device, or 'none'")
    dtype: Dtype = Field("bf16", description="of all inputs and outputs")
    overheads: HostOverheads = HostOverheads()
    published: Annotated[list[str], AfterValidator(distinct)] = []
    on_cpu: OnCpu = {}
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="nothing is drawn: for the record")


class LinearAttentionScenario(OperatorCommon):
    """Study `linear_attention`: latency and memory of the methods of causal linear attention by length.
    `decay`: with a decay per head, or without. `mask_by_rows`: masks with decay are made a row a launch.
    `states`: a first state is given and the last one wanted."""

    study: Literal["linear_attention"]
    methods: Many[Annotated[str, AfterValidator(_linear)]] = list(LINEAR_ATTENTION[:6])
    batch: Many[Batch] = [1]
    heads: Width = 32
    rank: Width = 128
    dim: Width = 128
    length: Many[Annotated[int, Field(ge=1, le=MOST_LENGTH)]]
    decay: Many[bool] = [False]
    mask_by_rows: bool = False
    states: bool = True

    @model_validator(mode="after")
    def _amount(self) -> "LinearAttentionScenario":
        runs = len(self.methods) * len(self.batch) * len(self.decay) * len(self.length)
        _check_amount(runs, "length")
        return self


class DecodeShape(Strict):
    """One point: so many sequences, of so many cached tokens each."""

    batch: Batch
    context_tokens: Context


class DecodeAttentionScenario(OperatorCommon):
    """Study `decode_attention`: latency of the attention of one query token a sequence. Points are `shapes`,
    or all pairs of `batch` and `context_tokens`. `splits`: of Flash-Decoding; auto: the cheapest number."""

    study: Literal["decode_attention"]
    methods: Many[Annotated[str, AfterValidator(_decode)]] = list(DECODE_ATTENTION)
    shapes: Annotated[list[DecodeShape], AfterValidator(distinct)] = []
    batch: Many[Batch] | None = None
    context_tokens: Many[Context] | None = None
    q_heads: Width
    kv_heads: Width
    head_dim: Width
    splits: Annotated[Any, AfterValidator(_splits)] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> "DecodeAttentionScenario":
        if self.q_heads % self.kv_heads:
            raise FieldError(
                "q_heads", f"is {self.q_heads}; a multiple of kv_heads, {self.kv_heads}, is needed"
            )
        pairs = self.batch is not None or self.context_tokens is not None
        if pairs == bool(self.shapes):
            raise FieldError("shapes", "is needed, or batch and context_tokens in its place, not both")
        if pairs and self.batch is None:
            raise FieldError("batch", "is missing: context_tokens stands without it")
        if pairs and self.context_tokens is None:
            raise FieldError("context_tokens", "is missing: batch stands without it")
        _check_amount(len(self.methods) * len(self.points), "methods")
        if self.splits != "auto" and "flash_decoding" in self.methods:
            least = min(context for _, context in self.points)
            if self.splits > least:
                raise FieldError(
                    "splits", f"is {self.splits}; at most {least:,}, the least context, is allowed"
                )
        return self

    @property
    def points(self) -> list[tuple[int, int]]:
        """(batch, context_tokens) of every point, in the order of the file."""
        if self.shapes:
            return [(shape.batch, shape.context_tokens) for shape in self.shapes]
        return [(batch, context) for batch in self.batch or () for context in self.context_tokens or ()]


def _check_amount(runs: int, field: str) -> None:
    if runs > MOST_RUNS:
        raise FieldError(
            field, f"makes {runs:,} runs with the other lists; at most {MOST_RUNS:,} are allowed"
        )


OperatorScenario = LinearAttentionScenario | DecodeAttentionScenario
