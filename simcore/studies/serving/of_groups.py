"""Figures of each group of servers of a fleet: pure functions of the requests and the steps of a run.

    group.NUMBER.METRIC    METRIC of the servers of one group, by the formulas of `figures.py`; groups are
                           numbered from 1 on, in the order of the scenario
    request_share          requests that the group answers / all that are answered

Requests count where they are answered.
"""

import numpy as np

from simcore.studies.columns import GROUP
from simcore.studies.serving.figures import Figure, latencies, occupancy, spreads
from simcore.studies.serving.runner import Result
from simcore.studies.serving.window import Window

LATENCIES = ("ttft_p99_s", "tpot_p99_s", "e2e_mean_s")
OCCUPANCY = ("utilisation", "mean_kv_share", "max_kv_share")


def of_groups(result: Result, window: Window) -> dict[str, Figure]:
    """Returns the figures of all groups of a fleet by their names."""
    found: dict[str, Figure] = {}
    came = result.served.only(window.came)
    answered = came.only(came.finished)
    for number, group in enumerate(result.groups, 1):
        ranks = list(group.ranks)
        here = np.isin(result.journal["instance"], ranks)
        journal = {name: column[here] for name, column in result.journal.items()}
        mine = answered.only(np.isin(answered.instance, ranks))
        took = spreads(latencies(mine))
        busy = occupancy(journal, group.room.limit, group.case.servers, window)
        figures: dict[str, Figure] = {
            "request_share": (len(mine) / len(answered) if len(answered) else None, ""),
            **{name: busy[name] for name in OCCUPANCY},
            **{name: took[name] for name in LATENCIES},
            "kv_tokens": (float(group.room.kv_tokens), "tokens"),
        }
        found |= {f"{GROUP}.{number}.{name}": figure for name, figure in figures.items()}
    return found
