"""Causal linear attention with exponential decay: six methods, each as its stream of ops.

    out_i = q_i S_i,   S_i = gamma S_(i-1) + k_i^T v_i        gamma in (0, 1] per head, S_(-1) given or 0

q and k [batch, heads, length, rank], v and out [batch, heads, length, dim], S [batch, heads, rank, dim].
N, r, d stand below for length, rank and dim.

The methods are those of LeetDecoding (Wang et al., section 3.2, appendix B): vanilla, causal dot product
(Algorithm 1), block-based (Algorithm 2), recursion (Algorithms 3 and 4), Lightning Attention 2 and
FleetAttention (Algorithm 5). Three of them are one kernel each; as separate torch ops (the paper's
Cdotp_torch, LA_torch, FA_torch) they are methods of their own, `..._torch`.

A method's op is fused: its parts are its launches, its work is their sum. The methods that keep S read and
write it; vanilla and recursion do not need the final state, so it is not counted in theirs.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, repeat

from simcore.ops.op import DTYPE_BYTES, Dim, Op, Work

METHODS = ("vanilla", "causal_dot_product", "block_based", "recursion", "lightning", "fleet")
TORCH_METHODS = ("causal_dot_product_torch", "lightning_torch", "fleet_torch")
# The methods whose space complexity the paper states: sections 2.1, B.1, B.2 and B.4.
STATED_MEMORY = ("vanilla", "causal_dot_product", "causal_dot_product_torch", "block_based", "fleet")
# Rows of a block; for recursion the longest base case (section 5.1); for fleet columns of v (B_c).
DEFAULT_BLOCKS = {"block_based": 32, "recursion": 32, "lightning": 64, "lightning_torch": 256, "fleet": 32}

Ops = tuple[Op, ...]
Segment = tuple[Ops, int]  # ops, and how often they repeat


# -- single launches -----------------------------------------------------------------------------


def _batched_matmul(op: Op) -> Work:
    groups, m, n, k = op["groups"], op["m"], op["n"], op["k"]
    moved = m * k + k * n + m * n * (1 + op["accumulate"])
    return Work(2.0 * groups * m * n * k, DTYPE_BYTES[op.dtype] * groups * moved)


def batched_matmul(
    name: str, *, groups: Dim, m: int, n: int, k: int, dtype: str, accumulate: bool = False
) -> Op:
    """y[groups, m, n] = x[groups, m, k] @ w[groups, k, n], or += with `accumulate` (y is also read)."""
    shape = (("groups", groups), ("m", m), ("n", n), ("k", k), ("accumulate", int(accumulate)))
    return Op("batched_matmul", name, shape, dtype, _batched_matmul)


def _elementwise(op: Op) -> Work:
    elements = op["elements"]
    return Work(1.0 * op["operations"] * elements, DTYPE_BYTES[op.dtype] * (op["read"] + elements))


def elementwise(name: str, *, elements: int, read: int, operations: int, dtype: str) -> Op:
    """Writes `elements` numbers, with `operations` operations each; reads `read` numbers in all."""
    shape = (("elements", elements), ("read", read), ("operations", operations))
    return Op("elementwise", name, shape, dtype, _elementwise)


def _scan(op: Op) -> Work:
    elements = op["columns"] * op["length"]
    return Work((1.0 + op["decay"]) * elements, 2.0 * DTYPE_BYTES[op.dtype] * elements)


def scan(name: str, *, columns: int, length: int, decay: bool, dtype: str) -> Op:
    """y_i = gamma y_(i-1) + x_i along `length` (gamma 1 unless `decay`), for each of `columns` columns: read
    and written once."""
    shape = (("columns", columns), ("length", length), ("decay", int(decay)))
    return Op("scan", name, shape, dtype, _scan)


# -- methods that are one kernel -----------------------------------------------------------------


def _groups(op: Op) -> int:
    return op["batch"] * op["heads"]


def _moved(op: Op, length: int, reads_of_queries_and_keys: int = 1) -> float:
    """Bytes of q, k, v and out and, with `states`, of the first state (read) and the last (written)."""
    r, d = op["rank"], op["dim"]
    elements = length * (2 * r * reads_of_queries_and_keys + 2 * d) + 2 * r * d * op["states"]
    return DTYPE_BYTES[op.dtype] * _groups(op) * elements


def _row_by_row(op: Op) -> Work:
    # Per row and element of S: a multiply-add for S += k^T v, one for q S, and a multiply for gamma S.
    flops = _groups(op) * op["length"] * (4.0 + op["decay"]) * op["rank"] * op["dim"]
    return Work(flops, _moved(op, op["length"]))


def _fleet(op: Op) -> Work:
    # Per element of every summand: c v, its running sum (times gamma), b times the sum added to the output.
    # Each block of v's columns reads all of q and k again.
    flops = _groups(op) * op["length"] * (4.0 + op["decay"]) * op["rank"] * op["dim"]
    return Work(flops, _moved(op, op["length"], -(-op["dim"] // op["block"])))


def _lightning_block(op: Op, rows: int) -> float:
    """Flops of one block of one head: inside the block as vanilla, earlier rows through the state."""
    r, d = op["rank"], op["dim"]
    inside = rows * rows * (2.0 * r + 1.0 + 2.0 * d)
    weighing = op["decay"] * (2.0 * rows * r + r * d) if rows else 0.0
    return inside + 4.0 * rows * r * d + weighing


def _lightning(op: Op) -> Work:
    blocks, rest = divmod(op["length"], op["block"])
    flops = blocks * _lightning_block(op, op["block"]) + _lightning_block(op, rest)
    return Work(_groups(op) * flops, _moved(op, op["length"]))


_KERNELS = {"causal_dot_product": _row_by_row, "lightning": _lightning, "fleet": _fleet}


def _kernel(op: Op, method: str) -> Op:
    """The only launch of a one-kernel method, with all dimensions of its op."""
    return Op(method, method, op.shape, op.dtype, _KERNELS[method])


# -- methods that are several launches -----------------------------------------------------------


def _matmul_of(op: Op, name: str, m: int, n: int, k: int, *, onto: bool = False) -> Op:
    return batched_matmul(name, groups=_groups(op), m=m, n=n, k=k, dtype=op.dtype, accumulate=onto)


def _weigh(op: Op, name: str, elements: int, weights: int = 0) -> Op:
    """Multiplies `elements` numbers of each head by weights. One weight per row or head is too little to
    count; `weights`: how many are read if there are more."""
    total = _groups(op) * elements
    return elementwise(name, elements=total, read=total + weights, operations=1, dtype=op.dtype)


def _mask(op: Op, rows: int) -> list[Segment]:
    """Makes the mask of a block of `rows`: gamma^(i-j) for each head, or zeros and ones for all heads; at
    once, or row by row, as in the paper's measurements (where decay costs time in proportion to the rows)."""
    heads, operations = (op["heads"], 2) if op["decay"] else (1, 0)
    at_once = 1 if op["decay"] and op["mask_by_rows"] else rows
    elements = heads * at_once * rows
    made = elementwise("mask", elements=elements, read=0, operations=operations, dtype=op.dtype)
    return [((made,), rows // at_once)]


def _masked(op: Op, rows: int) -> Ops:
    """(q k^T o mask) v of `rows` rows."""
    r, d = op["rank"], op["dim"]
    mask = (op["heads"] if op["decay"] else 1) * rows * rows
    return (
        _matmul_of(op, "scores", rows, rows, r),
        _weigh(op, "masked_scores", rows * rows, mask),
        _matmul_of(op, "output", rows, d, rows),
    )


def _vanilla_stream(op: Op) -> list[Segment]:
    return [*_mask(op, op["length"]), (_masked(op, op["length"]), 1)]


def _row_stream(op: Op) -> list[Segment]:
    r, d = op["rank"], op["dim"]
    update = _matmul_of(op, "state", r, d, 1, onto=True)
    row = (update, _matmul_of(op, "output", 1, d, r))
    return [((_weigh(op, "decay", r * d), *row) if op["decay"] else row, op["length"])]


def _block(op: Op, rows: int) -> Ops:
    """One block: its inside as vanilla, then the output from the state, then the new state (Algorithm 2)."""
    r, d = op["rank"], op["dim"]
    read: Ops = (_matmul_of(op, "read_state", rows, d, r, onto=True),)
    update: Ops = (_matmul_of(op, "state", r, d, rows, onto=True),)
    if op["decay"]:
        read = (_weigh(op, "weighed_queries", rows * r), *read)
        update = (_weigh(op, "weighed_keys", rows * r), _weigh(op, "decay", r * d), *update)
    return (*_masked(op, rows), *read, *update)


def _block_stream(op: Op) -> list[Segment]:
    blocks, rest = divmod(op["length"], op["block"])
    sizes = [(rows, times) for rows, times in ((op["block"], blocks), (rest, 1)) if rows and times]
    masks = [segment for rows, _ in sizes for segment in _mask(op, rows)]
    return [*masks, *((_block(op, rows), times) for rows, times in sizes)]


def _columns_stream(op: Op) -> list[Segment]:
    """Equation 5, column by column of q and k: c_i v, its running sum, b_i times the sum added to the
    output."""
    n, d, groups = op["length"], op["dim"], _groups(op)
    total = groups * n * d
    weighed = elementwise(
        "weighed_values", elements=total, read=total + groups * n, operations=1, dtype=op.dtype
    )
    sums = scan("running_sums", columns=groups * d, length=n, decay=bool(op["decay"]), dtype=op.dtype)
    onto = elementwise("output", elements=total, read=2 * total + groups * n, operations=2, dtype=op.dtype)
    return [((weighed, sums, onto), op["rank"])]


def recursion_levels(length: int, base: int) -> tuple[Counter[int], list[Counter[int]]]:
    """How often each size occurs in the recursion: among its base cases, and on each level, the top level
    first. n rows above the base are halved into n // 2 and n - n // 2."""
    bases: Counter[int] = Counter()
    levels: list[Counter[int]] = []
    open_sizes = Counter({length: 1})
    while open_sizes:
        halved: Counter[int] = Counter()
        level: Counter[int] = Counter()
        for size, times in open_sizes.items():
            if size <= base:
                bases[size] += times
                continue
            level[size] += times
            halved[size // 2] += times
            halved[size - size // 2] += times
        levels.extend([level] if level else [])
        open_sizes = halved
    return bases, levels


def _half(op: Op, size: int) -> Ops:
    """The contribution of the earlier half of `size` rows to the later: q_2 (k_1^T v_1), added to its
    output."""
    r, d, earlier = op["rank"], op["dim"], size // 2
    later = size - earlier
    state: Ops = (_matmul_of(op, "state", r, d, earlier),)
    read: Ops = (_matmul_of(op, "read_state", later, d, r, onto=True),)
    if op["decay"]:
        state = (_weigh(op, "weighed_keys", earlier * r), *state)
        read = (_weigh(op, "weighed_queries", later * r), *read)
    return (*state, *read)


def _base(op: Op, size: int) -> list[Segment]:
    """A base case: the causal dot product or, with decay, vanilla with its own mask."""
    if op["decay"]:
        return [*_mask(op, size), (_masked(op, size), 1)]
    # States between base cases are not counted here, because `_half` counts them.
    here = {"length": size, "states": 0}
    shape = tuple((name, here.get(name, value)) for name, value in op.shape)
    return [((Op("causal_dot_product", "base", shape, op.dtype, _row_by_row),), 1)]


def _recursion_stream(op: Op) -> list[Segment]:
    """Base cases first, then the levels from the lowest up."""
    bases, levels = recursion_levels(op["length"], op["block"])
    segments = [(ops, times * inner) for size, times in bases.items() for ops, inner in _base(op, size)]
    for level in reversed(levels):
        segments += [(_half(op, size), times) for size, times in level.items()]
    return segments


_STREAMS: Mapping[str, Callable[[Op], list[Segment]]] = {
    "vanilla": _vanilla_stream,
    "causal_dot_product": lambda op: [((_kernel(op, "causal_dot_product"),), 1)],
    "block_based": _block_stream,
    "recursion": _recursion_stream,
    "lightning": lambda op: [((_kernel(op, "lightning"),), 1)],
    "fleet": lambda op: [((_kernel(op, "fleet"),), 1)],
    "causal_dot_product_torch": _row_stream,
    "lightning_torch": _block_stream,
    "fleet_torch": _columns_stream,
}


# -- whole methods -------------------------------------------------------------------------------


def method_of(op: Op) -> str:
    """The method of an op of this family. Raises ValueError for other ops."""
    method = op.kind.removeprefix("linear_attention_")
    if method == op.kind or method not in _STREAMS:
        raise ValueError(f"{op.kind} is no method of linear attention; known: {', '.join(_STREAMS)}")
    return method


def _streamed(op: Op) -> Work:
    """The sum over the parts, computed once per segment: streams of 100 000 rows repeat few ops."""
    flops = hbm_bytes = 0.0
    for ops, times in _STREAMS[method_of(op)](op):
        for part in ops:
            work = part.work
            flops += times * work.flops
            hbm_bytes += times * work.hbm_bytes
    return Work(flops, hbm_bytes)


def linear_attention(
    method: str,
    *,
    batch: int,
    heads: int,
    length: int,
    rank: int,
    dim: int,
    dtype: str,
    decay: bool,
    block: int | None = None,
    mask_by_rows: bool = False,
    states: bool = True,
) -> Op:
    """Causal linear attention over `length` tokens by one of METHODS or TORCH_METHODS.

    `block`: rows of a block, the longest base case of recursion, columns of v for fleet; default
    DEFAULT_BLOCKS; 0 for methods without blocks. `mask_by_rows`: a mask with decay is made in one launch per
    row. `states`: one-kernel methods read a first state and write the last one.
    Raises ValueError for an unknown method, sizes below 1, and a block for a method without blocks.
    """
    if method not in _STREAMS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(_STREAMS)}")
    if block is not None and method not in DEFAULT_BLOCKS:
        raise ValueError(f"block is {block}; {method} has none, only {', '.join(DEFAULT_BLOCKS)} do")
    rows = DEFAULT_BLOCKS.get(method, 0) if block is None else block
    sizes = {"batch": batch, "heads": heads, "length": length, "rank": rank, "dim": dim}
    for name, size in (*sizes.items(), ("block", rows if method in DEFAULT_BLOCKS else 1)):
        if size < 1:
            raise ValueError(f"{name} is {size}; at least 1 is allowed")
    more = {"decay": int(decay), "block": rows, "mask_by_rows": int(mask_by_rows)}
    more["states"] = int(states)
    kind, shape = f"linear_attention_{method}", (*sizes.items(), *more.items())
    op = Op(kind, kind, shape, dtype, _streamed)
    parts = chain.from_iterable(
        chain.from_iterable(repeat(ops, times)) for ops, times in _STREAMS[method](op)
    )
    return Op(kind, kind, shape, dtype, _streamed, "", tuple(parts))


def _step(op: Op) -> Work:
    state = op["rank"] * op["dim"]
    return Work(_groups(op) * (4.0 + op["decay"]) * state, _moved(op, 1))


def linear_attention_step(*, batch: Dim, heads: int, rank: int, dim: int, dtype: str, decay: bool) -> Op:
    """One token: S = gamma S + k^T v in place, out = q S. q, k [batch, heads, 1, rank], v [.., 1, dim]."""
    sizes = (("batch", batch), ("heads", heads), ("rank", rank), ("dim", dim))
    shape = (*sizes, ("decay", int(decay)), ("states", 1))
    return Op("linear_attention_step", "linear_attention_step", shape, dtype, _step)


def _temporaries(op: Op) -> int:
    """The most elements of one head in device memory at once beside q, k, v and out."""
    method = method_of(op)
    n, r, d = op["length"], op["rank"], op["dim"]
    block = min(op["block"], n)
    state = r * d
    return {
        # Scores, their mask and their product: three N x N matrices.
        "vanilla": 3 * n * n,
        "causal_dot_product": state,
        # The state and the update added to it.
        "causal_dot_product_torch": 2 * state,
        # Also scores, mask and product of a block, and its weighed queries or keys.
        "block_based": 2 * state + 3 * block * block + block * r,
        "lightning_torch": 2 * state + 3 * block * block + block * r,
        "lightning": state,
        "fleet": state,
        # c_i v and its running sum.
        "fleet_torch": state + 2 * n * d,
        # Half of the queries or keys, weighed, a state, and a base case.
        "recursion": state + op["decay"] * (n - n // 2) * r + 3 * block * block,
    }[method]


def memory_bytes(op: Op) -> float:
    """The most bytes of device memory in use at once: q, k, v, out and the method's temporaries.

    By the space complexities that the paper states (STATED_MEMORY: O(N^2 + N d) for vanilla, O(N d + r d)
    for the others), else by the streams of this file. Raises ValueError for ops of other families.
    """
    n, r, d = op["length"], op["rank"], op["dim"]
    return DTYPE_BYTES[op.dtype] * _groups(op) * (n * (2 * r + 2 * d) + _temporaries(op))
