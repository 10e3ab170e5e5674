"""The process of one run: reads its setting from standard input, reports on standard output.

Each line is a JSON object: `{"progress": 0.3}` now and then, at the end what the run returns
or `{"error": …}`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

import orjson

from asyncmoe.errors import AsyncMoeError
from asyncmoe.experiment.grid import Setting
from asyncmoe.experiment.schema import checked


def encode(setting: Setting) -> bytes:
    """A setting as a worker reads it."""
    experiment = setting.experiment.model_dump(exclude_none=True)
    return orjson.dumps(
        {"experiment": experiment, "names": dict(setting.names), "quick": setting.quick}
    )


def decode(data: bytes) -> Setting:
    """What `encode` made. Raises `ConfigError`."""
    values = orjson.loads(data)
    return Setting(checked(values["experiment"], "setting"), values["names"], values["quick"])


def run(setting: Setting, out: BinaryIO) -> dict[str, Any]:
    """Run it where its experiment says; progress goes to `out`."""

    def tell(progress: float) -> None:
        _write(out, {"progress": progress})

    if setting.experiment.world == "live":
        from asyncmoe.experiment.live_run import run_live

        return run_live(setting, tell)
    from asyncmoe.experiment.virtual_run import run_virtual

    return run_virtual(setting, tell)


def main() -> int:
    """Run the setting on standard input."""
    # What others print is no report.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        last: Mapping[str, Any] = run(decode(sys.stdin.buffer.read()), out)
    except (AsyncMoeError, TimeoutError) as error:
        last = {"error": str(error)}
    except Exception:
        last = {"error": traceback.format_exc()}
    with contextlib.suppress(BrokenPipeError):
        _write(out, last)
    return 0


def _write(out: BinaryIO, line: Mapping[str, Any]) -> None:
    out.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    out.flush()


if __name__ == "__main__":
    raise SystemExit(main())
