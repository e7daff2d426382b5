"""A serving run as vLLM's bench JSON: one case of it, the same requests when it is read back."""

import json
from pathlib import Path

import pytest
import yaml

from simcore.assembly import assemble
from simcore.cli import main
from simcore.export import export
from simcore.input.files import InputError
from simcore.scenario import parse_scenario
from simcore.studies.serving.study import cases

LOAD = {
    "requests": 12,
    "arrivals": {"kind": "gamma", "rate_per_s": [5.0, 20.0], "cv": 2.0},
    "prompt_tokens": {"kind": "uniform", "low": 5, "high": 900},
    "output_tokens": {"kind": "uniform", "low": 1, "high": 40},
}
GIVEN = {
    "name": "export",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "profile": "none",
    "devices": [1, 2],
    "workload": LOAD,
    "strategies": [{"kind": "continuous_batching"}, {"kind": "temporal_fusion", "slots": 4}],
}
CONTINUOUS = "continuous batching, 2,048 tokens a step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("export")
    (here / "scenario.yaml").write_text(yaml.safe_dump(GIVEN))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(here / "scenario.yaml"), "--out", str(here / "run"), "--quiet"])
    assert ended.value.code == 0
    return here / "run"


def test_what_is_read_back_are_the_same_requests(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert export(folder, file, CONTINUOUS, 20.0, 1) == 12
    result = json.loads(file.read_text())
    assert (result["num_prompts"], result["completed"]) == (12, 12)
    replayed = {
        **GIVEN,
        "devices": 1,
        "workload": {"arrivals": {"kind": "trace", "format": "vllm", "path": str(file)}},
    }
    bench = assemble(parse_scenario(replayed, "again"), "again").study.bench  # type: ignore[attr-defined]
    again = bench.run(next(iter(cases(bench))), 0).served
    assert again.prompt_tokens.tolist() == result["input_lens"]
    assert again.output_tokens.tolist() == result["output_lens"]
    assert (again.first_token_s - again.arrival_s).tolist() == pytest.approx(result["ttfts"], rel=1e-9)


@pytest.mark.parametrize(
    ("label", "rate_per_s", "devices", "says"),
    [
        (None, 20.0, 1, "--label: is missing"),
        ("continuous", 20.0, 1, "--label continuous: no such case"),
        (CONTINUOUS, None, 1, "--rate: is missing"),
        (CONTINUOUS, 7.0, 1, "--rate 7: no such load \\(allowed: 5, 20\\)"),
        (CONTINUOUS, 20.0, None, "--devices: is missing"),
        (CONTINUOUS, 20.0, 3, "--devices 3: no such case \\(allowed: 1, 2\\)"),
    ],
)
def test_one_case_has_to_be_named(
    folder: Path, tmp_path: Path, label: str | None, rate_per_s: float | None, devices: int | None, says: str
) -> None:
    file = tmp_path / "bench.json"
    with pytest.raises(InputError, match=says):
        export(folder, file, label, rate_per_s, devices)
    assert not file.exists()


def test_a_run_of_another_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"requests\.parquet is missing"):
        export(tmp_path, tmp_path / "bench.json", None, None, None)
