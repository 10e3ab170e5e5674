"""Files that a command will write when it is through."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.errors import ConfigError


def check_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` unless the file of `flag` can be written: before a long run rather than
    behind it. Leaves an empty file where none was."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None
