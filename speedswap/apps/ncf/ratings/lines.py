"""A file's bytes in pieces of whole lines, plain or gzip, checked to be text."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from speedswap.apps.ncf.errors import RatingsError
from speedswap.apps.reading import opened

__all__ = ["Piece", "read_pieces", "shown"]

CHUNK_BYTES = 1 << 22
LINE_BYTES = 1 << 24


class Piece(NamedTuple):
    """Some lines of a file."""

    text: bytes
    """UTF-8 without NUL; whole lines, of which the file's last one may lack its newline."""
    first_line: int
    """Number of the first line, from 1."""


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield a file in pieces of whole lines, without the byte order mark.

    Raises:
        RatingsError: the file is missing, damaged, not UTF-8, or has a line of more than 16 MiB.
    """
    first_line = 1
    for text in read_lines(path):
        if first_line == 1:
            check_no_utf16(text, path)
            text = text.removeprefix(codecs.BOM_UTF8)
        check_text(text, path, first_line)
        yield Piece(text, first_line)
        first_line += text.count(b"\n")


def read_lines(path: Path) -> Iterator[bytes]:
    try:
        with opened(path) as data:
            unfinished = b""
            while chunk := data.read(CHUNK_BYTES):
                whole, newline, rest = chunk.rpartition(b"\n")
                if newline:
                    yield unfinished + whole + newline
                    unfinished = rest
                else:
                    unfinished += chunk
                if len(unfinished) > LINE_BYTES:
                    raise RatingsError(f"ratings {path} has a line of more than {LINE_BYTES:,} bytes: is it text?")
            if unfinished:
                yield unfinished
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RatingsError(f"ratings {path} is not a whole gzip file ({error}): make it or copy it again") from error
    except OSError as error:
        raise RatingsError(f"ratings {path} cannot be read: {error.strerror or error}") from error


def check_no_utf16(text: bytes, path: Path) -> None:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RatingsError(f"ratings {path} is UTF-16: save it as UTF-8, say iconv -f utf-16 -t utf-8")


def check_text(text: bytes, path: Path, first_line: int) -> None:
    wrong = text.find(b"\0")
    if wrong >= 0:
        line = first_line + text.count(b"\n", 0, wrong)
        raise RatingsError(f"ratings {path}, line {line} has a byte of zero: is it text?")
    if text.isascii():
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = first_line + text.count(b"\n", 0, error.start)
        around = text[text.rfind(b"\n", 0, error.start) + 1 :].split(b"\n", 1)[0]
        raise RatingsError(
            f"ratings {path}, line {line}: {shown(around)} is not UTF-8: save the file as UTF-8, say "
            "iconv -f latin1 -t utf-8"
        ) from error


def shown(text: bytes | str, most: int = 60) -> str:
    """A line or value as a message shows it."""
    if isinstance(text, bytes):
        text = text[: 4 * most + 1].decode("utf-8", "replace")
    text = text.rstrip()
    return repr(text if len(text) <= most else text[:most] + "…")
