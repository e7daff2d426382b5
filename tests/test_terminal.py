"""What the terminal shows: tables within the reader's window, no number cut."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from simcore import terminal
from simcore.assembly import assemble
from simcore.cli import main
from simcore.scenario import load_scenario
from simcore.studies.common import Outcome
from tests.thorough import first

ROOT = Path(__file__).resolve().parent.parent
# A scenario of each study: what makes it short.
STUDIES = {
    "decode": ("h200/decode_step.yaml", ("batch=[1, 8]",)),
    "serving": (
        "quickstart.yaml",
        (
            "workload.requests=6",
            "workload.output_tokens={kind: uniform, low: 2, high: 40}",
            "replicas=1",
            "workload.arrivals.rate_per_s=[8, 64]",
            "strategies=[{kind: continuous_batching, token_budget: 64}, {kind: temporal_fusion}]",
        ),
    ),
    "tiling": ("tiling_cpu.yaml", ("tokens=64",)),
    "linear_attention": (
        "papers/leetdecoding_a6000.yaml",
        ("methods=[vanilla, lightning_torch]", "batch=1"),
    ),
    "decode_attention": ("papers/flash_decoding_a100.yaml", ()),
}
NUMBER = re.compile(r"[+-]?\d[\d,.]*")


@pytest.fixture(scope="module", params=STUDIES)
def shown(request: pytest.FixtureRequest) -> tuple[str, Outcome, list[dict[str, Any]]]:
    name, settings = STUDIES[request.param]
    path = ROOT / "scenarios" / name
    parts = assemble(load_scenario(path, settings), str(path))
    outcome = parts.study.run(lambda doing, done, total: None)
    return request.param, outcome, parts.study.compare(outcome)


def printed(shown: Any, capsys: pytest.CaptureFixture[str]) -> str:
    study, outcome, comparison = shown
    terminal.show(study, outcome, comparison, Path("run"), quiet=False)
    return capsys.readouterr().out


def numbers(text: str) -> list[str]:
    """What tables show of figures: numbers of every line up to the warnings."""
    return sorted(NUMBER.findall(text.partition("warning:")[0]))


@pytest.mark.parametrize("columns", first(2, [60, 200, 80, 120]))
def test_every_study_stays_within_the_window(
    shown: Any, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed(shown, capsys)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text


def test_every_number_of_a_wide_table_is_in_the_narrow_one(
    shown: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of results are the same at any width; keys come once for each part of a table."""
    monkeypatch.setenv("COLUMNS", "400")
    table, keys = terminal.TABLES[shown[0]](shown[1])
    cells = [cell for column in table.columns[keys:] for cell in column.cells]
    figures = [found for cell in cells for found in NUMBER.findall(re.sub(r"\[.*?\]", "", str(cell)))]
    assert figures
    wide = numbers(printed(shown, capsys))
    monkeypatch.setenv("COLUMNS", "80")
    narrow = numbers(printed(shown, capsys))
    for figure in set(figures):
        assert narrow.count(figure) >= figures.count(figure), figure
        assert wide.count(figure) >= figures.count(figure), figure


def test_a_table_that_fits_is_in_one_part(
    shown: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    table, keys = terminal.TABLES[shown[0]](shown[1])
    assert [len(part) for part in terminal._parts(table, keys, 160)] == [len(table.columns)]


def test_a_table_of_a_pipe_has_80_columns_and_its_sentences_are_a_line_each(
    shown: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(shown, capsys)
    tables = text.partition("warning:")[0].partition(shown[1].answer)[0]
    assert max(map(len, tables.splitlines())) <= terminal.PLAIN_WIDTH
    assert shown[1].answer in text.splitlines()


def test_parts_repeat_the_columns_that_say_what_a_row_is_of() -> None:
    table = Table()
    table.add_column("strategy")
    for name in "abcd":
        table.add_column(name, justify="right")
    table.add_row("x" * 10, *("1" * 30,) * 4)
    assert terminal._parts(table, 1, 80) == [[0, 1, 2], [0, 3, 4]]
    # What is wider by itself runs over the edge, whole.
    assert terminal._parts(table, 1, 10) == [[0, 1], [0, 2], [0, 3], [0, 4]]


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("second", ["holds", "fails"])
def test_points_that_no_limit_judges_show_their_figures(limited: bool, second: str) -> None:
    place = {"devices": 1, "device": "h200-sxm", "rate_per_s": 8.0, "replicas": 1, "cost_per_hour": None}
    figures = {"ttft_p99_s": 0.25, "tpot_p99_s": 0.0125, "e2e_p50_s": None, "joules_per_output_token": None}
    lines = [
        {"label": name, "verdict": verdict, "best": verdict == "holds", **place, **figures}
        for name, verdict in (("a", "holds"), ("b", second))
    ]
    table, _ = terminal.judged(lines, {"tpot_p99_s": 0.03} if limited else {})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    said = columns.get("verdict", columns.get("", []))
    assert ("holds" in str(said)) == ("verdict" in columns) == (limited or second == "fails")
    assert ("best" in said[0], "fails" in said[1]) == (True, second == "fails")
    if limited:
        assert columns["TPOT p99 (30 ms)"] == ["12.5 ms", "12.5 ms"]
        assert "TTFT p99" not in columns
    else:
        assert (columns["TTFT p99"], columns["TPOT p99"]) == (["250 ms"] * 2, ["12.5 ms"] * 2)
        assert columns["E2E p50"] == ["-", "-"]


@pytest.mark.parametrize("command", ["engines", "models", "schedules"])
def test_lists_stay_within_the_window(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command])
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    with pytest.raises(SystemExit):
        main([command])
    whole = capsys.readouterr().out
    assert narrow.split() == whole.split()
    assert all(not line.startswith(" ") for line in whole.splitlines())


@pytest.mark.parametrize(
    ("calls", "printed"),
    [
        # By the stage, and not by all that came before.
        (
            [(50.0, "simulating", 5, 10), (100.0, "simulating", 10, 10), (106.0, "crossovers:", 1, 3)],
            [
                "simulating 5 of 10, about 50 s left",
                "simulating 10 of 10",
                "crossovers: 1 of 3, about 12 s left",
            ],
        ),
        # Of a search, whose total grows, none.
        (
            [(10.0, "run", 5, 10), (20.0, "run", 10, 12), (30.0, "run", 11, 12)],
            ["run 5 of 10, about 10 s left", "run 10 of 12 so far", "run 11 of 12 so far"],
        ),
    ],
    ids=["stages", "search"],
)
def test_the_time_left(
    calls: list[tuple[float, str, int, int]],
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    show = terminal.progress()
    for clock[0], doing, done, total in calls:
        show(doing, done, total)
    monkeypatch.undo()
    assert capsys.readouterr().err.splitlines() == printed
