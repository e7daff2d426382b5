"""Which methods of linear attention have a Triton kernel, and for which tensors; plain torch runs elsewhere.

The causal dot product is what chunks compute too: both methods are one kernel. Kernels keep states in fp32,
and take rows of which each follows its last number on the one before; what lies otherwise is copied.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.kernel import Run, has_kernel
from kernels.linear_attention.step import step
from kernels.linear_attention.terms import Result
from kernels.linear_attention.triton_chunked import chunked_linear_attention
from kernels.linear_attention.triton_fleet import fleet_attention
from kernels.linear_attention.triton_step import linear_attention_step
from kernels.linear_attention.triton_tensors import WIDEST
from simcore.ops import Op

# By method.
TRITON: Mapping[str, Callable[..., Result]] = {
    "causal_dot_product": chunked_linear_attention,
    "lightning": chunked_linear_attention,
    "fleet": fleet_attention,
}


def is_taken(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute with tensors like q [.., rank] and v [.., dim]."""
    return has_kernel(q) and max(q.shape[-1], v.shape[-1]) <= WIDEST


def by_tensors(method: str, elsewhere: Run) -> Run:
    """A method's `run`: its Triton kernel where that takes the tensors, else `elsewhere`."""

    def run(
        op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
    ) -> Result:
        if not is_taken(q, v):
            return elsewhere(op, q, k, v, decay, state)  # type: ignore[no-any-return]
        before = None if state is None else _rows(state.float())
        return TRITON[method](_rows(q), _rows(k), _rows(v), _decay(decay), before)

    return run


def step_by_tensors(
    op: Op, q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> Result:
    """`step`, by its Triton kernel where that takes the tensors; the state has to be fp32 for that."""
    if not (is_taken(q, v) and state.dtype == torch.float32 and state.stride(-1) == 1):
        return step(op, q, k, v, state, decay)
    q, k, v = (_rows(x)[:, :, 0] for x in (q, k, v))
    return linear_attention_step(q, k, v, state, _decay(decay)).unsqueeze(2), state


def _rows(x: Tensor) -> Tensor:
    """x, or a copy in which the last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.new_empty(x.shape).copy_(x)


def _decay(decay: Tensor | None) -> Tensor | None:
    return None if decay is None else decay.contiguous()
