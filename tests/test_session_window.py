"""The part of a run of sessions that is measured, how their load is named, and what percentiles over replicas
rest on.

    turns per second in the steady state = sessions per second * turns of a session
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simcore.cli import main
from simcore.reports.run import read_run
from simcore.reports.serving import sections as sections_serving
from simcore.studies.common import ServingAxes
from simcore.studies.serving import study
from simcore.studies.serving.served import Bools, Served, served
from simcore.studies.serving.window import ENDED_LATE, WARMUP_SHARE, steady
from simcore.workload.requests import Request
from tests.test_prefix_serving import sessions
from tests.test_serving import document, outcome, workload
from tests.test_steady import by_label
from tests.thorough import slow


def talks(count: int, each: int, apart_s: float, think_s: float) -> tuple[Served, Bools]:
    """So many sessions of `each` turns, one every `apart_s`; each answer takes 0.1 s."""
    turns = []
    for session in range(count):
        for turn in range(each):
            came_s = session * apart_s + turn * (0.1 + think_s)
            turns.append(Request(len(turns), came_s, 9, 2, 2, came_s, came_s + 0.05, came_s + 0.1))
    return served(turns), np.arange(count * each) % each == 0


def test_the_window_of_sessions_has_their_rate_by_their_turns() -> None:
    """The tenth of a hundred sessions opens after 9 s and takes 4.3 s; the next turn to come is the first one
    of a session, after 14 s. The last session opens after 99 s."""
    of, opens = talks(100, 3, 1.0, 2.0)
    window = steady(of, opens=opens)
    assert (window.begin_s, window.end_s) == (14.0, 99.0)
    assert window.came.sum() / window.length_s == pytest.approx(3.0)
    assert not window.whole
    assert not window.growing
    # Of 95 sessions a tenth are ten.
    of_fewer, opens_of_fewer = talks(95, 3, 1.0, 2.0)
    assert steady(of_fewer, opens=opens_of_fewer).begin_s == 14.0
    # Without a warm-up it begins no sooner than a session takes.
    assert steady(of, 0.0, opens=opens).begin_s == 5.0


def test_where_no_session_opens_after_the_first_have_ended_the_run_is_unrated() -> None:
    of, opens = talks(100, 3, 0.1, 15.0)
    window = steady(of, opens=opens)
    assert (window.whole, window.unrated) == (ENDED_LATE, True)
    assert window.came.all()
    # Nor does a single request say anything of a rate.
    for turns in (1, 2):
        of, opens = talks(turns, 1, 1.0, 1.0)
        assert (steady(of, opens=opens).whole, steady(of, opens=opens).unrated) == (ENDED_LATE, True)


def test_a_turn_that_comes_just_as_the_warm_up_ends_is_measured() -> None:
    """The tenth of a hundred sessions, one a second, is over after 10 s, when the eleventh opens."""
    turns = [Request(i, float(i), 9, 2, 2, float(i), i + 0.5, i + 1.0) for i in range(100)]
    assert steady(served(turns), 0.1, opens=np.ones(100, np.bool_)).begin_s == 10.0


def test_sessions_that_open_faster_than_they_are_answered_are_growing() -> None:
    """One server that takes 0.1 s a turn; sessions of one turn come every 0.08 s, then every 0.2 s."""
    for apart_s, grows in ((0.08, True), (0.2, False)):
        came_s = apart_s * np.arange(1000)
        done_s = 0.1 + np.maximum(came_s, 0.1 * np.arange(1000))
        turns = [
            Request(i, float(a), 9, 2, 2, float(b) - 0.1, float(b), float(b))
            for i, (a, b) in enumerate(zip(came_s, done_s, strict=True))
        ]
        assert steady(served(turns), opens=np.ones(1000, np.bool_)).growing == grows


@slow
def test_a_load_of_sessions_is_named_in_sessions() -> None:
    for count, settled in ((900, True), (60, False)):
        found = outcome(document(workload=sessions(count, 10.0), slo={"ttft_s": 5.0}))
        assert found.answer.startswith("At 10 sessions/s on h200-sxm")
        assert ("too short for a steady state at 10 sessions/s" in found.answer) != settled
        assert "requests/s" not in found.answer
        axes = found.rows[0].axes
        assert isinstance(axes, ServingAxes)
        assert axes.rate_per_s == 10.0
        (goodput,) = by_label(found, "goodput_per_s").values()
        if not settled:
            assert goodput is None
            continue
        # 3.5 turns of a session on average; as many as are offered keep so long a promise.
        (offered,) = by_label(found, "offered_per_s").values()
        assert goodput == pytest.approx(offered)
        assert goodput == pytest.approx(35.0, rel=0.2)


@slow
def test_terminal_and_report_name_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = sessions(40)
    load["arrivals"]["rate_per_s"] = [4.0, 8.0]
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(document(workload=load)))
    with pytest.raises(SystemExit, match="0"):
        main([str(file), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "8 sessions/s" in said
    assert "requests/s" not in said
    results = read_run(tmp_path / "run").results
    named = [sections_serving.point_text(point) for point in sections_serving.points(results)]
    assert named == ["4\u00a0sessions/s", "8\u00a0sessions/s"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "8\u00a0requests/s" not in page


@pytest.mark.parametrize(
    ("arrivals", "windows"),
    [({"kind": "poisson", "rate_per_s": 30.0}, 1), ({"kind": "closed_loop", "clients": 3}, 3)],
)
def test_ends_of_prices_share_a_window_where_arrivals_do_not_depend_on_answers(
    arrivals: dict[str, Any], windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    figures = study.figures_of

    def noted(bench: Any, result: Any, case: Any, window: Any) -> Any:
        seen.append(window)
        return figures(bench, result, case, window)

    monkeypatch.setattr(study, "figures_of", noted)
    outcome(document(workload=workload(60, arrivals), price_interval=True))
    assert [window.whole for window in seen] == [""] * 3
    assert len({id(window) for window in seen}) == windows


@pytest.mark.thorough
def test_the_ends_of_prices_have_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """At other prices answers come at other times, and the turns after them too."""
    seen: list[tuple[Any, Any]] = []
    figures = study.figures_of

    def noted(bench: Any, result: Any, case: Any, window: Any) -> Any:
        seen.append((result, window))
        return figures(bench, result, case, window)

    monkeypatch.setattr(study, "figures_of", noted)
    given = document(workload=sessions(400, 10.0), price_interval=True)
    del given["profile"]
    outcome(given)
    assert len(seen) == 3
    for result, window in seen:
        own = steady(result.served, WARMUP_SHARE, None, result.opens)
        assert (window.begin_s, window.end_s, window.whole) == (own.begin_s, own.end_s, "")
        np.testing.assert_array_equal(window.came, own.came)
    assert len({window.begin_s for _, window in seen}) == 3


@slow
def test_percentiles_over_replicas_rest_on_the_requests_of_each() -> None:
    """Three replicas of 500: the mean of three p99s, each of the slowest five or so."""
    load = workload(500, {"kind": "poisson", "rate_per_s": 30.0}, 100, 5)
    found = outcome(document(workload=load, replicas=3, slo={"ttft_s": 1.0}))
    (text,) = [text for text in found.warnings if text.startswith("too few requests for")]
    assert "of each replica; 1,000 in each replica that are measured" in text
    assert "requests of each replica)" in found.answer
