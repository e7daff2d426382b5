"""Kernels of the ops that decoding and serving launch, by op kind."""

from collections.abc import Mapping

from kernels.decoder.activation import ACTIVATION
from kernels.decoder.attention import PAGED_ATTENTION, PREFILL_ATTENTION
from kernels.decoder.cache import KV_APPEND, KV_COPY, RECEIVE_SPECULATION
from kernels.decoder.choice import SAMPLE
from kernels.decoder.decode_attention import DECODE_ATTENTION
from kernels.decoder.embedding import EMBEDDING
from kernels.decoder.matmul import MATMUL
from kernels.decoder.norm import NORM
from kernels.decoder.residual import RESIDUAL
from kernels.decoder.rotary import ROTARY
from kernels.decoder.speculative_attention import SPECULATIVE_ATTENTION
from kernels.kernel import Kernel

DECODER: Mapping[str, Kernel] = {
    "matmul": MATMUL,
    "embedding": EMBEDDING,
    "norm": NORM,
    "rotary": ROTARY,
    "activation": ACTIVATION,
    "residual": RESIDUAL,
    "kv_append": KV_APPEND,
    "decode_attention": DECODE_ATTENTION,
    "speculative_attention": SPECULATIVE_ATTENTION,
    "receive_speculation": RECEIVE_SPECULATION,
    "paged_attention": PAGED_ATTENTION,
    "prefill_attention": PREFILL_ATTENTION,
    "kv_copy": KV_COPY,
    "sample": SAMPLE,
}
