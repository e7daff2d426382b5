"""A long convolution on the machine of a card gives what it gives on the CPU, in every tiling that runs
there; its steps are captured once for all positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.long_convolution import placed_tiles, token_step
from simcore.kernels.long_convolution.placed import KERNELS
from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution
from simcore.ops.convolution import IMPLEMENTATIONS
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.lazy import lazy
from simcore.validate.machines.buffers import cuda_long_convolution as card_long_convolution
from simcore.validate.machines.buffers.cuda_long_convolution import CardLongConvolutionState
from simcore.validate.machines.buffers.long_convolution import (
    LongConvolutionState,
    long_convolution_state,
    parameters,
)
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda import machine
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from tests.fake_card import FakeCudaApi
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
SCHEDULES: dict[str, tuple[Callable[..., Program], dict[str, Any]]] = {
    "lazy": (lazy, {}),
    "lazy, layer by layer": (lazy, {"parallel": False}),
    "eager": (eager, {}),
    "eager, layer by layer": (eager, {"parallel": False}),
    "fractal": (fractal_tiling, {}),
    "fractal, layer by layer": (fractal_tiling, {"parallel": False}),
    "fractal, sequential from 4": (fractal_tiling, {"sequential_from": 4}),
}
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}
# How tiles are computed goes round the implementations.
TILES = tuple((1 << i, IMPLEMENTATIONS[i % len(IMPLEMENTATIONS)]) for i in range(6))


def twice(model: LongConvolution, name: str, device: str) -> tuple[CardLongConvolutionState, list[int], Card]:
    """The state after a run that captures and one that replays, and how many stages each captured."""
    schedule, options = SCHEDULES[name]
    state = CardLongConvolutionState(model, 0, device)
    card = Card([state], FakeCudaApi(1) if device == "cpu" else TorchCudaApi())

    def program(m: Machine) -> Program:
        return schedule(m, model, [], **options)

    captured = []
    for _ in range(2):
        state.reset()
        run = card.start()
        run.run(program)
        captured.append(run.fresh)
    return state, captured, card


def model_of(name: str, block: Any, batch: int, prompt: int, dtype: str) -> LongConvolution:
    tiles = TILES if name.startswith("fractal") else ()
    return LongConvolution(
        layers=3, channels=5, tokens=21, batch=batch, prompt=prompt, block=block, dtype=dtype, tiles=tiles
    )


def same_as_on_the_cpu(
    name: str,
    block: str,
    batch: int,
    prompt: int,
    device: str,
    dtype: str,
    one_launch: bool = False,
    several: int = 1,
) -> None:
    model = model_of(name, block, batch, prompt, dtype)
    model = replace(model, one_launch=one_launch, tokens_per_launch=several)
    state, captured, _ = twice(model, name, device)
    assert captured[0] > 0
    assert captured[1] == 0
    schedule, options = SCHEDULES[name]
    truth = long_convolution_state(model, seed=0)
    TorchRun([truth]).run(lambda m: schedule(m, model, [], **options))
    found, expected = state.outputs.double().cpu(), torch.stack(truth.outputs)
    # What a prompt gives is not computed.
    error = (found - expected)[prompt:].norm() / expected[prompt:].norm()
    assert float(error) < BOUNDS[dtype]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("block", "batch", "prompt"),
    [
        ("gate", 2, 0),
        ("mlp", 1, 6),
        pytest.param("mlp", 1, 0, marks=thorough),
        pytest.param("mlp", 2, 1, marks=thorough),
    ],
)
def test_all_tilings_give_what_they_give_on_the_cpu(name: str, block: str, batch: int, prompt: int) -> None:
    same_as_on_the_cpu(name, block, batch, prompt, "cpu", "fp64")


@pytest.mark.parametrize("name", ["lazy", "eager", "fractal", "fractal, layer by layer"])
@pytest.mark.parametrize(("block", "batch", "prompt"), [("gate", 2, 0), ("mlp", 1, 6)])
def test_steps_in_one_launch_give_the_same(name: str, block: str, batch: int, prompt: int) -> None:
    same_as_on_the_cpu(name, block, batch, prompt, "cpu", "fp64", one_launch=True)


@pytest.mark.parametrize("name", ["lazy", "eager", "fractal", "fractal, sequential from 4"])
@pytest.mark.parametrize(("block", "batch", "prompt"), [("gate", 2, 0), ("mlp", 1, 6)])
@pytest.mark.parametrize("several", first(1, [4, 16, 2]))
def test_launches_of_several_positions_give_the_same(
    name: str, block: str, batch: int, prompt: int, several: int
) -> None:
    for one_launch in (False, True):
        same_as_on_the_cpu(name, block, batch, prompt, "cpu", "fp64", one_launch, several)


@slow
@pytest.mark.skipif(HAS_GPU or not ONE_BY_ONE, reason="for Triton's interpreter")
@pytest.mark.parametrize("name", first(1, ["fractal", "lazy"]))
@pytest.mark.parametrize("several", first(1, [4, 1]))
def test_steps_in_one_launch_give_the_same_by_their_kernel(
    name: str, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (placed_tiles, token_step):
        monkeypatch.setattr(module, "has_kernel", lambda x: x.dtype != torch.float64)
    same_as_on_the_cpu(name, "mlp", 2, 0, "cpu", "fp32", one_launch=True, several=several)


@slow
@pytest.mark.skipif(HAS_GPU or not ONE_BY_ONE, reason="for Triton's interpreter")
@pytest.mark.parametrize("name", ["lazy", pytest.param("eager", marks=thorough), "fractal"])
def test_launches_of_several_positions_give_the_same_by_their_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_long_convolution, "placed_for", lambda x: KERNELS)
    monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: True)
    same_as_on_the_cpu(name, "mlp", 1, 6, "cpu", "fp32", several=4)


@slow
@pytest.mark.skipif(HAS_GPU or not ONE_BY_ONE, reason="for Triton's interpreter")
@pytest.mark.parametrize("name", ["lazy, layer by layer", "fractal"])
@pytest.mark.parametrize(
    ("block", "batch", "prompt"), [("mlp", 1, 6), pytest.param("gate", 2, 0, marks=thorough)]
)
@pytest.mark.parametrize("dtype", first(1, ["fp32", "fp16"]))
def test_the_same_by_its_kernels(
    name: str, block: str, batch: int, prompt: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_long_convolution, "placed_for", lambda x: KERNELS)
    monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: True)
    same_as_on_the_cpu(name, block, batch, prompt, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("block", "batch", "prompt"), [("mlp", 1, 0), ("gate", 2, 0), ("mlp", 1, 6)])
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
@pytest.mark.parametrize("one_launch", [False, True])
def test_the_same_on_a_real_card(
    name: str, block: str, batch: int, prompt: int, dtype: str, one_launch: bool
) -> None:
    same_as_on_the_cpu(name, block, batch, prompt, "cuda", dtype, one_launch)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["lazy", "eager", "fractal", "fractal, sequential from 4"])
@pytest.mark.parametrize(("block", "batch", "prompt"), [("mlp", 1, 0), ("gate", 2, 6)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("one_launch", [False, True])
@pytest.mark.parametrize("several", [4, 16])
def test_launches_of_several_positions_give_the_same_on_a_real_card(
    name: str, block: str, batch: int, prompt: int, dtype: str, one_launch: bool, several: int
) -> None:
    same_as_on_the_cpu(name, block, batch, prompt, "cuda", dtype, one_launch, several)


def error_of_activations(layers: int, channels: int, tokens: int, device: str) -> float:
    """By how much all activations of a generation by tiles, in fp32 and with steps in one launch, differ from
    those of the lazy algorithm in float64, relative to the larger norm, in the worst layer."""
    sides = [1 << i for i in range(tokens.bit_length())]
    tiles = tuple((side, "flash_conv" if side <= 64 else "flash_fft") for side in sides)
    model = LongConvolution(
        layers, channels, tokens, dtype="fp32", tiles=tiles, one_launch=True, tokens_per_launch=16
    )
    plain = replace(model, dtype="fp64", tiles=(), one_launch=False, tokens_per_launch=1)
    found = twice(model, "fractal", device)[0].inner.a.double()
    # The reference is the machine without graphs: op after op, each in plain torch.
    truth = LongConvolutionState(plain, parameters(plain, 0, torch.float64).to(device), outputs_stay=True)
    TorchRun([truth]).run(lambda m: lazy(m, plain, []))
    expected = truth.a
    assert found.shape == expected.shape
    assert expected.abs().amax((1, 2, 3)).min() > 0.0
    each = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(each.max())


@slow
def test_activations_are_those_of_lazy_in_float64() -> None:
    assert error_of_activations(4, 16, 300, "cpu") < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("layers", "channels"), [(18, 256), (36, 768)])
def test_activations_of_4096_tokens_on_a_real_card(
    layers: int, channels: int, record_property: Callable[[str, object], None]
) -> None:
    error = error_of_activations(layers, channels, 4096, "cuda")
    record_property("error", error)
    assert error < 1e-4


@pytest.mark.parametrize(
    ("tokens", "name", "others"),
    [
        # Rows and columns, for each power of two.
        (9, "lazy", 4),
        (17, "lazy", 5),
        (17, "lazy, layer by layer", 5),
        (17, "eager", 5),
        # Tiles, for each side; those that the end cuts have a graph each.
        (16, "fractal", 4),
        (13, "fractal", 5),
        (16, "fractal, layer by layer", 4),
    ],
)
def test_a_graph_is_captured_once_for_all_positions(tokens: int, name: str, others: int) -> None:
    model = LongConvolution(layers=2, channels=3, tokens=tokens, dtype="fp64")
    state, captured, _ = twice(model, name, "cpu")
    assert captured == [1 + others, 0]
    for graph in (model.step(), model.tile(2, 2), model.tile_step(2, 2)):
        assert state.device_sizes(graph) == {"position"}
        assert not state.captured_sizes(graph)
    assert state.captured_sizes(model.rows()) == {"inputs"}


@pytest.mark.parametrize(
    ("tokens", "name", "graphs"),
    [
        # Of positions: the first, and two rows of 29 and 30 inputs; of launches: ends at 4, 8, 16 and 32.
        (31, "lazy", 2 + 4),
        # A step, columns of 3, 2 and 1 outputs at the end; of launches: those from 8, 16 and 32 outputs on.
        (32, "eager", 1 + 3 + 3),
        # One launch for all, and tiles of sides 4, 8 and 16 after it.
        (32, "fractal", 1 + 3),
    ],
)
def test_a_graph_of_several_positions_is_captured_once_for_all(tokens: int, name: str, graphs: int) -> None:
    model = LongConvolution(layers=2, channels=3, tokens=tokens, dtype="fp64", tokens_per_launch=4)
    state, captured, _ = twice(model, name, "cpu")
    assert captured == [graphs, 0]
    for graph in (model.rows_and_steps(4), model.steps_and_columns(4), model.steps_and_tiles(4)):
        assert state.device_sizes(graph) == {"position"}
    assert not state.captured_sizes(model.steps_and_tiles(4))
    # All rows of a launch and all columns have programs enough, and no more than they need.
    for inputs in (1, 5, 13, 29):
        bound = state.bound(model.rows_and_steps(4), {"position": 0, "inputs": inputs})
        rows = [
            op.at({"position": 0, **bound}) for op in model.rows_and_steps(4).ops if op.kind == "conv_row"
        ]
        assert [op["inputs"] for op in rows][-1] == placed_tiles.power_from(inputs + 3)
        assert all(op["inputs"] >= inputs + i for i, op in enumerate(rows))
    for outputs in (4, 7, 8, 29):
        bound = state.bound(model.steps_and_columns(4), {"position": 0, "outputs": outputs})
        ops = model.steps_and_columns(4).ops
        columns = [op.at({"position": 0, **bound}) for op in ops if op.kind == "conv_column"]
        assert columns[0]["outputs"] == placed_tiles.power_from(outputs)
        assert all(op["outputs"] >= outputs - i for i, op in enumerate(columns))


@pytest.mark.parametrize("name", ["lazy", "fractal"])
def test_a_rehearsal_captures_what_a_run_replays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REHEARSED", 3)
    model = replace(model_of(name, "mlp", 1, 0, "fp64"), one_launch=True)
    schedule, options = SCHEDULES[name]
    state = CardLongConvolutionState(model, 0, "cpu")
    api, ran = FakeCudaApi(1), list[int]()
    card = Card([state], api)
    executed = CardLongConvolutionState.execute
    monkeypatch.setattr(
        CardLongConvolutionState, "execute", lambda self, op: (ran.append(1), executed(self, op))
    )
    counts, captured = list[int](), list[int]()
    for rehearsal in (True, True, False):
        state.reset()
        run = card.start(rehearsal=rehearsal)
        run.run(lambda m: schedule(m, model, [], **options))
        counts.append(len(ran))
        captured.append(run.fresh)
    # Of 41 launches: three of each graph at most, in every rehearsal.
    assert counts[1] - counts[0] <= counts[0] < 21
    assert counts[2] - counts[1] == 41
    assert captured[1:] == [0, 0]
    truth = long_convolution_state(model, seed=0)
    TorchRun([truth]).run(lambda m: schedule(m, model, [], **options))
    torch.testing.assert_close(state.outputs, torch.stack(truth.outputs))
