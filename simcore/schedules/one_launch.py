"""One launch: a graph, alone on its device, launched and waited for, again and again.

    latency = host time until the device has the graph + the graph, but no less than the host's launch

What a micro-benchmark of an operator times, once everything is warm. To a host that comes from elsewhere a
first launch takes longer (beside an H200 41 us and more, where it launches all the time 30), so there are
several, and the first one does not count.
"""

from simcore.machine.machine import Machine, Program
from simcore.ops.op import Graph

DONE = "done"
LAUNCHES, UNCOUNTED = 5, 1


def one_launch(m: Machine, graph: Graph, begun_s: list[float], launches: int = LAUNCHES) -> Program:
    """Launches a graph without run-time sizes and waits for it, so many times; marks "done" at its end.
    `begun_s` then has when each launch was called, in seconds since the run began, and nothing else."""
    begun_s.clear()
    for _ in range(launches):
        begun_s.append(m.now())
        ticket = m.launch(graph)
        m.mark(DONE, [ticket])
        yield m.wait(ticket)
