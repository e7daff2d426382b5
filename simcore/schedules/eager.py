"""Eager: each position is followed by its contributions to all later ones (Flash Inference, Figure 1,
bottom left).

    mixer work of L positions  =  2 B c (L-1 + L-2 + ... + 0) + red cells  =  B c L (L + 1)

With `parallel`, one launch after the position computes the columns of all layers. A launch then computes
`model.tokens_per_launch` positions, each with its column after it.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.schedules.prefill import prefill


def eager(m: Machine, model: LongConvolution, ended_s: list[float], *, parallel: bool = True) -> Program:
    """Generates the positions after the prompt; appends the end time of each to `ended_s`."""
    yield from prefill(m, model, ended_s)
    t, several = model.prompt, model.tokens_per_launch if parallel else 1
    while t < model.tokens:
        later = model.tokens - 1 - t
        # The last position has no column.
        count = several if later >= several else 1
        sizes, grows = {"position": t, "outputs": later}, {"position": count, "outputs": -count}
        layered = not parallel and later > 0
        graph = model.column_step() if layered else model.step()
        if count > 1:
            graph = model.steps_and_columns(count)
        step = m.launch(graph, sizes=sizes, advance=grows)
        if parallel and later and count == 1:
            m.launch(model.columns(), sizes=sizes, advance=grows)
        yield m.wait(step)
        ended_s.extend([m.now()] * count)
        t += count
