"""How a card's memory is taken: in segments, unless the user has said how."""

from typing import Any

import pytest
import torch

from simcore.validate.timing import allocator
from simcore.validate.timing.allocator import IN_SEGMENTS, SETTINGS, take_memory_in_segments


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told, with nothing said by the user."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    return settings


def test_memory_comes_in_segments(said: list[str]) -> None:
    assert take_memory_in_segments() == "in segments that grow"
    assert said == [IN_SEGMENTS]


def test_an_older_torch_is_told_by_its_own_name(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    older: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", older.append, raising=False)
    assert take_memory_in_segments() == "in segments that grow"
    assert (said, older) == ([], [IN_SEGMENTS])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_user_has_said_stays(name: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert take_memory_in_segments() == f"as {name} says"
    assert said == []


def test_drivers_of_other_systems_have_no_segments(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "win32")
    assert take_memory_in_segments() == "as the driver gives it"
    assert said == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_taken_from_then_on_lies_in_a_segment_that_grows() -> None:
    if take_memory_in_segments() != "in segments that grow":
        pytest.skip("the user has said how memory is taken")
    # What torch has kept from tests before is given first.
    torch.cuda.empty_cache()
    taken = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    segments: Any = torch.cuda.memory_snapshot()
    (lies_in,) = [
        segment for segment in segments if 0 <= taken.data_ptr() - segment["address"] < segment["total_size"]
    ]
    assert lies_in["is_expandable"]
