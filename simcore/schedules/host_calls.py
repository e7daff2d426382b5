"""The host of an engine, which calls the ops of a step with prompts one after another, beside the card.

    calls of a step begin at   max(when the host is through with those before, when it knows the step)
    and end                    call_s * ops later
    the step ends at           max(end of its ops on the card, end of its calls)

Engines replay a captured graph where a step only decodes, so no op is called. Prompts make a step of any
size, whose ops the host calls: a short step on fast cards waits for it. An engine that decides steps ahead
knows a step when the one before it begins, and calls its ops while that one runs.
"""

from dataclasses import dataclass

from simcore.machine.machine import Machine, Program, Ticket
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph

# An inbox that stays empty: to wait for an item of it is to let time pass.
NOTHING = "calls"


@dataclass(slots=True)
class Caller:
    """A host that calls ops. `through_s`: when it is through with what it has called."""

    through_s: float = 0.0


def wait_for(
    m: Machine, model: ServedDecoder, step: Ticket, graph: Graph, host: Caller, known_s: float
) -> Program:
    """Waits until a step with prompts has ended, and the calls of its ops, which the host knows since
    `known_s`."""
    if not model.call_s:
        yield m.wait(step)
        return
    through_s = max(host.through_s, known_s) + model.call_s * model.called(graph)
    host.through_s = through_s
    yield m.wait(step)
    # Other prompts' ops may have been called meanwhile.
    left_s = through_s - m.now()
    if left_s > 0.0:
        yield m.recv(NOTHING, left_s)
