"""Lazy: the contributions of its whole history come before each position (Flash Inference, Figure 1, top
left).

    mixer work of L positions  =  2 B c (0 + 1 + ... + L-1) + red cells  =  B c L (L + 1)

Long convolutions are decoded this way by default. With `parallel`, one launch before the position computes
the histories of all layers, because all of them are known (section 3.5's observation applied to the
baseline).
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.prefill import prefill


def lazy(m: Machine, model: LongConvolution, ended_s: list[float], *, parallel: bool = True) -> Program:
    """Generates the positions after the prompt; appends the end time of each to `ended_s`."""
    yield from prefill(m, model, ended_s)
    # `prefill` has computed the prompt's contributions already.
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
