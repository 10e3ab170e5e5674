"""An explorer that drives the real slot and credit state machines through every interleaving.

Two homes and two expert ranks; every token has two parts, one from each expert rank. What is real:
`TokenTable`, `Dispatcher` with its outboxes and credit windows, `route`, `RowQueue`, `ExpertStep`.
What is modelled is only who acts next: messages lie in first-in-first-out channels per (sender,
receiver, class), and any of them may move. Every state that can be reached is visited once.

To be quick, ranks are shared between states: what an action does to one rank is worked out once for
each state of that rank, and a state of the whole is a tuple of small numbers.

A token's number is its payload and comes back with its parts, so that a row which reaches the wrong
token is seen. What is promised is checked in every state; a `Violation` says what was broken.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncmoe.credit import CreditWindow
from asyncmoe.dispatcher import Dispatcher
from asyncmoe.errors import ProtocolError
from asyncmoe.messages import Credit, Discard
from asyncmoe.microqueue import Hold, RowQueue, RowSegment, Taken
from asyncmoe.outbox import Outbox, Outboxes
from asyncmoe.placement import Placement, Role
from asyncmoe.stage import StageChain
from asyncmoe.steps import AttentionResult, ExpertStep
from asyncmoe.tokentable import TokenTable
from asyncmoe.transport import Limits, Parcel, ParcelClass, Posted

HOMES, EXPERT_RANKS, SLOTS, PARTS, LAYERS = (0, 1), (2, 3), 2, 2, 2
CHAIN = StageChain(LAYERS)
OWNER = np.array([EXPERT_RANKS] * LAYERS, np.uint16)  # one expert on each expert rank
LOCAL = np.zeros(2, np.int64)
ROLES = (Role.ATTENTION, Role.ATTENTION, Role.EXPERT, Role.EXPERT)
PLACEMENT = Placement(ROLES, OWNER, np.zeros_like(OWNER))
CONTROL = 0  # the class of messages that are not parcels

# (sender, receiver, class)
CHANNELS = [(h, e, k) for h in HOMES for e in EXPERT_RANKS for k in (CONTROL, ParcelClass.DISPATCH)]
CHANNELS += [(e, h, k) for h in HOMES for e in EXPERT_RANKS for k in (CONTROL, ParcelClass.COMBINE)]


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
    made = Dispatcher(
        rank=rank,
        placement=PLACEMENT,
        chain=CHAIN,
        transport=WIRE,
        limits=Limits(),
        row_bytes=4,
        window_rows=window,
        per_expert=False,
    )  # type: ignore[arg-type]
    # The plain ones, since compiled ones cannot be copied.
    limits = window, Limits().parcel_rows, 4
    made.outboxes = Outboxes(rank, PLACEMENT.world, *limits, WIRE, made.sent_rows)
    return made


class HomeRank:
    """The table and outboxes of one home, and what the checks must know of its tokens."""

    COLUMNS = ("epoch", "stage", "open", "part_count", "chunk", "_free")

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank = rank
        self.table = TokenTable(SLOTS, PARTS, 1, torch.float32, torch.device("cpu"))
        self.dispatcher = make_dispatcher(rank, setup.window)
        self.tokens = setup.tokens[rank]
        self.started = 0
        self.token: list[int | None] = [None] * SLOTS  # whose slot it is
        self.layer = [0] * SLOTS
        self.seen = [0] * SLOTS  # parts that were taken in for the layer, as bits
        self.key: tuple[Any, ...] = ()

    def clone(self) -> HomeRank:
        new = copy.copy(self)
        new.table = copy.copy(self.table)
        for name in self.COLUMNS:
            setattr(new.table, name, getattr(self.table, name).copy())
        new.dispatcher = copy.copy(self.dispatcher)
        boxes = new.dispatcher.outboxes = copy.copy(self.dispatcher.outboxes)
        boxes.boxes = {p: clone_box(b) for p, b in self.outboxes.items()}
        new.token, new.layer, new.seen = self.token[:], self.layer[:], self.seen[:]
        return new

    @property
    def outboxes(self) -> dict[int, Outbox]:
        return self.dispatcher.outboxes.boxes

    @property
    def can_start(self) -> int:
        return min(self.tokens - self.started, self.table.free_slots)

    @property
    def in_use(self) -> list[int]:
        return [slot for slot in range(SLOTS) if self.token[slot] is not None]

    def number(self, slot: int) -> float:
        """What the payload of the slot's rows is."""
        return 10.0 * (self.token[slot] or 0) + self.layer[slot]

    def seal(self) -> HomeRank:
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


class ExpertRank:
    """The queue of one expert rank, all stages in one."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank, self.window = rank, setup.window
        self.queue = RowQueue()
        self.key: tuple[Any, ...] = ()

    def clone(self) -> ExpertRank:
        new = copy.copy(self)
        new.queue = RowQueue()
        for old in self.queue._segments:
            hold = Hold(old.parcel.rows)
            new.queue.put(RowSegment(old.source, old.parcel, hold, 0.0, 0))
        return new

    def seal(self) -> ExpertRank:
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


class State(NamedTuple):
    """The whole, in numbers of `Explorer.ranks` and `Explorer.messages`."""

    ranks: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]  # in the order of CHANNELS
    repeated: tuple[tuple[int, int], ...]  # (home, combine row) that will come once more
    cancels: int
    duplicates: int


class Numbered:
    """Gives equal things equal numbers."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def add(self, item: Any, key: Any) -> int:
        number = self._numbers.setdefault(key, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class Explorer:
    """Visits all states of a setup; `states` and `ends` count them."""

    answers_discards = True

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.states = self.ends = 0
        self._ranks, self._messages = Numbered(), Numbered()
        self._effects: dict[Any, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._combiner = {rank: make_dispatcher(rank, 1) for rank in EXPERT_RANKS}
        self._out: list[
            tuple[int, int, Any]
        ] = []  # control messages of the action: to, class, what

    def run(self) -> None:
        """Raises `Violation`."""
        ranks = [HomeRank(rank, self.setup) for rank in HOMES]
        ranks += [ExpertRank(rank, self.setup) for rank in EXPERT_RANKS]
        numbers = tuple(self._ranks.add(r.seal(), (r.rank, r.key)) for r in ranks)
        first = State(numbers, ((),) * len(CHANNELS), (), self.setup.cancels, self.setup.duplicates)
        seen = {hash(first)}  # 64 bits are enough to tell a few 100,000 states apart
        todo = [first]
        while todo:
            state = todo.pop()
            self.states += 1
            successors = self._successors(state)
            if not successors:
                self._check_end(state)
            for successor in successors:
                key = hash(successor)
                if key not in seen:
                    seen.add(key)
                    todo.append(successor)

    def rank(self, state: State, rank: int) -> Any:
        return self._ranks.items[state.ranks[rank]]

    # ---- what may happen next

    def _successors(self, state: State) -> list[State]:
        found = []
        for rank in HOMES:
            home = self.rank(state, rank)
            counts = range(1, home.can_start + 1)
            found += [self._act(state, rank, self._start, count) for count in counts]
            if state.cancels:
                fewer = state._replace(cancels=state.cancels - 1)
                found += [self._act(fewer, rank, self._cancel, slot) for slot in home.in_use]
        for rank in EXPERT_RANKS:
            if self.rank(state, rank).queue.rows:
                found.append(self._act(state, rank, self._compute, 0))
        for number, ((sender, to, kind), queue) in enumerate(
            zip(CHANNELS, state.channels, strict=True)
        ):
            if not queue or not self.may_deliver(state, to, kind):
                continue
            channels = (*state.channels[:number], queue[1:], *state.channels[number + 1 :])
            rest = state._replace(channels=channels)
            found.append(self._act(rest, to, self._deliver, (sender, queue[0])))
            if kind == ParcelClass.COMBINE and state.duplicates:
                repeated = (*state.repeated, (to, queue[0]))
                found.append(state._replace(duplicates=state.duplicates - 1, repeated=repeated))
        for i, (rank, message) in enumerate(state.repeated):
            rest = state._replace(repeated=state.repeated[:i] + state.repeated[i + 1 :])
            found.append(self._act(rest, rank, self._repeat, message))
        return found

    def may_deliver(self, state: State, to: int, kind: int) -> bool:
        """Nothing that is on the wire ever waits for its receiver."""
        return True

    def _act(self, state: State, rank: int, action: Callable[..., None], argument: Any) -> State:
        """The state after `action` of `rank`, which changes that rank alone, and what it sent."""
        before = state.ranks[rank]
        effect = self._effects.get((before, action.__name__, argument))
        if effect is None:
            effect = self._work_out(before, action, argument)
            self._effects[before, action.__name__, argument] = effect
        after, sent = effect
        ranks = (*state.ranks[:rank], after, *state.ranks[rank + 1 :])
        if not sent:
            return state._replace(ranks=ranks)
        channels = list(state.channels)
        for channel, message in sent:
            channels[channel] = (*channels[channel], message)
        return state._replace(ranks=ranks, channels=tuple(channels))

    def _work_out(
        self, before: int, action: Callable[..., None], argument: Any
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        rank = self._ranks.items[before].clone()
        WIRE.sent.clear()
        self._out.clear()
        try:
            action(rank, argument)
        except ProtocolError as error:
            raise Violation(str(error)) from error
        out = [*self._out, *((to, int(parcel.kind), parcel) for to, parcel in WIRE.sent)]
        sent = tuple(
            (CHANNELS.index((rank.rank, to, kind)), self._messages.add(what, message_key(what)))
            for to, kind, what in out
        )
        return self._ranks.add(rank.seal(), (rank.rank, rank.key)), sent

    # ---- the actions

    def _start(self, home: HomeRank, count: int) -> None:
        """New tokens take slots, and their rows go to the experts as one batch."""
        slots = home.table.allocate(count)
        for slot in slots.tolist():
            home.token[slot], home.layer[slot] = home.started, 0
            home.started += 1
        self._dispatch(home, slots)

    def _dispatch(self, home: HomeRank, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            home.seen[slot] = 0
        payload = torch.tensor([home.number(slot) for slot in slots.tolist()])[:, None]
        both = np.tile(np.arange(PARTS), (len(slots), 1))
        result = AttentionResult(payload, both, np.ones(both.shape, np.float32))
        stage = CHAIN.expert(home.layer[int(slots[0])])
        assert home.dispatcher.dispatch(stage, home.table, slots, result) is None

    def _cancel(self, home: HomeRank, slot: int) -> None:
        """As `Home.end` and `Rank.discard` do it."""
        slots = np.array([slot])
        epochs = home.table.epoch[slots]
        home.dispatcher.outboxes.discard(slots.astype(np.uint32), epochs)
        note = Discard(slots.tolist(), epochs.tolist())
        self._out += [(rank, CONTROL, note) for rank in EXPERT_RANKS]
        home.table.release(slots)
        home.token[slot] = None

    def _compute(self, rank: ExpertRank, _: Any) -> None:
        """One row, as `Rank.prepare` and `Rank.finish` do it; the expert returns what it got."""
        segments = rank.queue.take(1)
        parcel = segments[0].parcel
        taken = Taken(segments)
        step = ExpertStep(parcel.stage, 0, None, taken, 1, LOCAL, 1, False)  # type: ignore[arg-type]
        self._combiner[rank.rank].combine(step, parcel.payload)
        segments[0].hold.read(1)

    def _deliver(self, rank: Any, argument: tuple[int, int]) -> None:
        sender, number = argument
        message = self._messages.items[number]
        if isinstance(message, Discard):  # as `Rank._discard`
            slots, epochs = np.array(message.slots, "u4"), np.array(message.epochs, "u4")
            rows = rank.queue.discard(sender, slots, epochs)
            if rows and self.answers_discards:
                self._out.append((sender, CONTROL, Credit(rows)))
        elif isinstance(message, Credit):
            rank.dispatcher.outboxes.credit(sender, message.rows)
        elif message.kind is ParcelClass.DISPATCH:
            hold = Hold(message.rows)
            rank.queue.put(RowSegment(sender, message, hold, 0.0, 0))
        else:  # as `Receptor._take_combine`
            self._take_in(rank, message)
            rank.dispatcher.outboxes.credit(sender, message.credits)

    def _repeat(self, home: HomeRank, number: int) -> None:
        self._take_in(home, self._messages.items[number])

    def _take_in(self, home: HomeRank, parcel: Parcel) -> None:
        """One combine row; a token that has all its parts goes on, or is done."""
        table = home.table
        (slot,), (part,), number = parcel.slot.tolist(), parcel.part.tolist(), parcel.payload.item()
        done = table.accept(parcel.stage, parcel.slot, parcel.epoch, parcel.part, parcel.payload)
        if not table.dropped_rows:
            if home.token[slot] is None or number != home.number(slot):
                raise Violation(f"slot {slot} takes a row of a dead token in")
            if home.seen[slot] & 1 << part:
                raise Violation(f"slot {slot} takes part {part} in twice")
            home.seen[slot] |= 1 << part
        table.dropped_rows = 0  # a counter is not part of the state
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
        self.ends += 1
        for rank in HOMES:
            home = self.rank(state, rank)
            for peer, box in home.outboxes.items():
                if box.waiting and box.window.available < box.window.window:
                    raise Violation(f"deadlock: home {rank} waits for credits of {peer}")
                if box.waiting or box.window.outstanding:
                    raise Violation(f"home {rank} lost {box.window.outstanding} credits of {peer}")
            if home.started != self.setup.tokens[rank] or home.table.free_slots != SLOTS:
                raise Violation(f"deadlock: home {rank} still has tokens {home.token}")
        if any(state.channels):
            raise Violation("deadlock: messages that nobody takes")
