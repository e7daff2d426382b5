"""Graphs at the same time: the law of contention, the cases' programs on a card that is none and simulated,
constants found again from what the law gave, and the program around them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from devices.fitted import read_fitted, write_fitted
from devices.price import pricer, roofline
from devices.spec import load_device
from simcore import laws
from simcore.contention import Demand, max_min_rates, shared_reads
from simcore.files import InputError
from simcore.long_convolution import LongConvolution
from simcore.machine import Overheads
from simcore.models import Decoder, Dtypes
from tests.fake_card import FakeLayer
from tests.test_card_decoder import GQA
from tests.test_fit import PROFILE
from validate import contention, contention_cases
from validate.card_instances import CardInstancesState, Instances
from validate.card_layer import STREAMS_OF_TORCH, CudaLayer
from validate.card_machine import Card
from validate.card_real import RealCard
from validate.card_states import CardStates
from validate.contention import Constants, cases_of, fit, judged, medians, read, roles, together_s, write
from validate.contention_cases import Case, Device, Models, Row, balanced, measured, predicted, seconds_of

fixed = settings(deadline=None, derandomize=True, database=None)
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
H200 = load_device("h200-sxm")
F32 = Dtypes("fp32", "fp32", "fp32")
SMALL = Models(replace(GQA, layers=2), F32, LongConvolution(layers=2, channels=8, tokens=4, dtype="fp32"))
LARGE = Models(
    replace(GQA, layers=2, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128),
    Dtypes(),
    LongConvolution(layers=18, channels=256, tokens=4, dtype="fp32"),
)
SIMULATED = Device(pricer(H200), roofline(H200), Overheads(launch_s=3e-6))
shares = st.floats(0.0, 1.0)
demands = st.lists(
    st.builds(Demand, shares, shares, kernels_per_s=st.floats(0.0, 1e6)), min_size=1, max_size=5
)  # fmt: skip


# -- the law -------------------------------------------------------------------------------------------------


@settings(fixed, max_examples=150)
@given(demands, st.floats(0.0, 1e-4))
def test_who_holds_the_device_slows_others_and_speeds_nobody_up(
    running: list[Demand], leaves_s: float
) -> None:
    free, held = max_min_rates(running), shared_reads(0.0, 1.0, leaves_s)(running)
    assert all(0.0 < rate <= 1.0 for rate in held)
    # Where all ask for more than there is, who is modest is served first: somebody may even gain.
    assert min(held) <= min(free) + 1e-12
    idle = [max(0.0, 1.0 - max(d.memory, d.compute) - leaves_s * d.kernels_per_s) for d in running]
    for shares_ in ([d.memory for d in running], [d.compute for d in running]):
        if len(running) > 1:
            assert sum(r * (s + i) for r, s, i in zip(held, shares_, idle, strict=True)) <= 1.0 + 1e-9


def test_what_only_waits_runs_in_turns_or_freely() -> None:
    waiting = [Demand(0.25, 0.0, kernels_per_s=1e5)] * 4
    assert shared_reads(0.0, 1.0)(waiting) == [1.0] * 4
    assert shared_reads(0.0, 1.0, 0.0)(waiting) == pytest.approx([0.25] * 4)
    # Half of the waiting is starts and ends of kernels: 0.25 + 0.375 each.
    assert shared_reads(0.0, 1.0, 3.75e-6)(waiting) == pytest.approx([0.25 / 0.625] * 4)
    # What fills the memory holds nothing besides.
    full = [Demand(1.0, 0.2, kernels_per_s=1e5)] * 2
    assert shared_reads(0.0, 1.0, 0.0)(full) == pytest.approx([0.5, 0.5])
    # Weights that are found in the cache save reading, not waiting.
    assert shared_reads(1.0, 1.0, 0.0)(waiting) == pytest.approx([0.25 / (0.25 / 4 + 0.75) / 4 / 0.25] * 4)


# -- programs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared weights", "own weights"])
def test_streams_take_what_the_memory_lets_them(kind: Any) -> None:
    """By hand: graphs bound by memory alone, four at a time."""
    case = Case(kind, 1, count=4, context=1024)
    free = replace(SIMULATED, overheads=Overheads())
    step = LARGE.instances(case).graph(0)
    ops = [op.at({"context": 1024}).bare for op in step.ops]
    memory_s = sum(roofline(H200)(op).memory_s for op in ops)
    alone_s = 1.25 * memory_s
    trace = predicted(case, {"": alone_s}, LARGE, free, shared_reads(0.0, 0.8))
    laws.enforce(trace)
    assert seconds_of(trace, case) == pytest.approx(4 * memory_s / 0.8)
    in_turns = predicted(case, {"": alone_s}, LARGE, free, shared_reads(0.0, 1.0, 0.0))
    assert seconds_of(in_turns, case) == pytest.approx(4 * alone_s)


def test_a_tile_and_a_step_begin_together_and_are_timed_apart() -> None:
    case = balanced(Case("beside", 1, side=64, method="conv"), {"main": 2e-4, "side": 5e-4})
    assert (case.steps, case.tiles) == (30, 12)
    alone = shared_reads(0.0, 1.0)
    trace = predicted(replace(case, tiles=0), {"main": 2e-4}, LARGE, SIMULATED, alone)
    assert seconds_of(trace, case, "main") == pytest.approx(2e-4)
    trace = predicted(case, {"main": 2e-4, "side": 5e-4}, LARGE, SIMULATED, shared_reads(0.0, 1.0, 0.0))
    begun = [min(s.start_s for s in trace.spans if s.stream == name) for name in ("main", "side")]
    assert begun[0] == pytest.approx(begun[1])
    # Each in turns with the other: as both have as much to do, twice as long.
    assert seconds_of(trace, case, "main") == pytest.approx(4e-4, rel=0.02)
    assert seconds_of(trace, case, "side") == pytest.approx(10e-4, rel=0.02)


@emulated
def test_cases_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention_cases, "STEPS", 1)
    monkeypatch.setattr(contention_cases, "MOST_STEPS", 2)
    cases = [replace(case, steps=1) for case in cases_of([1, 3], [9], [4], ["conv"], 1)]
    real = RealCard(1, CardStates(4096, "cpu"), lambda: FakeLayer(3))
    rows = measured(cases, SMALL, replace(SIMULATED, start=real.start), 1, lambda _: None)
    assert [(row.case.kind, row.case.count, row.stream) for row in rows] == [
        ("shared weights", 1, ""), ("shared weights", 3, ""), ("own weights", 3, ""),
        ("beside", 1, "main"), ("beside", 1, "side"),
    ]  # fmt: skip
    assert all(0.0 < row.least_s <= row.together_s <= row.most_s and row.alone_s > 0.0 for row in rows)


@emulated
@pytest.mark.parametrize("own", [False, True])
def test_instances_have_weights_of_one_model_or_their_own(own: bool) -> None:
    decoder = Decoder(SMALL.config, dtypes=F32, outside=False)
    found = []
    for count in (1, 3):
        setup: Any = _Setup(Instances(decoder, count, own))
        (state,) = CardStates(4096, "cpu").of(setup)
        assert isinstance(state, CardInstancesState)
        run = Card([state], FakeLayer(5)).start()

        def program(m: Any, made: Instances = setup.model) -> Any:
            yield m.wait(
                *(
                    m.launch(made.graph(i), sizes={"context": 9}, stream=made.stream(i))
                    for i in range(made.count)
                )
            )

        laws.enforce(run.run(program))
        found.append([one.buffers.x.clone() for one in state.states])
        matrices = {id(one.weights) for one in state.states}
        assert len(matrices) == (count if own else 1)
        assert state.key() == (0,) * count
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[1][0], found[1][1])


class _Setup:
    def __init__(self, model: Instances) -> None:
        self.model, self.mesh, self.holds = model, {"tensor": 1}, {"context": 9}


def test_instances_are_of_layers_alone() -> None:
    with pytest.raises(ValueError, match="layers alone"):
        Instances(Decoder(GQA), 2)


# -- fitting and judging -------------------------------------------------------------------------------------

TRUE = Constants(leaves_s=2e-6, reuse_s=8e-6, reach=0.9)


def rows_by(constants: Constants, streams: Sequence[int] = (1, 2, 4, 8)) -> list[Row]:
    """What the law itself says of cases whose graphs take longer alone than their floors."""
    rows = []
    for asked in cases_of(streams, [1024, 16384], [64, 256], ["flash_conv", "flash_fft"], 1):
        alone_s = {"main": 3e-4, "side": 2e-4} if asked.kind == "beside" else {"": 2.6e-4}
        case = balanced(asked, alone_s)
        for stream, seconds in alone_s.items():
            rows.append(Row(case, stream, seconds, 1.0, 1.0, 1.0, 3))
    found_s = together_s(rows, LARGE, SIMULATED, constants)
    return [replace(row, together_s=s, least_s=s, most_s=s) for row, s in zip(rows, found_s, strict=True)]


def test_constants_are_found_again_and_the_other_cases_judge_them() -> None:
    rows = rows_by(TRUE)
    parts = roles(rows, True)
    assert parts.count("alone") == 2
    assert min(parts.count("fit"), parts.count("judged")) > 5
    chosen = [row for row, role in zip(rows, parts, strict=True) if role == "fit"]
    assert {row.case for row in chosen}.isdisjoint(
        row.case for row, role in zip(rows, parts, strict=True) if role == "judged"
    )
    found = fit(chosen, LARGE, SIMULATED, 0.95)
    assert max(medians(judged(rows, LARGE, SIMULATED, found, True)).values()) < 1.0
    wrong = judged(rows, LARGE, SIMULATED, Constants(math.inf, 0.0, 1.0), True)
    assert medians(wrong)["all"] > 8.0
    # Alone, every law says the same, and what is alone is not judged.
    assert all(each.error_pct < 1e-6 for each in wrong if each.role == "alone")


BIRTH = dict.fromkeys(contention.BORN, "x")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = rows_by(TRUE, (1, 2))
    write(judged(rows, LARGE, SIMULATED, TRUE, False), LARGE, BIRTH, tmp_path / "rows.csv")
    assert read(tmp_path / "rows.csv") == (rows, 2, BIRTH)


@pytest.fixture
def measured_rows(tmp_path: Path) -> Path:
    """Rows of the catalogue's model, by the law with TRUE, and the folder of a profile."""
    profile = replace(PROFILE, device="h200-sxm")
    folder = tmp_path / "own"
    folder.mkdir()
    write_fitted(profile, folder)
    here = Device(pricer(H200, profile=profile), roofline(H200), Overheads(**{"launch_s": 1e-6}))
    models = Models(
        replace(contention.load_config(contention.MODELS / "llama-3.1-8b.json"), layers=2),
        contention.DTYPES,
        contention.CONVOLUTION,
    )
    rows = [
        Row(Case("shared weights", 1, count=count, context=context), "", 2.6e-4, 1.0, 1.0, 1.0, 3)
        for context in (1024, 4096)
        for count in (2, 4)
    ]
    found_s = together_s(rows, models, here, TRUE)
    rows = [replace(row, together_s=s) for row, s in zip(rows, found_s, strict=True)]
    write(judged(rows, models, here, TRUE, False), models, BIRTH, tmp_path / "rows.csv")
    return tmp_path


def ran(*arguments: str) -> Any:
    app = contention.typer.Typer()
    app.command()(contention.main)
    return CliRunner().invoke(app, [*arguments])


def test_the_program_writes_what_it_fitted_and_judges_by_it(measured_rows: Path) -> None:
    rows, folder = str(measured_rows / "rows.csv"), measured_rows / "own"
    given_ = ["--measured", rows, "--device", "h200-sxm", "--profile", str(folder)]
    before = ran(*given_)
    assert before.exit_code == 1
    assert "median error, shared weights:" in before.output
    fitted = ran(*given_, "--fit", "--out", str(measured_rows / "again.csv"))
    assert fitted.exit_code == 0, fitted.output
    document = yaml.safe_load((folder / "profile.yaml").read_text())
    shared = read_fitted(document, folder / "profile.yaml").contention
    assert shared is not None
    assert (shared.cases, shared.judged, shared.processor) == (2, 2, "x")
    assert shared.error_pct < 8.0
    # Judged by what stands in the profile now.
    assert ran(*given_).exit_code == 0


def test_bad_options_are_refused(measured_rows: Path) -> None:
    for option, text in (
        ("--streams", "0"),
        ("--streams", "two"),
        ("--methods", "magic"),
        ("--sides", "8192"),
    ):
        found = ran("--measured", str(measured_rows / "rows.csv"), option, text, "--device", "h200-sxm")
        assert isinstance(found.exception, InputError)
        assert option in str(found.exception)
    (measured_rows / "bad.csv").write_text("kind,batch\nbeside,1\n")
    with pytest.raises(InputError, match="no file of measured contention"):
        read(measured_rows / "bad.csv")


# -- streams -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_are_more_streams_than_torch_has() -> None:
    for _ in range(2):
        layer = CudaLayer()
        streams = [layer.stream() for _ in range(STREAMS_OF_TORCH + 10)]
        assert len({stream.cuda_stream for stream in streams}) == len(streams)
        total = torch.zeros(len(streams), device="cuda")
        torch.cuda.synchronize()
        for i, stream in enumerate(streams):
            add = partial(total[i].add_, i)
            layer.run(stream, add)
            layer.captured(stream, add)()
        layer.synchronize()
        assert total.tolist() == [2.0 * i for i in range(len(streams))]
