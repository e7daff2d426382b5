"""Puts a run together: from the names in a scenario to the device, its prices, the model, the data.

Beside simcore.cli the only module of this package that knows the catalogue of devices.
"""

import csv
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from devices.price import pricer, roofline
from devices.profile import Profile, load_profile
from devices.spec import DeviceSpec, Link, load_device
from simcore import decode, laws, serving
from simcore.decode import HitRow
from simcore.decoder_config import DecoderConfig, load_config
from simcore.files import InputError, is_path, unknown_name
from simcore.hardware import Hardware
from simcore.models import Dtypes, Style
from simcore.ops import Pricer
from simcore.published import Published, ServingPublished, read_published, read_serving_published
from simcore.scenario import DecodeScenario, Scenario
from simcore.serving_scenario import ServingScenario, SharedMemory
from simcore.study import Outcome, Progress, Study, compare

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "scenarios" / "models"
PUBLISHED = ROOT / "validate" / "published"
HITS = PUBLISHED / "alspec_hits.csv"
NO_PROFILE = "none"
DEFAULT_CHUNK = 128


@dataclass(frozen=True)
class Parts:
    """A scenario put together. `described`: device, link, profile and number formats, for the provenance."""

    study: Study
    warnings: list[str]
    described: dict[str, Any]


@dataclass(frozen=True)
class DecodeStudy:
    """A decode scenario put together. `hits`: what ALSpec's tables say of its model; `published`: figures to
    compare with; `profile`: the name of the profile in use."""

    bench: decode.Bench
    hits: list[HitRow]
    published: list[Published]
    profile: str | None
    laws: tuple[str, ...] = ()

    def run(self, progress: Progress) -> Outcome:
        """See Study."""
        return decode.run(self.bench, self.hits, progress)

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """See Study."""
        return decode.tape(self.bench, self.hits, record)

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """See Study."""
        lines, alone = compare(outcome.rows, self.published, self.profile)
        if alone:
            first = alone[0]
            where = f"{first.strategy}, ranks {first.ranks}, {first.context_tokens:,} tokens, {first.metric}"
            outcome.warnings.append(_not_compared(len(alone), len(self.published), where))
        return lines


@dataclass(frozen=True)
class ServingStudy:
    """A serving scenario put together. `fitted`: what is in use that figures were fitted to."""

    bench: serving.Bench
    published: list[ServingPublished]
    fitted: frozenset[str]
    laws: tuple[str, ...] = tuple(f"{name} (serving)" for name in serving.LAWS)

    def run(self, progress: Progress) -> Outcome:
        """See Study."""
        return serving.run(self.bench, progress)

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """See Study."""
        return serving.tape(self.bench, record)

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """See Study."""
        lines, alone = serving.compare(outcome.rows, self.published, self.fitted)
        if alone:
            first = alone[0]
            where = f"{first.strategy}, {first.metric}, {first.source}"
            outcome.warnings.append(_not_compared(len(alone), len(self.published), where))
        return lines


def _not_compared(alone: int, of: int, first: str) -> str:
    return f"{alone} of {of} published figures are not of this run (the first: {first})"


def model_names() -> list[str]:
    """The models of the catalogue, sorted."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def assemble(scenario: Scenario, where: str) -> Parts:
    """Resolves a scenario's names. Raises InputError or ModelError with one line."""
    spec: DeviceSpec = _named(where, "device", load_device, scenario.device)
    if "bf16" not in spec.flops_per_s:
        raise InputError(f"{where}: device: {spec.name} has no flops_per_s of bf16, which activations are")
    link = _link(where, spec, scenario.link)
    config = _model(where, scenario.model)
    profile, warnings = _profile(where, scenario, spec, config)
    hardware = _hardware(scenario, spec, link, profile)
    described = {
        "device": {"name": spec.name, "description": spec.description, "sources": dict(spec.sources)},
        "link": asdict(cast(Any, link)) if link else None,
        "profile": {"name": profile.name, "source": profile.source} if profile else None,
        "formats": _formats(hardware.dtypes),
    }
    study: Study
    if isinstance(scenario, ServingScenario):
        figures = _comparable(where, scenario, read_serving_published, spec, config, warnings)
        study = ServingStudy(serving.Bench(scenario, config, hardware), figures, _fitted(scenario, profile))
    else:
        here = _comparable(where, scenario, read_published, spec, config, warnings)
        name = profile.name if profile else None
        study = DecodeStudy(decode.Bench(scenario, config, hardware), _hits(config.name), here, name)
    warnings += _format_warnings(spec, hardware.dtypes)
    return Parts(study, warnings, described)


def _comparable(
    where: str,
    scenario: Scenario,
    read: Callable[[str, Path], list[Any]],
    spec: DeviceSpec,
    config: DecoderConfig,
    warnings: list[str],
) -> list[Any]:
    """The published figures that are for this model on this device."""
    published = [row for name in scenario.published for row in _published(where, name, read)]
    here = [row for row in published if (row.device, row.model) == (spec.name, config.name)]
    if published and not here:
        warnings.append(f"published: no figure is for {config.name} on {spec.name}; nothing is compared")
    return here


# What the published figures call the constant of `contention: {kind: shared_memory}`, and the length that
# `span_intervals` gives to a draw of arrivals.
FITTED_CONTENTION = "contention at 20 ms"
FITTED_SPAN = "length of the draw"


def _fitted(scenario: ServingScenario, profile: Profile | None) -> frozenset[str]:
    shared = isinstance(scenario.contention, SharedMemory) and scenario.contention.reuse_s > 0.0
    spanned = getattr(scenario.workload.arrivals, "span_intervals", None) is not None
    names = {profile.name if profile else "": profile, FITTED_CONTENTION: shared, FITTED_SPAN: spanned}
    return frozenset(name for name, used in names.items() if used)


def _named(where: str, field: str, load: Any, *names: str) -> Any:
    try:
        return load(*names)
    except InputError as error:
        raise InputError(f"{where}: {field}: {error}") from None


def _link(where: str, spec: DeviceSpec, name: str | None) -> Link | None:
    if name is None and spec.default_link is None:
        return None
    found: Link = _named(where, "link", lambda: spec.link(name))
    return found


def _model(where: str, name: str) -> DecoderConfig:
    if is_path(name, ".json"):
        path = Path(name)
    elif name in model_names():
        path = MODELS / f"{name}.json"
    else:
        raise InputError(f"{where}: model: {unknown_name('model', name, model_names())}")
    try:
        return load_config(path)
    except ValueError as error:
        raise InputError(f"{where}: model: {error}") from None


def _profile(
    where: str, scenario: Scenario, spec: DeviceSpec, config: DecoderConfig
) -> tuple[Profile | None, list[str]]:
    """The profile in use, and what to warn of: a default one that does not hold is left out, one that was
    asked for is refused."""
    asked = scenario.profile
    name = spec.default_profile if asked is None else asked
    if name is None or name == NO_PROFILE:
        return None, []
    profile: Profile = _named(where, "profile", load_profile, spec.name, name)
    reason = _why_not(profile, scenario, config)
    if reason is None:
        return profile, []
    if asked is not None:
        raise InputError(f"{where}: profile: {reason}")
    return None, [f"{reason}; prices come from the roofline instead"]


def _why_not(profile: Profile, scenario: Scenario, config: DecoderConfig) -> str | None:
    iterations = profile.granularity == "iteration"
    if iterations != isinstance(scenario, ServingScenario):
        timed = (
            "whole iterations, which only a serving study takes"
            if iterations
            else ("single ops at one batch, which a serving study cannot take")
        )
        return f"profile {profile.name} has the times of {timed}"
    # A model of one's own may bear a catalogue name: what counts is that it is the same model.
    name = config.name
    if profile.model in model_names():
        theirs = load_config(MODELS / f"{profile.model}.json")
        same = replace(config, name=theirs.name) == theirs
        if same or name == theirs.name:
            name = theirs.name if same else f"{name} with other dimensions"
    batches = scenario.batch if isinstance(scenario, DecodeScenario) else [1]
    reasons = (profile.applies_to(name, batch, profile.ranks[0]) for batch in batches)
    reason = next((reason for reason in reasons if reason), None)
    field = "dtype" if scenario.dtype else "dtypes" if scenario.dtypes else None
    if reason is None and field:
        return f"profile {profile.name} fixes the number formats; leave out {field}, or set profile: none"
    return reason


def _hardware(scenario: Scenario, spec: DeviceSpec, link: Link | None, profile: Profile | None) -> Hardware:
    given = scenario.overheads.model_dump(exclude_none=True)

    # One pricer for each: it remembers the price of every op.
    @cache
    def price(ranks: int, latency_s: float | None, free: bool) -> Pricer:
        here, measured = link, profile
        if profile is not None and not free:
            measured = replace(cast(Any, profile), assumed={})
        if link is not None and latency_s is not None:
            here = replace(cast(Any, link), latency_s=latency_s)
        return pricer(spec, link=here, profile=measured, ranks=ranks)

    def usable(ranks: int) -> str | None:
        if profile is not None and ranks not in profile.ranks:
            have = ", ".join(map(str, profile.ranks))
            return f"profile {profile.name} has ranks {have}, not {ranks} (profile: none would allow it)"
        return None

    return Hardware(
        name=spec.name,
        price=price,
        roofline=roofline(spec, link=link),
        overheads=replace(spec.overheads, **given),
        memory_bytes=spec.memory_bytes,
        max_devices=link.max_devices if link else 1,
        link_latency_s=link.latency_s if link and profile is None else None,
        style=lambda ranks: cast(Style, spec.tensor_parallel_style(ranks)),
        usable=usable,
        dtypes=_dtypes(scenario, profile),
        chunk=(profile.chunk_tokens if profile else None) or DEFAULT_CHUNK,
        parts=profile is not None and profile.granularity == "parts",
        memory_reach={
            "low": spec.hbm_efficiency.high,
            "value": spec.hbm_efficiency.value,
            "high": spec.hbm_efficiency.low,
        },
        whole=profile is not None and profile.granularity == "iteration",
    )


def _dtypes(scenario: Scenario, profile: Profile | None) -> Dtypes:
    each = dict(profile.dtypes) if profile else dict(scenario.dtypes)
    weights = scenario.dtype or "bf16"
    kv = each.pop("kv", weights)
    activation = each.pop("activation", "bf16")
    return Dtypes(weights, kv, activation, tuple(sorted(each.items())))


def _formats(dtypes: Dtypes) -> str:
    """The number formats of a run, in words."""
    others: dict[str, list[str]] = {}
    for name, dtype in (*dtypes.each, ("KV cache", dtypes.kv)):
        if dtype != dtypes.weights:
            others.setdefault(dtype, []).append(name)
    return "; ".join([dtypes.weights, *(f"{dtype}: {', '.join(names)}" for dtype, names in others.items())])


def _format_warnings(spec: DeviceSpec, dtypes: Dtypes) -> list[str]:
    used = {dtypes.weights, *(dtype for _, dtype in dtypes.each)}
    missing = sorted(used - spec.flops_per_s.keys())
    if not missing:
        return []
    names = ", ".join(missing)
    return [f"{spec.name} has no rate for {names}: such weights are read as they are and multiplied as bf16"]


def _hits(model: str) -> list[HitRow]:
    with HITS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    numbers = ("threshold", "hit_rate", "score", "baseline_score")
    return [HitRow(row["task"], *(float(row[name]) for name in numbers)) for row in rows]


def published_names() -> list[str]:
    """The sets of published figures that a scenario can be compared with."""
    return sorted(path.stem for path in PUBLISHED.glob("*.csv") if path != HITS)


def _published(where: str, name: str, read: Callable[[str, Path], list[Any]]) -> list[Any]:
    if is_path(name, ".csv"):
        path = Path(name)
    elif name in published_names():
        path = PUBLISHED / f"{name}.csv"
    else:
        raise InputError(f"{where}: published: {unknown_name('set of figures', name, published_names())}")
    return read(f"{where}: published", path)


VERSIONS: Sequence[str] = ("simcore", "simpy", "numpy", "scipy", "pydantic")


def provenance(
    scenario: Scenario, parts: Parts, outcome: Outcome, *, command: str, wall_s: float
) -> dict[str, Any]:
    """Where the figures of a run come from."""
    versions = {name: _version(name) for name in VERSIONS}
    return {
        "command": command,
        "machine": "sim",
        "wall_time_s": round(wall_s, 3),
        "seed": scenario.seed,
        "price_sources": outcome.sources,
        "laws_checked": [*laws.LAWS, *parts.study.laws, "repeatability"],
        **parts.described,
        "versions": {"python": platform.python_version(), **versions},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
