"""The memory through which ranks send each other words, and whether their cards see each other's memory.

    words[r]  int32 [ranks, room]  in the memory of rank r: slot s is what rank s sends to it, EMPTY between
    addresses[r]  int64 [ranks]    on the card of rank r: where the words of each rank begin

`one_shot` says how the words are used. Addresses hold within one process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import EMPTY

MOST_RANKS = 8
# Formats of x, and the elements that a word of 32 bits takes.
IN_A_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}
# Slots begin at multiples of so many words, and so many are sent at least: the compiler then knows that it
# may store several words at once.
ALIGNED = 64
# Places of words are 32-bit numbers.
MOST_WORDS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Inboxes:
    """The inboxes of one collective of a program, by rank; made by `inboxes`.

    They hold as long as this object: keep it as long as graphs that use it. A program needs two or more for
    each group of ranks, used in turn (`one_shot`)."""

    words: tuple[Tensor, ...]
    addresses: tuple[Tensor, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.words)

    @property
    def room(self) -> int:
        """The most words that a rank can send to another one."""
        return self.words[0].shape[1]

    def clear(self) -> None:
        """Fills all words with EMPTY again, as is necessary after a launch gave up, and waits until that is
        done. No launch that uses them may run meanwhile, on any rank."""
        for words in self.words:
            words.fill_(EMPTY.value)
        settle(words.device for words in self.words)


def words_of(elements: int, dtype: torch.dtype) -> int:
    """Returns the words that are sent for so many elements: a multiple of ALIGNED. Raises ValueError for a
    format that is not sent.

    >>> words_of(4096, torch.bfloat16), words_of(1, torch.float32), words_of(129, torch.float16)
    (2048, 64, 128)
    """
    if dtype not in IN_A_WORD:
        raise ValueError(f"collectives are in fp32, bf16 or fp16, not {dtype}")
    words = -(-elements // IN_A_WORD[dtype])
    return -(-words // ALIGNED) * ALIGNED


def inboxes(devices: Sequence[torch.device | str], elements: int, dtype: torch.dtype) -> Inboxes:
    """Makes the inboxes of a collective for ranks on these devices, which may be the same one: `elements` of
    one rank's x at most, of format `dtype`.

    Lets the devices see each other's memory (`peers_see_each_other`), and waits until the words are EMPTY; so
    not in a capture. Raises ValueError for no rank or too many, and for too many elements or none."""
    places = [torch.device(device) for device in devices]
    if not 1 <= len(places) <= MOST_RANKS:
        raise ValueError(f"devices: collectives are of 1 to {MOST_RANKS} ranks, not {len(places)}")
    room = words_of(elements, dtype)
    if elements < 1 or room * len(places) >= MOST_WORDS:
        raise ValueError(f"elements: inboxes for {elements} elements cannot be made")
    peers_see_each_other(places)
    size = len(places), room
    words = tuple(torch.full(size, EMPTY.value, dtype=torch.int32, device=place) for place in places)
    starts = [x.data_ptr() for x in words]
    addresses = tuple(torch.tensor(starts, dtype=torch.int64, device=x.device) for x in words)
    settle(x.device for x in words)
    return Inboxes(words, addresses)


def peers_see_each_other(devices: Sequence[torch.device | str]) -> None:
    """Lets kernels on each of these CUDA devices read and write the memory of the others. For one device, or
    others than CUDA's, there is nothing to do. Raises RuntimeError naming two devices that cannot."""
    for one, other in permutations(_cards(devices), 2):
        _see(one, other)


@cache
def _see(one: int, other: int) -> None:
    """torch makes the access, once and for all, with the first copy from one device to another."""
    if not torch.cuda.can_device_access_peer(one, other):
        raise RuntimeError(f"cuda:{one} cannot see the memory of cuda:{other}")
    torch.zeros(1, device=f"cuda:{one}").to(f"cuda:{other}")
    settle([torch.device("cuda", card) for card in (one, other)])


def _cards(devices: Sequence[torch.device | str]) -> list[int]:
    """Returns the numbers of the CUDA devices, each once."""
    found = dict[int, None]()
    for device in map(torch.device, devices):
        if device.type == "cuda":
            found[torch.cuda.current_device() if device.index is None else device.index] = None
    return list(found)


def settle(devices: Iterable[torch.device]) -> None:
    """Waits for what was put on CUDA devices: the streams that use it next may be any."""
    for card in _cards(list(devices)):
        torch.cuda.synchronize(card)
