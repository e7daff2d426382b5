"""Triton's interpreter where there is no GPU, chosen before triton is imported; errors in the summary."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.thorough import leave_out

# What is imported and collected stays to the end of the run: looking for garbage among it, again and again
# while it grows, took as long as all else until the first test.
gc.disable()
# As the machine on a card wants it (validate/machines/cuda/cuda_api.py), before anything initialises CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# What a file with tests of a card has in it.
GPU = "mark.gpu"
# Processes with so many connections each. Of 16 on an H200 one or two are refused a context ("out of memory",
# at 45 of 139 GiB), then and ever after.
MOST_ON_A_CARD = 12
# Prices that an earlier run kept would hide what a test is about.
os.environ["SIMCORE_CACHE"] = "none"


def pytest_configure(config: pytest.Config) -> None:
    leave_out(str(config.getoption("markexpr")))
    # A process that only deals tests to others runs none, and they wait for it before they start.
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        _before_tests_are_imported()


def _before_tests_are_imported() -> None:
    import torch  # noqa: PLC0415
    from hypothesis import HealthCheck, settings  # noqa: PLC0415

    from tests.interpreter import make_quicker  # noqa: PLC0415
    from tests.parsed_once import parse_once  # noqa: PLC0415

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        make_quicker()
    parse_once()
    # On a machine that is busy with something else any example may take seconds, and any draw.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For tests of a card as many processes as it has channels for, with those that tests start themselves.
    Else, and where PYTEST_XDIST_AUTO_NUM_WORKERS says a number, as xdist decides."""
    if not _of_cards_alone(config) or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_ON_A_CARD, cores)


def _of_cards_alone(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr")).split() == ["gpu"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On a card that is asked for its own tests alone no process imports what has none: that takes long, and
    each process that makes a tensor takes half a gigabyte of the card."""
    if not _of_cards_alone(config) or not collection_path.match("test_*.py"):
        return None
    return True if collection_path not in _with_tests_of_cards(collection_path.parent) else None


@cache
def _with_tests_of_cards(folder: Path) -> frozenset[Path]:
    """Returns the files that mark tests of a card, and those that take names from them."""
    texts = {path: path.read_text("utf-8") for path in folder.glob("test_*.py")}
    marked = {path for path, text in texts.items() if GPU in text}
    takes = [f"from tests.{path.stem} import" for path in marked]
    return frozenset(path for path, text in texts.items() if path in marked or any(t in text for t in takes))


def pytest_collection_finish() -> None:
    """Modules and tests are left alone by all collections of garbage to come, and those are fewer: tests make
    no more of it than a process holds easily."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


@pytest.fixture
def own_modules(tmp_path: Path) -> Iterator[None]:
    """Modules that a test imports from its folder are forgotten with it."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def whole_card() -> None:
    """Asked for by a test on a card whose times others on it would disturb: it runs while no other test does,
    and not at all beside processes that are no tests."""


@pytest.fixture(autouse=True)
def _beside_others_on_a_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a card each process keeps no memory from one test to the next: it may be one of many."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch  # noqa: PLC0415

    from tests.whole_card import card_lock, others_use_it  # noqa: PLC0415

    if not torch.cuda.is_available():
        yield
        return
    alone = "whole_card" in request.fixturenames
    with card_lock(alone=alone):
        if alone and others_use_it():
            pytest.skip("another process works on this card: times would be those of both")
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the times of runs do not matter, none waits for a host that other tests keep busy."""
    monkeypatch.setattr("simcore.validate.timing.pace.Pace.settle", lambda self: True)


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a page is not what a test is about, runs of the command line in this process build none: it takes
    as long as a small study."""
    monkeypatch.setattr("simcore.api.build_report", lambda folder: folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest of the relative errors that tests noted, by number format."""
    worst: dict[str, float] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "relative error":
                    worst[value[0]] = max(worst.get(value[0], 0.0), value[1])
    for formats, error in sorted(worst.items()):
        terminalreporter.write_line(f"largest relative error, {formats}: {error:.1e}")
