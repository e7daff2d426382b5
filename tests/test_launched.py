"""What the simulated machine launches is what a real one does, and is compiled before a card is asked."""

from typing import Any

import pytest

from simcore.assembly import Place, assemble
from simcore.input.files import InputError
from simcore.kernels.table import TABLE
from simcore.ops.op import Op
from simcore.scenario import parse_scenario
from simcore.validate.machines.cuts import units
from simcore.validate.machines.here import Real
from simcore.validate.timing import compile_ahead
from simcore.validate.timing.op_times import op_times, plain
from simcore.validate.timing.precompile import compile_for, launched
from tests.test_card_real import LAYER, LINEAR
from tests.thorough import slow

TILES: dict[str, Any] = {
    "name": "tiles",
    "study": "tiling",
    "device": "cpu",
    "profile": "none",
    "model": {"kind": "long_convolution", "layers": 2, "channels": 8, "block": "mlp"},
    "tokens": 37,
    "dtype": "fp32",
    "strategies": [{"kind": "lazy"}, {"kind": "eager"}, {"kind": "fractal", "tiles": ["conv", "flash_fft"]}],
}
AT_ONCE = {**TILES, "model": {**TILES["model"], "step": "one_launch", "block": "gate"}}
SHAPES = {**LINEAR, "profile": "none", "decay": [False, True], "length": [32, 33]}


def quiet(doing: str, done: int, total: int) -> None:
    del doing, done, total


@pytest.mark.parametrize(
    "document", [TILES, AT_ONCE, LAYER, SHAPES], ids=["tiling", "tiling in one launch", "decode", "operators"]
)
@slow
def test_the_ops_of_a_scenario_are_those_that_a_real_machine_runs(document: dict[str, Any]) -> None:
    scenario, real = parse_scenario(document, "x"), Real()
    assemble(scenario, "x", Place("cpu", real.start)).study.run(quiet)
    ran = {plain(unit) for op in op_times(real.traces) for unit in units(op)}
    found = launched(scenario, "x", quiet)
    assert {op for op in ran if op.kind in TABLE} == set(found)
    assert len(found) == len(set(found)) > 1


def test_each_op_is_tried_once_and_counted() -> None:
    tried, counted = list[Op](), list[tuple[int, int]]()
    scenario = parse_scenario(SHAPES, "x")
    compile_for(scenario, "x", lambda doing, done, total: counted.append((done, total)), tried.append)
    ops = launched(scenario, "x", quiet)
    assert sorted(map(repr, tried)) == sorted(map(repr, ops))
    assert counted[-1] == (8, 8)


def test_tiles_are_tried_whatever_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "MOST_BYTES", 0.0)
    tried = list[Op]()
    scenario = parse_scenario(TILES, "x")
    compile_for(scenario, "x", quiet, tried.append)
    found = {op.kind for op in launched(scenario, "x", quiet)}
    assert {op.kind for op in tried} == {kind for kind in found if kind.startswith("tile_")} < found


def test_what_is_wrong_with_a_scenario_is_told_before_anything_is_compiled() -> None:
    scenario = parse_scenario({**LAYER, "model": "no-such-model"}, "x")
    with pytest.raises(InputError, match="no-such-model"):
        compile_for(scenario, "x", quiet, lambda op: pytest.fail("was tried"))
