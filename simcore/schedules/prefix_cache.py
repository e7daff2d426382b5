"""The contents of a server's KV blocks, so that equal beginnings of prompts are computed once.

Blocks are managed as in vLLM's V1 engine (its design document "Automatic Prefix Caching"):

    identity   of a full block i: (text of its last token, i). A text determines all tokens before it, so
               equal identities mean equal tokens until the end of the block (vLLM chains hashes instead)
    hit        the known blocks of a prompt, from the first until one is unknown. The last token of a prompt
               is always computed, because the answer comes from it. A block is known as soon as the step
               that fills it is decided
    free       blocks that no request holds, in a queue; they keep their contents until they are taken from
               its head. A request that ends puts its blocks at the tail, the last block first, so a prefix
               stays longer than what follows it
    answers    their blocks also become known, when the request ends or is preempted

    used + free = total, always: a known free block is as available as any other

Two requests that compute the same tokens at the same time have a copy each, as in vLLM. Each block of a
request is touched a few times in its life; decode steps only count how many blocks they take.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

from simcore.workload.requests import Request, blocks_for, own_text

# An identity is text * _SPREAD + block. _SPREAD is more than the blocks of any prompt, so that identities
# differ; it is odd and not near a power of two, so that several texts do not collide in a hash table.
_SPREAD = 54_292_213


def identities(request: Request, first: int, last: int, block: int) -> Iterator[int]:
    """The identities of a request's blocks `first` .. `last` - 1, all full, of `block` tokens each.

    >>> same = [Request(i, 0.0, 100, 1, 1, content=((7, 64), (7 + i, 100))) for i in range(2)]
    >>> [len({*identities(same[0], 0, n, 16)} & {*identities(same[1], 0, n, 16)}) for n in (4, 6)]
    [4, 4]
    """
    parts: list[Iterable[int]] = []
    done = first
    for text, end in request.content:
        until = min(last, end // block)
        if until > done:
            parts.append(range(text * _SPREAD + done, text * _SPREAD + until))
            done = until
    if last > done:
        own = own_text(request.id) * _SPREAD
        parts.append(range(own + done, own + last))
    return chain.from_iterable(parts)


@dataclass(slots=True)
class PrefixCache:
    """The blocks of one server: `total` blocks of `block` tokens. `holders` and `known_as`: for each block
    ever taken, how many requests hold it, and its identity. `where`: a block for each known identity, further
    blocks in `copies`. `queue`: the free blocks among those ever taken, in the order in which they are taken
    again. `tables`: the blocks of each running request, except the blocks of its answer: `growing` has those
    of all requests together."""

    total: int
    block: int
    holders: list[int] = field(default_factory=list)
    known_as: list[int | None] = field(default_factory=list)
    where: dict[int, int] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    growing: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        """How many blocks no request holds."""
        return self.total - len(self.holders) + len(self.queue)

    def lookup(self, request: Request) -> list[int]:
        """The cached blocks of a request: those that hold the beginning of its prompt and answer so far."""
        most = (request.prompt_tokens + request.generated - 1) // self.block
        at = map(self.where.get, identities(request, 0, most, self.block))
        return [block for block in takewhile(_is_known, at) if block is not None]

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free."""
        return sum(not self.holders[block] for block in blocks)

    def admit(self, request: Request, found: list[int]) -> None:
        """Adds a request, which holds the blocks that were found for it."""
        for block in found:
            if not self.holders[block]:
                del self.queue[block]
            self.holders[block] += 1
        self.tables[request.id] = found

    def extend(self, request: Request, cached: int, tokens: int) -> None:
        """Takes the blocks for `tokens` more prompt tokens of a request that has `cached` cached tokens; full
        blocks are known from now on. Enough blocks must be free."""
        table, after = self.tables[request.id], cached + tokens
        table += self._take(blocks_for(after, self.block) - len(table))
        self._know(request, table, cached // self.block, after // self.block)

    def grow(self, blocks: int) -> None:
        """Takes `blocks` blocks for decoding sequences. Enough blocks must be free."""
        self.growing += self._take(blocks)

    def release(self, request: Request) -> int:
        """Releases a request's blocks, for `request.cached` tokens; returns how many become free."""
        table = self.tables.pop(request.id)
        # The last block of a prompt may have been filled by the answer.
        full = len(table) if self.known_as[table[-1]] is not None else len(table) - 1
        answered = blocks_for(request.cached, self.block) - len(table)
        if answered > 0:
            table += self.growing[-answered:]
            del self.growing[-answered:]
        self._know(request, table, full, request.cached // self.block)
        freed = 0
        for block in reversed(table):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.queue[block] = None
                freed += 1
        return freed

    def _take(self, number: int) -> list[int]:
        """Takes free blocks, never used ones first, and forgets their contents."""
        ever = len(self.holders)
        new = min(number, self.total - ever)
        taken = list(range(ever, ever + new))
        self.holders += [1] * new
        self.known_as += [None] * new
        for _ in range(number - new):
            block, _ = self.queue.popitem(last=False)
            self._forget(block)
            self.holders[block] = 1
            taken.append(block)
        return taken

    def _know(self, request: Request, table: Sequence[int], first: int, last: int) -> None:
        """Makes blocks `first` .. `last` - 1 of a request known; they are full."""
        if last <= first:
            return
        names = identities(request, first, last, self.block)
        for block, identity in zip(table[first:last], names, strict=True):
            self.known_as[block] = identity
            if self.where.setdefault(identity, block) != block:
                self.copies.setdefault(identity, []).append(block)

    def _forget(self, block: int) -> None:
        identity = self.known_as[block]
        if identity is None:
            return
        self.known_as[block] = None
        copies = self.copies.get(identity)
        if copies is None:
            del self.where[identity]
            return
        if self.where[identity] == block:
            self.where[identity] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self.copies[identity]


def _is_known(block: int | None) -> bool:
    return block is not None
