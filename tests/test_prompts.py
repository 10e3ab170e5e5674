"""Prompts to ids: what goes off the loop, and what is refused before it costs anything."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from asyncmoe.errors import RequestError
from asyncmoe.frontend.prompts import LONG_CHARS, encode_prompts, list_prompts
from asyncmoe.frontend.tokenizer import Tokenizer
from tests.servedmodel import make_served_checkpoint

ROOM = 10_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = Tokenizer.load(make_served_checkpoint(tmp_path_factory.mktemp("served")))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """On which threads texts are tokenised from now on."""
    used, encode = list[threading.Thread](), tokenizer.encode

    def noted(text: str, **options: bool) -> list[int]:
        used.append(threading.current_thread())
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noted)
    return used


async def test_each_form_of_prompt_comes_back_in_its_place(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    ids = await encode_prompts(tokenizer, ["user:hi;assistant:", [5, 17], chat], ROOM, {})
    assert ids[1] == [5, 17]
    assert ids[0] == ids[2] == tokenizer.encode("user:hi;assistant:")


@pytest.mark.parametrize("prompts", [["x" * LONG_CHARS], ["x" * 8] * (LONG_CHARS // 8)])
async def test_much_text_is_tokenised_on_one_other_thread(
    tokenizer: Tokenizer, threads: list[threading.Thread], prompts: list[str]
) -> None:
    await encode_prompts(tokenizer, prompts, ROOM, {})
    assert len(threads) == len(prompts)
    assert len(set(threads)) == 1
    assert threading.current_thread() not in threads


async def test_a_short_text_does_not_leave_the_loop(
    tokenizer: Tokenizer, threads: list[threading.Thread]
) -> None:
    await encode_prompts(tokenizer, ["short", [1] * ROOM], ROOM, {})
    assert threads == [threading.current_thread()]


async def test_text_is_refused_only_when_the_longest_tokens_could_not_hold_it(
    tokenizer: Tokenizer, threads: list[threading.Thread]
) -> None:
    limit = 20 * tokenizer.longest_token_bytes
    await encode_prompts(tokenizer, ["x" * limit], 20, {})
    threads.clear()
    with pytest.raises(RequestError, match=f"{limit + 1} characters .* room for 20 tokens"):
        await encode_prompts(tokenizer, ["x" * (limit + 1)], 20, {})
    assert threads == []


async def test_the_loop_goes_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    encoding = asyncio.create_task(encode_prompts(tokenizer, ["x y " * 200_000], 10**6, {}))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await encoding)[0]) == 800_000
    assert turns > 10


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("one", ["one"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5], (6, 7)], [[5], (6, 7)]),
        (np.array([5, 6]), [[5, 6]]),
        ([np.int64(5), np.int64(6)], [[5, 6]]),
        ([torch.tensor([5, 6]), "b"], [[5, 6], "b"]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    ],
)
def test_prompts_of_any_form_become_a_list(given: object, listed: list[object]) -> None:
    assert list_prompts(given) == listed


@pytest.mark.parametrize("given", [None, 5, b"ab", [b"ab"], [True], [[1, True]], [[1.5]], [None]])
def test_what_is_no_prompt_is_refused_by_name(given: object) -> None:
    with pytest.raises(RequestError, match=r"prompts? (are|is) .*; allowed: text"):
        list_prompts(given)
