"""FLOPs and bytes of ops, against their closed forms."""

import pytest

from simcore.ops import op as ops
from simcore.ops.op import Op

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
        # Rows of the table are read, and written as they are.
        (ops.embedding(tokens=TOKENS, hidden=WIDTH, dtype="bf16"), 0, 2 * TOKENS * WIDTH * BYTES),
    ],
    ids=lambda value: value.kind if isinstance(value, Op) else "",
)
def test_work_is_that_of_the_closed_form(op: Op, flops: float, hbm_bytes: float) -> None:
    assert op.work.flops == flops
    assert op.work.hbm_bytes == hbm_bytes
