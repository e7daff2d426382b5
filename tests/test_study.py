"""What studies share: crossings, comparison with published figures, the run directory."""

import math
from pathlib import Path
from random import Random

import pytest

from simcore import rundir
from simcore.input.files import InputError
from simcore.studies.common import Axes, Crossing, Row, crossing
from simcore.studies.decode.crossover import _phrase
from simcore.studies.published import Published, compare, read_figures

HEAD = (
    "device,model,strategy,ranks,groups,context_tokens,batch,hit_rate,metric,value,unit,role,fitted_by,source"
)
GOOD = "d,m,alspec,4,2,1024,1,0.65,token_latency_s,2.0,s,measured,p,somewhere"
LINE = Published(
    "d", "m", "alspec", 4, 2, 1024, 1, "token_latency_s", 2.0, "measured", "somewhere", "s", 0.65, "p"
)


def row(label: str, value: float | None, rate: float = 0.65) -> Row:
    return Row(Axes("alspec", label, 4, 2, 1024, 1, rate), "token_latency_s", value, "s")


def test_every_change_of_sign_is_found() -> None:
    found = crossing(lambda x: (x - 3.0) * (30.0 - x), [1.0, 10.0, 100.0])
    assert found.crossings == (pytest.approx(3.0, rel=0.01), pytest.approx(30.0, rel=0.01))
    assert not found.ahead_at_low
    assert crossing(lambda x: 1.0, [1.0, 10.0]).at is None
    assert crossing(lambda x: 5.0 - x, [0.0, 8.0]).ahead_at_low


@pytest.mark.parametrize("ahead_at_low", [False, True])
def test_words_name_every_range_between_two_crossings(ahead_at_low: bool) -> None:
    who = "behind" if ahead_at_low else "ahead"
    ranges = {
        2: "from 1 us to 2 us",
        3: "from 1 us to 2 us and from 3 us on",
        4: "from 1 us to 2 us and from 3 us to 4 us",
        5: "from 1 us to 2 us and from 3 us to 4 us and from 5 us on",
    }
    for count, text in ranges.items():
        where = Crossing(tuple(1e-6 * (i + 1) for i in range(count)), ahead_at_low)
        assert _phrase(where, "s", "0 to 1 ms") == f"ALSpec is {who} {text} (0 to 1 ms)"


def test_a_whole_crossing_is_the_first_whole_number_behind_it() -> None:
    assert crossing(lambda x: x - 41.5, [1.0, 64.0], whole=True).at == 42.0


def test_variants_that_a_figure_does_not_tell_apart_are_a_line_each() -> None:
    for rows in ([row("a", 1.0), row("b", 3.0)], [row("b", 3.0), row("a", 1.0)]):
        lines = {line["label"]: line["error_pct"] for line in compare(rows, [LINE])[0]}
        assert lines == {"a": -50.0, "b": 50.0}


def test_what_a_profile_was_made_from_is_fitted() -> None:
    assert [line["role"] for line in compare([row("a", 2.0)], [LINE], {"p"})[0]] == ["fitted"]
    assert [line["role"] for line in compare([row("a", 2.0)], [LINE], {"q"})[0]] == ["measured"]


def test_other_axes_and_missing_values_are_not_compared() -> None:
    assert compare([row("a", 2.0, rate=0.66), row("b", None)], [LINE]) == ([], [LINE])


def test_published_figures_are_read(tmp_path: Path) -> None:
    path = tmp_path / "z.csv"
    path.write_text(f"\ufeff{HEAD}\n{GOOD}\n", encoding="utf-8")
    assert read_figures(Published, "published", path) == [LINE]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("2.0", "0", "value: is '0'"),
        ("2.0", "fast", "value: is 'fast'"),
        ("2.0", "nan", "value: is 'nan'"),
        ("2.0", "inf", "value: is 'inf'"),
        ("2.0", "-1", "value: is '-1'"),
        ("1024", "", "context_tokens: is ''"),
        ("measured", "mesured", "role: is 'mesured'; input should be 'measured', 'projected' or 'derived'"),
        ("token_latency_s", "token_latencys", "metric: is 'token_latencys'"),
        ("alspec", "alspecs", "strategy: is 'alspecs'"),
        (",4,2,", ",-1,2,", "ranks: is '-1'"),
        ("0.65", "87", "hit_rate: is '87'"),
        (",somewhere", "", "has not as many cells"),
        ("somewhere", "some,where", "has not as many cells"),
    ],
)
def test_a_broken_figure_is_refused_by_line_and_column(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "z.csv"
    path.write_text(f"{HEAD}\n{GOOD.replace(old, new, 1)}\n")
    with pytest.raises(InputError) as raised:
        read_figures(Published, "published", path)
    assert str(raised.value).startswith("published: z.csv, line 2: ")
    assert says in str(raised.value)


def test_a_file_without_a_column_or_with_one_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "z.csv"
    path.write_text(f"{HEAD.removeprefix('device,')}\n{GOOD.removeprefix('d,')}\n")
    with pytest.raises(InputError, match="column device is missing"):
        read_figures(Published, "published", path)
    path.write_text(f"{HEAD},note\n{GOOD},x\n")
    with pytest.raises(InputError, match="note is no column"):
        read_figures(Published, "published", path)
    path.write_text(HEAD)
    with pytest.raises(InputError, match="holds no figures"):
        read_figures(Published, "published", path)


def test_a_failed_replacement_leaves_the_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    with rundir.written_whole(target) as folder:
        (folder / rundir.MARK).write_text("first")
    rename = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if to == target and self.name != "old":
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(InputError, match="disk full"), rundir.written_whole(target) as folder:
        (folder / rundir.MARK).write_text("second")
    assert (target / rundir.MARK).read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_failed_run_leaves_nothing_not_even_new_parents(tmp_path: Path) -> None:
    def fails() -> None:
        with rundir.written_whole(tmp_path / "a" / "b") as folder:
            (folder / "half").write_text("written")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_json_of_a_run_holds_no_infinity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        rundir._write_json(tmp_path / "x.json", {"value": math.inf})


@pytest.mark.parametrize("seed", range(300))
def test_asking_seldom_gives_the_places_of_plain_bisection(seed: int) -> None:
    """Of gains that bend once at most, over numbers and over whole numbers."""
    random = Random(seed)
    whole = random.random() < 0.3
    low, high = (1e3, 1e6) if whole else random.choice([(0.0, 0.5), (1e-7, 1e-5), (1e-5, 1e-3)])
    root = low + (high - low) * random.random() ** random.choice([1, 3])
    bend = low + (high - low) * random.random()
    flat, steep = random.choice([0.2, 1.0, 5.0]), random.choice([0.1, 1.0, 3.0])
    sign = random.choice([1.0, -1.0])

    def line(x: float) -> float:
        return flat * min(x, bend) + steep * max(0.0, x - bend)

    def gain(x: float) -> float:
        asked.append(x)
        return sign * (line(x) - line(root))

    asked: list[float] = []
    plain = crossing(gain, [low, high], whole=whole)
    often = len(asked)
    assert crossing(gain, [low, high], whole=whole, straight=True) == plain
    assert len(asked) - often <= often + 8


@pytest.mark.parametrize("seed", range(100))
def test_of_a_straight_line_three_gains_tell_where_it_crosses_zero(seed: int) -> None:
    """One on each side, and one where bisection's last step falls between the two."""
    random = Random(seed)
    grid = random.choice([(0.0, 0.5, 1.0), (1e-7, 1e-5, 1e-3)])
    root, slope = grid[-1] * random.uniform(0.02, 0.98), random.choice([-1.0, 1.0]) * random.uniform(0.1, 9.0)

    def gain(x: float) -> float:
        asked.append(x)
        return slope * (x - root)

    asked: list[float] = []
    found = crossing(gain, grid, straight=True).at
    assert len(asked) <= len(grid) + 3
    assert found is not None
    assert abs(found - root) <= 0.01 * root
