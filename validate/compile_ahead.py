"""Compiles what a calibration will launch, in several processes at a time.

Triton compiles a kernel where it is first launched, for a second or so, and keeps it in a folder that all
processes share. Measuring goes on in one process, so that nothing runs beside what is timed; compiling does
not have to. Each process launches a few ops once, then takes the next few: ops that are alike, of which all
but the first find their kernel compiled.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from kernels.streams import one_stream
from kernels.table import TABLE
from simcore.ops import Op

MOST_PROCESSES = 14
# Ops that move more launch what those that move less have compiled, and memory is shared.
MOST_BYTES = 2e8
AT_A_TIME = 4
# Of cached memory a process keeps no more than this.
KEPT_BYTES = 1 << 30


def processes(cores: int) -> int:
    """How many: one core is left to whatever else runs.

    >>> processes(1), processes(16), processes(128)
    (1, 14, 14)
    """
    return max(1, min(MOST_PROCESSES, cores - 1))


def compile_ahead(ops: Sequence[Op], within_s: float) -> int:
    """Launches ops once each, in other processes; gives how many of them could be launched `within_s`. What
    fails here fails when it is measured, and is noted there; what there was no time for is compiled there."""
    small = sorted((op for op in ops if op.work.hbm_bytes <= MOST_BYTES), key=_alike)
    shares = [small[i : i + AT_A_TIME] for i in range(0, len(small), AT_A_TIME)]
    launched, others = 0, {*multiprocessing.active_children()}
    with ProcessPoolExecutor(
        processes(os.cpu_count() or 1), multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        try:
            for count in pool.map(_launched, shares, timeout=within_s):
                launched += count
        except (BrokenProcessPool, TimeoutError):
            pool.shutdown(wait=False, cancel_futures=True)
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()
    return launched


def _alike(op: Op) -> tuple[object, ...]:
    return op.kind, op.dtype, *(size for _, size in op.shape)


def _launched(ops: Sequence[Op]) -> int:
    with torch.inference_mode(), one_stream({}):
        launched = sum(map(_launch, ops))
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    return launched


def _launch(op: Op) -> bool:
    kernel, device = TABLE[op.kind], torch.device("cuda")
    try:
        kernel.run(op, *kernel.inputs(op, torch.Generator(device).manual_seed(0), device))
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
