"""Both directions between two ranks that share memory: what goes on when, and who is woken.

Of what a rank posts in one turn of its loop the first parcel is copied at once, and the others
behind that turn, together: a copy leaves little in the caches of what runs between copies. One
notice tells a peer that sleeps of all of them. What arrives is handed over within bounds, the rest
in the next turn.

Where the lanes are compiled (`shm_lanes.py`), so is this (`native/src/columns/shm_port.cpp`): then
nothing of Python's runs between who posts a parcel and its copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncmoe.errors import ProtocolError
from asyncmoe.link import Link
from asyncmoe.transport import Parcel, Posted
from asyncmoe.transports.shm_lanes import Bell, Receiver, Sender
from asyncmoe.twophase import Outbound

_PARCELS_PER_TURN = 64  # of each class

CallSoon = Callable[[Callable[[], None]], asyncio.Handle]


class Port:
    """The lanes of one pair, each list in the order of classes."""

    def __init__(
        self,
        outbound: Outbound,
        sending: Sequence[Sender],
        receiving: Sequence[Receiver],
        bell: Bell,
        link: Link,
        call_soon: CallSoon,
        notify: Callable[[], object],
    ) -> None:
        """`notify` sends a notice over a link that is not lost."""
        self._outbound, self._sending, self._receiving = outbound, sending, receiving
        self._bell, self._link = bell, link
        self._call_soon, self._notify = call_soon, notify
        self._stopped = False
        self._turn = False  # whether one is to come
        self._told = True  # the peer, if it sleeps, of all that was published
        self._more = False  # was left for the next turn
        self.on_progress: Callable[[], object] | None = None  # when something may have left

    @property
    def waiting(self) -> int:
        """Parcels that are not whole in slots."""
        return sum(lane.waiting for lane in self._sending)

    def post(self, parcel: Parcel) -> Posted:
        """See `Transport`. Raises `PeerLost` if the link is lost."""
        self._link.check()
        lane = self._sending[parcel.kind - 1]
        at_once = not self._turn
        if at_once:
            self._told = False
            self._go_on()
        return lane.post(*self._outbound.parcel(parcel), parcel.payload, at_once)

    def on_notice(self) -> None:
        """There is something to take, there are slots, or the peer is about to close. Raises
        `ProtocolError`."""
        self._advance([lane for lane in self._sending if lane.waiting])
        self._hand_over()
        self._progress()

    def take(self) -> None:
        """Hand over what is there, where nobody else sees to a `ProtocolError`."""
        try:
            self._hand_over()
        except ProtocolError as error:
            self._link.lose(f"malformed frame: {error}")

    def take_all(self) -> None:
        """The peer puts nothing more there: hand over all. Raises `ProtocolError`."""
        for lane in self._receiving:
            while lane.take(_PARCELS_PER_TURN):
                pass

    def stop(self) -> None:
        """Send nothing more, and hand nothing over. Called once."""
        self._stopped = True
        for sender in self._sending:
            sender.clear()
        for receiver in self._receiving:
            receiver.stop()
        self._sending = self._receiving = ()
        self.on_progress = None
        del self._bell

    def _go_on(self) -> None:
        """Something is left to do behind this turn of the loop."""
        if not self._turn and not self._stopped:
            self._turn = True
            self._call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn = False
        if self._lost:
            return
        self._advance([lane for lane in self._sending if lane.may_advance])
        if self._more:
            self.take()
        self._progress()

    def _advance(self, lanes: Sequence[Sender]) -> None:
        """Go on with what was too much at once, or has waited for slots, and wake the peer."""
        for lane in lanes:
            if lane.advance():
                self._told = False
            if lane.may_advance:
                self._go_on()
        if not self._told and not self._lost:
            self._told = True
            if self._bell.due():
                self._notify()

    def _hand_over(self) -> None:
        """What is there, within bounds, and ask to be woken if that was all."""
        while not self._stopped:
            more = [lane.take(_PARCELS_PER_TURN) for lane in self._receiving]
            self._more = any(more)
            if self._more:
                self._go_on()
                return
            if self._lost:
                return
            self._bell.sleep()
            if not any(lane.pending for lane in self._receiving):
                return

    @property
    def _lost(self) -> bool:
        return self._stopped or self._link.error is not None

    def _progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress()
