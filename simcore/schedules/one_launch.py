"""One launch: a graph, alone on its device, is launched and waited for, several times.

    latency = host time until the device has the graph + the graph, at least the host time of the launch

This is what a micro-benchmark of an operator times when everything is warm. A first launch takes the host
longer (with an H200 41 us and more, instead of 30 us for a host that launches all the time), so there are
several launches, and the first does not count.
"""

from simcore.machine.machine import Machine, Program
from simcore.ops.op import Graph

DONE = "done"
LAUNCHES, UNCOUNTED = 5, 1


def one_launch(m: Machine, graph: Graph, begun_s: list[float], launches: int = LAUNCHES) -> Program:
    """Launches a graph without run-time sizes and waits for it, `launches` times; marks "done" at each end.
    `begun_s` is emptied and then gets the time of each launch call, in seconds since the run began."""
    begun_s.clear()
    for _ in range(launches):
        begun_s.append(m.now())
        ticket = m.launch(graph)
        m.mark(DONE, [ticket])
        yield m.wait(ticket)
