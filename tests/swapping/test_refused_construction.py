"""A construction that is refused, or fails, leaves nothing on disk: the right call works afterwards."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedswap
from speedswap import Embedding, EmbeddingBag, Table

REFUSED: dict[str, tuple[type[Exception], Callable[[Path], Any]]] = {
    "integer weights": (TypeError, lambda path: Embedding(9, 4, path=path, dtype=torch.int32)),
    "integer weights by default": (TypeError, lambda path: Embedding(9, 4, path=path, dtype=torch.bool)),
    "compact state of float64": (
        TypeError,
        lambda path: Embedding(9, 4, path=path, dtype=torch.float64, state_dtype=torch.bfloat16),
    ),
    "a device that is none": (RuntimeError, lambda path: Embedding(9, 4, path=path, device="nowhere")),
    "integer rows": (
        TypeError,
        lambda path: Embedding.from_pretrained(torch.ones(9, 4, dtype=torch.int32), False, path=path),
    ),
    "rows that cannot be read": (
        TypeError,
        lambda path: Embedding.from_pretrained(torch.ones(9, 4, device="meta"), path=path),
    ),
    "a bag's integer rows": (
        TypeError,
        lambda path: EmbeddingBag.from_pretrained(torch.ones(9, 4, dtype=torch.int32), False, path=path),
    ),
    "initial values that fail": (
        ZeroDivisionError,
        lambda path: Embedding(9, 4, path=path, init=lambda rows: nn.init.constant_(rows, 1 // 0)),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_construction_leaves_no_table(why: str, tmp_path: Path) -> None:
    """The directory is still empty, and accepts the next table."""
    error, construct = REFUSED[why]
    with pytest.raises(error):
        construct(tmp_path / "table")
    assert list(tmp_path.iterdir()) == []
    Embedding(9, 4, path=tmp_path / "table").table.close()


def test_refused_construction_draws_no_seed() -> None:
    """Random numbers go on as if the refused call had not been made."""
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        Embedding(9, 4, dtype=torch.int32)
    assert torch.equal(torch.get_rng_state(), before)


def test_existing_table_is_not_removed_by_a_refused_construction(tmp_path: Path) -> None:
    """A given table is not removed, and neither is an existing one at the path."""
    with Table.create(9, 4, dtype=torch.int32, path=tmp_path / "table") as table:
        with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
            Embedding(9, 4, table=table)
        with pytest.raises(FileExistsError):
            Embedding(9, 4, path=tmp_path / "table")
        assert table.read().shape == (9, 4)
    Table.open(tmp_path / "table").close()


def test_table_whose_lock_cannot_be_taken_is_not_left_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks: the directory that was made for the table goes again."""

    def refuses(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(OSError, match=r"LOCK cannot be locked .*keep it on a file system that has locks"):
        speedswap.Table.create(9, 4, path=tmp_path / "table")
    assert list(tmp_path.iterdir()) == []
