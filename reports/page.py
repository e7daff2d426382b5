"""The parts of a page, and their rendering into one HTML file that loads nothing from elsewhere."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from simcore.reports import style

BUTTONS_AT_MOST = 6


@dataclass(frozen=True)
class Choice:
    """One control above a plot, with which the reader picks one of several options."""

    name: str
    options: tuple[str, ...]
    chosen: int = 0

    @property
    def as_buttons(self) -> bool:
        """Whether the options are shown as buttons: only if there are few; otherwise as a list."""
        return len(self.options) <= BUTTONS_AT_MOST


@dataclass(frozen=True)
class Plot:
    """A figure, or one figure for each combination of choices, keyed by the positions of the options."""

    key: str
    describes: str
    figures: Mapping[tuple[int, ...], go.Figure]
    choices: tuple[Choice, ...] = ()
    heading: str = ""

    @property
    def offered(self) -> list[tuple[int, Choice]]:
        """The choices with more than one option, with their positions."""
        return [(i, choice) for i, choice in enumerate(self.choices) if len(choice.options) > 1]


@dataclass(frozen=True)
class Table:
    """Rows of text. `align` has a letter for each column, l or r; columns beyond its end are l. If `wraps`,
    text breaks into lines in every column except the first, so that all columns stay visible. `ids`: of
    the rows, for links to them; none or one for each."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""
    wraps: bool = False
    ids: Sequence[str] = ()

    def side(self, column: int) -> str:
        """Returns the CSS class of a column."""
        return "number" if self.align[column : column + 1] == "r" else "text"


@dataclass(frozen=True)
class Definition:
    """A metric that the page prints, its formula, and where the formula is from."""

    term: str
    formula: str
    remark: str = ""


@dataclass(frozen=True)
class Details:
    """A part of a section that opens on a click and holds a table, a text or definitions."""

    summary: str
    table: Table | None = None
    text: str = ""
    definitions: Sequence[Definition] = ()
    opened: bool = False


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that tells the reader what to look for, and the contents below it. `wide`: each
    plot takes the whole width."""

    key: str
    heading: str
    lead: str = ""
    flags: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    table: Table | None = None
    notes: Sequence[str] = ()
    details: Sequence[Details] = ()
    short: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Tile:
    """One key figure."""

    value: str
    means: str
    where: str = ""


@dataclass(frozen=True)
class Opening:
    """The top of the page. `machine`: how the run was measured; `again`: the result of a repeated run."""

    name: str
    about: str
    answer: str
    warnings: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    command: str = ""
    machine: str = ""
    again: str = ""


def _figure(figure: go.Figure) -> dict[str, Any]:
    drawn: dict[str, Any] = figure.to_plotly_json()
    layout = {key: value for key, value in drawn["layout"].items() if key != "template"}
    return {"data": drawn["data"], "layout": layout}


def _plot(plot: Plot) -> dict[str, Any]:
    figures = {",".join(map(str, where)): _figure(figure) for where, figure in plot.figures.items()}
    return {"figures": figures, "chosen": [choice.chosen for choice in plot.choices]}


def page_data(sections: Sequence[Section]) -> str:
    """Returns the data of the page's script, as JSON that is safe inside a script element."""
    data = {
        "plots": {plot.key: _plot(plot) for section in sections for plot in section.plots},
        "templates": {"light": style.template(0), "dark": style.template(1)},
        "dark": style.dark_partners(),
    }
    text = json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """Returns a file of `templates/` as text."""
    return resources.files("simcore.reports").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        loader=jinja2.FunctionLoader(asset),
    )
    return environment.get_template(name)


def _look(*sheets: str) -> dict[str, Any]:
    """Returns what the head of every page is made of; `sheets`: more CSS files."""
    return {
        "light": style.variables(0),
        "dark": style.variables(1),
        "font": style.FONT,
        "css": "".join(map(asset, ("report.css", *sheets))),
    }


def render(opening: Opening, sections: Sequence[Section]) -> str:
    """Returns the page as HTML."""
    return _template("report.html.j2").render(
        opening=opening,
        sections=sections,
        script=asset("report.js"),
        plotly=get_plotlyjs(),
        data=page_data(sections),
        **_look(),
    )


def render_index(folder: str, entries: Sequence[Any]) -> str:
    """Returns the list of the runs in a folder as HTML; `entries` are those of `listing.py`."""
    count = f"{len(entries):,} run{'' if len(entries) == 1 else 's'}"
    return _template("index.html.j2").render(
        folder=folder, entries=entries, count=count, script=asset("index.js"), **_look("index.css")
    )
