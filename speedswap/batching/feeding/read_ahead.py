"""Items read by a thread, ahead of who wants them, as far as memory allows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """An iterator over what a generator yields in a thread of its own.

    Args:
        source: runs in the thread.
        nbytes: what an item takes.
        room: bytes for items that wait, with the one being read and the one last handed out, given the bytes of the
            largest item so far.
    """

    def __init__(
        self, source: Generator[Item, None, None], nbytes: Callable[[Item], int], room: Callable[[int], int]
    ) -> None:
        self._source = source
        self._nbytes = nbytes
        self._room = room
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes = self._handed_out = self._largest = 0
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="speedswap-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead[Item]:
        return self

    def __next__(self) -> Item:
        """The next item. The one before is taken to be done with."""
        with self._changed:
            self._bytes -= self._handed_out
            self._handed_out = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if self._waiting:
                item, self._handed_out = self._waiting.popleft()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop reading, let go of what waits, and wait for the thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()
        self._waiting.clear()

    def _read(self) -> None:
        try:
            while self._may_read():
                item = next(self._source)
                size = self._nbytes(item)
                with self._changed:
                    self._waiting.append((item, size))
                    self._bytes += size
                    self._largest = max(self._largest, size)
                    self._changed.notify_all()
                del item
        except StopIteration:
            pass
        except BaseException as error:  # whatever it is, it belongs to who iterates
            self._error = error
        finally:
            self._source.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _may_read(self) -> bool:
        """Wait until there is room for another item; one is always read for who waits for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._bytes or self._bytes + self._largest <= self._room(self._largest)
            )
            return not self._closed
