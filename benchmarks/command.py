"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from asyncmoe.cli.numberflags import several, whole
from asyncmoe.errors import AsyncMoeError

count = whole(1)
counts = several(whole(1))


def run_command(main: Callable[[], None]) -> None:
    """As the program: errors of asyncmoe are one message on standard error."""
    try:
        main()
    except (AsyncMoeError, TimeoutError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
