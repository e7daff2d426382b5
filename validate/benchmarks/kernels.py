"""`python -m simcore.validate.benchmarks.kernels`: kernels on a CUDA device, beside the fastest public ones.

anchors      decode attention at the shapes where the public kernels were measured, bf16
table        the ten shapes of Flash-Decoding's micro-benchmark, fp16
variants     ours alone: fp16, fp8 cache, pages, sinks and window, other head dimensions
speculative  attention that gives its first and last tokens' part early, against plain decode attention, and
             when that part is visible to a kernel that waits for it
projections  few rows times the matrices of Llama 3.1 8B, against cuBLAS
layer        a decoder layer executed, and skipped by its gate
tiles        square tiles of long convolutions, sides 1 to 16384, beside torch's ways, fp32
baselines    one position of the lazy and the eager strategy, beside torch's ways, fp32
linear_attention   causal linear attention with decay over sequences, beside flash-linear-attention, bf16
linear_step  one token of it
token_step   one token of a long-convolution model, all layers, beside torch's kernels
slot_moves   moved slots of K and V in all layers, beside torch's copies
auto         what method="auto" of linear attention costs by measured prices, over the fastest method
hybrid       what Hybrid's tiles cost by measured prices, over the fastest implementation

Every version is first compared with float64, its output filled with NaN before; one that is wrong gets no
time. Versions of one case take turns, twice over, so that a drift of the clocks hits all alike. Writes one
table a part. Parts run in the order given; FlashInfer compiles its kernels in the background meanwhile.

Exit code: 0, 1 where one of our kernels was wrong or failed, 2 without a CUDA device.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.attention import anchors, speculative, table, variants
from simcore.validate.benchmarks.cases import Bar
from simcore.validate.benchmarks.choice import auto, hybrid
from simcore.validate.benchmarks.convolution import baselines, tiles
from simcore.validate.benchmarks.linear_attention import linear_attention, linear_step
from simcore.validate.benchmarks.peers import PEERS, Peer, compile_ahead, present
from simcore.validate.benchmarks.run import Bench, free, say
from simcore.validate.benchmarks.steps import layer, projections
from simcore.validate.benchmarks.timing import Card, birth, measure_card, one_line
from simcore.validate.benchmarks.token_step import slots, token_steps
from simcore.validate.timing.allocator import take_memory_in_segments

MEASURED = Path(__file__).resolve().parents[1] / "measured"


PARTS: dict[str, Callable[[Bench], list[Bar]]] = {
    "anchors": anchors,
    "table": table,
    "variants": variants,
    "speculative": speculative,
    "projections": projections,
    "layer": layer,
    "tiles": tiles,
    "baselines": baselines,
    "linear_attention": linear_attention,
    "linear_step": linear_step,
    "token_step": token_steps,
    "slot_moves": slots,
    "auto": auto,
    "hybrid": hybrid,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m simcore.validate.benchmarks.kernels", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in this order (%(default)s)")
    parser.add_argument("--out", type=Path, default=MEASURED, help="folder of the tables (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer replays")
    parser.add_argument(
        "--without", default="", help=f"peers to leave out, of {','.join(p.name for p in PEERS)}"
    )
    parser.add_argument(
        "--apart",
        type=float,
        metavar="SECONDS",
        help="each part in a process of its own, ended after so long",
    )
    parser.add_argument("--card", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(words)
    found.parts = [part for part in found.parts.split(",") if part]
    found.without = [name for name in found.without.split(",") if name]
    unknown = [part for part in found.parts if part not in PARTS]
    peers = [peer.name for peer in PEERS]
    if not found.parts:
        parser.error(f"--parts names none; allowed: {', '.join(PARTS)}")
    if strangers := [name for name in found.without if name not in peers]:
        parser.error(f"--without {strangers[0]}; allowed: {', '.join(peers)}")
    if found.apart is not None and not 0 < found.apart < math.inf:
        parser.error(f"--apart has to be a number of seconds above 0, not {found.apart}")
    if any(path.exists() and not path.is_dir() for path in (found.out, *found.out.parents)):
        parser.error(f"--out {found.out} is no folder")
    if unknown:
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    return found


def card_of(path: Path | None) -> Card:
    """What the card reaches: measured, or as another process of the same run has found it."""
    if path is not None and path.exists():
        return Card(**json.loads(path.read_text(encoding="utf-8")))
    card = measure_card(say)
    if path is not None:
        cases.write_atomically(path, json.dumps(asdict(card)))
    return card


def peers_of(asked: argparse.Namespace) -> list[Peer]:
    """The peers that are here, where a part needs them; FlashInfer begins to compile."""
    dtypes = [dtype for part, dtype in (("anchors", "bf16"), ("table", "fp16")) if part in asked.parts]
    peers = present(PEERS, asked.without, say) if dtypes else []
    if any(peer.name == "FlashInfer" for peer in peers):
        compile_ahead(dtypes, say)
    return peers


def run_parts(asked: argparse.Namespace) -> int:
    """All parts in this process: the exit code."""
    peers = peers_of(asked)
    card = card_of(asked.card)
    bench = Bench(card, birth(card), asked.out, asked.quick, peers)
    born = bench.birth
    say(f"{born.device}, driver {born.driver}, torch {born.torch}, triton {born.triton}")
    say(
        f"reads {card.read_bytes_per_s / 1e12:.3f} TB/s by {card.read_by}; an empty node takes "
        f"{1e6 * card.node_s:.2f} us; L2 {card.l2_bytes / 2**20:.0f} MiB"
    )
    bars = list[Bar]()
    for part in asked.parts:
        say(f"\n== {part}")
        try:
            bars += PARTS[part](bench)
        except Exception as error:
            bench.failed.append(f"part {part}: {one_line(error)}")
            say(f"part {part} failed: {one_line(error)}")
        free()
    say("")
    for bar in bars:
        say(str(bar))
    for line in bench.failed:
        say(f"FAILED {line}")
    return 1 if bench.failed else 0


def run_apart(asked: argparse.Namespace) -> int:
    """Each part in a process of its own: one that hangs or breaks the device takes no other with it."""
    # What compiles goes on beside the parts that do not need it.
    peers_of(asked)
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        words = ["--out", str(asked.out), "--card", str(Path(folder) / "card.json")]
        words += ["--quick"] if asked.quick else []
        words += ["--without", ",".join(asked.without)] if asked.without else []
        for part in asked.parts:
            command = [sys.executable, "-m", "simcore.validate.benchmarks.kernels", "--parts", part, *words]
            process = subprocess.Popen(command)
            try:
                code = max(code, abs(process.wait(asked.apart)) and 1)
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                say(f"FAILED part {part}: not done after {asked.apart:.0f} s")
                code = 1
    return code


def main(words: Sequence[str] | None = None) -> int:
    """The exit code of the command line."""
    asked = arguments(words)
    if not torch.cuda.is_available():
        print("simcore.validate.benchmarks.kernels needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    take_memory_in_segments()
    if asked.apart is not None:
        return run_apart(asked)
    with torch.no_grad():
        return run_parts(asked)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; files hold what was measured before", file=sys.stderr)
        sys.exit(130)
