"""Attention dealt evenly to a fixed number of programs, against float64: ragged lengths, heads cut into few
parts and into many, a workspace used again."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from simcore.kernels.decoder.decode_attention import Workspace, decode_attention
from simcore.kernels.decoder.even_attention import (
    FEW_PARTS,
    MOST_SEQUENCES,
    EvenConfig,
    _begin,
    _program_of,
    _programs,
    even_config,
    even_constants,
    even_workspace,
)
from simcore.kernels.decoder.split_kv import cache, padded
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


def laid_out(programs: int, slices: int = 1, least: int = 1) -> EvenConfig:
    return EvenConfig(block=16, programs=programs, stages=1, warps=4, slices=slices, least=least)


def space_of(case: Case, config: EvenConfig) -> Workspace:
    return even_workspace(case.tensors[0], case.shape.kv_heads, config)


def attended(case: Case, config: EvenConfig) -> torch.Tensor:
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
    random = Random(f"even {seed}")
    attended(small_case(seed), laid_out(random.choice([1, 2, 3, 5, 7, 12]), random.choice([1, 2, 4])))


@interpreted
@pytest.mark.parametrize("seed", first(2, range(12)))
def test_a_head_may_have_many_parts(seed: int) -> None:
    random = Random(f"many {seed}")
    shape = Shape(kv_heads=1, group=random.choice([1, 3, 8]), head_dim=random.choice([16, 64, 100]))
    lengths = random.sample([random.randint(250, 400), 0, random.randint(1, 16), random.randint(17, 60)], 4)
    config = laid_out(random.randint(2 * FEW_PARTS + 2, 3 * FEW_PARTS), random.choice([1, 4]))
    attended(make_case(shape, lengths, seed, device=DEVICE), config)


@slow
@interpreted
def test_the_number_of_programs_does_not_matter() -> None:
    case = make_case(PAGED, [70, 0, 3, 41], 1, capacity=96, device=DEVICE)
    outs = [attended(case, laid_out(programs, least=least)) for programs, least in ((1, 1), (5, 1), (9, 3))]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


@interpreted
def test_nobody_has_a_token() -> None:
    assert not attended(make_case(PAGED, [0, 0], 1, capacity=32, device=DEVICE), laid_out(3)).any()


def test_a_workspace_serves_any_batch() -> None:
    config = laid_out(5)
    cases = [
        make_case(PAGED, lengths, 1, capacity=96, device=DEVICE) for lengths in ([0, 37, 70], [90], [1, 2])
    ]
    space, outs = space_of(cases[0], config), []
    for case in (cases[0], *cases):
        out = poisoned(case)
        decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
        check(out, truth(case))
        assert as_new(space, space_of(case, config))
        outs.append(out)
    assert torch.equal(outs[0], outs[1])


def test_what_cannot_be_dealt_is_refused() -> None:
    many = MOST_SEQUENCES + 1
    q, k = torch.zeros(many, 1, 16), torch.zeros(many, 1, 1, 16)
    with pytest.raises(ValueError, match=f"at most {MOST_SEQUENCES} sequences are dealt evenly, not {many}"):
        decode_attention(q, k, k, torch.zeros(many, dtype=torch.int32), config=laid_out(2))
    case = make_case(PAGED, [5], 1, capacity=96)
    with pytest.raises(ValueError, match="made for another shape or layout"):
        decode_attention(*case.tensors, **case.options, space=space_of(case, laid_out(3)), config=laid_out(2))
    with pytest.raises(ValueError, match="programs: a layout cannot have 0; it has to be 1 or more"):
        laid_out(0)
    with pytest.raises(ValueError, match="programs: a layout cannot have 4097; it has to be 4096 or less"):
        laid_out(4097)
    with pytest.raises(ValueError, match="block: a layout cannot have 8; it has to be 16 or more"):
        EvenConfig(block=8, programs=1, stages=1, warps=4, slices=1)
    with pytest.raises(ValueError, match="warps: a layout cannot have 16"):
        EvenConfig(block=16, programs=1, stages=1, warps=16, slices=1)
    narrow = make_case(Shape(1, 2, 16), [40], 1)
    with pytest.raises(ValueError, match="slices: a layout cannot have 8 for 4 parts of 16 columns"):
        decode_attention(*narrow.tensors, config=laid_out(2, slices=8))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [16, 33, 64, 128, 256])
def test_the_default_layout_fits_narrow_heads_and_small_gpus(kv_heads: int, head_dim: int) -> None:
    for shared_bytes in (99 * 1024, 227 * 1024):
        gpu = Gpu(shared_bytes=shared_bytes)
        config = even_config(kv_heads=kv_heads, head_dim=head_dim, kv_bytes=2, gpu=gpu)
        q, k = torch.zeros(1, kv_heads, head_dim), torch.zeros(1, kv_heads, 64, head_dim)
        lengths = torch.zeros(1, dtype=torch.int32)
        even_constants(q, cache(q, k, k, lengths, None, (None, None)), config)
        row = padded(head_dim) * 2
        assert config.stages == 2 or 2 * (config.stages - 1) * config.block * row <= shared_bytes - 8192


@triton.jit
def _dealt_kernel(
    total, heads, count_ptr, begins_ptr, owners_ptr, PROGRAMS: tl.constexpr, LEAST_BLOCKS: tl.constexpr
):
    """Writes down how many programs share the blocks, where each begins, and whose each block is."""
    at = tl.program_id(0)
    programs = _programs(total, heads, PROGRAMS, LEAST_BLOCKS)
    share, rest = total // programs, total % programs
    if at == 0:
        tl.store(count_ptr, programs)
    if at <= programs:
        tl.store(begins_ptr + at, _begin(at, share, rest, programs))
    if at < total:
        tl.store(owners_ptr + at, _program_of(at, total, share, rest, programs))


def dealt(total: int, heads: int, programs: int, least: int = 1) -> tuple[list[int], list[int]]:
    """The first block of each program, and the program of each block."""
    count, begins, owners = (
        torch.full((n,), -1, dtype=torch.int32, device=DEVICE) for n in (1, programs + 1, total)
    )
    grid = (max(total, programs + 1),)
    _dealt_kernel[grid](total, heads, count, begins, owners, PROGRAMS=programs, LEAST_BLOCKS=least)
    return begins.tolist()[: int(count) + 1], owners.tolist()


@interpreted
@pytest.mark.parametrize("seed", first(4, range(40)))
def test_each_block_has_one_program_and_no_program_many_more(seed: int) -> None:
    random = Random(f"dealt {seed}")
    programs, least = random.choice([1, 7, 32, 132, 264]), random.choice([1, 2, 5])
    heads = random.randint(1, 40)
    total = heads + random.randint(0, 300)
    begins, owners = dealt(total, heads, programs, least)
    assert (begins[0], begins[-1]) == (0, total)
    own = [end - begin for begin, end in pairwise(begins)]
    assert min(own) >= 1
    assert max(own) - min(own) <= 1
    assert owners == [program for program, count in enumerate(own) for _ in range(count)]
    # At most one program in sixteen is idle.
    there = min(programs, -(-total // least))
    assert 15 * there <= 16 * len(own) <= 16 * there


@interpreted
@pytest.mark.parametrize(
    ("heads", "blocks", "wanted"),
    [(16, 8, 128), (64, 2, 128), (128, 1, 128), (136, 2, 132), (264, 1, 132), (256, 1, 128), (33, 9, 132)],
)
def test_heads_of_equal_lengths_are_cut_alike(heads: int, blocks: int, wanted: int) -> None:
    """By as many programs as divide them, if that leaves few of 132 idle: 136 heads are cut anyhow."""
    begins, _ = dealt(heads * blocks, heads, 132)
    assert len(begins) - 1 == wanted
    if heads != 136 and blocks % max(1, wanted // heads) == 0:
        assert len({end - begin for begin, end in pairwise(begins)}) == 1


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 64])
def test_heads_have_no_more_parts_than_the_layout_says(kv_heads: int) -> None:
    """Whatever the lengths, and by whatever number of programs the kernel chooses."""
    config = even_config(kv_heads=kv_heads, head_dim=128, kv_bytes=2, gpu=Gpu())
    for seed in range(100):
        random = Random(seed)
        blocks = [random.choice([0, 1, 2, 50, 3000]) for _ in range(random.randint(1, 8))]
        total = kv_heads * sum(blocks)
        most = min(config.programs, -(-total // config.least))
        for programs in {most, max(1, 15 * most // 16)} if total else ():
            start = 0
            for count in blocks:
                for _ in range(kv_heads if count else 0):
                    begins, last = (((at + 1) * programs - 1) // total for at in (start, start + count - 1))
                    assert last - begins + 1 <= config.parts(kv_heads)
                    start += count


@interpreted
@pytest.mark.parametrize("parts", first(5, [1, 4, 5, 8, 9, 2, 3, 17]))
def test_a_head_of_so_many_parts_is_summed(parts: int) -> None:
    """By the program that ends it, up to four; by several queries at once, up to eight; by slices, beyond."""
    shape = Shape(kv_heads=1, group=5, head_dim=64, block=16)
    attended(make_case(shape, [16 * parts - 3], parts, device=DEVICE), laid_out(parts))


@interpreted
def test_heads_that_begin_within_a_program_are_summed() -> None:
    """Two heads of nine blocks by eight programs: each has parts that begin and end at a program's bounds and
    between them."""
    attended(make_case(PAGED, [16 * 9, 16 * 9], 3, device=DEVICE), laid_out(8))
    attended(make_case(PAGED, [16 * 9, 16 * 11], 3, device=DEVICE), laid_out(7))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(30))
def test_on_a_gpu(index: int) -> None:
    """150 ragged shapes in 30 layouts; in a captured graph the lengths may change."""
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
        q = case.tensors[0]
        config = even_config(
            kv_heads=kv_heads, head_dim=shape.head_dim, kv_bytes=shape.stored.itemsize, gpu=gpu_of(q)
        )
        out, space = poisoned(case), space_of(case, config)
        for _ in ("once", "again"):
            out.fill_(float("nan"))
            decode_attention(*case.tensors, **case.options, out=out, space=space, config=config)
            assert error(out, truth(case)) < BARS[out.dtype], (str(shape), lengths)
            assert as_new(space, space_of(case, config))


@pytest.mark.gpu
@needs_gpu
def test_one_graph_serves_all_lengths() -> None:
    shape = Shape(8, 4, 128, torch.bfloat16)
    case = make_case(shape, [4000] * 24, 1, capacity=4000, device=DEVICE)
    config = even_config(kv_heads=8, head_dim=128, kv_bytes=2, gpu=gpu_of(case.tensors[0]))
    out, space = poisoned(case), space_of(case, config)

    def attend() -> None:
        decode_attention(*case.tensors, out=out, space=space, config=config)

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
    q = case.tensors[0]
    attended(case, even_config(kv_heads=1, head_dim=head_dim, kv_bytes=2, gpu=gpu_of(q)))
