"""What a calibration of a CUDA card measures is right, captured or not: against float64, on a GPU."""

import pytest
import torch
from torch import Tensor

from simcore.devices.price import roofline
from simcore.devices.spec import load_device
from simcore.kernels.kernel import in_double
from simcore.kernels.streams import one_stream
from simcore.kernels.table import TABLE
from simcore.ops.op import Op, matmul
from simcore.validate.benchmarks.timing import Card, capture
from simcore.validate.calibration.cuda_grid import drawn
from simcore.validate.timing import cuda_times as card_measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Of the whole tensor; fp8 products come out in bf16, and transforms in fp32 are about 1e-5 off.
BOUNDS = {"fp32": 2e-5, "bf16": 1e-2, "fp8": 1e-2, "fp8_b128": 1e-2}
KINDS = (
    "matmul", "prefill_attention", "decode_attention", "paged_attention", "speculative_attention", "norm",
    "rotary", "activation", "residual", "embedding", "sample", "quantize",
)  # fmt: skip
MOST_BYTES = 2e8


def inputs_of(op: Op, seed: int) -> tuple[Tensor, ...]:
    return TABLE[op.kind].inputs(op, torch.Generator("cuda").manual_seed(seed), torch.device("cuda"))


def tensors(found: object) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found or () if isinstance(x, Tensor)]  # type: ignore[attr-defined]


def assert_right(op: Op, found: object, given: tuple[Tensor, ...]) -> None:
    kernel = TABLE[op.kind]
    # What comes in fp8 is no number that others are taken from.
    truths = [x.double() if x.is_floating_point() else x for x in tensors(kernel.reference(op, *given))]
    for i, (one, whole) in enumerate(zip(tensors(found), truths, strict=True)):
        x, truth = (each.double().sum(-1) if i in kernel.in_parts else each for each in (one, whole))
        assert x.shape == truth.shape, (op.kind, op.shape)
        if truth.is_floating_point():
            error = float((x.double() - truth).norm() / truth.norm())
            assert error <= BOUNDS[op.dtype], (op.kind, op.shape, error)
        else:
            assert bool((x == truth).all()), (op.kind, op.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_ops_are_right(kind: str) -> None:
    for seed, op in enumerate(op for op in drawn([kind], 12, 3) if op.work.hbm_bytes < MOST_BYTES):
        given = inputs_of(op, seed)
        exact = tuple(map(in_double, given))
        found: list[object] = []
        with torch.inference_mode(), one_stream({}):
            # An op that adds in place would add twice more: captured calls run once for the warm-up, and once
            # in a replay.
            fresh = [tuple(x.clone() for x in given) for _ in range(2)]
            TABLE[op.kind].run(op, *fresh[0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found.append(TABLE[op.kind].run(op, *fresh[1]))
            own = {each.untyped_storage().data_ptr() for each in fresh[1]}
            for x in tensors(found[0]):
                # Some ops give views of what they are given.
                if x.untyped_storage().data_ptr() not in own:
                    x.fill_(float("nan") if x.is_floating_point() else -1)
            graph.replay()
            torch.cuda.synchronize()
        assert_right(op, found[0], exact)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_b128"])
@pytest.mark.parametrize("m", [1, 3, 64, 65, 100, 512, 1023])
@pytest.mark.parametrize("k", [128, 768, 4096])
def test_products_of_fp8_matrices(m: int, k: int, dtype: str) -> None:
    op = matmul("matmul", m=m, n=1152, k=k, dtype=dtype)
    given = inputs_of(op, m)
    assert_right(op, TABLE["matmul"].run(op, *given), tuple(map(in_double, given)))


def test_products_of_blocks_take_scales_and_rows_in_any_layout() -> None:
    for m in (3, 100):
        op = matmul("matmul", m=m, n=384, k=640, dtype="fp8_b128")
        x, weight, of_x, of_weight = inputs_of(op, m)
        truth = tuple(map(in_double, (x, weight, of_x, of_weight)))
        others = x.clone(), weight, of_x.contiguous(), of_weight.contiguous()
        assert_right(op, TABLE["matmul"].run(op, *others), truth)


def test_launches_of_one_stream_may_share_what_they_sum_in() -> None:
    """Two products, one after the other in one graph, by one workspace: many times over."""
    op = matmul("matmul", m=4, n=768, k=4096, dtype="bf16")
    sets = [inputs_of(op, seed) for seed in range(2)]
    kept: dict[object, object] = {}
    made: list[Tensor] = []
    with torch.inference_mode(), one_stream(kept):

        def both() -> None:
            made[:] = [TABLE["matmul"].run(op, *one) for one in sets]

        graph = capture([both])
    assert len([key for key in kept if key[-1] == "counters of products"]) == 1  # type: ignore[index]
    truths = [TABLE["matmul"].reference(op, *map(in_double, one)) for one in sets]
    for _ in range(50):
        with torch.inference_mode():
            for x in made:
                x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for x, truth in zip(made, truths, strict=True):
            assert float((x.double() - truth).norm() / truth.norm()) <= BOUNDS["bf16"]


@pytest.mark.usefixtures("whole_card")
def test_a_measured_op_takes_no_less_than_its_bytes() -> None:
    floor = roofline(load_device("h200-sxm"))
    card = Card(60_000_000, 132, 4.4e12, "sum", 1e-6)
    op = matmul("matmul", m=1, n=28672, k=4096, dtype="bf16")
    found = card_measure.measured(TABLE["matmul"], op, floor, card)
    assert 0.0 < found.p10_s <= found.median_s <= found.p90_s
    assert found.cache == "cold"
    assert found.median_s > 0.3 * floor(op).seconds
