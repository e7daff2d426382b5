"""The devices as text for a terminal: a line each, or one device with every figure and its source."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

from simcore.devices.completed import ASSUMED
from simcore.devices.profile import PROFILES, profile_names
from simcore.devices.spec import POWER, DeviceSpec, Link
from simcore.input.files import InputError, read_yaml

WIDTH = 80
INDENT = "    "
UNKNOWN = "unknown"
WORDS = ("name", "vendor", "description", "default_link", "default_profile", "links", "sources")


def lines(specs: Sequence[DeviceSpec]) -> Iterator[str]:
    """Yields a table of devices: memory, its bandwidth, dense peaks, power, and the default source of
    prices."""
    yield f"{'device':<14}{'memory':>7}{'bandwidth':>10}{'bf16':>8}{'fp8':>8}{'TDP':>5}  prices"
    yield f"{'':<14}{'GB':>7}{'TB/s':>10}{'TFLOP/s':>8}{'TFLOP/s':>8}{'W':>5}"
    for spec in specs:
        fp8, power_w = spec.flops_per_s.get("fp8"), spec.board_power_w
        yield (
            f"{spec.name:<14}{spec.memory_bytes / 1e9:>7.4g}{spec.hbm_bytes_per_s / 1e12:>10.3g}"
            f"{spec.flops_per_s['bf16'] / 1e12:>8.4g}{f'{fp8 / 1e12:.4g}' if fp8 else '-':>8}"
            f"{f'{power_w:.4g}' if power_w else '-':>5}  {_prices(spec)}"
        )


def _prices(spec: DeviceSpec) -> str:
    """Returns the default source of a device's prices, in words."""
    name = spec.default_profile
    if name is None:
        return f"carried over from {spec.sibling}" if spec.sibling else "datasheet"
    if name in profile_names(spec.name):
        path = PROFILES / spec.name / name / "profile.yaml"
    elif "/" in name:
        path = Path(name) / "profile.yaml"
    else:
        return "datasheet until calibrated"
    try:
        document = read_yaml(path)
    except InputError:
        return "a profile that is missing"
    known: Mapping[str, Any] = document if isinstance(document, dict) else {}
    birth = known.get("birth")
    if isinstance(birth, dict):
        own = "imported" if str(known.get("source", "")).startswith("imported") else "measured"
        date = str(birth.get("date", UNKNOWN))
        return f"{own}, date unknown" if date == UNKNOWN else f"{own} {date[:10]}"
    return "published times"


def described(spec: DeviceSpec) -> Iterator[str]:
    """Yields every figure of a device with its source."""
    yield f"{spec.name}: {spec.description or 'no description'}" + f" ({spec.vendor})" * bool(spec.vendor)
    yield f"prices: {_prices(spec)}; profiles: {', '.join(profile_names(spec.name)) or 'none'}"
    for field in fields(cast(Any, spec)):
        if field.name not in WORDS:
            value = getattr(spec, field.name)
            value = UNKNOWN if field.name == POWER and value is None else value
            own = getattr(value, "source", None)
            yield from _figure(field.name, _shown(value), own or spec.sources.get(field.name, ""))
    for name, link in spec.links.items():
        yield f"links.{name}{' (default)' * (name == spec.default_link)}"
        yield from _link(name, link, spec.sources)


def _link(name: str, link: Link, sources: Mapping[str, str]) -> Iterator[str]:
    for field in fields(cast(Any, link)):
        if field.name != "source":
            source = sources.get(f"links.{name}.{field.name}", "")
            cited = f"  [{source}]" if source else ""
            yield f"{INDENT}{field.name} = {_shown(getattr(link, field.name))}{cited}"
    yield from _wrapped(link.source)


def _figure(name: str, value: str, source: str) -> Iterator[str]:
    marked = "  [assumed]" if source.startswith(ASSUMED) else ""
    yield from textwrap.wrap(f"{name} = {value}{marked}", WIDTH, subsequent_indent=INDENT)
    yield from _wrapped(source)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if hasattr(value, "__dataclass_fields__"):
        value = {key: each for key, each in asdict(cast(Any, value)).items() if key != "source"}
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return str(value)
