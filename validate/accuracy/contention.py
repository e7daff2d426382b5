"""Measures how much concurrent graphs on a CUDA card slow each other down, and compares with the simulator.

    python -m simcore.validate.accuracy.contention --profile local --out rows.csv --fit
    python -m simcore.validate.accuracy.contention --measured rows.csv       judges rows again, without a card

Cases and programs are in `contention_cases`; the law's constants come from the profile. With --fit they are
fitted to a part of the rows (`contention_fit`), judged by the other rows, and written into the profile. A
calibration measures a part of this.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from simcore.devices.fitted import FittedProfile, write_law
from simcore.devices.profile import NO_PROFILE, PROFILES, load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError, is_path, unknown_name
from simcore.ops.convolution import IMPLEMENTATIONS
from simcore.terminal import BROKEN
from simcore.validate.accuracy.contention_cases import (
    BESIDE,
    Case,
    Device,
    Kind,
    Models,
    Row,
    measured,
    streams_of,
)
from simcore.validate.accuracy.tables import Birth, read_rows
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.benchmarks.timing import birth, measure_card
from simcore.validate.calibration.contention_fit import (
    LEAST_S,
    MOST_PCT,
    Constants,
    Judged,
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
from simcore.validate.calibration.cuda import this_card
from simcore.validate.machines.cuda.runs import this_machine
from simcore.validate.program import aligned, check_out, named, partial_of, run, write_csv

# Upper bounds of a case; MOST_TOKENS bounds its context.
MOST_BATCH, MOST_COUNT, MOST_SIDE, MOST_LAYERS, MOST_TOKENS = 512, 256, 4096, 32, 1 << 17


def lines(found: Sequence[Judged]) -> Iterator[str]:
    """Yields the printed table."""
    table = [["case", "of", "alone", "together", "predicted", "error", "role"]]
    for each in found:
        row = each.row
        times = (f"{1e6 * s:.1f}us" for s in (row.alone_s, row.together_s, each.predicted_s))
        table.append([row.case.text, row.stream or "all", *times, f"{each.error_pct:.1f} %", each.role])
    yield from aligned(table)
    for kind, error in medians(found).items():
        yield f"median error, {kind}: {error:.2f} %"


# -- files -------------------------------------------------------------------------------------------------

CASE = tuple(field.name for field in fields(Case))
TIMES = ("alone_s", "together_s", "least_s", "most_s", "n")
_Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
_Some = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Seconds = Annotated[float, Field(ge=LEAST_S, le=1e3)]


@checked(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class _Line:
    """A line of a file of `write`, without the prediction."""

    kind: Kind
    batch: Annotated[int, Field(ge=1, le=MOST_BATCH)]
    count: Annotated[int, Field(ge=1, le=MOST_COUNT)]
    context: _Tokens
    side: Annotated[int, Field(ge=0, le=MOST_SIDE)]
    method: str
    steps: _Some
    tiles: _Tokens
    stream: str
    alone_s: _Seconds
    together_s: _Seconds
    least_s: _Seconds
    most_s: _Seconds
    n: _Some
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]

    def __post_init__(self) -> None:
        if self.kind == BESIDE:
            if self.method not in IMPLEMENTATIONS:
                raise ValueError(unknown_name("method", self.method, IMPLEMENTATIONS))
            if self.side.bit_count() != 1 or not self.tiles:
                raise ValueError(f"side: is {self.side}, tiles: {self.tiles}; a power of two, and 1 or more")
        elif self.context < 2:
            raise ValueError(f"context: is {self.context}; it should be 2 or more")
        if self.stream not in streams_of(self.case):
            raise ValueError(unknown_name("stream", self.stream, streams_of(self.case)))

    @property
    def case(self) -> Case:
        """Returns the measured case."""
        return Case(**{name: getattr(self, name) for name in CASE})

    @property
    def row(self) -> Row:
        """Returns the measured times."""
        return Row(self.case, self.stream, *(getattr(self, name) for name in TIMES))


def write(found: Sequence[Judged], models: Models, births: Sequence[Birth], path: Path) -> None:
    """Writes all rows, each with its birth record, to a file, completely or not at all."""
    rows = []
    for each, born in zip(found, births, strict=True):
        row = each.row
        cells = {**asdict(row.case), "stream": row.stream, **{name: getattr(row, name) for name in TIMES}}
        cells |= {"predicted_s": each.predicted_s, "error_pct": each.error_pct, "role": each.role}
        rows.append(cells | {"model": models.config.name, "layers": models.config.layers, **born})
    write_csv(rows, path)


def read(path: Path) -> tuple[list[Row], int, list[Birth]]:
    """Returns the rows of a file of `write`, the number of layers of the decoder, and the birth records.
    Raises InputError if the file is invalid, or if a case lacks the one row for each of its streams."""
    found, births = read_rows(path, _Line)
    streams: dict[Case, list[str]] = {}
    for line in found:
        streams.setdefault(line.case, []).append(line.stream)
    for case, each in streams.items():
        for stream in streams_of(case):
            if (count := each.count(stream)) != 1:
                of = f"stream {stream!r}: " if stream else ""
                raise InputError(f"{path}: stream: {case.text}: {of}{count} rows; one is needed")
    return [line.row for line in found], found[0].layers, births


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
    return None if name == NO_PROFILE else fitted_profile(device, name)


def fitted_profile(device: str, name: str) -> FittedProfile:
    """Returns a fitted profile of a device. Raises InputError if it is of another kind."""
    found = load_profile(device, name)
    if not isinstance(found, FittedProfile):
        raise InputError(f"--profile {name}: has the op times of one model; a fitted profile is needed")
    return found


def folder_of(device: str, name: str) -> Path:
    """Returns the folder of a profile by the rules of `load_profile`."""
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
        _numbers("--streams", streams, 1, MOST_COUNT),
        _numbers("--contexts", contexts, 2, MOST_TOKENS),
        _numbers("--sides", sides, 1, MOST_SIDE),
        named("--methods", methods, IMPLEMENTATIONS, needed=True),
        batch,
    )
    given = None if from_ is None else read(from_)
    name = _device(device, measures=given is None)
    spec, known = load_device(name), _profile_of(name, profile)
    if fit_ and known is None:
        raise InputError("--fit: needs a profile into which constants are written")
    here = simulated_on(spec, known)
    if given is None:
        rows, births = _measured_here(cases, models_of(layers), here, repeats, out)
    else:
        rows, layers, births = given
        if fit_:
            of_one_card(births, known, str(from_))
    models = models_of(layers)
    bandwidth_share, most = spec.hbm_efficiency.value, most_reach(spec, known)
    found = _compared(rows, models, here, known, bandwidth_share, most, fit_)
    if out is not None:
        write(found[1], models, births, out)
        partial_of(out).unlink(missing_ok=True)
    for line in lines(found[1]):
        typer.echo(line)
    typer.echo(f"law: {found[0].text}, {_whose(known, births, fit_)}")
    errors = medians(found[1])
    missed = [f"{kind} {error:.2f} %" for kind, error in errors.items() if error >= MOST_PCT]
    if fit_ and errors and not missed:
        processor, date = _each(births, "device"), _each(births, "date_utc")
        folder = folder_of(name, profile)
        # No service runs here, which that constant is of.
        kept = known.contention.kernels_between if known and known.contention else 1.0
        write_law(replace(shared_use(*found, processor, date), kernels_between=kept), folder)
        typer.echo(f"written into {folder / 'profile.yaml'}")
    if missed or not errors:
        why = f"missed: {', '.join(missed)}" if missed else "nothing was judged"
        typer.echo(f"{why} (each median should be under {MOST_PCT:g} %){'; nothing was written' * fit_}")
        raise typer.Exit(BROKEN)


def _device(named: str | None, *, measures: bool) -> str:
    """Returns the catalogue's device. Raises InputError if the card to measure or to name is missing."""
    if named is not None and not measures:
        return named
    if not measures and not torch.cuda.is_available():
        raise InputError("--device: is needed with --measured where there is no card")
    # This also runs for a named device, because a measurement needs a card.
    here = this_card()
    return named or here


def of_one_card(births: Sequence[Birth], profile: FittedProfile | None, where: str) -> None:
    """Raises InputError if a row and the profile are of different cards."""
    if profile is None or profile.birth is None:
        return
    for i, born in enumerate(births, 1):
        if born["device"] != profile.birth.processor:
            found, of = born["device"], profile.birth.processor
            raise InputError(f"{where}: row {i}: device: is {found!r}; the profile is of {of!r}")


def _measured_here(
    cases: Sequence[Case], models: Models, device: Device, repeats: int, out: Path | None
) -> tuple[list[Row], list[Birth]]:
    """Returns rows of this card with their birth records; a partial file at `out` keeps them as they come, in
    case a later case fails."""
    rows: list[Row] = []
    real, card = this_machine(repeats), measure_card(lambda text: None)
    born = {name: str(value) for name, value in asdict(birth(card)).items() if name in BORN}
    start = replace(device, start=real.start)
    for row in measured(cases, models, start, repeats, partial(typer.echo, err=True)):
        rows.append(row)
        if out is not None:
            kept = [Judged(each, "measured", math.nan) for each in rows]
            write(kept, models, [born] * len(rows), partial_of(out))
    real.release()
    return rows, [born] * len(rows)


def _whose(profile: FittedProfile | None, births: Sequence[Birth], fitting: bool) -> str:
    """Describes the origin of the constants."""
    shared = profile.contention if profile else None
    if fitting:
        return "fitted to the rows of role fit"
    if shared is None:
        return "for the profile has none: nobody is kept out"
    among = any(born["date_utc"] in shared.date for born in births)
    return f"of the profile, fitted on {shared.date}{', to some of these rows' * among}"


def _compared(
    rows: Sequence[Row],
    models: Models,
    device: Device,
    profile: FittedProfile | None,
    bandwidth_share: float,
    most: float,
    fitting: bool,
) -> tuple[Constants, list[Judged]]:
    shared = profile.contention if profile else None
    if fitting:
        constants = fit(role_is("fit", rows), models, device, bandwidth_share, most)
    elif shared is not None:
        constants = Constants(shared.tail_overlap_s, shared.reuse_s, shared.bandwidth_share)
    else:
        # The law before any measurement: no holding back, no reuse of reads.
        constants = Constants(math.inf, 0.0, bandwidth_share)
    return constants, judged(rows, models, device, constants, fitting)


def _each(births: Sequence[Birth], name: str) -> str:
    """Returns the records' values of a field, each distinct value once."""
    return ", ".join(dict.fromkeys(born[name] for born in births))


if __name__ == "__main__":
    run(main)
