"""Lets the requests of a workload come to the servers, and says which server each goes to.

    open loop     at the times that were drawn
    closed loop   a client's next request comes `think_s` after its last answer
    sessions      the first turn at the time that was drawn, each other one `think_s` after the answer before

A router knows what a real one can know: which requests it sent where, and which of them were answered.

    least_loaded   the server with the fewest open requests, the first of several
    round_robin    one after the other
    prefix_aware   the server that was sent the longest beginning of the prompt, if that is a good part of it
                   (`WORTH`) and the server has not far more open requests than the least loaded one (more
                   than `FAR` more, and more than `TIMES` as many); else, and of several, the least loaded

The last is the rule of SGLang's router (cache_aware: cache_threshold 0.3, balance_abs_threshold 64,
balance_rel_threshold 1.5, as its documentation gives them), but that it looks at the load of the server in
question and not of the busiest one. It remembers of each server the blocks of prompts that were sent there
last, as many as the server has room for; whether they are still in its cache it does not know.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, takewhile
from typing import Protocol

from simcore.schedules.prefix_cache import identities
from simcore.sim.garbage import no_collections
from simcore.sim.runs import Run
from simcore.workload import arrivals
from simcore.workload.arrivals import Drawn
from simcore.workload.requests import END, REQUESTS, Journal, Request
from simcore.workload.spec import ClosedLoop, Workload

WORTH, FAR, TIMES = 0.3, 64, 1.5
# Tokens of a block in the memory of a router.
ROUTER_BLOCK = 16


class Choice(Protocol):
    """Which server a request goes to."""

    def __call__(self, request: Request, open_requests: Sequence[int]) -> int:
        """`open_requests`: of each server, how many it has not answered."""


def least_loaded(request: Request, open_requests: Sequence[int]) -> int:
    """The server with the fewest open requests; the first of several."""
    return open_requests.index(min(open_requests))


def round_robin(servers: int) -> Choice:
    """One server after the other."""
    turns = cycle(range(servers))
    return lambda request, open_requests: next(turns)


@dataclass(slots=True)
class PrefixAware:
    """Remembers of each server up to `most` blocks of the prompts that it was sent, those sent last."""

    servers: int
    most: int
    sent: list[OrderedDict[int, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = [OrderedDict() for _ in range(self.servers)]

    def __call__(self, request: Request, open_requests: Sequence[int]) -> int:
        """See `Choice`."""
        blocks = request.prompt_tokens // ROUTER_BLOCK
        names = list(identities(request, 0, blocks, ROUTER_BLOCK))
        matched = [sum(1 for _ in takewhile(sent.__contains__, names)) for sent in self.sent]
        chosen = self._chosen(matched, max(1, blocks), open_requests)
        self._remember(self.sent[chosen], names)
        return chosen

    def _chosen(self, matched: Sequence[int], blocks: int, open_requests: Sequence[int]) -> int:
        least, longest = min(open_requests), max(matched)
        if longest >= WORTH * blocks:
            best = min(
                (i for i, match in enumerate(matched) if match == longest), key=open_requests.__getitem__
            )
            if open_requests[best] <= max(least + FAR, TIMES * least):
                return best
        return open_requests.index(least)

    def _remember(self, sent: OrderedDict[int, None], names: Sequence[int]) -> None:
        # The beginning of a prompt is remembered longer than its end.
        for name in reversed(names):
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.most:
            sent.popitem(last=False)


@dataclass(slots=True)
class Router:
    """Which rank a request goes to. `open_requests`: of each server, how many it has not answered."""

    ranks: Sequence[int]
    choose: Choice
    open_requests: list[int]

    def __call__(self, item: object) -> Sequence[int]:
        """The ranks that an item goes to: one for a request, all for the end."""
        if not isinstance(item, Request):
            return self.ranks
        server = self.choose(item, self.open_requests)
        self.open_requests[server] += 1
        return (self.ranks[server],)

    def answered(self, request: Request) -> None:
        """A request is open no more."""
        self.open_requests[self.ranks.index(request.instance)] -= 1


def router(routing: str, servers: int, ranks: int, kv_tokens: int) -> Router:
    """A router to so many servers of `ranks` devices each, with room for `kv_tokens` in each one's cache."""
    choices: dict[str, Choice] = {
        "least_loaded": least_loaded,
        "round_robin": round_robin(servers),
        "prefix_aware": PrefixAware(servers, kv_tokens // ROUTER_BLOCK),
    }
    return Router([i * ranks for i in range(servers)], choices[routing], [0] * servers)


def offer(simulation: Run, workload: Workload, drawn: Drawn, to: Router, journal: Journal) -> list[Request]:
    """Lets the requests come, and after them the end; gives the list that holds them once the run is over."""
    if isinstance(workload.arrivals, ClosedLoop):
        return _closed_loop(simulation, workload.arrivals, drawn, to, journal)
    with no_collections():
        requests = list(arrivals.requests(drawn))
    if drawn.turns is not None:
        return _sessions(simulation, drawn.turns.opens.tolist(), drawn.turns.think_s, requests, to, journal)
    servers = len(to.ranks)
    if servers > 1:
        journal.answered = lambda request, _: to.answered(request)

    def coming() -> Iterator[tuple[float, object]]:
        for request in requests:
            yield request.arrival_s, request
        yield requests[-1].arrival_s, END

    simulation.feed(to if servers > 1 else 0, REQUESTS, coming())
    return requests


def _closed_loop(
    simulation: Run, loop: ClosedLoop, drawn: Drawn, to: Router, journal: Journal
) -> list[Request]:
    """Clients that each send the next request `think_s` after their last answer."""
    source, total = arrivals.requests(drawn), len(drawn.prompt_tokens)
    ended = _Ended(total)
    requests: list[Request] = []

    def send(at_s: float) -> None:
        request = next(source)
        request.arrival_s = at_s
        requests.append(request)
        simulation.feed(to, REQUESTS, ended.after([request]))

    def answered(request: Request, at_s: float) -> None:
        to.answered(request)
        if len(requests) < total:
            send(at_s + loop.think_s)

    journal.answered = answered
    for _ in range(min(loop.clients[0], total)):
        send(0.0)
    return requests


def _sessions(
    simulation: Run,
    opens: Sequence[bool],
    think_s: float,
    requests: list[Request],
    to: Router,
    journal: Journal,
) -> list[Request]:
    """Sessions that begin when they were drawn to; a session whose turn is rejected goes on with the next."""
    ended = _Ended(len(requests))

    def answered(request: Request, at_s: float) -> None:
        to.answered(request)
        number = request.id + 1
        if number < len(requests) and not opens[number]:
            requests[number].arrival_s = at_s + think_s
            simulation.feed(to, REQUESTS, ended.after([requests[number]]))

    journal.answered = answered
    first = [request for request, opening in zip(requests, opens, strict=True) if opening]
    simulation.feed(to, REQUESTS, ended.after(first))
    return requests


@dataclass(slots=True)
class _Ended:
    """Counts what has come: those sent before it may come after it, for hosts' clocks run ahead of each
    other."""

    total: int
    came: Iterator[int] = field(default_factory=lambda: count(1))

    def after(self, requests: Sequence[Request]) -> Iterator[tuple[float, object]]:
        """The requests at their times, and the end after the last of all."""
        for request in requests:
            yield request.arrival_s, request
            if next(self.came) == self.total:
                yield request.arrival_s, END
