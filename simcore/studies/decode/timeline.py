"""The timeline of one layer of attention-level speculation on every rank, as in ALSpec's Figure 6, from the
beginning of one exchange of priorities to the end of the next.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from simcore.machine import mesh as layout
from simcore.machine.trace import Span, Trace, op_events
from simcore.models.decoder import GROUP, TENSOR
from simcore.studies.decode.runner import Bench, Case, Hits, mesh_of
from simcore.studies.decode.speculation import CountHits


def shown_case(fitting: Sequence[Case]) -> Case:
    """Returns the case whose trace is kept: two-group speculation if there is any, at the longest context and
    the largest batch, on most devices, with most hits."""

    def order(case: Case) -> tuple[bool, int, int, int, float]:
        axes = case.axes
        speculates = axes.strategy == "alspec"
        return speculates, case.context, axes.batch, axes.devices, axes.hit_rate or 0.0

    return max(fitting, key=order)


def timeline(bench: Bench, shown: Case) -> list[dict[str, Any]]:
    """Returns the events of one layer, from one exchange of priorities to the end of the next, for a hit and
    for a miss (ALSpec Figure 6); empty if a model has fewer than four layers, so that none is an inner
    one."""
    layers = bench.config.layers
    if layers < 4:
        return []
    inner = range(1, layers - 2)
    mixed = CountHits(layers // 2, layers)
    runs: list[tuple[CountHits, tuple[str, ...]]]
    if {mixed(0, layer) for layer in inner} == {True, False}:
        runs = [(mixed, ("hit", "miss"))]
    else:
        # A single inner layer shows only one of the two: hit and miss need a run each.
        runs = [(CountHits(layers, layers), ("hit",)), (CountHits(0, layers), ("miss",))]
    events: list[dict[str, Any]] = []
    for pattern, outcomes in runs:
        hits = Hits(0.5, ((1.0, pattern),), False, "")
        bench_case = replace(shown, hits=hits, axes=replace(shown.axes, hit_rate=0.5))
        trace = bench.trace(bench_case)
        if trace.spans and all(span.graph != "exchange" for span in trace.spans):
            # Where a token is one graph, nobody knows when its parts began.
            return []
        for outcome in outcomes:
            layer = next(i for i in inner if pattern(0, i) is (outcome == "hit"))
            title = f"{shown.axes.label}, {shown.context:,} tokens"
            events += _layer_events(trace, bench_case, layer, title, outcome)
    return events


def _layer_events(trace: Trace, case: Case, layer: int, title: str, outcome: str) -> Iterator[dict[str, Any]]:
    exchanges: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.graph == "exchange" and span.state != "flags":
            exchanges[span.rank].append(span)
    start_s = min(spans[layer].start_s for spans in exchanges.values())
    end_s = max(spans[layer + 1].end_s for spans in exchanges.values())
    mesh = mesh_of(case.axes)
    last_end_s: dict[int, float] = {}
    for span in sorted(trace.spans, key=lambda s: (s.start_s, s.end_s, s.id)):
        if span.end_s <= start_s or span.start_s >= end_s:
            continue
        common = {
            "case": title,
            "outcome": outcome,
            "rank": span.rank,
            "group": layout.coordinate(mesh, span.rank, GROUP),
            "tensor": layout.coordinate(mesh, span.rank, TENSOR),
            "stream": span.stream,
        }
        if span.stream == "main":
            since_s = last_end_s.get(span.rank, start_s)
            if span.start_s > since_s:
                times = {"start_s": since_s, "end_s": span.start_s}
                yield {**common, "name": "waiting", "op_kind": "idle", **times, "state": "waiting"}
            last_end_s[span.rank] = span.end_s
        state = {"skipped": "skipped", "flags": "skipped", "wire": "wire"}.get(span.state, "run")
        for name, kind, from_s, to_s in op_events(span):
            times = {"start_s": max(from_s, start_s), "end_s": min(to_s, end_s)}
            if times["end_s"] >= times["start_s"]:
                yield {**common, "name": name, "op_kind": kind, **times, "state": state}
