"""The command line, called in this process."""

import pytest

from simcore.cli import main


def call(*words: str) -> int:
    """The exit code of `python -m simcore WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)
