"""The kernels of a decoder's step but for attention, against float64: in Triton's interpreter where there is
no GPU, small; else compiled, at the sizes of an 8B model, in captured graphs.

Every output is poisoned before, so that what a kernel leaves out shows.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation, reference_activation
from simcore.kernels.decoder.cache import kv_append, move, reference_kv_append
from simcore.kernels.decoder.choice import choose, reference_choose
from simcore.kernels.decoder.decode_attention import split_config_for
from simcore.kernels.decoder.layer import (
    FEW_ROWS,
    Attend,
    Buffers,
    LayerCache,
    LayerWeights,
    advance,
    attend,
    capture,
    layer_buffers,
    layer_step,
    reference_layer_step,
    speculate,
    step,
)
from simcore.kernels.decoder.matmul import (
    MOST_ROWS,
    MatmulConfig,
    Scales,
    config_for,
    matmul,
    matmul_config,
    product,
    product_of_blocks,
    reference_matmul,
    workspace,
)
from simcore.kernels.decoder.norm import norm, reference_norm
from simcore.kernels.decoder.quantize import quantize, reference_quantize
from simcore.kernels.decoder.residual import residual
from simcore.kernels.decoder.rotary import (
    angles,
    reference_rotary,
    reference_rotary_append,
    rotary,
    rotary_append,
)
from simcore.kernels.decoder.speculative_attention import speculation
from simcore.kernels.decoder.split_kv import ONE_BY_ONE, Cache
from simcore.kernels.decoder.token import note, reference_note
from simcore.kernels.table import TABLE
from simcore.ops import op as ops
from tests.thorough import slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FP8 = torch.float8_e4m3fn
# What a kernel may be off, of the norm of the truth.
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
# The interpreter does not compute in bf16 as a GPU does.
DTYPES = list(BOUNDS) if HAS_GPU else [torch.float32, torch.float16]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def drawn(dtype: torch.dtype, *size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator) * scale).to(DEVICE, dtype)


def poisoned(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.full(size, math.nan, dtype=dtype, device=DEVICE)


def flag(value: int) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=DEVICE)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(x: Tensor, truth: Tensor) -> float:
    assert x.shape == truth.shape
    assert truth.dtype == torch.float64
    return float((x.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def near(x: Tensor, truth: Tensor, times: float = 1.0) -> None:
    assert error(x, truth) < BOUNDS[x.dtype] * times


def skipped_then_run(launch: Callable[[Tensor], Any], outputs: list[Tensor]) -> None:
    """Launches with a gate of 0, which leaves the outputs as they are, then with one of 2."""
    before = [x.clone() for x in outputs]
    launch(flag(0))
    for x, y in zip(outputs, before, strict=True):
        assert torch.equal(bits(x), bits(y))
    launch(flag(2))


def bits(x: Tensor) -> Tensor:
    """What is stored, so that NaN is like itself."""
    return x.contiguous().view(torch.uint8)


def padded_rows(x: Tensor, more: int = 3) -> Tensor:
    """The same rows, further apart."""
    wide = poisoned(x.dtype, x.shape[0], x.shape[1] + more)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


# -- element by element and row by row -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (3, 7), (2, 128), (2, 1000)])
def test_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, gain = drawn(dtype, tokens, hidden), drawn(dtype, hidden, seed=1)
    out = poisoned(dtype, tokens, hidden)
    norm(padded_rows(x), gain, out=out)
    near(out, reference_norm(x.double(), gain.double()))
    gains = drawn(dtype, tokens, hidden, seed=2)
    near(norm(x, gains, eps=0.1), reference_norm(x.double(), gains.double(), eps=0.1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, y, gain = drawn(dtype, 3, 50), drawn(dtype, 3, 50, seed=1), drawn(dtype, 50, seed=2)
    out, total = poisoned(dtype, 3, 50), x.double() + y.double()
    skipped_then_run(lambda gate: norm(x, gain, residual=y, gate=gate, out=out), [x, out])
    near(x, total)
    near(out, reference_norm(x.double(), gain.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(dtype: torch.dtype) -> None:
    y, x = drawn(dtype, 3, 1030), padded_rows(drawn(dtype, 3, 1030, seed=1))
    total = x.double() + y.double()
    skipped_then_run(lambda gate: residual(y, x, gate=gate), [x])
    near(x, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    both = drawn(dtype, 3, 2060, scale=4.0)
    gate, up = both.chunk(2, 1)
    out = poisoned(dtype, 3, 1030)
    skipped_then_run(lambda flag: activation(gate, up, gate=flag, out=out), [out])
    near(out, reference_activation(gate.double(), up.double()))
    near(activation(gate), reference_activation(gate.double()))
    extreme = torch.tensor([[-200.0, 200.0, 0.0]], device=DEVICE, dtype=dtype)
    assert activation(extreme, torch.ones_like(extreme)).tolist() == [[0.0, 200.0, 0.0]]


# -- products --------------------------------------------------------------------------------------------

SMALL = MatmulConfig(rows=16, columns=32, depth=16, splits=3, stages=2, warps=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (1, 32, 48, 1),
        (1, 33, 47, 3),
        (16, 8, 16, 1),
        pytest.param(5, 70, 100, 2, marks=thorough),
        pytest.param(33, 40, 50, 4, marks=thorough),
    ],
)
def test_matmul(m: int, n: int, k: int, splits: int, transposed: bool, dtype: torch.dtype) -> None:
    x, weight = drawn(dtype, m, k), drawn(dtype, k, n, seed=1, scale=k**-0.5)
    if transposed:
        weight = weight.t().contiguous().t()
    config = replace(SMALL, rows=16 if m <= 16 else 64, splits=splits)
    space = workspace([(m, n, config)], DEVICE)
    space.partials.fill_(math.nan)
    out, add = poisoned(dtype, m, n), drawn(dtype, m, n, seed=2)
    launch = partial(matmul, x, weight, out=out, space=space, config=config)
    skipped_then_run(lambda gate: launch(gate=gate), [out, *space])
    near(out, reference_matmul(x.double(), weight.double()))
    assert not space.counters.any()
    out.copy_(add)
    launch(add=out)
    near(out, reference_matmul(x.double(), weight.double(), add=add.double()))
    assert not space.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "width", "k", "splits"),
    [(1, 16, 48, 1), (3, 33, 47, 3), (2, 5, 16, 1), pytest.param(33, 40, 50, 4, marks=thorough)],
)
def test_products_that_are_activated(
    m: int, width: int, k: int, splits: int, transposed: bool, dtype: torch.dtype
) -> None:
    x, weight = drawn(dtype, m, k), drawn(dtype, k, 2 * width, seed=1, scale=3.0 * k**-0.5)
    if transposed:
        weight = weight.t().contiguous().t()
    config = replace(SMALL, rows=16 if m <= 16 else 64, splits=splits)
    space = workspace([(m, 2 * width, config)], DEVICE)
    space.partials.fill_(math.nan)
    out, add = padded_rows(poisoned(dtype, m, width)), drawn(dtype, m, width, seed=2)
    launch = partial(matmul, padded_rows(x), weight, activated=True, space=space, config=config)
    skipped_then_run(lambda gate: launch(gate=gate, out=out), [out, *space])
    near(out, reference_matmul(x.double(), weight.double(), activated=True), 2)
    near(launch(add=add), reference_matmul(x.double(), weight.double(), activated=True, add=add.double()), 2)
    assert not space.counters.any()


def test_matmul_takes_rows_of_a_larger_tensor_and_the_dtype_of_the_weights() -> None:
    x, weight = drawn(torch.float32, 2, 20), drawn(torch.float16, 20, 24, seed=1)
    out = matmul(padded_rows(x), weight, out=padded_rows(poisoned(torch.float16, 2, 24)))
    near(out, x.half().double() @ weight.double())
    column = drawn(torch.float16, 20, 1, seed=2)
    near(matmul(x.half(), column), x.half().double() @ column.double())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (3, 256, 384), (40, 128, 2560)])
def test_products_of_fp8_whose_scales_are_of_blocks(m: int, n: int, k: int) -> None:
    op = ops.matmul("product", m=m, n=n, k=k, dtype="fp8_b128")
    x, weight, *scales = TABLE["matmul"].inputs(op, torch.Generator(DEVICE).manual_seed(m), DEVICE)
    given = Scales(*scales)
    truth = TABLE["matmul"].reference(op, *(each.double() for each in (x, weight, *scales)))
    by_hand = (x.double() * given.x.double().repeat_interleave(128, 1)) @ (
        weight.double() * given.weight.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    )
    assert torch.equal(truth, by_hand)
    config = config_for(m, weight, scaled=True)
    space = workspace([(m, n, config)], DEVICE)
    space.partials.fill_(math.nan)
    out = poisoned(torch.bfloat16, m, n)
    skipped_then_run(
        lambda gate: matmul(x, weight, scales=given, gate=gate, out=out, space=space), [out, *space]
    )
    near(out, truth, 2)
    near(product_of_blocks(x, weight, given), truth, 2)
    assert not space.counters.any()


def test_scales_that_do_not_fit_are_refused() -> None:
    op = ops.matmul("product", m=2, n=256, k=384, dtype="fp8_b128")
    x, weight, of_x, of_weight = TABLE["matmul"].inputs(op, torch.Generator(DEVICE).manual_seed(2), DEVICE)
    for wrong, said in (
        ((x, weight, of_x[:, :2], of_weight), r"scales of x have to be fp32 \[2, 3\]"),
        ((x, weight, of_x, of_weight[:, :1]), r"scales of weight have to be fp32 \[3, 2\]"),
        ((x[:, :380], weight[:380], of_x, of_weight), "no whole blocks of 128 in fp8"),
        ((x.float(), weight, of_x, of_weight), "no whole blocks of 128 in fp8"),
    ):
        for rows in (1, 40):
            many = wrong[0].expand(2, -1).repeat(rows, 1), wrong[1], wrong[2].repeat(rows, 1), wrong[3]
            with pytest.raises(ValueError, match=said.replace("2, 3", f"{2 * rows}, 3")):
                product_of_blocks(*many[:2], Scales(*many[2:]))
    with pytest.raises(ValueError, match="blocks of 128 x 64 are not those of the scales"):
        matmul(x, weight, scales=Scales(of_x, of_weight), config=MatmulConfig(64, 64, 128, 1, 2, 4))
    with pytest.raises(ValueError, match="weight has to be column-major"):
        product_of_blocks(x, weight.contiguous(), Scales(of_x, of_weight))
    with pytest.raises(ValueError, match="rows of x have to be contiguous"):
        product_of_blocks(x.t().contiguous().t(), weight, Scales(of_x, of_weight))
    with pytest.raises(ValueError, match="nothing is added to a product with scales"):
        matmul(x, weight, scales=Scales(of_x, of_weight), activated=True)
    wrong_op = ops.matmul("product", m=2, n=200, k=384, dtype="fp8_b128")
    with pytest.raises(ValueError, match="are no whole blocks of 128"):
        TABLE["matmul"].inputs(wrong_op, torch.Generator(DEVICE), DEVICE)


@slow
def test_matmul_sums_in_the_same_order_always() -> None:
    x, weight = drawn(torch.float32, 3, 200), drawn(torch.float32, 200, 40, seed=1)
    config = replace(SMALL, splits=5)
    first = matmul(x, weight, config=config)
    assert all(torch.equal(matmul(x, weight, config=config), first) for _ in range(3))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = drawn(torch.float32, 2, 20), drawn(torch.float32, 20, 40)
    with pytest.raises(ValueError, match="do not fit"):
        matmul(x, weight.t())
    with pytest.raises(ValueError, match="no gate and as many"):
        matmul(x, weight[:, :39], activated=True)
    with pytest.raises(ValueError, match="add has to be"):
        matmul(x, weight, activated=True, add=torch.zeros(2, 40, device=DEVICE))
    with pytest.raises(ValueError, match="add has to be"):
        product(x, weight, add=torch.zeros(2, 40, device=DEVICE, dtype=torch.float64))
    with pytest.raises(ValueError, match="out has to be"):
        product(drawn(torch.float32, 65, 20), weight, out=torch.zeros(3, 40, device=DEVICE))
    with pytest.raises(ValueError, match="65 rows"):
        matmul(drawn(torch.float32, 65, 20), weight)
    with pytest.raises(ValueError, match="add has to be"):
        matmul(x, weight, add=x)
    with pytest.raises(ValueError, match="too small"):
        matmul(x, weight, config=replace(SMALL, splits=2), space=workspace([], DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        norm(weight.t(), weight[:, 0])
    with pytest.raises(ValueError, match="contiguous"):
        residual(x, x[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        activation(x[:, ::2])
    cache, turn = drawn(torch.float32, 2, 2, 3, 8), torch.ones(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="is not 4"):
        rotary_append(x, turn, turn, ints(1, 1), cache, cache, q_heads=4)


def test_chained_layouts_have_one_program_a_multiprocessor_where_these_fill_their_waves() -> None:
    """Of the 8B shape's o and down, and of gate and up in two waves; not of q, k and v, nor of one program
    more than a wave has places."""
    found = {}
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (133 * 128, 4096)):
        for chained in (False, True):
            c = matmul_config(1, n, k, 2, chained=chained)
            found[n, k, chained] = (c.splits, c.stages)
    assert found == {
        (6144, 4096, False): (5, 6), (6144, 4096, True): (5, 6),
        (4096, 4096, False): (8, 6), (4096, 4096, True): (4, 8),
        (28672, 4096, False): (1, 6), (28672, 4096, True): (1, 8),
        (4096, 14336, False): (8, 6), (4096, 14336, True): (4, 8),
        (17024, 4096, False): (1, 6), (17024, 4096, True): (1, 6),
    }  # fmt: skip


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("bytes_", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m", [1, 8, 17, 32, 64])
def test_layouts_fit_the_gpu(m: int, transposed: bool, bytes_: int, chained: bool) -> None:
    for n, k in [
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (128_256, 4096),
        (1, 1),
        (100, 5000),
    ]:
        c = matmul_config(m, n, k, bytes_, transposed=transposed, chained=chained)
        assert c.rows >= m
        programs = -(-n // c.columns) * c.splits
        held = c.stages * (16 * 1024 + c.rows * c.depth * bytes_)
        each = 1 if c.rows == 64 or (chained and 2 * held > 227 * 1024) else 2
        assert c.splits == 1 or programs <= 132 * each
        shared = (c.stages - 1) * (c.columns + c.rows) * c.depth * bytes_
        assert shared * each <= 227 * 1024
        # Bytes on their way to a multiprocessor, and no program without anything to do.
        assert (c.stages - 1) * c.columns * c.depth * bytes_ * each >= 64 * 1024
        assert c.splits == 1 or -(-k // c.depth) >= 4 * c.splits
        assert "\n" not in str(c)


# -- rotary embedding and cache --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(4, 2, 8), (7, 7, 5), (1, 1, 1), (3, 1, 2)])
def test_rotary(q_heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    qkv = drawn(dtype, 2, (q_heads + 2 * kv_heads) * d)
    table = angles(torch.tensor([3, 1001], device=DEVICE), d, torch.float64)
    heads = {"q_heads": q_heads, "kv_heads": kv_heads}
    found = rotary(qkv, *(x.float() for x in table), **heads)
    for x, truth in zip(found, reference_rotary(qkv.double(), *table, **heads), strict=True):
        near(x, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(4, 2, 8), (3, 1, 5)])
def test_rotary_at_positions_read_on_the_device(
    q_heads: int, kv_heads: int, d: int, dtype: torch.dtype
) -> None:
    # A length of 0 and one beyond the table take its first and its last row.
    lengths = ints(1, 6, 12, 0, 13)
    qkv = drawn(dtype, 5, (q_heads + 2 * kv_heads) * d)
    table = angles(torch.arange(12, device=DEVICE), d, torch.float64)
    heads = {"q_heads": q_heads, "kv_heads": kv_heads, "lengths": lengths}
    out = poisoned(dtype, 5, q_heads + kv_heads, d)
    found: list[Any] = []
    skipped_then_run(
        lambda gate: found.append(rotary(qkv, *(x.float() for x in table), gate=gate, out=out, **heads)),
        [out],
    )
    truth = reference_rotary(qkv.double(), *table, **heads)
    for x, expected in zip(found[-1], truth, strict=True):
        near(x, expected)
    assert torch.equal(out, torch.cat(found[-1][:2], 1))
    row = reference_rotary(
        qkv.double(), *(x[[0, 5, 11, 0, 11]] for x in table), q_heads=q_heads, kv_heads=kv_heads
    )
    assert all(torch.equal(x, y) for x, y in zip(truth, row, strict=True))
    with pytest.raises(ValueError, match="lengths has to be"):
        rotary(qkv, *table, q_heads=q_heads, kv_heads=kv_heads, lengths=lengths[:2])


def caches(
    dtype: torch.dtype, batch: int, kv_heads: int, d: int, page: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v for 12 tokens a sequence, poisoned, with strides of their own; pages in a mixed order."""
    if not page:
        k = poisoned(torch.float32, kv_heads, batch, 12, d).to(dtype).transpose(0, 1)
        return k, poisoned(torch.float32, batch, kv_heads, 13, d).to(dtype)[:, :, 1:], None
    blocks = batch * (12 // page)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    k, v = (poisoned(torch.float32, blocks + 1, page, kv_heads, d).to(dtype) for _ in range(2))
    return k, v, order.view(batch, -1)


@pytest.mark.parametrize("stored", [None, FP8])
@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(4, 2, 8), (3, 1, 5)])
def test_rotary_append(
    q_heads: int, kv_heads: int, d: int, dtype: torch.dtype, page: int, stored: torch.dtype | None
) -> None:
    # No token yet, the first, one in the middle, the last, and one for which there is no room.
    lengths = ints(0, 1, 6, 12, 13)
    qkv = drawn(dtype, 5, (q_heads + 2 * kv_heads) * d)
    table = angles(torch.arange(12, device=DEVICE), d, torch.float64)
    k, v, blocks = caches(stored or dtype, 5, kv_heads, d, page)
    scales: dict[str, Tensor] = {}
    if stored is not None:
        # The second scale is so small that what is stored is held at the largest number of the format.
        scales = {
            name: torch.tensor([0.02, 1e-4][:kv_heads], device=DEVICE) for name in ("k_scale", "v_scale")
        }
    truth_k, truth_v = k.float().clone(), v.float().clone()
    how = {"q_heads": q_heads, "block_table": blocks}
    q = poisoned(dtype, 5, q_heads, d)

    def launch(gate: Tensor) -> None:
        rotary_append(qkv, *(x.float() for x in table), lengths, k, v, gate=gate, out=q, **how, **scales)

    skipped_then_run(launch, [q, k, v])
    kept = {"k_cache": truth_k, "v_cache": truth_v}
    truth = reference_rotary_append(qkv.double(), *table, lengths, **kept, **how)
    near(q, truth)
    for x, expected, scale in ((k, truth_k, "k_scale"), (v, truth_v, "v_scale")):
        assert torch.equal(x.float().isnan(), expected.isnan())
        assert int((~expected.isnan()).sum()) == 3 * kv_heads * d
        if stored is None:
            near(x.nan_to_num(), expected.nan_to_num().double())
            continue
        by_head = scales[scale].view(-1, 1) if page else scales[scale].view(-1, 1, 1)
        wanted = (expected / by_head).clamp(-448, 448).nan_to_num()
        # Half a step of a format with three bits behind the point, and what was rounded before.
        off = (x.float().nan_to_num() - wanted).abs()
        assert (off <= wanted.abs() * 2**-4 * 1.01 + 2**-10)[rounds_right(wanted)].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_append_of_several_tokens_of_a_sequence(dtype: torch.dtype) -> None:
    """Three tokens of the second sequence, one of the first, padding, and one behind the table's end."""
    sequences, lengths = ints(1, 1, 1, 0, 0, 1), ints(3, 4, 5, 9, 0, 13)
    qkv = drawn(dtype, 6, 8 * 8)
    table = angles(torch.arange(12, device=DEVICE), 8, torch.float64)
    k, v, blocks = caches(dtype, 2, 2, 8, 4)
    truth_k, truth_v = k.double(), v.double()
    how = {"q_heads": 4, "block_table": blocks, "sequences": sequences}
    q = rotary_append(qkv, *(x.float() for x in table), lengths, k, v, **how)
    near(q, reference_rotary_append(qkv.double(), *table, lengths, truth_k, truth_v, **how))
    for x, expected in ((k, truth_k), (v, truth_v)):
        assert torch.equal(x.isnan(), expected.isnan())
        assert int((~expected.isnan()).sum()) == 4 * 2 * 8
        near(x.nan_to_num(), expected.nan_to_num())
    with pytest.raises(ValueError, match="sequences has to be"):
        rotary_append(qkv, *table, lengths, k, v, **how | {"sequences": sequences[:5]})
    with pytest.raises(ValueError, match="come with one"):
        rotary_append(qkv, *table, lengths, k, v, **how | {"block_table": None, "q_heads": 0})


def rounds_right(x: Tensor) -> Tensor:
    """Which numbers become fp8 as they should: Triton's interpreter loses a carry into the exponent, and the
    last bit of numbers below the smallest normal one."""
    if HAS_GPU:
        return torch.ones_like(x, dtype=torch.bool)
    return (x.frexp().exponent == x.to(FP8).float().frexp().exponent) & ((x.abs() >= 2**-6) | (x == 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_append_is_the_reference_in_fp8(dtype: torch.dtype) -> None:
    """Where nothing is turned, so that both round the same numbers."""
    qkv, lengths = drawn(dtype, 2, 4 * 16, scale=3.0), ints(1, 1)
    table = torch.ones(1, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    scale = torch.tensor([0.0123], device=DEVICE)
    stored = []
    for append in (rotary_append, reference_rotary_append):
        k, v = (torch.zeros(2, 1, 1, 16, dtype=FP8, device=DEVICE) for _ in range(2))
        append(qkv, *table, lengths, k, v, q_heads=2, k_scale=scale, v_scale=scale)
        stored.append(torch.cat((k.float(), v.float()), 1).flatten(1))
    right = rounds_right((qkv[:, 32:].float() / scale).clamp(-448, 448))
    assert right.sum() > 50
    assert torch.equal(*(x[right] for x in stored))


@pytest.mark.parametrize("width", [1, 33, 2048, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_is_the_reference(dtype: torch.dtype, width: int) -> None:
    """Numbers beyond the largest of fp8 become it, and rows may lie apart."""
    x = drawn(dtype, 3, width + 5, scale=300.0)[:, :width]
    scale = torch.tensor([0.71], device=DEVICE)
    found, expected = (each(x, scale).float() for each in (quantize, reference_quantize))
    right = rounds_right((x.float() * scale).clamp(-448, 448))
    assert torch.equal(found[right], expected[right])
    assert float(found.abs().max()) <= 448
    if width > 1000:
        assert right.float().mean() > 0.9
        assert float(found.max()) == 448


def test_quantize_takes_rows_whose_elements_are_contiguous() -> None:
    x, scale = torch.ones(1, 2, device=DEVICE), torch.ones(1, device=DEVICE)
    for bad in (x.t(), x[0]):
        with pytest.raises(ValueError, match="contiguous"):
            quantize(bad, scale)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter makes a number of NaN in fp8")
def test_quantize_passes_on_what_is_no_number() -> None:
    x, scale = torch.tensor([[1.0, math.nan]], device=DEVICE), torch.ones(1, device=DEVICE)
    assert quantize(x, scale).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_append(dtype: torch.dtype) -> None:
    qkv = drawn(dtype, 3, 5, 6)
    cache = poisoned(dtype, 2, 3, 2, 7, 6)
    k_to, v_to = cache[0, :, :, 4], cache[1, :, :, 4]
    skipped_then_run(lambda gate: kv_append(qkv[:, 1:3], qkv[:, 3:], k_to, v_to, gate=gate), [cache])
    assert torch.equal(k_to, qkv[:, 1:3])
    assert torch.equal(v_to, qkv[:, 3:])
    assert int(cache.isnan().sum()) == cache.numel() - 2 * k_to.numel()


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.int64])
def test_move(to: torch.dtype) -> None:
    x = drawn(torch.float32, 3, 1030, scale=9.0).to(to if to == torch.int64 else torch.float32)
    target = torch.full((3, 1030), 77, dtype=to, device=DEVICE)
    skipped_then_run(
        lambda gate: move(x if to == torch.int64 else padded_rows(x), target, gate=gate), [target]
    )
    assert torch.equal(target, x.to(to))
    with pytest.raises(ValueError, match="rows of contiguous elements"):
        move(x.T, target.T)


def test_ids_are_noted_by_token() -> None:
    ids, lengths = torch.tensor([5, 6, 7, 8], device=DEVICE), ints(11, 12, 10, 15)
    chosen = torch.full((3, 4), -1, dtype=torch.int64, device=DEVICE)
    truth = chosen.clone()
    skipped_then_run(lambda gate: note(ids, lengths, 11, chosen, gate=gate), [chosen])
    reference_note(ids, lengths, 11, truth)
    assert torch.equal(chosen, truth)
    assert truth.tolist() == [[5, -1, -1, -1], [-1, 6, -1, -1], [-1, -1, -1, -1]]


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "vocab"), [(1, 1), (3, 7), (2, 5001), (1, 20_011), pytest.param(40, 4100, marks=thorough)]
)
def test_the_greedy_token_and_its_row(batch: int, vocab: int, dtype: torch.dtype) -> None:
    """Of equal logits the first, of NaN the first, and whatever a launch finds in its words the next does
    too."""
    for seed in range(3):
        logits = padded_rows(drawn(dtype, batch, vocab, seed=seed, scale=2.0**seed))
        if seed == 1:
            logits = logits.round().clamp(max=0.0).mul(-1.0 if vocab > 5 else 1.0)
        table, ids = drawn(dtype, vocab, 77), torch.full((batch,), -1, dtype=torch.int64, device=DEVICE)
        x = padded_rows(poisoned(dtype, batch, 77))
        for special in (None, -math.inf, math.inf, math.nan):
            if special is not None:
                logits[:, vocab // 2 :: 3] = special
                logits[-1] = special
            expected, rows = reference_choose(logits, table)
            skipped_then_run(
                lambda gate: choose(logits, table=table, x=x, out=ids, gate=gate),  # noqa: B023
                [ids, x],
            )
            assert torch.equal(ids, expected)
            assert torch.equal(x, rows)
            ids.fill_(-1)
            assert torch.equal(choose(logits), expected)


def test_of_zeros_of_either_sign_the_first_is_chosen() -> None:
    assert choose(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=DEVICE)).tolist() == [1, 1]
    assert choose(torch.zeros(0, 5, device=DEVICE)).shape == (0,)


def test_tokens_that_do_not_fit_are_refused() -> None:
    logits, table = drawn(torch.float32, 2, 9), drawn(torch.float32, 9, 4)
    for bad in (
        {"table": table},
        {"table": table[:8], "x": poisoned(torch.float32, 2, 4)},
        {"table": table, "x": poisoned(torch.float32, 3, 4)},
        {"table": table, "x": table[:2]},
        {"out": ints(0, 0)},
        {"gate": torch.zeros(2, dtype=torch.int32, device=DEVICE)},
    ):
        with pytest.raises(ValueError, match=r"have|has to|together"):
            choose(logits, **bad)
    for bad_logits in (logits[0], logits.T, logits[:, :0], logits.double(), ints(1, 2)[None]):
        with pytest.raises(ValueError, match="logits"):
            choose(bad_logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_append_at_positions_read_on_the_device(dtype: torch.dtype) -> None:
    # The first, one in the middle, the last, none, and one for which there is no room.
    lengths = ints(1, 4, 7, 0, 8)
    qkv = drawn(dtype, 5, 5, 6)
    k_to, v_to = poisoned(dtype, 5, 2, 7, 6), poisoned(dtype, 2, 5, 9, 6).transpose(0, 1)[:, :, 1:8]
    truth = [x.clone() for x in (k_to, v_to)]
    skipped_then_run(
        lambda gate: kv_append(qkv[:, 1:3], qkv[:, 3:], k_to, v_to, lengths=lengths, gate=gate), [k_to, v_to]
    )
    reference_kv_append(qkv[:, 1:3], qkv[:, 3:], *truth, lengths=lengths)
    for x, expected in zip((k_to, v_to), truth, strict=True):
        assert torch.equal(bits(x), bits(expected))
        assert int((~expected.isnan()).sum()) == 3 * 2 * 6
    assert torch.equal(k_to[1, :, 3], qkv[1, 1:3])
    with pytest.raises(ValueError, match="kv_append takes heads"):
        kv_append(qkv[:, 1:3], qkv[:, 3:], k_to[:, :, 0], v_to[:, :, 0], lengths=lengths)


# -- a layer ---------------------------------------------------------------------------------------------


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **at: Tensor | None) -> Tensor:
    """A sequence and head after the other."""
    table, out = at.get("block_table"), torch.zeros_like(q)
    group = q.shape[1] // k.shape[1 if table is None else 2]
    for b, length in enumerate(lengths.tolist()):
        keys, values = (
            x[b] if table is None else x[table[b].long()].flatten(0, 1).transpose(0, 1) for x in (k, v)
        )
        for h in range(q.shape[1]):
            scores = keys[h // group, :length] @ q[b, h] / math.sqrt(q.shape[2])
            out[b, h] = scores.softmax(0) @ values[h // group, :length]
    return out


def layer_weights(
    dtype: torch.dtype, hidden: int, heads: tuple[int, int, int], width: int, seed: int
) -> LayerWeights:
    q, kv, d = heads
    sizes = {
        "qkv": (hidden, (q + 2 * kv) * d),
        "o": (q * d, hidden),
        "gate_up": (hidden, 2 * width),
        "down": (width, hidden),
    }
    matrices = {
        name: drawn(dtype, *size, seed=seed + i, scale=size[0] ** -0.5)
        for i, (name, size) in enumerate(sizes.items())
    }
    gains = {
        name: 1 + drawn(dtype, hidden, seed=seed + 7 + i, scale=0.1)
        for i, name in enumerate(("attn_norm", "mlp_norm"))
    }
    return LayerWeights(**matrices, **gains)


def doubled(x: Any) -> Any:
    """Weights or a cache in float64."""
    return type(x)(
        **{f.name: None if getattr(x, f.name) is None else getattr(x, f.name).double() for f in fields(x)}
    )


def small_decoder(
    dtype: torch.dtype, page: int = 0, layers: int = 1, pairs: int = 1
) -> tuple[Buffers, list[tuple[LayerWeights, LayerCache]]]:
    """Pairs of sequences of 5 and 11 tokens, of which caches hold random k and v; the next is in x."""
    heads, made = (4, 2, 16), []
    table = torch.tensor([[2, 0, 3], [5, 1, 4]], dtype=torch.int32, device=DEVICE) if page else None
    for layer in range(layers):
        size = (6, page, 2, 16) if page else (2 * pairs, 2, 12, 16)
        cache = LayerCache(drawn(dtype, *size, seed=90 + layer), drawn(dtype, *size, seed=190 + layer))
        made.append((layer_weights(dtype, 48, heads, 40, 10 * layer), cache))
    b = layer_buffers(*made[0], ints(*[5, 11] * pairs), q_heads=4, block_table=table)
    for x in (b.normed, b.qkv, b.q, b.heads, b.gate_up, b.inner):
        x.fill_(math.nan)
    b.x.copy_(drawn(dtype, 2 * pairs, 48, seed=3))
    return b, made


def truth_of(
    b: Buffers, layers: list[tuple[LayerWeights, LayerCache]], lengths: Tensor
) -> tuple[Tensor, list[LayerCache]]:
    """x after the layers, and their caches, in float64."""
    x, caches = b.x.double(), [doubled(cache) for _, cache in layers]
    for (weights, _), cache in zip(layers, caches, strict=True):
        x = reference_layer_step(
            x, doubled(weights), cache, lengths, q_heads=b.q.shape[1], attention=plain_attention,
            block_table=b.block_table,
        )  # fmt: skip
    return x, caches


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(dtype: torch.dtype, page: int) -> None:
    b, layers = small_decoder(dtype, page)
    ((weights, cache),) = layers
    x, (cached,) = truth_of(b, layers, b.lengths)

    def launch(gate: Tensor) -> None:
        layer_step(b, weights, cache, gate=gate, attend=partial(attend, gate=gate))

    skipped_then_run(launch, [b.x, b.normed, b.qkv, b.q, b.heads, b.inner, cache.k, cache.v])
    near(b.x, x, 3)
    near(cache.k, cached.k)
    near(cache.v, cached.v)


@pytest.mark.parametrize(
    ("with_gate", "dtype"),
    # Of the interpreter's two formats one with a gate and one without.
    [
        pytest.param(with_gate, dtype, marks=thorough if with_gate == (dtype == torch.float16) else ())
        for with_gate in (False, True)
        for dtype in DTYPES
    ],
)
@slow
def test_a_layer_of_more_sequences(dtype: torch.dtype, with_gate: bool) -> None:
    """Without a gate activations are launches of their own there."""
    b, layers = small_decoder(dtype, pairs=17)
    assert len(b.x) > FEW_ROWS
    ((weights, cache),) = layers
    x, (cached,) = truth_of(b, layers, b.lengths)
    if with_gate:
        skipped_then_run(lambda gate: layer_step(b, weights, cache, gate=gate), [b.x, b.normed, b.inner])
    else:
        layer_step(b, weights, cache)
    near(b.x, x, 3)
    near(cache.k, cached.k)
    assert bool(b.inner.isfinite().all())
    assert bool(b.normed.isfinite().all())


def test_attention_has_a_gate_of_its_own() -> None:
    b, ((weights, cache),) = small_decoder(torch.float32)
    b.q.normal_()
    before = b.x.clone()
    layer_step(b, weights, cache, gate=flag(0))
    assert torch.equal(b.x, before)
    near(b.heads, plain_attention(b.q.double(), cache.k.double(), cache.v.double(), b.lengths))


@slow
def test_steps_count_tokens() -> None:
    b, layers = small_decoder(torch.float32, layers=2)
    b.lengths.copy_(ints(4, 10))
    x, _ = truth_of(b, layers, ints(5, 11))
    step(b, layers)
    assert b.lengths.tolist() == [5, 11]
    near(b.x, x, 3)
    advance(b.lengths, gate=flag(0))
    assert b.lengths.tolist() == [5, 11]


@slow
def test_a_layer_that_speculates_goes_on_exactly() -> None:
    b, layers = small_decoder(torch.float32)
    x, _ = truth_of(b, layers, b.lengths)
    layer_step(b, *layers[0], attend=speculating(b, layers[0][1], 2))
    near(b.x, x, 3)


def speculating(b: Buffers, cache: LayerCache, ends: int) -> Attend:
    kv = Cache(cache.k, cache.v, b.block_table, cache.k_scale, cache.v_scale)
    into = speculation(b.q, kv.kv_heads, split_config_for(b.q, kv))
    return partial(speculate, sinks=ends, window=ends, into=into)


# -- on a GPU --------------------------------------------------------------------------------------------


def test_ops_run_the_kernels_on_a_gpu_and_torch_elsewhere() -> None:
    """Whatever the device is: the same numbers, in every format, fp64 as ever."""
    made = [
        ops.matmul("m", m=3, n=40, k=50, dtype="fp32"),
        ops.matmul("m", m=70, n=40, k=50, dtype="fp32"),
        ops.norm("n", tokens=3, hidden=50, dtype="fp32"),
        ops.rotary(tokens=3, q_heads=4, kv_heads=2, head_dim=8, dtype="fp32"),
        ops.activation(tokens=3, width=50, gated=True, dtype="fp32"),
        ops.activation(tokens=3, width=50, gated=False, dtype="fp32"),
        ops.residual("r", tokens=3, hidden=50, dtype="fp32"),
        ops.kv_append(tokens=3, kv_heads=2, head_dim=8, dtype="fp32"),
        ops.embedding(tokens=3, hidden=50, dtype="fp32"),
    ]
    for dtype, bound in (("fp32", 1e-5), ("fp64", 1e-12)):
        for op in (replace(op, dtype=dtype) for op in made):
            kernel = TABLE[op.kind]
            tensors = kernel.inputs(op, torch.Generator(DEVICE).manual_seed(1), DEVICE)
            exact = [x.to(torch.float64, copy=True) if x.is_floating_point() else x for x in tensors]
            truth, out = kernel.reference(op, *exact), kernel.run(op, *tensors)
            # What is given, and what was written into what was given.
            given = zip(out, truth, strict=True) if isinstance(out, tuple) else [(out, truth)]
            pairs = [(x, y) for x, y in (*given, *zip(tensors, exact, strict=True)) if x is not None]
            assert all(error(x, y) < bound for x, y in pairs if x.is_floating_point())


LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128_256, 4096)]


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("m", [1, 8, 32, 64])
    @pytest.mark.parametrize(("n", "k"), LLAMA)
    def test_products_of_an_8b_model(
        self, n: int, k: int, m: int, transposed: bool, dtype: torch.dtype
    ) -> None:
        x, weight = (torch.randn(*size, device=DEVICE).to(dtype) for size in ((m, k), (k, n)))
        if transposed:
            weight = weight.t().contiguous().t()
        config = config_for(m, weight)
        space = workspace([(m, n, config)], DEVICE)
        found = [matmul(x, weight, out=poisoned(dtype, m, n), space=space) for _ in range(20)]
        near(found[0], x.double() @ weight.double())
        assert all(torch.equal(found[0], y) for y in found)
        assert not space.counters.any()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rows_of_an_8b_model(self, dtype: torch.dtype) -> None:
        for tokens, hidden in ((1, 4096), (64, 4096), (3, 16384), (2, 5000)):
            x, y, gain = (drawn(dtype, *size) for size in ((tokens, hidden), (tokens, hidden), (hidden,)))
            near(norm(x, gain), reference_norm(x.double(), gain.double()))
            norm(x, gain, residual=y, out=(out := poisoned(dtype, tokens, hidden)))
            near(out, reference_norm(x.double(), gain.double()))
        gate, up = drawn(dtype, 64, 28672).chunk(2, 1)
        near(activation(gate, up), reference_activation(gate.double(), up.double()))

    @pytest.mark.parametrize("page", [0, 16])
    @pytest.mark.parametrize("kind", ["exact", "speculative"])
    def test_a_captured_step_reads_lengths_and_gate_whenever_it_runs(self, kind: str, page: int) -> None:
        b, layers = llama(page)
        gate = flag(1)
        how = attend if kind == "exact" else speculating(b, layers[0][1], 64)
        graph = capture(lambda: step(b, layers, gate=gate, attend=how), [b.x, b.lengths])
        for lengths, skipped in (([5, 100], False), ([900, 1], False), ([7, 40], True), ([511, 512], False)):
            b.lengths.copy_(ints(*lengths))
            b.x.copy_(drawn(b.x.dtype, *b.x.shape, seed=sum(lengths)))
            before = b.x.clone()
            gate.fill_(0 if skipped else 1)
            x, caches = truth_of(b, layers, ints(*(n + 1 for n in lengths)))
            graph.replay()
            torch.cuda.synchronize()
            if skipped:
                assert torch.equal(b.x, before)
                assert b.lengths.tolist() == lengths
                continue
            assert b.lengths.tolist() == [n + 1 for n in lengths]
            near(b.x, x, 4)
            for (_, cache), truth in zip(layers, caches, strict=True):
                near(cache.k, truth.k, 4)

    @pytest.mark.parametrize("m", [1, 17, 64, 100])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_products_add_before_they_round(self, m: int, dtype: torch.dtype) -> None:
        """By ours and by cuBLAS, also in place; with a gate by ours."""
        for n, k in ((6144, 4096), (1000, 776)):
            x, weight, add = drawn(dtype, m, k), drawn(dtype, k, n, seed=5), drawn(dtype, m, n, seed=9)
            truth = x.double() @ weight.double() + add.double()
            near(product(x, weight, add=add), truth)
            near(product(x, weight, add=add, out=poisoned(dtype, m, n)), truth)
            into = add.clone()
            assert product(x, weight, add=into, out=into) is into
            near(into, truth)
            if m <= MOST_ROWS:
                near(product(x, weight, add=add, gate=flag(1)), truth)

    def test_an_op_in_a_graph_has_a_workspace_of_its_own(self) -> None:
        op = ops.matmul("m", m=1, n=4096, k=4096, dtype="bf16")
        x, weight = TABLE["matmul"].inputs(op, torch.Generator(DEVICE).manual_seed(1), DEVICE)
        held: list[Tensor] = []
        graph = capture(lambda: held.append(TABLE["matmul"].run(op, x, weight)), [])
        for _ in range(3):
            held[-1].fill_(math.nan)
            graph.replay()
            near(held[-1], x.double() @ weight.double())


def llama(page: int) -> tuple[Buffers, list[tuple[LayerWeights, LayerCache]]]:
    """Two layers of an 8B model for two sequences of up to 1024 tokens."""
    dtype, heads = torch.bfloat16, (32, 8, 128)
    made, blocks = [], 2 * 1024 // page if page else 0
    for layer in range(2):
        size = (blocks, page, 8, 128) if page else (2, 8, 1024, 128)
        cache = LayerCache(drawn(dtype, *size, seed=90 + layer), drawn(dtype, *size, seed=190 + layer))
        made.append((layer_weights(dtype, 4096, heads, 14336, 10 * layer), cache))
    table = torch.randperm(blocks, device=DEVICE).to(torch.int32).view(2, -1) if page else None
    b = layer_buffers(*made[0], ints(5, 11), q_heads=32, block_table=table)
    b.x.copy_(drawn(dtype, 2, 4096, seed=3))
    return b, made
