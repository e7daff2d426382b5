"""Scenario files of the study `serving`: what is accepted, what its lists multiply into, and that every
refusal is one line with the field as its user wrote it."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import simcore
from simcore.input.fields import count, kinds_of, single_valued
from simcore.input.files import InputError, listed
from simcore.scenario import Scenario, json_schema, load_scenario, parse_scenario, resolved
from simcore.studies.decode.scenario import DecodeScenario
from simcore.studies.fields import HostOverheads
from simcore.studies.serving import strategies
from simcore.studies.serving.scenario import ServingScenario, points
from tests.thorough import examples, slow

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ("decode", "serving", "tiling", "linear_attention", "decode_attention", "prompt")
KNOWN = f"(allowed: {', '.join(STUDIES)})"
GOOD: dict[str, Any] = {
    "name": "x",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "devices": [2, 4],
    "workload": {
        "arrivals": {"kind": "poisson", "rate_per_s": [2, 8.5]},
        "requests": 200,
        "prompt_tokens": {"kind": "lognormal", "mean": 512, "cv": 0.8, "max": 4096},
        "output_tokens": {"kind": "uniform", "low": 64, "high": [128, 384]},
    },
    "strategies": [
        {"kind": "temporal_fusion", "slots": [16, 32], "shuffle": [True, False]},
        {"kind": "dynamic_batching", "window_s": 0.5},
        {"kind": "concurrent_instances"},
        {"kind": "continuous_batching", "order": ["fcfs", "shortest_first"], "ranks": [1, 2]},
    ],
    "slo": {"ttft_s": 0.5, "tpot_s": 0.03},
    "replicas": 5,
}
CONSTANT = {"kind": "constant", "value": 128}
TRACE = {"kind": "trace", "path": "a.csv", "format": "azure"}
ITERATIONS = {"kind": "iteration_batching"}
MISSING = object()
# Fields of numbers with a value each that is too small and one that is too big.
NUMBERS: list[tuple[str, Any, Any]] = [
    ("devices", 0, 1025),
    ("kv_blocks", 0, 2**41),
    ("memory_share", 0.0, 1.1),
    ("strategies.3.memory.share", 0.0, 1.1),
    ("strategies.3.memory.reserve_bytes", -1.0, 1e19),
    ("replicas", 0, 1001),
    ("seed", -1, 2**63),
    ("workload.requests", 0, 10_000_001),
    ("workload.max_tokens", 0, 10_000_001),
    ("workload.arrivals.rate_per_s", 0, 1e7),
    ("workload.arrivals.span_intervals", 1e-10, 1e10),
    ("workload.prompt_tokens.mean", 0.5, 1e8),
    ("workload.prompt_tokens.cv", 0.0, 101),
    ("workload.prompt_tokens.max", 0, 10_000_001),
    ("workload.output_tokens.low", 0, 10_000_001),
    ("workload.output_tokens.high", 0, 10_000_001),
    ("strategies.0.slots", 0, 65_537),
    ("strategies.0.ranks", 0, 1025),
    ("strategies.1.window_s", -0.1, 1e7),
    ("strategies.1.max_batch", 0, 65_537),
    ("strategies.2.max_instances", 0, 65_537),
    ("strategies.3.token_budget", 0, 10_000_001),
    ("strategies.3.max_sequences", 0, 65_537),
    ("strategies.3.block_tokens", 0, 65_537),
    ("slo.ttft_s", 0, 1e7),
    ("slo.tpot_s", 0.0, 1e7),
    ("slo.e2e_s", -1.0, 1e7),
    ("overheads.launch_s", -1e-6, 2.0),
    ("contention.reuse_s", -1e-3, 1e7),
]
MANY = {
    "devices",
    "workload.requests",
    "workload.arrivals.rate_per_s",
    "workload.output_tokens.high",
    "strategies.0.slots",
    "strategies.0.ranks",
    "strategies.1.window_s",
    "strategies.1.max_batch",
    "strategies.2.max_instances",
    "strategies.3.token_budget",
    "strategies.3.max_sequences",
}
# None stands for the default.
OPTIONAL = {
    "kv_blocks",
    "memory_share",
    "workload.max_tokens",
    "workload.arrivals.span_intervals",
    "overheads.launch_s",
}
OPTIONAL |= {"slo.ttft_s", "slo.tpot_s", "slo.e2e_s"}
NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, "5", "many", True, {"a": 1}, [[1]], 10**400]


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """GOOD with other values at dotted paths; MISSING takes one away."""
    document: Any = copy.deepcopy(GOOD)
    for path, value in changes:
        if path.startswith("contention.") and "contention" not in document:
            document["contention"] = {"kind": "shared_memory"}
        place = document
        *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        for part in parents:
            place = place[part] if isinstance(place, list) else place.setdefault(part, {})
        if value is MISSING:
            del place[last]
        else:
            place[last] = value
    return dict(document)


def as_written(path: str) -> str:
    return re.sub(r"\.(\d+)", r"[\1]", path)


def complaint(document: Any) -> str:
    """The line that a document is refused with, less the name of the file."""
    with pytest.raises(InputError) as raised:
        parse_scenario(document, "x.yaml")
    line = str(raised.value)
    assert line.startswith("x.yaml: ")
    assert "\n" not in line
    assert "[key]" not in line
    return line.removeprefix("x.yaml: ")


@pytest.mark.parametrize(("given", "missing"), [("wait_steps", "wait_tokens"), ("wait_tokens", "wait_steps")])
def test_prompts_that_wait_need_to_know_for_what_and_how_long(given: str, missing: str) -> None:
    line = complaint(changed((f"strategies.3.{given}", 5)))
    assert line.startswith(f"strategies[3].{missing}: is 0")


@pytest.mark.parametrize(
    ("reserve", "says"),
    [
        ({"share": 1.5}, "share: is 1.5"),
        ({"share": 0.5, "least": 0.7, "steps": 3}, "least: is 0.7; at most share, 0.5, is allowed"),
        ({"share": 0.5, "least": 0.1}, "steps: is 0, in which no share falls"),
        ({"steps": 5}, "least: is not below share"),
        ({"most_tokens": 0}, "most_tokens: is 0"),
        ({"shares": 1}, "shares: no such field; did you mean 'share'?"),
    ],
)
def test_wrong_room_for_answers_is_one_line(reserve: dict[str, Any], says: str) -> None:
    assert complaint(changed(("strategies.3.reserve", reserve))).startswith(f"strategies[3].reserve.{says}")


def parsed(*changes: tuple[str, Any]) -> ServingScenario:
    scenario = parse_scenario(changed(*changes), "x.yaml")
    assert isinstance(scenario, ServingScenario)
    return scenario


# -- what is accepted ----------------------------------------------------------------------------------


def test_studies_are_told_apart() -> None:
    assert isinstance(parsed(), ServingScenario)
    assert isinstance(load_scenario(ROOT / "scenarios/papers/alspec_n150.yaml"), DecodeScenario)
    studies = {"LinearAttentionScenario", "DecodeAttentionScenario", "TilingScenario", "PromptScenario"}
    assert {each.__name__ for each in Scenario.__args__} - studies == {"DecodeScenario", "ServingScenario"}


def test_defaults_are_written_out_and_the_result_is_a_scenario_again() -> None:
    scenario = parsed()
    written = resolved(scenario)
    assert list(written)[:4] == ["name", "study", "device", "model"]
    assert written["routing"] == "least_loaded"
    assert written["kv_blocks"] is None
    assert written["contention"] == {"kind": "shared_memory", "reuse_s": 0.0}
    assert written["slo"] == {"ttft_s": 0.5, "tpot_s": 0.03, "e2e_s": None}
    assert written["overheads"] == HostOverheads().model_dump()
    costs = ["step_s", "sequence_s", "call_s", "request_s", "prompt_token_s", "prompt_token_late_s"]
    costs += ["answer_token_s"]
    no_host: dict[str, Any] = dict.fromkeys(costs, 0.0)
    no_host |= dict.fromkeys(("arithmetic_factor", "memory_factor", "collective_factor"), 1.0)
    no_host |= {"products_of": None, "quantizes": [], "tpot_within": 0.0, "ttft_within": 0.0}
    assert written["strategies"][1] == {
        "kind": "dynamic_batching", "window_s": [0.5], "max_batch": [32], "ranks": [1], "host": no_host,
    }  # fmt: skip
    assert written["strategies"][3] == {
        "kind": "continuous_batching",
        "engine": None,
        "token_budget": [2048],
        "max_sequences": [256],
        "block_tokens": 16,
        "order": ["fcfs", "shortest_first"],
        "prefill": ["chunked"],
        "wait_steps": 0,
        "wait_tokens": 0,
        "ahead": 0,
        "prefix_caching": False,
        "reserve": None,
        "preempted": "first",
        "memory": {
            "share": 0.9,
            "share_of": "total",
            "driver_bytes": 0.0,
            "group_driver_bytes": 0.0,
            "reserve_bytes": 0.0,
            "group_reserve_bytes": 0.0,
            "peak": "widest_step",
            "splits_embedding": False,
        },
        "ranks": [1, 2],
        "host": no_host,
    }
    assert written["memory_share"] is None
    assert parse_scenario(yaml.safe_load(yaml.safe_dump(written)), "again") == scenario


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("workload.arrivals", {"kind": "constant", "interval_s": [0.5, 1]}),
        ("workload.arrivals", {"kind": "poisson", "interval_s": 0.5, "span_intervals": 25.5}),
        ("workload.arrivals", {"kind": "gamma", "rate_per_s": 2, "cv": 4}),
        ("workload.arrivals", {"kind": "closed_loop", "clients": [1, 64], "think_s": 0.5}),
        ("workload.arrivals", TRACE),
        ("workload.output_tokens", {"kind": "empirical", "values": [5, 5, 9]}),
        ("workload.output_tokens", {"kind": "empirical", "path": "a.csv", "column": "n"}),
        ("workload.max_tokens", 1),
        ("contention", {"kind": "throughput", "gain": 0.05}),
        ("contention", {"kind": "none"}),
        ("routing", "round_robin"),
        ("kv_blocks", 1),
        ("memory_share", 0.5),
        ("strategies.3.memory", {"share": 0.8, "share_of": "rest"}),
        ("strategies.3.engine", "vllm-0.19"),
        ("slo", {}),
        ("strategies.3.token_budget", 1),
        ("strategies.1.window_s", [0, 1e6]),
        ("profile", "none"),
        ("published", []),
    ],
)
def test_what_is_allowed_is_accepted_and_comes_back_from_its_resolved_form(path: str, value: Any) -> None:
    scenario = parsed((path, value))
    assert parse_scenario(json.loads(json.dumps(resolved(scenario))), "again") == scenario


def test_a_trace_needs_neither_requests_nor_lengths() -> None:
    scenario = parsed(("workload", {"arrivals": TRACE}))
    assert [point.requests for point in points(scenario)] == [None, None]


# -- what lists multiply into --------------------------------------------------------------------------


def test_points_are_the_product_of_the_workload_s_lists_in_their_order() -> None:
    found = list(points(parsed(("workload.requests", [1, 32]))))
    assert (
        [
            (p.devices, p.rate_per_s, p.requests, p.workload.output_tokens.high)  # type: ignore[union-attr]
            for p in found[:5]
        ]
        == [
            (2, 2.0, 1, [128]),
            (2, 2.0, 1, [384]),
            (2, 2.0, 32, [128]),
            (2, 2.0, 32, [384]),
            (2, 8.5, 1, [128]),
        ]
    )
    assert len(found) == len({repr(p) for p in found}) == 2 * 2 * 2 * 2
    assert all(count(p.workload) == 1 for p in found)
    assert {(p.rate_scale, p.clients) for p in found} == {(1.0, None)}


def test_points_of_intervals_traces_and_closed_loops() -> None:
    arrivals: dict[str, Any] = {"kind": "constant", "interval_s": [0.5, 4]}
    found = list(points(parsed(("devices", 2), ("workload.arrivals", arrivals))))
    assert [p.rate_per_s for p in found] == [2.0, 2.0, 0.25, 0.25]
    assert found[-1].workload.arrivals.interval_s == [4.0]  # type: ignore[union-attr]
    arrivals = {"kind": "closed_loop", "clients": [1, 8]}
    found = list(points(parsed(("devices", 2), ("workload.arrivals", arrivals))))
    assert [(p.rate_per_s, p.clients) for p in found] == [(None, 1), (None, 1), (None, 8), (None, 8)]
    found = list(points(parsed(("workload", {"arrivals": {**TRACE, "rate_scale": [1, 2]}}))))
    assert [(p.devices, p.rate_per_s, p.rate_scale) for p in found] == [
        (2, None, 1.0), (2, None, 2.0), (4, None, 1.0), (4, None, 2.0),
    ]  # fmt: skip


def test_a_list_of_lengths_to_draw_from_multiplies_nothing() -> None:
    scenario = parsed(("workload.output_tokens", {"kind": "empirical", "values": [5, 5, 9]}))
    assert count(scenario.workload) == 2
    assert {tuple(p.workload.output_tokens.values) for p in points(scenario)} == {(5, 5, 9)}  # type: ignore[union-attr, arg-type]


def test_variants_are_the_product_of_a_strategy_s_lists() -> None:
    fusion, batching, instances, continuous = map(single_valued, parsed().strategies)
    assert [(v.slots, v.shuffle) for v in fusion] == [  # type: ignore[union-attr]
        ([16], [True]), ([16], [False]), ([32], [True]), ([32], [False]),
    ]  # fmt: skip
    assert [v.model_dump(exclude={"host"}) for v in batching] == [
        {"kind": "dynamic_batching", "window_s": [0.5], "max_batch": [32], "ranks": [1]}
    ]
    assert len(list(instances)) == 1
    assert [(v.order, v.ranks) for v in continuous] == [  # type: ignore[union-attr]
        (["fcfs"], [1]), (["fcfs"], [2]), (["shortest_first"], [1]), (["shortest_first"], [2]),
    ]  # fmt: skip


def test_copies_are_as_many_as_counted() -> None:
    for strategy in parsed().strategies:
        assert len(list(single_valued(strategy))) == count(strategy)
    assert len(list(single_valued(parsed().workload))) == count(parsed().workload) == 4


# -- which study ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("study", MISSING),
            f"study: is missing {KNOWN}",
        ),
        (
            ("study", "servin"),
            f"study: is 'servin'; did you mean 'serving'? {KNOWN}",
        ),
        (
            ("study", "Decode"),
            f"study: is 'Decode'; did you mean 'decode'? {KNOWN}",
        ),
        (
            ("study", "xyz"),
            f"study: is 'xyz' {KNOWN}",
        ),
        (
            ("study", None),
            f"study: is None {KNOWN}",
        ),
        (("study", 5), f"study: is 5 {KNOWN}"),
        (
            ("study", True),
            f"study: is True {KNOWN}",
        ),
        (("study", ["serving"]), "study: is ['serving']"),
        (("study", {"serving": 1}), "study: is {'serving': 1}"),
    ],
)
def test_a_missing_or_misspelt_study_is_one_line_with_both(change: tuple[str, Any], says: str) -> None:
    line = complaint(changed(change))
    assert line.startswith(says)
    assert f"{KNOWN}" in line


def test_a_misspelt_field_that_tells_apart_is_told_of_as_such() -> None:
    document = changed(("study", MISSING), ("stduy", "serving"))
    assert complaint(document) == "stduy: no such field; did you mean 'study'?"
    document = changed(("strategies.0", {"knd": "temporal_fusion"}))
    assert complaint(document) == "strategies[0].knd: no such field; did you mean 'kind'?"


def test_the_fields_of_the_other_study_are_no_fields() -> None:
    line = complaint(changed(("context_tokens", 1024)))
    assert line.startswith("context_tokens: no such field")
    assert "workload" in line
    assert "batch" not in line
    decode = {key: GOOD[key] for key in ("name", "device", "model")}
    line = complaint({**decode, "study": "decode", "context_tokens": 1, "strategies": GOOD["strategies"]})
    assert line.startswith("strategies[0].kind: is 'temporal_fusion'")
    assert "allowed: tensor_parallel, alspec, alspec_pipelined" in line


# -- every fault is one line with its field ------------------------------------------------------------


@pytest.mark.parametrize(("path", "low", "high"), NUMBERS)
def test_numbers_outside_their_bounds_are_refused(path: str, low: Any, high: Any) -> None:
    for value in (low, high):
        line = complaint(changed((path, value)))
        said, _, allowed = line.partition("; ")
        assert said == f"{as_written(path)}: is {value!r}"
        found = re.fullmatch(r"(?:above )?(\S+) to (?:below )?(\S+) is allowed", allowed)
        assert found is not None, line
        least, most = (float(end.replace(",", "")) for end in found.groups())
        assert not least < value < most
        assert low <= least < most <= high


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("path", [path for path, _, _ in NUMBERS])
def test_what_is_no_number_is_refused(path: str, value: Any) -> None:
    line = complaint(changed((path, value)))
    field = as_written(path) + ("[0]" if path in MANY and isinstance(value, list) else "")
    assert line.startswith(f"{field}: is ")
    assert "; " in line
    assert len(line) < 200


@pytest.mark.parametrize("path", [path for path, _, _ in NUMBERS])
def test_null_stands_for_a_default_or_is_refused(path: str) -> None:
    if path in OPTIONAL:
        parsed((path, None))
    elif path == "workload.arrivals.rate_per_s":
        assert complaint(changed((path, None))) == (
            "workload.arrivals.rate_per_s: is missing; either rate_per_s or interval_s is needed"
        )
    elif path == "workload.requests":
        assert complaint(changed((path, None))) == (
            "workload.requests: is missing; only a recorded trace has its own"
        )
    else:
        assert complaint(changed((path, None))).startswith(f"{as_written(path)}: is None; ")


@pytest.mark.parametrize("path", [path for path, _, _ in NUMBERS])
def test_lists_stand_only_where_they_multiply_and_name_their_place(path: str) -> None:
    field = as_written(path)
    if path not in MANY:
        assert complaint(changed((path, [1, 2]))).startswith(f"{field}: is [1, 2]; a")
        return
    assert complaint(changed((path, []))) == f"{field}: is []; at least one value is needed"
    assert complaint(changed((path, [4, "4"]))).startswith(f"{field}[1]: is '4'; ")
    assert complaint(changed((path, [4, None]))).startswith(f"{field}[1]: is None; ")
    assert complaint(changed((path, [4, math.nan]))).startswith(f"{field}[1]: is nan; ")
    line = complaint(changed((path, [4, 8, 4])))
    assert re.fullmatch(re.escape(field) + r": a value is given twice: 4(\.0)?; each may be given once", line)


LENGTHS = "constant, uniform, lognormal, empirical"
STRATEGIES = listed(kinds_of(strategies.ServingStrategies))


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("workload", ""),
        ("workload.arrivals", "constant, poisson, gamma, trace, closed_loop, of_tenants"),
        ("workload.prompt_tokens", LENGTHS),
        ("workload.output_tokens", LENGTHS),
        ("slo", ""),
        ("overheads", ""),
        ("contention", "shared_memory, throughput, none"),
        ("strategies.0", STRATEGIES),
        ("strategies.3", STRATEGIES),
    ],
)
@pytest.mark.parametrize("value", [5, "poisson", [], [{"kind": "poisson"}], True, math.nan])
def test_where_fields_are_needed_nothing_else_will_do(path: str, kinds: str, value: Any) -> None:
    line = complaint(changed((path, value)))
    needed = f"a mapping of fields is needed{kinds and f', with kind: {kinds}'}"
    assert line == f"{as_written(path)}: is {value!r}; {needed}"


@pytest.mark.parametrize("path", ["name", "model", "profile", "link", "dtype"])
@pytest.mark.parametrize("value", [5, True, ["a"], {"a": 1}, math.nan])
def test_where_text_is_needed_nothing_else_will_do(path: str, value: Any) -> None:
    assert complaint(changed((path, value))) == f"{path}: is {value!r}; text is needed"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", "worklod"),
        ("workload", "request"),
        ("workload.arrivals", "rate"),
        ("workload.prompt_tokens", "maximum"),
        ("workload.output_tokens", "hihg"),
        ("strategies.0", "slot"),
        ("strategies.1", "windows_s"),
        ("strategies.2", "instances"),
        ("strategies.3", "budget"),
        ("slo", "ttft"),
        ("overheads", "launch"),
        ("contention", "reuse"),
    ],
)
def test_unknown_fields_are_named_with_what_is_allowed_there(path: str, name: str) -> None:
    near = {"worklod": "workload", "request": "requests", "maximum": "max", "hihg": "high", "slot": "slots"}
    near |= {"rate": "rate_per_s", "windows_s": "window_s", "ttft": "ttft_s", "launch": "launch_s"}
    near |= {"instances": "max_instances", "budget": "token_budget", "reuse": "reuse_s"}
    line = complaint(changed((f"{path}.{name}".lstrip("."), 1)))
    assert line.startswith(
        f"{as_written(path)}.{name}: no such field; did you mean {near[name]!r}? (allowed: ".lstrip(".")
    )


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("workload.arrivals.kind", "poison", "; did you mean 'poisson'? (allowed: constant, poisson, gamma,"),
        ("workload.prompt_tokens.kind", "normal", "; did you mean 'lognormal'? (allowed: constant, uniform,"),
        ("workload.output_tokens.kind", "unform", "; did you mean 'uniform'? (allowed: "),
        ("strategies.1.kind", "dynamic", "; did you mean 'dynamic_batching'? (allowed: temporal_fusion, "),
        ("strategies.1.kind", 5, " (allowed: temporal_fusion, dynamic_batching, concurrent_instances, "),
        ("contention.kind", "no", "; did you mean 'none'? (allowed: shared_memory, throughput, none)"),
        ("contention.kind", None, " (allowed: shared_memory, throughput, none)"),
        (
            "routing",
            "roundrobin",
            "; did you mean 'round_robin'? (allowed: round_robin, least_loaded, prefix_aware)",
        ),
        ("routing", ["round_robin"], " (allowed: round_robin, least_loaded, prefix_aware)"),
        ("strategies.3.order", "fifo", "; did you mean 'fcfs'? (allowed: fcfs, shortest_first)"),
    ],
)
def test_words_that_are_none_of_the_allowed_ones(path: str, value: Any, says: str) -> None:
    line = complaint(changed((path, value)))
    assert line.startswith(f"{as_written(path)}: is {value!r}")
    assert says in line


@pytest.mark.parametrize(
    "path",
    [
        *("workload.arrivals.kind", "workload.prompt_tokens.kind", "strategies.2.kind"),
        *("workload.arrivals", "workload", "strategies", "strategies.1.window_s", "name", "device", "model"),
    ],
)
def test_what_is_missing_is_named(path: str) -> None:
    assert complaint(changed((path, MISSING))).startswith(f"{as_written(path)}: is missing")


FAULTS: list[tuple[list[tuple[str, Any]], str]] = [
    ([("strategies.0.ranks", 4)],
     "strategies[0].ranks: is 4; it must divide every value of devices, and 2 is no multiple of it"),
    ([("strategies.3.ranks", [1, 3])],
     "strategies[3].ranks: is 3; it must divide every value of devices, and 2 is no multiple of it"),
    ([("strategies.1", ITERATIONS)],
     "strategies[1].kind: is 'iteration_batching'; it needs output_tokens of kind constant,"
     " and workload.output_tokens is uniform"),
    ([("strategies.1", ITERATIONS), ("workload.output_tokens", CONSTANT), ("workload.arrivals", TRACE)],
     "strategies[1].kind: is 'iteration_batching'; it needs output_tokens of kind constant,"
     " and workload.arrivals is a trace"),
    ([("workload.arrivals.interval_s", 1)],
     "workload.arrivals.interval_s: is given beside rate_per_s; only one of them is allowed"),
    ([("workload.output_tokens.low", 200)],
     "workload.output_tokens.high: is 128; at least low, which is 200, is needed"),
    ([("workload.prompt_tokens.max", 100)],
     "workload.prompt_tokens.max: is 100; at least mean, which is 512, is needed"),
    ([("workload.prompt_tokens", MISSING)],
     "workload.prompt_tokens: is missing; only a recorded trace has its own"),
    ([("workload.prompt_tokens", {"kind": "empirical"})],
     "workload.prompt_tokens.path: is missing; either values, or path and column are needed"),
    ([("workload.prompt_tokens", {"kind": "empirical", "path": "a.csv"})],
     "workload.prompt_tokens.column: is missing; either values, or path and column are needed"),
    ([("workload.prompt_tokens", {"kind": "empirical", "values": [1], "column": "n"})],
     "workload.prompt_tokens.column: is given beside values; only one of them is allowed"),
    ([("workload.prompt_tokens", {"kind": "empirical", "values": []})],
     "workload.prompt_tokens.values: is []; at least one value is needed"),
    ([("workload.prompt_tokens", {"kind": "empirical", "values": [1, 0]})],
     "workload.prompt_tokens.values[1]: is 0; 1 to 10,000,000 is allowed"),
    ([("workload.prompt_tokens", {"kind": "empirical", "values": 5})],
     "workload.prompt_tokens.values: is 5; a list is needed"),
    ([("workload.arrivals", {**TRACE, "path": ""})], "workload.arrivals.path: is ''; text is needed"),
    ([("workload.arrivals", {**TRACE, "path": 5})], "workload.arrivals.path: is 5; text is needed"),
    ([("workload.arrivals", {**TRACE, "columns": {"arival": "t"}})],
     "workload.arrivals.columns.arival: no such field; did you mean 'arrival'?"
     " (allowed: arrival, prompt, output)"),
    ([("workload.arrivals", {**TRACE, "columns": {"arrival": 5}})],
     "workload.arrivals.columns.arrival: is 5; text is needed"),
    ([("workload.arrivals", {**TRACE, "format": "burstgpt"})],
     "workload.arrivals.format: is 'burstgpt' (allowed: azure, mooncake, vllm, table)"),
    ([("workload.arrivals", {"kind": "gamma", "rate_per_s": 2})], "workload.arrivals.cv: is missing"),
    ([("workload.arrivals", {"kind": "closed_loop", "clients": 0})],
     "workload.arrivals.clients: is 0; 1 to 1,000,000 is allowed"),
    ([("workload.arrivals", {"kind": "poisson", "rate_per_s": 1, 5: 6})],
     "workload.arrivals.5: is 5; a field is a word"),
    ([("slo", {"ttft_s": 1, "a\nb": 2})],
     "slo.'a\\nb': no such field (allowed: ttft_s, tpot_s, e2e_s)"),
    ([("contention", {"kind": "throughput"})], "contention.gain: is missing"),
    ([("contention", {"kind": "throughput", "gain": 1.5})],
     "contention.gain: is 1.5; 0 to 1 is allowed"),
    ([("strategies", [])], "strategies: is []; at least one value is needed"),
    ([("strategies", {"kind": "temporal_fusion"})],
     "strategies: is {'kind': 'temporal_fusion'}; a list is needed"),
    ([("strategies", None)], "strategies: is None; a list is needed"),
    ([("strategies.0.shuffle", 1)], "strategies[0].shuffle: is 1; true or false is needed"),
    ([("strategies.0.shuffle", "yes")], "strategies[0].shuffle: is 'yes'; true or false is needed"),
    ([("strategies.0.shuffle", [True, True])],
     "strategies[0].shuffle: a value is given twice: True; each may be given once"),
    ([("strategies.2", {"kind": "temporal_fusion", "slots": 32})],
     "strategies[2]: is called 'temporal fusion, 32 slots', as strategies[0] is"),
    ([("dtypes", {"qvk": "fp8"})], "dtypes.qvk: no such matrix; did you mean 'qkv'?"),
    ([("autoscaling", [{"kind": "none"}, *({"kind": "open_requests", "target": n} for n in (8, 8.0))])],
     "autoscaling: a value is given twice: [1] and [2]; each may be given once"),
    ([("autoscaling", {"kind": "utilisation", "target": 1e-309})],
     "autoscaling.target: is 1e-309; 1e-06 to 1 is allowed"),
    ([("published", ["a", "a"])], "published: a value is given twice: 'a'; each may be given once"),
    ([("published", "flover_fig5")], "published: is 'flover_fig5'; a list is needed"),
    ([("name", "a b")], "name: is 'a b'; letters, digits"),
    ([("replicas", 1000), ("workload.requests", list(range(1, 11)))],
     "strategies: make 800,000 runs with devices, workload and replicas; at most 20,000 are allowed"),
    ([("replicas", 200), ("workload.requests", 1_000_000)],
     "workload.requests: makes 16,000,000,000 requests in 16,000 runs; at most 1,000,000,000 are allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), FAULTS)
def test_faults_between_fields_and_odd_ones(changes: list[tuple[str, Any]], says: str) -> None:
    assert complaint(changed(*changes)).startswith(says)


def test_as_many_runs_and_requests_as_allowed_are_accepted() -> None:
    """Two devices, four workloads and ten variants are 80 runs a replica; 250 replicas of 50,000 requests."""
    assert parsed(("replicas", 250), ("workload.requests", 50_000)).replicas == 250
    more = complaint(changed(("replicas", 251), ("workload.requests", 1)))
    assert more.startswith("strategies: make 20,080 runs")
    more = complaint(changed(("replicas", 250), ("workload.requests", 50_001)))
    assert more.startswith("workload.requests: makes 1,000,020,000 requests in 20,000 runs")


def test_lists_of_many_values_are_counted_not_multiplied_out() -> None:
    long = [float(n) for n in range(1, 3001)]
    document = changed(
        ("workload.arrivals.rate_per_s", long),
        ("workload.requests", list(range(1, 3001))),
        ("strategies.1.window_s", long),
        ("strategies.1.max_batch", list(range(1, 3001))),
    )
    assert re.match(r"strategies: make [\d,]+ runs with devices", complaint(document))


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["kind", "a\nb"]),
)
KEYS = st.text(max_size=4) | st.integers()
VALUES = st.recursive(ATOMS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3))
PLACES = [
    *(path for path, _, _ in NUMBERS),
    *("study", "workload", "workload.arrivals", "workload.arrivals.kind", "workload.prompt_tokens", "slo"),
    *("strategies", "strategies.0", "strategies.0.kind", "strategies.3.order", "strategies.0.shuffle"),
    *("dtypes", "contention", "contention.kind", "overheads", "published", "routing", "name", "device"),
    "workload.new",
]


@slow
@settings(max_examples=examples(300))
@given(path=st.sampled_from(PLACES), value=VALUES)
def test_whatever_stands_in_a_field_is_accepted_or_one_line_that_begins_with_it(
    path: str, value: Any
) -> None:
    try:
        parse_scenario(changed((path, value)), "x.yaml")
    except InputError as error:
        line = str(error)
        others = (
            "strategies: make",
            "workload.requests: makes",
            "strategies[",
            "workload.output_tokens.high",
        )
        assert line.startswith((f"x.yaml: {as_written(path)}", *(f"x.yaml: {other}" for other in others)))
        assert len(line.splitlines()) == 1


# -- files ---------------------------------------------------------------------------------------------


def test_paths_are_found_beside_the_scenario_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = tmp_path / "a", tmp_path / "b"
    beside.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("own.csv", "trace.csv", "lengths.csv", "gpu.yaml", "model.json"):
        (beside / name).write_text("")
        (elsewhere / name).write_text("")
    (elsewhere / "here.csv").write_text("")
    (beside / "plain").write_text("")
    document = changed(
        ("device", "gpu.yaml"),
        ("model", "./model.json"),
        ("profile", "flover-gptj"),
        ("published", ["own.csv", "here.csv", "flover_fig5"]),
        ("workload.arrivals", {**TRACE, "path": "trace.csv"}),
        ("workload.prompt_tokens", {"kind": "empirical", "path": "lengths.csv", "column": "n"}),
        ("workload.output_tokens", {"kind": "empirical", "path": "plain", "column": "n"}),
    )
    file = beside / "x.yaml"
    file.write_text(yaml.safe_dump(document))
    written = resolved(load_scenario(file))
    assert written["device"] == str(beside / "gpu.yaml")
    assert written["model"] == str(beside / "model.json")
    assert written["profile"] == "flover-gptj"
    assert written["published"] == [str(beside / "own.csv"), str(elsewhere / "here.csv"), "flover_fig5"]
    assert written["workload"]["arrivals"]["path"] == str(beside / "trace.csv")
    assert written["workload"]["prompt_tokens"]["path"] == str(beside / "lengths.csv")
    assert written["workload"]["output_tokens"]["path"] == str(beside / "plain")
    # Wherever the resolved scenario is put, it finds the same files.
    again = elsewhere / "scenario.yaml"
    again.write_text(yaml.safe_dump(written))
    assert resolved(load_scenario(again)) == written


def test_odd_paths_are_no_faults_of_the_reader(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for path in ("a" * 5000, "missing.csv"):
        file.write_text(yaml.safe_dump(changed(("workload.arrivals", {**TRACE, "path": path}))))
        scenario = load_scenario(file)
        assert isinstance(scenario, ServingScenario)
        assert scenario.workload.arrivals.path.endswith(path)  # type: ignore[union-attr]
    file.write_text(yaml.safe_dump(changed(("workload.arrivals", {**TRACE, "path": "a\0b"}))))
    with pytest.raises(InputError, match=r"line \d+: a control character \('\\x00'\)"):
        load_scenario(file)


@pytest.mark.parametrize("value", [5, None, "x", [], {"arrivals": 5}, {"arrivals": {"path": 5}}])
def test_a_workload_that_is_none_is_refused_from_a_file_too(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(changed(("workload", value))))
    with pytest.raises(InputError, match=r"x.yaml: workload"):
        load_scenario(file)


def test_settings_reach_into_the_workload(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    scenario = load_scenario(file, ["workload.arrivals.rate_per_s=[1, 64]", "strategies.2.max_instances=4"])
    assert isinstance(scenario, ServingScenario)
    assert scenario.workload.arrivals.rate_per_s == [1.0, 64.0]  # type: ignore[union-attr]
    assert resolved(scenario)["strategies"][2]["max_instances"] == [4]
    with pytest.raises(InputError, match=r"x.yaml: workload.arrivals.rate: no such field"):
        load_scenario(file, ["workload.arrivals.rate=1"])


# -- the schema ----------------------------------------------------------------------------------------


def test_the_schema_has_both_studies_and_all_their_fields() -> None:
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    assert schema["discriminator"]["propertyName"] == "study"
    assert set(schema["discriminator"]["mapping"]) == set(STUDIES)
    serving = schema["$defs"]["ServingScenario"]
    assert set(GOOD) <= set(serving["properties"])
    assert serving["additionalProperties"] is False
    assert schema["properties"]["workload"]["description"].endswith(" (study serving)")
    # What every study has is not said to be of some.
    assert "(study" not in schema["properties"]["name"]["description"]
    shipped, own = serving["properties"]["strategies"]["items"]["anyOf"]
    assert own["properties"]["kind"]["pattern"] == ":"
    kinds = {get["$ref"].rpartition("/")[2] for get in shipped["oneOf"]}
    assert kinds == {model.__name__ for model in kinds_of(strategies.ServingStrategies).values()}


def test_the_schema_allows_one_value_where_it_allows_a_list() -> None:
    one, several = json_schema()["$defs"]["ServingScenario"]["properties"]["devices"]["anyOf"]
    assert one == {"maximum": 1024, "minimum": 1, "type": "integer"}
    assert several == {"items": one, "minItems": 1, "type": "array"}


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "temporal_fusion", "slots": 1},
        {"kind": "dynamic_batching", "window_s": 0.1, "max_batch": 1},
        {"kind": "concurrent_instances", "max_instances": 1},
        {"kind": "continuous_batching", "max_sequences": 1},
    ],
    ids=lambda strategy: strategy["kind"],
)
def test_one_request_at_a_time_is_a_way_of_serving(strategy: dict[str, Any]) -> None:
    """The least that every strategy may hold at a time is one request: then none waits for company."""
    rows = simcore.run(
        {
            "name": "one", "study": "serving", "device": "h200-sxm", "profile": "none", "model": "tiny-llama",
            "workload": {
                "requests": 5,
                "arrivals": {"kind": "constant", "rate_per_s": 1000.0},
                "prompt_tokens": {"kind": "constant", "value": 8},
                "output_tokens": {"kind": "constant", "value": 4},
            },
            "strategies": [strategy], "measure": {"kind": "whole_run"},
        }
    ).rows  # fmt: skip
    found = {row["metric"]: row["value"] for row in rows}
    assert (found["completed"], found["max_batch"]) == (5, 1)
