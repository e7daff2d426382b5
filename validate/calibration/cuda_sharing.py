"""Measures in a calibration how graphs share a card: a part of `simcore.validate.accuracy.contention`.

    streams   1 to 32 decode steps of one model at a time
    beside    one tile after the other beside token steps

The law's two constants are fitted to every second case; the others judge them (`contention_fit`). How many
kernels of a step get in between two of a prompt is counted in a service (`cuda_prompts`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from simcore.devices.fitted import FittedProfile, SharedUse
from simcore.devices.spec import load_device
from simcore.ops.op import Op
from simcore.validate.accuracy.contention_cases import BESIDE, OWN, SHARED, Case, Row, jobs, measured
from simcore.validate.benchmarks.timing import one_line
from simcore.validate.calibration.contention_fit import (
    LEAST_S,
    MOST_PCT,
    cases_of,
    fit,
    judged,
    medians,
    models_of,
    most_reach,
    role_is,
    shared_use,
    simulated_on,
)
from simcore.validate.calibration.cuda_prompts import kernels_between_here
from simcore.validate.machines.cuda.runs import this_machine
from simcore.validate.timing.cuda_times import FAILURES

LAYERS, CONTEXT, METHOD = 4, 1024, "flash_fft"
# Every second one is for the fit: of the quick ones the number that fills the card; the other judges.
STREAMS, QUICK_STREAMS = (1, 2, 4, 8, 16, 32), (1, 16, 2)
# Longer tiles delay a step, and shorter ones wait for its programs; the law models neither.
SIDES, QUICK_SIDES = (256, 512, 1024), (512, 256)
REPEATS = 2
# Most simulations of all cases in a search for constants; seconds of both searches on a slow host.
TRIES, FITTING_S = 30, 14.0


def cases(*, quick: bool) -> list[Case]:
    """Returns the cases."""
    streams, sides = (QUICK_STREAMS, QUICK_SIDES) if quick else (STREAMS, SIDES)
    return [case for case in cases_of(streams, [CONTEXT], sides, [METHOD], 1) if case.kind != OWN]


def ops(*, quick: bool) -> list[Op]:
    """Returns the launched ops of the cases, each once, with their sizes at launch."""
    models = models_of(1)
    each = [replace(case, steps=1, tiles=1, count=1) for case in cases(quick=quick)]
    found = [op.at(dict(job.sizes)) for case in each for job in jobs(case, models) for op in job.graph.ops]
    return list({(op.kind, op.shape, op.dtype): op.without_place for op in found}.values())


def shared_use_here(
    profile: FittedProfile, *, quick: bool, end_s: float, say: Callable[[str], None]
) -> tuple[SharedUse, list[str]]:
    """Returns the constants of this card, from the prices and verbs of the new profile, and notes. No case
    begins after `end_s` (time.perf_counter). Raises ValueError if measurements do not determine constants."""
    rows, notes = rows_here(profile, cases(quick=quick), end_s, say)
    try:
        found = fitted(rows, profile)
    except ValueError as error:
        raise ValueError("; ".join([str(error), *notes])) from None
    between, note = _kernels_between(profile.contention, quick=quick)
    found, notes = replace(found, kernels_between=between), [*notes, note]
    if found.bandwidth_share == most_reach(load_device(profile.device), profile):
        notes = [
            *notes,
            "contention: bandwidth_share is what reading alone reaches, more than which none can be",
        ]
    return found, notes


def _kernels_between(before: SharedUse | None, *, quick: bool) -> tuple[float, str]:
    """Returns the constant of prompts beside steps and a note about it: the one before where there is no time
    or no room for the model that serves, 1 if there is none."""
    kept = before.kernels_between if before else 1.0
    if quick:
        return kept, f"kernels_between: {kept:.3g}, not measured by a quick calibration"
    try:
        return kernels_between_here()
    except FAILURES as error:
        return kept, f"kernels_between: {kept:.3g}; it could not be measured: {one_line(error)}"


def rows_here(
    profile: FittedProfile, asked: Sequence[Case], end_s: float, say: Callable[[str], None]
) -> tuple[list[Row], list[str]]:
    """Returns the rows of complete cases, and notes about the others."""
    start = simulated_on(load_device(profile.device), profile)
    rows, why = list[Row](), "there was no time"
    real = this_machine(REPEATS)
    try:
        there = replace(start, start=real.start)
        for row in measured(
            asked, models_of(LAYERS), there, REPEATS, say, lambda: time.perf_counter() > end_s
        ):
            rows.append(row)
    except FAILURES as error:
        why = one_line(error)
    finally:
        real.release()
    left_out = len(asked) - len({(row.case.kind, row.case.count, row.case.side) for row in rows})
    return rows, [f"{left_out} of {len(asked)} cases of contention were left out: {why}"] * (left_out > 0)


def fitted(rows: Sequence[Row], profile: FittedProfile) -> SharedUse:
    """Returns the constants from rows. Raises ValueError if a kind has no rows to fit to or to judge by, or
    if the constants are unusable."""
    spec, models = load_device(profile.device), models_of(LAYERS)
    here, chosen = simulated_on(spec, profile), role_is("fit", rows)
    judging = role_is("judged", rows)
    for kind in (SHARED, BESIDE):
        for some, what in ((chosen, "fit to"), (judging, "judge by")):
            if not any(row.case.kind == kind for row in some):
                raise ValueError(f"no case of {kind} to {what} was measured")
    constants = fit(chosen, models, here, spec.hbm_efficiency.value, most_reach(spec, profile), TRIES)
    found = judged(rows, models, here, constants, True)
    worst_pct = max(medians(found).values())
    if worst_pct >= MOST_PCT or constants.tail_overlap_s <= LEAST_S or constants.bandwidth_share >= 1.0:
        raise ValueError(f"the law says nothing of them: {constants.text}, {worst_pct:.1f} % off")
    born = profile.birth.processor if profile.birth else profile.title
    return shared_use(constants, found, born, datetime.now(UTC).isoformat(timespec="seconds"))
