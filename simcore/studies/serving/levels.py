"""Levels of a run over time: requests that queue, requests that decode, KV held, tokens generated.

queue(t)    = requests with arrival_s <= t < scheduled_s
batch(t)    = sum of `decoding` over the steps with start_s <= t < end_s, of all servers
kv_share(t) = mean over servers of KV held / kv_limit; a server holds the KV of its last begun step while a
              step runs, linear from kv_used to kv_peak, else 0
tokens(t)   = replays * decoding of every step, linear from its start_s to its end_s, and its
              first_tokens from its end_s on

"""

import numpy as np

from simcore.studies.serving.served import Floats, Ints, Served, Steps

MOST_TIMES = 400


def levels(
    served: Served, journal: Steps, *, kv_limit: float, servers: int, most: int = MOST_TIMES
) -> dict[str, Floats]:
    """Returns columns t_s, queue, batch, kv_share and tokens, each [times]: `most` evenly spaced times from
    the first arrival to the last finish (one if these are equal, none without requests)."""
    times_s = _times(served, most)
    batch, tokens = _batch_and_tokens(times_s, journal)
    return {
        "t_s": times_s,
        "queue": _queue(times_s, served),
        "batch": batch,
        "kv_share": _kv_used(times_s, journal) / (kv_limit * servers),
        "tokens": tokens,
    }


def _times(served: Served, most: int) -> Floats:
    first_s, last_s = served.window_s
    if last_s > first_s:
        return np.linspace(first_s, last_s, most)
    return np.full(min(len(served), 1), first_s)


def _queue(times_s: Floats, served: Served) -> Floats:
    done = served.finished
    arrived = _reached(times_s, served.arrival_s[done])
    return arrived - _reached(times_s, served.scheduled_s[done])


def _batch_and_tokens(times_s: Floats, journal: Steps) -> tuple[Floats, Floats]:
    start_s, end_s = np.ascontiguousarray(journal["start_s"]), np.ascontiguousarray(journal["end_s"])
    decoding = np.ascontiguousarray(journal["decoding"])
    decoded = journal["replays"] * decoding
    steps, places = _running(times_s, start_s, end_s)
    share = (times_s[places] - start_s[steps]) / (end_s[steps] - start_s[steps])
    batch = _summed(places, decoding[steps], len(times_s))
    begun = _summed(places, decoded[steps] * share, len(times_s))
    return batch, begun + _reached(times_s, end_s, decoded + journal["first_tokens"])


def _kv_used(times_s: Floats, journal: Steps) -> Floats:
    start_s, until_s, used, peak = stretches(journal)
    steps, places = _running(times_s, start_s, until_s)
    share = (times_s[places] - start_s[steps]) / (until_s[steps] - start_s[steps])
    return _summed(places, used[steps] + share * (peak - used)[steps], len(times_s))


def _summed(places: Ints, amounts: Floats | None, size: int) -> Floats:
    # For empty input, bincount returns integers, even with weights.
    return np.bincount(places, amounts, size).astype(np.float64)


def _reached(times_s: Floats, at_s: Floats, amounts: Floats | None = None) -> Floats:
    """Returns the sum of the amounts (default 1 each) at or before each time, [times]."""
    places = np.searchsorted(times_s, at_s, side="left")
    return np.cumsum(_summed(places, amounts, len(times_s) + 1)[: len(times_s)])


def _running(times_s: Floats, start_s: Floats, end_s: Floats) -> tuple[Ints, Ints]:
    """Returns all pairs of an interval and a time in it, start_s <= t < end_s, as two columns of indices."""
    first = np.searchsorted(times_s, start_s, side="left")
    inside = np.searchsorted(times_s, end_s, side="left") - first
    steps = np.flatnonzero(inside > 0)
    first, inside = first[steps], inside[steps]
    begun = np.cumsum(inside) - inside
    return np.repeat(steps, inside), np.arange(inside.sum()) + np.repeat(first - begun, inside)


def stretches(journal: Steps) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns start, end and KV held at both ends of stretches in which a server runs. Each begins with a
    step and lasts until the server's next step begins or all its begun steps have ended. Stretches of one
    server never overlap, even if its steps do, and together they cover the union of its steps."""
    order = np.lexsort((journal["start_s"], journal["instance"]))
    instance, start_s, end_s = (journal[name][order] for name in ("instance", "start_s", "end_s"))
    turns = np.flatnonzero(instance[1:] != instance[:-1]) + 1
    next_s = np.append(start_s[1:], np.inf)[: len(start_s)]
    next_s[turns - 1] = np.inf
    idle_s = np.concatenate([np.maximum.accumulate(ends_s) for ends_s in np.split(end_s, turns)])
    until_s = np.maximum(np.minimum(next_s, idle_s), start_s)
    return start_s, until_s, journal["kv_used"][order], journal["kv_peak"][order]


def most_at_once(begin_s: Floats, end_s: Floats, amounts: Floats | None = None) -> float:
    """Returns the highest sum of amounts (default 1 each), each present from begin_s until before end_s."""
    begun_s, begun = _sorted_sums(begin_s, amounts)
    ended_s, ended = _sorted_sums(end_s, amounts)
    gone = np.append(0.0, ended)[np.searchsorted(ended_s, begun_s, side="right")]
    return float(np.max(begun - gone, initial=0.0))


def _sorted_sums(at_s: Floats, amounts: Floats | None) -> tuple[Floats, Floats]:
    if amounts is None:
        return np.sort(at_s), np.arange(1.0, len(at_s) + 1.0)
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(amounts[order])
