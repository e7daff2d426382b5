"""Reads and writes results in the format of `vllm bench serve --save-result --save-detailed`.

    tpot = (e2el - ttft) / (output_len - 1)      for answers of more than one token
    request_throughput = completed / duration    output_throughput = output tokens / duration
    total_token_throughput = (input tokens + output tokens) / duration

One JSON mapping. Lists with a value for each request: input_lens, output_lens, ttfts, itls (a list of gaps
each), start_times, errors ("" if there was none). Metrics {mean,median,std,pXX}_{ttft,tpot,itl,e2el}_ms over
the requests that succeeded. A failed request has output_len 0 and counts only in `failed`. Keys and formulas
are those of vllm/benchmarks/serve.py; start_times exist since January 2026 (vLLM pull request 32667).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.input.drafts import write_text
from simcore.input.files import MOST_TEXT, InputError, nearest, read_json
from simcore.input.records import checked_times, from_list
from simcore.workload.request_logs import Records, Times, Tokens, checked_tokens, records

PERCENTILES = (90, 95, 99)


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A benchmark's requests in the file's order. `failed` [n]: whether a request got no answer; `start_s`
    [n]: by the client's clock; `ttft_s` [n]; `itls_s`: an array of gaps for each request. The last three are
    None if the file has none. `figures`: the file's numbers under vLLM's names, mean_ttft_ms and so on."""

    prompt_tokens: Tokens
    output_tokens: Tokens
    failed: NDArray[np.bool_]
    start_s: Times | None
    ttft_s: Times | None
    itls_s: list[Times] | None
    figures: dict[str, float]


def read_bench(path: Path) -> Bench:
    """Reads a vLLM result file. Raises InputError if it was not saved in detail, or if its lists do not fit
    together."""
    result = _mapping(path)
    for name in ("input_lens", "output_lens"):
        if name not in result:
            hint = nearest(name, [key for key, value in result.items() if isinstance(value, list)])
            raise InputError(f"{path}: no {name!r}: it needs vLLM's --save-detailed{hint}")
    prompts = checked_tokens(_list(result, "input_lens", path), "input_lens", path)
    count = len(prompts)
    outputs = checked_tokens(_list(result, "output_lens", path, count), "output_lens", path)
    errors = result.get("errors")
    if isinstance(errors, list) and len(errors) == count:
        failed = np.fromiter((bool(error) for error in errors), bool, count)
    else:
        failed = outputs == 0
    return Bench(
        prompts,
        outputs,
        failed,
        _seconds(result, "start_times", path, count),
        _seconds(result, "ttfts", path, count),
        _gaps(result, path, count),
        {key: float(value) for key, value in result.items() if _is_number(value)},
    )


def bench_records(path: Path) -> Records:
    """The requests of a vLLM result file, by their start_times; failed requests have no output tokens. Raises
    InputError if the file has no start_times."""
    bench = read_bench(path)
    if bench.start_s is None:
        raise InputError(f"{path}: no 'start_times', so arrivals are unknown (vLLM before 2026 has none)")
    outputs = np.where(bench.failed, 0, bench.output_tokens)
    # A request that failed before it was sent has time 0, but clocks do not begin at 0.
    first_s = bench.start_s[~bench.failed].min(initial=np.inf)
    times = bench.start_s if bench.failed.all() else np.maximum(bench.start_s, first_s)
    return records(path, times, 1, bench.prompt_tokens, outputs)


def _mapping(path: Path) -> dict[str, Any]:
    result = read_json(path, MOST_TEXT)
    if not isinstance(result, dict):
        raise InputError(f"{path}: must be a mapping, {{...}}")
    return result


def _list(result: Mapping[str, Any], name: str, path: Path, count: int | None = None) -> NDArray[Any]:
    values = _sized(result, name, path, count)
    return from_list(values, name, path)


def _sized(result: Mapping[str, Any], name: str, path: Path, count: int | None) -> list[Any]:
    values = result[name]
    if not isinstance(values, list):
        raise InputError(f"{path}: {name}: must be a list")
    if count is not None and len(values) != count:
        raise InputError(f"{path}: {name} has {len(values)} values, input_lens has {count}")
    return values


def _seconds(result: Mapping[str, Any], name: str, path: Path, count: int) -> Times | None:
    if result.get(name) is None:
        return None
    return checked_times(_list(result, name, path, count), name, path).astype(np.float64)


def _gaps(result: Mapping[str, Any], path: Path, count: int) -> list[Times] | None:
    if result.get("itls") is None:
        return None
    found = []
    for index, gaps in enumerate(_sized(result, "itls", path, count)):
        name = f"itls[{index}]"
        if not isinstance(gaps, list):
            raise InputError(f"{path}: {name}: must be a list")
        found.append(checked_times(from_list(gaps, name, path), name, path).astype(np.float64))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- writing ---------------------------------------------------------------------------------------


def write_bench(
    path: Path,
    *,
    start_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    ttft_s: NDArray[np.float64],
    e2e_s: NDArray[np.float64],
    duration_s: float,
    itls_s: Sequence[Sequence[float] | NDArray[np.float64]] | None = None,
    pooled_itl_s: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes requests [n] in vLLM's format. A request whose `ttft_s` or `e2e_s` is NaN has failed.

    Gaps between tokens are known per request (`itls_s`, one sequence each), or only pooled, as (values,
    counts), or not at all; then none are written. `about` comes first: entries about the run, such as
    backend, model_id, request_rate, max_concurrency. There is no `date`, so that a run gives the same bytes
    again.
    """
    done = np.isfinite(ttft_s) & np.isfinite(e2e_s)
    outputs = np.where(done, output_tokens, 0)
    many = outputs > 1
    result: dict[str, Any] = {**(about or {}), "num_prompts": len(start_s)}
    result |= _throughput(done, prompt_tokens, outputs, duration_s)
    result |= _figures("ttft", ttft_s[done])
    result |= _figures("tpot", (e2e_s[many] - ttft_s[many]) / (outputs[many] - 1))
    if itls_s is not None:
        kept = [np.asarray(gaps, dtype=np.float64) for gaps, ok in zip(itls_s, done, strict=True) if ok]
        result |= _figures("itl", np.concatenate([np.empty(0), *kept]))
    elif pooled_itl_s is not None:
        result |= _figures("itl", *pooled_itl_s)
    result |= _figures("e2el", e2e_s[done])
    result |= {
        "input_lens": prompt_tokens.tolist(),
        "output_lens": outputs.tolist(),
        "ttfts": np.where(done, ttft_s, 0.0).tolist(),
        "start_times": start_s.tolist(),
        "errors": np.where(done, "", "rejected").tolist(),
    }
    if itls_s is not None:
        pairs = zip(itls_s, done, strict=True)
        result["itls"] = [np.asarray(gaps).tolist() if ok else [] for gaps, ok in pairs]
    write_text(path, json.dumps(result, allow_nan=False) + "\n")


def _throughput(
    done: NDArray[np.bool_], prompts: NDArray[np.int64], outputs: NDArray[np.int64], duration_s: float
) -> dict[str, float]:
    completed, read, written = int(done.sum()), int(prompts[done].sum()), int(outputs.sum())
    per_s = 1.0 / duration_s if duration_s > 0.0 else 0.0
    return {
        "duration": duration_s,
        "completed": completed,
        "failed": len(done) - completed,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": completed * per_s,
        "output_throughput": written * per_s,
        "total_token_throughput": (read + written) * per_s,
    }


def _figures(
    name: str, values_s: NDArray[np.float64], counts: NDArray[np.int64] | None = None
) -> dict[str, float]:
    """vLLM's metrics of times, each of which occurs `counts` times; all are 0 if there are no times."""
    order = np.argsort(values_s, kind="stable")
    values_ms = values_s[order] * 1e3
    counts = np.ones(len(values_s), np.int64) if counts is None else counts[order]
    ends = np.cumsum(counts)
    if not len(ends) or not ends[-1]:
        values_ms, counts, ends = np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64)
    mean = float(values_ms @ counts / ends[-1])
    variance = float((values_ms - mean) ** 2 @ counts / ends[-1])
    found = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": _percentile(values_ms, ends, 50),
        f"std_{name}_ms": variance**0.5,
    }
    return found | {f"p{p}_{name}_ms": _percentile(values_ms, ends, p) for p in PERCENTILES}


def _percentile(values: NDArray[np.float64], ends: NDArray[np.int64], percent: float) -> float:
    """numpy's percentile of sorted values, of which value i fills places ends[i-1] to ends[i] - 1."""
    place = (int(ends[-1]) - 1) * percent / 100.0
    low = int(place)
    below, above = (float(values[np.searchsorted(ends, at, side="right")]) for at in (low, np.ceil(place)))
    return below + (above - below) * (place - low)
