"""Kernels of the ops that decoding and serving launch, by op kind."""

from collections.abc import Mapping

from simcore.kernels.decoder.activation import ACTIVATION
from simcore.kernels.decoder.cache import KV_APPEND, KV_COPY, RECEIVE_SPECULATION
from simcore.kernels.decoder.choice import SAMPLE
from simcore.kernels.decoder.decode_attention import DECODE_ATTENTION
from simcore.kernels.decoder.embedding import EMBEDDING
from simcore.kernels.decoder.matmul import MATMUL
from simcore.kernels.decoder.norm import NORM
from simcore.kernels.decoder.paged_attention import PAGED_ATTENTION, PREFILL_ATTENTION
from simcore.kernels.decoder.quantize import QUANTIZE
from simcore.kernels.decoder.residual import RESIDUAL
from simcore.kernels.decoder.rotary import ROTARY
from simcore.kernels.decoder.speculative_attention import SPECULATIVE_ATTENTION
from simcore.kernels.kernel import Kernel

DECODER: Mapping[str, Kernel] = {
    "matmul": MATMUL,
    "embedding": EMBEDDING,
    "norm": NORM,
    "rotary": ROTARY,
    "activation": ACTIVATION,
    "residual": RESIDUAL,
    "quantize": QUANTIZE,
    "kv_append": KV_APPEND,
    "decode_attention": DECODE_ATTENTION,
    "speculative_attention": SPECULATIVE_ATTENTION,
    "receive_speculation": RECEIVE_SPECULATION,
    "paged_attention": PAGED_ATTENTION,
    "prefill_attention": PREFILL_ATTENTION,
    "kv_copy": KV_COPY,
    "sample": SAMPLE,
}
