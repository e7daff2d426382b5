"""Lazy: the contributions of its whole history come before each position (Flash Inference, Figure 1, top
left).

    mixer work of L positions  =  2 B c (0 + 1 + ... + L-1) + red cells  =  B c L (L + 1)

Long convolutions are decoded this way by default. With `parallel`, one launch before the position computes
the histories of all layers, because all of them are known (section 3.5's observation applied to the
baseline). A launch then computes `model.tokens_per_launch` positions, each with its history before it.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.prefill import prefill


def lazy(m: Machine, model: LongConvolution, ended_s: list[float], *, parallel: bool = True) -> Program:
    """Generates the positions after the prompt; appends the end time of each to `ended_s`."""
    yield from prefill(m, model, ended_s)
    t, several = model.prompt, model.tokens_per_launch if parallel else 1
    while t < model.tokens:
        # `prefill` has computed the prompt's contributions already; the first position has no history.
        earlier = t - model.prompt
        count = several if earlier and t + several <= model.tokens else 1
        sizes, grows = {"position": t, "inputs": earlier}, {"position": count, "inputs": count}
        if parallel and earlier and count == 1:
            m.launch(model.rows(), sizes=sizes, advance=grows)
        layered = not parallel and earlier > 0
        graph = model.row_step() if layered else model.step()
        if count > 1:
            graph = model.rows_and_steps(count)
        step = m.launch(graph, sizes=sizes, advance=grows)
        yield m.wait(step)
        ended_s.extend([m.now()] * count)
        t += count
