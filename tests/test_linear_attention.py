"""Linear attention: every method against the explicit sum, its work and memory against closed forms."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.devices.price import pricer
from simcore.devices.spec import load_device
from simcore.kernels.kernel import dtype_of
from simcore.kernels.linear_attention import LINEAR_ATTENTION
from simcore.kernels.linear_attention.api import (
    benchmark_method,
    causal_linear_attention,
    causal_linear_attention_step,
    chosen_method,
    default_device,
    gpu_device,
)
from simcore.kernels.linear_attention.naive import naive
from simcore.ops.linear_attention import (
    METHODS,
    STATED_MEMORY,
    TORCH_METHODS,
    linear_attention,
    linear_attention_step,
    memory_bytes,
    method_of,
    recursion_levels,
)
from simcore.ops.op import Op, Price
from tests.thorough import first, slow

torch.set_num_threads(1)
# The package's name `recursion` is the function.
recursion_module = import_module("simcore.kernels.linear_attention.recursion")

ALL = (*METHODS, *TORCH_METHODS)
RANK, DIM, HEADS = 5, 7, 3
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 257, 600)
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def an_op(method: str, length: int, *, decay: bool = True, **more: int) -> Op:
    given: dict[str, Any] = {"batch": 1, "heads": HEADS, "rank": RANK, "dim": DIM, **more}
    return linear_attention(method, length=length, dtype="fp32", decay=decay, **given)


def tokens(
    length: int, seed: int, dtype: torch.dtype, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, HEADS, *shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal(length, RANK), normal(length, RANK), normal(length, DIM), normal(RANK, DIM)


def decays(kind: str, seed: int = 0) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    return {
        "none": None,
        "one": torch.ones(HEADS),
        "random": torch.rand(HEADS, generator=generator, dtype=torch.float64).clamp(min=1e-3),
        # gamma^-600 of these is far above the largest double.
        "tiny": torch.tensor([0.01, 1e-20, 1.0]),
    }[kind]


def run(
    method: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = an_op(method, q.shape[-2], decay=decay is not None, batch=q.shape[0])
    output, last = LINEAR_ATTENTION[op.kind].run(op, q, k, v, decay, state)
    return output, last


def error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest truth; NaN where the value has one."""
    assert value.shape == truth.shape
    return float((value.double() - truth).abs().max() / truth.abs().max())


# -- activations ---------------------------------------------------------------------------------


def test_the_specification_itself_by_hand() -> None:
    one = torch.ones(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
    output, last = naive(one, 2 * one, v, torch.tensor([0.5]), torch.tensor(4.0).reshape(1, 1, 1, 1))
    # S: 0.5 * 4 + 2 = 4, 0.5 * 4 + 4 = 6, 0.5 * 6 + 6 = 9.
    assert output.flatten().tolist() == [4.0, 6.0, 9.0]
    assert last.item() == 9.0


@lru_cache
def truth_of(length: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The explicit sum, worked out once for all methods; odd lengths start from a state."""
    q, k, v, state = tokens(length, length, dtype)
    return naive(q, k, v, decays(kind, length), state if length % 2 else None)


@slow
@pytest.mark.parametrize("kind", first(1, ["random", "none", "one", "tiny"]))
@pytest.mark.parametrize("method", ALL)
def test_every_method_equals_the_explicit_sum(method: str, kind: str) -> None:
    lengths = {*LENGTHS, *torch.randint(1, 601, (3,), generator=torch.Generator().manual_seed(7)).tolist()}
    for length in sorted(lengths):
        decay = decays(kind, length)
        for dtype, bound in BOUNDS.items():
            q, k, v, start = tokens(length, length, dtype)
            state = start if length % 2 else None
            output, last = run(method, q, k, v, decay, state)
            truth, last_truth = truth_of(length, kind, dtype)
            assert output.dtype == last.dtype == dtype
            assert error(output, truth) <= bound, length
            assert error(last, last_truth) <= bound, length


@pytest.mark.parametrize("method", ALL)
def test_a_state_carried_over_any_cut_equals_one_call(method: str) -> None:
    generator = torch.Generator().manual_seed(11)
    for kind in ("none", "random", "tiny"):
        length = int(torch.randint(5, 300, (1,), generator=generator))
        q, k, v, state = tokens(length, length, torch.float64)
        decay = decays(kind, length)
        cuts = sorted(torch.randperm(length - 1, generator=generator)[:3].add(1).tolist())
        pieces, carried = [], state
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            rows = slice(start, end)
            output, carried = run(method, q[:, :, rows], k[:, :, rows], v[:, :, rows], decay, carried)
            pieces.append(output)
        whole, last = naive(q, k, v, decay, state)
        assert error(torch.cat(pieces, 2), whole) <= 1e-10
        assert error(carried, last) <= 1e-10


@pytest.mark.parametrize("kind", ["none", "random", "tiny"])
def test_steps_equal_the_whole_and_keep_their_state_in_place(kind: str) -> None:
    q, k, v, start = tokens(40, 3, torch.float64)
    decay, state = decays(kind), start.clone()
    outputs = []
    for i in range(40):
        row = slice(i, i + 1)
        outputs.append(causal_linear_attention_step(q[:, :, row], k[:, :, row], v[:, :, row], state, decay))
    whole, last = naive(q, k, v, decay, start)
    assert error(torch.cat(outputs, 2), whole) <= 1e-10
    assert error(state, last) <= 1e-10


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("method", ALL)
def test_every_output_is_written_and_nothing_beside_the_inputs_is_read(method: str) -> None:
    for length in (1, 33, 71):
        clean = tokens(length, 5, torch.float64)
        # Each input lies, with gaps, inside a larger tensor of NaN, and must be left as it is.
        views = []
        for x in clean:
            around = torch.full(
                (x.shape[0], x.shape[1], x.shape[2] + 3, 2 * x.shape[3]), float("nan"), dtype=x.dtype
            )
            view = around[:, :, 2:-1, ::2]
            view.copy_(x)
            views.append(view)
        decay = decays("random", length)
        output, last = run(method, views[0], views[1], views[2], decay, views[3])
        truth, last_truth = naive(*clean[:3], decay, clean[3])
        assert error(output, truth) <= 1e-10
        assert error(last, last_truth) <= 1e-10
        assert all(torch.equal(view, x) for view, x in zip(views, clean, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_summed_in_float32(method: str, dtype: torch.dtype) -> None:
    q, k, v, _ = tokens(500, 9, dtype)
    output, last = run(method, q, k, v, None, None)
    truth, last_truth = naive(q, k, v)
    assert output.dtype == dtype
    assert error(output, truth) <= torch.finfo(dtype).eps
    assert last.dtype == torch.float32
    assert error(last, last_truth) <= 1e-5


def test_inputs_have_the_shape_of_the_op() -> None:
    place, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    for decay in (False, True):
        for method in ALL:
            op = replace(an_op(method, 11, decay=decay), dtype="fp64")
            q, k, v, *rest = LINEAR_ATTENTION[op.kind].inputs(op, generator, place)
            assert q.shape == k.shape == (1, HEADS, 11, RANK)
            assert v.shape == (1, HEADS, 11, DIM)
            assert q.dtype == k.dtype == v.dtype == dtype_of(op) == torch.float64
            assert len(rest) == decay
            assert all(((x > 0.0) & (x <= 1.0)).all() for x in rest)
        step = linear_attention_step(batch=2, heads=HEADS, rank=RANK, dim=DIM, dtype="fp32", decay=decay)
        tensors = LINEAR_ATTENTION[step.kind].inputs(step, generator, place)
        before = [x.clone() for x in tensors]
        output, _ = LINEAR_ATTENTION[step.kind].run(step, *tensors)
        q, k, v, state, *rest = before
        assert error(output, naive(q, k, v, rest[0] if rest else None, state)[0]) <= 1e-5
    with pytest.raises(ValueError, match="fp64, fp32, bf16, fp16"):
        dtype_of(replace(op, dtype="int4"))


# -- work ----------------------------------------------------------------------------------------

G, R, D = 6, 128, 96  # batch * heads, rank, dim
BYTES = 4.0  # fp32


def wide(method: str, length: int, *, decay: bool = False, **more: int) -> Op:
    return an_op(method, length, decay=decay, **{"batch": 2, "rank": R, "dim": D, **more})


@pytest.mark.parametrize("decay", [False, True])
def test_vanilla_is_quadratic(decay: bool) -> None:
    for n in (1, 33, 1024):
        # Scores, their product with the mask, output; the mask of each head is an exponent and a power.
        mask = 2 * HEADS * n * n if decay else 0
        assert wide("vanilla", n, decay=decay).work.flops == G * n * n * (2 * R + 1 + 2 * D) + mask
        matrices = (HEADS if decay else 1) * n * n
        moved = 4 * G * n * n + 2 * matrices + G * n * (2 * R + 2 * D)
        assert wide("vanilla", n, decay=decay).work.hbm_bytes == BYTES * moved
    assert wide("vanilla", 8192, decay=decay).work.flops == 4 * wide("vanilla", 4096, decay=decay).work.flops


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("method", [m for m in ALL if m not in ("vanilla", "recursion")])
def test_the_others_are_linear_in_whole_blocks(method: str, decay: bool) -> None:
    def flops(length: int) -> float:
        op = wide(method, length, decay=decay)
        # The mask of a block is made once, whatever the length.
        once = op.parts[0].work.flops if op.parts[0].name == "mask" else 0.0
        return op.work.flops - once

    for factor in (2, 3, 16):
        assert flops(256 * factor) == factor * flops(256)


@pytest.mark.parametrize("decay", [False, True])
def test_row_by_row_and_column_by_column_do_the_same_flops(decay: bool) -> None:
    n = 77
    for method in ("causal_dot_product", "causal_dot_product_torch", "fleet", "fleet_torch"):
        assert wide(method, n, decay=decay).work.flops == G * n * R * D * (4 + decay)
    state = 2 * G * R * D
    one_kernel = wide("causal_dot_product", n, decay=decay)
    assert one_kernel.work.hbm_bytes == BYTES * (G * n * (2 * R + 2 * D) + state)
    # A block of 32 of the 96 columns reads q and k again.
    assert wide("fleet", n, decay=decay).work.hbm_bytes == BYTES * (G * n * (3 * 2 * R + 2 * D) + state)
    step = linear_attention_step(batch=2, heads=HEADS, rank=R, dim=D, dtype="fp32", decay=decay)
    assert step.work == wide("causal_dot_product", 1, decay=decay).work


@pytest.mark.parametrize("decay", [False, True])
def test_blocks_and_a_shorter_last_one(decay: bool) -> None:
    def block(m: int) -> int:
        inside = m * m * (2 * R + 1 + 2 * D)
        weights = 2 * m * R + R * D if decay else 0
        return G * (inside + 4 * m * R * D + weights)

    def mask(m: int) -> int:
        return 2 * HEADS * m * m if decay else 0

    for method, size in (("block_based", 32), ("lightning", 64), ("lightning_torch", 256)):
        for whole, rest in ((0, 5), (3, 0), (7, 9)):
            op = wide(method, whole * size + rest, decay=decay)
            masks = 0 if method == "lightning" else (mask(size) if whole else 0) + mask(rest)
            assert op.work.flops == whole * block(size) + (block(rest) if rest else 0) + masks
    n = 300
    assert wide("lightning", n, decay=decay).work.hbm_bytes == BYTES * G * (n * (2 * R + 2 * D) + 2 * R * D)


def test_recursion_is_n_log_n() -> None:
    """N = 32 * 2^levels: every level adds 2 N r d to the 4 N r d of the base cases, so that doubling N costs
    2 + 2 / (2 + levels) times as much: more than twice, for every N."""
    for levels in range(8):
        n = 32 * 2**levels
        flops = wide("recursion", n).work.flops
        assert flops == G * n * R * D * (4 + 2 * levels)
        assert wide("recursion", 2 * n).work.flops / flops == pytest.approx(2 + 2 / (2 + levels), rel=1e-12)
        base = 32 * (2 * R + 1 + 2 * D) * G + 2 * 32 * HEADS  # a row of a base case with its mask
        assert wide("recursion", n, decay=True).work.flops == n * (base + levels * G * (2 * R * D + R))


def test_halves_of_a_recursion_come_before_what_is_made_of_them() -> None:
    """Depth first would need a stack; level by level, from the lowest up, a launch finds both halves done."""
    sizes = [part["k"] for part in an_op("recursion", 300, decay=False).parts if part.name == "state"]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 3


def test_bytes_of_methods_that_are_many_launches() -> None:
    state, n = R * D, 77
    # A row: k, v, the state read and written; q, the state, the output. A decay: once more in and out.
    row = (R + D + 2 * state) + (R + state + D)
    assert wide("causal_dot_product_torch", n).work.hbm_bytes == BYTES * G * n * row
    with_decay = wide("causal_dot_product_torch", n, decay=True).work.hbm_bytes
    assert with_decay == BYTES * G * n * (row + 2 * state)
    # A column of q and k: v in, summands out; in, sums out; in, the output read and written; b and c.
    assert wide("fleet_torch", n).work.hbm_bytes == BYTES * G * R * (7 * n * D + 2 * n)
    for levels in range(4):
        n = 32 * 2**levels
        # What is carried over is part of the halvings, not of the bases.
        bases = 2**levels * 32 * (2 * R + 2 * D)
        # Halving m rows: k and v of one half; q and the output (in and out) of the other; a state twice.
        halvings = sum(2**i * (n // 2**i * (R + 1.5 * D) + 2 * state) for i in range(levels))
        assert wide("recursion", n).work.hbm_bytes == BYTES * G * (bases + halvings)
    m = 32
    inside = (m * R + m * R + m * m) + (2 * m * m) + (m * m + 2 * m * D)
    between = (m * R + state + 2 * m * D) + (m * R + m * D + 2 * state)
    masks = m * m + 4 * m * m  # made, and read by each of four blocks
    expected = BYTES * (4 * G * (inside + between) + masks)
    assert wide("block_based", 4 * m).work.hbm_bytes == expected


def test_the_reference_halves_as_the_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Counter[int] = Counter()
    fill = recursion_module._fill

    def noted(op: Op, q: Tensor, *rest: Any) -> None:
        sizes[q.shape[-2]] += 1
        fill(op, q, *rest)

    monkeypatch.setattr(recursion_module, "_fill", noted)
    run("recursion", *tokens(301, 1, torch.float32)[:3], decays("random"), None)
    bases, levels = recursion_levels(301, 32)
    assert sizes == sum(levels, bases)


def test_recursion_of_any_length_covers_it() -> None:
    for length in (1, 32, 33, 77, 1000, 100_000):
        bases, levels = recursion_levels(length, 32)
        assert sum(size * times for size, times in bases.items()) == length
        assert max(bases) <= 32
        for level in levels:
            assert min(level) > 32
        # A binary tree: one base case more than there are halvings.
        assert bases.total() == 1 + sum(level.total() for level in levels)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("method", ALL)
def test_work_is_the_sum_of_the_parts(method: str, decay: bool) -> None:
    for length in (1, 77, 600):
        op = an_op(method, length, decay=decay, mask_by_rows=True)
        total = sum((part.work.flops for part in op.parts), 0.0)
        assert op.work.flops == pytest.approx(total, rel=1e-12)
        assert op.work.hbm_bytes == pytest.approx(sum(part.work.hbm_bytes for part in op.parts), rel=1e-12)


def test_launches_of_a_long_sequence_are_few_ops_many_times() -> None:
    def launches(method: str, *, decay: bool, mask_by_rows: bool = False) -> int:
        op = an_op(method, 100_000, decay=decay, mask_by_rows=mask_by_rows)
        assert len({id(part) for part in op.parts}) <= 100
        return len(op.parts)

    for decay in (False, True):
        for method in ("causal_dot_product", "lightning", "fleet"):
            assert launches(method, decay=decay) == 1
        assert launches("vanilla", decay=decay) == 4
        assert launches("causal_dot_product_torch", decay=decay) == (3 if decay else 2) * 100_000
        assert launches("fleet_torch", decay=decay) == 3 * RANK
        # 3125 blocks of 32; 390 of 256 and one of 160, with a mask of its own.
        assert launches("block_based", decay=decay) == 1 + 3125 * (8 if decay else 5)
        assert launches("lightning_torch", decay=decay) == 2 + 391 * (8 if decay else 5)
    # 100 000 = 2^12 * 24.4: 4096 base cases and 4095 halvings.
    assert launches("recursion", decay=False) == 4096 + 2 * 4095
    assert launches("recursion", decay=True) == 4 * 4096 + 4 * 4095
    assert launches("vanilla", decay=True, mask_by_rows=True) == 100_000 + 3
    assert launches("recursion", decay=True, mask_by_rows=True) == 100_000 + 3 * 4096 + 4 * 4095
    assert launches("vanilla", decay=False, mask_by_rows=True) == 4


def test_a_mask_by_rows_is_the_same_work() -> None:
    for method in ("vanilla", "block_based", "recursion", "lightning_torch"):
        at_once, rows = an_op(method, 333), an_op(method, 333, mask_by_rows=True)
        assert rows.work == at_once.work
        assert len(rows.parts) > len(at_once.parts)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "flash"}, "method"),
        ({"length": 0}, "length"),
        ({"rank": -1}, "rank"),
        ({"method": "lightning", "block": 0}, "block"),
        ({"method": "vanilla", "block": 32}, "block"),
    ],
)
def test_ops_that_cannot_be(given: dict[str, object], named: str) -> None:
    sizes = {"method": "fleet", "batch": 1, "heads": 1, "length": 1, "rank": 1, "dim": 1, **given}
    with pytest.raises(ValueError, match=f"^{named} is "):
        linear_attention(**sizes, dtype="fp32", decay=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known: vanilla"):
        method_of(linear_attention_step(batch=1, heads=1, rank=1, dim=1, dtype="fp32", decay=False))


def test_an_op_keeps_its_state_and_makes_its_mask_at_once() -> None:
    """Unless it is told otherwise; recursion ends at 32 rows, as in the paper's section 5.1."""
    for method in ALL:
        plain = an_op(method, 100)
        assert plain == an_op(method, 100, states=True, mask_by_rows=False)
    for method in ("vanilla", "causal_dot_product", "causal_dot_product_torch", "fleet_torch"):
        assert an_op(method, 100)["block"] == 0
    for length, halved in ((32, 0), (33, 1)):
        names = [part.name for part in an_op("recursion", length).parts]
        assert names.count("read_state") == halved


# -- memory --------------------------------------------------------------------------------------


def test_memory_by_the_stated_complexities() -> None:
    for n in (1, 1000):
        tensors = 2 * HEADS * n * (2 * R + 2 * D)
        assert memory_bytes(wide("vanilla", n)) == BYTES * (tensors + 3 * G * n * n)
        assert memory_bytes(wide("causal_dot_product", n)) == BYTES * (tensors + G * R * D)
        assert memory_bytes(wide("fleet", n)) == BYTES * (tensors + G * R * D)
        # A state, and what is added to it.
        assert memory_bytes(wide("causal_dot_product_torch", n)) == BYTES * (tensors + 2 * G * R * D)
        # A state; a column of keys times the values, and its running sum.
        assert memory_bytes(wide("fleet_torch", n)) == BYTES * (tensors + G * (R * D + 2 * n * D))
    block = 2 * R * D + 3 * 32 * 32 + 32 * R
    torchs = wide("lightning_torch", 1000)
    m = torchs["block"]
    block_of = 2 * R * D + 3 * m * m + m * R
    assert memory_bytes(torchs) == BYTES * G * (1000 * (2 * R + 2 * D) + block_of)
    assert memory_bytes(wide("block_based", 1000)) == BYTES * G * (1000 * (2 * R + 2 * D) + block)
    for method in set(STATED_MEMORY) - {"vanilla"}:
        # O(N d + r d): another 1000 tokens cost their inputs and outputs.
        more = memory_bytes(wide(method, 5000)) - memory_bytes(wide(method, 4000))
        assert more == BYTES * G * 1000 * (2 * R + 2 * D)
    for method in ALL:
        assert memory_bytes(wide(method, 64, decay=True)) > BYTES * 64 * G * (2 * R + 2 * D)


@slow
def test_what_an_a6000_ran_and_what_it_did_not() -> None:
    """LeetDecoding, Tables 3 to 6: 32 heads of rank and dim 128 in fp32, 48 GB."""

    def fits(method: str, batch: int, length: int, decay: bool) -> bool:
        op = an_op(method, length, decay=decay, batch=batch, heads=32, rank=128, dim=128)
        return memory_bytes(op) <= load_device("a6000").memory_bytes

    for decay in (False, True):
        assert fits("vanilla", 1, 8192, decay)
        assert not fits("vanilla", 1, 12_800, decay)
        assert fits("vanilla", 16, 2048, decay)
        assert not fits("vanilla", 16, 8192, decay)
        for method in (set(ALL) - {"vanilla", "recursion"}) | set(STATED_MEMORY) - {"vanilla"}:
            assert fits(method, 1, 100_000, decay)
            assert fits(method, 16, 25_600, decay)
            assert not fits(method, 16, 100_000, decay)


# -- the call ------------------------------------------------------------------------------------


def test_a_call_by_any_name_gives_the_same() -> None:
    q, k, v, state = tokens(70, 1, torch.float64)
    decay = decays("random")
    truth, last_truth = naive(q, k, v, decay, state)
    for method in ("auto", *METHODS):
        output, last = causal_linear_attention(q, k, v, decay, method, state)
        assert error(output, truth) <= 1e-10
        assert error(last, last_truth) <= 1e-10


@pytest.mark.parametrize("wanted", METHODS)
def test_auto_takes_the_cheapest(wanted: str) -> None:
    q, k, v, _ = tokens(20, 1, torch.float32)

    def price(op: Op) -> Price:
        seconds = 1.0 if method_of(op).removesuffix("_torch") == wanted else 2.0
        return Price(seconds, seconds, seconds, "assumed", "")

    choice = chosen_method(q, k, v, price=price)
    assert choice.method == wanted
    assert set(choice.prices) == set(METHODS)


def test_auto_takes_what_fits_and_says_so() -> None:
    long = torch.empty(1, 32, 100_000, 128, device="meta")
    choice = chosen_method(
        long, long, long, device_name="a6000", price=lambda op: Price(1 / op.work.flops, 0, 0, "assumed", "")
    )
    assert "vanilla" not in choice.prices  # at this price it would be taken
    assert choice.memory_bytes["vanilla"] > 48e9
    assert choice.method in choice.prices
    assert "vanilla              does not fit" in str(choice)
    assert str(choice).startswith(f"{choice.method} on a6000")
    longer = torch.empty(64, 32, 100_000, 128, device="meta")
    with pytest.raises(ValueError, match="no method fits"):
        chosen_method(longer, longer, longer, device_name="a6000")


def test_auto_prices_what_would_run() -> None:
    q, k, v, _ = tokens(50, 1, torch.float32)
    choice = chosen_method(q, k, v, decays("random"), device_name="h200-sxm")
    price = pricer(load_device("h200-sxm"))
    # No kernel takes a CPU's tensors: 50 rows of 3 torch ops each.
    rows = linear_attention(
        "causal_dot_product_torch",
        batch=2,
        heads=HEADS,
        length=50,
        rank=RANK,
        dim=DIM,
        dtype="fp32",
        decay=True,
    )
    assert len(rows.parts) == 150
    assert choice.prices["causal_dot_product"].seconds == price(rows).seconds
    assert choice.prices[choice.method].seconds == min(p.seconds for p in choice.prices.values())


Q, V = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 5)


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("q", {"q": Q[0]}),
        ("q", {"q": Q[:, :, :0]}),
        ("q", {"q": Q.int()}),
        ("k", {"k": V}),
        ("k", {"k": Q.double()}),
        ("v", {"v": V[:, :, 1:]}),
        ("v", {"v": V[..., :0]}),
        ("v", {"v": V[0]}),
        ("decay", {"decay": torch.ones(3)}),
        ("decay", {"decay": torch.tensor([0.5, 0.0])}),
        ("decay", {"decay": torch.tensor([0.5, 1.01])}),
        ("decay", {"decay": torch.tensor([0.5, float("nan")])}),
        ("state", {"state": torch.zeros(1, 2, 5, 3)}),
        ("state", {"state": torch.zeros(1, 2, 3, 5).double()}),
        ("k", {"k": Q.to("meta")}),
        ("method", {"method": "flash"}),
    ],
)
def test_bad_arguments_are_named_with_what_is_allowed(named: str, given: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=rf"^{named} .*; allowed: "):
        causal_linear_attention(**{"q": Q, "k": Q, "v": V, **given})  # type: ignore[arg-type]


def test_a_step_takes_one_token() -> None:
    with pytest.raises(ValueError, match=r"^q has 4 tokens"):
        causal_linear_attention_step(Q, Q, V, torch.zeros(1, 2, 3, 5))


# -- a method of one's own -----------------------------------------------------------------------

SIZES: dict[str, Any] = {"batch": 1, "heads": 2, "length": 40, "rank": 4, "dim": 6}


@pytest.mark.parametrize("decay", [False, True])
def test_a_right_method_is_timed_beside_the_built_in_ones(decay: bool) -> None:
    calls = 0

    def own(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        assert (gamma is not None) == decay
        return naive(q, k, v, gamma)[0].to(q.dtype)

    result = benchmark_method(own, **SIZES, decay=decay, repeats=3)
    assert calls == 1 + 1 + 3  # one checked, one to warm up
    assert result.n == 3
    assert 0.0 < result.p10_s <= result.median_s <= result.p90_s
    assert 0.0 < result.error < 1e-6
    assert set(result.built_in_median_s) == set(METHODS)
    assert min(result.built_in_median_s.values()) > 0.0


@pytest.mark.parametrize("fault", ["no decay", "nan", "state", "shape"])
def test_a_wrong_method_is_not_timed(fault: str) -> None:
    calls = 0

    def own(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        output, last = naive(q, k, v, None if fault == "no decay" else gamma)
        if fault == "nan":
            output[0, 1, -1, -1] = float("nan")
        if fault == "shape":
            output = output[:, :, 1:]
        return (output, last * 1.1) if fault == "state" else output

    with pytest.raises(ValueError, match=r"^fn.*allowed"):
        benchmark_method(own, **SIZES, repeats=2)
    assert calls == 1


def test_benchmarks_that_cannot_be() -> None:
    def own(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Tensor:
        return v

    with pytest.raises(ValueError, match=r"^repeats is 0"):
        benchmark_method(own, **SIZES, repeats=0)
    with pytest.raises(ValueError, match=r"^dtype is torch.int32; allowed"):
        benchmark_method(own, **SIZES, dtype=torch.int32)


@pytest.mark.parametrize("given", ["one", "three", "a number", "a string beside it"])
def test_a_method_that_gives_something_else_is_named(given: str) -> None:
    def own(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Any:
        output, last = naive(q, k, v, gamma)
        others: dict[str, Any] = {
            "one": (output,),
            "three": (output, last, last),
            "a number": 1.0,
            "a string beside it": (output, "state"),
        }
        return others[given]

    with pytest.raises(ValueError, match=r"^fn gives a .*; allowed: the output, or the output and"):
        benchmark_method(own, **SIZES, repeats=1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_method_that_writes_into_its_inputs_is_not_timed(place: int) -> None:
    calls = 0

    def own(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        assert gamma is not None
        output = naive(q, k, v, gamma)[0].to(q.dtype)
        (q, k, v, gamma)[place].view(-1)[-1].mul_(0.5)
        return output

    with pytest.raises(ValueError, match=rf"^fn writes into {('q', 'k', 'v', 'decay')[place]}; allowed"):
        benchmark_method(own, **SIZES, repeats=2)
    assert calls == 1


# -- which device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA RTX A6000", "a6000"),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu: str, name: str) -> None:
    assert gpu_device(gpu) == name
    assert load_device(name).name == name


@pytest.mark.parametrize(
    "gpu", ["NVIDIA L4", "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"]
)
def test_another_gpu_is_not_priced_as_one_of_the_catalogue(gpu: str) -> None:
    with pytest.raises(ValueError, match=rf"{gpu}: give device_name; allowed: .*a6000.*h200-sxm"):
        gpu_device(gpu)


def test_where_tensors_lie_says_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H{device.index}00 80GB HBM3")
    assert default_device(torch.device("cpu")) == "cpu"
    assert default_device(torch.device("cuda:1")) == "h100-sxm"
    assert default_device(torch.device("cuda:2")) == "h200-sxm"
    with pytest.raises(ValueError, match="give device_name; allowed: "):
        default_device(torch.device("cuda:3"))
    for other in (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB MIG 1g",
    ):
        with pytest.raises(ValueError, match="give device_name"):
            gpu_device(other)
    with pytest.raises(ValueError, match="meta: give device_name; allowed: "):
        default_device(torch.device("meta"))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch", 0), ("heads", 1.5), ("length", "a"), ("rank", None), ("dim", True), ("repeats", 0),
        ("decay", "maybe"), ("device", "nowhere"), ("dtype", torch.int32), ("fn", None),
    ],
)  # fmt: skip
def test_a_benchmark_names_what_is_wrong(argument: str, value: Any) -> None:
    given: dict[str, Any] = {
        "fn": lambda q, k, v, g: v,
        "batch": 1,
        "heads": 1,
        "length": 3,
        "rank": 2,
        "dim": 2,
    }
    with pytest.raises(ValueError, match=f"^{argument} is "):
        benchmark_method(**{**given, argument: value})


@pytest.mark.parametrize(("argument", "value"), [("q", None), ("k", [1.0]), ("decay", 0.9), ("state", 3)])
def test_what_is_no_tensor_is_refused_by_name(argument: str, value: Any) -> None:
    x = torch.ones(1, 1, 3, 2)
    with pytest.raises(ValueError, match=f"^{argument} is a "):
        causal_linear_attention(**{"q": x, "k": x, "v": x, argument: value})


def test_a_choice_is_made_once_a_shape() -> None:
    x = torch.ones(1, 1, 7, 2)
    assert chosen_method(x, x, x, device_name="a6000") is chosen_method(x + 1, x, x, device_name="a6000")
