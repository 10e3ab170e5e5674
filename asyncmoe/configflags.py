"""Command line flags for every key of the configuration tree, generated from the tree."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence

from asyncmoe import configfile
from asyncmoe.config import Config

ALIASES = {
    "--model": "model.name",
    "--dtype": "model.dtype",
    "--quantize": "model.quantize",
    "--load-format": "model.load_format",
    "--context": "model.context",
    "--routing": "model.routing",
    "--ranks": "cluster.ranks",
    "--transport": "transport.name",
    "--scheduler": "scheduler.name",
    "--combine": "engine.combine",
    "--threads": "device.threads",
    "--host": "server.host",
    "--port": "server.port",
    "--served-name": "server.served_name",
    "--log-level": "log.level",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, one flag for every key, and the short names that people expect."""
    common = parser.add_argument_group("common settings")
    common.add_argument("--config", metavar="FILE", help="configuration file (TOML)")
    rest = parser.add_argument_group("all other settings (see asyncmoe config --explain)")
    for path, key in _shown_on_a_command_line().items():
        short = [alias for alias, target in ALIASES.items() if target == path]
        (common if short else rest).add_argument(
            *short,
            f"--{path}",
            dest=path,
            action="append",
            metavar=key.name.upper(),
            help=(key.field.description or "").replace("%", "%%"),
        )


def from_args(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of a command whose parser has `add_arguments`.

    Raises `ConfigError` as `configfile.load` does.
    """
    return configfile.load(args.config, environ, flags=settings(args))


def settings(args: argparse.Namespace) -> Iterator[configfile.Setting]:
    """What the flags set, in the tree's order; a flag given twice counts last."""
    for path in _shown_on_a_command_line():
        for text in getattr(args, path) or ():
            yield from configfile.text_settings(path, text, f"flag --{path}")


def fold_subkeys(argv: Sequence[str]) -> list[str]:
    """Rewrite `--scheduler.parameters.patience 8` to `--scheduler.parameters '{"patience": 8}'`.

    argparse needs to know every flag, and the names below a key that holds a dict are not known.
    """
    folded: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        parent = _dict_parent(flag)
        if parent is None:
            folded.append(word)
            continue
        text = value if equals else next(words, None)
        folded.append(f"--{parent}")
        if text is not None:  # without one, argparse says that the flag expects an argument
            name = flag.removeprefix(f"--{parent}.")
            folded.append(json.dumps({name: configfile.json_or_text(text)}))
    return folded


def _shown_on_a_command_line() -> dict[str, configfile.Key]:
    # Every user of the machine can read a process's arguments, so that secrets have no flag.
    return {path: key for path, key in configfile.keys().items() if not key.secret}


def _dict_parent(flag: str) -> str | None:
    for path, key in configfile.keys().items():
        if key.container is dict and flag.startswith(f"--{path}."):
            return path
    return None
