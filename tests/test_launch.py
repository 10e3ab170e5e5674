"""Ranks as child processes: how they start, die and are ended.

Most tests run `LocalRanks` with a small program in place of a rank; the last run the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncmoe import configfile
from asyncmoe.config import Config
from asyncmoe.deadline import Deadline
from asyncmoe.directory import MemoryDirectory
from asyncmoe.errors import RankFailed
from asyncmoe.frontend.bootstrap import with_token
from asyncmoe.frontend.launch import Cluster, form_cluster
from asyncmoe.frontend.localranks import RANK_COMMAND, LocalRanks
from asyncmoe.frontend.world import Rendezvous, fit_to_world
from asyncmoe.world import World

MEETING = Rendezvous("127.0.0.1", 29500, "test", agent_hosts=False)
REPORT = "import os, sys; line = sys.stdin.readline();"


def config_of(ranks: int) -> Config:
    config = configfile.load(environ={}, overrides={"cluster.ranks": ranks, "device.threads": 1})
    return with_token(fit_to_world(config, World(0, ranks, 0, ranks)), "a-secret")


@asynccontextmanager
async def running(program: str, ranks: int = 2) -> AsyncIterator[LocalRanks]:
    """Ranks that run the Python `program`."""
    local = LocalRanks(config_of(ranks), MEETING, (sys.executable, "-c", program))
    await local.start()
    try:
        yield local
    finally:
        await local.stop(0.0)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_child_gets_config_world_threads_and_token_and_none_in_its_arguments() -> None:
    program = textwrap.dedent("""
        import json, os, sys
        line, arguments = sys.stdin.readline(), open("/proc/self/cmdline").read()
        names = "RANK WORLD_SIZE LOCAL_RANK MASTER_PORT OMP_NUM_THREADS".split()
        token = os.environ["ASYNCMOE_CLUSTER__TOKEN"]
        seen = [os.environ[name] for name in names]
        seen += [token, token in line + arguments, json.loads(line)["cluster"]["ranks"]]
        print(json.dumps([1, " ".join(map(str, seen))]))
        sys.exit(1)
    """)
    async with running(program) as local:
        with pytest.raises(RankFailed, match="1 2 1 29500 1 a-secret False 2"):
            await asyncio.wait_for(asyncio.shield(local.failed), 10)


@pytest.mark.parametrize("steps", range(6))
async def test_a_start_that_is_cancelled_at_any_step_leaves_no_child(steps: int) -> None:
    local = LocalRanks(config_of(3), MEETING, ("sleep", "60"))
    starting = asyncio.create_task(local.start())
    for _ in range(steps):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    await local.stop(0.0)
    assert children() == ""


async def test_dead_rank_without_a_word_is_reported_with_its_last_lines() -> None:
    program = REPORT + "sys.stderr.write('disk on fire\\n'); sys.exit(3)"
    async with running(program) as local:
        with pytest.raises(RankFailed, match=r"(?s)rank 1 failed: .*status 3.*disk on fire"):
            await asyncio.wait_for(asyncio.shield(local.failed), 10)


async def test_killed_rank_is_reported_with_the_signal() -> None:
    async with running("import time; time.sleep(60)") as local:
        os.kill(local.pids[1], signal.SIGKILL)

        with pytest.raises(RankFailed, match=r"rank 1 failed: .*SIGKILL"):
            await asyncio.wait_for(asyncio.shield(local.failed), 10)


async def test_rank_killed_after_the_start_is_logged_with_the_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running("import time; time.sleep(60)") as local:
        cluster = Cluster(config_of(2), (), MemoryDirectory(), Deadline(10), local)
        await cluster.start(asyncio.sleep(0))
        os.kill(local.pids[1], signal.SIGKILL)

        await until(lambda: "rank 1 failed: it was killed by signal SIGKILL" in caplog.text)


async def test_cause_is_reported_rather_than_its_consequences() -> None:
    program = REPORT + (
        "import time; rank = int(os.environ['RANK']);"
        "time.sleep(0.1 * (rank == 2));"
        "print('[2, \"no memory\"]' if rank == 2 else '[2, \"connection lost\"]');"
        "sys.exit(1)"
    )
    async with running(program, ranks=3) as local:
        with pytest.raises(RankFailed, match="rank 2 failed: no memory"):
            await asyncio.wait_for(asyncio.shield(local.failed), 10)


async def test_rank_that_ends_in_order_is_no_failure() -> None:
    async with running(REPORT) as local:
        await until(lambda: not local.pids)
        await asyncio.sleep(0.4)

        assert not local.failed.done()


async def test_what_a_child_writes_appears_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(REPORT + "sys.stderr.write('one\\n\\ntwo'); print('[1, 2]')") as local:
        await until(lambda: not local.pids)
        await local.close(1.0)

    captured = capfd.readouterr()
    assert captured.err == "[rank 1] one\n[rank 1] two\n"
    assert captured.out == ""


async def test_stop_terminates_and_leaves_nothing() -> None:
    async with running("import time; time.sleep(60)", ranks=3) as local:
        pids = list(local.pids.values())
        begin_s = time.monotonic()

        await local.stop(5.0)

        assert time.monotonic() - begin_s < 3
        assert len(pids) == 2
        assert not any(alive(pid) for pid in pids)
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_stop_kills_what_does_not_listen() -> None:
    deaf = "import signal, sys, time; signal.signal(15, signal.SIG_IGN)\n"
    deaf += "sys.stderr.write('deaf\\n'); time.sleep(60)"
    async with running(deaf) as local:
        pid = local.pids[1]
        await until(lambda: "deaf" in local.last_lines(1))
        begin_s = time.monotonic()

        await local.stop(0.5)

        assert 0.4 < time.monotonic() - begin_s < 3
        assert not alive(pid)


async def test_terminal_interrupt_does_not_reach_the_children() -> None:
    async with running("import time; time.sleep(60)") as local:
        assert os.getpgid(local.pids[1]) != os.getpgid(0)
        assert os.getsid(local.pids[1]) != os.getsid(0)


async def test_command_that_is_not_there_leaves_nothing() -> None:
    local = LocalRanks(config_of(3), MEETING, ("/nonexistent",))

    with pytest.raises(OSError, match="nonexistent"):
        await local.start()

    assert local.pids == {}


def test_a_rank_runs_no_code_of_the_directory_it_was_started_from(tmp_path: Path) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('code of someone else')")

    rank = subprocess.run(
        RANK_COMMAND, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    assert rank.stderr == "no configuration on standard input\n"


def test_ranks_can_be_started_from_another_thread() -> None:
    async def start_and_stop() -> int:
        async with running("import time; time.sleep(60)") as local:
            return len(local.pids)

    async def in_a_thread() -> int:
        return await asyncio.to_thread(asyncio.run, start_and_stop())

    assert asyncio.run(in_a_thread()) == 1


def test_real_rank_dies_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import asyncio
                from asyncmoe import configfile
                from asyncmoe.frontend.localranks import LocalRanks
                from asyncmoe.frontend.world import Rendezvous

                async def main():
                    config = configfile.load(environ={}, overrides={"cluster.ranks": 2})
                    meeting = Rendezvous("127.0.0.1", 29500, "test", agent_hosts=False)
                    local = LocalRanks(config, meeting)
                    await local.start()
                    print(local.pids[1], flush=True)
                    await asyncio.sleep(60)

                asyncio.run(main())
            """),
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    asyncio.run(until(lambda: not alive(child)))


async def test_error_of_a_real_rank_at_its_start_is_what_the_user_sees() -> None:
    config = configfile.load(
        environ={}, overrides={"cluster.ranks": 2, "model.name": "/no/such/checkpoint"}
    )
    cluster = await form_cluster(config, {})
    assert cluster.ranks is not None
    pids = cluster.ranks.pids

    with pytest.raises(RankFailed, match=r"rank 1 failed: .*no/such/checkpoint"):
        await cluster.start(cluster.directory.lookup("never", 60.0))

    assert not any(alive(pid) for pid in pids.values())
    await cluster.close()


async def test_rank_killed_while_it_starts_stops_the_others_within_seconds() -> None:
    cluster = await form_cluster(configfile.load(environ={}, overrides={"cluster.ranks": 3}), {})
    assert cluster.ranks is not None
    pids = cluster.ranks.pids
    begin_s = time.monotonic()

    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank 2 failed: .*SIGKILL"):
        await cluster.start(asyncio.sleep(60))

    assert time.monotonic() - begin_s < 5
    assert not any(alive(pid) for pid in pids.values())


async def test_failure_of_rank_0_ends_its_children() -> None:
    async def broken() -> None:
        raise ValueError("broken")

    cluster = await form_cluster(configfile.load(environ={}, overrides={"cluster.ranks": 2}), {})
    assert cluster.ranks is not None
    pids = cluster.ranks.pids

    with pytest.raises(ValueError, match="broken"):
        await cluster.start(broken())

    assert not any(alive(pid) for pid in pids.values())


def test_two_torchrun_agents_form_one_engine_without_code_of_their_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('code of someone else')")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["generate", "--prompt=Once", "--max-tokens=4", "--json", "--threads=1"]
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "torch.distributed.run",
                "--nnodes=2", "--nproc-per-node=1",
                f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}",
                "--no-python", Path(sys.executable).with_name("asyncmoe"), *arguments,
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    (answer, log), (nothing, _) = (agent.communicate(timeout=120) for agent in agents)

    assert [agent.returncode for agent in agents] == [0, 0], log
    assert json.loads(answer)["ranks"] == 2
    assert nothing == ""
