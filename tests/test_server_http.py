"""What is no HTTP, or announces too much: over bare sockets, since no client sends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from asyncmoe.server import Server, running_server
from tests.servedmodel import make_served_checkpoint, served_config

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[Server]:
    async with running_server(served_config(checkpoint)) as server:
        yield server


async def status_line(server: Server, head: bytes) -> bytes:
    """What the server answers first to a request that goes on with `head`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    writer.write(POST + head)
    async with asyncio.timeout(5):
        answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_body_that_is_announced_as_too_long_is_not_waited_for(server: Server) -> None:
    assert b" 413 " in await status_line(server, b"Content-Length: 99999999999\r\n\r\n")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -5\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_what_is_no_http_costs_its_sender_the_connection_and_one_line_of_log(
    server: Server, head: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("asyncmoe"), "propagate", True)
    assert b" 400 " in await status_line(server, head)
    assert "Traceback" not in caplog.text
    assert all(len(record.getMessage().splitlines()) == 1 for record in caplog.records)
