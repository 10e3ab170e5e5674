"""`asyncmoe config`: what is configured and from where, and with `--explain` what can be."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import orjson

from asyncmoe import configexplain, configfile, configflags


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "config",
        help="show or explain the configuration",
        description="Print the configuration that a command with the same flags would run with, "
        "and where each value comes from; with --explain, every key there is.",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print every key, its type, default and meaning"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    configflags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print. Returns the exit status; raises `ConfigError`."""
    if args.explain and args.json:
        text = _json(
            {
                "keys": list(configexplain.explain_keys()),
                "schedulers": list(configexplain.explain_schedulers()),
            }
        )
    elif args.explain:
        text = configexplain.explain()
    else:
        values = _effective(args)
        text = _json(values) if args.json else _table(values)
    sys.stdout.write(text + "\n")
    return 0


def _effective(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    config, origins = configfile.resolve(args.config, flags=configflags.settings(args))
    sections = config.model_dump(mode="json")
    values: dict[str, dict[str, Any]] = {}
    for path, key in configfile.keys().items():
        value = sections[key.section][key.name]
        sources = [o for p, o in origins.items() if p == path or p.startswith(f"{path}.")]
        values[path] = {
            "value": "(not shown)" if key.secret and value else value,
            "from": ", ".join(sources) or "default",
        }
    return values


def _table(values: dict[str, dict[str, Any]]) -> str:
    rows = [(path, orjson.dumps(v["value"]).decode(), v["from"]) for path, v in values.items()]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows)


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
