"""Room for answers to come, without which an engine admits nobody.

    a request is admitted if   blocks of its prompt and its whole answer
                               <= free blocks - sum of blocks to come of requests in prefill
                                              - share * sum of blocks to come of decoding requests
    blocks to come             of what is left of a prompt, and of the answer up to max_tokens, `most_tokens`
                               at most
    share                      falls evenly to `least` within `steps` decode steps, anew where nobody runs;
                               after a preemption it is min(1, (tokens generated + 20 n) / (max_tokens + 1)),
                               sums over the n requests that still decode, and falls from there

With a share of 1 nobody is ever preempted: TensorRT-LLM's capacity scheduler policy GUARANTEED_NO_EVICT
(documentation, "Scheduler"). A falling share is SGLang's new-token ratio (schedule_policy.py, PrefillAdder;
schedule_batch.py, retract_decode): 0.7, falling to 0.098 within 600 steps, of 4,096 tokens at most.

A constant share admits nobody between two ends of requests whom it did not admit before: each token takes a
block's worth of what is free, and no more than that of what is to come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simcore.schedules.paged_kv import PagedKv
from simcore.workload.requests import Request, blocks_for

# Tokens more that each decoding request is taken to generate after a preemption
# (SGLANG_RETRACT_DECODE_STEPS).
MORE_STEPS = 20


@dataclass(frozen=True, slots=True)
class Reservation:
    """How much room for answers to come has to stay: see the head of this file. `most_tokens`: of the answer
    of one request; None: its `max_tokens`."""

    share: float
    least: float
    steps: int = 0
    most_tokens: int | None = None


@dataclass(slots=True)
class Reserve:
    """The reservation of a server that runs: its share was `at` in decode iteration `since`."""

    rule: Reservation
    at: float
    since: int = 0

    def share(self, iteration: int) -> float:
        """Returns the share that counts in a decode iteration."""
        rule = self.rule
        if not rule.steps:
            return rule.share
        fall = (rule.share - rule.least) / rule.steps
        return max(rule.least, self.at - fall * (iteration - self.since))

    def falls(self, iteration: int) -> bool:
        """Whether the share will be less in a later iteration."""
        return self.share(iteration) > self.rule.least

    def begin(self, iteration: int) -> None:
        """Starts anew, where nobody runs."""
        self.at, self.since = self.rule.share, iteration

    def preempted(self, decoding: Iterable[Request], iteration: int) -> None:
        """Raises the share to what those that still decode say of how long answers are."""
        if not self.rule.steps:
            return
        generated = most = 0
        for request in decoding:
            generated += request.generated + iteration - request.held + MORE_STEPS
            most += request.max_tokens
        self.at, self.since = min(1.0, generated / (most + 1)), iteration

    def whole_blocks(self, kv: PagedKv, request: Request) -> int:
        """Returns the blocks of a waiting request's prompt and whole answer, its state included."""
        prompt = request.prompt_tokens + request.generated
        return kv.state + blocks_for(prompt + self._left(request, request.generated), kv.block)

    def room(self, kv: PagedKv, prompts: Iterable[Request], decoding: Iterable[Request]) -> float:
        """Returns how many blocks a new request may have in all."""
        to_come = self._to_come(kv, decoding, 0)
        return kv.free - self._begun(kv, prompts) - self.share(kv.iteration) * to_come

    def steps_to_room(
        self, kv: PagedKv, prompts: Iterable[Request], decoding: Sequence[Request], blocks: int, most: int
    ) -> int:
        """Returns after how many decode steps a request may have so many blocks, which it may not have now;
        `most` if not before. All decode so long."""
        free, now, to_come = kv.free - self._begun(kv, prompts), kv.iteration, self._to_come(kv, decoding, 0)
        cut = self.rule.most_tokens
        is_cut = cut is not None and any(r.max_tokens - r.generated - now + r.held > cut for r in decoding)
        for steps in range(1, most):
            taken = kv.needed(steps)
            left = self._to_come(kv, decoding, steps) if is_cut else to_come - taken
            if blocks <= free - taken - self.share(now + steps) * left:
                return steps
        return most

    def _begun(self, kv: PagedKv, prompts: Iterable[Request]) -> int:
        """Returns the blocks to come of requests in prefill."""
        return sum([self.whole_blocks(kv, r) - kv.state - blocks_for(r.cached, kv.block) for r in prompts])

    def _to_come(self, kv: PagedKv, decoding: Iterable[Request], steps: int) -> int:
        """Returns the blocks to come of decoding requests, so many decode steps from now."""
        found = 0
        for request in decoding:
            ran = kv.iteration + steps - request.held
            cached = request.cached + ran
            end = cached + self._left(request, request.generated + ran)
            found += blocks_for(end, kv.block) - blocks_for(cached, kv.block)
        return found

    def _left(self, request: Request, generated: int) -> int:
        """How many tokens of an answer may still come."""
        left, most = request.max_tokens - generated, self.rule.most_tokens
        return left if most is None else min(left, most)
