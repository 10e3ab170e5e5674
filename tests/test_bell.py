"""A bell is heard once a turn, and not at all while enough is running."""

from __future__ import annotations

import asyncio

import pytest

from asyncmoe.bell import Bell, make_bell


@pytest.mark.parametrize("make", [Bell, make_bell])
async def test_rings_of_one_turn_are_heard_once(make: type[Bell]) -> None:
    heard, running = [], []

    def hear() -> None:
        bell.rung = False
        heard.append(True)

    bell = make(asyncio.get_running_loop().call_soon, hear, running, 2)
    bell.ring()
    bell.ring()
    assert (heard, bell.wanted) == ([], True)
    await asyncio.sleep(0)
    assert heard == [True]
    running += [1, 2]
    bell.wanted = False
    bell.ring()
    await asyncio.sleep(0)
    assert (heard, bell.wanted) == ([True], True)
    running.pop()
    bell.ring()
    await asyncio.sleep(0)
    assert heard == [True, True]
    bell.mute = True
    bell.ring()
    await asyncio.sleep(0)
    assert heard == [True, True]
