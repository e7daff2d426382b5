"""What a serving engine takes besides the profile's op times: its host, its kernels, its way to and from
clients.

    a step takes       the time of its ops + step_s + sequence_s * sequences that get a token in it; with
                       prompts it waits for the calls of its ops too, call_s each (`schedules/host_calls.py`)
    an op takes        the profile's time (of a product that `products_of` knows, that engine's) * a factor,
                       never less than the datasheet's bound:
                           collective_factor if several ranks meet in it, arithmetic_factor if arithmetic
                           bounds it by the datasheet, else memory_factor
    a request enters   the engine when the front end is through with it. Requests pass it one by one, in the
                       order in which they come to their server:
                           through = max(arrival, when the one before is through) + request_s
                                     + prompt_token_s * tokens of its prompt
                           entry   = through + prompt_token_late_s * tokens of its prompt
    a token leaves     for its client when the way out is through with it (detokenising, streaming, the
                       client's own reading). Tokens of a server pass it one by one, step by step:
                           backlog after a step = max(0, backlog before - time of the step)
                                                  + answer_token_s * tokens of the step
                       A token of the step is late by that backlog, less half of what the step's own tokens
                       take: its mean place among them.

The front end is what stands between a client and the engine's queue: HTTP, templates, tokenising, sending to
the engine's process. Its time is part of TTFT. It runs beside the engine's steps, as a process of its own
does, so it makes no step longer. What it does for several requests at once, in threads of its own, makes each
of them late and keeps no other waiting: `prompt_token_late_s`. The way out makes no step longer either, but a
client sends its next request only after the last token of its answer: a way out that is saturated keeps
sequences out of the engine.

The factors are for kernels that are not those of the profile: libraries of one engine and version are faster
or slower than others on the same card. Where an engine's op times are public, `products_of` takes its
products by their rows (`engines/products.py`). `quantizes` names the products before which an engine launches
a kernel more.

A step of prompts alone has one sequence at least. Instances that share a device share its host too: their
steps wait for each other's host time as for each other's ops.

A call is of one of the engine's modules: a product and the rounding of its inputs to 8 bits are one
(TensorRT-LLM, tensorrt_llm/_torch/modules/linear.py). Calls run beside the card.

Every cost is 0 unless a scenario, or the file of an engine, states it: nobody publishes them, and they belong
to a version of an engine on some machine. `simcore calibrate --from` fits them to runs of one's own.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol, get_args

from pydantic import Field, field_validator

from simcore.input.fields import Strict
from simcore.models.decoder import MATRICES, Dtypes, Quantized, quantized_of
from simcore.ops.op import Floor, Op, Price, Pricer, Roofline, Size, Work
from simcore.sim.simulation import Route
from simcore.studies.serving.engines.products import Measured, by_engine, formats_measured
from simcore.workload.requests import STEP, Journal, Request

# The kind of the op that stands for the host's part of a step. Its costs are whole nanoseconds in its shape,
# so that prices kept by op and shape hold whichever host they were made for.
HOST_STEP = "host_step"
NS = 1e-9
# The entries of an op's shape that say by how much an engine's kernels differ, in whole PARTS of the factor.
# The last says whose kernels products are: a place in `MEASURED`, counted from 1, or 0 for the profile's.
BY_ARITHMETIC, BY_MEMORY, BY_MEETING = "arithmetic_parts", "memory_parts", "collective_parts"
KERNELS_OF = "kernels_of"
MEASURED = get_args(Measured)
PARTS = 1e-6
MARKS = 4
# Prices that are kept for other factors.
MOST_KNOWN = 1 << 16
# Fields that say which kernels an engine has; all others are numbers.
KERNELS = ("products_of", "quantizes")
# No host takes longer for any of them.
MOST_S = 1e3
Cost = Annotated[float, Field(ge=0.0, le=MOST_S)]
# What is off by more than ten times is no prediction.
Share = Annotated[float, Field(ge=0.0, le=10.0)]
# No library of kernels is ten times faster or slower.
Factor = Annotated[float, Field(ge=0.1, le=10.0)]


class HostTime(Strict):
    """What an engine takes beyond the device profile: seconds of its host, and factors of its op times."""

    step_s: Cost = Field(default=0.0, description="added to each step, s")
    sequence_s: Cost = Field(
        default=0.0, description="added to a step for each sequence that gets a token in it, s"
    )
    call_s: Cost = Field(
        default=0.0,
        description="for which the host calls each op of a step with prompts, beside the card, s",
    )
    request_s: Cost = Field(
        default=0.0, description="for which a request occupies its server's serial front end, s"
    )
    prompt_token_s: Cost = Field(
        default=0.0, description="for which each token of its prompt does, as tokenising it takes, s"
    )
    prompt_token_late_s: Cost = Field(
        default=0.0, description="by which each token of its prompt makes a request late, beside others, s"
    )
    answer_token_s: Cost = Field(
        default=0.0, description="for which each token of an answer occupies its server's way out, s"
    )
    arithmetic_factor: Factor = Field(
        default=1.0, description="times of ops that arithmetic bounds, as multiples of the profile's"
    )
    memory_factor: Factor = Field(
        default=1.0, description="times of other ops of one rank, as multiples of the profile's"
    )
    collective_factor: Factor = Field(
        default=1.0, description="times of ops in which several ranks meet, as multiples of the profile's"
    )

    products_of: Measured | None = Field(
        default=None, description="the engine whose kernels products are, where its op times are public"
    )
    quantizes: tuple[Quantized, ...] = Field(
        default=(),
        # A list of YAML becomes a tuple, so that a host can be a key.
        strict=False,
        description="products of 8 bits whose inputs a kernel of its own makes; of others the op before does",
    )

    @field_validator("quantizes")
    @classmethod
    def _in_order(cls, names: tuple[Quantized, ...]) -> tuple[Quantized, ...]:
        """Each name once, as a layer has them."""
        return tuple(name for name in get_args(Quantized) if name in names)

    tpot_within: Share = Field(
        default=0.0,
        description="share of TPOT within which 90 % of runs are of their prediction, 0 if unknown",
    )
    ttft_within: Share = Field(default=0.0, description="the same of TTFT")

    @property
    def in_steps(self) -> bool:
        """Whether it makes every step longer."""
        return bool(self.step_s or self.sequence_s)

    @property
    def in_front(self) -> bool:
        """Whether requests pass a front end that takes time."""
        return bool(self.request_s or self.prompt_token_s or self.prompt_token_late_s)

    @property
    def of_steps(self) -> "HostTime":
        """What of it makes steps longer or shorter, alone."""
        others = ("request_s", "prompt_token_s", "prompt_token_late_s", "answer_token_s")
        return self.model_copy(update=dict.fromkeys((*others, "tpot_within", "ttft_within"), 0.0))

    @property
    def numbers(self) -> dict[str, float]:
        """All of it that is measured, by name."""
        return {name: value for name, value in self if isinstance(value, float)}

    def in_formats(self, dtypes: Dtypes) -> "HostTime":
        """Returns what of it matters to a model in these number formats: kernels that it does not launch are
        left out."""
        theirs = {dtypes.of(matrix) for matrix in MATRICES} & formats_measured(self.products_of)
        kernels = {
            "products_of": self.products_of if theirs else None,
            "quantizes": quantized_of(dtypes, self.quantizes),
        }
        return self.model_copy(update=kernels)

    @property
    def _factors(self) -> tuple[float, float, float]:
        return self.arithmetic_factor, self.memory_factor, self.collective_factor

    @property
    def marks(self) -> tuple[tuple[str, int], ...]:
        """What the shape of each op of a model gets, by which `with_engine` knows the factors; nothing if
        all are 1."""
        if {*self._factors} == {1.0} and self.products_of is None:
            return ()
        names = (BY_ARITHMETIC, BY_MEMORY, BY_MEETING)
        parts = [(name, round(factor / PARTS)) for name, factor in zip(names, self._factors, strict=True)]
        own = 0 if self.products_of is None else 1 + MEASURED.index(self.products_of)
        return (*parts, (KERNELS_OF, own))

    def within(self, figure: str) -> float:
        """Returns the share within which 90 % of runs are of the prediction of a figure."""
        return {"tpot": self.tpot_within, "ttft": self.ttft_within}.get(figure.partition("_")[0], 0.0)

    def front_s(self, request: Request) -> float:
        """Seconds for which a request occupies the front end."""
        return self.request_s + self.prompt_token_s * request.prompt_tokens

    def late_s(self, request: Request) -> float:
        """Seconds by which a request is late that the front end is through with."""
        return self.prompt_token_late_s * request.prompt_tokens

    def ops(self, sequences: Size) -> tuple[Op, ...]:
        """Returns what the host adds to a step's graph; nothing if it takes no time."""
        if not self.in_steps:
            return ()
        costs = (("step_ns", round(self.step_s / NS)), ("sequence_ns", round(self.sequence_s / NS)))
        return (Op(HOST_STEP, HOST_STEP, (("sequences", sequences), *costs), "", _no_work),)

    def __str__(self) -> str:
        request_ms, token_us = 1e3 * self.request_s, 1e6 * self.prompt_token_s
        step_ms, sequence_us = 1e3 * self.step_s, 1e6 * self.sequence_s
        late_us = 1e6 * self.prompt_token_late_s
        front = f"front end {request_ms:.4g} ms a request + {token_us:.4g} us a token"
        front += f", {late_us:.4g} us a token beside others" if late_us else ""
        steps = f"host {step_ms:.4g} ms a step + {sequence_us:.4g} us a sequence"
        out = f"way out {1e6 * self.answer_token_s:.4g} us a token"
        theirs = f"products of {self.products_of}"
        ops = f"ops x {self.arithmetic_factor:.4g} (arithmetic), x {self.memory_factor:.4g} (memory)"
        ops += f", x {self.collective_factor:.4g} (collectives)"
        called = f"host calls ops of prompts in {1e6 * self.call_s:.4g} us each"
        parts = [steps] * self.in_steps + [called] * bool(self.call_s)
        parts += [front] * self.in_front + [out] * bool(self.answer_token_s)
        own = f"quantizes {', '.join(self.quantizes)}"
        parts += [ops] * ({*self._factors} != {1.0}) + [theirs] * bool(self.products_of)
        return ", ".join(parts + [own] * bool(self.quantizes)) or "no host time"


NO_HOST_TIME = HostTime()


def _no_work(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def with_engine(price: Pricer, roofline: Roofline) -> Pricer:
    """Returns prices that know the op HOST_STEP too, by the costs in its shape, and ops with `marks`, by the
    factors and the kernels in theirs."""

    plain: dict[Op, tuple[Price, float, str, float]] = {}

    def priced(op: Op) -> Price:
        if op.kind == HOST_STEP:
            seconds = NS * (op["step_ns"] + op["sequence_ns"] * op["sequences"])
            return Price(seconds, seconds, seconds, "assumed", "the engine's host, as its fields say")
        if len(op.shape) < MARKS or op.shape[-MARKS][0] != BY_ARITHMETIC:
            return price(op)
        unmarked = Op(op.kind, op.name, op.shape[:-MARKS], op.dtype, op.formula, op.axis, op.parts, op.place)
        if unmarked not in plain:
            if len(plain) >= MOST_KNOWN:
                plain.clear()
            plain[unmarked] = _bounded(unmarked, price(unmarked), roofline(unmarked))
        found, least, by, bound_s = plain[unmarked]
        factor, own = PARTS * op[by], op[KERNELS_OF]
        theirs = by_engine(MEASURED[own - 1], unmarked, found) if own else found
        least = least * found.seconds / theirs.seconds if theirs.seconds else factor
        there = theirs.times(max(factor, least))
        lowest_s = min(bound_s, there.seconds)
        return there if there.low_s >= lowest_s else replace(there, low_s=lowest_s)

    return priced


def _bounded(op: Op, price: Price, floor: Floor) -> tuple[Price, float, str, float]:
    """Returns a price, the least factor that leaves it above the datasheet's bound (1 if it is below it
    already), the entry of the shape with the factor of its engine, and the bound in seconds."""
    bound = floor.of(price)
    least = min(1.0, bound.seconds / price.seconds) if price.seconds > 0.0 else 1.0
    if op.ranks > 1:
        return price, least, BY_MEETING, bound.seconds
    by = BY_ARITHMETIC if bound.compute_s > bound.memory_s else BY_MEMORY
    return price, least, by, bound.seconds


# -- the front end -----------------------------------------------------------------------------------------


class Feeder(Protocol):
    """The part of a `Run` that takes requests."""

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times; see `Run`."""


@dataclass(slots=True, eq=False)
class FrontEnds:
    """A run whose requests pass the front ends of their servers, a `Feeder`. `hosts`: by the rank that takes
    a server's requests; `entered_s`: when each request leaves its front end, in the order of arrival;
    `free_s`: when each rank's front end is through with what has come; `last_s`: when the last of it enters.

    Requests keep their places in the line, but for those that are late; the end of all comes after all.
    """

    run: Feeder
    hosts: Mapping[int, HostTime]
    entered_s: list[float] = field(default_factory=list)
    free_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into the inboxes of servers, behind their front ends; see `Run`."""
        at_s = 0.0

        def coming() -> Iterator[tuple[float, object]]:
            nonlocal at_s
            for arrival in arrivals:
                at_s = arrival[0]
                yield arrival

        def passing(item: object) -> Sequence[int]:
            # Called when an item comes, before the next one is asked for: `at_s` is its time.
            for rank in (to,) if isinstance(to, int) else to(item):
                self.run.feed(rank, inbox, [(self._enters_s(rank, item, at_s), item)])
            return ()

        self.run.feed(passing, inbox, coming())

    def _enters_s(self, rank: int, item: object, at_s: float) -> float:
        """Returns when an item that comes at `at_s` leaves the front end of its server."""
        if not isinstance(item, Request):
            return max(at_s, self.last_s.get(rank, 0.0))
        host = self.hosts[rank]
        self.free_s[rank] = max(at_s, self.free_s.get(rank, 0.0)) + host.front_s(item)
        entry_s = self.free_s[rank] + host.late_s(item)
        self.last_s[rank] = max(entry_s, self.last_s.get(rank, 0.0))
        self.entered_s.append(entry_s)
        return entry_s


# -- the way out -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _WayOut:
    """The way out of one server. `ends_s`, `late_s`: of its steps so far, when each ended and how late its
    tokens were; `backlog_s`: after the last of them."""

    token_s: float
    ends_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    backlog_s: float = 0.0
    ended_s: float = 0.0

    def step(self, start_s: float, end_s: float, replays: int, tokens: float) -> None:
        """Sends the tokens of `replays` steps alike, `tokens` of each, that end at `end_s`."""
        waited_s = max(0.0, self.backlog_s - max(0.0, start_s - self.ended_s))
        each_s, work_s = (end_s - start_s) / replays, self.token_s * tokens
        # The longest of: never idle since then, or idle before the first or before the last of the steps.
        more_s = work_s - each_s
        self.backlog_s = max(waited_s + replays * more_s, work_s + max(0.0, (replays - 1) * more_s))
        self.ended_s = end_s
        self.ends_s.append(end_s)
        self.late_s.append(self.backlog_s - (work_s - self.token_s) / 2.0 if tokens else self.backlog_s)

    def late(self, at_s: float) -> float:
        """How late the tokens of the step are that ended at `at_s`."""
        return self.late_s[bisect_left(self.ends_s, at_s)]


@dataclass(slots=True, eq=False)
class WaysOut:
    """The ways out of the servers of a run: they make first and last tokens late, and answer clients then.
    `hosts`: by the rank that takes a server's requests; `later_s`: by how much the last tokens of all
    requests are later than their first ones, in sum."""

    journal: Journal
    hosts: Mapping[int, HostTime]
    answered: Callable[[Request, float], None]
    later_s: float = 0.0
    ways: dict[int, _WayOut] = field(default_factory=dict)
    read: int = 0

    def __call__(self, request: Request, at_s: float) -> None:
        """Takes an answer whose last token the engine has at `at_s`; a listener of the journal."""
        self._read_steps()
        if not request.rejected and (way := self.ways.get(request.instance)) is not None:
            first_s, last_s = way.late(request.first_token_s), way.late(at_s)
            request.first_token_s += first_s
            # Rounding must not put one token before the other.
            at_s = request.finish_s = max(at_s + last_s, request.first_token_s)
            self.later_s += last_s - first_s
        self.answered(request, at_s)

    def _read_steps(self) -> None:
        rows, wide = self.journal.rows, len(STEP)
        while self.read < len(rows):
            rank, start_s, end_s, replays, decoding, _, _, firsts = rows[self.read : self.read + 8]
            self.read += wide
            host = self.hosts[int(rank)]
            if host.answer_token_s:
                way = self.ways.setdefault(int(rank), _WayOut(host.answer_token_s))
                way.step(start_s, end_s, int(replays), decoding + firsts / replays)
