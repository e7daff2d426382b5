"""The methods of linear attention that have a Triton kernel, and for which tensors; else plain torch runs.

The causal dot product computes the same as chunks: one kernel serves both methods. Kernels keep states in
fp32 and take rows whose last dimension is contiguous; other tensors are copied.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from simcore.kernels.kernel import Run, has_kernel
from simcore.kernels.linear_attention.step import step
from simcore.kernels.linear_attention.terms import Result
from simcore.kernels.linear_attention.triton_chunked import aligned, chunked_linear_attention
from simcore.kernels.linear_attention.triton_fleet import fleet_attention
from simcore.kernels.linear_attention.triton_step import linear_attention_step
from simcore.kernels.linear_attention.triton_tensors import WIDEST, WIDEST_VALUES
from simcore.ops.op import Op

# By method.
TRITON: Mapping[str, Callable[..., Result]] = {
    "causal_dot_product": chunked_linear_attention,
    "lightning": chunked_linear_attention,
    "fleet": fleet_attention,
}


# Methods whose products take states in the format of q; fp16 ends at 65504.
NARROW = frozenset({"causal_dot_product", "lightning"})


def is_taken(method: str, q: Tensor, *others: Tensor) -> bool:
    """Whether a method's kernel computes with q [.., rank] and others, k or v [.., dim]. No kernel has
    gradients."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others))
    wide = q.shape[-1] > WIDEST or max(x.shape[-1] for x in (q, *others)) > WIDEST_VALUES
    return has_kernel(q) and not (wanted or wide or (method in NARROW and q.dtype == torch.float16))


def by_tensors(method: str, elsewhere: Run) -> Run:
    """Returns a method's `run`: its Triton kernel if that takes the tensors, else `elsewhere`."""

    def run(
        op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
    ) -> Result:
        if not is_taken(method, q, k, v):
            return elsewhere(op, q, k, v, decay, state)  # type: ignore[no-any-return]
        before = None if state is None else _rows(state.float())
        # Laid out as q is: heads of a token side by side, or tokens of a head.
        by_token, (batch, heads, length, dim) = q.stride(1) < q.stride(2), (*q.shape[:3], v.shape[-1])
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2) if by_token else None
        return TRITON[method](_rows(q), _rows(k), _rows(v), _decay(decay), before, out=out)

    return run


def step_by_tensors(
    op: Op, q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> Result:
    """Runs `step`, by its Triton kernel if that takes the tensors; the state has to be fp32 for that."""
    if not (is_taken("step", q, k, v) and state.dtype == torch.float32 and state.stride(-1) == 1):
        return step(op, q, k, v, state, decay)
    q, k, v = (_rows(x)[:, :, 0] for x in (q, k, v))
    return linear_attention_step(q, k, v, state, _decay(decay)).unsqueeze(2), state


def _rows(x: Tensor) -> Tensor:
    """Returns x, or a copy whose last dimension is contiguous and whose rows of 16-bit numbers are aligned as
    kernels copy them."""
    good = x.stride(-1) == 1 and (x.element_size() > 2 or x.shape[-1] % 16 != 0 or aligned(x))
    return x if good else x.new_empty(x.shape).copy_(x)


def _decay(decay: Tensor | None) -> Tensor | None:
    return None if decay is None else decay.contiguous()
