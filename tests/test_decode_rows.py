"""Rows of decode studies from what their simulations left, and averages of results worked by hand."""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scipy.stats import t as students_t

import simcore
from simcore.assembly import assemble
from simcore.input.files import InputError
from simcore.machine.metrics import attention_s, outside_layers_s, tokens
from simcore.scenario import load_scenario, parse_scenario
from simcore.studies import decode
from simcore.studies.common import Axes, Outcome, Row
from simcore.studies.decode import study as decode_study
from simcore.studies.decode.cases import _rate_hits, cannot_run, does_not_fit, rival_of
from simcore.studies.decode.runner import Bench, Case, Hits, Result, _average, _middle
from simcore.studies.decode.scenario import ErrorBounds
from simcore.studies.decode.speculation import linear_bound
from simcore.studies.one_device import DeviceStudy
from tests.thorough import slow

ROOT = Path(__file__).resolve().parent.parent
AXES = Axes("alspec", "a", 2, 2, 1024, 1)


def result(latency_s: float, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "low_s": 0.5 * latency_s,
        "high_s": 3.0 * latency_s,
        "by_kind": {"matmul": 0.75 * latency_s, "put": 0.25 * latency_s},
        "attention_s": 0.25 * latency_s,
        "outside_s": 0.125 * latency_s,
        "price_shares": {"measured": 1.0},
        "free": frozenset(),
        "tokens": (),
    }
    return Result(latency_s, **{**fields, **changes})


def test_of_several_runs_the_middle_one_is_shown_with_the_fastest_and_the_slowest() -> None:
    found = _middle([result(5.0), result(1.0), result(3.0)])
    assert (found.low_s, found.latency_s, found.high_s) == (1.0, 3.0, 5.0)
    assert found.by_kind == result(3.0).by_kind
    assert found.interval == "fastest and slowest of 3 runs"
    # One run has the interval of its prices.
    assert _middle([result(2.0)]) == result(2.0)


def test_an_average_is_weighted_kind_by_kind() -> None:
    two = result(4.0, by_kind={"norm": 4.0}, price_shares={"roofline": 0.75, "measured": 0.25},
                 free=frozenset({"sample"}), tokens=("last",))  # fmt: skip
    hits = Hits(0.5, (), False, "")
    found = _average([(0.25, result(2.0)), (0.75, two)], Case(AXES, hits, 1))
    assert (found.latency_s, found.low_s, found.high_s) == (3.5, 1.75, 10.5)
    assert found.by_kind == {"matmul": 0.25 * 1.5, "put": 0.25 * 0.5, "norm": 3.0}
    assert (found.attention_s, found.outside_s) == (0.875, 0.4375)
    assert found.price_shares == {"measured": 0.25 + 0.75 * 0.25, "roofline": 0.75 * 0.75}
    assert (found.free, found.tokens, found.standard_error_s) == (frozenset({"sample"}), ("last",), None)


def test_random_hits_widen_the_interval_by_students_t() -> None:
    latencies = [2.0, 2.5, 4.0, 3.0]
    hits = Hits(0.5, (), True, "")
    found = _average([(0.25, result(s)) for s in latencies], Case(AXES, hits, 1))
    error = stdev(latencies) / math.sqrt(4)
    half = students_t.ppf(0.975, 3) * error
    assert found.standard_error_s == pytest.approx(error)
    assert found.low_s == pytest.approx(0.5 * mean(latencies) - half)
    assert found.high_s == pytest.approx(3.0 * mean(latencies) + half)
    # Of one replica there is no spread.
    assert _average([(1.0, result(2.0))], Case(AXES, hits, 1)).standard_error_s is None


# -- a study ---------------------------------------------------------------------------------------------


@cache
def study() -> tuple[Bench, Outcome]:
    path = ROOT / "scenarios" / "papers" / "alspec_n150.yaml"
    hits = '"hits": {"kind": "rate", "value": [0.6]}'
    ways = f'{{"kind": "tensor_parallel", "ranks": [1, 2]}}, {{"kind": "alspec", "ranks": [1, 2], {hits}}}'
    settings = ("context_tokens=[1024, 8192]", "crossover=[]", "tokens=2", f"strategies=[{ways}]")
    parts = assemble(load_scenario(path, settings), str(path))
    assert isinstance(parts.study, DeviceStudy)
    return parts.study.bench, decode.run(parts.study.bench, lambda *_: None)


def by_case() -> dict[Any, dict[str, Row]]:
    found: dict[Any, dict[str, Row]] = {}
    for row in study()[1].rows:
        if not row.op_kind:
            found.setdefault(row.axes, {})[row.metric] = row
    return found


@slow
def test_figures_of_a_case_agree_with_each_other_and_with_its_run() -> None:
    bench, _ = study()
    results = {case.axes: (case, ran) for case, ran in bench.results.items() if case.free}
    seen = 0
    for axes, rows in by_case().items():
        if axes not in results or "token_latency_s" not in rows:
            continue
        case, ran = results[axes]
        latency = rows["token_latency_s"]
        rate = rows["tokens_per_s_per_user"]
        assert latency.value == pytest.approx(ran.latency_s, rel=1e-12)
        assert (latency.low, latency.high) == pytest.approx((ran.low_s, ran.high_s), rel=1e-12)
        assert ran.low_s <= ran.latency_s <= ran.high_s
        ends = 1 / ran.latency_s, 1 / ran.high_s, 1 / ran.low_s
        assert (rate.value, rate.low, rate.high) == pytest.approx(ends, rel=1e-12)
        share, rest = (rows[name].value for name in ("attention_share", "non_attention_share"))
        assert share == pytest.approx(ran.attention_s / ran.latency_s)
        assert rest == pytest.approx(1.0 - ran.attention_s / ran.latency_s)
        layers = bench.config.layers
        each = rows["attention_s_per_layer"].value, rows["non_attention_s_per_layer"].value
        assert each[0] == pytest.approx(ran.attention_s / layers)
        assert layers * (each[0] + each[1]) + ran.outside_s == pytest.approx(ran.latency_s)
        assert sum(ran.by_kind.values()) == pytest.approx(ran.latency_s)
        if case.hits is None:
            last = tokens(bench.trace(case))
            assert mean(token.latency_s for token in last) == pytest.approx(ran.latency_s)
            assert mean(attention_s(token) for token in last) == pytest.approx(ran.attention_s)
            assert mean(outside_layers_s(token) for token in last) == pytest.approx(ran.outside_s)
            # All that has to be read, at the memory's rate, takes less than the token.
            read_s = bench.model(case).read_bytes(case.context) / bench.hardware.hbm_bytes_per_s
            assert rows["read_once_s"].value == read_s < ran.latency_s
        rival = rival_of(bench, case)
        if case.hits is not None and rival is not None:
            speedup = bench.results[rival].latency_s / ran.latency_s
            assert rows["speedup_over_tensor_parallel"].value == pytest.approx(speedup)
            assert (rival.axes.ranks, rival.axes.groups) == (case.axes.ranks * case.axes.groups, 1)
        seen += 1
    assert seen >= 6


@slow
def test_shares_of_prices_add_up_to_one() -> None:
    for axes in by_case():
        shares = [r.value for r in study()[1].rows if r.axes == axes and r.metric == "price_share"]
        assert not shares or math.fsum(x or 0.0 for x in shares) == pytest.approx(1.0)


# -- what fits -------------------------------------------------------------------------------------------


def bench_of(**changes: Any) -> Bench:
    document = {
        "name": "fits",
        "study": "decode",
        "device": "h200-sxm",
        "profile": "none",
        "model": "llama-3.1-8b",
        "context_tokens": [1024],
        "strategies": [{"kind": "tensor_parallel", "ranks": [1]}],
        **changes,
    }
    study = assemble(parse_scenario(document, "fits"), "fits").study
    assert isinstance(study, DeviceStudy)
    return study.bench


def case_at(context: int, batch: int = 1) -> Case:
    return Case(Axes("tensor_parallel", "t", 1, 1, context, batch), None, 1)


@pytest.mark.parametrize("written", [1, 5])
def test_a_case_fits_up_to_the_last_token_that_its_memory_holds(written: int) -> None:
    """Weights, and KV of the context and of all tokens but the last, which nobody attends over."""
    bench = bench_of(tokens=written, beyond_model_context=True)
    batch = 64
    model = bench.model(case_at(1, batch))
    per_token = model.kv_bytes(2) - model.kv_bytes(1)
    most = int((bench.hardware.memory_bytes - model.weight_bytes) // per_token) - (written - 1)
    assert does_not_fit(bench, case_at(most, batch)) is None
    assert "take" in (does_not_fit(bench, case_at(most + 1, batch)) or "")


def test_as_many_devices_as_a_link_connects() -> None:
    bench = bench_of()
    most = bench.hardware.max_devices
    assert cannot_run(bench, 1, most) is None
    assert f"{most + 1} devices are needed" in (cannot_run(bench, 1, most + 1) or "")
    assert cannot_run(bench, 2, most // 2) is None


@pytest.mark.parametrize(("kind", "given", "field"), [
    ("alspec", {"ranks": [8]}, "ranks"),
    ("alspec_pipelined", {"groups": [9]}, "groups"),
])  # fmt: skip
def test_what_asks_for_too_many_devices_is_told_by_its_field(
    kind: str, given: dict[str, Any], field: str
) -> None:
    hits = {"kind": "rate", "value": [0.5]}
    bench = bench_of(strategies=[{"kind": kind, "hits": hits, **given}])
    with pytest.raises(InputError, match=rf"\.{field}: "):
        list(decode.cases(bench))


@pytest.mark.parametrize("draw", ["random", "fractional", "floor", "ceil"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_draws_of_hits_weigh_one_together(draw: str, seeds: int) -> None:
    for found in (
        _rate_hits(0.37, draw, 32, range(seeds), None),
        _rate_hits(1.0, draw, 32, range(seeds), None),
    ):
        assert math.fsum(weight for weight, _ in found.draws) == pytest.approx(1.0, abs=1e-12)


@dataclass(frozen=True)
class Overlapped:
    """What the rows of a speculative case ask of it."""

    axes: Axes = AXES
    hits: Any = field(default_factory=lambda: SimpleNamespace(published=None))
    overlap: bool = True
    free: bool = True


@pytest.mark.parametrize(("serial_s", "gain_s"), [(0.4, 0.0), (0.4 + 1e-9, 1e-9), (0.3, -0.1)])
def test_what_rounding_leaves_of_two_sums_is_no_gain(
    serial_s: float, gain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serial steps without the exchange, 0.1 s, beside a run of 0.3 s."""
    assert 0.4 - 0.1 - 0.3 != 0.0
    monkeypatch.setattr(decode_study, "rival_of", lambda bench, case: None)
    monkeypatch.setattr(decode_study, "_exchange_s", lambda bench, case: 0.1)
    bench: Any = SimpleNamespace(run=lambda case: result(0.3 if case.overlap else serial_s))
    monkeypatch.setattr(decode_study, "_verification_s", lambda bench, case: 0.0)
    rows = decode_study._speculation_rows(bench, cast(Case, Overlapped()))
    (row,) = (row for row in rows if row.metric == "overlap_gain_s")
    assert row.value == (gain_s if gain_s == 0.0 else pytest.approx(gain_s, rel=1e-6))


@pytest.mark.parametrize("extra_s", [2e-6, -2e-6])
def test_a_speculative_kernel_priced_below_the_plain_one_has_no_extra_time(
    extra_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_study, "_verification_s", lambda bench, case: extra_s)
    strategy = {"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": 0.5}}
    rows = simcore.run(
        {
            "name": "one", "study": "decode", "device": "h200-sxm", "profile": "none", "model": "tiny-llama",
            "context_tokens": 64, "strategies": [strategy],
        }
    ).rows  # fmt: skip
    (row,) = (row for row in rows if row["metric"] == "verification_s")
    assert row["value"] == (extra_s if extra_s > 0.0 else None)
    assert ("below the plain one" in row["source"]) == (extra_s < 0.0)


def decode_scenario(**changes: Any) -> dict[str, Any]:
    strategy = {"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": [0.25, 0.75]}}
    given = {"device": "h200-sxm", "model": "llama-3.1-8b", "context_tokens": [256, 512], "baseline": None}
    return {"name": "d", "study": "decode", "strategies": [strategy], **given, **changes}


def ran(**changes: Any) -> Outcome:
    parts = assemble(parse_scenario(decode_scenario(**changes), "d"), "d")
    return parts.study.run(lambda *_: None)


def test_cases_go_through_contexts_first_then_hits() -> None:
    rows = [row for row in ran().rows if row.metric == "token_latency_s"]
    found = [(row.axes.context_tokens, row.axes.hit_rate) for row in rows]
    assert found == [(256, 0.25), (256, 0.75), (512, 0.25), (512, 0.75)]


def test_the_bound_to_first_order_stands_beside_the_others() -> None:
    hits = {"kind": "published", "task": "gsm8k-cot", "threshold": 0.1}
    given = {"alpha": 1e-3, "beta": 2e-3, "f_r": 0.5, "c": 0.25}
    outcome = ran(
        strategies=[{"kind": "alspec", "ranks": 1, "hits": hits}], context_tokens=256, error_bounds=given
    )
    found = {row.metric: row.value for row in outcome.rows}
    assert found["error_bound_linear"] == linear_bound(32, 1e-3, 2e-3, 0.5, 0.1)
    assert found["error_bound_linear"] < found["error_bound_worst_case"]


@pytest.mark.parametrize("c", [0.0, -1.0, math.inf, math.nan])
def test_the_constant_of_a_bound_is_above_zero(c: float) -> None:
    assert ErrorBounds(c=1e-3).c == 1e-3
    with pytest.raises(ValueError, match=r"c\n"):
        ErrorBounds(c=c)
