"""Fractal tiling of any mixer that aggregates contributions associatively (Flash Inference, Algorithm 2).

    x_l,t = agg(cont(a, 0, t), ..., cont(a, t, t))         z_l,t = read(x_l,t)

The order of contributions is kept, so agg need not be commutative; cont(y, i, j) must only not read anything
later than y_i (section 3.1). The tiles of all layers are one launch.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution, tile_side


def generic_tiling(m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
    """Generates all positions; appends the end time of each to `ended_s`. Takes no prompt."""
    for t in range(model.tokens):
        step = m.launch(model.generic_step(), sizes={"position": t})
        if t + 1 < model.tokens:
            side = tile_side(t + 1)
            outputs = min(side, model.tokens - 1 - t)
            m.launch(model.generic_tile(side, outputs), sizes={"position": t})
        yield m.wait(step)
        ended_s.append(m.now())
