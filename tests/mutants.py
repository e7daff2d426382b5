"""Single faults put into the core, drawn by seed, and whether the tests see them.

    python -m tests.mutants --seed 7 --count 70              one line a fault; the share, the survivors
    python -m tests.mutants --lines simcore/machine/laws.py:145-160  all faults of some lines
    python -m tests.mutants --map-only     only which test runs which line, kept in .coverage-map/

A fault is one change of one place: a comparison, an operator, a number, min for max, a condition the other
way round, a statement or a term left out (`faults_of`). It goes into a private copy of the tree, there the
tests that run that line are run, few and quick ones first, until one fails, or `--limit-s` is over. A test
that hangs has seen the fault. What cannot change a result is named in tests/harmless_mutants.txt, with its
reason; `+ *` there stands for all that may become of a line.

Needs the package coverage for the map. One process; the map is made anew of test files that changed, and
follows the core's lines through edits.
"""

import argparse
import ast
import contextlib
import difflib
import gzip
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / ".coverage-map"
HARMLESS = Path(__file__).with_name("harmless_mutants.txt")
# What simulates and what computes figures; not what reads inputs, writes texts or draws.
CORE = (
    *(f"simcore/{name}.py" for name in (
        "sim/*", "machine/laws", "machine/metrics", "machine/trace", "ops/*", "models/decoder",
        "models/served_decoder", "models/long_convolution", "workload/arrivals", "schedules/*",
        "studies/serving/*", "studies/decode/*", "studies/tiling/*", "planning/verdict", "planning/searches",
        "planning/limits", "planning/points", "planning/alternatives", "planning/questions", "planning/runs",
        "planning/store",
    )),
    *(f"devices/{name}.py" for name in ("price", "interpolation", "fit", "fitted", "collectives", "waves")),
    "validate/ladder/rungs.py", "validate/engines/*.py",
)  # fmt: skip
TEXTS = ("__init__.py", "answer.py", "tables.py", "published.py")
PACKAGES = ("simcore", "tests")
# Tests of kernels on Triton's interpreter take minutes and run nothing of the core.
ELSEWHERE = ("test_triton_*", "test_torch_ops*", "test_torch_seq*", "test_step_kernels*", "test_*_on_gpu*")
# What all tests of these files look at: bounds and defaults of all fields, set at import.
OF_IMPORTS = ("tests/test_schemas.py",)
DOCTESTS = ("simcore", "simcore/devices", "simcore/validate")
# The first tests that are tried on a fault: so many, of so many files at most.
FIRST_TESTS, FIRST_FILES = 60, 12
SLOWEST_S = 60.0

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"),
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum",
           "bisect_left": "bisect_right", "bisect_right": "bisect_left", "floor": "ceil",
           "ceil": "floor"}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One change of a file: `old` [start, end) bytes become `new`; lines of the statement it is in."""

    path: str
    kind: str
    start: int
    end: int
    new: str
    line: int
    lines: tuple[int, ...]
    scope: str
    at_import: bool

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


# -- what can be changed -------------------------------------------------------------------------------


class _Places(ast.NodeVisitor):
    """Collects the faults of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Fault] = []
        self.scopes: list[str] = []
        self.in_function = 0
        self.statement: ast.stmt | None = None
        self.assigned: list[set[str]] = []

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.at(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.at(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, kind: str, start: int, end: int, new: str) -> None:
        statement = self.statement
        if statement is None:
            return
        last = statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            last = max(statement.lineno, body[0].lineno - 1)
        line = self.source[:start].count(b"\n") + 1
        lines = tuple(range(statement.lineno, last + 1))
        where = ".".join(self.scopes), not self.in_function
        self.found.append(Fault(self.path, kind, start, end, new, line, lines, *where))

    def between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Another operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        pattern = r"(?<![<>=!*/])" + re.escape(old).replace(r"\ ", r"\s+") + r"(?![<>=*/])"
        here = re.search(pattern.encode(), self.source[start:end])
        if here:
            self.add(kind, start + here.start(), start + here.end(), new)

    # What holds no fault: texts, types, what is raised.
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            before, self.statement = self.statement, node
            super().visit(node)
            self.statement = before
        else:
            super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        for child in node.body:
            self.visit(child)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.scopes.append(node.name)
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]:
            self.visit(default)
        self.in_function += 1
        self.assigned.append({arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]})
        for child in node.body:
            self.visit(child)
        self.assigned.pop()
        self.in_function -= 1
        self.scopes.pop()

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) == "TYPE_CHECKING":
            return
        # A condition that only guards an error says what inputs are allowed.
        if not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
            self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        start, end = self.span(node)
        self.add("other branch", start, end, f"({self.text(node.body)})")
        self.add("other branch", start, end, f"({self.text(node.orelse)})")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        start, end = self.span(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.add("negated", start, end, f"({self.text(test.operand)})")
        else:
            self.add("negated", start, end, f"(not ({self.text(test)}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between("comparison", left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        words = [n for n in (node.left, node.right) if isinstance(n, texts) or _is_text(n)]
        if type(node.op) in OPERATORS and not words:
            self.between("operator", node.left, node.right, *OPERATORS[type(node.op)])
            if isinstance(node.op, ast.Add | ast.Sub):
                start, end = self.span(node)
                self.add("term left out", start, end, f"({self.text(node.left)})")
                if isinstance(node.op, ast.Add):
                    self.add("term left out", start, end, f"({self.text(node.right)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            start, end = self.span(node)
            self.add("sign", start, end, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and/or", left, right, old, new)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self.span(node)
        value = node.value
        if isinstance(value, bool):
            self.add("constant", start, end, str(not value))
        elif isinstance(value, int):
            self.add("constant", start, end, str(value + 1))
            if value > 1:
                self.add("constant", start, end, str(2 * value))
        elif isinstance(value, float):
            self.add("constant", start, end, repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        start, end = self.span(node.func)
        if name in ("print", "warn", "debug", "info", "cast", "TypeVar", "NewType"):
            return
        if name in SWAPPED:
            self.add("swapped", end - len(name), end, SWAPPED[name])
        arguments = [*node.args, *node.keywords]
        if name == "abs" and len(node.args) == 1:
            self.add("no abs", start, end, "")
        if name in ("sorted", "sort"):
            order = [k for k in node.keywords if k.arg == "reverse"]
            call_end = self.span(node)[1]
            if not order:
                self.add("order", call_end - 1, call_end, ", reverse=True)" if arguments else "reverse=True)")
        if name == "reversed":
            self.add("order", start, end, "")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        # Guards against what never comes, and sizes of caches.
        if node.arg not in ("strict", "maxsize"):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [n for target in node.targets for n in ast.walk(target)]
        names = {n.id for n in targets if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        places = any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
        # Leaving out the first value of a name ends in a NameError: no fault worth a test.
        if self.in_function and (places or (names and self.assigned and names <= self.assigned[-1])):
            self.leave_out(node)
        if self.assigned:
            self.assigned[-1] |= names
        if not any(isinstance(n, ast.Name) and n.id == "__slots__" for n in targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if self.assigned and isinstance(node.target, ast.Name):
            self.assigned[-1].add(node.target.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.leave_out(node)
        if type(node.op) in OPERATORS and not _is_text(node.value):
            old, new = OPERATORS[type(node.op)]
            self.between("operator", node.target, node.value, f"{old}=", f"{new}=")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if self.in_function:
            self.leave_out(node)
        self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        self.add("break", *self.span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("continue", *self.span(node), "break")

    def leave_out(self, node: ast.stmt) -> None:
        self.add("left out", *self.span(node), "pass")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def faults_of(path: str, source: bytes) -> list[Fault]:
    """All faults of a file, in the order of its text."""
    places = _Places(path, source)
    places.visit(ast.parse(source))
    return places.found


def core(patterns: Iterable[str]) -> list[str]:
    """The files of the core, without those that only write texts."""
    paths = {p for pattern in patterns for p in ROOT.glob(pattern) if p.name not in TEXTS}
    return sorted(str(p.relative_to(ROOT)) for p in paths)


def draw(paths: Iterable[str], seed: int, count: int) -> list[Fault]:
    """So many faults at different places, in random order: a place first, then what becomes of it."""
    at: dict[tuple[str, int], list[Fault]] = defaultdict(list)
    for path in paths:
        for fault in faults_of(path, (ROOT / path).read_bytes()):
            at[path, fault.start].append(fault)
    rng = random.Random(seed)
    drawn = (rng.choice(at[place]) for place in rng.sample(sorted(at), len(at)))
    return list(itertools.islice(filter(_compiles, drawn), count))


def _compiles(fault: Fault) -> bool:
    try:
        ast.parse(fault.applied((ROOT / fault.path).read_bytes()))
    except SyntaxError:
        return False
    return True


def change(fault: Fault, source: bytes) -> tuple[str, str]:
    """What a fault takes away and puts there, each its lines joined; the same wherever they move to."""
    since = source.rfind(b"\n", 0, fault.start) + 1
    until = source.find(b"\n", fault.end) % (len(source) + 1)
    after = source[since : fault.start] + fault.new.encode() + source[fault.end : until]
    return " ".join(source[since:until].decode().split()), " ".join(after.decode().split())


def harmless() -> dict[tuple[str, str, str], str]:
    """The reason by (file, what is taken away, what is put there)."""
    found = {}
    text = HARMLESS.read_text() if HARMLESS.exists() else ""
    for entry in re.split(r"\n\s*\n", text):
        lines = [line for line in entry.splitlines() if line and not line.startswith("#")]
        if lines:
            path, old, new, *why = lines
            found[path, old[2:].strip(), new[2:].strip()] = " ".join(line.strip() for line in why)
    return found


# -- which test runs which line ------------------------------------------------------------------------


@dataclass
class TestMap:
    """`tests`: seconds of each; `lines`: by file and line, the tests; `sources`: the files that these lines
    are of; `files`: all tests of a test file."""

    tests: dict[str, float]
    lines: dict[str, dict[int, set[str]]]
    sources: dict[str, str]
    files: dict[str, list[str]]


class _Mapped:
    """Notes what each test runs."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("outside tests")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def _quiet_settings() -> None:
    """Hypothesis without its database and without looking for the smallest example."""
    from hypothesis import HealthCheck, Phase, settings  # noqa: PLC0415

    settings.register_profile(
        "faults", database=None, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("faults")


def _in_child(tree: Path, out: Path, limit_s: float, work: Any) -> bool:
    """Runs something in a child whose packages are those of a tree. False where it had to be ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(tree)
            for name in [n for n in sys.modules if n.split(".")[0] in PACKAGES]:
                del sys.modules[name]
            sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() not in (ROOT, tree))]
            importlib.invalidate_caches()
            scratch = tempfile.mkdtemp(dir=tree.parent)
            os.environ.update(PYTHONPATH=str(tree), XDG_CACHE_HOME=scratch, PYTHONHASHSEED="0")
            with out.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _quiet_settings()
            work()
            shutil.rmtree(scratch, ignore_errors=True)
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    ends = time.monotonic() + limit_s
    done = 0
    while not done and time.monotonic() < ends:
        time.sleep(0.05)
        done = os.waitpid(child, os.WNOHANG)[0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return bool(done)


def _pytest(words: Iterable[str], plugin: object) -> None:
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    plain = ["-q", "-m", "not thorough and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*quiet, *plain, *words], plugins=[plugin])


def _ranges(lines: Iterable[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for line in sorted(lines):
        if found and found[-1][1] == line - 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return found


def _make_map(group: str, words: list[str], file: Path, paths: list[str]) -> None:
    """Runs the tests of one group under coverage and writes down what each of them ran."""

    def work() -> None:
        from coverage import Coverage  # noqa: PLC0415

        coverage = Coverage(data_file=None, include=[str(ROOT / path) for path in paths])
        notes = _Mapped(coverage)
        coverage.start()
        _pytest(words, notes)
        coverage.stop()
        data = coverage.get_data()
        ran: dict[str, dict[str, list[list[int]]]] = {}
        for full in data.measured_files():
            by_test = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(full).items():
                for context in contexts:
                    by_test[context].add(line)
            path = str(Path(full).relative_to(ROOT))
            ran[path] = {test: _ranges(lines) for test, lines in by_test.items()}
        tests = {t: s for t, s in notes.seconds.items() if t not in notes.failed}
        sources = {path: (ROOT / path).read_text() for path in ran}
        found = {"group": group, "tests": tests, "ran": ran, "sources": sources}
        draft = file.with_suffix(".draft")
        draft.write_bytes(gzip.compress(json.dumps(found).encode(), 3))
        draft.replace(file)

    out = Path(tempfile.gettempdir()) / f"map-{os.getpid()}.txt"
    if not _in_child(ROOT, out, 900.0, work) or not file.exists():
        print(f"  no map of {group}: {out.read_text()[-300:]}", flush=True)
    out.unlink()


def _groups() -> dict[str, list[str]]:
    """Test files, and the doctests as one."""
    files = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if not any(p.match(e) for e in ELSEWHERE)]
    groups = {str(p.relative_to(ROOT)): [str(p.relative_to(ROOT))] for p in files}
    modules = [p for folder in DOCTESTS for p in (ROOT / folder).rglob("*.py") if ">>>" in p.read_text()]
    return {**groups, "doctests": sorted(str(p.relative_to(ROOT)) for p in modules)}


def mapped(paths: list[str], *, fresh: bool = False) -> TestMap:
    """Which tests run which line, made anew where a test file changed."""
    MAP.mkdir(exist_ok=True)
    if fresh:
        for old in MAP.glob("*.json.gz"):
            old.unlink()
    found = TestMap({}, {}, {}, {})
    groups, kept = _groups(), set()
    for group, words in groups.items():
        text = b"".join((ROOT / word).read_bytes() for word in words) if group != "doctests" else b"doctests"
        name = f"{Path(group).stem}-{hashlib.sha256(text).hexdigest()[:16]}.json.gz"
        kept.add(name)
        if not (MAP / name).exists():
            began_s = time.monotonic()
            _make_map(group, words, MAP / name, core(CORE))
            print(f"  {group} mapped in {time.monotonic() - began_s:.0f} s", flush=True)
        if (MAP / name).exists():
            _read_map(MAP / name, found, paths)
    for old in MAP.glob("*.json.gz"):
        if old.name not in kept:
            old.unlink()
    return found


def _read_map(file: Path, found: TestMap, paths: list[str]) -> None:
    data = json.loads(gzip.decompress(file.read_bytes()))
    tests = {t: s for t, s in data["tests"].items() if s < SLOWEST_S}
    found.tests |= tests
    found.files[data["group"]] = list(tests)
    for path in paths:
        if path not in data["ran"]:
            continue
        follow = _followed(data["sources"][path], (ROOT / path).read_text())
        lines = found.lines.setdefault(path, defaultdict(set))
        for test, ranges in data["ran"][path].items():
            if test not in tests:
                continue
            for first, last in ranges:
                for line in range(first, last + 1):
                    if line in follow:
                        lines[follow[line]].add(test)


def _followed(before: str, now: str) -> dict[int, int]:
    """Where lines of a file are now; those that were replaced go to what is in their place."""
    if before == now:
        return {line: line for line in range(1, before.count("\n") + 2)}
    match = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False)
    found = {}
    for tag, i1, i2, j1, j2 in match.get_opcodes():
        if tag in ("equal", "replace"):
            for i in range(i1, i2):
                found[i + 1] = min(j1 + i - i1, j2 - 1) + 1
    return found


def _tests_of(fault: Fault, tests: TestMap, paths: list[str]) -> set[str]:
    """The tests that run the statement; of what runs at import, those that run what names it, and of a
    default those that run its function."""
    lines = tests.lines.get(fault.path, {})
    found = {test for line in fault.lines for test in lines.get(line, ())}
    if fault.at_import and fault.scope:
        # A default of a function is seen by those tests that run its first line.
        found |= next(
            (lines[n] for n in range(fault.lines[-1] + 1, max(lines, default=0) + 1) if lines.get(n)), set()
        )
    # Some tests import modules themselves: which lines those run then says nothing.
    if found and not fault.at_import:
        return found
    source = (ROOT / fault.path).read_text().splitlines()
    first = source[fault.lines[0] - 1]
    word = fault.scope.split(".")[-1] if fault.scope else re.split(r"\W", first.strip())[0]
    if fault.scope and (top := fault.scope.split(".")[0])[0].isupper() and word == "__init__":
        word = top
    for path in tests.lines:
        for number, text in enumerate((ROOT / path).read_text().splitlines(), 1):
            if re.search(rf"\b{re.escape(word)}\b", text):
                found |= tests.lines[path].get(number, set())
    found = found or {test for at in lines.values() for test in at}
    return found | {test for file in OF_IMPORTS for test in tests.files.get(file, ())}


# -- one fault -----------------------------------------------------------------------------------------


class _HangError(BaseException):
    """A test takes many times what it took without the fault."""


class _Chosen:
    """Runs the chosen tests in their order, each for a limited time, until one fails or time is over."""

    def __init__(self, order: list[str], seconds: dict[str, float], ends_s: float) -> None:
        self.rank = {test: i for i, test in enumerate(order)}
        self.seconds, self.ends_s = seconds, ends_s
        self.ran, self.failed = 0, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (not even collected)"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def hangs(*_: object) -> None:
            raise _HangError(item.nodeid)

        signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, 15.0 + 8.0 * self.seconds.get(item.nodeid, 1.0))
        try:
            return (yield)
        except _HangError:
            self.failed = f"{item.nodeid} (hangs)"
            pytest.exit("hangs")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.ends_s:
            item.session.shouldstop = "time is over"


def _in_turns(names: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """The quickest test of each file, then the second of each, and so on."""
    by_file = defaultdict(list)
    for name in sorted(names, key=lambda n: (seconds[n], n)):
        by_file[name.split("::")[0]].append(name)
    return [n for _, n in sorted((i, n) for of in by_file.values() for i, n in enumerate(of))]


def _portions(path: str, names: set[str], seconds: dict[str, float]) -> list[list[str]]:
    """The tests of files that are called after the faulty one, quick tests of a few others, and the rest."""
    turns = _in_turns(names, seconds)
    own = [n for n in turns if Path(path).stem in n.split("::")[0]]
    turns = [n for n in turns if n not in set(own)]
    took = dict.fromkeys((n.split("::")[0] for n in turns), 0.0)
    for name in turns:
        took[name.split("::")[0]] += seconds[name]
    files = set(sorted(took, key=lambda file: took[file])[:FIRST_FILES])
    first = [n for n in turns if n.split("::")[0] in files and seconds[n] < 2.0][:FIRST_TESTS]
    rest = [n for n in turns if n not in set(first)]
    return [portion for portion in (own, first, rest) if portion]


def run_tests(tree: Path, names: list[str], seconds: dict[str, float], limit_s: float) -> tuple[str, int]:
    """(the test that failed or "", how many ran) of tests in a tree."""
    results, out = tree.parent / "results.json", tree.parent / "out.txt"
    results.unlink(missing_ok=True)

    def work() -> None:
        chosen = _Chosen(names, seconds, time.monotonic() + limit_s)
        files = sorted({name.split("::")[0] for name in names})
        _pytest(["-x", *files], chosen)
        results.write_text(json.dumps([chosen.failed, chosen.ran]))

    _in_child(tree, out, limit_s + 60.0, work)
    if not results.exists():
        return "all of it (ended without a result)", 0
    failed, ran = json.loads(results.read_text())
    return failed, ran


def try_fault(fault: Fault, tree: Path, tests: TestMap, paths: list[str], limit_s: float) -> tuple[str, str]:
    """(killed by, a remark) of one fault; killed by "" where it survives."""
    path, source = tree / fault.path, (ROOT / fault.path).read_bytes()
    names = _tests_of(fault, tests, paths)
    # What a fixture or a cache keeps is run by the first that asks; the others of its file may look at it.
    beside = {n for file in {n.split("::")[0] for n in names} for n in tests.files.get(file, ())} - names
    seconds, ends_s, ran = tests.tests, time.monotonic() + limit_s, 0
    killer = ""
    try:
        _write(path, fault.applied(source))
        for portion in [*_portions(fault.path, names, seconds), *_portions(fault.path, beside, seconds)]:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or killer:
                break
            killer, count = run_tests(tree, portion, seconds, left_s)
            ran += count
    finally:
        _write(path, source)
    return killer, f"{ran} of {len(names)} tests that run it and {len(beside)} beside"


def _write(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _copy(tree: Path) -> None:
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "venv", ".*_cache", ".hypothesis", ".coverage-map", "runs", "build", "dist"
    )
    # simcore/devices of the copy is a link to devices of the copy.
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)


def _preload() -> None:
    """What every child needs and no fault changes."""
    names = (
        "numpy", "pandas", "scipy.stats", "scipy.optimize", "scipy.special", "pydantic", "yaml", "simpy",
        "typer", "rich.console", "plotly.graph_objects", "jinja2", "pyarrow.parquet", "hypothesis", "torch",
        "doctest", "_pytest.doctest",
    )  # fmt: skip
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=70)
    parser.add_argument("--files", nargs="*", default=list(CORE), help="patterns, from the root of the tree")
    parser.add_argument("--limit-s", type=float, default=100.0, help="for the tests of one fault")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of the draw to run again")
    parser.add_argument("--lines", help="all faults of lines of one file, as simcore/machine/laws.py:145-160")
    parser.add_argument("--map-only", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="make the whole map anew")
    parser.add_argument("--draw-only", action="store_true", help="list the faults, run nothing")
    given = parser.parse_args()
    paths = core(given.files)
    if given.draw_only:
        for i, fault in enumerate(_wanted(given, paths)):
            old, new = change(fault, (ROOT / fault.path).read_bytes())
            print(f"{i} {fault.path}:{fault.line} {fault.kind}\n  - {old}\n  + {new}")
        return 0
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _preload()
    tests = mapped(paths, fresh=given.fresh)
    if given.map_only:
        print(f"{len(tests.tests)} tests, {sum(map(len, tests.lines.values()))} lines that they run")
        return 0
    return _try_all(given, paths, tests)


def _wanted(given: argparse.Namespace, paths: list[str]) -> list[Fault]:
    if given.lines is None:
        return draw(paths, given.seed, given.count)
    path, _, lines = given.lines.partition(":")
    first, _, last = lines.partition("-")
    found = faults_of(path, (ROOT / path).read_bytes())
    return [f for f in found if int(first) <= f.line <= int(last or first) and _compiles(f)]


def _try_all(given: argparse.Namespace, paths: list[str], tests: TestMap) -> int:
    named, survivors, killed, excused = harmless(), [], 0, 0
    faults = list(enumerate(_wanted(given, paths)))
    if given.only is not None:
        faults = [fault for fault in faults if fault[0] in given.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = Path(scratch) / "tree"
        _copy(tree)
        for i, fault in faults:
            old, new = change(fault, (ROOT / fault.path).read_bytes())
            where = f"{i} {fault.path}:{fault.line} ({fault.kind})"
            if why := named.get((fault.path, old, new)) or named.get((fault.path, old, "*")):
                excused += 1
                print(f"harmless {where}: {why}", flush=True)
                continue
            began_s = time.monotonic()
            killer, remark = try_fault(fault, tree, tests, paths, given.limit_s)
            took = f"{time.monotonic() - began_s:.0f} s"
            diff = f"    - {old}\n    + {new}"
            if killer:
                killed += 1
                print(f"killed {where} by {killer}, {took}\n{diff}", flush=True)
            else:
                survivors.append(f"{where}\n{diff}")
                print(f"SURVIVED {where}, {remark}, {took}\n{diff}", flush=True)
    print(f"\nseed {given.seed}: {killed} of {len(faults)} faults caught, {excused} named as harmless,")
    print(f"{len(survivors)} not seen ({killed / max(1, len(faults) - excused):.0%} of those that are none)")
    print("\n".join(survivors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
