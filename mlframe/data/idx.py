"""Reader of the idx format of MNIST and its successors, plain or gzipped.

A file is: two zero bytes, a type byte (0x08 = unsigned bytes), the number of dimensions, every dimension as a
big-endian 32-bit number, then the values in C order (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

UNSIGNED_BYTES = 0x08


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in an idx file: uint8, of as many `dimensions` as expected (3 for images, 1 for labels).

    Raises:
        ValueError: when the file is broken, cut off, not gzip, or of another kind; names the file and what it holds.
    """
    data = _bytes(path)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise _broken(path, f"it begins with {data[:4].hex() or 'nothing'} and not with an idx header")
    kind, found = data[2], data[3]
    if kind != UNSIGNED_BYTES or found != dimensions:
        wanted = f"{dimensions} dimension(s) of unsigned bytes (type 0x{UNSIGNED_BYTES:02x})"
        raise _broken(path, f"it has {found} dimension(s) of type 0x{kind:02x}, expected {wanted}")
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise _broken(path, f"its header is cut off after {len(data)} of {start} bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size:
        raise _broken(path, f"its header promises {size} values of shape {shape}, it holds {len(data) - start}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _bytes(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _broken(path, f"it does not unpack as gzip ({error}; {len(raw)} bytes)") from error


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is broken: {why}. Delete it and run again, or put a good copy there")
