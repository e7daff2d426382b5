"""Host time of engines: what a step takes longer, and the line before a serial front end."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from simcore.assembly import assemble
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.ops import op as ops
from simcore.ops.op import Floor, Op, Price, Work
from simcore.scenario import load_scenario, parse_scenario, resolved
from simcore.sim.runs import span_by_span
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.engines.presets import load_engine
from simcore.studies.serving.engines.products import Measured, Products, products
from simcore.studies.serving.host_time import HostTime, _WayOut, with_engine
from simcore.studies.serving.runner import Bench, Result
from simcore.studies.serving.strategies import label
from simcore.studies.serving.study import cases, refusal, run
from tests.thorough import slow

CONTINUOUS = {"kind": "continuous_batching", "token_budget": 1024}
STRATEGIES = [
    CONTINUOUS,
    {"kind": "temporal_fusion", "slots": 8},
    {"kind": "dynamic_batching", "window_s": 0.05, "max_batch": 8},
    {"kind": "concurrent_instances", "max_instances": 8},
    {"kind": "iteration_batching", "max_batch": 8},
]
POISSON = {"kind": "poisson", "rate_per_s": 40}
FRONT = {"request_s": 0.02, "prompt_token_s": 1e-4}
CALLING = FRONT | {"call_s": 5e-5}


def document(strategy: dict[str, Any], **fields: Any) -> dict[str, Any]:
    workload = {
        "requests": 30,
        "arrivals": POISSON,
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 200},
        "output_tokens": {"kind": "constant", "value": 20},
    } | fields.pop("workload", {})
    return {
        "name": "host",
        "study": "serving",
        "device": "h200-sxm",
        "profile": "none",
        "model": "llama-3.1-8b",
        "workload": workload,
        "strategies": [strategy],
        **fields,
    }


def bench_of(strategy: dict[str, Any], **fields: Any) -> Bench:
    study = assemble(parse_scenario(document(strategy, **fields), "host"), "host").study
    assert isinstance(study, DeviceStudy)
    return study.bench


def result_of(strategy: dict[str, Any], **fields: Any) -> Result:
    """Runs the first case; a broken law is an error."""
    bench = bench_of(strategy, **fields)
    return bench.run(next(cases(bench)), 0)


def entries(found: Result, request_s: float, prompt_token_s: float) -> np.ndarray[Any, Any]:
    """Returns when requests in the order of arrival leave one front end, by its formula."""
    served, free_s, left = found.served, 0.0, []
    for i in np.argsort(served.arrival_s, kind="stable"):
        free_s = max(free_s, served.arrival_s[i]) + request_s + prompt_token_s * served.prompt_tokens[i]
        left.append(free_s)
    return np.array(left)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_requests_pass_the_front_end_one_by_one_before_every_strategy(strategy: dict[str, Any]) -> None:
    found = result_of(strategy | {"host": FRONT})
    order = np.argsort(found.served.arrival_s, kind="stable")
    waited_s = found.served.scheduled_s[order] - entries(found, **FRONT)
    assert (waited_s >= -1e-9).all()
    # A server that is free takes a request as it comes out of the front end.
    if strategy["kind"] != "dynamic_batching":
        assert waited_s.min() == pytest.approx(0.0, abs=2e-4)
    assert found.served.finished.all()


def test_a_front_end_that_never_queues_delays_each_request_by_its_own_time() -> None:
    """Requests that come two seconds apart meet nobody."""
    slow = {"workload": {"arrivals": {"kind": "constant", "rate_per_s": 0.5}}}
    plain, delayed = (result_of(CONTINUOUS | {"host": host}, **slow).served for host in ({}, FRONT))
    own_s = FRONT["request_s"] + FRONT["prompt_token_s"] * plain.prompt_tokens
    np.testing.assert_allclose(delayed.first_token_s - plain.first_token_s, own_s, atol=1e-9)
    np.testing.assert_allclose(delayed.arrival_s, plain.arrival_s)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_prompts_that_are_late_keep_no_other_waiting(strategy: dict[str, Any]) -> None:
    """All come at once: a serial front end would let the last of them in after all others."""
    late, at_once = 1e-2, {"workload": {"arrivals": {"kind": "closed_loop", "clients": 30}}}
    served = result_of(strategy | {"host": {"prompt_token_late_s": late}}, **at_once).served
    assert served.finished.all()
    assert (served.scheduled_s >= served.arrival_s + late * served.prompt_tokens - 1e-9).all()
    if strategy["kind"] == "continuous_batching":
        first = served.prompt_tokens.argmin()
        assert served.scheduled_s[first] == pytest.approx(late * served.prompt_tokens[first], abs=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_a_late_prompt_may_be_overtaken(strategy: dict[str, Any]) -> None:
    """A short prompt that comes after a long one may enter the engine first, which breaks no law."""
    served = result_of(strategy | {"host": {"prompt_token_late_s": 1e-3}}).served
    assert served.finished.all()
    scheduled_s = served.scheduled_s[np.argsort(served.arrival_s, kind="stable")]
    assert (np.diff(scheduled_s) < 0.0).any()


def test_late_prompts_and_a_serial_front_end_add_up() -> None:
    slow = {"workload": {"arrivals": {"kind": "constant", "rate_per_s": 0.5}}}
    late = FRONT | {"prompt_token_late_s": 2e-4}
    plain, delayed = (result_of(CONTINUOUS | {"host": host}, **slow).served for host in ({}, late))
    own_s = FRONT["request_s"] + (FRONT["prompt_token_s"] + 2e-4) * plain.prompt_tokens
    np.testing.assert_allclose(delayed.first_token_s - plain.first_token_s, own_s, atol=1e-9)


@slow
def test_each_step_takes_its_host_s_time_too() -> None:
    """One client at a time: a token a step, a sequence in it."""
    one = {"workload": {"requests": 3, "arrivals": {"kind": "closed_loop", "clients": 1}}}
    plain, hosted = (
        result_of(CONTINUOUS | {"host": host}, **one).served
        for host in ({}, {"step_s": 3e-3, "sequence_s": 1e-3})
    )
    gaps = plain.output_tokens - 1
    longer_s = (hosted.finish_s - hosted.first_token_s) - (plain.finish_s - plain.first_token_s)
    np.testing.assert_allclose(longer_s / gaps, 4e-3, rtol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=lambda strategy: strategy["kind"])
def test_every_strategy_s_steps_take_longer(strategy: dict[str, Any]) -> None:
    """One client at a time: twenty tokens, each of a step with one sequence."""
    one = {"workload": {"requests": 3, "arrivals": {"kind": "closed_loop", "clients": 1}}}
    plain, hosted = (
        result_of(strategy | {"host": host}, **one).served
        for host in ({}, {"step_s": 1e-3, "sequence_s": 1e-4})
    )
    longer_s = (hosted.finish_s - hosted.scheduled_s) - (plain.finish_s - plain.scheduled_s)
    np.testing.assert_allclose(longer_s, 20 * 1.1e-3, rtol=0.06)


# -- calls of ops ------------------------------------------------------------------------------------------

ONE_CLIENT = {"requests": 3, "arrivals": {"kind": "closed_loop", "clients": 1}}


MEASURED: dict[str, Any] = {"profile": "local"}
TWO_RANKS: dict[str, Any] = {"devices": 2}


@pytest.mark.parametrize("fields", [{}, MEASURED, TWO_RANKS], ids=["datasheet", "measured", "two ranks"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
@pytest.mark.parametrize("call_s", [1e-9, 3e-5, 2e-4])
def test_a_step_with_a_prompt_waits_for_the_calls_of_its_ops(
    strategy: dict[str, Any], call_s: float, fields: dict[str, Any]
) -> None:
    """One client at a time: no step runs before a prompt's, so nothing of its calls is hidden. They run
    beside the card, whatever shares it. Temporal fusion computes first tokens in a step of their own, after
    it. A measured profile has what this project's schedule takes between steps, a millisecond."""
    ranks = fields.get("devices", 1)
    own = strategy | {"ranks": ranks}
    plain, called = (
        result_of(own | {"host": host}, workload=ONE_CLIENT, **fields).served
        for host in ({}, {"call_s": call_s})
    )
    model = bench_of(own, **fields).model(ranks)
    decoded_s = {"temporal_fusion": plain.finish_s - plain.first_token_s}.get(strategy["kind"], 0.0) / 19.0
    prompt_s = plain.first_token_s - plain.scheduled_s - decoded_s
    np.testing.assert_allclose(
        called.first_token_s - called.scheduled_s - decoded_s,
        np.maximum(prompt_s, call_s * model.called(model.prefill)),
        rtol=0.01,
        atol=1.5e-3 * (fields is MEASURED),
    )
    # Steps that only decode are captured graphs.
    np.testing.assert_allclose(
        called.finish_s - called.first_token_s,
        plain.finish_s - plain.first_token_s,
        rtol=1e-3,
        atol=1.5e-3 * (fields is MEASURED),
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_calls_come_one_after_another_and_earlier_where_steps_are_decided_ahead(ahead: int) -> None:
    """Calls that take longer than any op: each step with prompts ends with its calls."""
    call_s = 1e-4
    bench = bench_of(CONTINUOUS | {"ahead": ahead, "host": {"call_s": call_s}})
    steps = bench.run(next(cases(bench)), 0).journal
    model = bench.model(1)
    through_s, began_s, before_s, hidden = 0.0, 0.0, -1.0, 0
    for start_s, end_s, replays, decoding, prompts in zip(
        *(steps[name] for name in ("start_s", "end_s", "replays", "decoding", "prefill_tokens")), strict=True
    ):
        if prompts:
            calls_s = call_s * model.called(model.mixed if decoding else model.prefill)
            busy = ahead and start_s - before_s < 1e-4
            through_s = max(through_s, began_s if busy else start_s) + calls_s
            assert end_s == pytest.approx(through_s, rel=1e-9)
            hidden += end_s - start_s < 0.99 * calls_s
        began_s, before_s = (start_s if prompts else end_s - (end_s - start_s) / replays), end_s
    assert (hidden > 0) == (ahead > 0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_host_never_calls_two_ops_at_once(strategy: dict[str, Any], ahead: int) -> None:
    """Thirty prompts at once, each computed in a step of its own or with others: steps with prompts take the
    calls of all but the first of them at least."""
    if strategy["kind"] == "continuous_batching":
        strategy = strategy | {"ahead": ahead, "token_budget": 256, "prefill": "whole"}
    load = {"arrivals": {"kind": "poisson", "rate_per_s": 1e5}}
    bench = bench_of(strategy | {"host": {"call_s": 2e-4}}, workload=load)
    steps, model = bench.run(next(cases(bench)), 0).journal, bench.model(1)
    prompts = steps["prefill_tokens"] > 0
    calls_s = 2e-4 * min(model.called(model.prefill), model.called(model.mixed))
    whole_s = steps["end_s"][prompts].max() - steps["start_s"][prompts].min()
    assert prompts.sum() > 3
    assert whole_s >= (prompts.sum() - 1) * calls_s


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[3]], ids=lambda strategy: strategy["kind"])
def test_a_prompt_waits_for_its_own_calls_and_not_for_those_of_later_ones(strategy: dict[str, Any]) -> None:
    """The second prompt comes while the first is computed, which takes longer than its calls. Calls of the
    second end later than the first on the card, and follow those of the first."""
    load = {"requests": 2, "arrivals": {"kind": "constant", "rate_per_s": 200}}
    load |= {"prompt_tokens": {"kind": "constant", "value": 2000}}
    plain, called = (
        result_of(strategy | {"host": host}, workload=load).served for host in ({}, {"call_s": 8e-5})
    )
    model = bench_of(strategy).model(1)
    calls_s = 8e-5 * model.called(model.prefill)
    alone_s = plain.first_token_s[0] - plain.scheduled_s[0]
    assert calls_s < alone_s < 2.0 * calls_s
    assert called.first_token_s[0] == pytest.approx(plain.first_token_s[0], rel=0.01)
    assert called.first_token_s[1] >= called.scheduled_s[0] + 2.0 * calls_s


def test_whole_iterations_have_the_calls_of_their_ops() -> None:
    model = bench_of(CONTINUOUS).model(1)
    whole = replace(model, whole=True)
    assert len(whole.mixed.ops) == 2
    assert whole.called(whole.mixed) == model.called(model.mixed)
    assert whole.called(whole.prefill) == model.called(model.prefill)


def test_a_product_makes_its_own_inputs_of_8_bits_in_one_call() -> None:
    kernels = {"call_s": 1e-5, "quantizes": ["qkv", "o", "gate_up", "down"]}
    bench = bench_of(CONTINUOUS, dtype="fp8")
    plain, own = (bench.model(1, HostTime(**host)) for host in ({"call_s": 1e-5}, kernels))
    assert own.mixed.kernels > plain.mixed.kernels
    assert own.called(own.mixed) == plain.called(plain.mixed) == plain.mixed.kernels
    # The host's own part of a step is no call.
    hosted = bench.model(1, HostTime(call_s=1e-5, step_s=1e-3))
    assert hosted.called(hosted.mixed) == plain.called(plain.mixed)


SCALED = {"kind": "open_requests", "target": 4, "check_s": 0.1, "start_s": 0.2, "keep_s": 0.1}
TURNS = {"turns": {"kind": "constant", "value": 3}, "max_context_tokens": 4096, "think_s": 0.1}


@pytest.mark.parametrize(
    ("fields", "servers"),
    [
        ({"workload": {"arrivals": {"kind": "closed_loop", "clients": 6, "think_s": 0.01}}}, 1),
        ({"workload": {"sessions": TURNS}}, 1),
        ({"devices": 3}, 3),
        ({"devices": 3, "routing": "round_robin"}, 3),
        ({"devices": 3, "autoscaling": [SCALED]}, 3),
    ],
)
@pytest.mark.parametrize("out", [{}, {"answer_token_s": 1e-3}])
def test_laws_hold_behind_front_ends(fields: dict[str, Any], servers: int, out: dict[str, float]) -> None:
    """Steps are decided ahead, and their ops called."""
    found = result_of(CONTINUOUS | {"ahead": 1, "host": CALLING | out}, **fields)
    assert found.served.finished.all()
    assert len({*found.served.instance.tolist()}) <= servers
    assert (found.served.scheduled_s - found.served.arrival_s >= FRONT["request_s"] - 1e-9).all()


def test_each_server_has_a_front_end_of_its_own() -> None:
    """All come at once: a line of thirty, or three of ten."""
    at_once = {"workload": {"arrivals": {"kind": "closed_loop", "clients": 30}}}
    last_s = [
        result_of(
            CONTINUOUS | {"host": {"request_s": 1.0}}, devices=devices, **at_once
        ).served.scheduled_s.max()
        for devices in (1, 3)
    ]
    assert last_s == pytest.approx([30.0, 10.0], abs=0.01)


def test_inputs_of_8_bits_take_kernels_of_their_own_where_an_engine_says_so() -> None:
    """By the datasheet each takes its bytes, so that a prompt is as much later as they take."""
    host, prompt = {"quantizes": ["o", "down"]}, 6000
    alone = {"requests": 1, "prompt_tokens": {"kind": "constant", "value": prompt}}

    def ttft_s(dtype: str, host: dict[str, Any]) -> float:
        served = result_of(
            {"kind": "continuous_batching", "token_budget": 8192, "host": host}, dtype=dtype, workload=alone
        ).served
        return float(served.first_token_s[0] - served.arrival_s[0])

    longer_s = ttft_s("fp8", host) - ttft_s("fp8", {})
    config = bench_of({"kind": "continuous_batching"}).model(1).config
    moved = 3.0 * prompt * (config.hidden + config.intermediate) * config.layers
    assert 1.0 <= longer_s * load_device("h200-sxm").hbm_bytes_per_s / moved < 1.5
    assert ttft_s("bf16", host) == ttft_s("bf16", {})
    assert str(HostTime(**host)) == "quantizes o, down"
    assert HostTime(quantizes=("down", "o", "down")) == HostTime(quantizes=("o", "down"))


def test_no_host_time_is_no_change() -> None:
    plain, zero = (result_of(CONTINUOUS | given).served for given in ({}, {"host": {"step_s": 0.0}}))
    assert plain.finish_s.tolist() == zero.finish_s.tolist()


def test_a_real_machine_has_a_host_of_its_own() -> None:
    """Kernels of an engine's that its formats do not have are no host of another's."""
    says = "host: a real machine takes the time of its own host"
    kernels = {"quantizes": ["o"], "products_of": "vllm-0.19"}
    for host, dtype, reason in (
        ({}, "bf16", None),
        (FRONT, "bf16", says),
        ({"call_s": 1e-5}, "bf16", says),
        (kernels, "bf16", None),
        (kernels, "fp8", says),
    ):
        bench = bench_of(CONTINUOUS | {"host": host}, dtype=dtype)
        # Any other start of runs than the simulator's is a real machine's.
        real = replace(bench.hardware, start=span_by_span)
        measured = replace(bench, hardware=real)
        found = refusal(measured, next(cases(measured)))
        assert found is None if reason is None else reason in str(found)


def test_what_a_host_is_called() -> None:
    assert str(HostTime(step_s=1e-3, sequence_s=2e-5, request_s=4e-3, prompt_token_s=5e-6)) == (
        "host 1 ms a step + 20 us a sequence, front end 4 ms a request + 5 us a token"
    )
    assert str(HostTime(prompt_token_late_s=5e-6)) == (
        "front end 0 ms a request + 0 us a token, 5 us a token beside others"
    )
    assert str(HostTime()) == "no host time"
    assert str(HostTime(call_s=5e-5)) == "host calls ops of prompts in 50 us each"
    assert str(HostTime(answer_token_s=5e-5, memory_factor=1.05)) == (
        "way out 50 us a token, ops x 1 (arithmetic), x 1.05 (memory), x 1 (collectives)"
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_a_label_says_which_host(strategy: dict[str, Any]) -> None:
    plain, own = (
        label(parse_scenario(document(strategy | given), "host").strategies[0])  # type: ignore[union-attr, arg-type]
        for given in ({}, {"host": {"request_s": 4e-3}})
    )
    assert own == f"{plain}, front end 4 ms a request + 0 us a token"


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"request_s": -1.0}, r"strategies\[0\].host.request_s: "),
        ({"requests_s": 1.0}, r"strategies\[0\].host.requests_s: "),
        ({"step_s": 1e9}, r"strategies\[0\].host.step_s: "),
        ({"call_s": -1e-6}, r"strategies\[0\].host.call_s: "),
        ({"memory_factor": 0.0}, r"strategies\[0\].host.memory_factor: "),
    ],
)
def test_a_wrong_host_is_one_line(host: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^host: {says}") as raised:
        bench_of(CONTINUOUS | {"host": host})
    assert "\n" not in str(raised.value)


# -- the way out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_s", [0.0, 2e-4, 1e-3, 4e-3])
def test_a_backlog_is_that_of_its_steps_one_by_one(token_s: float) -> None:
    """Bursts of steps alike in closed form, and each of their steps by itself."""
    drawn, start_s, late_s = np.random.default_rng(3), 0.0, 0.0
    way, backlog_s = _WayOut(token_s), 0.0
    for _ in range(200):
        idle_s, each_s = drawn.choice([0.0, 0.02]), drawn.uniform(1e-3, 2e-2)
        replays, tokens = int(drawn.integers(1, 9)), int(drawn.integers(0, 12))
        backlog_s = max(0.0, backlog_s - idle_s)
        for _ in range(replays):
            backlog_s = max(0.0, backlog_s - each_s) + token_s * tokens
        end_s = start_s + idle_s + replays * each_s
        way.step(start_s + idle_s, end_s, replays, tokens)
        late_s = backlog_s - token_s * (tokens - 1) / 2 if tokens else backlog_s
        assert way.late(end_s) == pytest.approx(late_s, abs=1e-12)
        start_s = end_s
    assert late_s > 0.0 or token_s == 0.0


def test_a_way_out_that_is_saturated_sets_the_rate() -> None:
    """Thirty clients whose answers take 2 ms a token on their way out, more than any step: tokens come at
    that pace, and what the engine computes in the meantime waits."""
    load = {"workload": {"requests": 120, "arrivals": {"kind": "closed_loop", "clients": 30}}}
    found = result_of(CONTINUOUS | {"host": {"answer_token_s": 2e-3}}, **load).served
    tokens = found.output_tokens.sum()
    assert found.finish_s.max() == pytest.approx(2e-3 * tokens, rel=0.03)
    assert (found.finish_s >= found.first_token_s).all()


def test_a_way_out_that_is_idle_delays_each_token_by_its_own_time() -> None:
    slow = {"workload": {"arrivals": {"kind": "constant", "rate_per_s": 0.5}}}
    hosts: list[dict[str, float]] = [{}, {"answer_token_s": 1e-3}]
    plain, late = (result_of(CONTINUOUS | {"host": host}, **slow).served for host in hosts)
    np.testing.assert_allclose(late.first_token_s - plain.first_token_s, 1e-3, rtol=1e-9)
    np.testing.assert_allclose(late.finish_s - plain.finish_s, 1e-3, rtol=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
@pytest.mark.parametrize("arrivals", [POISSON, {"kind": "closed_loop", "clients": 12}])
def test_laws_hold_on_every_strategy_s_way_out(strategy: dict[str, Any], arrivals: dict[str, Any]) -> None:
    plain, late = (
        result_of(strategy | {"host": host}, workload={"arrivals": arrivals}).served
        for host in ({}, {"answer_token_s": 5e-4})
    )
    assert late.finished.all()
    assert (late.finish_s - late.arrival_s).mean() > (plain.finish_s - plain.arrival_s).mean()


# -- an engine's kernels -----------------------------------------------------------------------------------

FACTORS = {"arithmetic_factor": 1.5, "memory_factor": 2.0, "collective_factor": 3.0}


def plain_price(op: Op) -> Price:
    return Price(4e-6, 3e-6, 5e-6, "measured", "made up")


@pytest.mark.parametrize(
    ("floor", "ranks", "factor"),
    [
        (Floor(3e-6, 1e-6, 0.0), 1, 1.5),
        (Floor(1e-6, 3e-6, 0.0), 1, 2.0),
        (Floor(1e-6, 0.0, 3e-6), 4, 3.0),
    ],
)
def test_an_op_s_factor_is_that_of_what_bounds_it(floor: Floor, ranks: int, factor: float) -> None:
    plain = Op("matmul", "x", (("m", 8), ("ranks", ranks)), "bf16", lambda op: Work(1.0, 1.0))
    marked = replace(plain, shape=(*plain.shape, *HostTime(**FACTORS).marks))
    priced = with_engine(plain_price, lambda op: floor)
    found = priced(marked)
    assert (found.seconds, found.low_s, found.high_s) == pytest.approx(
        (factor * 4e-6, factor * 3e-6, factor * 5e-6)
    )
    assert priced(plain) == plain_price(plain)
    # A factor below one ends at the datasheet's bound.
    fast = replace(plain, shape=(*plain.shape, *HostTime(**dict.fromkeys(FACTORS, 0.5)).marks))
    assert priced(fast).seconds == pytest.approx(floor.seconds)


@pytest.mark.parametrize(
    ("rows", "times"),
    [(1, 0.954), (256, 1.312), (400, (1 - 143 / 255) * 3.127 + 143 / 255 * 1.138), (10**6, 1.03)],
)
def test_an_engine_s_own_products_take_what_its_table_says_at_their_rows(rows: int, times: float) -> None:
    """On a line between two numbers of rows; beyond the last as there. Other ops and formats stay."""
    marks = HostTime(products_of="vllm-0.19", memory_factor=2.0).marks
    price = with_engine(plain_price, lambda op: Floor(0.0, 1e-9, 0.0))

    def factor(op: Op) -> float:
        return price(replace(op, shape=(*op.shape, *marks))).seconds / plain_price(op).seconds

    assert factor(ops.matmul("qkv", m=rows, n=8, k=8, dtype="fp8")) == pytest.approx(2.0 * times)
    assert factor(ops.matmul("qkv", m=rows, n=8, k=8, dtype="bf16")) == pytest.approx(2.0)
    assert factor(ops.norm("norm", tokens=rows, hidden=8, dtype="fp8")) == pytest.approx(2.0)
    theirs = price(
        replace(
            ops.matmul("qkv", m=rows, n=8, k=8, dtype="fp8"), shape=(("m", rows), ("n", 8), ("k", 8), *marks)
        )
    )
    table = products()["vllm-0.19"]["fp8"]
    assert theirs.source == "published"
    assert theirs.low_s / theirs.seconds == pytest.approx(table.low * 3.0 / 4.0)
    assert theirs.high_s / theirs.seconds == pytest.approx(table.high * 5.0 / 4.0)


def test_an_engine_s_own_products_are_no_faster_than_the_datasheet_allows() -> None:
    """At a row the table has 0.954; 4 us are at 3.9 us of bound already."""
    marks = HostTime(products_of="vllm-0.19").marks
    op = ops.matmul("qkv", m=1, n=8, k=8, dtype="fp8")
    price = with_engine(plain_price, lambda op: Floor(0.0, 3.9e-6, 0.0))
    assert price(replace(op, shape=(*op.shape, *marks))).seconds == pytest.approx(3.9e-6)


def test_an_engine_s_ends_of_prices_are_no_faster_than_the_datasheet_allows() -> None:
    """A price by the datasheet begins at its bound, and an engine's too, whatever its table or a factor."""
    hosts = {"fp8": HostTime(products_of="vllm-0.19"), "bf16": HostTime(memory_factor=0.9)}
    for dtype, host in hosts.items():
        op = ops.matmul("qkv", m=1, n=8, k=8, dtype=dtype)
        at_bound = Price(4e-6, 3.9e-6, 5e-6, "roofline", "")
        price = with_engine(lambda op, found=at_bound: found, lambda op: Floor(0.0, 3.9e-6, 0.0))
        found = price(replace(op, shape=(*op.shape, *host.marks)))
        assert found.low_s == pytest.approx(3.9e-6)
        assert found.low_s <= found.seconds <= found.high_s


@pytest.mark.parametrize("dtype", ["fp8", "fp8_b128"])
def test_a_card_without_8_bits_has_no_kernels_of_them(dtype: str) -> None:
    """Its weights are read as they are and multiplied in bf16, by whatever engine."""
    for device, own in (("a6000", False), ("h100-sxm", True)):
        for engine in ("sglang", "vllm"):
            given = {"kind": "continuous_batching", "engine": engine}
            bench = bench_of(given, dtype=dtype, device=device)
            (strategy,) = bench.scenario.strategies
            model = bench.model(1, strategy.host)
            assert any(op.kind == "quantize" for op in model.mixed.ops) == own


def test_kernels_that_formats_have_no_use_for_are_named() -> None:
    """Not those that an engine brings along."""
    for dtype, named in (("bf16", "o and down have no inputs"), ("fp8", "")):
        given = CONTINUOUS | {"host": {"quantizes": ["o", "down"]}}
        both = document(given, dtype=dtype) | {"strategies": [given, CONTINUOUS | {"engine": "sglang"}]}
        found = [text for text in assemble(parse_scenario(both, "x"), "x").warnings if "quantizes" in text]
        assert len(found) == bool(named)
        assert all(f"strategies[0].host.quantizes: {named} of 8 bits here" in text for text in found)


def test_products_that_formats_have_no_use_for_are_named() -> None:
    for dtype, named in (("bf16", True), ("fp8", False)):
        given = CONTINUOUS | {"host": {"products_of": "vllm-0.19"}}
        found = assemble(parse_scenario(document(given, dtype=dtype), "x"), "x").warnings
        assert (
            any("strategies[0].host.products_of: no product here is in fp8" in one for one in found) == named
        )


def test_whose_products_are_taken_matters_in_their_formats_alone() -> None:
    """So that a service in bf16 is priced once, whichever engine it has."""
    theirs, ours = HostTime(products_of="vllm-0.19"), HostTime()
    for dtype, differ in (("bf16", False), ("fp8", True)):
        bench = bench_of({"kind": "continuous_batching"}, dtype=dtype)
        assert (bench.model(1, theirs) is not bench.model(1, ours)) == differ
    assert str(theirs) == "products of vllm-0.19"


def test_tables_of_products_are_of_known_engines_and_ascend() -> None:
    assert [*products()] == [*get_args(Measured)]
    for rows, factors in (((2, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((), ())):
        with pytest.raises(ValidationError, match="rows: have to ascend, with a factor each"):
            Products(rows, factors, 1.0, 1.0, "made up")
    for low, high in ((1.1, 1.2), (0.8, 0.9), (0.0, 1.0)):
        with pytest.raises(ValidationError, match="low, high: are"):
            Products((1,), (1.0,), low, high, "made up")


def test_factors_of_one_leave_a_model_s_ops_alone() -> None:
    assert HostTime(**dict.fromkeys(FACTORS, 1.0)).marks == ()


def test_steps_take_the_factor_of_their_ops_but_not_their_host() -> None:
    """One client: steps that read the weights, and 3 ms of host time that no kernel takes."""
    one = {"workload": {"requests": 3, "arrivals": {"kind": "closed_loop", "clients": 1}}}
    tpot_s = []
    for factor in (1.0, 1.5):
        host = {"step_s": 3e-3, "memory_factor": factor, "arithmetic_factor": factor}
        served = result_of(CONTINUOUS | {"host": host}, **one).served
        tpot_s.append((served.finish_s - served.first_token_s) / (served.output_tokens - 1) - 3e-3)
    np.testing.assert_allclose(tpot_s[1], 1.5 * tpot_s[0], rtol=0.01)


@slow
def test_intervals_are_as_wide_as_what_the_fit_leaves() -> None:
    """A TPOT that was a quarter off where it was fitted, beside an interval of prices: in quadrature."""
    bench = bench_of(CONTINUOUS | {"host": {"tpot_within": 0.25, "ttft_within": 1.0}}, price_interval=True)
    plain = bench_of(CONTINUOUS, price_interval=True)
    wide, narrow = (
        {row.metric: row for row in run(each, lambda *_: None).rows if row.metric.endswith("_by_prices")}
        for each in (bench, plain)
    )
    for name, share in (("tpot_p50_s", 0.25), ("ttft_p99_s", 1.0), ("e2e_p50_s", 0.0)):
        one, other = wide[f"{name}_by_prices"], narrow[f"{name}_by_prices"]
        assert one.value == pytest.approx(other.value)
        for end, plain_end in ((one.low, other.low), (one.high, other.high)):
            assert abs(np.log(end / one.value)) == pytest.approx(  # type: ignore[operator, arg-type]
                np.hypot(np.log(plain_end / one.value), np.log1p(share))  # type: ignore[operator, arg-type]
            )


# -- an engine in a file of one's own ----------------------------------------------------------------------

OWN = {
    "name": "my-service",
    "base": "vllm-0.19",
    "description": "ours",
    "fields": {"host": {"step_s": 1e-3, "request_s": 4e-3}},
    "sources": {"host": "measured by us"},
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "my-service.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def scenario_file(folder: Path, engine: str, **fields: Any) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(document({"kind": "continuous_batching", "engine": engine, **fields})))
    return path


def test_a_file_of_one_s_own_stands_on_its_base(tmp_path: Path) -> None:
    written(tmp_path, OWN)
    found = load_scenario(scenario_file(tmp_path, "my-service.yaml", host={"step_s": 2e-3}))
    parts = assemble(found, "host")
    (strategy,) = parts.scenario.strategies  # type: ignore[union-attr]
    # The scenario's field, then the file's, then those of vLLM 0.19 on this card.
    assert strategy.host == HostTime(step_s=2e-3, request_s=4e-3, products_of="vllm-0.19", quantizes=("o",))  # type: ignore[union-attr]
    assert strategy.token_budget == [8192]  # type: ignore[union-attr]
    assert label(strategy).startswith("my-service, 8,192 tokens a step, up to 1024, host 2 ms")  # type: ignore[arg-type]
    again = parse_scenario(yaml.safe_load(yaml.safe_dump(resolved(parts.scenario))), "again")
    assert again == parts.scenario


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": "vlm-0.19"}, "base: unknown engine 'vlm-0.19'"),
        ({"fields": {"host": {"step_s": -1.0}}}, "fields.host.step_s: is -1.0"),
        ({"fields": {"hosts": {}}, "sources": {"hosts": "x"}}, "unknown field 'hosts'"),
        ({"sources": {}}, "missing key 'sources.host'"),
        ({"base": None}, "base: is missing; one of sglang-0.5"),
        ({"cases": [{"memory_gib": [0, 1], "fields": {"token_budget": 256}}]}, "cases: only presets"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = written(tmp_path, OWN | change)
    with pytest.raises(InputError, match=f"my-service.yaml.*{says}") as raised:
        assemble(load_scenario(scenario_file(tmp_path, str(path))), "host")
    assert "\n" not in str(raised.value)


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path, OWN)
    assert load_engine(str(path)).fields["host"]["step_s"] == 1e-3
    assert load_engine(str(path)) == load_engine(str(path))
    written(tmp_path, OWN | {"fields": {"host": {"step_s": 2.5e-3, "memory_factor": 1.02}}})
    found = load_engine(str(path)).fields["host"]
    assert (found["step_s"], found["memory_factor"]) == (2.5e-3, 1.02)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read"):
        assemble(load_scenario(scenario_file(tmp_path, "none.yaml")), "host")
