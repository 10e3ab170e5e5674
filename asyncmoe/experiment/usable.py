"""Whether a run has measured anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.errors import AsyncMoeError


def check_usable(metrics: Mapping[str, Any], cluster: Mapping[str, Any], ramp_s: float) -> None:
    """Raise `AsyncMoeError` saying why nothing was measured, if so.

    Args:
        metrics, cluster: of `metrics.summary.summarise` and `metrics.cluster.cluster_figures`.
        ramp_s: the start of the run that did not count.
    """
    end_s = metrics["window"]["end_s"]
    if end_s <= ramp_s:
        raise AsyncMoeError(
            f"all requests had ended after {end_s:.3g} s, within the ramp of {ramp_s:g} s, which "
            "does not count; allowed: a shorter one (--ramp, window.ramp_s) or more requests"
        )
    if not any(sum(rank["batches"].values()) for rank in cluster["ranks"].values()):
        raise AsyncMoeError(
            f"no stage ran between {ramp_s:g} and {end_s:.3g} s, although requests were under way: "
            "the rule chose none"
        )
