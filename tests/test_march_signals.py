"""Real processes in the middle of a march: one is killed, stopped or told to end, or time is up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from asyncmoe import AsyncEngine, SamplingParams, configfile, native
from asyncmoe.errors import AsyncMoeError
from tests.servedmodel import make_served_checkpoint

pytestmark = pytest.mark.skipif(
    native.kernels is None or native.columns is None, reason="nothing is compiled"
)

CONTEXT = 1 << 16  # no request ends by itself
PEER_TIMEOUT_S = 1.5
GREEDY = SamplingParams(temperature=0.0, max_tokens=CONTEXT - 8, ignore_eos=True)

# Rank 0 lives in the server's process; a march without a request that ends goes on by itself.
SERVE = """
import sys
from asyncmoe.cli.main import main
from asyncmoe.models.decoder import Decoder

def march(self, walk, *others, inner=Decoder.march):
    print("a march of", len(walk.batch.positions), "row", file=sys.stderr, flush=True)
    return inner(self, walk, *others)

Decoder.march = march
sys.exit(main())
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("march"), max_position_embeddings=CONTEXT)


def settings(checkpoint: Path) -> dict[str, Any]:
    return {
        "model.name": str(checkpoint),
        "cluster.ranks": 2,
        "cluster.peer_timeout_s": PEER_TIMEOUT_S,
        "transport.name": "shm",
        "device.threads": 1,
        "kv.blocks": 2 * CONTEXT // 16,
        "log.level": "warning",
    }


@asynccontextmanager
async def running(checkpoint: Path, **changes: Any) -> AsyncIterator[AsyncEngine]:
    config = configfile.load(environ={}, overrides=settings(checkpoint) | changes)
    async with asyncio.timeout(60):
        engine = await AsyncEngine.start(config)
    try:
        yield engine
    finally:
        await engine.close()


def children() -> list[int]:
    return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


class Answers:
    """Two requests, of two homes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.tokens = 0
        self.ends = [asyncio.create_task(self._read([5 + i, 7, 9])) for i in range(2)]

    async def _read(self, prompt: list[int]) -> str:
        try:
            async for _ in self._engine.generate(prompt, GREEDY):
                self.tokens += 1
        except AsyncMoeError as error:
            return str(error)
        return "done"

    async def march(self) -> None:
        """Wait until ranks march: there are tokens, but no parcels."""
        async with asyncio.timeout(20):
            while True:
                tokens, parcels = self.tokens, await self._parcels()
                await asyncio.sleep(0.1)
                if self.tokens > tokens and parcels == await self._parcels() is not None:
                    return

    async def _parcels(self) -> list[int] | None:
        """That each rank has sent; None before all have marched."""
        stats = list((await self._engine.stats()).values())
        all_have = len(stats) == 2 and all(each["marches"] for each in stats)
        return [each["sent_parcels"] for each in stats] if all_have else None


@pytest.mark.parametrize(
    ("how", "within_s"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, PEER_TIMEOUT_S + 5.0)]
)
async def test_a_rank_that_is_gone_in_a_march_ends_it_by_name(
    checkpoint: Path, how: signal.Signals, within_s: float
) -> None:
    async with running(checkpoint) as engine:
        answers = Answers(engine)
        await answers.march()
        (rank,) = children()
        begin_s = time.monotonic()
        os.kill(rank, how)
        ends = await asyncio.wait_for(asyncio.gather(*answers.ends), 20)
        assert time.monotonic() - begin_s < within_s
        assert all("rank 1" in end for end in ends), ends
        cpu_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - cpu_s < 0.25  # nobody spins
        begin_s = time.monotonic()
        await asyncio.wait_for(engine.close(), 20)
        assert time.monotonic() - begin_s < 10
        assert children() == []


async def test_requests_whose_time_is_up_end_in_a_march(checkpoint: Path) -> None:
    async with running(checkpoint, **{"engine.request_timeout_s": 4.0}) as engine:
        answers = Answers(engine)
        await answers.march()
        ends = await asyncio.wait_for(asyncio.gather(*answers.ends), 20)
        assert all("engine.request_timeout_s = 4" in end for end in ends), ends
        again = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        assert len([out async for out in engine.generate([5, 7, 9], again)]) > 0


def test_a_server_that_is_told_to_end_in_a_march_ends(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", "--model", str(checkpoint), "--ranks", "2",
         "--threads", "1", "--port", "0", "--served-name", "test"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    url = process.stdout.readline().split()[-1]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    stream = client.completions.create(
        model="test", prompt="x", max_tokens=20_000, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(stream)
    while "a march of 1 row" not in process.stderr.readline():
        assert process.poll() is None
    begin_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - begin_s < 5
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
