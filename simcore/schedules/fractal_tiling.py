"""Fractal tiling: after position i, a square tile of the side that divides i (Flash Inference, Algorithm 1).

    tiles of L = 2^P positions, per layer:  L/2 of side 1, L/4 of side 2, ... one of side L/2: L - 1 in all
    mixer work  =  sum over q of 2^(P-1-q) T(2^q, 2^q)  =  O(L log^2 L) with FFTs             (Theorem 2)

With `parallel`, one launch after the position computes the tiles of all layers (section 3.5); without it they
go layer by layer, as Algorithm 1 is printed. The largest tiles may go layer by layer to save memory (App. E),
and half of the activations need never be stored (App. D).

A launch computes K = `model.tokens_per_launch` positions with `parallel`: their steps and the K - 1 tiles
between them. Since K is a power of two, these tiles have the same sides in all such launches, all below K;
only the tile after the last position differs, and is a launch of its own.
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution, half_length, tile_side
from simcore.ops.op import Graph
from simcore.schedules.prefill import prefill


def fractal_tiling(
    m: Machine,
    model: LongConvolution,
    ended_s: list[float],
    *,
    parallel: bool = True,
    half_storage: bool = False,
    sequential_from: int | None = None,
) -> Program:
    """Generates the positions after the prompt; appends the end time of each to `ended_s`.

    `sequential_from`: tiles of this side and larger are computed layer by layer.
    """
    half = model.prompt + half_length(model.generated)
    # With half storage, the carry includes the prompt's contributions to the second half.
    yield from prefill(m, model, ended_s, outputs=half if half_storage else None)
    t = model.prompt
    while t < model.tokens:
        count = _count(model, t, half if half_storage else None) if parallel else 1
        last = t + count - 1
        sizes, carries = {"position": last}, half_storage and last + 1 == half
        if not parallel and not carries and last + 1 < model.tokens:
            step = m.launch(model.tile_step(*_tile(model, last)), sizes=sizes)
        else:
            graph = model.step() if count == 1 else model.steps_and_tiles(count, sequential_from)
            step = m.launch(graph, sizes={"position": t})
            if last + 1 < model.tokens:
                tiles = _carry(model, half) if carries else _tiles(model, last, sequential_from)
                m.launch(tiles, sizes=sizes)
        yield m.wait(step)
        ended_s.extend([m.now()] * count)
        t = last + 1


def _count(model: LongConvolution, t: int, half: int | None) -> int:
    """The number of positions that a launch computes from t on: no carry comes between them."""
    end = model.tokens if half is None or t >= half else half
    several = model.tokens_per_launch
    return several if t + several <= end else 1


def _tile(model: LongConvolution, t: int) -> tuple[int, int]:
    """The side of the tile after a position, and its outputs within the sequence."""
    side = tile_side(t + 1 - model.prompt)
    return side, min(side, model.tokens - 1 - t)


def _carry(model: LongConvolution, half: int) -> Graph:
    """The largest tile, whose outputs replace its inputs."""
    return model.carry(half, model.tokens - half)


def _tiles(model: LongConvolution, t: int, sequential_from: int | None) -> Graph:
    """The tiles of all layers after a position."""
    side, outputs = _tile(model, t)
    return model.tile(side, outputs, sequential=sequential_from is not None and side >= sequential_from)
