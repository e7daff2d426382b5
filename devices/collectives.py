"""Prices of collectives and puts on a link: the alpha-beta model with a term for the start.

Hockney (1994): a message of B bytes takes alpha + B / rate. A collective is not a sequence of separate
messages: it starts once, and a step within it costs much less than the start. So alpha is split into
a = latency_s (the start), u = setup_s (a library's ring or tree, besides) and s = step_s (each step).
NCCL's own model has this form too (graph/tuning.cc: baseLat + steps hwLat). With n ranks, B the bytes of
the whole tensor (before a reduce-scatter, after an all-gather), p = per_peer_s, b = bytes_per_s and
k = ceil(log2 n):

    algorithm   all_gather, reduce_scatter          all_reduce
    ring        a + u + (n-1) (s + B/(n b))         a + u + 2 (n-1) (s + B/(n b))
    one_shot    a + v + (n-1) (p + B/(n b))         a + v + (n-1) (p + B/b)
    tree        a + u + k s + (n-1) B/(n b)         a + u + 2 k (s + B/b)
    pushed      a + (n-1) (q + B/(n e b))           a + (n-1) (q + B/(e b))

    pushed, all_reduce_normed                       as its all_reduce, and o for residual and norm

    put         a + s + B/b                         one step to the next rank, without a library's setup
                a + q + B/(e b)                     where words are pushed, if that is less

ring: Thakur, Rabenseifner and Gropp 2005, section 4. one_shot: every rank reads every other rank's
data through one port; v = one_shot_setup_s. tree: recursive doubling or halving (same paper) for one
pass; for all_reduce a binomial reduction and a binomial broadcast. pushed: every rank writes its words
into every other rank's memory, where they are their own flags (`simcore.kernels.collectives`); q =
push_per_peer_s, e = push_efficiency, o = push_normed_s. There are kernels of all_gather and all_reduce; an
exchange_priority is taken for an all_gather, a put for one of two ranks, and a reduce_scatter is not
pushed. On a ring only `ring` is allowed (`Link` checks it).
"""

from collections.abc import Callable, Mapping
from math import ceil, log2

from simcore.devices.spec import Link
from simcore.input.files import InputError
from simcore.ops.op import DTYPE_BYTES, Op

Cost = Callable[[float, int, Link], float]


def ring_pass_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds of a ring all-gather or reduce-scatter: a + u + (n-1) (s + B/(n b))."""
    step_s = link.step_s + size_bytes / (ranks * link.bytes_per_s)
    return link.latency_s + link.setup_s + (ranks - 1) * step_s


def ring_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds of a ring reduce-scatter and all-gather with one start:
    a + u + 2 (n-1) (s + B/(n b))."""
    step_s = link.step_s + size_bytes / (ranks * link.bytes_per_s)
    return link.latency_s + link.setup_s + 2.0 * (ranks - 1) * step_s


def one_shot_pass_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds until each rank has read its peers' n-th parts: a + v + (n-1) (p + B/(n b))."""
    start_s = link.latency_s + link.one_shot_setup_s
    return start_s + (ranks - 1) * (link.per_peer_s + size_bytes / (ranks * link.bytes_per_s))


def one_shot_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds until each rank has read and summed its peers' tensors: a + v + (n-1) (p + B/b)."""
    start_s = link.latency_s + link.one_shot_setup_s
    return start_s + (ranks - 1) * (link.per_peer_s + size_bytes / link.bytes_per_s)


def tree_pass_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds of recursive doubling (all-gather) or halving (reduce-scatter):
    a + u + k s + (n-1) B/(n b)."""
    wire_s = (ranks - 1) * size_bytes / (ranks * link.bytes_per_s)
    return link.latency_s + link.setup_s + ceil(log2(ranks)) * link.step_s + wire_s


def tree_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds of a binomial reduction and a binomial broadcast: a + u + 2 k (s + B/b)."""
    step_s = link.step_s + size_bytes / link.bytes_per_s
    return link.latency_s + link.setup_s + 2.0 * ceil(log2(ranks)) * step_s


def pushed_pass_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds until each rank has its peers' n-th parts: a + (n-1) (q + B/(n e b))."""
    return _pushed_s(size_bytes / ranks, ranks, link)


def pushed_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds until each rank has summed its peers' tensors: a + (n-1) (q + B/(e b))."""
    return _pushed_s(size_bytes, ranks, link)


def pushed_normed_sum_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds until each rank has the norm of a residual and its peers' sum: the sum's, and o."""
    assert link.push_normed_s is not None
    return pushed_all_reduce_s(size_bytes, ranks, link) + link.push_normed_s


def _pushed_s(part_bytes: float, ranks: int, link: Link) -> float:
    peer_s, efficiency = link.push_per_peer_s, link.push_efficiency
    assert peer_s is not None
    assert efficiency is not None
    return link.latency_s + (ranks - 1) * (peer_s + part_bytes / (efficiency * link.bytes_per_s))


def put_s(size_bytes: float, link: Link) -> float:
    """Returns the seconds until one message and its signal reach the next rank, one hop on every topology:
    a + s + B/b, or that of a pushed collective of two.

    No put was measured. On NVLink this is within 6 % of a one-shot all-reduce on two cards, which also
    moves one message each way and signals it; on a ring it is the collective on two chips, an upper
    bound, because the collective waits for both directions.
    """
    by_step_s = link.latency_s + link.step_s + size_bytes / link.bytes_per_s
    return min(by_step_s, _pushed_s(size_bytes, 2, link)) if link.pushes else by_step_s


_ONE_PASS: Mapping[str, Cost] = {"ring": ring_pass_s, "one_shot": one_shot_pass_s, "tree": tree_pass_s}
_GATHERED: Mapping[str, Cost] = {**_ONE_PASS, "pushed": pushed_pass_s}

COSTS: Mapping[str, Mapping[str, Cost]] = {
    "all_gather": _GATHERED,
    "reduce_scatter": _ONE_PASS,
    "exchange_priority": _GATHERED,
    "all_reduce": {
        "ring": ring_all_reduce_s,
        "one_shot": one_shot_all_reduce_s,
        "tree": tree_all_reduce_s,
        "pushed": pushed_all_reduce_s,
    },
    "all_reduce_normed": {"pushed": pushed_normed_sum_s},
}


def crosses_link(op: Op) -> bool:
    """Whether this kind of op is a collective or a put."""
    return op.kind == "put" or op.kind in COSTS


def collective_seconds(op: Op, link: Link) -> tuple[float, str]:
    """Returns the seconds of the cheapest algorithm that the link allows, and its name.

    Raises InputError if the op is no collective, or its ranks are more than the link connects.
    """
    if not crosses_link(op):
        raise InputError(f"{op.kind} {op.name} is no collective (known: {', '.join(COSTS)}, put)")
    size_bytes = op["elements"] * DTYPE_BYTES[op.dtype]
    if op.kind == "put":
        return put_s(size_bytes, link), "put"
    if op.ranks > link.max_devices:
        most = f"{link.kind} connects at most {link.max_devices} devices"
        raise InputError(f"{op.kind} {op.name}: {op.ranks} ranks, but {most}")
    if op.ranks == 1:
        return 0.0, "none"
    costs = COSTS[op.kind]
    able = [name for name in link.algorithms if name in costs]
    if not able:
        raise InputError(
            f"{op.kind} {op.name}: none of the algorithms {', '.join(link.algorithms)} does that"
        )
    return min((costs[name](size_bytes, op.ranks, link), name) for name in able)
