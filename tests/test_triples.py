"""Two runs of a service predict its third: which rows are drawn, what is printed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.validate.calibration.service import HeldBack, Times
from simcore.validate.engines import triples as program
from simcore.validate.engines.predict import predict_all
from simcore.validate.engines.rows import Row, read_rows
from simcore.validate.engines.triples import held_back, lines, triples
from tests.test_silicon import MAX_70B, PLAIN_8B, line, written
from tests.thorough import slow


def rows(tmp_path: Path, *clients: int, ranks: int = 1, kind: dict[str, str] = PLAIN_8B) -> list[Row]:
    given = [line(i, kind, each, ranks) for i, each in enumerate(clients)]
    return read_rows(written(tmp_path / "runs.csv", *given))[0]


def test_three_rows_of_each_service_are_drawn_by_a_seed(tmp_path: Path) -> None:
    many, two = rows(tmp_path, 1, 2, 3, 4, 5, 6), rows(tmp_path, 1, 2, ranks=2, kind=MAX_70B)
    (first,) = triples([*many, *two], 0, 9)
    assert len({one.id for one in first}) == 3
    assert triples([*two, *reversed(many)], 0, 9) == [first]
    assert any(triples(many, seed, 9) != [first] for seed in range(1, 9))
    others = [replace(one, ranks=2) for one in many]
    assert len(triples([*many, *others], 0, 9)) == 2
    assert {each[0].ranks for seed in range(9) for each in triples([*many, *others], seed, 1)} == {1, 2}


@slow
def test_the_constants_of_two_runs_predict_the_third(tmp_path: Path) -> None:
    """Rows that the simulator made: TPOT of the third is predicted within 3 %, and not without a host."""
    given, host = rows(tmp_path, 1, 4, 8), HostTime(step_s=4e-3, request_s=5e-3)
    found = predict_all([(one, host) for one in given], "none", 1)
    made = [
        replace(one, ttft_s=theirs.ttft_s, tpot_s=theirs.tpot_s)
        for one, theirs in zip(given, found, strict=True)
    ]
    third = held_back(made, "none")
    assert abs(third.tpot_pct) < 3.0
    assert third.measured == made[2].times
    (alone,) = predict_all([(made[2], NO_HOST_TIME)], "none", 1)
    assert alone.tpot_s < 0.8 * third.predicted.tpot_s


def test_the_table_has_medians_and_shares_within_the_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = rows(tmp_path, 1, 2, 3)
    found = [
        (given, HeldBack("x", Times(1.0, 1.0), Times(1.0 + ttft, 1.0 - tpot), NO_HOST_TIME))
        for ttft, tpot in ((0.1, 0.01), (0.2, 0.02), (0.4, 0.09))
    ]
    said = "\n".join(lines(found))
    assert "| all | 3 | 2.0 % | 67 % | 20.0 % | 33 % |" in said
    assert f"| {given[0].series.name} | 3 | 2.0 %" in said

    class Pool:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...
        def map(self, _: Any, chosen: list[list[Row]]) -> list[HeldBack]:
            return [found[0][1]] * len(chosen)

    monkeypatch.setattr(program, "ProcessPoolExecutor", Pool)
    out = tmp_path / "triples.csv"
    with pytest.raises(SystemExit) as ended:
        program.main(tmp_path / "runs.csv", profile="none", out=out, seed=0, most=40, jobs=1)
    assert ended.value.code == 0
    assert "| all | 1 | 1.0 % | 100 % | 10.0 % | 100 % |" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
