"""Several graphs at a time on a CUDA card: how much they slow each other down, against the simulated machine.

    python -m simcore.validate.accuracy.contention --profile local --out rows.csv --fit
    python -m simcore.validate.accuracy.contention --measured rows.csv       judges rows again, without a card

Cases and programs are those of `contention_cases`; the profile has the constants of the law that
they are held against. --fit takes them from the rows instead (`contention_fit`), judges by those
that had no part in it, and writes them into the profile. A calibration measures a part of this.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer

from simcore.devices.fitted import FittedProfile, write_shared_use
from simcore.devices.profile import NO_PROFILE, PROFILES, load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError, is_path
from simcore.ops.convolution import IMPLEMENTATIONS
from simcore.terminal import BROKEN
from simcore.validate.accuracy.contention_cases import (
    BESIDE,
    KINDS,
    Case,
    Device,
    Models,
    Row,
    measured,
    streams_of,
)
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
from simcore.validate.program import check_out, partial_of, run, write_csv

# What a case may have at most; else as many as a context has tokens, and seconds.
MOST = {"batch": 512, "count": 256, "side": 4096, "layers": 32}
MOST_TOKENS, MOST_S = 1 << 17, 1e3


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
    _whole(rows, path)
    births: list[Birth] = [{name: cells[name] for name in BORN} for cells in found]
    return rows, _number(found[0], "layers", int, 1, MOST["layers"], f"{path}: row 1"), births


def _row(cells: Mapping[str, str | None], where: str) -> Row:
    """One row of a file. Raises InputError that names row and column."""
    for name in (*CASE, *TIMES, *BORN, "stream", "layers"):
        if cells.get(name) is None:
            raise InputError(f"{where}: {name}: is missing")
    types: dict[str, Any] = get_type_hints(Case)
    words: Any = {name: cells[name] for name in CASE if types[name] is not int}
    _known(where, "kind", words["kind"], KINDS)
    beside = words["kind"] == BESIDE
    if beside:
        _known(where, "method", words["method"], IMPLEMENTATIONS)
    least = dict.fromkeys(("batch", "count", "steps"), 1) | (
        {"side": 1, "tiles": 1} if beside else {"context": 2}
    )
    counts = {
        name: _number(cells, name, int, least.get(name, 0), MOST.get(name, MOST_TOKENS), where)
        for name in CASE
        if name not in words
    }
    case = Case(**words, **counts)
    if case.side & (case.side - 1):
        raise InputError(f"{where}: side: is {case.side}; it should be a power of two")
    _known(where, "stream", str(cells["stream"]), streams_of(case))
    times: Any = {name: _number(cells, name, float, LEAST_S, MOST_S, where) for name in TIMES[:-1]}
    return Row(case, str(cells["stream"]), **times, n=_number(cells, "n", int, 1, MOST_TOKENS, where))


def _whole(rows: Sequence[Row], path: Path) -> None:
    """Raises InputError where a case lacks the row of one of its streams, or has one twice."""
    streams: dict[Case, list[str]] = {}
    for row in rows:
        streams.setdefault(row.case, []).append(row.stream)
    for case, found in streams.items():
        for stream in streams_of(case):
            if found.count(stream) != 1:
                of = f"stream {stream!r}: " if stream else ""
                raise InputError(
                    f"{path}: stream: {case.text}: {of}{found.count(stream)} rows; one is needed"
                )


def _known(where: str, name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise InputError(f"{where}: {name}: is {value!r} (allowed: {', '.join(map(repr, allowed))})")


def _number(
    cells: Mapping[str, str | None], name: str, kind: type, least: float, most: float, where: str
) -> Any:
    """A number of a row, from `least` to `most`."""
    try:
        found = kind(cells[name] or "")
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        what = "whole number" if kind is int else "number"
        raise InputError(
            f"{where}: {name}: is {cells[name]!r}; it should be a {what} from {least:g} to {most:g}"
        )
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
        _numbers("--streams", streams, 1, MOST["count"]),
        _numbers("--contexts", contexts, 2, MOST_TOKENS),
        _numbers("--sides", sides, 1, MOST["side"]),
        _methods(methods),
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
            _of_one_card(births, known, str(from_))
    models = models_of(layers)
    reach, most = spec.hbm_efficiency.value, most_reach(spec, known)
    found = _compared(rows, models, here, known, reach, most, fit_)
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
        folder = _folder(name, profile)
        write_shared_use(shared_use(*found, processor, date), folder)
        typer.echo(f"written into {folder / 'profile.yaml'}")
    if missed or not errors:
        why = f"missed: {', '.join(missed)}" if missed else "nothing was judged"
        typer.echo(f"{why} (each median should be under {MOST_PCT:g} %){'; nothing was written' * fit_}")
        raise typer.Exit(BROKEN)


def _device(named: str | None, *, measures: bool) -> str:
    """The device of the catalogue. Raises InputError where there is no card to measure, or to say which."""
    if named is not None and not measures:
        return named
    if not measures and not torch.cuda.is_available():
        raise InputError("--device: is needed with --measured where there is no card")
    # Where a device is named, too: without a card nothing is measured.
    here = this_card()
    return named or here


def _of_one_card(births: Sequence[Birth], profile: FittedProfile | None, where: str) -> None:
    """Raises InputError where a row is of another card than a profile."""
    if profile is None or profile.birth is None:
        return
    for i, born in enumerate(births, 1):
        if born["device"] != profile.birth.processor:
            found, of = born["device"], profile.birth.processor
            raise InputError(f"{where}: row {i}: device: is {found!r}; the profile is of {of!r}")


def _measured_here(
    cases: Sequence[Case], models: Models, device: Device, repeats: int, out: Path | None
) -> tuple[list[Row], list[Birth]]:
    """Rows of this card with their birth records; kept beside `out` as they come, whatever becomes of the
    next case."""
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
    """Where constants come from, in words."""
    shared = profile.contention if profile else None
    if fitting:
        return "fitted to the rows of role fit"
    if shared is None:
        return "for the profile has none: nobody is kept out"
    among = any(born["date_utc"] in shared.date for born in births)
    return f"of the profile, fitted on {shared.date}{', to some of these rows' * among}"


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
    most: float,
    fitting: bool,
) -> tuple[Constants, list[Judged]]:
    shared = profile.contention if profile else None
    if fitting:
        constants = fit(role_is("fit", rows), models, device, reach, most)
    elif shared is not None:
        constants = Constants(shared.leaves_s, shared.reuse_s, shared.reach)
    else:
        # What the law was before anybody measured: nothing is held, nothing shared.
        constants = Constants(math.inf, 0.0, reach)
    return constants, judged(rows, models, device, constants, fitting)


def _each(births: Sequence[Birth], name: str) -> str:
    """What they say, where it differs one after the other."""
    return ", ".join(dict.fromkeys(born[name] for born in births))


if __name__ == "__main__":
    run(main)
