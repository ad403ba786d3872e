"""File systems of a few MiB, which a test fills to the last byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torture.attack import Skipped
from torture.folders import Disk, mount_ext4, mount_tmpfs, removed

KINDS = ["ext4", "tmpfs"]


@contextmanager
def small_disk(kind: str, folder: Path, nbytes: int) -> Iterator[Disk]:
    """Mount a file system of a kind; skip the test where that is not permitted."""
    (place := folder / "small").mkdir()
    try:
        if kind == "tmpfs":
            yield mount_tmpfs(place / "disk", nbytes)
        else:
            yield mount_ext4(place / "disk", place / "image", nbytes)
    except Skipped as why:
        pytest.skip(str(why))
    finally:
        removed(place)


def used_bytes(disk: Disk) -> int:
    """Return the bytes that are in use on a disk, once its journal is written."""
    disk.sync()
    status = os.statvfs(disk.path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
