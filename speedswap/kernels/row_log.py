"""A row log: groups of rows in a file that is only appended to, a cache of them in memory, and commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.kernels import _C
from speedswap.kernels._C import RowLogDamaged, crc32c
from speedswap.kernels.bringing import Bringing, int64s, says_if_busy
from speedswap.kernels.host import as_ids
from speedswap.kernels.room import Room

__all__ = ["RowLayout", "RowLog", "RowLogDamaged", "are_intact", "crc32c"]


class RowLayout(NamedTuple):
    """The bytes of a group as one form of the table stores them.

    Attributes:
        group_bytes: of all rows of a group, one after the other.
        moves: (from, to, bytes) of what the newest layout keeps of a group.
    """

    group_bytes: int
    moves: Sequence[tuple[int, int, int]] = ()


def are_intact(records: NDArray[np.uint8], groups: NDArray[np.uint32], salt: int, stamp: int) -> NDArray[np.bool_]:
    """Compare records with their checksums.

    Args:
        records: shape (n, stride), contiguous; the last four bytes are the checksum.
        groups: whose they are, shape (n,), contiguous.
        salt: of the log.
        stamp: of the use of the segment that they lie in.
    """
    crcs = np.empty(len(records), np.uint32)
    _C.record_crcs(
        salt, stamp, groups.ctypes.data, records.ctypes.data, len(records), records.shape[1], crcs.ctypes.data
    )
    return np.asarray(crcs == np.ascontiguousarray(records[:, -4:]).view("<u4")[:, 0])


class RowLog:
    """A table's rows in two open files; csrc/row_log.h documents the protocol. Safe to use from several threads.

    Args:
        log_fd: the file of records, open for reading, and for writing if ``writable``. Duplicated, as is the next.
        head_fd: the file of commits.
        num_groups: groups of the table, 1 to 2**32 - 1.
        layouts: oldest first; the last one is that of the cache.
        salt: the number under which the files were created.
        cache_bytes: of the cache's records; at least 16 groups, at most the table.
        rows_per_group: a power of two.
        writable: False follows the commits of a writer elsewhere, and never writes a byte.
        segment_bytes: a multiple of 4,096, from 64 KiB and 8 groups on.
        commit: the one to open, the last by default. A writer then drops what came after it, of which none may be held.
        scratch: True for a log without commits.
        direct: False reads and writes through the page cache even if the file system can do without.
        journal: True to record every write for :meth:`journal`.
        faults: parts of the protocol to leave out, for tests (``LogFault`` in csrc/row_log.h).
        before: a log of these files, with fewer layouts, whose rows this one goes on with, committed or not. It is
            closed, or as it was if this fails.

    Raises:
        OSError: a read failed.
        RowLogDamaged: the files are damaged, or belong to another table.
        TableBusyError: a writer elsewhere wrote over the log each of 100 times that it was read.
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
        self._num_groups = num_groups
        with says_if_busy():
            self._log: _C.RowLog = _C.RowLog(
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
                before=None if before is None else before._log,
            )

    @staticmethod
    def create(log_fd: int, head_fd: int, *, salt: int, head: bytes = b"") -> None:
        """Write commit 0, with no rows, to two empty files, durably."""
        _C.create_row_log(log_fd, head_fd, salt, head)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def bring(
        self, rows: Tensor, *, overwrite: bool = False, ahead: bool = False, seen: bool = True
    ) -> Bringing | None:
        """Begin to bring rows into the cache, and pin them there.

        Args:
            rows: int64, shape (n,), in range; duplicates are allowed. At most :attr:`most_rows`.
            overwrite: True if the caller overwrites every byte of their groups: they are not read.
            ahead: True for a step to come: it never takes more than half of the cache.
            seen: False if this is not a use that should keep the rows in the cache longer.

        Returns:
            The bringing, while reads are under way; None if it was to be ahead and the cache is too small for it.
        """
        rows = as_ids(rows)
        bringing = self._log.bring(rows.data_ptr(), len(rows), overwrite, ahead, seen)
        return None if bringing is None else Bringing(bringing)

    def write(self, places: Tensor, room: Room | None = None) -> None:
        """Prepare places of a bringing for new bytes, which the caller writes next.

        Args:
            places: int64, shape (n,).
            room: taken by the groups that have not changed since the last commit, as far as it goes.

        Raises:
            OSError: the disk is full (``errno.ENOSPC``); nothing has changed. A commit may make room.
        """
        places = as_ids(places)
        self._log.write(places.data_ptr(), len(places), None if room is None else room.raw)

    def make_room(self, groups: int, out_of: Room | None = None) -> Room:
        """Make sure that so many groups can be written, in any number of calls, before the disk is full.

        Args:
            groups: a group counts as often as it may be evicted and written again.
            out_of: gives of it what it has left, before more is made.

        Returns:
            The room, to be given to these calls. Other writes and the cleaner leave it alone until it is released or
            garbage.

        Raises:
            OSError: the disk is full (``errno.ENOSPC``); nothing has changed.
        """
        return Room(self._log.make_room(groups, None if out_of is None else out_of.raw))

    # ---- commits -----------------------------------------------------------------------------------------------------

    def begin_commit(
        self, head: bytes = b"", *, hold: bool = False, files: Sequence[tuple[int, int, Tensor]] = ()
    ) -> int:
        """Begin to commit every change so far, in the background.

        Args:
            head: up to 65,472 bytes of the caller's, kept with the commit.
            hold: True to keep the commit until :meth:`let_go`; at most two at a time.
            files: writes to other files, which the background makes durable before the commit is: a descriptor, which
                is duplicated, the first byte, and the bytes, uint8, which are copied. Without bytes the file, or the
                directory, is only synced.

        Returns:
            The number of the commit.
        """
        writes = [(fd, at, raw.data_ptr(), len(raw)) for fd, at, raw in files]
        return self._log.begin_commit(head, hold, writes)

    def wait(self, commit: int) -> None:
        """Wait until a commit is durable.

        Raises:
            OSError: it failed; the files hold the commit before it, and the log can only be closed.
        """
        self._log.wait(commit)

    def wait_for_cleaner(self) -> None:
        """Wait until the background has moved together what it can, or for ten seconds."""
        deadline = time.monotonic() + 10
        while not self._log.wait_for_cleaner() and time.monotonic() < deadline:
            pass

    def let_go(self, commit: int) -> None:
        """Let a held commit's records be overwritten."""
        self._log.let_go(commit)

    def unlike(self, other: RowLog) -> Tensor:
        """Return the groups whose records are not where another log over the same files, at another commit, has them.

        Returns:
            bool, shape (groups,). Groups that were never written in both are alike.
        """
        marks = torch.empty(self._num_groups, dtype=torch.bool)
        self._log.mark_unlike(other._log, marks.data_ptr())
        return marks

    @property
    def durable(self) -> int:
        """The last durable commit; when opened, that one."""
        return self._log.durable

    @property
    def head(self) -> bytes:
        """The bytes given with the last durable commit."""
        return self._log.head

    @property
    def held(self) -> list[int]:
        """The durable commits that are held."""
        return self._log.held

    def held_head(self, commit: int) -> bytes:
        """Return the bytes given with a commit that is held."""
        return self._log.held_head(commit)

    @property
    def appending(self) -> bool:
        """True while a commit is being written; the next one cannot begin."""
        return self._log.appending

    @property
    def crowded(self) -> bool:
        """True if the file is large for its rows, and a commit would let much of it be written again."""
        return self._log.crowded

    def refresh(self) -> bool:
        """Follow a writer elsewhere to its last commit.

        Returns:
            False if that is the present one, or if this log is the writer or was opened at a commit.

        Raises:
            TableBusyError: the writer wrote over the log each of 100 times that it was read.
        """
        with says_if_busy():
            return self._log.refresh()

    # ---- all groups --------------------------------------------------------------------------------------------------

    @property
    def touched(self) -> int:
        """The number of groups that were ever written."""
        return self._log.touched

    def scan(self, groups_per_piece: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Walk over all groups that were ever written, in the order of the file.

        Changed groups are appended to it first. Nothing may be written until the walk has ended.

        Args:
            groups_per_piece: the most groups in a piece.

        Yields:
            Groups, int64, shape (m,); their bytes, uint8, shape (m, group bytes of the newest layout); and the number
            of the layout they are stored in. Of an older one, only what its moves keep is there.

        Raises:
            RowLogDamaged: a group's record or a header is damaged.
            OSError: a read failed; ``errno.ESTALE`` if another process wrote over it meanwhile.
        """
        scan = self._log.scan(groups_per_piece)
        while (piece := _next(scan)) is not None:
            groups, records = int64s(piece[0]), torch.frombuffer(piece[1], dtype=torch.uint8)
            group_bytes = len(records) // groups_per_piece
            yield groups, records.view(groups_per_piece, group_bytes)[: len(groups)], piece[2]

    def verify(self, advance: Callable[[int], object] = lambda groups: None) -> tuple[int, list[int]]:
        """Read every group that was ever written, and compare it with its checksum.

        Args:
            advance: called with the number of groups read since the last call.

        Returns:
            The number of sound groups; and the damaged ones, with -1 for each damaged header.
        """
        return self._log.verify(advance)

    def stats(self) -> dict[str, int]:
        """Return counters since the log was opened, and sizes."""
        return self._log.stats()

    # ---- the rest ----------------------------------------------------------------------------------------------------

    @property
    def cache_pointer(self) -> int:
        """The address of the cache's records."""
        return self._log.cache_pointer

    @property
    def num_slots(self) -> int:
        """Groups that the cache holds."""
        return self._log.num_slots

    @property
    def most_rows(self) -> int:
        """Rows that can be brought at once: never more than 2**22, nor than the cache holds of any."""
        return self._log.most_rows

    @property
    def direct(self) -> bool:
        """True if the log is read and written past the page cache."""
        return self._log.direct

    @property
    def fallback(self) -> str:
        """The reason why it is read and written through the page cache; empty if it is not."""
        return self._log.fallback

    @property
    def alignment(self) -> int:
        """Bytes that reads of the log are rounded to."""
        return self._log.alignment

    def close(self) -> None:
        """Drop what was not committed, and let go of the files."""
        self._log.close()

    def journal(self) -> list[tuple[str, str, int, bytes | int]]:
        """Return the calls that change the files since the last time.

        Returns:
            An entry as a call begins: the file, ``log``, ``head`` or, beside them, ``side``; ``write``, ``sync`` or
            ``allocate``; its first byte; the bytes written, or the number of bytes allocated. And one once it has
            returned without an error: the file; ``done``; the number of the call's entry, from the first one on;
            nothing.
        """
        return self._log.journal()

    def let_reads_go(self) -> None:
        """Let reads begin that wait for it, for tests."""
        self._log.let_reads_go()

    def fail(self, op: str, after: int, errno: int, times: int = 1, seconds: float = 0.0) -> None:
        """Fail calls of the system, for tests: ``times`` of them, after the next ``after`` ones.

        Args:
            op: ``read``, ``write``, ``sync`` or ``allocate``.
            after: calls that succeed before.
            errno: the error's number; 0 makes reads and writes short instead.
            times: calls that fail.
            seconds: that each of them takes longer; with ``errno=0`` a sync is slow and succeeds.
        """
        self._log.fail(op, after, errno, times, seconds)


def _next(scan: _C.LogScan) -> tuple[_C.Buffer, _C.Buffer, int] | None:
    with says_if_busy():
        return scan.next()
