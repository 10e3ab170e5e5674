"""What the engine's protocol did in a run: parcels, their sizes, credits, fan-in."""

from __future__ import annotations

from typing import Any

import numpy as np

Reports = dict[int, dict[str, Any]]  # counters of each rank

_KINDS = ("attention", "expert")


def steps_of(report: dict[str, Any]) -> int:
    """Executed stages, those of the head among them."""
    return int(sum(report[f"{kind}_batches"] for kind in (*_KINDS, "head")))


def protocol_figures(before: Reports, after: Reports) -> dict[str, float]:
    """Of all ranks together, between two reports of each; of credits at the second.

    A parcel that an attention or expert step sends goes to another rank: the rows that it keeps are
    in none. A step's fan-out is the ranks that it sends to, and so the mean of all steps' fan-in.
    """
    spent = {
        name: sum(after[rank][name] - before[rank][name] for rank in after)
        for name in ("sent_parcels", "sent_bytes", *(f"{kind}_batches" for kind in _KINDS))
    }
    seconds = max(1e-9, max(after[rank]["loop_s"] - before[rank]["loop_s"] for rank in after))
    steps = max(1, spent["attention_batches"] + spent["expert_batches"])
    parcels = max(1, spent["sent_parcels"])
    partners = [np.count_nonzero(report["bytes_to"]) for report in after.values()]
    return {
        "steps_per_rank_s": steps / seconds / len(after),
        "parcels_per_rank_s": spent["sent_parcels"] / seconds / len(after),
        "parcels_per_step": spent["sent_parcels"] / steps,
        "payload_bytes_per_parcel": spent["sent_bytes"] / parcels,
        "ranks_sent_to": float(np.mean(partners)),
        "outstanding_rows_per_rank": float(
            np.mean([report["outstanding_rows"] for report in after.values()])
        ),
        "rows_without_credits_per_rank": float(
            np.mean([report["outbox_rows"] for report in after.values()])
        ),
    }
