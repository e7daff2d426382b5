"""Tensor parallelism: every rank holds a slice of every layer, and all ranks take every step together.

    token latency = outside the layers + layers * (layer without attention + attention(context))

One captured graph per token; the host waits for each token before it launches the next.
(Shoeybi et al. 2019; the baseline of ALSpec, App. F.)
"""

from simcore.machine.machine import Machine, Program
from simcore.models.decoder import Decoder


def tensor_parallel(m: Machine, model: Decoder, *, tokens: int, context: int) -> Program:
    """Decodes `tokens` tokens after `context` cached ones; marks "token i" at the end of each.

    Mesh: {"tensor": ranks}.
    """
    for token in range(tokens):
        step = m.launch(model.token_step, sizes={"context": context + token})
        m.mark(f"token {token}", [step])
        yield m.wait(step)
