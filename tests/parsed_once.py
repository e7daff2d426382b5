"""The nodes of a YAML text are worked out once a process: thousands of tests read the same few device files,
and PyYAML takes 20 ms for one of them. Documents are made anew of the nodes each time, and so are errors."""

from functools import lru_cache
from typing import Any

import yaml

from simcore.input import files

# Texts longer than those of the repository's own files are somebody's test of how much is allowed.
_LONGEST = 100_000
_TEXTS = 512


class _Once(files._Loader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def get_single_node(self) -> Any:
        return _nodes(self._text) if len(self._text) <= _LONGEST else super().get_single_node()


@lru_cache(maxsize=_TEXTS)
def _nodes(text: str) -> yaml.Node | None:
    return super(_Once, _Once(text)).get_single_node()


def parse_once() -> None:
    """From now on, in this process."""
    files._Loader = _Once  # type: ignore[misc]
