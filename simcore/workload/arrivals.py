"""Draws the requests of a workload: their arrival times and lengths.

    constant   arrival_i = i / rate                poisson   gaps ~ exponential(1 / rate)
    gamma      gaps ~ gamma(shape 1/cv^2), mean 1 / rate
    poisson, span_intervals s: arrival_i = s / rate * (g_1 + .. + g_i) / (g_1 + .. + g_n-1), g ~ exponential:
               a Poisson process given its last arrival (gaps over the span are Dirichlet(1..1))
    trace      arrival_i = (recorded_i + jitter * u_i - the first of them) / rate_scale

In a workload with `sessions` the requests are turns, with prompts as in simcore/workload/sessions.py; with
`tenants` they are several tenants' (simcore/workload/tenants.py).
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError
from simcore.workload.drawn import Drawn
from simcore.workload.lengths import longest, only, sample
from simcore.workload.recorded import in_window, recorded
from simcore.workload.request_logs import Tokens
from simcore.workload.sessions import Turns, laid_out
from simcore.workload.spec import (
    MOST_REQUESTS,
    MOST_TURNS,
    ClosedLoop,
    ConstantArrivals,
    GammaArrivals,
    Lengths,
    OfTenants,
    PoissonArrivals,
    Sessions,
    TraceArrivals,
    Workload,
)
from simcore.workload.streams import Purpose, Streams
from simcore.workload.tenants import of_tenants

Paced = ConstantArrivals | PoissonArrivals | GammaArrivals


def draw(workload: Workload, seed: int, replica: int) -> Drawn:
    """The requests of a workload in which every list of alternatives has exactly one value.

    The same arguments give the same requests. An output longer than `workload.max_tokens` is cut. From a
    recorded trace the first `workload.requests` in its window are taken, by recorded time, and lengths that
    the workload names replace recorded ones. Requests with the same prompt have the same prompt length.

    Raises InputError for files that cannot be read or make no sense, for a window without requests and for a
    trace with fewer requests than wanted; ValueError if a list has several values, or seed or replica is not
    an unsigned integer of 64 bits.
    """
    if workload.tenants:
        return of_tenants(workload, Streams(seed, replica), _drawn)
    found, distinct = _drawn(workload, Streams(seed, replica)), workload.distinct_prompts
    if distinct is None:
        return found
    prompts = found.prompt_tokens[np.arange(len(found.prompt_tokens)) % distinct]
    return replace(found, prompt_tokens=prompts, distinct=distinct, hash_ids=None)


def _drawn(workload: Workload, streams: Streams) -> Drawn:
    """The requests of a workload without tenants, all prompts different."""
    assert not isinstance(workload.arrivals, OfTenants)
    if isinstance(workload.arrivals, TraceArrivals):
        return _replayed(workload, workload.arrivals, streams)
    count = only("requests", workload.requests)
    if workload.sessions is not None:
        return _conversations(workload, workload.sessions, count, streams)
    prompts = _lengths("prompt_tokens", workload, None, count, streams)
    outputs, max_tokens = _outputs(workload, None, count, streams)
    if isinstance(workload.arrivals, ClosedLoop):
        return Drawn(None, prompts, outputs, max_tokens, _longest_prompt(workload, prompts))
    rate_per_s = only("rate_per_s", workload.arrivals.rates)
    times = _times(workload.arrivals, count, streams)
    longest_prompt = _longest_prompt(workload, prompts)
    return Drawn(times, prompts, outputs, max_tokens, longest_prompt, rate_per_s=rate_per_s)


# -- arrivals --------------------------------------------------------------------------------------


def _times(arrivals: Paced, count: int, streams: Streams) -> NDArray[np.float64]:
    """Times of arrival [count] in seconds, the first 0."""
    intervals = _intervals(arrivals, count, streams.of("arrivals"))
    # A given interval is not converted to a rate and back: 49 s would become 49.00000000000001 s.
    seconds = arrivals.interval_s
    return intervals * seconds[0] if seconds else intervals / only("rate_per_s", arrivals.rates)


def _intervals(arrivals: Paced, count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Times of arrival [count] in mean intervals, the first 0."""
    if isinstance(arrivals, ConstantArrivals):
        return np.arange(count, dtype=np.float64)
    times = np.zeros(count)
    if isinstance(arrivals, GammaArrivals):
        shape = arrivals.cv**-2.0
        gaps = random.standard_gamma(shape, count - 1) / shape
    else:
        gaps = random.standard_exponential(count - 1)
    np.cumsum(gaps, out=times[1:])
    if isinstance(arrivals, PoissonArrivals) and arrivals.span_intervals is not None and count > 1:
        times /= times[-1]
        times *= arrivals.span_intervals
    return times


_OF_TURNS: tuple[Purpose, ...] = ("turns", "prompt_tokens", "output_tokens")


def _conversations(workload: Workload, sessions: Sessions, count: int, streams: Streams) -> Drawn:
    """Draws `count` turns of sessions. Turns that `max_context_tokens` cuts off do not count: sessions are
    drawn until there are enough turns."""
    assert workload.prompt_tokens is not None
    assert workload.output_tokens is not None
    assert not isinstance(workload.arrivals, TraceArrivals | ClosedLoop | OfTenants)
    turns = longest(sessions.turns, "sessions.turns")
    if turns > MOST_TURNS:
        raise InputError(f"workload.sessions.turns: at most {MOST_TURNS} turns, got up to {turns}")
    new_tokens = longest(workload.prompt_tokens, "prompt_tokens")
    most = workload.max_tokens or longest(workload.output_tokens, "output_tokens")
    room = sessions.max_context_tokens - most
    first = sessions.shared_prefix_tokens + new_tokens
    if first > room:
        raise InputError(
            f"workload.sessions.max_context_tokens: {sessions.max_context_tokens}; a first turn may take"
            f" {first + most} tokens ({first} of prompt, {most} of answer)"
        )
    numbers, news, answers = map(streams.of, _OF_TURNS)
    parts: list[tuple[NDArray[np.bool_], Tokens, Tokens]] = []
    while (missing := count - sum(len(part[0]) for part in parts)) > 0:
        each = sample(sessions.turns, -(-missing // turns), numbers, "sessions.turns")
        new = sample(workload.prompt_tokens, int(each.sum()), news, "prompt_tokens")
        answer = np.minimum(sample(workload.output_tokens, len(new), answers, "output_tokens"), most)
        parts.append(laid_out(each, new, answer, sessions.shared_prefix_tokens, room))
    opens, prompts, outputs = (np.concatenate(columns)[:count] for columns in zip(*parts, strict=True))
    arrival_s = np.full(count, np.nan)
    arrival_s[opens] = _times(workload.arrivals, int(opens.sum()), streams)
    rate_per_s = only("rate_per_s", workload.arrivals.rates)
    longest_prompt = min(room, first + (turns - 1) * (new_tokens + most))
    laid = Turns(opens, sessions.think_s, sessions.shared_prefix_tokens)
    return Drawn(arrival_s, prompts, outputs, most, longest_prompt, rate_per_s=rate_per_s, turns=laid)


def _replayed(workload: Workload, arrivals: TraceArrivals, streams: Streams) -> Drawn:
    """The requests of a recorded trace. In this order: window, requests left out, the first ones, lengths,
    jitter, scale."""
    found, start_s = in_window(recorded(arrivals), arrivals)
    useful = np.ones(len(found.time_s), dtype=bool)
    for column, given in (
        (found.prompt_tokens, workload.prompt_tokens),
        (found.output_tokens, workload.output_tokens),
    ):
        if column is not None and given is None:
            useful &= column > 0
    at = _first(np.flatnonzero(useful), workload, arrivals)
    count = len(at)
    left_out = int(at[-1]) + 1 - count if workload.requests else len(useful) - count
    prompts = _lengths("prompt_tokens", workload, _taken(found.prompt_tokens, at), count, streams)
    outputs, max_tokens = _outputs(workload, _taken(found.output_tokens, at), count, streams)
    times, scale = found.time_s[at], only("rate_scale", arrivals.rate_scale)
    span_s = float(times[-1] - times[0]) / scale
    if arrivals.jitter_s:
        times = times + streams.of("jitter").random(count) * arrivals.jitter_s
        order = np.argsort(times, kind="stable")
        times, prompts, outputs, at = times[order], prompts[order], outputs[order], at[order]
    rate_per_s = (count - 1) / span_s if span_s > 0.0 else None
    longest_prompt = _longest_prompt(workload, prompts)
    came_s = (times - times[0]) / scale
    hash_ids = None if found.hash_ids is None else [found.hash_ids[i] for i in at.tolist()]
    return Drawn(
        came_s, prompts, outputs, max_tokens, longest_prompt, left_out, rate_per_s,
        hash_ids=hash_ids, hash_block_tokens=arrivals.hash_block_tokens,
        lead_s=(float(times[0]) - start_s) / scale,
    )  # fmt: skip


def _taken(column: Tokens | None, at: NDArray[np.intp]) -> Tokens | None:
    return None if column is None else column[at]


def _first(at: NDArray[np.intp], workload: Workload, arrivals: TraceArrivals) -> NDArray[np.intp]:
    """The first `workload.requests` of the indices `at`, or all. Raises InputError if there are too few or
    too many."""
    if not len(at):
        raise InputError(f"workload.arrivals: {arrivals.path}: no request has prompt and output tokens")
    if workload.requests is not None:
        limit = only("requests", workload.requests)
        if limit > len(at):
            raise InputError(f"workload.requests: {limit}, but {arrivals.path} has {len(at)} to replay")
        return at[:limit]
    if len(at) > MOST_REQUESTS:
        raise InputError(f"workload.requests: at most {MOST_REQUESTS}, {arrivals.path} has {len(at)}")
    return at


# -- lengths ---------------------------------------------------------------------------------------


def _lengths(
    name: Literal["prompt_tokens", "output_tokens"],
    workload: Workload,
    recorded: Tokens | None,
    count: int,
    streams: Streams,
) -> Tokens:
    """Tokens [count]: drawn from the workload's lengths, else as recorded."""
    lengths: Lengths | None = getattr(workload, name)
    if lengths is not None:
        return sample(lengths, count, streams.of(name), name)
    if recorded is None:
        role = name.removesuffix("_tokens")
        raise InputError(f"workload.{name}: is missing, and arrivals.columns names no column for {role}")
    return recorded


def _outputs(workload: Workload, recorded: Tokens | None, count: int, streams: Streams) -> tuple[Tokens, int]:
    """Output tokens [count], and the most that a server must reserve for one request."""
    outputs = _lengths("output_tokens", workload, recorded, count, streams)
    if workload.max_tokens is not None:
        return np.minimum(outputs, workload.max_tokens), workload.max_tokens
    if workload.output_tokens is not None:
        return outputs, longest(workload.output_tokens, "output_tokens")
    return outputs, int(outputs.max())


def _longest_prompt(workload: Workload, prompts: Tokens) -> int:
    """The longest prompt that the workload can ask for; for a trace, the longest that it has."""
    if workload.prompt_tokens is None:
        return int(prompts.max())
    return longest(workload.prompt_tokens, "prompt_tokens")
