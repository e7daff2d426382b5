"""Measures the costs of ops on a CUDA card and writes the profile with their prices.

    a line for each kind of op         two constants                       simcore.devices.fit
    and for each matrix, each set of
    heads, ... that models have        two constants, corrected by         simcore.devices.interpolation
                                       measurements near an op's shape
    intervals                          from additional drawn shapes, by kind

A file keeps the measurements until the profile is complete, so that an interrupted calibration continues on
the same card with the same software.
"""

import csv
import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from simcore.compiled import PACKAGE
from simcore.devices.fit import Fit, fit_two
from simcore.devices.fitted import Birth, FittedProfile, LimitedPower, SharedUse
from simcore.devices.interpolation import Role, correction
from simcore.devices.making import (
    ALIKE,
    COLUMNS,
    VERBS,
    Point,
    as_read,
    cells,
    check_target,
    fits,
    in_format,
    is_among,
    measured_of,
    shape_text,
    whole_kind,
    write_extended,
    write_renewed,
    write_whole,
)
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError, validated
from simcore.kernels.kernel import Kernel
from simcore.kernels.linear_attention.api import default_device
from simcore.ops.op import Op, Roofline
from simcore.studies.common import Progress
from simcore.validate.benchmarks.timing import Card, birth, measure_card, one_line
from simcore.validate.calibration import cuda_host as card_host
from simcore.validate.calibration import cuda_nodes as card_nodes
from simcore.validate.calibration import cuda_power as card_power
from simcore.validate.calibration import cuda_service as card_service
from simcore.validate.calibration import cuda_sharing as card_sharing
from simcore.validate.calibration import cuda_steps as card_steps
from simcore.validate.calibration import power_fit
from simcore.validate.calibration.cuda_grid import Family, drawn, families, grid
from simcore.validate.calibration.records import (
    NAME,
    Kept,
    Key,
    birth_of,
    key_of,
    measured_on,
    profile_path,
    what_is_odd,
)
from simcore.validate.program import named, partial_of
from simcore.validate.timing import cuda_times as card_measure
from simcore.validate.timing.allocator import take_memory_in_segments
from simcore.validate.timing.card_kernels import ON_CARDS
from simcore.validate.timing.compile_ahead import as_compiled

CACHE = "memory; what is small, and activations as far as they have room, in the L2 cache"
# Refinement: a price between two shapes may be off by this (a logarithm) before more shapes are measured;
# most halvings; seconds for each kind.
REFINED_UNTIL, MOST_HALVINGS, REFINING_S = 0.03, 4, 10.0
# Shapes of a kind that only check prices, drawn by their own seed.
CHECKS, QUICK_CHECKS, CHECK_SEED = 40, 12, 20_250
NOTED_FAILURES = 5
# Seconds, at most this share of all, reserved for costs of verbs, kernels in graphs, contention and limited
# power.
ENDING_S, ENDING_SHARE = 135.0, 0.3
# Share of the measuring time after which kernels are compiled at the time of their measurement.
COMPILING_SHARE = 0.8
MOST_FAILURES = 20
# The code that determines an op's time here, and its floor.
SOURCES = (PACKAGE, PACKAGE / "kernels", PACKAGE / "validate")


def calibrate_card(
    target: Path | None,
    quick: bool,
    progress: Progress,
    *,
    table: Mapping[str, Kernel] = ON_CARDS,
    within_s: float,
    kinds: str | None = None,
    missing: bool = False,
) -> tuple[Path, FittedProfile]:
    """Measures, fits and writes the profile folder `target` (default: the device's own), completely or not at
    all; returns both. Shapes that are not reached `within_s` are left out and noted. `kinds`: names of kinds
    of op with commas between, some of them in one number format ("matmul:fp8"), or VERBS, which alone are
    measured anew: all else of the profile stays. `missing`: only shapes that the profile lacks are measured,
    and stand beside what it has. Raises InputError if there is no CUDA card, if the catalogue lacks it, if
    there is no profile to renew kinds of, or if it lacks nothing."""
    begun_s = time.perf_counter()
    device = this_card()
    few = _few_of(kinds, table, missing=missing)
    target = target or profile_path(device)
    check_target(target, device)
    has = _has_measured(target, device, few, quick=quick) if missing else frozenset()
    if few:
        table = {kind: table[kind] for kind in map(whole_kind, few) if kind != VERBS}
        load_profile(device, str(target / "profile.yaml"))
    progress("what the card reaches", 0, 1)
    memory = f"memory was taken {take_memory_in_segments()}"
    card = measure_card(lambda text: None)
    reached = card_measure.rates(card)
    torch.cuda.empty_cache()
    # A measurement of few kinds neither takes nor ends what an interrupted one of all has left.
    of_few = "-".join([*["missing"] * missing, *sorted(few if kinds else ())]).replace(":", "-")
    unfinished = partial_of(target.with_name(f"{target.name}-{of_few}") if few else target)
    measuring = Measuring(device, unfinished, table, card)
    measured_s = within_s - (0.0 if few else min(ENDING_S, ENDING_SHARE * within_s))
    left_out = measure_all(few or table, quick, measuring, progress, begun_s + measured_s, has=has)
    points, failed = list(measuring.points.values()), list(measuring.failed.values())
    if not points and few != [VERBS]:
        if not measuring.goes_on:
            unfinished.unlink(missing_ok=True)
        raise InputError(f"--on cuda: nothing could be measured; {failed[0] if failed else 'no time'}")
    born = _birth(card, points, reached)
    if few:
        found = {point.op.kind for point in points}
        later = profile_of(device, points, born, {}, failed, left_out, quick, found) if points else None
        if missing:
            assert later is not None
            later = replace(later, notes=(*later.notes, *["measured with --quick"] * quick))
            profile = write_extended(target, later, map(cells, points))
        elif later is not None:
            ops = [name for name in few if name != VERBS]
            profile = _renew(target, ops, later, points, ["measured with --quick"] * quick)
        if VERBS in few:
            unfinished.unlink(missing_ok=True)
            profile = _renew_verbs(target, measuring.floor, card, reached, progress)
        unfinished.unlink(missing_ok=True)
        return target, profile
    costs, verb_notes = _overheads(
        measuring.floor, card, progress, graphs=table.keys() >= card_nodes.KINDS | card_steps.KINDS
    )
    profile = profile_of(device, points, born, costs, failed, left_out, quick)
    said = (*profile.notes, memory, *verb_notes)
    if (before := _before(target, device)) is not None:
        profile = replace(profile, contention=before.contention, power=before.power)
    profile = replace(profile, notes=said)
    # The profile of the measurements so far is safe even if the rest fails.
    write_whole(profile, points, target)
    unfinished.unlink(missing_ok=True)
    for with_law in _with_laws(profile, table, quick, progress, begun_s + within_s):
        profile = with_law
        write_whole(profile, points, target)
    return target, profile


def _with_laws(
    profile: FittedProfile, kinds: Collection[str], quick: bool, progress: Progress, end_s: float
) -> Iterator[FittedProfile]:
    """Yields the profile with the constants of one law after the other, as far as `kinds` suffice."""
    if _shares(kinds):
        ends_s = end_s - card_sharing.FITTING_S - card_power.lasts_s(quick=quick) * ("matmul" in kinds)
        shared, notes = _shared_use(profile, quick, progress, ends_s)
        profile = replace(profile, notes=(*profile.notes, *notes), contention=shared)
        yield profile
    if "matmul" in kinds and time.perf_counter() + card_power.lasts_s(quick=quick) < end_s:
        power, notes = _limited_power(profile, quick, progress)
        yield replace(profile, notes=(*profile.notes, *notes), power=power)


def _renew_verbs(
    target: Path, floor: Roofline, card: Card, reached: dict[str, float], progress: Progress
) -> FittedProfile:
    """Measures the costs of verbs anew for the profile folder `target`; returns the profile."""
    costs, notes = _overheads(floor, card, progress, graphs=True)
    if not costs:
        raise InputError(f"--on cuda: {notes[0]}")
    return _renew(
        target, [VERBS], _of_costs(this_card(), target, _birth(card, (), reached), costs), (), notes
    )


def _of_costs(device: str, target: Path, born: Birth, costs: Mapping[str, float]) -> FittedProfile:
    """Returns the profile in `target` with costs of verbs alone measured anew."""
    before = load_profile(device, str(target / "profile.yaml"))
    assert isinstance(before, FittedProfile)
    return replace(before, overheads=dict(costs), birth=born, notes=())


def _renew(
    target: Path, few: Sequence[str], later: FittedProfile, points: Sequence[Point], notes: Sequence[str]
) -> FittedProfile:
    """Renews what was measured of a few kinds of op in the profile folder `target`; returns the profile."""
    missing = [kind for kind in few if kind not in measured_of(later, few)]
    stays = [f"{kind}: stays, as none was measured" for kind in missing]
    later = replace(later, notes=(*later.notes, *notes, *stays))
    return write_renewed(target, later, map(cells, points), few)


def _overheads(
    floor: Roofline, card: Card, progress: Progress, *, graphs: bool
) -> tuple[dict[str, float], list[str]]:
    """Measures the costs of verbs and, if `graphs`, of kernels in graphs; returns also notes. It runs last:
    other processes have ended by then, and the host's pace is well known."""
    costs, notes = dict[str, float](), list[str]()
    progress("the host, and kernels in graphs", 0, 1)
    try:
        costs |= card_host.host_costs()
        if graphs:
            found = card_nodes.node_costs_here(floor, card)
            costs["in_graph_s"] = card_nodes.node_cost(found)
            notes.append(card_nodes.profile_note(found))
            found = card_steps.step_costs_here(floor, card)
            costs["in_step_s"] = card_nodes.node_cost(found)
            notes.append(card_steps.profile_note(found))
            of_service, note = card_service.service_costs_here(costs)
            costs |= of_service
            notes.append(note)
    except card_measure.FAILURES as error:
        later = {"launch_s": "what verbs cost", "in_graph_s": "in_graph_s", "in_step_s": "in_step_s"}
        missing = next((said for name, said in later.items() if name not in costs), "what services cost")
        notes.append(f"{missing} could not be measured: {one_line(error)}")
        card_measure.go_on()
    return costs, notes


def _shared_use(
    profile: FittedProfile, quick: bool, progress: Progress, end_s: float
) -> tuple[SharedUse | None, list[str]]:
    """Measures how graphs share the card; returns also notes. On failure keeps the earlier constants."""
    cases, done = len(card_sharing.cases(quick=quick)), itertools.count(1)
    progress("graphs beside each other: case", 0, cases)

    def say(text: str) -> None:
        progress(f"{text}: case", next(done), cases)

    try:
        return card_sharing.shared_use_here(profile, quick=quick, end_s=end_s, say=say)
    except card_measure.FAILURES as error:
        kept = " (they are those of the profile before)" if profile.contention else ""
        note = f"constants of contention could not be measured{kept}: {one_line(error)}"
        card_measure.go_on()
        return profile.contention, [note]


def _limited_power(
    profile: FittedProfile, quick: bool, progress: Progress
) -> tuple[LimitedPower | None, list[str]]:
    """Measures how much longer arithmetic takes under load; returns also notes. On failure keeps the earlier
    constants."""
    cases, done = card_power.cases(quick=quick), itertools.count()

    def say(text: str) -> None:
        progress(f"products under load, {text}: case", next(done), cases)

    try:
        price = pricer(load_device(profile.device), profile=profile)
        rows, date = (
            card_power.rows_here(price, quick=quick, say=say),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return power_fit.limited_power(rows, torch.cuda.get_device_name(0), date), []
    except power_fit.UnlimitedError as error:
        return None, [str(error)]
    except card_measure.FAILURES as error:
        kept = " (they are those of the profile before)" if profile.power else ""
        card_measure.go_on()
        return profile.power, [f"constants of limited power could not be measured{kept}: {one_line(error)}"]


def _before(target: Path, device: str) -> FittedProfile | None:
    """Returns the profile that `target` held before."""
    try:
        before = load_profile(device, str(target / "profile.yaml"))
    except InputError:
        return None
    return before if isinstance(before, FittedProfile) else None


def this_card() -> str:
    """Returns the catalogue's name of this CUDA card. Raises InputError if there is none."""
    if not torch.cuda.is_available():
        raise InputError("--on cuda: torch finds no CUDA device here")
    try:
        return default_device(torch.device("cuda"))
    except ValueError as error:
        raise InputError(f"--on cuda: {error}") from None


def profile_of(
    device: str,
    points: Sequence[Point],
    born: Birth,
    costs: Mapping[str, float],
    failed: Sequence[str] = (),
    left_out: int = 0,
    quick: bool = False,
    kinds: Collection[str] = ON_CARDS,
) -> FittedProfile:
    """Returns the profile of measured points. `failed`: ops that could not be measured; `left_out`: the
    number of shapes for which no time was left; `kinds`: of op that were to be measured."""
    return FittedProfile(
        name=NAME,
        title=f"{born.processor}, kernels of this project and torch's, in captured graphs",
        source=measured_on(born.processor, born.date, "cuda", quick, len(points)),
        device=device,
        granularity="measured",
        # The time of a captured graph already includes its cost around a kernel.
        fits=fits(points, {}, 0.0, CACHE, own_line),
        overheads=dict(costs),
        birth=born,
        notes=tuple(_notes(points, failed, left_out, born.rates, kinds)),
        points=tuple(as_read(point) for point in points),
    )


def own_line(op: Op) -> Iterator[str]:
    """Yields the dimensions that models choose, if any; ops that share them get their own line."""
    # Every line's condition already includes ALIKE.
    if names := [name for name in _own_lines().get(op.kind, ()) if name not in ALIKE]:
        yield ";".join(f"{name}={op[name]}" for name in names)


def _own_lines() -> Mapping[str, Sequence[str]]:
    return {
        family.kind: tuple(family.choices[0]) if family.lines is None else family.lines
        for family in families()
    }


# -- measuring ---------------------------------------------------------------------------------------------


class Measuring:
    """Measurements, written to a file as they come; the file's measurements of an interrupted calibration are
    reused. `failed`: one line for each op that could not be measured; `floor`: of the device."""

    def __init__(self, device: str, path: Path, table: Mapping[str, Kernel], card: Card) -> None:
        self.points: dict[Key, Point] = {}
        self.failed: dict[Key, str] = {}
        self.floor: Roofline = roofline(load_device(device))
        self._path, self._table, self._card = path, table, card
        self._left = _read_partial(path, card)
        if not self._left:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_identity(card)) + "\n", encoding="utf-8")

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted calibration left measurements."""
        return bool(self._left)

    @property
    def nothing_works(self) -> bool:
        """Whether many shapes of several kinds failed and none succeeded: the shapes are not the cause."""
        kinds = {kind for kind, _, _ in self.failed}
        return not self.points and len(kinds) > 1 and len(self.failed) >= MOST_FAILURES

    def known(self, op: Op) -> Point | None:
        """Returns the measured point of an op."""
        return self.points.get(key_of(op))

    def is_left(self, op: Op) -> bool:
        """Whether an interrupted calibration has already measured an op."""
        return key_of(op) in self._left

    def one(self, op: Op, role: Role = "fit") -> Point | None:
        """Returns the point of an op, measured if it is new; None if that failed."""
        key = key_of(op)
        if key in self.points or key in self.failed:
            return self.points.get(key)
        if key in self._left:
            self.points[key] = self._left[key].point(op, self.floor)
            return self.points[key]
        try:
            point = card_measure.measured(self._table[op.kind], op, self.floor, self._card)
        except card_measure.FAILURES as error:
            self.failed[key] = f"{op.kind} {shape_text(op)}: {one_line(error)}"
            card_measure.go_on()
            return None
        self.points[key] = replace(point, role=role)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(cells(self.points[key]))
        return self.points[key]


def measure_all(
    kinds: Collection[str],
    quick: bool,
    measuring: Measuring,
    progress: Progress,
    end_s: float,
    *,
    has: Collection[Key] = (),
) -> int:
    """Measures, in this order: ops of graphs that share the card and are not in the grid, so that later they
    need no compilation; the grid and the check shapes, kind by kind, as they are compiled; shapes between
    points of the grid if necessary. Of a profile that `has` some shapes only others of the grid and the
    check shapes. Returns the number of shapes not reached before `end_s`."""
    shapes, begun_s = shapes_of(kinds, quick), time.perf_counter()
    first = [] if has else shared_shapes(kinds, quick, shapes)
    shapes = [(op, role) for op, role in shapes if key_of(op) not in has]
    until_s = begun_s + COMPILING_SHARE * (end_s - begun_s)

    def to_compile(shape: tuple[Op, Role]) -> Op | None:
        return None if measuring.is_left(shape[0]) else shape[0]

    turns = [*first, *in_turn(shapes, lambda op: card_measure.loads(op, measuring.floor))]
    for done, (op, role) in enumerate(as_compiled(turns, to_compile, until_s)):
        now_s = time.perf_counter()
        if now_s > end_s or measuring.nothing_works:
            return len(turns) - done
        left_s = min((now_s - begun_s) / max(1, done) * (len(turns) - done), end_s - now_s)
        progress(f"{op.kind}, about {left_s:.0f} s left: shape", done, len(turns))
        measuring.one(op, role)
    refined = [] if quick or has else [family for family in families() if _is_refined(family, kinds)]
    for i, family in enumerate(refined):
        progress(f"{family.kind}, between what was measured: kind", i, len(refined))
        now_s = time.perf_counter()
        # Time that one kind leaves is for the later kinds.
        _refine(family, measuring, now_s + min(REFINING_S, (end_s - now_s) / (len(refined) - i)))
    return 0


def in_turn(shapes: Iterable[tuple[Op, Role]], loads: Callable[[Op], bool]) -> Iterator[tuple[Op, Role]]:
    """Yields shapes kind by kind, the largest kind last, then those that load the card, each group shuffled.
    So shapes not reached lie between measured ones, and the remaining time can be estimated. Check shapes
    form their own group, measured at another time, because drift over time is also an error of prices."""
    groups: dict[tuple[bool, str], list[tuple[Op, Role]]] = {}
    for op, role in shapes:
        groups.setdefault((loads(op), op.kind if role == "fit" else role), []).append((op, role))
    for _, group in sorted(groups.items(), key=lambda each: (each[0][0], len(each[1]), each[0][1])):
        random.Random(CHECK_SEED).shuffle(group)
        yield from group


def shapes_of(kinds: Collection[str], quick: bool) -> list[tuple[Op, Role]]:
    """Returns the grid and the check shapes, in number formats that the card supports, of kinds of op whole
    or in one format."""
    whole = {whole_kind(name) for name in kinds}
    shapes: list[tuple[Op, Role]] = [(op, "fit") for op in grid(whole, quick=quick)]
    shapes += [(op, "check") for op in drawn(whole, QUICK_CHECKS if quick else CHECKS, CHECK_SEED)]
    meant = [(op, role) for op, role in shapes if is_among(kinds, op.kind, op.dtype)]
    return [(op, role) for op, role in meant if card_measure.has_format(op)]


def _few_of(kinds: str | None, table: Collection[str], *, missing: bool = False) -> list[str]:
    """Returns what is to be measured anew; nothing where all is. Raises InputError for an unknown name."""
    if kinds is None:
        return [*table] if missing else []
    verbs = () if missing else (VERBS,)
    return named("--kinds", kinds, (*table, *verbs, *_in_formats(table)), needed=True)


def _has_measured(target: Path, device: str, few: Collection[str], *, quick: bool) -> frozenset[Key]:
    """Returns the shapes of the measured profile in a folder. Raises InputError if there is none, or it lacks
    none of these kinds' shapes."""
    before = _before(target, device)
    if before is None:
        raise InputError(f"--missing: {target} holds no measured profile; calibrate --on cuda makes one")
    has = frozenset((point.kind, point.shape, point.dtype) for point in before.points)
    if all(key_of(op) in has for op, _ in shapes_of(few, quick)):
        raise InputError(f"--missing: {target} has all shapes of these kinds")
    return has


def _in_formats(kinds: Collection[str]) -> Iterator[str]:
    """Yields the names in one format each of kinds of op that this card is measured in several of."""
    formats: dict[str, set[str]] = {}
    for op in grid({*kinds}):
        if card_measure.has_format(op):
            formats.setdefault(op.kind, set()).add(op.dtype)
    for kind, each in formats.items():
        if len(each) > 1:
            yield from (in_format(kind, dtype) for dtype in sorted(each))


def _shares(kinds: Collection[str]) -> bool:
    """Whether these kinds of op suffice for graphs that share the card."""
    return {op.kind for op in card_sharing.ops(quick=True)} <= {*kinds}


def shared_shapes(
    kinds: Collection[str], quick: bool, shapes: Iterable[tuple[Op, Role]]
) -> list[tuple[Op, Role]]:
    """Returns the ops of graphs that share the card, except those among the shapes."""
    known = {key_of(op) for op, _ in shapes}
    each = card_sharing.ops(quick=quick) if _shares(kinds) else []
    return [(op, "fit") for op in each if key_of(op) not in known]


def _is_refined(family: Family, kinds: Collection[str]) -> bool:
    """Whether shapes of a family are measured between those of its grid."""
    some = next(iter(family.grid()), None)
    return bool(family.refined) and some is not None and is_among(kinds, some.kind, some.dtype)


At = tuple[int, Point]
# Makes the op for a value of one dimension, with all others fixed.
Make = Callable[[int], Op | None]


def _refine(family: Family, measuring: Measuring, end_s: float) -> None:
    """Measures midway between two shapes that differ in one dimension; if interpolation misses that time,
    also midway in both halves."""
    for axis in family.refined:
        lines = [*_lines_along(family, axis, measuring)]
        # In random order, because time may not suffice for all.
        random.Random(CHECK_SEED).shuffle(lines)
        for points, make in lines:
            constants = fit_two([(p.launches, p.floor_s, p.median_s) for _, p in points])
            pairs = [(*pair, 0) for pair in pairwise(points)]
            while pairs and time.perf_counter() < end_s:
                low, high, depth = pairs.pop()
                middle = _between(make, low[0], high[0], measuring)
                if middle is None or depth == MOST_HALVINGS:
                    continue
                if abs(_off(constants, low, high, middle)) > REFINED_UNTIL:
                    pairs += [(low, middle, depth + 1), (middle, high, depth + 1)]


def _between(make: Make, low: int, high: int, measuring: Measuring) -> At | None:
    """Returns the point midway between two values, or next to it. A check shape does not count, because no
    price is fitted to it."""
    middle = round(math.sqrt(low * high))
    for value in (middle, middle + 1, middle - 1):
        op = make(value) if low < value < high else None
        point = measuring.one(op) if op else None
        if point is not None and point.role == "fit":
            return value, point
    return None


def _lines_along(family: Family, axis: str, measuring: Measuring) -> Iterator[tuple[list[At], Make]]:
    """Yields measured points along one dimension, with all others fixed, if there are several."""
    found: dict[tuple[object, ...], tuple[list[At], Make]] = {}
    for choice, values in family.combinations():
        op = family.at(choice, values)
        point = measuring.known(op) if op else None
        if point is not None:
            fixed = {name: value for name, value in values.items() if name != axis}
            make: Make = partial(_at, family, choice, fixed, axis)
            found.setdefault((*choice.items(), *fixed.items()), ([], make))[0].append((values[axis], point))
    for points, make in found.values():
        if len(points) > 1:
            yield sorted(points, key=lambda at: at[0]), make


def _at(
    family: Family, choice: Mapping[str, int], fixed: Mapping[str, int], axis: str, value: int
) -> Op | None:
    return family.at(choice, {**fixed, axis: value})


def _off(constants: Fit, low: At, high: At, middle: At) -> float:
    """Returns log(measured / interpolated by `simcore.devices.interpolation` between two points); 0 if they
    do not determine it."""
    near = correction(constants, [as_read(low[1]), as_read(high[1])])
    return near.error(constants, as_read(middle[1])) or 0.0


def _identity(card: Card) -> dict[str, str]:
    """Returns the properties that a calibration needs unchanged to continue: card, software, this code."""
    born = asdict(birth(card))
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    code = hashlib.sha256()
    # Tables beside kernels choose between them.
    tables = (PACKAGE / "kernels").rglob("*.csv")
    for path in sorted({*tables, *(path for folder in SOURCES for path in folder.rglob("*.py"))}):
        code.update(path.read_bytes())
    own = {name: str(born[name]) for name in ("device", "driver", "torch", "triton")}
    return {**own, "uuid": uuid, "code": code.hexdigest()}


def _read_partial(path: Path, card: Card) -> dict[Key, Kept]:
    """Reads the lines of an interrupted calibration of the same card; none if the file is unreadable."""
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if json.loads(first) != _identity(card):
            return {}
    except (OSError, ValueError):
        return {}
    found, whole = dict[Key, Kept](), [first]
    # The last line may be cut off.
    for line in (line for line in lines if line.endswith("\n")):
        kept = _kept(next(csv.reader([line])))
        if kept is not None:
            found[kept.key] = kept
            whole.append(line)
    path.write_text("".join(whole), encoding="utf-8", newline="")
    return found


def _kept(line: Sequence[str]) -> Kept | None:
    """Parses a line of the file; None if it is invalid."""
    row = dict(zip(COLUMNS, line, strict=False))
    names = {field.name for field in fields(Kept)}
    try:
        return validated(Kept, {name: cell for name, cell in row.items() if name in names and cell}, "")
    except InputError:
        return None


# -- birth record --------------------------------------------------------------------------------------------


def _birth(card: Card, points: Sequence[Point], reached: Mapping[str, float]) -> Birth:
    born = birth(card)
    versions = {"torch": born.torch, "triton": born.triton, "driver": born.driver}
    versions |= {"sm_clock_mhz": born.sm_clock_mhz, "memory_clock_mhz": born.memory_clock_mhz}
    known = {name: text for name, text in versions.items() if text}
    return birth_of(points, born.device, known, reached, threads=1)


def _notes(
    points: Sequence[Point],
    failed: Sequence[str],
    left_out: int,
    rates: Mapping[str, float],
    kinds: Collection[str],
) -> Iterator[str]:
    """Yields notes for the reader of the profile."""
    yield f"operands come from {CACHE}; the column cache says which"
    for name in ("bf16", "fp8"):
        if under_load := rates.get(card_measure.loaded(name)):
            slower = rates[f"{name}_flops_per_s"] / under_load
            yield f"times are of a card at rest; under load {name} products take {slower:.2f} times as long"
    yield from what_is_odd(points, kinds)
    if left_out:
        yield f"{left_out} shapes were left out: there was no time for them"
    if failed:
        yield f"{len(failed)} shapes could not be measured"
        yield from failed[:NOTED_FAILURES]
