"""What a server's memory leaves for its KV cache, by the rule of the engine that it runs.

With M bytes of device memory, W of weights, P of activations at their peak, R that libraries take besides
while the engine looks for its peak, and D that contexts and communicators hold before it looks at all:

    total   room = share M - W - P - R               vLLM
    free    room = share (M - D) - W - P - R         SGLang, whose activations take what is left (P = R = 0)
    rest    room = share (M - D - W - P - R)         TensorRT-LLM

    KV blocks = floor(room / (block_tokens * KV bytes of a token));  KV tokens = blocks * block_tokens

Everything is per rank: ranks of a group hold the same blocks, each its own heads of them.
"""

from math import floor

from simcore.models.served_decoder import ServedDecoder
from simcore.studies.hardware import Hardware
from simcore.studies.serving.scenario import KvMemory


def room_bytes(
    memory: KvMemory, share: float, hardware: Hardware, model: ServedDecoder, tokens: int, rows: int
) -> float:
    """Bytes of one rank that its KV cache may take; below zero where weights and activations do not fit.

    `share` stands for the rule's own. `tokens`, `rows`: of the largest step; rows are those that get a next
    token.
    """
    group = model.ranks > 1
    driver = memory.group_driver_bytes if group else memory.driver_bytes
    weights = model.split_weight_bytes if memory.splits_embedding else model.weight_bytes
    reserve = memory.group_reserve_bytes if group else memory.reserve_bytes
    taken = weights + _peak_bytes(memory, hardware, model, tokens, rows) + reserve
    if memory.share_of == "total":
        return share * hardware.memory_bytes - taken
    if memory.share_of == "free":
        return share * (hardware.memory_bytes - driver) - taken
    return share * (hardware.memory_bytes - driver - taken)


def blocks_in(room: float, model: ServedDecoder, block_tokens: int) -> int:
    """KV blocks of `block_tokens` tokens that so many bytes of a rank hold."""
    return floor(room / (model.kv_bytes_per_token * block_tokens))


def _peak_bytes(memory: KvMemory, hardware: Hardware, model: ServedDecoder, tokens: int, rows: int) -> float:
    if memory.peak == "widest_step":
        return model.activation_bytes(tokens, rows)
    if memory.peak == "profile_run":
        return model.profile_bytes(tokens, rows, hardware.processors)
    return 0.0
