"""Host time of a serving engine: what its host adds to each step, and its serial front end.

    a step takes       the time of its ops + step_s + sequence_s * sequences that get a token in it
    a request enters   the engine when the front end is through with it. Requests pass it one by one, in the
                       order in which they come to their server:
                           entry = max(arrival, entry of the one before) + request_s
                                   + prompt_token_s * tokens of its prompt

The front end is what stands between a client and the engine's queue: HTTP, templates, tokenising, sending to
the engine's process. Its time is part of TTFT. It runs beside the engine's steps, as a process of its own
does, so it makes no step longer.

A step of prompts alone has one sequence at least. Instances that share a device share its host too: their
steps wait for each other's host time as for each other's ops.

Every cost is 0 unless a scenario, or the file of an engine, states it: nobody publishes them, and they belong
to a version of an engine on some machine. `simcore calibrate --from` fits them to runs of one's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from pydantic import Field

from simcore.input.fields import Strict
from simcore.ops.op import Op, Price, Pricer, Size, Work
from simcore.sim.simulation import Route
from simcore.workload.requests import Request

# The kind of the op that stands for the host's part of a step. Its costs are whole nanoseconds in its shape,
# so that prices kept by op and shape hold whichever host they were made for.
HOST_STEP = "host_step"
NS = 1e-9
# No host takes longer for any of them.
MOST_S = 1e3
Cost = Annotated[float, Field(ge=0.0, le=MOST_S)]


class HostTime(Strict):
    """Seconds that the host of an engine takes, beyond what the device profile says of its launches."""

    step_s: Cost = Field(default=0.0, description="added to each step, s")
    sequence_s: Cost = Field(
        default=0.0, description="added to a step for each sequence that gets a token in it, s"
    )
    request_s: Cost = Field(
        default=0.0, description="for which a request occupies its server's serial front end, s"
    )
    prompt_token_s: Cost = Field(
        default=0.0, description="for which each token of its prompt does, as tokenising it takes, s"
    )

    @property
    def in_steps(self) -> bool:
        """Whether it makes steps longer."""
        return bool(self.step_s or self.sequence_s)

    @property
    def in_front(self) -> bool:
        """Whether requests pass a front end that takes time."""
        return bool(self.request_s or self.prompt_token_s)

    def front_s(self, request: Request) -> float:
        """Seconds for which a request occupies the front end."""
        return self.request_s + self.prompt_token_s * request.prompt_tokens

    def ops(self, sequences: Size) -> tuple[Op, ...]:
        """Returns what the host adds to a step's graph; nothing if it takes no time."""
        if not self.in_steps:
            return ()
        costs = (("step_ns", round(self.step_s / NS)), ("sequence_ns", round(self.sequence_s / NS)))
        return (Op(HOST_STEP, HOST_STEP, (("sequences", sequences), *costs), "", _no_work),)

    def __str__(self) -> str:
        request_ms, token_us = 1e3 * self.request_s, 1e6 * self.prompt_token_s
        step_ms, sequence_us = 1e3 * self.step_s, 1e6 * self.sequence_s
        front = f"front end {request_ms:.4g} ms a request + {token_us:.4g} us a token"
        steps = f"host {step_ms:.4g} ms a step + {sequence_us:.4g} us a sequence"
        return ", ".join([steps] * self.in_steps + [front] * self.in_front) or "no host time"


NO_HOST_TIME = HostTime()


def _no_work(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def with_host_steps(price: Pricer) -> Pricer:
    """Returns prices that know the op HOST_STEP too, by the costs in its shape."""

    def priced(op: Op) -> Price:
        if op.kind != HOST_STEP:
            return price(op)
        seconds = NS * (op["step_ns"] + op["sequence_ns"] * op["sequences"])
        return Price(seconds, seconds, seconds, "assumed", "the engine's host, as its fields say")

    return priced


# -- the front end -----------------------------------------------------------------------------------------


class Feeder(Protocol):
    """The part of a `Run` that takes requests."""

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times; see `Run`."""


@dataclass(slots=True, eq=False)
class FrontEnds:
    """A run whose requests pass the front ends of their servers, a `Feeder`. `hosts`: by the rank that takes
    a server's requests; `entered_s`: when each request leaves its front end, in the order of arrival;
    `free_s`: when each rank's front end is through with what has come.

    Whatever comes into a server's inbox, a request or the end of all, keeps its place in the line.
    """

    run: Feeder
    hosts: Mapping[int, HostTime]
    entered_s: list[float] = field(default_factory=list)
    free_s: dict[int, float] = field(default_factory=dict)

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into the inboxes of servers, behind their front ends; see `Run`."""
        at_s = 0.0

        def coming() -> Iterator[tuple[float, object]]:
            nonlocal at_s
            for arrival in arrivals:
                at_s = arrival[0]
                yield arrival

        def passing(item: object) -> Sequence[int]:
            # Called when an item comes, before the next one is asked for: `at_s` is its time.
            for rank in (to,) if isinstance(to, int) else to(item):
                self.run.feed(rank, inbox, [(self._enters_s(rank, item, at_s), item)])
            return ()

        self.run.feed(passing, inbox, coming())

    def _enters_s(self, rank: int, item: object, at_s: float) -> float:
        """Returns when an item that comes at `at_s` leaves the front end of its server."""
        entry_s = max(at_s, self.free_s.get(rank, 0.0))
        if isinstance(item, Request):
            entry_s += self.hosts[rank].front_s(item)
            self.entered_s.append(entry_s)
        self.free_s[rank] = entry_s
        return entry_s
