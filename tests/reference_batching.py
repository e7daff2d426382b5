"""Continuous batching step by step, written apart from the strategy: a plain loop over steps, with every
sequence and every KV block an object of its own. No events, no bursts, no counting in closed form.

    a step    every sequence that decodes gets a token; what is left of the token budget goes to prompts that
              are begun, then to new ones in their order, while blocks and places last
    no block  who was admitted last is sent back, waits first in line and is computed anew; nobody is
              admitted in that step
    ahead     who comes while a step runs misses the `ahead` steps after it, for they are decided
    reserve   who is new is admitted only if its whole answer has room, beside the answers of prompts that are
              begun and a share of those of who decodes. Where the share falls with each step of answers alone
              (but that of a preemption), who finds no room is asked for again when somebody has ended or was
              sent back, or after a step with prompts that others did not wait for or that are not complete
    last      who is sent back waits as if it came then, not first in line
    state     a sequence holds so many blocks besides, from its first chunk on

Random workloads, the strategy on the simulated machine against this:

    python -m tests.reference_batching --seed 1 --count 2500
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isclose, isnan, nan
from random import Random

from simcore.ops.op import Op, Price
from simcore.schedules.continuous_batching import Prefill, continuous_batching, fcfs, shortest_first
from simcore.schedules.reservation import Reservation
from simcore.workload.requests import Content, Request, own_text
from tests.test_serving_schedules import STEPWISE, serve

RESERVES = (
    None, None, Reservation(1.0, 1.0), Reservation(0.0, 0.0), Reservation(0.4, 0.4, most_tokens=5),
    Reservation(0.7, 0.098, 10), Reservation(1.0, 0.1, 40, 8),
)  # fmt: skip
# Times of both are sums of the same seconds in another order.
ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Rules:
    """How a server works: see `continuous_batching`, whose arguments have the same names."""

    blocks: int
    block_tokens: int = 4
    token_budget: int = 32
    max_sequences: int = 8
    shortest: bool = False
    prefill: Prefill = "chunked"
    ahead: int = 0
    prefix_caching: bool = False
    reserve: Reservation | None = None
    preempted_last: bool = False
    state_blocks: int = 0


@dataclass(eq=False)
class Block:
    """A block of the cache: how many sequences hold it, and which tokens it is known to hold, if any."""

    holders: int = 0
    holds: tuple[tuple[int, int], ...] | None = None


@dataclass(eq=False)
class Job:
    """A request: `cached` tokens are computed, of which `to_compute` make its prompt (after a preemption its
    answer so far too)."""

    number: int
    arrival_s: float
    tokens: list[tuple[int, int]]
    prompt: int
    output: int
    most: int
    from_step: int = 0
    cached: int = 0
    to_compute: int = 0
    generated: int = 0
    blocks: list[Block] = field(default_factory=list)
    state: list[Block] = field(default_factory=list)
    scheduled_s: float = nan
    first_token_s: float = nan
    finish_s: float = nan
    preemptions: int = 0
    from_cache: int = 0
    in_line_s: float = nan
    rejected: bool = False
    found_no_room: bool = False

    @property
    def decodes(self) -> bool:
        return self.cached >= self.to_compute


def step_s(rows: int, decode_kv: int, pairs: int) -> float:
    """Seconds of a step: of its rows, of the cached tokens that decoding sequences read, of the pairs of
    prompt tokens."""
    return 1.0 + 0.0173 * rows + 0.00031 * decode_kv + 0.00007 * pairs


def price(op: Op) -> Price:
    """`step_s` as prices of the ops of a step."""
    seconds = {
        "embedding": lambda: step_s(op["tokens"], 0, 0),
        "attention": lambda: step_s(0, op["kv_tokens"], 0) - 1.0,
        "prefill_attention": lambda: step_s(0, 0, op["pairs"]) - 1.0,
    }.get(op.name, lambda: 0.0)()
    return Price(seconds, seconds, seconds, "assumed", "reference")


class Server:
    """One server, which runs steps one by one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        # Who is taken first stands first.
        self.free = [Block() for _ in range(rules.blocks)]
        self.known: list[Block] = []
        self.came: list[Job] = []
        self.line: list[Job] = []
        self.sent_back: list[Job] = []
        self.running: list[Job] = []
        self.step = 0
        self.now_s = 0.0
        self._begin_anew()

    def run(self, wanted: Sequence[Job]) -> None:
        """Serves all requests."""
        coming = sorted(wanted, key=lambda s: (s.arrival_s, s.number))
        while coming or self.came or self.line or self.sent_back or self.running:
            while coming and coming[0].arrival_s <= self.now_s:
                self._comes(coming.pop(0))
            self._line_up()
            if self.running or self.line or self.sent_back:
                self._one_step()
            elif coming:
                # Idle: all starts anew.
                self.now_s = max(self.now_s, coming[0].arrival_s)
                self._begin_anew()

    def _comes(self, sequence: Job) -> None:
        size = self.rules.block_tokens
        too_long = self.rules.prefill == "whole" and sequence.prompt > self.rules.token_budget
        if (
            too_long
            or -(-(sequence.prompt + sequence.most) // size) > self.rules.blocks - self.rules.state_blocks
        ):
            sequence.rejected = True
            return
        sequence.from_step = self.step + self.rules.ahead
        self.came.append(sequence)

    def _line_up(self) -> None:
        for sequence in [s for s in self.came if s.from_step <= self.step or not self.running]:
            self.came.remove(sequence)
            self.line.append(sequence)
            sequence.in_line_s = sequence.arrival_s
        self._sort_line()

    def _sort_line(self) -> None:
        if self.rules.shortest:
            self.line.sort(key=lambda s: (s.prompt, s.number))
        else:
            self.line.sort(key=lambda s: (s.in_line_s, s.number))

    # -- a step --------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        short = self._blocks_to_decode() > len(self.free)
        while self._blocks_to_decode() > len(self.free):
            self._send_back(self.running[-1])
        if short:
            self._expect_longer_answers()
        chunks = self._begun_prompts() + ([] if short else self._new_prompts(self._left))
        decoding = [s for s in self.running if s.decodes and s.cached]
        if self.rules.prefill == "first" and chunks:
            decoding = []
        before = [s for s in self.running if s.decodes and s.cached]
        pairs = sum(s.cached + i + 1 for s, tokens in chunks for i in range(tokens))
        rows = len(decoding) + sum(tokens for _, tokens in chunks)
        self.now_s += step_s(rows, sum(s.cached + 1 for s in decoding), pairs)
        self.step += 1
        for s in decoding:
            if s.cached % self.rules.block_tokens == 0:
                s.blocks.append(self._take())
            s.cached += 1
            s.generated += 1
        for s, tokens in chunks:
            s.cached += tokens
        for s in sorted((s for s in decoding if s.generated == s.output), key=lambda s: s.number):
            self._finish(s)
        if decoding and not chunks and not short:
            self.falls += 1
        waited = self.rules.prefill == "first" and before
        if chunks and not (waited and all(s.decodes for s, _ in chunks)):
            self.full = False
        for s in [s for s, _ in chunks if s.decodes]:
            s.generated += 1
            if s.generated == 1:
                s.first_token_s = self.now_s
            if s.generated == s.output:
                self._finish(s)

    def _blocks_to_decode(self) -> int:
        return sum(s.decodes and s.cached % self.rules.block_tokens == 0 for s in self.running)

    def _begun_prompts(self) -> list[tuple[Job, int]]:
        """Chunks of the prompts that are begun; leaves in `_left` what is left of the budget, and takes the
        blocks of the chunks."""
        chunks, size = [], self.rules.block_tokens
        kept = self._blocks_to_decode()
        decoding = sum(s.decodes for s in self.running)
        self._left = self.rules.token_budget - (0 if self.rules.prefill == "first" else decoding)
        for s in [s for s in self.running if not s.decodes]:
            room = len(s.blocks) * size - s.cached + (len(self.free) - kept) * size
            tokens = min(s.to_compute - s.cached, self._left, room)
            if tokens > 0:
                self._extend(s, tokens)
                chunks.append((s, tokens))
                self._left -= tokens
        self._kept = kept
        self._any = bool(chunks)
        return chunks

    def _new_prompts(self, left: int) -> list[tuple[Job, int]]:
        """First chunks of requests that are admitted now."""
        chunks: list[tuple[Job, int]] = []
        places = min(self.rules.max_sequences, self.rules.token_budget)
        while left > 0 and len(self.running) < places and (self.sent_back or self.line) and not self.full:
            line = self.sent_back or self.line
            s = line[0]
            length = s.prompt + s.generated
            found = self._hit_blocks(s, length)
            have = len(found) * self.rules.block_tokens
            tokens = min(length - have, left)
            new = -(-(have + tokens) // self.rules.block_tokens) - len(found)
            # A whole prompt waits for a step that it fits into; one that fits into none is cut, alone.
            alone = length > self.rules.token_budget and not self._any and not chunks
            if self.rules.prefill == "whole" and have + tokens < length and not alone:
                break
            new += self.rules.state_blocks
            fits = new + sum(b.holders == 0 for b in found) <= len(self.free) - self._kept
            if not fits or not self._has_room(s, [b for b in found if b.holders]):
                s.found_no_room = True
                self.full = self._fall > 0
                break
            line.pop(0)
            if not s.preemptions:
                s.scheduled_s, s.from_cache = self.now_s, have
            s.cached, s.to_compute = have, length
            for block in found:
                if not block.holders:
                    self.free.remove(block)
                block.holders += 1
            s.blocks = found
            s.state = [self._take() for _ in range(self.rules.state_blocks)]
            self.running.append(s)
            self._extend(s, tokens)
            chunks.append((s, tokens))
            left -= tokens
        return chunks

    # -- room for answers ----------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self.full, self.falls = False, 0
        self.share_before_falls = self.rules.reserve.share if self.rules.reserve else 0.0

    @property
    def _fall(self) -> float:
        rule = self.rules.reserve
        return (rule.share - rule.least) / rule.steps if rule and rule.steps else 0.0

    def _expect_longer_answers(self) -> None:
        decoding = [s for s in self.running if s.decodes]
        self.full = False
        if self._fall:
            told = sum(s.generated for s in decoding) + 20 * len(decoding)
            self.share_before_falls = min(1.0, told / (sum(s.most for s in decoding) + 1))
            self.falls = 0

    def _has_room(self, new: Job, shared: list[Block]) -> bool:
        """Whether all that may come of who runs, some of it only, leaves room for all of a new one."""
        rule, size = self.rules.reserve, self.rules.block_tokens
        if rule is None:
            return True
        share = max(rule.least, self.share_before_falls - self._fall * self.falls)

        def at_its_end(s: Job) -> int:
            answer = min(s.most - s.generated, rule.most_tokens or s.most)
            # Of a prompt all tokens, and of who decodes those that it has.
            return -(-(max(s.cached, s.prompt + s.generated if not s.decodes else 0) + answer) // size)

        to_come, held = 0.0, {id(b): b for s in self.running for b in s.blocks + s.state}
        for s in self.running:
            # Chunks of this step have their blocks, and count as not computed yet.
            more = at_its_end(s) - -(-s.cached // size)
            to_come += more * (share if s.decodes and s.cached else 1.0)
        just_taken = sum(len(s.blocks) - -(-s.cached // size) for s in self.running)
        free = self.rules.blocks - len(held) + just_taken
        answer = min(new.most - new.generated, rule.most_tokens or new.most)
        whole = -(-(new.prompt + new.generated + answer) // size) + self.rules.state_blocks
        return whole - len(shared) <= free - to_come

    # -- blocks --------------------------------------------------------------------------------------

    def _take(self) -> Block:
        """The next free block; what it held is forgotten."""
        block = self.free.pop(0)
        if block.holds is not None:
            block.holds = None
            self.known.remove(block)
        block.holders = 1
        return block

    def _extend(self, s: Job, tokens: int) -> None:
        """Takes the blocks of so many more prompt tokens."""
        after = s.cached + tokens
        while len(s.blocks) * self.rules.block_tokens < after:
            s.blocks.append(self._take())
        self._know(s, after)

    def _know(self, s: Job, until: int) -> None:
        """What its full blocks hold up to so many tokens is known from now on."""
        size = self.rules.block_tokens
        if not self.rules.prefix_caching:
            return
        for i, block in enumerate(s.blocks[: until // size]):
            if block.holds is None:
                block.holds = tuple(s.tokens[: (i + 1) * size])
                self.known.append(block)

    def _hit_blocks(self, s: Job, length: int) -> list[Block]:
        """The blocks that hold the beginning of it, as far as they are known, without its last token."""
        size, found = self.rules.block_tokens, list[Block]()
        for i in range((length - 1) // size):
            wanted = tuple(s.tokens[: (i + 1) * size])
            block = next((b for b in self.known if b.holds == wanted), None)
            if block is None:
                break
            found.append(block)
        return found

    def _release(self, s: Job) -> None:
        """Gives its blocks back, the last one first."""
        self._know(s, s.cached)
        for block in (*reversed(s.blocks), *s.state):
            block.holders -= 1
            if not block.holders:
                self.free.append(block)
        s.blocks, s.state = [], []

    def _send_back(self, s: Job) -> None:
        self.running.remove(s)
        self._release(s)
        s.cached = 0
        s.preemptions += 1
        if self.rules.preempted_last:
            s.in_line_s = self.now_s
            self.line.append(s)
            self._sort_line()
        else:
            self.sent_back.insert(0, s)

    def _finish(self, s: Job) -> None:
        s.finish_s = self.now_s
        self.running.remove(s)
        self._release(s)
        self.full = False


# -- both on the same workload ---------------------------------------------------------------------------


def sequence(request: Request) -> Job:
    """A request for the reference. Its tokens are (text that they belong to, place): equal where texts say
    that they are, the whole beginning included."""
    tokens: list[tuple[int, int]] = []
    length, output = request.prompt_tokens, request.output_tokens
    for text, end in (*request.content, (own_text(request.id), length + output)):
        tokens += [(text, place) for place in range(len(tokens), end)]
    return Job(request.id, request.arrival_s, tokens, length, output, request.max_tokens)


def random_workload(seed: int) -> tuple[Rules, list[Request]]:
    """A small server, with little memory or much, and requests from few to too many for it."""
    random = Random(f"reference {seed}")
    block = random.choice([1, 2, 4, 16])
    longest, most = random.choice([6, 30, 90]), random.choice([3, 12, 40])
    budget = random.choice([1, 3, 8, 24, 64, 2048])
    prefix_caching = random.random() < 0.4
    state = 0 if prefix_caching else random.choice([0, 0, 0, 1, 3])
    rules = Rules(
        blocks=-(-(longest + most) // block) * random.choice([1, 1, 2, 3, 30])
        + random.choice([1, 1, 2, 5]) * state
        + random.randint(0, 3),
        block_tokens=block,
        token_budget=budget,
        max_sequences=random.choice([1, 2, 3, 5, 16, 256]),
        shortest=random.random() < 0.3,
        prefill=random.choice(["chunked", "chunked", "chunked", "whole", "first"]),
        ahead=random.choice([0, 0, 1, 1, 2, 3, 7]),
        prefix_caching=prefix_caching,
        reserve=random.choice(RESERVES),
        preempted_last=random.random() < 0.3,
        state_blocks=state,
    )
    at_s, between_s, wanted = 0.0, 2.0 ** random.uniform(-3.0, 6.0), list[Request]()
    for number in range(random.randint(1, 40)):
        # Now and then several come at once.
        at_s += 0.0 if random.random() < 0.15 else random.expovariate(1.0 / between_s)
        prompt, output = random.randint(1, longest), random.randint(1, most)
        content: Content = ()
        if random.random() < 0.8:
            content = ((random.randint(0, 3), random.randint(1, prompt)),)
        wanted.append(Request(number, at_s, prompt, output, random.randint(output, most), content=content))
    return rules, wanted


def reference(rules: Rules, wanted: Sequence[Request]) -> list[Job]:
    """The requests as the reference serves them."""
    found = [sequence(request) for request in wanted]
    Server(rules).run(found)
    return found


def strategy(rules: Rules, wanted: Sequence[Request]) -> list[Request]:
    """The requests as the strategy serves them on the simulated machine."""
    schedule = partial(
        continuous_batching,
        blocks=rules.blocks,
        block_tokens=rules.block_tokens,
        token_budget=rules.token_budget,
        max_sequences=rules.max_sequences,
        order=shortest_first if rules.shortest else fcfs,
        prefill=rules.prefill,
        ahead=rules.ahead,
        prefix_caching=rules.prefix_caching,
        reserve=rules.reserve,
        preempted_last=rules.preempted_last,
        state_blocks=rules.state_blocks,
    )
    return serve(schedule, wanted, STEPWISE, price=price).requests


def differences(rules: Rules, wanted: Sequence[Request]) -> list[str]:
    """Where the two do not agree, a line each: none where all is well."""
    found = []
    for theirs, ours in zip(reference(rules, wanted), strategy(rules, wanted), strict=True):
        pairs = {
            "rejected": (theirs.rejected, ours.rejected),
            "scheduled_s": (theirs.scheduled_s, ours.scheduled_s),
            "first_token_s": (theirs.first_token_s, ours.first_token_s),
            "finish_s": (theirs.finish_s, ours.finish_s),
            "preemptions": (theirs.preemptions, ours.preemptions),
            "waited_for_kv": (theirs.found_no_room, ours.waited_for_kv),
            "cached_prompt_tokens": (theirs.from_cache, ours.cached_prompt_tokens),
        }
        for name, (by_reference, by_strategy) in pairs.items():
            never = isnan(by_reference) and isnan(by_strategy)
            if not never and not isclose(by_reference, by_strategy, rel_tol=0.0, abs_tol=ROUNDING_S):
                found.append(f"request {ours.id}: {name} {by_strategy!r}, by the reference {by_reference!r}")
    return found


def main() -> None:
    """Compares the two on many random workloads; exit code 1 where they differ."""
    parser = argparse.ArgumentParser(description="Continuous batching against the step-by-step reference.")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--count", type=int, default=2500, help="how many workloads")
    asked = parser.parse_args()
    wrong = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        rules, wanted = random_workload(seed)
        if found := differences(rules, wanted):
            wrong += 1
            print(f"seed {seed}: {rules}\n  {found[0]} ({len(found)} differences)")
    print(f"{asked.count - wrong} of {asked.count} workloads agree")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
