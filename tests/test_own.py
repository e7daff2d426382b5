"""Strategies from outside: found, run like the shipped ones, and told of in one line where they are wrong."""

import csv
import filecmp
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import simcore
from simcore.input.files import InputError
from simcore.reports import style
from simcore.studies.own import located
from tests.command_line import call
from tests.test_documents import ROOT, blocks, programs
from tests.thorough import first, slow

pytestmark = pytest.mark.usefixtures("own_modules")
GUIDE = ROOT / "docs" / "own_strategies.md"
TILING = {
    "name": "tilings",
    "study": "tiling",
    "device": "a100-sxm-80gb",
    "model": {"kind": "long_convolution", "layers": 2, "channels": 16},
    "tokens": 64,
    "prompt_tokens": 8,
    "dtype": "fp32",
    "strategies": [{"kind": "lazy"}, {"kind": "own_tiling:Anew"}],
}
OWN_DECODE = """
from simcore.input.fields import Many, Strict


class Waiting(Strict):
    kind: str
    ranks: Many[int] = [1]
    waits: Many[bool] = [True]
    left_out: int = 0

    def label(self):
        return "waiting" if self.waits[0] else "never waiting"

    def program(self, m, model, *, tokens, context):
        for token in range(tokens - self.left_out):
            step = m.launch(model.token_step, sizes={"context": context + token})
            m.mark(f"token {token}", [step])
            if self.waits[0]:
                yield m.wait(step)
        yield m.wait(step)
"""
DECODE = {
    "name": "decoding",
    "study": "decode",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "context_tokens": [1024, 4096],
    "tokens": 3,
    "strategies": [
        {"kind": "tensor_parallel", "ranks": [1, 2]},
        {"kind": "own_decode:Waiting", "ranks": [1, 2], "waits": [True, False]},
        {"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": 0.5}},
    ],
}
OWN_TILING = """
from simcore.input.fields import Strict
from simcore.schedules.lazy import lazy


class Anew(Strict):
    kind: str
    left_out: int = 0

    def label(self):
        return "anew"

    def program(self, m, model, ended_s):
        yield from lazy(m, model, ended_s)
        del ended_s[: self.left_out]
"""


def shown() -> dict[str, Any]:
    """The guide's scenario, shorter."""
    scenario: dict[str, Any] = yaml.safe_load(next(blocks(GUIDE, "yaml")))
    scenario["workload"]["requests"] = 20
    return scenario


def program() -> str:
    return next(blocks(GUIDE, "python"))


def written(folder: Path, scenario: Mapping[str, Any]) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(dict(scenario)))
    return file


def labels(folder: Path) -> list[tuple[str, str]]:
    with (folder / "results.csv").open() as file:
        return [*dict.fromkeys((row["strategy"], row["label"]) for row in csv.DictReader(file))]


# -- found and run -----------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("where", first(3, ["here", "path", "folder", "beside"]))
def test_the_guide_s_strategy_runs_wherever_its_module_is(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("beside", "here", "path", "beside/folder", "out")}
    for place in places.values():
        place.mkdir()
    scenario = shown()
    if where == "folder":
        scenario["strategies"][0]["kind"] = "folder/one_by_one:OneByOne"
    file = written(places["beside"], scenario)
    programs(GUIDE, places["beside/folder" if where == "folder" else where])
    monkeypatch.chdir(places["here"])
    monkeypatch.syspath_prepend(str(places["path"]))
    first = places["out"] / "first"
    assert call("run", str(file), "--jobs", "2", "--quiet", "--out", str(first)) == 0
    assert labels(first) == [
        ("one_by_one:OneByOne", "one by one, shortest first"),
        ("one_by_one:OneByOne", "one by one, longest first"),
        ("continuous_batching", "continuous batching, 2,048 tokens a step"),
    ]
    page = (first / "report.html").read_text()
    assert "one by one, shortest first" in page
    # The copy in the run directory is a scenario too, from anywhere, and gives the same bytes.
    monkeypatch.chdir(places["out"])
    again = places["out"] / "again"
    assert call("run", str(first / "scenario.yaml"), "--jobs", "1", "--quiet", "--out", str(again)) == 0
    for name in ("results.csv", "requests.parquet", "scenario.yaml", "trace.json.gz"):
        assert filecmp.cmp(first / name, again / name, shallow=False)


@slow
def test_it_serves_one_by_one_in_its_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(GUIDE, tmp_path)
    monkeypatch.chdir(tmp_path)
    scenario = shown()
    scenario["workload"]["arrivals"]["rate_per_s"] = 1000
    served = simcore.run(scenario, jobs=1).requests()
    for label, longest in (("one by one, shortest first", False), ("one by one, longest first", True)):
        own = served[served["label"] == label].sort_values("scheduled_s")
        assert (own["scheduled_s"].to_numpy()[1:] >= own["finish_s"].to_numpy()[:-1]).all()
        # All are there by the time that the third one is begun.
        prompts = own["prompt_tokens"].tolist()[3:]
        assert prompts == sorted(prompts, reverse=longest)


@slow
def test_its_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs(GUIDE, tmp_path)
    assert call("run", str(written(tmp_path, shown())), "--on", "tape") == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("# one by one, longest first, 4 requests at once")
    graphs = [line.split("  ")[2].split(":")[0] for line in lines[start + 1 : start + 9]]
    assert graphs == ["prefill", "decode"] * 4


@slow
def test_it_is_validated_on_this_cpu(tmp_path: Path) -> None:
    programs(GUIDE, tmp_path)
    tiny = yaml.safe_load((ROOT / "scenarios" / "quickstart.yaml").read_text())
    own = {"kind": "one_by_one:OneByOne"}
    requests = {"workload.requests": 6, "strategies": [own]}
    scenario = {**tiny, "replicas": 1, "strategies": [own], "on_cpu": {**tiny["on_cpu"], **requests}}
    file, out = written(tmp_path, scenario), tmp_path / "out"
    words = ("--set", "profile=none", "--out", str(out))
    # Bounds hold or not, as the machine has time: 0 or 1, and never a line of what is wrong.
    assert call("validate", str(file), "--on", "cpu", *words) in (0, 1)
    assert labels(out) == [("one_by_one:OneByOne", "one by one, shortest first")]
    assert (out / "ladder.csv").is_file()


@slow
def test_a_tiling_of_one_s_own_is_as_fast_as_the_one_it_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "own_tiling.py").write_text(OWN_TILING)
    found = simcore.run(written(tmp_path, TILING), jobs=1).frame()
    total = found[found["metric"] == "total_s"].set_index("label")["value"]
    assert total["anew"] == total["lazy"]


@slow
def test_a_way_of_decoding_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_decode.py").write_text(OWN_DECODE)
    file = written(tmp_path, DECODE)
    found = simcore.run(file, jobs=2).frame()
    latency = found[found["metric"] == "token_latency_s"].set_index(["label", "context_tokens"])["value"]
    for ranks in ("1 device", "2 devices"):
        for context in (1024, 4096):
            # It is tensor parallelism, written anew, which runs ahead: as if it never waited.
            assert (
                latency[f"never waiting, {ranks}", context] == latency[f"tensor parallel, {ranks}", context]
            )
            assert latency[f"never waiting, {ranks}", context] < latency[f"waiting, {ranks}", context]
    assert call("run", str(file), "--on", "tape") == 0
    assert "# never waiting, 2 devices, 1,024 tokens" in capsys.readouterr().out


@slow
def test_one_s_own_runs_on_this_cpu(tmp_path: Path) -> None:
    (tmp_path / "own_decode.py").write_text(OWN_DECODE)
    (tmp_path / "own_tiling.py").write_text(OWN_TILING)
    tiny = {"model": "tiny-llama", "device": "cpu", "dtype": "fp32"}
    plain = [{"kind": "tensor_parallel"}, {"kind": "own_decode:Waiting"}]
    decoding = {**DECODE, **tiny, "context_tokens": 16, "profile": "none", "strategies": plain}
    tiling = {**TILING, "device": "cpu", "profile": "none"}
    for scenario, metric, label in (
        (decoding, "token_latency_s", "waiting, 1 device"),
        (tiling, "total_s", "anew"),
    ):
        found = simcore.run(written(tmp_path, scenario), on="cpu").frame()
        own = found[(found["metric"] == metric) & (found["label"] == label)]
        assert (own["value"] > 0.0).tolist() == [True]


def test_its_hue_in_a_report_is_no_other_strategy_s() -> None:
    names = ["tensor_parallel", "alspec", "continuous_batching", "a:B", "a:C", "b:B"]
    found = style.hues(names)
    assert list(found) == names
    assert len({tuple(hue) for hue in found.values()}) == len(names)
    # Beyond that they are taken again.
    assert len(style.hues([f"a:{n}" for n in range(20)])) == 20


def test_the_schema_allows_one() -> None:
    schema = simcore.scenario.json_schema()
    for study in ("ServingScenario", "DecodeScenario", "TilingScenario"):
        _, own = schema["$defs"][study]["properties"]["strategies"]["items"]["anyOf"]
        assert re.search(own["properties"]["kind"]["pattern"], "a:B")


def test_a_kind_has_the_first_folder_that_has_its_module(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "own.py").write_text("")
    (tmp_path / "a" / "deep" / "__init__.py").write_text("")
    folders = [tmp_path / "a", tmp_path / "b"]
    assert located("deep/own:C", folders) == f"{tmp_path}/b/deep/own:C"
    assert located("deep.own:C", folders) == f"{tmp_path}/b/deep.own:C"
    assert located("deep:C", folders) == f"{tmp_path}/a/deep:C"
    for kept in ("lazy", "none:C", "a:b:c", ":", 5, None):
        assert located(kept, folders) == kept


# -- wrong ones --------------------------------------------------------------------------------------------

KIND = "strategies[0].kind: "
ALLOWED = "(allowed: temporal_fusion, dynamic_batching, concurrent_instances, iteration_batching, "
MINE = "own_wrong:OneByOne"
SORTS = next(i for i, line in enumerate(program().splitlines(), 1) if "line.sort(" in line)


def edited(old: str, new: str) -> str:
    assert old in program()
    return program().replace(old, new)


WRONG = {
    "no module": (None, {}, f"{KIND}no module own_wrong beside the scenario, "),
    "no class": ("x = 1\n", {}, f"{KIND}own_wrong has no OneByOne (there is none)"),
    "a misspelt class": (
        program(), {"kind": "own_wrong:OneByTwo"},
        f"{KIND}own_wrong has no OneByTwo; did you mean 'OneByOne'? (allowed: OneByOne)",
    ),
    "no name of a class": (program(), {"kind": "own_wrong:"}, f"{KIND}is 'own_wrong:' {ALLOWED}"),
    "no class of fields": ("class OneByOne: ...\n", {}, f"{KIND}{MINE} is no class of fields; "),
    "no program": (
        edited("def program", "def programme"), {},
        f"{KIND}{MINE} lacks program; kind, ranks, in_turn, label, room, program are needed",
    ),
    "no ranks": (edited("    ranks: Many[int] = [1]\n", ""), {}, f"{KIND}{MINE} lacks ranks; "),
    "one number of ranks": (edited("Many[int] = [1]", "int = 1"), {}, "strategies[0].ranks: is 1; a list"),
    "no ranks at all": (program(), {"ranks": 0}, "strategies[0].ranks: is [0]; a list of whole"),
    "a wrong field": (
        program(), {"longest": True},
        "strategies[0].longest: no such field; did you mean 'longest_first'? (allowed: kind, ranks, longest",
    ),
    "a wrong value": (program(), {"longest_first": 5}, "strategies[0].longest_first: is 5; true or false"),
    "a syntax error": ("def (\n", {}, f"{KIND}own_wrong cannot be imported: SyntaxError: "),
    "an error while imported": (
        "\n\n1 / 0\n", {},
        f"{KIND}own_wrong cannot be imported: ZeroDivisionError: division by zero (own_wrong.py, line 3)",
    ),
    "a package that is not there": (
        "import nowhere_at_all\n", {}, f"{KIND}own_wrong cannot be imported: ModuleNotFoundError: No module",
    ),
    "it leaves": ("raise SystemExit\n", {}, f"{KIND}own_wrong cannot be imported: SystemExit"),
    "an error in its label": (
        edited("return f", "return 1 / 0 and f"), {}, f"{KIND}{MINE}: ZeroDivisionError: division by zero (",
    ),
    "no label": (edited("return f", "return '' and f"), {}, f"{KIND}{MINE} has the label ''; a line"),
    "an error in its room": (
        edited("memory.slots(1)", "memory.slot(1)"), {}, f"{KIND}{MINE}: AttributeError: 'ServerMemory'",
    ),
    "an error in its program": (
        edited("line.sort(", "line.sorted("), {},
        f"{KIND}{MINE}: AttributeError: 'list' object has no attribute 'sorted' (own_wrong.py, line {SORTS})",
    ),
    "no generator": (
        edited("def program(self", "def program(self, *_):\n        pass\n\n    def other(self"), {},
        f"{KIND}{MINE}: ",
    ),
    "it leaves while it runs": (
        edited("line.sort(", "raise SystemExit(0)\n            line.sort("), {},
        f"{KIND}{MINE}: SystemExit: 0",
    ),
    "it leaves in its label": (
        edited("return f", "raise SystemExit(0)\n        return f"), {}, f"{KIND}{MINE}: SystemExit: 0",
    ),
    "no room": (
        edited("return memory.slots(1)", "memory.slots(1)"), {},
        f"{KIND}{MINE}: TypeError: room(memory) gave NoneType; memory.slots(...) or memory.blocks",
    ),
    "no slots": (
        edited("memory.slots(1)", "memory.slots(0)"), {},
        f"{KIND}{MINE}: ValueError: memory.slots: count is 0; a whole number from 1 on is needed",
    ),
    "a label that is no text": (
        edited("return f", "return None and f"), {}, f"{KIND}{MINE} has the label None; a line of up to 100",
    ),
    "a blank label": (edited("return f", "return '  ' or f"), {}, f"{KIND}{MINE} has the label ' '; a line"),
    "ranks that are not whole": (
        edited("Many[int] = [1]", "Many[float] = [1.0]"), {}, "strategies[0].ranks: is [1.0]; a list of",
    ),
    "an empty list of ranks": (
        edited("ranks: Many[int] = [1]", "ranks: list[int] = []"), {}, "strategies[0].ranks: is []; a list",
    ),
    "a label without end": (
        edited("return f", "return 'x' * 101 or f"), {}, f"{KIND}{MINE} has the label '",
    ),
    "a label that changes": (
        edited("return f", "return str(id(object())) + str(__import__('random').random()) or f"), {},
        f"{KIND}{MINE} has the label '",
    ),
    "a deadlock": (edited("closed = closed or END in came", "pass"), {}, f"{KIND}{MINE}: DeadlockError: "),
    "a request that is lost": (
        edited("    journal.finish(request, m.now())\n", ""), {},
        f"{KIND}{MINE}: LawError: conservation: ",
    ),
    "out of turn": (
        edited("in_turn: ClassVar = False", "in_turn: ClassVar = True"), {},
        f"{KIND}{MINE}: LawError: in turn: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_whatever_is_wrong_is_one_line(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, fields, says = WRONG[which]
    if text is not None:
        (tmp_path / "own_wrong.py").write_text(text)
    scenario = shown()
    scenario["workload"]["arrivals"]["rate_per_s"] = 100
    scenario["strategies"][0] = {"kind": MINE, **fields}
    file, out = written(tmp_path, scenario), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    assert call("run", str(file), "--jobs", "2", "--out", str(out)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert len(lines[0]) < 300
    assert lines[0].startswith(f"error: {file}: {says}"), lines[0]
    assert not out.exists()


@slow
def test_one_may_go_on_from_ours_with_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_batching.py").write_text(
        "from simcore.studies.serving.strategies import ContinuousBatching\n\n\n"
        "class Mine(ContinuousBatching):\n    kind: str\n    half: bool = False\n\n"
        "    def label(self):\n        return f'mine, {self.half}'\n"
    )
    scenario = shown()
    scenario["workload"]["requests"] = 5
    scenario["strategies"] = [{"kind": "own_batching:Mine", "engine": "vllm", "half": True}]
    file, out = written(tmp_path, scenario), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    assert call("run", str(file), "--out", str(out)) == 0
    assert "mine, True" in (out / "results.csv").read_text()


def test_an_error_in_its_program_can_be_seen_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_wrong.py").write_text(edited("line.sort(", "line.sorted("))
    scenario = shown()
    scenario["strategies"][0]["kind"] = MINE
    monkeypatch.setenv("SIMCORE_TRACEBACK", "1")
    with pytest.raises(AttributeError, match="sorted"):
        simcore.run(written(tmp_path, scenario), jobs=1)


def test_an_error_on_several_devices_is_none_of_the_devices(tmp_path: Path) -> None:
    (tmp_path / "own_wrong.py").write_text(edited("line.sort(", "line.sorted("))
    scenario = {**shown(), "device": ["h100-sxm", "h200-sxm"]}
    scenario["strategies"][0]["kind"] = MINE
    with pytest.raises(
        InputError, match=r"mine.yaml: strategies\[0\]\.kind: own_wrong:OneByOne: AttributeError"
    ):
        simcore.run(written(tmp_path, scenario), jobs=1)


def test_two_of_one_label_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own_wrong.py").write_text(
        edited("'longest' if self.longest_first[0] else 'shortest'", "'x'")
    )
    scenario = shown()
    scenario["strategies"][0]["kind"] = MINE
    with pytest.raises(
        InputError, match=r"strategies\[0\]: is called 'one by one, x first', as strategies\[0\]"
    ):
        simcore.run(written(tmp_path, scenario))


@slow
def test_a_module_of_another_folder_does_not_stand_for_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        programs(GUIDE, tmp_path / name)
    simcore.run(written(tmp_path / "a", shown()), jobs=1)
    with pytest.raises(InputError, match=r"one_by_one is another module already .*; rename yours"):
        simcore.run(written(tmp_path / "b", shown()), jobs=1)
    # What is Python's own does not give way either.
    scenario = shown()
    scenario["strategies"][0]["kind"] = "random:OneByOne"
    (tmp_path / "a" / "random.py").write_text(program())
    with pytest.raises(InputError, match="random is another module already"):
        simcore.run(written(tmp_path / "a", scenario))


def test_ways_of_decoding_that_are_wrong_are_told(tmp_path: Path) -> None:
    (tmp_path / "own_decode.py").write_text(OWN_DECODE)
    own = {"kind": "own_decode:Waiting", "left_out": 1}
    for strategies, says in (
        ([own], r"strategies\[0\]\.kind: own_decode:Waiting: ValueError: 2 tokens are marked; 3 are needed"),
        ([own, own], r"strategies\[1\]: is called 'waiting, 1 device', as strategies\[0\] is; each label"),
        ([{**own, "left_out": 3}], r"own_decode:Waiting: UnboundLocalError: .* \(own_decode.py, line 20\)"),
        ([{**own, "ranks": 3}], r"strategies\[0\]\.ranks: "),
        ([{**own, "ranks": "1"}], r"strategies\[0\]\.ranks: is '1'; a whole number is needed"),
    ):
        with pytest.raises(InputError, match=says):
            simcore.run(written(tmp_path, {**DECODE, "strategies": strategies}), jobs=1)


@slow
def test_a_tiling_that_forgets_positions_is_told(tmp_path: Path) -> None:
    (tmp_path / "own_tiling.py").write_text(OWN_TILING)
    scenario = {**TILING, "strategies": [{"kind": "own_tiling:Anew", "left_out": 2}]}
    says = r"strategies\[0\]\.kind: own_tiling:Anew: ValueError: ended_s has 55 moments; 57 are needed"
    with pytest.raises(InputError, match=says):
        simcore.run(written(tmp_path, scenario), jobs=1)
