"""Attention of several query tokens a sequence, each up to its place there: both layouts, against float64."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.dealt_parts import DealtConfig
from simcore.kernels.decoder.decode_attention import (
    decode_attention,
    workspace,
)
from simcore.kernels.decoder.speculative_attention import speculative_attention
from simcore.kernels.decoder.split_kv import MOST_QUERY_TOKENS
from tests.attention_cases import BARS, FP8, Case, Shape, error, make_case, some_lengths, truth_and_logs
from tests.test_attention_logs import Config, attended, gpu_layouts, joined, near, reference_is_the_truth
from tests.test_dealt_parts import laid_out as dealt
from tests.test_triton_attention import (
    BLOCKS,
    DEVICE,
    GPU_BLOCKS,
    GPU_FORMATS,
    HEAD_DIMS,
    as_new,
    check,
    interpreted,
    laid_out,
    needs_gpu,
    poisoned,
)
from tests.thorough import first, slow

torch.set_num_threads(1)
LAYOUTS = [laid_out(16, 1), laid_out(16, 3), dealt(5)]
PAGED = Shape(kv_heads=2, group=3, head_dim=64, block=16)
Q, K = torch.zeros(2, 3, 4, 16), torch.zeros(2, 2, 40, 16)
LENGTHS = torch.ones(2, dtype=torch.int32)
WIDE = torch.zeros(2, 5, 52, 16)
LARGE, MANY = torch.zeros(2, 8, 8, 256), torch.zeros(2, 1, 40, 256)


def small_case(seed: int) -> Case:
    """Two to eight query tokens; lengths below that, and of none and one; every table, format and window."""
    rng = np.random.default_rng([seed, 31])
    queries = 2 + seed % 7
    capacity = int(rng.integers(1, 60))
    shape = Shape(
        kv_heads=1 + seed % 2,
        group=1 + seed // 2 % 4,
        head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)],
        dtype=torch.float16 if seed % 3 == 0 else torch.float32,
        kv_dtype=FP8 if seed % 5 == 4 else None,
        block=BLOCKS[seed % len(BLOCKS)],
        spare=seed % 4 < 2,
    )
    options: dict[str, Any] = [
        {},
        {"sinks": int(rng.integers(0, 12)), "window": int(rng.integers(1, 20))},
        {"scale": 0.3},
        [{"window": 7}, {"sinks": 3}, {"sinks": 0, "window": 0}, {"sinks": 2, "window": 100}][seed // 4 % 4],
    ][seed % 4]
    lengths = [*some_lengths(rng, int(rng.integers(1, 3)), capacity), min(capacity, queries - 1)]
    return make_case(shape, lengths, seed, capacity=capacity, queries=queries, **options)


@slow
@interpreted
@pytest.mark.parametrize("seed", first(4, range(32)))
def test_query_tokens_of_random_shapes(seed: int) -> None:
    case, random = small_case(seed), Random(f"queries {seed}")
    q, kv_heads = case.tensors[0], case.shape.kv_heads
    by_lengths = dealt(random.choice([1, 2, 3, 5, 7, 12]), random.choice([1, 2, 4]))
    split = laid_out(random.choice([16, 32]), random.choice([1, 3, 8]), random.choice([1, 2]))
    expected, logs = truth_and_logs(case)
    for config in (split, by_lengths):
        out, space = poisoned(case, spare=seed % 2 == 0), workspace(q, kv_heads, config)
        lse = torch.full(logs.shape, math.nan)
        given = decode_attention(*case.tensors, **case.options, out=out, lse=lse, space=space, config=config)
        assert given is out
        check(out, expected)
        assert error(out.flatten(0, 1), expected.flatten(0, 1)) < BARS[out.dtype]
        near(lse, logs)
        assert as_new(space, workspace(q, kv_heads, config))


@pytest.mark.parametrize("seed", range(16))
def test_query_tokens_of_the_reference_are_the_truth(seed: int) -> None:
    reference_is_the_truth(small_case(seed))


@slow
@pytest.mark.parametrize("config", first(2, [LAYOUTS[1], LAYOUTS[2], LAYOUTS[0]]))
def test_each_query_token_attends_as_one_alone(config: Config) -> None:
    """Over so many tokens as there were when it was the last."""
    case = make_case(PAGED, [50, 2, 17], 3, queries=4, device=DEVICE)
    found, logs = attended(case, config)
    q, k, v, lengths = case.tensors
    for token in range(4):
        alone = (q[:, token], k, v, (lengths - 3 + token).clamp(min=0))
        one, log = attended(Case(case.shape, alone, case.options), config)
        assert error(found[:, token], one.double()) < BARS[torch.float32]
        near(logs[:, token], log.double())


@pytest.mark.parametrize("config", LAYOUTS)
@pytest.mark.parametrize("ends", first(1, [(5, 18), (0, 0), (4, 0), (0, 1)]))
def test_each_query_token_has_its_window(config: Config, ends: tuple[int, int]) -> None:
    """Of more than a block, past the sinks and running into them."""
    sinks, window = ends
    case = make_case(PAGED, [60, 21, 4], 3, queries=3, device=DEVICE, sinks=sinks, window=window)
    attended(case, config)


@slow
@pytest.mark.parametrize("config", LAYOUTS)
def test_one_query_token_may_have_a_dimension(config: Config) -> None:
    case = make_case(PAGED, [50, 0, 17], 3, queries=1, device=DEVICE)
    q, *others = case.tensors
    plain = make_case(PAGED, [50, 0, 17], 3, device=DEVICE)
    found, logs = attended(case, config)
    expected, expected_logs = attended(Case(plain.shape, (q[:, 0], *others), case.options), config)
    assert torch.equal(found[:, 0], expected)
    assert torch.equal(logs[:, 0], expected_logs)


def test_query_tokens_of_no_sequence() -> None:
    q, k, lengths = (x.to(DEVICE) for x in (Q[:0], K[:0], LENGTHS[:0]))
    assert decode_attention(q, k, k, lengths).shape == (0, 3, 4, 16)


@interpreted
def test_query_tokens_have_a_default_layout() -> None:
    attended(make_case(PAGED, [40, 3, 0], 1, queries=3, device=DEVICE), None)


@slow
@interpreted
@pytest.mark.parametrize("parts", first(3, [1, 3, 10, 6, 2, 9]))
@pytest.mark.parametrize("warps", first(1, [1, 4]))
def test_heads_of_so_many_parts(parts: int, warps: int) -> None:
    case = make_case(Shape(1, 5, 64, block=16), [16 * parts - 3], parts, queries=6, device=DEVICE)
    attended(case, DealtConfig(16, 99, 1, warps, 2))


@slow
@pytest.mark.parametrize("config", LAYOUTS)
def test_a_prefix_that_all_queries_attend_is_joined(config: Config) -> None:
    """To it the query tokens are further heads of one."""
    case = make_case(Shape(kv_heads=2, group=3, head_dim=80), [60, 41, 23], 4, queries=4, device=DEVICE)
    q, k, v, lengths = case.tensors
    as_heads = q.unflatten(2, (2, -1)).transpose(1, 2).flatten(1, 3)
    prefix = Shape(kv_heads=2, group=12, head_dim=80)
    held = torch.full_like(lengths, 19)
    out, log = attended(Case(prefix, (as_heads, k[:, :, :19], v[:, :, :19], held), {}), config)
    before = out.view(3, 2, 4, 3, 80).transpose(1, 2), log.view(3, 2, 4, 3).transpose(1, 2)
    behind = attended(Case(case.shape, (q, k[:, :, 19:], v[:, :, 19:], lengths - 19), {}), config)
    found, logs = joined([(before[0].reshape(q.shape), before[1].reshape(q.shape[:-1])), behind])
    whole, expected = truth_and_logs(case)
    assert error(found, whole) < BARS[torch.float32]
    near(logs, expected)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("q has to be .batch, 1 to 8 query tokens", {"q": torch.zeros(2, MOST_QUERY_TOKENS + 1, 4, 16)}),
        ("q has to be .batch, 1 to 8 query tokens", {"q": torch.zeros(2, 0, 4, 16)}),
        ("q has to be", {"q": torch.zeros(2, 1, 3, 4, 16)}),
        ("q: 5 query tokens of 26 heads a KV head, of 16 numbers, are too many; .* 128 queries", {"q": WIDE}),
        (
            "q: 8 .* of 8 heads .* of 256 numbers, .* 14528 numbers at most",
            {"q": LARGE, "k": MANY, "v": MANY},
        ),
        ("contiguous", {"q": torch.zeros(2, 3, 16, 4).transpose(2, 3)}),
        ("2 queries over 1 sequences", {"k": K[:1], "v": K[:1]}),
        ("out has to be", {"out": Q[:, 0]}),
        ("lse has to be contiguous fp32 .2, 3, 4.,", {"lse": torch.zeros(2, 4)}),
        ("lse has to be contiguous fp32 .2, 3, 4.,", {"lse": torch.zeros(2, 4, 3).transpose(1, 2)}),
        ("another shape or layout", {"space": workspace(Q[:, 0], 2, laid_out(16, 3))}),
    ],
)
def test_query_tokens_that_do_not_fit_are_refused(words: str, change: dict[str, Tensor]) -> None:
    given = {"q": Q, "k": K, "v": K, "lengths": LENGTHS} | change
    with pytest.raises(ValueError, match=words):
        decode_attention(**given, config=laid_out(16, 3))


def test_speculation_has_one_query_token() -> None:
    with pytest.raises(ValueError, match=r"q has to be .batch, q_heads, 16., nothing empty"):
        speculative_attention(Q, K, K, LENGTHS, sinks=1, window=1)


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(18))
def test_query_tokens_on_a_gpu(index: int) -> None:
    """To 128 queries a KV head."""
    rng = np.random.default_rng([index, 33])
    dtype, kv_dtype = GPU_FORMATS[index % 6]
    kv_heads, group = [(8, 4), (2, 8), (4, 1), (1, 16), (2, 5), (8, 3)][index // 3 % 6]
    queries = [2, 4, 8, 3, 5][index % 5]
    head_dim = (
        int(rng.choice([64, 80, 128])) if dtype == torch.float32 else int(rng.choice([64, 96, 128, 256]))
    )
    shape = Shape(kv_heads, group, head_dim, dtype, kv_dtype, int(rng.choice(GPU_BLOCKS)))
    ends = {"sinks": int(rng.integers(2, 15)), "window": 2 * int(rng.integers(8, 700)) + 1}
    for batch in (1, 7, 30):
        lengths = some_lengths(rng, batch, 4096)
        case = make_case(
            shape, lengths, index, capacity=4096, queries=queries, device=DEVICE,
            **(ends if index % 4 == 1 else {}),
        )  # fmt: skip
        for config in [*gpu_layouts(case), None]:
            attended(case, config)


@pytest.mark.gpu
@needs_gpu
def test_wide_layouts_of_query_tokens_on_a_gpu() -> None:
    case = make_case(Shape(8, 8, 128, torch.bfloat16), [4000, 0, 5, 1999], 1, queries=8, device=DEVICE)
    for config in gpu_layouts(case):
        attended(case, replace(config, warps=8))


@pytest.mark.gpu
@needs_gpu
def test_a_graph_serves_query_tokens_of_all_lengths() -> None:
    case = make_case(Shape(8, 4, 128, torch.bfloat16), [4000] * 8, 1, queries=4, device=DEVICE)
    random = Random(1)
    for config in gpu_layouts(case):
        out, lse = poisoned(case), torch.full(case.tensors[0].shape[:-1], math.nan, device=DEVICE)
        case.tensors[3].fill_(4000)
        decode_attention(*case.tensors, out=out, lse=lse, config=config)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode_attention(*case.tensors, out=out, lse=lse, config=config)
        for _ in range(5):
            case.tensors[3].copy_(torch.tensor([random.choice([0, 1, 3, 17, 900, 4000]) for _ in range(8)]))
            out.fill_(math.nan)
            lse.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            expected, logs = truth_and_logs(case)
            assert error(out.flatten(0, 1), expected.flatten(0, 1)) < BARS[torch.bfloat16]
            near(lse, logs)
