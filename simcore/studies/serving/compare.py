"""Serving predictions beside published figures.

error_pct = 100 * (predicted - reference) / reference

Published figures are of whole runs, as benchmark clients measure them, so predictions here are too, whatever
part of a run a scenario measures.

An empty cell of a published figure means that its source does not say: it fits any value.
"""

from collections.abc import Iterable, Sequence
from math import isclose
from typing import Any

from simcore.studies.common import Row, ServingAxes, of_whole_runs
from simcore.studies.serving.published import ServingPublished

# Rates that come out of 1 / interval differ in the last bits.
SAME = 1e-6


def compare(
    rows: Iterable[Row], published: Sequence[ServingPublished], fitted: frozenset[str]
) -> tuple[list[dict[str, Any]], list[ServingPublished]]:
    """Lines of comparison.csv, and the figures that are of no row. A figure that something in `fitted` was
    fitted to (a profile, a constant) has the role "fitted": agreement with it is no evidence."""
    named: dict[tuple[str, str], list[Row]] = {}
    for row in of_whole_runs(rows):
        if row.value is not None:
            named.setdefault((row.axes.strategy, row.metric), []).append(row)
    table, alone = [], []
    for figure in published:
        here = [row for row in named.get((figure.strategy, figure.metric), []) if _fits(figure, row.axes)]
        table += [_line(figure, row, fitted) for row in here]
        alone += [] if here else [figure]
    return table, alone


def _fits(figure: ServingPublished, axes: Any) -> bool:
    assert isinstance(axes, ServingAxes)
    names = ("devices", "ranks", "requests", "rate_per_s", "prompt_tokens", "output_tokens")
    if figure.label and figure.label != axes.label:
        return False
    return all(_same(getattr(figure, name), getattr(axes, name)) for name in names)


def _same(said: float | None, here: float | None) -> bool:
    return said is None or (here is not None and isclose(said, here, rel_tol=SAME))


def _line(figure: ServingPublished, row: Row, fitted: frozenset[str]) -> dict[str, Any]:
    axes = row.axes
    assert isinstance(axes, ServingAxes)
    assert row.value is not None
    return {
        "strategy": axes.strategy,
        "label": axes.label,
        "devices": axes.devices,
        "ranks": axes.ranks,
        "requests": axes.requests,
        "rate_per_s": axes.rate_per_s,
        "prompt_tokens": axes.prompt_tokens,
        "output_tokens": axes.output_tokens,
        "metric": row.metric,
        "reference": figure.value,
        "predicted": row.value,
        "low": row.low,
        "high": row.high,
        "error_pct": 100.0 * (row.value - figure.value) / figure.value,
        "role": "fitted" if figure.fitted_by in fitted and figure.fitted_by else figure.role,
        "source": figure.source,
    }
