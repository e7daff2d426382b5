"""Compares the simulator with measured engines from outside this project: rows of TTFT and TPOT.

    python -m simcore.validate.engines.compare FILE [--profile local] [--out rows.csv] [--seed 0] [--draws 1]

FILE is a table of measured runs with the columns of `simcore.validate.engines.rows`. The program predicts its
dense Llama-3.1 8B and 70B and Qwen3-32B rows on H100 and H200, each as the closed loop that it was, by the
engine's own batching rules, at the default prices of its card or those of another profile. A third of the
Llama rows of each series, drawn by the seed, determines its constants
(`simcore.validate.engines.predict`); the others are judged by the bars, and Qwen's, to which nothing was
fitted, apart:

    error = |predicted - measured| / measured
    held  = share of the rows that are within the 90 % intervals of their series' fit

The output lists rows faster than the card's datasheet allows, and figures with and without them. Exit code 1
if a bar is missed, 2 for an unusable file. With `--draws N` the same is done by N seeds: a line of figures
for each, and the share of draws that meets each bar; exit code 1 if SURE of them do not meet all.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from simcore.devices.in_use import prices_of
from simcore.devices.profile import NO_PROFILE, profile_names
from simcore.input.files import InputError, unknown_name
from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.validate.calibration.records import NAME
from simcore.validate.engines.predict import Predicted, drawn, fitted, host_for, least, predict_all
from simcore.validate.engines.rows import FITTED, Row, impossible, inconsistent, read_rows
from simcore.validate.program import check_out, markdown, run, write_csv

# The bars, and the errors of aiconfigurator 0.12 on such rows, in percent.
BARS = {"tpot_median": 5.0, "tpot_mean": 8.0, "ttft_median": 15.0, "ttft_mean": 22.0}
OTHERS = {"tpot_median": 8.2, "tpot_mean": 16.4, "ttft_mean": 52.0}
TOLERANCE = 1e-9
# The share of draws that has to meet the bars.
SURE = 0.95
# Errors above LARGE_PCT are explained by shares above MUCH.
LARGE_PCT, MUCH = 20.0, 0.3


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured row and its prediction. `impossible`: why it cannot be true; `why`: contradictions in the
    table and causes of a large error; `is_fitted`: whether the constant of its series was fitted to it;
    `host`: the constants that it was predicted with."""

    row: Row
    predicted: Predicted
    impossible: str
    why: str
    is_fitted: bool
    host: HostTime = NO_HOST_TIME

    @property
    def tpot_pct(self) -> float:
        """Signed error of TPOT."""
        return 100.0 * (self.predicted.tpot_s / self.row.tpot_s - 1.0)

    @property
    def ttft_pct(self) -> float:
        """Signed error of TTFT."""
        return 100.0 * (self.predicted.ttft_s / self.row.ttft_s - 1.0)

    @property
    def tpot_held(self) -> bool:
        """Whether its TPOT is within the fit's 90 % interval."""
        return _held(self.predicted.tpot_s, self.row.tpot_s, self.host.tpot_within)

    @property
    def ttft_held(self) -> bool:
        """The same of TTFT."""
        return _held(self.predicted.ttft_s, self.row.ttft_s, self.host.ttft_within)


def _held(predicted_s: float, measured_s: float, within: float) -> bool:
    return 1.0 / (1.0 + within) <= measured_s / predicted_s <= 1.0 + within


def compared(
    rows: Sequence[Row], profile: str, seed: int, jobs: int | None = None
) -> tuple[list[Compared], dict[str, HostTime]]:
    """Returns all rows with their predictions, and the constants of their series."""
    chosen = drawn(rows, seed)
    hosts = fitted(chosen, profile, jobs)
    known = {row.id for mine in chosen.values() for row in mine}
    own = {row.id: host_for(row, chosen, hosts) for row in rows}
    found = predict_all([(row, own[row.id]) for row in rows], profile, jobs)
    every = [
        Compared(row, ours, _cannot_be(row, floor), "", row.id in known, own[row.id])
        for row, ours, floor in zip(rows, found, least(rows, jobs), strict=True)
    ]
    return [replace(one, why=_why(one, own[one.row.id].sequence_s, rows)) for one in every], hosts


def _cannot_be(row: Row, floor: Predicted) -> str:
    """Names the bound of the datasheet that a row breaks: of the whole run, or else of its ops one by one."""
    whole, least_s = impossible(row), floor.cycle_s(row)
    if whole or least_s <= row.cycle_s * (1.0 + TOLERANCE):
        return whole
    factor = least_s / row.cycle_s
    words = f"faster than its ops one by one at the datasheet's rates ({factor:.2f} times the peak)"
    kept = row.series.distinct_prompts
    return words + (f", unless prompts come again; predicted with {kept} distinct ones" if kept else "")


def _why(one: Compared, host_s: float, rows: Sequence[Row]) -> str:
    """Returns the table's evidence against a row, and the main parts of a prediction that is far from it."""
    row, ours = one.row, one.predicted
    words = [found for found in [inconsistent(row, rows)] if found]
    if not row.says_clients and any(each.says_clients for each in rows):
        words.append("says nothing of how many clients there were")
    if ours.preemptions:
        words.append(f"KV cache full: {ours.preemptions} preemptions simulated")
    # Nearly all clients of a closed loop have a sequence in each step.
    waiting, host = ours.waiting_s / ours.ttft_s, row.clients * host_s / ours.tpot_s
    if abs(one.ttft_pct) > LARGE_PCT and waiting > MUCH:
        words.append(f"{100 * waiting:.0f} % of the predicted TTFT is waiting in line")
    if abs(one.tpot_pct) > LARGE_PCT and host > MUCH:
        words.append(f"{100 * host:.0f} % of the predicted TPOT is the engine's constant")
    if ours.extrapolated > MUCH:
        words.append(f"{100 * ours.extrapolated:.0f} % of its time at extrapolated prices")
    return "; ".join(words)


# -- figures -----------------------------------------------------------------------------------------------


def figures(found: Sequence[Compared]) -> dict[str, float]:
    """Returns median and mean of the errors, and how many rows the intervals hold, in percent."""
    tpot, ttft = [abs(one.tpot_pct) for one in found], [abs(one.ttft_pct) for one in found]
    held = {
        "tpot_held": 100.0 * fmean(one.tpot_held for one in found),
        "ttft_held": 100.0 * fmean(one.ttft_held for one in found),
    }
    return held | {
        "n": len(found), "tpot_median": median(tpot), "tpot_mean": fmean(tpot),
        "ttft_median": median(ttft), "ttft_mean": fmean(ttft),
    }  # fmt: skip


def groups(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Returns the rows by series, model and card."""
    by: dict[str, list[Compared]] = {}
    for one in sorted(
        found, key=lambda one: (one.row.engine, one.row.model, one.row.card, one.row.series.name)
    ):
        by.setdefault(f"{one.row.series.name} | {one.row.model} | {one.row.card}", []).append(one)
    return by


def missed(found: dict[str, float]) -> list[str]:
    """Returns the bars that the figures miss."""
    return [name for name, bar in BARS.items() if found[name] >= bar]


FIGURES = ("tpot_median", "tpot_mean", "ttft_median", "ttft_mean", "tpot_held", "ttft_held")
HEAD = ("n", "TPOT median", "mean", "TTFT median", "mean", "TPOT held", "TTFT held")


def lines(found: Sequence[Compared], hosts: dict[str, HostTime], worst: int) -> Iterator[str]:
    """Yields the printed lines about judged rows."""
    judged = [one for one in found if not one.is_fitted]
    apart = [one for one in judged if one.row.model not in FITTED]
    yield from _constants(found, hosts)
    yield ""
    by_group = [[*name.split(" | "), *_cells(mine)] for name, mine in groups(judged).items()]
    yield from markdown([["series", "model", "card", *HEAD], *by_group])
    yield ""
    yield from _overall(by_bars(found), apart)
    yield ""
    yield from _worst(judged, worst)
    yield from _named(found)


def _cells(found: Sequence[Compared]) -> list[str]:
    got = figures(found)
    return [f"{got['n']:.0f}", *(f"{got[name]:.1f} %" for name in FIGURES)]


def _constants(found: Sequence[Compared], hosts: dict[str, HostTime]) -> Iterator[str]:
    for series, host in hosts.items():
        fits = [one for one in found if one.is_fitted and one.row.series.name == series]
        of = sum(one.row.series.name == series and one.row.model in FITTED for one in found)
        yield f"{series}: {host}, fitted to {len(fits)} of {of} rows; 90 % of others within" + (
            f" {100 * host.tpot_within:.0f} % (TPOT), {100 * host.ttft_within:.0f} % (TTFT)"
        )


def by_bars(found: Sequence[Compared]) -> list[Compared]:
    """Returns the rows that the bars judge: of fitted models, but not those that constants were fitted to."""
    return [one for one in found if one.row.model in FITTED and not one.is_fitted]


def _overall(judged: Sequence[Compared], apart: Sequence[Compared]) -> Iterator[str]:
    rows = {"all": judged} if judged else {}
    for card in sorted({one.row.card for one in judged}):
        rows[card] = [one for one in judged if one.row.card == card]
    if true := [one for one in judged if not one.impossible]:
        rows["without those that cannot be true"] = true
    table: list[list[str]] = [["rows", *HEAD], *([name, *_cells(each)] for name, each in rows.items())]
    for name, bars in (("bars: below", BARS), ("aiconfigurator 0.12", OTHERS)):
        table.append([name, "", *(f"{bars[each]:g} %" if each in bars else "" for each in FIGURES)])
    for model in sorted({one.row.model for one in apart}):
        own = [one for one in apart if one.row.model == model]
        table.append([f"{model}: nothing was fitted to it", *_cells(own)])
        says = [one for one in own if one.row.says_clients]
        if 0 < len(says) < len(own):
            table.append(["of them those that say how many clients there were", *_cells(says)])
    yield from markdown(table)


def _worst(judged: Sequence[Compared], most: int) -> Iterator[str]:
    yield "Worst rows, by TPOT and by TTFT:"
    by_tpot = sorted(judged, key=lambda one: -abs(one.tpot_pct))[:most]
    by_ttft = sorted(judged, key=lambda one: -abs(one.ttft_pct))[:most]
    table = [["row", "TPOT ms, predicted", "TTFT ms, predicted", "what the table says of it"]]
    for one in {one.row.id: one for one in (*by_tpot, *by_ttft)}.values():
        row, ours = one.row, one.predicted
        table.append([
            row.label,
            f"{1e3 * row.tpot_s:.2f}, {1e3 * ours.tpot_s:.2f} ({one.tpot_pct:+.0f} %)",
            f"{1e3 * row.ttft_s:.0f}, {1e3 * ours.ttft_s:.0f} ({one.ttft_pct:+.0f} %)",
            "; ".join(filter(None, (one.impossible, one.why))) or "nothing against it found",
        ])  # fmt: skip
    yield from markdown(table)


def _named(found: Sequence[Compared]) -> Iterator[str]:
    cannot = [one for one in found if one.impossible]
    yield ""
    yield f"Rows that cannot be true: {len(cannot)}"
    for one in cannot:
        yield f"  {one.row.label} ({one.row.id}): {one.impossible}"


def over_draws(rows: Sequence[Row], profile: str, seeds: Sequence[int], jobs: int | None) -> Iterator[str]:
    """Yields the figures of fitted models, and of others, by each seed, then the shares of draws that meet
    the bars; the last line begins with "missed" if too few meet all."""
    met: list[list[str]] = []
    for seed in seeds:
        found, _ = compared(rows, profile, seed, jobs)
        got = figures(by_bars(found))
        met.append(missed(got))
        yield f"seed {seed}: {_said(got)}"
        if apart := [one for one in found if one.row.model not in FITTED]:
            yield f"    nothing fitted: {_said(figures(apart))}"
    for name, bar in BARS.items():
        share = fmean(name not in each for each in met)
        yield f"{name.replace('_', ' ')} below {bar:g} %: {100.0 * share:.0f} % of {len(met)} draws"
    share = fmean(not each for each in met)
    word = "missed" if share < SURE else "met"
    yield f"{word}: all bars by {100.0 * share:.0f} % of the draws, {100.0 * SURE:.0f} % wanted"


def _with_drawn(rows: Sequence[Row], seed: int) -> Iterator[tuple[list[Row], list[Row]]]:
    """Yields the rows of fitted models of each series, and those that are drawn of them."""
    for name, kept in drawn(rows, seed).items():
        yield [row for row in rows if row.series.name == name and row.model in FITTED], kept


def _said(got: dict[str, float]) -> str:
    words = (f"{name.replace('_', ' ').upper()} {got[name]:.1f} %" for name in FIGURES)
    return f"n {got['n']:.0f}, " + ", ".join(words)


def _line(one: Compared) -> dict[str, Any]:
    row, ours = one.row, one.predicted
    return {
        "id": row.id, "series": row.series.name, "engine": row.engine, "model": row.model, "card": row.card,
        "weights": row.weights, "kv": row.kv_dtype, "ranks": row.ranks, "clients": row.clients,
        "isl": row.isl, "osl": row.osl,
        "ttft_s": row.ttft_s, "predicted_ttft_s": ours.ttft_s, "ttft_error_pct": one.ttft_pct,
        "tpot_s": row.tpot_s, "predicted_tpot_s": ours.tpot_s, "tpot_error_pct": one.tpot_pct,
        "fitted": int(one.is_fitted), "extrapolated_share": ours.extrapolated, "impossible": one.impossible,
        "why": one.why,
    }  # fmt: skip


def _origins(rows: Sequence[Row], profile: str) -> Iterator[str]:
    """Yields the origin of each card's prices. Raises InputError for a named profile that no card has; the
    default profile may not be measured yet."""
    origins = {card: prices_of(card, profile).origin for card in sorted({row.card for row in rows})}
    if profile not in (NAME, NO_PROFILE) and not any(ours.startswith("profile") for ours in origins.values()):
        known = {name for card in origins for name in profile_names(card)}
        raise InputError(f"--profile: {unknown_name('measured profile', profile, [NO_PROFILE, *known])}")
    for card, origin in origins.items():
        yield f"{card}: {origin}"


def main(
    file: Annotated[Path, typer.Argument(help="the table of measured runs")],
    profile: Annotated[str, typer.Option(help="of the cards; 'none' for their datasheets")] = NAME,
    out: Annotated[Path | None, typer.Option(help="a CSV file for all rows")] = None,
    seed: Annotated[int, typer.Option(help="by which the fitted rows are drawn")] = 0,
    draws: Annotated[int, typer.Option(min=1, help="how many seeds, from this one on")] = 1,
    worst: Annotated[int, typer.Option(min=0, help="how many of the worst rows to print")] = 10,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores, if left out")] = None,
) -> None:
    """Prints how predictions compare with measured engines, row by row."""
    check_out(out)
    if draws > 1 and out is not None:
        raise InputError("--out: has the rows of one draw; leave it out, or --draws")
    rows, others = read_rows(file)
    for line in _origins(rows, profile):
        typer.echo(line)
    typer.echo(f"{len(rows)} rows; {others} others are of other models, cards or modes")
    if draws > 1 and any(len(mine) > len(kept) for mine, kept in _with_drawn(rows, seed)):
        line = ""
        for line in over_draws(rows, profile, range(seed, seed + draws), jobs):
            typer.echo(line)
        sys.exit(int(line.startswith("missed")))
    found, hosts = compared(rows, profile, seed, jobs)
    for line in lines(found, hosts, worst):
        typer.echo(line)
    if out is not None:
        write_csv([_line(one) for one in found], out)
    if not by_bars(found):
        typer.echo(f"missed: no row is left to be judged; bars are for {', '.join(sorted(FITTED))}")
        sys.exit(1)
    broken = missed(figures(by_bars(found)))
    for name in broken:
        typer.echo(f"missed: {name.replace('_', ' ')} is not below {BARS[name]:g} %")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    run(main)
