"""The ranks of this machine as child processes of rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from asyncmoe.cli.rank_main import TOKEN_VARIABLE
from asyncmoe.config import Config
from asyncmoe.errors import RankFailed
from asyncmoe.frontend.world import Rendezvous, world_variables
from asyncmoe.world import World

# -P: code is found where asyncmoe is installed, never in whatever directory this was started from.
RANK_COMMAND = (sys.executable, "-P", "-m", "asyncmoe.cli.rank_main")
LAST_LINES = 5  # of a dead rank's log, shown when it could not say itself why it died
SETTLE_S = 0.3  # ranks that die of one cause die together; the cause is then looked for among all
REAP_S = 1.0


@dataclass(slots=True)
class _Child:
    rank: int
    process: asyncio.subprocess.Process
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    report: bytes = b""

    def failure(self) -> RankFailed | None:
        """Why it ended, if it has and was not told to."""
        status = self.process.returncode
        if status in (None, 0):
            return None
        with contextlib.suppress(ValueError):
            rank, message = orjson.loads(self.report)
            return RankFailed(int(rank), str(message))
        return RankFailed(self.rank, _last_words(status or 0, self.lines))


class LocalRanks:
    """Ranks 1 … N-1 of one machine, as children of this process.

    Promises:
    - a child never outlives this process, not even when it is killed with SIGKILL;
    - a signal from the terminal does not reach the children: this process ends them in order;
    - what a child writes appears on standard error, each line with the rank before it;
    - `failed` gets the `RankFailed` of the rank that died first, with that rank's own error.
    """

    def __init__(
        self, config: Config, rendezvous: Rendezvous, command: Sequence[str] = RANK_COMMAND
    ) -> None:
        """For the `cluster.ranks` - 1 other ranks of `config`, whose token and threads are set."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(_retrieve)
        self._config, self._rendezvous, self._command = config, rendezvous, command
        self._children: list[_Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start the processes; they load and connect on their own. Raises `OSError`."""
        starting: asyncio.Task[None] | None = None
        try:
            for rank in range(1, self._config.cluster.ranks):
                starting = asyncio.create_task(self._start(rank))
                await asyncio.shield(starting)
        except BaseException:
            if starting is not None:  # else its process would be there, and known to nobody
                await asyncio.wait([starting])
            await self.stop(0.0)
            raise

    async def close(self, timeout_s: float) -> None:
        """Wait for ranks that were told to end; what has not by `timeout_s` is killed."""
        self._stopping = True
        await self._wait(timeout_s)
        await self.stop(0.0)

    async def stop(self, timeout_s: float) -> None:
        """Terminate the processes; what is left after `timeout_s` is killed. Idempotent."""
        self._stopping = True
        if timeout_s > 0:
            self._signal(signal.SIGTERM)
            await self._wait(timeout_s)
        self._signal(signal.SIGKILL)
        await self._wait(REAP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        self.failed.cancel()

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that is still running."""
        return {c.rank: c.process.pid for c in self._children if c.process.returncode is None}

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that the process of `rank` has written to its standard error."""
        return next(list(child.lines) for child in self._children if child.rank == rank)

    async def _start(self, rank: int) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment(rank),
                start_new_session=True,  # the terminal's SIGINT is for this process alone
            )
        except OSError as error:  # uvloop's does not name the command
            raise OSError(error.errno, error.strerror, self._command[0]) from None
        child = _Child(rank, process)
        self._children.append(child)
        self._tasks.append(asyncio.create_task(self._watch(child)))
        assert process.stdin is not None
        process.stdin.write(
            self._config.model_dump_json(exclude={"cluster": {"token"}}).encode() + b"\n"
        )

    def _environment(self, rank: int) -> Mapping[str, str]:
        size = self._config.cluster.ranks
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
            **world_variables(World(rank, size, rank, size), self._rendezvous),
            "OMP_NUM_THREADS": str(self._config.device.threads),
            TOKEN_VARIABLE: self._config.cluster.token,
        }

    async def _watch(self, child: _Child) -> None:
        assert child.process.stdout is not None
        assert child.process.stderr is not None
        child.report, _ = await asyncio.gather(
            child.process.stdout.read(), _pass_on(child, child.process.stderr)
        )
        await child.process.wait()
        if child.failure() is None or self._stopping:
            return
        await asyncio.sleep(SETTLE_S)
        if not self.failed.done():
            self.failed.set_exception(self._cause())

    def _cause(self) -> RankFailed:
        """Among all that have failed: a rank's own report, else a death without one."""
        dead = [(child, failure) for child in self._children if (failure := child.failure())]
        own = [f for child, f in dead if child.report and f.rank == child.rank]
        silent = [f for child, f in dead if not child.report]
        return [*own, *silent, *(f for _, f in dead)][0]

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    async def _wait(self, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()


async def _pass_on(child: _Child, stream: asyncio.StreamReader) -> None:
    rest = b""
    while piece := await stream.read(65536):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > 65536:  # a line without end is cut rather than collected
            lines, rest = [*lines, rest], b""
        for line in lines:
            _show(child, line)
    if rest:
        _show(child, rest)


def _show(child: _Child, line: bytes) -> None:
    text = line.decode(errors="replace").rstrip("\r")
    if text.strip():
        child.lines.append(text)
        print(f"[rank {child.rank}] {text}", file=sys.stderr, flush=True)


def _last_words(status: int, lines: Sequence[str]) -> str:
    if status < 0:
        how = f"it was killed by signal {signal.Signals(-status).name}"
    else:
        how = f"it ended with exit status {status}"
    return how + "".join(f"\n    {line}" for line in lines)


def _retrieve(failed: asyncio.Future[None]) -> None:
    if not failed.cancelled():
        failed.exception()  # whoever did not wait for it does not want asyncio's warning either
