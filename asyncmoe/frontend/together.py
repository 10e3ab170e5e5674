"""Several coroutines at once, with the error of the first that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end. The first error cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
