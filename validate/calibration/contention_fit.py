"""The two constants by which graphs share a device (`sim.contention`), fitted to rows that were measured.

    tail_overlap_s, bandwidth_share = the least sum of |log(measured / predicted)| over every second number of
                                      streams or side of each kind; the others judge them
    bandwidth_share <= what reading alone reaches, as the profile's birth record has it
    error           = larger / smaller of measured and predicted - 1

What runs together costs on the simulated machine what it was measured to cost alone; so the error is that of
the law. By squares one tile that it is 30 to 35 % off at, whatever its constants, took all streams 5 % off
with it, and tiles in the median from 4.3 to 2.8 %; the criterion was chosen knowing those rows. `reuse_s` is
0: graphs take as long with weights in common as with their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from scipy.optimize import minimize

from simcore.assembly import MODELS
from simcore.devices.fitted import FittedProfile, SharedUse
from simcore.devices.price import pricer, roofline
from simcore.devices.spec import DeviceSpec
from simcore.input.files import InputError
from simcore.models.decoder import Dtypes
from simcore.models.decoder_config import load_config
from simcore.models.long_convolution import LongConvolution
from simcore.sim.contention import Rates, shared_reads
from simcore.validate.accuracy.contention_cases import (
    BESIDE,
    OWN,
    SHARED,
    Case,
    Device,
    Models,
    Row,
    predicted,
    seconds_of,
)
from simcore.validate.ladder.rungs import off_pct

# Where a law is further off in the median, it is none.
MOST_PCT = 8.0
MODEL, DTYPES = "llama-3.1-8b", Dtypes("bf16", "bf16", "bf16")
# Flash Inference's synthetic setting.
CONVOLUTION = LongConvolution(layers=18, channels=256, tokens=4, dtype="fp32")
# Where a search for constants begins, how often each may simulate all cases.
STARTS_S, MOST_TRIES = (5e-7, 5e-6), 50
LEAST_S = 1e-9
# In the birth record of a card's profile.
READS = "read_bytes_per_s"


def models_of(layers: int) -> Models:
    """What the cases are of: so many layers of the decoder, and the long convolution."""
    return Models(replace(load_config(MODELS / f"{MODEL}.json"), layers=layers), DTYPES, CONVOLUTION)


def simulated_on(spec: DeviceSpec, profile: FittedProfile | None) -> Device:
    """The simulated machine by a profile's prices, by which a graph's time is shared out, and verbs."""
    overheads = replace(spec.overheads, **(profile.overheads if profile else {}))
    return Device(pricer(spec, profile=profile), roofline(spec), overheads)


@dataclass(frozen=True, slots=True)
class Constants:
    """Those of `simcore.sim.contention.shared_reads`."""

    tail_overlap_s: float
    reuse_s: float
    bandwidth_share: float

    def rates(self, case: Case) -> Rates:
        """The law. Only instances of one model find in the cache what others have read."""
        reuse_s = self.reuse_s if case.kind == SHARED else 0.0
        return shared_reads(reuse_s, self.bandwidth_share, self.tail_overlap_s)

    @property
    def text(self) -> str:
        """For people."""
        tail, share = (
            f"tail_overlap_s {self.tail_overlap_s:.3g}",
            f"bandwidth_share {self.bandwidth_share:.3f}",
        )
        return f"{tail}, reuse_s {self.reuse_s:.3g}, {share}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with what the simulated machine takes. `role`: "alone" where nothing ran beside, "fit" where
    constants were fitted to it, "measured" before anything is predicted, else "judged"."""

    row: Row
    role: str
    predicted_s: float

    @property
    def error_pct(self) -> float:
        """By how much the larger of measured and predicted exceeds the smaller."""
        return off_pct(self.predicted_s, self.row.together_s)


def cases_of(
    streams: Sequence[int], contexts: Sequence[int], sides: Sequence[int], methods: Sequence[str], batch: int
) -> list[Case]:
    """All cases, kind by kind."""
    found = [
        Case(kind, batch, count=count, context=context)
        for kind in (SHARED, OWN)
        for context in contexts
        for count in streams
        if count > 1 or kind == SHARED
    ]
    return found + [Case(BESIDE, batch, side=side, method=each) for side in sides for each in methods]


def together_s(rows: Sequence[Row], models: Models, device: Device, law: Constants) -> list[float]:
    """What the simulated machine takes for each row; rows of one case are of one run."""
    traces: dict[tuple[Case, tuple[float, ...]], Any] = {}
    alone: dict[Case, dict[str, float]] = {}
    for row in rows:
        alone.setdefault(row.case, {})[row.stream] = row.alone_s
    found = []
    for row in rows:
        costs = alone[row.case]
        key = row.case, tuple(costs.values())
        if key not in traces:
            traces[key] = predicted(row.case, costs, models, device, law.rates(row.case))
        found.append(seconds_of(traces[key], row.case, row.stream))
    return found


def roles(rows: Sequence[Row], fitting: bool) -> list[str]:
    """What each row is for: with `fitting`, every second case of a kind is fitted to. Tiles of one side are
    one case, however they are computed: they may take as long, so that one would not judge the other."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    found = []
    for row in rows:
        if row.case.kind != BESIDE and row.case.count == 1:
            found.append("alone")
            continue
        case = row.case.batch, row.case.count, row.case.context, row.case.side
        cases = seen.setdefault(row.case.kind, [])
        if case not in cases:
            cases.append(case)
        found.append("fit" if fitting and cases.index(case) % 2 == 0 else "judged")
    return found


def role_is(role: str, rows: Sequence[Row]) -> list[Row]:
    """The rows that are for this where constants are fitted."""
    return [row for row, found in zip(rows, roles(rows, True), strict=True) if found == role]


def most_reach(spec: DeviceSpec, profile: FittedProfile | None) -> float:
    """What share of the memory's bandwidth graphs reach together at most: as much as one that only reads."""
    birth = profile.birth if profile else None
    reads = (birth.rates if birth else {}).get(READS) or math.inf
    return min(1.0, reads / spec.hbm_bytes_per_s)


def fit(
    rows: Sequence[Row],
    models: Models,
    device: Device,
    bandwidth_share: float,
    most: float = 1.0,
    tries: int | None = None,
) -> Constants:
    """The constants with the least sum of |log(measured / predicted)|, of a bandwidth_share of `most` at
    most. A search begins at `bandwidth_share` and takes so many `tries` (MOST_TRIES, if left out). Raises
    InputError without rows."""
    if not rows:
        raise InputError("there is no case to fit constants of contention to; give more streams or sides")

    def constants(x: Sequence[float]) -> Constants:
        return Constants(max(LEAST_S, math.exp(min(0.0, x[0]))), 0.0, min(most, max(0.1, x[1])))

    def cost(x: Sequence[float]) -> float:
        found_s = together_s(rows, models, device, constants(x))
        return sum(abs(math.log(row.together_s / s)) for row, s in zip(rows, found_s, strict=True))

    search: Any = minimize
    best: Any = None
    bandwidth_share = min(bandwidth_share, most)
    for start_s in STARTS_S:
        first = [math.log(start_s), bandwidth_share]
        steps = [first, [first[0] + 1.0, bandwidth_share], [first[0], bandwidth_share - 0.1]]
        options = {"maxfev": tries or MOST_TRIES, "initial_simplex": steps}
        found: Any = search(cost, first, method="Nelder-Mead", options=options)
        best = found if best is None or found.fun < best.fun else best
    return constants([float(value) for value in best.x])


def judged(
    rows: Sequence[Row], models: Models, device: Device, constants: Constants, fitting: bool
) -> list[Judged]:
    """All rows with their roles and predictions."""
    seconds = together_s(rows, models, device, constants)
    return [Judged(*each) for each in zip(rows, roles(rows, fitting), seconds, strict=True)]


def medians(found: Sequence[Judged]) -> dict[str, float]:
    """The median error of what is judged, by kind, then of all."""
    by_kind: dict[str, list[float]] = {}
    for each in found:
        if each.role == "judged":
            by_kind.setdefault(each.row.case.kind, []).append(each.error_pct)
    errors = {kind: median(each) for kind, each in by_kind.items()}
    if by_kind:
        errors["all"] = median([error for each in by_kind.values() for error in each])
    return errors


def shared_use(constants: Constants, found: Sequence[Judged], processor: str, date: str) -> SharedUse:
    """What a profile has of it. Raises ValueError where nothing judges the constants."""
    errors = medians(found)
    if not errors:
        raise ValueError("there is no case that judges the constants of contention")
    counts = {role: sum(each.role == role for each in found) for role in ("fit", "judged")}
    return SharedUse(
        tail_overlap_s=constants.tail_overlap_s,
        reuse_s=constants.reuse_s,
        bandwidth_share=constants.bandwidth_share,
        cases=counts["fit"],
        judged=counts["judged"],
        error_pct=errors["all"],
        processor=processor,
        date=date,
    )
