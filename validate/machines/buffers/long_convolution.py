"""The buffers of a long-convolution model, and which of them each op reads and writes.

    a[level 0 .. M]  [batch, positions, channels]     sums of z_l,t are kept in the place of a_l,t
    taps[layer]      [1 or batch, positions, channels]
    a_0,(t+1) = a_M,t + noise_t                       if there is a position t + 1

Filters, matrices, noise and the given input (a first token, or a prompt) are random by a seed. Filters decay
at a different rate in each channel, slowly enough that every lag counts, and are scaled with the blocks so
that the feedback of a model to itself stays bounded.

With half of the storage (Flash Inference, App. D), a carry writes layer l's later half over the earlier half
of level l - 1; after the last layer the buffer of level l - 1 becomes that of level l, and the last buffer
that of level 0. The first two levels are then not neighbours, and a tile runs in two pieces.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from simcore.kernels.long_convolution.spectral import tile_spectrum
from simcore.models.long_convolution import LongConvolution, half_length
from simcore.ops.op import Op
from simcore.validate.machines.state import State, run_kernel

Views = tuple[Tensor, Tensor]

# Filters decay by exp(-rate) over all positions; the rates of the channels lie between these.
RATES = (0.5, 4.0)
# The factor of all layers together on the size of their input: far from growing and from vanishing.
LOOP = 0.1
NOISE = 0.5
# gelu shrinks numbers around 0; the scale of the matrix after it corrects that.
DOWN = 1.5
# Size of a gate. A gated block squares sizes: at 1 a deep model would diverge, below 1 deep levels fade.
GATE = 0.4
# Seeds of layers: more than a model has. Threads that draw, each a layer.
SEEDS, THREADS = 1_000_003, 8
# Decays of linear attention lie in this range.
DECAYS = (0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Parameters:
    """filters [layers, tokens, channels]; matrices [layers, in, out] by the op that reads them; `given`: the
    prompt or the first token, [batch, max(1, prompt), channels]; noise [tokens, batch, channels].

    Linear attention: keys are key_scales[layer] phi(y W_key), queries phi(y W_query), phi(x) = 1 + tanh(x), a
    bounded feature map with positive values; decays [layers].
    """

    filters: Tensor
    matrices: Mapping[str, Tensor]
    given: Tensor
    noise: Tensor
    decays: Tensor
    key_scales: Tensor

    def to(self, device: torch.device | str) -> "Parameters":
        """Returns the same numbers on a device."""
        return Parameters(
            self.filters.to(device),
            {name: matrix.to(device) for name, matrix in self.matrices.items()},
            *(x.to(device) for x in (self.given, self.noise, self.decays, self.key_scales)),
        )


def step_matrices(drawn: Parameters) -> list[Tensor]:
    """Returns the matrices of blocks as a step in one launch takes them: outputs first, contiguous."""
    names = [name for name in ("up", "down", "gate_projection") if name in drawn.matrices]
    return [drawn.matrices[name].mT.contiguous() for name in names]


def _matrices(model: LongConvolution, gain: float) -> dict[str, tuple[int, int, Tensor]]:
    """Returns rows, columns and scale by layer of the matrices, by name; `gain`: of one layer's mixer."""
    d, one = model.channels, torch.ones(model.layers, dtype=torch.float64)
    found: dict[str, tuple[int, int, Tensor]] = {}
    if model.block == "gate":
        # Relative to the size of the level from which the gate is computed.
        sizes = NOISE * gain ** torch.arange(model.layers, dtype=torch.float64)
        found["gate_projection"] = d, d, GATE / sizes
    else:
        found |= {"up": (d, 2 * d, one), "down": (2 * d, d, DOWN * one)}
    if model.mixer == "data_dependent_convolution":
        found["filter_projection"] = d, d, one
    if model.mixer == "linear_attention":
        found |= dict.fromkeys(("query", "key"), (d, model.rank, one))
    return found


def parameters(model: LongConvolution, seed: int, dtype: torch.dtype) -> Parameters:
    """Draws all parameters by a seed, filters in fp32 and the others in float64, and casts them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    layers, tokens, batch, d = model.layers, model.tokens, model.batch, model.channels
    gain = LOOP ** (1 / layers)
    matrices = {
        name: normal(layers, n, m) * (scale * n**-0.5)[:, None, None]
        for name, (n, m, scale) in _matrices(model, gain).items()
    }
    low, high = DECAYS
    decays = low + (high - low) * torch.rand(layers, generator=generator, dtype=torch.float64)
    return Parameters(
        _filters(model, seed, gain, dtype),
        {name: matrix.to(dtype) for name, matrix in matrices.items()},
        (NOISE * normal(batch, max(1, model.prompt), d)).to(dtype),
        (NOISE * normal(tokens, batch, d)).to(dtype),
        decays.to(dtype),
        (gain * (1.0 - decays**2).sqrt() / (2 * model.rank)).to(dtype),
    )


def _filters(model: LongConvolution, seed: int, gain: float, dtype: torch.dtype) -> Tensor:
    """Draws the filters, each layer by a seed of its own and in a thread, in fp32: those of 131,072 positions
    are half a billion numbers, which one thread draws for 20 seconds, and in fp64 for five times as long."""
    size = model.tokens, model.channels
    decay = torch.exp(
        -torch.linspace(*RATES, model.channels, dtype=torch.float64)
        * (torch.arange(model.tokens, dtype=torch.float64)[:, None] / model.tokens)
    )

    def draw(layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(SEEDS * (seed + 1) + layer)
        one = torch.randn(*size, generator=generator, dtype=torch.float32).double().mul_(decay)
        return one.mul_(gain / torch.linalg.vector_norm(one, dim=0)).to(dtype)

    with ThreadPoolExecutor(min(model.layers, THREADS)) as threads:
        return torch.stack([*threads.map(draw, range(model.layers))])


@dataclass(slots=True, eq=False)
class _Aggregates:
    """The state of the generic algorithm: elements (q, s) of X at every layer and position, weights w by lag.
    q [layers, batch, tokens, state], s the same with channels, w [layers, tokens, channels or 1]."""

    q: Tensor
    s: Tensor
    w: Tensor


class LongConvolutionState(State):
    """One rank's buffers for the graphs of `simcore.models.long_convolution.LongConvolution`.

    `a` is one tensor [layers + 1, batch, room, channels]; `room`: all positions or, with half storage, as
    many as are needed at once. `outputs`: those of the last layer, [batch, channels] by position, in order of
    computation; with `outputs_stay` they remain only in the last level. Taps that depend on data are nan
    until they are computed.
    """

    def __init__(
        self,
        model: LongConvolution,
        drawn: Parameters,
        *,
        half_storage: bool = False,
        outputs_stay: bool = False,
    ) -> None:
        self.model, self.parameters, self._outputs_stay = model, drawn, outputs_stay
        self.room = model.prompt + half_length(model.generated) if half_storage else model.tokens
        levels, batch, d = model.layers + 1, model.batch, model.channels
        self.a = drawn.given.new_zeros(levels, batch, self.room, d)
        self.reset()
        self.taps = drawn.filters[:, None]
        if model.mixer == "data_dependent_convolution":
            self.taps = drawn.filters.new_full((model.layers, batch, model.tokens, d), torch.nan)
        self.spectra = {
            side: tile_spectrum(f"tile_{name}", self.taps, side)
            for side, name in model.tiles
            if name.endswith("fft") and side < model.generated
        }
        self.outputs: list[Tensor] = []
        # The first stored position, and by how many buffers the levels have moved.
        self._base, self._moved = 0, 0
        # Views for ops of one layer and position, made once: making four of them takes longer than a cell.
        self._buffers = self.a.unbind(0)
        self._weights = {name: matrix.unbind(0) for name, matrix in drawn.matrices.items()}
        self._step_matrices = step_matrices(drawn) if model.one_launch and not outputs_stay else []
        self._first_taps = self.taps[:, :, 0].unbind(0)
        # A matrix product's result for the next op; the next input, if it has no place before the shift.
        self._hidden, self._aside = drawn.given, drawn.given
        self._kept_aggregates: _Aggregates | None = None
        self._ops = self._methods()

    def reset(self) -> None:
        """Restores the levels before the first position, with `outputs_stay` thereby also the outputs."""
        given = self.parameters.given
        self.a.zero_()
        self.a[0, :, : given.shape[1]] = given

    def _methods(self) -> dict[str, Callable[[Op], None]]:
        """Returns the method of each kind of op."""
        return {
            "conv_cell": self._cell, "conv_row": self._row, "conv_column": self._column,
            "conv_prefill": self._prefill, "conv_carry": self._carry, "slot_shift": self._shift,
            "matmul": self._multiply, "activation": self._activate, "gate": self._gate,
            "next_input": self._next_input, "token_step": self._token_step,
            "filter_tap": self._tap, "relaxed_cell": self._relaxed_cell,
            "relaxed_tile": self._relaxed_tile, "generic_cell": self._generic_cell,
            "generic_read": self._generic_read, "generic_tile": self._generic_tile,
            **dict.fromkeys(("tile_conv", "tile_flash_conv", "tile_fft", "tile_flash_fft"), self._tile),
        }  # fmt: skip

    def execute(self, op: Op) -> None:
        """Runs any op of the model's graphs."""
        self._ops[op.kind](op)

    # -- where tensors lie -------------------------------------------------------------------------------

    def level(self, level: int, start: int, stop: int) -> Tensor:
        """Positions start to stop - 1 of a level: a view [batch, positions, channels]. Raises IndexError if
        they are not stored (any more)."""
        self._check(start, stop)
        return self._buffers[self._slot(level)].narrow(1, start - self._base, stop - start)

    def _at(self, level: int, t: int) -> Tensor:
        """One position of a level: a view [batch, channels]."""
        self._check(t, t + 1)
        return self._buffers[self._slot(level)].select(1, t - self._base)

    def _levels(self, first: int, count: int, start: int, stop: int) -> Tensor:
        """Positions start to stop - 1 of `count` levels, which have to lie one after another."""
        self._check(start, stop)
        slots = self.a.narrow(0, self._slot(first), count)
        return slots.narrow(2, start - self._base, stop - start)

    def _lags(self, first: int, count: int, start: int, stop: int) -> Tensor:
        """Taps at lags start to stop - 1 of `count` layers."""
        return self.taps.narrow(0, first - 1, count).narrow(2, start, stop - start)

    def _slot(self, level: int) -> int:
        return (level - self._moved) % len(self._buffers)

    def _check(self, start: int, stop: int) -> None:
        if not self._base <= start <= stop <= self._base + self.room:
            stored = f"{self._base} to {self._base + self.room - 1}"
            raise IndexError(f"positions {start} to {stop - 1}; stored are {stored}")

    def _pieces(self, op: Op) -> Iterator[tuple[int, int]]:
        """Yields first layer and number of layers of an op's pieces, each with levels one after another."""
        first, count = op.where("layer"), op["layers"]
        if self._moved and first == 1 and count > 1:
            yield 1, 1
            first, count = 2, count - 1
        yield first, count

    def _between(self, first: int, count: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> Views:
        """Returns the inputs of `count` layers, from the levels below, and the places of their sums."""
        return self._levels(first - 1, count, *inputs), self._levels(first, count, *outputs)

    # -- the mixer -----------------------------------------------------------------------------------------

    def _cell(self, op: Op) -> None:
        layer, t = op.where("layer"), op.where("position")
        run_kernel(op, self._at(layer - 1, t), self._first_taps[layer - 1], self._at(layer, t))

    def _row(self, op: Op) -> None:
        t, inputs = op.where("position"), op["inputs"]
        for first, count in self._pieces(op):
            y, z = self._between(first, count, (t - inputs, t), (t, t + 1))
            run_kernel(op, y, self._lags(first, count, 1, inputs + 1), z.select(2, 0))

    def _column(self, op: Op) -> None:
        t, outputs = op.where("position"), op["outputs"]
        for first, count in self._pieces(op):
            y, z = self._between(first, count, (t, t + 1), (t + 1, t + 1 + outputs))
            run_kernel(op, y.select(2, 0), self._lags(first, count, 1, outputs + 1), z)

    def _tile(self, op: Op) -> None:
        t, side, outputs = op.where("position"), op["side"], op["outputs"]
        by_fft = op.kind.endswith("fft")
        for first, count in self._pieces(op):
            y, z = self._between(first, count, (t + 1 - side, t + 1), (t + 1, t + 1 + outputs))
            if by_fft:
                run_kernel(op, y, self.spectra[side].narrow(0, first - 1, count), z)
            else:
                run_kernel(op, y, self._lags(first, count, 1, side + outputs), z)

    def _prefill(self, op: Op) -> None:
        layer, outputs = op.where("layer"), op["outputs"]
        y, z = self._between(layer, 1, (0, op["inputs"]), (0, outputs))
        run_kernel(op, y, self._lags(layer, 1, 0, outputs), z)

    def _carry(self, op: Op) -> None:
        layer, inputs = op.where("layer"), op["inputs"]
        y = self._levels(layer - 1, 1, 0, inputs)
        run_kernel(op, self._lags(layer, 1, 1, inputs + op["outputs"]), y)

    def _shift(self, op: Op) -> None:
        del op
        self._base, self._moved = self._base + self.room, self._moved + 1
        self.level(0, self._base, self._base + self.room).zero_()[:, 0] = self._aside

    # -- the block -----------------------------------------------------------------------------------------

    def _multiply(self, op: Op) -> None:
        name, layer = op.name, op.where("layer")
        x = self._hidden
        if name != "down":
            x = self._rows(op["m"], layer if name == "up" else layer - 1, op.where("position"))
            x = x.reshape(op["m"], self.model.channels)
        self._hidden = run_kernel(op, x, self._weights[name][layer - 1])
        if name == "down":
            z = self._rows(op["m"], layer, op.where("position"))
            z.copy_(self._hidden.view(z.shape))

    def _rows(self, rows: int, level: int, t: int) -> Tensor:
        """Returns the last positions of a level until t that make `rows` rows: one, or the prompt's."""
        if rows == self.model.batch:
            return self._at(level, t)
        return self.level(level, t + 1 - rows // self.model.batch, t + 1)

    def _activate(self, op: Op) -> None:
        self._hidden = run_kernel(op, self._hidden)

    def _gate(self, op: Op) -> None:
        z = self._rows(op["rows"], op.where("layer"), op.where("position"))
        run_kernel(op, self._hidden.view(z.shape), z)

    def _token_step(self, op: Op) -> None:
        # Levels and the next input may lie apart, with half storage: on copies of them.
        t, model = op.where("position"), self.model
        levels = torch.stack([self._at(level, t) for level in range(model.layers + 1)])
        a = torch.stack((levels, levels), 2)
        noise = self.parameters.noise[t].expand(2, -1, -1)
        run_kernel(op, a, self.taps, torch.zeros(1, dtype=torch.int32), noise, *self._step_matrices)
        for level in range(1, model.layers + 1):
            self._at(level, t).copy_(a[level, :, 0])
        self._give(t, a[0, :, 1])

    def _next_input(self, op: Op) -> None:
        t = op.where("position")
        self._give(t, run_kernel(op, self._at(self.model.layers, t), self.parameters.noise[t]))

    def _give(self, t: int, x: Tensor) -> None:
        """Keeps the outputs until t, and x as the next input."""
        if not self._outputs_stay:
            self.outputs += self.level(self.model.layers, len(self.outputs), t + 1).clone().unbind(1)
        if t + 1 == self.model.tokens:
            return
        if t + 1 == self._base + self.room:
            self._aside = x
        else:
            self._at(0, t + 1).copy_(x)

    # -- filters that depend on data -----------------------------------------------------------------------

    def _tap(self, op: Op) -> None:
        layer, t = op.where("layer") - 1, op.where("position")
        self.taps[layer, :, t] = run_kernel(op, self._hidden, self.parameters.filters[layer, t])

    def _relaxed_cell(self, op: Op) -> None:
        layer, t = op.where("layer"), op.where("position")
        pairs = [(t, 0), (0, t)] if t else [(0, 0)]
        operands = []
        for i, lag in pairs:
            operands += [self._at(layer - 1, i), self.taps[layer - 1].select(1, lag)]
        run_kernel(op, *operands, self._at(layer, t))

    def _relaxed_tile(self, op: Op) -> None:
        first, count, t, side = op.where("layer"), op["layers"], op.where("position"), op["side"]
        old = op.where("first"), op.where("first") + side
        new = t + 1 - side, t + 1
        pairs = ((old, new), (new, old))[: op["products"]]
        operands: list[Tensor] = []
        for inputs, lags in pairs:
            operands.append(self._levels(first - 1, count, *inputs))
            operands.append(self._lags(first, count, *lags))
        run_kernel(op, *operands, self._levels(first, count, t + 1, t + 1 + op["outputs"]))

    # -- any mixer -----------------------------------------------------------------------------------------

    @property
    def _aggregates(self) -> _Aggregates:
        """The state, made at first use. A convolution keeps its sums in the places of its activations."""
        if self._kept_aggregates is None:
            model, lags = self.model, torch.arange(self.model.tokens, device=self.a.device)
            q = self.a.new_zeros(model.layers, model.batch, model.tokens, model.state)
            if model.mixer == "convolution":
                s, w = self.a[1:, :, :, None], self.parameters.filters
            else:
                s = q.new_zeros(*q.shape, model.channels)
                w = (self.parameters.decays[:, None] ** lags)[..., None]
            self._kept_aggregates = _Aggregates(q, s, w)
        return self._kept_aggregates

    def _projected(self, name: str, y: Tensor, layers: slice) -> Tensor:
        """Returns keys or queries of y [layers, batch, positions, channels]; all 1 for a convolution."""
        if self.model.mixer == "convolution":
            return y.new_ones(()).expand(*y.shape[:-1], 1)
        found = 1.0 + torch.tanh(y @ self.parameters.matrices[name][layers, None])
        return found * self.parameters.key_scales[layers, None, None, None] if name == "key" else found

    def _generic_cell(self, op: Op) -> None:
        layer, t, x = op.where("layer"), op.where("position"), self._aggregates
        y = self._levels(layer - 1, 1, t, t + 1)
        key, query = (self._projected(name, y, slice(layer - 1, layer))[0, :, 0] for name in ("key", "query"))
        run_kernel(op, y[0, :, 0], key, query, x.w[layer - 1, 0], x.s[layer - 1, :, t], x.q[layer - 1, :, t])

    def _generic_read(self, op: Op) -> None:
        layer, t, x = op.where("layer"), op.where("position"), self._aggregates
        self._at(layer, t).copy_(run_kernel(op, x.s[layer - 1, :, t], x.q[layer - 1, :, t]))

    def _generic_tile(self, op: Op) -> None:
        t, side, x = op.where("position"), op["side"], self._aggregates
        first, count = op.where("layer"), op["layers"]
        layers, later = slice(first - 1, first - 1 + count), slice(t + 1, t + 1 + op["outputs"])
        y = self._levels(first - 1, count, t + 1 - side, t + 1)
        key, query = (
            self._projected("key", y, layers),
            self._projected("query", y[:, :, -1:], layers)[:, :, 0],
        )
        w = x.w[layers, : side + op["outputs"]]
        run_kernel(op, y, key, query, w, x.s[layers, :, later], x.q[layers, :, later])


def long_convolution_state(
    model: LongConvolution,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    half_storage: bool = False,
    device: torch.device | str = "cpu",
) -> LongConvolutionState:
    """Returns the state of a model before any computation; see the head of this file."""
    return LongConvolutionState(model, parameters(model, seed, dtype).to(device), half_storage=half_storage)
