"""Kernels by which a card decides for itself, against plain Python: on a GPU where there is one, else in
Triton's interpreter."""

from functools import partial
from random import Random

import pytest
import torch

from simcore.machine.machine import Condition, Flag, Setting, Verdict
from simcore.validate.machines.cuda import flag_kernels
from simcore.validate.machines.cuda.flag_kernels import StreamMemory, flags_of, keyless, settings
from tests.fake_card import FakeVerbs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FLAGS = [Flag(f"f{i}", i % 2) for i in range(5)]
SLOTS = {flag: 3 * i + 1 for i, flag in enumerate(FLAGS)}


def ints(count: int, *, host: bool = False) -> torch.Tensor:
    if host and CUDA:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


class Memory:
    """What the kernels work on, twice: as they have it, and for plain Python."""

    def __init__(self) -> None:
        self.given = [ints(20), ints(20, host=True), ints(4), ints(1, host=True)]
        self.stream = StreamMemory(ints(1), ints(2), ints(64, host=True), ints(64, host=True))

    def tensors(self) -> list[torch.Tensor]:
        stream = self.stream
        return [*self.given, stream.gate, stream.cursor, stream.log, stream.given]

    def copy(self) -> "Memory":
        other = Memory.__new__(Memory)
        *given, gate, cursor, log, verdicts = [x.cpu().clone() for x in self.tensors()]
        other.given, other.stream = given, StreamMemory(gate, cursor, log, verdicts)
        return other

    def same_as(self, other: "Memory") -> None:
        if CUDA:
            torch.cuda.synchronize()
        for one, two in zip(self.tensors(), other.tensors(), strict=True):
            assert one.tolist() == two.tolist()


def condition(random: Random) -> Condition:
    right = random.choice([*FLAGS, 0, 1, 2, -3])
    return Condition(random.choice(FLAGS), random.choice(["==", "!=", ">"]), right)  # type: ignore[arg-type]


def drawn_setting(random: Random) -> Setting:
    verdict = Verdict("v", (random.randrange(9),), random.randrange(5), -random.randrange(5))
    return random.choice([random.randrange(-2, 3), condition(random), verdict])


@pytest.mark.parametrize("seed", range(8))
def test_launches_decide_as_plain_python_does(seed: int) -> None:
    random, mine = Random(seed), Memory()
    for verdict in range(64):
        mine.stream.given[verdict] = random.randrange(2)
    theirs, python = mine.copy(), FakeVerbs()
    for _ in range(8 if not CUDA else 40):
        when = random.choice([None, condition(random)])
        sets = {flag: drawn_setting(random) for flag in random.sample(FLAGS, random.randrange(1, 5))}
        signals, room = random.randrange(3), 64 - int(theirs.stream.cursor[0])
        if room < 4 or int(theirs.stream.cursor[1]) > 56:
            break
        for memory, verbs in ((mine, flag_kernels), (theirs, python)):
            flags, seen, counters, error = memory.given
            device = DEVICE if memory is mine else "cpu"
            python.resume = 0
            verbs.gate(flags, memory.stream, SLOTS, when, signals)  # type: ignore[arg-type, attr-defined]
            for i in range(signals):
                published, taken = counters[i : i + 1], counters[i + 2 : i + 3]
                verbs.publish(published, None)  # type: ignore[attr-defined]
                verbs.take(  # type: ignore[attr-defined]
                    published, taken, memory.stream, error, back=signals - i, code=7, most=50
                )
            verbs.publish(counters[0:1], memory.stream.gate)  # type: ignore[attr-defined]
            found = settings(sets, SLOTS, partial(torch.tensor, dtype=torch.int32, device=device))
            verbs.write_flags(flags, seen, memory.stream, found, gated=when is not None)  # type: ignore[attr-defined]
        mine.same_as(theirs)
    assert int(theirs.stream.cursor[0]) > 0


@pytest.mark.parametrize("seed", range(8))
def test_launches_of_one_graph_decide_as_plain_python_does(seed: int) -> None:
    """Each between writes the flags of the launch before, with verdicts held since the graph began, and
    evaluates the gate of the next."""
    random, mine = Random(seed), Memory()
    for verdict in range(64):
        mine.stream.given[verdict] = random.randrange(2)
    theirs, python = mine.copy(), FakeVerbs()
    for _ in range(3 if not CUDA else 6):
        launches = [
            (
                random.choice([None, condition(random)]),
                {flag: drawn_setting(random) for flag in random.sample(FLAGS, random.randrange(4))},
            )
            for _ in range(3)
        ]
        verdicts = [sum(isinstance(x, Verdict) for x in sets.values()) for _, sets in launches]
        for memory, verbs in ((mine, flag_kernels), (theirs, python)):
            flags, seen, *_ = memory.given
            device = DEVICE if memory is mine else "cpu"
            held = torch.full((sum(verdicts),), 9, dtype=torch.int32, device=device)
            if len(held):
                verbs.hold(memory.stream, held)  # type: ignore[attr-defined]
            found, gated, first = None, False, 0
            for number, (when, sets) in enumerate([*launches, (None, {})]):
                verbs.between(  # type: ignore[attr-defined]
                    flags, seen, memory.stream, SLOTS, found=found, gated=gated,
                    held=held if len(held) else None, first=first, condition=when,
                )  # fmt: skip
                rows = partial(torch.tensor, dtype=torch.int32, device=device)
                found, gated = settings(sets, SLOTS, rows) if sets else None, when is not None
                first = sum(verdicts[:number])
        mine.same_as(theirs)
    assert int(theirs.stream.cursor.sum()) > 0


def test_a_signal_that_does_not_come_is_given_up() -> None:
    memory = Memory()
    flags, _, counters, error = memory.given
    flag_kernels.gate(flags, memory.stream, SLOTS, None, 1)
    flag_kernels.take(counters[0:1], counters[1:2], memory.stream, error, back=1, code=9, most=20)
    if CUDA:
        torch.cuda.synchronize()
    assert int(error[0]) == 9
    assert memory.stream.log[:2].tolist() == [1, flag_kernels.GIVEN_UP]


def test_what_a_launch_is_captured_with() -> None:
    one, two = ({FLAGS[0]: Verdict("v", (key,), 1, 2), FLAGS[1]: 5} for key in range(2))
    assert keyless(one) == keyless(two)
    assert keyless(one) != keyless({FLAGS[0]: Verdict("w", (0,), 1, 2), FLAGS[1]: 5})
    reads = flags_of(FLAGS[0].above(FLAGS[1]), {FLAGS[2]: FLAGS[3].zero()})
    assert list(reads) == [FLAGS[0], FLAGS[1], FLAGS[3]]
