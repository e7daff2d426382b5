"""Does this tree give the same bytes as a revision? For changes that must not change a figure.

    python -m tests.same_as REV [NAME ...]       all scenarios shipped, or those whose path holds a NAME

Every scenario is run by both trees, long ones cut short, and so is its tape. Every file of the run
directories is compared to the byte, but for provenance, which names the code; of the page the figures are.
Prices of 10,000 drawn ops are compared too. Both run by their sources, for nobody has compiled the revision.
Exit code 1 where anything differs.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from simcore.compiled import SOURCES_ONLY
from tests.bench import ROOT, checked_out

SCENARIOS = ROOT / "scenarios"
# What is left of a scenario that takes long.
CUTS = {
    "quickstart": ("workload.requests=60", "replicas=2"),
    "alspec_long_context": ("context_tokens=[1024,131072]", "crossover=[context_tokens]"),
    "flash_inference": ("tokens=[4096]", "model.layers=[4]", "model.channels=[64]", "batch=[1]"),
    "flover": ("workload.requests=40",),
    "decode_step": ("batch=[1,16]", "context_tokens=[1024,16384]"),
    "chat_sessions": ("workload.requests=60",),
}
# Files that say which code ran, when; and the page, of which the figures count.
SAYS_WHICH, PAGE = ("provenance.json",), "report.html"
PRICES = """
import json, sys
from importlib import import_module
from importlib.util import find_spec

# A revision may have these folders beside simcore.
within = "simcore." if find_spec("simcore.devices") else ""
try:
    grid = import_module(f"{within}validate.calibration.cuda_grid")
except ImportError:
    grid = import_module(f"{within}validate.card_grid")
drawn, families = grid.drawn, grid.families
pricer = import_module(f"{within}devices.price").pricer
load_profile = import_module(f"{within}devices.profile").load_profile
load_device = import_module(f"{within}devices.spec").load_device

kinds = sorted({family.kind for family in families()})
ops = drawn(kinds, 10_000 // len(families()) + 1, int(sys.argv[1]), beside_grid=False)
for name in ("h200-sxm", "a100-sxm-80gb"):
    spec = load_device(name)
    price = pricer(spec, profile=load_profile("h200-sxm", "local") if name == "h200-sxm" else None)
    for op in ops:
        try:
            print(op.kind, op.shape, op.dtype, repr(price(op)))
        except ValueError as error:
            print(op.kind, op.shape, op.dtype, str(error).replace("simcore.ops.op", "simcore.ops"))
"""


def scenarios(names: Sequence[str]) -> list[Path]:
    """The scenarios to run: those whose trace, if they have one, is there."""
    found = sorted(
        path for path in SCENARIOS.rglob("*.yaml") if not names or any(n in str(path) for n in names)
    )
    return [path for path in found if _has_its_trace(path)]


def _has_its_trace(path: Path) -> bool:
    arrivals = (yaml.safe_load(path.read_text(encoding="utf-8")).get("workload") or {}).get("arrivals") or {}
    return "path" not in arrivals or (path.parent / arrivals["path"]).is_file()


def run(tree: Path, words: Sequence[str], here: Path) -> str:
    """What a Python process of a tree prints. Raises RuntimeError with its last line where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "SIMCORE_CACHE": "none", SOURCES_ONLY: "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return done.stdout


def settings(path: Path) -> list[str]:
    """What cuts a scenario short, as far as it has the fields."""
    cuts = next((cut for name, cut in CUTS.items() if name in path.stem), ())
    return [word for cut in cuts for word in ("--set", cut)]


def content(path: Path) -> bytes:
    """What counts of a file."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.name == PAGE:
        # The figures' data stand in scripts of the page; elsewhere it tells which code ran. In which order
        # an object of theirs has its keys says nothing.
        found = re.findall(rb"<script[^>]*application/json[^>]*>(.*?)</script>", data, re.DOTALL)
        return "\n".join(json.dumps(json.loads(part), sort_keys=True) for part in found).encode()
    return data


def differences(before: Path, after: Path) -> Iterator[str]:
    """The files of two run directories that differ, or that only one has."""
    names = {path.name for folder in (before, after) for path in folder.iterdir()}
    for name in sorted(names - set(SAYS_WHICH)):
        one, other = before / name, after / name
        if not (one.is_file() and other.is_file()):
            yield f"{name}: only in one of them"
        elif content(one) != content(other):
            yield f"{name}: other bytes"


def compared(path: Path, trees: Sequence[Path], here: Path) -> list[str]:
    """What differs in the runs and the tape of a scenario; paths in the output are those of this tree."""
    folders, tapes = [], []
    for number, tree in enumerate(trees):
        out = here / str(number)
        words = ["-m", "simcore", "run", str(path), *settings(path)]
        run(tree, [*words, "--out", str(out), "--quiet"], here)
        folders.append(out)
        tapes.append(run(tree, [*words, "--on", "tape"], here))
    found = list(differences(*folders))
    return [*found, "tape: other lines"] if tapes[0] != tapes[1] else found


def main() -> None:
    """Compares this tree with a revision and prints what differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.same_as", description="The same figures as before?"
    )
    parser.add_argument("revision")
    parser.add_argument("names", nargs="*", help="parts of paths of scenarios; all, if none is given")
    parser.add_argument("--seed", type=int, default=1, help="by which ops are drawn")
    given = parser.parse_args()
    broken = 0
    with checked_out(given.revision) as other:
        for path in scenarios(given.names):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = compared(path, (other, ROOT), Path(folder))
                except RuntimeError as error:
                    found = [str(error)]
            broken += bool(found)
            print(f"{path.relative_to(SCENARIOS)}: {'; '.join(found) or 'the same'}", flush=True)
        if not given.names:
            before, after = (run(tree, ["-c", PRICES, str(given.seed)], tree) for tree in (other, ROOT))
            count = len(after.splitlines())
            broken += before != after
            print(f"{count:,} prices: {'the same' if before == after else 'others'}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
