"""Entries from a mold are those that the choice would make of the same item."""

from __future__ import annotations

import orjson
import pytest

from asyncmoe.frontend.openai_api import ChatChoice, CompletionChoice
from asyncmoe.frontend.output import RequestOutput, Transcript

TEXTS = ["", " word", "\0", '"}]', "[-1]", "%b\\", "\u00e9\U0001f600\n"]


def item(text: str, token_ids: list[int]) -> RequestOutput:
    return RequestOutput(
        delta=text,
        new_token_ids=token_ids,
        logprobs=None,
        finish_reason=None,
        stop_reason=None,
        transcript=Transcript("x", [1], 0.0),
        tokens_so_far=9,
        pieces_so_far=9,
    )


@pytest.mark.parametrize("kind", [CompletionChoice, ChatChoice])
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_an_entry_is_to_the_byte_what_the_choice_makes(
    kind: type[CompletionChoice] | type[ChatChoice], token_ids: bool, text: str
) -> None:
    for index in (0, 12):
        choice = kind(index, None, token_ids)
        for ids in ([0], [7, 70000]):
            expected = orjson.dumps(choice.news(item(text, ids)))
            assert choice.mold().entry(text, ids) == expected
