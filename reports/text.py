"""Numbers and names as text for the page."""

import html
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import pandas as pd

KIB = 1024
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
STRATEGY_NAMES = {
    "tensor_parallel": "tensor parallelism",
    "alspec": "ALSpec",
    "alspec_pipelined": "ALSpec, pipelined",
}
NOTHING = "–"
UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
GLUE = "\u00a0"  # between a number and its unit: a line never breaks there


def known(value: Any) -> bool:
    """Whether a value is a number that can be shown."""
    return isinstance(value, Real) and math.isfinite(float(value))


def significant(value: float, digits: int = 3) -> str:
    """Returns a number with `digits` significant digits, thousands separated, never in powers of ten.

    >>> significant(12.3456), significant(0.0123456), significant(123456.0), significant(float("nan"))
    ('12.3', '0.0123', '123,456', '–')
    """
    if not known(value):
        return NOTHING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def milliseconds(seconds: float) -> str:
    """Returns seconds as "12.31 ms"."""
    return f"{significant(seconds * 1e3, 4)}{GLUE}ms" if known(seconds) else NOTHING


def _unit(seconds: float) -> tuple[str, float]:
    return next((pair for pair in UNITS if abs(seconds) >= pair[1] or seconds == 0), UNITS[-1])


def duration(seconds: float) -> str:
    r"""Returns seconds in the unit that suits their size.

    >>> duration(0.0000021), duration(0.0042), duration(0.0)
    ('2.1\xa0µs', '4.2\xa0ms', '0\xa0s')
    """
    if not known(seconds):
        return NOTHING
    unit, scale = _unit(seconds)
    return f"{significant(seconds / scale, 2)}{GLUE}{unit}"


def lasting(seconds: float) -> str:
    r"""Returns seconds with three digits in the unit that suits their size.

    >>> lasting(1.234), lasting(0.0004567)
    ('1.23\xa0s', '457\xa0µs')
    """
    if not known(seconds):
        return ""
    unit, scale = _unit(seconds)
    return f"{significant(seconds / scale)}{GLUE}{unit}"


def percent(fraction: float, digits: int = 3) -> str:
    r"""Returns a fraction as "62.5 %".

    >>> percent(0.625), percent(1.0), percent(1 / 3)
    ('62.5\xa0%', '100\xa0%', '33.3\xa0%')
    """
    return f"{float(f'{fraction * 100:.{digits}g}'):g}{GLUE}%" if known(fraction) else NOTHING


def scientific(value: float) -> str:
    """Returns a number of any size: "0.25", "8.0 × 10⁸".

    >>> scientific(0.25), scientific(8e8), scientific(3.2e-7)
    ('0.250', '8.0 × 10⁸', '3.2 × 10⁻⁷')
    """
    if not known(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return significant(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def recorded(value: Any) -> str:
    """Returns a recorded value as text: numbers with at most four significant digits, integers in full.

    >>> recorded(5e10), recorded(5.679e-06), recorded(0.2746438), recorded(131072), recorded("a")
    ('5 × 10¹⁰', '5.679 × 10⁻⁶', '0.2746', '131,072', 'a')
    """
    if isinstance(value, bool) or not known(value):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.4g}'):,.10g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g} × 10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """ "1 figure", "2 figures"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def of_any_device(label: str, device: str) -> str:
    """Returns a label without the device at its end, which runs on several devices append.

    >>> of_any_device("vanilla, h200-sxm", "h200-sxm")
    'vanilla'
    """
    return label.removesuffix(f", {device}")


def strategy_name(strategy: str) -> str:
    """Returns a strategy's name as text."""
    return STRATEGY_NAMES.get(strategy, strategy.replace("_", " "))


def signed(number: float, decimals: int) -> str:
    """Returns a number with its sign; the minus is as wide as the plus."""
    return f"{number:+.{decimals}f}".replace("-", "−")


def _decimals(points: float) -> int:
    # An error of a few hundredths of a percent is a result, not a zero.
    return 1 if abs(points) >= 1.0 else 2


def signed_percent(points: float) -> str:
    """Returns percentage points with their sign: "+1.3 %", "−0.03 %"."""
    return f"{signed(points, _decimals(points))}{GLUE}%" if known(points) else NOTHING


def size_percent(points: float) -> str:
    """Returns percentage points without a sign: "1.3 %", "0.03 %"."""
    return f"{abs(points):.{_decimals(points)}f}{GLUE}%" if known(points) else NOTHING


def times(ratio: float) -> str:
    """Returns a ratio as "1.24×"."""
    return f"{ratio:.2f}×" if known(ratio) else NOTHING


def times_of(ratios: "pd.Series[float]") -> str:
    """Returns the range of some ratios: "1.24× to 1.31×", or "1.24×" if both ends are equal as text."""
    least, most = times(ratios.min()), times(ratios.max())
    return least if least == most else f"{least} to {most}"


def tokens(count: float) -> str:
    """Returns a context length, in binary thousands if it is a multiple of 1024.

    >>> tokens(1024), tokens(98304), tokens(1048576), tokens(1000)
    ('1K', '96K', '1M', '1,000')
    """
    if not known(count):
        return NOTHING
    whole = round(count)
    for suffix, size in (("M", KIB * KIB), ("K", KIB)):
        if whole >= size and whole % size == 0:
            return f"{whole // size}{suffix}"
    return f"{whole:,}"


def interval(low: float, high: float, scale: float = 1.0) -> str:
    """ "11.9 to 12.8", or empty without an interval."""
    if not (known(low) and known(high)) or low == high:
        return ""
    return f"{significant(low * scale, 4)} to {significant(high * scale, 4)}"


def listed(parts: Iterable[str], at_most: int | None = None) -> str:
    """ "a, b and c", or "a, b and 3 more" if there are more than `at_most`."""
    items = list(parts)
    if at_most is not None and len(items) > at_most:
        items = [*items[: at_most - 1], f"{len(items) - at_most + 1} more"]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def in_figure(text: str) -> str:
    """Returns text escaped for plotly, which reads some HTML in its labels."""
    return html.escape(text, quote=False)
