"""What each schedule launches, against tapes that were reviewed line by line, and op counts against formulas.

A tape that changes on purpose is written anew by  SIMCORE_UPDATE_TAPES=1 python -m pytest tests/test_tapes.py
and read again before it is committed.
"""

import re
from collections.abc import Callable, Sequence
from inspect import isfunction, signature
from pathlib import Path
from random import Random
from typing import Any

import pytest

from simcore.machine.machine import Machine, Program
from simcore.models.decoder import STYLES, Decoder, Style
from simcore.models.decoder_config import DecoderConfig
from simcore.models.long_convolution import LongConvolution
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph, norm
from simcore.schedules.alspec import alspec
from simcore.schedules.alspec_pipelined import alspec_pipelined
from simcore.schedules.concurrent_instances import concurrent_instances
from simcore.schedules.continuous_batching import continuous_batching
from simcore.schedules.dynamic_batching import dynamic_batching
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.generic_tiling import generic_tiling
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.lazy import lazy
from simcore.schedules.relaxed_tiling import relaxed_tiling
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.sim.host import SimMachine
from simcore.sim.tape import Tape, _TapeMachine, folded, record
from simcore.workload.requests import Journal, Request
from tests.as_written import are_as_written
from tests.thorough import slow

TAPES = Path(__file__).parent / "tapes"


def decoder(layers: int = 2, ranks: int = 1, style: Style = "all_reduce") -> Decoder:
    config = DecoderConfig("toy", 16, 32, layers, 4, 2, 4, 64, tied_embeddings=True)
    return Decoder(config, ranks=ranks, style=style)


def tensor_parallel_tape(ranks: int, style: Style, layers: int = 2, tokens: int = 1) -> Tape:
    model = decoder(layers, ranks, style)
    return record(lambda m: tensor_parallel(m, model, tokens=tokens, context=5), mesh={"tensor": ranks})


def mixed(token: int, layer: int) -> bool:
    return (token + layer) % 2 == 0


def alspec_tape(ranks: int, overlap: bool, layers: int = 2, tokens: int = 2) -> Tape:
    model = decoder(layers, ranks)
    return record(
        lambda m: alspec(m, model, tokens=tokens, context=5, overlap_last_layer=overlap),
        mesh={"group": 2, "tensor": ranks},
        outcomes={"hit": mixed},
    )


def pipelined_tape(
    groups: int, hits: Callable[[int, int], bool] = mixed, layers: int = 2, tokens: int = 2
) -> Tape:
    model = decoder(layers)
    return record(
        lambda m: alspec_pipelined(m, model, tokens=tokens, context=5),
        mesh={"group": groups},
        outcomes={"hit": hits},
    )


STAGGERED = ((0.0, 4), (20.0, 2), (60.0, 3), (60.0, 1))
EQUAL = ((0.0, 3), (20.0, 3), (60.0, 3), (60.0, 3))
# The second of three leaves a hole between the others.
HOLE = ((0.0, 5), (0.0, 2), (0.0, 5), (60.0, 1))


def serving_tape(
    schedule: Callable[..., Program], wanted: Sequence[tuple[float, int]] = STAGGERED, **settings: Any
) -> Tape:
    """Four requests, (when they come, tokens of their answer), on a model of a layer; an op takes a second,
    so a decode step takes 14."""
    model = ServedDecoder(DecoderConfig("toy", 16, 32, 1, 4, 2, 4, 64, tied_embeddings=True))
    requests = [Request(i, at_s, 5 + i, tokens, 5) for i, (at_s, tokens) in enumerate(wanted)]
    return record(lambda m: schedule(m, model, Journal(), **settings), inbox=requests)


def tiling_tape(schedule: Callable[..., Program], model: LongConvolution, **settings: Any) -> Tape:
    return record(lambda m: schedule(m, model, [], **settings))


# Seven positions clip the last tile of each side but the first; the prompt's two come before five more.
SEVEN = LongConvolution(2, 4, 7)
PROMPTED = LongConvolution(2, 4, 7, prompt=2, block="gate")
TILES = LongConvolution(2, 4, 8, tiles=((1, "conv"), (2, "flash_conv"), (4, "fft")))

CASES: dict[str, Callable[[], Tape]] = {
    "lazy": lambda: tiling_tape(lazy, PROMPTED),
    "lazy_by_layers": lambda: tiling_tape(lazy, SEVEN, parallel=False),
    "eager": lambda: tiling_tape(eager, PROMPTED),
    "eager_by_layers": lambda: tiling_tape(eager, SEVEN, parallel=False),
    "fractal_tiling": lambda: tiling_tape(fractal_tiling, TILES),
    "fractal_tiling_by_layers": lambda: tiling_tape(fractal_tiling, SEVEN, parallel=False),
    "fractal_tiling_half_stored": lambda: tiling_tape(
        fractal_tiling, PROMPTED, half_storage=True, sequential_from=2
    ),
    "generic_tiling": lambda: tiling_tape(generic_tiling, SEVEN),
    "relaxed_tiling": lambda: tiling_tape(
        relaxed_tiling, LongConvolution(2, 4, 8, mixer="data_dependent_convolution")
    ),
    "continuous_batching": lambda: serving_tape(
        continuous_batching, blocks=6, block_tokens=4, token_budget=8
    ),
    "temporal_fusion": lambda: serving_tape(temporal_fusion, HOLE, slots=3, slot_tokens=13),
    "temporal_fusion_no_shuffle": lambda: serving_tape(
        temporal_fusion, HOLE, slots=3, slot_tokens=13, shuffle=False
    ),
    "dynamic_batching": lambda: serving_tape(dynamic_batching, window_s=30.0, max_batch=2, capacity=40),
    "concurrent_instances": lambda: serving_tape(concurrent_instances, max_instances=2),
    "iteration_batching": lambda: serving_tape(iteration_batching, EQUAL, max_batch=2, slot_tokens=13),
    **{
        f"tensor_parallel_{ranks}_{style}": lambda ranks=ranks, style=style: tensor_parallel_tape(
            ranks, style
        )  # type: ignore[misc]
        for ranks in (1, 2)
        for style in STYLES
    },
    **{
        f"alspec_2x{ranks}_{'overlap' if overlap else 'plain'}": lambda ranks=ranks, overlap=overlap: (
            alspec_tape(  # type: ignore[misc]
                ranks, overlap
            )
        )
        for ranks in (1, 2)
        for overlap in (True, False)
    },
    "alspec_pipelined_3": lambda: pipelined_tape(3),
    "alspec_pipelined_2_no_hits": lambda: pipelined_tape(2, lambda token, layer: False, layers=3, tokens=2),
}


@pytest.mark.parametrize("name", CASES)
def test_tape_is_the_reviewed_one(name: str) -> None:
    are_as_written(TAPES / f"{name}.txt", CASES[name]().lines)


def test_every_tape_has_its_case() -> None:
    assert {path.stem for path in TAPES.glob("*.txt")} == set(CASES)


# -- counts --------------------------------------------------------------------------------------

# Ops of a layer around its attention, of the embedding and of the head, by style, on 1 and on more ranks.
BEFORE = {"all_reduce": (4, 4), "scatter_gather": (4, 5), "fused_gather": (4, 5)}
AFTER = {"all_reduce": (7, 9), "scatter_gather": (8, 11), "fused_gather": (8, 10)}
HEAD = {"all_reduce": (3, 4), "scatter_gather": (3, 4), "fused_gather": (3, 4)}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_tensor_parallel_launches_a_graph_a_token(style: Style, ranks: int, layers: int, tokens: int) -> None:
    tape = tensor_parallel_tape(ranks, style, layers, tokens)
    i = int(ranks > 1)
    per_token = 1 + layers * (BEFORE[style][i] + 1 + AFTER[style][i]) + HEAD[style][i]
    assert [tape.op_count(rank) for rank in range(ranks)] == [tokens * per_token] * ranks
    assert len(tape.lines) == tokens * ranks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (2, 3), (5, 2)])
def test_alspec_launches_the_same_on_all_ranks(overlap: bool, ranks: int, layers: int, tokens: int) -> None:
    """A layer: exchange, attention (and its verification over the ranks of a group), receive."""
    tape = alspec_tape(ranks, overlap, layers, tokens)
    i = int(ranks > 1)
    rest = BEFORE["all_reduce"][i] + AFTER["all_reduce"][i]
    per_token = 1 + layers * (rest + 3 + i) + HEAD["all_reduce"][i] + (not overlap)
    assert [tape.op_count(rank) for rank in range(2 * ranks)] == [tokens * per_token] * 2 * ranks
    launches = tokens * (1 + 3 * layers + (layers - 1) + (1 if overlap else 3))
    assert len(tape.lines) == 2 * ranks * launches


def by_graph(tape: Tape) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, graph, _ in tape.graphs:
        counts[graph.name] = counts.get(graph.name, 0) + 1
    return counts


@pytest.mark.parametrize(("layers", "tokens", "groups"), [(1, 1, 2), (2, 3, 3), (5, 2, 4)])
def test_a_ring_of_hits_attends_every_layer_once(layers: int, tokens: int, groups: int) -> None:
    tape = pipelined_tape(groups, lambda *_: True, layers, tokens)
    assert by_graph(tape) == {
        name: n
        for name, n in {
            "embed+before": tokens,
            "speculate_ahead": tokens * layers,
            "receive": tokens * layers,
            "after+before": tokens * (layers - 1),
            "after+head": tokens,
        }.items()
        if n
    }


# -- the tape itself -----------------------------------------------------------------------------


def test_a_tape_shows_all_that_a_launch_says() -> None:
    graph = Graph("g", decoder().attend.ops)

    def program(m: Machine) -> Program:
        flag, theirs = m.flag("f"), m.flag("f", rank=0)
        first = m.launch(Graph("empty", ()))
        m.launch(
            graph,
            stream="side",
            after=[first, m.signal("never", rank=0)],
            sizes={"context": 7, "not read": 1},
            repeat=3,
            when=flag.above(2),
            sets={theirs: flag.zero(), flag: 1},
        )
        yield m.wait()

    # The device of rank 1 never gets past its condition, so that it waits for no signal.
    assert record(program, mesh={"tensor": 2}).lines[2:] == [
        "rank 1  main  empty: -",
        "rank 1  side  g: attention | after empty, signal never of rank 0 | context 7 | repeat 3"
        " | when f > 2 | sets rank 0 f = f == 0, f = 1",
    ]


def test_a_signal_of_no_named_rank_is_its_own() -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", ()), after=[m.signal("s")], when=m.flag("f").nonzero())
        yield m.wait()

    assert record(program).lines == ["rank 0  main  g: - | after signal s of rank 0 | when f != 0"]


def unfolded(text: str) -> list[str]:
    """The names of a folded text, one by one."""
    return [
        name
        for times, several, one in re.findall(r"(\d+) x \(([^)]*)\)|(\S+)", text)
        for name in ([one] if one else int(times) * several.split())
    ]


@slow
def test_a_folded_text_says_each_op_in_order() -> None:
    """Of random sequences of few ops, nearly all of which repeat something."""
    random = Random(0)
    toys = [norm(name, tokens=1, hidden=1, dtype="bf16") for name in "abc"]
    for _ in range(2000):
        sequence = [random.choice(toys[: random.randint(1, 3)]) for _ in range(random.randint(1, 6))]
        sequence = sequence * random.randint(1, 5) + random.choices(toys, k=random.randint(0, 3))
        assert unfolded(folded(sequence)) == [op.name for op in sequence]


def test_four_equal_layers_are_folded_and_three_are_not() -> None:
    a, b, c = (norm(name, tokens=1, hidden=1, dtype="bf16") for name in "abc")
    assert folded([a] * 4) == "4 x (a)"
    assert folded([c, *[a, b] * 4]) == "c 4 x (a b)"
    assert folded([c, *[a, b] * 5, a]) == "c 5 x (a b) a"
    assert folded([a, b] * 3) == "a b a b a b"
    assert folded([a, b, a, c, a, c, a, b]) == "a b a c a c a b"


def test_a_single_request_is_served_to_its_end() -> None:
    """Its prompt's pass and then a step for each token but the first."""
    tape = serving_tape(dynamic_batching, [(3.0, 4)], window_s=1.0, max_batch=2, capacity=40)
    assert sum(repeat for _, _, repeat in tape.graphs) == 4


@pytest.mark.parametrize("machine", [SimMachine, _TapeMachine])
def test_what_a_program_leaves_out_is_the_same_on_every_machine(machine: type) -> None:
    verbs = [name for name, verb in vars(Machine).items() if isfunction(verb) and not name.startswith("_")]
    assert len(verbs) > 10
    for verb in verbs:
        said = signature(getattr(Machine, verb)).parameters
        here = signature(getattr(machine, verb)).parameters
        assert {name: one.default for name, one in here.items()} == {
            name: one.default for name, one in said.items()
        }


def test_ops_of_a_rank_are_counted_once_a_replay() -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(Graph("g", decoder().attend.ops * 2), sizes={"context": 1}, repeat=3 + m.rank)
        yield m.wait(ticket)

    tape = record(program, mesh={"group": 2})
    assert [tape.op_count(rank) for rank in (0, 1, 2)] == [6, 8, 0]


def test_of_a_server_s_tensor_parallel_ranks_the_first_runs() -> None:
    def program(m: Machine) -> Program:
        ran.append(m.rank)
        yield m.wait()

    for inbox, ranks in (((), [0, 1, 2, 3]), ([Request(0, 0.0, 5, 1, 1)], [0, 2])):
        ran: list[int] = []
        record(program, mesh={"group": 2, "tensor": 2}, inbox=inbox)
        assert ran == ranks
