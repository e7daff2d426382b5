"""`make bench`: how fast simcore is on this machine, as users run it. Prints; nothing here passes or fails.

Whole processes, report included, on the default path: an H200 by its measured profile. Each case twice: with
nothing kept on disk before, and a second time. `x loop`: over the time of a fixed SimPy loop (300,000
timeouts) in the same run, so that machines compare.

    python -m tests.bench [--repeats 3] [--all]         this tree; --all: a million requests and a sweep of
                                                        1,000 points too, some minutes
    python -m tests.bench compare REV [--repeats 5]     this tree and revision REV in turns, ratios by pairs
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import simpy
import yaml

from simcore.compiled import SOURCES_ONLY

ROOT = Path(__file__).resolve().parent.parent
TIMEOUTS = 300_000
KIB = 1024
TRACE = "AzureLLMInferenceTrace_conv.csv"
MILLION, SWEEP = "1,000,000 requests, 29/s", "a plan: 1,000 points, 2 runs of 1,000 requests each"


class Took(NamedTuple):
    """What a process took: seconds on the wall and of processors, and its most memory in bytes."""

    wall_s: float
    cpu_s: float
    memory_bytes: float


def loop_s() -> float:
    """Seconds of a SimPy loop of TIMEOUTS timeouts, the least of three."""

    def ticks(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(TIMEOUTS):
            yield env.timeout(1.0)

    times = []
    for _ in range(3):
        env = simpy.Environment()
        env.process(ticks(env))  # type: ignore[arg-type]
        begun_s = time.perf_counter()
        env.run()
        times.append(time.perf_counter() - begun_s)
    return min(times)


def served(requests: int, rate_per_s: float) -> Mapping[str, object]:
    """Continuous batching of Llama 3.1 8B on an H200: Poisson arrivals, 200 tokens in and 200 out."""
    length = {"kind": "constant", "value": 200}
    arrivals = {"kind": "poisson", "rate_per_s": rate_per_s}
    return {
        "name": f"bench-{requests}",
        "study": "serving",
        "device": "h200-sxm",
        "model": "llama-3.1-8b",
        "workload": {
            "requests": requests,
            "arrivals": arrivals,
            "prompt_tokens": length,
            "output_tokens": length,
        },
        "strategies": [{"kind": "continuous_batching"}],
    }


def trace() -> Mapping[str, object] | None:
    """The Azure conversation trace on four cards, where SIMCORE_TRACES has it."""
    path = Path(os.environ.get("SIMCORE_TRACES", "")) / TRACE
    if not path.is_file():
        return None
    arrivals = {"kind": "trace", "format": "azure", "path": str(path.resolve())}
    return {**served(1, 1.0), "name": "bench-azure", "devices": 4, "workload": {"arrivals": arrivals}}


def sweep() -> Mapping[str, object]:
    """A plan of 1,000 points of the same model, lengths and rate and token budget varied."""
    spread = {"kind": "lognormal", "cv": 0.8}
    base = served(1_000, 10.0)
    workload = {
        "requests": 1_000,
        "arrivals": {"kind": "poisson", "rate_per_s": 10.0},
        "prompt_tokens": {**spread, "mean": 512, "max": 4096},
        "output_tokens": {**spread, "mean": 200, "max": 1024},
    }
    return {
        "base": {**base, "workload": workload, "slo": {"ttft_s": 0.5, "tpot_s": 0.03}},
        "question": "grid",
        "vary": {
            "workload.prompt_tokens.mean": [128, 256, 512, 768, 1024],
            "workload.output_tokens.mean": [64, 128, 192, 256],
            "workload.arrivals.rate_per_s": {"log": [2.0, 32.0], "points": 10},
            "strategies.0.token_budget": [512, 1024, 2048, 4096, 8192],
        },
        "objective": ["highest_rate", "lowest_latency"],
        "replicas": 2,
    }


def command(title: str, path: Path) -> list[str]:
    """The arguments of a case."""
    return ["plan", str(path)] if title == SWEEP else [str(path)]


def cases(folder: Path, *, every: bool) -> dict[str, Path]:
    """The scenarios to run, by title; those that are no files of the repository are written into a folder."""
    shipped = ("quickstart", "papers/flash_inference_sweep", "h200/alspec_long_context", "h200/decode_step")
    found = {name: ROOT / "scenarios" / f"{name}.yaml" for name in shipped}
    made = {"1,000 requests, 20/s": served(1_000, 20.0), "10,000 requests, 20/s": served(10_000, 20.0)}
    if (azure := trace()) is not None:
        made["Azure trace, 4 cards"] = azure
    else:
        print(f"Azure trace: SIMCORE_TRACES names no folder with {TRACE}; left out")
    if every:
        made |= {MILLION: served(1_000_000, 29.0), SWEEP: sweep()}
    for number, (title, document) in enumerate(made.items()):
        found[title] = folder / f"{number}.yaml"
        found[title].write_text(yaml.safe_dump(document), encoding="utf-8")
    return found


def run(tree: Path, cache: Path, words: list[str]) -> Took:
    """A process of `python -m simcore` by the code in `tree`, prices kept in `cache`. Raises RuntimeError
    with its last line where it fails."""
    with tempfile.TemporaryDirectory() as here:
        environment = {**os.environ, "PYTHONPATH": str(tree), "SIMCORE_CACHE": str(cache)}
        begun_s = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "simcore", *words],
            cwd=here,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - begun_s
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {said.strip().splitlines()[-1:]}")
    return Took(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * KIB)


def twice(tree: Path, words: list[str]) -> tuple[Took, Took]:
    """A run with nothing kept before, and one after it."""
    with tempfile.TemporaryDirectory() as cache:
        return run(tree, Path(cache), words), run(tree, Path(cache), words)


def line(title: str, tooks: list[Took], loop: float) -> None:
    """Prints the medians of a case, with the range of its wall time."""
    wall, cpu = median(took.wall_s for took in tooks), median(took.cpu_s for took in tooks)
    memory = max(took.memory_bytes for took in tooks)
    least, most = min(took.wall_s for took in tooks), max(took.wall_s for took in tooks)
    print(
        f"{title:<44} {wall:7.2f} s ({least:.2f} to {most:.2f})  cpu {cpu:7.2f} s  {wall / loop:7.1f} x loop"
        f"  {memory / 1e9:5.2f} GB",
        flush=True,
    )


def bench(repeats: int, *, every: bool) -> None:
    """Prints the figures of this tree."""
    loop = loop_s()
    print(f"loop: {TIMEOUTS:,} SimPy timeouts in {loop:.3f} s; medians of {repeats}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for title, path in {"--help": None, **cases(Path(folder), every=every)}.items():
            words = ["--help"] if path is None else command(title, path)
            # These take a minute, and hardly vary.
            pairs = [twice(ROOT, words) for _ in range(1 if title in (MILLION, SWEEP) else repeats)]
            line(f"{title}, nothing kept", [first for first, _ in pairs], loop)
            if path is not None:
                line(f"{title}, a second time", [second for _, second in pairs], loop)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A worktree of a revision. Raises RuntimeError where there is no such one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        words = ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), revision]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{revision}: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=False)


def compare(revision: str, repeats: int) -> None:
    """Prints how long this tree takes over how long a revision takes, one after the other, in pairs; both by
    their sources, for nobody has compiled the revision."""
    os.environ[SOURCES_ONLY] = "1"
    print(f"this tree / {revision}: median ratio of wall times, {repeats} pairs; nothing kept, a second time")
    with checked_out(revision) as other, tempfile.TemporaryDirectory() as folder:
        for title, path in cases(Path(folder), every=False).items():
            here = path.is_relative_to(ROOT)
            theirs = other / path.relative_to(ROOT) if here else path
            ratios: list[tuple[float, float]] = []
            for _ in range(repeats):
                ours_s = [took.wall_s for took in twice(ROOT, [str(path)])]
                theirs_s = [took.wall_s for took in twice(other, [str(theirs)])]
                ratios.append((ours_s[0] / theirs_s[0], ours_s[1] / theirs_s[1]))
            times = [
                f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
                for found in zip(*ratios, strict=True)
            ]
            print(f"{title:<32} {times[0]}   {times[1]}", flush=True)


def main() -> None:
    """Prints the figures with what they were measured on."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="How fast simcore is here.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="a million requests and a sweep too")
    parser.add_argument("compare", nargs="*", metavar="compare REV", help="this tree beside a revision")
    given = parser.parse_args()
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    if given.repeats < 1 or (given.compare and (given.compare[0] != "compare" or len(given.compare) != 2)):
        parser.error("--repeats is at least 1; `compare` takes one revision")
    try:
        if given.compare:
            compare(given.compare[1], given.repeats)
        else:
            bench(given.repeats, every=given.all)
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
