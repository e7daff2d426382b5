"""The clock of a card whose power is limited: under load, arithmetic takes longer than by itself.

    a, b       shares of the time in ops that arithmetic bounds, and in others; a moment t ago weighs
               exp(-t / over_s)
    factor  =  max(1, (a A / (1 - b B - (1 - a - b) I))^(1/3))

A, B and I are the powers of arithmetic at the full clock, of other ops and of a card at rest, in shares of
the most that the card may take. What the others leave, arithmetic may take: its clock falls until it does,
for its power grows with the third power of the clock (voltage follows it). Other ops take as long as ever:
the memory has a clock of its own. An op is bound by arithmetic if its floor is, and counts if its format is
one of FORMATS: in these the law was held to whole services on a card. Random fp8 products slow down alike,
but engines in fp8 keep up more products than that would leave (docs/measurements/real_machines.md).

Inside a launch of T seconds, a and b move from the past's to its own; their mean counts:

    a  =  x + (a before - x) over_s / T (1 - exp(-T / over_s))         x = its own share of arithmetic

The constants are measured (`simcore.validate.calibration.cuda_power`): power itself is not, only how much
longer products take beside so much other work.
"""

from dataclasses import dataclass
from math import exp

# Power over clock: dynamic power is proportional to clock times voltage squared, and voltage follows clock.
EXPONENT = 3.0
FORMATS = frozenset({"bf16", "fp16"})
# What is left for arithmetic at least, in shares of the limit, so that no clock is 0.
LEAST = 0.05


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """The constants of the law above; powers in shares of the limit, `over_s` in seconds."""

    arithmetic: float
    others: float
    idle: float
    over_s: float

    def factor(self, arithmetic: float, others: float) -> float:
        """How many times as long arithmetic takes if it has this share of the time, and other ops that one.

        >>> limit = PowerLimit(arithmetic=1.5, others=0.8, idle=0.2, over_s=0.05)
        >>> limit.factor(0.1, 0.9), round(limit.factor(1.0, 0.0) ** 3, 6)
        (1.0, 1.5)
        """
        others = min(others, 1.0 - arithmetic)
        left = 1.0 - others * self.others - max(0.0, 1.0 - arithmetic - others) * self.idle
        wanted = arithmetic * self.arithmetic
        return 1.0 if wanted <= left else float((wanted / max(LEAST, left)) ** (1.0 / EXPONENT))


class Load:
    """What a device has done lately, by which its clock goes."""

    __slots__ = ("_arithmetic", "_at_s", "_limit", "_others")

    def __init__(self, limit: PowerLimit) -> None:
        self._limit = limit
        # Shares of the past until `_at_s`.
        self._arithmetic = self._others = self._at_s = 0.0

    def factor(self, arithmetic_s: float, total_s: float, start_s: float) -> float:
        """How many times as long the arithmetic takes of a launch that starts then and takes `total_s` alone,
        of which `arithmetic_s` are in ops that arithmetic bounds."""
        if arithmetic_s <= 0.0 or total_s <= 0.0:
            return 1.0
        over_s = self._limit.over_s
        fades = exp(-max(0.0, start_s - self._at_s) / over_s)
        own = min(1.0, arithmetic_s / total_s)
        weight = over_s / total_s * (1.0 - exp(-total_s / over_s))
        arithmetic = own + (self._arithmetic * fades - own) * weight
        others = 1.0 - own + (self._others * fades - (1.0 - own)) * weight
        return self._limit.factor(arithmetic, others)

    def add(self, arithmetic_s: float, begun_s: float, end_s: float) -> None:
        """Adds a launch that has ended, of which `arithmetic_s` as they were; launches beside each other add
        up."""
        took_s, over_s = end_s - begun_s, self._limit.over_s
        if took_s <= 0.0:
            return
        fades = exp(-max(0.0, end_s - self._at_s) / over_s)
        own = min(1.0, arithmetic_s / took_s)
        weight = 1.0 - exp(-took_s / over_s)
        self._arithmetic = min(1.0, self._arithmetic * fades + own * weight)
        self._others = min(1.0, self._others * fades + (1.0 - own) * weight)
        self._at_s = max(self._at_s, end_s)
