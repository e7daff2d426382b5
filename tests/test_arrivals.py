"""The requests of workloads: statistics within standard errors, recorded traces, every line of complaint."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from simcore.input.files import InputError
from simcore.workload import arrivals as arrivals_module
from simcore.workload.arrivals import draw
from simcore.workload.drawn import (
    Drawn,
    mean_output_tokens,
    mean_prompt_tokens,
    offered_rate_per_s,
    requests,
)
from simcore.workload.spec import Workload
from simcore.workload.streams import stream
from simcore.workload.vllm_bench import read_bench, write_bench
from tests.thorough import slow

SIGMAS = 4.0
POISSON = {"kind": "poisson", "rate_per_s": 2.0}
TEN = {"kind": "constant", "value": 10}


def workload(arrivals: dict[str, Any], **rest: Any) -> Workload:
    """Constant lengths and 1000 requests unless said otherwise; a trace brings its own."""
    own = (
        {} if arrivals["kind"] == "trace" else {"requests": 1000, "prompt_tokens": TEN, "output_tokens": TEN}
    )
    return Workload.model_validate({"arrivals": arrivals, **own, **rest})


def times(drawn: Drawn) -> NDArray[np.float64]:
    assert drawn.arrival_s is not None
    return drawn.arrival_s


def gaps(arrivals: dict[str, Any], count: int, seed: int = 0) -> NDArray[np.float64]:
    return np.diff(times(draw(workload(arrivals, requests=count), seed, 0)))


def lengths(model: dict[str, Any], count: int = 40_000) -> NDArray[np.int64]:
    return draw(workload(POISSON, requests=count, prompt_tokens=model), 3, 0).prompt_tokens


def near(values: NDArray[Any], mean: float) -> bool:
    """Whether a sample's mean is within `SIGMAS` standard errors of what it should be."""
    return bool(abs(values.mean() - mean) <= SIGMAS * values.std() / math.sqrt(len(values)))


def complaint(given: Workload) -> str:
    with pytest.raises(InputError) as caught:
        draw(given, 0, 0)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -- synthetic arrivals ----------------------------------------------------------------------------


def test_constant_arrivals_are_multiples_of_the_interval() -> None:
    by_rate = draw(workload({"kind": "constant", "rate_per_s": 10.0}, requests=4), 0, 0)
    assert times(by_rate).tolist() == [0.0, 0.1, 0.2, 0.3]
    given = workload({"kind": "constant", "interval_s": 49.0}, requests=3)
    by_interval = draw(given, 0, 0)
    assert times(by_interval).tolist() == [0.0, 49.0, 98.0]
    assert offered_rate_per_s(given, by_interval) == 1 / 49.0


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(POISSON, 50_000)
    assert near(found, 0.5)
    assert stats.kstest(found, "expon", args=(0.0, 0.5)).pvalue > 1e-3


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_the_mean_and_the_cv(cv: float) -> None:
    found = gaps({"kind": "gamma", "rate_per_s": 2.0, "cv": cv}, 100_000)
    assert near(found, 0.5)
    assert near((found - 0.5) ** 2, (0.5 * cv) ** 2)


def test_a_poisson_process_given_its_span_ends_there_and_is_uniform_in_between() -> None:
    arrivals = {"kind": "poisson", "interval_s": 0.25, "span_intervals": 700.0}
    found = times(draw(workload(arrivals, requests=5000), 1, 0))
    assert found[0] == 0.0
    assert found[-1] == 175.0
    assert stats.kstest(found[1:-1] / 175.0, "uniform").pvalue > 1e-3
    assert times(draw(workload(arrivals, requests=2), 1, 0)).tolist() == [0.0, 175.0]


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant"])
def test_one_request_comes_at_once(kind: str) -> None:
    extra = {"poisson": {"span_intervals": 3.0}, "gamma": {"cv": 2.0}, "constant": {}}[kind]
    assert times(draw(workload({"kind": kind, "rate_per_s": 1.0, **extra}, requests=1), 0, 0)).tolist() == [
        0.0
    ]


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["constant", "poisson", "gamma", "span"]),
    rate=st.floats(1e-3, 1e4),
    cv=st.floats(0.01, 100.0),
    count=st.integers(1, 300),
    seed=st.integers(0, 2**64 - 1),
    replica=st.integers(0, 1000),
)
def test_arrivals_ascend_from_zero(
    kind: str, rate: float, cv: float, count: int, seed: int, replica: int
) -> None:
    extra = {"gamma": {"cv": cv}, "span": {"span_intervals": cv}}.get(kind, {})
    arrivals = {"kind": "poisson" if kind == "span" else kind, "rate_per_s": rate, **extra}
    found = times(draw(workload(arrivals, requests=count), seed, replica))
    assert found.shape == (count,)
    assert found.dtype == np.float64
    assert found[0] == 0.0
    assert np.all(np.isfinite(found))
    assert np.all(np.diff(found) >= 0.0)


def test_a_closed_loop_has_lengths_and_no_times() -> None:
    given = workload({"kind": "closed_loop", "clients": 4}, requests=3)
    drawn = draw(given, 0, 0)
    assert drawn.arrival_s is None
    assert offered_rate_per_s(given, drawn) is None
    assert [math.isnan(r.arrival_s) for r in requests(drawn)] == [True] * 3


# -- streams ---------------------------------------------------------------------------------------


def test_streams_are_independent_of_each_other() -> None:
    uniform = {"kind": "uniform", "low": 1, "high": 1000}
    base = draw(workload(POISSON, prompt_tokens=uniform, output_tokens=uniform), 7, 2)
    for change in (
        {"prompt_tokens": {"kind": "lognormal", "mean": 50.0, "cv": 1.0, "max": 99}},
        {"output_tokens": TEN, "max_tokens": 5},
    ):
        other = draw(
            workload(POISSON, **{"prompt_tokens": uniform, "output_tokens": uniform, **change}), 7, 2
        )
        assert np.array_equal(times(base), times(other))
    slower = draw(
        workload({**POISSON, "rate_per_s": 1.0}, prompt_tokens=uniform, output_tokens=uniform), 7, 2
    )
    assert np.array_equal(slower.prompt_tokens, base.prompt_tokens)
    assert np.array_equal(slower.output_tokens, base.output_tokens)
    assert np.array_equal(times(slower), 2.0 * times(base))
    assert not np.array_equal(base.prompt_tokens, base.output_tokens)
    assert abs(np.corrcoef(base.prompt_tokens, base.output_tokens)[0, 1]) < SIGMAS / math.sqrt(1000)


def test_seed_and_replica_and_purpose_each_give_another_stream() -> None:
    keys = [(0, 0, "arrivals"), (1, 0, "arrivals"), (0, 1, "arrivals"), (0, 0, "jitter"),
            (0, 0, "prompt_tokens"), (0, 0, "output_tokens")]  # fmt: skip
    firsts = [stream(seed, replica, purpose).random() for seed, replica, purpose in keys]  # type: ignore[arg-type]
    assert len(set(firsts)) == len(keys)
    assert stream(0, 0, "jitter").random() == firsts[3]
    with pytest.raises(ValueError, match="replica must be an integer from 0"):
        stream(0, -1, "arrivals")


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = gaps(POISSON, 100), gaps(POISSON, 1000)
    assert np.allclose(few, many[:99])


def test_a_list_of_alternatives_is_refused() -> None:
    with pytest.raises(ValueError, match="requests must have exactly one value"):
        draw(workload(POISSON, requests=[1, 2]), 0, 0)


# -- lengths ---------------------------------------------------------------------------------------


def test_uniform_lengths_reach_both_ends() -> None:
    found = lengths({"kind": "uniform", "low": 3, "high": 6})
    assert np.unique(found).tolist() == [3, 4, 5, 6]
    assert found.dtype == np.int64
    assert near(found, 4.5)


def test_lognormal_lengths_have_the_mean_and_the_cv() -> None:
    found = lengths({"kind": "lognormal", "mean": 800.0, "cv": 0.7, "max": 1_000_000}, 100_000)
    assert near(found, 800.0)
    assert near((found - 800.0) ** 2, (800.0 * 0.7) ** 2)


def test_lognormal_lengths_are_cut_at_both_ends() -> None:
    found = lengths({"kind": "lognormal", "mean": 2.0, "cv": 5.0, "max": 7})
    assert (found.min(), found.max()) == (1, 7)


def test_empirical_lengths_are_drawn_as_often_as_they_are_given() -> None:
    found = lengths({"kind": "empirical", "values": [5, 5, 9]})
    assert set(found.tolist()) == {5, 9}
    assert near(found == 5, 2 / 3)


def test_empirical_lengths_come_from_columns(tmp_path: Path) -> None:
    csv, parquet = tmp_path / "lengths.csv", tmp_path / "lengths.parquet"
    csv.write_text('text,n\n"two\nlines, one cell",4\nb,6\n')
    pq.write_table(pa.table({"n": [4.0, 6.0], "other": ["a", "b"]}), parquet)
    for path in (csv, parquet):
        found = lengths({"kind": "empirical", "path": str(path), "column": "n"})
        assert set(found.tolist()) == {4, 6}


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ({"kind": "constant", "value": 12}, 12),
        ({"kind": "uniform", "low": 1, "high": 77}, 77),
        ({"kind": "lognormal", "mean": 5.0, "cv": 0.5, "max": 300}, 300),
        ({"kind": "empirical", "values": [4, 90, 8]}, 90),
    ],
)
def test_max_tokens_is_the_longest_that_can_be_asked_for(model: dict[str, Any], longest: int) -> None:
    assert draw(workload(POISSON, output_tokens=model, requests=2), 0, 0).max_tokens == longest
    cut = draw(workload(POISSON, output_tokens=model, max_tokens=3), 0, 0)
    assert cut.max_tokens == 3
    assert cut.output_tokens.max() == 3


# -- requests --------------------------------------------------------------------------------------


def test_requests_are_made_one_by_one() -> None:
    uniform = {"kind": "uniform", "low": 1, "high": 1000}
    drawn = draw(workload(POISSON, requests=40_000, prompt_tokens=uniform, max_tokens=11), 0, 0)
    made = list(requests(drawn))
    assert [r.id for r in made] == list(range(40_000))
    assert [r.arrival_s for r in made] == times(drawn).tolist()
    assert [r.prompt_tokens for r in made] == drawn.prompt_tokens.tolist()
    assert (made[0].output_tokens, made[0].max_tokens) == (10, 11)
    assert type(made[-1].arrival_s) is float
    assert type(made[-1].prompt_tokens) is int


@slow
def test_a_million_requests_take_little_time() -> None:
    """Of this process alone: others may keep the machine busy."""
    lognormal = {"kind": "lognormal", "mean": 500.0, "cv": 1.0, "max": 4096}
    given = workload(POISSON, requests=1_000_000, prompt_tokens=lognormal, output_tokens=lognormal)
    durations = []
    for _ in range(3):
        start_s = time.process_time()
        draw(given, 0, 0)
        durations.append(time.process_time() - start_s)
    assert min(durations) < 0.5


# -- recorded traces -------------------------------------------------------------------------------

AZURE_TEXT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:09.9799600,50,0
2023-11-16 18:17:13.9799601,70,5
"""


@pytest.fixture
def azure(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_TEXT)
    return {"kind": "trace", "format": "azure", "path": str(path)}


def table(path: Path, text: str, **more: Any) -> dict[str, Any]:
    path.write_text(text)
    columns = {"arrival": "t", "prompt": "in", "output": "out"}
    return {"kind": "trace", "format": "table", "path": str(path), "columns": columns, **more}


def test_azure_requests_are_sorted_and_those_without_output_left_out(azure: dict[str, Any]) -> None:
    drawn = draw(workload(azure), 0, 0)
    # Seven digits of a second: 100 ns.
    assert times(drawn).tolist() == [0.0, 0.052, 1.5, 10.0000001]
    assert drawn.prompt_tokens.tolist() == [4808, 3180, 110, 70]
    assert drawn.output_tokens.tolist() == [10, 8, 27, 5]
    assert (drawn.left_out, drawn.max_tokens) == (1, 27)
    assert offered_rate_per_s(workload(azure), drawn) == pytest.approx(3 / 10.0000001)
    assert (mean_prompt_tokens(drawn), mean_output_tokens(drawn)) == (2042.0, 12.5)


def test_windows_count_from_the_first_record_and_share_no_request(azure: dict[str, Any]) -> None:
    early = draw(workload({**azure, "end_s": 1.5}), 0, 0)
    late = draw(workload({**azure, "start_s": 1.5}), 0, 0)
    assert early.prompt_tokens.tolist() == [4808, 3180]
    assert late.prompt_tokens.tolist() == [110, 70]
    assert times(late).tolist() == pytest.approx([0.0, 8.5000001])
    assert (early.left_out, late.left_out) == (0, 1)


def test_rate_scale_runs_time_faster(azure: dict[str, Any]) -> None:
    given = workload({**azure, "rate_scale": 4.0, "start_s": 0.05})
    drawn = draw(given, 0, 0)
    assert times(drawn).tolist() == pytest.approx([0.0, 1.448 / 4, 9.9480001 / 4])
    assert offered_rate_per_s(given, drawn) == pytest.approx(2 / (9.9480001 / 4))


def test_requests_limits_a_trace_to_its_first_ones(azure: dict[str, Any]) -> None:
    drawn = draw(workload(azure, requests=3), 0, 0)
    assert drawn.prompt_tokens.tolist() == [4808, 3180, 110]
    assert (drawn.left_out, drawn.max_tokens) == (0, 27)
    assert len(draw(workload(azure, requests=4), 0, 0).prompt_tokens) == 4
    assert "workload.requests: 5, but" in complaint(workload(azure, requests=5))


def test_a_trace_of_the_most_requests_that_are_served_is_replayed(
    azure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "MOST_REQUESTS", 4)
    assert len(draw(workload(azure), 0, 0).prompt_tokens) == 4
    monkeypatch.setattr(arrivals_module, "MOST_REQUESTS", 3)
    assert "workload.requests: at most 3" in complaint(workload(azure))


def test_the_rate_and_the_longest_prompt_of_a_trace_are_its_own(azure: dict[str, Any]) -> None:
    """Also of its first three requests, which come within 50 ms where time runs 30 times as fast."""
    given = workload(azure, requests=3)
    assert draw(given, 0, 0).longest_prompt == 4808
    assert offered_rate_per_s(given, draw(given, 0, 0)) == pytest.approx(2 / 1.5)
    fast = workload({**azure, "rate_scale": 30.0}, requests=3)
    assert offered_rate_per_s(fast, draw(fast, 0, 0)) == pytest.approx(2 / 0.05)


def test_lengths_of_the_workload_stand_in_place_of_recorded_ones(azure: dict[str, Any]) -> None:
    drawn = draw(workload(azure, output_tokens=TEN), 0, 0)
    assert drawn.output_tokens.tolist() == [10] * 5
    assert drawn.prompt_tokens.tolist() == [4808, 3180, 110, 50, 70]
    assert drawn.left_out == 0


def test_max_tokens_cuts_recorded_outputs(azure: dict[str, Any]) -> None:
    assert draw(workload(azure, max_tokens=9), 0, 0).output_tokens.tolist() == [9, 8, 9, 5]


def test_jitter_spreads_bins_and_lengths_move_along(tmp_path: Path) -> None:
    rows = "".join(f"{3 * (i // 1000)},{i + 1},{i + 1}\n" for i in range(4000))
    binned = table(tmp_path / "t.csv", "t,in,out\n" + rows)
    plain, spread = (draw(workload({**binned, "jitter_s": s}), 5, 0) for s in (0.0, 3.0))
    assert np.unique(times(plain)).tolist() == [0.0, 3.0, 6.0, 9.0]
    assert np.all(np.diff(times(spread)) >= 0.0)
    assert sorted(spread.prompt_tokens.tolist()) == plain.prompt_tokens.tolist()
    assert np.array_equal(spread.prompt_tokens, spread.output_tokens)
    assert np.array_equal((spread.prompt_tokens - 1) // 1000, (plain.prompt_tokens - 1) // 1000)
    assert not np.array_equal(spread.prompt_tokens, plain.prompt_tokens)
    assert stats.kstest(times(spread) / 12.0, "uniform").pvalue > 1e-3
    other = draw(workload({**binned, "jitter_s": 3.0}), 5, 1)
    assert not np.array_equal(times(other), times(spread))
    assert other.rate_per_s == spread.rate_per_s == plain.rate_per_s


def test_jitter_runs_at_the_recorded_speed(tmp_path: Path) -> None:
    binned = table(tmp_path / "t.csv", "t,in,out\n" + "0,1,1\n3,1,1\n" * 50, jitter_s=3.0)
    once, twice = (draw(workload({**binned, "rate_scale": scale}), 0, 0) for scale in (1.0, 2.0))
    assert np.array_equal(times(once), 2.0 * times(twice))


def test_mooncake_lines_are_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [(0, 6758, 500), (0, 7322, 490), (3000, 12, 1)]
    lines = [
        json.dumps(
            {"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [*range(-(-i // 512))]}
        )
        for t, i, o in rows
    ]
    path.write_text("\n".join([*lines, "", ""]))
    drawn = draw(workload({"kind": "trace", "format": "mooncake", "path": str(path)}), 0, 0)
    assert times(drawn).tolist() == [0.0, 0.0, 3.0]
    assert drawn.prompt_tokens.tolist() == [6758, 7322, 12]
    assert drawn.output_tokens.tolist() == [500, 490, 1]


@pytest.mark.parametrize(
    ("unit", "values", "kind"),
    [
        ("s", [1e9, 1e9 + 0.5], pa.float64()),
        ("ms", [10**12, 10**12 + 500], pa.int64()),
        ("us", [10**15, 10**15 + 500_000], pa.uint64()),
        ("ns", [1_700_000_000_000_000_001, 1_700_000_000_500_000_001], pa.int64()),
        ("datetime", [1_700_000_000_000, 1_700_000_000_500], pa.timestamp("ms", "UTC")),
        ("datetime", ["2024-05-10 00:00:00.25", "2024-05-10 00:00:00.75"], pa.string()),
    ],
)
def test_tables_say_what_their_times_count_in(
    tmp_path: Path, unit: str, values: list[Any], kind: pa.DataType
) -> None:
    path = tmp_path / "t.parquet"
    columns = {"when": pa.array(values, kind), "p": pa.array([3, 4], pa.int32()), "o": [1.0, 2.0]}
    pq.write_table(pa.table(columns), path)
    names = {"arrival": "when", "prompt": "p", "output": "o"}
    trace = {"kind": "trace", "format": "table", "path": str(path), "columns": names, "time_unit": unit}
    assert times(draw(workload(trace), 0, 0)).tolist() == [0.0, 0.5]


def test_csv_dates_may_have_a_zone_and_files_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufefft,in,out\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00+00:00,2399,6\n"
    drawn = draw(workload(table(tmp_path / "t.csv", text, time_unit="datetime")), 0, 0)
    assert times(drawn).tolist() == [0.0, 0.00993]
    assert drawn.prompt_tokens.tolist() == [2399, 2162]


def test_tables_without_lengths_take_those_of_the_workload(tmp_path: Path) -> None:
    trace = {**table(tmp_path / "t.csv", "t\n1\n2\n"), "columns": {"arrival": "t"}}
    assert draw(workload(trace, prompt_tokens=TEN, output_tokens=TEN), 0, 0).prompt_tokens.tolist() == [
        10,
        10,
    ]
    assert "workload.output_tokens: is missing, and arrivals.columns names no column for output" in complaint(
        workload(trace, prompt_tokens=TEN)
    )


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    first = draw(workload(table(tmp_path / "t.csv", "t,in,out\n1,2,3\n")), 0, 0)
    second = draw(workload(table(tmp_path / "t.csv", "t,in,out\n1,2,3\n2,2,3\n")), 0, 0)
    assert (len(first.prompt_tokens), len(second.prompt_tokens)) == (1, 2)


@slow
@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40
    ),
    scale=st.sampled_from([0.5, 1.0, 8.0]),
)
def test_every_recorded_request_is_replayed_or_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], scale: float
) -> None:
    text = "t,in,out\n" + "".join(f"{t},{i},{o}\n" for t, i, o in rows)
    trace = table(tmp_path_factory.mktemp("rows") / "t.csv", text, time_unit="ms", rate_scale=scale)
    useful = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    if not useful:
        assert "no request has prompt and output tokens" in complaint(workload(trace))
        return
    drawn = draw(workload(trace), 0, 0)
    assert len(useful) + drawn.left_out == len(rows)
    assert times(drawn) * scale == pytest.approx([(row[0] - useful[0][0]) / 1e3 for row in useful])
    assert drawn.prompt_tokens.tolist() == [row[1] for row in useful]
    assert drawn.output_tokens.tolist() == [row[2] for row in useful]


# -- complaints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "t.csv: is empty"),
        ("t,in,out\n", "t.csv: holds no requests"),
        ("t,inn,out\n1,2,3\n", "t.csv: no column 'in'; did you mean 'inn'? (allowed: t, inn, out)"),
        ("t,in,in,out\n1,2,2,3\n", "t.csv: column 'in' is there twice"),
        ("t,in,out\n1,2\n", "t.csv: not valid CSV: CSV parse error: "),
        ("t,in,out\n1,2,3\n1,x,3\n", "record 2: in must be a number, got 'x'"),
        ("t,in,out\n1,2,3\n1,,3\n", "record 2: in is empty or NaN"),
        ("t,in,out\n1,-2,3\n", "record 1: in must be a whole number from 0 to 10000000, got '-2'"),
        ("t,in,out\n1,2.5,3\n", "record 1: in must be a whole number from 0 to 10000000, got '2.5'"),
        ("t,in,out\n1,2,20000000\n", "record 1: out must be a whole number"),
        ("t,in,out\n1,true,3\n", "in must hold numbers, it holds bool"),
        ("t,in,out\n-1,2,3\n", "record 1: t must be a number, at least 0, got '-1'"),
        ("t,in,out\n1,2,3\ninf,2,3\n", "record 2: t must be a number, at least 0, got 'inf'"),
        ("t,in,out\nnan,2,3\n", "record 1: t is empty or NaN"),
        ("t,in,out\n2024-01-01 00:00:00,2,3\n", "t holds dates and times: it needs time_unit: datetime"),
        ("t,in,out\n0,2,3\n1700000000000,2,3\n", "its times span 1.7e+12 s: is their unit right?"),
        ("t,in,out\n0,0,3\n1,2,0\n", "no request has prompt and output tokens"),
    ],
)
def test_tables_that_make_no_sense_are_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    found = complaint(workload(table(tmp_path / "t.csv", text)))
    assert line in found
    assert found.startswith("workload.arrivals")
    assert "t.csv" in found


def test_dates_that_make_no_sense_are_refused(tmp_path: Path, azure: dict[str, Any]) -> None:
    broken = AZURE_TEXT.replace("2023-11-16 18:17:04.0319600", "yesterday")
    Path(azure["path"]).write_text(broken)
    assert "record 3: TIMESTAMP must be a date and time, got 'yesterday'" in complaint(workload(azure))
    numbers = table(tmp_path / "t.csv", "t,in,out\n1,2,3\n", time_unit="datetime")
    assert "t holds numbers: it needs time_unit: s, ms, us or ns" in complaint(workload(numbers))
    Path(azure["path"]).write_text(AZURE_TEXT.replace("ContextTokens", "Context_Tokens"))
    assert "no column 'ContextTokens'; did you mean 'Context_Tokens'?" in complaint(workload(azure))


def test_nan_in_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": [1.0, math.nan], "in": [1, 1], "out": [[1], [2]]}), path)
    trace = {"kind": "trace", "format": "table", "path": str(path)}
    columns = {"arrival": "t", "prompt": "in", "output": "in"}
    assert "record 2: t must be a number" in complaint(workload({**trace, "columns": columns}))
    nested = {**columns, "arrival": "in", "output": "out"}
    assert "out must hold a number in each record, not list" in complaint(
        workload({**trace, "columns": nested})
    )
    path.write_bytes(b"not parquet")
    assert "t.parquet: not valid Parquet" in complaint(workload({**trace, "columns": columns}))


@pytest.mark.parametrize("kind", ["azure", "mooncake", "vllm", "table"])
def test_missing_files_and_folders_are_refused(tmp_path: Path, kind: str) -> None:
    trace: dict[str, Any] = {"kind": "trace", "format": kind, "path": str(tmp_path / "none.csv")}
    if kind == "table":
        trace["columns"] = {"arrival": "t"}
    expected = f"workload.arrivals.path: {tmp_path / 'none.csv'}: cannot be read: No such file or directory"
    assert complaint(workload(trace)) == expected
    assert "cannot be read: Is a directory" in complaint(workload({**trace, "path": str(tmp_path)}))


def test_columns_are_named_for_tables_and_only_there(tmp_path: Path, azure: dict[str, Any]) -> None:
    nothing = {**table(tmp_path / "t.csv", "t\n1\n"), "columns": {}}
    assert "columns.arrival is missing" in complaint(workload(nothing))
    line = complaint(workload({**azure, "columns": {"arrival": "TIMESTAMP"}}))
    assert line == "workload.arrivals.columns: format azure has its own columns"


def test_empty_windows_are_refused(azure: dict[str, Any]) -> None:
    line = complaint(workload({**azure, "start_s": 2.0, "end_s": 5.0}))
    assert "no request from start_s 2 to end_s 5" in line
    assert "azure.csv lasts 10 s" in line
    assert "no request from start_s 4 to end_s 2" in complaint(
        workload({**azure, "start_s": 4.0, "end_s": 2.0})
    )
    assert "no request has prompt and output" in complaint(workload({**azure, "start_s": 5.0, "end_s": 7.0}))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "m.jsonl: holds no requests"),
        ("{]\n", "m.jsonl: line 1: not valid JSON"),
        ("[1]\n", "m.jsonl: line 1: must be a mapping"),
        ('{"timestamp": 1, "input_len": 2, "output_length": 3}', "did you mean 'input_len'?"),
        ('{"timestamp": "1", "input_length": 2, "output_length": 3}', "record 1: timestamp must be a number"),
        (
            '{"timestamp": NaN, "input_length": 2, "output_length": 3}',
            "timestamp must be a number, at least 0",
        ),
        ('{"timestamp": 1, "input_length": null, "output_length": 3}', "got 'None'"),
        ('{"timestamp": 1, "input_length": [2], "output_length": 3}', "got '[2]'"),
        ('{"timestamp": 1, "input_length": -2, "output_length": 3}', "got '-2'"),
        ('{"timestamp": 1, "input_length": 1e30, "output_length": 3}', "got '1e+30'"),
    ],
)
def test_json_lines_that_make_no_sense_are_refused(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    assert line in complaint(workload({"kind": "trace", "format": "mooncake", "path": str(path)}))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "l.csv: is empty"),
        ("n\n", "column 'n' is empty"),
        ("m\n3\n", "no column 'n'"),
        ("n\n3\n0\n", "record 2: n must be a whole number from 1 to 10000000, got '0'"),
    ],
)
def test_columns_of_lengths_that_make_no_sense_are_refused(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "l.csv"
    path.write_text(text)
    model = {"kind": "empirical", "path": str(path), "column": "n"}
    found = complaint(workload(POISSON, output_tokens=model))
    assert line in found
    assert found.startswith("workload.output_tokens.path: ")


# -- vLLM's benchmark ------------------------------------------------------------------------------


def written(path: Path, drawn: Drawn, **more: Any) -> dict[str, Any]:
    count = len(drawn.prompt_tokens)
    ttft_s = np.linspace(0.1, 0.2, count)
    values = {
        "start_s": times(drawn),
        "prompt_tokens": drawn.prompt_tokens,
        "output_tokens": drawn.output_tokens,
        "ttft_s": ttft_s,
        "e2e_s": ttft_s + 0.01 * (drawn.output_tokens - 1),
        "duration_s": 4.0,
    }
    write_bench(path, **{**values, **more})
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def replay(path: Path) -> Drawn:
    return draw(workload({"kind": "trace", "format": "vllm", "path": str(path)}), 0, 0)


@settings(max_examples=30)
@given(count=st.integers(1, 60), seed=st.integers(0, 999), rate=st.floats(0.01, 1e3))
def test_what_was_written_is_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, count: int, seed: int, rate: float
) -> None:
    uniform = {"kind": "uniform", "low": 1, "high": 500}
    arrivals = {"kind": "poisson", "rate_per_s": rate}
    given = workload(arrivals, requests=count, prompt_tokens=uniform, output_tokens=uniform)
    drawn = draw(given, seed, 0)
    path = tmp_path_factory.mktemp("bench") / "b.json"
    written(path, drawn)
    found = replay(path)
    assert np.array_equal(times(found), times(drawn))
    assert np.array_equal(found.prompt_tokens, drawn.prompt_tokens)
    assert np.array_equal(found.output_tokens, drawn.output_tokens)


def test_figures_are_those_of_vllm(tmp_path: Path) -> None:
    uniform = {"kind": "uniform", "low": 1, "high": 30}
    drawn = draw(workload(POISSON, requests=50, prompt_tokens=uniform, output_tokens=uniform), 0, 0)
    itls = [np.full(n - 1, 0.01) + 0.001 * np.arange(n - 1) for n in drawn.output_tokens]
    ttft_s = np.linspace(0.1, 0.2, 50)
    e2e_s = ttft_s + np.array([gaps.sum() for gaps in itls])
    about = {"backend": "simcore", "request_rate": 2.0}
    found = written(tmp_path / "b.json", drawn, e2e_s=e2e_s, itls_s=itls, about=about)
    many = drawn.output_tokens > 1
    samples = {
        "ttft": ttft_s,
        "tpot": (e2e_s - ttft_s)[many] / (drawn.output_tokens[many] - 1),
        "itl": np.concatenate(itls),
        "e2el": e2e_s,
    }
    for name, values_s in samples.items():
        assert found[f"mean_{name}_ms"] == pytest.approx(values_s.mean() * 1e3)
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(values_s) * 1e3)
        assert found[f"std_{name}_ms"] == pytest.approx(values_s.std() * 1e3)
        assert found[f"p99_{name}_ms"] == pytest.approx(np.percentile(values_s, 99) * 1e3)
    assert list(found)[:3] == ["backend", "request_rate", "num_prompts"]
    assert found["itls"] == [gaps.tolist() for gaps in itls]
    assert (found["duration"], found["completed"], found["failed"]) == (4.0, 50, 0)
    tokens = drawn.prompt_tokens.sum(), drawn.output_tokens.sum()
    assert (found["total_input_tokens"], found["total_output_tokens"]) == tokens
    assert found["request_throughput"] == 12.5
    assert found["output_throughput"] == pytest.approx(tokens[1] / 4.0)
    assert found["total_token_throughput"] == pytest.approx(sum(tokens) / 4.0)
    read = read_bench(tmp_path / "b.json")
    assert read.itls_s is not None
    assert [gaps.tolist() for gaps in read.itls_s] == found["itls"]
    assert read.ttft_s is not None
    assert np.array_equal(read.ttft_s, ttft_s)
    assert read.figures["p99_itl_ms"] == found["p99_itl_ms"]


@slow
@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(0, 4)), max_size=12))
def test_pooled_gaps_give_the_figures_of_all_of_them(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, int]]
) -> None:
    values = np.array([value for value, _ in pairs])
    counts = np.array([count for _, count in pairs], dtype=np.int64)
    drawn = draw(workload(POISSON, requests=2), 0, 0)
    path = tmp_path_factory.mktemp("bench") / "b.json"
    found = written(path, drawn, pooled_itl_s=(values, counts))
    every = np.repeat(values, counts) if counts.sum() else np.zeros(1)
    for name, value in (
        ("mean", every.mean()),
        ("median", np.median(every)),
        ("p90", np.percentile(every, 90)),
        ("p99", np.percentile(every, 99)),
    ):
        assert found[f"{name}_itl_ms"] == pytest.approx(value * 1e3)
    assert found["std_itl_ms"] == pytest.approx(every.std() * 1e3, abs=1e-6 * every.max() * 1e3)
    assert "itls" not in found


def test_gaps_that_nobody_knows_are_not_written(tmp_path: Path) -> None:
    found = written(tmp_path / "b.json", draw(workload(POISSON, requests=2), 0, 0))
    assert not [name for name in found if "itl" in name]
    assert "date" not in found


def test_failed_requests_are_written_so_and_left_out_when_read(tmp_path: Path) -> None:
    drawn = draw(workload(POISSON, requests=3), 0, 0)
    ttft_s = np.array([0.1, math.nan, 0.3])
    found = written(tmp_path / "b.json", drawn, ttft_s=ttft_s, itls_s=[[0.1], [], [0.2]])
    assert found["output_lens"] == [10, 0, 10]
    assert found["errors"] == ["", "rejected", ""]
    assert (found["completed"], found["failed"], found["num_prompts"]) == (2, 1, 3)
    assert found["mean_ttft_ms"] == pytest.approx(200.0)
    assert found["total_input_tokens"] == 20
    again = replay(tmp_path / "b.json")
    assert again.left_out == 1
    assert times(again).tolist() == times(drawn)[[0, 2]].tolist()


def bench(path: Path, **changes: Any) -> Path:
    result = {
        "duration": 2.0,
        "input_lens": [5, 6, 7],
        "output_lens": [1, 2, 3],
        "ttfts": [0.1, 0.1, 0.1],
        "itls": [[], [0.1], [0.1, 0.1]],
        "start_times": [353399.5, 353400.0, 353401.5],
        "generated_texts": ["", "", ""],
        "errors": ["", "", ""],
        **changes,
    }
    path.write_text(json.dumps({key: value for key, value in result.items() if value is not ...}))
    return path


def test_the_client_s_clock_counts_from_anywhere(tmp_path: Path) -> None:
    assert times(replay(bench(tmp_path / "b.json"))).tolist() == [0.0, 0.5, 2.0]
    failed = bench(tmp_path / "f.json", start_times=[0.0, 353400.0, 353401.5], errors=["refused", "", ""])
    assert times(replay(failed)).tolist() == [0.0, 1.5]
    window = {"kind": "trace", "format": "vllm", "path": str(failed), "end_s": 1.0}
    assert draw(workload(window), 0, 0).prompt_tokens.tolist() == [6]
    unnamed = bench(tmp_path / "u.json", errors=..., output_lens=[0, 2, 3])
    assert replay(unnamed).left_out == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"start_times": ...}, "no 'start_times', so arrivals are unknown"),
        ({"output_lens": ...}, "no 'output_lens': it needs vLLM's --save-detailed"),
        ({"output_lens": [1, 2]}, "output_lens has 2 values, input_lens has 3"),
        ({"start_times": [1.0]}, "start_times has 1 values, input_lens has 3"),
        ({"input_lens": 3}, "input_lens: must be a list"),
        ({"input_lens": [1, "x", 3]}, "record 2: input_lens must be a number, got 'x'"),
        ({"input_lens": [1, 2.5, 3]}, "record 2: input_lens must be a whole number"),
        (
            {"start_times": [1.0, math.nan, 2.0]},
            "record 2: start_times must be a number, at least 0, got 'nan'",
        ),
        ({"ttfts": [0.1, -0.1, 0.1]}, "record 2: ttfts must be a number, at least 0, got '-0.1'"),
        ({"itls": [[], 1, []]}, "itls[1]: must be a list"),
        ({"itls": [[], [None], []]}, "record 1: itls[1] must be a number, got 'None'"),
        (
            {"input_lens": [], "output_lens": [], "ttfts": [], "itls": [], "start_times": []},
            "holds no requests",
        ),
    ],
)
def test_results_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    path = bench(tmp_path / "b.json", **changes)
    found = complaint(workload({"kind": "trace", "format": "vllm", "path": str(path)}))
    assert line in found
    assert found.startswith(f"workload.arrivals.path: {path}: ")


@pytest.mark.parametrize(("text", "line"), [("{", "not valid JSON"), ("[]", "must be a mapping")])
def test_results_that_are_none_are_refused(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    assert line in complaint(workload({"kind": "trace", "format": "vllm", "path": str(path)}))


# -- the public traces -----------------------------------------------------------------------------


@pytest.fixture
def public(request: pytest.FixtureRequest) -> Callable[[str, str], Drawn]:
    root = Path(__file__).parents[1]
    folder = Path(os.environ.get("SIMCORE_TRACES") or root.parent / "shared" / "data" / "traces")

    def drawn(name: str, kind: str) -> Drawn:
        if not (folder / name).is_file():
            pytest.skip(f"{name} is not there: set SIMCORE_TRACES to the folder that holds it")
        return draw(workload({"kind": "trace", "format": kind, "path": str(folder / name)}), 0, 0)

    return drawn


def test_the_azure_conversation_trace(public: Callable[[str, str], Drawn]) -> None:
    found = public("AzureLLMInferenceTrace_conv.csv", "azure")
    assert (len(found.prompt_tokens), found.left_out) == (19_366, 0)
    assert times(found)[-1] == 3501.721937
    assert mean_prompt_tokens(found) == pytest.approx(1155, abs=1)
    assert mean_output_tokens(found) == pytest.approx(211, abs=1)


def test_the_azure_code_trace_is_bursty(public: Callable[[str, str], Drawn]) -> None:
    found = public("AzureLLMInferenceTrace_code.csv", "azure")
    assert (len(found.prompt_tokens), found.left_out) == (8_819, 0)
    assert times(found)[-1] == pytest.approx(3436, abs=1)
    waits = np.diff(times(found))
    assert waits.std() / waits.mean() == pytest.approx(13, abs=0.5)


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [("conversation", 12_031, 12_035, 343), ("synthetic", 3_993, 15_325, 149)],
)
def test_the_mooncake_traces(
    public: Callable[[str, str], Drawn], name: str, count: int, prompt: int, output: int
) -> None:
    found = public(f"mooncake_{name}_trace.jsonl", "mooncake")
    # Counts and means as in the README of the traces.
    assert len(found.prompt_tokens) == count
    assert mean_prompt_tokens(found) == pytest.approx(prompt, abs=1)
    assert mean_output_tokens(found) == pytest.approx(output, abs=1)
