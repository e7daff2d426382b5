"""Sends the requests of a workload to the servers, and routes each to one server.

    open loop     at the drawn times
    closed loop   a client's next request comes `think_s` after its last answer
    sessions      the first turn at the drawn time, each further turn `think_s` after the previous answer

A router knows only what a real router knows: the server of each request, and which requests were answered.

    least_loaded   the server with the fewest open requests, the first of several
    round_robin    one after the other
    prefix_aware   the server with the longest known prefix of the prompt, if that is a good part of it
                   (`WORTH`) and the server has not far more open requests than the least loaded one (more
                   than `FAR` more, and more than `TIMES` as many); else, and of several, the least loaded

prefix_aware is the rule of SGLang's router (cache_aware: cache_threshold 0.3, balance_abs_threshold 64,
balance_rel_threshold 1.5, as in its documentation), except that it checks the load of the server in question
instead of the busiest one. It remembers for each server the blocks of the last prompts sent there, up to the
server's room; it does not know whether they are still in the server's cache.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, takewhile
from typing import Protocol

from simcore.schedules.prefix_cache import identities
from simcore.sim.garbage import no_collections
from simcore.studies.serving.host_time import Feeder
from simcore.workload.drawn import Drawn
from simcore.workload.drawn import requests as drawn_requests
from simcore.workload.requests import END, REQUESTS, Journal, Request
from simcore.workload.spec import ClosedLoop, Workload

WORTH, FAR, TIMES = 0.3, 64, 1.5
# Tokens of a block in the memory of a router.
ROUTER_BLOCK = 16


class Choice(Protocol):
    """Chooses the server of a request."""

    def __call__(self, request: Request, open_requests: Sequence[int]) -> int:
        """Returns the server's index. `open_requests`: unanswered requests of each server."""


def least_loaded(request: Request, open_requests: Sequence[int]) -> int:
    """Chooses the server with the fewest open requests; the first of several."""
    return open_requests.index(min(open_requests))


def round_robin(servers: int) -> Choice:
    """Returns a choice of one server after the other."""
    turns = cycle(range(servers))
    return lambda request, open_requests: next(turns)


@dataclass(slots=True)
class PrefixAware:
    """Chooses by prefix. Remembers for each server the last blocks of prompts sent to it, `most` of each."""

    most: Sequence[int]
    sent: list[OrderedDict[int, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = [OrderedDict() for _ in self.most]

    def __call__(self, request: Request, open_requests: Sequence[int]) -> int:
        """See `Choice`."""
        blocks = request.prompt_tokens // ROUTER_BLOCK
        names = list(identities(request, 0, blocks, ROUTER_BLOCK))
        matched = [sum(1 for _ in takewhile(sent.__contains__, names)) for sent in self.sent]
        chosen = self._chosen(matched, blocks, open_requests)
        self._remember(self.sent[chosen], names, self.most[chosen])
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

    def forget(self, server: int) -> None:
        """Forgets what was sent to a server, whose cache is lost."""
        self.sent[server].clear()

    def _remember(self, sent: OrderedDict[int, None], names: Sequence[int], most: int) -> None:
        # In reverse order, so that the beginning of a prompt is remembered longer than its end.
        for name in reversed(names):
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > most:
            sent.popitem(last=False)


class Sender(Protocol):
    """Chooses the rank of a request, and is told of each answer."""

    @property
    def alone(self) -> int | None:
        """The rank that gets every request, with nothing to choose or to tell; None if several may."""

    def __call__(self, item: object) -> Sequence[int]:
        """Returns the ranks that get an item."""

    def answered(self, request: Request, at_s: float) -> None:
        """Counts a request as answered."""


@dataclass(slots=True)
class Router:
    """Chooses the rank of a request among servers that run all the time; a `Sender`. `open_requests`:
    unanswered requests of each server."""

    ranks: Sequence[int]
    choose: Choice
    open_requests: list[int]

    @property
    def alone(self) -> int | None:
        """See `Sender`."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    def __call__(self, item: object) -> Sequence[int]:
        """Returns the ranks that get an item: one for a request, all for the end."""
        if not isinstance(item, Request):
            return self.ranks
        server = self.choose(item, self.open_requests)
        self.open_requests[server] += 1
        return (self.ranks[server],)

    def answered(self, request: Request, at_s: float) -> None:
        """Counts a request as answered."""
        del at_s
        self.open_requests[self.ranks.index(request.instance)] -= 1


def choice(routing: str, kv_tokens: Sequence[int]) -> Choice:
    """Returns the choice among servers. `kv_tokens`: room in each one's cache."""
    choices: dict[str, Choice] = {
        "least_loaded": least_loaded,
        "round_robin": round_robin(len(kv_tokens)),
        "prefix_aware": PrefixAware([tokens // ROUTER_BLOCK for tokens in kv_tokens]),
    }
    return choices[routing]


def router(routing: str, ranks: Sequence[int], kv_tokens: Sequence[int]) -> Router:
    """Returns a router to servers. `ranks`: the rank that takes each one's requests; `kv_tokens`: room in
    each one's cache."""
    return Router(ranks, choice(routing, kv_tokens), [0] * len(ranks))


def offer(
    simulation: Feeder, workload: Workload, drawn: Drawn, to: Sender, journal: Journal
) -> list[Request]:
    """Sends the requests, and after them the end. Returns a list that holds all requests after the run."""
    if isinstance(workload.arrivals, ClosedLoop):
        return _closed_loop(simulation, workload.arrivals, drawn, to, journal)
    with no_collections():
        requests = list(drawn_requests(drawn))
    if drawn.turns is not None:
        return _sessions(simulation, drawn.turns.opens.tolist(), drawn.turns.think_s, requests, to, journal)
    alone = to.alone
    if alone is None:
        journal.answered = to.answered

    def arriving() -> Iterator[tuple[float, object]]:
        for request in requests:
            yield request.arrival_s, request
        yield requests[-1].arrival_s, END

    simulation.feed(to if alone is None else alone, REQUESTS, arriving())
    return requests


def _closed_loop(
    simulation: Feeder, loop: ClosedLoop, drawn: Drawn, to: Sender, journal: Journal
) -> list[Request]:
    """Sends requests of clients; each sends its next request `think_s` after its last answer."""
    source, total = drawn_requests(drawn), len(drawn.prompt_tokens)
    ended = _Ended(total)
    requests: list[Request] = []

    def send(at_s: float) -> None:
        request = next(source)
        request.arrival_s = at_s
        requests.append(request)
        simulation.feed(to, REQUESTS, ended.after([request]))

    def answered(request: Request, at_s: float) -> None:
        to.answered(request, at_s)
        if len(requests) < total:
            send(at_s + loop.think_s)

    journal.answered = answered
    for _ in range(min(loop.clients[0], total)):
        send(0.0)
    return requests


def _sessions(
    simulation: Feeder,
    opens: Sequence[bool],
    think_s: float,
    requests: list[Request],
    to: Sender,
    journal: Journal,
) -> list[Request]:
    """Sends sessions that begin at their drawn times; after a rejected turn a session goes on with the
    next."""
    ended = _Ended(len(requests))

    def answered(request: Request, at_s: float) -> None:
        to.answered(request, at_s)
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
    """Counts arrived requests, to send the end after the last: requests may arrive in another order than
    sent, because hosts' clocks differ."""

    total: int
    came: Iterator[int] = field(default_factory=lambda: count(1))

    def after(self, requests: Sequence[Request]) -> Iterator[tuple[float, object]]:
        """Yields the requests at their times, and the end after the last of all."""
        for request in requests:
            yield request.arrival_s, request
            if next(self.came) == self.total:
                yield request.arrival_s, END
