"""Processes that read a table with an id map while another process trains it: keys and rows are of one commit."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from children import answer, child

import speedswap
from speedswap import Column, Table, init
from speedswap.tables import IdMap
from speedswap.tables.storage import copy_rows

KEYS = (1, 2, 3, 4)


def trained(path: Path) -> tuple[speedswap.Embedding, Callable[..., None]]:
    """Return an embedding with two rows for keys, and what gives keys their rows, with the key as each value."""
    id_map = IdMap(2, evict="lru")
    items = speedswap.Embedding(
        3, 2, id_map=id_map, storage=speedswap.Disk(path, commit_seconds=None), init=init.zeros()
    )

    def put(*keys: int) -> None:
        for key in keys:
            rows, renewed = id_map.add(torch.tensor([key]))
            items.table.reset_rows(renewed)
            items.table.scatter(rows, torch.full((1, 2), float(key)))
        items.table.flush()

    return items, put


def found(items: torch.nn.Module) -> dict[int, float]:
    with torch.no_grad():
        return {key: items(torch.tensor([key]))[0, 0].item() for key in KEYS}


@pytest.mark.parametrize("how", ["pickled", "forked"])
def test_a_readers_keys_get_the_rows_that_the_writer_gave_them(how: str, tmp_path: Path) -> None:
    items, put = trained(tmp_path / "t")
    put(1, 2)
    payload = pickle.dumps(items)

    def looks_up(connection: Connection) -> None:
        own = items.eval() if how == "forked" else pickle.loads(payload).eval()
        while True:
            connection.send(found(own))
            connection.recv()

    with child(looks_up) as (_, connection):
        assert answer(connection) == {1: 1.0, 2: 2.0, 3: 0.0, 4: 0.0}
        put(3, 4)
        connection.send("again")
        assert answer(connection) == {1: 0.0, 2: 0.0, 3: 3.0, 4: 4.0}
    items.table.close()


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "EmbeddingCollection"])
def test_a_commit_between_keys_and_rows_is_noticed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this very moment the writer gives the rows that were found to other keys."""
    path = tmp_path / "t"
    if kind == "EmbeddingCollection":
        config = speedswap.EmbeddingConfig(
            name="a", num_embeddings=3, embedding_dim=2, id_map=IdMap(2, evict="lru"), init=init.zeros()
        )
        tables = speedswap.EmbeddingCollection([config], storage=speedswap.Disk(path, commit_seconds=None))
        own, table = tables.id_maps["a"], tables.tables["a"]
        module: torch.nn.Module = tables
    else:
        place = speedswap.Disk(path, commit_seconds=None)
        module = getattr(speedswap, kind)(3, 2, id_map=IdMap(2, evict="lru"), storage=place, init=init.zeros())
        own, table = module.id_map, module.table

    def put(*keys: int) -> None:
        for key in keys:
            rows, renewed = own.add(torch.tensor([key]))
            table.reset_rows(renewed)
            table.scatter(rows, torch.full((1, 2), float(key)))
        table.flush()

    def looked_up(module: torch.nn.Module, key: int) -> float:
        given = torch.tensor([key])
        with torch.no_grad():
            if kind == "Embedding":
                return module(given)[0, 0].item()
            if kind == "EmbeddingBag":
                return module(given, torch.tensor([0]))[0, 0].item()
            return module({"a": given})["a"].values()[0, 0].item()

    put(1, 2)
    reader = pickle.loads(pickle.dumps(module)).eval()
    assert looked_up(reader, 1) == 1.0
    waiting, real = [(3, 4)], IdMap.lookup

    def lookup(self: IdMap, keys: object) -> torch.Tensor:
        rows = real(self, keys)
        if self is not own and waiting:
            put(*waiting.pop())
        return rows

    monkeypatch.setattr(IdMap, "lookup", lookup)
    assert looked_up(reader, 1) == 0.0
    assert not waiting
    assert [looked_up(reader, key) for key in KEYS] == [0.0, 0.0, 3.0, 4.0]


def test_a_table_saved_over_another_brings_its_keys_and_its_seed(tmp_path: Path) -> None:
    """The files of the two maps have one name and one size."""

    def save(keys: tuple[int, int], seed: int) -> torch.Tensor:
        with Table.create(101, 8, name="items", init=init.normal(), seed=seed, path=tmp_path / "made") as table:
            table.set_id_map(IdMap(100))
            assert table.id_map is not None
            rows, _ = table.id_map.add(torch.tensor(keys))
            table.scatter(rows, torch.tensor(keys, dtype=torch.float32)[:, None].expand(2, 8).contiguous())
            table.save(tmp_path / "t", overwrite=True)
            values = table.read()
        shutil.rmtree(tmp_path / "made")
        return values

    save((7, 8), 1)
    reader = Table.open(tmp_path / "t", "r")
    values = save((8, 7), 2)
    assert torch.equal(reader.read(), values)
    id_map = reader.id_map
    assert id_map is not None
    for key in (7, 8):
        assert reader.gather(id_map.lookup(torch.tensor([key]))).weight[0, 0] == key
    assert reader.seed == 2
    reader.save(tmp_path / "copy")
    with Table.open(tmp_path / "copy", "r") as copy:
        assert torch.equal(copy.read(), values)
    assert torch.equal(Table(copy_rows(reader.store)).read(), values)


def test_a_reader_that_could_not_open_a_file_follows_at_its_next_call(tmp_path: Path) -> None:
    items, put = trained(tmp_path / "t")
    put(1, 2)
    reader = pickle.loads(pickle.dumps(items)).eval()
    assert found(reader) == {1: 1.0, 2: 2.0, 3: 0.0, 4: 0.0}
    put(3, 4)
    held, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        with pytest.raises(OSError, match="Too many open files"):
            found(reader)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found(reader) == {1: 0.0, 2: 0.0, 3: 3.0, 4: 4.0}


# ---------------------------------------------------------------------------- columns, and commits that stay

LATE = Column("late", (64,), torch.float32, init.zeros())


def written(path: Path) -> Table:
    table = Table.create(1000, 64, path=path)
    table.write(0, torch.ones(1000, 64))
    table.flush()
    return table


def test_a_reader_that_looks_while_columns_are_added_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read the manifest that names the new layout, which no commit has yet."""
    table = written(tmp_path / "t")
    reader = Table.open(tmp_path / "t", "r")
    directory, seen = table.store._directory, []
    real = directory.write_manifest

    def write_manifest(manifest: object) -> None:
        real(manifest)
        seen.append(reader.read(0, 1)[0, 0].item())

    monkeypatch.setattr(directory, "write_manifest", write_manifest)
    table.add_columns([LATE])
    assert seen == [1.0]
    table.write(0, torch.full((10, 64), 3.0))
    table.flush()
    assert reader.read(0, 1)[0, 0] == 3.0
    assert list(reader.columns) == ["weight", "late"]
    table.close()


def test_a_table_is_opened_to_read_while_columns_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speedswap.tables.disk import opened

    table = written(tmp_path / "t")
    real, waiting = opened.LogCache, [LATE]

    def cache(*args: object, **settings: object) -> object:
        if waiting and not settings["writable"]:  # the manifest was read, but the log is not open
            table.add_columns([waiting.pop()])
            table.write(0, torch.full((10, 64), 3.0))
            table.flush()
        return real(*args, **settings)

    monkeypatch.setattr(opened, "LogCache", cache)
    with Table.open(tmp_path / "t", "r") as reader:
        assert not waiting
        assert reader.read(0, 1)[0, 0] == 3.0
        assert list(reader.columns) == ["weight", "late"]
    table.close()


def test_a_table_opened_at_a_commit_stays_at_it(tmp_path: Path) -> None:
    table = written(tmp_path / "t")
    commit = table.commits.hold()
    table.flush()
    table.write(0, torch.full((1000, 64), 2.0))
    table.flush()
    reader = Table.open(tmp_path / "t", "r", commit=commit)

    def reads(connection: Connection) -> None:
        connection.send(reader.read(0, 1)[0, 0].item())

    with child(reads) as (_, connection):
        assert answer(connection) == 1.0
    assert pickle.loads(pickle.dumps(reader)).read(0, 1)[0, 0] == 1.0
    table.add_columns([LATE])
    table.flush()
    assert reader.read(0, 1)[0, 0] == 1.0
    assert list(reader.columns) == ["weight"]
    table.close()


@pytest.mark.parametrize("commit", [-1, 1.5, True, "1"])
def test_a_commit_is_a_number(commit: object, tmp_path: Path) -> None:
    written(tmp_path / "t").close()
    with pytest.raises(ValueError, match="commit is"):
        Table.open(tmp_path / "t", "r", commit=commit)
