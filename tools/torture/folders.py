"""Folders that a round may do anything in, and that are gone afterwards: full, unreadable or mounted over."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["emptied", "removed"]


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """Have an empty folder for the block, and remove it afterwards."""
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
    for here, names, _ in os.walk(folder):  # a folder that nobody may write cannot be emptied
        for name in names:
            path = os.path.join(here, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def _mounts_under(folder: Path) -> list[str]:
    """The places of mounts inside a folder, outer ones first."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    places = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [place for place in places if place.startswith(f"{folder}/")]
