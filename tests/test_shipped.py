"""Examples run by their names from any folder, and are copied whole, with the schema beside them."""

import json
from pathlib import Path

import pytest
import yaml

from simcore.input import shipped
from simcore.input.files import InputError
from simcore.scenario import parse_scenario
from tests.command_line import call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["decoder_layer"], ["h200/decoder_layer"], ["run", "decoder_layer"]])
def test_an_example_runs_by_its_name(words: list[str], here: Path, without_report: None) -> None:
    small = ["--set", "batch=[1]", "--set", "context_tokens=[1024]", "--set", "tokens=1", "--quiet"]
    assert call(*words, *small, "--jobs", "1", "--out", "run") == 0
    assert (here / "run/results.csv").is_file()


def test_a_file_goes_before_an_example(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("quickstart").write_text("name: mine\n")
    assert call("quickstart") == 2
    assert capsys.readouterr().err.startswith("error: quickstart: study")


def test_names_are_told_apart_and_found_by_their_last_part() -> None:
    every = shipped.names()
    assert len(every) == len(set(every)) > 20
    for name in every:
        assert shipped.path_of(name) == shipped.SCENARIOS / f"{name}.yaml"
        last = name.rpartition("/")[2]
        # A whole name comes before the last part of another one.
        assert shipped.path_of(last) == shipped.path_of(last if last in every else name)
        assert 10 < len(shipped.about(name)) < 400
    assert shipped.path_of("quickstar") is None
    assert shipped.path_of("models/tiny-llama") is None


def test_examples_are_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simcore.terminal.width", lambda: None)
    assert call("examples") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped.names()


def test_a_copy_is_the_example_with_its_schema(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("init", "papers/flover_fig5") == 0
    copy = Path("flover_fig5.yaml").read_text()
    first, _, rest = copy.partition("\n")
    assert first == "# yaml-language-server: $schema=simcore.schema.json"
    assert rest == (shipped.SCENARIOS / "papers/flover_fig5.yaml").read_text()
    assert json.loads(Path("simcore.schema.json").read_text())["properties"]["strategies"]
    parse_scenario(yaml.safe_load(copy), "flover_fig5.yaml")
    capsys.readouterr()
    assert call("init", "flover_fig5") == 2
    assert capsys.readouterr().err == "error: flover_fig5.yaml: is there already, and stays as it is\n"
    assert Path("flover_fig5.yaml").read_text() == copy


def test_what_is_no_example_is_told_with_the_nearest(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="quickstat: no such scenario; did you mean 'quickstart'"):
        shipped.copied("quickstat")
    assert call("quickstat") == 2
    printed = capsys.readouterr().err
    assert "neither a file nor a command nor an example; did you mean 'quickstart'?" in printed
    assert len(printed) < 300
    assert list(here.iterdir()) == []
