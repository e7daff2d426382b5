"""A study on several devices: the results of each, and the best device.

Devices are ranked by their best results at the heaviest place of the study that most of them can run. Only
devices whose prices rest on the same basis are ranked: kernels reach only a part of a datasheet's rates, so
a device priced by its datasheet looks faster than a measured one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simcore.input.files import InputError
from simcore.studies.common import BY_DATASHEET, Outcome, Progress, Standing, Study
from simcore.studies.own import OwnError

DATASHEET = "datasheet"
# Shares of the device time priced by the datasheet: above the first the basis is the datasheet; the second is
# the most by which a device's share may exceed that of others of its basis. Collectives, which a link prices,
# count as priced by the datasheet on all devices.
NEARLY_ALL, UNLIKE = 0.95, 0.25


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A study put together for one device; `basis`: the source of its prices, `origin`: the same in words."""

    name: str
    basis: str
    origin: str
    study: Study


@dataclass
class SeveralDevices:
    """The same study on several devices, one after the other."""

    each: Sequence[OnDevice]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def laws(self) -> tuple[str, ...]:
        """See Study."""
        return self.each[0].study.laws

    def run(self, progress: Progress) -> Outcome:
        """See Study. A device that can run nothing is left out, with a warning."""
        refused = []
        for one in self.each:
            try:
                self.outcomes[one.name] = one.study.run(_told_of(one.name, progress))
            except OwnError:
                raise
            except InputError as error:
                refused.append(f"{one.name}: {error}")
        if not self.outcomes:
            raise InputError(f"nothing can be run on any device; {refused[0]}")
        return joined(self.each, self.outcomes, refused)

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """See Study."""
        return [line for one in self.each for line in (f"# on {one.name}", *one.study.tape(record))]

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """See Study."""
        lines = []
        for one in self.each:
            own = self.outcomes.get(one.name)
            if own is None:
                continue
            own.warnings, own.notes = [], []
            lines += [_of_device(line, one.name) for line in one.study.compare(own)]
            outcome.warnings += [f"{one.name}: {text}" for text in own.warnings]
            outcome.notes += [f"{one.name}: {text}" for text in own.notes]
        return lines


def _told_of(name: str, progress: Progress) -> Progress:
    return lambda doing, done, of: progress(f"{name}: {doing}", done, of)


def _on(label: str, device: str) -> str:
    return f"{label}, {device}"


def _of_device(line: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns a row of comparison.csv, with its device."""
    labelled = {"label": _on(line["label"], device)} if "label" in line else {}
    return {"device": device, **line, **labelled}


def joined(each: Sequence[OnDevice], outcomes: Mapping[str, Outcome], refused: Sequence[str]) -> Outcome:
    """Joins the outcomes of a study's devices into one: all rows and tables, with the device in each
    label."""
    ran = _by_shares([one for one in each if one.name in outcomes], outcomes)
    first = outcomes[ran[0].name]
    found = [(one.name, outcomes[one.name]) for one in ran]
    winner = _winner(ran, outcomes)
    return Outcome(
        rows=[
            replace(row, axes=replace(row.axes, label=_on(row.axes.label, name)))
            for name, own in found
            for row in own.rows
        ],
        answer=answer(ran, outcomes),
        warnings=[*refused, *common_lines([(name, own.warnings) for name, own in found])],
        notes=[
            *(
                f"{name} is of {ran[0].name}"
                for name, columns in first.tables.items()
                if "label" not in columns
            ),
            f"{'timeline and trace are' if first.timeline else 'the trace is'} of {ran[0].name}",
            *(f"{name}: {own.answer}" for name, own in found),
            *(f"{one.name}: prices by the {one.origin}" for one in ran),
            *common_lines([(name, own.notes) for name, own in found]),
        ],
        baseline=_baseline(found),
        hits=list(dict.fromkeys(text for _, own in found for text in own.hits)),
        sources=_mean_shares([own.sources for _, own in found]),
        tables=_stacked(found),
        slo=first.slo,
        timeline=[{**span, "case": _on(span["case"], ran[0].name)} for span in first.timeline],
        trace=first.trace,
        trace_title=_on(first.trace_title, ran[0].name) if first.trace_title else f"on {ran[0].name}",
        standings=first.standings,
        unranked=_unranked(ran, outcomes),
        best=_on(winner[1].label, winner[0]) if winner else "",
        best_at=winner[1].where if winner else {},
    )


def common_lines(each: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns lines about several devices: a line common to all devices once, the others with the device's
    name."""
    of_all = set.intersection(*(set(lines) for _, lines in each)) if each else set()
    named = [
        line if line in of_all or line.startswith(f"{name}:") else f"{name}: {line}"
        for name, lines in each
        for line in lines
    ]
    return list(dict.fromkeys(named))


def _baseline(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Returns the baseline's label: each device has its own baseline."""
    named = [(own.baseline, name) for name, own in outcomes if own.baseline]
    if len({label for label, _ in named}) == 1:
        return f"{named[0][0]}, of the same device"
    return "; ".join(_on(label, name) for label, name in named)


def _unranked(ran: Sequence[OnDevice], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Returns the labels that cannot be ranked: of devices without the most common basis, and those unranked
    on their own device."""
    most = _most_common_basis(ran)
    labels = {
        _on(row.axes.label, one.name): None
        for one in ran
        for row in outcomes[one.name].rows
        if one.basis != most or row.axes.label in outcomes[one.name].unranked
    }
    return list(labels)


def _by_shares(ran: Sequence[OnDevice], outcomes: Mapping[str, Outcome]) -> list[OnDevice]:
    """Returns the devices with the basis that their prices really have: a profile may lack the ops of this
    study. If it has hardly any, the basis is the datasheet; if the datasheet prices a much larger share of
    the time than on others of the same basis, the device gets a basis of its own."""
    shares = {one.name: outcomes[one.name].sources.get(BY_DATASHEET, 0.0) for one in ran}
    least = {
        basis: min(shares[one.name] for one in ran if one.basis == basis) for basis in {o.basis for o in ran}
    }
    found = []
    for one in ran:
        share, basis = shares[one.name], one.basis
        if share > NEARLY_ALL:
            basis = DATASHEET
        elif share > least[basis] + UNLIKE:
            basis = f"{basis} for {1.0 - share:.0%} of the time and {DATASHEET} for the rest"
        found.append(replace(one, basis=basis))
    return found


def _most_common_basis(ran: Sequence[OnDevice]) -> str:
    bases = [one.basis for one in ran]
    return max(bases, key=lambda basis: (bases.count(basis), -bases.index(basis)))


def _mean_shares(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for each in shares for name in each})
    return {name: sum(each.get(name, 0.0) for each in shares) / len(shares) for name in names}


def _stacked(outcomes: Sequence[tuple[str, Outcome]]) -> dict[str, Mapping[str, Any]]:
    """Returns the tables of all devices, concatenated; a table without labels is the first device's."""
    # Arrow takes longer to import than everything that `--help` needs.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    stacked: dict[str, list[Any]] = {}
    for device, own in outcomes:
        for name, columns in own.tables.items():
            table = pa.table(dict(columns))
            if "label" not in table.column_names:
                # No column tells devices apart: only the first device's table is kept.
                stacked.setdefault(name, [table])
                continue
            place = table.column_names.index("label")
            text = pc.binary_join_element_wise(table["label"].cast(pa.string()), device, ", ")
            stacked.setdefault(name, []).append(table.set_column(place, "label", text))
    whole = {name: pa.concat_tables(tables, promote_options="permissive") for name, tables in stacked.items()}
    return {name: dict(zip(table.column_names, table.columns, strict=True)) for name, table in whole.items()}


# -- which device is best ----------------------------------------------------------------------------


def answer(ran: Sequence[OnDevice], outcomes: Mapping[str, Outcome]) -> str:
    """Returns the answer: the best device at the heaviest place that most devices can run, by how much it is
    better, and the devices that cannot be ranked."""
    load = _shared_load([outcomes[one.name].standings for one in ran])
    if load is None:
        return " ".join(f"{one.name}: {outcomes[one.name].answer}" for one in ran)
    here = {one.name: _at(outcomes[one.name].standings, load) for one in ran}
    groups: dict[str, list[tuple[str, Standing]]] = {}
    for one in ran:
        if (standing := here[one.name]) is not None:
            groups.setdefault(one.basis, []).append((one.name, standing))
    rankings = [_ranked(group) for group in groups.values()]
    absent = [name for name, standing in here.items() if standing is None]
    at = next(standing.at for standing in here.values() if standing is not None)
    if len(groups) == 1:
        text = f"{at}, {rankings[0]}"
    else:
        each = "; ".join(f"by {basis}, {text}" for basis, text in zip(groups, rankings, strict=True))
        text = f"{at}, not all devices can be ranked, for their prices rest on different bases: {each}"
    if absent:
        text += f"; {_listed(absent)} cannot run this"
    return f"{text}."


def _winner(ran: Sequence[OnDevice], outcomes: Mapping[str, Outcome]) -> tuple[str, Standing] | None:
    """Returns the best of the ranked devices and its standing at the answer's place, or None."""
    load, basis = _shared_load([outcomes[one.name].standings for one in ran]), _most_common_basis(ran)
    here = [(one.name, _at(outcomes[one.name].standings, load)) for one in ran if load and one.basis == basis]
    known = [(name, standing) for name, standing in here if standing is not None]
    return min(known, key=lambda pair: pair[1].rank, default=None)


def _shared_load(standings: Sequence[Sequence[Standing]]) -> tuple[float, ...] | None:
    """Returns the load that most devices can run, the heaviest of several such; each device counts once."""
    loads = [load for each in standings for load in {one.load for one in each}]
    return max(loads, key=lambda load: (loads.count(load), load)) if loads else None


def _at(standings: Iterable[Standing], load: tuple[float, ...]) -> Standing | None:
    return next((one for one in standings if one.load == load), None)


# Most devices behind the best that are named.
NAMED = 3
# Ranks that differ by less than this share count as equal.
SAME = 0.005


def _ranked(group: Sequence[tuple[str, Standing]]) -> str:
    """Returns the ranking of the devices of one basis in words, best first."""
    ordered = sorted(group, key=lambda pair: pair[1].rank)
    (name, best), *others = ordered
    text = f"{name} {best.figure} ({best.label})"
    if not others:
        return text
    verdict = "is hardly better than the next" if _as_good(best, others[0][1]) else "is best"
    verdict = verdict if best.enough else "is nearest to what is promised, which none keeps"
    behind = ", ".join(f"{other} {one.figure}{_slower(best, one)}" for other, one in others[:NAMED])
    behind += f", and {len(others) - NAMED} more are behind these" if len(others) > NAMED else ""
    return f"{name} {verdict}: it {best.figure} ({best.label}), {behind}"


def _as_good(best: Standing, other: Standing) -> bool:
    if best.rank[:-1] != other.rank[:-1]:
        return False
    return other.rank[-1] <= best.rank[-1] * (1.0 + SAME)


def _slower(best: Standing, other: Standing) -> str:
    differs = "" if other.label == best.label else f", {other.label}"
    if not best.seconds or other.seconds is None:
        return f" ({differs[2:]})" if differs else ""
    ratio = other.seconds / best.seconds
    return f" ({'as long' if abs(ratio - 1.0) < SAME else f'{ratio:.3g} times as long'}{differs})"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
