"""Figures of the comparison with measured engines, from rows whose times are written here."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from simcore.studies.serving.host_time import HostTime
from simcore.validate.engines import compare as silicon
from simcore.validate.engines.compare import Compared, figures, missed
from simcore.validate.engines.predict import Predicted, fitted
from simcore.validate.engines.rows import Row
from tests.test_silicon import MAX_70B, row

# What the comparison promises, in percent: written here, so that it cannot move with the code.
PROMISED = {"tpot_median": 8.0, "tpot_mean": 14.0, "ttft_mean": 45.0}


def one(tmp_path: Path, ttft: tuple[float, float], tpot: tuple[float, float]) -> Compared:
    """A row of (predicted, measured) times."""
    kept = replace(row(MAX_70B, 4, 2, tmp_path), ttft_s=ttft[1], tpot_s=tpot[1])
    return Compared(kept, Predicted(ttft[0], tpot[0], 0.0, 0.0, 0), "", "", False)


def test_errors_are_of_the_measured_time_and_have_the_sign_of_the_prediction(tmp_path: Path) -> None:
    """0.3 s predicted of 0.4 measured is a quarter too short; 0.4 of 0.3 a third too long."""
    short, long = one(tmp_path, (0.3, 0.4), (0.01, 0.08)), one(tmp_path, (0.4, 0.3), (0.08, 0.01))
    assert (short.ttft_pct, short.tpot_pct) == pytest.approx((-25.0, -87.5))
    assert (long.ttft_pct, long.tpot_pct) == pytest.approx((100 / 3, 700.0))
    found = figures([short, long])
    assert found == pytest.approx(
        {
            "n": 2,
            "tpot_median": (87.5 + 700.0) / 2,
            "tpot_mean": (87.5 + 700.0) / 2,
            "ttft_median": (25.0 + 100 / 3) / 2,
            "ttft_mean": (25.0 + 100 / 3) / 2,
        }
    )


def test_medians_and_means_of_both_times_are_told_apart(tmp_path: Path) -> None:
    tpot, ttft = (1.02, 1.05, 1.30), (1.1, 1.9, 2.1)
    rows = [one(tmp_path, (b, 1.0), (a, 1.0)) for a, b in zip(tpot, ttft, strict=True)]
    found = figures(rows)
    assert found["tpot_median"] == pytest.approx(100 * (median(tpot) - 1))
    assert found["tpot_mean"] == pytest.approx(100 * (sum(tpot) / 3 - 1))
    assert found["ttft_median"] == pytest.approx(100 * (median(ttft) - 1))
    assert found["ttft_mean"] == pytest.approx(100 * (sum(ttft) / 3 - 1))


@pytest.mark.parametrize("name", PROMISED)
def test_a_bar_is_missed_from_its_own_figure_on(name: str) -> None:
    good = {"tpot_median": 0.0, "tpot_mean": 0.0, "ttft_median": 1e3, "ttft_mean": 0.0, "n": 1.0}
    assert missed(good) == []
    assert missed(good | {name: 0.999 * PROMISED[name]}) == []
    assert missed(good | {name: PROMISED[name]}) == [name]
    assert missed(good | {name: 1.001 * PROMISED[name]}) == [name]


def test_bars_are_below_what_the_other_simulator_reaches() -> None:
    assert silicon.BARS == PROMISED
    assert all(silicon.BARS[name] < silicon.OTHERS[name] for name in PROMISED)


@pytest.mark.parametrize("host_s", [0.0, 3e-6, 1e-4, 3.2e-4])
def test_an_engine_s_constant_is_found_wherever_it_lies(
    host_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 10 ms and host_s more for each client, measured exactly so; a tenth of a microsecond is less
    than what any engine's constant is known to."""

    def step_s(clients: int, host: float) -> float:
        return 0.01 + clients * host

    def predicted(tasks: Sequence[tuple[Row, HostTime]], *_: object) -> list[Predicted]:
        return [Predicted(1.0, step_s(one.clients, host.sequence_s), 0.0, 0.0, 0) for one, host in tasks]

    monkeypatch.setattr("simcore.validate.engines.predict.predict_all", predicted)
    rows = [row(MAX_70B, clients, 2, tmp_path) for clients in (4, 32)]
    rows = [replace(r, id=str(i), tpot_s=step_s(r.clients, host_s)) for i, r in enumerate(rows)]
    assert fitted({"series": rows}, "none")["series"].sequence_s == pytest.approx(host_s, abs=1e-7)


NODES = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4)


@pytest.mark.parametrize("host_s", NODES)
def test_at_these_constants_times_are_predicted_not_interpolated(
    host_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However times grow with the constant: they are asked for at each of these, and it is one of the values
    that are tried, a thirtieth of a microsecond apart."""

    def step_s(host: float) -> float:
        return 0.01 * (1.0 + host / 1e-6) ** 2

    def predicted(tasks: Sequence[tuple[Row, HostTime]], *_: object) -> list[Predicted]:
        return [Predicted(1.0, step_s(host.sequence_s), 0.0, 0.0, 0) for _, host in tasks]

    monkeypatch.setattr("simcore.validate.engines.predict.predict_all", predicted)
    one = replace(row(MAX_70B, 4, 2, tmp_path), tpot_s=step_s(host_s))
    assert fitted({"series": [one]}, "none")["series"].sequence_s == pytest.approx(
        host_s, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize(("request_s", "token_s"), [(0.0, 0.0), (5e-3, 0.0), (2e-3, 1e-5), (1e-2, 2e-6)])
def test_a_front_end_is_the_one_that_most_rows_say(
    request_s: float, token_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of two lengths, the longer of which half of all rows have, at 0.1 s beside the front end."""

    def ttft_s(one: Row, front: HostTime) -> float:
        return 0.1 + front.request_s + front.prompt_token_s * one.isl

    def predicted(tasks: Sequence[tuple[Row, HostTime]], *_: object) -> list[Predicted]:
        return [Predicted(ttft_s(one, front), 0.01, 0.0, 0.0, 0) for one, front in tasks]

    monkeypatch.setattr("simcore.validate.engines.predict.predict_all", predicted)
    made = HostTime(request_s=request_s, prompt_token_s=token_s)
    lengths = [500, 4000] * 4
    given = [replace(row(MAX_70B, 4, 2, tmp_path), id=str(i), isl=isl) for i, isl in enumerate(lengths)]
    rows = [replace(one, tpot_s=0.01, ttft_s=ttft_s(one, made)) for one in given]
    assert fitted({"series": rows}, "none") == {"series": made}
    # A handful of rows does not tell a front end.
    assert fitted({"series": rows[1:]}, "none") == {"series": HostTime()}


def test_the_others_are_as_good_as_they_say() -> None:
    """Figures that aiconfigurator 0.12 publishes of itself, in percent."""
    assert silicon.OTHERS == {"tpot_median": 8.2, "tpot_mean": 16.4, "ttft_mean": 52.0}
