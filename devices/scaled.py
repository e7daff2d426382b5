"""Prices of a card by those of its sibling: the same chip with another memory, or at another clock.

    seconds = seconds on the sibling * floor here / floor there

with the floors of the datasheets: what is bound by memory scales with the bandwidths, what is bound by
arithmetic with the peaks. What of a time is launches and latency does not scale at all, so the interval
reaches to the sibling's time as it is. Such prices are called extrapolated. Collectives, and ops that the
sibling prices by its datasheet itself, take the card's own prices.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from devices.collectives import crosses_link
from devices.fitted import FittedProfile
from devices.price import MEMO, pricer, roofline
from devices.profile import NO_PROFILE, load_profile, profile_names
from devices.spec import DeviceSpec, load_device
from simcore.files import is_path, read_yaml
from simcore.ops import Op, Price, Pricer

__all__ = ["SIBLINGS", "Prices", "prices_of", "scaled"]

# Of each card one of the same chip that may have been measured: H100 and H200 are both a GH100.
SIBLINGS = {"h100-sxm": "h200-sxm", "h200-sxm": "h100-sxm"}


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a card, and in words where they come from; what a kernel takes beyond them in a graph."""

    price: Pricer
    origin: str
    in_graph_s: float = 0.0


def prices_of(device: str, profile: str) -> Prices:
    """The prices of a card of the catalogue by its fitted or measured profile of this name; where it has
    none, by that of its sibling, scaled; where neither has one, or the name is "none", by its datasheet. A
    name with a '/' in it is a folder of one's own, of the card or of its sibling."""
    spec = load_device(device)
    own = _profile(device, profile)
    if own is not None:
        return Prices(pricer(spec, profile=own), f"profile {profile} of {device}", _in_graph_s(own))
    sibling = SIBLINGS.get(device)
    theirs = _profile(sibling, profile) if sibling else None
    if sibling is None or theirs is None:
        return Prices(pricer(spec), f"roofline of {device}")
    there = load_device(sibling)
    price = scaled(pricer(there, profile=theirs), there, spec)
    return Prices(price, f"profile {profile} of {sibling}, scaled by the datasheets", _in_graph_s(theirs))


def _in_graph_s(profile: FittedProfile) -> float:
    return profile.overheads.get("in_graph_s", 0.0)


def _profile(device: str, name: str) -> FittedProfile | None:
    if name == NO_PROFILE:
        return None
    if is_path(name, ".yaml"):
        path = Path(name)
        document = read_yaml(path if path.suffix == ".yaml" else path / "profile.yaml")
        if isinstance(document, dict) and document.get("device") in SIBLINGS.keys() - {device}:
            return None
    elif name not in profile_names(device):
        return None
    found = load_profile(device, name)
    return found if isinstance(found, FittedProfile) else None


def scaled(sibling: Pricer, there: DeviceSpec, here: DeviceSpec) -> Pricer:
    """Prices on the card `here` by those on its sibling `there`. Raises what these and `roofline` raise."""
    own, floor_there, floor_here = pricer(here), roofline(there), roofline(here)

    @lru_cache(maxsize=MEMO)
    def price(op: Op) -> Price:
        if crosses_link(op):
            return own(op)
        found = sibling(op)
        after = floor_here(op)
        before_s, after_s = floor_there(op).seconds, after.seconds
        if found.source == "roofline" or not before_s:
            return own(op)
        # The caches of siblings are alike.
        ratio = 1.0 if found.cached else after_s / before_s
        return Price(
            found.seconds * ratio,
            max(after.of(found).seconds, found.low_s * min(1.0, ratio)),
            found.high_s * max(1.0, ratio),
            "extrapolated",
            f"{ratio:.3g} times that on {there.name}: {found.detail}",
            None if found.early_s is None else found.early_s * ratio,
            found.cached,
        )

    return price
