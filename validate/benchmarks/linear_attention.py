"""Benchmarks of causal linear attention beside flash-linear-attention: sequences, and one token.

    out_i = q_i S_i,  S_i = gamma S_(i-1) + k_i^T v_i       bytes: q, k, v read, out written, each number once
    one token                                              bytes: the state read and written

bf16 with states in fp32, 32 heads of 128, one decay for each head. Sequences from 2048 tokens on also get
decays close to 1: a kernel may skip rows that a state has forgotten, and then there are none. All get
[batch, length, heads, 128], flash-linear-attention's own layout.
"""

import gc
import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from simcore.kernels.linear_attention.api import causal_linear_attention
from simcore.kernels.linear_attention.triton_chunked import chunked_linear_attention
from simcore.kernels.linear_attention.triton_step import linear_attention_step
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import Compared, Goal, called
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import Bench, Trial, Way, compare, say
from simcore.validate.benchmarks.timing import capture, one_line, replayed, version_of

HEADS, WIDTH = 32, 128
FASTER, STEP_FASTER, STEP_SHARE = 1.8, 1.15, 0.85
ERROR_BAR = 1e-2
# Longer sequences are computed head by head, because all heads in float64 would not fit into memory.
LONGEST_TOGETHER = 1 << 17
COPIED_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of one length; decays lie between `least_decay` and 1."""

    batch: int
    length: int
    least_decay: float = 0.9
    op: ClassVar[str] = "linear_attention"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "heads": HEADS, "rank": WIDTH, "dim": WIDTH, "dtype": "bf16"}

    @property
    def hbm_bytes(self) -> int:
        """q, k, v and out, bf16."""
        return 4 * 2 * self.batch * self.length * HEADS * WIDTH

    def __str__(self) -> str:
        close = "" if self.least_decay <= 0.9 else f", decays from {self.least_decay}"
        return f"{self.batch} x {self.length}{close}"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of each of several sequences."""

    batch: int
    op: ClassVar[str] = "linear_attention_step"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "heads": HEADS, "rank": WIDTH, "dim": WIDTH, "dtype": "bf16"}

    @property
    def hbm_bytes(self) -> int:
        """The state in fp32, read and written, and q, k, v and out."""
        return self.batch * HEADS * WIDTH * (2 * 4 * WIDTH + 4 * 2)

    def __str__(self) -> str:
        return f"one token of {self.batch}"


# A state of 100,000 tokens still includes all of them: 0.99999^100000 is above 2^-2.
LASTING = 0.99999
SHORT, LONG = (64, 128, 512), ((1, 100000), (1, 32768), (1, 8192), (1, 2048), (16, 2048))
SEQUENCES = (
    *(Sequences(1, n) for n in SHORT),
    *(Sequences(*size, least) for size in LONG for least in (0.9, LASTING)),
)
TOKENS = tuple(Token(batch) for batch in (1, 16, 64))


class Operands(NamedTuple):
    """q, k, v, out [batch, length, heads, width]; decay [heads]; for one token also its state, fp32 [batch,
    heads, width, width], and the state before."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    decay: Tensor
    state: Tensor
    before: Tensor


def drawn(
    batch: int, length: int, generator: torch.Generator, *, with_state: bool, least_decay: float = 0.9
) -> Operands:
    """Returns random numbers; keys are scaled so that outputs keep their size."""
    device = generator.device

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    q, k, v = (normal(batch, length, HEADS, WIDTH) for _ in range(3))
    decay = 1.0 - (1.0 - least_decay) * torch.rand(HEADS, generator=generator, device=device)
    before = normal(batch if with_state else 0, HEADS, WIDTH, WIDTH)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k * WIDTH**-0.5, v))
    out = torch.empty(batch, length, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    return Operands(q, k, v, out, decay, before.clone(), before)


def truth(one: Operands) -> Tensor:
    """Returns the result in float64: [batch, length, heads, width]."""
    state = one.before if len(one.before) else None
    each = HEADS if one.q.shape[1] <= LONGEST_TOGETHER else 1
    found = []
    for first in range(0, HEADS, each):
        some = slice(first, first + each)
        q, k, v = (x[:, :, some].transpose(1, 2).double() for x in one[:3])
        given = None if state is None else state[:, some].double()
        out, _ = causal_linear_attention(q, k, v, one.decay[some].double(), "block_based", given)
        found.append(out.transpose(1, 2))
    return torch.cat(found, 2)


def own_sequences(one: Operands) -> Tensor:
    """Runs our kernel for sequences, by chunks."""
    q, k, v, out = (x.transpose(1, 2) for x in one[:4])
    chunked_linear_attention(q, k, v, one.decay, out=out)
    return one.out


def own_token(one: Operands) -> Tensor:
    """Runs our kernel for one token."""
    linear_attention_step(one.q[:, 0], one.k[:, 0], one.v[:, 0], one.state, one.decay, out=one.out[:, 0])
    return one.out


def fla(name: str) -> Callable[..., Any]:
    """Returns a function of flash-linear-attention. Raises ImportError if it does not exist."""
    found: Callable[..., Any] = getattr(importlib.import_module("fla.ops.simple_gla"), name)
    return found


def tune_again() -> None:
    """Makes flash-linear-attention choose its layouts anew for the next shape. Its autotuners ignore a
    sequence's length and keep the fastest layout of the first shape: tuned on 64 tokens, it once took 1.4
    times as long for 32768 on an H200."""
    with suppress(ImportError, AttributeError):
        fla("chunk_simple_gla")
    for found in gc.get_objects():
        if issubclass(type(found), Autotuner):
            found.cache.clear()
            found.cache_results = False


def fla_ways(sets: Sequence[Operands], names: Sequence[str]) -> Iterator[Way]:
    """Yields the functions of flash-linear-attention that exist here."""
    version = f"fla {version_of('fla-core')}"
    for name in names:
        try:
            run = fla(name)
        except (ImportError, AttributeError) as error:
            say(f"fla {name}: {one_line(error)}")
            continue
        calls = [partial(_fla_call, run, one, one.decay.log()) for one in sets]
        yield Way(f"fla {name}", [Candidate("", calls)], version=version)


def _fla_call(run: Callable[..., Any], one: Operands, log_decay: Tensor) -> Tensor:
    options: dict[str, Any] = {"g_gamma": log_decay, "scale": 1.0, "output_final_state": True}
    if len(one.state):
        options["initial_state"] = one.state
    out: Tensor = run(one.q, one.k, one.v, **options)[0]
    return out


def _compared(
    of: Sequences | Token, sets: Sequence[Operands], ours: Way, theirs: Iterable[Way], bench: Bench
) -> Compared:
    def poison() -> None:
        for one in sets:
            one.out.fill_(math.nan)
            one.state.copy_(one.before)

    truths = [truth(sets[0]), truth(sets[-1])]
    return compare(of, Trial([ours, *theirs], truths, poison, len(sets), of.hbm_bytes), bench)


def _after(one: Operands, tokens: int) -> Tensor:
    """Returns the output of the last of `tokens` equal tokens in float64, because our kernel updates its
    state in place."""
    q, k, v = (x.expand(-1, tokens, -1, -1).transpose(1, 2).double() for x in one[:3])
    out, _ = causal_linear_attention(q, k, v, one.decay.double(), "block_based", one.before.double())
    return out[:, :, -1:].transpose(1, 2)


def sequences_case(of: Sequences, bench: Bench) -> Compared:
    """Runs a case of whole sequences."""
    tune_again()
    draw = partial(drawn, of.batch, of.length, with_state=False, least_decay=of.least_decay)
    sets = bench.rotated(draw, of.hbm_bytes)
    ours = Way("chunked", [Candidate("", [partial(own_sequences, one) for one in sets])], ERROR_BAR)
    theirs = fla_ways(sets, ("chunk_simple_gla", "fused_chunk_simple_gla"))
    return _compared(of, sets, ours, theirs, bench)


def token_case(of: Token, bench: Bench) -> Compared:
    """Runs a case of one token."""
    tune_again()
    sets = bench.rotated(partial(drawn, of.batch, 1, with_state=True), of.hbm_bytes)
    in_graph = _after(sets[-1], cases.calls_of(len(sets)) // len(sets))
    calls = [partial(own_token, one) for one in sets]
    ours = Way("step", [Candidate("", calls)], ERROR_BAR, in_graph=in_graph)
    return _compared(of, sets, ours, fla_ways(sets, ("fused_recurrent_simple_gla",)), bench)


def _is_long(one: Compared, *, lasting: bool) -> bool:
    of = one.ours.shape
    return int(str(of["length"])) >= 2048 and (of["least_decay"] == LASTING) is lasting


def copied_share(one: Compared) -> float | None:
    """Returns our share of torch's copy bandwidth; a state is read and written in equal parts."""
    return one.ours.hbm_bytes / one.ours.median_s / copied_bytes_per_s() if one.ours.median_s else None


_FAST = f"sequences from 2048 tokens on {FASTER} times as fast as fla"
SEQUENCE_GOALS = (
    Goal(_FAST, of=partial(_is_long, lasting=False), least=FASTER),
    Goal(f"{_FAST}, decays from {LASTING}", of=partial(_is_long, lasting=True), least=FASTER),
    Goal("no sequence slower than fla", least=1.0),
)
TOKEN_GOALS = (
    Goal(f"one token {STEP_FASTER} times as fast as fla", least=STEP_FASTER),
    Goal(
        f"{TOKENS[-1]} at {100 * STEP_SHARE:.0f} % of bandwidth, as copied", copied_share,
        called(str(TOKENS[-1])), ".1%", least=STEP_SHARE,
    ),
)  # fmt: skip


def copied_bytes_per_s() -> float:
    """Returns the bytes that torch reads and writes in a second, far beyond the L2 cache: by a copy or by a
    kernel that flips signs, whichever is faster."""
    x = torch.zeros(COPIED_BYTES // 4, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    ways = (lambda: y.copy_(x), lambda: torch.neg(x, out=y))
    seconds = min(statistics.median(replayed(capture([way] * 4), 4)) for way in ways)
    return 2 * COPIED_BYTES / seconds
