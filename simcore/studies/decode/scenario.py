"""Decode scenarios: strategies, contexts, batches, hits.

runs = product over fields of the number of values given
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import FieldError, Many, Strict, distinct
from simcore.machine.machine import Machine, Program
from simcore.models.decoder import Decoder
from simcore.studies.fields import Common, Ranks, SeveralRanks
from simcore.studies.own import OrOwn, check_labels, is_own

# The largest context, batch and token count that a file may have: more is a mistake.
MOST_CONTEXT = 100_000_000
MOST_BATCH = 1_000_000
MOST_TOKENS = 100_000

Groups = Annotated[int, Field(ge=2, le=1024)]
Context = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Draw = Annotated[
    Literal["fractional", "floor", "ceil", "random"],
    Field(
        description="hits per token: floor or ceil of layers times rate, as the paper's formula has it;"
        " fractional: the mean of both, weighted; random: each is drawn"
    ),
]
Chunk = Annotated[
    Annotated[int, Field(ge=1, le=MOST_CONTEXT)] | None,
    Field(
        description="the speculation attends over the first and last so many tokens; the profile's, or 128"
    ),
]


class RateHits(Strict):
    """A share of the speculations hits."""

    kind: Literal["rate"]
    value: Many[Share] = Field(description="share of the speculations that hit, 0 to 1")
    draw: Draw = "fractional"


class LayerHits(Strict):
    """One probability a layer, first layer first; drawn at random."""

    kind: Literal["layers"]
    probabilities: list[Share] = Field(min_length=1, description="probability of a hit, by layer")


class PublishedHits(Strict):
    """The hit rates that ALSpec's Tables 1 and 2 give for the scenario's model, a task and a threshold."""

    kind: Literal["published"]
    task: str = Field(description="task of the tables, such as gsm8k-cot")
    threshold: Many[Annotated[float, Field(gt=0.0)]] = Field(
        description="error up to which a speculation is accepted, as the tables have it"
    )
    draw: Draw = "fractional"


Hits = Annotated[
    RateHits | LayerHits | PublishedHits,
    Field(discriminator="kind", description="how often speculations are right"),
]


class TensorParallel(Strict):
    """Every rank holds a slice of every layer."""

    kind: Literal["tensor_parallel"]
    ranks: SeveralRanks = [1]


class AlSpec(Strict):
    """Attention-level speculation on two groups of `ranks` devices each."""

    kind: Literal["alspec"]
    ranks: SeveralRanks = [1]
    hits: Hits
    overlap_last_layer: bool = Field(
        True, description="whether LM head and next token go on before the last attention is verified"
    )
    chunk_tokens: Chunk = None


class AlSpecPipelined(Strict):
    """Attention-level speculation around a ring of `groups` single devices."""

    kind: Literal["alspec_pipelined"]
    groups: Many[Groups] = Field(description="devices in the ring")
    hits: Hits
    chunk_tokens: Chunk = None


DecodeStrategies = TensorParallel | AlSpec | AlSpecPipelined


class DecodeStrategy(Protocol):
    """A user's own way of decoding on devices that hold slices of the model (docs/own_strategies.md). When it
    is used, each field of `Many` values has one value."""

    @property
    def kind(self) -> str:
        """Its kind in a scenario."""

    @property
    def ranks(self) -> list[int]:
        """Devices of the group."""

    def label(self) -> str:
        """Returns its name in results, without the number of devices."""

    def program(self, m: Machine, model: Decoder, *, tokens: int, context: int) -> Program:
        """Decodes `tokens` tokens after `context` cached ones; marks "token i" at the end of each."""


class Baseline(Strict):
    """What speed-ups are reckoned against, at the same context and batch."""

    kind: Literal["tensor_parallel"]
    ranks: Ranks = Field(description="devices that share the model there")


class ErrorBounds(Strict):
    """Constants of ALSpec's error bounds (App. A), none of which the paper gives. The defaults are the
    mildest possible: layers that amplify nothing (alpha = beta = 0), and Azuma's constant c = 1."""

    alpha: float = Field(default=0.0, ge=0.0, description="Lipschitz constant of the feed-forward part")
    beta: float = Field(default=0.0, ge=0.0, description="Lipschitz constant of the attention's input")
    f_r: float = Field(
        default=1.0, ge=0.0, description="Lipschitz constant of attention, at an input of magnitude R"
    )
    c: float = Field(default=1.0, gt=0.0, description="constant of the inequality of the Azuma type")
    failure_probability: float = Field(
        default=0.05, gt=0.0, lt=1.0, description="probability that the bound of App. A.3 does not hold"
    )


CrossoverAxis = Literal["context_tokens", "hit_rate", "link_latency_s"]


class DecodeScenario(Common):
    """Study `decode`: latency per token of one stream of tokens, by strategy, context, batch, hit rate."""

    study: Literal["decode"]
    strategies: Annotated[
        list[Annotated[DecodeStrategies, Field(discriminator="kind"), OrOwn(DecodeStrategy)]],
        Field(min_length=1, description="ways of decoding to compare"),
    ]
    context_tokens: Many[Context] = Field(
        description="tokens in the KV cache before the first one is decoded"
    )
    batch: Many[Annotated[int, Field(ge=1, le=MOST_BATCH)]] = Field([1], description="sequences at a time")
    tokens: int = Field(1, ge=1, le=MOST_TOKENS, description="tokens decoded one after the other")
    part: Literal["model", "layer"] = Field(
        "model", description="model: all of it; layer: one layer, without embedding and LM head"
    )
    baseline: Baseline | None = Field(
        None, description="what speed-ups are against; by default there are none"
    )
    crossover: Annotated[list[CrossoverAxis], AfterValidator(distinct)] = Field(
        [],
        description="along what to look for where ALSpec passes tensor parallelism on as many devices",
    )
    rival_model: str | None = Field(
        None,
        description="a second model, decoded in the same way: where does the first pass it? A name, or a"
        " path to a Hugging Face config.json",
    )
    error_bounds: ErrorBounds = Field(ErrorBounds(), description="constants of ALSpec's error bounds")

    @model_validator(mode="after")
    def _consistent(self) -> "DecodeScenario":
        own = ((i, strategy) for i, strategy in enumerate(self.strategies) if is_own(strategy.kind))
        check_labels(own, own_label)
        if self.crossover and not any(isinstance(each, AlSpec | AlSpecPipelined) for each in self.strategies):
            needed = "alspec or alspec_pipelined is needed among the strategies"
            raise FieldError("crossover", f"is where ALSpec passes tensor parallelism: {needed}")
        if self.part == "model":
            return self
        for i, strategy in enumerate(self.strategies):
            if not isinstance(strategy, TensorParallel):
                only = "part: layer is for tensor_parallel alone"
                raise FieldError(f"strategies[{i}].kind", f"is {strategy.kind!r}; {only}")
        if self.published:
            raise FieldError("published", "figures are of whole models: part: model is needed")
        return self


def own_label(strategy: DecodeStrategy) -> str:
    """Returns the label of a user's own strategy with its number of devices."""
    ranks = strategy.ranks[0]
    return f"{strategy.label()}, {ranks} device{'s' if ranks > 1 else ''}"


def variants(strategy: DecodeStrategies) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, ranks of a group, groups) of each variant of a strategy's lists."""
    if isinstance(strategy, AlSpecPipelined):
        yield from ((strategy.kind, 1, groups) for groups in strategy.groups)
    else:
        groups = 2 if isinstance(strategy, AlSpec) else 1
        yield from ((strategy.kind, ranks, groups) for ranks in strategy.ranks)
