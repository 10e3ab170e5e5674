"""Logging: one line an event on standard error, so that standard output carries results alone."""

from __future__ import annotations

import logging
import sys

ROOT = "asyncmoe"


def setup(level: str, rank: int | None = None) -> None:
    """Log everything of asyncmoe from `level` on, each line beginning with `rank` if it is given.

    A later call replaces an earlier one. The logging of other libraries is left alone.
    """
    prefix = "" if rank is None else f"[rank {rank}] "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"{prefix}%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
