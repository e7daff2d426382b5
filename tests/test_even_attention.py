"""Attention dealt evenly to a fixed number of programs, against float64: ragged lengths, heads cut into few
parts and into many, a workspace used again."""

from random import Random

import numpy as np
import pytest
import torch

from simcore.kernels.decoder.decode_attention import Workspace, decode_attention
from simcore.kernels.decoder.even_attention import (
    FEW_PARTS,
    MOST_SEQUENCES,
    EvenConfig,
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


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 64])
def test_heads_have_no_more_parts_than_the_layout_says(kv_heads: int) -> None:
    """Whatever the lengths: counted here as the kernel counts them."""
    config = even_config(kv_heads=kv_heads, head_dim=128, kv_bytes=2, gpu=Gpu())
    for seed in range(200):
        random = Random(seed)
        blocks = [random.choice([0, 1, 2, 50, 3000]) for _ in range(random.randint(1, 8))]
        total = kv_heads * sum(blocks)
        programs = min(config.programs, -(-total // config.least))
        start = 0
        for count in blocks:
            for _ in range(kv_heads if count else 0):
                begins, last = (((at + 1) * programs - 1) // total for at in (start, start + count - 1))
                assert begins * total // programs <= start < (begins + 1) * total // programs
                assert last - begins + 1 <= config.parts(kv_heads)
                start += count


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
