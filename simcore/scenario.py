"""What a user asks for: a YAML file becomes a Scenario, or one line that says what is wrong with it.

A field means the same in every study. A list in a field multiplies the runs:

    runs = product over fields of the number of values given

Names (device, profile, model, published data) are resolved when the run is put together, not here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from simcore.files import InputError, Name, Seconds, is_path, nearest, parse_yaml, read_yaml, worst
from simcore.ops import DTYPE_BYTES

T = TypeVar("T")

# The longest context, batch and token count that a file may ask for: what is beyond is a slip of the hand.
MOST_CONTEXT = 100_000_000
MOST_BATCH = 1_000_000
MOST_TOKENS = 100_000
MOST_RUNS = 20_000


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [value]


def _distinct(values: list[T]) -> list[T]:
    if len(set(map(repr, values))) < len(values):
        raise ValueError(f"a value is given twice in {values}")
    return values


def _dtype(name: str) -> str:
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {name!r}{nearest(name, DTYPE_BYTES)}")
    return name


Many = Annotated[list[T], BeforeValidator(_listed), Field(min_length=1), AfterValidator(_distinct)]
Dtype = Annotated[str, AfterValidator(_dtype)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Groups = Annotated[int, Field(ge=2, le=1024)]
Context = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Chunk = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RateHits(_Strict):
    """A share of the speculations hits. `draw`: `fractional`, `floor` and `ceil` count hits per token as
    the paper's formula does (fractional: the mean of both, weighted); `random` draws each one."""

    kind: Literal["rate"]
    value: Many[Share]
    draw: Literal["fractional", "floor", "ceil", "random"] = "fractional"


class LayerHits(_Strict):
    """One probability a layer, first layer first; drawn at random."""

    kind: Literal["layers"]
    probabilities: Annotated[list[Share], Field(min_length=1)]


class PublishedHits(_Strict):
    """The hit rates that ALSpec's Tables 1 and 2 give for the scenario's model, a task and a threshold."""

    kind: Literal["published"]
    task: str
    threshold: Many[Annotated[float, Field(gt=0.0)]]
    draw: Literal["fractional", "floor", "ceil", "random"] = "fractional"


Hits = Annotated[RateHits | LayerHits | PublishedHits, Field(discriminator="kind")]


class TensorParallel(_Strict):
    """Every rank holds a slice of every layer."""

    kind: Literal["tensor_parallel"]
    ranks: Many[Ranks] = [1]


class AlSpec(_Strict):
    """Attention-level speculation on two groups of `ranks` devices each. `chunk_tokens`: the speculation
    attends over the first and the last so many tokens (default: the profile's, else 128)."""

    kind: Literal["alspec"]
    ranks: Many[Ranks] = [1]
    hits: Hits
    overlap_last_layer: bool = True
    chunk_tokens: Chunk | None = None


class AlSpecPipelined(_Strict):
    """Attention-level speculation around a ring of `groups` single devices."""

    kind: Literal["alspec_pipelined"]
    groups: Many[Groups]
    hits: Hits
    chunk_tokens: Chunk | None = None


Strategy = Annotated[TensorParallel | AlSpec | AlSpecPipelined, Field(discriminator="kind")]


class Baseline(_Strict):
    """What speed-ups are reckoned against, at the same context and batch."""

    kind: Literal["tensor_parallel"]
    ranks: Ranks


class HostOverheads(_Strict):
    """Costs of the machine's verbs in seconds, in the place of the device's own."""

    launch_s: Seconds | None = None
    wait_s: Seconds | None = None
    message_s: Seconds | None = None
    gate_s: Seconds | None = None


class ErrorBounds(_Strict):
    """Constants of ALSpec's error bounds (App. A), none of which the paper gives. The defaults are the
    mildest possible: layers that amplify nothing (alpha = beta = 0), and Azuma's constant c = 1."""

    alpha: Annotated[float, Field(ge=0.0)] = 0.0
    beta: Annotated[float, Field(ge=0.0)] = 0.0
    f_r: Annotated[float, Field(ge=0.0)] = 1.0
    c: Annotated[float, Field(gt=0.0)] = 1.0
    failure_probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05


CrossoverAxis = Literal["context_tokens", "hit_rate", "link_latency_s"]


class DecodeScenario(_Strict):
    """Study `decode`: latency per token of one stream of tokens, by strategy, context, batch, hit rate."""

    name: Name
    study: Literal["decode"]
    device: str
    model: str
    strategies: Annotated[list[Strategy], Field(min_length=1)]
    context_tokens: Many[Context]
    profile: str | None = Field(None, description="a profile of the device, 'none', or the device's default")
    link: str | None = Field(None, description="a link of the device, or its default")
    dtype: Dtype | None = Field(None, description="of weights and KV cache: the profile's, else bf16")
    dtypes: dict[str, Dtype] = Field(
        {}, description="by matrix: qkv, o, gate, up, down, lm_head, embedding, kv"
    )
    batch: Many[Annotated[int, Field(ge=1, le=MOST_BATCH)]] = [1]
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 1
    baseline: Baseline | None = None
    crossover: Annotated[list[CrossoverAxis], AfterValidator(_distinct)] = []
    published: Annotated[list[str], AfterValidator(_distinct)] = []
    overheads: HostOverheads = HostOverheads()
    error_bounds: ErrorBounds = ErrorBounds()
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


Scenario = DecodeScenario
DTYPE_KEYS = ("qkv", "o", "gate", "up", "down", "lm_head", "embedding", "kv")


def json_schema() -> dict[str, Any]:
    """The JSON schema of a scenario file, for editors."""
    return TypeAdapter(Scenario).json_schema()


def load_scenario(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """Reads a scenario file; `settings` are KEY=VALUE, a dotted path and a YAML value each.

    Raises InputError with one line: file, field, what is allowed, the nearest name.
    """
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds no scenario: a mapping of fields is needed")
    for setting in settings:
        _set(document, setting)
    return parse_scenario(_with_paths(document, path.absolute().parent), str(path))


def parse_scenario(document: Mapping[str, Any], where: str) -> Scenario:
    """A scenario from the content of a file. Raises InputError."""
    for key in document:
        if not isinstance(key, str):
            raise InputError(f"{where}: {key!r} is no field: a field is a word")
    study = document.get("study")
    if study != "decode":
        found = "is missing" if "study" not in document else f"is {study!r}"
        raise InputError(f"{where}: study: {found} (allowed: decode)")
    try:
        scenario = TypeAdapter(Scenario).validate_python(dict(document))
    except ValidationError as error:
        raise InputError(f"{where}: {_line(error)}") from None
    for key in scenario.dtypes:
        if key not in DTYPE_KEYS:
            raise InputError(f"{where}: dtypes.{key}: no such matrix{nearest(key, DTYPE_KEYS)}")
    return scenario


def _found(name: Any, folder: Path, ending: str) -> Any:
    """A path in a scenario is meant from the scenario's folder, else from where one is."""
    if not isinstance(name, str) or not is_path(name, ending):
        return name
    beside = folder / name
    return str(beside.absolute() if beside.exists() else Path(name).absolute())


def _with_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    endings = {"device": ".yaml", "profile": ".yaml", "model": ".json"}
    found = {key: _found(document[key], folder, ending) for key, ending in endings.items() if key in document}
    names = document.get("published")
    if isinstance(names, list):
        found["published"] = [_found(name, folder, ".csv") for name in names]
    return {**document, **found}


def _set(document: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {setting}: KEY=VALUE is needed, such as --set seed=2")
    place: Any = document
    *path, last = key.split(".")
    for part in path:
        place = _inside(place, part, setting)
    if isinstance(place, list):
        _inside(place, last, setting)
        place[int(last)] = parse_yaml(text, f"--set {setting}")
    elif isinstance(place, dict):
        place[last] = parse_yaml(text, f"--set {setting}")
    else:
        raise InputError(f"--set {setting}: {key} leads into a value, not into a field")


def _inside(place: Any, part: str, setting: str) -> Any:
    if isinstance(place, list):
        if part.isdecimal() and int(part) < len(place):
            return place[int(part)]
        raise InputError(f"--set {setting}: {part} is no place in a list of {len(place)} (counted from 0)")
    if isinstance(place, dict):
        return place.setdefault(part, {})
    raise InputError(f"--set {setting}: {part} leads into a value, not into a field")


# -- one line for each fault -------------------------------------------------------------------------


def _line(error: ValidationError) -> str:
    first = worst(error)
    path = _path(first["loc"])
    field, kind, given = ".".join(path), first["type"], first["input"]
    context = first.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{field}: no such field{nearest(path[-1], _fields(first['loc'][:-1]))}"
    if kind in ("missing", "union_tag_not_found"):
        return f"{field}{'' if kind == 'missing' else '.kind'}: is missing"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = str(context.get("expected_tags", context.get("expected")))
        allowed = re.findall(r"'([^']*)'", expected)
        tag = "" if kind == "literal_error" else ".kind"
        found = context.get("tag", given)
        return f"{field}{tag}: is {_shown(found)}{nearest(str(found), allowed)}"
    if kind == "value_error":
        return f"{field}: {context['error']}"
    message = _WORDS.get(kind) or first["msg"][0].lower() + first["msg"][1:]
    return f"{field}: is {_shown(given)}; {message.replace('input should', 'it should')}"


_MAPPING = "a mapping of fields is needed"
_WORDS: Mapping[str, str] = {
    "too_short": "at least one value is needed",
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' are allowed, a letter or digit first",
}


def _path(location: tuple[int | str, ...]) -> list[str]:
    """A field path as the file has it: tags of unions are not part of it."""
    tags = {"tensor_parallel", "alspec", "alspec_pipelined", "rate", "layers", "published"}
    kept: list[str] = []
    for i, part in enumerate(location):
        tagged = i > 0 and (isinstance(location[i - 1], int) or location[i - 1] == "hits")
        if isinstance(part, int) and kept:
            kept[-1] += f"[{part}]"
        elif not (tagged and part in tags):
            kept.append(str(part))
    return kept


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """The fields that are allowed at a place of a scenario."""
    models: dict[str, type[BaseModel]] = {
        "tensor_parallel": TensorParallel,
        "alspec": AlSpec,
        "alspec_pipelined": AlSpecPipelined,
        "rate": RateHits,
        "layers": LayerHits,
        "published": PublishedHits,
        "baseline": Baseline,
        "overheads": HostOverheads,
        "error_bounds": ErrorBounds,
    }
    names = (part for part in reversed(location) if isinstance(part, str))
    model = next((models[name] for name in names if name in models), DecodeScenario)
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def resolved(scenario: Scenario) -> dict[str, Any]:
    """A scenario with every default written out, as it goes into the run directory."""
    return scenario.model_dump(mode="json")


def variants(strategy: Strategy) -> Iterator[tuple[str, int, int]]:
    """(kind, ranks of a group, groups) of each variant that a strategy's lists multiply into."""
    if isinstance(strategy, AlSpecPipelined):
        yield from ((strategy.kind, 1, groups) for groups in strategy.groups)
    else:
        groups = 2 if isinstance(strategy, AlSpec) else 1
        yield from ((strategy.kind, ranks, groups) for ranks in strategy.ranks)
