"""Engine presets: what stands for the fields that a strategy leaves out, and what is said of a wrong one."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from simcore.assembly import assemble
from simcore.cli import app
from simcore.devices.spec import device_names, load_device
from simcore.input.files import InputError
from simcore.scenario import parse_scenario, resolved
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.engines.presets import (
    DECIDED,
    described,
    engine_names,
    load_engine,
    with_engines,
)
from simcore.studies.serving.runner import Bench
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import ContinuousBatching, label
from simcore.studies.serving.study import cases
from tests.thorough import slow

GIB = 2.0**30


def document(*strategies: dict[str, Any], **fields: Any) -> dict[str, Any]:
    length = {"kind": "uniform", "low": 20, "high": 200}
    return {
        "name": "engines",
        "study": "serving",
        "device": "h100-sxm",
        "model": "llama-3.1-8b",
        "workload": {
            "requests": 30,
            "arrivals": {"kind": "poisson", "rate_per_s": 20},
            "prompt_tokens": length,
            "output_tokens": length,
        },
        "strategies": [{"kind": "continuous_batching"} | strategy for strategy in strategies],
        **fields,
    }


def scenario(*strategies: dict[str, Any], **fields: Any) -> ServingScenario:
    found = parse_scenario(document(*strategies, **fields), "engines")
    assert isinstance(found, ServingScenario)
    return found


def filled(strategy: dict[str, Any], device: str = "h100-sxm") -> ContinuousBatching:
    spec = load_device(device)
    (found,) = with_engines(scenario(strategy), spec.name, spec.memory_bytes).strategies
    assert isinstance(found, ContinuousBatching)
    return found


def bench_of(*strategies: dict[str, Any], **fields: Any) -> Bench:
    study = assemble(scenario(*strategies, **fields), "engines").study
    assert isinstance(study, DeviceStudy)
    return study.bench


@pytest.mark.parametrize("name", engine_names())
def test_every_preset_says_all_and_where_it_is_from(name: str) -> None:
    engine = load_engine(name)
    assert set(engine.fields) == {*DECIDED, "host"} == set(engine.sources)
    # Costs of a host are measured; a preset knows none.
    assert (
        engine.fields["host"]
        == {
            "sglang": {"products_of": "sglang-0.5", "quantizes": ["qkv", "o", "gate_up", "down"]},
            "tensorrt-llm": {"quantizes": ["qkv", "gate_up"]},
            "vllm": {"products_of": "vllm-0.19", "quantizes": ["o"]},
        }[engine.engine or ""]
    )
    assert all(len(source) > 10 for source in engine.sources.values())
    assert name == f"{engine.engine}-{name.rpartition('-')[2]}"


@pytest.mark.parametrize("name", engine_names())
def test_a_preset_is_shown_with_every_field_and_its_source(name: str) -> None:
    engine = load_engine(name)
    lines = [*described(engine)]
    assert lines[0] == f"{name}: {engine.description}"
    told = " ".join(" ".join(lines).split())
    shown = dict(line.split(": ", 1) for line in lines[1:] if not line.startswith((" ", "on devices")))
    assert {field: yaml.safe_load(text) for field, text in shown.items()} == engine.fields
    for field in engine.fields:
        assert " ".join(engine.sources[field].split()) in told
    assert sum(line.startswith("on devices of") for line in lines) == len(engine.cases)
    assert CliRunner().invoke(app, ["engines", name]).stdout.splitlines() == lines


def test_an_unknown_engine_is_one_line() -> None:
    found = CliRunner().invoke(app, ["engines", "vlm"])
    assert isinstance(found.exception, InputError)
    assert "unknown engine 'vlm'; did you mean 'vllm'?" in str(found.exception)


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("name", engine_names())
def test_every_preset_is_a_strategy_on_every_device(name: str, device: str) -> None:
    strategy = filled({"engine": name}, device)
    assert strategy.engine == name
    assert 0.5 < strategy.memory.share < 1.0


def test_the_engine_alone_is_its_newest_version() -> None:
    assert load_engine("vllm").name == "vllm-0.33"
    assert load_engine("vllm-0.19").name == "vllm-0.19"
    assert filled({"engine": "vllm"}).engine == "vllm-0.33"


def test_versions_are_numbers_not_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simcore.studies.serving.engines import presets  # noqa: PLC0415

    for name in ("vllm-0.9", "vllm-0.19", "vllm-0.100"):
        (tmp_path / f"{name}.yaml").write_text("")
    monkeypatch.setattr(presets, "ENGINES", tmp_path)
    assert presets.engine_names() == ["vllm-0.9", "vllm-0.19", "vllm-0.100"]


@pytest.mark.parametrize(
    ("device", "tokens", "sequences"),
    [("h100-sxm", 8192, 1024), ("h200-sxm", 8192, 1024), ("a100-sxm-80gb", 2048, 256), ("a6000", 2048, 256)],
)
def test_vllm_s_batch_depends_on_the_card(device: str, tokens: int, sequences: int) -> None:
    """As its logs on H100 say: 8192 tokens, 1024 sequences, asynchronous scheduling, chunked prefill."""
    found = filled({"engine": "vllm-0.19"}, device)
    assert (found.token_budget, found.max_sequences) == ([tokens], [sequences])
    assert (found.ahead, found.prefill, found.block_tokens) == (1, ["chunked"], 16)


def test_a_case_begins_at_its_memory_and_ends_before_the_next() -> None:
    engine = load_engine("vllm-0.33")
    budget = [engine.on("card", gib * GIB)["token_budget"] for gib in (69.9, 70, 159.9, 160)]
    assert budget == [2048, 8192, 8192, 16384]


def test_what_is_given_stands_and_memory_field_by_field() -> None:
    found = filled({"engine": "sglang", "token_budget": [64, 2048], "memory": {"reserve_bytes": 1e9}})
    assert found.token_budget == [64, 2048]
    assert found.max_sequences == [2048]
    assert found.memory.reserve_bytes == 1e9
    # Of the 80 GB card's case, and of the preset.
    assert (found.memory.share, found.memory.share_of, found.memory.peak) == (0.83, "free", "none")
    # A value that happens to be the default of a strategy without an engine is given all the same.
    assert filled({"engine": "vllm-0.19", "token_budget": 2048, "ahead": 0}).token_budget == [2048]
    assert filled({"engine": "vllm-0.19", "token_budget": 2048, "ahead": 0}).ahead == 0


def test_what_is_written_is_all_and_stays_itself() -> None:
    given = scenario({"engine": "vllm"}, {"engine": "tensorrt-llm", "token_budget": 4096})
    parts = assemble(given, "engines")
    written = resolved(parts.scenario)
    assert [strategy["engine"] for strategy in written["strategies"]] == ["vllm-0.33", "tensorrt-llm-1.2"]
    assert written["strategies"][0]["token_budget"] == [8192]
    again = parse_scenario(yaml.safe_load(yaml.safe_dump(written)), "again")
    assert again == parts.scenario
    assert resolved(assemble(again, "again").scenario) == written


def test_without_an_engine_nothing_changes() -> None:
    given = scenario({})
    assert with_engines(given, "h100-sxm", 85e9) is given


@pytest.mark.parametrize("strategy", [{"engine": "vllm-0.19"}, {}])
def test_the_scenario_s_share_and_blocks_come_first(strategy: dict[str, Any]) -> None:
    def tokens(**fields: Any) -> int:
        bench = bench_of(strategy, **fields)
        case = next(cases(bench))
        return bench.room(case, bench.draw(case, 0)).kv_tokens

    assert tokens(memory_share=0.9) == tokens() > tokens(memory_share=0.8)
    assert tokens(kv_blocks=100, memory_share=0.8) == 1600


def test_each_rule_by_hand() -> None:
    """The room of one card of 85.028e9 bytes beside 16.06e9 bytes of weights."""
    total = 85.028e9

    def room(**memory: Any) -> float:
        bench = bench_of({"memory": {"reserve_bytes": 1e9, "driver_bytes": 2e9, "peak": "none", **memory}})
        case = next(cases(bench))
        found = bench.room(case, bench.draw(case, 0))
        return found.limit * 16 * bench.model(1).kv_bytes_per_token

    weights = bench_of({}).model(1).weight_bytes
    block = 16 * 131072.0
    for share_of, expected in (
        ("total", 0.5 * total - weights - 1e9),
        ("free", 0.5 * (total - 2e9) - weights - 1e9),
        ("rest", 0.5 * (total - 2e9 - weights - 1e9)),
    ):
        assert 0.0 <= expected - room(share=0.5, share_of=share_of) < block


def test_labels_name_the_engine_and_what_is_unusual() -> None:
    def said(strategy: dict[str, Any]) -> str:
        return label(filled(strategy))

    assert said({"engine": "vllm-0.19"}) == "vllm-0.19, 8,192 tokens a step, up to 1024"
    assert said({"engine": "vllm-0.19", "prefix_caching": False, "ahead": 0}) == (
        "vllm-0.19, 8,192 tokens a step, up to 1024, 0 steps ahead, no prefix caching"
    )
    assert said({"engine": "sglang", "memory": {"share": 0.7}}).endswith("up to 2048, 0.7 of the memory")
    for engine, less in (("tensorrt-llm", "no room for answers to come"), ("vllm-0.19", "")):
        assert said({"engine": engine, "reserve": None}).endswith(less or "up to 1024")
    assert said({"engine": "vllm-0.19", "reserve": {"share": 1}}).endswith(", room for whole answers")
    most = {"share": 1, "most_tokens": 64}
    assert said({"engine": "vllm-0.19", "reserve": most}).endswith(", room for the next 64 tokens of answers")
    assert said({"engine": "vllm-0.19", "preempted": "last"}).endswith(", preempted wait last")
    falling = {"share": 0.7, "least": 0.1, "steps": 600, "most_tokens": 4096}
    assert said({"engine": "vllm-0.19", "reserve": falling}).endswith(
        ", room for 0.7 to 0.1 in 600 steps of the next 4,096 tokens of answers"
    )
    plain = ContinuousBatching(kind="continuous_batching", ahead=1, ranks=[2])
    assert label(plain) == "continuous batching, 2,048 tokens a step, 1 step ahead, TP2"
    waits = {"wait_steps": 5, "wait_tokens": 4096}
    for engine in ("", "vllm-0.19"):
        of = {"engine": engine} if engine else {}
        assert said({**of, **waits}) == f"{said(of)}, waiting 5 steps for 4,096 tokens"


@pytest.mark.parametrize("engine", engine_names())
def test_nothing_is_unusual_that_an_engine_has_on_some_device(engine: str) -> None:
    for usual in load_engine(engine).anywhere:
        said = label(usual.model_copy(update={"engine": engine}))
        assert said == f"{engine}, {usual.token_budget[0]:,} tokens a step, up to {usual.max_sequences[0]}"


@slow
def test_prompts_that_all_differ_are_served_the_same_whether_kept_or_not() -> None:
    bench = bench_of({"engine": "vllm-0.19"}, {"engine": "vllm-0.19", "prefix_caching": False})
    kept, not_kept = (bench.run(case, 0).served for case in cases(bench))
    assert (kept.finish_s == not_kept.finish_s).all()


@pytest.mark.parametrize(
    ("strategies", "says"),
    [
        ([{"engine": "vlm"}], r"strategies\[0\].engine: unknown engine 'vlm'; did you mean 'vllm'\?"),
        ([{}, {"engine": "vllm-0.20"}], r"strategies\[1\].engine: unknown engine 'vllm-0.20'; did you mean"),
        ([{"engine": "vllm"}, {"engine": "vllm-0.33"}], r"strategies\[1\]: is called \'vllm-0.33"),
    ],
)
def test_wrong_engines_are_one_line(strategies: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InputError, match=f"^engines: {says}"):
        assemble(scenario(*strategies), "engines")


def test_a_default_s_value_beside_an_engine_is_no_repetition() -> None:
    """2048 is what a strategy without an engine has, not vLLM on this card."""
    found = bench_of({"engine": "vllm-0.19"}, {"engine": "vllm-0.19", "token_budget": 2048})
    assert len({case.axes.label for case in cases(found)}) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["fields"].pop("ahead"), "missing key 'fields.ahead'"),
        (lambda d: d["sources"].pop("memory"), "missing key 'sources.memory'"),
        (lambda d: d["fields"].update(slots=3), "unknown field 'slots'"),
        (lambda d: d["fields"].update(token_budget=0), "token_budget"),
        (lambda d: d.update(name="vllm-1"), "the file's name is needed"),
    ],
)
def test_a_preset_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    from simcore.studies.serving.engines import presets  # noqa: PLC0415

    given = yaml.safe_load((presets.ENGINES / "vllm-0.19.yaml").read_text())
    for memory in ("reserve_bytes", "group_reserve_bytes"):
        given["fields"]["memory"][memory] = float(given["fields"]["memory"][memory])
    change(given)
    (tmp_path / "vllm-9.yaml").write_text(
        yaml.safe_dump({**given, "name": given["name"].replace("0.19", "9")})
    )
    monkeypatch.setattr(presets, "ENGINES", tmp_path)
    with pytest.raises(InputError, match=says) as raised:
        load_engine("vllm-9")
    assert "\n" not in str(raised.value)
