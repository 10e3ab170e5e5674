"""Interleaved micro-batches, each with its own barriers: while the rows of one travel, the device
works on another.

The ping-pong pipeline of "MegaScale-Infer: Serving Mixture-of-Experts at Scale with Disaggregated
Expert Parallelism" (arXiv 2504.02263, section 4.1), with attention and experts apart or on the same
ranks. The rows of a home are spread over the micro-batches as evenly as may be, at each step.
"""

from __future__ import annotations

from pydantic import Field

from asyncmoe.schedulers.lockstep import Lockstep


class TwoBatch(Lockstep):
    """As `Lockstep` for each micro-batch; of those that may run the one that waits longest."""

    class Parameters(Lockstep.Parameters):
        """And how many micro-batches there are."""

        micro_batches: int = Field(2, ge=2, le=16, description="Micro-batches that take turns")

        @property
        def tracks(self) -> int:
            return self.micro_batches
