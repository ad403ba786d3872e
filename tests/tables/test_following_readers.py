"""Processes that read a table while another process writes it: they see its commits, also after columns were added."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from children import answer, child

import speedswap
from speedswap import Column, Table, init
from speedswap.errors import TableClosedError, TableFormatError

ROWS, DIM = 50, 3
LATE = Column("late", (1,), torch.float32, init.constant(4.0))
IDS = torch.tensor([7, 3])


def reads(open_table: Callable[[], Table]) -> Callable[[Connection], None]:
    """Gather on request in another process, and send the values or the error."""

    def work(connection: Connection) -> None:
        table = open_table()
        while True:
            try:
                connection.send(table.gather(IDS).weight.tolist())
            except Exception as error:
                connection.send(error)
            connection.recv()

    return work


def again(connection: Connection) -> object:
    connection.send("again")
    return answer(connection)


def rows(value: float) -> list[list[float]]:
    return [[value] * DIM] * 2


@pytest.mark.parametrize("how", ["opened to read", "pickled", "forked"])
def test_a_reader_sees_rows_written_after_columns_were_added(how: str, tmp_path: Path) -> None:
    """Add columns, as an optimizer's first step does: another layout of records, in a log that goes on."""
    path = tmp_path / "t"
    with Table.create(ROWS, DIM, path=path, init=init.constant(1.0)) as table:
        payload = pickle.dumps(table)
        ways = {
            "opened to read": lambda: Table.open(path, "r"),
            "pickled": lambda: pickle.loads(payload),
            "forked": lambda: table,
        }
        with child(reads(ways[how])) as (_, connection):
            assert answer(connection) == rows(1.0)
            for value in (2.0, 3.0):
                table.add_columns([Column(f"late{value}", (1,), torch.float32, init.zeros())])
                table.scatter(IDS, {"weight": torch.full((2, DIM), value)})
                table.flush()
                assert again(connection) == rows(value)
            table.scatter(IDS, {"weight": torch.full((2, DIM), 4.0)})
            assert again(connection) == rows(3.0)  # not committed yet
            table.flush()
            assert again(connection) == rows(4.0)


def test_a_pickled_module_sees_what_its_original_learns(tmp_path: Path) -> None:
    """A worker's copy of an embedding looks up what training in the parent has committed since."""
    items = speedswap.Embedding(ROWS, DIM, path=tmp_path / "t", init=init.constant(1.0))
    payload = pickle.dumps(items)
    optimizer = torch.optim.Adagrad(items.parameters(), lr=0.5)

    def looks_up(connection: Connection) -> None:
        copy = pickle.loads(payload).eval()
        while True:
            with torch.no_grad():
                connection.send(copy(IDS).tolist())
            connection.recv()

    with child(looks_up) as (_, connection):
        assert answer(connection) == rows(1.0)
        for _ in range(2):
            items(IDS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            items.table.flush()
            expected = items.table.gather(IDS).weight.tolist()
            assert expected != rows(1.0)
            assert again(connection) == expected
    items.table.close()


def test_workers_of_a_data_loader_see_rows_written_meanwhile(tmp_path: Path) -> None:
    """Persistent workers, which live from epoch to epoch, too."""
    table = Table.create(ROWS, DIM, path=tmp_path / "t", init=init.constant(1.0))

    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> torch.Tensor:
            return table.gather(IDS[i : i + 1]).weight[0]

    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    seen = []
    for value in (2.0, 3.0):
        seen += [batch.tolist() for batch in loader]
        table.add_columns([Column(f"late{value}", (1,), torch.float32, init.zeros())])
        table.scatter(IDS, {"weight": torch.full((2, DIM), value)})
        table.flush()
    seen += [batch.tolist() for batch in loader]
    assert seen == [rows(1.0), rows(2.0), rows(3.0)]
    del loader
    table.close()


def test_a_reader_follows_a_checkpoint_that_replaces_the_one_it_reads(tmp_path: Path) -> None:
    """A table of the same name and shape, with its attributes, is the newer state of the same table."""
    first, second = (Table.create(ROWS, DIM, init=init.constant(value)) for value in (1.0, 2.0))
    second.attributes["step"] = 2
    first.save(tmp_path / "t")
    with Table.open(tmp_path / "t", "r") as table:
        assert table.gather(IDS).weight.tolist() == rows(1.0)
        second.save(tmp_path / "t", overwrite=True)
        assert table.gather(IDS).weight.tolist() == rows(2.0)
        assert table.attributes == {"step": 2}
        assert torch.equal(table.read(), torch.full((ROWS, DIM), 2.0))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Table.create(ROWS + 1, DIM), "51, .* and this table has .*50"),
        (lambda: Table.create(ROWS, DIM + 1), "is no longer at"),
        (lambda: Table.create(ROWS, DIM, dtype=torch.float64), "is no longer at"),
        (lambda: Table.create(ROWS, DIM, name="others"), "what is there now has .*'others'"),
    ],
    ids=["rows", "width", "dtype", "name"],
)
def test_another_table_in_the_place_is_not_read_for_the_old_one(
    other: Callable[[], Table], message: str, tmp_path: Path
) -> None:
    """Each use of the reader raises that error, and it can be closed."""
    Table.create(ROWS, DIM).save(tmp_path / "t")
    with Table.open(tmp_path / "t", "r") as table:
        table.gather(IDS)
        other().save(tmp_path / "t", overwrite=True)
        for _ in range(2):
            with pytest.raises(TableClosedError, match=message):
                table.gather(IDS)


def test_a_table_that_was_removed_is_not_read_any_more(tmp_path: Path) -> None:
    """A damaged one is not followed either; once it is restored, it is read again."""
    source = Table.create(ROWS, DIM, init=init.constant(1.0))
    source.save(tmp_path / "t")
    with Table.open(tmp_path / "t", "r") as table:
        shutil.rmtree(tmp_path / "t")
        for _ in range(2):
            with pytest.raises(TableClosedError, match="was removed, or moved away"):
                table.gather(IDS)
        source.save(tmp_path / "t")
        assert table.gather(IDS).weight.tolist() == rows(1.0)
        (tmp_path / "t" / "MANIFEST").write_text("damaged")
        for _ in range(2):
            with pytest.raises(TableFormatError, match="checksum"):
                table.gather(IDS)


def test_a_reader_can_open_a_table_at_any_moment_of_its_replacement(tmp_path: Path) -> None:
    """A table stays complete at its path while another process saves over it again and again."""
    tables = [Table.create(ROWS, DIM, storage="pageable", init=init.constant(value)) for value in (1.0, 2.0)]
    tables[0].save(tmp_path / "t")

    def saves(connection: Connection) -> None:
        while True:
            for table in tables:
                table.save(tmp_path / "t", overwrite=True)
                connection.send("saved")

    with child(saves) as (_, connection), Table.open(tmp_path / "t", "r") as lasting:
        for _ in range(40):
            answer(connection)
            with Table.open(tmp_path / "t", "r") as table:
                for one in (table, lasting):
                    values = one.read()
                    assert values[0, 0] in (1.0, 2.0)
                    assert (values == values[0, 0]).all()
