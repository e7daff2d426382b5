"""Bytes of a number in each format, counted over a whole tile with everything that is stored beside it."""

import pytest

from simcore.ops.op import DTYPE_BYTES, MULTIPLIED_AS, WEIGHT_ONLY_BYTES

# Bits of a number, numbers that share something, bits of what they share.
TILES = {
    "fp64": (64, 1, 0),
    "fp32": (32, 1, 0),
    "bf16": (16, 1, 0),
    "fp16": (16, 1, 0),
    "fp8": (8, 1, 0),
    "int8": (8, 1, 0),
    "int4": (4, 1, 0),
    # An exponent of a byte for 16 numbers.
    "bfp8": (8, 16, 8),
    "bfp4": (4, 16, 8),
    # A scale of fp32 for a block of 128 by 128.
    "fp8_b128": (8, 128 * 128, 32),
    **{f"w{bits}a16": (bits, 1, 0) for bits in (4, 8)},
    # A scale of 16 bits for a group, and a zero point as wide as a weight.
    **{f"w{b}a16_g{g}": (b, g, 16) for b in (4, 8) for g in (32, 64, 128)},
    **{f"w{b}a16_g{g}_zp": (b, g, 16 + b) for b in (4, 8) for g in (32, 64, 128)},
}


def test_every_format_is_counted_here() -> None:
    assert TILES.keys() == DTYPE_BYTES.keys()


@pytest.mark.parametrize("name", TILES)
def test_bytes_are_those_of_a_whole_tile_by_its_numbers(name: str) -> None:
    bits, numbers, shared = TILES[name]
    assert DTYPE_BYTES[name] == (numbers * bits + shared) / 8 / numbers


def test_weights_alone_are_multiplied_as_bf16_and_blocks_of_fp8_as_fp8() -> None:
    assert {"fp8_b128": "fp8", **dict.fromkeys(WEIGHT_ONLY_BYTES, "bf16")} == MULTIPLIED_AS
    assert all(name.startswith("w") for name in WEIGHT_ONLY_BYTES)
