"""Scenarios of saving and loading the changed rows of a table that ranks own."""

from __future__ import annotations

from pathlib import Path

import torch
from places import owned

import speedswap
from speedswap import Table
from speedswap.errors import PeerError
from speedswap.tables.rows_file import RowsFile

ROWS, DIM = 1000, 80


def table(group, path=None, seed=5):
    init = speedswap.init.normal()
    return Table.create(ROWS, DIM, init=init, seed=seed, storage=owned(group, path=path), name="items")


def save(group, folder, path=None):
    """Save rows that all ranks have written; return whether other ranks' table takes them, and one of this process."""
    trained, other = table(group, path and f"{path}-1"), table(group, path and f"{path}-2")
    mine = torch.arange(group.rank(), 60, group.size()) * 7
    trained.scatter(mine, torch.ones(len(mine), DIM))
    file = Path(folder) / f"rows-{group.size()}"
    trained.save_rows(file)
    found = RowsFile(file)  # complete, on every rank
    found.verify()
    ids = torch.cat([some for some, _ in found.pieces("items", [])])
    other.load_rows(file)
    alone = table(None)
    alone.load_rows(file)
    rows = trained.read()
    are_equal = torch.equal(other.read(), rows) and torch.equal(alone.read(), rows)
    for each in (trained, other):
        each.close()
    return ids.tolist(), are_equal


def refuse(group, folder):
    """Return the errors of a commit, of another seed, and of ranks that are given different files."""
    own, other, errors = table(group), table(group, seed=6), []
    own.save_rows(Path(folder) / "rows")
    if group.rank() == 0:
        alone = table(None)
        alone.scatter(torch.tensor([3]), torch.ones(1, DIM))
        alone.save_rows(Path(folder) / "different")
    files = ["rows", "different"]
    for call in (
        own.hold,
        lambda: other.load_rows(Path(folder) / "rows"),
        lambda: own.load_rows(Path(folder) / files[group.rank() == 0]),
        lambda: own.save_rows(Path(folder) / "rows"),
    ):
        try:
            call()
        except (TypeError, ValueError, FileExistsError, PeerError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors
