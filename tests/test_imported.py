"""Profiles out of tables of op times, and device files that say little, as a user meets them."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from simcore.devices.fitted import FittedProfile
from simcore.devices.imported import profile_of
from simcore.devices.making import shape_text
from simcore.devices.op_tables import KINDS, Timed, op_of, read_table
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import DeviceSpec, load_device
from simcore.input.files import InputError
from simcore.ops import op as ops
from simcore.ops.op import Op
from simcore.studies.serving.engines.products import products
from tests.command_line import call
from tests.thorough import slow

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT.parent / "shared" / "data" / "h200_operators"
CARD = {
    "name": "my-card",
    "memory_bytes": 141e9,
    "hbm_bytes_per_s": 4.8e12,
    "flops_per_s": {"bf16": 989e12, "fp8": 1979e12},
    "links": {"nvlink": {"bytes_per_s": 450e9}},
    "default_profile": "times/",
}
SCENARIO = {
    "name": "mine",
    "study": "decode",
    "device": "my-card.yaml",
    "model": "llama-3.1-8b",
    "context_tokens": 1024,
    "strategies": [{"kind": "tensor_parallel", "ranks": [1, 2]}],
}
# The constants that synthetic times are made with.
KERNEL_S, EFFICIENCY = 2.5e-6, 0.8
MS, NS, KS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 4096, 16384), (2048, 8192)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceSpec:
    """A device of one's own in the current folder, and a scenario for it."""
    monkeypatch.chdir(tmp_path)
    Path("my-card.yaml").write_text(yaml.safe_dump(CARD))
    Path("mine.yaml").write_text(yaml.safe_dump(SCENARIO))
    return load_device("./my-card.yaml")


def product_of(m: int, n: int, k: int) -> Op:
    return ops.matmul("matmul", m=m, n=n, k=k, dtype="bf16")


def formula_s(op: Op, spec: DeviceSpec) -> float:
    return KERNEL_S + roofline(spec)(op).seconds / EFFICIENCY


def bent_s(op: Op, spec: DeviceSpec) -> float:
    """Up to 30 % more than the formula, along a wave that two constants cannot follow."""
    return formula_s(op, spec) * (1.0 + 0.15 * (1.0 + math.sin(0.5 * math.log2(op["m"] * op["n"]))))


def written(seconds: Callable[[Op, DeviceSpec], float], spec: DeviceSpec, path: str) -> None:
    rows = [product_of(*sizes) for sizes in product(MS, NS, KS)]
    lines = [f"{op.kind},{shape_text(op)},{op.dtype},{seconds(op, spec)!r}" for op in rows]
    Path(path).write_text("\n".join(["kind,shape,dtype,median_s", *lines]) + "\n")


def imported(*tables: str) -> int:
    return call("profile", "import", *tables, "--device", "./my-card.yaml", "--out", "times")


@pytest.mark.parametrize(("seconds", "within"), [(formula_s, 1e-6), (bent_s, 0.04)])
def test_prices_between_the_rows_follow_the_times(
    seconds: Callable[[Op, DeviceSpec], float], within: float, card: DeviceSpec
) -> None:
    written(seconds, card, "t.csv")
    assert imported("t.csv") == 0
    profile = load_profile("my-card", "./times/")
    assert isinstance(profile, FittedProfile)
    price = pricer(card, profile=profile)
    for sizes in product((1, 3, 12, 48, 256), (1024, 2048, 12288), (2048, 5120)):
        op = product_of(*sizes)
        found = price(op)
        assert found.seconds == pytest.approx(seconds(op, card), rel=within)
        measured = sizes[0] in MS and sizes[1] in NS and sizes[2] in KS
        assert found.source == ("measured" if measured else "interpolated")
        assert price(product_of(1, 1 << 17, 2048)).source == "extrapolated"
    assert price(ops.norm("n", tokens=1, hidden=4096, dtype="bf16")).source == "roofline"


@slow
def test_a_run_by_products_alone_says_what_the_roofline_prices(
    card: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    written(formula_s, card, "t.csv")
    assert imported("t.csv") == 0
    out = capsys.readouterr().out
    assert "matmul bf16: 54 op times; at 54 left out one by one prices are 0.0 % off (median)" in out
    assert "not in the tables, priced by the roofline: activation, decode_attention" in out
    assert call("mine.yaml", "--out", "run") == 0
    seen = capsys.readouterr()
    warning = "my-card: assumed, not given by its file: flops_efficiency, hbm_efficiency, kernel_s, l2_bytes,"
    assert warning in " ".join((seen.out + seen.err).split())
    found = json.loads(Path("run/provenance.json").read_text())
    assert found["device"]["sources"]["kernel_s"] == "assumed: as h200-sxm has it"
    assert found["device"]["sources"]["memory_bytes"] == "given by the file, no source"
    assert {"interpolated", "measured", "roofline"} <= found["price_sources"].keys()
    assert found["profile"]["name"] == "times"


def test_the_same_tables_give_the_same_bytes_and_replace_an_import(card: DeviceSpec) -> None:
    written(formula_s, card, "t.csv")
    kept = []
    for _ in range(2):
        assert imported("t.csv") == 0
        kept.append({path.name: path.read_bytes() for path in Path("times").iterdir()})
    assert kept[0] == kept[1]
    assert kept[0].keys() == {"profile.yaml", "fits.csv", "points.csv"}
    # What was written is a table of its own kind.
    assert call("profile", "import", "times/points.csv", "--device", "./my-card.yaml", "--out", "again") == 0
    assert (Path("again") / "fits.csv").read_bytes() == kept[0]["fits.csv"]


GOOD = "matmul,m=16;n=6144;k=4096,bf16,1.5e-5"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind,shape\nmatmul,m=1\n", "columns 'dtype', 'median_s': are missing"),
        ("kind,shape,dtype,medain_s\n" + GOOD, "unknown column 'medain_s'; did you mean 'median_s'"),
        ("a,b\n1,2\n", "no such columns"),
        ("", "has no rows"),
        ("kind,shape,dtype,median_s\n", "has no rows"),
        ("kind,shape,dtype,median_s,median_s\n" + GOOD + ",1\n", "column 'median_s' is there twice"),
        (GOOD + ",1", "line 2: has not as many cells as there are columns (5, not 4)"),
        (GOOD.replace("matmul", "matmull"), "row 1: kind: unknown kind 'matmull'; did you mean 'matmul'"),
        (GOOD.replace("bf16", "bf61"), "row 1: dtype: unknown dtype 'bf61'; did you mean 'bf16'"),
        (GOOD.replace("m=16;", ""), "row 1: shape: matmul needs m besides"),
        (GOOD.replace("m=16;", "l=16;"), "row 1: shape: matmul has no dimension 'l'"),
        (GOOD.replace("m=16", "m=0"), "row 1: shape: m is 0"),
        (GOOD.replace("m=16", "m=-1"), "row 1: shape: m: is '-1'"),
        (GOOD.replace("m=16", "m=1.5"), "row 1: shape: m: is '1.5'"),
        (GOOD.replace("m=16", "m=nan"), "row 1: shape: m: is 'nan'"),
        (GOOD.replace("m=16;", "m=16;m=17;"), "row 1: shape: is 'm=16;m=17;"),
        (GOOD.replace("1.5e-5", "nan"), "row 1: median_s: is 'nan'; 1e-09 to 10000 seconds are allowed"),
        (GOOD.replace("1.5e-5", ""), "row 1: median_s: is ''"),
        (GOOD.replace("1.5e-5", "0"), "row 1: median_s: is '0'"),
        (GOOD.replace("1.5e-5", "-1e-5"), "row 1: median_s: is '-1e-5'"),
        (GOOD.replace("1.5e-5", "1e30"), "row 1: median_s: is '1e30'"),
        (GOOD.replace("1.5e-5", "quick"), "row 1: median_s: is 'quick'"),
        (GOOD.replace("1.5e-5", "1.5e-8"), "1 of 1 times of matmul bf16 are faster than my-card can be"),
        (GOOD.replace("1.5e-5", "1.5e-2"), "times as long as by the roofline of my-card"),
        (
            GOOD.replace("matmul,m=16;n=6144;k=4096,bf16", "norm,tokens=1;hidden=8,fp32"),
            "unknown dtype 'fp32'",
        ),
        (
            "decode_attention,batch=1;q_heads=6;kv_heads=4;head_dim=8;context=9,bf16,1e-5",
            "q_heads is no multiple",
        ),
    ],
)
def test_a_cell_that_is_no_measurement_is_one_line(
    text: str, says: str, card: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "" if "," not in text or text.startswith(("kind", "a,")) else "kind,shape,dtype,median_s\n"
    Path("t.csv").write_text(head + text)
    assert imported("t.csv") == 2
    seen = capsys.readouterr()
    assert says in seen.err
    assert "t.csv" in seen.err
    assert len(seen.err.strip().splitlines()) == 1
    assert not seen.out
    assert {path.name for path in Path().iterdir()} == {"t.csv", "my-card.yaml", "mine.yaml"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.csv", "--device", "./my-card.yaml", "--out", "x"], "none.csv: cannot be read"),
        (["none.parquet", "--device", "./my-card.yaml", "--out", "x"], "none.parquet: cannot be read"),
        (
            ["my-card.yaml", "--device", "h200", "--out", "x"],
            "unknown device 'h200'; did you mean 'h200-sxm'",
        ),
        (["t.csv", "--device", "./my-card.yaml", "--out", "x", "--format", "cvs"], "did you mean 'csv'"),
        (["t.csv", "--device", "./my-card.yaml", "--out", "t.csv"], "--out t.csv: is no directory"),
        (["t.csv", "--device", "./my-card.yaml", "--out", "full"], "holds a.txt, which no"),
        (["--device", "./my-card.yaml", "--out", "x"], "TABLE..."),
    ],
)
def test_a_wrong_word_is_one_line(
    words: Sequence[str], says: str, card: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    written(formula_s, card, "t.csv")
    Path("full").mkdir()
    Path("full/a.txt").write_text("mine")
    assert call("profile", "import", *words) == 2
    assert says in capsys.readouterr().err
    assert not Path("x").exists()


# -- aiconfigurator's columns ----------------------------------------------------------------------------

GEMM = {"device": "NVIDIA H200", "framework": "VLLM", "version": "0.19.0", "gemm_dtype": "bfloat16", "m": 16, "n": 6144, "k": 4096, "latency": 0.015}  # fmt: skip  # noqa: E501
ATTENTION = {
    "op_name": "generation_attention", "attn_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 4,
    "isl": 1, "step": 1023, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0,
    "latency": 0.03,
}  # fmt: skip
NCCL = {"nccl_dtype": "half", "op_name": "all_reduce", "num_gpus": 8, "message_size": 4096, "latency": 0.02}
MOE = {"moe_dtype": "fp8", "num_tokens": 4, "latency": 0.02}


def table(path: str, *rows: Mapping[str, Any]) -> Path:
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    else:
        lines = [",".join(map(str, row.values())) for row in rows]
        Path(path).write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return Path(path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_of_aiconfigurator_become_ops(
    ending: str, card: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm = f"gemm.{ending}"
    again, block = {**GEMM, "latency": 0.017}, {**GEMM, "gemm_dtype": "nvfp4"}
    table(gemm, GEMM, again, block, {**GEMM, "m": 32, "latency": 0.018})
    prompt = {
        **ATTENTION,
        "op_name": "context_attention",
        "isl": 100,
        "step": 50,
        "kv_cache_dtype": "bfloat16",
    }
    windows = {**ATTENTION, "window_size": 128}
    table(f"attention.{ending}", ATTENTION, prompt, windows)
    table(f"nccl.{ending}", NCCL)
    table(f"moe.{ending}", MOE)
    assert imported(gemm, f"attention.{ending}", f"nccl.{ending}", f"moe.{ending}") == 0
    out = capsys.readouterr().out
    for says in (
        "left out: 1 rows of gemm_dtype nvfp4",
        "left out: 1 rows of sliding windows",
        "left out: 1 rows of collectives: the link of the device file prices them",
        "left out: 1 rows of mixtures of experts",
        "1 ops are there several times: their medians count (largest / smallest time: median 1.13",
    ):
        assert says in out
    profile = load_profile("my-card", "./times/")
    assert isinstance(profile, FittedProfile)
    assert profile.birth is not None
    assert (profile.birth.processor, profile.birth.date) == ("NVIDIA H200", "unknown")
    assert profile.birth.versions == {"framework": "VLLM 0.19.0"}
    price = pricer(card, profile=profile)
    assert price(product_of(16, 6144, 4096)).seconds == pytest.approx(1.6e-5)
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    decoding = ops.decode_attention(batch=4, context=1024, dtype="fp8", **heads)
    assert price(decoding).seconds == pytest.approx(3e-5)
    # 100 tokens of each of four prompts, each over the 50 before it and those of its own up to itself.
    pairs = 4 * sum(50 + i for i in range(1, 101))
    asked = ops.prefill_attention(tokens=400, kv_tokens=600, pairs=pairs, dtype="bf16", **heads)
    assert price(asked).seconds == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"gemm_dtype": "bfloat16", "m": 1}], "columns 'n', 'k', 'latency': are missing"),
        ([{**GEMM, "k": 0}], "row 1: k: is 0; it should be a whole number from 1 on"),
        ([{**GEMM, "latency": math.nan}], "row 1: latency: is nan"),
        ([{**GEMM, "latency": 1e9}], "row 1: latency: is 1e+09"),
        ([{**GEMM, "latency": 1e-7}], "row 1: latency: is 1e-07"),
        ([{**GEMM, "latency": 15e-6}], "are faster than my-card can be"),
        ([{**GEMM, "latency": 15.0}], "times as long as by the roofline"),
        ([{**ATTENTION, "op_name": "generation"}], "op_name: unknown value 'generation'; did you mean"),
        ([MOE], "no op times are left (left out: 1 rows of mixtures of experts"),
    ],
)
def test_a_table_that_cannot_be_is_refused(
    rows: Sequence[Mapping[str, Any]], says: str, card: DeviceSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("t.csv", "t.parquet"):
        table(path, *rows)
        assert imported(path) == 2
        assert says in capsys.readouterr().err
        assert not Path("times").exists()


def test_a_few_times_that_cannot_be_are_left_out_and_named(card: DeviceSpec) -> None:
    rows = [
        {**GEMM, "m": m, "latency": 1e3 * formula_s(product_of(m, 6144, 4096), card)} for m in range(1, 41)
    ]
    rows[6]["latency"] = 1e-3
    found = profile_of([read_table(table("t.csv", *rows))], card, "x")
    assert len(found.points) == 39
    assert (
        "1 of 40 times of matmul bf16 are faster than my-card can be (the worst, t.csv: row 7: 1e-06 s"
        in (" ".join(found.messages))
    )


def test_an_op_of_each_kind_is_read_as_the_calibration_writes_it() -> None:
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    first = {point.kind: point for point in profile.points}
    floor = roofline(load_device("h200-sxm"))
    for kind in KINDS:
        point = first[kind]
        op = op_of(kind, point.shape, point.dtype, "here")
        assert shape_text(op) == point.shape
        assert floor(op).seconds == pytest.approx(point.floor_s, rel=1e-9)


@slow
@pytest.mark.skipif(not TABLES.is_dir(), reason="tables of an H200's op times are not beside this checkout")
@pytest.mark.parametrize("dtype", ["fp8", "fp8_b128"])
def test_an_engine_s_products_are_those_of_its_op_times(dtype: str) -> None:
    """The medians of `engines/products.yaml`: latency less the rounding of the input, over the price."""
    price = pricer(load_device("h200-sxm"), profile=load_profile("h200-sxm", "local"))
    whole = read_table(next(TABLES.glob("*gemm_perf.parquet")))
    theirs, times = products()["vllm-0.19"][dtype], defaultdict[int, list[float]](list)
    assert set(theirs.rows) == {each.op["m"] for each in whole.timed if each.op.dtype == dtype}
    asked = {*theirs.rows[::6], 129, 257, 513}
    for each in whole.timed:
        rows, inputs = each.op["m"], each.op["k"]
        if each.op.dtype == dtype and rows in asked and 16e6 <= each.op["n"] * inputs <= 600e6:
            rounded_s = price(ops.quantize("inputs", tokens=rows, width=inputs, dtype="fp8")).seconds
            times[rows].append((each.seconds - rounded_s) / price(each.op).seconds)
    assert {len(each) for each in times.values()} == {170}
    for rows, each in times.items():
        assert median(each) == pytest.approx(theirs.at(rows), rel=0.01), rows


@slow
@pytest.mark.skipif(not TABLES.is_dir(), reason="tables of an H200's op times are not beside this checkout")
def test_held_out_rows_of_a_real_table() -> None:
    """Every fifth product of matrices of four sizes is left out; prices of these are 5 % off at most in the
    median, far nearer than the roofline's, and nine in ten lie in their interval, about."""
    spec, sizes = load_device("h200-sxm"), (1024, 2048, 4096, 8192)
    whole = read_table(next(TABLES.glob("*gemm_perf.parquet")))
    assert whole.processors == ("NVIDIA H200",)
    rows: list[Timed] = [
        each
        for each in whole.timed
        if each.op.dtype == "bf16" and each.op["n"] in sizes and each.op["k"] in sizes
    ]
    assert len(rows) > 1000
    held = rows[4::5]
    kept = [row for i, row in enumerate(rows) if i % 5 != 4]
    price = pricer(spec, profile=profile_of([replace(whole, timed=kept)], spec, "x").profile)
    plain = pricer(spec)

    def off(price_of: Callable[[Op], Any]) -> float:
        return float(np.median([abs(math.log(price_of(row.op).seconds / row.seconds)) for row in held]))

    assert off(price) < 0.05
    assert off(plain) > 2.0 * off(price)
    inside = [price(row.op).low_s <= row.seconds <= price(row.op).high_s for row in held]
    assert np.mean(inside) > 0.85


# -- device files and the list of devices --------------------------------------------------------------------


def test_devices_stand_in_80_columns(card: DeviceSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    h200 = next(line for line in lines if line.startswith("h200-sxm"))
    assert h200.split()[:7] == ["h200-sxm", "150.1", "4.8", "989.5", "1979", "700", "measured"]
    assert call("devices", "./my-card.yaml") == 0
    out = capsys.readouterr().out
    assert "kernel_s = 9.4e-07  [assumed]" in out
    assert "memory_bytes = 1.41e+11\n    given by the file, no source" in out
    assert "a profile that is missing" in out
    assert call("devices", "h200") == 2


@slow
def test_schemas_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schema", "--device") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["required"] == ["name", "memory_bytes", "hbm_bytes_per_s", "flops_per_s"]
    assert found["$defs"]["Link"]["required"] == ["bytes_per_s"]
    assert call("schema", "--profile") == 0
    assert "points" not in json.loads(capsys.readouterr().out)["properties"]
    assert call("schema", "--plan") == 0
    assert json.loads(capsys.readouterr().out)["anyOf"] == [{"required": ["base"]}, {"required": ["bases"]}]
    for one, other in combinations(("--profile", "--device", "--plan"), 2):
        assert call("schema", one, other) == 2
        assert "one of them at a time" in capsys.readouterr().err


def test_what_a_device_file_leaves_out_is_as_on_an_h200(card: DeviceSpec) -> None:
    h200 = load_device("h200-sxm")
    assert (card.kernel_s, card.overheads, card.l2_bytes) == (h200.kernel_s, h200.overheads, h200.l2_bytes)
    assert card.hbm_efficiency.value == h200.hbm_efficiency.value
    assert card.hbm_efficiency.source == card.sources["hbm_efficiency"] == "assumed: as h200-sxm has it"
    assert card.link().latency_s == h200.link().latency_s
    assert card.link().relative_error > h200.link().relative_error
    assert card.sources["links.nvlink.latency_s"] == "assumed: as nvlink of h200-sxm has it"
    assert "links.nvlink.bytes_per_s" not in card.sources
    assert card.default_profile == f"{Path('times').absolute()}/"
    Path("two.yaml").write_text(
        yaml.safe_dump({**CARD, "kernel_s": 1e-6, "sources": {"kernel_s": "mine"}, "links": {}})
    )
    two = load_device("two.yaml")
    Path("links.yaml").write_text(
        yaml.safe_dump({**CARD, "links": {"a": {"bytes_per_s": 1e9}, "b": {"bytes_per_s": 1e9}}})
    )
    with pytest.raises(InputError, match="missing key 'default_link'"):
        load_device("links.yaml")
    Path("empty.yaml").write_text("name: x\nsources:\nmemory_bytes: 1e9\n")
    with pytest.raises(InputError, match="missing keys 'hbm_bytes_per_s', 'flops_per_s'"):
        load_device("empty.yaml")
    assert (two.kernel_s, two.sources["kernel_s"], two.default_link) == (1e-6, "mine", None)


def test_fields_that_are_missing_are_all_told(card: DeviceSpec, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text("name: x\nstudy: decode\n")
    assert call("s.yaml") == 2
    assert "s.yaml: device, model, strategies, context_tokens: are missing" in capsys.readouterr().err


def test_a_missing_profile_is_one_line(card: DeviceSpec, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("mine.yaml") == 2
    assert "times/profile.yaml: cannot be read" in capsys.readouterr().err
    written(formula_s, card, "t.csv")
    assert imported("t.csv") == 0
    with pytest.raises(InputError, match="holds for my-card, not h200-sxm"):
        load_profile("h200-sxm", "./times/")
