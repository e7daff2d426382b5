"""The measured window of a serving run, without warm-up and drain.

    begins  with the first request that comes once the first w requests have been answered or rejected,
            but no later than with the middle one
    ends    when the last request comes
    w     = max(warmup_share * requests, clients of a closed loop)
and of sessions
    begins  with the first turn that comes once the first warmup_share of the sessions have ended, and the
            mean time of a session has passed
    ends    when the last session opens

An empty server is faster than in steady state, until the first requests leave; after the last arrival it
empties. A closed loop has warmed up once each of its clients has had its first answer. The rule uses only the
order of arrival, so it holds for any arrivals. It does not wait for a level to settle, as other rules do:
those also cut bursts that happen to come early. Sessions go on long after the last one has opened, fewer and
fewer at a time: that is drain, though turns still come.

From begin to before end there are as many requests as gaps: their number over the length is the offered rate,
without bias. Latencies are of the requests that come in the window, each followed to its end: leaving out
requests that end later would leave out the longest.

The whole run is measured if the window would have fewer than `FEWEST` requests, if it would be shorter than
the mean time in service (a batch that is there at once has no steady state), or if half of a closed loop's
requests are sent before its clients have had their first answers.

growing: n1, n2, n3, the mean queue lengths in the thirds of the window, rise twice by more than
    max(GROWTH * requests of the window, CHANCE * sqrt(n1 + n3))
which is more than random variation at this size. Figures then depend on the length of the run. Means are
used, since a number at one moment is random; two rises, since a queue that warms up late rises only at first.
Of M/M/1 runs of 300 to 1,000 requests at load 0.8, at most one in a hundred counts as growing; of 1,000 at
load 1.3, nearly all. Short runs in slight overload pass undetected. Requests in service do not count: a batch
that grows, as in a burst, does not mean that the server cannot keep up.

What tells whether figures still depend on the length of the run:
    turnovers = length of the window / mean time in service
    filling   = ln(mean number of requests there in its second half / in its first), 0 if the halves differ by
                no more than two requests' time
In steady state filling is zero in the mean over runs. Percentiles of a window of few turnovers are too low,
since requests that are served side by side are slow together.
"""

import math
from dataclasses import dataclass

import numpy as np

from simcore.studies.serving.served import Bools, Floats, Served

# Fewest requests of a window.
FEWEST = 20
GROWTH, CHANCE = 0.01, 1.1
WARMUP_SHARE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Part of a run, in seconds of its clock. `came`: which requests count, [requests]. `whole`: why the
    window is the whole run; empty if it is not. `growing`: see above. `unrated`: the window is the whole run
    because there is no steady state, although requests come at a given rate: its rates would mislead.
    `turnovers`, `filling`: see above; of a whole run and of a closed loop nothing is known of them."""

    begin_s: float
    end_s: float
    came: Bools
    whole: str = ""
    growing: bool = False
    unrated: bool = False
    turnovers: float = math.inf
    filling: float = 0.0

    @property
    def length_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


AS_ASKED = "as asked"
TOO_FEW = f"fewer than {FEWEST} requests come between warm-up and the last arrival"
TOO_SHORT = "the time between warm-up and the last arrival is shorter than a request is served"
ENDED_LATE = f"fewer than {FEWEST} turns come between the first sessions' ends and the last one's opening"
NO_ANSWERS = "half of the requests are sent before each client has its first answer"


def whole_run(served: Served, why: str = AS_ASKED, *, unrated: bool = False) -> Window:
    """Returns the whole run as a window."""
    begin_s, end_s = served.window_s
    return Window(begin_s, end_s, np.ones(len(served), np.bool_), why, unrated=unrated)


def steady(
    served: Served,
    warmup_share: float = WARMUP_SHARE,
    clients: int | None = None,
    opens: Bools | None = None,
) -> Window:
    """Returns the window of a run. `warmup_share`: of its requests, 0 or more and below 1; `clients`: of a
    closed loop, else None; `opens`: which requests open a session, [requests], None if there are no
    sessions."""
    if opens is not None:
        return _of_sessions(served, warmup_share, opens)
    order = np.argsort(served.arrival_s, kind="stable")
    arrival_s = served.arrival_s[order]
    at_once = len(served) > 1 and bool(arrival_s[-1] == arrival_s[0])
    unrated = clients is None and len(served) > 0 and not at_once
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
    """Returns the window of a run whose requests are turns, ordered session by session."""
    first = np.flatnonzero(opens)
    gone_s = np.where(served.finished, served.finish_s, served.arrival_s)
    ended_s = gone_s[np.append(first[1:], len(served)) - 1]
    opened_s = served.arrival_s[first]
    earliest = np.argsort(opened_s, kind="stable")[: math.ceil(warmup_share * len(first))]
    warm_s = float(np.max(ended_s[earliest], initial=opened_s.min() + (ended_s - opened_s).mean()))
    end_s = float(opened_s.max())
    begin_s = float(np.min(served.arrival_s, where=served.arrival_s >= warm_s, initial=end_s))
    return _between(served, begin_s, end_s, ENDED_LATE, unrated=len(served) > 0)


def _between(served: Served, begin_s: float, end_s: float, few: str, *, unrated: bool) -> Window:
    """Returns the window from begin to end, or the whole run if it has too little; `few`: the reason if it
    has too few requests."""
    came: Bools = (served.arrival_s >= begin_s) & (served.arrival_s < end_s)
    if came.sum() < FEWEST:
        return whole_run(served, few, unrated=unrated)
    served_s = (served.finish_s - served.scheduled_s)[came & served.finished]
    mean_s, length_s = float(served_s.mean()) if len(served_s) else 0.0, end_s - begin_s
    if length_s < mean_s:
        return whole_run(served, TOO_SHORT, unrated=unrated)
    growing = _grows(served, begin_s, end_s, int(came.sum()))
    if not unrated or mean_s == 0.0:
        return Window(begin_s, end_s, came, growing=growing)
    first, second = _means(served, served.finish_s, begin_s, end_s, 2)
    differ = abs(second - first) * length_s / 2.0 > 2.0 * mean_s and min(first, second) > 0.0
    filling = math.log(second / first) if differ else 0.0
    return Window(begin_s, end_s, came, growing=growing, turnovers=length_s / mean_s, filling=filling)


def _means(served: Served, until_s: Floats, begin_s: float, end_s: float, parts: int) -> list[float]:
    """Returns how many requests, [requests], lie between their arrival and a time, in the mean over each of
    equal parts of a window."""
    stays, part_s = served.finished, (end_s - begin_s) / parts
    arrival_s, until_s = served.arrival_s[stays], until_s[stays]
    edges_s = [(begin_s + i * part_s, begin_s + (i + 1) * part_s) for i in range(parts)]
    return [float((until_s.clip(*each_s) - arrival_s.clip(*each_s)).sum()) / part_s for each_s in edges_s]


def _grows(served: Served, begin_s: float, end_s: float, came: int) -> bool:
    """Whether the queue grows; see the head of this file."""
    first, second, third = _means(served, served.scheduled_s, begin_s, end_s, 3)
    # Rounding may give a negative sum if no request waits.
    chance = CHANCE * math.sqrt(max(0.0, first + third))
    return min(second - first, third - second) > max(GROWTH * came, chance)
