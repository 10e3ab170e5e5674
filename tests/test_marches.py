"""How ranks agree to march: every order of messages, requests that come and go, ranks that fail."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import numpy as np
import pytest

from asyncmoe.errors import PeerLost, ProtocolError
from asyncmoe.marches import Chunks, Marches
from asyncmoe.messages import Muster

MOST_ROWS = 6


class Home:
    """Decode chunks of a rank: each is in the layers, kept back, or in a march."""

    def __init__(self) -> None:
        self.decoding: set[int] = set()
        self.prompts = 0  # requests that do not decode yet
        self.in_layers: list[int] = []

    @property
    def running(self) -> int:
        return len(self.decoding) + self.prompts

    def is_steady(self) -> bool:
        return not self.prompts

    def begin_steps(self, chunks: Chunks) -> None:
        assert not set(chunks.tolist()) & set(self.in_layers)
        self.in_layers += chunks.tolist()


class Ranks:
    """Ranks whose messages are delivered one by one, in any order that their links allow."""

    def __init__(self, world: int) -> None:
        self.homes = [Home() for _ in range(world)]
        self.links: dict[tuple[int, int], deque[Muster]] = defaultdict(deque)
        self.under_way: dict[int, tuple[int, list[int]]] = {}  # rank -> (march, its chunks)
        self.beginning: dict[int, int] = {}  # rank -> march
        self.begun: dict[int, set[int]] = defaultdict(set)  # ranks that began a march
        self.left: dict[int, set[int]] = defaultdict(set)
        self.lost: set[int] = set()
        self.marches = [self._make(rank) for rank in range(world)]
        self._chunks = 0
        for each in self.marches:
            each.open()

    def _make(self, rank: int) -> Marches:
        def send(to: int, message: Muster) -> None:
            if to in self.lost:
                raise PeerLost(to, "lost")
            if to == rank:
                self.marches[rank].hear(rank, message)
            else:
                self.links[rank, to].append(message)

        def begin(number: int) -> None:
            assert not self.homes[rank].in_layers
            assert rank not in self.under_way
            assert rank not in self.begun[number]
            assert all(number >= other for other in self.begun)
            self.begun[number].add(rank)
            self.beginning[rank] = number

        def leave(number: int) -> None:
            self.left[number].add(rank)

        return Marches(rank, len(self.homes), MOST_ROWS, self.homes[rank], send, begin, leave)

    # ---- what may happen

    def deliver(self, source: int, to: int) -> None:
        self.marches[to].hear(source, self.links[source, to].popleft())

    def set_off(self, rank: int) -> None:
        """The loop's next turn, in which a march begins."""
        chunks = self.marches[rank].take().tolist()
        assert set(chunks) == self.homes[rank].decoding - set(self.homes[rank].in_layers)
        self.under_way[rank] = self.beginning.pop(rank), chunks

    def deliver_all(self) -> None:
        self._deliver_all()
        while self.beginning:
            self.set_off(min(self.beginning))
            self._deliver_all()

    def _deliver_all(self) -> None:
        while waiting := [link for link, queue in self.links.items() if queue]:
            self.deliver(*waiting[0])

    def begin_request(self, rank: int) -> None:
        self.homes[rank].prompts += 1
        self.marches[rank].disturb()

    def end_prompt(self, rank: int) -> int:
        """A prompt is through: its first decode chunk is ready for A0."""
        home = self.homes[rank]
        home.prompts -= 1
        self._chunks += 1
        home.decoding.add(self._chunks)
        self.marches[rank].enter(np.array([self._chunks]))
        return self._chunks

    def step(self, rank: int, count: int | None = None) -> None:
        """Rows that are in the layers come to their next step."""
        home = self.homes[rank]
        chunks = home.in_layers[:count]
        del home.in_layers[: len(chunks)]
        if chunks:
            self.marches[rank].enter(np.array(chunks))

    def end_request(self, rank: int, chunk: int) -> None:
        """Wherever it is, but for a march."""
        home = self.homes[rank]
        home.decoding.discard(chunk)
        if chunk in home.in_layers:
            home.in_layers.remove(chunk)
        self.marches[rank].leaves(chunk)
        self.marches[rank].look()

    def end_march(self, rank: int, agreed: bool = True, ended: int = 0) -> None:
        _, chunks = self.under_way.pop(rank)
        self.marches[rank].over(agreed)
        going, gone = chunks[ended:], chunks[:ended]
        if going:
            self.marches[rank].enter(np.array(going))
        for chunk in gone:
            self.end_request(rank, chunk)

    def start(self, rank: int, requests: int) -> list[int]:
        for _ in range(requests):
            self.begin_request(rank)
        return [self.end_prompt(rank) for _ in range(requests)]

    def settle(self, rounds: int = 6) -> None:
        """Deliver everything, and take steps."""
        for _ in range(rounds):
            self.deliver_all()
            for rank in range(len(self.homes)):
                self.step(rank)
        self.deliver_all()


def test_ranks_that_only_decode_march_with_all_their_rows() -> None:
    ranks = Ranks(3)
    chunks = [ranks.start(0, 2), ranks.start(1, 1), ranks.start(2, 3)]
    ranks.settle()
    assert ranks.under_way == {rank: (1, chunks[rank]) for rank in range(3)}
    assert [each.count for each in ranks.marches] == [1, 1, 1]


def test_a_rank_without_requests_marches_along_and_nobody_marches_without_any() -> None:
    ranks = Ranks(3)
    ranks.settle()
    assert not ranks.under_way
    (chunk,) = ranks.start(2, 1)
    ranks.settle()
    assert ranks.under_way == {0: (1, []), 1: (1, []), 2: (1, [chunk])}


def test_a_march_that_ends_as_agreed_is_followed_by_the_next_without_a_step_apart() -> None:
    ranks = Ranks(2)
    chunks = ranks.start(0, 2)
    ranks.settle()
    ranks.end_march(0, ended=1)
    ranks.end_march(1)
    ranks.deliver_all()
    assert ranks.under_way == {0: (2, chunks[1:]), 1: (2, [])}


def test_the_last_request_ends_and_nobody_marches_on() -> None:
    ranks = Ranks(2)
    ranks.start(1, 1)
    ranks.settle()
    ranks.end_march(1, ended=1)
    ranks.end_march(0)
    ranks.settle()
    assert not ranks.under_way
    ranks.start(0, 1)
    ranks.settle()
    assert set(ranks.under_way) == {0, 1}


def test_a_request_that_begins_lets_the_rows_go_that_were_kept_back() -> None:
    ranks = Ranks(2)
    chunks = [*ranks.start(0, 1), *ranks.start(1, 1)]
    ranks.deliver_all()
    ranks.step(1)  # is kept back
    assert ranks.homes[1].in_layers == []
    ranks.begin_request(0)
    ranks.deliver_all()
    assert ranks.homes[1].in_layers == chunks[1:]
    ranks.settle()
    assert not ranks.under_way
    ranks.end_prompt(0)
    ranks.settle()
    assert set(ranks.under_way) == {0, 1}


def test_a_rank_that_is_ready_goes_even_if_a_request_has_begun_there() -> None:
    ranks = Ranks(2)
    ranks.start(0, 1)
    ranks.start(1, 1)
    ranks.deliver_all()
    ranks.step(1)
    ranks.step(0)
    ranks.deliver(1, 0)  # ready, and the other is too: all go
    ranks.begin_request(1)
    ranks.deliver_all()
    assert set(ranks.under_way) == {0, 1}
    ranks.end_march(0)
    ranks.end_march(1)
    ranks.settle()
    assert not ranks.under_way


def test_with_more_rows_than_the_memory_has_a_rank_is_not_able() -> None:
    ranks = Ranks(2)
    chunks = ranks.start(0, MOST_ROWS + 1)
    ranks.settle()
    assert not ranks.under_way
    ranks.end_request(0, chunks[0])
    ranks.settle()
    assert set(ranks.under_way) == {0, 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_march_that_is_broken_off_is_the_last_one(rank: int) -> None:
    ranks = Ranks(2)
    ranks.start(0, 1)
    ranks.start(1, 1)
    ranks.settle()
    ranks.end_march(rank, agreed=False)
    ranks.end_march(1 - rank)  # which was to end it anyway
    ranks.settle()
    assert not ranks.under_way
    assert [len(home.in_layers) for home in ranks.homes] == [1, 1]


@pytest.mark.parametrize("lost", [0, 2])
def test_whoever_loses_a_rank_lets_its_rows_go_and_leaves_the_march(lost: int) -> None:
    ranks = Ranks(3)
    ranks.start(0, 1)
    ranks.start(1, 1)
    ranks.deliver_all()
    ranks.step(1)  # ready
    ranks.step(0)
    assert ranks.homes[1].in_layers == []
    ranks.lost.add(lost)
    ranks.marches[1].close()
    assert len(ranks.homes[1].in_layers) == 1
    ranks.deliver_all()
    began = set(ranks.under_way)
    assert 1 not in began
    assert not began or ranks.left[1] == {1}
    ranks.settle()
    assert set(ranks.under_way) == began


def test_a_go_that_comes_late_is_left_at_once() -> None:
    ranks = Ranks(2)
    ranks.start(1, 1)
    ranks.deliver_all()
    ranks.step(1)
    ranks.deliver(1, 0)
    ranks.marches[1].close()
    ranks.deliver_all()
    assert ranks.left[1] == {1}
    assert set(ranks.under_way) == {0}


@pytest.mark.parametrize("lost", [1, 3])
def test_a_rank_that_is_lost_when_all_may_go_keeps_nobody_waiting(lost: int) -> None:
    ranks = Ranks(4)
    chunks = [ranks.start(rank, 1) for rank in range(4)]
    ranks.deliver_all()
    for rank in (1, 2, 3, 0):
        ranks.step(rank)
    ranks.lost.add(lost)
    for rank in (1, 2, 3):
        ranks.deliver(rank, 0)  # ready
    others = {0, 1, 2, 3} - {lost}
    ranks.links[0, lost].clear()
    ranks.deliver_all()
    assert set(ranks.under_way) | ranks.left[2] == others  # nobody waits for any but the lost one
    assert 0 in ranks.under_way
    for rank in list(ranks.under_way):
        ranks.end_march(rank, agreed=False)
    ranks.settle()
    assert not ranks.under_way
    assert all(ranks.homes[rank].in_layers == chunks[rank] for rank in others)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_call_that_does_not_reach_a_lost_rank_keeps_no_rows_back(lost: int) -> None:
    ranks = Ranks(3)
    ranks.deliver_all()
    chunks = ranks.start(3 - lost, 1)
    ranks.step(3 - lost)
    ranks.lost.add(lost)
    ranks.settle()
    assert not ranks.begun
    assert ranks.homes[3 - lost].in_layers == chunks


def test_rows_that_leave_between_ready_and_go_are_not_in_the_march() -> None:
    ranks = Ranks(2)
    chunks = ranks.start(1, 2)
    ranks.step(1)  # is able
    ranks.deliver_all()
    ranks.step(1)
    ranks.deliver(1, 0)  # ready: it may go
    ranks.end_request(1, chunks[0])
    ranks.deliver_all()
    assert ranks.under_way == {0: (1, []), 1: (1, chunks[1:])}


def test_a_request_that_leaves_before_its_memory_is_free_is_waited_for() -> None:
    ranks = Ranks(2)
    first, second = ranks.start(1, 2)
    ranks.step(1)  # is able
    ranks.deliver_all()
    home = ranks.homes[1]
    home.in_layers.remove(first)
    ranks.marches[1].leaves(first)  # a stage that runs still reads its memory
    ranks.step(1)
    ranks.deliver_all()
    assert not ranks.under_way
    home.decoding.remove(first)
    ranks.marches[1].look()
    ranks.deliver_all()
    assert ranks.under_way == {0: (1, []), 1: (1, [second])}


def test_words_from_the_wrong_rank_are_refused() -> None:
    ranks = Ranks(3)
    for word in ("able", "unable", "ready"):
        with pytest.raises(ProtocolError, match=word):
            ranks.marches[1].hear(2, Muster(word, 1))
    for word in ("call", "cancel", "go"):
        with pytest.raises(ProtocolError, match="rank 0 only"):
            ranks.marches[1].hear(2, Muster(word, 1))
    with pytest.raises(ProtocolError, match="march 7 begins"):
        ranks.marches[1].hear(0, Muster("go", 7))


@pytest.mark.parametrize("seed", range(150))
def test_whatever_comes_when_no_row_is_lost_and_all_or_none_march(seed: int) -> None:
    chance = random.Random(seed)
    world = chance.randint(2, 4)
    ranks = Ranks(world)
    for _ in range(chance.randint(20, 400)):
        act(ranks, chance)
        check(ranks)
    # Nothing is asked any more: what was begun ends, and then all that decode march.
    for _ in range(3):
        ranks.settle()
        for rank in list(ranks.under_way):
            ranks.end_march(rank)
        for rank, home in enumerate(ranks.homes):
            while home.prompts:
                ranks.end_prompt(rank)
    ranks.settle()
    check(ranks)
    rows = [len(home.decoding) for home in ranks.homes]
    if any(rows) and max(rows) <= MOST_ROWS:
        assert set(ranks.under_way) == set(range(world))
        assert len({number for number, _ in ranks.under_way.values()}) == 1


def act(ranks: Ranks, chance: random.Random) -> None:
    """Something happens that may."""
    world = len(ranks.homes)
    rank = chance.randrange(world)
    home = ranks.homes[rank]
    match chance.randrange(12):
        case 0 if home.running < MOST_ROWS:
            ranks.begin_request(rank)
        case 1 if home.prompts and rank not in ranks.under_way:
            ranks.end_prompt(rank)
        case 2 if home.decoding and rank not in ranks.under_way:
            ranks.end_request(rank, chance.choice(sorted(home.decoding)))
        case 3 | 4 | 5 if rank not in ranks.under_way:
            ranks.step(rank, chance.choice([None, 1]))
        case 7 | 8 if rank in ranks.beginning:
            ranks.set_off(rank)
        case 6 if ranks.under_way and not ranks.beginning:
            numbers = {number for number, _ in ranks.under_way.values()}
            everywhere = all(len(ranks.begun[number]) == world for number in numbers)
            if everywhere:  # ranks wait for each other in a march
                marching = chance.choice(sorted(ranks.under_way))
                rows = len(ranks.under_way[marching][1])
                ranks.end_march(marching, ended=chance.choice([0, 0, min(1, rows)]))
        case _:
            waiting = [link for link, queue in ranks.links.items() if queue]
            if waiting:
                ranks.deliver(*chance.choice(waiting))


def check(ranks: Ranks) -> None:
    """Each decode chunk is in one place."""
    for rank, home in enumerate(ranks.homes):
        marching = ranks.under_way.get(rank, (0, []))[1]
        kept = ranks.marches[rank]._kept.tolist()
        places = [*home.in_layers, *kept, *marching]
        assert sorted(places) == sorted(home.decoding)
