"""Which part of a serving run is measured: warm-up and drain are cut.

    begins  with the first request that comes once the first w requests have been answered or turned away,
            but no later than with the middle one
    ends    when the last request comes
    w     = max(warmup_share * requests, clients of a closed loop)
and of sessions
    begins  with the first turn that comes once the first warmup_share of the sessions have ended, and so
            much time has gone by as a session takes on average
    ends    when the last session opens

A server that starts empty is quicker than it will be, until those that came first begin to leave; when no
more come, it empties. A closed loop has warmed up once each of its clients has had its first answer. The rule
reads requests in their order of arrival alone, so it holds for any arrivals. It looks at no level, as rules
do that wait for one to settle: those also cut bursts that happen to come early. Sessions go on for long after
the last one has opened, ever fewer of them at a time: that is drain, though turns still come.

Between begin and end, end left out, there are as many requests as gaps: their number by the length is the
rate that is offered, without bias. Latencies are those of the requests that come in the window, each followed
to its end: to leave out what ends later would leave out the longest.

The whole run is measured where the window would hold fewer than `FEWEST` requests, where it would be shorter
than a request is served on average (a batch that is there at once has no steady state), and where half of a
closed loop's requests are sent before its clients have had their first answers.

growing: n1, n2, n3, the mean numbers that wait over the thirds of the window, rise twice by more than
    max(GROWTH * requests of the window, CHANCE * sqrt(n1 + n3))
which is more than numbers of this size vary by themselves. Figures then depend on the length of the run.
Means, for a number at one moment is chance; twice, for a queue that warms up late rises at first only. Of
M/M/1 runs of 300 to 1,000 requests at load 0.8 at most one in a hundred is taken to grow; of 1,000 at load
1.3 nearly all are. Short runs in slight overload pass unnoticed. Who is being served does not
count: a batch that grows, as in a burst, is no sign that the server cannot keep up.
"""

import math
from dataclasses import dataclass

import numpy as np

from simcore.studies.serving.served import Bools, Served

# Fewer requests make no window.
FEWEST = 20
GROWTH, CHANCE = 0.01, 1.1
WARMUP_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Part of a run, in seconds of its clock. `came`: which requests count, [requests]. `whole`: why it is
    all of the run; empty where it is not. `growing`: see above. `unrated`: it is the whole run for want of a
    steady state, though requests come at a rate of their own, beside which its rates would mislead."""

    begin_s: float
    end_s: float
    came: Bools
    whole: str = ""
    growing: bool = False
    unrated: bool = False

    @property
    def length_s(self) -> float:
        """From begin to end."""
        return self.end_s - self.begin_s


AS_ASKED = "as asked"
TOO_FEW = f"fewer than {FEWEST} requests come between warm-up and the last arrival"
TOO_SHORT = "the time between warm-up and the last arrival is shorter than a request is served"
ENDED_LATE = f"fewer than {FEWEST} turns come between the first sessions' ends and the last one's opening"
NO_ANSWERS = "half of the requests are sent before each client has its first answer"


def whole_run(served: Served, why: str = AS_ASKED, *, unrated: bool = False) -> Window:
    """All of a run."""
    begin_s, end_s = served.window_s
    return Window(begin_s, end_s, np.ones(len(served), np.bool_), why, unrated=unrated)


def steady(
    served: Served,
    warmup_share: float = WARMUP_SHARE,
    clients: int | None = None,
    opens: Bools | None = None,
) -> Window:
    """The window of a run. `warmup_share`: of its requests, 0 or more and below 1; `clients`: of a closed
    loop, None where requests come by themselves; `opens`: which requests open a session, [requests], None
    where there are no sessions."""
    if opens is not None:
        return _of_sessions(served, warmup_share, opens)
    order = np.argsort(served.arrival_s, kind="stable")
    arrival_s = served.arrival_s[order]
    unrated = clients is None and len(served) > 1 and bool(arrival_s[-1] > arrival_s[0])
    if len(served) < FEWEST:
        return whole_run(served, TOO_FEW, unrated=unrated)
    gone_s = np.where(served.finished, served.finish_s, served.arrival_s)[order]
    count = min(max(math.ceil(warmup_share * len(served)), clients or 0), len(served))
    warm_s = float(np.max(gone_s[:count], initial=arrival_s[0]))
    first, middle = int(np.searchsorted(arrival_s, warm_s, side="left")), len(served) // 2
    if first > middle and clients is not None:
        return whole_run(served, NO_ANSWERS)
    begin_s, end_s = float(arrival_s[min(first, middle)]), float(arrival_s[-1])
    return _between(served, begin_s, end_s, TOO_FEW, unrated=unrated)


def _of_sessions(served: Served, warmup_share: float, opens: Bools) -> Window:
    """The window of a run whose requests are turns of sessions, one session after the other."""
    first = np.flatnonzero(opens)
    gone_s = np.where(served.finished, served.finish_s, served.arrival_s)
    ended_s = gone_s[np.append(first[1:], len(served)) - 1]
    opened_s = served.arrival_s[first]
    earliest = np.argsort(opened_s, kind="stable")[: math.ceil(warmup_share * len(first))]
    warm_s = float(np.max(ended_s[earliest], initial=opened_s.min() + (ended_s - opened_s).mean()))
    end_s = float(opened_s.max())
    begin_s = float(np.min(served.arrival_s, where=served.arrival_s >= warm_s, initial=end_s))
    return _between(served, begin_s, end_s, ENDED_LATE, unrated=len(served) > 1)


def _between(served: Served, begin_s: float, end_s: float, few: str, *, unrated: bool) -> Window:
    """The window from begin to end, or the whole run where too little is in it; `few` says so."""
    came: Bools = (served.arrival_s >= begin_s) & (served.arrival_s < end_s)
    if came.sum() < FEWEST:
        return whole_run(served, few, unrated=unrated)
    served_s = (served.finish_s - served.scheduled_s)[came & served.finished]
    if len(served_s) and end_s - begin_s < served_s.mean():
        return whole_run(served, TOO_SHORT, unrated=unrated)
    return Window(begin_s, end_s, came, growing=_grows(served, begin_s, end_s, int(came.sum())))


def _grows(served: Served, begin_s: float, end_s: float, came: int) -> bool:
    """See the head of this file."""
    stays, third_s = served.finished, (end_s - begin_s) / 3.0
    arrival_s, begun_s = served.arrival_s[stays], served.scheduled_s[stays]
    edges_s = [(begin_s + i * third_s, begin_s + (i + 1) * third_s) for i in range(3)]
    first, second, third = (
        float((begun_s.clip(*edge_s) - arrival_s.clip(*edge_s)).sum()) / third_s for edge_s in edges_s
    )
    # Rounding may leave less than nothing where nobody waits.
    chance = CHANCE * math.sqrt(max(0.0, first + third))
    return min(second - first, third - second) > max(GROWTH * came, chance)
