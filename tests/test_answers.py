"""What a real machine answers: each request gets the tokens that the model gives it by itself, whoever runs
beside it, by every serving schedule. The truth is a float64 model computed token by token without any op of
the project."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.machine.machine import Machine, Program
from simcore.models.served_decoder import ServedDecoder, decode_sizes, step_sizes
from simcore.schedules.concurrent_instances import concurrent_instances
from simcore.schedules.continuous_batching import continuous_batching
from simcore.schedules.dynamic_batching import dynamic_batching
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.validate.machines.buffers import cuda_served
from simcore.validate.machines.buffers.cuda_served import Cache, CardServedState, Writes
from simcore.validate.machines.buffers.decoder import shards
from simcore.validate.machines.buffers.served import (
    ServedState,
    _stretch,
    anonymous,
    prompt_ids,
    served_states,
)
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request, own_text
from tests.fake_card import FakeCudaApi
from tests.test_card_decoder import BOTH
from tests.test_torch_decoder import CONFIGS, F32, F64, GQA, SEED, Dense
from tests.thorough import first, slow, thorough

SLOT = 40
Settings = dict[str, Any]


class Alone(Dense):
    """The model by itself."""

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """The ids that follow a prompt."""
        c, ids, logits = self.config, list(prompt), torch.zeros(0)
        self.hits, self.chunk = lambda *_: False, 1
        empty = torch.zeros(0, c.kv_heads, c.head_dim, dtype=torch.float64)
        caches: list[list[tuple[Tensor, Tensor]]] = [[(empty, empty)] for _ in range(c.layers)]
        for position in range(len(prompt) + tokens - 1):
            logits = self._step(ids[position], position, caches, 0)
            if position + 1 == len(ids):
                ids.append(int(logits.argmax()))
        return ids[len(prompt) :]


def schedules(random: Random) -> dict[str, Callable[..., Program]]:
    """Every schedule, with few places and little memory."""
    places = random.randint(1, 4)
    block = random.choice([1, 2, 5])
    return {
        "fusion": partial(temporal_fusion, slots=places, slot_tokens=SLOT),
        "fusion, no shuffle": partial(temporal_fusion, slots=places, slot_tokens=SLOT, shuffle=False),
        "dynamic": partial(dynamic_batching, window_s=0.004, max_batch=places, capacity=places * SLOT),
        "instances": partial(concurrent_instances, max_instances=places),
        "iteration": partial(iteration_batching, max_batch=places, slot_tokens=SLOT),
        "continuous": partial(
            continuous_batching,
            blocks=SLOT // block + random.randint(0, 9),
            block_tokens=block,
            token_budget=random.choice([5, 9, 64]),
            max_sequences=places,
            prefill=random.choice(["chunked", "first"]),
            ahead=random.choice([0, 1]),
        ),
    }


def served(
    schedule: Callable[..., Program],
    model: ServedDecoder,
    wanted: list[Request],
    *,
    shared_text: bool = False,
) -> list[ServedState]:
    """The states of all ranks after the requests have been served."""
    mesh = {"tensor": model.ranks}
    states = served_states(model, mesh, SEED, 10_000, shared_text)
    run, journal = TorchRun(states, mesh=mesh, lockstep=("tensor",)), Journal()
    run.feed(0, REQUESTS, [*((r.arrival_s, r) for r in wanted), (wanted[-1].arrival_s, END)])

    def program(m: Machine) -> Program:
        return schedule(m, model, journal)

    run.run(program)
    return states


def requests(random: Random, *, equal: bool, count: int = 7, most: int = 12) -> list[Request]:
    """Requests that arrive while others run."""
    lengths = [random.randint(1, most) for _ in range(count)]
    tokens = [lengths[0]] * count if equal else lengths
    at_s = sorted(random.uniform(0.0, 0.03) for _ in range(count))
    return [Request(i, at_s[i], random.randint(1, 20), tokens[i], tokens[i]) for i in range(count)]


def api_of(kind: str) -> Any:
    return TorchCudaApi() if kind == "cuda" else FakeCudaApi(3)


def on_card(
    kind: str, schedule: Callable[..., Program], model: ServedDecoder, wanted: list[Request], places: int = 9
) -> tuple[dict[int, list[int]], Cache]:
    """The answers of a card, and its cache: in Triton's interpreter on a card that is none, or of the real
    one. Few places, so that later requests take those of earlier ones."""
    device = "cuda" if kind == "cuda" else "cpu"
    config = model.config
    weights = shards(config, model.dtypes, 1, model.style, SEED)[0].to(device)
    cache = Cache(model, 4 * SLOT, SLOT + 8, places - 1, places, SEED, device, weights.constants.frequencies)
    state = CardServedState(model, weights, cache, places - 1)
    run, journal, answers = (
        Card([state], api_of(kind), mesh={"tensor": 1}).start(),
        Journal(),
        dict[int, list[int]](),
    )
    run.feed(0, REQUESTS, [*((r.arrival_s, r) for r in wanted), (wanted[-1].arrival_s, END)])
    journal.answered = lambda r, _: answers.update({r.id: cache.answer(r)})
    run.run(lambda m: schedule(m, model, journal))
    return answers, cache


# On a card: a batch as it was, slots that move, a stream an instance, and prompts in chunks.
CARDS = ("iteration", "fusion", "instances", "continuous")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", first(1, range(6)))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow if name in CARDS else thorough) for name in schedules(Random(0))],
)
def test_a_card_answers_the_same(name: str, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a request, and more requests than places."""
    monkeypatch.setattr(cuda_served, "PAGE", 16)
    taken, back = [], Cache.take_back

    def noted(cache: Cache) -> None:
        before = len(cache.held)
        back(cache)
        taken.append(before - len(cache.held))

    monkeypatch.setattr(Cache, "take_back", noted)
    random = Random(f"{name} {seed}")
    # The interpreter is slow.
    count, places = (12, 9) if kind == "cuda" else (8, 5)
    schedule = schedules(random)[name]
    wanted = requests(random, equal=name == "iteration", count=12, most=6)[:count]
    config = replace(CONFIGS[random.choice(list(CONFIGS))], layers=1)
    answers, cache = on_card(kind, schedule, ServedDecoder(config, dtypes=F32), wanted, places)
    alone = Alone(config)
    for r in wanted:
        truth = alone.answer(prompt_ids(r, config.vocab, SEED).tolist(), r.output_tokens)
        assert answers[r.id] == truth, (r.id, r.preemptions)
    assert sum(taken) > 0
    blocks = [block for held in cache.held.values() for block in held.blocks]
    assert len({*blocks, *cache.free_blocks}) == len(blocks) + len(cache.free_blocks)


def test_tables_are_written_once_where_slots_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of five blocks of which two are used gets five others."""
    monkeypatch.setattr(cuda_served, "PAGE", 16)
    state = small_state()
    request = Request(0, 0.0, 20, 9, 9)
    state.begin(Batch([(request, 20, 0)]), step_sizes(0, 0, [(20, 0)], 1), 0)
    batch, writes = Batch(moved=[request], slot_tokens=80), Writes()
    before = list(state.cache.held[0].blocks)
    state._give_other_blocks(batch, writes)
    assert len(writes.entries) == len(set(writes.entries)) == 5
    assert not {*before} & {*state.cache.held[0].blocks}
    assert [to for _, to in writes.moves] == state.cache.held[0].blocks
    assert [of for of, _ in writes.moves][: len(before)] == before
    # Blocks are given ahead: it may hold one more than a slot has.
    ahead = Writes()
    state.cache.of(request, 96, 0, ahead)
    held, moved = list(state.cache.held[0].blocks), Writes()
    state._give_other_blocks(batch, moved)
    assert [of for of, _ in moved.moves] == held
    assert len(held) == 6
    # Of however many tokens: there is one capture of moves.
    state.begin(batch, {"tokens": 50_000}, 0)
    assert state.bound(state.model.move, {"tokens": 50_000}) == state.bound(state.model.move, {"tokens": 1})
    assert not state.changes(state.model.move)
    state.reset()
    assert sorted(state.cache.free_blocks) == list(range(1, state.cache.kv.shape[2]))


def test_what_a_stream_still_computes_keeps_its_place() -> None:
    """A finished request in a slot between others; a newcomer on another stream finds no place."""
    state = small_state(places=2)
    done, other, newcomer = (Request(i, 0.0, 9, 9, 9) for i in range(3))
    state.begin(Batch(decoding=[(done, 9), (other, 9)]), decode_sizes(2, 20), 0)
    done.finish_s = 1.0
    with pytest.raises(RuntimeError, match="no place is left for request 2"):
        state.on("context 1").begin(Batch([(newcomer, 9, 0)]), step_sizes(0, 0, [(9, 0)], 1), 0)
    state.begin(Batch(decoding=[(other, 10)]), decode_sizes(1, 11), 0)
    state.on("context 1").begin(Batch([(newcomer, 9, 0)]), step_sizes(0, 0, [(9, 0)], 1), 0)
    assert state.cache.held.keys() == {1, 2}


def test_streams_of_prompts_alone_take_no_place_of_those_that_decode() -> None:
    """A card has places for "main", for all prompts, and for as many streams that decode as requests run."""
    state, prompt = small_state(), Request(0, 0.0, 9, 9, 9)
    for number in range(state.cache.streams):
        state.on(f"context {number}").begin(Batch([(prompt, 9, 0)]), step_sizes(0, 0, [(9, 0)], 1), 0)
    for number in range(state.cache.streams - 2):
        batch = Batch(decoding=[(prompt, 9)])
        state.on(f"instance {number}").begin(batch, decode_sizes(1, 10), 0)
    with pytest.raises(RuntimeError, match="more than 10 streams serve on a card"):
        state.on("one more").begin(Batch(decoding=[(prompt, 9)]), decode_sizes(1, 10), 0)


def test_a_request_that_was_sent_back_keeps_the_blocks_in_which_it_goes_on() -> None:
    state = small_state()
    one = Request(0, 0.0, 20, 9, 9)
    state.begin(Batch([(one, 20, 0)]), step_sizes(0, 0, [(20, 0)], 1), 0)
    one.preemptions = 1
    state.begin(Batch([(one, 10, 0)]), step_sizes(0, 0, [(10, 0)], 1), 0)
    state.begin(Batch([(Request(1, 0.0, 5, 9, 9), 5, 0)]), step_sizes(0, 0, [(5, 0)], 1), 0)
    held = list(state.cache.held[0].blocks)
    state.cache.take_back()
    assert state.cache.held[0].blocks == held


def small_state(
    places: int = 6, layers: int = 1, kv_tokens: int = 400, positions: int = 100, device: str = "cpu"
) -> CardServedState:
    model = ServedDecoder(replace(GQA, layers=layers), dtypes=F32)
    weights = shards(model.config, model.dtypes, 1, model.style, SEED)[0].to(device)
    frequencies = weights.constants.frequencies
    cache = Cache(model, kv_tokens, positions, 8, places, SEED, device, frequencies)
    return CardServedState(model, weights, cache, 8)


@slow
@pytest.mark.parametrize("kind", BOTH)
def test_a_step_of_decoding_rows_and_chunks_of_many_rows_and_of_one(kind: str) -> None:
    """A chunk of one row, as budgets leave at the end of a prompt, stands behind a longer one. All K and V of
    the second layer are those of prompts by themselves."""
    state, api = small_state(layers=2, device="cuda" if kind == "cuda" else "cpu"), api_of(kind)
    decodes, longer, last = (Request(i, 0.0, prompt, 4, 4) for i, prompt in enumerate((7, 9, 6)))

    def program(m: Machine) -> Program:
        model = state.model
        for request, tokens in ((decodes, 7), (last, 5)):
            batch = partial(Batch, [(request, tokens, 0)])
            yield m.wait(m.launch(model.prefill, sizes=step_sizes(0, 0, [(tokens, 0)], 1), batch=batch))
        batch = partial(Batch, [(longer, 9, 0), (last, 1, 5)], [(decodes, 7)])
        sizes = step_sizes(1, 8, [(9, 0), (1, 5)], 2)
        yield m.wait(m.launch(model.mixed, sizes=sizes, batch=batch))

    Card([state], api, mesh={"tensor": 1}).start().run(program)
    known, alone = state.cache.known, Alone(state.config)
    for request, count in ((decodes, 2), (longer, 1), (last, 1)):
        prompt = prompt_ids(request, state.config.vocab, SEED).tolist()
        place, first = state.cache.held[request.id].place, request.prompt_tokens
        assert known[place, first : first + count].tolist() == alone.answer(prompt, count), request.id
    kept = [state.cache.kv[1, :, state.cache.held[i].blocks[0], : (8, 9, 6)[i]].clone() for i in range(3)]
    state.reset()

    def one_by_one(m: Machine) -> Program:
        model = state.model
        for request in (decodes, longer, last):
            tokens = request.prompt_tokens
            batch = partial(Batch, [(request, tokens, 0)])
            yield m.wait(m.launch(model.prefill, sizes=step_sizes(0, 0, [(tokens, 0)], 1), batch=batch))

    Card([state], api, mesh={"tensor": 1}).start().run(one_by_one)
    for i, request in enumerate((decodes, longer, last)):
        tokens = request.prompt_tokens
        expected = state.cache.kv[1, :, state.cache.held[i].blocks[0], :tokens]
        assert torch.allclose(kept[i][:, :tokens], expected, rtol=1e-4, atol=1e-5), i


def test_prompts_of_a_step_get_their_blocks_before_others_get_some_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four sequences come to the end of their blocks as a prompt of twelve comes; there are sixteen left."""
    monkeypatch.setattr(cuda_served, "PAGE", 16)
    state = small_state(places=9, kv_tokens=16 * 12, positions=300)
    cache = state.cache
    requests_ = [Request(i, 0.0, 16, 9, 9) for i in range(4)]
    state.begin(Batch([(r, 16, 0) for r in requests_]), step_sizes(0, 0, [(16, 0)] * 4, 4), 0)
    del cache.free_blocks[16:]
    prompt = Request(9, 0.0, 16 * 12, 1, 1)
    batch = Batch([(prompt, 192, 0)], [(r, 16) for r in requests_])
    state.begin(batch, step_sizes(4, 4 * 17, [(192, 0)], 1), 0)
    assert [len(cache.held[i].blocks) for i in (9, 0, 1, 2, 3)] == [12, 2, 2, 2, 2]


NAMES = list(schedules(Random(0)))


@pytest.mark.parametrize("config", first(1, CONFIGS))
@pytest.mark.parametrize("seed", first(1, range(20)))
@pytest.mark.parametrize("name", NAMES)
def test_each_request_is_answered_as_if_it_ran_alone(name: str, seed: int, config: str) -> None:
    random = Random(f"{name} {seed}")
    schedule, wanted = schedules(random)[name], requests(random, equal=name == "iteration")
    model = ServedDecoder(CONFIGS[config], ranks=random.choice([1, 1, 2]), dtypes=F64)
    states, alone = served(schedule, model, wanted), Alone(CONFIGS[config])
    for r in wanted:
        prompt = prompt_ids(r, CONFIGS[config].vocab, SEED).tolist()
        truth = alone.answer(prompt, r.output_tokens)
        for state in states:
            assert state.answers[r.id][: r.output_tokens] == truth, (r.id, r.preemptions)


@slow
def test_sequences_that_were_sent_back_go_on_where_they_were() -> None:
    """Blocks for one and a half of them: several are sent back, and computed again."""
    wanted = [Request(i, 0.0, 6, 14, 14) for i in range(4)]
    schedule = partial(continuous_batching, blocks=15, block_tokens=2, token_budget=16, max_sequences=4)
    (state,) = served(schedule, ServedDecoder(CONFIGS["gqa"], dtypes=F64), wanted)
    assert sum(r.preemptions for r in wanted) > 0
    alone = Alone(CONFIGS["gqa"])
    for r in wanted:
        assert state.answers[r.id] == alone.answer(prompt_ids(r, 53, SEED).tolist(), 14)


@slow
def test_turns_that_begin_with_what_is_cached_are_answered_as_if_nothing_were() -> None:
    """Three turns of a session, each with the answer before it in its prompt and prompts that begin alike."""
    prompts, answers = [8, 17, 26], [5, 5, 5]
    wanted, content = [], ((7, 4),)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        wanted.append(Request(i, 0.05 * i, prompt, answer, answer, content=content))
        content = (*content, (own_text(i), prompt + answer))
    wanted.append(Request(3, 0.2, 9, 4, 4, content=((7, 4),)))
    settings: Settings = {"token_budget": 16, "max_sequences": 2, "prefix_caching": True}
    schedule = partial(continuous_batching, blocks=60, block_tokens=2, **settings)
    (state,) = served(schedule, ServedDecoder(CONFIGS["gqa"], dtypes=F64), wanted, shared_text=True)
    assert [r.cached_prompt_tokens for r in wanted] == [0, 12, 20, 4]
    alone, ids = Alone(CONFIGS["gqa"]), list[int]()
    for r in wanted[:3]:
        own = prompt_ids(r, 53, SEED).tolist()
        ids = ids + own[len(ids) :]
        ids = ids + alone.answer(ids, r.output_tokens)
        assert ids[r.prompt_tokens :] == state.answers[r.id]
    assert state.answers[3] == alone.answer(prompt_ids(wanted[3], 53, SEED).tolist(), 4)


@pytest.mark.parametrize("first", [0, 5])
def test_a_text_longer_than_all_ids_goes_on_at_their_beginning(first: int) -> None:
    ids, place = torch.arange(10), 7
    assert _stretch(ids, place, first, 13).tolist() == [(place + i) % 10 for i in range(first, 13)]
    assert _stretch(ids, 2, 1, 8).tolist() == [3, 4, 5, 6, 7, 8, 9]


def test_equal_texts_are_equal_prompts() -> None:
    one, other = (Request(i, 0.0, 9, 1, 1, content=((3, 5),)) for i in range(2))
    ids = [prompt_ids(r, 1000, SEED) for r in (one, other)]
    assert torch.equal(ids[0][:5], ids[1][:5])
    assert not torch.equal(ids[0][5:], ids[1][5:])
    assert len(ids[0]) == 9


@pytest.mark.parametrize("seed", range(5))
def test_sequences_of_no_request_have_the_totals_of_their_launch(seed: int) -> None:
    random = Random(seed)
    count, each, cached = random.randint(1, 4), random.randint(1, 9), random.choice([0, 5])
    sequences = random.randint(1, 5)
    sizes = step_sizes(sequences, sequences * 7 + 3, [(each, cached)] * count, 1)
    batch = anonymous(sizes)
    assert sum(tokens for _, tokens, _ in batch.prompts) == sizes["prompt_tokens"]
    assert sum(tokens + first for _, tokens, first in batch.prompts) == sizes["prompt_kv"]
    assert sum(first + 1 for _, first in batch.decoding) == sizes["kv_tokens"]
    assert len(batch.decoding) == sequences
    assert len({r.id for r, *_ in batch.prompts} | {r.id for r, _ in batch.decoding}) == count + sequences


def test_a_batch_of_other_totals_than_its_launch_is_a_fault() -> None:
    request = Request(0, 0.0, 20, 9, 9)
    with pytest.raises(ValueError, match="batch: 19 prompt tokens of 19, 0 sequences, in a launch of"):
        small_state().begin(Batch([(request, 19, 0)]), step_sizes(0, 0, [(20, 0)], 1), 0)


def test_a_launch_that_does_not_say_whose_tokens_it_computes_is_given_some() -> None:
    model = ServedDecoder(CONFIGS["gqa"], dtypes=F64)
    (state,) = served_states(model, {"tensor": 1}, SEED, 100)
    sizes = {"tokens": 5, "rows": 3, "sequences": 2, "kv_tokens": 13, "over_mean": 0, "prompt_tokens": 3,
             "prompt_kv": 5, "prompt_pairs": 12}  # fmt: skip

    def program(m: Machine) -> Program:
        for _ in range(2):
            yield m.wait(m.launch(model.mixed, sizes=sizes, advance={"kv_tokens": 2}))

    TorchRun([state]).run(program)
    assert state.body.buffers["logits"].shape == (3, 53)
    assert torch.isfinite(state.body.buffers["logits"]).all()
