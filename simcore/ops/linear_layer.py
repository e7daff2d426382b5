"""Ops of a decoder's layer of linear attention with decay, besides those that it shares with other layers.

    decode   S = gamma S + k^T v,  out = q S      one token of each sequence
    prompts  the same for a chunk of tokens of each prompt, in blocks, from the state that it has to the next
    lrpe     x -> [x cos(p theta), x sin(p theta)]     twice as wide (linearized relative position encoding)
    silu     x -> x sigmoid(x)
    product  x, y -> x y

q and k [.., heads, rank], v and out [.., heads, dim], S [sequences, heads, rank, dim]. States are in fp32
whatever the format of the activations: they sum over a whole context. Sources: RetNet (Sun et al. 2023),
TransNormerLLM (Qin et al. 2023), LRPE (Qin et al. 2023).
"""

from simcore.ops.linear_attention import DEFAULT_BLOCKS, linear_attention
from simcore.ops.op import DTYPE_BYTES, Dim, Op, Work, prompts

STATE_BYTES = DTYPE_BYTES["fp32"]
# What stands in a layer where attention stands in others.
DECODE, PROMPTS = "linear_attention_decode", "linear_attention_prompts"


def state_bytes(heads: int, rank: int, dim: int) -> float:
    """Bytes of the state of one sequence in one layer.

    >>> state_bytes(32, 128, 128) == 2 * 2**20
    True
    """
    return STATE_BYTES * heads * rank * dim


def _tokens(op: Op, tokens: int) -> float:
    """Bytes of q, k, v and out of so many tokens."""
    return DTYPE_BYTES[op.dtype] * tokens * op["heads"] * 2.0 * (op["rank"] + op["dim"])


def _states(op: Op, sequences: int) -> float:
    """Bytes of so many states, read once and written once."""
    return 2.0 * sequences * state_bytes(op["heads"], op["rank"], op["dim"])


def _decode(op: Op) -> Work:
    # A multiply for gamma S, a multiply-add for k^T v, one for q S.
    flops = 5.0 * op["batch"] * op["heads"] * op["rank"] * op["dim"]
    return Work(flops, _states(op, op["batch"]) + _tokens(op, op["batch"]))


def linear_attention_decode(*, batch: Dim, heads: int, rank: int, dim: int, dtype: str) -> Op:
    """One token of each of `batch` sequences; states in place."""
    shape = (("batch", batch), ("heads", heads), ("rank", rank), ("dim", dim))
    return Op(DECODE, "linear_attention", shape, dtype, _decode)


def prompts_of(op: Op) -> int:
    """How many prompts share the tokens of a `linear_attention_prompts`; see `simcore.ops.op.prompts`."""
    return prompts(op["tokens"], op["kv_tokens"], op["pairs"])


def as_lightning(op: Op) -> Op:
    """The method of `simcore.ops.linear_attention` that computes a `linear_attention_prompts`, on prompts of
    equal length, the last one filled up."""
    count = prompts_of(op)
    return linear_attention(
        "lightning",
        batch=count,
        heads=op["heads"],
        length=-(-op["tokens"] // count),
        rank=op["rank"],
        dim=op["dim"],
        dtype=op.dtype,
        decay=True,
    )


def _prompts(op: Op) -> Work:
    rows, r, d = DEFAULT_BLOCKS["lightning"], op["rank"], op["dim"]
    # Inside a block q k^T, mask and product with v; for every token k^T v and q S.
    inside = op["tokens"] * min(rows, op["tokens"]) * (2.0 * r + 1.0 + 2.0 * d)
    flops = op["heads"] * (inside + 4.0 * op["tokens"] * r * d)
    return Work(flops, _states(op, prompts_of(op)) + _tokens(op, op["tokens"]))


def linear_attention_prompts(
    *, tokens: Dim, kv_tokens: Dim, pairs: Dim, heads: int, rank: int, dim: int, dtype: str
) -> Op:
    """A chunk of each of some prompts, `tokens` in all, each from its own state. `kv_tokens` and `pairs` are
    those of `prefill_attention` in the same step: they say how many prompts there are."""
    sizes = (("tokens", tokens), ("kv_tokens", kv_tokens), ("pairs", pairs))
    shape = (*sizes, ("heads", heads), ("rank", rank), ("dim", dim))
    return Op(PROMPTS, "linear_attention_prompts", shape, dtype, _prompts)


def _lrpe(op: Op) -> Work:
    elements = op["tokens"] * op["width"]
    return Work(2.0 * elements, 3.0 * elements * DTYPE_BYTES[op.dtype])


def lrpe(*, tokens: Dim, width: int, dtype: str) -> Op:
    """x [tokens, width] becomes [x cos, x sin], [tokens, 2 width]."""
    return Op("lrpe", "lrpe", (("tokens", tokens), ("width", width)), dtype, _lrpe)


def _silu(op: Op) -> Work:
    elements = op["tokens"] * op["width"]
    return Work(4.0 * elements, 2.0 * elements * DTYPE_BYTES[op.dtype])


def silu(name: str, *, tokens: Dim, width: int, dtype: str) -> Op:
    """x sigmoid(x) of x [tokens, width]."""
    return Op("silu", name, (("tokens", tokens), ("width", width)), dtype, _silu)


def _product(op: Op) -> Work:
    elements = op["tokens"] * op["width"]
    return Work(1.0 * elements, 3.0 * elements * DTYPE_BYTES[op.dtype])


def product(name: str, *, tokens: Dim, width: int, dtype: str) -> Op:
    """x y of x, y [tokens, width], element by element."""
    return Op("product", name, (("tokens", tokens), ("width", width)), dtype, _product)
