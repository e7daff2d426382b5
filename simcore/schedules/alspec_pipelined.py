"""Attention-level speculation over a ring of groups: speculation on results that are still speculative.

ALSpec (Cai et al., ICML 2025), Algorithm 1, Figure 4 scenarios 1 and 2. For contexts so long that
attention takes longer than the rest of a layer: the group that attends layer i sends the early part to the
next group of the ring, which finishes layer i, begins to attend layer i+1, sends its early part on, and so
forth, while the exact attentions still run. With enough groups (scenario 1) and only hits a token takes

    (layers - 1) * (early + rest) + max(early + rest, attention)

With fewer groups (scenario 2) a layer waits until its group has finished the attention before. On a miss the
group that finds it continues with its exact result, and all work built on the speculation is void. With more
groups than layers void work never delays: a miss makes the token late by one attention less its early part.
With fewer groups it can delay, because launched work is not cancelled.

The residual stream and the layer's new K and V travel with the early part. The groups further along the ring
get K and V later, which is not modelled: they need them a token later.

The hosts decide, from the verdict, by messages around the ring: a baton (continue from my layer) when an
attention is launched, and later, on the inbox "ground", whether the speculation behind that baton was right.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from simcore.machine.machine import Machine, Program, Verdict
from simcore.models.decoder import GROUP, SPECULATED, Decoder

Result = Generator[Any, Any, bool]


@dataclass(frozen=True, slots=True)
class Baton:
    """A message: the speculated attention of a layer is on its way; the receiver continues from it."""

    token: int
    layer: int


@dataclass(frozen=True, slots=True)
class Done:
    """A message: a token is complete; group `holder` has it."""

    token: int
    holder: int


def alspec_pipelined(m: Machine, model: Decoder, *, tokens: int, context: int) -> Program:
    """Decodes `tokens` tokens after `context` cached ones; marks "token i" at the end of each.

    Mesh: {"group": any number from 2}. Verdict "hit", keyed by token and layer.
    """
    holder = 0
    for token in range(tokens):
        if m.rank == holder:
            m.launch(model.first, sizes={"context": context + token})
            out = yield from _go_on(m, model, token, 0, context, exact=True)
            if out:
                continue
        while True:
            message = yield m.recv("ring")
            if isinstance(message, Done):
                holder = message.holder
                break
            out = yield from _follow(m, model, message, token, context)
            if out:
                holder = m.rank
                break


def _follow(m: Machine, model: Decoder, baton: Baton, token: int, context: int) -> Result:
    """Continues from the previous group's speculation. Returns whether this rank finished the token."""
    m.launch(model.receive, after=[m.signal(SPECULATED, rank=m.along(GROUP, -1))])
    known = yield m.recv("ground", timeout_s=0.0)
    if known is None and baton.token != token:
        known = yield m.recv("ground")
    if known is False or baton.token != token:
        return False
    if baton.layer == model.config.layers - 1:
        return (yield from _finish(m, model, token, context, known))
    m.launch(model.between)
    return (yield from _go_on(m, model, token, baton.layer + 1, context, exact=False, known=known))


def _go_on(
    m: Machine,
    model: Decoder,
    token: int,
    layer: int,
    context: int,
    *,
    exact: bool,
    known: bool | None = None,
) -> Result:
    """Attends a layer, and after each miss also the next one. Returns whether this rank finished the token.

    `exact`: x was not speculated. `known`: whether the speculation behind x was right; None if that is not
    known yet.
    """
    following = m.along(GROUP, 1)
    missed = m.flag("missed")
    while True:
        verdict = Verdict("hit", (token, layer), yes=0, no=1)
        attention = m.launch(
            model.speculate_ahead, sizes={"context": context + token}, sets={missed: verdict}
        )
        m.send("ring", Baton(token, layer), following)
        if not exact and known is None:
            known = yield m.recv("ground")
        if not exact and not known:
            m.send("ground", False, following)
            return False
        hit = not (yield m.read(missed, attention))
        m.send("ground", hit, following)
        if hit:
            return False
        exact, known = True, None
        if layer == model.config.layers - 1:
            return (yield from _finish(m, model, token, context, True))
        m.launch(model.between)
        layer += 1


def _finish(m: Machine, model: Decoder, token: int, context: int, known: bool | None) -> Result:
    """Runs the rest of the last layer and the LM head; tells all other groups when the token is complete."""
    last = m.launch(model.last, sizes={"context": context + token})
    if known is None:
        known = yield m.recv("ground")
    if not known:
        return False
    m.mark(f"token {token}", [last])
    yield m.wait(last)
    for offset in range(1, m.mesh[GROUP]):
        rank = m.along(GROUP, offset)
        m.send("ring", Done(token, m.rank), rank)
    return True
