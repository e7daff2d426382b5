"""Prices of graphs kept on disk: the same bytes with them as without, never a stale or a broken one."""

import os
from pathlib import Path
from random import Random
from typing import Any
from zipfile import is_zipfile

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import simcore
from simcore.cli import app
from simcore.models.served_decoder import decode_sizes
from simcore.sim import kept
from simcore.sim.graph_pricer import ENDS, SOURCES, GraphPricer, Known, PricedGroups
from simcore.sim.kept import COST, STRETCH, KeptPrices, _known, cache_folder
from tests.test_ramps import on_device
from tests.thorough import first, slow

SCENARIO = {
    "name": "kept",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "workload": {
        "requests": 6,
        "arrivals": {"kind": "poisson", "rate_per_s": 20},
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 900},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 40},
    },
    "strategies": [{"kind": "continuous_batching"}, {"kind": "concurrent_instances", "max_instances": 4}],
    "replicas": 2,
}
pytestmark = pytest.mark.usefixtures("without_report")


def results(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: str, *words: str) -> bytes:
    """results.csv of a run with prices kept in `cache`."""
    monkeypatch.setenv("SIMCORE_CACHE", cache)
    (folder / "s.yaml").write_text(yaml.safe_dump(SCENARIO), encoding="utf-8")
    out = folder / "run"
    done = CliRunner().invoke(app, ["run", str(folder / "s.yaml"), "--out", str(out), "--quiet", *words])
    assert done.exit_code == 0, done.output
    return (out / "results.csv").read_bytes()


@slow
def test_a_run_by_kept_prices_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, by its own, by those of another scenario, by those that are broken; in one process or two."""
    without = results(tmp_path, monkeypatch, "none")
    cache = str(tmp_path / "cache")
    other = results(tmp_path, monkeypatch, cache, "--set", "seed=9", "--jobs", "1")
    assert other != without
    assert results(tmp_path, monkeypatch, cache, "--jobs", "2") == without
    (file,) = (tmp_path / "cache" / "prices").iterdir()
    whole = file.read_bytes()
    assert results(tmp_path, monkeypatch, cache, "--jobs", "1") == without
    assert file.read_bytes() == whole
    file.write_bytes(whole[: len(whole) // 2])
    assert not is_zipfile(file)
    assert results(tmp_path, monkeypatch, cache) == without
    # Whole again; of this scenario's prices alone, which may be fewer than half of both.
    assert is_zipfile(file)


@pytest.mark.parametrize(
    "broken", [b"", b"PK\x03\x04" + bytes(300), b"nothing of ours", b"\x93NUMPY\x01\x00"]
)
def test_a_broken_file_is_as_none(tmp_path: Path, broken: bytes) -> None:
    rank, groups, asked = known_of(4)
    GraphPricer(rank.price, rank.roofline, groups=groups).ramp(rank.model.decode, *asked[0])
    store = KeptPrices("k", tmp_path)
    store.save(1, groups.known)
    (file,) = (tmp_path / "prices").iterdir()
    whole = bytearray(file.read_bytes())
    file.write_bytes(broken)
    assert store.load(1) == {}
    for at in range(0, len(whole), len(whole) // 40):
        file.write_bytes(bytes([*whole[:at], whole[at] ^ 0x55, *whole[at + 1 :]]))
        found = store.load(1)
        # What a file's format says of itself may be off and its numbers whole.
        assert all(known.costs == groups.known[name].costs for name, known in found.items())


@slow
def test_kept_prices_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run asks the device model for nothing."""
    cache = str(tmp_path / "cache")
    first = results(tmp_path, monkeypatch, cache, "--jobs", "1")

    def refused(*_: Any) -> None:
        raise AssertionError("a price was asked for")

    monkeypatch.setattr(PricedGroups, "_cost", refused)
    assert results(tmp_path, monkeypatch, cache, "--jobs", "1") == first


def known_of(seed: int, end: Any = "value") -> tuple[Any, PricedGroups, list[tuple[Any, ...]]]:
    """Groups with prices at random sizes, and the totals of the bursts that asked for them."""
    random, rank = Random(seed), on_device("h200-sxm", "llama-3.1-8b", 1)
    groups = PricedGroups(rank.price, rank.roofline)
    asked = []
    for _ in range(40):
        sequences = random.randint(1, 60)
        context = random.randint(1, 5000)
        sizes = decode_sizes(sequences, sequences * context, random.randint(context, 2 * context))
        asked.append((sizes, {"kv_tokens": sequences}, random.randint(1, 300)))
    return rank, groups, asked


@pytest.mark.parametrize("end", ENDS)
def test_what_is_kept_comes_back_to_the_bit(tmp_path: Path, end: Any) -> None:
    rank, groups, asked = known_of(3)
    graph_pricer = GraphPricer(rank.price, rank.roofline, end=end, groups=groups)
    plain = [graph_pricer.ramp(rank.model.decode, *each) for each in asked]
    KeptPrices("k", tmp_path).save(1, groups.known)
    known = KeptPrices("k", tmp_path).load(1)
    assert {name: len(each.costs) for name, each in known.items()} == {
        name: len(each.costs) for name, each in groups.known.items()
    }

    def refused(_: Any) -> Any:
        raise AssertionError("a price was asked for")

    again = GraphPricer(refused, refused, end=end, groups=PricedGroups(refused, refused, known))
    for ramp, each in zip(plain, asked, strict=True):
        found = again.ramp(rank.model.decode, *each)
        assert (found.total_s, found.floor_s()) == (ramp.total_s, ramp.floor_s())
        assert found.origin == ramp.origin
        assert [piece.growth for piece in found.pieces] == [piece.growth for piece in ramp.pieces]
    # Kept once more without having been used, it is what it was.
    KeptPrices("k", tmp_path).save(2, KeptPrices("k", tmp_path).load(1))
    first, second = sorted((tmp_path / "prices").iterdir())
    with np.load(first) as a, np.load(second) as b:
        assert sorted(a) == sorted(b)
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_what_one_process_finds_is_told_to_another_once() -> None:
    """And only what was not known makes prices worth keeping again."""
    rank, groups, asked = known_of(6)
    for each in asked:
        GraphPricer(rank.price, rank.roofline, groups=groups).ramp(rank.model.decode, *each)
    found = groups.fresh()
    assert {name: (each.costs, each.lines) for name, each in found.items()} == {
        name: (each.costs, each.lines) for name, each in groups.known.items()
    }
    assert all(each.costs for each in found.values())
    assert groups.fresh() == {}
    other = PricedGroups(rank.price, rank.roofline, groups.known)
    assert not other.grown
    other.add({})
    assert not other.grown
    empty = PricedGroups(rank.price, rank.roofline)
    empty.add(found)
    assert empty.grown
    assert empty.known == groups.known


def test_prices_of_anything_else_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device or profile (the key), another rank, other code."""
    rank, groups, asked = known_of(4)
    GraphPricer(rank.price, rank.roofline, groups=groups).ramp(rank.model.decode, *asked[0])
    store = KeptPrices("k", tmp_path)
    store.save(1, groups.known)
    assert store.load(1)
    assert not KeptPrices("K", tmp_path).load(1)
    assert not store.load(2)
    monkeypatch.setattr(kept, "code_digest", lambda: "other")
    assert not store.load(1)
    monkeypatch.setattr(kept, "code_digest", lambda: None)
    store.save(3, groups.known)
    assert not store.load(3)
    assert len(list((tmp_path / "prices").iterdir())) == 1


@pytest.mark.parametrize("linked", [True, False])
def test_the_code_of_devices_counts(linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository devices is a link, in an installation a folder."""
    package = tmp_path / "simcore"
    devices = tmp_path / "devices" if linked else package / "devices"
    for folder in (package, devices):
        folder.mkdir()
        (folder / "code.py").write_text("a = 1\n")
    if linked:
        (package / "devices").symlink_to(Path("..", "devices"))
    monkeypatch.setattr(kept, "ROOT", package)
    before = kept.code_digest.__wrapped__()
    for folder in (package, devices):
        (folder / "code.py").write_text("a = 2\n")
        after = kept.code_digest.__wrapped__()
        assert after not in (before, None)
        before = after


def test_code_of_another_name_is_other_code_and_none_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    assert kept.code_digest.__wrapped__() is None
    found: set[str | None] = set()
    for name in ("a.py", "b.py", "products.yaml"):
        (tmp_path / name).write_text("a = 1\n")
        found.add(kept.code_digest.__wrapped__())
        (tmp_path / name).unlink()
    assert len(found - {None}) == 3


@slow
@pytest.mark.parametrize(
    "changed",
    first(
        1,
        [
            {"device": "h200-sxm", "overheads": {"in_graph_s": 1e-6}},
            {"device": "h100-sxm"},
            {"profile": "none"},
        ],
    ),
)
def test_what_prices_go_by_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    words = [
        word
        for name, value in changed.items()
        for word in ("--set", f"{name}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    ]
    words += ["--jobs", "1"]
    without = results(tmp_path, monkeypatch, "none", *words)
    cache = str(tmp_path / "cache")
    assert results(tmp_path, monkeypatch, cache, "--jobs", "1") != without
    assert results(tmp_path, monkeypatch, cache, *words) == without
    assert len(list((tmp_path / "cache" / "prices").iterdir())) == 2


@slow
def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    without = results(tmp_path, monkeypatch, "none", "--jobs", "1")
    assert results(tmp_path, monkeypatch, str(tmp_path / "file"), "--jobs", "1") == without


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_FILES", 3)
    rank, groups, asked = known_of(5)
    GraphPricer(rank.price, rank.roofline, groups=groups).ramp(rank.model.decode, *asked[0])
    store = KeptPrices("k", tmp_path)
    for ranks in range(1, 5):
        store.save(ranks, groups.known)
        for age, file in enumerate(
            sorted((tmp_path / "prices").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        ):
            os.utime(file, (1e9 + age, 1e9 + age))
    assert [bool(store.load(ranks)) for ranks in range(1, 5)] == [False, True, True, True]


def test_what_was_read_last_is_kept_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    rank, groups, asked = known_of(5)
    GraphPricer(rank.price, rank.roofline, groups=groups).ramp(rank.model.decode, *asked[0])
    store = KeptPrices("k", tmp_path)
    for ranks in (1, 2):
        store.save(ranks, groups.known)
    for file in (tmp_path / "prices").iterdir():
        os.utime(file, (1e9, 1e9))
    assert store.load(1)
    store.save(3, groups.known)
    assert [bool(store.load(ranks)) for ranks in (1, 2, 3)] == [True, False, True]


def test_where_prices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("", "none"):
        monkeypatch.setenv("SIMCORE_CACHE", off)
        assert cache_folder() is None
    monkeypatch.setenv("SIMCORE_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("SIMCORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/them/.their-cache")
    assert cache_folder() == Path("/home/them/.their-cache/simcore")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/them")
    assert cache_folder() == Path("/home/them/.cache/simcore")


@pytest.mark.parametrize("wrong", ["costs", "lines"])
def test_arrays_of_another_shape_are_no_prices(wrong: str) -> None:
    """Either of them alone."""
    arrays = {
        "x.reads": np.array(["tokens"]), "x.costs": np.zeros((1, COST)), "x.lines": np.zeros((1, STRETCH)),
        "x.shares": np.zeros((1, 1, 3)),
    }  # fmt: skip
    with pytest.raises(ValueError, match="not what they must be"):
        _known("x", arrays | {f"x.{wrong}": np.zeros((1, 2))})


@pytest.mark.parametrize("gone", [False, True])
def test_who_interrupts_a_write_is_told_and_leaves_no_draft(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the draft has been moved or deleted by then."""

    def interrupted(draft: Any, **_: Any) -> None:
        if gone:
            os.unlink(draft.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        KeptPrices("k", tmp_path).save(1, {"x": Known(("tokens",), {})})
    assert not list((tmp_path / "prices").iterdir())


def test_the_code_that_counts_is_that_of_the_package_alone() -> None:
    """Not what lies beside it: tests, or the other packages of an installation."""
    assert Path(simcore.__file__).parent == kept.ROOT


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["costs", "lines"])
def test_numbers_that_are_not_finite_are_no_prices(part: str, number: float) -> None:
    """Not even one of them."""
    arrays = {
        "x.reads": np.array(["tokens"]), "x.costs": np.ones((2, COST)), "x.lines": np.ones((2, STRETCH)),
        "x.shares": np.ones((2, len(SOURCES), len(ENDS))), "x.keys": np.array([[1], [2]]),
        "x.places": np.array([[0, 0, 3, 0, 2, 0]]),
    }  # fmt: skip
    assert len(_known("x", arrays).costs) == 2
    arrays[f"x.{part}"][1, 2] = number
    with pytest.raises(ValueError, match="not finite"):
        _known("x", arrays)
