"""The study `decode`: latency of a token by strategy, devices, context, batch and hit rate.

    speed-up               = baseline's latency / latency, at the same context and batch
    overlap gain           = latency with the last layer not overlapped - latency
    verification           = speculative attention - decode attention, on the critical path's device
    crossover              = the context, hit rate or link latency at which ALSpec on n devices becomes
                             faster than tensor parallelism on the same n devices

A hit rate that gives no whole number of layers is the weighted mean of the two runs around it
(speculation.hit_draws); random hits are a mean over replicas.
"""

from simcore.studies.decode.cases import cases, does_not_fit
from simcore.studies.decode.runner import Bench, Case, HitRow
from simcore.studies.decode.study import run, tape

__all__ = ["Bench", "Case", "HitRow", "cases", "does_not_fit", "run", "tape"]
