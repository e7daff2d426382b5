"""The columns of results.csv and of the Parquet files, and the metrics, each with its meaning. `schema`
describes those of one run directory.

Columns and metrics are described only here. Each run decides which tables and metrics it has, and a metric's
unit.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

Type = Literal["text", "integer", "number", "boolean"]


class Column(NamedTuple):
    """A column: the type of its values, their unit ("" for words and plain numbers), and what they mean."""

    type: Type
    unit: str
    meaning: str


class Metric(NamedTuple):
    """A metric: whether less or more of it is better (None: neither), and what it means."""

    better: Literal["lower", "higher"] | None
    meaning: str


def _text(meaning: str) -> Column:
    return Column("text", "", meaning)


def _whole(meaning: str, unit: str = "") -> Column:
    return Column("integer", unit, meaning)


def _number(meaning: str, unit: str = "") -> Column:
    return Column("number", unit, meaning)


# -- columns of results.csv ----------------------------------------------------------------------------

_STUDY = {
    "study": _text("study that the figure is of"),
    "device": _text("device, or fleet, that it is of"),
}
_STRATEGY = {"strategy": _text("kind of strategy, or the method")}
_LABEL = {"label": _text("what people call the strategy: figures of a study are told apart by it")}
_CASE = {**_STUDY, **_STRATEGY, **_LABEL}
_DEVICES = {"devices": _whole("devices that are used in all")}
_CONTEXT = {"context_tokens": _whole("cached tokens of a sequence; empty for what holds over all", "tokens")}
_BATCH = {"batch": _whole("sequences at a time")}
_HIT_RATE = {"hit_rate": _number("share of speculations that hit; empty without speculation")}
_METRIC = {"metric": _text("which figure it is")}
_OP_KIND = {"op_kind": _text("kind of op that the figure is of, or source of prices; else empty")}
_RIVAL = {"rival": _text("the other method of a crossover; else empty")}
_RANKS = {
    "ranks": _whole("devices of a server, which hold a slice of the model each; empty where servers differ")
}
_LOAD = {
    "requests": _whole("requests that come"),
    "rate_per_s": _number(
        "requests that are offered a second, or sessions where requests are turns; empty in a closed loop",
        "1/s",
    ),
}
OF_FIGURE: Mapping[str, Column] = {
    "value": _number("the figure, in `unit`; empty where there is none, and `source` says why"),
    "low": _number("low end of its interval, in `unit`; empty where none is known"),
    "high": _number("high end of its interval, in `unit`; empty where none is known"),
    "unit": _text("unit of value, low and high; empty for a plain number or share"),
    "source": _text("where the figure and its interval come from, in words"),
}
# Columns of results.csv by study.
COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "decode": {
        **_CASE,
        "ranks": _whole("devices of a group, which hold a slice of the model each"),
        "groups": _whole("groups of such devices"),
        **_DEVICES,
        **_CONTEXT,
        **_BATCH,
        **_HIT_RATE,
        **_METRIC,
        **_OP_KIND,
        **OF_FIGURE,
    },
    "serving": {
        **_CASE,
        **_DEVICES,
        **_RANKS,
        **_LOAD,
        "prompt_tokens": _number("mean length of prompts", "tokens"),
        "output_tokens": _number("mean length of answers", "tokens"),
        **_METRIC,
        **OF_FIGURE,
    },
    "linear_attention": {
        **_CASE,
        **_DEVICES,
        **_BATCH,
        "heads": _whole("heads of a sequence"),
        "length": _whole("tokens of a sequence; empty for what holds over all lengths", "tokens"),
        "rank": _whole("width of a head's queries and keys"),
        "dim": _whole("width of a head's values and outputs"),
        "decay": _whole("1 with a decay per head, 0 without"),
        **_RIVAL,
        **_METRIC,
        **OF_FIGURE,
    },
    "decode_attention": {
        **_CASE,
        **_DEVICES,
        **_BATCH,
        "q_heads": _whole("query heads"),
        "kv_heads": _whole("heads of the KV cache"),
        "head_dim": _whole("width of a head"),
        **_CONTEXT,
        **_RIVAL,
        **_METRIC,
        **OF_FIGURE,
    },
    "prompt": {
        **_CASE,
        **_DEVICES,
        **_BATCH,
        "heads": _whole("heads of linear attention"),
        "length": _whole("tokens of a prompt; empty for what holds over all lengths", "tokens"),
        "rank": _whole("width of a head's queries and keys"),
        "dim": _whole("width of a head's values and outputs"),
        "decay": _whole("1: every head has a decay"),
        **_RIVAL,
        **_METRIC,
        **OF_FIGURE,
    },
    "tiling": {
        **_CASE,
        "layers": _whole("layers of the model"),
        "channels": _whole("width of a position"),
        "block": _text("what follows a convolution: mlp or gate"),
        "tokens": _whole("positions in all, those of the prompt too", "tokens"),
        "prompt_tokens": _whole("positions of the prompt", "tokens"),
        **_BATCH,
        **_DEVICES,
        **_METRIC,
        **_OP_KIND,
        **OF_FIGURE,
    },
}

# -- columns of Parquet files --------------------------------------------------------------------------

_START_END = {
    "start_s": _number("when it began, since the run did", "s"),
    "end_s": _number("when it was done, since the run began", "s"),
}
_SERVED = {
    **_LABEL,
    **_STRATEGY,
    **_DEVICES,
    **_RANKS,
    **_LOAD,
    "prompt_mean": _number("mean length of prompts of the case", "tokens"),
    "output_mean": _number("mean length of answers of the case", "tokens"),
}
_TILED = {name: COLUMNS["tiling"][name] for name in ("label", "layers", "channels", "batch", "tokens")}
_ENDS = {
    f"{end}_{what}": _whole(f"{end} {meaning}; empty where there is none")
    for what, meaning in (
        ("input", "position that the launch reads"),
        ("output", "position that it adds to"),
        ("lag", "distance from an input to an output"),
    )
    for end in ("first", "last")
}
# Columns of Parquet files by study and file.
TABLES: Mapping[str, Mapping[str, Mapping[str, Column]]] = {
    "decode": {
        "steps.parquet": {
            **{name: COLUMNS["decode"][name] for name in ("label", "context_tokens", "batch", "hit_rate")},
            "token": _whole("which token of the run, from 0 on"),
            **_START_END,
        },
    },
    "serving": {
        "requests.parquet": {
            **_SERVED,
            "replica": _whole("replica that it is of: the first, 0"),
            "request": _whole("which request, from 0 on, as they come"),
            "tenant": _text("whose request it is"),
            "group": _text("group of servers that took it; only with fleets"),
            "instance": _whole("which server took it"),
            "arrival_s": _number("when it came, since the run began", "s"),
            "scheduled_s": _number("when it was first scheduled; NaN for never", "s"),
            "first_token_s": _number("when its first token was there; NaN for never", "s"),
            "finish_s": _number("when its last token was there; NaN for never", "s"),
            "prompt_tokens": _whole("length of its prompt", "tokens"),
            "output_tokens": _whole("length of its answer", "tokens"),
            "preemptions": _whole("how often it lost its place and was computed again"),
            "cached_prompt_tokens": _whole("prompt tokens in a cache when it was first scheduled", "tokens"),
            "status": _text("finished or rejected"),
            "measured": Column("boolean", "", "whether figures are of it: it came in the measured window"),
        },
        "levels.parquet": {
            **_SERVED,
            "t_s": _number("time since the run began", "s"),
            "queue": _number("requests that have come and wait"),
            "batch": _number("requests that decode, on all servers"),
            "kv_share": _number("share of the KV cache that is held, mean over servers"),
            "tokens": _number("tokens generated so far", "tokens"),
            "servers": _number("servers that hold their devices; only in a scenario with autoscaling"),
        },
    },
    "tiling": {
        "steps.parquet": {
            **_TILED,
            "token": _whole("last position of a stretch of equally many"),
            "end_s": _START_END["end_s"],
            "latency_s": _number("longest latency of a token in the stretch", "s"),
        },
        "tiles.parquet": {
            **_TILED,
            "side": _whole("side of the tile", "tokens"),
            "implementation": _text("how the tile is computed"),
            "seconds": _number("predicted time of the tile of all layers", "s"),
            "low_s": _number("low end of its 90 % interval", "s"),
            "high_s": _number("high end of its 90 % interval", "s"),
            "chosen": Column("boolean", "", "whether it is the cheapest for this side"),
        },
        "cells.parquet": {
            **_LABEL,
            "launch": _whole("which launch of a short run"),
            "graph": _text("graph that it launches"),
            **_OP_KIND,
            "layer": _whole("layer, from 1 on"),
            **_ENDS,
            "start_s": _START_END["start_s"],
        },
        "growth.parquet": {
            **_TILED,
            "mixer_flops": _number("floating-point operations of the mixers", "FLOP"),
            "mixer_hbm_bytes": _number("bytes that mixers read and write", "B"),
            "memory_bytes": _number("memory that the run takes", "B"),
            "total_s": _number("time of the whole generation", "s"),
        },
    },
}

# -- metrics -------------------------------------------------------------------------------------------

_MEMORY = {"memory_bytes": Metric("lower", "device memory that it takes")}
_WORK = {
    "flops": Metric(None, "floating-point operations of all launches"),
    "hbm_bytes": Metric(None, "bytes that all launches read and write"),
    "launches": Metric(None, "launches"),
}
_OPERATOR = {
    "latency_s": Metric("lower", "time from the call until the operator is done"),
    "not_ranked": Metric(None, "1 where its price rests on another basis than those of others at its place"),
    **_MEMORY,
    "out_of_memory": Metric("lower", "1 where it does not fit into the device's memory, else 0"),
    **_WORK,
    "slowdown_over_fastest": Metric("lower", "latency / least latency of any method at its place"),
    "crossover_tokens": Metric(None, "tokens from which `rival` is faster"),
}
_KEPT = {"ttft": "time to the first token", "tpot": "time per further token", "e2e": "time to the last token"}
# Metrics by study. A mean, maximum or percentile is listed by the name of its quantity.
METRICS: Mapping[str, Mapping[str, Metric]] = {
    "decode": {
        "token_latency_s": Metric("lower", "time from one token to the next, for one user"),
        "tokens_per_s_per_user": Metric("higher", "tokens a second for one user"),
        "standard_error_s": Metric("lower", "standard error of the latency's mean over replicas"),
        "critical_path_s": Metric("lower", "part of the latency that was spent in ops of kind `op_kind`"),
        "attention_share": Metric(None, "share of the latency in attention kernels"),
        "non_attention_share": Metric(None, "share of the latency outside of attention kernels"),
        "attention_s_per_layer": Metric("lower", "part of the latency in attention kernels, per layer"),
        "non_attention_s_per_layer": Metric("lower", "part of the latency in the rest of a layer, per layer"),
        "exposed_communication_s": Metric("lower", "part of the latency in collectives, exchanges and puts"),
        "price_share": Metric(None, "share of the predicted device time whose price is from `op_kind`"),
        "read_once_s": Metric(None, "least latency: weights and KV cache read once at the datasheet's rate"),
        "speedup_over_baseline": Metric("higher", "latency of the baseline / latency, at its place"),
        "speedup_over_tensor_parallel": Metric(
            "higher", "latency of tensor parallelism on as many devices / latency"
        ),
        "overlap_gain_s": Metric("higher", "what overlapping the last layer with the next token spares"),
        "latency_if_priced_s": Metric("lower", "latency with prices for what the profile takes as free"),
        "verification_s": Metric("lower", "what a layer's speculative attention takes beyond a plain one"),
        "threshold": Metric(None, "error up to which a speculation is accepted"),
        "hits_score": Metric("higher", "score of the task with speculation, as published"),
        "baseline_score": Metric("higher", "score of the task without speculation, as published"),
        "error_bound_worst_case": Metric("lower", "relative error of the last hidden state at most"),
        "error_bound_linear": Metric("lower", "the worst case to first order"),
        "error_bound_high_probability": Metric("lower", "relative error that is hardly ever exceeded"),
        "crossover_context_tokens": Metric(None, "cached tokens at which it passes tensor parallelism"),
        "passes_rival_at_tokens": Metric(None, "cached tokens at which it passes the second model"),
        "kv_bytes": Metric("lower", "KV cache of all sequences at this context"),
        "state_bytes": Metric("lower", "states of linear attention of all sequences"),
        "sequences_held": Metric(
            "higher", "sequences of this context that a device holds beside the weights"
        ),
        "layer_s": Metric("lower", "prices of the ops of one layer whose mixer is `op_kind`"),
        "rival_token_latency_s": Metric("lower", "time from one token to the next with the second model"),
        "speedup_over_rival": Metric("higher", "latency with the second model / latency"),
        "rival_sequences_held": Metric("higher", "the same sequences with the second model"),
        "crossover_hit_rate": Metric(None, "hit rate at which it passes tensor parallelism"),
        "crossover_hit_rate_if_priced": Metric(
            None, "the same with prices for what the profile takes as free"
        ),
        "crossover_link_latency_s": Metric(None, "link latency at which it passes tensor parallelism"),
    },
    "serving": {
        "ttft_s": Metric("lower", "time from a request's arrival to its first token (TTFT)"),
        "tpot_s": Metric("lower", "time per output token after a request's first (TPOT)"),
        "itl_s": Metric("lower", "time between two tokens of a request (ITL)"),
        "e2e_s": Metric("lower", "time from a request's arrival to its last token (E2E)"),
        "queue_s": Metric("lower", "time from a request's arrival until it is first scheduled"),
        "request_throughput_per_s": Metric("higher", "requests that finish a second"),
        "output_throughput_tokens_per_s": Metric("higher", "tokens that are generated a second"),
        "total_throughput_tokens_per_s": Metric("higher", "tokens of prompts and answers a second"),
        "duration_s": Metric("lower", "time from the first arrival to the last answer"),
        **{
            f"slo_attainment_{name}": Metric("higher", f"share of the requests whose {of} is as promised")
            for name, of in _KEPT.items()
        },
        "slo_attainment": Metric("higher", "share of the requests that keep all that is promised"),
        "goodput_per_s": Metric("higher", "requests a second that keep all that is promised"),
        "utilisation": Metric(None, "share of the time in which a server runs a step, mean over servers"),
        "mean_batch": Metric(None, "requests that decode at a time, mean over time"),
        "max_batch": Metric(None, "requests that decode at a time at most"),
        "mean_kv_share": Metric(None, "share of the KV cache that is held, mean over time and servers"),
        "max_kv_share": Metric(None, "share of a server's KV cache that is held at most"),
        "mean_queue": Metric("lower", "requests that wait, mean over time"),
        "max_queue": Metric("lower", "requests that wait at most"),
        "preemptions": Metric("lower", "how often requests lost their place and were computed again"),
        "waited_for_kv": Metric("lower", "requests that were next and found no room in the KV cache"),
        "rejected": Metric("lower", "requests that were rejected"),
        "completed": Metric("higher", "requests that got all their tokens"),
        "iterations": Metric(None, "replays of steps that give tokens"),
        "overlap": Metric(None, "tokens / iterations / requests"),
        "prefix_hit_share": Metric("higher", "share of prompt tokens that came from the cache"),
        "request_share": Metric(None, "share of the answered requests"),
        "server_s": Metric("lower", "seconds for which servers held their devices, all together"),
        "device_hours": Metric("lower", "hours for which devices were held, all together"),
        "device_time_saved": Metric("higher", "share of the time of all devices in which they were not held"),
        "mean_servers": Metric("lower", "servers that held their devices, mean over time"),
        "max_servers": Metric("lower", "servers that held their devices at once at most"),
        "server_starts": Metric(None, "how often a server was started after the run began"),
        "kv_tokens": Metric(None, "tokens that the KV cache of a server has room for"),
        "sequences_held": Metric("higher", "sequences as long as the longest request that a server holds"),
        "offered_per_s": Metric(None, "requests that come a second"),
        "window_begin_s": Metric(None, "when the measured window begins, since the run did"),
        "window_end_s": Metric(None, "when the measured window ends, since the run began"),
        "window_requests": Metric(None, "requests that come in the measured window"),
        "speedup": Metric("higher", "duration with concurrent instances / duration, at the same load"),
    },
    "linear_attention": _OPERATOR,
    "prompt": {
        **_OPERATOR,
        "dataset_s": Metric("lower", "time for all batches of the data set, one after the other"),
    },
    "decode_attention": {
        **_OPERATOR,
        "splits": Metric(None, "parts that Flash-Decoding cuts a context into"),
    },
    "tiling": {
        "total_s": Metric("lower", "time of the whole generation, the prompt's included"),
        "mixer_s": Metric("lower", "device time of the mixers' ops"),
        "block_s": Metric("lower", "device time of all other ops"),
        "tokens_per_s": Metric("higher", "generated tokens a second, over the whole time"),
        "token_s": Metric("lower", "time from one token to the next"),
        "speedup_over_lazy": Metric("higher", "whole time of lazy / whole time, at its place"),
        "speedup_over_lazy_by_layers": Metric(
            "higher", "whole time of lazy, layer by layer / whole time, at its place"
        ),
        "mixer_speedup_over_lazy": Metric("higher", "device time of lazy's mixers / that of the mixers"),
        "mixer_flops": Metric(None, "floating-point operations of the mixers"),
        "mixer_hbm_bytes": Metric(None, "bytes that mixers read and write"),
        **_WORK,
        "activation_positions_per_token": Metric(
            None, "positions that mixers read or add to, per layer and generated token"
        ),
        **_MEMORY,
        "seconds": Metric("lower", "device time of ops of kind `op_kind`"),
    },
}
# Suffixes of a figure of the whole run (the plain name is of the measured window), and of one at both ends of
# the prices' intervals.
# Latencies that stand for a service where no limit says which ones matter.
USUAL_LATENCIES = ("ttft_p99_s", "tpot_p99_s", "e2e_p50_s")
WHOLE_RUN, BY_PRICES = "_whole_run", "_by_prices"
_VARIANTS = {
    WHOLE_RUN: ", of the whole run, warm-up and drain in it",
    BY_PRICES: ", of the first replica, with all prices at the ends of their intervals",
}
# What the metrics of one tenant's requests begin with: tenant.NAME.METRIC.
TENANT = "tenant"
# What the metrics of one group of servers of a fleet begin with: group.NUMBER.METRIC.
GROUP = "group"
_SPREAD = r"(?P<of>\w+)_(?:mean|(?P<greatest>max)|p(?P<percent>\d+))_s"


def split_tenant(name: str) -> tuple[str, str]:
    """Returns the tenant that a metric is of, empty for all of them, and the metric of its requests.

    >>> split_tenant("tenant.chat.ttft_p99.9_s"), split_tenant("ttft_p99_s")
    (('chat', 'ttft_p99.9_s'), ('', 'ttft_p99_s'))
    """
    first, *rest = name.split(".", 2)
    return (rest[0], rest[1]) if first == TENANT and len(rest) > 1 else ("", name)


def metric(study: str, name: str) -> Metric:
    """Returns a metric of a study; the meaning of an undescribed one is empty."""
    for ending, words in _VARIANTS.items():
        if name.endswith(ending):
            plain = metric(study, name.removesuffix(ending))
            return Metric(plain.better, plain.meaning + words)
    tenant, own = split_tenant(name)
    if tenant:
        plain = metric(study, own)
        return Metric(plain.better, f"{plain.meaning}, of tenant {tenant}") if plain.meaning else plain
    if (of_group := re.fullmatch(rf"{GROUP}\.(\d+)\.(\w+)", name)) is not None:
        plain = metric(study, of_group[2])
        return Metric(plain.better, f"{plain.meaning}, of group {of_group[1]} of the fleet")
    known = METRICS[study]
    if name not in known and (spread := re.fullmatch(_SPREAD, name)) and f"{spread['of']}_s" in known:
        percent, greatest = spread["percent"], spread["greatest"]
        which = f"{percent}th percentile" if percent else "greatest" if greatest else "mean"
        whole = known[f"{spread['of']}_s"]
        return Metric(whole.better, f"{whole.meaning}, {which}")
    return known.get(name, Metric(None, ""))


def schema(
    study: str, metrics: Iterable[tuple[str, str]], tables: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """Returns the description of a run directory's tables. `metrics`: name and unit of the run's metrics;
    `tables`: the columns of each Parquet file."""
    files = {"results.csv": COLUMNS[study]}
    files |= {file: {name: TABLES[study][file][name] for name in names} for file, names in tables.items()}
    return {
        "study": study,
        "columns": {
            file: [{"name": name, **column._asdict()} for name, column in columns.items()]
            for file, columns in files.items()
        },
        "metrics": [
            {"name": name, "unit": unit, **metric(study, name)._asdict()}
            for name, unit in dict(metrics).items()
        ],
    }
