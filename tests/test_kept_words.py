"""Words that launches of a stream share: made once, as they were after each launch, apart for each stream and
each captured graph. On a GPU: a plain call is one launch, and launches of other shapes, streams and cards do
not see each other."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import simcore.kernels.torch_ops  # noqa: F401
from simcore.kernels import streams
from simcore.kernels.decoder.decode_attention import decode_attention
from simcore.kernels.decoder.matmul import matmul, reference_matmul
from simcore.kernels.decoder.speculative_attention import speculative_attention
from simcore.kernels.gpu import launching
from simcore.kernels.streams import OUTGROWN, one_stream, words
from tests.attention_cases import Case, Shape, make_case, some_lengths, truth
from tests.test_triton_attention import DEVICE, check, check_speculation, needs_gpu, poisoned

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU's streams in name only: `stream` is current, and in the capture of graph `graph` if that is not
    0."""
    now = SimpleNamespace(stream=7, graph=0, used=[])

    def made(device: torch.device, count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=device)

    monkeypatch.setattr(streams, "_words", {})
    monkeypatch.setattr(streams, "_captured", lambda stream: now.graph)
    monkeypatch.setattr(streams, "_made", made)
    at = SimpleNamespace
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: at(device_index=0, cuda_stream=now.stream)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.graph != 0)

    def used(words: torch.Tensor, stream: Any) -> None:
        now.used.append((words, stream.cuda_stream))

    monkeypatch.setattr(torch.Tensor, "record_stream", used)
    return now


def test_a_stream_finds_its_words_again(gpu: Any) -> None:
    first = words(CPU, "sums", 10, -1)
    assert first.tolist() == [-1] * 16
    assert words(CPU, "sums", 16, -1) is first
    assert words(CPU, "counters", 1, 0).tolist() == [0]
    gpu.stream = 8
    assert words(CPU, "sums", 10, -1) is not first
    gpu.stream = 7
    more = words(CPU, "sums", 17, -1)
    assert more is not first
    assert more.tolist() == [-1] * 32
    assert words(CPU, "sums", 1, -1) is more


def test_a_graph_has_words_of_its_own_and_keeps_those_that_got_too_few(gpu: Any) -> None:
    eager = words(CPU, "sums", 10, -1)
    gpu.graph = 1
    captured = words(CPU, "sums", 10, -1)
    assert captured is not eager
    more = words(CPU, "sums", 100, -1)
    assert [one is captured for one in streams._words[OUTGROWN]] == [True]
    assert words(CPU, "sums", 100, -1) is more
    gpu.graph = 2
    other = words(CPU, "sums", 10, -1)
    assert all(other is not one for one in (eager, captured, more))
    gpu.graph = 0
    assert words(CPU, "sums", 10, -1) is eager


def test_graphs_of_one_stream_share_words(gpu: Any) -> None:
    """Their calls run once before a capture, so that nothing is made inside it."""
    buffers: Any = {}
    eager = words(CPU, "sums", 10, -1)
    with one_stream(buffers):
        held = words(CPU, "sums", 10, -1)
        gpu.graph, gpu.stream = 1, 9
        assert words(CPU, "sums", 10, -1) is held
        # Graphs that were captured before still use those that have become too few.
        more = words(CPU, "sums", 100, -1)
        assert more is not held
    assert held is not eager
    # When the buffers go, the memory waits for both streams; what a stream keeps never goes.
    assert [(x is held, x is more, stream) for x, stream in gpu.used] == [
        (True, False, 7), (True, False, 9), (False, True, 9)
    ]  # fmt: skip
    assert [one is held for one in buffers[OUTGROWN]] == [True]
    assert any(one is more for one in buffers.values())


def test_what_has_no_tensor_on_a_gpu_is_called_as_it_is() -> None:
    """And its result, name and text are its own."""

    @launching
    def summed(x: torch.Tensor, *, more: torch.Tensor | None = None) -> torch.Tensor:
        """Adds."""
        return x if more is None else x + more

    assert summed(torch.ones(2), more=torch.ones(2)).tolist() == [2.0, 2.0]
    assert (summed.__name__, summed.__doc__) == ("summed", "Adds.")


def test_kernels_refuse_tensors_that_ask_for_gradients() -> None:
    x, weight = torch.randn(2, 64, device=DEVICE), torch.randn(64, 32, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="matmul gives no gradients"):
        matmul(x, weight)
    with torch.no_grad():
        assert matmul(x, weight).shape == (2, 32)
    assert matmul(x, weight.detach()).shape == (2, 32)

    @launching
    def of_several(parts: list[torch.Tensor]) -> int:
        return len(parts)

    with pytest.raises(RuntimeError, match="of_several gives no gradients"):
        of_several([x, weight])
    assert of_several([x, x]) == 2


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_words_that_are_still_used_are_not_made_again() -> None:
    """Their buffers go before the launches have ended: a later user filled the same memory meanwhile, and
    programs that waited for each other through it waited for ever."""
    others = []
    for _ in range(8):
        with one_stream({}):
            own = words(torch.device("cuda", 0), "sums", 1 << 12, -1)
            torch.cuda._sleep(20_000_000)
            own.fill_(5)
            del own
        with one_stream({}):
            others.append(words(torch.device("cuda", 0), "sums", 1 << 12, -1).clone())
    torch.cuda.synchronize()
    assert all(bool((other == -1).all()) for other in others)


BATCHES = ((1, 9728), (3, 700), (17, 1152), (1, 1024), (2, 5000))


def case_of(batch: int, capacity: int, seed: int) -> Case:
    lengths = some_lengths(np.random.default_rng(seed), batch, capacity)
    return make_case(
        Shape(kv_heads=8, group=4, head_dim=128), lengths, seed, capacity=capacity, device=DEVICE
    )


def kernels_of(call: Any) -> int:
    """Returns how many kernels and fills run on the GPU in a call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in found.events())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1024, 4096, 9728])
def test_a_plain_call_is_one_launch(tokens: int) -> None:
    case = case_of(1, tokens, tokens)
    decode_attention(*case.tensors)
    torch.cuda.synchronize()
    assert kernels_of(lambda: decode_attention(*case.tensors)) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*case.tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert kernels_of(graph.replay) == 1
    check(out, truth(case))


@pytest.mark.gpu
@needs_gpu
def test_plain_calls_of_any_shape_follow_one_another() -> None:
    cases = [case_of(*shape, seed) for seed, shape in enumerate(BATCHES)]
    ends = make_case(
        Shape(kv_heads=8, group=4, head_dim=128), [4000, 1, 900], 9, capacity=8192, device=DEVICE,
        sinks=4, window=640,
    )  # fmt: skip
    for _ in range(3):
        for case in cases:
            check(decode_attention(*case.tensors), truth(case))
        check_speculation(ends, 0.1, speculative_attention(*ends.tensors, sinks=4, window=640))


@pytest.mark.gpu
@needs_gpu
def test_graphs_of_one_stream_may_run_on_two() -> None:
    """Each has its own words, also where both are captured on the same stream, one of two shapes."""
    cases = [case_of(*shape, seed) for seed, shape in enumerate(BATCHES[:3])]
    graphs, outs = [], []
    for some in (cases[:2], cases[2:]):
        graph = torch.cuda.CUDAGraph()
        every = [poisoned(case) for case in some for _ in range(10)]
        for case in some:
            decode_attention(*case.tensors)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for i, out in enumerate(every):
                decode_attention(*some[i // 10].tensors, out=out)
        graphs.append(graph)
        outs.append(every)
    sides = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, side in zip(graphs, sides, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    for some, every in zip((cases[:2], cases[2:]), outs, strict=True):
        for i, out in enumerate(every):
            check(out, truth(some[i // 10]))


@pytest.mark.gpu
@needs_gpu
def test_a_hundred_captures_have_words_of_their_own() -> None:
    """More than torch has streams to hand out."""
    case = case_of(1, 5000, 1)
    decode_attention(*case.tensors)
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decode_attention(*case.tensors)
        found.append((graph, out))
    for graph, out in found:
        graph.replay()
        check(out, truth(case))


@pytest.mark.gpu
@needs_gpu
def test_the_operator_compiles_into_graphs() -> None:
    """Whose first run allocates to the graphs' pool."""
    case = case_of(2, 5000, 4)
    compiled = torch.compile(lambda *x: torch.ops.simcore.decode_attention(*x) * 2.0, mode="reduce-overhead")
    for _ in range(4):
        check(compiled(*case.tensors).clone() / 2.0, truth(case))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one() -> None:
    case = case_of(2, 5000, 3)
    there = torch.device("cuda", 1)
    with torch.cuda.device(0):
        out = decode_attention(*(x.to(there) for x in case.tensors))
        assert out.device == there
        check(out.to(DEVICE), truth(case))
        x = torch.randn(3, 512, dtype=torch.bfloat16, device=there)
        weight = torch.randn(512, 256, dtype=torch.bfloat16, device=there)
        found = matmul(x, weight)
    whole = reference_matmul(x.double().cpu(), weight.double().cpu())
    assert float((found.double().cpu() - whole).abs().max() / whole.abs().max()) < 1e-2
