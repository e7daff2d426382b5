"""Facts of single functions that no run of a whole study tells apart: streams of draws, tickets, messages."""

import gc
import gzip
import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import pytest

from simcore.devices.price import launches_and_floor
from simcore.machine.machine import Flag, Machine, Program
from simcore.machine.trace import Trace, write_chrome_trace
from simcore.models.long_convolution import LongConvolution, Mixer
from simcore.ops.convolution import (
    Implementation,
    conv_carry,
    conv_prefill,
    rfft_flops,
    slot_shift,
    span_order,
)
from simcore.ops.op import DTYPE_BYTES, Floor, Op, Publication, Work, activation, prompts, put
from simcore.scenario import parse_scenario
from simcore.schedules.dynamic_batching import fitting
from simcore.sim.contention import off_by
from simcore.sim.garbage import no_collections
from simcore.sim.host import Cause, SimTicket
from simcore.sim.simulation import Simulation
from simcore.sim.tape import one_second, record
from simcore.studies.decode.cases import _rate_hits, label_of
from simcore.studies.decode.speculation import CountHits, LayerHits, RateHits
from simcore.studies.serving.certainty import needed, slowest
from simcore.studies.serving.laws import _before
from simcore.studies.serving.published import _same
from simcore.studies.tiling import study
from simcore.studies.tiling.cases import cases, model_of
from simcore.studies.tiling.figures import CaseResult
from simcore.studies.tiling.launches import _stretches
from simcore.studies.tiling.memory import memory
from simcore.studies.tiling.scenario import TilingScenario
from simcore.validate.timing.op_times import op_times
from simcore.workload.requests import END, REQUESTS, Request
from simcore.workload.streams import stream
from tests.programs import sends, toy_price, toys
from tests.test_tiling_study import document


def uniforms(seed: int, token: int, layers: int) -> list[float]:
    """One generator a token, whose draws go to the layers in order."""
    stream = np.random.Philox(
        key=np.array([seed, int.from_bytes(b"hits")], dtype=np.uint64),
        counter=np.array([0, token, 0, 0], dtype=np.uint64),
    )
    return [(raw >> 11) * 2.0**-53 for raw in stream.random_raw(layers).tolist()]


@pytest.mark.parametrize(("seed", "token"), [(0, 0), (7, 3), (2**64 - 1, 10**9)])
def test_hits_are_drawn_layer_by_layer_from_one_stream_a_token(seed: int, token: int) -> None:
    """Whatever blocks they are drawn in: no two layers share a draw."""
    drawn = uniforms(seed, token, 300)
    for rate in (0.0, 0.3, 0.71, 1.0):
        pattern = RateHits(rate, seed)
        assert [pattern(token, layer) for layer in range(300)] == [x < rate for x in drawn]
    rates = tuple(np.random.default_rng(1).random(300).tolist())
    by_layer = LayerHits(rates, seed)
    assert [by_layer(token, i) for i in range(300)] == [x < p for x, p in zip(drawn, rates, strict=True)]


# -- the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("polls", [False, True])
def test_a_message_is_noted_when_it_comes_and_when_it_is_taken(polls: bool) -> None:
    simulation = Simulation(toy_price)
    simulation.feed(0, "in", [(0.01, "a"), (0.03, "b")])
    got: list[object] = []

    def program(m: Machine) -> Program:
        if polls:
            yield m.wait(m.launch(toys("op", 5)))
            got.extend(m.poll("in"))
        else:
            got.append((yield m.recv("in")))
            got.append((yield m.recv("in")))

    trace = simulation.run(program)
    assert got == ["a", "b"]
    assert [message.arrived_s for message in trace.messages] == [0.01, 0.03]
    assert [message.received_s for message in trace.messages] == ([0.05, 0.05] if polls else [0.01, 0.03])


def test_a_signal_and_a_launch_ran_once_and_a_burst_as_often_as_it_says() -> None:
    ran: dict[str, int] = {}

    def program(m: Machine) -> Program:
        launch = m.launch(sends("first", 2, signal="there", put=5))
        burst = m.launch(toys("burst", 1), repeat=4)
        signal = m.signal("there")
        yield m.wait(launch, burst, signal)
        ran.update(launch=launch.ran, burst=burst.ran, signal=signal.ran)

    Simulation(toy_price).run(program)
    assert ran == {"launch": 1, "burst": 4, "signal": 1}


def test_a_trace_has_a_title_where_it_was_given_one(tmp_path: Path) -> None:
    trace = Simulation(toy_price).run(lambda m: iter([m.wait(m.launch(toys("op", 1, 2)))]))  # type: ignore[arg-type,return-value]
    for title, expected in (("", None), ("a case", {"title": "a case"})):
        left_out = write_chrome_trace(trace, tmp_path / "t.json.gz", title=title)
        written: dict[str, Any] = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
        assert left_out == 0
        assert written.get("otherData") == expected
        shown = [(e["name"], e["ts"], e["dur"]) for e in written["traceEvents"] if e["ph"] == "X"]
        assert shown == [("op0", 0.0, pytest.approx(1e4)), ("op1", pytest.approx(1e4), pytest.approx(2e4))]


def test_spans_beyond_the_limit_of_a_trace_are_counted(tmp_path: Path) -> None:
    def program(m: Machine) -> Program:
        yield m.wait(m.launch(toys("op", 1, 2, 3)))

    trace = Simulation(toy_price).run(program)
    # One name of a rank and one of a stream stand before them.
    for limit, shown in ((100, 3), (4, 2), (3, 1)):
        assert write_chrome_trace(trace, tmp_path / "t.json.gz", limit=limit) == 3 - shown
        events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"] == ["op0", "op1", "op2"][:shown]
        # All on the one rank and its one stream, and what was left out at the start.
        assert {(e["pid"], e["tid"]) for e in events} == {(0, 0)}
        assert [e["ts"] for e in events if e["ph"] == "i"] == [0][: 3 - shown]
        assert [e["name"] for e in events if e["ph"] == "i"] == [f"{3 - shown} events left out"][: 3 - shown]


def test_threads_of_a_trace_are_numbered_by_rank_and_name_of_their_streams(tmp_path: Path) -> None:
    def program(m: Machine) -> Program:
        yield m.wait(*(m.launch(toys(name, 1), stream=name) for name in ("one", "two", "other")))

    assert Trace().end_s == 0.0
    write_chrome_trace(Simulation(toy_price, mesh={"tensor": 2}).run(program), tmp_path / "t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    threads = [(e["tid"], e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    names = "one", "other", "two"
    assert threads == [(3 * rank + i, rank, name) for rank in range(2) for i, name in enumerate(names)]
    assert {(e["tid"], e["pid"], e["args"]["graph"]) for e in events if e["ph"] == "X"} == set(threads)


def test_all_launches_are_measured_where_none_is_said_to_warm_up() -> None:
    def program(m: Machine) -> Program:
        for _ in range(3):
            yield m.wait(m.launch(toys("op", 1)))

    trace = Simulation(toy_price).run(program)
    for warmup, counted in ((None, 3), (1, 2)):
        if warmup is not None:
            trace.warmup_launches = warmup
        (found,) = op_times([trace]).values()
        assert found == [0.01] * counted


def test_what_the_second_of_two_graphs_publishes_leaves_it_where_it_did() -> None:
    first, second = toys("first", 1, 2), toys("second", 3, 4, 5)
    signal = Publication("sent", 1, put("hop", elements=1, axis="tensor", dtype="bf16"))
    both = first + replace(second, publishes=(signal,))
    assert both.ops[both.publishes[0].op] is second.ops[1]
    assert (replace(first, publishes=(signal,)) + second).publishes == (signal,)


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_random_numbers_are_drawn_by_seeds_of_64_bits(wrong: int) -> None:
    for seed, replica in ((wrong, 0), (0, wrong)):
        with pytest.raises(ValueError, match="from 0 to 2"):
            stream(seed, replica, "arrivals")
    assert stream(2**64 - 1, 0, "arrivals").random() != stream(0, 0, "arrivals").random()


def test_rows_stand_in_a_trace_with_the_names_that_they_have(tmp_path: Path) -> None:
    name = 'a "quoted" größe'

    def program(m: Machine) -> Program:
        for _ in range(3):
            yield m.wait(m.launch(toys(name, 1), repeat=2))

    trace = Simulation(toy_price, rows=True).run(program)
    # Two names of streams and threads stand before them.
    for limit, shown in ((100, 3), (2, 2), (0, 0)):
        assert write_chrome_trace(trace, tmp_path / "t.json.gz", limit=limit) == 3 - shown
        events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
        rows = [event for event in events if event["ph"] == "X"]
        assert [(e["name"], e["cat"], e["args"]) for e in rows] == [
            (name, name, {"launch": i, "replays": 2}) for i in range(shown)
        ]
        assert [e["ts"] for e in rows] == pytest.approx([2e4 * i for i in range(shown)])
        assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "main"][: 2 * shown]
        assert [e["name"] for e in events if e["ph"] == "i"] == [f"{3 - shown} events left out"][: 3 - shown]


@pytest.mark.parametrize(("dtype", "number"), [("bf16", 2), ("fp32", 4)])
def test_a_put_sends_what_it_reads_and_computes_nothing(dtype: str, number: int) -> None:
    work = put("hop", elements=12, axis="tensor", dtype=dtype).work
    assert (work.flops, work.hbm_bytes, work.wire_bytes) == (0.0, 12 * number, 12 * number)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("cached", [0, 1, 30])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_prompts_of_one_length_are_counted_by_their_pairs(tokens: int, cached: int, count: int) -> None:
    """The i-th token of a prompt looks at those cached and at i of its own."""
    pairs = sum(cached + i for i in range(1, tokens + 1))
    assert prompts(count * tokens, count * (cached + tokens), count * pairs) == count


def test_a_published_figure_is_compared_at_its_own_axes_alone() -> None:
    """What it does not say fits all; what it says fits no other value, nor a case without one."""
    assert _same(None, 20.0)
    assert _same(None, None)
    assert _same(20.0, 20.0 * (1.0 + 1e-12))
    assert not _same(20.0, 21.0)
    assert not _same(20.0, None)


def test_without_a_number_of_processors_blocks_do_not_run_in_waves() -> None:
    """Of 3 blocks on 2 processors, in two waves, a quarter of the processors' time is idle."""
    op = Op("split", "split", (("blocks", 3),), "bf16", lambda op: Work(0.0, 0.0))
    assert launches_and_floor(op, lambda op: Floor(0.0, 3.0, 0.0)) == (1, 3.0)
    assert launches_and_floor(op, lambda op: Floor(0.0, 3.0, 0.0), 2) == (1, 4.0)


# -- long convolutions -----------------------------------------------------------------------------------


def test_changing_names_moves_nothing() -> None:
    work = slot_shift(layers=3).work
    assert (work.flops, work.hbm_bytes, work.wire_bytes) == (0.0, 0.0, 0.0)


def test_every_way_of_tiling_has_the_model_that_it_asks_for() -> None:
    ways: list[dict[str, Any]] = [
        {"kind": "lazy"},
        {"kind": "generic"},
        {"kind": "generic", "mixer": "linear_attention", "rank": 5},
        {"kind": "relaxed"},
    ]
    scenario = parse_scenario(document(strategies=ways), "tiny")
    assert isinstance(scenario, TilingScenario)
    models = [model_of(case, (), one_second) for case in cases(scenario)]
    assert [model.mixer for model in models] == [
        "convolution",
        "convolution",
        "linear_attention",
        "data_dependent_convolution",
    ]
    assert models[2].rank == 5
    for model in models:
        assert (model.layers, model.channels, model.tokens, model.batch) == (2, 64, 64, 2)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", ["conv", "flash_conv", "fft", "flash_fft"])
def test_memory_of_tiles_is_counted_buffer_by_buffer(
    name: Implementation, parallel: bool, dtype: str
) -> None:
    """3 layers of 8 channels, 2 sequences, 64 positions: sides 1 to 32, each by the same implementation."""
    layers, channels, batch, number = 3, 8, 2, {"fp16": 2, "fp32": 4}[dtype]
    sides = [1, 2, 4, 8, 16, 32]
    model = LongConvolution(
        layers, channels, 64, batch=batch, dtype=dtype, tiles=tuple((side, name) for side in sides)
    )
    cached, passing = 0, [0]
    for side in sides:
        lanes = (layers if parallel else 1) * batch * channels
        if name == "conv":
            # Filters twice as long as the side; inputs with zeros on both sides, and what comes out.
            cached += layers * channels * 2 * side * number
            passing.append(lanes * ((side - 1) + side + (side - 1) + side) * number)
        if name in ("fft", "flash_fft"):
            # Spectra of filters of 2 U taps: U + 1 complex numbers of two fp32.
            cached += layers * channels * (side + 1) * 2 * 4
        if name == "fft":
            passing.append(2 * lanes * (side + 1) * 2 * 4)
    found = memory(model, fractal=True, parallel=parallel)
    assert (found.cached, found.temporaries) == (cached, max(passing))
    assert found.activations == (layers + 1) * batch * 64 * channels * number
    assert found.filters == layers * 64 * channels * number
    # From side 8 on layer by layer: what all layers take at once of the sides before, or one of the last.
    later = memory(model, fractal=True, parallel=parallel, sequential_from=8)
    by_side = dict(zip(sides, passing[1:], strict=False))
    shared = layers if parallel else 1
    expected = [v if side < 8 else v / shared for side, v in by_side.items()]
    assert later.temporaries == max([0.0, *expected])
    # Without tiles nothing of theirs is there.
    plain = memory(model, fractal=False)
    assert (plain.cached, plain.temporaries) == (0.0, 0.0)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 4), (64, 64), (100, 1), (1, 1), (2, 1)])
def test_a_stretch_moves_each_buffer_as_often_as_its_kernels_do(inputs: int, outputs: int) -> None:
    """2 sequences of 3 channels in fp32: inputs, sums, taps, three spectra, and the whole inverse again."""
    batch, channels, number = 2, 3, 4
    lanes, order = batch * channels, span_order(inputs, outputs)
    assert order >= inputs + outputs - 1 > order // 2 or order == 2
    complexes = (order // 2 + 1) * 2 * number
    for make, taps in ((conv_prefill, outputs), (conv_carry, inputs + outputs - 1)):
        op = make(batch=batch, channels=channels, inputs=inputs, outputs=outputs, dtype="fp32")
        reals = lanes * inputs + 2 * lanes * outputs + channels * taps
        # Written and read: spectra of inputs and of their products, of each lane; of taps, of each channel.
        spectra = 2 * lanes + 2 * lanes + 2 * channels
        assert op.work.hbm_bytes == reals * number + spectra * complexes + lanes * order * number
        transforms = 2 * lanes + channels
        products = 6 * lanes * (order // 2 + 1)
        assert op.work.flops == transforms * rfft_flops(order) + products


@pytest.mark.parametrize("prompt", [-1, 8, 9])
def test_a_model_has_a_position_to_generate(prompt: int) -> None:
    with pytest.raises(ValueError, match=f"prompt is {prompt}; 0 to 7 of 8 tokens"):
        LongConvolution(1, 4, 8, prompt=prompt)
    assert LongConvolution(1, 4, 8, prompt=7).generated == 1


@pytest.mark.parametrize("block", ["mlp", "gate"])
def test_weights_and_filters_are_those_of_the_mixer(block: Literal["mlp", "gate"]) -> None:
    """3 layers of 8 channels in fp16, 2 sequences of 64 positions. Queries and keys of linear attention have
    5 numbers each; a filter that depends on data is projected, and each sequence has its own."""
    plain = LongConvolution(3, 8, 64, batch=2, block=block, rank=5)
    own = 8 * 16 + 16 * 8 if block == "mlp" else 8 * 8
    found = {
        mixer: (model.weight_bytes, model.filter_bytes)
        for mixer in get_args(Mixer)
        for model in (replace(plain, mixer=mixer),)
    }
    assert found == {
        "convolution": (2 * 3 * own, 2 * 3 * 64 * 8),
        "data_dependent_convolution": (2 * 3 * (own + 8 * 8), 2 * 3 * 2 * 64 * 8),
        "linear_attention": (2 * 3 * (own + 8 * 5 + 8 * 5), 0),
    }


def test_graphs_that_a_model_has_made_are_no_part_of_it() -> None:
    used, fresh = LongConvolution(2, 8, 64), LongConvolution(2, 8, 64)
    (tile,) = used.tile(4, 4).ops
    assert (tile["layers"], len(used.tile(4, 4, sequential=True).ops)) == (2, 2)
    assert used == fresh
    assert hash(used) == hash(fresh)
    (wider,) = replace(used, channels=16).tile(4, 4).ops
    assert wider["channels"] == 16
    # Of one sequence from its first position on.
    assert (wider["batch"], used.generated) == (1, 64)


def test_a_case_is_called_by_all_that_tells_it_from_others() -> None:
    names = [
        label_of(kind, ranks, groups, chunk=chunk, overlap=overlap)
        for kind, ranks, groups in (("alspec", 1, 2), ("alspec", 4, 2), ("alspec_pipelined", 1, 5))
        for chunk in (None, 64, 128)
        for overlap in (True, False)
    ]
    assert len({*names}) == len(names)
    assert "ALSpec, 4+4 devices, chunk 64, last layer not overlapped" in names
    tensor_parallel = [label_of("tensor_parallel", ranks, 1) for ranks in (1, 2, 8)]
    assert tensor_parallel == [f"tensor parallel, {n} device{'s' * (n > 1)}" for n in (1, 2, 8)]


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_counts_four_operations_and_a_product_with_its_gate(gated: bool) -> None:
    """Of 3 tokens of 5 columns in bf16: inputs read (two where one is the gate), one output written."""
    work = activation(tokens=3, width=5, gated=gated, dtype="bf16").work
    assert work.flops == 15 * (5 if gated else 4)
    assert work.hbm_bytes == 15 * (3 if gated else 2) * 2


# -- formats ---------------------------------------------------------------------------------------------


def test_an_element_takes_the_bytes_that_its_name_says() -> None:
    """Floating point and integers as they are called; block floating point shares 8 bits among 16 numbers;
    fp8 by blocks has a scale in fp32 for 128 by 128."""
    by_name = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
    by_block = {"bfp8": (16 * 8 + 8) / 16, "bfp4": (16 * 4 + 8) / 16, "fp8_b128": 8 + 32 / 128**2}
    for name, bits in {**by_name, **by_block}.items():
        assert DTYPE_BYTES[name] == bits / 8, name
    assert {name for name in DTYPE_BYTES if not name.startswith("w")} == {*by_name, *by_block}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zero_point", [False, True])
def test_weights_in_groups_take_what_their_arrays_take(bits: int, group: int, zero_point: bool) -> None:
    """[512 rows, 384 columns], packed into bytes; scales in fp16; zero points packed as the weights are."""
    rows, columns = 512, 384
    weights = np.empty(rows * columns * bits // 8, dtype=np.uint8)
    scales = np.empty((rows // group, columns), dtype=np.float16)
    zeros = np.empty(rows // group * columns * bits // 8 if zero_point else 0, dtype=np.uint8)
    stored = weights.nbytes + scales.nbytes + zeros.nbytes
    name = f"w{bits}a16_g{group}{'_zp' if zero_point else ''}"
    assert DTYPE_BYTES[name] * rows * columns == stored
    # A scale for a whole column is next to nothing.
    assert DTYPE_BYTES[f"w{bits}a16"] * rows * columns == weights.nbytes


# -- tickets and words -----------------------------------------------------------------------------------


def test_what_has_ended_is_not_stopped_and_what_cannot_stop_goes_on() -> None:
    stopped: list[str] = []
    ticket = SimTicket(Simulation(toy_price).env)
    ticket.stop()
    ticket.on_stop = lambda: stopped.append("now")
    ticket.stop()
    assert stopped == ["now"]
    ticket.end = Cause(None, 1.0)
    ticket.stop()
    assert stopped == ["now"]


@pytest.mark.parametrize("count", [2, 99, 100, 102, 150, 199, 200, 202, 250, 399, 400])
def test_the_requests_beyond_a_percentile_are_counted_by_its_rank(count: int) -> None:
    """Of 0, 1, ... n - 1 those above their p99."""
    values = np.arange(count)
    beyond = int((values > np.percentile(values, 99)).sum())
    few = f"the slowest {beyond}" if beyond > 1 else "the slowest one"
    assert slowest(SimpleNamespace(measured=(count,))) == f"{few} of {count:,} requests"  # type: ignore[arg-type]


def test_on_a_tape_the_first_of_two_parts_leaves_in_the_middle() -> None:
    part = sends("first", 1, signal="there", put=0)
    left_s: list[float] = []

    def program(m: Machine) -> Program:
        yield m.wait(m.signal("there"))
        left_s.append(m.now())

    def with_launch(m: Machine) -> Program:
        m.launch(part)
        yield from program(m)

    Simulation(one_second).run(with_launch)
    # Half a second of the op, then a second of the put.
    assert left_s == [1.5]


def test_a_flag_that_nobody_set_is_zero() -> None:
    assert Simulation(toy_price).value_of(Flag("never", 0)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_stretches_are_the_values_again_and_as_few_as_can_be(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = np.repeat(random.integers(-2, 3, 30), random.integers(1, 5, 30))
    values = np.cumsum(np.concatenate(([1000], steps)))
    pieces = list(_stretches(values))
    again = [int(values[start]) + i * by for start, count, by in pieces for i in range(count)]
    assert again == values.tolist()
    # Greedy from the left is fewest: the next value is never on the line of the stretch before.
    for (start, count, by), (after, _, _) in pairwise(pieces):
        assert start + count == after
        assert count == 1 or values[after] != values[after - 1] + by


def test_the_ratio_of_measured_runs_is_from_the_least_over_the_largest_on() -> None:
    def measured(*seconds: float) -> CaseResult:
        (case, *_) = cases(parse_scenario(document(tokens=64), "t"))  # type: ignore[arg-type]
        runs: Any = [{"total_s": (each, "s")} for each in seconds]
        return CaseResult(case, {}, {}, runs, [{}], 0.0, {}, {}, measured=True, stays=False)  # type: ignore[arg-type]

    row = study._ratio(measured(6.0, 5.0, 8.0), measured(2.0, 0.5, 4.0), "total_s", "speedup", "runs")
    assert (row.value, row.low, row.high) == (3.0, 5.0 / 4.0, 8.0 / 0.5)


@pytest.mark.parametrize("draw", ["floor", "random"])
def test_hits_of_a_paper_name_their_task_and_threshold(draw: str) -> None:
    row: Any = SimpleNamespace(task="gsm8k-cot", threshold=0.05)
    assert _rate_hits(0.5, draw, 8, [0], row).text.endswith(", from gsm8k-cot at threshold 0.05")
    assert "from" not in _rate_hits(0.5, draw, 8, [0], None).text


@pytest.mark.parametrize(("percent", "enough"), [(99, 1000), (90, 100), (97, 334)])
def test_ten_requests_beyond_a_percentile_are_enough(percent: int, enough: int) -> None:
    found: Any = [SimpleNamespace(measured=(count, 2 * count)) for count in (enough - 1, enough)]
    assert slowest(found[0], percent).startswith("the slowest")
    assert slowest(found[1], percent) == ""


def test_a_thousandth_beyond_takes_ten_thousand_requests() -> None:
    """Though 100 - 99.9 is a little less than a tenth."""
    assert needed(99.9) == 10_000


def test_spans_and_rows_share_the_limit_of_a_trace(tmp_path: Path) -> None:
    """What publishes is no row: three spans beside two rows, two names, and two of the rows' streams."""

    def program(m: Machine) -> Program:
        m.launch(sends("s", 1, signal="go"))
        for _ in range(2):
            yield m.wait(m.launch(toys("r", 1), repeat=2))

    trace = Simulation(toy_price, rows=True).run(program)
    written = tmp_path / "t.json.gz"
    assert write_chrome_trace(trace, written, limit=100) == 0
    every = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    spans = sum(event["ph"] == "X" and "span" not in event for event in every) - 2
    names = sum(event["ph"] == "M" for event in every) - 2
    assert spans > 0
    assert write_chrome_trace(trace, written, limit=names + spans + 1) == 1


def test_a_batch_ends_before_the_first_request_that_does_not_fit() -> None:
    """Also where a later, shorter one would fit."""
    asked = [(10, 5), (10, 5), (100, 5), (10, 5)]
    line = [Request(i, 0.0, prompt, answer, answer) for i, (prompt, answer) in enumerate(asked)]
    assert fitting(line, 8, 60) == 2
    assert fitting(line[:2] + line[3:], 8, 60) == 3
    assert fitting(line[:2] + line[3:], 2, 60) == 2


def test_a_law_that_is_off_changes_only_those_that_are_slowed() -> None:
    law = off_by(lambda running: [1.0, 0.5, 0.9], 0.8)
    assert law([]) == pytest.approx([1.0, 0.4, 0.72])
    faster = off_by(lambda running: [1.0, 0.5, 0.9], 1.25)
    assert faster([]) == pytest.approx([1.0, 0.625, 1.0])


def test_counted_hits_end_with_the_last_layer() -> None:
    """And a shift moves them to earlier ones."""
    assert [CountHits(1, 4)(0, layer) for layer in range(4)] == [False, False, False, True]
    assert [CountHits(1, 4, 1)(0, layer) for layer in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("at_s", [1e-3, 1.0, 1e6])
def test_a_law_knows_what_comes_before_from_rounding(at_s: float) -> None:
    early = _before(np.array([at_s * (1.0 - 1e-8), at_s * (1.0 - 1e-10), np.nan]), np.array([at_s] * 3))
    assert early.tolist() == [True, False, False]


def test_a_tape_s_inbox_ends_with_its_last_request() -> None:
    came: list[float] = []

    def program(m: Machine) -> Program:
        while (yield m.recv(REQUESTS)) is not END:
            came.append(m.now())

    record(program, inbox=[Request(i, at_s, 5, 1, 1) for i, at_s in enumerate((0.0, 5.0, 9.0))])
    assert came == [0.0, 5.0, 9.0]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_is_collected_after_a_block_without_as_before_it(on: bool, fails: bool) -> None:
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with suppress(ValueError), no_collections():
            assert not gc.isenabled()
            if fails:
                raise ValueError
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()
