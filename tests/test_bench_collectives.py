"""The benchmark of collectives, as far as it goes without a card: its rows, its checks, its refusal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simcore.input.files import InputError
from simcore.kernels.collectives import reference_normed_sum
from simcore.validate.benchmarks import collectives
from simcore.validate.benchmarks.collectives import (
    BYTES,
    CALLS,
    begin,
    check,
    check_norms,
    drawn,
    keep,
    our_cases,
    row_of,
    table,
    tensors,
)


def test_rows_are_kept_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    begin(path)
    assert next(table(path)).split()[:3] == ["method", "kind", "ranks"]
    seconds = [1e-6 * CALLS * each for each in range(1, 12)]
    for size in BYTES[:2]:
        keep(row_of("words", "all_reduce", 2, 1, size, "512/4/32", seconds), path)
    head, first, second = table(path)
    assert head.split()[-4:] == ["median_us", "p10", "p90", "n"]
    assert first.split() == ["words", "all_reduce", "2", "1", "2048", "512/4/32", "6.0", "2.0", "10.0", "11"]
    assert second.split()[4] == "4096"
    assert "2 x 4096 bytes 512/4/32: 6.00 us" in capsys.readouterr().out


def test_what_is_wrong_gets_no_time() -> None:
    xs = drawn(3, 2048)
    total, gathered = torch.stack([x.double() for x in xs]).sum(0).bfloat16(), torch.cat(xs, -1)
    check("all_reduce", total, xs, 5e-3)
    check("all_gather", gathered, xs, 0.0)
    for kind, out in (
        ("all_reduce", 1.01 * total),
        ("all_reduce", torch.full_like(total, float("nan"))),
        ("all_gather", gathered.flip(-1)),
    ):
        with pytest.raises(ValueError, match="WRONG"):
            check(kind, out, xs, 5e-3)


def test_a_norm_that_is_wrong_gets_no_time() -> None:
    xs = [x.view(2, -1) for x in drawn(3, 2048)]
    found = tensors("normed_sum", xs[0], 3)
    for calls in (1, 5):
        found.clear()
        for _ in range(calls):
            found.out.copy_(reference_normed_sum(xs, found.residual, found.gain))
        check_norms(found, xs, calls)
        with pytest.raises(ValueError, match="WRONG: the residual"):
            check_norms(found, xs, calls + 1)
        for wrong in (1.01 * found.out, torch.full_like(found.out, float("nan"))):
            with pytest.raises(ValueError, match="WRONG: error"):
                check_norms(replace(found, out=wrong), xs, calls)


def test_norms_are_measured_beside_sums_and_gathers() -> None:
    cases = list(our_cases(BYTES[:2], ()))
    rows = collectives.NORM_ROWS
    assert [(kind, size) for kind, size, _ in cases[4:]] == [
        (kind, each * 8192) for each in rows for kind in ("normed_sum", "sum_add_norm")
    ]
    assert [layout.warps for *_, layout in cases[4:]] == [16, 8] * len(rows)


def test_one_card_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 CUDA devices are needed, or one with --shared; there are 1"):
        collectives.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="there are 0"):
        collectives.main(shared=True)
