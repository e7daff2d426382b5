"""Figures of one generation, from its token times and the work of its ops.

    latency of a token    its end - the end of the token before (for the first: the end of the prompt)
    mixer_s, block_s      device seconds of the mixers' ops, and of all others
    activation positions  positions that mixers read or add to, per layer and generated token (section 3.6)

Tokens per second are generated tokens over the whole time, including the prompt's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.models.long_convolution import LongConvolution
from simcore.ops.convolution import MIXER_KINDS
from simcore.ops.op import Op
from simcore.studies.tiling.cases import Case
from simcore.studies.tiling.implementations import Choice
from simcore.studies.tiling.launches import Burst, work
from simcore.studies.tiling.runner import Result

# name -> (value, unit)
Figures = Mapping[str, tuple[float, str]]


@dataclass(slots=True, eq=False)
class CaseResult:
    """The results of a case. `runs` are figures of time: with prices as they are, then at their ends, where
    some may be missing; or of each measured run, the reported run first. `stays`: see `Bench.stays`."""

    case: Case
    tiles: Choice
    counts: Figures
    runs: list[Figures]
    by_kind: list[Mapping[str, float]]
    memory_bytes: float
    sources: Mapping[str, float]
    steps: dict[str, Any]
    measured: bool
    stays: bool

    def values(self, name: str) -> list[float]:
        """Returns a figure of time in each run that has it."""
        return [run[name][0] for run in self.runs if name in run]

    def value(self, name: str) -> float:
        """Returns a figure of time: with prices as they are, or of the reported measured run."""
        return self.values(name)[0]


def mixer_s(by_kind: Mapping[str, float]) -> float:
    """Returns the device seconds of the mixers."""
    return sum(seconds for kind, seconds in by_kind.items() if kind in MIXER_KINDS)


def latencies(result: Result) -> NDArray[np.float64]:
    """Returns the latency of each token, in seconds, [tokens]: the time since tokens were seen before it.
    Those that are seen together have the same."""
    moments_s, which = np.unique(result.ended_s, return_inverse=True)
    found: NDArray[np.float64] = np.diff(moments_s, prepend=result.begun_s)[which]
    return found


def times(result: Result) -> Figures:
    """Returns the figures from the times of the tokens and of their ops."""
    latency_s = latencies(result)
    p50_s, p99_s = np.quantile(latency_s, [0.5, 0.99]).tolist()
    return {
        **sums(result.by_kind, float(result.ended_s[-1]), len(latency_s)),
        "token_p50_s": (p50_s, "s"),
        "token_p99_s": (p99_s, "s"),
        "token_max_s": (float(latency_s.max()), "s"),
    }


def sums(by_kind: Mapping[str, float], total_s: float, generated: int) -> Figures:
    """Returns the figures from the whole time and the seconds of each kind of op."""
    mixing_s = mixer_s(by_kind)
    return {
        "total_s": (total_s, "s"),
        "mixer_s": (mixing_s, "s"),
        "block_s": (sum(by_kind.values()) - mixing_s, "s"),
        "tokens_per_s": (generated / total_s, "tokens/s"),
    }


def counts(model: LongConvolution, bursts: Sequence[Burst]) -> Figures:
    """Returns the figures from the launches alone, which do not depend on the machine."""
    mixing = work(bursts, lambda op: op.kind in MIXER_KINDS)
    everything = work(bursts, lambda _: True)
    touched = sum(value for burst in bursts for _, value in burst.total(touched_positions))
    return {
        "mixer_flops": (mixing.flops, "FLOP"),
        "mixer_hbm_bytes": (mixing.hbm_bytes, "B"),
        "flops": (everything.flops, "FLOP"),
        "hbm_bytes": (everything.hbm_bytes, "B"),
        "launches": (float(sum(burst.count for burst in bursts)), "launches"),
        "activation_positions_per_token": (touched / (model.layers * model.generated), "positions"),
    }


def touched_positions(op: Op) -> float:
    """Returns the positions of the activations that a mixer's op reads or adds to, over all its layers;
    linear in the sizes that grow. 0 for other ops."""
    if op.kind not in MIXER_KINDS:
        return 0.0
    sizes = dict(op.shape)
    layers = int(sizes.get("layers", 1))  # type: ignore[arg-type]
    match op.kind:
        case "conv_row":
            positions = op["inputs"] + 1
        case "conv_column":
            positions = 1 + op["outputs"]
        case "conv_cell" | "generic_cell" | "relaxed_cell":
            positions = 2
        case "conv_prefill" | "conv_carry":
            positions = op["inputs"] + op["outputs"]
        case "relaxed_tile":
            positions = op["products"] * op["side"] + op["outputs"]
        case "filter_tap" | "generic_read" | "slot_shift":
            positions = 0
        case _:
            positions = op["side"] + op["outputs"]
    return float(layers * positions)
