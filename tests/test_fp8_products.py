"""Products in fp8 as engines run them: the program that measures them, and what the simulator has of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch

import simcore
from simcore.assembly import law_of
from simcore.devices.price import pricer
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.ops.op import Price, matmul
from simcore.sim.power import BUSY
from simcore.validate import cells
from simcore.validate.accuracy import fp8_products
from simcore.validate.accuracy.fp8_products import (
    FEWEST,
    LOADED,
    LOADED_MATRICES,
    PERIOD_S,
    ROWS,
    SHAPES,
    ways,
)
from simcore.validate.benchmarks.cases import Birth
from simcore.validate.calibration.cuda_power import CAP_CASES
from simcore.validate.calibration.power_fit import Row, cap_times

COLUMNS = ("way", "m", "n", "k", "price_s", "rest_s", "load_s")
MEASURED = Path(simcore.__file__).parents[1] / "validate" / "measured"
BIRTH = Birth("a card", "580.1", "2", "3", "2026", "1980", "3201", 4.4e12, "x", 1e-6)
SECONDS = {"rounded": 3.0, "alone": 2.0, "priced": 1.0}


def test_every_way_multiplies() -> None:
    generator = torch.Generator().manual_seed(1)
    calls, errors = ways(32, 48, 64, "cpu", generator)
    assert {way: len(each) for way, each in calls.items()} == dict.fromkeys(SECONDS, fp8_products.MOST)
    # The product is rounded to bf16.
    assert all(0.0 < error < 2.0**-7 for error in errors.values())
    firsts = [each[0]() for each in calls.values()]
    assert all(torch.equal(each, firsts[0]) for each in firsts)


class TimedByName:
    """Products that take what SECONDS says."""

    def __init__(self, price: Any, *, fp8: bool) -> None:
        assert not fp8
        del price

    def add(self, name: str, calls: Sequence[Any]) -> float:
        assert len(calls) >= FEWEST
        return SECONDS[name]


def measured(monkeypatch: pytest.MonkeyPatch, error: float = 1e-3) -> list[fp8_products.Measured]:
    def of_nothing(*_: Any) -> Any:
        return {way: [None] * FEWEST for way in SECONDS}, dict.fromkeys(SECONDS, error)

    monkeypatch.setattr(fp8_products, "Products", TimedByName)
    monkeypatch.setattr(fp8_products, "ways", of_nothing)
    monkeypatch.setattr(fp8_products.torch, "Generator", lambda device: torch.default_generator)
    twice = type("Twice", (), {"times": 2.0})
    monkeypatch.setattr(fp8_products, "steady", lambda *_, **__: twice)
    price = Price(4.0, 4.0, 4.0, "measured", "")
    return list(fp8_products.measured(lambda op: price))


def test_times_are_of_their_way_and_of_the_price_under_load_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch)
    assert len(rows) == 3 * len(ROWS) * sum(map(len, SHAPES.values()))
    assert all(row.rest_s == SECONDS[row.way] for row in rows)
    loaded = [row for row in rows if row.load_s is not None]
    assert {(row.m, row.matrix) for row in loaded} == {(LOADED, matrix) for matrix in LOADED_MATRICES}
    assert all(row.load_s == 2.0 * row.rest_s for row in loaded)
    table = [line.split("|") for line in fp8_products.lines(rows)]
    assert [line[1].strip() for line in table] == ["way", "---", *SECONDS]
    # Each cell by its way: twice as long under load.
    each = zip(table[4][2:7], table[3][2:7], strict=True)
    assert all(float(alone) == pytest.approx(2.0 * float(priced), abs=2e-3) for priced, alone in each)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b gate_up, 512 rows, rounded: wrong by 0\.5"):
        measured(monkeypatch, error=0.5)
    with pytest.raises(ValueError, match="wrong by nan"):
        measured(monkeypatch, error=float("nan"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_card_it_says_so() -> None:
    with pytest.raises(InputError, match="no CUDA device that multiplies fp8 is here"):
        fp8_products.main()


def test_what_is_measured_is_kept_when_a_run_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut_off(price: Any) -> Iterator[fp8_products.Measured]:
        del price
        for m in (512, 1024):
            yield fp8_products.Measured("a model", "qkv", m, 8, 8, "priced", 1e-6, 1e-6, None, 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(fp8_products.torch.cuda, "is_available", lambda: True)
    for name, found in (("has_fp8", True), ("this_card", "h200-sxm"), ("measure_card", None)):
        monkeypatch.setattr(fp8_products, name, lambda *_, found=found: found)
    monkeypatch.setattr(fp8_products, "birth", lambda card: BIRTH)
    monkeypatch.setattr(fp8_products, "measured", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fp8_products.main(tmp_path / "rows.csv")
    rows = [row for _, row in cells.lines(tmp_path / "rows.csv", ("m", "way", "device"))]
    assert [(row["m"], row["way"]) for row in rows] == [("512", "priced"), ("1024", "priced")]


# -- what was measured ---------------------------------------------------------------------------------------


def as_priced() -> list[dict[str, str]]:
    rows = (line for _, line in cells.lines(MEASURED / "h200_fp8_products.csv", COLUMNS))
    return [row for row in rows if row["way"] == "priced"]


def caps() -> Iterator[Row]:
    """The cases by which the cap of their card was measured, as shares of the time that was taken."""
    columns = ("card", "share", "times", "price_us", "n")
    for _, line in cells.lines(MEASURED / "h200_products_under_load.csv", columns):
        if line["card"] == "NVIDIA H200, of h200_fp8_products.csv":
            alone_s, asked, times = 1e-6 * float(line["price_us"]), float(line["share"]), float(line["times"])
            taken_s = round(asked * PERIOD_S / alone_s) * alone_s * times
            period_s = taken_s + (1.0 - asked) * PERIOD_S
            yield Row("steady", "bf16", "memory", period_s, taken_s / period_s, 0.0, 0, times, int(line["n"]))


def test_busy_is_of_these_products() -> None:
    """Under load times^3 = A cap_times share / BUSY: BUSY is the mean of the four."""
    power = load_profile("h200-sxm", "local").power
    assert power is not None
    rows, limit, peak = list(caps()), law_of(power), load_device("h200-sxm").flops_per_s["fp8"]
    assert len(rows) == len(CAP_CASES)
    wanted, found = cap_times(limit, rows) * limit.arithmetic, []
    for row in as_priced():
        if row["load_s"]:
            rest_s = float(row["rest_s"])
            share = 2.0 * float(row["m"]) * float(row["n"]) * float(row["k"]) / rest_s / peak
            found.append(share * wanted / (float(row["load_s"]) / rest_s) ** 3)
    assert len(found) == 4
    assert fmean(found) == pytest.approx(BUSY["fp8"], rel=0.005)


def test_prices_are_of_these_products() -> None:
    """Measured on two cards, by two programs, which differ by some percent."""
    price = pricer(load_device("h200-sxm"), profile=load_profile("h200-sxm", "local"))
    times = []
    for row in as_priced():
        m, n, k = (int(row[name]) for name in "mnk")
        if m > ROWS[0]:
            times.append(float(row["rest_s"]) / price(matmul("x", m=m, n=n, k=k, dtype="fp8")).seconds)
    assert len(times) == 3 * sum(map(len, SHAPES.values()))
    assert median(times) == pytest.approx(1.0, abs=0.05)
