"""Numbers on the command line: types for `argparse` that say what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST = 1 << 32


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return value

    return parse


def several(one: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """Numbers such as `one`, between commas."""

    def parse(text: str) -> tuple[int, ...]:
        return tuple(one(part) for part in text.split(","))

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Numbers from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return value

    return parse
