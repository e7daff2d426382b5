"""Reports of models with states: the section of states beside KV, and pages of the study `prompt`."""

import re
from pathlib import Path

import simcore

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ROOT / "scenarios"


def page(scenario: str, path: Path, settings: dict[str, object]) -> str:
    simcore.run(str(SCENARIOS / scenario), settings=settings).report(path)
    return path.read_text(encoding="utf-8")


def test_a_page_has_states_beside_kv(tmp_path: Path) -> None:
    settings: dict[str, object] = {"context_tokens": [512, 4096], "batch": [16]}
    text = page("h200/hybrid_decode.yaml", tmp_path / "page.html", settings)
    assert "States beside KV" in text
    for head in ("sequences held", "with the second model", "a layer of linear attention"):
        assert head in text
    # 48 MiB of states for each of 16 sequences, and 32 KiB of KV a token.
    assert "0.75 GiB" in text
    assert re.search(r"At batch \d+ hybrid-8b is faster than llama-3.1-8b from", text)


def test_a_page_of_a_model_that_attends_has_no_such_section(tmp_path: Path) -> None:
    settings: dict[str, object] = {"context_tokens": [512, 4096], "batch": [1], "tokens": 1}
    assert "States beside KV" not in page("h200/decode_step.yaml", tmp_path / "page.html", settings)


def test_a_page_of_prompts_compares_its_data_set(tmp_path: Path) -> None:
    settings: dict[str, object] = {"methods": ["original", "lightning_torch"], "batch": 1}
    text = page("papers/leetdecoding_prompts.yaml", tmp_path / "page.html", settings)
    assert "LeetDecoding Table 7" in text
    assert "Lightning Attention 2 (torch)" in text
