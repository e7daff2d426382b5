"""Decisions that a card makes by itself: small kernels of one program each, between the ops of a launch.

    gate         gate = left (==, !=, >) right       log[n] = gate
    take         spin until published > turn         log[n + i] = turn; NOTHING if the gate is 0, or GIVEN_UP
    publish      published += 1
    write_flags  flags[target] = a number | a comparison | a verdict,   all from the values of that moment
    hold         held = the next verdicts
    between      write_flags with verdicts of held, then gate, of the next launch

If the gate is 0, take only logs, publish does nothing, and write_flags only passes over its verdicts; publish
and write_flags may have no gate. `hold` and `between` are for launches captured as one graph. Logs, the copy
of the flags, and verdicts are in pinned memory: the host looks at them without asking the device. A kernel's
writes are there once an event behind it has passed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of
from simcore.machine.machine import Condition, Flag, Setting, Verdict

# Log entries: a signal was not taken, because its launch was skipped; a signal did not come.
NOTHING, GIVEN_UP = -1, -2
COMPARISONS = {"==": 1, "!=": 2, ">": 3}
# Kinds of settings: a number, a comparison with a flag or with a number, a verdict.
NUMBER, WITH_FLAG, WITH_NUMBER, VERDICT = 0, 1, 2, 3
COLUMNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class StreamMemory:
    """Memory of one stream. On the device: `gate` int32 [1]; `cursor` int32 [2], the next places in `log` and
    `given`. Pinned, for the host: `log` and `given` int32 [many], gates and turns, and verdicts."""

    gate: Tensor
    cursor: Tensor
    log: Tensor
    given: Tensor


@triton.jit
def _compared(left, right, COMPARISON: tl.constexpr):
    if COMPARISON == 1:
        return left == right
    if COMPARISON == 2:
        return left != right
    return left > right


@triton.jit(do_not_specialize=["left", "right"])
def _gate_kernel(
    flags_ptr, gate_ptr, cursor_ptr, log_ptr, left, right,
    COMPARISON: tl.constexpr, WITH_FLAG: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """COMPARISON 0: the gate is always 1."""
    place = tl.load(cursor_ptr)
    holds = 1
    if COMPARISON > 0:
        one = tl.load(flags_ptr + left, volatile=True)
        other = right
        if WITH_FLAG:
            other = tl.load(flags_ptr + right, volatile=True)
        holds = _compared(one, other, COMPARISON).to(tl.int32)
    tl.store(gate_ptr, holds)
    tl.store(log_ptr + place, holds)
    tl.store(cursor_ptr, place + WIDTH)


def gate(
    flags: Tensor, memory: StreamMemory, slots: Mapping[Flag, int], condition: Condition | None, signals: int
) -> None:
    """Evaluates a condition into the gate of a stream and takes 1 + `signals` places of its log."""
    left, right, comparison, with_flag = _sides(slots, condition)
    _gate_kernel[(1,)](
        flags, memory.gate, memory.cursor, memory.log, left, right,
        COMPARISON=comparison, WITH_FLAG=with_flag, WIDTH=1 + signals, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["back", "code", "most"])
def _take_kernel(published_ptr, taken_ptr, gate_ptr, cursor_ptr, log_ptr, error_ptr, back, code, most):
    place = tl.load(cursor_ptr) - back
    if tl.load(gate_ptr) == 0:
        tl.store(log_ptr + place, -1)
    else:
        turn = tl.atomic_add(taken_ptr, 1, sem="relaxed")
        tries = 0
        there = tl.atomic_add(published_ptr, 0, sem="acquire")
        while (there <= turn) & (tries < most):
            there = tl.atomic_add(published_ptr, 0, sem="acquire")
            tries += 1
        if there <= turn:
            tl.store(error_ptr, code)
        tl.store(log_ptr + place, tl.where(there <= turn, -2, turn))


def take(
    published: Tensor, taken: Tensor, memory: StreamMemory, error: Tensor, *, back: int, code: int, most: int
) -> None:
    """Waits for the next publication that the rank has not taken and takes it, unless the gate is 0. Logs its
    turn `back` places before the log's cursor. After `most` looks it gives up and writes `code` to
    `error`."""
    _take_kernel[(1,)](
        published, taken, memory.gate, memory.cursor, memory.log, error, back, code, most, num_warps=1
    )


@triton.jit
def _publish_kernel(published_ptr, gate_ptr, GATED: tl.constexpr):
    if GATED and tl.load(gate_ptr) == 0:
        return
    tl.atomic_add(published_ptr, 1, sem="release")


def publish(published: Tensor, gate: Tensor | None) -> None:
    """Adds one publication, unless the gate is 0."""
    _publish_kernel[(1,)](published, gate, GATED=gate is not None, num_warps=1)


@triton.jit
def _write(flags_ptr, seen_ptr, said_ptr, rows_ptr, count, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Writes flags by rows; verdict n is at said_ptr + n. A row: target, kind, comparison or number of the
    verdict, left or yes or number, right or no, unused."""
    row = tl.arange(0, ROWS)
    inside = row < count
    at = rows_ptr + row * COLUMNS
    target = tl.load(at, mask=inside, other=0)
    what = tl.load(at + 1, mask=inside, other=0)
    how = tl.load(at + 2, mask=inside, other=0)
    one = tl.load(at + 3, mask=inside, other=0)
    other = tl.load(at + 4, mask=inside, other=0)
    compares = inside & ((what == 1) | (what == 2))
    left = tl.load(flags_ptr + one, mask=compares, other=0, volatile=True)
    right = tl.load(flags_ptr + other, mask=inside & (what == 1), other=0, volatile=True)
    right = tl.where(what == 1, right, other)
    holds = ((how == 1) & (left == right)) | ((how == 2) & (left != right)) | ((how == 3) & (left > right))
    value = tl.where(compares, holds.to(tl.int32), one)
    is_verdict = inside & (what == 3)
    said = tl.load(said_ptr + how, mask=is_verdict, other=0, volatile=True)
    value = tl.where(is_verdict & (said == 0), other, value)
    # All reads come before any write.
    tl.debug_barrier()
    tl.store(flags_ptr + target, value, mask=inside)
    tl.store(seen_ptr + target, value, mask=inside)


@triton.jit
def _write_flags_kernel(
    flags_ptr, seen_ptr, gate_ptr, cursor_ptr, given_ptr, rows_ptr, count,
    GATED: tl.constexpr, VERDICTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = 0
    if VERDICTS > 0:
        # The verdicts of a skipped launch are passed over.
        place = tl.load(cursor_ptr + 1)
        tl.store(cursor_ptr + 1, place + VERDICTS)
    open_ = 1
    if GATED:
        open_ = tl.load(gate_ptr)
    _write(flags_ptr, seen_ptr, given_ptr + place, rows_ptr, tl.where(open_ != 0, count, 0), COLUMNS, ROWS)


@triton.jit(do_not_specialize=["count"])
def _hold_kernel(cursor_ptr, given_ptr, held_ptr, count, BLOCK: tl.constexpr):
    place = tl.load(cursor_ptr + 1)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        said = tl.load(given_ptr + place + at, mask=at < count, other=0, volatile=True)
        tl.store(held_ptr + at, said, mask=at < count)
    tl.store(cursor_ptr + 1, place + count)


def hold(memory: StreamMemory, held: Tensor) -> None:
    """Copies the next verdicts, one an element of held int32 [verdicts], to the device, all at once because
    the host's memory is far away."""
    _hold_kernel[(1,)](memory.cursor, memory.given, held, len(held), BLOCK=256, num_warps=1)


@triton.jit(do_not_specialize=["count", "first", "left", "right"])
def _between_kernel(
    flags_ptr, seen_ptr, gate_ptr, cursor_ptr, log_ptr, held_ptr, rows_ptr, count, first, left, right,
    WRITES: tl.constexpr, GATED: tl.constexpr, COMPARISON: tl.constexpr, WITH_FLAG: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A verdict's number counts from held's place `first` on. COMPARISON 0: no gate follows."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if WRITES:
        open_ = 1
        if GATED:
            open_ = tl.load(gate_ptr)
        rows = tl.where(open_ != 0, count, 0)
        _write(flags_ptr, seen_ptr, held_ptr + first, rows_ptr, rows, COLUMNS, ROWS)
        # The gate is evaluated from what was written.
        tl.debug_barrier()
    if COMPARISON > 0:
        one = tl.load(flags_ptr + left, volatile=True)
        other = right
        if WITH_FLAG:
            other = tl.load(flags_ptr + right, volatile=True)
        open_next = _compared(one, other, COMPARISON).to(tl.int32)
        place = tl.load(cursor_ptr)
        tl.store(gate_ptr, open_next)
        tl.store(log_ptr + place, open_next)
        tl.store(cursor_ptr, place + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a launch writes: `rows` int32 [settings, COLUMNS] on the device; `verdicts`: how many are
    verdicts."""

    rows: Tensor
    verdicts: int


def settings(
    sets: Mapping[Flag, Setting], slots: Mapping[Flag, int], ints: Callable[[list[list[int]]], Tensor]
) -> Settings:
    """Returns the rows of settings, the same for all keys of verdicts; `ints` puts them on the device."""
    rows, verdicts = [], 0
    for flag, setting in sets.items():
        match setting:
            case Condition(left, comparison, right):
                with_flag = isinstance(right, Flag)
                other = slots[right] if isinstance(right, Flag) else right
                what = (WITH_FLAG if with_flag else WITH_NUMBER, COMPARISONS[comparison], slots[left], other)
            case Verdict():
                what = (VERDICT, verdicts, setting.yes, setting.no)
                verdicts += 1
            case _:
                what = (NUMBER, 0, int(setting), 0)
        rows.append([slots[flag], *what, 0])
    return Settings(ints(rows), verdicts)


def write_flags(flags: Tensor, seen: Tensor, memory: StreamMemory, found: Settings, *, gated: bool) -> None:
    """Writes the flags, and the copy that the host sees."""
    count = len(found.rows)
    _write_flags_kernel[(1,)](
        flags, seen, memory.gate, memory.cursor, memory.given, found.rows, count,
        GATED=gated, VERDICTS=found.verdicts, COLUMNS=COLUMNS, ROWS=triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip


def between(
    flags: Tensor,
    seen: Tensor,
    memory: StreamMemory,
    slots: Mapping[Flag, int],
    *,
    found: Settings | None,
    gated: bool,
    held: Tensor | None,
    first: int,
    condition: Condition | None,
) -> None:
    """Ends a launch and begins the next one: writes the flags of the one, if it has settings and, if `gated`,
    its gate is open, with verdicts held[first], held[first + 1], ...; then evaluates the condition of the
    other, if it has one, into the gate, and takes a place of the log."""
    left, right, comparison, with_flag = _sides(slots, condition)
    count = 0 if found is None else len(found.rows)
    _between_kernel[(1,)](
        flags, seen, memory.gate, memory.cursor, memory.log, flags if held is None else held,
        flags if found is None else found.rows, count, first, left, right,
        WRITES=found is not None, GATED=gated, COMPARISON=comparison, WITH_FLAG=with_flag,
        COLUMNS=COLUMNS, ROWS=triton.next_power_of_2(max(1, count)), **launched(1, gpu_of(flags).chained),
    )  # fmt: skip


def _sides(slots: Mapping[Flag, int], condition: Condition | None) -> tuple[int, int, int, bool]:
    """Returns the left and the right side of a condition, its comparison, and whether the right is a flag."""
    if condition is None:
        return 0, 0, 0, False
    with_flag = isinstance(condition.right, Flag)
    right = slots[condition.right] if isinstance(condition.right, Flag) else condition.right
    return slots[condition.left], right, COMPARISONS[condition.comparison], with_flag


def keyless(sets: Mapping[Flag, Setting]) -> tuple[tuple[Flag, Setting], ...]:
    """Returns settings without the keys of their verdicts: all that a captured launch depends on."""
    return tuple(
        (flag, Verdict(x.name, (), x.yes, x.no) if isinstance(x, Verdict) else x) for flag, x in sets.items()
    )


def flags_of(condition: Condition | None, sets: Mapping[Flag, Setting]) -> Sequence[Flag]:
    """Returns the flags that a launch reads."""
    conditions = [condition, *(x for x in sets.values() if isinstance(x, Condition))]
    sides = [side for each in conditions if each is not None for side in (each.left, each.right)]
    return [side for side in sides if isinstance(side, Flag)]
