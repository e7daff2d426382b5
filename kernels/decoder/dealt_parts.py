"""Sequences of any lengths cut into parts, each found by its program from the lengths on the device.

    blocks of a part   max(least, ceil(sqrt(left T) / K)), or T / (K - pairs) where that ends earlier

`left`: the blocks of its sequence and of those after it, out of all T, of all KV heads. Long sequences make
up to 2 K parts. (Trapezoid self-scheduling, Tzen and Ni 1993: sizes fall linearly.) Parts of the other size
are at most K, as many as run at once. The host plans nothing, so one captured graph serves all lengths.

GPUs start programs in the order of the grid, each where one has ended. So first parts are long, which makes
few sums, and last ones short: multiprocessors end at nearly the same time, however the lengths differ and
whichever of them gets less bandwidth. A sequence's parts are equal, and take its blocks in turn, as in
`split_kv`. The program of a part reads all lengths, adds up the parts of all sequences, and finds its own
among them. Programs beyond the last part end at once.

Sequences of nearly equal lengths get `even` parts each instead, if these fill the GPU once: then all
programs start together and end together, and none starts late.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import check_powers
from simcore.kernels.decoder.split_kv import (
    ONE_BY_ONE,
    WARPS,
    Cache,
    depth_beside_others,
    group_of,
    large_block,
    of_rows,
    shares,
    sizes,
    tile,
    two_added,
)
from simcore.kernels.gpu import Gpu

# Every program holds all lengths: of more sequences than this it would hold too much.
MOST_DEALT = 1024
# So many parts or fewer are summed with several queries at once; words of their tile that a warp holds.
FEW, FEW_WORDS = 8, 1024
# The most parts of a KV head of a sequence.
MOST_OF_HEAD = 64
# Tokens of a part at least: shorter ones take longer to begin than to read; and in pages, where the first
# look-up is part of that, but parts of few sequences would be too few.
LEAST_TOKENS, LEAST_IN_PAGES = 512, 256
MOST_WARPS = 8
# Programs of this layout that share a multiprocessor.
TOGETHER = 2
# Even parts have to fill so much of the GPU. Where programs read few blocks each, starting late costs more.
FULL, NEARLY_FULL, FEW_BLOCKS = 0.93, 0.75, 24
# Where parts start late, a launch takes so many times as long, and the time of so many blocks more.
SLOWER, LATE = tl.constexpr(33 / 32), tl.constexpr(2)
# Lengths are nearly equal if the shortest has so many eighths of the longest.
EIGHTHS = tl.constexpr(7)


@dataclass(frozen=True, slots=True)
class DealtConfig:
    """The layout of a launch: `portions`, K; `least`, the fewest blocks of a part; `most`, the most parts of
    a head; `even`, the parts of each head where lengths are nearly equal, 0 for never; the rest as in
    DecodeConfig."""

    block: int
    portions: int
    stages: int
    warps: int
    slices: int
    least: int = 1
    most: int = MOST_OF_HEAD
    chained: bool = False
    sharers: int = 64
    even: int = 0

    def __post_init__(self) -> None:
        check_powers(self, "block", "slices", "warps")
        bounds = {"block": 16, "portions": 1, "stages": 1, "least": 1, "most": 1, "sharers": 1}
        for name, bound in bounds.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name}: a layout cannot have {value}; it has to be {bound} or more")
        if not 0 <= self.even <= self.most:
            raise ValueError(f"even: a layout cannot have {self.even}; it has to be 0 to {self.most}")
        if self.warps > MOST_WARPS:
            raise ValueError(f"warps: a layout cannot have {self.warps}; it has to be 1, 2, 4 or 8")

    def __str__(self) -> str:
        return (
            f"parts of {self.least} or more blocks of {self.block}, {2 * self.portions} in all,"
            f"{f' or {self.even} a head,' * (self.even > 0)}"
            f" {self.stages} stages, {self.warps} warps, {self.slices} slices{', chained' * self.chained}"
        )

    def programs(self, pairs: int) -> int:
        """Returns the most parts of so many pairs of a sequence and a KV head.

        2 K, since the sum of blocks / sqrt(left T) over sequences is below the integral over `left` from 0 to
        T; one more a pair, since parts are rounded up; and one, since square roots are in fp32."""
        return min(max(2 * self.portions + pairs + 1, pairs * self.even), pairs * self.most)


def dealt_config(
    *, head_dim: int, kv_bytes: int, gpu: Gpu, pairs: int, capacity: int, paged: bool = False
) -> DealtConfig:
    """Returns the layout for so many pairs of a sequence and a KV head, of so many columns, with up to
    `capacity` tokens; `kv_bytes` an element of K and V; `paged`: whether in pages. (Measured on an H200:
    docs/measurements/kernels.md.)

    >>> shape = {"head_dim": 128, "kv_bytes": 2, "gpu": Gpu(), "capacity": 8192}
    >>> print(dealt_config(**shape, pairs=136))
    parts of 8 or more blocks of 64, 528 in all, 4 stages, 4 warps, 4 slices
    >>> print(dealt_config(**shape, pairs=64))
    parts of 8 or more blocks of 64, 528 in all, or 4 a head, 4 stages, 4 warps, 4 slices
    """
    block, programs = large_block(head_dim, kv_bytes), TOGETHER * gpu.processors
    return DealtConfig(
        block=block,
        portions=programs,
        stages=depth_beside_others(block, head_dim, kv_bytes, gpu.shared_bytes, TOGETHER),
        warps=WARPS,
        slices=4,
        least=max(1, (LEAST_IN_PAGES if paged else LEAST_TOKENS) // block),
        chained=gpu.chained,
        sharers=max(1, gpu.processors // 2),
        even=even_parts(pairs, -(-capacity // block), programs),
    )


def even_parts(pairs: int, blocks: int, programs: int) -> int:
    """Returns how many parts each of so many pairs has where all have as many blocks, so that these parts run
    at once; 0 if they would not fill the places of `programs`.

    >>> [even_parts(pairs, 128, 264) for pairs in (64, 65, 72, 122, 132, 264)], even_parts(72, 64, 264)
    ([4, 4, 0, 0, 2, 1], 3)
    """
    parts = min(MOST_OF_HEAD, programs // pairs)
    full = NEARLY_FULL if pairs * blocks <= FEW_BLOCKS * programs else FULL
    return parts if parts * pairs >= full * programs else 0


def dealt_shapes(q: Tensor, kv_heads: int, config: DealtConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a workspace: a part of each program, and its logs. Also of heads
    of one part, which need none: 34 MB for 1,024 sequences of 8 KV heads with 4 queries of 128 columns."""
    group = group_of(q, kv_heads)
    slices = shares(group, q.shape[-1], config.most, config.slices, config.warps).slices
    return of_rows(q, (config.programs(len(q) * kv_heads), group), slices)


def dealt_constants(q: Tensor, kv: Cache, config: DealtConfig) -> dict[str, int]:
    """Returns the compile-time constants of the kernel."""
    result = sizes(
        q, kv, splits=config.most, slices=config.slices, warps=config.warps, sharers=config.sharers
    )
    # Few parts: as many queries in one tile as each warp holds easily.
    queries = FEW_WORDS * config.warps // (FEW * result["DIM"])
    queries = max(1, min(int(triton.next_power_of_2(result["GROUP"])), queries))
    few_shares = triton.cdiv(result["GROUP"], queries)
    return {
        **result,
        "BATCH": int(triton.next_power_of_2(len(q))),
        "HEADS": kv.kv_heads,
        "PORTIONS": config.portions,
        "LEAST": config.least,
        "EVEN": config.even,
        "FEW": tile(FEW, queries * result["DIM"], config.warps),
        "FEW_QUERIES": queries,
        "FEW_SHARES": few_shares,
        "FEW_SHARERS": 1 if ONE_BY_ONE else min(few_shares, config.sharers),
    }


@triton.jit
def dealt_part(
    program, lengths_ptr, batch, reach, capacity,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr,
    PORTIONS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The part of a program: its sequence (`batch` or more if there is none), KV head, number, and how many
    parts the head has. `reach`: the most tokens that are attended, where WINDOWED. A sequence without tokens
    has one part."""
    numbers = tl.arange(0, BATCH)
    there = numbers < batch
    attended = tl.maximum(tl.minimum(tl.load(lengths_ptr + numbers, mask=there, other=0), capacity), 0)
    if WINDOWED:
        attended = tl.minimum(attended, reach)
    alike = False
    if EVEN > 0:
        longest, shortest = tl.max(attended, 0), tl.min(tl.where(there, attended, 1 << 30), 0)
        # Of a cache that is nearly empty, even parts would be too short.
        alike = (shortest * 8 >= longest * EIGHTHS) & (longest * 2 > EVEN * LEAST * BLOCK)
    if alike:
        sequence, number, own = program // (HEADS * EVEN), program % (HEADS * EVEN), EVEN
    else:
        blocks = tl.cdiv(attended, BLOCK)
        total = tl.sum(blocks, 0)
        left = total - tl.cumsum(blocks, 0) + blocks
        size = tl.sqrt(total.to(tl.float32) * left.to(tl.float32)) * HEADS / PORTIONS
        size = tl.maximum(tl.ceil(size).to(tl.int32), LEAST)
        # All at once, if pairs are few: their parts are rounded up, one for each pair.
        own_blocks, spare = total * HEADS // PORTIONS, PORTIONS - batch * HEADS
        at_once = total * HEADS // tl.maximum(spare, 1) + 1
        quick = (spare > 0) & (at_once.to(tl.float32) <= own_blocks * SLOWER + LATE)
        size = tl.where(quick, tl.maximum(at_once, (LEAST + 1) // 2), size)
        parts = tl.maximum(tl.minimum(tl.cdiv(blocks, size), MOST), 1)
        parts = tl.where(there, parts, 0)
        ends = tl.cumsum(parts, 0) * HEADS
        passed = ends <= program
        sequence, before = tl.reduce((passed.to(tl.int32), tl.where(passed, parts, 0)), 0, two_added)
        own = tl.maximum(tl.sum(tl.where(numbers == sequence, parts, 0), 0), 1)
        number = program - before * HEADS
    return sequence, number // own, number % own, own
