"""Streaming text: joined pieces are the full text, and stop strings end it wherever it is split."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers

from asyncmoe.frontend.textstream import ByteDetokenizer, Detokenizer, StopMatcher, TextStream
from asyncmoe.frontend.tokenizer import TokenBytes
from asyncmoe.sampling import SamplingParams

CORPUS = ["the quick brown fox, the lazy dog. naïve café — “quotes” 日本語 🙂👩‍👩‍👧 " * 3]


class CoreDecoder:
    """A `tokenizers` tokenizer with one special token."""

    bytes_of = None

    def __init__(self, core: Core, special_ids: frozenset[int] = frozenset()) -> None:
        self.core, self.special_ids, self.calls = core, special_ids, 0

    def decode(self, ids: list[int]) -> str:
        self.calls += 1
        return self.core.decode(list(ids), skip_special_tokens=True)


class CharDecoder:
    """Token n is the character n."""

    special_ids: frozenset[int] = frozenset()
    bytes_of = None

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def byte_level() -> CoreDecoder:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens(["added 日", "né"])  # spelled as they are; the second could be bytes
    return CoreDecoder(core, frozenset({core.token_to_id("<s>")}))


def byte_fallback() -> CoreDecoder:
    """SentencePiece style: ▁ for spaces, bytes for what is not in the vocabulary."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,", "▁a"]
    core = Core(
        models.BPE(
            {w: i for i, w in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return CoreDecoder(core)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def pieces_of(decoder: CoreDecoder, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(TEXT, st.integers(0, 2**32))
def test_pieces_of_any_split_of_any_text_join_to_it(text: str, seed: int) -> None:
    # Single bytes and merged tokens mixed: splits that the tokenizer itself would not make.
    vocab, coin = BYTE_LEVEL.core.get_vocab(), random.Random(seed)
    ids: list[int] = []
    for token in BYTE_LEVEL.core.encode(text).tokens:
        whole = coin.random() < 0.5
        ids.extend([vocab[token]] if whole else [vocab[char] for char in token])
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=200))
def test_pieces_of_random_tokens_join_to_the_full_decode(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, BYTE_LEVEL.core.get_vocab_size() + 3), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_bytes_of_a_byte_level_vocabulary_join_to_the_full_decode(ids: list[int]) -> None:
    bytes_of = TokenBytes(BYTE_LEVEL.core.id_to_token, BYTE_LEVEL.special_ids)
    detokenizer = ByteDetokenizer(bytes_of)
    pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


def test_endless_broken_bytes_cost_a_bounded_window_and_join_to_the_full_decode() -> None:
    lone = BYTE_LEVEL.core.token_to_id("¡")  # byte 0xA1, never the first of a character
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push(lone) for _ in range(500)]
    assert len(detokenizer._window) <= 64
    assert "".join([*pieces, detokenizer.flush()]) == "\ufffd" * 500


@settings(max_examples=100, deadline=None)
@given(TEXT.filter(lambda text: "▁" not in text and "\ufffd" not in text))
def test_byte_fallback_tokens_join_to_the_full_decode(text: str) -> None:
    ids = BYTE_FALLBACK.core.encode(text).ids
    assert "".join(pieces_of(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


def test_a_character_of_many_tokens_comes_with_its_last_token() -> None:
    ids = BYTE_FALLBACK.core.encode("a🙂").ids
    assert pieces_of(BYTE_FALLBACK, ids)[-5:] == ["", "", "", "🙂", ""]


def test_special_tokens_have_no_text() -> None:
    special = BYTE_LEVEL.core.token_to_id("<s>")
    fox = BYTE_LEVEL.core.encode("fox").ids
    assert "".join(pieces_of(BYTE_LEVEL, [special, *fox, special])) == "fox"


def test_a_token_costs_the_same_at_the_end_of_a_long_answer() -> None:
    ids = BYTE_LEVEL.core.encode(CORPUS[0] * 40).ids
    detokenizer = Detokenizer(BYTE_LEVEL)
    longest, start = 0, BYTE_LEVEL.calls
    for token in ids:
        detokenizer.push(token)
        longest = max(longest, len(detokenizer._window))
    assert longest < 24
    assert (BYTE_LEVEL.calls - start) / len(ids) < 2


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The naive answer: end of the first completed stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), max_size=30),
    st.booleans(),
)
def test_a_stop_string_is_found_wherever_the_text_is_split(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    out, rest = "", text
    for size in [*sizes, len(text)]:
        out += matcher.push(rest[:size])
        rest = rest[size:]
    out += matcher.flush()
    expected = first_stop(text, stops)
    if expected is None:
        assert (out, matcher.matched) == (text, None)
    else:
        end, stop = expected
        assert (out, matcher.matched) == (text[: end if include else end - len(stop)], stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["</end>"], include=False)
    assert matcher.push("text</e") == "text"
    assert matcher.push("x") == "</ex"
    assert matcher.push("more") == "more"


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_ends_at_a_stop_string_across_tokens(include: bool) -> None:
    params = SamplingParams(stop="fox, the", include_stop_str_in_output=include)
    stream = TextStream(BYTE_LEVEL, params)
    ids = BYTE_LEVEL.core.encode("the quick fox, the dog").ids
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert text == ("the quick fox, the" if include else "the quick ")
    assert stream.stopped == "fox, the"
    assert stream.push(ids) == ""


def test_a_stop_string_within_the_first_min_tokens_is_text() -> None:
    stream = TextStream(CharDecoder(), SamplingParams(stop="ab", min_tokens=2))
    assert stream.push([ord(c) for c in "abxaby"]) == "abx"
    assert stream.stopped == "ab"


def test_a_stop_string_may_begin_within_one_that_came_too_early() -> None:
    stream = TextStream(CharDecoder(), SamplingParams(stop="aba", min_tokens=3))
    assert stream.push([ord(c) for c in "ababa"]) == "ab"
    assert stream.stopped == "aba"


def test_what_was_held_back_comes_when_no_more_tokens_do() -> None:
    stream = TextStream(CharDecoder(), SamplingParams(stop="abc"))
    assert stream.push([ord(c) for c in "xab"]) == "x"
    assert stream.finish() == "ab"
    assert stream.stopped is None


def test_a_long_self_similar_stop_string_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"], include=False)
    start_s = time.process_time()
    out = "".join(matcher.push("a") for _ in range(20_000))
    assert time.process_time() - start_s < 2.0
    assert len(out) == 20_000 - 1023
