"""Calibration with kernels and a clock of our own, and the ladder on figures whose errors are known."""

import csv
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simcore.devices import making
from simcore.devices.making import Point, fits
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.table import TABLE, Kernel
from simcore.machine.trace import Cause, PricedOp, Span, Trace
from simcore.ops.convolution import tile
from simcore.ops.op import Op, Price, fuse, matmul, norm, placed, residual
from simcore.studies.common import Axes, Row
from simcore.validate.calibration import cpu as calibration
from simcore.validate.calibration.cpu import calibrate
from simcore.validate.calibration.cpu_grid import KINDS, grid
from simcore.validate.calibration.cpu_host import host_costs, operand_costs
from simcore.validate.ladder.rungs import (
    Bounds,
    OpPoint,
    compared,
    holds,
    ladder,
    load_bounds,
    measured_prices,
    numeric_error,
    op_points,
)
from simcore.validate.timing.cpu_times import CACHE, measure
from tests.thorough import slow

torch.set_num_threads(1)
CPU = load_device("cpu")
FLOOR = roofline(CPU)


def quiet(what: str, done: int, of: int) -> None:
    """Progress that nobody looks at."""
    assert what
    assert 0 <= done <= of


# -- measuring with a clock of our own ---------------------------------------------------------------------


class Clock:
    """Time that passes only when it is told to; looking at it takes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kernel(clock: Clock, kernel_s: float, slope: float) -> Kernel:
    """A kernel that takes kernel_s + floor * slope, every third run 10 times as long."""
    pauses = itertools.count()

    def run(op: Op, x: torch.Tensor) -> torch.Tensor:
        clock.now_s += (kernel_s + FLOOR(op).seconds * slope) * (10.0 if next(pauses) % 3 == 2 else 1.0)
        return x

    def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, ...]:
        del op
        return (torch.rand(2, generator=generator, device=device),)

    return Kernel(run, run, inputs)


def toys() -> tuple[Clock, dict[str, Kernel], list[Op]]:
    """Two kinds of known constants."""
    clock = Clock()
    table = {"norm": kernel(clock, 4e-6, 50.0), "residual": kernel(clock, 1e-6, 200.0)}
    shapes = [
        make(kind, tokens=m, hidden=64, dtype=dtype)
        for make, kind in ((norm, "norm"), (residual, "residual"))
        for dtype in ("fp32", "bf16")
        for m in (1, 7, 60, 500, 4000, 30000)
    ]
    return clock, table, shapes


@slow
def test_the_median_of_the_runs_is_not_moved_by_pauses() -> None:
    clock, table, shapes = toys()
    found = measure(table, shapes, FLOOR, 0.05, quiet, clock)
    assert [point.op for point in found] == shapes
    for point in found:
        kernel_s, slope = (4e-6, 50.0) if point.op.kind == "norm" else (1e-6, 200.0)
        assert point.floor_s == FLOOR(point.op).seconds
        assert point.median_s == pytest.approx(kernel_s + slope * point.floor_s, rel=1e-6)
        assert point.p10_s <= point.median_s < point.p90_s
        assert point.runs >= 3


@slow
def test_a_calibration_recovers_the_constants_and_writes_a_profile(tmp_path: Path) -> None:
    clock, table, shapes = toys()
    target = tmp_path / "somewhere" / "local"
    profile = calibrate("cpu", target, True, quiet, table=table, shapes=shapes, total_s=0.05, clock=clock)
    assert load_profile("cpu", str(target)) == profile
    rows = {(row.kind, row.where): row for row in profile.fits}
    assert rows.keys() == {(kind, f"dtype={d}") for kind in table for d in ("fp32", "bf16")}
    assert profile.birth is not None
    for (kind, _), row in rows.items():
        kernel_s, slope = (4e-6, 50.0) if kind == "norm" else (1e-6, 200.0)
        kernel_s += profile.birth.rates["host_op_s"]
        assert (row.kernel_s, row.efficiency) == pytest.approx((kernel_s, 1.0 / slope), rel=1e-6)
        assert row.n == 6
    assert profile.birth.threads == torch.get_num_threads()
    assert profile.birth.points == len(shapes)
    assert profile.birth.versions["torch"] == torch.__version__
    with (target / "points.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["floor_s"]) for line in lines] == [FLOOR(op).seconds for op in shapes]
    assert lines[1]["shape"] == "tokens=7;hidden=64"
    assert [path.name for path in target.parent.iterdir()] == ["local"]
    price = pricer(CPU, profile=profile)(norm("norm", tokens=100, hidden=64, dtype="fp32"))
    assert price.source == "interpolated"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """A calibration of toys, which asks the machine for nothing."""
    monkeypatch.setattr(calibration, "rates", lambda quick: {"memory_bytes_per_s": 1.0})

    def run(target: Path) -> Any:
        clock, table, shapes = toys()
        return calibrate("cpu", target, True, quiet, table=table, shapes=shapes, total_s=0.01, clock=clock)

    return run


@slow
def test_interrupted_it_leaves_what_was_there(
    tmp_path: Path, short: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "local"
    short(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert before.keys() == {"profile.yaml", "fits.csv", "points.csv"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for where, name in ((making, "_write_points"), (making, "write_fitted"), (calibration, "measure")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                short(target)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["local"]
    short(target)
    assert {path.name for path in target.iterdir()} == before.keys()


def test_it_replaces_nothing_but_a_calibration(tmp_path: Path, short: Callable[[Path], Any]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt, which no calibration or import has written"):
        short(tmp_path)
    with pytest.raises(InputError, match="is no directory"):
        short(tmp_path / "notes.txt")
    with pytest.raises(InputError, match="only cpu can be calibrated"):
        calibrate("h200-sxm", tmp_path / "local", True, quiet)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_bands_are_fitted_apart_and_share_their_edges() -> None:
    def point(m: int, n: int) -> Point:
        op = matmul("x", m=m, n=n, k=64, dtype="fp32")
        seconds = (1 if m == 1 else 10 if m < 16 else 20) * 1e-6 + FLOOR(op).seconds * 100
        return Point(op, 1, FLOOR(op).seconds, seconds, seconds, seconds, 5)

    points = [point(m, n) for m in (1, 2, 4, 16, 64) for n in (64, 128, 256, 512, 1024)]
    rows = {row.where: row for row in fits(points, {"matmul": 3e-6}, 1.0, CACHE)}
    assert {where: row.n for where, row in rows.items()} == {
        "dtype=fp32": 25,
        "dtype=fp32;m=1..1": 5,
        "dtype=fp32;m=2..4": 10,
        "dtype=fp32;m=5..16": 10,
        "dtype=fp32;m=17..64": 10,
        "dtype=fp32;m=65..": 5,
    }
    assert rows["dtype=fp32;m=1..1"].kernel_s == pytest.approx(4e-6)
    assert rows["dtype=fp32;m=2..4"].kernel_s == pytest.approx(13e-6)
    assert "dtype=fp32;m=1..1" not in {row.where for row in fits(points[:3], {}, 0.0, CACHE)}


def test_every_shape_of_the_grid_has_a_kernel_and_work() -> None:
    assert {op.kind for op in grid(KINDS)} == KINDS
    assert set(TABLE) >= KINDS, sorted(KINDS - set(TABLE))
    quick, whole = grid(KINDS, quick=True), grid(KINDS)
    assert {op.kind for op in quick} == KINDS
    assert set(quick) < set(whole)
    assert len(quick) < len(whole) / 2
    for op in whole:
        launches, floor_s = launches_and_floor(op, FLOOR)
        assert launches >= 1
        assert 0.0 < floor_s < 1.0


@slow
def test_the_host_costs_of_the_torch_machine_are_small_and_positive() -> None:
    op_s, launch_s, wait_s = host_costs()
    assert 0.0 < op_s < 1e-3
    assert 0.0 < launch_s < 1e-2
    assert 0.0 <= wait_s < 1e-2


# -- real runs, made up ------------------------------------------------------------------------------------


def trace_of(*times: tuple[Op, float]) -> Trace:
    """A run of these ops, one span each."""
    trace = Trace()
    for i, (op, seconds) in enumerate(times):
        priced = PricedOp(op, Price(seconds, seconds, seconds, "measured", "wall clock"), 0.0)
        trace.spans.append(
            Span(i, i, 0, "main", "g", "run", 0.0, 0.0, seconds, Cause(None, 0.0), (), (priced,), ())
        )
    return trace


def normed(tokens: int, name: str = "norm", dtype: str = "fp32") -> Op:
    return norm(name, tokens=tokens, hidden=64, dtype=dtype)


def test_a_replay_has_the_means_and_fits_what_was_not_run() -> None:
    def linear_s(op: Op) -> float:
        return 3e-6 + 100 * FLOOR(op).seconds

    here, there = placed(normed(8), layer=1), placed(normed(8, "other"), layer=2)
    run = trace_of((here, 1.0), (there, 3.0), (here, 2.0))
    price = measured_prices([run, trace_of((there, 2.5))], FLOOR)
    assert price(normed(8)).seconds == 2.125
    assert (price(here).source, price(here).detail) == ("measured", "mean of 4 runs")

    many = trace_of(*((normed(m), linear_s(normed(m))) for m in (10, 1000, 100000)))
    price = measured_prices([many], FLOOR)
    assert price(normed(333)).seconds == pytest.approx(linear_s(normed(333)))
    assert price(normed(333)).source == "interpolated"
    assert price(normed(10**7)).source == "extrapolated"
    # Another dtype has no runs of its own: it goes by those of the kind.
    assert price(normed(333, dtype="bf16")).seconds == pytest.approx(linear_s(normed(333, dtype="bf16")))
    fused = fuse("both", "both", (normed(10), normed(333)))
    assert price(fused).seconds == pytest.approx(linear_s(normed(10)) + linear_s(normed(333)))
    unknown = residual("r", tokens=1, hidden=4, dtype="fp32")
    with pytest.raises(InputError, match="no residual was measured, and the replay launches r"):
        price(unknown)
    assert measured_prices([many], FLOOR, pricer(CPU))(unknown) == pricer(CPU)(unknown)


def test_what_runs_take_besides_their_kernels_is_told_by_kind() -> None:
    def price(op: Op) -> Price:
        return Price(op["tokens"] * 1e-6, 0.0, 1.0, "measured", "")

    run = trace_of((normed(1), 6e-6), (normed(2), 9e-6), (normed(4), 8e-6))
    fast = trace_of((residual("r", tokens=9, hidden=4, dtype="fp32"), 1e-6))
    assert operand_costs(price, [run, fast]) == {"norm": pytest.approx(5e-6), "residual": 0.0}


def scaled(x: float) -> Kernel:
    """Doubles what it is given, in place, and returns its negative; wrong by a factor of 1 + x."""

    def run(op: Op, values: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del op
        values.mul_(2.0)
        return -values * (1.0 if values.dtype == torch.float64 else 1.0 + x), which

    def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, ...]:
        numbers = torch.rand(op["tokens"], generator=generator, device=device)
        return numbers, torch.arange(3)

    return Kernel(run, run, inputs)


def test_numerical_errors_are_relative_and_found_in_results_and_in_place() -> None:
    assert numeric_error(normed(7), {"norm": scaled(1e-3)}) == pytest.approx(1e-3, rel=1e-3)
    assert numeric_error(normed(7), {"norm": scaled(math.nan)}) == math.inf
    assert numeric_error(normed(7), {}) is None
    both = fuse("both", "both", (normed(3), normed(5)))
    assert numeric_error(both, {"norm": scaled(0.25)}) == pytest.approx(0.25, rel=1e-3)

    transform = tile("fft", layers=2, batch=1, channels=3, side=4, outputs=4, dtype="fp32").parts[0]
    assert transform.kind == "rfft"
    assert 0.0 < (numeric_error(transform) or 0.0) < 1e-6

    def forgets(op: Op, values: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scaled(0.0).run(op, values.clone(), which)  # type: ignore[no-any-return]

    assert numeric_error(normed(7), {"norm": scaled(0.0)._replace(run=forgets)}) == pytest.approx(0.5)


def test_points_are_of_all_that_was_launched_and_know_what_is_held_out() -> None:
    run = trace_of(*((placed(normed(m), layer=m), m * 1e-6) for m in range(1, 41)))

    def price(op: Op) -> Price:
        return Price(2e-6 * op["tokens"], 0.0, 1.0, "interpolated", "")

    points = op_points([run], price, FLOOR, table={"norm": scaled(0.5)}, calibrated=[normed(1), normed(40)])
    assert len(points) == 20
    assert {p.op["tokens"] for p in points if not p.held_out} == {1, 40}
    assert sum(p.error is not None for p in points) == 5
    assert all(p.predicted_s == pytest.approx(2 * p.measured_s) for p in points)


# -- the ladder --------------------------------------------------------------------------------------------

BOUNDS = Bounds({"fp32": 1e-2}, 60.0, 40.0, 50.0)
AXES = Axes("tensor_parallel", "tensor parallel", 1, 1, 128, 1)


def figures(times: float, *, label: str = "a") -> list[Row]:
    """Figures of a study, all times `times` as large as they are."""
    axes = replace(AXES, label=label)
    return [
        Row(axes, "token_latency_s", 1e-3 * times, "s"),
        Row(axes, "attention_s_per_layer", 2e-4 * times, "s"),
        Row(axes, "tokens_per_s_per_user", 1e3 * times, "1/s"),
        Row(axes, "queue_mean_s", 5e-6 * times**3, "s"),
        Row(axes, "attention_share", 0.5 / times, ""),
        Row(axes, "critical_path_s", 5e-4 * times**2, "s", op_kind="norm"),
        Row(axes, "standard_error_s", 5e-4 * times**4, "s"),
        Row(axes, "duration_s", 1e-3, "s"),
        Row(axes, "ttft_mean_s", None, "s"),
    ]


def points_of(error: float, off: float) -> list[OpPoint]:
    return [OpPoint(normed(m), error, 1e-5 * (1 + off), 1e-5) for m in (1, 2, 3)]


def test_only_times_that_both_have_are_compared() -> None:
    pairs = compared(figures(1.3), figures(1.0))
    assert [pair.measured.metric for pair in pairs] == ["token_latency_s", "attention_s_per_layer"]
    assert [pair.error_pct for pair in pairs] == pytest.approx([30.0] * 2)
    assert compared(figures(1.3), figures(1.0, label="b")) == []


def judged(rows: list[dict[str, Any]]) -> list[tuple[int, float | None, bool]]:
    return [(row["rung"], row["median_pct"], row["passed"]) for row in rows if row["passed"] is not None]


def test_each_rung_has_its_error_and_its_bound() -> None:
    rows = ladder(points_of(1e-5, 0.25), figures(1 / 1.4), figures(1.1), figures(1.0), BOUNDS)
    assert judged(rows) == [
        (0, pytest.approx(1e-3), True),
        (1, pytest.approx(25.0), True),
        (2, pytest.approx(10.0), True),
        (3, pytest.approx(40.0), True),
    ]
    assert holds(rows)
    kinds = [(row["rung"], row["label"], row["what"], row["n"]) for row in rows if row["passed"] is None]
    assert (0, "norm", "fp32", 3) in kinds
    assert (1, "norm", "fp32", 3) in kinds
    assert (2, "a", "times", 2) in kinds
    assert (3, "all", "token_latency_s", 1) in kinds


@pytest.mark.parametrize(
    ("points", "predicted", "replayed", "broken"),
    [
        (points_of(2e-4, 0.0), 1.0, 1.0, 0),
        (points_of(math.inf, 0.0), 1.0, 1.0, 0),
        (points_of(0.0, 0.7), 1.0, 1.0, 1),
        (points_of(0.0, 0.0), 1.0, 1.5, 2),
        (points_of(0.0, 0.0), 1.6, 1.0, 3),
        ([replace(p, op=normed(1, dtype="fp64")) for p in points_of(0.0, 0.0)], 1.0, 1.0, 0),
        ([replace(p, held_out=False) for p in points_of(0.0, 0.0)], 1.0, 1.0, 1),
    ],
)
def test_a_broken_bound_is_told_by_its_rung_alone(
    points: list[OpPoint], predicted: float, replayed: float, broken: int
) -> None:
    rows = ladder(points, figures(predicted), figures(replayed), figures(1.0), BOUNDS)
    assert [rung for rung, _, passed in judged(rows) if not passed] == [broken]
    assert not holds(rows)


def test_worst_and_95th_percentile_have_bounds_where_they_are_given() -> None:
    bounds = replace(BOUNDS, prices_p95=20.0, end_to_end_worst=20.0)
    points = [*points_of(0.0, 0.0), OpPoint(normed(9), 0.0, 1e-5, 1.3e-5)]
    rows = ladder(points, figures(1.25), figures(1.0), figures(1.0), bounds)
    broken = [(row["what"], row["judged_by"]) for row in rows if row["passed"] is False]
    assert broken == [("held-out shapes, 95th percentile", "p95_pct"), ("times, the worst", "worst_pct")]
    assert holds(ladder(points, figures(1.15), figures(1.0), figures(1.0), replace(bounds, prices_p95=31.0)))


def test_one_bad_kernel_fails_where_the_median_is_good() -> None:
    points = [*points_of(0.0, 0.0), OpPoint(normed(9), 1.0, 1e-5, 1e-5)]
    rows = ladder(points, figures(1.0), figures(1.0), figures(1.0), BOUNDS)
    assert judged(rows)[0] == (0, 0.0, False)


def test_where_nothing_was_compared_nothing_has_passed() -> None:
    rows = ladder([], [], [], [], BOUNDS)
    assert judged(rows) == [(rung, None, False) for rung in range(4)]


def test_bounds_are_read_and_faults_told_in_one_line(tmp_path: Path) -> None:
    assert load_bounds("cpu").numerics.keys() >= {"fp64", "fp32", "bf16", "fp16"}
    with pytest.raises(InputError, match="unknown device 'cpv'; did you mean 'cpu'"):
        load_bounds("cpv")
    path = tmp_path / "bounds.yaml"
    path.write_text("cpu: {numerics: {fp32: 1.0}, prices: 60.0, schedules: 0.0, end_to_end: 60.0}")
    with pytest.raises(InputError, match="cpu: schedules: ") as caught:
        load_bounds("cpu", path)
    assert "\n" not in str(caught.value)
