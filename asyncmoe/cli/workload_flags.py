"""Flags of the commands that run a workload, and what they ask for."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import ValidationError

from asyncmoe.config import Section
from asyncmoe.errors import ConfigError
from asyncmoe.metrics.summary import MeasureConfig
from asyncmoe.workload.workload import WorkloadConfig

# Flag, section and key. The names in the sections say what a flag means.
FLAGS: tuple[tuple[str, type[Section], str], ...] = (
    ("--lengths", WorkloadConfig, "lengths"),
    ("--arrivals", WorkloadConfig, "arrivals"),
    ("--requests", WorkloadConfig, "requests"),
    ("--duration", WorkloadConfig, "duration_s"),
    ("--underway", WorkloadConfig, "underway"),
    ("--longest", WorkloadConfig, "longest"),
    ("--decode-only", WorkloadConfig, "decode_only"),
    ("--ramp", MeasureConfig, "ramp_s"),
    ("--window", MeasureConfig, "best_window_s"),
    ("--ttft-target-ms", MeasureConfig, "ttft_target_ms"),
    ("--itl-target-ms", MeasureConfig, "itl_target_ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a workload and of what is measured."""
    group = parser.add_argument_group("workload")
    for flag, section, key in FLAGS:
        field = section.model_fields[key]
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag, dest=key, action="store_true", default=None, help=text)
        else:
            group.add_argument(flag, dest=key, metavar=key.upper(), help=text)


def given(args: argparse.Namespace, section: type[Section]) -> dict[str, Any]:
    """The values of the flags of `section` that are on the command line."""
    keys = [key for _, kind, key in FLAGS if kind is section]
    return {key: getattr(args, key) for key in keys if getattr(args, key) is not None}


def workload(values: dict[str, Any]) -> WorkloadConfig:
    """Raises `ConfigError` naming the key, its value and what is allowed."""
    try:
        return WorkloadConfig.model_validate(values)
    except ValidationError as error:
        raise _explained("workload", error) from None


def measure(values: dict[str, Any]) -> MeasureConfig:
    """Raises `ConfigError` naming the key, its value and what is allowed."""
    try:
        return MeasureConfig.model_validate(values)
    except ValidationError as error:
        raise _explained("measure", error) from None


def _explained(section: str, error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # a rule over several keys, which says all by itself
        return ConfigError(message)
    key = ".".join(map(str, first["loc"]))
    allowed = message.replace("Input should be", "should be", 1)
    return ConfigError(f"{section}.{key} = {first['input']!r}: {allowed}")
