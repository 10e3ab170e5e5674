"""The example of two machines joined by a slow wire, as network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_hosts.py"


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "making network namespaces needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 is not installed"
    name = f"moe{os.getpid()}x"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine makes no network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def test_two_machines_on_a_slow_wire_give_the_tokens_of_one_rank() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--max-tokens=12", "--rate=20mbit", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"]
    assert result["transport"] == "auto (tcp)"  # not shm: these are two machines
    assert result["sent_bytes"] > 12 * 4 * 128 * 2  # rows of four layers did cross the wire
