"""Writes one self-contained HTML page from a run directory.

    build(run_dir) -> run_dir / "report.html"
    comparison(run_dir, run_dir, page) -> both beside each other
    build_index(folder) -> folder / "index.html", every run directory below

A new study adds a folder with its sections and figures (see `decode/`) and one line in `STUDIES`. Sections
that every study shows are in `common/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simcore.input.drafts import write_text
from simcore.input.files import InputError
from simcore.reports.common import sections as sections_common
from simcore.reports.comparing import sections as sections_comparing
from simcore.reports.comparing.sides import read_side
from simcore.reports.comparing.words import Line, as_data, compared, lines
from simcore.reports.decode import sections as sections_decode
from simcore.reports.listing import build_index
from simcore.reports.operators import sections as sections_operators
from simcore.reports.page import Opening, Section, render
from simcore.reports.planning import sections as sections_planning
from simcore.reports.planning.points import FILE, read_plan
from simcore.reports.run import Run, read_run
from simcore.reports.serving import sections as sections_serving
from simcore.reports.tiling import sections as sections_tiling
from simcore.reports.validation import sections as sections_validation

__all__ = ["build", "build_index", "comparison"]

Study = tuple[Callable[[Run], Opening], Callable[[Run], list[Section]]]

STUDIES: Mapping[str, Study] = {
    "decode": (sections_decode.opening, sections_decode.sections),
    "serving": (sections_serving.opening, sections_serving.sections),
    "tiling": (sections_tiling.opening, sections_tiling.sections),
    "linear_attention": (sections_operators.opening, sections_operators.sections),
    "decode_attention": (sections_operators.opening, sections_operators.sections),
    "prompt": (sections_operators.opening, sections_operators.sections),
}
ANY_STUDY: Study = (sections_common.opening, sections_common.sections)


def build(run_dir: Path) -> Path:
    """Writes `report.html` into a run directory and returns its path.

    The same files give the same bytes. If the run is a validation, its ladder opens the page. Every file
    except results.csv (or ladder.csv) is optional; without it the page leaves its section out. Raises
    FileNotFoundError if both results.csv and ladder.csv are missing. Raises ValueError, one line that names
    the file, if a file exists but cannot be read.
    """
    page = Path(run_dir) / "report.html"
    if (Path(run_dir) / FILE).is_file():
        plan = read_plan(Path(run_dir))
        # Ratios of tiny figures overflow; numpy's warning would say nothing about the plan.
        with np.errstate(all="ignore"):
            content = render(sections_planning.opening(plan), sections_planning.sections(plan))
        write_text(page, content)
        return page
    run = read_run(Path(run_dir))
    opening, sections = STUDIES.get(run.study, ANY_STUDY)
    if len(run.ladder):
        opening = sections_validation.opening
    # A validation compares measured figures, not published ones; only the ladder shows them.
    alone = run if run.ladder.empty else replace(run, comparison=run.comparison.head(0))
    # Ratios of tiny figures overflow; numpy's warning would say nothing about the run.
    with np.errstate(all="ignore"):
        shown = [*sections_validation.sections(run), *sections(alone)]
        content = render(opening(run), shown)
    write_text(page, content)
    return page


def comparison(a: Path, b: Path, page: Path | None = None) -> tuple[dict[str, Any], list[Line]]:
    """Compares two run directories, and writes a page of it if one is named. Returns the comparison as JSON's
    types, and a line for each metric that differs. Raises InputError, one line, if a directory cannot be
    read, they are of different studies or kinds, or the page cannot be written; OSError if
    its folder cannot."""
    one, other = read_side(Path(a)), read_side(Path(b))
    if (one.kind, one.study) != (other.kind, other.study):
        raise InputError(f"{a} is {one.what}, {b} is {other.what}; two of the same are needed")
    found = compared(one, other)
    if page is not None:
        # Ratios of tiny figures overflow; numpy's warning would say nothing about the runs.
        with np.errstate(all="ignore"):
            content = render(sections_comparing.opening(found), sections_comparing.sections(found))
        page.parent.mkdir(parents=True, exist_ok=True)
        write_text(page, content)
    return as_data(found), lines(found)
