"""Whatever happens to ranks that march, in whatever order: see `march_world.py` for what is checked
at each step, beside what stands here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.march_world import MOST_ROWS, Ranks


@pytest.mark.parametrize("seed", range(400))
def test_while_ranks_live_no_row_is_lost_and_all_or_none_march(seed: int) -> None:
    chance, ranks = begin(seed)
    for _ in range(chance.randint(50, 600)):
        act(ranks, chance, ORDINARY)
        ranks.check()
    run_on(ranks, chance)
    rows = [len(home.living) for home in ranks.homes]
    if any(rows) and max(rows) <= MOST_ROWS:
        assert set(ranks.under_way) == set(ranks.living)
        assert len({number for number, _ in ranks.under_way.values()}) == 1
    else:
        assert not ranks.under_way


@pytest.mark.parametrize("seed", range(400))
def test_when_ranks_fail_and_are_lost_the_rows_of_the_others_go_on(seed: int) -> None:
    chance, ranks = begin(seed)
    acts = ORDINARY | FAULTS
    for _ in range(chance.randint(50, 600)):
        act(ranks, chance, acts)
        ranks.check()
    run_on(ranks, chance)
    if ranks.lost or ranks.has_broken_off:
        assert not ranks.under_way


def begin(seed: int) -> tuple[random.Random, Ranks]:
    """Ranks with some rows, which may be about to march."""
    chance = random.Random(seed)
    ranks = Ranks(chance.randint(2, 4), lambda: chance.choice([0, 1, 1, 2]))
    for rank in ranks.living:
        ranks.start(rank, chance.choice([0, 1, 1, 2]))
    for _ in range(chance.randint(0, 60)):
        act(ranks, chance, ORDINARY | {request_begins: 0, request_is_aborted: 0})
    return chance, ranks


Act = Callable[[Ranks, random.Random, int], None]


def act(ranks: Ranks, chance: random.Random, acts: dict[Act, int]) -> None:
    """Something happens, to a rank that lives; nothing if it cannot happen there."""
    (one,) = chance.choices(list(acts), list(acts.values()))
    one(ranks, chance, chance.choice(ranks.living))


def run_on(ranks: Ranks, chance: random.Random) -> None:
    """No request comes or goes any more, and all that was lost is told: every row gets tokens."""
    for rank in ranks.living:
        for lost in ranks.unaware_of(rank):
            ranks.tell(rank, lost)
        if rank not in ranks.under_way:
            ranks.free(rank)
    run(ranks, chance)
    before = [home.tokens.copy() for home in ranks.homes]
    run(ranks, chance)
    ranks.check()
    for rank in ranks.living:
        home = ranks.homes[rank]
        assert not home.leaving
        for chunk in home.living:
            assert home.tokens[chunk] > before[rank][chunk], f"a row of rank {rank} stands still"


def run(ranks: Ranks, chance: random.Random) -> None:
    """Long enough for a march to begin, and for some steps. Behind a march, a rank attends to what
    has come meanwhile before it sets off for the next."""
    for _ in range(20):
        ranks.deliver_all()
        for rank in ranks.living:
            while rank in ranks.under_way and ranks.advance(rank):
                pass
            attend(ranks, chance, rank)
            compute(ranks, chance, rank)


# ---- what may happen


def request_begins(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if ranks.homes[rank].running < MOST_ROWS or not chance.randrange(8):
        ranks.begin_request(rank)


def request_is_aborted(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if living := sorted(ranks.homes[rank].living):
        ranks.end_early(rank, chance.choice(living))
        if rank not in ranks.under_way and chance.randrange(2):
            ranks.free(rank)


def memory_is_freed(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if ranks.homes[rank].leaving and rank not in ranks.under_way:
        ranks.free(rank, begins=not chance.randrange(4))


def attend(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if rank not in ranks.under_way:
        reachable = ranks.reachable(rank)
        to = chance.choice(reachable) if reachable else None
        ranks.step(rank, chance.choice([None, 1]), to)


def compute(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if rank not in ranks.under_way:
        ranks.compute(rank, chance.choice([None, 1]))


def march_sets_off(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if rank in ranks.beginning:
        ranks.set_off(rank)


def march_on(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if rank in ranks.under_way:
        ranks.advance(rank, ends=not chance.randrange(12))


def deliver(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if waiting := [source for (source, to), queue in ranks.links.items() if to == rank and queue]:
        ranks.deliver(chance.choice(waiting), rank)


def march_fails(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if rank in ranks.under_way:
        ranks.end_march(rank, agreed=False, failed=True)


def process_ends(ranks: Ranks, chance: random.Random, rank: int) -> None:
    if len(ranks.living) > 1 and not (ranks.is_apart(rank) and chance.randrange(6)):
        chance.choice([ranks.leave, ranks.kill])(rank)


def link_is_cut(ranks: Ranks, chance: random.Random, rank: int) -> None:
    for lost in ranks.unaware_of(rank):
        ranks.cut(rank, lost)


def loss_is_told(ranks: Ranks, chance: random.Random, rank: int) -> None:
    for lost in ranks.unaware_of(rank):
        ranks.tell(rank, lost)


# How often they are tried: what disturbs seldom enough for marches to begin, which begin slowly
# enough to be disturbed just then.
ORDINARY: dict[Act, int] = {
    request_begins: 2,
    request_is_aborted: 2,
    memory_is_freed: 20,
    attend: 120,
    compute: 60,
    march_sets_off: 20,
    march_on: 160,
    deliver: 240,
}
FAULTS: dict[Act, int] = {march_fails: 1, process_ends: 8, link_is_cut: 60, loss_is_told: 1}
