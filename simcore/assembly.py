"""Puts a run together: resolves the names in a scenario to the device, its prices, the model and the data.

Of the modules directly in this package, only this one and simcore.cli import simcore.devices.
"""

import csv
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

from simcore import compiled
from simcore.devices.completed import assumed_figures
from simcore.devices.fitted import MEASURED, FittedProfile, LimitedPower, SharedUse
from simcore.devices.in_use import DeviceInUse, chosen_device, not_yet, with_profile
from simcore.devices.price import STAYS, roofline
from simcore.devices.profile import Profile
from simcore.devices.spec import DeviceSpec, Link, check_return, load_device
from simcore.devices.write_back import write_back_s
from simcore.input.errors import FieldFaultError, parsed
from simcore.input.fields import OneDevice, count
from simcore.input.files import InputError, enumerated, is_path, nearest, plain, unknown_name
from simcore.machine import laws
from simcore.machine.machine import Overheads
from simcore.models.decoder import Dtypes, Style
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.mixers import SLIDING, STATEFUL
from simcore.models.number_formats import format_notes, format_warnings, number_formats
from simcore.models.prompt import ORIGINAL
from simcore.ops.op import Op, Price, Pricer, multiplied_as
from simcore.scenario import Scenario
from simcore.sim.contention import Rates, max_min_rates, shared_reads
from simcore.sim.kept import KeptPrices, cache_folder, code_digest
from simcore.sim.power import BUSY, BUSY_OF, PowerLimit
from simcore.sim.runs import Start, simulated
from simcore.studies import decode, operators, serving, tiling
from simcore.studies.common import Outcome, Study
from simcore.studies.decode import HitRow
from simcore.studies.decode.scenario import DecodeScenario
from simcore.studies.hardware import Hardware, SingleDevice
from simcore.studies.one_device import DeviceStudy
from simcore.studies.operators.scenario import (
    DecodeAttentionScenario,
    LinearAttentionScenario,
    OperatorScenario,
    PromptScenario,
)
from simcore.studies.published import Published, read_figures
from simcore.studies.serving.engines.presets import pinned, with_engines
from simcore.studies.serving.engines.products import formats_measured
from simcore.studies.serving.host_time import with_engine
from simcore.studies.serving.published import ServingPublished
from simcore.studies.serving.scenario import Groups, ServerGroup, ServingScenario, SharedMemory
from simcore.studies.serving.strategies import ServingStrategy, engine_of, host_of
from simcore.studies.several_devices import OnDevice, SeveralDevices, common_lines
from simcore.studies.tiling.scenario import TilingScenario

PACKAGE = Path(__file__).resolve().parent
MODELS = (PACKAGE / "scenarios" / "models").resolve()
PUBLISHED = (PACKAGE / "validate" / "published").resolve()
HITS = PUBLISHED / "alspec_hits.csv"
DEFAULT_CHUNK = 128
# 90th percentile over median of the absolute value of a normal error.
P90_OVER_MEDIAN = 1.645 / 0.674
# Scenarios of a whole model: they have a link and a number format for each matrix.
ModelScenario = DecodeScenario | ServingScenario
Figure = TypeVar("Figure")


@dataclass(frozen=True)
class Parts:
    """A scenario put together. `described`: device, link, profile and number formats, for the provenance;
    `price`: makes the pricer of the device alone, without the prices of a place; `scenario`: as it runs,
    with the fields of its engines written out; `notes`: notes on how the model was read; `power`: the law of
    the power cap of the one device of a service or of whole prompts, if it is known."""

    study: Study
    warnings: list[str]
    described: dict[str, Any]
    price: Callable[[], Pricer]
    scenario: Scenario
    notes: list[str] = field(default_factory=list)
    power: PowerLimit | None = None


def model_names() -> list[str]:
    """Returns the names of the catalogue's models, sorted."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


@dataclass(frozen=True)
class Place:
    """Where a scenario runs. `start` makes its runs; each case runs `repeats` times. `prices`, if given,
    replace the device's prices: those of a run and its load, or of ops that ran `alone`. `overheads` replace
    the profile's costs of the host's verbs, in seconds (the scenario's own costs stay). `described` returns,
    after the runs, a real machine's entries of the provenance. `jobs`: the most processes that simulate.
    `cap_times`: by how much a card's power cap is lower than that of the card of its profile."""

    name: str = "sim"
    start: Start = simulated
    repeats: int = 1
    prices: Pricer | None = None
    alone: bool = False
    overheads: Mapping[str, float] = field(default_factory=dict)
    described: Callable[[], Mapping[str, Any]] = dict
    jobs: int = 1
    cap_times: float = 1.0

    @property
    def laws(self) -> tuple[str, ...]:
        """The laws checked for a run here. Repeatability is checked only in simulation, since no real machine
        repeats a run to the byte."""
        return (*laws.LAWS, "repeatability") if self.start is simulated else tuple(laws.LAWS)


SIMULATED = Place()


def assemble(scenario: Scenario, where: str, place: Place = SIMULATED, *, first_fleet: int = 0) -> Parts:
    """Resolves a scenario's names. `first_fleet`: the place in its file of the first of its fleets. Raises
    InputError or ModelError with one line."""
    if isinstance(scenario, ServingScenario) and scenario.fleets:
        return _fleets(scenario, where, place, first_fleet)
    every = scenario.devices_in_use
    if len(every) == 1:
        return _assembled(scenario, where, every[0], place)
    if place.start is not simulated:
        raise InputError(f"{where}: device: is several devices; --on {place.name} runs on one")
    return _several([_assembled(scenario, where, one, place) for one in every], scenario, f"{where}: device")


def _several(parts: Sequence[Parts], scenario: Scenario, field: str) -> Parts:
    """Puts the parts of several devices or fleets together. Raises InputError if one is given twice; `field`:
    where they are given."""
    names = [own.described["device"]["title"] for own in parts]
    for name in (each for each in names if names.count(each) > 1):
        raise InputError(f"{field}: {name} is given twice; each may be given once")
    study = SeveralDevices(
        [
            OnDevice(name, own.described["basis"], own.described["origin"], own.study)
            for name, own in zip(names, parts, strict=True)
        ]
    )
    warnings = common_lines([(name, own.warnings) for name, own in zip(names, parts, strict=True)])
    devices: dict[str, Any] = {}
    for name, own in zip(names, parts, strict=True):
        devices |= own.described.get("devices", {name: own.described})
    described = {
        "device": {"name": ", ".join(names)},
        "devices": devices,
        "formats": parts[0].described["formats"],
    }
    if isinstance(scenario, ServingScenario):
        scenario = pinned(scenario)
    return Parts(study, warnings, described, parts[0].price, scenario, parts[0].notes)


def _fleets(scenario: ServingScenario, where: str, place: Place, first: int) -> Parts:
    """Puts a scenario of fleets together. Raises InputError."""
    if place.start is not simulated:
        raise InputError(f"{where}: fleets: are simulated; --on {place.name} runs on one device")
    known: dict[str, tuple[Parts, serving.Bench]] = {}
    parts = [
        _fleet(scenario, where, f"{where}: fleets[{first + number}]", groups, place, known)
        for number, groups in scenario.fleets_in_use
    ]
    return parts[0] if len(parts) == 1 else _several(parts, scenario, f"{where}: fleets")


def _fleet(
    scenario: ServingScenario,
    where: str,
    fleet: str,
    groups: Groups,
    place: Place,
    known: dict[str, tuple[Parts, serving.Bench]],
) -> Parts:
    """Puts a scenario together for one of its fleets. `fleet`: its name in messages; `known`: the parts of
    each device, with a bench whose models and prices groups of one fleet share."""
    every: list[Parts] = []
    found: list[serving.Group] = []
    shared: dict[str, serving.Bench] = {}
    for number, group in enumerate(groups):
        alone, written = _of_group(scenario, group), f"{fleet}[{number}]"
        key = repr((group.one, alone.profile, alone.link))
        if key not in known:
            known[key] = _on_one(alone, where, written, group, place)
        own, bench = known[key]
        bench = shared.setdefault(key, replace(bench, models={}, prices={}, groups={}))
        every.append(own)
        found.append(
            serving.Group(
                _group_name(group, own.described["device"]["title"]),
                group.one.base,
                replace(bench, scenario=alone),
                group.servers[0],
                group.ranks[0],
                partial(_strategies, where=written, group=group, memory_bytes=bench.hardware.memory_bytes),
            )
        )
    scenario = pinned(scenario).model_copy(update={"fleets": [list(groups)]})
    first = found[0].bench
    whole = serving.Bench(scenario, first.config, first.hardware, tuple(found))
    for one in found:
        one.strategies(scenario)
    titles = [
        own.described["device"]["title"] + (f", {_prices_of(group)}" if _prices_of(group) else "")
        for own, group in zip(every, groups, strict=True)
    ]
    described = {
        "device": {"name": whole.name, "title": whole.name},
        "devices": {title: own.described for title, own in zip(titles, every, strict=True)},
        "link": None,
        "basis": _listed_once(own.described["basis"] for own in every),
        "origin": _listed_once(own.described["origin"] for own in every),
        "formats": every[0].described["formats"],
    }
    study = DeviceStudy(serving, whole, whole.name, [], laws=every[0].study.laws)
    warnings = common_lines([(title, own.warnings) for title, own in zip(titles, every, strict=True)])
    return Parts(study, warnings, described, every[0].price, scenario, every[0].notes)


def _listed_once(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def _of_group(scenario: ServingScenario, group: ServerGroup) -> ServingScenario:
    """Returns the scenario of a group of servers by itself."""
    own = {
        "device": [group.device],
        "fleets": [],
        "devices": [group.devices],
        "profile": group.profile or scenario.profile,
        "link": group.link or scenario.link,
    }
    return scenario.model_copy(update=own)


def _on_one(
    scenario: ServingScenario, where: str, written: str, group: ServerGroup, place: Place
) -> tuple[Parts, serving.Bench]:
    """Puts a scenario together for the device of a group of servers; a fault there is one of the group, whose
    name in messages is `written`."""
    try:
        parts = _assembled(scenario, where, group.one, place)
    except InputError as error:
        message = str(error)
        for name in ("device", "profile", "link"):
            begins = f"{where}: {name}: "
            if message.startswith(begins) and (name == "device" or getattr(group, name) is not None):
                message = message.replace(begins, f"{written}.{name}: ", 1)
        raise InputError(message) from None
    study: Any = parts.study
    return parts, study.bench


def _group_name(group: ServerGroup, device: str) -> str:
    """Returns the name of a group of servers: their number, their device, and what tells them apart."""
    differing = [_prices_of(group), *(f"{name} {plain(value)}" for name, value in group.strategy.items())]
    words = ", ".join(text for text in differing if text)
    ranks = f" TP{group.ranks[0]}" if group.ranks[0] > 1 else ""
    return f"{group.servers[0]} {device}{ranks}{f' ({words})' if words else ''}"


def _prices_of(group: ServerGroup) -> str:
    """Returns the profile and the link that a group of servers has of its own, in words."""
    own = {"profile": group.profile, "link": group.link}
    return ", ".join(f"{name} {plain(value)}" for name, value in own.items() if value is not None)


def _strategies(
    scenario: ServingScenario, *, where: str, group: ServerGroup, memory_bytes: float
) -> list[ServingStrategy]:
    """Returns the strategies of a scenario as a group of servers runs them. Raises InputError."""
    strategies = [_of_servers(strategy, group, where) for strategy in scenario.strategies]
    try:
        alone = scenario.model_copy(update={"strategies": strategies})
        return list(with_engines(alone, group.one.base, memory_bytes).strategies)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _of_servers(strategy: ServingStrategy, group: ServerGroup, where: str) -> ServingStrategy:
    """Returns a strategy with the fields that a group of servers has otherwise. Raises InputError."""
    cls: Any = type(strategy)
    where = f"{where}.strategy"
    given = {} if list(strategy.ranks) == group.ranks else {"ranks": list(group.ranks)}
    for name in group.strategy:
        if name in ("kind", "engine", "ranks") or name not in cls.model_fields:
            allowed = [each for each in cls.model_fields if each not in ("kind", "engine", "ranks")]
            says = f"no such field{nearest(str(name), allowed)}"
            raise FieldFaultError(f"{where}.{plain(name)}: {says}").at(
                f"{_field(where)}.{name}", unknown=True
            )
    if not given and not group.strategy:
        return strategy
    own: Any = strategy
    fields = {**own.model_dump(exclude_unset=True), "kind": strategy.kind, **given, **group.strategy}
    try:
        found: ServingStrategy = parsed(cls, fields, where)
    except FieldFaultError as error:
        if not error.path:
            raise
        message = str(error).replace(f"{where}: ", f"{where}.", 1)
        raise FieldFaultError(message).at(f"{_field(where)}.{error.path}", unknown=error.unknown) from None
    if count(own) != count(cast(Any, found)):
        raise InputError(f"{where}: makes other variants than strategies; one value of each field is needed")
    return found


def _field(where: str) -> str:
    """Returns the field that a message's beginning ends with."""
    return where.rpartition(": ")[2]


def _assembled(scenario: Scenario, where: str, one: OneDevice, place: Place) -> Parts:
    """Puts a scenario together for one of its devices."""
    device: DeviceInUse = _named(where, "device", lambda: chosen_device(one.base, one.change, one.name))
    parts = _on_device(scenario, where, device, place)
    return replace(parts, warnings=[*_assumed(device.spec), *parts.warnings])


def _assumed(spec: DeviceSpec) -> list[str]:
    """Returns a warning if a device's file leaves figures out."""
    # A link is named once, however many of its figures are assumed.
    names = dict.fromkeys(".".join(figure.split(".")[:2]) for figure in assumed_figures(spec.sources))
    return [f"{spec.name}: assumed, not given by its file: {', '.join(names)}"] if names else []


def _on_device(scenario: Scenario, where: str, device: DeviceInUse, place: Place) -> Parts:
    spec = device.spec
    if isinstance(scenario, LinearAttentionScenario | DecodeAttentionScenario | PromptScenario):
        return _operators(where, scenario, device, place)
    if isinstance(scenario, TilingScenario):
        return _tiling(where, scenario, device, place)
    if "bf16" not in spec.flops_per_s:
        raise InputError(f"{where}: device: {spec.name} has no flops_per_s of bf16, which activations are")
    if isinstance(scenario, ServingScenario):
        try:
            scenario = with_engines(scenario, device.base, spec.memory_bytes)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    link = _link(where, spec, scenario.link)
    link_name = scenario.link or spec.default_link
    if link is not None and isinstance(scenario, ServingScenario):
        link = _of_libraries(where, link, link_name)
    config = _model(where, scenario.model, served=isinstance(scenario, ServingScenario))
    if place.start is not simulated and config.quantization and scenario.dtype is None:
        of = f"its quantization_config ({config.quantization.method}) has formats that only sim prices"
        raise InputError(f"{where}: model: {of}; dtype: bf16 runs it as if it had none")
    device, warnings = _profile(where, scenario, device, config)
    hardware = _hardware(where, scenario, device, link, place, config)
    price = partial(hardware.price, 1, None, True)
    # The key is a text of all figures of the device and its profile: it is made only if prices are kept.
    in_graph_s = _in_graph_s(scenario, hardware.overheads)
    if (folder := cache_folder()) is not None and not hardware.measured:
        kept = KeptPrices(_price_key(device, link, in_graph_s), folder)
        hardware = replace(hardware, kept=kept)
    if (given := place.prices) is not None:
        power = hardware.power if place.alone else None
        hardware = replace(hardware, price=lambda ranks, latency_s, free: given, kept=None, power=power)
    hardware = replace(hardware, price=_all_in_graphs(hardware.price, in_graph_s, _left_s(device, place)))
    described = _described(device, link, _formats(hardware.dtypes), hardware.overheads, link_name)
    weights = {hardware.dtypes.weights, *(dtype for _, dtype in hardware.dtypes.each)}
    warnings += _check_power(where, scenario, device, hardware.power, weights)
    described["power_cap"] = _power_described(device, hardware.power)
    if isinstance(scenario, ServingScenario):
        figures = _figures(where, scenario, ServingPublished, spec, warnings, config)
        fitted = _fitted(scenario, device.profile)
        laws = tuple(f"{name} (serving)" for name in serving.LAWS)
        prices, roofline = hardware.price, hardware.roofline
        hardware = replace(hardware, price=cache(lambda *of: with_engine(prices(*of), roofline)))
        bench = serving.Bench(scenario, config, hardware)
        study = DeviceStudy(serving, bench, device.title, figures, fitted, laws)
    else:
        here = _figures(where, scenario, Published, spec, warnings, config)
        if scenario.part == "layer":
            # The profile and the figures were already chosen by the whole model.
            config = config.first_layers(1)
        own = decode.Bench(scenario, config, hardware, _hits(config.name), _rival(where, scenario, hardware))
        study = DeviceStudy(decode, own, device.title, here, _name_of(device.profile))
    warnings += [*_format_warnings(spec, hardware.dtypes), *_idle_kernels(scenario, hardware.multiplied)]
    warnings += format_warnings(scenario.dtype, scenario.dtypes, config)
    notes, serves = format_notes(scenario.dtype, config), isinstance(scenario, ServingScenario)
    return Parts(study, warnings, described, price, scenario, notes, hardware.power if serves else None)


def _idle_kernels(scenario: Scenario, dtypes: Dtypes) -> Iterator[str]:
    """Yields a warning for each host of a scenario's own with kernels that its formats have no use for."""
    for place, strategy in enumerate(scenario.strategies if isinstance(scenario, ServingScenario) else ()):
        if engine_of(strategy) is not None:
            continue
        host, where = host_of(strategy), f"strategies[{place}].host"
        used = host.in_formats(dtypes)
        if idle := [name for name in host.quantizes if name not in used.quantizes]:
            says = f"{enumerated(idle)} {'has' if len(idle) == 1 else 'have'} no inputs of 8 bits here"
            yield f"{where}.quantizes: {says}: nothing is added"
        if host.products_of != used.products_of:
            formats = enumerated(sorted(formats_measured(host.products_of)))
            yield f"{where}.products_of: no product here is in {formats}: nothing changes"


def _rival(where: str, scenario: DecodeScenario, hardware: Hardware) -> decode.Bench | None:
    """Returns the bench of a scenario's second model, at the prices of the first; None if it names none.
    Raises InputError."""
    if scenario.rival_model is None:
        return None
    try:
        config = _model(where, scenario.rival_model)
    except InputError as error:
        raise InputError(str(error).replace(": model: ", ": rival_model: ", 1)) from None
    if hardware.measured:
        # A real machine runs the first model alone.
        return None
    if hardware.parts:
        raise InputError(f"{where}: rival_model: needs prices of single ops")
    if scenario.part == "layer":
        raise InputError(f"{where}: rival_model: is for part: model")
    if scenario.rival_model == scenario.model:
        raise InputError(f"{where}: rival_model: is {scenario.rival_model}, as model; another one is needed")
    dtypes = number_formats(scenario.dtype, scenario.dtypes, config)
    return decode.Bench(scenario, config, replace(hardware, dtypes=dtypes))


def _in_graph_s(scenario: Scenario, overheads: Overheads) -> float:
    """Returns the time of a kernel in a graph beyond its price, in seconds: of steps that serve, their own if
    it is known, and the scenario does not give that of all graphs."""
    if not isinstance(scenario, ServingScenario):
        return overheads.in_graph_s
    if scenario.overheads.in_step_s is not None:
        return overheads.in_step_s
    if scenario.overheads.in_graph_s is not None:
        return overheads.in_graph_s
    return overheads.in_step_s or overheads.in_graph_s


def _price_key(device: DeviceInUse, link: Link | None, in_graph_s: float) -> str:
    """Returns a text of all inputs to the prices of a model's ops, except the code and the ops."""
    profile = device.profile
    known = None if profile is None else hashlib.sha256(repr(profile).encode()).hexdigest()
    return repr((device.spec, device.measured_on, device.base, dict(device.change), link, known, in_graph_s))


def _operators(where: str, scenario: OperatorScenario, device: DeviceInUse, place: Place) -> Parts:
    """Puts a study of operators together: no link, only profiles that hold for any op; a model for prompts
    alone."""
    spec = device.spec
    config = _with_states(where, scenario) if isinstance(scenario, PromptScenario) else None
    _named(where, "dtype", spec.peak_flops_per_s, scenario.dtype)
    device, warnings = _fits(where, scenario, device)
    overheads = _overheads(where, scenario, device, place)
    single = _single_device(device, place, overheads)
    here = _figures(where, scenario, operators.OperatorPublished, spec, warnings, config)
    described = _described(device, None, scenario.dtype, overheads)
    power = None
    if config is not None:
        # Whole prompts one after another load a card as a service does; one operator hardly for long.
        power = _power_limit(device, _fits_of(device), place.cap_times)
        warnings += _check_power(where, scenario, device, power, {scenario.dtype})
        described["power_cap"] = _power_described(device, power)
        # Times of the run itself have that in them.
        single = replace(single, power=power if place.prices is None or place.alone else None)
    study = DeviceStudy(
        operators,
        operators.Bench(scenario, single, spec.processors, config),
        device.title,
        [figure for figure in here if figure.method in scenario.methods],
        _name_of(device.profile),
        joined=operators.each_once,
        notes=operators.errors,
    )
    return Parts(study, warnings, described, lambda: single.choose, scenario, power=power)


def _with_states(where: str, scenario: PromptScenario) -> DecoderConfig:
    """Returns the model of a prompt study, cut to its layers. Raises InputError for one without linear
    attention, or with fewer layers."""
    config = _model(where, scenario.model)
    if config.linear is None:
        raise InputError(f"{where}: model: {config.name} has no layer of linear attention")
    if ORIGINAL in scenario.methods and not {*config.layer_mixers} <= {*STATEFUL}:
        only = "published code is of RetNet and of TransNormerLLM, whose layers are all linear"
        raise InputError(f"{where}: methods: {ORIGINAL} is none of {config.name}: {only}")
    layers = scenario.layers or config.layers
    if layers > config.layers:
        raise InputError(f"{where}: layers: is {layers}; {config.name} has {config.layers}")
    return config.first_layers(layers)


def _tiling(where: str, scenario: TilingScenario, device: DeviceInUse, place: Place) -> Parts:
    """Puts a tiling study together: one device, only profiles that hold for any op."""
    _named(where, "dtype", device.spec.peak_flops_per_s, scenario.dtype)
    device, warnings = _fits(where, scenario, device)
    profile = device.profile
    overheads = _overheads(where, scenario, device, place)
    if scenario.overheads.in_graph_s is None:
        # A profile's in_graph_s was measured on a decoder's graphs, with many kinds of kernels. A graph of a
        # few kinds takes the sum of its kernels' own times (validate/measured/h200_tiling_step_graphs.csv).
        overheads = replace(overheads, in_graph_s=0.0)
    if scenario.launching == "eager":
        if profile is not None and profile.granularity == MEASURED:
            warnings = [
                *warnings,
                f"launching: eager: profile {profile.name} has times of captured graphs, and the host's"
                " launch of each kernel is not in them; 'none' has",
            ]
        # Eager, the host's launch time is in each kernel's price instead of the graph's. Fits are of kernels
        # that were launched one by one: with a profile the graph keeps its launch_s too.
        kernel_s = overheads.whole_launch_s(1)
        if kernel_s > 1.0:
            raise InputError(
                f"{where}: overheads: launch_s and launch_kernel_s make {kernel_s:g} s of a launch with"
                " launching: eager; at most 1 second is allowed"
            )
        eager = replace(cast(Any, device.spec), kernel_s=kernel_s)
        there = replace(cast(Any, device.measured_on), kernel_s=eager.kernel_s) if device.carries else eager
        device = replace(device, spec=eager, measured_on=there)
        # Eager runs capture no graph, and no kernel reads a size from device memory.
        launch_s = overheads.launch_s if profile else 0.0
        overheads = replace(overheads, launch_s=launch_s, launch_kernel_s=0.0, size_s=0.0)
    single = _single_device(device, place, overheads)
    if isinstance(profile, FittedProfile) and place.prices is None and profile.in_cache is not profile:
        warm = device.pricer(profile=profile.in_cache)
        single = replace(single, in_cache=warm, stays_bytes=STAYS * device.spec.l2_bytes)
    if scenario.launching != "eager":
        longer = partial(in_graphs, in_graph_s=overheads.in_graph_s)
        single = replace(
            single, price=longer(single.price), in_cache=single.in_cache and longer(single.in_cache)
        )
    here = _figures(where, scenario, tiling.TilingPublished, device.spec, warnings)
    described = _described(device, None, scenario.dtype, overheads)
    described["launching"] = scenario.launching
    laws, bench = (tiling.LAW, tiling.AT_ONCE), tiling.Bench(scenario, single)
    study = DeviceStudy(tiling, bench, device.title, here, laws=laws, notes=tiling.inside)
    return Parts(study, warnings, described, lambda: single.choose, scenario)


def _single_device(device: DeviceInUse, place: Place, overheads: Overheads) -> SingleDevice:
    priced, spec, profile = device.pricer(), device.spec, _fits_of(device)
    return SingleDevice(
        name=device.title,
        price=place.prices or priced,
        choose=priced,
        roofline=roofline(spec),
        overheads=overheads,
        memory_bytes=spec.memory_bytes,
        profile=profile.name if profile else None,
        rates=_rates_of(profile),
        start=place.start,
        repeats=place.repeats,
        jobs=place.jobs,
    )


def in_graphs(price: Pricer, in_graph_s: float, left_s: Callable[[Op], float] | None = None) -> Pricer:
    """Returns prices of ops that follow others in a graph: `in_graph_s` seconds more per kernel, and what an
    op makes the next one wait (`left_s`). Prices that are assumed (free ops) and prices of collectives stay
    as they are."""
    if in_graph_s == 0.0 and left_s is None:
        return price

    @lru_cache(maxsize=1 << 16)
    def longer(op: Op) -> Price:
        found = price(op)
        if found.source == "assumed" or op.ranks > 1:
            return found
        found = found.longer(in_graph_s * op.kernels)
        more_s = left_s(op) if left_s else 0.0
        return found.leaving(more_s) if more_s else found

    return longer


Prices = Callable[[int, float | None, bool], Pricer]


def _all_in_graphs(prices: Prices, in_graph_s: float, left_s: Callable[[Op], float] | None) -> Prices:
    return cache(lambda ranks, latency_s, free: in_graphs(prices(ranks, latency_s, free), in_graph_s, left_s))


def _left_s(device: DeviceInUse, place: Place) -> Callable[[Op], float] | None:
    """Returns what ops make the next ones wait, if their prices are of ops alone: neither of whole runs nor
    floors, which have all traffic of an op in them."""
    fits = _fits_of(device)
    alone = fits is not None and fits.granularity == MEASURED if place.prices is None else place.alone
    return partial(write_back_s, device.spec) if alone else None


def _rates_of(profile: FittedProfile | None) -> Rates:
    """Returns how concurrent graphs of one program slow each other down: as measured if the profile has a
    measurement, else by max-min fairness."""
    shared = profile.contention if profile else None
    return shared_reads(0.0, shared.bandwidth_share, shared.tail_overlap_s) if shared else max_min_rates


def _fits_of(device: DeviceInUse) -> FittedProfile | None:
    return device.profile if isinstance(device.profile, FittedProfile) else None


def _described(
    device: DeviceInUse, link: Link | None, formats: str, overheads: Overheads, link_name: str | None = None
) -> dict[str, Any]:
    """Returns the provenance's entries for the device, its prices and the costs of its verbs; `link_name`: of
    the link, if there is one."""
    spec, profile = device.spec, device.profile
    return {
        "device": {
            "name": spec.name,
            "title": device.title,
            "description": spec.description,
            "sources": dict(spec.sources),
        },
        "link": {"name": link_name, **asdict(cast(Any, link))} if link else None,
        "profile": {"name": profile.name, "source": profile.source} if profile else None,
        "basis": device.basis,
        "origin": device.origin,
        "formats": formats,
        "overheads": asdict(overheads),
    }


def _figures(
    where: str,
    scenario: Scenario,
    kind: type[Figure],
    spec: DeviceSpec,
    warnings: list[str],
    config: DecoderConfig | None = None,
) -> list[Figure]:
    """Returns the published figures of this device, and of this model if one is given. Adds a warning if
    there are figures but none of them fits."""
    published: list[Any] = [each for name in scenario.published for each in _published(where, name, kind)]
    here = [each for each in published if each.device == spec.name]
    of = spec.name
    if config is not None:
        here = [each for each in here if each.model == config.name]
        of = f"{config.name} on {spec.name}"
    if published and not here:
        warnings.append(f"published: no figure is for {of}; nothing is compared")
    return here


def _fits(
    where: str, scenario: OperatorScenario | TilingScenario, device: DeviceInUse
) -> tuple[DeviceInUse, list[str]]:
    """Returns the device with its fitted profile, and warnings. A table of one model's op times is refused if
    the scenario names it, and passed over if it is the device's default."""

    def reason(profile: Profile) -> str:
        has = f"{profile.name} has the op times of {profile.model}"
        return f"{has}; a fitted profile or 'none' is needed"

    found, warnings, passed_over = _named(where, "profile", with_profile, device, scenario.profile, reason)
    if passed_over and found.profile is None:
        return device, not_yet(device)
    return found, warnings


def _profile(
    where: str, scenario: ModelScenario, device: DeviceInUse, config: DecoderConfig
) -> tuple[DeviceInUse, list[str]]:
    """Returns the device with its profile, and warnings. A default profile that does not hold or does not
    exist yet is left out; one that the scenario names is refused."""
    against = partial(_why_not, scenario=scenario, config=config)
    found, warnings, reason = _named(where, "profile", with_profile, device, scenario.profile, against)
    if reason and found.profile is None:
        return found, [f"{reason}; prices come from the roofline instead"]
    return found, [reason, *warnings] if reason else warnings


# The published figures' names for the constant of `contention: {kind: shared_memory}`, and for the length
# that `span_intervals` gives to a draw of arrivals.
FITTED_CONTENTION = "contention at 20 ms"
FITTED_SPAN = "length of the draw"


def _fitted(scenario: ServingScenario, profile: Profile | FittedProfile | None) -> frozenset[str]:
    """Returns the names of the profile and constants in use that may be fitted to published figures."""
    shared = isinstance(scenario.contention, SharedMemory) and scenario.contention.reuse_s > 0.0
    spanned = getattr(scenario.workload.arrivals, "span_intervals", None) is not None
    constants = {FITTED_CONTENTION: shared, FITTED_SPAN: spanned}
    return _name_of(profile) | {name for name, used in constants.items() if used}


def _name_of(profile: Profile | FittedProfile | None) -> frozenset[str]:
    return frozenset() if profile is None else frozenset({profile.name})


def _named(where: str, field: str, load: Any, *names: Any) -> Any:
    try:
        return load(*names)
    except InputError as error:
        raise InputError(f"{where}: {field}: {error}") from None


def _link(where: str, spec: DeviceSpec, name: str | None) -> Link | None:
    if name is None and spec.default_link is None:
        return None
    found: Link = _named(where, "link", lambda: spec.link(name))
    return found


def _of_libraries(where: str, link: Link, name: str | None) -> Link:
    """Returns the link of a serving study: engines meet by collectives of libraries."""
    try:
        return link.by_libraries()
    except InputError as error:
        raise InputError(f"{where}: device: links.{name}.{error}") from None


def model_path(name: str) -> Path:
    """Returns the config file of a model: a path, or that of a model of the catalogue."""
    return Path(name) if is_path(name, ".json") else MODELS / f"{name}.json"


def _model(where: str, name: str, *, served: bool = False) -> DecoderConfig:
    if not is_path(name, ".json") and name not in model_names():
        raise InputError(f"{where}: model: {unknown_name('model', name, model_names())}")
    try:
        config = load_config(model_path(name))
    except ValueError as error:
        raise InputError(f"{where}: model: {error}") from None
    if served and SLIDING in config.layer_mixers:
        raise InputError(f"{where}: model: {config.name} has layers with a window, which are not served yet")
    return config


def _why_not(profile: Profile, scenario: ModelScenario, config: DecoderConfig) -> str | None:
    iterations = profile.granularity == "iteration"
    if iterations != isinstance(scenario, ServingScenario):
        timed = (
            "whole iterations, which only a serving study takes"
            if iterations
            else ("single ops at one batch, which a serving study cannot take")
        )
        return f"profile {profile.name} has the times of {timed}"
    # A user's model may have a catalogue name: only equal dimensions make it the same model.
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
    if reason is None and config.quantization:
        theirs_are = f"the model's quantization_config ({config.quantization.method}) has others"
        return f"profile {profile.name} fixes the number formats, and {theirs_are}; profile: none takes these"
    return reason


def _hardware(
    where: str,
    scenario: ModelScenario,
    device: DeviceInUse,
    link: Link | None,
    place: Place,
    config: DecoderConfig,
) -> Hardware:
    spec, profile = device.spec, device.profile
    table = profile if isinstance(profile, Profile) else None
    fitted = _fits_of(device)
    shared = fitted.contention if fitted else None

    # One pricer per set of arguments, because a pricer caches the price of every op.
    @cache
    def price(ranks: int, latency_s: float | None, free: bool) -> Pricer:
        here, known = link, profile
        if table is not None and not free:
            known = replace(cast(Any, table), assumed={})
        if link is None or latency_s is None:
            return device.pricer(link=here, profile=known, ranks=ranks)
        here = replace(cast(Any, link), latency_s=latency_s)
        crossing, local = device.pricer(link=here, profile=known, ranks=ranks), price(ranks, None, free)
        # A local op costs the same on every link.
        return lambda op: crossing(op) if op.axis or op.parts else local(op)

    def usable(ranks: int) -> str | None:
        if table is not None and ranks not in table.ranks:
            have = ", ".join(map(str, table.ranks))
            return f"profile {table.name} has ranks {have}, not {ranks} (profile: none would allow it)"
        return None

    return Hardware(
        name=device.title,
        price=price,
        roofline=roofline(spec, link=link),
        overheads=_overheads(where, scenario, device, place),
        of_our_schedule=OF_OUR_SCHEDULE - {*place.overheads, *scenario.overheads.given()},
        memory_bytes=spec.memory_bytes,
        hbm_bytes_per_s=spec.hbm_bytes_per_s,
        max_devices=link.max_devices if link else 1,
        link_latency_s=link.latency_s if link and table is None else None,
        style=lambda ranks: cast(Style, spec.tensor_parallel_style(ranks)),
        usable=usable,
        dtypes=_dtypes(scenario, config, table),
        multiplies=frozenset(spec.flops_per_s),
        chunk=(table.chunk_tokens if table else None) or DEFAULT_CHUNK,
        parts=table is not None and table.granularity == "parts",
        memory_bandwidth_share=_memory_reach(spec, shared),
        tail_overlap_s=shared.tail_overlap_s if shared else inf,
        kernels_between=shared.kernels_between if shared else 1.0,
        contention_error=_contention_error(shared),
        whole=table is not None and table.granularity == "iteration",
        start=place.start,
        repeats=place.repeats,
        processors=spec.processors,
        jobs=place.jobs,
        power=_power_limit(device, fitted, place.cap_times),
        normed_sums=link is not None and link.push_normed_s is not None and table is None,
        vendor=spec.vendor,
        board_power_w=spec.board_power_w,
    )


def _overheads(where: str, scenario: Scenario, device: DeviceInUse, place: Place) -> Overheads:
    """Returns the costs of verbs: the scenario's, else the place's, the profile's, the device's. Raises
    InputError if a launch would begin on the device before the host began it."""
    measured = {**device.overheads, **place.overheads}
    found = replace(device.spec.overheads, **{**measured, **scenario.overheads.given()})
    if scenario.overheads.return_s is not None:
        try:
            check_return(asdict(found))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    return found


# Costs of a launch that a calibration measures by this project's own schedule.
OF_OUR_SCHEDULE = frozenset({"batch_s", "sequence_s", "prompt_s", "each_prompt_s"})


def _power_limit(device: DeviceInUse, profile: FittedProfile | None, times: float) -> PowerLimit | None:
    """Returns the power cap of a card, if its effect was measured on such a card or on one from which its op
    times are carried over at the same board power; `times`: see `Place`. Another board power is another
    cap."""
    power = profile.power if profile else None
    if power is None:
        return None
    before_w, cap_w = device.measured_on.board_power_w, device.spec.board_power_w
    if device.base != device.measured_on.name and load_device(device.base).board_power_w != before_w:
        return None
    return law_of(power, times * (before_w / cap_w if before_w and cap_w else 1.0))


def _check_power(
    where: str, scenario: Scenario, device: DeviceInUse, limit: PowerLimit | None, weights: Set[str]
) -> list[str]:
    """Returns warnings about a power cap, and of services and prompts about one that is not known. `weights`:
    their number formats. Raises InputError for a cap below what an idle card takes."""
    profile = _fits_of(device)
    where_so = "near saturation" if isinstance(scenario, ServingScenario) else "with long prompts"
    uses = isinstance(scenario, ServingScenario | PromptScenario)
    if limit is None and uses and profile is not None and profile.power is not None:
        only = f"how far {device.title} throttles its clock under load was not measured"
        return [f"{only}: {where_so} it is predicted too fast beside {device.measured_on.name}"]
    if limit is None:
        if not uses or "board_power_w" not in device.change:
            return []
        return [f"device.change.board_power_w: changes no time: how {device.base} throttles is not known"]
    cap_w, name = device.spec.board_power_w or 0.0, "device.change.board_power_w"
    if limit.idle >= 1.0:
        idle_w = limit.idle * cap_w
        raise InputError(f"{where}: {name}: {cap_w:g} W is no more than an idle card takes, {idle_w:.1f} W")
    found = []
    kept = sorted(weights - {*BUSY_OF})
    if uses and "board_power_w" in device.change and kept:
        only = f"only products that are multiplied in {enumerated(sorted(BUSY))} slow down by it"
        found.append(f"{name}: products in {enumerated(kept)} keep their time: {only}")
    if limit.others > 1.0:
        says = f"{cap_w:g} W is less than ops take that memory bounds, {limit.others * cap_w:.0f} W"
        found.append(f"{name}: {says}: they would slow down too, which is not modelled")
    return found


def _power_described(device: DeviceInUse, power: PowerLimit | None) -> dict[str, Any] | None:
    if power is None:
        return None
    law = asdict(cast(Any, power))
    return {**law, "measured_on": device.measured_on.name, "formats": sorted(BUSY)}


def law_of(power: LimitedPower, times: float = 1.0) -> PowerLimit:
    """Returns the law with a profile's constants; `times`: by how much the cap is lower than the measured
    one."""
    return PowerLimit(power.arithmetic, power.others, power.idle, power.over_s).lower(times)


def _memory_reach(spec: DeviceSpec, shared: SharedUse | None) -> dict[str, float]:
    """Returns the share of memory bandwidth in reach, by end of the prices' intervals; a measured share is
    the same at all ends (`_contention_error` has its interval)."""
    if shared is not None:
        return dict.fromkeys(("low", "value", "high"), shared.bandwidth_share)
    known = spec.hbm_efficiency
    return {"low": known.high, "value": known.value, "high": known.low}


def _contention_error(shared: SharedUse | None) -> dict[str, float]:
    """Returns the factor by which concurrent graphs may be faster than the law, by end of the intervals. 90 %
    of normal errors are smaller than P90_OVER_MEDIAN times their median."""
    off = 1.0 + (P90_OVER_MEDIAN * shared.error_pct / 100.0 if shared else 0.0)
    return {"low": off, "value": 1.0, "high": 1.0 / off}


def _dtypes(scenario: ModelScenario, config: DecoderConfig, profile: Profile | None) -> Dtypes:
    if profile is None:
        return number_formats(scenario.dtype, scenario.dtypes, config)
    each = dict(profile.dtypes)
    weights = scenario.dtype or "bf16"
    kv = each.pop("kv", weights)
    activation = each.pop("activation", "bf16")
    return Dtypes(weights, kv, activation, tuple(sorted(each.items())))


def _formats(dtypes: Dtypes) -> str:
    """Returns the number formats of a run, in words."""
    others: dict[str, list[str]] = {}
    for name, dtype in (*dtypes.each, ("KV cache", dtypes.kv)):
        if dtype != dtypes.weights:
            others.setdefault(dtype, []).append(name)
    return "; ".join([dtypes.weights, *(f"{dtype}: {', '.join(names)}" for dtype, names in others.items())])


def _format_warnings(spec: DeviceSpec, dtypes: Dtypes) -> list[str]:
    used = {dtypes.weights, *(dtype for _, dtype in dtypes.each)}
    missing = sorted({*map(multiplied_as, used)} - spec.flops_per_s.keys())
    if not missing:
        return []
    names = ", ".join(missing)
    return [f"{spec.name} has no rate for {names}: such weights are read as they are and multiplied as bf16"]


def _hits(model: str) -> list[HitRow]:
    with HITS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    numbers = ("threshold", "hit_rate", "score", "baseline_score")
    return [HitRow(row["task"], *(float(row[name]) for name in numbers)) for row in rows]


def published_names() -> list[str]:
    """Returns the names of the sets of published figures that a scenario can be compared with, sorted."""
    return sorted(path.stem for path in PUBLISHED.glob("*.csv") if path != HITS)


def _published(where: str, name: str, kind: type[Figure]) -> list[Figure]:
    if is_path(name, ".csv"):
        path = Path(name)
    elif name in published_names():
        path = PUBLISHED / f"{name}.csv"
    else:
        raise InputError(f"{where}: published: {unknown_name('set of figures', name, published_names())}")
    return read_figures(kind, f"{where}: published", path)


VERSIONS: Sequence[str] = ("simcore", "simpy", "numpy", "scipy", "pydantic")


def provenance(
    scenario: Scenario, parts: Parts, outcome: Outcome, *, command: str, wall_s: float, place: Place
) -> dict[str, Any]:
    """Returns the provenance of a run's figures, as its run directory has it."""
    return {
        "command": command,
        "machine": place.name,
        **place.described(),
        "wall_time_s": round(wall_s, 3),
        "seed": scenario.seed,
        "price_sources": outcome.sources,
        "laws_checked": [*place.laws, *parts.study.laws],
        **parts.described,
        "versions": versions(),
        "code": code_mark(),
        "event_loop": "compiled" if compiled.in_use() else "sources",
    }


def code_mark() -> str | None:
    """Returns the beginning of a digest of the code that figures depend on; None if it cannot be read."""
    digest = code_digest()
    return digest[:12] if digest else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that figures depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS}}


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
