"""Workloads of several tenants: laws of shares and merged arrivals, figures by tenant, limits of plans."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from simcore import reports
from simcore.input.fields import count, single_valued
from simcore.input.files import InputError, parse_yaml
from simcore.planning.alternatives import at_load, load_of
from simcore.planning.points import Benches
from simcore.planning.runs import Ask, simulated
from simcore.planning.whatif import load_plan
from simcore.reports.run import read_run
from simcore.reports.serving.sections import sections
from simcore.scenario import scenario_of
from simcore.studies.columns import metric
from simcore.studies.serving.scenario import ServingScenario
from simcore.workload.arrivals import draw
from simcore.workload.drawn import Drawn, contents, offered_rate_per_s, requests
from simcore.workload.spec import Workload
from simcore.workload.streams import stream
from tests.test_serving import Document, bench, document, figure, lengths, only, outcome, value, workload
from tests.thorough import slow

SIGMAS = 4.0
# A right sample fails a test of Kolmogorov and Smirnov so often; seeds are fixed.
SMALLEST_P = 1e-3
MIXED = {"kind": "lognormal", "mean": 50.0, "cv": 1.0, "max": 900}
REST = {"prompt_tokens": lengths(10), "output_tokens": lengths((1, 50))}


def poisson(rate_per_s: float) -> Document:
    return {"kind": "poisson", "rate_per_s": rate_per_s}


def drawn(seed: int = 1, replica: int = 0, **given: Any) -> Drawn:
    return draw(Workload.model_validate(given), seed, replica)


def times(of: Drawn) -> NDArray[np.float64]:
    assert of.arrival_s is not None
    return of.arrival_s


def tenants_of(of: Drawn) -> NDArray[np.int16]:
    assert of.tenants is not None
    return of.tenants.of


def same(a: Drawn, b: Drawn) -> bool:
    """Whether two draws are the same to the bit, but for tenants."""
    arrays = all(
        np.array_equal(x, y)
        for x, y in (
            (a.arrival_s, b.arrival_s),
            (a.prompt_tokens, b.prompt_tokens),
            (a.output_tokens, b.output_tokens),
        )
        if x is not None or y is not None
    )
    names = ("max_tokens", "longest_prompt", "left_out", "rate_per_s", "hash_ids", "hash_block_tokens")
    return arrays and all(getattr(a, name) == getattr(b, name) for name in names)


@pytest.fixture
def trace(tmp_path: Path) -> Document:
    """A request every half second for five minutes from 23:58 on, a few of them without an answer."""
    path = tmp_path / "azure.csv"
    rows = []
    for i in range(600):
        minute, second = divmod(i / 2.0, 60.0)
        day, minute = (16, 58 + minute) if minute < 2 else (17, minute - 2)
        hour = 23 if day == 16 else 0
        at = f"2023-11-{day} {hour:02}:{minute:02.0f}:{second:04.1f}"
        rows.append(f"{at},{100 + i},{0 if i % 50 == 7 else 1 + i % 90}")
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return {"kind": "trace", "format": "azure", "path": str(path)}


# -- shares ----------------------------------------------------------------------------------------------


def test_shares_are_within_their_standard_errors_and_independent_of_the_last_tenant() -> None:
    shared = [{"name": "a", "share": 0.6}, {"name": "b", "share": 0.3}, {"name": "c"}]
    of = tenants_of(drawn(requests=40_000, arrivals=poisson(1), **REST, tenants=shared))
    for place, share in enumerate((0.6, 0.3, 0.1)):
        error = math.sqrt(share * (1 - share) / len(of))
        assert abs((of == place).mean() - share) < SIGMAS * error
        after = of[1:][of[:-1] == place]
        assert abs((after == 0).mean() - 0.6) < SIGMAS * math.sqrt(0.24 / len(after))


def test_tenants_change_no_other_draw() -> None:
    plain = {"requests": 3000, "arrivals": poisson(3), "prompt_tokens": MIXED, "output_tokens": MIXED}
    without = drawn(**plain)
    named = [{"name": "a", "share": 0.5, "slo": {"ttft_s": 1.0}}, {"name": "b"}]
    assert same(drawn(**plain, tenants=named), without)
    longer = drawn(**plain, tenants=[named[0], {"name": "b", "prompt_tokens": lengths(7)}])
    b = tenants_of(longer) == 1
    assert set(longer.prompt_tokens[b]) == {7}
    assert np.array_equal(longer.prompt_tokens[~b], without.prompt_tokens[~b])
    assert np.array_equal(longer.output_tokens, without.output_tokens)
    assert np.array_equal(times(longer), times(without))


def test_lengths_of_tenants_are_independent() -> None:
    wide = {"prompt_tokens": lengths((1, 1000)), "output_tokens": lengths(3)}
    given = [{"name": "a", "share": 0.5, **wide}, {"name": "b", **wide}]
    found = drawn(requests=20_000, arrivals=poisson(3), tenants=given)
    a, b = (found.prompt_tokens[tenants_of(found) == place] for place in (0, 1))
    number = min(len(a), len(b))
    assert abs(np.corrcoef(a[:number], b[:number])[0, 1]) < SIGMAS / math.sqrt(number)


def test_each_request_reserves_what_its_tenant_may_ask_for() -> None:
    short = {"name": "short", "share": 0.5, "output_tokens": lengths((1, 8))}
    cut = {"name": "cut", "share": 0.25, "max_tokens": 20}
    found = drawn(
        requests=2000, arrivals=poisson(3), tenants=[short, cut, {"name": "rest"}], max_tokens=40, **REST
    )
    most = {(int(of), one.max_tokens) for of, one in zip(tenants_of(found), requests(found), strict=True)}
    assert most == {(0, 40), (1, 20), (2, 40)}
    assert [int(found.output_tokens[tenants_of(found) == i].max()) for i in range(3)] == [8, 20, 40]
    assert found.max_tokens == 40
    assert found.tenants is not None
    assert found.tenants.max_tokens == (40, 20, 40)


# -- a tenant alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrivals",
    [
        poisson(3.0),
        {"kind": "poisson", "interval_s": 0.3, "span_intervals": 250.0},
        {"kind": "gamma", "rate_per_s": 4.0, "cv": 3.0},
        {"kind": "constant", "interval_s": 49.0},
        {"kind": "closed_loop", "clients": 3},
    ],
    ids=lambda one: str(one["kind"]),
)
def test_a_tenant_alone_is_the_workload_without_tenants(arrivals: Document) -> None:
    own = {"prompt_tokens": MIXED, "output_tokens": lengths((1, 90)), "max_tokens": 60}
    without = drawn(requests=300, arrivals=arrivals, **own)
    assert same(drawn(requests=300, arrivals=arrivals, tenants=[{"name": "a", **own}]), without)
    assert same(drawn(requests=300, arrivals=arrivals, **own, tenants=[{"name": "a"}]), without)
    if arrivals["kind"] != "closed_loop":
        alone = [{"name": "a", "arrivals": arrivals, **own}]
        assert same(drawn(requests=300, tenants=alone), without)


@pytest.mark.parametrize("requested", [{}, {"requests": 77}], ids=["all", "first"])
@pytest.mark.parametrize("own", [{}, {"prompt_tokens": MIXED}], ids=["recorded", "drawn"])
def test_a_tenant_alone_replays_the_trace(trace: Document, own: Document, requested: Document) -> None:
    arrivals = {**trace, "rate_scale": 2.5, "jitter_s": 1.0, "start_s": 20.0}
    without = drawn(arrivals=arrivals, **own, **requested)
    alone = drawn(tenants=[{"name": "a", "arrivals": arrivals, **own}], **requested)
    assert same(alone, without)
    assert without.left_out > 0


def test_a_run_of_a_tenant_alone_has_the_figures_of_one_without() -> None:
    slo = {"ttft_s": 0.5, "e2e_s": 0.1}
    without = outcome(document(workload=workload(60, output=(2, 40)), slo=slo))
    alone = workload(60, output=(2, 40), tenants=[{"name": "a", "slo": slo}])
    found = outcome(document(workload=alone))
    assert 0.0 < value(without, "slo_attainment") < 1.0
    for row in without.rows:
        assert figure(found, row.metric).value == row.value
        if row.metric.startswith(("ttft", "tpot", "e2e", "queue", "slo", "goodput", "offered", "window_req")):
            own = figure(found, f"tenant.a.{row.metric}")
            assert (own.value, own.unit) == (row.value, row.unit)


# -- merged arrivals -------------------------------------------------------------------------------------


def test_merged_poisson_arrivals_are_poisson_of_the_sum() -> None:
    own = [{"name": f"t{i}", "arrivals": poisson(rate)} for i, rate in enumerate((1.0, 2.5))]
    own.append({"name": "t2"})
    found = drawn(requests=40_000, arrivals=poisson(0.5), **REST, tenants=own)
    gaps = np.diff(times(found))
    assert found.rate_per_s == 4.0
    assert stats.kstest(gaps, "expon", args=(0.0, 0.25)).pvalue > SMALLEST_P
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < SIGMAS / math.sqrt(len(gaps))
    for place, rate in enumerate((1.0, 2.5, 0.5)):
        mine = tenants_of(found) == place
        assert abs(mine.mean() - rate / 4.0) < SIGMAS * math.sqrt(rate / 4.0 / len(gaps))
        assert stats.kstest(np.diff(times(found)[mine]), "expon", args=(0.0, 1.0 / rate)).pvalue > SMALLEST_P


@slow
def test_merged_arrivals_are_poisson_from_the_first_on() -> None:
    own = [{"name": "a", "arrivals": poisson(1.0)}, {"name": "b", "arrivals": poisson(3.0)}]
    given = Workload.model_validate({"requests": 2, **REST, "tenants": own})
    found = [draw(given, 5, replica) for replica in range(600)]
    assert stats.kstest([times(one)[1] for one in found], "expon", args=(0.0, 0.25)).pvalue > SMALLEST_P
    opens = [int(tenants_of(one)[0]) for one in found]
    assert abs(np.mean(opens) - 0.75) < SIGMAS * math.sqrt(0.1875 / len(found))


def test_merged_requests_are_in_order_of_time_each_with_what_it_has_alone() -> None:
    bursty = {"kind": "gamma", "rate_per_s": 5.0, "cv": 4.0}
    own = [
        {"name": "steady", "arrivals": {"kind": "constant", "rate_per_s": 2.0}, "prompt_tokens": lengths(3)},
        {"name": "bursty", "arrivals": bursty, "prompt_tokens": lengths((100, 200))},
    ]
    found = drawn(requests=500, output_tokens=lengths(4), tenants=own)
    assert len(times(found)) == 500
    assert times(found)[0] == 0.0
    assert np.all(np.diff(times(found)) >= 0.0)
    steady, rest = (tenants_of(found) == place for place in (0, 1))
    assert set(found.prompt_tokens[steady]) == {3}
    assert found.prompt_tokens[rest].min() >= 100
    np.testing.assert_allclose(np.diff(times(found)[steady]), 0.5, rtol=1e-9)
    # Fewer requests are the first of more.
    fewer = drawn(requests=200, output_tokens=lengths(4), tenants=own)
    assert np.array_equal(times(fewer), times(found)[:200])
    assert np.array_equal(fewer.prompt_tokens, found.prompt_tokens[:200])


def test_paced_arrivals_go_on_until_the_traces_end(trace: Document) -> None:
    early = {"name": "early", "arrivals": {**trace, "start_s": 10.0, "end_s": 60.0}}
    late = {"name": "late", "arrivals": {**trace, "start_s": 100.0, "end_s": 300.0, "rate_scale": 2.0}}
    paced = {"name": "paced", "arrivals": {"kind": "constant", "rate_per_s": 1.0}, **REST}
    found = drawn(tenants=[early, late, paced])
    of = [times(found)[tenants_of(found) == place] for place in range(3)]
    # Two requests a second are recorded; windows begin together, and paced arrivals with them.
    assert [len(one) for one in of] == [98, 392, 100]
    assert [one[0] for one in of] == [0.0, 0.0, 0.0]
    assert of[0][-1] == 49.5
    assert of[1][-1] == 99.75
    assert found.left_out == 2 + 8
    assert found.rate_per_s == (98 + 392 + 100 - 1) / 99.75
    cut = drawn(tenants=[early, late, paced], requests=50)
    assert np.array_equal(times(cut), times(found)[:50])
    with pytest.raises(InputError, match=r"^workload.requests: 591, but 590 come until"):
        drawn(tenants=[early, late, paced], requests=591)


def test_hashes_of_several_traces_are_several(tmp_path: Path) -> None:
    for name in ("a", "b"):
        row = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]}\n'
        (tmp_path / name).write_text(row % 0 + row % 10_000)
    own = [
        {"name": name, "arrivals": {"kind": "trace", "format": "mooncake", "path": str(tmp_path / name)}}
        for name in ("a", "b")
    ]
    paced = {"name": "c", "arrivals": {"kind": "constant", "rate_per_s": 1.0}, **REST}
    texts = list(contents(drawn(tenants=[*own, paced])))
    there = [((0, 512), (1, 600)), ((2, 512), (3, 600)), ()]
    assert texts == [*there, *[()] * 9, *there]


def test_lists_of_tenants_multiply_the_runs() -> None:
    own = [{"name": "a", "arrivals": poisson(0)}, {"name": "b", "prompt_tokens": {"kind": "constant"}}]
    own[0]["arrivals"]["rate_per_s"] = [1.0, 2.0]
    own[1]["prompt_tokens"]["value"] = [5, 6, 7]
    many = Workload.model_validate({"requests": 9, "arrivals": poisson(1.0), **REST, "tenants": own})
    assert count(many) == 6
    rates = [offered_rate_per_s(one, draw(one, 0, 0)) for one in single_valued(many)]
    assert rates == [2.0] * 3 + [3.0] * 3


def test_streams_of_parts_are_several() -> None:
    firsts = {stream(0, 0, "arrivals", part).random() for part in range(4)}
    assert len(firsts) == 4
    assert stream(0, 0, "arrivals").random() in firsts


# -- windows ---------------------------------------------------------------------------------------------


def test_a_window_by_the_clock_goes_over_midnight(trace: Document) -> None:
    whole = times(drawn(arrivals=trace))
    found = drawn(arrivals={**trace, "start_clock": "23:59:30", "end_clock": "00:01"})
    by_seconds = drawn(arrivals={**trace, "start_s": 90.0, "end_s": 180.0})
    assert same(found, by_seconds)
    assert 0 < len(times(found)) < len(whole)
    dated = {**trace, "start_clock": "2023-11-16 23:59:30", "end_clock": "2023-11-17T00:01:00"}
    assert same(drawn(arrivals=dated), found)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_a_scaled_window_has_the_scaled_rate(trace: Document, scale: float) -> None:
    window = {**trace, "start_s": 60.0, "end_s": 120.0, "rate_scale": scale}
    found = drawn(arrivals=window, output_tokens=lengths(5))
    assert len(times(found)) == 120
    assert found.rate_per_s == pytest.approx(2.0 * scale)
    assert times(found)[-1] == pytest.approx(59.5 / scale)


def test_windows_that_make_no_sense_are_one_line(trace: Document, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("t,p,o\n0,5,5\n1,5,5\n")
    table = {"kind": "trace", "format": "table", "path": str(plain), "columns": {"arrival": "t"}}
    for arrivals, says in (
        ({**trace, "start_clock": "12:00"}, "no request from start_clock 12:00 to end_s inf; "),
        ({**trace, "start_s": 900.0}, "no request from start_s 900 to end_s inf; "),
        ({**table, "start_clock": "12:00"}, r"start_clock: \S+ has no dates and times; start_s and end_s"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            drawn(arrivals=arrivals, **REST)
        assert str(caught.value).startswith("workload.arrivals")
        with pytest.raises(InputError, match=r"^workload\.tenants\[1\]\.arrivals"):
            drawn(arrivals=poisson(1), **REST, tenants=[{"name": "a"}, {"name": "b", "arrivals": arrivals}])


# -- bad input -------------------------------------------------------------------------------------------

A, B = {"name": "a"}, {"name": "b"}
OWN = {"name": "b", "arrivals": poisson(1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tenants": [A, B]}, "tenants[1].share: is missing; only one tenant may have the rest"),
        ({"tenants": [{**A, "share": 0.5}, {**B, "share": 0.4}]}, "tenants: have shares that sum to 0.9; 1"),
        ({"tenants": [{**A, "share": 1.0}, B]}, "tenants[1].share: is missing, and the others have 1"),
        ({"tenants": [{**A, "share": 0.5}, A]}, "tenants[1].name: is 'a', as that of a tenant before it"),
        ({"tenants": [{"name": "a.b"}]}, "tenants[0].name: is 'a.b'; up to 40 letters, digits, '_' and '-'"),
        ({"tenants": [{**A, "share": 0.0}]}, "tenants[0].share: is 0.0; above 0 to 1 is allowed"),
        ({"tenants": [{**A, "share": math.nan}]}, "tenants[0].share: is nan; a finite number is needed"),
        ({"tenants": [{**A, "shar": 1.0}]}, "tenants[0].shar: no such field; did you mean 'share'?"),
        ({"tenants": [{**A, "slo": {"ttft": 1}}]}, "tenants[0].slo.ttft: no such field; did you mean"),
        ({"tenants": [{**OWN, "share": 0.5}, A]}, "tenants[0].share: is given beside arrivals; only one"),
        ({"tenants": [OWN]}, "arrivals: are given, but each tenant has arrivals of its own; leave one out"),
        ({"arrivals": None, "tenants": [OWN, A]}, "tenants[1].arrivals: is missing; arrivals of the"),
        ({"arrivals": None}, "arrivals: is missing; when requests come has to be said"),
        ({"requests": None, "tenants": [A]}, "requests: is missing; only a recorded trace has its own"),
        ({"prompt_tokens": None, "tenants": [A]}, "tenants[0].prompt_tokens: is missing; only a recorded"),
        ({"distinct_prompts": 3, "tenants": [A]}, "distinct_prompts: is given beside tenants; only one"),
        (
            {"sessions": {"turns": lengths(2), "max_context_tokens": 900}, "tenants": [A]},
            "tenants: are given beside sessions; only one of them is allowed",
        ),
        (
            {"arrivals": {"kind": "closed_loop", "clients": 2}, "tenants": [A, OWN]},
            "arrivals: are a closed_loop, which is not merged with the arrivals of tenants",
        ),
        (
            {"arrivals": {**poisson(1), "span_intervals": 9.0}, "tenants": [A, OWN]},
            "arrivals.span_intervals: is given, and these arrivals are merged with others",
        ),
        (
            {"tenants": [A, {"name": "b", "arrivals": {"kind": "closed_loop", "clients": 2}}]},
            "tenants[1].arrivals.kind: is 'closed_loop' (allowed: constant, poisson, gamma, trace)",
        ),
    ],
)  # fmt: skip
def test_bad_tenants_are_one_line(changes: Document, says: str) -> None:
    given = {**workload(), **changes}
    load = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(InputError) as caught:
        scenario_of(document(workload=load), "file", Path())
    assert str(caught.value).startswith(f"file: workload.{says}")
    assert len(str(caught.value)) < 300


def test_strategies_of_one_length_take_no_tenants() -> None:
    given = document(workload=workload(tenants=[A]), strategies=[{"kind": "iteration_batching"}])
    with pytest.raises(InputError, match=r"strategies\[0\].kind: .* workload has tenants"):
        scenario_of(given, "file", Path())


def test_paths_of_tenants_are_from_the_scenarios_folder(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens\n7\n")
    own = {"name": "a", "prompt_tokens": {"kind": "empirical", "path": "lengths.csv", "column": "tokens"}}
    scenario = scenario_of(document(workload=workload(tenants=[own])), "file", tmp_path)
    assert isinstance(scenario, ServingScenario)
    assert set(draw(scenario.workload, 0, 0).prompt_tokens) == {7}


# -- figures ---------------------------------------------------------------------------------------------

CHAT = {
    "name": "chat",
    "share": 0.6,
    "output_tokens": lengths((2, 40)),
    "slo": {"ttft_s": 0.02, "tpot_s": 0.02},
}
BATCH = {"name": "batch", "prompt_tokens": lengths(900), "slo": {"e2e_s": 0.3}}
POLL = {"name": "poll", "arrivals": {"kind": "constant", "rate_per_s": 9.0}, "output_tokens": lengths(1)}
SHARED = workload(150, tenants=[CHAT, BATCH, POLL])


def test_each_request_is_judged_by_its_tenants_slo() -> None:
    found = outcome(document(workload=SHARED))
    rows = {name: np.asarray(column) for name, column in found.tables["requests.parquet"].items()}
    came = rows["measured"].astype(bool)
    ttft_s = rows["first_token_s"] - rows["arrival_s"]
    e2e_s = rows["finish_s"] - rows["arrival_s"]
    gaps = rows["output_tokens"] - 1
    tpot_s = np.where(gaps > 0, (e2e_s - ttft_s) / np.maximum(gaps, 1), 0.0)
    of = rows["tenant"]
    kept = np.where(
        of == "chat", (ttft_s <= 0.02) & (tpot_s <= 0.02), np.where(of == "batch", e2e_s <= 0.3, True)
    )
    assert set(of) == {"chat", "batch", "poll"}
    assert 0.0 < kept[came].mean() < 1.0
    assert value(found, "slo_attainment") == kept[came].mean()
    length_s = value(found, "window_end_s") - value(found, "window_begin_s")
    assert value(found, "goodput_per_s") == pytest.approx(kept[came].sum() / length_s)
    for name in ("chat", "batch"):
        mine = came & (of == name)
        assert value(found, f"tenant.{name}.slo_attainment") == kept[mine].mean()
        assert value(found, f"tenant.{name}.goodput_per_s") == pytest.approx(kept[mine].sum() / length_s)
        assert value(found, f"tenant.{name}.ttft_p99_s") == pytest.approx(np.percentile(ttft_s[mine], 99))
        assert value(found, f"tenant.{name}.e2e_mean_s") == pytest.approx(e2e_s[mine].mean())
        assert value(found, f"tenant.{name}.offered_per_s") == pytest.approx(mine.sum() / length_s)
        assert value(found, f"tenant.{name}.window_requests") == mine.sum()
    assert figure(found, "tenant.poll.slo_attainment").value is None
    assert figure(found, "tenant.poll.tpot_p50_s").value is None
    assert "what their tenants are promised" in found.answer
    assert "by tenant: chat " in found.answer
    assert found.slo == {"ttft_s": None, "tpot_s": None, "e2e_s": None}
    assert any("too few requests of tenants" in warning for warning in found.warnings)
    described = {row.metric: metric("serving", row.metric).meaning for row in found.rows}
    assert all(described.values())
    assert described["tenant.chat.ttft_p99_s"].endswith("99th percentile, of tenant chat")


def test_what_all_tenants_are_promised_alike_is_promised_to_all() -> None:
    def common(*slos: Document, **own: Any) -> Document:
        tenants = [{"name": f"t{i}", "slo": slo, "share": 0.5} for i, slo in enumerate(slos)]
        table = bench(document(workload=workload(9, tenants=tenants), **own))
        return dict(table.scenario.common_slo)

    nothing = {"ttft_s": None, "tpot_s": None, "e2e_s": None}
    assert common({"ttft_s": 1.0, "e2e_s": 3.0}, {"ttft_s": 2.0, "e2e_s": 3.0}) == {**nothing, "e2e_s": 3.0}
    assert common({"ttft_s": 1.0}, {"tpot_s": 1.0}) == nothing
    assert common(slo={"tpot_s": 0.5}) == {**nothing, "tpot_s": 0.5}


def test_a_request_takes_as_long_in_whichever_tenant_it_is() -> None:
    plain = only(document(workload=workload(60, output=(2, 40))))[1].served
    named = workload(60, output=(2, 40), tenants=[{**A, "share": 0.5}, B])
    found = only(document(workload=named))[1].served
    assert np.array_equal(found.finish_s, plain.finish_s)
    assert set(found.tenant) == {0, 1}


def test_clients_of_a_closed_loop_send_for_all_tenants() -> None:
    loop = {"kind": "closed_loop", "clients": 4}
    tenants = [{**A, "share": 0.5, "output_tokens": lengths(3)}, {**B, "output_tokens": lengths(30)}]
    found = only(document(workload=workload(60, loop, tenants=tenants)))[1].served
    assert set(zip(found.tenant.tolist(), found.output_tokens.tolist(), strict=True)) == {(0, 3), (1, 30)}


@slow
def test_the_report_has_a_table_by_tenant(tmp_path: Path) -> None:
    from simcore.api import run  # noqa: PLC0415

    folder = tmp_path / "run"
    run(document(workload=SHARED)).write(folder)
    found = {one.key: one for one in sections(read_run(folder))}
    table = found["tenants"].table
    assert [row[table.head.index("tenant")] for row in table.rows] == ["chat", "batch", "poll"]
    assert table.rows[0][table.head.index("promised")] == "TTFT ≤ 20\u00a0ms, TPOT ≤ 20\u00a0ms"
    assert "By tenant" in reports.build(folder).read_text(encoding="utf-8")


# -- plans -----------------------------------------------------------------------------------------------


def planned(folder: Path, **more: Any) -> Any:
    path = folder / "plan.yaml"
    path.write_text(repr({"base": document(workload=SHARED), "question": "rate", **more}))
    return load_plan(path)


def test_limits_are_those_of_tenants(tmp_path: Path) -> None:
    held = {(limit.metric, limit.value) for limit in planned(tmp_path).limits}
    chat = {("tenant.chat.ttft_p99_s", 0.02), ("tenant.chat.tpot_p99_s", 0.02)}
    assert held == {*chat, ("tenant.batch.e2e_p99_s", 0.3)}
    named = {"tenant.chat.ttft_p99.9_s": 0.5, "tenant.batch.slo_attainment": 0.9, "ttft_p99_s": 1.0}
    slow, share, _ = planned(tmp_path, constraints=named).limits
    assert slow.text() == "p99.9 TTFT of chat at most 500 ms"
    assert (share.at_most, share.text()) == (False, "slo attainment of batch at least 0.9")
    for wrong, says in (
        (
            {"tenant.chta.ttft_p99_s": 0.5},
            "tenant.chta.ttft_p99_s: no such metric; did you mean 'tenant.chat",
        ),
        ({"tenant.chat.itl_p99_s": 0.5}, "tenant.chat.itl_p99_s: no such metric"),
        ({"tenant.chat.slo_attainment": 1.5}, "slo_attainment: is 1.5; a share from 0 to 1 is needed"),
    ):
        with pytest.raises(InputError, match=says.replace(".", r"\.")):
            planned(tmp_path, constraints=wrong)


def test_a_run_of_a_plan_has_every_figure_that_a_limit_may_name(tmp_path: Path) -> None:
    scenario = scenario_of(document(workload=SHARED), "file", tmp_path)
    assert isinstance(scenario, ServingScenario)
    (point,) = Benches("file", 1).points(scenario)
    ran = simulated(Ask(point, 0))
    assert not ran.fault
    for name in ("ttft_p99.9_s", "e2e_p50_s", "slo_attainment", "goodput_per_s", "queue_mean_s"):
        assert ran.figures[f"tenant.chat.{name}"] is not None


def test_each_tenant_has_percentiles_of_its_own_requests(tmp_path: Path) -> None:
    """Answers of one token are there at once, those of 40 take 39 steps more."""
    own = [
        {"name": name, "share": 0.5, "prompt_tokens": lengths(10), "output_tokens": lengths(tokens)}
        for name, tokens in (("brief", 1), ("long", 40))
    ]
    load = {"requests": 40, "arrivals": poisson(5), "tenants": own}
    scenario = scenario_of(document(workload=load), "file", tmp_path)
    assert isinstance(scenario, ServingScenario)
    (point,) = Benches("file", 1).points(scenario)
    figures = simulated(Ask(point, 0)).figures
    brief, long = (
        [figures[f"tenant.{name}.e2e_{percent}_s"] or 0.0 for percent in ("p50", "p99", "p99.9")]
        for name in ("brief", "long")
    )
    assert 0.0 < brief[0] <= brief[1] <= brief[2] < long[0] <= long[1] <= long[2]


def test_own_arrivals_are_searched_as_multiples_of_their_rates(trace: Document) -> None:
    own = [
        {"name": "a"},
        {"name": "b", "arrivals": {"kind": "constant", "interval_s": 0.5}},
        {"name": "c", "arrivals": {**trace, "rate_scale": 2.0}},
    ]
    given = Workload.model_validate({"arrivals": poisson(3), **REST, "tenants": own})
    assert load_of(given, "file") == 1.0
    faster = at_load(given, 1.5)
    assert faster.arrivals.rates == [4.5]  # type: ignore[union-attr]
    assert faster.tenants[1].arrivals.rates == [3.0]  # type: ignore[union-attr]
    assert faster.tenants[2].arrivals.rate_scale == [3.0]  # type: ignore[union-attr]


def test_the_documents_example_is_a_workload() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "scenarios.md").read_text(encoding="utf-8")
    section = text[text.index("### Several tenants") :]
    example = section[section.index("```yaml\n") + 8 :]
    given = parse_yaml(example[: example.index("```")], "docs")
    found = bench(document(**given)).scenario
    assert [*found.slos] == ["chat", "batch", "polling"]
    drawn_ = draw(found.workload, 0, 0)
    assert set(tenants_of(drawn_)) == {0, 1, 2}
