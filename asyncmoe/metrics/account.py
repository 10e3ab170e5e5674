"""Where the ranks' time went, from two reports of every rank's counters.

A rank has two timelines, its device's and its loop's, which run beside each other: each adds up to
the whole time between the reports. The CPU time of a loop is hidden as far as its device computes
meanwhile; what is not hidden cannot be longer than the device's wait, so that `hidden` is a lower
bound of the share. With several ranks the device also waits for rows of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]  # the counters of one rank by name

KINDS = ("attention", "expert", "head")


@dataclass(frozen=True, slots=True)
class Account:
    """One rank's time between two reports, in seconds, and what it did in it."""

    whole_s: float
    compute_s: dict[str, float]  # of the device, by kind of stage
    prepare_s: float  # CPU time of the loop, as the next three
    finish_s: float
    receive_s: float
    other_s: float
    batches: dict[str, int]
    rows: dict[str, int]
    parcels: int
    sent_bytes: int

    @classmethod
    def between(cls, before: Report, after: Report) -> Account:
        """From the counters at both ends."""
        numbers = [key for key, value in after.items() if isinstance(value, int | float)]
        spent = {key: after[key] - before[key] for key in numbers if key in before}
        prepare_s, finish_s = (
            sum(spent[f"{kind}_{part}_s"] for kind in KINDS) for part in ("prepare", "finish")
        )
        cpu_s = spent["loop_user_s"] + spent["loop_system_s"]
        return cls(
            whole_s=max(spent["loop_s"], 1e-9),
            compute_s={kind: spent[f"{kind}_compute_s"] for kind in KINDS},
            prepare_s=prepare_s,
            finish_s=finish_s,
            receive_s=spent["receive_s"],
            other_s=max(0.0, cpu_s - prepare_s - finish_s - spent["receive_s"]),
            batches={kind: spent[f"{kind}_batches"] for kind in KINDS},
            rows={kind: spent[f"{kind}_rows"] for kind in KINDS},
            parcels=spent["sent_parcels"],
            sent_bytes=spent["sent_bytes"],
        )

    @property
    def waiting_s(self) -> float:
        """The device's time without a kernel."""
        return max(0.0, self.whole_s - sum(self.compute_s.values()))

    @property
    def cpu_s(self) -> float:
        """CPU time of the loop: all Python of the rank but for what is inside a step."""
        return self.prepare_s + self.finish_s + self.receive_s + self.other_s

    @property
    def idle_s(self) -> float:
        """The loop's time without work."""
        return max(0.0, self.whole_s - self.cpu_s)

    @property
    def hidden(self) -> float:
        """The least share of the loop's CPU time during which the device computed; 0 to 1."""
        return 1 - min(self.cpu_s, self.waiting_s) / self.cpu_s if self.cpu_s > 0 else 1.0

    def times_s(self) -> dict[str, float]:
        """The lines of the table, device first."""
        return {
            **{f"compute: {kind}": seconds for kind, seconds in self.compute_s.items()},
            "compute: waiting for rows": self.waiting_s,
            "loop: choose and prepare batches": self.prepare_s,
            "loop: route rows and post parcels": self.finish_s,
            "loop: take parcels in": self.receive_s,
            "loop: network, front end": self.other_s,
            "loop: idle": self.idle_s,
        }

    def figures(self, steps: float) -> dict[str, Any]:
        """For JSON: milliseconds per step, and shares of the whole time."""

        def ms(seconds: float) -> float:
            return 1e3 * seconds / steps

        return {
            "whole_ms": ms(self.whole_s),
            "compute_ms": {kind: ms(seconds) for kind, seconds in self.compute_s.items()},
            "waiting_ms": ms(self.waiting_s),
            "prepare_ms": ms(self.prepare_s),
            "finish_ms": ms(self.finish_s),
            "receive_ms": ms(self.receive_s),
            "other_ms": ms(self.other_s),
            "idle_ms": ms(self.idle_s),
            "outside_kernels_share": self.waiting_s / self.whole_s,
            "hidden_share": self.hidden,
            "batches": self.batches,
            "rows": self.rows,
            "parcels": self.parcels,
            "sent_bytes": self.sent_bytes,
        }


def accounts(before: Mapping[int, Report], after: Mapping[int, Report]) -> dict[int, Account]:
    """Of each rank that is in both, in order."""
    ranks = sorted(set(before) & set(after))
    return {rank: Account.between(before[rank], after[rank]) for rank in ranks}
