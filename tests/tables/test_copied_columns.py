"""Columns that begin as copies, wide columns of narrow rows, and given rows: in a log as in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import speedswap
from speedswap.errors import TableTooLargeError
from speedswap.tables import Column, Table
from speedswap.tables import init as initializers
from speedswap.tables.files import manifest as manifests
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.open_directory import OpenDirectory

ROWS, WRITTEN = 60, torch.tensor([3, 5, 17, 59])


def pair(path: Path, dim: int, *, scratch: bool = False, **settings: Any) -> tuple[Table, Table]:
    """Return a table on disk with the smallest cache, and its equal in memory."""
    given: dict[str, Any] = {"init": initializers.normal(), "seed": 3, **settings}
    place = speedswap.Disk(path, cache_bytes=1, scratch=scratch)
    return Table.create(ROWS, dim, storage=place, **given), Table.create(ROWS, dim, **given)


def column(name: str, dim: int, source: str = "weight", **settings: Any) -> Column:
    return Column(name, (dim,), torch.float32, initializers.copy_of(source), **settings)


def write(table: Table, step: int, *names: str, rows: torch.Tensor = WRITTEN) -> None:
    for name in names:
        shape = (len(rows), *table.columns[name].row_shape)
        table.scatter(rows, {name: torch.randn(shape, generator=torch.Generator().manual_seed(step))})


def assert_same(*tables: Table) -> None:
    first, *others = tables
    for other in others:
        assert first.columns.keys() == other.columns.keys()
        for name in first.columns:
            assert torch.equal(first.read(column=name), other.read(column=name)), name


def assert_same_wherever_it_is_read(ours: Table, other: Table, path: Path) -> None:
    """Compare the open table, and it reopened, saved and loaded."""
    assert_same(ours, other)
    ours.save(path / "copy", overwrite=True)
    with Table.open(path / "copy") as copied, Table.load(path / "copy") as loaded:
        assert_same(other, copied, loaded)
    assert ours.path is not None
    if not ours.store.manifest.scratch:  # type: ignore[attr-defined]
        ours.flush()
        with Table.open(speedswap.Disk(ours.path, cache_bytes=1), "r") as reader:
            assert_same(other, reader)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dim", [5, 70])
@pytest.mark.parametrize("stored", [torch.int8, torch.bfloat16, torch.float16])
def test_a_copy_of_a_compact_column_has_the_values_that_it_reads(tmp_path: Path, dim: int, stored: torch.dtype) -> None:
    """Rows that were never written as well, also in copies of copies, whatever is rounded on the way."""
    ours, other = pair(tmp_path / "table", dim, stored_dtype=stored)
    for table in (ours, other):
        write(table, 0, "weight")
        table.add_columns([column("once", dim), column("twice", dim, "once", stored=torch.float16)])
        assert torch.equal(table.read(column="once"), table.read())
        assert torch.equal(table.read(column="twice"), table.read().half().float())
        table.add_columns([column("thrice", dim, "twice")])
        assert torch.equal(table.read(column="thrice"), table.read(column="twice"))
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    for table in (ours, other):
        table.reset_rows(WRITTEN)
    assert_same(ours, other)
    ours.close()


@pytest.mark.parametrize("dim", [5, 70])
@pytest.mark.parametrize("scratch", [False, True])
def test_a_copy_starts_with_its_own_zero_row(tmp_path: Path, dim: int, scratch: bool) -> None:
    """That of the reset, not of the column as it was made; a copy of the copy has it too."""
    ours, other = pair(tmp_path / "table", dim, scratch=scratch)
    for table in (ours, other):
        table.add_columns([column("copy", dim, zero_row=2)])
        write(table, 0, "weight", "copy")
        table.reset_columns([column("copy", dim, zero_row=3)])
        expected = table.read()
        expected[3] = 0
        assert torch.equal(table.read(column="copy"), expected)
        table.add_columns([column("again", dim, "copy", zero_row=8)])
        expected[8] = 0
        assert torch.equal(table.read(column="again"), expected)
        table.reset_columns([column("copy", dim)])
        assert torch.equal(table.read(column="copy"), table.read())
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    ours.close()


@pytest.mark.parametrize("scratch", [False, True])
def test_columns_begin_anew_in_the_order_in_which_they_are_given(tmp_path: Path, scratch: bool) -> None:
    """A copy made before its source is reset has what was trained."""
    ours, other = pair(tmp_path / "table", 5, scratch=scratch)
    for table in (ours, other):
        table.add_columns([column("copy", 5)])
        write(table, 0, "weight", "copy")
        trained = table.read()
        anew = replace(table.columns["weight"], init=initializers.constant(0.25))
        table.reset_columns([column("copy", 5), anew])
        assert torch.equal(table.read(column="copy"), trained)
        table.reset_columns([anew, column("copy", 5)])
        assert torch.equal(table.read(column="copy"), torch.full((ROWS, 5), 0.25))
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    ours.close()


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(("source", "dim"), [("gone", 5), ("copy", 5), ("weight", 4)])
def test_a_copy_of_no_fitting_column_is_refused(tmp_path: Path, kind: str, source: str, dim: int) -> None:
    disk, memory = pair(tmp_path / "table", 5)
    with disk, memory:
        table = disk if kind == "disk" else memory
        with pytest.raises(
            ValueError, match=f"'copy' .* was to begin as a copy of '{source}', .* copy one of weight|no"
        ):
            table.add_columns([column("copy", dim, source)])
        with pytest.raises(ValueError, match=r"'weight' .* was to begin as a copy of 'weight'"):
            table.reset_columns([column("weight", 5)])
        assert list(table.columns) == ["weight"]


# ---- rows that are stored together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("dim", [1, 4])
def test_narrow_rows_take_wide_columns(tmp_path: Path, dim: int, scratch: bool) -> None:
    """Their log is rewritten, in groups of fewer rows; every value, note and id map comes along."""
    ours, other = pair(tmp_path / "table", dim, scratch=scratch)
    id_map = speedswap.IdMap(ROWS - 1)
    ours.set_id_map(id_map)
    rows = id_map.lookup(torch.tensor([10, 20, 30]))
    ours.attributes["step"] = 4
    wide = Column("wide", (1024,), torch.float32, initializers.normal())
    for table in (ours, other):
        write(table, 0, "weight")
        table.add_columns([wide])
        write(table, 1, "wide", "weight", rows=torch.arange(20, 40))
        table.add_columns([Column("wider", (4096,), torch.float32, initializers.from_torch(torch.nn.init.ones_))])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    path = ours.path
    assert path is not None
    logs = [name for name in os.listdir(path) if name.startswith("rows")]
    assert logs == ([] if scratch else ["rows-1.log"])
    ours.close()
    if not scratch:
        with Table.open(path) as opened:
            assert_same(other, opened)
            assert opened.attributes["step"] == 4
            assert opened.id_map is not None
            assert torch.equal(opened.id_map.lookup(torch.tensor([10, 20, 30])), rows)
            assert opened.store.manifest.group_rows == 1  # type: ignore[attr-defined]


def test_a_reader_follows_a_table_to_its_new_log(tmp_path: Path) -> None:
    ours, other = pair(tmp_path / "table", 4)
    with Table.open(tmp_path / "table", "r") as reader:
        for table in (ours, other):
            write(table, 0, "weight")
            table.add_columns([Column("wide", (1024,), torch.float32, initializers.constant(1.5))])
            write(table, 1, "wide")
            table.flush()
        reader.check_open()
        assert_same(other, reader)
    ours.close()


def test_rows_begin_anew_any_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log counts up to 255 layouts; then it is rewritten."""
    monkeypatch.setattr(manifests, "_MAX_LAYOUTS", 5)
    ours, other = pair(tmp_path / "table", 4)
    write(ours, 0, "weight")
    for number in range(12):
        ours.reset_columns([replace(ours.columns["weight"], init=initializers.constant(float(number)))])
    other.reset_columns([replace(other.columns["weight"], init=initializers.constant(11.0))])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    assert os.path.exists(tmp_path / "table" / "rows-2.log")
    ours.close()


def test_a_table_that_a_checkpoint_holds_is_not_written_anew(tmp_path: Path) -> None:
    ours, other = pair(tmp_path / "table", 4)
    for table in (ours, other):
        write(table, 0, "weight")
    commit = ours.commits.hold()
    ours.flush()
    with pytest.raises(TableTooLargeError, match="checkpoints hold its old rows; copy it"):
        ours.add_columns([Column("wide", (1024,), torch.float32, initializers.zeros())])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    ours.commits.let_go(commit)
    for table in (ours, other):
        table.add_columns([Column("wide", (1024,), torch.float32, initializers.zeros())])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    ours.close()


def failing(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write_manifest", "sync", "create_log"])
def test_a_log_that_cannot_be_written_anew_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    ours, other = pair(tmp_path / "table", 4)
    for table in (ours, other):
        write(table, 0, "weight")
    ours.flush()
    with monkeypatch.context() as patched:
        owner = OpenDirectory if where == "sync" else TableDirectory
        whole, calls = getattr(owner, where), []

        def once(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(args)
            return failing() if len(calls) == 1 else whole(self, *args, **options)

        patched.setattr(owner, where, once)
        with pytest.raises(OSError, match=r"No space left|no room"):
            ours.add_columns([Column("wide", (1024,), torch.float32, initializers.zeros())])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    assert not [name for name in os.listdir(tmp_path / "table") if "-1" in name]
    for table in (ours, other):
        write(table, 1, "weight")
        table.add_columns([Column("wide", (1024,), torch.float32, initializers.constant(2.0))])
    assert_same_wherever_it_is_read(ours, other, tmp_path)
    ours.close()


@pytest.mark.parametrize("dim", [5, 70])
def test_given_rows_are_saved_and_loaded_by_a_later_process(tmp_path: Path, dim: int) -> None:
    """Their initial values are not known any more; narrow neighbours are stored as one."""
    given = torch.randn(ROWS, dim)
    module = speedswap.Embedding.from_pretrained(given, freeze=False, path=tmp_path / "table")
    module.table.close()
    with Table.open(tmp_path / "table") as table:
        table.save(tmp_path / "copy")
        with Table.open(tmp_path / "copy") as copied:
            assert torch.equal(copied.read(), given)
            copied.add_columns([Column("wide", (4096,), torch.float32, initializers.constant(1.0))])
            assert torch.equal(copied.read(), given)


@pytest.mark.parametrize("dim", [5, 70])
def test_given_rows_on_scratch_take_an_optimizer(tmp_path: Path, dim: int) -> None:
    given = torch.randn(ROWS, dim)
    ours = speedswap.Embedding.from_pretrained(
        given, freeze=False, storage=speedswap.Disk(tmp_path / "table", scratch=True)
    )
    other = speedswap.Embedding.from_pretrained(given, freeze=False)
    for module in (ours, other):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for ids in (torch.tensor([3, 8]), torch.tensor([8, 59])):
            module(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours.table, other.table)
    ours.table.close()
