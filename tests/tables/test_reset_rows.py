"""Rows that are reset have the very bits that the table was created with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap import init
from speedswap.errors import DuplicateIdError, IdError
from speedswap.tables import Column
from speedswap.tables.init import CHUNK_ROWS, ColumnSpec, Initializer

INITS: dict[str, Initializer | Callable[..., object]] = {
    "zeros": init.zeros(),
    "constant": init.constant(-2.5),
    "uniform": init.uniform(-1, 3),
    "normal": init.normal(1.0, 0.5),
    "torch": torch.nn.init.xavier_normal_,
}
ROWS, DIM = CHUNK_ROWS + 77, 5
SOME = torch.tensor([ROWS - 1, 3, 4, 5, 0, 900, CHUNK_ROWS, CHUNK_ROWS - 1, 17])


def read(table: speedswap.Table) -> dict[str, Tensor]:
    return {name: table.read(column=name) for name in table.columns}


def spoil(table: speedswap.Table) -> dict[str, Tensor]:
    for name, column in table.columns.items():
        table.write(0, torch.full((len(table), *column.row_shape), 7).to(column.dtype), column=name)
    return read(table)


def assert_reset(table: speedswap.Table, made: dict[str, Tensor], rows: Tensor) -> None:
    """Reset rows of a spoiled table: these have their initial values, the others stay spoiled."""
    spoiled = spoil(table)
    table.reset_rows(rows)
    for name, values in read(table).items():
        expected = spoiled[name].clone()
        expected[rows] = made[name][rows]
        assert torch.equal(values, expected), name


@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("name", INITS)
def test_every_initializer_and_form(name: str, stored: torch.dtype | None) -> None:
    rounding = "stochastic" if stored not in (None, torch.int8) else "nearest"
    table = speedswap.Table.create(
        ROWS, DIM, init=INITS[name], seed=9, zero_row=4, stored_dtype=stored, rounding=rounding
    )
    table.add_columns(
        [Column("sum", (DIM,), torch.float32, init.uniform(2, 3)), Column("n", (), torch.int64, init.constant(3))]
    )
    assert_reset(table, read(table), SOME)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INITS)
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    table = speedswap.Table.create(ROWS, DIM, dtype=dtype, init=INITS[name], seed=9)
    assert_reset(table, read(table), SOME)


def test_a_copied_column_gets_the_initial_values_of_its_source() -> None:
    table = speedswap.Table.create(9, DIM, init=init.normal(), zero_row=2)
    table.add_columns([Column("z", (DIM,), torch.float32, init.copy_of("weight"))])
    assert_reset(table, read(table), torch.tensor([8, 2, 0]))


def test_an_initializer_of_another_kind() -> None:
    """Any initializer whose values are a function of the row."""

    class Counted(Initializer):
        kind = "counted"

        def fill(self, into: Tensor, rows: range | Tensor, spec: ColumnSpec) -> None:
            into.copy_(torch.as_tensor(rows).unsqueeze(1))

    table = speedswap.Table.create(30, 2, init=Counted())
    assert_reset(table, read(table), torch.tensor([7, 8, 9, 29, 0, 3]))


def test_rows_in_files(tmp_path: Path) -> None:
    speedswap.Table.create(40, 3, init=init.normal(), seed=5, path=tmp_path / "table").close()
    with speedswap.Table.open(tmp_path / "table") as table:
        assert_reset(table, read(table), torch.tensor([1, 39, 5]))


def test_given_rows_are_refused(tmp_path: Path) -> None:
    given = speedswap.Embedding.from_pretrained(torch.ones(4, 2), path=tmp_path / "given").table
    with pytest.raises(ValueError, match=r"kind 'given', which cannot be computed again.*one of speedswap.init"):
        given.reset_rows(torch.tensor([1]))
    assert given.read().eq(1).all()
    speedswap.Table.create(4, 2, init=torch.nn.init.xavier_normal_, path=tmp_path / "torch").close()
    for _ in range(2):  # and once more, from the manifest that the table wrote again
        with speedswap.Table.open(tmp_path / "torch") as opened:
            with pytest.raises(ValueError, match="column 'weight' of table 'torch' has initial values of kind 'torch'"):
                opened.reset_rows(torch.tensor([1]))
            opened.attributes["more"] = len(opened.attributes)


def test_bad_rows_are_refused() -> None:
    table = speedswap.Table.create(4, 2)
    table.write(0, torch.ones(4, 2))
    with pytest.raises(IdError, match="rows 0 to 3"):
        table.reset_rows(torch.tensor([1, 4]))
    with pytest.raises(DuplicateIdError, match=r"rows\[1\] is 1"):
        table.reset_rows(torch.tensor([1, 1]))
    table.reset_rows(torch.tensor([], dtype=torch.int64))
    assert table.read().eq(1).all()
