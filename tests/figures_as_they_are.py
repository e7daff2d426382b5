"""Figures of small runs of every study, as they are: what is not meant to change figures changes none.

    python -m tests.figures_as_they_are              compares; names each line that differs
    python -m tests.figures_as_they_are --write      writes them anew, for a change that is meant to

Laws and closed forms say what figures have to be like; these say what they were, to 1e-9, at settings that no
law speaks of: labels, notes, orders, which request waits for whom. Prices come from the H200's profile and
from datasheets alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from simcore.assembly import Place, assemble
from simcore.models.served_decoder import decode_sizes, step_sizes
from simcore.ops.op import Pricer
from simcore.scenario import parse_scenario
from simcore.sim.runs import simulated
from simcore.studies.serving.runner import Bench

FOLDER = Path(__file__).parent / "data" / "figures"
WITHIN = 1e-9
Line = list[Any]


def uniform(low: int, high: int) -> dict[str, Any]:
    """Lengths between two bounds."""
    return {"kind": "uniform", "low": low, "high": high}


def serving(*strategies: dict[str, Any], rate_per_s: float = 40.0, **changes: Any) -> dict[str, Any]:
    """A small serving scenario."""
    workload = {
        "requests": 24,
        "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
        "prompt_tokens": uniform(20, 900),
        "output_tokens": uniform(3, 40),
        **changes.pop("workload", {}),
    }
    given = {"device": "h200-sxm", "model": "llama-3.1-8b", "workload": workload, "seed": 5, **changes}
    found = {"name": "s", "study": "serving", "strategies": list(strategies), **given}
    return {name: value for name, value in found.items() if value is not None}


def batching(**fields: Any) -> dict[str, Any]:
    """Continuous batching with some fields of its own."""
    return {"kind": "continuous_batching", **fields}


def decode(*strategies: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A small decode scenario."""
    given = {"device": "h200-sxm", "model": "llama-3.1-8b", "context_tokens": [1024, 40_000], **changes}
    return {"name": "d", "study": "decode", "strategies": list(strategies), **given}


def tiling(*strategies: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A small tiling scenario."""
    model = {"kind": "long_convolution", "layers": 3, "channels": 64}
    given = {"device": "h200-sxm", "model": model, "tokens": 64, **changes}
    return {"name": "t", "study": "tiling", "strategies": list(strategies), **given}


def operators(methods: list[str], **changes: Any) -> dict[str, Any]:
    """A small study of linear attention."""
    given = {"device": "h200-sxm", "batch": 1, "heads": 8, "rank": 64, "dim": 64, **changes}
    return {"name": "l", "study": "linear_attention", "methods": methods, **given}


INSTANCES = {"kind": "concurrent_instances", "max_instances": 6}
FUSION = {"kind": "temporal_fusion", "slots": 5, "shuffle": [True, False]}
DYNAMIC = {"kind": "dynamic_batching", "window_s": [0.0, 0.05], "max_batch": 5}
ITERATIONS = {"kind": "iteration_batching", "max_batch": [3, 8]}
RATE = {"kind": "rate", "value": [0.3, 0.9]}
TWELVE = {
    "output_tokens": {"kind": "constant", "value": 12},
    "arrivals": {"kind": "constant", "rate_per_s": 90},
}
LONG = {"prompt_tokens": uniform(200, 500), "output_tokens": uniform(40, 300)}
CHATS = {
    "sessions": {
        "turns": uniform(1, 5),
        "think_s": 0.2,
        "shared_prefix_tokens": 64,
        "max_context_tokens": 4096,
    },
    "prompt_tokens": {"kind": "lognormal", "mean": 150, "cv": 1.0, "max": 900},
}
SPREAD = {
    "prompt_tokens": {"kind": "lognormal", "mean": 300, "cv": 1.2, "max": 2000},
    "output_tokens": {"kind": "lognormal", "mean": 20, "cv": 0.7, "max": 90},
}
SCENARIOS: Mapping[str, dict[str, Any]] = {
    "serving_flover": serving(INSTANCES, FUSION, DYNAMIC, rate_per_s=60.0),
    "serving_one_length": serving(
        ITERATIONS,
        DYNAMIC,
        batching(),
        workload=TWELVE,
        contention={"kind": "throughput", "gain": 0.05},
        measure={"kind": "whole_run"},
    ),
    "serving_prefills": serving(
        batching(prefill=["chunked", "whole", "first"], token_budget=[1024], max_sequences=[4]),
        batching(order=["shortest_first"], max_sequences=3),
        batching(ahead=2, max_sequences=3),
        batching(wait_steps=3, wait_tokens=1500, block_tokens=32),
        rate_per_s=300.0,
        replicas=2,
        slo={"ttft_s": 0.05, "tpot_s": 0.01, "e2e_s": 0.5},
        price_interval=False,
    ),
    "serving_preempted": serving(
        batching(), batching(prefill="first", ahead=1), rate_per_s=200.0, kv_blocks=90, workload=LONG
    ),
    "serving_sessions": serving(
        batching(prefix_caching=True), batching(), devices=2, routing="prefix_aware", workload=CHATS
    ),
    "serving_clients": serving(
        batching(),
        {"kind": "temporal_fusion", "slots": 4},
        devices=2,
        workload={"arrivals": {"kind": "closed_loop", "clients": [3, 9], "think_s": 0.05}},
        routing="round_robin",
    ),
    "serving_ranks": serving(
        batching(ranks=[1, 4]), devices=4, model="llama-3.1-70b", dtype="fp8", rate_per_s=100.0
    ),
    "serving_engines": serving(
        *(batching(engine=engine) for engine in ("vllm", "tensorrt-llm", "sglang")), rate_per_s=150.0
    ),
    "serving_datasheet": serving(
        batching(),
        INSTANCES,
        device=["a100-sxm-80gb", "h100-sxm"],
        profile="none",
        contention={"kind": "shared_memory", "reuse_s": 0.002},
    ),
    "serving_scaled": serving(
        batching(max_sequences=4),
        devices=3,
        workload={"requests": 60, "arrivals": {"kind": "gamma", "rate_per_s": 60, "cv": 3}, **SPREAD},
        autoscaling=[
            {"kind": "none"},
            {"kind": "open_requests", "target": [2, 6], "start_s": 0.3, "check_s": 0.1, "keep_s": 0.5},
            {"kind": "utilisation", "target": 0.5, "start_s": 0.2, "check_s": 0.1, "min_servers": 2},
        ],
        slo={"ttft_s": 0.1, "tpot_s": 0.02},
        measure={"kind": "whole_run"},
        price_interval=False,
    ),
    "serving_fleets": serving(
        batching(),
        device=None,
        fleets=[
            [{"device": "h200-sxm", "servers": 1}, {"device": "h100-sxm", "servers": 2}],
            [{"device": "h200-sxm", "servers": 1, "ranks": 2}, {"device": "a100-sxm-80gb", "servers": 1}],
        ],
        rate_per_s=200.0,
        slo={"ttft_s": 0.1},
        price_interval=False,
    ),
    "serving_tenants": serving(
        batching(),
        rate_per_s=120.0,
        workload={
            "requests": 60,
            "tenants": [
                {"name": "chat", "share": 0.7, "slo": {"ttft_s": 0.05, "tpot_s": 0.02}},
                {"name": "batch", "prompt_tokens": uniform(900, 3000), "output_tokens": uniform(1, 9)},
            ],
        },
        price_interval=False,
    ),
    "serving_own_arrivals": serving(
        batching(),
        workload={
            "requests": 50,
            "arrivals": {"kind": "of_tenants"},
            "tenants": [
                {"name": "a", "arrivals": {"kind": "poisson", "rate_per_s": 70.0}},
                {"name": "b", "arrivals": {"kind": "constant", "rate_per_s": 20.0}, "slo": {"e2e_s": 0.4}},
            ],
        },
        price_interval=False,
    ),
    "serving_spread": serving(
        batching(),
        batching(token_budget=300),
        rate_per_s=80.0,
        workload={"requests": [30, 60], **SPREAD},
        replicas=2,
        price_interval=False,
    ),
    "decode_speculation": decode(
        {"kind": "tensor_parallel", "ranks": [1, 8]},
        {"kind": "alspec", "ranks": [1, 4], "hits": RATE, "overlap_last_layer": False},
        {"kind": "alspec_pipelined", "groups": [2, 4], "hits": RATE, "chunk_tokens": 256},
        baseline={"kind": "tensor_parallel", "ranks": 8},
        tokens=2,
    ),
    "decode_crossover": decode(
        {"kind": "tensor_parallel", "ranks": [1, 2]},
        {"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": 0.5, "draw": "random"}},
        baseline={"kind": "tensor_parallel", "ranks": 2},
        crossover=["context_tokens", "hit_rate", "link_latency_s"],
        model="qwen2.5-7b",
        context_tokens=[1024, 30_000],
        seed=3,
    ),
    "decode_crossover_found": decode(
        {"kind": "tensor_parallel", "ranks": 8},
        {"kind": "alspec", "ranks": 4, "hits": {"kind": "rate", "value": 0.2}},
        baseline={"kind": "tensor_parallel", "ranks": 8},
        crossover=["context_tokens"],
        device="n150",
        context_tokens=[1024, 100_000],
    ),
    "decode_published": decode(
        {"kind": "tensor_parallel", "ranks": [1, 4]},
        {"kind": "alspec", "ranks": [2], "hits": {"kind": "rate", "value": 0.875, "draw": "ceil"}},
        device="n150",
        context_tokens=[1024, 65_536],
        published=["alspec_n150"],
    ),
    "decode_layer": decode(
        {"kind": "tensor_parallel", "ranks": [1, 2]}, part="layer", batch=[1, 16], dtype="fp8", tokens=4
    ),
    "decode_batches": decode(
        {"kind": "tensor_parallel", "ranks": 1},
        model="qwen2.5-7b",
        batch=[1, 7, 64],
        context_tokens=[100, 9000],
        tokens=5,
    ),
    "decode_tied": decode(
        {"kind": "tensor_parallel", "ranks": [1, 2]}, model="granite-3.3-8b", context_tokens=500, batch=2
    ),
    "decode_published_hits": decode(
        {"kind": "tensor_parallel", "ranks": 4},
        {
            "kind": "alspec",
            "ranks": 2,
            "hits": {"kind": "published", "task": "gsm8k-cot", "threshold": [0.05, 0.1]},
        },
        device="n150",
        context_tokens=1024,
    ),
    "decode_speculating_batches": decode(
        {"kind": "tensor_parallel", "ranks": 2},
        {"kind": "alspec", "ranks": [1, 2], "hits": {"kind": "rate", "value": 0.6, "draw": "random"}},
        {"kind": "alspec_pipelined", "groups": 3, "hits": {"kind": "rate", "value": 0.6, "draw": "random"}},
        model="qwen2.5-7b",
        batch=[3, 16],
        context_tokens=[3000, 20_000],
        tokens=3,
        seed=4,
    ),
    "decode_attention": {
        "name": "a",
        "study": "decode_attention",
        "device": "h200-sxm",
        "batch": [1, 40],
        "context_tokens": [300, 20_000],
        "q_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
    },
    "decode_attention_splits": {
        "name": "a",
        "study": "decode_attention",
        "device": "a100-sxm-80gb",
        "profile": "none",
        "batch": [2],
        "context_tokens": [5000],
        "q_heads": 16,
        "kv_heads": 2,
        "head_dim": 64,
        "splits": 7,
    },
    "tiling_schedules": tiling(
        {"kind": "lazy", "parallel": [True, False]},
        {"kind": "eager", "parallel": [True, False]},
        {"kind": "fractal", "tiles": ["hybrid", "conv", "fft"], "half_storage": [False, True]},
        {"kind": "fractal", "sequential_from": 8},
        {"kind": "fractal", "parallel": [False]},
        {"kind": "generic"},
        {"kind": "generic", "mixer": "linear_attention", "rank": 4},
        {"kind": "relaxed"},
    ),
    "tiling_prompt": tiling(
        {"kind": "lazy"},
        {"kind": "eager"},
        {"kind": "fractal"},
        prompt_tokens=20,
        batch=[1, 4],
        launching="eager",
        model={"kind": "long_convolution", "layers": [2, 5], "channels": 128, "block": "gate"},
    ),
    "tiling_published": tiling(
        {"kind": "lazy"},
        {"kind": "fractal"},
        device="a100-sxm-80gb",
        profile="none",
        tokens=[64, 256],
        published=["flash_inference"],
    ),
    "linear_attention": operators(
        ["vanilla", "block_based", "causal_dot_product", "fleet", "lightning", "recursion"],
        batch=[1, 4],
        length=[100, 2048],
        decay=[False, True],
    ),
    "linear_attention_published": operators(
        ["vanilla", "fleet", "recursion"],
        device="a6000",
        heads=32,
        rank=128,
        dim=128,
        length=[512],
        published=["leetdecoding_table3"],
    ),
}
# Of what prices of ops are listed, and at which sizes of a step.
PRICED = ("h200-sxm", "a100-sxm-80gb")
STEPS = ((0, 0, 300), (3, 900, 0), (40, 70_000, 77), (256, 300_000, 1792))


def lines(name: str) -> Iterator[Line]:
    """What is told of a scenario by name: texts, rows of results, sums of its tables' columns."""
    scenario = parse_scenario(SCENARIOS[name], name)
    parts = assemble(scenario, name, Place("sim", simulated, jobs=1))
    outcome = parts.study.run(lambda *_: None)
    compared = parts.study.compare(outcome)
    yield ["answer", outcome.answer]
    texts = {"warning": [*parts.warnings, *outcome.warnings], "note": [*parts.notes, *outcome.notes]}
    yield from ([kind, text] for kind, found in texts.items() for text in found)
    yield from (["source", source, share] for source, share in sorted(outcome.sources.items()))
    for axes, rows in groupby(outcome.rows, lambda row: row.axes):
        settings = [f"{key}={value}" for key, value in asdict(axes).items() if value not in (None, "")]
        yield ["case", ", ".join(settings)]
        for row in rows:
            yield [row.metric, row.value, row.low, row.high, row.unit, row.source, row.op_kind]
    for one in compared:
        # The error of equal figures is rounding, which differs between versions of Python.
        yield ["compared", *{**one, "error_pct": round(one["error_pct"], 10)}.values()]
    for table, columns in sorted(outcome.tables.items()):
        for column, values in columns.items():
            numbers = np.asarray(values)
            if np.issubdtype(numbers.dtype, np.number):
                weights = 1.0 + np.arange(len(numbers)) % 7
                yield ["table", table, column, len(numbers), float(np.nansum(numbers * weights))]


def prices() -> Iterator[Line]:
    """What each op of a served decoder's steps costs."""
    for device in PRICED:
        document = serving(batching(), device=device, **({} if device == "h200-sxm" else {"profile": "none"}))
        parts = assemble(parse_scenario(document, device), device, Place("sim", simulated, jobs=1))
        bench: Bench = parts.study.bench  # type: ignore[attr-defined]
        for ranks in (1, 4):
            yield from _priced(device, ranks, bench.price(ranks, "value")[0], bench)


def _priced(device: str, ranks: int, price: Pricer, bench: Bench) -> Iterator[Line]:
    model = bench.model(ranks)
    for sequences, cached, prompt in STEPS:
        graph = model.mixed if sequences and prompt else model.decode if sequences else model.prefill
        sizes = decode_sizes(sequences, cached)
        if prompt:
            sizes = step_sizes(sequences, cached, [(prompt, 50)], 1)
        yield ["step", device, ranks, sequences, cached, prompt]
        for op in dict.fromkeys(op.at(sizes).without_place for op in graph.ops):
            found = price(op)
            yield [op.name, found.seconds, found.low_s, found.high_s, found.source]


def lines_now(name: str) -> list[Line]:
    """All lines of a file."""
    return list(prices() if name == "prices" else lines(name))


NAMES = (*SCENARIOS, "prices")


def written(name: str) -> list[Line]:
    """The lines of a file as they were."""
    text = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def as_text(found: list[Line]) -> str:
    """A line of JSON each; numbers to twelve digits, more than what is compared."""
    return "".join(json.dumps(_short(line), ensure_ascii=False) + "\n" for line in found)


def _short(line: Line) -> Line:
    """Without what says nothing at its end."""
    found = [float(f"{each:.12g}") if isinstance(each, float) else each for each in line]
    while found[-1] in (None, ""):
        found.pop()
    return found


def differences(before: list[Line], now: list[Line]) -> list[str]:
    """What differs, a line each."""
    now = [json.loads(line) for line in as_text(now).splitlines()]
    found = [f"- {a}\n+ {b}" for a, b in zip(before, now, strict=False) if not _alike(a, b)]
    if len(before) != len(now):
        found.append(f"{len(before)} lines, now {len(now)}")
    return found


def _alike(a: Line, b: Line) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return abs(a - b) <= WITHIN * max(abs(a), abs(b)) + 1e-15 or bool(isnan(a) and isnan(b))
    return bool(a == b)


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description="Figures of small runs, as they are.")
    parser.add_argument("--write", action="store_true", help="write them anew")
    parser.add_argument("names", nargs="*", default=NAMES)
    given = parser.parse_args()
    differ = 0
    for name in given.names:
        found = lines_now(name)
        if given.write:
            (FOLDER / f"{name}.jsonl").write_text(as_text(found), encoding="utf-8")
            continue
        for each in differences(written(name), found):
            differ += 1
            print(f"{name}:\n{each}")
    print(f"{len(given.names)} files {'written' if given.write else f'compared, {differ} lines differ'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
