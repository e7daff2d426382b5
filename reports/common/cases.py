"""The cases of a run: the constants along the axis of a figure, as axes with their values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

Case = tuple[tuple[str, Any], ...]


def cases_of(frame: pd.DataFrame, axes: Sequence[str], *, unknown: bool = False) -> list[Case]:
    """Returns the cases of a frame in the order of their axes. Axes that the frame lacks are left out; cases
    that are unknown in an axis also, unless `unknown`."""
    own = [axis for axis in axes if axis in frame.columns]
    if not own:
        return [()] if len(frame) else []
    places = frame[own] if unknown else frame[own].dropna()
    places = places.drop_duplicates().sort_values(own, kind="stable")
    return [tuple(zip(own, place, strict=True)) for place in places.itertuples(index=False, name=None)]


def at(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """Returns the rows of a case, by those of its axes that the frame has."""
    chosen = np.ones(len(frame), dtype=bool)
    for axis, value in case:
        if axis in frame.columns and frame[axis].notna().any():
            chosen &= (frame[axis] == value).to_numpy()
    return frame[chosen]
