"""Server-sent events: one JSON object after the other on an HTTP response that stays open.

A token of every stream passes here in every step, while the device computes on the same cores. So
behind the first event this writes to the connection itself, in HTTP's chunked encoding, without a
lock or a coroutine of its own; it waits only while a client is behind.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web


class EventWriter:
    """One response of server-sent events; its head goes out with the first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._turn = asyncio.Lock()  # several answers may want to begin the stream
        self._flowing = False  # head and first event are out
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def begun(self) -> bool:
        """Whether the status line is out."""
        return self._response.prepared

    async def send(self, event: dict[str, Any]) -> None:
        """Send one event; waits while the client is behind."""
        await self.send_json(orjson.dumps(event))

    async def send_json(self, *pieces: bytes) -> None:
        """`send` for an event that is JSON already, in pieces. Raises `ConnectionError`."""
        data = b"".join((b"data: ", *pieces, b"\n\n"))
        if not self._flowing or not self._response.chunked:  # HTTP/1.0 knows no chunks
            await self._write_in_turn(data)
        elif self._write_chunk(data):
            await self._request.writer.drain()

    async def finish(self) -> web.StreamResponse:
        """Send the last event."""
        await self.send_json(b"[DONE]")
        await self._response.write_eof()
        return self._response

    async def _write_in_turn(self, data: bytes) -> None:
        async with self._turn:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(data)
            self._flowing = True

    def _write_chunk(self, data: bytes) -> bool:
        """Returns whether some of it still waits in this process."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return bool(transport.get_write_buffer_size())
