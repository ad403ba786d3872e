"""The disk's own rate of random reads, by a program that is compiled for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["RandomReads"]

_SOURCE = Path(__file__).with_name("random_read.cpp")


class RandomReads:
    """``random_read.cpp``, compiled into a folder.

    Args:
        folder: for the program.
        threads: that read at once.
        block: bytes of each read.

    Attributes:
        missing: why it cannot be measured here; None if it can.
    """

    def __init__(self, folder: Path, *, threads: int = 64, block: int = 4096) -> None:
        self.threads, self.block = threads, block
        self._program = folder / "random_read"
        self.missing: str | None = None
        compiler = os.environ.get("CXX") or shutil.which("c++")
        if compiler is None:
            self.missing = "there is no C++ compiler: install one, or name it with CXX"
            return
        command = [compiler, "-O2", "-std=c++17", "-pthread", str(_SOURCE), "-o", str(self._program)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            self.missing = f"{compiler} failed: {' '.join(done.stderr.split())[:200]}"

    def per_second(self, file: Path, reads: int, seed: int) -> float | None:
        """Return random reads of a file per second; None, and say why in ``missing``, where that does not work."""
        if self.missing is None:
            words = [str(self._program), str(file), *map(str, (self.block, reads, self.threads, seed))]
            done = subprocess.run(words, capture_output=True, text=True)
            if not done.returncode:
                return reads / float(done.stdout)
            self.missing = f"random_read failed: {' '.join(done.stderr.split())[:200]}"
        return None
