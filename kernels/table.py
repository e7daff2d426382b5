"""The table of kernels by op kind: `run` on the device and `reference` in plain torch.

    TABLE[op.kind].run(op, *tensors)        op bound: all its dimensions are numbers

Each family of ops has a package of its own.
"""

from collections.abc import Mapping

from simcore.kernels.decoder import DECODER
from simcore.kernels.flash_decoding import FLASH_DECODING
from simcore.kernels.kernel import Kernel, dtype_of
from simcore.kernels.linear_attention import LINEAR_ATTENTION
from simcore.kernels.long_convolution import LONG_CONVOLUTION

__all__ = ["TABLE", "Kernel", "dtype_of"]

TABLE: Mapping[str, Kernel] = {**DECODER, **FLASH_DECODING, **LINEAR_ATTENTION, **LONG_CONVOLUTION}
