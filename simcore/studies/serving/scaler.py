"""Starts and stops servers by a rule, and routes requests to those that are ready (autoscaling.py).

What it knows is what a router knows. Its checks are items of the run's clock, so that a stop reaches a server
when it is decided: the server gets END, serves what it has, and its program ends. Then a new program begins
there, with nothing in its cache, which waits for the next start.

Nothing is decided while nothing changes: after `QUIET` checks without a request that comes or goes, beyond
`keep_s`, checks pause until one does.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, inf

from simcore.machine.machine import Machine, Program
from simcore.studies.serving.autoscaling import Fleet, Rule, Stint
from simcore.studies.serving.host_time import Feeder
from simcore.studies.serving.offer import Choice, PrefixAware
from simcore.workload.requests import END, REQUESTS, Request

QUIET = 1000
# More open requests than any server has: those of a server that takes none.
AWAY = 1 << 60


@dataclass(slots=True, eq=False)
class _Server:
    """A server's state. `stint`: the one that it is in, None if it is off; `busy_s`: seconds with an open
    request since the last check, up to `since_s`; `ending`: whether its program has END before it."""

    number: int
    rank: int
    stint: Stint | None = None
    open_requests: int = 0
    busy_s: float = 0.0
    since_s: float = 0.0
    ending: bool = False


@dataclass(slots=True, eq=False)
class Scaler:
    """Chooses the rank of a request among the servers that are ready; a `Sender`. `shown`: open
    requests of each server, `AWAY` of one that takes none."""

    simulation: Feeder
    rule: Rule
    ranks: Sequence[int]
    choose: Choice
    servers: list[_Server] = field(default_factory=list)
    place: dict[int, _Server] = field(default_factory=dict)
    shown: list[int] = field(default_factory=list)
    stints: list[Stint] = field(default_factory=list)
    starting: deque[int] = field(default_factory=deque)
    ready: set[int] = field(default_factory=set)
    wanted: deque[tuple[float, int]] = field(default_factory=deque)
    open_requests: int = 0
    closed: bool = False
    checking: bool = False
    quiet: int = 0
    check: int = 0
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.servers = [_Server(number, rank) for number, rank in enumerate(self.ranks)]
        self.place = {server.rank: server for server in self.servers}
        self.shown = [AWAY] * len(self.ranks)
        for number in range(self.rule.min_servers[0]):
            self._start(number, 0.0, 0.0)
        self._get_ready(0.0)
        self._go_on(0.0)

    @property
    def alone(self) -> None:
        """See `Sender`."""

    @property
    def fleet(self) -> Fleet:
        """Which servers held their devices when."""
        return Fleet.of(len(self.ranks), self.stints)

    # -- requests ----------------------------------------------------------------------------------

    def __call__(self, item: object) -> Sequence[int]:
        """Returns the ranks that get an item: one for a request, all for the end."""
        if not isinstance(item, Request):
            self.closed = True
            return self.ranks
        at_s = item.arrival_s
        self._get_ready(at_s)
        # A turn of round robin may be that of a server that takes none.
        while (chosen := self.choose(item, self.shown)) not in self.ready:
            pass
        server = self.servers[chosen]
        if not server.open_requests:
            server.since_s = at_s
        server.open_requests += 1
        self.shown[chosen] += 1
        self.open_requests += 1
        self._go_on(at_s)
        return (server.rank,)

    def answered(self, request: Request, at_s: float) -> None:
        """Counts a request as answered."""
        server = self.place[request.instance]
        server.open_requests -= 1
        self.shown[server.number] -= 1
        self.open_requests -= 1
        # After a pause, busy is only the time since the check that would have been the last.
        self._go_on(at_s)
        if not server.open_requests:
            server.busy_s += max(0.0, at_s - server.since_s)
            self._free(server, at_s)

    # -- servers -----------------------------------------------------------------------------------

    def program(self, m: Machine, serve: Callable[[], Program]) -> Program:
        """Runs a server's program, and a new one after each stop, until the end of all requests."""
        server = self.place[m.rank]
        while not self.closed:
            yield from serve()
            server.ending = False

    def _start(self, number: int, at_s: float, takes_s: float) -> None:
        stint = self.servers[number].stint = Stint(number, at_s, at_s + takes_s)
        self.stints.append(stint)
        self.starting.append(number)

    def _get_ready(self, now_s: float) -> None:
        """Lets servers whose start is over take requests."""
        while self.starting:
            number = self.starting[0]
            server = self.servers[number]
            assert server.stint is not None
            if server.stint.ready_s > now_s:
                return
            self.starting.popleft()
            self.ready.add(number)
            self.shown[number] = server.open_requests
            server.busy_s = 0.0

    def _stop(self, number: int, at_s: float) -> None:
        server = self.servers[number]
        assert server.stint is not None
        server.stint.stopped_s = at_s
        self.ready.discard(number)
        self.shown[number] = AWAY
        if isinstance(self.choose, PrefixAware):
            self.choose.forget(number)
        if not server.open_requests:
            self._free(server, at_s)

    def _free(self, server: _Server, at_s: float) -> None:
        """Frees the devices of a server that was stopped."""
        if server.stint is not None and server.stint.stopped_s < inf:
            server.stint.freed_s = max(at_s, server.stint.stopped_s)
            server.stint = None

    # -- checks ------------------------------------------------------------------------------------

    def _go_on(self, at_s: float) -> None:
        """Begins with checks after a pause, because something has changed."""
        self.quiet = 0
        if self.checking or (self.closed and not self.open_requests):
            return
        self.checking = True
        every_s = self.rule.check_s[0]
        self.check = max(self.check, floor(at_s / every_s))
        self.last_s = self.check * every_s
        if self.wanted:
            # What was wanted before a pause was wanted until its end.
            self.wanted[-1] = self.last_s, self.wanted[-1][1]
        for server in self.servers:
            server.since_s = max(server.since_s, self.last_s)
        self.simulation.feed(self._check, REQUESTS, self._checks(every_s))

    def _checks(self, every_s: float) -> Iterator[tuple[float, object]]:
        """Yields the times of checks, until all is answered or nothing changes any more."""
        most = QUIET + (self.rule.keep_s[0] + self.rule.start_s[0]) / every_s
        while self.quiet <= most and not (self.closed and not self.open_requests):
            self.check += 1
            self.quiet += 1
            yield self.check * every_s, END
        self.checking = False

    def _check(self, item: object) -> Sequence[int]:
        """Starts or stops servers; returns the ranks of the stopped ones, which get END."""
        del item
        now_s = self.check * self.rule.check_s[0]
        self._get_ready(now_s)
        number = self._number(now_s)
        running = len(self.ready) + len(self.starting)
        for _ in range(running, number):
            off = [i for i, server in enumerate(self.servers) if server.stint is None and not server.ending]
            if not off:
                break
            self._start(off[0], now_s, self.rule.start_s[0])
        stopped: list[int] = []
        for _ in range(number, running):
            if self.starting:
                self._stop(self.starting.pop(), now_s)
                continue
            last = min(self.ready, key=lambda i: (self.servers[i].open_requests, -i))
            self._stop(last, now_s)
            # After the end of all requests no program is left that would end.
            self.servers[last].ending = not self.closed
            stopped.append(self.ranks[last])
        return stopped

    def _number(self, now_s: float) -> int:
        """Returns how many servers shall run."""
        rule, busy_s, requests = self.rule, 0.0, 0
        for number in sorted(self.ready):
            server = self.servers[number]
            if server.open_requests:
                server.busy_s += now_s - server.since_s
                server.since_s = now_s
            busy_s += server.busy_s
            requests += server.open_requests
            server.busy_s = 0.0
        wanted = rule.wanted(requests, busy_s, now_s - self.last_s)
        self.last_s = now_s
        # What is wanted falls from one that is kept to the next.
        while self.wanted and self.wanted[-1][1] <= wanted:
            self.wanted.pop()
        self.wanted.append((now_s, wanted))
        while self.wanted[0][0] <= now_s - rule.keep_s[0] and len(self.wanted) > 1:
            self.wanted.popleft()
        return min(max(self.wanted[0][1], rule.min_servers[0]), len(self.ranks))
