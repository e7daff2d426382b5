"""Lazy: before each position, the contributions of its whole history (Flash Inference, Figure 1, top left).

    mixer work of L positions  =  2 B c (0 + 1 + ... + L-1) + red cells  =  B c L (L + 1)

This is how long convolutions are decoded by default. With `parallel`, the histories of all layers are one
launch ahead of the position, for all of them are known (section 3.5's observation, applied to the baseline).
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.prefill import prefill


def lazy(m: Machine, model: LongConvolution, ended_s: list[float], *, parallel: bool = True) -> Program:
    """Generates the positions after the prompt; appends to `ended_s` when each of them is done."""
    yield from prefill(m, model, ended_s)
    # The prompt has given its contributions already.
    for t in range(model.prompt, model.tokens):
        earlier = t - model.prompt
        sizes, grows = {"position": t, "inputs": earlier}, {"position": 1, "inputs": 1}
        if parallel and earlier:
            m.launch(model.rows(), sizes=sizes, advance=grows)
        layered = not parallel and earlier > 0
        graph = model.row_step() if layered else model.step()
        step = m.launch(graph, sizes=sizes, advance=grows)
        yield m.wait(step)
        ended_s.append(m.now())
