"""Chooses the source of a device's prices: its own measurements, a sibling's carried over, published op
times, or its datasheet.

    own profile  >  the sibling's profile, carried over  >  roofline of the datasheet

Kernels reach a third to nine tenths of a datasheet's rates, so a device priced by its datasheet cannot be
compared with a measured one: each has a `basis`, and only devices with the same basis are ranked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from simcore.devices.carried import carried
from simcore.devices.changed import Change, change_text, changed, changed_overheads
from simcore.devices.fitted import FittedProfile
from simcore.devices.price import pricer
from simcore.devices.profile import NO_PROFILE, Profile, has_profile, load_profile, profile_names
from simcore.devices.spec import DeviceSpec, Link, device_names, load_device
from simcore.input.files import InputError, is_path, read_yaml
from simcore.ops.op import Pricer

DATASHEET, MEASUREMENTS = "datasheet", "measurements"
CHANGED = "changed"
# The figures that set the prices of a device's own kernels.
RATES = ("hbm_bytes_per_s", "flops_per_s", "kernel_s", "hbm_efficiency", "flops_efficiency")


@dataclass(frozen=True)
class DeviceInUse:
    """A device with the source of its prices. `base`: its name without changes; `title`: its name in output;
    `profile`: of the device `measured_on`, or None; `change`: the figures that a scenario changes."""

    base: str
    title: str
    spec: DeviceSpec
    measured_on: DeviceSpec
    profile: Profile | FittedProfile | None = None
    change: Change = field(default_factory=dict)

    @property
    def carries(self) -> bool:
        """Whether prices are carried over from another device, or from this one without its changes."""
        return self.profile is not None and self.measured_on is not self.spec

    @property
    def rates_changed(self) -> bool:
        """Whether carried prices differ from the measured ones: any sibling, or a change of RATES."""
        of_sibling = self.base != self.measured_on.name
        return of_sibling or any(path.partition(".")[0] in RATES for path in self.change)

    @property
    def basis(self) -> str:
        """The basis of the prices: only devices with the same basis are ranked."""
        if self.profile is None:
            return DATASHEET
        if isinstance(self.profile, FittedProfile) and self.profile.birth is not None:
            return MEASUREMENTS
        return f"published op times {self.profile.name}"

    @property
    def origin(self) -> str:
        """The source of the prices, in words."""
        if self.profile is None:
            return f"datasheet of {self.spec.name}"
        known = f"profile {self.profile.name} of {self.measured_on.name}"
        if not self.carries:
            return known
        return f"{known}, carried over to {self.title}"

    @property
    def overheads(self) -> Mapping[str, float]:
        """The measured costs of the host's verbs, in seconds by name; a sibling's count as the device's."""
        known = self.profile.overheads if isinstance(self.profile, FittedProfile) else {}
        return changed_overheads(known, self.change)

    def pricer(
        self, *, link: Link | None = None, ranks: int = 1, profile: Profile | FittedProfile | None = None
    ) -> Pricer:
        """Returns the prices of the device. `link`: connects its ranks, by default the device's own;
        `profile`: another form of the profile in use."""
        known = profile or self.profile
        if known is None or not self.carries:
            return pricer(self.spec, link=link, profile=known, ranks=ranks)
        like = next((kind for kind, own in self.spec.links.items() if own == link), None)
        there = self.measured_on.links.get(like or "") or link
        return carried(
            pricer(self.measured_on, link=there, profile=known, ranks=ranks),
            self.measured_on,
            self.spec,
            link_there=there,
            link=link,
            as_written=known.as_written if isinstance(known, FittedProfile) else frozenset(),
            same_card=self.base == known.device,
        )


def chosen_device(name_or_path: str, change: Change, name: str | None = None) -> DeviceInUse:
    """Returns a device by its name or path, with its changes, still without a profile. Raises InputError."""
    base = load_device(name_or_path)
    if not change:
        return DeviceInUse(base.name, base.name, base, base)
    if name in device_names():
        raise InputError(
            f"name: {name!r} is a device of the catalogue; a changed one needs a name of its own"
        )
    title = name or f"{base.name} with {change_text(change)}"
    spec = changed(base, change, name or f"{base.name}-{CHANGED}")
    return DeviceInUse(base.name, title, spec, base, change=change)


def default_profile_of(device: DeviceInUse) -> DeviceInUse | None:
    """Returns the device with its default profile, its own or its sibling's carried over; None if neither
    was measured."""
    base = device.measured_on
    if base.default_profile is not None and has_profile(base.name, base.default_profile):
        return replace(device, profile=load_profile(base.name, base.default_profile))
    return of_sibling(device)


def of_sibling(device: DeviceInUse) -> DeviceInUse | None:
    """Returns the device with the fitted profile of its nearest sibling that has one; None if none has. A
    sibling's sibling counts too."""
    sibling, asked = device.measured_on, {device.measured_on.name}
    while sibling.sibling is not None and sibling.sibling not in asked:
        sibling = load_device(sibling.sibling)
        asked.add(sibling.name)
        name = sibling.default_profile
        profile = load_profile(sibling.name, name) if name and has_profile(sibling.name, name) else None
        if isinstance(profile, FittedProfile):
            return replace(device, profile=profile, measured_on=sibling)
    return None


def with_profile(
    device: DeviceInUse, asked: str | None, why_not: Callable[[Profile], str | None]
) -> tuple[DeviceInUse, list[str], str | None]:
    """Returns the device with the profile `asked`, by default its own or its sibling's; warnings; and the
    reason if its default was passed over, for a sibling's if there is one. `why_not`: returns a reason
    against a table of op times, or None. Raises InputError with that reason if the table was asked for."""
    if asked == NO_PROFILE:
        return device, [], None
    if asked is None:
        found = default_profile_of(device)
        if found is None:
            return device, not_yet(device), None
    else:
        found = replace(device, profile=load_profile(device.measured_on.name, asked))
    # Fitted constants hold for any model, batch and number of ranks.
    reason = why_not(found.profile) if isinstance(found.profile, Profile) else None
    if reason is not None and asked is not None:
        raise InputError(reason)
    if reason is not None:
        found = of_sibling(device) or device
    return found, _carried_over(found), reason


def _carried_over(device: DeviceInUse) -> list[str]:
    """Returns a warning if prices are carried over from other figures."""
    if not device.carries or not device.rates_changed:
        return []
    return [f"prices: {device.origin}, with wider intervals"]


def not_yet(device: DeviceInUse) -> list[str]:
    """Returns a warning if a device's default profile, or its sibling's, has not been measured yet."""
    spec = device.measured_on
    if spec.default_profile is None:
        # A device with a sibling relies on its measurements.
        text = f"sibling {spec.sibling} of {spec.name} was not measured either; prices come from the roofline"
        return [text] if spec.sibling else []
    text = f"{spec.name} has no profile {spec.default_profile} yet, prices come from the roofline"
    how = f"; run: python -m simcore calibrate --on {spec.name}" if spec.name == "cpu" else ""
    return [f"{text}{how}"]


def prices_of(device: str, profile: str) -> DeviceInUse:
    """Returns a device of the catalogue with its fitted or measured profile of this name, else its sibling's,
    carried over, else none; with none if the name is "none". A name with a '/' in it is a user's folder, of
    the device or of its sibling. Raises InputError."""
    spec = load_device(device)
    own = DeviceInUse(spec.name, device, spec, spec)
    if profile == NO_PROFILE:
        return own
    for other in (spec, *([load_device(spec.sibling)] if spec.sibling else [])):
        if _holds_for(profile, other.name):
            found = load_profile(other.name, profile)
            if isinstance(found, FittedProfile):
                return replace(own, profile=found, measured_on=other)
    return own


def _holds_for(profile: str, device: str) -> bool:
    if not is_path(profile, ".yaml"):
        return profile in profile_names(device)
    path = Path(profile)
    document: Any = read_yaml(path if path.suffix == ".yaml" else path / "profile.yaml")
    return isinstance(document, dict) and cast(Any, document.get("device")) == device
