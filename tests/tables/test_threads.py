"""One table in several threads: every operation is whole, and a closed table raises instead of crashing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import run_script

import speedswap
from speedswap.errors import TableBusyError, TableClosedError
from speedswap.tables.disk.cache import cache_bytes_for, promise
from speedswap.tables.files.locks import WriterLock
from speedswap.tables.files.open_directory import OpenDirectory

STORAGES = ["pageable", "disk"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("change", ["close", "add_columns"])
def test_rows_are_read_while_another_thread_changes_the_table(storage: str, change: str, tmp_path: Path):
    """Gathers, reads and scores during close() or add_columns(): right rows or TableClosedError, never a crash."""
    found = run_script(
        """
        import sys, threading, torch, speedswap
        storage, change, folder = sys.argv[1:]
        from speedswap.tables import Column

        def use(table, queries, errors):
            rows = torch.arange(0, 20000, 3)
            ways = (lambda: table.gather(rows).weight, lambda: table.read(5, 15000), lambda: module.score(queries, 3))
            try:
                while True:
                    for way in ways:
                        values = way()
                        assert isinstance(values, tuple) or bool((values == 1).all())
            except speedswap.errors.TableClosedError:
                return
            except BaseException as error:
                errors.append(repr(error))

        for turn in range(6):
            path = f"{folder}/{turn}" if storage == "disk" else None
            table = speedswap.Table.create(20000, 64, storage=storage, path=path, init=speedswap.init.constant(1.0))
            module = speedswap.Embedding(20000, 64, table=table)
            module.weight.requires_grad_(False)
            errors = []
            threads = [threading.Thread(target=use, args=(table, torch.ones(2, 64), errors)) for _ in range(3)]
            for thread in threads:
                thread.start()
            if change == "add_columns":
                for i in range(3):
                    table.add_columns([Column(f"more{i}", (64,), torch.float32, speedswap.init.zeros())])
                assert all(thread.is_alive() for thread in threads), errors
            table.close()
            for thread in threads:
                thread.join(60)
            assert not errors, errors
        """,
        storage, change, tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("storage", STORAGES)
def test_a_gather_sees_all_of_a_scatter_or_nothing_of_it(storage: str, tmp_path: Path):
    """A block gathered during scatters of constant rows has one constant throughout."""
    path = tmp_path / "table" if storage == "disk" else None
    rows = torch.arange(3000)
    with speedswap.Table.create(3000, 32, storage=storage, path=path) as table:
        stop, torn = threading.Event(), []

        def look() -> None:
            while not stop.is_set():
                weight = table.gather(rows).weight
                if bool((weight != weight[0, 0]).any()):
                    torn.append(weight[:, 0].unique().tolist())

        readers = [threading.Thread(target=look) for _ in range(3)]
        for reader in readers:
            reader.start()
        for value in range(150):
            table.scatter(rows, torch.full((3000, 32), float(value)))
        stop.set()
        for reader in readers:
            reader.join(60)
        assert not torn


def test_scatters_of_several_threads_all_arrive():
    """Threads that write disjoint rows leave every row written."""
    with speedswap.Table.create(800, 4) as table:

        def write(first: int) -> None:
            for row in range(first, 800, 4):
                table.scatter(torch.tensor([row]), torch.full((1, 4), float(row)))

        writers = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert torch.equal(table.read()[:, 0], torch.arange(800.0))
        assert table.writes == 800


def test_a_child_forked_while_another_thread_uses_the_table_can_read_it():
    """The child finds the table's lock free, whichever thread held it in the parent."""
    table = speedswap.Table.create(1000, 8, storage="pageable", init=speedswap.init.constant(2.0))
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            table.read()

    reader = threading.Thread(target=keep_reading)
    reader.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                right = bool((table.gather(torch.arange(10)).weight == 2).all())
                os._exit(0 if right else 1)
            for _ in range(2000):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    break
                threading.Event().wait(0.01)
            else:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child waits for a lock that is never released")
            assert status == 0
    finally:
        stop.set()
        reader.join(60)
        table.close()


def test_a_table_closed_twice_at_once_is_closed_once(tmp_path: Path):
    """Several threads may close a table; what was written is in its files."""
    for turn in range(5):
        table = speedswap.Table.create(100, 4, path=tmp_path / str(turn))
        table.scatter(torch.tensor([7]), torch.ones(1, 4))
        closers = [threading.Thread(target=table.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(60)
        with pytest.raises(TableClosedError):
            table.gather(torch.tensor([7]))
        with speedswap.Table.open(tmp_path / str(turn)) as again:
            assert again.gather(torch.tensor([7])).weight.tolist() == [[1.0] * 4]


class _Cache:
    """A store that another thread finds while its cache is counted."""

    def __init__(self, met: Callable[[], None] = lambda: None) -> None:
        self._met = met

    @property
    def cache_bytes(self) -> int:
        self._met()
        return 1


def test_a_table_is_made_while_another_thread_sums_up_the_caches() -> None:
    """A default cache is a share of what is not promised to others, which go on being made meanwhile."""
    later = _Cache()
    maker = threading.Thread(target=promise, args=(later,))

    def met() -> None:
        if maker.ident is None:
            maker.start()
            maker.join(0.3)  # long enough to be added, unless it has to wait

    first = _Cache(met)
    promise(first)
    assert cache_bytes_for(1, None) == 1
    maker.join(60)
    assert maker.ident is not None
    assert not maker.is_alive()


@pytest.mark.parametrize("tries", [5, pytest.param(100, marks=pytest.mark.release)])
def test_a_table_is_busy_also_while_other_threads_open_and_close_others(tries: int, tmp_path: Path) -> None:
    """Its own writer is found among locks that come and go."""

    def folder(name: str) -> OpenDirectory:
        (tmp_path / name).mkdir()
        return OpenDirectory(tmp_path / name)

    held = [WriterLock(folder(f"held {place}"), say=False) for place in range(200)]
    stop = threading.Event()

    def come_and_go(directories: list[OpenDirectory]) -> None:
        while not stop.is_set():
            for lock in [WriterLock(directory, say=False) for directory in directories]:
                lock.release()

    directories = [[folder(f"other {thread} {place}") for place in range(20)] for thread in range(3)]
    others = [threading.Thread(target=come_and_go, args=(some,)) for some in directories]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        for _ in range(tries):
            with pytest.raises(TableBusyError, match="is open for writing in process"):
                WriterLock(OpenDirectory(tmp_path / "held 0"), say=False)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for other in others:
            other.join(60)
        for lock in held:
            lock.release()
