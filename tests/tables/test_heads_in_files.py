"""Commits whose attributes or id maps are so numerous that their head is a separate file."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from children import exit_status

import speedswap
from speedswap import Column, Table, init, kernels
from speedswap.errors import TableFormatError, TableFullError
from speedswap.tables.disk.keys import HEAD_BYTES

LARGE = "x" * (HEAD_BYTES + 1000)


def with_a_large_head(path: Path, rows: int = 100) -> Table:
    table = Table.create(rows, 64, path=path)
    table.set_id_map(speedswap.IdMap(rows - 1))
    assert table.id_map is not None
    table.id_map.add(torch.arange(10))
    table.attributes.update(large=LARGE, step=100)
    table.write(0, torch.ones(rows, 64))
    return table


def key_files(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("keys"))


def test_a_commit_that_is_cut_short_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_large_head(tmp_path / "t").close()

    def trains() -> None:
        table = Table.open(tmp_path / "t")
        table.write(0, torch.full((5, 64), 2.0))
        monkeypatch.setattr(speedswap.kernels.RowLog, "begin_commit", lambda *args, **settings: os._exit(9))
        table.flush()

    assert exit_status(trains) == 9
    with Table.open(tmp_path / "t") as table:
        assert table.attributes["step"] == 100
        assert table.read(0, 1)[0, 0] == 1.0


def test_a_held_commit_keeps_its_attributes(tmp_path: Path) -> None:
    table = with_a_large_head(tmp_path / "t")
    commit = table.commits.hold()
    table.close()
    table = Table.open(tmp_path / "t")
    table.attributes["step"] = 200
    table.write(0, torch.full((5, 64), 2.0))
    table.flush()
    assert table.commits.attributes_of(commit)["step"] == 100
    table.commits.return_to(commit)
    assert table.attributes["step"] == 100
    assert table.read(0, 1)[0, 0] == 1.0
    table.close()
    Table.open(tmp_path / "t", commit=commit).close()


def test_columns_that_found_no_room_leave_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one item are stored in groups, and are copied to another log for a wide column."""
    table = Table.create(1000, 1, path=tmp_path / "t")
    table.attributes["large"] = LARGE
    table.write(0, torch.ones(1000, 1))
    directory = table.store._directory
    real = directory.write_manifest

    def full(manifest: object) -> None:
        if manifest.log:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(manifest)

    with monkeypatch.context() as patched:
        patched.setattr(directory, "write_manifest", full)
        with pytest.raises(OSError, match="No space left"):
            table.add_columns([Column("m", (256,), torch.float32, init.zeros())])
    with Table.open(tmp_path / "t", "r") as reader:
        assert reader.attributes["large"] == LARGE
    table.write(0, torch.full((1000, 1), 2.0))
    table.close()
    with Table.open(tmp_path / "t", "r") as reader:
        assert reader.read(0, 1).item() == 2.0


def test_files_that_no_commit_needs_go_also_beside_a_held_one(tmp_path: Path) -> None:
    table = with_a_large_head(tmp_path / "t", rows=1000)
    table.commits.hold()
    table.flush()
    table.write(0, torch.ones(10, 64))
    table.close()
    table = Table.open(tmp_path / "t")
    assert table.id_map is not None
    for step in range(20):
        table.id_map.add(torch.arange(step, step + 15))
        table.write(0, torch.ones(10, 64))
        table.flush()
    assert len(key_files(tmp_path / "t")) <= 6  # map and head, of the held commit and the last two
    table.close()


def test_a_damaged_head_in_a_file_is_found(tmp_path: Path) -> None:
    with_a_large_head(tmp_path / "t").close()
    file = tmp_path / "t" / key_files(tmp_path / "t")[-1]
    file.write_bytes(file.read_bytes().replace(b'"step": 100', b'"step": 900'))
    with pytest.raises(TableFormatError, match="its checksum is wrong"):
        Table.open(tmp_path / "t")


def test_more_maps_than_files_may_be_open(tmp_path: Path) -> None:
    """Each of them has changed with every commit."""

    def configs() -> list[speedswap.EmbeddingConfig]:
        return [
            speedswap.EmbeddingConfig(name=f"f{i}", num_embeddings=10, embedding_dim=8, id_map=speedswap.IdMap(9))
            for i in range(200)
        ]

    tables = speedswap.EmbeddingCollection(configs(), storage=speedswap.Disk(tmp_path / "t", commit_seconds=None))
    store = tables.groups[0].table.store
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 170, limits[1]))
    try:
        for step in range(4):
            for id_map in tables.id_maps.values():
                id_map.add(torch.tensor([step, step + 1]))
            store.flush()
        tables.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    reopened = speedswap.EmbeddingCollection.open(configs(), tmp_path / "t")
    assert all(id_map.lookup(torch.arange(6)).tolist() == [1, 2, 3, 4, 5, 0] for id_map in reopened.id_maps.values())
    reopened.close()


def test_a_commit_of_many_maps_waits_for_none_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are synced in the background, and named without a look at the directory for each."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(os, name, call)

    table = Table.create(1200, 4, storage=speedswap.Disk(tmp_path / "t", commit_seconds=None))
    table.store.notes.id_maps.update({f"m{i}": speedswap.IdMap(9) for i in range(120)})
    for name in ("fsync", "listdir"):
        counted(name)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, limits[1]), limits[1]))
    try:
        for step in range(3):
            for id_map in table.store.notes.id_maps.values():
                id_map.add(torch.tensor([step]))
            table.write(0, torch.ones(10, 4))
            table.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert calls["fsync"] == 0
    assert calls["listdir"] <= 10
    table.close()
    with Table.open(tmp_path / "t", "r") as again:
        maps = again.store.notes.id_maps.values()
        assert [id_map.lookup(torch.arange(4)).tolist() for id_map in maps] == [[1, 2, 3, 0]] * 120


# ---------------------------------------------------------------------------- a commit that cannot begin


def test_a_table_that_finds_no_room_for_its_last_commit_can_be_closed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table.create(100, 64, path=tmp_path / "t")
    table.set_id_map(speedswap.IdMap(99))
    assert table.id_map is not None
    table.id_map.add(torch.arange(5))
    table.scatter(torch.arange(100), torch.full((100, 64), 2.0))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "allocate", full)
        with pytest.raises(TableFullError):
            table.close()
        assert not table.closed
    table.close()
    with Table.open(tmp_path / "t", "r") as reader:
        assert (reader.read() == 2.0).all()
        assert reader.id_map is not None
        assert len(reader.id_map) == 5


def test_a_table_with_attributes_that_cannot_be_kept_stays_open(tmp_path: Path) -> None:
    table = Table.create(100, 64, path=tmp_path / "t")
    table.write(0, torch.ones(100, 64))
    table.attributes["a"] = torch.zeros(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        table.close()
    del table.attributes["a"]
    table.close()
    with Table.open(tmp_path / "t", "r") as reader:
        assert (reader.read() == 1.0).all()


def test_a_table_that_finds_no_room_can_be_removed(tmp_path: Path) -> None:
    table = Table.create(100, 64, path=tmp_path / "t")
    table.write(0, torch.ones(100, 64))
    table.attributes["a"] = torch.zeros(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        table.remove()
    assert table.closed
    assert not (tmp_path / "t").exists()


def test_commits_that_are_past_leave_nothing_in_memory(tmp_path: Path) -> None:
    with Table.create(100, 4, path=tmp_path / "items") as table:
        sizes = []
        for value in range(400):
            table.write(0, torch.full((1, 4), float(value)))
            table.flush()
            if value % 100 == 99:
                gc.collect()
                sizes.append(sum(type(each) is set for each in gc.get_objects()))
    assert max(sizes[1:]) - sizes[0] < 50
