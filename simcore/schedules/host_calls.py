"""The host of an engine, which calls the ops of a step with prompts one by one, beside the card.

    a step with prompts ends at   max(end of its ops, begin + call_s * ops - what was called before it began)

Engines replay a captured graph where a step only decodes. Prompts make a step of any size, whose ops the host
calls one after another; a short step on fast cards waits for it. An engine that decides steps ahead calls a
step's ops while the step before it runs, so at most that step hides them.
"""

from simcore.machine.machine import Machine, Ticket
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph

# The stream on which the calls of a rank's host run, one after another.
CALLS = "calls"
# Whole microseconds, so that prices of calls are few.
US = 1e-6


def calls(m: Machine, model: ServedDecoder, step: Graph, hidden_s: float = 0.0) -> tuple[Ticket, ...]:
    """Begins to call the ops of a step, calls of `hidden_s` seconds being hidden behind the step before it.
    Returns what to wait for besides the step: nothing if the host takes no time."""
    if model.calls is None:
        return ()
    sizes = {"called": model.called(step), "hidden_us": round(hidden_s / US)}
    return (m.launch(model.calls, stream=CALLS, sizes=sizes),)
