"""Instances in processes of their own: each request is answered as if it ran alone, by weights that are there
once; times are by one clock; and whatever ends a process, one line names it and none is left.

The truth is a float64 model computed token by token without any op of the project."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from simcore.assembly import Place, assemble
from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.machine import Overheads, Program
from simcore.machine.trace import Trace
from simcore.models.served_decoder import ServedDecoder
from simcore.scenario import parse_scenario
from simcore.schedules.concurrent_instances import concurrent_instances, instance_stream
from simcore.sim.runs import Run, Setup
from simcore.sim.simulation import no_floor
from simcore.validate.machines import here
from simcore.validate.machines.buffers.decoder import Weights, shards
from simcore.validate.machines.buffers.served import prompt_ids
from simcore.validate.machines.cuda.runs import CardInstance, RealCard, card_instance
from simcore.validate.machines.cuda.states import CardStates
from simcore.validate.machines.here import CpuInstance
from simcore.validate.machines.processes import Apart, ProcessRun
from simcore.validate.machines.workers import (
    LEAVING_S,
    QUEUES,
    Maker,
    Pool,
    Worker,
    WorkerError,
    _one_queue,
    _unpriced,
)
from simcore.validate.timing.allocator import memory_for_others
from simcore.validate.timing.pace import Pace
from simcore.workload.requests import END, REQUESTS, Batch, Journal, Request
from tests.child_signals import child_signals
from tests.fake_card import FakeCudaApi
from tests.test_answers import Alone, requests
from tests.test_card_decoder import emulated, needs_card
from tests.test_card_serving import scenario
from tests.test_torch_decoder import CONFIGS, F32, F64, SEED
from tests.thorough import first, slow, thorough

SERVER, PLACES = {"server": 1, "tensor": 1}, 2
CONFIG = replace(CONFIGS["gqa"], layers=1)
# A process has to have ended by then.
SOON_S = 20.0


def fake_card_instance(weights: Weights) -> CardInstance:
    """On a card that is none, in Triton's interpreter; called in a worker."""
    Pace.settle = lambda self: True  # type: ignore[method-assign]
    return CardInstance(RealCard(1, CardStates(1 << 20, "cpu", weights), api=FakeCudaApi))


MAKERS: dict[str, Maker] = {"cpu": CpuInstance, "fake": fake_card_instance, "cuda": card_instance}
KINDS = [
    pytest.param("cpu", marks=slow),
    pytest.param("fake", marks=[emulated, thorough]),
    pytest.param("cuda", marks=needs_card),
]


@dataclass
class Served:
    trace: Trace
    answers: dict[int, list[int]]
    run: ProcessRun


def setup_of(model: ServedDecoder, wanted: list[Request], places: int = PLACES) -> Setup:
    prompt, longest = (max(r.prompt_tokens + more * r.max_tokens for r in wanted) for more in (0, 1))
    holds = {
        "kv_tokens": len(wanted) * longest,
        "shared_text": False,
        "longest": longest,
        "room_tokens": places * longest,
        "longest_prompt": prompt,
        "step_tokens": places * prompt,
        "step_rows": places,
        "streams": [instance_stream(number) for number in range(places)],
        "prompts_apart": True,
        "processes": True,
    }
    setup = Setup(model, _unpriced, no_floor, Overheads(), SERVER, lockstep=("tensor",), holds=holds)
    return replace(setup, case="one", title="instances")


def serve(
    apart: Apart,
    model: ServedDecoder,
    wanted: list[Request],
    weights: Callable[[], Any],
    answered: Callable[[Request], object] = lambda _: None,
    places: int = PLACES,
) -> Served:
    run, journal, answers = (
        apart.start(setup_of(model, wanted, places), weights),
        Journal(),
        dict[int, list[int]](),
    )
    run.feed(0, REQUESTS, [*((r.arrival_s, r) for r in wanted), (wanted[-1].arrival_s, END)])

    def note(request: Request, at_s: float) -> None:
        del at_s
        answered(request)
        answers[request.id] = run.answer(request)

    journal.answered = note
    trace = run.run(
        lambda m: concurrent_instances(m, model, journal, max_instances=places, prompt_streams=None)
    )
    return Served(trace, answers, run)


def truth(alone: Alone, request: Request) -> list[int]:
    prompt = prompt_ids(request, CONFIG.vocab, here.SEED).tolist()
    return alone.answer(prompt, request.output_tokens)


def nobody_left() -> bool:
    until_s = time.perf_counter() + SOON_S
    while active_children() and time.perf_counter() < until_s:
        time.sleep(0.01)
    return not active_children()


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_is_answered_as_if_it_ran_alone_by_weights_that_are_there_once(kind: str) -> None:
    """Two services by the same processes; in between this process changes the weights in place, and they see
    it."""
    formats, device = F64 if kind == "cpu" else F32, "cuda" if kind == "cuda" else "cpu"
    model, alone = ServedDecoder(CONFIG, dtypes=formats), Alone(CONFIG)
    with memory_for_others() if device == "cuda" else nullcontext():
        weights = shards(CONFIG, formats, 1, model.style, SEED)[0].to(device)
    apart, heads = Apart(MAKERS[kind]), (weights.outside["lm_head"], alone.weights.outside["lm_head"])
    pids: list[set[int | None]] = []
    try:
        for seed in range(2):
            wanted = requests(Random(seed), equal=False, count=5, most=6)
            for r in wanted:
                # One capture of prompts.
                r.prompt_tokens = min(16, r.prompt_tokens)
            found = serve(apart, model, wanted, lambda: weights)
            pids.append({process.pid for process in active_children()})
            for r in wanted:
                assert found.answers[r.id] == truth(alone, r), r.id
            assert not laws.violations(found.trace)
            # By the clocks of the processes, and of this one.
            assert found.trace.end_s < max(r.finish_s for r in wanted)
            assert {span.stream for span in found.trace.spans} <= {"instance 0", "instance 1"}
            assert sum(len(s.ops) > 0 for s in found.trace.spans) == sum(r.output_tokens for r in wanted)
            for head in heads:
                head.copy_(head.roll(1, 1))
    finally:
        apart.close()
    assert pids[0] == pids[1]
    assert len(pids[0]) == PLACES
    assert nobody_left()


@emulated
@thorough
def test_a_scenario_runs_in_processes_and_captures_nothing_while_it_counts(tmp_path: Path) -> None:
    """From the file to the figures, on a card that is none; streams and processes one after the other."""
    strategy = {"kind": "concurrent_instances", "max_instances": 2, "processes": [True, False]}
    apart = Apart(fake_card_instance)
    real = RealCard(1, CardStates(1 << 20, "cpu"), api=FakeCudaApi, apart=apart)
    place = Place("cuda", real.start, 1, described=lambda: real.described)
    outcome = assemble(scenario(tmp_path, strategy), "t", place).study.run(lambda *_: None)
    assert nobody_left()
    latency = [row.value for row in outcome.rows if row.metric == "e2e_mean_s"]
    assert len(latency) == 2
    assert min(each or 0.0 for each in latency) > 0.0
    assert not [line for line in outcome.warnings if "streams" in line]
    said = real.described
    assert said["processes"] == "2, one an instance, beside each other, with shared weights"
    assert "processes take turns" in said["mps"]
    assert "captured" not in said
    assert [*said["of_each"]] == ["instance 0 of rank 0", "instance 1 of rank 0"]
    assert all("captured" not in each for each in said["of_each"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_are_on_the_card_once(whole_card: None) -> None:
    """Of 6 GB, with two processes beside the one that made them."""
    config = replace(CONFIG, hidden=4096, intermediate=14336, layers=16, q_heads=32, kv_heads=8, head_dim=128)
    model, apart = ServedDecoder(config), Apart(card_instance)
    states = CardStates(1 << 20)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    states.weights_for_others(model)
    # Drawing them takes memory for a while.
    torch.cuda.empty_cache()
    own = before - torch.cuda.mem_get_info()[0]
    wanted = [Request(i, 0.0, 64, 4, 4) for i in range(4)]
    try:
        serve(apart, model, wanted, lambda: states.weights_for_others(model))
        torch.cuda.empty_cache()
        both = before - torch.cuda.mem_get_info()[0]
    finally:
        apart.close()
        states.forget()
    assert own > 5e9
    assert both < 1.7 * own


@pytest.fixture
def small() -> Iterator[tuple[Apart, ServedDecoder, list[Request], Callable[[], Any]]]:
    model, apart = ServedDecoder(CONFIG, dtypes=F64), Apart(CpuInstance)
    wanted = [Request(i, 0.0, 4, 30, 30) for i in range(6)]
    yield apart, model, wanted, lambda: shards(CONFIG, F64, 1, model.style, SEED)[0]
    apart.close()


@slow
def test_a_process_that_is_killed_is_named_at_once_and_none_is_left(small: Any) -> None:
    apart, model, wanted, weights = small
    ended_s = []

    def kill(request: Request) -> None:
        victim = next(each for each in active_children() if each.name == "instance 1 of rank 0")
        os.kill(victim.pid or 0, signal.SIGKILL)
        ended_s.append(time.perf_counter())

    with pytest.raises(WorkerError, match=r"^instance 1 of rank 0: its process \d+ was killed by SIGKILL,"):
        serve(apart, model, wanted, weights, kill)
    assert time.perf_counter() - ended_s[0] < SOON_S
    assert nobody_left()


@slow
def test_a_process_that_ends_while_nothing_is_to_do_is_noticed_too(small: Any) -> None:
    apart, model, wanted, weights = small
    run: Run = apart.start(setup_of(model, wanted, places=1), weights)

    def program(m: Any) -> Program:
        os.kill(active_children()[0].pid or 0, signal.SIGKILL)
        yield m.recv("nothing", timeout_s=1000.0)

    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        run.run(program)
    assert nobody_left()


def refuses(weights: Weights) -> CpuInstance:
    raise InputError("--on cuda: no memory")


def breaks(weights: Weights) -> CpuInstance:
    raise ValueError("a fault")


@slow
def test_what_a_process_raises_comes_back(small: Any, capfd: pytest.CaptureFixture[str]) -> None:
    _, model, wanted, weights = small
    with pytest.raises(InputError, match=r"^instance 0 of rank 0: --on cuda: no memory$"):
        serve(Apart(refuses), model, wanted, weights, places=1)
    assert nobody_left()
    assert capfd.readouterr().err == ""
    with pytest.raises(WorkerError, match=r"^instance [01] of rank 0: ValueError: a fault$"):
        serve(Apart(breaks), model, wanted, weights)
    assert nobody_left()


@slow
def test_a_launch_that_more_than_its_stream_decides_about_is_refused(small: Any) -> None:
    apart, model, wanted, weights = small
    run: Run = apart.start(setup_of(model, wanted, places=1), weights)

    def program(m: Any) -> Program:
        sizes = {"tokens": 1, "rows": 1, "sequences": 1, "kv_tokens": 5, "over_mean": 0}
        m.launch(model.decode, stream="side", sizes=sizes, batch=lambda: Batch(decoding=[(wanted[0], 4)]))
        yield m.wait()

    with pytest.raises(ValueError, match="graph decode on side: streams in processes of their own take the"):
        run.run(program)
    assert nobody_left()


@slow
def test_a_burst_that_is_stopped_ends_at_a_replay(small: Any) -> None:
    apart, model, wanted, weights = small
    run: Run = apart.start(setup_of(model, wanted, places=1), weights)
    ran = []

    def program(m: Any) -> Program:
        sizes = {"tokens": 1, "rows": 1, "sequences": 1, "kv_tokens": 5, "over_mean": 0}
        request = Request(0, 0.0, 4, 20_000, 20_000)
        batch = partial(Batch, (), [(request, 4)])
        burst = m.launch(model.decode, stream="instance 0", sizes=sizes, repeat=20_000, batch=batch)
        yield m.recv("nothing", timeout_s=0.05)
        burst.stop()
        yield m.wait(burst)
        ran.append(burst.ran)

    trace = run.run(program)
    assert 0 < ran[0] < 20_000
    assert len(trace.spans) == ran[0]


SCENARIO = """
name: apart
study: serving
device: cpu
model: tiny-llama
dtype: fp32
workload:
  requests: 400
  arrivals: {kind: poisson, rate_per_s: 50}
  prompt_tokens: {kind: constant, value: 16}
  output_tokens: {kind: constant, value: 32}
strategies:
  - {kind: concurrent_instances, max_instances: 2, processes: true}
"""


def others_in_group(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[2]) == group and int(folder.name) != group and b"spawn_main" in words:
            found.append(int(folder.name))
    return found


@slow
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "told to end", marks=thorough),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, "", marks=thorough),
    ],
)
def test_whatever_ends_a_run_ends_its_processes(
    number: signal.Signals, code: int, says: str, tmp_path: Path
) -> None:
    """As a terminal does for Ctrl-C, SIGINT goes to all of them."""
    file = tmp_path / "apart.yaml"
    file.write_text(SCENARIO, encoding="utf-8")
    command = [sys.executable, "-m", "simcore", "run", str(file), "--on", "cpu"]
    with child_signals({signal.SIGINT: signal.SIG_DFL}):
        process = subprocess.Popen(
            command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    until_s = time.perf_counter() + 60.0
    while len(others_in_group(process.pid)) < 2 and time.perf_counter() < until_s:
        time.sleep(0.05)
    assert len(others_in_group(process.pid)) == 2
    time.sleep(3.0)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=SOON_S)
    assert process.returncode == code
    words = error.decode()
    assert "Traceback" not in words, words
    assert says in words
    until_s = time.perf_counter() + SOON_S
    while others_in_group(process.pid) and time.perf_counter() < until_s:
        time.sleep(0.05)
    assert not others_in_group(process.pid)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("*/cpu"))


def test_an_interrupt_while_weights_are_sent_waits_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still imports reads nothing, and would be given LEAVING_S."""

    def interrupted(self: Worker, said: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "send", interrupted)
    begun_s = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        Pool(CpuInstance, None, [(0, "instance 0")])
    assert time.perf_counter() - begun_s < LEAVING_S
    assert not active_children()


@pytest.mark.parametrize("given", [None, "4"])
def test_only_while_a_process_starts_there_is_one_queue(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says how many."""
    monkeypatch.delenv(QUEUES, raising=False)
    if given is not None:
        monkeypatch.setenv(QUEUES, given)
    with suppress(RuntimeError), _one_queue():
        assert os.environ[QUEUES] == (given or "1")
        raise RuntimeError
    assert os.environ.get(QUEUES) == given


@slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
@pytest.mark.parametrize("given", first(1, ["4", None]))
def test_a_process_begins_with_one_queue_of_a_card(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says how many; here none changes."""
    monkeypatch.delenv(QUEUES, raising=False)
    if given is not None:
        monkeypatch.setenv(QUEUES, given)
    pool = Pool(CpuInstance, None, [(0, "instance 0")])
    try:
        (process,) = active_children()
        said, until_s = b"", time.perf_counter() + SOON_S
        # Empty until the process has begun to run.
        while not said and time.perf_counter() < until_s:
            said = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert f"{QUEUES}={given or 1}".encode() in said.split(b"\0")
        assert os.environ.get(QUEUES) == given
    finally:
        pool.close()


def test_more_processes_than_a_machine_holds_are_refused() -> None:
    wanted = [Request(i, 0.0, 4, 4, 4) for i in range(65)]
    setup = setup_of(ServedDecoder(CONFIG), wanted, places=65)
    with pytest.raises(InputError, match=r"^instances: max_instances: 65 processes; at most 64 are started$"):
        Apart(CpuInstance).start(setup, list)
    for_two = replace(setup, mesh={"server": 1, "tensor": 2})
    with pytest.raises(InputError, match=r"^instances: ranks: a process holds one rank; 1 is allowed$"):
        Apart(CpuInstance).start(for_two, list)


def test_a_prediction_says_that_it_is_one_of_streams() -> None:
    found = assemble(parse_scenario(document(), "t"), "t").study.run(lambda *_: None)
    (said,) = [line for line in found.warnings if "streams" in line]
    assert said.startswith("concurrent instances, up to 2, a process each: predicted as streams of one")
    mean = {row.axes.label: row.value for row in found.rows if row.metric == "e2e_mean_s"}
    # But for where prompts run: beside each other, and launched with their answers.
    one, other = mean.values()
    assert one == pytest.approx(other, rel=0.02)
    assert one != other


def test_several_ranks_in_a_process_are_refused() -> None:
    strategy = {"kind": "concurrent_instances", "processes": [False, True], "ranks": [2]}
    with pytest.raises(InputError, match=r"strategies\[0\].processes: is true, which runs with ranks 1 only"):
        parse_scenario({**document(), "devices": 2, "strategies": [strategy]}, "t")


def test_prompt_streams_beside_processes_are_refused() -> None:
    strategy = {"kind": "concurrent_instances", "processes": [False, True], "prompt_streams": [1, 2]}
    says = r"strategies\[0\].prompt_streams: is given; processes compute their own prompts: leave it out"
    with pytest.raises(InputError, match=says):
        parse_scenario({**document(), "strategies": [strategy]}, "t")


def document() -> dict[str, Any]:
    length = {"kind": "constant", "value": 8}
    workload = {"requests": 4, "arrivals": {"kind": "poisson", "rate_per_s": 5.0}}
    workload |= {"prompt_tokens": length, "output_tokens": length}
    return {
        "name": "t",
        "study": "serving",
        "device": "h200-sxm",
        "model": "llama-3.1-8b",
        "workload": workload,
        "strategies": [{"kind": "concurrent_instances", "max_instances": 2, "processes": [False, True]}],
    }
