"""A table's files as they are found: facts about them, and everything in them read once."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speedswap.errors import TableFormatError
from speedswap.tables.files.lock import WriterLock
from speedswap.tables.files.manifest_file import ManifestFile
from speedswap.tables.files.place import Place

if TYPE_CHECKING:
    from speedswap.tables.disk.opened import OpenedLog

__all__ = ["Checked", "at_time", "check_log", "facts_of", "log_facts"]


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


def log_facts(store: OpenedLog) -> dict[str, Any]:
    """Return the facts that a log tells, as JSON can hold them."""
    log, manifest, stats = store.log, store.manifest, store.log.stats()
    file = store.head_file
    return {
        "touched_rows": min(log.touched * manifest.group_rows, store.num_embeddings),
        "rows_stored_as_one": manifest.group_rows,
        "last_commit": log.durable,
        "last_commit_at": at_time(os.fstat(file.fd).st_mtime),
        "held_commits": log.held,
        "log_bytes": stats["file_bytes"],
        "reusable_bytes": stats["emptied_bytes"] + stats["unused_bytes"],
        "access": f"O_DIRECT in blocks of {log.alignment} bytes" if log.direct else f"page cache: {log.fallback}",
    }


def check_log(store: OpenedLog, advance: Callable[[float], object]) -> Checked:
    """Read every row that was ever written, and compare it with its checksum; see :meth:`Files.verify`."""
    group_rows = store.manifest.group_rows
    sound, damaged = store.log.verify(lambda groups: advance(groups * group_rows))
    record_bytes = store.log.stats()["record_bytes"]
    if damaged and store.check():  # another process has written meanwhile: is it still so?
        damaged = [group for group in damaged if group >= 0 and _is_damaged(store, group * group_rows)]
    checked = Checked(sound * group_rows, sound * record_bytes)
    lost = damaged.count(-1)
    if lost:
        checked.problems.append(f"{lost} headers in rows.log are damaged, so that rows are missing; restore a copy")
    for group in sorted(group for group in damaged if group >= 0):
        rows = range(group * group_rows, min((group + 1) * group_rows, store.num_embeddings))
        if checked.damaged and checked.damaged[-1].stop == rows.start:
            rows = range(checked.damaged.pop().start, rows.stop)
        checked.damaged.append(rows)
    for rows in checked.damaged:
        which = f"row {rows.start} is" if len(rows) == 1 else f"rows {rows.start} to {rows.stop - 1} are"
        checked.problems.append(f"{which} not as written, or cannot be read")
    return checked


def _is_damaged(store: OpenedLog, row: int) -> bool:
    try:
        store.gather(torch.tensor([row]))
    except (TableFormatError, OSError):
        return True
    return False
