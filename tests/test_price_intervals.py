"""Both ends of a price: each is the price that the same rule gives where all that it goes by is at that end.

Prices of tables are held to figures of five rows written down here, so that every end is worked by hand.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import simcore
from simcore.devices.price import pricer, roofline, summed
from simcore.devices.profile import Assumed, Profile, load_profile
from simcore.devices.spec import DeviceSpec, load_device
from simcore.input.files import InputError
from simcore.ops import op as ops
from simcore.ops.op import Op, Price, Work
from tests.thorough import slow

A100, H200 = load_device("a100-sxm-80gb"), load_device("h200-sxm")
FLOVER = load_profile("a100-sxm-80gb", "flover-gptj")
TABLE3 = load_profile("h100-sxm", "alspec-table3")
US = 1e-6


def at_efficiency(spec: DeviceSpec, end: str) -> DeviceSpec:
    """The device where kernels reach the low or high end of their share of the datasheet, always."""

    def fixed(name: str) -> object:
        one = getattr(spec, name)
        share = getattr(one, end)
        return replace(one, value=share, low=share, high=share)

    return replace(spec, flops_efficiency=fixed("flops_efficiency"), hbm_efficiency=fixed("hbm_efficiency"))


@pytest.mark.parametrize(
    "op",
    [
        ops.matmul("reads", m=1, n=4096, k=4096, dtype="bf16"),
        ops.matmul("computes", m=8192, n=4096, k=4096, dtype="bf16"),
        ops.norm("small", tokens=1, hidden=64, dtype="bf16"),
    ],
    ids=lambda op: op.name,
)
def test_ends_of_a_roofline_price_are_prices_at_the_ends_of_efficiency(op: Op) -> None:
    found = pricer(H200)(op)
    assert found.low_s == pricer(at_efficiency(H200, "high"))(op).seconds
    assert found.high_s == pricer(at_efficiency(H200, "low"))(op).seconds
    assert found.low_s < found.seconds < found.high_s


def all_reduce(elements: int) -> Op:
    return ops.all_reduce("sum", elements=elements, ranks=2, axis="tensor", dtype="bf16")


@pytest.mark.parametrize("error", [0.1, 0.4])
def test_a_collective_is_off_by_its_links_error_either_way_but_never_below_the_wire(error: float) -> None:
    link = replace(H200.link(), relative_error=error)
    small, large = (pricer(H200, link=link)(all_reduce(n)) for n in (64, 2**28))
    assert (small.low_s, small.high_s) == pytest.approx(
        ((1 - error) * small.seconds, (1 + error) * small.seconds)
    )
    floor_s = roofline(H200, link=link)(all_reduce(2**28)).seconds
    assert large.low_s == pytest.approx(max(floor_s, (1 - error) * large.seconds))
    # Of what the wire bounds all but whole, any less would be faster than it.
    assert large.low_s == floor_s < large.seconds


# -- tables ----------------------------------------------------------------------------------------------


def iteration(sequences: int, hbm_bytes: float = 1e6) -> Op:
    shape = (("sequences", sequences), ("tokens", sequences))
    return Op("iteration", "iteration", shape, "fp16", lambda op: Work(0.0, hbm_bytes))


def table(*rows: tuple[int, float, float]) -> Profile:
    """Whole iterations of (sequences, microseconds, half a digit of them)."""
    first = FLOVER.rows[0]
    return replace(
        FLOVER,
        rows=tuple(
            replace(first, sequences=n, nanoseconds=1e3 * us, plus_minus_ns=1e3 * half, row=i + 1)
            for i, (n, us, half) in enumerate(rows)
        ),
    )


def ends_us(price: Price) -> tuple[float, float, float]:
    return price.low_s / US, price.seconds / US, price.high_s / US


def test_a_printed_time_is_known_to_half_its_last_digit_and_is_not_negative() -> None:
    price = pricer(A100, profile=table((4, 100.0, 5.0), (8, 3.0, 5.0)))
    assert ends_us(price(iteration(4))) == pytest.approx((95.0, 100.0, 105.0))
    assert ends_us(price(iteration(8, 0.0))) == pytest.approx((0.0, 3.0, 8.0))


def test_between_two_rows_every_end_is_a_line() -> None:
    price = pricer(A100, profile=table((4, 100.0, 5.0), (8, 140.0, 20.0)))
    for n, share in ((5, 0.25), (6, 0.5), (7, 0.75)):
        expected = 95 + share * 25, 100 + share * 40, 105 + share * 55
        assert ends_us(price(iteration(n))) == pytest.approx(expected)


def test_beyond_two_rows_the_ends_are_the_steepest_and_the_flattest_line_through_theirs() -> None:
    """The flattest goes from the high end of the first row through the low end of the last, and so on."""
    price = pricer(A100, profile=table((4, 100.0, 2.0), (8, 140.0, 3.0)))
    steps = (12 - 8) / (8 - 4)
    flattest = 137 + steps * (137 - 102)
    steepest = 143 + steps * (143 - 98)
    assert ends_us(price(iteration(12))) == pytest.approx((flattest, 180.0, steepest))


def test_beyond_a_single_row_anything_from_its_time_to_one_in_proportion() -> None:
    price = pricer(A100, profile=table((4, 100.0, 2.0)))
    assert ends_us(price(iteration(10))) == pytest.approx((98.0, 100.0, 102.0 * 10 / 4))


def test_fewer_sequences_take_at_least_what_the_datasheet_allows() -> None:
    """Also where the row's own low end is below that."""
    read = 1e-6 * A100.hbm_bytes_per_s
    price = pricer(A100, profile=table((4, 100.0, 2.0)))
    assert ends_us(price(iteration(2, 30 * read))) == pytest.approx((30.0, 100.0, 102.0))
    assert ends_us(price(iteration(2, 99 * read))) == pytest.approx((99.0, 100.0, 102.0))


def test_what_the_memory_bounds_is_no_faster_at_any_end() -> None:
    read = 1e-6 * A100.hbm_bytes_per_s
    price = pricer(A100, profile=table((4, 100.0, 2.0), (8, 140.0, 3.0)))
    assert ends_us(price(iteration(12, 175 * read))) == pytest.approx((175.0, 180.0, 188.0))


def test_beyond_the_contexts_of_a_table_the_ends_are_those_of_all_combinations() -> None:
    """The nearest time at either end of its rounding, and the memory's share at any of its three."""
    row = next(row for row in TABLE3.rows if row.op == "attention")
    rows = tuple(replace(row, context_tokens=c, nanoseconds=ns, plus_minus_ns=400.0, row=i + 1)
                 for i, (c, ns) in enumerate(((1024, 20e3), (4096, 30e3))))  # fmt: skip
    spec = load_device("h100-sxm")

    def attention(context: int) -> Op:
        return ops.decode_attention(
            batch=1, q_heads=8, kv_heads=2, head_dim=128, context=context, dtype="bf16"
        )

    price = pricer(spec, profile=replace(TABLE3, rows=rows), ranks=row.ranks)
    far, near = attention(65536), attention(4096)
    shift_s = (far.work.hbm_bytes - near.work.hbm_bytes) / spec.hbm_bytes_per_s
    shares = spec.hbm_efficiency.low, spec.hbm_efficiency.value, spec.hbm_efficiency.high
    every = [30e-6 + off + shift_s / share for off in (-4e-7, 0.0, 4e-7) for share in shares]
    found = price(far)
    assert (found.low_s, found.high_s) == pytest.approx((min(every), max(every)))
    assert found.seconds == pytest.approx(30e-6 + shift_s / spec.hbm_efficiency.value)
    # Below the smallest context, too: less memory to read, but no less than its floor.
    less = price(attention(512))
    assert roofline(spec)(attention(512)).seconds <= less.low_s < less.seconds < 20e-6


# -- early parts and sums --------------------------------------------------------------------------------


def speculative(context: int = 8192) -> Op:
    return ops.speculative_attention(
        batch=1, q_heads=8, kv_heads=2, head_dim=128, context=context, chunk=256, dtype="bf16"
    )


def test_a_whole_is_as_far_off_as_its_early_part_where_that_is_trusted_less() -> None:
    """Printed to the digit, its early part by the datasheet: its ends are scaled to the whole."""
    row = replace(TABLE3.rows[0], op="speculative_attention", context_tokens=8192, nanoseconds=50e3,
                  plus_minus_ns=0.0)  # fmt: skip
    spec = load_device("h100-sxm")
    plain = replace(TABLE3, rows=(row,), assumed={})
    whole = pricer(spec, profile=plain, ranks=row.ranks)(speculative())
    early = pricer(spec)(ops.early_part(speculative()))
    assert whole.source == early.source == "roofline"
    assert whole.early_s == early.seconds < whole.seconds
    scale = 50e-6 / early.seconds
    assert (whole.low_s, whole.high_s) == pytest.approx((early.low_s * scale, early.high_s * scale))
    assert whole.low_s < whole.seconds < whole.high_s


def test_a_whole_keeps_its_own_ends_where_its_early_part_is_trusted_as_much() -> None:
    """Both printed, the early part roughly."""
    row = replace(TABLE3.rows[0], op="speculative_attention", context_tokens=8192, nanoseconds=50e3,
                  plus_minus_ns=100.0)  # fmt: skip
    early = replace(
        row, op="decode_attention", context_tokens=512, nanoseconds=20e3, plus_minus_ns=9e3, row=2
    )
    plain = replace(TABLE3, rows=(row, early), assumed={})
    found = pricer(load_device("h100-sxm"), profile=plain, ranks=row.ranks)(speculative())
    assert ends_us(found) == pytest.approx((49.9, 50.0, 50.1))
    assert found.source == "published"
    assert found.early_s == pytest.approx(20e-6)


def test_an_early_part_may_take_no_time_at_all() -> None:
    row = replace(TABLE3.rows[0], op="speculative_attention", context_tokens=8192, nanoseconds=50e3,
                  plus_minus_ns=100.0)  # fmt: skip
    nothing = {"decode_attention": Assumed(0.0, "for the test")}
    profile = replace(TABLE3, rows=(row,), assumed=nothing)
    found = pricer(load_device("h100-sxm"), profile=profile, ranks=row.ranks)(speculative())
    assert (found.early_s, found.source) == (0.0, "assumed")
    assert ends_us(found) == pytest.approx((0.0, 50.0, 50.1))


def test_a_printed_time_below_what_the_datasheet_allows_is_refused() -> None:
    """Except one that is assumed."""
    spec = load_device("h100-sxm")
    least_s = roofline(spec)(speculative()).seconds
    for share, refused in ((0.99, True), (1.01, False)):
        row = replace(TABLE3.rows[0], op="speculative_attention", context_tokens=8192,
                      nanoseconds=1e9 * share * least_s)  # fmt: skip
        price = pricer(spec, profile=replace(TABLE3, rows=(row,)), ranks=row.ranks)
        if refused:
            with pytest.raises(InputError, match="at least by its datasheet"):
                price(speculative())
        else:
            assert price(speculative()).seconds == pytest.approx(share * least_s)
    assumed = {"speculative_attention": Assumed(least_s / 2, "for the test")}
    other = replace(TABLE3.rows[0], op="norm", context_tokens=None)
    price = pricer(spec, profile=replace(TABLE3, rows=(other,), assumed=assumed), ranks=other.ranks)
    assert price(speculative()).seconds == pytest.approx(least_s / 2)


def test_an_early_part_that_is_assumed_is_no_longer_than_the_whole() -> None:
    spec = load_device("h100-sxm")
    for seconds in (1e-6, 1.0):
        assumed = {"early_part": Assumed(seconds, "for the test")}
        found = pricer(spec, profile=replace(TABLE3, assumed=assumed), ranks=4)(speculative())
        assert found.early_s == min(seconds, found.seconds)


def test_a_sum_has_the_sums_of_ends_and_the_first_early_part() -> None:
    parts = [
        Price(1.0, 0.5, 3.0, "measured", "a"),
        Price(2.0, 1.0, 2.5, "roofline", "b", early_s=0.75),
        Price(4.0, 4.0, 5.0, "interpolated", "c", early_s=0.25),
    ]
    found = summed(parts)
    assert (found.low_s, found.seconds, found.high_s) == (5.5, 7.0, 10.5)
    assert found.early_s == 1.75
    assert found.source == "roofline"
    assert summed(parts[:1]).early_s is None
    # What one of its parts reads from a cache bounds the sum no more.
    assert not found.cached
    assert summed([*parts, replace(parts[0], cached=True)]).cached


def test_a_row_for_all_contexts_is_no_faster_than_the_datasheet_at_a_long_one() -> None:
    read = 1e-6 * A100.hbm_bytes_per_s
    price = pricer(A100, profile=table((4, 100.0, 2.0), (8, 140.0, 3.0)))
    for sequences in (2, 4, 6, 8):
        found = price(iteration(sequences, 200 * read))
        assert ends_us(found) == pytest.approx((200.0, 200.0, 200.0))
        assert found.source == "extrapolated"
    assert ends_us(price(iteration(4, 101 * read))) == pytest.approx((101.0, 101.0, 102.0))
    assert price(iteration(4, 99 * read)).source == "published"


@slow
def test_a_burst_that_comes_to_such_contexts_keeps_the_laws() -> None:
    """Flover's profile, 32 sequences whose contexts grow past those that its iterations are averages of."""
    path = Path(__file__).resolve().parents[1] / "scenarios/papers/flover_fig6.yaml"
    settings = ["workload.requests=40", "workload.output_tokens={kind: constant, value: 2000}", "replicas=1"]
    result = simcore.run(path, settings=[*settings, "workload.arrivals.interval_s=0.01"], jobs=1)
    assert result.outcome.sources["extrapolated"] > 0.0
