"""A map from keys to rows is saved, opened, copied and closed with its table, as one."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import speedswap
from speedswap.errors import IdMapError, TableFormatError
from speedswap.tables import WrappedStore
from speedswap.tables.disk.keys import read_head
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.keys_file import PIECE_BYTES, encode

KEYS = torch.tensor([10**12, -4, 0])


def keyed(path: Path | None, **settings: object) -> speedswap.Table:
    users = speedswap.IdMap(7, **settings)
    table = speedswap.Table.create(8, 2, init=speedswap.init.normal(), path=path)
    table.set_id_map(users)
    users.add(KEYS)
    return table


def rows_of(table: speedswap.Table, keys: torch.Tensor = KEYS) -> list[int]:
    assert table.id_map is not None
    return table.id_map.lookup(keys).tolist()


def files_in(path: Path, kind: str = "keys") -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith(kind))


@pytest.mark.parametrize("kind", ["int64", "exact"])
def test_a_table_in_files_keeps_its_map(tmp_path: Path, kind: str) -> None:
    users = speedswap.IdMap(7, keys=kind, admit_after=2, evict="lru")
    with speedswap.Table.create(8, 2, path=tmp_path / "table") as table:
        table.set_id_map(users)
        keys = KEYS.repeat(2) if kind == "int64" else ["ä", "b", "", "b", "ä"]
        rows = users.add(keys)[0]
    with speedswap.Table.open(tmp_path / "table") as opened:
        assert opened.id_map is not None
        assert repr(opened.id_map) == repr(users)
        assert torch.equal(opened.id_map.to_bytes(), users.to_bytes())
        assert opened.id_map.lookup(keys).max() == rows.max()


def test_flush_replaces_the_file_once_the_map_has_changed(tmp_path: Path) -> None:
    with keyed(tmp_path / "table") as table:
        table.flush()
        (first,) = files_in(tmp_path / "table")
        table.flush()
        assert files_in(tmp_path / "table") == [first]
        assert table.id_map is not None
        table.id_map.add(torch.tensor([99]))
        table.flush()
        (second,) = files_in(tmp_path / "table")
        assert second != first
        with speedswap.Table.open(tmp_path / "table", "r") as reader:
            assert rows_of(reader, torch.tensor([99, 0])) == [4, 3]


def test_readers_follow_and_are_frozen(tmp_path: Path) -> None:
    with keyed(tmp_path / "table") as table:
        table.flush()
        with speedswap.Table.open(tmp_path / "table", "r") as reader:
            assert rows_of(reader) == [1, 2, 3]
            assert reader.id_map is not None
            with pytest.raises(IdMapError, match="frozen"):
                reader.id_map.add(KEYS)
            assert table.id_map is not None
            table.id_map.add(torch.tensor([99]))
            table.flush()
            reader.read(0, 1)
            assert rows_of(reader, torch.tensor([99])) == [4]
        there = pickle.loads(pickle.dumps(table))
        assert rows_of(there, torch.tensor([99])) == [4]
        there.close()


def test_copies_have_maps_of_their_own(tmp_path: Path) -> None:
    table = keyed(None)
    table.save(tmp_path / "saved")
    copies = [speedswap.Table.load(tmp_path / "saved"), speedswap.Table.open(tmp_path / "saved"), copy.deepcopy(table)]
    copies.append(speedswap.Table(WrappedStore(copy.deepcopy(table).store)))
    for each in copies:
        assert rows_of(each) == [1, 2, 3]
        assert each.id_map is not None
        each.id_map.add(torch.tensor([99]))
        each.close()
    assert rows_of(table, torch.tensor([99])) == [0]


def test_a_table_without_a_map_has_no_file_of_one(tmp_path: Path) -> None:
    speedswap.Table.create(8, 2, path=tmp_path / "table").close()
    assert files_in(tmp_path / "table") == []


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path, file: os.truncate(path / file, 0),
        lambda path, file: os.truncate(path / file, 200),
        lambda path, file: (path / file).write_bytes(b"x" * 400),
        lambda path, file: (path / file).unlink(),
        lambda path, file: ((path / file).unlink(), (path / file).mkdir()),
        lambda path, file: ((path / file).unlink(), (path / file).symlink_to("/etc/passwd")),
    ],
    ids=["empty", "cut", "other", "missing", "folder", "link"],
)
def test_damaged_maps_are_refused(tmp_path: Path, damage: Callable[[Path, str], object], mode: str) -> None:
    path = tmp_path / "table"
    keyed(path).close()
    (file,) = files_in(path)
    damage(path, file)
    with pytest.raises(TableFormatError):
        speedswap.Table.open(path, mode)


@pytest.mark.parametrize(
    "id_maps",
    [
        {"": "../keys-0.bin"},
        {"": 7},
        ["keys-0.bin"],
        {"a": "keys-0.bin", "b": "keys-0.bin"},
        {"a": "keys-0.bin", "b": [["keys-0.bin", 4096]]},
        {"": []},
        {"": [["keys-0.bin"]]},
        {"": [["keys-0.bin", -1]]},
        {"": [["keys-0.bin", True]]},
        {"": [[["keys-0.bin"], 4096]]},
        {"": [["../keys-0.bin", 4096]]},
    ],
    ids=str,
)
def test_files_of_maps_in_a_head_are_checked(id_maps: object) -> None:
    head = {"layout": 0, "writes": 0, "attributes": {}, "id_maps": id_maps}
    with pytest.raises(TableFormatError, match="the HEAD of table 't' is damaged: its id maps are"):
        read_head(json.dumps(head).encode(), "t", read=lambda name: b"")


def test_a_map_of_more_rows_than_the_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    keyed(path).close()
    (file,) = files_in(path)
    (path / file).write_bytes(encode(speedswap.IdMap(8).changes(None)[0], PIECE_BYTES).numpy().tobytes())
    with pytest.raises(TableFormatError, match="rows 0 to 8, but the table 8 rows"):
        speedswap.Table.open(path)


def test_a_failed_save_leaves_the_table_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table"
    table = keyed(path)
    table.flush()
    assert table.id_map is not None
    table.id_map.add(torch.tensor([99]))
    with monkeypatch.context() as patch:

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(TableDirectory, "create_keys", full)
        with pytest.raises(OSError, match="No space left"):
            table.flush()
    with speedswap.Table.open(path, "r") as reader:
        assert rows_of(reader, torch.tensor([99, 0])) == [0, 3]
    table.close()
    with speedswap.Table.open(path) as opened:
        assert rows_of(opened, torch.tensor([99, 0])) == [4, 3]
    assert len(files_in(path)) == 1


KILLED = """
import os, sys, torch, speedswap
items = speedswap.Embedding(8, 2, seed=1, path=sys.argv[1], id_map=speedswap.IdMap(7))
optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
def train(keys):
    optimizer.zero_grad()
    items(torch.tensor(keys)).sum().backward()
    optimizer.step()
train([5, 6])
items.table.flush()
train([7, 8, 5])
os.kill(os.getpid(), 9)
"""


def test_after_a_kill_rows_that_have_no_key_start_anew(tmp_path: Path) -> None:
    """The rows of keys added after the last commit return to that commit, like the map."""
    path = tmp_path / "table"
    subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(path)], check=False, timeout=100)
    fresh = speedswap.Embedding(8, 2, seed=1).table.read()
    for _ in range(2):  # also after the table was closed as it should be
        table = speedswap.Table.open(path)
        items = speedswap.Embedding(8, 2, table=table)
        assert rows_of(table, torch.tensor([5, 6, 7, 8, 9])) == [1, 2, 0, 0, 0]
        assert torch.equal(table.read(3, 5), fresh[3:5])
        table.close()
    table = speedswap.Table.open(path)
    items = speedswap.Embedding(8, 2, table=table)
    assert torch.equal(items(torch.tensor([8, 9])), fresh[3:5])
    table.close()
