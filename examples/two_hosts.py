"""One engine over two "machines" joined by a slow wire, on this machine alone. Needs root, Linux.

Each machine is a network namespace with one end of a veth pair; `tc … tbf` caps both directions at
100 Mbit/s. A rank runs in each namespace, found by the variables that torchrun sets, so that the
ranks meet over the network as two real machines would: `auto` chooses `tcp` for the pair. The same
prompt is then answered by one rank alone, and the token ids must be equal.

    sudo .venv/bin/python examples/two_hosts.py --json

Prints one JSON object: the two answers' rates, what moved the parcels, the bytes on the wire and
the wire's rate. Namespaces are named after this process and are removed at the end, whatever
happens; processes are ended by their ids.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ADDRESSES = ("10.213.0.1", "10.213.0.2")
PORT = 29500  # of the ranks' meeting; nothing else listens in the namespaces
ASYNCMOE = Path(sys.executable).with_name("asyncmoe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--scheduler", default="defrag_aging")
    parser.add_argument("--rate", default="100mbit", help="of each direction, as tc takes it")
    parser.add_argument("--json", action="store_true", help="the result on one line")
    asked = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("two_hosts.py: making network namespaces needs root")
    flags = [f"--model={asked.model}", f"--prompt={asked.prompt}", "--json", "--threads=1"]
    flags += [f"--max-tokens={asked.max_tokens}", f"--scheduler={asked.scheduler}"]
    with two_namespaces(asked.rate) as names:
        before = sent_bytes(names[0])
        two = answer(names, [*flags, f"--transport={asked.transport}"])
        wire_bytes = sent_bytes(names[0]) - before
    one = json.loads(run([str(ASYNCMOE), "generate", *flags]))
    result = {
        "rate": asked.rate,
        "transport": two["transport"],
        "scheduler": two["scheduler"],
        "equal": two["token_ids"] == one["token_ids"],
        "text": two["text"],
        "tokens_per_s": two["tokens_per_s"],
        "one_rank_tokens_per_s": one["tokens_per_s"],
        "itl_ms": two["itl_ms"],
        "sent_bytes": wire_bytes,
    }
    print(json.dumps(result, indent=None if asked.json else 2))
    if not result["equal"]:
        raise SystemExit("two_hosts.py: two machines and one rank gave different tokens")


@contextlib.contextmanager
def two_namespaces(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a wire of `rate` each way; their names."""
    names = (f"moe{os.getpid()}a", f"moe{os.getpid()}b")
    with contextlib.ExitStack() as made:
        for name in names:
            run(["ip", "netns", "add", name])
            made.callback(run, ["ip", "netns", "del", name])
        pair = ["peer", "name", "wire", "netns", names[1]]
        run(["ip", "link", "add", "wire", "netns", names[0], "type", "veth", *pair])
        for name, address in zip(names, ADDRESSES, strict=True):
            for link in ("lo", "wire"):
                run(["ip", "-n", name, "link", "set", link, "up"])
            run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire"])
            cap = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            run(["tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *cap])
        yield names


def answer(names: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """What rank 0 prints; rank i runs in the i-th namespace."""
    token = secrets.token_hex(16)
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, str(ASYNCMOE), "generate", *flags],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "ASYNCMOE_CLUSTER__BIND_HOST": ADDRESSES[rank],
                "ASYNCMOE_CLUSTER__TOKEN": token,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=120)
        status = [rank.wait(timeout=30) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    if any(status):
        raise SystemExit(f"two_hosts.py: the ranks ended with exit status {status}")
    found: dict[str, Any] = json.loads(printed)
    return found


def sent_bytes(name: str) -> int:
    """Bytes that a namespace has sent over the wire."""
    (link,) = json.loads(run(["ip", "-n", name, "-s", "-j", "link", "show", "dev", "wire"]))
    return int(link["stats64"]["tx"]["bytes"])


def run(command: Sequence[str]) -> str:
    """Standard output of `command`. Raises `SystemExit` with what went wrong."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"two_hosts.py: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main()
