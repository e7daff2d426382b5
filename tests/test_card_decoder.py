"""A decoder on a card gives the ids of the same decoder on the CPU: in Triton's interpreter on a card that is
none, and on the real one (marker `gpu`)."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch

from simcore.kernels.collectives import Inboxes
from simcore.kernels.decoder.split_kv import EMPTY
from simcore.kernels.streams import gated
from simcore.machine import laws, metrics
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import Op
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.validate.machines.buffers import meeting
from simcore.validate.machines.buffers.cuda_decoder import CardDecoderState, card_decoder_states
from simcore.validate.machines.buffers.decoder import DecoderState, decoder_states
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card, CardRun
from simcore.validate.machines.cuts import units
from simcore.validate.timing.pace import pace
from tests.fake_card import FakeCudaApi, MeetingCudaApi
from tests.test_torch_decoder import answer
from tests.thorough import first, slow

HAS_GPU = torch.cuda.is_available()
needs_card = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
# Where there is a GPU, Triton's interpreter was not chosen.
emulated = pytest.mark.skipif(HAS_GPU, reason="the interpreter is for machines without a CUDA device")
BOTH = [pytest.param("fake", marks=emulated), pytest.param("cuda", marks=needs_card)]
F32 = Dtypes("fp32", "fp32", "fp32")
GQA = DecoderConfig("gqa", 32, 24, 3, 8, 2, 6, 53, tied_embeddings=False)
CONFIGS = {
    "gqa": GQA,
    "tied, normed heads": replace(GQA, layers=2, tied_embeddings=True, qk_norm=True, kv_heads=4),
    "parallel": replace(GQA, layers=2, gated=False, parallel_residual=True, kv_heads=8),
}
SEED, CONTEXT, TOKENS = 5, 11, 3


def card_of(kind: str, model: Decoder, **how: Any) -> Card:
    api: Any = TorchCudaApi() if kind == "cuda" else FakeCudaApi(3)
    mesh = {"tensor": model.ranks}
    device = "cuda" if kind == "cuda" else "cpu"
    states = card_decoder_states(model, mesh, SEED, CONTEXT, TOKENS, device=device, drawn_on="cpu")
    return Card(states, api, mesh=mesh, **how)


def decode(card: Card, model: Decoder) -> tuple[Any, list[list[int]]]:
    state: CardDecoderState
    for state in card.states:
        state.reset()
    run = card.start()
    laws.enforce(run.run(lambda m: tensor_parallel(m, model, tokens=TOKENS, context=CONTEXT)))
    return run, card.states[0].chosen.tolist()


def states_on_cpu(model: Decoder) -> list[DecoderState]:
    mesh = {"tensor": model.ranks}
    states = decoder_states(model, mesh, SEED, CONTEXT, TOKENS)
    TorchRun(states, mesh=mesh).run(lambda m: tensor_parallel(m, model, tokens=TOKENS, context=CONTEXT))
    return states


def on_cpu(model: Decoder) -> list[list[int]]:
    return [ids.tolist() for ids in answer(states_on_cpu(model))]


@slow
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "how",
    first(
        1,
        [
            *(("gqa", *group) for group in ((2, True), (1, False), (2, False))),
            ("tied, normed heads", 2, False),
            ("parallel", 2, True),
        ],
    ),
    ids=lambda how: ", ".join(map(str, how)),
)
def test_a_card_decodes_the_ids_of_the_cpu(how: tuple[str, int, bool], kind: str) -> None:
    name, ranks, lockstep = how
    model = Decoder(CONFIGS[name], ranks=ranks, batch=3, dtypes=F32)
    card = card_of(kind, model, lockstep=("tensor",) if lockstep else ())
    expected = on_cpu(model)
    for fresh in (True, False):
        run, ids = decode(card, model)
        assert ids == expected
        assert bool(run.fresh) == fresh
        assert [token.index for token in metrics.tokens(run.trace)] == list(range(TOKENS))
        ran = [p.op.name for s in run.trace.spans for p in s.ops]
        assert ran.count("attention") == TOKENS * ranks * CONFIGS[name].layers
    assert card.states[0].layer == CONFIGS[name].layers


def meeting_card(
    kind: str, model: Decoder, monkeypatch: pytest.MonkeyPatch, lockstep: tuple[str, ...]
) -> Card:
    """A card, or several, on which ranks meet by kernels that wait for each other."""
    devices = ["cpu"] * model.ranks
    api: Any = TorchCudaApi() if kind == "cuda" else MeetingCudaApi(3)
    if kind == "cuda":
        devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(model.ranks)]
    else:
        for name in ("all_reduce", "all_gather"):
            monkeypatch.setattr(meeting, name, in_turns(api, getattr(meeting, name)))
    mesh = {"tensor": model.ranks}
    states = card_decoder_states(
        model, mesh, SEED, CONTEXT, TOKENS, device=devices[0], drawn_on="cpu", devices=devices
    )
    if kind == "fake":
        api.states = states
    return Card(states, api, mesh=mesh, lockstep=lockstep)


def in_turns(api: MeetingCudaApi, collective: Any) -> Any:
    """A collective in two launches, between which the interpreter can run those of other ranks."""

    def run(x: torch.Tensor, inboxes: Inboxes, rank: int, **named: Any) -> None:
        gate = named.get("gate")
        if gate is not None and not gate[0]:
            return
        if not named["patience"]:
            # What it would read then are NaNs, which arithmetic here, unlike a card's, leaves as they are: to
            # kernels behind it they are words that are still to come.
            return
        collective(x, inboxes, rank, half="send", **named)
        words = inboxes.words[rank]
        others = [slot for slot in range(len(words)) if slot != rank]
        # Rows of whole words, as the models here have them.
        sent = x.numel() * x.element_size() // 4
        api.until(lambda: not bool((words[others, :sent] == EMPTY.value).any()))
        collective(x, inboxes, rank, half="take", **named)

    return run


@slow
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "how",
    first(1, [("gqa", 2, True), ("gqa", 4, False), ("tied, normed heads", 2, False), ("parallel", 4, True)]),
    ids=lambda how: ", ".join(map(str, how)),
)
def test_ranks_that_meet_by_kernels_decode_the_ids_of_the_cpu(
    how: tuple[str, int, bool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is one captured stage of each rank, with its collectives inside."""
    name, ranks, lockstep = how
    model = Decoder(CONFIGS[name], ranks=ranks, batch=3, dtypes=F32)
    card = meeting_card(kind, model, monkeypatch, ("tensor",) if lockstep else ())
    states = states_on_cpu(model)
    expected = [ids.tolist() for ids in answer(states)]
    run = met(card, model)
    trace = run.trace
    assert not run.fresh
    laws.enforce(trace)
    for state in card.states:
        assert state.chosen.tolist() == expected
        assert torch.allclose(state.buffers["x"].cpu(), states[0].body.buffers["x"], rtol=1e-4, atol=1e-4)
    assert len([span for span in trace.spans if span.ops]) == TOKENS * ranks
    ran = [p.op.kind for s in trace.spans for p in s.ops]
    assert ran.count("all_reduce") == TOKENS * ranks * sum(
        op.kind == "all_reduce" for op in model.token_step.ops
    )


def met(card: Card, model: Decoder) -> CardRun:
    """Two rehearsals and two runs; the last one."""
    for rehearsal in (True, True, False, False):
        for state in card.states:
            state.reset()
        run = card.start(rehearsal=rehearsal)
        run.run(lambda m: tensor_parallel(m, model, tokens=TOKENS, context=CONTEXT))
    return run


@slow
@pytest.mark.parametrize("kind", BOTH)
def test_layers_alone_of_ranks_that_meet_compute_what_they_do_if_the_machine_holds_their_sums(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer follows the last one, from token to token."""
    model = Decoder(replace(GQA, layers=2), ranks=2, batch=3, dtypes=F32, outside=False)
    card = meeting_card(kind, model, monkeypatch, ())
    met(card, model)
    held = card_of(kind, model)
    decode(held, model)
    expected = held.states[0].buffers["x"].cpu()
    for state in card.states:
        assert torch.allclose(state.buffers["x"].cpu(), expected, rtol=1e-4, atol=1e-4)


def launches_of(
    state: CardDecoderState, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int, torch.Tensor | None]]:
    """What a state will launch: the first op, its layer, and the gain of a launch of three ops."""
    launched: list[tuple[str, int, torch.Tensor | None]] = []

    def one(op: Op, gate: torch.Tensor | None) -> None:
        assert gate is None
        launched.append((op.name, state.layer, None))

    def three(of: Any, op: Op, layer: int, rank: int, *given: Any, gate: torch.Tensor | None) -> None:
        x, residual, gain, eps, normed, by = given
        assert by is state._waiting
        assert (rank, gate, eps) == (state.part, None, state.weights.constants.eps)
        assert x is state.buffers["y"]
        assert residual is state.buffers["x"]
        assert normed is state.buffers["normed"]
        launched.append((op.name, layer, gain))

    state._methods = dict.fromkeys(state._methods, one)
    monkeypatch.setattr(meeting.Meeting, "all_reduce_normed", three)
    return launched


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("name", ["gqa", "parallel"])
def test_a_sum_its_residual_and_the_norm_behind_it_are_one_launch(
    name: str, outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model says so, and wherever a stage ends; of a layer with one residual once."""
    sizes = {"ranks": 2, "batch": 1, "dtypes": F32, "outside": outside}
    model = Decoder(replace(CONFIGS[name], layers=2), normed_sums=True, **sizes)
    state, _ = card_decoder_states(
        model, {"tensor": 2}, SEED, CONTEXT, 1, device="cpu", drawn_on="cpu", devices=["cpu"] * 2
    )
    of = state.weights.of
    gains = [of("mlp_norm", 0), of("attn_norm", 1), of("mlp_norm", 1)] + outside * [of("head_norm", 2)]
    gains = [of("attn_norm", 1), *gains[3:]] if name == "parallel" else gains
    ops, walk = [unit for op in model.token_step.ops for unit in units(op)], list[tuple[str, int]]()
    assert ops == [*Decoder(model.config, **sizes).token_step.ops]
    state.restore(0)
    for op in ops:
        walk.append((op.name, state.layer))
        state.skip(op)
    end, launched = state.layer, launches_of(state, monkeypatch)
    for cut in range(len(ops)):
        launched.clear()
        state.restore(0)
        state.execute_all(ops[:cut])
        state.execute_all(ops[cut:])
        assert state.layer == end
        done = 0
        for name_of, layer, gain in launched:
            assert (name_of, layer) == walk[done]
            done += 1 if gain is None else 3
        assert done == len(walk)
        found = [gain for *_, gain in launched if gain is not None]
        # A stage that ends within three ops launches them one by one.
        within = bool(gains) and any(op.kind == "all_reduce" for op in ops[max(0, cut - 2) : cut])
        within = within and (outside or cut < len(ops) - 1)
        assert len(found) == len(gains) - within
        if not within:
            assert all(one is other for one, other in zip(found, gains, strict=True))


@emulated
def test_behind_a_gate_that_is_shut_ranks_do_not_meet() -> None:
    model = Decoder(replace(GQA, layers=1), ranks=2, batch=1, dtypes=F32)
    state, _ = card_decoder_states(
        model, {"tensor": 2}, SEED, CONTEXT, 1, device="cpu", drawn_on="cpu", devices=["cpu"] * 2
    )
    ops = model.token_step.ops
    first = next(i for i, op in enumerate(ops) if op.kind == "all_reduce")
    error = torch.zeros(1, dtype=torch.int32)
    state.begin_run(rehearsal=False, error=error, code=lambda what: 7)
    buffers = {
        name: x.copy_(torch.arange(x.numel()).view(x.shape)).clone() for name, x in state.buffers.items()
    }
    for count in (1, 3):
        state.restore(0)
        with gated(torch.zeros(1, dtype=torch.int32)):
            state.execute_all(ops[first : first + count])
        assert all(torch.equal(x, buffers[name]) for name, x in state.buffers.items())
    assert not error


def test_ranks_that_cannot_meet_by_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inbox is used again only after its ranks have met elsewhere."""
    once = Decoder(replace(CONFIGS["parallel"], layers=1), ranks=2, batch=1, dtypes=F32, outside=False)
    with pytest.raises(ValueError, match="meet once a token"):
        meeting.meeting(once, ["cpu", "cpu"])
    twice = Decoder(replace(GQA, layers=1), ranks=2, batch=1, dtypes=F32, outside=False)
    assert list(meeting.meeting(twice, ["cpu", "cpu"]).sites) == [("attn_reduce", 0), ("mlp_reduce", 0)]

    def apart(devices: Any) -> None:
        raise RuntimeError(f"{devices[0]} cannot see the memory of {devices[1]}")

    monkeypatch.setattr(meeting, "peers_see_each_other", apart)
    with pytest.raises(ValueError, match="cards that see each other's memory: cpu cannot see"):
        meeting.meeting(twice, ["cpu", "cpu"])
    model = Decoder(GQA, ranks=2, batch=1, dtypes=F32)
    with pytest.raises(ValueError, match="2 ranks on 1 devices"):
        card_decoder_states(
            model, {"tensor": 2}, SEED, CONTEXT, 1, device="cpu", drawn_on="cpu", devices=["cpu"]
        )


@slow
def test_one_step_is_captured_once_for_all_tokens() -> None:
    if HAS_GPU:
        pytest.skip("counted where nothing has to be compiled")
    model = Decoder(replace(GQA, layers=1), batch=1, dtypes=F32)
    card = card_of("fake", model)
    run, _ = decode(card, model)
    # One where the layer is that of the beginning, one where it is that of a token's end.
    assert run.fresh == 2


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Decoder(GQA, ranks=2), "a model for 2 ranks on 1"),
        (Decoder(GQA, parts=True), "every op of a layer"),
        (Decoder(GQA, dtypes=Dtypes("bfp8")), "not in bfp8"),
    ],
)
def test_what_cannot_be_executed_is_refused(model: Decoder, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        card_decoder_states(model, {"tensor": 1}, SEED, CONTEXT, 1, device="cpu")


@pytest.mark.usefixtures("whole_card")
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_real_step_takes_what_its_bytes_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Four layers of the 8B shape: tokens take what reading the weights takes, and no more than what the
    host's verbs took in that very run; printed, with what host and clocks did."""
    config = DecoderConfig("8b", 4096, 14336, 4, 32, 8, 128, 32000, tied_embeddings=False)
    model, api = Decoder(config, batch=1), TorchCudaApi()
    context, tokens = 2048, 50
    states = card_decoder_states(model, {"tensor": 1}, SEED, context, tokens)
    card = Card(states, api)

    def once() -> CardRun:
        states[0].reset()
        run = card.start()
        laws.enforce(run.run(lambda m: tensor_parallel(m, model, tokens=tokens, context=context)))
        return run

    once()
    run, _ = pace().keeps(once)
    found = [token.latency_s for token in metrics.tokens(run.trace)][5:]
    busy = [s.end_s - s.start_s for s in run.trace.spans][5:]
    floor_s = (model.weight_bytes - 2 * 32000 * 4096) / 4.8e12
    us = [1e6 * x for x in (median(found), median(busy), floor_s, run.clock_error_s)]
    with capsys.disabled():
        print("\ntoken {:.1f} us, graph {:.1f}, floor {:.1f}, clocks within {:.1f}".format(*us))
    assert run.fresh == 0
    assert floor_s < median(busy) < 2.5 * floor_s
    host_s = sum(run.trace.verbs[name] for name in ("launch_s", "size_s", "wait_s"))
    assert median(busy) <= median(found) < median(busy) + 1.5 * host_s + 20e-6
