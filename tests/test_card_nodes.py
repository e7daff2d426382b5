"""in_graph_s = ((step - start) - sum of ops by themselves) / ops, and where the simulated machine adds it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from simcore.assembly import Place, assemble, in_graphs
from simcore.devices.price import roofline
from simcore.devices.spec import load_device
from simcore.devices.write_back import write_back_s
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.ops import op as ops
from simcore.ops.linear_layer import linear_attention_decode
from simcore.ops.op import Op, Price
from simcore.scenario import parse_scenario
from simcore.studies.one_device import DeviceStudy
from simcore.validate.calibration import cuda_nodes as card_nodes
from simcore.validate.machines.buffers.cuda_decoder import card_decoder_states
from simcore.validate.machines.cuda.machine import Card
from tests.fake_card import FakeCudaApi
from tests.thorough import slow

NODE_S = 4e-7
NORM = ops.norm("norm", tokens=1, hidden=8, dtype="fp32")


def price(op: Op) -> Price:
    return Price(1e-6, 5e-7, 2e-6, "assumed" if op.kind == "sample" else "measured", "made up", 6e-7)


def test_what_a_step_takes_beyond_its_ops_is_shared_out_among_them() -> None:
    """A step of n ops of 1 us: start + n (1 us + in_graph_s)."""

    def step(batch: int, context: int) -> tuple[float, Sequence[Op]]:
        assert context > 1000
        count = 10 * batch
        return 2e-6 + count * (1e-6 + NODE_S), [NORM] * count

    found = list(card_nodes.node_costs(step, 2e-6, lambda op: 1e-6))
    assert found == pytest.approx([NODE_S] * len(card_nodes.CASES))


def test_every_kernel_of_a_graph_costs_a_node_but_what_is_free() -> None:
    more = in_graphs(price, NODE_S)
    for op, kernels in ((NORM, 1), (replace(NORM, parts=(NORM, NORM, NORM)), 3)):
        found = more(op)
        assert found == replace(
            price(op),
            seconds=1e-6 + kernels * NODE_S,
            low_s=5e-7 + kernels * NODE_S,
            high_s=2e-6 + kernels * NODE_S,
            early_s=6e-7 + kernels * NODE_S,
        )
    free = ops.sample(tokens=1, vocab=8, dtype="fp32")
    assert more(free) == price(free)
    collective = ops.all_reduce("sum", elements=8, ranks=2, axis="tensor", dtype="bf16")
    assert more(collective) == price(collective)
    assert in_graphs(price, 0.0) is price


DECODE: dict[str, Any] = {
    "name": "d", "study": "decode", "device": "h200-sxm", "profile": "none", "model": "tiny-llama",
    "dtype": "bf16", "batch": 1, "context_tokens": 64, "tokens": 2,
    "strategies": [{"kind": "tensor_parallel"}],
}  # fmt: skip


@pytest.mark.parametrize("given", [None, price])
def test_a_simulated_step_takes_a_node_for_each_of_its_ops(given: Any) -> None:
    """At the device's own prices and at those of a replay; prices by themselves stay as they are."""

    def latency_s(in_graph_s: float) -> float:
        scenario = parse_scenario({**DECODE, "overheads": {"in_graph_s": in_graph_s}}, "x")
        parts = assemble(scenario, "x", Place(prices=given))
        rows = parts.study.run(lambda *_: None).rows
        (found,) = (row.value for row in rows if row.metric == "token_latency_s")
        assert parts.price()(NORM).seconds == base(NORM).seconds
        return float(found)

    base = assemble(parse_scenario(DECODE, "x"), "x").price()
    model = assemble(parse_scenario(DECODE, "x"), "x").study
    layers = model.bench.config.layers  # type: ignore[attr-defined]
    # Of a layer twelve, and embedding, norm, LM head and choice; "sample" is assumed to be free there.
    nodes = 12 * layers + (4 if given is None else 3)
    assert latency_s(NODE_S) - latency_s(0.0) == pytest.approx(nodes * NODE_S)


@slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
def test_a_step_is_that_of_the_later_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_nodes, "TOKENS", 4)
    config = DecoderConfig("gqa", 32, 24, 1, 8, 2, 6, 53, tied_embeddings=False)
    model = Decoder(config, batch=2, dtypes=Dtypes("fp32", "fp32", "fp32"), outside=False)
    states = card_decoder_states(model, {"tensor": 1}, 1, 9, 4, device="cpu", drawn_on="cpu")
    trace = card_nodes.run_on(Card(states, FakeCudaApi(1)), model, 9)
    took_s, found = card_nodes.of_later_tokens(trace)
    later = sorted(trace.spans, key=lambda span: span.start_s)[2:]
    assert took_s == pytest.approx(sum(span.end_s - span.start_s for span in later) / 2)
    assert {op.kind for op in found} == card_nodes.KINDS
    assert len(found) == 12
    # The last of four tokens attends to those before it and to itself.
    assert {op["context"] for op in found if op.kind == "decode_attention"} == {12}


def test_verbs_cost_what_the_place_says_unless_the_scenario_does() -> None:
    def latency_s(place: dict[str, float], scenario: dict[str, float], tokens: int = 1) -> float:
        document = {**DECODE, "overheads": scenario, "tokens": tokens}
        parts = assemble(parse_scenario(document, "x"), "x", Place("replay", overheads=place))
        rows = parts.study.run(lambda *_: None).rows
        return next(float(row.value) for row in rows if row.metric == "token_latency_s" and row.value)

    none = {"launch_s": 0.0, "return_s": 0.0}
    launches = latency_s({**none, "launch_s": 1e-6}, {}) - latency_s(none, {})
    assert launches == pytest.approx(1e-6)
    # Of two tokens the second one counts, and is launched while the first is computed.
    assert latency_s({**none, "launch_s": 1e-6}, {}, 2) == pytest.approx(latency_s(none, {}, 2), rel=1e-12)
    assert latency_s({**none, "launch_s": 1e-6}, {"launch_s": 0.0}) == latency_s(none, {"launch_s": 0.0})


H200 = load_device("h200-sxm")
HYBRID = {
    "name": "hybrid",
    "study": "decode",
    "device": "h200-sxm",
    "model": "hybrid-8b",
    "dtype": "bf16",
    "tokens": 2,
    "strategies": [{"kind": "tensor_parallel", "ranks": 1}],
    "context_tokens": 1024,
}


def _state_op(batch: int) -> Op:
    return linear_attention_decode(batch=batch, heads=32, rank=128, dim=128, dtype="bf16")


@pytest.mark.parametrize("batch", [1, 7, 15, 16, 40])
def test_states_are_written_back_as_far_as_they_stay_in_the_cache(batch: int) -> None:
    """min(states, half of the cache) / bandwidth, from the second op on."""
    states = batch * 32 * 128 * 128 * 4
    expected = min(states, H200.l2_bytes / 2) / H200.hbm_bytes_per_s
    assert write_back_s(H200, _state_op(batch)) == pytest.approx(expected, rel=1e-12)
    assert write_back_s(H200, NORM) == 0.0
    more = in_graphs(price, NODE_S, partial(write_back_s, H200))
    assert more(_state_op(batch)).seconds == pytest.approx(1e-6 + NODE_S + expected, rel=1e-12)
    assert more(NORM) == in_graphs(price, NODE_S)(NORM)


def _silent(doing: str, done: int, total: int) -> None:
    pass


@slow
@pytest.mark.parametrize("batch", [1, 16])
def test_a_step_takes_longer_by_the_states_that_each_layer_leaves(batch: int) -> None:
    """At prices of ops alone; not at those of a run, which has that in it, nor at floors of all traffic."""
    scenario = parse_scenario({**HYBRID, "batch": batch}, "test.yaml")
    floors = assemble(parse_scenario({**HYBRID, "profile": "none"}, "test.yaml"), "test.yaml").price()

    def token_s(place: Place) -> float:
        rows = assemble(scenario, "test.yaml", place).study.run(_silent).rows
        return next(row.value for row in rows if row.metric == "token_latency_s")

    of_a_run = Place("replay", prices=floors)
    longer_s = token_s(replace(of_a_run, alone=True)) - token_s(of_a_run)
    # Of 32 layers, 24 have states.
    assert longer_s == pytest.approx(24 * write_back_s(H200, _state_op(batch)), rel=1e-6)


@pytest.mark.parametrize(("profile", "waits"), [("local", True), ("none", False)])
@slow
def test_only_prices_of_ops_alone_have_what_they_leave_added(profile: str, waits: bool) -> None:
    """By a device's own prices: a datasheet's floor has all traffic in it."""
    scenario = parse_scenario({**HYBRID, "profile": profile}, "test.yaml")
    study = assemble(scenario, "test.yaml").study
    assert isinstance(study, DeviceStudy)
    op, price = _state_op(16), study.bench.hardware.price(1, None, True)
    left_s = write_back_s(H200, op) if waits else 0.0
    assert price(op).left_s == left_s
    # It is traffic, which the clock does not slow down.
    floor = roofline(H200)(op)
    assert floor.of(price(op)).memory_s == pytest.approx(floor.memory_s + left_s)
