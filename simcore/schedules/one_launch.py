"""One launch: a graph, alone on its device, launched once and waited for.

    latency = host time until the device has the graph + the graph, but no less than the host's launch

What a micro-benchmark of an operator times, once everything is warm.
"""

from simcore.machine import Machine, Program
from simcore.ops import Graph

DONE = "done"


def one_launch(m: Machine, graph: Graph) -> Program:
    """Launches a graph without run-time sizes; marks "done" at its end."""
    ticket = m.launch(graph)
    m.mark(DONE, [ticket])
    yield m.wait(ticket)
