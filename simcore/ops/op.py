"""Ops, graphs, and their costs. A price is in seconds.

An op is a kind, a shape and a dtype. Its work follows from these three by one formula, above the constructor
of its kind:

    flops       floating-point operations (a multiply-add counts two)
    hbm_bytes   bytes that must cross device memory at least once (weights, caches, activations)
    wire_bytes  bytes that one rank must at least send over the link
    ranks       how many ranks take part (1: the op is local)

A shape may name a `Size`, which a captured graph reads from device memory at run time (for example a context
length); `Op.at(sizes)` replaces sizes by numbers.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

# Weights that share a scale: the group sizes of kernels for weights of 4 and 8 bits.
GROUP_SIZES = (32, 64, 128)


def _grouped_bytes(bits: int, group: int, zero_point: bool) -> float:
    """Bytes of one weight with its share of the group's scale (16 bits) and zero point (`bits` bits)."""
    return (bits + (16 + bits * zero_point) / group) / 8


# Weights in few bits, activations in 16 (W4A16, W8A16): stored so, multiplied as bf16. `_g128`: a scale for
# each group of 128; `_zp`: also a zero point (AWQ, GPTQ). Without a group there is a scale for each column,
# which is less than 0.1 % of the column and not counted.
WEIGHT_ONLY_BYTES: Mapping[str, float] = {
    f"w{bits}a16{suffix}": size
    for bits in (4, 8)
    for suffix, size in (
        ("", bits / 8),
        *((f"_g{group}", _grouped_bytes(bits, group, False)) for group in GROUP_SIZES),
        *((f"_g{group}_zp", _grouped_bytes(bits, group, True)) for group in GROUP_SIZES),
    )
}
# Columns and rows of a block of fp8 weights with one scale.
FP8_BLOCK = 128
# Bytes per element. bfp8 and bfp4 are Tenstorrent's block floating point: 16 numbers share one
# exponent byte, so an element takes 1 + 1/16 and 1/2 + 1/16 bytes.
DTYPE_BYTES: Mapping[str, float] = {
    "fp64": 8.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "bfp8": 1.0625,
    "bfp4": 0.5625,
    # fp8 with a scale of 4 bytes for each block of weights.
    "fp8_b128": 1.0 + 4.0 / FP8_BLOCK**2,
    **WEIGHT_ONLY_BYTES,
}
ACTIVATION_BYTES = DTYPE_BYTES["bf16"]
# Formats whose storage differs from the format in which they are multiplied.
MULTIPLIED_AS: Mapping[str, str] = {"fp8_b128": "fp8", **dict.fromkeys(WEIGHT_ONLY_BYTES, "bf16")}


def multiplied_as(dtype: str) -> str:
    """The format in which weights of a format are multiplied."""
    return MULTIPLIED_AS.get(dtype, dtype)


class UnboundSizeError(ValueError):
    """The work or a dimension of an op was read while it is still a run-time size."""


@dataclass(frozen=True, slots=True)
class Size:
    """A dimension that a captured graph reads from device memory at each replay: `scale` times the number
    with this name, plus `more`; no larger than `most`, if that is given."""

    name: str
    scale: int = 1
    more: int = 0
    most: int | None = None

    def __mul__(self, factor: int) -> "Size":
        most = None if self.most is None else self.most * factor
        return Size(self.name, self.scale * factor, self.more * factor, most)

    __rmul__ = __mul__

    def __add__(self, more: int) -> "Size":
        return Size(self.name, self.scale, self.more + more, self.most)

    def at(self, number: int) -> int:
        """Its value where the number with its name is this one."""
        value = number * self.scale + self.more
        return value if self.most is None else min(value, self.most)


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of an op on any device. Units: operations, bytes, bytes, ranks."""

    flops: float
    hbm_bytes: float
    wire_bytes: float = 0.0
    ranks: int = 1

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            self.wire_bytes + other.wire_bytes,
            max(self.ranks, other.ranks),
        )


Dim = int | Size
Shape = tuple[tuple[str, Dim], ...]
Formula = Callable[["Op"], Work]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel or one collective.

    `name`: its place in the model ("qkv", "lm_head"); `axis`: the mesh axis whose ranks meet in it (empty
    for a local op); `parts`: the ops inside a fused op. `place`: where in its buffers it works (layer,
    position): kernels and traces read it, its work and its price do not depend on it.
    """

    kind: str
    name: str
    shape: Shape
    dtype: str
    formula: Formula
    axis: str = ""
    parts: tuple["Op", ...] = ()
    place: Shape = ()

    @property
    def work(self) -> Work:
        """Work of this op. Raises UnboundSizeError while a dimension is a `Size`."""
        return self.formula(self)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the run-time sizes that its work depends on."""
        return _sizes(self.shape).union(*(part.reads for part in self._distinct))

    @property
    def needs(self) -> frozenset[str]:
        """The names of all run-time sizes that it reads, also those in its place."""
        return _sizes((*self.shape, *self.place)).union(*(part.needs for part in self._distinct))

    @property
    def without_place(self) -> "Op":
        """This op without its place: the op that is priced."""
        if not self.place and not self.parts:
            return self
        parts = self._each_part(lambda part: part.without_place)
        return self if not self.place and parts is self.parts else replace(self, place=(), parts=parts)

    @property
    def _distinct(self) -> "Iterable[Op]":
        """Its parts, each object once: a stream of a hundred thousand kernels repeats a few objects."""
        return {id(part): part for part in self.parts}.values()

    def _each_part(self, change: "Callable[[Op], Op]") -> "tuple[Op, ...]":
        """Its parts, changed; the same tuple if no part changes."""
        if not self.parts:
            return self.parts
        changed = {id(part): change(part) for part in self._distinct}
        if all(changed[id(part)] is part for part in self._distinct):
            return self.parts
        return tuple([changed[id(part)] for part in self.parts])

    @property
    def kernels(self) -> int:
        """How many kernels (nodes of a captured graph) it has: one for each part, or one."""
        return len(self.parts) or 1

    @property
    def ranks(self) -> int:
        """How many ranks meet in this op; 1 if it is local."""
        return next((int(v) for k, v in self.shape if k == "ranks" and isinstance(v, int)), 1)

    def __getitem__(self, dimension: str) -> int:
        """A dimension of the shape, as a number. Raises KeyError; UnboundSizeError for a run-time size."""
        for name, value in self.shape:
            if name == dimension:
                if isinstance(value, Size):
                    raise UnboundSizeError(f"{self.kind} {self.name}: {dimension} is read at run time")
                return value
        raise KeyError(f"{self.kind} has no dimension {dimension}")

    def where(self, name: str) -> int:
        """A coordinate of its place, as a number. Raises KeyError; UnboundSizeError for a run-time size."""
        value = dict(self.place)[name]
        if isinstance(value, Size):
            raise UnboundSizeError(f"{self.kind} {self.name}: {name} is read at run time")
        return value

    def later(self, more: Mapping[str, int]) -> "Op":
        """This op with so much more of its run-time sizes, also of those in its place, by their names."""
        parts = self._each_part(lambda part: part.later(more))
        return replace(self, shape=_more(self.shape, more), place=_more(self.place, more), parts=parts)

    def at(self, sizes: Mapping[str, int]) -> "Op":
        """This op with its run-time sizes replaced by numbers. Raises KeyError if a size is missing."""
        shape = tuple([(k, v if type(v) is int else _number(v, sizes)) for k, v in self.shape])
        if not self.place and not self.parts:
            # Nearly all ops come here, thousands of times per run.
            same = shape == self.shape
            return self if same else Op(self.kind, self.name, shape, self.dtype, self.formula, self.axis)
        place = _bound(self.place, sizes)
        parts = self._each_part(lambda part: part.at(sizes))
        if shape == self.shape and place == self.place and parts is self.parts:
            return self
        return Op(self.kind, self.name, shape, self.dtype, self.formula, self.axis, parts, place)


def _number(value: Dim, sizes: Mapping[str, int]) -> int:
    return value.at(sizes[value.name]) if isinstance(value, Size) else value


def _bound(shape: Shape, sizes: Mapping[str, int]) -> Shape:
    return tuple([(k, _number(v, sizes)) for k, v in shape])


def _more(shape: Shape, more: Mapping[str, int]) -> Shape:
    return tuple([(k, v + more.get(v.name, 0) if isinstance(v, Size) else v) for k, v in shape])


def _sizes(shape: Shape) -> frozenset[str]:
    return frozenset(value.name for _, value in shape if isinstance(value, Size))


def placed(op: Op, **place: Dim) -> Op:
    """The same op at a place in its buffers."""
    return replace(op, place=tuple(place.items()))


@dataclass(frozen=True, slots=True)
class Publication:
    """A put with a named signal, sent while a graph runs.

    It leaves when op `op` of the graph has finished its early part (`Price.early_s`; its end if the price has
    none) and goes to the next rank along `put.axis`. `put`: the transfer over the wire.
    """

    signal: str
    op: int
    put: Op


@dataclass(frozen=True)
class Graph:
    """A static list of ops: captured once on a GPU, priced once in the simulator, printable.

    Raises ValueError if it publishes from an op that it does not have, or from a collective.
    """

    name: str
    ops: tuple[Op, ...]
    publishes: tuple[Publication, ...] = ()

    def __post_init__(self) -> None:
        for publication in self.publishes:
            if not 0 <= publication.op < len(self.ops) or self.ops[publication.op].ranks > 1:
                raise ValueError(f"graph {self.name}: {publication.signal} has to be published by a local op")

    @cached_property
    def kernels(self) -> int:
        """How many kernels its ops have."""
        return sum(op.kernels for op in self.ops)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of its ops."""
        return frozenset(op.kind for op in self.ops)

    @cached_property
    def meets(self) -> bool:
        """Whether a collective is among the ops."""
        return any(op.ranks > 1 for op in self.ops)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes along which its collectives meet."""
        return frozenset(op.axis for op in self.ops if op.ranks > 1)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of the run-time sizes that its work depends on."""
        return frozenset().union(*(op.reads for op in self.ops))

    @cached_property
    def needs(self) -> frozenset[str]:
        """The names of the run-time sizes that a launch of this graph must give."""
        return frozenset().union(*(op.needs for op in self.ops))

    @cached_property
    def most_added(self) -> Mapping[str, int]:
        """By the names of the run-time sizes in the shapes of its ops: the most that an op adds to one."""
        found: dict[str, int] = {}
        for _, value in (each for op in self.ops for each in op.shape):
            if isinstance(value, Size):
                found[value.name] = max(value.more, found.get(value.name, value.more))
        return found

    def __add__(self, other: "Graph") -> "Graph":
        """Both graphs captured as one, in this order."""
        moved = tuple(replace(p, op=p.op + len(self.ops)) for p in other.publishes)
        name = "+".join(part for part in (self.name, other.name) if part)
        return Graph(name, self.ops + other.ops, self.publishes + moved)


SourceKind = Literal[
    "measured", "published", "interpolated", "carried", "extrapolated", "roofline", "assumed"
]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds that one op takes alone on its device, the source of the number, and its interval.

    `low_s` and `high_s` bound a 90 % interval. `source` "carried" means scaled from another device.
    `early_s`: when an early part of the result leaves the device, for ops that have one (speculative
    attention). `cached`: the op was measured to take less time than its memory traffic would, because its
    operands are in a cache. `left_s`: of its seconds, those of traffic that the op leaves to the next one.
    """

    seconds: float
    low_s: float
    high_s: float
    source: SourceKind
    detail: str
    early_s: float | None = None
    cached: bool = False
    left_s: float = 0.0

    def longer(self, more_s: float) -> "Price":
        """The price of an op whose beginning takes `more_s` longer."""
        early_s = None if self.early_s is None else self.early_s + more_s
        low_s, high_s = self.low_s + more_s, self.high_s + more_s
        return replace(self, seconds=self.seconds + more_s, low_s=low_s, high_s=high_s, early_s=early_s)

    def leaving(self, left_s: float) -> "Price":
        """The price of an op that leaves so many seconds of traffic to the next one."""
        seconds, low_s, high_s = self.seconds + left_s, self.low_s + left_s, self.high_s + left_s
        return replace(self, seconds=seconds, low_s=low_s, high_s=high_s, left_s=left_s)

    def times(self, factor: float) -> "Price":
        """The price of an op that takes `factor` times as long."""
        early_s = None if self.early_s is None else factor * self.early_s
        low_s, high_s = factor * self.low_s, factor * self.high_s
        return replace(self, seconds=factor * self.seconds, low_s=low_s, high_s=high_s, early_s=early_s)


class Floor(NamedTuple):
    """The least seconds that an op can take by the device's datasheet: one bound per resource."""

    compute_s: float
    memory_s: float
    wire_s: float

    @property
    def seconds(self) -> float:
        """The roofline: the largest of the three bounds."""
        return max(self.compute_s, self.memory_s, self.wire_s)

    def of(self, price: Price) -> "Floor":
        """The floor of an op with this price: without memory time if its operands are in a cache, and with
        what it leaves to the next op."""
        if not price.cached and price.left_s == 0.0:
            return self
        return self._replace(memory_s=price.left_s + (0.0 if price.cached else self.memory_s))


Pricer = Callable[[Op], Price]
Roofline = Callable[[Op], Floor]


def _bytes(dtype: str) -> float:
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}") from None


# -- projections ---------------------------------------------------------------------------------


def _matmul(op: Op) -> Work:
    m, n, k = op["m"], op["n"], op["k"]
    return Work(2.0 * m * n * k, k * n * _bytes(op.dtype) + m * (k + n) * ACTIVATION_BYTES)


def matmul(name: str, *, m: Dim, n: int, k: int, dtype: str) -> Op:
    """y[m, n] = x[m, k] @ W[k, n]; `dtype` is the format of the weights. Activations count as bf16, x before
    weights of 8 bits too."""
    return Op("matmul", name, (("m", m), ("n", n), ("k", k)), dtype, _matmul)


def _embedding(op: Op) -> Work:
    return Work(0.0, op["tokens"] * op["hidden"] * (_bytes(op.dtype) + ACTIVATION_BYTES))


def embedding(*, tokens: Dim, hidden: int, dtype: str) -> Op:
    """x[tokens, hidden] = table[ids]; only the rows read count."""
    return Op("embedding", "embedding", (("tokens", tokens), ("hidden", hidden)), dtype, _embedding)


# -- element-wise --------------------------------------------------------------------------------


def _norm(op: Op) -> Work:
    elements = op["tokens"] * op["hidden"]
    return Work(4.0 * elements, 2.0 * elements * _bytes(op.dtype))


def norm(name: str, *, tokens: Dim, hidden: int, dtype: str) -> Op:
    """RMS or layer norm of x[tokens, hidden]: read once, written once."""
    return Op("norm", name, (("tokens", tokens), ("hidden", hidden)), dtype, _norm)


def _rotary(op: Op) -> Work:
    elements = op["tokens"] * (op["q_heads"] + op["kv_heads"]) * op["head_dim"]
    # A pair (a, b) becomes (a cos - b sin, b cos + a sin): six for two elements.
    return Work(3.0 * elements, 2.0 * elements * _bytes(op.dtype))


def rotary(*, tokens: Dim, q_heads: int, kv_heads: int, head_dim: int, dtype: str) -> Op:
    """Split of qkv into heads and rotary embedding of q and k."""
    shape = (("tokens", tokens), ("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim))
    return Op("rotary", "rotary", shape, dtype, _rotary)


def _activation(op: Op) -> Work:
    elements = op["tokens"] * op["width"]
    inputs = 1 + op["gated"]
    return Work((4.0 + op["gated"]) * elements, (inputs + 1.0) * elements * _bytes(op.dtype))


def activation(*, tokens: Dim, width: int, gated: bool, dtype: str) -> Op:
    """act(gate) * up (gated) or act(x): [tokens, width] out."""
    shape = (("tokens", tokens), ("width", width), ("gated", int(gated)))
    return Op("activation", "activation", shape, dtype, _activation)


def _residual(op: Op) -> Work:
    elements = op["tokens"] * op["hidden"]
    return Work(1.0 * elements, 3.0 * elements * _bytes(op.dtype))


def residual(name: str, *, tokens: Dim, hidden: int, dtype: str) -> Op:
    """x += y over [tokens, hidden]."""
    return Op("residual", name, (("tokens", tokens), ("hidden", hidden)), dtype, _residual)


def _quantize(op: Op) -> Work:
    elements = op["tokens"] * op["width"]
    return Work(2.0 * elements, elements * (ACTIVATION_BYTES + _bytes(op.dtype)))


def quantize(name: str, *, tokens: Dim, width: int, dtype: str) -> Op:
    """x[tokens, width] in a format of 8 bits, for the product behind it."""
    return Op("quantize", name, (("tokens", tokens), ("width", width)), dtype, _quantize)


# -- attention -----------------------------------------------------------------------------------


def _kv_append(op: Op) -> Work:
    elements = 2.0 * op["tokens"] * op["kv_heads"] * op["head_dim"]
    return Work(0.0, elements * (ACTIVATION_BYTES + _bytes(op.dtype)))


def kv_append(*, tokens: Dim, kv_heads: int, head_dim: int, dtype: str) -> Op:
    """Writes k and v of the new tokens into the cache; `dtype` is the format of the cache."""
    shape = (("tokens", tokens), ("kv_heads", kv_heads), ("head_dim", head_dim))
    return Op("kv_append", "kv_append", shape, dtype, _kv_append)


def _attention(op: Op, queries: float, cached: float, pairs: float) -> Work:
    """The work of `queries` query tokens over `cached` tokens, read once each, in (query, key) `pairs`."""
    q_heads, kv_heads, d = op["q_heads"], op["kv_heads"], op["head_dim"]
    cache = 2.0 * cached * kv_heads * d * _bytes(op.dtype)
    query_and_output = 2.0 * queries * q_heads * d * ACTIVATION_BYTES
    return Work(4.0 * pairs * q_heads * d, cache + query_and_output)


def _attend(op: Op) -> Work:
    """One query token for each sequence of a batch; all sequences have the same context."""
    cached = op["batch"] * op["context"]
    return _attention(op, op["batch"], cached, cached)


def _attention_shape(batch: Dim, q_heads: int, kv_heads: int, head_dim: int, context: Dim) -> Shape:
    return (
        ("batch", batch),
        ("q_heads", q_heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("context", context),
    )


def decode_attention(
    *, batch: Dim, q_heads: int, kv_heads: int, head_dim: int, context: Dim, dtype: str
) -> Op:
    """softmax(q K^T) V for one query token per sequence over `context` cached tokens (Flash-Decoding).

    q and output [batch, q_heads, head_dim]; K and V [batch, kv_heads, context, head_dim] in `dtype`.
    """
    shape = _attention_shape(batch, q_heads, kv_heads, head_dim, context)
    return Op("decode_attention", "attention", shape, dtype, _attend)


def _speculative_attention(op: Op) -> Work:
    # Two squared norms (of the exact output and of the difference): 4 flops per output element
    # (ALSpec section 3.4); the speculated part is read once and reused.
    verification = 4.0 * op["batch"] * op["q_heads"] * op["head_dim"]
    return _attend(op) + Work(verification, 0.0)


def speculative_attention(
    *, batch: Dim, q_heads: int, kv_heads: int, head_dim: int, context: Dim, chunk: int, dtype: str
) -> Op:
    """Decode attention that publishes the part over the first and last `chunk` tokens early, finishes
    exactly, and verifies ||speculated - exact|| < lambda ||exact|| (ALSpec Algorithm 3, section 4.1).
    """
    shape = (*_attention_shape(batch, q_heads, kv_heads, head_dim, context), ("chunk", chunk))
    return Op("speculative_attention", "attention", shape, dtype, _speculative_attention)


def early_part(op: Op) -> Op:
    """The attention over the first and last chunk alone, which a speculative attention computes before it
    publishes; at most the whole context."""
    context = min(2 * op["chunk"], op["context"])
    return decode_attention(
        batch=op["batch"],
        q_heads=op["q_heads"],
        kv_heads=op["kv_heads"],
        head_dim=op["head_dim"],
        context=context,
        dtype=op.dtype,
    )


def _receive_speculation(op: Op) -> Work:
    return Work(0.0, 2.0 * op["tokens"] * op["width"] * _bytes(op.dtype))


def receive_speculation(*, tokens: Dim, width: int, dtype: str) -> Op:
    """Copies a speculated attention output [tokens, width] from the receive buffer; it is this rank's x."""
    return Op(
        "receive_speculation", "receive", (("tokens", tokens), ("width", width)), dtype, _receive_speculation
    )


def _paged_attention(op: Op) -> Work:
    return _attention(op, op["sequences"], op["kv_tokens"], op["kv_tokens"])


def paged_attention(
    *,
    sequences: Dim,
    kv_tokens: Dim,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    over_mean: Dim | None = None,
) -> Op:
    """Decode attention of sequences of different lengths: one query token each, over `kv_tokens` cached
    tokens in all (PagedAttention, Kwon et al. 2023: the cache is read in place, block by block).

    `over_mean`: by how many tokens the longest sequence exceeds the mean length, which `longest` rounds up.
    Unlike the longest length itself it stays while all sequences grow. None: lengths are spread evenly from a
    fifth of their mean to nine fifths."""
    shape: Shape = (
        ("sequences", sequences),
        ("kv_tokens", kv_tokens),
        ("q_heads", q_heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
    )
    if over_mean is not None:
        shape = (*shape, ("over_mean", over_mean))
    return Op("paged_attention", "attention", shape, dtype, _paged_attention)


def longest(kv_tokens: int, sequences: int, over_mean: int) -> int:
    """Tokens of the longest of some sequences, which exceeds their mean by `over_mean`; the others keep a
    token each at least.

    >>> longest(10, 4, 0), longest(10, 4, 2), longest(10, 4, 99)
    (3, 5, 7)
    """
    mean = -(-kv_tokens // sequences)
    return max(mean, min(mean + over_mean, kv_tokens - sequences + 1))


def says_longest(dimensions: Container[str]) -> bool:
    """Whether a shape of these dimensions says how long its longest sequence is."""
    return "over_mean" in dimensions


def longest_of_spread(kv_tokens: int, sequences: int) -> int:
    """Tokens of the longest of sequences whose lengths are spread evenly from a fifth of their mean to nine
    fifths (`spread_to`), to a token.

    >>> longest_of_spread(100, 4), longest_of_spread(4, 4), longest_of_spread(90, 1)
    (39, 1, 90)
    """
    spare = kv_tokens - sequences
    return 1 + spare - spread_to(spare, sequences - 1, sequences)


def spread_to(spare: int, part: int, parts: int) -> int:
    """How much of a number the first `part` of `parts` parts have together, whose sizes rise evenly from a
    fifth of their mean to nine fifths: spare (p / 5 + 4 p^2 / 5 n) / n, rounded.

    >>> [spread_to(96, part, 4) for part in range(5)]
    [0, 10, 29, 58, 96]
    """
    return (2 * spare * part * (parts + 4 * part) + 5 * parts * parts) // (10 * parts * parts)


def _prefill_attention(op: Op) -> Work:
    return _attention(op, op["tokens"], op["kv_tokens"], op["pairs"])


def prefill_attention(
    *,
    tokens: Dim,
    kv_tokens: Dim,
    pairs: Dim,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> Op:
    """Causal attention of `tokens` prompt tokens over `kv_tokens` cached tokens, which include them;
    `pairs`: (query, key) pairs under the causal mask (FlashAttention: the cache is read once)."""
    shape = (
        ("tokens", tokens),
        ("kv_tokens", kv_tokens),
        ("pairs", pairs),
        ("q_heads", q_heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
    )
    return Op("prefill_attention", "prefill_attention", shape, dtype, _prefill_attention)


def prompts(tokens: int, kv_tokens: int, pairs: int) -> int:
    """How many prompts of equal length have about as many (query, key) pairs as a prefill attention.

    n prompts of t/n tokens after c/n cached ones have  (t c + t^2/2) / n + t/2  pairs.

    >>> prompts(8, 8, 36), prompts(8, 8, 20), prompts(8, 24, 82)
    (1, 2, 2)
    """
    whole = tokens * (kv_tokens - tokens) + tokens * tokens / 2
    return max(1, min(tokens, round(whole / max(pairs - tokens / 2, 0.5))))


def _kv_copy(op: Op) -> Work:
    return Work(0.0, 2.0 * op["tokens"] * op["width"] * _bytes(op.dtype))


def kv_copy(*, tokens: Dim, width: int, dtype: str) -> Op:
    """Moves the cache of `tokens` tokens, `width` elements per token over all layers, to another slot: read
    and written once (Flover, Algorithm 3)."""
    return Op("kv_copy", "kv_copy", (("tokens", tokens), ("width", width)), dtype, _kv_copy)


def _sample(op: Op) -> Work:
    return Work(1.0 * op["tokens"] * op["vocab"], op["tokens"] * op["vocab"] * _bytes(op.dtype))


def sample(*, tokens: Dim, vocab: int, dtype: str) -> Op:
    """Greedy choice over logits [tokens, vocab]."""
    return Op("sample", "sample", (("tokens", tokens), ("vocab", vocab)), dtype, _sample)


# -- whole iterations ----------------------------------------------------------------------------


def _iteration(op: Op) -> Work:
    rows, cached = op["tokens"], op["kv_tokens"]
    flops = 2.0 * op["parameters"] * rows + 4.0 * op["width"] * cached
    return Work(flops, op["weight_bytes"] + cached * op["kv_bytes"])


def _whole(kind: str, tokens: str, **dimensions: Dim) -> Op:
    count = dimensions.pop("count")
    shape = ((tokens, count), ("tokens", count), *dimensions.items())
    return Op(kind, kind, shape, "bf16", _iteration)


def iteration(
    *, sequences: Dim, kv_tokens: Dim, parameters: int, width: int, weight_bytes: int, kv_bytes: int
) -> Op:
    """A token for each of `sequences` sequences through the whole model, as one op: for devices on which only
    whole iterations were timed. `parameters`: weights in matrix products; `width`: elements of the queries of
    all layers; `kv_bytes`: bytes of one cached token; `kv_tokens`: cached tokens attended over in all."""
    return _whole(
        "iteration",
        "sequences",
        count=sequences,
        kv_tokens=kv_tokens,
        parameters=parameters,
        width=width,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def pre_processing(
    *, prompt_tokens: Dim, kv_tokens: Dim, parameters: int, width: int, weight_bytes: int, kv_bytes: int
) -> Op:
    """A prompt of `prompt_tokens` tokens through the whole model, as one op; as `iteration`."""
    return _whole(
        "pre_processing",
        "prompt_tokens",
        count=prompt_tokens,
        kv_tokens=kv_tokens,
        parameters=parameters,
        width=width,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


# -- collectives and puts ------------------------------------------------------------------------
# `elements` is the size of the whole tensor (before a reduce-scatter, after an all-gather).
# The least wire bytes that a rank sends: (n-1)/n of the tensor for all-gather and reduce-scatter, twice that
# for all-reduce (Thakur, Rabenseifner, Gropp 2005).


def _moved(op: Op, passes: float) -> Work:
    size, ranks = op["elements"] * _bytes(op.dtype), op["ranks"]
    return Work(0.0, size, passes * size * (ranks - 1) / ranks, ranks)


def _one_pass(op: Op) -> Work:
    return _moved(op, 1.0)


def _two_passes(op: Op) -> Work:
    return _moved(op, 2.0)


def _collective(
    kind: str, name: str, elements: Dim, ranks: int, axis: str, dtype: str, formula: Formula
) -> Op:
    return Op(kind, name, (("elements", elements), ("ranks", ranks)), dtype, formula, axis)


def all_gather(name: str, *, elements: Dim, ranks: int, axis: str, dtype: str) -> Op:
    """Every rank of `axis` ends with the whole tensor, of which each rank held 1/ranks."""
    return _collective("all_gather", name, elements, ranks, axis, dtype, _one_pass)


def reduce_scatter(name: str, *, elements: Dim, ranks: int, axis: str, dtype: str) -> Op:
    """Every rank of `axis` ends with 1/ranks of the sum of the ranks' tensors."""
    return _collective("reduce_scatter", name, elements, ranks, axis, dtype, _one_pass)


def all_reduce(name: str, *, elements: Dim, ranks: int, axis: str, dtype: str) -> Op:
    """Every rank of `axis` ends with the sum of the ranks' tensors."""
    return _collective("all_reduce", name, elements, ranks, axis, dtype, _two_passes)


def all_reduce_normed(parts: tuple[Op, Op, Op]) -> Op:
    """An all_reduce, the residual that its sum is added to, and the norm of that, by one launch."""
    fused = fuse("all_reduce_normed", parts[0].name, parts)
    return replace(fused, shape=(("elements", dict(parts[0].shape)["elements"]), *fused.shape))


def exchange_priority(*, elements: Dim, ranks: int, axis: str, dtype: str) -> Op:
    """All-gather of the priority vector p, with the residual stream and the new K and V of the rank that
    holds them, written in place (ALSpec Algorithm 2 and its footnote 2). `elements`: sent by one rank."""
    return _collective("exchange_priority", "exchange", elements * ranks, ranks, axis, dtype, _one_pass)


def _put(op: Op) -> Work:
    size = op["elements"] * _bytes(op.dtype)
    return Work(0.0, size, size)


def put(name: str, *, elements: Dim, axis: str, dtype: str) -> Op:
    """One rank writes `elements` into the memory of the next rank along `axis`."""
    return Op("put", name, (("elements", elements),), dtype, _put, axis)


# -- fusion --------------------------------------------------------------------------------------


def sum_of_parts(op: Op) -> Work:
    """The work of a fused op: the sum over its parts."""
    total = Work(0.0, 0.0)
    for part in op.parts:
        total = total + part.work
    return total


def fuse(kind: str, name: str, parts: tuple[Op, ...]) -> Op:
    """Makes one op of several, which run and are priced as one. Its ranks meet once, along the only axis of
    the parts. Raises ValueError if the parts meet along several axes."""
    axes = {part.axis for part in parts if part.axis}
    if len(axes) > 1:
        raise ValueError(f"fused op {name}: its parts meet along several axes: {sorted(axes)}")
    shapes: dict[str, Dim] = {}
    for part in parts:
        for dimension, value in part.shape:
            if isinstance(value, Size):
                shapes[dimension] = value
    ranks = max((part["ranks"] for part in parts if part.axis), default=1)
    shapes["ranks"] = ranks
    return Op(kind, name, tuple(shapes.items()), parts[0].dtype, sum_of_parts, next(iter(axes), ""), parts)
