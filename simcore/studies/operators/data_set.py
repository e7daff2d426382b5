"""A data set of prompts, computed batch by batch: its lengths, and what it takes.

lengths   drawn evenly from low, low + step, .., high (`workload.streams`: by seed)
batches   of consecutive prompts, each padded to its longest
seconds   sum over the batches of the latency of one at its length
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from simcore.studies.common import OperatorAxes, Row
from simcore.studies.operators.published import DATA_SET, OUT_OF_MEMORY
from simcore.studies.operators.runner import Bench, Result
from simcore.studies.operators.scenario import DataSet, PromptScenario
from simcore.workload.streams import stream


def lengths(data: DataSet, seed: int) -> list[int]:
    """Returns the lengths of the prompts, tokens, in order."""
    steps = (data.high - data.low) // data.step + 1
    drawn = stream(seed, 0, "prompt_tokens").integers(steps, size=data.prompts)
    return [data.low + data.step * int(each) for each in drawn]


def batches(data: DataSet, seed: int, batch: int) -> Counter[int]:
    """Returns how many batches of `batch` prompts are so long, by the tokens to which each is padded. A last
    one of fewer prompts counts as a full one."""
    every = lengths(data, seed)
    return Counter(max(every[first : first + batch]) for first in range(0, len(every), batch))


def data_set_rows(bench: Bench) -> Iterator[Row]:
    """Yields, for each method and batch of a scenario with a data set, its seconds and whether it fits."""
    scenario = bench.scenario
    if not isinstance(scenario, PromptScenario) or scenario.data_set is None:
        return
    groups: dict[tuple[str, int], dict[int, OperatorAxes]] = {}
    for case in bench.cases():
        groups.setdefault((case.strategy, case.batch), {})[case.length or 0] = case
    for (_, batch), by_length in groups.items():
        counts = batches(scenario.data_set, scenario.seed, batch)
        yield from _rows(bench, {by_length[length]: count for length, count in counts.items()})


def _rows(bench: Bench, counts: Mapping[OperatorAxes, int]) -> Iterator[Row]:
    from_case = next(iter(counts))
    axes = _of_all(from_case)
    results = {case: bench.run(case) for case in counts}
    out = [case for case, result in results.items() if result.latency_s is None]
    text = f"{sum(counts.values()):,} batches of {min(c.length or 0 for c in counts):,} to"
    text += f" {max(c.length or 0 for c in counts):,} tokens"
    yield Row(axes, OUT_OF_MEMORY, float(bool(out)), "")
    if out:
        shortest = min(case.length or 0 for case in out)
        yield Row(axes, DATA_SET, None, "s", source=f"out of memory from {shortest:,} tokens on")
        return
    value, low, high = (_sum(results, counts, name) for name in ("latency_s", "low_s", "high_s"))
    yield Row(axes, DATA_SET, value, "s", low, high, text)


def _sum(results: Mapping[OperatorAxes, Result], counts: Mapping[OperatorAxes, int], name: str) -> float:
    return sum(count * (getattr(results[case], name) or 0.0) for case, count in counts.items())


def _of_all(case: OperatorAxes) -> OperatorAxes:
    return OperatorAxes(
        case.strategy, case.label, case.batch, case.heads, None, case.dim, rank=case.rank, decay=case.decay
    )
