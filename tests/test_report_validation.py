"""The report of a validation: prices over times, their table, two timelines, from files that are made up."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from simcore import reports
from simcore.machine.trace import Cause, PricedOp, Span, Trace, write_chrome_trace
from simcore.ops.op import Price, norm
from simcore.reports.run import read_run
from simcore.reports.validation import figures
from simcore.reports.validation.sections import against_bounds, error_table, prices
from tests.thorough import slow

LADDER = "rung,label,what,n,median_pct,p95_pct,worst_pct,bound_pct,passed\n1,all,shapes,3,5,9,inf,10,True\n"
HEAD = "kind,shape,dtype,predicted_s,low_s,high_s,source,measured_s,p10_s,p90_s,n,held_out,cache\n"
PRICES = HEAD + "".join(
    [
        'matmul,"m 1, n 8",bf16,1.0e-5,0.9e-5,1.1e-5,interpolated,1.05e-5,1.0e-5,1.1e-5,9,True,cold\n',
        'matmul,"m 2, n 8",bf16,3.0e-5,2.9e-5,3.1e-5,interpolated,2.0e-5,1.9e-5,2.1e-5,9,True,cold\n',
        'matmul,"m 4, n 8",bf16,4.0e-5,3.9e-5,4.1e-5,measured,9.0e-5,8.9e-5,9.1e-5,9,False,cold\n',
        "norm,tokens 1,bf16,2.0e-6,,,roofline,1.0e-6,,,1,True,\n",
    ]
)


def trace(events: int, took_s: float) -> Trace:
    op = norm("<i>norm</i>", tokens=1, hidden=8, dtype="bf16")
    priced = PricedOp(op, Price(took_s, took_s, took_s, "measured", ""), 0.0)
    spans = [
        Span(i, i, 0, "main", "g", "run", 0.0, 1.0 + i * took_s, 1.0 + (i + 1) * took_s, Cause(None, 0.0), (),
             (priced,), ((1.0 + i * took_s, 0.0), (1.0 + (i + 1) * took_s, took_s)))
        for i in range(events)
    ]  # fmt: skip
    return Trace(spans)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ladder.csv").write_text(LADDER)
    (tmp_path / "prices.csv").write_text(PRICES)
    write_chrome_trace(trace(500, 4e-6), tmp_path / "trace.json.gz", title="a case")
    write_chrome_trace(trace(500, 1e-6), tmp_path / "predicted_trace.json.gz", title="a case")
    return tmp_path


def hovered(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(hover=[figures.price_hover(row) for row in rows.to_dict("records")])


def plots(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8").split('id="report-data">')[-1].split("</script>")[0]
    return dict(json.loads(text)["plots"])


def first(plot: dict[str, Any]) -> dict[str, Any]:
    """The first figure of a plot."""
    figure: dict[str, Any] = next(iter(plot["figures"].values()))
    return figure


@slow
def test_errors_are_of_held_out_shapes_alone(folder: Path) -> None:
    rows = read_run(folder).prices
    (section,) = prices(read_run(folder))
    table = section.table
    assert table is not None
    lines = {line[0]: dict(zip(table.head, line, strict=True)) for line in table.rows}
    assert lines["matmul"]["held-out shapes"] == "2"
    assert lines["matmul"]["calibrated"] == "1"
    # |1.05 / 1 - 1| and |3 / 2 - 1|: in the middle 27.5 %; the calibrated shape, 125 % off, counts nowhere.
    assert lines["matmul"]["median error"] == "27.5\u00a0%"
    assert lines["matmul"]["worst"] == "50.0\u00a0%"
    assert lines["matmul"]["worst at"] == "m 2, n 8"
    assert lines["matmul"]["in the 90 % interval"] == "1 of 2 (50\u00a0%)"
    assert lines["norm"]["median error"] == "100\u00a0%"
    assert lines["norm"]["in the 90 % interval"] == ""
    alone = rows.assign(off_pct=1.0, held_out=0.0)
    assert {line[4] for line in error_table(alone).rows} == {"–"}


def test_a_scatter_shows_predicted_over_measured_in_its_band(folder: Path) -> None:
    rows = read_run(folder).prices
    figure = figures.scatter(hovered(rows[rows["kind"] == "matmul"]), 10.0)
    band, diagonal, held_out, calibrated = figure.data
    assert list(held_out.x) == pytest.approx([10.5, 20.0])
    assert list(held_out.y) == pytest.approx([10.0, 30.0])
    assert list(calibrated.x) == pytest.approx([90.0])
    assert calibrated.marker.color != held_out.marker.color
    assert list(diagonal.x) == list(diagonal.y)
    upper = band.y[0] / band.x[0]
    lower = band.y[3] / band.x[3]
    assert (upper, lower) == pytest.approx((1.1, 1 / 1.1))
    assert list(held_out.error_y.array) == pytest.approx([1.0, 1.0])
    assert figure.layout.xaxis.range == figure.layout.yaxis.range
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert low < 10.0
    assert high > 90.0
    assert "m 2, n 8" in held_out.hovertext[1]
    assert "+50.0\u00a0%" in held_out.hovertext[1]


def test_axes_of_times_that_are_alike_have_labels(folder: Path) -> None:
    figure = figures.scatter(hovered(read_run(folder).prices.tail(1)), 10.0)
    low, high = (10**end for end in figure.layout.xaxis.range)
    assert high / low == pytest.approx(figures.LEAST_REACH)
    assert len(figure.layout.xaxis.tickvals) >= figures.TICKS_AT_LEAST
    assert all(low <= tick <= high for tick in figure.layout.xaxis.tickvals)


@slow
@pytest.mark.parametrize("cases", [24, 25])
def test_many_cases_are_marks_over_each_other_and_none_is_left_out(folder: Path, cases: int) -> None:
    every = {"strategy": "tensor_parallel", "label": "TP", "metric": "token_latency_s", "reference": 2e-3}
    every |= {"low": 1e-3, "high": 3e-3, "error_pct": 50.0, "role": "measured here", "source": "clock"}
    rows = [{**every, "batch": n, "context_tokens": n, "predicted": n * 1e-3} for n in range(1, cases + 1)]
    pd.DataFrame(rows).to_csv(folder / "comparison.csv", index=False)
    drawn = plots(reports.build(folder))["measured"]["figures"]["0"]["data"]
    shown = {trace["name"]: trace for trace in drawn}
    if cases == 24:
        assert len(shown["predicted"]["x"]) == 24
    else:
        assert shown["TP"]["x"] == pytest.approx([2.0] * 25)
        assert shown["TP"]["y"] == pytest.approx([float(n) for n in range(1, 26)])
        assert "TP, context tokens 25, batch 25" in shown["TP"]["hovertext"][-1]


def test_without_a_bound_there_is_no_band(folder: Path) -> None:
    figure = figures.scatter(hovered(read_run(folder).prices), math.nan)
    assert [t.name for t in figure.data if t.fill] == []


@slow
def test_timelines_are_cut_at_the_same_moment_and_say_so(folder: Path) -> None:
    shown = figures.window({"predicted": read_run(folder).traces.predicted,
                            "measured": read_run(folder).traces.measured}, most=100)  # fmt: skip
    assert shown.end_s == pytest.approx(100e-6)
    assert {name: len(rows) for name, rows in shown.blocks.items()} == {"predicted": 100, "measured": 25}
    assert not shown.whole
    page = reports.build(folder)
    text = page.read_text(encoding="utf-8")
    assert "a case: 500\u00a0µs predicted, 2.00\u00a0ms measured (−75.0\u00a0%)" in text
    assert "Only the first 400\u00a0µs are drawn" in text
    drawn = plots(page)["timelines"]["figures"][""]
    first, second = (trace for trace in drawn["data"] if trace["type"] == "bar")
    assert (len(first["x"]), len(second["x"])) == (400, 100)
    assert first["base"][0] == second["base"][0] == 0.0
    assert "<i>" not in first["text"][0]


def test_short_timelines_are_whole() -> None:
    rows = pd.DataFrame({"start_s": [1.0, 2.0], "end_s": [2.0, 4.0], "rank": 0.0, "stream": "s", "name": "n",
                         "op_kind": "k", "state": "run"})  # fmt: skip
    shown = figures.window({"predicted": rows, "measured": rows})
    assert shown.whole
    assert shown.end_s == 3.0


def test_kinds_without_a_colour_share_the_last() -> None:
    looks = figures.looks([f"kind_{i}" for i in range(20)])
    assert len({colour for _, colour in looks.values()}) == len(figures.OWN_COLOURS) + 1
    assert looks["kind_19"][0] == "other"
    assert figures.looks(["matmul"])["matmul"][0] == "projections"


@slow
def test_a_row_is_judged_by_the_error_that_it_names(folder: Path) -> None:
    """3 % in the median holds, 12 % in the 95th percentile does not; the band of prices is the median's."""
    rows = ["1,all,shapes,3,3,12,13,5,median_pct,True", '1,all,"shapes, 95 %",3,3,12,13,10,p95_pct,False']
    head = LADDER.splitlines()[0].replace("bound_pct,", "bound_pct,judged_by,")
    (folder / "ladder.csv").write_text("\n".join([head, *rows, ""]))
    page = reports.build(folder)
    assert "misses its bound of 10.0\u00a0% with 95 % 12.0\u00a0%" in page.read_text(encoding="utf-8")
    assert "95 % error 12.0\u00a0%" in page.read_text(encoding="utf-8")
    shown = plots(page)
    bars = [bar for bar in first(shown["ladder"])["data"] if bar["type"] == "bar"]
    assert [bar["x"] for bar in bars] == [[60.0], [120.0]]
    names = [trace.get("name") for trace in first(shown["op-prices"])["data"]]
    assert "within the bound of 5.00\u00a0%" in names


@slow
def test_an_infinite_error_is_shown(folder: Path) -> None:
    assert ">∞</td>" in reports.build(folder).read_text(encoding="utf-8")


def test_a_validation_without_these_files_is_a_page(folder: Path) -> None:
    (folder / "prices.csv").unlink()
    (folder / "predicted_trace.json.gz").unlink()
    text = reports.build(folder).read_text(encoding="utf-8")
    assert "Prices of single ops" not in text
    assert "predicted and measured</h2>" not in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prices.csv", b"kind,shape\nmatmul,m\n"),
        ("ladder.csv", LADDER.replace("passed\n", "judged_by,passed\n").replace("True", "x,True").encode()),
        ("prices.csv", PRICES.replace("True", "perhaps", 1).encode()),
        ("predicted_trace.json.gz", b"no gzip"),
        ("predicted_trace.json.gz", gzip.compress(b"[]", mtime=0)),
        ("predicted_trace.json.gz", gzip.compress(b'{"traceEvents": [{"ph": "X"}]}', mtime=0)),
    ],
)
def test_no_page_is_made_of_garbage(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as error:
        reports.build(folder)
    assert "\n" not in str(error.value)


def test_a_worst_error_beyond_the_axis_has_an_arrow_at_its_end(folder: Path) -> None:
    ladder = read_run(folder).ladder
    near, far = (against_bounds(ladder.assign(worst_pct=worst)) for worst in (11.0, 90.0))
    assert [each.name for each in near.data if each.type == "scatter" and each.mode == "markers"] == ["worst"]
    _, arrow = (each for each in far.data if each.type == "scatter" and each.mode == "markers")
    assert far.layout.xaxis.range[1] == 120.0
    assert 110.0 < arrow.x[0] < 120.0
    # The one of the folder is infinite.
    assert len(against_bounds(ladder).data) == len(far.data)
