"""The decode study of models with states: flat in context, and where a hybrid passes a second model."""

from pathlib import Path
from typing import Any

import pytest

from simcore.assembly import Parts, assemble
from simcore.input.files import InputError
from simcore.models.decoder import Decoder
from simcore.scenario import load_scenario, parse_scenario
from simcore.studies.common import Outcome, Row
from simcore.studies.decode.states import sequences_held
from tests.test_linear_models import HYBRID, read

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "scenarios" / "h200" / "hybrid_decode.yaml"
CONTEXTS = [512, 4096, 131_072]
FLAT: dict[str, Any] = {
    "name": "x", "study": "decode", "device": "h200-sxm", "model": "toy-retnet-1.3b", "batch": [1, 7],
    "context_tokens": CONTEXTS, "strategies": [{"kind": "tensor_parallel"}],
}  # fmt: skip
HYBRIDS = {**FLAT, "model": "hybrid-8b", "rival_model": "llama-3.1-8b", "batch": [1, 16]}


def ran(document: dict[str, Any]) -> tuple[Parts, Outcome]:
    parts = assemble(parse_scenario(dict(document), "x.yaml"), "x.yaml")
    return parts, parts.study.run(lambda doing, done, total: None)


def rows(outcome: Outcome, metric: str) -> list[Row]:
    return [row for row in outcome.rows if row.metric == metric]


@pytest.mark.parametrize("model", ["toy-retnet-1.3b", "transnormerllm-7b"])
def test_a_token_of_linear_attention_takes_the_same_at_any_context(model: str) -> None:
    """To the last digit: no op of such a model reads the context."""
    _, outcome = ran({**FLAT, "model": model})
    for batch in (1, 7):
        each = [row.value for row in rows(outcome, "token_latency_s") if row.axes.batch == batch]
        assert len(each) == len(CONTEXTS)
        assert len({*each}) == 1
    assert {row.value for row in rows(outcome, "kv_bytes")} == {0.0}
    held = rows(outcome, "sequences_held")
    assert len({row.value for row in held}) == 1


@pytest.fixture(scope="module")
def hybrid() -> tuple[Parts, Outcome]:
    return ran(HYBRIDS)


def test_a_hybrid_grows_with_its_context_by_its_layers_of_attention(hybrid: tuple[Parts, Outcome]) -> None:
    """Eight layers of 32 attend: a fourth of what Llama 3.1 8B grows by, up to the kernels' own times."""
    _, outcome = hybrid
    ours, theirs = rows(outcome, "token_latency_s"), rows(outcome, "rival_token_latency_s")
    by = {
        name: {(row.axes.batch, row.axes.context_tokens): row.value or 0.0 for row in found}
        for name, found in (("ours", ours), ("theirs", theirs))
    }
    grown = [
        by[name][16, 131_072] - by[name][16, 4096] for name in ("ours", "theirs") if (16, 131_072) in by[name]
    ]
    assert grown[0] > 0.0
    if len(grown) == 2:
        assert grown[0] / grown[1] == pytest.approx(0.25, rel=1e-3)
    single = [by[name][1, 131_072] - by[name][1, 4096] for name in ("ours", "theirs")]
    assert single[0] / single[1] == pytest.approx(0.25, rel=1e-3)


def test_where_a_hybrid_passes_both_take_as_long(hybrid: tuple[Parts, Outcome]) -> None:
    parts, outcome = hybrid
    found = {row.axes.batch: row for row in rows(outcome, "passes_rival_at_tokens")}
    assert found[1].value is None
    assert "faster than llama-3.1-8b everywhere" in found[1].source
    assert found[16].value is not None
    at = round(found[16].value)
    assert 512 < at < 4096
    assert f"hybrid-8b is faster than llama-3.1-8b from {at:,} tokens on" in outcome.answer
    around = {**HYBRIDS, "batch": [16], "context_tokens": [at - 16, at + 16]}
    _, near = ran(around)
    before, after = (row.value or 0.0 for row in rows(near, "speedup_over_rival"))
    # Where attention's price steps to another layout, it does so by less than a hundredth of a token.
    assert before <= 1.0 + 1e-3
    assert after >= 1.0 - 1e-3
    assert after / before < 1.01
    del parts


def test_memory_of_a_case_in_closed_form(hybrid: tuple[Parts, Outcome]) -> None:
    """48 MiB of states a sequence, and 32 KiB of KV a token: a fourth of Llama's."""
    _, outcome = hybrid
    for row in rows(outcome, "state_bytes"):
        assert row.value == row.axes.batch * 48 * 2**20
    for row in rows(outcome, "kv_bytes"):
        assert row.value == row.axes.batch * row.axes.context_tokens * 32 * 2**10
    # The longest context: Llama holds as many sequences as its KV allows, the hybrid nearly four times that.
    held = {row.axes.context_tokens: row.value for row in rows(outcome, "sequences_held")}
    rival = {row.axes.context_tokens: row.value for row in rows(outcome, "rival_sequences_held")}
    assert (held[512], rival[512]) == (1997.0, 1997.0)
    assert held[131_072] == 30.0
    assert rival[131_072] == 7.0


def test_sequences_that_a_device_holds() -> None:
    model = Decoder(read(HYBRID), batch=3)
    one = 48 * 2**20 + 100 * 32 * 2**10
    assert sequences_held(model, model.weight_bytes + 5 * one, 100) == 5
    assert sequences_held(model, model.weight_bytes + 5 * one - 1, 100) == 4
    assert sequences_held(model, 1e9, 100) == 0


def test_a_layer_of_each_kind_is_its_ops(hybrid: tuple[Parts, Outcome]) -> None:
    """Layers, embedding and head make the token up; the rest is the host's launch, as long at any context."""
    parts, outcome = hybrid
    study: Any = parts.study
    model, price = Decoder(study.bench.config, batch=16), study.bench.hardware.price(1, None, True)
    outside = sum(price(op).seconds for op in (*model.embed.ops, *model.head.ops))
    rest = []
    for context in CONTEXTS:
        here = [row for row in outcome.rows if (row.axes.batch, row.axes.context_tokens) == (16, context)]
        layers = {row.op_kind: row.value or 0.0 for row in here if row.metric == "layer_s"}
        assert layers.keys() == {"linear_attention", "full_attention"}
        (token_s,) = [row.value for row in here if row.metric == "token_latency_s"]
        rest.append(token_s - 24 * layers["linear_attention"] - 8 * layers["full_attention"] - outside)
    assert rest == [pytest.approx(rest[0], rel=1e-6)] * 3
    assert 0.0 < rest[0] < 1e-4


def test_attention_shares_count_states_as_attention(hybrid: tuple[Parts, Outcome]) -> None:
    _, outcome = hybrid
    kinds = {
        row.op_kind: row.value for row in rows(outcome, "critical_path_s") if row.axes.context_tokens == 512
    }
    assert {"linear_attention_decode", "decode_attention"} <= kinds.keys()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rival_model": "lama"}, "rival_model: unknown model 'lama'"),
        (
            {"strategies": [{"kind": "alspec", "hits": {"kind": "rate", "value": 0.5}}]},
            "hybrid-8b has layers without attention",
        ),
        ({"part": "layer"}, "rival_model: is for part: model"),
        (
            {"device": "h100-sxm", "profile": "alspec-table3", "model": "llama-3.1-8b", "batch": 1},
            "rival_model: needs prices of single ops",
        ),
    ],
)
def test_a_fault_is_one_line_with_the_field(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        ran({**HYBRIDS, **changed})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_scenario_is_a_right_one() -> None:
    assert load_scenario(HERE).model == "hybrid-8b"
