"""Limits that others have published, by name: slos.yaml, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simcore.input.files import read_yaml

FILE = Path(__file__).resolve().parent / "slos.yaml"


@dataclass(frozen=True, slots=True)
class Preset:
    """Published limits of metrics, for a model, with their source."""

    limits: Mapping[str, float]
    about: str
    source: str


@cache
def presets() -> Mapping[str, Preset]:
    """Returns all presets by name."""
    return {name: Preset(**fields) for name, fields in read_yaml(FILE).items()}


def preset_names() -> list[str]:
    """Returns the names of the presets, in the order of the file."""
    return list(presets())


def preset_of(name: str) -> Preset:
    """Returns a preset by its name, which must be one of `preset_names`."""
    return presets()[name]
