"""How much work attention of prompts is to a card: tiles of queries over blocks of keys, in waves.

    work = SLOWER (X^p + Y^p)^(1/p) + MOVED RIDGE bytes          in flops at the card's peak
    X    = the blocks of all programs, each with `spare` more, and what the last wave leaves idle
    Y    = the blocks of the longest program, by itself on a multiprocessor, times the multiprocessors

A program attends from a tile of queries, rows times the query heads of a KV head, over its prompt's keys up
to its last row (`simcore.kernels.decoder.ragged_attention`, whose layouts these are). Few programs take as
long as the longest of them, many as long as all together; between the two lies a p-norm. The constants are
fitted to 2,120 shapes measured on an H200 (27 November 2026), 5 us to 6 ms, which they miss by 4 % in the
median; what they miss is corrected by what was measured nearby (`simcore.devices.interpolation`). So are
other cards and other sizes of heads, of which these constants are guesses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from simcore.ops.op import prompts

# Of an H100 and an H200.
MULTIPROCESSORS = 132
# Flops per byte of memory from which on they are bound by arithmetic, about.
RIDGE = 200


@dataclass(frozen=True, slots=True)
class Layout:
    """Queries of a tile, keys of a block, programs that share a multiprocessor; fixed cost of a program, in
    blocks; time of a block of one program by itself there, over a block's share of time where it is full."""

    queries: int
    keys: int
    programs: int
    spare: float
    alone: float

    def rows(self, group: int) -> int:
        """Returns the rows of a tile, of so many query heads a KV head."""
        return max(1, self.queries // group)


FEW_ROWS = 1024
FEW, MANY = Layout(64, 64, 2, 3.4, 1.63), Layout(128, 128, 1, 1.8, 1.0)
# Time of arithmetic over its time at peak; share of the last wave's idle time that counts; share of the
# memory's time that nothing hides; p.
SLOWER, IDLE, MOVED, NORM = 2.04, 0.8, 0.5, 2.7


def prompts_in(shape: Mapping[str, int]) -> tuple[int, int, int]:
    """Returns the number of prompts of a prefill attention, the tokens of each, and its cached tokens."""
    tokens, kv_tokens = shape["tokens"], shape["kv_tokens"]
    count = prompts(tokens, kv_tokens, shape["pairs"])
    return count, tokens // count, (kv_tokens - tokens) // count


def layout(rows: int) -> Layout:
    """Returns the layout for so many rows of heads of 128 numbers of two bytes."""
    return FEW if rows <= FEW_ROWS else MANY


def blocks(length: int, cached: int, group: int, of: Layout) -> tuple[int, int, int, int]:
    """Returns how many tiles a prompt has, and the blocks of keys that all of them go through, that the first
    one does, and the last.

    >>> blocks(40, 0, 4, FEW), blocks(40, 100, 4, FEW)
    ((3, 3, 1, 1), (3, 8, 2, 3))
    """
    rows, keys = of.rows(group), of.keys
    tiles = -(-length // rows)
    first, last = -(-(cached + min(rows, length)) // keys), -(-(cached + length) // keys)
    return tiles, floors(tiles - 1, rows, cached + rows + keys - 1, keys) + last, first, last


def floors(count: int, step: int, first: int, by: int) -> int:
    """Returns the sum of (first + i step) // by over i below `count`, in as many steps as Euclid's algorithm
    takes for step and by (Graham, Knuth, Patashnik: Concrete Mathematics, section 3.5).

    >>> floors(4, 3, 5, 4), 5 // 4 + 8 // 4 + 11 // 4 + 14 // 4
    (8, 8)
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // by) + count * (first // by)
        step, first = step % by, first % by
        top = count * step + first
        if top < by:
            return total
        count, first, step, by = top // by, top % by, by, step


def prompt_coordinates(shape: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the coordinates of a prefill attention: prompts and KV heads apart, since the programs of a
    prompt are neighbours in the grid, and tokens of several tiles in whole tiles.

    >>> shape = {"tokens": 90, "kv_tokens": 190, "pairs": 6095, "q_heads": 8, "kv_heads": 2, "head_dim": 128}
    >>> dict(prompt_coordinates(shape))
    {'head_dim': 128, 'group': 4, 'kv_heads': 2, 'prompts': 2, 'cached': 114, 'tokens': 48}
    """
    count, length, cached = prompts_in(shape)
    group = shape["q_heads"] // shape["kv_heads"]
    rows = layout(count * length).rows(group)
    tokens = length if length <= rows else -(-length // rows) * rows
    at = {"group": group, "kv_heads": shape["kv_heads"], "prompts": count, "cached": FEW.keys + cached}
    return {"head_dim": shape["head_dim"], **at, "tokens": tokens}


def work_over_floor(shape: Mapping[str, int]) -> float:
    """Returns the work of a prefill attention over its bound, the larger of its bytes and its plain flops."""
    count, length, cached = prompts_in(shape)
    of, heads = layout(count * length), count * shape["kv_heads"]
    tiles, every, first, last = blocks(length, cached, shape["q_heads"] // shape["kv_heads"], of)
    d = shape["head_dim"]
    a_block = 4 * of.queries * of.keys * d
    full = a_block * (heads * (every + tiles * of.spare) + _idle(heads * tiles, first + of.spare, of))
    longest = a_block * MULTIPROCESSORS * of.alone * (last + of.spare)
    moved = RIDGE * 4 * d * (shape["q_heads"] * shape["tokens"] + shape["kv_heads"] * shape["kv_tokens"])
    least = max(moved, 4 * d * shape["q_heads"] * shape["pairs"])
    together = float((full**NORM + longest**NORM) ** (1 / NORM))
    return (SLOWER * together + MOVED * moved) / least


def _idle(programs: int, shortest: float, of: Layout) -> float:
    """Returns the blocks that multiprocessors could compute while the last wave, of the shortest programs,
    leaves them idle."""
    slots = MULTIPROCESSORS * of.programs
    last = programs % slots
    if programs < slots or not last:
        return 0.0
    # One program for each multiprocessor runs faster than where several share it.
    takes = of.alone / of.programs if last <= MULTIPROCESSORS else 1.0
    return IDLE * shortest * (slots * takes - last)
