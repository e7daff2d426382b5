"""The study `tiling`: a generation of a long-convolution model by schedule (Flash Inference, section 4).

    lazy, eager     O(L^2) mixer work          fractal, generic, relaxed     O(L log^2 L)

Times are from simulated (or real) runs of the schedules; FLOPs and bytes are from all ops that they launch.
"""

from simcore.studies.tiling.cases import Case, cases
from simcore.studies.tiling.published import TilingPublished, inside
from simcore.studies.tiling.runner import AT_ONCE, LAW, Bench
from simcore.studies.tiling.study import launched, run, tape

__all__ = ["AT_ONCE", "LAW", "Bench", "Case", "TilingPublished", "cases", "inside", "launched", "run", "tape"]
