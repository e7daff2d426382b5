"""Commands of engines for a plan's points: options against the engines' parsers, and settings against what is
simulated; the energy of a token against board power and rate."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from simcore import cli
from simcore.assembly import model_names
from simcore.devices.changed import changed
from simcore.devices.listing import described, lines
from simcore.devices.spec import CATALOG, DeviceSpec, device_names, load_device
from simcore.input.files import InputError, read_yaml, validated
from simcore.planning.commands import engine_flags, how_to_run, model_name
from simcore.planning.commands import lines as lines_of
from simcore.planning.plan import run
from simcore.planning.points import Benches
from simcore.planning.questions import joules_per_token
from simcore.planning.runs import Ran
from simcore.planning.whatif import load_plan
from simcore.scenario import scenario_of
from simcore.studies.serving.engines.presets import engine_names
from tests.engine_options import SOURCES, folder_of, options
from tests.thorough import slow

LISTS = Path(__file__).parent / "data" / "engine_options"
# Lists of options by package, of the newest version.
PACKAGES = {"vllm": "vllm-0.33", "sglang": "sglang-0.5", **{name: name for name in list(SOURCES)[2:]}}
VLLM, TRTLLM, SGLANG = "vllm-0.33", "tensorrt-llm-1.2", "sglang-0.5"
BASE: dict[str, Any] = {
    "name": "small",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "workload": {
        "requests": 30,
        "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 90},
        "output_tokens": {"kind": "constant", "value": 8},
    },
}


def asked_for(strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    """How to run the point of a scenario with one case."""
    strategies = [{"kind": "continuous_batching", **strategy}]
    scenario: Any = scenario_of({**BASE, **more, "strategies": strategies}, "here", Path())
    (point,) = Benches("here", 1).points(scenario)
    return how_to_run(point)


def commands(strategy: dict[str, Any], **more: Any) -> dict[str, dict[str, Any]]:
    return {each["engine"]: each for each in asked_for(strategy, **more)["commands"]}


def parsed(command: str) -> dict[str, str]:
    """The options of a command with their values; of a file of options its entries by dotted path."""
    words = shlex.split(command)
    found: dict[str, str] = {}
    if words[0] == "echo":
        assert words[2:5] == [">", "options.yaml", "&&"]
        for name, value in json.loads(words[1]).items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{name}.{key}".rstrip("."): json.dumps(each) for key, each in inner}
        words = words[5:]
    for i, word in enumerate(words):
        if word.startswith("--"):
            last = i + 1 == len(words) or words[i + 1].startswith("--")
            found[word] = "" if last else words[i + 1]
    return found


# -- options exist -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(engine_flags()))
def test_every_option_is_one_of_the_engines_parser(name: str) -> None:
    engine, known = engine_flags()[name], set((LISTS / f"{name}.txt").read_text().split())
    words = [engine.command, engine.config_flag]
    for entry in engine.flags.values():
        words += entry.values() if isinstance(entry, dict) else [entry]
    used = set(re.findall(r"--[\w-]+", " ".join(words)))
    # Options of yes and no have a form with no.
    assert {option.replace("--no-", "--") for option in used} <= known
    assert {"--port", "--host"} < used
    entries = [each for entry in engine.config.values() for each in _all(entry) if each]
    assert {path for each in entries for path in yaml.safe_load(each.format(value=1))} <= known


def _all(entry: str | dict[str, str]) -> list[str]:
    return [*entry.values()] if isinstance(entry, dict) else [entry]


def test_every_option_of_a_router_is_one_of_its_parser() -> None:
    for name, engine in engine_flags().items():
        for command in engine.router.values():
            known = (LISTS / f"{engine.router_source.split()[0].replace('-', '_')}.txt").read_text().split()
            assert set(re.findall(r"--[\w-]+", command)) <= set(known), name


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_lists_are_what_the_installed_parser_has(package: str) -> None:
    folder = folder_of(package)
    if folder is None:
        pytest.skip(f"{package} is not installed")
    assert options(package, folder) == (LISTS / f"{PACKAGES[package]}.txt").read_text().split()


def test_values_are_choices_of_the_installed_engines() -> None:
    """Formats and policies stand as text in the sources that list the choices."""
    places = {
        VLLM: ("vllm", ["config/cache.py", "model_executor/layers/quantization/__init__.py", "config/*.py"]),
        SGLANG: ("sglang", ["srt/arg_groups/choices.py", "srt/arg_groups/fields/*.py"]),
    }
    for name, (package, files) in places.items():
        if (folder := folder_of(package)) is None:
            pytest.skip(f"{package} is not installed")
        text = "".join(path.read_text("utf-8") for each in files for path in folder.glob(each))
        for setting in ("weights", "kv", "order"):
            for entry in _all(engine_flags()[name].flags[setting]):
                values = [word for word in entry.split() if not word.startswith("--")]
                assert all(f'"{value}"' in text for value in values), (name, entry)


def test_each_preset_of_an_engine_has_a_command_with_its_source() -> None:
    assert set(engine_flags()) == set(engine_names())
    for engine in engine_flags().values():
        assert "https://" in engine.source
        assert bool(engine.router) == bool(engine.router_source)


# -- settings ----------------------------------------------------------------------------------------------


def test_each_engine_is_told_what_was_simulated() -> None:
    of = commands(
        {"token_budget": 1024, "max_sequences": 48, "ranks": 2, "prefix_caching": True, "ahead": 1}, devices=6
    )
    shared = {"--host": "0.0.0.0", "--port": "8000"}
    assert parsed(of[VLLM]["command"]) == {
        **shared,
        **{"--tensor-parallel-size": "2", "--max-num-batched-tokens": "1024", "--max-num-seqs": "48"},
        **{"--block-size": "16", "--enable-chunked-prefill": "", "--scheduling-policy": "fcfs"},
        **{"--enable-prefix-caching": "", "--async-scheduling": "", "--gpu-memory-utilization": "0.9"},
        **{"--dtype": "bfloat16", "--kv-cache-dtype": "auto"},
    }
    tokens = parsed(of[SGLANG]["command"])["--max-total-tokens"]
    assert parsed(of[SGLANG]["command"]) == {
        **{**shared, "--model-path": "meta-llama/Llama-3.1-8B", "--tp-size": "2"},
        **{"--chunked-prefill-size": "1024", "--max-prefill-tokens": "1024", "--max-running-requests": "48"},
        **{"--page-size": "16", "--enable-mixed-chunk": "", "--schedule-policy": "fcfs"},
        **{"--max-total-tokens": tokens, "--dtype": "bfloat16", "--kv-cache-dtype": "auto"},
    }
    assert parsed(of[TRTLLM]["command"]) == {
        **{**shared, "--backend": "pytorch", "--tp_size": "2", "--max_num_tokens": "1024"},
        **{"--max_batch_size": "48", "--enable_chunked_prefill": ""},
        **{"--extra_llm_api_options": "options.yaml", "disable_overlap_scheduler": "false"},
        **{"kv_cache_config.tokens_per_block": "16", "kv_cache_config.enable_block_reuse": "true"},
        **{"kv_cache_config.max_tokens": tokens, "kv_cache_config.dtype": '"auto"', "dtype": '"bfloat16"'},
        "scheduler_config.capacity_scheduler_policy": '"MAX_UTILIZATION"',
    }
    assert shlex.split(of[VLLM]["command"])[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]


def test_settings_that_are_off_are_said_to_be_off() -> None:
    of = {name: parsed(each["command"]) for name, each in commands({}).items()}
    assert {"--no-enable-prefix-caching", "--no-async-scheduling"} < set(of[VLLM])
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} < set(of[SGLANG])
    assert of[TRTLLM]["kv_cache_config.enable_block_reuse"] == "false"
    assert of[TRTLLM]["disable_overlap_scheduler"] == "true"


@pytest.mark.parametrize(
    ("strategy", "runs"),
    [
        ({"prefill": "whole"}, {TRTLLM}),
        ({"prefill": "first"}, {SGLANG}),
        ({"order": "shortest_first"}, set()),
        ({"wait_steps": 4, "wait_tokens": 512}, {TRTLLM}),
        ({"ahead": 3}, {VLLM, TRTLLM, SGLANG}),
    ],
)
def test_an_engine_that_lacks_a_setting_has_no_command(strategy: dict[str, Any], runs: set[str]) -> None:
    of = commands(strategy)
    assert {name for name, each in of.items() if each["command"]} == runs
    assert all(bool(each["command"]) != bool(each["why_not"]) for each in of.values())


SGLANGS = {"share": 0.7, "least": 0.098, "steps": 600, "most_tokens": 4096}


@pytest.mark.parametrize(
    ("reserve", "runs"),
    [
        (None, {VLLM, TRTLLM, SGLANG}),
        ({"share": 1}, {TRTLLM}),
        ({"share": 1, "most_tokens": 64}, set()),
        ({"share": 0.5}, set()),
        (SGLANGS, {SGLANG}),
        ({**SGLANGS, "steps": 601}, set()),
    ],
)
def test_room_for_answers_is_that_of_the_engine_or_it_has_no_command(
    reserve: dict[str, Any] | None, runs: set[str]
) -> None:
    of = commands({"reserve": reserve})
    assert {name for name, each in of.items() if each["command"]} == runs
    refused = "answers to come" if reserve != {"share": 1} else "it preempts"
    assert all(refused in of[name]["why_not"] for name in {VLLM} - runs)
    if TRTLLM in runs:
        policy = "MAX_UTILIZATION" if reserve is None else "GUARANTEED_NO_EVICT"
        found = parsed(of[TRTLLM]["command"])
        assert found["scheduler_config.capacity_scheduler_policy"] == f'"{policy}"'


def test_sglang_says_what_it_does_otherwise_where_the_cache_is_full() -> None:
    def says(strategy: dict[str, Any]) -> list[bool]:
        notes = " ".join(commands(strategy)[SGLANG]["notes"])
        return ["leaves room" in notes, "wait after all others" in notes]

    assert says({}) == [True, True]
    assert says({"engine": "sglang"}) == [False, False]
    assert says({"engine": "sglang", "preempted": "first"}) == [False, True]
    assert says({"engine": "sglang", "reserve": None}) == [True, False]
    assert not commands({"engine": "vllm", "preempted": "last"})[VLLM]["command"]


def test_waiting_is_a_share_of_the_budget() -> None:
    found = parsed(commands({"wait_steps": 4, "wait_tokens": 512})[TRTLLM]["command"])
    assert (found["batch_wait_timeout_iters"], found["batch_wait_max_tokens_ratio"]) == ("4", "0.25")


def test_the_kv_cache_is_as_large_as_the_simulated_one() -> None:
    """A token of Llama 3.1 8B: 32 layers, K and V of 8 heads of 128 in bf16, half on each of two ranks."""
    of = {
        name: parsed(each["command"])
        for name, each in commands({"ranks": 2}, devices=2, kv_blocks=100).items()
    }
    assert of[VLLM]["--kv-cache-memory-bytes"] == f"{100 * 16 * 32 * 2 * 8 * 128 * 2 // 2}"
    assert of[SGLANG]["--max-total-tokens"] == "1600"
    assert of[TRTLLM]["kv_cache_config.max_tokens"] == "1600"
    # 131,072 tokens of context do not fit: the longest request, 90 + 8, has to do.
    longest = [of[VLLM]["--max-model-len"], of[SGLANG]["--context-length"], of[TRTLLM]["--max_seq_len"]]
    assert longest == ["98"] * 3


@pytest.mark.parametrize("name", engine_names())
def test_a_named_engine_gets_its_own_command_with_its_own_share(name: str) -> None:
    of = commands({"engine": name})
    found = parsed(of[name]["command"])
    assert list(of) == [name]
    shares = ("--gpu-memory-utilization", "--mem-fraction-static", "kv_cache_config.free_gpu_memory_fraction")
    share = {VLLM: "0.92", "vllm-0.19": "0.9", SGLANG: "0.903", TRTLLM: "0.9"}[name]
    assert [found[each] for each in shares if each in found] == [share]


def test_a_share_of_the_scenario_replaces_the_engines() -> None:
    found = commands({"engine": "vllm"}, memory_share=0.5)[VLLM]["command"]
    assert parsed(found)["--gpu-memory-utilization"] == "0.5"


def test_formats_are_those_of_the_scenario() -> None:
    of = commands({}, dtype="fp8")
    assert parsed(of[VLLM]["command"])["--quantization"] == "fp8_per_tensor"
    assert (
        parsed(commands({"engine": "vllm-0.19"}, dtype="fp8")["vllm-0.19"]["command"])["--quantization"]
        == "fp8"
    )
    assert parsed(of[SGLANG]["command"])["--kv-cache-dtype"] == "fp8_e4m3"
    # trtllm-serve quantizes nothing: what it needs is said, and the command names no other model.
    assert "$MODEL" in of[TRTLLM]["command"]
    assert any("meta-llama/Llama-3.1-8B with weights in fp8" in note for note in of[TRTLLM]["notes"])
    assert parsed(of[TRTLLM]["command"])["kv_cache_config.dtype"] == '"fp8"'
    few = commands({}, dtype="w4a16_g128")
    assert all("$MODEL" in each["command"] for each in few.values())
    assert not any(each["command"] for each in commands({}, dtypes={"kv": "int8"}).values())


def test_what_no_engine_runs_says_so_plainly() -> None:
    for kind, more in [("temporal_fusion", {}), ("dynamic_batching", {"window_s": 0.1})]:
        found = asked_for({"kind": kind, **more})
        assert found["commands"] == []
        assert kind.replace("_", " ") in found["why_not"]
    of = commands({}, device="n150", model="tiny-llama")
    assert not any(each["command"] for each in of.values())
    assert all("n150" in each["why_not"] for each in of.values())


# -- models and routers --------------------------------------------------------------------------------------


def test_models_of_the_catalogue_have_their_names_on_hugging_face(tmp_path: Path) -> None:
    found = {name: model_name(name) for name in model_names()}
    # Those whose weights nobody published, or that no engine serves.
    unknown = [
        "decoder-85m",
        "hybrid-8b",
        "tiny-hybrid",
        "tiny-llama",
        "toy-retnet-1.3b",
        "transnormerllm-7b",
    ]
    assert [name for name, there in found.items() if there is None] == unknown
    assert (found["codellama-34b"], found["phi-4"]) == ("codellama/CodeLlama-34b-hf", "microsoft/phi-4")
    for given, there in [
        ("mine/Model-1.5", "mine/Model-1.5"),
        ("/data/a b", None),
        ("$(rm -r x)/y", None),
        (3, None),
    ]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"_name_or_path": given}))
        assert model_name(str(path)) == there


@pytest.mark.parametrize(("routing", "method"), [("least_loaded", "least_conn;"), ("round_robin", "")])
def test_the_router_has_every_server(routing: str, method: str) -> None:
    found = asked_for({}, devices=12, routing=routing)
    (router,) = {each["router"] for each in found["commands"]}
    writes = router.partition(" > ")[0]
    text = subprocess.run(["bash", "-c", writes], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"server (\w+:8000);", text) == [f"server{i}:8000" for i in range(1, 13)]
    assert text.split()[3:4] == ([method] if method else ["server"])
    assert text.count("{") == text.count("}") == 3
    assert "on each of 12 servers, with a device of its own" in found["placed"]


def test_routing_by_prefixes_is_that_of_the_engines_routers() -> None:
    of = commands({"ranks": 2}, devices=6, routing="prefix_aware")
    for name, first in ((VLLM, "vllm-router"), (SGLANG, "python -m sglang_router.launch_router")):
        assert of[name]["router"].startswith(f"{first} --policy cache_aware")
        assert of[name]["router"].endswith("--worker-urls http://server{1..3}:8000")
    assert of[TRTLLM]["router"] == ""
    assert any("prefix aware" in note for note in of[TRTLLM]["notes"])
    alone = asked_for({}, devices=1)
    assert (alone["placed"], [each["router"] for each in alone["commands"]]) == ("", [""] * 3)


def test_commands_say_that_autoscaling_is_not_in_them() -> None:
    rule = {"kind": "open_requests", "target": 4}
    says = "autoscaling is not in the commands: they start"
    several, one = asked_for({}, devices=3, autoscaling=rule), asked_for({}, devices=1, autoscaling=rule)
    assert f"  {says} all 3 servers, which stay on" in lines_of([{"point": "p", **several}])
    assert f"  {says} 1 server, which stays on" in lines_of([{"point": "p", **one}])
    assert not any("autoscaling" in line for line in lines_of([{"point": "p", **asked_for({}, devices=3)}]))


# -- a plan, and its energy ----------------------------------------------------------------------------------


def written(folder: Path, **more: Any) -> Path:
    path = folder / "plan.yaml"
    base = {**BASE, "strategies": [{"kind": "continuous_batching"}], **more.pop("base", {})}
    path.write_text(yaml.safe_dump({"base": base, "question": "grid", "replicas": 2, **more}))
    return path


@slow
def test_a_plan_ends_with_commands_and_bounds_the_energy_of_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    path = written(tmp_path, vary={"devices": [1, 2]}, objective="lowest_energy")
    result = CliRunner().invoke(cli.app, ["plan", str(path), "--jobs", "1"])
    assert result.exit_code == 0, result.output
    summary = json.loads(Path("runs/small/plan/summary.json").read_text())
    points = json.loads(Path("runs/small/plan/points.json").read_text())
    # 700 W of each device; 20 requests/s of 8 tokens come, and come out.
    assert [each["joules_per_output_token"] for each in points] == pytest.approx([700 / 160, 1400 / 160])
    assert [each["best"] for each in points] == [True, False]
    assert "at most 4.38 J per output token" in summary["answer"]
    assert "at most" in result.stdout.split("How to run")[0]
    (way,) = summary["how_to_run"]
    assert [each["engine"] for each in way["commands"]] == [VLLM, TRTLLM, SGLANG]
    for each in way["commands"]:
        # Whole, in one line, though the window is narrow.
        assert f"  {each['title']}: {each['command']}\n" in result.stdout
    page = Path("runs/small/plan/report.html").read_text()
    assert "How to run it" in page
    assert way["commands"][0]["command"] in page
    assert "J per output token, at most" in page


def judged(holds: bool, power_w: float | None, runs: list[Ran] | None = None) -> Any:
    hardware = SimpleNamespace(board_power_w=power_w)
    axes = SimpleNamespace(rate_per_s=10.0, output_tokens=100.0, arriving="requests", devices=4)
    devices = [SimpleNamespace(hardware=hardware, number=4)]
    point = SimpleNamespace(devices=devices, case=SimpleNamespace(axes=axes, scaling=None))
    judged = SimpleNamespace(point=point, holds=holds, mean=lambda name: 500.0, runs=runs or [Ran({})])
    return SimpleNamespace(point=point, judged=judged)


def test_what_does_not_keep_up_is_charged_for_the_tokens_that_came_out() -> None:
    assert joules_per_token(judged(True, 700.0)) == pytest.approx(700 * 4 / 1000)
    assert joules_per_token(judged(False, 700.0)) == pytest.approx(700 * 4 / 500)
    assert joules_per_token(judged(True, None)) is None


@pytest.mark.parametrize(
    ("runs", "tokens"),
    [
        ([Ran({}, growing=True), Ran({}, growing=True), Ran({})], 500),
        ([Ran({}, growing=True), Ran({}), Ran({})], 1000),
        ([Ran({}, growing=True)], 500),
        ([Ran({}, short=True)], 500),
        # Of judged points the verdict knows whether there were enough requests.
        ([Ran({}, short=True)] * 3, 1000),
    ],
)
def test_runs_whose_queues_grow_keep_up_with_nothing(runs: list[Ran], tokens: int) -> None:
    assert joules_per_token(judged(True, 700.0, runs)) == pytest.approx(700 * 4 / tokens)


def own_device(folder: Path, **more: Any) -> Path:
    path = folder / "card.yaml"
    four = {"name": "card", "memory_bytes": 80e9, "hbm_bytes_per_s": 3e12, "flops_per_s": {"bf16": 9e14}}
    path.write_text(yaml.safe_dump({**four, **more}))
    return path


def test_a_device_without_power_has_no_figure_and_no_lowest_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"device": str(own_device(tmp_path))}
    path = written(tmp_path, base=base, objective=["lowest_energy", "lowest_latency"])
    result = CliRunner().invoke(cli.app, ["plan", str(path)])
    assert isinstance(result.exception, InputError)
    assert "objective: lowest_energy needs card's board_power_w" in str(result.exception)
    assert len(str(result.exception)) < 300
    assert not Path("runs").exists()
    plan = run(load_plan(written(tmp_path, base=base)), jobs=1, progress=lambda *_: None)
    assert [line["joules_per_output_token"] for line in plan.lines] == [None]
    # Nobody knows whose device it is, so that no engine is refused.
    assert len([line for line in lines_of(plan.how) if "--port 8000" in line]) == 3


# -- power in device files -----------------------------------------------------------------------------------


def test_the_catalogue_has_the_power_of_its_cards_with_its_source() -> None:
    found = {name: load_device(name).board_power_w for name in device_names()}
    assert found == {
        **{"a100-sxm-80gb": 400.0, "a6000": 300.0, "b200-sxm": 1000.0, "h100-sxm": 700.0},
        **{"h200-sxm": 700.0, "n150": 160.0, "cpu": None},
    }
    document = read_yaml(CATALOG / "h200-sxm.yaml")
    del document["sources"]["board_power_w"]
    with pytest.raises(InputError, match=r"sources\.board_power_w"):
        validated(DeviceSpec, document, "here")
    table = {line.split()[0]: line for line in lines([load_device("h200-sxm"), load_device("cpu")])}
    assert " 700 " in table["h200-sxm"]
    assert "board_power_w = unknown" in list(described(load_device("cpu")))


@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e9, "700 W", True])
def test_a_power_that_cannot_be_is_one_line(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="board_power_w") as caught:
        load_device(str(own_device(tmp_path, board_power_w=value)))
    assert "\n" not in str(caught.value)


def test_no_power_is_assumed_and_one_can_be_changed(tmp_path: Path) -> None:
    bare = load_device(str(own_device(tmp_path)))
    assert bare.board_power_w is None
    assert changed(bare, {"board_power_w": 350}, "capped").board_power_w == 350.0
    with pytest.raises(InputError, match="board_power_w"):
        changed(bare, {"board_power_w": {"times": 0.5}}, "capped")
    half = changed(load_device("h200-sxm"), {"board_power_w": {"times": 0.5}}, "capped")
    assert half.board_power_w == 350.0
    assert "changed" in half.sources["board_power_w"]
    assert "changed" in changed(bare, {"board_power_w": 350}, "capped").sources["board_power_w"]
