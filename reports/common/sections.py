"""Sections that every study has: errors against published figures, price sources, the scenario as run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import figures
from simcore.reports.page import Choice, Definition, Details, Opening, Plot, Section, Table, Tile
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
ERROR_PCT = Definition("Error of a prediction", "error_pct = 100 × (predicted − published) / published")
ERROR_OF_MEASURED = Definition("Distance", "distance_pct = 100 × (measured − published) / published")
PRICE_SHARE = Definition(
    "Share of a price source",
    "share(source) = Σ seconds of device ops priced from that source / Σ seconds of all device ops",
)
MEASURED_SHARE = Definition(
    "Share of a source",
    "share(source) = Σ seconds of device ops whose time is from that source / Σ seconds of all device ops",
)
# Studies of single operators: their times differ too much to be added up.
SHARES_OF_CASES = ("linear_attention", "decode_attention")
# Keys of a measured run's provenance, in the order in which they are told.
MACHINE: Sequence[tuple[str, str]] = [
    ("processor", "{}"), ("threads", "threads: {}"), ("torch", "torch {}"), ("date", "{}"),
    ("runs", "runs: {}"), ("cache", "cache: {}"), ("how", "{}"),
]  # fmt: skip
CHOICES_ALONE = (
    "Device and profile say what fits into memory, and by which prices ways of computing are chosen; no time "
    "of a run is from them."
)
AGAIN = "The same scenario, seed and device profile give the same numbers to the byte."
MEASURED_AGAIN = "Times are measured: another run gives others."


def opening(run: Run) -> Opening:
    """The top of the page, without key figures: these are the study's own."""
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
    """What a measured run was measured on and how, as far as its provenance tells; nothing of any other."""
    if not run.measured:
        return ""
    told = [(text, run.provenance.get(key)) for key, text in MACHINE]
    parts = [text.format(recorded(value)) for text, value in told if value not in (None, "")]
    return f"Measured, not predicted, on {run.machine}{': ' if parts else ''}{'; '.join(parts)}."


def error_formulas(run: Run) -> list[Definition]:
    """The formula of the error of compared figures, where there are any."""
    return [ERROR_OF_MEASURED if run.measured else ERROR_PCT] if len(run.comparison) else []


def share_formula(run: Run) -> Definition:
    """What a share of the section on sources is of."""
    return MEASURED_SHARE if run.measured else PRICE_SHARE


def sections(run: Run) -> list[Section]:
    """What can be said of any run, whatever its study."""
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
    # The scenario beside the page has every setting in it; how the run was called is in the provenance.
    verb, on = "run" if run.ladder.empty else "validate", f" --on {run.machine}" if run.measured else ""
    return f"python -m simcore {verb} scenario.yaml{on}" if run.scenario_text else ""


def flat(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """A nested mapping as rows: ("versions › python", "3.11")."""
    if isinstance(tree, dict):
        return [row for key, value in tree.items() for row in flat(value, (*path, str(key)))]
    if isinstance(tree, list):
        tree = "; ".join(
            ", ".join(f"{k} {recorded(v)}" for k, v in x.items()) if isinstance(x, dict) else recorded(x)
            for x in tree
        )
    return [(" › ".join(path).replace("_", " "), recorded(tree))]


# -- choices and tables --------------------------------------------------------------------------

Option = tuple[str, Any]
Dimension = tuple[str, Sequence[Option], int]


def views(dimensions: Sequence[Dimension], draw: Callable[..., go.Figure]) -> dict[str, Any]:
    """Choices and one figure for each combination of them, as a Plot takes them."""
    choices = tuple(Choice(name, tuple(text for text, _ in options), at) for name, options, at in dimensions)
    places = itertools.product(*(range(len(options)) for _, options, _ in dimensions))
    drawn = {place: draw(*(dimensions[i][1][at][1] for i, at in enumerate(place))) for place in places}
    return {"choices": choices, "figures": drawn}


def without_empty_columns(table: Table) -> Table:
    """The table without columns that have no text in any row."""
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    sides = table.align.ljust(len(table.head), "l")
    return Table(
        [table.head[i] for i in kept],
        [[row[i] for i in kept] for row in table.rows],
        "".join(sides[i] for i in kept),
    )


# -- predicted against published -------------------------------------------------------------------


def _roles(rows: pd.DataFrame) -> dict[str, str]:
    present = set(rows["role"])
    known_roles = {role: name for role, name in ROLES.items() if role in present and role != FITTED}
    others = {role: role or "role not stated" for role in sorted(present - set(ROLES))}
    return known_roles | others | ({FITTED: ROLES[FITTED]} if FITTED in present else {})


def _place(row: pd.Series) -> str:
    return ", ".join(figures.compared_place(row))


def error_summary(rows: pd.DataFrame) -> Table:
    """Count, median, and worst error of every role; what was fitted stands last."""
    lines = []
    for role, name in _roles(rows).items():
        own = rows[rows["role"] == role]
        sizes = own["error_pct"].abs()
        worst = extreme(own, sizes)
        lines.append(
            [
                name,
                str(len(own)),
                size_percent(sizes.median()),
                signed_percent(worst["error_pct"]),
                _place(worst),
            ]
        )
    return Table(
        ["role of the published figure", "figures", "median size of error", "worst", "where"], lines, "lrrr"
    )


def _compared(rows: pd.DataFrame, found: str) -> Table:
    head = ["role", "where", "metric", "published", found, "error", "source"]
    lines = [
        [
            row["role"],
            _place(row),
            row["metric"],
            significant(row["reference"], 4),
            significant(row["predicted"], 4),
            signed_percent(row["error_pct"]),
            row["source"],
        ]
        for _, row in rows.iterrows()
    ]
    return Table(head, lines, "lllrrr")


def predictions(run: Run) -> pd.DataFrame:
    """The compared figures that the model has not seen: fitted ones are left out."""
    rows = run.comparison[run.comparison["error_pct"].notna()]
    return rows[rows["role"] != FITTED]


def accuracy(run: Run) -> Tile | None:
    """How far off the predictions of published figures are; None where nothing is compared."""
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
    """The run with its compared figures; what was measured was fitted to none of them."""
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
    """Predicted against published, by role, so that what was fitted never passes for a prediction."""
    run = without_fitted(run)
    rows = run.comparison[run.comparison["error_pct"].notna()]
    if rows.empty:
        return []
    hollow = "Hollow marks were used to fit the model: they show how well it fits, not how well it predicts."
    figure = figures.errors(rows, _roles(rows), run.found)
    plot = Plot("errors", f"error of every {run.found} figure, by role", {(): figure})
    every = f"All {len(rows):,} compared figures" if len(rows) > 1 else "The compared figure"
    return [
        Section(
            key="published",
            heading=f"{run.found.capitalize()} against published",
            short="Against published",
            lead=_measured_lead(rows) if run.measured else _compared_lead(rows, predictions(run)),
            plots=[plot],
            table=error_summary(rows),
            notes=[hollow] if (rows["role"] == FITTED).any() else [],
            details=[Details(every, table=_compared(rows, run.found))],
        )
    ]


# -- where prices are from -------------------------------------------------------------------------


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
    """What the shares of the sources are shares of."""
    if run.study in SHARES_OF_CASES:
        return "cases"
    return "device time" if run.measured else "predicted device time"


def prices(run: Run) -> list[Section]:
    """How much of the time rests on which kind of price, or was measured, with a flag above 5 %."""
    shares = _shares(run)
    if not shares:
        return []
    first = next(iter(shares))
    parts = [f"{percent(v)} {k}" for k, v in sorted(shares[first].items(), key=lambda kv: -kv[1]) if v > 0]
    whole = _shared(run)
    whose = f"Of the {whole}" if first == "all runs" else f"Of the {whole} of {first}"
    most, where = _most_extrapolated(run)
    flags, verb = [], "are" if run.study in SHARES_OF_CASES else "is"
    if most > EXTRAPOLATED_AT_MOST:
        flags.append(
            f"Up to {percent(most)} of the {whole} {verb} extrapolated ({where}), beyond the "
            f"{percent(EXTRAPOLATED_AT_MOST)} that can be trusted: those figures need a measurement."
        )
    thing = "times" if run.measured else "prices"
    title = f"share of the {whole}"
    describes = f"{title} by source of the {thing.removesuffix('s')}"
    return [
        Section(
            key="prices",
            heading=f"Where the {thing} come from",
            short="Sources" if run.measured else "Prices",
            lead=f"{whose}, {listed(parts)}." if parts else "",
            flags=flags,
            plots=[Plot("prices", describes, {(): figures.price_shares(shares, title)})],
        )
    ]


# -- the scenario as run ---------------------------------------------------------------------------


def as_run(run: Run, formulas: Sequence[Definition]) -> Section:
    """The scenario, the formulas of what the page prints, and what the run was made with."""
    details = []
    if formulas:
        details.append(Details("Formulas of every metric", definitions=formulas))
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
    return Section(
        key="run", heading="The scenario as run", short="As run", table=table, notes=notes, details=details
    )
