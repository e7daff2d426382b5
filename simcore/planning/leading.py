"""Which metric leads in question break_even: one of the study, or one of each of several scenarios.

Metrics of several scenarios need one unit and the same direction that is better. Whether both mean the same,
such as a whole generation, nobody but the author of the plan knows: they are named.
"""

from collections.abc import Mapping

from simcore.input.files import InputError, nearest, plain
from simcore.planning.whatif import Asked, Based
from simcore.studies.columns import METRICS, metric

# The metric that leads, by study.
LEADS = {
    "decode": "token_latency_s",
    "tiling": "total_s",
    "serving": "e2e_mean_s",
    "linear_attention": "latency_s",
    "prompt": "latency_s",
    "decode_attention": "latency_s",
}
# The column of metrics with several names: of seconds, and of others.
SECONDS, OTHERS = "time_s", "compared"


def metrics_of(asked: Asked) -> Mapping[str, str]:
    """Returns the metric that leads of each scenario. Raises InputError if a study has none of that name, or
    if they do not fit together."""
    given = asked.whatif.metric
    studies = {based.study for based in asked.every.values()}
    if given is None and len(studies) > 1:
        example = ", ".join(f"{name}: {LEADS[based.study]}" for name, based in asked.every.items())
        of = f"studies {' and '.join(sorted(studies))} need one for each of bases, such as {{{example}}}"
        raise InputError(f"{asked.file}: metric: is missing; {of}")
    found = {
        name: given[name] if isinstance(given, dict) else given or LEADS[based.study]
        for name, based in asked.every.items()
    }
    better = {name: _better(asked, based, found[name], name) for name, based in asked.every.items()}
    if len({*better.values()}) > 1:
        listed = ", ".join(f"{found[name]} of {name} is better {words}" for name, words in better.items())
        raise InputError(f"{asked.file}: metric: {listed}; all have to be better alike")
    return found


def _better(asked: Asked, based: Based, name: str, base: str) -> str:
    better = metric(based.study, name).better
    if better is None:
        known = [one for one, of in METRICS[based.study].items() if of.better is not None]
        of = f"is none of study {based.study} that can lead{nearest(name, known)}"
        place = f".{base}" if isinstance(asked.whatif.metric, dict) else ""
        raise InputError(f"{asked.file}: metric{place}: {plain(name)}: {of}")
    return better


def metric_of(asked: Asked) -> str:
    """Returns the name of the metric that leads, as columns have it: its own, or that of several."""
    names = {*metrics_of(asked).values()}
    if len(names) == 1:
        return names.pop()
    return SECONDS if all("_s" in name and not name.endswith("_per_s") for name in names) else OTHERS


def is_lower_better(asked: Asked) -> bool:
    """Whether the case with the least value leads."""
    base, name = next(iter(metrics_of(asked).items()))
    return metric(asked.every[base].study, name).better == "lower"
