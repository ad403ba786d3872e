"""A process that is killed at a call of the operating system which was drawn beforehand."""

from __future__ import annotations

import builtins
import mmap
import os
import signal
from collections.abc import Callable
from typing import Any

__all__ = ["Calls"]

_NAMES = (
    "open mkdir rename replace link symlink unlink rmdir truncate ftruncate posix_fallocate pwrite write fsync "
    "fdatasync chmod sendfile copy_file_range"
).split()


class Calls:
    """A count of this process's calls that change files; at one of them it ends with SIGKILL.

    Made in a child that does nothing else afterwards: the functions stay as they are then.

    Args:
        deadly: the number of the call, from 1; none for 0.
        before: end just before it instead of just after it.
    """

    def __init__(self, deadly: int = 0, *, before: bool = False) -> None:
        self.number = 0
        self._deadly = deadly
        self._before = before
        for name in _NAMES:
            if hasattr(os, name):
                setattr(os, name, self._counted(getattr(os, name)))
        builtins.open = self._counted(builtins.open)  # type: ignore[assignment]
        mmap.mmap = self._mapping(mmap.mmap)  # type: ignore[misc, assignment]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            mine = self.number
            if mine == self._deadly and self._before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if mine == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def _mapping(self, kind: type) -> type:
        """Mappings whose ``flush`` counts too."""
        return type("mmap", (kind,), {"flush": self._counted(kind.flush)})  # type: ignore[attr-defined]
