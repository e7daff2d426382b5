"""The table's ops whose kernels are Triton's, against their references in float64: on a GPU where there is
one; else in Triton's interpreter, small, as if a CPU's tensors were taken."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.kernels import kernel as kernel_module
from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.linear_attention import dispatch
from simcore.kernels.linear_attention.api import causal_linear_attention, causal_linear_attention_step, op_of
from simcore.kernels.linear_attention.naive import naive
from simcore.kernels.long_convolution import spectral, triton_direct, triton_fft, triton_rows
from simcore.kernels.table import TABLE
from simcore.models.long_convolution import LongConvolution
from simcore.ops import convolution as conv
from simcore.ops.linear_attention import METHODS, linear_attention, linear_attention_step
from simcore.ops.op import Op
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.lazy import lazy
from simcore.validate.machines.buffers.long_convolution import LongConvolutionState, long_convolution_state
from simcore.validate.machines.cpu.machine import TorchRun
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter does not compute in bf16 as a GPU does.
HALVES = ("bf16", "fp16") if HAS_GPU else ("fp16",)
TRIES = 12 if HAS_GPU else 2

pytestmark = [
    *([pytest.mark.gpu] if HAS_GPU else []),
    pytest.mark.skipif(not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"),
]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU count as those of a GPU, where there is none."""
    if not HAS_GPU:
        for module in (kernel_module, spectral, dispatch):
            monkeypatch.setattr(module, "has_kernel", lambda x: x.dtype != torch.float64)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every call of a kernel."""
    seen: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        return noted

    for module in (triton_rows, triton_direct):
        monkeypatch.setattr(module, "check_operands", noting("row or tile", triton_rows.check_operands))
    monkeypatch.setattr(triton_fft, "_checked", noting("transform", triton_fft._checked))
    for method, function in dispatch.TRITON.items():
        monkeypatch.setitem(dispatch.TRITON, method, noting(method, function))  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "linear_attention_step", noting("step", dispatch.linear_attention_step))
    return seen


def error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    return float((found.double() - truth).norm() / truth.norm())


def inputs_of(op: Op, seed: int = 0) -> tuple[Tensor, ...]:
    return TABLE[op.kind].inputs(op, torch.Generator(DEVICE).manual_seed(seed), DEVICE)


# -- long convolutions -----------------------------------------------------------------------------------


def lanes(draw: random.Random) -> dict[str, int]:
    most = (20, 5, 800) if HAS_GPU else (2, 3, 40)
    return dict(zip(("layers", "batch", "channels"), (draw.randint(1, n) for n in most), strict=True))


def conv_ops(draw: random.Random, dtype: str, longest: int = 14 if HAS_GPU else 5) -> Iterator[Op]:
    """One of each kind; the transform's side is at most 2^longest."""
    of, many = lanes(draw), 3000 if HAS_GPU else 60
    yield conv.conv_cell(batch=of["batch"], channels=of["channels"], dtype=dtype)
    yield conv.conv_row(inputs=draw.randint(1, many), dtype=dtype, **of)
    yield conv.conv_column(outputs=draw.randint(1, many), dtype=dtype, **of)
    side = draw.randint(1, 200 if HAS_GPU else 20)
    yield conv.tile("flash_conv", side=side, outputs=draw.randint(1, side), dtype=dtype, **of)
    side = 1 << draw.randint(4, longest)
    of["layers"] = 1 + of["layers"] % 3
    yield conv.tile("flash_fft", side=side, outputs=draw.randint(1, side), dtype=dtype, **of)


@slow
@pytest.mark.parametrize("dtype", first(1, ["fp16", "fp32"]))
@pytest.mark.parametrize("number", first(3 if HAS_GPU else 1, range(TRIES)))
def test_convolutions(number: int, dtype: str, launches: list[str]) -> None:
    for op in conv_ops(random.Random(number), dtype):
        launches.clear()
        *read, z = inputs_of(op, number)
        truth = TABLE[op.kind].reference(op, *(x.double() for x in read), z.double())
        found = TABLE[op.kind].run(op, *read, z)
        assert launches, op
        assert found.data_ptr() == z.data_ptr()
        assert error(found, truth) <= BOUNDS[z.dtype], op


@pytest.mark.parametrize("side", [1, 8, 24, 15, 32768])
def test_a_side_that_transforms_do_not_have_takes_torchs_way(side: int, launches: list[str]) -> None:
    op = conv.tile("flash_fft", layers=1, batch=2, channels=3, side=side, outputs=side, dtype="fp32")
    y, cached, z = inputs_of(op)
    assert cached.is_complex()
    bins = cached.to(torch.complex128)
    truth = spectral.tile_fft(op, y.double(), bins, z.double())
    assert error(TABLE[op.kind].run(op, y, cached, z), truth) <= BOUNDS[torch.float32]
    assert not launches


def test_double_precision_takes_torchs_way(launches: list[str]) -> None:
    for op in conv_ops(random.Random(0), "fp64", 5):
        x = inputs_of(op)
        truth = TABLE[op.kind].reference(op, *(each.clone() for each in x))
        assert error(TABLE[op.kind].run(op, *x), truth) < 1e-12
    assert not launches


@pytest.mark.parametrize("half", first(1, [False, True]))
@pytest.mark.parametrize("name", first(3, ["lazy", "eager", "flash_fft", "conv", "flash_conv", "fft"]))
@slow
def test_a_model_by_any_tiling(
    name: str, half: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the torch machine, its numbers where the kernels are."""
    if not HAS_GPU:
        # It asks for the stream that it runs on.
        matmul = TABLE["matmul"]
        monkeypatch.setitem(TABLE, "matmul", matmul._replace(run=matmul.reference))  # type: ignore[arg-type]
    schedules = {"lazy": lazy, "eager": eager}
    tokens = 33 if HAS_GPU or name not in schedules else 9
    if half and name in schedules:
        pytest.skip("baselines store everything")
    tiles = () if name in schedules else tuple((1 << power, name) for power in range(6))
    given: dict[str, Any] = {"layers": 2, "channels": 16, "batch": 2, "tokens": tokens}
    model = LongConvolution(**given, **({"tiles": tiles} if tiles else {}), block="gate")
    schedule = schedules.get(name, fractal_tiling)
    found = [
        run(long_convolution_state(model, dtype=dtype, half_storage=half, device=device), schedule, half)
        for dtype, device in ((torch.float64, "cpu"), (torch.float32, DEVICE))
    ]
    assert error(found[1].cpu(), found[0]) < 3e-5
    assert ("transform" in launches) == (name == "flash_fft")


def run(state: LongConvolutionState, schedule: Any, half: bool) -> Tensor:
    options = {"half_storage": True} if half else {}
    TorchRun([state]).run(lambda m: schedule(m, state.model, [], **options))
    return torch.stack(state.outputs, 1)


# -- linear attention ------------------------------------------------------------------------------------


def sequences(draw: random.Random, method: str, dtype: str, decay: bool) -> Op:
    most = (3, 9, 700, 160) if HAS_GPU else (1, 2, 40, 20) if method == "fleet" else (2, 3, 70, 40)
    batch, heads, length, width = (draw.randint(1, n) for n in most)
    return linear_attention(
        method, batch=batch, heads=heads, length=length, rank=width, dim=draw.randint(1, most[3]),
        dtype=dtype, decay=decay,
    )  # fmt: skip


TAKEN = [
    (method, dtype)
    for method, dtype in product(dispatch.TRITON, ["fp32", *HALVES])
    if not (method in dispatch.NARROW and dtype == "fp16")
]


@slow
@pytest.mark.parametrize(
    ("method", "dtype"),
    [pytest.param(*one, marks=[thorough] if one == ("fleet", "fp16") else []) for one in TAKEN],
)
def test_methods(method: str, dtype: str, launches: list[str]) -> None:
    draw = random.Random(method)
    for number in range(TRIES):
        op = sequences(draw, method, dtype, decay=bool(number % 2))
        x = [*inputs_of(op, number)]
        decay = x[3] if op["decay"] else None
        # Neither a state nor rows that lie otherwise make a difference.
        x[0] = x[0].mT.contiguous().mT
        state = None
        if number % 3:
            state = torch.randn(op["batch"], op["heads"], op["rank"], op["dim"], device=DEVICE)
        truth = naive(*(each.double() for each in x[:3]), decay, None if state is None else state.double())
        launches.clear()
        found = TABLE[op.kind].run(op, *x[:3], decay, state)
        assert launches == [method]
        assert found[0].dtype == x[0].dtype
        assert error(found[0], truth[0]) <= BOUNDS[x[0].dtype], op
        assert found[1].dtype == torch.float32
        assert error(found[1], truth[1]) <= BOUNDS[x[0].dtype], op


@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_steps(dtype: str, launches: list[str]) -> None:
    draw = random.Random(dtype)
    for number in range(TRIES):
        batch, heads, rank, dim = (
            draw.randint(1, n) for n in ((9, 20, 200, 200) if HAS_GPU else (2, 3, 40, 40))
        )
        decay = bool(number % 2)
        op = linear_attention_step(batch=batch, heads=heads, rank=rank, dim=dim, dtype=dtype, decay=decay)
        q, k, v, state, *gamma = inputs_of(op, number)
        state = state.float()
        after = state.double()
        truth = TABLE[op.kind].reference(op, q.double(), k.double(), v.double(), after, *gamma)[0]
        launches.clear()
        out, last = TABLE[op.kind].run(op, q, k, v, state, *gamma)
        assert launches == ["step"]
        assert last is state
        assert error(out, truth) <= BOUNDS[q.dtype]
        assert error(state, after) <= BOUNDS[torch.float32]


def test_what_no_kernel_takes_is_torchs(launches: list[str]) -> None:
    """Wide heads, and states in half precision."""
    op = linear_attention("lightning", batch=1, heads=1, length=5, rank=300, dim=4, dtype="fp32", decay=False)
    q, k, v = inputs_of(op)
    assert error(TABLE[op.kind].run(op, q, k, v)[0], naive(q.double(), k.double(), v.double())[0]) < 1e-5
    assert op_of("lightning", q, v, decay=False).kind == "linear_attention_lightning_torch"
    step = linear_attention_step(batch=1, heads=2, rank=4, dim=4, dtype="fp16", decay=True)
    x = inputs_of(step)
    assert TABLE[step.kind].run(step, *x)[1].dtype == torch.float16
    assert not launches


@slow
@pytest.mark.parametrize("method", sorted(dispatch.NARROW))
def test_states_beyond_fp16_are_torchs(method: str, launches: list[str]) -> None:
    q, k, v = (torch.full((1, 1, 512, 4), x, dtype=torch.float16, device=DEVICE) for x in (0.01, 16.0, 16.0))
    op = linear_attention(method, batch=1, heads=1, length=512, rank=4, dim=4, dtype="fp16", decay=False)
    truth = naive(q.double(), k.double(), v.double())[0]
    assert float(truth.max()) < 65504
    assert error(TABLE[op.kind].run(op, q, k, v)[0], truth) < BOUNDS[torch.float16]
    assert not launches


@pytest.mark.parametrize("method", dispatch.TRITON)
def test_gradients_are_torchs(method: str, launches: list[str]) -> None:
    op = linear_attention(method, batch=1, heads=1, length=5, rank=4, dim=4, dtype="fp32", decay=False)
    q, k, v = inputs_of(op)
    assert TABLE[op.kind].run(op, q, k.requires_grad_(), v)[0].requires_grad
    with torch.no_grad():
        TABLE[op.kind].run(op, q, k, v)
    assert launches == [method]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[thorough] if name == "fleet" else []) for name in METHODS]
)
def test_the_call_by_any_method(method: str, launches: list[str]) -> None:
    """What users call, a part of a sequence, the rest, and one token more."""
    op = linear_attention(method, batch=1, heads=2, length=40, rank=16, dim=12, dtype="fp32", decay=True)
    q, k, v, decay = inputs_of(op)
    truth, _ = naive(*(x.double() for x in (q, k, v)), decay)

    def part(first: int, last: int) -> list[Tensor]:
        return [x[:, :, first:last] for x in (q, k, v)]

    out, state = causal_linear_attention(*part(0, 20), decay, method)
    rest, state = causal_linear_attention(*part(20, 39), decay, method, state)
    assert (method in launches) == (method in dispatch.TRITON)
    one = causal_linear_attention_step(*part(39, 40), state, decay)
    assert launches[-1] == "step"
    assert error(torch.cat((out, rest, one), 2), truth) <= BOUNDS[torch.float32]


# -- on a GPU alone --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_methods_can_be_captured(method: str) -> None:
    """What is priced as one launch, or measured in a graph, copies nothing from the host."""
    op = linear_attention(method, batch=1, heads=4, length=300, rank=64, dim=64, dtype="bf16", decay=True)
    x = inputs_of(op)
    once = TABLE[op.kind].run(op, *x)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = TABLE[op.kind].run(op, *x)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert error(found, once.double()) < 1e-6
