"""Tensor parallelism: every rank holds a slice of every layer, and all ranks take every step together.

    token latency = outside the layers + layers * (layer without attention + attention(context))

One captured graph per token. The next token's is launched while a token is computed: the device passes the
token on itself, so the host, like that of `alspec`, has nothing to wait for, and runs one token ahead.
(Shoeybi et al. 2019; the baseline of ALSpec, App. F.)
"""

from simcore.machine.machine import Machine, Program, Ticket
from simcore.models.decoder import Decoder


def tensor_parallel(m: Machine, model: Decoder, *, tokens: int, context: int) -> Program:
    """Decodes `tokens` tokens after `context` cached ones; marks "token i" at the end of each.

    Mesh: {"tensor": ranks}.
    """
    before: Ticket | None = None
    for token in range(tokens):
        step = m.launch(model.token_step, sizes={"context": context + token})
        m.mark(f"token {token}", [step])
        if before is not None:
            yield m.wait(before)
        before = step
    if before is not None:
        yield m.wait(before)
