"""Columns of a manifest as plain data, and the checks of what is found in any manifest."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from speedswap.errors import TableTooLargeError
from speedswap.tables import init
from speedswap.tables.files.damage import is_int, require
from speedswap.tables.ranges import InRanges
from speedswap.tables.record import MAX_DIMS, ROUNDINGS, STORED_DTYPES, Column, RecordLayout, is_column_name

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MAX_BYTES",
    "column_json",
    "is_keys_name",
    "parse_column",
    "require_id_maps",
    "require_record",
    "require_size",
    "require_table",
]

FORMAT = "speedswap-table"
MANIFEST = "MANIFEST"
MAX_BYTES = (1 << 20) - 9  # without the checksum
_MAX_ROWS, _MAX_STRIDE, _MAX_ITEMS, _MAX_FILE_BYTES = 2**62, 2**40, 2**32, 2**63 - 1
_KEYS_NAME = re.compile(r"keys-[0-9]{1,9}\.bin")
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_STORED = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


def column_json(column: Column) -> dict[str, Any]:
    """Return a column as plain data."""
    stored = {"stored": str(column.stored).removeprefix("torch."), "rounding": column.rounding}
    return {
        "name": column.name,
        "row_shape": list(column.row_shape),
        "dtype": str(column.dtype).removeprefix("torch."),
        "init": column.init.to_json(),
        "zero_row": column.zero_row,
        **(stored if column.compact else {}),
    }


def require_table(num_embeddings: object, seed: object, name: object) -> None:
    """Check the arguments that a table was made with."""
    require(is_int(num_embeddings, 1, _MAX_ROWS), f"num_embeddings is {num_embeddings!r}")
    require(is_int(seed, 0, 2**64 - 1), f"seed is {seed!r}")
    require(isinstance(name, str), "name has a wrong type")


def require_id_maps(id_maps: object) -> None:
    """Check the files of id maps."""
    require(isinstance(id_maps, dict) and all(map(is_keys_name, id_maps.values())), f"its id maps are {id_maps!r}")
    assert isinstance(id_maps, dict)
    require(len(id_maps) == len(set(id_maps.values())), f"its id maps are {id_maps!r}")


def is_keys_name(file: object) -> bool:
    """Tell whether a name may be that of a file of id maps."""
    return isinstance(file, str) and _KEYS_NAME.fullmatch(file) is not None


def require_record(columns: Sequence[Column], offsets: Sequence[object], stride: object) -> None:
    """Check the layout of a record."""
    require(is_int(stride, 1, _MAX_STRIDE), f"a record's stride is {stride!r}")
    assert isinstance(stride, int)
    end = 0
    for column, offset in zip(columns, offsets, strict=True):
        require(is_int(offset, end, stride), f"column {column.name!r} overlaps another")
        assert isinstance(offset, int)
        end = offset + column.row_bytes
        require(end <= stride, f"column {column.name!r} does not fit its record")
        require(
            offset % column.item_bytes == 0 and stride % column.item_bytes == 0,
            f"column {column.name!r} is not aligned to its items",
        )
    names = [column.name for column in columns]
    require(bool(columns) and len(names) == len(set(names)), f"the columns of a record are {names}")


def parse_column(item: dict[str, Any], num_embeddings: int) -> Column:
    """Check a column, which was plain data."""
    name, shape, dtype, zero_row = item["name"], item["row_shape"], item["dtype"], item["zero_row"]
    require(is_column_name(name), f"a column is {name!r}")
    require(
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(is_int(size, 1, _MAX_ITEMS) for size in shape)
        and math.prod(shape) <= _MAX_STRIDE,
        f"the rows of column {name!r} have shape {shape!r}",
    )
    require(dtype in _DTYPES, f"column {name!r} has dtype {dtype!r}")
    require(zero_row is None or is_int(zero_row, 0, num_embeddings - 1), f"column {name!r} has zero_row {zero_row!r}")
    initial = init.from_json(item["init"]) or init.Unknown(json.dumps(item["init"]))
    require(
        not isinstance(initial, InRanges) or initial.num_rows == num_embeddings,
        f"the ranges of column {name!r} are not its {num_embeddings} rows",
    )
    stored, rounding = item.get("stored"), item.get("rounding", "nearest")
    require(stored is None or stored in _STORED, f"column {name!r} is stored as {stored!r}")
    require(rounding in ROUNDINGS, f"column {name!r} has rounding {rounding!r}")
    held = None if stored is None else _STORED[stored]
    return Column(name, tuple(shape), _DTYPES[dtype], initial, zero_row, held, rounding)


def require_size(num_embeddings: int, columns: Sequence[Column]) -> None:
    """Raise TableTooLargeError if a manifest could not describe so many rows of these columns, or no file hold them."""
    stride = RecordLayout.of(columns).stride
    if (
        num_embeddings > _MAX_ROWS
        or stride > _MAX_STRIDE
        or num_embeddings * stride > _MAX_FILE_BYTES
        or any(size > _MAX_ITEMS for column in columns for size in column.row_shape)
    ):
        names = ", ".join(column.name for column in columns)
        raise TableTooLargeError(
            f"num_embeddings is {num_embeddings}, and a row of {names} takes {stride} bytes; "
            f"a table has at most {_MAX_ROWS} rows, of {_MAX_STRIDE} bytes with {_MAX_ITEMS} items in a dimension, and "
            f"{_MAX_FILE_BYTES} bytes in all: use fewer or narrower rows"
        )
