"""Runs the command line on files that nobody should write, made by seed, and prints every bad end.

    python -m tests.fuzz_inputs --seed 1 --count 1000        all of them
    python -m tests.fuzz_inputs --seed 1 --only 17 --keep X  one of them, its files left in the folder X

A good end: exit 0, or exit 2 with one line under 300 characters on stderr and nothing left behind. Every
input is run in a process of its own, forked from one that has imported everything; seed and number make it.
"""

import argparse
import csv
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from simcore import cli
from simcore.devices.profile import load_profile
from tests import hostile

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = sorted((ROOT / "scenarios").rglob("*.yaml"))
MOST_BYTES, MOST_S, MOST_LINE = 1_000_000_000, 30.0, 300
# What the signed figures of a study are called; all others are at least 0.
SIGNED = re.compile(r"gain|error|slope|difference|margin|saved|drift")
NOT_LEFT = re.compile(r"Traceback \(most recent|\b\w+Warning: |a fault of simcore|https://errors\.pydantic")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{i:02d}.{i:03d}9600,{100 + i},{5 + i % 7}\n" for i in range(12)
)
MOONCAKE = "".join(
    json.dumps(
        {"timestamp": 250 * i, "input_length": 700 + i, "output_length": 4, "hash_ids": [0, 1 + i % 3]}
    )
    + "\n"
    for i in range(12)
)
TABLE = "when,in,out\n" + "".join(f"{0.25 * i},{64 + i},{3 + i % 5}\n" for i in range(12))
BENCH = {
    "input_lens": [50, 60, 70], "output_lens": [3, 4, 5], "start_times": [10.0, 10.5, 11.0],
    "ttfts": [0.1, 0.1, 0.2], "itls": [[0.01, 0.01], [0.01] * 3, [0.01] * 4], "errors": ["", "", ""],
}  # fmt: skip
FIGURES = (
    "device,model,strategy,ranks,groups,context_tokens,batch,hit_rate,metric,value,unit,role,fitted_by,source\n"
    "h200-sxm,tiny-llama,tensor_parallel,1,1,1024,1,,token_latency_s,0.0004,s,measured,,somewhere\n"
)
OPS = "kind,shape,dtype,median_s\n" + "".join(
    f"matmul,m={m};n={n};k=4096,bf16,{3e-6 + m * n * 4096 * 2 / 5e14 + 4096 * n * 2 / 4e12:.3e}\n"
    for m in (1, 4, 16, 64, 256)
    for n in (1024, 4096, 16384)
)
GEMMS = "gemm_dtype,m,n,k,latency\n" + "".join(
    f"bfloat16,{m},{n},4096,{1e3 * (3e-6 + m * n * 4096 * 2 / 5e14 + 4096 * n * 2 / 4e12):.3e}\n"
    for m in (1, 4, 16, 64, 256)
    for n in (1024, 4096, 16384)
)
SERVING = {
    "name": "fuzz", "study": "serving", "device": "h200-sxm", "model": "tiny-llama", "profile": "none",
    "workload": {
        "requests": 8,
        "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 90},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 9},
    },
    "strategies": [{"kind": "continuous_batching"}],
}  # fmt: skip
DECODE = {
    "name": "fuzz", "study": "decode", "device": "h200-sxm", "model": "tiny-llama", "profile": "none",
    "context_tokens": [64, 1024], "strategies": [{"kind": "tensor_parallel", "ranks": [1, 2]}],
}  # fmt: skip
DEVICE = {
    "name": "my-card", "memory_bytes": 141e9, "hbm_bytes_per_s": 4.8e12, "flops_per_s": {"bf16": 989e12},
    "links": {"nvlink": {"bytes_per_s": 450e9, "topology": "all_to_all", "latency_s": 5e-6}},
    "overheads": {"launch_s": 3e-6, "return_s": 1e-6},
    "hbm_efficiency": {"value": 0.8, "low": 0.7, "high": 0.9},
}  # fmt: skip


@dataclass
class Input:
    """What is run: the words of a command line in the folder that its files are in, what is wrong, and how
    many bytes a file may have before the disk is full."""

    words: list[str]
    wrong: list[str] = field(default_factory=list)
    room_bytes: int | None = None


@dataclass
class End:
    """How one input ended: `code` is negative for a signal."""

    code: int
    seconds: float
    resident_bytes: int
    out: str
    err: str
    left: list[str]
    below: list[str]

    def faults(self) -> list[str]:
        """What is bad about it; nothing where it is good."""
        found = []
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        if self.code not in (0, 2):
            found.append("took too long" if self.code == -signal.SIGALRM else f"exit code {self.code}")
        if NOT_LEFT.search(self.err) or NOT_LEFT.search(self.out):
            found.append("not a line for people")
        if self.code == 2 and len(lines) != 1:
            found.append(f"{len(lines)} lines of error")
        if self.code == 2 and len(self.err.splitlines()) > len(lines):
            found.append("more than the line of error")
        if any(len(line) >= MOST_LINE for line in lines):
            found.append(f"a line of {max(map(len, lines))} characters")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", self.err + self.out):
            found.append("control characters")
        if self.resident_bytes > MOST_BYTES:
            found.append(f"{self.resident_bytes / 1e9:.1f} GB")
        if self.seconds > MOST_S and self.code != -signal.SIGALRM:
            found.append(f"{self.seconds:.0f} s")
        if self.left:
            found.append(f"left behind: {', '.join(self.left[:3])}")
        if self.below:
            found.append(f"below 0, or no number: {'; '.join(self.below[:3])}")
        return found


# -- one process an input ----------------------------------------------------------------------------------


def run(words: Sequence[str], folder: Path, room_bytes: int | None = None) -> End:
    """Runs the command line on words in a folder, in a forked process, and says how that ended."""
    before = _files(folder)
    streams = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 - the child's too
    begun_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        if room_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
        _become(words, folder, [stream.fileno() for stream in streams])
    _, status, used = os.wait4(child, 0)
    seconds = time.perf_counter() - begun_s
    out, err = (_text(stream) for stream in streams)
    code = os.waitstatus_to_exitcode(status)
    after = _files(folder)
    left = sorted(after - before) if code else sorted(name for name in after - before if "/." in f"/{name}")
    return End(code, seconds, used.ru_maxrss * 1024, out, err, left, _below(folder, after - before, code))


def _become(words: Sequence[str], folder: Path, streams: Sequence[int]) -> None:
    """Runs the command line in this process, which ends."""
    code = 99
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for to, stream in enumerate((null, *streams)):
            os.dup2(stream, to)
        os.chdir(folder)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, MOST_S + 10.0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
        try:
            cli.main(list(words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 98
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _text(stream: Any) -> str:
    stream.seek(0)
    found: str = stream.read(10_000_000).decode("utf-8", "replace")
    stream.close()
    return found


def _files(folder: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, names in os.walk(folder)
        for name in (*folders, *names)
    }


def _below(folder: Path, made: set[str], code: int) -> list[str]:
    """Figures of a run that went well which are below 0 and should not be, or are no numbers."""
    found = []
    for name in made if code == 0 else ():
        if name.endswith("results.csv"):
            with (folder / name).open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    for column in ("value", "low", "high"):
                        text = row[column]
                        odd = text in ("nan", "inf", "-inf") or (text.startswith("-") and float(text) < 0.0)
                        if odd and not SIGNED.search(row["metric"]):
                            found.append(f"{row['metric']}.{column} {text} ({row['label']})")
    return found


# -- what is run -------------------------------------------------------------------------------------------


def shrunk(document: Any, key: str = "") -> Any:
    """A scenario small enough to run in a moment."""
    small = {
        "requests": 8,
        "replicas": 1,
        "tokens": 64,
        "batch": 1,
        "layers": 2,
        "channels": 16,
        "length": 128,
    }
    if isinstance(document, dict):
        return {name: shrunk(value, name) for name, value in document.items()}
    if isinstance(document, list):
        few = [shrunk(value, key) for value in document[:2]]
        return few[:1] if few[1:] == few[:1] else few
    if isinstance(document, int) and not isinstance(document, bool) and key in small:
        return min(document, small[key])
    if key == "path" and isinstance(document, str) and document.endswith("_conv.csv"):
        return "trace.csv"
    return document


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return path


def _spoil(path: Path, random: Random, changed: Callable[[str], tuple[str, str]] | None) -> str:
    """Changes a file in one of the ways that files of its kind can be wrong, and says how."""
    way = random.random()
    if way < 0.06:
        return f"{path.name}: {hostile.no_plain_file(path, random)}"
    content = path.read_bytes()
    if way < 0.25 or changed is None:
        content, how = hostile.changed_bytes(content, random)
        path.write_bytes(content)
        return f"{path.name}: {how}"
    text, how = changed(content.decode())
    _write(path.parent, path.name, text)
    return f"{path.name}: {how}"


def _changed(document: Any, random: Random) -> tuple[Any, str]:
    document, how = hostile.changed_document(document, random)
    if random.random() < 0.25 and document:
        document, more = hostile.changed_document(document, random)
        how = f"{how}, {more}"
    return document, how


def _yaml(random: Random) -> Callable[[str], tuple[str, str]]:
    def changed(text: str) -> tuple[str, str]:
        if random.random() < 0.05:
            return hostile.twice(text, random), "a line twice"
        document, how = _changed(yaml.safe_load(text), random)
        return hostile.yaml_text(document), how

    return changed


def _json(random: Random) -> Callable[[str], tuple[str, str]]:
    def changed(text: str) -> tuple[str, str]:
        document, how = _changed(json.loads(text), random)
        return hostile.json_text(document), how

    return changed


def _json_line(random: Random) -> Callable[[str], tuple[str, str]]:
    def changed(text: str) -> tuple[str, str]:
        lines = text.splitlines()
        at = random.randrange(len(lines))
        document, how = hostile.changed_document(json.loads(lines[at]), random)
        lines[at] = hostile.json_text(document)
        return "\n".join(lines) + "\n", f"line {at + 1}: {how}"

    return changed


def _table(random: Random) -> Callable[[str], tuple[str, str]]:
    return lambda text: hostile.changed_table(text, random)


def _scenario(folder: Path, document: Mapping[str, Any]) -> list[str]:
    _write(folder, "scenario.yaml", yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))
    return ["run", "scenario.yaml", "--out", "out/run", "--quiet", "--jobs", "1"]


def _shipped(folder: Path, random: Random) -> list[str]:
    path = random.choice(SCENARIOS)
    _write(folder, "trace.csv", AZURE)
    return _scenario(folder, shrunk(yaml.safe_load(path.read_text(encoding="utf-8"))))


def scenario(folder: Path, random: Random) -> Input:
    words = _shipped(folder, random)
    return Input(words, [_spoil(folder / "scenario.yaml", random, _yaml(random))])


PLANS: Sequence[dict[str, Any]] = (
    {"question": "devices", "between": [1, 4], "constraints": {"ttft_p99_s": 0.5, "itl_p99.9_s": 0.1}},
    {
        "question": "devices",
        "over": "strategies.0.max_sequences",
        "between": [1, 8],
        "slo": "mlperf/llama2-70b/server",
    },
    {
        "question": "rate",
        "vary": {"devices": [1, 2], "seed": {"range": [1, 3], "points": 2}},
        "together": "zip",
    },
    {"question": "strategy", "certainty": 0.9},
    {"question": "cost", "cost_per_hour": {"h200-sxm": 3.5}, "between": [1, 4]},
    {
        "vary": {"workload.arrivals.rate_per_s": {"log": [1, 64], "points": 2}, "devices": [1, 2]},
        "constraints": {"slo_attainment": 0.9, "goodput_per_s": 1.0},
        "objective": ["fewest_devices", "highest_rate", "lowest_latency", "lowest_energy"],
    },
    {
        "vary": {"workload.arrivals.rate_per_s": {"range": [1.0, 64.0], "points": 2}},
        "together": "latin_hypercube",
        "points": 3,
        "objective": "lowest_latency",
    },
)


def plan(folder: Path, random: Random) -> Input:
    base = {**SERVING, "slo": {"ttft_s": 0.5, "e2e_s": 2.0}}
    given = {"name": "fuzz", "base": base, "replicas": 3, **random.choice(PLANS)}
    path = _write(folder, "plan.yaml", yaml.safe_dump(given, sort_keys=False))
    words = ["plan", "plan.yaml", "--out", "out/plan", "--quiet", "--jobs", "1"]
    return Input(words, [_spoil(path, random, _yaml(random))])


def setting(folder: Path, random: Random) -> Input:
    words = _shipped(folder, random)
    document = yaml.safe_load((folder / "scenario.yaml").read_text(encoding="utf-8"))
    path = list(map(str, random.choice(list(hostile.places(document)))))
    if random.random() < 0.25:
        at = random.randrange(len(path))
        path[at] = random.choice(
            (hostile.misspelt(path[at], random), "0", "-1", "", "99999999999999999999", "٣")
        )
    value = random.choice(hostile.VALUES)
    now = document
    for part in path if random.random() < 0.5 else ():
        inside = now if isinstance(now, dict) else dict(enumerate(now)) if isinstance(now, list) else {}
        now = {str(key): each for key, each in inside.items()}.get(part)
        if isinstance(now, int | float):
            value = str(type(now)(now * random.choice((0.1, 0.5, 2, 10, 1e-9))))
    given = random.choice((".".join(path) + "=" + value,) * 9 + (".".join(path), "=", "x=", value))
    # No command line holds a null byte, nor as many characters.
    given = given.replace("\0", "")[:120_000]
    return Input([*words, "--set", given], [f"--set {given[:60]!r}"])


def trace(folder: Path, random: Random) -> Input:
    kind = random.choice(("azure", "mooncake", "vllm", "table", "parquet"))
    arrivals: dict[str, Any] = {"kind": "trace", "format": "table" if kind == "parquet" else kind}
    columns = {"arrival": "when", "prompt": "in", "output": "out"}
    if kind == "azure":
        path, changed = _write(folder, "trace.csv", AZURE), _table(random)
    elif kind == "mooncake":
        path, changed = _write(folder, "trace.jsonl", MOONCAKE), _json_line(random)
    elif kind == "vllm":
        path, changed = _write(folder, "trace.json", json.dumps(BENCH)), _json(random)
    else:
        path, changed = _write(folder, "trace.csv", TABLE), _table(random)
        arrivals["columns"] = columns
    wrong = [_spoil(path, random, changed)] if kind != "parquet" else [_as_parquet(path, random)]
    if kind == "parquet":
        path = folder / "trace.parquet"
    arrivals["path"] = path.name
    if random.random() < 0.3:
        name, value = random.choice(
            [("rate_scale", x) for x in (5e-324, 1e-300, 1e6)]
            + [("jitter_s", x) for x in (1e6, 1e-300)]
            + [
                ("start_s", 1e9),
                ("end_s", 1e-300),
                ("hash_block_tokens", 1),
                ("hash_block_tokens", 10_000_000),
            ]
            + [("time_unit", x) for x in ("ns", "datetime")]
        )
        arrivals[name] = value
        wrong.append(f"{name} = {value}")
    load = {"arrivals": arrivals}
    return Input(_scenario(folder, {**SERVING, "workload": load}), wrong)


def _as_parquet(path: Path, random: Random) -> str:
    """A trace as Parquet, with columns of another type or spoilt bytes."""
    count = random.choice((0, 1, 12, 12, 12))
    columns: dict[str, Any] = {
        "when": [0.25 * i for i in range(count)],
        "in": [64 + i for i in range(count)],
        "out": [3] * count,
    }
    name = random.choice(("when", "in", "out"))
    odd = random.choice(
        (None, -1, 2**63 - 1, 1e308, float("nan"), float("inf"), 5e-324, True, b"\xff", "x", [1], {"a": 1})
    )
    if count:
        columns[name] = (
            [odd] * count if isinstance(odd, str | bytes | list | dict | bool) else [*columns[name][1:], odd]
        )
    try:
        table = pa.table(columns)
    except pa.ArrowException:  # values that no one column holds
        table = pa.table({name: [str(value) for value in column] for name, column in columns.items()})
    pq.write_table(table, path.with_suffix(".parquet"))
    spoilt = _spoil(path.with_suffix(".parquet"), random, None) if random.random() < 0.5 else "whole"
    return f"{name} ends in {odd!r}, {spoilt}"


def device(folder: Path, random: Random) -> Input:
    catalog = sorted((ROOT / "devices/catalog").glob("*.yaml"))
    document = random.choice(
        [DEVICE, DEVICE, yaml.safe_load(random.choice(catalog).read_text(encoding="utf-8"))]
    )
    path = _write(folder, "card.yaml", yaml.safe_dump({**document, "name": "my-card"}, sort_keys=False))
    wrong = [_spoil(path, random, _yaml(random))]
    if random.random() < 0.3:
        return Input(["devices", "card.yaml"], wrong)
    base = random.choice((SERVING, DECODE))
    return Input(_scenario(folder, {**base, "device": "card.yaml"}), wrong)


def _profile(folder: Path, random: Random) -> tuple[list[str], str, Callable[..., Any]]:
    """A profile beside a scenario that goes by it; the command, the file to spoil, and how."""
    home = ROOT / "devices/profiles"
    which = random.choice(("fitted", "ops", "measured", "measured"))
    if which == "fitted":
        shutil.copytree(home / "a6000/leetdecoding-tables", folder / "prof")
        words = _scenario(
            folder,
            {
                "name": "fuzz", "study": "linear_attention", "device": "a6000", "profile": "prof/",
                "methods": ["vanilla", "lightning"], "batch": 1, "decay": False, "length": [128, 512],
                "heads": 32, "rank": 128, "dim": 128, "dtype": "fp32",
            },
        )  # fmt: skip
        name = random.choice(("profile.yaml", "fits.csv"))
    elif which == "ops":
        shutil.copytree(home / "n150/alspec-tables", folder / "prof")
        words = _scenario(folder, {**DECODE, "device": "n150", "model": "llama-3.1-8b", "profile": "prof/"})
        name = random.choice(("profile.yaml", "ops.csv"))
    else:
        _few_points(home / "h200-sxm/local", folder / "prof")
        words = _scenario(folder, {**random.choice((SERVING, DECODE)), "profile": "prof/"})
        name = random.choice(("profile.yaml", "fits.csv", "points.csv", "points.csv"))
    return words, name, _yaml(random) if name.endswith("yaml") else _table(random)


def _few_points(source: Path, target: Path) -> None:
    """A measured profile with a fortieth of its points."""
    shutil.copytree(source, target)
    head, *lines = (source / "points.csv").read_text(encoding="utf-8").splitlines()
    kept = lines[::40]
    kinds = {line.split(",")[0] for line in kept}
    text = (source / "profile.yaml").read_text(encoding="utf-8")
    _write(target, "points.csv", "\n".join([head, *kept]) + "\n")
    _write(target, "profile.yaml", re.sub(r"points: \d+", f"points: {len(kept)}", text))
    assert kinds


def profile(folder: Path, random: Random) -> Input:
    words, name, changed = _profile(folder, random)
    return Input(words, [_spoil(folder / "prof" / name, random, changed)])


def model(folder: Path, random: Random) -> Input:
    shipped = random.choice(sorted((ROOT / "scenarios/models").glob("*.json")))
    text = random.choice((shipped, ROOT / "scenarios/models/tiny-llama.json")).read_text(encoding="utf-8")
    path = _write(folder, "model.json", text)
    wrong = [_spoil(path, random, _json(random))]
    base = random.choice((SERVING, DECODE))
    return Input(_scenario(folder, {**base, "model": "model.json"}), wrong)


def figures(folder: Path, random: Random) -> Input:
    path = _write(folder, "figures.csv", FIGURES)
    wrong = [_spoil(path, random, _table(random))]
    return Input(_scenario(folder, {**DECODE, "published": ["./figures.csv"]}), wrong)


def table(folder: Path, random: Random) -> Input:
    path = _write(folder, "times.csv", random.choice((OPS, GEMMS)))
    wrong = [_spoil(path, random, _table(random))]
    return Input(["profile", "import", "times.csv", "--device", "h200-sxm", "--out", "prof"], wrong)


LABEL = "continuous batching, 2,048 tokens a step"
EXPORT = ["export", "run", "--out", "bench.json", "--rate", "8", "--label", LABEL]
# The run directories that are spoilt, made once.
_RUNS: list[Path] = []


def make_runs(home: Path) -> None:
    """Runs the scenarios whose run directories are spoilt."""
    sessions = yaml.safe_load((ROOT / "scenarios/h200/chat_sessions.yaml").read_text(encoding="utf-8"))
    tiling = yaml.safe_load((ROOT / "scenarios/tiling_cpu.yaml").read_text(encoding="utf-8"))
    linear = yaml.safe_load((ROOT / "scenarios/papers/leetdecoding_a6000.yaml").read_text(encoding="utf-8"))
    quick = yaml.safe_load((ROOT / "scenarios/quickstart.yaml").read_text(encoding="utf-8"))
    for i, document in enumerate((quick, sessions, tiling, linear, DECODE)):
        folder = home / str(i)
        folder.mkdir()
        end = run(_scenario(folder, shrunk(document)), folder)
        assert end.code == 0, end.err
        _RUNS.append(folder / "out/run")


def rundir(folder: Path, random: Random) -> Input:
    source = random.choice(_RUNS)
    shutil.copytree(source, folder / "run")
    names = sorted(path.name for path in (folder / "run").iterdir() if path.name != "report.html")
    wrong = []
    for name in random.sample(names, random.choice((1, 1, 2))):
        path = folder / "run" / name
        changed: Any = {".yaml": _yaml, ".json": _json, ".csv": _table}.get(path.suffix)
        if name.endswith(".parquet") and random.random() < 0.6:
            wrong.append(_odd_parquet(path, random))
        else:
            wrong.append(_spoil(path, random, changed(random) if changed else None))
    return Input(EXPORT if random.random() < 0.3 else ["report", "run"], wrong)


def _odd_parquet(path: Path, random: Random) -> str:
    """A Parquet file with a column that is missing, renamed, or of other values."""
    columns = pq.read_table(path).to_pydict()
    name = random.choice(list(columns))
    count = len(columns[name])
    odd = random.choice(
        (
            None,
            -1,
            0,
            2**62,
            1e308,
            -1e308,
            float("nan"),
            float("inf"),
            5e-324,
            True,
            b"\xff",
            "x",
            "\x1b[1m",
            [1],
        )
    )
    how = random.choice(("missing", "renamed", "all", "last", "none", "many"))
    if how == "missing":
        del columns[name]
    elif how == "renamed":
        columns[name + "x"] = columns.pop(name)
    elif how == "all":
        columns[name] = [odd] * count
    elif how == "last" and count:
        columns[name] = [*columns[name][1:], odd]
    elif how == "none":
        columns = {key: [] for key in columns}
    elif how == "many":
        columns = {key: (values * 3000)[:20_000] for key, values in columns.items()}
    try:
        made = pa.table(columns)
    except (pa.ArrowException, TypeError, OverflowError):
        columns[name] = [str(value) for value in columns[name]]
        made = pa.table(columns)
    pq.write_table(made, path)
    return f"{path.name}: {name}: {how} {odd!r}"


def command_line(folder: Path, random: Random) -> Input:
    """Names on the command line that stand for no such thing."""
    _scenario(folder, random.choice((SERVING, DECODE)))
    odd = random.choice(
        ("nowhere.yaml", ".", "/", "/dev/zero", "/dev/null", "scenario.yaml/", "a\x1b[31m.yaml", "~", "-",
         "--x", 300 * "x" + ".yaml", 3000 * "y/" + ".yaml", "\udcff.yaml", "", " ", "a\nb.yaml",
         "/proc/self/mem", "/dev/stdin")
    )  # fmt: skip
    run_it = ["run", "scenario.yaml"]
    words = random.choice(
        (["run", odd], [odd], ["report", odd], ["export", odd, "--out", "x.json"], ["devices", odd],
         [*run_it, "--out", odd], ["profile", "import", odd, "--device", "h200-sxm", "--out", "p"],
         ["profile", "import", odd, "--device", odd, "--out", "p"], [*run_it, "--on", odd], ["validate", odd],
         [*run_it, "--set", odd], [*run_it, "--set", f"model={odd}"], [*run_it, "--set", f"device={odd}"],
         [*run_it, "--set", f"profile={odd}"])
    )  # fmt: skip
    return Input(words, [f"{odd[:40]!r}"])


def full_disk(folder: Path, random: Random) -> Input:
    """Nothing is wrong but that files cannot grow beyond some size."""
    kind = random.choice(("run", "report", "export", "import"))
    room_bytes = random.choice((1000, 3000, 10_000, 30_000, 100_000, 300_000))
    if kind == "run":
        words = _shipped(folder, random)
    elif kind == "import":
        _write(folder, "times.csv", OPS)
        words = ["profile", "import", "times.csv", "--device", "h200-sxm", "--out", "prof"]
        room_bytes //= 30
    else:
        shutil.copytree(random.choice(_RUNS), folder / "run")
        words = EXPORT if kind == "export" else ["report", "run"]
    return Input(words, [f"{kind} with room for files of {room_bytes} bytes"], room_bytes)


KINDS: Mapping[str, tuple[int, Callable[[Path, Random], Input]]] = {
    "scenario": (30, scenario),
    "setting": (12, setting),
    "trace": (12, trace),
    "device": (10, device),
    "profile": (10, profile),
    "model": (8, model),
    "figures": (4, figures),
    "table": (6, table),
    "rundir": (12, rundir),
    "command": (4, command_line),
    "full": (3, full_disk),
    "plan": (10, plan),
}


def make(seed: int, number: int, folder: Path, only: Sequence[str] = ()) -> tuple[str, Input]:
    """The input of a seed and a number, its files in a folder."""
    random = Random(f"{seed}/{number}")
    names = [name for name, (weight, _) in KINDS.items() for _ in range(weight) if not only or name in only]
    kind = random.choice(names)
    return kind, KINDS[kind][1](folder, random)


def prepare(home: Path) -> None:
    """Imports everything and reads the largest profile, so that a forked process has them; makes runs."""
    for name in ("simcore.devices.imported", "simcore.reports", "simcore.cli"):
        importlib.import_module(name)
    load_profile("h200-sxm", "local")
    make_runs(home)


def main() -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="one input alone, with all it prints")
    parser.add_argument(
        "--kind", action="append", default=[], choices=KINDS, help="inputs of this kind alone"
    )
    parser.add_argument("--keep", type=Path, default=None, help="with --only: where to leave its files")
    given = parser.parse_args()
    sys.set_int_max_str_digits(4300)
    with tempfile.TemporaryDirectory() as home:
        prepare(Path(home))
        numbers = range(given.start, given.start + given.count) if given.only is None else [given.only]
        counts: dict[str, int] = {}
        bad = 0
        begun_s, most_s, most_bytes = time.perf_counter(), 0.0, 0
        for number in numbers:
            with tempfile.TemporaryDirectory(dir=home) as made:
                folder = given.keep or Path(made)
                folder.mkdir(parents=True, exist_ok=True)
                kind, what = make(given.seed, number, folder, given.kind)
                end = run(what.words, folder, what.room_bytes)
            found = end.faults()
            name = f"{kind} exit {end.code}"
            counts[name] = counts.get(name, 0) + 1
            most_s, most_bytes = max(most_s, end.seconds), max(most_bytes, end.resident_bytes)
            if given.only is not None:
                print(
                    what.words,
                    what.wrong,
                    end.code,
                    f"{end.seconds:.1f} s",
                    f"{end.resident_bytes / 1e6:.0f} MB",
                )
                print(end.out, end.err, sep="\n")
            if found:
                bad += 1
                last = (end.err.strip().splitlines() or [""])[-1]
                again = " ".join(f"--kind {kind}" for kind in given.kind)
                print(f"BAD {'; '.join(found)[:200]}: {kind}: {'; '.join(what.wrong)[:200]}")
                print(f"    {last[:160]!r}  (--seed {given.seed} --only {number} {again})", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count}")
    print(
        f"{bad} bad ends of {len(numbers)} inputs; at most {most_s:.1f} s and {most_bytes / 1e6:.0f} MB;"
        f" {time.perf_counter() - begun_s:.0f} s in all"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
