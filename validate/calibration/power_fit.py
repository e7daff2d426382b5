"""Fits the law by which arithmetic takes longer under load (`simcore.sim.power`) to measured products.

    steady   a product that arithmetic bounds takes `share` of each period, another op or nothing the rest
    begins   after rest or other ops, products follow each other: the n-th begins after `at_s`

Each row says how many times as long as alone the product took. The law is run as the simulator runs it,
launch after launch; its four constants are those of least squares. Of a beginning the first BEGINNING_S
count, as much as a steady case.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize_scalar

from simcore.devices.fitted import LimitedPower
from simcore.input.files import InputError
from simcore.sim.power import BUSY, Load, PowerLimit
from simcore.validate import cells
from simcore.validate.cells import count, positive

Beside = Literal["memory", "rest"]
Kind = Literal["steady", "begins"]
FROM_0 = ("at_s", "series")
# arithmetic, others, idle, over_s: first guess, least and most.
GUESS, LEAST, MOST = (1.5, 0.7, 0.1, 0.05), (0.5, 0.05, 0.0, 0.004), (4.0, 1.0, 0.6, 1.0)
# Steady cases are simulated for so many periods, and for so many times `over_s`; the last third counts.
PERIODS, TIMES_OVER = 12, 6.0
# Later the card is as warm as its cases before, and no longer tells over which time power counts.
BEGINNING_S = 0.1
# By how much the caps of two cards of a kind may differ.
CAPS = (0.85, 1.18)
# A card whose products never take this much longer shows no limit.
SEEN = 1.03
# The median error and the largest that a law may have, in percent.
MEDIAN_PCT, WORST_PCT = 2.0, 6.0


class UnlimitedError(ValueError):
    """Products take as long under load as alone: no power cap was seen."""


class OffError(ValueError):
    """The rows do not follow the law."""


@dataclass(frozen=True, slots=True)
class Row:
    """One steady case, or one product after a beginning. `times`: how many times as long as alone; `n`:
    products that count; `series`: the number of the beginning."""

    kind: Kind
    dtype: str
    beside: Beside
    period_s: float
    share: float
    at_s: float
    series: int
    times: float
    n: int


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a file as `simcore.validate.accuracy.power` writes it. Raises InputError."""
    found: list[Row] = []
    cases: dict[tuple[object, ...], str] = {}
    for where, line in cells.lines(path, [field.name for field in fields(Row)]):
        row = _row(where, line)
        case = row.kind, row.dtype, row.beside, row.series, row.at_s, row.period_s, row.share
        if (first := cases.setdefault(case, where)) != where:
            raise InputError(f"{where}: is the case of {first.rpartition(': ')[2]} again")
        found.append(row)
    if not any(row.kind == "steady" for row in found):
        raise InputError(f"{path}: has no row of kind steady")
    return found


def _row(where: str, line: Mapping[str, str]) -> Row:
    formats = sorted(BUSY)
    for name, allowed in (("kind", get_args(Kind)), ("beside", get_args(Beside)), ("dtype", formats)):
        if line[name] not in allowed:
            raise InputError(f"{where}: {name}: {line[name]!r} (allowed: {', '.join(allowed)})")
    # From 0 on; the others are above 0.
    begun = {name: 0.0 if line[name] in ("0", "0.0") else positive(where, line, name) for name in FROM_0}
    found = Row(
        kind=cast(Kind, line["kind"]),
        dtype=line["dtype"],
        beside=cast(Beside, line["beside"]),
        period_s=positive(where, line, "period_s"),
        share=positive(where, line, "share"),
        at_s=begun["at_s"],
        series=int(begun["series"]),
        times=positive(where, line, "times"),
        n=count(where, line, "n"),
    )
    if found.share > 1.0:
        raise InputError(f"{where}: share: is {found.share:g}, more than 1")
    return found


# -- the law, as the simulator runs it -----------------------------------------------------------------------


class _Card:
    """A card that runs launches one after the other."""

    def __init__(self, limit: PowerLimit) -> None:
        self.now_s, self._load = 0.0, Load(limit)

    def run(self, seconds: float, arithmetic: float) -> float:
        """Runs a launch of these seconds alone, of which `arithmetic` is bound by it; returns how many times
        as long it takes."""
        arithmetic_s = arithmetic * seconds
        (longer,) = self._load.factors([(arithmetic_s, arithmetic_s, 0.0, seconds)], self.now_s)
        took_s, begun_s = seconds + (longer - 1.0) * arithmetic_s, self.now_s
        self.now_s += took_s
        self._load.add(longer * arithmetic_s, seconds - arithmetic_s, begun_s, self.now_s)
        return took_s / seconds

    def other(self, seconds: float, beside: Beside) -> None:
        """Runs what memory bounds for so long, or rests."""
        if beside == "memory" and seconds > 0.0:
            self.run(seconds, 0.0)
        else:
            self.now_s += seconds


def steady(limit: PowerLimit, row: Row) -> float:
    """Returns how many times as long as alone a product of a steady case takes by the law."""
    card, found = _Card(limit), []
    # Shares are of time as it was measured, so products take less of the period alone.
    alone_s, other_s = row.share * row.period_s / row.times, (1.0 - row.share) * row.period_s
    periods = max(PERIODS, int(TIMES_OVER * limit.over_s / row.period_s))
    for _ in range(periods):
        found.append(card.run(alone_s, 1.0))
        card.other(other_s, row.beside)
    return float(np.mean(found[-max(1, periods // 3) :]))


def beginning(limit: PowerLimit, rows: Sequence[Row]) -> list[float]:
    """Returns the same of the products of a beginning, in order; `period_s` of a row is its time alone."""
    card = _Card(limit)
    if rows[0].beside == "memory":
        card.other(max(1.0, TIMES_OVER * limit.over_s), "memory")
    return [card.run(row.period_s, 1.0) for row in rows]


def series_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields the beginnings, each in order."""
    some = sorted((row for row in rows if row.kind == "begins"), key=lambda row: (row.series, row.at_s))
    for _, own in groupby(some, key=lambda row: row.series):
        yield list(own)


def errors(limit: PowerLimit, rows: Sequence[Row]) -> list[float]:
    """Returns predicted over measured, less 1, of all steady cases."""
    return [steady(limit, row) / row.times - 1.0 for row in rows if row.kind == "steady"]


def cap_times(limit: PowerLimit, rows: Sequence[Row]) -> float:
    """Returns by how much the power cap of the card of these rows is lower than that of the law's card: cards
    of one kind differ by some percent. Least squares over steady cases but those in fp8, whose times are not
    in those of the profile. Raises OffError if there are none, or if they do not follow the law with any cap
    near that one: something else slowed the card down."""
    steady_rows = [row for row in rows if row.kind == "steady" and row.dtype != "fp8"]
    if not steady_rows:
        raise OffError("no products were measured that tell the cap")

    def off(times: float) -> float:
        return sum([error**2 for error in errors(limit.lower(times), steady_rows)])

    found = float(minimize_scalar(off, bounds=CAPS, method="bounded").x)
    worst = max(map(abs, errors(limit.lower(found), steady_rows)))
    if 100.0 * worst >= WORST_PCT or min(abs(found - end) for end in CAPS) < 0.01:
        raise OffError(f"products under load are {100.0 * worst:.1f} % off the profile's law at worst")
    return found


# -- the fit -------------------------------------------------------------------------------------------------


def fit(rows: Sequence[Row]) -> PowerLimit:
    """Returns the constants. Raises ValueError if the rows do not determine them."""
    every = [row for row in rows if row.kind == "steady"]
    begun = [[row for row in own if row.at_s < BEGINNING_S] for own in series_of(rows)]
    if {row.beside for row in every} != {"memory", "rest"} or not begun:
        raise ValueError("steady cases beside memory and beside rest, and beginnings, are needed")
    if max(row.times for row in every) < SEEN:
        raise UnlimitedError(f"no product took {SEEN:g} times as long as alone: no limit of power was seen")

    def off(constants: NDArray[np.float64]) -> NDArray[np.float64]:
        limit = PowerLimit(*map(float, constants))
        found = errors(limit, every)
        for own in begun:
            each = zip(beginning(limit, own), own, strict=True)
            found += [(ours / row.times - 1.0) / sqrt(len(own)) for ours, row in each]
        return np.array(found)

    # Steps wide enough that the mean over periods moves.
    best = least_squares(off, GUESS, bounds=(LEAST, MOST), x_scale=GUESS, diff_step=np.full(len(GUESS), 1e-3))
    return PowerLimit(*map(float, best.x))


def limited_power(rows: Sequence[Row], processor: str, date: str) -> LimitedPower:
    """Returns the profile's entry. Raises ValueError if the rows do not determine it, or do not follow the
    law."""
    limit = fit(rows)
    off = errors(limit, rows)
    if 100.0 * median(map(abs, off)) >= MEDIAN_PCT or 100.0 * max(map(abs, off)) >= WORST_PCT:
        raise OffError(f"the law is {100.0 * max(map(abs, off)):.1f} % off at worst")
    return LimitedPower(
        arithmetic=limit.arithmetic,
        others=limit.others,
        idle=limit.idle,
        over_s=limit.over_s,
        cases=len(off),
        error_pct=100.0 * median(map(abs, off)),
        processor=processor,
        date=date,
    )
