"""Room for answers to come, without which an engine admits nobody.

    a request is admitted if   blocks of its prompt and its whole answer
                               <= free blocks - sum of blocks to come of requests in prefill
                                              - share * sum of blocks to come of decoding requests
    blocks to come             of what is left of a prompt, and of the answer up to max_tokens, `most_tokens`
                               at most
    share                      falls evenly to `least` within `steps` steps of answers alone; starts anew
                               where the server has been idle; after a preemption it is
                               min(1, (tokens generated + 20 n) / (max_tokens + 1)), sums over the n requests
                               that still decode, falls from there, and does not in that step

With a share of 1 and all tokens counted nobody is ever preempted: TensorRT-LLM's capacity scheduler policy
GUARANTEED_NO_EVICT (documentation, "Scheduler"). A falling share is SGLang's new-token ratio: 0.7, falling to
0.098 within 600 steps, of 4,096 tokens at most (schedule_policy.py, PrefillAdder; schedule_batch.py,
retract_decode; scheduler.py, update_running_batch and what it does when idle).

SGLang does not ask at every step. Once a request has found no room, nobody is admitted before one has ended
or was preempted (batch_is_full in scheduler.py). It forgets so after a step with prompts, unless all prompts
of that step were complete and decoding requests waited meanwhile. With a falling share that is so here too. A
constant share admits nobody between two ends whom it did not admit before: each token takes a block's worth
of what is free, and no more than that of what is to come.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from simcore.schedules.paged_kv import PagedKv
from simcore.workload.requests import Request, blocks_for

# Tokens more that each decoding request is taken to generate after a preemption
# (SGLANG_RETRACT_DECODE_STEPS).
MORE_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Reservation:
    """How much room for answers to come has to stay: see the head of this file. `most_tokens`: of the answer
    of one request; None: its `max_tokens`."""

    share: float
    least: float
    steps: int = 0
    most_tokens: int | None = None


# Of a server that keeps no room, and asks for none.
NO_ROOM_KEPT = Reservation(share=0.0, least=0.0)


@dataclass(slots=True)
class Reserve:
    """The reservation of a server that runs. Its share was `at` in decode
    iteration `since`, later by those in which it does not fall. `full`: a request has found no room, and none
    is tried."""

    rule: Reservation = NO_ROOM_KEPT
    at: float = 0.0
    since: int = 0
    full: bool = False

    def share(self, iteration: int) -> float:
        """Returns the share that counts in a decode iteration."""
        rule = self.rule
        if not rule.steps:
            return rule.share
        fall = (rule.share - rule.least) / rule.steps
        return max(rule.least, self.at - fall * (iteration - self.since))

    def begin(self, iteration: int) -> None:
        """Starts anew, where the server has been idle."""
        self.at, self.since, self.full = self.rule.share, iteration, False

    def refused(self) -> None:
        """Remembers that a request has found no room."""
        self.full = self.rule.steps > 0

    def preempted(self, decoding: Iterable[Request], iteration: int) -> None:
        """Raises the share to what those that still decode say of how long answers are."""
        self.full = False
        if not self.rule.steps:
            return
        generated = most = 0
        for request in decoding:
            generated += request.generated + iteration - request.held + MORE_TOKENS
            most += request.max_tokens
        self.at, self.since = min(1.0, generated / (most + 1)), iteration

    def whole_blocks(self, kv: PagedKv, request: Request) -> int:
        """Returns the blocks of a waiting request's prompt and whole answer, its state included."""
        prompt = request.prompt_tokens + request.generated
        return kv.state + blocks_for(prompt + self._left(request, request.generated), kv.block)

    def room(self, kv: PagedKv, prompts: Iterable[Request], decoding: Iterable[Request]) -> float:
        """Returns how many blocks a new request may have in all."""
        begun = sum([self.whole_blocks(kv, r) - kv.state - blocks_for(r.cached, kv.block) for r in prompts])
        to_come = 0
        for request in decoding:
            ran = kv.iteration - request.held
            cached = request.cached + ran
            end = cached + self._left(request, request.generated + ran)
            to_come += blocks_for(end, kv.block) - blocks_for(cached, kv.block)
        return kv.free - begun - self.share(kv.iteration) * to_come

    def _left(self, request: Request, generated: int) -> int:
        """How many tokens of an answer may still come."""
        left, most = request.max_tokens - generated, self.rule.most_tokens
        return left if most is None else min(left, most)
