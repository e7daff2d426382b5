"""Which KV blocks of a server hold what, so that prompts that begin alike are computed once.

Blocks are kept as vLLM's V1 engine keeps them (its design document "Automatic Prefix Caching"):

    identity   of a full block i: (text of its last token, i). A text determines all tokens before it, so
               equal identities mean equal tokens up to the end of the block (vLLM chains hashes to that end)
    hit        the blocks of a prompt, from its first on, as far as they are known, without its last token,
               from which the answer comes; known is a block once the step that fills it is decided
    free       blocks that nobody holds, in a queue; they keep what they hold until they are taken from its
               head. Who ends puts its blocks at the tail, the last one first: a prefix outlives what follows
    answers    their blocks become known too, when the request ends or is preempted

    used + free = total, always: what is known and free never keeps anybody from a block

Two requests that compute the same tokens at the same time have a copy each, as in vLLM. Each block of a
request is touched a few times in its life; decode steps only count how many blocks they take.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

from simcore.workload.requests import Request, blocks_for, own_text

# An identity is text * _SPREAD + block. More than the blocks of any prompt, so that no two are the same; odd,
# and not near a power of two, so that those of several texts do not collide in a hash table.
_SPREAD = 54_292_213


def identities(request: Request, first: int, last: int, block: int) -> Iterator[int]:
    """The identities of a request's blocks `first` .. `last` - 1, of `block` tokens each, all of them full.

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
    """The blocks of one server, `total` of `block` tokens. `holders` and `known_as`: of each block that was
    ever taken, how many requests hold it, and its identity; `where`: a block of each known identity, further
    ones in `copies`; `queue`: the free ones of them, first to be taken first; `tables`: the blocks of each
    running request, but for those that its answer took, of which `growing` are taken by all together."""

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
        """Blocks that nobody holds."""
        return self.total - len(self.holders) + len(self.queue)

    def found(self, request: Request) -> list[int]:
        """The blocks that hold the beginning of what a request has to compute."""
        most = (request.prompt_tokens + request.generated - 1) // self.block
        at = map(self.where.get, identities(request, 0, most, self.block))
        return [block for block in takewhile(_is_known, at) if block is not None]

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of some blocks are free."""
        return sum(not self.holders[block] for block in blocks)

    def admit(self, request: Request, found: list[int]) -> None:
        """A request begins, and holds the blocks that were found for it."""
        for block in found:
            if not self.holders[block]:
                del self.queue[block]
            self.holders[block] += 1
        self.tables[request.id] = found

    def extend(self, request: Request, cached: int, tokens: int) -> None:
        """A request that has so many tokens cached is to compute so many more of its prompt: their blocks are
        taken, and known from now on. The free ones must be enough."""
        table, after = self.tables[request.id], cached + tokens
        table += self._take(blocks_for(after, self.block) - len(table))
        self._know(request, table, cached // self.block, after // self.block)

    def grow(self, blocks: int) -> None:
        """Sequences that decode took so many blocks. The free ones must be enough."""
        self.growing += self._take(blocks)

    def release(self, request: Request) -> int:
        """A request gives its blocks back, `request.cached` tokens; how many of them are free now."""
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
        """Free blocks, those that were never used first; what they hold is forgotten."""
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
        """The blocks `first` .. `last` - 1 of a request are full."""
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
