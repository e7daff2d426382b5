"""Decoding's attention kernels against float64: in Triton's interpreter where there is no GPU, small; else
compiled, at the sizes that decoding meets, in captured graphs and on several streams."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.dealt_parts import DealtConfig
from simcore.kernels.decoder.decode_attention import (
    DecodeConfig,
    Workspace,
    decode_attention,
    reference_decode_attention,
    split_config_for,
    workspace,
)
from simcore.kernels.decoder.speculative_attention import (
    Speculation,
    SpeculativeWorkspace,
    Verdict,
    decide,
    receive,
    reference_speculative_attention,
    speculation,
    speculative_attention,
    speculative_workspace,
    verdict,
)
from simcore.kernels.decoder.split_kv import EMPTY, ONE_BY_ONE
from simcore.kernels.decoder.split_kv import cache as kept_cache
from tests.attention_cases import (
    BARS,
    FP8,
    NAMES,
    Case,
    Shape,
    attended,
    error,
    make_case,
    some_lengths,
    spaced,
    tokens_of,
    truth,
)
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)
DEVICE = "cpu" if ONE_BY_ONE or not torch.cuda.is_available() else "cuda"
interpreted = pytest.mark.skipif(
    not ONE_BY_ONE, reason="each shape would be compiled: the suite for GPUs has fewer, larger ones"
)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device, or Triton's interpreter is chosen")


def laid_out(block: int, splits: int, slices: int = 1, stages: int = 1, warps: int = 4) -> DecodeConfig:
    return DecodeConfig(block=block, splits=splits, stages=stages, warps=warps, slices=slices)


SMALL = laid_out(16, 3)


def poisoned(case: Case, spare: bool = False) -> Tensor:
    """Room for an output, NaN."""
    q = case.tensors[0]
    return spaced(torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device), spare)


def words(space: Workspace | SpeculativeWorkspace) -> list[Tensor]:
    """All tensors of a workspace."""
    return [x for part in space for x in ([part] if isinstance(part, Tensor) else part)]


def as_new(space: Workspace | SpeculativeWorkspace, other: Workspace | SpeculativeWorkspace) -> bool:
    """Whether a launch left its workspace as one that has just been made."""
    return all(torch.equal(x, y) for x, y in zip(words(space), words(other), strict=True))


def space_of(case: Case, config: DecodeConfig) -> Workspace:
    return workspace(case.tensors[0], case.shape.kv_heads, config)


def ends_space_of(case: Case, config: DecodeConfig) -> SpeculativeWorkspace:
    return speculative_workspace(case.tensors[0], case.shape.kv_heads, config)


def check(found: Tensor, expected: Tensor) -> None:
    """Within the bar of its format, and nothing written beside a view."""
    assert error(found, expected) < BARS[found.dtype]
    if found._base is not None:
        assert int(found._base.isfinite().sum()) == found.numel()


# -- attention: random shapes ------------------------------------------------------------------------------


def test_more_programs_than_multiprocessors_may_not_wait_for_each_other() -> None:
    """They might wait for one that finds no place."""
    case = make_case(Shape(kv_heads=1, group=16, head_dim=64, dtype=torch.float16), [40], 1)
    config = replace(laid_out(16, 200, 16), sharers=140)
    with pytest.raises(ValueError, match="sharers: 140 programs of a head would wait; 132 surely"):
        decode_attention(*case.tensors, config=config)


AWAY = [slice(0, 20), slice(30, 50), slice(0, 50)]


def without(away: slice, device: str) -> None:
    """Attends where some tokens score -inf: they have no part, and of all tokens nothing is left."""
    case = make_case(Shape(kv_heads=2, group=3, head_dim=32, dtype=torch.float16), [50, 9], 5, device=device)
    q, k, v, lengths = case.tensors
    q[..., 0] = 1.0
    k[0, :, away, 0] = -math.inf
    expected = torch.nan_to_num(truth(case))
    for config in (laid_out(16, 1), laid_out(16, 3), DealtConfig(16, 3, 1, 4, 1)):
        lse = torch.full_like(q[..., 0], math.nan, dtype=torch.float32)
        check(decode_attention(q, k, v, lengths, lse=lse, config=config), expected)
        assert bool(lse[0].isneginf().all()) == (away == slice(0, 50))
        assert bool(lse[1].isfinite().all())
    made = speculative_attention(q, k, v, lengths, sinks=4, window=4, config=laid_out(16, 3))
    check(made.exact, expected)


# Rows of a tile beyond the group are 0, and 0 times -inf is no number there.
@slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("away", AWAY)
@interpreted
def test_tokens_that_score_minus_infinity_have_no_part(away: slice) -> None:
    without(away, "cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("away", AWAY)
def test_tokens_that_score_minus_infinity_have_no_part_on_a_gpu(away: slice) -> None:
    without(away, DEVICE)


HEAD_DIMS = [64, 33, 80, 96, 65, 128, 100, 192, 256]
BLOCKS = [0, 16, 0, 1, 24, 8, 0, 64]


def small_shape(seed: int) -> Shape:
    """Every group from 1 to 16, every head dimension, every layout in turn; nine and sixteen are coprime."""
    group, head_dim = 1 + seed % 16, HEAD_DIMS[seed % len(HEAD_DIMS)]
    dtype = torch.float16 if seed // 2 % 3 == 0 else torch.float32
    return Shape(
        kv_heads=1 if group > 6 else 1 + seed % 3 % 2,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=FP8 if seed % 5 == 4 else None,
        block=BLOCKS[(seed + seed // 8) % len(BLOCKS)],
        spare=seed % 4 < 2,
    )


def small_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 70))
    ends: dict[str, Any] = {
        0: {},
        1: {"sinks": int(rng.integers(0, 20)), "window": int(rng.integers(1, 30))},
        2: {"sinks": 4, "window": 100},
        3: [{"sinks": 0, "window": 9}, {"window": 7}, {"sinks": 5}, {"sinks": 0, "window": 0}][seed // 4 % 4],
    }[seed % 4]
    if seed % 3 == 0:
        ends["scale"] = 0.3
    lengths = some_lengths(rng, int(rng.integers(1, 4)), capacity)
    return make_case(small_shape(seed), lengths, seed, capacity=capacity, **ends)


def small_config(seed: int) -> DecodeConfig:
    return laid_out((16, 32, 64)[seed // 3 % 3], (1, 3, 8)[seed % 3])


@interpreted
@pytest.mark.parametrize("seed", first(4, range(16)))
def test_attention_of_random_shapes(seed: int) -> None:
    case, config = small_case(seed), small_config(seed)
    expected, out, space = truth(case), poisoned(case, spare=seed % 2 == 0), space_of(case, config)
    gate = None if seed % 3 else torch.ones(1, dtype=torch.int32)
    given = decode_attention(*case.tensors, **case.options, out=out, space=space, config=config, gate=gate)
    assert given is out
    check(out, expected)
    assert as_new(space, space_of(case, config))


def in_float64(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, lengths, in float64 but for a cache of fp8, which its scales belong to."""
    q, k, v, lengths = case.tensors
    return q.double(), *((k, v) if case.shape.stored == FP8 else (k.double(), v.double())), lengths


@pytest.mark.parametrize("seed", range(24))
def test_the_reference_is_the_truth(seed: int) -> None:
    case = small_case(seed)
    assert error(reference_decode_attention(*in_float64(case), **case.options), truth(case)) < 1e-12
    found = reference_decode_attention(*case.tensors, **case.options)
    assert found.dtype == case.shape.dtype
    assert error(found, truth(case)) < 2 * BARS[found.dtype]


@interpreted
@pytest.mark.parametrize("seed", [3, 4])
def test_the_default_layout(seed: int) -> None:
    case = small_case(seed)
    check(decode_attention(*case.tensors, **case.options), truth(case))


# -- attention: what is left behind ------------------------------------------------------------------------

PAGED = Shape(kv_heads=2, group=5, head_dim=64, block=16)


@slow
@pytest.mark.parametrize("splits", first(1, [1, 3]))
def test_a_workspace_serves_one_launch_after_another(splits: int) -> None:
    config = laid_out(16, splits, 2)
    first = make_case(PAGED, [0, 37, 70], 1, capacity=96, device=DEVICE)
    other = make_case(PAGED, [90, 1, 16], 2, capacity=96, device=DEVICE)
    space = space_of(first, config)
    outs = []
    for case in (first, first, other, first):
        out = poisoned(case)
        decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
        check(out, truth(case))
        assert as_new(space, space_of(case, config))
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[3])


def test_a_closed_gate_leaves_everything_as_it_was() -> None:
    case = make_case(PAGED, [5, 40], 1, capacity=96, device=DEVICE)
    out, space = poisoned(case), space_of(case, SMALL)
    gate = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for opened in (0, 1):
        gate.fill_(opened)
        decode_attention(*case.tensors, **case.options, out=out, space=space, config=SMALL, gate=gate)
        assert as_new(space, space_of(case, SMALL))
        assert bool(out.isnan().all()) == (not opened)
    check(out, truth(case))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 10, 32)}, "q has to be"),
        ({"q": torch.zeros(2, 9, 64)}, "multiple"),
        ({"q": torch.zeros(2, 64, 10).transpose(1, 2)}, "contiguous"),
        ({"k": torch.zeros(2, 2, 5, 64)}, "one shape"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths"),
        ({"k_scale": torch.ones(2)}, "together"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(2)}, "k_scale"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, "block_table"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    case = make_case(Shape(2, 5, 64), [3, 4], 1)
    given = dict(zip(["q", "k", "v", "lengths"], case.tensors, strict=True)) | change
    with pytest.raises(ValueError, match=message):
        decode_attention(**given)


# -- attention: laws ---------------------------------------------------------------------------------------

PLAIN = Shape(kv_heads=2, group=3, head_dim=80)


def plain(lengths: list[int], seed: int, **options: Any) -> Case:
    return make_case(PLAIN, lengths, seed, device=DEVICE, **options)


def run(case: Case, config: DecodeConfig = SMALL) -> Tensor:
    return decode_attention(*case.tensors, **case.options, config=config)


@slow
def test_over_equal_values_it_is_that_value() -> None:
    case = plain([1, 20, 61], 1)
    q, k, v, lengths = case.tensors
    v = v[:, :, :1].expand_as(v).contiguous()
    found = decode_attention(q, k, v, lengths, config=SMALL)
    torch.testing.assert_close(found.view(3, 2, 3, 80), v[:, :, :1].expand(3, 2, 3, 80), rtol=1e-5, atol=1e-5)


@thorough
def test_the_order_of_tokens_does_not_matter() -> None:
    case = plain([45, 45], 2)
    q, k, v, lengths = case.tensors
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    other = decode_attention(q, k[:, :, order], v[:, :, order], lengths, config=SMALL)
    assert error(other, run(case).double()) < BARS[torch.float32]


@thorough
def test_the_number_of_splits_does_not_matter() -> None:
    case = plain([1, 64, 90], 3)
    found = [run(case, laid_out(16, splits)) for splits in (1, 2, 5)]
    for one, other in pairwise(found):
        assert error(one, other.double()) < BARS[torch.float32]


@slow
def test_a_concatenation_is_the_sum_of_its_parts() -> None:
    case = plain([60], 4)
    q, k, v, lengths = case.tensors
    scores = torch.einsum("bhgd,bhtd->bhgt", q.double().view(1, 2, 3, 80), k.double()) / math.sqrt(80)
    total = scores.exp().sum(-1)
    joined = torch.zeros(1, 6, 80, dtype=torch.float64, device=DEVICE)
    for tokens in (slice(0, 23), slice(23, 60)):
        length = torch.full_like(lengths, tokens.stop - tokens.start)
        part = decode_attention(q, k[:, :, tokens], v[:, :, tokens], length, config=SMALL)
        weight = scores[..., tokens].exp().sum(-1) / total
        joined += weight.view(1, 6, 1) * part.double()
    assert error(run(case), joined) < BARS[torch.float32]


@slow
def test_a_window_is_the_cache_without_the_middle() -> None:
    case = plain([50], 5, sinks=3, window=20)
    q, k, v, lengths = case.tensors
    kept = attended(50, 3, 20).to(DEVICE)
    other = decode_attention(q, k[:, :, kept], v[:, :, kept], torch.full_like(lengths, 23), config=SMALL)
    assert error(run(case), other.double()) < BARS[torch.float32]


@slow
def test_scores_far_apart_do_not_overflow() -> None:
    case = plain([40, 33], 6)
    q, k, v, lengths = case.tensors
    case = Case(case.shape, (q * 8, k * 8, v, lengths), {})
    assert error(run(case), truth(case)) < 1e-3


def test_truth_looks_tokens_up_where_they_lie() -> None:
    """The two layouts hold the same numbers for a seed, so that the truth of one is that of the other."""
    contiguous = make_case(Shape(2, 3, 16, spare=True), [0, 5, 17], 9, capacity=24)
    paged = make_case(Shape(2, 3, 16, block=8, spare=True), [0, 5, 17], 9, capacity=24)
    assert torch.equal(truth(contiguous), truth(paged))
    assert contiguous.tensors[1]._base is not None
    assert int(contiguous.tensors[1]._base.isfinite().sum()) == 22 * 2 * 16
    tokens = torch.arange(17)
    found = tokens_of(paged.tensors[1], 2, tokens, paged.options["block_table"], None)
    assert torch.equal(found, contiguous.tensors[1][2, :, :17].double())


# -- speculative attention ---------------------------------------------------------------------------------


def on_device(device: str, **numbers: float) -> dict[str, Tensor]:
    """Sinks, window and threshold as the kernel reads them there."""
    return {
        name: torch.tensor([x], dtype=torch.float32 if name == "threshold" else torch.int32, device=device)
        for name, x in numbers.items()
    }


def nothing_yet(case: Case, config: DecodeConfig | None = None) -> Speculation:
    """Room for what speculation leaves, holding what it never leaves, but nobody arrived."""
    q, scales = case.tensors[0], (case.options.get("k_scale"), case.options.get("v_scale"))
    kv = kept_cache(*case.tensors, case.options.get("block_table"), scales)
    into = speculation(q, kv.kv_heads, config or split_config_for(q, kv))
    for x in (into.exact, into.early):
        x.fill_(math.nan)
    return into


def undecided(made: Speculation) -> Verdict:
    """Room for a verdict, holding what it never leaves."""
    room = verdict(len(made.norms), made.norms.device)
    for x, never in zip(room, (-7, math.nan, -7), strict=True):
        x.fill_(never)
    return room


def decided(made: Speculation, threshold: float | Tensor) -> Verdict:
    """The verdict on a launch, which takes the words that it left."""
    found = decide(made, threshold, into=undecided(made))
    assert bool((made.norms == EMPTY.value).all())
    return found


def ratios(early: Tensor, exact: Tensor) -> Tensor:
    """||early - exact|| / ||exact|| of each sequence, 0 for one of no token."""
    size = exact.flatten(1).norm(dim=1)
    return torch.where(size > 0, (early - exact).flatten(1).norm(dim=1) / size, 0.0)


def check_speculation(
    case: Case, threshold: float, made: Speculation, found: Verdict | None = None
) -> tuple[int, int]:
    """All that a launch left and what is decided by it, against float64. Hits and misses, but for those as
    good as on the threshold."""
    found = found or decided(made, threshold)
    early, exact = truth(case), truth(case, everything=True)
    bar = BARS[made.exact.dtype]
    check(made.exact, exact)
    check(made.early, early)
    off, size = (x.flatten(1).norm(dim=1) for x in (early - exact, exact))
    assert bool((found.norms >= 0).all())
    roots = found.norms.double().sqrt()
    assert float(((roots[:, 1] - size).abs() - 2 * bar * size).max()) <= 0
    assert float(((roots[:, 0] - off).abs() - 2 * bar * (size + off)).max()) <= 0
    ratio = ratios(early, exact)
    clear = (ratio / threshold - 1).abs() >= 0.01
    hits = ratio < threshold
    assert torch.equal(found.hits.bool()[clear], hits[clear])
    assert set(found.hits.tolist()) <= {0, 1}
    assert found.priority.tolist() == [0 if all(found.hits.tolist()) else 2]
    return int((hits & clear).sum()), int((~hits & clear).sum())


def check_received(case: Case, found: Speculation) -> None:
    """The early part is counted in, and the receiver takes it."""
    assert found.arrived.tolist() == [case.shape.q_heads] * len(found.arrived)
    x = torch.full_like(found.early, math.nan).flatten(1)
    receive(found.early, found.arrived, x)
    assert torch.equal(x, found.early.flatten(1))
    assert not found.arrived.any()


@slow
@interpreted
@pytest.mark.parametrize("seed", first(2, range(12)))
def test_speculation_of_random_shapes(seed: int) -> None:
    rng, shape = np.random.default_rng([seed, 1]), small_shape(seed + 48)
    capacity, batch = int(rng.integers(1, 70)), int(rng.integers(1, 3 if shape.q_heads > 5 else 4))
    sizes = {"sinks": int(rng.integers(0, 20)), "window": int(rng.integers(0 if seed % 8 == 7 else 1, 30))}
    options = on_device("cpu", **sizes) if seed % 2 else sizes
    case = make_case(shape, some_lengths(rng, batch, capacity), seed, **options)
    splits, workers = [(1, 1), (3, 2), (5, 1), (4, 3)][seed % 4]
    config = laid_out((16, 32)[seed // 3 % 2], splits)
    space = ends_space_of(case, config)
    # Close to where one of the sequences lies, on either side.
    ratio = ratios(truth(case), truth(case, everything=True)).clamp(0.01)
    threshold = float(ratio[int(rng.integers(batch))]) * (0.97, 1.03)[seed // 2 % 2]
    given = torch.tensor([threshold]) if seed % 3 else threshold
    into = nothing_yet(case, config)._replace(exact=poisoned(case, spare=seed % 2 == 0))
    for _ in range(2 if seed % 5 == 0 else 1):
        found = speculative_attention(
            *case.tensors,
            **case.options,
            into=into,
            space=space,
            config=config,
            workers=workers,
        )
        assert found is into
        check_speculation(case, threshold, found, decided(found, given))
        check_received(case, found)
        assert as_new(space, ends_space_of(case, config))
    plain = {name: x for name, x in case.options.items() if name not in sizes}
    decoded = decode_attention(*case.tensors, **plain, config=config)
    assert error(found.exact, decoded.double()) < BARS[decoded.dtype]


def verdicts(shape: Shape, batch: int, launches: int, longest: int, config: DecodeConfig) -> tuple[int, int]:
    """Hits and misses over sequences whose ends carry nearly all of the weight, or not quite."""
    rng, both = np.random.default_rng(5), np.zeros(2, dtype=int)
    for launch in range(launches):
        case = make_case(
            shape,
            [int(n) for n in rng.integers(1, longest, batch)],
            launch,
            capacity=longest,
            device=DEVICE,
            weight_outside=np.exp(rng.uniform(math.log(0.02), math.log(0.6), batch)).tolist(),
            **on_device(DEVICE, sinks=int(rng.integers(0, 9)), window=int(rng.integers(4, longest // 3))),
        )
        threshold = float(rng.uniform(0.05, 0.25))
        found = speculative_attention(*case.tensors, **case.options, config=config)
        both += check_speculation(case, threshold, found)
    return int(both[0]), int(both[1])


@pytest.mark.parametrize("seed", range(1, 24, 4))
def test_the_reference_of_speculation_is_the_truth(seed: int) -> None:
    case = small_case(seed)
    early, exact = truth(case), truth(case, everything=True)
    ratio = ratios(early, exact)
    threshold = max(0.01, float(ratio.mean()))
    found = reference_speculative_attention(*in_float64(case), **case.options, threshold=threshold)
    for one, other in zip(found[:2], (exact, early), strict=True):
        assert error(one, other) < 1e-12
    squares = [x.flatten(1).square().sum(1) for x in (early - exact, exact)]
    torch.testing.assert_close(found[2].double(), torch.stack(squares, 1), rtol=1e-6, atol=1e-12)
    assert found[3].tolist() == (ratio < threshold).int().tolist()


@interpreted
@thorough
def test_hits_are_told_from_misses() -> None:
    hits, misses = verdicts(Shape(1, 2, 64), 12, 3, 64, laid_out(16, 2))
    assert min(hits, misses) >= 8


@slow
@pytest.mark.parametrize(("threshold", "priority"), [(1e-3, 2), pytest.param(10.0, 0, marks=thorough)])
def test_one_miss_gives_the_wait_back_its_priority(threshold: float, priority: int) -> None:
    """Sequences that the ends cover hit at any threshold; the long one alone decides."""
    case = make_case(Shape(2, 2, 64), [20, 7, 61, 12], 3, capacity=64, device=DEVICE, sinks=4, window=16)
    found = decided(speculative_attention(*case.tensors, **case.options, config=SMALL), threshold)
    assert found.hits.tolist() == [1, 1, int(priority == 0), 1]
    assert found.priority.tolist() == [priority]


@slow
def test_closed_gates_leave_speculation_and_its_receiver_as_they_were() -> None:
    case = make_case(PAGED, [5, 40], 1, capacity=96, device=DEVICE, sinks=2, window=9)
    config, into = SMALL, nothing_yet(case, SMALL)
    space = ends_space_of(case, config)
    gate = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    named = {"into": into, "space": space, "config": config, "gate": gate}
    room = undecided(into)
    before = [x.clone() for x in (*into, *room, *words(space))]
    speculative_attention(*case.tensors, **case.options, **named)
    decide(into, 0.1, gate=gate, into=room)
    torch.testing.assert_close([*into, *room, *words(space)], before, rtol=0, atol=0, equal_nan=True)
    speculative_attention(*case.tensors, **case.options, **(named | {"gate": None}))
    x = torch.full_like(into.early, math.nan).flatten(1)
    receive(into.early, into.arrived, x, gate=gate)
    assert bool(x.isnan().all())
    gate.fill_(1)
    check_received(case, into)
    speculative_attention(*case.tensors, **case.options, **named)
    check_speculation(case, 0.1, into)
    receive(into.early, into.arrived, x, gate=gate)
    assert torch.equal(x, into.early.flatten(1))


@pytest.mark.parametrize(
    "change",
    [
        {"sinks": torch.ones(1, dtype=torch.int64)},
        {"window": torch.ones(2, dtype=torch.int32)},
    ],
)
def test_numbers_on_the_device_have_their_formats(change: dict[str, Tensor]) -> None:
    case = make_case(PLAIN, [3], 1)
    with pytest.raises(ValueError, match="of one element"):
        speculative_attention(*case.tensors, **({"sinks": 1, "window": 1} | change))


def test_a_receiver_takes_rows_of_one_size() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        receive(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 10))


@pytest.mark.parametrize("name", ["patience", "error"])
@pytest.mark.parametrize("word", [torch.zeros(1), torch.zeros(2, dtype=torch.int32)])
def test_a_receiver_takes_words_of_one_int32(name: str, word: Tensor) -> None:
    early, arrived = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name} has to be int32 of one element"):
        receive(early, arrived, torch.zeros(2, 12), **{name: word})


class TestAReceiverWithPatience:
    """Three rows of five queries; where not all have arrived, early is still as it was before."""

    def received(self, arrived: Tensor, patience: int, **named: Any) -> tuple[Tensor, Tensor, int, int]:
        """early and what was received of it, then patience and error afterwards."""
        early = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        x = torch.full((3, 35), math.nan, device=DEVICE)
        words = torch.tensor([patience], device=DEVICE, dtype=torch.int32)
        error = torch.zeros_like(words)
        receive(early, arrived, x, patience=words, error=error, **named)
        return early.flatten(1), x, int(words), int(error)

    def arrived(self, *queries: int) -> Tensor:
        return torch.tensor(queries, device=DEVICE, dtype=torch.int32)

    @pytest.mark.parametrize("chained", [False, True])
    @pytest.mark.parametrize("patience", [1, 100])
    def test_takes_what_is_there(self, patience: int, chained: bool) -> None:
        arrived = self.arrived(5, 5, 5)
        early, x, left, error = self.received(arrived, patience, chained=chained)
        assert torch.equal(x, early)
        assert (left, error) == (patience, 0)
        assert not arrived.any()

    @pytest.mark.parametrize("queries", [(0, 0, 0), (5, 5, 5)])
    def test_of_0_does_nothing(self, queries: tuple[int, ...]) -> None:
        arrived = self.arrived(*queries)
        _, x, left, error = self.received(arrived, 0)
        assert bool(x.isnan().all())
        assert (left, error) == (0, 0)
        assert tuple(arrived.tolist()) == queries

    @pytest.mark.parametrize("code", [1, 9])
    @pytest.mark.parametrize("chained", [False, True])
    def test_gives_up(self, chained: bool, code: int) -> None:
        """Who gives up ends the patience of the rows that have not begun: so the last one is late here."""
        arrived = self.arrived(5, 5, 4)
        early, x, left, error = self.received(arrived, 200, code=code, chained=chained)
        assert (left, error) == (0, code)
        assert torch.equal(x[:2], early[:2])
        assert bool(x[2].isnan().all())
        assert arrived.tolist() == [0, 0, 4]

    def test_a_closed_gate_ends_no_patience(self) -> None:
        arrived, gate = self.arrived(0, 0, 0), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        _, x, left, error = self.received(arrived, 3, gate=gate)
        assert bool(x.isnan().all())
        assert (left, error) == (3, 0)

    def test_needs_no_error_to_tell(self) -> None:
        words = torch.full((1,), 2, dtype=torch.int32, device=DEVICE)
        early, x = torch.zeros(1, 2, 3, device=DEVICE), torch.ones(1, 6, device=DEVICE)
        receive(early, self.arrived(0), x, patience=words)
        assert int(words) == 0
        assert bool((x == 1).all())


# -- on a GPU ----------------------------------------------------------------------------------------------

HEADS = [(8, 1), (8, 4), (4, 8), (2, 5), (4, 7), (1, 16), (1, 8), (16, 1), (3, 6), (2, 12)]
GPU_HEAD_DIMS = [128, 64, 128, 80, 96, 128, 192, 256, 128, 100]
GPU_BLOCKS = [0, 16, 16, 64, 0, 32, 8, 0, 256]
GPU_FORMATS = [
    (torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, FP8),
    (torch.bfloat16, None), (torch.float16, FP8),
]  # fmt: skip
LAYOUTS = 60
# Of K and V together, in numbers: 1 GiB where they are in fp32.
MOST_NUMBERS = 2**28
LONGEST = 16384


@dataclass(frozen=True)
class Layout:
    """What is compiled once: a shape, its configuration (None: the default one, for one batch), its ends."""

    shape: Shape
    config: DecodeConfig | None
    batch: int | None
    ends: dict[str, int]


def gpu_config(rng: np.random.Generator, shape: Shape) -> DecodeConfig:
    """Any layout that fits a multiprocessor: blocks of K of 16 KiB at most, unless they are the smallest."""
    row = max(16, 1 << (shape.head_dim - 1).bit_length()) * shape.stored.itemsize
    blocks = [block for block in (16, 32, 64, 128) if block * row <= 16384 or block == 16]
    splits = int(rng.choice([1, 2, 3, 5, 8, 16, 33, 64]))
    slices, stages, warps = (int(rng.choice(x)) for x in ([1, 2, 4, 8], [2, 3, 4], [4, 8]))
    return laid_out(int(rng.choice(blocks)), splits, slices, stages, warps)


def gpu_layout(index: int) -> Layout:
    rng = np.random.default_rng([index, 3])
    (dtype, kv_dtype), (kv_heads, group) = GPU_FORMATS[index % 6], HEADS[index % 10]
    head_dim, block = int(rng.choice(GPU_HEAD_DIMS)), int(rng.choice(GPU_BLOCKS))
    shape = Shape(kv_heads, group, head_dim, dtype, kv_dtype, block, spare=index % 7 == 6)
    # No ones and no multiples of sixteen, which the compiler makes kernels of their own for.
    ends = {"sinks": int(rng.integers(2, 15)), "window": 2 * int(rng.integers(8, 1500)) + 1}
    default = index // 6 % 2 == 0
    return Layout(
        shape,
        None if default else gpu_config(rng, shape),
        int(2 ** rng.uniform(0, 6.02)) if default else None,
        ends if index % 4 == 1 else {},
    )


def gpu_case(layout: Layout, index: int, drawing: int, **options: Any) -> Case:
    """Batch up to 64, context up to 16384, as much cache as allowed or less."""
    rng, shape = np.random.default_rng([index, drawing, 4]), layout.shape
    batch = layout.batch or int(2 ** rng.uniform(0, 6.02))
    most = MOST_NUMBERS // (2 * batch * shape.kv_heads * shape.head_dim)
    capacity = int(min(most, LONGEST * 2 ** -max(0.0, rng.uniform(-2, 8)))) // 256 * 256 or 256
    lengths = some_lengths(rng, batch, capacity)
    return make_case(
        shape, lengths, 100 * index + drawing, capacity=capacity, device=DEVICE, **layout.ends, **options
    )


def note(record_property: Callable[[str, object], None], case: Case, worst: float) -> None:
    """For the summary at the end of the run."""
    record_property("relative error", (f"q {NAMES[case.shape.dtype]}, kv {NAMES[case.shape.stored]}", worst))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(LAYOUTS))
def test_attention_on_a_gpu(index: int, record_property: Callable[[str, object], None]) -> None:
    """300 shapes in 60 layouts."""
    layout = gpu_layout(index)
    for drawing in range(5):
        case = gpu_case(layout, index, drawing)
        out = poisoned(case, case.shape.spare)
        decode_attention(*case.tensors, **case.options, out=out, config=layout.config)
        expected = truth(case)
        note(record_property, case, error(out, expected))
        assert error(out, expected) < BARS[out.dtype], (str(case.shape), case.lengths, str(layout.config))
        check(out, expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(12))
def test_speculation_on_a_gpu(index: int, record_property: Callable[[str, object], None]) -> None:
    """36 shapes in 12 layouts. The batch is part of what is compiled."""
    rng, layout = np.random.default_rng([index, 6]), gpu_layout(index)
    batch = layout.batch or (1, 5, 32)[index % 3]
    config, workers = None, 1
    if index % 2:
        config = gpu_config(rng, layout.shape)
        workers = min(config.splits, int(rng.integers(1, 6)))
    layout = Layout(layout.shape, None, batch, {})
    for drawing in range(3):
        ends = on_device(DEVICE, sinks=int(rng.integers(0, 65)), window=int(rng.integers(0, 1025)))
        threshold = float(rng.uniform(0.05, 0.9))
        case = gpu_case(layout, index, drawing, **ends)
        into = nothing_yet(case, config)
        for _ in range(2):
            speculative_attention(
                *case.tensors,
                **case.options,
                into=into,
                config=config,
                workers=workers,
            )
            check_speculation(case, threshold, into)
            check_received(case, into)
        note(record_property, case, error(into.exact, truth(case, everything=True)))


@pytest.mark.gpu
@needs_gpu
def test_a_thousand_verdicts() -> None:
    shape = Shape(kv_heads=2, group=4, head_dim=64, dtype=torch.float16)
    hits, misses = verdicts(shape, 50, 20, 1024, laid_out(64, 8, 2, stages=3))
    assert hits + misses > 900
    assert min(hits, misses) > 200


def filled(caches: tuple[Tensor, Tensor], case: Case, lengths: list[int]) -> None:
    """Sets a case to these lengths, NaN behind them, keeping every address."""
    case.tensors[3].copy_(torch.tensor(lengths, dtype=torch.int32))
    past = torch.arange(case.tensors[1].shape[2], device=DEVICE) >= case.tensors[3][:, None]
    for cache, tensor in zip(caches, case.tensors[1:3], strict=True):
        tensor.copy_(cache.masked_fill(past[:, None, :, None], math.nan))


def finished(stream: torch.cuda.Stream, rescue: Callable[[], object]) -> bool:
    """Whether what a stream holds ends by itself; else it is let go from another stream."""
    done, deadline = stream.record_event(), time.monotonic() + 20
    while not done.query() and time.monotonic() < deadline:
        time.sleep(1e-3)
    if ended := done.query():
        return bool(ended)
    with torch.cuda.stream(torch.cuda.Stream()):
        rescue()
    torch.cuda.synchronize()
    return False


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what a step launches, compiled and run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


GROWING = [
    [1, 2, 3, 0],
    [17, 300, 1, 64],
    [4095, 4096, 4097, 2],
    [8192, 8192, 8192, 8192],
    [5, 8191, 0, 4000],
]
REPLAYED = Shape(kv_heads=4, group=4, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("default", [True, False])
def test_a_captured_graph_stays_right_while_its_sequences_grow(default: bool) -> None:
    """From nothing to a thousand tokens a split: nothing was planned when it was captured."""
    case = make_case(REPLAYED, [8192] * 4, 1, device=DEVICE)
    caches = case.tensors[1].clone(), case.tensors[2].clone()
    config, out = None if default else laid_out(64, 8, 4, stages=3), poisoned(case)
    space = None if config is None else space_of(case, config)
    graph = captured(lambda: decode_attention(*case.tensors, out=out, space=space, config=config))
    for seed, lengths in enumerate(GROWING * 2):
        filled(caches, case, lengths)
        case.tensors[0].copy_(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)))
        out.fill_(math.nan)
        graph.replay()
        check(out, truth(case))


@pytest.mark.gpu
@needs_gpu
def test_a_captured_speculation_reads_its_numbers_when_it_runs() -> None:
    case = make_case(REPLAYED, [8192] * 4, 2, device=DEVICE, **on_device(DEVICE, sinks=4, window=64))
    caches = case.tensors[1].clone(), case.tensors[2].clone()
    config = laid_out(64, 8, 2, stages=3)
    threshold = torch.full((1,), 0.1, device=DEVICE)
    gate = torch.ones(1, dtype=torch.int32, device=DEVICE)
    into, space = nothing_yet(case, config), ends_space_of(case, config)
    room = undecided(into)
    x = torch.full_like(into.early, math.nan).flatten(1)

    def step() -> None:
        named = {"into": into, "space": space, "config": config, "gate": gate}
        speculative_attention(*case.tensors, **case.options, **named)
        decide(into, threshold, gate=gate, into=room)
        receive(into.early, into.arrived, x, gate=gate)

    graph, priorities = captured(step), set()
    for seed, lengths in enumerate(GROWING * 2):
        filled(caches, case, lengths)
        case.options["sinks"].fill_(seed)
        case.options["window"].fill_((7, 128, 4000, 8190)[seed % 4])
        threshold.fill_(0.05 + 0.2 * seed)
        for tensor in (*into[:2], x):
            tensor.fill_(math.nan)
        graph.replay()
        check_speculation(case, float(threshold), into, room)
        assert torch.equal(x, into.early.flatten(1))
        assert not into.arrived.any()
        priorities.add(int(room.priority))
    assert priorities == {0, 2}
    x.fill_(math.nan)
    gate.zero_()
    graph.replay()
    assert bool(x.isnan().all())


@pytest.mark.gpu
@needs_gpu
def test_two_streams_with_workspaces_of_their_own() -> None:
    config, speculative = laid_out(32, 16, 4, stages=3), laid_out(32, 16, 4, stages=3)
    first = make_case(REPLAYED, [4000, 1, 900, 8000], 3, capacity=8192, device=DEVICE)
    other = make_case(REPLAYED, [77, 8192, 5000, 16], 4, capacity=8192, device=DEVICE, sinks=4, window=640)
    outs = [poisoned(first) for _ in range(30)]
    intos = [nothing_yet(other, speculative) for _ in range(30)]
    spaces = space_of(first, config), ends_space_of(other, speculative)
    numbers = on_device(DEVICE, sinks=4, window=640)
    decode_attention(*first.tensors, out=outs[0], space=spaces[0], config=config)
    speculative_attention(*other.tensors, **numbers, into=intos[0], space=spaces[1], config=speculative)
    intos[0].arrived.zero_()
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for out, into in zip(outs, intos, strict=True):
        with torch.cuda.stream(streams[0]):
            decode_attention(*first.tensors, out=out, space=spaces[0], config=config)
        with torch.cuda.stream(streams[1]):
            speculative_attention(*other.tensors, **numbers, into=into, space=spaces[1], config=speculative)
    torch.cuda.synchronize()
    for out, into in zip(outs, intos, strict=True):
        assert torch.equal(out, outs[0])
        assert all(torch.equal(x, y) for x, y in zip(into, intos[0], strict=True))
    check(outs[0], truth(first))
    check_speculation(other, 0.1, intos[0])
    assert as_new(spaces[0], space_of(first, config))
    assert as_new(spaces[1], ends_space_of(other, speculative))


@pytest.mark.gpu
@needs_gpu
def test_a_receiver_on_another_stream_gets_the_row_and_the_norms() -> None:
    """Whichever comes first; the receiver that comes first spins until they are there."""
    ends = on_device(DEVICE, sinks=4, window=600)
    case = make_case(REPLAYED, [8192, 600, 5000, 1], 5, device=DEVICE, **ends)
    config = laid_out(32, 16, 4, stages=3)
    into, space = nothing_yet(case, config), ends_space_of(case, config)
    room = undecided(into)
    x = torch.full_like(into.early, math.nan).flatten(1)
    sender, receiver = torch.cuda.Stream(), torch.cuda.Stream()

    def send() -> None:
        with torch.cuda.stream(sender):
            speculative_attention(*case.tensors, **case.options, into=into, space=space, config=config)

    def take() -> None:
        with torch.cuda.stream(receiver):
            receive(into.early, into.arrived, x)
            decide(into, 0.1, into=room)

    def rescue() -> None:
        into.arrived.fill_(case.shape.q_heads)
        into.norms.fill_(0)

    for attempt in range(20):
        case.tensors[0].copy_(torch.randn(into.early.shape, generator=torch.Generator().manual_seed(attempt)))
        into.early.fill_(math.nan)
        x.fill_(math.nan)
        torch.cuda.synchronize()
        # In the first attempt both are compiled and loaded, which a kernel that spins could keep from ending.
        first, then = (take, send) if attempt % 2 else (send, take)
        first()
        then()
        assert finished(receiver, rescue), "the receiver waits for ever"
        torch.cuda.synchronize()
        check(x.view_as(into.early), truth(case))
        check_speculation(case, 0.1, into, room)
        assert not into.arrived.any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [0, 16])
def test_caches_of_more_than_two_to_the_31_numbers(block: int) -> None:
    case = make_case(Shape(8, 4, 128, torch.bfloat16, block=block), [100, 37], 1, capacity=128, device=DEVICE)
    q, k, v, lengths = case.tensors
    table, numbers = case.options.get("block_table"), 5 * 2**29
    if block:
        pool = torch.empty(numbers // k[0].numel(), *k.shape[1:], dtype=k.dtype, device=DEVICE)
        far, table = pool[-len(k) :], table + len(pool) - len(k)
    else:
        pool = torch.empty(2, 8, numbers // 2**11, 128, dtype=k.dtype, device=DEVICE)
        far = pool = pool[:, :, -128:]
    for cache in (k, v):
        far.copy_(cache)
        found = decode_attention(q, pool, pool, lengths, block_table=table)
        check(found, truth(Case(case.shape, (q, cache, cache, lengths), case.options)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_not_a_number_is_passed_on(dtype: torch.dtype, where: int) -> None:
    """In q, k or v, with all bits set: the launch ends, and other sequences are right."""
    case = make_case(Shape(4, 4, 128, dtype), [1000, 900, 50], 1, device=DEVICE)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    case.tensors[where].view(bits)[1].select(-2, 7).fill_(-1)
    config, stream = laid_out(32, 8, 2, stages=3), torch.cuda.Stream()
    space, out = space_of(case, config), poisoned(case)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        decode_attention(*case.tensors, out=out, space=space, config=config)
    assert finished(stream, lambda: [x.zero_() for x in space]), "the launch waits for ever"
    assert bool(out[1].isnan().any())
    assert error(out[[0, 2]], truth(case)[[0, 2]]) < BARS[dtype]
    assert as_new(space, space_of(case, config))
