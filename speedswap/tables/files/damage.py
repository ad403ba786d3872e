"""Damage to a table's files: reported as one error; single flipped bits are corrected."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speedswap import kernels
from speedswap.errors import TableFormatError

_CRC32, _CRC32C = 0xEDB88320, 0x82F63B78
_MOST_BYTES = 2**17  # beyond this, a 32-bit checksum would mistake too much other damage for a flipped bit
_BLOCK_HEADER, _SECTORS = 64, 4096


@contextmanager
def says_damaged(what: str, remedy: str = "") -> Iterator[None]:
    """Turn failed checks, and contents of a wrong type, into a TableFormatError.

    Args:
        what: where the bytes are, for the message.
        remedy: the end of the message.
    """
    try:
        yield
        return
    except UnknownFile:
        raise
    except Damage as error:
        problem = str(error)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise TableFormatError(f"{what} is damaged: {problem}{remedy}")


def require(condition: bool, problem: str) -> None:
    """Raise unless a condition holds; for use under :func:`says_damaged`."""
    if not condition:
        raise Damage(problem)


def is_int(value: object, low: int, high: int) -> bool:
    """Return whether a value that was read is an int within limits."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def require_version(what: str, version: object, known: int) -> None:
    """Raise unless a format's version, covered by a checksum, is the one that is read; for use under
    :func:`says_damaged`.

    Raises:
        UnknownFile: it is newer.
    """
    if is_int(version, known + 1, 2**31):
        raise UnknownFile(
            f"{what} cannot be read: its version is {version}; this speedswap reads {known}; use the one that wrote "
            "it, or a newer one"
        )
    require(is_int(version, known, known), f"its version is {version!r}; this speedswap reads {known}")


def ints(data: Mapping[str, Any], **limits: tuple[int, int]) -> list[int]:
    """Return some entries of a description, each an int within its limits; for use under :func:`says_damaged`."""
    for name, (low, high) in limits.items():
        require(is_int(data[name], low, high), f"{name} is {data[name]!r}")
    return [data[name] for name in limits]


def ranges_of(numbers: NDArray[Any]) -> list[range]:
    """Return ascending ints as ranges."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


class Damage(Exception):
    """A problem found in some bytes."""


class UnknownFile(TableFormatError):
    """A file that may be good, but is of a newer format, or somewhere else, with a link in its place."""


def bytes_left(fd: int, at: int, nbytes: int) -> bytes:
    """Return bytes of a file, with zeros for unreadable ones and past its end."""
    found = b""
    while len(found) < nbytes:
        place = at + len(found)
        try:
            piece = os.pread(fd, nbytes - len(found), place)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            piece = bytes(_SECTORS - place % _SECTORS)
        found += piece or bytes(nbytes - len(found))
    return found[:nbytes]


def mended_text(data: bytes, prefix: bytes = b"") -> bytes | None:
    """Return a text whose first line holds the CRC-32 of the rest, corrected; None if more than one bit is wrong.

    Args:
        data: a prefix, eight hexadecimal digits, a newline, and the rest.
        prefix: the expected prefix.
    """
    begin = len(prefix) + 9
    line, body = data[:begin], data[begin:]
    right = prefix + b"%08x\n" % zlib.crc32(body)
    if len(line) == begin and (int.from_bytes(line, "little") ^ int.from_bytes(right, "little")).bit_count() <= 1:
        return right + body
    try:
        stored = int(line[-9:-1], 16)
    except ValueError:
        return None
    mended = _mended(body, zlib.crc32(body) ^ stored, _CRC32) if line == prefix + b"%08x\n" % stored else None
    return None if mended is None else line + mended


def mended_block(block: bytes, count_at: int, item_bytes: int) -> bytes | None:
    """Return a header and the items after it, corrected; None if more than one bit is wrong.

    Args:
        block: 64 bytes with a CRC-32C in bytes 4 to 7, then the number of items that it states, then bytes without
            checksum.
        count_at: the offset in the header of the number of items.
        item_bytes: bytes per item.
    """
    stored, count = (struct.unpack_from("<I", block, at)[0] for at in (4, count_at))
    for likely in (count, *(count ^ 1 << bit for bit in range(32))):
        end = _BLOCK_HEADER + likely * item_bytes
        if end <= len(block):
            covered = block[:4] + bytes(4) + block[8:end]
            mended = _mended(covered, kernels.crc32c(covered) ^ stored, _CRC32C)
            if mended is not None and struct.unpack_from("<I", mended, count_at)[0] == likely:
                return mended[:4] + block[4:8] + mended[8:] + block[end:]
    return None


def _mended(data: bytes, difference: int, polynomial: int) -> bytes | None:
    """Return bytes with one flipped bit, in them or in their checksum, corrected; None if more is wrong.

    Args:
        data: the bytes that the checksum covers.
        difference: XOR of the computed and the stored checksum.
        polynomial: the checksum's reflected polynomial.
    """
    if difference & (difference - 1) == 0:
        return data
    if len(data) > _MOST_BYTES:
        return None
    table, places = _tables(polynomial)
    for at in reversed(range(len(data))):  # undo one step per byte, until the whole difference is in one byte
        index = places[difference >> 24]
        difference = (difference ^ table[index]) << 8 & 0xFFFFFFFF | index
        if difference < 256 and difference & (difference - 1) == 0:
            return data[:at] + bytes([data[at] ^ difference]) + data[at + 1 :]
    return None


@cache
def _tables(polynomial: int) -> tuple[list[int], dict[int, int]]:
    """Return a checksum's table of steps per input byte, and its inverse by the step's first byte."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return table, {value >> 24: index for index, value in enumerate(table)}
