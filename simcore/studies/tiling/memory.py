"""Peak device memory of a generation, with its storage options.

    activations   (M + 1) B n D        n = L, or the half that is kept (App. D)
    filters       M L D, per sequence if they depend on data
    spectra       M D (U + 1) complex  for each side U that is computed by FFT: cached (App. C)
    flipped       M D 2U               for each side U of "conv", whose kernel correlates (section 4.1)
    temporaries   of the largest tile: of all layers at once, or of one (App. E); of the prompt, of the carry

A fused kernel keeps intermediate results on the chip. Transforms of two-byte numbers are in fp32.
"""

from dataclasses import dataclass

from simcore.models.long_convolution import LongConvolution, half_length
from simcore.ops.convolution import conv_carry, conv_prefill, span_order
from simcore.ops.op import DTYPE_BYTES, Op
from simcore.studies.tiling.implementations import sides


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by use; `temporaries` at their peak."""

    activations: float
    filters: float
    weights: float
    cached: float
    temporaries: float

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.activations + self.filters + self.weights + self.cached + self.temporaries


def memory(
    model: LongConvolution,
    *,
    fractal: bool,
    parallel: bool = True,
    half_storage: bool = False,
    sequential_from: int | None = None,
) -> Memory:
    """Returns the memory of a generation; `fractal`: whether it has Algorithm 1's tiles, by `model.tiles`."""
    half = model.prompt + half_length(model.generated)
    kept = min(half, model.tokens) if half_storage else model.tokens
    own = sides(model.generated) if fractal else []
    if half_storage and own:
        # The largest tile is the carry, which caches nothing.
        own = own[:-1]
    passing = [0.0]
    for side in own:
        one_by_one = not parallel or (sequential_from is not None and side >= sequential_from)
        passing.append(_tile_temporaries(model, side, 1 if one_by_one else model.layers))
    shape = {"batch": model.batch, "channels": model.channels}
    if model.prompt:
        outputs = half if half_storage else model.tokens
        op = conv_prefill(**shape, inputs=model.prompt, outputs=outputs, dtype=model.dtype)
        passing.append(_span_temporaries(op))
    if half_storage and model.tokens > half:
        op = conv_carry(**shape, inputs=half, outputs=model.tokens - half, dtype=model.dtype)
        passing.append(_span_temporaries(op))
    # Algorithm 2 keeps partial states besides the activations, if they have another size.
    states = (
        model.state * model.layers * model.batch * model.tokens * model.channels if model.state > 1 else 0
    )
    return Memory(
        model.activation_bytes(kept) + states * DTYPE_BYTES[model.dtype],
        model.filter_bytes,
        model.weight_bytes,
        sum(_cached(model, side) for side in own),
        max(passing),
    )


def _computed_bytes(dtype: str) -> float:
    return max(DTYPE_BYTES[dtype], DTYPE_BYTES["fp32"])


def _cached(model: LongConvolution, side: int) -> float:
    taps = model.layers * model.channels
    match model.implementation(side):
        case "fft" | "flash_fft":
            return taps * (side + 1) * 2.0 * _computed_bytes(model.dtype)
        case "conv":
            return taps * 2.0 * side * DTYPE_BYTES[model.dtype]
        case _:
            return 0.0


def _tile_temporaries(model: LongConvolution, side: int, layers: int) -> float:
    lanes = layers * model.batch * model.channels
    match model.implementation(side):
        case "fft":
            # Spectra of the inputs and their product; later the product and the inverse, which is no larger.
            return lanes * 2.0 * (side + 1) * 2.0 * _computed_bytes(model.dtype)
        case "conv":
            # Padded inputs and the result.
            return lanes * (4.0 * side - 2.0) * DTYPE_BYTES[model.dtype]
        case _:
            return 0.0


def _span_temporaries(op: Op) -> float:
    """Returns the bytes of the spectra of inputs and taps, and of their product, in one layer."""
    lanes, taps = op["batch"] * op["channels"], op["channels"]
    bins = span_order(op["inputs"], op["outputs"]) / 2 + 1
    return (2.0 * lanes + taps) * bins * 2.0 * DTYPE_BYTES[op.dtype]
