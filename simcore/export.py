"""The requests of a run directory as the result file of `vllm bench serve`, so that its tools read them."""

from pathlib import Path
from typing import Any

import numpy as np

from simcore.files import InputError, nearest
from simcore.vllm_bench import write_bench

# What tells the cases of a run apart besides their label.
OPTIONS = {"rate_per_s": "--rate", "devices": "--devices"}
PLACE = ("devices", "ranks", "requests", "rate_per_s", "prompt_mean", "output_mean")


def export(
    folder: Path, target: Path, label: str | None, rate_per_s: float | None, devices: int | None
) -> int:
    """Writes one case of a serving run as vLLM's bench JSON; gives the number of requests.

    `label`, `rate_per_s` and `devices` say which case, where there are several. Raises InputError where there
    is none, or still more than one.
    """
    # Arrow takes longer to import than all else that `--help` needs.
    import pyarrow.parquet as pq  # noqa: PLC0415

    source = folder / "requests.parquet"
    if not source.is_file():
        raise InputError(f"{folder}: is no run of study serving: requests.parquet is missing")
    table = {name: column.to_numpy() for name, column in _columns(pq.read_table(source)).items()}
    chosen = np.ones(len(table["label"]), np.bool_)
    if label is not None:
        labels = list(dict.fromkeys(table["label"]))
        if label not in labels:
            raise InputError(f"--label {label}: no such case{nearest(label, labels)}")
        chosen &= table["label"] == label
    if rate_per_s is not None:
        rates = list(dict.fromkeys(table["rate_per_s"][chosen]))
        near = np.isclose(table["rate_per_s"], rate_per_s, rtol=1e-3)
        if not (chosen & near).any():
            shown = ", ".join(f"{rate:.4g}" for rate in rates)
            raise InputError(f"--rate {rate_per_s:g}: no such load (allowed: {shown})")
        chosen &= near
    if devices is not None:
        counts = sorted({int(count) for count in table["devices"][chosen]})
        if devices not in counts:
            raise InputError(f"--devices {devices}: no such case (allowed: {', '.join(map(str, counts))})")
        chosen &= table["devices"] == devices
    _check_one(table, chosen)
    one = {name: values[chosen] for name, values in table.items()}
    served = one["status"] == "finished"
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


def _columns(table: Any) -> dict[str, Any]:
    return {name: table.column(name) for name in table.column_names}


def _check_one(table: dict[str, Any], chosen: Any) -> None:
    """Raises InputError where what is chosen is more than one case."""
    labels = list(dict.fromkeys(table["label"][chosen]))
    if len(labels) > 1:
        raise InputError(f"--label: is missing: the run has several cases (allowed: {'; '.join(labels)})")
    for name in PLACE:
        values = np.unique(table[name][chosen])
        if len(values) > 1:
            shown = ", ".join(f"{value:.4g}" for value in values)
            option = f"{OPTIONS[name]}: is missing" if name in OPTIONS else f"{name} differs"
            raise InputError(f"{option}: the run has several cases ({shown})")
