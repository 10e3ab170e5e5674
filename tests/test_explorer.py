"""An explorer that drives the real slot and credit state machines through every interleaving.

Two homes and two expert ranks; every token has two parts, one from each expert rank. What is real:
`TokenTable`, `Dispatcher` with its outboxes and credit windows, `route`, `RowQueue`, `expert_step`.
What is modelled is only who acts next: messages lie in first-in-first-out channels per (sender,
receiver, class), and any of them may move. Every state that can be reached is visited once.

A token's number is its payload and comes back with its parts, so that a row which reaches the wrong
token is seen. All that this file checks is in `Violation`s; the last test breaks the pieces one by
one and expects each to be found out.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncmoe.credit import CreditWindow
from asyncmoe.dispatcher import Dispatcher, Outbox
from asyncmoe.errors import ProtocolError
from asyncmoe.messages import Credit, Discard
from asyncmoe.microqueue import Hold, RowQueue, RowSegment
from asyncmoe.placement import Placement, Role
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, expert_step
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, ParcelClass, Posted

HOMES, EXPERT_RANKS, SLOTS, PARTS, LAYERS = (0, 1), (2, 3), 2, 2, 2
CHAIN = StageChain(LAYERS)
OWNER = np.array([EXPERT_RANKS] * LAYERS, np.uint16)  # one expert on each expert rank
LOCAL = np.zeros(2, np.int64)
ROLES = (Role.ATTENTION, Role.ATTENTION, Role.EXPERT, Role.EXPERT)
PLACEMENT = Placement(ROLES, OWNER, np.zeros_like(OWNER))
CONTROL = 0  # the class of messages that are not parcels

Channel = tuple[int, int, int]  # sender, receiver, class


class Violation(AssertionError):
    """The protocol broke one of its promises."""


class Setup(NamedTuple):
    """What is explored."""

    window: int
    tokens: tuple[int, int]  # of each home, one after the other through its slots
    layers: int = 1  # expert stages of each token
    cancels: int = 0  # tokens that may be cancelled, at any time
    duplicates: int = 0  # combine rows that may be repeated, at any time


class Wire:
    """Stands for the transport: what is posted goes to `sent`."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Parcel]] = []

    def post(self, peer: int, parcel: Parcel) -> Posted:
        self.sent.append((peer, parcel))
        return Posted()


WIRE = Wire()


def make_dispatcher(rank: int, window: int) -> Dispatcher:
    return Dispatcher(
        rank, PLACEMENT, CHAIN, WIRE, Limits(), row_bytes=4, window_rows=window, per_expert=False
    )  # type: ignore[arg-type]


class HomeState:
    """The table and outboxes of one home, and what the checks must know of its tokens."""

    COLUMNS = ("epoch", "stage", "open", "part_count", "chunk", "_free")

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank = rank
        self.table = TokenTable(SLOTS, PARTS, 1, torch.float32, torch.device("cpu"))
        self.dispatcher = make_dispatcher(rank, setup.window)
        self.started = 0
        self.token: list[int | None] = [None] * SLOTS  # whose slot it is
        self.layer = [0] * SLOTS
        self.seen = [0] * SLOTS  # parts that were taken in for the layer, as bits
        self.key: tuple[Any, ...] = ()

    def clone(self) -> HomeState:
        new = copy.copy(self)
        new.table = copy.copy(self.table)
        for name in self.COLUMNS:
            setattr(new.table, name, getattr(self.table, name).copy())
        new.dispatcher = copy.copy(self.dispatcher)
        new.dispatcher._outboxes = {p: clone_box(b) for p, b in self.outboxes.items()}
        new.token, new.layer, new.seen = self.token[:], self.layer[:], self.seen[:]
        return new

    @property
    def outboxes(self) -> dict[int, Outbox]:
        return self.dispatcher._outboxes

    def seal(self) -> HomeState:
        """Check what must always hold, and note the key."""
        boxes = self.outboxes.values()
        for box in boxes:
            waiting = [slot for parcel in box.waiting for slot in parcel.slot.tolist()]
            if len(waiting) != len(set(waiting)):
                raise Violation(f"home {self.rank}: an outbox has two rows of one slot: {waiting}")
        table = self.table
        self.key = (
            table.epoch.tobytes(), table.stage.tobytes(), table.open.tobytes(),
            table._free[: table.free_slots].tobytes(), self.started, *self.token, *self.layer,
            *self.seen, *(box.window.available for box in boxes),
            *(tuple(map(parcel_key, box.waiting)) for box in boxes),
        )  # fmt: skip
        return self


def clone_box(box: Outbox) -> Outbox:
    new = copy.copy(box)
    new.window = CreditWindow(box.window.window)
    new.window.available = box.window.available
    new.waiting = deque(box.waiting)
    return new


class ExpertState:
    """The queue of one expert rank, all stages in one."""

    def __init__(self, setup: Setup) -> None:
        self.window = setup.window
        self.queue = RowQueue()
        self.key: tuple[Any, ...] = ()

    def clone(self) -> ExpertState:
        new = copy.copy(self)
        new.queue = RowQueue()
        for old in self.queue._segments:
            hold = Hold(old.parcel.rows, lambda: None)
            new.queue.put(RowSegment(old.source, old.parcel, hold, 0.0, 0))
        return new

    def seal(self) -> ExpertState:
        """Check what must always hold, and note the key."""
        segments = self.queue._segments
        for home in HOMES:
            rows = sum(s.parcel.rows for s in segments if s.source == home)
            if rows > self.window:
                raise Violation(f"{rows} rows of home {home}; its window is {self.window}")
        self.key = tuple((s.source, parcel_key(s.parcel)) for s in segments)
        return self


_KEYS: dict[int, tuple[Parcel, tuple[Any, ...]]] = {}  # by identity; holds the parcel, so it stays


def parcel_key(parcel: Parcel) -> tuple[Any, ...]:
    known = _KEYS.get(id(parcel))
    if known is None:
        key = (
            parcel.stage, parcel.slot.tobytes(), parcel.epoch.tobytes(), parcel.part.tobytes(),
            parcel.payload.numpy().tobytes(), parcel.credits,
        )  # fmt: skip
        known = _KEYS[id(parcel)] = parcel, key
    return known[1]


def message_key(message: Any) -> Any:
    return parcel_key(message) if isinstance(message, Parcel) else repr(message)


@dataclass
class State:
    """Everything. Components are shared between states and never changed once they are sealed."""

    parts: dict[int, HomeState | ExpertState]  # by rank
    channels: dict[Channel, tuple[Any, ...]]
    repeated: tuple[tuple[int, Parcel], ...] = ()  # (home, combine row) that will come once more
    cancels: int = 0
    duplicates: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            tuple(part.key for part in self.parts.values()),
            frozenset((c, tuple(map(message_key, m))) for c, m in self.channels.items() if m),
            tuple((home, parcel_key(parcel)) for home, parcel in self.repeated),
            self.cancels, self.duplicates,
        )  # fmt: skip

    def send(self, sender: int, to: int, kind: int, message: Any) -> None:
        channel = sender, to, kind
        self.channels[channel] = (*self.channels.get(channel, ()), message)


class Explorer:
    """Visits all states of a setup. `states` and `finished` count what was seen."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.states = self.finished = 0
        self._combiner = {rank: make_dispatcher(rank, 1) for rank in EXPERT_RANKS}

    def run(self) -> None:
        """Raises `Violation` with the actions that led there."""
        parts = {rank: HomeState(rank, self.setup).seal() for rank in HOMES} | {
            rank: ExpertState(self.setup).seal() for rank in EXPERT_RANKS
        }
        first = State(parts, {}, (), self.setup.cancels, self.setup.duplicates)
        seen = {hash(first.key)}  # hashes only: 64 bits, so a clash is out of the question here
        todo = [first]
        while todo:
            state = todo.pop()
            self.states += 1
            successors = list(self._successors(state))
            if not successors:
                self._check_end(state)
            for successor in successors:
                key = hash(successor.key)
                if key not in seen:
                    seen.add(key)
                    todo.append(successor)

    # ---- what may happen next

    def _successors(self, state: State) -> Iterator[State]:
        for rank in HOMES:
            home = state.parts[rank]
            left = self.setup.tokens[rank] - home.started
            for count in range(1, min(left, home.table.free_slots) + 1):
                yield self._act(state, rank, self._start, count)
            if state.cancels:
                for slot in (s for s in range(SLOTS) if home.token[s] is not None):
                    yield self._act(state, rank, self._cancel, slot)
        for rank in EXPERT_RANKS:
            if state.parts[rank].queue.rows and self.may_compute(state, rank):
                yield self._act(state, rank, self._compute)
        for channel, (message, *rest) in [c for c in state.channels.items() if c[1]]:
            yield self._act(state, channel[1], self._deliver, channel, message, tuple(rest))
            if channel[2] == ParcelClass.COMBINE and state.duplicates:
                twin = copy.copy(state)
                twin.duplicates -= 1
                twin.repeated = (*state.repeated, (channel[1], message))
                yield twin
        for i, (rank, parcel) in enumerate(state.repeated):
            yield self._act(state, rank, self._repeat, i, parcel)

    def may_compute(self, state: State, rank: int) -> bool:
        """An expert rank needs nothing but rows."""
        return True

    def _act(self, state: State, rank: int, action: Callable[..., None], *args: Any) -> State:
        """The state after `action` of `rank`, which may change its own part and send."""
        new = copy.copy(state)
        part = state.parts[rank].clone()
        new.parts, new.channels = {**state.parts, rank: part}, dict(state.channels)
        WIRE.sent.clear()
        try:
            action(new, part, *args)
        except ProtocolError as error:
            raise Violation(str(error)) from error
        for to, parcel in WIRE.sent:
            new.send(rank, to, parcel.kind, parcel)
        part.seal()
        return new

    # ---- the actions

    def _start(self, state: State, home: HomeState, count: int) -> None:
        """New tokens take slots, and their rows go to the experts as one batch."""
        slots = home.table.allocate(count)
        for slot in slots.tolist():
            home.token[slot], home.layer[slot] = home.started, 0
            home.started += 1
        self._dispatch(home, slots)

    def _dispatch(self, home: HomeState, slots: np.ndarray) -> None:
        numbers = [10.0 * (home.token[s] or 0) + home.layer[s] for s in slots.tolist()]
        for slot in slots.tolist():
            home.seen[slot] = 0
        both = np.tile(np.arange(2), (len(slots), 1))
        result = AttentionResult(torch.tensor(numbers)[:, None], both, np.ones(both.shape, "f4"))
        stage = CHAIN.expert(home.layer[int(slots[0])])
        assert home.dispatcher.dispatch(stage, home.table, slots, result) is None

    def _cancel(self, state: State, home: HomeState, slot: int) -> None:
        """As `Home.end` and `Rank.discard` do it."""
        state.cancels -= 1
        slots = np.array([slot])
        epochs = home.table.epoch[slots]
        home.dispatcher.discard(slots.astype(np.uint32), epochs)
        for rank in EXPERT_RANKS:
            state.send(home.rank, rank, CONTROL, Discard(slots.tolist(), epochs.tolist()))
        home.table.release(slots)
        home.token[slot] = None

    def _compute(self, state: State, part: ExpertState) -> None:
        """One row, as `Rank.prepare` and `Rank.finish` do it; the expert returns what it got."""
        (rank,) = (r for r, p in state.parts.items() if p is part)
        segments = part.queue.take(1)
        stage = segments[0].parcel.stage
        step = expert_step(None, stage, 0, segments, LOCAL, 1, False)  # type: ignore[arg-type]
        self._combiner[rank].combine(step, segments[0].parcel.payload)
        segments[0].hold.read(1)

    def _deliver(
        self, state: State, part: Any, channel: Channel, message: Any, rest: tuple[Any, ...]
    ) -> None:
        state.channels[channel] = rest
        sender, rank, _ = channel
        if isinstance(message, Discard):  # as `Rank._discard`
            slots, epochs = np.array(message.slots, "u4"), np.array(message.epochs, "u4")
            if (rows := part.queue.discard(sender, slots, epochs)) and self.answers_discards:
                state.send(rank, sender, CONTROL, Credit(rows))
        elif isinstance(message, Credit):
            part.dispatcher.credit(sender, message.rows)
        elif message.kind is ParcelClass.DISPATCH:
            hold = Hold(message.rows, lambda: None)
            part.queue.put(RowSegment(sender, message, hold, 0.0, 0))
        else:  # as `Receptor._take_combine`
            self._take_in(part, message)
            part.dispatcher.credit(sender, message.credits)

    answers_discards = True

    def _repeat(self, state: State, home: HomeState, index: int, parcel: Parcel) -> None:
        state.repeated = state.repeated[:index] + state.repeated[index + 1 :]
        self._take_in(home, parcel)

    def _take_in(self, home: HomeState, parcel: Parcel) -> None:
        """One combine row; a token that has all its parts goes on, or is done."""
        table, dropped = home.table, home.table.dropped_rows
        (slot,), (part,), number = parcel.slot.tolist(), parcel.part.tolist(), parcel.payload.item()
        done = table.accept(parcel.stage, parcel.slot, parcel.epoch, parcel.part, parcel.payload)
        if table.dropped_rows == dropped:
            token = home.token[slot]
            if token is None or number != 10.0 * token + home.layer[slot]:
                raise Violation(f"row {number} taken in for token {token} in slot {slot}")
            if home.seen[slot] & 1 << part:
                raise Violation(f"part {part} of token {token} taken in twice")
            home.seen[slot] |= 1 << part
        table.dropped_rows = 0  # not part of the state
        for slot in done.tolist():
            if home.token[slot] is None or home.seen[slot] != (1 << PARTS) - 1:
                raise Violation(f"slot {slot} goes on with parts {home.seen[slot]:b}")
            home.layer[slot] += 1
            if home.layer[slot] < self.setup.layers:
                self._dispatch(home, np.array([slot]))
            else:
                home.token[slot] = None
                table.release(np.array([slot]))

    # ---- the end

    def _check_end(self, state: State) -> None:
        self.finished += 1
        for rank in HOMES:
            home = state.parts[rank]
            if home.started != self.setup.tokens[rank] or home.table.free_slots != SLOTS:
                raise Violation(f"deadlock: home {rank} has tokens {home.token} left")
            for peer, box in home.outboxes.items():
                if box.waiting or box.window.outstanding:
                    raise Violation(f"home {rank} lacks {box.window.outstanding} credits of {peer}")


PLAIN = Setup(window=1, tokens=(2, 2))
SETUPS = {
    "one_credit": PLAIN,
    "two_credits": Setup(window=2, tokens=(2, 2)),
    "slots_used_again": Setup(window=1, tokens=(3, 1)),
    "cancelled": Setup(window=1, tokens=(3, 1), cancels=1),
    "cancelled_two_credits": Setup(window=2, tokens=(3, 1), cancels=1),
    "repeated": Setup(window=1, tokens=(2, 1), layers=2, duplicates=1),
    "cancelled_and_repeated": Setup(window=2, tokens=(2, 1), cancels=1, duplicates=1),
    "cancelled_twice": Setup(window=1, tokens=(4, 0), cancels=2),
}


@pytest.mark.parametrize("name", SETUPS)
def test_every_interleaving_ends_well(name: str) -> None:
    explorer = Explorer(SETUPS[name])
    explorer.run()
    print(name, explorer.states, explorer.finished)
    assert explorer.finished >= 1
