"""Random inputs of decoding's attention, and what it has to give: float64, one sequence after another.

A cache is NaN wherever no token of a sequence lies: past its length, in the spare room between its rows,
in blocks that nobody owns. So whoever reads too far gives NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simcore.kernels.decoder.attention import attend

FP8 = torch.float8_e4m3fn
# The largest relative error of one sequence's output: 16-bit formats round the weights and the output.
BARS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for: heads, head dimension, formats, where the cache lies.

    `kv_dtype` None: the cache is in q's format. `block` 0: contiguous, else tokens of a block of a paged
    cache. `spare` lays q and the cache between rows that nobody reads, at addresses that are not round.
    """

    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    block: int = 0
    spare: bool = False

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def __str__(self) -> str:
        layout = f"blocks of {self.block}" if self.block else "contiguous"
        return (
            f"{self.kv_heads} x {self.group} heads of {self.head_dim}, q {NAMES[self.dtype]}, "
            f"kv {NAMES[self.stored]}, {layout}{', spare' * self.spare}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of one call: `tensors` are q, k, v, lengths; `options` what is named."""

    shape: Shape
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return self.tensors[3].tolist()


# -- making ------------------------------------------------------------------------------------------------


def make_case(
    shape: Shape,
    lengths: Sequence[int],
    seed: int,
    *,
    capacity: int | None = None,
    device: str = "cpu",
    queries: int | None = None,
    weight_outside: Sequence[float] | None = None,
    **options: Any,
) -> Case:
    """Normal numbers of these lengths. With `weight_outside` keys are moved so that the tokens before `sinks`
    and in the last `window` carry all but about that much of each sequence's softmax. With `queries` q has so
    many query tokens of each sequence, [batch, queries, q_heads, d]."""
    generator = torch.Generator(device).manual_seed(seed)
    room = max(capacity or 0, *lengths, 1)
    room = math.ceil(room / shape.block) * shape.block if shape.block else room
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    tokens = () if queries is None else (queries,)
    q = torch.randn(len(lengths), *tokens, shape.q_heads, shape.head_dim, generator=generator, device=device)
    size = len(lengths), shape.kv_heads, room, shape.head_dim
    k, v = (torch.randn(size, generator=generator, device=device) for _ in range(2))
    if weight_outside is not None:
        ends = [attended(length, number(options["sinks"]), number(options["window"])) for length in lengths]
        q = _with_heavy_ends(shape, q, k, lengths, ends, weight_outside)
    past = torch.arange(room, device=device) >= held[:, None]
    for name, cache in (("k", k), ("v", v)):
        if shape.stored == FP8:
            scale = torch.rand(shape.kv_heads, generator=generator, device=device) * 0.02 + 0.005
            # Beyond the largest number of the format there is NaN.
            cache.div_(scale[:, None, None]).clamp_(-448, 448)
            options[f"{name}_scale"] = scale
        cache.masked_fill_(past[:, None, :, None], math.nan)
    if shape.block:
        k, v, options["block_table"] = _paged(shape, k, v, lengths, generator)
    else:
        k, v = (spaced(x.to(shape.stored), shape.spare) for x in (k, v))
    return Case(shape, (spaced(q.to(shape.dtype), shape.spare), k, v, held), options)


def _with_heavy_ends(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    lengths: Sequence[int],
    ends: Sequence[Tensor],
    weight_outside: Sequence[float],
) -> Tensor:
    """Queries of one KV head nearly the same, and keys at the ends moved towards them, in place."""
    grouped = q.view(len(lengths), shape.kv_heads, shape.group, shape.head_dim)
    common = grouped[:, :, :1]
    near = common + 0.2 * (grouped - common)
    towards = common[:, :, 0] * math.sqrt(shape.head_dim) / common[:, :, 0].square().sum(-1, keepdim=True)
    for row, (length, heavy, outside) in enumerate(zip(lengths, ends, weight_outside, strict=True)):
        rest = length - len(heavy)
        if len(heavy) and rest:
            raised = math.log((1 - outside) / outside * rest / len(heavy))
            k[row, :, heavy.to(k.device)] += towards[row, :, None] * raised
    return near.reshape_as(q)


def _paged(
    shape: Shape, k: Tensor, v: Tensor, lengths: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """The same tokens in blocks in random order, K and V of a block side by side; and the table. Block 0 is
    nobody's and is named by all entries past a sequence's end."""
    batch, kv_heads, room, d = k.shape
    each = room // shape.block
    blocks = 1 + batch * each + 3
    order = 1 + torch.randperm(blocks - 1, generator=generator, device=k.device)[: batch * each]
    pool = torch.full((blocks, 2, shape.block, kv_heads, d + 3 * shape.spare), math.nan, device=k.device)
    for i, cache in enumerate((k, v)):
        pages = cache.view(batch, kv_heads, each, shape.block, d).permute(0, 2, 3, 1, 4)
        pool[order, i, :, :, :d] = pages.reshape(-1, shape.block, kv_heads, d)
    pool = pool.to(shape.stored)
    # Odd: the compiler makes kernels of their own for strides that sixteen divides.
    table = torch.zeros(batch, (each + 2) | 1, dtype=torch.int32, device=k.device)
    for row, length in enumerate(lengths):
        owned = math.ceil(length / shape.block)
        table[row, :owned] = order[row * each : row * each + owned]
    return pool[:, 0, ..., :d], pool[:, 1, ..., :d], table


def spaced(x: Tensor, spare: bool) -> Tensor:
    """The same, contiguous or as a view of a larger tensor of NaN: odd strides, an odd first address."""
    if not spare:
        return x
    sizes = [size + extra for size, extra in zip(x.shape, (0, 1, 2, 5)[-x.ndim :], strict=True)]
    around = torch.full(sizes, math.nan, device=x.device).to(x.dtype)
    inside = around[tuple(slice(size) for size in x.shape[:-2])][..., -x.shape[-2] :, 3 : 3 + x.shape[-1]]
    inside.copy_(x)
    return inside


# -- the truth ---------------------------------------------------------------------------------------------


def attended(length: int, sinks: int | None, window: int | None) -> Tensor:
    """Tokens [0, sinks) and [length - window, length), each once; all where neither is given."""
    if sinks is None and window is None:
        return torch.arange(length)
    first = min(sinks or 0, length)
    return torch.cat((torch.arange(first), torch.arange(max(first, length - (window or 0)), length)))


def tokens_of(cache: Tensor, row: int, tokens: Tensor, table: Tensor | None, scale: Tensor | None) -> Tensor:
    """[kv_heads, tokens, d] in float64 of one sequence: looked up token by token."""
    # As bytes: not every version of torch looks tokens up in fp8.
    stored = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    if table is None:
        found = stored[row][:, tokens].view(cache.dtype).double()
    else:
        size = cache.shape[1]
        found = stored[table[row, tokens // size].long(), tokens % size].view(cache.dtype).double()
        found = found.transpose(0, 1)
    return found if scale is None else found * scale.double()[:, None, None]


def truth(case: Case, *, everything: bool = False) -> Tensor:
    """What attention gives, in float64 [batch, q_heads, d]: zeros where nothing is attended. `everything`:
    over all tokens, whatever `sinks` and `window` say."""
    q, k, v, _ = case.tensors
    options = dict(case.options)
    if everything:
        options["sinks"] = options["window"] = None
    shape, scale = case.shape, options.get("scale") or case.shape.head_dim**-0.5
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(case.lengths):
        tokens = attended(length, number(options.get("sinks")), number(options.get("window"))).to(q.device)
        if not len(tokens):
            continue
        keys = tokens_of(k, row, tokens, options.get("block_table"), options.get("k_scale"))
        values = tokens_of(v, row, tokens, options.get("block_table"), options.get("v_scale"))
        queries = q[row].double().view(shape.kv_heads, shape.group, shape.head_dim)
        for head in range(shape.kv_heads):
            scores = scale * (queries[head] @ keys[head].T)
            weights = torch.exp(scores - scores.amax(1, keepdim=True))
            part = (weights @ values[head]) / weights.sum(1, keepdim=True)
            out[row, head * shape.group : (head + 1) * shape.group] = part
    return out


def truth_and_logs(case: Case) -> tuple[Tensor, Tensor]:
    """What attention gives, by one masked attention over all tokens of a sequence, in float64: out as q, and
    the logarithm of the sum of its weights, as q without d; zeros and -inf where nothing is attended. Of
    several query tokens each stands where it does in its sequence, the last one at its end."""
    q, k, v, _ = case.tensors
    options = case.options
    table, scale = options.get("block_table"), options.get("scale") or case.shape.head_dim**-0.5
    queries = q.double() if q.dim() == 4 else q.double()[:, None]
    sinks, window = (number(options.get(name)) for name in ("sinks", "window"))
    out, logs = torch.zeros_like(queries), queries.new_full(queries.shape[:-1], -math.inf)
    for row, length in enumerate(case.lengths):
        keys, values = (
            tokens_of(x, row, torch.arange(length, device=q.device), table, options.get(name))[None]
            for x, name in ((k, "k_scale"), (v, "v_scale"))
        )
        mask = queries.new_full((queries.shape[1], length), -math.inf)
        for token, end in enumerate(range(length - len(mask) + 1, length + 1)):
            mask[token, attended(max(0, end), sinks, window)] = 0.0
        if length:
            found, log = attend(queries[row, None], keys, values, mask, scale)
            out[row], logs[row] = found[0].nan_to_num(nan=0.0), log[0]
    return out.view(q.shape), logs.view(q.shape[:-1])


def number(x: int | Tensor | None) -> int | None:
    """An option that may lie on the device."""
    return int(x) if isinstance(x, Tensor) else x


def error(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of one sequence; infinite for NaN or for anything but zeros where zeros
    are expected."""
    apart = (found.double() - expected).flatten(1).norm(dim=1)
    size = expected.flatten(1).norm(dim=1)
    relative = torch.where(size > 0, apart / size, torch.where(apart == 0, 0.0, math.inf))
    return float(relative.nan_to_num(nan=math.inf).max()) if len(relative) else 0.0


# -- drawing -----------------------------------------------------------------------------------------------


def some_lengths(rng: np.random.Generator, batch: int, capacity: int) -> list[int]:
    """Lengths up to a capacity: often none, one, one short of it, all of it."""
    special = np.array([0, 1, 2, max(capacity - 1, 0), capacity])
    lengths = np.where(
        rng.random(batch) < 0.4, rng.choice(special, batch), rng.integers(0, capacity + 1, batch)
    )
    return [int(length) for length in np.minimum(lengths, capacity)]
