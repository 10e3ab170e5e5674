"""A client of streamed completions that costs next to nothing, since it shares the server's cores.

It sends a request over a connection of its own, keeps the bytes that come, and looks at them once
all is over: what a client does with the text is not what is measured. As a program it serves
`ClientProcess`: a run per line of standard input, its seconds or its error on standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any
from urllib.parse import urlsplit

import uvloop


class BadAnswer(Exception):
    """The server answered something else than a whole stream."""


class Streams:
    """Clients of one server. `close` must be called."""

    def __init__(self, url: str) -> None:
        """`url`: where the server listens, without a path."""
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Stream a greedy answer of `new_tokens` to every prompt, all at once. Returns seconds.

        Raises `BadAnswer` if a stream does not bring them all.
        """
        begin_s = time.perf_counter()
        answers = self._runner.run(self._all(prompts, new_tokens))
        whole_s = time.perf_counter() - begin_s
        for answer in answers:
            found = count_tokens(answer)
            if found != new_tokens:
                raise BadAnswer(f"a stream brought {found} tokens of {new_tokens}")
        return whole_s

    def close(self) -> None:
        """End the clients' loop. Idempotent."""
        self._runner.close()

    async def _all(self, prompts: list[list[int]], new_tokens: int) -> list[bytes]:
        requests = [self._request(ids, new_tokens) for ids in prompts]
        return await asyncio.gather(*map(self._one, requests))

    def _request(self, ids: list[int], new_tokens: int) -> bytes:
        fields = {
            "prompt": ids,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _one(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        _, answer = await loop.create_connection(
            lambda: _Answer(loop, request), self._host, self._port
        )
        return await answer.whole


class _Answer(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes) -> None:
        self.whole: asyncio.Future[bytes] = loop.create_future()
        self._request, self._parts = request, list[bytes]()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self.whole.set_result(b"".join(self._parts))
        else:
            self.whole.set_exception(error)


class ClientProcess:
    """`Streams` in a process of its own, driven from a loop that must not wait for it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, url: str) -> ClientProcess:
        """`url` as for `Streams`."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, url, stdin=PIPE, stdout=PIPE, limit=1 << 20
            )
        )

    async def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """See `Streams.run`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompts, new_tokens]).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise BadAnswer("the client's process ended")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise BadAnswer(answer)
        return float(answer)

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def count_tokens(answer: bytes) -> int:
    """Tokens that the events of one whole response bring. Raises `BadAnswer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise BadAnswer(f"the server answered {answer[:300]!r}")
    lines = [line for line in dechunked(body).split(b"\n\n") if line]
    if not lines or lines[-1] != b"data: [DONE]":
        raise BadAnswer(f"a stream ended early, with {body[-200:]!r}")
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    if errors := [event["error"] for event in events if "error" in event]:
        raise BadAnswer(f"the server reported {errors[0]}")
    return sum(len(choice["token_ids"]) for event in events for choice in event["choices"])


def dechunked(body: bytes) -> bytes:
    """The content of a body in HTTP's chunked encoding. Raises `BadAnswer` if it is cut off."""
    parts, at = [], 0
    while True:
        size_text, _, _ = body[at : at + 32].partition(b"\r\n")
        try:
            size = int(size_text, 16)
        except ValueError:
            raise BadAnswer(f"a stream was cut off after {body[-200:]!r}") from None
        if size == 0:
            return b"".join(parts)
        begin = at + len(size_text) + 2
        parts.append(body[begin : begin + size])
        at = begin + size + 2


def main() -> None:
    streams = Streams(sys.argv[1])
    for line in sys.stdin:
        try:
            answer: float | str = streams.run(*json.loads(line))
        except (BadAnswer, OSError) as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)
    streams.close()


if __name__ == "__main__":
    main()
