"""Nothing that a file can hold ends in a traceback, a hang or a screenful; what is written is whole or not.

`python -m tests.fuzz_inputs` runs thousands of such inputs in processes of their own; here are a few of each
kind, and every fault that was found once.
"""

import ast
import csv
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore import rundir
from simcore.cli import main
from simcore.input import drafts
from simcore.input.files import (
    CONTROL,
    InputError,
    nearest,
    one_line,
    parse_json,
    parse_yaml,
    plain,
    read_cells,
    read_text,
    shown,
)
from simcore.workload.spec import TraceArrivals
from tests import fuzz_inputs, hostile
from tests.thorough import examples, first, slow, thorough

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 300
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in an empty folder; gives its exit code and what it wrote to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def one_line_of(found: tuple[int, str]) -> str:
    """The one line of bad input."""
    code, err = found
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert "a fault of simcore" not in line
    assert len(line) < LONGEST
    assert not CONTROL.search(line)
    return line


def ran_or_refused(found: tuple[int, str]) -> None:
    assert found[0] == 0 or one_line_of(found)


def write(name: str, document: Any) -> str:
    Path(name).write_text(hostile.yaml_text(document), encoding="utf-8")
    return name


def run_words(document: Any) -> list[str]:
    return ["run", write("scenario.yaml", document), "--out", "run", "--quiet", "--jobs", "1"]


def changed(document: Any, path: str, value: Any) -> Any:
    """A copy of a document with another value at a dotted path."""
    copy = json.loads(json.dumps(document))
    *parts, last = path.split(".")
    place = copy
    for part in parts:
        place = place[part]
    place[last] = value
    return copy


# -- a few random ones of each kind, in this process -----------------------------------------------------

KINDS = ("scenario", "setting", "trace", "device", "profile", "model", "figures", "table", "command")


@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_input_runs_or_is_one_line(
    kind: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scenarios that are shipped take seconds, and are for the tool.
    monkeypatch.setattr(fuzz_inputs, "_shipped", quick)
    for number in range(max(2, examples(20))):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, spoilt = fuzz_inputs.make(29, number, folder, [kind])
        monkeypatch.chdir(folder)
        before = sorted(folder.rglob("*"))
        found = call(*spoilt.words)
        ran_or_refused(found)
        if found[0]:
            assert sorted(folder.rglob("*")) == before, spoilt.wrong


def quick(folder: Path, random: Random) -> list[str]:
    return fuzz_inputs._scenario(folder, random.choice((fuzz_inputs.SERVING, fuzz_inputs.DECODE)))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(fuzz_inputs.SERVING), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--out", str(folder / "run"), "--quiet", "--jobs", "1"])
    assert not ended.value.code
    return folder / "run"


@slow
def test_a_spoilt_run_directory_gives_a_report_or_one_line(
    finished_run: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_inputs, "_RUNS", [finished_run])
    monkeypatch.setattr(fuzz_inputs, "EXPORT", ["export", "run", "--out", "bench.json"])
    for number in range(max(4, examples(40))):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, spoilt = fuzz_inputs.make(31, number, folder, ["rundir"])
        monkeypatch.chdir(folder)
        before = sorted(folder.rglob("*"))
        ran_or_refused(call(*spoilt.words))
        assert set(folder.rglob("*")) - set(before) <= {folder / "bench.json"}


@settings(derandomize=True, max_examples=examples(60))
@given(text=st.text(max_size=80))
@slow
def test_any_text_is_a_document_or_an_input_error(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        line = refusal(parse, text)
        assert not line or line.startswith("x: not valid ")
        assert not CONTROL.search(line)


def refusal(parse: Callable[[str, str], Any], text: str) -> str:
    """What is said against a text; nothing where it is parsed."""
    try:
        parse(text, "x")
    except InputError as error:
        return str(error)
    return ""


@settings(derandomize=True, max_examples=examples(60))
@given(text=st.text(max_size=2000), names=st.lists(st.text(max_size=200), max_size=30))
def test_what_is_repeated_is_short_and_printable(text: str, names: list[str]) -> None:
    for line in (shown(text), plain(text)):
        assert len(line) <= 60
        assert line.isprintable()
    assert one_line(text).isprintable()
    assert len(one_line(text)) < LONGEST - len("error: ")
    assert len(nearest(text, names)) < LONGEST


# -- documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (hostile.bomb(), "more than 1,000,000 values"),
        (hostile.bomb(8, 9), "more than 1,000,000 values"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n" + "c: &c {<<: [" + ", ".join(40 * ["*b"]) + "]}", ""),
        ("&a [*a]", "an alias stands for what it is in"),
        ("&a {b: *a}", "an alias stands for what it is in"),
        pytest.param(1500 * "[" + 1500 * "]", "nested more than 40 deep", marks=slow),
        (100 * "[" + 100 * "]", "nested more than 40 deep"),
        ("a: " + 400 * "7", "a number of 400 digits; at most 40 are allowed"),
        ("a: " + 5000 * "7", "a number of 5000 digits; at most 40 are allowed"),
        ('a: "\\e[31m"', "a control character ('\\x1b')"),
        ('a: "x\\0y"', "a control character ('\\x00')"),
        ('a: "\\uD800"', "a control character ('\\ud800')"),
        ("a: \x1b[31m", "special characters are not allowed"),
    ],
)
def test_a_document_that_holds_too_much_is_one_short_line(text: str, says: str) -> None:
    if not says:
        assert parse_yaml(text, "x")["c"] == {"x": 1}
        return
    with pytest.raises(InputError) as refused:
        parse_yaml(text, "x")
    assert says in str(refused.value)
    assert len(str(refused.value)) < LONGEST


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested more than 40 deep"),
        ("[" * 50 + "]" * 50, "nested more than 40 deep"),
        ('{"a": ' + 5000 * "7" + "}", "a number of 5000 digits"),
        ('{"a": "\\u001b[1m"}', "a control character"),
        ('{"\\u0000": 1}', "a control character"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("{", "in line 1: Expecting property name"),
    ],
)
def test_json_that_holds_too_much_is_one_short_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_json(text, "x")
    assert says in str(refused.value)
    assert len(str(refused.value)) < LONGEST


# -- files that are none -----------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def hollow(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NOT_PLAIN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (pipe, "is a pipe"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "directory": (lambda path: path.mkdir(), "Is a directory"),
    "circle": (lambda path: path.symlink_to(path.name), "Too many levels"),
    "hollow": (hollow, "has 1,099,511,627,776 bytes"),
    "Latin-1": (lambda path: path.write_bytes(b"caf\xe9"), "not UTF-8"),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
@pytest.mark.parametrize("role", ["scenario", "device", "model", "trace", "table", "profile", "published"])
def test_what_is_no_plain_file_is_one_line(call: Call, role: str, what: str) -> None:
    make, says = NOT_PLAIN[what]
    name = {"scenario": "x.yaml", "device": "x.yaml", "model": "x.json", "profile": "x.yaml"}.get(
        role, "x.csv"
    )
    make(Path(name))
    load = {"arrivals": {"kind": "trace", "format": "azure", "path": name}}
    words = {
        "scenario": lambda: ["run", name],
        "table": lambda: ["profile", "import", name, "--device", "h200-sxm", "--out", "p"],
        "trace": lambda: run_words({**fuzz_inputs.SERVING, "workload": load}),
        "published": lambda: run_words({**fuzz_inputs.DECODE, "published": ["./x.csv"]}),
    }.get(role, lambda: run_words({**fuzz_inputs.DECODE, role: f"./{name}"}))()
    line = one_line_of(call(*words))
    # Arrow reads bytes that are no text, and says so in its own words.
    assert says in line or (what == "Latin-1" and "UTF" in line) or (role, what) == ("trace", "Latin-1")


def test_a_name_with_a_null_byte_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot be read: embedded null byte"):
        read_text(Path("a\0b"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a,a\n1,2\n", "column 'a' is there twice"),
        (b"a,b\n1,2\n1\n", "line 3: has not as many cells as there are columns (1, not 2)"),
        (b"a,b\n1,2,3\n", "line 2: has not as many cells as there are columns (3, not 2)"),
        (b"a,b\n1,\x1b[2J\n", "line 2: has a control character ('\\x1b')"),
        (b"a,b\n1,\x00\n", "line 2: has a control character ('\\x00')"),
        (b"a,b\n1," + 200_000 * b"x" + b"\n", "field larger than field limit"),
    ],
)
def test_a_table_that_is_none_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_cells(path)
    assert says in str(refused.value)


@slow
def test_parquet_of_any_number_of_rows_is_refused_before_it_is_read(call: Call) -> None:
    # Three columns of one value each, 30 million times: a few kilobytes.
    one = pa.array([1] * 1000, pa.int32())
    batch = pa.table({"when": one, "in": one, "out": one})
    with pq.ParquetWriter("x.parquet", batch.schema) as writer:
        writer.write_table(pa.concat_tables(30_000 * [batch]))
    arrivals = {
        "kind": "trace", "format": "table", "path": "x.parquet",
        "columns": {"arrival": "when", "prompt": "in", "output": "out"},
    }  # fmt: skip
    line = one_line_of(call(*run_words({**fuzz_inputs.SERVING, "workload": {"arrivals": arrivals}})))
    assert "has 30,000,000 rows; at most 20,000,000 are allowed" in line


# -- faults that were found once ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("links.nvlink.latencys", 1e-6, "unknown key 'links.nvlink.latencys'"),
        ("links.nvlink", [1], "links.nvlink: input should be an object"),
        ("links.nvlink.kind", ["nvlink"], "links.nvlink.kind: "),
        ("links.nvlink.bytes_per_s", "x" * 100_000, "links.nvlink.bytes_per_s: "),
        ("memory_bytes", 10**30, "memory_bytes: input should be less than or equal to"),
    ],
)
def test_a_fault_of_a_device_file_is_named(call: Call, path: str, value: Any, says: str) -> None:
    write("card.yaml", changed(fuzz_inputs.DEVICE, path, value))
    assert says in one_line_of(call("devices", "card.yaml"))


@pytest.mark.parametrize("file", ["ops.csv", "fits.csv"])
def test_a_column_that_a_profile_has_not_is_named(call: Call, tmp_path: Path, file: str) -> None:
    home = ROOT / "devices/profiles"
    source = home / ("n150/alspec-tables" if file == "ops.csv" else "a100-sxm-80gb/flash-decoding-table")
    (tmp_path / "p").mkdir()
    for path in source.iterdir():
        (tmp_path / "p" / path.name).write_bytes(path.read_bytes())
    head, *rows = (tmp_path / "p" / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join([f"{head},extra", *(f"{row},1" for row in rows)])
    (tmp_path / "p" / file).write_text(text, encoding="utf-8")
    device = source.parent.name
    line = one_line_of(call(*run_words({**fuzz_inputs.DECODE, "device": device, "profile": "./p/"})))
    assert f"{file}: unknown column 'extra'" in line


def test_a_profile_faster_than_its_device_is_named(call: Call, tmp_path: Path) -> None:
    source = ROOT / "devices/profiles/n150/alspec-tables"
    (tmp_path / "p").mkdir()
    for path in source.iterdir():
        (tmp_path / "p" / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "p/ops.csv").open(encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    at = head.index("nanoseconds")
    for row in rows:
        row[at] = "3"
    with (tmp_path / "p/ops.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    line = one_line_of(
        call(*run_words({**fuzz_inputs.DECODE, "device": "n150", "model": "llama-3.1-8b", "profile": "./p/"}))
    )
    assert "profile alspec-tables: embedding embedding takes" in line
    assert "s there; n150 takes" in line
    assert line.endswith("s at least by its datasheet")


def test_a_rate_scale_below_what_a_float_divides_by_is_refused(call: Call) -> None:
    Path("t.csv").write_text(fuzz_inputs.AZURE, encoding="utf-8")
    arrivals = {"kind": "trace", "format": "azure", "path": "t.csv", "rate_scale": 5e-324}
    line = one_line_of(call(*run_words({**fuzz_inputs.SERVING, "workload": {"arrivals": arrivals}})))
    assert "workload.arrivals.rate_scale: is 5e-324" in line
    assert TraceArrivals.model_fields["rate_scale"]


@pytest.mark.parametrize("gap_s", ["1e-320", "5e-324", "1e-12"])
@slow
def test_requests_that_come_next_to_no_time_apart_run(call: Call, gap_s: str) -> None:
    Path("t.csv").write_text(f"when,in,out\n0,64,3\n{gap_s},64,3\n", encoding="utf-8")
    columns = {"arrival": "when", "prompt": "in", "output": "out"}
    arrivals = {"kind": "trace", "format": "table", "path": "t.csv", "columns": columns}
    code, err = call(*run_words({**fuzz_inputs.SERVING, "workload": {"arrivals": arrivals}}))
    assert (code, "fault" in err) == (0, False)


def test_launches_of_more_than_a_second_are_named(call: Call) -> None:
    document = {
        "name": "x", "study": "tiling", "device": "h200-sxm", "profile": "none", "tokens": 16,
        "model": {"kind": "long_convolution", "layers": 1, "channels": 16}, "launching": "eager",
        "overheads": {"launch_s": 0.9, "launch_kernel_s": 0.9}, "strategies": [{"kind": "lazy"}],
    }  # fmt: skip
    line = one_line_of(call(*run_words(document)))
    assert "overheads: launch_s and launch_kernel_s make 1.8 s of a launch" in line


@slow
def test_a_long_name_is_not_repeated_in_full(call: Call) -> None:
    for document in (
        {**fuzz_inputs.DECODE, "x" * 100_000: 1},
        {**fuzz_inputs.DECODE, "model": "x" * 100_000},
        {**fuzz_inputs.DECODE, "study": "x" * 100_000},
        changed(fuzz_inputs.SERVING, "workload.arrivals.kind", "x" * 100_000),
    ):
        assert "xxx..." in one_line_of(call(*run_words(document)))


@pytest.mark.parametrize("word", ["a\x1b[31m.yaml", "seed=\x07"])
def test_control_characters_on_the_command_line_are_refused(call: Call, word: str) -> None:
    write("scenario.yaml", fuzz_inputs.DECODE)
    assert "has a control character" in one_line_of(call("run", "scenario.yaml", "--set", word))
    assert "has a control character" in one_line_of(call("run", "scenario.yaml", "--out", word))


def test_export_refuses_requests_that_no_run_writes(call: Call, finished_run: Path) -> None:
    whole = pq.read_table(finished_run / "requests.parquet")
    odd = {
        "finish_s": [-1.0] * len(whole),
        "prompt_tokens": ["x"] * len(whole),
        "arrival_s": [float("nan")] * len(whole),
        "label": [None] * len(whole),
    }
    Path("run").mkdir()
    for name, values in odd.items():
        table = whole.set_column(whole.column_names.index(name), name, pa.array(values))
        pq.write_table(table, "run/requests.parquet")
        assert name in one_line_of(call("export", "run", "--out", "x.json"))
        assert not Path("x.json").exists()
    pq.write_table(whole.drop_columns(["finish_s"]), "run/requests.parquet")
    assert "no column 'finish_s'" in one_line_of(call("export", "run", "--out", "x.json"))


# -- text is UTF-8 -----------------------------------------------------------------------------------------


@slow
def test_every_text_that_is_read_or_written_names_its_encoding() -> None:
    """No text in the locale's encoding: calls of open, read_text and write_text, looked at one by one."""
    found = []
    for package in ("simcore", "devices", "kernels", "validate", "reports"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _is_text_in_the_locale(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def _is_text_in_the_locale(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if any(word.arg == "encoding" for word in call.keywords):
        return False
    if name in ("open", "fdopen"):
        module = getattr(getattr(call.func, "value", None), "id", "")
        modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return (
            module != "gzip" and not (module == "os" and name == "open") and not any("b" in m for m in modes)
        )
    # Those of ours, in simcore.input.files and simcore.input.drafts, know no other encoding.
    return name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute)


@thorough
def test_a_run_in_a_locale_of_ascii_is_the_same(tmp_path: Path) -> None:
    # A run whose scenario holds letters that ASCII has not, and whose report does.
    (tmp_path / "é").mkdir()
    file = tmp_path / "é" / "scenario.yaml"
    file.write_text(yaml.safe_dump(fuzz_inputs.DECODE), encoding="utf-8")
    plain_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-m", "simcore", "run", str(file), "--out", str(tmp_path / "é" / "run")]
    environment = {**os.environ, **plain_locale, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, env=environment, capture_output=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    ended = subprocess.run(
        [*words[:3], "report", str(tmp_path / "é" / "run")],
        env=environment, capture_output=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


# -- whole or nothing --------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], None]) -> int:
    """What a forked process that does this ends with; negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            # What a full disk raises, without filling one.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            work()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def renames_end_in(number: int, which: int) -> Iterator[None]:
    """The process gets a signal before its rename number `which`."""
    rename, count = Path.rename, 0

    def ended(self: Path, to: Path) -> Path:
        nonlocal count
        count += 1
        if count == which:
            os.kill(os.getpid(), number)
        return rename(self, to)

    Path.rename = ended  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Path.rename = rename  # type: ignore[method-assign]


def a_run(target: Path, text: str) -> None:
    with rundir.written_whole(target) as folder:
        (folder / rundir.MARK).write_text(text, encoding="utf-8")


def held(target: Path) -> str:
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return (target / rundir.MARK).read_text(encoding="utf-8")


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C is heeded, also where the tests were started in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("which", [1, 2])
def test_a_signal_between_two_renames_waits_until_the_run_is_there(tmp_path: Path, which: int) -> None:
    target = tmp_path / "run"
    a_run(target, "first")
    with renames_end_in(signal.SIGINT, which), pytest.raises(KeyboardInterrupt):
        a_run(target, "second")
    assert held(target) == "second"


@pytest.mark.parametrize("which", [1, 2])
def test_a_run_that_was_set_aside_by_a_killed_one_comes_back(tmp_path: Path, which: int) -> None:
    target = tmp_path / "run"
    a_run(target, "first")

    def killed() -> None:
        with renames_end_in(signal.SIGKILL, which):
            a_run(target, "second")

    assert in_a_child(killed) == -signal.SIGKILL
    assert target.exists() == (which == 1)
    assert len(list(tmp_path.iterdir())) > 1

    def fails() -> None:
        with rundir.written_whole(target):
            assert (target / rundir.MARK).read_text(encoding="utf-8") == "first"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert held(target) == "first"


def test_drafts_of_killed_writers_alone_are_swept_up(tmp_path: Path) -> None:
    target = tmp_path / "run"
    foreign = tmp_path / ".run-0123abcd"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine", encoding="utf-8")

    def killed() -> None:
        with rundir.written_whole(target) as folder:
            (folder / "results.csv").write_text("half", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(killed) == -signal.SIGKILL
    with drafts.folder_draft(target, lambda name: True) as alive:
        # The other draft goes; that of the living writer and what is nobody's draft stay.
        assert {path.name for path in tmp_path.iterdir()} == {alive.name}
        foreign.mkdir()
        (foreign / "thesis.tex").write_text("mine", encoding="utf-8")
        a_run(target, "other")
        assert alive.exists()
        assert foreign.exists()


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    def killed() -> None:
        with drafts.file_draft(path) as draft:
            draft.write_text("half", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

    drafts.write_text(path, "first")
    path.chmod(0o640)
    assert in_a_child(killed) == -signal.SIGKILL
    assert path.read_text(encoding="utf-8") == "first"
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "link.json").symlink_to(path)
    drafts.write_text(tmp_path / "link.json", "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert path.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in tmp_path.iterdir()} == {"x.json", "link.json"}
    with pytest.raises(InputError, match="is a directory"):
        drafts.write_text(tmp_path, "x")
    if Path("/dev/full").exists():
        with pytest.raises(InputError, match="No space left on device"):
            drafts.write_text(Path("/dev/full"), "x" * 100_000)


@pytest.mark.parametrize("room_bytes", first(1, [300, 0, 5000]))
@pytest.mark.parametrize("command", ["run", "report", "export", "import"])
@slow
def test_on_a_full_disk_nothing_is_left_half_written(
    command: str, room_bytes: int, finished_run: Path, call: Call, tmp_path: Path
) -> None:
    write("scenario.yaml", fuzz_inputs.SERVING)
    Path("times.csv").write_text(fuzz_inputs.OPS, encoding="utf-8")
    (tmp_path / "old").mkdir()
    for path in finished_run.iterdir():
        (tmp_path / "old" / path.name).write_bytes(path.read_bytes())
    Path("bench.json").write_text("before", encoding="utf-8")
    words = {
        "run": ["run", "scenario.yaml", "--out", "old", "--quiet", "--jobs", "1"],
        "report": ["report", "old"],
        "export": ["export", "old", "--out", "bench.json"],
        "import": ["profile", "import", "times.csv", "--device", "h200-sxm", "--out", "p"],
    }[command]
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))
        # What is printed goes nowhere, for that is a file here.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        main(words)

    # The JSON of eight requests has room in 5,000 bytes.
    fits = (command, room_bytes) in (("export", 5000), ("import", 5000))
    assert in_a_child(full) == (0 if fits else 2)
    after = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert fits or after == before
