"""Concurrent instances: each request runs alone, beside the others, on the same weights.

    instance i   stream "context (i mod prompt_streams)": the prompt;
                 stream "instance i": then one decode burst with a batch of one

As FasterTransformer behind Triton does it (Flover, Yao et al. 2023, Figure 1 (b)). Instances that run at the
same time share the device as the machine models it; beyond `max_instances`, requests wait, first come first
served. There each instance computes its prompt on its own stream (here: `prompt_streams` None). But one
prompt fills a device: beside each other all of them end late, one after another the first ends early.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from simcore.machine.machine import Machine, Program, Ticket
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.dynamic_batching import run_to_end
from simcore.schedules.host_calls import Caller
from simcore.schedules.temporal_fusion import context_stream
from simcore.workload.requests import END, REQUESTS, Journal, Request


def instance_stream(number: int) -> str:
    """The stream of an instance."""
    return f"instance {number}"


@dataclass(slots=True)
class _Pool:
    """The instances, by number: `free`: a heap of idle ones; `waiting`: the requests in order;
    `host`: what calls the ops of prompts."""

    prompt_streams: int | None
    free: list[int]
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[int, Ticket] = field(default_factory=dict)
    host: Caller = field(default_factory=Caller)

    def levels(self) -> tuple[int, int]:
        """The numbers of waiting requests and of running instances."""
        return len(self.waiting), len(self.running)


def concurrent_instances(
    m: Machine,
    model: ServedDecoder,
    journal: Journal,
    *,
    max_instances: int,
    prompt_streams: int | None = 1,
    slot_tokens: int | None = None,
) -> Program:
    """Serves the requests of the inbox until END. `prompt_streams`: streams that compute prompts, each one
    after another; None: each instance its own. `slot_tokens`: tokens in the KV cache of one instance; None:
    no limit."""
    pool = _Pool(prompt_streams, list(range(max_instances)))
    while (item := (yield m.recv(REQUESTS))) != END:
        assert isinstance(item, Request)
        if slot_tokens is not None and item.prompt_tokens + item.max_tokens > slot_tokens:
            item.instance = m.rank
            journal.reject(item, m.now())
            continue
        pool.waiting.append(item)
        if pool.free:
            number = heappop(pool.free)
            pool.running[number] = m.spawn(_instance(m, model, journal, pool, number))
    while pool.running:
        yield m.wait(*pool.running.values())


def _instance(m: Machine, model: ServedDecoder, journal: Journal, pool: _Pool, number: int) -> Program:
    """Serves requests from the queue, one after another, until none waits."""
    while pool.waiting:
        request = pool.waiting.popleft()
        own = instance_stream(number)
        prompts = own if pool.prompt_streams is None else context_stream(number % pool.prompt_streams)
        yield from run_to_end(m, model, journal, [request], pool.levels, pool.host, own, prompts)
    del pool.running[number]
    heappush(pool.free, number)
