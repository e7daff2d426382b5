"""A long-convolution model, for every tiling of Flash Inference, as functions from shapes to graphs.

M layers; level 0 is the input. With B sequences, D channels and L positions (section 2.1):

    z_l,t = sum over i <= t of a_(l-1),i * k_l,(t-i)          the mixer
    a_l,t = block_l(z_l,t)                                    mlp: W2 gelu(W1 z), hidden 2 D
                                                              gate: z * (W a_(l-1),t)
    a_0,(t+1) = a_M,t + noise                                 the next input (section 4)

Partial sums of z_l are kept in the place of a_l, so there is no storage except the activations (section 3.6).
Positions count from 0, layers from 1. The i-th tile after a prompt has the side i & -i, the largest power of
two that divides i (Algorithm 1, line 4).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from simcore.ops import convolution as conv
from simcore.ops.convolution import POSITION, Implementation, at_layer, named
from simcore.ops.op import DTYPE_BYTES, Graph, Op, activation, matmul, placed

Block = Literal["mlp", "gate"]
Mixer = Literal["convolution", "data_dependent_convolution", "linear_attention"]
# The default of `rank`: numbers of state per channel of linear attention.
DEFAULT_RANK = 4


def tile_side(i: int) -> int:
    """The side of the i-th gray tile: the largest power of two that divides i.

    >>> [tile_side(i) for i in range(1, 9)]
    [1, 2, 1, 4, 1, 2, 1, 8]
    """
    return i & -i


def half_length(tokens: int) -> int:
    """The side of the largest tile for `tokens` positions: the positions that half storage keeps (App. D).

    >>> [half_length(tokens) for tokens in (2, 5, 8, 9)]
    [1, 4, 4, 8]
    """
    return 1 << max(0, (tokens - 1).bit_length() - 1)


@dataclass(frozen=True)
class LongConvolution:
    """The model and the implementation of its tiles; its graphs are made once.

    `tokens` is L, including the `prompt` positions of the prompt; `tiles`: the implementation by side;
    `rank`: numbers of state per channel with `mixer` linear_attention; `one_launch`: whether a step is one
    kernel (`token_step`), where nothing else comes between its layers; `tokens_per_launch`: how many
    positions a schedule computes by one launch where it can, a power of two. Raises ValueError if no position
    is left to generate.
    """

    layers: int
    channels: int
    tokens: int
    batch: int = 1
    prompt: int = 0
    block: Block = "mlp"
    mixer: Mixer = "convolution"
    dtype: str = "fp16"
    tiles: tuple[tuple[int, Implementation], ...] = ()
    rank: int = DEFAULT_RANK
    one_launch: bool = False
    tokens_per_launch: int = 1
    # A cache of this object alone: `dataclasses.replace` makes a new one for a copy.
    _made: dict[tuple[object, ...], Graph] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.prompt < self.tokens:
            raise ValueError(f"prompt is {self.prompt}; 0 to {self.tokens - 1} of {self.tokens} tokens")
        if self.tokens_per_launch < 1 or tile_side(self.tokens_per_launch) != self.tokens_per_launch:
            raise ValueError(f"tokens_per_launch is {self.tokens_per_launch}; a power of two is needed")

    @property
    def generated(self) -> int:
        """The number of positions that are computed one by one."""
        return self.tokens - self.prompt

    @cached_property
    def _implementation(self) -> Mapping[int, Implementation]:
        return dict(self.tiles)

    def implementation(self, side: int) -> Implementation:
        """The implementation of tiles of a side (default: flash_conv, the fused direct one)."""
        return self._implementation.get(side, "flash_conv")

    @staticmethod
    def device_sizes(graph: Graph) -> frozenset[str]:
        """The sizes that kernels of a graph read in the device's memory: the position, in steps, rows,
        columns and tiles."""
        return graph.needs & {POSITION.name} if graph.kinds & conv.PLACED_KINDS else frozenset()

    # -- graphs: all read `position`, the position that is computed or was computed last ------------------

    def step(self) -> Graph:
        """One position through all layers: red cells and blocks, then the next input."""
        return self._graph("step", self._step)

    def _step(self) -> tuple[Op, ...]:
        return (self.token_step,) if self.one_launch else self.layers_of_step

    @property
    def layers_of_step(self) -> tuple[Op, ...]:
        """The ops of a step as kernels of each layer."""
        return self._each_layer(lambda _: ())

    @property
    def token_step(self) -> Op:
        """The op of a step as one kernel."""
        shape = {"layers": self.layers, "batch": self.batch, "channels": self.channels}
        return at_layer(conv.token_step(**shape, block=self.block, dtype=self.dtype), 1)

    def row_step(self) -> Graph:
        """A step with each layer's history before its red cell: lazy, layer by layer. Size: inputs."""
        return self._graph("row_step", lambda: self._each_layer(self._row))

    def column_step(self) -> Graph:
        """A step with each layer's column after its block: eager, layer by layer. Size: outputs."""
        return self._graph("column_step", lambda: self._each_layer(lambda _: (), self._column))

    def tile_step(self, side: int, outputs: int) -> Graph:
        """A step with each layer's tile after its block: Algorithm 1 as printed, layer by layer."""

        def tile(layer: int) -> tuple[Op, ...]:
            return (self._tile(side, outputs, layer, 1),)

        return self._graph("tile_step", lambda: self._each_layer(lambda _: (), tile), side, outputs)

    def rows(self) -> Graph:
        """The history of the position for all layers at once. Sizes: position, inputs."""
        return self._graph("rows", lambda: self._row(1, self.layers))

    def columns(self) -> Graph:
        """The contributions of the position to all later ones, for all layers at once. Sizes: position,
        outputs."""
        return self._graph("columns", lambda: self._column(1, self.layers))

    def tile(self, side: int, outputs: int, *, sequential: bool = False) -> Graph:
        """The gray tile after the position: all layers as one op (section 3.5) or, to save memory, layer by
        layer (App. E)."""

        def make() -> tuple[Op, ...]:
            if sequential:
                return tuple(self._tile(side, outputs, layer, 1) for layer in self._levels)
            return (self._tile(side, outputs, 1, self.layers),)

        return self._graph("tiles" if sequential else "tile", make, side, outputs)

    # -- graphs of several positions: their sizes are those of the first ----------------------------------

    def rows_and_steps(self, positions: int) -> Graph:
        """Lazy: `positions` positions, each with its history before its step. Sizes: position, inputs."""
        return self._several("rows_and_steps", positions, lambda _: self.rows().ops + self.step().ops)

    def steps_and_columns(self, positions: int) -> Graph:
        """Eager: `positions` positions, each with its column after its step. Sizes: position, outputs."""
        return self._several("steps_and_columns", positions, lambda _: self.step().ops + self.columns().ops)

    def steps_and_tiles(self, positions: int, sequential_from: int | None = None) -> Graph:
        """Algorithm 1: the steps of `positions` positions, a power of two that divides the number of those
        before them, with the tiles between them; not the tile after the last one, whose side differs from
        launch to launch. Tiles of side `sequential_from` and larger go layer by layer."""

        key = () if sequential_from is None else (sequential_from,)

        def make(i: int) -> tuple[Op, ...]:
            side = tile_side(i + 1)
            if side == positions:
                return self.step().ops
            in_sequence = any(side >= first for first in key)
            return self.step().ops + self.tile(side, side, sequential=in_sequence).ops

        return self._several("steps_and_tiles", positions, make, *key)

    def prefill(self, outputs: int) -> Graph:
        """The prompt through all layers by FFT, with its contributions to all positions below `outputs`."""
        return self._graph("prefill", lambda: self._prefill(outputs), outputs)

    def carry(self, inputs: int, outputs: int) -> Graph:
        """The largest tile with half storage: layer by layer; outputs replace inputs (App. D)."""

        def make() -> tuple[Op, ...]:
            shape = {"batch": self.batch, "channels": self.channels, "inputs": inputs, "outputs": outputs}
            op = conv.conv_carry(**shape, dtype=self.dtype)
            shift = at_layer(conv.slot_shift(layers=self.layers), self.layers)
            return (*(at_layer(op, layer) for layer in self._levels), shift)

        return self._graph("carry", make, inputs, outputs)

    def relaxed_step(self) -> Graph:
        """One position with filters that depend on data: in each layer the next tap, two cells, the block."""

        def cell(layer: int) -> tuple[Op, ...]:
            tap = conv.filter_tap(batch=self.batch, channels=self.channels, dtype=self.dtype)
            both = conv.relaxed_cell(batch=self.batch, channels=self.channels, dtype=self.dtype)
            project = self._matmul("filter_projection", self.channels, self.channels, self.batch)
            return tuple(at_layer(op, layer) for op in (project, tap, both))

        return self._graph("relaxed_step", lambda: self._each_layer(cell, cell=False))

    def relaxed_tiles(self, largest: int, square: bool, left: int) -> Graph:
        """All convolutions of Algorithm 3 that are due after the position, of sides 1, 2, 4 up to `largest`,
        for all layers at once. `square`: the operands of the largest have the same positions; `left`: how
        many positions are left to compute."""

        def make() -> tuple[Op, ...]:
            shape: dict[str, Any] = {"batch": self.batch, "channels": self.channels, "dtype": self.dtype}
            found = []
            for side in (1 << i for i in range(largest.bit_length())):
                products = 1 if square and side == largest else 2
                op = conv.relaxed_tile(
                    layers=self.layers, **shape, side=side, products=products, outputs=min(2 * side - 1, left)
                )
                found.append(placed(op, layer=1, position=POSITION, first=side))
            return tuple(found)

        return self._graph("relaxed_tiles", make, largest, square, min(left, 2 * largest - 1))

    def generic_step(self) -> Graph:
        """One position in the form of Algorithm 2: cont and agg, read, block."""

        def cell(layer: int) -> tuple[Op, ...]:
            shape = {"batch": self.batch, "channels": self.channels, "state": self.state}
            own = conv.generic_cell(**shape, separable=self._separable, dtype=self.dtype)
            read = conv.generic_read(**shape, dtype=self.dtype)
            return tuple(at_layer(op, layer) for op in (own, read))

        return self._graph("generic_step", lambda: self._each_layer(cell, cell=False))

    def generic_tile(self, side: int, outputs: int) -> Graph:
        """The gray tile of Algorithm 2 after the position, for all layers at once."""

        def make() -> tuple[Op, ...]:
            shape = {"batch": self.batch, "channels": self.channels, "state": self.state}
            shape |= {"side": side, "outputs": outputs}
            op = conv.generic_tile(layers=self.layers, **shape, separable=self._separable, dtype=self.dtype)
            return (at_layer(op, 1),)

        return self._graph("generic_tile", make, side, outputs)

    # -- memory ----------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """Numbers of the aggregated state per channel (section 3.1's X): 1 for a convolution; for linear
        attention the `rank` of the keys, which multiply the values."""
        return self.rank if self.mixer == "linear_attention" else 1

    def activation_bytes(self, positions: int) -> float:
        """Bytes of the activations of all levels at `positions` positions."""
        numbers = (self.layers + 1) * self.batch * positions * self.channels
        return numbers * DTYPE_BYTES[self.dtype]

    @property
    def filter_bytes(self) -> float:
        """Bytes of the taps of all layers, if any; filters that depend on data differ by sequence."""
        if self.mixer == "linear_attention":
            return 0.0
        filters = self.batch if self.mixer == "data_dependent_convolution" else 1
        return self.layers * filters * self.tokens * self.channels * DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of blocks, and of the mixers' projections, if any."""
        d = self.channels
        own = {"convolution": 0, "data_dependent_convolution": d * d, "linear_attention": 2 * d * self.rank}
        block = 4 * d * d if self.block == "mlp" else d * d
        return self.layers * (block + own[self.mixer]) * DTYPE_BYTES[self.dtype]

    # -- ops -------------------------------------------------------------------------------------------

    @property
    def _separable(self) -> bool:
        """Whether contributions to different positions differ only by a factor of the distance."""
        return self.mixer == "linear_attention"

    @property
    def _levels(self) -> range:
        return range(1, self.layers + 1)

    def _graph(self, name: str, make: Callable[[], tuple[Op, ...]], *key: int) -> Graph:
        found = self._made.get((name, *key))
        if found is None:
            found = self._made[name, *key] = Graph(" ".join((name, *map(str, key))), make())
        return found

    def _several(self, name: str, positions: int, make: Callable[[int], tuple[Op, ...]], *key: int) -> Graph:
        """A graph of the ops of several positions; `make`: those of one, as if it were the first."""

        def ops() -> tuple[Op, ...]:
            first, *others = (conv.ahead(op, i) for i in range(positions) for op in make(i))
            return conv.beginning(first, positions), *others

        return self._graph(name, ops, positions, *key)

    def _each_layer(
        self,
        before: Callable[[int], tuple[Op, ...]],
        after: Callable[[int], tuple[Op, ...]] | None = None,
        *,
        cell: bool = True,
    ) -> tuple[Op, ...]:
        found: list[Op] = []
        for layer in self._levels:
            found += before(layer)
            if cell:
                op = conv.conv_cell(batch=self.batch, channels=self.channels, dtype=self.dtype)
                found.append(at_layer(op, layer))
            found += self._block(layer, self.batch)
            found += after(layer) if after else ()
        return (*found, self._next_input())

    def _next_input(self) -> Op:
        op = conv.next_input(rows=self.batch, channels=self.channels, dtype=self.dtype)
        return at_layer(op, self.layers)

    def _block(self, layer: int, rows: int) -> tuple[Op, ...]:
        d = self.channels
        ops: tuple[Op, ...]
        if self.block == "gate":
            ops = (
                self._matmul("gate_projection", d, d, rows),
                conv.gate(rows=rows, channels=d, dtype=self.dtype),
            )
        else:
            ops = (
                self._matmul("up", 2 * d, d, rows),
                named(activation(tokens=rows, width=2 * d, gated=False, dtype=self.dtype), "gelu"),
                self._matmul("down", d, 2 * d, rows),
            )
        return tuple(at_layer(op, layer) for op in ops)

    def _matmul(self, name: str, n: int, k: int, rows: int) -> Op:
        return matmul(name, m=rows, n=n, k=k, dtype=self.dtype)

    def _row(self, layer: int, layers: int = 1) -> tuple[Op, ...]:
        shape = {"layers": layers, "batch": self.batch, "channels": self.channels}
        return (at_layer(conv.conv_row(**shape, inputs=conv.INPUTS, dtype=self.dtype), layer),)

    def _column(self, layer: int, layers: int = 1) -> tuple[Op, ...]:
        shape = {"layers": layers, "batch": self.batch, "channels": self.channels}
        return (at_layer(conv.conv_column(**shape, outputs=conv.OUTPUTS, dtype=self.dtype), layer),)

    def _tile(self, side: int, outputs: int, layer: int, layers: int) -> Op:
        shape = {"layers": layers, "batch": self.batch, "channels": self.channels}
        implementation = self.implementation(side)
        return at_layer(
            conv.tile(implementation, **shape, side=side, outputs=outputs, dtype=self.dtype), layer
        )

    def _prefill(self, outputs: int) -> tuple[Op, ...]:
        shape = {"batch": self.batch, "channels": self.channels, "inputs": self.prompt, "outputs": outputs}
        op = conv.conv_prefill(**shape, dtype=self.dtype)
        found: list[Op] = []
        for layer in self._levels:
            found += (at_layer(op, layer), *self._block(layer, self.batch * self.prompt))
        return (*found, self._next_input())


# -- which contributions an op accounts for --------------------------------------------------------------


class Cells(NamedTuple):
    """Contributions of `inputs` (first, one past the last) to level `layer`: to the positions `outputs` (a
    rectangle), or over the distances `lags` (a parallelogram)."""

    layer: int
    inputs: tuple[int, int]
    outputs: tuple[int, int] | None
    lags: tuple[int, int] | None = None


def cells(op: Op, total: int) -> Iterator[Cells]:
    """The contributions among `total` positions that an op without run-time sizes computes; none for ops of
    a block."""
    if op.kind not in {*conv.MIXER_KINDS, "token_step"} or op.kind in (
        "filter_tap",
        "generic_read",
        "slot_shift",
    ):
        return
    first, t = op.where("layer"), op.where("position")
    layers = next((value for name, value in op.shape if name == "layers"), 1)
    assert isinstance(layers, int)
    for layer in range(first, first + layers):
        for inputs, outputs, lags in _areas(op, t, total):
            yield Cells(layer, inputs, outputs, lags)


Span = tuple[int, int]


def _areas(op: Op, t: int, total: int) -> Iterator[tuple[Span, Span | None, Span | None]]:
    here = (t, t + 1)
    match op.kind:
        case "conv_row":
            yield (t - op["inputs"], t), here, None
        case "conv_column":
            yield here, (t + 1, t + 1 + op["outputs"]), None
        case "conv_cell" | "generic_cell" | "token_step":
            yield here, here, None
        case "conv_prefill":
            # Causal: no output depends on later inputs.
            for i in range(op["inputs"]):
                yield (i, i + 1), (i, op["outputs"]), None
        case "conv_carry":
            yield (t + 1 - op["inputs"], t + 1), (t + 1, t + 1 + op["outputs"]), None
        case "relaxed_cell":
            yield here, None, (0, 1)
            if t:
                yield (0, 1), None, (t, t + 1)
        case "relaxed_tile":
            old = (op.where("first"), op.where("first") + op["side"])
            new = (t + 1 - op["side"], t + 1)
            yield old, None, new
            if op["products"] == 2:
                yield new, None, old
        case _:
            yield (t + 1 - op["side"], t + 1), (t + 1, min(total, t + 1 + op["outputs"])), None
