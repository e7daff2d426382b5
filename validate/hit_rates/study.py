"""The study: prompts of each task and context, decoded at each lambda in both ways, and its rows.

    score = prompts whose whole answer is right / prompts                    with its 95 % interval
    agreement = prompts whose whole output is that of exact attention / prompts
    accepted = (token, layer) pairs whose early result was taken / all pairs, of the decoding itself
    accepted_forced = the same where exact attention decoded: pairs that would be taken

Intervals are Clopper and Pearson's: a binomial share lies in them in 95 % of studies or more.
`accepted_forced` is of the same activations at every lambda, so that it never falls as lambda grows;
`accepted` may fall, as decoding with more early results takes another way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor

from simcore.validate.hit_rates import tasks
from simcore.validate.hit_rates.decoding import (
    Choice,
    Decoded,
    accepted,
    decode,
    dynamic,
    static,
    static_layers,
)
from simcore.validate.hit_rates.network import Network

Row = dict[str, object]
STATIC, DYNAMIC = "static", "dynamic"
RANDOM = "random"
Draw = Callable[[np.random.Generator, int, int], tasks.Prompts]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is studied. `chunk`: tokens at each end that the early part has; `prompts` of each task and
    context; `batch_tokens`: about so many tokens of prompts are computed at once."""

    lambdas: tuple[float, ...]
    contexts: tuple[int, ...]
    chunk: int
    prompts: int
    seed: int
    batch_tokens: int


def draws(net: Network, trained: bool, tokens: int) -> Mapping[str, Draw]:
    """Returns the tasks of a network: those that it was trained on, or ids of its vocabulary, after which
    `tokens` are decoded."""
    if trained:
        return tasks.TASKS
    vocab = net.config.vocab
    return {RANDOM: lambda rng, prompts, context: tasks.random_ids(rng, prompts, context, vocab, tokens)}


def interval(right: int, of: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share by Clopper and Pearson.

    >>> [round(x, 4) for x in interval(0, 10)]
    [0.0, 0.3085]
    """
    found = binomtest(right, of).proportion_ci(0.95, "exact")
    return float(found.low), float(found.high)


def _decoded(net: Network, prompts: tasks.Prompts, choices: list[Choice], asked: Asked) -> list[Decoded]:
    ids = torch.from_numpy(prompts.ids)
    batch = max(1, asked.batch_tokens // ids.shape[1])
    return decode(net, ids, prompts.tokens, asked.chunk, choices, batch)


def rows(net: Network, given: Mapping[str, Draw], asked: Asked) -> Iterator[Row]:
    """Yields a row for each context, task, way and lambda. Static layers of a context are chosen by the first
    task, at prompts of their own."""
    lambdas = asked.lambdas
    for context in asked.contexts:
        first = next(iter(given.values()))
        own = first(tasks.generator(asked.seed, tasks.CHOOSING, context), asked.prompts, context)
        ways = [dynamic(each) for each in lambdas]
        layers = [static_layers(each.early) for each in _decoded(net, own, ways, asked)]
        for number, (task, draw) in enumerate(given.items()):
            rng = tasks.generator(asked.seed, tasks.HELD_OUT, context, number)
            prompts = draw(rng, asked.prompts, context)
            choices = [dynamic(0.0), *ways, *map(static, layers)]
            exact, *found = _decoded(net, prompts, choices, asked)
            modes = [(mode, each) for mode in (DYNAMIC, STATIC) for each in lambdas]
            for (mode, threshold), one in zip(modes, found, strict=True):
                chosen = layers[lambdas.index(threshold)] if mode == STATIC else None
                yield {
                    "lambda": threshold,
                    "mode": mode,
                    "context": context,
                    "task": task,
                    **_figures(one, exact, prompts, threshold, chosen),
                }


def _figures(
    found: Decoded, exact: Decoded, prompts: tasks.Prompts, threshold: float, chosen: frozenset[int] | None
) -> Row:
    count, tokens, layers = found.early.shape
    score: Row = {"score": "", "score_low": "", "score_high": "", "exact_score": ""}
    if prompts.answers is not None:
        answers = torch.from_numpy(prompts.answers).to(found.ids.device)
        right, exact_right = (_same(each.ids, answers) for each in (found, exact))
        low, high = interval(right, count)
        score = {
            "score": right / count,
            "score_low": low,
            "score_high": high,
            "exact_score": exact_right / count,
        }
    if chosen is None:
        forced = float(accepted(exact.norms, threshold).double().mean())
    else:
        forced = len(chosen) / layers
    shares = found.early.double().mean((0, 1)).tolist()
    return {
        **score,
        "agreement": _same(found.ids, exact.ids) / count,
        "accepted": float(found.early.double().mean()),
        "accepted_forced": forced,
        **{f"layer_{layer}": share for layer, share in enumerate(shares)},
        "n": count,
        "tokens": tokens,
    }


def _same(ids: Tensor, others: Tensor) -> int:
    return int((ids == others).all(1).sum())


def worst_exact(found: Sequence[Row]) -> Row | None:
    """Returns the row whose task exact attention solves least, None if no task has a score."""
    scored = [row for row in found if row["exact_score"] != ""]
    return min(scored, key=lambda row: float(str(row["exact_score"])), default=None)


def broken_laws(found: Sequence[Row]) -> list[str]:
    """Returns what must not be: accepted pairs at lambda 0, another output there than that of exact
    attention, shares of the same activations that fall as lambda grows."""
    wrong = []
    for row in found:
        where = f"{row['task']} at context {row['context']}, {row['mode']}"
        if row["lambda"] == 0 and (row["accepted"], row["agreement"], row["score"]) != (
            0.0,
            1.0,
            row["exact_score"],
        ):
            wrong.append(f"{where}: lambda 0 is not exact attention")
    kinds = {(row["task"], row["context"]) for row in found}
    for task, context in sorted(kinds, key=str):
        own = [r for r in found if (r["task"], r["context"], r["mode"]) == (task, context, DYNAMIC)]
        own.sort(key=lambda row: float(str(row["lambda"])))
        shares = [float(str(row["accepted_forced"])) for row in own]
        if shares != sorted(shares):
            wrong.append(f"{task} at context {context}: accepted shares fall as lambda grows")
    return wrong
