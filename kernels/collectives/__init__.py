"""Collectives of ranks whose cards see each other's memory. No op kind is one rank's alone, so they are in no
table: each rank launches its part, on its own card or on a stream of a card that it shares."""

from simcore.kernels.collectives.exchange import (
    exchange,
    exchange_inboxes,
    exchange_layout_for,
    reference_exchange,
)
from simcore.kernels.collectives.layout import Layout, layout_for
from simcore.kernels.collectives.memory import Inboxes, inboxes, peers_see_each_other
from simcore.kernels.collectives.one_shot import (
    all_gather,
    all_reduce,
    reference_all_gather,
    reference_all_reduce,
    reference_normed_sum,
    rows_layout_for,
    words_of_rows,
)

__all__ = [
    "Inboxes",
    "Layout",
    "all_gather",
    "all_reduce",
    "exchange",
    "exchange_inboxes",
    "exchange_layout_for",
    "inboxes",
    "layout_for",
    "peers_see_each_other",
    "reference_all_gather",
    "reference_all_reduce",
    "reference_exchange",
    "reference_normed_sum",
    "rows_layout_for",
    "words_of_rows",
]
