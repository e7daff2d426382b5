"""Rows of decode studies from what their simulations left, and averages of results worked by hand."""

import math
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from scipy.stats import t as students_t

import simcore
from simcore import terminal
from simcore.assembly import assemble
from simcore.input.files import InputError
from simcore.machine.machine import LawError
from simcore.machine.metrics import Moments, after_first, attention_s, outside_layers_s, tokens
from simcore.machine.trace import Cause, Span, State, Trace
from simcore.scenario import load_scenario, parse_scenario
from simcore.sim.runs import Run, Setup, simulated
from simcore.studies import decode
from simcore.studies.common import Axes, Outcome, Row
from simcore.studies.decode import crossover
from simcore.studies.decode import study as decode_study
from simcore.studies.decode import timeline as decode_timeline
from simcore.studies.decode.cases import _rate_hits, cannot_run, does_not_fit, rival_of
from simcore.studies.decode.cases import cases as every_case
from simcore.studies.decode.runner import Bench, Case, Hits, Result, _average, _middle
from simcore.studies.decode.scenario import ErrorBounds
from simcore.studies.decode.speculation import linear_bound
from simcore.studies.decode.timeline import _layer_events, shown_case
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


@slow
def test_the_first_token_of_a_run_waits_for_its_host_and_does_not_count() -> None:
    """A launch takes the host 4 ms, which is one token ahead later."""
    base = {
        "name": "slow-host", "study": "decode", "device": "h200-sxm", "model": "llama-3.1-8b",
        "dtype": "bf16", "context_tokens": 40_000, "batch": 16, "strategies": [{"kind": "tensor_parallel"}],
    }  # fmt: skip
    slow_host = {**base, "overheads": {"launch_s": 0.004}}
    found: dict[int, Any] = {}
    for count in (1, 2, 6):
        study = assemble(parse_scenario({**slow_host, "tokens": count}, "x"), "x").study
        assert isinstance(study, DeviceStudy)
        (case,) = every_case(study.bench)
        found[count] = study.bench.run(case)
        ends = [token.end_s for token in found[count].tokens]
        assert len(ends) == count
        if count > 1:
            assert found[count].latency_s == pytest.approx((ends[-1] - ends[0]) / (count - 1), rel=1e-12)
        # The host is on no later token's path.
        assert (found[count].by_kind.get("host", 0.0) > 0.003) == (count == 1)
        assert sum(found[count].by_kind.values()) == pytest.approx(found[count].latency_s)
        assert found[count].low_s < found[count].latency_s < found[count].high_s
        fresh = assemble(parse_scenario({**slow_host, "tokens": count}, "x"), "x").study
        assert isinstance(fresh, DeviceStudy)
        # What crossovers and rivals are searched with is the same figure.
        assert fresh.bench.latency_s(case) == pytest.approx(found[count].latency_s, rel=1e-12)
    assert found[1].latency_s - found[6].latency_s == pytest.approx(0.004, rel=0.02)
    assert found[2].latency_s == pytest.approx(found[6].latency_s, rel=1e-3)


@pytest.mark.parametrize(("ends", "counted"), [
    ([3.0, 5.0, 7.0], [1, 2]),
    ([3.0], [0]),
    # Two launches of three tokens each; one launch of all.
    ([3.0, 3.0, 3.0, 4.0, 4.0, 4.0], [3, 4, 5]),
    ([3.0, 3.0], [0, 1]),
])  # fmt: skip
def test_tokens_that_end_with_the_first_do_not_count(ends: list[float], counted: list[int]) -> None:
    found = [Moments(i, ([0.0, *ends])[i], end_s) for i, end_s in enumerate(ends)]
    assert [token.number for token in after_first(found)] == counted


def test_of_several_runs_the_middle_one_is_shown_with_the_fastest_and_the_slowest() -> None:
    found = _middle([result(5.0), result(1.0), result(3.0)])
    assert (found.low_s, found.latency_s, found.high_s) == (1.0, 3.0, 5.0)
    assert found.by_kind == result(3.0).by_kind
    assert found.interval == "fastest and slowest of 3 runs"
    # One run has the interval of its prices.
    assert _middle([result(2.0)]) == result(2.0)
    two = _middle([result(5.0), result(1.0)])
    assert (two.low_s, two.high_s, two.interval) == (1.0, 5.0, "fastest and slowest of 2 runs")


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
            last = after_first(tokens(bench.trace(case)))
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
    # To the last byte.
    needed = model.weight_bytes + model.kv_bytes(100 + written - 1)
    for have, fits in ((needed, True), (needed - 1, False)):
        bench.hardware = replace(bench.hardware, memory_bytes=have)
        assert (does_not_fit(bench, case_at(100, batch)) is None) == fits


def test_as_many_devices_as_a_link_connects() -> None:
    bench = bench_of()
    most = bench.hardware.max_devices
    assert cannot_run(bench, 1, most) is None
    assert f"{most + 1} devices are needed" in (cannot_run(bench, 1, most + 1) or "")
    assert cannot_run(bench, 2, most // 2) is None
    rival = rival_of(bench, Case(Axes("alspec", "a", most // 2, 2, 1024, 1, 0.5), None, 1))
    assert rival is not None
    assert (rival.axes.ranks, rival.axes.groups) == (most, 1)


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


def test_a_speculation_over_a_whole_context_is_warned_of() -> None:
    hits = {"kind": "rate", "value": [0.5]}
    for chunk, warned in ((511, False), (512, True)):
        ways = [{"kind": "alspec", "ranks": 1, "hits": hits, "chunk_tokens": chunk}]
        found = ran(model="tiny-llama", context_tokens=[1024], strategies=ways).warnings
        assert any("never wrong" in text for text in found) == warned


@pytest.mark.parametrize(
    ("kind", "given", "field", "devices"),
    [
        ("alspec", {"ranks": 1}, "kind", 2),
        ("alspec", {"ranks": 2}, "ranks", 4),
        ("alspec_pipelined", {"groups": 2}, "groups", 2),
        ("alspec_pipelined", {"groups": 3}, "groups", 3),
    ],
)
def test_what_needs_more_than_one_device_is_told_by_what_asks_for_it(
    kind: str, given: dict[str, Any], field: str, devices: int
) -> None:
    """Two groups of one rank each are what their kind asks for."""
    bench = bench_of(strategies=[{"kind": kind, "hits": {"kind": "rate", "value": [0.5]}, **given}])
    bench.hardware = replace(bench.hardware, max_devices=1)
    with pytest.raises(InputError, match=rf"^strategies\[0\]\.{field}: {devices} devices are needed"):
        decode.cases(bench)


def test_as_many_runs_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(context_tokens=[512, 1024, 2048])
    monkeypatch.setitem(decode.cases.__globals__, "MOST_RUNS", 3)
    assert len(decode.cases(bench)) == 3
    monkeypatch.setitem(decode.cases.__globals__, "MOST_RUNS", 2)
    with pytest.raises(InputError, match="multiply into 3 runs; at most 2 are allowed"):
        decode.cases(bench)


def test_what_is_given_twice_is_named() -> None:
    ways = [{"kind": "tensor_parallel", "ranks": ranks} for ranks in ([1, 2], [2, 4])]
    with pytest.raises(InputError, match="strategies: tensor parallel, 2 devices is given twice"):
        decode.cases(bench_of(strategies=ways))


def test_what_does_not_speculate_never_hits() -> None:
    ((weight, pattern),) = case_at(1024).draws
    assert weight == 1.0
    assert not any(pattern(token, layer) for token in range(3) for layer in range(3))


@pytest.mark.parametrize("latency_s", [1.5e-7, 1e-6, 9e-4])
def test_a_crossover_in_latency_is_found_from_a_tenth_of_a_microsecond_to_a_millisecond(
    latency_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "_gain", lambda bench, case: (case.link_latency_s or 0.0) - latency_s)
    bench: Any = SimpleNamespace(hardware=SimpleNamespace(link_latency_s=1e-6))
    (found,) = crossover._over_latency(bench, [Case(AXES, None, 1)])
    assert found.row.value == pytest.approx(latency_s, rel=0.02)


@pytest.mark.parametrize("replicas", [1, 3])
def test_hits_by_layer_are_as_many_as_layers(replicas: int) -> None:
    def found(layers: int) -> list[Case]:
        hits = {"kind": "layers", "probabilities": [0.25] * layers}
        return decode.cases(bench_of(strategies=[{"kind": "alspec", "hits": hits}], replicas=replicas))

    (case,) = found(32)
    assert case.axes.hit_rate == 0.25
    assert case.hits is not None
    assert case.hits.random
    assert len(case.hits.draws) == replicas
    assert math.fsum(weight for weight, _ in case.hits.draws) == pytest.approx(1.0)
    for layers in (31, 33):
        with pytest.raises(InputError, match=f"has {layers} values, the model has 32 layers"):
            found(layers)


@slow
@pytest.mark.parametrize(
    ("hits", "ways"),
    [
        # Their means are a half, one to the last bit only nearly.
        (
            [{"kind": "layers", "probabilities": [low] * 16 + [1.0 - low] * 16} for low in (0.1, 0.2, 0.3)],
            ["hits by layer (1)", "hits by layer (2)", "hits by layer (3)"],
        ),
        (
            [
                {"kind": "layers", "probabilities": [0.5] * 32},
                {"kind": "rate", "value": [0.5, 0.75]},
                {"kind": "rate", "value": 0.5, "draw": "random"},
            ],
            ["hits by layer", *["hits counted (fractional)"] * 2, "hits at random"],
        ),
        ([{"kind": "layers", "probabilities": [p] * 32} for p in (0.4, 0.5)], ["", ""]),
        ([{"kind": "rate", "value": [0.5, 0.5001]}], ["", ""]),
    ],
)
def test_hits_of_the_same_mean_are_told_apart_by_how_they_come(hits: list[Any], ways: list[str]) -> None:
    found = ran(context_tokens=256, strategies=[{"kind": "alspec", "hits": one} for one in hits])
    labels = [row.axes.label for row in found.rows if row.metric == "token_latency_s"]
    assert labels == ["ALSpec, 1+1 devices" + (f", {way}" if way else "") for way in ways]
    table = Console(width=200, record=True)
    table.print(terminal._table(found)[0])
    shown = table.export_text()
    assert all(shown.count(way) >= ways.count(way) for way in ways if way)


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


SIMULATED = SimpleNamespace(measured=False)


def overlap_gains(bench: Any, case: Overlapped, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    monkeypatch.setattr(decode_study, "rival_of", lambda bench, case: None)
    monkeypatch.setattr(decode_study, "_verification_s", lambda bench, case: 0.0)
    rows = decode_study._speculation_rows(bench, cast(Case, case))
    return [row.value for row in rows if row.metric == "overlap_gain_s"]


@pytest.mark.parametrize("unit_s", [1.0, 1e-6])
@pytest.mark.parametrize(("serial", "gain"), [(0.4, 0.0), (0.4 + 1e-9, 1e-9), (0.3, -0.1)])
def test_what_rounding_leaves_of_two_sums_is_no_gain(
    serial: float, gain: float, unit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serial steps without the exchange, 0.1 units of time, beside a run of 0.3 units."""
    assert 0.4 - 0.1 - 0.3 != 0.0
    monkeypatch.setattr(decode_study, "_exchange_s", lambda bench, case: 0.1 * unit_s)
    bench: Any = SimpleNamespace(
        run=lambda case: result((0.3 if case.overlap else serial) * unit_s), hardware=SIMULATED
    )
    (value,) = overlap_gains(bench, Overlapped(), monkeypatch)
    assert value == (0.0 if gain == 0.0 else pytest.approx(gain * unit_s, rel=1e-6, abs=0.0))


def test_only_a_layer_that_two_groups_overlap_has_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_study, "_exchange_s", lambda bench, case: 0.0)
    bench: Any = SimpleNamespace(run=lambda case: result(1.0 if case.overlap else 1.5), hardware=SIMULATED)
    ring = replace(AXES, strategy="alspec_pipelined", groups=3)
    for axes, overlap, gains in ((AXES, True, [0.5]), (AXES, False, []), (ring, True, []), (ring, False, [])):
        assert overlap_gains(bench, Overlapped(axes, overlap=overlap), monkeypatch) == gains
    bench.hardware = SimpleNamespace(measured=True)
    assert overlap_gains(bench, Overlapped(AXES, overlap=True), monkeypatch) == []


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


@slow
def test_cases_go_through_contexts_first_then_hits() -> None:
    rows = [row for row in ran().rows if row.metric == "token_latency_s"]
    found = [(row.axes.context_tokens, row.axes.hit_rate) for row in rows]
    assert found == [(256, 0.25), (256, 0.75), (512, 0.25), (512, 0.75)]


@slow
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


# -- from cases to rows ----------------------------------------------------------------------------------


@cache
def published_times() -> tuple[Bench, dict[tuple[str, str], Row]]:
    """A small study of the paper's device, whose profile takes parts of speculation as free: its bench, and
    its rows by label and metric."""
    path = ROOT / "scenarios" / "papers" / "alspec_n150.yaml"
    ways = '{"kind": "alspec", "ranks": [4], "hits": {"kind": "rate", "value": [0.75]}}'
    given = (
        "context_tokens=[1024]",
        "crossover=[hit_rate]",
        "published=[]",
        f'strategies=[{{"kind": "tensor_parallel", "ranks": [1]}}, {ways}]',
    )
    parts = assemble(load_scenario(path, given), str(path))
    assert isinstance(parts.study, DeviceStudy)
    outcome = parts.study.run(lambda *_: None)
    return parts.study.bench, {(row.axes.label, row.metric): row for row in outcome.rows if not row.op_kind}


@slow
def test_a_baseline_that_is_no_strategy_has_rows_and_the_others_their_speed_up() -> None:
    _, rows = published_times()
    baseline = "tensor parallel, 8 devices"
    reference = rows[baseline, "token_latency_s"].value or 0.0
    for label in ("tensor parallel, 1 device", "ALSpec, 4+4 devices", baseline):
        latency = rows[label, "token_latency_s"].value or 0.0
        assert rows[label, "speedup_over_baseline"].value == reference / latency
        rate = rows[label, "tokens_per_s_per_user"]
        assert rate.value == 1.0 / latency
        low_s, high_s = (
            rows[label, "token_latency_s"].low or 0.0,
            rows[label, "token_latency_s"].high or 0.0,
        )
        assert (rate.low, rate.high) == (1.0 / high_s, 1.0 / low_s)
        # A hit skips reading KV: it has no such lower bound.
        assert ((label, "read_once_s") in rows) == label.startswith("tensor parallel")


@slow
def test_what_a_profile_takes_as_free_is_free_until_it_is_priced() -> None:
    bench, rows = published_times()
    label = "ALSpec, 4+4 devices"
    assert (rows[label, "latency_if_priced_s"].value or 0.0) > (rows[label, "token_latency_s"].value or 0.0)
    (case,) = (each for each in decode.cases(bench) if each.axes.label == label)
    rival = rival_of(bench, case)
    assert rival is not None
    # With three quarters of hits it is ahead; with nothing free it is behind, and needs more hits.
    assert bench.latency_s(case) < bench.latency_s(rival)
    assert bench.latency_s(replace(case, free=False)) > bench.latency_s(replace(rival, free=False))
    assert "ahead everywhere" in rows[label, "crossover_hit_rate"].source
    assert 0.75 < (rows[label, "crossover_hit_rate_if_priced"].value or 0.0) < 1.0
    assert {where for where, metric in rows if metric.startswith("crossover")} == {label}


def test_only_two_groups_tell_whether_the_last_layer_is_overlapped() -> None:
    hits = {"kind": "rate", "value": [0.5]}
    given = [
        {"kind": "alspec", "hits": hits},
        {"kind": "alspec", "hits": hits, "overlap_last_layer": False},
        {"kind": "alspec_pipelined", "groups": [3], "hits": hits},
    ]
    assert [(case.axes.label, case.overlap) for case in decode.cases(bench_of(strategies=given))] == [
        ("ALSpec, 1+1 devices", True),
        ("ALSpec, 1+1 devices, last layer not overlapped", False),
        ("ALSpec pipelined, 3 devices", True),
    ]


def test_rows_of_a_result_by_hand() -> None:
    ran = result(
        2.0,
        low_s=0.0,
        standard_error_s=0.25,
        price_shares={"roofline": 0.25, "measured": 0.75, "assumed": 0.0},
    )
    bench: Any = SimpleNamespace(
        run=lambda case: ran, config=SimpleNamespace(layers=4, linear=None), rival=None
    )
    rows = list(decode_study._rows(bench, Case(AXES, None, 1), {}))
    assert all(row.source == "measured 75%, roofline 25%; 90 % price interval" for row in rows[:2])
    found = {row.metric: (row.value, row.low, row.high) for row in rows}
    assert found["token_latency_s"] == (2.0, 0.0, 6.0)
    # What may take no time has no largest number of tokens.
    assert found["tokens_per_s_per_user"] == (0.5, 1.0 / 6.0, None)
    assert found["standard_error_s"][0] == 0.25
    assert (found["attention_share"][0], found["non_attention_share"][0]) == (0.25, 0.75)
    shares = [(row.op_kind, row.value) for row in rows if row.metric == "price_share"]
    assert shares == [("assumed", 0.0), ("measured", 0.75), ("roofline", 0.25)]
    path = [(row.op_kind, row.value) for row in rows if row.metric == "critical_path_s"]
    assert path == [("matmul", 1.5), ("put", 0.5)]


def test_communication_inside_ops_that_are_measured_as_a_whole_is_told_by_their_names() -> None:
    ran = result(1.0, by_kind={"outside_layers": 0.5, "non_attention": 0.25, "decode_attention": 0.25})
    row = decode_study._communication(AXES, ran)
    assert row.value is None
    assert row.source == "inside non_attention, outside_layers, which the profile has as a whole"
    # One rank has none.
    assert decode_study._communication(replace(AXES, ranks=1), ran).value == 0.0
    for kind, source in (("all_gather", ""), ("all_gather_matmul", "with the projection")):
        row = decode_study._communication(AXES, result(1.0, by_kind={kind: 0.5, "matmul": 0.5}))
        assert row.value == 0.5
        assert row.source[:19] == source


@slow
def test_a_bound_beyond_any_number_has_no_value() -> None:
    hits = {"kind": "published", "task": "gsm8k-cot", "threshold": 0.1}
    given = {"alpha": 1e200, "beta": 1e200}
    outcome = ran(
        strategies=[{"kind": "alspec", "ranks": 1, "hits": hits}], context_tokens=256, error_bounds=given
    )
    (row,) = (row for row in outcome.rows if row.metric == "error_bound_worst_case")
    assert row.value is None
    assert row.source.endswith("; beyond any number")


@pytest.mark.parametrize(("alpha", "beta", "f_r"), [*product((0.0, 0.5), repeat=3)])
def test_errors_merely_add_up_where_no_part_of_a_layer_amplifies_them(
    alpha: float, beta: float, f_r: float
) -> None:
    bounds = ErrorBounds(alpha=alpha, beta=beta, f_r=f_r, c=1.0)
    bench: Any = SimpleNamespace(
        config=SimpleNamespace(layers=4, linear=None),
        rival=None,
        scenario=SimpleNamespace(error_bounds=bounds),
    )
    found = {name: (bound, text) for name, bound, text in decode_study._bounds(bench, 0.25)}
    bound, text = found["error_bound_worst_case"]
    # Four layers, each within a quarter.
    if alpha == 0.0 and beta * f_r == 0.0:
        assert bound == 1.0
        assert "errors merely add up" in text
    else:
        assert bound > 1.0
        assert "errors merely add up" not in text


def test_seconds_by_kind_add_up_to_the_latency_of_a_token() -> None:
    ran = bench_of(model="tiny-llama", tokens=3).run(case_at(64))
    assert min(ran.by_kind.values()) >= 0.0
    assert math.fsum(ran.by_kind.values()) == pytest.approx(ran.latency_s)


def test_runs_at_the_same_prices_share_their_costs() -> None:
    bench = bench_of(model="tiny-llama", context_tokens=[64, 128])
    short, long = decode.cases(bench)
    shared = bench._cuts(short)
    far = [replace(case, link_latency_s=1e-3) for case in (short, long)]
    assert bench._cuts(far[0]) is bench._cuts(far[1]) is not shared
    assert bench._cuts(long) is shared


def test_runs_that_count_are_named_by_their_case_and_a_run_that_is_shown_is_not() -> None:
    setups: list[Setup] = []

    def start(setup: Setup) -> Run:
        setups.append(setup)
        return simulated(setup)

    hits = {"kind": "rate", "value": [0.5]}
    ways = [{"kind": "tensor_parallel", "ranks": [2]}, {"kind": "alspec", "ranks": [1], "hits": hits}]
    bench = bench_of(model="tiny-llama", context_tokens=[64], strategies=ways)
    bench.hardware = replace(bench.hardware, start=start, repeats=1)
    plain, speculative = decode.cases(bench)
    names: list[set[str]] = []
    for case, title in (
        (plain, "tensor parallel, 2 devices, batch 1, 64 tokens of context"),
        (speculative, "ALSpec, 1+1 devices, batch 1, 64 tokens of context, 50.0% hits"),
    ):
        for make in (bench.run, bench.trace):
            setups.clear()
            make(case)
            names.append({setup.case for setup in setups})
            assert {setup.title for setup in setups} == {title}
    assert names[1] == names[3] == {""}
    assert names[0] != names[2]
    assert "" not in names[0] | names[2]


def test_the_first_case_is_held_to_all_of_its_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [{"kind": "tensor_parallel", "ranks": [2, 4]}]
    given: dict[str, Any] = {"model": "tiny-llama", "context_tokens": [64, 128], "strategies": ways}
    assert ran(**given).rows
    broken = Axes("tensor_parallel", "tensor parallel, 2 devices", 2, 1, 64, 1)
    monkeypatch.setattr(Bench, "keeps_step", lambda self, case, trace: case.axes != broken)
    with pytest.raises(LawError, match="lockstep: the ranks of tensor parallel, 2 devices"):
        ran(**given)


def test_no_crossover_is_searched_by_measuring() -> None:
    given: dict[str, Any] = {"model": "tiny-llama", "context_tokens": [64, 128], "crossover": ["hit_rate"]}
    assert any(row.metric == "crossover_hit_rate" for row in ran(**given).rows)
    bench = bench_of(**decode_scenario(**given))
    bench.hardware = replace(bench.hardware, start=lambda setup: simulated(setup))  # noqa: PLW0108
    rows = decode.run(bench, lambda *_: None).rows
    assert any(row.metric == "token_latency_s" for row in rows)
    assert not any(row.metric.startswith("crossover") for row in rows)


# -- the timeline ----------------------------------------------------------------------------------------


def test_the_case_with_most_of_everything_is_shown_and_one_of_two_groups_before_all() -> None:
    def case(context: int, batch: int, ranks: int, hits: float | None, way: str = "alspec") -> Case:
        return Case(Axes(way, way, ranks, 2, context, batch, hits), None, 1)

    # From the least to the most.
    rising = [
        case(1024, 8, 8, None, "tensor_parallel"),
        case(128, 4, 4, 0.75),
        case(256, 1, 4, 0.75),
        case(256, 2, 1, 0.75),
        case(256, 2, 2, None),
        case(256, 2, 2, 0.25),
        case(256, 2, 2, 0.5),
    ]
    for count in range(1, len(rising) + 1):
        assert shown_case(rising[:count]) is shown_case(rising[count - 1 :: -1]) is rising[count - 1]


def test_a_layer_is_shown_from_the_first_rank_s_exchange_to_the_end_of_the_last_one_s_next() -> None:
    def span(
        rank: int, name: str, start_s: float, end_s: float, stream: str = "main", state: State = "skipped"
    ) -> Span:
        cause = Cause(None, start_s)
        return Span(next(ids), 0, rank, stream, name, state, start_s, start_s, end_s, cause, (), (), ())

    ids = iter(range(99))
    spans = [
        span(0, "before", 0.0, 1.0),
        span(0, "exchange", 1.0, 2.0),
        # No exchange, but the flags that it sets.
        span(0, "exchange", 2.0, 2.0, state="flags"),
        span(0, "attend", 2.0, 5.0),
        span(0, "exchange", 7.0, 8.0),
        span(0, "after", 8.0, 9.0),
        span(1, "before", 0.0, 1.5),
        span(1, "exchange", 1.5, 2.5),
        span(1, "attend", 2.5, 4.0),
        span(1, "gate", 4.0, 4.0),
        span(1, "exchange", 6.0, 7.5),
        span(1, "after", 7.5, 9.0),
        span(1, "put", 0.5, 8.5, "wire"),
    ]
    case = Case(Axes("alspec", "a", 1, 2, 1024, 1), None, 1)
    events = list(_layer_events(Trace(spans=spans), case, 0, "a", "hit"))
    shown = sorted((e["rank"], e["start_s"], e["end_s"], e["name"], e["group"], e["tensor"]) for e in events)
    assert shown == [
        (0, 1.0, 2.0, "exchange", 0, 0),
        (0, 2.0, 2.0, "exchange", 0, 0),
        (0, 2.0, 5.0, "attend", 0, 0),
        (0, 5.0, 7.0, "waiting", 0, 0),
        (0, 7.0, 8.0, "exchange", 0, 0),
        (1, 1.0, 1.5, "before", 1, 0),
        (1, 1.0, 8.0, "put", 1, 0),
        (1, 1.5, 2.5, "exchange", 1, 0),
        (1, 2.5, 4.0, "attend", 1, 0),
        # What takes no time is shown; what does not belong to the layer is not.
        (1, 4.0, 4.0, "gate", 1, 0),
        (1, 4.0, 6.0, "waiting", 1, 0),
        (1, 6.0, 7.5, "exchange", 1, 0),
        (1, 7.5, 8.0, "after", 1, 0),
    ]


@pytest.mark.parametrize(("layers", "hits"), [(8, [4]), (5, [2]), (4, [4, 0])])
def test_a_hit_and_a_miss_are_of_one_run_where_inner_layers_have_both(
    layers: int, hits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all layers hit; where only one is an inner one, all do in one run and none in another."""
    found: list[int] = []

    def trace(case: Case) -> Trace:
        ((_, pattern),) = case.draws
        found.append(sum(pattern(0, layer) for layer in range(layers)))
        return Trace()

    bench: Any = SimpleNamespace(config=SimpleNamespace(layers=layers), trace=trace)
    monkeypatch.setattr(decode_timeline, "_layer_events", lambda trace, case, layer, title, outcome: [])
    decode_timeline.timeline(bench, Case(AXES, None, 1))
    assert found == hits
