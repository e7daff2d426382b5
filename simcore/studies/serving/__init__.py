"""The study `serving`: latency and throughput of requests by strategy, load and number of devices.

    TTFT, TPOT, ITL, E2E, throughput and goodput by vLLM's formulas (figures.py)
    total iterations, overlap and speed-up by Flover's

A figure is a mean over replicas with its 95 % interval; arrivals and lengths have random streams of their
own, so that every strategy gets the same requests.
"""

from simcore.studies.serving.laws import LAWS
from simcore.studies.serving.runner import Bench, Group
from simcore.studies.serving.study import run, tape

__all__ = ["LAWS", "Bench", "Group", "run", "tape"]
