"""Room in a row log for rows that are about to be written."""

from __future__ import annotations

from types import TracebackType

from speedswap.kernels import _C

__all__ = ["Room"]


class Room:
    """Room for groups that its holder is to write, which no other write takes until it is released.

    Leaving a ``with`` block releases it.
    """

    def __init__(self, room: _C.Room) -> None:
        self._room = room

    @property
    def raw(self) -> _C.Room:
        """The kernels' object."""
        return self._room

    @property
    def groups(self) -> int:
        """Groups that can still be written with it."""
        return self._room.groups

    def release(self) -> None:
        """Leave the rest to others. Has no effect the second time."""
        self._room.release()

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
