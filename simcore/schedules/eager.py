"""Eager: each position is followed by its contributions to all later ones (Flash Inference, Figure 1,
bottom left).

    mixer work of L positions  =  2 B c (L-1 + L-2 + ... + 0) + red cells  =  B c L (L + 1)

With `parallel`, one launch after the position computes the columns of all layers.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.prefill import prefill


def eager(m: Machine, model: LongConvolution, ended_s: list[float], *, parallel: bool = True) -> Program:
    """Generates the positions after the prompt; appends the end time of each to `ended_s`."""
    yield from prefill(m, model, ended_s)
    for t in range(model.prompt, model.tokens):
        later = model.tokens - 1 - t
        sizes, grows = {"position": t, "outputs": later}, {"position": 1, "outputs": -1}
        layered = not parallel and later > 0
        graph = model.column_step() if layered else model.step()
        step = m.launch(graph, sizes=sizes, advance=grows)
        if parallel and later:
            m.launch(model.columns(), sizes=sizes, advance=grows)
        yield m.wait(step)
        ended_s.append(m.now())
