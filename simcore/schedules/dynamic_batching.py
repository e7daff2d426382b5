"""Dynamic batching: requests that arrive within a time window go through the model together.

    due   = arrival of the oldest waiting request + window_s, or as soon as a batch is full
    batch = all waiting requests that fit, first come first served, when the server is free
    end   = the end of the longest answer: all rows of the batch are computed until then

Tokens are given out as they come, so a short answer is complete before its batch ends; its place stays taken
until the batch ends.

The window is that of Triton's dynamic batcher (its maximum queue delay): it begins with the oldest waiting
request. Flover (Yao et al. 2023), Figure 1 (a), draws windows that follow each other at a fixed pace, even if
no request waits: there a request waits for the rest of its window, here the first request waits for the whole
window. In both, requests that arrive while a batch runs wait for its end.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from simcore.machine.machine import MAIN, Machine, Program, Ticket
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.schedules.host_calls import Caller, wait_for
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request

# Returns the number of waiting requests and the units of KV held, now.
Levels = Callable[[], tuple[int, int]]


@dataclass(slots=True)
class _Queue:
    """The queue. `waiting`: requests in order; `capacity`: tokens that the KV cache has room for."""

    m: Machine
    journal: Journal
    capacity: int
    waiting: deque[Request] = field(default_factory=deque)
    closed: bool = False

    def take(self, items: Iterable[object]) -> None:
        """Adds items to the queue; rejects requests that no batch could ever hold."""
        for item in items:
            if item == END:
                self.closed = True
                continue
            assert isinstance(item, Request)
            if item.prompt_tokens + item.max_tokens > self.capacity:
                item.instance = self.m.rank
                self.journal.reject(item, self.m.now())
            else:
                self.waiting.append(item)


def dynamic_batching(
    m: Machine, model: ServedDecoder, journal: Journal, *, window_s: float, max_batch: int, capacity: int
) -> Program:
    """Serves the requests of the inbox until END. `capacity`: tokens in the KV cache, of which a batch takes
    its prompts and, for each request, the batch's longest `max_tokens`."""
    queue, host = _Queue(m, journal, capacity), Caller()
    while True:
        queue.take(m.poll(REQUESTS))
        if not queue.waiting:
            if queue.closed:
                return
            queue.take([(yield m.recv(REQUESTS))])
            continue
        yield from _gather(m, queue, window_s, max_batch)
        queue.take(m.poll(REQUESTS))
        batch = [queue.waiting.popleft() for _ in range(fitting(queue.waiting, max_batch, capacity))]

        def levels(held: int = len(batch)) -> tuple[int, int]:
            queue.take(m.poll(REQUESTS))
            return len(queue.waiting), held

        yield from run_to_end(m, model, journal, batch, levels, host)


def _gather(m: Machine, queue: _Queue, window_s: float, max_batch: int) -> Program:
    """Waits until the window of the oldest request is over or the batch is full."""
    while len(queue.waiting) == fitting(queue.waiting, max_batch, queue.capacity) < max_batch:
        left_s = queue.waiting[0].arrival_s + window_s - m.now()
        item = (yield m.recv(REQUESTS, timeout_s=left_s)) if left_s > 0.0 else None
        if item is None:
            return
        queue.take([item])


def fitting(waiting: Iterable[Request], max_batch: int, capacity: int) -> int:
    """How many waiting requests, from the first on, fit into the next batch."""
    number = prompts = longest = 0
    for request in waiting:
        prompts += request.prompt_tokens
        longest = max(longest, request.max_tokens)
        if number == max_batch or prompts + (number + 1) * longest > capacity:
            break
        number += 1
    return number


def bursts(lengths: Sequence[int], first_alone: bool = False) -> list[tuple[int, int]]:
    """The iterations of a batch whose requests need `lengths` tokens, cut where a request is complete, and
    with `first_alone` after the first iteration: (iterations, requests that still need tokens).

    >>> bursts([3, 1, 3]), bursts([4, 4], first_alone=True)
    ([(1, 3), (2, 2)], [(1, 2), (3, 2)])
    """
    cuts = sorted({*lengths, *((1,) if first_alone else ())} - {0})
    return [
        (end - begin, sum(length >= end for length in lengths))
        for begin, end in zip([0, *cuts], cuts, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class _Step:
    """A launch and the numbers for its row in the journal."""

    ticket: Ticket
    issued_s: float
    replays: int
    decoding: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    first_tokens: int = 0


def run_to_end(
    m: Machine,
    model: ServedDecoder,
    journal: Journal,
    batch: Sequence[Request],
    levels: Levels,
    host: Caller,
    stream: str = MAIN,
    prompt_stream: str = MAIN,
) -> Program:
    """Runs a batch from its prompts to the end of its longest answer, as launches queued one after another;
    if its prompts have a stream of their own, or a host calls their ops, the answers are launched once they
    are there.

    The prompts give the first tokens, or with `model.whole` the first iteration does.
    """
    for request in batch:
        request.instance, request.scheduled_s = m.rank, m.now()
    prompts = _launch_prompts(m, model, batch, prompt_stream)
    end_s, tokens, answers = 0.0, 0, partial(_launch_answers, m, model, batch, stream)
    steps, apart = deque([prompts]), prompt_stream != stream or model.call_s > 0.0
    if not apart:
        steps += answers()
    while steps:
        step = steps.popleft()
        start_s = max(step.issued_s, end_s)
        waiting, held = levels()
        if step is prompts:
            yield from wait_for(m, model, step.ticket, model.prefill, host, step.issued_s)
        else:
            yield m.wait(step.ticket)
        end_s = m.now()
        journal.step(
            m.rank, start_s, end_s, step.replays, step.decoding, step.computed, step.prompt_tokens,
            step.first_tokens, waiting, held,
        )  # fmt: skip
        if step.first_tokens:
            for request in batch:
                request.first_token_s = end_s
        if step is prompts and apart:
            steps += answers()
        before, tokens = tokens, tokens + (step.replays if step.computed else int(step.first_tokens > 0))
        for request in batch:
            if before < request.output_tokens <= tokens:
                journal.finish(request, end_s)


def _decoding(batch: Sequence[Request], iterations: int) -> Batch:
    """Whose tokens iterations compute after the first `iterations`: all requests', also of complete ones."""
    return Batch(decoding=[(request, request.prompt_tokens + iterations) for request in batch])


def _launch_prompts(m: Machine, model: ServedDecoder, batch: Sequence[Request], stream: str) -> _Step:
    sizes = step_sizes(0, 0, [(request.prompt_tokens, 0) for request in batch], len(batch))
    rows = partial(Batch, [(request, request.prompt_tokens, 0) for request in batch])
    ticket = m.launch(model.prefill, stream=stream, sizes=sizes, batch=rows)
    first_tokens = 0 if model.whole else len(batch)
    return _Step(ticket, m.now(), 1, prompt_tokens=sizes["prompt_tokens"], first_tokens=first_tokens)


def _launch_answers(m: Machine, model: ServedDecoder, batch: Sequence[Request], stream: str) -> list[_Step]:
    size, whole, steps = len(batch), model.whole, []
    lengths = [request.output_tokens - (0 if whole else 1) for request in batch]
    prompts = cached = sum(request.prompt_tokens for request in batch)
    longest = max(request.prompt_tokens for request in batch)
    for number, (replays, decoding) in enumerate(bursts(lengths, first_alone=whole)):
        ticket = m.launch(
            model.decode,
            stream=stream,
            sizes=decode_sizes(size, cached + size, longest + (cached - prompts) // size + 1),
            advance=growth(size),
            repeat=replays,
            batch=partial(_decoding, batch, (cached - prompts) // size),
        )
        # A first token ends no gap between two tokens, so its request does not count as decoding.
        first = decoding if whole and number == 0 else 0
        steps.append(_Step(ticket, m.now(), replays, decoding - first, size, first_tokens=first))
        cached += replays * size
    return steps
