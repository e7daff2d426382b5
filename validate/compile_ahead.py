"""Compiles what a calibration will launch, in several processes at a time.

Triton compiles a kernel where it is first launched, for half a second or so, and keeps it in a folder that
all processes share. Measuring goes on in one process, so that nothing runs beside what is timed; compiling
does not have to. Each process launches its share of the ops once.
"""

import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

import torch

from kernels.streams import Buffers, one_stream
from kernels.table import TABLE
from simcore.ops import Op

MOST_PROCESSES = 14
# Launches of more bytes use kernels that those of fewer have compiled, but for few; and memory is shared.
MOST_BYTES = 1.5e9
# Of cached memory a process keeps no more than this.
KEPT_BYTES = 2 << 30
ORDER_SEED = 1


def processes(cores: int) -> int:
    """How many: one core is left to whatever else runs.

    >>> processes(1), processes(16), processes(128)
    (1, 14, 14)
    """
    return max(1, min(MOST_PROCESSES, cores - 1))


def compile_ahead(ops: Sequence[Op]) -> int:
    """Launches ops once each, in other processes; gives how many of them could be launched. What fails here
    fails when it is measured, and is noted there."""
    small = [op for op in ops if op.work.hbm_bytes <= MOST_BYTES]
    # So that no process gets all that take long to compile.
    random.Random(ORDER_SEED).shuffle(small)
    count = processes(os.cpu_count() or 1)
    shares = [small[i::count] for i in range(count)]
    try:
        with ProcessPoolExecutor(count, get_context("spawn")) as pool:
            return sum(pool.map(_launched, shares))
    except (BrokenProcessPool, OSError):
        # Measuring compiles what is not there.
        return 0


def _launched(ops: Sequence[Op]) -> int:
    torch.set_num_threads(1)
    buffers: Buffers = {}
    launch = partial(_launch, device=torch.device("cuda"))
    with torch.inference_mode(), one_stream(buffers):
        return sum(map(launch, ops))


def _launch(op: Op, device: torch.device) -> bool:
    kernel = TABLE[op.kind]
    try:
        kernel.run(op, *kernel.inputs(op, torch.Generator(device).manual_seed(0), device))
        torch.cuda.synchronize()
    except Exception:
        return False
    finally:
        if torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()
    return True
