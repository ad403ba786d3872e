"""Folders for a round, which are removed with everything made, locked or mounted in them; and small disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from torture.attack import Skipped

__all__ = ["Disk", "emptied", "mount_ext4", "mount_tmpfs", "removed", "unmount"]


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """Provide an empty folder for the block, and remove it afterwards."""
    removed(folder)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        removed(folder)


def removed(folder: Path) -> None:
    """Remove a folder with all that is in it or mounted in it."""
    for mount in reversed(_mounts_under(folder)):
        subprocess.run(["umount", "--lazy", "--detach-loop", mount], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    if not os.path.lexists(folder):
        return
    for here, names, _ in os.walk(folder):  # a read-only folder cannot be emptied
        for name in names:
            path = os.path.join(here, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def _mounts_under(folder: Path) -> list[str]:
    """Return the mount points inside a folder, outer ones first."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    places = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [place for place in places if place.startswith(f"{folder}/")]


class Disk:
    """A mounted file system; removing the round's folder unmounts it.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left: int) -> None:
        """Fill the disk except for about ``left`` bytes."""
        filler = os.open(self.path / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            block = bytes(1 << 16)
            while block:
                try:
                    os.write(filler, block)
                except OSError:
                    block = block[: len(block) // 2] if len(block) > 512 else b""
            os.ftruncate(filler, max(0, os.fstat(filler).st_size - left))
            os.fsync(filler)
        finally:
            os.close(filler)

    def make_room(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)
        self.sync()

    def sync(self) -> None:
        """Write the journal, with which ext4 gives room back."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def mount_tmpfs(folder: Path, nbytes: int) -> Disk:
    """Mount memory of a size."""
    return _mounted(folder, ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "torture", str(folder)])


def mount_ext4(folder: Path, image: Path, nbytes: int = 0) -> Disk:
    """Mount an image; one of ``nbytes`` is made if that is given."""
    if nbytes:
        make = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
        if make is None:
            raise Skipped("needs mkfs.ext4")
        with open(image, "wb") as file:
            file.truncate(nbytes)
        _run([make, "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,nodiscard", str(image)])
    return _mounted(folder, ["mount", "-o", "loop", str(image), str(folder)])


def _mounted(folder: Path, words: list[str]) -> Disk:
    if os.geteuid():
        raise Skipped("mounting a disk needs root")
    folder.mkdir()
    _run(words)
    return Disk(folder)


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"{words[0]} fails here: {done.stderr.strip().splitlines()[-1] if done.stderr else ''}")


def unmount(disk: Disk, seconds: float = 20.0) -> None:
    """Unmount a disk; another process of the machine that looks into every mount keeps it busy for a moment."""
    end = time.monotonic() + seconds
    while True:
        done = subprocess.run(["umount", str(disk.path)], capture_output=True, text=True, check=False)
        if not done.returncode:
            return
        if "busy" not in done.stderr or time.monotonic() > end:
            raise OSError(f"{disk.path} cannot be unmounted: {done.stderr.strip()}")
        time.sleep(0.05)
