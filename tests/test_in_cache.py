"""Prices of operands that lie in the L2 cache: from times that were measured there, for tilings whose steps
use again what they used a moment ago."""

from dataclasses import replace
from pathlib import Path

import pytest

from simcore.assembly import assemble
from simcore.devices.fitted import FitRow, FittedProfile
from simcore.devices.interpolation import Measured
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.ops import op as ops
from simcore.ops.op import Op
from simcore.scenario import load_scenario
from simcore.studies.tiling.cases import Case, cases
from simcore.studies.tiling.launches import launches as launched
from simcore.studies.tiling.runner import Bench
from simcore.studies.tiling.scenario import TilingScenario
from tests.thorough import slow

H200 = load_device("h200-sxm")
TILES = Path("scenarios/h200/tiles.yaml")


def product(n: int) -> Op:
    return ops.matmul("w", m=1, n=n, k=64, dtype="fp32")


def profile(*points: Measured) -> FittedProfile:
    row = FitRow("matmul", 1e-6, 0.5, 0.9, 1.1, 3, 0.0, 1.0, "by hand")
    return FittedProfile("toy", "toy", "by hand", "h200-sxm", "measured", (row,), {}, points=points)


def point(n: int, seconds: float, warm_s: float | None = None) -> Measured:
    launches, floor_s = launches_and_floor(product(n), roofline(H200))
    return Measured("matmul", f"m=1;n={n};k=64", "fp32", launches, floor_s, seconds, warm_s=warm_s)


def test_what_was_measured_in_the_cache_is_priced_so_and_nothing_else() -> None:
    cold = profile(point(16, 4e-6, 3e-6), point(64, 5e-6, 3.5e-6), point(1024, 9e-6))
    warm = cold.in_cache
    for n, before, after in ((16, 4e-6, 3e-6), (64, 5e-6, 3.5e-6), (1024, 9e-6, 9e-6)):
        assert pricer(H200, profile=cold)(product(n)).seconds == pytest.approx(before)
        assert pricer(H200, profile=warm)(product(n)).seconds == pytest.approx(after)
    assert 3e-6 < pricer(H200, profile=warm)(product(32)).seconds < 3.5e-6
    assert cold.points[0].median_s == 4e-6


def test_without_times_in_the_cache_there_are_no_prices_of_it() -> None:
    cold = profile(point(16, 4e-6), point(64, 5e-6))
    assert cold.in_cache is cold
    assert assemble(load_scenario(TILES, ["profile=none"]), "x").study.bench.device.in_cache is None  # type: ignore[attr-defined]


def bench_of(tokens: int) -> tuple[Bench, list[Case]]:
    # Of steps whose layers are kernels of their own.
    scenario = load_scenario(TILES, [f"tokens={tokens}", "model.step=layers"])
    assert isinstance(scenario, TilingScenario)
    return assemble(scenario, "x").study.bench, list(cases(scenario))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tokens", "stays"), [(64, ["lazy", "fractal"]), (2048, ["fractal"])], ids=["short", "long"]
)
def test_steps_whose_weights_stay_in_the_cache_are_priced_from_there(tokens: int, stays: list[str]) -> None:
    """What lazy reads of its history drives them out, what a fractal tiling reads does not."""
    bench, all_ = bench_of(tokens)
    found = load_profile("h200-sxm", "local")
    assert isinstance(found, FittedProfile)
    up = next(p for p in found.points if (p.kind, p.dtype, p.shape) == ("matmul", "fp32", "m=1;n=512;k=256"))
    assert up.warm_s is not None
    assert up.warm_s < 0.95 * up.median_s
    for case in all_[:2]:
        seconds = bench.price(case)[0](ops.matmul("up", m=1, n=512, k=256, dtype="fp32")).seconds
        expected = up.warm_s if case.axes.strategy in stays else up.median_s
        assert bench.stays(case) is (case.axes.strategy in stays)
        assert seconds == pytest.approx(expected)


def test_it_stays_while_less_is_moved_from_step_to_step_than_the_cache_holds() -> None:
    bench, (lazy, *_) = bench_of(64)
    model = bench.model(lazy)
    bursts = launched(lambda m: lazy.strategy.program(m, model, []))
    moved = sum(n for burst in bursts for _, n in burst.total(lambda op: op.work.hbm_bytes)) / 64
    assert bench.device.stays_bytes == 0.5 * H200.l2_bytes
    for stays_bytes, stays in ((1.001 * moved, True), (0.999 * moved, False)):
        other = Bench(bench.scenario, replace(bench.device, stays_bytes=stays_bytes))
        assert other.stays(lazy) is stays


@slow
def test_a_run_says_what_is_found_in_the_cache() -> None:
    short, long = (
        " ".join(
            assemble(
                load_scenario(TILES, [f"tokens={n}", "strategies=[{kind: lazy}]", "model.step=layers"]), "x"
            )
            .study.run(lambda *_: None)
            .notes
        )
        for n in (64, 2048)
    )
    assert "less than 30 MB are moved from step to step: all cases" in short
    assert "nothing is found in a cache" in long


def test_tiles_and_prompts_are_priced_cold_and_prompts_drive_nothing_out() -> None:
    """Tiles come too seldom for what they read; a prompt is over when steps begin."""
    bench, (_, case, *_) = bench_of(64)
    tile = next(op for burst in bench.launches(case)[1] for op in burst.ops if op.kind.startswith("tile_"))
    assert bench.stays(case)
    assert bench.price(case)[0](tile) == bench.device.price(tile)
    assert bench.device.in_cache is not None
    assert bench.device.in_cache(tile) != bench.device.price(tile)
    scenario = load_scenario(TILES, ["tokens=7064", "prompt_tokens=7000", "model.step=layers"])
    assert isinstance(scenario, TilingScenario)
    after = assemble(scenario, "x").study.bench  # type: ignore[attr-defined]
    prompted = list(cases(scenario))[1]
    moved = sum(
        n for burst in after.launches(prompted)[1] for _, n in burst.total(lambda op: op.work.hbm_bytes)
    )
    assert moved > 64 * after.device.stays_bytes
    assert after.stays(prompted)


def test_where_no_time_in_the_cache_is_known_nothing_stays() -> None:
    """The profile has products of 256 channels in fp32."""
    scenario = load_scenario(TILES, ["tokens=64", "dtype=fp16", "model.step=layers"])
    assert isinstance(scenario, TilingScenario)
    bench = assemble(scenario, "x").study.bench  # type: ignore[attr-defined]
    assert not any(bench.stays(case) for case in cases(scenario))


@pytest.mark.parametrize("warm_s", [1e-9, 1e-3])
def test_a_time_in_the_cache_that_is_none_is_refused(warm_s: float) -> None:
    with pytest.raises(ValueError, match=r"warm_s: is .*; 4e-07 to 8e-06 .* is allowed"):
        point(16, 4e-6, warm_s)


def test_a_device_that_has_a_launch_before_it_began_is_refused() -> None:
    row = profile(point(16, 4e-6)).fits
    with pytest.raises(
        ValueError, match=r"overheads.return_s: is 2e-05; at most launch_s \(1e-05\) is allowed"
    ):
        FittedProfile("x", "x", "x", "cpu", "fitted", row, {"launch_s": 1e-5, "return_s": 2e-5})
    with pytest.raises(ValueError, match=r"overheads.return_s: is 0.5; at most launch_s"):
        replace(H200, overheads=replace(H200.overheads, return_s=0.5))


def test_prices_from_beyond_what_was_measured_are_warned_of() -> None:
    scenario = load_scenario(
        TILES, ["tokens=64", "batch=256", "strategies=[{kind: lazy}]", "model.step=layers"]
    )
    warnings = assemble(scenario, "x").study.run(lambda *_: None).warnings
    assert any("of the device time is from extrapolated prices" in warning for warning in warnings)
