"""Causal linear attention with decay, six methods and a single step: op kind -> kernel.

A method takes (op, q, k, v, decay=None, state=None), a step (op, q, k, v, state, decay=None); both return
(output, final state). `simcore.kernels.linear_attention.naive` is their specification.
"""

from collections.abc import Mapping

from simcore.kernels.kernel import Kernel
from simcore.kernels.linear_attention.block_based import block_based
from simcore.kernels.linear_attention.causal_dot_product import causal_dot_product
from simcore.kernels.linear_attention.dispatch import by_tensors, step_by_tensors
from simcore.kernels.linear_attention.fleet import fleet
from simcore.kernels.linear_attention.inputs import inputs, step_inputs
from simcore.kernels.linear_attention.layer import LAYER
from simcore.kernels.linear_attention.lightning import lightning
from simcore.kernels.linear_attention.recursion import recursion
from simcore.kernels.linear_attention.step import step
from simcore.kernels.linear_attention.vanilla import vanilla

LINEAR_ATTENTION: Mapping[str, Kernel] = {
    "linear_attention_vanilla": Kernel(vanilla, vanilla, inputs),
    "linear_attention_causal_dot_product": Kernel(
        by_tensors("causal_dot_product", causal_dot_product), causal_dot_product, inputs
    ),
    "linear_attention_causal_dot_product_torch": Kernel(causal_dot_product, causal_dot_product, inputs),
    "linear_attention_block_based": Kernel(block_based, block_based, inputs),
    "linear_attention_recursion": Kernel(recursion, recursion, inputs),
    "linear_attention_lightning": Kernel(by_tensors("lightning", lightning), lightning, inputs),
    "linear_attention_lightning_torch": Kernel(lightning, lightning, inputs),
    "linear_attention_fleet": Kernel(by_tensors("fleet", fleet), fleet, inputs),
    "linear_attention_fleet_torch": Kernel(fleet, fleet, inputs),
    "linear_attention_step": Kernel(step_by_tensors, step, step_inputs),
    **LAYER,
}
