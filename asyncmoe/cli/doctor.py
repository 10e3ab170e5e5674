"""`asyncmoe doctor`: what is installed here, and which devices and transports really work."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from asyncmoe.cores import available_cores

PACKAGE = "asyncmoe"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_vnni")  # in /proc/cpuinfo


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="try what works on this machine",
        description="Print what is installed, and try every device and transport. The exit status "
        "is 1 if one of them does not work although its libraries are installed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print. Returns the exit status."""
    report = examine()
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if args.json else _text(report)
    sys.stdout.write(text + "\n")
    tried = report["devices"] + report["transports"]
    return int(any(trial["status"] == "broken" for trial in tried))


def examine() -> dict[str, Any]:
    """Everything that doctor finds, as it is printed with --json."""
    import torch  # takes long; the command line is parsed without it

    from asyncmoe.cli.trials import try_devices, try_transports

    cores = available_cores()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "extras": _extras(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": _cpu_features(),
        "compiled": _compiled(),
        "devices": [dataclasses.asdict(trial) for trial in try_devices(cores)],
        "transports": [dataclasses.asdict(trial) for trial in try_transports()],
    }


def _requirements() -> dict[str | None, list[str]]:
    """Names of the distributions that each extra needs; those needed always under None."""
    found: dict[str | None, list[str]] = {None: []}
    for extra in metadata.metadata(PACKAGE).get_all("Provides-Extra", []):
        found[extra] = []
    for line in metadata.requires(PACKAGE) or []:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        extra_match = re.search(r"""extra\s*==\s*["']([^"']+)["']""", line)
        found[extra_match[1] if extra_match else None].append(name)
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, str | None]:
    names = [PACKAGE, *_requirements()[None]]
    return {name: _version(name) for name in names}


def _extras() -> dict[str, dict[str, Any]]:
    return {
        extra: {
            "installed": all(_version(name) for name in names),
            "packages": {name: _version(name) for name in names},
            "install": f"pip install '{PACKAGE}[{extra}]'",
        }
        for extra, names in _requirements().items()
        if extra is not None
    }


def _memory_gib() -> dict[str, float | None]:
    """Memory of the machine, what is available of it, and this container's limit, if any."""
    values: dict[str, float | None] = {"total": None, "available": None, "limit": None}
    names = {"MemTotal": "total", "MemAvailable": "available"}
    for line in _lines("/proc/meminfo"):
        field, _, amount = line.partition(":")
        if field in names:
            values[names[field]] = round(int(amount.split()[0]) / 2**20, 1)
    for line in _lines("/sys/fs/cgroup/memory.max"):
        if line.strip().isdecimal():
            values["limit"] = round(int(line) / 2**30, 1)
    return values


def _cpu_features() -> dict[str, bool]:
    flags: set[str] = set()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("flags"):
            flags.update(line.partition(":")[2].split())
            break
    return {feature: feature in flags for feature in CPU_FEATURES}


def _compiled() -> dict[str, str]:
    """Of each compiled part what it uses, or why its twin in torch or numpy runs."""
    from asyncmoe import native

    kernels, columns = native.kernels, native.columns
    return {
        "kernels": native.absent["kernels"] if kernels is None else kernels.isa(),
        "columns": native.absent["columns"] if columns is None else "built",
    }


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none where there is no such file."""
    return Path(path).read_text().splitlines() if os.access(path, os.R_OK) else []


def _text(report: dict[str, Any]) -> str:
    memory = report["memory_gib"]
    features = [f"{name} {'yes' if has else 'no'}" for name, has in report["cpu_features"].items()]
    amounts = ", ".join(f"{name} {v:g} GiB" for name, v in memory.items() if v is not None)
    lines = [
        f"python {report['python']} on {report['platform']}",
        f"cores {report['cores']}, torch threads {report['torch_threads']}, memory: {amounts}",
        f"cpu: torch uses {report['torch_cpu_capability']}; {', '.join(features)}",
        f"compiled: {', '.join(f'{name} {state}' for name, state in report['compiled'].items())}",
        "",
        "packages",
        *(f"  {name:<14} {v or 'not installed'}" for name, v in report["packages"].items()),
        "",
        "extras",
    ]
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else f"not installed: {extra['install']}"
        lines.append(f"  {name:<14} {state}")
    for group in ("devices", "transports"):
        lines += ["", group]
        for t in report[group]:
            lines.append(f"  {t['name']:<14} {t['status']}: {t['detail']}")
    return "\n".join(lines)
