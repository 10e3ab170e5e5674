"""An asyncio event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

Work takes no virtual time by itself; what takes time is said so, by timers and by `Lane.charge`. So
a run of hours takes as long as its Python does, and nothing in it depends on the machine: the same
seed gives the same run, event for event.

Many ranks share the loop, and each has a **lane**: the callbacks of one rank, in the order in which
they became ready, as on a loop of its own. Lanes take turns. With a seed the next lane is drawn
from those that are ready, so that every seed is another interleaving of the ranks; the order within
a lane stays, since asyncio promises it and code may rely on it. A lane is also the time of its
rank's host: while it is charged for work, its callbacks wait.

Time, lanes and turns themselves are compiled (`native/src/columns/timeline.cpp`), with a twin in
`plainloop.py`; `run.py` makes the one that there is.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from asyncmoe.errors import AsyncMoeError

if TYPE_CHECKING:
    from asyncmoe.virtual.costs import Costs

_TASKS_NAMED = 5  # in the message about a standstill


class Standstill(AsyncMoeError):
    """Nothing is ready and no timer is set: whoever still waits would wait for ever."""


class NotVirtual(AsyncMoeError):
    """Something of the real world was asked for: a socket, a thread, a process, a signal."""


class Lane(Protocol):
    """The callbacks of one rank, and the time of its host and its device."""

    @property
    def name(self) -> str:
        """As given to `VirtualLoop.lane`."""

    @property
    def costs(self) -> Costs | None:
        """What the rank's device and host take; None for no time at all."""

    @property
    def context(self) -> contextvars.Context:
        """What is called in it belongs to this lane."""

    @property
    def free_s(self) -> float:
        """When the host is done with what it was charged for."""

    @property
    def worked_s(self) -> float:
        """All that it was charged for."""

    @property
    def hidden_s(self) -> float:
        """Of that, while the device computed."""

    @property
    def busy_until_s(self) -> float:
        """When the device is done with what it was given."""

    @property
    def dead(self) -> bool:
        """A dead lane's callbacks are dropped."""

    def charge(self, seconds: float) -> float:
        """The host works for `seconds`, after what it works at already; when it will be done."""

    def compute(self, before_s: float, seconds: float) -> float:
        """The host works for `before_s`, then the device for `seconds`, after what it works at
        already; when it will be done."""

    def counts(self, seconds: float) -> None:
        """The last `seconds` that were charged are of the code that is called next: its first look
        at `clock` comes before them."""

    def clock(self) -> float:
        """CPU seconds of the host so far, for counters that take differences."""

    def kill(self) -> None:
        """Run nothing more in it, as when its process dies."""


LANE: contextvars.ContextVar[Lane] = contextvars.ContextVar("asyncmoe_lane")


def current_lane() -> Lane | None:
    """The lane of the callback or task that runs; None outside a virtual loop."""
    return LANE.get(None)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. Made by `run.make_loop`; here is what is rare, and what there is not.

    Promises:
    - callbacks of a lane run in the order in which they became ready; timers in the order of
      their time, then in the order in which they were set;
    - no callback runs in a lane before the host is free of what the lane was charged for, but for
      the slack;
    - the run depends on nothing but what is run and the seed;
    - sockets, threads, processes and signals are refused with `NotVirtual`, and a loop on which
      nothing can happen any more stops with `Standstill`.
    """

    now_s: float  # virtual seconds since the loop was made
    events: int  # callbacks run so far
    main: Lane  # of what belongs to no rank
    # Called before each callback with the time, the name of its lane and the callback.
    on_event: Callable[[float, str, Callable[..., Any]], None] | None
    _stopping: bool  # asyncio's own
    _thread_id: int | None

    def __init__(self, seed: int | None = None, slack_s: float = 0.0) -> None:
        """`seed`: of the choice among ready lanes; None lets them take turns.

        `slack_s`: how much earlier than its host is free a lane may run. What it is charged for is
        not less for it, and a run has fewer events.
        """
        super().__init__()
        self._set_up(None if seed is None else Random(seed).random, slack_s)

    def _set_up(self, draw: Callable[[], float] | None, slack_s: float) -> None:
        raise NotImplementedError

    @property
    def timers(self) -> int:
        """Timers that are set, with those that were cancelled and are not swept out yet."""
        raise NotImplementedError

    def lane(self, name: str, costs: Costs | None = None) -> Lane:
        """A new lane. Start its rank's task with `context=lane.context`."""
        raise NotImplementedError

    def run_forever(self) -> None:
        """See asyncio. Nothing in the virtual world wants gradients."""
        with torch.inference_mode():
            super().run_forever()

    def call_soon_threadsafe(  # type: ignore[override]  # the stubs' TypeVarTuple
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio; of the loop's own thread only."""
        if self._thread_id not in (None, threading.get_ident()):
            self._refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    # ---- what is rare

    def _report(
        self, callback: Callable[..., Any], error: BaseException, handle: asyncio.Handle | None
    ) -> None:
        message = f"Exception in callback {callback!r}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _stand_still(self) -> NoReturn:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        named = ", ".join(waiting[:_TASKS_NAMED])
        more = f" and {len(waiting) - _TASKS_NAMED} more" if len(waiting) > _TASKS_NAMED else ""
        raise Standstill(
            f"at {self.now_s:.6f} s of virtual time nothing is ready and no timer is set, and "
            f"these tasks wait: {named or 'none'}{more}"
        )

    # ---- what there is not

    def _refuse(self, what: str) -> NoReturn:
        raise NotVirtual(
            f"{what} on a virtual loop: there are no sockets, threads, processes or signals in the "
            "virtual world"
        )

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("run_in_executor")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_reader")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_writer")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """Refused."""
        self._refuse("add_signal_handler")

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("getaddrinfo")

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("create_connection")

    async def create_server(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("create_server")

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        self._refuse("subprocess_exec")

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps outside."""
