"""A run directory of the serving study without a simulator: plausible numbers from queues with as many
servers as a strategy has slots, in exactly the files and columns of the study.

A slot's request takes prefill + output_tokens * token seconds; nothing here is a prediction.
"""

import heapq
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
AXES = ("label", "strategy", "devices", "ranks", "requests", "rate_per_s")
COLUMNS = ("study", "strategy", "label", "devices", "ranks", "requests", "rate_per_s", "prompt_tokens",
           "output_tokens", "metric", "value", "low", "high", "unit", "source")  # fmt: skip
COMPARED = ("strategy", "label", "devices", "ranks", "requests", "rate_per_s", "prompt_tokens",
            "output_tokens", "metric", "reference", "predicted", "low", "high", "error_pct", "role",
            "source")  # fmt: skip
SLO = {"ttft_s": 0.5, "tpot_s": 0.02, "e2e_s": None}
PROMPT, OUTPUT = 512.0, 224.0
LEVELS_AT_MOST = 400


@dataclass(frozen=True)
class Server:
    """A strategy as a queue: slots, seconds of a token, and how long a batch gathers (0: none does)."""

    strategy: str
    label: str
    slots: int
    token_s: float
    window_s: float = 0.0


SERVERS = (
    Server("temporal_fusion", "temporal fusion, 32 slots", 32, 0.0112),
    Server("dynamic_batching", "dynamic batching, 0.5 s window, 32 requests", 32, 0.0104, 0.5),
    Server("concurrent_instances", "concurrent instances, 16 at most", 16, 0.031),
    Server("continuous_batching", "continuous batching, 2,048 tokens", 96, 0.0118),
)


def _slots(slots: int, arrival: Floats, prefill: Floats, decode: Floats) -> Floats:
    """When each request starts, where each takes one slot as soon as one is free. [requests], seconds."""
    free = [0.0] * slots
    start = np.empty(len(arrival))
    for i, (at, long) in enumerate(zip(arrival.tolist(), (prefill + decode).tolist(), strict=True)):
        start[i] = max(at, heapq.heappop(free))
        heapq.heappush(free, start[i] + long)
    return start


def _batches(slots: int, window_s: float, arrival: Floats, prefill: Floats, decode: Floats) -> Floats:
    """When each request starts, where batches gather and the server takes one at a time. [requests]."""
    start, free, first = np.empty(len(arrival)), 0.0, 0
    while first < len(arrival):
        leaves = max(free, arrival[first] + window_s)
        after = min(int(np.searchsorted(arrival, leaves, side="right")), first + slots)
        start[first:after] = leaves
        free = leaves + float(prefill[first:after].sum() + decode[first:after].max())
        first = after
    return start


def _requests(server: Server, case: dict[str, Any], replica: int, seed: int) -> pd.DataFrame:
    noise = np.random.default_rng([seed, replica, round(case["rate_per_s"] * 1000)])
    count = int(case["requests"])
    arrival = np.cumsum(noise.exponential(1 / case["rate_per_s"], count))
    prompt = np.clip(noise.lognormal(np.log(PROMPT) - 0.25, 0.7, count).round(), 1, 4096)
    output = noise.integers(64, 385, count).astype(float)
    prefill = 0.012 + prompt * 6e-5
    busy = min(1.0, case["rate_per_s"] / 16)
    decode = (output - 1) * server.token_s * (0.6 + 0.4 * busy) * noise.uniform(0.93, 1.1, count)
    slots = server.slots * case["devices"]
    if server.window_s:
        starts = _batches(slots, server.window_s, arrival, prefill, decode)
    else:
        starts = _slots(slots, arrival, prefill, decode)
    finish = starts + prefill + decode
    rejected = noise.uniform(size=count) < (0.02 if server.strategy == "concurrent_instances" else 0.0)
    times = {"scheduled_s": starts, "first_token_s": starts + prefill, "finish_s": finish}
    return pd.DataFrame(
        {
            **{name: case[name] for name in AXES},
            "prompt_mean": PROMPT,
            "output_mean": OUTPUT,
            "replica": replica,
            "request": np.arange(count),
            "instance": np.arange(count) % case["devices"],
            "arrival_s": arrival,
            **{name: np.where(rejected, np.nan, value) for name, value in times.items()},
            "prompt_tokens": prompt.astype(int),
            "output_tokens": output.astype(int),
            "preemptions": 0,
            "status": np.where(rejected, "rejected", "finished"),
        }
    )


def _shares_of_slo(rows: pd.DataFrame, latencies: dict[str, "pd.Series[float]"]) -> dict[str, float]:
    met = {name: latencies[name] <= bound for name in ("ttft", "tpot", "e2e") if (bound := SLO[f"{name}_s"])}
    every = np.logical_and.reduce(list(met.values()))
    duration = rows["finish_s"].max() - rows["arrival_s"].min()
    shares = {f"slo_attainment_{name}": float(ok.mean()) for name, ok in met.items()}
    return shares | {"slo_attainment": float(every.mean()), "goodput_per_s": float(every.sum() / duration)}


def _metrics(server: Server, rows: pd.DataFrame) -> dict[str, float]:
    latencies = {
        "ttft": rows["first_token_s"] - rows["arrival_s"],
        "tpot": (rows["finish_s"] - rows["first_token_s"]) / (rows["output_tokens"] - 1),
        "e2e": rows["finish_s"] - rows["arrival_s"],
        "queue": rows["scheduled_s"] - rows["arrival_s"],
    }
    latencies["itl"] = latencies["tpot"]
    figures = {f"{name}_mean_s": float(value.mean()) for name, value in latencies.items()}
    for (name, value), q in itertools.product(latencies.items(), (50, 90, 95, 99)):
        figures[f"{name}_p{q}_s"] = float(np.nanpercentile(value, q))
    done = rows[rows["status"] == "finished"]
    duration = done["finish_s"].max() - rows["arrival_s"].min()
    busy = (done["finish_s"] - done["scheduled_s"]).sum() / duration
    figures |= {
        "request_throughput_per_s": len(done) / duration,
        "output_throughput_tokens_per_s": float(done["output_tokens"].sum() / duration),
        "total_throughput_tokens_per_s": float(
            done[["output_tokens", "prompt_tokens"]].sum().sum() / duration
        ),
        **_shares_of_slo(rows, latencies),
        "duration_s": duration,
        "utilisation": 1 - float(np.exp(-busy / 12)),
        "mean_batch": busy,
        "max_batch": float(min(server.slots, np.ceil(busy * 1.7))),
        "mean_queue": float((done["scheduled_s"] - done["arrival_s"]).sum() / duration),
        "max_queue": float(len(rows) // 3),
        "mean_kv_share": busy / server.slots,
        "max_kv_share": min(1.0, 1.7 * busy / server.slots),
        "preemptions": float(done["preemptions"].sum()),
        "rejected": float(len(rows) - len(done)),
        "completed": float(len(done)),
        "iterations": float(done["output_tokens"].sum() / max(busy, 1.0)),
        "overlap": busy / len(rows),
    }
    return figures


UNITS = {"_tokens_per_s": "tokens/s", "_per_s": "1/s", "_s": "s"}


def _unit(metric: str) -> str:
    return next((unit for end, unit in UNITS.items() if metric.endswith(end)), "")


def _results(server: Server, case: dict[str, Any], found: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """A row a metric: mean over replicas with Student's 95 % interval."""
    rows = []
    for metric in found[0]:
        values = np.array([one[metric] for one in found])
        half = np.nan
        if len(values) > 1:
            half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
        figures = {"value": values.mean(), "low": values.mean() - half, "high": values.mean() + half}
        axes = {**case, "prompt_tokens": PROMPT, "output_tokens": OUTPUT}
        row = {"study": "serving", **axes, "metric": metric, **figures, "unit": _unit(metric)}
        rows.append({**row, "source": "simulated"})
    return rows


def _levels(server: Server, case: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    done = rows[rows["status"] == "finished"]
    arrived, began, ended = (
        np.sort(done[name].to_numpy()) for name in ("arrival_s", "scheduled_s", "finish_s")
    )
    t = np.linspace(0.0, float(ended[-1]), min(LEVELS_AT_MOST, 2 * len(rows)))
    in_service = np.searchsorted(began, t, "right") - np.searchsorted(ended, t, "right")
    by_finish = done.sort_values("finish_s")
    tokens = np.interp(t, by_finish["finish_s"], by_finish["output_tokens"].cumsum(), left=0.0)
    return pd.DataFrame(
        {
            **case,
            "prompt_mean": PROMPT,
            "output_mean": OUTPUT,
            "t_s": t,
            "queue": np.searchsorted(arrived, t, "right") - np.searchsorted(began, t, "right"),
            "batch": in_service,
            "kv_share": in_service / server.slots,
            "tokens": tokens.round(),
        }
    )


def _with_speedup(rows: pd.DataFrame) -> pd.DataFrame:
    """Speed-up over concurrent instances in duration_s at the same point."""
    point = ["devices", "requests", "rate_per_s"]
    duration = rows[rows["metric"] == "duration_s"]
    base = duration[duration["strategy"] == "concurrent_instances"][[*point, "value"]]
    joined = duration.merge(base, on=point, suffixes=("", "_base"))
    joined = joined.assign(value=joined["value_base"] / joined["value"], metric="speedup", unit="x")
    joined = joined.assign(low=joined["value"] * 0.97, high=joined["value"] * 1.03)
    return pd.concat([rows, joined[rows.columns]], ignore_index=True)


def _comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """The durations and latencies of two strategies, off by what random numbers chose."""
    noise = np.random.default_rng(3)
    shown = rows[rows["metric"].isin(["duration_s", "ttft_p99_s"])]
    shown = shown[shown["strategy"].isin(["temporal_fusion", "concurrent_instances"])]
    error = noise.normal(0, 4.0, len(shown))
    return shown.assign(
        predicted=shown["value"],
        reference=shown["value"] / (1 + error / 100),
        error_pct=error,
        role=np.where(shown["strategy"] == "temporal_fusion", "measured", "fitted"),
        source="a figure of a paper",
    )[list(COMPARED)]


SCENARIO = """name: chat on one device
study: serving
device: h200-sxm
devices: [1]
model: llama-3.1-8b
dtype: bf16
workload:
  requests: [200]
  arrivals: {kind: poisson, rate_per_s: [4, 8, 16]}
  prompt_tokens: {kind: lognormal, mean: 512, cv: 0.8, max: 4096}
  output_tokens: {kind: uniform, low: 64, high: [384]}
strategies:
  - {kind: temporal_fusion, slots: [32]}
  - {kind: dynamic_batching, window_s: [0.5], max_batch: [32]}
  - {kind: concurrent_instances, max_instances: [16]}
  - {kind: continuous_batching, token_budget: [2048]}
slo: {ttft_s: 0.5, tpot_s: 0.02}
replicas: 2
seed: 1
"""
SUMMARY: dict[str, Any] = {
    "name": "chat on one device",
    "study": "serving",
    "answer": "At 16 requests/s continuous batching, 2,048 tokens answers most requests within the SLO: "
    "it has the most slots, so nobody waits for one.",
    "notes": ["Synthetic numbers.", "Goodput counts requests that meet every SLO."],
    "warnings": ["Prices of prefill beyond 2,048 tokens are extrapolated."],
    "price_shares": {"measured": 0.7, "interpolated": 0.2, "roofline": 0.07, "extrapolated": 0.03},
    "slo": SLO,
}
PROVENANCE = {
    "versions": {"simcore": "0.1.0"},
    "device": "h200-sxm",
    "seed": 1,
    "price_sources": ["measured: a profile"],
    "laws": {"checked": ["requests are conserved"], "broken": 0},
}


def write_run(
    run_dir: Path,
    *,
    rates: Sequence[float] = (4.0, 8.0, 16.0),
    devices: Sequence[int] = (1,),
    requests: int = 200,
    replicas: int = 2,
    servers: Sequence[Server] = SERVERS,
    optional: bool = True,
) -> Path:
    """Writes a run directory and returns it; `optional` False: results and summary only."""
    results, every, levels = [], [], []
    for server, rate, count in itertools.product(servers, rates, devices):
        case = {"label": server.label, "strategy": server.strategy, "devices": count, "ranks": 1}
        case |= {"requests": requests, "rate_per_s": rate}
        found = [_requests(server, case, replica, seed=1) for replica in range(replicas)]
        results += _results(server, case, [_metrics(server, rows) for rows in found])
        every += found
        levels.append(_levels(server, case, found[0]))
    rows = _with_speedup(pd.DataFrame(results, columns=COLUMNS))
    run_dir.mkdir(parents=True, exist_ok=True)
    rows.to_csv(run_dir / "results.csv", index=False)
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY), encoding="utf-8")
    if optional:
        pd.concat(every, ignore_index=True).to_parquet(run_dir / "requests.parquet", index=False)
        pd.concat(levels, ignore_index=True).to_parquet(run_dir / "levels.parquet", index=False)
        _comparison(rows).to_csv(run_dir / "comparison.csv", index=False)
        scenario = SCENARIO.replace("replicas: 2", f"replicas: {replicas}")
        (run_dir / "scenario.yaml").write_text(scenario, encoding="utf-8")
        (run_dir / "provenance.json").write_text(json.dumps(PROVENANCE), encoding="utf-8")
    return run_dir
