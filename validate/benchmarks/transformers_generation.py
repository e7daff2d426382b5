"""Generation by Hugging Face transformers: continuous batching, and batches that wait for their longest.

    continuous     its continuous-batching manager: a paged cache, captured graphs, prompts beside answers
    static         `generate` with a static cache and a compiled decode step: batches of BATCH requests in
                   order of arrival, each padded on the left to its own longest prompt
    static_sorted  the same by length of prompt

    tokens that a static method computes = sum over batches of sequences * the longest answer

The model has the shape of a config file and random weights. Decoding is greedy, and no token ends an answer.
A first run of the same requests (of static: of their first WARM_TOKENS tokens) compiles and captures, and
does not count. What static compiles nevertheless in the run that counts is said in `config`. The package is
no dependency of this project: it is imported when a model is made.
"""

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simcore.input.files import read_json

PACKAGE = "transformers"
BATCH, WARM_TOKENS = 32, 8
# Tokens of a block of the paged cache, and of a step: the package's own defaults. Its scheduler lets no new
# request into the last 15 % of the blocks.
BLOCK_TOKENS, STEP_TOKENS, BLOCKS_IN_USE = 256, 8192, 0.8
# No token has this id, and this one fills the left of a short prompt.
NO_END, PAD = -1, 0

Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests, all there at once: ids of each prompt, and the length of each answer in tokens."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer that a cache for any pair of them has to hold."""
        return max(map(len, self.prompts)) + max(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Timed:
    """A run that counts. `seconds`: from the first request's coming to the last token; `prepared_s`: to
    compile, capture and warm up before; `generated`: tokens of each answer; `config`: settings in words."""

    seconds: float
    prepared_s: float
    generated: tuple[int, ...]
    config: str


def model_of(config: Path, dtype: torch.dtype, device: str) -> Any:
    """Returns a model with the shape of a config file and random weights. Raises the package's errors."""
    package: Any = importlib.import_module(PACKAGE)
    shape = {name: value for name, value in read_json(config).items() if not name.startswith("_")}
    known = package.AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        made = package.AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation="sdpa")
    return made.eval()


def timed(answer: Callable[[], Answers], device: str) -> tuple[Answers, float]:
    """Returns answers, and the seconds until they are all on the host."""
    if device != "cpu":
        torch.cuda.synchronize()
    begun_s = time.perf_counter()
    found = answer()
    return found, time.perf_counter() - begun_s


# -- continuous batching ---------------------------------------------------------------------------------


def continuous(asked: Asked, model: Any) -> Timed:
    """Runs the continuous-batching manager. Attention is FlashAttention if transformers finds it installed,
    else torch's scaled_dot_product_attention over the paged cache. Raises the package's errors."""
    package: Any = importlib.import_module(PACKAGE)
    begun_s = time.perf_counter()
    settings = package.ContinuousBatchingConfig(
        block_size=BLOCK_TOKENS,
        num_blocks=blocks(asked),
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=len(asked.prompts),
        # All prompts differ.
        allow_block_sharing=False,
        use_cuda_graph=True,
    )
    greedy = package.GenerationConfig(do_sample=False, eos_token_id=NO_END, pad_token_id=PAD)
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=settings
    ) as manager:
        _by_manager(manager, asked)
        prepared_s = time.perf_counter() - begun_s
        found, seconds = timed(partial(_by_manager, manager, asked), model.device.type)
        graphs = any(manager.continuous_batching_config.cuda_graph_booleans)
        attention = model.config._attn_implementation
    config = f"{attention}, {'captured graphs' if graphs else 'no graphs'}, {STEP_TOKENS} tokens a step"
    return Timed(seconds, prepared_s, lengths(found, asked, model), config)


def blocks(asked: Asked) -> int:
    """Returns the blocks of a paged cache that holds all requests at once.

    >>> blocks(Asked(((1,) * 256, (1,) * 10), (1, 10)))
    4
    """
    pairs = zip(asked.prompts, asked.output_tokens, strict=True)
    needed = sum(-(-(len(prompt) + output) // BLOCK_TOKENS) for prompt, output in pairs)
    return math.ceil(needed / BLOCKS_IN_USE)


def _by_manager(manager: Any, asked: Asked) -> Answers:
    """Returns the answers of all requests, in their order. Raises RuntimeError if one of them fails."""
    names = [
        manager.add_request(list(prompt), max_new_tokens=output, eos_token_id=NO_END)
        for prompt, output in zip(asked.prompts, asked.output_tokens, strict=True)
    ]
    if None in names:
        raise RuntimeError("the manager takes no requests")
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        one = manager.get_result(timeout=1)
        if one is None:
            if not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        elif one.error is not None:
            raise RuntimeError(one.error)
        elif one.is_finished():
            found[one.request_id] = one.generated_tokens
    return [found[name] for name in names]


# -- static batches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """A static batch. `places`: of its requests; where too few are left, the last one is there again.
    `length`: of the padded prompts; `steps`: tokens of the longest answer."""

    places: tuple[int, ...]
    length: int
    steps: int


def in_batches(asked: Asked, size: int = BATCH, *, by_length: bool = False) -> list[Batch]:
    """Returns all requests in batches of one size.

    >>> in_batches(Asked(((1,), (1, 2, 3), (1, 2)), (4, 5, 6)), 2)
    [Batch(places=(0, 1), length=3, steps=5), Batch(places=(2, 2), length=2, steps=6)]
    >>> in_batches(Asked(((1,), (1, 2, 3), (1, 2)), (4, 5, 6)), 2, by_length=True)
    [Batch(places=(0, 2), length=2, steps=6), Batch(places=(1, 1), length=3, steps=5)]
    """
    long = [len(prompt) for prompt in asked.prompts]
    order = sorted(range(len(long)), key=lambda place: long[place] if by_length else 0)
    size = min(size, len(order))
    found = []
    for first in range(0, len(order), size):
        some = order[first : first + size]
        places = (*some, *some[-1:] * (size - len(some)))
        length = max(long[place] for place in places)
        found.append(Batch(places, length, max(asked.output_tokens[place] for place in places)))
    return found


def padded(asked: Asked, batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    """Returns the ids and the mask of a batch, int64 [sequences, length], padded on the left."""
    rows = [asked.prompts[place] for place in batch.places]
    ids = [[PAD] * (batch.length - len(row)) + list(row) for row in rows]
    mask = [[0] * (batch.length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def static(asked: Asked, model: Any, *, by_length: bool = False, size: int = BATCH) -> Timed:
    """Runs `generate`, batch after batch, with caches of one length. Raises the package's errors."""
    batches = in_batches(asked, size, by_length=by_length)
    inputs = [padded(asked, batch, model.device.type) for batch in batches]
    begun_s = time.perf_counter()
    for batch, one in {
        batch.length: (batch, one) for batch, one in zip(batches, inputs, strict=True)
    }.values():
        _generated(model, one, batch.length, min(WARM_TOKENS, max(asked.output_tokens)), asked.longest)
    prepared_s = time.perf_counter() - begun_s

    def answer() -> Answers:
        found: Answers = [[] for _ in asked.prompts]
        for batch, one in zip(batches, inputs, strict=True):
            rows = _generated(model, one, batch.length, batch.steps, asked.longest)
            for place, row in zip(batch.places, rows, strict=True):
                found[place] = row[: asked.output_tokens[place]]
        return found

    compiled_before = graphs_compiled()
    found, seconds = timed(answer, model.device.type)
    compiled = graphs_compiled() - compiled_before
    computed = sum(len(batch.places) * batch.steps for batch in batches)
    order = "by length of prompt" if by_length else "in order of arrival"
    config = f"{len(batches)} batches of {len(batches[0].places)} {order}, {computed} tokens computed"
    if compiled:
        config += f", {compiled} graphs compiled in it"
    return Timed(seconds, prepared_s, lengths(found, asked, model), config)


def graphs_compiled() -> int:
    """Returns the graphs that torch.compile has made in this process."""
    # Not imported above: that takes a second.
    utils: Any = importlib.import_module("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"])


def _generated(model: Any, one: tuple[Tensor, Tensor], length: int, steps: int, cache_tokens: int) -> Answers:
    """Returns the new tokens of each sequence of a batch."""
    ids, mask = one
    found: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=PAD, max_new_tokens=steps,
        cache_implementation="static", max_cache_len=cache_tokens,
    )  # fmt: skip
    rows: Answers = found[:, length:].tolist()
    return rows


def lengths(found: Answers, asked: Asked, model: Any) -> tuple[int, ...]:
    """Returns the tokens of each answer. Raises ValueError if one has another number of tokens than asked, or
    numbers that are no tokens."""
    vocab = int(model.config.vocab_size)
    for number, (answer, output) in enumerate(zip(found, asked.output_tokens, strict=True)):
        if len(answer) != output:
            raise ValueError(f"request {number} has {len(answer)} tokens, {output} were asked for")
        if not all(0 <= token < vocab for token in answer):
            raise ValueError(f"request {number} has tokens beyond the vocabulary")
    return tuple(map(len, found))


BY_NAME: dict[str, Callable[[Asked, Any], Timed]] = {
    "continuous": continuous,
    "static": static,
    "static_sorted": partial(static, by_length=True),
}
