"""Continuous batching: what production engines do, one decision a step.

Orca's iteration-level scheduling (Yu et al., OSDI 2022) with the paged cache of PagedAttention (Kwon et al.,
SOSP 2023) and chunked prefill (Agrawal et al., OSDI 2024), as in vLLM's scheduler:

    each step   every sequence that decodes gets a token; what is left of the token budget goes to prompts,
                first those begun, then new ones in their order, while blocks and places last
    no block    the sequence admitted last gives its blocks back, waits first in line and is computed anew;
                nobody is admitted in that step

Where a chunk of a prompt finds too few blocks it is made as long as they last; vLLM would send somebody back.

Engines differ in how a step takes prompts (`Prefill`):

    chunked   what is left of the budget, in chunks, beside the sequences that decode (vLLM)
    whole     the same, but a prompt is not cut: it waits until it fits (TensorRT-LLM, whose default this is)
    first     prompts in steps of their own, in chunks, while those that decode stand still (SGLang)

and in whether they let new prompts wait for each other: up to `wait_steps` steps of those that decode, unless
a step with all prompts that wait has `wait_tokens` tokens (TensorRT-LLM's batch waiting).

Engines that overlap their host's work with the device's decide a step while the one before it runs. What
comes then misses it: with `ahead` = 1 a request takes part from the second step after that in which it came.

With `prefix_caching` blocks that begin a prompt and are known from before are not computed again, and are
held once, however many requests share them (simcore/schedules/prefix_cache.py).

While nothing can change but lengths, steps are launched as one burst, until a request ends or comes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from simcore.machine.machine import Machine, Program
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.schedules.paged_kv import PagedKv
from simcore.schedules.prefix_cache import PrefixCache
from simcore.workload.requests import END, REQUESTS, Journal, Request, blocks_for

# Which of the waiting requests is next: smallest first.
Order = Callable[[Request], float]
# How a step takes prompts; see above.
Prefill = Literal["chunked", "whole", "first"]


def fcfs(request: Request) -> float:
    """First come, first served; of those that come at once, the one of the lower number."""
    return request.arrival_s


def shortest_first(request: Request) -> float:
    """The shortest prompt first."""
    return request.prompt_tokens


@dataclass(slots=True)
class _Server:
    """The state of one server. `line` waits, in order; `prompts` are being computed; `decoding` is a heap of
    (iteration in which it ends, id, request); `admitted` are all that hold blocks, in order of admission.
    `waited`: for how many steps prompts have waited for others. `known`: what the blocks hold; None where
    nothing is kept. `steps` have run; those `coming` get in line once so many have."""

    kv: PagedKv
    budget: int
    places: int
    order: Order
    prefill: Prefill = "chunked"
    wait_steps: int = 0
    wait_tokens: int = 0
    waited: int = 0
    ahead: int = 0
    known: PrefixCache | None = None
    steps: int = 0
    coming: deque[tuple[int, Request]] = field(default_factory=deque)
    line: list[tuple[float, int, Request]] = field(default_factory=list)
    first: deque[Request] = field(default_factory=deque)
    prompts: list[Request] = field(default_factory=list)
    decoding: list[tuple[int, int, Request]] = field(default_factory=list)
    admitted: dict[int, Request] = field(default_factory=dict)
    kv_tokens: int = 0
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
) -> Program:
    """Serves what comes into the inbox until its end. `blocks`: of `block_tokens` tokens, in all."""
    kv, places = PagedKv(blocks, block_tokens), min(max_sequences, token_budget)
    server = _Server(kv, token_budget, places, order, prefill, wait_steps, wait_tokens, ahead=ahead)
    server.known = PrefixCache(blocks, block_tokens) if prefix_caching else None
    while True:
        if items := m.poll(REQUESTS):
            _take(m, server, journal, items)
        if server.coming:
            _line_up(server)
        if not server.admitted and not server.line and not server.first:
            if server.closed:
                return
            _take(m, server, journal, [(yield m.recv(REQUESTS))])
            continue
        needed = kv.needed(1)
        short = needed > kv.total - kv.used
        if short:
            _make_room(server)
        waits = server.prompts or server.line or server.first
        patience = _patience(server) if server.wait_steps and not short else 0
        chunks = _chunks(server, m.now(), admit=not short) if waits and not patience else []
        if chunks:
            server.waited = 0
            yield from _mixed(m, model, journal, server, chunks)
        else:
            # Who was sent back may be admitted again in the next step.
            if short:
                needed, patience = kv.needed(1), 1
            yield from _decode(m, model, journal, server, needed, patience)


def _take(m: Machine, server: _Server, journal: Journal, items: list[object]) -> None:
    for item in items:
        if item == END:
            server.closed = True
            continue
        assert isinstance(item, Request)
        item.instance = m.rank
        too_long = server.prefill == "whole" and item.prompt_tokens > server.budget
        if too_long or blocks_for(item.prompt_tokens + item.max_tokens, server.kv.block) > server.kv.total:
            journal.reject(item, m.now())
        else:
            server.coming.append((server.steps + server.ahead, item))


def _line_up(server: _Server) -> None:
    """Those who came early enough get in line; all, where nothing runs that was decided before."""
    while server.coming and (server.coming[0][0] <= server.steps or not server.admitted):
        _, request = server.coming.popleft()
        heappush(server.line, (server.order(request), request.id, request))


def _make_room(server: _Server) -> None:
    """Sends back those admitted last until the next iteration has its blocks."""
    kv = server.kv
    while kv.needed(1) > kv.free:
        _, request = server.admitted.popitem()
        if request in server.prompts:
            server.prompts.remove(request)
            kv.used -= _freed(server, request)
        else:
            server.decoding = [entry for entry in server.decoding if entry[2] is not request]
            heapify(server.decoding)
            _settle(server, request)
            kv.leave(request.cached, _freed(server, request))
            server.kv_tokens -= request.cached
        request.cached = 0
        request.preemptions += 1
        server.first.appendleft(request)


def _freed(server: _Server, request: Request) -> int:
    """How many blocks get free when a request gives its own back."""
    if server.known is None:
        return blocks_for(request.cached, server.kv.block)
    return server.known.release(request)


def _grow(server: _Server, iterations: int) -> None:
    """So many decode iterations have run."""
    kv, known = server.kv, server.known
    before = kv.used
    kv.grow(iterations)
    if known is not None:
        known.grow(kv.used - before)


def _settle(server: _Server, request: Request) -> None:
    """Writes down how far a decoding request has come: `held` is the iteration in which it joined."""
    ran = server.kv.iteration - request.held
    request.generated += ran
    request.cached += ran
    request.held = server.kv.iteration


def _patience(server: _Server) -> int:
    """How many steps the prompts in line may still wait for others; 0 where they do not or nobody decodes."""
    left = server.wait_steps - server.waited
    if left <= 0 or not server.decoding or server.prompts or not (server.line or server.first):
        return 0
    waiting = [*server.first, *(entry[2] for entry in server.line)]
    tokens = len(server.decoding) + sum(map(_prompt, waiting))
    return 0 if min(tokens, server.budget) >= server.wait_tokens else left


def _chunks(server: _Server, now_s: float, *, admit: bool) -> list[tuple[Request, int]]:
    """The prompt tokens of the next step: (request, how many of its tokens)."""
    kv, known, chunks = server.kv, server.known, []
    left = server.budget - (len(server.decoding) if server.prefill != "first" else 0)
    free = kv.free - kv.needed(1)
    for request in server.prompts:
        tokens = _fitting(kv, request, min(_prompt(request) - request.cached, left), free)
        if tokens > 0:
            chunks.append((request, tokens))
            left -= tokens
            free -= _new_blocks(kv, request, tokens)
            if known is not None:
                known.extend(request, request.cached, tokens)
    while admit and left > 0 and len(server.admitted) < server.places and (server.first or server.line):
        request = server.first[0] if server.first else server.line[0][2]
        found = known.found(request) if known is not None else []
        have = len(found) * kv.block
        tokens = min(_prompt(request) - have, left)
        # Those found that nobody holds are taken from the free ones as new ones are.
        unheld = known.unheld(found) if known is not None else 0
        blocks = blocks_for(have + tokens, kv.block) - len(found) + unheld
        if blocks > free or _is_cut(server, request, have + tokens, bool(chunks)):
            break
        _admit(server, request, have, now_s)
        chunks.append((request, tokens))
        left -= tokens
        free -= blocks
        if known is not None:
            kv.used += unheld
            known.admit(request, found)
            known.extend(request, have, tokens)
    return chunks


def _admit(server: _Server, request: Request, have: int, now_s: float) -> None:
    """The request that is next leaves the line; so many of its tokens are there already."""
    if server.first:
        server.first.popleft()
    else:
        heappop(server.line)
    if request.preemptions == 0:
        request.scheduled_s = now_s
        request.cached_prompt_tokens = have
    request.cached = have
    server.admitted[request.id] = request
    server.prompts.append(request)


def _is_cut(server: _Server, request: Request, tokens: int, beside_others: bool) -> bool:
    """Whether a prompt that has to be computed whole is not. One that fits into no step any more, for its
    answer so far counts after a preemption, is cut where it is alone."""
    whole = server.prefill == "whole" and tokens < _prompt(request)
    return whole and (beside_others or _prompt(request) <= server.budget)


def _prompt(request: Request) -> int:
    """Tokens to compute before it decodes: after a preemption, its answer so far too."""
    return request.prompt_tokens + request.generated


def _new_blocks(kv: PagedKv, request: Request, tokens: int) -> int:
    return blocks_for(request.cached + tokens, kv.block) - blocks_for(request.cached, kv.block)


def _fitting(kv: PagedKv, request: Request, tokens: int, free: int) -> int:
    """So many tokens, or as many as the free blocks hold."""
    room = blocks_for(request.cached, kv.block) * kv.block - request.cached + free * kv.block
    return min(tokens, room)


def _mixed(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, chunks: list[tuple[Request, int]]
) -> Program:
    """One step with prompt tokens."""
    kv, ends = server.kv, 0
    sequences = len(server.decoding) if server.prefill != "first" else 0
    prompts = []
    for request, tokens in chunks:
        prompts.append((tokens, request.cached))
        kv.used += _new_blocks(kv, request, tokens)
        request.cached += tokens
        ends += request.cached == _prompt(request)
    sizes = step_sizes(sequences, server.kv_tokens + sequences, prompts, ends)
    if sequences:
        step = m.launch(model.mixed, sizes=sizes, advance=growth(sequences))
    else:
        step = m.launch(model.prefill, sizes=sizes)
    start_s = m.now()
    yield m.wait(step)
    end_s = m.now()
    waiting = _waiting(server)
    server.steps += 1
    now, steps = sizes["prompt_tokens"], 1 if sequences else 0
    _grow(server, steps)
    journal.step(m.rank, start_s, end_s, 1, sequences, sequences, now, ends, waiting, kv.used)
    _advance(server, journal, steps, end_s)
    if ends:
        _begin_to_decode(server, journal, end_s)


def _waiting(server: _Server) -> int:
    """Requests that nobody works on."""
    return len(server.line) + len(server.first) + len(server.coming)


def _begin_to_decode(server: _Server, journal: Journal, end_s: float) -> None:
    """Prompts that are computed give their first token and decode from here."""
    kv = server.kv
    for request in [r for r in server.prompts if r.cached == _prompt(r)]:
        server.prompts.remove(request)
        request.generated += 1
        if request.generated == 1:
            request.first_token_s = end_s
        if request.generated == request.output_tokens:
            journal.finish(request, end_s)
            kv.used -= _freed(server, request)
            del server.admitted[request.id]
            continue
        request.held = kv.iteration
        ends_at = kv.iteration + request.output_tokens - request.generated
        heappush(server.decoding, (ends_at, request.id, request))
        kv.join(request.cached)
        server.kv_tokens += request.cached


def _decode(
    m: Machine, model: ServedDecoder, journal: Journal, server: _Server, needed: int, most: int
) -> Program:
    """A burst of decode steps, up to the end of a request, of the free blocks, or of the silence; at most so
    many unless that is 0. `needed`: the new blocks that the first takes."""
    kv, sequences = server.kv, len(server.decoding)
    longest = kv.longest(server.decoding[0][0] - kv.iteration)
    replays = min(most, longest) if most else longest
    until: str | None = REQUESTS
    if _is_held(server):
        if not _sees_late(server):
            until = None
        elif replays > server.ahead:
            # Who comes in this part may take part at the end of the next, whenever it was.
            replays, until = replays - server.ahead, None
    elif server.coming:
        replays = min(replays, server.coming[0][0] - server.steps)
    sizes = decode_sizes(sequences, server.kv_tokens + sequences)
    used = kv.used + needed
    advance = growth(sequences)
    step = m.launch(model.decode, sizes=sizes, advance=advance, repeat=replays, until=until)
    start_s = m.now()
    yield m.wait(step)
    end_s = m.now()
    waiting = _waiting(server)
    server.steps += step.ran
    server.waited += step.ran if waiting > len(server.coming) else 0
    _grow(server, step.ran)
    journal.step(m.rank, start_s, end_s, step.ran, sequences, sequences, 0, 0, waiting, used, kv.used)
    _advance(server, journal, step.ran, end_s)


def _is_held(server: _Server) -> bool:
    """Whether nobody can begin before somebody ends, whoever comes."""
    full = len(server.admitted) >= server.places or server.line or server.first
    return bool(full) and server.order is fcfs and not server.wait_steps


def _sees_late(server: _Server) -> bool:
    """Whether it matters in which step of a burst somebody comes. It does not where steps are not decided
    ahead, nobody comes any more, or more are in line than `ahead` steps could admit."""
    in_line = len(server.line) + len(server.first)
    return server.ahead > 0 and not server.closed and in_line < server.ahead * server.places


def _advance(server: _Server, journal: Journal, iterations: int, end_s: float) -> None:
    """Every decoding sequence has so many tokens more, whose blocks are counted; who is complete leaves."""
    kv, decoding = server.kv, server.decoding
    if not decoding:
        return
    server.kv_tokens += iterations * len(decoding)
    iteration = kv.iteration
    while decoding and decoding[0][0] <= iteration:
        request = heappop(decoding)[2]
        _settle(server, request)
        journal.finish(request, end_s)
        kv.leave(request.cached, _freed(server, request))
        server.kv_tokens -= request.cached
        del server.admitted[request.id]
