"""Equal memory for all: memory cgroups where they are permitted, dropped caches, and a process's own figures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["MemoryGroup", "disk_bytes", "drop_caches", "io_bytes", "resident_bytes"]

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A memory cgroup of this run, in which what a process allocates and caches from now on is limited.

    Args:
        name: of the group.
        limit: bytes.

    Raises:
        OSError: groups are not permitted here.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.path, file = _place(name)
        self.path.mkdir()
        try:
            (self.path / file).write_text(str(limit))
        except OSError:
            self.close()
            raise

    def enter(self) -> None:
        """Move the calling process into the group. Its memory so far stays with the group before."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        with suppress(OSError):
            self.path.rmdir()


def _place(name: str) -> tuple[Path, str]:
    """Return a new group's directory and the name of its file for the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            inside = _V1 / own.strip("/")
            return (inside if inside.is_dir() else _V1) / name, "memory.limit_in_bytes"
        if not controllers and "memory" in _controllers((_V2 / own.strip("/")).parent):
            return (_V2 / own.strip("/")).parent / name, "memory.max"
    raise FileNotFoundError("no memory cgroup")


def _controllers(group: Path) -> list[str]:
    try:
        return (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


def drop_caches(files: Iterable[Path], *, everything: bool) -> bool:
    """Write files back and drop them from the system's file cache.

    Args:
        files: which no process maps.
        everything: drop all other files' caches too, and those of directories and inodes, where that is permitted.

    Returns:
        Whether everything was dropped.
    """
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    if not everything:
        return False
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def resident_bytes() -> int:
    """Return this process's anonymous memory, without pages of files."""
    return _field(Path("/proc/self/status"), "RssAnon:") * 1024


def io_bytes() -> int:
    """Return what this process has caused to be written to disks, past the file cache or into it."""
    return _field(Path("/proc/self/io"), "write_bytes:")


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise FileNotFoundError(f"{path} has no {name}")


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder occupy on the disk."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
