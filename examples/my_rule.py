"""A scheduling rule in one file: `asyncmoe generate --scheduler ./examples/my_rule.py:FullestTail`.

See docs/write-a-scheduler.md. It prefers full batches, and of those the one nearest to the head:
tokens that are almost made give their memory back soonest.
"""

from pydantic import Field

from asyncmoe.scheduler import QueueView, Scheduler, SchedulerParameters


class FullestTail(Scheduler):
    """The last stage on the chain that has at least `share` of the rows of the fullest one."""

    class Parameters(SchedulerParameters):
        """`share`: 1 is `mtfs`, close to 0 the last stage that has rows."""

        share: float = Field(0.5, gt=0, le=1)

    work_conserving = True

    def choose(self, view: QueueView) -> int | None:
        """See `Scheduler`."""
        rows = view.rows * view.runnable
        if not rows.any():
            return None
        assert isinstance(self.parameters, self.Parameters)
        enough = rows >= self.parameters.share * rows.max()
        return int(enough.nonzero()[0][-1])
