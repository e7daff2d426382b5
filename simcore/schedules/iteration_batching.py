"""Iteration batching: the batch is chosen anew at every iteration (ORCA, Yu et al., OSDI 2022).

    each iteration   a token for every running request, and the whole prompts of the new requests, which give
                     their first token: attention by request, everything else over all rows at once

New requests join first come first served while fewer than `max_batch` run; each holds room for its prompt and
`max_tokens` from its first iteration to its last. All answers must have one length, the case that according
to Flover (Yao et al. 2023, Table I) this design is made for; so requests end in the order in which they
joined. Between changes, iterations are launched as one burst.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from simcore.machine.machine import Machine, Program
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.schedules.host_calls import Caller, wait_for
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request


@dataclass(slots=True)
class _Server:
    """The state of one server. `running`: requests in the order in which they end; the `held` of a request is
    the iteration after which it ends. `kv_tokens`: cached tokens of all running requests; `tokens`: the
    length of every answer; `host`: what calls the ops of steps with prompts."""

    max_running: int
    slot_tokens: int
    waiting: deque[Request] = field(default_factory=deque)
    running: deque[Request] = field(default_factory=deque)
    iteration: int = 0
    kv_tokens: int = 0
    tokens: int | None = None
    host: Caller = field(default_factory=Caller)
    closed: bool = False


def iteration_batching(
    m: Machine, model: ServedDecoder, journal: Journal, *, max_batch: int, slot_tokens: int
) -> Program:
    """Serves the requests of the inbox until END. `slot_tokens`: tokens of KV cache for each running request.
    Raises ValueError if answers are not all of one length."""
    server = _Server(max_batch, slot_tokens)
    while True:
        _take(m, journal, server, m.poll(REQUESTS))
        joining = min(len(server.waiting), server.max_running - len(server.running))
        if joining:
            yield from _join(m, model, journal, server, [server.waiting.popleft() for _ in range(joining)])
        elif server.running:
            yield from _burst(m, model, journal, server)
        elif server.closed:
            return
        else:
            _take(m, journal, server, [(yield m.recv(REQUESTS))])


def _take(m: Machine, journal: Journal, server: _Server, items: Iterable[object]) -> None:
    for item in items:
        if item == END:
            server.closed = True
            continue
        assert isinstance(item, Request)
        if server.tokens is None:
            server.tokens = item.output_tokens
        if item.output_tokens != server.tokens:
            raise ValueError(
                f"iteration batching is for answers of one length: request {item.id} has {item.output_tokens}"
                f" tokens, those before it {server.tokens}"
            )
        if item.prompt_tokens + item.max_tokens > server.slot_tokens:
            item.instance = m.rank
            journal.reject(item, m.now())
        else:
            server.waiting.append(item)


def _join(m: Machine, model: ServedDecoder, journal: Journal, server: _Server, new: list[Request]) -> Program:
    """Runs one iteration with the prompts of new requests. With `model.whole`, prompts give no token, so
    their requests also take part in the iteration."""
    for request in new:
        request.instance, request.scheduled_s = m.rank, m.now()
    decoding = len(server.running)
    prompts = [(request.prompt_tokens, 0) for request in new]
    sequences, kv_tokens, ends = decoding, server.kv_tokens, len(new)
    if model.whole:
        sequences, ends = decoding + len(new), 0
        kv_tokens += sum(request.prompt_tokens for request in new)
    longest = _longest(model, server)
    if model.whole:
        longest = max(longest, 1 + max(request.prompt_tokens for request in new))
    sizes = step_sizes(sequences, kv_tokens + sequences, prompts, ends, longest)
    graph = model.mixed if sequences else model.prefill
    advance = growth(sequences) if sequences else None
    step = m.launch(graph, sizes=sizes, advance=advance, batch=partial(_batch, server, new))
    start_s, used = m.now(), decoding + len(new)
    waiting = len(server.waiting)
    yield from wait_for(m, model, step, graph, server.host, start_s)
    end_s, prompt_tokens = m.now(), sizes["prompt_tokens"]
    journal.step(m.rank, start_s, end_s, 1, decoding, sequences, prompt_tokens, len(new), waiting, used)
    server.kv_tokens += prompt_tokens + (len(new) if model.whole else 0)
    for request in new:
        request.first_token_s = end_s
        # `_advance` below counts the iteration that has just run.
        request.held = server.iteration + request.output_tokens
        server.running.append(request)
    _advance(model, server, journal, 1, decoding, end_s)


def _burst(m: Machine, model: ServedDecoder, journal: Journal, server: _Server) -> Program:
    """Runs a burst until a request ends or, while places are free, until a request arrives."""
    sequences = len(server.running)
    step = m.launch(
        model.decode,
        sizes=decode_sizes(sequences, server.kv_tokens + sequences, _longest(model, server)),
        advance=growth(sequences),
        repeat=server.running[0].held - server.iteration,
        until=REQUESTS if sequences < server.max_running else None,
        batch=partial(_batch, server, ()),
    )
    start_s, waiting = m.now(), len(server.waiting)
    yield m.wait(step)
    end_s = m.now()
    journal.step(m.rank, start_s, end_s, step.ran, sequences, sequences, 0, 0, waiting, sequences)
    _advance(model, server, journal, step.ran, sequences, end_s)


def _longest(model: ServedDecoder, server: _Server) -> int:
    """Tokens of the longest running request, with the one of the next iteration; 0 if none runs. Answers are
    of one length: the later a request ends, the fewer of its tokens are cached."""
    if not server.running:
        return 0
    assert server.tokens is not None
    most = max(request.prompt_tokens - request.held for request in server.running)
    return most + server.iteration + server.tokens + model.whole


def _batch(server: _Server, new: Iterable[Request]) -> Batch:
    """Whose tokens an iteration computes: whole prompts, and a token of each running request, whose last one
    is not cached yet."""
    left = [request.held - server.iteration for request in server.running]
    decoding = [
        (r, r.prompt_tokens + r.output_tokens - n - 1) for r, n in zip(server.running, left, strict=True)
    ]
    return Batch([(request, request.prompt_tokens, 0) for request in new], decoding)


def _advance(
    model: ServedDecoder, server: _Server, journal: Journal, iterations: int, grew: int, end_s: float
) -> None:
    """Counts `iterations` iterations in which `grew` requests cached a token each; complete ones leave."""
    server.iteration += iterations
    server.kv_tokens += iterations * grew
    while server.running and server.running[0].held <= server.iteration:
        request = server.running.popleft()
        journal.finish(request, end_s)
        # The last token is cached only if every token comes from an iteration (`model.whole`).
        server.kv_tokens -= request.prompt_tokens + request.output_tokens - (0 if model.whole else 1)
