"""Prefix caching in a serving run: what is reused, against plain scripts that know only the requests, and
what sessions, recorded blocks and routers make of it.

    a run without a limit    a prompt's hits are the blocks it begins with, among those seen before it
    Mooncake's hash_ids      share of prompt tokens in blocks that a prompt begins with and that came before
"""

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.input.files import InputError
from simcore.scenario import parse_scenario
from simcore.schedules import continuous_batching as schedule_module
from simcore.schedules.continuous_batching import continuous_batching
from simcore.studies.serving.offer import PrefixAware, choice, router
from simcore.studies.serving.served import Served
from simcore.workload.arrivals import draw
from simcore.workload.drawn import Drawn, requests
from simcore.workload.requests import Request, blocks_for
from simcore.workload.spec import Workload
from tests import test_prefix_cache as walked
from tests.test_serving import Document, document, only, outcome, strategy, value, workload
from tests.test_serving_schedules import STEPWISE, serve
from tests.thorough import first, slow

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "traces"
INFINITE = 10**8


def caching(**more: Any) -> Document:
    return strategy("continuous_batching", 64, prefix_caching=True, **more)


def sessions(count: int = 60, rate_per_s: float = 4.0, **more: Any) -> Document:
    """Turns of chats at prices that let them overlap."""
    of = {
        "turns": {"kind": "uniform", "low": 1, "high": 6},
        "think_s": 0.5,
        "shared_prefix_tokens": 300,
        "max_context_tokens": 4000,
    }
    load = workload(count, {"kind": "poisson", "rate_per_s": rate_per_s}, (20, 400), (2, 60))
    return {**load, "sessions": {**of, **more}}


def drawn(load: Document, seed: int = 0, replica: int = 0) -> Drawn:
    return draw(Workload.model_validate(load), seed, replica)


# -- the schedule beside a plain LRU ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_server_that_serves_one_at_a_time_reuses_what_a_plain_lru_does(seed: int) -> None:
    random = Random(seed)
    block = random.choice([2, 4, 16])
    asked = walked.family(random, 30, 8)
    for i, one in enumerate(asked):
        one.arrival_s = 1000.0 * i
    longest = max(blocks_for(one.prompt_tokens + one.output_tokens, block) for one in asked)
    total = longest + random.randint(0, longest)
    schedule = partial(
        continuous_batching,
        blocks=total,
        block_tokens=block,
        token_budget=random.choice([3, 64, 4096]),
        prefix_caching=True,
    )
    plain = walked.Walked(total, block)
    found = serve(schedule, asked, STEPWISE)
    assert [one.cached_prompt_tokens for one in found.requests] == [plain.serve(one) for one in asked]
    assert max(one.cached_prompt_tokens for one in found.requests) > 0


def test_a_prompt_begun_in_a_step_is_known_to_the_next_one_of_the_same_step() -> None:
    """As in vLLM, where a block is known once the step that fills it is decided."""
    alike = [Request(i, 0.0, 12, 1, 1, content=((5, 12),)) for i in range(3)]
    schedule = partial(continuous_batching, blocks=100, block_tokens=4, prefix_caching=True)
    found = serve(schedule, alike, STEPWISE)
    assert [one.cached_prompt_tokens for one in found.requests] == [0, 8, 8]
    assert found.steps["kv_used"].max() == 5
    # In chunks of 8, the second one begins when two of the three blocks are known.
    found = serve(partial(schedule, token_budget=8), alike, STEPWISE)
    assert [one.cached_prompt_tokens for one in found.requests] == [0, 8, 8]


def test_what_is_kept_keeps_nobody_from_a_block() -> None:
    """A prompt that takes all blocks, after others that left theirs full."""
    asked = [Request(i, 100.0 * i, 16, 4, 4, content=((i, 16),)) for i in range(6)]
    asked.append(Request(6, 600.0, 76, 4, 4))
    schedule = partial(continuous_batching, blocks=20, block_tokens=4)
    plain = serve(schedule, asked, STEPWISE)
    kept = serve(partial(schedule, prefix_caching=True), asked, STEPWISE)
    assert [one.finish_s for one in kept.requests] == [one.finish_s for one in plain.requests]


def test_who_is_sent_back_finds_its_own_blocks_again() -> None:
    asked = [Request(i, 0.0, 8, 12, 12) for i in range(2)]
    schedule = partial(continuous_batching, blocks=8, block_tokens=4, token_budget=16)
    plain = serve(schedule, asked, STEPWISE)
    kept = serve(partial(schedule, prefix_caching=True), asked, STEPWISE)
    assert [one.preemptions for one in kept.requests] == [one.preemptions for one in plain.requests] == [0, 1]
    # It had 16 tokens. The other's answer takes one of the blocks that it leaves; 12 tokens are found again.
    assert plain.sizes("prefill", "prompt_tokens") == [16, 16, 1]
    assert kept.sizes("prefill", "prompt_tokens") == [16, 5]
    # What it found at first counts, not what it had left behind itself.
    assert [one.cached_prompt_tokens for one in kept.requests] == [0, 0]


@pytest.mark.parametrize("seed", first(4, range(12)))
def test_where_all_prompts_differ_a_run_is_the_same_with_and_without(seed: int) -> None:
    random = Random(seed)
    load = workload(30, {"kind": "poisson", "rate_per_s": 20.0}, (1, 400), (1, 60))
    of = {"token_budget": random.choice([64, 2048]), "block_tokens": random.choice([1, 4, 16])}
    plain, kept = (
        only(document(workload=load, seed=seed, strategies=[{**caching(**of), "prefix_caching": on}]))[1]
        for on in (False, True)
    )
    assert plain.served.preemptions.sum() == 0
    for name in Served.__slots__:
        assert getattr(plain.served, name).tobytes() == getattr(kept.served, name).tobytes(), name
    for name, column in plain.journal.items():
        assert column.tobytes() == kept.journal[name].tobytes(), name


@slow
def test_laws_hold_where_prompts_are_shared_and_blocks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running a case enforces them; here memory is short, so that requests are sent back too. What is counted
    as held and what the cache knows to be free are all blocks, in every step."""
    reused = preempted = steps = 0
    advance = schedule_module._finish_complete

    def checked(server: Any, *rest: Any) -> None:
        nonlocal steps
        steps += 1
        assert server.kv.used + server.cache.free == server.kv.total
        advance(server, *rest)
        assert server.kv.used + server.cache.free == server.kv.total

    monkeypatch.setattr(schedule_module, "_finish_complete", checked)
    for seed in range(20):
        random = Random(seed)
        block = random.choice([1, 4, 16])
        shared = {**workload(40, None, (1, 400), (1, 60)), "distinct_prompts": 5}
        load = sessions(40, 20.0) if seed % 2 else shared
        longest = drawn(load).longest_prompt + drawn(load).max_tokens
        of = {"token_budget": random.choice([64, 512]), "prefill": random.choice(["chunked", "first"])}
        given = document(
            workload=load,
            seed=seed,
            devices=random.choice([1, 2]),
            routing=random.choice(["prefix_aware", "least_loaded"]),
            kv_blocks=round(blocks_for(longest, block) * random.choice([1.0, 1.3, 3.0])),
            strategies=[caching(block_tokens=block, **of)],
        )
        done = only(given)[1].served
        assert done.finished.all()
        assert not (done.cached_prompt_tokens % block).any()
        reused += done.cached_prompt_tokens.sum()
        preempted += done.preemptions.sum()
    assert reused > 0
    assert preempted > 0
    assert steps > 1000


# -- sessions --------------------------------------------------------------------------------------------


@slow
def test_a_turn_begins_with_the_one_before_it_and_its_answer() -> None:
    found = drawn(sessions(200))
    assert found.turns is not None
    opens = found.turns.opens
    assert len(found.prompt_tokens) == len(opens) == 200
    grown = found.prompt_tokens[1:] - (found.prompt_tokens + found.output_tokens)[:-1]
    assert ((grown >= 20) & (grown <= 400))[~opens[1:]].all()
    first = found.prompt_tokens[opens] - 300
    assert ((first >= 20) & (first <= 400)).all()
    asked = list(requests(found))
    tokens = [walked.tokens_of(one) for one in asked]
    for i in range(1, 200):
        shared = 300 if opens[i] else len(tokens[i - 1])
        assert tokens[i][:shared] == tokens[i - 1][:shared]
        assert tokens[i][shared] != tokens[i - 1][shared : shared + 1]


def test_turns_come_after_the_answer_before_them() -> None:
    for kind in ("continuous_batching", "temporal_fusion", "dynamic_batching", "concurrent_instances"):
        load = sessions(30, 20.0)
        done = only(document(workload=load, devices=2, strategies=[strategy(kind)]))[1].served
        found = drawn(load)
        assert found.turns is not None
        assert done.finished.all()
        np.testing.assert_array_equal(done.prompt_tokens, found.prompt_tokens)
        later = np.flatnonzero(~found.turns.opens)
        think_s = done.arrival_s[later] - done.finish_s[later - 1]
        np.testing.assert_allclose(think_s, 0.5, rtol=0.0, atol=1e-9)
        first = done.arrival_s[found.turns.opens]
        assert found.arrival_s is not None
        np.testing.assert_allclose(first, found.arrival_s[found.turns.opens], rtol=0.0, atol=1e-9)


def test_sessions_are_the_same_whatever_else_changes() -> None:
    base, faster = drawn(sessions(100)), drawn(sessions(100, 40.0, think_s=3.0))
    np.testing.assert_array_equal(base.prompt_tokens, faster.prompt_tokens)
    np.testing.assert_array_equal(base.output_tokens, faster.output_tokens)
    assert base.arrival_s is not None
    assert faster.arrival_s is not None
    np.testing.assert_allclose(base.arrival_s, 10.0 * faster.arrival_s)
    assert not np.array_equal(drawn(sessions(100), 1).prompt_tokens, base.prompt_tokens)
    assert not np.array_equal(drawn(sessions(100), 0, 1).prompt_tokens, base.prompt_tokens)


def test_the_longest_prompt_is_that_of_the_last_turn() -> None:
    """Of three turns: the prefix, three questions and two answers, which come just so."""
    constant = {name: {"kind": "constant", "value": value} for name, value in (("q", 20), ("a", 6), ("t", 3))}
    load = sessions(30, turns=constant["t"])
    load |= {"prompt_tokens": constant["q"], "output_tokens": constant["a"]}
    found = drawn(load)
    assert found.longest_prompt == found.prompt_tokens.max() == 300 + 3 * 20 + 2 * 6


def test_a_session_ends_before_the_turn_that_no_context_holds() -> None:
    load = sessions(100, max_context_tokens=1000, turns={"kind": "constant", "value": 50})
    found = drawn(load)
    assert found.turns is not None
    assert found.longest_prompt == 1000 - 60
    assert found.prompt_tokens.max() <= 1000 - 60
    # Every session but the last one, which the number of requests cuts, ends for that reason.
    last = np.flatnonzero(found.turns.opens)[1:] - 1
    assert (found.prompt_tokens[last] + found.output_tokens[last] + 400 > 1000 - 60).all()
    assert found.rate_per_s == 4.0
    with pytest.raises(InputError, match="max_context_tokens: 700; a first turn may take 760 tokens"):
        drawn(sessions(100, max_context_tokens=700))
    # A first turn that takes all that there is is no fault.
    assert drawn(sessions(100, max_context_tokens=760)).longest_prompt <= 700
    with pytest.raises(InputError, match="turns: at most 1000 turns, got up to 1001"):
        drawn(sessions(100, turns={"kind": "constant", "value": 1001}))
    assert len(drawn(sessions(100, turns={"kind": "constant", "value": 1000})).prompt_tokens) == 100


@pytest.mark.parametrize("rate_per_s", [0.01, 5.0])
def test_sessions_reuse_all_that_was_computed(rate_per_s: float) -> None:
    """Of each turn the whole blocks that the turn before it computed; of a first one those that all share."""
    load = sessions(80, rate_per_s)
    found = drawn(load)
    assert found.turns is not None
    done = only(document(workload=load, kv_blocks=INFINITE, strategies=[caching()]))[1].served
    before = np.concatenate(([0], (found.prompt_tokens + found.output_tokens - 1)[:-1]))
    expected = np.where(found.turns.opens, 300, before) // 16 * 16
    expected[0] = 0
    np.testing.assert_array_equal(done.cached_prompt_tokens, expected)


# -- recorded blocks -------------------------------------------------------------------------------------


def trace(path: Path, **more: Any) -> Document:
    return {"arrivals": {"kind": "trace", "format": "mooncake", "path": str(path), **more}}


def mooncake(name: str) -> Path:
    path = TRACES / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout")
    return path


def counted(path: Path, block: int, most: int | None = None) -> tuple[float, float, float]:
    """What the hashes of a trace say, by a set alone, of the blocks of 512 that a prompt begins with and that
    came before it: their share of all blocks, and of the prompt tokens; and the share of the prompt tokens in
    whole blocks of `block` tokens of these, without the last token."""
    seen: set[int] = set()
    tokens = blocks = hit_blocks = hit_tokens = in_whole = 0
    for line in path.read_text().splitlines()[:most]:
        row = json.loads(line)
        prompt, names = row["input_length"], row["hash_ids"]
        hits = next((i for i, name in enumerate(names) if name not in seen), len(names))
        seen.update(names)
        tokens += prompt
        blocks += len(names)
        hit_blocks += hits
        hit_tokens += min(512 * hits, prompt)
        in_whole += min(512 * hits, prompt - 1) // block * block
    return hit_blocks / blocks, hit_tokens / tokens, in_whole / tokens


@slow
@pytest.mark.parametrize(
    ("name", "of_blocks", "of_tokens"), [("conversation", 0.366, 0.374), ("synthetic", 0.640, 0.651)]
)
def test_an_endless_cache_reuses_what_the_hashes_of_mooncake_say(
    name: str, of_blocks: float, of_tokens: float
) -> None:
    """One request after the other, all of the trace."""
    path = mooncake(name)
    hit_blocks, hit_tokens, in_whole = counted(path, 256)
    assert (hit_blocks, hit_tokens) == pytest.approx((of_blocks, of_tokens), abs=5e-4)
    cache = walked.PrefixCache(10**9, 256)
    asked = list(requests(drawn(trace(path))))
    prompts = np.array([one.prompt_tokens for one in asked])
    reused = np.array([walked.serve(cache, one) for one in asked])
    assert reused.sum() / prompts.sum() == in_whole
    assert abs(in_whole - hit_tokens) < 0.005
    # A block of the trace of which but a part is reused counts, too: the rest is less than a block here.
    assert abs((-(-reused // 512)).sum() / (-(-prompts // 512)).sum() - hit_blocks) < 0.005


@pytest.mark.parametrize("block", [64, 512])
def test_a_cache_with_a_limit_reuses_what_a_plain_lru_does(block: int) -> None:
    """The first requests of a trace, in a cache that holds a few of them."""
    path, total = mooncake("conversation"), 200_000 // block
    held: OrderedDict[Any, None] = OrderedDict((("empty", i), None) for i in range(total))
    cache = walked.PrefixCache(total, block)
    asked = list(requests(drawn({**trace(path), "requests": 400})))
    lines = path.read_text().splitlines()
    both = 0
    for one, line in zip(asked, lines, strict=False):
        row = json.loads(line)
        names = [(row["hash_ids"][(i + 1) * block // 512 - 1 if block == 512 else i * block // 512], i)
                 for i in range(row["input_length"] // block)]  # fmt: skip
        most = (row["input_length"] - 1) // block
        hits = next((i for i, name in enumerate(names[:most]) if name not in held), min(most, len(names)))
        for name in names[:hits]:
            del held[name]
        filled = row["input_length"] + row["output_length"] - 1
        for _ in range(blocks_for(filled, block) - hits):
            held.popitem(last=False)
        for i in reversed(range(blocks_for(filled, block))):
            name = names[i] if i < len(names) else (one.id, i)
            held[name if name not in held else (one.id, i)] = None
        assert walked.serve(cache, one) == hits * block
        both += hits
    assert both > 0


@slow
def test_an_overlapping_run_reuses_what_the_hashes_of_mooncake_say() -> None:
    path = mooncake("synthetic")
    load = {**trace(path, rate_scale=0.5), "requests": 300}
    # The longest of these prompts is longer than the model's context.
    given = document(
        workload=load,
        kv_blocks=INFINITE,
        strategies=[caching(block_tokens=256)],
        beyond_model_context=True,
    )
    share = value(outcome(given), "prefix_hit_share")
    _, hit_tokens, in_whole = counted(path, 256, 300)
    assert share == pytest.approx(in_whole, rel=1e-12)
    assert abs(share - hit_tokens) < 0.005


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"hash_ids": [1]}, r"line 2: 1 hash_ids; a prompt of 600 tokens has 2 blocks of 512"),
        ({"hash_ids": "1"}, "line 2: hash_ids must be a list of whole numbers, at least 0"),
        ({"hash_ids": [1, -1]}, "line 2: hash_ids must be a list of whole numbers, at least 0"),
        ({"hash_ids": [1, True]}, "line 2: hash_ids must be a list of whole numbers, at least 0"),
    ],
)
def test_hash_ids_that_cannot_be_right_are_refused(tmp_path: Path, more: Document, says: str) -> None:
    path = tmp_path / "m.jsonl"
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}]
    rows.append({**rows[0], **more})
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=says):
        drawn(trace(path))


def test_recorded_blocks_follow_their_requests(tmp_path: Path) -> None:
    """By time, with other lengths, with a spread of arrivals, and in blocks of another size."""
    path = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": at_ms, "input_length": 100, "output_length": 2, "hash_ids": [first, 9 + at_ms]}
        for at_ms, first in ((2000, 1), (0, 2), (1000, 1))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    named = trace(path, hash_block_tokens=64)
    assert [one.content[0] for one in requests(drawn(named))] == [(2, 64), (1, 64), (1, 64)]
    shorter = {**named, "prompt_tokens": {"kind": "constant", "value": 50}}
    assert [one.content for one in requests(drawn(shorter))] == [((2, 50),), ((1, 50),), ((1, 50),)]
    longer = {**named, "prompt_tokens": {"kind": "constant", "value": 500}}
    assert [one.content[-1][1] for one in requests(drawn(longer))] == [128, 128, 128]
    spread = drawn(trace(path, hash_block_tokens=64, jitter_s=9.0), 3)
    assert spread.hash_ids is not None
    assert sorted(spread.hash_ids) == [(1, 1009), (1, 2009), (2, 9)]
    assert spread.hash_ids != drawn(named).hash_ids


# -- routers ---------------------------------------------------------------------------------------------


def routed(choose: PrefixAware, text: int, prompt: int, open_requests: list[int]) -> int:
    return choose(Request(0, 0.0, prompt, 1, 1, content=((text, prompt),)), open_requests)


def test_a_router_prefers_the_server_that_was_sent_the_prompt_before() -> None:
    choose = PrefixAware([1000] * 3)
    assert routed(choose, 1, 160, [1, 0, 2]) == 1
    assert routed(choose, 1, 320, [0, 64, 0]) == 1
    # Half of this prompt is known there, and a tenth of that one.
    assert routed(choose, 1, 640, [0, 5, 0]) == 1
    assert routed(choose, 1, 6400, [0, 5, 0]) == 0
    # Nobody knows this one.
    assert routed(choose, 2, 320, [9, 8, 9]) == 1
    # Far more open requests than elsewhere: the least loaded one takes it, and knows it from now on.
    assert routed(choose, 2, 320, [1, 65, 0]) == 2
    assert routed(choose, 2, 320, [9, 8, 8]) == 1
    assert routed(choose, 2, 320, [9, 9, 8]) == 2
    # Far more, but not by half: where all have much to do, 64 requests are little.
    assert routed(choose, 3, 160, [9, 9, 8]) == 2
    assert routed(choose, 3, 160, [1000, 1000, 1400]) == 2
    assert routed(choose, 3, 160, [1000, 1000, 1600]) == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_a_router_forgets_what_a_server_cannot_have_any_more(by_name: bool) -> None:
    """The room of each is twenty blocks of 16 tokens."""
    choose: Any = choice("prefix_aware", [320] * 2) if by_name else PrefixAware([20] * 2)
    assert routed(choose, 1, 160, [0, 1]) == 0
    assert routed(choose, 2, 160, [0, 1]) == 0
    assert routed(choose, 1, 160, [1, 0]) == 0
    assert routed(choose, 3, 160, [0, 1]) == 0
    assert routed(choose, 2, 160, [1, 0]) == 1
    assert routed(choose, 1, 160, [1, 0]) == 0


def test_a_router_remembers_where_a_prompt_begins() -> None:
    """Of ten blocks the first two, as many as the server has room for; three of ten are a good part."""
    choose = PrefixAware([2, 2])
    assert routed(choose, 1, 160, [0, 1]) == 0
    assert routed(choose, 1, 6 * 16, [1, 0]) == 0
    assert routed(choose, 1, 7 * 16, [1, 0]) == 1
    choose = PrefixAware([3, 3])
    assert routed(choose, 1, 48, [0, 1]) == 0
    assert routed(choose, 1, 160, [1, 0]) == 0


def test_prompts_of_less_than_a_block_go_to_the_least_loaded() -> None:
    choose = PrefixAware([10] * 3)
    assert [routed(choose, 1, 15, loads) for loads in ([2, 1, 1], [0, 0, 0], [200, 100, 99])] == [1, 0, 2]


@slow
def test_a_router_that_knows_prefixes_keeps_sessions_where_they_are() -> None:
    load, shares = sessions(120, 10.0, shared_prefix_tokens=0), {}
    for routing in ("prefix_aware", "least_loaded", "round_robin"):
        given = document(workload=load, devices=4, routing=routing, strategies=[caching()])
        done = only(given)[1].served
        shares[routing] = done.cached_prompt_tokens.sum() / done.prompt_tokens.sum()
        opens = drawn(load).turns.opens  # type: ignore[union-attr]
        same = (done.instance[1:] == done.instance[:-1])[~opens[1:]]
        # Of a turn that adds much more than there was, little is known anywhere.
        assert same.mean() > 0.8 if routing == "prefix_aware" else same.mean() < 0.5
    assert shares["prefix_aware"] > 1.5 * max(shares["least_loaded"], shares["round_robin"])


def test_all_routers_are_made_by_name() -> None:
    for routing in ("prefix_aware", "least_loaded", "round_robin"):
        to, request = router(routing, [0, 4], [100, 100]), Request(0, 0.0, 5, 1, 1)
        assert (list(to(request)), to.open_requests) == ([0], [1, 0])
        to.answered(request, 1.0)
        assert to.open_requests == [0, 0]


# -- what a user sees ------------------------------------------------------------------------------------


def test_the_share_is_shown_where_prefixes_are_cached_only() -> None:
    load = {**workload(20), "distinct_prompts": 4}
    ways = [strategy("continuous_batching", 64), caching()]
    slots = outcome(document(workload=load, strategies=[strategy("temporal_fusion")]))
    assert "prefix_hit_share" not in {row.metric for row in slots.rows}
    found = outcome(document(workload=load, strategies=ways))
    shares = [row for row in found.rows if row.metric == "prefix_hit_share"]
    assert [row.axes.label.split(", ")[-1] for row in shares] == ["prefix caching"]
    # 16 of 20 prompts of 100 tokens come again: 6 whole blocks of each.
    assert shares[0].value == pytest.approx(16 * 96 / 2000)
    table = found.tables["requests.parquet"]["cached_prompt_tokens"]
    assert sorted(table.tolist()) == [0] * 24 + [96] * 16
    assert any("76.8% of the prompt tokens come from the cache" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"turns": 0}, "workload.sessions.turns"),
        ({"think_s": -1.0}, "workload.sessions.think_s"),
        ({"think_s": float("nan")}, "workload.sessions.think_s"),
        ({"shared_prefix_tokens": -1}, "workload.sessions.shared_prefix_tokens"),
        ({"max_context_tokens": 0}, "workload.sessions.max_context_tokens"),
        ({"thinks_s": 1.0}, "did you mean 'think_s'"),
    ],
)
def test_wrong_sessions_are_told_by_their_field(changes: Document, says: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_scenario(document(workload=sessions(**changes)), "test")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_sessions_need_a_process_that_they_begin_by() -> None:
    closed = {**sessions(), "arrivals": {"kind": "closed_loop", "clients": 2}}
    with pytest.raises(InputError, match=r"workload\.sessions: begin by arrivals of kind constant"):
        parse_scenario(document(workload=closed), "test")
    with pytest.raises(InputError, match=r"workload\.distinct_prompts: are given beside sessions"):
        parse_scenario(document(workload={**sessions(), "distinct_prompts": 3}), "test")
