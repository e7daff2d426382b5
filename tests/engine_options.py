"""The options of serving engines, read from their sources without importing them.

    python -m tests.engine_options vllm > tests/data/engine_options/vllm-0.33.txt

vLLM: string arguments of add_argument in vllm/engine/arg_utils.py, and the fields of the server's arguments.
SGLang: the fields of sglang/srt/arg_groups/fields. An option of one field is "--" and its name with dashes.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Package -> files with add_argument, and files whose classes' fields are options.
SOURCES = {
    "vllm": (("engine/arg_utils.py",), ("entrypoints/**/cli_args.py",)),
    "sglang": ((), ("srt/arg_groups/fields/*.py",)),
    "vllm_router": (("router_args.py",), ()),
    "sglang_router": (("router_args.py",), ()),
}


def folder_of(package: str) -> Path | None:
    """Returns where a package is installed, or None."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def options(package: str, folder: Path) -> list[str]:
    """Returns the options of a package's command, sorted."""
    calls, fields = SOURCES[package]
    found = {name for each in _trees(folder, calls) for name in _arguments(each)}
    return sorted(found | {name for each in _trees(folder, fields) for name in _fields(each)})


def _trees(folder: Path, patterns: tuple[str, ...]) -> Iterator[ast.Module]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            yield ast.parse(path.read_text("utf-8"))


def _arguments(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (name for each in node.args if (name := _text(each)).startswith("--"))


def _text(node: ast.expr) -> str:
    """Returns a string, or the literal end of one with a prefix."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) for each in node.values if isinstance(each, ast.Constant))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _fields(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield "--" + each.target.id.replace("_", "-")


if __name__ == "__main__":
    where = folder_of(sys.argv[1])
    assert where is not None, f"{sys.argv[1]} is not installed"
    print("\n".join(options(sys.argv[1], where)))
