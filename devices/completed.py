"""What a device file of one's own need not say: the figure of a measured card, marked as assumed.

    name, memory_bytes, hbm_bytes_per_s, flops_per_s     nobody can guess: they have to be given
    links                                                none: a device alone, unless they are given
    any other key                                        as the catalogue's H200 has it

The H200 stands for others because its figures were measured. `sources` of a completed file says of every
figure where it is from: "assumed: ..." of those of the H200, `NO_SOURCE` of what was given without a source.
"""

from collections.abc import Mapping
from typing import Any

REQUIRED = ("name", "memory_bytes", "hbm_bytes_per_s", "flops_per_s")
# What a link may leave out; its rate has to be given.
OPTIONAL_IN_LINK = (
    "kind", "topology", "latency_s", "setup_s", "step_s", "per_peer_s", "relative_error", "max_devices",
    "algorithms", "source",
)  # fmt: skip
ASSUMED = "assumed: "
NO_SOURCE = "given by the file, no source"
# Words and choices, not figures: nothing has to be said of where they come from.
PLAIN: Mapping[str, Any] = {
    "vendor": "",
    "description": "",
    "links": {},
    "default_profile": None,
    "sibling": None,
}
# They name their source themselves.
EFFICIENCIES = ("hbm_efficiency", "flops_efficiency")
# Of a link that nobody measured: half of the 90 % interval of its times, and how many devices it connects.
LINK_ERROR, LINK_DEVICES = 0.5, 8

Document = Mapping[str, Any]


def completed(document: object, like: Document) -> object:
    """The document of a device file with what it leaves out, from that of the device `like`; as it is where
    it is no mapping, for others to say so."""
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
            # Which of several nobody can guess.
            whole.setdefault("default_link", next(iter(links), None))
    given = document.get("sources", {})
    return {**whole, "sources": {**sources, **given} if isinstance(given, dict) else given}


def _link(name: str, link: object, like: Document, sources: dict[str, str]) -> object:
    """A link with what it leaves out: latencies of the other device's link of the same kind, else of its
    default one. Notes in `sources` what is assumed."""
    if not isinstance(link, dict):
        return link
    kind = link.get("kind", name)
    near = kind if isinstance(kind, str) and kind in like["links"] else like["default_link"]
    assumed = {key: like["links"][near][key] for key in OPTIONAL_IN_LINK if key not in link}
    why = dict.fromkeys(assumed, f"as {near} of {like['name']} has it")
    for key, value in (("relative_error", LINK_ERROR), ("max_devices", LINK_DEVICES)):
        if key in assumed:
            assumed[key], why[key] = value, f"{value}, for nothing is known of it"
    if "algorithms" in assumed and link.get("topology") == "ring":
        assumed["algorithms"], why["algorithms"] = ["ring"], "what runs on a ring"
    words = {"kind": kind, "source": NO_SOURCE}
    sources |= {f"links.{name}.{key}": f"{ASSUMED}{why[key]}" for key in assumed if key not in words}
    return {**assumed, **words, **link}


def assumed_figures(sources: Mapping[str, str]) -> list[str]:
    """The figures that nobody gave, by the sources of a device, sorted."""
    return sorted(key for key, text in sources.items() if text.startswith(ASSUMED))
