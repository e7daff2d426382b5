"""Tilings against their theory: what launches cover, how many tiles there are, what they cost, how it grows.

What each op covers and when it ran is read off simulated traces; FLOPs and bytes are counted again here, from
Flash Inference's formulas.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from math import log2
from typing import Any

import numpy as np
import pytest

from simcore.machine import laws
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.long_convolution import LongConvolution, cells
from simcore.ops import convolution as conv
from simcore.ops.op import Op, Price, Size
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.generic_tiling import generic_tiling
from simcore.schedules.lazy import lazy
from simcore.schedules.relaxed_tiling import relaxed_tiling
from simcore.sim.simulation import Simulation
from simcore.studies.tiling.figures import counts, touched_positions
from simcore.studies.tiling.implementations import tile_counts
from simcore.studies.tiling.launches import launches
from tests.thorough import first, slow, thorough

Schedule = Callable[[Machine, LongConvolution, list[float]], Program]
LENGTHS = (1, 2, 3, 7, 8, 9, 16, 33, 64)
LAYERS = 2


def work_price(op: Op) -> Price:
    """A second for every kernel besides its work, so that no op takes no time."""
    seconds = 1.0 + op.work.flops / 1e3
    return Price(seconds, seconds, seconds, "roofline", "test")


def traced(schedule: Schedule, model: LongConvolution) -> Trace:
    ended: list[float] = []
    trace = Simulation(work_price).run(lambda m: schedule(m, model, ended))
    laws.enforce(trace)
    assert len(ended) == model.generated + (model.prompt > 0)
    assert ended == sorted(ended)
    return trace


def lazily(parallel: bool = True) -> Schedule:
    return lambda m, model, ended: lazy(m, model, ended, parallel=parallel)


def eagerly(parallel: bool = True) -> Schedule:
    return lambda m, model, ended: eager(m, model, ended, parallel=parallel)


def fractally(**options: Any) -> Schedule:
    return lambda m, model, ended: fractal_tiling(m, model, ended, **options)


# -- coverage ----------------------------------------------------------------------------------------


def contributions(op: Op, total: int) -> Iterator[tuple[int, int, int]]:
    """(layer, input, output) of all that an op accounts for."""
    for area in cells(op, total):
        if area.outputs is not None:
            for i, j in product(range(*area.inputs), range(*area.outputs)):
                yield area.layer, i, j
        else:
            assert area.lags is not None
            for i, lag in product(range(*area.inputs), range(*area.lags)):
                if i + lag < total:
                    yield area.layer, i, i + lag


def faults(trace: Trace, model: LongConvolution, *, in_order: bool = True) -> list[str]:
    """What is wrong with what a run covers: pairs that are missing, twice, out of order, or too early."""
    total, layers = model.tokens, model.layers
    ops = [found for span in trace.spans for found in span.op_times()]
    # Level l at t exists once the last op of its block has ended; level 0 once the next input has been made.
    exists = {(0, 0): 0.0} | {(0, t): 0.0 for t in range(model.prompt)}
    taps_exist: dict[tuple[int, int], float] = {}
    for priced, _, end_s in ops:
        op = priced.op
        if op.name in ("down", "gate"):
            layer, at = op.where("layer"), op.where("position")
            filled = range(at + 1) if at + 1 == model.prompt else (at,)
            exists.update({(layer, t): end_s for t in filled})
        elif op.kind == "next_input":
            exists[0, op.where("position") + 1] = end_s
        elif op.kind == "filter_tap":
            taps_exist[op.where("layer"), op.where("position")] = end_s
    wrong: list[str] = []
    seen: dict[tuple[int, int], list[int]] = {}
    for priced, start_s, _ in sorted(ops, key=lambda found: found[1]):
        for layer, i, j in contributions(priced.op, total):
            seen.setdefault((layer, j), []).append(i)
            if exists.get((layer - 1, i), np.inf) > start_s:
                wrong.append(f"{priced.op.kind} takes {i} of level {layer - 1} before it is there")
            if taps_exist and taps_exist[layer, j - i] > start_s:
                wrong.append(f"{priced.op.kind} takes tap {j - i} of level {layer} before it is there")
            if exists.get((layer, j), np.inf) <= start_s:
                wrong.append(f"{priced.op.kind} gives to {j} of level {layer}, which has been read")
    for layer, j in product(range(1, layers + 1), range(total)):
        got = seen.get((layer, j), [])
        if (got if in_order else sorted(got)) != list(range(j + 1)):
            wrong.append(f"level {layer}, position {j} gets {got}")
    return wrong


OPTIONS = [
    {"parallel": parallel, "half_storage": half, "sequential_from": first}
    for parallel, half, first in product((True, False), (False, True), (None, 4))
]
SCHEDULES: list[Schedule] = [
    *map(lazily, (True, False)),
    *map(eagerly, (True, False)),
    *(fractally(**options) for options in OPTIONS),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("prompt", first(3, [0, 3, 31, 1, 8]))
def test_every_contribution_is_made_once_in_order_and_from_what_is_there(length: int, prompt: int) -> None:
    if prompt >= length:
        with pytest.raises(ValueError, match="prompt is"):
            LongConvolution(LAYERS, 4, length, prompt=prompt)
        return
    model = LongConvolution(LAYERS, 4, length, prompt=prompt)
    for schedule in SCHEDULES if length < 64 else SCHEDULES[::3]:
        assert faults(traced(schedule, model), model) == []


@pytest.mark.parametrize("several", first(2, [2, 16, 4, 64]))
@pytest.mark.parametrize("length", first(7, [1, 2, 4, 5, 8, 17, 33, 32, 50]))
@pytest.mark.parametrize("prompt", first(2, [0, 5, 1]))
def test_launches_of_several_positions_make_the_same_contributions(
    length: int, prompt: int, several: int
) -> None:
    if prompt >= length:
        return
    model = LongConvolution(LAYERS, 4, length, prompt=prompt, tokens_per_launch=several)
    for schedule in SCHEDULES:
        assert faults(traced(schedule, model), model) == []


@slow
def test_most_positions_are_computed_by_launches_of_several() -> None:
    """100 positions by 8: 12 launches and 4 positions one by one; lazy's first and eager's last position,
    which have no history and no column, are among those."""
    model = LongConvolution(LAYERS, 4, 100, tokens_per_launch=8)
    names = {"rows_and_steps 8": lazily(), "steps_and_columns 8": eagerly(), "steps_and_tiles 8": fractally()}
    for name, schedule in names.items():
        spans = traced(schedule, model).spans
        several = [span for span in spans if span.graph == name]
        assert len(several) == 12
        assert sum(span.graph == "step" for span in spans) == 4
        # Each launch has the ops of the first, eight positions later.
        places = [[op.where("position") for op in (each.op for each in span.ops)] for span in several]
        assert all(found == [x + 8 * i for x in places[0]] for i, found in enumerate(places))
    # The tiles between them are launches: those after 12 launches, and after three of the last four.
    graphs = [span.graph for span in traced(fractally(), model).spans]
    assert sum(name.startswith("tile ") for name in graphs) == 12 + 3


def test_several_positions_end_when_their_host_has_waited_for_all() -> None:
    ended: list[float] = []
    model = LongConvolution(LAYERS, 4, 10, tokens_per_launch=4)
    Simulation(work_price).run(lambda m: fractal_tiling(m, model, ended))
    assert len(ended) == 10
    assert len(set(ended[:4])) == len(set(ended[4:8])) == 1
    assert ended[3] < ended[4] < ended[8] < ended[9]


def test_an_op_some_positions_later() -> None:
    model = LongConvolution(LAYERS, 4, 64)
    (row,), (column,), (tile,) = model.rows().ops, model.columns().ops, model.tile(4, 4).ops
    sizes = {"position": 20, "inputs": 20, "outputs": 43}
    for op in (row, column, tile):
        moved = conv.ahead(op, 3).at(sizes)
        assert moved.where("position") == 23
        # A place is no part of a price.
        later = {"position": 23, "inputs": 23, "outputs": 40}
        assert moved.without_place == op.at(later).without_place
    assert (Size("n", 2) * 3 + 1) + 4 == Size("n", 6, 5) == 2 * (Size("n", 3) + 2) + 1
    assert model.rows_and_steps(4).most_added == {"inputs": 3}
    assert model.steps_and_columns(4).most_added == {"outputs": 0}
    assert model.steps_and_tiles(4).most_added == {}


def test_a_launch_computes_a_power_of_two_of_positions() -> None:
    for several in (0, -2, 3, 12):
        with pytest.raises(ValueError, match="a power of two is needed"):
            LongConvolution(LAYERS, 4, 16, tokens_per_launch=several)


@pytest.mark.parametrize("schedule", [lazily(), eagerly(), fractally(), fractally(half_storage=True)])
def test_a_step_in_one_launch_makes_the_cells_of_all_layers(schedule: Schedule) -> None:
    model = LongConvolution(LAYERS, 4, 16, one_launch=True)
    seen: dict[tuple[int, int], list[int]] = {}
    for span in traced(schedule, model).spans:
        for priced, _, _ in span.op_times():
            for layer, i, j in contributions(priced.op, model.tokens):
                seen.setdefault((layer, j), []).append(i)
    for layer, j in product(range(1, LAYERS + 1), range(model.tokens)):
        assert sorted(seen[layer, j]) == list(range(j + 1))
    assert model.step().kernels == 1
    # What comes between layers keeps their kernels apart.
    assert (
        "token_step" not in model.row_step().kinds | model.column_step().kinds | model.tile_step(2, 2).kinds
    )


def test_the_work_of_a_step_in_one_launch_is_that_of_its_layers() -> None:
    for block in ("mlp", "gate"):
        model = LongConvolution(36, 768, 16, batch=2, block=block, dtype="fp32")  # type: ignore[arg-type]
        one, each = model.token_step.work, [op.work for op in model.layers_of_step]
        assert one.flops == pytest.approx(sum(work.flops for work in each), rel=1e-3)
        # Weights count most; what layers hand on does not leave the chip.
        assert 0.99 < one.hbm_bytes / model.weight_bytes < 1.01
        assert one.hbm_bytes < sum(work.hbm_bytes for work in each)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_general_algorithms_cover_everything_too(length: int) -> None:
    for mixer in ("convolution", "linear_attention"):
        model = LongConvolution(LAYERS, 4, length, mixer=mixer)
        assert faults(traced(generic_tiling, model), model) == []
    model = LongConvolution(LAYERS, 4, length, mixer="data_dependent_convolution")
    assert faults(traced(relaxed_tiling, model), model, in_order=False) == []


def test_broken_schedules_are_caught() -> None:
    model = LongConvolution(LAYERS, 4, 9)

    def too_early(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        for t in range(model.tokens):
            if t + 1 < model.tokens:
                side = (t + 1) & -(t + 1)
                m.launch(model.tile(side, min(side, model.tokens - 1 - t)), sizes={"position": t})
            yield m.wait(m.launch(model.step(), sizes={"position": t}))
            ended.append(m.now())

    def forgets(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        for t in range(model.tokens):
            yield m.wait(m.launch(model.step(), sizes={"position": t}))
            if t + 1 < model.tokens:
                m.launch(model.tile(1, 1), sizes={"position": t})
            ended.append(m.now())

    def too_late(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        for t in range(model.tokens):
            yield m.wait(m.launch(model.step(), sizes={"position": t}))
            if t:
                m.launch(model.rows(), sizes={"position": t, "inputs": t})
            ended.append(m.now())

    def twice(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        for t in range(model.tokens):
            for _ in range(2 if t == 4 else 1):
                if t:
                    m.launch(model.rows(), sizes={"position": t, "inputs": t})
            yield m.wait(m.launch(model.step(), sizes={"position": t}))
            ended.append(m.now())

    for schedule, says in (
        (too_early, "before it is there"),
        (forgets, "gets"),
        (too_late, "which has been read"),
        (twice, "gets"),
    ):
        assert any(says in fault for fault in faults(traced(schedule, model), model)), schedule


# -- counts ------------------------------------------------------------------------------------------


def tiles_launched(model: LongConvolution, schedule: Schedule) -> Counter[tuple[int, int]]:
    """Tiles by side and outputs, a layer."""
    found: Counter[tuple[int, int]] = Counter()
    for burst in launches(lambda m: schedule(m, model, [])):
        for op, times in burst.ops.items():
            if op.kind.startswith("tile_"):
                found[op["side"], op["outputs"]] += times * op["layers"] * burst.count
    return Counter({key: count // model.layers for key, count in found.items()})


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("p", range(13))
def test_tiles_are_as_many_as_theorem_2_says(p: int, parallel: bool) -> None:
    length = 1 << p
    found = tiles_launched(LongConvolution(3, 4, length), fractally(parallel=parallel))
    assert found == Counter({(1 << q, 1 << q): 1 << (p - 1 - q) for q in range(p)})
    assert sum(found.values()) == length - 1


@pytest.mark.parametrize("first_side", [1, 2, 8, 16, 32])
def test_tiles_go_layer_by_layer_from_the_side_that_is_asked_for(first_side: int) -> None:
    """3 layers: one launch of all below that side, and one op a layer from it on."""
    layers = set[tuple[int, int]]()
    model = LongConvolution(3, 4, 64)
    for burst in launches(lambda m: fractal_tiling(m, model, [], sequential_from=first_side)):
        layers |= {(op["side"], op["layers"]) for op in burst.ops if op.kind.startswith("tile_")}
    assert layers == {(side, 3 if side < first_side else 1) for side in (1, 2, 4, 8, 16, 32)}


@pytest.mark.parametrize("length", [2, 3, 4, 9, 16, 33, 100])
def test_tiles_of_data_dependent_filters_give_to_no_position_beyond_the_end(length: int) -> None:
    """By their definition a tile of side U after position n - 1 gives to n .. n + 2 U - 2."""
    model = LongConvolution(1, 4, length, mixer="data_dependent_convolution")
    found = [
        (op.where("position"), op["side"], op["outputs"])
        for span in traced(relaxed_tiling, model).spans
        for op in (priced.op for priced in span.ops)
        if op.kind == "relaxed_tile"
    ]
    assert all(outputs == min(2 * side - 1, length - 1 - at) for at, side, outputs in found)
    assert len(found) >= (length > 2)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, 11, 12, 13, 100, 257, 1000])
def test_tiles_of_any_length_are_counted_without_launching(length: int) -> None:
    found = tiles_launched(LongConvolution(1, 4, length), fractally())
    counted = {(side, outputs): n for side, own in tile_counts(length).items() for outputs, n in own.items()}
    assert found == Counter(counted)


# -- work --------------------------------------------------------------------------------------------


def fft_tile_flops(side: int, *, order: int, transforms: int) -> float:
    """A tile of one lane: real transforms of an order, and the product of spectra (Appendix C)."""
    return transforms * 2.5 * order * log2(order) + 6 * (order // 2 + 1)


@pytest.mark.parametrize("p", [1, 4, 10])
@pytest.mark.parametrize(("implementation", "batch"), list(product(conv.IMPLEMENTATIONS, (1, 3))))
def test_flops_of_algorithm_1_follow_theorem_2(p: int, implementation: Any, batch: int) -> None:
    layers, channels, length = 3, 5, 1 << p
    sides = [1 << q for q in range(p)]
    model = LongConvolution(
        layers, channels, length, batch=batch, tiles=tuple((side, implementation) for side in sides)
    )
    bursts = launches(lambda m: fractal_tiling(m, model, []))
    lanes = layers * channels * batch

    def tile(side: int) -> float:
        if implementation == "flash_conv":
            return 2.0 * side * side
        # A plain convolution multiplies the zeros around its inputs too. What a framework adds to z
        # afterwards is a kernel of its own, an addition an output.
        if implementation == "conv":
            return 2.0 * (2 * side - 1) * side + side
        added = side if implementation == "fft" else 0
        return fft_tile_flops(side, order=2 * side, transforms=2) + added

    expected = lanes * (sum(2 ** (p - 1 - q) * tile(1 << q) for q in range(p)) + 2 * length)
    assert counts(model, bursts)["mixer_flops"][0] == pytest.approx(expected, rel=1e-12)


def tile_bytes(implementation: str, side: int, lanes: int, taps: int) -> float:
    """A square tile in fp16: 2 bytes a stored number, 4 a computed one, 8 a bin of a spectrum."""
    bins, added = side + 1, 3 * 2 * lanes * side
    match implementation:
        case "flash_conv":
            return 2.0 * (lanes * 3 * side + taps * 2 * side)
        case "flash_fft":
            return 2.0 * lanes * 3 * side + 8.0 * taps * bins
        case "conv":
            padded = 3 * side - 2
            return 2.0 * (lanes * (side + padded) + lanes * (padded + side) + taps * (2 * side - 1)) + added
    there, product = lanes * (2 * side + 8 * bins), 8 * bins * (2 * lanes + taps)
    back, added = lanes * (8 * bins + 4 * 2 * side), lanes * side * (2 * 2 + 4)
    return float(there + product + back + added)


@pytest.mark.parametrize("p", [1, 4, 10])
@pytest.mark.parametrize(("implementation", "batch"), list(product(conv.IMPLEMENTATIONS, (1, 3))))
def test_bytes_of_algorithm_1_follow_theorem_2(p: int, implementation: Any, batch: int) -> None:
    layers, channels, length = 3, 5, 1 << p
    tiles = tuple((1 << q, implementation) for q in range(p))
    model = LongConvolution(layers, channels, length, batch=batch, tiles=tiles)
    lanes, taps = layers * channels * batch, layers * channels
    tiled = sum(2 ** (p - 1 - q) * tile_bytes(implementation, 1 << q, lanes, taps) for q in range(p))
    found = counts(model, launches(lambda m: fractal_tiling(m, model, [])))["mixer_hbm_bytes"][0]
    assert found == pytest.approx(tiled + length * 2 * (3 * lanes + taps), rel=1e-12)


def test_order_2u_halves_and_cached_spectra_save_a_third_of_the_transforms() -> None:
    """Appendix C: 4U against 2U tends to 2, three transforms against two are 1.5."""
    for p, within in ((10, 0.2), (20, 0.1)):
        side = 1 << p
        padded = fft_tile_flops(side, order=4 * side, transforms=2)
        cyclic = conv.tile(
            "flash_fft", layers=1, batch=1, channels=1, side=side, outputs=side, dtype="fp16"
        ).work.flops
        assert padded / cyclic == pytest.approx(2.0, abs=within)
        bare = 2.5 * 2 * side * log2(2 * side)
        assert 3 * bare / (cyclic - 6 * (side + 1)) == pytest.approx(1.5)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("schedule", [lazily, eagerly])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000])
def test_baselines_do_what_their_heads_say(schedule: Any, parallel: bool, length: int) -> None:
    """Mixer FLOPs B c L (L + 1); lazy moves inputs and taps, eager reads and writes all later sums."""
    layers, channels, batch, stored = 2, 3, 5, 2.0
    model = LongConvolution(layers, channels, length, batch=batch)
    found = counts(model, launches(lambda m: schedule(parallel)(m, model, [])))
    lanes, taps = batch * layers * channels, layers * channels
    assert found["mixer_flops"][0] == lanes * length * (length + 1)
    pairs, others = length * (length - 1) / 2, length - 1
    red = length * (3 * lanes + taps)
    if schedule is lazily:
        moved = lanes * (pairs + 2 * others) + taps * pairs
    else:
        moved = lanes * (others + 2 * pairs) + taps * pairs
    assert found["mixer_hbm_bytes"][0] == stored * (moved + red)


@pytest.mark.parametrize("schedule", [*SCHEDULES, generic_tiling])
@pytest.mark.parametrize("length", [7, 32])
def test_totals_are_sums_over_the_trace(schedule: Schedule, length: int) -> None:
    """What is reckoned in closed form equals what the ops of a simulated run add up to."""
    model = LongConvolution(LAYERS, 4, length, batch=3)
    found = counts(model, launches(lambda m: schedule(m, model, [])))
    spans = traced(schedule, model).spans
    ops = [priced.op for span in spans for priced in span.ops]
    assert found["flops"][0] == pytest.approx(sum(op.work.flops for op in ops), rel=1e-12)
    assert found["hbm_bytes"][0] == pytest.approx(sum(op.work.hbm_bytes for op in ops), rel=1e-12)
    assert found["launches"][0] == len({span.launch for span in spans})
    per_token = sum(map(touched_positions, ops)) / (LAYERS * length)
    assert found["activation_positions_per_token"][0] == pytest.approx(per_token, rel=1e-12)


@slow
def test_fractal_tiling_touches_log_positions_a_token() -> None:
    """Section 3.6: log2(L) / 2 inputs and as many outputs a token on average, besides the red cell's two."""
    for p in (4, 10, 14):
        model = LongConvolution(2, 4, 1 << p)
        fractal = counts(model, launches(lambda m, model=model: fractal_tiling(m, model, [])))
        assert fractal["activation_positions_per_token"][0] == p + 2
        naive = counts(model, launches(lambda m, model=model: lazy(m, model, [])))
        length = 1 << p
        assert naive["activation_positions_per_token"][0] == pytest.approx(
            (length - 1) * (length / 2 + 1) / length + 2
        )


# -- growth ------------------------------------------------------------------------------------------

GROWN = [1 << p for p in range(10, 18)]


def slope(values: list[float]) -> float:
    """The log-log slope over the lengths."""
    return float(np.polyfit(np.log(GROWN), np.log(values), 1)[0])


def mixer_work(schedule: Schedule, implementation: Any = None) -> tuple[list[float], list[float]]:
    """FLOPs of the mixers, and seconds of their work alone on an A100-like device, by length."""
    flops, seconds = [], []
    for length in GROWN:
        tiles = tuple((1 << q, implementation) for q in range(17)) if implementation else ()
        model = LongConvolution(2, 64, length, tiles=tiles)
        own = counts(model, launches(lambda m, model=model: schedule(m, model, [])))
        flops.append(own["mixer_flops"][0])
        seconds.append(max(own["mixer_flops"][0] / 19.5e12, own["mixer_hbm_bytes"][0] / 2.039e12))
    return flops, seconds


@slow
@pytest.mark.parametrize("schedule", first(1, [lazily(), eagerly()]))
def test_mixer_work_of_the_baselines_grows_with_the_square(schedule: Schedule) -> None:
    for values in mixer_work(schedule):
        assert slope(values) == pytest.approx(2.0, abs=0.05)


@slow
@pytest.mark.parametrize("implementation", first(1, ["fft", "flash_fft"]))
def test_mixer_work_of_algorithm_1_grows_quasilinearly(implementation: str) -> None:
    flops, seconds = mixer_work(fractally(), implementation)
    assert 1.0 < slope(flops) < 1.3
    assert 1.0 < slope(seconds) < 1.3
    constants = [value / (length * log2(length) ** 2) for value, length in zip(flops, GROWN, strict=True)]
    assert max(constants) / min(constants) < 1.2


@thorough
def test_without_transforms_tiles_are_quadratic_too() -> None:
    flops, _ = mixer_work(fractally(), "flash_conv")
    assert slope(flops) == pytest.approx(2.0, abs=0.05)
