"""Who uses the agent when: what is written in which order, off the loop or on it, and when to look.

The library tells of nothing by itself: whoever wants to know must ask. The courier asks without
pause for `spin_s` after anything has happened while something is due (a write is under way, or a
control frame has announced a payload), then every millisecond, which is as fine as the loop's
clock, and ten times a second while nothing is due at all. A control frame comes over the link and
so wakes this rank: an idle one does not have to ask.

A large write that the library copies inline would keep the loop, so a thread makes it; until it is
back, the loop leaves the agent alone. Writes are bounded, so that is never for long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from asyncmoe.errors import ProtocolError
from asyncmoe.transports.nixl_agent import Agent, Express, NixlError, Write
from asyncmoe.transports.nixl_sending import BATCH_BYTES, Batch

_BATCH_COST_BYTES = 128 << 10  # what a write takes beside its bytes, as bytes
_SOON_S = 0.001
_IDLE_S = 0.1
_NEVER, _SELDOM, _SOON, _NOW = range(4)
_SETTLE_S = 0.02  # for which the library is driven on after the last sign of life

T = TypeVar("T")


class Client(Protocol):
    """One peer, as the courier sees it."""

    agent: str  # its agent's name
    copies: bool  # whether the library copied the last large write to it inline
    express: Express | None  # what takes over for `next_batch` where it is there

    @property
    def waits(self) -> bool:
        """Whether it waits for notifications that may take long."""

    def next_batch(self) -> Batch | None:
        """What to write next."""

    def begun(self, batch: Batch) -> None:
        """The library has it: the control frames may go."""

    def written_out(self, batch: Batch) -> None:
        """Nothing reads its sources any more."""

    def wrote(self) -> None:
        """`express` has written a batch and done what was due behind it."""

    def on_note(self, note: bytes) -> None:
        """A notification came in. Raises `ProtocolError`."""

    def fail(self, reason: str) -> None:
        """It cannot be reached any more, or does what it may not."""


class Courier:
    """See the module. All methods are called on the loop."""

    def __init__(self, spin_s: float) -> None:
        self.due = 0  # payloads that were announced and are not whole
        self._agent: Agent | None = None
        self._spin_s = spin_s
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "asyncmoe-nixl")
        self._clients: dict[str, Client] = {}
        self._ready: deque[Client] = deque()  # who may have something to write
        self._active: dict[Write, tuple[Client, Batch]] = {}
        self._away: tuple[Client, Batch, Future[Write]] | None = None  # the agent is in the thread
        self._chores: list[Callable[[Agent], None]] = []  # for when it is back
        self._turn: asyncio.Handle | None = None  # of `_work`
        self._next_look: asyncio.Handle | None = None
        self._pace = _NEVER  # at which that look was planned
        self._spin_until_s = self._settle_until_s = 0.0

    async def open(self, make: Callable[[], Agent]) -> Agent:
        """Make the agent, off the loop: it takes long. Raises as `make`."""
        self._agent = await self._loop.run_in_executor(self._thread, make)
        return self._agent

    def close(self) -> None:
        """End it all; waits for the thread, which has at most one write to do. Idempotent."""
        if self._away is not None:
            self._take_back()
        for handle in (self._turn, self._next_look):
            if handle is not None:
                handle.cancel()
        self._turn = self._next_look = None
        self._pace = _NEVER
        self._thread.shutdown()
        agent, self._agent = self._agent, None
        if agent is not None:
            for write in self._active:
                agent.give_up(write)
            agent.close()
        self._active.clear()

    def add(self, client: Client) -> None:
        """Work for `client`."""
        self._clients[client.agent] = client

    def remove(self, client: Client, then: Callable[[Agent], None]) -> None:
        """Work for it no more: cancel what is under way, and call `then` when that is over."""
        self._clients.pop(client.agent, None)

        def part(agent: Agent) -> None:
            for write in [w for w, (whose, _) in self._active.items() if whose is client]:
                del self._active[write]
                agent.give_up(write)
            then(agent)

        self.when_free(part)

    def when_free(self, chore: Callable[[Agent], None]) -> None:
        """Call `chore` as soon as nobody else uses the agent: at once, or when it is back. Does
        nothing once this is closed."""
        if self._away is not None:
            self._chores.append(chore)
        elif self._agent is not None:
            chore(self._agent)

    def notify(self, client: Client, note: bytes) -> None:
        """Send a notification of its own, in no order with writes."""

        def send(agent: Agent) -> None:
            if client.agent in self._clients:
                try:
                    agent.notify(client.agent, note)
                except NixlError as error:
                    client.fail(str(error))
                self.something_happened()

        self.when_free(send)

    def ready(self, client: Client) -> None:
        """It may have something to write. That is looked at in the next turn of the loop, so that
        parcels which are posted together are written together."""
        if client not in self._ready:
            self._ready.append(client)
        if self._turn is None and self._away is None and self._agent is not None:
            self._turn = self._loop.call_soon(self._work)

    def something_happened(self) -> None:
        """Look often for a while."""
        now_s = self._loop.time()
        self._sign_of_life(now_s)
        if self._pace != _NOW:
            self._plan(now_s)

    def _sign_of_life(self, now_s: float) -> None:
        self._spin_until_s, self._settle_until_s = now_s + self._spin_s, now_s + _SETTLE_S

    def look(self) -> None:
        """Take in what has come, unless the agent is in the thread: then that is due later."""
        if self._away is not None or self._agent is None:
            return
        moved = [self._look_at(write) for write in list(self._active)]
        try:
            notes = self._agent.notes() if self._agent is not None else {}
        except NixlError as error:
            for client in list(self._clients.values()):
                client.fail(str(error))
            return
        for name, each in notes.items():
            client_or_none = self._clients.get(name)
            if client_or_none is not None:  # others are those who were given up, and strangers
                self._hand_out(client_or_none, each)
        if notes or any(moved):
            self.something_happened()

    def _hand_out(self, client: Client, notes: list[bytes]) -> None:
        for note in notes:
            if client.agent not in self._clients:
                return  # it was given up meanwhile
            try:
                client.on_note(note)
            except ProtocolError as error:
                client.fail(f"malformed notification: {error}")

    def _look_at(self, write: Write) -> bool:
        """Whether the write has come to an end."""
        if write not in self._active or self._agent is None:
            return True  # what was called before has given it up
        client, batch = self._active[write]
        try:
            if not self._agent.look(write):
                return False
        except NixlError as error:
            self._agent.give_up(write)
            client.fail(str(error))
        else:
            client.written_out(batch)
        self._active.pop(write, None)
        return True

    # -- writing ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """Write, until there is no more, the turn is over, or the agent is away."""
        self._turn = None
        left = BATCH_BYTES
        while self._ready and self._away is None and self._agent is not None:
            if left <= 0:
                self._turn = self._loop.call_soon(self._work)
                break
            client = self._ready[0]
            nbytes = self._serve(client) if client.agent in self._clients else None
            if nbytes is None:
                self._ready.popleft()
                continue
            self._ready.rotate(-1)  # the others are next
            left -= nbytes + _BATCH_COST_BYTES
        self.look()  # before the next turn, which writes to what has come back
        self._plan(self._loop.time())  # somebody may wait now who did not before

    def _serve(self, client: Client) -> int | None:
        """Write what it has next: the bytes of that, or None if there is nothing."""
        begun = None
        if client.express is None:
            batch = client.next_batch()
        else:
            left = client.express()
            if not isinstance(left, tuple):
                if left is not None:
                    self._sign_of_life(self._loop.time())
                    client.wrote()
                return left
            batch, begun = left
        if batch is None:
            return None
        if not batch.nbytes:
            client.begun(batch)
            client.written_out(batch)
        elif batch.nbytes > BATCH_BYTES and client.copies:
            self._send_away(client, batch)
        else:
            self._write(client, batch, begun)
        return batch.nbytes

    def _write(self, client: Client, batch: Batch, begun: tuple[Any, object] | None) -> None:
        """Write it, unless that was `begun`."""
        agent = self._agent
        assert agent is not None
        try:
            write = agent.under_way(batch, *begun) if begun else agent.write(client.agent, batch)
        except NixlError as error:
            client.fail(str(error))
        else:
            self._begun(client, batch, write)

    def _send_away(self, client: Client, batch: Batch) -> None:
        assert self._agent is not None
        future = self._thread.submit(self._agent.write, client.agent, batch)
        self._away = client, batch, future
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._returned))

    def _returned(self) -> None:
        """The agent is back from the thread."""
        if self._away is None:
            return  # `close` has seen to it
        self._take_back()
        if self._turn is None:
            self._work()

    def _take_back(self) -> None:
        assert self._away is not None
        client, batch, future = self._away
        try:
            write = future.result()
        except NixlError as error:
            self._away = None
            client.fail(str(error))
        else:
            self._away = None
            self._begun(client, batch, write)
        chores, self._chores = self._chores, []
        for chore in chores:
            self.when_free(chore)

    def _begun(self, client: Client, batch: Batch, write: Write) -> None:
        if batch.nbytes > BATCH_BYTES:
            client.copies = write.done
        if not write.done:
            self._active[write] = client, batch
        if client.agent in self._clients:
            client.begun(batch)
        if write.done:
            client.written_out(batch)
        self._sign_of_life(self._loop.time())  # who works plans the next look

    # -- when to look ----------------------------------------------------------------------------

    def _plan(self, now_s: float) -> None:
        """Look again when it is due; keep a look that is planned for then."""
        if self._agent is None or self._away is not None:
            pace = _NEVER  # there will be another plan when it is back
        elif (self.due or self._active) and now_s < self._spin_until_s:
            pace = _NOW
        elif (
            self.due
            or self._active
            or now_s < self._settle_until_s
            or any(client.waits for client in self._clients.values())
        ):
            pace = _SOON
        else:
            pace = _SELDOM
        if pace == self._pace:
            return
        if self._next_look is not None:
            self._next_look.cancel()
        self._pace, self._next_look = pace, None
        if pace == _NOW:
            self._next_look = self._loop.call_soon(self._look_and_plan)
        elif pace != _NEVER:
            delay_s = _SOON_S if pace == _SOON else _IDLE_S
            self._next_look = self._loop.call_later(delay_s, self._look_and_plan)

    def _look_and_plan(self) -> None:
        self._pace, self._next_look = _NEVER, None
        self.look()
        self._plan(self._loop.time())
