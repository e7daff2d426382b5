"""Throughput of generation on this machine's CUDA card: ours beside Hugging Face transformers.

    python -m simcore.validate.benchmarks.generation [SCENARIO.yaml] [--out FILE.csv]

    seconds     from the first request's coming to the last token
    tokens/s    output tokens of all requests / seconds            requests/s = requests / seconds
    ours over   our tokens/s / theirs

The scenario gives model, number format, lengths of prompts and answers, and the continuous batching that is
compared: its first strategy of that kind. All requests are there at once: ours come at RATE_PER_S. Weights
are random, of the same shapes but not the same numbers, so tokens cannot be compared. What is checked, of
transformers only, is that each request got as many as it asked for. `transformers_generation` says how
transformers runs.

Two differences are in our favour. Ours knows the length of each answer beforehand, so that its host need not
read tokens: they stay in the card's memory, while transformers brings those of each step to the host or looks
there for an end. And tokens of ours are not counted on the card: they are those that finished requests asked
for, as the laws of a serving run hold them to the steps that were launched.

Two more are of how transformers runs. Its continuous batching attends by `paged|sdpa` where no FlashAttention
package is installed; `config` says by what. And its static batches are of 32 requests, however many the
memory would hold.

Each method has a process of its own: what one holds, or breaks, is gone before the next begins, and so are
processes that it started. One that fails has a row with its error. A partial file beside FILE.csv keeps the
rows until all are there, and those of a benchmark that failed.

Exit code: 0, 1 if ours failed or all did, 2 for bad input, without a CUDA device or on one that no device of
the catalogue describes.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from simcore.assembly import Place, assemble, model_path
from simcore.input.drafts import write_text
from simcore.input.fields import count, single_valued
from simcore.input.files import InputError
from simcore.input.shipped import found as found_scenario
from simcore.kernels.kernel import DTYPES
from simcore.models.decoder_config import load_config
from simcore.models.number_formats import PLAIN
from simcore.scenario import load_scenario
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import ContinuousBatching
from simcore.terminal import BROKEN, progress
from simcore.validate.apart import exit_code
from simcore.validate.benchmarks import transformers_generation as peers
from simcore.validate.benchmarks.cases import BORN, number
from simcore.validate.benchmarks.run import say
from simcore.validate.benchmarks.timing import Card, birth, one_line, version_of
from simcore.validate.benchmarks.transformers_generation import Asked, Timed
from simcore.validate.calibration.cuda import this_card
from simcore.validate.machines.buffers.served import prompt_ids
from simcore.validate.machines.cuda.runs import RealCard, this_machine
from simcore.validate.machines.cuda.states import SEED, check_card_runs
from simcore.validate.program import aligned, check_out, named, partial_of, run, write_csv
from simcore.validate.timing.precompile import compile_for
from simcore.workload.arrivals import draw
from simcore.workload.drawn import requests as drawn_requests

OURS = "ours"
METHODS = (OURS, *peers.BY_NAME)
DEFAULT = f"{OURS},continuous,static_sorted"
SCENARIO = Path("h200/serving")
REQUESTS, MOST_REQUESTS, LIMIT_S = 128, 100_000, 240.0
# So many requests a second are all there at once.
RATE_PER_S = 1e6
# Formats in which both run.
FORMATS = ("bf16", "fp16", "fp32")
# A birth record needs no rates of the card.
NO_RATES = Card(0, 0, nan, "", nan)


@dataclass(frozen=True, slots=True)
class Row:
    """A method's result, or its error in `note`. `prepared_s`: to compile, capture and warm up before. If it
    failed, `seconds` and `prepared_s` are None, and `output_tokens` is 0."""

    method: str
    version: str
    model: str
    dtype: str
    requests: int
    prompt_tokens: int
    output_tokens: int = 0
    seconds: float | None = None
    prepared_s: float | None = None
    config: str = ""
    note: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens over seconds."""
        return self.output_tokens / self.seconds if self.seconds else None

    @property
    def requests_per_s(self) -> float | None:
        """Requests over seconds."""
        return self.requests / self.seconds if self.seconds else None


# -- the scenario ----------------------------------------------------------------------------------------


def at_once(path: Path, requests: int, device: str | None = None) -> tuple[ServingScenario, str]:
    """Returns a scenario with its first requests, all there at once, and one strategy; and its name in
    messages. `device`: on which it runs, by default its own. Raises InputError."""
    file = found_scenario(path)
    where = str(file)
    if not isinstance(load_scenario(file, typed=path), ServingScenario):
        raise InputError(f"{where}: study: serving is needed")
    settings = [
        f"workload.requests={requests}",
        f"workload.arrivals={{kind: constant, rate_per_s: {RATE_PER_S:.0f}}}",
        "replicas=1",
        *([] if device is None else [f"device={device}"]),
    ]
    scenario = load_scenario(file, settings, typed=path)
    assert isinstance(scenario, ServingScenario)
    if scenario.dtypes or dtype_of(scenario) not in FORMATS:
        field = "dtypes" if scenario.dtypes else "dtype"
        raise InputError(f"{where}: {field}: one of {', '.join(FORMATS)} for all, as dtype, is needed")
    if (loads := count(scenario.workload)) != 1:
        raise InputError(f"{where}: workload: makes {loads} loads; one is needed")
    scenario = scenario.model_copy(update={"strategies": [_continuous(scenario, where)]})
    check_card_runs(scenario, where)
    # Refuses names of models and devices that do not exist.
    assemble(scenario, where)
    return scenario, where


def _continuous(scenario: ServingScenario, where: str) -> ContinuousBatching:
    for place, strategy in enumerate(scenario.strategies):
        if isinstance(strategy, ContinuousBatching):
            if (variants := count(strategy)) != 1:
                raise InputError(f"{where}: strategies[{place}]: makes {variants} variants; one is needed")
            return strategy
    raise InputError(f"{where}: strategies: none is of kind continuous_batching, which is compared")


def dtype_of(scenario: ServingScenario) -> str:
    """Returns the number format of a scenario."""
    return scenario.dtype or PLAIN


def asked_of(scenario: ServingScenario) -> Asked:
    """Returns the requests of a scenario, with the prompts that ours has. Raises InputError."""
    drawn = draw(next(single_valued(scenario.workload)), scenario.seed, 0)
    vocab = load_config(model_path(scenario.model)).vocab
    every = list(drawn_requests(drawn))
    return Asked(
        tuple(tuple(prompt_ids(one, vocab, SEED).tolist()) for one in every),
        tuple(one.output_tokens for one in every),
    )


# -- one method ------------------------------------------------------------------------------------------


def served(real: RealCard, scenario: ServingScenario, where: str) -> Timed:
    """Serves a scenario on a card. Raises InputError, or LawError, as a run on a card does."""
    place = Place("cuda", real.start, 1, described=lambda: real.described)
    outcome = assemble(scenario, where, place).study.run(progress())
    figures = {row.metric: row.value for row in outcome.rows}
    table: Mapping[str, Any] = outcome.tables["requests.parquet"]
    order = table["request"].argsort()
    got = [
        int(tokens) if status == "finished" else 0
        for tokens, status in zip(table["output_tokens"][order], table["status"][order], strict=True)
    ]
    seconds = figures["duration_s"]
    if not seconds:
        raise ValueError("no request was served")
    config = f"{scenario.strategies[0].label()}, captured graphs"
    return Timed(seconds, real.compiling_s + real.first_runs_s, tuple(got), config)


def of_method(method: str, scenario: ServingScenario, where: str, asked: Asked) -> Timed:
    """Runs a method on this machine's card. Raises the errors of its run."""
    if method == OURS:
        begun_s = time.perf_counter()
        compile_for(scenario, where, progress())
        return served(this_machine(1, compiling_s=time.perf_counter() - begun_s), scenario, where)
    model = peers.model_of(model_path(scenario.model), DTYPES[dtype_of(scenario)], "cuda")
    return peers.BY_NAME[method](asked, model)


def empty_row(method: str, scenario: ServingScenario, asked: Asked) -> Row:
    """Returns a row without a result."""
    package = "simcore" if method == OURS else peers.PACKAGE
    return Row(
        method,
        f"{package} {version_of(package)}".strip(),
        load_config(model_path(scenario.model)).name,
        dtype_of(scenario),
        len(asked.prompts),
        sum(map(len, asked.prompts)),
    )


def filled(row: Row, asked: Asked, call: Callable[[], Timed]) -> Row:
    """Returns a row with a call's result, or with its error. It is an error, too, if a request got another
    number of tokens than it asked for."""
    try:
        found = call()
        if found.generated != asked.output_tokens:
            pairs = zip(found.generated, asked.output_tokens, strict=True)
            wrong = sum(got != wanted for got, wanted in pairs)
            raise ValueError(f"{wrong} requests got another number of tokens than they asked for")
    except Exception as error:
        return replace(row, note=one_line(error))
    tokens = sum(found.generated)
    return replace(
        row, output_tokens=tokens, seconds=found.seconds, prepared_s=found.prepared_s, config=found.config
    )


# -- all methods -----------------------------------------------------------------------------------------

Born = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """A row and its birth record."""

    row: Row
    born: Born


def born_here() -> Born:
    """Returns the birth record of what this process has measured."""
    return {name: str(value) for name, value in asdict(birth(NO_RATES)).items() if name in BORN}


def in_a_process(command: Sequence[str], row: Row, limit_s: float) -> Line | str:
    """Runs a command that writes a line to the file that is its last argument. Returns the line, or in words
    why there is none. `row`: whose it is."""
    say(f"{row.method}: {row.version}")
    # What a package would fetch by itself would not be what is installed here.
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "line.json"
        code = exit_code([*command, str(file)], limit_s, environment)
        if code is None:
            return f"not done after {limit_s:g} s"
        if not file.exists():
            return f"its process ended with exit code {code}"
        found = json.loads(file.read_text(encoding="utf-8"))
    return Line(Row(**found["row"]), found["born"])


def cells(lines: Sequence[Line]) -> list[dict[str, object]]:
    """Returns the lines of the table in a file."""
    return [
        {
            **asdict(line.row),
            "output_tokens_per_s": line.row.tokens_per_s,
            "requests_per_s": line.row.requests_per_s,
            "ours_over_it": ours_over(lines, line.row),
            **line.born,
        }
        for line in lines
    ]


def ours_over(lines: Sequence[Line], row: Row) -> float | None:
    """Returns our tokens/s over those of a row, None if either is missing."""
    ours = next((line.row.tokens_per_s for line in lines if line.row.method == OURS), None)
    return ours / row.tokens_per_s if ours and row.tokens_per_s else None


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yields the printed table."""
    head = [
        "method",
        "requests",
        "output tokens",
        "seconds",
        "tokens/s",
        "requests/s",
        "ours over",
        "prepared s",
    ]
    text = [[*head, "how"]]
    for line in lines:
        row = line.row
        numbers = [
            number(row.seconds, ".2f"),
            number(row.tokens_per_s, ",.0f"),
            number(row.requests_per_s, ".2f"),
            number(ours_over(lines, row), ".2f"),
            number(row.prepared_s, ".1f"),
        ]
        tokens = f"{row.output_tokens:,}" if row.seconds else "-"
        text.append([row.method, f"{row.requests:,}", tokens, *numbers, row.note or row.config])
    yield from aligned(text)


def all_methods(
    methods: Sequence[str],
    rows: Mapping[str, Row],
    command: Callable[[str], Sequence[str]],
    limit_s: float,
    keep: Callable[[Sequence[Line]], None],
    born: Callable[[], Born],
) -> list[Line]:
    """Runs methods one after another and returns their lines. `command`: of a method's process; `keep` gets
    the lines so far; `born`: makes the birth record of a line whose process left none."""
    lines: list[Line] = []
    for method in methods:
        found = in_a_process(command(method), rows[method], limit_s)
        lines.append(Line(replace(rows[method], note=found), born()) if isinstance(found, str) else found)
        keep(lines)
    return lines


def main(
    scenario: Annotated[Path, typer.Argument(help="a serving scenario: a file or an example")] = SCENARIO,
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="the scenario's first ones")
    ] = REQUESTS,
    methods: Annotated[str, typer.Option(help=f"which, in this order, of {','.join(METHODS)}")] = DEFAULT,
    limit_s: Annotated[float, typer.Option(min=1.0, help="seconds after which a method is ended")] = LIMIT_S,
    line: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures output tokens per second of our continuous batching and of transformers."""
    check_out(out)
    wanted = named("--methods", methods, METHODS, needed=True)
    if line is None:
        # What is wrong with the scenario is said without a card, too, and what cannot be served before one is
        # used: by simulation.
        simulated, where = at_once(scenario, requests)
        assemble(simulated, where).study.run(progress())
    if not torch.cuda.is_available():
        raise InputError("a CUDA device is needed; there is none here")
    this_device = this_card()
    here, where = at_once(scenario, requests, this_device)
    asked = asked_of(here)
    rows = {method: empty_row(method, here, asked) for method in wanted}
    if line is not None:
        row = filled(rows[wanted[0]], asked, lambda: of_method(wanted[0], here, where, asked))
        write_text(line, json.dumps({"row": asdict(row), "born": dict(born_here())}))
        return

    def command(method: str) -> list[str]:
        program = [sys.executable, "-m", "simcore.validate.benchmarks.generation", str(scenario)]
        return [*program, "--requests", str(requests), "--methods", method, "--line"]

    def keep(lines: Sequence[Line]) -> None:
        if out is not None:
            write_csv(cells(lines), partial_of(out))

    say(f"{requests:,} requests, all there at once: {here.strategies[0].label()} on {this_device}")
    lines = all_methods(wanted, rows, command, limit_s, keep, born_here)
    for text in table(lines):
        say(text)
    failed = {each.row.method for each in lines if each.row.seconds is None}
    if OURS in failed or failed == set(wanted):
        if out is not None:
            say(f"{out} is left as it was; the rows are in {partial_of(out)}")
        raise typer.Exit(BROKEN)
    if out is not None:
        write_csv(cells(lines), out)
        partial_of(out).unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
