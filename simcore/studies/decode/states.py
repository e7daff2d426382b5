"""What decode studies say of models whose layers differ, and of a second model beside the first.

cache     KV of the layers of attention at the context, and states of the others, of all sequences
sequences floor((memory - weights) / (KV and states of one sequence))        that a device holds
layer     sum of the prices of the ops of one layer with such a mixer, one after another
crossing  context at which latency(second model) - latency(first) changes its sign
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import floor

from simcore.models.decoder import Decoder
from simcore.studies.common import Axes, Crossing, Row, crossing
from simcore.studies.decode.answer import fit_warnings
from simcore.studies.decode.cases import cannot_run, does_not_fit
from simcore.studies.decode.runner import Bench, Case

# The most batches that an answer names.
FEW = 3
PASSES = "passes_rival_at_tokens"


def sequences_held(model: Decoder, memory_bytes: float, context: int) -> int:
    """Returns how many sequences of a context a device holds beside the weights."""
    # Both are of the model's batch.
    batch = model.batch if isinstance(model.batch, int) else 1
    one = (model.kv_bytes(context) + model.state_bytes) / batch
    return floor(max(0.0, memory_bytes - model.weight_bytes) / one)


def state_rows(bench: Bench, case: Case) -> Iterator[Row]:
    """Yields the memory and the layers of a case of a model with states, or beside one."""
    rival = bench.rival
    if case.hits is not None or not (bench.config.linear or (rival and rival.config.linear)):
        return
    axes, model = case.axes, bench.model(case)
    have = bench.hardware.memory_bytes
    yield Row(axes, "kv_bytes", model.kv_bytes(case.context), "B", source="of the layers of attention")
    yield Row(axes, "state_bytes", model.state_bytes, "B", source="of the others, at any context")
    held = sequences_held(model, have, case.context)
    yield Row(axes, "sequences_held", float(held), "", source="beside the weights, of this context each")
    price = bench.hardware.price(axes.ranks, case.link_latency_s, case.free)
    if not bench.hardware.parts:
        for mixer in dict.fromkeys(bench.config.layer_mixers):
            ops = [op.at({"context": case.context}) for op in model.layer(mixer)]
            count = bench.config.layer_mixers.count(mixer)
            text = f"of one of {count} layers, without its host"
            yield Row(axes, "layer_s", sum(price(op).seconds for op in ops), "s", source=text, op_kind=mixer)
    if rival is None or cannot_run(rival, axes.ranks, axes.groups):
        return
    other = sequences_held(rival.model(case), have, case.context)
    yield Row(axes, "rival_sequences_held", float(other), "", source=rival.config.name)
    if does_not_fit(rival, case) is None:
        latency_s, name = rival.latency_s(case), rival.config.name
        yield Row(axes, "rival_token_latency_s", latency_s, "s", source=name)
        yield Row(axes, "speedup_over_rival", latency_s / bench.latency_s(case), "x", source=f"over {name}")


def rival_warnings(bench: Bench, fitting: Sequence[Case]) -> list[str]:
    """Returns warnings of cases in which the second model cannot run or does not fit: they have no
    figures of it."""
    rival = bench.rival
    if rival is None:
        return []
    name = f"rival_model {rival.config.name}"
    found: dict[str, None] = {}
    reasons: dict[Case, str | None] = {}
    for case in (case for case in fitting if case.hits is None):
        if reason := cannot_run(rival, case.axes.ranks, case.axes.groups):
            found[f"{name}: {case.axes.label}: {reason}"] = None
        else:
            reasons[case] = does_not_fit(rival, case)
    return [*found, *(f"{name} {warning}" for warning in fit_warnings(reasons))]


def passes(bench: Bench, fitting: Sequence[Case]) -> list[tuple[Axes, Crossing, str]]:
    """Returns, for each strategy and batch that runs at two contexts on both models, where this model passes
    the second one, and that in words."""
    rival = bench.rival
    if rival is None:
        return []
    groups: dict[Axes, list[Case]] = {}
    for case in fitting:
        if case.hits is None and not cannot_run(rival, case.axes.ranks, case.axes.groups):
            groups.setdefault(replace(case.axes, context_tokens=None), []).append(case)
    found = []
    for axes, cases in groups.items():
        grid = sorted(case.context for case in cases if does_not_fit(rival, case) is None)
        if len(grid) < 2:
            continue
        where = _search(bench, rival, cases[0], grid)
        found.append((axes, where, _phrase(bench, rival, where, grid)))
    return found


def _search(bench: Bench, rival: Bench, case: Case, grid: Sequence[int]) -> Crossing:
    def gain(context: float) -> float:
        here = replace(case, axes=replace(case.axes, context_tokens=round(context)))
        return rival.latency_s(here) - bench.latency_s(here)

    return crossing(gain, grid, whole=True)


def _phrase(bench: Bench, rival: Bench, where: Crossing, grid: Sequence[int]) -> str:
    names, searched = f"{bench.config.name}", f"{grid[0]:,} to {grid[-1]:,} tokens"
    if not where.crossings:
        side = "faster" if where.ahead_at_low else "slower"
        return f"{names} is {side} than {rival.config.name} everywhere from {searched}"
    first = "slower" if where.ahead_at_low else "faster"
    at = f"{where.crossings[0]:,.0f} tokens"
    return f"{names} is {first} than {rival.config.name} from {at} on ({searched})"


def passing_rows(found: Sequence[tuple[Axes, Crossing, str]]) -> list[Row]:
    """Returns a row for each search of `passes`."""
    return [Row(axes, PASSES, where.at, "tokens", source=text) for axes, where, text in found]


def passing_answer(found: Sequence[tuple[Axes, Crossing, str]]) -> str:
    """Returns the results of the first searches, one a batch, as sentences; nothing if there are none."""
    several = len({axes.batch for axes, _, _ in found}) > 1
    by_batch = {axes.batch: text for axes, _, text in reversed(found)}
    said = [f" At batch {batch:,}, {by_batch[batch]}." for batch in sorted(by_batch)[:FEW]]
    return "".join(said) if several else "".join(f" {text}." for _, _, text in found[:1])
