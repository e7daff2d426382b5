"""Rows of a table of MLPerf Inference results: single runs of a system, with the engine's published settings.

A table has a row for each published performance run. Used are valid runs of scenarios Server and Interactive
whose settings were published. Runs of one system that differ only in the accuracy they vouch for
(llama2-70b-99 and -99.9) count once. A third of them, drawn by a seed, may be looked at, but none of UNSEEN;
the rest are reported apart.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simcore.input.files import InputError, read_cells
from simcore.validate import cells

SCENARIOS = {"Server": "server", "Interactive": "interactive"}
# Names of models in the table, in the catalogue, and in the published limits.
MODELS = {
    "llama2-70b-99": ("llama-2-70b", "mlperf/llama2-70b"),
    "llama2-70b-99.9": ("llama-2-70b", "mlperf/llama2-70b"),
    "llama3.1-8b": ("llama-3.1-8b", "mlperf/llama3.1-8b"),
    "llama3.1-405b": ("llama-3.1-405b", "mlperf/llama3.1-405b"),
}
# Models to whose rows nothing is fitted: none of them may be looked at.
UNSEEN = frozenset({"llama3.1-405b"})
TEXTS = ("submitter", "system", "model", "scenario", "accelerator", "form", "valid", "policy", "chunked")
FORMATS = ("precision", "kv_dtype")
COUNTS = ("accelerators", "tp", "pp", "max_num_tokens", "max_batch_size")
TIMES = (
    "scheduled_per_s",
    "samples_per_s",
    "tokens_per_s",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "tpot_p50_s",
    "tpot_p99_s",
)
COLUMNS = (*TEXTS, *FORMATS, *COUNTS, *TIMES, "kv_fraction")
# The share of rows that may be looked at.
LOOKED_AT = 3
HALVES = ("fit", "rest", "all")
# What TensorRT-LLM's scheduling policies leave room for, as a strategy says it.
POLICIES: dict[str, dict[str, float] | None] = {"max_util": None, "guaranteed_no_evict": {"share": 1.0}}


@dataclass(frozen=True, slots=True)
class Row:
    """One published run. `card`: accelerator and form, as in "H200 SXM"; `ranks`: accelerators of a replica;
    `rate_per_s`: scheduled by the load generator for all `accelerators`; `is_fit`: may be looked at."""

    submitter: str
    system: str
    model: str
    scenario: str
    card: str
    accelerators: int
    ranks: int
    max_num_tokens: int
    max_batch_size: int
    policy: str
    chunked: bool
    precision: str
    kv_dtype: str
    kv_share: float
    rate_per_s: float
    answer_tokens: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    is_fit: bool = False

    @property
    def replicas(self) -> int:
        """Servers of `ranks` accelerators."""
        return self.accelerators // self.ranks

    @property
    def limits(self) -> str:
        """The name of the published limits."""
        return f"{MODELS[self.model][1]}/{SCENARIOS[self.scenario]}"

    @property
    def label(self) -> str:
        """The row's name in a table."""
        model = self.model.removesuffix(".9").removesuffix("-99")
        return f"{self.submitter} {self.accelerators} x {self.card} {model} {self.scenario}"


def read_rows(path: Path, seed: int) -> tuple[list[Row], int]:
    """Returns the usable rows of a table, in its order, and the number of others. Raises InputError if
    the file is no such table, or a number is invalid."""
    head, cells = read_cells(path)
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; columns needed: {', '.join(COLUMNS)}")
    lines = [dict(zip(head, row, strict=True)) for row in cells]
    found: dict[tuple[str, ...], Row] = {}
    for number, line in enumerate(lines, 2):
        if _is_usable(line):
            row = _row(f"{path}: line {number}", line)
            found.setdefault((row.submitter, row.system, row.limits), row)
    if not found:
        wanted = f"{' or '.join(MODELS)}, {' or '.join(SCENARIOS)}"
        raise InputError(f"{path}: model: no valid row with published settings is of {wanted}")
    names = sorted(name for name, row in found.items() if row.model not in UNSEEN)
    fit = set(random.Random(str(seed)).sample(names, len(names) // LOOKED_AT))
    return [replace(row, is_fit=name in fit) for name, row in found.items()], len(lines) - len(found)


def half(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns the rows that may be looked at ("fit"), the others ("rest"), or all."""
    return [row for row in rows if name == "all" or row.is_fit == (name == "fit")]


def _is_usable(line: dict[str, str]) -> bool:
    known = line["model"] in MODELS and line["scenario"] in SCENARIOS and line["valid"] == "VALID"
    return bool(known and line["tp"] and line["accelerators"])


def _row(where: str, line: dict[str, str]) -> Row:
    count = {name: cells.count(where, line, name) for name in COUNTS}
    time = {name: cells.positive(where, line, name) for name in TIMES}
    ranks = count["tp"] * count["pp"]
    if count["pp"] != 1:
        raise InputError(f"{where}: pp: is {count['pp']}; 1 is allowed")
    if count["accelerators"] % ranks:
        raise InputError(f"{where}: accelerators: is {count['accelerators']}; a multiple of tp is needed")
    if line["policy"] not in POLICIES:
        allowed = " or ".join(POLICIES)
        raise InputError(f"{where}: policy: is {line['policy']!r}; {allowed} is allowed")
    if line["chunked"] not in ("True", "False"):
        raise InputError(f"{where}: chunked: is {line['chunked']!r}; True or False is needed")
    for name in FORMATS:
        if line[name] not in ("fp8", "bf16"):
            raise InputError(f"{where}: {name}: is {line[name]!r}; fp8 or bf16 is allowed")
    return Row(
        submitter=line["submitter"],
        system=line["system"],
        model=line["model"],
        scenario=line["scenario"],
        card=f"{line['accelerator']} {line['form']}",
        accelerators=count["accelerators"],
        ranks=ranks,
        max_num_tokens=count["max_num_tokens"],
        max_batch_size=count["max_batch_size"],
        policy=line["policy"],
        chunked=line["chunked"] == "True",
        precision=line["precision"],
        kv_dtype=line["kv_dtype"],
        kv_share=_share(where, line, "kv_fraction"),
        rate_per_s=time["scheduled_per_s"],
        answer_tokens=time["tokens_per_s"] / time["samples_per_s"],
        ttft_mean_s=time["ttft_mean_s"],
        ttft_p99_s=time["ttft_p99_s"],
        tpot_mean_s=time["tpot_mean_s"],
        tpot_p50_s=time["tpot_p50_s"],
        tpot_p99_s=time["tpot_p99_s"],
    )


def _share(where: str, line: dict[str, str], name: str) -> float:
    value = cells.positive(where, line, name)
    if value > 1.0:
        raise InputError(f"{where}: {name}: is {value:g}; at most 1 is allowed")
    return value
