"""ALSpec's exchange by pushed words: in Triton's interpreter, where both ranks first send and then take;
compiled, with both as streams of one card, and one a card where there are two.

Caches hold NaN but where a new token is, so that whoever takes too much gives NaN."""

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.collectives import (
    Inboxes,
    Layout,
    exchange,
    exchange_inboxes,
    exchange_layout_for,
    reference_exchange,
)
from simcore.kernels.decoder.split_kv import EMPTY, ONE_BY_ONE
from tests.test_collectives_on_cards import FORMATS, NAN_BITS, PATIENCE, are_empty, bits, gpu, ints, same_bits
from tests.thorough import first, slow

torch.set_num_threads(1)
interpreted = pytest.mark.skipif(not ONE_BY_ONE, reason="Triton's interpreter is not chosen")
PRIORITIES = list(product(range(3), repeat=2))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and formats; `spare` lays heads and tokens apart, at addresses that are not round."""

    batch: int = 1
    hidden: int = 64
    kv_heads: int = 2
    capacity: int = 3
    d: int = 16
    x_dtype: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float16
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank of a pair holds."""

    x: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    priority: Tensor
    theirs: Tensor

    def clone(self) -> "Rank":
        return Rank(*(each.clone() for each in self.tensors()))

    def to(self, device: torch.device) -> "Rank":
        return Rank(*(each.to(device) for each in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.k, self.v, self.lengths, self.priority, self.theirs


def cache_of(shape: Shape, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """A cache whose new tokens alone are numbers."""
    batch, heads, capacity, d, spare = shape.batch, shape.kv_heads, shape.capacity, shape.d, shape.spare
    rows = torch.full((capacity, batch, heads, d + spare), math.nan, dtype=shape.dtype)[..., spare:]
    cache = rows.permute(1, 2, 0, 3)
    if not spare:
        cache = cache.contiguous()
    for sequence, length in enumerate(lengths.tolist()):
        if 1 <= length <= capacity:
            token = torch.randn(heads, d, generator=generator)
            cache[sequence, :, length - 1] = token.to(shape.dtype)
    return cache


def pair(shape: Shape, seed: int, priorities: Sequence[int] = (2, 0)) -> tuple[Rank, Rank]:
    """Both ranks, with numbers and caches of their own and the same lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, shape.capacity + 1, (shape.batch,), generator=generator, dtype=torch.int32)
    ranks = []
    for priority in priorities:
        drawn = torch.randn(shape.batch * shape.hidden + shape.spare, generator=generator)
        x = drawn.to(shape.x_dtype)[shape.spare :].view(shape.batch, shape.hidden)
        k, v = (cache_of(shape, lengths, generator) for _ in range(2))
        ranks.append(Rank(x, k, v, lengths.clone(), ints(priority), ints(-7)))
    return ranks[0], ranks[1]


def expected(ranks: Sequence[Rank]) -> list[Rank]:
    """What both hold afterwards."""
    after = [rank.clone() for rank in ranks]
    xs, ks, vs, lengths, priorities, theirs = zip(*(rank.tensors() for rank in after), strict=True)
    reference_exchange(xs, ks, vs, lengths, [int(each) for each in priorities])
    for own, other in zip(theirs, reversed(priorities), strict=True):
        own.copy_(other)
    return after


def same(found: Sequence[Rank], wanted: Sequence[Rank]) -> bool:
    """To the bit, in all of the caches."""
    return all(
        torch.equal(x, y) if x.dtype == torch.int32 else same_bits(x, y)
        for one, other in zip(found, wanted, strict=True)
        for x, y in zip(one.tensors(), other.tensors(), strict=True)
    )


def in_halves(ranks: Sequence[Rank], of: Inboxes, seed: int = 0, **named: Any) -> None:
    """Both send, then both take, in a random order."""
    rng, error, patience = np.random.default_rng(seed), ints(0), ints(2)
    for half in ("send", "take"):
        for rank in rng.permutation(2).tolist():
            exchange(*ranks[rank].tensors(), of, rank, patience=patience, error=error, half=half, **named)
    assert (int(error), int(patience)) == (0, 2)
    assert are_empty(of)


def boxes(shape: Shape, layout: Layout | None = None) -> Inboxes:
    x = torch.empty(shape.batch, shape.hidden, dtype=shape.x_dtype, device="meta")
    sizes = shape.batch, shape.kv_heads, shape.capacity, shape.d
    return exchange_inboxes(
        ["cpu"] * 2, x, torch.empty(sizes, dtype=shape.dtype, device="meta"), layout=layout
    )


def random_shape(rng: np.random.Generator) -> Shape:
    batch, heads, capacity = (int(rng.integers(1, most)) for most in (6, 5, 5))
    hidden, d = int(rng.integers(1, 400)), int(rng.integers(1, 80))
    x_dtype, dtype = (FORMATS[at] for at in rng.integers(0, 3, 2))
    return Shape(batch, hidden, heads, capacity, d, x_dtype, dtype, int(rng.integers(0, 3)))


@interpreted
class TestInterpreted:
    @pytest.mark.parametrize("priorities", first(4, PRIORITIES))
    def test_the_higher_priority_gives(self, priorities: tuple[int, int]) -> None:
        for shape in (Shape(2, 300, 3, 4, 24), Shape(1, 301, 3, 2, 7, spare=1)):
            ranks, of = pair(shape, 1, priorities), boxes(shape)
            before, wanted = [rank.clone() for rank in ranks], expected(ranks)
            in_halves(ranks, of)
            assert same(ranks, wanted)
            assert [int(rank.theirs) for rank in ranks] == list(reversed(priorities))
            for rank in range(2):
                changed = not same_bits(ranks[rank].x, before[rank].x)
                assert changed == (priorities[1 - rank] > priorities[rank])
                assert changed == (not same_bits(ranks[rank].k, before[rank].k))

    @pytest.mark.parametrize(("x_dtype", "dtype"), list(product(FORMATS, repeat=2)))
    @pytest.mark.parametrize("spare", first(1, [1, 0]))
    def test_all_formats(self, x_dtype: torch.dtype, dtype: torch.dtype, spare: int) -> None:
        shape = Shape(3, 200, 2, 4, 18, x_dtype, dtype, spare)
        ranks, of = pair(shape, 2, (1, 2)), boxes(shape)
        wanted = expected(ranks)
        in_halves(ranks, of)
        assert same(ranks, wanted)

    @pytest.mark.parametrize("seed", first(4, range(40)))
    def test_random_shapes(self, seed: int) -> None:
        """Twice with the same inboxes."""
        rng = np.random.default_rng(seed)
        shape = random_shape(rng)
        of = boxes(shape)
        for turn in range(2):
            ranks = pair(shape, seed + turn, PRIORITIES[int(rng.integers(0, len(PRIORITIES)))])
            wanted = expected(ranks)
            in_halves(ranks, of, seed)
            assert same(ranks, wanted)

    @pytest.mark.parametrize("batch", first(3, [1, 2, 5, 3, 4]))
    @pytest.mark.parametrize("layout", [Layout(32, 1, 1), Layout(64, 2, 3), Layout(128, 1, 32), None])
    def test_any_batch_in_any_layout(self, batch: int, layout: Layout | None) -> None:
        shape = Shape(batch, 90, 2, 3, 22, spare=batch % 2)
        ranks, of = pair(shape, batch, (0, 1)), boxes(shape, layout)
        wanted = expected(ranks)
        in_halves(ranks, of, batch, layout=layout)
        assert same(ranks, wanted)

    @pytest.mark.parametrize("dtype", FORMATS)
    def test_no_numbers_are_sent_as_such(self, dtype: torch.dtype) -> None:
        """All patterns that a NaN may have, that of EMPTY in each half and in both."""
        shape = Shape(2, 80, 2, 2, 16, dtype, dtype)
        ranks = pair(shape, 3)
        for place in (0, 1, 2):
            tensor = ranks[0].tensors()[place]
            rows = tensor.view(2, -1) if place == 0 else tensor[0, :, int(ranks[0].lengths[0]) - 1]
            patterns = NAN_BITS[tensor.element_size()]
            rows[0, 4:8] = torch.tensor(patterns, dtype=bits(tensor).dtype).view(dtype)
            rows[1, :4] = rows[1, -2:] = torch.full((1,), -1, dtype=bits(tensor).dtype).view(dtype)
        wanted = expected(ranks)
        in_halves(ranks, boxes(shape))
        for found, one in zip(ranks, wanted, strict=True):
            for x, y in zip(found.tensors(), one.tensors(), strict=True):
                assert torch.equal(x.isnan(), y.isnan())
                assert torch.equal(x.nan_to_num(0.0), y.nan_to_num(0.0))

    @pytest.mark.parametrize("length", [-1, 0, 5])
    def test_a_token_without_a_place_is_not_written(self, length: int) -> None:
        shape = Shape(3, 64, 2, 4, 16)
        ranks, of = pair(shape, 4, (0, 2)), boxes(shape)
        for rank in ranks:
            rank.lengths[1] = length
        # Beyond its capacity begins the next head, which here is to be taken for nobody's token.
        for cache in (ranks[1].k, ranks[1].v):
            cache.nan_to_num_(9.0)
        wanted = expected(ranks)
        in_halves(ranks, of)
        assert same(ranks, wanted)

    def test_each_rank_has_its_own_lengths(self) -> None:
        shape = Shape(2, 64, 2, 4, 16)
        ranks, of = pair(shape, 5), boxes(shape)
        ranks[1].lengths.copy_(ranks[1].lengths % 4 + 1)
        wanted = expected(ranks)
        in_halves(ranks, of)
        assert same(ranks, wanted)

    @pytest.mark.parametrize("half", ["send", "take", "both"])
    def test_without_patience_nothing_is_done(self, half: str) -> None:
        shape = Shape()
        ranks, of, error, patience = pair(shape, 6, (0, 2)), boxes(shape), ints(0), ints(0)
        before = [rank.clone() for rank in ranks]
        exchange(*ranks[1].tensors(), of, 1, patience=ints(1), half="send")
        words = of.words[0].clone()
        exchange(*ranks[0].tensors(), of, 0, patience=patience, error=error, half=half)
        assert same(ranks, before)
        assert torch.equal(of.words[0], words)
        assert bool((of.words[1] == EMPTY.value).all())
        assert (int(error), int(patience)) == (0, 0)

    @pytest.mark.parametrize("code", [1, 7])
    def test_who_does_not_come_is_given_up(self, code: int) -> None:
        shape = Shape()
        ranks, of, error, patience = pair(shape, 7, (0, 2)), boxes(shape), ints(0), ints(3)
        before = [rank.clone() for rank in ranks]
        exchange(*ranks[0].tensors(), of, 0, patience=patience, error=error, code=code)
        assert (int(error), int(patience)) == (code, 0)
        assert same(ranks, before)
        of.clear()
        exchange(*ranks[0].tensors(), of, 0, patience=ints(2))
        assert same(ranks, before)

    @pytest.mark.parametrize("priorities", [(0, 2), (2, 1)])
    @pytest.mark.parametrize("place", [0, 1, 3, 4, -1])
    def test_a_single_missing_word_is_waited_for(self, place: int, priorities: tuple[int, int]) -> None:
        """One of the priority's too, and one that would be dropped."""
        shape = Shape(2, 500, 2, 3, 16, torch.float32)
        ranks, of, error = pair(shape, 8, priorities), boxes(shape), ints(0)
        numbers = [int(each.isnan().sum()) for each in ranks[0].tensors()]
        exchange(*ranks[1].tensors(), of, 1, patience=ints(1), half="send")
        sent = (of.words[0][1] != EMPTY.value).nonzero().flatten()
        of.words[0][1, sent[place]] = EMPTY.value
        exchange(*ranks[0].tensors(), of, 0, patience=ints(3), half="take", error=error)
        assert int(error) == 1
        # What came in part is nowhere.
        assert [int(each.isnan().sum()) for each in ranks[0].tensors()] == numbers

    def test_an_idle_rank_sends_its_priority_alone(self) -> None:
        shape = Shape(2, 500, 2, 3, 16)
        layout = Layout(64, 1, 32)
        of = boxes(shape, layout)
        for priority in (0, 1):
            ranks = pair(shape, 9, (2, priority))
            exchange(*ranks[1].tensors(), of, 1, patience=ints(1), half="send", layout=layout)
            blocks = of.words[0][1].view(-1, 64)
            assert bool((blocks[:, :4] == priority).all())
            assert bool((blocks[:, 4:] == EMPTY.value).all()) == (priority == 0)
            of.clear()

    def test_few_words_take_one_warp(self) -> None:
        for words in (64, 2560, 8192, 8193, 1 << 20):
            layout = exchange_layout_for(words)
            assert 32 * layout.warps * 8 == layout.block <= 1024
            assert (layout.warps == 1) == (words <= 8192)


def in_shared_memory(shape: Shape) -> Inboxes:
    """Inboxes at the same addresses in all processes that are forked from now on."""
    words = tuple(x.share_memory_() for x in boxes(shape).words)
    starts = torch.tensor([x.data_ptr() for x in words], dtype=torch.int64)
    return Inboxes(words, (starts,) * 2)


def take_part(
    rank: int, of: Sequence[Inboxes], rounds: Sequence[tuple[Rank, Rank]], late: Sequence[float]
) -> None:
    """A rank in a process of its own: both halves in one launch, two inboxes in turn."""
    error, patience = ints(0), ints(1_000_000)
    for turn, (ranks, seconds) in enumerate(zip(rounds, late, strict=True)):
        time.sleep(seconds)
        wanted = expected(ranks)[rank]
        exchange(*ranks[rank].tensors(), of[turn % 2], rank, patience=patience, error=error)
        assert int(error) == 0
        assert same([ranks[rank]], [wanted])


@slow
@interpreted
def test_ranks_that_wait_for_each_other() -> None:
    """As processes they may run at the same time even where launches run one by one."""
    shape, rng = Shape(2, 101, 2, 3, 10, spare=1), np.random.default_rng(1)
    rounds = [pair(shape, seed, PRIORITIES[seed % 9]) for seed in range(12)]
    of = [in_shared_memory(shape) for _ in range(2)]
    late = rng.random((2, len(rounds))) * 0.01
    fork = multiprocessing.get_context("fork")
    both = [
        fork.Process(target=take_part, args=(rank, of, rounds, late[rank].tolist()), daemon=True)
        for rank in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0]
    assert all(are_empty(each) for each in of)


CHANGES: list[tuple[str, Callable[[Rank], dict[str, Any]]]] = [
    ("x", lambda r: {"x": r.x.double()}),
    ("x", lambda r: {"x": r.x[0]}),
    ("x", lambda r: {"x": r.x.t()}),
    ("x", lambda r: {"x": r.x[:0]}),
    ("k", lambda r: {"k": r.k[:1]}),
    ("k", lambda r: {"k": r.k.double()}),
    ("k", lambda r: {"k": r.k[0]}),
    ("k", lambda r: {"k": r.k.transpose(2, 3), "v": r.v.transpose(2, 3)}),
    ("k", lambda r: {"v": r.k}),
    ("k", lambda r: {"k": r.k[:, :1].expand(r.k.shape)}),
    ("v", lambda r: {"v": r.v[:, :1]}),
    ("v", lambda r: {"v": r.v.float()}),
    ("lengths", lambda r: {"lengths": r.lengths.long()}),
    ("lengths", lambda r: {"lengths": r.lengths[:1]}),
    ("priority", lambda r: {"priority": ints(1, 1)}),
    ("theirs", lambda r: {"theirs": torch.zeros(1)}),
    ("theirs", lambda r: {"theirs": r.priority}),
    ("lengths", lambda r: {"lengths": r.lengths.to("meta")}),
]


class TestArguments:
    @pytest.mark.parametrize(("name", "change"), CHANGES)
    def test_tensors_that_do_not_fit_are_named(
        self, name: str, change: Callable[[Rank], dict[str, Any]]
    ) -> None:
        shape = Shape(2)
        rank, _ = pair(shape, 1)
        with pytest.raises(ValueError, match=f"^{name} "):
            exchange(*replace(rank, **change(rank)).tensors(), boxes(shape), 0, patience=ints(0))

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("rank", {"rank": 2}),
            ("rank", {"rank": -1}),
            ("patience", {"patience": torch.zeros(1)}),
            ("error", {"error": ints(1, 2)}),
            ("half", {"half": "third"}),
            ("block", {"layout": Layout(100, 1, 1)}),
            ("layout", {"layout": Layout(32, 2, 1)}),
            ("layout", {"layout": Layout(32, 1, 0)}),
            ("layout", {"layout": Layout(4, 1, 1)}),
            ("inboxes", {"layout": Layout(2048, 1, 1)}),
            ("inboxes", {"inboxes": boxes(Shape(2, hidden=32, kv_heads=1))}),
            ("inboxes", {"inboxes": Inboxes((torch.zeros(3, 5000),) * 3, (torch.zeros(3),) * 3)}),
        ],
    )
    def test_what_else_does_not_fit_is_named(self, name: str, change: dict[str, Any]) -> None:
        shape = Shape(2, hidden=900)
        rank, _ = pair(shape, 1)
        given = {"inboxes": boxes(shape), "rank": 0, "patience": ints(0), "error": ints(0)} | change
        with pytest.raises(ValueError, match=f"^{name}"):
            exchange(*rank.tensors(), given.pop("inboxes"), given.pop("rank"), **given)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_inboxes_are_of_two_ranks(self, count: int) -> None:
        with pytest.raises(ValueError, match=r"^devices: an exchange is of 2 ranks"):
            exchange_inboxes(["cpu"] * count, torch.zeros(1, 8), torch.zeros(1, 1, 1, 8))


# -- compiled ------------------------------------------------------------------------------------------------

# Rounds of two exchanges each, of so many different inputs.
ROUNDS, INPUTS = 200, 9


class Card:
    """A rank with a graph of a round: two exchanges with two inboxes in turn, by priorities of their own.

    While one rank waits, nothing may make the host wait for the card: neither new memory nor a kernel that is
    not loaded yet. So all is made and run once before, without patience."""

    def __init__(
        self, rank: int, device: torch.device, of: Sequence[Inboxes], inputs: Sequence[Rank]
    ) -> None:
        self.device, self.inputs = device, [each.to(device) for each in inputs]
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.held = self.inputs[0].clone()
            self.priorities, self.theirs = (ints(0, 0, device=device) for _ in range(2))
            self.kept = [
                each.new_zeros(ROUNDS, *each.shape) for each in (*self.held.tensors()[:3], self.theirs)
            ]
            self.patience = ints(0, device=device)
            self.error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()

            def a_round() -> None:
                for turn, each in enumerate(of):
                    words = self.priorities[turn : turn + 1], self.theirs[turn : turn + 1]
                    exchange(
                        *self.held.tensors()[:4], *words, each, rank,
                        patience=self.patience, error=self.error, chained=True,
                    )  # fmt: skip

            with torch.cuda.stream(self.stream):
                a_round()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                a_round()
            self.play(0, ints(0, 0, device=device), 1)
            torch.cuda.synchronize()

    def play(self, turn: int, priorities: Tensor, cycles: int) -> None:
        """Queues a round behind a delay; keeps what it leaves."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            given = self.inputs[turn % INPUTS].tensors()[:4]
            for own, each in zip(self.held.tensors()[:4], given, strict=True):
                own.copy_(each, non_blocking=True)
            self.priorities.copy_(priorities, non_blocking=True)
            self.graph.replay()
            left = *self.held.tensors()[:3], self.theirs
            for kept, each in zip(self.kept, left, strict=True):
                kept[turn].copy_(each, non_blocking=True)


def wanted_of(ranks: Sequence[Rank], priorities: Tensor) -> list[Rank]:
    """What both ranks hold after a round; priorities [ranks, 2], an exchange a column."""
    after = [rank.clone() for rank in ranks]
    for turn in range(2):
        xs, ks, vs, lengths, _, _ = zip(*(rank.tensors() for rank in after), strict=True)
        reference_exchange(xs, ks, vs, lengths, priorities[:, turn].tolist())
    return after


def played(devices: Sequence[torch.device], shape: Shape) -> None:
    """Random rounds against the reference, some ranks later than others."""
    pairs = [pair(shape, seed) for seed in range(INPUTS)]
    of = [exchange_inboxes(devices, pairs[0][0].x, pairs[0][0].k) for _ in range(2)]
    cards = [Card(rank, device, of, [each[rank] for each in pairs]) for rank, device in enumerate(devices)]
    assert all(are_empty(each) for each in of)
    rng = np.random.default_rng(shape.batch)
    priorities = torch.tensor(rng.integers(0, 3, (ROUNDS, 2, 2)), dtype=torch.int32)
    placed = [priorities.to(device) for device in devices]
    for card in cards:
        card.patience.fill_(PATIENCE)
        torch.cuda.synchronize(card.device)
    for turn in range(ROUNDS):
        for rank in rng.permutation(2).tolist():
            late = int(rng.integers(1, 20_000)) if rng.random() < 0.3 else 1
            cards[rank].play(turn, placed[rank][turn, rank], late)
    for card in cards:
        card.stream.synchronize()
        assert int(card.error) == 0
    found = [[each.cpu() for each in card.kept] for card in cards]
    for turn in range(ROUNDS):
        wanted = wanted_of(pairs[turn % INPUTS], priorities[turn])
        for rank in range(2):
            *left, theirs = (each[turn] for each in found[rank])
            assert torch.equal(theirs, priorities[turn, 1 - rank])
            assert all(same_bits(*each) for each in zip(left, wanted[rank].tensors()[:3], strict=True))
    assert all(are_empty(each) for each in of)


# A layer's; several sequences'; of numbers at addresses that are not round; of many blocks a program.
SHAPES = [
    Shape(1, 4096, 8, 16, 128, torch.bfloat16, torch.bfloat16),
    Shape(3, 1024, 2, 8, 64, torch.float32, torch.bfloat16),
    Shape(2, 333, 3, 4, 33, torch.float16, torch.float16, spare=1),
    Shape(16, 4096, 8, 2, 128, torch.bfloat16, torch.float32),
]


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("shape", SHAPES)
    def test_streams_of_one_card(self, shape: Shape) -> None:
        played([torch.device("cuda", 0)] * 2, shape)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_one_rank_a_card(self, shape: Shape) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs 2 CUDA devices")
        played([torch.device("cuda", rank) for rank in range(2)], shape)

    def test_who_does_not_come_is_given_up(self) -> None:
        device = torch.device("cuda", 0)
        rank = pair(SHAPES[0], 1, (0, 2))[0].to(device)
        before, of = rank.clone(), exchange_inboxes([device] * 2, rank.x, rank.k)
        error, patience = ints(0, device=device), ints(1000, device=device)
        exchange(*rank.tensors(), of, 0, patience=ints(0, device=device), error=error)
        assert int(error) == 0
        assert are_empty(of)
        exchange(*rank.tensors(), of, 0, patience=patience, error=error, code=5)
        assert (int(error), int(patience)) == (5, 0)
        assert same([rank], [before])
        of.clear()
        assert are_empty(of)
