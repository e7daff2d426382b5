"""Who shares a card, and who has it alone."""

import fcntl
import os
from pathlib import Path

from tests.whole_card import card_lock


def is_free(folder: Path, how: int) -> bool:
    """Whether another one could hold the card now."""
    (path,) = folder.glob("*.card")
    card = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(card, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(card)
    return True


def test_a_card_is_shared_or_held_alone(tmp_path: Path) -> None:
    with card_lock(alone=False, folder=tmp_path):
        assert is_free(tmp_path, fcntl.LOCK_SH)
        assert not is_free(tmp_path, fcntl.LOCK_EX)
    with card_lock(alone=True, folder=tmp_path):
        assert not is_free(tmp_path, fcntl.LOCK_SH)
    assert is_free(tmp_path, fcntl.LOCK_EX)
