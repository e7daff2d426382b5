"""`make bench`: how fast simcore itself is, on this machine. Prints; nothing here passes or fails.

command line    wall time of a whole process, median of n
event loop      device-side spans and simulated tokens per second of `tensor_parallel` and `alspec`
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from simcore import decode
from simcore.assembly import assemble
from simcore.scenario import load_scenario

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5


def wall_s(*words: str) -> list[float]:
    """Wall times of a process, in seconds, in a fresh directory each."""
    times = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            begun_s = time.perf_counter()
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [sys.executable, "-m", "simcore", *words],
                cwd=folder,
                env=environment,
                check=True,
                capture_output=True,
            )
            times.append(time.perf_counter() - begun_s)
    return times


def event_loop(strategy: int) -> str:
    """Spans and tokens per second of one strategy of the ALSpec scenario at eight devices."""
    file = ROOT / "scenarios" / "alspec.yaml"
    parts = assemble(load_scenario(file, ["tokens=20", "context_tokens=1024", "crossover=[]"]), str(file))
    kinds = ("tensor_parallel", "alspec")
    case = [
        c for c in decode.cases(parts.study.bench, parts.study.hits) if c.axes.strategy == kinds[strategy]
    ][-1]
    parts.study.bench.trace(case)
    begun_s = time.perf_counter()
    trace = parts.study.bench.trace(case)
    elapsed_s = time.perf_counter() - begun_s
    return f"{len(trace.spans) / elapsed_s:,.0f} spans/s, {20 / elapsed_s:,.1f} tokens/s, laws checked"


def main() -> None:
    """Prints the figures with what they were measured on."""
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}")
    print(f"median of {REPEATS} (smallest to largest)")
    for title, words in (
        ("--help", ["--help"]),
        ("quickstart to its report", [str(ROOT / "scenarios" / "quickstart.yaml")]),
    ):
        times = wall_s(*words)
        print(f"{title:<26} {median(times):6.2f} s   ({min(times):.2f} to {max(times):.2f})")
    print(f"{'tensor_parallel, 8 ranks':<26} {event_loop(0)}")
    print(f"{'alspec, 4+4 ranks':<26} {event_loop(1)}")


if __name__ == "__main__":
    main()
