"""Flash-Decoding's steps against plain attention in float64, at odd shapes and any number of parts."""

import math
import random

import pytest
import torch

from simcore.kernels.table import TABLE
from simcore.ops.flash_decoding import flash_attention_2, flash_decoding

torch.set_num_threads(1)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q K^T / sqrt(d)) V, a query head after the other."""
    out = torch.full_like(q, math.nan)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[b, h // group] @ q[b, h] / math.sqrt(q.shape[2])
            out[b, h] = torch.softmax(scores, 0) @ v[b, h // group]
    return out


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("seed", range(8))
def test_parts_combine_to_the_whole(seed: int, dtype: str) -> None:
    draw = random.Random(seed)
    kv_heads, context = draw.choice([1, 2, 3]), draw.choice([1, 2, 7, 64, 129, 300])
    sizes = {"batch": draw.randint(1, 3), "kv_heads": kv_heads, "head_dim": draw.choice([1, 5, 16, 33])}
    sizes |= {"q_heads": kv_heads * draw.choice([1, 2, 5]), "context": context}
    splits = draw.choice([s for s in (1, 2, 3, 5, 8, 63, 300) if s <= context])
    whole = flash_attention_2(**sizes, dtype=dtype)
    parts = flash_decoding(**sizes, splits=splits, dtype=dtype)
    q, k, v = TABLE["flash_decoding"].inputs(parts, torch.Generator().manual_seed(seed), torch.device("cpu"))
    truth = plain(q.double(), k.double(), v.double())
    bound = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 1e-3, "bf16": 4e-3}[dtype]
    for op in (whole, parts):
        out = TABLE[op.kind].run(op, q, k, v)
        assert out.dtype == q.dtype
        assert float((out.double() - truth).norm() / truth.norm()) < bound


def test_an_empty_part_adds_nothing() -> None:
    # 5 tokens in 4 parts of 2: the last part has none.
    op = flash_decoding(batch=1, q_heads=2, kv_heads=1, head_dim=3, context=5, splits=4, dtype="fp64")
    q, k, v = TABLE["flash_decoding"].inputs(op, torch.Generator().manual_seed(1), torch.device("cpu"))
    outputs, logs = TABLE["split_attention"].run(op, q, k, v)
    assert logs[0, 0, 3] == -math.inf
    assert not outputs.isnan().any()
    assert torch.allclose(TABLE["combine_splits"].run(op, outputs, logs), plain(q, k, v), rtol=1e-12)
