"""The token step of a long-convolution model against float64: in Triton's interpreter where there is no GPU.

There a launch has one program, or the programs of a launch are processes with the same memory, one each.
"""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.long_convolution import token_step as module
from simcore.kernels.long_convolution.token_step import (
    TokenConfig,
    Workspace,
    config_for,
    reference_token_step,
    token_config,
    token_step,
    workspace,
)
from simcore.models.long_convolution import LongConvolution
from simcore.validate.machines.buffers.long_convolution import long_convolution_state
from tests.thorough import slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter does not compute in bf16 as a GPU does.
DTYPES = list(BOUNDS) if HAS_GPU else [torch.float32, torch.float16]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


class Model:
    """Random numbers of a model: sums at `t`, no numbers where nothing may be read."""

    def __init__(
        self, block: str, layers: int, batch: int, room: int, channels: int,
        dtype: torch.dtype = torch.float32, a_dtype: torch.dtype | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def drawn(*size: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(DEVICE, dtype)

        d = channels
        # Rows further apart than they are long.
        self.whole = drawn(layers + 1, batch, room, d + 8, dtype=a_dtype or dtype)
        self.a = self.whole[..., :d]
        self.taps = drawn(layers, 1, 3, d, scale=0.5)
        sizes = [(2 * d, d), (d, 2 * d)] if block == "mlp" else [(d, d)]
        self.matrices = [drawn(layers, *size, scale=1.5 * size[1] ** -0.5) for size in sizes]
        self.noise = drawn(room, batch, d)
        self.position = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def truth(self, t: int, *, noise: bool = True) -> Tensor:
        """a after the step, in float64."""
        a = self.a.double()
        matrices = [matrix.double() for matrix in self.matrices]
        reference_token_step(a, self.taps.double(), matrices, t, noise=self.noise.double() if noise else None)
        return a

    def poison(self, t: int) -> None:
        """No numbers at all other positions, and where the next input will stand."""
        kept = self.whole[:, :, t].clone()
        self.whole.fill_(math.nan)
        self.whole[:, :, t] = kept

    def step(self, t: int, config: TokenConfig | None = None, space: Workspace | None = None) -> None:
        """As the kernel does it."""
        self.position.fill_(t)
        token_step(
            self.a, self.taps, self.matrices, self.position, noise=self.noise, space=space, config=config
        )


def checked(model: Model, t: int, truth: Tensor, times: float = 1.0) -> None:
    """That a is the truth at every level, and what was there elsewhere still is."""
    room = model.a.shape[2]
    for level, (x, right) in enumerate(zip(model.a[:, :, t], truth[:, :, t], strict=True)):
        assert error(x, right) < BOUNDS[x.dtype] * times, level
    if t + 1 < room:
        assert error(model.a[0, :, t + 1], truth[0, :, t + 1]) < BOUNDS[model.a.dtype] * times
    others = model.whole.clone()
    others[:, :, t] = math.nan
    if t + 1 < room:
        others[0, :, t + 1] = math.nan
    assert others.isnan().all()


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm().clamp_min(1e-300))


BLOCKS = ["mlp", "gate"]


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_is_exact(block: str, dtype: torch.dtype) -> None:
    for channels, batch, rows, layers in ((20, 1, 1, 3), (37, 3, 2, 2), (16, 5, 8, 1), (1, 2, 1, 2)):
        model = Model(block, layers, batch, 5, channels, dtype, seed=channels)
        config = TokenConfig(1, rows, 1)
        truth = model.truth(2)
        model.poison(2)
        model.step(2, config)
        checked(model, 2, truth)


@slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_workspace_serves_launch_after_launch(block: str) -> None:
    model = Model(block, 3, 2, 6, 20)
    config = TokenConfig(1, 1, 1)
    space = workspace(model.a, model.matrices, config)
    whole, exchanges = model.whole.clone(), 6 if block == "mlp" else 2
    for i, t in enumerate((0, 3, 3, 5, 1), 1):
        model.whole.copy_(whole)
        truth = model.truth(t)
        model.poison(t)
        model.step(t, config, space)
        checked(model, t, truth)
        assert space.turns.tolist() == [i * exchanges % 4] * 2


@pytest.mark.parametrize("block", ["mlp", "gate"])
def test_a_sequence_may_have_taps_of_its_own_and_formats_may_differ(block: str) -> None:
    model = Model(block, 2, 3, 4, 24, torch.float16, torch.float32)
    model.taps = torch.randn(2, 3, 1, 48, device=DEVICE)[..., :24]
    truth = model.truth(1)
    model.poison(1)
    model.step(1)
    checked(model, 1, truth)


@slow
def test_it_is_what_the_ops_of_a_model_do() -> None:
    model = LongConvolution(layers=3, channels=12, tokens=6, batch=2)
    state = long_convolution_state(model, seed=3)
    for t in range(3):
        expected, a = state.a, state.a.float().to(DEVICE)
        for op in model.step().ops:
            state.execute(op.at({"position": t}))
        parameters = state.parameters
        matrices = [parameters.matrices[name].mT.contiguous().float().to(DEVICE) for name in ("up", "down")]
        token_step(
            a, state.taps.float().to(DEVICE), matrices, torch.tensor([t], dtype=torch.int32, device=DEVICE),
            noise=parameters.noise.float().to(DEVICE),
        )  # fmt: skip
        assert error(a.cpu(), expected) < BOUNDS[torch.float32]


def test_a_position_outside_changes_nothing() -> None:
    model = Model("mlp", 2, 1, 4, 16)
    before = model.whole.clone()
    for t in (-1, 4, 1 << 30):
        model.step(t)
        assert torch.equal(model.whole, before)


def test_without_noise_there_is_no_next_input() -> None:
    model = Model("gate", 2, 1, 4, 16)
    truth = model.truth(1, noise=False)
    token_step(model.a, model.taps, model.matrices, model.position.fill_(1))
    assert error(model.a, truth) < BOUNDS[torch.float32]


def test_arguments_that_do_not_fit_are_named() -> None:
    def fails(match: str, **changed: Any) -> None:
        model = Model("mlp", 2, 2, 4, 16)
        given = {
            "a": model.a, "taps": model.taps, "matrices": model.matrices, "position": model.position,
        } | changed  # fmt: skip
        with pytest.raises(ValueError, match=match) as caught:
            token_step(**given)
        assert "\n" not in str(caught.value)

    x = torch.zeros(2, 16, 16)
    fails("^a has", a=torch.zeros(3, 2, 4))
    fails("^a has", a=torch.zeros(3, 2, 16, 4).transpose(2, 3))
    fails("^a has", a=torch.zeros(3, 2, 4, 16, dtype=torch.float64))
    fails("^taps", taps=torch.zeros(2, 3, 3, 16))
    fails("^taps", taps=torch.zeros(2, 1, 0, 16))
    fails("^taps", taps=torch.zeros(2, 1, 1, 16, dtype=torch.float64))
    fails("^matrices", matrices=[x, x])
    fails("^matrices", matrices=[x.transpose(1, 2)])
    fails("^position", position=torch.zeros(1))
    fails("^noise", noise=torch.zeros(5, 2, 16))
    fails("workspace", space=Workspace(torch.zeros(2, 1, 8), torch.zeros(1)))
    with pytest.raises(ValueError, match="rows"):
        TokenConfig(4, 3, 4)
    with pytest.raises(ValueError, match="warps"):
        TokenConfig(4, 2, 3)
    with pytest.raises(ValueError, match="no layout"):
        token_config(batch=0, channels=16)


def test_programs_fit_on_a_gpu() -> None:
    for batch, channels, processors in itertools.product(
        (1, 3, 8), (1, 20, 256, 384, 768, 1024), (1, 16, 132)
    ):
        made = token_config(batch=batch, channels=channels, processors=processors)
        assert made.programs * -(-batch // made.rows) <= processors


# -- programs at the same time ---------------------------------------------------------------------------

PROGRAMS = 3
CONCURRENT_CASES = [("mlp", 1, 20), ("mlp", 2, 20), ("gate", 2, 21)]
POSITIONS = (1, 3, 1, 2)


def meet(program: int, barrier: Any, work: list[tuple[Model, TokenConfig, Workspace]]) -> None:
    """Is one program of launches, in a process of its own."""
    from triton.runtime.interpreter import interpreter_builder as builder  # noqa: PLC0415

    grid, place = builder.set_grid_dim, builder.set_grid_idx
    builder.set_grid_dim = lambda x, y, z: grid(PROGRAMS, y, z)
    builder.set_grid_idx = lambda x, y, z: place(program, y, z)
    for name in ("_mlp_kernel", "_gate_kernel"):
        setattr(module, name, _OneOfThem(getattr(module, name)))
    for model, config, space in work:
        for t in POSITIONS:
            model.step(t, config, space)
            barrier.wait()


class _OneOfThem:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self.kernel[(1, grid[1])]


@thorough
@pytest.mark.skipif(not ONE_BY_ONE, reason="a GPU has programs at the same time itself")
def test_programs_that_run_at_the_same_time_meet() -> None:
    # What a process would import anew takes ten times as long as all else.
    context, work, truths = multiprocessing.get_context("fork"), [], []
    for block, rows, channels in CONCURRENT_CASES:
        model, config = Model(block, 3, 3, 5, channels), TokenConfig(PROGRAMS, rows, 1)
        space = workspace(model.a, model.matrices, config)
        for x in (model.whole, model.a, *space):
            x.share_memory_()
        model.a = model.whole[..., :channels]
        work.append((model, config, space))
        truth = Model(block, 3, 3, 5, channels)
        truth.a = truth.whole.double()[..., :channels]
        for t in POSITIONS:
            truth.a = truth.truth(t)
        truths.append(truth.a)
    barrier = context.Barrier(PROGRAMS)
    processes = [context.Process(target=meet, args=(i, barrier, work)) for i in range(PROGRAMS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * PROGRAMS
    for (model, _, _), truth in zip(work, truths, strict=True):
        assert error(model.a, truth) < BOUNDS[torch.float32]


# -- on a GPU --------------------------------------------------------------------------------------------


class TestGPU:
    pytestmark = gpu

    def test_random_shapes(self) -> None:
        chance = random.Random(1)
        done = 0
        for i in range(120):
            block = chance.choice(BLOCKS)
            channels = chance.choice([chance.randint(1, 300), 256, 768])
            batch, layers, room = chance.randint(1, 8), chance.randint(1, 6), chance.randint(2, 40)
            dtype, a_dtype = chance.choice(DTYPES), chance.choice([torch.float32, *DTYPES])
            model = Model(block, layers, batch, room, channels, dtype, a_dtype, seed=i)
            config = None
            if channels <= 300 and chance.random() < 0.7:
                rows = chance.choice([1, 2, 4, 8])
                least, most = -(-channels // 16), 132 // -(-batch // rows)
                config = TokenConfig(chance.randint(min(least, most), most), rows, chance.choice([2, 4, 8]))
            space = workspace(model.a, model.matrices, config or config_for(model.a))
            whole = model.whole.clone()
            for t in {chance.randrange(room) for _ in range(4)}:
                model.whole.copy_(whole)
                truth = model.truth(t)
                if float(truth.abs().max()) > torch.finfo(model.a.dtype).max / 2:
                    continue  # gates multiply: more layers than fp16 has numbers for
                model.poison(t)
                model.step(t, config, space)
                checked(model, t, truth, 2.0)
                done += 1
        assert done > 240

    @pytest.mark.parametrize(("layers", "channels"), [(18, 256), (36, 768)])
    @pytest.mark.parametrize("batch", [1, 8])
    def test_a_captured_step_reads_the_position_whenever_it_runs(
        self, layers: int, channels: int, batch: int
    ) -> None:
        model = Model("mlp", layers, batch, 16, channels, torch.bfloat16, torch.float32)
        space = workspace(model.a, model.matrices, config_for(model.a))
        whole = model.whole.clone()
        model.step(0, None, space)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token_step(model.a, model.taps, model.matrices, model.position, noise=model.noise, space=space)
        for t in (3, 0, 15, 7):
            model.whole.copy_(whole)
            truth = model.truth(t)
            model.poison(t)
            model.position.fill_(t)
            graph.replay()
            checked(model, t, truth, 2.0)

    def test_the_same_numbers_every_time(self) -> None:
        model = Model("mlp", 18, 1, 4, 256, torch.bfloat16, torch.float32)
        whole, found = model.whole.clone(), []
        space = workspace(model.a, model.matrices, config_for(model.a))
        for _ in range(200):
            model.whole.copy_(whole)
            model.step(1, None, space)
            found.append(model.a.clone())
        assert all(torch.equal(x, found[0]) for x in found)
