"""The laws of every serving run. Each law reads the requests and the journal and yields its violations.

1  conservation  every arrival is finished or rejected, once; tokens in the journal = tokens of the answers
2  causality     arrival_s <= scheduled_s <= first_token_s <= finish_s
3  clock         times are finite and not negative, and no step ends before it starts
4  capacity      a server never holds more KV than its limit
5  in turn       on each server the order of first scheduling is that of arrival, so no request starves
                 (not checked of servers `out_of_turn`: shortest first; where long prompts are `late`, of
                 requests alone that are no shorter than any before them)
6  Little        area under the number in the system = sum of the times spent in it:
                     integral N(t) dt = sum(finish_s - arrival_s),  N counted while the run lasts
7  decoding      steps decode no longer than requests are between their first and their last token:
                     sum(decoding * (end_s - start_s)) <= sum(finish_s - first_token_s) - later_s
               later_s: by how much last tokens reach their clients later than first ones do, in sum
8  reuse         the last token of a prompt is computed, from which the answer comes:
                     0 <= cached_prompt_tokens < prompt_tokens
9  fleet         with autoscaling, a request comes while its server takes requests, and is answered before the
                 server's devices are free; a server does not start while it holds its devices

Law 6 over the duration is L = lambda W, with the machine's count on one side and the times in the requests on
the other; law 7 is the same for the requests that decode, with the journal's count.
Times that are equal except for rounding count as equal, as in `simcore.machine.laws`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simcore.machine.laws import MOST_PER_LAW, ROUNDING, broken_laws
from simcore.machine.machine import LawError
from simcore.studies.serving.autoscaling import Fleet
from simcore.studies.serving.served import Bools, Floats, Ints, Occupancy, Served, Steps

# Rounding error of a difference of sums of times, relative to the sums.
CANCELLED = 1e-12
REQUEST_TIMES = ("arrival_s", "scheduled_s", "first_token_s", "finish_s")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The run that laws check. `kv_limit`: units of KV of one server; `out_of_turn`: ranks of servers that do
    not keep the order of arrival; `late`: of those that prompts enter later the longer they are; `occupancy`:
    the machine's count of requests, or None; `fleet`: which servers, of `ranks` ranks each, held their
    devices when, or None; `later_s`: see law 7."""

    served: Served
    journal: Steps
    kv_limit: float
    out_of_turn: Collection[int] = ()
    occupancy: Occupancy | None = None
    fleet: Fleet | None = None
    ranks: int = 1
    later_s: float = 0.0
    late: Collection[int] = ()


def conservation(run: Run) -> Iterator[str]:
    """Law 1."""
    served, journal = run.served, run.journal
    ordered = np.sort(served.id)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    yield from _named(np.ones(len(twice), np.bool_), twice, "came twice")
    lost = ~served.rejected & ~served.finished
    yield from _named(lost, served.id, "neither finished nor was rejected")
    begun = np.isfinite(served.scheduled_s) | np.isfinite(served.first_token_s) | np.isfinite(served.finish_s)
    yield from _named(served.rejected & begun, served.id, "was rejected and yet served")
    given = float((journal["replays"] * journal["decoding"]).sum() + journal["first_tokens"].sum())
    wanted = int(served.output_tokens[served.finished].sum())
    if given != wanted:
        yield f"steps gave {given:.0f} tokens, answers have {wanted}"


def causality(run: Run) -> Iterator[str]:
    """Law 2."""
    for earlier, later in pairwise(REQUEST_TIMES):
        early = _before(getattr(run.served, later), getattr(run.served, earlier))
        yield from _named(early, run.served.id, f"has its {later} before its {earlier}")


def clock(run: Run) -> Iterator[str]:
    """Law 3."""
    served, journal = run.served, run.journal
    for name in REQUEST_TIMES:
        asked = served.finished if name != "arrival_s" else np.ones(len(served), np.bool_)
        wrong = asked & ~_is_time(getattr(served, name))
        yield from _named(wrong, served.id, f"has a {name} that is negative or not finite")
    steps = np.arange(len(journal["start_s"]))
    wrong = ~(_is_time(journal["start_s"]) & _is_time(journal["end_s"]))
    yield from _named(wrong, steps, "has a time that is negative or not finite", "step")
    yield from _named(_before(journal["end_s"], journal["start_s"]), steps, "ends before its start", "step")


def capacity(run: Run) -> Iterator[str]:
    """Law 4."""
    used, peak = run.journal["kv_used"], run.journal["kv_peak"]
    inside = (used >= 0.0) & (used <= peak) & (peak <= run.kv_limit)
    yield from _named(~inside, np.arange(len(used)), f"holds KV outside of 0 to {run.kv_limit:g}", "step")


def in_turn(run: Run) -> Iterator[str]:
    """Law 5."""
    served = run.served
    done = np.flatnonzero(served.finished & ~np.isin(served.instance, sorted(run.out_of_turn)))
    order = done[np.lexsort((served.scheduled_s[done], served.arrival_s[done], served.instance[done]))]
    scheduled_s, instance = served.scheduled_s[order], served.instance[order]
    overtaken = _before(scheduled_s[1:], scheduled_s[:-1]) & (instance[1:] == instance[:-1])
    overtaken &= ~np.isin(instance[1:], sorted(run.late))
    yield from _named(overtaken, served.id[order[:-1]], "was scheduled after one that came later")
    for rank in sorted(run.late):
        mine = order[instance == rank]
        tokens, begun_s = served.prompt_tokens[mine], served.scheduled_s[mine]
        longest = tokens[1:] >= np.maximum.accumulate(tokens)[:-1]
        early = longest & _before(begun_s[1:], np.maximum.accumulate(begun_s)[:-1])
        yield from _named(early, served.id[mine[1:]], "was scheduled before an earlier one no longer than it")


def little(run: Run) -> Iterator[str]:
    """Law 6."""
    if run.occupancy is None or not len(run.served):
        return
    served, counted = run.served, run.occupancy
    if counted.number:
        yield f"{counted.number} requests have come and not gone, or gone and not come"
    if served.rejected.any():
        # Requests do not record the time of their rejection.
        return
    stays_s = float((served.finish_s - served.arrival_s).sum())
    # The area is a difference of sums of times, each of which is rounded.
    slack_s = ROUNDING * stays_s + CANCELLED * sum(counted.went_s)
    if not abs(counted.area_s - stays_s) <= slack_s:
        yield f"the area under the number in the system is {counted.area_s} s, requests stayed {stays_s} s"


def decoding(run: Run) -> Iterator[str]:
    """Law 7."""
    served, journal = run.served, run.journal
    done = served.finished
    decoded_s = _sum_s(journal["decoding"], journal["start_s"], journal["end_s"])
    open_s = float((served.finish_s[done] - served.first_token_s[done]).sum()) - run.later_s
    if not decoded_s <= open_s + ROUNDING * max(open_s, served.window_s[1]):
        yield f"steps decoded for {decoded_s} s, requests had {open_s} s between their tokens"


def reuse(run: Run) -> Iterator[str]:
    """Law 8."""
    served = run.served
    cached = served.cached_prompt_tokens
    wrong = (cached < 0) | (cached >= served.prompt_tokens)
    yield from _named(wrong, served.id, "has no token of its prompt to compute, or more than it has")


def fleet(run: Run) -> Iterator[str]:
    """Law 9."""
    if run.fleet is None:
        return
    served, of = run.served, run.fleet
    server = served.instance // run.ranks
    for number in range(of.servers):
        stints = np.flatnonzero(of.server == number)
        # Never is a time here that rounding can be taken from.
        again_s, freed_s = of.started_s[stints][1:], of.freed_s[stints][:-1].clip(max=1e300)
        yield from _named(_before(again_s, freed_s), stints[1:], "begins before its server is off", "stint")
        those = np.flatnonzero(server == number)
        if not len(stints):
            yield from _named(np.ones(len(those), np.bool_), served.id[those], "went to a server that is off")
            continue
        # The last stint that was ready when the request came.
        which = np.searchsorted(of.ready_s[stints], served.arrival_s[those], side="right") - 1
        one = stints[which.clip(0)]
        late = (which < 0) | _before(of.stopped_s[one], served.arrival_s[those])
        yield from _named(late, served.id[those], "went to a server that takes none")
        left = _before(of.freed_s[one], served.finish_s[those])
        yield from _named(left, served.id[those], "was answered after its server was off")


LAWS: Mapping[str, Callable[[Run], Iterator[str]]] = {
    "conservation": conservation,
    "causality": causality,
    "clock": clock,
    "capacity": capacity,
    "in turn": in_turn,
    "Little": little,
    "decoding": decoding,
    "reuse": reuse,
    "fleet": fleet,
}


def violations(run: Run) -> dict[str, list[str]]:
    """Returns the laws that a run breaks, each with its violations (empty: all hold)."""
    return broken_laws(LAWS, run)


def enforce(run: Run) -> None:
    """Raises LawError if a run breaks a law."""
    if broken := violations(run):
        raise LawError("; ".join(f"{name}: {'; '.join(found)}" for name, found in broken.items()))


def _named(broken: Bools, ids: Ints, text: str, what: str = "request") -> Iterator[str]:
    """Yields a line for each of the first that break a law, and one that counts the rest."""
    found = ids[np.flatnonzero(broken)]
    for number in found[:MOST_PER_LAW].tolist():
        yield f"{what} {number} {text}"
    if len(found) > MOST_PER_LAW:
        yield f"and {len(found) - MOST_PER_LAW} more: {what} {text}"


def _before(earlier_s: Floats, later_s: Floats) -> Bools:
    """Returns which times are before the others by more than rounding; False for NaN."""
    with np.errstate(invalid="ignore"):
        early: Bools = earlier_s < later_s - ROUNDING * np.maximum(1e-3, np.abs(later_s))
    return early


def _sum_s(number: Floats | Ints, start_s: Floats, end_s: Floats) -> float:
    # Times may be infinite here: law 3 checks them.
    with np.errstate(invalid="ignore"):
        return float((number * (end_s - start_s)).sum())


def _is_time(at_s: Floats) -> Bools:
    valid: Bools = np.isfinite(at_s) & (at_s >= 0.0)
    return valid
