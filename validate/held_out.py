"""Rung 1 on a CUDA card by itself: prices of a profile against times of shapes that it was not made of.

    python -m validate.held_out --count 100 --seed 7 --out prices.csv
    python -m validate.held_out --count 100 --seed 7 --measured prices.csv --device h200-sxm

Shapes are drawn by the seed from the ranges that a calibration covers (`validate.card_grid`), kind by kind,
measured as a calibration measures, and priced. Of each kind: how many, median, 95th percentile and worst
error, its shape, and the share of times that lie inside their price's 90 % interval. The second judges the
times of an earlier run, by prices as they are now, and needs no card.
"""

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from devices.corrected import place_of
from devices.fitted import FittedProfile
from devices.price import launches_and_floor, pricer, roofline
from devices.profile import Profile, load_profile
from devices.spec import DeviceSpec, load_device
from kernels.table import TABLE
from simcore.files import InputError, read_text, unknown_name
from simcore.ops import Op, Price, Pricer, Roofline
from validate import card_measure
from validate.allocator import take_memory_in_segments
from validate.bench_timing import Card, birth, measure_card, one_line
from validate.calibrate import NAME, shape_text
from validate.card_calibrate import this_card
from validate.card_grid import drawn
from validate.compile_ahead import as_compiled
from validate.ladder import off_pct
from validate.measure import Point
from validate.program import check_out, run, write_csv

MEDIAN_PCT, P95_PCT = 3.0, 10.0
MOST_DECODED = 512
COMPILING_S = 120.0
# How many times as many shapes are drawn to find those again that were drawn before.
TIMES_AS_MANY = 4
LEAST_COVER, MOST_COVER = 0.85, 0.95
SHAPE, TIMES = ("kind", "shape", "dtype"), ("median_s", "p10_s", "p90_s")
BORN = ("device", "driver", "torch", "triton", "date_utc", "sm_clock_mhz", "memory_clock_mhz")


Born = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Tried:
    """A held-out shape, measured and priced."""

    point: Point
    price: Price

    @property
    def error_pct(self) -> float:
        """By how much the larger of price and median exceeds the smaller."""
        return off_pct(self.price.seconds, self.point.median_s)

    @property
    def covered(self) -> bool:
        """Whether the median lies inside the price's interval."""
        return self.price.low_s <= self.point.median_s <= self.price.high_s


def held_out(kinds: Sequence[str], count: int, seed: int, profile: Profile | FittedProfile) -> list[Op]:
    """So many ops of each family, none of which a profile was made of, or checked by."""
    points = profile.points if isinstance(profile, FittedProfile) else ()
    known = {(point.kind, tuple(point.dimensions.items()), point.dtype) for point in points}
    return [op for op in drawn(kinds, count, seed, known) if card_measure.has_format(op)]


def tried(shapes: Iterable[Op], spec: DeviceSpec, price: Pricer, card: Card) -> Iterator[Tried]:
    """Each shape that can be measured, with its price."""
    floor = roofline(spec)
    for op in shapes:
        try:
            yield Tried(card_measure.measured(TABLE[op.kind], op, floor, card), price(op))
        except card_measure.FAILURES as error:
            typer.echo(f"  {op.kind} {shape_text(op)}: {one_line(error)}", err=True)
            card_measure.go_on()


def summary(found: Sequence[Tried]) -> list[dict[str, Any]]:
    """A row for each kind, and one for all of them."""
    groups: dict[str, list[Tried]] = {}
    for one in found:
        op = one.point.op
        shape = {name: op[name] for name, _ in op.shape}
        groups.setdefault(label(op.kind, op.dtype, shape), []).append(one)
    return [_row(*group) for group in (*sorted(groups.items()), ("all", found)) if group[1]]


def label(kind: str, dtype: str, shape: Mapping[str, int]) -> str:
    """What ops are judged together: products of prompts apart from those of steps that decode."""
    prompts = " of prompts" if kind == "matmul" and shape["m"] > MOST_DECODED else ""
    return f"{kind} {dtype}{prompts}"


def _row(kind: str, found: Sequence[Tried]) -> dict[str, Any]:
    errors = [one.error_pct for one in found]
    worst = max(found, key=lambda one: one.error_pct)
    return {
        "kind": kind,
        "n": len(found),
        "median_pct": median(errors),
        "p95_pct": float(np.percentile(errors, 95)),
        "worst_pct": max(errors),
        "covered": sum(one.covered for one in found) / len(found),
        "worst_shape": shape_text(worst.point.op),
    }


def told_apart(found: Sequence[Tried], profile: Profile | FittedProfile) -> list[Tried]:
    """Those that a card can tell from every shape that prices were made of (`devices.corrected.place`)."""
    points = profile.points if isinstance(profile, FittedProfile) else ()
    known = {point.place for point in points if point.role == "fit"}
    return [one for one in found if place_of(one.point.op) not in known]


def met(row: dict[str, Any]) -> bool:
    """Whether a kind's prices are as good as they have to be."""
    close = row["median_pct"] < MEDIAN_PCT and row["p95_pct"] < P95_PCT
    return bool(close and LEAST_COVER <= row["covered"] <= MOST_COVER)


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table for people."""
    yield f"{'kind':38} {'n':>4} {'median':>8} {'p95':>8} {'worst':>8} {'inside':>7}  worst shape"
    for row in rows:
        yield (
            f"{row['kind']:38} {row['n']:>4} {row['median_pct']:>6.2f} % {row['p95_pct']:>6.2f} % "
            f"{row['worst_pct']:>6.1f} % {100 * row['covered']:>5.0f} %  {row['worst_shape']}"
        )


def tried_before(
    shapes: Iterable[Op], spec: DeviceSpec, price: Pricer, path: Path
) -> tuple[list[Tried], Born]:
    """Those shapes that are in a file of `write`, by their time there, and the birth record. Raises
    InputError where it is no such file, or has other shapes."""
    rows = {tuple(row[name] for name in SHAPE): row for row in _read(path)}
    floor, found = roofline(spec), list[Tried]()
    for op in shapes:
        row = rows.pop((op.kind, shape_text(op), op.dtype), None)
        if row is not None:
            found.append(Tried(_point(op, floor, row), price(op)))
    if rows:
        raise InputError(
            f"{path}: {len(rows)} of its shapes are not among those that --kinds, --count and --seed draw: "
            f"{' '.join(next(iter(rows)))}"
        )
    return found, {name: row[name] for row in _read(path)[:1] for name in BORN}


def _point(op: Op, floor: Roofline, row: Mapping[str, str]) -> Point:
    launches, floor_s = launches_and_floor(op, floor)
    median_s, p10_s, p90_s = (float(row[name]) for name in TIMES)
    return Point(op, launches, floor_s, median_s, p10_s, p90_s, int(row["n"]), row["cache"])


def _read(path: Path) -> list[dict[str, str]]:
    """The lines of a file of `write`. Raises InputError where it is none."""
    rows = list(csv.DictReader(read_text(path).splitlines()))
    for number, row in enumerate(rows, 2):
        whole = {*SHAPE, *TIMES, *BORN, "n", "cache"} <= row.keys() and None not in row.values()
        if not whole or not row["n"].isdecimal() or not all(_is_time(row[name]) for name in TIMES):
            raise InputError(f"{path}: line {number} is none that --out writes")
    if not rows:
        raise InputError(f"{path}: has no line")
    return rows


def _is_time(cell: str) -> bool:
    try:
        return 0.0 < float(cell) < math.inf
    except ValueError:
        return False


def write(found: Sequence[Tried], born: Born, path: Path) -> None:
    """All of it as a file, whole or not at all, with the birth record of its times."""
    rows = [
        {
            "kind": one.point.op.kind,
            "shape": shape_text(one.point.op),
            "dtype": one.point.op.dtype,
            "predicted_s": one.price.seconds,
            "low_s": one.price.low_s,
            "high_s": one.price.high_s,
            "source": one.price.source,
            "median_s": one.point.median_s,
            "p10_s": one.point.p10_s,
            "p90_s": one.point.p90_s,
            "n": one.point.runs,
            "cache": one.point.cache,
            **born,
        }
        for one in found
    ]
    write_csv(rows, path)


def _measured_here(shapes: list[Op], spec: DeviceSpec, price: Pricer) -> tuple[list[Tried], Born]:
    """Each shape measured on this card, and the birth record."""
    take_memory_in_segments()
    card = measure_card(lambda text: None)
    # As in a calibration: a card that is loaded and then not has to rest each time.
    shapes = sorted(shapes, key=lambda op: card_measure.loads(op, roofline(spec)))
    ready = as_compiled(shapes, lambda op: op, time.perf_counter() + COMPILING_S)
    found, born = list(tried(ready, spec, price, card)), asdict(birth(card))
    return found, {name: born[name] for name in BORN}


def main(
    count: Annotated[int, typer.Option(min=1, help="shapes of each kind")] = 100,
    seed: Annotated[int, typer.Option(help="by which they are drawn")] = 7,
    profile: Annotated[str, typer.Option(help="name, or folder, of the profile")] = NAME,
    kinds: Annotated[str, typer.Option(help="kinds of op, with commas between [all]")] = "",
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    from_: Annotated[
        Path | None, typer.Option("--measured", help="a file of --out: its times, in place of a card")
    ] = None,
    device: Annotated[str, typer.Option(help="of the catalogue, with --measured [this card]")] = "",
) -> None:
    """Measures held-out shapes on this card and prints how far off their prices are; exit 1 where they are
    further off than they may be."""
    asked = kinds.split(",") if kinds else list(TABLE)
    for kind in asked:
        if kind not in TABLE:
            raise InputError(f"--kinds: {unknown_name('kind', kind, TABLE)}")
    check_out(out)
    if device and from_ is None:
        raise InputError("--device: goes with --measured; what is measured is of this card")
    name = device or this_card()
    spec, of = load_device(name), load_profile(name, profile)
    price = pricer(spec, profile=of)
    if from_ is None:
        found, born = _measured_here(held_out(asked, count, seed, of), spec, price)
    else:
        # Some were not drawn then, for the grid or the profile had them: the next were.
        shapes = drawn(asked, TIMES_AS_MANY * count, seed, beside_grid=False)
        found, born = tried_before(shapes, spec, price, from_)
    if not found:
        raise InputError(f"--kinds {kinds}: nothing could be measured")
    if out:
        write(found, born, out)
    rows = summary(found)
    for line in lines(rows):
        typer.echo(line)
    apart = told_apart(found, of)
    for row in summary(apart)[-1:]:
        typer.echo(
            f"{len(found) - len(apart)} of {len(found)} shapes are launched as a measured one is; without "
            f"them median {row['median_pct']:.2f} %, 95th percentile {row['p95_pct']:.2f} %"
        )
    off = [row["kind"] for row in rows[:-1] if not met(row)]
    if off:
        typer.echo(
            f"median under {MEDIAN_PCT:g} %, 95th percentile under {P95_PCT:g} %, {100 * LEAST_COVER:.0f} to "
            f"{100 * MOST_COVER:.0f} % inside: not so for {', '.join(off)}"
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
