"""Makes a device with some figures changed: more bandwidth, say, or a faster link.

    figure = the given one, or times * that of the base

`change` maps dotted names of a device file to a number, or to {"times": factor}:

    {"hbm_bytes_per_s": 7.2e12, "links.nvlink.latency_s": {"times": 0.5}}

"flops_per_s" and "overheads" take a factor for all figures in them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import Any, cast

from simcore.devices.spec import POWER, SOURCED, DeviceSpec
from simcore.input.files import InputError, unknown_name, validated

# The new value or a factor for each figure.
Change = Mapping[str, float | Mapping[str, float]]
OVERHEADS = "overheads."
# Fields that are no figures, so that no number or factor applies.
NO_FIGURES = (
    "name",
    "vendor",
    "description",
    "default_link",
    "tensor_parallel",
    "default_profile",
    "sources",
)
# Groups of figures to which one factor may apply.
SEVERAL = ("flops_per_s", "overheads")


def changed(base: DeviceSpec, change: Change, name: str) -> DeviceSpec:
    """Returns a device like `base` with other figures, named `name`. Raises InputError if a device has no
    such figure, or the changed device is invalid."""
    document: dict[str, Any] = asdict(cast(Any, base))
    for path, value in change.items():
        _put(document, path, value, path)
    document["name"] = name
    document["description"] = f"{base.description}; with {change_text(change)}"
    sources = dict(document["sources"])
    for path, value in change.items():
        figure = path.partition(".")[0]
        if figure in (*SOURCED, POWER):
            before = f"{sources[figure]}; " if figure in sources else ""
            sources[figure] = f"{before}changed: {change_text({path: value})}"
    document["sources"] = sources
    return validated(DeviceSpec, document, "change")


def _put(place: dict[str, Any], path: str, value: float | Mapping[str, float], whole: str) -> None:
    first, _, rest = path.partition(".")
    known = [key for key in place if key not in NO_FIGURES]
    if first not in known:
        raise InputError(f"change: {whole}: {unknown_name('figure', first, known)}")
    here = place[first]
    if rest:
        if not isinstance(here, dict):
            raise InputError(f"change: {whole}: {first} is one figure, with none in it")
        _put(here, rest, value, whole)
    elif isinstance(here, dict):
        _put_all(here, value, whole)
    elif here is None and first == POWER and not isinstance(value, Mapping):
        place[first] = float(value)
    elif isinstance(here, bool) or not isinstance(here, int | float):
        raise InputError(f"change: {whole}: is no figure that a number can stand for")
    else:
        given = here * _factor(value) if isinstance(value, Mapping) else value
        place[first] = round(given) if isinstance(here, int) else float(given)


def _put_all(figures: dict[str, Any], value: float | Mapping[str, float], whole: str) -> None:
    if whole not in SEVERAL or not isinstance(value, Mapping):
        names = ", ".join(f"{whole}.{key}" for key in figures)
        more = ", or give times" if whole in SEVERAL else ""
        raise InputError(f"change: {whole}: is several figures; name one ({names}){more}")
    for key, figure in figures.items():
        figures[key] = figure * _factor(value)


def _factor(value: Mapping[str, float]) -> float:
    return prod(value.values())


def change_text(change: Change) -> str:
    """Returns a change in words.

    >>> change_text({"hbm_bytes_per_s": 7.2e12, "links.nvlink.latency_s": {"times": 0.5}})
    'hbm_bytes_per_s 7.2e+12, links.nvlink.latency_s x 0.5'
    """
    return ", ".join(
        f"{path} x {_factor(value):g}" if isinstance(value, Mapping) else f"{path} {value:g}"
        for path, value in change.items()
    )


def changed_overheads(measured: Mapping[str, float], change: Change) -> dict[str, float]:
    """Returns the measured costs of a machine's verbs, in seconds by name, with the changes to them.

    >>> changed_overheads({"launch_s": 3e-5, "wait_s": 1e-6}, {"overheads.launch_s": {"times": 0.5}})
    {'launch_s': 1.5e-05, 'wait_s': 1e-06}
    >>> changed_overheads({"launch_s": 3e-5}, {"overheads.launch_s": 1e-5, "hbm_bytes_per_s": 5e12})
    {'launch_s': 1e-05}
    """
    found = dict(measured)
    for path, value in change.items():
        name = path.removeprefix(OVERHEADS)
        if path == OVERHEADS.removesuffix(".") and isinstance(value, Mapping):
            found = {each: seconds * _factor(value) for each, seconds in found.items()}
        elif name in found and name != path:
            found[name] = found[name] * _factor(value) if isinstance(value, Mapping) else value
    return found
