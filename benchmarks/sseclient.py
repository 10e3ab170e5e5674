"""A client of streamed completions that costs next to nothing, since it shares the server's cores.

It sends each request over a connection of its own, which stays open for the next one as those of a
client's pool do, keeps the bytes that come, and looks at them once all is over: what a client does
with the text is not what is measured. Nor is what its reading costs, which has a machine of its own
elsewhere: it reads in what time the server leaves, where the system lets it ask for that. Until
then the kernel keeps what came, though the server sent every event by itself. As a program it
serves `ClientProcess`: a run per line of standard input, its seconds or its error on standard
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
HEAD = b"HTTP/1.1 200 "
LAST_CHUNK = b"\r\n0\r\n\r\n"  # the answer is whole; no event holds this


class BadAnswer(Exception):
    """The server answered something else than a whole stream."""


class Streams:
    """Clients of one server. `close` must be called."""

    def __init__(self, url: str) -> None:
        """`url`: where the server listens, without a path."""
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._address = address.hostname, address.port
        self._connections: list[socket.socket] = []
        self._reader = ThreadPoolExecutor(1, initializer=give_way)

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Stream a greedy answer of `new_tokens` to every prompt, all at once. Returns seconds
        from the first request to the last answer's end.

        Raises `BadAnswer` if a stream does not bring them all.
        """
        requests = [self._request(ids, new_tokens) for ids in prompts]
        while len(self._connections) < len(requests):
            self._connections.append(socket.create_connection(self._address))
        try:
            begin_s = time.perf_counter()
            answers = self._exchange(requests)
            whole_s = time.perf_counter() - begin_s
            found = [count_tokens(answer) for answer in answers]
        except (BadAnswer, OSError):
            self.close()
            raise
        if found != [new_tokens] * len(prompts):
            raise BadAnswer(f"streams brought {found} tokens, not {new_tokens} each")
        return whole_s

    def close(self) -> None:
        """Close the connections. Idempotent."""
        while self._connections:
            self._connections.pop().close()

    def _exchange(self, requests: list[bytes]) -> list[bytes]:
        """The whole answer to each request, as it is on the wire."""
        asked = self._connections[: len(requests)]
        for connection, request in zip(asked, requests, strict=True):
            connection.sendall(request)
        return self._reader.submit(read_answers, asked).result()

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
        host, port = self._address
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


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


def give_way() -> None:
    """From here on this thread has what time of the processors nobody else wants."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def read_answers(connections: list[socket.socket]) -> list[bytes]:
    """The whole answer that comes over each, as it is on the wire."""
    poll = select.poll()
    parts: dict[int, list[bytes]] = {}
    reads = {}
    for connection in connections:
        parts[connection.fileno()] = []
        reads[connection.fileno()] = connection.recv
        poll.register(connection, select.POLLIN)
    while reads:
        for number, _ in poll.poll():
            data = reads[number](READ_BYTES)
            parts[number].append(data)
            if not data or is_over(parts[number]):
                poll.unregister(number)
                del reads[number]
    return [b"".join(each) for each in parts.values()]


def is_over(parts: list[bytes]) -> bool:
    """Whether an answer ends with its latest part, or is none that streams."""
    return b"".join(parts[-2:]).endswith(LAST_CHUNK) or not parts[0].startswith(HEAD)


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
