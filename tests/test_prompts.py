"""The study `prompt`: whole prompts through models of linear attention, and LeetDecoding's Tables 7 and 8."""

import csv
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simcore
from simcore.assembly import Parts, assemble
from simcore.devices.fit import Fit
from simcore.devices.linear_fallback import fit_between, launches_of
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.models.decoder_config import DecoderConfig, ModelError, load_config
from simcore.models.mixers import FULL, LINEAR, LinearMixer
from simcore.models.operators import linear_attention_op
from simcore.models.prompt import PROMPT_METHODS, Prompt
from simcore.ops.op import Op
from simcore.scenario import load_scenario, parse_scenario
from simcore.studies.common import Outcome
from simcore.studies.operators.answer import ratio_errors
from simcore.studies.operators.data_set import batches, lengths
from simcore.studies.operators.scenario import DataSet
from simcore.validate.machines.here import check_prompts
from tests.thorough import first, slow

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "scenarios" / "papers" / "leetdecoding_prompts.yaml"
A6000 = load_device("a6000")
TOY = DecoderConfig(
    "toy", 48, 96, 2, 4, 4, 8, 100, tied_embeddings=False, gated=False, mixers=(LINEAR, LINEAR),
    linear=LinearMixer(4, 4, 8, 16),
)  # fmt: skip
MIXED = replace(TOY, mixers=(LINEAR, FULL), kv_heads=2)
fixed = settings(derandomize=True, database=None, max_examples=40)
LINE: dict[str, Any] = {
    "name": "x", "study": "prompt", "device": "a6000", "model": "toy-retnet-1.3b", "layers": 2,
    "dtype": "fp32", "length": [128, 512], "methods": ["vanilla", "lightning", "original"],
}  # fmt: skip


# -- a prompt as one op --------------------------------------------------------------------------


@fixed
@given(st.sampled_from(PROMPT_METHODS), st.integers(1, 3), st.integers(1, 70), st.booleans())
def test_products_of_a_prompt_do_two_operations_a_weight_and_token(
    method: str, batch: int, length: int, all_logits: bool
) -> None:
    prompt = Prompt(MIXED, method, batch, length, "fp32", all_logits=all_logits)
    products = [part for part in prompt.op.parts if part.kind == "matmul"]
    rows = batch * length if all_logits else batch
    expected = 2 * (batch * length * MIXED.matrices + rows * MIXED.vocab * MIXED.hidden)
    assert sum(part.work.flops for part in products) == expected
    (attention,) = [part for part in prompt.op.parts if part.kind == "prefill_attention"]
    assert attention["pairs"] == batch * length * (length + 1) // 2


@pytest.mark.parametrize("method", PROMPT_METHODS)
def test_a_prompt_has_its_method_in_each_linear_layer(method: str) -> None:
    """And all work is that of its parts."""
    prompt = Prompt(TOY, method, 2, 40, "fp32", states=False)
    alone = Prompt(replace(TOY, layers=1, mixers=(LINEAR,)), method, 2, 40, "fp32", states=False)
    outside = {"embedding", "head_norm", "lm_head", "sample"}
    inside = sum(part.work.flops for part in prompt.op.parts if part.name not in outside)
    assert inside == 2 * sum(part.work.flops for part in alone.op.parts if part.name not in outside)
    assert prompt.op.work.flops == pytest.approx(sum(part.work.flops for part in prompt.op.parts))
    if method == "original":
        return
    own = [part for part in prompt.op.parts if part.kind.startswith("linear_attention_")]
    op = linear_attention_op(
        method, batch=2, heads=4, length=40, rank=8, dim=16, dtype="fp32", decay=True, mask_by_rows=False,
        states=False,
    )  # fmt: skip
    assert [each.work for each in own] == [op.work] * 2


def test_memory_of_a_prompt_in_closed_form() -> None:
    """Vanilla holds three N by N matrices for each head and sequence, beside q, k, v, out and the gate."""
    batch, n = 2, 500
    prompt = Prompt(TOY, "vanilla", batch, n, "fp32")
    # And the states that both layers keep of each prompt, in fp32.
    weights = 4 * TOY.parameters + batch * 2 * 4 * 8 * 16 * 4
    mixer = batch * 4 * (n * (2 * 8 + 2 * 16) + 3 * n * n) + batch * n * 4 * 16
    assert prompt.memory_bytes == weights + 4 * (2 * batch * n * 48 + mixer)
    # One head's state beside its tokens; then logits, which are wider.
    short = Prompt(TOY, "lightning", batch, 10, "fp32")
    mixer = batch * 4 * (10 * (2 * 8 + 2 * 16) + 8 * 16) + batch * 10 * 4 * 16
    assert short.memory_bytes == weights + 4 * (2 * batch * 10 * 48 + mixer)
    wide = Prompt(replace(TOY, vocab=1000), "lightning", batch, 10, "fp32", all_logits=True)
    tables = 4 * 2 * 900 * 48
    assert wide.memory_bytes == weights + tables + 4 * (2 * batch * 10 * 48 + batch * 10 * 1000)


def test_a_model_without_linear_attention_has_no_such_prompts() -> None:
    with pytest.raises(ModelError, match="toy has no layer of linear attention"):
        Prompt(replace(TOY, linear=None, mixers=()), "vanilla", 1, 8, "fp32")


# -- prices at other shapes ----------------------------------------------------------------------


def method(batch: int, heads: int, length: int, kind: str = "vanilla", **widths: int) -> Op:
    return linear_attention_op(
        kind, batch=batch, heads=heads, length=length, rank=widths.get("rank", 128),
        dim=widths.get("dim", 128), dtype="fp32", decay=True, mask_by_rows=True, states=False,
    )  # fmt: skip


def test_constants_between_two_numbers_of_pairs() -> None:
    """kernel_s linear, and efficiency a power, of the pairs; outside as at the nearest."""

    def fit(kernel_s: float, efficiency: float) -> Fit:
        return Fit(kernel_s, efficiency, 0.5, 2.0, 3, 1e-5, 1e-2)

    where = {"heads": "32", "rank": "128", "dim": "128", "decay": "1", "dtype": "fp32"}
    lines = [({**where, "batch": "1"}, fit(1e-6, 0.1)), ({**where, "batch": "16"}, fit(5e-6, 0.4))]
    for batch, heads, kernel_s, efficiency in (
        (4, 32, 3e-6, 0.2), (1, 32, 1e-6, 0.1), (16, 32, 5e-6, 0.4), (1, 8, 1e-6, 0.1), (99, 32, 5e-6, 0.4),
        (16, 8, 3e-6, 0.2),
    ):  # fmt: skip
        found, of, _ = fit_between(method(batch, heads, 64), lines) or (None, 0, "")
        assert found is not None
        assert of == 32
        assert (found.kernel_s, found.efficiency) == (pytest.approx(kernel_s), pytest.approx(efficiency))
    other = [({**where, "batch": "1", "decay": "0"}, fit(1e-6, 0.1))]
    assert fit_between(method(1, 32, 64), other) is None


def test_a_mask_that_is_made_head_by_head_takes_time_by_heads() -> None:
    """512 rows of a mask and three other launches: with a fourth of the heads, a fourth of the rows."""
    op = method(1, 8, 512)
    launches, _ = launches_and_floor(op, roofline(A6000))
    assert launches == 515
    assert launches_of(op, launches, 32) == 512 // 4 + 3
    assert launches_of(method(1, 32, 512), launches, 32) == launches


def test_a_shape_with_a_fit_of_its_own_keeps_it() -> None:
    price = pricer(A6000, profile=load_profile("a6000", "leetdecoding-tables"))
    assert price(method(1, 32, 8192)).detail.startswith("fit of linear_attention_vanilla batch=1")
    other = price(method(2, 32, 8192))
    assert other.detail.startswith("fits of linear_attention_vanilla at pairs 32 and 512, of 64")
    assert other.source == "extrapolated"


# -- a data set ----------------------------------------------------------------------------------


@fixed
@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 60))
def test_batches_hold_all_prompts_padded(seed: int, batch: int, prompts: int) -> None:
    data = DataSet(prompts=prompts, low=100, high=400, step=50)
    every = lengths(data, seed)
    assert {*every} <= {*data.lengths}
    counts = batches(data, seed, batch)
    assert counts.total() == -(-prompts // batch)
    assert max(counts) == max(every)
    assert sum(length * count for length, count in counts.items()) * batch >= sum(every)
    assert batches(data, seed, 1) == Counter(every)


def ran(scenario: Any) -> tuple[Parts, Outcome, list[dict[str, Any]]]:
    parts = assemble(scenario, "x.yaml")
    outcome = parts.study.run(lambda doing, done, total: None)
    return parts, outcome, parts.study.compare(outcome)


def test_a_data_set_takes_the_sum_of_its_batches() -> None:
    data = {"prompts": 9, "low": 128, "high": 384, "step": 128}
    _, outcome, _ = ran(parse_scenario({**LINE, "length": None, "data_set": data, "batch": [2]}, "x"))
    counts = batches(DataSet(**data), 0, 2)
    for name in ("vanilla", "lightning", "original"):
        own = [row for row in outcome.rows if row.axes.strategy == name]
        each = {row.axes.length: row.value for row in own if row.metric == "latency_s"}
        (whole,) = [row for row in own if row.metric == "dataset_s"]
        assert whole.axes.length is None
        assert whole.value == pytest.approx(sum(n * each[length] for length, n in counts.items()), rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"length": None}, "length: is needed, or data_set in its place, not both"),
        ({"data_set": {"prompts": 1, "low": 1, "high": 2}}, "length: is needed, or data_set in its place"),
        (
            {"length": None, "data_set": {"prompts": 1, "low": 3, "high": 2}},
            "data_set.low: is 3; at most high, 2, is allowed",
        ),
        ({"layers": 25}, "layers: is 25; toy-retnet-1.3b has 24"),
        ({"model": "llama-3.1-8b"}, "model: llama-3.1-8b has no layer of linear attention"),
        ({"methods": ["vanila"]}, "methods[0]: unknown method 'vanila'; did you mean 'vanilla'?"),
    ],
)
def test_a_fault_is_one_line_with_the_field(changed: dict[str, Any], says: str) -> None:
    given_ = {name: value for name, value in {**LINE, **changed}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        assemble(parse_scenario(given_, "x.yaml"), "x.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# -- LeetDecoding, Tables 7 and 8 ----------------------------------------------------------------


def published(table: int) -> list[dict[str, str]]:
    path = ROOT / "validate" / "published" / f"leetdecoding_table{table}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("table", "model", "shape"),
    [(7, "transnormerllm-7b", ("32", "128", "128")), (8, "toy-retnet-1.3b", ("8", "256", "512"))],
)
def test_tables_have_a_cell_for_each_method_and_batch(
    table: int, model: str, shape: tuple[str, str, str]
) -> None:
    rows = published(table)
    assert len(rows) == 20
    assert {(row["method"], row["batch"]) for row in rows} == {
        (row["method"], batch) for row in rows for batch in "12"
    }
    assert {(row["heads"], row["rank"], row["dim"]) for row in rows} == {shape}
    assert {row["model"] for row in rows} == {model}
    out = [(row["method"], row["batch"]) for row in rows if row["metric"] == "out_of_memory"]
    assert out == ([("vanilla", "2")] if table == 7 else [])
    # What the text says of them: LA_torch is faster than Original in almost all settings.
    seconds = {(row["method"], row["batch"]): float(row["value"]) for row in rows}
    assert all(seconds["lightning_torch", batch] < seconds["original", batch] for batch in "12")


@pytest.fixture(scope="module", params=first(1, ["transnormerllm-7b", "toy-retnet-1.3b"]))
def tables(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    _, _, lines = ran(load_scenario(TABLES, [f"model={request.param}"]))
    return request.param, lines


@slow
def test_what_runs_out_of_memory_is_what_did(tables: tuple[str, list[dict[str, Any]]]) -> None:
    _, lines = tables
    memory = [line for line in lines if line["metric"] == "out_of_memory"]
    assert len(memory) == 20
    assert [line["error_pct"] for line in memory] == [0.0] * 20


@slow
def test_predicted_seconds_beside_those_of_the_tables(tables: tuple[str, list[dict[str, Any]]]) -> None:
    """With the constants of Tables 3 to 6 alone. TransNormerLLM keeps both bars; toy-retnet neither, by the
    three causes in docs/measurements/prices.md: its figures are held where they are."""
    model, lines = tables
    seconds = [line for line in lines if line["metric"] == "dataset_s"]
    off = median(abs(line["error_pct"]) for line in seconds)
    ratios = median(map(abs, ratio_errors(seconds)))
    if model == "transnormerllm-7b":
        assert len(seconds) == 19
        assert off < 25.0
        assert ratios < 15.0
        assert max(abs(line["error_pct"]) for line in seconds) < 40.0
    else:
        assert len(seconds) == 20
        assert (off, ratios) == (pytest.approx(35.2, abs=0.5), pytest.approx(45.5, abs=0.5))


@slow
def test_the_order_of_methods_beside_that_of_the_table(tables: tuple[str, list[dict[str, Any]]]) -> None:
    """Of two methods whose published times differ by half, the faster one is predicted as faster."""
    _, lines = tables
    for batch in (1, 2):
        here = [line for line in lines if line["metric"] == "dataset_s" and line["batch"] == batch]
        pairs = [(a, b) for a, b in combinations(here, 2)]
        far = [(a, b) for a, b in pairs if not 2 / 3 < a["reference"] / b["reference"] < 1.5]
        right = [(a["reference"] < b["reference"]) == (a["predicted"] < b["predicted"]) for a, b in far]
        assert len(far) > 20
        assert sum(right) >= 0.9 * len(right)


def test_a_prompt_s_memory_has_what_its_layers_cache() -> None:
    """Layers of full attention keep K and V of every token, others their states: twice the tokens more take
    both, once."""
    config = load_config(ROOT / "scenarios" / "models" / "hybrid-8b.json")
    assert config.attention_layers == 8
    one, two = (
        Prompt(config, "lightning", batch, 4096, "bf16", all_logits=False).memory_bytes for batch in (1, 2)
    )
    cached = 2 * config.attention_layers * config.kv_heads * config.head_dim * 2 * 4096
    # The widest results are those of the MLP, 3 times as wide as its intermediate size.
    results = 2 * 4096 * (3 * config.intermediate + 2 * config.hidden)
    assert two - one == pytest.approx(cached + config.state_bytes + results)


def test_the_published_code_of_a_model_is_told_to_run_nowhere() -> None:
    with pytest.raises(
        InputError, match=r"t: methods\[1\]: original, a model's published code, is priced and"
    ):
        check_prompts(parse_scenario({**LINE, "methods": ["vanilla", "original"]}, "t"), "t")


@slow
def test_methods_of_one_kernel_do_not_cross() -> None:
    """Lightning Attention and the causal dot product run one kernel on a card, at prices measured twice."""
    document = {
        "name": "tied", "study": "prompt", "device": "h200-sxm", "model": "hybrid-8b", "dtype": "bf16",
        "methods": ["lightning", "causal_dot_product", "fleet"], "length": [512, 2048, 8192, 32768],
    }  # fmt: skip
    found = simcore.run(document)
    rows = found.frame()
    crossed = rows[rows["metric"] == "crossover_tokens"]
    assert not {*crossed["strategy"], *crossed["rival"]} >= {"lightning", "causal_dot_product"}
    assert "from" not in found.answer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": ["original"]}, "methods: original is none of hybrid-8b"),
        (
            {"study": "decode", "crossover": ["hit_rate"]},
            "crossover: is where ALSpec passes tensor parallelism",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], says: str) -> None:
    document = {"name": "refused", "study": "prompt", "device": "h200-sxm", "model": "hybrid-8b", **changes}
    if changes.get("study"):
        document |= {"strategies": [{"kind": "tensor_parallel", "ranks": 1}], "context_tokens": [64]}
    else:
        document |= {"dtype": "bf16", "length": [64]}
    with pytest.raises(InputError, match=says):
        simcore.run(document)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ({"base": "a6000", "change": {"board_power_w": 150.0}}, ["changes no time: how a6000 throttles"]),
        ("b200-sxm", ["how far b200-sxm throttles its clock under load was not measured: with long prompts"]),
        ("h200-sxm", []),
        ("a6000", []),
    ],
)
def test_where_a_power_cap_is_not_known_a_warning_says_so(device: Any, says: list[str]) -> None:
    document = {
        "name": "caps", "study": "prompt", "device": device, "model": "hybrid-8b", "dtype": "bf16",
        "methods": ["lightning"], "length": [512],
    }  # fmt: skip
    warnings = [one for one in simcore.run(document).warnings if "throttles" in one]
    assert len(warnings) == len(says)
    assert all(wanted in found for wanted, found in zip(says, warnings, strict=True))


@pytest.mark.parametrize("study", ["serving", "prompt"])
@pytest.mark.parametrize(
    ("dtype", "watts", "warns"),
    [("fp32", 600.0, True), ("fp32", None, False), ("fp8", 600.0, False), ("int8", 600.0, False)],
)
def test_a_cap_that_changes_no_product_is_named(
    study: str, dtype: str, watts: float | None, warns: bool
) -> None:
    document: dict[str, Any] = {
        "name": "caps",
        "study": "serving",
        "device": {"base": "h200-sxm", "change": {"board_power_w": watts}} if watts else "h200-sxm",
        "model": "llama-3.1-8b",
        "dtype": dtype,
        "workload": {
            "requests": 4,
            "arrivals": {"kind": "constant", "rate_per_s": 9},
            "prompt_tokens": {"kind": "constant", "value": 32},
            "output_tokens": {"kind": "constant", "value": 2},
        },
        "strategies": [{"kind": "continuous_batching"}],
    }
    prompt = {"study": "prompt", "model": "hybrid-8b", "methods": ["lightning"], "length": [64]}
    same = ("name", "device", "dtype")
    if study == "prompt":
        document = {**{name: document[name] for name in same}, **prompt}
    found = [one for one in simcore.run(document).warnings if "keep their time" in one]
    only = "only products that are multiplied in bf16, fp16, fp8 and int8 slow down by it"
    says = f"device.change.board_power_w: products in fp32 keep their time: {only}"
    assert found == ([says] if warns else [])


def test_prompts_beyond_the_model_s_context_are_named() -> None:
    document = {
        "name": "long", "study": "prompt", "device": "h200-sxm", "model": "hybrid-8b", "dtype": "bf16",
        "methods": ["lightning"], "length": [512, 200_000],
    }  # fmt: skip
    (warning,) = (one for one in simcore.run(document).warnings if one.startswith("length:"))
    assert "200,000 tokens are more than the 131,072 of the model" in warning
