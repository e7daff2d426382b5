"""Rows of a table of measured engines: the run, its origin, and the bounds that no card can break.

A row is a closed loop of `clients`, prompts of `isl` and answers of `osl` tokens, on `ranks` cards. The
datasheet alone implies bounds for any engine, with n = clients * (osl - 1) TPOT / cycle decoding sequences,
cycle = TTFT + (osl - 1) TPOT, W bytes of matrices, b cached bytes of a token, F(p) operations of p tokens:

    TPOT  >= (W + n b (isl + osl / 2)) / (ranks * bytes a second)
    TTFT  >= F(isl) / (ranks * operations a second)
    cycle >= clients F(isl + osl) / (ranks * operations a second)

`engines.yaml` has the `series` of measurements and their documented facts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass as checked

from simcore.devices.spec import load_device
from simcore.input.files import STRICT, Count, InputError, Share, read_cells, read_yaml, validated
from simcore.models.decoder import Quantized, why_not
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.ops.op import DTYPE_BYTES, multiplied_as
from simcore.studies.serving.engines.products import Measured
from simcore.validate import cells
from simcore.validate.calibration.service import Times

HERE = Path(__file__).resolve().parent
ENGINES = HERE / "engines.yaml"
MODELS = HERE.parents[1] / "scenarios" / "models"
CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
# Models of the catalogue by what a row's model_path contains; constants are fitted to rows of the first two.
NAMES = {"llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3.1-70b", "qwen3-32b": "qwen3-32b"}
FITTED = frozenset({"llama-3.1-8b", "llama-3.1-70b"})
FORMATS = {"fp8": "fp8", "fp8_block": "fp8_b128", "": "bf16", "bf16": "bf16", "float16": "bf16"}
# The KV cache of a series whose rows have it in the format of their weights.
AS_WEIGHTS = "weights"
# What a row's origin says of how many clients there were. Without it only the batch of its configuration is
# known, which is another number where several servers share the clients.
SAYS_CLIENTS = "silicon_concurrency="
MOST_CLIENTS = 100_000
COLUMNS = (
    "id", "silicon_data_source", "backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode",
    "batch_size", "tp_size", "pp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip


@checked(frozen=True, config=STRICT)
class Wait:
    """Batch waiting on fewer than `below_ranks` cards with these lengths: up to `steps` steps, or until a
    step fills `share` of its budget."""

    lengths: str
    below_ranks: Count
    steps: Count
    share: Share


@checked(frozen=True, config=STRICT)
class Series:
    """The origin of some rows; the head of `engines.yaml` explains the fields."""

    name: str
    source: str
    backend: str
    engine: str
    prefill: Literal["chunked", "whole", "first"]
    token_budget: Count
    max_sequences: Count | Literal["clients"]
    kv_dtype: str
    memory_share: Share
    ahead: int
    rounds: Count
    warm_up: int
    shortest: Share
    facts: str
    by_lengths: dict[str, Count] = field(default_factory=dict)
    wait: Wait | None = None
    distinct_prompts: Count | None = None
    budget_beyond_prompt: Count | None = None
    constants_of: str | None = None
    host_of: str | None = None
    products_of: Measured | None = None
    quantizes: tuple[Quantized, ...] = ()
    checkpoints: dict[str, str] = field(default_factory=dict)
    places_missing: dict[str, Count] = field(default_factory=dict)

    @property
    def fitted_as(self) -> str:
        """The series whose constants these rows are predicted with."""
        return self.constants_of or self.name


@checked(frozen=True, config=STRICT)
class _Document:
    series: tuple[Series, ...]


@cache
def series() -> tuple[Series, ...]:
    """Returns the known series of engines and measurements."""
    return validated(_Document, read_yaml(ENGINES), str(ENGINES)).series


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row; times in seconds, `weights`: the number format of the layers' matrices;
    `says_clients`: whether its origin says how many clients there were."""

    id: str
    engine: str
    model: str
    card: str
    ranks: int
    clients: int
    isl: int
    osl: int
    weights: str
    series: Series
    ttft_s: float
    tpot_s: float
    says_clients: bool

    @property
    def lengths(self) -> str:
        """Lengths of prompt and answer, as one word."""
        return f"{self.isl}x{self.osl}"

    @property
    def kv_dtype(self) -> str:
        """The number format of the KV cache."""
        return multiplied_as(self.weights) if self.series.kv_dtype == AS_WEIGHTS else self.series.kv_dtype

    @property
    def places(self) -> int:
        """How many requests the engine ran at a time, at most; one at least."""
        known = self.series
        most = self.clients if known.max_sequences == "clients" else known.max_sequences
        missing = known.places_missing.get(self.model)
        return most if missing is None else max(min(most, self.clients - missing), 1)

    @property
    def cycle_s(self) -> float:
        """Seconds from one request of a client to its next."""
        return self.ttft_s + (self.osl - 1) * self.tpot_s

    @property
    def times(self) -> Times:
        """What was measured, as a run that constants are fitted to."""
        return Times(self.ttft_s, self.tpot_s)

    @property
    def sequences(self) -> float:
        """Requests that decode at a time, in the mean."""
        return self.clients * (self.osl - 1) * self.tpot_s / self.cycle_s

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt, in the mean."""
        return self.isl * (1.0 + self.series.shortest) / 2.0

    @property
    def rate_per_s(self) -> float:
        """Requests that are answered in a second."""
        return self.clients / self.cycle_s

    @property
    def label(self) -> str:
        """The row's name in a table."""
        return f"{self.engine} {self.model} {self.card} TP{self.ranks} {self.lengths} c{self.clients}"


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Returns the rows of NAMES on H100 and H200 in mode agg, and the number of others.
    Raises InputError if the file is no such table, a number is invalid, or a row is of no known series."""
    head, rows = read_cells(path)
    lines = [dict(zip(head, row, strict=True)) for row in rows]
    missing = [name for name in COLUMNS if name not in head]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; columns needed: {', '.join(COLUMNS)}")
    found = [_row(path, number, line) for number, line in enumerate(lines, 2) if _is_ours(line)]
    if not found:
        raise InputError(
            f"{path}: model_path: no row is of {', '.join(NAMES)} on {', '.join(CARDS)} in mode agg"
        )
    return found, len(lines) - len(found)


def _model(path: str) -> str | None:
    return next((name for part, name in NAMES.items() if part in path.lower()), None)


def _is_ours(line: dict[str, str]) -> bool:
    return bool(line["mode"] == "agg" and line["system"] in CARDS and _model(line["model_path"]))


def _row(path: Path, number: int, line: dict[str, str]) -> Row:
    where = f"{path}: line {number}"
    if cells.count(where, line, "pp_size") != 1:
        raise InputError(f"{where}: pp_size: is {line['pp_size']}; 1 is allowed")
    given = line["gemm_quant_mode"]
    if given not in FORMATS:
        allowed = ", ".join(name or "nothing" for name in FORMATS)
        raise InputError(f"{where}: gemm_quant_mode: {given!r} is unknown (allowed: {allowed})")
    model = _model(line["model_path"])
    assert model is not None
    ranks, clients, isl, osl = (
        cells.count(where, line, name) for name in ("tp_size", "batch_size", "isl", "osl")
    )
    of = _series(where, line)
    row = Row(
        id=line["id"],
        engine=line["backend"],
        model=model,
        card=CARDS[line["system"]],
        ranks=ranks,
        clients=clients,
        isl=isl,
        osl=osl,
        weights=of.checkpoints.get(model, FORMATS[given]),
        series=of,
        ttft_s=cells.positive(where, line, "silicon_ttft_ms") * 1e-3,
        tpot_s=cells.positive(where, line, "silicon_tpot_ms") * 1e-3,
        says_clients=SAYS_CLIENTS in line["silicon_data_source"],
    )
    _check_sizes(where, row)
    return row


def _series(where: str, line: dict[str, str]) -> Series:
    """The series that a line belongs to. Raises InputError."""
    backend, source = line["backend"], line["silicon_data_source"]
    backends = sorted({each.backend for each in series()})
    if backend not in backends:
        raise InputError(f"{where}: backend: {backend!r} is unknown (allowed: {', '.join(backends)})")
    found = next((each for each in series() if each.source in source and each.backend == backend), None)
    if found is None:
        none = f"no series of {backend} in {ENGINES.name} is like {source!r}"
        raise InputError(f"{where}: silicon_data_source: {none}")
    return found


def _check_sizes(where: str, row: Row) -> None:
    """Raises InputError for a row that no run could have given."""
    config = config_of(row.model)
    if (why := why_not(config, row.ranks)) is not None:
        raise InputError(f"{where}: tp_size: {why}")
    if row.clients > MOST_CLIENTS:
        raise InputError(f"{where}: batch_size: is {row.clients}; at most {MOST_CLIENTS} is allowed")
    if row.osl < 2:
        raise InputError(f"{where}: osl: is {row.osl}; at least 2 is needed, for one token has no TPOT")
    if config.limit is not None and row.isl + row.osl > config.limit.tokens:
        more = f"more than {row.model}'s {config.limit.tokens}"
        raise InputError(f"{where}: isl: {row.isl} and {row.osl} tokens of osl are {more}")


# -- impossible rows -------------------------------------------------------------------------------------


@cache
def config_of(model: str) -> DecoderConfig:
    """Returns the dimensions of a model of the catalogue."""
    return load_config(MODELS / f"{model}.json")


def impossible(row: Row) -> str:
    """Names the bound of the datasheet that a row breaks most, and its factor; empty if it breaks none.
    Lengths are the means of the series' distribution."""
    spec, share = load_device(row.card), (1.0 + row.series.shortest) / 2.0
    prompt, answer = row.isl * share, row.osl * share
    decode_s = (answer - 1.0) * row.tpot_s
    cycle_s = row.ttft_s + decode_s
    matrix_s = _matrix_bytes(row) / (row.ranks * spec.hbm_bytes_per_s)
    decoding = row.clients * decode_s / cycle_s
    cached_s = decoding * (prompt + answer / 2.0) * _cached_bytes(row) / (row.ranks * spec.hbm_bytes_per_s)
    rate = row.ranks * spec.peak_flops_per_s(row.weights)
    prompt_s = _flops(row, prompt) / rate
    bounds = (
        (matrix_s + cached_s, row.tpot_s, "TPOT below reading weights and KV cache"),
        (prompt_s, row.ttft_s, "TTFT below the arithmetic of its prompt"),
        (row.clients * _flops(row, prompt + answer) / rate, cycle_s, "more tokens a second than arithmetic"),
    )
    broken = [(least / found, what) for least, found, what in bounds if least > found]
    return f"{max(broken)[1]} allows ({max(broken)[0]:.2f} times the card's peak)" if broken else ""


def _matrix_bytes(row: Row) -> float:
    """Returns the bytes of weights that a step reads on all ranks; the LM head is in bf16."""
    config = config_of(row.model)
    layers = config.layers * sum(config.layer_weights.values()) * DTYPE_BYTES[row.weights]
    return layers + config.vocab * config.hidden * DTYPE_BYTES["bf16"]


def _cached_bytes(row: Row) -> float:
    """Returns the bytes of KV cache of a token on all ranks."""
    config = config_of(row.model)
    width = 2 * max(config.kv_heads, row.ranks) * config.head_dim * config.layers
    return width * DTYPE_BYTES[row.kv_dtype]


def _flops(row: Row, tokens: float) -> float:
    """Returns the operations of the layers' matrices for tokens, without attention and LM head."""
    config = config_of(row.model)
    return 2.0 * tokens * config.layers * sum(config.layer_weights.values())


# -- inconsistent rows -----------------------------------------------------------------------------------

# Rows are inconsistent only if a time contradicts another by more than this factor.
NOISE = 1.15


def inconsistent(row: Row, rows: Sequence[Row]) -> str:
    """Returns the strongest contradiction by a row that differs only in clients or cards: it has more clients
    or fewer cards, and yet is faster, or the reverse. Empty if there is none."""
    found: list[tuple[float, str]] = []
    for other in rows:
        for factor, text in _contradictions(row, other):
            if factor > NOISE:
                found.append((factor, text))
    return max(found)[1] if found else ""


def _contradictions(row: Row, other: Row) -> list[tuple[float, str]]:
    if (row.series, row.model, row.card, row.isl, row.osl) != (
        other.series, other.model, other.card, other.isl, other.osl,
    ):  # fmt: skip
        return []
    harder = row.clients >= other.clients and row.ranks <= other.ranks
    easier = row.clients <= other.clients and row.ranks >= other.ranks
    if harder == easier:
        return []
    where = f"TP{other.ranks} c{other.clients}"
    pairs = (("TTFT", row.ttft_s, other.ttft_s), ("TPOT", row.tpot_s, other.tpot_s))
    return [
        (mine / theirs if easier else theirs / mine, f"{name} is {1e3 * theirs:.3g} ms at {where}")
        for name, mine, theirs in pairs
    ]
