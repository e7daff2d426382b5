"""Completes a user's device file with figures of a measured card, marked as assumed.

    name, memory_bytes, hbm_bytes_per_s, flops_per_s     required
    links                                                none if left out: a single device
    any other figure                                     as the catalogue's H200 has it

The H200 is the reference because its figures were measured. `sources` of a completed file has the source of
every figure: "assumed: ..." for the H200's, `NO_SOURCE` for a figure given without a source.
"""

from collections.abc import Mapping
from typing import Any

REQUIRED = ("name", "memory_bytes", "hbm_bytes_per_s", "flops_per_s")
# Fields that a link may leave out; its rate is required.
OPTIONAL_IN_LINK = (
    "kind", "topology", "latency_s", "setup_s", "step_s", "per_peer_s", "relative_error", "max_devices",
    "algorithms", "source", "one_shot_setup_s", "push_per_peer_s", "push_efficiency",
    "push_normed_s",
)  # fmt: skip
ASSUMED = "assumed: "
NO_SOURCE = "given by the file, no source"
# Words and choices, which need no source, and what is unknown if it is not given.
PLAIN: Mapping[str, Any] = {
    "vendor": "",
    "description": "",
    "links": {},
    "default_profile": None,
    "sibling": None,
    # Another device's power says nothing of this one's.
    "board_power_w": None,
}
# Figures with a source field of their own.
EFFICIENCIES = ("hbm_efficiency", "flops_efficiency")
# Of an unmeasured link: half of the 90 % interval of its times, and the number of devices that it connects.
LINK_ERROR, LINK_DEVICES = 0.5, 8

Document = Mapping[str, Any]


def completed(document: object, like: Document) -> object:
    """Returns the document of a device file, with missing keys from the document of the device `like`. A
    document that is no mapping is returned as it is; validation refuses it later."""
    if not isinstance(document, dict):
        return document
    own = {*document, *REQUIRED, *PLAIN, "default_link", "sources"}
    assumed = {key: value for key, value in like.items() if key not in own}
    sources = dict.fromkeys(assumed, f"{ASSUMED}as {like['name']} has it")
    sources |= {key: NO_SOURCE for key in document if key in like["sources"]}
    whole = {**PLAIN, **assumed, **document}
    for key in EFFICIENCIES:
        if key in assumed:
            whole[key] = {**like[key], "source": sources[key]}
        elif isinstance(whole[key], dict):
            whole[key] = {"source": NO_SOURCE, **whole[key]}
    if isinstance(links := whole["links"], dict):
        whole["links"] = {name: _link(name, link, like, sources) for name, link in links.items()}
        if len(links) <= 1:
            # With several links the file must name the default.
            whole.setdefault("default_link", next(iter(links), None))
    given = document.get("sources", {})
    return {**whole, "sources": {**sources, **given} if isinstance(given, dict) else given}


def _link(name: str, link: object, like: Document, sources: dict[str, str]) -> object:
    """Returns a link with its missing fields: from the other device's link of the same kind, else from its
    default link. Adds the assumed fields to `sources`."""
    if not isinstance(link, dict):
        return link
    kind = link.get("kind", name)
    near = kind if isinstance(kind, str) and kind in like["links"] else like["default_link"]
    known = like["links"][near]
    assumed = {key: known[key] for key in OPTIONAL_IN_LINK if key not in link and key in known}
    if "algorithms" in assumed and kind != near:
        # Other links need not reach memory.
        assumed["algorithms"] = [name for name in assumed["algorithms"] if name != "pushed"]
    why = dict.fromkeys(assumed, f"as {near} of {like['name']} has it")
    for key, value in (("relative_error", LINK_ERROR), ("max_devices", LINK_DEVICES)):
        if key in assumed:
            assumed[key], why[key] = value, f"{value}, for nothing is known of it"
    if "algorithms" in assumed and link.get("topology") == "ring":
        assumed["algorithms"], why["algorithms"] = ["ring"], "what runs on a ring"
    algorithms = (link | assumed)["algorithms"]
    if not (isinstance(algorithms, list) and "pushed" in algorithms):
        assumed = {key: value for key, value in assumed.items() if not key.startswith("push_")}
    words = {"kind": kind, "source": NO_SOURCE}
    sources |= {f"links.{name}.{key}": f"{ASSUMED}{why[key]}" for key in assumed if key not in words}
    return {**assumed, **words, **link}


def assumed_figures(sources: Mapping[str, str]) -> list[str]:
    """Returns the names of the assumed figures, by the sources of a device, sorted."""
    return sorted(key for key, text in sources.items() if text.startswith(ASSUMED))
