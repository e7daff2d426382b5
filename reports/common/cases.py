"""The cases of a run: what is equal along the axis of a figure, as axes with their values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

Case = tuple[tuple[str, Any], ...]


def cases_of(frame: pd.DataFrame, axes: Sequence[str], *, unknown: bool = False) -> list[Case]:
    """The cases of a frame in the order of their axes; axes that it does not have are left out, and so are
    cases that are `unknown` in one of them, unless asked for."""
    own = [axis for axis in axes if axis in frame.columns]
    if not own:
        return [()] if len(frame) else []
    places = frame[own] if unknown else frame[own].dropna()
    places = places.drop_duplicates().sort_values(own, kind="stable")
    return [tuple(zip(own, place, strict=True)) for place in places.itertuples(index=False, name=None)]


def at(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The rows of a case, as far as the frame knows its axes."""
    chosen = np.ones(len(frame), dtype=bool)
    for axis, value in case:
        if axis in frame.columns and frame[axis].notna().any():
            chosen &= (frame[axis] == value).to_numpy()
    return frame[chosen]
