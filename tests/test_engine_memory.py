"""KV tokens, weights and peaks beside what vLLM's logs print (tests/data/vllm_memory.csv, with its sources).

Two constants were read off these logs: the four hidden states of the peak off CodeLlama-7B's, the reserve off
Llama-3.1-8B's on 1, 2 and 4 cards. The other rows judge them.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simcore.assembly import assemble
from simcore.models.decoder_config import DecoderConfig
from simcore.models.served_decoder import ServedDecoder
from simcore.scenario import parse_scenario
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.kv_memory import Room
from simcore.studies.serving.runner import Bench
from simcore.studies.serving.study import cases

TABLE = Path(__file__).parent / "data" / "vllm_memory.csv"
GIB = 2.0**30
SHARE = 0.95
TOTAL_GIB = 79.19

Row = dict[str, str]


def table() -> list[Row]:
    with TABLE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def name_of(row: Row) -> str:
    return f"{row['model']}-tp{row['ranks']}-{row['formats']}-{row['kv_dtype']}"


def config_of(row: Row) -> DecoderConfig:
    shape: dict[str, Any] = {
        name: int(row[name])
        for name in ("hidden", "intermediate", "layers", "q_heads", "kv_heads", "head_dim", "vocab")
    }
    return DecoderConfig(row["model"], **shape, tied_embeddings=row["tied"] == "true")


def bench_of(row: Row) -> Bench:
    """The row as a user writes it; a model that is not in the catalogue has the shape of the table."""
    ranks = int(row["ranks"])
    document = {
        "name": "memory",
        "study": "serving",
        "device": "h100-sxm",
        "devices": ranks,
        "model": row["catalogue"] or "llama-3.1-8b",
        "dtype": row["formats"],
        "dtypes": {"embedding": "bf16", "lm_head": "bf16", "kv": row["kv_dtype"]},
        "memory_share": SHARE,
        "workload": {
            "requests": 1,
            "arrivals": {"kind": "constant", "interval_s": 1.0},
            "prompt_tokens": {"kind": "constant", "value": 8},
            "output_tokens": {"kind": "constant", "value": 2},
        },
        "strategies": [{"kind": "continuous_batching", "engine": "vllm-0.19", "ranks": ranks}],
    }
    study = assemble(parse_scenario(document, "memory"), "memory").study
    assert isinstance(study, DeviceStudy)
    return study.bench if row["catalogue"] else replace(study.bench, config=config_of(row), models={})


def room_of(row: Row) -> tuple[Room, ServedDecoder]:
    bench = bench_of(row)
    case = next(cases(bench))
    return bench.room(case, bench.draw(case, 0)), bench.model(int(row["ranks"]))


REPRESENTED = [row for row in table() if not row["left_out"]]
WITH_WEIGHTS = [row for row in REPRESENTED if row["weights_gib"]]


def test_the_catalogue_has_the_shapes_of_the_table() -> None:
    for row in table():
        if row["catalogue"]:
            ours = bench_of(row | {"formats": "bf16", "kv_dtype": "bf16"}).config
            assert replace(ours, name=row["model"], qk_norm=False) == config_of(row)


@pytest.mark.parametrize("row", WITH_WEIGHTS, ids=name_of)
def test_kv_tokens_are_within_2_percent_of_the_log(row: Row) -> None:
    room, model = room_of(row)
    # Where a log's own line is not at hand: what the figures leave that it printed.
    taken_gib = sum(float(row[name]) for name in ("weights_gib", "peak_gib", "non_torch_gib"))
    kv_gib = float(row["kv_gib"] or SHARE * TOTAL_GIB - taken_gib)
    published = float(row["kv_tokens"] or 8192 * float(row["concurrency"] or 0))
    published = published or kv_gib * GIB / model.kv_bytes_per_token
    assert room.kv_tokens % 16 == 0
    assert room.kv_tokens == pytest.approx(published, rel=0.02)
    # The parts, so that no two errors hide each other.
    assert model.split_weight_bytes / GIB == pytest.approx(float(row["weights_gib"]), rel=0.01)
    assert room.kv_tokens * model.kv_bytes_per_token / GIB == pytest.approx(kv_gib, rel=0.02)


@pytest.mark.parametrize("row", REPRESENTED, ids=name_of)
def test_the_peak_is_that_of_the_profiling_run(row: Row) -> None:
    """Within 0.03 GiB of what the log prints: of one to two GiB, and of a cache of 37 to 75."""
    model = ServedDecoder(config_of(row), int(row["ranks"]))
    peak_gib = model.profile_bytes(8192, 1024, processors=132) / GIB
    assert peak_gib == pytest.approx(float(row["peak_gib"]), abs=0.03)


def test_a_peak_by_hand() -> None:
    """10 tokens of a model that is small enough to count: the layers' rows, or the sampler's."""
    config = DecoderConfig("small", 4, 16, 1, 2, 2, 2, 100, False)
    workspace = 32 * 2**20
    layers = 10 * (3 * 16 + 4 * 4) * 2
    sampler = (10 + 8) * 4 * 2 + 100 * (8 * 14 + 3 * 4)
    assert sampler > layers
    assert ServedDecoder(config).profile_bytes(10, 8, 3) == workspace + sampler
    small = replace(config, vocab=10)
    assert ServedDecoder(small).profile_bytes(10, 1, 0) == workspace + layers
    # Half of the MLP's columns are a rank's, all of the hidden state.
    assert ServedDecoder(small, 2).profile_bytes(10, 1, 0) == workspace + 10 * (3 * 8 + 4 * 4) * 2
    # Without a gate, the MLP's input and what becomes of it.
    plain = replace(small, gated=False)
    assert ServedDecoder(plain).profile_bytes(10, 1, 0) == workspace + 10 * (2 * 16 + 4 * 4) * 2


def test_what_an_iteration_as_a_whole_is_by_hand() -> None:
    """Hidden 4, three layers of 2 query and 1 KV head of 2, MLP of 16, vocabulary of 100, on 2 ranks."""
    model = ServedDecoder(DecoderConfig("small", 4, 16, 3, 2, 1, 2, 100, True), 2)
    layer = 4 * (2 + 2 * 1) * 2 + 2 * 2 * 4 + 3 * 4 * 16
    op = model._iteration()
    assert {name: op[name] for name in ("parameters", "width")} == {
        "parameters": (3 * layer + 100 * 4) // 2,
        "width": 3 * 2 * 2 // 2,
    }
    assert model._pre_processing()["parameters"] == op["parameters"]
