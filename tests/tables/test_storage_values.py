"""Places of rows are values: made once, checked once, taken everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedswap
from speedswap import Device, Disk, Pageable, Pinned, Ranks, Table
from speedswap.tables import as_storage

CONFIG = speedswap.EmbeddingConfig(name="item", num_embeddings=9, embedding_dim=4)
BAGS = speedswap.EmbeddingBagConfig(name="item", num_embeddings=9, embedding_dim=4)


def test_places_are_values() -> None:
    assert Pinned("staged") == Pinned(engine="staged") != Pinned()
    assert len({Disk("items"), Disk(Path("items")), Disk("items", cache_bytes=5), Device(), Pageable()}) == 4
    assert repr(Disk("items", commit_every=3)) == "Disk(path='items', commit_every=3)"
    assert repr(Ranks(Pinned("staged"), reduction="sum")) == "Ranks(each=Pinned(engine='staged'), reduction='sum')"
    with pytest.raises(FrozenInstanceError):
        Disk("items").cache_bytes = 5  # type: ignore[misc]


def test_places_of_other_kinds_are_equal_as_their_class_says() -> None:
    class Elsewhere(speedswap.tables.Storage):
        def __init__(self, address: str) -> None:
            self.address = address

        def create(self, num_embeddings: int, weight: Any, *, seed: int, name: str | None) -> Any:
            raise NotImplementedError

    here = Elsewhere("here")
    assert here == here != Elsewhere("there")
    assert not here.local_to_rank


@pytest.mark.parametrize(
    ("name", "path", "place"),
    [
        ("auto", "items", Disk("items")),
        ("disk", "items", Disk("items")),
        ("memmap", "items", Disk("items")),
        ("device", None, Device()),
        ("pinned", None, Pinned()),
        ("pageable", None, Pageable()),
        (Disk("items", scratch=True), None, Disk("items", scratch=True)),
    ],
)
def test_names_are_short_for_places(name: Any, path: str | None, place: speedswap.tables.Storage) -> None:
    assert as_storage(name, path) == place


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_storage("attic"), "storage is 'attic'; choose one of auto, device, pinned, pageable, disk"),
        (lambda: as_storage("disk"), "storage is 'disk' but path is None; give the directory"),
        (lambda: as_storage("pinned", "items"), "path is 'items' but storage is 'pinned'; only tables on disk"),
        (lambda: as_storage(Pinned(), "items"), r"path is 'items' but storage is Pinned\(\); leave one of them out"),
        (lambda: as_storage(Disk), "storage is an ABCMeta; give a place, such as speedswap.Disk"),  # type: ignore[arg-type]
        (lambda: Disk(""), "path is ''; give the directory that holds the table"),
        (lambda: Disk(5), "path is 5; give the directory that holds the table"),  # type: ignore[arg-type]
        (lambda: Pinned(hot_bytes=1.0), "hot_bytes is 1.0; give 1 or more bytes, or a fraction of the table below 1"),
        (lambda: Pinned(hot_bytes=0), "hot_bytes is 0; give 1 or more bytes, or a fraction of the table below 1"),
        (lambda: Pinned(hot_bytes="all"), "hot_bytes is 'all'; give bytes, a fraction of the table, 'auto', or None"),
        (lambda: Pinned(hot_bytes=True), "hot_bytes is True; give bytes, a fraction"),
        (
            lambda: Pinned("staged", 0.1),
            "hot_bytes is 0.1, but gather_share is 0: staged rows are read past the GPU's cache",
        ),
        (lambda: Ranks(Pinned(hot_bytes=0.1)), r"each is Pinned\(hot_bytes=0.1\), but rows of ranks have no cache of"),
        (lambda: Ranks(Ranks()), r"each is Ranks\(.*\), which is Ranks again"),
        (lambda: Ranks(reduction="max"), "reduction is 'max'; choose one of mean, sum"),
        (
            lambda: speedswap.Embedding(9, 4, storage=Ranks()),
            "speedswap.Ranks was given, but this process is not in a job",
        ),
        (lambda: Table.open(Pinned()), r"path is Pinned\(\); give a directory, or a place on disk"),
        (lambda: Table.open(Disk("items", scratch=True)), "scratch is True, but an existing table outlives"),
    ],
)
def test_what_is_no_place_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


TAKERS: dict[str, Callable[..., Any]] = {
    "Table.create": lambda **given: Table.create(9, 4, **given),
    "Embedding": lambda **given: speedswap.Embedding(9, 4, **given).table,
    "EmbeddingBag": lambda **given: speedswap.EmbeddingBag(9, 4, **given).table,
    "Embedding.from_pretrained": lambda **given: speedswap.Embedding.from_pretrained(torch.ones(9, 4), **given).table,
    "EmbeddingBag.from_pretrained": lambda **given: (
        speedswap.EmbeddingBag.from_pretrained(torch.ones(9, 4), **given).table
    ),
    "EmbeddingCollection": lambda **given: speedswap.EmbeddingCollection([CONFIG], **given).groups[0].table,
    "EmbeddingBagCollection": lambda **given: speedswap.EmbeddingBagCollection([BAGS], **given).groups[0].table,
    "EmbeddingCollection.from_modules": lambda **given: (
        speedswap.EmbeddingCollection.from_modules({"item": nn.Embedding(9, 4)}, **given).groups[0].table
    ),
    "convert": lambda **given: speedswap.convert(nn.Embedding(9, 4), min_rows=1, **given).table,
    "ModelFactory": lambda **given: made(speedswap.ModelFactory(nn.Embedding(2, 4), 9, 4, **given)),
}


def made(switcher: speedswap.ModelFactory) -> Table:
    switcher.zerosInit()
    return switcher.table


@pytest.mark.parametrize("taker", TAKERS)
def test_every_maker_of_tables_takes_places(taker: str, tmp_path: Path) -> None:
    for place, storage in ((Pageable(), "pageable"), (Device(), "device"), (Disk(tmp_path / "t"), "disk")):
        with TAKERS[taker](storage=place) as table:
            assert table.storage == storage
            assert str(table.path or tmp_path).startswith(str(tmp_path))


def test_a_copy_and_an_import_take_places(tmp_path: Path) -> None:
    with Table.create(9, 4, init=speedswap.init.normal(), path=tmp_path / "table") as table:
        table.save(tmp_path / "saved")
        table.export(tmp_path / "rows.npy")
        with Table.load(tmp_path / "saved", storage=Pageable()) as loaded:
            assert (loaded.storage, loaded.read().tolist()) == ("pageable", table.read().tolist())
        place = Disk(tmp_path / "imported", commit_every=7)
        with Table.from_file(tmp_path / "rows.npy", storage=place) as imported:
            assert imported.read().tolist() == table.read().tolist()
            assert (imported.storage, imported.path) == ("disk", place.folder)


def test_a_table_of_a_collection_may_have_its_own_memory(tmp_path: Path) -> None:
    other = speedswap.EmbeddingConfig(name="user", num_embeddings=9, embedding_dim=4, storage=Device())
    tables = speedswap.EmbeddingCollection([CONFIG, other], storage=Pageable())
    assert [group.table.storage for group in tables.groups] == ["pageable", "device"]
    with pytest.raises(ValueError, match=r"path is .* but storage is Device\(\); leave one of them out"):
        speedswap.EmbeddingCollection([CONFIG, other], path=tmp_path / "tables")
    own = speedswap.EmbeddingConfig(name="user", num_embeddings=9, embedding_dim=4, storage=Disk(tmp_path / "own"))
    with pytest.raises(ValueError, match=r"storage of table 'user' is Disk\(.*give a directory, or ranks, to the coll"):
        speedswap.EmbeddingCollection([CONFIG, own])
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- a table for each process of a job


def test_a_place_says_that_each_process_has_a_table_of_its_own(tmp_path: Path) -> None:
    place = Disk(tmp_path / "t", local_to_rank=True)
    items = speedswap.Embedding(9, 4, storage=place)
    assert items.local_to_rank
    assert items.table.local_to_rank
    items.table.save(tmp_path / "saved")
    items.table.close()
    with Table.open(place) as table:
        assert speedswap.Embedding(9, 4, table=table).local_to_rank
    with Table.open(place.path) as table:
        assert not speedswap.Embedding(9, 4, table=table).local_to_rank
    loaded = Table.load(tmp_path / "saved", storage=Pageable(local_to_rank=True))
    assert copy.deepcopy(loaded).local_to_rank
    config = speedswap.EmbeddingConfig(name="user", num_embeddings=9, embedding_dim=4, storage="device")
    tables = speedswap.EmbeddingCollection([CONFIG, config], storage=Pageable(local_to_rank=True))
    assert all(group.local_to_rank for group in tables.groups)
    with pytest.raises(ValueError, match="local_to_rank is True, but the ranks own the rows together"):
        Ranks(Pageable(local_to_rank=True))
