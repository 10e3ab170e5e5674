"""Pictures of numbers: PNG files whose pixels are more or less transparent, as data URLs.

The colour is fixed and the number is the opacity, so that a picture is right on light and on dark.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Rgb = tuple[int, int, int]


def opacity_picture(strength: NDArray[np.float64], colours: NDArray[np.uint8]) -> str:
    """A data URL of the picture.

    Args:
        strength: [rows, columns] from 0 (clear) to 1 (full colour); the first row is on top.
        colours: [rows, 3] red, green and blue of each row.
    """
    rows, columns = strength.shape
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[:, :, :3] = colours[:, None, :]
    pixels[:, :, 3] = np.rint(255 * strength.clip(0, 1))
    return "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()


def _png(pixels: NDArray[np.uint8]) -> bytes:
    rows, columns, _ = pixels.shape
    lines = np.zeros((rows, 1 + 4 * columns), np.uint8)  # each begins with its filter, none
    lines[:, 1:] = pixels.reshape(rows, -1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
