"""Writes the requests of a run directory as a result file of `vllm bench serve`, which its tools read."""

from pathlib import Path
from typing import Any

import numpy as np

from simcore.input.files import InputError, listed, nearest, plain
from simcore.workload.request_logs import checked_tokens
from simcore.workload.vllm_bench import write_bench

# Columns that tell the cases of a run apart besides their label, and their options.
OPTIONS = {"rate_per_s": "--rate", "devices": "--devices"}
# Columns that are read; ranks, times and means are NaN if there is no value.
WORDS = ("label", "status")
COUNTS = ("devices", "requests", "prompt_tokens", "output_tokens")
TIMES = ("ranks", "rate_per_s", "prompt_mean", "output_mean", "arrival_s", "first_token_s", "finish_s")
FINISHED = "finished"
PLACE = ("devices", "ranks", "requests", "rate_per_s", "prompt_mean", "output_mean")


def export(
    folder: Path, target: Path, label: str | None, rate_per_s: float | None, devices: int | None
) -> int:
    """Writes one case of a serving run as vLLM's bench JSON and returns the number of requests.

    `label`, `rate_per_s` and `devices` choose the case if there are several. Raises InputError if no case
    matches, or more than one.
    """
    source = folder / "requests.parquet"
    if not source.is_file():
        raise InputError(f"{folder}: is no run of study serving: requests.parquet is missing")
    table = _requests(source)
    chosen = np.ones(len(table["label"]), np.bool_)
    if label is not None:
        labels = list(dict.fromkeys(table["label"]))
        if label not in labels:
            raise InputError(f"--label {plain(label)}: no such case{nearest(label, labels)}")
        chosen &= table["label"] == label
    if rate_per_s is not None:
        rates = list(dict.fromkeys(table["rate_per_s"][chosen]))
        near = np.isclose(table["rate_per_s"], rate_per_s, rtol=1e-3)
        if not (chosen & near).any():
            known = listed(f"{rate:.4g}" for rate in rates)
            raise InputError(f"--rate {rate_per_s:g}: no such load (allowed: {known})")
        chosen &= near
    if devices is not None:
        counts = sorted({int(count) for count in table["devices"][chosen]})
        if devices not in counts:
            raise InputError(f"--devices {devices}: no such case (allowed: {listed(counts)})")
        chosen &= table["devices"] == devices
    _check_one(table, chosen)
    one = {name: values[chosen] for name, values in table.items()}
    served = one["status"] == FINISHED
    arrival_s = one["arrival_s"]
    duration_s = float(np.max(one["finish_s"], where=served, initial=arrival_s.min()) - arrival_s.min())
    write_bench(
        target,
        start_s=arrival_s,
        prompt_tokens=one["prompt_tokens"],
        output_tokens=one["output_tokens"],
        ttft_s=np.where(served, one["first_token_s"] - arrival_s, np.nan),
        e2e_s=np.where(served, one["finish_s"] - arrival_s, np.nan),
        duration_s=duration_s,
        about={"backend": "simcore", "label": str(one["label"][0])},
    )
    return len(arrival_s)


def _requests(source: Path) -> dict[str, Any]:
    """Returns the columns of a run's requests, each [requests]. Raises InputError if a column is missing or
    holds values that no run writes."""
    # Arrow takes longer to import than everything that `--help` needs.
    from simcore.input import columns as tables  # noqa: PLC0415

    columns = tables.columns(source, [*WORDS, *COUNTS, *TIMES])
    table = {name: tables.words(columns[name], name, source) for name in WORDS}
    if not len(table["label"]):
        raise InputError(f"{source}: holds no requests")
    table |= {
        name: checked_tokens(tables.numbers(columns[name], name, source), name, source) for name in COUNTS
    }
    table |= {name: tables.figures(columns[name], name, source) for name in TIMES}
    served = table["status"] == FINISHED
    for before, after in (("arrival_s", "first_token_s"), ("first_token_s", "finish_s")):
        late = served & ~(table[before] <= table[after])
        if late.any():
            record = int(np.argmax(late)) + 1
            raise InputError(f"{source}: record {record}: {before} <= {after} does not hold")
    if np.isnan(table["arrival_s"]).any():
        raise InputError(f"{source}: arrival_s must hold a number in each record")
    return table


def _check_one(table: dict[str, Any], chosen: Any) -> None:
    """Raises InputError if the chosen requests belong to more than one case."""
    labels = list(dict.fromkeys(table["label"][chosen]))
    if len(labels) > 1:
        raise InputError(f"--label: is missing: the run has several cases (allowed: {listed(labels)})")
    for name in PLACE:
        values = np.unique(table[name][chosen])
        if len(values) > 1:
            several = listed(f"{value:.4g}" for value in values)
            option = f"{OPTIONS[name]}: is missing" if name in OPTIONS else f"{name} differs"
            raise InputError(f"{option}: the run has several cases ({several})")
