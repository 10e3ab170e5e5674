"""Server-sent events: one JSON object after the other on an HTTP response that stays open.

A token of every stream passes here in every step, while the device computes on the same cores. So
behind the head this writes to the connection itself, in HTTP's chunked encoding, and never waits;
who writes asks whether the client is behind.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from aiohttp import HttpVersion11, web

_FRAME_BYTES: Final = len(b"data: \n\n")
_ROOM_BYTES: Final = 16384  # that may wait in this process for the client


class EventWriter:
    """One response of server-sent events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None  # once the head is out
        self._chunked = request.version >= HttpVersion11  # HTTP/1.0 knows no chunks
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def begun(self) -> bool:
        """Whether the head is out."""
        return self._transport is not None

    @property
    def flows(self) -> bool:
        """Whether events may be written now: the head is out and the client is not behind."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() <= _ROOM_BYTES

    async def open(self) -> None:
        """Wait until events may be written; the head goes out if it is not. Raises
        `ConnectionError`."""
        if self.begun:
            await self._request.writer.drain()
        else:
            if self._chunked:
                self._response.enable_chunked_encoding()
            else:
                self._response.force_close()  # nothing else says where it ends
            await self._response.prepare(self._request)
            self._transport = self._request.transport
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")

    def write(self, event: dict[str, Any]) -> None:
        """Write an event to a stream that is open."""
        self.write_json(orjson.dumps(event))

    def write_json(self, before: bytes, choice: bytes = b"", behind: bytes = b"") -> None:
        """`write` for an event that is JSON already, in three parts. Raises `ConnectionError`."""
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if self._chunked:
            size = len(before) + len(choice) + len(behind) + _FRAME_BYTES
            data = b"%x\r\ndata: %b%b%b\n\n\r\n" % (size, before, choice, behind)
        else:
            data = b"data: %b%b%b\n\n" % (before, choice, behind)
        self._transport.write(data)

    async def finish(self) -> web.StreamResponse:
        """Write the last event."""
        self.write_json(b"[DONE]")
        await self._response.write_eof()
        return self._response
