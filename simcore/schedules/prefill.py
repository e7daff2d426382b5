"""The prompt of a long-convolution model: one FFT a layer, for all that it contributes to any position.

Then the prompt is forgotten, and the tiling begins as if nothing had been before (Flash Inference, section
2.3.1; Massaroli et al. 2024, Lemma 2.1).
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution


def prefill(
    m: Machine, model: LongConvolution, ended_s: list[float], *, outputs: int | None = None
) -> Program:
    """Computes the prompt, if there is one, and its contributions to positions below `outputs` (default: to
    all); appends to `ended_s` when it is done."""
    if model.prompt:
        done = m.launch(model.prefill(outputs or model.tokens), sizes={"position": model.prompt - 1})
        yield m.wait(done)
        ended_s.append(m.now())
