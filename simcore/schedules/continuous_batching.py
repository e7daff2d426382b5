"""Continuous batching as production engines do it, one decision per step.

Orca's iteration-level scheduling (Yu et al., OSDI 2022) with the paged cache of PagedAttention (Kwon et al.,
SOSP 2023) and chunked prefill (Agrawal et al., OSDI 2024), as in vLLM's scheduler:

    each step   every decoding sequence gets a token; the rest of the token budget goes to prompts, first to
                prompts begun before, then to new ones in their order, while there are blocks and running
                places
    no block    the sequence admitted last is preempted: it frees its blocks, goes to the head of the queue
                and is recomputed; no request is admitted in that step. With `preempted_last` it goes to the
                end, as in SGLang: to where it stood if it had come then

If too few blocks are free for a chunk of a prompt, the chunk is shortened; vLLM would preempt a sequence.
With `reserve` a request waits until there is room for its whole answer, and for some of the answers of those
that run (simcore/schedules/reservation.py); vLLM reserves nothing.

Engines differ in how a step takes prompts (`Prefill`):

    chunked   in chunks within the rest of the budget, beside the decoding sequences (vLLM)
    whole     the same, but a prompt is not cut: it waits until it fits (the default of TensorRT-LLM)
    first     in steps of their own, in chunks, while the decoding sequences wait (SGLang)

They also differ in whether new prompts wait for each other: for up to `wait_steps` decode steps, unless a
step with all waiting prompts has `wait_tokens` tokens (TensorRT-LLM's batch waiting).

Engines that overlap the work of host and device decide a step while the step before it runs (vLLM's async
scheduling). A request that arrives meanwhile is seen a step later: with `ahead` = 1 it joins in the second
step after the step in which it arrived.

A sequence may hold a state besides (`state_blocks`, linear attention): it is taken when the sequence is
admitted, carried from chunk to chunk of its prompt, and dropped with its blocks.

With `prefix_caching`, known blocks at the beginning of a prompt are not computed again, and are held once,
however many requests share them (simcore/schedules/prefix_cache.py).

While only lengths change, steps are launched as one burst, until a request ends or arrives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Literal

from simcore.machine.machine import Machine, Program
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.schedules.host_calls import Caller, wait_for
from simcore.schedules.paged_kv import PagedKv
from simcore.schedules.prefix_cache import PrefixCache
from simcore.schedules.reservation import NO_ROOM_KEPT, Reservation, Reserve
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request, blocks_for

# Which of the waiting requests is next: smallest first.
Order = Callable[[Request], float]
# How a step takes prompts; see above.
Prefill = Literal["chunked", "whole", "first"]


def fcfs(request: Request) -> float:
    """First come, first served; requests that arrive together go by their number."""
    return request.arrival_s


def shortest_first(request: Request) -> float:
    """The shortest prompt first."""
    return request.prompt_tokens


@dataclass(slots=True)
class _Server:
    """The state of one server. `waiting`: a heap of (order, id, request); `preempted`: requests that go
    before them, none with `preempted_last`; `prompts`: requests in prefill; `decoding`: a heap of (iteration
    in which it ends, id, request); `admitted`: all requests that hold blocks, in order of admission.
    `arriving`: (step count, request): the request is seen when `steps` reaches the count. `waited`: steps
    for which prompts have waited for others. `host`: what calls ops; `began_s`: when the step before began,
    None where the device was idle. `cache`: the contents of the blocks, with prefix caching. `reserve`: room
    for answers to come. `longest_lead`: `_lead` of the longest decoding sequence, None until it is looked for
    again."""

    kv: PagedKv
    budget: int
    max_running: int
    order: Order
    prefill: Prefill = "chunked"
    wait_steps: int = 0
    wait_tokens: int = 0
    waited: int = 0
    ahead: int = 0
    preempted_last: bool = False
    host: Caller = field(default_factory=Caller)
    began_s: float | None = None
    cache: PrefixCache | None = None
    reserve: Reserve = field(default_factory=Reserve)
    steps: int = 0
    arriving: deque[tuple[int, Request]] = field(default_factory=deque)
    waiting: list[tuple[float, int, Request]] = field(default_factory=list)
    preempted: deque[Request] = field(default_factory=deque)
    prompts: list[Request] = field(default_factory=list)
    decoding: list[tuple[int, int, Request]] = field(default_factory=list)
    admitted: dict[int, Request] = field(default_factory=dict)
    kv_tokens: int = 0
    longest_lead: int | None = None
    closed: bool = False


def continuous_batching(
    m: Machine,
    model: ServedDecoder,
    journal: Journal,
    *,
    blocks: int,
    block_tokens: int = 16,
    token_budget: int = 2048,
    max_sequences: int = 256,
    order: Order = fcfs,
    prefill: Prefill = "chunked",
    wait_steps: int = 0,
    wait_tokens: int = 0,
    ahead: int = 0,
    prefix_caching: bool = False,
    reserve: Reservation | None = None,
    preempted_last: bool = False,
    state_blocks: int = 0,
) -> Program:
    """Serves the requests of the inbox until END. `blocks`: how many KV blocks of `block_tokens` tokens;
    `reserve`: room for answers to come, without which nobody is admitted; `preempted_last`: whether who is
    preempted waits behind all others; `state_blocks`: how many blocks hold the state of a sequence. Raises
    ValueError for states with prefix caching: a state is of all tokens before it."""
    if state_blocks and prefix_caching:
        raise ValueError("prefix_caching: blocks of a prefix hold no state")
    kv = PagedKv(blocks, block_tokens, state=state_blocks)
    max_running = min(max_sequences, token_budget)
    server = _Server(kv, token_budget, max_running, order, prefill, wait_steps, wait_tokens, ahead=ahead)
    server.cache = PrefixCache(blocks, block_tokens) if prefix_caching else None
    server.reserve = Reserve(reserve or NO_ROOM_KEPT)
    server.reserve.begin(kv.iteration)
    server.preempted_last = preempted_last
    while True:
        if items := m.poll(REQUESTS):
            _receive(m, server, journal, items)
        if server.arriving:
            _enqueue(server)
        if not server.admitted and not server.waiting and not server.preempted:
            if server.closed:
                return
            _receive(m, server, journal, [(yield m.recv(REQUESTS))])
            server.began_s = None
            server.reserve.begin(kv.iteration)
            continue
        needed = kv.needed(1)
        short = needed > kv.total - kv.used
        if short:
            _preempt_until_fits(server, m.now())
        waits = server.prompts or server.waiting or server.preempted
        steps_to_wait = _steps_to_wait(server) if server.wait_steps and not short else 0
        chunks = _schedule_prompts(server, m.now(), admit=not short) if waits and not steps_to_wait else []
        if chunks:
            server.waited = 0
            yield from _step_with_prompts(m, model, journal, server, chunks)
        else:
            if short:
                # The preempted request may be admitted again in the next step.
                needed, steps_to_wait = kv.needed(1), 1
                server.reserve.since += 1
            yield from _decode(m, model, journal, server, needed, steps_to_wait)


def _receive(m: Machine, server: _Server, journal: Journal, items: list[object]) -> None:
    for item in items:
        if item == END:
            server.closed = True
        else:
            assert isinstance(item, Request)
            item.instance = m.rank
            too_long = server.prefill == "whole" and item.prompt_tokens > server.budget
            blocks = blocks_for(item.prompt_tokens + item.max_tokens, server.kv.block) + server.kv.state
            if too_long or blocks > server.kv.total:
                journal.reject(item, m.now())
            else:
                server.arriving.append((server.steps + server.ahead, item))


def _enqueue(server: _Server) -> None:
    """Moves requests that arrived early enough to the queue; all of them, if no admitted request runs."""
    while server.arriving and (server.arriving[0][0] <= server.steps or not server.admitted):
        _, request = server.arriving.popleft()
        heappush(server.waiting, (server.order(request), request.id, request))


def _preempt_until_fits(server: _Server, now_s: float) -> None:
    """Preempts the requests admitted last until the next iteration has enough blocks."""
    kv = server.kv
    while kv.needed(1) > kv.free:
        _, request = server.admitted.popitem()
        if request in server.prompts:
            server.prompts.remove(request)
            kv.used -= _release_blocks(server, request)
        else:
            server.decoding = [entry for entry in server.decoding if entry[2] is not request]
            heapify(server.decoding)
            _count_generated(server, request)
            kv.leave(request.cached, _release_blocks(server, request))
            _leave(server, request)
        request.cached = 0
        request.preemptions += 1
        if server.preempted_last:
            place = now_s if server.order is fcfs else server.order(request)
            heappush(server.waiting, (place, request.id, request))
        else:
            server.preempted.appendleft(request)
    server.reserve.preempted([entry[2] for entry in server.decoding], kv.iteration)


def _release_blocks(server: _Server, request: Request) -> int:
    """Releases the blocks of a request; returns how many become free."""
    if server.cache is None:
        return blocks_for(request.cached, server.kv.block) + server.kv.state
    return server.cache.release(request)


def _grow(server: _Server, iterations: int) -> None:
    """Takes the blocks of `iterations` decode iterations, which have run."""
    kv, cache = server.kv, server.cache
    before = kv.used
    kv.grow(iterations)
    if cache is not None:
        cache.grow(kv.used - before)


def _count_generated(server: _Server, request: Request) -> None:
    """Counts the tokens that a decoding request has generated since iteration `held`, its last count."""
    ran = server.kv.iteration - request.held
    request.generated += ran
    request.cached += ran
    request.held = server.kv.iteration


def _lead(request: Request) -> int:
    """How many more tokens a decoding request has cached than there were iterations: it stays while it
    decodes."""
    return request.cached - request.held


def _longest(server: _Server) -> int:
    """Tokens of the longest decoding sequence, with the one of the next iteration; 0 if none decodes."""
    if not server.decoding:
        return 0
    if server.longest_lead is None:
        server.longest_lead = max([_lead(request) for _, _, request in server.decoding])
    return server.longest_lead + server.kv.iteration + 1


def _leave(server: _Server, request: Request) -> None:
    """Takes the tokens of a request that decodes no more, counted up to now, off the sequences'."""
    server.kv_tokens -= request.cached
    if _lead(request) == server.longest_lead:
        server.longest_lead = None


def _steps_to_wait(server: _Server) -> int:
    """How many steps waiting prompts may still wait for others; 0 if they do not wait or nothing decodes."""
    left = server.wait_steps - server.waited
    if left <= 0 or not server.decoding or server.prompts or not (server.waiting or server.preempted):
        return 0
    candidates = [*server.preempted, *(entry[2] for entry in server.waiting)]
    tokens = len(server.decoding) + sum(map(_prompt, candidates))
    return 0 if min(tokens, server.budget) >= server.wait_tokens else left


def _schedule_prompts(server: _Server, now_s: float, *, admit: bool) -> list[tuple[Request, int]]:
    """Admits requests and returns the prompt tokens of the next step: (request, number of tokens)."""
    kv, cache, chunks = server.kv, server.cache, []
    left = server.budget - (len(server.decoding) if server.prefill != "first" else 0)
    free = kv.free - kv.needed(1)
    for request in server.prompts:
        tokens = _tokens_that_fit(kv, request, min(_prompt(request) - request.cached, left), free)
        if tokens > 0:
            chunks.append((request, tokens))
            left -= tokens
            free -= _new_blocks(kv, request, tokens)
            if cache is not None:
                cache.extend(request, request.cached, tokens)
    while (
        admit
        and left > 0
        and not server.reserve.full
        and len(server.admitted) < server.max_running
        and (server.preempted or server.waiting)
    ):
        request = _next(server)
        hit_blocks, unreferenced = _hits(server, request)
        hit_tokens = len(hit_blocks) * kv.block
        tokens = min(_prompt(request) - hit_tokens, left)
        shared = len(hit_blocks) - unreferenced
        blocks = kv.state + blocks_for(hit_tokens + tokens, kv.block) - shared
        if _would_split(server, request, hit_tokens + tokens, bool(chunks)):
            break
        if blocks > free or not _has_room(server, request, shared):
            request.waited_for_kv = 1
            server.reserve.refused()
            break
        _admit(server, request, hit_tokens, now_s)
        chunks.append((request, tokens))
        left -= tokens
        free -= blocks
        if cache is not None:
            kv.used += unreferenced
            cache.admit(request, hit_blocks)
            cache.extend(request, hit_tokens, tokens)
    return chunks


def _next(server: _Server) -> Request:
    """The request that is admitted next; some wait."""
    return server.preempted[0] if server.preempted else server.waiting[0][2]


def _hits(server: _Server, request: Request) -> tuple[list[int], int]:
    """The known blocks of what a prompt begins with, and how many of them no request holds: these count as
    free, so that a hit takes them from the free blocks."""
    if server.cache is None:
        return [], 0
    hit_blocks = server.cache.lookup(request)
    return hit_blocks, server.cache.unreferenced(hit_blocks)


def _admit(server: _Server, request: Request, hit_tokens: int, now_s: float) -> None:
    """Admits the next request, of whose prompt `hit_tokens` tokens are cached."""
    if server.preempted:
        server.preempted.popleft()
    else:
        heappop(server.waiting)
    if request.preemptions == 0:
        request.scheduled_s = now_s
        request.cached_prompt_tokens = hit_tokens
    request.cached = hit_tokens
    server.kv.used += server.kv.state
    server.admitted[request.id] = request
    server.prompts.append(request)


def _has_room(server: _Server, request: Request, shared: int) -> bool:
    """Whether the next request has the room that it must find. `shared`: its blocks that others hold."""
    if server.reserve.rule is NO_ROOM_KEPT:
        return True
    room = server.reserve.room(server.kv, server.prompts, [entry[2] for entry in server.decoding])
    return server.reserve.whole_blocks(server.kv, request) - shared <= room


def _would_split(server: _Server, request: Request, tokens: int, beside_others: bool) -> bool:
    """Whether a prompt that must be computed whole would be split. A prompt that fits into no step, because
    after a preemption its answer so far counts too, is split if it is alone."""
    whole = server.prefill == "whole" and tokens < _prompt(request)
    return whole and (beside_others or _prompt(request) <= server.budget)


def _prompt(request: Request) -> int:
    """Tokens to compute before a request decodes: its prompt and, after a preemption, its answer so far."""
    return request.prompt_tokens + request.generated


def _new_blocks(kv: PagedKv, request: Request, tokens: int) -> int:
    return blocks_for(request.cached + tokens, kv.block) - blocks_for(request.cached, kv.block)


def _tokens_that_fit(kv: PagedKv, request: Request, tokens: int, free: int) -> int:
    """The lesser of `tokens` and the tokens that the request's blocks and the free blocks still hold."""
    room = blocks_for(request.cached, kv.block) * kv.block - request.cached + free * kv.block
    return min(tokens, room)


def _step_with_prompts(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, chunks: list[tuple[Request, int]]
) -> Program:
    """Runs one step with prompt tokens, with or without decoding sequences."""
    kv, prompts_ending = server.kv, 0
    sequences = len(server.decoding) if server.prefill != "first" else 0
    prompts = []
    for request, tokens in chunks:
        prompts.append((tokens, request.cached))
        kv.used += _new_blocks(kv, request, tokens)
        request.cached += tokens
        prompts_ending += request.cached == _prompt(request)
    longest = _longest(server) if sequences else 0
    sizes = step_sizes(sequences, server.kv_tokens + sequences, prompts, prompts_ending, longest)
    if sequences:
        graph, batch = model.mixed, partial(_batch, server, chunks)
        step = m.launch(graph, sizes=sizes, advance=growth(sequences), batch=batch)
    else:
        graph, batch = model.prefill, partial(_batch, server, chunks, False)
        step = m.launch(graph, sizes=sizes, batch=batch)
    start_s = m.now()
    known_s = server.began_s if server.ahead and server.began_s is not None else start_s
    yield from wait_for(m, model, step, graph, server.host, known_s)
    end_s, server.began_s = m.now(), start_s
    waiting = _waiting(server)
    server.steps += 1
    prompt_tokens, steps = sizes["prompt_tokens"], 1 if sequences else 0
    _grow(server, steps)
    journal.step(
        m.rank, start_s, end_s, 1, sequences, sequences, prompt_tokens, prompts_ending, waiting, kv.used
    )
    server.reserve.since += steps
    waited = server.prefill == "first" and bool(server.decoding)
    server.reserve.full &= waited and prompts_ending == len(chunks)
    _finish_complete(server, journal, steps, end_s)
    if prompts_ending:
        _begin_to_decode(server, journal, end_s)


def _batch(server: _Server, chunks: Sequence[tuple[Request, int]], decodes: bool = True) -> Batch:
    """Whose tokens a step computes; those of `chunks` count as cached already."""
    prompts = [(request, tokens, request.cached - tokens) for request, tokens in chunks]
    iteration = server.kv.iteration
    entries = server.decoding if decodes else []
    return Batch(prompts, [(r, r.cached + iteration - r.held) for _, _, r in entries])


def _waiting(server: _Server) -> int:
    """How many requests are in the queue or not yet seen."""
    return len(server.waiting) + len(server.preempted) + len(server.arriving)


def _begin_to_decode(server: _Server, journal: Journal, end_s: float) -> None:
    """Gives the first token to requests whose prompts are complete; they decode from here."""
    kv = server.kv
    for request in [r for r in server.prompts if r.cached == _prompt(r)]:
        server.prompts.remove(request)
        request.generated += 1
        if request.generated == 1:
            request.first_token_s = end_s
        if request.generated == request.output_tokens:
            _finish(server, journal, request, end_s)
            kv.used -= _release_blocks(server, request)
            continue
        request.held = kv.iteration
        ends_at = kv.iteration + request.output_tokens - request.generated
        heappush(server.decoding, (ends_at, request.id, request))
        kv.join(request.cached)
        server.kv_tokens += request.cached
        if server.longest_lead is not None:
            server.longest_lead = max(server.longest_lead, _lead(request))


def _finish(server: _Server, journal: Journal, request: Request, end_s: float) -> None:
    """Ends a request, whose blocks are still held."""
    journal.finish(request, end_s)
    del server.admitted[request.id]
    server.reserve.full = False


def _decode(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, needed: int, most: int
) -> Program:
    """Runs a burst of decode steps until a request ends, the free blocks end, or a request arrives; at most
    `most` steps (0: no limit). `needed`: the new blocks of the first step."""
    kv, sequences = server.kv, len(server.decoding)
    longest = kv.longest(server.decoding[0][0] - kv.iteration)
    replays = min(most, longest) if most else longest
    until: str | None = REQUESTS
    if _none_can_join(server):
        if not _arrival_step_matters(server):
            until = None
        elif replays > server.ahead:
            # A request that arrives in this burst joins after the next burst, whichever step it came in.
            replays, until = replays - server.ahead, None
    elif server.arriving:
        replays = min(replays, server.arriving[0][0] - server.steps)
    sizes = decode_sizes(sequences, server.kv_tokens + sequences, _longest(server))
    used = kv.used + needed
    advance = growth(sequences)
    batch = partial(_batch, server, ())
    step = m.launch(model.decode, sizes=sizes, advance=advance, repeat=replays, until=until, batch=batch)
    start_s = m.now()
    yield m.wait(step)
    end_s = m.now()
    server.began_s = end_s - (end_s - start_s) / step.ran
    waiting = _waiting(server)
    server.steps += step.ran
    server.waited += step.ran if waiting > len(server.arriving) else 0
    _grow(server, step.ran)
    journal.step(m.rank, start_s, end_s, step.ran, sequences, sequences, 0, 0, waiting, used, kv.used)
    _finish_complete(server, journal, step.ran, end_s)


def _none_can_join(server: _Server) -> bool:
    """Whether no arriving request can begin before a running request has ended."""
    if server.order is not fcfs or server.wait_steps:
        return False
    # One that came before another was preempted, and is not seen yet, goes before that one.
    goes_first = server.arriving and server.waiting and fcfs(server.arriving[0][1]) < server.waiting[0][0]
    in_line = bool(server.preempted) or (bool(server.waiting) and not goes_first)
    return in_line or len(server.admitted) >= server.max_running


def _arrival_step_matters(server: _Server) -> bool:
    """Whether the step of a burst in which a request arrives matters. It does not if steps are not decided
    ahead, if no more requests arrive, or if more requests wait than `ahead` steps could admit."""
    in_line = len(server.waiting) + len(server.preempted)
    return server.ahead > 0 and not server.closed and in_line < server.ahead * server.max_running


def _finish_complete(server: _Server, journal: Journal, iterations: int, end_s: float) -> None:
    """Gives every decoding sequence `iterations` tokens, whose blocks are counted; complete ones leave."""
    kv, decoding = server.kv, server.decoding
    if not decoding:
        return
    server.kv_tokens += iterations * len(decoding)
    iteration = kv.iteration
    while decoding and decoding[0][0] <= iteration:
        request = heappop(decoding)[2]
        _count_generated(server, request)
        _finish(server, journal, request, end_s)
        kv.leave(request.cached, _release_blocks(server, request))
        _leave(server, request)
