"""Devices beside each other: an H200 as it is, with other figures, and its sibling H100, on one basis."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import log
from typing import Any

import pytest

from simcore.assembly import assemble
from simcore.devices.carried import carried
from simcore.devices.in_use import DATASHEET, MEASUREMENTS, chosen_device, default_profile_of
from simcore.devices.price import pricer, roofline
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.ops import op as ops
from simcore.ops.op import Op, Price, Pricer
from simcore.scenario import parse_scenario, resolved
from simcore.studies.common import Outcome
from simcore.studies.one_device import DeviceStudy
from simcore.studies.several_devices import SeveralDevices
from tests.thorough import first, slow

H100, H200 = load_device("h100-sxm"), load_device("h200-sxm")
MORE_MEMORY = {"hbm_bytes_per_s": {"times": 1.5}}
LESS_LATENCY = {"links.nvlink.latency_s": {"times": 0.5}}
# An H100 but for what its kernels cost to launch.
LIKE_H100 = replace(H100, kernel_s=H200.kernel_s)
Document = dict[str, Any]
# Rounding, of sums of thousands of prices.
ROUNDING = 1e-9


@cache
def prices(base: str, *change: tuple[str, float]) -> Pricer:
    given = {path: {"times": factor} for path, factor in change}
    found = default_profile_of(chosen_device(base, given))
    assert found is not None
    return found.pricer(link=found.spec.link() if found.spec.default_link else None)


def random_op(seed: int) -> Op:
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        return round(low * (high / low) ** draw.random())

    tokens, heads, group = size(1, 4096), draw.choice([1, 2, 8]), draw.choice([1, 4, 8])
    attention = {"q_heads": heads * group, "kv_heads": heads, "head_dim": draw.choice([64, 128])}
    return draw.choice(
        [
            ops.matmul(
                "x", m=tokens, n=size(8, 40_000), k=size(8, 20_000), dtype=draw.choice(["bf16", "fp8"])
            ),
            ops.decode_attention(batch=size(1, 256), context=size(1, 100_000), dtype="bf16", **attention),
            ops.norm("x", tokens=tokens, hidden=size(64, 16_384), dtype="bf16"),
            ops.activation(tokens=tokens, width=size(64, 30_000), gated=True, dtype="bf16"),
            ops.residual("x", tokens=tokens, hidden=size(64, 16_384), dtype="bf16"),
            ops.sample(tokens=size(1, 512), vocab=size(1000, 200_000), dtype="bf16"),
            ops.embedding(tokens=tokens, hidden=size(64, 16_384), dtype="bf16"),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_an_op_takes_what_limits_it_more_or_less(seed: int) -> None:
    """H100 never faster than H200; memory of 1.5 times the rate between 1 and 1.5 times; a link nothing."""
    op = random_op(seed)
    here = prices("h200-sxm")(op)
    there = prices("h100-sxm")(op)
    assert here.seconds * (1.0 - ROUNDING) <= there.seconds <= here.seconds * 4.8 / 3.35 * (1.0 + ROUNDING)
    faster = prices("h200-sxm", ("hbm_bytes_per_s", 1.5))(op)
    assert 1.0 - ROUNDING <= here.seconds / faster.seconds <= 1.5 + ROUNDING
    assert prices("h200-sxm", ("links.nvlink.latency_s", 0.5))(op) == here
    for price in (there, faster):
        assert price.low_s <= price.seconds <= price.high_s
        if here.source in ("measured", "interpolated"):
            assert price.source == "carried" or (price is faster and price == here)
            # Wider than where it was measured, by as much as H100 times were off.
            if price.source == "carried":
                assert log(price.high_s / price.seconds) >= log(here.high_s / here.seconds) - ROUNDING
    assert there.source != "roofline" or here.source == "roofline"


def priced(seconds: float) -> Callable[[Op], Price]:
    return lambda op: Price(seconds, 0.9 * seconds, 1.1 * seconds, "measured", "a table")


def test_the_rule_has_the_ends_that_it_should() -> None:
    """All memory: by the bandwidths. All launches: not at all. In between by the formula."""
    op = ops.matmul("x", m=1, n=8192, k=8192, dtype="bf16")
    work_s = roofline(H200)(op).memory_s / H200.hbm_efficiency.value
    ratio = H200.hbm_bytes_per_s / H100.hbm_bytes_per_s
    whole = carried(priced(work_s), H200, LIKE_H100)(op)
    assert whole.seconds == pytest.approx(work_s * ratio)
    assert whole.source == "carried"
    idle = carried(priced(1e6 * work_s), H200, LIKE_H100)(op)
    assert idle.seconds == pytest.approx(1e6 * work_s, rel=1e-6)
    half = carried(priced(2.0 * work_s), H200, LIKE_H100)(op)
    assert half.seconds == pytest.approx(2.0 * work_s * (1 + 0.5**1.5 * (ratio**1.5 - 1)) ** (1 / 1.5))
    # In quadrature with the interval that it had.
    assert log(half.high_s / half.seconds) == pytest.approx((log(1.1) ** 2 + log(1.10) ** 2) ** 0.5)
    assert log(half.seconds / half.low_s) == pytest.approx((log(0.9) ** 2 + log(0.89) ** 2) ** 0.5)


def test_launches_take_what_they_take_here() -> None:
    """A kernel of an H100's graph costs 0.1 us more than one of an H200's."""
    op = ops.norm("x", tokens=1, hidden=64, dtype="bf16")
    assert carried(priced(3e-6), H200, H100)(op).seconds == pytest.approx(3e-6 + 1e-7, rel=1e-3)


def test_what_was_just_written_is_in_the_cache_on_both() -> None:
    op = ops.norm("x", tokens=64, hidden=4096, dtype="bf16")
    took_s = roofline(H200)(op).memory_s
    found = carried(priced(took_s), H200, LIKE_H100, as_written={"norm"})(op)
    assert (found.seconds, found.cached) == (took_s, True)
    large = ops.norm("x", tokens=8192, hidden=4096, dtype="bf16")
    large_s = roofline(H200)(large).memory_s
    assert carried(priced(large_s), H200, H100, as_written={"norm"})(large).seconds > 1.3 * large_s


def test_collectives_are_those_of_the_link_here() -> None:
    op = ops.all_reduce("x", elements=4096, ranks=8, axis="tensor", dtype="bf16")
    assert prices("h100-sxm")(op) == pricer(H100, link=H100.link())(op)
    assert prices("h200-sxm", ("links.nvlink.latency_s", 0.5))(op).seconds < prices("h200-sxm")(op).seconds


# -- whole scenarios -----------------------------------------------------------------------------------


def decode(random_: random.Random) -> Document:
    batch = round(2 ** (8 * random_.random()))
    return {
        "name": "random",
        "study": "decode",
        "model": random_.choice(["llama-3.1-8b", "llama-7b", "mistral-7b", "qwen3-8b"]),
        # Up to 65,536 tokens in all, which fit beside the weights on the smaller card.
        "batch": batch,
        "context_tokens": max(1, round(2 ** (16 * random_.random())) // batch),
        "beyond_model_context": True,
        "strategies": [{"kind": "tensor_parallel", "ranks": random_.choice([1, 2, 4, 8])}],
    }


def serving(random_: random.Random) -> Document:
    ranks = random_.choice([1, 2])
    return {
        "name": "random",
        "study": "serving",
        "model": "llama-3.1-8b",
        "devices": ranks,
        "workload": {
            "requests": random_.randint(1, 12),
            # All at once: what arrives later may meet another batch on a faster device.
            "arrivals": {"kind": "closed_loop", "clients": random_.randint(1, 8)},
            "prompt_tokens": {"kind": "constant", "value": random_.randint(1, 3000)},
            "output_tokens": {"kind": "constant", "value": random_.randint(1, 60)},
        },
        "strategies": [{"kind": "continuous_batching", "ranks": ranks}],
        "price_interval": False,
    }


def took_s(document: Document, device: Any) -> float:
    """Seconds of a token, or of the whole run."""
    study = assemble(parse_scenario({**document, "device": device}, "x"), "x").study
    assert isinstance(study, DeviceStudy)
    wanted = "token_latency_s" if study.bench.scenario.study == "decode" else "duration_s"
    rows = study.run(lambda *_: None).rows
    return next(row.value for row in rows if row.metric == wanted and row.value is not None)


def check_case(document: Document) -> None:
    """What has to hold of any case on the two cards and the two changes."""
    base = took_s(document, "h200-sxm")
    assert base * (1 - ROUNDING) <= took_s(document, "h100-sxm") <= base * 4.8 / 3.35
    memory = base / took_s(document, {"base": "h200-sxm", "change": MORE_MEMORY})
    assert 1.0 - ROUNDING <= memory <= 1.5 + ROUNDING
    link = base / took_s(document, {"base": "h200-sxm", "change": LESS_LATENCY})
    ranks = document["strategies"][0]["ranks"]
    assert link == 1.0 if ranks == 1 else 1.0 <= link <= 2.0


@slow
@pytest.mark.parametrize("seed", first(1, range(6)))
@pytest.mark.parametrize("draw", [decode, serving])
def test_a_case_is_ranked_as_its_devices_are(draw: Callable[[random.Random], Document], seed: int) -> None:
    check_case(draw(random.Random(seed)))


SEVERAL: Document = {
    "name": "several",
    "study": "decode",
    "model": "llama-3.1-8b",
    "context_tokens": [1024, 4096],
    "strategies": [{"kind": "tensor_parallel", "ranks": [1, 4]}],
}


def outcome_of(device: Any, **fields: Any) -> tuple[SeveralDevices, Outcome]:
    study = assemble(parse_scenario({**SEVERAL, "device": device, **fields}, "x"), "x").study
    assert isinstance(study, SeveralDevices)
    return study, study.run(lambda *_: None)


@slow
def test_several_devices_are_one_study() -> None:
    _, outcome = outcome_of(["h100-sxm", "h200-sxm", {"base": "h200-sxm", "change": MORE_MEMORY}])
    assert outcome.answer.startswith(
        "At 4,096 tokens of context and batch 1, h200-sxm with hbm_bytes_per_s x 1.5 is best: it takes"
    )
    assert outcome.answer.index("h200-sxm takes") < outcome.answer.index("h100-sxm takes")
    assert not outcome.unranked
    latencies = [row for row in outcome.rows if row.metric == "token_latency_s"]
    assert len({row.axes.label for row in latencies}) == 6
    assert {row.axes.device for row in latencies} == {
        "h100-sxm", "h200-sxm", "h200-sxm with hbm_bytes_per_s x 1.5"
    }  # fmt: skip
    assert len(set(outcome.tables["steps.parquet"]["label"].to_pylist())) == 6


@slow
def test_devices_on_different_bases_are_not_ranked() -> None:
    study, outcome = outcome_of(["h200-sxm", "h100-sxm", "a6000"])
    assert [one.basis for one in study.each] == [MEASUREMENTS, MEASUREMENTS, DATASHEET]
    assert "not all devices can be ranked, for their prices rest on different bases" in outcome.answer
    assert "h200-sxm is best" in outcome.answer
    assert outcome.unranked == ["tensor parallel, 1 device, a6000", "tensor parallel, 4 devices, a6000"]


@slow
def test_by_their_datasheets_all_devices_are_ranked() -> None:
    _, outcome = outcome_of(["h100-sxm", "a6000"], profile="none")
    assert "h100-sxm is best" in outcome.answer
    assert "a6000 takes" in outcome.answer


@slow
def test_a_device_on_which_nothing_fits_is_named() -> None:
    _, outcome = outcome_of(["h200-sxm", "a6000"], model="llama-3.1-70b", profile="none", strategies=[
        {"kind": "tensor_parallel", "ranks": 2}
    ])  # fmt: skip
    assert outcome.warnings[0].startswith("a6000: nothing fits")
    assert outcome.answer.startswith("At 4,096 tokens")


@slow
def test_lists_of_figures_multiply() -> None:
    given = {"base": "h200-sxm", "change": {"hbm_bytes_per_s": {"times": [1.0, 1.5]}, "kernel_s": 1e-6}}
    study, _ = outcome_of(given)
    assert [one.name for one in study.each] == [
        "h200-sxm with hbm_bytes_per_s x 1, kernel_s 1e-06",
        "h200-sxm with hbm_bytes_per_s x 1.5, kernel_s 1e-06",
    ]


def test_a_changed_sibling_is_no_measured_card() -> None:
    """What was carried over to an H100 stays so where the change does not touch it."""
    op = ops.matmul("x", m=8, n=4096, k=4096, dtype="bf16")
    changed = prices("h100-sxm", ("links.nvlink.latency_s", 0.5))(op)
    assert changed == prices("h100-sxm")(op)
    assert changed.source == "carried"


@pytest.mark.parametrize(
    ("base", "figure", "says"),
    [
        ("h200-sxm", "", False), ("h200-sxm", "memory_bytes", False), ("h200-sxm", "hbm_bytes_per_s", True),
        ("h100-sxm", "", True), ("h100-sxm", "memory_bytes", True), ("h100-sxm", "hbm_bytes_per_s", True),
    ],
)  # fmt: skip
def test_prices_of_another_device_are_told_whatever_is_changed(base: str, figure: str, says: bool) -> None:
    device = {"base": base, "change": {figure: {"times": 1.1}}} if figure else base
    document = decode(random.Random(3)) | {"device": device}
    warnings = assemble(parse_scenario(document, "x"), "x").warnings
    assert any("carried over to" in text for text in warnings) == says


@slow
def test_a_change_that_no_price_depends_on_changes_nothing() -> None:
    """More memory, in the study that charges each launch by itself."""
    tiling: Document = {
        "name": "eager",
        "study": "tiling",
        "model": {"kind": "long_convolution", "layers": 2, "channels": 256, "block": "mlp"},
        "tokens": 64,
        "dtype": "fp32",
        "launching": "eager",
        "strategies": [{"kind": "lazy"}],
    }

    def total_s(device: Any) -> float:
        study = assemble(parse_scenario({**tiling, "device": device}, "x"), "x").study
        rows = study.run(lambda *_: None).rows
        return next(row.value for row in rows if row.metric == "total_s" and row.value is not None)

    more = {"base": "h200-sxm", "change": {"memory_bytes": {"times": 2.0}}}
    assert total_s(more) == total_s("h200-sxm")


@pytest.mark.parametrize("factor", [0.3, 0.01, 1e-6])
@slow
def test_memory_however_slow_breaks_no_law(factor: float) -> None:
    document = decode(random.Random(3)) | {"batch": 4, "context_tokens": 512}
    slower = {"base": "h200-sxm", "change": {"hbm_bytes_per_s": {"times": factor}}}
    assert took_s(document, slower) > took_s(document, "h200-sxm")


@slow
def test_a_list_of_devices_with_an_engine_is_repeated_by_its_resolved_scenario() -> None:
    given = serving(random.Random(1)) | {"device": ["h100-sxm", "h200-sxm"]}
    given["strategies"] = [{"kind": "continuous_batching", "engine": "vllm", "ranks": given["devices"]}]
    first = assemble(parse_scenario(given, "x"), "x")
    document = resolved(first.scenario)
    assert document["strategies"][0]["engine"].startswith("vllm-")
    again = assemble(parse_scenario(document, "x"), "x")
    assert first.study.run(lambda *_: None).rows == again.study.run(lambda *_: None).rows


BAD: Mapping[str, tuple[Any, str]] = {
    "a typo": ({"hbm_byte_per_s": 1e12}, "unknown figure 'hbm_byte_per_s'; did you mean 'hbm_bytes_per_s'?"),
    "a link": ({"links.nvlnk.latency_s": 1e-6}, "did you mean 'nvlink'?"),
    "several": ({"links.nvlink": 1.0}, "links.nvlink: is several figures"),
    "no figure": ({"links.nvlink.topology": 1.0}, "is no figure that a number can stand for"),
    "too far": ({"hbm_bytes_per_s.x": 1.0}, "hbm_bytes_per_s is one figure"),
    "zero": ({"hbm_bytes_per_s": 0.0}, "hbm_bytes_per_s"),
    "too large": ({"kernel_s": 5.0}, "kernel_s"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_device_can_be_changed_to_is_refused(case: str) -> None:
    change, says = BAD[case]
    with pytest.raises(InputError, match=r"^x: device: ") as raised:
        outcome_of([{"base": "h200-sxm", "change": change}, "h100-sxm"])
    assert says in str(raised.value)
