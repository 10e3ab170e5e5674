"""Virtual clusters of the toy model, and runs of them under faults."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from asyncmoe.config import Config
from asyncmoe.errors import PeerLost
from asyncmoe.virtual.cluster import VirtualCluster, VirtualGroup, virtual_cluster
from asyncmoe.virtual.costs import ScatteredCosts
from asyncmoe.virtual.loop import VirtualLoop
from asyncmoe.virtual.run import run
from tests import toymodel

SMALL: dict[str, dict[str, Any]] = {
    "engine": {"prefill_chunk": 8, "max_requests": 3, "slots": 32},
    "kv": {"blocks": 48, "block_tokens": 4},
    "batch": {"attention_max_rows": 12, "expert_max_rows": 8},
    "transport": {"options": {"network": {"latency_us": 30.0, "jitter_us": 200.0}}},
}
PROMPTS = [[(3 * i + 7 * j) % 97 for j in range(1 + 5 * i)] for i in range(5)]
NEW_TOKENS = 3
SPEC = toymodel.spec(layers=2)


def sections(ranks: int, **changes: dict[str, Any]) -> Config:
    """SMALL with some keys changed."""
    names = {*SMALL, *changes}
    tables = {name: {**SMALL.get(name, {}), **changes.get(name, {})} for name in names}
    tables["cluster"] = {"ranks": ranks, "token": "test", **tables.get("cluster", {})}
    return Config.model_validate(tables)


@dataclass
class Ends:
    """A listener that notes how often requests get tokens and ends."""

    tokens: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, requests: Sequence[int], now_s: float) -> None:
        """See `Listener`."""
        for request in requests:
            self.tokens[request] = self.tokens.get(request, 0) + 1

    def on_end(self, request: int, reason: str) -> None:
        """See `Listener`."""
        self.reasons.setdefault(request, []).append(reason)
        self.changed.set()


class Toys:
    """One group of ranks with the toy model, and what its requests came to."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.ends = Ends()
        self.group: VirtualGroup = cluster.groups[0]
        self.front_end = self.group.front_end
        self.front_end.tokens = {}
        self.front_end.listen(self.ends)

    @property
    def tokens(self) -> dict[int, list[int]]:
        """By request."""
        assert self.front_end.tokens is not None
        return self.front_end.tokens

    def begin(self, requests: range = range(len(PROMPTS))) -> None:
        """Submit all prompts at once."""
        for request in requests:
            self.front_end.begin(request, PROMPTS[request % len(PROMPTS)], NEW_TOKENS)

    async def ended(self, count: int) -> None:
        """Wait until so many requests have ended."""
        async with asyncio.timeout(60):
            while len(self.ends.reasons) < count:
                self.ends.changed.clear()
                await self.ends.changed.wait()

    def check(self) -> None:
        """Each request ended once; those that went to their end have the right tokens, the others
        have none that is wrong."""
        # A rank that is cut off from the front end ends, as it should.
        assert all(isinstance(error, PeerLost) for error in self.group.failures.values())
        for request, reasons in self.ends.reasons.items():
            assert len(reasons) == 1, (request, reasons)
            got = self.tokens.get(request, [])
            assert got == REFERENCE[request % len(PROMPTS)][: len(got)], request
            if reasons == ["length"]:
                assert len(got) == NEW_TOKENS, request


TWINS = {"Turn.hear": "Executor._pump"}  # a compiled callback and the plain one that it stands for
REFERENCE = [toymodel.reference(prompt, NEW_TOKENS, SPEC) for prompt in PROMPTS]


@asynccontextmanager
async def toys(config: Config, seed: int = 0, **costs: float) -> AsyncIterator[Toys]:
    """A cluster of the toy model whose steps take times drawn from `seed`."""
    checkpoint = toymodel.checkpoint(SPEC)
    made = {r: ScatteredCosts(f"{seed} {r}", **costs) for r in range(config.cluster.ranks)}
    async with virtual_cluster(config, checkpoint, made.get) as cluster:
        yield Toys(cluster)


def play(
    config: Config, seed: int, act: Callable[[Toys, Random], Awaitable[None]], **costs: float
) -> str:
    """Run all prompts on a cluster while `act` does something to it, then check that everything
    came to its end and home. Returns a digest of all that happened, event for event."""
    digest = hashlib.blake2b(digest_size=8)

    def note(now_s: float, lane: str, callback: Callable[..., Any]) -> None:
        name = getattr(callback, "__qualname__", "")
        name = TWINS.get(name, name)
        digest.update(f"{now_s!r} {lane} {name}\n".encode())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.on_event = note
        async with toys(config, seed, **costs) as cluster:
            cluster.begin()
            await act(cluster, Random(seed))
            await cluster.ended(len(PROMPTS))
            cluster.check()
            await cluster.cluster.settled()

    run(main(), seed, slack_s=0.0)
    return digest.hexdigest()
