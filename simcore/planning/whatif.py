"""The file of a plan: a scenario, what varies in it, what must hold, and what is best.

points = product over `vary` of the numbers of values (grid), or as many as each has (zip), or `points`
         (latin_hypercube)

Question break_even may have several scenarios, `bases`, of several studies. What varies is then a field of
all of them, or a name of `fields`, which says where each scenario has that quantity.

A plain scenario is a plan too: then --question says what is asked of it, and its SLO what must hold.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from simcore.input.errors import fault, parsed
from simcore.input.fields import TAGS, FieldError, Strict
from simcore.input.files import InputError, Name, nearest, plain, read_yaml, shown, unknown_name
from simcore.input.shipped import file_or_shipped, names
from simcore.planning.limits import STUDY, Limit, limits, of_slo
from simcore.planning.slo import preset_names, preset_of
from simcore.planning.verdict import Rule
from simcore.scenario import field_names, put, set_field
from simcore.studies.columns import METRICS

Question = Literal["devices", "rate", "cost", "strategy", "grid", "break_even"]
QUESTIONS: tuple[str, ...] = get_args(Question)
Objective = Literal["fewest_devices", "lowest_cost", "highest_rate", "lowest_latency", "lowest_energy"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
# The objective where none is given.
LEAST: Objective = "fewest_devices"
RATES_OF = tuple(f"workload.arrivals.{name}" for name in ("rate_per_s", "interval_s", "rate_scale"))
# Near the highest rate a percentile varies most: with 30 runs some 4 % below it would stay unsure.
REPLICAS, RATE_REPLICAS = 30, 100
# More points than this are a slip of the hand.
MOST_POINTS = 20_000
LARGEST = 1e12
MOST_BETWEEN = 1_000_000
BREAK_EVEN = "break_even"
# A kind that has no further fields.
NONE = "none"


def _first_and_last(value: Any) -> Any:
    """Returns the first and the last value of a range; whole numbers stay whole. Raises ValueError."""
    numbers = [
        one
        for one in (value if isinstance(value, list) else ())
        if isinstance(one, int | float) and not isinstance(one, bool) and abs(one) <= LARGEST
    ]
    if not isinstance(value, list) or len(numbers) != len(value) or len(value) != 2:
        raise ValueError(f"is {shown(value)}; [first, last], two numbers up to {LARGEST:g}, is needed")
    return numbers


def _positive(value: list[Any]) -> list[Any]:
    if min(value) <= 0:
        raise ValueError(f"is {shown(value)}; both have to be above 0")
    return value


Bounds = Annotated[list[int | float], Field(min_length=2, max_length=2), BeforeValidator(_first_and_last)]


class Linear(Strict):
    """Values at equal distances, both ends among them."""

    range: Annotated[Bounds, Field(description="first and last value")]
    points: int = Field(ge=2, le=10_000, description="how many values")

    def values(self) -> list[Any]:
        """Returns the values; whole numbers where both ends are."""
        return _whole([self._at(i / (self.points - 1)) for i in range(self.points)], self.range)

    def at(self, share: float) -> Any:
        """Returns the value at a share of the way from the first to the last."""
        return _whole([self._at(share)], self.range)[0]

    def _at(self, share: float) -> float:
        low, high = self.range
        return float(low + (high - low) * share)


class Logarithmic(Strict):
    """Values at equal ratios, both ends among them."""

    log: Annotated[Bounds, AfterValidator(_positive), Field(description="first and last value, above 0")]
    points: int = Field(ge=2, le=10_000, description="how many values")

    def values(self) -> list[Any]:
        """Returns the values; whole numbers where both ends are."""
        inner = [self._at(i / (self.points - 1)) for i in range(1, self.points - 1)]
        return _whole([self.log[0], *inner, self.log[1]], self.log)

    def at(self, share: float) -> Any:
        """Returns the value at a share of the way, in logarithms, from the first to the last."""
        return _whole([self._at(share)], self.log)[0]

    def _at(self, share: float) -> float:
        low, high = self.log
        return float(low * (high / low) ** share)


def _whole(found: list[float], ends: list[Any]) -> list[Any]:
    if all(isinstance(end, int) for end in ends):
        return list(dict.fromkeys(round(value) for value in found))
    return found


NEEDED = "a list, {range: [first, last], points: n} or {log: [first, last], points: n} is needed"


def _values(value: Any) -> Any:
    """Returns the values of a field that varies. Raises ValueError with one line."""
    if isinstance(value, list) and value:
        seen: set[str] = set()
        for one in value:
            if repr(one) in seen:
                raise ValueError(f"has {shown(one)} twice; each value may be given once")
            seen.add(repr(one))
        return value
    for key, kind in (("range", Linear), ("log", Logarithmic)):
        if isinstance(value, dict) and key in value:
            try:
                return kind.model_validate(value)
            except ValidationError as error:
                raise ValueError(fault(kind, value, error, key)) from None
    if isinstance(value, Linear | Logarithmic):
        return value
    raise ValueError(f"is {shown(value)}; {NEEDED}")


Listed = Annotated[list[Any], Field(min_length=1)]
Values = Annotated[Listed | Linear | Logarithmic, BeforeValidator(_values)]


def _objectives(value: Any) -> Any:
    """Returns an objective, or a list of them, as it is. Raises ValueError if one is unknown."""
    for one in value if isinstance(value, list) and value else [value]:
        if one not in OBJECTIVES:
            raise ValueError(f"is {shown(one)}; {', '.join(OBJECTIVES)} or a list of them is needed")
    return value


def _base(value: Any) -> Any:
    if isinstance(value, str | dict) and value:
        return value
    raise ValueError(f"is {shown(value)}; a file, an example's name, or the fields of a scenario are needed")


def _metrics(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and value and all(isinstance(one, str) for one in value.values()):
        return value
    raise ValueError(f"is {shown(value)}; a metric, or one for each of bases, is needed")


def _paths(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    paths = isinstance(found, list) and all(isinstance(one, str) and all(one.split(".")) for one in found)
    if not paths or not found:
        raise ValueError(f"is {shown(value)}; a dotted path, or a list of paths, is needed")
    return found


BaseName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=40)]
Base = Annotated[Any, BeforeValidator(_base)]
Paths = Annotated[list[str], BeforeValidator(_paths)]


class Whatif(Strict):
    """A plan: `simcore plan FILE.yaml`."""

    name: Name | None = Field(None, description="of the run directory; by default the base scenario's")
    base: Base | None = Field(None, description="the scenario: a file, an example's name, or fields")
    bases: dict[BaseName, Base] = Field(
        {}, description="of break_even: several scenarios by name, in the place of base; studies may differ"
    )
    fields: dict[BaseName, dict[str, Paths]] = Field(
        {},
        description="of bases: names for vary and over, each with the field of every base, by dotted path:"
        " {length: {a: tokens, b: workload.output_tokens.value}}; a list sets several fields",
    )
    question: Question | None = Field(
        None,
        description="devices: fewest devices that hold; rate: highest rate that holds; cost: cheapest device"
        " per million tokens; strategy: which is best, and where it stops to be; grid: every point of vary;"
        " break_even: at which values of `over` another case takes the lead (any study)",
    )
    vary: dict[str, Values] = Field(
        {},
        description="fields that vary, by dotted path: a list, {range: [first, last], points: n}, or"
        " {log: [first, last], points: n}",
    )
    together: Literal["grid", "zip", "latin_hypercube"] = Field(
        "grid", description="how the values of several fields are put together"
    )
    points: Annotated[int, Field(ge=1, le=MOST_POINTS)] | None = Field(
        None, description="of a latin_hypercube: how many points"
    )
    over: str | None = Field(
        None,
        description="of question devices: another whole-numbered field to search, by dotted path; of"
        " break_even: the field",
    )
    between: Bounds | None = Field(None, description="least and greatest value of the searched field")
    metric: Annotated[str | dict[str, str] | None, BeforeValidator(_metrics)] = Field(
        None,
        description="of break_even: what leads, a metric of results.csv; by default the study's latency; of"
        " bases one for each: {a: total_s, b: e2e_mean_s}",
    )
    constraints: dict[str, Annotated[float, Field(ge=-1e12, le=1e12)]] = Field(
        {}, description="limits of metrics by name, such as ttft_p99_s: 0.5; by default the SLO at p99"
    )
    slo: str | None = Field(None, description="limits by name (`simcore slos`), in place of constraints")
    objective: Annotated[
        Annotated[list[Objective], Field(min_length=1)] | Objective, BeforeValidator(_objectives)
    ] = Field(
        LEAST,
        description="of a grid: what is best of the points that hold; several: Pareto front",
    )
    certainty: float = Field(0.95, ge=0.5, le=0.9999, description="how sure a verdict has to be")
    replicas: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None,
        description="runs of a point at most; by default 30, and 100 where a rate is searched; a grid without"
        " limits may have 1, and then nothing is judged",
    )
    sensitivity: bool = Field(
        False, description="whether to run the best points with one thing changed at a time too"
    )
    leave_out_early: bool = Field(
        True,
        description="where a rate is searched: whether, of 8 ways of running or more, those end after few"
        " runs that fail for sure where another one holds",
    )
    cost_per_hour: dict[str, Annotated[float, Field(ge=0.0, le=1e9)]] = Field(
        {}, description="what one device of each kind costs an hour, in any currency"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Whatif":
        if self.slo is not None and self.constraints:
            raise FieldError("slo", "is given beside constraints; only one of them is allowed")
        if (self.points is None) == (self.together == "latin_hypercube"):
            needed = "is missing; a latin_hypercube needs it"
            raise FieldError("points", needed if self.points is None else "is of a latin_hypercube only")
        if self.together == "latin_hypercube":
            for path, values in self.vary.items():
                if isinstance(values, list):
                    raise FieldError(f"vary.{path}", "is a list; a latin_hypercube needs range or log")
        counts = {path: len(values_of(values)) for path, values in self.vary.items()}
        if self.together == "zip" and len({*counts.values()}) > 1:
            raise FieldError("vary", f"zip needs as many values of each, not {shown(list(counts.values()))}")
        number = math.prod(counts.values())
        if self.together == "grid" and number > MOST_POINTS:
            raise FieldError("vary", f"makes {number:,} points; at most {MOST_POINTS:,} are allowed")
        if self.between is not None and self.between[0] > self.between[1]:
            raise FieldError("between", f"is {shown(self.between)}; first <= last is needed")
        _check_bases(self)
        return self


def _check_bases(whatif: Whatif) -> None:
    """Raises FieldError if scenarios, and what is said of them by name, do not fit together."""
    if whatif.base is None and not whatif.bases:
        raise FieldError("base", "is missing; a scenario is needed, or bases, several by name")
    if whatif.base is not None and whatif.bases:
        raise FieldError("base", "is given beside bases; only one of them is allowed")
    if len(whatif.bases) == 1:
        raise FieldError("bases", "has one scenario; several are needed, or base")
    for name, paths in whatif.fields.items():
        _check_names(f"fields.{name}", paths, whatif)
    if isinstance(whatif.metric, dict):
        _check_names("metric", whatif.metric, whatif)
    used = [*whatif.vary, *([] if whatif.over is None else [whatif.over])]
    if idle := [name for name in whatif.fields if name not in used]:
        _check_misspelt(whatif, idle)
        raise FieldError(f"fields.{idle[0]}", f"is neither over nor in vary{nearest(idle[0], used)}")
    for base in whatif.bases:
        _check_set_once(whatif, base, used)


def _check_misspelt(whatif: Whatif, idle: Sequence[str]) -> None:
    """Raises FieldError if a name of `over` or `vary` is nearly one of `fields` that nothing uses."""
    for name in [*([] if whatif.over is None else [whatif.over]), *whatif.vary]:
        if name not in whatif.fields and get_close_matches(name, idle, n=1):
            field = "over" if name == whatif.over else f"vary.{plain(name)}"
            raise FieldError(field, f"{shown(name)} is no name of fields{nearest(name, idle)}")


def _check_names(where: str, given: Mapping[str, Any], whatif: Whatif) -> None:
    if not whatif.bases:
        raise FieldError(where, "is said by base, and this plan has no bases; leave it out")
    if unknown := [name for name in given if name not in whatif.bases]:
        raise FieldError(
            f"{where}.{plain(unknown[0])}", f"no such base{nearest(unknown[0], [*whatif.bases])}"
        )
    if lacking := [name for name in whatif.bases if name not in given]:
        raise FieldError(where, f"says nothing of {', '.join(lacking)}; each of bases is needed")


def _check_set_once(whatif: Whatif, base: str, used: Sequence[str]) -> None:
    setter: dict[str, str] = {}
    for one in used:
        where = f"fields.{one}" if one in whatif.fields else f"vary.{one}" if one in whatif.vary else "over"
        for path in whatif.fields[one][base] if one in whatif.fields else [one]:
            if path in setter:
                raise FieldError(where, f"sets {path} of {base}, and so does {setter[path]}")
            setter[path] = where


def values_of(values: Any) -> list[Any]:
    """Returns the values of a field that varies."""
    return list(values) if isinstance(values, list) else list(values.values())


@dataclass(frozen=True)
class Based:
    """A scenario of a plan. `document`: its fields; `folder`: its paths are relative to it; `where`: its name
    in messages."""

    document: dict[str, Any]
    folder: Path
    where: str

    @property
    def study(self) -> str:
        """Returns the name of its study."""
        return str(self.document.get("study"))


@dataclass(frozen=True)
class Asked:
    """A plan as it is asked. `document`, `folder`, `where`: see `Based`, of its one scenario; `bases`: of
    several scenarios each by its name, where `document` is empty; `file`: the plan's in messages."""

    whatif: Whatif
    question: str
    document: dict[str, Any]
    folder: Path
    where: str
    limits: tuple[Limit, ...]
    bases: Mapping[str, Based] = field(default_factory=dict)
    file: str = ""

    @property
    def name(self) -> str:
        """Returns its name: the plan's, else the scenario's."""
        return self.whatif.name or str(self.document.get("name") or "plan")

    def as_asked(self) -> dict[str, Any]:
        """Returns the plan with every default written out, and the fields of its scenarios in it."""
        own = {**self.whatif.model_dump(mode="json"), "question": self.question}
        if self.bases:
            return {**own, "bases": {name: based.document for name, based in self.bases.items()}}
        return {**own, "base": self.document}

    @property
    def every(self) -> Mapping[str, Based]:
        """Returns its scenarios by name; one alone has no name."""
        return self.bases or {"": Based(self.document, self.folder, self.where)}

    @property
    def rule(self) -> Rule:
        """Returns when to look, and how sure to be."""
        usual = RATE_REPLICAS if self.searches_rate else REPLICAS
        return Rule(self.whatif.certainty, self.whatif.replicas or usual)

    @property
    def seed(self) -> int:
        """Returns the scenario's seed, which says what is wrong with another value when it is read."""
        seed = self.document.get("seed", 0)
        return seed if isinstance(seed, int) else 0

    @property
    def searches_rate(self) -> bool:
        """Whether the question searches a rate."""
        return self.question in ("rate", "strategy")

    def paths(self, name: str, base: str = "") -> list[str]:
        """Returns the dotted paths that a varied or searched name stands for in one of the scenarios."""
        known = self.whatif.fields.get(name)
        return [name] if known is None else known[base]

    def with_settings(self, settings: Mapping[str, Any], base: str = "") -> dict[str, Any]:
        """Returns the fields of a scenario with values of varied fields; beside kind none nothing is left of
        other kinds. Raises InputError."""
        based = self.every[base]
        document = copy.deepcopy(based.document)
        for name, value in sorted(settings.items(), key=lambda setting: setting[1] == NONE):
            for path in self.paths(name, base):
                setting, (place, _, last) = f"{self.file}: vary: {name}", path.rpartition(".")
                put(document, path, copy.deepcopy(value), setting)
                if last in TAGS and value == NONE:
                    put(document, place, {last: value}, setting)
        return document

    def settings(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yields the values of the varied fields, point by point; the last field varies fastest."""
        fields = {path: values_of(values) for path, values in self.whatif.vary.items()}
        if self.whatif.together == "zip":
            chosen: Any = zip(*fields.values(), strict=True) if fields else [()]
        elif self.whatif.together == "latin_hypercube":
            chosen = _sampled(self.whatif, seed)
        else:
            chosen = product(*fields.values())
        for values in chosen:
            yield dict(zip(fields, values, strict=True))


def _sampled(whatif: Whatif, seed: int) -> Iterator[tuple[Any, ...]]:
    """Yields points of a Latin hypercube: each field's range in as many slices as points, each hit once
    (McKay, Beckman, Conover 1979)."""
    # SciPy's statistics take half a second to import.
    from scipy.stats import qmc  # noqa: PLC0415

    assert whatif.points is not None
    fields = [values for values in whatif.vary.values() if not isinstance(values, list)]
    for row in qmc.LatinHypercube(len(fields), seed=seed).random(whatif.points) if fields else [()]:
        yield tuple(values.at(float(share)) for values, share in zip(fields, row, strict=True))


def load_plan(
    path: Path, question: str | None = None, settings: Sequence[str] = (), *, sensitivity: bool = False
) -> Asked:
    """Reads the file of a plan, or a scenario. `question`, `sensitivity`: of the command line, which go
    before the file's; `settings`: KEY=VALUE for fields of the plan, else of its scenario. Raises
    InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds no plan: a mapping of fields is needed")
    folder = path.absolute().parent
    is_scenario = "study" in document and not {"base", "bases"} & set(document)
    if is_scenario:
        document = {"base": document}
    own = [setting for setting in settings if _of_plan(setting, document)]
    for setting in own:
        set_field(document, setting)
    whatif: Whatif = parsed(Whatif, document, str(path), "plan")
    if sensitivity:
        whatif = whatif.model_copy(update={"sensitivity": True})
    fields = [setting for setting in settings if setting not in own]
    every = _scenarios(whatif, path, "" if is_scenario else "base", folder, fields)
    asked = question if question is not None else whatif.question or ("grid" if whatif.vary else None)
    if asked is None:
        raise InputError(f"{path}: question: is missing; one of {', '.join(QUESTIONS)} is needed")
    if asked not in QUESTIONS:
        shown_as = plain(asked) or "''"
        raise InputError(f"--question {shown_as}: no such question{nearest(asked, QUESTIONS)}")
    _check_searched(whatif, asked, str(path))
    for based in every.values():
        _check_study(based.document, asked, based.where)
        _check_fleets(based.document, asked, based.where)
    if whatif.bases:
        return Asked(whatif, asked, {}, folder, str(path), (), every, str(path))
    (one,) = every.values()
    held = () if asked == BREAK_EVEN else _limits(whatif, one, str(path))
    if not held and asked not in ("grid", BREAK_EVEN):
        needed = "limits such as ttft_p99_s: 0.5, or slo in the scenario, are needed"
        raise InputError(f"{path}: constraints: are missing; {needed}")
    _check_single(whatif, asked, held, str(path))
    return Asked(whatif, asked, one.document, one.folder, one.where, held, file=str(path))


def _scenarios(
    whatif: Whatif, path: Path, field: str, folder: Path, settings: Sequence[str]
) -> dict[str, Based]:
    """Returns a plan's scenarios by name, one alone without. `field`: where the file has that one, empty if
    the file is one; `settings`: KEY=VALUE for fields of all. Raises InputError."""
    given = whatif.bases or {"": whatif.base}
    every = {
        name: _scenario(base, path, folder, f"bases.{name}" if name else field)
        for name, base in given.items()
    }
    for based in every.values():
        if whatif.name is not None:
            based.document.setdefault("name", whatif.name)
        for setting in settings:
            set_field(based.document, setting)
    return every


def _scenario(base: Any, path: Path, folder: Path, field: str) -> Based:
    """Returns a plan's scenario. `field`: where the file has it, empty if the file is it. Raises
    InputError."""
    if not isinstance(base, str):
        return Based(copy.deepcopy(base), folder, f"{path}: {field}" if field else str(path))
    file = folder / base if (folder / base).is_file() else file_or_shipped(Path(base))
    if not file.is_file():
        raise InputError(f"{path}: {field}: {plain(base)}: no such file or example{nearest(base, names())}")
    found = read_yaml(file)
    if not isinstance(found, dict):
        raise InputError(f"{path}: {field}: {file} holds no scenario: a mapping of fields is needed")
    return Based(found, file.absolute().parent, str(file))


def _of_plan(setting: str, document: Mapping[str, Any]) -> bool:
    """Whether a setting is of a field of the plan's file, and not of its scenario. Raises InputError if it
    is of neither."""
    key, _, _ = setting.partition("=")
    first, dot, rest = key.partition(".")
    if first == "slo" and dot:
        return False
    if first == "base" and dot and isinstance(document.get("base"), str):
        says = f"base is the name of a scenario, whose fields are set without it: --set {plain(rest)}=..."
        raise InputError(f"--set {plain(key)}: {says}")
    known = field_names()
    every = dict.fromkeys((*Whatif.model_fields, *known))
    if first and first not in every:
        raise InputError(f"--set {plain(key)}: no such field{nearest(first, every)}")
    # A plan that is but a scenario may have fields of both names.
    return first in Whatif.model_fields and (set(document) != {"base"} or first not in known)


# Fields that each question searches.
SEARCHED: Mapping[str, tuple[str, ...]] = {
    "devices": ("devices",),
    "cost": ("devices",),
    "rate": RATES_OF,
    "strategy": RATES_OF,
}


def _check_single(whatif: Whatif, question: str, limits: Sequence[Limit], where: str) -> None:
    if whatif.replicas != 1:
        return
    if question != "grid" or limits:
        of = "a grid with limits (constraints, slo)" if question == "grid" else f"question {question}"
        raise InputError(f"{where}: replicas: is 1; {of} needs 2 to 10000")
    if whatif.sensitivity:
        raise InputError(f"{where}: replicas: is 1; with sensitivity 2 to 10000 are needed")


def _check_study(base: Mapping[str, Any], question: str, where: str) -> None:
    study = base.get("study")
    if not isinstance(study, str) or study not in METRICS:
        raise InputError(f"{where}: study: is {shown(study)}; one of {', '.join(METRICS)} is needed")
    if study != STUDY and question != BREAK_EVEN:
        only = f"question {question} is of study {STUDY}; {BREAK_EVEN} is of any"
        raise InputError(f"{where}: study: is {shown(study)}; {only}")


def _check_fleets(base: Mapping[str, Any], question: str, where: str) -> None:
    if question == BREAK_EVEN and base.get("fleets"):
        says = "of question break_even has one device; question grid takes fleets"
        raise InputError(f"{where}: fleets: a scenario {says}")


# What says how often a point runs, and what it is called.
UNVARIED = ("name", "replicas")


def _check_searched(whatif: Whatif, question: str, where: str) -> None:
    searched = SEARCHED.get(question, ())
    useless = {
        "bases": question != BREAK_EVEN and bool(whatif.bases),
        "over": question not in ("devices", BREAK_EVEN) and whatif.over is not None,
        "between": question not in ("devices", "cost", BREAK_EVEN) and whatif.between is not None,
        "metric": question != BREAK_EVEN and whatif.metric is not None,
        "constraints": question == BREAK_EVEN and bool(whatif.constraints),
        "slo": question == BREAK_EVEN and whatif.slo is not None,
        "sensitivity": question == BREAK_EVEN and whatif.sensitivity,
        "replicas": question == BREAK_EVEN and whatif.replicas is not None,
        "objective": question == BREAK_EVEN and whatif.objective != LEAST,
        "cost_per_hour": question == BREAK_EVEN and bool(whatif.cost_per_hour),
    }
    for name in (name for name, given in useless.items() if given):
        raise InputError(f"{where}: {name}: is of no use to question {question}; leave it out")
    if question in ("devices", BREAK_EVEN) and whatif.over is not None:
        searched = (whatif.over,)
    if question == BREAK_EVEN:
        for name in ("over", "between"):
            if getattr(whatif, name) is None:
                raise InputError(f"{where}: {name}: is missing; question {BREAK_EVEN} needs it")
        if whatif.between and whatif.between[0] == whatif.between[1]:
            raise InputError(f"{where}: between: is {shown(whatif.between)}; first < last is needed")
    elif whatif.between is not None:
        low, high = whatif.between
        if not all(isinstance(end, int) for end in (low, high)) or not 1 <= low <= high <= MOST_BETWEEN:
            needed = f"two whole numbers, 1 <= first <= last <= {MOST_BETWEEN:,}, are needed"
            raise InputError(f"{where}: between: is {shown(whatif.between)}; {needed}")
    for path in whatif.vary:
        if path.partition(".")[0] == "slo":
            raise InputError(f"{where}: vary.{path}: limits do not vary; constraints say them")
        if question != BREAK_EVEN and path in UNVARIED:
            raise InputError(f"{where}: vary.{path}: changes no point; leave it out")
        if path in searched:
            raise InputError(f"{where}: vary.{path}: is what question {question} searches; leave it out")


# What an SLO promises.
PROMISES = ("ttft_s", "tpot_s", "e2e_s")
# Metrics that only a scenario with an SLO has.
OF_SLO = ("slo_attainment", "goodput_per_s")


def _limits(whatif: Whatif, based: Based, where: str) -> tuple[Limit, ...]:
    base, of_base = based.document, based.where
    if whatif.slo is not None:
        if whatif.slo not in preset_names():
            raise InputError(f"{where}: slo: {unknown_name('SLO', whatif.slo, preset_names())}")
        return limits(preset_of(whatif.slo).limits, f"{where}: slo")
    tenants = _tenants(base)
    if whatif.constraints:
        promised = bool(_numbers(base.get("slo")) or tenants)
        of_slo_alone = (name for name in whatif.constraints if name.startswith(OF_SLO))
        if not promised and (name := next(of_slo_alone, None)):
            raise InputError(
                f"{where}: constraints.{name}: is a share of what slo promises; the base has none"
            )
        return limits(whatif.constraints, f"{where}: constraints", tenants)
    given = base.get("slo")
    for name, value in given.items() if isinstance(given, dict) else ():
        if name in PROMISES and value is not None and not (isinstance(value, int | float) and value > 0.0):
            raise InputError(f"{of_base}: slo.{name}: is {shown(value)}; a number above 0 is needed")
    slo = _numbers(given)
    held = of_slo(slo) if not tenants else {}
    for name, own in tenants.items():
        held |= of_slo(slo if own is None else _numbers(own), name)
    return limits(held, f"{where}: slo", tenants)


def _tenants(base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the SLO of each tenant of a scenario that is not checked yet, by its name; None: none of its
    own."""
    workload = base.get("workload")
    given = workload.get("tenants") if isinstance(workload, dict) else None
    tenants = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return {one["name"]: one.get("slo") for one in tenants if isinstance(one.get("name"), str)}


def _numbers(slo: Any) -> dict[str, float]:
    return {
        name: value
        for name, value in (slo.items() if isinstance(slo, dict) else ())
        if isinstance(value, int | float) and name in PROMISES
    }
