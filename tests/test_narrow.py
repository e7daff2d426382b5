"""Prices of products of narrow weights that nobody measured, and decode latency of quantized checkpoints."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt

import pytest

from simcore.devices.fitted import FitRow, FittedProfile
from simcore.devices.narrow import price_narrow
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import config_from_hugging_face
from simcore.models.number_formats import number_formats
from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, WEIGHT_ONLY_BYTES, Op, Price, Pricer
from tests.checkpoints import BY_NAME, CHECKPOINTS, Checkpoint
from tests.thorough import first

H200, A100 = load_device("h200-sxm"), load_device("a100-sxm-80gb")
FLOOR = roofline(H200)
FP8 = BY_NAME["RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"]
AWQ = BY_NAME["hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"]


def known(op: Op) -> Price | None:
    """Products of bf16 and fp8: a microsecond, and as long as the roofline says."""
    if op.dtype not in ("bf16", "fp8"):
        return None
    seconds = 1e-6 + FLOOR(op).seconds
    return Price(seconds, 0.9 * seconds, 1.1 * seconds, "measured", "a table")


def product(dtype: str, m: int = 1, n: int = 4096, k: int = 4096) -> Op:
    return ops.matmul("x", m=m, n=n, k=k, dtype=dtype)


@pytest.mark.parametrize("dtype", sorted(WEIGHT_ONLY_BYTES))
def test_few_rows_save_part_of_the_bytes(dtype: str) -> None:
    """The middle between bf16 over as many columns, and over as many bytes (in whole tiles of columns)."""
    found = price_narrow(product(dtype), known, FLOOR)
    columns = -(-4096 * DTYPE_BYTES[dtype] / 2 // 64) * 64
    whole, few = known(product("bf16")), known(product("bf16", n=round(columns)))
    assert found is not None
    assert whole is not None
    assert few is not None
    assert found.seconds == pytest.approx(sqrt(whole.seconds * few.seconds), rel=0.02)
    assert found.low_s == pytest.approx(few.low_s, rel=0.02)
    assert found.high_s == pytest.approx(whole.high_s)
    assert found.source == "extrapolated"


def test_many_rows_gain_nothing() -> None:
    """They are bound by arithmetic, which is that of bf16."""
    whole, found = known(product("bf16", m=4096)), price_narrow(product("w4a16_g128", m=4096), known, FLOOR)
    assert whole is not None
    assert found is not None
    assert found.seconds == pytest.approx(whole.seconds)


def test_int8_costs_what_fp8_does_where_both_have_one_rate() -> None:
    found, fp8 = price_narrow(product("int8"), known, FLOOR), known(product("fp8"))
    assert found is not None
    assert fp8 is not None
    assert (found.seconds, found.source) == (fp8.seconds, "extrapolated")
    slower = replace(H200, flops_per_s={**H200.flops_per_s, "int8": 1e12})
    other = price_narrow(product("int8"), known, roofline(slower))
    assert other is not None
    assert other.seconds > fp8.seconds


def test_scales_of_blocks_cost_more_than_one_scale() -> None:
    found, fp8, bf16 = (
        price_narrow(product("fp8_b128"), known, FLOOR),
        known(product("fp8")),
        known(product("bf16")),
    )
    assert found is not None
    assert fp8 is not None
    assert bf16 is not None
    assert found.seconds == pytest.approx(sqrt(fp8.seconds * bf16.seconds), rel=1e-3)
    assert found.high_s == bf16.high_s


@pytest.mark.parametrize("op", [product("bf16"), ops.norm("x", tokens=1, hidden=8, dtype="fp8")])
def test_what_is_not_narrow_is_left_alone(op: Op) -> None:
    assert price_narrow(op, known, FLOOR) is None


def test_where_nothing_is_known_nothing_is_said() -> None:
    nothing: Callable[[Op], None] = lambda op: None  # noqa: E731
    assert price_narrow(product("w4a16"), nothing, FLOOR) is None


def test_prices_of_a_card_that_nobody_measured_are_called_so() -> None:
    price = pricer(A100)(product("w4a16_g128_zp"))
    assert price.source == "roofline"
    assert roofline(A100)(product("w4a16_g128_zp")).seconds <= price.low_s
    # By products of bf16 on the same roofline: over as many columns, and over as many bytes.
    whole, few = pricer(A100)(product("bf16")), pricer(A100)(product("bf16", n=1024))
    plain = pricer(A100)(product("w4a16"))
    assert plain.seconds == pytest.approx(sqrt(whole.seconds * few.seconds))
    assert plain.high_s == whole.high_s


def test_products_of_which_a_profile_has_none_are_priced_by_the_roofline_of_their_own() -> None:
    norms = FitRow("norm", 1e-6, 0.5, 0.9, 1.1, 3, 0.0, 1.0, "by hand")
    profile = FittedProfile("toy", "toy", "by hand", "h200-sxm", "fitted", (norms,), {})
    own = H200.kernel_s + FLOOR(product("w4a16")).seconds / H200.hbm_efficiency.value
    assert pricer(H200, profile=profile)(product("w4a16")).seconds == pytest.approx(own)


# -- whole models ----------------------------------------------------------------------------------


@cache
def h200() -> Pricer:
    return pricer(H200, profile=load_profile("h200-sxm", "local"))


def latency_s(checkpoint: Checkpoint, price: Pricer, batch: int, context: int, plain: bool) -> float:
    """Seconds a token, by ops: of the checkpoint as it is, or as if it were in bf16."""
    config = config_from_hugging_face("x", checkpoint.config)
    dtypes = Dtypes() if plain else number_formats(None, {}, config)
    model = Decoder(config, batch=batch, dtypes=dtypes)
    return sum(price(op.at({"context": context})).seconds for op in model.token_step.ops)


CONTEXTS = [random.Random(7).randint(1, 131_072) for _ in range(4)]


@pytest.mark.parametrize("context", first(3, [1, *CONTEXTS, 1024]))
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: c.name)
def test_a_token_takes_between_its_roofline_and_bf16(
    checkpoint: Checkpoint, batch: int, context: int
) -> None:
    if batch > 8:
        context = min(context, 8192)
    least = latency_s(checkpoint, floor_price, batch, context, plain=False)
    taken = latency_s(checkpoint, h200(), batch, context, plain=False)
    assert least < taken < latency_s(checkpoint, h200(), batch, context, plain=True)


def floor_price(op: Op) -> Price:
    seconds = FLOOR(op).seconds
    return Price(seconds, seconds, seconds, "roofline", "")


def test_a_tensor_parallel_rank_gains_too() -> None:
    config = config_from_hugging_face("x", AWQ.config)
    for ranks in (2, 8):
        narrow, wide = (
            Decoder(config, ranks=ranks, dtypes=dtypes).token_step.ops
            for dtypes in (number_formats(None, {}, config), Dtypes())
        )
        seconds = [sum(h200()(op.at({"context": 4096})).seconds for op in part) for part in (narrow, wide)]
        assert seconds[0] < seconds[1]


def test_fp8_is_measured_and_4_bits_are_not() -> None:
    """Of what the products of a token take, the sources."""

    def sources(checkpoint: Checkpoint) -> set[str]:
        config = config_from_hugging_face("x", checkpoint.config)
        model = Decoder(config, dtypes=number_formats(None, {}, config))
        return {h200()(op).source for op in model.between.ops if op.kind == "matmul"}

    assert sources(AWQ) == {"extrapolated"}
    assert "extrapolated" not in sources(FP8)
