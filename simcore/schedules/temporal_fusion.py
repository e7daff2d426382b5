"""Temporal fusion: requests join a running batch between two iterations (Flover, Yao et al. 2023, section V).

    fetching     a new request waits for a free slot; then its prompt is computed beside the generation, and
                 the request goes into the inference queue                              (Algorithm 1)
    generation   each iteration takes the requests from that queue, computes a token for every slot from the
                 first in use to the last, and evicts complete requests                 (Algorithm 2)
    shuffle      copies as few slots as possible so that no slot between slots in use is free (Algorithm 3)

Pre-processing caches the prompt; all tokens come from the generation, so an answer of n tokens takes n
iterations. Without shuffle, a finished slot between others is computed as if it still ran, until the slot is
full. While no request joins or leaves, iterations are launched as one burst; an iteration with newcomers is
launched alone, so that the time of their first token is known.

Prompts are computed on `prompt_streams` streams, each one after another. The paper has a stream for each
request. But one prompt fills a device: on several streams all of them end late, on one the first ends early.

The paper leaves open: a slot whose prompt is being computed can be neither copied nor overwritten, so the
shuffle goes around it; a request that then joins beyond a slot freed meanwhile is also shuffled.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from simcore.machine.machine import Machine, Program
from simcore.models.served_decoder import ServedDecoder, decode_sizes, step_sizes
from simcore.schedules.host_calls import Caller, wait_for
from simcore.schedules.shuffle import shuffle as fewest_moves
from simcore.schedules.shuffle import window
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request

# The inbox of requests whose prompts are cached.
INFERENCE = "inference"


def context_stream(number: int) -> str:
    """The stream of prompts of this number."""
    return f"context {number}"


@dataclass(slots=True)
class _Server:
    """The state of one server. `live`: the requests in generation, by slot; `busy`: slots that are written or
    read beside the generation; `lengths`: the cached tokens of each slot, also of finished ones; `prompts`:
    how many prompts each stream for them has; `owners`: the request that was in each slot last;
    `host`: what calls the ops of prompts."""

    slot_tokens: int
    shuffle: bool
    lengths: list[int]
    prompts: list[int]
    live: dict[int, Request] = field(default_factory=dict)
    owners: dict[int, Request] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    waiting: deque[Request] = field(default_factory=deque)
    host: Caller = field(default_factory=Caller)
    closed: bool = False

    @property
    def held(self) -> int:
        """How many slots are not free."""
        return len(self.live) + len(self.busy)


def temporal_fusion(
    m: Machine,
    model: ServedDecoder,
    journal: Journal,
    *,
    slots: int,
    slot_tokens: int,
    shuffle: bool = True,
    prompt_streams: int = 1,
) -> Program:
    """Serves the requests of the inbox until END. `slot_tokens`: the tokens that one of the `slots` holds."""
    server = _Server(slot_tokens, shuffle, [0] * slots, [0] * prompt_streams)
    fetching = m.spawn(_fetch(m, model, journal, server))
    while True:
        _join(server, m.poll(INFERENCE))
        if moves := _moves(server):
            yield from _move(m, model, journal, server, moves)
            continue
        _admit(m, model, journal, server)
        if server.live:
            yield from _generate(m, model, journal, server)
        elif server.closed and not server.held:
            break
        else:
            _join(server, [(yield m.recv(INFERENCE))])
    yield m.wait(fetching)


# -- fetching --------------------------------------------------------------------------------------


def _fetch(m: Machine, model: ServedDecoder, journal: Journal, server: _Server) -> Program:
    while (item := (yield m.recv(REQUESTS))) != END:
        assert isinstance(item, Request)
        if item.prompt_tokens + item.max_tokens > server.slot_tokens:
            item.instance = m.rank
            journal.reject(item, m.now())
            continue
        server.waiting.append(item)
        _admit(m, model, journal, server)
    server.closed = True
    if not server.held:
        # No other message would wake the generation.
        m.send(INFERENCE, END, m.rank)


def _admit(m: Machine, model: ServedDecoder, journal: Journal, server: _Server) -> None:
    """Gives free slots to waiting requests, in order, and starts to compute their prompts."""
    slots = len(server.lengths)
    while server.waiting and server.held < slots:
        slot = place([s in server.live or s in server.busy for s in range(slots)])
        request = server.waiting.popleft()
        request.held, server.lengths[slot] = slot, 0
        server.busy.add(slot)
        m.spawn(_pre_process(m, model, journal, server, request))


def place(used: Sequence[bool]) -> int:
    """The slot for a new request: after the slots in use, else before them, else the first free one between.

    >>> place([False, True, False]), place([False, False, True]), place([True, False, True])
    (2, 1, 1)
    """
    offset, size = window(used)
    around = [slot for slot in (offset + size, offset - 1) if 0 <= slot < len(used)]
    return around[0] if around else list(used).index(False)


def _pre_process(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, request: Request
) -> Program:
    """Caches the prompt of one request, which then waits for the next iteration."""
    request.instance, request.scheduled_s = m.rank, m.now()
    sizes = step_sizes(0, 0, [(request.prompt_tokens, 0)], 1)
    batch = partial(Batch, [(request, request.prompt_tokens, 0)])
    stream = min(range(len(server.prompts)), key=server.prompts.__getitem__)
    server.prompts[stream] += 1
    step = m.launch(model.prefill, stream=context_stream(stream), sizes=sizes, batch=batch)
    start_s, waiting, held = m.now(), len(server.waiting), server.held
    yield from wait_for(m, model, step, model.prefill, server.host, start_s)
    server.prompts[stream] -= 1
    journal.step(m.rank, start_s, m.now(), 1, 0, 0, request.prompt_tokens, 0, waiting, held)
    m.send(INFERENCE, request, m.rank)


# -- generation ------------------------------------------------------------------------------------


def _join(server: _Server, items: Iterable[object]) -> None:
    for item in items:
        if isinstance(item, Request):
            server.busy.remove(item.held)
            server.live[item.held] = server.owners[item.held] = item
            server.lengths[item.held] = item.prompt_tokens


def _window(live: Iterable[int]) -> tuple[int, int]:
    """(offset, size) of the region from the first to the last slot in use, which iterations compute."""
    first, last = min(live), max(live)
    return first, last + 1 - first


def _generate(m: Machine, model: ServedDecoder, journal: Journal, server: _Server) -> Program:
    """Runs one iteration with newcomers, or a burst until a request ends or the next newcomer comes."""
    offset, rows = _window(server.live)
    lengths = [length for length in server.lengths[offset : offset + rows] if length]
    growing = sum(length < server.slot_tokens for length in lengths)
    newcomers = sum(not request.generated for request in server.live.values())
    step = m.launch(
        model.decode,
        sizes=decode_sizes(rows, sum(lengths) + growing, min(max(lengths) + 1, server.slot_tokens)),
        advance={"kv_tokens": growing},
        repeat=1 if newcomers else _longest(server, lengths),
        until=INFERENCE,
        batch=partial(_batch, server, range(offset, offset + rows)),
    )
    start_s, waiting, held = m.now(), len(server.waiting), server.held
    yield m.wait(step)
    end_s, decoding = m.now(), len(server.live) - newcomers
    # A first token ends no gap between two tokens, so newcomers do not count as decoding.
    journal.step(m.rank, start_s, end_s, step.ran, decoding, rows, 0, newcomers, waiting, held)
    for slot in range(offset, offset + rows):
        if server.lengths[slot]:
            server.lengths[slot] = min(server.lengths[slot] + step.ran, server.slot_tokens)
    _evict(server, journal, step.ran, end_s)


def _batch(server: _Server, slots: Iterable[int]) -> Batch:
    """Whose tokens an iteration computes. Each row is the last known token, of a newcomer the last one of its
    prompt, which is cached again."""
    rows = [(server.owners[slot], server.lengths[slot] - 1) for slot in slots if server.lengths[slot]]
    return Batch(decoding=rows, slot_tokens=server.slot_tokens)


def _longest(server: _Server, lengths: Iterable[int]) -> int:
    """Iterations until a request is complete or a finished request, still computed, fills its slot."""
    left = min(_tokens(request) - request.generated for request in server.live.values())
    room = [server.slot_tokens - length for length in lengths if length < server.slot_tokens]
    return min([left, *room])


def _tokens(request: Request) -> int:
    """Tokens of an answer: until its end, at most `max_tokens`."""
    return min(request.output_tokens, request.max_tokens)


def _evict(server: _Server, journal: Journal, iterations: int, end_s: float) -> None:
    """Counts `iterations` iterations; complete requests leave."""
    for slot, request in list(server.live.items()):
        if not request.generated:
            request.first_token_s = end_s
        request.generated += iterations
        if request.generated == _tokens(request):
            journal.finish(request, end_s)
            del server.live[slot]
            if server.shuffle:
                server.lengths[slot] = 0


# -- shuffle ---------------------------------------------------------------------------------------


def _moves(server: _Server) -> list[tuple[int, int]]:
    """(from, to) of the slots to copy so that the slots in use lie side by side, except for busy slots
    between them."""
    if not server.shuffle or not server.live or _window(server.live)[1] == len(server.live):
        return []
    slots = [slot for slot in range(len(server.lengths)) if slot not in server.busy]
    _, moves = fewest_moves([slot in server.live for slot in slots])
    return [(slots[source], slots[target]) for source, target in moves]


def _move(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, moves: list[tuple[int, int]]
) -> Program:
    """Copies whole slots while the generation waits; a slot that is being read is given to no request."""
    for source, target in moves:
        request = server.live[target] = server.owners[target] = server.live.pop(source)
        request.held = target
        server.lengths[target], server.lengths[source] = server.lengths[source], 0
        server.busy.add(source)
    moved = [server.live[target] for _, target in moves]
    batch = partial(Batch, moved=moved, slot_tokens=server.slot_tokens)
    step = m.launch(model.move, sizes={"tokens": len(moves) * server.slot_tokens}, batch=batch)
    start_s, waiting, held = m.now(), len(server.waiting), server.held
    yield m.wait(step)
    journal.step(m.rank, start_s, m.now(), 1, 0, 0, 0, 0, waiting, held)
    server.busy.difference_update(source for source, _ in moves)
