"""FLOPs and bytes of ops, against their closed forms."""

from dataclasses import replace

import pytest

from simcore.ops import op as ops
from simcore.ops.op import Floor, Graph, Op, Price, Size, fuse, placed

TOKENS, WIDTH, BYTES = 7, 96, 2


@pytest.mark.parametrize(
    ("op", "flops", "hbm_bytes"),
    [
        # One comparison for each logit, which is read once.
        (ops.sample(tokens=TOKENS, vocab=WIDTH, dtype="bf16"), TOKENS * WIDTH, TOKENS * WIDTH * BYTES),
        # Read and written once.
        (ops.kv_copy(tokens=TOKENS, width=WIDTH, dtype="bf16"), 0, 2 * TOKENS * WIDTH * BYTES),
        # Two operands are read, one is written.
        (
            ops.residual("r", tokens=TOKENS, hidden=WIDTH, dtype="bf16"),
            TOKENS * WIDTH,
            3 * TOKENS * WIDTH * BYTES,
        ),
        # Squared, added up, divided by the root of the mean, multiplied by a weight.
        (
            ops.norm("n", tokens=TOKENS, hidden=WIDTH, dtype="bf16"),
            4 * TOKENS * WIDTH,
            2 * TOKENS * WIDTH * BYTES,
        ),
        # Multiplied and cut off; read in 16 bits and written in 8.
        (
            ops.quantize("q", tokens=TOKENS, width=WIDTH, dtype="fp8"),
            2 * TOKENS * WIDTH,
            TOKENS * WIDTH * (2 + 1),
        ),
        # Read and written once.
        (ops.receive_speculation(tokens=TOKENS, width=WIDTH, dtype="bf16"), 0, 2 * TOKENS * WIDTH * BYTES),
        # k and v of 3 heads of 8 are read in 16 bits and written in 8.
        (
            ops.kv_append(tokens=TOKENS, kv_heads=3, head_dim=8, dtype="fp8"),
            0,
            2 * TOKENS * 3 * 8 * (2 + 1),
        ),
        # Each pair of two elements takes four products and two sums; 6 heads of 8, read and written.
        (
            ops.rotary(tokens=TOKENS, q_heads=4, kv_heads=2, head_dim=8, dtype="bf16"),
            6 * TOKENS * 6 * (8 // 2),
            2 * TOKENS * 6 * 8 * BYTES,
        ),
        # Rows of the table are read, and written as they are.
        (ops.embedding(tokens=TOKENS, hidden=WIDTH, dtype="bf16"), 0, 2 * TOKENS * WIDTH * BYTES),
    ],
    ids=lambda value: value.kind if isinstance(value, Op) else "",
)
def test_work_is_that_of_the_closed_form(op: Op, flops: float, hbm_bytes: float) -> None:
    assert op.work.flops == flops
    assert op.work.hbm_bytes == hbm_bytes


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_collective_sends_the_parts_of_the_others_and_computes_nothing(
    kind: str, passes: int, ranks: int
) -> None:
    work = getattr(ops, kind)("x", elements=WIDTH, ranks=ranks, axis="tensor", dtype="bf16").work
    assert (work.flops, work.hbm_bytes, work.ranks) == (0.0, WIDTH * BYTES, ranks)
    assert work.wire_bytes == passes * WIDTH * BYTES * (ranks - 1) / ranks


def test_a_whole_iteration_multiplies_each_weight_and_attends_to_each_cached_token() -> None:
    """3 sequences over 50 cached tokens; for each token and element of q: with a key, and with a value."""
    model = {"parameters": 1000, "width": 8, "weight_bytes": 2000, "kv_bytes": 16}
    for op in (
        ops.iteration(sequences=3, kv_tokens=50, **model),
        ops.pre_processing(prompt_tokens=3, kv_tokens=50, **model),
    ):
        assert op.work.flops == 2 * 1000 * 3 + (2 + 2) * 8 * 50
        assert op.work.hbm_bytes == 2000 + 16 * 50


# -- fused and placed ops --------------------------------------------------------------------------------


def norm(tokens: int | Size = TOKENS) -> Op:
    return ops.norm("norm", tokens=tokens, hidden=WIDTH, dtype="bf16")


def gather(axis: str = "tensor") -> Op:
    return ops.all_gather("gather", elements=WIDTH, ranks=2, axis=axis, dtype="bf16")


def test_ops_meet_along_the_axes_of_their_collectives() -> None:
    assert Graph("both", (norm(), gather())).axes == {"tensor"}
    assert Graph("local", (norm(),)).axes == set()
    assert norm().work.ranks == norm().ranks == 1
    fused = fuse("fused", "fused", (norm(), gather()))
    assert (fused.work.ranks, fused.ranks, fused.axis) == (2, 2, "tensor")
    with pytest.raises(ValueError, match="along several axes"):
        fuse("fused", "fused", (gather(), gather("group")))


@pytest.mark.parametrize("others", [(), (norm(),)], ids=["alone", "beside one that reads nothing"])
def test_sizes_reach_the_parts_of_a_fused_op(others: tuple[Op, ...]) -> None:
    part = placed(norm(Size("rows", 3)), position=Size("position"))
    fused = fuse("fused", "fused", (*others, part))
    assert fused.reads == {"rows"}
    assert fused.needs == {"rows", "position"}
    bound = fused.at({"rows": 2, "position": 5})
    assert bound["tokens"] == 6
    assert bound.parts == (*others, placed(norm(6), position=5))
    assert bound.work.flops == norm(6).work.flops + sum(op.work.flops for op in others)
    # Parts of a fused op may be told apart by their places alone.
    still = fuse("fused", "fused", (*others, placed(norm(), position=Size("position"))))
    assert still.at({"position": 5}).parts[-1].where("position") == 5


def test_ops_without_their_places_are_the_same_wherever_they_are() -> None:
    here, there = (fuse("fused", "fused", (norm(), placed(norm(), layer=i))) for i in (1, 2))
    assert here != there
    assert here.without_place == there.without_place == fuse("fused", "fused", (norm(), norm()))
    assert placed(here, layer=3).without_place == here.without_place
    assert placed(norm(), layer=3).without_place == norm()


def test_memory_does_not_bound_what_is_in_a_cache() -> None:
    floor, price = Floor(1.0, 2.0, 0.5), Price(3.0, 3.0, 3.0, "measured", "by hand")
    assert floor.of(price) == floor
    assert floor.of(replace(price, cached=True)) == Floor(1.0, 0.0, 0.5)
