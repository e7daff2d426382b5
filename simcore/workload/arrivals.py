"""Draws the requests of a workload: their arrival times and lengths.

    constant   arrival_i = i / rate                poisson   gaps ~ exponential(1 / rate)
    gamma      gaps ~ gamma(shape 1/cv^2), mean 1 / rate
    poisson, span_intervals s: arrival_i = s / rate * (g_1 + .. + g_i) / (g_1 + .. + g_n-1), g ~ exponential:
               a Poisson process given its last arrival (gaps over the span are Dirichlet(1..1))
    trace      arrival_i = (recorded_i + jitter * u_i - the first of them) / rate_scale

In a workload with `sessions` the requests are turns, with prompts as in simcore/workload/sessions.py.

Randomness comes from one counter-based stream for each purpose, keyed by seed, replica and purpose: other
lengths do not change the arrivals, another rate only stretches them, and replicas share no random number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError
from simcore.workload.lengths import longest, only, sample, stamp
from simcore.workload.request_logs import Records, Tokens, read_azure, read_mooncake, read_table
from simcore.workload.requests import Content, Request
from simcore.workload.sessions import Turns, laid_out, turn_contents
from simcore.workload.spec import (
    MOST_REQUESTS,
    MOST_TURNS,
    ClosedLoop,
    ConstantArrivals,
    GammaArrivals,
    Lengths,
    PoissonArrivals,
    Sessions,
    TraceArrivals,
    Workload,
)
from simcore.workload.time_units import doubt
from simcore.workload.vllm_bench import bench_records

Purpose = Literal["arrivals", "prompt_tokens", "output_tokens", "jitter", "turns"]
Paced = ConstantArrivals | PoissonArrivals | GammaArrivals
T = TypeVar("T")

_CHUNK = 1 << 14
# The time unit of formats whose files do not state one; None: the scenario states it.
UNITS = {"table": None, "mooncake": "ms"}


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The requests of one run, in order of arrival; each array is [n].

    `arrival_s` ascends from 0 for the first request, and is None in a closed loop. Every request has at least
    one prompt and one output token, at most `max_tokens` of output and `longest_prompt` of prompt: the most
    that the workload can ask for, drawn or not. `left_out` recorded requests had no prompt or no output
    tokens (for example failed ones) and are not simulated. `rate_per_s`: see `offered_rate_per_s`. Shared
    prompts: with `distinct`, request i has the prompt of request i modulo `distinct`; `hash_ids` [n] name the
    blocks of prompts, of `hash_block_tokens` tokens; `turns`: the turns of sessions, one session after
    another; all but the first turn of each have no time yet (NaN). If all three are None, all prompts differ.
    """

    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_tokens: int
    longest_prompt: int
    left_out: int = 0
    rate_per_s: float | None = None
    distinct: int | None = None
    hash_ids: list[tuple[int, ...]] | None = None
    hash_block_tokens: int = 512
    turns: Turns | None = None

    def first(self, most: int) -> "Drawn":
        """Only the first `most` requests."""
        arrival_s = None if self.arrival_s is None else self.arrival_s[:most]
        return replace(
            self,
            arrival_s=arrival_s,
            prompt_tokens=self.prompt_tokens[:most],
            output_tokens=self.output_tokens[:most],
            turns=None if self.turns is None else self.turns.first(most),
        )


def draw(workload: Workload, seed: int, replica: int) -> Drawn:
    """The requests of a workload in which every list of alternatives has exactly one value.

    The same arguments give the same requests. An output longer than `workload.max_tokens` is cut. From a
    recorded trace the first `workload.requests` in its window are taken, by recorded time, and lengths that
    the workload names replace recorded ones. Requests with the same prompt have the same prompt length.

    Raises InputError for files that cannot be read or make no sense, for a window without requests and for a
    trace with fewer requests than wanted; ValueError if a list has several values, or seed or replica is not
    an unsigned integer of 64 bits.
    """
    found, distinct = _drawn(workload, seed, replica), workload.distinct_prompts
    if distinct is None:
        return found
    prompts = found.prompt_tokens[np.arange(len(found.prompt_tokens)) % distinct]
    return replace(found, prompt_tokens=prompts, distinct=distinct, hash_ids=None)


def _drawn(workload: Workload, seed: int, replica: int) -> Drawn:
    if isinstance(workload.arrivals, TraceArrivals):
        return _replayed(workload, workload.arrivals, seed, replica)
    count = only("requests", workload.requests)
    if workload.sessions is not None:
        return _conversations(workload, workload.sessions, count, seed, replica)
    prompts = _lengths("prompt_tokens", workload, None, count, seed, replica)
    outputs, max_tokens = _outputs(workload, None, count, seed, replica)
    if isinstance(workload.arrivals, ClosedLoop):
        return Drawn(None, prompts, outputs, max_tokens, _longest_prompt(workload, prompts))
    rate_per_s = only("rate_per_s", workload.arrivals.rates)
    times = _times(workload.arrivals, count, seed, replica)
    longest_prompt = _longest_prompt(workload, prompts)
    return Drawn(times, prompts, outputs, max_tokens, longest_prompt, rate_per_s=rate_per_s)


def contents(drawn: Drawn) -> Iterator[Content]:
    """The content of each prompt, one after another; empty if all prompts differ."""
    if drawn.turns is not None:
        yield from turn_contents(drawn.turns, drawn.prompt_tokens, drawn.output_tokens)
    elif drawn.distinct is not None:
        for number, prompt in enumerate(drawn.prompt_tokens.tolist()):
            yield ((number % drawn.distinct, prompt),)
    elif drawn.hash_ids is not None:
        block = drawn.hash_block_tokens
        for hash_ids, prompt in zip(drawn.hash_ids, drawn.prompt_tokens.tolist(), strict=False):
            # A prompt that the workload made shorter is the beginning of the recorded one.
            ends = range(block, prompt + block, block)
            yield tuple((text, min(end, prompt)) for text, end in zip(hash_ids, ends, strict=False))
    else:
        yield from repeat((), len(drawn.prompt_tokens))


def requests(drawn: Drawn) -> Iterator[Request]:
    """Yields the requests one after another. `arrival_s` is NaN if it is not known before the run: in a
    closed loop, and for all turns of a session except the first."""
    max_tokens, content = drawn.max_tokens, contents(drawn)
    for start in range(0, len(drawn.prompt_tokens), _CHUNK):
        part = slice(start, start + _CHUNK)
        prompts = drawn.prompt_tokens[part].tolist()
        outputs = drawn.output_tokens[part].tolist()
        times = [math.nan] * len(prompts) if drawn.arrival_s is None else drawn.arrival_s[part].tolist()
        rows = zip(times, prompts, outputs, strict=True)
        for number, (time_s, prompt, output) in enumerate(rows, start):
            yield Request(number, time_s, prompt, output, max_tokens, content=next(content))


def offered_rate_per_s(workload: Workload, drawn: Drawn) -> float | None:
    """Requests per second that arrive, served or not: the given rate, or (n - 1) / span of a trace, by
    recorded times over rate_scale, so that replicas with other jitter have the same rate. For sessions it is
    the rate at which they open, because the rate of turns is an outcome. None in a closed loop, whose rate is
    also an outcome, and if all recorded requests have the same time."""
    return None if isinstance(workload.arrivals, ClosedLoop) else drawn.rate_per_s


def mean_prompt_tokens(drawn: Drawn) -> float:
    """The mean length of the drawn prompts, in tokens."""
    return float(drawn.prompt_tokens.mean())


def mean_output_tokens(drawn: Drawn) -> float:
    """The mean length of the drawn outputs, in tokens."""
    return float(drawn.output_tokens.mean())


def stream(seed: int, replica: int, purpose: Purpose) -> np.random.Generator:
    """The random generator for one purpose. Replicas are 2^192 counts apart in the same Philox sequence.
    Raises ValueError unless seed and replica are unsigned integers of 64 bits."""
    for name, value in (("seed", seed), ("replica", replica)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be an integer from 0 to 2^64 - 1, got {value!r}")
    word = int.from_bytes(purpose.encode()[:8])
    key = np.array([seed, word], dtype=np.uint64)
    counter = np.array([0, 0, 0, replica], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


# -- arrivals --------------------------------------------------------------------------------------


def _times(arrivals: Paced, count: int, seed: int, replica: int) -> NDArray[np.float64]:
    """Times of arrival [count] in seconds, the first 0."""
    intervals = _intervals(arrivals, count, stream(seed, replica, "arrivals"))
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


def _conversations(workload: Workload, sessions: Sessions, count: int, seed: int, replica: int) -> Drawn:
    """Draws `count` turns of sessions. Turns that `max_context_tokens` cuts off do not count: sessions are
    drawn until there are enough turns."""
    assert workload.prompt_tokens is not None
    assert workload.output_tokens is not None
    assert not isinstance(workload.arrivals, TraceArrivals | ClosedLoop)
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
    numbers, news, answers = (
        stream(seed, replica, name) for name in ("turns", "prompt_tokens", "output_tokens")
    )
    parts: list[tuple[NDArray[np.bool_], Tokens, Tokens]] = []
    while (missing := count - sum(len(part[0]) for part in parts)) > 0:
        each = sample(sessions.turns, -(-missing // turns), numbers, "sessions.turns")
        new = sample(workload.prompt_tokens, int(each.sum()), news, "prompt_tokens")
        answer = np.minimum(sample(workload.output_tokens, len(new), answers, "output_tokens"), most)
        parts.append(laid_out(each, new, answer, sessions.shared_prefix_tokens, room))
    opens, prompts, outputs = (np.concatenate(columns)[:count] for columns in zip(*parts, strict=True))
    arrival_s = np.full(count, np.nan)
    arrival_s[opens] = _times(workload.arrivals, int(opens.sum()), seed, replica)
    rate_per_s = only("rate_per_s", workload.arrivals.rates)
    longest_prompt = min(room, first + (turns - 1) * (new_tokens + most))
    told = Turns(opens, sessions.think_s, sessions.shared_prefix_tokens)
    return Drawn(arrival_s, prompts, outputs, most, longest_prompt, rate_per_s=rate_per_s, turns=told)


def _replayed(workload: Workload, arrivals: TraceArrivals, seed: int, replica: int) -> Drawn:
    """The requests of a recorded trace. In this order: window, requests left out, the first ones, lengths,
    jitter, scale."""
    found = _in_window(_recorded(arrivals), arrivals)
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
    prompts = _lengths("prompt_tokens", workload, _taken(found.prompt_tokens, at), count, seed, replica)
    outputs, max_tokens = _outputs(workload, _taken(found.output_tokens, at), count, seed, replica)
    times, scale = found.time_s[at], only("rate_scale", arrivals.rate_scale)
    span_s = float(times[-1] - times[0]) / scale
    if arrivals.jitter_s:
        times = times + stream(seed, replica, "jitter").random(count) * arrivals.jitter_s
        order = np.argsort(times, kind="stable")
        times, prompts, outputs, at = times[order], prompts[order], outputs[order], at[order]
    rate_per_s = (count - 1) / span_s if span_s > 0.0 else None
    longest_prompt = _longest_prompt(workload, prompts)
    came_s = (times - times[0]) / scale
    hash_ids = None if found.hash_ids is None else [found.hash_ids[i] for i in at.tolist()]
    return Drawn(
        came_s, prompts, outputs, max_tokens, longest_prompt, left_out, rate_per_s,
        hash_ids=hash_ids, hash_block_tokens=arrivals.hash_block_tokens,
    )  # fmt: skip


def _taken(column: Tokens | None, at: NDArray[np.intp]) -> Tokens | None:
    return None if column is None else column[at]


def _in_window(found: Records, arrivals: TraceArrivals) -> Records:
    """The records from start_s (included) to end_s (excluded), so that adjacent windows share none."""
    end_s = math.inf if arrivals.end_s is None else arrivals.end_s
    low, high = np.searchsorted(found.time_s, [arrivals.start_s, end_s])
    if low >= high:
        raise InputError(
            f"workload.arrivals: no request from start_s {arrivals.start_s:g} to end_s {end_s:g};"
            f" {arrivals.path} lasts {found.time_s[-1]:g} s"
        )
    part = slice(int(low), int(high))
    prompts, outputs, hash_ids = found.prompt_tokens, found.output_tokens, found.hash_ids
    return Records(
        found.time_s[part],
        None if prompts is None else prompts[part],
        None if outputs is None else outputs[part],
        None if hash_ids is None else hash_ids[part],
    )


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


def _recorded(arrivals: TraceArrivals) -> Records:
    if arrivals.columns and arrivals.format != "table":
        raise InputError(f"workload.arrivals.columns: format {arrivals.format} has its own columns")
    columns = tuple(sorted(arrivals.columns.items()))
    try:
        kind, unit, block = arrivals.format, arrivals.time_unit, arrivals.hash_block_tokens
        return _read(arrivals.path, stamp(arrivals.path), kind, columns, unit, block)
    except InputError as error:
        raise InputError(f"workload.arrivals.path: {error}") from None


def doubts(workload: Workload) -> list[str]:
    """Warnings about how a trace was read: times that look like another unit. Raises InputError if the file
    cannot be read."""
    given = workload.arrivals
    if not isinstance(given, TraceArrivals) or given.format not in UNITS:
        return []
    unit = UNITS[given.format] or given.time_unit
    said = doubt(_recorded(given).time_s, unit)
    field = "workload.arrivals.time_unit" if given.format == "table" else f"format {given.format}"
    return [f"{given.path}: {said} ({field} is {unit})"] if said else []


# A study draws for every case and replica from the same file.
@lru_cache(maxsize=4)
def _read(
    path: str,
    stamp: tuple[int, int] | None,
    kind: str,
    columns: tuple[tuple[str, str], ...],
    time_unit: str,
    hash_block_tokens: int,
) -> Records:
    if kind == "table":
        return read_table(Path(path), dict(columns), time_unit)
    if kind == "mooncake":
        return read_mooncake(Path(path), hash_block_tokens)
    return {"azure": read_azure, "vllm": bench_records}[kind](Path(path))


# -- lengths ---------------------------------------------------------------------------------------


def _lengths(
    name: Literal["prompt_tokens", "output_tokens"],
    workload: Workload,
    recorded: Tokens | None,
    count: int,
    seed: int,
    replica: int,
) -> Tokens:
    """Tokens [count]: drawn from the workload's lengths, else as recorded."""
    lengths: Lengths | None = getattr(workload, name)
    if lengths is not None:
        return sample(lengths, count, stream(seed, replica, name), name)
    if recorded is None:
        role = name.removesuffix("_tokens")
        raise InputError(f"workload.{name}: is missing, and arrivals.columns names no column for {role}")
    return recorded


def _outputs(
    workload: Workload, recorded: Tokens | None, count: int, seed: int, replica: int
) -> tuple[Tokens, int]:
    """Output tokens [count], and the most that a server must reserve for one request."""
    outputs = _lengths("output_tokens", workload, recorded, count, seed, replica)
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
