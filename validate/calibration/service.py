"""Fits the host time of one's own service to runs of `vllm bench serve`, and says how good the fit is.

    r          = log(predicted mean / measured mean) of TPOT and of TTFT, of each run
    host time  = argmin of the sum over runs of (r / REPEATS)^2 + the sum over costs of (cost / USUAL)^2
                 0 <= each cost,  request_s and prompt_token_s * prompt_tokens <= BUSY / rate of each run

A run is simulated by a scenario of the service (device, model, engine) with the load that its file states
(`service_runs.py`). What runs do not tell apart is not fitted: the cost of a sequence only where some runs
have more of them in a step than others, that of a prompt's token only where some prompts are longer. Each run
is then held back once, and predicted by what the others say: that is how good it is for a load that was not
measured.

Errors of prices are in these costs too, so they hold for the service that was measured, near its loads.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from simcore.studies.serving.host_time import MOST_S, HostTime

# Runs tell two costs apart where what one of them counts differs by this factor.
APART = 1.5
# Steps of the search at most; it ends where one leaves more than the share LESS of the sum of squares.
MOST_STEPS, LESS = 8, 0.98
# Slopes are over a change of the measured time by this share at most; those of later steps over less.
CHANGED = 0.05
# Most times that a step is halved.
MOST_HALVED = 3
# How well runs of a service repeat: what says little about a cost in this measure hardly moves it.
REPEATS = {"tpot": 0.02, "ttft": 0.05}
# The order of magnitude of what engines' hosts take, an assumption: launches and the sampler's calls from
# Python; an HTTP request that is parsed and handed to another process; tokenising 100,000 tokens a second.
USUAL = {"step_s": 2e-3, "sequence_s": 5e-5, "request_s": 1e-2, "prompt_token_s": 1e-5}
# A front end is busy for this share of a run at most: near saturation its queue makes any TTFT of a small
# cost, and at a higher load a prediction would be all queue.
BUSY = 0.5
COSTS = ("step_s", "sequence_s", "request_s", "prompt_token_s")
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
Predict = Callable[[R, HostTime], Times]


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
    """Returns the costs that these runs determine."""
    sequences, prompts = [run.sequences for run in runs], [run.prompt_tokens for run in runs]
    apart = {
        "step_s": True,
        "sequence_s": max(sequences) >= APART * min(sequences),
        "request_s": True,
        "prompt_token_s": max(prompts) >= APART * min(prompts),
    }
    return tuple(name for name in COSTS if apart[name])


def fitted(runs: Sequence[R], predict: Predict[R]) -> HostTime:
    """Returns the host time that predicts runs best: a Gauss-Newton search from no host time."""
    names = told_apart(runs)
    usual = np.array([USUAL[name] for name in names])
    scale = np.minimum([_scale(runs, name) for name in names], usual / CHANGED)
    most = np.array([_most(runs, name) for name in names])

    def off(costs: Numbers) -> Numbers:
        return np.concatenate([_off(runs, predict, _host(names, costs)), costs / usual])

    costs = np.zeros(len(names))
    here = off(costs)
    for step in range(MOST_STEPS):
        if not here.any():
            break
        changes = np.minimum(CHANGED * scale / (1.0 + step), most / 2.0)
        # Away from the bound, whose other side says nothing.
        changes = np.where(costs + changes > most, -changes, changes)
        slopes = np.stack(
            [(off(costs + change) - here) / change[i] for i, change in enumerate(np.diag(changes))], axis=1
        )
        # In units of `usual` the columns are alike.
        wanted = lsq_linear(slopes * usual, slopes @ costs - here, bounds=(0.0, most / usual)).x * usual
        there = off(wanted)
        for _ in range(MOST_HALVED):
            if there @ there < here @ here:
                break
            wanted = (wanted + costs) / 2.0
            there = off(wanted)
        gain = float(there @ there) / float(here @ here)
        if gain < 1.0:
            costs, here = wanted, there
        if gain > LESS:
            break
    return _host(names, costs)


def _off(runs: Sequence[R], predict: Predict[R], host: HostTime) -> Numbers:
    """Returns the errors of TPOT and TTFT of each run, as logarithms in units of REPEATS."""
    off = []
    for run in runs:
        ours, theirs = predict(run, host), run.times
        off.append(math.log(ours.tpot_s / theirs.tpot_s) / REPEATS["tpot"])
        off.append(math.log(ours.ttft_s / theirs.ttft_s) / REPEATS["ttft"])
    return np.array(off)


def _host(names: Sequence[str], costs: Numbers) -> HostTime:
    return HostTime(**dict(zip(names, costs.tolist(), strict=True)))


def _scale(runs: Sequence[MeasuredRun], name: str) -> float:
    """Returns the cost that alone would be the whole measured time, in the mean over runs."""
    per = {
        "step_s": [run.times.tpot_s for run in runs],
        "sequence_s": [run.times.tpot_s / run.sequences for run in runs],
        "request_s": [run.times.ttft_s for run in runs],
        "prompt_token_s": [run.times.ttft_s / run.prompt_tokens for run in runs],
    }
    return float(np.mean(per[name]))


def _most(runs: Sequence[MeasuredRun], name: str) -> float:
    """Returns the most that a cost may be."""
    if name == "request_s":
        return min(BUSY / run.rate_per_s for run in runs)
    if name == "prompt_token_s":
        return min(BUSY / (run.rate_per_s * run.prompt_tokens) for run in runs)
    return MOST_S


def each_held_back(runs: Mapping[str, R], predict: Predict[R]) -> Iterator[HeldBack]:
    """Yields each run, held back from the fit that predicts it. Of a single run there is nothing to say."""
    for name, run in runs.items():
        others = [other for key, other in runs.items() if key != name]
        if others:
            host = fitted(others, predict)
            yield HeldBack(name, run.times, predict(run, host), host)
