"""Draws the requests of a workload with tenants.

    share    request i of the workload's arrivals is tenant j's with probability share_j, whatever its lengths
    merge    arrivals of several processes in order of time; of equal times the workload's, then by tenant
    lead     from a moment that all processes have in common until the first request of one:
             poisson, gamma    U * gamma(shape + 1) / shape / rate, the wait from a random moment on
                               (Poisson: shape 1, exponential), so that merged Poisson processes are Poisson
             constant          0            trace   (first recorded - begin of the window) / rate_scale

The first request of all comes at 0. Without traces there are `requests` of them; with traces paced arrivals
go on until the last recorded request, and the first `requests` of all are taken. Each process has streams of
its own, and so have lengths that not all tenants of a process have. A tenant alone has the draws of a
workload without tenants.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError
from simcore.workload.drawn import Drawn, Tenants
from simcore.workload.lengths import longest, only, sample
from simcore.workload.request_logs import Tokens
from simcore.workload.spec import (
    MOST_REQUESTS,
    MOST_TENANTS,
    ClosedLoop,
    ConstantArrivals,
    GammaArrivals,
    Lengths,
    Process,
    TraceArrivals,
    Workload,
    shares,
)
from simcore.workload.streams import Purpose, Streams

# Draws a workload without tenants.
Alone = Callable[[Workload, Streams], Drawn]
LENGTHS: tuple[Purpose, Purpose] = ("prompt_tokens", "output_tokens")


def of_tenants(workload: Workload, streams: Streams, alone: Alone) -> Drawn:
    """The requests of a workload with tenants. Raises InputError; see `arrivals.draw`."""
    every = [
        _Source(workload, process, streams._replace(part=number * (MOST_TENANTS + 1)), alone)
        for number, process in enumerate(workload.processes)
    ]
    if len(every) == 1:
        return every[0].drawn(workload.requests)
    wanted = None if workload.requests is None else only("requests", workload.requests)
    return _merged(every, _parts(every, wanted), wanted)


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Draws the requests of one process."""

    workload: Workload
    process: Process
    streams: Streams
    alone: Alone

    def drawn(self, requests: list[int] | None) -> Drawn:
        """Its requests, each with its tenant; `requests`: how many, None for all of a trace."""
        whole = self.workload
        limits = [[self._longest(name, place) for name in LENGTHS] for place in self.process.tenants]
        common: dict[str, Lengths | None] = {name: self._common(name) for name in LENGTHS}
        plain = {"arrivals": self.process.arrivals, "requests": requests, "max_tokens": None, "tenants": []}
        try:
            found = self.alone(whole.model_copy(update={**common, **plain}), self.streams)
        except InputError as error:
            raise InputError(self._blamed(str(error))) from None
        of = self._of(len(found.prompt_tokens))
        most, longest_prompt = [0] * len(whole.tenants), 0
        for place, (prompt, answer) in zip(self.process.tenants, limits, strict=True):
            tenant, mine = whole.tenants[place], of == place
            for name, tokens in zip(LENGTHS, (found.prompt_tokens, found.output_tokens), strict=True):
                own = getattr(tenant, name)
                if own is not None and own is not common[name]:
                    tokens[mine] = self._sampled(name, own, place, int(mine.sum()))
            most[place] = tenant.max_tokens or whole.max_tokens or answer or found.max_tokens
            found.output_tokens[mine] = np.minimum(found.output_tokens[mine], most[place])
            longest_prompt = max(longest_prompt, prompt or found.longest_prompt)
        tenants = Tenants(of, tuple(most))
        return replace(found, max_tokens=max(most), longest_prompt=longest_prompt, tenants=tenants)

    def _common(self, name: Purpose) -> Lengths | None:
        """The lengths that the process draws for all requests: the workload's, if a tenant has none of its
        own, else the first tenant's."""
        own: list[Lengths | None] = [getattr(self.workload.tenants[i], name) for i in self.process.tenants]
        return own[0] if all(own) else getattr(self.workload, name)

    def _longest(self, name: Purpose, place: int) -> int:
        """The greatest length that a tenant can draw; 0 if it has those of a trace."""
        own: Lengths | None = getattr(self.workload.tenants[place], name)
        if own is not None:
            return longest(own, f"tenants[{place}].{name}")
        common: Lengths | None = getattr(self.workload, name)
        return 0 if common is None else longest(common, name)

    def _sampled(self, name: Purpose, own: Lengths, place: int, count: int) -> Tokens:
        streams = self.streams._replace(part=self.streams.part + 1 + place)
        return sample(own, count, streams.of(name), f"tenants[{place}].{name}")

    def _of(self, count: int) -> NDArray[np.int16]:
        """The tenant of each request, [count]."""
        places = np.array(self.process.tenants, dtype=np.int16)
        if len(places) == 1:
            return np.full(count, places[0], dtype=np.int16)
        edges = np.cumsum(shares(self.workload, self.process.tenants)[:-1])
        found: NDArray[np.int16] = places[
            np.searchsorted(edges, self.streams.of("tenants").random(count), "right")
        ]
        return found

    def _blamed(self, text: str) -> str:
        """A fault, with arrivals of a tenant's own under their name."""
        (place, *others) = self.process.tenants
        own = not others and self.workload.tenants[place].arrivals is not None
        return text.replace("workload.arrivals", f"workload.tenants[{place}].arrivals", 1) if own else text

    @property
    def rate_per_s(self) -> float:
        """The mean rate of paced arrivals."""
        assert not isinstance(self.process.arrivals, TraceArrivals | ClosedLoop)
        return only("rate_per_s", self.process.arrivals.rates)

    @property
    def cv(self) -> float:
        """Standard deviation of the gaps of paced arrivals / their mean."""
        return self.process.arrivals.cv if isinstance(self.process.arrivals, GammaArrivals) else 1.0

    def lead_s(self) -> float:
        """The lead of paced arrivals; see the head of this file."""
        if isinstance(self.process.arrivals, ConstantArrivals):
            return 0.0
        random, shape = self.streams.of("lead"), self.cv**-2.0
        return float(random.random() * random.standard_gamma(shape + 1.0) / shape) / self.rate_per_s

    def until(self, end_s: float, most: int) -> Drawn:
        """The requests of paced arrivals that come until `end_s`, `most` at most."""
        lead_s, mean = self.lead_s(), self.rate_per_s * end_s
        if mean > 2.0 * MOST_REQUESTS and most == MOST_REQUESTS:
            raise _too_many(mean)
        count = min(most, math.ceil(mean + 4.0 * self.cv * math.sqrt(mean)) + 10)
        while True:
            found = self.drawn([count])
            assert found.arrival_s is not None
            if count >= most or lead_s + found.arrival_s[-1] > end_s:
                number = int(np.searchsorted(found.arrival_s, end_s - lead_s, side="right"))
                return replace(found.first(number), lead_s=lead_s)
            count = min(most, 2 * count)


def _parts(every: Sequence[_Source], wanted: int | None) -> list[Drawn]:
    """The requests of each process: those among the first `wanted` of all, and perhaps more."""
    replayed = {
        i: one.drawn(None) for i, one in enumerate(every) if isinstance(one.process.arrivals, TraceArrivals)
    }
    paced = [one for i, one in enumerate(every) if i not in replayed]
    most = MOST_REQUESTS if wanted is None else wanted
    if replayed:
        end_s = max(one.lead_s + _last_s(one) for one in replayed.values())
        rest = iter([one.until(end_s, most) for one in paced])
        return [replayed[i] if i in replayed else next(rest) for i in range(len(every))]
    assert wanted is not None
    end_s = (wanted + 4.0 * math.sqrt(wanted)) / sum(one.rate_per_s for one in every)
    while True:
        parts = [one.until(end_s, most) for one in paced]
        if sum(len(one.prompt_tokens) for one in parts) >= wanted:
            return parts
        end_s *= 2.0


def _last_s(drawn: Drawn) -> float:
    assert drawn.arrival_s is not None
    return float(drawn.arrival_s[-1])


def _merged(every: Sequence[_Source], parts: Sequence[Drawn], wanted: int | None) -> Drawn:
    """The requests of all parts in order of time, the first at 0; the first `wanted` of them."""
    begin_s = min(one.lead_s for one in parts if len(one.prompt_tokens))
    times = np.concatenate(
        [one.lead_s - begin_s + one.arrival_s for one in parts if one.arrival_s is not None]
    )
    if wanted is not None and wanted > len(times):
        until = "come until the last one of the traces"
        raise InputError(f"workload.requests: {wanted}, but {len(times)} {until}")
    if wanted is None and len(times) > MOST_REQUESTS:
        raise _too_many(len(times))
    order = np.argsort(times, kind="stable")[:wanted]
    times, hash_ids = times[order], _hash_ids(every, parts)
    tenants = [one.tenants for one in parts if one.tenants is not None]
    most = tuple(max(each) for each in zip(*(one.max_tokens for one in tenants), strict=True))
    return Drawn(
        times,
        np.concatenate([one.prompt_tokens for one in parts])[order],
        np.concatenate([one.output_tokens for one in parts])[order],
        max(most),
        max(one.longest_prompt for one in parts),
        sum(one.left_out for one in parts),
        _rate_per_s(every, times),
        hash_ids=None if hash_ids is None else [hash_ids[i] for i in order.tolist()],
        hash_block_tokens=next((one.hash_block_tokens for one in parts if one.hash_ids), 512),
        tenants=Tenants(np.concatenate([one.of for one in tenants])[order], most),
    )


def _rate_per_s(every: Sequence[_Source], times: NDArray[np.float64]) -> float | None:
    """The sum of the rates of paced arrivals; with traces (n - 1) / span, None if all come at once."""
    if any(isinstance(one.process.arrivals, TraceArrivals) for one in every):
        return (len(times) - 1) / float(times[-1]) if times[-1] > 0.0 else None
    return sum(one.rate_per_s for one in every)


def _hash_ids(every: Sequence[_Source], parts: Sequence[Drawn]) -> list[tuple[int, ...]] | None:
    """The blocks of all prompts, numbered anew, since those of different files are different; None if no part
    has any."""
    if all(one.hash_ids is None for one in parts):
        return None
    known: dict[tuple[str, int], int] = {}
    found: list[tuple[int, ...]] = []
    for source, one in zip(every, parts, strict=True):
        path = getattr(source.process.arrivals, "path", "")
        for names in one.hash_ids or [()] * len(one.prompt_tokens):
            found.append(tuple(known.setdefault((path, name), len(known)) for name in names))
    return found


def _too_many(count: float) -> InputError:
    return InputError(
        f"workload.requests: at most {MOST_REQUESTS}, and until the traces end {count:.3g} come"
    )
