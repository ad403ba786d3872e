"""A row log: groups of rows in an append-only file, with a cache in memory, and commits."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.errors import TableBusyError
from speedswap.kernels import _C
from speedswap.kernels.host import as_ids, from_buffer

allocate = _C.allocate
"""Allocate ``count`` bytes of an open file, which then cannot run out of disk; an error leaves the file as it was."""

_Raw = TypeVar("_Raw", bound=_C.Room | _C.Bringing)
_Self = TypeVar("_Self", bound="_Released[Any]")


class _Released(Generic[_Raw]):
    """An object that leaving a ``with`` block releases.

    Args:
        raw: the kernels' object.
    """

    def __init__(self, raw: _Raw) -> None:
        self.raw = raw

    def release(self) -> None:
        """Release what is held; has no effect the second time."""
        self.raw.release()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Room(_Released[_C.Room]):
    """Room in a row log, reserved for groups that its holder will write, until it is released."""

    @property
    def groups(self) -> int:
        """The number of groups that can still be written with it."""
        return self.raw.groups


class Bringing(_Released[_C.Bringing]):
    """Rows being loaded into the cache of a row log, and pinned there until the bringing is released.

    :meth:`wait` first; then either :meth:`filled`, if groups are fresh, or :meth:`RowLog.write`, if rows were brought
    to be overwritten; then :meth:`release`. A release before these leaves the groups as they were.
    """

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait until the rows are in the cache.

        Returns:
            The place of each row, int64, shape (n,): its record is at ``cache_pointer + place * row_bytes``. And the
            fresh groups, int64, shape (m, 3): slot, group and layout. The caller fills all rows of each: completely for
            layout -1, and for an older layout the columns that it lacked.

        Raises:
            OSError: a read failed.
            RowLogDamaged: a record's checksum does not hold.
            RuntimeError: the bringing was released.
            TableBusyError: another process overwrote the rows faster than they could be read.
        """
        with says_if_busy():
            places, fresh = self.raw.wait()
        return from_buffer(places, torch.int64), from_buffer(fresh, torch.int64).view(-1, 3)

    def unwritten(self) -> Tensor:
        """Return the groups that were never written, int64, while others are being read; none after that."""
        return from_buffer(self.raw.unwritten(), torch.int64)

    def filled(self) -> None:
        """Mark the fresh groups as filled."""
        self.raw.filled()


@contextmanager
def says_if_busy() -> Iterator[None]:
    """Raise TableBusyError, with the remedy, if a writer in another process is faster than this reader."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TableBusyError) or error.errno != errno.EBUSY:
            raise
        raise TableBusyError(
            error.errno,
            "another process wrote over the table's log each time that it was read here: try again, or let the writer "
            "commit less often",
        ) from error


class RowLayout(NamedTuple):
    """The stored form of a group in one layout of the table.

    Attributes:
        group_bytes: bytes of a group's consecutive rows.
        moves: (from, to, bytes) for the parts of a group that the newest layout keeps.
    """

    group_bytes: int
    moves: Sequence[tuple[int, int, int]] = ()


def are_intact(records: NDArray[np.uint8], groups: NDArray[np.uint32], salt: int, stamp: int) -> NDArray[np.bool_]:
    """Compare records with their checksums.

    Args:
        records: shape (n, stride), contiguous; the last four bytes are the checksum.
        groups: the records' groups, shape (n,), contiguous.
        salt: the log's salt.
        stamp: the stamp of their segment's current use.
    """
    crcs = np.empty(len(records), np.uint32)
    _C.record_crcs(
        salt, stamp, groups.ctypes.data, records.ctypes.data, len(records), records.shape[1], crcs.ctypes.data
    )
    return np.asarray(crcs == np.ascontiguousarray(records[:, -4:]).view("<u4")[:, 0])


class RowLog(_C.RowLog):
    """A table's rows in two open files; csrc/row_log.h documents the protocol. Safe to use from several threads.

    Args:
        log_fd: the file of records, open for reading, and for writing if ``writable``. Duplicated, as is the next.
        head_fd: the file of commits.
        num_groups: groups of the table, 1 to 2**32 - 1.
        layouts: the layouts, oldest first; the cache uses the last.
        salt: the number under which the files were created.
        cache_bytes: bytes for cached records; at least 16 groups, at most the table.
        rows_per_group: a power of two.
        writable: False to follow another process's commits and never write.
        segment_bytes: a multiple of 4,096, from 64 KiB and 8 groups on.
        commit: the commit to open, by default the last. A writer then drops later commits, none of which may be held.
        scratch: True for a log without commits.
        direct: False to use the page cache even if the file system supports direct I/O.
        journal: True to record every write for :meth:`journal`.
        faults: parts of the protocol to leave out, for tests (``LogFault`` in csrc/row_log.h).
        before: an open log of the same files with fewer layouts, whose rows, committed or not, this one takes over. It
            is closed, or unchanged if this fails.

    Raises:
        OSError: a read failed.
        RowLogDamaged: the files are damaged, or belong to another table.
        TableBusyError: another process overwrote the log on each of 100 attempts to read it.
        ValueError: an argument is out of range.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as head:
    ...     fds, sizes = (log.fileno(), head.fileno()), {"num_groups": 10**6, "layouts": [RowLayout(512)]}
    ...     RowLog.create(*fds, salt=7, head=b"nothing yet")
    ...     rows = RowLog(*fds, salt=7, cache_bytes=1 << 20, **sizes)
    ...     with rows.bring(torch.tensor([5, 999_999]), overwrite=True) as bringing:
    ...         rows.write(bringing.wait()[0])  # and their bytes, at these places of the cache
    ...     rows.wait(rows.begin_commit(b"two rows"))
    ...     rows.touched, rows.head
    ...     rows.close()
    (2, b'two rows')
    """

    def __init__(
        self,
        log_fd: int,
        head_fd: int,
        *,
        num_groups: int,
        layouts: Sequence[RowLayout],
        salt: int,
        cache_bytes: int,
        rows_per_group: int = 1,
        writable: bool = True,
        segment_bytes: int = 4 << 20,
        commit: int | None = None,
        scratch: bool = False,
        direct: bool = True,
        journal: bool = False,
        faults: int = 0,
        before: RowLog | None = None,
    ) -> None:
        with says_if_busy():
            super().__init__(
                log_fd,
                head_fd,
                num_groups=num_groups,
                rows_per_group=rows_per_group,
                layouts=[(group_bytes, list(moves)) for group_bytes, moves in layouts],
                segment_bytes=segment_bytes,
                salt=salt,
                cache_bytes=cache_bytes,
                writable=writable,
                commit=-1 if commit is None else commit,
                scratch=scratch,
                direct=direct,
                journal=journal,
                faults=faults,
                before=before,
            )

    @staticmethod
    def create(log_fd: int, head_fd: int, *, salt: int, head: bytes = b"") -> None:
        """Write commit 0, with no rows, to two empty files, durably."""
        _C.create_row_log(log_fd, head_fd, salt, head)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def bring(  # type: ignore[override]
        self, rows: Tensor, *, overwrite: bool = False, ahead: bool = False, seen: bool = True
    ) -> Bringing | None:
        """Start loading rows into the cache, and pin them there.

        Args:
            rows: int64, shape (n,), in range; duplicates are allowed. At most :attr:`most_rows`.
            overwrite: True if the caller overwrites every byte of their groups: they are not read.
            ahead: True for a later step, which never takes more than half of the cache.
            seen: False if this is not a use that should keep the rows in the cache longer.

        Returns:
            The bringing, with reads in flight; None if ``ahead`` and the cache is too small.
        """
        rows = as_ids(rows)
        bringing = super().bring(rows.data_ptr(), len(rows), overwrite, ahead, seen)
        return None if bringing is None else Bringing(bringing)

    def unwritten(self, rows: Tensor) -> Tensor:
        """Return of each row whether it was never written and is not in the cache: bool, shape (n,).

        Args:
            rows: int64, shape (n,), in range.
        """
        rows, out = as_ids(rows), torch.empty(len(rows), dtype=torch.bool)
        self.find_unwritten(rows.data_ptr(), len(rows), out.data_ptr())
        return out

    def write(self, places: Tensor, room: Room | None = None) -> None:  # type: ignore[override]
        """Prepare places of a bringing for new bytes, which the caller writes next.

        Args:
            places: int64, shape (n,).
            room: used for groups unchanged since the last commit, as far as it goes.

        Raises:
            OSError: the disk is full (``errno.ENOSPC``); nothing has changed. A commit may make room.
        """
        places = as_ids(places)
        super().write(places.data_ptr(), len(places), None if room is None else room.raw)

    def make_room(self, groups: int, out_of: Room | None = None) -> Room:  # type: ignore[override]
        """Reserve room so that a number of groups can be written, in any number of calls, before the disk is full.

        Args:
            groups: the number of groups, counting a group each time it may be evicted and written again.
            out_of: other room to take from first.

        Returns:
            The room, to pass to these calls. Other writes and the cleaner do not touch it until it is released or
            garbage.

        Raises:
            OSError: the disk is full (``errno.ENOSPC``); nothing has changed.
        """
        return Room(super().make_room(groups, None if out_of is None else out_of.raw))

    # ---- commits -----------------------------------------------------------------------------------------------------

    def begin_commit(  # type: ignore[override]
        self, head: bytes = b"", *, hold: bool = False, files: Sequence[tuple[int, int, Tensor]] = ()
    ) -> int:
        """Begin to commit every change so far, in the background.

        Args:
            head: up to 65,472 bytes of caller data, kept with the commit.
            hold: True to keep the commit until :meth:`let_go`; at most two at a time.
            files: writes to other files, which the background thread makes durable before the commit: a descriptor,
                which is duplicated, the offset, and the bytes, uint8, which are copied. Without bytes the file, or the
                directory, is only synced.

        Returns:
            The number of the commit.
        """
        writes = [(fd, at, raw.data_ptr(), len(raw)) for fd, at, raw in files]
        return super().begin_commit(head, hold, writes)

    def wait_for_cleaner(self) -> None:  # type: ignore[override]
        """Wait until the background thread has compacted what it can, or for ten seconds."""
        deadline = time.monotonic() + 10
        while not super().wait_for_cleaner() and time.monotonic() < deadline:
            pass

    def written(self, start: int, stop: int, *, unlike: RowLog | None = None) -> Tensor:
        """Return rows that were ever written, in whole groups.

        Args:
            start, stop: the first row, and the one after the last.
            unlike: a log of the same files at another commit; then, rows whose records are elsewhere than there.

        Returns:
            Rows from ``start`` to ``stop``, int64, ascending.
        """
        return from_buffer(self.written_rows(start, stop - start, unlike), torch.int64)

    def changed_since(self, commit: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the rows that were written since a held commit, in whole groups.

        Changed groups are appended to the file first. Memory grows with the number of these rows, not with the table.

        Returns:
            Rows, int64, ascending: those that were changed, and those whose records the cleaner has moved since, which
            may be equal to the commit's. The last group may have rows past the table's last one.

        Raises:
            RowLogDamaged: a header is damaged.
            ValueError: the commit is not held.
            OSError: a read failed; ``errno.ESTALE`` if another process overwrote the data in the meantime.
        """
        changed, moved = super().changed_since(commit)
        return from_buffer(changed, torch.int64), from_buffer(moved, torch.int64)

    def refresh(self) -> bool:
        """Follow another process to its last commit.

        Returns:
            False if already there, or if this log is the writer or was opened at a commit.

        Raises:
            TableBusyError: the writer overwrote the log on each of 100 attempts to read it.
        """
        with says_if_busy():
            return super().refresh()

    # ---- all groups --------------------------------------------------------------------------------------------------

    def scan(self, groups_per_piece: int) -> Iterator[tuple[Tensor, Tensor, int]]:  # type: ignore[override]
        """Iterate over all groups that were ever written, in file order.

        Changed groups are appended to the file first. Nothing may be written until the iteration has ended.

        Args:
            groups_per_piece: the most groups in a piece.

        Yields:
            Groups, int64, shape (m,); their bytes, uint8, shape (m, group bytes of the newest layout); and the number
            of the layout they are stored in. For an older layout, only the parts that its moves keep are valid.

        Raises:
            RowLogDamaged: a group's record or a header is damaged.
            OSError: a read failed; ``errno.ESTALE`` if another process overwrote the data in the meantime.
        """
        scan = super().scan(groups_per_piece)
        while True:
            with says_if_busy():
                piece = scan.next()
            if piece is None:
                return
            groups, records = from_buffer(piece[0], torch.int64), torch.frombuffer(piece[1], dtype=torch.uint8)
            group_bytes = len(records) // groups_per_piece
            yield groups, records.view(groups_per_piece, group_bytes)[: len(groups)], piece[2]

    def verify(
        self, advance: Callable[[int], object] = lambda groups: None, strict: bool = False
    ) -> tuple[int, list[int]]:
        """Read every group that was ever written, and compare it with its checksum.

        Args:
            advance: called with the number of groups read since the last call.
            strict: True to raise the first error.

        Returns:
            The number of sound groups; and the damaged ones, with -1 for each damaged header.

        Raises:
            RowLogDamaged, OSError: as for :meth:`scan`, if ``strict``.
        """
        return super().verify(advance, strict)

    def fail(self, op: str, after: int, errno: int, times: int = 1, seconds: float = 0.0) -> None:
        """Inject failures of system calls, for tests; see _C.pyi."""
        super().fail(op, after, errno, times, seconds)
