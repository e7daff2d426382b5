"""Models with states on a card give the ids of the CPU's machine: in Triton's interpreter on a card that is
none, and on the real one (marker `gpu`)."""

from typing import Any

import pytest
import torch

from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.validate.machines.buffers.cuda_decoder import card_decoder_states
from simcore.validate.machines.buffers.decoder import decoder_states
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from tests.fake_card import FakeCudaApi
from tests.test_linear_torch import HYBRID, RETNET, TRANSNORMER

HAS_GPU = torch.cuda.is_available()
KINDS = [
    pytest.param("fake", marks=pytest.mark.skipif(HAS_GPU, reason="for machines without a CUDA device")),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
    ),
]
F32 = Dtypes("fp32", "fp32", "fp32")
SEED, CONTEXT, TOKENS, BATCH = 5, 11, 3, 2


def on_card(kind: str, model: Decoder) -> list[list[list[int]]]:
    """The ids of two runs, one after another: the second begins with the states of the first."""
    api: Any = TorchCudaApi() if kind == "cuda" else FakeCudaApi(3)
    device = "cuda" if kind == "cuda" else "cpu"
    states = card_decoder_states(model, {"tensor": 1}, SEED, CONTEXT, TOKENS, device=device, drawn_on="cpu")
    card = Card(states, api, mesh={"tensor": 1})
    found = []
    for _ in range(2):
        states[0].reset()
        card.start().run(lambda m: tensor_parallel(m, model, tokens=TOKENS, context=CONTEXT))
        found.append(states[0].chosen.tolist())
    return found


def on_cpu(model: Decoder) -> list[list[int]]:
    states = decoder_states(model, {"tensor": 1}, SEED, CONTEXT, TOKENS)
    TorchRun(states, mesh={"tensor": 1}).run(
        lambda m: tensor_parallel(m, model, tokens=TOKENS, context=CONTEXT)
    )
    return [states[0].chosen[token].tolist() for token in range(TOKENS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [RETNET, TRANSNORMER, HYBRID], ids=lambda config: config.name)
def test_a_card_decodes_the_ids_of_the_cpu(config: DecoderConfig, kind: str) -> None:
    model = Decoder(config, batch=BATCH, dtypes=F32)
    expected = on_cpu(model)
    assert on_card(kind, model) == [expected, expected]
