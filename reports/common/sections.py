"""Sections of every study: errors against published figures, price sources, the scenario as run."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import yaml

from simcore.reports.common import figures
from simcore.reports.page import Choice, Definition, Details, Opening, Plot, Section, Table, Tile, asset
from simcore.reports.run import Run, extreme
from simcore.reports.text import (
    counted,
    known,
    listed,
    percent,
    recorded,
    signed_percent,
    significant,
    size_percent,
    tokens,
)

EXTRAPOLATED_AT_MOST = 0.05
FITTED = "fitted"
SEEN = "published, prices were fitted to it"
ROLES: Mapping[str, str] = {
    "measured": "measured",
    "projected": "projected by the source",
    "derived": "derived from the source",
    FITTED: "fitted, not a prediction",
}
# Studies of single operators count cases, because their times differ too much to add up.
SHARES_OF_CASES = ("linear_attention", "decode_attention")
# Keys of a measured run's provenance, in the order of the text.
MACHINE: Sequence[tuple[str, str]] = [
    ("processor", "{}"), ("threads", "threads: {}"), ("torch", "torch {}"), ("date", "{}"),
    ("runs", "runs: {}"), ("cache", "cache: {}"), ("how", "{}"),
]  # fmt: skip
HOLLOW = "Hollow marks were used to fit the model: they show how well it fits, not how well it predicts."
ZOOM = "On a wide screen, drag along the time axis to zoom; double-click to return."
CHOICES_ALONE = (
    "Device and profile say what fits into memory, and by which prices ways of computing are chosen; no time "
    "of a run is from them."
)
AGAIN = "The same scenario, seed and device profile give the same numbers to the byte."
MEASURED_AGAIN = "Times are measured: another run gives others."


def opening(run: Run) -> Opening:
    """Returns the top of the page without key figures, which each study adds."""
    return Opening(
        name=run.name,
        about=_about(run),
        answer=str(run.summary.get("answer") or ""),
        warnings=[str(w) for w in run.summary.get("warnings") or ()],
        command=_command(run),
        machine=machine_text(run),
        again=MEASURED_AGAIN if run.measured else AGAIN,
    )


def machine_text(run: Run) -> str:
    """Describes the machine and the method of a measured run, from its provenance; empty for a prediction."""
    if not run.measured:
        return ""
    fields = [(text, run.provenance.get(key)) for key, text in MACHINE]
    parts = [text.format(recorded(value)) for text, value in fields if value not in (None, "")]
    return f"Measured, not predicted, on {run.machine}{': ' if parts else ''}{'; '.join(parts)}."


def sections(run: Run) -> list[Section]:
    """Returns the sections that exist for any study."""
    return [*comparison(run), *prices(run), as_run(run, [])]


def _about(run: Run) -> str:
    device = _named(run.provenance.get("device")) or _named(run.scenario.get("device"))
    study = f"{run.study} study" if run.study else ""
    model = _named(run.scenario.get("model")) + (", one layer" if run.scenario.get("part") == "layer" else "")
    parts = [study, device, model, run.provenance.get("formats")]
    return " · ".join(str(part) for part in parts if part)


def _named(thing: Any) -> str:
    found = thing.get("name") or thing.get("kind") if isinstance(thing, dict) else thing
    return str(found or "")


def _command(run: Run) -> str:
    # The scenario beside the page contains every setting; the provenance contains the original command.
    verb, on = "run" if run.ladder.empty else "validate", f" --on {run.machine}" if run.measured else ""
    return f"python -m simcore {verb} scenario.yaml{on}" if run.scenario_text else ""


def flat(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Flattens a nested mapping into rows: ("versions › python", "3.11")."""
    if isinstance(tree, dict):
        return [row for key, value in tree.items() for row in flat(value, (*path, str(key)))]
    if isinstance(tree, list):
        tree = "; ".join(
            ", ".join(f"{k} {recorded(v)}" for k, v in x.items()) if isinstance(x, dict) else recorded(x)
            for x in tree
        )
    return [(" › ".join(path).replace("_", " "), recorded(tree))]


# -- formulas ------------------------------------------------------------------------------------


@cache
def _texts(name: str) -> dict[str, dict[str, dict[str, str]]]:
    """Reads a file of `templates/`: group -> key -> part -> text."""
    texts: dict[str, dict[str, dict[str, str]]] = yaml.safe_load(asset(name))
    return texts


def formulas(*groups: str, of: Callable[[str], bool] = lambda metric: True) -> list[Definition]:
    """Returns the formulas of groups of `templates/formulas.yaml`, only of the metrics that `of` accepts. A
    later group overrides an earlier one."""
    texts = _texts("formulas.yaml")
    found = {metric: text for group in groups for metric, text in texts[group].items()}
    return [Definition(**text) for metric, text in found.items() if of(metric)]


def share_formula(run: Run) -> list[Definition]:
    """Returns the definition of a share in the section on sources."""
    return formulas("sources", of=lambda word: word == run.times_are)


def error_formulas(run: Run) -> list[Definition]:
    """Returns the formula of the error of compared figures, if there are any."""
    return formulas("errors", of=lambda word: word == run.times_are) if len(run.comparison) else []


# -- choices and tables --------------------------------------------------------------------------

Option = tuple[str, Any]
Dimension = tuple[str, Sequence[Option], int]
Row = Mapping[Any, Any]
Draw = Callable[..., go.Figure]
Column = tuple[str, str, Callable[[Any], str]]  # heading, side (l or r), text of a row


def opening_on(name: str, options: Sequence[Option], wanted: Callable[[Any], bool]) -> Dimension:
    """Returns a dimension that opens on the first option that `wanted` accepts, or else on the last."""
    opens = (i for i, (_, option) in enumerate(options) if wanted(option))
    return name, options, next(opens, len(options) - 1)


def plot(key: str, describes: str, dimensions: Sequence[Dimension], draw: Draw, heading: str = "") -> Plot:
    """Draws a figure for each combination of choices."""
    choices = tuple(Choice(name, tuple(text for text, _ in options), at) for name, options, at in dimensions)
    places = itertools.product(*(range(len(options)) for _, options, _ in dimensions))
    made = {place: draw(*(dimensions[i][1][at][1] for i, at in enumerate(place))) for place in places}
    return Plot(key, describes, made, choices, heading)


def drawn(key: str, describes: str, figure: go.Figure, heading: str = "") -> Plot:
    """Returns a plot without choices."""
    return Plot(key, describes, {(): figure}, heading=heading)


def section(study: str, key: str, words: Mapping[str, Any] | None = None, /, **parts: Any) -> Section:
    """Returns a section with the texts of `templates/sections.yaml`, whose braces `words` fill. The caller's
    notes precede the section's own note."""
    texts = {name: text.format_map(words or {}) for name, text in _texts("sections.yaml")[study][key].items()}
    note = [texts.pop("note")] if "note" in texts else []
    return Section(**{"key": key, **texts, **parts, "notes": [*parts.get("notes", ()), *note]})


def tabled(rows: Iterable[Any], *columns: Column, wraps: bool = False) -> Table:
    """Returns a table with a line for each row."""
    lines = [[says(row) for _, _, says in columns] for row in rows]
    heads, sides = [head for head, _, _ in columns], "".join(side for _, side, _ in columns)
    return Table(heads, lines, sides, wraps)


def without_empty_columns(table: Table) -> Table:
    """Returns the table without columns that are empty in all rows."""
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    sides = table.align.ljust(len(table.head), "l")
    lines = [[row[i] for i in kept] for row in table.rows]
    return replace(
        table, head=[table.head[i] for i in kept], rows=lines, align="".join(sides[i] for i in kept)
    )


def field(name: str) -> Callable[[Row], str]:
    """Returns a function that reads a text column of a row."""
    return lambda row: str(row[name])


def shows(name: str, show: Callable[[float], str]) -> Callable[[Row], str]:
    """Returns a function that formats a number of a row, known or not."""
    return lambda row: show(row[name])


def if_known(name: str, show: Callable[[float], str]) -> Callable[[Row], str]:
    """Returns a function that formats a number of a row; empty if it is unknown."""
    return lambda row: show(row[name]) if known(row[name]) else ""


# -- predicted against published -------------------------------------------------------------------


def _roles(rows: pd.DataFrame) -> dict[str, str]:
    present = set(rows["role"])
    known_roles = {role: name for role, name in ROLES.items() if role in present and role != FITTED}
    others = {role: role or "role not stated" for role in sorted(present - set(ROLES))}
    return known_roles | others | ({FITTED: ROLES[FITTED]} if FITTED in present else {})


def _place(row: Any) -> str:
    return ", ".join(figures.compared_place(row))


def error_summary(rows: pd.DataFrame) -> Table:
    """Returns count, median and worst error of every role; fitted figures are last."""
    of = {name: rows[rows["role"] == role] for role, name in _roles(rows).items()}
    worst = {name: extreme(own, own["error_pct"].abs()) for name, own in of.items()}
    return tabled(
        of,
        ("role of the published figure", "l", str),
        ("figures", "r", lambda name: str(len(of[name]))),
        ("median size of error", "r", lambda name: size_percent(of[name]["error_pct"].abs().median())),
        ("worst", "r", lambda name: signed_percent(worst[name]["error_pct"])),
        ("where", "l", lambda name: _place(worst[name])),
    )


def _compared(rows: pd.DataFrame, times_are: str) -> Table:
    return tabled(
        rows.to_dict("records"),
        ("role", "l", field("role")),
        ("where", "l", _place),
        ("metric", "l", field("metric")),
        ("published", "r", lambda row: significant(row["reference"], 4)),
        (times_are, "r", lambda row: significant(row["predicted"], 4)),
        ("error", "r", lambda row: signed_percent(row["error_pct"])),
        ("source", "l", field("source")),
    )


def predictions(run: Run) -> pd.DataFrame:
    """Returns the compared figures except those to which the model was fitted."""
    rows = run.comparison[run.comparison["error_pct"].notna()]
    return rows[rows["role"] != FITTED]


def accuracy(run: Run) -> Tile | None:
    """Returns a tile with the error of predictions of published figures; None if nothing is compared."""
    rows = predictions(run)
    if rows.empty:
        return None
    count = counted(len(rows), "figure")
    if len(rows) == 1:
        error = signed_percent(rows["error_pct"].iloc[0])
        return Tile(error, "Error against published", f"{count}, not fitted")
    middle = size_percent(rows["error_pct"].abs().median())
    return Tile(middle, "Median error against published", f"{count}, none of them fitted")


def without_fitted(run: Run) -> Run:
    """Removes the role "fitted" from a measured run, because no measurement is fitted to a figure."""
    if not run.measured:
        return run
    roles = run.comparison["role"].replace(FITTED, SEEN)
    return replace(run, comparison=run.comparison.assign(role=roles))


def _measured_lead(rows: pd.DataFrame) -> str:
    sizes = rows["error_pct"].abs()
    return (
        f"{counted(len(rows), 'published figure')} beside what was measured: half of them within "
        f"{size_percent(sizes.median())}, the farthest off by {size_percent(sizes.max())}."
    )


def _compared_lead(rows: pd.DataFrame, ahead: pd.DataFrame) -> str:
    if len(rows) == 1 and ahead.empty:
        return "The one figure compared here was used for fitting; it is not a prediction."
    if ahead.empty:
        return "Every figure compared here was used for fitting; none of them is a prediction."
    without = "predicted without having been used"
    if len(ahead) == 1:
        error = signed_percent(ahead["error_pct"].iloc[0])
        return f"1 published figure was {without}, with an error of {error}."
    sizes = ahead["error_pct"].abs()
    return (
        f"{counted(len(ahead), 'published figure')} were {without}: half of them within "
        f"{size_percent(sizes.median())}, the worst off by {size_percent(sizes.max())}."
    )


def comparison(run: Run) -> list[Section]:
    """Compares with published figures by role, so that fitted figures do not pass for predictions."""
    run = without_fitted(run)
    rows = run.comparison[run.comparison["error_pct"].notna()]
    if rows.empty:
        return []
    figure = figures.errors(rows, _roles(rows), run.times_are)
    every = f"All {len(rows):,} compared figures" if len(rows) > 1 else "The compared figure"
    parts = {
        "lead": _measured_lead(rows) if run.measured else _compared_lead(rows, predictions(run)),
        "plots": [drawn("errors", f"error of every {run.times_are} figure, by role", figure)],
        "table": error_summary(rows),
        "notes": [HOLLOW] if (rows["role"] == FITTED).any() else [],
        "details": [Details(every, table=_compared(rows, run.times_are))],
    }
    return [section("every study", "published", {"times_are": run.times_are.capitalize()}, **parts)]


# -- sources of prices -----------------------------------------------------------------------------


def _shares(run: Run) -> dict[str, dict[str, float]]:
    rows = run.metric("price_share")
    whole = {str(k): float(v) for k, v in (run.summary.get("price_shares") or {}).items() if known(v)}
    shares = {"all runs": whole} if whole else {}
    keys = ["label", "context_tokens", "batch", "hit_rate"]
    for label, group in rows[rows["label"] != ""].groupby("label", sort=False):
        cases = len(group.drop_duplicates(keys))
        sums = group.groupby("op_kind", sort=True)["value"].sum() / cases
        shares[str(label)] = {str(kind): float(v) for kind, v in sums.items()}
    return shares


def _most_extrapolated(run: Run) -> tuple[float, str]:
    rows = run.metric("price_share")
    rows = rows[rows["op_kind"] == "extrapolated"].reset_index(drop=True)
    whole = (run.summary.get("price_shares") or {}).get("extrapolated", 0.0)
    if rows.empty:
        return (float(whole) if known(whole) else 0.0), "all runs together"
    worst = extreme(rows, rows["value"])
    where = str(worst["label"]) + (
        f" at {tokens(worst['context_tokens'])} tokens" if known(worst["context_tokens"]) else ""
    )
    return float(worst["value"]), where


def _shared(run: Run) -> str:
    """Returns the quantity that the sources share."""
    if run.study in SHARES_OF_CASES:
        return "cases"
    return "device time" if run.measured else "predicted device time"


def prices(run: Run) -> list[Section]:
    """Shows the share of time for each kind of price or measurement; flags extrapolation above 5 %."""
    shares = _shares(run)
    if not shares:
        return []
    whole, thing = _shared(run), "times" if run.measured else "prices"
    most, where = _most_extrapolated(run)
    verb = "are" if run.study in SHARES_OF_CASES else "is"
    return [sources(shares, whole, thing, extrapolated(most, where, whole, verb))]


def extrapolated(most: float, where: str, whole: str, verb: str = "is") -> list[str]:
    """Returns a flag if more of `whole` is extrapolated than can be trusted."""
    if most <= EXTRAPOLATED_AT_MOST:
        return []
    return [
        f"Up to {percent(most)} of the {whole} {verb} extrapolated ({where}), beyond the "
        f"{percent(EXTRAPOLATED_AT_MOST)} that can be trusted: those figures need a measurement."
    ]


def sources(
    shares: Mapping[str, Mapping[str, float]], whole: str, thing: str = "prices", flags: Sequence[str] = ()
) -> Section:
    """Shows the share of `whole` by source: row name -> source -> fraction. `thing`: what has a source."""
    first = next(iter(shares))
    parts = [f"{percent(v)} {k}" for k, v in sorted(shares[first].items(), key=lambda kv: -kv[1]) if v > 0]
    whose = f"Of the {whole}" if first == "all runs" else f"Of the {whole} of {first}"
    title = f"share of the {whole}"
    describes = f"{title} by source of the {thing.removesuffix('s')}"
    words = {
        "thing": thing,
        "short": "Sources" if thing == "times" else "Prices",
        "lead": f"{whose}, {listed(parts)}." if parts else "",
    }
    plot = drawn("prices", describes, figures.price_shares(shares, title))
    return section("every study", "prices", words, flags=flags, plots=[plot])


# -- the scenario as run ---------------------------------------------------------------------------


def as_run(run: Run, definitions: Sequence[Definition]) -> Section:
    """Shows the scenario, the formulas of the printed metrics, and the provenance of the run."""
    details = []
    if definitions:
        details.append(Details("Formulas of every metric", definitions=definitions))
    if run.scenario_text:
        details.append(Details("scenario.yaml, with every default written out", text=run.scenario_text))
    several = run.provenance.get("devices")
    rows = [list(row) for row in flat({k: v for k, v in run.provenance.items() if k != "devices"})]
    table = Table(["made with", ""], rows) if rows else None
    for name, own in several.items() if isinstance(several, dict) else ():
        made = Table([name, ""], [list(row) for row in flat(own)])
        details.append(Details(f"Figures and prices of {name}", table=made))
    notes = [str(note) for note in run.summary.get("notes") or ()]
    if run.measured:
        notes.append(CHOICES_ALONE)
    return section("every study", "run", table=table, notes=notes, details=details)
