"""The prompt of a long-convolution model: one FFT per layer computes all its contributions to any position.

After that the prompt is not needed, and the tiling begins as if there were none (Flash Inference, section
2.3.1; Massaroli et al. 2024, Lemma 2.1).
"""

from simcore.machine.machine import Machine, Program
from simcore.models.long_convolution import LongConvolution


def prefill(
    m: Machine, model: LongConvolution, ended_s: list[float], *, outputs: int | None = None
) -> Program:
    """Computes the prompt, if there is one, and its contributions to positions below `outputs` (default: to
    all); appends its end time to `ended_s`."""
    if model.prompt:
        done = m.launch(model.prefill(outputs or model.tokens), sizes={"position": model.prompt - 1})
        yield m.wait(done)
        ended_s.append(m.now())
