"""Attention-level speculation on two groups: static graph, dynamic concurrency with priority gating.

ALSpec (Cai et al., ICML 2025), Algorithm 2, Figure 4 scenario 3. Both groups issue the same launches; a
priority p in each rank's memory decides which of them run:

    p = 2   it holds the right x        p = 1   it continued from a speculated x        p = 0   it is idle

A token is one captured graph a rank (the paper's static graph), so that the host launches once a token, and
runs one token ahead.
At each attention the groups exchange their priorities. The group that holds x attends exactly, sends the
attention over the first and last chunk ahead, and verifies in the end whether that was close enough:

    hit    p = 0: the other group, p = 1, has continued from the right x, and holds x from here
    miss   p = 2: this group continues, and the work of the other group is void

so a layer costs  early + max(attention - early, rest)  on a hit and  attention + rest  on a miss
(App. F). The other group is a copy of the first, its ranks mapped one to one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from simcore.machine.machine import Condition, Flag, Machine, Program, Setting, Ticket, Verdict
from simcore.models.decoder import GROUP, SPECULATED, Decoder


def alspec(
    m: Machine, model: Decoder, *, tokens: int, context: int, overlap_last_layer: bool = True
) -> Program:
    """Decodes `tokens` tokens after `context` cached ones; marks "token i" at the end of each.

    With `overlap_last_layer` the LM head, and the next token's first operations, continue from the last
    attention's speculation before it is verified; without it both groups meet before the LM head, as in
    App. F's formula. Mesh: {"group": 2, "tensor": ranks}. Verdict "hit", keyed by token and layer.
    """
    priority = m.flag("priority", initial=2 if m.coordinate(GROUP) == 0 else 0)
    roles = _roles(m, priority)
    takes_part = priority.nonzero()
    layers = model.config.layers
    before: Ticket | None = None
    for token in range(tokens):
        sizes = {"context": context + token}
        begun = m.launch(model.first, sizes=sizes, when=takes_part)
        for layer in range(layers):
            attention = _attention(m, model, roles, (token, layer), sizes, begun)
            if layer < layers - 1:
                m.launch(model.between, sizes=sizes, when=takes_part, within=begun)
        if overlap_last_layer:
            last = m.launch(model.last, sizes=sizes, when=takes_part, within=begun)
            m.mark(f"token {token}", [attention, last])
            if before is not None:
                yield m.wait(before)
            before = last
        else:
            m.launch(model.after, sizes=sizes, when=takes_part, within=begun)
            m.launch(model.exchange(2), within=begun)
            last = m.launch(model.head, sizes=sizes, when=takes_part, within=begun)
            m.mark(f"token {token}", [last])
            yield m.wait(last)
    yield m.wait(last)


class _Roles(NamedTuple):
    """How a rank finds its role in an attention: what the exchange sets, when it attends exactly and when it
    receives, and what it sets then. The flag `holds` selects the role."""

    partner: int
    exchanged: Mapping[Flag, Setting]
    attends: Condition
    receives: Condition
    received: Mapping[Flag, Setting]
    priority: Flag


def _roles(m: Machine, priority: Flag) -> _Roles:
    partner = m.along(GROUP, 1)
    holds, theirs = m.flag("holds"), m.flag("priority", rank=partner)
    exchanged = {holds: priority.above(theirs)}
    return _Roles(partner, exchanged, holds.nonzero(), holds.zero(), {priority: 1}, priority)


def _attention(
    m: Machine,
    model: Decoder,
    roles: _Roles,
    key: tuple[int, int],
    sizes: Mapping[str, int],
    begun: Ticket,
) -> Ticket:
    """Launches both roles of Algorithm 2's speculative_flash_decode, within the token that `begun` began."""
    m.launch(model.exchange(2), sets=roles.exchanged, within=begun)
    verdict = Verdict("hit", key, yes=0, no=2)
    m.launch(model.speculate, sizes=sizes, when=roles.attends, sets={roles.priority: verdict}, within=begun)
    speculated = m.signal(SPECULATED, rank=roles.partner)
    return m.launch(model.receive, after=[speculated], when=roles.receives, sets=roles.received, within=begun)
