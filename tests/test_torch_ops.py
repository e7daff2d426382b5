"""The attention kernels as operators of torch: what torch checks of an operator, exported and compiled."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import simcore.kernels.torch_ops  # noqa: F401  (registers the operators)
from tests.attention_cases import BARS, FP8, Case, Shape, error, make_case, truth, truth_and_logs
from tests.thorough import first, slow

torch.set_num_threads(1)
OPS = torch.ops.simcore
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ENDS = {"sinks": 3, "window": 8}
SHAPES = {
    "contiguous": (Shape(2, 3, 64), {}),
    "paged": (Shape(2, 3, 64, block=16), {}),
    "windowed": (Shape(1, 4, 80, torch.float16), ENDS),
    "spare": (Shape(2, 2, 64, torch.float16, block=8, spare=True), {"scale": 0.3}),
    "fp8": (Shape(2, 4, 64, torch.float16, FP8, block=16), {}),
    "bf16": (Shape(2, 4, 64, torch.bfloat16), ENDS),
}


def case_of(name: str, device: str, batch: int = 3, queries: int | None = None) -> Case:
    shape, options = SHAPES[name]
    lengths = [0, 40, 21, 7, 1, 33][:batch]
    return make_case(shape, lengths, 7, capacity=48, device=device, queries=queries, **options)


def speculative(case: Case) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of the speculative operator: sizes of the ends and threshold lie on the device."""
    device = case.tensors[0].device
    numbers = [torch.tensor([n], dtype=torch.int32, device=device) for n in ENDS.values()]
    threshold = torch.full((1,), 0.5, device=device)
    named = {name: x for name, x in case.options.items() if name not in ENDS}
    return (*case.tensors, *numbers, threshold), named


@slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", first(1, SHAPES))
def test_torch_finds_nothing_wrong(name: str, device: str) -> None:
    case = case_of(name, device)
    # The others multiply what they are given, which torch does not do in fp8.
    checks = ("test_autograd_registration", "test_faketensor") if name == "fp8" else CHECKS
    torch.library.opcheck(OPS.decode_attention.default, case.tensors, case.options, test_utils=checks)
    torch.library.opcheck(OPS.speculative_attention.default, *speculative(case), test_utils=checks)
    case = case_of(name, device, queries=3)
    torch.library.opcheck(OPS.decode_attention_lse.default, case.tensors, case.options, test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_operators_give_attention(name: str, device: str) -> None:
    case = case_of(name, device)
    bar = 2 * BARS[case.shape.dtype]
    assert error(OPS.decode_attention(*case.tensors, **case.options), truth(case)) < bar
    tensors, named = speculative(case)
    exact, early, hits, norms, priority = OPS.speculative_attention(*tensors, **named)
    whole, ends = (truth(Case(case.shape, case.tensors, named | more)) for more in ({}, ENDS))
    assert error(exact, whole) < bar
    assert error(early, ends) < bar
    off, size = (x.flatten(1).norm(dim=1) for x in (ends - whole, whole))
    torch.testing.assert_close(norms.double().sqrt(), torch.stack((off, size), 1), rtol=bar, atol=bar)
    ratio = torch.where(size > 0, off / size, 0.0)
    assert (ratio / 0.5 - 1).abs().min() > 0.01
    assert hits.tolist() == (ratio < 0.5).int().tolist()
    assert priority.tolist() == [0 if all(hits.tolist()) else 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("queries", [None, 1, 3])
def test_operators_give_logs_of_query_tokens(name: str, device: str, queries: int | None) -> None:
    case = case_of(name, device, queries=queries)
    out, lse = OPS.decode_attention_lse(*case.tensors, **case.options)
    expected, logs = truth_and_logs(case)
    assert error(out, expected) < 2 * BARS[case.shape.dtype]
    # The reference has its scores in the format of q.
    bar = 1e-5 if case.shape.dtype == torch.float32 else 0.02
    torch.testing.assert_close(lse, logs.float(), rtol=bar, atol=bar)
    assert torch.equal(OPS.decode_attention(*case.tensors, **case.options), out)
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in case.options.items()}
        guessed = OPS.decode_attention_lse(*(mode.from_tensor(x) for x in case.tensors), **fake)
    assert [layout(x) for x in guessed] == [layout(x) for x in (out, lse)]


def layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.stride(), x.device.type


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_fake_tensors_tell_what_real_ones_will_be(name: str, device: str) -> None:
    case = case_of(name, device)
    tensors, named = speculative(case)
    plain = OPS.decode_attention(*case.tensors, **case.options)
    real = [plain, *OPS.speculative_attention(*tensors, **named)]
    batch, heads = len(case.lengths), case.shape.q_heads
    assert [tuple(x.shape) for x in real] == [
        *[(batch, heads, case.shape.head_dim)] * 3,
        (batch,),
        (batch, 2),
        (1,),
    ]
    assert [x.dtype for x in real] == [*[case.shape.dtype] * 3, torch.int32, torch.float32, torch.int32]
    with FakeTensorMode() as mode:

        def fake(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, Tensor) else x

        options, named = ({key: fake(x) for key, x in given.items()} for given in (case.options, named))
        given = [fake(x) for x in tensors]
        guessed = [OPS.decode_attention(*given[:4], **options), *OPS.speculative_attention(*given, **named)]
    assert [layout(x) for x in guessed] == [layout(x) for x in real]


class Step(torch.nn.Module):
    """What a decoder does around its attention: a projection before and one after, whatever was right."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        generator, width = torch.Generator().manual_seed(1), shape.q_heads * shape.head_dim
        self.weight = torch.nn.Parameter(
            torch.randn(width, width, generator=generator).mul_(width**-0.5), requires_grad=False
        )

    def forward(self, x: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        q = (x.flatten(1) @ self.weight).view_as(x)
        plain = OPS.decode_attention(q, k, v, lengths, block_table=table, sinks=3, window=8)
        ends = [lengths.new_full((1,), n) for n in ENDS.values()]
        threshold = x.new_full((1,), 0.5)
        exact, early, hits, norms, priority = OPS.speculative_attention(
            q, k, v, lengths, *ends, threshold, block_table=table
        )
        taken = torch.where(hits[:, None, None] == 1, early, exact).flatten(1) @ self.weight
        several, logs = OPS.decode_attention_lse(
            torch.stack((x, q), 1), k, v, lengths, block_table=table, scale=0.3
        )
        return plain + 1.0, taken, norms.sqrt(), priority, several, logs.exp()


def step_and_inputs(device: str, batch: int = 3) -> tuple[Step, tuple[Tensor, ...]]:
    case = case_of("paged", device, batch)
    return Step(case.shape).to(device), (*case.tensors, case.options["block_table"])


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not one.isnan().any()


@slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_exported_with_any_batch(device: str) -> None:
    step, inputs = step_and_inputs(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        step, inputs, dynamic_shapes=({0: batch}, None, None, {0: batch}, {0: batch})
    )
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"simcore.decode_attention.default", "simcore.speculative_attention.default"} <= called
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    same(loaded(*inputs), step(*inputs))
    q, k, v, lengths, table = inputs
    more = q.repeat(2, 1, 1), k, v, lengths.flip(0).repeat(2), table.flip(0).repeat(2, 1)
    same(loaded(*more), step(*more))


@slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_compiled_whole(device: str) -> None:
    torch._dynamo.reset()
    step, inputs = step_and_inputs(device)
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(compiled(*inputs), step(*inputs))
    same(compiled(*(step_and_inputs(device, 6)[1])), step(*step_and_inputs(device, 6)[1]))
    assert math.isfinite(float(compiled(*inputs)[0].sum()))
