"""Whether a run has measured anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.errors import AsyncMoeError


def check_usable(metrics: Mapping[str, Any], ramp_s: float) -> None:
    """Raise `AsyncMoeError` saying why nothing was measured, if so.

    Args:
        metrics: of `metrics.summary.summarise`.
        ramp_s: the start of the run that did not count.
    """
    end_s = metrics["window"]["end_s"]
    if end_s <= ramp_s:
        raise AsyncMoeError(
            f"all requests had ended after {end_s:.3g} s, within the ramp of {ramp_s:g} s, which "
            "does not count; allowed: a shorter one (--ramp, window.ramp_s) or more requests"
        )
    if not metrics["tokens"]:
        raise AsyncMoeError(
            f"no token came between {ramp_s:g} and {end_s:.3g} s: the rule chose nothing, or a "
            "token takes longer than that"
        )
