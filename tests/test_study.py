"""What studies share: crossings, comparison with published figures, the run directory."""

import math
from pathlib import Path

import pytest

from simcore import rundir
from simcore.study import Axes, Row, compare, crossing

LINE = {
    "strategy": "alspec",
    "ranks": "4",
    "groups": "2",
    "context_tokens": "1024",
    "batch": "1",
    "hit_rate": "0.65",
    "metric": "token_latency_s",
    "value": "2.0",
    "role": "measured",
    "fitted_by": "p",
    "source": "somewhere",
}


def row(label: str, value: float | None, rate: float = 0.65) -> Row:
    return Row(Axes("alspec", label, 4, 2, 1024, 1, rate), "token_latency_s", value, "s")


def test_every_change_of_sign_is_found() -> None:
    found = crossing(lambda x: (x - 3.0) * (30.0 - x), [1.0, 10.0, 100.0])
    assert found.places == (pytest.approx(3.0, rel=0.01), pytest.approx(30.0, rel=0.01))
    assert not found.ahead_at_low
    assert crossing(lambda x: 1.0, [1.0, 10.0]).at is None
    assert crossing(lambda x: 5.0 - x, [0.0, 8.0]).ahead_at_low


def test_a_whole_crossing_is_the_first_whole_number_behind_it() -> None:
    assert crossing(lambda x: x - 41.5, [1.0, 64.0], whole=True).at == 42.0


def test_variants_that_a_figure_does_not_tell_apart_are_a_line_each() -> None:
    for rows in ([row("a", 1.0), row("b", 3.0)], [row("b", 3.0), row("a", 1.0)]):
        lines = {line["label"]: line["error_pct"] for line in compare(rows, [LINE], None)}
        assert lines == {"a": -50.0, "b": 50.0}


def test_what_a_profile_was_made_from_is_fitted() -> None:
    assert [line["role"] for line in compare([row("a", 2.0)], [LINE], "p")] == ["fitted"]
    assert [line["role"] for line in compare([row("a", 2.0)], [LINE], "q")] == ["measured"]


def test_other_axes_and_missing_values_are_not_compared() -> None:
    assert compare([row("a", 2.0, rate=0.66), row("b", None)], [LINE], None) == []


def test_a_failed_replacement_leaves_the_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    rundir.save(target, lambda folder: (folder / rundir.MARK).write_text("first") and None)
    rename = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if to == target and self.name != "old":
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="disk full"):
        rundir.save(target, lambda folder: (folder / rundir.MARK).write_text("second") and None)
    assert (target / rundir.MARK).read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_failed_run_leaves_nothing_not_even_new_parents(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        rundir.save(tmp_path / "a" / "b", fails)
    assert list(tmp_path.iterdir()) == []


def test_json_of_a_run_holds_no_infinity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rundir._write_json(tmp_path / "x.json", {"value": math.inf})
