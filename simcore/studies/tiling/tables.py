"""Tables of a tiling study: latencies, tiles by side, cells covered by launches, growth with the length."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simcore.machine.trace import Trace
from simcore.models.long_convolution import cells
from simcore.studies.tiling.cases import Case, memory_of
from simcore.studies.tiling.figures import counts, latencies, times
from simcore.studies.tiling.implementations import Lanes, cheapest, sides, tile_prices
from simcore.studies.tiling.runner import Bench, Result

# Most stretches of tokens.
MOST_STEPS = 2048
# Positions of the run whose launches are drawn, at least as many as two launches compute, and most of them
# that are a prompt.
DRAWN, DRAWN_PROMPT = 32, 8
SHORTEST = 1 << 8

Record = dict[str, Any]


def columns(records: Sequence[Record]) -> dict[str, Any]:
    """Returns records as columns; missing numbers are NaN."""
    found: dict[str, Any] = {
        name: [record[name] for record in records] for name in (records[0] if records else {})
    }
    for name, values in found.items():
        if None in values:
            found[name] = np.array([np.nan if value is None else value for value in values])
    return found


def point(case: Case) -> Record:
    """Returns the point of a case, which identifies it among the cases of its label."""
    axes = case.axes
    return {"layers": axes.layers, "channels": axes.channels, "batch": axes.batch, "tokens": axes.tokens}


def steps(case: Case, result: Result) -> Record:
    """Returns tokens in stretches of equal length, as columns: the last token of each, its end, and the
    longest latency in the stretch."""
    latency_s = latencies(result)
    length = -(-len(latency_s) // MOST_STEPS)
    starts = np.arange(0, len(latency_s), length)
    last = np.minimum(starts + length, len(latency_s)) - 1
    rows = len(starts)
    return {
        "label": [case.axes.label] * rows,
        **{name: np.full(rows, value) for name, value in point(case).items()},
        "token": last + case.axes.prompt_tokens,
        "end_s": result.ended_s[last],
        "latency_s": np.maximum.reduceat(latency_s, starts),
    }


def stacked(tables: Sequence[Record]) -> Record:
    """Concatenates tables of the same columns."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]} if tables else {}


def tiles(bench: Bench, case: Case) -> Iterator[Record]:
    """Yields the price of one tile of all layers at a case's point, by side and implementation; `chosen`:
    whether Hybrid chooses it."""
    price, axes = bench.device.price, case.axes
    at_once = Lanes(axes.layers, 1, axes.batch, axes.channels, case.dtype)
    own = sides(case.generated)
    chosen = dict(cheapest(dict.fromkeys(own, at_once), case.generated, price))
    for side in own:
        for name, found in tile_prices(at_once, side, price):
            yield {
                **point(case),
                "side": side,
                "implementation": name,
                "seconds": found.seconds,
                "low_s": found.low_s,
                "high_s": found.high_s,
                "chosen": chosen[side] == name,
            }


def drawn(case: Case) -> Case:
    """Returns the case over few positions, so that each launch can be drawn."""
    prompt = min(case.axes.prompt_tokens, DRAWN_PROMPT)
    positions = max(DRAWN, 2 * case.tokens_per_launch)
    return replace(case, axes=replace(case.axes, tokens=positions, prompt_tokens=prompt, batch=1))


def covered(case: Case, trace: Trace) -> Iterator[Record]:
    """Yields the contributions of each launch, in the first layer; ranges include both ends."""
    for span in trace.spans:
        for priced, start_s, _ in span.op_times():
            for area in cells(priced.op, case.axes.tokens):
                if area.layer != 1:
                    continue
                yield {
                    "label": case.axes.label,
                    "launch": span.launch,
                    "graph": span.graph,
                    "op_kind": priced.op.kind,
                    "layer": area.layer,
                    **_first_and_last("input", area.inputs),
                    **_first_and_last("output", area.outputs),
                    **_first_and_last("lag", area.lags),
                    "start_s": start_s,
                }


def _first_and_last(name: str, among: tuple[int, int] | None) -> Record:
    first, beyond = among or (None, None)
    return {f"first_{name}": first, f"last_{name}": None if beyond is None else beyond - 1}


def lengths(case: Case) -> list[int]:
    """Returns the lengths at which growth is shown: powers of two below the case's length, and its own."""
    longest = case.axes.tokens
    powers = [1 << i for i in range(SHORTEST.bit_length() - 1, longest.bit_length())]
    return [length for length in powers if case.axes.prompt_tokens < length < longest] + [longest]


def growth(bench: Bench, case: Case, known: Result) -> Iterator[Record]:
    """Yields work, memory and time of a case at growing lengths up to its own; `known`: its own run. A
    measured case is not run at other lengths: each would be captured anew, and all of them take as long as
    its own."""
    for length in [case.axes.tokens] if bench.device.measured else lengths(case):
        shorter = replace(case, axes=replace(case.axes, tokens=length))
        model, bursts = bench.launches(shorter)
        own = counts(model, bursts)
        result = known if length == case.axes.tokens else bench.run(shorter)
        yield {
            "label": case.axes.label,
            **point(shorter),
            "mixer_flops": own["mixer_flops"][0],
            "mixer_hbm_bytes": own["mixer_hbm_bytes"][0],
            "memory_bytes": memory_of(shorter, model).total,
            "total_s": times(result)["total_s"][0],
        }
