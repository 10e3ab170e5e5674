"""Files that a command writes when it is through."""

from __future__ import annotations

from pathlib import Path

from asyncmoe.errors import ConfigError


def check_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` unless the file of `flag` can be written: before a long run rather than
    behind it."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None


def write_file(path: Path, content: bytes) -> None:
    """Write all of it, or leave what was there. Raises `ConfigError` if it cannot be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content)  # to where it leads, a device or a pipe
            return
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
