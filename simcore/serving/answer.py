"""What a serving study says in words: which way of serving wins, and why; what to be warned of.

The winner at the heaviest load has the highest goodput where something is promised (`slo`), and the lowest
mean E2E latency where nothing is, or where all keep their promise as well.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simcore.serving.bench import Bench, Case

if TYPE_CHECKING:
    from simcore.serving.study import Found

# Attainments that differ by less than this are the same.
SAME = 0.005
MOST_EXTRAPOLATED = 0.05


def answer(bench: Bench, found: Sequence["Found"]) -> str:
    """One sentence: the winner at the heaviest load, by how much, and what makes the difference."""
    here = _heaviest(found)
    promised = any(limit is not None for limit in bench.scenario.slo.model_dump().values())
    ranked = sorted(here, key=lambda one: _rank(one, promised))
    best, others = ranked[0], ranked[1:]
    text = f"{_load(best.case)} on {_devices(bench, best.case)}, {best.case.axes.label} "
    text += "is best" if others else "serves them so"
    if promised:
        text += f": {_share(best)} of the requests keep what is promised ({_number(best, 'goodput_per_s')}/s)"
        text += _next_share(best, others)
    text += f"{';' if promised else ':'} a request takes {_time(best, 'e2e_mean_s')} on average"
    text += f", its first token {_time(best, 'ttft_p99_s')} at the 99th percentile"
    if others:
        text += _why(best, others[0])
    return f"{text}."


def _heaviest(found: Sequence["Found"]) -> list["Found"]:
    """The cases at the load with most tokens a second for each device."""

    def load(one: "Found") -> tuple[float, float, float]:
        axes = one.case.axes
        tokens = axes.prompt_tokens + axes.output_tokens
        clients = one.case.point.clients or 0
        return (axes.rate_per_s or 0.0) * tokens / axes.devices, clients, axes.requests

    heaviest = max(found, key=load).case.point
    return [one for one in found if one.case.point == heaviest]


def _rank(one: "Found", promised: bool) -> tuple[float, float]:
    share = one.value("slo_attainment") if promised else None
    steps = 0.0 if share is None else -round(share / SAME)
    latency_s = one.value("e2e_mean_s")
    return steps, float("inf") if latency_s is None else latency_s


def _load(case: Case) -> str:
    axes = case.axes
    if case.point.clients is not None:
        return f"With {case.point.clients:,} clients in a closed loop"
    if axes.rate_per_s is None:
        return f"With {axes.requests:,} requests at once"
    return f"At {axes.rate_per_s:.3g} requests/s"


def _devices(bench: Bench, case: Case) -> str:
    count = case.axes.devices
    return bench.hardware.name if count == 1 else f"{count} {bench.hardware.name}"


def _share(one: "Found") -> str:
    share = one.value("slo_attainment")
    return "none" if share is None else f"{share:.1%}"


def _next_share(best: "Found", others: Sequence["Found"]) -> str:
    if not others:
        return ""
    second = others[0]
    if _rank(best, True)[0] == _rank(second, True)[0]:
        return f", as many as with {second.case.axes.label}"
    return f", against {_share(second)} with {second.case.axes.label}, the next"


def _time(one: "Found", name: str) -> str:
    value = one.value(name)
    return "no time" if value is None else seconds(value)


def _number(one: "Found", name: str) -> str:
    value = one.value(name)
    return "none" if value is None else f"{value:.3g}"


def seconds(value: float) -> str:
    """A time as people write it.

    >>> seconds(0.0123), seconds(2.5), seconds(0.0)
    ('12.3 ms', '2.5 s', '0 ms')
    """
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


def _why(best: "Found", other: "Found") -> str:
    """Where the time goes that the next best takes more: waiting, the first token, or each further one."""
    parts = {
        "wait": ("queue_mean_s", 1.0),
        "prefill": ("ttft_mean_s", 1.0),
        "decode": ("tpot_mean_s", max(0.0, best.case.axes.output_tokens - 1.0)),
    }

    def lost_s(name: str, times: float) -> float:
        ours, theirs = best.value(name), other.value(name)
        return 0.0 if ours is None or theirs is None else (theirs - ours) * times

    lost = {part: lost_s(*of) for part, of in parts.items()}
    lost["prefill"] -= lost["wait"]
    part = max(lost, key=lambda name: lost[name])
    name = other.case.axes.label
    total_s = lost_s("e2e_mean_s", 1.0)
    if lost[part] <= 0.0 or total_s <= 0.0:
        return f"; {name} is as fast on average"
    more = f"; {name} takes {seconds(total_s)} more, for its "
    if part == "wait":
        ours, theirs = _time(best, "queue_mean_s"), _time(other, "queue_mean_s")
        return more + f"requests wait {theirs} for their turn, not {ours}"
    if part == "prefill":
        return more + "first tokens come later once their prompts are begun"
    ours, theirs = _time(best, "tpot_mean_s"), _time(other, "tpot_mean_s")
    return more + f"tokens take {theirs} each, not {ours}"


def notes(bench: Bench, found: Sequence["Found"]) -> list[str]:
    """What a reader has to know to read the figures."""
    told = ["figures are means over replicas; requests and levels over time are those of the first one"]
    rooms = {one.case.axes.label: one.first.room for one in found}
    for name, room in rooms.items():
        unit = "KV blocks" if name.startswith("continuous") else f"slots of {room.slot_tokens:,} tokens"
        told.append(f"{name}: {room.limit:,} {unit} a server")
    if bench.scenario.replicas == 1:
        told.append("one replica: no interval says how far chance goes; set replicas")
    return told


def warnings(bench: Bench, found: Sequence["Found"], shares: Mapping[str, float]) -> list[str]:
    """What to be warned of: requests that were turned away, work done twice, prices that nobody measured."""
    told = []
    for one in found:
        name, place = one.case.axes.label, _load(one.case)
        for figure, what in (("rejected", "are rejected: no server could hold them"),):
            count = one.value(figure)
            if count:
                told.append(f"{place}, {name}: {count:.0f} of {one.case.axes.requests:,} requests {what}")
        again = one.value("preemptions")
        if again and again > 0.01 * one.case.axes.requests:
            told.append(
                f"{place}, {name}: {again:.0f} preemptions; KV memory is short, and work is done twice"
            )
    left_out = max(one.first.left_out for one in found)
    if left_out:
        told.append(f"{left_out:,} recorded requests without prompt or answer are left out")
    unmeasured = shares.get("roofline", 0.0)
    if unmeasured > 0.5:
        told.append(
            f"{unmeasured:.0%} of the device time is priced by datasheet and roofline, not by measurements of"
            f" {bench.hardware.name}"
        )
    far = shares.get("extrapolated", 0.0)
    if far > MOST_EXTRAPOLATED:
        told.append(f"{far:.0%} of the device time is extrapolated beyond what was measured")
    return told
