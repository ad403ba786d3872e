"""A custom storage, written against the store interface alone: a SQLite file whose rows train, save and reopen."""

from __future__ import annotations

import json
import sqlite3
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap.tables import Block, Column, RowStore, Table
from speedswap.tables.files.manifest import column_json, parse_column
from speedswap.tables.init import CopyOf, chunks_of
from speedswap.tables.record import initial_values, is_lazy
from speedswap.tables.storage import Storage
from speedswap.tables.store import StoreFacts

ROWS, DIM = 500, 4


class SqliteStore(RowStore):
    """Rows in a SQLite file: a blob per row and column that was written. Commits are SQLite's transactions.

    Args:
        path: the file.
        weight: the first column of a new table; None to go on with the rows that are there.
        num_embeddings, seed, name: of a new table.
    """

    def __init__(
        self, path: Path, weight: Column | None = None, num_embeddings: int = 0, *, seed: int = 0, name: str = "table"
    ) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)
        weakref.finalize(self, self._database.close)  # Python 3.13 warns of one that was only freed
        self._columns = {}
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS rows (name, id INTEGER, held BLOB, PRIMARY KEY (name, id)) WITHOUT ROWID"
        )
        self._database.execute("CREATE TABLE IF NOT EXISTS notes (description)")
        for (text,) in self._database.execute("SELECT description FROM notes"):
            found = json.loads(text)
            num_embeddings, seed, name = found["num_embeddings"], found["seed"], found["name"]
            self._columns = {each["name"]: parse_column(each, num_embeddings) for each in found["columns"]}
            self.notes.attributes, self.notes.writes = found["attributes"], found["writes"]
        self.facts = StoreFacts(num_embeddings, "sqlite", seed=seed, name=name, reads_copies=True)
        if weight is not None:
            self.add_columns([weight])
            self.flush()

    @property
    def columns(self) -> dict[str, Column]:
        return self._columns

    def gather(
        self,
        rows: Tensor,
        columns: Sequence[str] | None = None,
        device: torch.device | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Block:
        ids, local = torch.unique(rows.cpu().long(), return_inverse=True)
        places = {row: place for place, row in enumerate(ids.tolist())}
        known = {  # of the others every row is written
            name: each if is_lazy(each) else replace(each, init=speedswap.init.zeros())
            for name, each in self._columns.items()
        }
        found = initial_values(known, ids, self.facts.seed, self.facts.num_embeddings)
        query = "SELECT id, held FROM rows WHERE name = ? AND id IN (SELECT value FROM json_each(?))"
        for name in self._columns if columns is None else columns:
            for row, held in self._database.execute(query, (name, json.dumps([*places]))):
                values = torch.frombuffer(bytearray(held), dtype=self._columns[name].dtype)
                found[name][places[row]] = values.view(self._columns[name].row_shape)
        target = rows.device if device is None else device
        blocks = {name: found[name][local].to(target) for name in (self._columns if columns is None else columns)}
        for name, into in (out or {}).items():
            blocks[name] = into.copy_(blocks[name])
        return Block(rows, blocks)

    def scatter(self, block: Block, values: Mapping[str, Tensor], transfers: Any = None) -> None:
        for name, tensor in values.items():
            self._put(name, block.rows.tolist(), tensor)
        self.notes.writes += 1

    def _put(self, name: str, rows: Iterable[int], values: Tensor) -> None:
        held = (self._columns[name].as_read(each).numpy().tobytes() for each in values.detach().cpu().split(1))
        written = ((name, row, each) for row, each in zip(rows, held, strict=True))
        self._database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", written)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self._put(column, range(start, start + len(values)), values)

    def add_columns(self, columns: Sequence[Column]) -> None:
        for column in columns:
            self._columns[column.name] = column
            self._database.execute("DELETE FROM rows WHERE name = ?", (column.name,))
            if isinstance(column.init, CopyOf):
                copied = "INSERT INTO rows SELECT ?, id, held FROM rows WHERE name = ?"
                self._database.execute(copied, (column.name, column.init.column))
            elif not is_lazy(column):
                for rows in chunks_of(self.facts.num_embeddings):
                    self.write(
                        column.name, rows.start, column.initial(rows, self.facts.num_embeddings, self.facts.seed)
                    )

    def reset_columns(self, columns: Sequence[Column]) -> None:
        self.add_columns([replace(self._columns[e.name], init=e.init, zero_row=e.zero_row) for e in columns])

    def commit(self) -> None:
        description = {
            "num_embeddings": self.facts.num_embeddings,
            "seed": self.facts.seed,
            "name": self.facts.name,
            "columns": [column_json(each) for each in self._columns.values()],
            "attributes": self.notes.up_to_date(),
            "writes": self.notes.writes,
        }
        self._database.execute("DELETE FROM notes")
        self._database.execute("INSERT INTO notes VALUES (?)", (json.dumps(description),))
        self._database.commit()

    def flush(self) -> None:
        if not self.notes.closed:
            self.commit()

    def close(self) -> None:
        self.flush()
        self.notes.closed = True
        self._database.close()


@dataclass(frozen=True, repr=False)
class Sqlite(Storage):
    """A SQLite file, as the place of a table."""

    path: Path

    def create(self, num_embeddings: int, weight: Column, *, seed: int, name: str | None) -> RowStore:
        return SqliteStore(self.path, weight, num_embeddings, seed=seed, name=name or self.path.name)


WEIGHT = Column("weight", (DIM,), torch.float32, speedswap.init.normal(), zero_row=0)


def trained(items: speedswap.Embedding, steps: range) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    speedswap.attach(optimizer, items)
    for number in steps:
        ids = torch.randint(ROWS, (7, 3), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        items(ids).square().sum().backward()
        optimizer.step()
    return optimizer


def everything(table: Table) -> dict[str, list[Any]]:
    return {name: table.read(column=name).tolist() for name in table.columns}


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "rows.db", WEIGHT, ROWS, seed=3)


@pytest.fixture
def usual() -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, init=speedswap.init.normal(), padding_idx=0, seed=3)


def test_rows_in_sqlite_train_as_in_memory(store: SqliteStore, usual: speedswap.Embedding, tmp_path: Path) -> None:
    """To the same bits, with the optimizer's state; and what is saved is opened as a table on disk."""
    ours = speedswap.Embedding(ROWS, DIM, table=Table(store), padding_idx=0)
    trained(ours, range(6))
    trained(usual, range(6))
    assert everything(ours.table) == everything(usual.table)
    assert [*ours.table.columns] == ["weight", "exp_avg", "exp_avg_sq"]
    ours.table.save(tmp_path / "saved")
    with Table.open(tmp_path / "saved") as saved:
        assert everything(saved) == everything(usual.table)
        assert (saved.writes, saved.attributes["optimizer"]["scalars"]["step"]) == (6, 6)


def test_training_goes_on_with_the_file(store: SqliteStore, usual: speedswap.Embedding, tmp_path: Path) -> None:
    """Rows, state and step count are those of the last commit, whatever came after it."""
    ours = speedswap.Embedding(ROWS, DIM, table=Table(store), padding_idx=0)
    trained(ours, range(4))
    store.write("weight", 0, torch.ones(ROWS, DIM))
    store._database.rollback()  # as if the process had ended before the next commit
    ours.table.close()
    again = speedswap.Embedding(ROWS, DIM, table=Table(SqliteStore(tmp_path / "rows.db")), padding_idx=0)
    trained(again, range(4, 6))
    trained(usual, range(6))
    assert everything(again.table) == everything(usual.table)
    again.table.reset_rows(torch.tensor([3, 1]))
    assert again.table.read(0, 4).tolist() == [
        [0.0] * DIM if row == 0 else usual.table.read(row, row + 1)[0].tolist() if row == 2 else fresh
        for row, fresh in enumerate(Table.create(4, DIM, init=speedswap.init.normal(), seed=3).read().tolist())
    ]
    again.table.close()


def test_a_value_gives_the_place_to_every_module(usual: speedswap.Embedding, tmp_path: Path) -> None:
    """To an embedding, and to one with given rows."""
    ours = speedswap.Embedding(
        ROWS, DIM, storage=Sqlite(tmp_path / "a.db"), init=speedswap.init.normal(), padding_idx=0, seed=3
    )
    assert (ours.table.storage, ours.table.name, ours.table.path) == ("sqlite", "a.db", None)
    trained(ours, range(3))
    trained(usual, range(3))
    assert everything(ours.table) == everything(usual.table)
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    given = speedswap.Embedding.from_pretrained(weight, freeze=False, storage=Sqlite(tmp_path / "b.db"))
    assert torch.equal(given.table.read(), weight)
    given.table.close()
    assert torch.equal(Table(SqliteStore(tmp_path / "b.db")).read(), weight)
