"""The page of a plan: hand-made points of every question, and what it refuses."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from simcore.reports import build
from tests.thorough import slow

LIMITS = [
    {"metric": "ttft_p99_s", "value": 0.5, "at_most": True},
    {"metric": "slo_attainment", "value": 0.9, "at_most": False},
]
Row = dict[str, Any]


def point(label: str, devices: int, rate: float, verdict: str = "holds", **more: Any) -> Row:
    """A row of points.csv."""
    slow = 0.1 * rate / devices
    return {
        **{"device": "h200-sxm", "label": label, "strategy": "continuous_batching", "devices": devices},
        **{"ranks": 1, "servers": devices, "rate_per_s": rate, "requests": 100},
        **{"verdict": verdict, "best": False, "replicas": 3, "why": "", "cost_per_hour": ""},
        **{"ttft_p99_s": slow, "ttft_p99_s.low": slow * 0.9, "ttft_p99_s.high": slow * 1.1},
        **{"slo_attainment": 0.95, "slo_attainment.low": 0.94, "slo_attainment.high": 0.96},
        **more,
    }


def written(folder: Path, question: str, rows: Sequence[Mapping[str, Any]], **summary: Any) -> Path:
    """A plan's directory."""
    folder.mkdir(exist_ok=True)
    fields = {"name": "mine", "study": "plan", "question": question, "answer": "It holds.", "certainty": 0.95}
    fields |= {
        "limits": LIMITS,
        "objectives": ["fewest_devices"],
        "price_shares": {"measured": 1.0},
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(fields))
    (folder / "plan.yaml").write_text(f"base: {{model: llama}}\nquestion: {question}\n")
    (folder / "provenance.json").write_text(
        json.dumps({"seed": 0, "devices": [{"device": {"name": "h200"}}]})
    )
    with (folder / "points.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def page_of(folder: Path) -> str:
    """The page without the plotting library."""
    return build(folder).read_text("utf-8").replace(get_plotlyjs(), "")


def plots_of(page: str) -> dict[str, Any]:
    """The plots of a page: key -> its figures."""
    found = re.search(r'id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return {key: plot["figures"] for key, plot in json.loads(found[1])["plots"].items()}


def searched() -> list[Row]:
    return [
        point("a", 1, 8.0, "fails", why="ttft_p99_s is 0.8"),
        point("a", 2, 8.0, "unsure"),
        point("a", 4, 8.0),
        point("b", 1, 8.0, "fails"),
        point("b", 2, 8.0, best=True),
    ]


@slow
def test_devices_lie_across_with_a_row_for_each_way_and_a_ring_at_the_answer(tmp_path: Path) -> None:
    page = page_of(written(tmp_path, "devices", searched()))
    plots = plots_of(page)
    assert set(plots) == {"holds", "limit-ttft_p99_s", "limit-slo_attainment", "prices"}
    traces = {trace["name"]: trace for trace in plots["holds"]["0"]["data"]}
    # The way that answers comes first.
    assert (traces["holds"]["x"], traces["holds"]["y"]) == ([4.0, 2.0], [1, 0])
    assert (traces["fails"]["x"], traces["fails"]["y"]) == ([1.0, 1.0], [1, 0])
    assert traces["not sure"]["x"] == [2.0]
    assert (traces["the answer"]["x"], traces["the answer"]["y"]) == ([2.0], [0])
    assert "plan: fewest devices" in page
    assert '<dd class="value">2 devices</dd>' in page
    assert "limit: at most 500\u00a0ms" in page
    assert "Trade-off" not in page


@slow
def test_a_line_a_way_with_its_intervals_beside_the_limit(tmp_path: Path) -> None:
    plots = plots_of(page_of(written(tmp_path, "devices", searched())))
    b, a, limit = plots["limit-ttft_p99_s"]["0"]["data"]
    assert (b["name"], a["name"], limit["name"]) == ("b", "a", "limit, at most 500\u00a0ms")
    assert a["y"] == pytest.approx([800.0, 400.0, 200.0])
    assert a["error_y"]["array"] == pytest.approx([80.0, 40.0, 20.0])
    assert limit["y"] == [500.0, 500.0]
    assert plots["limit-slo_attainment"]["0"]["data"][-1]["name"] == "limit, at least 90\u00a0%"


@pytest.mark.parametrize("question", ["rate", "strategy"])
def test_rates_lie_across_on_a_logarithmic_axis(question: str, tmp_path: Path) -> None:
    rows = [point("a", 4, 2.0), point("a", 4, 4.0, best=True), point("a", 4, 8.0, "fails")]
    page = page_of(written(tmp_path, question, rows))
    axis = plots_of(page)["holds"]["0"]["layout"]["xaxis"]
    assert (axis["type"], axis["title"]["text"]) == ("log", "offered rate (requests/s, log scale)")
    assert '<dd class="value">4\u00a0requests/s</dd>' in page


def grid() -> list[Row]:
    return [
        point(
            "a", devices, rate, "holds" if rate / devices < 5 else "fails", best=(devices, rate) == (2, 8.0),
            **{"vary.devices": devices, "vary.workload.arrivals.rate_per_s": rate},
        )
        for devices in (1, 2) for rate in (4.0, 8.0, 16.0)
    ]  # fmt: skip


@slow
def test_of_a_grid_two_varied_numbers_lie_across_and_in_rows(tmp_path: Path) -> None:
    rows = grid()
    rows[0]["best"] = True
    page = page_of(written(tmp_path, "grid", rows, objectives=["fewest_devices", "highest_rate"]))
    plots = plots_of(page)
    layout = plots["holds"]["0"]["layout"]
    assert layout["yaxis"]["ticktext"] == ["1 device", "2 devices"]
    assert layout["xaxis"]["ticktext"] == ["4", "8", "16"]
    others, front = plots["trade-off"]["0"]["data"]
    assert (others["x"], others["y"]) == ([4.0], [2.0])
    assert (front["x"], front["y"], front["mode"]) == ([4.0, 8.0], [1.0, 2.0], "lines+markers")
    assert '<dd class="value">3 of 6</dd>' in page


@slow
def test_costs_have_a_tile_columns_and_a_trade_off(tmp_path: Path) -> None:
    prices = {"cost_per_million_output_tokens": 1.5}
    rows = [point("a", n, 8.0, "holds", best=n == 2, cost_per_hour=3.0 * n, **prices) for n in (2, 4)]
    page = page_of(written(tmp_path, "cost", rows, objectives=["lowest_cost"]))
    assert '<dd class="value">6 an hour</dd>' in page
    assert "per million output tokens" in page
    assert "trade-off" in plots_of(page)


@slow
def test_many_ways_leave_a_choice_of_the_second_axis(tmp_path: Path) -> None:
    rows = [point(f"way {i}", n, r) for i in range(9) for n in (1, 2) for r in (4.0, 8.0)]
    rows = [{**row, "vary.devices": row["devices"]} for row in rows]
    page = page_of(written(tmp_path, "grid", rows))
    assert set(plots_of(page)["limit-ttft_p99_s"]) == {"0", "1"}
    assert "Of 9 ways of running the 8 are drawn" in page


@slow
def test_the_table_opens_with_the_answer_and_names_varied_fields(tmp_path: Path) -> None:
    rows = [point("a", 1, r, best=r == 8.0, **{"vary.base.model": m}) for r, m in ((4.0, "x"), (8.0, "y"))]
    page = page_of(written(tmp_path, "rate", rows))
    table = page[page.index('<section id="points">') :]
    cells = re.findall(r'<td class="\w+">(.*?)</td>', table)
    assert '<th scope="col" class="text">model</th>' in table
    assert cells[3:5] == ["8\u00a0requests/s", "y"]
    assert "The same at every point: 100 requests." in table
    assert "0.800 ± 0.08" in table or "800 ± 80" in table


@slow
def test_missing_files_and_columns_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text("label,verdict\na,holds\n")
    page = page_of(tmp_path)
    assert '<section id="points">' in page
    assert "What holds" not in page
    (tmp_path / "points.csv").write_text("label,verdict,devices\na,holds,1\na,fails,\n")
    assert set(plots_of(page_of(tmp_path))) == {"holds"}
    # Nothing is said to hold where each point ran once.
    summary = {
        "study": "plan",
        "question": "grid",
        "answer": "a",
        "certainty": None,
        "limits": [],
        "objectives": [],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = page_of(tmp_path)
    assert "What holds" not in page
    assert "Points that ran" in page


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("points.csv", "", "has no label, verdict"),
        ("points.csv", "label\na\n", "has no verdict"),
        ("points.csv", "label,verdict\na\n", "row 2 has 1 of 2 fields"),
        ("points.csv", 'label,verdict\n"a,holds\n', "unexpected end of data"),
        ("points.csv", "label,verdict,devices\na,holds,many\n", "devices 'many' is no number"),
        ("points.csv", "label,verdict\na,perhaps\n", "verdict 'perhaps' is none of holds, unsure, fails"),
        ("summary.json", "[]", "holds no JSON object"),
        ("summary.json", '{"limits": 3}', "limits is no list"),
        ("summary.json", '{"limits": [{"metric": "m"}]}', "has no metric, value and at_most"),
        ("summary.json", '{"limits": [{"metric": "m", "value": "x", "at_most": true}]}', "is no number"),
        ("summary.json", '{"certainty": "high"}', "certainty 'high' is no number"),
        ("summary.json", '{"how_to_run": {}}', "how_to_run is no list"),
        ("summary.json", '{"how_to_run": ["vllm serve"]}', "how_to_run: 'vllm serve' has not point"),
        (
            "summary.json",
            json.dumps(
                {"how_to_run": [{"point": "p", "placed": "", "why_not": "", "commands": [], "without": 3}]}
            ),
            "has not without",
        ),
        ("plan.yaml", "- a\n", "holds no mapping"),
        ("provenance.json", "{", "Expecting property name"),
    ],
)
def test_garbage_is_refused_in_one_line(name: str, content: str, says: str, tmp_path: Path) -> None:
    written(tmp_path, "devices", searched())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        build(tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / name}: ")
    assert "\n" not in message
    assert not (tmp_path / "report.html").exists()


def way(point: str, command: str | None, router: str = "") -> dict[str, Any]:
    """How to run a point, as summary.json has it."""
    one = {"engine": "e-1", "title": "E 1", "command": command, "why_not": "" if command else "no such order"}
    placed = "on each of 2 servers" if router else ""
    return {
        **{"point": point, "servers": 2, "ranks": 1, "placed": placed, "why_not": ""},
        "commands": [{**one, "router": router, "notes": ["one step ahead"] if command else []}],
    }


@slow
def test_commands_stand_whole_on_the_page_with_what_they_do_not_say(tmp_path: Path) -> None:
    how = [way("two", "serve m --a '<x>' && b", "nginx -s reload"), way("four", None)]
    how[0]["without"] = "autoscaling is not in them"
    page = page_of(written(tmp_path, "devices", searched(), how_to_run=how))
    own = page[page.index('<section id="how">') : page.index('<section id="points">')]
    assert re.findall(r"<pre[^>]*>(.*?)</pre>", own) == [
        "serve m --a &#39;&lt;x&gt;&#39; &amp;&amp; b",
        "nginx -s reload",
    ]
    assert "E 1, two, on each of 2 servers" in own
    assert "No such order." in own
    assert "E 1: one step ahead." in own
    assert "Autoscaling is not in them." in own
    assert "How to run" not in page_of(written(tmp_path, "devices", searched()))


@slow
def test_energy_is_said_to_be_an_upper_bound_wherever_it_stands(tmp_path: Path) -> None:
    rows = [point("a", n, 8.0, best=n == 2, joules_per_output_token=4.5 * n) for n in (2, 4)]
    page = page_of(written(tmp_path, "grid", rows, objectives=["fewest_devices", "lowest_energy"]))
    layout = plots_of(page)["trade-off"]["0"]["layout"]
    assert layout["yaxis"]["title"]["text"].startswith("energy per output token, at most (J")
    assert ">J per output token, at most</th>" in page
    assert "at most 9 J a token" in page


@slow
def test_labels_are_text_and_no_html(tmp_path: Path) -> None:
    rows = [{**row, "label": f"<b>{row['label']}"} for row in searched()]
    page = page_of(written(tmp_path, "devices", rows, name="<b>n", answer="<b>it"))
    assert "<b>" not in page
    lines = plots_of(page)["limit-ttft_p99_s"]["0"]["data"]
    assert lines[0]["name"] == "&lt;b&gt;b"
    assert "<b>&lt;b&gt;b</b>" in lines[0]["hovertext"][0]


@slow
def test_the_same_files_give_the_same_bytes_and_load_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path, "grid", grid(), objectives=["fewest_devices", "highest_rate"])
    first, page = build(folder).read_bytes(), page_of(folder)
    assert build(folder).read_bytes() == first
    assert not re.search(r'(src|href)="(?!#|data:)', page)


def swing(factor: str, more: float, verdict: str = "holds", **other: Any) -> Row:
    """A swing of summary.json."""
    return {
        **{"winner": 0, "factor": factor, "change": "x 1.1", "times": 1.1, "metric": "ttft_p99_s"},
        **{"base": 0.4, "value": 0.4 * (1 + more), "more": more, "low": more - 0.01, "high": more + 0.01},
        **{"verdict": verdict, "why": "", "breaks_at": None, **other},
    }


@slow
def test_swings_are_bars_from_the_answer_in_the_order_of_the_summary(tmp_path: Path) -> None:
    swings = [swing("load", 0.5, "fails", breaks_at=1.05), swing("load", -0.4), swing("host time", 0.1)]
    plots = plots_of(page_of(written(tmp_path, "devices", searched(), sensitivity=swings)))
    traces = {trace["name"]: trace for trace in plots["tornado-0"][""]["data"]}
    assert (traces["holds"]["x"], traces["holds"]["y"]) == ([-40.0, 10.0], [0, 1])
    assert (traces["fails"]["x"], traces["fails"]["y"]) == ([50.0], [0])
    assert "from x 1.05 on" in traces["fails"]["customdata"][0]


@pytest.mark.parametrize("wrong", [7, {"factor": "load"}, {**swing("load", 0.1), "verdict": "maybe"}])
def test_what_is_no_swing_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary.json: sensitivity: .* is no swing"):
        build(written(tmp_path, "devices", searched(), sensitivity=[wrong]))
