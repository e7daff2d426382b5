"""The calibration of a CUDA card, with times from a formula in the place of the card's."""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from devices.corrected import Measured
from devices.fitted import Birth
from devices.price import launches_and_floor, pricer, roofline
from devices.profile import load_profile
from devices.spec import load_device
from kernels.streams import one_stream, shared
from kernels.table import TABLE, Kernel
from simcore.files import InputError
from simcore.ops import Op, Roofline, matmul
from validate import card_calibrate, card_measure
from validate.bench_timing import Card
from validate.card_calibrate import calibrate_card, own_line, profile_of
from validate.card_grid import CONTEXT, drawn, families, grid
from validate.card_measure import cache_state
from validate.held_out import Tried, lines, met, summary
from validate.measure import Point

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
    ripple = 0.05 * math.sin(sum(math.log(max(1, size)) for _, size in op.shape if isinstance(size, int)))
    median_s = (launches * 1.5e-6 + floor_s / 0.8) * math.exp(ripple + noise)
    found = Point(
        op, launches, floor_s, median_s, 0.99 * median_s, 1.01 * median_s, 12, "cold", 0.5 * median_s
    )
    return replace(found, role="check" if role == "check" else "fit")


# -- shapes ------------------------------------------------------------------------------------------------


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


def test_a_quick_grid_is_a_part_with_the_same_ends() -> None:
    whole, part = grid(TABLE), grid(TABLE, quick=True)
    assert {(op.kind, op.shape, op.dtype) for op in part} < {(op.kind, op.shape, op.dtype) for op in whole}
    assert len(part) < len(whole) / 2
    contexts = {op["context"] for op in part if op.kind == "decode_attention"}
    assert {CONTEXT[0], CONTEXT[-1]} <= contexts


def test_drawn_shapes_are_in_no_grid_and_in_its_ranges() -> None:
    known = {(op.kind, op.shape, op.dtype) for op in grid(TABLE)}
    found = drawn(TABLE, 30, 1)
    assert not known & {(op.kind, op.shape, op.dtype) for op in found}
    assert found == drawn(TABLE, 30, 1) != drawn(TABLE, 30, 2)
    counts = Counter((op.kind, op.dtype) for op in found)
    assert counts["decode_attention", "bf16"] == counts["matmul", "fp8"] == 30
    for op in found:
        if op.kind == "decode_attention":
            assert CONTEXT[0] <= op["context"] <= CONTEXT[-1]
            assert 1 <= op["batch"] <= 256
        if op.kind == "tile_flash_fft":
            assert op["side"].bit_count() == 1
    more = drawn(["norm"], 30, 1, without=drawn(["norm"], 30, 1))
    assert not set(more) & set(found)


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
    made = Card(60_000_000, 132, 4.4e12, "sum", 1e-6)
    monkeypatch.setattr(card_calibrate, "measure_card", lambda say: made)
    monkeypatch.setattr(card_measure, "host_costs", lambda: {"launch_s": 6e-6, "wait_s": 1e-6})
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


def test_a_calibration_prices_shapes_between_those_measured(
    card: Callable[..., list[Op]], tmp_path: Path
) -> None:
    seen = card(nothing)
    target, profile = calibrate_card(tmp_path / "local", False, quiet, table=KINDS)
    assert load_profile("h200-sxm", str(target)) == profile
    assert len(seen) == len(profile.points) == len(grid(KINDS)) + 40 * len(KINDS)
    assert profile.birth is not None
    assert profile.birth.processor == "NVIDIA H200"
    assert profile.overheads == {"launch_s": 6e-6, "wait_s": 1e-6}
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
    price = pricer(H200, profile=profile)
    held = [Tried(a_point(op), price(op)) for op in drawn(KINDS, 60, 7)]
    for row in summary(held):
        assert row["median_pct"] < 1.0
        assert row["worst_pct"] < 5.0
    assert all(one.price.source in ("interpolated", "measured") for one in held)


def test_intervals_cover_what_they_say(tmp_path: Path) -> None:
    """Of normal noise: 40 checks, 400 held-out shapes; the share inside varies by sqrt(0.9 0.1 / 400) = 0.015
    by the draws and about 0.047 = sqrt(0.9 0.1 / 40) by the checks: four standard errors of both."""
    noise = np.random.default_rng(0)
    kinds = ["decode_attention"]
    points = [a_point(op) for op in grid(kinds)]
    points += [a_point(op, "check", noise.normal(0.0, 0.03)) for op in drawn(kinds, 40, 1)]
    born = profile_born()
    price = pricer(H200, profile=profile_of("h200-sxm", points, born, {}, []))
    held = drawn(kinds, 400, 2)
    inside = [Tried(a_point(op, noise=noise.normal(0.0, 0.03)), price(op)).covered for op in held]
    assert abs(statistics.fmean(inside) - 0.9) < 4.0 * math.hypot(0.015, 0.047)


def profile_born() -> Birth:
    """A birth record of no card."""
    return Birth("2026-01-01T00:00:00+00:00", "stub", 1, {"torch": "2"}, 10, 3, 0.01, {})


def test_what_was_interrupted_goes_on_where_it_stopped(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    left = iter(range(100))

    def until_then(op: Op) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    seen = card(until_then)
    with pytest.raises(KeyboardInterrupt):
        calibrate_card(tmp_path / "local", False, quiet, table=KINDS)
    assert len(seen) == 100
    assert not (tmp_path / "local").exists()
    again = card(nothing)
    _, profile = calibrate_card(tmp_path / "local", False, quiet, table=KINDS)
    assert len(again) == len(profile.points) - 100
    assert not set(again) & set(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
    card(nothing)
    assert calibrate_card(tmp_path / "other", False, quiet, table=KINDS)[1].points == profile.points


def test_what_another_card_left_is_not_taken(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    (tmp_path / ".local-partial.csv").write_text('{"device": "another"}\nnorm,tokens=1;hidden=4096,bf16\n')
    seen = card(nothing)
    _, profile = calibrate_card(tmp_path / "local", True, quiet, table={"norm": TABLE["norm"]})
    assert len(seen) == len(profile.points)


def test_what_cannot_be_measured_is_noted(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    def small_only(op: Op) -> None:
        if op.kind == "kv_copy":
            raise RuntimeError("out of memory")

    card(small_only)
    _, profile = calibrate_card(tmp_path / "local", True, quiet, table=KINDS)
    assert any("could not be measured" in note for note in profile.notes)
    assert any("kv_copy" in note and "out of memory" in note for note in profile.notes)
    assert not any(point.kind == "kv_copy" for point in profile.points)


def test_nothing_measured_is_no_profile(card: Callable[..., list[Op]], tmp_path: Path) -> None:
    def never(op: Op) -> None:
        raise RuntimeError("no kernel")

    card(never)
    with pytest.raises(InputError, match=r"nothing could be measured; .*no kernel"):
        calibrate_card(tmp_path / "local", True, quiet, table={"norm": TABLE["norm"]})
    assert not (tmp_path / "local").exists()


def test_without_a_card_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--on cuda: torch finds no CUDA device"):
        calibrate_card(tmp_path / "local", True, quiet)


def test_a_card_that_the_catalogue_has_not_got_is_refused(
    card: Callable[..., list[Op]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card(nothing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "NVIDIA GeForce RTX 4090")
    with pytest.raises(
        InputError, match="--on cuda: no device of the catalogue is a NVIDIA GeForce RTX 4090"
    ):
        calibrate_card(tmp_path / "local", True, quiet)


# -- held-out shapes ---------------------------------------------------------------------------------------


def test_held_out_prices_are_judged_by_kind() -> None:
    ops = drawn(["norm", "kv_copy"], 20, 3)
    right = pricer(H200, profile=profile_of("h200-sxm", [a_point(op) for op in ops], profile_born(), {}, []))
    rows = summary([Tried(a_point(op), right(op)) for op in ops])
    assert [row["kind"] for row in rows] == ["kv_copy bf16", "norm bf16", "all"]
    assert [row["n"] for row in rows] == [20, 20, 40]
    assert all(row["worst_pct"] < 1e-6 for row in rows)
    # Intervals that never miss say too little.
    assert not any(met(row) for row in rows)
    off = summary([Tried(a_point(op, noise=0.5), right(op)) for op in ops])
    assert off[-1]["median_pct"] == pytest.approx(100.0 * (math.exp(0.5) - 1.0))
    text = list(lines(rows))
    assert len(text) == 4
    assert "kv_copy" in text[1]


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


def test_a_role_is_fit_or_check() -> None:
    with pytest.raises(ValueError, match="'fit' or 'check'"):
        Measured("norm", "m=1", "bf16", 1, 1e-6, 1e-6, "guess")  # type: ignore[arg-type]
