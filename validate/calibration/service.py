"""Fits what an engine takes beyond the profile to runs of a service, and says how good the fit is.

    r          = log(predicted mean / measured mean) of TPOT and of TTFT, of each run, in units of WITHIN
    constants  = argmin of the sum over runs of r^2 + the sum over constants of their prior
                 prior of a cost (cost / USUAL)^2, of a factor (log factor / SPREAD)^2
                 0 <= each cost,  request_s and prompt_token_s * prompt_tokens <= BUSY / rate of each run

A run is simulated with the load that its file states (`service_runs.py`), or that of a public table
(`validate/engines`). What runs do not tell apart is not fitted: the cost of a sequence only where some runs
have more of them in a step than others, that of a prompt's token only where some prompts are longer, and how
late prompts are beside others, and what calls of ops take, only by ENOUGH runs. A way out makes itself felt
once it is saturated, calls once they take longer than the card, which slopes at 0 do not show: the search
begins with each of STARTS. Each run is then held back once, and predicted by what the others say: that is how
good it is for a load that was not measured.

Errors of prices are in these constants too, so they hold for the service that was measured, near its loads.
How far a run that was not fitted may be follows from the residuals of those that were (J the slopes of all
errors and priors, i the rows of J that are errors, n of them):

    left out   = residual * sqrt(n / (n - told)),  told = sum of J_i (J^T J)^-1 J_i^T, the constants that the
                 runs tell, and not the priors
    within     = the 90th percentile of |left out|, as the order of n runs allows: the ceil(0.9 (n + 1))-th
                 smallest, else the largest; of fewer than ENOUGH runs Student's t (95 %, n) times their root
                 mean square
    of several   log(1 + within) is the geometric mean of a fit's own and of that of all fits' runs together,
    fits         of weights n and ALIKE: few runs say little of how far others are
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from simcore.studies.serving.host_time import MOST_S, HostTime

# Runs tell two costs apart where what one of them counts differs by this factor.
APART = 1.5
# Steps of the search at most; it ends where one leaves more than the share LESS of the sum of squares.
MOST_STEPS, LESS = 8, 0.9999
# Slopes are over a change of the measured time by this share at most; those of later steps over less.
CHANGED = 0.05
# Slopes are found at so many points at most.
MOST_SLOPES = 2
# Most times that a step is halved.
MOST_HALVED = 3
# How well a right simulation predicts a run that it was fitted to: a run repeats to some percent, and what is
# not modelled of it comes on top.
WITHIN = {"tpot": 0.02, "ttft": 0.05}
# The order of magnitude of what engines' hosts take, an assumption: launches and the sampler's calls from
# Python; an HTTP request that is parsed and handed to another process; tokenising 100,000 tokens a second,
# half as many in each of several threads; detokenising and sending 50,000.
USUAL = {
    "step_s": 2e-3, "sequence_s": 5e-5, "call_s": 2e-5, "request_s": 1e-2, "prompt_token_s": 1e-5,
    "prompt_token_late_s": 2e-5, "answer_token_s": 2e-5,
}  # fmt: skip
# How far op times of one library are from another's, as standard deviations of logarithms: assumptions. What
# reads memory at the card's rate differs little; collectives differ by their algorithm, and by whether others
# are fused into them.
SPREAD = {"arithmetic_factor": 0.1, "memory_factor": 0.03, "collective_factor": 0.3}
# A front end is busy for this share of a run at most: near saturation its queue makes any TTFT of a small
# cost, and at a higher load a prediction would be all queue.
BUSY = 0.5
COSTS = tuple(USUAL)
# What a front end takes beside others is told from what it takes one by one by ENOUGH runs.
LATE = "prompt_token_late_s"
# So are calls of ops, which a step of some hundred has; it hides behind ops of the card that take longer.
CALL, CALLS = "call_s", 500
FACTORS = tuple(SPREAD)
# Where the search begins: seconds that a call of an op takes, and a token of an answer on its way out. They
# are not felt while something else takes longer, so that slopes at 0 do not show them.
STARTS = tuple(
    {"answer_token_s": out_s, "call_s": call_s}
    for call_s in (0.0, 2e-5, 4e-5)
    for out_s in (0.0, 3e-5, 6e-5, 1.2e-4)
)
# From so many runs on their order says within what share 90 % of others are.
ENOUGH = 5
# Errors that no constant tells, at least; and what is no prediction any more.
LEAST_FREE, MOST_WITHIN = 1.0, 10.0
# As many runs do those of all fits together count beside a fit's own. Chosen of 4, 8, 16 and 32 by three
# draws of public rows at earlier laws: of 32 shares of rows that intervals held 16 were from 85 to 95 %
# without, 24 with 16.
ALIKE = 16
# What counts as a share at least.
LEAST_WITHIN = 1e-6
# Multiples of a way out that are tried at the end, if it is more than LEAST_WAY_OUT of what is usual.
WAYS_OUT, LEAST_WAY_OUT = (0.0, 0.5, 0.7, 0.85, 1.15), 0.25
# Factors are within a factor of two: logarithm.
MOST_FACTOR = math.log(2.0)
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """Mean latencies of a run, in seconds."""

    ttft_s: float
    tpot_s: float


class MeasuredRun(Protocol):
    """A run to fit to."""

    @property
    def times(self) -> Times:
        """What was measured."""

    @property
    def sequences(self) -> float:
        """Requests that decode at a time, in the mean."""

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt, in the mean."""

    @property
    def rate_per_s(self) -> float:
        """Requests that were answered in a second."""


R = TypeVar("R", bound=MeasuredRun)
# Predicts each run with its constants.
Predict = Callable[[Sequence[tuple[R, HostTime]]], Sequence[Times]]


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A run, what was measured, and what the costs `host` predict that the other runs were fitted to."""

    name: str
    measured: Times
    predicted: Times
    host: HostTime

    @property
    def tpot_pct(self) -> float:
        """Signed error of the mean TPOT, in percent."""
        return 100.0 * (self.predicted.tpot_s / self.measured.tpot_s - 1.0)

    @property
    def ttft_pct(self) -> float:
        """Signed error of the mean TTFT, in percent."""
        return 100.0 * (self.predicted.ttft_s / self.measured.ttft_s - 1.0)


def told_apart(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """Returns the constants that these runs determine."""
    sequences, prompts = [run.sequences for run in runs], [run.prompt_tokens for run in runs]
    together = set()
    if max(sequences) < APART * min(sequences):
        together.add("sequence_s")
    if max(prompts) < APART * min(prompts):
        together.add("prompt_token_s")
    if len(runs) < ENOUGH:
        together |= {LATE, CALL}
    return tuple(name for name in (*COSTS, *FACTORS) if name not in together)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants, and by how much runs that are left out are off: logarithms of predicted over measured times,
    by the names of WITHIN."""

    host: HostTime
    left_out: Mapping[str, Sequence[float]]

    def alone(self) -> HostTime:
        """Returns the constants with the intervals that their own runs say."""
        return self._within({name: within(errors) for name, errors in self.left_out.items()})

    def beside(self, others: Sequence["Fitted"]) -> HostTime:
        """Returns the constants with intervals by their own runs and by those of all fits, these included."""
        found = {}
        for name, errors in self.left_out.items():
            every = [error for fit in others for error in fit.left_out[name]]
            own, theirs = (math.log(max(math.log1p(within(each)), LEAST_WITHIN)) for each in (errors, every))
            mean = (len(errors) * own + ALIKE * theirs) / (len(errors) + ALIKE)
            found[name] = math.expm1(math.exp(mean))
        return self._within(found)

    def _within(self, shares: Mapping[str, float]) -> HostTime:
        return self.host.model_copy(update={f"{name}_within": share for name, share in shares.items()})


def fitted(
    runs: Sequence[R],
    predict: Predict[R],
    *,
    names: Sequence[str] | None = None,
    most_slopes: int = MOST_SLOPES,
    huber: float = math.inf,
) -> Fitted:
    """Returns the constants that predict runs best: a search from the best of STARTS, by slopes at that point
    which each step corrects by what came of it (Broyden), and by new ones where it ends, `most_slopes` times
    in all. `names`: of the constants; None: all that runs determine. `huber`: from how many WITHIN on an
    error counts by its size and not by its square, for runs that may be wrong."""
    return _Search(names or told_apart(runs), runs, predict, huber).best(most_slopes)


def within(errors: Sequence[float]) -> float:
    """Returns within what share of a prediction 90 % of measured times lie. `errors`: logarithms of predicted
    over measured times of runs that were left out."""
    # SciPy's distributions take longer to import than the rest of a command.
    from scipy.special import stdtrit  # noqa: PLC0415

    sizes, count = np.sort(np.abs(errors)), len(errors)
    if count >= ENOUGH:
        far = float(sizes[min(count, math.ceil(0.9 * (count + 1))) - 1])
    else:
        far = float(stdtrit(count, 0.95)) * math.sqrt(float(np.mean(sizes**2)))
    return min(math.expm1(far), MOST_WITHIN)


@dataclass(frozen=True, eq=False)
class _Search:
    """Looks for the constants `names` by runs. Its unknowns x, each of the order of 1, are costs in units of
    USUAL and logarithms of factors in units of SPREAD."""

    names: Sequence[str]
    runs: Sequence[MeasuredRun]
    predict: Predict[Any]
    huber: float

    def best(self, most_slopes: int) -> Fitted:
        """Returns the best constants that are found."""
        most = self._most()
        least = np.array([-MOST_FACTOR / SPREAD[name] if name in FACTORS else 0.0 for name in self.names])
        x, here = self._start()
        if not here.any():
            return Fitted(self._host(x), dict.fromkeys(WITHIN, (0.0,) * len(self.runs)))
        slopes = np.empty(0)
        for _ in range(most_slopes):
            before = self._loss(here)
            slopes = self._slopes(x, here, most)
            x, here, slopes = self._walked(x, here, slopes, (least, most))
            x, here = self._other_ways_out(x, here)
            if self._loss(here) > LESS * before:
                break
        return Fitted(self._host(x), self._left_out(here, slopes))

    def _other_ways_out(self, x: Numbers, here: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the best point with the way out faster or slower: a saturated one bends what slopes say."""
        at = self.names.index("answer_token_s") if "answer_token_s" in self.names else None
        if at is None or x[at] < LEAST_WAY_OUT:
            return x, here
        scales = np.ones((len(WAYS_OUT), len(x)))
        scales[:, at] = WAYS_OUT
        others = [x * scale for scale in scales]
        return min(
            [(x, here), *zip(others, self._off(others), strict=True)], key=lambda each: self._loss(each[1])
        )

    def _walked(
        self, x: Numbers, here: Numbers, slopes: Numbers, bounds: tuple[Numbers, Numbers]
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the point that slopes lead to, its errors, and the slopes as its steps correct them."""
        for _ in range(MOST_STEPS):
            weights = self._weights(here)
            wanted = lsq_linear(slopes * weights[:, None], (slopes @ x - here) * weights, bounds=bounds).x
            moved, gain = wanted - x, 1.0
            for _ in range(MOST_HALVED):
                if not moved.any():
                    break
                (there,) = self._off([x + moved])
                slopes = slopes + np.outer(there - here - slopes @ moved, moved) / (moved @ moved)
                gain = self._loss(there) / self._loss(here)
                if gain < 1.0:
                    x, here = x + moved, there
                    break
                moved = moved / 2.0
            if gain > LESS:
                break
        return x, here, slopes

    def _weights(self, off: Numbers) -> Numbers:
        """Returns by what errors are multiplied so that the sum of their squares is least where Huber's loss
        is (priors are no errors)."""
        weights = (
            np.sqrt(self.huber / np.maximum(np.abs(off), self.huber)) if self.huber < math.inf else off**0
        )
        weights[2 * len(self.runs) :] = 1.0
        return weights

    def _loss(self, off: Numbers) -> float:
        """Returns what is least at the best constants: squares, beyond `huber` only as much as at it."""
        size, of_runs = np.abs(off), 2 * len(self.runs)
        far = size > self.huber
        far[of_runs:] = False
        squares = np.where(far, 0.0, size**2)
        squares[far] = 2.0 * self.huber * size[far] - self.huber**2
        return float(squares.sum())

    def _left_out(self, off: Numbers, slopes: Numbers) -> dict[str, list[float]]:
        """Returns by how much runs that are left out are off. `off`: the errors at the best constants."""
        count = 2 * len(self.runs)
        weighted = slopes * self._weights(off)[:, None]
        told = float(np.einsum("ij,ji->i", weighted, np.linalg.pinv(weighted))[:count].sum())
        more = math.sqrt(count / max(count - told, LEAST_FREE))
        found = (more * off[:count]).reshape(-1, 2)
        return {name: (found[:, i] * WITHIN[name]).tolist() for i, name in enumerate(WITHIN)}

    def _start(self) -> tuple[Numbers, Numbers]:
        units = [(name, USUAL.get(name, 1.0)) for name in self.names]
        points = dict.fromkeys(tuple(start.get(name, 0.0) / unit for name, unit in units) for start in STARTS)
        starts = [np.array(point) for point in points]
        return min(zip(starts, self._off(starts), strict=True), key=lambda each: self._loss(each[1]))

    def _slopes(self, x: Numbers, here: Numbers, most: Numbers) -> Numbers:
        changes = np.minimum(self._changes(), most / 2.0)
        # Away from the bound, whose other side says nothing.
        changes = np.where(x + changes > most, -changes, changes)
        moved = self._off([x + change for change in np.diag(changes)])
        return np.stack([(there - here) / change for there, change in zip(moved, changes, strict=True)], 1)

    def _host(self, x: Numbers) -> HostTime:
        values: dict[str, Any] = {
            name: math.exp(SPREAD[name] * value) if name in FACTORS else USUAL[name] * max(0.0, value)
            for name, value in zip(self.names, x.tolist(), strict=True)
        }
        return HostTime(**values)

    def _off(self, several: Sequence[Numbers]) -> list[Numbers]:
        """Returns for each x the errors of all runs and the priors, whose squares add up to what is least."""
        tasks = [(run, self._host(x)) for x in several for run in self.runs]
        found = iter(self.predict(tasks))
        return [np.concatenate([*(_off(next(found), run.times) for run in self.runs), x]) for x in several]

    def _changes(self) -> Numbers:
        """Returns by how much each unknown is changed for a slope."""
        runs = self.runs
        # The cost that alone would be the whole measured time, in the mean over runs.
        whole = {
            "step_s": [run.times.tpot_s for run in runs],
            "sequence_s": [run.times.tpot_s / run.sequences for run in runs],
            CALL: [run.times.ttft_s / CALLS for run in runs],
            "request_s": [run.times.ttft_s for run in runs],
            "prompt_token_s": [run.times.ttft_s / run.prompt_tokens for run in runs],
            "prompt_token_late_s": [run.times.ttft_s / run.prompt_tokens for run in runs],
            "answer_token_s": [run.times.tpot_s / run.sequences for run in runs],
        }
        shares = {name: CHANGED * float(np.mean(each)) / USUAL[name] for name, each in whole.items()}
        return np.array([
            CHANGED / SPREAD[name] if name in FACTORS else min(1.0, shares[name]) for name in self.names
        ])  # fmt: skip

    def _most(self) -> Numbers:
        """Returns the most that each unknown may be."""
        runs = self.runs
        most = {
            "request_s": min(BUSY / run.rate_per_s for run in runs),
            "prompt_token_s": min(BUSY / (run.rate_per_s * run.prompt_tokens) for run in runs),
        }
        return np.array([
            MOST_FACTOR / SPREAD[name] if name in FACTORS else most.get(name, MOST_S) / USUAL[name]
            for name in self.names
        ])  # fmt: skip


def _off(ours: Times, theirs: Times) -> Numbers:
    """Returns the errors of TPOT and TTFT of a run."""
    return np.array(_logs(ours, theirs)) / (WITHIN["tpot"], WITHIN["ttft"])


def _logs(ours: Times, theirs: Times) -> tuple[float, float]:
    return math.log(ours.tpot_s / theirs.tpot_s), math.log(ours.ttft_s / theirs.ttft_s)


def each_held_back(runs: Mapping[str, R], predict: Predict[R]) -> Iterator[HeldBack]:
    """Yields each run, held back from the fit that predicts it. Of a single run there is nothing to say."""
    for name, run in runs.items():
        others = [other for key, other in runs.items() if key != name]
        if others:
            host = fitted(others, predict).alone()
            (times,) = predict([(run, host)])
            yield HeldBack(name, run.times, times, host)
