"""The command `asyncmoe`: finds the subcommand, runs it, and turns errors into one line each."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from asyncmoe import configflags, log
from asyncmoe.errors import AsyncMoeError, ConfigError, RequestError, UnknownName
from asyncmoe.frontend.world import detect_world

logger = logging.getLogger(__name__)

GC_THRESHOLD = 100_000  # new objects between two collections; CPython's 700 suits small programs


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: a module with `add_parser(subparsers)` and `run(args) -> int`."""

    module: str
    help: str
    engine: bool  # it runs an engine, so that torchrun may start it once for each rank


COMMANDS = {
    "generate": Command("asyncmoe.cli.generate", "answer one prompt", engine=True),
    "serve": Command("asyncmoe.cli.serve", "serve OpenAI's API over HTTP", engine=True),
    "bench": Command("asyncmoe.cli.bench_command", "measure rates, and where the time goes", True),
    "simulate": Command(
        "asyncmoe.cli.simulate_command", "run an experiment in the virtual world", engine=False
    ),
    "compare": Command(
        "asyncmoe.cli.compare_command", "compare rules, transports and bad links", engine=False
    ),
    "demo": Command("asyncmoe.cli.demo", "two ranks, a server and an answer, once", engine=False),
    "config": Command(
        "asyncmoe.cli.config_command", "show or explain the configuration", engine=False
    ),
    "transports": Command(
        "asyncmoe.cli.transports_command", "list or compare the transports", engine=False
    ),
    "doctor": Command("asyncmoe.cli.doctor", "try what works on this machine", engine=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: this process's); returns the exit status.

    0 is success, 1 a failure, 2 a command line, configuration or request that cannot be, and 130
    an interrupt; 141 says that nobody reads standard output any more, as for any command that ends
    before `| head`. Known errors are one message on standard error, with a traceback at log level
    debug.
    """
    _open_standard_streams()
    # The store where ranks meet logs a stack trace for every connection that ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imports make a million objects, none of them garbage: look through them seldom.
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    # At exit the collector would go through all objects of torch, which takes about two seconds.
    atexit.register(gc.freeze)
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # at the interpreter's end it would be too late to handle an error
        return status
    except BrokenPipeError:
        if not _output_is_gone():
            raise
        return 128 + signal.SIGPIPE
    except (AsyncMoeError, TimeoutError) as error:
        logger.debug("the command failed", exc_info=True)
        print(f"asyncmoe: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | RequestError) else 1
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Put /dev/null where standard streams are closed, as under some daemons: a socket that took
    such a number would be written to by whoever prints, and uvloop aborts on it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _output_is_gone() -> bool:
    """Whether nobody reads standard output any more; what is left for it is dropped then."""
    output = sys.stdout.fileno()
    state = select.poll()
    state.register(output, select.POLLOUT)
    if not any(events & select.POLLERR for _, events in state.poll(0)):
        return False  # the pipe that broke is another one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def _run(argv: list[str]) -> int:
    name = next((word for word in argv if not word.startswith("-")), None)
    parser, own = _parser(name)
    args, unknown = parser.parse_known_args(configflags.fold_subkeys(argv))
    if unknown:
        wrong = unknown[0].partition("=")[0]
        raise UnknownName("argument", wrong, _near(_chosen(own, args), wrong))
    command = COMMANDS[args.command]
    if command.engine:
        config = configflags.from_args(args)
        detected = detect_world(os.environ)
        log.setup(config.log.level, detected[0].rank if detected else None)
        if detected and detected[0].rank > 0:
            from asyncmoe.frontend.worker import worker_status

            return worker_status(config, *detected)
    return int(importlib.import_module(command.module).run(args))


def _parser(name: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The whole parser, and that of the subcommand `name` (the whole one if there is none).

    Only the subcommand's own module is imported: the others can take seconds.
    """
    parser = argparse.ArgumentParser(
        prog="asyncmoe",
        description="Serve mixture-of-experts language models without a layer barrier.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for each, command in COMMANDS.items():
        if each == name:
            importlib.import_module(command.module).add_parser(subparsers)
            subparsers.choices[each].allow_abbrev = False
            subparsers.choices[each].usage = f"asyncmoe {each} [options]"
        else:
            subparsers.add_parser(each, help=command.help)
    return parser, subparsers.choices[name] if name in COMMANDS else parser


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """That of the action which the subcommand was given; itself, if it has none."""
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction) and each.dest != "command":
            chosen: argparse.ArgumentParser = each.choices[getattr(args, each.dest)]
            return chosen
    return parser


def _near(parser: argparse.ArgumentParser, wrong: str) -> list[str]:
    """The flags worth listing: those of the same section, or all of sections, or of none."""
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    section, dot, _ = wrong.partition(".")
    same = [flag for flag in flags if dot and flag.startswith(f"{section}.")]
    return same or [flag for flag in flags if ("." in flag) == bool(dot)]


if __name__ == "__main__":
    raise SystemExit(main())
