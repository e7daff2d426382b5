"""The report: what the page says is what the run directory holds, whatever is missing from it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CONTEXTS = (1024, 4096, 16384, 32768, 65536, 98304, 131072)
HIT_RATES = (0.5, 0.625, 0.75, 0.875)
LAYERS = 32
AXES = ("strategy", "label", "ranks", "groups", "devices", "context_tokens", "batch", "hit_rate")
COLUMNS = ("study", *AXES, "metric", "op_kind", "value", "low", "high", "unit", "source")

# Seconds of one layer by op kind on 1, 2, 4, 8 ranks, and of what is outside the layers.
LAYER = {
    "matmul": (728e-6, 381e-6, 211e-6, 118e-6),
    "norm": (25e-6, 25e-6, 26e-6, 26e-6),
    "rotary": (31e-6, 21e-6, 16e-6, 13e-6),
    "kv_append": (26e-6, 17e-6, 12.5e-6, 9e-6),
    "activation": (30e-6, 16.5e-6, 15.8e-6, 12e-6),
    "residual": (4.5e-6, 3.2e-6, 3e-6, 3e-6),
    "all_gather": (0.0, 40.5e-6, 44.4e-6, 60e-6),
    "reduce_scatter": (0.0, 41e-6, 49.5e-6, 71e-6),
}
OUTSIDE = {"matmul": (2.186e-3, 1.1e-3, 0.56e-3, 0.29e-3), "sample": (60e-6,) * 4, "embedding": (11e-6,) * 4}


def _attention(ranks: int, context: int) -> float:
    return 52e-6 + 13.5e-9 * context * (1 / ranks + 0.06)


def _kinds(ranks: int, groups: int, context: int, hit_rate: float) -> dict[str, float]:
    """Seconds of a token's critical path by op kind, by the formula of ALSpec's appendix F."""
    at = (1, 2, 4, 8).index(ranks)
    kinds = {kind: LAYERS * seconds[at] for kind, seconds in LAYER.items() if seconds[at]}
    for kind, seconds in OUTSIDE.items():
        kinds[kind] = kinds.get(kind, 0.0) + seconds[at]
    attention = _attention(ranks, context)
    kinds["host"] = 90e-6
    if groups == 1:
        return kinds | {"decode_attention": LAYERS * attention}
    layer = sum(seconds[at] for seconds in LAYER.values())
    hits = math.floor(LAYERS * hit_rate)
    kinds |= {"receive_speculation": hits * 22e-6, "put": hits * 3e-6, "exchange_priority": LAYERS * 9e-6}
    kinds["speculative_attention"] = (LAYERS - hits) * attention * 1.02
    return kinds | {"idle": hits * max(0.0, attention - layer)}


def _variants() -> Iterator[tuple[str, str, int, int, tuple[float, ...]]]:
    for ranks in (1, 2, 4, 8):
        name = f"tensor parallel, {ranks} device{'s' * (ranks > 1)}"
        yield "tensor_parallel", name, ranks, 1, (math.nan,)
    for ranks in (2, 4):
        yield "alspec", f"ALSpec, {ranks}+{ranks} devices", ranks, 2, HIT_RATES


def _case_rows(axes: dict[str, Any], kinds: dict[str, float], baseline: float) -> list[dict[str, Any]]:
    latency = sum(kinds.values())
    far = 0.08 if axes["context_tokens"] > 100_000 else 0.01
    attention = kinds.get("decode_attention", 0.0) + kinds.get("speculative_attention", 0.0)
    exposed = sum(kinds.get(k, 0.0) for k in ("all_gather", "reduce_scatter", "exchange_priority", "put"))
    metrics: list[tuple[str, str, float, str]] = [
        ("token_latency_s", "", latency, "s"),
        ("tokens_per_s_per_user", "", 1 / latency, "1/s"),
        ("attention_share", "", attention / latency, ""),
        ("non_attention_share", "", 1 - attention / latency, ""),
        ("exposed_communication_s", "", exposed, "s"),
        ("speedup_over_baseline", "", baseline / latency, "x"),
        *(("critical_path_s", kind, seconds, "s") for kind, seconds in kinds.items()),
        *(("price_share", s, v, "") for s, v in (("published", 0.9 - far), ("interpolated", 0.1), ("extrapolated", far))),
    ]  # fmt: skip
    if axes["groups"] > 1:
        metrics.append(("overlap_gain_s", "", 41e-6, "s"))
    source = "extrapolated" if far > 0.05 else "published"
    rows = []
    for metric, kind, value, unit in metrics:
        spread = 0.02 * value if metric == "token_latency_s" else math.nan
        figures = {
            "metric": metric,
            "op_kind": kind,
            "value": value,
            "low": value - spread,
            "high": value + spread,
        }
        rows.append({"study": "decode", **axes, **figures, "unit": unit, "source": source})
    return rows


def _crossover_rows(axes: dict[str, Any]) -> list[dict[str, Any]]:
    none = "ALSpec is ahead everywhere in 1,024..131,072"
    rows = [
        {
            **axes,
            "metric": "crossover_link_latency_s",
            "value": 17e-6,
            "unit": "s",
            "source": "",
            "hit_rate": 0.75,
        }
    ]
    for hit_rate in HIT_RATES:
        value = 21345.0 if hit_rate < 0.6 else math.nan
        row = {**axes, "hit_rate": hit_rate, "metric": "crossover_context_tokens", "value": value}
        rows.append({**row, "unit": "tokens", "source": "" if value == value else none})
    for context in (32768, 131072):
        row = {
            **axes,
            "context_tokens": context,
            "metric": "crossover_hit_rate",
            "value": 0.41 - context / 1e6,
        }
        rows.append({**row, "unit": "", "source": ""})
    return [{"study": "decode", "batch": 1, **row} for row in rows]


def _accuracy_rows(axes: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for hit_rate, score, threshold in ((0.5, 71.9, 0.25), (0.75, 71.4, 0.5), (0.875, 69.8, 0.75)):
        common = {"study": "decode", **axes, "hit_rate": hit_rate, "source": f"λ = {threshold}, RULER 32K"}
        rows.append({**common, "metric": "hits_score", "value": score})
        rows.append({**common, "metric": "baseline_score", "value": 72.0})
        rows.append({**common, "metric": "error_bound_worst_case", "value": 3.2e9 * threshold})
        rows.append({**common, "metric": "error_bound_high_probability", "value": 5.6 * threshold})
    return rows


def results() -> pd.DataFrame:
    """Every row of a decode study shaped like ALSpec's Figure 7."""
    rows: list[dict[str, Any]] = []
    for strategy, label, ranks, groups, rates in _variants():
        axes = {
            "strategy": strategy,
            "label": label,
            "ranks": ranks,
            "groups": groups,
            "devices": ranks * groups,
        }
        for context in CONTEXTS:
            baseline = sum(_kinds(4, 1, context, math.nan).values())
            for rate in rates:
                case = {**axes, "context_tokens": context, "batch": 1, "hit_rate": rate}
                rows += _case_rows(case, _kinds(ranks, groups, context, rate), baseline)
        if groups > 1:
            rows += _crossover_rows(axes) + _accuracy_rows(axes)
    return pd.DataFrame(rows, columns=COLUMNS)


def _span(rank: int, start: float, end: float, name: str, kind: str, state: str = "run") -> dict[str, Any]:
    stream = "wire" if state == "wire" else "main"
    times = {"start_s": start * 1e-6 + 0.5, "end_s": end * 1e-6 + 0.5}
    place = {"rank": rank, "group": rank // 4, "tensor": rank % 4, "stream": stream}
    return {
        "case": "ALSpec, 4+4 devices at 32K",
        **place,
        "name": name,
        "op_kind": kind,
        "state": state,
        **times,
    }


def _layer_ops(rank: int, start: float, state: str) -> list[dict[str, Any]]:
    ops = [("out projection", "matmul", 25), ("reduce-scatter", "reduce_scatter", 25), ("norm", "norm", 13)]
    ops += [("gate, up", "matmul", 79), ("activation", "activation", 16), ("down", "matmul", 68)]
    ops += [("reduce-scatter", "reduce_scatter", 25), ("norm", "norm", 13), ("qkv", "matmul", 39)]
    ops += [("rotary", "rotary", 16), ("append", "kv_append", 12)]
    spans = []
    for name, kind, long in ops:
        length = 2.0 if state == "skipped" else float(long)
        spans.append(_span(rank, start, start + length, name, kind, state))
        start += length
    return spans


def timeline() -> list[dict[str, Any]]:
    """One layer on 4+4 ranks: on a hit the receivers run it, on a miss the senders."""
    spans: list[dict[str, Any]] = []
    for outcome in ("hit", "miss"):
        for rank in range(8):
            own = [_span(rank, 0, 9, "exchange", "exchange_priority")]
            if rank < 4:
                own.append(_span(rank, 9, 190, "attention", "speculative_attention"))
                own.append(_span(rank, 24, 31, "put", "put", "wire"))
                own += _layer_ops(rank, 190, "skipped" if outcome == "hit" else "run")
            else:
                own.append(_span(rank, 9, 31, "receive", "receive_speculation", "waiting"))
                own += _layer_ops(rank, 31, "run")
            end = max(s["end_s"] for s in own) * 1e6 - 500_000
            last = 362.0 if outcome == "hit" else 521.0
            own += [_span(rank, end, last, "wait", "gate", "waiting")] if end < last else []
            own.append(_span(rank, last, last + 9, "exchange", "exchange_priority"))
            spans += [{**span, "outcome": outcome} for span in own]
    return spans


def comparison() -> pd.DataFrame:
    """Compared figures of every role, with errors that a generator of random numbers chose."""
    noise = np.random.default_rng(7)
    rows = []
    for _, case in results().query("metric == 'token_latency_s'").iterrows():
        strategy, far = case["strategy"], case["context_tokens"] > 100_000
        role = "projected" if strategy == "alspec" else "measured" if far else "fitted"
        error = float(noise.normal(0, 0.4 if role == "fitted" else 2.2))
        axes = {k: case[k] for k in ("strategy", "ranks", "groups", "context_tokens", "batch", "hit_rate")}
        reference = case["value"] / (1 + error / 100)
        figures = {
            "metric": "token_latency_s",
            "reference": reference,
            "predicted": case["value"],
            "error_pct": error,
        }
        rows.append({**axes, **figures, "role": role, "source": "ALSpec, Figure 7"})
    return pd.DataFrame(rows)


SUMMARY = {
    "name": "alspec-n150 <script>alert(1)</script>",
    "study": "decode",
    "answer": "On 8 devices ALSpec is 1.24 times as fast as tensor parallelism at 128K tokens, "
    "where 87.5 % of its speculations hit.",
    "notes": ["Device time only: dispatch is not counted, as in the paper."],
    "warnings": ["Prices at 131,072 tokens on 8 ranks are extrapolated from 4 ranks."],
    "hits": {"ALSpec, 4+4 devices": "given rates 0.5 to 0.875, spread evenly over the layers"},
    "bounds": {"layers": 32, "lambda": 0.5},
    "price_shares": {"published": 0.86, "interpolated": 0.1, "extrapolated": 0.04},
    "baseline": "tensor parallel, 4 devices",
}
SCENARIO = """name: alspec-n150 <script>alert(1)</script>
study: decode
device: n150
model: llama-3.1-8b
dtype: bfp8
context_tokens: [1024, 4096, 16384, 32768, 65536, 98304, 131072]
strategies:
  - {kind: tensor_parallel, ranks: [1, 2, 4, 8]}
  - {kind: alspec, ranks: [2, 4], hits: {kind: rate, value: [0.5, 0.625, 0.75, 0.875]}}
baseline: {kind: tensor_parallel, ranks: 4}
"""
PROVENANCE = {
    "versions": {"simcore": "0.1.0", "python": "3.11.9"},
    "device": "n150",
    "profile": {"name": "n150-alspec", "date": "2025-07-01"},
    "seed": 1,
    "price_sources": ["published: ALSpec, tables 4 to 7", "published: ALSpec, Figure 12"],
    "wall_s": 0.8,
    "laws": {"checked": ["no overlap on one stream", "ranks of a collective start together"], "broken": 0},
}


def write_run(
    run_dir: Path,
    rows: pd.DataFrame | None = None,
    summary: dict[str, Any] | None = None,
    optional: bool = True,
) -> Path:
    """A run directory as the decode study leaves it; `optional` False: results and summary only."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (results() if rows is None else rows).to_csv(run_dir / "results.csv", index=False)
    (run_dir / "summary.json").write_text(
        json.dumps(SUMMARY if summary is None else summary), encoding="utf-8"
    )
    if optional:
        (run_dir / "timeline.json").write_text(json.dumps(timeline()), encoding="utf-8")
        comparison().to_csv(run_dir / "comparison.csv", index=False)
        (run_dir / "scenario.yaml").write_text(SCENARIO, encoding="utf-8")
        (run_dir / "provenance.json").write_text(json.dumps(PROVENANCE), encoding="utf-8")
    return run_dir
