"""Readers of a row log that another process writes: rows of one commit, no healthy log called damaged, no writes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from row_log_model import Log

from speedswap.errors import TableBusyError
from speedswap.kernels import RowLogDamaged

HELD_READS, SLOW_WALKS = 512, 2048


class Interrupted(Exception):
    """Raised by a signal's handler."""


@contextmanager
def committing(log: Log) -> Iterator[None]:
    """Commit in another thread, again and again."""
    ends = threading.Event()

    def commit() -> None:
        while not ends.is_set():
            log.log.wait(log.log.begin_commit())

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.fixture
def unreadable(log: Log) -> Log:
    """A log whose first header cannot be read just now, as when its segment is being written again."""
    with open(log.folder / "log", "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    return log


def test_a_log_that_is_written_faster_than_read_is_busy_and_not_damaged(unreadable: Log) -> None:
    """While commits run concurrently, damage cannot be detected; without them it is."""
    with committing(unreadable), pytest.raises(TableBusyError, match="commit less often"):
        Log(unreadable.folder, 1000, 200, writable=False, faults=SLOW_WALKS)
    with pytest.raises(RowLogDamaged, match="do not add up"):
        Log(unreadable.folder, 1000, 200, writable=False, faults=SLOW_WALKS)


def test_a_reader_that_falls_behind_is_busy_and_goes_on_later(log: Log) -> None:
    """Its rows are those of its commit until it has followed."""
    reader = Log(log.folder, 1000, 200, writable=False, faults=SLOW_WALKS)
    reader.rows = dict(log.rows)
    before = reader.log.durable
    log.commit()
    with open(log.folder / "log", "r+b") as file:
        first = file.read(1)
        os.pwrite(file.fileno(), bytes([first[0] ^ 1]), 0)
        with committing(log), pytest.raises(TableBusyError, match="commit less often"):
            reader.log.refresh()
        assert reader.log.durable == before
        os.pwrite(file.fileno(), first, 0)
    assert reader.log.refresh()
    reader.check_all()
    reader.close()


def test_signals_are_seen_between_two_walks(unreadable: Log) -> None:
    """Ctrl-C need not wait for a hundred of them."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with committing(unreadable), pytest.raises(Interrupted):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            Log(unreadable.folder, 1000, 200, writable=False, faults=SLOW_WALKS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_rows_that_are_brought_while_a_reader_follows_are_of_one_commit(tmp_path: Path) -> None:
    """Half of the rows have their slots already, and the other half waits for some while the commit changes."""
    log = Log(tmp_path, 64, 4000, cache_bytes=64 * 4000)
    log.put(torch.arange(8, 64), 1)
    log.commit()
    reader = Log(tmp_path, 64, 4000, cache_bytes=16 * 4000, writable=False, faults=HELD_READS)
    assert reader.log.num_slots == 16
    reader.check(torch.arange(8))  # initial values, which need no read
    reader.log.bring(torch.arange(8, 16)).release()  # eight slots whose reads are held
    log.put(torch.arange(64), 2)
    log.commit()
    rows, found = torch.cat([torch.arange(8), torch.arange(16, 24)]), []

    def bring() -> None:
        with reader.bring(rows) as bringing:
            found.append(reader.cache[reader.take(bringing)].copy())

    thread = threading.Thread(target=bring)
    thread.start()
    while reader.log.stats()["rows_outstanding"] == 0:
        time.sleep(0.001)
    time.sleep(0.05)  # until it waits for a slot
    assert reader.log.refresh()
    reader.log.let_reads_go()
    thread.join()
    np.testing.assert_array_equal(found[0], 2)
    reader.close()
    log.close()


def test_a_reader_neither_cleans_nor_makes_room(tmp_path: Path) -> None:
    """Its descriptors may permit it."""
    log = Log(tmp_path, 2000, 1000, cache_bytes=100_000)
    for value in (1, 2):
        for rows in torch.arange(2000 // value).split(25):
            log.put(rows, value)
        log.commit()
    reader = Log(tmp_path, 2000, 1000, cache_bytes=100_000, writable=False)
    size, threads = os.path.getsize(tmp_path / "log"), len(os.listdir("/proc/self/task"))
    reader.log.wait_for_cleaner()
    with pytest.raises(RuntimeError, match="open for reading"):
        reader.log.make_room(10**5)
    assert len(os.listdir("/proc/self/task")) == threads
    assert (reader.log.stats()["groups_moved"], os.path.getsize(tmp_path / "log")) == (0, size)
    reader.rows = log.rows
    reader.check_all()
    reader.close()
    log.close()
