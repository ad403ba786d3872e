"""A table's files as they are found: facts about them, and everything in them read once."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from speedswap.tables.files.lock import WriterLock
from speedswap.tables.files.manifest_file import ManifestFile
from speedswap.tables.files.place import Place

__all__ = ["Checked", "at_time", "facts_of"]


@dataclass
class Checked:
    """The outcome of reading all of a table.

    Attributes:
        rows: rows that were read.
        nbytes: bytes that were read.
        damaged: ranges of rows that cannot be read, or whose checksum does not match.
        problems: a sentence for each problem.
    """

    rows: int = 0
    nbytes: int = 0
    damaged: list[range] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def facts_of(path: Path) -> dict[str, Any]:
    """Return facts that a table's directory tells by itself, for ``speedswap info``; nothing in it is changed.

    Raises:
        FileNotFoundError: there is nothing.
        TableFormatError: it is not a table, or its manifest is damaged.
    """
    files = Place(path).open()
    file, _ = ManifestFile.load(files)
    holder = WriterLock.holder(files)
    found = [files.status(name) for name in files.names()]
    return {
        "format": json.loads(file.body)["version"],
        "bytes_on_disk": sum(one.st_blocks * 512 for one in found if one is not None and stat.S_ISREG(one.st_mode)),
        "last_commit_at": at_time(os.fstat(file.file.fd).st_mtime),
        "open_for_writing_in": holder,
        "left_open": holder is None and WriterLock.is_noted(files),
    }


def at_time(seconds: float) -> str:
    """Return a time in the way of ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
