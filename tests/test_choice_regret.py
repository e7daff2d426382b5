"""What choices by measured prices cost, with times from a formula in the place of a GPU's."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simcore.devices.fit import fit_two
from simcore.devices.fitted import Birth, FittedProfile
from simcore.devices.interpolation import Measured, correction
from simcore.devices.making import Point, shape_text
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.linear_attention import api
from simcore.kernels.long_convolution.spectral import spectrum, tile_spectrum
from simcore.kernels.table import TABLE
from simcore.ops.convolution import tile
from simcore.ops.op import Op
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks import choice as bench_choice
from simcore.validate.benchmarks.cases import Birth as Run
from simcore.validate.benchmarks.cases import Times
from simcore.validate.benchmarks.choice import (
    Case,
    Chosen,
    Clock,
    Tile,
    chosen,
    drawn_sequences,
    drawn_tiles,
    lines,
    measured,
    regret_bars,
    trained,
    trained_sequences,
    trained_tiles,
    write_profile,
)
from simcore.validate.benchmarks.run import Bench
from simcore.validate.benchmarks.timing import Card
from tests.thorough import slow

torch.set_num_threads(1)

H200 = load_device("h200-sxm")
DATASHEET, FLOOR = pricer(H200), roofline(H200)
BIRTH = Birth("2026-01-01T00:00:00+00:00", "stub", 1, {"torch": "2"}, 10, 3, 0.01, {})
PROCESSORS = 132

RUN = Run("NVIDIA H200", "1", "2", "3", "today", "", "", 4e12, "sum", 1e-6)


@pytest.mark.parametrize("side", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("way", ["tile_flash_fft", "tile_flash_conv"])
def test_own_ways_are_checked_at_every_side(way: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, kernel = Tile(3, 2, 5, side).ops[way], TABLE[way]
    given = kernel.inputs(op, torch.Generator().manual_seed(side), torch.device("cpu"))
    bench_choice._check(op, given)
    off = kernel._replace(run=lambda op, *tensors: 1.001 * kernel.run(op, *tensors))
    monkeypatch.setattr(bench_choice, "TABLE", {way: off})
    with pytest.raises(ValueError, match="WRONG"):
        bench_choice._check(op, given)


def waves(programs: int, places: int) -> float:
    """How many times as long as full waves take."""
    return math.ceil(programs / places) * places / programs


def tile_s(op: Op) -> float:
    """Launches, bytes, flops, whole waves of programs, and layouts that change with the side."""
    layers, batch, channels, side = (op[name] for name in ("layers", "batch", "channels", "side"))
    lanes = layers * batch * channels
    if op.kind == "tile_flash_fft":
        if side > 2048:
            return 6e-6 + lanes * side * 44 / 3.5e12
        width = 64 if side <= 128 else max(4, 16384 // side)
        each = waves(layers * batch * math.ceil(channels / width), 2 * PROCESSORS)
        return 2e-6 + (lanes * side * 12 + layers * channels * side * 8) / 3.2e12 * each
    if op.kind == "tile_flash_conv":
        sums = 4 if lanes * side < 16 * 32 * 528 else 16
        each = waves(math.ceil(lanes * side / sums / 128), 4 * PROCESSORS)
        return 1.8e-6 + 2 * lanes * side**2 / (2e12 * sums) * each + lanes * side * 20 / 3.5e12
    if op.kind == "tile_fft":
        return 8e-6 + lanes * side * (70 + 4 * math.log2(side)) / 3e12
    return 7e-6 + 4 * lanes * side**2 / 8e12


def sequences_s(op: Op) -> float:
    """Chunks one after another in groups; running sums; torch's ops at 1.4 times the datasheet."""
    pairs, length, rank = op["batch"] * op["heads"], op["length"], op["rank"]
    method = op.kind.removeprefix("linear_attention_")
    if method in ("lightning", "causal_dot_product"):
        groups = max(1, min(2 * PROCESSORS // (2 * pairs), length // 256))
        return 3e-6 + length / 64 * 1e-6 / groups * math.ceil(2 * pairs * groups / (2 * PROCESSORS))
    if method == "fleet":
        return 3e-6 + length * rank / 256 * 0.4e-6 * math.ceil(pairs * rank / 16 / (8 * PROCESSORS))
    return 1.4 * DATASHEET(op).seconds


def a_clock(seed: int = 0) -> Clock:
    noise = random.Random(seed)

    def clock(op: Op) -> Times:
        seconds = tile_s(op) if op.kind.startswith("tile") else sequences_s(op)
        return cases.times([[seconds * math.exp(noise.gauss(0.0, 0.007))] * 3] * 2)

    return clock


def points_of(shapes: list[Case]) -> list[Point]:
    return [point for _, _, point in trained(shapes, a_clock(), DATASHEET, FLOOR)]


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> FittedProfile:
    """A profile of the training set of tiles, written and read."""
    folder = tmp_path_factory.mktemp("profiles") / "hybrid"
    points = points_of([*trained_tiles()])
    write_profile("hybrid", "h200-sxm", points, replace(BIRTH, points=len(points)), folder)
    found = load_profile("h200-sxm", str(folder))
    assert isinstance(found, FittedProfile)
    return found


@slow
def test_hybrid_by_measured_prices_is_hardly_ever_slower(tiles: FittedProfile) -> None:
    price, clock = pricer(H200, profile=tiles), a_clock(1)
    found = [chosen(case, clock, DATASHEET, price) for case in drawn_tiles(bench_choice.DRAWN)]
    assert all(bar.met for bar in regret_bars("hybrid", found)), regret_bars("hybrid", found)
    assert {one.way for one in found} >= {"tile_flash_fft", "tile_flash_conv"}
    assert not {one.case for one in found} & set(trained_tiles())
    off = [abs(math.log(one.predicted_s[one.best] / one.times[one.best].median_s)) for one in found]
    plain = pricer(H200, profile=replace(tiles, granularity="fitted", points=()))  # type: ignore[type-var]
    fitted = [
        abs(math.log(plain(one.case.ops[one.best]).seconds / one.times[one.best].median_s)) for one in found
    ]
    assert sum(off) < 0.6 * sum(fitted)
    assert any("chosen" in line for line in lines(found))


@slow
def test_auto_by_measured_prices_takes_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where kernels take the tensors."""
    monkeypatch.setattr(api, "is_taken", lambda *_: True)
    training = trained_sequences("cpu", "h200-sxm")[::3]
    points = points_of([*training])
    write_profile("auto", "h200-sxm", points, replace(BIRTH, points=len(points)), tmp_path / "auto")
    price = pricer(H200, profile=load_profile("h200-sxm", str(tmp_path / "auto")))
    found = [chosen(case, a_clock(1), DATASHEET, price) for case in drawn_sequences(60, "cpu", "h200-sxm")]
    assert all(bar.met for bar in regret_bars("auto", found))
    for one in found:
        # One kernel by two names has one time.
        assert one.times["lightning"] is one.times["causal_dot_product"]
    assert {one.way for one in found} <= {"lightning", "causal_dot_product", "fleet", "vanilla"}


def test_tensors_that_a_kernel_takes_are_priced_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 2, 9, 4)
    assert api.op_of("lightning", q, q, decay=True).kind == "linear_attention_lightning_torch"
    monkeypatch.setattr(api, "is_taken", lambda *_: True)
    assert api.op_of("lightning", q, q, decay=True).kind == "linear_attention_lightning"
    assert api.op_of("vanilla", q, q, decay=True).kind == "linear_attention_vanilla"


def test_what_the_datasheet_rules_out_is_not_measured() -> None:
    case = Tile(4, 1, 256, 4096)
    found = measured(case, a_clock(), DATASHEET)
    assert set(found) == {"tile_flash_fft", "tile_fft"}
    assert set(measured(case, a_clock(), DATASHEET, "tile_conv")) == {*found, "tile_conv"}
    assert set(measured(Tile(4, 1, 256, 16), a_clock(), DATASHEET)) >= {"tile_flash_fft", "tile_flash_conv"}

    def broken(op: Op) -> Times | None:
        return None if op.kind == "tile_flash_fft" else a_clock()(op)

    lost = Chosen(case, "tile_flash_fft", measured(case, broken, DATASHEET), {})
    assert lost.regret is None
    assert [bar.met for bar in regret_bars("x", [lost])] == [False, False]
    assert [bar.met for bar in regret_bars("x", [])] == [None, None]


def test_drawn_shapes_are_the_same_every_time_and_none_was_trained() -> None:
    assert drawn_tiles(50) == drawn_tiles(50)
    assert drawn_tiles(50) != drawn_tiles(50, seed=1)
    assert len(set(drawn_tiles(200))) == 200
    assert not set(drawn_sequences(100, "cpu", "x")) & set(trained_sequences("cpu", "x"))


# -- the profile -----------------------------------------------------------------------------------------


def op_at(side: int, outputs: int | None = None, layers: int = 4) -> Op:
    shape = {"layers": layers, "batch": 1, "channels": 256, "side": side}
    return tile("flash_conv", outputs=outputs or side, dtype="fp32", **shape)


def some(sides: tuple[int, ...]) -> Iterator[Measured]:
    for side in sides:
        op = op_at(side)
        launches, floor_s = launches_and_floor(op, FLOOR)
        yield Measured(op.kind, shape_text(op), op.dtype, launches, floor_s, tile_s(op))


def test_prices_pass_through_what_was_measured(tiles: FittedProfile) -> None:
    price = pricer(H200, profile=tiles)
    for point in tiles.points[::20]:
        shape = point.dimensions
        name = point.kind.removeprefix("tile_")
        sizes = {key: value for key, value in shape.items() if key != "stored_bytes"}
        op = tile(name, dtype=point.dtype, **sizes)  # type: ignore[arg-type]
        found = price(op)
        assert found.source == "measured"
        assert found.seconds == pytest.approx(point.median_s, rel=1e-9)
        assert found.low_s <= found.seconds <= found.high_s


def test_a_correction_is_linear_between_points_and_stays_at_the_edge() -> None:
    near = [*some((16, 64, 256, 1024))]
    fit = fit_two([(p.launches, p.floor_s, p.median_s) for p in near])
    found = correction(fit, near)

    def factor(op: Op) -> float:
        launches, floor_s = launches_and_floor(op, FLOOR)
        price = found.price(fit, op, launches, floor_s, "")
        assert price is not None
        return math.log(price.seconds / fit.seconds(launches, floor_s))

    ends = [factor(op_at(side)) for side in (16, 64)]
    assert factor(op_at(32)) == pytest.approx(sum(ends) / 2)
    assert factor(op_at(4096)) == pytest.approx(factor(op_at(1024)))
    sources = []
    for op in (op_at(32), op_at(64), op_at(4096), op_at(128, outputs=17), op_at(1024, outputs=17)):
        launches, floor_s = launches_and_floor(op, FLOOR)
        price = found.price(fit, op, launches, floor_s, "")
        assert price is not None
        sources.append(price.source)
    # Of tiles that are not square nothing was measured.
    assert sources == ["interpolated", "measured", "extrapolated", "extrapolated", "extrapolated"]
    # All points have 4 layers: of others nothing is known but the fit.
    assert found.price(fit, op_at(32, layers=5), 1, 1e-6, "") is None


def test_one_point_is_its_own_correction() -> None:
    near = [*some((64,))]
    fit = fit_two([(p.launches, p.floor_s, p.median_s) for p in near])
    price = correction(fit, near).price(fit, op_at(64), near[0].launches, near[0].floor_s, "")
    assert price is not None
    assert price.seconds == pytest.approx(near[0].median_s)


@pytest.mark.parametrize(
    ("words", "shapes"),
    [("at least one", ()), ("twice", ("m=1;n=2", "m=1;n=2")), ("which dimensions", ("m=1", "m=1;n=2"))],
)
def test_what_is_no_set_of_points_is_refused(words: str, shapes: tuple[str, ...]) -> None:
    fit = fit_two([(1, 1e-6, 2e-6)])
    with pytest.raises(InputError, match=words):
        correction(fit, [Measured("x", shape, "fp32", 1, 1e-6, 2e-6) for shape in shapes])


def test_a_shape_has_to_be_one() -> None:
    for shape in ("m", "m=1;m=2", "=3", "m=-1"):
        with pytest.raises(ValueError, match="is not as in"):
            Measured("x", shape, "fp32", 1, 1e-6, 2e-6)
    with pytest.raises(ValueError, match="unknown"):
        Measured("x", "m=1", "fp12", 1, 1e-6, 2e-6)


def test_a_measured_profile_needs_its_points(tiles: FittedProfile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="granularity measured with 0 lines"):
        replace(tiles, points=())  # type: ignore[type-var]
    with pytest.raises(ValueError, match="granularity fitted with"):
        replace(tiles, granularity="fitted")  # type: ignore[type-var]


def test_elsewhere_a_tile_caches_the_cyclic_spectrum() -> None:
    taps = torch.randn(2, 1, 64, 3)
    for kind in ("tile_fft", "tile_flash_fft"):
        assert torch.equal(tile_spectrum(kind, taps, 32), spectrum(taps, 32))


def test_a_part_leaves_a_table_and_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the part `hybrid` but the GPU."""
    monkeypatch.setattr(bench_choice, "clock_of", lambda bench: a_clock())
    monkeypatch.setattr(bench_choice, "default_device", lambda device: "h200-sxm")
    monkeypatch.setattr(bench_choice, "DRAWN", 20)
    card = Card(50 << 20, PROCESSORS, 4e12, "sum", 1e-6)
    bars = bench_choice.hybrid(Bench(card, RUN, tmp_path, True, []))
    assert [bar.met for bar in bars] == [True, True]
    assert (tmp_path / "h200_convolution_kernels_hybrid.csv").exists()
    assert isinstance(load_profile("h200-sxm", str(tmp_path / "profiles/h200-sxm/hybrid")), FittedProfile)


def test_rows_say_where_they_were_measured() -> None:
    """The table of a part has one header for what was trained and what was drawn."""
    op, times = op_at(64), a_clock()(op_at(64))
    assert times is not None
    rows = [
        bench_choice.row_of("tile_flash_conv", op, times, role, predicted_s)
        for role, predicted_s in (("trained", None), ("chosen", 1e-6))
    ]
    lines = [cases.cells(row, RUN) for row in rows]
    assert [line["role"] for line in lines] == ["trained", "chosen"]
    assert [*lines[0]] == [*lines[1]]
