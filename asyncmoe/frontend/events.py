"""Server-sent events: one JSON object after the other on an HTTP response that stays open."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web


class EventWriter:
    """One response of server-sent events; its head goes out with the first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._turn = asyncio.Lock()  # several answers share the stream
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
        await self._write(orjson.dumps(event))

    async def finish(self) -> web.StreamResponse:
        """Send the last event."""
        await self._write(b"[DONE]")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        async with self._turn:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(b"data: " + data + b"\n\n")
