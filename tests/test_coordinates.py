"""By what measured shapes lie near each other, and what their fits take them to do."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simcore.devices.fit import fit_two
from simcore.devices.interpolation import (
    Measured,
    Role,
    coordinates,
    correction,
    operand_bytes,
    staying_bytes,
    whole_tiles,
)
from simcore.devices.making import shape_text
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.prompt_attention import FEW, FEW_ROWS, MANY, Layout, blocks, floors, layout, prompts_in
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.decoder.ragged_attention import ragged_config
from simcore.kernels.long_convolution.triton_fft import is_transformed, right_angle_spectrum
from simcore.kernels.table import TABLE
from simcore.ops import linear_layer
from simcore.ops import op as ops
from simcore.ops.convolution import IMPLEMENTATIONS, Implementation, tile
from simcore.ops.linear_attention import linear_attention
from simcore.ops.op import Op
from simcore.validate.calibration.cuda import in_turn
from simcore.validate.calibration.cuda_grid import KEPT_BYTES, drawn, grid
from tests.thorough import slow


def dimensions(op: Op) -> Mapping[str, int]:
    return {name: op[name] for name, _ in op.shape}


def prefill_op(prompts: int, length: int, cached: int) -> Op:
    pairs, tokens = prompts * (length * cached + length * (length + 1) // 2), prompts * length
    heads = {"q_heads": 8, "kv_heads": 2, "head_dim": 128}
    kv_tokens = tokens + prompts * cached
    return ops.prefill_attention(tokens=tokens, kv_tokens=kv_tokens, pairs=pairs, dtype="bf16", **heads)


def prefill(prompts: int, length: int, cached: int) -> Mapping[str, int]:
    return dimensions(prefill_op(prompts, length, cached))


def tiles_of(length: int, cached: int, group: int, of: Layout) -> list[int]:
    """The blocks of keys that each tile of queries goes through: those up to its last row's own key."""
    rows = [range(i, min(i + of.rows(group), length)) for i in range(0, length, of.rows(group))]
    return [len({key // of.keys for row in part for key in range(cached + row + 1)}) for part in rows]


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 5000])
def test_layouts_of_prompts_are_those_of_the_kernel(rows: int) -> None:
    config, of = ragged_config(rows, head_dim=128, q_bytes=2, kv_bytes=2), layout(rows)
    assert (config.queries, config.block) == (of.queries, of.keys)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 63), (65, 64), (129, 0), (300, 100), (811, 517)])
def test_a_tile_goes_through_the_blocks_that_its_rows_attend(length: int, cached: int, group: int) -> None:
    for of in (FEW, MANY):
        each = tiles_of(length, cached, group, of)
        assert blocks(length, cached, group, of) == (len(each), sum(each), each[0], each[-1])


@slow
@given(st.integers(0, 400), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**4))
def test_sums_of_floors_are_those_of_each(count: int, step: int, first: int, by: int) -> None:
    assert floors(count, step, first, by) == sum((first + i * step) // by for i in range(count))


def test_programs_of_a_whole_wave_take_as_long_as_one() -> None:
    """Prompts of one tile each: 132 programs of equal length fill the card, and one more than two waves takes
    longer than two waves by what its multiprocessor takes, not by a 264th."""

    def seconds(prompts: int) -> float:
        op = prefill_op(prompts, 16, 4000)
        return whole_tiles("prefill_attention", dimensions(op)) * floor(op)

    assert seconds(32) < 1.3 * seconds(1)
    assert seconds(132) < 1.05 * seconds(131)
    assert 1.2 * seconds(132) < seconds(133) < 1.6 * seconds(132)


def floor(op: Op) -> float:
    return roofline(load_device("h200-sxm"))(op).seconds


def dealt_s(op: Op) -> float:
    """A card whose multiprocessors take programs in the order of the kernel's grid, the last tile of the last
    prompt first: 3 us, and 1 us for each block of 128 x 128 and for each program."""
    count, length, cached = prompts_in(dimensions(op))
    of, heads = layout(count * length), op["kv_heads"]
    a_block_s = 1e-6 * of.queries * of.keys / 128**2 * of.programs
    tiles = tiles_of(length, cached, op["q_heads"] // heads, of)[::-1]
    free_s = [0.0] * (132 * of.programs)
    for steps in [steps for steps in tiles for _ in range(heads)] * count:
        heapreplace(free_s, free_s[0] + a_block_s * (steps + 1))
    return 3e-6 + max(free_s)


@slow
def test_prices_of_prompts_hold_where_programs_are_dealt_out_in_turn() -> None:
    """Of 32 query heads over 8 KV heads, by the shapes that a calibration measures of up to 2,048 tokens: 120
    others are 1 % off in the median, and one in twenty by a tenth at most."""

    def measured(op: Op) -> Measured:
        launches, floor_s = launches_and_floor(op, roofline(load_device("h200-sxm")))
        return Measured(op.kind, shape_text(op), op.dtype, launches, floor_s, dealt_s(op))

    def is_small(op: Op) -> bool:
        return (op["q_heads"], op["kv_heads"]) == (32, 8) and op["kv_tokens"] <= 2048

    known = [measured(op) for op in grid(["prefill_attention"]) if is_small(op)]
    fit = fit_two([(point.launches, point.floor_s, point.median_s) for point in known])
    near = correction(fit, known, judged=False)
    others = [op for op in drawn(["prefill_attention"], 1500, 7) if is_small(op)][:120]
    off = sorted(abs(near.error(fit, measured(op)) or 0.0) for op in others)
    assert len(off) == 120
    assert off[60] < 0.01
    assert off[114] < 0.1


# -- what stays in the cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("side", [1, 2, 8, 16, 24])
def test_a_tile_works_on_the_buffers_that_its_kernel_takes(name: Implementation, side: int) -> None:
    op = tile(name, layers=2, batch=3, channels=5, side=side, outputs=side, dtype="fp32")
    y, of_filter, z = TABLE[op.kind].inputs(op, torch.Generator().manual_seed(0), torch.device("cpu"))
    if name == "flash_fft" and is_transformed(side):
        of_filter = right_angle_spectrum(torch.randn(2, 1, 2 * side, 5), side)
    assert operand_bytes(op.kind, dimensions(op)) == sum(x.nbytes for x in (y, of_filter, z))


def test_a_spectrum_is_as_long_as_its_transform_takes_it() -> None:
    for side in (*(1 << i for i in range(17)), 3, 24, 100):
        shape = {"layers": 1, "batch": 1, "channels": 1, "side": side, "outputs": side, "stored_bytes": 4}
        words = 2 * side + 2 * (side + (not is_transformed(side)))
        assert operand_bytes("tile_flash_fft", shape) == 4 * words


def test_only_tiles_are_told_apart_by_what_stays_in_the_cache() -> None:
    assert operand_bytes("matmul", {"m": 1, "n": 8, "k": 8}) is None


def layers_of(layers: int, batch: int = 1) -> Op:
    return tile("conv", layers=layers, batch=batch, channels=256, side=4, outputs=4, dtype="fp32")


def kept(op: Op, most: int = 200_000) -> bool:
    return (operand_bytes(op.kind, dimensions(op)) or 0) <= most


def jumping(op: Op, role: Role = "fit") -> Measured:
    """A tile takes 2 us from the cache, 4 from memory, and in proportion to its work besides."""
    launches, floor_s = launches_and_floor(op, roofline(load_device("h200-sxm")))
    seconds, where = (2e-6, "L2") if kept(op) else (4e-6, "cold")
    return Measured(
        op.kind, shape_text(op), "fp32", launches, floor_s, seconds + 2 * floor_s, role, cache=where
    )


@slow
def test_prices_jump_where_operands_no_longer_stay_in_the_cache() -> None:
    """Between points of one kind and of the other that lie far apart: as those of its own kind say, of which
    the next may lie on one side only, far off. Not told apart, prices are twice as far off there."""
    known = [jumping(layers_of(n, batch)) for n in (1, 4, 12, 36) for batch in (1, 4)]
    known.append(jumping(layers_of(6, 4)))
    fit = fit_two([(point.launches, point.floor_s, point.median_s) for point in known])
    near, floor = correction(fit, known), roofline(load_device("h200-sxm"))
    blind = correction(fit, [replace(point, cache="") for point in known])
    every = [layers_of(n, batch) for n in (2, 6, 10, 14, 17, 20, 30) for batch in (1, 2, 3, 4)]
    # Up to the first that does not stay nobody knows which do.
    ends = [operand_bytes("tile_conv", dimensions(layers_of(*at))) or 0 for at in ((12, 1), (6, 4))]
    tried = [op for op in every if not ends[0] < (operand_bytes(op.kind, dimensions(op)) or 0) < ends[1]]
    assert {kept(op) for op in tried} == {True, False}
    for op in tried:
        off, before = (abs(each.error(fit, jumping(op)) or 0.0) for each in (near, blind))
        assert off < 0.03 if kept(op) else off < 0.02 + 0.6 * before, op.shape
    # Nothing of its own kind on one side: that is said.
    for op, source in ((layers_of(30), "extrapolated"), (layers_of(2), "interpolated")):
        found = near.price(fit, op, *launches_and_floor(op, floor), "")
        assert found is not None
        assert found.source == source
    assert max(abs(blind.error(fit, jumping(op)) or 0.0) for op in tried) > 0.4


def test_large_tiles_do_not_stay_where_small_ones_do_not() -> None:
    known = [jumping(layers_of(n)) for n in (1, 4, 12, 36)]
    mixed = [replace(known[0], cache="cold"), *known[1:-1], replace(known[-1], cache="L2")]
    fit = fit_two([(point.launches, point.floor_s, point.median_s) for point in known])
    assert correction(fit, known).halves
    assert not correction(fit, known[:2]).halves
    with pytest.raises(InputError, match=r"cache: a tile of .* is L2 and one of .* cold"):
        correction(fit, mixed)


def test_tiles_stay_in_the_cache_up_to_the_largest_that_did() -> None:
    known = [jumping(layers_of(n)) for n in (1, 4, 12, 36)]
    sizes = {n: operand_bytes("tile_conv", dimensions(layers_of(n))) for n in (1, 4, 12, 36)}
    stayed = [n for n in sizes if kept(layers_of(n))]
    assert 1 < len(stayed) < len(sizes)
    most = staying_bytes(known)
    assert most == sizes[stayed[-1]]
    fit = fit_two([(point.launches, point.floor_s, point.median_s) for point in known])
    near, floor = correction(fit, known), roofline(load_device("h200-sxm"))
    for point, n in zip(known, sizes, strict=True):
        found = near.price(fit, layers_of(n), *launches_and_floor(layers_of(n), floor), "")
        assert found is not None
        assert found.source == "measured"
        assert found.seconds == pytest.approx(point.median_s)
    assert staying_bytes(known[: len(stayed)]) is staying_bytes(known[len(stayed) :]) is None


@pytest.mark.parametrize(
    ("stay", "cold"), [((1, 12), (4, 36)), ((4,), (4,)), ((4,), (1, 36)), ((1, 36), (4, 12))]
)
def test_a_tile_that_stays_is_smaller_than_all_that_do_not(
    stay: tuple[int, ...], cold: tuple[int, ...]
) -> None:
    points = [
        replace(jumping(layers_of(n)), cache=where)
        for where, each in (("L2", stay), ("cold", cold))
        for n in each
    ]
    with pytest.raises(InputError, match=r"cache: a tile of .* is L2 and one of .* cold"):
        staying_bytes(points)


def test_products_are_padded_whole_where_arithmetic_bounds_them() -> None:
    """From 257 rows on, which are 272: 16 more at a time up to 512."""
    for m, padded in ((257, 272), (300, 304), (500, 512), (1000, 1024)):
        shape = {"m": m, "n": 8, "k": 8}
        assert coordinates("matmul", shape)["m"] == padded
        assert whole_tiles("matmul", shape) == padded / m


@slow
def test_the_grid_has_both_sides_of_where_a_tile_stays_in_the_cache() -> None:
    """No line along the layers goes from one side to the other by more than a layer."""
    for name in IMPLEMENTATIONS:
        lines: dict[tuple[object, ...], list[tuple[int, bool]]] = {}
        for op in grid([f"tile_{name}"]):
            own = {key: size for key, size in dimensions(op).items() if key != "layers"}
            lines.setdefault((*own.items(),), []).append((op["layers"], kept(op, KEPT_BYTES)))
        jumps = [
            (low, high)
            for line in lines.values()
            for low, high in pairwise(sorted(line))
            if low[1] != high[1]
        ]
        assert len(jumps) > 30
        assert all(high[0] - low[0] == 1 for low, high in jumps)


@pytest.mark.parametrize("method", ["lightning", "causal_dot_product", "fleet"])
def test_a_state_is_not_read_once_more_for_a_chunk_that_is_not_full(method: str) -> None:
    make: Any = partial(
        linear_attention, method, batch=4, heads=8, rank=128, dim=128, dtype="bf16", decay=True
    )
    one, whole = dimensions(make(length=65)), make(length=128)
    grown = whole.work.hbm_bytes / make(length=65).work.hbm_bytes
    assert 1.0 < whole_tiles(f"linear_attention_{method}", one) <= grown
    assert whole_tiles(f"linear_attention_{method}", dimensions(whole)) == 1.0


def test_sequences_of_full_chunks_are_told_from_those_with_rows_left_over() -> None:
    # 512 rows may be two groups, 511 are one (`simcore.kernels.linear_attention.triton_chunked`).
    make: Any = partial(linear_attention, "lightning", batch=1, heads=8, rank=128, dim=128, dtype="bf16")
    lengths = [
        coordinates("linear_attention_lightning", dimensions(make(length=length, decay=True)))["length"]
        for length in (449, 500, 511, 512, 513)
    ]
    assert lengths == [511, 511, 511, 512, 575]


@pytest.mark.parametrize(
    ("kind", "axis", "choices"),
    [
        ("kv_append", "tokens", {"kv_heads": 2, "head_dim": 128}),
        ("kv_copy", "tokens", {"width": 8192}),
        ("conv_row", "inputs", {"layers": 18, "channels": 256}),
        ("conv_column", "outputs", {"layers": 1, "channels": 768}),
    ],
)
def test_the_grid_has_both_sides_of_where_inputs_leave_the_cache(
    kind: str, axis: str, choices: Mapping[str, int]
) -> None:
    """By the operands that are measured: 128 sets of them stay in 60 MiB, or not."""
    stays: dict[bool, list[int]] = {True: [], False: []}
    for op in grid([kind]):
        if choices.items() <= dict(op.shape).items() and op[axis] < 300:
            given = TABLE[kind].inputs(op, torch.Generator(), torch.device("cpu"))
            stays[128 * sum(x.nbytes for x in given) <= 60 * 2**20].append(op[axis])
    assert max(stays[True]) + 1 == min(stays[False])


@slow
def test_what_only_checks_is_measured_apart_from_what_it_checks() -> None:
    kinds = ["norm", "rotary", "decode_attention"]
    shapes: list[tuple[Op, Role]] = [(op, "fit") for op in grid(kinds)]
    shapes += [(op, "check") for op in drawn(kinds, 40, 1)]
    order = list(in_turn(shapes, lambda op: False))
    assert sorted(map(str, order)) == sorted(map(str, shapes))
    groups = [op.kind if role == "fit" else role for op, role in order]
    assert [name for i, name in enumerate(groups) if not i or name != groups[i - 1]] == [
        "norm", "check", "rotary", "decode_attention",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "axis", "same"),
    [
        ("linear_attention_vanilla", "length", ("batch", "heads")),
        ("linear_attention_block_based", "length", ("batch", "heads")),
        ("tile_fft", "layers", ("batch", "side", "channels")),
    ],
)
def test_what_is_drawn_is_no_larger_than_what_is_measured(
    kind: str, axis: str, same: tuple[str, ...]
) -> None:
    largest: dict[tuple[int, ...], int] = {}
    for op in grid([kind]):
        key = tuple(op[name] for name in same)
        largest[key] = max(largest.get(key, 0), op[axis])
    for op in drawn([kind], 200, 3):
        assert op[axis] <= largest[tuple(op[name] for name in same)]


@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [(249, 249, 256), (257, 257, 272), (300, 289, 304), (511, 497, 512), (513, 513, 576), (1024, 961, 1024),
     (1025, 1025, 1152), (4096, 3969, 4096), (4097, 4097, 4352)],
)  # fmt: skip
def test_products_of_as_many_rows_as_engines_pad_to_are_alike(rows: int, least: int, most: int) -> None:
    """Engines pad up to 256 rows to eights, up to 512 to sixteens, up to 1024 to 64, up to 4096 to 128, then
    to 256: the fewest and the most rows that are launched as these are."""

    def launched(m: int) -> int:
        op = ops.matmul("m", m=m, n=64, k=64, dtype="bf16")
        return coordinates("matmul", dimensions(op))["m"]

    alike = [m for m in range(rows - 300, rows + 300) if launched(m) == launched(rows)]
    assert (alike[0], alike[-1], launched(rows)) == (least, most, most)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_chunks_of_prompts_cost_what_their_longest_costs(count: int) -> None:
    """One program goes through the rows of a prompt, whole chunks of them: one row more in each begins a
    chunk, and up to its end the price hardly changes."""

    def seconds(tokens: int) -> float:
        pairs = tokens * tokens // (2 * count)
        op = linear_layer.linear_attention_prompts(
            tokens=tokens, kv_tokens=tokens, pairs=pairs, heads=32, rank=128, dim=128, dtype="bf16"
        )
        return price(op).seconds

    price = pricer(load_device("h200-sxm"), profile=load_profile("h200-sxm", "local"))
    for chunks in (2, 8):
        whole = 64 * chunks * count
        least, most = seconds(whole + count), seconds(whole + 64 * count)
        assert least == pytest.approx(most, rel=0.01)
        assert seconds(whole) < 0.99 * least
