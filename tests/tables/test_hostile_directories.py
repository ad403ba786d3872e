"""A table's directory from an unknown source: it is refused or harmless, and never reaches other files."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speedswap import Column, Disk, Table, init
from speedswap.errors import TableError, TableFormatError

FILES = ("LOCK", "OWNER", "MANIFEST", "MANIFEST.tmp", "rows.log", "HEAD", "keys-0.bin")
ROWS = ("rows.log", "HEAD")
LATE = Column("late", (2,), torch.float32, init.constant(4.0))


@contextmanager
def soon(seconds: int = 10) -> Iterator[None]:
    """Raise an error in a call that hangs."""

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def use(path: Path) -> None:
    """Make every call that opens or creates files in a table's directory."""
    with Table.open(path) as table:
        table.attributes["note"] = 1
        table.flush()
        table.add_columns([LATE])
        table.scatter(torch.tensor([1]), {"weight": torch.full((1, 4), 9.0)})


def a_link(path: Path) -> None:
    path.symlink_to("../precious")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("../not-yet")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path is short
        try:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # /dev/full
    except PermissionError:
        pytest.skip("may not make a device here")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("put", [a_link, a_dangling_link, a_fifo, a_directory, a_socket, a_device])
def test_what_is_no_file_is_refused_or_goes(put: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Another kind of file in place of a table's: nothing hangs, and nothing outside the directory changes."""
    (tmp_path / "precious").write_bytes(b"\0" * 160)
    path = tmp_path / "t"
    Table.create(10, 4, path=path).close()
    (path / name).unlink(missing_ok=True)
    put(path / name)
    with soon():
        needed = name in ("LOCK", "OWNER", "MANIFEST", *ROWS)
        if needed:
            with pytest.raises(TableFormatError, match=f"{name} is a.*, which is neither followed nor opened; remove"):
                use(path)
        else:
            use(path)
        if name in ("LOCK", "OWNER"):  # of no concern to a reader
            Table.open(path, "r").close()
    assert (tmp_path / "precious").read_bytes() == b"\0" * 160
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["precious", "t"]


@pytest.mark.parametrize("name", FILES)
def test_a_second_name_of_a_file_of_yours_is_not_written_through(name: str, tmp_path: Path) -> None:
    """A hard link cannot be told by its kind: files are replaced, not overwritten, and data with two names refused."""
    path = tmp_path / "t"
    Table.create(10, 4, path=path).close()
    precious = tmp_path / "precious"
    precious.write_bytes((path / name).read_bytes() if (path / name).exists() else b"precious")
    before = precious.read_bytes()
    (path / name).unlink(missing_ok=True)
    os.link(precious, path / name)
    if name in ROWS:
        with pytest.raises(TableFormatError, match=r"has 2 names \(hard links\).*separate it first: cp"):
            use(path)
        Table.open(path, "r").close()
    else:
        use(path)
    assert precious.read_bytes() == before


def test_a_table_behind_a_link_is_a_table(tmp_path: Path) -> None:
    """It is within the directory that links are not followed: the directory may have several names."""
    Table.create(10, 4, path=tmp_path / "t").close()
    (tmp_path / "link").symlink_to("t")
    use(tmp_path / "link")
    with Table.open(tmp_path / "t", "r") as table:
        assert torch.equal(table.read(1, 2), torch.full((1, 4), 9.0))


def test_files_that_only_look_like_id_maps_are_left_alone(tmp_path: Path) -> None:
    """Names that begin and end as an id map's does, and numbers as large as names can have."""
    path = tmp_path / "t"
    Table.create(10, 4, path=path).close()
    others = ["keys-x.bin", "keys--1.bin", "keys-.bin", "keys-1234567890.bin", "keys-٣.bin", "data-0.bin"]
    for name in others:
        (path / name).write_text("precious")
    use(path)
    with Table.open(path) as table:
        assert (table.read(column="late") == 4.0).all()
    for name in others:
        assert (path / name).read_text() == "precious"


# ---------------------------------------------------------------------------- manifests


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "MANIFEST").read_bytes().partition(b"\n")[2])
    return body


def write_body(path: Path, body: object) -> None:
    """Write a manifest of any content with a right checksum."""
    data = json.dumps(body).encode()
    (path / "MANIFEST").write_bytes(b"%08x\n" % zlib.crc32(data) + data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = body_of(path)
    change(body)
    write_body(path, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["columns"][0].update(init=None), "init is None"),
        (lambda m: m["columns"][0].update(init=[]), r"init is \[\]"),
        (lambda m: m["columns"][0].update(init={"kind": []}), "init is"),
        (
            lambda m: m["columns"][0].update(init={"kind": "constant", "value": "7"}),
            "init has '7'; a number was expected",
        ),
        (
            lambda m: m["columns"][0].update(init={"kind": "constant", "value": True}),
            "init has True; a number was expected",
        ),
        (lambda m: m["columns"][0].update(init={"kind": "uniform", "low": 1, "high": 0}), "low is 1"),
        (lambda m: m["columns"][0].update(init={"kind": "copy_of", "column": "gone"}), "starts as a copy of a copy"),
        (
            lambda m: m["columns"][0].update(init={"kind": "copy_of", "column": "weight"}),
            "starts as a copy of a copy",
        ),
        (lambda m: m["columns"][0].update(init={"kind": "copy_of", "column": {}}), "which is not a name"),
        (
            lambda m: m["columns"][0].update(init={"kind": "constant", "value": 1e308}),
            "'value': 1e\\+308}, which has no values of torch.float32",
        ),
        (
            lambda m: m["columns"][0].update(dtype="int8", init={"kind": "constant", "value": math.nan}),
            "no values of torch.int8",
        ),
        (
            lambda m: m["columns"][0].update(init={"kind": "uniform", "low": 0, "high": 1e308}),
            "no values of torch.float32",
        ),
        (
            lambda m: m["columns"][0].update(dtype="float16", init={"kind": "constant", "value": -(10**6)}),
            "no values of torch.float16",
        ),
        (lambda m: m["columns"][0].update(init={"kind": "normal", "mean": 0, "std": 10**400}), "OverflowError"),
        (
            lambda m: m["columns"][0].update(
                init={
                    "kind": "ranges",
                    "ranges": [
                        {"num_rows": 10, "seed": 0, "zero_row": None, "init": {"kind": "constant", "value": 1e39}}
                    ],
                }
            ),
            "no values of torch.float32",
        ),
        (lambda m: m["columns"][0].update(zero_row=10), "has zero_row 10"),
        (lambda m: m["columns"][0].update(zero_row=True), "has zero_row True"),
        (lambda m: m.update(version=True), "its version is True"),
        (lambda m: m["columns"][0].update(dtype=[]), "TypeError"),
    ],
)
def test_every_field_of_a_manifest_is_checked(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    """A value that no table writes is reported as damage, with the field and the value."""
    Table.create(10, 4, path=tmp_path / "t").close()
    rewrite(tmp_path / "t", change)
    for mode in ("r", "r+"):
        with pytest.raises(TableFormatError, match=message):
            Table.open(tmp_path / "t", mode)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**63) | st.just("weight"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every part of a JSON value."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*at, i))


def test_a_row_that_is_not_there_is_damage_if_it_cannot_be_computed(tmp_path: Path) -> None:
    """A manifest that names an unknown initializer, of rows that were never written."""
    path = tmp_path / "t"
    with Table.create(1000, 64, path=path, init=init.constant(5.0)) as table:
        table.write(0, torch.ones(10, 64))
    rewrite(path, lambda manifest: manifest["columns"][0].update(init={"kind": "torch", "function": "f"}))
    with Table.open(path) as table:
        assert torch.equal(table.read(0, 10), torch.ones(10, 64))
        with pytest.raises(TableFormatError, match=r"row 10 of column 'weight' .* was never written"):
            table.read(9, 12)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_field_may_say_anything(data: st.DataObject, tmp_path: Path) -> None:
    """A table opens and works, or TableFormatError says why not."""
    path = tmp_path / "t"
    if not path.exists():
        with Table.create(10, 4, path=path, init=init.uniform(0, 1), stored_dtype=torch.float16) as table:
            table.write(0, torch.ones(1, 4))
            table.add_columns([Column("late", (4,), torch.float32, init.copy_of("weight"))])
        (tmp_path / "good").write_bytes((path / "MANIFEST").read_bytes())
    (path / "MANIFEST").write_bytes((tmp_path / "good").read_bytes())
    body = body_of(path)
    *way, last = data.draw(st.sampled_from(list(places(body))))
    inner = body
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(ANYTHING)
    write_body(path, body)
    try:
        with Table.open(path, "r") as table:
            table.read()
    except TableError:
        pass


def test_rows_that_are_too_short_to_be_stored_alone_are_refused(tmp_path: Path) -> None:
    """A file of some MiB could name millions of them, each in a block of the index that no other is in."""
    Table.create(2**31, 4, path=tmp_path / "t").close()
    rewrite(tmp_path / "t", lambda manifest: manifest.update(group_rows=1))
    for mode in ("r", "r+"):
        with pytest.raises(TableFormatError, match="1 rows are stored as one"):
            Table.open(tmp_path / "t", mode)


def test_opening_takes_no_more_memory_than_is_promised(tmp_path: Path) -> None:
    """At the worst each row of the log has a block of the index to itself."""
    rows = torch.arange(30_000) * 10_007
    with Table.create(2**29, 64, storage=Disk(tmp_path / "t", commit_seconds=None)) as table:
        for some in rows.split(10_000):
            table.scatter(some, torch.ones(len(some), 64))
    files = sum(each.stat().st_blocks * 512 for each in (tmp_path / "t").iterdir())

    done = run_script(
        """
        import os, sys
        from pathlib import Path
        from speedswap import Disk, Table

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

        before = resident()
        with Table.open(Disk(sys.argv[1], cache_bytes=1), "r"):
            print(resident() - before)
        """,
        tmp_path / "t",
    )
    assert 1024 * len(rows) <= int(done.stdout) <= 5 * files + 2**26, done.stderr


def test_attributes_that_no_manifest_could_hold_are_refused_before_they_are_written(tmp_path: Path) -> None:
    """A table can always be opened again: a commit has no attributes that are too long to be read."""
    table = Table.create(10, 4, path=tmp_path / "t")
    table.attributes["much"] = "x" * 2**20
    with pytest.raises(ValueError, match=r"the attributes and id maps of table 't' take 10.* bytes as JSON"):
        table.flush()
    Table.open(tmp_path / "t", "r").close()
    del table.attributes["much"]
    table.close()
