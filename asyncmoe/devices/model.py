"""The `model` device of the virtual world: steps take the time that a cost model says.

A step's Python runs when its modelled time is over, which is when a real device's results would be
seen; so memory that was given away too early is noticed, and steps run in the order submitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from asyncmoe.cores import Cores
from asyncmoe.device import Device, Done
from asyncmoe.errors import ConfigError
from asyncmoe.virtual.costs import NOTHING, StepCost
from asyncmoe.virtual.loop import VirtualLoop, current_lane


class ModelDevice(Device):
    """Serial like any device: a step begins when the host has made it ready and the one before it
    is over. What the host does is charged to the rank's lane."""

    virtual: ClassVar[bool] = True

    def __init__(self, threads: int, cores: Cores | None = None) -> None:
        """To be made in the rank's lane of a virtual loop. Raises `ConfigError` elsewhere."""
        super().__init__(threads, cores)
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise ConfigError("device model works in the virtual world only: asyncmoe simulate")
        self.torch_device = torch.device("cpu")
        self._lane, self._loop = current_lane() or loop.main, loop
        self._busy_s = 0.0

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """See `Device`."""
        lane = self._lane
        cost = NOTHING if lane.costs is None else lane.costs.of(work)
        end_s = lane.compute(cost.before_s, cost.compute_s)
        self._loop.call_at(end_s, self._end, work, done, cost, context=lane.context)

    def _end(self, work: Callable[[], Any], done: Done, cost: StepCost) -> None:
        """The device is done; so is the host after `after_s`."""
        if cost.after_s:
            self._lane.charge(cost.after_s)
            self._loop.call_soon(self._finish, work, done, cost)
        else:
            self._finish(work, done, cost)

    def _finish(self, work: Callable[[], Any], done: Done, cost: StepCost) -> None:
        self._lane.counts(cost.after_s)
        self._busy_s += cost.compute_s
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        done(result, failure, cost.compute_s)

    def busy_s(self) -> float:
        """Modelled seconds of the steps that are over."""
        return self._busy_s

    async def close(self) -> None:
        """See `Device`."""
        await asyncio.sleep(max(0.0, self._lane.busy_until_s - self._loop.time()))
