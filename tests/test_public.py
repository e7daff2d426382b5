"""One table of all public runs in a folder: what is recognised, what is judged, what the errors are."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simcore.input.files import InputError
from simcore.validate import public
from simcore.validate.engines import compare as engines
from simcore.validate.engines.compare import Compared
from simcore.validate.engines.predict import Predicted
from simcore.validate.engines.rows import Row
from simcore.validate.mlperf import rows as mlperf_rows
from tests.test_silicon import MAX_70B, line, written


def other_table(path: Path, columns: tuple[str, ...]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, ["1"] * len(columns)])
    return path


def test_tables_are_known_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    closed = written(tmp_path / "deep" / "runs.csv", line(0, MAX_70B, 4, 2))
    poisson = other_table(tmp_path / "results.csv", mlperf_rows.COLUMNS)
    other = other_table(tmp_path / "prices.csv", ("a", "b"))
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}")
    (tmp_path / "README.md").write_text("about them")
    assert public.tables(tmp_path) == ([closed], [poisson], [other, requests])


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    other_table(tmp_path / "prices.csv", ("a", "b"))
    for folder, says in ((tmp_path, "has no table"), (tmp_path / "none", "is no folder")):
        with pytest.raises(InputError, match=says) as raised:
            public.tables(folder)
        assert "\n" not in str(raised.value)


def test_rows_are_judged_by_place_and_fitted_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows, one of them fitted: 10, 30 and 50 % off in TPOT, the last of many clients and with the host
    of another series, half in TTFT."""
    path = written(
        tmp_path / "runs.csv", *(line(i, MAX_70B, clients, 2) for i, clients in enumerate((4, 8, 4, 64)))
    )

    def compared(rows: list[Row], *_: Any) -> Any:
        factors = (1.1, 9.0, 0.7, 1.5)
        rows[3] = replace(rows[3], series=replace(rows[3].series, host_of=rows[0].series.name))
        return [
            Compared(one, Predicted(0.5 * one.ttft_s, by * one.tpot_s, 0.0, 0.0, 0), "", "", i == 1)
            for i, (one, by) in enumerate(zip(rows, factors, strict=True))
        ], {}

    monkeypatch.setattr(engines, "compared", compared)
    out = tmp_path.parent / f"{tmp_path.name}-all.csv"
    for name in ("a", "b"):
        other_table(tmp_path / f"{name}.csv", ("a", "b"))
    public.main(tmp_path, out=out, profile="none", seed=0, estimate=True, jobs=1)
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "not read, for they are no tables of runs that are known: a.csv, b.csv"
    start = f"| {path.name} | InferenceMAX, vLLM | llama-3.1-70b | h200-sxm | "
    assert f"{start}1 to 8 clients | 1 rows of InferenceMAX, vLLM | 2 | 20.0, 20.0 % | 50.0, 50.0 % |" in said
    both = "1 rows of InferenceMAX, vLLM; its host to 1 of InferenceMAX, vLLM"
    assert f"{start}33 to 128 clients | {both} | 1 | 50.0, 50.0 % |" in said
    assert "| all |  |  |  |  |  | 3 | 30.0, 30.0 % | 50.0, 50.0 % |" in said
    with out.open(newline="") as file:
        assert [round(float(one["TPOT error %"])) for one in csv.DictReader(file)] == [10, -30, 50]
