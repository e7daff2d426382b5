"""Which columns of a plan's points vary, and what its figures draw along which axis.

across    the searched number, or the first varied one
rows      the next varied number, if there is one
ways      all else that varies: strategies, devices, other fields

A column that earlier ones determine varies nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from simcore.reports.common.sections import Option, Row
from simcore.reports.planning.points import VARIED, Planned
from simcore.reports.text import counted, known, recorded

# Columns of the laid-out points: all that varies besides both axes in words, and the same with the row.
WAY, PLACE = "way", "place"


@dataclass(frozen=True)
class Axis:
    """A column of numbers, its title on an axis, and the words of a value."""

    column: str
    title: str
    text: Callable[[float], str]


RATE = Axis("rate_per_s", "offered rate (requests/s)", lambda v: f"{recorded(v)}\u00a0requests/s")
DEVICES = Axis("devices", "devices", lambda v: counted(round(v), "device"))
LOAD = (
    RATE,
    Axis("requests", "requests", lambda v: counted(round(v), "request")),
    Axis("prompt_tokens", "mean prompt (tokens)", lambda v: f"{recorded(v)}\u00a0prompt tokens"),
    Axis("output_tokens", "mean output (tokens)", lambda v: f"{recorded(v)}\u00a0output tokens"),
)
COST = Axis("cost_per_hour", "cost an hour", lambda v: f"{recorded(v)} an hour")
ENERGY = Axis(
    "joules_per_output_token",
    "energy per output token, at most (J)",
    lambda v: f"at most {recorded(v)} J a token",
)
# Question -> the axis along which it is searched; of a grid the one that comes first if it varies.
SEARCHED = {"devices": DEVICES, "cost": DEVICES, "rate": RATE, "strategy": RATE, "grid": RATE}


@dataclass(frozen=True)
class Laid:
    """Points laid out for figures, with WAY and PLACE. `rows`: None if only one number varies; `places`: the
    rows of a figure, by the second axis; of one value of it the ways that answer or hold most come first."""

    points: pd.DataFrame
    across: Axis
    rows: Axis | None

    @property
    def places(self) -> list[str]:
        """The rows of a figure, in their order."""
        level = self.points[self.rows.column] if self.rows else 0.0
        ranks = {way: rank for rank, way in enumerate(self.ways)}
        order = self.points.assign(level=level, rank=self.points[WAY].map(ranks))
        return [*dict.fromkeys(order.sort_values(["level", "rank"], kind="stable")[PLACE])]

    @property
    def ways(self) -> list[str]:
        """The ways, those that answer first, then by how many points hold."""
        points = self.points.assign(holds=self.points["verdict"] == "holds")
        sums = points.groupby(WAY, sort=False)[["best", "holds"]].sum()
        return [*sums.sort_values(["best", "holds"], ascending=False, kind="stable").index]

    @property
    def levels(self) -> list[float]:
        """The values of the second axis, ascending; empty without one."""
        return sorted(self.points[self.rows.column].unique()) if self.rows else []

    def only(self, chosen: "pd.Series[bool]") -> "Laid":
        """Returns the same with some of the points."""
        return replace(self, points=self.points[chosen])


def laid(plan: Planned, *, longest: bool = False) -> Laid | None:
    """Lays out the points by the columns that vary; None if no number places them. `longest`: the
    second axis is the number with the most values, not the next one."""
    searched = SEARCHED.get(plan.question, RATE)
    numbers, texts = _apart(plan.points, [searched, *varied_axes(plan)])
    first = [axis for axis in (*numbers[:1], searched, RATE, DEVICES) if _known(plan.points, axis)]
    if not first:
        return None
    across = first[0]
    others = [axis for axis in numbers if axis.column != across.column and _known(plan.points, axis)]
    if longest:
        others.sort(key=lambda axis: -plan.points[axis.column].nunique())
    rows, further = (others[0] if others else None), others[1:]
    placed = [axis.column for axis in (across, rows) if axis]
    points = plan.points[plan.points[placed].notna().all(axis=1)].reset_index(drop=True)
    records = points.to_dict("records")
    ways = [_way(row, texts, further) for row in records]
    levels = [rows.text(row[rows.column]) if rows else "" for row in records]
    alone = len(set(ways)) == 1
    places = [
        ", ".join(part for part in (level, "" if alone else way) if part) or str(row["label"])
        for row, way, level in zip(records, ways, levels, strict=True)
    ]
    return Laid(points.assign(**{WAY: ways, PLACE: places}), across, rows)


def varied_axes(plan: Planned) -> list[Axis]:
    """Returns the varied numbers, devices last; loads and devices by their own columns."""
    found: list[Axis] = []
    for name in plan.points.columns:
        if name.startswith(VARIED) and plan.points[name].dtype == float:
            twins = (axis for axis in (DEVICES, *LOAD) if plan.points[axis.column].equals(plan.points[name]))
            found.append(next(twins, _axis(name)))
    return sorted(found, key=lambda axis: axis.column == DEVICES.column)


def field_name(column: str) -> str:
    """Returns the name of a varied field: the last part of its path that is no number, in words."""
    parts = [part for part in column.removeprefix(VARIED).split(".") if not part.isdigit()]
    return (parts or [column])[-1].replace("_", " ")


def _axis(column: str) -> Axis:
    title = field_name(column)
    return Axis(column, title, lambda value: f"{title} {recorded(value)}")


def _known(points: pd.DataFrame, axis: Axis) -> bool:
    return bool(points[axis.column].notna().any())


def _apart(points: pd.DataFrame, asked: Sequence[Axis]) -> tuple[list[Axis], list[str]]:
    """Returns the numbers and the columns of text that tell the points apart. The label precedes numbers that
    were not asked for."""
    numbers = {axis.column: axis for axis in (*asked, *LOAD, DEVICES)}
    texts = [name for name in points.columns if name.startswith(VARIED) and points[name].dtype != float]
    kept: list[str] = []
    apart = min(1, len(points))
    for name in dict.fromkeys([*(axis.column for axis in asked), "label", "device", *texts, *numbers]):
        count = len(points[[*kept, name]].drop_duplicates())
        if count > apart:
            kept, apart = [*kept, name], count
    return [numbers[name] for name in kept if name in numbers], [name for name in kept if name not in numbers]


def _way(row: Row, texts: Sequence[str], further: Sequence[Axis]) -> str:
    words = [
        f"{field_name(name)} {row[name]}" if name.startswith(VARIED) else str(row[name]) for name in texts
    ]
    return ", ".join([*words, *(axis.text(row[axis.column]) for axis in further if known(row[axis.column]))])


def parted(of: Laid, most: int) -> tuple[str, list[Option]]:
    """Returns the name of a choice and its options, layouts of at most `most` places each: all in one if they
    fit, or else a value of the second axis each. What is beyond is left out, the ways that hold least."""
    if len(of.places) <= most or not of.levels or of.rows is None:
        return "", [("all", of.only(of.points[PLACE].isin(of.places[:most])))]
    few = of.only(of.points[WAY].isin(of.ways[:most]))
    column, text = of.rows.column, of.rows.text
    return of.rows.title, [(text(value), few.only(few.points[column] == value)) for value in of.levels]
