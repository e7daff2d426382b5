"""Scenarios of the studies of single operators: methods, shapes, device.

runs of linear_attention = methods * batch * decay * length
runs of decode_attention = methods * (batch * context_tokens, or shapes)
runs of prompt           = methods * batch * (length, or the lengths of a data set)
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, distinct
from simcore.input.files import nearest
from simcore.models.operators import DECODE_ATTENTION, LINEAR_ATTENTION
from simcore.models.prompt import ORIGINAL, PROMPT_METHODS
from simcore.studies.fields import Costs, Dtype, HostOverheads, OnCpu, OnDevices, Seed, ToCompare, Unused

# Some methods have one launch per token or more: longer streams of ops take minutes to build.
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


def _prompt(name: str) -> str:
    return _known(name, PROMPT_METHODS)


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
    dtype: Dtype = Field("bf16", description="number format of all inputs and outputs")
    overheads: Costs = HostOverheads()
    published: ToCompare = []
    on_cpu: OnCpu = {}
    seed: Unused = 0


class LinearAttentionScenario(OperatorCommon):
    """Study `linear_attention`: latency and memory of the methods of causal linear attention by length."""

    study: Literal["linear_attention"]
    methods: Many[Annotated[str, AfterValidator(_linear)]] = Field(
        list(LINEAR_ATTENTION[:6]), description=f"ways to compute it: {', '.join(LINEAR_ATTENTION)}"
    )
    batch: Many[Batch] = Field([1], description="sequences at a time")
    heads: Width = Field(32, description="heads of a sequence")
    rank: Width = Field(128, description="width of a head's queries and keys")
    dim: Width = Field(128, description="width of a head's values and outputs")
    length: Many[Annotated[int, Field(ge=1, le=MOST_LENGTH)]] = Field(description="tokens of a sequence")
    decay: Many[bool] = Field([False], description="whether each head forgets by a decay of its own")
    mask_by_rows: bool = Field(False, description="whether masks with decay are made a row a launch")
    states: bool = Field(True, description="whether a first state is read and the last one written")

    @model_validator(mode="after")
    def _amount(self) -> "LinearAttentionScenario":
        runs = len(self.methods) * len(self.batch) * len(self.decay) * len(self.length)
        _check_amount(runs, "length")
        return self


_SEQUENCES, _CACHED = "sequences, of one query token each", "cached tokens of a sequence"


class DecodeShape(Strict):
    """One point: so many sequences, of so many cached tokens each."""

    batch: Batch = Field(description=_SEQUENCES)
    context_tokens: Context = Field(description=_CACHED)


class DecodeAttentionScenario(OperatorCommon):
    """Study `decode_attention`: latency of the attention of one query token a sequence. Points are `shapes`,
    or all pairs of `batch` and `context_tokens`."""

    study: Literal["decode_attention"]
    methods: Many[Annotated[str, AfterValidator(_decode)]] = Field(
        list(DECODE_ATTENTION), description=f"ways to compute it: {', '.join(DECODE_ATTENTION)}"
    )
    shapes: Annotated[list[DecodeShape], AfterValidator(distinct)] = Field(
        [], description="points one by one, in place of batch and context_tokens"
    )
    batch: Many[Batch] | None = Field(None, description=_SEQUENCES)
    context_tokens: Many[Context] | None = Field(None, description=_CACHED)
    q_heads: Width = Field(description="query heads, a multiple of kv_heads")
    kv_heads: Width = Field(description="heads of the KV cache")
    head_dim: Width = Field(description="width of a head")
    splits: Annotated[Any, AfterValidator(_splits)] = Field(
        "auto", description="parts that Flash-Decoding cuts a context into; auto: the cheapest number"
    )

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
        """The (batch, context_tokens) of every point, in the order of the file."""
        if self.shapes:
            return [(shape.batch, shape.context_tokens) for shape in self.shapes]
        return [(batch, context) for batch in self.batch or () for context in self.context_tokens or ()]


class DataSet(Strict):
    """Prompts whose lengths are drawn evenly from low to high, in steps."""

    prompts: int = Field(description="number of prompts", ge=1, le=1_000_000)
    low: int = Field(description="tokens of the shortest", ge=1, le=MOST_LENGTH)
    high: int = Field(description="tokens of the longest", ge=1, le=MOST_LENGTH)
    step: int = Field(256, description="tokens between two lengths", ge=1, le=MOST_LENGTH)

    @model_validator(mode="after")
    def _in_order(self) -> "DataSet":
        if self.low > self.high:
            raise FieldError("low", f"is {self.low:,}; at most high, {self.high:,}, is allowed")
        return self

    @property
    def lengths(self) -> list[int]:
        """The lengths that a prompt may have, tokens."""
        return list(range(self.low, self.high + 1, self.step))


class PromptScenario(OperatorCommon):
    """Study `prompt`: seconds for a whole prompt through a model of linear attention, by the method that
    computes its linear attention; of prompts one by one, or of a data set."""

    study: Literal["prompt"]
    model: str = Field(description="a name (`simcore models`), or a path to a Hugging Face config.json")
    layers: int | None = Field(None, ge=1, le=10_000, description="how many of its first layers; all of them")
    methods: Many[Annotated[str, AfterValidator(_prompt)]] = Field(
        [*LINEAR_ATTENTION[:6], ORIGINAL],
        description=f"ways to compute its linear attention: {', '.join(PROMPT_METHODS)}",
    )
    batch: Many[Batch] = Field([1], description="prompts at a time")
    length: Many[Annotated[int, Field(ge=1, le=MOST_LENGTH)]] | None = Field(
        None, description="tokens of a prompt"
    )
    data_set: DataSet | None = Field(None, description="prompts of several lengths, in the place of length")
    mask_by_rows: bool = Field(False, description="whether masks with decay are made a row a launch")
    states: bool = Field(True, description="whether a first state is read and the last one written")
    all_logits: bool = Field(
        False, description="whether the LM head reads every token, as in transformers, not the last one alone"
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _amount(self) -> "PromptScenario":
        if (self.length is None) == (self.data_set is None):
            raise FieldError("length", "is needed, or data_set in its place, not both")
        _check_amount(len(self.methods) * len(self.batch) * len(self.lengths), "methods")
        return self

    @property
    def lengths(self) -> list[int]:
        """The lengths of its cases, tokens."""
        return self.length or (self.data_set.lengths if self.data_set else [])


def _check_amount(runs: int, field: str) -> None:
    if runs > MOST_RUNS:
        raise FieldError(
            field, f"makes {runs:,} runs with the other lists; at most {MOST_RUNS:,} are allowed"
        )


OperatorScenario = LinearAttentionScenario | DecodeAttentionScenario | PromptScenario
