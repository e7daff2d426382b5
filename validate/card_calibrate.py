"""Measures what ops cost on a CUDA card, and writes the profile by which they are priced.

    a line for each kind of op         two constants                       devices.fit
    and for each matrix, each set of
    heads, ... that models have        two constants, corrected by what
                                       was measured near an op's shape     devices.corrected
    intervals                          by shapes drawn besides, by kind

What was measured is kept beside the profile until it is whole: a calibration that was interrupted goes on
where it stopped, on the same card with the same software.
"""

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from devices.corrected import Measured, Role
from devices.fitted import Birth, FittedProfile
from devices.price import roofline
from devices.spec import load_device
from kernels.linear_attention.api import default_device
from kernels.table import TABLE, Kernel
from simcore.files import InputError
from simcore.ops import Op
from simcore.study import Progress
from validate import card_measure
from validate.bench_timing import Card, birth, measure_card, one_line
from validate.calibrate import (
    ALIKE,
    COLUMNS,
    NAME,
    cells,
    check_target,
    fits,
    profile_path,
    shape_text,
    write_whole,
)
from validate.card_grid import drawn, families, grid
from validate.measure import Point

CACHE = "memory, what is small in the L2 cache"
# Shapes of a kind that only say how far off prices are; drawn by a seed of their own.
CHECKS, QUICK_CHECKS, CHECK_SEED = 40, 12, 20_250
NOTED_FAILURES = 5

Key = tuple[str, str, str]


def calibrate_card(
    target: Path | None, quick: bool, progress: Progress, *, table: Mapping[str, Kernel] = TABLE
) -> tuple[Path, FittedProfile]:
    """Measures, fits and writes the profile folder `target` (the device's own, if left out), whole or not at
    all; gives both. Raises InputError where there is no CUDA card, or the catalogue has not got it."""
    if not torch.cuda.is_available():
        raise InputError("--on cuda: torch finds no CUDA device here")
    try:
        device = default_device(torch.device("cuda"))
    except ValueError as error:
        raise InputError(f"--on cuda: {error}") from None
    target = target or profile_path(device)
    check_target(target, device)
    progress("what the card reaches", 0, 1)
    card = measure_card(lambda text: None)
    costs, reached = card_measure.host_costs(), card_measure.rates(card)
    torch.cuda.empty_cache()
    points, failed = _points(device, target, quick, table, card, progress)
    profile = profile_of(device, points, _birth(card, points, reached), costs, failed)
    write_whole(profile, points, target)
    _partial(target).unlink(missing_ok=True)
    return target, profile


def profile_of(
    device: str, points: Sequence[Point], born: Birth, costs: Mapping[str, float], failed: Sequence[str]
) -> FittedProfile:
    """The profile that measured points make."""
    return FittedProfile(
        name=NAME,
        title=f"{born.processor}, kernels of this project and torch's, in captured graphs",
        source=f"measured on this card: calibrate --on cuda, {len(points)} shapes",
        device=device,
        granularity="measured",
        # What a captured graph costs around a kernel is in its time already.
        fits=fits(points, {}, 0.0, CACHE, own_line),
        overheads=dict(costs),
        birth=born,
        notes=tuple(_notes(points, failed)),
        points=tuple(as_read(point) for point in points),
    )


def as_read(point: Point) -> Measured:
    """A point as the profile's file has it."""
    op = point.op
    return Measured(
        op.kind, shape_text(op), op.dtype, point.launches, point.floor_s, point.median_s, point.role
    )


def own_line(op: Op) -> Iterator[str]:
    """The dimensions that models choose, where a kind has such: ops that have them in common get a line."""
    # What ALIKE tells apart is in every line's condition.
    if names := [name for name in _chosen_names().get(op.kind, ()) if name not in ALIKE]:
        yield ";".join(f"{name}={op[name]}" for name in names)


def _chosen_names() -> Mapping[str, Sequence[str]]:
    return {family.kind: tuple(family.choices[0]) for family in families()}


# -- measuring ---------------------------------------------------------------------------------------------


def _points(
    device: str, target: Path, quick: bool, table: Mapping[str, Kernel], card: Card, progress: Progress
) -> tuple[list[Point], list[str]]:
    """All points, those of an interrupted calibration read, and what failed."""
    shapes: list[tuple[Op, Role]] = [(op, "fit") for op in grid(table, quick=quick)]
    shapes += [(op, "check") for op in drawn(table, QUICK_CHECKS if quick else CHECKS, CHECK_SEED)]
    # Kind by kind, so that what is left is as long as what is done.
    shapes.sort(key=lambda each: each[0].kind)
    floor, path = roofline(load_device(device)), _partial(target)
    done = _read_partial(path, card, shapes)
    failed, found, begun_s = list[str](), dict[Key, Point](), time.perf_counter()
    new = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if done else "w", newline="", encoding="utf-8") as file:
        if not done:
            file.write(json.dumps(_identity(card)) + "\n")
        writer = csv.writer(file, lineterminator="\n")
        for i, (op, role) in enumerate(shapes):
            key = _key(op)
            if key in done:
                found[key] = done[key]
                continue
            left_s = (time.perf_counter() - begun_s) / max(1, new) * (len(shapes) - i)
            progress(f"{op.kind}, about {left_s:.0f} s left: shape", i, len(shapes))
            new += 1
            try:
                point = card_measure.measured(table[op.kind], op, floor, card)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                failed.append(f"{op.kind} {shape_text(op)}: {one_line(error)}")
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                continue
            found[key] = replace(point, role=role)
            writer.writerow(cells(found[key]))
            file.flush()
    if not found:
        raise InputError(f"--on cuda: nothing could be measured; {failed[0] if failed else 'no shapes'}")
    return list(found.values()), failed


def _key(op: Op) -> Key:
    return op.kind, shape_text(op), op.dtype


def _partial(target: Path) -> Path:
    return target.parent / f".{target.name}-partial.csv"


def _identity(card: Card) -> dict[str, str]:
    """What has to be the same for measurements to go on."""
    born = asdict(birth(card))
    return {name: str(born[name]) for name in ("device", "driver", "torch", "triton")}


def _read_partial(path: Path, card: Card, shapes: Sequence[tuple[Op, Role]]) -> dict[Key, Point]:
    """What an interrupted calibration of the same card has left; nothing where it cannot be read."""
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != _identity(card):
            return {}
        rows = list(csv.reader(lines))
    except (OSError, ValueError):
        return {}
    by_key = {_key(op): op for op, _ in shapes}
    found: dict[Key, Point] = {}
    for row in rows:
        # The last line may have been cut off.
        if len(row) == len(COLUMNS) and (op := by_key.get((row[0], row[1], row[2]))) is not None:
            found[_key(op)] = _point(op, row)
    return found


def _point(op: Op, row: Sequence[str]) -> Point:
    line: Mapping[str, Any] = dict(zip(COLUMNS, row, strict=True))
    floor_s, median_s, p10_s, p90_s = (
        float(line[name]) for name in ("floor_s", "median_s", "p10_s", "p90_s")
    )
    warm_s = float(line["warm_s"]) if line["warm_s"] else None
    spread = median_s, p10_s, p90_s, int(line["n"])
    return Point(op, int(line["launches"]), floor_s, *spread, line["cache"], warm_s, line["role"])


# -- birth record --------------------------------------------------------------------------------------------


def _birth(card: Card, points: Sequence[Point], reached: Mapping[str, float]) -> Birth:
    born = birth(card)
    versions = {"torch": born.torch, "triton": born.triton, "driver": born.driver}
    versions |= {"sm_clock_mhz": born.sm_clock_mhz, "memory_clock_mhz": born.memory_clock_mhz}
    return Birth(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=born.device,
        threads=1,
        versions={name: text for name, text in versions.items() if text},
        points=len(points),
        runs=min(point.runs for point in points),
        spread=median(point.spread for point in points),
        rates=dict(reached),
    )


def _notes(points: Sequence[Point], failed: Sequence[str]) -> Iterator[str]:
    """What a reader should know."""
    yield f"operands come from {CACHE}; the column cache says which"
    fast = sum(point.median_s < point.floor_s for point in points)
    if fast:
        yield f"{fast} of {len(points)} shapes were faster than the device's figures allow"
    if failed:
        yield f"{len(failed)} shapes could not be measured"
        yield from failed[:NOTED_FAILURES]
