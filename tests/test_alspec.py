"""Attention-level speculation against its formulas: ALSpec appendix F, and the ring of Figure 4."""

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.assembly import assemble
from simcore.machine import laws
from simcore.machine.machine import Machine, Overheads
from simcore.machine.metrics import tokens as tokens_of
from simcore.machine.trace import Trace
from simcore.models.decoder import Decoder
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import Graph, Pricer
from simcore.scenario import parse_scenario
from simcore.schedules.alspec import alspec
from simcore.schedules.alspec_pipelined import alspec_pipelined
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.sim.simulation import Simulation
from simcore.studies.decode.speculation import HitPattern, RateHits, hit_draws
from tests.programs import by_name
from tests.thorough import examples, slow

NEAR = 1e-9
fixed = settings(derandomize=True, database=None)


@cache
def decoder(layers: int, ranks: int = 1, parts: bool = False) -> Decoder:
    config = DecoderConfig("toy", 8, 16, layers, 4, 4, 2, 32, tied_embeddings=True)
    return Decoder(config, ranks=ranks, parts=parts)


def latencies(trace: Trace) -> list[float]:
    assert laws.violations(trace) == {}
    return [token.latency_s for token in tokens_of(trace)]


@dataclass(frozen=True)
class Costs:
    """Seconds: outside the layers; of a layer before and after its attention; of attention as sender,
    and until its early part is there; of an exchange of priorities."""

    fixed: float
    before: float
    after: float
    sends: float
    receives: float
    exchange: float = 0.0

    @property
    def per_layer(self) -> float:
        return self.before + self.after

    def price(self, parts: bool) -> Pricer:
        """All of the layer after attention (`parts`), or divided into what stands before and after it."""
        attention = {"attention": self.sends, "exchange": self.exchange}
        if parts:
            work = {"non_attention": self.per_layer, "outside_layers": self.fixed}
        else:
            work = {"qkv": self.before, "o": self.after, "lm_head": self.fixed}
        return by_name(attention | work, {"attention": self.receives})

    def appendix_f(self, hits: int, misses: int) -> float:
        overlapped = self.receives + max(self.sends - self.receives, self.per_layer)
        return self.fixed + hits * overlapped + misses * (self.per_layer + self.sends)


seconds = st.floats(0.0, 10.0, allow_subnormal=False)
costs = st.builds(
    lambda fixed, before, after, sends, share: Costs(fixed, before, after, sends, share * sends),
    *[seconds] * 4,
    st.floats(0.0, 1.0),
)
rates = st.integers(0, 32).map(lambda k: k / 32) | st.floats(0.0, 1.0)


def run_alspec(
    c: Costs,
    hits: HitPattern,
    layers: int,
    *,
    tokens: int = 1,
    ranks: int = 1,
    parts: bool = True,
    overlap: bool = False,
) -> Trace:
    simulation = Simulation(c.price(parts), mesh={"group": 2, "tensor": ranks}, outcomes={"hit": hits})
    model = decoder(layers, ranks, parts)
    return simulation.run(lambda m: alspec(m, model, tokens=tokens, context=9, overlap_last_layer=overlap))


def run_tensor_parallel(c: Costs, layers: int, *, ranks: int = 1, parts: bool = True) -> Trace:
    simulation = Simulation(c.price(parts), mesh={"tensor": ranks})
    return simulation.run(lambda m: tensor_parallel(m, decoder(layers, ranks, parts), tokens=1, context=9))


# -- appendix F ----------------------------------------------------------------------------------


@slow
@settings(fixed, max_examples=examples(200))
@given(
    c=costs,
    layers=st.integers(1, 12) | st.just(32),
    rate=rates,
    rounding=st.sampled_from(["floor", "ceil", "fractional"]),
)
def test_a_token_takes_what_appendix_f_says(c: Costs, layers: int, rate: float, rounding: str) -> None:
    """The mean of the draws is the formula at the mean number of hits: it is linear in them."""
    draws = hit_draws(rate, layers, rounding)  # type: ignore[arg-type]
    mean = expected = 0.0
    for weight, pattern in draws:
        hits = sum(pattern(0, layer) for layer in range(layers))
        mean += weight * latencies(run_alspec(c, pattern, layers))[0]
        expected += weight * c.appendix_f(hits, layers - hits)
    assert mean == pytest.approx(expected, rel=NEAR, abs=NEAR)


@pytest.mark.parametrize("k", [0, 1, 16, 20, 28, 32])
def test_floor_rounding_counts_hits_and_misses_as_the_paper_does(k: int) -> None:
    """floor(32 r) hits and ceil(32 (1 - r)) misses, at multiples of 1/32 and a little above them."""
    c = Costs(3.0, 0.0, 2.0, 1.5, 0.25)
    for rate in (k / 32, min(1.0, k / 32 + 0.01)):
        ((_, pattern),) = hit_draws(rate, 32, "floor")
        token = latencies(run_alspec(c, pattern, 32))[0]
        assert token == pytest.approx(c.appendix_f(k, 32 - k), rel=NEAR)


@settings(fixed, max_examples=examples(50))
@given(c=costs, layers=st.integers(1, 12), ranks=st.sampled_from([1, 2, 4]))
def test_tensor_parallel_is_fixed_plus_layers(c: Costs, layers: int, ranks: int) -> None:
    token = latencies(run_tensor_parallel(c, layers, ranks=ranks))[0]
    assert token == pytest.approx(c.fixed + layers * (c.per_layer + c.sends), rel=NEAR, abs=NEAR)


@slow
@settings(fixed, max_examples=examples(30))
@given(c=costs, layers=st.integers(1, 6), seed=st.integers(0, 99), ranks=st.sampled_from([2, 4]))
def test_ranks_of_a_group_work_as_one(c: Costs, layers: int, seed: int, ranks: int) -> None:
    hits = RateHits(0.5, seed)
    several, one = (run_alspec(c, hits, layers, tokens=2, ranks=r, parts=False) for r in (ranks, 1))
    assert latencies(several) == pytest.approx(latencies(one), rel=NEAR, abs=NEAR)


# -- a part of the layer stands before attention -------------------------------------------------


def divided_token(c: Costs, hits: list[bool]) -> float:
    """Appendix F where `before` of a layer's work precedes its attention: what a hit overlaps is `after`
    and the next layer's `before`, so the first `before` is exposed and the last interval holds `after`
    alone."""
    total = c.fixed + c.before
    for layer, hit in enumerate(hits):
        rest = c.after if layer == len(hits) - 1 else c.per_layer
        total += c.receives + max(c.sends - c.receives, rest) if hit else c.sends + rest
    return total


patterns = st.lists(st.booleans(), min_size=1, max_size=10)


@slow
@settings(fixed, max_examples=examples(100))
@given(c=costs, hits=patterns)
def test_a_divided_layer_exposes_the_first_part_before_attention(c: Costs, hits: list[bool]) -> None:
    token = latencies(run_alspec(c, lambda _, i: hits[i], len(hits), parts=False))[0]
    assert token == pytest.approx(divided_token(c, hits), rel=NEAR, abs=NEAR)
    excess = min(c.before, max(0.0, c.sends - c.receives - c.after)) if hits[-1] else 0.0
    assert token == pytest.approx(c.appendix_f(sum(hits), hits.count(False)) + excess, rel=NEAR, abs=NEAR)


# -- the last layer ------------------------------------------------------------------------------


@settings(fixed, max_examples=examples(80))
@given(c=costs, hits=patterns)
def test_overlapping_the_last_layer_gains_what_the_head_hides(c: Costs, hits: list[bool]) -> None:
    """One token: on a hit of the last layer, as much of its attention as outlasts the rest of the layer,
    and at most the LM head."""
    plain, overlapped = (
        latencies(run_alspec(c, lambda _, i: hits[i], len(hits), parts=False, overlap=overlap))[0]
        for overlap in (False, True)
    )
    outlasts = max(0.0, c.sends - c.receives - c.after)
    gain = min(c.fixed, outlasts) if hits[-1] else 0.0
    assert plain - overlapped == pytest.approx(gain, rel=NEAR, abs=NEAR)


@settings(fixed, max_examples=examples(40))
@given(c=costs, layers=st.integers(1, 5), tokens=st.integers(1, 5), seed=st.integers(0, 99))
def test_overlapping_the_last_layer_is_never_slower(c: Costs, layers: int, tokens: int, seed: int) -> None:
    ends = []
    for overlap in (False, True):
        trace = run_alspec(c, RateHits(0.6, seed), layers, tokens=tokens, parts=False, overlap=overlap)
        ends.append([token.end_s for token in tokens_of(trace)])
    for plain, overlapped in zip(*ends, strict=True):
        assert overlapped <= plain + NEAR


# -- what must hold whatever hits ----------------------------------------------------------------


@settings(fixed, max_examples=examples(40))
@given(
    c=costs,
    exchange=seconds,
    layers=st.integers(1, 8),
    tokens=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_on_misses_only_it_is_tensor_parallelism_with_exchanges(
    c: Costs, exchange: float, layers: int, tokens: int, overlap: bool
) -> None:
    with_exchange = replace(c, exchange=exchange)
    trace = run_alspec(with_exchange, lambda *_: False, layers, tokens=tokens, parts=False, overlap=overlap)
    plain = latencies(run_tensor_parallel(c, layers, parts=False))[0]
    exchanges = layers + (not overlap)
    assert latencies(trace) == pytest.approx([plain + exchanges * exchange] * tokens, rel=NEAR, abs=NEAR)


def attending(trace: Trace, group: int) -> list[bool]:
    """Whether a group attended exactly (rather than received), by layer; it never does both or neither."""
    on_stream = (s for s in trace.spans if s.rank == group and s.stream == "main")
    spans = sorted(on_stream, key=lambda s: s.launch)
    holds = [s.state == "run" for s in spans if s.graph == "speculate"]
    assert holds == [s.state == "skipped" for s in spans if s.graph == "receive"]
    return holds


@settings(fixed, max_examples=examples(40))
@given(
    c=costs,
    layers=st.integers(1, 6),
    tokens=st.integers(1, 4),
    seed=st.integers(0, 99),
    overlap=st.booleans(),
)
def test_exactly_one_group_holds_after_each_exchange(
    c: Costs, layers: int, tokens: int, seed: int, overlap: bool
) -> None:
    hits = RateHits(0.5, seed)
    trace = run_alspec(c, hits, layers, tokens=tokens, parts=False, overlap=overlap)
    holder, expected = 0, []
    for token in range(tokens):
        for layer in range(layers):
            expected.append(holder == 0)
            holder = 1 - holder if hits(token, layer) else holder
    assert attending(trace, 0) == expected
    assert attending(trace, 1) == [not first for first in expected]


def test_a_launch_that_is_gated_costs_its_kernels() -> None:
    """On misses only the holder waits for its own gated receive, one kernel a layer."""
    c, layers = Costs(1.0, 1.0, 1.0, 2.0, 1.0), 3
    simulation = Simulation(
        c.price(False),
        mesh={"group": 2, "tensor": 1},
        overheads=Overheads(gate_s=0.125),
        outcomes={"hit": lambda *_: False},
    )
    trace = simulation.run(lambda m: alspec(m, decoder(layers), tokens=1, context=9))
    assert latencies(trace) == pytest.approx([1.0 + layers * (2.0 + 2.0) + layers * 0.125])


# -- a ring of groups ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Seconds: early part, whole attention, rest of a layer (after one attention, before the next one),
    from the token to its first attention, from the last attention's output to the next token."""

    early: float
    attention: float
    rest: float
    first: float
    last: float
    groups: int

    def price(self) -> Pricer:
        # "between" is `after` and `before`: the whole rest is put before attention.
        work = {
            "attention": self.attention,
            "qkv": self.rest,
            "embedding": self.first - self.rest,
            "lm_head": self.last,
        }
        return by_name(work, {"attention": self.early})


def run_ring(ring: Ring, hits: HitPattern, layers: int, tokens: int = 1) -> Trace:
    simulation = Simulation(ring.price(), mesh={"group": ring.groups}, outcomes={"hit": hits})
    return simulation.run(lambda m: alspec_pipelined(m, decoder(layers), tokens=tokens, context=9))


def test_each_token_is_computed_at_its_own_context() -> None:
    """After 9 cached ones, whether it is right from the first or, after a miss, anew."""
    contexts: dict[str, set[int]] = {}

    class Noting:
        def __init__(self, machine: Machine) -> None:
            self.machine = machine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.machine, name)

        def launch(self, graph: Graph, **how: Any) -> Any:
            if "sizes" in how:
                contexts.setdefault(graph.name, set()).add(how["sizes"]["context"])
            return self.machine.launch(graph, **how)

    ring = Ring(early=1.0, attention=8.0, rest=1.0, first=2.0, last=1.0, groups=3)
    hits = {(token, layer): layer != 1 for token in range(4) for layer in range(3)}
    simulation = Simulation(ring.price(), mesh={"group": 3}, outcomes={"hit": lambda t, i: hits[t, i]})
    simulation.run(lambda m: alspec_pipelined(cast(Machine, Noting(m)), decoder(3), tokens=4, context=9))
    assert len(contexts) == 3
    assert all(seen == {9, 10, 11, 12} for seen in contexts.values())


def token_ends(trace: Trace) -> list[float]:
    assert laws.violations(trace) == {}
    return [token.end_s for token in tokens_of(trace)]


class RingModel:
    """The recursion of the ring, with the work that a miss makes void.

    Layer i is attended from s_i on by group g, and hits:  s_{i+1} = max(s_i + early, free(g+1)) + rest
    on group g+1;  misses:  s_{i+1} = s_i + attention + rest  on group g.

    Until a miss is found, at s_i + attention, the others have gone on from the speculation: each group in
    turn whose host is idle by then takes the layer, and its device works through rest and attention (or
    the end of the token) in vain. A group whose host is not takes only the early part, once it has come.
    """

    def __init__(self, ring: Ring, hits: HitPattern, layers: int) -> None:
        self.ring, self.hits, self.layers = ring, hits, layers
        self.free = [0.0] * ring.groups  # when the device of a group has done what it was given
        self.idle = [0.0] * ring.groups  # when its host has
        self.void: list[list[float]] = [[] for _ in range(ring.groups)]  # early parts not taken yet
        self.wasted_s = 0.0

    def receive(self, group: int, early_s: float, issued_s: float) -> float:
        """When a group has an early part, after all those that came before."""
        self.free[group] = max([self.free[group], *self.void[group], early_s, issued_s])
        self.void[group] = []
        return self.free[group]

    def ends(self, tokens: int) -> list[float]:
        r, now, g, ends = self.ring, 0.0, 0, []
        for token in range(tokens):
            known_s = now
            start = max(now, self.free[g]) + r.first
            for layer in count():
                verified = start + r.attention
                final = layer == self.layers - 1
                if self.hits(token, layer):
                    self.free[g] = self.idle[g] = verified
                    g = (g + 1) % r.groups
                    known_s = max(known_s, self.idle[g])
                    x = self.receive(g, start + r.early, known_s)
                else:
                    self.mislead(g, layer, start, known_s, verified)
                    x = known_s = self.free[g] = verified
                if final:
                    now = max(x + r.last, verified)
                    self.free[g], self.idle[g] = x + r.last, now
                    break
                start = x + r.rest
            ends.append(now)
        return ends

    def mislead(self, g: int, layer: int, start: float, known_s: float, verified: float) -> None:
        """What the other groups make of a layer that will be found to have missed."""
        r = self.ring
        for k in range(1, r.groups + 1):
            group = (g + k) % r.groups
            known_s = max(known_s, self.idle[group]) if k < r.groups else verified
            if known_s >= verified:
                self.void[group].append(start + r.early)
                return
            x = self.receive(group, start + r.early, known_s)
            self.idle[group] = verified
            if layer + k == self.layers:
                self.free[group] = x + r.last
                return
            start = x + r.rest
            self.free[group] = start + r.attention
            self.wasted_s += r.rest + r.attention


positive = st.floats(0.01, 10.0, allow_subnormal=False)
rings = st.builds(
    lambda share, attention, rest, extra, last, groups: Ring(
        share * attention, attention, rest, rest + extra, last, groups
    ),
    st.floats(0.01, 0.99),
    positive,
    positive,
    positive,
    positive,
    st.integers(2, 8),
)


@slow
def test_the_ring_is_its_recursion() -> None:
    wasted: list[bool] = []

    @settings(fixed, max_examples=examples(200))
    @given(
        ring=rings,
        rate=st.floats(0.0, 1.0),
        seed=st.integers(0, 10**6),
        layers=st.integers(1, 12),
        tokens=st.integers(1, 4),
    )
    def check(ring: Ring, rate: float, seed: int, layers: int, tokens: int) -> None:
        hits = RateHits(rate, seed)
        model = RingModel(ring, hits, layers)
        expected = model.ends(tokens)
        assert token_ends(run_ring(ring, hits, layers, tokens)) == pytest.approx(expected, rel=NEAR)
        wasted.append(model.wasted_s > 0.0)

    check()
    assert wasted.count(True) > examples(50)


@settings(fixed, max_examples=examples(40))
@given(ring=rings, layers=st.integers(1, 8))
def test_with_enough_groups_a_token_of_hits_takes_scenario_1(ring: Ring, layers: int) -> None:
    r = replace(ring, groups=layers + 1)
    expected = r.first + (layers - 1) * (r.early + r.rest) + max(r.early + r.last, r.attention)
    assert token_ends(run_ring(r, lambda *_: True, layers)) == pytest.approx([expected], rel=NEAR)


@settings(fixed, max_examples=examples(40))
@given(ring=rings, hits=st.lists(st.booleans(), min_size=1, max_size=7))
def test_with_enough_groups_void_work_delays_nothing(ring: Ring, hits: list[bool]) -> None:
    """Void work on the group k places on ends at s_i + attention + k (early + rest), which is when the
    right x comes there: a miss costs attention - early, and on the last layer no more than its end."""
    r = replace(ring, groups=len(hits) + 1)
    start = r.first + sum((r.early if hit else r.attention) + r.rest for hit in hits[:-1])
    end = max(r.early + r.last, r.attention) if hits[-1] else r.attention + r.last
    assert token_ends(run_ring(r, lambda _, i: hits[i], len(hits))) == pytest.approx([start + end], rel=NEAR)


@settings(fixed, max_examples=examples(40))
@given(ring=rings, layers=st.integers(2, 8), data=st.data())
def test_one_miss_costs_an_attention_less_its_early_part(
    ring: Ring, layers: int, data: st.DataObject
) -> None:
    r = replace(ring, groups=layers + 1)
    missed = data.draw(st.integers(0, layers - 2))
    (all_hit,), (one_missed,) = (
        token_ends(run_ring(r, lambda _, i, m=m: i != m, layers))  # type: ignore[misc]
        for m in (None, missed)
    )
    assert one_missed - all_hit == pytest.approx(r.attention - r.early, rel=NEAR, abs=NEAR)


def test_with_few_groups_void_work_delays_what_comes_after() -> None:
    """Two groups, attention 10, early part 1, rest 1. Layer 0 on group 0 from 1 to 11, layer 1 on group 1
    from 3 to 13, a miss; group 0 meanwhile attends layer 2 in vain from 12 to 22. Layer 2 on group 1 from
    14 to 24; layer 3 is known at 15 on group 0, but starts only at 22 + 1 and ends at 33. Without the void
    work it would have ended at 26."""
    r = Ring(early=1.0, attention=10.0, rest=1.0, first=1.0, last=1.0, groups=2)
    trace = run_ring(r, lambda _, layer: layer != 1, 4)
    attended = {
        (s.rank, s.start_s, s.end_s)
        for s in trace.spans
        if s.graph == "speculate_ahead" and s.stream == "main"
    }
    assert attended == {(0, 1.0, 11.0), (1, 3.0, 13.0), (0, 12.0, 22.0), (1, 14.0, 24.0), (0, 23.0, 33.0)}
    assert token_ends(trace) == [33.0]


@settings(fixed, max_examples=examples(150))
@given(
    ring=rings,
    rate=st.floats(0.0, 1.0),
    seed=st.integers(0, 9999),
    layers=st.integers(1, 10),
    tokens=st.integers(1, 3),
)
def test_more_groups_are_never_slower(ring: Ring, rate: float, seed: int, layers: int, tokens: int) -> None:
    """In the recursion, which the test above holds the simulation to."""
    hits = RateHits(rate, seed)
    for fewer, more in pairwise(range(2, 8)):
        slow, fast = (RingModel(replace(ring, groups=n), hits, layers).ends(tokens) for n in (fewer, more))
        assert all(b <= a + NEAR for a, b in zip(slow, fast, strict=True))


MODELS = Path(__file__).resolve().parent.parent / "scenarios/models"


@pytest.mark.parametrize("layers", range(1, 7))
def test_a_study_of_any_number_of_layers_shows_a_hit_and_a_miss_where_a_layer_is_an_inner_one(
    layers: int, tmp_path: Path
) -> None:
    model = json.loads((MODELS / "tiny-llama.json").read_text(encoding="utf-8"))
    (tmp_path / "model.json").write_text(json.dumps({**model, "num_hidden_layers": layers}), encoding="utf-8")
    given: dict[str, object] = {
        "name": "few",
        "study": "decode",
        "device": "h200-sxm",
        "profile": "none",
        "model": str(tmp_path / "model.json"),
        "context_tokens": [512],
        "strategies": [{"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": 0.5}}],
    }
    parts = assemble(parse_scenario(given, str(tmp_path / "few.yaml")), str(tmp_path / "few.yaml"))
    found = parts.study.run(lambda doing, done, total: None)
    assert {row.axes.strategy for row in found.rows} >= {"alspec"}
    shown = {outcome: [s for s in found.timeline if s["outcome"] == outcome] for outcome in ("hit", "miss")}
    if layers < 4:
        assert found.timeline == []
        return
    for span in found.timeline:
        assert span["end_s"] > span["start_s"] or span["state"] != "waiting"
    # What is skipped after a hit is run after a miss.
    skipped = {name: {s["name"] for s in spans if s["state"] == "skipped"} for name, spans in shown.items()}
    assert skipped["hit"]
    assert skipped["hit"] != skipped["miss"]
