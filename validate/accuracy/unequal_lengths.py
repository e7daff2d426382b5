"""Prices of decode attention at sequences of unequal lengths, against their times on a CUDA card.

    python -m simcore.validate.accuracy.unequal_lengths --count 120 --seed 7 --out rows.csv
    python -m simcore.validate.accuracy.unequal_lengths --count 120 --seed 7 --measured rows.csv --device CARD

A calibration knows one shape of lengths for each longest (`kernels.decoder.paged_attention.lengths_of`). Here
each length is drawn: uniform from a tenth of the longest, lognormal, or one long sequence among short ones.
A price knows their number, their sum and the longest, rounded as in a step of a service. Results are held
against plain torch in float64 before they are timed. The table has the errors of prices, and beside them
those of prices that take all lengths as spread evenly. The second command judges the times of an earlier run
by current prices, and needs no card.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from simcore.devices.interpolation import Took
from simcore.devices.making import Point
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import DeviceSpec, load_device
from simcore.input.files import Count, InputError
from simcore.kernels.decoder.paged_attention import in_blocks
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.kernel import Kernel, in_double
from simcore.models.served_decoder import over_mean
from simcore.ops import op as ops
from simcore.ops.op import Op, Pricer
from simcore.terminal import BROKEN
from simcore.validate.accuracy.tables import error_lines, errors_row, is_close, read_rows
from simcore.validate.benchmarks.cases import BORN, ERROR_BARS
from simcore.validate.benchmarks.timing import Card, birth, measure_card, one_line
from simcore.validate.calibration.cuda import this_card
from simcore.validate.calibration.cuda_grid import PAGED_CONTEXT, PAGED_SEQUENCES
from simcore.validate.calibration.records import NAME
from simcore.validate.ladder.rungs import off_pct
from simcore.validate.program import check_out, run, write_csv
from simcore.validate.timing import cuda_times as card_measure
from simcore.validate.timing.allocator import take_memory_in_segments
from simcore.validate.timing.card_kernels import ON_CARDS
from simcore.validate.timing.compile_ahead import as_compiled

COMPILING_S = 60.0
# Heads of one model on 8, 4, 2 and 1 ranks, and of a larger one on 8 and 1.
HEADS = ((4, 1), (8, 2), (16, 4), (32, 8), (8, 1), (64, 8))
# Tokens of the longest sequence.
LONGEST = (200, 60_000)
WAYS = ("uniform", "lognormal", "one long")
MOST_BYTES = 2e9
# Launches are judged apart up to these seconds.
SHORT_S, LONG_S = 5e-6, 5e-5
# How its lengths are drawn; sequences, query and KV heads; tokens in all and of the longest.
Key = tuple[str, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of these lengths; `way`: how they were drawn."""

    way: str
    q_heads: int
    kv_heads: int
    lengths: tuple[int, ...]

    @property
    def key(self) -> Key:
        """What tells it from others."""
        number, total = len(self.lengths), sum(self.lengths)
        return self.way, number, self.q_heads, self.kv_heads, total, max(self.lengths)

    @property
    def op(self) -> Op:
        """Its op, as a step of a service has it."""
        count, total = len(self.lengths), sum(self.lengths)
        return self._op(over_mean=over_mean(count, total, max(self.lengths)))

    @property
    def as_spread(self) -> Op:
        """The op of as many tokens whose lengths are spread evenly."""
        return self._op()

    def _op(self, **over: int) -> Op:
        heads = {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": 128}
        count, total = len(self.lengths), sum(self.lengths)
        return ops.paged_attention(sequences=count, kv_tokens=total, dtype="bf16", **heads, **over)


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Row:
    """A line of a file: a case and its time."""

    way: str
    sequences: Count
    q_heads: Count
    kv_heads: Count
    kv_tokens: Count
    longest: Count
    median_s: Took

    @property
    def key(self) -> Key:
        """Of its case."""
        return self.way, self.sequences, self.q_heads, self.kv_heads, self.kv_tokens, self.longest


def drawn(count: int, seed: int) -> list[Case]:
    """Draws cases whose numbers of sequences and mean lengths are inside a calibration's ranges."""
    random, found = Random(f"{seed} unequal lengths"), list[Case]()
    while len(found) < count:
        heads, way = random.choice(HEADS), WAYS[len(found) % len(WAYS)]
        number = round(_log_uniform(random, 2, PAGED_SEQUENCES[-1]))
        most = round(_log_uniform(random, *LONGEST))
        lengths = [most, *(_length(random, way, most) for _ in range(number - 1))]
        random.shuffle(lengths)
        case = Case(way, *heads, tuple(lengths))
        mean = sum(lengths) / number
        if PAGED_CONTEXT[0] <= mean <= PAGED_CONTEXT[-1] and case.op.work.hbm_bytes <= MOST_BYTES:
            found.append(case)
    return found


def _log_uniform(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def _length(random: Random, way: str, most: int) -> int:
    """Draws the length of a sequence beside one of `most` tokens."""
    if way == "uniform":
        length = random.uniform(0.1 * most, most)
    elif way == "lognormal":
        length = random.lognormvariate(math.log(most / 6), 0.9)
    else:
        length = random.uniform(0.02 * most, 0.15 * most)
    return max(1, min(most, round(length)))


def kernel_of(case: Case) -> Kernel:
    """Returns the kernel with inputs of the case's own lengths."""

    def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
        q = random_tensor(op, generator, device, op["sequences"], op["q_heads"], op["head_dim"])
        return q, *in_blocks(op, case.lengths, generator, device)

    return ON_CARDS["paged_attention"]._replace(inputs=inputs)


def error_of(case: Case, device: torch.device) -> float:
    """Returns ||out - truth|| / ||truth|| of a case, truth in float64."""
    kernel, op = kernel_of(case), case.op
    with torch.inference_mode():
        tensors = kernel.inputs(op, torch.Generator(device).manual_seed(card_measure.SEED), device)
        truth = kernel.reference(op, *map(in_double, tensors))
        out = kernel.run(op, *tensors).to(truth.dtype)
        return float((out - truth).norm() / truth.norm())


def _measured_on(card: Card, cases: Sequence[Case], spec: DeviceSpec) -> Iterator[tuple[Case, Point, float]]:
    """Yields each case that can be measured, its time, and the error of its result. Raises InputError for a
    wrong result."""
    floor, device = roofline(spec), torch.device("cuda")
    for case in as_compiled(cases, lambda each: each.op, time.perf_counter() + COMPILING_S):
        try:
            error = error_of(case, device)
            point = card_measure.measured(kernel_of(case), case.op, floor, card)
        except card_measure.FAILURES as problem:
            typer.echo(f"  {case.way} {case.op.shape}: {one_line(problem)}", err=True)
            card_measure.go_on()
            continue
        if not error <= ERROR_BARS["bf16"]:
            raise InputError(f"{case.way} {case.op.shape}: the result is {error:.1e} off")
        yield case, point, error


def line_of(case: Case, seconds: Mapping[str, object], price: Pricer) -> dict[str, object]:
    """Returns a line of a file: the case, its prices, and its time."""
    found, even = price(case.op), price(case.as_spread)
    return {
        "way": case.way,
        "sequences": len(case.lengths),
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "kv_tokens": sum(case.lengths),
        "longest": max(case.lengths),
        "predicted_s": found.seconds,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "source": found.source,
        "as_spread_s": even.seconds,
        **seconds,
    }


def summary(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the errors of all cases, of short and longer launches and of each way to draw them, each with
    the price and with the price of lengths spread evenly."""
    groups = {
        "all": lines,
        f"up to {1e6 * SHORT_S:.0f} us": [x for x in lines if x["median_s"] <= SHORT_S],
        f"{1e6 * SHORT_S:.0f} to {1e6 * LONG_S:.0f} us": [
            x for x in lines if SHORT_S < x["median_s"] <= LONG_S
        ],
        "longer": [x for x in lines if x["median_s"] > LONG_S],
        **{way: [x for x in lines if x["way"] == way] for way in WAYS},
    }
    for name, group in groups.items():
        for how, column in (("", "predicted_s"), (", as spread evenly", "as_spread_s")):
            if group:
                errors = [off_pct(x[column], x["median_s"]) for x in group]
                shapes = [_shape(x) for x in group]
                inside = {} if how else {"covered": sum(map(_is_inside, group)) / len(group)}
                yield {**errors_row(f"{name}{how}", errors, shapes), **inside}


def _shape(of: Mapping[str, Any]) -> str:
    heads = f"{of['sequences']} x {of['q_heads']}/{of['kv_heads']}"
    return f"{heads}, {of['kv_tokens']} tokens, longest {of['longest']}"


def _is_inside(line: Mapping[str, Any]) -> bool:
    return bool(line["low_s"] <= line["median_s"] <= line["high_s"])


def _measured_before(cases: Sequence[Case], path: Path, price: Pricer) -> list[dict[str, object]]:
    """Returns the lines of a file by current prices. Raises InputError if its cases are others."""
    known = {case.key: case for case in cases}
    rows, _ = read_rows(path, Row)
    if other := next((row for row in rows if row.key not in known), None):
        raise InputError(
            f"--seed, --count: have to be those of the run that wrote {path}, which has {other.way} lengths,"
            f" {_shape(asdict(other))}"
        )
    return [line_of(known[row.key], {"median_s": row.median_s}, price) for row in rows]


def main(
    count: Annotated[int, typer.Option(min=3, max=2000, help="how many cases")] = 120,
    seed: Annotated[int, typer.Option(help="by which they are drawn")] = 7,
    profile: Annotated[str, typer.Option(help="name, or folder, of the profile")] = NAME,
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    again: Annotated[
        Path | None, typer.Option("--measured", help="a file of --out, of this --count and --seed: its times")
    ] = None,
    device: Annotated[str, typer.Option(help="of the catalogue, whose times --measured has")] = "",
) -> None:
    """Measures decode attention at unequal lengths on this card and prints how far off its prices are; exit 1
    where they are further off than prices may be."""
    check_out(out)
    if bool(device) != (again is not None):
        raise InputError("--device: is given with --measured, and only there")
    name = device or this_card()
    spec = load_device(name)
    price = pricer(spec, profile=load_profile(name, profile))
    cases, lines = drawn(count, seed), list[dict[str, object]]()
    if again is not None:
        lines = _measured_before(cases, again, price)
    else:
        take_memory_in_segments()
        card = measure_card(lambda text: None)
        for case, point, error in _measured_on(card, cases, spec):
            times = {"median_s": point.median_s, "p10_s": point.p10_s, "p90_s": point.p90_s, "n": point.runs}
            lines.append(line_of(case, {**times, "cache": point.cache, "error": error}, price))
        born = asdict(birth(card))
        lines = [{**line, **{key: born[key] for key in BORN}} for line in lines]
    if not lines:
        raise InputError("nothing could be measured")
    if out:
        write_csv(lines, out)
    rows = list(summary(lines))
    for text in error_lines(rows):
        typer.echo(text)
    if not is_close(rows[0]):
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(main)
