"""Processes killed as they create, replace or extend a table: it is complete or absent, with no leftovers."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from children import answer, child, killed_at

from speedswap import Column, Table, init
from speedswap.errors import TableBusyError, TableFormatError

ROWS, DIM = 300, 4
LATE = Column("late", (2,), torch.float32, init.constant(4.0))


def table_of(value: float, path: Path | None = None) -> Table:
    """Make a table that forked children see, in files or in memory."""
    return Table.create(ROWS, DIM, path=path, storage="auto" if path else "pageable", init=init.constant(value))


def holds(table: Table, value: float, column: str = "weight") -> bool:
    return bool((table.read(column=column) == value).all())


def kill_everywhere(work: Callable[[], object], before: Callable[[], object], after: Callable[[], object]) -> int:
    """Kill the work before each change that it makes, with a fresh start each time; return the number of kills."""
    step = 0
    before()
    while killed_at(step, work):
        after()
        before()
        step += 1
    return step


def test_create_killed_anywhere_leaves_a_table_or_none(tmp_path: Path) -> None:
    """The path can be opened, or created again, which removes what the killed process made elsewhere."""
    path, seen = tmp_path / "above" / "t", set()

    def start() -> None:
        shutil.rmtree(path, ignore_errors=True)

    def check() -> None:
        try:
            with Table.open(path) as table:
                assert holds(table, 3.0)
                seen.add("there")
        except FileNotFoundError:
            seen.add("not there")
            table_of(3.0, path).close()
        assert [entry.name for entry in path.parent.iterdir()] == ["t"]

    assert kill_everywhere(lambda: table_of(3.0, path), start, check) > 5
    assert seen == {"there", "not there"}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exchange", [True, False], ids=["names exchanged", "names one by one"])
def test_save_killed_anywhere_leaves_the_old_table_or_the_new(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file system cannot exchange two names, so that the path is missing for a moment."""
    if not exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    path, new, seen = tmp_path / "t", table_of(2.0), set()
    table_of(1.0).save(path)

    def start() -> None:
        table_of(1.0).save(path, overwrite=True)

    def check() -> None:
        with Table.open(path, "r") as table:
            seen.add(table.read()[0, 0].item())
            assert holds(table, table.read()[0, 0].item())
        Table.open(path).close()
        assert [entry.name for entry in tmp_path.iterdir()] == ["t"]

    assert kill_everywhere(lambda: new.save(path, overwrite=True), start, check) > 10
    assert seen == {1.0, 2.0}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("written", [False, True], ids=["before the first write", "after it"])
def test_added_columns_killed_anywhere_are_there_or_not(written: bool, tmp_path: Path) -> None:
    """The rows stay, and files that no manifest refers to are removed."""
    path, seen = tmp_path / "t", set()

    def start() -> None:
        table = table_of(1.0)
        table.save(path, overwrite=path.exists())
        if written:
            with Table.open(path) as table:
                table.scatter(torch.arange(ROWS), torch.full((ROWS, DIM), 7.0))

    def work() -> None:
        Table.open(path).add_columns([LATE])

    def check() -> None:
        with Table.open(path) as table:
            assert holds(table, 7.0 if written else 1.0)
            seen.add("late" in table.columns)
            if "late" in table.columns:
                assert holds(table, 4.0, "late")
        assert {file.name for file in path.iterdir()} == {"LOCK", "MANIFEST", "rows.log", "HEAD"}

    assert kill_everywhere(work, start, check) > 10
    assert False in seen
    start()
    with Table.open(path) as table:
        table.add_columns([LATE])
    seen.clear()
    check()
    assert seen == {True}


def test_what_was_left_behind_is_removed_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process was killed while it filled a table: the next creation logs what it removes."""

    def dies(chunk: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed_at(10**6, lambda: Table.create(ROWS, DIM, path=tmp_path / "t", init=dies))
    assert not (tmp_path / "t").exists()
    (left,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING, logger="speedswap"):
        table_of(1.0, tmp_path / "t").close()
    assert f"removed {left}, left behind by a process that was killed" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def stays(path: Path) -> Callable[[Connection], None]:
    """Create a table, and wait in the middle of that for a message."""

    def work(connection: Connection) -> None:
        def waits(chunk: torch.Tensor) -> None:
            connection.send(sorted(entry.name for entry in path.parent.iterdir()))
            connection.recv()
            chunk.fill_(5.0)

        Table.create(ROWS, DIM, path=path, init=waits).close()
        connection.send("made")

    return work


def test_a_table_in_the_making_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    """While its process lives, no other process creates a table there or removes the unfinished one."""
    path = tmp_path / "t"
    with child(stays(path)) as (pid, connection):
        names = answer(connection)
        assert "t" not in names
        for make in (lambda: table_of(1.0, path), lambda: table_of(1.0).save(path)):
            with pytest.raises(TableBusyError, match=f"another process is making a table .*{pid}"):
                make()
        with pytest.raises(FileNotFoundError):
            Table.open(path)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == names
        connection.send("go on")
        assert answer(connection) == "made"
    with Table.open(path) as table:
        assert holds(table, 5.0)


def test_what_is_not_speedswaps_is_never_removed(tmp_path: Path) -> None:
    """A foreign directory under the hidden name stays as it is, and so does a foreign file among a table's files."""
    path = tmp_path / "t"
    with child(stays(path)) as (_, connection):
        (hidden,) = answer(connection)
    (tmp_path / hidden / "diary").write_text("precious")
    with pytest.raises(FileExistsError, match="holds 'diary', so that it is not speedswap's; move it away"):
        table_of(1.0, path)
    assert (tmp_path / hidden / "diary").read_text() == "precious"
    table_of(1.0).save(tmp_path / "other")
    (tmp_path / "other" / "diary").write_text("precious")
    with pytest.raises(FileExistsError, match="'diary' is among the table's files and would be lost"):
        table_of(2.0).save(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "diary").read_text() == "precious"


def test_a_directory_that_was_never_finished_is_named(tmp_path: Path) -> None:
    """The leftover of a killed process of an earlier version is reported, not removed: its rows may be valuable."""
    table_of(1.0, tmp_path / "t").close()
    (tmp_path / "t" / "MANIFEST").unlink()
    with pytest.raises(TableFormatError, match=r"never finished, or lost it: restore the file"):
        Table.open(tmp_path / "t")
    with pytest.raises(FileExistsError, match="a table without its MANIFEST, never finished or damaged: remove it"):
        table_of(1.0, tmp_path / "t")
    assert (tmp_path / "t" / "rows.log").exists()


def test_a_table_set_aside_long_ago_does_not_block_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process was killed after its second rename, on a file system that cannot exchange names."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    path, aside = tmp_path / "t", tmp_path / ".t.speedswap-old"
    table_of(2.0).save(path)
    table_of(1.0).save(aside)
    table_of(3.0).save(path, overwrite=True)
    assert f"removed {aside}, left behind by a process that was killed" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]
    with Table.open(path) as table:
        assert holds(table, 3.0)


@pytest.mark.parametrize("aside", [False, True], ids=["in place", "set aside"])
def test_a_process_without_file_descriptors_is_told_so(aside: bool, tmp_path: Path) -> None:
    """The error is EMFILE, not a damaged or missing table; with descriptors, it opens and nothing is left over."""
    path = tmp_path / "t"
    table_of(1.0, path).close()
    hidden = tmp_path / ".t.speedswap-old"

    def outcome(work: Callable[[], Table]) -> str:
        try:
            work().close()
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, type(error).__name__)
        except Exception as error:
            return type(error).__name__
        return "done"

    def work(connection: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files: list[int] = []

        def leave(free: int) -> None:
            while True:
                try:
                    files.append(os.open(os.devnull, os.O_RDONLY))
                except OSError:
                    break
            for _ in range(free):
                os.close(files.pop())

        found = []
        for free in range(12):
            if aside:
                path.rename(hidden)
            leave(free)
            found.append(outcome(lambda: Table.open(path)))
            if aside and hidden.exists():
                hidden.rename(path)
            leave(free)
            found.append(outcome(lambda: Table.open(path, "r")))
            leave(free)
            found.append(outcome(lambda: table_of(2.0, tmp_path / "new")))
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
        connection.send(found)

    with child(work) as (_, connection):
        found = answer(connection)
    assert set(found) == {"EMFILE", "done"}
    assert found[:3] == ["EMFILE"] * 3
    assert found[-3:] == ["done"] * 3
    table_of(2.0, tmp_path / "new").close()
    with Table.open(path) as table:
        assert holds(table, 1.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "t"]


# ---------------------------------------------------------------------------- one writer


def test_the_file_that_is_locked_is_the_one_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCK is exchanged for another file between being opened and being locked: the new one is locked."""
    path, real = tmp_path / "t", fcntl.flock
    table_of(1.0, path).close()

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)  # once
        (path / "LOCK").rename(tmp_path / "another name")
        (path / "LOCK").touch()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Table.open(path), pytest.raises(TableBusyError):
        Table.open(path)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lock_that_a_killed_process_still_holds_is_waited_for(ends: bool, tmp_path: Path) -> None:
    """Its memory is freed before its locks are. A process that does not get to it is not waited for without end."""
    path = tmp_path / "t"
    table_of(1.0, path).close()
    with subprocess.Popen(["true"]) as killed:
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        (path / "OWNER").write_text(f"{killed.pid} on {socket.gethostname()}\n")
        lock = os.open(path / "LOCK", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.2 if ends else 5.0, os.close, [lock])
        release.start()
        with nullcontext() if ends else pytest.raises(TableBusyError), Table.open(path) as table:
            assert holds(table, 1.0)
        release.cancel()
    if not ends:
        os.close(lock)


def test_the_lock_of_a_running_process_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opens(connection: Connection) -> None:
        with Table.open(tmp_path / "t"):
            connection.send("open")
            connection.recv()

    table_of(1.0, tmp_path / "t").close()
    with child(opens) as (_, connection):
        assert answer(connection) == "open"
        monkeypatch.setattr("speedswap.tables.files.locks.time.sleep", pytest.fail)
        with pytest.raises(TableBusyError):
            Table.open(tmp_path / "t")
        monkeypatch.undo()


def test_a_forked_child_neither_holds_nor_frees_the_lock(tmp_path: Path) -> None:
    """The parent's table stays locked when its child ends, and is free when it is closed while the child lives."""
    table = table_of(1.0, tmp_path / "t")

    def sees(connection: Connection) -> None:
        connection.send(holds(table, 1.0))
        connection.recv()

    with child(sees) as (_, connection):
        assert answer(connection)
    with pytest.raises(TableBusyError):
        Table.open(tmp_path / "t")
    with child(sees) as (_, connection):
        assert answer(connection)
        table.close()
        Table.open(tmp_path / "t").close()


def test_two_tables_of_one_process_do_not_write_one_directory(tmp_path: Path) -> None:
    """Also under another name of the directory, and after the first one was moved."""
    with table_of(1.0, tmp_path / "t"):
        (tmp_path / "link").symlink_to("t")
        with pytest.raises(TableBusyError):
            Table.open(tmp_path / "link")
        (tmp_path / "t").rename(tmp_path / "moved")
        with pytest.raises(TableBusyError):
            Table.open(tmp_path / "moved")
        with table_of(2.0, tmp_path / "t"):
            pass
    with Table.open(tmp_path / "moved") as table:
        assert holds(table, 1.0)
