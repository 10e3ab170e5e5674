"""Several ranks in one loop, with a front end that only notes what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from asyncmoe.config import Config
from asyncmoe.directory import MemoryDirectory
from asyncmoe.messages import Abort, Admit, Ended, Message, TokensOut, Unable
from asyncmoe.rank import Rank
from asyncmoe.sampling import SamplingParams
from asyncmoe.world import World


class Cluster:
    """The ranks and what they said."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.end: dict[int, str] = {}
        self.message: dict[int, str] = {}
        self.unable: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._ids = itertools.count()
        self._home_of: dict[int, int] = {}
        self._homes = itertools.cycle(ranks[0].placement.home_ranks)
        ranks[0].on_front_end = self._note

    def submit(self, prompt: list[int], home: int | None = None, **sampling: Any) -> int:
        """Admit a greedy request on the next home rank in turn; returns its id."""
        request_id = next(self._ids)
        self._home_of[request_id] = next(self._homes) if home is None else home
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        message = Admit(request_id, prompt, params.to_wire())
        self.ranks[0].send(self._home_of[request_id], message)
        return request_id

    def abort(self, request_id: int) -> None:
        """Cancel a request."""
        self.ranks[0].send(self._home_of[request_id], Abort(request_id))

    def stage_calls(self, rank: int, method: str) -> list[tuple[Any, Any]]:
        """What a rank's stages are called with from now on, by this method of two arguments."""
        seen: list[tuple[Any, Any]] = []
        stages: Any = self.ranks[rank].executor._stages
        inner = getattr(stages, method)

        def record(step: Any, result: Any) -> None:
            seen.append((step, result))
            inner(step, result)

        setattr(stages, method, record)
        return seen

    async def until(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Wait until `condition()` holds; looked at whenever the front end is told something."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ended(self, *request_ids: int) -> None:
        """Wait until these requests have ended."""
        await self.until(lambda: all(i in self.end for i in request_ids))

    async def until_true(self, condition: Callable[[], bool]) -> None:
        """Wait for something that no message tells of."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Wait until nothing is in the layers and every slot, block and credit is back."""
        async with asyncio.timeout(20):
            while not all(map(idle, self.ranks)):  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)

    def _note(self, rank: int, message: Message) -> None:
        match message:
            case TokensOut():
                columns = (message.request_ids, message.tokens, message.finish)
                for request_id, token, finish in zip(*columns, strict=True):
                    self.tokens[request_id].append(token)
                    if finish is not None:
                        self.end[request_id] = finish
            case Unable():
                self.unable[rank] = message.reason
            case Ended():
                self.end[message.request_id] = message.reason
                self.message[message.request_id] = message.message
        self._changed.set()


def idle(rank: Rank) -> bool:
    """Whether the rank holds nothing of any request."""
    stats = rank.stats()
    held = stats["queued_rows"] + stats["outbox_rows"] + stats["outstanding_rows"]
    if rank.home is not None:
        held += stats["running_requests"] + stats["waiting_requests"] + stats["chunks"]
        held += stats["slots"] - stats["free_slots"] + stats["kv_blocks"] - stats["free_kv_blocks"]
    return bool(held == 0)


@contextlib.asynccontextmanager
async def cluster(
    ranks: int, checkpoint: Any = None, **sections: dict[str, Any]
) -> AsyncIterator[Cluster]:
    """`ranks` ranks of one loop; `sections` are those of the config."""
    sections["cluster"] = {"ranks": ranks, "token": "test", **sections.get("cluster", {})}
    config = Config.model_validate(sections)
    directory = MemoryDirectory()
    made = [Rank(config, World(r, ranks, r, ranks), directory, checkpoint) for r in range(ranks)]
    try:
        await asyncio.gather(*(rank.start() for rank in made))
        yield Cluster(made)
    finally:
        await asyncio.gather(*(rank.close() for rank in made))
