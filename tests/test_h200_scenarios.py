"""The scenarios of one H200: each parses, runs under the laws, says what it asks, and can run on a CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simcore.assembly import assemble
from simcore.cli import main
from simcore.input.files import InputError
from simcore.models.decoder import Decoder
from simcore.ops.op import DTYPE_BYTES
from simcore.scenario import load_scenario, parse_scenario, resolved
from simcore.studies.common import Outcome
from simcore.studies.tiling.implementations import IMPLEMENTATIONS
from tests.thorough import slow, thorough

H200 = Path(__file__).resolve().parent.parent / "scenarios" / "h200"
# Short enough for a test; what is short already runs as it is.
SMALLER = {
    "decoder_layer": ["batch=[1, 64]", "context_tokens=[1024, 131072]", "tokens=16"],
    "decode_step": ["tokens=1"],
    "codellama_34b": ["context_tokens=[512, 65536]"],
    "tiles": ["tokens=256"],
    "long_convolution": ["tokens=256"],
    "linear_attention": ["length=[128, 512]", "batch=16"],
    "fusion": ["workload.requests=4"],
}
CASES = pytest.mark.parametrize("name", SMALLER)


def ran(name: str, *settings: str) -> Outcome:
    path = H200 / f"{name}.yaml"
    parts = assemble(load_scenario(path, settings), str(path))
    return parts.study.run(lambda *_: None)


def values(outcome: Outcome, metric: str) -> dict[Any, float]:
    return {row.axes: row.value for row in outcome.rows if row.metric == metric and row.value is not None}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[thorough] if name == "codellama_34b" else []) for name in SMALLER]
)
@slow
def test_each_runs_under_the_laws(name: str) -> None:
    """A law that is broken raises."""
    outcome = ran(name, *SMALLER[name])
    assert outcome.answer
    times = [row for row in outcome.rows if row.unit == "s" and row.value is not None]
    assert times
    assert all(row.value > 0.0 for row in times if row.metric in ("token_latency_s", "latency_s", "total_s"))


@CASES
def test_each_says_what_it_asks_and_can_run_on_a_cpu(name: str) -> None:
    path = H200 / f"{name}.yaml"
    lead = path.read_text().partition("name:")[0]
    assert lead.startswith("#")
    assert "?" in lead
    scenario = load_scenario(path)
    assert resolved(scenario)["device"] == "h200-sxm"
    assert parse_scenario(resolved(scenario), str(path)) == scenario
    assert resolved(load_scenario(path, on="cpu"))["device"] == "cpu"


@slow
def test_what_does_not_fit_beside_the_weights_is_left_out_with_its_reason() -> None:
    outcome = ran("decode_step", "tokens=1")
    found = {(axes.batch, axes.context_tokens) for axes in values(outcome, "token_latency_s")}
    assert {(4, 131072), (8, 65536), (64, 8192)} <= found
    assert not {(8, 131072), (64, 16384)} & found
    # 8.0 G weights in bf16 leave room for 134 GB of KV; batch 8 at 128K takes 137.4 GB.
    assert (
        sum("does not fit into memory" in text and "153.5 of 150 GB" in text for text in outcome.warnings)
        == 4
    )


def test_a_layer_is_a_32nd_of_what_a_step_takes_in_its_layers() -> None:
    """Llama 3.1 8B: step = embedding and head + 32 layers, by the same prices; one launch each."""
    launch_s = 6.6e-6
    small = (
        "batch=[1, 16]", "context_tokens=[1024, 32768]", "tokens=1", f"overheads.launch_s={launch_s}",
        "overheads.size_s=0", "overheads.wait_s=0",
    )  # fmt: skip
    layer = values(ran("decoder_layer", *small), "token_latency_s")
    step = ran("decode_step", *small)
    whole, outside = values(step, "token_latency_s"), {}
    for row in step.rows:
        if row.metric == "critical_path_s" and row.op_kind in ("sample", "embedding"):
            outside[row.axes] = outside.get(row.axes, 0.0) + (row.value or 0.0)
    for axes, seconds in layer.items():
        rest_s = whole[axes] - launch_s - 32 * (seconds - launch_s)
        # Embedding, sampling, the last norm, and an LM head of 1.05 GB at no more than 4.8 TB/s.
        assert outside[axes] + 128256 * 4096 * 2 / 4.8e12 < rest_s < 0.4e-3


@slow
def test_reading_once_is_what_flash_decoding_draws() -> None:
    """CodeLlama 34B in bf16: 33.7 G weights, of which 0.26 G are an embedding that is looked up, and
    2 x 8 x 128 x 48 numbers of KV a token."""
    outcome = ran("codellama_34b", "context_tokens=[512, 65536]")
    bound, latency = values(outcome, "read_once_s"), values(outcome, "token_latency_s")
    assert bound.keys() == latency.keys()
    for axes, seconds in bound.items():
        weights = 48 * (8192 * (64 + 16) * 128 + 64 * 128 * 8192 + 3 * 8192 * 22016) + 32000 * 8192
        cached = 2 * 8 * 128 * 48 * (axes.context_tokens or 0)
        assert seconds == pytest.approx(2.0 * (weights + cached) / 4.8e12, rel=2e-3)
        assert seconds < latency[axes]


def test_tied_embeddings_are_read_once_with_the_head() -> None:
    path = str(H200 / "codellama_34b.yaml")
    scenario = load_scenario(Path(path), ["model=llama-3.1-8b"])
    config = assemble(scenario, path).study.bench.config  # type: ignore[attr-defined]
    apart, tied = Decoder(config), Decoder(replace(config, tied_embeddings=True))
    assert tied.read_bytes(1024) == apart.read_bytes(1024)
    alone = Decoder(replace(config, layers=1), outside=False)
    head = config.vocab * config.hidden * DTYPE_BYTES["bf16"]
    assert 32 * alone.read_bytes(1024) == pytest.approx(apart.read_bytes(1024) - head)
    assert alone.weight_bytes + alone.kv_bytes(1024) == alone.read_bytes(1024)


@slow
def test_all_tiles_are_priced_at_all_sides() -> None:
    outcome = ran("tiles", "tokens=256")
    tiles = outcome.tables["tiles.parquet"]
    found = set(zip(tiles["implementation"], tiles["side"], strict=True))
    assert found == {(name, 1 << i) for name in IMPLEMENTATIONS for i in range(8)}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            'strategies=[{"kind": "alspec", "hits": {"kind": "rate", "value": 0.5}}]',
            r"strategies\[0\].kind: is 'alspec'",
        ),
        ("published=[alspec_n150]", "published: figures are of whole models"),
        ("part=head", "part: is 'head'"),
    ],
)
def test_a_layer_alone_is_for_plain_decoding(setting: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        load_scenario(H200 / "decoder_layer.yaml", [setting])
    assert "\n" not in str(error.value)


def plots(name: str, tmp_path: Path, *settings: str) -> dict[str, Any]:
    given = [word for setting in settings for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(H200 / f"{name}.yaml"), *given, "--quiet", "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    return dict(json.loads(text.split('id="report-data">')[-1].split("</script>")[0])["plots"])


@thorough
def test_the_bound_is_drawn_below_the_latency(tmp_path: Path) -> None:
    drawn = plots("codellama_34b", tmp_path)["latency"]["figures"]["0,0"]["data"]
    latency, bound = drawn
    assert bound["name"] == "weights and KV read once"
    assert bound["x"] == latency["x"] == [512 << i for i in range(8)]
    assert all(0.5 * y < least < y for y, least in zip(latency["y"], bound["y"], strict=True))


@slow
def test_batches_of_one_strategy_share_a_figure(tmp_path: Path) -> None:
    figures = plots("decode_step", tmp_path, "batch=[1, 8]", "tokens=1")["latency"]["figures"]
    assert [trace["name"] for trace in figures["0,0"]["data"]] == ["batch 1", "batch 8"]
    assert [len(trace["x"]) for trace in figures["0,0"]["data"]] == [8, 7]
    assert {trace["name"] for trace in figures["2,0"]["data"]} == {
        "tensor parallel, 1 device",
        "weights and KV read once",
    }


@thorough
def test_many_variants_have_no_bound_beside_them(tmp_path: Path) -> None:
    drawn = plots("codellama_34b", tmp_path, "strategies.0.ranks=[1, 2]")["latency"]["figures"]["0,0"]["data"]
    assert [trace["name"] for trace in drawn] == ["tensor parallel, 1 device", "tensor parallel, 2 devices"]
