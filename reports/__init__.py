"""A run directory becomes one self-contained HTML page.

    build(run_dir) -> run_dir / "report.html"

A study adds its own sections and figures (a folder, as `decode/`) and one line in
`STUDIES`; what every study shows alike is in `common/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from simcore.input.drafts import write_text
from simcore.reports.common import sections as sections_common
from simcore.reports.decode import sections as sections_decode
from simcore.reports.operators import sections as sections_operators
from simcore.reports.page import Opening, Section, render
from simcore.reports.run import Run, read_run
from simcore.reports.serving import sections as sections_serving
from simcore.reports.tiling import sections as sections_tiling
from simcore.reports.validation import sections as sections_validation

__all__ = ["build"]

Study = tuple[Callable[[Run], Opening], Callable[[Run], list[Section]]]

STUDIES: Mapping[str, Study] = {
    "decode": (sections_decode.opening, sections_decode.sections),
    "serving": (sections_serving.opening, sections_serving.sections),
    "tiling": (sections_tiling.opening, sections_tiling.sections),
    "linear_attention": (sections_operators.opening, sections_operators.sections),
    "decode_attention": (sections_operators.opening, sections_operators.sections),
}
ANY_STUDY: Study = (sections_common.opening, sections_common.sections)


def build(run_dir: Path) -> Path:
    """Writes `report.html` into a run directory and returns its path.

    The same files give the same bytes. A validation's ladder opens the page. Raises FileNotFoundError where
    results.csv is missing, and there is no ladder either; every
    other file is optional, and what it would have shown is left out. Raises ValueError, with one line
    that names the file, where a file is there and cannot be read.
    """
    run = read_run(Path(run_dir))
    opening, sections = STUDIES.get(run.study, ANY_STUDY)
    if len(run.ladder):
        opening = sections_validation.opening
    # What is compared in a validation was measured, not published, and stands with the ladder alone.
    alone = run if run.ladder.empty else replace(run, comparison=run.comparison.head(0))
    # Ratios of figures that are next to nothing are beyond any number, which is no news of the run.
    with np.errstate(all="ignore"):
        shown = [*sections_validation.sections(run), *sections(alone)]
        content = render(opening(run), shown)
    page = Path(run_dir) / "report.html"
    write_text(page, content)
    return page
