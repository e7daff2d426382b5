"""Every tiling, run with real tensors, gives what the definition gives, position by position.

The direct computation of this file knows the formulas of the model and nothing of tiles, kernels or graphs.
It shares with a state what is drawn: filters, matrices, noise, and what is given.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from simcore.kernels.long_convolution import LONG_CONVOLUTION
from simcore.kernels.long_convolution.spectral import spectrum
from simcore.kernels.table import TABLE
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.long_convolution import LongConvolution, half_length, tile_side
from simcore.ops import convolution as conv
from simcore.ops.convolution import IMPLEMENTATIONS
from simcore.ops.op import Graph, Op, Publication, put
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.generic_tiling import generic_tiling
from simcore.schedules.lazy import lazy
from simcore.schedules.relaxed_tiling import relaxed_tiling
from simcore.sim.simulation import Simulation
from simcore.validate.machines.buffers.long_convolution import (
    LongConvolutionState,
    long_convolution_state,
    parameters,
)
from simcore.validate.machines.cpu.machine import TorchRun
from tests.programs import by_name
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)

BOUND = 1e-10
SINGLE_BOUND = 1e-5
CHANNELS = 5
LENGTHS = (1, 2, 3, 5, 8, 17, 31, 64)
SIDES = tuple(1 << i for i in range(9))
ALL_TILES = {name: tuple((side, name) for side in SIDES) for name in IMPLEMENTATIONS}
# Every implementation somewhere, and one side that is left to the default.
HYBRID = tuple((side, IMPLEMENTATIONS[i % 4]) for i, side in enumerate(SIDES) if side != 4)

Schedule = Callable[..., Program]

PLAIN: Mapping[str, tuple[Schedule, dict[str, Any], bool]] = {
    # name -> schedule, its options, half storage
    "lazy": (lazy, {}, False),
    "lazy, layer by layer": (lazy, {"parallel": False}, False),
    "eager": (eager, {}, False),
    "eager, layer by layer": (eager, {"parallel": False}, False),
    "fractal": (fractal_tiling, {}, False),
    "fractal, layer by layer": (fractal_tiling, {"parallel": False}, False),
    "fractal, sequential from 4": (fractal_tiling, {"sequential_from": 4}, False),
    "fractal, half stored": (fractal_tiling, {}, True),
    "fractal, layer by layer, half stored": (fractal_tiling, {"parallel": False}, True),
    "fractal, sequential from 4, half stored": (fractal_tiling, {"sequential_from": 4}, True),
}


# -- the direct computation ----------------------------------------------------------------------------------


def direct(state: LongConvolutionState) -> Tensor:
    """Activations [layers + 1, batch, tokens, channels], one position after the other."""
    model, drawn = state.model, state.parameters
    a = torch.full(
        (model.layers + 1, model.batch, model.tokens, model.channels), torch.nan, dtype=torch.float64
    )
    a[0, :, : drawn.given.shape[1]] = drawn.given
    made = torch.full((model.layers, model.batch, *a.shape[2:]), torch.nan, dtype=torch.float64)
    for t in range(model.tokens):
        for layer in range(1, model.layers + 1):
            z = mixed(state, a[layer - 1, :, : t + 1], made[layer - 1], layer - 1)
            a[layer, :, t] = block(state, z, a[layer - 1, :, t], layer - 1)
        if max(1, model.prompt) <= t + 1 < model.tokens:
            a[0, :, t + 1] = a[-1, :, t] + drawn.noise[t]
    return a


def mixed(state: LongConvolutionState, y: Tensor, made: Tensor, layer: int) -> Tensor:
    """z at the last position of y [batch, positions, channels]; `made`: the filters that depend on data."""
    model, drawn, n = state.model, state.parameters, y.shape[1]
    newest_first = y.flip(1)
    if model.mixer == "linear_attention":
        query = 1 + torch.tanh(y[:, -1] @ drawn.matrices["query"][layer])
        key = drawn.key_scales[layer] * (1 + torch.tanh(newest_first @ drawn.matrices["key"][layer]))
        decay = drawn.decays[layer] ** torch.arange(n, dtype=torch.float64)
        scores = (key @ query[:, :, None])[:, :, 0] * decay
        return (scores[:, :, None] * newest_first).sum(1)
    taps = drawn.filters[layer, :n]
    if model.mixer == "data_dependent_convolution":
        projection = y[:, -1] @ drawn.matrices["filter_projection"][layer]
        made[:, n - 1] = taps[-1] + taps[-1] * torch.tanh(projection)
        taps = made[:, :n]
    return (newest_first * taps).sum(1)


def block(state: LongConvolutionState, z: Tensor, below: Tensor, layer: int) -> Tensor:
    matrices = state.parameters.matrices
    if state.model.block == "gate":
        return z * (below @ matrices["gate_projection"][layer])
    x = z @ matrices["up"][layer]
    return (x * (1 + torch.erf(x / 2**0.5)) / 2) @ matrices["down"][layer]


def error(found: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest number; inf where something is no number."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    largest = float(right.abs().max())
    assert 0 < largest < 1e6
    return float((found - right).abs().max()) / largest


def stored(half: bool) -> dict[str, bool]:
    """What a schedule has to be told of how much its state stores; most know only one way."""
    return {"half_storage": True} if half else {}


def execute(state: LongConvolutionState, schedule: Schedule, **options: Any) -> Trace:
    ended_s: list[float] = []
    trace = TorchRun([state]).run(lambda m: schedule(m, state.model, ended_s, **options))
    # One end for the prompt and one for each position after it.
    assert len(ended_s) == state.model.generated + bool(state.model.prompt)
    return trace


def worst(state: LongConvolutionState) -> float:
    """The error of the outputs at every position, and of every level where it is still stored."""
    right, total, n = direct(state), state.model.tokens, len(state.outputs)
    assert n == total
    errors = [error(torch.stack(state.outputs, 1), right[-1])]
    first = 0 if state.room == total else state.room
    for level, expected in enumerate(right):
        errors.append(error(state.level(level, first, total), expected[:, first:]))
    return max(errors)


def check(model: LongConvolution, schedule: Schedule, options: dict[str, Any], half: bool, seed: int) -> None:
    state = long_convolution_state(model, seed=seed, half_storage=half)
    execute(state, schedule, **options, **stored(half))
    assert worst(state) < BOUND, (model, options, half)


def models(draw: Random, mixer: str, lengths: tuple[int, ...] = LENGTHS) -> Iterator[LongConvolution]:
    """A model of each length, its layers, batch, block and prompt drawn."""
    plain = mixer == "convolution"
    for tokens in lengths:
        yield LongConvolution(
            layers=draw.randint(1, 4),
            channels=CHANNELS,
            tokens=tokens,
            batch=draw.choice((1, 3)),
            prompt=draw.choice((0, draw.randint(0, tokens - 1))) if plain else 0,
            block=draw.choice(("mlp", "gate")),
            mixer=mixer,  # type: ignore[arg-type]
            rank=draw.randint(1, 4),
            dtype="fp64",
        )


# -- every schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_tilings_give_the_direct_sum(name: str) -> None:
    schedule, options, half = PLAIN[name]
    draw = Random(name)
    for model in models(draw, "convolution"):
        check(replace(model, tiles=HYBRID), schedule, options, half, draw.randrange(1000))
        at_once = replace(model, tiles=HYBRID, one_launch=True)
        check(at_once, schedule, options, half, draw.randrange(1000))


@slow
@pytest.mark.parametrize("several", first(1, [4, 16]))
@pytest.mark.parametrize("name", PLAIN)
def test_launches_of_several_positions_give_the_direct_sum(name: str, several: int) -> None:
    schedule, options, half = PLAIN[name]
    draw = Random(f"{name} {several}")
    for model in models(draw, "convolution", (3, 16, 17, 31, 64, 77)):
        many = replace(model, tiles=HYBRID, tokens_per_launch=several, one_launch=draw.random() < 0.5)
        check(many, schedule, options, half, draw.randrange(1000))


@pytest.mark.parametrize("name", ["lazy", "eager", "fractal", "fractal, half stored"])
@pytest.mark.parametrize("prompt", [0, 7])
def test_launches_of_several_positions_give_what_launches_of_one_do(name: str, prompt: int) -> None:
    """The same kernels on the same operands in the same order."""
    schedule, options, half = PLAIN[name]
    found = []
    for several in (1, 4, 16):
        shape: dict[str, Any] = {
            "layers": 2,
            "channels": CHANNELS,
            "tokens": 45,
            "batch": 2,
            "prompt": prompt,
        }
        model = LongConvolution(**shape, tiles=HYBRID, tokens_per_launch=several)
        state = long_convolution_state(model, half_storage=half)
        execute(state, schedule, **options, **stored(half))
        found.append(torch.stack(state.outputs))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_of_a_tile(implementation: conv.Implementation, half: bool) -> None:
    draw = Random(f"{implementation} {half}")
    for model in models(draw, "convolution", (2, 5, 31, 64)):
        check(replace(model, tiles=ALL_TILES[implementation]), fractal_tiling, {}, half, draw.randrange(1000))


@slow
@pytest.mark.parametrize("mixer", ["convolution", "linear_attention"])
def test_the_generic_algorithm(mixer: str) -> None:
    draw = Random(mixer)
    for model in models(draw, mixer):
        # It takes no prompt.
        check(replace(model, prompt=0), generic_tiling, {}, False, draw.randrange(1000))


@slow
def test_filters_that_depend_on_data() -> None:
    draw = Random(1)
    for model in (*models(draw, "data_dependent_convolution"), *models(draw, "data_dependent_convolution")):
        check(model, relaxed_tiling, {}, False, draw.randrange(1000))


@pytest.mark.parametrize("block_name", ["mlp", "gate"])
@pytest.mark.parametrize("size", first(4, product((1, 2, 3, 4), (1, 3))))
def test_all_depths_batches_and_blocks(size: tuple[int, int], block_name: Any) -> None:
    layers, batch = size
    draw = Random(layers + 10 * batch)
    shape: dict[str, Any] = {"layers": layers, "batch": batch, "channels": CHANNELS, "block": block_name}
    model = LongConvolution(**shape, tokens=23, prompt=draw.randint(1, 22), tiles=HYBRID)
    for half in (False, True):
        check(model, fractal_tiling, {}, half, 0)
    without = LongConvolution(**shape, tokens=13)
    check(without, lazy, {}, False, 0)
    check(without, eager, {}, False, 0)
    check(
        LongConvolution(**shape, tokens=13, mixer="data_dependent_convolution"), relaxed_tiling, {}, False, 0
    )
    check(LongConvolution(**shape, tokens=13, mixer="linear_attention"), generic_tiling, {}, False, 0)


LONG: Mapping[str, tuple[Schedule, bool, dict[str, Any]]] = {
    "lazy": (lazy, False, {"tokens": 257, "layers": 2}),
    "eager": (eager, False, {"tokens": 257, "layers": 2, "prompt": 33}),
    "fractal": (fractal_tiling, False, {"tokens": 257, "layers": 2}),
    "fractal, prompt": (fractal_tiling, False, {"tokens": 257, "layers": 4, "prompt": 100, "batch": 3}),
    "fractal, odd": (fractal_tiling, False, {"tokens": 100, "layers": 3, "block": "gate"}),
    "half stored": (fractal_tiling, True, {"tokens": 257, "layers": 4, "batch": 3}),
    "half stored, odd": (fractal_tiling, True, {"tokens": 100, "layers": 2, "prompt": 7, "block": "gate"}),
    "generic": (generic_tiling, False, {"tokens": 257, "layers": 2, "mixer": "linear_attention"}),
    "relaxed": (relaxed_tiling, False, {"tokens": 257, "layers": 2, "mixer": "data_dependent_convolution"}),
    "relaxed, odd": (
        relaxed_tiling,
        False,
        {"tokens": 100, "layers": 1, "mixer": "data_dependent_convolution"},
    ),
}


@slow
@pytest.mark.parametrize("name", first(3, LONG))
def test_long_runs(name: str) -> None:
    schedule, half, shape = LONG[name]
    check(LongConvolution(channels=CHANNELS, tiles=HYBRID, **shape), schedule, {}, half, 1)


# -- a wrong schedule does not pass --------------------------------------------------------------------------


class Leaving:
    """A machine that leaves out the n-th launch whose graph is named so."""

    def __init__(self, machine: Machine, name: str, turn: int) -> None:
        self._machine, self._name, self._left = machine, name, turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def launch(self, graph: Graph, **more: Any) -> Any:
        self._left -= graph.name.startswith(self._name)
        if graph.name.startswith(self._name) and self._left == 0:
            return self._machine.launch(Graph("nothing", ()))
        return self._machine.launch(graph, **more)


def leaving_out(state: LongConvolutionState, schedule: Schedule, name: str, turn: int) -> float:
    """The error without one launch."""
    ended_s: list[float] = []
    options = stored(state.room < state.model.tokens)
    TorchRun([state]).run(lambda m: schedule(Leaving(m, name, turn), state.model, ended_s, **options))
    return worst(state)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("turn", [1, 2, 4, 7])
def test_a_tile_that_is_left_out_is_found(turn: int, half: bool) -> None:
    model = LongConvolution(layers=2, channels=CHANNELS, tokens=31, batch=2, tiles=HYBRID)
    state = long_convolution_state(model, half_storage=half)
    assert leaving_out(state, fractal_tiling, "tile ", turn) > 1e-4


@pytest.mark.parametrize("at", [None, 0, 1, 7, 14, 15])
def test_a_tile_one_position_early_is_found(at: int | None) -> None:
    """Before the position that is the last of its inputs; `None`: none is, and nothing is found."""
    model = LongConvolution(layers=2, channels=CHANNELS, tokens=31, batch=2, tiles=HYBRID)
    state = long_convolution_state(model)

    def early(m: Machine) -> Program:
        for t in range(model.tokens):
            side = tile_side(t + 1)
            outputs = min(side, model.tokens - 1 - t)
            due = [model.step(), *([model.tile(side, outputs)] if outputs else [])]
            tickets = [m.launch(graph, sizes={"position": t}) for graph in (due[::-1] if t == at else due)]
            yield m.wait(*tickets)

    TorchRun([state]).run(early)
    assert worst(state) < BOUND if at is None else worst(state) > 1e-4


@pytest.mark.parametrize(
    ("mixer", "schedule", "name"),
    [
        ("linear_attention", generic_tiling, "generic_tile"),
        ("convolution", generic_tiling, "generic_tile"),
        ("data_dependent_convolution", relaxed_tiling, "relaxed_tiles"),
        ("convolution", lazy, "rows"),
        ("convolution", eager, "columns"),
    ],
)
def test_a_launch_that_is_left_out_is_found(mixer: Any, schedule: Schedule, name: str) -> None:
    model = LongConvolution(layers=2, channels=CHANNELS, tokens=31, batch=2, mixer=mixer)
    assert leaving_out(long_convolution_state(model), schedule, name, 5) > 1e-4


def test_a_missing_carry_is_found() -> None:
    """Positions of the second half have no place before it."""
    model = LongConvolution(layers=2, channels=CHANNELS, tokens=31)
    with pytest.raises(IndexError, match="stored are 0 to 15"):
        leaving_out(long_convolution_state(model, half_storage=True), fractal_tiling, "carry", 1)


def test_the_order_of_contributions_counts_for_linear_attention() -> None:
    """A tile that comes after the position that it contributes to leaves a query that is not the last."""
    model = LongConvolution(layers=1, channels=CHANNELS, tokens=2, mixer="linear_attention")
    state, other = long_convolution_state(model), long_convolution_state(model)
    execute(state, generic_tiling)
    right = state.outputs[1]

    def late(m: Machine) -> Program:
        for t in range(2):
            yield m.wait(m.launch(model.generic_step(), sizes={"position": t}))
        m.launch(model.generic_tile(1, 1), sizes={"position": 0})
        step = model.generic_step()
        again = Graph("read", tuple(op for op in step.ops if op.kind != "generic_cell"))
        other.outputs.pop()
        yield m.wait(m.launch(again, sizes={"position": 1}))

    TorchRun([other]).run(late)
    assert error(other.outputs[1], right) > 1e-3


# -- half storage --------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The most numbers of any tensor that is made (a view of another one is not)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                numbers = x.untyped_storage().nbytes() // 8
                self.largest = max(self.largest, numbers)
        return found


@slow
@pytest.mark.parametrize("prompt", [0, 9])
def test_half_storage_holds_half(prompt: int) -> None:
    model = LongConvolution(layers=4, channels=7, tokens=128 + prompt, batch=2, prompt=prompt, tiles=HYBRID)
    state, whole = long_convolution_state(model, half_storage=True), long_convolution_state(model)
    half = 5 * 2 * (prompt + half_length(128)) * 7
    assert half_length(128) == 64
    assert state.a.numel() == half == whole.a.numel() - 5 * 2 * 64 * 7
    with Allocations() as made:
        execute(state, fractal_tiling, half_storage=True)
    assert 0 < made.largest <= half
    drawn = {id(x) for x in (state.taps, *state.spectra.values(), state.parameters.noise)}
    held = [x for x in vars(state).values() if isinstance(x, Tensor) and id(x) not in drawn]
    assert max(x.numel() for x in held) == half
    assert worst(state) < BOUND


def test_positions_that_are_gone_are_not_read() -> None:
    model = LongConvolution(layers=1, channels=2, tokens=8)
    state = long_convolution_state(model, half_storage=True)
    execute(state, fractal_tiling, half_storage=True)
    assert state.level(1, 4, 8).shape == (1, 4, 2)
    with pytest.raises(IndexError, match="positions 3 to 7; stored are 4 to 7"):
        state.level(1, 3, 8)


# -- the machine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_launches_are_those_of_the_simulated_machine(name: str) -> None:
    schedule, options, half = PLAIN[name]
    several = 4 if name in ("lazy", "fractal") else 1
    model = LongConvolution(layers=2, channels=CHANNELS, tokens=21, prompt=4, tokens_per_launch=several)
    options = {**options, **stored(half)}
    real = execute(long_convolution_state(model, half_storage=half), schedule, **options)
    simulated = Simulation(by_name({})).run(lambda m: schedule(m, model, [], **options))

    def launches(trace: Trace) -> list[tuple[str, list[Op]]]:
        spans = sorted(trace.spans, key=lambda span: span.launch)
        return [(span.graph, [priced.op for priced in span.ops]) for span in spans]

    assert [graph for graph, _ in launches(real)] == [graph for graph, _ in launches(simulated)]
    assert (len(launches(real)) > model.generated) == (several == 1)
    # What is priced there is what was run here, wherever it works.
    assert [[op.without_place for op in ops] for _, ops in launches(real)] == [
        [op.without_place for op in ops] for _, ops in launches(simulated)
    ]


def test_a_tiling_meets_nobody() -> None:
    state = long_convolution_state(LongConvolution(layers=1, channels=2, tokens=3))
    op = put("hop", elements=4, axis="tensor", dtype="fp32")
    with pytest.raises(ValueError, match="meets no other rank"):
        state.meet(op, [state])
    with pytest.raises(ValueError, match="publishes nothing"):
        state.put(Publication("gone", 0, op), state)
    before = state.a.clone()
    state.skip(op)
    assert torch.equal(state.a, before)


@thorough
def test_parameters_are_the_same_wherever_they_are_drawn() -> None:
    model = LongConvolution(layers=3, channels=5, tokens=9)
    with torch.inference_mode():
        inside = parameters(model, 4, torch.float32)
    outside, other = parameters(model, 4, torch.float32), parameters(model, 5, torch.float32)
    assert torch.equal(inside.filters, outside.filters)
    assert not torch.equal(outside.filters, other.filters)
    assert not torch.equal(outside.filters[0], outside.filters[1])


@slow
def test_models_stay_bounded_and_do_not_vanish() -> None:
    """What a model feeds back does not grow; otherwise rounding would be all that these tests see."""
    for mixer, schedule in (
        ("convolution", fractal_tiling),
        ("data_dependent_convolution", relaxed_tiling),
        ("linear_attention", generic_tiling),
    ):
        for seed, name in product(range(2), ("mlp", "gate")):
            model = LongConvolution(layers=3, channels=9, tokens=96, mixer=mixer, block=name)  # type: ignore[arg-type]
            state = long_convolution_state(model, seed=seed)
            execute(state, schedule)
            assert 1e-9 < float(state.a[-1].std()) < float(state.a[0].std()) < 2


# -- kernels -------------------------------------------------------------------------------------------------


def lanes(draw: Random) -> dict[str, int]:
    return {"layers": draw.randint(1, 3), "batch": draw.randint(1, 3), "channels": draw.choice((1, 3, 7))}


def one_layer(draw: Random) -> dict[str, int]:
    return {"batch": draw.randint(1, 3), "channels": draw.choice((1, 3, 7))}


def side_and_outputs(draw: Random) -> dict[str, int]:
    side = 1 << draw.randint(0, 5)
    return {"side": side, "outputs": draw.choice((side, draw.randint(1, side)))}


def span(draw: Random) -> dict[str, int]:
    inputs = draw.randint(1, 40)
    return {"inputs": inputs, "outputs": draw.randint(1, inputs)}


def relaxed(draw: Random, dtype: str) -> Op:
    side = 1 << draw.randint(0, 5)
    outputs = draw.choice((2 * side - 1, draw.randint(1, 2 * side - 1)))
    shape = {"side": side, "products": draw.randint(1, 2), "outputs": outputs}
    return conv.relaxed_tile(**lanes(draw), **shape, dtype=dtype)


def generic(draw: Random, dtype: str) -> Op:
    shape = {**lanes(draw), **side_and_outputs(draw), "state": draw.randint(1, 4)}
    return conv.generic_tile(**shape, separable=draw.random() < 0.5, dtype=dtype)


OPS: Mapping[str, Callable[[Random, str], Op]] = {
    "conv_cell": lambda draw, dtype: conv.conv_cell(**one_layer(draw), dtype=dtype),
    "conv_row": lambda draw, dtype: conv.conv_row(**lanes(draw), inputs=draw.randint(1, 40), dtype=dtype),
    "conv_column": lambda draw, dtype: conv.conv_column(
        **lanes(draw), outputs=draw.randint(1, 40), dtype=dtype
    ),
    "gate": lambda draw, dtype: conv.gate(rows=draw.randint(1, 9), channels=7, dtype=dtype),
    "next_input": lambda draw, dtype: conv.next_input(rows=draw.randint(1, 9), channels=7, dtype=dtype),
    **{
        f"tile_{name}": lambda draw, dtype, name=name: conv.tile(  # type: ignore[misc]
            name, **lanes(draw), **side_and_outputs(draw), dtype=dtype
        )
        for name in IMPLEMENTATIONS
    },
    "conv_prefill": lambda draw, dtype: conv.conv_prefill(
        **one_layer(draw), inputs=draw.randint(1, 40), outputs=draw.randint(1, 60), dtype=dtype
    ),
    "conv_carry": lambda draw, dtype: conv.conv_carry(**one_layer(draw), **span(draw), dtype=dtype),
    "filter_tap": lambda draw, dtype: conv.filter_tap(**one_layer(draw), dtype=dtype),
    "relaxed_cell": lambda draw, dtype: conv.relaxed_cell(**one_layer(draw), dtype=dtype),
    "relaxed_tile": relaxed,
    "generic_cell": lambda draw, dtype: conv.generic_cell(
        separable=True, **one_layer(draw), state=draw.randint(1, 4), dtype=dtype
    ),
    "generic_read": lambda draw, dtype: conv.generic_read(
        **one_layer(draw), state=draw.randint(1, 4), dtype=dtype
    ),
    "generic_tile": generic,
}


# Kernels that give something new and write nothing that they are given.
NEW = ("next_input", "filter_tap", "generic_read")


def lagged(y: Tensor, taps: Tensor, shift: int, outputs: int) -> Tensor:
    """sum over i of y_i taps[shift + v - i] for v < outputs: a matrix of lags for each channel."""
    lag = shift + torch.arange(outputs)[:, None] - torch.arange(y.shape[2])
    there = (lag >= 0) & (lag < taps.shape[2])
    matrix = taps[:, :, lag.clamp(0, taps.shape[2] - 1)] * there[:, :, None]
    return torch.einsum("lbud,lbvud->lbvd", y, matrix.expand(-1, y.shape[1], -1, -1, -1))


def tile_formula(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    if taps.is_complex():
        # Lag 0 is there, and not used.
        taps = torch.fft.irfft(taps, 2 * op["side"], dim=2)[:, :, 1:]
    return z + lagged(y, taps, op["side"] - 1, op["outputs"])


def carry_formula(op: Op, taps: Tensor, y: Tensor) -> Tensor:
    carried = torch.zeros_like(y)
    carried[:, :, : op["outputs"]] = lagged(y, taps, op["inputs"] - 1, op["outputs"])
    return carried


def relaxed_formula(op: Op, *x: Tensor) -> Tensor:
    pairs = zip(x[:-1:2], x[1:-1:2], strict=True)
    return sum((lagged(y, k, 0, op["outputs"]) for y, k in pairs), x[-1])


def generic_tile_formula(
    op: Op, y: Tensor, key: Tensor, _: Tensor, w: Tensor, s: Tensor, q: Tensor
) -> Tensor:
    del q
    lag = op["side"] + torch.arange(op["outputs"])[:, None] - torch.arange(op["side"])
    weights = w[:, lag].expand(-1, -1, -1, y.shape[-1])
    return s + torch.einsum("lbus,lbud,lvud->lbvsd", key, y, weights)


# What a kernel has to give for its operands, in their precision.
FORMULAS: Mapping[str, Callable[..., Tensor]] = {
    "conv_cell": lambda op, y, tap, z: z + y * tap,
    "conv_row": lambda op, y, taps, z: z + lagged(y, taps, op["inputs"] - 1, 1)[:, :, 0],
    "conv_column": lambda op, y, taps, z: z + lagged(y[:, :, None], taps, 0, op["outputs"]),
    "gate": lambda op, g, z: g * z,
    "next_input": lambda op, a, noise: a + noise,
    **dict.fromkeys((f"tile_{name}" for name in IMPLEMENTATIONS), tile_formula),
    "conv_prefill": lambda op, y, taps, z: z + lagged(y, taps, 0, op["outputs"]),
    "conv_carry": carry_formula,
    "filter_tap": lambda op, p, h: h + h * torch.tanh(p),
    "relaxed_cell": lambda op, y, first, y_first, k, z: z + y * first + y_first * k,
    "relaxed_tile": relaxed_formula,
    "generic_cell": lambda op, y, key, query, w, s, q: s + torch.einsum("bs,bd->bsd", key, y * w),
    "generic_read": lambda op, s, q: torch.einsum("bs,bsd->bd", q, s),
    "generic_tile": generic_tile_formula,
}


def formula(op: Op, x: tuple[Tensor, ...]) -> Tensor:
    return FORMULAS[op.kind](op, *x)


def inputs_of(op: Op, seed: int) -> tuple[Tensor, ...]:
    return TABLE[op.kind].inputs(op, torch.Generator().manual_seed(seed), torch.device("cpu"))


def doubled(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@pytest.mark.parametrize("kind", OPS)
def test_kernels_follow_their_formula(kind: str) -> None:
    draw = Random(kind)
    for (dtype, bound), _ in product((("fp64", BOUND), ("fp32", SINGLE_BOUND)), range(8)):
        op = OPS[kind](draw, dtype)
        assert op.kind == kind
        x = inputs_of(op, draw.randrange(1000))
        right = formula(op, tuple(doubled(each) for each in x))
        for function in (TABLE[kind].run, TABLE[kind].reference):
            found = function(op, *(each.clone() for each in x))
            assert found.dtype == x[0].dtype
            assert error(found.double(), right) < bound, (op.shape, function)


@pytest.mark.parametrize("kind", [kind for kind in OPS if kind not in NEW])
def test_kernels_write_only_what_is_theirs(kind: str) -> None:
    """What they add to is a view into something poisoned, and their operands stay as they were."""
    draw = Random(kind)
    op = OPS[kind](draw, "fp64")
    x = inputs_of(op, 3)
    written = {"generic_cell": 2, "generic_tile": 2}.get(kind, 1)
    *read, z = x if written == 1 else x[:-1]
    room = torch.full([n + 2 for n in z.shape], torch.nan, dtype=z.dtype)
    view = room[tuple(slice(1, -1) for _ in z.shape)]
    view.copy_(z)
    before = [each.clone() for each in read]
    rest = () if written == 1 else (x[-1].clone(),)
    found = TABLE[kind].run(op, *read, view, *rest)
    assert found.data_ptr() == view.data_ptr()
    assert error(view, formula(op, x if written > 1 else (*before, z))) < BOUND
    assert int(torch.isnan(room).sum()) == room.numel() - prod(z.shape)
    assert all(torch.equal(a, b) for a, b in zip(read, before, strict=True))
    if rest:
        query = x[2] if kind == "generic_cell" else x[2][:, :, None].expand_as(rest[0])
        assert torch.equal(rest[0], query)


def test_halves_are_summed_in_single_precision() -> None:
    """Numbers of 16 bits: the sum is rounded once, however many there are."""
    draw = Random(5)
    for kind in ("conv_row", "conv_column", "tile_conv", "tile_flash_conv", "tile_fft", "relaxed_tile"):
        op = OPS[kind](draw, "fp16")
        x = inputs_of(op, 1)
        assert x[-1].dtype == torch.float16
        right = formula(op, tuple(doubled(each) for each in x))
        for function in (TABLE[kind].run, TABLE[kind].reference):
            found = function(op, *(each.clone() for each in x))
            assert found.dtype == torch.float16
            assert error(found.double(), right) < 2**-10


@pytest.mark.parametrize("side", SIDES)
def test_the_cached_spectrum_gives_the_direct_tile(side: int) -> None:
    """An order of 2 side is enough, for any outputs, and for filters that end before 2 side."""
    generator = torch.Generator().manual_seed(side)
    for outputs in {side, 1, max(1, side // 3), max(1, side - 1)}:
        shape: dict[str, Any] = {"layers": 2, "batch": 3, "channels": 5, "side": side, "outputs": outputs}
        y, z = (torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64) for n in (side, outputs))
        taps = torch.randn(2, 1, side + outputs, 5, generator=generator, dtype=torch.float64)
        right = z + lagged(y, taps, side, outputs)
        for name in IMPLEMENTATIONS:
            op = conv.tile(name, **shape, dtype="fp64")
            filters = spectrum(taps, side) if name.endswith("fft") else taps[:, :, 1:]
            found = TABLE[op.kind].run(op, y, filters, z.clone())
            assert error(found, right) < BOUND
    cached = spectrum(taps, side)
    assert cached.shape == (2, 1, side + 1, 5)


def test_parts_of_a_tile_make_up_the_tile() -> None:
    """Every part has a kernel of its own; one after the other they are the whole."""
    for name in ("conv", "fft"):
        op = conv.tile(name, layers=2, batch=3, channels=5, side=8, outputs=7, dtype="fp64")
        y, filters, z = inputs_of(op, 1)
        whole, x = TABLE[op.kind].run(op, y, filters, z.clone()), y
        for part in op.parts[:-1]:
            takes = 1 + (part.kind in ("depthwise_conv", "spectrum_product"))
            assert len(inputs_of(part, 1)) == takes
            assert [each.shape for each in inputs_of(part, 1)] == [
                each.shape for each in (x, filters)[:takes]
            ]
            x = TABLE[part.kind].run(part, *(x, filters)[:takes])
        made = x[:, :, 8:15] if name == "fft" else x
        last = op.parts[-1]
        assert [each.shape for each in inputs_of(last, 1)] == [made.shape, z.shape]
        assert torch.equal(TABLE[last.kind].run(last, made, z.clone()), whole)


def test_a_filter_for_each_sequence_is_no_depthwise_convolution() -> None:
    op = conv.tile("conv", layers=1, batch=2, channels=3, side=2, outputs=2, dtype="fp64")
    y, taps, z = inputs_of(op, 0)
    with pytest.raises(ValueError, match="there are 2"):
        TABLE["tile_conv"].run(op, y, taps.expand(-1, 2, -1, -1), z)


def test_every_kind_of_op_has_a_kernel() -> None:
    """But renaming buffers, which nothing is computed for."""
    kinds = {*conv.MIXER_KINDS, "gate", "next_input", "matmul", "activation", "token_step"} - {"slot_shift"}
    assert kinds <= TABLE.keys()
    assert LONG_CONVOLUTION.keys() <= TABLE.keys()
