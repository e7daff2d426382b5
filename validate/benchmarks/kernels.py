"""`python -m simcore.validate.benchmarks.kernels`: kernels on a CUDA device, beside the fastest public ones.

anchors      decode attention at shapes of earlier measurements of the public kernels, bf16
table        the ten shapes of Flash-Decoding's micro-benchmark, fp16
batches      batches that fill whole waves of programs and such as do not, also split alike
ragged       sequences of different lengths, also split alike
drawn        --count shapes of equal lengths, drawn by --seed, also split alike; has to be asked for
drawn_ragged half as many of unequal lengths; has to be asked for
drawn_products --count products of decoders' layers, 1 to 512 rows; has to be asked for
drawn_steps  --count decode steps of Llama 3.1 8B, 1 to 128 sequences; has to be asked for
variants     ours alone: fp16, fp8 cache, pages, sinks and window, other head dimensions
speculative  attention with an early output from its first and last tokens, against plain decode attention,
             and when a kernel that waits for the early output sees it
projections  few rows times the matrices of Llama 3.1 8B, against cuBLAS
layer        a decoder layer executed, and skipped by its gate
decode_steps a whole step of Llama 3.1 8B, beside the time in which weights and caches are read once
tiles        square tiles of long convolutions, sides 1 to 16384, beside torch's ways, fp32
baselines    one position of the lazy and the eager strategy, beside torch's ways, fp32
linear_attention   causal linear attention with decay over sequences, beside flash-linear-attention, bf16
linear_step  one token of it
token_step   one token of a long-convolution model, all layers, beside torch's kernels
slot_moves   moved slots of K and V in all layers, beside torch's copies
auto         cost of method="auto" of linear attention by measured prices, over the fastest method
hybrid       cost of Hybrid's tiles by measured prices, over the fastest implementation

Every version is first compared with float64, after its output was filled with NaN; a wrong one gets no time.
Versions of one case take turns twice, so that a drift of the clocks affects all alike. Each part writes one
table. Parts run in the given order; FlashInfer compiles its kernels in the background meanwhile.

Exit code: 0, 1 if one of our kernels was wrong or failed, 2 without a CUDA device.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from simcore.input.drafts import write_text
from simcore.input.files import InputError
from simcore.terminal import BROKEN
from simcore.validate.apart import exit_code
from simcore.validate.benchmarks import (
    attention,
    cases,
    choice,
    convolution,
    linear_attention,
    steps,
    token_step,
)
from simcore.validate.benchmarks.cases import Bar
from simcore.validate.benchmarks.peers import PEERS, Peer, compile_ahead, present
from simcore.validate.benchmarks.run import Bench, Benchmark, Other, Part, free, say
from simcore.validate.benchmarks.timing import Card, birth, measure_card, one_line
from simcore.validate.program import named, run
from simcore.validate.timing.allocator import take_memory_in_segments

MEASURED = Path(__file__).resolve().parents[1] / "measured"

CONVOLUTION, LINEAR = "convolution", "linear_attention"
# Shapes that are drawn unless the command says otherwise.
DRAWN_SEED, DRAWN_COUNT = 0, 100
_BESIDE_SPLIT = partial(attention.attention_case, split=True)


def _drawn(seed: int, count: int) -> tuple[Part, ...]:
    """Returns the parts whose shapes are drawn."""
    products = cases.drawn_products(seed, count)
    equal, ragged = cases.drawn(seed, count), cases.drawn(seed, -(-count // 2), ragged=True)
    return (
        Benchmark("drawn", equal, _BESIDE_SPLIT, file=f"drawn_{seed}", tabled=True),
        Benchmark("drawn_ragged", ragged, _BESIDE_SPLIT, file=f"drawn_ragged_{seed}", tabled=True),
        Benchmark(
            "drawn_products",
            products,
            steps.projection_case,
            cases.PRODUCT_GOALS,
            file=f"drawn_products_{seed}",
            tabled=True,
        ),
        Benchmark(
            "drawn_steps",
            cases.drawn_steps(seed, count),
            steps.decode_step_case,
            file=f"drawn_steps_{seed}",
            bars=cases.drawn_step_bars,
        ),
    )


PARTS: Sequence[Part] = (
    Benchmark("anchors", cases.ANCHORS, attention.attention_case, bars=cases.anchor_bars, tabled=True),
    Benchmark("table", cases.TABLE, attention.attention_case, bars=cases.table_bars, tabled=True),
    Benchmark("batches", cases.BATCHES, _BESIDE_SPLIT, tabled=True),
    Benchmark("ragged", cases.RAGGED, _BESIDE_SPLIT, tabled=True),
    Benchmark("variants", cases.VARIANTS, partial(attention.attention_case, beside=False), tabled=True),
    Benchmark(
        "speculative", cases.SPECULATIVE, attention.speculative_case, cases.SPECULATIVE_GOALS, tabled=True
    ),
    Benchmark("projections", cases.PROJECTIONS, steps.projection_case, cases.PRODUCT_GOALS, tabled=True),
    Other("layer", steps.layer),
    Benchmark("decode_steps", cases.DECODE_STEPS, steps.decode_step_case, cases.DECODE_STEP_GOALS),
    Benchmark("tiles", convolution.TILES, convolution.tile_case, convolution.TILE_GOALS, CONVOLUTION),
    Benchmark("baselines", convolution.LINES, convolution.line_case, convolution.LINE_GOALS, CONVOLUTION),
    Benchmark(
        "linear_attention", linear_attention.SEQUENCES, linear_attention.sequences_case,
        linear_attention.SEQUENCE_GOALS, LINEAR, "sequences",
    ),
    Benchmark(
        "linear_step", linear_attention.TOKENS, linear_attention.token_case, linear_attention.TOKEN_GOALS,
        LINEAR, "steps",
    ),
    Benchmark("token_step", token_step.STEPS, token_step.step_case, token_step.STEP_GOALS, CONVOLUTION),
    Benchmark("slot_moves", token_step.MOVES, token_step.moves_case, token_step.MOVE_GOALS, "serving"),
    Other("auto", choice.auto),
    Other("hybrid", choice.hybrid),
)  # fmt: skip
DEFAULT = ",".join(part.name for part in PARTS)
BY_NAME: Mapping[str, Part] = {part.name: part for part in (*PARTS, *_drawn(DRAWN_SEED, DRAWN_COUNT))}


def card_of(path: Path | None) -> Card:
    """Returns the card's rates: measured, or from the file of another process of the same run."""
    if path is not None and path.exists():
        return Card(**json.loads(path.read_text(encoding="utf-8")))
    card = measure_card(say)
    if path is not None:
        write_text(path, json.dumps(asdict(card)))
    return card


def peers_of(parts: Sequence[str], without: Sequence[str]) -> list[Peer]:
    """Returns the installed peers if a part needs them; starts FlashInfer's compilation."""
    beside = dict.fromkeys(("anchors", "batches", "ragged", "drawn", "drawn_ragged"), "bf16")
    beside["table"] = "fp16"
    dtypes = sorted({dtype for part, dtype in beside.items() if part in parts})
    peers = present(PEERS, without, say) if dtypes else []
    if any(peer.name == "FlashInfer" for peer in peers):
        compile_ahead(dtypes, say)
    return peers


def run_parts(parts: Sequence[Part], bench: Bench) -> bool:
    """Runs all parts in this process; returns whether all of our own kernels were right."""
    born, card = bench.birth, bench.card
    say(f"{born.device}, driver {born.driver}, torch {born.torch}, triton {born.triton}")
    say(
        f"reads {card.read_bytes_per_s / 1e12:.3f} TB/s by {card.read_by}; an empty node takes "
        f"{1e6 * card.node_s:.2f} us; L2 {card.l2_bytes / 2**20:.0f} MiB"
    )
    bars = list[Bar]()
    for part in parts:
        say(f"\n== {part.name}")
        try:
            bars += part.run(bench)
        except Exception as error:
            bench.failed.append(f"part {part.name}: {one_line(error)}")
            say(f"part {part.name} failed: {one_line(error)}")
        free()
    for line in ("", *map(str, bars), *(f"FAILED {line}" for line in bench.failed)):
        say(line)
    return not bench.failed


def run_apart(parts: Sequence[str], options: Sequence[str], seconds: float) -> bool:
    """Runs each part in its own process with a time limit, so that a part that hangs or breaks the device
    affects no other; what a part started ends with it."""
    all_right = True
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            words = ["--parts", part, "--card", str(Path(folder) / "card.json"), *options]
            code = exit_code([sys.executable, "-m", "simcore.validate.benchmarks.kernels", *words], seconds)
            if code is None:
                say(f"FAILED part {part}: not done after {seconds:.0f} s")
            all_right &= code == 0
    return all_right


def main(
    parts: Annotated[str, typer.Option(help="which, in this order")] = DEFAULT,
    seed: Annotated[int, typer.Option(min=0, help="of the shapes that are drawn")] = DRAWN_SEED,
    count: Annotated[int, typer.Option(min=1, help="how many shapes are drawn")] = DRAWN_COUNT,
    out: Annotated[Path, typer.Option(help="folder of the tables")] = MEASURED,
    quick: Annotated[bool, typer.Option("--quick", help="fewer replays")] = False,
    without: Annotated[
        str, typer.Option(help=f"peers to leave out, of {','.join(peer.name for peer in PEERS)}")
    ] = "",
    apart: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="each part in a process of its own, ended after so long"),
    ] = None,
    card: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Checks kernels against float64 and times them beside public ones."""
    asked = named("--parts", parts, BY_NAME, needed=True)
    left_out = named("--without", without, [peer.name for peer in PEERS])
    if apart is not None and not 0 < apart < float("inf"):
        raise InputError(f"--apart: has to be a number of seconds above 0, not {apart}")
    if any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
        raise InputError(f"--out: {out} is no folder")
    if not torch.cuda.is_available():
        raise InputError("a CUDA device is needed; there is none here")
    take_memory_in_segments()
    # If each part has its own process, compilation continues beside the parts that do not need it.
    peers = peers_of(asked, left_out)
    if apart is not None:
        options = ["--out", str(out), "--seed", str(seed), "--count", str(count)]
        options += ["--quick"] if quick else []
        all_right = run_apart(asked, [*options, *(["--without", without] if without else [])], apart)
    else:
        with torch.no_grad():
            found = card_of(card)
            parts_of = {**BY_NAME, **{part.name: part for part in _drawn(seed, count)}}
            bench = Bench(found, birth(found), out, quick, peers)
            all_right = run_parts([parts_of[name] for name in asked], bench)
    if not all_right:
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(main)
