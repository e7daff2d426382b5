"""A long-convolution model on a card: the buffers of `buffers.long_convolution`, at addresses that stay.

The kernels of a step (cells and blocks) read its position on the card
(`simcore.kernels.long_convolution.placed`), so one graph serves all positions, and tensors between its ops do
not move. So do those of tiles, rows and columns (`placed_tiles`); a row or a column has a graph for each
power of two of inputs or outputs, whose programs they share. Only a prompt is captured with its positions.
The op after a block writes the layer's output to its place, so no copies are launched that the model does not
have. Outputs stay in the last level.

Of a launch that computes several positions the host writes the first; the graph begins with a kernel that
writes all of them, and the ops of each position read their own. So one graph serves all such launches too.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from simcore.kernels.long_convolution.placed import placed_for
from simcore.kernels.long_convolution.placed_tiles import column_at, power_from, row_at, tile_at
from simcore.kernels.streams import current_gate
from simcore.models.long_convolution import LongConvolution
from simcore.ops.convolution import AHEAD, IMPLEMENTATIONS, OF, POSITION
from simcore.ops.op import Graph, Op
from simcore.validate.machines.buffers.long_convolution import (
    LongConvolutionState,
    Parameters,
    parameters,
    step_matrices,
)
from simcore.validate.machines.state import CardState, run_kernel, torch_dtype

# Operands of a tile, row or column: levels below, taps, levels.
Operands = tuple[Tensor, Tensor, Tensor]


class CardLongConvolutionState(CardState):
    """All levels of one model; see the head of this file. `drawn`: its parameters on the device, if they are
    there already. Raises ValueError for a number format in which torch does not compute."""

    def __init__(
        self,
        model: LongConvolution,
        seed: int,
        device: torch.device | str = "cuda",
        drawn: Parameters | None = None,
    ) -> None:
        drawn = drawn or parameters(model, seed, torch_dtype(model.dtype)).to(device)
        self.inner = LongConvolutionState(model, drawn, outputs_stay=True)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        # The positions of a launch of several, each four times: then all are at multiples of 16 bytes, as
        # Triton compiles kernels for such addresses and for others.
        several = torch.arange(model.tokens_per_launch, dtype=torch.int32, device=device)
        self._aheads = several[:, None].expand(-1, 4).contiguous()
        self._positions = torch.zeros_like(self._aheads)
        self._position_ahead = [row[:1] for row in self._positions]
        self._at = placed_for(drawn.given)
        # Inside a step: the output of the layer below, the layer's sums, the next input inside the block.
        self._below = self._input = drawn.given.new_empty(model.batch, model.channels)
        self._rooms = drawn.given.new_empty(2, model.batch, model.channels)
        self._sums = self._hidden = self._rooms[0]
        self._in_step = False
        self._methods: Mapping[str, Callable[[Op], None]] = {
            "conv_cell": self._cell,
            "matmul": self._multiply,
            "activation": self._activate,
            "gate": self._gate,
            "next_input": self._next_input,
        }
        # In a step of several kernels and outside: they read nothing between ops.
        self._placed: Mapping[str, Callable[[Op], None]] = {
            "conv_row": self._row,
            "conv_column": self._column,
            "token_step": self._token_step,
            **dict.fromkeys([f"tile_{name}" for name in IMPLEMENTATIONS], self._tile),
        }
        self._step_matrices = step_matrices(drawn) if model.one_launch else []
        self._served = frozenset({*self._methods, *self._placed})

    @property
    def outputs(self) -> Tensor:
        """The outputs of the last level, [positions, batch, channels]."""
        return self.inner.a[-1].transpose(0, 1)

    def reset(self) -> None:
        """Restores the state before the first position."""
        self.inner.reset()

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        """Same as the model's."""
        return LongConvolution.device_sizes(graph)

    def captured_sizes(self, graph: Graph) -> frozenset[str]:
        """Returns all sizes that a graph needs, without the position if all of its ops read it."""
        return graph.needs - self.device_sizes(graph) if graph.kinds <= self._served else graph.needs

    def bound(self, graph: Graph, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the captured sizes, of rows and columns so that the largest is rounded up to a power of
        two."""
        found = super().bound(graph, sizes)
        if not graph.kinds & {"conv_row", "conv_column"}:
            return found
        most = graph.most_added
        return {
            name: power_from(value + most.get(name, 0)) - most.get(name, 0) for name, value in found.items()
        }

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """Returns the position, the same for all streams: there is one set of activations."""
        del stream
        return {POSITION.name: self.position}

    def key(self) -> bool:
        """Returns whether a step has begun; outside a step, ops give their places themselves."""
        return self._in_step

    def restore(self, key: bool) -> None:
        """Sets whether a step has begun."""
        self._in_step = key

    def execute(self, op: Op) -> None:
        """Runs any op of the model's graphs. Raises ValueError if it would have to read a gate."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} reads no gate")
        if OF in dict(op.place):
            torch.add(self.position, self._aheads, out=self._positions)
        # Blocks of a prompt, and of mixers without cells, work at the places that their ops give.
        in_step = self._in_step or op.kind == "conv_cell"
        otherwise = self._methods.get(op.kind, self.inner.execute) if in_step else self.inner.execute
        self._placed.get(op.kind, otherwise)(op)
        self.skip(op)

    def skip(self, op: Op) -> None:
        """Goes on: a step begins with its first cell and ends with the next input."""
        self._in_step = op.kind != "next_input" and (self._in_step or op.kind == "conv_cell")

    def _position(self, op: Op) -> Tensor:
        """Returns where an op reads its position."""
        place = dict(op.place)
        return self._position_ahead[op.where(AHEAD)] if AHEAD in place else self.position

    # -- a step ----------------------------------------------------------------------------------------------

    def _level(self, level: int) -> Tensor:
        return self.inner.a[level]

    def _cell(self, op: Op) -> None:
        layer = op.where("layer")
        # Rooms alternate: this cell reads the output of the layer below, which a gate left in the other one.
        self._sums = self._rooms[layer % 2]
        first = layer == 1
        if first:
            self._below = self._input
        tap = self.inner.taps[layer - 1, :, 0]
        levels = self._level(layer - 1), tap, self._level(layer)
        self._at.cell(self._below, *levels, self._position(op), self._sums, first)

    def _multiply(self, op: Op) -> None:
        x = {"up": self._sums, "gate_projection": self._below}.get(op.name, self._hidden)
        layer = op.where("layer")
        self._hidden = run_kernel(op, x, self.inner.parameters.matrices[op.name][layer - 1])
        if op.name == "down":
            self._below = self._hidden

    def _activate(self, op: Op) -> None:
        self._hidden = run_kernel(op, self._hidden)

    def _gate(self, op: Op) -> None:
        self._below = run_kernel(op, self._hidden, self._sums)

    def _next_input(self, op: Op) -> None:
        last, noise = self._level(self.inner.model.layers), self.inner.parameters.noise
        self._at.next_input(self._below, last, noise, self._position(op), self._level(0))

    # -- a step in one launch, tiles, rows and columns -----------------------------------------------------

    def _token_step(self, op: Op) -> None:
        inner = self.inner
        position, noise = self._position(op), inner.parameters.noise
        run_kernel(op, inner.a, inner.taps, position, noise, *self._step_matrices)

    def _operands(self, op: Op) -> Operands:
        """Returns all positions of the levels below and of the levels of an op, and their taps from lag 1
        on."""
        first, count, inner = op.where("layer") - 1, op["layers"], self.inner
        taps = inner.taps.narrow(0, first, count).narrow(2, 1, inner.model.tokens - 1)
        return inner.a.narrow(0, first, count), taps, inner.a.narrow(0, first + 1, count)

    def _row(self, op: Op) -> None:
        most, since = power_from(op["inputs"]), self.inner.model.prompt
        row_at(*self._operands(op), self._position(op), most=most, since=since)

    def _column(self, op: Op) -> None:
        column_at(*self._operands(op), self._position(op), most=power_from(op["outputs"]))

    def _tile(self, op: Op) -> None:
        below, taps, levels = self._operands(op)
        operand = taps.narrow(2, 0, op["side"] + op["outputs"] - 1)
        if op.kind.endswith("fft"):
            spectrum = self.inner.spectra[op["side"]]
            operand = spectrum.narrow(0, op.where("layer") - 1, op["layers"])
        tile_at(op, below, operand, levels, self._position(op))
