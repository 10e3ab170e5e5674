"""`asyncmoe compare`: rules, transports and impairments under one workload, live or virtual."""

from __future__ import annotations

import argparse
from typing import Any

from asyncmoe import configflags, registry
from asyncmoe.cli import workload_flags
from asyncmoe.cli.simulate_command import add_run_arguments, run_experiment
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.experiment import impairments
from asyncmoe.experiment.outcome import Outcome
from asyncmoe.experiment.schema import Experiment, checked
from asyncmoe.metrics.summary import MeasureConfig
from asyncmoe.workload.routing import MODEL
from asyncmoe.workload.workload import WorkloadConfig

_VIRTUAL_WINDOW = {"ramp_s": 0.5, "duration_s": 1.5}
_LIVE_WINDOW = {"ramp_s": 2.0, "duration_s": 10.0}
_SHAPE, _HARDWARE = "qwen3-30b-a3b", "l40s"
_IN_FLIGHT = 32  # requests of a home rank


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "compare",
        help="compare rules, transports and bad links under one workload",
        description="Run one workload under every combination of rules, transports and "
        "impairments, and print throughput and time between tokens of each. "
        "See docs/experiments.md.",
    )
    world = parser.add_mutually_exclusive_group()
    world.add_argument("--virtual", action="store_true", help="in the virtual world (default)")
    world.add_argument("--live", action="store_true", help="on ranks of this machine")
    parser.add_argument(
        "--schedulers",
        metavar="A,B",
        help="rules by name or as FILE.py:Class (default: all that there are)",
    )
    parser.add_argument(
        "--transports", metavar="A,B", help="live: which (default: the configured one)"
    )
    parser.add_argument(
        "--impairments",
        nargs="+",
        metavar="X",
        default=["none"],
        help=f"states of the network: {impairments.ALLOWED} (default none)",
    )
    parser.add_argument("--shape", help=f"virtual: the model (default {_SHAPE})")
    parser.add_argument("--hardware", help=f"virtual: the devices (default {_HARDWARE})")
    add_run_arguments(parser)
    workload_flags.add_arguments(parser)
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare. Returns the exit status; raises `AsyncMoeError`."""
    experiment = _experiment(args, configflags.from_args(args))
    return run_experiment(experiment, args, Outcome.comparison, Outcome.comparison_text)


def _experiment(args: argparse.Namespace, config: Config) -> Experiment:
    """What the command line asks for."""
    live = args.live
    window = _LIVE_WINDOW if live else _VIRTUAL_WINDOW
    in_flight = _IN_FLIGHT * config.cluster.ranks
    workload: dict[str, Any] = {"arrivals": f"closed:{in_flight}"}
    if not live:
        workload |= {"lengths": "gsm8k", "decode_only": True, "underway": in_flight}
    workload |= workload_flags.given(args, WorkloadConfig)
    measure = workload_flags.given(args, MeasureConfig)
    ramp_s = float(measure.get("ramp_s", window["ramp_s"]))
    duration_s = float(workload.pop("duration_s", window["duration_s"]))
    if not 0 <= ramp_s < duration_s:
        raise ConfigError(
            f"--ramp is {ramp_s:g} and --duration {duration_s:g}; allowed: a ramp from 0 on, and a "
            "duration beyond it, which it counts in"
        )
    _check_world(args, live)
    routing = config.model.routing
    if not live and routing == MODEL:
        routing = "uniform"
    systems = _systems(args, live)
    hardware, shape = args.hardware or _HARDWARE, args.shape or _SHAPE
    cluster = {"hosts": config.cluster.ranks, "ranks_per_host": 1, "hardware": hardware}
    values: dict[str, Any] = {
        "name": "compare",
        "title": f"{len(systems)} systems on {config.cluster.ranks} ranks, "
        f"{'live' if live else 'virtual'}",
        "world": "live" if live else "virtual",
        "model": {"shape": shape},
        "cluster": cluster,
        "workload": {**workload, "routing": routing},
        "systems": systems,
        "impairments": impairments.tables(args.impairments, live, config.cluster.ranks),
        "config": _engine_settings(config),
        "window": {
            "ramp_s": ramp_s,
            "measure_s": duration_s - ramp_s,
            "best_s": float(measure.get("best_window_s", 60.0)),
        },
    }
    targets = {
        "ttft_ms": measure.get("ttft_target_ms"),
        "itl_ms": measure.get("itl_target_ms"),
    }
    values["targets"] = {name: float(value) for name, value in targets.items() if value}
    return checked(values, "the command line")


def _check_world(args: argparse.Namespace, live: bool) -> None:
    """Refuse what the other world alone heeds."""
    if getattr(args, "scheduler.name", None) is not None:
        raise ConfigError("--scheduler is for one rule; allowed here: --schedulers A,B")
    for flag, key in (("shape", "shape"), ("hardware", "hardware"), ("model", "model.name")):
        if (flag == "model") is not live and getattr(args, key, None) is not None:
            raise ConfigError(
                f"--{flag} is for --{'virtual' if live else 'live'}: the model is a --shape on "
                "--hardware in the virtual world, and a --model live"
            )


def _systems(args: argparse.Namespace, live: bool) -> dict[str, Any]:
    rules = _split(args.schedulers)
    if args.schedulers is None:
        rules = registry.names("schedulers")
    elif not rules:
        raise ConfigError(f"--schedulers {args.schedulers!r} names no rule")
    transports: list[str | None] = [*_split(args.transports)]
    if transports and not live:
        raise ConfigError("--transports is for --live; links of the virtual world are modelled")
    systems: dict[str, Any] = {}
    for rule in rules:
        registry.find("schedulers", rule)  # a wrong name is told before anything runs
        for transport in transports or [None]:
            short = rule.rpartition(":")[2]
            name = short if transport is None else f"{short}/{transport.replace(':', '-')}"
            systems[name] = {"scheduler": rule}
            if transport is not None:
                systems[name]["config"] = {"transport": {"name": transport}}
    return systems


def _engine_settings(config: Config) -> dict[str, Any]:
    """What the flags set that is not compared."""
    values = config.model_dump(exclude_defaults=True)
    values.get("cluster", {}).pop("ranks", None)
    values.get("cluster", {}).pop("token", None)
    values.get("scheduler", {}).pop("name", None)
    return {section: keys for section, keys in values.items() if keys}


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
