"""The process of a rank that `launch.LocalRanks` starts; not for use by hand.

Standard input carries one line, the configuration as JSON, and then stays open: its end means
that the parent is gone, however it died. Standard output carries at most one line, `[rank, error]`
as JSON, when the rank fails. Logs go to standard error. The cluster token comes through the
environment.
"""

from __future__ import annotations

import logging
import os
import threading

import orjson

from asyncmoe import log
from asyncmoe.config import Config
from asyncmoe.frontend.world import detect_world

TOKEN_VARIABLE = "ASYNCMOE_CLUSTER__TOKEN"
CONFIG_BYTES = 1 << 20


def main() -> int:
    """Run the rank; returns the exit status."""
    report_fd = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not a report
    line = _read_line()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    config = _read_config(line)
    log.setup(config.log.level)
    detected = detect_world(os.environ)
    if detected is None:
        raise SystemExit("this program is started by asyncmoe itself")
    from asyncmoe.frontend.worker import run_worker  # takes long, so the watch begins before it

    failure = run_worker(config, *detected)
    if failure is None:
        return 0
    os.write(report_fd, orjson.dumps([failure.rank, failure.message]) + b"\n")
    return 1


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece or len(line) > CONFIG_BYTES:
            raise SystemExit("no configuration on standard input")
        line += piece
    return line


def _read_config(line: bytes) -> Config:
    values = orjson.loads(line)
    # Taken out of the environment, so that no process started from here inherits it.
    values["cluster"]["token"] = os.environ.pop(TOKEN_VARIABLE, "")
    return Config.model_validate(values)


def _die_with_parent() -> None:
    # os.read, since a thread that sits in sys.stdin.read makes the interpreter abort at its end.
    while os.read(0, 4096):
        pass
    os._exit(1)  # there is nobody to tell, and nothing here outlives the process


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # The rank has closed all it had. Taking torch apart object by object takes seconds, which the
    # operator who stops a server would wait for.
    os._exit(status)
