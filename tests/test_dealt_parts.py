"""Attention over sequences that are cut by their lengths, against float64: ragged lengths, few parts of a
head and many, a workspace used again; and the parts themselves against their formula."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from simcore.kernels.decoder.dealt_parts import (
    FEW,
    LEAST_TOKENS,
    MOST_DEALT,
    MOST_OF_HEAD,
    DealtConfig,
    dealt_config,
    dealt_constants,
    dealt_part,
    even_parts,
)
from simcore.kernels.decoder.decode_attention import (
    FEW_PAIRS,
    SHORT,
    SMALL_BYTES,
    DecodeConfig,
    Workspace,
    config_for,
    config_in_step,
    decode_attention,
    decode_config,
    workspace,
)
from simcore.kernels.decoder.split_kv import Cache, cache, depth_that_fills, depth_that_fits, padded
from simcore.kernels.gpu import Gpu, gpu_of
from tests.attention_cases import BARS, Case, Shape, error, make_case, some_lengths, truth
from tests.test_triton_attention import (
    DEVICE,
    GPU_BLOCKS,
    GPU_FORMATS,
    GPU_HEAD_DIMS,
    HEADS,
    as_new,
    check,
    interpreted,
    needs_gpu,
    poisoned,
    small_case,
)
from tests.thorough import first, slow

PAGED = Shape(kv_heads=2, group=5, head_dim=64, block=16)


def laid_out(portions: int, slices: int = 1, least: int = 1, most: int = 64, even: int = 0) -> DealtConfig:
    return DealtConfig(
        block=16, portions=portions, stages=1, warps=4, slices=slices, least=least, most=most, even=even
    )


def usual(head_dim: int, kv_bytes: int, gpu: Gpu, pairs: int = 72, capacity: int = 8192) -> DealtConfig:
    """The default layout."""
    return dealt_config(head_dim=head_dim, kv_bytes=kv_bytes, gpu=gpu, pairs=pairs, capacity=capacity)


def space_of(case: Case, config: DealtConfig) -> Workspace:
    return workspace(case.tensors[0], case.shape.kv_heads, config)


def attended(case: Case, config: DealtConfig) -> torch.Tensor:
    """What it gives, checked, with a workspace that it left as new."""
    out, space = poisoned(case), space_of(case, config)
    decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
    check(out, truth(case))
    assert as_new(space, space_of(case, config))
    return out


@interpreted
@pytest.mark.parametrize("seed", first(5, range(48)))
def test_random_shapes(seed: int) -> None:
    """Every group, head dimension, format, table and window of the tests of attention."""
    random = Random(f"dealt {seed}")
    layout = laid_out(random.choice([1, 2, 3, 5, 12]), random.choice([1, 2, 4]))
    attended(small_case(seed), replace(layout, even=random.choice([0, 2, 5])))


@slow
@interpreted
@pytest.mark.parametrize("even", first(3, [1, 2, 3, FEW, FEW + 1]))
def test_nearly_equal_lengths_have_as_many_parts(even: int) -> None:
    lengths = [16 * even + n for n in (9, 15, 5, 1)]
    case = make_case(PAGED, [2 * n for n in lengths], even, capacity=400, device=DEVICE)
    attended(case, laid_out(2, 2, even=even))


@slow
@interpreted
@pytest.mark.parametrize("seed", first(2, range(12)))
def test_a_head_may_have_many_parts(seed: int) -> None:
    random = Random(f"many {seed}")
    shape = Shape(kv_heads=1, group=random.choice([1, 3, 8]), head_dim=random.choice([16, 64, 100]))
    lengths = random.sample([random.randint(250, 400), 0, random.randint(1, 16), random.randint(17, 60)], 4)
    attended(make_case(shape, lengths, seed, device=DEVICE), laid_out(99, random.choice([1, 4])))


@interpreted
@pytest.mark.parametrize("parts", first(5, [1, FEW, FEW + 1, 2, 3, 17]))
def test_a_head_of_so_many_parts_is_summed(parts: int) -> None:
    """By several queries at once, up to eight; by slices, beyond."""
    shape = Shape(kv_heads=1, group=5, head_dim=64, block=16)
    attended(make_case(shape, [16 * parts - 3], parts, device=DEVICE), laid_out(99, 2))


@slow
@interpreted
def test_the_number_of_parts_does_not_matter() -> None:
    case = make_case(PAGED, [70, 0, 3, 41], 1, capacity=96, device=DEVICE)
    outs = [attended(case, laid_out(portions, least=least)) for portions, least in ((1, 1), (20, 1), (9, 3))]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


@interpreted
def test_nobody_has_a_token() -> None:
    assert not attended(make_case(PAGED, [0, 0], 1, capacity=32, device=DEVICE), laid_out(3)).any()


@slow
def test_a_workspace_serves_any_lengths() -> None:
    config = laid_out(20)
    cases = [
        make_case(PAGED, lengths, 1, capacity=96, device=DEVICE)
        for lengths in ([0, 37, 70], [90, 90, 90], [1, 2, 0])
    ]
    space = space_of(cases[0], config)
    for case in (cases[0], *cases):
        out = poisoned(case)
        decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
        check(out, truth(case))
        assert as_new(space, space_of(case, config))


def test_what_cannot_be_dealt_is_refused() -> None:
    many = MOST_DEALT + 1
    q, k = torch.zeros(many, 1, 16), torch.zeros(many, 1, 1, 16)
    with pytest.raises(ValueError, match=f"at most {MOST_DEALT} sequences are dealt in parts, not {many}"):
        decode_attention(q, k, k, torch.zeros(many, dtype=torch.int32), config=laid_out(2))
    case = make_case(PAGED, [5], 1, capacity=96)
    with pytest.raises(ValueError, match="made for another shape or layout"):
        decode_attention(
            *case.tensors, **case.options, space=space_of(case, laid_out(3, most=5)), config=laid_out(2)
        )
    for even in (-1, 65):
        with pytest.raises(ValueError, match=f"even: a layout cannot have {even}; it has to be 0 to 64"):
            laid_out(2, even=even)
    bounds = {"block": 16, "portions": 1, "stages": 1, "least": 1, "most": 1, "sharers": 1}
    for name, bound in bounds.items():
        value = bound // 2
        with pytest.raises(ValueError, match=f"{name}: a layout cannot have {value}"):
            replace(laid_out(2), **{name: value})
    with pytest.raises(ValueError, match="warps: a layout cannot have 16; it has to be 1, 2, 4 or 8"):
        replace(laid_out(2), warps=16)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [16, 33, 64, 128, 256])
def test_the_default_layout_fits_narrow_heads_and_small_gpus(kv_heads: int, head_dim: int) -> None:
    for shared_bytes in (99 * 1024, 227 * 1024):
        config = usual(head_dim, 2, Gpu(shared_bytes=shared_bytes))
        q, k = torch.zeros(1, kv_heads, head_dim), torch.zeros(1, kv_heads, 64, head_dim)
        lengths = torch.zeros(1, dtype=torch.int32)
        dealt_constants(q, cache(q, k, k, lengths, None, (None, None)), config)
        row = padded(head_dim) * 2
        assert config.stages == 2 or 2 * (config.stages - 1) * config.block * row <= shared_bytes - 8192
        assert config.least * config.block == LEAST_TOKENS


def chosen(batch: int, kv_heads: int, capacity: int) -> DecodeConfig | DealtConfig:
    """The layout that a launch chooses for bf16 heads of 128 columns, four queries to a KV head."""
    q = torch.zeros(batch, 4 * kv_heads, 128, dtype=torch.bfloat16)
    k = q.new_zeros(1).expand(batch, kv_heads, capacity, 128)
    return config_for(q, Cache(k, k, None, None, None))


def test_in_a_step_only_as_many_programs_fit_a_multiprocessor_as_is_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages of plain calls and of steps: 128 programs, one each; 256 and 224, two each; parts by lengths."""
    monkeypatch.setattr("simcore.kernels.decoder.decode_attention.gpu_of", lambda x: Gpu(chained=True))

    def stages(batch: int, capacity: int, heads: int = 32, **other: Any) -> tuple[int, int]:
        q = torch.zeros(batch, heads, 128, dtype=other.get("dtype", torch.bfloat16))
        k = torch.zeros(1, dtype=torch.bfloat16).expand(batch, 8, capacity, 128)
        kv = Cache(k, k, other.get("table"), None, None)
        return config_for(q, kv).stages, config_in_step(q, kv).stages

    assert stages(1, 1024) == (4, 5)
    assert stages(1, 26_176) == stages(7, 2154) == (4, 6)
    assert stages(17, 21_000) == (4, 4)
    # Pages, groups of more than 16 queries and fp32 queries.
    assert stages(1, 1024, heads=256) == stages(1, 1024, dtype=torch.float32) == (4, 4)
    q, k = torch.zeros(1, 32, 128, dtype=torch.bfloat16), torch.zeros(64, 16, 8, 128, dtype=torch.bfloat16)
    paged = Cache(k, k, torch.zeros(1, 64, dtype=torch.int32), None, None)
    assert config_in_step(q, paged) == config_for(q, paged)
    monkeypatch.setattr("simcore.kernels.decoder.decode_attention.gpu_of", lambda x: Gpu(chained=False))
    assert stages(1, 1024) == (4, 4)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_stages_that_fill_a_multiprocessor_fit_it(programs: int, head_dim: int) -> None:
    for block_bytes in (head_dim * 2 * block for block in (16, 32, 64)):
        for shared_bytes in (99 * 1024, 227 * 1024):
            begin = depth_that_fits(block_bytes, shared_bytes // programs)
            depth = depth_that_fills(begin, block_bytes, shared_bytes, programs)
            assert begin <= depth <= max(begin, 8)
            assert begin == depth or programs * (2 * (depth - 1) * block_bytes + 8192) <= shared_bytes


def test_several_long_sequences_are_cut_by_their_lengths() -> None:
    assert isinstance(chosen(2, 8, 60_000), DealtConfig)
    assert isinstance(chosen(17, 8, SHORT + 1), DealtConfig)
    assert isinstance(chosen(MOST_DEALT, 8, 2000), DealtConfig)


def test_one_sequence_short_ones_and_small_caches_are_split_alike() -> None:
    assert isinstance(chosen(1, 8, 100_000), DecodeConfig)
    assert isinstance(chosen(200, 8, SHORT), DecodeConfig)
    assert isinstance(chosen(MOST_DEALT + 1, 8, 2000), DecodeConfig)
    assert isinstance(chosen(FEW_PAIRS, 1, 100_000), DecodeConfig)
    assert isinstance(chosen(FEW_PAIRS + 1, 1, 100_000), DealtConfig)
    tokens = SMALL_BYTES // (16 * 2 * 128 * 2)
    assert isinstance(chosen(8, 2, tokens), DecodeConfig)
    assert isinstance(chosen(8, 2, tokens + 1), DealtConfig)


def split_alike(pairs: int, capacity: int, group: int = 4) -> DecodeConfig:
    return decode_config(batch=pairs, q_heads=group, kv_heads=1, head_dim=128, capacity=capacity, kv_bytes=2)


def test_splits_fill_one_wave() -> None:
    """Of two programs a multiprocessor, or of one with larger blocks; each has a block of tokens at least."""
    for pairs in range(1, 264):
        for capacity in (64, 100, 700, 1281, 3000, 9000, 10**5):
            config = split_alike(pairs, capacity)
            places = 132 if config.block == 128 or (config.block == 64 and config.splits > 64) else 264
            assert config.splits * pairs <= places
            assert config.splits * config.block <= max(capacity, config.block)
            few = (config.splits + 1) * pairs * 16 <= 15 * places
            short = (config.splits + 1) * 64 > capacity or capacity <= 1280 or config.splits < 16
            assert not few or short or config.splits == 1 or pairs < 5, (pairs, capacity, config)


@slow
def test_splits_that_read_slowly_have_larger_blocks() -> None:
    assert {split_alike(pairs, 9000).block for pairs in (29, 38, 64)} == {32}
    for pairs in (34, 37):
        assert (split_alike(pairs, 9000).splits, split_alike(pairs, 9000).block) == (7, 64)
    for pairs in (30, 33):
        assert (split_alike(pairs, 9000).splits, split_alike(pairs, 9000).block) == (4, 128)
    for group in (1, 4, 5, 8):
        for pairs in range(1, 60):
            for capacity in range(100, 4000, 37):
                config = split_alike(pairs, capacity, group)
                assert config.splits not in (7, 8) or config.block >= 64


def test_crowded_multiprocessors_get_large_blocks() -> None:
    """More pairs than multiprocessors, in waves of two each that are too empty: three with large blocks."""
    for batch, block, stages in (
        (16, 64, 4),
        (17, 64, 3),
        (25, 32, 4),
        (33, 32, 4),
        (34, 64, 3),
        (72, 64, 3),
    ):
        config = chosen(batch, 8, 1152)
        assert isinstance(config, DecodeConfig)
        assert (config.splits, config.block, config.stages) == (1, block, stages)


@triton.jit
def _parts_kernel(
    into_ptr, lengths_ptr, batch, reach, capacity,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr,
    PORTIONS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Writes down the part of each program."""
    program = tl.program_id(0)
    sequence, head, number, own = dealt_part(
        program, lengths_ptr, batch, reach, capacity,
        BLOCK, WINDOWED, BATCH, HEADS, PORTIONS, LEAST, MOST, EVEN,
    )  # fmt: skip
    tl.store(into_ptr + 4 * program, sequence)
    tl.store(into_ptr + 4 * program + 1, head)
    tl.store(into_ptr + 4 * program + 2, number)
    tl.store(into_ptr + 4 * program + 3, own)


def parts_of(
    lengths: Sequence[int],
    heads: int,
    config: DealtConfig,
    *,
    capacity: int = 1 << 20,
    reach: int | None = None,
) -> list[list[int]]:
    """Sequence, head, number and count of each part, and the sequence of the program after the last one."""
    programs = config.programs(len(lengths) * heads) + 1
    into = torch.full((programs, 4), -1, dtype=torch.int32, device=DEVICE)
    _parts_kernel[(programs,)](
        into, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), len(lengths), reach or 0, capacity,
        BLOCK=config.block, WINDOWED=reach is not None, BATCH=int(triton.next_power_of_2(len(lengths))),
        HEADS=heads, PORTIONS=config.portions, LEAST=config.least, MOST=config.most, EVEN=config.even,
    )  # fmt: skip
    return into.tolist()


def cut(blocks: Sequence[int], heads: int, config: DealtConfig) -> list[int]:
    """The parts of a head of each sequence whose lengths differ, in float64."""
    total, counts = sum(blocks), []
    for i, own in enumerate(blocks):
        size = max(config.least, math.ceil(math.sqrt(total * sum(blocks[i:])) * heads / config.portions))
        counts.append(max(1, min(config.most, -(-own // (size_at_once(blocks, heads, config) or size)))))
    return counts


def size_at_once(blocks: Sequence[int], heads: int, config: DealtConfig) -> int:
    """The blocks of a part where all run at once, 0 where they do not."""
    spare, all_blocks = config.portions - len(blocks) * heads, sum(blocks) * heads
    size = all_blocks // max(1, spare) + 1
    late = size > 33 / 32 * (all_blocks // config.portions) + 2
    return 0 if spare < 1 or late else max(size, (config.least + 1) // 2)


def in_order(counts: Sequence[int], heads: int) -> list[list[int]]:
    """The rows of `parts_of` where a head of each sequence has so many parts."""
    return [
        [sequence, head, number, count]
        for sequence, count in enumerate(counts)
        for head in range(heads)
        for number in range(count)
    ]


@slow
@interpreted
@pytest.mark.parametrize("reach", [None, 97])
def test_lengths_are_nearly_equal_from_seven_eighths_on(reach: int | None) -> None:
    """And where even parts would not be too short."""
    config = laid_out(5, least=4, even=3)
    for lengths, alike in (
        ([160, 140, 150], True),
        ([160, 139, 150], reach is not None),
        ([160, 0, 150], False),
        ([96, 96, 96], False),
        ([97, 97, 97], True),
        ([0, 0, 0], False),
    ):
        attended = [n if reach is None else min(n, reach) for n in lengths]
        rows = parts_of(lengths, 2, config, capacity=500, reach=reach)
        counts = [3] * 3 if alike else cut([-(-n // 16) for n in attended], 2, config)
        expected = in_order(counts, 2)
        assert rows[: len(expected)] == expected, lengths
        assert all(row[0] >= 3 for row in rows[len(expected) :])


def test_even_parts_fill_the_gpu_once() -> None:
    """With as many parts as there is room for, or none."""
    for pairs in range(1, 400):
        for blocks in (10, 128, 5000):
            parts = even_parts(pairs, blocks, 264)
            if parts:
                assert 198 <= parts * pairs <= 264
                assert parts == min(MOST_OF_HEAD, 264 // pairs)
            few = pairs * blocks <= 24 * 264
            full = min(MOST_OF_HEAD, 264 // pairs) * pairs / 264
            assert bool(parts) == (full >= (0.75 if few else 0.93))
    assert all(usual(128, 2, Gpu(), pairs).programs(pairs) >= 200 for pairs in (8, 64, 264))


@interpreted
@pytest.mark.parametrize("seed", first(6, range(60)))
def test_each_part_has_one_program(seed: int) -> None:
    """Those of a head side by side, heads and sequences in order; programs beyond have none."""
    random = Random(f"parts {seed}")
    heads, batch = random.choice([1, 2, 8]), random.randint(1, 6)
    config = laid_out(random.choice([1, 5, 20]), least=random.choice([1, 2]), most=random.choice([3, 64]))
    capacity = random.choice([300, 700])
    reach = random.choice([None, 0, 50, 290])
    lengths = [random.choice([0, 1, 16, 17, 800, random.randint(0, 700)]) for _ in range(batch)]
    attended = [min(n, capacity, capacity if reach is None else reach) for n in lengths]
    counts = cut([-(-n // 16) for n in attended], heads, config)
    rows = parts_of(lengths, heads, config, capacity=capacity, reach=reach)
    expected = in_order(counts, heads)
    assert rows[: len(expected)] == expected
    assert len(rows) > len(expected)
    assert all(row[0] >= batch for row in rows[len(expected) :])


@slow
def test_there_are_programs_for_all_parts() -> None:
    """Whatever the lengths, also of many sequences and of one much longer than the others."""
    worst = 0.0
    for seed in range(300):
        random = Random(seed)
        heads, batch = random.choice([1, 2, 8, 64]), random.choice([1, 3, 30, 300, 1000])
        config = replace(
            laid_out(random.choice([1, 7, 396])),
            least=random.choice([1, 8]),
            most=random.choice([8, 64, 9999]),
        )
        blocks = [random.choice([0, 1, 9, 300, int(random.paretovariate(0.6))]) for _ in range(batch)]
        parts = heads * sum(cut(blocks, heads, config))
        assert parts <= config.programs(batch * heads)
        worst = max(worst, parts / config.programs(batch * heads))
    assert worst > 0.9


@interpreted
def test_short_parts_have_programs() -> None:
    """Those that run at once have fewer blocks than others; a cache is no longer than its parts."""
    shape = Shape(kv_heads=1, group=1, head_dim=16, block=16)
    case = make_case(shape, [128, 100], 1, capacity=128, device=DEVICE)
    assert cut([8, 7], 1, laid_out(9, least=4)) == [3, 3]
    attended(case, laid_out(9, least=4))


def test_parts_get_shorter() -> None:
    """Of equal sequences the last has the shortest parts; the first no more than a portion."""
    config = replace(laid_out(396), least=8)
    blocks = [500] * 64
    sizes = [500 / count for count in cut(blocks, 8, config)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= math.ceil(500 * 64 * 8 / 396)
    assert sizes[-1] < 0.2 * sizes[0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(30))
def test_on_a_gpu(index: int) -> None:
    """150 ragged shapes in 30 layouts."""
    rng = np.random.default_rng([index, 12])
    (dtype, kv_dtype), (kv_heads, group) = GPU_FORMATS[index % 6], HEADS[index % 10]
    shape = Shape(
        kv_heads, group, int(rng.choice([16, *GPU_HEAD_DIMS])), dtype, kv_dtype, int(rng.choice(GPU_BLOCKS))
    )
    ends = {"sinks": int(rng.integers(2, 15)), "window": 2 * int(rng.integers(8, 700)) + 1}
    for _ in range(5):
        batch = int(2 ** rng.uniform(0, 6.6))
        capacity = max(256, min(16384, 2**27 // (batch * kv_heads * shape.head_dim)) // 256 * 256)
        lengths = some_lengths(rng, batch, capacity)
        case = make_case(
            shape, lengths, index, capacity=capacity, device=DEVICE, **(ends if index % 4 == 1 else {})
        )
        gpu = gpu_of(case.tensors[0])
        config = usual(shape.head_dim, shape.stored.itemsize, gpu, batch * kv_heads, capacity)
        # Short sequences in many parts too.
        config = config if index % 2 else replace(config, least=1)
        out, space = poisoned(case), space_of(case, config)
        for _ in ("once", "again"):
            out.fill_(float("nan"))
            decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
            assert error(out, truth(case)) < BARS[out.dtype], (str(shape), lengths)
            assert as_new(space, space_of(case, config))


@pytest.mark.gpu
@needs_gpu
def test_one_graph_serves_all_lengths() -> None:
    """By the default layout."""
    shape = Shape(8, 4, 128, torch.bfloat16)
    case = make_case(shape, [4000] * 24, 1, capacity=4000, device=DEVICE)
    out = poisoned(case)

    def attend() -> None:
        decode_attention(*case.tensors, out=out)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        attend()
    random = Random(1)
    for _ in range(20):
        case.tensors[3].copy_(torch.tensor([random.choice([0, 1, 17, 900, 4000]) for _ in range(24)]))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, truth(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("head_dim", [16, 32])
def test_narrow_heads_of_many_parts_on_a_gpu(head_dim: int) -> None:
    case = make_case(Shape(1, 4, head_dim, torch.bfloat16), [20_000, 3, 900], 1, device=DEVICE)
    attended(case, usual(head_dim, 2, gpu_of(case.tensors[0])))
