"""MLPerf results beside predictions: which rows are used, what they are taken for, how errors are counted."""

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simcore.input.files import InputError
from simcore.planning.searches import Highest, Judged
from simcore.validate.mlperf import compare, predict
from simcore.validate.mlperf.compare import BAR, FILE, TPOT_BAR, VARIABLE, Compared, folder_of, judged, lines
from simcore.validate.mlperf.predict import FIGURES, RUN_S, Predicted, facts, scenario_of, steady_rate
from simcore.validate.mlperf.rows import COLUMNS, HALVES, Row, half, read_rows

LINE = {
    "submitter": "A", "system": "eight", "model": "llama2-70b-99", "scenario": "Server",
    "accelerator": "H200", "form": "SXM", "valid": "VALID", "policy": "max_util",
    "chunked": "True", "precision": "fp8",
    "kv_dtype": "fp8", "accelerators": "8", "tp": "2", "pp": "1", "max_num_tokens": "1536",
    "max_batch_size": "2048", "scheduled_per_s": "40.0", "samples_per_s": "39.0", "tokens_per_s": "11700",
    "ttft_mean_s": "0.3", "ttft_p99_s": "1.9", "tpot_mean_s": "0.15",
    "tpot_p50_s": "0.15", "tpot_p99_s": "0.17",
    "kv_fraction": "0.9",
}  # fmt: skip


def table(folder: Path, *changes: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / FILE
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**LINE, **change} for change in changes)
    return path


@pytest.fixture
def row(tmp_path: Path) -> Row:
    ((found,), _) = read_rows(table(tmp_path, {}), 0)
    return found


# -- rows ----------------------------------------------------------------------------------------------------


def test_only_valid_rows_with_settings_are_used_and_one_system_counts_once(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        {},
        {"model": "llama2-70b-99.9"},
        {"scenario": "Interactive"},
        {"scenario": "Offline"},
        {"valid": "INVALID", "system": "other"},
        {"tp": "", "system": "without settings"},
        {"model": "mixtral-8x7b"},
        {"model": "llama3.1-8b"},
    )
    rows, others = read_rows(path, 0)
    assert [(row.model, row.scenario) for row in rows] == [
        ("llama2-70b-99", "Server"),
        ("llama2-70b-99", "Interactive"),
        ("llama3.1-8b", "Server"),
    ]
    assert others == 5


def test_a_third_may_be_looked_at_whatever_the_order(tmp_path: Path) -> None:
    changes = [{"system": f"s{i}"} for i in range(10)]
    rows, _ = read_rows(table(tmp_path, *changes), 3)
    again, _ = read_rows(table(tmp_path, *reversed(changes)), 3)
    fit, rest = half(rows, "fit"), half(rows, "rest")
    assert len(fit) == 3
    assert {row.system for row in fit} == {row.system for row in half(again, "fit")}
    assert sorted([*fit, *rest], key=rows.index) == rows == half(rows, "all")
    drawn = {
        tuple(row.system for row in half(read_rows(tmp_path / FILE, seed)[0], "fit")) for seed in range(5)
    }
    assert len(drawn) > 1


def test_none_of_a_model_to_which_nothing_is_fitted_may_be_looked_at(tmp_path: Path) -> None:
    """Nor does it change which of the others may be."""
    mine = [{"system": f"s{i}"} for i in range(10)]
    unseen = [{"system": f"u{i}", "model": "llama3.1-405b", "tp": "8"} for i in range(6)]
    alone = [row.system for row in half(read_rows(table(tmp_path, *mine), 3)[0], "fit")]
    rows, _ = read_rows(table(tmp_path, *mine, *unseen), 3)
    assert [row.system for row in half(rows, "fit")] == alone
    assert sum(row.model == "llama3.1-405b" for row in half(rows, "rest")) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheduled_per_s": "nan"}, "scheduled_per_s: 'nan' is no number above 0"),
        ({"tpot_p99_s": "-1"}, "tpot_p99_s: '-1'"),
        ({"tp": "1.5"}, "tp: '1.5' is no whole number"),
        ({"tp": "3"}, "accelerators: is 8; a multiple of tp"),
        ({"pp": "2"}, "pp: is 2; 1 is allowed"),
        ({"policy": "no_evict"}, "policy: is 'no_evict'; max_util or guaranteed_no_evict is allowed"),
        ({"chunked": "yes"}, "chunked: is 'yes'; True or False"),
        ({"precision": "fp4"}, "precision: is 'fp4'; fp8 or bf16"),
        ({"kv_fraction": "1.2"}, "kv_fraction: is 1.2; at most 1"),
    ],
)
def test_bad_cells_are_named(tmp_path: Path, change: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match="line 3: ") as raised:
        read_rows(table(tmp_path, {}, {"system": "b", **change}), 0)
    assert words in str(raised.value)
    assert len(str(raised.value)) < 300


def test_tables_without_a_column_or_a_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'tp' is missing"):
        read_rows(table(tmp_path, {}, columns=tuple(name for name in COLUMNS if name != "tp")), 0)
    with pytest.raises(InputError, match="no valid row with published settings"):
        read_rows(table(tmp_path, {"scenario": "Offline"}), 0)


# -- scenarios -----------------------------------------------------------------------------------------------


def test_a_row_is_one_of_its_replicas_at_its_share_of_the_rate(row: Row) -> None:
    scenario = scenario_of(row)
    (strategy,) = scenario.strategies
    said: Any = strategy
    assert (row.replicas, scenario.devices, said.ranks) == (4, [2], [2])
    assert scenario.workload.arrivals.model_dump()["rate_per_s"] == [10.0]
    assert scenario.workload.requests == [10 * RUN_S]
    # Every fourth request of a Poisson stream comes to one of four replicas.
    arrivals = scenario.workload.arrivals.model_dump()
    assert (arrivals["kind"], arrivals["cv"]) == ("gamma", 0.5)
    assert (said.ahead, said.host.step_s) == (0, 3e-3)
    assert (said.token_budget, said.max_sequences, said.prefill) == ([1536], [2048], ["chunked"])
    assert said.memory.share == 0.9
    whole = scenario_of(row, replicas=4)
    assert (whole.devices, whole.workload.requests) == ([8], [40 * RUN_S])
    assert whole.workload.arrivals.model_dump()["kind"] == "poisson"
    assert scenario_of(replace(row, chunked=False)).strategies[0].model_dump()["prefill"] == ["whole"]


def test_a_loaded_card_differs_from_one_at_rest_by_its_rates_alone(row: Row) -> None:
    at_rest, loaded = (scenario_of(row, loaded=load).devices_in_use[0] for load in (False, True))
    assert loaded.base == at_rest.base == "h200-sxm"
    assert not at_rest.change
    assert set(loaded.change) == {"flops_per_s.fp8", "flops_per_s.bf16"}


def test_an_unknown_card_is_refused(row: Row) -> None:
    with pytest.raises(InputError, match=r"'B200 SXM' is unknown \(allowed: H200 SXM, H200 NVL\)"):
        scenario_of(replace(row, card="B200 SXM"))


def test_each_fact_has_its_source() -> None:
    for group in ("data_sets", "cards"):
        for name, fact in facts()[group].items():
            assert len(fact["source"]) > 80, name


# -- errors --------------------------------------------------------------------------------------------------


def compared(row: Row, highest_per_s: float | None, times: float = 1.0) -> Compared:
    figures = {name: times * getattr(row, name) for name in FIGURES}
    return Compared(row, Predicted(40.0, highest_per_s, "TTFT", figures, {"measured": 1.0}))


def test_errors_are_relative_to_the_scheduled_rate(row: Row) -> None:
    one = compared(row, 44.0, 0.5)
    assert one.error_pct == pytest.approx(10.0)
    assert one.latency_pct("ttft_p99_s") == pytest.approx(-50.0)
    assert one.used == pytest.approx(1.9 / 2.0)
    assert compared(row, None).error_pct is None
    assert Compared(row, Predicted(42.0, None, "", {}, {})).error_pct == pytest.approx(5.0)
    fast = compared(replace(row, ttft_p99_s=0.2, tpot_p99_s=0.1), 44.0)
    assert fast.used == pytest.approx(0.5)


def test_rows_that_were_looked_at_are_reported_apart(row: Row) -> None:
    found = [compared(replace(row, is_fit=True), 42.0), compared(row, 36.0), compared(row, None)]
    said = "\n".join(lines(found))
    assert "## 1 rows looked at" in said
    assert "## 2 rows judged" in said
    assert "Highest rate: median 5.0 %, worst +5.0 %" in said
    assert "Highest rate: median 55.0 %, worst no rate holds" in said
    unseen = compared(replace(row, model="llama3.1-405b"), 44.0)
    said = "\n".join(lines([*found, unseen]))
    assert "## 2 rows judged" in said
    assert "## 1 rows of llama3.1-405b, to which nothing is fitted" in said


def test_rates_of_judged_rows_have_a_bar_and_405bs_median_tpot(row: Row) -> None:
    """405B's rates are judged by none, and its published TPOT is met where nothing else is compared."""
    looked_at, rest = compared(replace(row, is_fit=True), 80.0), compared(row, 36.0)
    unseen = compared(replace(row, model="llama3.1-405b"), 400.0, times=1.2)
    assert list(judged([looked_at])) == [(pytest.approx(100.0), BAR)]
    assert list(judged([looked_at, rest])) == [(pytest.approx(10.0), BAR)]
    assert list(judged([looked_at, rest, unseen])) == [
        (pytest.approx(10.0), BAR),
        (pytest.approx(20.0), TPOT_BAR),
    ]
    assert list(judged([unseen])) == [(pytest.approx(20.0), TPOT_BAR)]


def test_what_fails_first_above_the_highest_rate_is_said() -> None:
    point: Any = None
    failing = {rate: Judged(point, (), "fails", {}, f"at {rate:g}") for rate in (2.0, 1.5)}
    holding = Judged(point, (), "holds")
    assert predict._why_beyond(Highest(1.0, 1.5, {1.0: holding, **failing})) == "at 1.5"
    assert predict._why_beyond(Highest(None, 1.5, failing)) == "at 1.5"


def test_an_estimate_has_no_columns_of_runs(row: Row) -> None:
    said = "\n".join(lines([Compared(row, Predicted(42.0, None, "", {}, {}))]))
    assert "+5.0 %" in said
    assert "TTFT mean" not in said


@pytest.mark.parametrize(
    ("limit_s", "rate"), [(1.0, 8.0 / 0.1), (0.1, 8.0 / 0.1), (0.06, 0.5 * 8.0 / 0.06), (0.02, 0.0)]
)
def test_steady_steps_are_as_full_as_the_limit_allows(limit_s: float, rate: float) -> None:
    # Steps of 20 ms and 80 ms for all tokens: the fuller, the more requests a second.
    assert steady_rate(lambda f: 0.02 + 0.08 * f, 8.0, limit_s) == pytest.approx(rate)


def test_the_fullest_step_is_not_always_best() -> None:
    assert steady_rate(lambda f: 1.0 if f <= 0.5 else 4.0, 8.0, 9.0) == pytest.approx(4.0)


# -- the program ---------------------------------------------------------------------------------------------


def test_the_folder_is_an_option_or_a_variable(tmp_path: Path) -> None:
    table(tmp_path, {})
    assert folder_of(tmp_path, {VARIABLE: "/nowhere"}) == tmp_path
    assert folder_of(None, {VARIABLE: str(tmp_path)}) == tmp_path
    with pytest.raises(InputError, match=f"{VARIABLE} is not set"):
        folder_of(None, {})
    with pytest.raises(InputError, match=f"^{VARIABLE} .*: has no {FILE}"):
        folder_of(None, {VARIABLE: str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"half_": "fti"}, "--half: unknown half 'fti'"),
        ({"card": "H200"}, "--card: unknown card 'H200'"),
        ({"model": "llama-3.1-405"}, "--model: unknown model 'llama-3.1-405'; did you mean 'llama-3.1-405b'"),
        ({"model": "llama-3.1-405b"}, "--half all: has no row of llama-3.1-405b on any card"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, str], words: str) -> None:
    table(tmp_path, {})
    with pytest.raises(InputError, match=words):
        compare.main(data=tmp_path, **options)


def test_halves_have_names() -> None:
    assert HALVES == ("fit", "rest", "all")


def test_the_published_table_has_nineteen_usable_rows() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with {FILE}")
    rows, _ = read_rows(Path(folder) / FILE, 0)
    assert len(rows) == 19
    assert len(half(rows, "fit")) == 5
    assert {row.replicas for row in rows} == {1, 4, 8}
    # No row breaks its own limits.
    assert max(compared(row, None).used for row in rows) < 1.0 + 1e-2
