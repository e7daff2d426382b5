"""Studies of single operators: the papers' tables, fits made of them, waves, splits, crossovers, answers."""

import csv
import heapq
import math
import random
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from simcore.assembly import Parts, assemble
from simcore.devices.fitted import FittedProfile
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import device_names, load_device
from simcore.devices.waves import stretch, waves
from simcore.input.files import InputError
from simcore.models.operators import LINEAR_ATTENTION, linear_attention_op
from simcore.ops.flash_decoding import (
    flash_attention_2,
    flash_decoding,
    memory_bytes,
    method_op,
    split_choices,
    split_count,
)
from simcore.ops.linear_attention import STATED_MEMORY
from simcore.ops.op import Graph, Op, Price
from simcore.scenario import load_scenario, parse_scenario
from simcore.sim.runs import Setup, simulated
from simcore.sim.tape import record
from simcore.studies.common import Outcome, flat
from simcore.studies.operators import OperatorPublished
from simcore.studies.published import read_figures
from simcore.terminal import show
from simcore.validate.accuracy import published_fits
from tests.thorough import slow

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "validate" / "published"
A100 = load_device("a100-sxm-80gb")
LENGTHS = ["128", "512", "2048", "8192", "12800", "25600", "100000"]
TABLES = {"3": ("1", "0"), "4": ("1", "1"), "5": ("16", "0"), "6": ("16", "1")}
UNREADABLE = {("5", "lightning_torch", "2048")}


def read(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ran(path: Path, *settings: str) -> tuple[Parts, Outcome, list[dict[str, Any]]]:
    parts = assemble(load_scenario(path, settings), str(path))
    outcome = parts.study.run(lambda doing, done, total: None)
    return parts, outcome, parts.study.compare(outcome)


@pytest.fixture(scope="module")
def leetdecoding() -> tuple[Parts, Outcome, list[dict[str, Any]]]:
    return ran(ROOT / "scenarios" / "papers" / "leetdecoding_a6000.yaml")


@pytest.fixture(scope="module")
def flash() -> tuple[Parts, Outcome, list[dict[str, Any]]]:
    return ran(ROOT / "scenarios" / "papers" / "flash_decoding_a100.yaml")


def errors(lines: list[dict[str, Any]], **where: Any) -> list[float]:
    """Errors of latencies that nothing was fitted to."""
    return [
        line["error_pct"]
        for line in lines
        if line["metric"] == "latency_s"
        and line["role"] == "measured"
        and all(line[name] == value for name, value in where.items())
    ]


# -- what was transcribed ------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_every_readable_cell_of_a_table_is_there_once(table: str) -> None:
    rows = read(f"leetdecoding_table{table}")
    assert {(row["batch"], row["decay"]) for row in rows} == {TABLES[table]}
    methods = [name for name in LINEAR_ATTENTION if name != "fleet_modify"]
    expected = [(m, n) for m in methods for n in LENGTHS if (table, m, n) not in UNREADABLE]
    assert sorted((row["method"], row["length"]) for row in rows) == sorted(expected)
    for row in rows:
        assert (row["heads"], row["rank"], row["dim"], row["model"]) == ("32", "128", "128", "")
        assert (row["metric"] == "out_of_memory") == (row["unit"] == "") == (row["value"] == "1")


def test_table_9_says_which_table_is_which() -> None:
    """Its FleetAttention rows name batch and decay, and equal those of Tables 3 to 6 cell by cell."""
    nine = {
        (row["batch"], row["decay"], row["length"]): (row["metric"], float(row["value"]))
        for row in read("leetdecoding_table9")
        if row["method"] == "fleet"
    }
    others = {
        (row["batch"], row["decay"], row["length"]): (row["metric"], float(row["value"]))
        for table in TABLES
        for row in read(f"leetdecoding_table{table}")
        if row["method"] == "fleet"
    }
    assert nine == others
    assert len(nine) == 4 * len(LENGTHS)


def test_memory_runs_out_monotonically_and_later_at_a_smaller_batch() -> None:
    out: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for table in TABLES:
        for row in read(f"leetdecoding_table{table}"):
            key = (row["method"], row["batch"], row["decay"])
            out[key].append(int(row["length"]) if row["metric"] == "out_of_memory" else 0)
    for (method, batch, decay), lengths in out.items():
        fits = [length == 0 for length in lengths]
        assert fits == sorted(fits, reverse=True), (method, batch, decay)
        assert sum(fits) <= sum(length == 0 for length in out[method, "1", decay])


def test_non_atomic_fleet_takes_about_half_as_appendix_d_says() -> None:
    cells = {
        (row["method"], row["batch"], row["decay"], row["length"]): float(row["value"])
        for row in read("leetdecoding_table9")
        if row["metric"] == "latency_s"
    }
    ratios = [cells["fleet_modify", *key] / cells["fleet", *key] for _, *key in cells if len(key) == 3]
    assert len(ratios) == 2 * 26
    assert 0.45 < min(ratios) < max(ratios) < 0.70


def test_flash_decoding_rows_are_all_of_one_size_but_the_last() -> None:
    rows = read("flash_decoding_a100")
    assert len(rows) == 30
    sizes = [int(row["batch"]) * int(row["length"]) for row in rows]
    assert sizes == [65536] * 27 + [131072] * 3
    fitted = [row["length"] for row in rows if row["fitted_by"] and row["method"] == "flash_decoding"]
    assert fitted == ["512", "2048", "8192", "32768", "131072"]
    assert not any(row["fitted_by"] for row in rows if row["method"] == "eager")


def test_fitted_cells_are_at_three_lengths_that_errors_had_no_part_in() -> None:
    for table in TABLES:
        cells: dict[str, list[dict[str, str]]] = defaultdict(list)
        for row in read(f"leetdecoding_table{table}"):
            cells[row["method"]].append(row)
        for method, rows in cells.items():
            readable = [int(row["length"]) for row in rows if row["metric"] == "latency_s"]
            wanted: list[int] = []
            for length in (128, 2048, 25600):
                lower = [n for n in readable if n <= length and n not in wanted]
                wanted += lower[-1:]
            fitted = [int(row["length"]) for row in rows if row["fitted_by"] == "leetdecoding-tables"]
            assert sorted(fitted) == sorted(wanted), (table, method)


# -- fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name", "fit"),
    [
        ("a6000", "leetdecoding-tables", published_fits.leetdecoding_fits),
        ("a100-sxm-80gb", "flash-decoding-table", published_fits.flash_decoding_fits),
    ],
)
def test_the_profile_is_what_its_cells_give(device: str, name: str, fit: Any) -> None:
    profile = load_profile(device, name)
    assert isinstance(profile, FittedProfile)
    again = [published_fits.rounded(row) for row in fit()]
    assert [(row.kind, row.where, row.form, row.n, row.source) for row in again] == [
        (row.kind, row.where, row.form, row.n, row.source) for row in profile.fits
    ]
    for ours, theirs in zip(again, profile.fits, strict=True):
        for field in ("kernel_s", "efficiency", "low", "high", "least_floor_s", "most_floor_s"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-4), (
                ours.where,
                field,
            )


def test_leetdecoding_is_predicted_within_15_percent_in_the_median(leetdecoding: Any) -> None:
    _, outcome, lines = leetdecoding
    found = errors(lines)
    assert len(found) == 125
    assert median(map(abs, found)) < 15.0
    # And this is what is said of it.
    first = outcome.notes[0]
    assert f"median {median(map(abs, found)):.1f} %" in first
    assert "(125)" in first


def test_a_figure_that_two_tables_print_is_compared_once(leetdecoding: Any, capsys: Any) -> None:
    """README, terminal and comparison.csv say one number: Table 9 prints 28 cells of the others again."""
    _, outcome, lines = leetdecoding
    kinds = [(line["metric"], line["role"]) for line in lines]
    assert kinds.count(("out_of_memory", "measured")) == 307 - 28 == 279
    # 26 of the 28 are times.
    assert kinds.count(("latency_s", "measured")) + kinds.count(("latency_s", "fitted")) == 271 - 26
    twice = [line for line in lines if "; " in line["source"]]
    assert {line["strategy"] for line in twice} == {"fleet"}
    assert all(line["source"].count("Table") == 2 and "Table 9" in line["source"] for line in twice)
    show("linear_attention", outcome, lines, Path("somewhere"), quiet=False)
    row = next(
        row for row in capsys.readouterr().out.splitlines() if "latency_s" in row and "measured" in row
    )
    assert "125" in row
    said = next(row for row in (ROOT / "README.md").read_text().splitlines() if "leetdecoding_a6000" in row)
    found = [
        abs(line["error_pct"])
        for line in lines
        if (line["metric"], line["role"]) == ("latency_s", "measured")
    ]
    assert "125 times" in said
    assert f"median {median(found):.1f} %" in said
    assert f"{median(found):.2f} %" in row


def test_which_methods_of_leetdecoding_miss_15_percent(leetdecoding: Any) -> None:
    """By method the bar is not met by these two: kept here, so that a change of either kind is seen."""
    _, _, lines = leetdecoding
    middle = {name: median(map(abs, errors(lines, strategy=name))) for name in LINEAR_ATTENTION}
    missed = {name for name, error in middle.items() if error >= 15.0}
    assert missed == {"block_based", "lightning_torch"}


def test_out_of_memory_is_right_for_methods_whose_space_the_paper_states(leetdecoding: Any) -> None:
    _, _, lines = leetdecoding
    cells = [line for line in lines if line["metric"] == "out_of_memory"]
    # Of Tables 3 to 6, and the 4 of Table 9, two of which stand in Table 5 or 6 too.
    assert sum(line["reference"] for line in cells) == 3 + 4 + 12 + 13 + 4 - 2
    wrong = [line for line in cells if line["reference"] != line["predicted"]]
    assert not [line for line in wrong if line["strategy"] in STATED_MEMORY]
    # The paper puts these down to the depth of the recursion.
    assert {(line["strategy"], line["batch"], line["length"], line["decay"]) for line in wrong} == {
        ("recursion", 1, 100000, 1),
        ("recursion", 16, 25600, 1),
    }


def test_flash_decodings_table_is_predicted_within_its_bars(flash: Any) -> None:
    _, _, lines = flash
    for method, bar in (("flash_decoding", 10.0), ("flash_attention_2", 15.0)):
        found = errors(lines, strategy=method)
        assert len(found) == 5
        assert median(map(abs, found)) < bar
    roles = {(line["context_tokens"], line["role"]) for line in lines if line["metric"] == "latency_s"}
    assert (131072, "fitted") in roles
    assert (65536, "measured") in roles


def test_eager_cells_are_passed_over_for_nobody_asked(flash: Any) -> None:
    parts, outcome, lines = flash
    every = read_figures(OperatorPublished, "published", PUBLISHED / "flash_decoding_a100.csv")
    assert (len(every), len(parts.study.published)) == (30, 20)
    assert len(lines) == 2 * 20
    assert not any("published figures are not of this run" in text for text in outcome.warnings)


# -- waves ---------------------------------------------------------------------------------------


def test_a_kernel_takes_whole_waves_of_its_blocks() -> None:
    generator = random.Random(3)
    for _ in range(200):
        blocks, processors = generator.randrange(1, 5000), generator.randrange(1, 300)
        op = replace(flash_attention_2(**SIZES, context=77), shape=(("blocks", blocks),))
        # Block by block on the processor that is free first, each block a processor's share of the rates.
        free = [0.0] * processors
        for _ in range(blocks):
            heapq.heapreplace(free, free[0] + processors / blocks)
        assert stretch(op, processors) == pytest.approx(max(free), rel=1e-9)
        assert waves(blocks, processors) == round(max(free) * blocks / processors)
    assert stretch(replace(op, shape=()), 108) == 1.0


SIZES = {"batch": 3, "q_heads": 16, "kv_heads": 2, "head_dim": 128, "dtype": "fp16"}


def test_few_blocks_cost_more_by_the_roofline_too() -> None:
    """Two sequences of 16 heads on 108 processors: 76 idle, so 108 / 32 times what a kernel does not cost."""
    op = flash_attention_2(**{**SIZES, "batch": 2}, context=4099)
    blind = replace(op, shape=tuple(item for item in op.shape if item[0] != "blocks"))
    price = pricer(A100)
    assert (price(op).seconds - A100.kernel_s) / (price(blind).seconds - A100.kernel_s) == pytest.approx(
        108 / 32
    )
    assert price(op).seconds > roofline(A100)(op).seconds


def test_a_fit_to_waves_prices_waves() -> None:
    profile = load_profile("a100-sxm-80gb", "flash-decoding-table")
    assert isinstance(profile, FittedProfile)
    op = method_op("flash_attention_2", **{**SIZES, "batch": 5}, context=7001)
    row = profile.row(op)
    assert row is not None
    assert row.form == "waves"
    bytes_ = (2 * 5 * 2 * 7001 * 128 + 2 * 5 * 16 * 128) * 2
    floor_s = bytes_ / A100.hbm_bytes_per_s * 108 / 80
    assert pricer(A100, profile=profile)(op).seconds == pytest.approx(
        row.kernel_s + floor_s / row.efficiency, rel=1e-12
    )
    # Another sharing of KV heads is not what was fitted.
    other = method_op("flash_attention_2", **{**SIZES, "kv_heads": 16}, context=7001)
    assert pricer(A100, profile=profile)(other).source == "roofline"


def test_floors_of_repeated_launches_add_up() -> None:
    sizes = {"batch": 2, "heads": 3, "length": 301, "rank": 16, "dim": 24}
    op = linear_attention_op("recursion", **sizes, dtype="fp32", decay=True, mask_by_rows=True)
    floor = roofline(A100)
    launches, floor_s = launches_and_floor(op, floor)
    assert launches == len(op.parts) > 300
    assert floor_s == pytest.approx(math.fsum(floor(part).seconds for part in op.parts), rel=1e-12)


def test_every_device_says_how_many_processors_it_has() -> None:
    known = {name: load_device(name).processors for name in device_names() if name != "cpu"}
    assert known == {
        "a100-sxm-80gb": 108, "a6000": 84, "b200-sxm": 148, "h100-sxm": 132, "h200-sxm": 132, "n150": 64
    }  # fmt: skip


# -- Flash-Decoding's ops --------------------------------------------------------------------------


def test_work_of_flash_decoding_by_hand() -> None:
    """2 sequences, 6 query heads over 3 KV heads of 8, 50 tokens in 4 parts, 2 bytes an element."""
    op = flash_decoding(batch=2, q_heads=6, kv_heads=3, head_dim=8, context=50, splits=4, dtype="fp16")
    attend, combine = op.parts
    assert [part.kind for part in op.parts] == ["split_attention", "combine_splits"]
    pairs = 2 * 6 * 50
    assert attend.work.flops == 4 * pairs * 8
    cache, queries, outputs = 2 * 2 * 3 * 50 * 8 * 2, 2 * 6 * 8 * 2, 2 * 6 * 8 * 2
    partials = 4 * (2 * 6 * 4 * 8 + 2 * 6 * 4)
    assert attend.work.hbm_bytes == cache + queries + partials
    assert combine.work.hbm_bytes == partials + outputs
    assert (attend["blocks"], combine["blocks"]) == (2 * 3 * 4, 2 * 6)
    assert op.work == attend.work + combine.work
    assert memory_bytes(op) == cache + queries + outputs + partials
    one = flash_decoding(batch=2, q_heads=6, kv_heads=3, head_dim=8, context=50, splits=1, dtype="fp16")
    assert [part.kind for part in one.parts] == ["split_attention"]
    assert one.work.hbm_bytes == cache + queries + outputs == memory_bytes(one)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"splits": 0}, "splits is 0; 1 to 50"),
        ({"splits": 51}, "splits is 51; 1 to 50"),
        ({"batch": 0}, "batch is 0"),
        ({"q_heads": 7}, "q_heads is 7; a multiple of kv_heads, 3, is needed"),
    ],
)
def test_flash_decoding_refuses_what_cannot_be(change: dict[str, int], says: str) -> None:
    good = {"batch": 2, "q_heads": 6, "kv_heads": 3, "head_dim": 8, "context": 50, "splits": 4}
    with pytest.raises(ValueError, match=re.escape(says)):
        flash_decoding(**{**good, **change}, dtype="fp16")


def test_the_chosen_split_is_the_cheapest_of_all_that_could_be() -> None:
    """Against every number of splits up to the most: none is cheaper by more than 2 %."""
    generator = random.Random(5)
    price = pricer(A100, profile=load_profile("a100-sxm-80gb", "flash-decoding-table"))
    for _ in range(12):
        sizes = {**SIZES, "batch": generator.randrange(1, 70)}
        context = generator.randrange(65, 9000)
        op = flash_decoding(**sizes, context=context, splits=1)
        chosen = split_count(op, price, A100.processors)
        assert chosen in split_choices(op, A100.processors)
        every = [
            price(flash_decoding(**sizes, context=context, splits=splits)).seconds
            for splits in range(1, context // 64 + 1)
        ]
        assert every[chosen - 1] <= 1.02 * min(every)


@pytest.mark.parametrize("context", [1, 63, 64, 127, 128, 640, 9000])
def test_a_block_has_at_least_the_rows_of_a_tile(context: int) -> None:
    """Of 64 rows: as many parts as have so many each, by powers of two and by whole waves."""
    sizes: dict[str, Any] = {**SIZES, "batch": 1}
    one = method_op("flash_decoding", **sizes, context=context)
    assert one["splits"] == 1
    found = split_choices(one, A100.processors)
    most = max(1, context // 64)
    powers = {2**i for i in range(20) if 2**i <= most}
    assert powers <= set(found) <= set(range(1, most + 1))


def test_long_contexts_are_split_and_many_sequences_are_not() -> None:
    price = pricer(A100)
    alone = flash_decoding(**{**SIZES, "batch": 1}, context=65536, splits=1)
    many = flash_decoding(**{**SIZES, "batch": 54 * 4}, context=256, splits=1)
    assert split_count(alone, price, 108) >= 54
    assert split_count(many, price, 108) == 1


def test_of_equal_prices_the_fewest_splits_are_chosen() -> None:
    def flat_price(op: Op) -> Price:
        return Price(1.0, 1.0, 1.0, "assumed", op.kind)

    assert split_count(flash_decoding(**SIZES, context=4096, splits=7), flat_price, 108) == 1


# -- studies -------------------------------------------------------------------------------------

LINEAR: dict[str, Any] = {
    "name": "x",
    "study": "linear_attention",
    "device": "a6000",
    "dtype": "fp32",
    "methods": ["vanilla", "lightning", "causal_dot_product"],
    "batch": [1, 4],
    "decay": [False, True],
    "length": [64, 777, 20000],
}
DECODE: dict[str, Any] = {
    "name": "x",
    "study": "decode_attention",
    "device": "h200-sxm",
    "batch": [1, 64],
    "context_tokens": [100, 30000],
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
}


def study(document: dict[str, Any]) -> tuple[Parts, Outcome]:
    parts = assemble(parse_scenario(document, "x.yaml"), "x.yaml")
    return parts, parts.study.run(lambda doing, done, total: None)


def test_the_simulated_launch_takes_its_price_and_the_hosts_time() -> None:
    for document in (LINEAR, DECODE):
        parts, outcome = study(document)
        bench = parts.study.bench
        rows = [row for row in outcome.rows if row.metric == "latency_s"]
        assert len(rows) == len(list(bench.cases()))
        assert bench.device.overheads.launch_s > 0.0
        for row in rows:
            if row.value is None:
                assert "GB" in row.source
                continue
            assert row.value == pytest.approx(bench.seconds(row.axes), rel=1e-12)
            assert row.low is not None
            assert row.high is not None
            assert row.low <= row.value <= row.high
            op, costs = bench.op(row.axes), bench.device.overheads
            launch_s = costs.launch_s + costs.launch_kernel_s * op.kernels
            done_s = launch_s - costs.return_s + costs.start_s + bench.device.price(op).seconds
            assert row.value == pytest.approx(max(launch_s, done_s))


def test_the_first_launch_of_a_run_does_not_count() -> None:
    """On a device that has something else to do before it."""

    class Late:
        """A machine whose first launch stands behind another one."""

        def __init__(self, m: Any) -> None:
            self.m, self.came = m, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.m, name)

        def launch(self, graph: Graph) -> Any:
            if not self.came:
                self.came = True
                self.m.launch(Graph("another", 9 * graph.ops))
            return self.m.launch(graph)

    parts, _ = study(LINEAR)
    bench = parts.study.bench

    def start(setup: Setup) -> Any:
        run = simulated(setup)
        return SimpleNamespace(run=lambda program: run.run(lambda m: program(Late(m))))

    case = next(bench.cases())
    late = replace(bench, device=replace(bench.device, start=start), results={}, prices={})
    assert late.trace(case).marks[0].at_s > 5.0 * bench.seconds(case)
    assert late.run(case).latency_s == pytest.approx(bench.seconds(case), rel=1e-9)


@slow
def test_what_does_not_fit_has_no_latency_and_a_warning() -> None:
    _, outcome = study(LINEAR)
    out = {
        (row.axes.strategy, row.axes.batch, row.axes.length)
        for row in outcome.rows
        if row.metric == "out_of_memory" and row.value
    }
    none = {
        (row.axes.strategy, row.axes.batch, row.axes.length)
        for row in outcome.rows
        if row.metric == "latency_s" and row.value is None
    }
    assert out == none == {("vanilla", 1, 20000), ("vanilla", 4, 20000)}
    assert "out of memory at batch 4 from 20,000 tokens on: vanilla" in outcome.warnings
    with pytest.raises(InputError, match="nothing fits into the 51 GB of a6000"):
        study({**LINEAR, "methods": "vanilla", "length": 20000})


def test_crossovers_stand_where_the_latencies_cross(leetdecoding: Any) -> None:
    parts, outcome, _ = leetdecoding
    bench = parts.study.bench
    rows = [row for row in outcome.rows if row.metric == "crossover_tokens"]
    assert len(rows) > 10
    for row in rows:
        assert row.value is not None
        assert row.axes.length is None
        pair = (row.axes, replace(row.axes, strategy=row.axes.rival))

        def ahead(tokens: int, pair: tuple[Any, Any] = pair) -> bool:
            ours, theirs = (bench.seconds(replace(case, length=tokens, rival="")) for case in pair)
            return bool(ours < theirs)

        # Blocks that are begun make a latency a saw: within 1 % of the place it was ahead at some length.
        place = round(row.value)
        window = range(min(place - 1, math.floor(place * 0.99)), place)
        assert not ahead(place), row
        assert any(ahead(tokens) for tokens in window), row
    first = next(r for r in rows if (r.axes.strategy, r.axes.rival) == ("vanilla", "lightning"))
    # Section 5.1: vanilla is best up to 128 tokens, LA from 512 on.
    assert 128 < (first.value or 0.0) < 512


def test_the_answer_names_the_fastest_and_where_it_changes(leetdecoding: Any, flash: Any) -> None:
    said = leetdecoding[1].answer
    assert said.startswith("Fastest on a6000: batch 1, no decay: vanilla, Lightning Attention 2 from 2")
    assert "batch 16: causal dot product (128 to 25,600 tokens)" in said
    assert "batch 1, decay: Lightning Attention 2 (128 to 100,000 tokens)" in said
    assert flash[1].answer.startswith(
        "Fastest on a100-sxm-80gb: Flash-Decoding everywhere, 256 to 131,072 tokens"
    )


def test_the_fastest_is_the_one_that_is_published_as_fastest(leetdecoding: Any) -> None:
    """At every length of every table but for ties within 30 %: the bold cells of the paper."""
    _, outcome, lines = leetdecoding
    best: dict[tuple[Any, ...], list[tuple[float, str, float]]] = defaultdict(list)
    for line in lines:
        if line["metric"] == "latency_s" and line["strategy"] != "fleet_modify":
            key = (line["batch"], line["decay"], line["length"])
            best[key].append((line["reference"], line["strategy"], line["predicted"]))
    assert len(best) == 4 * 7 - 2
    for key, cells in best.items():
        fastest_s = min(cells)[0]
        chosen = min(cells, key=lambda cell: cell[2])
        assert chosen[0] <= 1.3 * fastest_s, (key, chosen, min(cells))
    slow = [row.value for row in outcome.rows if row.metric == "slowdown_over_fastest"]
    assert min(value for value in slow if value is not None) == 1.0


def test_one_method_alone_has_its_time_as_an_answer() -> None:
    _, outcome = study({**DECODE, "methods": "flash_decoding"})
    assert re.fullmatch(
        r"On h200-sxm, Flash-Decoding takes [\d.]+ [mu]s at 30,000 tokens and batch 64\.", outcome.answer
    )


def test_prices_without_a_fit_are_said_to_be_the_rooflines() -> None:
    _, outcome = study(DECODE)
    assert set(outcome.sources) == {"roofline"}
    assert any("priced by datasheet and roofline" in text for text in outcome.warnings)
    splits = {(row.axes.batch, row.axes.length): row.value for row in outcome.rows if row.metric == "splits"}
    assert (splits[1, 30000] or 0) >= 16
    assert splits[1, 100] == 1


def test_splits_may_be_given() -> None:
    _, outcome = study({**DECODE, "splits": 3})
    rows = [row for row in outcome.rows if row.metric == "splits"]
    assert {(row.value, row.source) for row in rows} == {(3.0, "given")}
    assert len(rows) == 4


@slow
def test_rows_have_all_columns_of_results_csv() -> None:
    for document, heads in ((LINEAR, "heads"), (DECODE, "q_heads")):
        _, outcome = study(document)
        lines = [flat(document["study"], row) for row in outcome.rows]
        assert all(line["devices"] == 1 and line[heads] == 32 for line in lines)
        tokens = "length" if heads == "heads" else "context_tokens"
        assert {line[tokens] for line in lines if line["metric"] == "latency_s"} == set(
            document["length" if heads == "heads" else "context_tokens"]
        )


def test_the_tape_prints_what_a_method_launches() -> None:
    parts = assemble(parse_scenario({**DECODE, "splits": 2}, "x.yaml"), "x.yaml")
    lines = "\n".join(parts.study.tape(record))
    assert "Flash-Decoding" in lines
    assert "split_attention combine_splits" in lines


def test_a_figure_without_a_case_is_warned_of() -> None:
    path = ROOT / "scenarios" / "papers" / "flash_decoding_a100.yaml"
    _, outcome, lines = ran(path, "shapes=[{batch: 2, context_tokens: 32768}]")
    assert len(lines) == 4
    assert any(text.startswith("18 of 20 published figures are not of this run") for text in outcome.warnings)


# -- bad input -----------------------------------------------------------------------------------


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    for key, value in changes.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    return document


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (changed(LINEAR, methods=["vanila"]), "methods[0]: unknown method 'vanila'; did you mean 'vanilla'?"),
        (changed(LINEAR, methods=[]), "methods: is []; at least one value is needed"),
        (changed(LINEAR, length=None), "length: is missing"),
        (changed(LINEAR, length=[64, 0]), "length[1]: is 0"),
        (changed(LINEAR, length=10**9), "length: is 1000000000"),
        (changed(LINEAR, decay="sometimes"), "decay: is 'sometimes'; true or false is needed"),
        (changed(LINEAR, dtype="fp31"), "dtype: unknown dtype 'fp31'; did you mean 'fp32'?"),
        (changed(LINEAR, device="n150"), "dtype: n150: flops_per_s: unknown dtype 'fp32'"),
        (changed(LINEAR, model="llama-3.1-8b"), "model: no such field"),
        (changed(LINEAR, profile="leetdecoding"), "did you mean 'leetdecoding-tables'?"),
        (
            changed(LINEAR, device="a100-sxm-80gb", profile="flover-gptj"),
            "fitted profile or 'none' is needed",
        ),
        (changed(LINEAR, published=["leetdecoding_tabel3"]), "did you mean 'leetdecoding_table"),
        (changed(LINEAR, published=["alspec_table3"]), "is no column of such a file"),
        (changed(LINEAR, length=list(range(1, 4000))), "length: makes 47,988 runs with the other lists"),
        (changed(DECODE, q_heads=30), "q_heads: is 30; a multiple of kv_heads, 8, is needed"),
        (changed(DECODE, splits="many"), "splits: is 'many'; 'auto' or a whole number from 1 on is allowed"),
        (changed(DECODE, splits=True), "splits: is True"),
        (changed(DECODE, splits=101), "splits: is 101; at most 100, the least context, is allowed"),
        (changed(DECODE, batch=None), "batch: is missing"),
        (changed(DECODE, context_tokens=None), "context_tokens: is missing"),
        (changed(DECODE, batch=None, context_tokens=None), "shapes: is needed, or batch and context_tokens"),
        (changed(DECODE, shapes=[{"batch": 1, "context_tokens": 5}]), "shapes: is needed, or batch and"),
        (changed(DECODE, shapes=[{"batch": 1}]), "shapes[0].context_tokens: is missing"),
        (changed(DECODE, methods=["flash_attention_3"]), "did you mean 'flash_attention_2'?"),
    ],
)
def test_a_fault_is_one_line_with_field_and_allowed_values(document: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        assemble(parse_scenario(document, "x.yaml"), "x.yaml")
    message = str(raised.value)
    assert message.startswith("x.yaml: ")
    assert "\n" not in message
    assert says in message


def test_a_fault_in_published_figures_names_line_and_column(tmp_path: Path) -> None:
    text = (PUBLISHED / "leetdecoding_table3.csv").read_text()
    bad = tmp_path / "z.csv"
    bad.write_text(text.replace("latency_s,9.56e-5", "latency_s,-1"))
    with pytest.raises(InputError, match=r"published: z\.csv, line 2: value: is '-1'"):
        read_figures(OperatorPublished, "published", bad)
    assert len(read_figures(OperatorPublished, "published", PUBLISHED / "leetdecoding_table3.csv")) == 63


def test_a_scenario_cannot_ask_for_launches_that_return_before_they_began() -> None:
    scenario = parse_scenario(
        {
            "name": "x", "study": "linear_attention", "device": "cpu", "profile": "none", "dtype": "fp32",
            "methods": ["fleet"], "batch": 1, "heads": 1, "rank": 16, "dim": 16, "length": 32,
            "overheads": {"launch_s": 1e-5, "return_s": 2e-5},
        },
        "x",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"x: overheads\.return_s: is 2e-05; at most launch_s"):
        assemble(scenario, "x")
