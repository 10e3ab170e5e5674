"""Most tokens first: the stage with most rows runs next.

One of the two baseline rules of "Toward Cost-Efficient Serving of Mixture-of-Experts with
Asynchrony" (arXiv 2505.08944). It makes the largest batch now and may starve a short queue.
"""

from __future__ import annotations

from asyncmoe.scheduler import QueueView, Scheduler


class Mtfs(Scheduler):
    """The runnable stage with most rows; among equals the earliest on the chain."""

    work_conserving = True

    def choose(self, view: QueueView) -> int | None:
        rows = view.rows * view.runnable
        stage = int(rows.argmax())
        return stage if rows[stage] > 0 else None
