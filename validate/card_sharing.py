"""How graphs share a card, as a calibration measures it: a part of what `validate.contention` does.

    streams   1 to 32 decode steps of one model at a time
    beside    one tile after the other beside token steps

The law's two constants are fitted to every second case; the others judge them (`validate.contention_fit`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from devices.fitted import FittedProfile, SharedUse
from devices.spec import load_device
from validate.card_real import this_machine
from validate.contention_cases import OWN, Case, Row, jobs, measured
from validate.contention_fit import (
    cases_of,
    fit,
    judged,
    models_of,
    role_is,
    shared_use,
    simulated_on,
)

LAYERS, CONTEXT, METHOD = 4, 1024, "flash_fft"
STREAMS, QUICK_STREAMS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
# Longer tiles keep a step waiting, shorter ones wait for its programs, which the law does not know.
SIDES, QUICK_SIDES = (256, 512, 1024), (256, 512)
REPEATS = 2
# What fitting takes on a slow host.
FITTING_S = 15.0


def cases(*, quick: bool) -> list[Case]:
    """What runs together."""
    streams, sides = (QUICK_STREAMS, QUICK_SIDES) if quick else (STREAMS, SIDES)
    return [case for case in cases_of(streams, [CONTEXT], sides, [METHOD], 1) if case.kind != OWN]


def kinds() -> frozenset[str]:
    """Of the ops in them."""
    models = models_of(1)
    each = [replace(case, steps=1, tiles=1, count=1) for case in cases(quick=True)]
    return frozenset(op.kind for case in each for job in jobs(case, models) for op in job.graph.ops)


def shared_use_here(
    profile: FittedProfile, *, quick: bool, end_s: float, say: Callable[[str], None]
) -> SharedUse:
    """The constants of this card, by the prices and verbs of the profile that was just measured. Cases whose
    turn does not come before `end_s` (time.perf_counter) are left out. Raises what the card raises, and
    ValueError where none is left to fit to or to judge by."""
    spec, models = load_device(profile.device), models_of(LAYERS)
    here = simulated_on(spec, profile)
    real = this_machine(REPEATS)
    rows: list[Row] = []
    try:
        for row in measured(cases(quick=quick), models, replace(here, start=real.start), REPEATS, say):
            rows.append(row)
            if time.perf_counter() > end_s:
                break
    finally:
        real.release()
    return fitted(rows, profile)


def fitted(rows: Sequence[Row], profile: FittedProfile) -> SharedUse:
    """The constants that rows give. Raises ValueError where none is left to fit to or to judge by."""
    spec, models = load_device(profile.device), models_of(LAYERS)
    here, chosen = simulated_on(spec, profile), role_is("fit", rows)
    if not chosen:
        raise ValueError("there was no time for a case to fit to")
    constants = fit(chosen, models, here, spec.hbm_efficiency.value)
    born = profile.birth.processor if profile.birth else profile.title
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return shared_use(constants, judged(rows, models, here, constants, True), born, date)
