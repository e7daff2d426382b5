"""Figures of a serving run: pure functions of its requests and of the journal of its steps.

    TTFT  = first_token_s - arrival_s              E2E   = finish_s - arrival_s
    TPOT  = (E2E - TTFT) / (output_tokens - 1), of requests of more than one token       (vLLM's formulas)
    queue = scheduled_s - arrival_s                duration = last finish - first arrival
    ITL   = time between two tokens of a request, pooled over all requests
    iterations = replays of the steps that give tokens     overlap = tokens / iterations / requests
    prefix hit share = prompt tokens found in a cache / prompt tokens

and over a window of the run (`simcore/studies/serving/window.py`):

    offered     = requests that come in it / its length
    goodput     = requests that come in it and meet every SLO / its length = attainment * offered
    attainment  = requests that come in it and meet every SLO / requests that come in it
    throughput  = requests that finish, or tokens that are generated, in it / its length; a prompt's tokens
                  count when its answer's first token comes
    utilisation = time of it in which a server runs a step / its length, mean over servers

or over the whole run, as in vLLM's benchmark, with the duration as length. Latencies are of the requests that
come in the window; gaps between tokens are of the steps that begin in it. Maxima and counts are always of the
whole run.

Percentiles of requests are NumPy's linear ones, like vLLM's. Rejected requests have no latency, but count as
arrivals.

ITL: a step of r replays in t seconds is, for each request that decodes in it, r gaps of t / r. The
percentiles are of this weighted sample: the least gap such that at least p percent of all gaps are not
longer (NumPy's "inverted_cdf"). A step does not include the time for which its requests stood still before
it (preempted, in steps that only prefilled, while the host prepared a launch), so percentiles leave this
time out; `unseen_gaps_s` is its sum. The mean includes it: all time between tokens over the number of gaps,
sum(finish_s - first_token_s) / sum(output_tokens - 1).

Means over time weigh busy and idle time alike. Batch and queue are of all servers together, KV shares of one
server. As in Flover, an iteration that only prefills and gives no token does not count.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Protocol

import numpy as np

from simcore.studies.columns import WHOLE_RUN
from simcore.studies.common import student_t
from simcore.studies.serving.levels import most_at_once, stretches
from simcore.studies.serving.served import Bools, Floats, Ints, Served, Steps
from simcore.studies.serving.window import Window, whole_run

# A value, None if the run has none (no gap, no SLO, no duration), and its unit.
Figure = tuple[float | None, str]
PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
# Figures of a window.
WINDOWED = (
    *(f"{name}_mean_s" for name in LATENCIES),
    *(f"{name}_p{percent}_s" for name in LATENCIES for percent in PERCENTILES),
    *("request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s"),
    *("slo_attainment_ttft", "slo_attainment_tpot", "slo_attainment_e2e", "slo_attainment"),
    *("goodput_per_s", "utilisation", "mean_batch", "mean_kv_share", "mean_queue"),
)


class Slo(Protocol):
    """SLOs: the longest allowed times; None: no limit."""

    @property
    def ttft_s(self) -> float | None:
        """To the first token."""

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; a request of one token meets it."""

    @property
    def e2e_s(self) -> float | None:
        """To the last token."""


# What requests are promised: nothing, all the same, or by the place of their tenant.
Promised = Slo | Sequence[Slo] | None


def figures(
    served: Served,
    journal: Steps,
    *,
    kv_limit: float,
    servers: int,
    slo: Promised,
    window: Window | None = None,
) -> dict[str, Figure]:
    """Returns every figure of one run by its name. `kv_limit`: units of KV of one of the `servers`; `slo`: of
    all requests, or one of each tenant's; `window`: the part of the run for the `WINDOWED` figures, by
    default the whole run."""
    window = window or whole_run(served)
    came = served if window.whole else served.only(window.came)
    took_s = latencies(came)
    found = spreads(took_s)
    found |= _spread("itl", weighted_percentiles(*gaps(steps_in(journal, window))), mean_gap_s(came))
    found |= _throughput(served, journal, window)
    found |= attainment(came, took_s, slo, window.length_s)
    found |= occupancy(journal, kv_limit, servers, window)
    found |= _queue(served, window)
    found |= _counts(served, journal)
    return found


def both(
    served: Served, journal: Steps, *, kv_limit: float, servers: int, slo: Promised, window: Window
) -> dict[str, Figure]:
    """Returns the figures of a window, the `WINDOWED` ones of the whole run with the suffix `WHOLE_RUN`, and
    the window itself.

    A run too short for a window, with requests at a rate, has a goodput only of the whole run: including
    warm-up and drain, it is not comparable with the rate.
    """
    whole = figures(served, journal, kv_limit=kv_limit, servers=servers, slo=slo)
    found = whole
    if not window.whole:
        found = figures(served, journal, kv_limit=kv_limit, servers=servers, slo=slo, window=window)
    if window.unrated:
        found = {**found, "goodput_per_s": (None, "1/s")}
    return {
        **found,
        **{f"{name}{WHOLE_RUN}": whole[name] for name in WINDOWED},
        "offered_per_s": (offered_per_s(served, window), "1/s"),
        "window_begin_s": (window.begin_s, "s"),
        "window_end_s": (window.end_s, "s"),
        "window_requests": (float(window.came.sum()), ""),
    }


def offered_per_s(served: Served, window: Window) -> float | None:
    """Returns the requests that come in a window over its length; in a whole run, until its last arrival."""
    if not window.whole or not len(served):
        return _over(float(window.came.sum()), window.length_s)
    last_s = float(served.arrival_s.max())
    return _over(float((served.arrival_s < last_s).sum()), last_s - window.begin_s)


def steps_in(journal: Steps, window: Window) -> Steps:
    """Returns the steps that begin in a window."""
    if window.whole:
        return journal
    start_s = journal["start_s"]
    inside = (start_s >= window.begin_s) & (start_s < window.end_s)
    return {name: journal[name][inside] for name in ("start_s", "end_s", "replays", "decoding")}


def latencies(served: Served) -> dict[str, Floats]:
    """Returns the latencies of finished requests, s, by name, each [finished]; `tpot` only of requests with
    more than one token."""
    done = served.finished
    arrival_s, first_s, finish_s = served.arrival_s[done], served.first_token_s[done], served.finish_s[done]
    gaps_each = served.output_tokens[done] - 1
    several = gaps_each > 0
    return {
        "ttft": first_s - arrival_s,
        "tpot": (finish_s - first_s)[several] / gaps_each[several],
        "e2e": finish_s - arrival_s,
        "queue": served.scheduled_s[done] - arrival_s,
    }


def gaps(journal: Steps) -> tuple[Floats, Ints]:
    """Returns the gaps between tokens in seconds, and the number of each; the head of this file says which
    time they leave out."""
    decoded = np.asarray(journal["replays"] * journal["decoding"], dtype=np.int64)
    rows = np.flatnonzero(decoded)
    span_s = journal["end_s"][rows] - journal["start_s"][rows]
    return span_s / journal["replays"][rows], decoded[rows]


def mean_gap_s(served: Served) -> float | None:
    """Returns the mean time between two tokens of a request, over all tokens of all requests."""
    done = served.finished
    number = int((served.output_tokens[done] - 1).sum())
    return _over(float((served.finish_s[done] - served.first_token_s[done]).sum()), number)


def unseen_gaps_s(served: Served, journal: Steps) -> float:
    """Returns the seconds between tokens, over all requests, that no step accounts for."""
    done = served.finished
    gap_s, number = gaps(journal)
    return float((served.finish_s[done] - served.first_token_s[done]).sum() - (gap_s * number).sum())


def weighted_percentiles(
    values: Floats, weights: Ints, percentiles: Sequence[float] = PERCENTILES
) -> tuple[float, ...]:
    """Returns percentiles of values with positive integer `weights`; empty without values. `percentiles`: to
    a tenth of a percent."""
    if not len(values):
        return ()
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    # In whole numbers: a float share that rounding makes too large would give the next gap.
    needed = [-(-round(10 * percent) * int(reached[-1]) // 1000) for percent in percentiles]
    return tuple(values[order[np.searchsorted(reached, needed, side="left")]].tolist())


def spreads(took_s: Mapping[str, Floats]) -> dict[str, Figure]:
    """Returns the means and the percentiles of latencies by their names."""
    found: dict[str, Figure] = {}
    for name, seconds in took_s.items():
        found |= _spread(name, np.percentile(seconds, PERCENTILES) if len(seconds) else (), _mean(seconds))
    return found


def _spread(name: str, percentiles: Sequence[float] | Floats, mean: float | None) -> dict[str, Figure]:
    found: dict[str, Figure] = {f"{name}_mean_s": (mean, "s")}
    for i, percent in enumerate(PERCENTILES):
        found[f"{name}_p{percent}_s"] = (float(percentiles[i]) if len(percentiles) else None, "s")
    return found


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _over(amount: float, divisor: float) -> float | None:
    return amount / divisor if divisor > 0 else None


def _duration_s(served: Served) -> float:
    first_s, last_s = served.window_s
    return last_s - first_s


def _throughput(served: Served, journal: Steps, window: Window) -> dict[str, Figure]:
    done, length_s = served.finished, window.length_s
    if window.whole:
        finished, prompted = done, done
        outputs = float(served.output_tokens[done].sum())
    else:
        finished, prompted = (
            done & (at_s >= window.begin_s) & (at_s < window.end_s)
            for at_s in (served.finish_s, served.first_token_s)
        )
        outputs = _generated(journal, window)
    prompts = float(served.prompt_tokens[prompted].sum())
    return {
        "request_throughput_per_s": (_over(int(finished.sum()), length_s), "1/s"),
        "output_throughput_tokens_per_s": (_over(outputs, length_s), "1/s"),
        "total_throughput_tokens_per_s": (_over(prompts + outputs, length_s), "1/s"),
        "duration_s": (_duration_s(served), "s"),
    }


def _generated(journal: Steps, window: Window) -> float:
    """Returns the tokens generated in a window; a burst partly in it counts in proportion."""
    start_s, end_s = np.ascontiguousarray(journal["start_s"]), np.ascontiguousarray(journal["end_s"])
    ends = (end_s >= window.begin_s) & (end_s < window.end_s)
    inside_s = end_s.clip(window.begin_s, window.end_s) - start_s.clip(window.begin_s, window.end_s)
    took_s = end_s - start_s
    share = np.divide(inside_s, took_s, out=ends.astype(np.float64), where=took_s > 0.0)
    return float(
        (journal["replays"] * journal["decoding"] * share).sum() + journal["first_tokens"][ends].sum()
    )


def attainment(
    came: Served, found_s: Mapping[str, Floats], slo: Promised, length_s: float
) -> dict[str, Figure]:
    """Returns the shares of requests that keep an SLO, each by itself and all together, and the goodput over
    `length_s`. A request without a promise keeps it once it is answered."""
    kept = _kept(came, found_s, slo)
    found: dict[str, Figure] = {}
    for name in ("ttft", "tpot", "e2e"):
        share = _over(int(kept[name].sum()), len(came)) if name in kept else None
        found[f"slo_attainment_{name}"] = (share, "")
    good = int(np.logical_and.reduce(list(kept.values())).sum()) if kept else 0
    found["slo_attainment"] = (_over(good, len(came)) if kept else None, "")
    found["goodput_per_s"] = (_over(good, length_s) if kept else None, "1/s")
    return found


def _kept(served: Served, found_s: Mapping[str, Floats], slo: Promised) -> dict[str, Bools]:
    """Returns which finished requests meet each given SLO, by its name, each [finished]."""
    if slo is None:
        return {}
    tpot_s = np.zeros(len(found_s["e2e"]))
    tpot_s[served.output_tokens[served.finished] > 1] = found_s["tpot"]
    took_s = {"ttft": found_s["ttft"], "tpot": tpot_s, "e2e": found_s["e2e"]}
    slos = list(slo) if isinstance(slo, Sequence) else [slo]
    tenant = served.tenant[served.finished]
    kept: dict[str, Bools] = {}
    for name, seconds in took_s.items():
        most_s: list[float | None] = [getattr(one, f"{name}_s") for one in slos]
        if any(limit_s is not None for limit_s in most_s):
            by_tenant = np.array([math.inf if limit_s is None else limit_s for limit_s in most_s])
            kept[name] = seconds <= by_tenant[tenant if len(slos) > 1 else 0]
    return kept


def occupancy(journal: Steps, kv_limit: float, servers: int, window: Window) -> dict[str, Figure]:
    """Returns by how much servers, batches and memory were in use, from the steps of `servers` servers."""
    limits_s, length_s = (window.begin_s, window.end_s), window.length_s
    begin_s, until_s, used, peak = stretches(journal)
    from_s, to_s = begin_s.clip(*limits_s), until_s.clip(*limits_s)
    busy_s, took_s = to_s - from_s, until_s - begin_s
    # KV at the middle of a stretch's part in the window, since it grows linearly.
    place = np.divide(
        (from_s + to_s) / 2.0 - begin_s, took_s, out=np.full(len(took_s), 0.5), where=took_s > 0.0
    )
    held = used + (peak - used) * place
    start_s, end_s = np.ascontiguousarray(journal["start_s"]), np.ascontiguousarray(journal["end_s"])
    decoding = np.ascontiguousarray(journal["decoding"])
    decoding_s = float((decoding * (end_s.clip(*limits_s) - start_s.clip(*limits_s))).sum())
    return {
        "utilisation": (_over(float(busy_s.sum()), length_s * servers), ""),
        "mean_batch": (_over(decoding_s, length_s), ""),
        "max_batch": (most_at_once(start_s, end_s, decoding), ""),
        "mean_kv_share": (_over(float((busy_s * held).sum()), length_s * servers * kv_limit), ""),
        "max_kv_share": (_over(float(np.max(peak, initial=0.0)), kv_limit), ""),
    }


def _queue(served: Served, window: Window) -> dict[str, Figure]:
    done = served.finished
    arrival_s, scheduled_s = served.arrival_s[done], served.scheduled_s[done]
    limits_s = (window.begin_s, window.end_s)
    waiting_s = float((scheduled_s.clip(*limits_s) - arrival_s.clip(*limits_s)).sum())
    return {
        "mean_queue": (_over(waiting_s, window.length_s), ""),
        "max_queue": (most_at_once(arrival_s, scheduled_s), ""),
    }


def _counts(served: Served, journal: Steps) -> dict[str, Figure]:
    replays, decoding, first = (journal[name] for name in ("replays", "decoding", "first_tokens"))
    iterations = float(replays[(decoding > 0) | (first > 0)].sum())
    tokens = float((replays * decoding).sum() + first.sum())
    return {
        "preemptions": (float(served.preemptions.sum()), ""),
        "waited_for_kv": (float(served.waited_for_kv.sum()), ""),
        "rejected": (float(served.rejected.sum()), ""),
        "completed": (float(served.finished.sum()), ""),
        "iterations": (iterations, ""),
        "overlap": (_over(tokens, iterations * len(served)), ""),
    }


def prefix_hit_share(served: Served) -> Figure:
    """Returns the share of finished requests' prompt tokens that were in a server's cache when their requests
    were first scheduled; vLLM's prefix cache hit rate."""
    done = served.finished
    cached, prompts = served.cached_prompt_tokens[done].sum(), served.prompt_tokens[done].sum()
    return _over(float(cached), float(prompts)), ""


def over_replicas(
    replicas: Sequence[Mapping[str, Figure]],
) -> dict[str, tuple[float | None, float | None, float | None]]:
    """Returns each figure's mean over replicas and the ends of its 95 % confidence interval by Student's t,
    None with one replica. Replicas without a value of a figure are left out of it."""
    names = replicas[0] if replicas else ()
    return {name: _interval([replica[name][0] for replica in replicas]) for name in names}


def _interval(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return (known[0] if known else None), None, None
    mean = fmean(known)
    half = student_t(len(known) - 1) * stdev(known) / math.sqrt(len(known))
    # The interval of values that are never negative is cut at 0.
    return mean, max(0.0, mean - half) if min(known) >= 0.0 else mean - half, mean + half
