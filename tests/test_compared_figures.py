"""Published figures beside rows: which belong together, how far they differ; and gaps that no step tells."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simcore.machine.trace import ROW
from simcore.studies.common import Axes, Row, ServingAxes
from simcore.studies.published import Published, compare
from simcore.studies.serving.published import ServingPublished
from simcore.studies.serving.runner import prepared
from simcore.studies.serving.study import _first, cases
from tests.test_serving import bench, document, strategy, workload

AXES = ServingAxes("continuous_batching", "batching", 4, 2, 100, 2.5, 512.0, 128.0)
FIGURE = ServingPublished(
    "h200-sxm", "m", "continuous_batching", 4, 2, "ttft_mean_s", 0.4, "measured", "a table"
)


def row(value: float | None, **axes: Any) -> Row:
    return Row(replace(AXES, **axes), "ttft_mean_s", value, "s", 0.1, 0.9)


@pytest.mark.parametrize(("predicted", "error_pct"), [(0.4, 0.0), (0.5, 25.0), (0.3, -25.0), (0.8, 100.0)])
def test_an_error_is_of_the_published_figure(predicted: float, error_pct: float) -> None:
    (line,), alone = compare([row(predicted)], [FIGURE], frozenset())
    assert line["error_pct"] == pytest.approx(error_pct)
    assert (line["reference"], line["predicted"], line["low"], line["high"]) == (0.4, predicted, 0.1, 0.9)
    assert (line["role"], alone) == ("measured", [])
    figure = Published(
        "h200-sxm", "m", "alspec", 2, 2, 1024, 1, "token_latency_s", 0.4, "measured", "a table"
    )
    own = Row(Axes("alspec", "a", 2, 2, 1024, 1), "token_latency_s", predicted, "s")
    (line,), _ = compare([own], [figure])
    assert line["error_pct"] == pytest.approx(error_pct)


@pytest.mark.parametrize(
    "axes",
    [
        {"devices": 8}, {"ranks": 1}, {"requests": 99}, {"rate_per_s": 2.6}, {"rate_per_s": None},
        {"prompt_tokens": 511.0}, {"output_tokens": 129.0}, {"label": "another"},
    ],
)  # fmt: skip
def test_a_figure_is_of_rows_that_agree_in_all_that_its_source_says(axes: dict[str, Any]) -> None:
    said = replace(
        FIGURE, label="batching", requests=100, rate_per_s=2.5, prompt_tokens=512.0, output_tokens=128.0
    )
    # Rates come out of intervals, and differ in their last bits.
    near = row(0.5, rate_per_s=2.5 * (1 + 1e-9))
    table, alone = compare([near, row(0.6, **axes), row(None)], [said], frozenset())
    assert [line["predicted"] for line in table] == [0.5]
    assert alone == []
    table, alone = compare([row(0.6, **axes)], [said], frozenset())
    assert (table, alone) == ([], [said])


def test_what_something_was_fitted_to_is_no_evidence() -> None:
    fitted = replace(FIGURE, fitted_by="a profile")
    for given, role in ((frozenset({"a profile"}), "fitted"), (frozenset({"another"}), "measured")):
        (line,), _ = compare([row(0.5)], [fitted], given)
        assert line["role"] == role


# -- laws of a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["", "request", "row"])
def test_a_run_that_breaks_a_law_gives_no_result(broken: str) -> None:
    table = bench(document(strategies=[strategy("continuous_batching")]))
    run = prepared(table, next(cases(table)), 0)
    run.simulate()
    if broken == "request":
        run.requests[3].finish_s = run.requests[3].first_token_s - 1e-3
    if broken == "row":
        rows = run.simulation.trace.rows.numbers
        rows[ROW.index("work_s")] = 2.0 * rows[ROW.index("end_s")]
    if broken:
        with pytest.raises(
            AssertionError, match=broken if broken == "request" else "takes less than its work"
        ):
            run.result()
    else:
        assert len(run.result().served) == 12


# -- gaps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "output"), [("chunked", 20), ("first", 20), ("first", 1)])
def test_the_share_of_unseen_gaps_is_what_steps_leave_of_the_time_between_tokens(
    prefill: str, output: int
) -> None:
    """Counted step by step; with answers of one token there is no time between tokens, and no share of it."""
    ways = [strategy("continuous_batching", prefill=prefill)]
    table = bench(document(strategies=ways, workload=workload(40, prompt=2000, output=output)))
    case = next(cases(table))
    result = table.run(case, 0)
    served, steps = result.served, result.journal
    between_s = float(np.nansum(served.finish_s - served.first_token_s))
    seen_s = float(np.sum((steps["end_s"] - steps["start_s"]) * steps["decoding"]))
    found = _first(table, case, keep_trace=False).case_result
    assert found is not None
    if output == 1:
        assert between_s == 0.0
        assert found.unseen_gaps == 0.0
    else:
        assert found.unseen_gaps == pytest.approx((between_s - seen_s) / between_s, abs=1e-9)
        assert (found.unseen_gaps > 0.1) == (prefill == "first")
