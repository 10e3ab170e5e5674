"""Ranks that agree on marches, with all that the agreement is about: rows on their way to the
experts of others, marches step by step, processes that end. What happens next, the caller says."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from asyncmoe.errors import PeerLost
from asyncmoe.marches import LEADER, Chunks, Marches, _State
from asyncmoe.messages import Muster

MOST_ROWS = 6


@dataclass(slots=True, eq=False)
class Row:
    """Of a chunk, on its way from A0 to its next token."""

    home: int
    chunk: int
    hops: int  # expert stages of other ranks that it still has before it
    at: int  # the rank that it is with, or on its way to and from


class Home:
    """Chunks of a rank. One that has not left is ready for a stage, away, kept back or marching."""

    def __init__(self, rank: int, hops: Callable[[], int]) -> None:
        self._rank, self._hops = rank, hops
        self.prompts: set[int] = set()
        self.decoding: set[int] = set()
        self.leaving: set[int] = set()  # of both: they have ended, their memory is still in use
        self.ready: list[Row] = []
        self.away: dict[int, Row] = {}  # by chunk
        self.tokens = Counter[int]()  # by chunk

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prompts)

    @property
    def living(self) -> set[int]:
        """Chunks that have not left."""
        return (self.decoding | self.prompts) - self.leaving

    @property
    def in_layers(self) -> list[int]:
        return [*(row.chunk for row in self.ready), *self.away]

    def is_steady(self) -> bool:
        return not self.prompts

    def begin_steps(self, chunks: Chunks) -> None:
        for chunk in chunks.tolist():
            self.ready.append(Row(self._rank, chunk, self._hops(), self._rank))


class Ranks:
    """What they send is delivered when the caller says so, in the order of each link."""

    def __init__(self, world: int, hops: Callable[[], int] = lambda: 0) -> None:
        """`hops`: to experts of other ranks, of the next step of a row."""
        self.homes = [Home(rank, hops) for rank in range(world)]
        self.links: dict[tuple[int, int], deque[Muster | Row]] = defaultdict(deque)
        self.work: list[list[Row]] = [[] for _ in range(world)]  # rows at a rank's experts
        self.beginning: dict[int, int] = {}  # rank -> march
        self.under_way: dict[int, tuple[int, list[int]]] = {}  # rank -> (march, its chunks)
        self.begun: dict[int, set[int]] = defaultdict(set)  # ranks that began a march
        self.left: dict[int, set[int]] = defaultdict(set)  # ranks that left a march
        self.over: dict[int, set[int]] = defaultdict(set)  # ranks for which a march has ended
        self.lost: set[int] = set()  # their processes have ended
        self._unreachable: set[tuple[int, int]] = set()  # (rank, lost)
        self._unaware: set[tuple[int, int]] = set()  # (rank, lost), which it was not told
        self._broken: set[int] = set()  # ranks whose marches end at once
        self._notes = [(0, 0)] * world  # (march, notes in it)
        self._said = [(0, False)] * world  # (rows, stops)
        self._waits: set[int] = set()  # marching ranks that wait for the notes of others
        self._chunks = 0
        self._ready: dict[int, tuple[int, set[int], int]] = {}  # rank -> (march, chunks, newest)
        self.marches = [self._make(rank) for rank in range(world)]
        for each in self.marches:
            each.open()

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.homes)) if rank not in self.lost]

    def _make(self, rank: int) -> Marches:
        def send(to: int, message: Muster) -> None:
            if message.word == "ready":
                kept = set(self.marches[rank]._kept.tolist())
                assert kept == self.homes[rank].decoding, "it is ready without all its rows"
                self._ready[rank] = message.number, kept, self._chunks
            if to == rank:
                self.marches[rank].hear(rank, message)
            else:
                self._post(rank, to, message)

        def begin(number: int) -> None:
            assert rank not in self.under_way
            assert rank not in self.begun[number]
            assert all(number >= other for other in self.begun)
            self.begun[number].add(rank)
            self.beginning[rank] = number
            self._check_beginning(number)

        def leave(number: int) -> None:
            self.left[number].add(rank)

        return Marches(rank, len(self.homes), MOST_ROWS, self.homes[rank], send, begin, leave)

    def _post(self, source: int, to: int, what: Muster | Row) -> None:
        if (source, to) in self._unreachable:
            raise PeerLost(to, "lost")
        if to not in self.lost:
            self.links[source, to].append(what)

    def _check_beginning(self, number: int) -> None:
        """Rows in the layers are of requests that came after their rank was ready.

        There are others only where a rank is through with the march already, or knows of somebody
        lost, or of a march that was broken off: that rank leaves the march. So it does if the
        leader knows and has told it, which may be before it told another to go.
        """
        for rank in self.living:
            is_through = rank in self.over[number] or rank in self.left[number]
            if is_through or self.marches[rank]._closed or self.marches[LEADER]._closed:
                continue
            ready, kept, newest = self._ready[rank]
            assert ready == number, f"rank {rank} is not ready"
            older = {chunk for chunk in self.homes[rank].in_layers if chunk <= newest}
            assert not older, f"rows of rank {rank} are on their way"
            marching = self.under_way.get(rank, (0, []))[1]
            there = {*self.marches[rank]._kept.tolist(), *marching}
            assert there == kept & self.homes[rank].living | there & self.homes[rank].leaving

    @property
    def has_broken_off(self) -> bool:
        """Whether a march has ended for a rank otherwise than as agreed."""
        return any(self.left[number] & self.over[number] for number in self.begun)

    def is_apart(self, rank: int) -> bool:
        return self.marches[rank]._state is _State.APART

    # ---- messages and rows

    def deliver(self, source: int, to: int) -> None:
        what = self.links[source, to].popleft()
        if isinstance(what, Muster):
            self.marches[to].hear(source, what)
            if what.word == "go":  # others count on it, or may have to know that they cannot
                assert to in self.begun[what.number] | self.left[what.number]
        elif what.home != to:
            self.work[to].append(what)
        elif self.homes[to].away.get(what.chunk) is what:  # else its request has ended meanwhile
            del self.homes[to].away[what.chunk]
            what.at = to
            self.homes[to].ready.append(what)

    def deliver_all(self) -> None:
        """And begin the marches that begin by it."""
        while waiting := [link for link, queue in self.links.items() if queue]:
            self.deliver(*waiting[0])
        if self.beginning:
            self.set_off(min(self.beginning))
            self.deliver_all()

    def step(self, rank: int, count: int | None = None, to: int | None = None) -> None:
        """An attention batch: rows go to the experts of `to`, or are at the end of their step."""
        home = self.homes[rank]
        rows = home.ready[:count]
        del home.ready[: len(rows)]
        done = []
        for row in rows:
            if row.hops and to is not None:
                row.hops, row.at = row.hops - 1, to
                home.away[row.chunk] = row
                self._post(rank, to, row)
            else:
                done.append(row.chunk)
        if done:
            home.tokens.update(done)
            home.prompts.difference_update(done)
            home.decoding.update(done)
            self.marches[rank].enter(np.array(done))

    def compute(self, rank: int, count: int | None = None) -> None:
        """An expert batch: rows go home."""
        rows = self.work[rank][:count]
        del self.work[rank][: len(rows)]
        for row in rows:
            if (rank, row.home) not in self._unreachable:
                self._post(rank, row.home, row)

    def reachable(self, rank: int) -> list[int]:
        others = range(len(self.homes))
        return [to for to in others if to != rank and (rank, to) not in self._unreachable]

    # ---- requests

    def begin_request(self, rank: int) -> int:
        self._chunks += 1
        home = self.homes[rank]
        home.prompts.add(self._chunks)
        self.marches[rank].disturb()
        home.begin_steps(np.array([self._chunks]))
        return self._chunks

    def start(self, rank: int, requests: int) -> list[int]:
        """Requests whose prompts are through."""
        chunks = [self.begin_request(rank) for _ in range(requests)]
        for _ in chunks:
            self.step(rank, 1)
        return chunks

    def end_early(self, rank: int, chunk: int) -> None:
        """A request leaves, wherever its chunk is; `free` follows."""
        home = self.homes[rank]
        home.leaving.add(chunk)
        home.away.pop(chunk, None)
        home.ready = [row for row in home.ready if row.chunk != chunk]
        if chunk in home.decoding:
            self.marches[rank].leaves(chunk)

    def free(self, rank: int, begins: bool = False) -> None:
        """No batch uses the memory of requests that have left; another one may begin with it."""
        home = self.homes[rank]
        home.decoding -= home.leaving
        home.prompts -= home.leaving
        home.leaving.clear()
        if begins:
            self.begin_request(rank)
        self.marches[rank].look()

    def end_request(self, rank: int, chunk: int) -> None:
        self.end_early(rank, chunk)
        self.free(rank)

    # ---- in a march

    def set_off(self, rank: int) -> None:
        """The loop's next turn, in which a march begins."""
        self.under_way[rank] = self.beginning.pop(rank), self.marches[rank].take().tolist()
        self._notes[rank] = self.under_way[rank][0], 0

    def advance(self, rank: int, ends: bool = False) -> bool:
        """What this rank does next in its march, if it has not to wait; whether it has not.

        It takes two notes to a step: that all agree to it, and that all are through. `ends`: it
        wants no further step, since that was the last one of a request.
        """
        number, chunks = self.under_way[rank]
        home, (_, notes) = self.homes[rank], self._notes[rank]
        begins_step = notes % 2 == 0  # the note that it leaves next, or waits for
        if rank not in self._waits:
            if begins_step:
                ends = ends and bool(chunks) and notes > 0
                stops = ends or bool(home.ready or self.work[rank] or home.leaving)
                self._said[rank] = len(chunks), stops
            self._notes[rank] = number, notes + 1
            self._waits.add(rank)
            if begins_step and stops:
                self.end_march(rank, ended=int(ends))
            return True
        for other in range(len(self.homes)):
            if self._notes[other] < self._notes[rank]:
                if rank in self._broken or other in self.left[number]:
                    self.end_march(rank, agreed=False)
                    return True
                return False
        self._waits.remove(rank)
        if begins_step:
            home.tokens.update(chunks)
        elif any(stops for _, stops in self._said) or not any(rows for rows, _ in self._said):
            self.end_march(rank)
        return True

    def end_march(
        self, rank: int, agreed: bool = True, ended: int = 0, failed: bool = False
    ) -> None:
        """`ended`: so many of its requests have got their last token. `failed`: none goes on."""
        number, chunks = self.under_way.pop(rank)
        self._waits.discard(rank)
        self.over[number].add(rank)
        if not agreed:
            self.left[number].add(rank)
        self.marches[rank].over(agreed)
        chunks = [chunk for chunk in chunks if chunk not in self.homes[rank].leaving]
        gone = chunks if failed else chunks[:ended]
        if going := chunks[len(gone) :]:
            self.marches[rank].enter(np.array(going))
        for chunk in gone:
            self.end_early(rank, chunk)
        if self.homes[rank].leaving:
            self.free(rank)

    # ---- ranks that end

    def leave(self, rank: int) -> None:
        """Its process ends in order: nobody waits for it in a march."""
        self._broken.add(rank)
        self.marches[rank].close()
        for number, began in self.begun.items():
            if rank in began and rank not in self.over[number]:
                self.left[number].add(rank)
        self.kill(rank)

    def kill(self, rank: int) -> None:
        """Its process ends without a word; what it has sent may still come."""
        self.lost.add(rank)
        self.beginning.pop(rank, None)
        self.under_way.pop(rank, None)
        self._unaware |= {(other, rank) for other in self.living}
        for other in self.living:
            self.links[other, rank].clear()

    def unaware_of(self, rank: int) -> list[int]:
        """Ranks that are lost, of which `rank` was not told."""
        return sorted(lost for it, lost in self._unaware if it == rank)

    def cut(self, rank: int, lost: int) -> None:
        """Whatever `rank` sends to `lost` is refused from now on; nothing comes from it."""
        self._unreachable.add((rank, lost))
        self.links[lost, rank].clear()

    def tell(self, rank: int, lost: int) -> None:
        """`rank` is told, and ends the requests whose rows are with `lost`."""
        self.cut(rank, lost)
        self._unaware.remove((rank, lost))
        self._broken.add(rank)
        self.marches[rank].close()
        for row in list(self.homes[rank].away.values()):
            if row.at == lost:
                self.end_early(rank, row.chunk)
        if rank not in self.under_way:
            self.free(rank)

    # ---- all together

    def settle(self, rounds: int = 6) -> None:
        """Deliver everything, and take steps that need no other rank."""
        for _ in range(rounds):
            self.deliver_all()
            for rank in self.living:
                if rank not in self.under_way:
                    self.step(rank)
        self.deliver_all()

    def check(self) -> None:
        """Each chunk that has not left is in one place, and so is each row that is away."""
        moving = chain(*self.links.values(), *self.work)
        around = Counter(each for each in moving if isinstance(each, Row))
        for rank in self.living:
            home, marching = self.homes[rank], self.under_way.get(rank, (0, []))[1]
            kept = self.marches[rank]._kept.tolist()
            here = [chunk for chunk in marching if chunk not in home.leaving]
            assert sorted([*home.in_layers, *kept, *here]) == sorted(home.living)
            for row in home.away.values():
                assert around[row] == 1 or row.at in self.lost
