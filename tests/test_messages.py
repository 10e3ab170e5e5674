"""Control messages: what was encoded is decoded, and anything else costs its sender alone."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, get_args

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncmoe.errors import ProtocolError
from asyncmoe.frontend.engine import AsyncEngine
from asyncmoe.messages import (
    Abort,
    Admit,
    Credit,
    Discard,
    Ended,
    Message,
    Muster,
    Shutdown,
    Stats,
    StatsRequest,
    TokensOut,
    Unable,
    decode,
    encode,
)
from asyncmoe.rank import Rank
from asyncmoe.sampling import SamplingParams
from tests import toymodel
from tests.cluster import cluster

EXAMPLES: tuple[Message, ...] = (
    Admit(12, [1, 2, 3], {"temperature": 0.5, "seed": 3, "max_tokens": 4}),
    Abort(12),
    Discard([1, 2], [0, 7]),
    Credit(1),
    TokensOut([1, 12], [3, 4], [None, "stop"], [False, True], [None, [-1.0, [1, 2], [-1.0, -2]]]),
    Ended(12, "failed", "why", None),
    Unable("a link is lost"),
    StatsRequest(),
    Stats({"busy_s": 1.5, "rows": 3}),
    Muster("able", rows=3),
    Shutdown("over"),
)
# Text as it would be in a name, and numbers at the ends of what columns hold.
ODD = st.sampled_from([-1, 0, 2**31, 2**32, 2**63, 2**64 - 1, 1e300, -0.5, True, None, "", "stop"])
ANYTHING = st.recursive(
    ODD | st.integers(-5, 200) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
TOKENS = st.lists(st.sampled_from([0, 1, 96, 97, 5000, 2**31, 2**63, 2**64 - 1]), max_size=3)
SAMPLING = st.dictionaries(
    st.sampled_from([item.name for item in fields(SamplingParams)]), ANYTHING, max_size=3
)
# Of the right types throughout, so that they get as far as the tables of a home.
ADMITS = st.builds(
    Admit,
    st.integers(10, 10**6),  # one in use is refused early
    st.just([1, 2, 3]) | st.lists(st.sampled_from([0, 96, 97, 2**32 - 1]), max_size=3),
    st.fixed_dictionaries(
        {"max_tokens": st.just(3)},
        optional={
            "stop_token_ids": TOKENS,
            "logit_bias": TOKENS.map(lambda tokens: [[token, 1.5] for token in tokens]),
            "min_tokens": st.sampled_from([0, 3]),
        },
    ),
)


@st.composite
def almost_messages(draw: st.DrawFn) -> bytes:
    """One of the examples, with some of its fields replaced, left out or made up."""
    example = draw(st.sampled_from(EXAMPLES))
    values: Any = asdict(example)
    if "sampling" in values and draw(st.booleans()):
        values["sampling"] = draw(SAMPLING)
    for name in draw(st.lists(st.sampled_from([*values, "more"]), max_size=2)):
        if draw(st.integers(0, 5)):
            values[name] = draw(ANYTHING)
        else:
            values.pop(name, None)
    return orjson.dumps([type(example).__name__, values])


NOT_UNDERSTOOD = st.binary(max_size=40) | ANYTHING.map(orjson.dumps)
DATA = almost_messages() | ADMITS.map(encode) | NOT_UNDERSTOOD


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_was_encoded_is_decoded(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_of_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(get_args(Message))


@given(DATA)
def test_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b'["TokensOut", {"request_ids": [1], "tokens": [1, 2], "finish": [null],'
        b' "stop_token": [false], "logprobs": [null]}]',
        b'["Admit", {"request_id": 1, "prompt": [18446744073709551615], "sampling": {}}]',
        b'["Admit", {"request_id": 1e300, "prompt": [1], "sampling": {}}]',
        b"[" * 100_000,
        b'["Muster", {"word": "charge"}]',
        b'["Muster", {"word": "go\\n"}]',
        b'["Muster", {"number": 1}]',
        b'["Muster", {"word": "go", "number": -1}]',
        b'["Muster", {"word": "go", "number": 1099511627776}]',
        b'["Muster", {"word": "able", "rows": 1.5}]',
    ],
    ids=["columns", "token", "number", "depth", *["word"] * 3, *["march"] * 2, "rows"],
)
def test_values_that_later_code_could_not_hold_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not understood"):
        decode(data)


def test_a_long_list_of_wrong_values_is_refused_at_its_first() -> None:
    data = encode(Discard([-1] * 100_000, [0]))

    with pytest.raises(ProtocolError, match="1 validation error"):
        decode(data)


@pytest.mark.parametrize("message", [Admit(1, [1], {}), Abort(1), StatsRequest(), Shutdown("")])
async def test_orders_come_from_the_front_end_alone(message: Message) -> None:
    async with cluster(3, toymodel.checkpoint(), transport={"name": "inproc"}) as made:
        with pytest.raises(ProtocolError, match="from the front end only"):
            made.ranks[1].on_message(2, encode(message))

        assert not made.ranks[1].stopped.done()


async def test_ranks_outlive_whatever_control_messages_they_get() -> None:
    async with cluster(2, toymodel.checkpoint(), transport={"name": "inproc"}) as made:
        front, other = made.ranks
        engine = AsyncEngine(front.config, front, None)
        greedy = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
        running = engine.generate([1, 2, 3], greedy)
        await anext(aiter(running))  # so that made-up tokens meet a request, number 1

        @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
        @given(DATA, st.booleans())
        def bombard(data: bytes, at_front: bool) -> None:
            if not (not at_front and b"Shutdown" in data):  # which rank 1 obeys
                deliver(front if at_front else other, data)

        bombard()
        await running.aclose()
        fresh = engine.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
        answer = await fresh.complete()

        assert len(answer.token_ids) == 5
        assert not front.stopped.done()
        assert not other.stopped.done()
        await engine.close()


def deliver(rank: Rank, data: bytes) -> None:
    """As the transport does, from the other of two ranks: a `ProtocolError` is the sender's."""
    try:
        rank.on_message(1 - rank.rank, data)
    except ProtocolError:
        return
    assert not rank.stopped.done(), data
