"""`calibrate --from`: constants of services that the simulator made are found again; faults are one line."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from simcore.assembly import assemble
from simcore.cli import app
from simcore.input.files import InputError
from simcore.scenario import load_scenario, parse_scenario
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.engines.presets import load_engine
from simcore.studies.serving.host_time import HostTime
from simcore.studies.serving.study import cases
from simcore.validate.calibration.service import (
    ALIKE,
    Fitted,
    Times,
    each_held_back,
    fitted,
    told_apart,
    within,
)
from simcore.validate.calibration.service_runs import read_run
from simcore.workload.vllm_bench import write_bench
from tests.thorough import slow, thorough

HOST = HostTime(step_s=1e-3, sequence_s=3e-5, request_s=4e-3, prompt_token_s=6e-6)


def drawn(low: int, high: int) -> dict[str, Any]:
    return {"kind": "uniform", "low": low, "high": high}


def service(workload: Mapping[str, Any], host: HostTime = HOST, **fields: Any) -> dict[str, Any]:
    strategy = {"kind": "continuous_batching", "engine": "vllm-0.19", "host": host.model_dump()}
    return {
        "name": "ours",
        "study": "serving",
        "device": "h200-sxm",
        "profile": "none",
        "model": "llama-3.1-8b",
        "workload": workload,
        "strategies": [strategy],
        **fields,
    }


LOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few": (
        {
            "requests": 80,
            "arrivals": {"kind": "closed_loop", "clients": 4},
            "prompt_tokens": drawn(1500, 2000),
            "output_tokens": drawn(40, 60),
        },
        {"request_rate": "inf", "max_concurrency": 4},
    ),
    "many": (
        {
            "requests": 300,
            "arrivals": {"kind": "closed_loop", "clients": 48},
            "prompt_tokens": drawn(200, 300),
            "output_tokens": drawn(80, 100),
        },
        {"request_rate": "inf", "max_concurrency": 48},
    ),
    "open": (
        {
            "requests": 200,
            "arrivals": {"kind": "poisson", "rate_per_s": 20},
            "prompt_tokens": drawn(400, 600),
            "output_tokens": drawn(40, 60),
        },
        {"request_rate": 20.0, "max_concurrency": None},
    ),
}


def result_file(folder: Path, name: str, *, detailed: bool = True, **changes: Any) -> Path:
    """Writes what vLLM's benchmark would of a service that is as the simulator says."""
    workload, about = LOADS[name]
    if not detailed:
        # A file without lists says only how long requests are in the mean.
        of = {each: workload[each] for each in ("prompt_tokens", "output_tokens")}
        means = {each: (lengths["low"] + lengths["high"]) // 2 for each, lengths in of.items()}
        workload = workload | {each: {"kind": "constant", "value": mean} for each, mean in means.items()}
    study = assemble(parse_scenario(service(workload), name), name).study
    assert isinstance(study, DeviceStudy)
    served = study.bench.run(next(cases(study.bench)), 0).served
    path = folder / f"{name}.json"
    write_bench(
        path,
        start_s=served.arrival_s,
        prompt_tokens=served.prompt_tokens,
        output_tokens=served.output_tokens,
        ttft_s=served.first_token_s - served.arrival_s,
        e2e_s=served.finish_s - served.arrival_s,
        duration_s=float(served.finish_s.max() - served.arrival_s.min()),
        about=about,
    )
    result = json.loads(path.read_text())
    if not detailed:
        result = {key: value for key, value in result.items() if not isinstance(value, list)}
    path.write_text(json.dumps({**result, **changes}))
    return path


def scenario_file(folder: Path, **fields: Any) -> Path:
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(service(LOADS["few"][0], HostTime(), **fields)))
    return path


def calibrated(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    if isinstance(found.exception, InputError):
        return 2, str(found.exception)
    assert found.exception is None, found.exception
    return found.exit_code, found.stdout


# -- the whole command -------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("detailed", [True, pytest.param(False, marks=thorough)])
def test_a_service_s_constants_are_found_again(tmp_path: Path, detailed: bool) -> None:
    """What a host adds to steps to 10 %, for a factor of op times takes some of it; what the front end takes
    for prompts as in these runs to 15 %; factors of memory to 3, of arithmetic to 10 %."""
    files = [result_file(tmp_path, name, detailed=detailed) for name in LOADS]
    out = tmp_path / "ours-engine.yaml"
    code, said = calibrated("--from", *files, "--scenario", scenario_file(tmp_path), "--out", out)
    assert code == 0
    assert said.count("held back: TPOT") == 3
    host = HostTime(**load_engine(str(out)).fields["host"])
    for sequences in (4, 48):
        wanted_s = HOST.step_s + HOST.sequence_s * sequences
        assert host.step_s + host.sequence_s * sequences == pytest.approx(wanted_s, rel=0.1)
    assert host.memory_factor == pytest.approx(1.0, abs=0.03)
    assert host.arithmetic_factor == pytest.approx(1.0, abs=0.1)
    wanted_s = HOST.request_s + 500 * HOST.prompt_token_s
    assert host.request_s + 500 * host.prompt_token_s == pytest.approx(wanted_s, rel=0.15)
    written = load_engine(str(out))
    assert (written.base, written.engine, written.name) == ("vllm-0.19", "vllm", "ours")
    # The scenario has none of its base's kernels.
    assert (host.products_of, host.quantizes) == (None, ())
    assert "held back" in written.sources["host"]
    # A scenario takes it by its name.
    named = yaml.safe_load((tmp_path / "service.yaml").read_text())
    named["strategies"] = [{"kind": "continuous_batching", "engine": out.name}]
    (tmp_path / "named.yaml").write_text(yaml.safe_dump(named))
    (strategy,) = assemble(load_scenario(tmp_path / "named.yaml"), "named").scenario.strategies  # type: ignore[union-attr]
    assert strategy.host == host  # type: ignore[union-attr]


@slow
def test_two_runs_say_what_they_do_not_tell(tmp_path: Path) -> None:
    first = result_file(tmp_path, "few")
    second = tmp_path / "again.json"
    second.write_text(json.dumps(json.loads(first.read_text()) | {"date": "20261130"}))
    code, said = calibrated("--from", first, "--from", second, "--scenario", scenario_file(tmp_path), "--out",
                            tmp_path / "x.yaml")  # fmt: skip
    assert code == 0
    assert "all runs have as many sequences in a step" in said
    assert "all runs have prompts as long" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("mean_ttft_ms"), "few.json: mean_ttft_ms: is missing"),
        (lambda r: r.update(mean_tpot_ms=0.0), "few.json: mean_tpot_ms: is 0.0; a number above 0 is needed"),
        (lambda r: r.update(completed="80"), "few.json: completed: is '80'; a whole number above 0"),
        (lambda r: r.update(completed=0), "few.json: completed: is 0"),
        (lambda r: r.update(request_rate="fast"), "few.json: request_rate: is 'fast'"),
        (lambda r: r.update(max_concurrency=2.5), "few.json: max_concurrency: is 2.5; a whole number"),
        (lambda r: r.update(total_output_tokens=80), "few.json: total_output_tokens: answers have 1 tokens"),
        (lambda r: r.update(input_lens=3), "few.json: input_lens: is 3; a list"),
        (lambda r: r.update(output_lens=[0]), "few.json: output_lens: has 0 lengths above 0"),
        (
            lambda r: r.update(burstiness=-1.0, request_rate=1.0, input_lens=None),
            "few.json: burstiness: is -1.0",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, change: Callable[[Any], Any], says: str) -> None:
    result = {
        "completed": 80, "num_prompts": 80, "duration": 10.0, "request_rate": "inf", "max_concurrency": 4,
        "total_input_tokens": 8000, "total_output_tokens": 800, "mean_ttft_ms": 50.0, "mean_tpot_ms": 8.0,
    }  # fmt: skip
    change(result)
    path = tmp_path / "few.json"
    path.write_text(json.dumps(result))
    code, said = calibrated("--from", path, "--scenario", scenario_file(tmp_path))
    assert code == 2
    assert says in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "few.json"], "--scenario: is missing"),
        (["--from", "none.json", "--scenario", "service.yaml"], "none.json: cannot be read"),
        (["--from", "few.json", "--scenario", "service.yaml", "--engine", "vlm"], "unknown engine 'vlm'"),
        (["--from", "few.json", "few.json", "--scenario", "service.yaml"], "is the same run as"),
        (
            ["--from", "few.json", "--scenario", "service.yaml", "--out", "none/x.yaml"],
            "--out none/x.yaml: its",
        ),
        (["--scenario", "service.yaml"], "--scenario: is for calibrate --from FILE.json only"),
        (["few.json"], "a file: is for calibrate --from FILE.json only"),
        (
            [
                "--from",
                "few.json",
                "--scenario",
                "service.yaml",
                "--set",
                "strategies.0.token_budget=[1024, 2048]",
            ],
            "makes 2 cases; one is needed",
        ),
    ],
)
def test_a_wrong_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result_file(tmp_path, "few")
    scenario_file(tmp_path)
    code, said = calibrated(*words)
    assert (code, "\n" in said) == (2, False)
    assert says in said


# -- what a file's load is ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "arrivals"),
    [
        ({}, {"kind": "closed_loop", "clients": 4}),
        ({"max_concurrency": None}, {"kind": "closed_loop", "clients": 80}),
        ({"request_rate": 2.0}, {"kind": "poisson", "rate_per_s": 2.0}),
        ({"request_rate": 2.0, "burstiness": 0.25}, {"kind": "gamma", "rate_per_s": 2.0, "cv": 2.0}),
        # Each stays 0.05 + 9 * 0.01 s: four clients send 28.6 a second.
        ({"request_rate": 100.0}, {"kind": "closed_loop", "clients": 4}),
        ({"request_rate": 100.0, "max_concurrency": None}, {"kind": "poisson", "rate_per_s": 100.0}),
    ],
)
def test_the_load_of_a_file(tmp_path: Path, changes: dict[str, Any], arrivals: dict[str, Any]) -> None:
    result = {
        "completed": 80, "num_prompts": 80, "duration": 10.0, "request_rate": "inf", "max_concurrency": 4,
        "total_input_tokens": 8000, "total_output_tokens": 800, "mean_ttft_ms": 50.0, "mean_tpot_ms": 10.0,
    }  # fmt: skip
    path = tmp_path / "few.json"
    path.write_text(json.dumps(result | changes))
    run = read_run(path)
    assert run.workload["arrivals"] == arrivals
    assert run.workload["prompt_tokens"] == {"kind": "constant", "value": 100}
    assert run.times == Times(pytest.approx(0.05), pytest.approx(0.01))
    assert (run.sequences, run.rate_per_s) == (pytest.approx(80 * 9 * 0.01 / 10), pytest.approx(8.0))


@slow
def test_a_recorded_load_is_replayed(tmp_path: Path) -> None:
    path = result_file(tmp_path, "open")
    assert read_run(path).workload == {
        "arrivals": {"kind": "trace", "format": "vllm", "path": str(path.absolute())}
    }


# -- the fit -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A run of a service whose times follow from its host by two lines."""

    sequences: float
    prompt_tokens: float
    host: HostTime = HOST
    rate_per_s: float = 10.0

    @property
    def times(self) -> Times:
        return times_of(self, self.host)


def by_lines(tasks: Sequence[tuple[Made, HostTime]]) -> list[Times]:
    return [times_of(run, host) for run, host in tasks]


def times_of(run: Made, host: HostTime) -> Times:
    tpot_s = 8e-3 + host.step_s + host.sequence_s * run.sequences
    return Times(0.04 + 2 * tpot_s + host.request_s + host.prompt_token_s * run.prompt_tokens, tpot_s)


def test_lines_are_found() -> None:
    """To 5 %: what is usual for hosts pulls a little."""
    runs = [Made(4, 1000), Made(64, 200), Made(32, 4000)]
    found = fitted(runs, by_lines).alone()
    for name in ("step_s", "sequence_s", "request_s", "prompt_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(HOST, name), rel=0.05)
    # Times that no factor and no way out changes say nothing of them.
    assert (found.answer_token_s, found.marks) == (0.0, ())
    for one in each_held_back({str(i): run for i, run in enumerate(runs)}, by_lines):
        assert abs(one.tpot_pct) < 1.0
        assert abs(one.ttft_pct) < 5.0


@dataclass(frozen=True)
class Simulated:
    """A closed loop of a service that is as the simulator says."""

    clients: int
    prompt: int
    host: HostTime
    rate_per_s: float = 1.0

    @property
    def sequences(self) -> float:
        return self.clients

    @property
    def prompt_tokens(self) -> float:
        return self.prompt

    @property
    def times(self) -> Times:
        return simulated(self, self.host)


def simulated(run: Simulated, host: HostTime) -> Times:
    workload = {
        "requests": 6 * run.clients,
        "arrivals": {"kind": "closed_loop", "clients": run.clients},
        "prompt_tokens": drawn(run.prompt - 20, run.prompt),
        "output_tokens": drawn(20, 40),
    }
    study = assemble(parse_scenario(service(workload, host), "calls"), "calls").study
    assert isinstance(study, DeviceStudy)
    served = study.bench.run(next(cases(study.bench)), 0).served
    tpot_s = (served.finish_s - served.first_token_s) / (served.output_tokens - 1)
    return Times(float((served.first_token_s - served.arrival_s).mean()), float(tpot_s.mean()))


@slow
@pytest.mark.parametrize(("call_s", "prompt"), [(6e-5, 200), (2e-6, 3000)], ids=["felt", "hidden"])
def test_calls_of_ops_are_found_where_they_are_felt(call_s: float, prompt: int) -> None:
    """Steps with short prompts wait for their calls, which says what they take to 10 %. Calls of long prompts
    are hidden behind the card: then they are not found, and nothing else stands in for them."""
    host = HostTime(step_s=1e-3, call_s=call_s)
    runs = [Simulated(clients, prompt, host) for clients in (1, 2, 4, 8, 16, 24)]

    def predict(tasks: Sequence[tuple[Simulated, HostTime]]) -> list[Times]:
        return [simulated(run, host) for run, host in tasks]

    found = fitted(runs, predict, names=["step_s", "call_s", "request_s"], most_slopes=1).alone()
    assert found.step_s == pytest.approx(host.step_s, rel=0.1)
    if prompt == 200:
        assert found.call_s == pytest.approx(call_s, rel=0.1)
    assert found.request_s < 1e-3
    assert found.call_s < 2.0 * call_s + 1e-5


def test_only_what_runs_tell_apart_is_fitted() -> None:
    always = ("answer_token_s", "arithmetic_factor", "memory_factor", "collective_factor")
    assert told_apart([Made(8, 100), Made(9, 100)]) == ("step_s", "request_s", *always)
    assert told_apart([Made(8, 100), Made(12, 100)]) == ("step_s", "sequence_s", "request_s", *always)
    assert told_apart([Made(8, 100), Made(9, 150)]) == ("step_s", "request_s", "prompt_token_s", *always)
    one = fitted([Made(8, 100)], by_lines).alone()
    assert (one.sequence_s, one.prompt_token_s) == (0.0, 0.0)
    assert one.step_s == pytest.approx(HOST.step_s + 8 * HOST.sequence_s, rel=0.02)


def test_no_cost_is_below_zero_and_a_front_end_keeps_up() -> None:
    class Fast(Made):
        @property
        def times(self) -> Times:
            return Times(10.0, 1e-3)

    found = fitted([Fast(8, 100)], by_lines).alone()
    assert found.step_s == pytest.approx(0.0, abs=1e-9)
    # Half of the time between two of ten requests a second.
    assert found.request_s == pytest.approx(0.05)


def test_a_service_without_host_time_has_none() -> None:
    runs = [Made(4, 1000, HostTime()), Made(64, 200, HostTime())]
    assert fitted(runs, by_lines).alone() == HostTime()


def test_how_far_others_are_is_what_the_errors_say() -> None:
    """Of a hundred errors the 91st; of three Student's t times their size, 2.353."""
    errors = [0.001 * (i + 1) * (-1) ** i for i in range(100)]
    assert within(errors) == pytest.approx(np.expm1(0.091))
    assert within([0.1, -0.1, 0.1]) == pytest.approx(np.expm1(0.2353), rel=1e-3)
    assert within([5.0]) == 10.0


def test_a_fit_says_how_far_runs_are_that_it_leaves_out() -> None:
    """Services that are up to a tenth slower or faster than their lines: 90 % of new ones are within."""
    drawn = np.random.default_rng(1)

    class Off(Made):
        @property
        def times(self) -> Times:
            by = 1.0 + 0.1 * np.sin(1e3 * self.sequences)
            return Times(by * times_of(self, self.host).ttft_s, by * times_of(self, self.host).tpot_s)

    runs = [Off(float(drawn.uniform(1, 64)), float(drawn.uniform(100, 4000))) for _ in range(24)]
    found = fitted(runs, by_lines).alone()
    assert 0.06 < found.tpot_within < 0.16
    assert 0.06 < found.ttft_within < 0.16
    new = [Off(float(drawn.uniform(1, 64)), float(drawn.uniform(100, 4000))) for _ in range(200)]
    off = [one.times.tpot_s / times_of(one, found).tpot_s for one in new]
    assert 0.8 < np.mean([1 / (1 + found.tpot_within) < each < 1 + found.tpot_within for each in off]) < 1.0


def test_of_one_run_nothing_is_held_back() -> None:
    assert list(each_held_back({"one": Made(8, 100)}, by_lines)) == []


def test_fits_of_few_runs_have_much_of_all_fits_intervals() -> None:
    """Two runs that are 1 % off beside 200 that are 20 % off: what two say of weight 2, log(1.2) of weight
    16. By themselves fits keep their own."""
    few = Fitted(HOST, {"tpot": [0.01, -0.01], "ttft": [0.0, 0.0]})
    many = Fitted(HOST, {"tpot": [math.log(1.2)] * 200, "ttft": [0.1] * 200})
    own, every = math.log1p(within([0.01, -0.01])), math.log(1.2)
    mean = math.exp((2 * math.log(own) + ALIKE * math.log(every)) / (2 + ALIKE))
    assert few.beside([few, many]).tpot_within == pytest.approx(math.expm1(mean))
    assert few.beside([few]).tpot_within == pytest.approx(few.alone().tpot_within)
    assert few.alone().tpot_within == pytest.approx(math.expm1(own))
    assert few.alone().ttft_within == 0.0 < few.beside([few, many]).ttft_within < 0.1
