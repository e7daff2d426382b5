"""Collectives by pushed words: in Triton's interpreter, where all ranks first send and then take; compiled,
with all ranks as streams of one card, and one a card where there are several."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.collectives import (
    Inboxes,
    Layout,
    all_gather,
    all_reduce,
    inboxes,
    layout_for,
    peers_see_each_other,
    reference_all_gather,
    reference_all_reduce,
    reference_normed_sum,
    rows_layout_for,
    words_of_rows,
)
from simcore.kernels.decoder.norm import norm, reference_norm
from simcore.kernels.decoder.residual import reference_residual
from simcore.kernels.decoder.split_kv import EMPTY, ONE_BY_ONE
from tests.thorough import first, slow

torch.set_num_threads(1)
HAS_GPU = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]
# The rounding of one sum of numbers around 1. The interpreter cuts bf16 off instead.
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Sums of squares in another order, and roots that are not the nearest ones, show in fp32 alone.
NORM_ROUNDING = ROUNDING | {torch.float32: 2.0**-19}
NAN_BITS = {2: [-1, 0x7FFF, 0x7F81, -2], 4: [-1, 0x7FFFFFFF, 0x7FC00001, -2]}


def ints(*values: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drawn(seed: int, ranks: int, dtype: torch.dtype, *size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]


def are_empty(of: Inboxes) -> bool:
    return all(bool((words == EMPTY.value).all()) for words in of.words)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


def near(out: Tensor, truth: Tensor) -> bool:
    """Whether each number is the float64 truth but for rounding; both NaN, or neither."""
    unit = ROUNDING[out.dtype] * len(truth)
    truth = truth.sum(0)
    return torch.allclose(out.double(), truth, rtol=ROUNDING[out.dtype], atol=unit, equal_nan=True)


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"))


def room_for(ranks: int, rows: int, hidden: int, dtype: torch.dtype) -> Inboxes:
    """Inboxes for no more than rows of which each begins with a word."""
    numbers = 4 // dtype.itemsize
    return inboxes(["cpu"] * ranks, numbers * words_of_rows(rows, hidden, dtype), dtype)


def normed_in_halves(
    xs: Sequence[Tensor], before: Tensor, gain: Tensor, of: Inboxes, **named: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Residuals and normed rows of all ranks: all send, then all take; what is normed holds NaN before."""
    residuals, normed, error = [before.clone() for _ in xs], [nan_like(before) for _ in xs], ints(0)
    for half in ("send", "take"):
        for rank, x in enumerate(xs):
            found = all_reduce(
                x, of, rank, patience=ints(2), error=error, half=half,
                residual=residuals[rank], gain=gain, normed=normed[rank], **named,
            )  # fmt: skip
            assert found is (x if half == "send" else normed[rank])
    assert int(error) == 0
    assert are_empty(of)
    return residuals, normed


def in_halves(
    collective: Callable[..., Tensor], xs: Sequence[Tensor], of: Inboxes, seed: int, **named: Any
) -> list[Tensor]:
    """All ranks send, then all take, in random orders; outputs hold NaN before."""
    rng, error = np.random.default_rng(seed), ints(0)
    patience = ints(2)
    for rank in rng.permutation(len(xs)).tolist():
        assert (
            collective(xs[rank], of, rank, patience=patience, error=error, half="send", **named) is xs[rank]
        )
    outs = dict[int, Tensor]()
    for rank in rng.permutation(len(xs)).tolist():
        x = xs[rank]
        size = x.shape if collective is all_reduce else (len(x), len(xs) * x.shape[1])
        out = torch.full(size, float("nan"), dtype=x.dtype)
        found = collective(x, of, rank, patience=patience, error=error, half="take", out=out, **named)
        assert found is out
        outs[rank] = out
    assert int(error) == 0
    assert are_empty(of)
    return [outs[rank] for rank in range(len(xs))]


@pytest.mark.skipif(not ONE_BY_ONE, reason="Triton's interpreter is not chosen")
class TestInterpreted:
    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("ranks", first(2, [2, 1, 4, 3, 5, 6, 7, 8]))
    def test_sums_are_right_and_alike(self, ranks: int, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(ranks)
        for count in (1, 2, 3, int(rng.integers(4, 999)), int(rng.integers(1000, 3000))):
            xs = drawn(count, ranks, dtype, count)
            of = inboxes(["cpu"] * ranks, count, dtype)
            for seed in (0, 1):
                outs = in_halves(all_reduce, xs, of, seed)
                assert near(outs[0], torch.stack([x.double() for x in xs]))
                assert all(same_bits(outs[0], out) for out in outs)
                if dtype != torch.bfloat16:
                    assert same_bits(outs[0], reference_all_reduce(xs))

    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("ranks", first(3, [2, 4, 1, 3, 5, 6, 7, 8]))
    def test_gathered_columns_are_the_ranks(self, ranks: int, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(ranks)
        of = inboxes(["cpu"] * ranks, 3000, dtype)
        for rows, columns in ((1, 1), (3, 5), (2, 64), (1, 1000), (int(rng.integers(1, 9)), 111)):
            xs = drawn(columns, ranks, dtype, rows, columns)
            outs = in_halves(all_gather, xs, of, rows)
            expected = reference_all_gather(xs)
            assert all(same_bits(expected, out) for out in outs)

    @pytest.mark.parametrize(
        "layout", [pytest.param(Layout(32, 1, 1), marks=slow), Layout(64, 2, 3), Layout(256, 1, 32)]
    )
    def test_any_layout(self, layout: Layout) -> None:
        for dtype in FORMATS:
            xs = drawn(3, 3, dtype, 1, 777)
            of = inboxes(["cpu"] * 3, 777, dtype)
            usual, other = (in_halves(all_reduce, xs, of, 0, layout=one) for one in (None, layout))
            assert same_bits(usual[0], other[0])
            assert same_bits(in_halves(all_gather, xs, of, 0, layout=layout)[2], reference_all_gather(xs))

    def test_ranks_may_have_layouts_of_their_own(self) -> None:
        xs, of = drawn(4, 2, torch.float32, 500), inboxes(["cpu"] * 2, 500, torch.float32)
        for rank, layout in enumerate((Layout(32, 1, 2), Layout(256, 2, 1))):
            all_reduce(xs[rank], of, rank, patience=ints(1), half="send", layout=layout)
        out = all_reduce(xs[1], of, 1, patience=ints(1), half="take")
        assert same_bits(out, reference_all_reduce(xs))

    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("count", [64, 65])
    def test_no_numbers_are_sent_as_such(self, dtype: torch.dtype, count: int) -> None:
        """All patterns that a NaN may have, that of EMPTY in each half and in both."""
        xs = drawn(5, 3, dtype, 1, count)
        patterns = NAN_BITS[xs[0].element_size()]
        for place, x in enumerate(xs):
            bits(x)[0, 8 * place : 8 * place + len(patterns)] = torch.tensor(patterns, dtype=bits(x).dtype)
            bits(x)[0, 40:44] = -1
            bits(x)[0, -1] = -1
        of = inboxes(["cpu"] * 3, count, dtype)
        outs = in_halves(all_reduce, xs, of, 1)
        assert near(outs[0], torch.stack([x.double() for x in xs]))
        assert int(outs[0].isnan().sum()) == 3 * len(patterns) + 5
        assert all(same_bits(outs[0], out) for out in outs)
        gathered, expected = in_halves(all_gather, xs, of, 1), reference_all_gather(xs)
        assert torch.equal(gathered[0].isnan(), expected.isnan())
        assert torch.equal(gathered[0].nan_to_num(0.0), expected.nan_to_num(0.0))
        assert all(same_bits(gathered[0], out) for out in gathered)

    def test_infinities_and_negative_zeros(self) -> None:
        for dtype in FORMATS:
            row = torch.tensor([float("inf"), -float("inf"), -0.0], dtype=dtype)
            xs = [row.clone(), row.clone()]
            out, _ = in_halves(all_reduce, xs, inboxes(["cpu"] * 2, 3, dtype), 0)
            assert same_bits(out, row)

    @pytest.mark.parametrize("offset", [0, 1])
    def test_tensors_may_begin_within_a_word(self, offset: int) -> None:
        whole = drawn(6, 2, torch.float16, 101)
        xs = [x[offset : offset + 100] for x in whole]
        of = inboxes(["cpu"] * 2, 100, torch.float16)
        assert same_bits(in_halves(all_reduce, xs, of, 0)[1], reference_all_reduce(xs))
        rows = [x.view(2, 50) for x in xs]
        assert same_bits(in_halves(all_gather, rows, of, 0)[1], reference_all_gather(rows))

    def test_a_sum_may_replace_what_was_summed(self) -> None:
        for dtype, count in ((torch.float16, 1501), (torch.float32, 600)):
            xs, of = drawn(7, 4, dtype, count), inboxes(["cpu"] * 4, count, dtype)
            expected = reference_all_reduce(xs)
            for half in ("send", "take"):
                for rank, x in enumerate(xs):
                    all_reduce(x, of, rank, patience=ints(1), half=half, out=x)
            assert all(same_bits(x, expected) for x in xs)

    @pytest.mark.parametrize("with_out", [False, True])
    def test_a_sum_is_added_to_the_residual(self, with_out: bool) -> None:
        for dtype, count in ((torch.float16, 1501), (torch.float16, 64), (torch.float32, 600)):
            xs, of = drawn(8, 3, dtype, count), inboxes(["cpu"] * 3, count, dtype)
            (before,) = drawn(9, 1, dtype, count)
            out = torch.full_like(before, float("nan")) if with_out else None
            for rank, x in enumerate(xs):
                all_reduce(x, of, rank, patience=ints(1), half="send")
            residual = before.clone()
            found = all_reduce(xs[1], of, 1, patience=ints(1), half="take", residual=residual, out=out)
            assert found is residual
            expected = reference_all_reduce(xs)
            # In fp32, rounded once, as torch does it.
            assert same_bits(residual, reference_residual(expected, before.clone()))
            assert out is None or same_bits(out, expected)

    @slow
    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("ranks", first(2, [2, 1, 3, 4]))
    def test_new_residuals_are_normed(self, ranks: int, dtype: torch.dtype) -> None:
        """Also rows that end within a word, rows of one number, and more rows than programs."""
        rng = np.random.default_rng(ranks)
        some = [(int(rng.integers(1, 5)), int(rng.integers(2, 600))) for _ in range(2)]
        for rows, hidden in ((1, 1), (2, 5), (1, 256), (19, 34), (3, 257), *some):
            xs, of = drawn(hidden, ranks, dtype, rows, hidden), room_for(ranks, rows, hidden, dtype)
            before, gain = drawn(ranks, 2, dtype, rows, hidden)
            gain, eps = 1.0 + 0.1 * gain[0].float(), float(rng.choice([1e-6, 1e-3]))
            residuals, normed = normed_in_halves(xs, before, gain, of, eps=eps)
            expected = before.clone()
            truth = reference_normed_sum(xs, expected, gain, eps)
            wide = torch.stack([x.double() for x in xs]).sum(0) + before.double()
            assert near(residuals[0], torch.stack([*(x.double() for x in xs), before.double()]))
            # Where squares are small, roundings of the sum are large beside the root of their mean.
            if hidden >= 256:
                exact = reference_norm(wide, gain.double(), eps=eps)
                assert (normed[0].double() - exact).abs().max() < 8 * ranks * ROUNDING[dtype]
            mean = reference_norm(residuals[0].double(), gain.double(), eps=eps)
            assert torch.allclose(normed[0].double(), mean, rtol=NORM_ROUNDING[dtype], atol=1e-7)
            if dtype != torch.bfloat16:
                assert same_bits(residuals[0], expected)
                assert torch.allclose(normed[0], truth, rtol=NORM_ROUNDING[dtype], atol=1e-7)
            assert all(same_bits(residuals[0], x) for x in residuals)
            assert all(same_bits(normed[0], x) for x in normed)

    @slow
    def test_a_norm_of_any_layout_or_alignment_or_gain(self) -> None:
        """The sum beside it, if it is asked for; what is normed may replace x."""
        for dtype in FORMATS:
            xs, of = drawn(3, 3, dtype, 5, 78), room_for(3, 5, 78, dtype)
            before, gain = drawn(4, 2, dtype, 5, 78)
            usual = normed_in_halves(xs, before, gain[0], of)
            for layout in (Layout(128, 1, 2), Layout(256, 4, 1), Layout(256, 8, 32)):
                other = normed_in_halves(xs, before, gain[0], of, layout=layout)
                assert same_bits(usual[0][0], other[0][0])
                assert torch.allclose(usual[1][0].float(), other[1][0].float(), rtol=NORM_ROUNDING[dtype])
            within = [torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(5, 78) for x in xs]
            assert same_bits(normed_in_halves(within, before, gain[0], of)[1][0], usual[1][0])
            out = nan_like(before)
            normed_in_halves(xs, before, gain[0].double(), of, out=out)
            assert same_bits(out, in_halves(all_reduce, xs, of, 0)[0])
            for half in ("send", "take"):
                for rank, x in enumerate(xs):
                    named: dict[str, Any] = {"patience": ints(1), "gain": gain[0], "normed": x, "half": half}
                    all_reduce(x, of, rank, residual=before.clone(), **named)
            assert all(same_bits(x, usual[1][0]) for x in xs)

    def test_a_norm_of_no_numbers_and_of_nothing(self) -> None:
        """A row with a NaN is all NaN, the others are not."""
        xs, of = drawn(5, 2, torch.bfloat16, 3, 65), room_for(2, 3, 65, torch.bfloat16)
        (before,) = drawn(6, 1, torch.bfloat16, 3, 65)
        bits(xs[1])[1, 8:10] = -1
        residuals, normed = normed_in_halves(xs, before, torch.ones(65), of)
        assert int(residuals[0].isnan().sum()) == 2
        assert normed[0].isnan().all(1).tolist() == [False, True, False]
        assert int(normed[0].isnan().sum()) == 65
        nothing = torch.empty(0, 65, dtype=torch.bfloat16)
        found = all_reduce(
            nothing, of, 0, patience=ints(1), residual=nothing.clone(), gain=torch.ones(65), half="both"
        )
        assert found.shape == (0, 65)

    def test_what_is_not_normed(self) -> None:
        """With a gate of 0, and by who waits for no one, or in vain."""
        xs, of, error = drawn(1, 2, torch.float32, 2, 50), room_for(2, 2, 50, torch.float32), ints(0)
        (before,), gain = drawn(2, 1, torch.float32, 2, 50), torch.ones(50)
        residual, normed = before.clone(), nan_like(before)
        named: dict[str, Any] = {"error": error, "residual": residual, "gain": gain, "normed": normed}
        for half in ("send", "take", "both"):
            all_reduce(xs[0], of, 0, patience=ints(5), gate=ints(0), half=half, **named)
        assert are_empty(of)
        assert same_bits(residual, before)
        assert bool(normed.isnan().all())
        all_reduce(xs[0], of, 0, patience=ints(0), **named)
        assert int(error) == 0
        assert bool((of.words[1][0, :100] == xs[0].view(-1).view(torch.int32)).all())
        assert bool((of.words[0] == EMPTY.value).all())
        patience = ints(3)
        all_reduce(xs[0], of, 0, patience=patience, code=7, **named)
        assert (int(error), int(patience)) == (7, 0)
        of.clear()
        normed_in_halves(xs, before, gain, of, gate=ints(1))

    def test_a_gate_of_0_leaves_all_as_it_was(self) -> None:
        xs, of, error = drawn(1, 2, torch.float32, 100), inboxes(["cpu"] * 2, 100, torch.float32), ints(0)
        for collective, size in ((all_reduce, (1, 100)), (all_gather, (1, 200))):
            out = torch.full(size, 7.0)
            for half in ("send", "take", "both"):
                collective(
                    xs[0].view(1, 100), of, 0, patience=ints(5), error=error, gate=ints(0), out=out, half=half
                )
            assert bool((out == 7).all())
            assert int(error) == 0
            assert are_empty(of)
        for rank in (1, 0):
            all_reduce(xs[rank], of, rank, patience=ints(5), gate=ints(1), half="send")
        assert same_bits(
            all_reduce(xs[0], of, 0, patience=ints(5), gate=ints(1), half="take"), reference_all_reduce(xs)
        )

    def test_without_patience_nothing_is_waited_for_and_nothing_told(self) -> None:
        (x,), of, error = drawn(1, 1, torch.float32, 100), inboxes(["cpu"] * 3, 100, torch.float32), ints(0)
        all_reduce(x, of, 1, patience=ints(0), error=error)
        assert int(error) == 0
        assert bool((of.words[0][1, :100] == x.view(torch.int32)).all())
        assert bool((of.words[1] == EMPTY.value).all())
        of.clear()
        assert are_empty(of)

    @pytest.mark.parametrize("collective", [all_reduce, all_gather])
    @pytest.mark.parametrize("code", [1, 7])
    def test_what_does_not_come_is_told(self, collective: Callable[..., Tensor], code: int) -> None:
        """One rank of three has not sent; what the other one sent is gone afterwards. Who has given up once
        waits no more."""
        xs, of, error = drawn(1, 3, torch.float16, 4, 300), inboxes(["cpu"] * 3, 1200, torch.float16), ints(0)
        collective(xs[2], of, 2, patience=ints(3), half="send")
        patience = ints(3)
        collective(xs[0], of, 0, patience=patience, half="take", error=error, code=code)
        assert int(error) == code
        assert int(patience) == 0
        collective(xs[0], of, 0, patience=patience, half="take", error=error.zero_(), code=code)
        assert int(error) == 0
        assert bool((of.words[0] == EMPTY.value).all())

    def test_a_single_missing_word_is_waited_for(self) -> None:
        xs, of, error = drawn(1, 2, torch.float32, 2500), inboxes(["cpu"] * 2, 2500, torch.float32), ints(0)
        all_reduce(xs[1], of, 1, patience=ints(3), half="send")
        of.words[0][1, 2499] = EMPTY.value
        all_reduce(xs[0], of, 0, patience=ints(3), half="take", error=error)
        assert int(error) == 1

    def test_one_rank_alone_does_all_at_once(self) -> None:
        for dtype in FORMATS:
            (x,), of, error = drawn(2, 1, dtype, 3, 35), inboxes(["cpu"], 105, dtype), ints(0)
            assert same_bits(all_reduce(x, of, 0, patience=ints(1), error=error), x)
            assert same_bits(all_gather(x, of, 0, patience=ints(1), error=error), x)
            assert int(error) == 0

    def test_nothing_is_gathered_of_nothing(self) -> None:
        of, x = inboxes(["cpu"] * 2, 1, torch.float32), torch.empty(0, 3)
        assert all_gather(x, of, 0, patience=ints(1)).shape == (0, 6)
        assert all_reduce(x, of, 0, patience=ints(1)).shape == (0, 3)


def in_shared_memory(ranks: int, elements: int, dtype: torch.dtype) -> Inboxes:
    """Inboxes at the same addresses in all processes that are forked from now on."""
    words = tuple(x.share_memory_() for x in inboxes(["cpu"] * ranks, elements, dtype).words)
    starts = torch.tensor([x.data_ptr() for x in words], dtype=torch.int64)
    return Inboxes(words, (starts,) * ranks)


def take_part_in_norms(rank: int, of: Sequence[Inboxes], rounds: Sequence[Sequence[Tensor]]) -> None:
    """As `take_part`, with two inboxes in turn for norms alone: as the layers of a decoder do."""
    error, patience = ints(0), ints(1_000_000)
    residual, gain = torch.zeros_like(rounds[0][0]), torch.linspace(0.5, 2.0, rounds[0][0].shape[1])
    expected = residual.clone()
    for turn, xs in enumerate(rounds):
        normed = all_reduce(
            xs[rank], of[turn % 2], rank, patience=patience, error=error, residual=residual, gain=gain
        )
        truth = reference_normed_sum(xs, expected, gain)
        assert int(error) == 0
        assert same_bits(residual, expected)
        assert torch.allclose(normed, truth, rtol=ROUNDING[normed.dtype])


def take_part(
    rank: int, of: Sequence[Inboxes], rounds: Sequence[Sequence[Tensor]], late: Sequence[float]
) -> None:
    """A rank in a process of its own: both halves in one launch, several rounds with two inboxes in turn."""
    error, patience = ints(0), ints(1_000_000)
    for xs, seconds in zip(rounds, late, strict=True):
        time.sleep(seconds)
        total = all_reduce(xs[rank], of[0], rank, patience=patience, error=error)
        gathered = all_gather(total, of[1], rank, patience=patience, error=error)
        expected = reference_all_reduce(xs)
        assert int(error) == 0
        assert same_bits(total, expected)
        assert same_bits(gathered, reference_all_gather([expected] * len(xs)))


@pytest.mark.skipif(not ONE_BY_ONE, reason="Triton's interpreter is not chosen")
@pytest.mark.parametrize("ranks", first(1, [2, 4]))
@slow
def test_ranks_that_wait_for_each_other(ranks: int) -> None:
    """As processes they may run at the same time even where launches run one by one."""
    rounds = [drawn(n, ranks, torch.float16, 1, 601) for n in range(12)]
    of = [in_shared_memory(ranks, 601, torch.float16) for _ in range(2)]
    late = np.random.default_rng(ranks).random((ranks, len(rounds))) * 0.01
    as_processes(take_part, [(rank, of, rounds, late[rank].tolist()) for rank in range(ranks)])
    assert all(are_empty(each) for each in of)


@slow
@pytest.mark.skipif(not ONE_BY_ONE, reason="Triton's interpreter is not chosen")
def test_ranks_that_wait_for_each_other_and_norm() -> None:
    rounds = [drawn(n, 2, torch.float16, 3, 77) for n in range(12)]
    of = [in_shared_memory(2, 3 * 78, torch.float16) for _ in range(2)]
    as_processes(take_part_in_norms, [(rank, of, rounds) for rank in range(2)])
    assert all(are_empty(each) for each in of)


def as_processes(run: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> None:
    """Each rank in a process of its own."""
    fork = multiprocessing.get_context("fork")
    group = [fork.Process(target=run, args=args, daemon=True) for args in given]
    for one in group:
        one.start()
    for one in group:
        one.join(60)
    assert [one.exitcode for one in group] == [0] * len(given)


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("x", {"x": torch.zeros(4, 6, dtype=torch.float64)}),
            ("x", {"x": torch.zeros(6, 4).t()}),
            ("rank", {"rank": 2}),
            ("rank", {"rank": -1}),
            ("inboxes", {"x": torch.zeros(4, 60), "out": None}),
            ("patience", {"patience": torch.zeros(1)}),
            ("patience", {"patience": ints(1, 2)}),
            ("error", {"error": torch.zeros(1)}),
            ("a gate", {"gate": ints(1, 1)}),
            ("out", {"out": torch.zeros(4, 5)}),
            ("out", {"out": torch.zeros(4, 6).half()}),
            ("half", {"half": "third"}),
            ("block", {"layout": Layout(100, 1, 1)}),
            ("layout", {"layout": Layout(32, 2, 1)}),
            ("layout", {"layout": Layout(32, 1, 0)}),
        ],
    )
    def test_what_does_not_fit_is_named(self, name: str, change: dict[str, Any]) -> None:
        of = inboxes(["cpu"] * 2, 128, torch.float16)
        fits = {"x": torch.zeros(4, 6), "rank": 0, "patience": ints(0), "error": ints(0), "out": None}
        for collective in (all_reduce, all_gather):
            given = fits | change
            with pytest.raises(ValueError, match=f"^{name}"):
                collective(given.pop("x"), of, given.pop("rank"), **given)

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("normed", {"gain": None}),
            ("normed", {"residual": None}),
            ("normed", {"normed": torch.zeros(4, 5)}),
            ("normed", {"normed": torch.zeros(4, 6).half()}),
            ("gain", {"gain": torch.ones(4)}),
            ("gain", {"gain": torch.ones(12)[::2]}),
            ("layout", {"layout": Layout(4, 1, 1)}),
            ("layout", {"layout": Layout(32, 2, 1)}),
            ("half", {"half": "third"}),
        ],
    )
    def test_what_does_not_fit_a_norm_is_named(self, name: str, change: dict[str, Any]) -> None:
        x, residual = torch.zeros(4, 6), torch.zeros(4, 6)
        fits = {"patience": ints(0), "residual": residual, "gain": torch.ones(6), "normed": torch.zeros(4, 6)}
        of = inboxes(["cpu"] * 2, 24, torch.float32)
        with pytest.raises(ValueError, match=f"^{name}"):
            all_reduce(x, of, 0, **(fits | change))
        with pytest.raises(ValueError, match=r"^normed"):
            all_reduce(x, of, 0, **(fits | {"normed": residual}))
        with pytest.raises(ValueError, match=r"^normed"):
            all_reduce(x.view(-1), of, 0, **(fits | {"residual": residual.view(-1)}))
        # Three words of a row, of which the last one is half empty.
        few, rows = inboxes(["cpu"] * 2, 128, torch.float16), torch.zeros(24, 5).half()
        with pytest.raises(ValueError, match=r"^inboxes have room for 64 words"):
            all_reduce(rows, few, 0, patience=ints(0), residual=rows.clone(), gain=torch.ones(5))

    def test_memory_written_twice_is_named(self) -> None:
        of, x = inboxes(["cpu"] * 2, 24, torch.float32), torch.zeros(4, 6)
        with pytest.raises(ValueError, match=r"^residual"):
            all_reduce(x, of, 0, patience=ints(0), residual=x)
        with pytest.raises(ValueError, match=r"^residual"):
            all_reduce(x, of, 0, patience=ints(0), residual=torch.zeros(24))
        with pytest.raises(ValueError, match=r"^x"):
            all_gather(x[0], of, 0, patience=ints(0))

    def test_inboxes_that_cannot_be_are_refused(self) -> None:
        for devices, elements, dtype, name in (
            ([], 1, torch.float32, "devices"),
            (["cpu"] * 9, 1, torch.float32, "devices"),
            (["cpu"], 0, torch.float32, "elements"),
            (["cpu"] * 8, 1 << 40, torch.float32, "elements"),
            (["cpu"], 1, torch.float64, "collectives"),
        ):
            with pytest.raises(ValueError, match=f"^{name}"):
                inboxes(devices, elements, dtype)

    def test_two_cards_that_see_nothing_of_each_other_are_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one > other)
        with pytest.raises(RuntimeError, match="cuda:0 cannot see the memory of cuda:1"):
            peers_see_each_other(["cuda:0", "cuda:1"])
        peers_see_each_other(["cpu", "cpu"])

    def test_few_words_take_few_threads(self) -> None:
        for words in (64, 128, 200, 1000, 2048, 1 << 20):
            layout = layout_for(words)
            assert 32 * layout.warps <= layout.block <= 1024
            of_rows = rows_layout_for(words)
            assert 32 * of_rows.warps <= of_rows.block
            assert words <= of_rows.block <= max(128, 2 * words)


# -- compiled ------------------------------------------------------------------------------------------------

# Rounds, of which so many are kept before they are compared, and inboxes.
ROUNDS, KEPT, SITES = 1000, 100, 2
# Looks of some seconds, so that a fault ends the test.
PATIENCE = 20_000_000


class Rank:
    """A rank with a graph of a round: x is all that changes; the sum is gathered with other inboxes.

    While one rank waits, nothing may make the host wait for the card: neither new memory nor a kernel that is
    not loaded yet. So all is made and run once before, without patience."""

    def __init__(
        self, rank: int, device: torch.device, of: Sequence[Inboxes], size: int, dtype: torch.dtype, kept: int
    ) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.x = torch.zeros(1, size, dtype=dtype, device=device)
            self.total = torch.full_like(self.x, float("nan"))
            self.gathered = torch.full((1, of[0].ranks * size), float("nan"), dtype=dtype, device=device)
            self.totals, self.all_gathered = (
                torch.full((kept, *x.shape), float("nan"), dtype=dtype, device=device)
                for x in (self.total, self.gathered)
            )
            self.patience = ints(0, device=device)
            self.error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()

            def a_round() -> None:
                named: dict[str, Any] = {"patience": self.patience, "error": self.error, "chained": True}
                all_reduce(self.x, of[0], rank, out=self.total, **named)
                all_gather(self.total, of[1], rank, out=self.gathered, **named)

            with torch.cuda.stream(self.stream):
                a_round()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                a_round()
            self.play(torch.zeros_like(self.x), 1, 0)
            torch.cuda.synchronize()

    def play(self, x: Tensor, cycles: int, place: int) -> None:
        """Queues a round behind a delay; keeps what it makes at a place."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            self.x.copy_(x, non_blocking=True)
            self.graph.replay()
            self.totals[place].copy_(self.total, non_blocking=True)
            self.all_gathered[place].copy_(self.gathered, non_blocking=True)


def played(devices: Sequence[torch.device], dtype: torch.dtype, size: int, rounds: int) -> None:
    """Random rounds against the reference, some ranks later than others."""
    ranks, kept = len(devices), min(rounds, KEPT)
    of = [inboxes(devices, size, dtype) for _ in range(SITES)]
    group = [Rank(rank, device, of, size, dtype, kept) for rank, device in enumerate(devices)]
    for each in of:
        each.clear()
    given = [
        [x.to(device) for x, device in zip(drawn(n, ranks, dtype, 1, size), devices, strict=True)]
        for n in range(7)
    ]
    sums = [reference_all_reduce(xs).cpu() for xs in given]
    truths = [torch.stack([x.double().cpu() for x in xs]) for xs in given]
    for one in group:
        one.patience.fill_(PATIENCE)
        torch.cuda.synchronize(one.device)
    rng = np.random.default_rng(ranks)
    for begun in range(0, rounds, kept):
        turns = range(begun, min(rounds, begun + kept))
        for turn in turns:
            cycles = rng.integers(1, 20_000, ranks)
            for rank in rng.permutation(ranks).tolist():
                late = int(cycles[rank]) if rng.random() < 0.3 else 1
                group[rank].play(given[turn % 7][rank], late, turn - begun)
        for one in group:
            one.stream.synchronize()
            assert int(one.error) == 0
            totals, gathered = one.totals.cpu(), one.all_gathered.cpu()
            for turn in turns:
                expected = sums[turn % 7]
                assert near(totals[turn - begun], truths[turn % 7])
                assert same_bits(totals[turn - begun], expected)
                assert same_bits(gathered[turn - begun], reference_all_gather([expected] * ranks))
    assert all(are_empty(each) for each in of)


class NormedRank:
    """A rank with a graph of a round: a sum with residual and norm in one launch, and in three beside it."""

    def __init__(self, rank: int, of: Sequence[Inboxes], x: Tensor, before: Tensor, gain: Tensor) -> None:
        self.device = x.device
        with torch.cuda.device(self.device):
            self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            self.patience = ints(0, device=self.device)
            self.error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            # What the graph reads stays.
            self.read = x, gain
            self.residuals = before.clone(), before.clone()
            self.normed = nan_like(x), nan_like(x)

            def a_round() -> None:
                named: dict[str, Any] = {"patience": self.patience, "error": self.error, "chained": True}
                one, three = self.residuals
                all_reduce(x, of[0], rank, residual=one, gain=gain, normed=self.normed[0], **named)
                all_reduce(x, of[1], rank, residual=three, **named)
                norm(three, gain, out=self.normed[1], chained=True)

            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                a_round()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                a_round()
            for residual in self.residuals:
                residual.copy_(before)
            torch.cuda.synchronize()

    def play(self, rounds: int) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            for _ in range(rounds):
                self.graph.replay()


def normed_played(devices: Sequence[torch.device], dtype: torch.dtype, rows: int, hidden: int) -> None:
    """Some rounds, in which residuals go on."""
    ranks = len(devices)
    of = [inboxes(devices, rows * (hidden + 1), dtype) for _ in range(SITES)]
    xs, (before, gain) = drawn(hidden, ranks, dtype, rows, hidden), drawn(1, 2, dtype, rows, hidden)
    group = [
        NormedRank(rank, of, xs[rank].to(device), before.to(device), gain[0].to(device))
        for rank, device in enumerate(devices)
    ]
    for each in of:
        each.clear()
    for one in group:
        one.patience.fill_(PATIENCE)
        torch.cuda.synchronize(one.device)
    for one in group:
        one.play(20)
    for one in group:
        one.stream.synchronize()
        assert int(one.error) == 0
        assert same_bits(*one.residuals)
        apart = (one.normed[0].float() - one.normed[1].float()).abs()
        assert bool((apart <= NORM_ROUNDING[dtype] * one.normed[1].float().abs()).all())
        assert same_bits(one.normed[0].cpu(), group[0].normed[0].cpu())
    expected = before.clone()
    for _ in range(20):
        truth = reference_normed_sum(xs, expected, gain[0])
    assert same_bits(group[0].residuals[0].cpu(), expected)
    assert torch.allclose(group[0].normed[0].cpu().float(), truth.float(), rtol=2 * NORM_ROUNDING[dtype])
    assert all(are_empty(each) for each in of)


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("size", [(1, 4096), (8, 4096), (33, 1000), (3, 257), (2, 8192)])
    def test_norms_of_streams_of_one_card(self, size: tuple[int, int], dtype: torch.dtype) -> None:
        normed_played([torch.device("cuda", 0)] * 2, dtype, *size)

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_norms_of_one_rank_a_card(self, ranks: int) -> None:
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} CUDA devices")
        normed_played([torch.device("cuda", rank) for rank in range(ranks)], torch.bfloat16, 8, 4096)

    @pytest.mark.parametrize("ranks", [2, 3, 4, 8])
    def test_streams_of_one_card(self, ranks: int) -> None:
        played([torch.device("cuda", 0)] * ranks, torch.bfloat16, 4096, ROUNDS)

    @pytest.mark.parametrize("dtype", FORMATS)
    @pytest.mark.parametrize("size", [1, 333, 4096, 40_000, 262_144])
    def test_all_sizes(self, size: int, dtype: torch.dtype) -> None:
        played([torch.device("cuda", 0)] * 2, dtype, size, 20)

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_one_rank_a_card(self, ranks: int) -> None:
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} CUDA devices")
        played([torch.device("cuda", rank) for rank in range(ranks)], torch.bfloat16, 4096, ROUNDS)

    def test_who_does_not_come_is_given_up(self) -> None:
        device = torch.device("cuda", 0)
        of = inboxes([device] * 2, 4096, torch.bfloat16)
        x, error = torch.ones(4096, dtype=torch.bfloat16, device=device), ints(0, device=device)
        all_reduce(x, of, 0, patience=ints(0, device=device), error=error)
        assert int(error) == 0
        all_reduce(x, of, 0, patience=ints(1000, device=device), error=error, code=5)
        assert int(error) == 5
        of.clear()
        assert are_empty(of)
