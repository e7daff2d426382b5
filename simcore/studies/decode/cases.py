"""The points of a decode scenario: every strategy variant at every context, batch and rate of hits.

cases = sum over strategies of ranks * contexts * batches * hit rates, and the baseline's
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, cast

from simcore.input.fields import MOST_RUNS, single_valued
from simcore.input.files import InputError, unknown_name
from simcore.models.decoder import why_not
from simcore.studies.common import Axes
from simcore.studies.decode.runner import Bench, Case, HitRow, Hits
from simcore.studies.decode.scenario import (
    AlSpec,
    AlSpecPipelined,
    DecodeScenario,
    DecodeStrategies,
    DecodeStrategy,
    LayerHits,
    PublishedHits,
    RateHits,
    TensorParallel,
    own_label,
    variants,
)
from simcore.studies.decode.speculation import LayerHits as LayerPattern
from simcore.studies.decode.speculation import RateHits as RatePattern
from simcore.studies.decode.speculation import balanced, hit_draws
from simcore.studies.own import is_own, name_of


def hits_of(
    strategy: AlSpec | AlSpecPipelined, scenario: DecodeScenario, layers: int, tables: Sequence[HitRow]
) -> list[Hits]:
    """Returns the values of a strategy's hits. Raises InputError if a list has not one probability per layer,
    or a task or a threshold is not in the paper's tables."""
    hits = strategy.hits
    seeds = [scenario.seed + replica for replica in range(scenario.replicas)]
    if isinstance(hits, LayerHits):
        if len(hits.probabilities) != layers:
            raise InputError(
                f"hits.probabilities: has {len(hits.probabilities)} values, the model has {layers} layers"
            )
        patterns = [LayerPattern(tuple(hits.probabilities), seed) for seed in seeds]
        draws = tuple((1.0 / len(seeds), pattern) for pattern in patterns)
        rate = mean(hits.probabilities)
        text = f"a probability for each layer, {rate:.1%} on average, at random"
        return [Hits(rate, draws, True, text, way="hits by layer")]
    if isinstance(hits, RateHits):
        return [_rate_hits(rate, hits.draw, layers, seeds, None) for rate in hits.value]
    found = [_table_row(hits, threshold, tables) for threshold in hits.threshold]
    return [_rate_hits(row.hit_rate, hits.draw, layers, seeds, row) for row in found]


def _rate_hits(rate: float, draw: Any, layers: int, seeds: Sequence[int], row: HitRow | None) -> Hits:
    origin = f", from {row.task} at threshold {row.threshold:g}" if row else ""
    of = f" of {row.task}" if row else ""
    if draw == "random":
        draws = tuple((1.0 / len(seeds), RatePattern(rate, seed)) for seed in seeds)
        text = f"{rate:.1%} of the layers, drawn at random{origin}"
        return Hits(rate, draws, True, text, row, f"hits{of} at random")
    counted = tuple(balanced(hit_draws(rate, layers, draw)))
    text = f"{rate:.1%} of {layers} layers, counted ({draw}){origin}"
    return Hits(rate, counted, False, text, row, f"hits{of} counted ({draw})")


def _table_row(hits: PublishedHits, threshold: float, tables: Sequence[HitRow]) -> HitRow:
    tasks = {row.task for row in tables}
    if not tasks:
        raise InputError(
            "hits.kind: ALSpec's tables are for llama-3.1-8b and llama-3.1-70b, not for this model"
        )
    if hits.task not in tasks:
        raise InputError(f"hits.task: {unknown_name('task', hits.task, tasks)}")
    rows = {row.threshold: row for row in tables if row.task == hits.task}
    if threshold not in rows:
        raise InputError(
            f"hits.threshold: no {threshold:g} in the tables (allowed: {', '.join(map(str, rows))})"
        )
    return rows[threshold]


def label_of(kind: str, ranks: int, groups: int, *, chunk: int | None = None, overlap: bool = True) -> str:
    """Returns the label of a strategy on `ranks` * `groups` devices."""
    devices = ranks * groups
    if kind == "tensor_parallel":
        return "tensor parallel, 1 device" if devices == 1 else f"tensor parallel, {devices} devices"
    name = f"ALSpec, {ranks}+{ranks} devices" if kind == "alspec" else f"ALSpec pipelined, {groups} devices"
    chunked = "" if chunk is None else f", chunk {chunk}"
    return name + chunked + ("" if overlap else ", last layer not overlapped")


def cases(bench: Bench) -> list[Case]:
    """Returns all points of a scenario, with the baseline. Raises InputError if one cannot run."""
    scenario = bench.scenario
    _check_contexts(bench)
    given: list[tuple[str, Case]] = []
    placed = [(f"strategies[{i}]", one) for i, each in enumerate(scenario.strategies) for one in _each(each)]
    for where, strategy in placed:
        for kind, ranks, groups in variants(strategy):
            _check(bench, ranks, groups, f"{where}.{_field(strategy, ranks)}")
            label = _strategy_label(strategy, ranks, groups)
            for context in scenario.context_tokens:
                for batch in scenario.batch:
                    axes = Axes(name_of(kind), label, ranks, groups, context, batch)
                    given += ((where, case) for case in _with_hits(bench, strategy, axes, where))
    found = [case for _, case in given]
    if scenario.baseline is not None:
        _check(bench, scenario.baseline.ranks, 1, "baseline.ranks")
        here = [Case(a, None, bench.hardware.chunk) for a in _baseline_axes(scenario)]
        found += [case for case in here if case not in found]
    if len(found) > MOST_RUNS:
        raise InputError(f"the lists multiply into {len(found):,} runs; at most {MOST_RUNS:,} are allowed")
    kinds: dict[str, str] = {}
    for case in found:
        if kinds.setdefault(case.axes.label, case.axes.strategy) != case.axes.strategy:
            raise InputError(f"strategies: {case.axes.label} is the label of two; each may be given once")
    if len(set(found)) < len(found):
        twice = next(case.axes.label for case in found if found.count(case) > 1)
        raise InputError(f"strategies: {twice} is given twice")
    return [*_told_apart(given), *found[len(given) :]]


def _told_apart(given: Sequence[tuple[str, Case]]) -> Iterator[Case]:
    """Yields cases, each given with the strategy that it is of. Where several strategies have one label and,
    as it is shown, one rate of hits, their labels say how hits come, with a number where that is the same."""
    rates: dict[tuple[str, str], dict[str, None]] = {}
    ways: dict[tuple[str, str], dict[str, None]] = {}
    for where, case in given:
        if case.hits is not None:
            rates.setdefault((case.axes.label, f"{case.hits.rate:.1%}"), {})[where] = None
            ways.setdefault((case.axes.label, case.hits.way), {})[where] = None
    alike = {label for (label, _), wheres in rates.items() if len(wheres) > 1}
    for where, case in given:
        label, hits = case.axes.label, case.hits
        if hits is None or label not in alike:
            yield case
            continue
        several = [*ways[label, hits.way]]
        number = f" ({several.index(where) + 1})" if len(several) > 1 else ""
        yield replace(case, axes=replace(case.axes, label=f"{label}, {hits.way}{number}"))


def _check_contexts(bench: Bench) -> None:
    """Raises InputError if a context is longer than the limit of the model, or of the second one."""
    scenario = bench.scenario
    if scenario.beyond_model_context:
        return
    # The first decoded token is part of its context.
    grown, longest = scenario.tokens - 1, max(scenario.context_tokens)
    for each, of_whom in ((bench, ""), (bench.rival, "rival_model: ")):
        limit = each.config.limit if each else None
        reason = limit.exceeded(longest + grown) if limit else None
        if reason:
            of = f" with tokens {scenario.tokens:,}" if grown else ""
            raise InputError(f"context_tokens: {longest:,}{of}: {of_whom}{reason}")


def _each(strategy: DecodeStrategies) -> Iterator[DecodeStrategies]:
    """Yields a strategy; of a user's own strategy, each variant."""
    yield from single_valued(strategy) if is_own(strategy.kind) else (strategy,)


def _strategy_label(strategy: DecodeStrategies, ranks: int, groups: int) -> str:
    if is_own(strategy.kind):
        return own_label(cast(DecodeStrategy, strategy))
    chunk = None if isinstance(strategy, TensorParallel) else strategy.chunk_tokens
    overlap = strategy.overlap_last_layer if isinstance(strategy, AlSpec) else True
    return label_of(strategy.kind, ranks, groups, chunk=chunk, overlap=overlap)


def _with_hits(bench: Bench, strategy: DecodeStrategies, axes: Axes, where: str) -> Iterator[Case]:
    if is_own(strategy.kind) or isinstance(strategy, TensorParallel):
        own = cast(DecodeStrategy, strategy) if is_own(strategy.kind) else None
        yield Case(axes, None, bench.hardware.chunk, own=own)
        return
    overlap = strategy.overlap_last_layer if isinstance(strategy, AlSpec) else True
    chunk = strategy.chunk_tokens or bench.hardware.chunk
    try:
        for hits in hits_of(strategy, bench.scenario, bench.config.layers, bench.hits):
            yield Case(replace(axes, hit_rate=hits.rate), hits, chunk, overlap)
    except InputError as error:
        raise InputError(f"{where}.{error}") from None


def _baseline_axes(scenario: DecodeScenario) -> list[Axes]:
    assert scenario.baseline is not None
    ranks = scenario.baseline.ranks
    label = label_of("tensor_parallel", ranks, 1)
    return [
        Axes("tensor_parallel", label, ranks, 1, context, batch)
        for context in scenario.context_tokens
        for batch in scenario.batch
    ]


def _check(bench: Bench, ranks: int, groups: int, where: str) -> None:
    if reason := cannot_run(bench, ranks, groups):
        raise InputError(f"{where}: {reason}")


def _field(strategy: Any, ranks: int) -> str:
    """Returns the field of a strategy that says on how many devices it runs: its kind, if with the least
    number of a group's ranks there are two groups all the same."""
    if isinstance(strategy, AlSpecPipelined):
        return "groups"
    return "kind" if isinstance(strategy, AlSpec) and ranks == 1 else "ranks"


def cannot_run(bench: Bench, ranks: int, groups: int) -> str | None:
    """Returns the reason why the model or the device cannot run such groups, or None if they can."""
    if reason := why_not(bench.config, ranks) or bench.hardware.usable(ranks):
        return reason
    if groups > 1 and bench.config.attention_layers < bench.config.layers:
        return f"{bench.config.name} has layers without attention to all tokens; none may be speculated"
    devices, most = ranks * groups, bench.hardware.max_devices
    if devices > most:
        return f"{devices} devices are needed, and the link of {bench.hardware.name} connects {most}"
    return None


def does_not_fit(bench: Bench, case: Case) -> str | None:
    """Returns the reason why a case does not fit into the memory of its devices, or None if it does."""
    model = bench.model(case)
    cache = model.kv_bytes(case.context + bench.scenario.tokens - 1) + model.state_bytes
    needed, have = model.weight_bytes + cache, bench.hardware.memory_bytes
    if needed <= have:
        return None
    held = "KV cache and states" if model.state_bytes else "KV cache"
    return f"weights and {held} take {needed / 1e9:.1f} of {have / 1e9:.0f} GB a device"


def rival_of(bench: Bench, case: Case) -> Case | None:
    """Returns tensor parallelism on the same number of devices, or None if it cannot run or does not fit."""
    devices = case.axes.devices
    if cannot_run(bench, devices, 1):
        return None
    label = label_of("tensor_parallel", devices, 1)
    axes = replace(case.axes, strategy="tensor_parallel", label=label, ranks=devices, groups=1, hit_rate=None)
    chunk, latency_s = bench.hardware.chunk, case.link_latency_s
    rival = Case(axes, None, chunk, link_latency_s=latency_s, free=case.free)
    return None if does_not_fit(bench, rival) else rival
