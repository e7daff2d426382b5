"""Rung 1 on a CUDA card by itself: a profile's prices against times of shapes that were not used for it.

    python -m simcore.validate.accuracy.held_out --count 100 --seed 7 --out prices.csv
    python -m simcore.validate.accuracy.held_out --count 100 --seed 7 --measured prices.csv --device h200-sxm

The seed draws shapes kind by kind from the ranges of a calibration (`cuda_grid`); they are measured as in a
calibration, and priced. The table has, for each kind, the count, median, 95th percentile and worst error, the
shape of the worst, and the share of times inside the 90 % interval of their price. The second command judges
the times of an earlier run by current prices, and needs no card.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from simcore.devices.fitted import FittedProfile
from simcore.devices.interpolation import place_of
from simcore.devices.making import Point, shape_text
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import Profile, load_profile
from simcore.devices.spec import DeviceSpec, load_device
from simcore.input.files import InputError
from simcore.ops.op import Op, Price, Pricer
from simcore.terminal import BROKEN
from simcore.validate.accuracy.tables import (
    MEDIAN_PCT,
    P95_PCT,
    Birth,
    error_lines,
    errors_row,
    is_close,
    label,
    read_rows,
)
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.benchmarks.timing import Card, birth, measure_card, one_line
from simcore.validate.calibration.cuda import this_card
from simcore.validate.calibration.cuda_grid import drawn
from simcore.validate.calibration.records import NAME, Kept, key_of
from simcore.validate.ladder.rungs import off_pct
from simcore.validate.program import check_out, named, run, write_csv
from simcore.validate.timing import cuda_times as card_measure
from simcore.validate.timing.allocator import take_memory_in_segments
from simcore.validate.timing.card_kernels import ON_CARDS
from simcore.validate.timing.compile_ahead import as_compiled

COMPILING_S = 120.0
# Factor of shapes drawn in order to find all shapes of an earlier run again.
TIMES_AS_MANY = 4
LEAST_COVER, MOST_COVER = 0.85, 0.95

AnyProfile = Profile | FittedProfile


@dataclass(frozen=True, slots=True)
class Tried:
    """A held-out shape, measured and priced."""

    point: Point
    price: Price

    @property
    def error_pct(self) -> float:
        """The percentage by which the larger of price and median exceeds the smaller."""
        return off_pct(self.price.seconds, self.point.median_s)

    @property
    def covered(self) -> bool:
        """Whether the median lies inside the price's interval."""
        return self.price.low_s <= self.point.median_s <= self.price.high_s


def held_out(kinds: Sequence[str], count: int, seed: int, profile: AnyProfile) -> list[Op]:
    """Draws `count` ops of each family that were neither fitted nor checked by the profile."""
    points = profile.points if isinstance(profile, FittedProfile) else ()
    known = {(point.kind, tuple(point.dimensions.items()), point.dtype) for point in points}
    return [op for op in drawn(kinds, count, seed, known) if card_measure.has_format(op)]


def tried(shapes: Iterable[Op], spec: DeviceSpec, price: Pricer, card: Card) -> Iterator[Tried]:
    """Yields each shape that can be measured, with its price."""
    floor = roofline(spec)
    for op in shapes:
        try:
            yield Tried(card_measure.measured(ON_CARDS[op.kind], op, floor, card), price(op))
        except card_measure.FAILURES as error:
            typer.echo(f"  {op.kind} {shape_text(op)}: {one_line(error)}", err=True)
            card_measure.go_on()


def summary(found: Sequence[Tried]) -> list[dict[str, Any]]:
    """Returns a row for each kind, and one for all; `covered`: the share of times inside intervals."""
    groups: dict[str, list[Tried]] = {}
    for one in found:
        op = one.point.op
        groups.setdefault(label(op.kind, op.dtype, {name: op[name] for name, _ in op.shape}), []).append(one)
    rows = []
    for kind, each in (*sorted(groups.items()), *([("all", found)] if found else [])):
        shapes = [shape_text(one.point.op) for one in each]
        covered = sum(one.covered for one in each) / len(each)
        rows.append({**errors_row(kind, [one.error_pct for one in each], shapes), "covered": covered})
    return rows


def unlike_fitted(found: Sequence[Tried], profile: AnyProfile) -> list[Tried]:
    """Returns the shapes that a card can tell from every fitted shape (`interpolation.place`)."""
    points = profile.points if isinstance(profile, FittedProfile) else ()
    known = {point.place for point in points if point.role == "fit"}
    return [one for one in found if place_of(one.point.op) not in known]


def meets_bars(row: dict[str, Any]) -> bool:
    """Whether a kind's prices meet the bars."""
    return is_close(row) and LEAST_COVER <= row["covered"] <= MOST_COVER


def tried_before(shapes: Iterable[Op], spec: DeviceSpec, price: Pricer, rows: Sequence[Kept]) -> list[Tried]:
    """Returns the shapes of the rows with the rows' times. Raises InputError if a row's shape is missing."""
    left = {row.key: row for row in rows}
    floor, found = roofline(spec), list[Tried]()
    for op in shapes:
        row = left.pop(key_of(op), None)
        if row is not None:
            found.append(Tried(row.point(op, floor), price(op)))
    if left:
        raise InputError(
            f"--seed, --count, --kinds: have to be those of the run that wrote --measured; {len(left)} of "
            f"its {len(rows)} shapes are not drawn by these, as {' '.join(next(iter(left)))}"
        )
    return found


def read_run(path: Path) -> tuple[list[Kept], Birth]:
    """Returns the lines of a file of `write`, and their birth record. Raises InputError if the file is
    invalid, has a shape twice, or has times of several births."""
    rows, births = read_rows(path, Kept)
    for number, born in enumerate(births, 2):
        for name in BORN:
            if (own := born[name]) != (first := births[0][name]):
                raise InputError(
                    f"{path}: line {number}: {name}: is {own}, of the first {first}: one run a file"
                )
    if len({row.key for row in rows}) < len(rows):
        raise InputError(f"{path}: has a shape twice")
    return rows, births[0]


def _judged_again(
    rows: Sequence[Kept], born: Birth, shapes: Iterable[Op], spec: DeviceSpec, of: AnyProfile, where: Path
) -> list[Tried]:
    """Judges rows that the profile neither used nor checked. Raises InputError if the card is another."""
    if isinstance(of, FittedProfile) and of.birth is not None and of.birth.processor != born["device"]:
        raise InputError(f"{where}: device: is {born['device']}, that of the profile {of.birth.processor}")
    points = of.points if isinstance(of, FittedProfile) else ()
    known = {(point.kind, point.shape, point.dtype) for point in points}
    found = tried_before(shapes, spec, pricer(spec, profile=of), rows)
    new = [one for one in found if key_of(one.point.op) not in known]
    if len(new) < len(found):
        typer.echo(f"left out: {len(found) - len(new)} shapes that the profile was made of, or checked by")
    return new


def write(found: Sequence[Tried], born: Birth, path: Path) -> None:
    """Writes all rows with the birth record of their times to a file, completely or not at all."""
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


def _measured_here(shapes: list[Op], spec: DeviceSpec, price: Pricer) -> tuple[list[Tried], Birth]:
    """Measures each shape on this card; returns also the birth record."""
    take_memory_in_segments()
    card = measure_card(lambda text: None)
    # Order as in a calibration: a card that alternates between load and rest must rest each time.
    shapes = sorted(shapes, key=lambda op: card_measure.loads(op, roofline(spec)))
    ready = as_compiled(shapes, lambda op: op, time.perf_counter() + COMPILING_S)
    found, born = list(tried(ready, spec, price, card)), asdict(birth(card))
    return found, {name: str(born[name]) for name in BORN}


def main(
    count: Annotated[int, typer.Option(min=1, max=1000, help="shapes of each kind")] = 100,
    seed: Annotated[int, typer.Option(help="by which they are drawn")] = 7,
    profile: Annotated[str, typer.Option(help="name, or folder, of the profile")] = NAME,
    kinds: Annotated[str, typer.Option(help="kinds of op, with commas between [all]")] = "",
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    again: Annotated[
        Path | None,
        typer.Option("--measured", help="a file of --out, of these --count, --seed and --kinds: its times"),
    ] = None,
    device: Annotated[str, typer.Option(help="of the catalogue, whose times --measured has")] = "",
) -> None:
    """Measures held-out shapes on this card and prints how far off their prices are; exit 1 where they are
    further off than they may be."""
    asked = named("--kinds", kinds, ON_CARDS) or list(ON_CARDS)
    check_out(out)
    if bool(device) != (again is not None):
        raise InputError(
            "--device: is given with --measured, and only there: what is measured is of this card"
        )
    name = device or this_card()
    spec, of = load_device(name), load_profile(name, profile)
    if again is None:
        found, born = _measured_here(held_out(asked, count, seed, of), spec, pricer(spec, profile=of))
    else:
        every, born = read_run(again)
        rows = [row for row in every if row.kind in asked]
        # A run skips shapes of the grid or of its profile and draws the next ones instead.
        shapes = drawn(asked, TIMES_AS_MANY * count, seed, beside_grid=False)
        found = _judged_again(rows, born, shapes, spec, of, again) if rows else []
    if not found:
        raise InputError(f"--kinds {kinds}: nothing could be measured")
    if out:
        write(found, born, out)
    if not _print_summary(found, of):
        raise typer.Exit(BROKEN)


def _print_summary(found: Sequence[Tried], of: AnyProfile) -> bool:
    """Prints the table and its summary; returns whether every kind meets the bars."""
    rows = summary(found)
    for line in error_lines(rows):
        typer.echo(line)
    apart = unlike_fitted(found, of)
    for row in summary(apart)[-1:]:
        typer.echo(
            f"{len(found) - len(apart)} of {len(found)} shapes are launched as a measured one is; without "
            f"them median {row['median_pct']:.2f} %, 95th percentile {row['p95_pct']:.2f} %"
        )
    off = [row["kind"] for row in rows[:-1] if not meets_bars(row)]
    if off:
        typer.echo(
            f"median under {MEDIAN_PCT:g} %, 95th percentile under {P95_PCT:g} %, {100 * LEAST_COVER:.0f} to "
            f"{100 * MOST_COVER:.0f} % inside: not so for {', '.join(off)}"
        )
    return not off


if __name__ == "__main__":
    run(main)
