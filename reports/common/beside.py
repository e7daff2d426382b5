"""Predicted figures of a validation beside the measured ones, in the same axes.

Both have labels of their own: "lazy, measured" and "lazy, predicted". A predicted line has the colour of the
measured one and is dashed; its marks are hollow.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from simcore.reports.common.figures import Variant
from simcore.reports.common.sections import Dimension
from simcore.reports.run import Run, Tables

MEASURED, PREDICTED = "measured", "predicted"


def beside(run: Run, shown: Sequence[Variant]) -> tuple[Run, list[Variant]]:
    """Returns the run with its predicted tables below the measured ones, and each variant twice; unchanged if
    nothing is predicted beside it."""
    if run.predicted.results.empty:
        return run, list(shown)
    names = [field.name for field in fields(Tables)]
    tables: dict[str, Any] = {name: _both(getattr(run, name), getattr(run.predicted, name)) for name in names}
    return replace(run, **tables), [each for variant in shown for each in _twice(variant)]


def pairs(alone: Sequence[Variant], shown: Sequence[Variant], opening: str = "") -> list[Dimension]:
    """Returns the choice between all lines and those of one strategy, which opens on the label `opening` or
    else on all; none if there is one strategy, or `shown`, of `beside`, is the strategies `alone`."""
    if len(shown) == len(alone) or len(alone) < 2:
        return []
    labels = [variant.label for variant in alone]
    of_one = zip(labels, zip(shown[::2], shown[1::2], strict=True), strict=True)
    return [("Strategy", [("all", shown), *of_one], 1 + labels.index(opening) if opening in labels else 0)]


def names_in_pairs(labels: Sequence[str]) -> list[str]:
    """Returns the names of rows: a predicted one below its measured one is called that and no more.

    >>> names_in_pairs(["lazy, measured", "lazy, predicted", "eager, predicted"])
    ['lazy, measured', 'predicted', 'eager, predicted']
    """
    measured = [f"{label.removesuffix(f', {PREDICTED}')}, {MEASURED}" for label in labels]
    above = zip(["", *labels], measured, labels, strict=False)
    return [PREDICTED if before == own else label for before, own, label in above]


def _twice(variant: Variant) -> tuple[Variant, Variant]:
    label = _named(variant.label, PREDICTED)
    predicted = replace(variant, label=label, symbol=f"{variant.symbol}-open", dash="dash")
    return replace(variant, label=_named(variant.label, MEASURED)), predicted


def _both(measured: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    kinds = ((measured, MEASURED), (predicted, PREDICTED))
    rows = [_labelled(own, word) for own, word in kinds if len(own)]
    return pd.concat(rows or [measured], ignore_index=True)


def _labelled(rows: pd.DataFrame, word: str) -> pd.DataFrame:
    return rows.assign(label=[_named(label, word) for label in rows["label"].astype(str)])


def _named(label: str, word: str) -> str:
    # Rows without a label are of no strategy.
    return f"{label}, {word}" if label else label
