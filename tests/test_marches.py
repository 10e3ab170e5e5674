"""How ranks agree to march, case by case; whatever may happen is in `test_marches_at_random.py`."""

from __future__ import annotations

import pytest

from asyncmoe.errors import ProtocolError
from asyncmoe.messages import Muster
from tests.march_world import MOST_ROWS, Ranks


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
    ranks.step(1)
    ranks.deliver_all()
    assert not ranks.under_way
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
    ranks.step(0)
    ranks.deliver_all()
    assert not ranks.under_way


def test_a_row_that_comes_when_its_rank_is_ready_goes_its_own_way() -> None:
    ranks = Ranks(2)
    (kept,) = ranks.start(1, 1)
    ranks.deliver_all()
    ranks.step(1)  # ready
    later = ranks.begin_request(1)
    ranks.step(1)  # its prompt is through
    assert ranks.homes[1].in_layers == [later]
    ranks.deliver(1, 0)  # ready: all go, before the leader hears of the request
    ranks.deliver(0, 1)
    ranks.set_off(1)
    assert ranks.under_way[1] == (1, [kept])
    assert ranks.homes[1].in_layers == [later]


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
    ranks.kill(lost)
    ranks.tell(1, lost)
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
    ranks.deliver(lost, 0)  # ready
    ranks.kill(lost)
    ranks.cut(0, lost)
    others = {0, 1, 2, 3} - {lost}
    for rank in others - {0}:
        ranks.deliver(rank, 0)
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
    ranks.kill(lost)
    ranks.cut(0, lost)
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
    ranks.end_early(1, first)  # a stage that runs still reads its memory
    ranks.step(1)
    ranks.deliver_all()
    assert not ranks.under_way
    ranks.free(1)
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
