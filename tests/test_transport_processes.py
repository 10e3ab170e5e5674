"""What every transport promises, between real processes: sizes, deaths, standstill, no residue."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport_kit import BETWEEN_PROCESSES
from tests.transport_worker import STEPS

SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 3.0
TIMEOUT_S = 90.0  # of a scenario
DEATH_KNOWN_S = 5.0  # the latest


@pytest.fixture(params=BETWEEN_PROCESSES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    """No test leaves a segment in shared memory that nobody uses."""
    before = set(os.listdir(SHARED_MEMORY))
    yield
    deadline_s = time.monotonic() + GRACE_S
    while (left := unused(set(os.listdir(SHARED_MEMORY)) - before)) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.05)
    assert not left, f"left in {SHARED_MEMORY}: {left}"


def unused(names: set[str]) -> set[str]:
    """Those that no process has mapped: others on this machine make segments too."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"{SHARED_MEMORY}/{name}" not in text}
    return names


class Workers:
    """The process that makes all ranks; a new one if a scenario did not come to its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = self._started()

    def run(self, transport: str, scenario: str, world: int, folder: Path) -> list[Any]:
        """Each rank's report, or None of one that was killed."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{transport} {scenario} {world} {folder}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            self.close()
            pytest.fail(f"scenario {scenario} of {transport} has no end")
        process.stdout.readline()
        reports = [folder / f"report-{rank}.json" for rank in range(world)]
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]

    def close(self) -> None:
        """End the process and all of its ranks."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    @staticmethod
    def _started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.transport_worker"],
            cwd=Path(__file__).parents[1],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


NOTHING = {"live": 0, "left": []}


def test_everything_arrives_in_order_and_unchanged_and_nothing_is_left(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    for report in workers.run(name, "stream", 3, tmp_path):
        assert report == {"wrong": [], "arrived": 2 * 15, "lost": [], "failed_posts": 0, **NOTHING}


def test_payloads_from_nothing_to_64_mib_and_of_every_dtype_arrive_unchanged(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    for report in workers.run(name, "sizes", 2, tmp_path):
        assert report == {"wrong": [], "in_order": True, "errors": [], **NOTHING}


def test_what_two_ranks_share_is_there_for_one_that_outlives_the_other(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    seen, seen_by_peer = ([11, 11], [10]) if name in ("auto", "shm") else (None, None)
    report, victim = workers.run(name, "share", 2, tmp_path)
    assert victim is None
    assert report == {"seen": seen, "seen_by_peer": seen_by_peer, "after": None, **NOTHING}


def test_ranks_killed_at_every_step_are_lost_soon_and_the_healthy_pair_goes_on(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    reports = workers.run(name, "kill", 2 + len(STEPS), tmp_path)
    assert reports[2:] == [None] * len(STEPS)
    for report in reports[:2]:
        late_s = report.pop("late_s")
        assert max(late_s.values()) < DEATH_KNOWN_S, late_s
        assert report == {"wrong": [], "healthy_lost": [], "arrived": 15, **NOTHING}


def test_a_rank_killed_while_all_connect_ends_the_start_of_the_others_in_time(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    first, victim, last = workers.run(name, "kill_start", 3, tmp_path)
    assert victim is None
    for report in (first, last):
        assert report.pop("took_s") < 6.0
        assert report.pop("outcome") in ("TimeoutError", "RankFailed")
        assert report == NOTHING


def test_a_rank_that_stands_still_costs_its_sender_bounded_memory_and_others_nothing(
    workers: Workers, name: str, tmp_path: Path
) -> None:
    sender, stopped, other = workers.run(name, "stop", 3, tmp_path)
    assert sender.pop("grown_mib") < 150  # of the 300 MiB that wait
    assert other.pop("grown_mib") < 150
    assert sender == other == {"wrong": [], **NOTHING}
    assert stopped == {"in_order": True, **NOTHING}
