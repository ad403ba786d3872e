"""Tables of the older formats written anew, or not, after the process that wrote them was killed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from children import exit_status
from older import older_table

from speedswap import IdMap, Table

ROWS = 11


def killed(path: Path) -> None:
    """Make a table whose process is killed with a row of a key, and a step, that its manifest does not have."""

    def work() -> None:
        table = older_table(ROWS, 4, path)
        table.set_id_map(IdMap(ROWS - 1))
        table.id_map.add(torch.tensor([100]))
        table.attributes["steps"] = 5
        table.flush()
        table.id_map.add(torch.tensor([200]))
        table.write(0, torch.full((ROWS, 4), 9.0))
        table.attributes["steps"] = 6
        os._exit(0)

    assert exit_status(work) == 0


def renewed(path: Path) -> int:
    """Return the rows of a new key whose values are of no key and have to be replaced."""
    with Table.open(path) as table:
        assert table.id_map is not None
        return len(table.id_map.add(torch.tensor([555]))[1])


def test_a_table_of_a_killed_process_is_converted_with_its_doubts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new format has no place for a step count that lags behind; so it is said once."""
    killed(tmp_path / "t")
    with Table.open(tmp_path / "t", "r") as table:
        assert table.attributes_lag
    assert Table.convert(tmp_path / "t")
    assert "table 't' was not closed by the process that wrote it" in caplog.text
    assert "may be of an earlier step than its rows" in caplog.text
    with Table.open(tmp_path / "t", "r") as table:
        assert table.attributes == {"steps": 5}
        assert (table.read() == 9.0).all()
    assert renewed(tmp_path / "t") == 1


def test_a_closed_table_is_converted_without_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with older_table(ROWS, 4, tmp_path / "t") as table:
        table.set_id_map(IdMap(ROWS - 1))
        table.attributes["steps"] = 5
    assert Table.convert(tmp_path / "t")
    assert not caplog.text
    assert renewed(tmp_path / "t") == 0


@pytest.mark.parametrize("how", ["convert", "save"])
def test_a_table_that_could_not_be_replaced_is_still_that_of_a_killed_process(how: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    replace = partial(Table.create(ROWS, 4).save, overwrite=True) if how == "save" else Table.convert
    killed(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"'notes\.txt' is beside the table's own files"):
        replace(path)
    with Table.open(path, "r") as table:
        assert table.attributes_lag
    assert renewed(path) == 1
