"""Laws that a faithful transcription of the published tables, and of the models' facts, must obey."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simcore.input.files import InputError
from simcore.studies.published import Published, read_figures
from simcore.studies.serving.published import ServingPublished
from simcore.workload.spec import PoissonArrivals

ROOT = Path(__file__).resolve().parents[1]
THRESHOLDS = ["0.05", "0.10", "0.15", "0.20", "0.25"]
TASKS = {
    "llama-3.1-8b": [
        *("ifeval", "gpqa-cot", "swde", "fda", "gsm8k-cot", "math", "mgsm-cot-sw"),
        *("hotpotqa", "repobench-p", "econ", "business", "psych"),
    ],
    "llama-3.1-70b": ["gpqa-cot", "gsm8k-cot", "hotpotqa"],
}
CONTEXTS = ["1024", "32768", "65536", "98304", "131072"]
LAYERS = 32


def read(name: str) -> list[dict[str, str]]:
    with (ROOT / "validate" / "published" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- ALSpec tables 1 and 2 -----------------------------------------------------------------------


def test_every_cell_of_the_hit_tables_is_there_once() -> None:
    rows = [(row["model"], row["task"], row["threshold"]) for row in read("alspec_hits.csv")]
    expected = [
        (model, task, value) for model, tasks in TASKS.items() for task in tasks for value in THRESHOLDS
    ]
    assert sorted(rows) == sorted(expected)
    assert len(rows) == len(THRESHOLDS) * (12 + 3)


def test_hit_rates_rise_with_the_threshold() -> None:
    rows = read("alspec_hits.csv")
    for model, tasks in TASKS.items():
        for task in tasks:
            mine = sorted(
                (float(row["threshold"]), float(row["hit_rate"]))
                for row in rows
                if (row["model"], row["task"]) == (model, task)
            )
            rates = [rate for _, rate in mine]
            assert all(low < high for low, high in pairwise(rates)), (model, task)


def test_scores_are_fractions_of_three_digits_beside_one_baseline_a_task() -> None:
    baselines: dict[tuple[str, str], set[str]] = {}
    for row in read("alspec_hits.csv"):
        for column in ("score", "hit_rate", "baseline_score"):
            assert re.fullmatch(r"0\.\d{3}", row[column]), row
        assert row["source"].endswith("Table 1" if row["model"] == "llama-3.1-8b" else "Table 2")
        baselines.setdefault((row["model"], row["task"]), set()).add(row["baseline_score"])
    assert all(len(values) == 1 for values in baselines.values())


def test_hit_rates_are_those_that_section_5_2_sums_up() -> None:
    rows = [row for row in read("alspec_hits.csv") if row["model"] == "llama-3.1-8b"]
    strict = [(float(row["hit_rate"]), row["task"]) for row in rows if row["threshold"] in THRESHOLDS[:2]]
    assert min(strict) == (0.185, "hotpotqa")
    assert max(strict) == (0.898, "ifeval")
    at_tenth = [float(row["hit_rate"]) for row in rows if row["threshold"] == "0.10"]
    assert sum(rate > 0.5 for rate in at_tenth) > len(at_tenth) / 2
    assert round(max(float(row["hit_rate"]) for row in rows if row["threshold"] == "0.15"), 2) == 0.95


def test_the_larger_model_hits_more_often_on_the_same_tasks() -> None:
    rates = {(r["model"], r["task"], r["threshold"]): float(r["hit_rate"]) for r in read("alspec_hits.csv")}
    for task in TASKS["llama-3.1-70b"]:
        for threshold in THRESHOLDS:
            assert rates["llama-3.1-70b", task, threshold] > rates["llama-3.1-8b", task, threshold]


# -- ALSpec table 3 ------------------------------------------------------------------------------


def table_3(strategy: str, ranks: int, metric: str) -> list[float]:
    rows = {
        row["context_tokens"]: row
        for row in read("alspec_table3.csv")
        if (row["strategy"], row["ranks"], row["metric"]) == (strategy, str(ranks), metric)
    }
    assert list(rows) == CONTEXTS
    return [float(row["value"]) for row in rows.values()]


def test_table_3_has_five_columns_of_five_contexts() -> None:
    rows = read("alspec_table3.csv")
    assert len(rows) == 5 * len(CONTEXTS)
    for row in rows:
        assert row["groups"] == ("2" if row["strategy"] == "alspec" else "1")
        assert row["hit_rate"] == ("0.65" if row["strategy"] == "alspec" else "")
        assert row["role"] == ("projected" if row["strategy"] == "alspec" else "measured")
        assert row["unit"] == ("1/s" if row["metric"] == "tokens_per_s_per_user" else "s")
        assert (row["model"], row["batch"]) == ("llama-3.1-8b", "1")


def test_projected_column_follows_from_appendix_f_with_20_8_hits() -> None:
    hits = 0.65 * LAYERS
    projected = table_3("alspec", 4, "tokens_per_s_per_user")
    columns = zip(
        table_3("tensor_parallel", 4, "attention_s_per_layer"),
        table_3("tensor_parallel", 4, "non_attention_s_per_layer"),
        table_3("tensor_parallel", 4, "tokens_per_s_per_user"),
        projected,
        strict=True,
    )
    for attention, rest, rate, expected in columns:
        fixed = 1.0 / rate - LAYERS * (attention + rest)
        assert 0.0 < fixed < 1e-3
        latency = fixed + hits * max(attention, rest) + (LAYERS - hits) * (attention + rest)
        assert 1.0 / latency == pytest.approx(expected, rel=1e-3)
        # With whole hits, as appendix F has them, it would not come out.
        whole = fixed + 20 * max(attention, rest) + 12 * (attention + rest)
        assert 1.0 / whole != pytest.approx(expected, rel=1e-3)


def test_scaling_percentages_are_the_printed_ones() -> None:
    four = table_3("tensor_parallel", 4, "tokens_per_s_per_user")
    for others, printed in [
        (table_3("tensor_parallel", 8, "tokens_per_s_per_user"), [1.9, 8.0, 9.6, 9.0, 9.2]),
        (table_3("alspec", 4, "tokens_per_s_per_user"), [7.1, 14.8, 24.2, 26.2, 28.5]),
    ]:
        scaling = [100.0 * (other / base - 1.0) for other, base in zip(others, four, strict=True)]
        assert scaling == pytest.approx(printed, abs=0.051)


# -- ALSpec appendix F ---------------------------------------------------------------------------


def test_n150_token_latencies_are_the_sums_of_the_tables() -> None:
    rows = [row for row in read("alspec_n150.csv") if row["metric"] == "token_latency_s"]
    milliseconds = {}
    for row in rows:
        terms = re.search(r"in ns (\d+) \+ 32 \((\d+) \+ (\d+)\) = (\d+) from Table", row["source"])
        assert terms is not None
        fixed, layer, attention, total = (int(term) for term in terms.groups())
        assert fixed + LAYERS * (layer + attention) == total
        assert round(float(row["value"]) * 1e9) == total
        assert (row["strategy"], row["context_tokens"], row["role"]) == ("tensor_parallel", "1024", "derived")
        milliseconds[int(row["ranks"])] = round(total * 1e-6, 3)
    assert milliseconds == {1: 31.645, 2: 21.026, 4: 14.834, 8: 16.082}


# Tables 4 to 7 op by op, ns: one layer without flash decode, flash decode, embedding and LM head.
N150_OPS = {
    1: (
        [
            *(12454, 109174, 4299, 21048, 4828, 4827, 13166, 13049, 1701, 3055, 76389, 1823, 12487),
            *(141261, 141772, 30204, 252556, 2654),
        ],
        69853,
        [
            *(5745, 5639, 13808, 13512, 2091, 2089, 1694, 1759, 3386, 13243, 546986, 9003, 545955, 8833),
            *(545707, 8944, 547068, 9055, 29186),
        ],
    ),
    2: (
        [
            *(19567, 12471, 56690, 2541, 10972, 4834, 4820, 8447, 8383, 1833, 2320, 41730, 21842, 1621),
            *(20887, 12486, 76942, 77430, 16543, 128695, 19108, 3233, 1620),
        ],
        64309,
        [5549, 5767, 13570, 13590, 2094, 2222, 1748, 1743, 20607, 12931, 546309, 8779, 546729, 8992, 17048],
    ),
    4: (
        [
            *(22378, 12485, 39022, 2057, 6269, 4837, 4834, 6260, 6342, 1694, 1955, 24505, 24753, 1517),
            *(22055, 13423, 39711, 39791, 15800, 68424, 24764, 3212, 1496),
        ],
        56024,
        [5622, 5767, 13328, 13585, 2088, 2193, 1795, 1703, 24259, 12906, 546508, 8775],
    ),
    8: (
        [
            *(34069, 12507, 35745, 1620, 3976, 4839, 4837, 5007, 5078, 1708, 1774, 2274, 88825, 2847, 1464),
            *(54386, 15771, 22705, 22899, 15804, 38486, 59572, 2817, 1441),
        ],
        50096,
        [5641, 5607, 13717, 13680, 2095, 2092, 1707, 1726, 43463, 12909, 276107, 5716],
    ),
}


@pytest.mark.parametrize("ranks", N150_OPS)
def test_n150_token_latencies_are_the_sums_of_their_ops(ranks: int) -> None:
    layer, attention, fixed = N150_OPS[ranks]
    (row,) = (
        row
        for row in read("alspec_n150.csv")
        if (row["metric"], row["ranks"]) == ("token_latency_s", str(ranks))
    )
    assert round(float(row["value"]) * 1e9) == sum(fixed) + LAYERS * (sum(layer) + attention)


def test_the_largest_speedup_is_that_of_section_5_2() -> None:
    (row,) = (row for row in read("alspec_n150.csv") if row["metric"] != "token_latency_s")
    assert float(row["value"]) == 1.65
    assert (row["strategy"], row["ranks"], row["groups"]) == ("alspec", "4", "2")
    assert (row["context_tokens"], row["hit_rate"]) == ("98304", "0.875")


# -- models --------------------------------------------------------------------------------------

# Parameters of the released weights, as their safetensors files count them.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "codellama-34b": 33_743_970_304,
    "gpt-j-6b": 6_050_882_784,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "phi-4": 14_659_507_200,
    "granite-3.3-8b": 8_170_864_640,
    "mistral-small-24b": 23_572_403_200,
}
TIED = {"granite-3.3-8b"}


def llama_parameters(config: dict[str, Any]) -> int:
    """Embedding and head; q, k, v (Qwen 2: with biases), o; gate, up, down; two norms a layer and one at the
    end."""
    hidden, heads, kv_heads = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", hidden // heads)
    qk_norms = 2 * head_dim if config["model_type"] == "qwen3" else 0
    biases = head_dim * (heads + 2 * kv_heads) if config["model_type"] == "qwen2" else 0
    attention = 2 * hidden * head_dim * (heads + kv_heads) + qk_norms + biases
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return int(config["num_hidden_layers"] * layer + tables * config["vocab_size"] * hidden + hidden)


def gptj_parameters(config: dict[str, Any]) -> int:
    """No biases in attention; biases in the feed-forward part, its one norm a layer, and the head."""
    hidden, vocab = config["n_embd"], config["vocab_size"]
    inner = config["n_inner"] or 4 * hidden
    layer = 4 * hidden * hidden + 2 * hidden * inner + inner + hidden + 2 * hidden
    return int(config["n_layer"] * layer + 2 * vocab * hidden + vocab + 2 * hidden)


def test_there_is_a_count_for_every_model() -> None:
    assert {path.stem for path in (ROOT / "scenarios" / "models").glob("*.json")} >= set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_model_facts_give_the_published_number_of_parameters(name: str) -> None:
    config = json.loads((ROOT / "scenarios" / "models" / f"{name}.json").read_text(encoding="utf-8"))
    assert config["_source"].startswith("Hugging Face ")
    assert config["tie_word_embeddings"] is (name in TIED)
    count = gptj_parameters if config["model_type"] == "gptj" else llama_parameters
    assert count(config) == PARAMETERS[name]


# -- Flover --------------------------------------------------------------------------------------

FLOVER = ("flover_fig4", "flover_fig5", "flover_fig6")
SERVING_HEAD = (
    "device,model,strategy,label,devices,ranks,requests,rate_per_s,prompt_tokens,output_tokens,metric,"
    "value,unit,role,fitted_by,source"
)
SERVING_GOOD = "d,m,temporal_fusion,,1,1,32,2.0,,512,ttft_p99_s,0.5,s,measured,,somewhere"
REQUEST_ITERATIONS = 512
ITERATION_S = 5.8 / 512


def flover(name: str) -> list[ServingPublished]:
    return read_figures(ServingPublished, "published", ROOT / "validate" / "published" / f"{name}.csv")


def fig_5(metric: str) -> dict[int, float]:
    """Values by mean interval, in milliseconds."""
    return {
        round(1000 / row.rate_per_s): row.value
        for row in flover("flover_fig5")
        if row.metric == metric and row.rate_per_s
    }


@pytest.mark.parametrize("name", FLOVER)
def test_flovers_figures_have_the_columns_of_a_serving_study(name: str) -> None:
    assert list(read(f"{name}.csv")[0]) == SERVING_HEAD.split(",")
    rows = flover(name)
    assert rows
    for row in rows:
        assert (row.device, row.strategy) == ("a100-sxm-80gb", "temporal_fusion")
        assert row.label == ("temporal fusion, 32 slots" if name == "flover_fig6" else "")
        assert row.prompt_tokens is None
        assert row.source.startswith("Flover (Yao et al. 2023) ")
        assert row.unit == ("s" if row.metric.endswith("_s") else "1")
    places = [(row.model, row.requests, row.rate_per_s, row.metric) for row in rows]
    assert len(set(places)) == len(places)


def test_rates_are_to_the_last_bit_what_a_scenario_makes_of_its_intervals() -> None:
    intervals = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.75, 1.0, 2.0, 3.0, 4.0, 5.0]
    rates = PoissonArrivals.model_validate({"kind": "poisson", "interval_s": intervals}).rates
    assert list(dict.fromkeys(row.rate_per_s for row in flover("flover_fig5"))) == rates


def test_figure_5_is_read_as_far_as_it_is_readable() -> None:
    totals, overlaps, speedups = fig_5("iterations"), fig_5("overlap"), fig_5("speedup")
    assert set(totals) == {50, 750, 1000, 2000, 3000, 4000, 5000}
    assert set(overlaps) == {20, *totals}
    assert set(speedups) == {100, 150, 200, 300, 400, *overlaps}
    assert (totals[750], overlaps[750], speedups[750]) == (2239, 0.232, 4.5)
    rows = flover("flover_fig5")
    fitted = {row.rate_per_s: row.fitted_by for row in rows if row.metric == "speedup" and row.fitted_by}
    assert fitted == {50.0: "contention at 20 ms"}
    # The totals and overlaps say how long the one draw was, which `span_intervals` repeats.
    others = {row.fitted_by for row in rows if row.metric != "speedup"}
    assert others == {"length of the draw"}
    assert sorted(totals.values()) == [totals[interval] for interval in sorted(totals)]
    for falling in (overlaps, speedups):
        ordered = [falling[interval] for interval in sorted(falling)]
        assert ordered == sorted(ordered, reverse=True)


def test_overlap_in_figure_5_is_a_requests_iterations_over_all() -> None:
    overlaps = fig_5("overlap")
    for interval, total in fig_5("iterations").items():
        assert overlaps[interval] == pytest.approx(
            REQUEST_ITERATIONS / total, abs=0.014 if interval == 50 else 0.005
        )


def test_every_column_of_figure_5_looks_like_one_draw_of_31_gaps() -> None:
    # In the columns as read: were 2239 of the 500 ms column, its gaps would add up to 39 means.
    for interval, total in fig_5("iterations").items():
        means = (total - REQUEST_ITERATIONS) * ITERATION_S / (interval * 1e-3)
        assert 23.0 < means < 28.5
    if_of_500_ms = (2239 - REQUEST_ITERATIONS) * ITERATION_S / 0.5
    assert if_of_500_ms > 39.0


def test_figure_4_says_one_thing_by_two_numbers() -> None:
    speedups = {
        (row.model, row.requests): row.value for row in flover("flover_fig4") if row.metric == "speedup"
    }
    assert 1 / speedups["gpt-j-6b", 32] == pytest.approx(0.09, abs=0.005)
    assert 1 / speedups["llama-65b", 32] == pytest.approx(0.06, abs=0.005)
    ranks = {row.model: (row.devices, row.ranks) for row in flover("flover_fig4")}
    assert ranks == {"gpt-j-6b": (1, 1), "llama-13b": (1, 1), "llama-33b": (2, 2), "llama-65b": (4, 4)}
    slower = [row.value / 5.8 for row in flover("flover_fig4") if row.metric == "e2e_mean_s"]
    assert slower == pytest.approx([1.03, 1.08])


def test_a_serving_figure_is_read(tmp_path: Path) -> None:
    path = tmp_path / "z.csv"
    path.write_text(f"{SERVING_HEAD}\n{SERVING_GOOD}\n")
    (row,) = read_figures(ServingPublished, "published", path)
    assert (row.requests, row.rate_per_s, row.prompt_tokens, row.output_tokens) == (32, 2.0, None, 512.0)
    assert (row.label, row.metric, row.value, row.fitted_by) == ("", "ttft_p99_s", 0.5, "")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0.5", "0", "value: is '0'; a number from 1e-18 to 1e+21 is needed"),
        ("0.5", "1e-320", "value: is '1e-320'; a number from"),
        ("0.5", "1e22", "value: is '1e22'; a number from"),
        ("0.5", "nan", "value: is 'nan'"),
        (",32,", ",0,", "requests: is '0'"),
        ("2.0", "-2", "rate_per_s: is '-2'"),
        ("ttft_p99_s", "ttft_p98_s", "metric: is 'ttft_p98_s'; unknown metric 'ttft_p98_s'; did you mean"),
        ("temporal_fusion", "fusion", "strategy: is 'fusion'; unknown strategy 'fusion'; did you mean 'temp"),
        ("measured", "guessed", "role: is 'guessed'"),
        (",1,1,", ",,1,", "devices: is ''"),
        (",somewhere", "", "has not as many cells"),
    ],
)  # fmt: skip
def test_a_broken_serving_figure_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    path = tmp_path / "z.csv"
    path.write_text(f"{SERVING_HEAD}\n{SERVING_GOOD.replace(old, new, 1)}\n")
    with pytest.raises(InputError) as raised:
        read_figures(ServingPublished, "published", path)
    assert str(raised.value).startswith("published: z.csv, line 2: ")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_figures_of_another_study_are_refused() -> None:
    folder = ROOT / "validate" / "published"
    with pytest.raises(InputError, match="strategy: is 'tensor_parallel'"):
        read_figures(ServingPublished, "published", folder / "alspec_table3.csv")
    with pytest.raises(InputError, match="strategy: is 'temporal_fusion'"):
        read_figures(Published, "published", folder / "flover_fig5.csv")
