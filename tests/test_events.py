"""Streams of events on the wire, as clients of either version of HTTP read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest

from asyncmoe.frontend.openai_api import Envelope
from asyncmoe.server import _library_log, running_server
from tests.servedmodel import make_served_checkpoint, served_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


async def raw_answer(
    url: str, version: str, connection: str = "close", **fields: object
) -> tuple[bytes, bytes]:
    """Head and body of a streamed completion, as they are on the wire up to its end."""
    body = json.dumps({"prompt": [5, 6], "temperature": 0, "stream": True, **fields}).encode()
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: {connection}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), rest


def tokens_of(events: list[bytes]) -> list[list[int]]:
    """The ids of each choice."""
    assert events[-1] == b"data: [DONE]"
    ids: list[list[int]] = [[], []]
    for event in events[:-1]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    return ids


async def test_both_versions_of_http_get_the_same_events(checkpoint: Path) -> None:
    flags = {"max_tokens": 9, "ignore_eos": True, "return_token_ids": True, "n": 2}
    async with running_server(served_config(checkpoint)) as server:
        old_head, old = await raw_answer(server.url, "1.0", **flags)
        async with asyncio.timeout(10):  # its end is that of the connection, whatever was asked
            assert await raw_answer(server.url, "1.0", "keep-alive", max_tokens=1)
        new_head, new = await raw_answer(server.url, "1.1", **flags)
    assert b"transfer-encoding: chunked" in new_head
    assert b"transfer-encoding" not in old_head
    chunks, left = [], new
    while not left.startswith(b"0\r\n"):
        size, _, left = left.partition(b"\r\n")
        chunks.append(left[: int(size, 16)])
        assert left[int(size, 16) :].startswith(b"\r\n")
        left = left[int(size, 16) + 2 :]
    assert left == b"0\r\n\r\n"
    assert all(chunk.endswith(b"\n\n") for chunk in chunks)  # an event is never torn
    found = [tokens_of(b"".join(chunks).split(b"\n\n")[:-1]), tokens_of(old.split(b"\n\n")[:-1])]
    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [9, 9]


@pytest.mark.parametrize("model", ["m", 'a "choices":[] b', "\\"])
def test_the_parts_around_a_choice_make_the_whole_object(model: str) -> None:
    envelope, rest = Envelope("text_completion", model), {"usage": None}
    before, behind = envelope.chunk_around(rest)
    choice = {"index": 0, "text": "]"}
    assert orjson.loads(before + orjson.dumps(choice) + behind) == {
        **envelope.chunk([choice]),
        **rest,
    }


async def test_a_client_that_leaves_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = _library_log()
    for error in (ConnectionResetError("gone"), ValueError("odd")):
        try:
            raise error
        except Exception:
            log.exception("Error handling request")
    assert [record.getMessage() for record in caplog.records] == [
        "Error handling request: ValueError: odd"
    ]
