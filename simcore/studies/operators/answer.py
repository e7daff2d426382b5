"""The answer of an operator study in words: the fastest method by length, and warnings."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

from simcore.ops.op import SourceKind
from simcore.studies.common import OperatorAxes, Standing, ranged
from simcore.studies.operators.crossovers import Lead, fastest, leads, not_ranked, settings
from simcore.studies.operators.published import DATA_SET, LATENCY, OUT_OF_MEMORY
from simcore.studies.operators.runner import Bench

# Metrics that are times of a method.
TIMES = (LATENCY, DATA_SET)


def answer(bench: Bench, cases: Sequence[OperatorAxes]) -> str:
    """Returns one sentence: the fastest methods, and the tokens at which the next one passes."""
    verdicts: dict[str, list[OperatorAxes]] = {}
    for setting, members in settings(cases).items():
        verdicts.setdefault(_verdict(leads(bench, members)), []).append(setting)
    alone = len({case.strategy for case in cases}) == 1
    if alone:
        return f"On {bench.device.name}, {_alone(bench, cases)}."
    every = [lead for members in settings(cases).values() for lead in leads(bench, members)]
    if len({lead.label for lead in every}) == 1 and len(every) == len(settings(cases)):
        span = f"{min(lead.first for lead in every):,} to {max(lead.last for lead in every):,} tokens"
        text = f"{every[0].label} everywhere, {span}"
    else:
        of = list(settings(cases))
        text = "; ".join(f"{_where(members, of)}{verdict}" for verdict, members in verdicts.items())
    return f"Fastest on {bench.device.name}: {text}{_ratio(bench, cases)}{_left_out(bench, cases)}."


def _left_out(bench: Bench, cases: Sequence[OperatorAxes]) -> str:
    """Returns the methods that cannot be ranked with the others, in words."""
    out = not_ranked(bench, cases)
    if not out:
        return ""
    names = ", ".join(dict.fromkeys(case.label for case in cases if case in out))
    return (
        f"; not ranked, for the datasheet alone says what they take and the others were measured: {names}"
        f" ({len(out)} of {len(cases)} cases)"
    )


def standings(bench: Bench, cases: Sequence[OperatorAxes]) -> list[Standing]:
    """Returns the fastest method at each setting and length, among the cases that can be ranked."""
    best = [found for members in settings(cases).values() for found in fastest(bench, members)]
    return sorted((_standing(latency_s, case) for case, latency_s in best), key=lambda one: one.load)


def _standing(latency_s: float, case: OperatorAxes) -> Standing:
    decay = "" if case.decay is None else f", {_decay(case)}"
    return Standing(
        at=f"At {case.length:,} tokens and batch {case.batch:,}{decay}",
        load=(case.length or 0, case.batch, case.decay or 0),
        label=case.label,
        figure=f"takes {_time(latency_s)}",
        rank=(latency_s,),
        seconds=latency_s,
        where={
            "length" if case.kv_heads is None else "context_tokens": case.length,
            "batch": case.batch,
            **({} if case.decay is None else {"decay": case.decay}),
        },
    )


def _alone(bench: Bench, cases: Sequence[OperatorAxes]) -> str:
    fitting = [case for case in cases if bench.run(case).latency_s is not None]
    last = max(fitting, key=lambda case: (case.length or 0, case.batch))
    latency_s = bench.run(last).latency_s or 0.0
    return f"{last.label} takes {_time(latency_s)} at {last.length:,} tokens and batch {last.batch:,}"


def _time(seconds: float) -> str:
    unit, scale = next(
        (u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * s >= 1 or u == "us"
    )
    return f"{seconds * scale:.3g} {unit}"


def _where(members: Sequence[OperatorAxes], of: Sequence[OperatorAxes]) -> str:
    """Returns the settings that share a verdict, in words; empty if all settings share it."""
    if len(members) == len(of):
        return ""
    words = []
    for batch in dict.fromkeys(axes.batch for axes in members):
        decays = [_decay(axes) for axes in members if axes.batch == batch]
        whole = len(decays) == sum(axes.batch == batch for axes in of)
        words += [f"batch {batch:,}"] if whole else [f"batch {batch:,}, {decay}" for decay in decays]
    return f"{' and '.join(words)}: "


def _decay(axes: OperatorAxes) -> str:
    return "decay" if axes.decay else "no decay"


def _verdict(leads: Sequence[Lead]) -> str:
    if not leads:
        return "nothing fits into memory"
    if len(leads) == 1:
        lead = leads[0]
        span = (
            f"{lead.first:,} tokens" if lead.first == lead.last else f"{lead.first:,} to {lead.last:,} tokens"
        )
        return f"{lead.label} ({span})"
    words = [leads[0].label]
    for lead in leads[1:]:
        place = lead.first if lead.passes is None else round(lead.passes)
        words.append(f"{lead.label} from {place:,} tokens on")
    return ", ".join(words)


def _ratio(bench: Bench, cases: Sequence[OperatorAxes]) -> str:
    """Returns the speed-up of Flash-Decoding over FlashAttention-2 in words, for decode attention."""
    by: dict[tuple[int, int | None], dict[str, float]] = defaultdict(dict)
    for case in cases:
        latency_s = bench.run(case).latency_s
        if latency_s is not None:
            by[case.batch, case.length][case.strategy] = latency_s
    both = [v for v in by.values() if {"flash_attention_2", "flash_decoding"} <= v.keys()]
    ratios = [v["flash_attention_2"] / v["flash_decoding"] for v in both]
    if not ratios:
        return ""
    return f"; Flash-Decoding is {ranged(ratios)} times as fast as FlashAttention-2"


# Share of a time that is not named; the most ops that are.
SMALL, MOST_NAMED = 1e-3, 4


def _because_of(bench: Bench, source: SourceKind) -> str:
    """Names the kinds of op of whole models that are priced so, with their share of the time in the cases
    where they are; nothing for single operators."""
    if bench.config is None:
        return ""
    shares: dict[str, list[float]] = defaultdict(list)
    for case in filter(bench.fits, bench.cases()):
        for (of, kind), share in bench.sources(case).items():
            if of == source:
                shares[kind].append(share)
    found = sorted(((fmean(each), kind) for kind, each in shares.items()), reverse=True)
    named = [f"{kind} {100.0 * share:.2g} %" for share, kind in found if share >= SMALL]
    others = [f"{len(named) - MOST_NAMED} others less"] if len(named) > MOST_NAMED else []
    return f" (of their time, by op: {', '.join(named[:MOST_NAMED] + others)})" if named else ""


def _too_long(bench: Bench) -> list[str]:
    """Returns a warning of prompts that are longer than their model's context."""
    limit = bench.config.limit if bench.config else None
    most = max((case.length or 0 for case in bench.cases()), default=0)
    if limit is None or most <= limit.tokens:
        return []
    return [f"length: {most:,} tokens are more than the {limit.tokens:,} of the model ({limit.source})"]


def warnings(bench: Bench, cases: Iterable[OperatorAxes]) -> list[str]:
    """Returns warnings: extrapolated and unmeasured prices, cases that do not fit into memory."""
    found = _too_long(bench)
    sources: dict[str, int] = defaultdict(int)
    out: dict[tuple[str, int], int] = {}
    for case in cases:
        result = bench.run(case)
        if result.price is not None:
            sources[result.price.source] += 1
        elif (case.label, case.batch) not in out:
            out[case.label, case.batch] = case.length or 0
    total = sum(sources.values())
    if sources["extrapolated"]:
        found.append(
            f"{sources['extrapolated']} of {total} cases lie outside of what their prices were fitted to"
            f"{_because_of(bench, 'extrapolated')}"
        )
    if sources["roofline"]:
        found.append(
            f"{sources['roofline']} of {total} cases are priced by datasheet and roofline, not by"
            f" measurements of {bench.device.name}{_because_of(bench, 'roofline')}"
        )
    places: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (label, batch), tokens in out.items():
        places[batch, tokens].append(label)
    found += [
        f"out of memory at batch {batch:,} from {tokens:,} tokens on: {', '.join(labels)}"
        for (batch, tokens), labels in places.items()
    ]
    return found


def errors(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the median and worst errors of times that were not fitted, in total, by method and by source,
    and of the ratios of a data set's; and the number of cells with memory predicted right."""
    predicted = [line for line in lines if line["metric"] in TIMES and line["role"] != "fitted"]
    notes = []
    if predicted:
        what = "seconds of the data set" if predicted[0]["metric"] == DATA_SET else "latencies"
        notes.append(f"predicted {what} against published ones: {_summed(predicted)}")
        if ratios := ratio_errors(predicted):
            worst = max(ratios, key=abs)
            text = f"median {median(map(abs, ratios)):.1f} %, worst {worst:+.1f} % ({len(ratios)})"
            notes.append(f"ratios between methods of a batch: {text}")
    for title, named in (("by method", _method), ("by table", _tables)):
        groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for line in predicted:
            for name in named(line):
                groups[name].append(line)
        if len(groups) > 1:
            notes.append(f"{title}: {'; '.join(f'{name} {_summed(of)}' for name, of in groups.items())}")
    memory = [line for line in lines if line["metric"] == OUT_OF_MEMORY]
    if memory:
        wrong = [line for line in memory if line["error_pct"]]
        names = ", ".join(dict.fromkeys(str(line["source"]) for line in wrong))
        text = f"out of memory or not: {len(memory) - len(wrong)} of {len(memory)} published cells right"
        notes.append(f"{text}{f'; wrong: {names}' if wrong else ''}")
    return notes


def ratio_errors(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the errors, in percent, of the ratios of a data set's seconds between each two methods of one
    batch: (predicted / predicted) / (published / published) - 1."""
    found = []
    for batch in dict.fromkeys(line["batch"] for line in lines):
        here = [line for line in lines if line["batch"] == batch and line["metric"] == DATA_SET]
        for one, other in combinations(here, 2):
            off = one["predicted"] / other["predicted"] * other["reference"] / one["reference"]
            found.append(100.0 * (off - 1.0))
    return found


def _method(line: Mapping[str, Any]) -> list[str]:
    return [str(line["strategy"])]


def _tables(line: Mapping[str, Any]) -> list[str]:
    """Returns the tables that print a figure: "LeetDecoding Table 3, FA; LeetDecoding Table 9, FA" has 2."""
    sources = str(line["source"]).split("; ")
    return list(dict.fromkeys(source.rpartition(",")[0] or source for source in sources))


def _summed(lines: Sequence[Mapping[str, Any]]) -> str:
    found = [line["error_pct"] for line in lines]
    return f"median {median(map(abs, found)):.1f} %, worst {max(found, key=abs):+.1f} % ({len(found)})"
