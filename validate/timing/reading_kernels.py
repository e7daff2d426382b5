# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""Kernels that measure a card: one that reads (sum_i x_i, by parts), and one that does nothing."""

import triton
import triton.language as tl


@triton.jit
def nothing_kernel(x_ptr):
    """Does nothing."""
    if tl.program_id(0) < 0:
        tl.store(x_ptr, 0)


@triton.jit
def read_kernel(x_ptr, out_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The sum of every so many blocks of x: only the reads cost time."""
    first = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))
