"""Tables of the older formats, in files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap.tables import LocalStore, Table
from speedswap.tables.init import resolve

__all__ = ["older_table"]


def older_table(
    num_embeddings: int,
    embedding_dim: int,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    init: Callable[..., Any] | None = None,
    zero_row: int | None = None,
    stored_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    **settings: Any,
) -> Table:
    """Return a new table of an older format; the arguments are those of :meth:`speedswap.Table.create`."""
    weight = speedswap.Column("weight", (embedding_dim,), dtype, resolve(init), zero_row, stored_dtype, rounding)
    return Table(LocalStore.create(num_embeddings, weight, storage="disk", path=path, **settings))
