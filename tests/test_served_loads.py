"""Services that ran on a card, predicted anew: recorded loads keep their bars; what is no load is told."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import simcore
from simcore.input.files import InputError
from simcore.validate.accuracy import served_loads
from simcore.validate.accuracy.recorded_loads import CAP, COLUMNS, METRICS, rows_of
from simcore.validate.accuracy.served_loads import Judged, Latency, figures, predicted, read_latencies
from simcore.validate.program import write_csv
from tests.thorough import slow, thorough

A_SET = "strategies=[{kind: continuous_batching}]; workload.requests=20; workload.arrivals.rate_per_s=4"


def written(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, served_loads.NEEDED)
        writer.writeheader()
        writer.writerows(rows)
    return path


def a_row(**changes: Any) -> dict[str, Any]:
    return {"set": A_SET, "rate_per_s": 4, "metric": "e2e_mean_s", "measured": 1.0, **changes}


def test_an_error_is_that_of_the_larger_over_the_smaller() -> None:
    latency = Latency("", 1.0, "ttft_p50_s", 2.0)
    assert Judged(latency, 3.0).pct == pytest.approx(50.0)
    assert Judged(latency, 4.0 / 3.0).pct == pytest.approx(-50.0)
    duration = Judged(Latency("", 1.0, "duration_s", 1.0), 1.5)
    some = [Judged(latency, value) for value in (2.0, 2.2, 1.0)]
    assert figures([*some, duration]) == pytest.approx({"median": 10.0, "worst": 100.0, "duration": 50.0})


@slow
def test_a_prediction_is_that_of_a_run(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", a_row(), a_row(metric="duration_s"))
    found = {one.latency.metric: one.predicted_s for one in predicted(read_latencies(file), "local")}
    frame = simulated().frame().set_index("metric")["value"]
    # Of all requests, not of those after the warm-up alone.
    assert found == {"e2e_mean_s": frame["e2e_mean_s_whole_run"], "duration_s": frame["duration_s"]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (a_row(measured="nan"), "line 2: measured: 'nan' is no number above 0"),
        (a_row(metric="e2e_men_s"), "e2e_men_s at 4 requests/s is not in the results"),
        (a_row(rate_per_s=5), "e2e_mean_s at 5 requests/s is not in the results"),
        (a_row(set="workload.reqests=20"), "reqests"),
        (a_row(set=""), "set"),
        (a_row(metric="duration_s"), "line 2: no latency is given at 4 requests/s"),
    ],
)
def test_what_is_no_load_is_told_in_a_line(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", row)
    with pytest.raises(InputError, match=says) as told:
        list(predicted(read_latencies(file), "local"))
    assert "\n" not in str(told.value)


def ran(*words: str) -> Any:
    app = typer.Typer()
    app.command()(served_loads.main)
    return CliRunner().invoke(app, [*words])


@slow
def test_a_missed_bar_ends_with_1(tmp_path: Path) -> None:
    found = ran(str(written(tmp_path / "rows.csv", a_row(measured=100.0))))
    assert found.exit_code == 1
    assert "missed: all have to be under a median of 5 %, a worst of 12 %" in found.output
    (line,) = [line for line in found.output.splitlines() if line.startswith("over a bar: ")]
    assert line.startswith("over a bar: 4 requests/s, e2e_mean -")
    assert line.endswith(f" %: {A_SET}")


def test_rows_may_stand_in_any_order_and_once(tmp_path: Path) -> None:
    rows = [a_row(rate_per_s=8), a_row(), a_row(rate_per_s=8, metric="duration_s")]
    found = read_latencies(written(tmp_path / "rows.csv", *rows))
    assert [row.rate_per_s for row in found] == [4.0, 8.0, 8.0]
    with pytest.raises(InputError, match="line 5: is the load and metric of line 3 again"):
        read_latencies(written(tmp_path / "rows.csv", *rows, a_row(measured=2.0)))


@slow
def test_the_same_settings_may_have_run_twice(tmp_path: Path) -> None:
    """On two days, once on a card whose cap is known; both are named."""
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, (*served_loads.NEEDED, "date_utc", CAP))
        writer.writeheader()
        for date, cap in (("2026-11-29T15:00:00+00:00", ""), ("2026-11-30T15:00:00+00:00", "1.01")):
            writer.writerow({**a_row(measured=100.0), "date_utc": date, CAP: cap})
    found = ran(str(file)).output
    assert f"{A_SET} (2026-11-29T15:00)" in found
    assert f"{A_SET} (2026-11-30T15:00, its card's power cap 1.010 times lower)" in found
    assert found.count("over a bar: ") == 2


@cache
def simulated() -> Any:
    return simcore.run("h200/serving", settings=A_SET.split("; "))


def recorded(folder: Path, **changes: Any) -> Path:
    """A folder as of a run on a card: one of the simulator, with a card's birth record."""
    simulated().write(folder)
    file, sets = folder / "provenance.json", " ".join(f"--set '{each}'" for each in A_SET.split("; "))
    card = {
        "command": f"python -m simcore run scenarios/h200/serving.yaml --on cuda {sets} --out x",
        "cache": "as the run itself leaves it; and more", "host": "at its pace", "card": "NVIDIA H200",
        "torch": "2.11.0+cu130", "triton": "3.6.0", "date": "2026-11-29T15:00:00+00:00",
    }  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), **card, **changes}))
    return folder


@slow
def test_a_recorded_run_is_added_and_predicted(tmp_path: Path) -> None:
    """Recorded is the prediction itself, so nothing is off."""
    folder, file = recorded(tmp_path / "run"), tmp_path / "rows.csv"
    for times in (1, 2):
        assert len(rows_of(folder)) == len(METRICS) + 1
        found = ran(str(file), "--add", str(folder))
        fits = "latencies median 0.0 %, worst 0.0 %" in found.output
        assert (found.exit_code, fits) == (times - 1, times == 1)
    assert "has loads of this set already" in str(found.exception)
    with file.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    assert tuple(rows[0]) == COLUMNS
    assert {row["set"] for row in rows} == {A_SET}
    assert (rows[0]["device"], rows[0]["torch"], rows[0]["cache_state"]) == (
        "NVIDIA H200", "2.11.0+cu130", "as the run leaves it",
    )  # fmt: skip


@slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"command": "python -m simcore quickstart"}, "command: is of another scenario"),
        ({"cache": None}, "is no record of a run on a card"),
    ],
)
def test_a_folder_of_another_run_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        rows_of(recorded(tmp_path / "run", **changes))
    with pytest.raises(InputError, match="is no record of a run on a card"):
        rows_of(tmp_path)


def test_a_file_without_rows_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no row"):
        read_latencies(written(tmp_path / "rows.csv"))


# Loads with a latency over the bar, by seed, requests/s, day and whether the card's power cap was measured.
OVER = {
    (3307, 38.0, "2026-11-29", False),
    (3406, 18.8, "2026-11-29", False),
    (3407, 37.5, "2026-11-29", False),
    (3407, 51.0, "2026-11-29", False),
    (3409, 38.0, "2026-11-30", False),
    (3512, 36.0, "2026-11-30", False),
    (3512, 48.0, "2026-11-30", False),
    (3601, 50.0, "2026-11-30", False),
    (3602, 30.0, "2026-11-30", False),
    (3602, 44.0, "2026-11-30", False),
    (3602, 51.0, "2026-11-30", False),
    (3611, 37.0, "2026-11-30", False),
    (3633, 48.0, "2026-11-30", True),
}


@thorough
def test_recorded_loads_are_predicted() -> None:
    """55 loads on H200s: the bars of the median and of durations are kept. That of the worst latency is
    missed, mostly near saturation and on cards whose power cap was not measured: they differ by some percent
    either way."""
    assert ran().exit_code == 1
    found = list(predicted(read_latencies(served_loads.MEASURED), "local"))
    assert len(found) == 55 * 13
    every = figures(found)
    assert every["median"] < 2.8
    assert every["duration"] < served_loads.DURATION_PCT
    assert every["worst"] < 22.0
    missed = [one.latency for one in found if abs(one.pct) >= served_loads.WORST_PCT]
    seeds = ((int(one.set.partition("seed=")[2].partition(";")[0]), one) for one in missed)
    over = {(seed, one.rate_per_s, one.date_utc[:10], one.cap_times is not None) for seed, one in seeds}
    assert over == OVER
    known, unknown = ([one for one in found if (one.latency.cap_times is None) == no] for no in (False, True))
    assert (len(known), len(unknown)) == (10 * 13, 45 * 13)
    assert figures(known)["worst"] < 14.0
    assert figures(known)["duration"] < 2.0
    # Loads that were measured after the law had been fitted, on a card whose cap was measured beside them.
    unseen = [one for one in known if one.latency.date_utc > "2026-11-30T10"]
    assert len(unseen) == 5 * 13
    assert figures(unseen)["median"] < 2.0
    assert figures(unseen)["worst"] < 8.0
    # The bounds that the loads of the first day kept before any others were added.
    first_day = [one for one in found if one.latency.date_utc < "2026-11-30"]
    assert len(first_day) == 22 * 13
    assert figures(first_day)["median"] < 2.5
    assert figures(first_day)["duration"] < 2.0


@slow
def test_a_load_is_predicted_with_the_cap_of_its_card(tmp_path: Path) -> None:
    """Of the same load on two cards, that of the lower cap takes longer; where the cap is not known, it is
    that of the profile."""
    given = "strategies=[{kind: continuous_batching}]; workload.requests=20; workload.arrivals.rate_per_s=40"
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, (*served_loads.NEEDED, CAP))
        writer.writeheader()
        for times in ("", "1", "1.3"):
            writer.writerow({**a_row(set=given, rate_per_s=40), CAP: times})
    unknown, same, lower = (one.predicted_s for one in predicted(read_latencies(file), "local"))
    assert unknown == same
    assert lower > 1.01 * same


def test_a_cap_is_of_an_added_run_and_of_a_card(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.csv", a_row())
    found = ran(str(file), "--cap-times", "1.1")
    assert str(found.exception) == "--cap-times: is of --add only"
    for given in ("0", "nan", "2.1"):
        found = ran(str(file), "--add", str(tmp_path), "--cap-times", given)
        assert str(found.exception) == f"--cap-times: is {given}; 0.5 to 2 is allowed"
    file.write_text(f"{','.join((*served_loads.NEEDED, CAP))}\n{A_SET.replace(',', '')},4,e2e_mean_s,1,9\n")
    with pytest.raises(InputError, match=r"line 2: cap_times: is 9; 0\.5 to 2 is allowed"):
        read_latencies(file)


@slow
def test_what_cannot_be_predicted_is_not_added(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    assert ran(str(file), "--add", str(recorded(tmp_path / "run")), "--profile", "nope").exit_code
    assert not file.exists()
    assert ran(str(file), "--add", str(tmp_path / "run")).exit_code == 0
    before, results = file.read_bytes(), recorded(tmp_path / "other", date="2026-11-30") / "results.csv"
    with results.open(newline="", encoding="utf-8") as opened:
        rows = [{**row, "value": "nan"} for row in csv.DictReader(opened)]
    write_csv(rows, results)
    for spoilt, says in ((results.read_text(), "measured: 'nan'"), ("a\n1\n", "has no column metric")):
        results.write_text(spoilt)
        assert says in str(ran(str(file), "--add", str(results.parent)).exception)
        assert file.read_bytes() == before
    found = ran(str(file), "--add", str(tmp_path / "run"), "--cap-times", "1.1")
    assert "has loads of this set already" in str(found.exception)


@thorough
def test_loads_of_earlier_engines_are_predicted_about() -> None:
    """Their steps were padded further, the schedule of most ran uncompiled, and newcomers of temporal fusion
    waited for one step too many."""
    earlier = served_loads.MEASURED.with_name("h200_serving_loads_earlier.csv")
    found = figures(list(predicted(read_latencies(earlier), "local")))
    assert found["median"] < 5.0
    assert found["duration"] < 3.0
