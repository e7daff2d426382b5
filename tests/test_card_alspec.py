"""ALSpec on cards: groups that meet by kernels in captured tokens give what the verdicts say, token by token
and layer by layer: in Triton's interpreter on cards that are none, and on real ones (marker `gpu`)."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import pytest
import torch

from simcore.assembly import Place, assemble
from simcore.kernels.decoder.split_kv import EMPTY
from simcore.kernels.streams import one_stream
from simcore.machine import laws, metrics
from simcore.machine.machine import DeadlockError, Machine, Program
from simcore.models.decoder import Decoder
from simcore.scenario import parse_scenario
from simcore.schedules.alspec import alspec
from simcore.sim.runs import Setup
from simcore.validate.machines.buffers import meeting, pairing
from simcore.validate.machines.buffers.cuda_decoder import CardDecoderState, card_decoder_states
from simcore.validate.machines.buffers.decoder import DecoderState, decoder_states
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.machines.cuda.runs import RealCard
from simcore.validate.machines.cuda.states import CardStates
from tests.fake_card import MeetingCudaApi
from tests.test_card_decoder import BOTH, CONFIGS, CONTEXT, F32, GQA, HAS_GPU, SEED, emulated, in_turns
from tests.test_card_real import LAYER, NARROW
from tests.thorough import first, slow, thorough

CHUNK = 3
Verdicts = Callable[[int, int], bool]


def drawn(seed: int, rate: float = 0.5) -> Verdicts:
    """Verdicts by token and layer, drawn by a seed."""
    return lambda token, layer: Random(f"{seed} {token} {layer}").random() < rate


def mesh_of(model: Decoder) -> dict[str, int]:
    return {"group": 2, "tensor": model.ranks}


def on_cpu(model: Decoder, tokens: int, hits: Verdicts) -> list[DecoderState]:
    states = decoder_states(model, mesh_of(model), SEED, CONTEXT, tokens)
    run = TorchRun(states, mesh=mesh_of(model), outcomes={"hit": hits})
    run.run(lambda m: alspec(m, model, tokens=tokens, context=CONTEXT))
    return states


def cards(
    kind: str, model: Decoder, tokens: int, monkeypatch: pytest.MonkeyPatch, lockstep: tuple[str, ...] = ()
) -> Card:
    """Cards on which the ranks of both groups meet: one for all, if there are too few."""
    ranks = 2 * model.ranks
    devices, api = ["cpu"] * ranks, None
    if kind == "cuda":
        api = TorchCudaApi()
        devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]
    else:
        api = meeting_api(monkeypatch)
    states = card_decoder_states(
        model, mesh_of(model), SEED, CONTEXT, tokens, device=devices[0], drawn_on="cpu", devices=devices
    )
    if kind == "fake":
        api.states = states
    return Card(states, api, mesh=mesh_of(model), lockstep=lockstep)


def meeting_api(monkeypatch: pytest.MonkeyPatch) -> MeetingCudaApi:
    """Cards that are none, on which kernels wait for each other."""
    api = MeetingCudaApi(3)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(meeting, name, in_turns(api, getattr(meeting, name)))
    monkeypatch.setattr(pairing, "exchange", exchange_in_turns(api, pairing.exchange))
    monkeypatch.setattr(pairing, "receive", received_in_turns(api, pairing.receive))
    return api


def exchange_in_turns(api: MeetingCudaApi, exchange: Any) -> Any:
    """An exchange in two launches, between which the interpreter can run that of the other rank."""

    def run(*tensors: Any, **named: Any) -> None:
        *_, inboxes, rank = tensors
        exchange(*tensors, half="send", **named)
        words = inboxes.words[rank][1 - rank]
        if named["patience"]:
            api.until(lambda: int(words[0]) != EMPTY.value)
        exchange(*tensors, half="take", **named)

    return run


def received_in_turns(api: MeetingCudaApi, receive: Any) -> Any:
    def run(early: Any, arrived: Any, x: Any, *, gate: Any, **named: Any) -> None:
        if named["patience"] and (gate is None or gate[0]):
            api.until(lambda: bool((arrived >= early.shape[1]).all()))
        receive(early, arrived, x, gate=gate, **named)

    return run


def decode(
    card: Card, model: Decoder, tokens: int, hits: Verdicts, *, overlap: bool = True, rehearsal: bool = False
) -> Any:
    for state in card.states:
        state.reset()
    run = card.start(outcomes={"hit": hits}, rehearsal=rehearsal)
    how = {"tokens": tokens, "context": CONTEXT, "overlap_last_layer": overlap}
    laws.enforce(run.run(lambda m: alspec(m, model, **how)))
    return run


def right_ids(states: Sequence[Any], model: Decoder, tokens: int, hits: Verdicts) -> list[list[int]]:
    """The ids of each token, by the group that holds them in the end."""
    group, found = 0, []
    for token in range(tokens):
        for layer in range(model.config.layers):
            group ^= hits(token, layer)
        found.append(states[group * model.ranks].chosen[token].tolist())
    return found


@slow
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "how",
    first(
        1,
        [
            ("tied, normed heads", 1, True, True),
            ("gqa", 1, False, False),
            ("gqa", 2, True, True),
            ("gqa", 2, False, False),
        ],
    ),
    ids=lambda how: ", ".join(map(str, how)),
)
def test_groups_on_cards_give_what_the_verdicts_say(
    how: tuple[str, int, bool, bool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of each token; and K and V of each layer, which show each layer's x, in both groups; with the last
    layer overlapped or not."""
    name, ranks, lockstep, overlap = how
    tokens, hits = 3, drawn(1)
    model = Decoder(CONFIGS[name], ranks=ranks, batch=2, dtypes=F32, chunk=CHUNK)
    card = cards(kind, model, tokens, monkeypatch, ("tensor",) if lockstep else ())
    for rehearsal in (True, False, False):
        run = decode(card, model, tokens, hits, overlap=overlap, rehearsal=rehearsal)
    assert not run.fresh
    expected = on_cpu(model, tokens, hits)
    for rank, state in enumerate(card.states):
        for layer in range(model.config.layers):
            for cache, other in ((state.k, expected[rank].k), (state.v, expected[rank].v)):
                torch.testing.assert_close(cache[layer].cpu(), other[layer], rtol=1e-4, atol=1e-5)
    ids = right_ids(card.states, model, tokens, hits)
    assert ids == right_ids(expected, model, tokens, hits)
    assert [token.index for token in metrics.tokens(run.trace)] == list(range(tokens))
    # One graph a rank and token.
    assert len(run.trace.spans) == tokens * 2 * ranks


@thorough
@emulated
def test_a_scenario_runs_both_ways_of_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case with states of its own, by the study's own program."""
    api = meeting_api(monkeypatch)
    path = tmp_path / "narrow.json"
    path.write_text(json.dumps({**NARROW, "num_hidden_layers": 4}), encoding="utf-8")
    hits = {"kind": "rate", "value": [0.5]}
    speculates = {"kind": "alspec", "hits": hits, "chunk_tokens": CHUNK}
    scenario = {key: value for key, value in LAYER.items() if key != "part"}
    scenario |= {"device": "h200-sxm", "dtype": "bf16", "model": str(path), "batch": 1}
    scenario |= {"strategies": [{"kind": "tensor_parallel"}, speculates]}

    class States(CardStates):
        def of(self, setup: Setup) -> list[Any]:
            api.states = super().of(setup)
            return api.states

    real = RealCard(1, States(4096, "cpu"), lambda: api)
    parts = assemble(parse_scenario(scenario, "x"), "x", Place("cuda", real.start, 1))
    outcome = parts.study.run(lambda *_: None)
    latencies = [row for row in outcome.rows if row.metric == "token_latency_s"]
    assert [row.axes.hit_rate for row in latencies] == [None, 0.5]
    assert all(span.ops[0].price.source == "measured" for trace in real.traces for span in trace.spans)


# -- long runs on real cards ------------------------------------------------------------------------------


class SlowedApi(TorchCudaApi):
    """Cards that are slow at random: each stream stands still now and then, for up to a tenth of a
    millisecond, and other work takes their multiprocessors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random, self._beside, self._lock = Random(seed), dict[int, Any](), Lock()

    def run(self, stream: Any, call: Any) -> None:
        super().run(stream, call)
        # Each rank has a thread that queues its work.
        with self._lock:
            self._slow_down(stream)

    def _slow_down(self, stream: Any) -> None:
        if self._random.random() < 0.2:
            torch.cuda._sleep(self._random.randrange(1, 200_000))  # type: ignore[no-untyped-call]
        if self._random.random() < 0.05:
            if stream.device_index not in self._beside:
                x = torch.randn(2048, 2048, device=stream.device)
                self._beside[stream.device_index] = torch.cuda.Stream(stream.device), x  # type: ignore[no-untyped-call]
            beside, x = self._beside[stream.device_index]
            with torch.cuda.stream(beside):
                x @ x


def one_after_another(model: Decoder, tokens: int, hits: Verdicts) -> CardDecoderState:
    """The same tokens on one rank: after each attention its exact result, or the early one where the verdict
    says so."""
    state: CardDecoderState
    state, _ = card_decoder_states(
        model, mesh_of(model), SEED, CONTEXT, tokens, device="cuda", drawn_on="cpu", devices=["cuda:0"] * 2
    )
    state.begin_run(rehearsal=False, error=torch.zeros(1, dtype=torch.int32), code=lambda what: 1)
    pair, layers = state._speculating.pairing, model.config.layers  # type: ignore[union-attr]
    with torch.inference_mode(), one_stream({}):
        state.reset()
        for token in range(tokens):
            sizes = {"context": CONTEXT + token}
            state.lengths.fill_(sizes["context"])
            state.execute_all([op.at(sizes) for op in model.first.ops])
            for layer in range(layers):
                state.execute_all([op.at(sizes) for op in model.speculate.ops])
                pair.arrived[1].zero_()
                if hits(token, layer):
                    state.buffers["heads"].copy_(pair.early[1].flatten(1))
                behind = model.between if layer < layers - 1 else model.last
                state.execute_all([op.at(sizes) for op in behind.ops])
    torch.cuda.synchronize()
    return state


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("one_card", [True, False])
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 10_000), (2, 2_000)])
def test_long_runs_with_random_verdicts_on_slowed_cards(
    ranks: int, tokens: int, one_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hang, and of one rank a group each layer's K and V to the bit what it is sequentially."""
    if not one_card and torch.cuda.device_count() < 2 * ranks:
        pytest.skip(f"needs {2 * ranks} CUDA devices")
    model = Decoder(GQA, ranks=ranks, batch=2, dtypes=F32, chunk=CHUNK)
    rows = torch.rand(tokens, GQA.layers, generator=torch.Generator().manual_seed(ranks)).tolist()
    hits: Verdicts = lambda token, layer: rows[token][layer] < 0.6  # noqa: E731
    devices = ["cuda:0"] * 2 * ranks if one_card else [f"cuda:{rank}" for rank in range(2 * ranks)]
    states = card_decoder_states(
        model, mesh_of(model), SEED, CONTEXT, tokens, device="cuda", drawn_on="cpu", devices=devices
    )
    card = Card(states, SlowedApi(1), mesh=mesh_of(model), lockstep=("tensor",))
    for rehearsal in (True, True, False):
        run = decode(card, model, tokens if not rehearsal else 3, hits, rehearsal=rehearsal)
    assert len(metrics.tokens(run.trace)) == tokens
    for part in range(ranks):
        one, other = states[part], states[ranks + part]
        for caches in ((one.k, other.k), (one.v, other.v)):
            assert all(torch.equal(x, y.to(x.device)) for x, y in zip(*caches, strict=True))
    if ranks == 1:
        alone = one_after_another(model, tokens, hits)
        for caches in ((states[0].k, alone.k), (states[0].v, alone.v)):
            assert all(torch.equal(x, y) for x, y in zip(*caches, strict=True))
        assert right_ids(states, model, tokens, hits) == alone.chosen.tolist()


@slow
@pytest.mark.parametrize("kind", BOTH)
def test_a_rank_that_stops_ends_the_run_with_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon; and on a real card the next run is as if nothing had been."""
    tokens, hits = 4, drawn(2)
    model = Decoder(replace(GQA, layers=2), batch=1, dtypes=F32, chunk=CHUNK)
    card = cards(kind, model, tokens, monkeypatch)
    for rehearsal in (True, False) if kind == "cuda" else (True,):
        decode(card, model, tokens, hits, rehearsal=rehearsal)
    expected = right_ids(card.states, model, tokens, hits)

    def stops(m: Machine) -> Program:
        return alspec(m, model, tokens=tokens if m.rank == 0 else 2, context=CONTEXT)

    for state in card.states:
        state.reset()
    begun_s = time.perf_counter()
    error, says = DeadlockError, "waits for the priority of the other group"
    if kind == "fake":
        error, says = TimeoutError, "does not come"  # type: ignore[assignment]
    with pytest.raises(error, match=says):
        card.start(outcomes={"hit": hits}).run(stops)
    assert time.perf_counter() - begun_s < 30.0
    if kind == "cuda":
        decode(card, model, tokens, hits)
        assert right_ids(card.states, model, tokens, hits) == expected
