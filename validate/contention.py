"""Several graphs at a time on a CUDA card: how much they slow each other down, against the simulated machine.

    python -m validate.contention --profile local --out rows.csv --fit
    python -m validate.contention --measured rows.csv          judges rows again, without a card

Cases and programs are those of `validate.contention_cases`. What runs together costs on the simulated machine
what it was measured to cost alone; so the error is that of the law of contention (`simcore.contention`), of
which the profile has the constants. --fit takes `leaves_s` and `reach` from every second number of streams
or side of each kind instead, by the least sum of |log(measured / predicted)|, judges the others, and writes
them into the profile (by squares, the one tile that the law is 30 % off at, whatever its constants, took all
streams 5 % off with it); `reuse_s` is 0 then: graphs take as long with weights in common as with their own.

    error = larger / smaller of measured and predicted - 1
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_type_hints

import torch
import typer
from scipy.optimize import minimize

from devices.fitted import FittedProfile, SharedUse, write_shared_use
from devices.price import pricer, roofline
from devices.profile import NO_PROFILE, PROFILES, load_profile
from devices.spec import load_device
from simcore.assembly import MODELS
from simcore.contention import Rates, shared_reads
from simcore.decoder_config import load_config
from simcore.files import InputError, is_path
from simcore.long_convolution import LongConvolution
from simcore.models import Dtypes
from simcore.ops_convolution import IMPLEMENTATIONS
from validate.bench_timing import birth, measure_card
from validate.card_calibrate import this_card
from validate.card_real import this_machine
from validate.contention_cases import (
    KINDS,
    Case,
    Device,
    Models,
    Row,
    measured,
    predicted,
    seconds_of,
    streams_of,
)
from validate.ladder import off_pct
from validate.program import check_out, partial_of, run, write_csv

MOST_PCT = 8.0
SHARED = KINDS[0]
MODEL, DTYPES = "llama-3.1-8b", Dtypes("bf16", "bf16", "bf16")
# Flash Inference's synthetic setting.
CONVOLUTION = LongConvolution(layers=18, channels=256, tokens=4, dtype="fp32")
BORN = ("device", "driver", "torch", "triton", "date_utc", "sm_clock_mhz", "memory_clock_mhz")
# Where a search for constants begins, how often each may simulate all cases.
STARTS_S, MOST_TRIES = (5e-7, 5e-6), 50
LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Constants:
    """Those of `simcore.contention.shared_reads`."""

    leaves_s: float
    reuse_s: float
    reach: float

    def rates(self, case: Case) -> Rates:
        """The law. Only instances of one model find in the cache what others have read."""
        reuse_s = self.reuse_s if case.kind == SHARED else 0.0
        return shared_reads(reuse_s, self.reach, self.leaves_s)

    @property
    def text(self) -> str:
        """For people."""
        return f"leaves_s {self.leaves_s:.3g}, reuse_s {self.reuse_s:.3g}, reach {self.reach:.3f}"


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
        for kind in KINDS[:2]
        for context in contexts
        for count in streams
        if count > 1 or kind == SHARED
    ]
    return found + [Case("beside", batch, side=side, method=each) for side in sides for each in methods]


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
        if row.case.kind != "beside" and row.case.count == 1:
            found.append("alone")
            continue
        case = row.case.batch, row.case.count, row.case.context, row.case.side
        cases = seen.setdefault(row.case.kind, [])
        if case not in cases:
            cases.append(case)
        found.append("fit" if fitting and cases.index(case) % 2 == 0 else "judged")
    return found


def fit(rows: Sequence[Row], models: Models, device: Device, reach: float) -> Constants:
    """The constants with the least sum of |log(measured / predicted)|. Raises InputError without rows."""
    if not rows:
        raise InputError("--fit: there is no case to fit to; give more streams or sides")

    def constants(x: Sequence[float]) -> Constants:
        return Constants(max(LEAST_S, math.exp(min(0.0, x[0]))), 0.0, min(1.0, max(0.1, x[1])))

    def cost(x: Sequence[float]) -> float:
        found_s = together_s(rows, models, device, constants(x))
        return sum(abs(math.log(row.together_s / s)) for row, s in zip(rows, found_s, strict=True))

    search: Any = minimize
    best: Any = None
    for start_s in STARTS_S:
        first = [math.log(start_s), reach]
        steps = [first, [first[0] + 1.0, reach], [first[0], reach - 0.1]]
        options = {"maxfev": MOST_TRIES, "initial_simplex": steps}
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


def lines(found: Sequence[Judged]) -> Iterator[str]:
    """The table for people."""
    yield f"{'case':58} {'of':5} {'alone':>10} {'together':>10} {'predicted':>10} {'error':>8}  role"
    for each in found:
        row = each.row
        times = " ".join(f"{1e6 * s:8.1f}us" for s in (row.alone_s, row.together_s, each.predicted_s))
        yield f"{row.case.text:58} {row.stream or 'all':5} {times} {each.error_pct:6.1f} %  {each.role}"
    for kind, error in medians(found).items():
        yield f"median error, {kind}: {error:.2f} %"


# -- files -------------------------------------------------------------------------------------------------

CASE = tuple(field.name for field in fields(Case))
TIMES = ("alone_s", "together_s", "least_s", "most_s", "n")


Birth = Mapping[str, str]


def write(found: Sequence[Judged], models: Models, births: Sequence[Birth], path: Path) -> None:
    """All of it as a file, each row with its birth record, whole or not at all."""
    rows = []
    for each, born in zip(found, births, strict=True):
        row = each.row
        cells = {**asdict(row.case), "stream": row.stream, **{name: getattr(row, name) for name in TIMES}}
        cells |= {"predicted_s": each.predicted_s, "error_pct": each.error_pct, "role": each.role}
        rows.append(cells | {"model": models.config.name, "layers": models.config.layers, **born})
    write_csv(rows, path)


def read(path: Path) -> tuple[list[Row], int, list[Birth]]:
    """Rows that `write` has written, of how many layers the decoder was, and their birth records. Raises
    InputError where they are none."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no text") from None
    if not found:
        raise InputError(f"{path}: has no rows")
    rows = [_row(cells, f"{path}: row {i}") for i, cells in enumerate(found, 1)]
    births: list[Birth] = [{name: cells[name] for name in BORN} for cells in found]
    return rows, _number(found[0], "layers", int, 1, f"{path}: row 1"), births


def _row(cells: Mapping[str, str | None], where: str) -> Row:
    """One row of a file. Raises InputError that names row and column."""
    for name in (*CASE, *TIMES, *BORN, "stream", "layers"):
        if cells.get(name) is None:
            raise InputError(f"{where}: {name}: is missing")
    types: dict[str, Any] = get_type_hints(Case)
    words: Any = {name: cells[name] for name in CASE if types[name] is not int}
    _known(where, "kind", words["kind"], KINDS)
    beside = words["kind"] == "beside"
    if beside:
        _known(where, "method", words["method"], IMPLEMENTATIONS)
    some = {"batch", "count", "steps", *(("side", "tiles") if beside else ())}
    counts = {name: _number(cells, name, int, int(name in some), where) for name in CASE if name not in words}
    case = Case(**words, **counts)
    _known(where, "stream", str(cells["stream"]), streams_of(case))
    times: Any = {name: _number(cells, name, float, LEAST_S, where) for name in TIMES[:-1]}
    return Row(case, str(cells["stream"]), **times, n=_number(cells, "n", int, 1, where))


def _known(where: str, name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise InputError(f"{where}: {name}: is {value!r} (allowed: {', '.join(map(repr, allowed))})")


def _number(cells: Mapping[str, str | None], name: str, kind: type, least: float, where: str) -> Any:
    """A number of a row, no less than `least` and finite."""
    try:
        found = kind(cells[name] or "")
    except ValueError:
        found = math.nan
    if not least <= found < math.inf:
        what = "whole number" if kind is int else "number"
        raise InputError(f"{where}: {name}: is {cells[name]!r}; it should be a {what} of at least {least:g}")
    return found


# -- the program -------------------------------------------------------------------------------------------


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    try:
        found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < least or found[-1] > most:
        raise InputError(f"{option}: {text!r} is not numbers from {least} to {most}, as in 1,2,4")
    return found


def _profile_of(device: str, name: str) -> FittedProfile | None:
    if name == NO_PROFILE:
        return None
    found = load_profile(device, name)
    if not isinstance(found, FittedProfile):
        raise InputError(f"--profile {name}: has the op times of one model; a fitted profile is needed")
    return found


def _folder(device: str, name: str) -> Path:
    """The folder of a profile, as `load_profile` finds it."""
    if not is_path(name, ".yaml"):
        return PROFILES / device / name
    return Path(name).parent if name.endswith(".yaml") else Path(name)


def main(
    profile: Annotated[
        str, typer.Option(help="prices by which a graph's time is shared out, or none")
    ] = "local",
    out: Annotated[Path | None, typer.Option(help="where to write all rows, as CSV")] = None,
    streams: Annotated[str, typer.Option(help="numbers of instances")] = "1,2,4,8,16,32",
    contexts: Annotated[str, typer.Option(help="their tokens")] = "1024,16384",
    sides: Annotated[str, typer.Option(help="sides of tiles, powers of two")] = "64,256,1024",
    methods: Annotated[str, typer.Option(help="how tiles are computed")] = "flash_conv,flash_fft",
    layers: Annotated[int, typer.Option(help="of the decoder", min=1, max=32)] = 4,
    batch: Annotated[int, typer.Option(help="sequences of each instance", min=1, max=512)] = 1,
    repeats: Annotated[int, typer.Option(help="runs of a case, of which the median counts", min=1)] = 5,
    fit_: Annotated[
        bool, typer.Option("--fit", help="fit the constants and write them into the profile")
    ] = False,
    from_: Annotated[
        Path | None, typer.Option("--measured", help="rows of an earlier run, in place of a card")
    ] = None,
    device: Annotated[str | None, typer.Option(help="of the catalogue; needed with --measured alone")] = None,
) -> None:
    """Measures graphs that run at the same time, and compares; exit 1 where a kind's median error, or that of
    all, is 8 % or more, or nothing could be judged."""
    check_out(out)
    cases = cases_of(
        _numbers("--streams", streams, 1, 256),
        _numbers("--contexts", contexts, 2, 1 << 17),
        _numbers("--sides", sides, 1, 4096),
        _methods(methods),
        batch,
    )
    rows: list[Row] = []
    births: list[Birth] = []
    if from_ is not None:
        rows, layers, births = read(from_)
    if from_ is not None and device is None and not torch.cuda.is_available():
        raise InputError("--device: is needed with --measured where there is no card")
    name = device or this_card()
    spec, known = load_device(name), _profile_of(name, profile)
    if fit_ and known is None:
        raise InputError("--fit: needs a profile into which constants are written")
    overheads = replace(spec.overheads, **(known.overheads if known else {}))
    here = Device(pricer(spec, profile=known), roofline(spec), overheads)
    models = Models(replace(load_config(MODELS / f"{MODEL}.json"), layers=layers), DTYPES, CONVOLUTION)
    if from_ is None:
        real = this_machine(repeats)
        card = measure_card(lambda text: None)
        born = {name: str(value) for name, value in asdict(birth(card)).items() if name in BORN}
        start = replace(here, start=real.start)
        for row in measured(cases, models, start, repeats, partial(typer.echo, err=True)):
            rows.append(row)
            births.append(born)
            if out is not None:
                # What has been measured is kept, whatever becomes of the next case.
                write([Judged(each, "measured", math.nan) for each in rows], models, births, partial_of(out))
        real.release()
    found = _compared(rows, models, here, known, spec.hbm_efficiency.value, fit_)
    if out is not None:
        write(found[1], models, births, out)
        partial_of(out).unlink(missing_ok=True)
    for line in lines(found[1]):
        typer.echo(line)
    typer.echo(f"law: {found[0].text}")
    errors = medians(found[1])
    if fit_ and errors:
        write_shared_use(_shared(*found, births), _folder(name, profile))
    if not errors or max(errors.values()) >= MOST_PCT:
        raise typer.Exit(1)


def _methods(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in IMPLEMENTATIONS:
            raise InputError(f"--methods: {name!r} is not known (allowed: {', '.join(IMPLEMENTATIONS)})")
    return found


def _compared(
    rows: Sequence[Row],
    models: Models,
    device: Device,
    profile: FittedProfile | None,
    reach: float,
    fitting: bool,
) -> tuple[Constants, list[Judged]]:
    shared = profile.contention if profile else None
    if fitting:
        chosen = [row for row, role in zip(rows, roles(rows, True), strict=True) if role == "fit"]
        constants = fit(chosen, models, device, reach)
    elif shared is not None:
        constants = Constants(shared.leaves_s, shared.reuse_s, shared.reach)
    else:
        # What the law was before anybody measured: nothing is held, nothing shared.
        constants = Constants(math.inf, 0.0, reach)
    return constants, judged(rows, models, device, constants, fitting)


def _shared(constants: Constants, found: Sequence[Judged], births: Sequence[Birth]) -> SharedUse:
    counts = {role: sum(each.role == role for each in found) for role in ("fit", "judged")}
    return SharedUse(
        leaves_s=constants.leaves_s,
        reuse_s=constants.reuse_s,
        reach=constants.reach,
        cases=counts["fit"],
        judged=counts["judged"],
        error_pct=medians(found)["all"],
        processor=_each(births, "device"),
        date=_each(births, "date_utc"),
    )


def _each(births: Sequence[Birth], name: str) -> str:
    """What they say, where it differs one after the other."""
    return ", ".join(dict.fromkeys(born[name] for born in births))


if __name__ == "__main__":
    run(main)
