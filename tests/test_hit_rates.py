"""The study of hit rates: its prompts, its network and attention against others, its laws, its command."""

import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from simcore.input.files import InputError
from simcore.kernels.decoder.speculative_attention import reference_speculative_attention
from simcore.validate.hit_rates import __main__ as command
from simcore.validate.hit_rates import tasks
from simcore.validate.hit_rates.decoding import (
    accepted,
    both,
    decode,
    dynamic,
    squares,
    static,
    static_layers,
)
from simcore.validate.hit_rates.network import Network, network, prompt, room, step
from simcore.validate.hit_rates.network import logits as head
from simcore.validate.hit_rates.study import Asked, broken_laws, draws, interval, rows
from simcore.validate.hit_rates.training import Training, context_at, decoder_of, trained
from simcore.validate.machines.buffers.checkpoint import read_checkpoint
from simcore.validate.machines.buffers.whole_weights import drawn
from tests.llama_files import MODELS, greedy, logits_of, tensors_of, written
from tests.thorough import slow

CPU = torch.device("cpu")
LAMBDAS = (0.0, 0.1, 0.3, 0.6, 1.0)
SMALL = ["--contexts", "40,48", "--chunk", "8", "--prompts", "12", "--layers", "2", "--hidden", "16"]
QUICK = [*SMALL, "--heads", "2", "--steps", "3", "--train-tokens", "128", "--device", "cpu"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small tensors on several threads wait for each other, for minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(seed: int = 0) -> Network:
    config = decoder_of(3, 32, 4)
    return network(config, drawn(config, seed, CPU), torch.float32)


def ids_of(count: int, context: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, context)))


# -- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("context", [tasks.SHORTEST, 77, 300])
def test_answers_are_read_from_prompts(task: str, context: int) -> None:
    found = tasks.TASKS[task](tasks.generator(1, tasks.HELD_OUT), 50, context)
    assert found.answers is not None
    assert found.ids.shape == (50, context)
    assert found.answers.shape == (50, found.tokens)
    whole = np.concatenate((found.ids, found.answers), 1)
    for ids, answer, both_ in zip(found.ids, found.answers, whole, strict=True):
        assert tasks.solved(ids) == answer.tolist()
        # What training learns follows from what stands before: recalls one by one, needles as a whole.
        if task == "recall":
            for at in found.asked:
                assert tasks.solved(both_[: at + 1]) == [both_[at + 1]]
        else:
            assert both_[[at + 1 for at in found.asked]].tolist() == answer.tolist()


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_are_others(task: str) -> None:
    draw = tasks.TASKS[task]
    found = [draw(tasks.generator(0, purpose, 3), 200, 48).ids for purpose in range(3)]
    again = draw(tasks.generator(0, tasks.TRAINING, 3), 200, 48).ids
    assert np.array_equal(found[0], again)
    seen = [{bytes(row.astype(np.uint8)) for row in ids} for ids in found]
    assert all(len(each) == 200 for each in seen)
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]


def test_depths_are_uniform() -> None:
    context = 45
    ids = tasks.needle(tasks.generator(5, tasks.HELD_OUT), 20_000, context).ids
    depths = (ids == tasks.MARK).argmax(1)
    counts = np.bincount(depths, minlength=tasks.depths_of(context))
    assert len(counts) == tasks.depths_of(context)
    assert chisquare(counts).pvalue > 1e-3


def test_contexts_grow_to_those_that_are_studied() -> None:
    how = Training((100, 200), 400, 1, 0.0, 0)
    found = [context_at(how, at) for at in range(400)]
    assert found[0] == tasks.SHORTEST
    assert max(found[:100]) < 100
    assert {*found[200:]} == {32, 64, 100, 128, 200}


# -- network and attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_network_is_the_published_llama(name: str, tmp_path: Path) -> None:
    config, tensors = MODELS[name], tensors_of(MODELS[name], 2)
    made = written(tmp_path, config, tensors)
    net = network(made, read_checkpoint(made, CPU), torch.float64)
    ids = [int(x) for x in ids_of(1, 40)[0] % config["vocab_size"]]
    found = head(net, prompt(net, torch.tensor([ids])))[0]
    # Angles are rounded to fp32.
    torch.testing.assert_close(found, logits_of(config, tensors, ids), rtol=1e-4, atol=1e-4)
    (out,) = decode(net, torch.tensor([ids]), 4, 4, [dynamic(0.0)], 1)
    assert out.ids[0].tolist() == greedy(config, tensors, ids, 4)


def test_steps_compute_what_a_prompt_does() -> None:
    net, ids = small(), ids_of(3, 12)
    whole = head(net, prompt(net, ids))
    caches = room(net, 3, 12)
    prompt(net, ids[:, :7], caches)
    for at in range(7, 12):
        found = step(net, ids[:, at], at, caches, lambda layer, q, k, v: both(q, k, v, 2)[0])
        torch.testing.assert_close(found, whole[:, at], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "chunk"), [(40, 5), (9, 4), (8, 4), (3, 4), (1, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_that_of_torch_and_of_the_kernel(tokens: int, chunk: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(2, 1, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, tokens, 8, generator=generator, dtype=torch.float64)
    exact, early = both(q, k, v, chunk)
    sdpa = scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(exact, sdpa)
    lengths = torch.full((2,), tokens, dtype=torch.int32)
    norms = squares(exact, early)
    for threshold in (0.0, 0.2, 0.7, 1.0, 1.5):
        given = reference_speculative_attention(
            q[:, 0], k, v, lengths, sinks=chunk, window=chunk, threshold=threshold
        )
        torch.testing.assert_close(exact[:, 0], given[0])
        torch.testing.assert_close(early[:, 0], given[1])
        torch.testing.assert_close(norms, given[2])
        if threshold > 0:
            assert accepted(norms, threshold).tolist() == given[3].bool().tolist()
    assert not accepted(norms, 0.0).any()
    assert (tokens <= 2 * chunk) == bool((norms[:, 0] == 0).all())


# -- decoding ------------------------------------------------------------------------------------------------


@slow
def test_lambda_0_is_exact_and_a_huge_one_always_early() -> None:
    net, ids = small(), ids_of(6, 40)
    nothing, huge, endless, never, always = decode(
        net,
        ids,
        5,
        6,
        [dynamic(0.0), dynamic(1e9), dynamic(math.inf), static(frozenset()), static(frozenset(range(3)))],
        4,
    )
    assert not nothing.early.any()
    assert huge.early.all()
    assert torch.equal(nothing.ids, never.ids)
    for found in (huge, endless):
        assert torch.equal(found.ids, always.ids)
        assert torch.equal(found.early, always.early)
    # The two are not the same, or this would show nothing.
    assert not torch.equal(nothing.ids, always.ids)
    tokens = ids
    for at in range(5):
        new = head(net, prompt(net, tokens)[:, -1]).argmax(-1)
        assert torch.equal(new, nothing.ids[:, at])
        tokens = torch.cat((tokens, new[:, None]), 1)


def test_static_layers_are_taken_in_each_token() -> None:
    net = small()
    (found,) = decode(net, ids_of(4, 40), 3, 6, [static(frozenset({1}))], 4)
    assert found.early[..., 1].all()
    assert not found.early[..., [0, 2]].any()


def test_static_choice_takes_layers_above_the_share() -> None:
    early = torch.zeros(10, 1, 3, dtype=torch.bool)
    early[:8, :, 0] = early[:9, :, 1] = True
    assert static_layers(early) == {1}


def test_a_hit_takes_the_early_result_and_a_miss_the_exact_one() -> None:
    net, ids = small(), ids_of(8, 40)
    (exact,) = decode(net, ids, 1, 6, [dynamic(0.0)], 8)
    ratio = (exact.norms[..., 0] / exact.norms[..., 1]).sqrt()
    # Between two ratios of the first layer, so that some prompts hit in it and some do not.
    threshold = float(ratio[:, 0, 0].median()) + 1e-6
    (found,) = decode(net, ids, 1, 6, [dynamic(threshold)], 8)
    first = found.early[:, 0, 0]
    assert first.tolist() == (ratio[:, 0, 0] < threshold).tolist()
    assert first.any()
    assert not first.all()
    # The second layer of prompts that missed in the first sees what it saw.
    torch.testing.assert_close(found.norms[~first, 0, 1], exact.norms[~first, 0, 1])
    assert not torch.allclose(found.norms[first, 0, 1], exact.norms[first, 0, 1], rtol=1e-4)


def test_shares_of_fixed_activations_grow_with_lambda() -> None:
    net = small()
    (exact,) = decode(net, ids_of(20, 40), 3, 6, [dynamic(0.0)], 20)
    shares = [float(accepted(exact.norms, each).double().mean()) for each in (*LAMBDAS, math.inf)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len({*shares}) > 3


# -- the study -----------------------------------------------------------------------------------------------


def study(seed: int = 0) -> list[dict[str, Any]]:
    net = small()
    asked = Asked(LAMBDAS, (40,), 6, 10, seed, 200)
    return list(rows(net, draws(net, True, 1), asked))


@slow
def test_rows_keep_their_laws_and_repeat() -> None:
    found = study()
    assert found == study()
    assert [r for r in found if r["mode"] == "dynamic"] != [r for r in study(1) if r["mode"] == "dynamic"]
    assert len(found) == 2 * 2 * len(LAMBDAS)
    assert not broken_laws(found)
    for row in found:
        assert row["score_low"] <= row["score"] <= row["score_high"]
        layers = [row[f"layer_{i}"] for i in range(3)]
        assert row["accepted"] == pytest.approx(sum(layers) / 3)
        if row["mode"] == "static":
            assert {*layers} <= {0.0, 1.0}
            assert row["accepted_forced"] == pytest.approx(row["accepted"])


@slow
def test_prompts_are_held_out_and_others_than_those_of_the_choice() -> None:
    drawn_ids = []

    def spy(rng: np.random.Generator, prompts: int, context: int) -> tasks.Prompts:
        drawn_ids.append(tasks.needle(rng, prompts, context))
        return drawn_ids[-1]

    [*rows(small(), {"first": spy, "second": spy}, Asked((0.2,), (40,), 6, 4, 3, 200))]
    purposes = [(tasks.CHOOSING, 40), (tasks.HELD_OUT, 40, 0), (tasks.HELD_OUT, 40, 1)]
    for found, which in zip(drawn_ids, purposes, strict=True):
        assert np.array_equal(found.ids, tasks.needle(tasks.generator(3, *which), 4, 40).ids)


@slow
def test_broken_laws_are_found() -> None:
    found = study()
    at = {(r["mode"], r["lambda"]): i for i, r in enumerate(found) if r["task"] == "needle"}
    changes: list[tuple[tuple[str, float], dict[str, Any], str]] = [
        (("dynamic", 0.0), {"accepted": 0.1}, "lambda 0"),
        (("static", 0.0), {"agreement": 0.9}, "lambda 0"),
        (("dynamic", 0.0), {"score": 0.9}, "lambda 0"),
        (("dynamic", 0.3), {"accepted_forced": 1.1}, "fall"),
    ]
    for key, change, says in changes:
        wrong = [*found]
        wrong[at[key]] = {**found[at[key]], **change}
        (line,) = broken_laws(wrong)
        assert says in line


@slow
def test_intervals_hold_the_share_95_times_in_100() -> None:
    for share in (0.02, 0.5, 0.9):
        rights = np.random.default_rng(0).binomial(60, share, 4000)
        ends = {int(x): interval(int(x), 60) for x in {*rights.tolist()}}
        held = np.mean([ends[int(x)][0] <= share <= ends[int(x)][1] for x in rights])
        assert held >= 0.94


@slow
def test_training_lowers_the_loss() -> None:
    # The bytes that answer are 64 of 256, which comes first: from ln 256 and more to ln 64.
    _, losses = trained(decoder_of(2, 32, 2), Training((32,), 120, 256, 5e-3, 0), CPU)
    assert np.mean(losses[:5]) > math.log(256) - 0.1
    assert np.mean(losses[-5:]) < math.log(64) + 0.3


@slow
def test_training_repeats_by_seed() -> None:
    how, config = Training((32,), 5, 256, 5e-3, 0), decoder_of(2, 32, 2)
    nets = [trained(config, each, CPU)[0].weights for each in (how, how, replace(how, seed=1))]
    assert all(torch.equal(a, b) for a, b in zip(nets[0], nets[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(nets[0], nets[2], strict=True))


# -- the command ---------------------------------------------------------------------------------------------


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["hit_rates", *arguments])
    with pytest.raises(SystemExit) as end:
        command.run(command.main)
    return int(str(end.value.code))


@slow
def test_command_writes_the_same_bytes_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.csv")]
    for path, seed in zip(paths, "001", strict=True):
        more = ["--untrained", "--seed", seed, "--out", str(path), "--lambdas", "0,0.2,inf"]
        assert ended([*QUICK, *more], monkeypatch) == 0
    texts = [path.read_bytes() for path in paths]
    assert texts[0] == texts[1]
    with paths[0].open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    with paths[2].open(newline="", encoding="utf-8") as file:
        assert [r["train_loss"] for r in csv.DictReader(file)] != [r["train_loss"] for r in found]
    assert len(found) == 2 * 2 * 2 * 3
    assert {row["accepted"] for row in found if row["lambda"] == "inf"} == {"1.0"}
    assert all(
        row[name] for row in found for name in ("device", "torch", "date", "train_loss", "exact_score")
    )
    assert "needle" in capsys.readouterr().out


@slow
def test_untrained_decoders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended([*QUICK, "--out", str(tmp_path / "a.csv")], monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error:")
    assert "exact attention solves" in line
    assert not [*tmp_path.iterdir()]


@slow
def test_llamas_from_files_have_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "tiny", tmp_path / "a.csv"
    folder.mkdir()
    written(folder, MODELS["untied"], tensors_of(MODELS["untied"]))
    more = ["--device", "cpu", "--tokens", "3", "--lambdas", "0,0.3,inf", "--out", str(out)]
    assert ended(["--model", str(folder), *SMALL, *more], monkeypatch) == 0
    with out.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert {(row["task"], row["score"], row["model"], row["tokens"]) for row in found} == {
        ("random", "", "tiny", "3")
    }
    assert {row["agreement"] for row in found if row["lambda"] == "0.0"} == {"1.0"}
    assert min(float(row["agreement"]) for row in found) < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lambdas", "0,-1"], "--lambdas: -1"),
        (["--lambdas", "nan"], "--lambdas: nan"),
        (["--lambdas", ","], "--lambdas: names none"),
        (["--contexts", "inf"], "--contexts: inf"),
        (["--contexts", "64.5"], "--contexts: 64.5"),
        (["--contexts", "256", "--chunk", "128"], "257 are needed"),
        (["--contexts", "31", "--chunk", "1"], "32 are needed"),
        (["--contexts", "99999999999"], "--contexts: 99999999999"),
        (["--hidden", "60", "--heads", "8"], "--hidden"),
        (["--dtype", "int"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--model", "/nowhere"], "--model"),
        (["--prompts", "0"], "--prompts"),
        (["--rate", "nan"], "--rate"),
        (["--out", "/nowhere/a.csv"], "--out"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(["--device", "cpu", *arguments], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_numbers_are_each_once_and_in_order() -> None:
    assert command.numbers("--x", "2, 1,2.0,inf", 0) == [2.0, 1.0, math.inf]
    with pytest.raises(InputError, match="whole"):
        command.numbers("--x", "2.5", 0, whole=True)
