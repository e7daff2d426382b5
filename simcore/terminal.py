"""Output in the terminal: the table, the answer, the progress."""

import math
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from simcore.input.files import LONGEST_LIST, enumerated, one_line, plain
from simcore.studies.columns import USUAL_LATENCIES, split_tenant
from simcore.studies.common import Outcome, ServingAxes

# Exit codes: a broken law or another fault of simcore; bad input; Ctrl-C.
BROKEN, USAGE, INTERRUPTED = 1, 2, 130
# A run that takes longer than this shows its progress.
SILENT_FOR_S = 1.0
A_LINE_EVERY_S = 5.0
# Times left from this on are printed in minutes.
MINUTES_FROM_S = 120.0
# Width if the window's is unknown: in a pipe, a file, a CI log.
PLAIN_WIDTH = 80
# Columns of words wrap if a table is too wide, but are no narrower than this.
WORDS_AT_LEAST = 20
# Between two columns, and behind the last.
GAP = 2
# Axes that tell loads apart besides their rate: their words, singular and plural.
COUNTED: Mapping[str, tuple[str, str]] = {
    "devices": ("device", "devices"),
    "requests": ("request", "requests"),
    "output_tokens": ("token out", "tokens out"),
}


def note(text: str) -> None:
    """Prints a line on stderr; a closed or full stderr is no error."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def failed(message: str, code: int) -> int:
    """Prints in one line why a command fails, and returns its exit code."""
    note(f"error: {one_line(message)}")
    return code


def message_and_code(error: Exception) -> tuple[str, int]:
    """Returns the message and the exit code of an error: of a file, or of the command line, which typer
    words. Any other error is a fault of simcore, and its message says where it arose."""
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}", USAGE
    if hasattr(error, "format_message"):
        return str(error.format_message()), USAGE
    if getattr(error, "of_process", False):
        return str(error), BROKEN
    *_, place = traceback.extract_tb(error.__traceback__)
    where = f"{Path(place.filename).name}, line {place.lineno}"
    says = f"{type(error).__name__}: {plain(error, LONGEST_LIST)}"
    return f"a fault of simcore, in {where}: {says} (SIMCORE_TRACEBACK=1 shows all of it)", BROKEN


def progress() -> Callable[[str, int, int], None]:
    """Returns a callback that prints progress on stderr once a run takes over a second: in place on a
    terminal, else a line every 5 seconds at most. Of a search, whose total grows, it says no time left."""
    begun_s = last_s = counted_s = stage_s = time.perf_counter()
    stage, planned = "", 0

    def show(doing: str, done: int, total: int) -> None:
        nonlocal last_s, counted_s, stage, stage_s, planned
        now_s = time.perf_counter()
        if doing != stage:
            # A stage begins at the last call of the stage before.
            stage, stage_s, planned = doing, counted_s, total
        counted_s = now_s
        if sys.stderr is None or now_s - begun_s < SILENT_FOR_S:
            return
        left = " so far" if total > planned else _left(now_s - stage_s, done, total)
        text = f"{doing} {done} of {total}{left}"
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif now_s - last_s >= A_LINE_EVERY_S:
            last_s = now_s
            note(text)

    return show


def _left(elapsed_s: float, done: int, total: int) -> str:
    """Returns the time left at the pace so far, in words.

    >>> _left(30.0, 3, 12), _left(30.0, 0, 12), _left(30.0, 12, 12), _left(100.0, 1, 6)
    (', about 90 s left', '', '', ', about 8 min left')
    """
    if not 0 < done < total:
        return ""
    left_s = elapsed_s * (total - done) / done
    return (
        f", about {left_s:.0f} s left" if left_s < MINUTES_FROM_S else f", about {left_s / 60.0:.0f} min left"
    )


def show(
    study: str, outcome: Outcome, comparison: Sequence[Mapping[str, Any]], target: Path, *, quiet: bool
) -> None:
    """Prints a run: its table, the comparison, warnings, the answer, and last the path of the report.
    `quiet`: only the answer, with warnings on stderr."""
    if quiet:
        for warning in outcome.warnings:
            note(f"warning: {warning}")
        _console().print(escape(outcome.answer), soft_wrap=True)
        return
    for table, keys in (TABLES[study](outcome), *([_errors(comparison)] if comparison else [])):
        _print_table(table, keys)
    _print_answer(outcome.answer, outcome.warnings, ())
    _print_target(target)


def _print_answer(answer: str, warnings: Sequence[str], notes: Sequence[str]) -> None:
    for warning in warnings:
        _print_words(f"[yellow]warning:[/yellow] {escape(warning)}")
    for text in notes:
        _print_words(escape(text))
    _print_words(f"\n[bold]{escape(answer)}[/bold]\n")


def _print_target(target: Path) -> None:
    _console().print(f"report: {escape(str(target / 'report.html'))}", soft_wrap=True)


# A table, and how many of its first columns identify a row.
Keyed = tuple[Table, int]
# Lines of a plan's table at most; all points are in its files.
MOST_LINES = 24


def show_plan(
    answer: str,
    table: Keyed,
    points: int,
    messages: tuple[Sequence[str], Sequence[str]],
    target: Path,
    how: Sequence[str] = (),
    *,
    quiet: bool,
) -> None:
    """Prints a plan: its table, warnings and notes, the answer, how to run it, and last the path of the
    report. `points`: how many there are; `messages`: warnings and notes; `how`: lines with commands; `quiet`:
    only the answer, these on stderr."""
    warnings, notes = messages
    if quiet:
        for text in (*(f"warning: {each}" for each in warnings), *notes):
            note(text)
        _console().print(escape(answer), soft_wrap=True)
        return
    if table[0].row_count:
        _print_table(*table)
    if (more := points - MOST_LINES) > 0:
        _print_words(f"and {more:,} more points: points.csv")
    _print_answer(answer, warnings, notes)
    # A command is copied: it may not be cut into lines.
    for text in how:
        _console().print(escape(text), soft_wrap=True, highlight=False)
    _print_target(target)


VERDICTS = {"holds": "[green]holds[/green]", "fails": "[red]fails[/red]", "unsure": "[yellow]unsure[/yellow]"}


def leads(found: Sequence[Mapping[str, Any]], everywhere: Sequence[Mapping[str, Any]] = ()) -> Keyed:
    """Returns the table of where the lead passes from one case to another, and of who leads everywhere. Both
    as summary.json has them."""
    varied = list(dict.fromkeys(path for lead in (*found, *everywhere) for path in lead["settings"]))
    places = any(lead["place"] for lead in (*found, *everywhere))
    names = [path.rpartition(".")[2] for path in varied] + ["place"] * places
    table = _empty(
        "leads", [*names, "before", "then", "from", "neither for sure"], words=("place", "before", "then")
    )
    for lead in [*found, *everywhere][:MOST_LINES]:
        cells = [escape(plain(lead["settings"].get(path), 20)) for path in varied]
        cells += [escape(lead["place"])] * places
        if "at" in lead:
            cells += [escape(lead["before"]), escape(lead["after"]), _at(lead["at"], "")]
            unsure = [lead["between"]]
        else:
            cells += [escape(lead["in_words"]), "the same", "-"]
            unsure = lead["unsure"]
        stretches = [f"{_at(low, 'first')} to {_at(high, 'last')}" for low, high in unsure]
        none = "no interval" if lead["chance"] else "-"
        known = not lead["chance"] or any(low != high or low is None for low, high in unsure)
        table.add_row(*cells, (" and ".join(stretches) if known else "") or none)
    return table, len(names)


def _at(value: float | None, none: str) -> str:
    """Returns a value of a searched field for a table."""
    if value is None:
        return none
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def judged(lines: Sequence[Mapping[str, Any]], limits: Mapping[str, float], *, energy: bool = False) -> Keyed:
    """Returns the table of the points of a plan: those that answer first, then the others in their order.
    `limits`: the metrics with a limit; without any, what is usually limited is shown, and verdicts only where
    one is that a queue grows; `energy`: whether energy is an objective."""
    elsewhere = ("vary.devices", "vary.device", *(name for name in lines[0] if name.endswith("rate_per_s")))
    varied = [name for name in lines[0] if name.startswith("vary.") and name not in elsewhere]
    rates = len({line["rate_per_s"] for line in lines}) > 1
    kinds = len({line["device"] for line in lines}) > 1
    prices = any(line["cost_per_hour"] is not None for line in lines)
    names = ["way of running", *(["device"] if kinds else []), "devices", *(["load, 1/s"] if rates else [])]
    keys = len(names)
    told = bool(limits) or any(line["verdict"] != "holds" for line in lines)
    marked = told or any(line["best"] for line in lines)
    names += ["verdict" if told else ""] if marked else []
    names += [name.removeprefix("vary.").rpartition(".")[2] for name in varied]
    shown = limits or [name for name in USUAL_LATENCIES if name in lines[0]]
    names += [
        f"{_short(name)} ({_plain_value(name, limits[name])})" if limits else _short(name) for name in shown
    ]
    names += [*(["cost/h"] if prices else []), *(["J/token at most"] if energy else []), "runs"]
    table = _empty("points", names, words=("way of running", "device", "verdict"))
    ordered = sorted(lines, key=lambda line: not line["best"])
    for line in ordered[:MOST_LINES]:
        cells = [escape(str(line["label"])), *([escape(str(line["device"]))] if kinds else [])]
        cells.append(f"{line['devices']:,}")
        cells += ["-" if line["rate_per_s"] is None else f"{line['rate_per_s']:.4g}"] if rates else []
        said = [*([VERDICTS[line["verdict"]]] if told else []), *(["best"] if line["best"] else [])]
        cells += [", ".join(said)] if marked else []
        cells += ["-" if line[name] is None else escape(plain(line[name], 20)) for name in varied]
        cells += ["-" if line[name] is None else _plain_value(name, line[name]) for name in shown]
        cells += [f"{line['cost_per_hour'] or 0.0:.4g}"] if prices else []
        if energy:
            joules = line["joules_per_output_token"]
            cells.append("-" if joules is None else f"{joules:.3g}")
        cells.append(f"{line['replicas']}")
        table.add_row(*cells)
    return table, keys


# Lines of a comparison at most; all figures are in --json and on the page.
MOST_METRICS = 16


def show_compared(found: Mapping[str, Any], lines: Sequence[Any], page: Path | None) -> None:
    """Prints a comparison: both answers, the most changed metrics, notes, last the sentence and the page."""
    sides = {letter.upper(): found[letter] for letter in ("a", "b")}
    for letter, side in {} if found["identical"] else sides.items():
        about = f"{side['folder']}: {side['answer'] or 'no answer'}"
        _print_words(f"[bold]{letter}[/bold]  {escape(about)}")
    if lines:
        names = ("metric", "most changed at", "A", "B", "B / A", "B is, for sure")
        table = _empty("", names, words=("metric", "most changed at", "B is, for sure"))
        for line in lines[:MOST_METRICS]:
            table.add_row(*map(escape, (line.metric, line.where, line.a, line.b, line.ratio, line.sure)))
        _console().print()
        _print_table(table, 2)
        if (more := len(lines) - MOST_METRICS) > 0:
            _print_words(f"and {more:,} more metrics: --json, or the page of --out")
    for text in found["notes"]:
        _print_words(escape(text))
    _print_words(f"\n[bold]{escape(found['says'])}[/bold]")
    if page is not None:
        _console().print(f"\npage: {escape(str(page))}", soft_wrap=True)


def _short(metric: str) -> str:
    """Returns the name of a metric for a column.

    >>> _short("ttft_p99_s"), _short("goodput_per_s"), _short("tenant.chat.ttft_p99_s")
    ('TTFT p99', 'goodput per s', 'chat TTFT p99')
    """
    tenant, metric = split_tenant(metric)
    if tenant:
        return f"{tenant} {_short(metric)}"
    name, _, rest = metric.partition("_")
    if rest.endswith("_s") and not rest.endswith("per_s"):
        return f"{name.upper()} {rest.removesuffix('_s')}"
    return metric.replace("_", " ")


def _plain_value(metric: str, value: float) -> str:
    if metric.endswith("_s") and not metric.endswith("per_s"):
        return f"{value * 1e3:.4g} ms"
    return f"{value:.4g}"


def width() -> int | None:
    """Returns the window's width in columns: COLUMNS, else the terminal's; None if there is neither."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    return Console().width if sys.stdout is not None and sys.stdout.isatty() else None


def _console() -> Console:
    return Console(highlight=False, soft_wrap=False, width=width() or PLAIN_WIDTH)


def _print_words(text: str) -> None:
    """Prints sentences: wrapped between words if the window's width is known, else on one line."""
    _console().print(text, soft_wrap=width() is None)


def listing(name: str, text: str, indent: int) -> str:
    """Returns a line of a list, "name  text"; if the window's width is known, wrapped and indented."""
    whole = f"{name:<{indent - 1}} {text}"
    columns = width()
    if columns is None:
        return whole
    return textwrap.fill(
        whole, max(columns, 2 * indent), subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _print_table(table: Table, keys: int) -> None:
    """Prints a table within the window. Numbers are never cut: words wrap first; then the table is split into
    parts, each with the first `keys` columns, which identify a row."""
    console = _console()
    if table.title:
        console.print(f"[italic]{table.title}[/italic]", soft_wrap=width() is None)
    for part in _parts(table, keys, console.width):
        # One number and its keys can be wider than the window: it runs over the edge.
        Console(highlight=False, width=max(console.width, _needed(table, part))).print(_part(table, part))
        console.print()


def _parts(table: Table, keys: int, columns: int) -> list[list[int]]:
    """Returns the columns of each part of a table, such that a part fits into `columns` characters."""
    parts = [list(range(keys))]
    for i in range(keys, len(table.columns)):
        if len(parts[-1]) > keys and _needed(table, [*parts[-1], i]) > columns:
            parts.append(list(range(keys)))
        parts[-1].append(i)
    return parts


def _needed(table: Table, chosen: Sequence[int]) -> int:
    """Returns the least width of these columns side by side."""
    return sum(_least(table.columns[i]) + GAP for i in chosen)


def _least(column: Column) -> int:
    """Returns the least width of a column: the widest number; for words the longest word, and at least
    WORDS_AT_LEAST unless all cells are narrower."""
    cells = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
    widest = max(cell_len(cell) for cell in cells)
    if column.no_wrap or column.justify == "right":
        return widest
    longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return max(longest, min(widest, WORDS_AT_LEAST))


def _part(table: Table, chosen: Sequence[int]) -> Table:
    """Returns these columns of a table as they are printed; the title is printed once, above all parts."""
    part = Table(
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i in chosen:
        column = table.columns[i]
        words = not column.no_wrap and column.justify != "right"
        part.add_column(
            column.header,
            justify=column.justify,
            no_wrap=not words,
            min_width=_least(column),
            overflow="fold",
        )
    cells = zip(*(table.columns[i].cells for i in chosen), strict=True)
    for row, line in zip(table.rows, cells, strict=True):
        part.add_row(*line, end_section=row.end_section)
    return part


def _empty(title: str, names: Iterable[str], words: Sequence[str] = (), *, no_wrap: bool = False) -> Table:
    """Returns an empty table with these columns; those of words are aligned left."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=no_wrap)
    return table


def _values(outcome: Outcome, metric: str) -> dict[Any, float | None]:
    """Returns a metric's value for every case."""
    return {row.axes: row.value for row in outcome.rows if row.metric == metric}


def _best(outcome: Outcome, metric: str) -> set[Any]:
    """Returns the cases with the least value at their place, among those that can be ranked."""
    places: dict[tuple[Any, ...], dict[Any, float]] = {}
    for row in outcome.ranked(metric):
        axes: Any = row.axes
        if row.value is not None:
            place = axes.batch, axes.context_tokens, getattr(axes, "decay", None)
            places.setdefault(place, {})[axes] = row.value
    least = [(cases, min(cases.values())) for cases in places.values()]
    return {axes for cases, least_s in least for axes, value in cases.items() if value == least_s}


def _bold(text: str, best: bool) -> str:
    return f"[bold green]{text}[/bold green]" if best else text


def _table(outcome: Outcome) -> Keyed:
    """Latency per token: a line per strategy, batch and hit rate, a column per context, the best bold."""
    found, best = _values(outcome, "token_latency_s"), _best(outcome, "token_latency_s")
    contexts = sorted({axes.context_tokens for axes in found})
    # A value shared by all lines is in the title instead.
    labels = {axes.label for axes in found}
    keys = ["strategy"] if len(labels) > 1 else []
    keys += ["batch"] if len({axes.batch for axes in found}) > 1 or len(labels) == 1 else []
    keys += ["hits"] if any(axes.hit_rate is not None for axes in found) else []
    title = "latency per token, ms" + ("" if len(labels) > 1 else f": {escape(next(iter(labels)))}")
    table = _empty(title, [*keys, *map(tokens, contexts)], words=("strategy",))
    lines: dict[tuple[str, int, float | None], dict[int, str]] = {}
    for axes, value in found.items():
        cells = lines.setdefault((axes.label, axes.batch, axes.hit_rate), {})
        text = "-" if value is None else f"{value * 1e3:.3f}"
        cells[axes.context_tokens] = _bold(text, axes in best)
    for (label, batch, rate), cells in lines.items():
        hits = "" if rate is None else f"{rate:.1%}"
        words = {"strategy": escape(label), "batch": f"{batch:,}", "hits": hits}
        table.add_row(*(words[key] for key in keys), *(cells.get(context, "-") for context in contexts))
    return table, len(keys)


# Title of a column, the metrics that share it, and the factor to its unit.
Shown = tuple[str, tuple[str, ...], float]
SERVED: tuple[Shown, ...] = (
    ("TTFT p50, p99", ("ttft_p50_s", "ttft_p99_s"), 1e3),
    ("TPOT p50, p99", ("tpot_p50_s", "tpot_p99_s"), 1e3),
    ("E2E p50, p99", ("e2e_p50_s", "e2e_p99_s"), 1e3),
    ("tokens/s", ("output_throughput_tokens_per_s",), 1.0),
    ("SLOs", ("slo_attainment",), 100.0),
    ("servers", ("mean_servers",), 1.0),
    ("saved", ("device_time_saved",), 100.0),
    ("reused", ("prefix_hit_share",), 100.0),
    ("speed-up", ("speedup",), 1.0),
)
# Beside SLOs, what a table of a serving study has in %.
IN_PERCENT: Mapping[str, str] = {"device_time_saved": "device time saved", "prefix_hit_share": "reuse"}


def _figures(outcome: Outcome) -> dict[Any, dict[str, float]]:
    """Returns the known figures of every case, by metric."""
    found: dict[Any, dict[str, float]] = {}
    for row in outcome.rows:
        if row.value is not None and not row.op_kind:
            found.setdefault(row.axes, {})[row.metric] = row.value
    return found


def _in_blocks(
    title: str, shown: Sequence[Shown], blocks: Iterable[tuple[str, Iterable[tuple[Any, dict[str, float]]]]]
) -> Keyed:
    """Returns a table with a line per strategy, in blocks of cases at one load or point."""
    table = _empty(title, ["strategy", *(name for name, _, _ in shown)], words=("strategy",))
    for heading, cases in blocks:
        table.add_section()
        table.add_row(f"[bold]{heading}[/bold]", *("" for _ in shown))
        for axes, values in cases:
            table.add_row(escape(axes.label), *(_joined(values, names, scale) for _, names, scale in shown))
    return table, 1


def _served(outcome: Outcome) -> Keyed:
    """Latencies of a serving study: a block of lines per load, a line per strategy."""
    found = _figures(outcome)
    shown = [column for column in SERVED if any(column[1][0] in values for values in found.values())]
    blocks: dict[str, list[tuple[Any, dict[str, float]]]] = {}
    for axes, values in found.items():
        blocks.setdefault(_load(axes, found), []).append((axes, values))
    names = {name for values in found.values() for name in values}
    shares = ["SLOs", *(text for name, text in IN_PERCENT.items() if name in names)]
    return _in_blocks(f"latency in ms, {enumerated(shares)} in %", shown, blocks.items())


def _load(axes: ServingAxes, all_axes: Iterable[ServingAxes]) -> str:
    """Returns a load in words: its rate, and the counts that differ between loads."""
    words = ["closed loop" if axes.rate_per_s is None else f"{axes.rate_per_s:.3g} {axes.arriving}/s"]
    for name, (one, many) in COUNTED.items():
        if len({getattr(other, name) for other in all_axes}) > 1:
            count = getattr(axes, name)
            words.append(f"{count:,.4g} {one if count == 1 else many}")
    return ", ".join(words)


def _joined(values: Mapping[str, float], names: Sequence[str], scale: float) -> str:
    known = [values[name] * scale for name in names if name in values]
    return ", ".join(f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in known) or "-"


def _operators(outcome: Outcome) -> Keyed:
    """Latency of linear attention: a block of lines per batch and decay, a line per method, a column per
    number of tokens, the best bold; "OOM" where it does not fit."""
    found, best = _values(outcome, "latency_s"), _best(outcome, "latency_s")
    lengths = sorted({axes.length for axes in found})
    keys = ("method", "batch", "decay")
    table = _empty("latency, ms", [*keys, *map(tokens, lengths)], words=("method",))
    blocks: dict[tuple[int, int | None], dict[str, dict[int, str]]] = {}
    for axes, value in found.items():
        block = blocks.setdefault((axes.batch, axes.decay), {})
        block.setdefault(axes.label, {})[axes.length] = _bold(_milliseconds(value), axes in best)
    for (batch, decay), lines in blocks.items():
        table.add_section()
        for label, cells in lines.items():
            word = "-" if decay is None else "yes" if decay else "no"
            table.add_row(escape(label), f"{batch:,}", word, *(cells.get(length, "-") for length in lengths))
    return table, len(keys)


def _points(outcome: Outcome) -> Keyed:
    """Latency of decode attention: a line per batch and number of cached tokens, a column per method."""
    found, best = _values(outcome, "latency_s"), _best(outcome, "latency_s")
    labels = list(dict.fromkeys(axes.label for axes in found))
    points: dict[tuple[int, int], dict[str, str]] = {}
    for axes, value in found.items():
        cells = points.setdefault((axes.batch, axes.length), {})
        cells[axes.label] = _bold(_milliseconds(value), axes in best)
    table = _empty("latency, ms", ["batch", "tokens", *labels])
    for (batch, length), cells in points.items():
        table.add_row(f"{batch:,}", tokens(length), *(cells.get(label, "-") for label in labels))
    return table, 2


def _milliseconds(value: float | None) -> str:
    """Returns an operator's latency in ms, as text; None means that it does not fit into memory."""
    if value is None:
        return "OOM"
    return f"{value * 1e3:,.0f}" if value >= 1.0 else f"{value * 1e3:.4g}"


TILED: tuple[Shown, ...] = (
    ("total, s", ("total_s",), 1.0),
    ("token p50, ms", ("token_p50_s",), 1e3),
    ("p99", ("token_p99_s",), 1e3),
    ("max", ("token_max_s",), 1e3),
    ("mixer, %", ("mixer_share",), 100.0),
    ("speed-up", ("speedup_over_lazy",), 1.0),
    ("of mixer", ("mixer_speedup_over_lazy",), 1.0),
    ("memory, GB", ("memory_bytes",), 1e-9),
)


def _tiled(outcome: Outcome) -> Keyed:
    """Times of a tiling study: a block of lines per model, batch and length, a line per strategy."""
    found = _figures(outcome)
    for values in found.values():
        values["mixer_share"] = values["mixer_s"] / (values["mixer_s"] + values["block_s"])

    def where(case: tuple[Any, dict[str, float]]) -> str:
        axes, _ = case
        return f"{axes.layers} x {axes.channels}, batch {axes.batch}, {tokens(axes.tokens)} tokens"

    return _in_blocks("one generation", TILED, groupby(found.items(), where))


TABLES = {
    "decode": _table,
    "serving": _served,
    "tiling": _tiled,
    "linear_attention": _operators,
    "decode_attention": _points,
    "prompt": _operators,
}


def tokens(count: int) -> str:
    """Returns a number of tokens in the usual notation: 1K is 1024."""
    if count >= 1 << 20 and count % (1 << 20) == 0:
        return f"{count >> 20}M"
    return f"{count >> 10}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


# Most figures that are named one by one.
FEW = 3
OFF = "% by which the larger of predicted and measured exceeds the smaller"


def show_rungs(
    rungs: Sequence[Mapping[str, Any]],
    comparison: Sequence[Mapping[str, Any]],
    warnings: Sequence[str],
    target: Path,
) -> None:
    """Prints the validation ladder: each judged rung and whether it holds. Figures in `comparison` with an
    infinite error are named."""
    names = ("rung", "of", "n", "median", "p95", "worst", "bound", "")
    table = _empty(f"Errors: {OFF}", names, words=("rung", "of", ""), no_wrap=True)
    for rung in rungs:
        if rung["passed"] is None:
            continue
        numbers = (rung[name] for name in ("median_pct", "p95_pct", "worst_pct", "bound_pct"))
        verdict = "[green]holds[/green]" if rung["passed"] else "[bold red]broken[/bold red]"
        cells = ("-" if number is None else _error(number) for number in numbers)
        table.add_row(f"{rung['rung']} {rung['name']}", rung["what"], str(rung["n"]), *cells, verdict)
    _print_table(table, 2)
    none = [line for line in comparison if 0.0 in (line["predicted"], line.get("replayed"))]
    if none:
        unpriced = [f"{line['metric']} of {line['label']}" for line in none[:FEW]]
        more = [f"{len(none) - FEW} more"] if len(none) > FEW else []
        _print_words(f"inf: took time, and none is predicted: {escape('; '.join([*unpriced, *more]))}")
    for warning in warnings:
        _print_words(f"[yellow]warning:[/yellow] {escape(warning)}")
    _console().print(f"\nreport: {escape(str(target / 'report.html'))}", soft_wrap=True)


def _error(pct: float) -> str:
    """Returns an error in a few characters; it is infinite if the prediction was 0."""
    return f"{pct:,.0f}" if 1000 <= pct < math.inf else f"{pct:.2g}" if pct < 1e-3 else f"{pct:.3g}"


def _errors(comparison: Sequence[Mapping[str, Any]]) -> Keyed:
    """Errors against published figures, by role: agreement with a fitted figure is no evidence."""
    names = ("metric", "role", "n", "median", "worst")
    table = _empty("error against published figures", names, words=("metric", "role"))
    groups: dict[tuple[str, str], list[float]] = {}
    ranges = {c["metric"] for c in comparison if c.get("reference_low", 0.0) < c.get("reference_high", 0.0)}
    for line in comparison:
        groups.setdefault((line["metric"], line["role"]), []).append(line["error_pct"])
    for (metric, role), errors in groups.items():
        middle = median(abs(error) for error in errors)
        within = sum(error == 0.0 for error in errors)
        name = f"{metric}: {within} of {len(errors)} inside" if metric in ranges else metric
        worst = max(errors, key=abs)
        table.add_row(name, role, str(len(errors)), f"{middle:.2f} %", f"{worst:+.2f} %")
    return table, 2
