"""Result files of `vllm bench serve` as runs of a service: what was measured, and the load that it was under.

    load of a file                       simulated as
    no request_rate, or "inf"            clients that each send a request after the answer to their last one:
                                         max_concurrency of them, or all num_prompts at once
    a request_rate, with start_times     the requests as recorded
    a request_rate                       Poisson arrivals, or gamma's by the file's burstiness

Lengths are the file's own (input_lens and output_lens of --save-detailed), else its means. Where a rate is
more than max_concurrency clients can take up, these clients are the load. Keys are those of
vllm/benchmarks/serve.py, `--save-result`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simcore.input.files import MOST_TEXT, InputError, read_json, shown
from simcore.input.records import from_list
from simcore.validate.calibration.service import Times
from simcore.workload.request_logs import Tokens, checked_tokens

# From which share of max_concurrency on the clients limit a rate.
FULL = 0.95
MS = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class ServiceRun:
    """A result file. `times`: means over the requests that succeeded; `workload`: its load, as a scenario has
    it; `sequences`: how many requests decode at a time; `prompt_tokens`: the mean; `rate_per_s`: of
    answers; `listed`: whether the file has the length of each request; `capped`: whether it has a rate and a
    number of clients."""

    path: Path
    times: Times
    workload: Mapping[str, Any]
    sequences: float
    prompt_tokens: float
    rate_per_s: float
    listed: bool
    capped: bool


def read_run(path: Path) -> ServiceRun:
    """Reads a result file. Raises InputError with its name and that of a field that is missing or wrong."""
    result = read_json(path, MOST_TEXT)
    if not isinstance(result, dict):
        raise InputError(f"{path}: must be a mapping, {{...}}, as vllm bench serve --save-result writes it")
    completed = _number(path, result, "completed", whole=True)
    times = Times(MS * _number(path, result, "mean_ttft_ms"), MS * _number(path, result, "mean_tpot_ms"))
    duration_s = _number(path, result, "duration")
    if times.ttft_s > duration_s:
        raise InputError(
            f"{path}: mean_ttft_ms: is {1e3 * times.ttft_s:g}; more than duration, {duration_s:g} s"
        )
    prompts = _number(path, result, "total_input_tokens", whole=True) / completed
    answers = _number(path, result, "total_output_tokens", whole=True) / completed
    if answers <= 1.0:
        raise InputError(f"{path}: total_output_tokens: answers have {answers:g} tokens; above 1 is needed")
    decode_s = (answers - 1.0) * times.tpot_s
    if decode_s > duration_s:
        raise InputError(
            f"{path}: mean_tpot_ms: is {1e3 * times.tpot_s:g}; answers of {answers:g} tokens would take"
            f" longer than duration, {duration_s:g} s"
        )
    arrivals = _arrivals(path, result, completed, times.ttft_s + decode_s)
    workload: dict[str, Any] = {"arrivals": arrivals}
    if arrivals["kind"] != "trace":
        workload |= {
            "requests": int(completed),
            "prompt_tokens": _lengths(path, result, "input_lens", prompts, completed),
            "output_tokens": _lengths(path, result, "output_lens", answers, completed),
        }
    return ServiceRun(
        path,
        times,
        workload,
        completed * decode_s / duration_s,
        prompts,
        completed / duration_s,
        result.get("input_lens") is not None,
        result.get("max_concurrency") is not None and result.get("request_rate") not in (None, "inf"),
    )


def _arrivals(path: Path, result: Mapping[str, Any], completed: float, stay_s: float) -> dict[str, Any]:
    """Returns a file's load as arrivals of a scenario. `stay_s`: a request's mean latency."""
    most = result.get("max_concurrency")
    if most is None and "request_rate" not in result:
        raise InputError(f"{path}: request_rate: is missing; vllm bench serve --save-result writes it")
    clients = None if most is None else int(_number(path, result, "max_concurrency", whole=True))
    rate = result.get("request_rate", "inf")
    if rate is None or rate == "inf":
        several = clients or int(_number(path, result, "num_prompts", whole=True))
        return {"kind": "closed_loop", "clients": several}
    per_s = _number(path, result, "request_rate")
    if clients is not None and per_s * stay_s >= FULL * clients:
        return {"kind": "closed_loop", "clients": clients}
    if result.get("start_times") is not None and result.get("input_lens") is not None:
        return {"kind": "trace", "format": "vllm", "path": str(path.absolute())}
    bursts = 1.0 if result.get("burstiness") is None else _number(path, result, "burstiness")
    if bursts == 1.0:
        return {"kind": "poisson", "rate_per_s": per_s}
    # Gaps of shape k have a coefficient of variation of 1 / sqrt(k).
    return {"kind": "gamma", "rate_per_s": per_s, "cv": 1.0 / math.sqrt(bursts)}


def _lengths(
    path: Path, result: Mapping[str, Any], name: str, mean: float, completed: float
) -> dict[str, Any]:
    """Returns lengths of a scenario: those that the file lists, of requests that succeeded, else the mean."""
    values = result.get(name)
    if values is None:
        return {"kind": "constant", "value": max(1, round(mean))}
    if not isinstance(values, list):
        raise InputError(f"{path}: {name}: is {shown(values)}; a list of numbers is needed")
    known: Tokens = checked_tokens(from_list(values, name, path), name, path)
    kept = known[known > 0]
    # Those that failed are in it too.
    if len(kept) < completed or kept.sum() < round(mean * completed):
        raise InputError(
            f"{path}: {name}: has {len(kept)} lengths above 0, {int(kept.sum())} tokens in all; {completed:g}"
            f" requests with {mean * completed:g} tokens are said to be completed"
        )
    if (kept == kept[0]).all():
        return {"kind": "constant", "value": int(kept[0])}
    return {"kind": "empirical", "values": np.sort(kept).tolist()}


def _number(path: Path, result: Mapping[str, Any], name: str, *, whole: bool = False) -> float:
    """Returns a number above 0 of a file. Raises InputError."""
    if name not in result:
        raise InputError(f"{path}: {name}: is missing; vllm bench serve --save-result writes it")
    value = result[name]
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not (usable and math.isfinite(value) and value > 0 and (not whole or value == int(value))):
        kind = "whole number" if whole else "number"
        raise InputError(f"{path}: {name}: is {shown(value)}; a {kind} above 0 is needed")
    return float(value)
