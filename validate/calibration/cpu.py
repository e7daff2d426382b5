"""Fits a price profile of this machine: two constants for each kind of op and dtype, and the host's costs.

    seconds = launches * kernel_s + floor_s / efficiency          (simcore.devices.fit)
    seconds = median of the kernel (cpu_times) + the machine's time around it (cpu_host)

Torch computes on one thread, here as in runs.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from simcore.devices.fitted import FitRow, FittedProfile
from simcore.devices.making import Point, check_target, fits, write_whole
from simcore.devices.price import pricer, roofline
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.table import TABLE, Kernel
from simcore.ops.op import Op
from simcore.studies.common import Progress
from simcore.validate.calibration.cpu_grid import grid
from simcore.validate.calibration.cpu_host import host_costs, operand_costs
from simcore.validate.calibration.records import NAME, birth_of, measured_on, profile_path, what_is_odd
from simcore.validate.machines.cpu.machine import one_thread
from simcore.validate.timing.cpu_times import CACHE, Clock, measure, rates

__all__ = ["NAME", "calibrate", "processor", "profile_path"]

# Total time of measuring all shapes, in seconds.
TOTAL_S, QUICK_S = 24.0, 4.0


def calibrate(
    device: str,
    target: Path,
    quick: bool,
    progress: Progress,
    *,
    table: Mapping[str, Kernel] = TABLE,
    shapes: Sequence[Op] | None = None,
    total_s: float | None = None,
    clock: Clock = time.perf_counter,
) -> FittedProfile:
    """Measures, fits and writes the profile folder `target`, completely or not at all.

    `table`: the kernels; `shapes`: the ops to measure, by default `cpu_grid` of all kinds; `total_s`:
    approximate time for it, by the `clock`. Raises InputError if the device is no CPU, or if `target` holds
    anything except an earlier calibration.
    """
    if device != "cpu":
        raise InputError(f"--on {device}: only cpu can be calibrated")
    check_target(target, device)
    one_thread()
    spec, shapes = load_device(device), grid(table, quick=quick) if shapes is None else shapes
    points = measure(
        table, shapes, roofline(spec), total_s or (QUICK_S if quick else TOTAL_S), progress, clock
    )
    progress("runs of small models", len(points), len(shapes))
    op_s, launch_s, wait_s = host_costs()
    # The kernels' own times come first; the rest of an op's time in a run is the cost around the kernel.
    alone = _profile(device, quick, points, fits(points, {}, 0.0, CACHE))
    around_s = operand_costs(pricer(spec, profile=alone)) if table is TABLE else {}
    versions = {name: version(name) for name in ("torch", "numpy")} | {"python": platform.python_version()}
    profile: FittedProfile = replace(
        cast(Any, alone),
        fits=fits(points, around_s, op_s, CACHE),
        # A CPU captures nothing: a launch within another one is one more.
        overheads={"launch_s": launch_s, "within_s": launch_s, "wait_s": wait_s},
        birth=birth_of(points, processor(), versions, {**rates(quick), "host_op_s": op_s}),
        notes=(f"operands come from the {CACHE} where they fit into it", *what_is_odd(points, table)),
    )
    write_whole(profile, points, target)
    return profile


def _profile(device: str, quick: bool, points: Sequence[Point], found: tuple[FitRow, ...]) -> FittedProfile:
    """Returns a profile with its name and fits only."""
    return FittedProfile(
        name=NAME,
        title=f"{processor()}, {torch.get_num_threads()} thread of torch",
        source=measured_on(processor(), datetime.now(UTC).isoformat(), device, quick, len(points)),
        device=device,
        granularity="fitted",
        fits=found,
        overheads={},
    )


def processor() -> str:
    """Returns the system's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
