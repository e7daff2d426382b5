"""The studies `linear_attention`, `decode_attention` and `prompt`: operators, and whole prompts, by method.

latency   = host time of a launch + price of the op, as one launch on the machine
fits      = inputs, output and temporaries within the memory of the device
crossover = the number of tokens at which one method passes another
"""

from simcore.studies.operators.answer import errors
from simcore.studies.operators.published import OperatorPublished, each_once
from simcore.studies.operators.runner import Bench
from simcore.studies.operators.study import run, tape

__all__ = ["Bench", "OperatorPublished", "each_once", "errors", "run", "tape"]
