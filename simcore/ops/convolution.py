"""Ops of long-convolution models: the computations of each strategy of Flash Inference, and their work.

z_t = sum over i <= t of y_i * k_(t-i), for every layer, sequence and channel (Flash Inference, Equation 2).
With B sequences and c = layers * channels, an op from U inputs to V outputs does

    direct      2 B c U V                         flops
    FFT         B c (2 rfft(2U) + 6 (U + 1))      flops, with cached spectra of the taps
    rfft(N)     2.5 N log2(N)                     half of a complex transform (Cooley and Tukey 1965)

The order 2U is enough for a tile: the cyclic wrap does not touch the U wanted outputs (App. C; padding would
need an order of 4U, and without the cache there are three transforms instead of two).

Numbers of two bytes are stored as such and multiplied as fp32: these kernels run outside the matrix units.
An op that a framework runs as several kernels has them as its parts; a fused op has none.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2
from typing import Literal, get_args

from simcore.ops.op import DTYPE_BYTES, Dim, Formula, Op, Shape, Size, Work, placed, sum_of_parts

Implementation = Literal["conv", "flash_conv", "fft", "flash_fft"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
# Of one number, as of `simcore.ops.op.activation`.
ACTIVATION_FLOPS = 4.0
POSITION = Size("position")
INPUTS = Size("inputs")
OUTPUTS = Size("outputs")
# Coordinates of ops of launches that compute several positions: how many positions after that of its launch
# an op works; of the first op, how many the launch computes.
AHEAD, OF = "ahead", "of"


def _computed(dtype: str) -> str:
    return "fp32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["fp32"] else dtype


def _op(
    kind: str, dtype: str, formula: Formula, dimensions: Mapping[str, Dim], parts: tuple[Op, ...] = ()
) -> Op:
    shape: Shape = (*dimensions.items(), ("stored_bytes", int(DTYPE_BYTES[dtype])))
    return Op(kind, kind, shape, _computed(dtype), formula, parts=parts)


def _lanes(op: Op) -> int:
    """The number of independent convolutions: one for each layer, batch entry and channel."""
    return op["layers"] * op["batch"] * op["channels"]


def _taps(op: Op) -> int:
    return op["layers"] * op["channels"]


def _complex_bytes(op: Op) -> float:
    return 2.0 * DTYPE_BYTES[op.dtype]


def rfft_flops(order: int) -> float:
    """The flops of a real transform of this order.

    >>> rfft_flops(8)
    60.0
    """
    return 2.5 * order * log2(order)


# -- one token -------------------------------------------------------------------------------------


def _conv_row(op: Op) -> Work:
    lanes, inputs = _lanes(op), op["inputs"]
    return Work(2.0 * lanes * inputs, op["stored_bytes"] * (lanes * (inputs + 2.0) + _taps(op) * inputs))


def conv_row(*, layers: int, batch: int, channels: int, inputs: Dim, dtype: str) -> Op:
    """Lazy: the contributions of all `inputs` earlier positions to one output, added to it."""
    shape: dict[str, Dim] = {"layers": layers, "batch": batch, "channels": channels, "inputs": inputs}
    return _op("conv_row", dtype, _conv_row, shape)


def _conv_column(op: Op) -> Work:
    lanes, outputs = _lanes(op), op["outputs"]
    moved = lanes * (1.0 + 2.0 * outputs) + _taps(op) * outputs
    return Work(2.0 * lanes * outputs, op["stored_bytes"] * moved)


def conv_column(*, layers: int, batch: int, channels: int, outputs: Dim, dtype: str) -> Op:
    """Eager: the contributions of one position to all `outputs` later ones, which are updated in place."""
    shape: dict[str, Dim] = {"layers": layers, "batch": batch, "channels": channels, "outputs": outputs}
    return _op("conv_column", dtype, _conv_column, shape)


def _conv_cell(op: Op) -> Work:
    lanes = op["batch"] * op["channels"]
    return Work(2.0 * lanes, op["stored_bytes"] * (3.0 * lanes + op["channels"]))


def conv_cell(*, batch: int, channels: int, dtype: str) -> Op:
    """The red cell of Figure 1: the contribution of a position to itself, z_t += y_t * k_0, in one layer."""
    return _op("conv_cell", dtype, _conv_cell, {"batch": batch, "channels": channels})


def _elementwise(op: Op) -> Work:
    elements = op["rows"] * op["channels"]
    return Work(1.0 * elements, 3.0 * op["stored_bytes"] * elements)


def gate(*, rows: int, channels: int, dtype: str) -> Op:
    """z *= projection of the level below, over [rows, channels]: a gated block (section 2.3)."""
    return _op("gate", dtype, _elementwise, {"rows": rows, "channels": channels})


def next_input(*, rows: int, channels: int, dtype: str) -> Op:
    """The next token's embedding: the last layer's output plus noise (section 4)."""
    return _op("next_input", dtype, _elementwise, {"rows": rows, "channels": channels})


def _token_step(op: Op) -> Work:
    batch, d, layers, gated = op["batch"], op["channels"], op["layers"], op["gated"]
    weights = layers * d * d * (1 if gated else 4)
    # Cells; products; gates, or activations of 2 D hidden units; noise.
    elementwise = layers * d * (3.0 if gated else 2.0 + 2.0 * ACTIVATION_FLOPS) + d
    numbers = weights + layers * d + batch * d * (2.0 * layers + 3.0)
    return Work(batch * (2.0 * weights + elementwise), op["stored_bytes"] * numbers)


def token_step(*, layers: int, batch: int, channels: int, block: str, dtype: str) -> Op:
    """One position through all layers and the next input as one kernel: red cells, blocks ("mlp" or "gate")
    and noise. Weights, taps, sums, outputs and noise are moved once; what layers hand on does not count."""
    shape: dict[str, Dim] = {"layers": layers, "batch": batch, "channels": channels}
    return _op("token_step", dtype, _token_step, {**shape, "gated": int(block == "gate")})


# -- tiles -----------------------------------------------------------------------------------------


def _flash_conv(op: Op) -> Work:
    lanes, side, outputs = _lanes(op), op["side"], op["outputs"]
    moved = lanes * (side + 2.0 * outputs) + _taps(op) * (side + outputs)
    return Work(2.0 * lanes * side * outputs, op["stored_bytes"] * moved)


def _padded(op: Op) -> int:
    """The positions that a plain convolution reads for its outputs: the inputs, then zeros."""
    return op["side"] + 2 * op["outputs"] - 2


def _pad(op: Op) -> Work:
    return Work(0.0, op["stored_bytes"] * _lanes(op) * (op["side"] + _padded(op)))


def _depthwise(op: Op) -> Work:
    lanes, outputs = _lanes(op), op["outputs"]
    taps = op["side"] + outputs - 1
    moved = lanes * (_padded(op) + outputs) + _taps(op) * taps
    return Work(2.0 * lanes * taps * outputs, op["stored_bytes"] * moved)


def _accumulate(op: Op) -> Work:
    return Work(1.0 * _lanes(op) * op["outputs"], 3.0 * op["stored_bytes"] * _lanes(op) * op["outputs"])


def _accumulate_wide(op: Op) -> Work:
    """The result of a transform is read in the format in which it was computed."""
    lanes, outputs = _lanes(op), op["outputs"]
    return Work(1.0 * lanes * outputs, lanes * outputs * (2.0 * op["stored_bytes"] + DTYPE_BYTES[op.dtype]))


def _rfft(op: Op) -> Work:
    order = 2 * op["side"]
    moved = op["stored_bytes"] * op["side"] + _complex_bytes(op) * (op["side"] + 1.0)
    return Work(_lanes(op) * rfft_flops(order), _lanes(op) * moved)


def _spectra(op: Op) -> Work:
    bins = op["side"] + 1.0
    moved = _complex_bytes(op) * bins * (2.0 * _lanes(op) + _taps(op))
    return Work(6.0 * _lanes(op) * bins, moved)


def _irfft(op: Op) -> Work:
    order = 2 * op["side"]
    moved = _complex_bytes(op) * (op["side"] + 1.0) + DTYPE_BYTES[op.dtype] * order
    return Work(_lanes(op) * rfft_flops(order), _lanes(op) * moved)


def _flash_fft(op: Op) -> Work:
    lanes, side, outputs = _lanes(op), op["side"], op["outputs"]
    flops = lanes * (2.0 * rfft_flops(2 * side) + 6.0 * (side + 1.0))
    moved = op["stored_bytes"] * lanes * (side + 2.0 * outputs)
    return Work(flops, moved + _complex_bytes(op) * _taps(op) * (side + 1.0))


# A plain convolution also multiplies the zeros: about twice the work of a fused one.
_STEPS: dict[str, tuple[tuple[str, Formula], ...]] = {
    "conv": (("pad", _pad), ("depthwise_conv", _depthwise), ("accumulate", _accumulate)),
    "fft": (
        ("rfft", _rfft),
        ("spectrum_product", _spectra),
        ("irfft", _irfft),
        ("accumulate", _accumulate_wide),
    ),
}
_FUSED: dict[str, Formula] = {"flash_conv": _flash_conv, "flash_fft": _flash_fft}


def tile(
    implementation: Implementation,
    *,
    layers: int,
    batch: int,
    channels: int,
    side: int,
    outputs: int,
    dtype: str,
) -> Op:
    """The gray tile: the contributions of the last `side` positions to the next `outputs` (at most `side`),
    added in place (Algorithm 1, line 9), by one of the implementations of section 4.1.

    conv, fft: separate kernels of a framework, with intermediate results in device memory.
    flash_conv, flash_fft: one kernel that moves its operands once. Kind: tile_<implementation>.
    """
    shape: dict[str, Dim] = {
        "layers": layers,
        "batch": batch,
        "channels": channels,
        "side": side,
        "outputs": outputs,
    }
    kind = f"tile_{implementation}"
    if implementation in _FUSED:
        return _op(kind, dtype, _FUSED[implementation], shape)
    parts = tuple(_op(name, dtype, formula, shape) for name, formula in _STEPS[implementation])
    return _op(kind, dtype, sum_of_parts, shape, parts)


# -- a stretch of inputs at once ---------------------------------------------------------------------


def span_order(inputs: int, outputs: int) -> int:
    """The order of the transform from `inputs` to `outputs` positions without a wrap.

    >>> span_order(3, 6)
    8
    """
    return 1 << max(1, ceil(log2(max(2, inputs + outputs - 1))))


def _conv_span(op: Op, filter_taps: int) -> Work:
    lanes, taps, order = _lanes(op), _taps(op), span_order(op["inputs"], op["outputs"])
    bins = order / 2 + 1.0
    flops = (2.0 * lanes + taps) * rfft_flops(order) + 6.0 * lanes * bins
    real = op["stored_bytes"] * (lanes * (op["inputs"] + 2.0 * op["outputs"]) + taps * filter_taps)
    # Spectra are written and read between the transforms; the inverse also writes its whole order.
    spectra = _complex_bytes(op) * bins * (4.0 * lanes + 2.0 * taps)
    return Work(flops, real + spectra + DTYPE_BYTES[op.dtype] * order * lanes)


def _conv_prefill(op: Op) -> Work:
    return _conv_span(op, op["outputs"])


def _conv_carry(op: Op) -> Work:
    return _conv_span(op, op["inputs"] + op["outputs"] - 1)


def conv_prefill(*, batch: int, channels: int, inputs: int, outputs: int, dtype: str) -> Op:
    """The contributions of a prompt of `inputs` positions to the first `outputs`, in one layer (section
    2.3.1)."""
    shape: dict[str, Dim] = {
        "layers": 1,
        "batch": batch,
        "channels": channels,
        "inputs": inputs,
        "outputs": outputs,
    }
    return _op("conv_prefill", dtype, _conv_prefill, shape)


def conv_carry(*, batch: int, channels: int, inputs: int, outputs: int, dtype: str) -> Op:
    """The largest tile of one layer with half storage: its outputs replace its inputs (App. D)."""
    shape: dict[str, Dim] = {
        "layers": 1,
        "batch": batch,
        "channels": channels,
        "inputs": inputs,
        "outputs": outputs,
    }
    return _op("conv_carry", dtype, _conv_carry, shape)


def _nothing(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def slot_shift(*, layers: int) -> Op:
    """After the carry, the buffer of level l - 1 holds level l: the buffers are renamed (App. D)."""
    return Op("slot_shift", "slot_shift", (("layers", layers),), "fp32", _nothing)


# -- filters that depend on data ---------------------------------------------------------------------


def _filter_tap(op: Op) -> Work:
    elements = op["batch"] * op["channels"]
    return Work(3.0 * elements, op["stored_bytes"] * (2.0 * elements + op["channels"]))


def filter_tap(*, batch: int, channels: int, dtype: str) -> Op:
    """The next tap of a filter from its projection p: k_t = h_t (1 + tanh p_t), one layer (App. B leaves the
    formula open; this one is causal, and its h decays as a plain filter does)."""
    return _op("filter_tap", dtype, _filter_tap, {"batch": batch, "channels": channels})


def _relaxed_cell(op: Op) -> Work:
    lanes = op["batch"] * op["channels"]
    return Work(4.0 * lanes, 6.0 * op["stored_bytes"] * lanes)


def relaxed_cell(*, batch: int, channels: int, dtype: str) -> Op:
    """z_t += y_t * k_0 + y_0 * k_t in one layer (Algorithm 3, line 8)."""
    return _op("relaxed_cell", dtype, _relaxed_cell, {"batch": batch, "channels": channels})


def _relaxed_tile(op: Op) -> Work:
    lanes, side, order = _lanes(op), op["side"], 2 * op["side"]
    transforms = 2.0 * op["products"] + 1.0
    flops = lanes * (transforms * rfft_flops(order) + 6.0 * op["products"] * (side + 1.0))
    moved = op["stored_bytes"] * lanes * (2.0 * op["products"] * side + 2.0 * op["outputs"])
    return Work(flops, moved)


def relaxed_tile(
    *, layers: int, batch: int, channels: int, side: int, products: int, outputs: int, dtype: str
) -> Op:
    """Untruncated convolutions of `side` activations with `side` taps, added to the next `outputs` (at most
    2 side - 1) positions (Algorithm 3, lines 11 to 15; van der Hoeven 1997). `products`: 1 if activations and
    taps have the same positions, else 2. Their spectra are added before the one inverse transform."""
    shape: dict[str, Dim] = {
        "layers": layers,
        "batch": batch,
        "channels": channels,
        "side": side,
        "products": products,
    }
    return _op("relaxed_tile", dtype, _relaxed_tile, {**shape, "outputs": outputs})


# -- any mixer ---------------------------------------------------------------------------------------


def _generic_cell(op: Op) -> Work:
    elements, separable = op["batch"] * op["channels"] * op["state"], op["separable"]
    # Linear attention first projects the position onto a query and a key; a convolution reads a tap.
    weights = op["channels"] * (2 * op["state"] if separable else 1)
    flops = (2.0 + 4.0 * separable) * elements
    return Work(flops, op["stored_bytes"] * (3.0 * elements + weights))


def generic_cell(*, batch: int, channels: int, state: int, separable: bool, dtype: str) -> Op:
    """x_t = agg(x_t, cont(y, t, t)) in one layer; x has `state` numbers per channel (Algorithm 2, line 7).
    `separable` as in `generic_tile`."""
    shape: dict[str, Dim] = {"batch": batch, "channels": channels, "state": state}
    return _op("generic_cell", dtype, _generic_cell, {**shape, "separable": int(separable)})


def _generic_read(op: Op) -> Work:
    elements = op["batch"] * op["channels"] * op["state"]
    return Work(2.0 * elements, op["stored_bytes"] * (elements + op["batch"] * op["channels"]))


def generic_read(*, batch: int, channels: int, state: int, dtype: str) -> Op:
    """z_t = read(x_t) in one layer (Algorithm 2, line 8)."""
    return _op("generic_read", dtype, _generic_read, {"batch": batch, "channels": channels, "state": state})


def _generic_tile(op: Op) -> Work:
    elements, side, outputs = _lanes(op) * op["state"], op["side"], op["outputs"]
    moved = _lanes(op) * side + 2.0 * elements * outputs
    if op["separable"]:
        # The keys of all inputs are projected and summed up, and the sum is spread.
        return Work(
            elements * (4.0 * side + 2.0 * outputs), op["stored_bytes"] * (moved + _taps(op) * op["state"])
        )
    return Work(2.0 * elements * side * outputs, op["stored_bytes"] * (moved + _taps(op) * (side + outputs)))


def generic_tile(
    *,
    layers: int,
    batch: int,
    channels: int,
    state: int,
    separable: bool,
    side: int,
    outputs: int,
    dtype: str,
) -> Op:
    """The gray tile of any mixer (Algorithm 2, line 11). `separable`: contributions to later outputs differ
    only by a factor of the distance, so one sum is spread over them (linear attention)."""
    shape: dict[str, Dim] = {"layers": layers, "batch": batch, "channels": channels, "state": state}
    shape |= {"separable": int(separable), "side": side, "outputs": outputs}
    return _op("generic_tile", dtype, _generic_tile, shape)


MIXER_KINDS = frozenset(
    {f"tile_{name}" for name in IMPLEMENTATIONS}
    | {"conv_row", "conv_column", "conv_cell", "conv_prefill", "conv_carry", "slot_shift"}
    | {"relaxed_cell", "relaxed_tile", "filter_tap", "generic_cell", "generic_read", "generic_tile"}
)
# Kinds whose kernels may read their position in the device's memory; one captured graph serves all positions.
PLACED_KINDS = frozenset(
    {f"tile_{name}" for name in IMPLEMENTATIONS} | {"conv_row", "conv_column", "conv_cell", "token_step"}
)


# By how much the sizes of an op differ from those of the same op one position earlier.
GROWTH: Mapping[str, int] = {POSITION.name: 1, INPUTS.name: 1, OUTPUTS.name: -1}


def ahead(op: Op, positions: int) -> Op:
    """The op of a launch that computes several positions, so many positions after that of the launch."""
    moved = op.later({name: by * positions for name, by in GROWTH.items()})
    return replace(moved, place=(*moved.place, (AHEAD, positions)))


def beginning(op: Op, positions: int) -> Op:
    """The op with which a launch that computes so many positions begins."""
    return replace(op, place=(*op.place, (OF, positions)))


def at_layer(op: Op, layer: int, position: Dim = POSITION) -> Op:
    """An op at one layer (counted from 1; 0 is the input) and a position (counted from 0)."""
    return placed(op, layer=layer, position=position)


def named(op: Op, name: str) -> Op:
    """The same op with another name."""
    return replace(op, name=name)
