"""Reports of models with states: the section of states beside KV, and pages of the study `prompt`."""

import re
from pathlib import Path

import pytest

import simcore
from simcore.reports.common.figures import variants
from simcore.reports.decode.figures import latency_by_batch, latency_over_context
from simcore.reports.run import read_run
from tests.thorough import first, slow

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ROOT / "scenarios"


def page(scenario: str, path: Path, settings: dict[str, object]) -> str:
    simcore.run(str(SCENARIOS / scenario), settings=settings).report(path)
    return path.read_text(encoding="utf-8")


def test_a_page_has_states_beside_kv(tmp_path: Path) -> None:
    settings: dict[str, object] = {"context_tokens": [512, 4096], "batch": [16]}
    text = page("h200/hybrid_decode.yaml", tmp_path / "page.html", settings)
    assert "States beside KV" in text
    for head in ("sequences held", "llama-3.1-8b holds", "over llama-3.1-8b", "a layer of linear attention"):
        assert head in text
    # 48 MiB of states for each of 16 sequences, and 32 KiB of KV a token.
    assert "0.75 GiB" in text
    assert re.search(r"At batch \d+ hybrid-8b is faster than llama-3.1-8b from", text)


@slow
@pytest.mark.parametrize("batches", first(1, [[1, 16], [16]]))
def test_the_second_model_is_drawn_beside_the_first(batches: list[int], tmp_path: Path) -> None:
    """One batch: a dotted line; several: one for each."""
    settings: dict[str, object] = {"context_tokens": [512, 4096], "batch": batches}
    simcore.run(str(SCENARIOS / "h200/hybrid_decode.yaml"), settings=settings).write(tmp_path / "run")
    run = read_run(tmp_path / "run")
    rows, rival = run.metric("token_latency_s"), run.metric("rival_token_latency_s")
    if len(batches) > 1:
        figure = latency_by_batch(rows, rival=rival)
    else:
        figure = latency_over_context(rows, variants(run.results), run.metric("read_once_s"), rival=rival)
    dotted = [trace for trace in figure.data if trace.line.dash == "dot"]
    assert [trace.name.startswith("llama-3.1-8b") for trace in dotted] == [True] * len(batches)
    for trace, batch in zip(dotted, batches, strict=True):
        own = rival[rival["batch"] == batch].sort_values("context_tokens")
        assert list(trace.x) == [512, 4096]
        assert list(trace.y) == pytest.approx(list(own["value"] * 1e3))


@slow
def test_a_page_of_a_model_that_attends_has_no_such_section(tmp_path: Path) -> None:
    settings: dict[str, object] = {"context_tokens": [512, 4096], "batch": [1], "tokens": 1}
    assert "States beside KV" not in page("h200/decode_step.yaml", tmp_path / "page.html", settings)


@slow
def test_a_page_of_prompts_compares_its_data_set(tmp_path: Path) -> None:
    settings: dict[str, object] = {"methods": ["original", "lightning_torch"], "batch": 1}
    text = page("papers/leetdecoding_prompts.yaml", tmp_path / "page.html", settings)
    assert "LeetDecoding Table 7" in text
    assert "Lightning Attention 2 (torch)" in text
