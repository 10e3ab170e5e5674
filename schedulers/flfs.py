"""First layer first: the first stage on the chain that has rows runs next.

One of the two baseline rules of "Toward Cost-Efficient Serving of Mixture-of-Experts with
Asynchrony" (arXiv 2505.08944). Rows behind catch up with rows ahead, so batches grow along the
chain, but a late stage waits for as long as an earlier one keeps getting rows.
"""

from __future__ import annotations

from asyncmoe.scheduler import QueueView, Scheduler


class Flfs(Scheduler):
    """The first runnable stage on the chain."""

    work_conserving = True

    def choose(self, view: QueueView) -> int | None:
        stage = int(view.runnable.argmax())
        return stage if view.runnable[stage] else None
