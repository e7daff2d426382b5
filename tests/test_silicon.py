"""The comparison with measured engines, on a table made up here; the real one where it is there."""

import csv
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from simcore.input.files import InputError
from simcore.ops.op import DTYPE_BYTES
from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.studies.serving.study import cases
from simcore.validate.engines import compare as silicon
from simcore.validate.engines import predict as prediction
from simcore.validate.engines.compare import Compared, by_bars, compared, figures, lines, missed
from simcore.validate.engines.predict import (
    Predicted,
    drawn,
    fitted,
    least,
    predict,
    predict_all,
    scenario_of,
)
from simcore.validate.engines.rows import (
    COLUMNS,
    Row,
    _cached_bytes,
    impossible,
    inconsistent,
    read_rows,
    series,
)
from simcore.validate.program import run
from tests.thorough import slow, thorough

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT.parent / "shared" / "data" / "silicon" / "silicon_half_a.csv"
MAX_70B = {
    "silicon_data_source": "source_file=2026-01-01.csv; x", "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm", "gemm_quant_mode": "fp8", "isl": "1024", "osl": "64",
}  # fmt: skip
PLAIN_8B = {
    "silicon_data_source": "a/trtllm/b", "backend": "trtllm",
    "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "system": "h100_sxm", "gemm_quant_mode": "", "isl": "512", "osl": "64",
}  # fmt: skip


def line(number: int, kind: dict[str, str], clients: int, ranks: int, **changes: str) -> dict[str, str]:
    return {
        **dict.fromkeys(COLUMNS, ""), "id": f"row-{number}", "mode": "agg", "pp_size": "1.0",
        "batch_size": f"{clients}.0", "tp_size": f"{ranks}.0",
        "silicon_ttft_ms": "100", "silicon_tpot_ms": "20",
        **kind, **changes,
    }  # fmt: skip


def written(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def row(kind: dict[str, str], clients: int, ranks: int, tmp_path: Path, **changes: str) -> Row:
    return read_rows(written(tmp_path / "one.csv", line(0, kind, clients, ranks, **changes)))[0][0]


def table(tmp_path: Path, host_s: float = 0.0) -> tuple[Path, list[Row]]:
    """A table of engines that are as the simulator says at this host_s."""
    wanted = [(MAX_70B, c, tp) for c in (2, 4) for tp in (2, 4)] + [(PLAIN_8B, c, 1) for c in (2, 4, 8)]
    rows = [line(i, *what) for i, what in enumerate(wanted)]
    read, _ = read_rows(written(tmp_path / "raw.csv", *rows))
    for cells, one in zip(rows, read, strict=True):
        found, _ = predict(one, "none", HostTime(step_s=host_s))
        cells |= {"silicon_ttft_ms": f"{1e3 * found.ttft_s!r}", "silicon_tpot_ms": f"{1e3 * found.tpot_s!r}"}
    path = written(tmp_path / "table.csv", *rows)
    return path, read_rows(path)[0]


# -- rows ------------------------------------------------------------------------------------------------


def test_rows_of_other_models_cards_and_modes_are_counted_and_left(tmp_path: Path) -> None:
    others = [
        line(1, MAX_70B, 4, 2, model_path="Qwen/Qwen3-235B-A22B-FP8"),
        line(2, MAX_70B, 4, 2, system="b200_sxm"),
        line(3, MAX_70B, 4, 2, mode="disagg"),
    ]
    rows, left = read_rows(written(tmp_path / "x.csv", line(0, MAX_70B, 4, 2), *others))
    assert ([one.id for one in rows], left) == (["row-0"], 3)
    one = rows[0]
    assert (one.card, one.model, one.weights, one.clients, one.ranks) == (
        "h200-sxm",
        "llama-3.1-70b",
        "fp8",
        4,
        2,
    )
    assert (one.ttft_s, one.tpot_s) == pytest.approx((0.1, 0.02))


def test_a_row_without_a_number_format_is_of_the_checkpoint_s(tmp_path: Path) -> None:
    one = row(PLAIN_8B, 4, 1, tmp_path)
    assert (one.weights, one.kv_dtype, one.series.name) == ("bf16", "bf16", "TensorRT-LLM, defaults")


def test_weights_are_of_what_was_served(tmp_path: Path) -> None:
    """The rows' own format says whether scales are of blocks, but where a source says what was served; the
    cache of TensorRT-LLM's has the weights' numbers without their scales."""
    found = [
        row(PLAIN_8B, 8, 1, tmp_path, gemm_quant_mode=given, model_path=model)
        for model, given in (
            ("meta-llama/Llama-3.1-8B", "fp8_block"), ("meta-llama/Llama-3.1-8B", "fp8"),
            ("Qwen/Qwen3-32B", "fp8"), ("meta-llama/Llama-3.1-8B", ""),
        )
    ]  # fmt: skip
    assert [(one.weights, one.kv_dtype) for one in found] == [
        ("fp8_b128", "fp8"), ("fp8", "fp8"), ("fp8_b128", "fp8"), ("bf16", "bf16"),
    ]  # fmt: skip
    assert not any(map(impossible, found))


def test_the_cache_of_a_token_lies_on_all_ranks(tmp_path: Path) -> None:
    """Keys and values of 8 heads of 128 in 80 layers; a head on each rank where there are more ranks."""
    for ranks, heads in ((2, 8), (8, 8), (16, 16)):
        one = row(MAX_70B, 4, ranks, tmp_path)
        assert _cached_bytes(one) == 2 * heads * 128 * 80 * DTYPE_BYTES[one.kv_dtype]
    # In two bytes of 32 layers.
    assert _cached_bytes(row(PLAIN_8B, 4, 1, tmp_path)) == 2 * 8 * 128 * 32 * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"silicon_tpot_ms": "0"}, "silicon_tpot_ms: '0' is no number above 0"),
        ({"silicon_ttft_ms": "fast"}, "silicon_ttft_ms: 'fast'"),
        ({"isl": "10.5"}, "isl: '10.5' is no whole number"),
        ({"gemm_quant_mode": "nvfp4"}, "gemm_quant_mode: 'nvfp4' is unknown (allowed: fp8"),
        ({"pp_size": "2"}, "pp_size: is 2; 1 is allowed"),
        (
            {"silicon_data_source": "somewhere"},
            "silicon_data_source: no series of vllm in engines.yaml is like",
        ),
        ({"backend": "vlmm"}, "backend: 'vlmm' is unknown (allowed: sglang, trtllm, vllm)"),
        ({"tp_size": "3"}, "tp_size: llama-3.1-70b has 64 heads, which 3 ranks do not divide"),
        ({"batch_size": "1000000000"}, "batch_size: is 1000000000; at most 100000"),
        ({"osl": "1"}, "osl: is 1; at least 2"),
        ({"isl": "10000000"}, "isl: 10000000 and 64 tokens of osl are more than llama-3.1-70b's 131072"),
        ({"system": "b200_sxm"}, "model_path: no row"),
    ],
)
def test_a_bad_cell_is_one_line_that_names_it(changes: dict[str, str], named: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", line(0, MAX_70B, 4, 2, **changes))
    with pytest.raises(InputError) as error:
        read_rows(path)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_cell_is_told_by_its_line_of_the_file(tmp_path: Path) -> None:
    """The head is the first one."""
    path = written(tmp_path / "x.csv", line(0, MAX_70B, 4, 2), line(1, MAX_70B, 4, 2, isl="10.5"))
    with pytest.raises(InputError, match="line 3: isl"):
        read_rows(path)


def test_a_table_without_rows_is_told_from_one_without_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(InputError, match="model_path: no row"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "says"), [("none/rows.csv", "its folder is not there"), (".", "is a folder")]
)
def test_where_rows_go_is_looked_at_before_anything_is_predicted(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(InputError, match=f"--out .*: {says}"):
        silicon.main(tmp_path / "no table is read.csv", out=tmp_path / name)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    cells = line(0, MAX_70B, 4, 2)
    del cells["isl"]
    with pytest.raises(InputError, match="column 'isl' is missing"):
        read_rows(written(tmp_path / "x.csv", cells))


def test_every_series_says_where_it_is_from() -> None:
    assert len({one.name for one in series()}) == len(series())
    assert all("github.com" in one.facts or "documentation" in one.facts for one in series())


# -- what cannot be --------------------------------------------------------------------------------------


def test_a_step_faster_than_its_weights_cannot_be(tmp_path: Path) -> None:
    # 68.45e9 bytes of matrices in fp8 and 2.1e9 of an LM head over 2 * 4.8e12 bytes/s: 7.35 ms.
    assert "reading weights and KV cache" in impossible(row(MAX_70B, 1, 2, tmp_path, silicon_tpot_ms="7.3"))
    assert impossible(row(MAX_70B, 1, 2, tmp_path, silicon_tpot_ms="7.5")) == ""


def test_half_of_an_answer_is_in_the_cache_of_a_step(tmp_path: Path) -> None:
    # 64 clients, 0.9 * (1024 + 4096 / 2) tokens of 163,840 bytes each: 28.9e9 with a tenth of a percent spent
    # on prompts, beside 70.55e9 of matrices: 10.36 ms.
    long = {**MAX_70B, "osl": "4096"}
    assert "KV cache" in impossible(row(long, 64, 2, tmp_path, silicon_tpot_ms="10.2"))
    assert impossible(row(long, 64, 2, tmp_path, silicon_tpot_ms="10.5")) == ""


def test_all_tokens_of_an_answer_but_the_first_have_a_gap_before_them(tmp_path: Path) -> None:
    # 64 clients, each of 0.9 * (1024 + 4) tokens: 2.05 s of arithmetic in a cycle of 0.1 s and 2.6 gaps.
    for ms, refused in (("740", True), ("760", False)):
        found = impossible(row({**MAX_70B, "osl": "4"}, 64, 2, tmp_path, silicon_tpot_ms=ms))
        assert found.startswith("more tokens a second") == refused


def test_a_prompt_faster_than_its_arithmetic_cannot_be(tmp_path: Path) -> None:
    # 2 * 68.45e9 * 0.9 * 1024 operations over 2 * 1979e12 a second: 31.9 ms.
    slow, fast = ({"silicon_ttft_ms": ms} for ms in ("32.5", "31"))
    assert impossible(row(MAX_70B, 1, 2, tmp_path, **slow)) == ""
    assert "arithmetic of its prompt" in impossible(row(MAX_70B, 1, 2, tmp_path, **fast))


def test_more_tokens_than_arithmetic_allows_cannot_be(tmp_path: Path) -> None:
    # 64 clients, each of 0.9 * (1024 + 64) tokens: 2.17 s of arithmetic in a cycle of 100 + 56.6 * 30 ms.
    found = impossible(row(MAX_70B, 64, 2, tmp_path, silicon_tpot_ms="30"))
    assert found.startswith("more tokens a second than arithmetic allows (1.2")


@slow
def test_every_op_at_the_datasheet_s_rates_is_faster_than_any_prediction(tmp_path: Path) -> None:
    _, rows = table(tmp_path)
    for one, floor in zip(rows, least(rows, 1), strict=True):
        assert floor.cycle_s(one) < one.cycle_s
        assert impossible(one) == ""


def test_a_row_faster_than_its_ops_one_by_one_cannot_be(tmp_path: Path) -> None:
    """Unless prompts come again, where its series is predicted with those that do."""
    one = row(MAX_70B, 4, 2, tmp_path)
    fast = Predicted(one.ttft_s * 2.0, one.tpot_s * 2.0, 0.0, 0.0, 0)
    said = "faster than its ops one by one at the datasheet's rates (2.00 times the peak)"
    assert silicon._cannot_be(one, fast) == said
    again = replace(one, series=replace(one.series, distinct_prompts=7))
    assert (
        silicon._cannot_be(again, fast)
        == f"{said}, unless prompts come again; predicted with 7 distinct ones"
    )
    assert silicon._cannot_be(one, replace(fast, ttft_s=one.ttft_s, tpot_s=one.tpot_s)) == ""


def test_rows_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    few, many = row(PLAIN_8B, 8, 1, tmp_path), row(PLAIN_8B, 16, 1, tmp_path)
    slow = replace(few, ttft_s=0.5)
    assert inconsistent(slow, [slow, many]) == "TTFT is 100 ms at TP1 c16"
    assert inconsistent(many, [slow, many]) == "TTFT is 500 ms at TP1 c8"
    assert inconsistent(few, [few, many]) == ""
    # More cards and more clients: neither is the easier one.
    assert inconsistent(slow, [slow, replace(many, ranks=2)]) == ""
    # As many clients on more cards have it easier.
    wide = replace(slow, ranks=2)
    assert inconsistent(wide, [wide, few]) == "TTFT is 100 ms at TP1 c8"
    assert inconsistent(few, [wide, few]) == "TTFT is 500 ms at TP2 c8"


@pytest.mark.parametrize(("factor", "contradict"), [(1.1, False), (1.15, False), (1.2, True)])
def test_times_contradict_each_other_from_15_percent_on(
    factor: float, contradict: bool, tmp_path: Path
) -> None:
    few, many = row(PLAIN_8B, 8, 1, tmp_path), replace(row(PLAIN_8B, 16, 1, tmp_path), tpot_s=1.0)
    slow = replace(few, tpot_s=factor)
    assert bool(inconsistent(slow, [slow, many])) == contradict


@pytest.mark.parametrize(("osl", "cycle_s"), [("2", 0.12), ("3", 0.14), ("64", 0.1 + 63 * 0.02)])
def test_the_first_token_is_in_no_gap_between_tokens(osl: str, cycle_s: float, tmp_path: Path) -> None:
    """TTFT of 100 ms, and 20 ms for each token but the first."""
    one = row({**MAX_70B, "osl": osl}, 1, 2, tmp_path)
    assert one.cycle_s == pytest.approx(cycle_s)
    assert Predicted(one.ttft_s, one.tpot_s, 0.0, 0.0, 0).cycle_s(one) == pytest.approx(cycle_s)


# -- predictions -----------------------------------------------------------------------------------------


def test_a_row_becomes_the_closed_loop_that_it_was(tmp_path: Path) -> None:
    one = scenario_of(row(MAX_70B, 4, 2, tmp_path), "none")
    strategy, work = one.strategies[0].model_dump(), one.workload.model_dump()
    assert (strategy["max_sequences"], strategy["token_budget"], strategy["prefill"]) == (
        [4],
        [8192],
        ["chunked"],
    )
    assert work["requests"] == [40]
    assert work["prompt_tokens"] == {"kind": "uniform", "low": 819, "high": [1024]}
    # An answer is on its way for a tenth of a millisecond: by then the next step has begun.
    assert work["arrivals"] == {"kind": "closed_loop", "clients": [4], "think_s": 1e-4}
    assert one.dtypes == {"lm_head": "bf16", "embedding": "bf16", "kv": "fp8"}
    waiting = row({**MAX_70B, "backend": "trtllm", "osl": "1024"}, 4, 2, tmp_path)
    batch = scenario_of(waiting, "none").strategies[0].model_dump()
    assert (batch["wait_steps"], batch["wait_tokens"], batch["token_budget"]) == (20, 1844, [2048])
    assert scenario_of(replace(waiting, ranks=8), "none").strategies[0].model_dump()["wait_steps"] == 0


@pytest.mark.parametrize(("clients", "places"), [(1, 1), (2, 1), (9, 8)])
def test_a_place_is_missing_for_the_models_whose_rows_say_so(
    clients: int, places: int, tmp_path: Path
) -> None:
    one = row(PLAIN_8B, clients, 1, tmp_path)
    assert scenario_of(one, "none").strategies[0].model_dump()["max_sequences"] == [places]
    other = row(PLAIN_8B, clients, 1, tmp_path, model_path="Qwen/Qwen3-32B")
    assert scenario_of(other, "none").strategies[0].model_dump()["max_sequences"] == [2048]
    fewer = replace(one, series=replace(one.series, max_sequences=3))
    assert fewer.places == min(places, 3)


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_one_always_waits_for_anothers_answer_where_a_place_is_missing(clients: int, tmp_path: Path) -> None:
    """Little's law: requests take clients / places of their time in service, so that they wait for
    1 / places of it. In the first of ten rounds they wait less, as the engine is empty: hence 0.9."""
    one = row(PLAIN_8B, clients, 1, tmp_path, osl="512")
    found, _ = predict(one, "none", NO_HOST_TIME)
    served_s = found.cycle_s(one) - found.waiting_s
    assert 0.9 <= found.waiting_s / (served_s / one.places) <= 1.0


def test_no_place_is_missing_from_the_datasheets_bound(tmp_path: Path) -> None:
    """What waits for a place that was deduced cannot say that a row is impossible."""
    one = row(PLAIN_8B, 4, 1, tmp_path)
    full = replace(one, series=replace(one.series, places_missing={}))
    (bound,), (of_all,) = least([one], 1), least([full], 1)
    assert bound == of_all


def test_lengths_are_constant_where_a_series_says_so(tmp_path: Path) -> None:
    work = scenario_of(row(PLAIN_8B, 4, 1, tmp_path), "none").workload.model_dump()
    assert work["prompt_tokens"] == {"kind": "constant", "value": [512]}
    assert work["output_tokens"] == {"kind": "constant", "value": [64]}


def test_prefixes_are_kept_where_prompts_come_again(tmp_path: Path) -> None:
    one = row(MAX_70B, 4, 2, tmp_path)
    for distinct in (None, 7):
        again = scenario_of(replace(one, series=replace(one.series, distinct_prompts=distinct)), "none")
        assert again.strategies[0].model_dump()["prefix_caching"] == (distinct is not None)


def test_a_prediction_is_of_the_first_replica_s_requests_after_the_warm_up(tmp_path: Path) -> None:
    """10 requests a client of which 2 warm up, with answers that are all as long; and with lengths drawn."""
    for kind, warm_up in ((PLAIN_8B, 2), (MAX_70B, 0)):
        one = row(kind, 2, 1 if warm_up else 2, tmp_path)
        one = replace(one, series=replace(one.series, warm_up=warm_up))
        found, bench = predict(one, "none", NO_HOST_TIME)
        served = bench.run(next(cases(bench)), 0).served
        # Nothing of a datasheet is extrapolated.
        assert found.extrapolated == 0.0
        kept = [i for i, each in enumerate(served.id) if each >= 2 * warm_up]
        first_s, end_s, tokens = served.first_token_s, served.finish_s, served.output_tokens
        assert found.ttft_s == pytest.approx(fmean(first_s[i] - served.arrival_s[i] for i in kept))
        assert found.tpot_s == pytest.approx(fmean((end_s[i] - first_s[i]) / (tokens[i] - 1) for i in kept))


def test_an_answer_of_one_token_has_no_time_between_tokens(tmp_path: Path) -> None:
    """Answers of one and of two tokens: those of two alone tell it, a step of at least 7 ms each."""
    found, _ = predict(row({**MAX_70B, "osl": "2"}, 2, 2, tmp_path), "none", NO_HOST_TIME)
    assert 0.007 < found.tpot_s < 0.1


def test_an_engine_s_constant_is_part_of_every_step(tmp_path: Path) -> None:
    one = row(MAX_70B, 1, 2, tmp_path)
    without, ours = (predict(one, "none", HostTime(sequence_s=host_s))[0] for host_s in (0.0, 0.005))
    # One client: every token of its answer is a step, and its prompt is one.
    assert ours.tpot_s - without.tpot_s == pytest.approx(0.005, rel=1e-6)
    assert ours.ttft_s - without.ttft_s == pytest.approx(0.005, rel=1e-6)


@pytest.mark.parametrize(("jobs", "cores", "processes"), [
    (None, 5, 5), (3, 5, 3), (2, None, 2), (None, None, 1), (1, 5, 1),
])  # fmt: skip
def test_rows_are_predicted_by_as_many_processes_as_are_asked_for(
    jobs: int | None, cores: int | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else by as many as there are cores, and by this one if that is one."""
    started: list[int] = []

    def pool(count: int) -> Any:
        started.append(count)
        return nullcontext(SimpleNamespace(map=map))

    monkeypatch.setattr(prediction, "ProcessPoolExecutor", pool)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(prediction, "_predict_tasks", lambda tasks, profile, known: [h for _, h in tasks])
    wide, narrow = (row(MAX_70B, 4, ranks, tmp_path) for ranks in (8, 2))
    hosts = [HostTime(step_s=seconds) for seconds in (0.5, 0.25, 0.125, 1.0)]
    tasks = list(zip((wide, narrow, narrow, wide), hosts, strict=True))
    found: list[Any] = [*predict_all(tasks, "none", jobs)]
    assert found == hosts
    assert started == ([processes] if processes > 1 else [])


@slow
def test_rows_together_are_predicted_as_one_by_one(tmp_path: Path) -> None:
    _, rows = table(tmp_path)
    tasks = [(one, HostTime(sequence_s=seconds)) for one in rows for seconds in (0.0, 2e-5)]
    alone = [predict(one, "none", host)[0] for one, host in tasks]
    assert predict_all(tasks, "none", 1) == alone
    assert predict_all(tasks, "none", 2) == alone


@slow
def test_the_constant_is_found_from_the_drawn_rows_alone(tmp_path: Path) -> None:
    _, rows = table(tmp_path, host_s=1e-3)
    chosen = drawn(rows, seed=0)
    names = {one.series.name for one in rows}
    assert {name: len(mine) for name, mine in chosen.items()} == dict.fromkeys(names, 1)
    hosts = fitted(chosen, "none", 1)
    # To 2 %: what is usual for hosts pulls a little. A single row tells no sequence's time.
    assert {name: host.step_s for name, host in hosts.items()} == pytest.approx(
        dict.fromkeys(names, 1e-3), rel=0.02
    )
    assert {host.sequence_s for host in hosts.values()} == {0.0}
    # The table was made without a front end.
    assert not any(host.in_front for host in hosts.values())
    # Which rows are drawn does not depend on what was measured.
    others = [replace(one, tpot_s=9.0) for one in rows]
    name = sorted(names)[0]
    assert [one.id for one in drawn(others, 0)[name]] == [one.id for one in chosen[name]]


@pytest.mark.parametrize(("count", "share"), [(1, 1), (3, 1), (5, 1), (6, 2), (30, 10), (31, 10)])
def test_a_third_of_the_rows_of_a_series_is_drawn_and_one_at_least(
    count: int, share: int, tmp_path: Path
) -> None:
    one = row(MAX_70B, 4, 2, tmp_path)
    (mine,) = drawn([replace(one, id=str(i)) for i in range(count)], seed=3).values()
    assert len({chosen.id for chosen in mine}) == len(mine) == share


def test_what_a_seed_draws_stays_the_same_over_versions(tmp_path: Path) -> None:
    one = row(MAX_70B, 4, 2, tmp_path)
    other = replace(one, series=replace(one.series, name="another"))
    rows = [replace(each, id=f"{i:02d}") for i in range(30) for each in (one, other)]
    found = drawn(rows, seed=3)
    assert list(found) == sorted(found)
    ids = {name: [each.id for each in mine] for name, mine in found.items()}
    assert {name: mine[:3] for name, mine in ids.items()} == {
        "InferenceMAX, vLLM": ["18", "27", "19"],
        "another": ["08", "01", "23"],
    }


# -- figures ---------------------------------------------------------------------------------------------


def judged(tmp_path: Path, *errors: tuple[float, float]) -> list[Compared]:
    """Rows with these errors of TPOT and TTFT, as factors."""
    one = row(MAX_70B, 4, 2, tmp_path)
    return [
        Compared(
            replace(one, id=str(i)), Predicted(one.ttft_s * b, one.tpot_s * a, 0.0, 0.0, 0), "", "", False
        )
        for i, (a, b) in enumerate(errors)
    ]


def test_figures_are_medians_and_means_of_errors_without_sign(tmp_path: Path) -> None:
    found = figures(judged(tmp_path, (1.1, 0.5), (0.7, 1.0), (1.0, 2.0)))
    assert found == pytest.approx(
        {
            "n": 3,
            "tpot_held": 100 / 3,
            "ttft_held": 100 / 3,
            "tpot_median": 10.0,
            "tpot_mean": 40 / 3,
            "ttft_median": 50.0,
            "ttft_mean": 50.0,
        }
    )
    assert missed(found) == ["tpot_median", "tpot_mean", "ttft_median", "ttft_mean"]
    assert missed(figures(judged(tmp_path, (1.04, 1.14)))) == []


def test_rows_that_cannot_be_true_are_named_and_counted_apart(tmp_path: Path) -> None:
    good, bad = judged(tmp_path, (1.0, 1.0), (3.0, 1.0))
    text = "\n".join(
        lines([good, replace(bad, impossible="TPOT below everything")], {"vllm": NO_HOST_TIME}, 1)
    )
    assert "| all | 2 | 100.0 % | 100.0 % |" in text
    series = f"| {good.row.series.name} | {good.row.model} | {good.row.card} | 2 | 100.0 % | 100.0 % |"
    assert series in text
    assert "| without those that cannot be true | 1 | 0.0 % | 0.0 % |" in text
    assert "Rows that cannot be true: 1\n" in text
    assert "(1): TPOT below everything" in text


def test_the_worst_rows_say_what_is_known_against_them(tmp_path: Path) -> None:
    """By TPOT, then by TTFT, each once: what cannot be, what makes up the prediction, or that nothing is."""
    plain, far, odd, late = judged(tmp_path, (1.0, 1.0), (3.0, 1.0), (2.0, 1.0), (1.1, 5.0))
    found = [plain, replace(far, why="a; b"), replace(odd, impossible="x", why="y"), late]
    text = "\n".join(lines(found, {"vllm": NO_HOST_TIME}, 2))
    rows = text.partition("what the table says of it |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    named = [line.rsplit("| ", 1)[1] for line in rows.splitlines()]
    assert named == ["a; b |", "x; y |", "nothing against it found |", "nothing against it found |"]
    assert "(+200 %)" in rows.splitlines()[0]
    assert "(+400 %)" in rows.splitlines()[2]


def test_rows_are_worst_whatever_the_sign_of_their_error(tmp_path: Path) -> None:
    found = judged(tmp_path, (1.5, 1.0), (0.2, 1.0), (1.0, 1.5), (1.0, 0.2))
    text = "\n".join(lines(found, {"vllm": NO_HOST_TIME}, 1))
    assert text.count("(-80 %)") == 2
    assert "(+50 %)" not in text


def test_groups_go_by_engine_model_and_card(tmp_path: Path) -> None:
    one, other = judged(tmp_path, (1.0, 1.0), (1.0, 1.0))
    first = replace(other, row=replace(other.row, card="h100-sxm"))
    last = replace(other, row=replace(other.row, engine="z", model="a", card="a"))
    names = [name.split(" | ")[1:] for name in silicon.groups([last, one, first])]
    assert names == [["llama-3.1-70b", "h100-sxm"], ["llama-3.1-70b", "h200-sxm"], ["a", "a"]]
    rows = [each.row for each in (one, first)]
    assert list(silicon._origins(rows, "none")) == [
        "h100-sxm: datasheet of h100-sxm",
        "h200-sxm: datasheet of h200-sxm",
    ]
    text = "\n".join(lines([one, first], {"vllm": NO_HOST_TIME}, 1))
    assert text.index("\n| h100-sxm | 1 |") < text.index("\n| h200-sxm | 1 |")


def test_a_profile_that_one_of_the_cards_has_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prices_of(card: str, profile: str) -> Any:
        return SimpleNamespace(origin=f"profile {profile}" if card == "h100-sxm" else "datasheet")

    monkeypatch.setattr(silicon, "prices_of", prices_of)
    one = row(MAX_70B, 4, 2, tmp_path)
    rows = [one, replace(one, card="h100-sxm")]
    assert list(silicon._origins(rows, "mine")) == ["h100-sxm: profile mine", "h200-sxm: datasheet"]
    with pytest.raises(InputError, match="--profile: unknown measured profile 'mine'"):
        list(silicon._origins([one], "mine"))


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (3.0, 1)])
def test_unless_asked_rows_are_drawn_by_0_and_the_ten_worst_printed(
    factor: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged(tmp_path, (factor, 1.0))
    asked: list[Any] = []

    def compared(rows: list[Row], profile: str, *drawn_by: int | None) -> Any:
        asked.append(drawn_by)
        return found, {}

    def printed(found: list[Compared], hosts: dict[str, HostTime], worst: int) -> list[str]:
        asked.append(worst)
        return []

    monkeypatch.setattr(silicon, "read_rows", lambda file: ([], 0))
    monkeypatch.setattr(silicon, "compared", compared)
    monkeypatch.setattr(silicon, "lines", printed)
    with pytest.raises(SystemExit) as ended:
        silicon.main(tmp_path / "rows.csv")
    assert (asked, ended.value.code) == ([(0, None), 10], code)


def test_what_is_no_more_than_a_share_explains_nothing(tmp_path: Path) -> None:
    """Three tenths of the time are not more than three tenths."""
    (one,) = judged(tmp_path, (1.0, 3.0))
    for waiting_s, reason in ((0.3, ""), (0.5, "50 % of the predicted TTFT is waiting in line")):
        ours = replace(one.predicted, ttft_s=1.0, waiting_s=waiting_s)
        assert silicon._why(replace(one, predicted=ours), 0.0, [one.row]) == reason
    (one,) = judged(tmp_path, (3.0, 1.0))
    ours = replace(one.predicted, tpot_s=1.0)
    for host_s, reason in ((0.075, ""), (0.125, "50 % of the predicted TPOT is the engine's constant")):
        assert silicon._why(replace(one, predicted=ours), host_s, [one.row]) == reason


@pytest.mark.parametrize(
    ("tpot", "ttft", "waiting", "host_s", "extrapolated", "says"),
    [
        (1.0, 1.0, 0.9, 1.0, 0.0, []),
        (3.0, 1.0, 0.9, 1.0, 0.0, ["the engine's constant"]),
        (3.0, 1.0, 0.9, 0.0, 0.0, []),
        (1.0, 3.0, 0.9, 1.0, 0.0, ["90 % of the predicted TTFT is waiting in line"]),
        (1.0, 3.0, 0.1, 1.0, 0.0, []),
        # From 20 % on an error is looked into.
        (1.0, 1.25, 0.9, 1.0, 0.0, ["90 % of the predicted TTFT is waiting in line"]),
        (1.25, 1.15, 0.9, 1.0, 0.0, ["the engine's constant"]),
        (1.0, 1.0, 0.0, 0.0, 0.8, ["80 % of its time at extrapolated prices"]),
    ],
)
def test_what_makes_up_a_prediction_is_told_where_it_is_far(
    tpot: float,
    ttft: float,
    waiting: float,
    host_s: float,
    extrapolated: float,
    says: list[str],
    tmp_path: Path,
) -> None:
    (one,) = judged(tmp_path, (tpot, ttft))
    ours = replace(one.predicted, waiting_s=waiting * one.predicted.ttft_s, extrapolated=extrapolated)
    host_s *= ours.tpot_s / one.row.clients * 0.7
    reason = silicon._why(replace(one, predicted=ours), host_s, [one.row])
    assert len(reason.split("; ") if reason else []) == len(says)
    assert all(word in reason for word in says)


def test_fitted_rows_are_not_judged(tmp_path: Path) -> None:
    good, fit = judged(tmp_path, (1.0, 1.0), (3.0, 1.0))
    name = good.row.series.name
    text = "\n".join(lines([good, replace(fit, is_fitted=True)], {name: NO_HOST_TIME}, 1))
    assert "| all | 1 | 0.0 % |" in text
    assert f"| {good.row.card} | 1 | 0.0 % |" in text
    assert f"{name}: no host time, fitted to 1 of 2 rows; 90 % of others within 0 % (TPOT)" in text


def test_a_model_that_nothing_is_fitted_to_is_judged_apart(tmp_path: Path) -> None:
    llama, qwen = judged(tmp_path, (1.0, 1.0), (3.0, 1.0))
    qwen = replace(qwen, row=replace(qwen.row, model="qwen3-32b", id="qwen"))
    assert by_bars([llama, qwen]) == [llama]
    text = "\n".join(lines([llama, qwen], {llama.row.series.name: NO_HOST_TIME}, 1))
    assert "| all | 1 | 0.0 % |" in text
    assert "| qwen3-32b: nothing was fitted to it | 1 | 200.0 % |" in text
    rows = [replace(llama.row, id=str(i)) for i in range(9)] + [qwen.row] * 9
    assert {one.model for mine in drawn(rows, 0).values() for one in mine} == {llama.row.model}


def test_rows_that_do_not_say_how_many_clients_there_were_are_told_apart(tmp_path: Path) -> None:
    """All are judged; those that say so are given beside. Of a table that never says it nothing is said."""
    source = f"{PLAIN_8B['silicon_data_source']}; silicon_concurrency=4"
    assert row(PLAIN_8B, 4, 1, tmp_path, silicon_data_source=source).says_clients
    assert not row(PLAIN_8B, 4, 1, tmp_path).says_clients
    told, untold = judged(tmp_path, (1.1, 1.0), (3.0, 1.0))
    told = replace(told, row=replace(told.row, model="qwen3-32b", says_clients=True))
    untold = replace(untold, row=replace(untold.row, model="qwen3-32b", id="untold"))
    text = "\n".join(lines([told, untold], {told.row.series.name: NO_HOST_TIME}, 1))
    assert "| qwen3-32b: nothing was fitted to it | 2 | 105.0 % |" in text
    assert "| of them those that say how many clients there were | 1 | 10.0 % |" in text
    rows = [told.row, untold.row]
    assert "how many clients" in silicon._why(untold, 0.0, rows)
    assert "how many clients" not in silicon._why(told, 0.0, rows) + silicon._why(untold, 0.0, [untold.row])
    alone = "\n".join(lines([untold], {untold.row.series.name: NO_HOST_TIME}, 1))
    assert "how many clients" not in alone


@slow
def test_rows_of_such_a_model_alone_are_predicted_without_a_constant(tmp_path: Path) -> None:
    path = written(tmp_path / "qwen.csv", line(0, MAX_70B, 2, 2, model_path="Qwen/Qwen3-32B"))
    app = typer.Typer()
    app.command()(silicon.main)
    found = CliRunner().invoke(app, [str(path), "--profile", "none", "--jobs", "1"])
    assert found.exit_code == 1
    assert "missed: no row is left to be judged" in found.stdout
    assert "| qwen3-32b: nothing was fitted to it | 1 |" in found.stdout


@slow
def test_engines_as_the_simulator_has_them_are_met(tmp_path: Path) -> None:
    _, rows = table(tmp_path, host_s=1e-3)
    found, _ = compared(rows, "none", seed=3, jobs=1)
    assert not any(one.impossible for one in found)
    assert max(abs(one.tpot_pct) for one in found) < 1.0
    assert max(abs(one.ttft_pct) for one in found) < 1.0


@thorough
def test_the_program_ends_with_2_where_there_is_no_table(tmp_path: Path) -> None:
    words = [sys.executable, "-m", silicon.__name__, str(tmp_path / "none.csv")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    missing = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


@thorough
def test_the_program_ends_with_0_or_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare", *words])
        with pytest.raises(SystemExit) as ended:
            run(silicon.main)
        return ended.value.code, *capsys.readouterr()

    path, _ = table(tmp_path, host_s=1e-3)
    out = tmp_path / "rows.csv"
    code, said, wrong = program(str(path), "--profile", "none", "--jobs", "1", "--out", str(out))
    assert (code, wrong) == (0, "")
    with out.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 7
    assert "h200-sxm: datasheet of h200-sxm" in said
    code, _, wrong = program(str(path), "--profile", "locall", "--jobs", "1")
    assert code == 2
    assert "--profile: unknown measured profile 'locall'" in wrong


@slow
def test_a_missed_bar_is_exit_code_1(tmp_path: Path) -> None:
    path, rows = table(tmp_path)
    given = list(csv.DictReader(path.read_text().splitlines()))
    kept = {one.id for mine in drawn(rows, 0).values() for one in mine}
    for cells in given:
        if cells["id"] not in kept:
            cells["silicon_tpot_ms"] = str(2.0 * float(cells["silicon_tpot_ms"]))
    app = typer.Typer()
    app.command()(silicon.main)
    twice = written(tmp_path / "twice.csv", *given)
    found = CliRunner().invoke(app, [str(twice), "--profile", "none", "--jobs", "1"])
    assert found.exit_code == 1
    assert "missed: tpot median is not below 5 %" in found.stdout


@slow
@pytest.mark.skipif(not REAL.exists(), reason="the table of measured engines is not here")
def test_the_real_table_is_read_whole() -> None:
    rows, others = read_rows(REAL)
    assert len(rows) + others == 2587
    assert {one.engine for one in rows} == {"vllm", "trtllm", "sglang"}
    assert silicon.BARS["tpot_median"] < silicon.OTHERS["tpot_median"]
    # All of them fit: a handful, of each series one, is predicted. Without host time and at peak rates of the
    # datasheet's neighbour steps are too short, and full caches still make first tokens wait.
    firsts = {one.series.name: one for one in sorted(rows, key=lambda one: one.clients, reverse=True)}
    for one, ours in zip(
        firsts.values(), predict_all([(one, NO_HOST_TIME) for one in firsts.values()], "none", 1), strict=True
    ):
        assert one.tpot_s / 2 < ours.tpot_s < 1.2 * one.tpot_s
        assert one.ttft_s / 10 < ours.ttft_s < 2 * one.ttft_s
