"""The benchmark of generation without a card: what is asked, counted and refused, and a method that fails.

transformers runs on the CPU where it is installed; ours runs on a card that is none.
"""

import csv
import json
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from simcore.input.files import InputError
from simcore.scenario import load_scenario
from simcore.studies.serving.scenario import ServingScenario
from simcore.validate.benchmarks import generation, transformers_generation
from simcore.validate.benchmarks.generation import (
    Line,
    Row,
    all_methods,
    asked_of,
    at_once,
    cells,
    empty_row,
    filled,
    in_a_process,
    ours_over,
    served,
    table,
)
from simcore.validate.benchmarks.transformers_generation import Asked, Timed, in_batches, padded
from simcore.validate.machines.cuda.runs import RealCard
from simcore.validate.machines.cuda.states import CardStates
from simcore.validate.program import partial_of, run, write_csv
from simcore.workload.arrivals import draw
from tests.fake_card import FakeCudaApi
from tests.thorough import slow, thorough

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 96, "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 500000.0, "torch_dtype": "bfloat16", "_source": "no model's",
}  # fmt: skip
# Of a card that is none each kernel is interpreted.
LEAST = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
CONTINUOUS = {"kind": "continuous_batching", "token_budget": 64, "max_sequences": 4}
SERVING: dict[str, Any] = {
    "name": "t", "study": "serving", "device": "h200-sxm", "model": "tiny.json", "dtype": "fp32",
    "workload": {
        "requests": 6, "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
        "prompt_tokens": {"kind": "uniform", "low": 2, "high": 40},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 12},
    },
    "strategies": [{"kind": "temporal_fusion", "slots": 2}, CONTINUOUS],
}  # fmt: skip
SHAPE = Row("continuous", "transformers 5", "tiny", "fp32", 2, 5)
ASKED = Asked(((1, 2, 3), (4, 5)), (7, 2))
BORN = {"device": "NVIDIA H200", "torch": "2.11.0"}
WITH_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("psutil") is None,
    reason="transformers or psutil is not installed",
)
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused without a CUDA device")


def written(folder: Path, **changed: Any) -> Path:
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump({**SERVING, **changed}), encoding="utf-8")
    return path


def asked_in(folder: Path, requests: int = 5) -> Asked:
    return asked_of(at_once(written(folder), requests)[0])


# -- what is asked ---------------------------------------------------------------------------------------


def test_the_requests_are_the_first_of_the_scenario_and_come_at_once() -> None:
    scenario, where = at_once(generation.SCENARIO, 128)
    whole = load_scenario(Path(where))
    assert isinstance(whole, ServingScenario)
    drawn, first = (draw(one.workload, one.seed, 0) for one in (whole, scenario))
    assert first.output_tokens.tolist() == drawn.output_tokens[:128].tolist()
    assert first.prompt_tokens.tolist() == drawn.prompt_tokens[:128].tolist()
    assert first.arrival_s is not None
    assert first.arrival_s[-1] < 1e-3
    assert [strategy.kind for strategy in scenario.strategies] == ["continuous_batching"]


@slow
def test_prompts_have_the_scenarios_lengths_and_ids_of_the_model(tmp_path: Path) -> None:
    asked = asked_in(tmp_path)
    assert len(asked.prompts) == len(asked.output_tokens) == 5
    assert all(2 <= len(prompt) <= 40 and 0 <= min(prompt) <= max(prompt) < 96 for prompt in asked.prompts)
    assert asked == asked_in(tmp_path)
    assert asked.longest == max(map(len, asked.prompts)) + max(asked.output_tokens)


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 32])
def test_static_batches_hold_each_request_and_its_longest_answer(
    tmp_path: Path, size: int, by_length: bool
) -> None:
    asked = asked_in(tmp_path)
    batches = in_batches(asked, size, by_length=by_length)
    assert {place for batch in batches for place in batch.places} == set(range(5))
    assert len({len(batch.places) for batch in batches}) == 1
    for batch in batches:
        assert batch.steps == max(asked.output_tokens[place] for place in batch.places)
        assert batch.length == max(len(asked.prompts[place]) for place in batch.places)
        assert batch.length + batch.steps <= asked.longest
        ids, mask = padded(asked, batch, "cpu")
        assert ids.shape == mask.shape == (len(batch.places), batch.length)
        for place, row, one in zip(batch.places, ids.tolist(), mask.tolist(), strict=True):
            assert row[batch.length - sum(one) :] == list(asked.prompts[place])
            assert one == sorted(one)


class Compiles:
    """A model whose `generate` makes graphs: in a first run two, and later as many as it is told."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=96)

    def __init__(self, later: int) -> None:
        self.later = later
        self.lengths: list[int] = []

    def generate(self, *, input_ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        graphs = self.later if input_ids.shape[1] in self.lengths else 2
        # Where torch counts them: a second of imports, for this alone.
        from torch._dynamo.utils import counters  # noqa: PLC0415

        counters["stats"]["unique_graphs"] += graphs
        self.lengths.append(input_ids.shape[1])
        return torch.nn.functional.pad(input_ids, (0, max_new_tokens), value=1)


@slow
@pytest.mark.parametrize(("later", "says"), [(0, ""), (3, ", 6 graphs compiled in it")])
def test_what_was_compiled_in_the_run_that_counts_is_said(later: int, says: str) -> None:
    asked = Asked(((1, 2, 3), (4, 5, 6), (7,), (8, 9)), (7, 2, 1, 4))
    model = Compiles(later)
    found = transformers_generation.static(asked, model, size=2)
    assert found.generated == asked.output_tokens
    assert model.lengths == [3, 2, 3, 2]
    assert found.config == f"2 batches of 2 in order of arrival, 22 tokens computed{says}"


# -- what is counted -------------------------------------------------------------------------------------


def test_a_row_counts_all_tokens_over_the_seconds() -> None:
    row = filled(SHAPE, ASKED, lambda: Timed(3.0, 20.0, (7, 2), "paged"))
    assert (row.output_tokens, row.tokens_per_s, row.requests_per_s) == (9, 3.0, 2 / 3)
    assert (row.prepared_s, row.config, row.note) == (20.0, "paged", "")


def test_a_method_that_gave_too_few_tokens_has_no_time() -> None:
    row = filled(SHAPE, ASKED, lambda: Timed(3.0, 20.0, (7, 1), ""))
    assert (row.seconds, row.output_tokens, row.tokens_per_s) == (None, 0, None)
    assert row.note == "ValueError: 1 requests got another number of tokens than they asked for"


@pytest.mark.parametrize("error", [ImportError("no such package"), torch.OutOfMemoryError("20 GiB\nmore")])
def test_a_method_that_fails_has_one_line(error: Exception) -> None:
    def fails() -> Timed:
        raise error

    row = filled(SHAPE, ASKED, fails)
    assert row == replace(SHAPE, note=f"{type(error).__name__}: {' '.join(str(error).split())}")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_generation, "PACKAGE", "no_such_package_here")
    written(tmp_path)
    model = tmp_path / "tiny.json"
    row = filled(
        SHAPE,
        ASKED,
        lambda: transformers_generation.continuous(
            ASKED, transformers_generation.model_of(model, torch.float32, "cpu")
        ),
    )
    assert row.note == "ModuleNotFoundError: No module named 'no_such_package_here'"


def test_the_tables_compare_with_ours_and_keep_a_failed_line(tmp_path: Path) -> None:
    ours = replace(SHAPE, method="ours", output_tokens=9, seconds=1.0, prepared_s=2.0, config="graphs")
    theirs = replace(SHAPE, output_tokens=9, seconds=2.5, prepared_s=30.0, config="paged")
    failed = replace(SHAPE, method="static", note="OutOfMemoryError")
    lines = [Line(row, BORN) for row in (ours, theirs, failed)]
    assert [ours_over(lines, line.row) for line in lines] == [1.0, 2.5, None]
    assert ours_over(lines[1:], theirs) is None

    head, *text = table(lines)
    assert head.split()[0] == "method"
    assert text[1].split() == ["continuous", "2", "9", "2.50", "4", "0.80", "2.50", "30.0", "paged"]
    assert text[2].split() == ["static", "2", *"------", "OutOfMemoryError"]

    write_csv(cells(lines), tmp_path / "found.csv")
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["ours_over_it"] for row in rows] == ["1.0", "2.5", ""]
    assert {row["device"] for row in rows} == {"NVIDIA H200"}
    assert rows[2]["note"] == "OutOfMemoryError"


# -- processes -------------------------------------------------------------------------------------------

LEAVES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text({!r})"


def test_a_process_leaves_its_line() -> None:
    row = replace(SHAPE, output_tokens=9, seconds=2.5)
    text = json.dumps({"row": asdict(row), "born": BORN})
    assert in_a_process([sys.executable, "-c", LEAVES.format(text)], SHAPE, 60.0) == Line(row, BORN)


def test_a_process_that_hangs_is_ended() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert in_a_process(hangs, SHAPE, 0.2) == "not done after 0.2 s"


def test_a_process_that_dies_ends_no_benchmark() -> None:
    programs = {
        "ours": "import os; os._exit(9)",
        "static": LEAVES.format(json.dumps({"row": asdict(SHAPE), "born": BORN})),
    }
    kept = list[int]()
    lines = all_methods(
        list(programs),
        {name: replace(SHAPE, method=name) for name in programs},
        lambda name: [sys.executable, "-c", programs[name]],
        limit_s=60.0,
        keep=lambda lines: kept.append(len(lines)),
        born=lambda: {"device": "a card"},
    )
    assert [line.row.note for line in lines] == ["its process ended with exit code 9", ""]
    assert [line.born["device"] for line in lines] == ["a card", "NVIDIA H200"]
    assert kept == [1, 2]


# -- each method -----------------------------------------------------------------------------------------


@emulated
@thorough
def test_ours_serves_all_that_is_asked(tmp_path: Path) -> None:
    path = written(tmp_path, strategies=[{**CONTINUOUS, "token_budget": 16, "max_sequences": 2}])
    (tmp_path / "tiny.json").write_text(json.dumps(TINY | LEAST), encoding="utf-8")
    scenario, where = at_once(path, 5)
    asked = asked_of(scenario)
    real = RealCard(1, CardStates(1 << 20, "cpu"), api=FakeCudaApi)
    row = filled(empty_row("ours", scenario, asked), asked, lambda: served(real, scenario, where))
    assert row.note == ""
    assert (row.model, row.dtype, row.requests) == ("tiny", "fp32", 5)
    assert row.output_tokens == sum(asked.output_tokens)
    assert row.seconds is not None
    assert row.seconds > 0.0
    assert "continuous batching, 16 tokens a step" in row.config


@WITH_TRANSFORMERS
@slow
def test_transformers_gives_each_request_its_tokens_in_all_ways(tmp_path: Path) -> None:
    asked = asked_in(tmp_path)
    model = transformers_generation.model_of(tmp_path / "tiny.json", torch.float32, "cpu")
    assert (
        sum(x.numel() for x in model.parameters()) == 2 * 96 * 64 + 2 * (2 * 64 * 96 + 3 * 64 * 128) + 5 * 64
    )
    for name, method in transformers_generation.BY_NAME.items():
        row = filled(replace(SHAPE, method=name), asked, lambda method=method: method(asked, model))
        assert row.note == ""
        assert row.output_tokens == sum(asked.output_tokens)
        assert row.prepared_s is not None
    assert model.config._attn_implementation == "sdpa"


@WITH_TRANSFORMERS
@slow
def test_the_ways_of_transformers_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_in(tmp_path)
    model = transformers_generation.model_of(tmp_path / "tiny.json", torch.float32, "cpu")
    answers = list[Any]()
    timed = transformers_generation.timed

    def kept(answer: Any, device: str) -> Any:
        answers.append(timed(answer, device))
        return answers[-1]

    monkeypatch.setattr(transformers_generation, "timed", kept)
    transformers_generation.continuous(asked, model)
    transformers_generation.static(asked, model, size=2)
    transformers_generation.static(asked, model, size=2, by_length=True)
    first, *others = (found for found, _ in answers)
    assert others == [first, first]


@WITH_TRANSFORMERS
@slow
def test_a_request_that_the_manager_refuses_is_the_methods_error(tmp_path: Path) -> None:
    asked = asked_in(tmp_path)
    model = transformers_generation.model_of(tmp_path / "tiny.json", torch.float32, "cpu")

    def fails(*arguments: Any, **named: Any) -> None:
        raise ValueError("broken on purpose")

    model.model.forward = fails
    row = filled(SHAPE, asked, lambda: transformers_generation.continuous(asked, model))
    assert row.seconds is None
    assert "broken on purpose" in row.note


# -- what is refused -------------------------------------------------------------------------------------

LISTED = {**SERVING["workload"], "prompt_tokens": {"kind": "constant", "value": [8, 16]}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no continuous batching": ({"strategies": SERVING["strategies"][:1]}, "strategies: none is of kind"),
    "variants": (
        {"strategies": [{**CONTINUOUS, "token_budget": [8, 16]}]},
        "strategies[0]: makes 2 variants",
    ),
    "loads": ({"workload": LISTED}, "workload: makes 2 loads"),
    "format": ({"dtype": "fp8"}, "dtype: one of bf16, fp16, fp32"),
    "formats": ({"dtype": None, "dtypes": {"kv": "fp8"}}, "dtype"),
    "ranks": ({"strategies": [{**CONTINUOUS, "ranks": 2}]}, "strategies[0].ranks: is 2"),
    "model": ({"model": "llama-9"}, "model: unknown model 'llama-9'"),
    "file": ({"model": "no-such.json"}, "model: "),
    "device": ({"device": "h900"}, "device: unknown device 'h900'"),
    "field": ({"strategi": []}, "strategi"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scenario_that_cannot_be_compared_is_refused(tmp_path: Path, name: str) -> None:
    changed, says = REFUSED[name]
    with pytest.raises(InputError) as refused:
        at_once(written(tmp_path, **changed), 4)
    (line,) = str(refused.value).splitlines()
    assert says in line


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generation", *words])
    with pytest.raises(SystemExit) as ended:
        run(generation.main)
    return int(ended.value.code or 0)


@emulated
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstrt"], "quickstrt: no such file or example"),
        (["h200/tiles"], "study: serving is needed"),
        (["--requests", "0"], "'--requests'"),
        (["--requests", "many"], "'--requests'"),
        (["--limit-s", "0"], "'--limit-s'"),
        (["--methods", "ours,vllm"], "--methods: unknown name 'vllm'"),
        (["--methods", ","], "--methods: names none"),
        (["--out", "no/such/folder.csv"], "--out no/such/folder.csv: its folder is not there"),
        ([], "a CUDA device is needed; there is none here"),
    ],
)
def test_bad_options_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert called(monkeypatch, *words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


@emulated
def test_what_cannot_be_served_is_refused_before_a_card_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, model="llama-3.1-70b", device="h100-sxm")
    assert called(monkeypatch, str(path), "--requests", "3") == 2
    assert "do not fit into the memory of h100-sxm" in capfd.readouterr().err.splitlines()[-1]


# -- the program, on a card that is none -----------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(generation, "this_card", lambda: "h100-sxm")
    monkeypatch.setattr(generation, "born_here", lambda: BORN)


@emulated
@pytest.mark.usefixtures("card")
def test_a_methods_own_process_writes_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Any]()

    def of_method(method: str, scenario: ServingScenario, where: str, asked: Asked) -> Timed:
        ran.append((method, scenario.devices_in_use[0].base))
        return Timed(2.0, 1.0, asked.output_tokens, "as it is")

    monkeypatch.setattr(generation, "of_method", of_method)
    file = tmp_path / "line.json"
    words = ["--requests", "3", "--methods", "static", "--line", str(file)]
    assert called(monkeypatch, str(written(tmp_path)), *words) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert ran == [("static", "h100-sxm")]
    assert found["born"] == BORN
    assert Row(**found["row"]).tokens_per_s == sum(asked_in(tmp_path, 3).output_tokens) / 2.0


@emulated
@slow
@pytest.mark.usefixtures("card")
def test_where_ours_fails_so_does_the_program_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The method's process finds no card.
    out = tmp_path / "found.csv"
    out.write_text("earlier\n", encoding="utf-8")
    words = ["--requests", "3", "--methods", "ours", "--out", str(out)]
    assert called(monkeypatch, str(written(tmp_path)), *words) == 1
    printed = capfd.readouterr().out
    assert "its process ended with exit code 2" in printed
    assert f"{out} is left as it was; the rows are in {partial_of(out)}" in printed
    assert out.read_text(encoding="utf-8") == "earlier\n"
    (row,) = csv.DictReader(partial_of(out).read_text(encoding="utf-8").splitlines())
    assert (row["method"], row["requests"], row["seconds"], row["device"]) == (
        "ours",
        "3",
        "",
        BORN["device"],
    )


def answers(monkeypatch: pytest.MonkeyPatch, *found: float | str | BaseException) -> list[str]:
    """Has methods end, one after another, with their seconds, a note or an exception. Returns the list of
    those that ran."""
    ran, left = list[str](), list(found)

    def in_its_process(command: Any, row: Row, limit_s: float) -> Line | str:
        ran.append(row.method)
        one = left.pop(0)
        if isinstance(one, BaseException):
            raise one
        return one if isinstance(one, str) else Line(replace(row, output_tokens=9, seconds=one), BORN)

    monkeypatch.setattr(generation, "in_a_process", in_its_process)
    return ran


@emulated
@pytest.mark.usefixtures("card")
def test_an_interrupted_run_keeps_its_lines_and_an_earlier_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.csv"
    out.write_text("earlier\n", encoding="utf-8")
    words = [str(written(tmp_path)), "--requests", "3", "--methods", "ours,static", "--out", str(out)]
    answers(monkeypatch, 1.0, KeyboardInterrupt())
    assert called(monkeypatch, *words) == 130
    assert out.read_text(encoding="utf-8") == "earlier\n"
    (row,) = csv.DictReader(partial_of(out).read_text(encoding="utf-8").splitlines())
    assert (row["method"], row["seconds"]) == ("ours", "1.0")

    answers(monkeypatch, 1.0, 2.0)
    assert called(monkeypatch, *words) == 0
    rows = csv.DictReader(out.read_text(encoding="utf-8").splitlines())
    assert [(row["method"], row["ours_over_it"]) for row in rows] == [("ours", "1.0"), ("static", "2.0")]
    assert not partial_of(out).exists()


@emulated
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("methods", "found", "code"),
    [
        ("static,continuous", ("broken", "broken"), 1),
        ("static,continuous", ("broken", 2.0), 0),
        ("ours,continuous", ("broken", 2.0), 1),
        ("ours,continuous", (1.0, "broken"), 0),
    ],
)
def test_the_program_fails_if_ours_does_or_all_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str, found: tuple[float | str, ...], code: int
) -> None:
    ran = answers(monkeypatch, *found)
    assert called(monkeypatch, str(written(tmp_path)), "--requests", "3", "--methods", methods) == code
    assert ran == methods.split(",")


@emulated
@pytest.mark.usefixtures("card")
def test_a_card_that_the_catalogue_lacks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise InputError("no device of the catalogue is a GTX 970")

    monkeypatch.setattr(generation, "this_card", none)
    ran = answers(monkeypatch, 1.0)
    assert called(monkeypatch, str(written(tmp_path))) == 2
    assert capfd.readouterr().err.splitlines() == ["error: no device of the catalogue is a GTX 970"]
    assert ran == []


@emulated
@pytest.mark.usefixtures("card")
def test_by_default_batches_are_by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = answers(monkeypatch, 1.0, 2.0, 3.0)
    assert called(monkeypatch, str(written(tmp_path)), "--requests", "3") == 0
    assert ran == ["ours", "continuous", "static_sorted"]
