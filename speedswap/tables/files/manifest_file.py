"""The file MANIFEST of a table's directory: small JSON with a checksum, which is never trusted."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speedswap.errors import TableFormatError
from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.log_manifest import LogManifest, parse_log_manifest
from speedswap.tables.files.manifest import FORMAT, MANIFEST, MAX_BYTES
from speedswap.tables.files.open_directory import TRANSIENT, OpenDirectory, OpenFile, identity
from speedswap.tables.files.shards_manifest import ShardsManifest, parse_shards_manifest

__all__ = ["AnyManifest", "ManifestFile", "parse"]

AnyManifest = LogManifest | ShardsManifest
_PARSERS: dict[int, Callable[[dict[str, Any]], AnyManifest]] = {4: parse_log_manifest, 5: parse_shards_manifest}
_CHECKSUM_BYTES = 9


class ManifestFile(NamedTuple):
    """A MANIFEST as it was read or written; it stays open, so that no other file can get its inode number.

    Attributes:
        file: the open file.
        body: its content after the checksum.
        seen: its identity then.
    """

    file: OpenFile
    body: bytes
    seen: tuple[int, ...]

    @classmethod
    def load(cls, directory: OpenDirectory) -> tuple[ManifestFile, AnyManifest]:
        """Open and parse a directory's MANIFEST; the data files are not looked at.

        Raises:
            TableFormatError: it is missing or damaged.
        """
        try:
            file = OpenFile(directory.open(MANIFEST))
            with open(file.fd, "rb", closefd=False) as reader:
                raw = reader.read(MAX_BYTES + _CHECKSUM_BYTES + 1)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            remedy = ""
            if isinstance(error, FileNotFoundError) and "LOCK" in directory.names():
                remedy = "; it was never finished, or lost it: restore the file from a copy, or remove the directory"
            raise TableFormatError(
                f"{directory.path} is not a table: its {MANIFEST} cannot be read ({error.strerror}){remedy}"
            ) from error
        body = raw.partition(b"\n")[2]
        return cls(file, body, identity(os.fstat(file.fd))), parse(directory.path, raw)

    @classmethod
    def write(cls, directory: OpenDirectory, body: bytes) -> ManifestFile:
        """Replace a directory's MANIFEST: write another beside it, sync, rename it over the old one, sync the names."""
        temporary = f"{MANIFEST}.{secrets.token_hex(8)}.tmp"
        written = OpenFile(directory.create(temporary))
        try:
            rest = memoryview(b"%08x\n" % zlib.crc32(body) + body)
            while rest:
                rest = rest[os.write(written.fd, rest) :]
            os.fsync(written.fd)
            file = OpenFile(directory.open(temporary))  # to be read: the file system may be made read-only meanwhile
            written.close()
            directory.rename(temporary, MANIFEST)
        except BaseException:
            directory.remove(temporary)
            raise
        directory.sync()
        return cls(file, body, identity(os.fstat(file.fd)))


def parse(directory: Path, raw: bytes) -> AnyManifest:
    """Check a manifest as it stands in its file.

    Raises:
        TableFormatError: it is damaged.
    """
    with says_damaged(f"the {MANIFEST} of {directory}"):
        manifest = _checked(raw)
    return manifest


def _checked(raw: bytes) -> AnyManifest:
    require(len(raw) <= MAX_BYTES + _CHECKSUM_BYTES, f"it is longer than {MAX_BYTES + _CHECKSUM_BYTES} bytes")
    checksum, newline, body = raw.partition(b"\n")
    require(newline == b"\n" and checksum == b"%08x" % zlib.crc32(body), "its checksum does not match")
    data = json.loads(body)
    require(isinstance(data, dict) and data.get("format") == FORMAT, "it does not describe a table")
    version = data["version"]
    require(
        is_int(version, min(_PARSERS), max(_PARSERS)),
        f"its version is {version!r}; this speedswap reads {' and '.join(map(str, _PARSERS))}",
    )
    return _PARSERS[version](data)
