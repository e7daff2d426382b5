"""The page of a plan."""

from simcore.reports.page import Opening, Section, Table
from simcore.reports.planning.points import Planned


def opening(plan: Planned) -> Opening:
    """Returns the top of the page."""
    return Opening(
        name=str(plan.summary.get("name") or "plan"),
        about=f"plan: {plan.summary.get('question', '')}",
        answer=str(plan.summary.get("answer") or ""),
        warnings=[str(each) for each in plan.summary.get("warnings") or ()],
        command=str(plan.provenance.get("command") or ""),
    )


def sections(plan: Planned) -> list[Section]:
    """Returns the sections, in the order of the page."""
    shown = [name for name in ("label", "devices", "rate_per_s", "verdict", "why") if name in plan.points]
    rows = [[str(row[name]) for name in shown] for row in plan.points.to_dict("records")]
    return [Section("points", "All points", table=Table(shown, rows, wraps=True))]
