"""A directory for ranks that live in one process."""

from __future__ import annotations

import asyncio

from asyncmoe.errors import RankFailed


class MemoryDirectory:
    """A `Directory` in a dict: strings for any transport, and objects for ranks of one loop."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._failure: tuple[int, str] | None = None  # rank and its own message
        self._changed = asyncio.Event()

    def publish(self, key: str, value: str) -> None:
        """Make `value` visible to all ranks."""
        self.offer(key, value)

    def offer(self, key: str, value: object) -> None:
        """Like `publish`, for an object that ranks of this process share."""
        self._values[key] = value
        self._wake()

    def fail(self, rank: int, message: str) -> None:
        """Let all who wait, now or later, know that `rank` failed at start-up."""
        self._failure = (rank, message)
        self._wake()

    async def lookup(self, key: str, timeout_s: float) -> str:
        """Wait for `key`. Raises `RankFailed` if a rank failed meanwhile, `TimeoutError`."""
        return str(await self.find(key, timeout_s))

    async def find(self, key: str, timeout_s: float) -> object:
        """Wait for what was offered under `key`. Raises as `lookup`."""
        try:
            async with asyncio.timeout(timeout_s):
                while key not in self._values:
                    if self._failure is not None:
                        raise RankFailed(*self._failure)
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"nothing published under {key!r} after {timeout_s:g} s") from None
        return self._values[key]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
