"""The calibration of a CUDA card, with times from a formula in the place of the card's."""

import csv
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import triton
import typer
from typer.testing import CliRunner

from simcore.devices.fitted import Birth, FittedProfile, SharedUse, write_law
from simcore.devices.interpolation import COLD, FEW_ROWS, STAY, Measured, coordinates, operand_bytes
from simcore.devices.making import Point, extended, shape_text, write_whole
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.decoder.matmul import MOST_ROWS, padded
from simcore.kernels.streams import one_stream, shared
from simcore.kernels.table import TABLE, Kernel
from simcore.ops.op import Op, Price, Roofline, matmul
from simcore.validate.accuracy.held_out import Tried, meets_bars, summary, unlike_fitted
from simcore.validate.accuracy.held_out import main as judge
from simcore.validate.accuracy.held_out import write as write_tried
from simcore.validate.accuracy.other_operators import ratios as operator_ratios
from simcore.validate.accuracy.other_operators import read
from simcore.validate.accuracy.profile_checks import by_kind
from simcore.validate.accuracy.tables import error_lines, errors_row, is_close
from simcore.validate.accuracy.two_calibrations import main as compare_profiles
from simcore.validate.accuracy.two_calibrations import ratios
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.benchmarks.timing import Card
from simcore.validate.calibration import cuda as card_calibrate
from simcore.validate.calibration import cuda_host as card_host
from simcore.validate.calibration import cuda_nodes as card_nodes
from simcore.validate.calibration import cuda_service as card_service
from simcore.validate.calibration import cuda_sharing as card_sharing
from simcore.validate.calibration import cuda_steps as card_steps
from simcore.validate.calibration.cuda import calibrate_card, own_line, profile_of
from simcore.validate.calibration.cuda_grid import CONTEXT, drawn, families, grid
from simcore.validate.program import run as run_program
from simcore.validate.timing import compile_ahead
from simcore.validate.timing import cuda_times as card_measure
from simcore.validate.timing.compile_ahead import as_compiled
from simcore.validate.timing.cuda_times import cache_state
from tests.thorough import slow, thorough

H200 = load_device("h200-sxm")
FLOOR = roofline(H200)
KINDS = {kind: TABLE[kind] for kind in ("norm", "decode_attention", "kv_copy")}


def quiet(what: str, done: int, of: int) -> None:
    """Progress that nobody looks at."""
    assert what
    assert 0 <= done <= of


def a_point(op: Op, role: str = "fit", noise: float = 0.0) -> Point:
    """What a card with ripples would take: no two constants say it."""
    launches, floor_s = launches_and_floor(op, FLOOR)
    at = coordinates(op.kind, {name: op[name] for name, _ in op.shape})
    ripple = 0.05 * math.sin(sum(math.log(max(1, size)) for size in at.values()))
    median_s = (launches * 1.5e-6 + floor_s / 0.8) * math.exp(ripple + noise)
    found = Point(
        op, launches, floor_s, median_s, 0.99 * median_s, 1.01 * median_s, 12, "cold", 0.5 * median_s
    )
    return replace(found, role="check" if role == "check" else "fit")


def place(op: Op) -> tuple[object, ...]:
    """What a card knows of an op."""
    at = coordinates(op.kind, {name: op[name] for name, _ in op.shape})
    return (op.kind, op.dtype, *sorted(at.items()))


# -- shapes ------------------------------------------------------------------------------------------------


@slow
def test_the_grid_has_every_shape_once_and_those_that_decoders_launch() -> None:
    found = grid(TABLE)
    assert len({(op.kind, op.shape, op.dtype) for op in found}) == len(found)
    assert {op.kind for op in found} == {family.kind for family in families()} <= set(TABLE)
    products = {(op["m"], op["n"], op["k"], op.dtype) for op in found if op.kind == "matmul"}
    # The projections of Llama 3.1 8B on one rank, and of one of eight.
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (768, 4096)):
        assert (1, n, k, "bf16") in products
        assert (512, n, k, "fp8") in products
    assert all(op.work.hbm_bytes <= 36e9 for op in found)


@slow
def test_a_quick_grid_is_a_part_with_the_same_ends() -> None:
    whole, part = grid(TABLE), grid(TABLE, quick=True)
    assert {place(op) for op in part} < {place(op) for op in whole}
    # Of shapes that a card cannot tell apart, one is enough.
    assert len({place(op) for op in whole}) == len(whole)
    assert len(part) < len(whole) / 2
    contexts = {op["context"] for op in part if op.kind == "decode_attention"}
    assert {CONTEXT[0], CONTEXT[-1]} <= contexts


@thorough
def test_drawn_shapes_are_in_no_grid_and_in_its_ranges() -> None:
    known = {(op.kind, op.shape, op.dtype) for op in grid(TABLE)}
    found = drawn(TABLE, 30, 1)
    assert not known & {(op.kind, op.shape, op.dtype) for op in found}
    assert found == drawn(TABLE, 30, 1) != drawn(TABLE, 30, 2)
    counts = Counter((op.kind, op.dtype) for op in found)
    # Products of steps that decode, and of prompts.
    assert 2 * counts["decode_attention", "bf16"] == counts["matmul", "fp8"] == 60
    for op in found:
        if op.kind == "decode_attention":
            assert CONTEXT[0] <= op["context"] <= CONTEXT[-1]
            assert 1 <= op["batch"] <= 256
        if op.kind == "tile_flash_fft":
            assert op["side"].bit_count() == 1
    taken = {(op.kind, op.shape, op.dtype) for op in drawn(["norm"], 30, 1)}
    assert not taken & {(op.kind, op.shape, op.dtype) for op in drawn(["norm"], 30, 1, without=taken)}


def test_lines_of_their_own_are_by_what_models_choose() -> None:
    assert list(own_line(matmul("q", m=3, n=8, k=4, dtype="bf16"))) == ["n=8;k=4"]
    assert next(own_line(grid(["activation"])[0])).startswith("width=")
    assert not list(own_line(layer_norm(3)))


def layer_norm(tokens: int) -> Op:
    """An op whose kind is in no family."""
    return replace(matmul("q", m=tokens, n=8, k=4, dtype="bf16"), kind="layer_norm")


@pytest.mark.parametrize(
    ("sets", "size", "where"), [(1, 1 << 30, "cold"), (31, 4_000_000, "cold"), (128, 16_384, "L2")]
)
def test_where_operands_come_from(sets: int, size: int, where: str) -> None:
    assert cache_state(sets, size, 60_000_000) == where


# -- a card of our own ---------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Op], None]], list[Op]]:
    """A card that takes what `a_point` says; gives the ops that were measured. What it is given may raise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: SimpleNamespace(uuid="1"))
    made = Card(60_000_000, 132, 4.4e12, "sum", 1e-6)
    monkeypatch.setattr(card_calibrate, "measure_card", lambda say: made)
    monkeypatch.setattr(card_calibrate, "as_compiled", lambda items, op_of, until_s: items)
    monkeypatch.setattr(card_host, "host_costs", lambda: {"launch_s": 6e-6, "wait_s": 1e-6})
    monkeypatch.setattr(card_measure, "rates", lambda card: {"read_bytes_per_s": card.read_bytes_per_s})

    def use(before: Callable[[Op], None]) -> list[Op]:
        seen: list[Op] = []

        def measured(kernel: Kernel, op: Op, floor: Roofline, card: Card) -> Point:
            assert kernel is TABLE[op.kind]
            assert floor(op) == FLOOR(op)
            assert card is made
            before(op)
            seen.append(op)
            return a_point(op)

        monkeypatch.setattr(card_measure, "measured", measured)
        return seen

    return use


def nothing(op: Op) -> None:
    """Lets it be measured."""


@slow
def test_a_calibration_prices_shapes_between_those_measured(
    card: Callable[..., list[Op]], tmp_path: Path
) -> None:
    seen = card(nothing)
    target, profile = calibrate_card(tmp_path / "local", False, quiet, table=KINDS, within_s=600.0)
    assert load_profile("h200-sxm", str(target)) == profile
    least = len(grid(KINDS)) + 40 * len(KINDS)
    assert least <= len(seen) == len(profile.points)
    assert profile.birth is not None
    assert profile.birth.processor == "NVIDIA H200"
    assert profile.overheads == {"launch_s": 6e-6, "wait_s": 1e-6}
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
    price = pricer(H200, profile=profile)
    held = [Tried(a_point(op), price(op)) for op in drawn(KINDS, 60, 7)]
    for row in summary(held):
        assert row["median_pct"] < 1.0
        assert row["worst_pct"] < 5.0
    # Of attention that takes longest few shapes are measured: some lie beyond them.
    sources = Counter(one.price.source for one in held)
    assert sources["interpolated"] + sources["measured"] > 0.9 * len(held)


def test_what_was_fitted_of_contention_stays(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    card(nothing)
    target = tmp_path / "local"
    table = {"sample": TABLE["sample"]}
    calibrate_card(target, True, quiet, table=table, within_s=60.0)
    found = SharedUse(3e-6, 0.0, 0.95, 14, 12, 3.0, "NVIDIA H200", "2026-11-22T11:19:28+00:00")
    write_law(found, target)
    _, again = calibrate_card(target, True, quiet, table=table, within_s=60.0)
    assert again.contention == found
    assert load_profile("h200-sxm", str(target / "profile.yaml")) == again


@slow
def test_kinds_of_op_are_measured_anew_by_themselves(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    """All else of a profile stays; a kind that was renewed twice has its last birth alone."""
    card(nothing)
    target, table = tmp_path / "local", {kind: TABLE[kind] for kind in ("sample", "norm", "residual")}
    _, before = calibrate_card(target, True, quiet, table=table, within_s=60.0)
    assert before.birth is not None
    seen = card(nothing)
    calibrate_card(target, True, quiet, table=table, within_s=60.0, kinds="sample,norm")
    assert {op.kind for op in seen} == {"sample", "norm"}
    _, again = calibrate_card(target, False, quiet, table=table, within_s=60.0, kinds="norm")
    assert load_profile("h200-sxm", str(target / "profile.yaml")) == again
    assert [each.kinds for each in again.renewed] == [("sample",), ("norm",)]
    counts = Counter(point.kind for point in again.points)
    assert [each.birth.points for each in again.renewed] == [counts["sample"], counts["norm"]]
    assert again.birth == replace(before.birth, points=counts["residual"])
    assert (again.overheads, again.contention) == (before.overheads, before.contention)
    own = [row for row in before.fits if row.kind == "residual"]
    assert [row for row in again.fits if row.kind == "residual"] == own
    # A full grid has more shapes than a quick one.
    assert counts["norm"] > Counter(point.kind for point in before.points)["norm"]
    assert again.source.startswith(f"{before.source}, of which stay {counts['residual']}; sample: ")
    lines = (target / "points.csv").read_text().splitlines()
    assert len(lines) == 1 + len(again.points)
    # Where all kinds are renewed, the last birth is that of the profile.
    _, third = calibrate_card(target, True, quiet, table=table, within_s=60.0, kinds="residual,sample,norm")
    assert third.birth is not None
    assert (third.birth.points, third.renewed) == (len(third.points), ())


@slow
def test_one_number_format_is_measured_anew_by_itself(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    """Each point is of the last birth that names it, whatever is renewed later."""
    card(nothing)
    target, table = tmp_path / "local", {kind: TABLE[kind] for kind in ("matmul", "sample")}

    def renew(kinds: str | None) -> FittedProfile:
        return calibrate_card(target, True, quiet, table=table, within_s=60.0, kinds=kinds)[1]

    before = renew(None)
    seen = card(nothing)
    again = renew("matmul:fp8")
    assert {(op.kind, op.dtype) for op in seen} == {("matmul", "fp8")}
    counts = Counter((point.kind, point.dtype) for point in before.points)
    assert Counter((point.kind, point.dtype) for point in again.points) == counts
    assert len(again.fits) == len(before.fits)
    births = [(each.kinds, each.birth.points) for each in again.renewed]
    assert births == [(("matmul:fp8",), counts["matmul", "fp8"])]
    of_all = sum(number for (kind, _), number in counts.items() if kind == "matmul")
    births = [(each.kinds, each.birth.points) for each in renew("matmul").renewed]
    assert births == [(("matmul",), of_all)]
    births = [(each.kinds, each.birth.points) for each in renew("matmul:fp8,sample").renewed]
    new = counts["matmul", "fp8"] + counts["sample", "int32"] + counts["sample", "bf16"]
    assert births == [(("matmul:fp8", "sample"), new)]
    assert renew("sample").renewed[0].kinds == ("matmul:fp8",)
    # Beside a kind that stays, what is renewed later takes nothing from it, and nothing twice.
    wide = tmp_path / "wide"
    table["norm"] = TABLE["norm"]
    for kinds in (None, "matmul", "matmul:fp8", "sample"):
        _, found = calibrate_card(wide, True, quiet, table=table, within_s=60.0, kinds=kinds)
    births = [(each.kinds, each.birth.points) for each in found.renewed]
    assert births == [
        (("matmul",), of_all - counts["matmul", "fp8"]),
        (("matmul:fp8",), counts["matmul", "fp8"]),
        (("sample",), Counter(point.kind for point in found.points)["sample"]),
    ]
    with pytest.raises(InputError, match=r"--kinds: unknown name 'sample:fp8'"):
        renew("sample:fp8")


@slow
def test_shapes_that_a_profile_lacks_stand_beside_what_it_has(
    card: Callable[..., list[Op]], tmp_path: Path
) -> None:
    """A full grid has more shapes than a quick one. What is there stays to the number, and each point keeps
    the birth that it had, whatever is renewed later."""
    card(nothing)
    target, table = tmp_path / "local", {kind: TABLE[kind] for kind in ("sample", "norm", "residual")}

    def measure(quick: bool, kinds: str | None = None, *, missing: bool = False) -> FittedProfile:
        return calibrate_card(target, quick, quiet, table=table, within_s=60.0, kinds=kinds, missing=missing)[
            1
        ]

    with pytest.raises(InputError, match=r"--missing: .*local holds no measured profile"):
        measure(True, missing=True)
    before = measure(True)
    with pytest.raises(InputError, match=r"--missing: .*local has all shapes of these kinds"):
        measure(True, missing=True)
    seen = card(nothing)
    more = measure(False, "norm,sample", missing=True)
    has = {(point.kind, point.shape, point.dtype) for point in before.points}
    assert {op.kind for op in seen} == {"norm", "sample"}
    assert more.points[: len(has)] == before.points
    assert not {(point.kind, point.shape, point.dtype) for point in more.points[len(has) :]} & has
    assert more.fits[: len(before.fits)] == before.fits
    assert len({(row.kind, row.where) for row in more.fits}) == len(more.fits)
    (added,) = more.renewed
    new = Counter(f"{point.kind}:{point.dtype}" for point in more.points[len(has) :])
    assert (added.beside, added.birth.points) == (new, len(more.points) - len(has))
    assert load_profile("h200-sxm", str(target / "profile.yaml")) == more
    assert more.source.startswith(f"{before.source}; beside them: ")
    assert len((target / "points.csv").read_text().splitlines()) == 1 + len(more.points)
    # What is renewed later takes the place of both, and leaves the others theirs.
    later = measure(True, "residual")
    assert [each.beside for each in later.renewed] == [new, {}]
    last = measure(True, "norm")
    beside = {name: number for name, number in new.items() if name.startswith("sample:")}
    assert [(each.kinds, each.beside) for each in last.renewed] == [
        ((*beside,), beside), (("residual",), {}), (("norm",), {}),
    ]  # fmt: skip
    counts = Counter(point.kind for point in last.points)
    own = last.birth.points if last.birth else 0
    said = f", of which stay {own}; beside them: {added.birth.date[:10]}, {sum(beside.values())} shapes; "
    assert last.source.startswith(f"{before.source}{said}")
    assert last.birth is not None
    assert last.birth.points == counts["sample"] - sum(beside.values())
    line, wide = replace(last.fits[0], where="dtype=fp64"), replace(last.points[0], dtype="fp64")
    wider = extended(last, replace(last, fits=(line, last.fits[0]), points=(wide,)))
    assert (wider.fits, wider.points[-1]) == ((*last.fits, line), wide)
    with pytest.raises(InputError, match=r"has norm .* already"):
        extended(last, replace(last, points=last.points[-1:]))
    with pytest.raises(InputError, match="so that nothing stands beside it"):
        extended(last, replace(last, device="h100-sxm"))


def test_kinds_that_could_not_be_measured_stay(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    card(nothing)
    target, table = tmp_path / "local", {kind: TABLE[kind] for kind in ("sample", "norm")}
    _, before = calibrate_card(target, True, quiet, table=table, within_s=60.0)

    def no_norm(op: Op) -> None:
        if op.kind == "norm":
            raise ValueError("no room")

    card(no_norm)
    _, again = calibrate_card(target, True, quiet, table=table, within_s=60.0, kinds="sample,norm")
    assert [each.kinds for each in again.renewed] == [("sample",)]
    assert "norm: stays, as none was measured" in again.renewed[0].notes
    assert sorted(again.points, key=repr) == sorted(before.points, key=repr)


@pytest.mark.parametrize(
    ("kinds", "says"), [("nrom", "nrom.*did you mean 'norm'"), ("norm", "no such|profile")]
)
def test_kinds_are_renewed_of_a_profile_that_is_there(
    kinds: str, says: str, card: Callable[..., list[Op]], tmp_path: Path
) -> None:
    card(nothing)
    with pytest.raises(InputError, match=says):
        calibrate_card(tmp_path / "p", True, quiet, table=KINDS, within_s=60.0, kinds=kinds)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [None, RuntimeError("no room"), InputError("no room"), ValueError("no time")]
)
@pytest.mark.parametrize("before", [None, SharedUse(3e-6, 0.0, 0.95, 14, 12, 3.0, "NVIDIA H200", "2026")])
def test_how_graphs_share_the_card_is_measured_or_noted(
    before: SharedUse | None,
    error: Exception | None,
    card: Callable[..., list[Op]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card(nothing)
    target, table = tmp_path / "local", {"sample": TABLE["sample"]}
    calibrate_card(target, True, quiet, table=table, within_s=60.0)
    if before is not None:
        write_law(before, target)
    found, begun_s, seen = (
        SharedUse(4e-6, 0.0, 0.95, 3, 3, 2.0, "NVIDIA H200", "2026-11-23"),
        time.perf_counter(),
        list[str](),
    )

    def here(
        profile: FittedProfile, *, quick: bool, end_s: float, say: Callable[[str], None]
    ) -> tuple[SharedUse, list[str]]:
        assert quick
        assert profile.overheads["launch_s"] == 6e-6
        # All but what fitting takes.
        assert end_s - begun_s == pytest.approx(60.0 - card_sharing.FITTING_S, abs=5.0)
        # What has been measured before is there already.
        assert load_profile("h200-sxm", str(target / "profile.yaml")) == profile
        say("a case")
        if error is not None:
            raise error
        return found, ["2 of 5 cases of contention were left out"]

    # What is measured of a decoder's step is not what this is about.
    monkeypatch.setattr(card_sharing, "ops", lambda *, quick: grid({"sample"}, quick=quick)[:1])
    monkeypatch.setattr(card_sharing, "shared_use_here", here)
    _, profile = calibrate_card(
        target, True, lambda text, done, of: seen.append(f"{text} {done} of {of}"), table=table, within_s=60.0
    )
    assert seen[-2:] == ["graphs beside each other: case 0 of 5", "a case: case 1 of 5"]
    noted = [note for note in profile.notes if "contention" in note]
    if error is None:
        assert profile.contention == found
        assert noted == ["2 of 5 cases of contention were left out"]
    else:
        assert profile.contention == before
        assert len(noted) == 1
        assert str(error) in noted[0]
        assert ("of the profile before" in noted[0]) == (before is not None)
    assert load_profile("h200-sxm", str(target / "profile.yaml")) == profile


@thorough
def test_what_graphs_that_share_a_card_launch_is_compiled_first(
    card: Callable[..., list[Op]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, whole = card_calibrate.shapes_of(TABLE, True), card_calibrate.shapes_of(TABLE, False)
    others = card_calibrate.shared_shapes(TABLE, True, few)
    assert sorted((op.kind, op["side"]) for op, _ in others) == [
        ("tile_flash_fft", 256),
        ("tile_flash_fft", 512),
    ]
    # The whole grid has all of it.
    assert card_calibrate.shared_shapes(TABLE, False, whole) == []
    assert card_calibrate.shared_shapes(["sample", "tile_flash_fft"], True, few) == []
    in_grid = grid(["sample"], quick=True)
    launched = [replace(in_grid[0], shape=(("tokens", 77), ("vocab", 128256))), in_grid[1]]
    monkeypatch.setattr(card_sharing, "ops", lambda *, quick: launched)
    monkeypatch.setattr(card_sharing, "shared_use_here", lambda *_, **__: (None, []))
    seen = card(nothing)
    calibrate_card(tmp_path / "local", True, quiet, table={"sample": TABLE["sample"]}, within_s=60.0)
    assert seen[0] == launched[0]
    assert sum(op == launched[0] for op in seen) == sum(op == launched[1] for op in seen) == 1


@pytest.mark.parametrize("found", [[2e-7, 5e-7, 4e-7, 4e-7], [-1e-7], RuntimeError("no room")])
def test_what_kernels_take_in_graphs_is_among_the_overheads_or_noted(
    found: list[float] | Exception,
    card: Callable[..., list[Op]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = iter(range(1000))

    def some_fail(op: Op) -> None:
        # More than are noted one by one.
        if next(tries) % 3 == 0:
            raise RuntimeError("no such shape")

    seen = card(some_fail)

    def costs(floor: Roofline, reached: Card) -> list[float]:
        assert len(seen) > 10
        if isinstance(found, Exception):
            raise found
        return found

    for module in (card_nodes, card_steps):
        monkeypatch.setattr(module, "KINDS", frozenset({"sample"}))
    monkeypatch.setattr(card_nodes, "node_costs_here", costs)
    monkeypatch.setattr(card_steps, "step_costs_here", costs)
    monkeypatch.setattr(card_service, "service_costs_here", lambda _: ({"batch_s": 1e-4}, "batch_s: 100 us"))
    table = {"sample": TABLE["sample"]}
    _, profile = calibrate_card(tmp_path / "local", True, quiet, table=table, within_s=60.0)
    if isinstance(found, Exception):
        assert not {"in_graph_s", "in_step_s", "batch_s"} & profile.overheads.keys()
        assert "in_graph_s could not be measured: RuntimeError: no room" in profile.notes
    else:
        for name in ("in_graph_s", "in_step_s"):
            assert profile.overheads[name] == pytest.approx(4e-7 if len(found) > 1 else 0.0)
            assert any(note.startswith(f"{name}: ") for note in profile.notes)
        assert profile.overheads["batch_s"] == 1e-4
    assert profile.overheads["launch_s"] == 6e-6
    assert any("shapes could not be measured" in note for note in profile.notes)
    assert load_profile("h200-sxm", str(tmp_path / "local")) == profile


@slow
def test_costs_of_verbs_are_renewed_alone(
    card: Callable[..., list[Op]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = card(nothing)
    target, table = tmp_path / "local", {"sample": TABLE["sample"]}
    _, before = calibrate_card(target, True, quiet, table=table, within_s=60.0)
    count = len(seen)
    monkeypatch.setattr(card_nodes, "node_costs_here", lambda *_: [3e-7])
    monkeypatch.setattr(card_steps, "step_costs_here", lambda *_: [5e-7])
    monkeypatch.setattr(card_service, "service_costs_here", lambda _: ({"batch_s": 2e-4}, "batch_s: 200 us"))
    _, after = calibrate_card(target, False, quiet, table=table, within_s=60.0, kinds="verbs")
    assert len(seen) == count
    new = {"in_graph_s": 3e-7, "in_step_s": 5e-7, "batch_s": 2e-4}
    assert after == replace(
        before, overheads={**before.overheads, **new}, source=after.source, renewed=after.renewed
    )
    assert [each.kinds for each in after.renewed] == [("verbs",)]
    assert (after.renewed[0].birth.points, after.renewed[0].birth.runs) == (0, None)
    assert any(note.startswith("in_step_s: ") for note in after.renewed[0].notes)
    assert load_profile("h200-sxm", str(target)) == after
    # Beside a kind of op they have a record of their own, and never give the profile its birth.
    _, both = calibrate_card(target, False, quiet, table=table, within_s=60.0, kinds="sample,verbs")
    assert [each.kinds for each in both.renewed] == [("verbs",)]
    assert both.birth is not None
    assert both.birth.points == len(both.points) > 0
    assert not any("in_step_s" in note for note in both.notes)


def test_a_profile_stays_if_no_verb_could_be_measured(
    card: Callable[..., list[Op]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(nothing)
    target, table = tmp_path / "local", {"sample": TABLE["sample"]}
    _, before = calibrate_card(target, True, quiet, table=table, within_s=60.0)

    def fails() -> dict[str, float]:
        raise RuntimeError("a busy host")

    monkeypatch.setattr(card_host, "host_costs", fails)
    with pytest.raises(InputError, match="what verbs cost could not be measured: RuntimeError: a busy host"):
        calibrate_card(target, False, quiet, table=table, within_s=60.0, kinds="verbs")
    assert load_profile("h200-sxm", str(target)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


@slow
def test_jumps_are_found_between_measured_shapes(
    card: Callable[..., list[Op]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice_beyond(kernel: Kernel, op: Op, floor: Roofline, card: Card) -> Point:
        point = a_point(op)
        return replace(point, median_s=point.median_s * (2.0 if op["tokens"] > 700 else 1.0))

    table = {"norm": TABLE["norm"]}
    card(nothing)
    monkeypatch.setattr(card_measure, "measured", twice_beyond)
    _, profile = calibrate_card(tmp_path / "local", False, quiet, table=table, within_s=600.0)
    tokens = sorted({p.dimensions["tokens"] for p in profile.points if p.role == "fit"})
    # Between 512 and 2048 halved four times by the logarithm: 9 % lie between the nearest two.
    below, above = max(t for t in tokens if t <= 700), min(t for t in tokens if t > 700)
    assert above / below < 4.0 ** (1.0 / 16.0) * 1.01
    price = pricer(H200, profile=profile)
    held = [
        Tried(twice_beyond(table["norm"], op, FLOOR, Card(0, 0, 0.0, "", 0.0)), price(op))
        for op in drawn(table, 200, 7)
    ]
    assert summary(held)[-1]["p95_pct"] < 5.0


def test_rows_left_over_by_four_are_told_apart(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    """An op whose time hangs on its rows modulo four alone: no line through all rows would say so."""

    def by_four(kernel: Kernel, op: Op, floor: Roofline, card: Card) -> Point:
        return replace(a_point(op), median_s=1e-6 * (1.0 + 0.1 * (op["rows"] % 4)))

    card(nothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_measure, "measured", by_four)
        table = {"gate": TABLE["gate"]}
        _, profile = calibrate_card(tmp_path / "local", False, quiet, table=table, within_s=600.0)
    price = pricer(H200, profile=profile)
    for op in drawn(table, 60, 7):
        assert price(op).seconds == pytest.approx(1e-6 * (1.0 + 0.1 * (op["rows"] % 4)), rel=1e-6)


@slow
def test_what_only_checks_does_not_keep_a_jump_from_being_found(
    card: Callable[..., list[Op]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle of 8 and 16 tokens is a shape that only checks: its neighbour is measured instead."""
    norm = {"norm": TABLE["norm"]}
    checks = [op for op in grid(norm) if op["tokens"] == 8]
    middle = [replace(op, shape=(("tokens", 11), *op.shape[1:])) for op in checks]
    assert middle[0].shape[0] == ("tokens", 11)
    card(nothing)
    monkeypatch.setattr(card_calibrate, "drawn", lambda *arguments: middle)

    def twice_beyond(kernel: Kernel, op: Op, floor: Roofline, card: Card) -> Point:
        point = a_point(op)
        return replace(point, median_s=point.median_s * (2.0 if op["tokens"] > 13 else 1.0))

    monkeypatch.setattr(card_measure, "measured", twice_beyond)
    _, profile = calibrate_card(tmp_path / "local", False, quiet, table=norm, within_s=600.0)
    tokens = {p.dimensions["tokens"] for p in profile.points if p.role == "fit"}
    assert {12, 14} <= tokens
    assert 11 not in tokens


@slow
def test_intervals_cover_what_they_say(tmp_path: Path) -> None:
    """Of normal noise, 400 checks, 400 held-out shapes. The share inside varies by 0.015, the root of
    0.9 x 0.1 / 400, by the draws, and about as much by the checks: four standard errors of both, so that
    neither 0.81 nor 0.99 passes."""
    noise = np.random.default_rng(0)
    kinds = ["decode_attention"]
    points = [a_point(op) for op in grid(kinds)]
    points += [a_point(op, "check", noise.normal(0.0, 0.03)) for op in drawn(kinds, 400, 1)]
    born = profile_born()
    price = pricer(H200, profile=profile_of("h200-sxm", points, born, {}, []))
    held = drawn(kinds, 400, 2)
    inside = [Tried(a_point(op, noise=noise.normal(0.0, 0.03)), price(op)).covered for op in held]
    assert abs(statistics.fmean(inside) - 0.9) < 4.0 * math.hypot(0.015, 0.015)


def profile_born() -> Birth:
    """A birth record of no card."""
    return Birth("2026-01-01T00:00:00+00:00", "stub", 1, {"torch": "2"}, 10, 3, 0.01, {})


@thorough
def test_what_was_interrupted_goes_on_where_it_stopped(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    left = iter(range(100))

    def until_then(op: Op) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    seen = card(until_then)
    with pytest.raises(KeyboardInterrupt):
        calibrate_card(tmp_path / "local", False, quiet, table=KINDS, within_s=600.0)
    assert len(seen) == 100
    assert not (tmp_path / "local").exists()
    again = card(nothing)
    _, profile = calibrate_card(tmp_path / "local", False, quiet, table=KINDS, within_s=600.0)
    assert len(again) == len(profile.points) - 100
    assert not set(again) & set(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
    card(nothing)
    assert (
        calibrate_card(tmp_path / "other", False, quiet, table=KINDS, within_s=600.0)[1].points
        == profile.points
    )


@slow
def test_what_there_is_no_time_for_is_noted(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    seen = card(nothing)
    late = iter([0.0] + [1.0] * 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_calibrate.time, "perf_counter", lambda: next(late, 100.0))
        _, profile = calibrate_card(tmp_path / "local", False, quiet, table=KINDS, within_s=10.0)
    assert 10 < len(seen) < 100
    assert any(note.endswith("there was no time for them") for note in profile.notes)


def test_what_another_card_left_is_not_taken(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    (tmp_path / ".local-partial.csv").write_text('{"device": "another"}\nnorm,tokens=1;hidden=4096,bf16\n')
    seen = card(nothing)
    _, profile = calibrate_card(
        tmp_path / "local", True, quiet, table={"norm": TABLE["norm"]}, within_s=600.0
    )
    assert len(seen) == len(profile.points)


@slow
def test_what_cannot_be_measured_is_noted(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    def small_only(op: Op) -> None:
        if op.kind == "kv_copy":
            raise RuntimeError("out of memory")

    card(small_only)
    _, profile = calibrate_card(tmp_path / "local", True, quiet, table=KINDS, within_s=600.0)
    assert any("could not be measured" in note for note in profile.notes)
    assert any("kv_copy" in note and "out of memory" in note for note in profile.notes)
    assert not any(point.kind == "kv_copy" for point in profile.points)


def test_nothing_measured_is_no_profile(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    tried: list[Op] = []

    def never(op: Op) -> None:
        tried.append(op)
        raise RuntimeError("no kernel")

    card(never)
    with pytest.raises(InputError, match=r"nothing could be measured; .*no kernel"):
        calibrate_card(tmp_path / "local", True, quiet, table=KINDS, within_s=600.0)
    # It does not take nine minutes to say so.
    assert card_calibrate.MOST_FAILURES <= len(tried) < len(grid(KINDS, quick=True)) / 2
    assert not (tmp_path / "local").exists()


def test_without_a_card_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--on cuda: torch finds no CUDA device"):
        calibrate_card(tmp_path / "local", True, quiet, within_s=600.0)


def test_a_card_that_the_catalogue_has_not_got_is_refused(
    card: Callable[..., list[Op]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card(nothing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA GeForce RTX 4090")
    with pytest.raises(
        InputError, match="--on cuda: no device of the catalogue is a NVIDIA GeForce RTX 4090"
    ):
        calibrate_card(tmp_path / "local", True, quiet, within_s=600.0)


# -- kernels compiled beside measuring -----------------------------------------------------------------------


class Pool:
    """Processes that end nothing until somebody waits for them."""

    def __init__(self, *arguments: object) -> None:
        self.jobs: dict[tuple[str, ...], Future[None]] = {}
        POOLS.append(self)

    def submit(self, call: Callable[..., None], *kernel: str) -> Future[None]:
        assert call is compile_ahead.compiled
        self.jobs[kernel] = Future()
        return self.jobs[kernel]

    def shutdown(self, **how: bool) -> None:
        assert how == {"wait": False, "cancel_futures": True}


POOLS: list[Pool] = []


class Launches:
    """Ops that launch kernels by their names; `launched`: which, of which op; `asked`: how often at all."""

    def __init__(self, kernels: Mapping[str, Sequence[str]]) -> None:
        self.kernels, self.launched, self.asked = kernels, list[tuple[str, str]](), 0
        self.ops = [replace(matmul("q", m=1, n=8, k=4, dtype="bf16"), name=name) for name in kernels]

    def tried(self, op: Op) -> None:
        hook = triton.knobs.runtime.jit_cache_hook
        assert hook is not None
        self.asked += 1
        for name in self.kernels[op.name]:
            made = {"specialization_data": "n=1"}
            if not hook(fn=SimpleNamespace(module="kernels", name=name), compile=made, key="", repr=""):
                self.launched.append((op.name, name))


def all_come(futures: Collection[Future[None]], timeout: float, when: str) -> None:
    """Everything is compiled when it is waited for."""
    assert 0.0 < timeout <= 60.0
    assert when == "FIRST_COMPLETED"
    for future in futures:
        if not future.done():
            future.set_result(None)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """The pools that were made."""
    POOLS.clear()
    monkeypatch.setattr(compile_ahead, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(compile_ahead, "wait", all_come)
    return POOLS


def named(ops: Iterable[Op]) -> list[str]:
    return [op.name for op in ops]


def test_ops_whose_kernels_are_compiled_do_not_wait(pool: list[Pool]) -> None:
    """Of three ops two launch a kernel that is missing; both wait for one compilation."""
    ops = Launches({"few": ("a",), "more": ("a", "b"), "none": ()})
    found = as_compiled(ops.ops, lambda op: op, time.perf_counter() + 60.0, ops.tried)
    assert named(found) == ["none", "few", "more"]
    assert ops.launched == []
    assert [*pool[0].jobs] == [("kernels", "a", "n=1"), ("kernels", "b", "n=1")]
    assert triton.knobs.runtime.jit_cache_hook is None


def test_what_has_been_compiled_meanwhile_comes_at_once_and_is_launched(pool: list[Pool]) -> None:
    ops = Launches({"first": ("a",), "second": (), "third": ("a",), "fourth": ()})
    found = as_compiled(ops.ops, lambda op: op, time.perf_counter() + 60.0, ops.tried)
    assert next(found).name == "second"
    pool[0].jobs["kernels", "a", "n=1"].set_result(None)
    assert next(found).name == "first"
    assert next(found).name == "third"
    assert ops.launched == [("third", "a")]
    assert named(found) == ["fourth"]


def test_after_its_time_nothing_is_waited_for(pool: list[Pool]) -> None:
    ops = Launches({"first": ("a",), "second": ()})
    assert named(as_compiled(ops.ops, lambda op: op, time.perf_counter(), ops.tried)) == ["second", "first"]
    assert not pool[0].jobs["kernels", "a", "n=1"].done()


def test_known_ops_and_kinds_without_kernels_are_not_tried(pool: list[Pool]) -> None:
    most = compile_ahead.MOST_TRIES
    ops = Launches({str(i): () for i in range(most + 20)})
    assert len(list(as_compiled(ops.ops, lambda op: op, time.perf_counter() + 60.0, ops.tried))) == most + 20
    assert ops.asked == most
    assert (
        len(list(as_compiled(ops.ops, lambda op: None, time.perf_counter() + 60.0, ops.tried))) == most + 20
    )
    assert ops.asked == most
    assert not pool


def test_where_no_process_can_be_had_it_is_compiled_where_it_is_launched(
    pool: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise BrokenProcessPool("no memory")

    monkeypatch.setattr(Pool, "submit", broken)
    ops = Launches({"first": ("a",), "second": ()})
    found = as_compiled(ops.ops, lambda op: op, time.perf_counter() + 60.0, ops.tried)
    assert named(found) == ["first", "second"]
    assert ops.launched == [("first", "a")]


def test_a_kernel_is_compiled_as_the_hook_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(compile_ahead, "a_kernel", SimpleNamespace(preload=given.append), raising=False)
    compile_ahead.compiled("simcore.validate.timing.compile_ahead", "a_kernel", "n=1")
    assert given == ["n=1"]
    # What fails here fails, and is noted, where it is launched.
    compile_ahead.compiled("simcore.validate.timing.compile_ahead", "no_such_kernel", "n=1")


@thorough
def test_a_real_process_ends_what_it_was_given() -> None:
    ops = Launches({"first": ("no_such_kernel",)})
    begun_s = time.perf_counter()
    assert named(as_compiled(ops.ops, lambda op: op, begun_s + 300.0, ops.tried)) == ["first"]
    assert time.perf_counter() - begun_s < 200.0


# -- held-out shapes ---------------------------------------------------------------------------------------


def test_held_out_prices_are_judged_by_kind() -> None:
    ops = drawn(["norm", "kv_copy"], 20, 3)
    right = pricer(H200, profile=profile_of("h200-sxm", [a_point(op) for op in ops], profile_born(), {}, []))
    rows = summary([Tried(a_point(op), right(op)) for op in ops])
    assert [row["kind"] for row in rows] == ["kv_copy bf16", "norm bf16", "all"]
    assert [row["n"] for row in rows] == [20, 20, 40]
    assert all(row["worst_pct"] < 1e-6 for row in rows)
    # Intervals that never miss say too little.
    assert not any(meets_bars(row) for row in rows)
    off = summary([Tried(a_point(op, noise=0.5), right(op)) for op in ops])
    assert off[-1]["median_pct"] == pytest.approx(100.0 * (math.exp(0.5) - 1.0))
    text = list(error_lines(rows))
    assert len(text) == 4
    assert "kv_copy" in text[1]


HELD_OUT = {"kinds": "norm,kv_copy", "count": 5, "seed": 101, "device": "h200-sxm"}


@pytest.fixture
def held_out_rows(tmp_path: Path) -> Path:
    """What `held_out --out` writes, by another profile than the committed one."""
    ops, path = drawn(["norm", "kv_copy"], 5, 101), tmp_path / "rows.csv"
    prices = pricer(H200, profile=profile_of("h200-sxm", [a_point(op) for op in ops], profile_born(), {}, []))
    born = {**dict.fromkeys(BORN, "x"), "device": "NVIDIA H200"}
    write_tried([Tried(a_point(op, noise=0.5), prices(op)) for op in ops], born, path)
    return path


@slow
def test_times_of_an_earlier_run_are_judged_by_the_prices_of_today(
    held_out_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.csv"
    with pytest.raises(typer.Exit):
        judge(**HELD_OUT, again=held_out_rows, out=again)  # type: ignore[arg-type]
    assert "norm bf16" in capsys.readouterr().out
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in (held_out_rows, again)]
    # The committed profile may have measured some of them.
    assert 5 < len(rows[1]) <= 10
    by_shape = [{row["kind"] + row["shape"]: row for row in each} for each in rows]
    for name, row in by_shape[1].items():
        assert by_shape[0][name]["median_s"] == row["median_s"]
        assert by_shape[0][name]["predicted_s"] != row["predicted_s"]


def test_what_a_profile_was_made_of_is_not_held_out(
    held_out_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [a_point(op) for op in drawn(["norm", "kv_copy"], 5, 101)[:3]]
    of = replace(profile_born(), processor="NVIDIA H200", points=len(points))
    write_whole(profile_of("h200-sxm", points, of, {}, []), points, tmp_path / "p")
    with pytest.raises(typer.Exit):
        judge(**HELD_OUT, again=held_out_rows, profile=str(tmp_path / "p"))  # type: ignore[arg-type]
    assert "left out: 3 shapes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind,shape", "kind,form", "has no column shape"),
        ("kv_copy,", "kv_copy,1,", "line 7: has not as many cells"),
        ("NVIDIA H200", "NVIDIA A100", "line 3: device: is NVIDIA H200, of the first NVIDIA A100"),
        (",12,cold", ",0,cold", "line 2: n: "),
    ],
)
def test_a_line_that_no_run_wrote_is_refused(held_out_rows: Path, old: str, new: str, words: str) -> None:
    text = held_out_rows.read_text()
    assert old in text
    held_out_rows.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        judge(**HELD_OUT, again=held_out_rows)  # type: ignore[arg-type]


@slow
def test_only_the_shapes_of_a_run_are_judged_again(held_out_rows: Path) -> None:
    for changed, words in (({"seed": 102}, "have to be those"), ({"device": ""}, "--device")):
        with pytest.raises(InputError, match=words):
            judge(**{**HELD_OUT, **changed}, again=held_out_rows)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--device"):
        judge(device="h200-sxm")
    with pytest.raises(InputError, match="is no plain file"):
        judge(**HELD_OUT, again=held_out_rows, out=Path("/dev/null"))  # type: ignore[arg-type]
    text = held_out_rows.read_text()
    for other, words in ((f"{text}{text.splitlines()[-1]}\n", "twice"), ("", "column")):
        held_out_rows.write_text(other)
        with pytest.raises(InputError, match=words):
            judge(**HELD_OUT, again=held_out_rows)  # type: ignore[arg-type]


def test_shapes_that_are_launched_as_measured_ones_are_told_apart() -> None:
    """Products of 65 rows are launched with 72."""
    few, padded, other = (matmul("matmul", m=m, n=4096, k=4096, dtype="bf16") for m in (72, 65, 80))
    checks = [a_point(other, "check")]
    profile = profile_of("h200-sxm", [a_point(few), *checks], profile_born(), {}, [])
    price = pricer(H200, profile=profile)
    found = [Tried(a_point(op), price(op)) for op in (padded, other)]
    assert [one.point.op for one in unlike_fitted(found, profile)] == [other]


# -- buffers of a stream -----------------------------------------------------------------------------------


def test_launches_of_one_stream_share_buffers_and_others_do_not() -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(0)
        return made

    shared("a", make)
    shared("a", make)
    assert len(made) == 2
    kept: dict[object, object] = {}
    for _ in range(2):
        with one_stream(kept):
            shared("a", make)
            shared("a", make)
    assert len(made) == 3
    with one_stream({}):
        shared("a", make)
    assert len(made) == 4


def test_checks_are_not_fitted_to() -> None:
    points = [a_point(op) for op in grid(["norm"])]
    checks = [a_point(op, "check", 3.0) for op in drawn(["norm"], 20, 1)]
    alone = profile_of("h200-sxm", points, profile_born(), {}, [])
    both = profile_of("h200-sxm", [*points, *checks], profile_born(), {}, [])
    assert alone.fits == both.fits
    op = drawn(["norm"], 1, 5)[0]
    a, b = (pricer(H200, profile=profile)(op) for profile in (alone, both))
    assert a.seconds == b.seconds
    assert b.high_s > 10.0 * a.high_s


def test_prices_and_kernels_agree_on_what_few_rows_are() -> None:
    assert FEW_ROWS == MOST_ROWS


def test_a_role_is_fit_or_check() -> None:
    with pytest.raises(ValueError, match="'fit' or 'check'"):
        Measured("norm", "m=1", "bf16", 1, 1e-6, 1e-6, "guess")  # type: ignore[arg-type]


def test_two_calibrations_are_compared_by_shape(tmp_path: Path) -> None:
    points = [a_point(op) for op in grid(["norm", "kv_copy"])]
    slower = [replace(p, median_s=p.median_s * (1.03 if p.op.kind == "norm" else 1.001)) for p in points[::2]]
    first, second = (
        profile_of("h200-sxm", each, replace(profile_born(), points=len(each)), {}, [])
        for each in (points, slower)
    )
    found = ratios(first, second)
    both = Counter(f"{p.op.kind} {p.op.dtype}" for p in slower)
    assert {kind: len(each) for kind, each in found.items()} == both
    assert min(both.values()) > 10
    assert all(ratio == pytest.approx(1.03) for ratio in found["norm bf16"])
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, profile, measured in zip(folders, (first, second), (points, slower), strict=True):
        write_whole(profile, measured, folder)
    given = [*(str(folder) for folder in folders), "--out", str(tmp_path / "rows.csv")]
    seen = CliRunner().invoke(app_of(compare_profiles), given)
    assert seen.exit_code == 1
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = {row["kind"]: float(row["median"]) for row in csv.DictReader(file)}
    assert written.keys() == {*both, "all"}
    assert written["norm bf16"] == pytest.approx(1.03)
    assert "off by more than 2 %: norm bf16" in seen.output
    same = CliRunner().invoke(app_of(compare_profiles), [str(folders[0])] * 2)
    assert same.exit_code == 0
    assert "1.0000" in same.output


def app_of(main: Callable[..., None]) -> typer.Typer:
    """A program that is one function."""
    found = typer.Typer()
    found.command()(main)
    return found


@slow
def test_operators_of_others_are_compared_where_they_are_the_same(tmp_path: Path) -> None:
    products = {"gemm_dtype": ["bfloat16", "fp8", "bfloat16", "int8"], "m": [16, 16, 16, 16]}
    products |= {"n": [6144, 6144, 7, 6144], "k": [4096, 4096, 9, 4096], "latency": [0.02, 0.005, 1.0, 1.0]}
    pq.write_table(pa.table(products), tmp_path / "x__gemm_perf.parquet")
    heads = {"num_heads": [32, 32], "num_key_value_heads": [8, 8], "head_dim": [128, 128]}
    attention = {**heads, "attn_dtype": ["bfloat16"] * 2, "kv_cache_dtype": ["bfloat16", "fp8"]}
    attention |= {"batch_size": [4, 4], "isl": [1, 1], "step": [1023, 1023], "window_size": [0, 0]}
    pq.write_table(
        pa.table({**attention, "latency": [0.03, 1.0]}), tmp_path / "x__generation_attention_perf.parquet"
    )
    moved = {"nccl_dtype": ["half", "int8"], "op_name": ["all_reduce"] * 2, "num_gpus": [8, 8]}
    moved |= {"message_size": [4096, 4096], "latency": [0.0184, 1.0], "kernel_source": ["NCCL"] * 2}
    pq.write_table(pa.table(moved), tmp_path / "x__nccl_perf.parquet")
    others = read(tmp_path)
    assert [(other.op.kind, other.size, other.seconds) for other in others] == [
        ("matmul", 16, pytest.approx(2e-5)),
        ("matmul", 16, pytest.approx(5e-6)),
        ("decode_attention", 4096, pytest.approx(3e-5)),
        ("all_reduce", 4096, pytest.approx(1.84e-5)),
    ]
    assert others[2].op["context"] == 1024
    assert others[3].op.work.hbm_bytes == 8192
    assert [other.table.partition(", rows")[0] for other in others[:2]] == [
        "matmul bf16, weights over 30 MB",
        "matmul fp8, weights over 15 MB",
    ]
    always = Price(1e-5, 1e-5, 1e-5, "measured", "")
    rows = operator_ratios(others, lambda op: always, FLOOR)
    # 50 MB in 20 us are less than the card's memory gives; 25 MB in 5 us would be more.
    assert [row["median"] for row in rows] == [pytest.approx(1.84), pytest.approx(3.0), 2.0, None]
    assert [row["impossible"] for row in rows] == [0, 0, 0, 1]
    assert [row["extrapolated"] for row in rows] == [0, 0, 0, 0]
    guess = replace(always, source="extrapolated")
    rows = operator_ratios(others, lambda op: guess if op.kind == "matmul" else always, FLOOR)
    assert [(row["n"], row["extrapolated"], row["impossible"]) for row in rows] == [
        (1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1),
    ]  # fmt: skip
    with pytest.raises(InputError, match="no table of operators"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"m": [0]}, "row 1: m: is 0; it should be a whole number from 1 on"),
        ({"m": [None]}, "row 1: m: is None"),
        ({"m": [1 << 62]}, r"row 1: m: is 4611686018427387904; it should be a whole number from 1 on, below"),
        ({"k": [1.5]}, "row 1: k: is 1.5"),
        ({"latency": [math.nan]}, "row 1: latency: is nan; it should be milliseconds above 0"),
        ({"latency": ["abc"]}, "row 1: latency: is 'abc'"),
        ({"n": []}, "has no rows"),
        ({"num_gpus": [1]}, "row 1: num_gpus: is 1; it should be a whole number from 2 on"),
    ],
)
def test_what_nobody_can_have_measured_is_refused(
    cells: Mapping[str, list[Any]], says: str, tmp_path: Path
) -> None:
    good = {"gemm_dtype": ["bfloat16"], "m": [16], "n": [6144], "k": [4096], "latency": [0.02]}
    found = {name: value[: len(next(iter(cells.values())))] for name, value in good.items()}
    path = tmp_path / "x__gemm_perf.parquet"
    pq.write_table(pa.table({**found, **cells}), path)
    with pytest.raises(InputError, match=f"x__gemm_perf.parquet: {says}"):
        read(tmp_path)
    pq.write_table(pa.table({name: value for name, value in good.items() if name != "k"}), path)
    with pytest.raises(InputError, match="column 'k': is missing"):
        read(tmp_path)
    path.write_bytes(b"nothing of that kind")
    with pytest.raises(InputError, match="is no table of parquet"):
        read(tmp_path)


def test_a_line_that_was_cut_off_is_measured_again(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    table, left = {"norm": TABLE["norm"]}, iter(range(10))

    def until_then(op: Op) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    card(until_then)
    with pytest.raises(KeyboardInterrupt):
        calibrate_card(tmp_path / "local", True, quiet, table=table, within_s=600.0)
    kept = tmp_path / ".local-partial.csv"
    kept.write_text(kept.read_text()[:-2])
    again = card(nothing)
    _, profile = calibrate_card(tmp_path / "local", True, quiet, table=table, within_s=600.0)
    assert len(again) == len(profile.points) - 9
    assert not kept.exists()


def test_programs_say_what_is_wrong_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(number: int = 0) -> None:
        if number == 1:
            raise InputError("number: is 1;\n  2 is allowed")
        if number == 3:
            raise FileNotFoundError(2, "No such file or directory", "x.csv")
        if number == 4:
            raise typer.Exit(1)
        if number == 5:
            raise KeyboardInterrupt
        if number == 6:
            raise ZeroDivisionError("by 0")

    for number, code, said in (
        ("0", 0, ""),
        ("1", 2, "error: number: is 1; 2 is allowed\n"),
        ("3", 2, "error: x.csv: No such file or directory\n"),
        ("4", 1, ""),
        ("5", 130, "interrupted\n"),
        ("6", 1, "error: a fault of simcore, in test_card_calibration.py, line "),
        ("many", 2, "error: Invalid value for '--number': "),
    ):
        monkeypatch.setattr("sys.argv", ["program", "--number", number])
        with pytest.raises(SystemExit) as ended:
            run_program(main)
        assert ended.value.code == code
        printed = capsys.readouterr().err
        assert printed.startswith(said)
        assert printed.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "points.csv",
            lambda text: text[: len(text) // 2],
            r"points\.csv: (line \d+: has not as many|\d+ lines)",
        ),
        (
            "points.csv",
            lambda text: text[: text.rindex("\n", 0, -1) + 1],
            r"profile\.yaml says birth\.points",
        ),
        ("points.csv", lambda text: text.replace("1e-06", "1e-30"), r"points\.csv: line \d+: median_s: "),
        ("points.csv", lambda text: text.replace("1e-06", "1e30"), r"points\.csv: line \d+: median_s: "),
        ("points.csv", lambda text: text.replace("median_s", "median", 1), "has no column median_s"),
        ("fits.csv", lambda text: text.replace("gate,", "gte,"), r"fits\.csv: no line for gate"),
        (
            "profile.yaml",
            lambda text: text.replace("granularity", "granularty"),
            "granularity: unknown value ''",
        ),
        ("profile.yaml", lambda text: text[: text.index("birth:")], r"profile\.yaml: birth: is missing"),
        ("profile.yaml", lambda text: "", "is no profile"),
    ],
)
def test_a_damaged_profile_is_not_read(
    name: str, edit: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    points = [replace(a_point(op), median_s=1e-6) for op in grid(["gate"])]
    born = replace(profile_born(), points=len(points))
    write_whole(profile_of("h200-sxm", points, born, {}, []), points, tmp_path / "local")
    path = tmp_path / "local" / name
    load_profile("h200-sxm", str(path.parent))
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_profile("h200-sxm", str(path.parent))


def test_a_profile_whose_smaller_tiles_left_the_cache_is_not_read(tmp_path: Path) -> None:
    """A tile that stayed in the cache is smaller than one that did not."""
    ops = sorted(grid(["tile_conv"]), key=lambda op: operand_bytes(op.kind, dict(op.shape)) or 0)
    points = [a_point(op) for op in (ops[0], ops[-1])]
    born = replace(profile_born(), points=len(points))
    for caches, contradicts in (((STAY, COLD), False), ((COLD, STAY), True)):
        changed = [replace(point, cache=cache) for point, cache in zip(points, caches, strict=True)]
        folder = tmp_path / caches[0]
        write_whole(profile_of("h200-sxm", changed, born, {}, []), changed, folder)
        with pytest.raises(InputError, match="tile_conv: cache: ") if contradicts else nullcontext():
            load_profile("h200-sxm", str(folder))


@slow
def test_an_other_models_matrices_are_extrapolated() -> None:
    """What was measured near other matrices says nothing of them, and the interval is as wide as matrices
    differ."""
    noise = np.random.default_rng(1)
    factors: dict[tuple[int, int], float] = {}
    points = []
    for op in grid(["matmul"]):
        of = factors.setdefault((op["n"], op["k"]), float(noise.uniform(-0.25, 0.25)))
        points.append(a_point(op, noise=of))
    price = pricer(H200, profile=profile_of("h200-sxm", points, profile_born(), {}))
    own, other = (price(matmul("q", m=100, n=n, k=4096, dtype="bf16")) for n in (6144, 5376))
    assert own.source == "interpolated"
    assert other.source == "extrapolated"
    assert other.high_s / other.low_s > 1.2 > own.high_s / own.low_s


def test_what_only_checks_says_how_far_off_a_profile_is() -> None:
    """Prices follow the ripples; two shapes that took a fifth longer are off by a fifth."""
    ops = grid(["norm"])
    checks = drawn(["norm"], 12, 5)
    points = [a_point(op) for op in ops]
    points += [a_point(op, "check", noise=math.log(1.2) if i < 2 else 0.0) for i, op in enumerate(checks)]
    birth = Birth("2026-01-01", "a card", 1, {}, len(points), 10, 0.01, {})
    profile = profile_of("h200-sxm", points, birth, {})
    (errors,) = by_kind(profile).values()
    assert len(errors) == 12
    worst_pct, worst = max(errors, key=lambda each: each[0])
    assert worst.shape in {shape_text(op) for op in checks[:2]}
    assert worst_pct == pytest.approx(20.0, abs=3.0)
    assert statistics.median(error for error, _ in errors) < 3.0
    row = errors_row("norm", [error for error, _ in errors], [point.shape for _, point in errors])
    assert (row["n"], row["worst_pct"], row["worst_shape"]) == (12, worst_pct, worst.shape)
    assert is_close(row) is False
    assert is_close(errors_row("norm", [1.0] * 20, ["m=1"] * 20)) is True


def test_products_are_padded_where_there_is_room() -> None:
    x = torch.randn(248, 6)
    room, none = x[:241], x[:241].clone()
    assert padded(room).shape == (248, 6)
    assert torch.equal(padded(room)[:241], none)
    assert padded(none) is none
    assert padded(x[:64]).shape == (64, 6)
    # Columns that lie apart are not taken for rows.
    assert padded(x.T[:, :241]).shape == (6, 241)
