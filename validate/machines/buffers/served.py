"""The buffers of one rank that serves: real tensors of the right sizes, as far as a step's sizes give them.

    lengths of the sequences of a step = kv_tokens / sequences each, or one more

A step gives only the totals of its rows, sequences and cached tokens (`models.served_decoder`), not their
owners. So the cached tokens are split evenly among the sequences and lie one after another from the beginning
of the pool, prompts likewise, as prompts of one length; ids are drawn once, and new K and V are written round
the pool. The work is right; the text has no meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.attention import evenly, prompts_of
from simcore.machine import mesh as layout
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op
from simcore.validate.machines.buffers.decoder import Body, bodies, check_ranks
from simcore.validate.machines.state import State, run_kernel, torch_dtype


@dataclass(eq=False, repr=False)
class ServedState(State):
    """One rank's buffers for the graphs of `simcore.models.served_decoder.ServedDecoder`.

    `pool`: the KV cache [layers, 2, kv_tokens, kv_heads, head_dim]; `known`: the ids that steps read. There
    is one set of activations: launches on several streams may meet other ranks only in lockstep. Raises
    ValueError if a step attends over, appends or moves more tokens than the pool has.
    """

    body: Body
    pool: Tensor
    known: Tensor
    _next: int = 0
    _new: tuple[Tensor, ...] = ()

    def execute(self, op: Op) -> None:
        """Runs a local op."""
        own: dict[str, Callable[[Op], None]] = {
            "embedding": self._embed,
            "rotary": self._turn,
            "kv_append": self._append,
            "paged_attention": self._attend_paged,
            "prefill_attention": self._attend_prompts,
            "kv_copy": self._move,
        }
        own.get(op.kind, self.body.execute)(op)

    def skip(self, op: Op) -> None:
        """Passes over an op."""
        self.body.skip(op)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Runs a collective between the ranks of one server."""
        self.body.meet(op, [state.body for state in states])

    def _embed(self, op: Op) -> None:
        tokens = op["tokens"]
        self.body.ids = self.known.repeat(-(-tokens // len(self.known)))[:tokens]
        self.body.execute(op)

    def _turn(self, op: Op) -> None:
        self._new = run_kernel(op, self.body.buffers["qkv"], *self.body.angles.of(0, op["tokens"]))
        # The attentions of this layer fill it: first the rows of prompts, then those of decoding sequences.
        self.body.buffers["heads"] = torch.empty_like(self._new[0]).flatten(1)

    def _append(self, op: Op) -> None:
        tokens = op["tokens"]
        self._check(tokens, "appends")
        if self._next + tokens > self.pool.shape[2]:
            self._next = 0
        _, k, v = self._new
        run_kernel(op, k, v, *self.pool[self.body.layer, :, self._next : self._next + tokens])
        self._next = (self._next + tokens) % self.pool.shape[2]

    def _check(self, tokens: int, what: str) -> None:
        if tokens > self.pool.shape[2]:
            raise ValueError(f"a step {what} {tokens:,} tokens; the KV cache has {self.pool.shape[2]:,}")

    def _attend_paged(self, op: Op) -> None:
        lengths = torch.tensor(evenly(op["kv_tokens"], op["sequences"]))
        self._attend(op, slice(-op["sequences"], None), lengths)

    def _attend_prompts(self, op: Op) -> None:
        self._attend(op, slice(0, op["tokens"]), *(torch.tensor(part) for part in prompts_of(op)))

    def _attend(self, op: Op, rows: slice, *lengths: Tensor) -> None:
        """Attends with some rows over cached tokens from the beginning of the pool on."""
        self._check(op["kv_tokens"], "attends over")
        k, v = self.pool[self.body.layer, :, : op["kv_tokens"]]
        out = run_kernel(op, self._new[0][rows].to(k.dtype), k, v, *lengths)
        self.body.buffers["heads"][rows] = out.flatten(1).to(self.body.activation)

    def _move(self, op: Op) -> None:
        tokens = op["tokens"]
        self._check(tokens, "moves")
        source = self.pool[:, :, :tokens]
        # More than half of the pool would overlap its copy there: it goes to a new buffer, as many bytes.
        apart = 2 * tokens <= self.pool.shape[2]
        run_kernel(op, source, self.pool[:, :, -tokens:] if apart else torch.empty_like(source))


def served_states(model: ServedDecoder, mesh: layout.Mesh, seed: int, kv_tokens: int) -> list[ServedState]:
    """Returns a state for every rank of a mesh, each with a cache of `kv_tokens` random tokens.

    Raises ValueError if the model is not for as many ranks as the mesh has along "tensor", is priced by whole
    iterations, or has a number format that torch does not compute in.
    """
    check_ranks(model, mesh)
    if model.whole:
        raise ValueError("the torch machine needs every op of an iteration")
    config = model.config
    generator = torch.Generator().manual_seed(seed + 1)
    known = torch.randint(config.vocab, (4096,), generator=generator)
    heads = max(1, config.kv_heads // model.ranks)
    size = (config.layers, 2, kv_tokens, heads, config.head_dim)
    dtype = torch_dtype(model.dtypes.kv)
    return [
        ServedState(body, torch.randn(size, generator=generator).to(dtype), known)
        for body in bodies(config, model.dtypes, model.style, mesh, seed)
    ]
