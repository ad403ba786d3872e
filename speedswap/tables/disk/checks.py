"""A table's log looked at from outside: facts for ``speedswap info``, and every checksum for ``speedswap verify``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from speedswap.errors import TableFormatError
from speedswap.tables.files.inspection import Checked, at_time

if TYPE_CHECKING:
    from speedswap.tables.disk.opened import OpenedLog

__all__ = ["check_log", "log_facts"]


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
    """Read every row that was ever written, and compare it with its checksum; see :meth:`RowStore.verify`."""
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
