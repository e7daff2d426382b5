"""Tiling for filters that depend on data: neither y nor k is known ahead (Flash Inference, Algorithm 3).

    after position i, with n = i + 1, for every power of two U < n that divides n:
      2U < n   y[U..2U-1] * k[n-U..n-1]  and  k[U..2U-1] * y[n-U..n-1]   to positions n to n + 2U - 2
      2U = n   y[U..2U-1] * k[U..2U-1]                                   to positions n to n + 2U - 2

where * is the whole convolution: parallelograms of contributions (van der Hoeven 1997). They come out of
order, so the aggregation must be commutative, as a sum is. The paper's listing takes only the largest such U,
which leaves out contributions (for example y_1 k_3, which z_4 needs); van der Hoeven's takes all of them.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution, tile_side


def relaxed_tiling(m: Machine, model: LongConvolution, ended_s: list[float]) -> Program:
    """Generates all positions; appends the end time of each to `ended_s`. Takes no prompt."""
    for t in range(model.tokens):
        step = m.launch(model.relaxed_step(), sizes={"position": t})
        largest, left = tile_side(t + 1), model.tokens - 1 - t
        square = largest == t + 1
        if square:
            largest //= 2
        # After position 0 no tile is due: cells alone give position 1.
        if largest and left:
            m.launch(model.relaxed_tiles(largest, square, left), sizes={"position": t})
        yield m.wait(step)
        ended_s.append(m.now())
