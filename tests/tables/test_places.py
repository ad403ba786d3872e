"""The place of a table's files: the path at the time it was opened, with the user's umask."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import speedswap
from speedswap import Column, Embedding, Table, init
from speedswap.errors import TableTooLargeError

LATE = Column("late", (1,), torch.float32, init.zeros())


@pytest.fixture
def two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two directories, the first of them the working directory, and a table ``t`` of fives in the second."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    Table.create(5, 2, path=tmp_path / "there" / "t", init=init.constant(5.0)).close()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


@pytest.mark.parametrize("how", ["create", "open", "open to read", "save"])
def test_a_relative_path_does_not_lead_elsewhere_later(how: str, two_places: tuple[Path, Path]) -> None:
    """A table opened by a relative path stays the same table when the working directory changes."""
    here, there = two_places
    table = Table.create(9, 3, path="t", init=init.constant(1.0))
    if how != "create":
        table.close()
        table = Table.open("t", "r" if how == "open to read" else "r+")
    os.chdir(there)
    assert table.path == here / "t"
    if how == "save":
        table.save("saved")
        assert (there / "saved").is_dir()
    if how == "open to read":
        assert torch.equal(table.gather(torch.tensor([1])).weight, torch.ones(1, 3))
        with pickle.loads(pickle.dumps(table)) as again:
            assert len(again) == 9
    else:
        table.scatter(torch.tensor([1]), torch.full((1, 3), 2.0))
        table.add_columns([LATE])
        table.flush()
    table.close()
    with Table.open(there / "t") as other:
        assert (other.read() == 5.0).all()
        assert list(other.columns) == ["weight"]
    with Table.open(here / "t") as mine:
        assert mine.read(1, 2)[0, 0] == (1.0 if how == "open to read" else 2.0)


def test_a_table_that_is_moved_keeps_its_files(tmp_path: Path) -> None:
    """A new table at its old path is not touched."""
    table = Table.create(9, 3, path=tmp_path / "t", init=init.constant(1.0))
    (tmp_path / "t").rename(tmp_path / "moved")
    with Table.create(5, 2, path=tmp_path / "t", init=init.constant(5.0)):
        table.add_columns([LATE])
        table.scatter(torch.tensor([1]), {"weight": torch.full((1, 3), 2.0)})
        table.close()
    with Table.open(tmp_path / "t") as other, Table.open(tmp_path / "moved") as mine:
        assert (other.read() == 5.0).all()
        assert list(mine.columns) == ["weight", "late"]
        assert mine.read(0, 2)[:, 0].tolist() == [1.0, 2.0]


# ---------------------------------------------------------------------------- links


def test_save_over_a_link_replaces_the_table_that_opens_under_it(tmp_path: Path) -> None:
    """The link stays a link, and nothing else is left."""
    Table.create(5, 2, init=init.constant(1.0)).save(tmp_path / "runs" / "7")
    (tmp_path / "latest").symlink_to("runs/7")
    new = Table.create(5, 2, init=init.constant(2.0))
    with pytest.raises(FileExistsError, match="give overwrite=True"):
        new.save(tmp_path / "latest")
    new.save(tmp_path / "latest", overwrite=True)
    assert os.readlink(tmp_path / "latest") == "runs/7"
    for path in ("latest", "runs/7"):
        with Table.open(tmp_path / path, "r") as table:
            assert (table.read() == 2.0).all()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "runs"]
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["7"]


def test_a_link_to_nothing_is_not_saved_over(tmp_path: Path) -> None:
    """With and without overwrite; and nothing is created at its target."""
    (tmp_path / "latest").symlink_to("gone")
    table = Table.create(5, 2)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            table.save(tmp_path / "latest", overwrite=overwrite)
    with pytest.raises(FileExistsError):
        Table.create(5, 2, path=tmp_path / "latest")
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


# ---------------------------------------------------------------------------- permissions


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(path: Path) -> set[tuple[str, int]]:
    found = {("directory", stat.S_IMODE(path.stat().st_mode))}
    return found | {("file", stat.S_IMODE(file.stat().st_mode)) for file in path.iterdir()}


@pytest.mark.parametrize(
    ("mask", "directory", "file"), [(0o077, 0o700, 0o600), (0o022, 0o755, 0o644), (0o002, 0o775, 0o664)]
)
@pytest.mark.parametrize("how", ["create", "save", "save over another"])
def test_files_have_the_permissions_that_the_umask_leaves(
    how: str, mask: int, directory: int, file: int, tmp_path: Path, umask: None
) -> None:
    """A table's files have the permissions of the user's umask."""
    os.umask(mask)
    path = tmp_path / "t"
    if how == "create":
        Table.create(5, 2, path=path).close()
    else:
        Table.create(5, 2).save(path)
    if how == "save over another":
        Table.create(5, 2).save(path, overwrite=True)
    assert modes(path) == {("directory", directory), ("file", file)}


def test_saving_over_a_private_table_leaves_it_private(tmp_path: Path, umask: None) -> None:
    """Permissions that were removed by hand are not restored by the next checkpoint."""
    Table.create(5, 2).save(tmp_path / "t")
    (tmp_path / "t").chmod(0o700)
    Table.create(5, 2).save(tmp_path / "t", overwrite=True)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("storage", ["pageable", "device", "disk"])
@pytest.mark.parametrize(
    ("rows", "dim"),
    [(2**62, 64), (2**63, 1), (2**64, 1), (10**30, 10**30), (1, 2**33), (1, 2**62), (2**50, 2**30)],
)
def test_a_table_of_more_bytes_than_can_be_counted_is_refused(
    rows: int, dim: int, storage: str, tmp_path: Path
) -> None:
    """One error with the numbers, and nothing is created."""
    path = tmp_path / "above" / "t" if storage == "disk" else None
    with pytest.raises(TableTooLargeError, match=f"num_embeddings is {rows}, and a row of weight takes .*: use fewer"):
        Table.create(rows, dim, storage=storage, path=path)
    assert list(tmp_path.iterdir()) == []


def test_columns_of_more_bytes_than_can_be_counted_are_refused(tmp_path: Path) -> None:
    """The table stays as it was."""
    with Table.create(2**40, 1, path=tmp_path / "t", dtype=torch.int8) as table:
        with pytest.raises(
            TableTooLargeError, match="num_embeddings is 1099511627776, and a row of weight, wide takes"
        ):
            table.add_columns([Column("wide", (2**30,), torch.float32, init.zeros())])
        assert list(table.columns) == ["weight"]
        table.add_columns([Column("late", (1,), torch.int8, init.zeros())])
    with Table.open(tmp_path / "t") as table:
        assert list(table.columns) == ["weight", "late"]


def some_collection(**place: Any) -> speedswap.EmbeddingCollection:
    config = speedswap.EmbeddingConfig(num_embeddings=5, embedding_dim=2, name="a", feature_names=["a"])
    return speedswap.EmbeddingCollection([config], **place)


MAKES: dict[str, Callable[[Path], object]] = {
    "a table": lambda path: Table.create(5, 2, path=path / "inner"),
    "a table further in": lambda path: Table.create(5, 2, path=path / "a" / "b"),
    "a scratch table": lambda path: Table.create(5, 2, storage=speedswap.Disk(path / "inner", scratch=True)),
    "a saved table": lambda path: Table.create(5, 2).save(path / "inner"),
    "an exported file": lambda path: Table.create(5, 2).export(path / "rows.npy"),
    "an exported file over its own": lambda path: Table.create(5, 2).export(path / "HEAD", "npy", overwrite=True),
    "an imported table": lambda path: Table.from_file(path.parent / "rows.npy", path / "inner"),
    "a collection": lambda path: some_collection(path=path),
    "a collection further in": lambda path: some_collection(path=path / "a"),
    "a saved collection": lambda path: some_collection().save(path / "a"),
    "checkpoints": lambda path: speedswap.save_checkpoint(path, speedswap.Embedding(5, 2)),
    "checkpoints further in": lambda path: speedswap.save_checkpoint(path / "a", speedswap.Embedding(5, 2)),
}


@pytest.mark.parametrize("by", ["path", "link"])
@pytest.mark.parametrize("what", MAKES)
def test_nothing_is_made_inside_a_tables_directory(what: str, by: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = Table.create(5, 2, path=path, init=init.constant(3.0))
    table.export(tmp_path / "rows.npy")
    (tmp_path / "link").symlink_to(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=r"inside the table in .*; give one outside of any table"):
        MAKES[what](path if by == "path" else tmp_path / "link")
    assert sorted(tmp_path.rglob("*")) == before
    table.close()
    with Table.open(path) as again:
        assert (again.read() == 3.0).all()


def test_what_is_in_the_way_of_a_new_table_is_told_apart(tmp_path: Path) -> None:
    """Opening helps with a table alone."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    Table.create(3, 2, path=tmp_path / "table").close()
    for name, remedy in {"folder": "give a path where", "file": "give a path where", "table": "open it with"}.items():
        for make in (Embedding, Table.create):
            with pytest.raises(FileExistsError, match=f"{name}', which exists; .*{remedy}"):
                make(3, 2, path=tmp_path / name)
