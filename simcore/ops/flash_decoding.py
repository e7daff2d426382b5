"""Attention of one query token per sequence over a long cache: by FlashAttention-2 and by Flash-Decoding.

    out = softmax(q K^T) V     q, out [batch, q_heads, head_dim], K and V [batch, kv_heads, context, head_dim]

FlashAttention-2 has a block for each query head of each sequence, which loops over the whole context. Few
sequences leave most of a device idle, even if they are long.

Flash-Decoding (Dao et al. 2023) also has blocks for each part of the context, in three steps:

    1  K and V are cut into `splits` parts: views, no op
    2  attention over every part: blocks = batch * kv_heads * splits, each for all query heads of its KV head
    3  partial outputs o_s of the parts are combined by their log-sum-exps l_s:
       out = sum_s exp(l_s - l) o_s,   l = log sum_s exp(l_s)

With one split, step 2 writes the output, and there is no step 3. `split_count` chooses the number of splits
by price: too few leave processors idle, too many cost bytes of partial outputs.
"""

from simcore.ops.op import DTYPE_BYTES, Op, Pricer, Work, sum_of_parts

METHODS = ("flash_attention_2", "flash_decoding")
# Partial outputs and log-sum-exps are kept in fp32.
PARTIAL_BYTES = DTYPE_BYTES["fp32"]
# The least context of a block: the rows of K that one tile of the kernel holds.
LEAST_PART = 64
# With this many waves of blocks, the last wave hardly counts, even if it is nearly empty.
MOST_WAVES = 16
LABELS = {"flash_attention_2": "FlashAttention-2", "flash_decoding": "Flash-Decoding"}


def _attend(op: Op, bytes_of_output: float) -> Work:
    """For every (query head, cached token) pair and element: a multiply-add for q K^T and one for V."""
    batch, q_heads, d = op["batch"], op["q_heads"], op["head_dim"]
    pairs = batch * q_heads * op["context"]
    cache = 2.0 * batch * op["kv_heads"] * op["context"] * d * DTYPE_BYTES[op.dtype]
    queries = batch * q_heads * d * DTYPE_BYTES[op.dtype]
    return Work(4.0 * pairs * d, cache + queries + bytes_of_output)


def _output_bytes(op: Op) -> float:
    return op["batch"] * op["q_heads"] * op["head_dim"] * DTYPE_BYTES[op.dtype]


def _partial_bytes(op: Op) -> float:
    """Bytes of an output and a log-sum-exp for every query head and split."""
    return PARTIAL_BYTES * op["batch"] * op["q_heads"] * op["splits"] * (op["head_dim"] + 1)


def _whole_context(op: Op) -> Work:
    return _attend(op, _output_bytes(op))


def _split_attention(op: Op) -> Work:
    return _attend(op, _partial_bytes(op) if op["splits"] > 1 else _output_bytes(op))


def _combine(op: Op) -> Work:
    """Sums exp(l_s - l) times the output of every split."""
    partials = op["batch"] * op["q_heads"] * op["splits"]
    return Work(partials * (2.0 * op["head_dim"] + 3.0), _partial_bytes(op) + _output_bytes(op))


def flash_attention_2(
    *, batch: int, q_heads: int, kv_heads: int, head_dim: int, context: int, dtype: str
) -> Op:
    """FlashAttention-2 with one query per sequence: a block for each query head, over the whole context."""
    _check(batch, q_heads, kv_heads, head_dim, context)
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shape = (*sizes.items(), ("context", context), ("blocks", batch * q_heads))
    return Op("flash_attention_2", "attention", shape, dtype, _whole_context)


def flash_decoding(
    *, batch: int, q_heads: int, kv_heads: int, head_dim: int, context: int, splits: int, dtype: str
) -> Op:
    """Flash-Decoding with the context cut into `splits` parts; its parts are its one or two launches.

    Raises ValueError for sizes below 1, more splits than tokens, and query heads that KV heads cannot share.
    """
    _check(batch, q_heads, kv_heads, head_dim, context)
    if not 1 <= splits <= context:
        raise ValueError(f"splits is {splits}; 1 to {context:,}, the context, are allowed")
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shape = (*sizes.items(), ("context", context), ("splits", splits))
    blocks = ("blocks", batch * kv_heads * splits)
    attend = Op("split_attention", "split_attention", (*shape, blocks), dtype, _split_attention)
    combine = Op(
        "combine_splits",
        "combine_splits",
        (*sizes.items(), ("splits", splits), ("blocks", batch * q_heads)),
        dtype,
        _combine,
    )
    parts = (attend, combine) if splits > 1 else (attend,)
    return Op("flash_decoding", "attention", shape, dtype, sum_of_parts, parts=parts)


def _check(batch: int, q_heads: int, kv_heads: int, head_dim: int, context: int) -> None:
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "context": context}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; at least 1 is allowed")
    if q_heads % kv_heads:
        raise ValueError(f"q_heads is {q_heads}; a multiple of kv_heads, {kv_heads}, is needed")


def with_splits(op: Op, splits: int) -> Op:
    """The same attention by Flash-Decoding with `splits` parts."""
    return flash_decoding(
        batch=op["batch"],
        q_heads=op["q_heads"],
        kv_heads=op["kv_heads"],
        head_dim=op["head_dim"],
        context=op["context"],
        splits=splits,
        dtype=op.dtype,
    )


def split_choices(op: Op, processors: int) -> list[int]:
    """Numbers of splits to choose from: powers of two, and the numbers that just fill 1 to 16 waves of a
    device with `processors` processors; parts have at least 64 tokens."""
    groups = op["batch"] * op["kv_heads"]
    most = max(1, op["context"] // LEAST_PART)
    powers = {1 << i for i in range(most.bit_length())}
    filling = {processors * waves // groups for waves in range(1, MOST_WAVES + 1)}
    return sorted(splits for splits in powers | filling if 1 <= splits <= most)


def split_count(op: Op, price: Pricer, processors: int) -> int:
    """The number of splits at which a Flash-Decoding is cheapest; the smallest if several are.

    `op` may have any number of splits; `price` and `processors` are the device's.
    """
    return min(
        split_choices(op, processors), key=lambda splits: (price(with_splits(op, splits)).seconds, splits)
    )


def memory_bytes(op: Op) -> float:
    """Bytes of device memory in use at once: query, cache, output, and the partial outputs of the splits."""
    partial = _partial_bytes(op) if op.parts and op["splits"] > 1 else 0.0
    return _whole_context(op).hbm_bytes + partial


def method_op(
    method: str, *, batch: int, q_heads: int, kv_heads: int, head_dim: int, context: int, dtype: str
) -> Op:
    """The op of one of METHODS; Flash-Decoding with one split. Raises ValueError for another method."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(METHODS)}")
    one = flash_attention_2(
        batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, context=context, dtype=dtype
    )
    return one if method == "flash_attention_2" else with_splits(one, 1)
