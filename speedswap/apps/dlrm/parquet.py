"""Parquet files as the text that Criteo's format has: one reader for both, with the same errors."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speedswap._install import pip_install
from speedswap.apps.dlrm.samples import INTEGERS, NAMES
from speedswap.apps.errors import SamplesError

__all__ = ["is_parquet", "parquet_pieces"]

MAGIC = b"PAR1"
ROWS_AT_ONCE = 1 << 14


def is_parquet(path: Path) -> bool:
    """Tell a Parquet file by its first bytes.

    Raises:
        SamplesError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise SamplesError(f"samples {path} cannot be read: {error.strerror}") from error


def parquet_pieces(path: Path, *, labelled: bool | None) -> tuple[str, Iterator[tuple[bytes, int]]]:
    """Read a Parquet file as text.

    The columns are found by their names, label, I1 to I13 and C1 to C26, or are exactly these in order. A category is
    text of hexadecimal digits, or a whole number.

    Args:
        path: the file.
        labelled: True if the rows have a label; None to tell by the columns.

    Returns:
        A base per column, as :func:`speedswap.kernels.read_lines` takes them; and pieces of text, each with the bytes
        read so far, as they are on disk.

    Raises:
        SamplesError: pyarrow is missing, the file is damaged, or it has other columns. Also while reading.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise SamplesError(f"samples {path} is Parquet: {pip_install('pyarrow', extra='parquet')}") from error
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise SamplesError(f"samples {path} is not a whole Parquet file ({error}): make it or copy it again") from error
    names = file.schema_arrow.names
    found = columns_of(names, path, labelled)
    for name in found:
        if names.count(name) > 1:
            raise SamplesError(f"samples {path} has {names.count(name)} columns {name!r}: give each a name of its own")
    bases = "b" if len(found) == len(NAMES) else ""
    for place, name in enumerate(found[-len(NAMES) + 1 :]):
        kind = file.schema_arrow.field(name).type
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        bases += "d" if number or place < INTEGERS else "x"
    return bases, pieces_of(file, found, path)


def columns_of(names: Sequence[str], path: Path, labelled: bool | None) -> list[str]:
    """Choose the columns of the label, the integers and the categories."""
    wanted = NAMES if labelled or (labelled is None and NAMES[0] in names) else NAMES[1:]
    if {*wanted} <= {*names}:
        return list(wanted)
    for count in (len(NAMES), len(NAMES) - 1):
        if len(names) == count and labelled in (None, count == len(NAMES)):
            return list(names)
    missing = [name for name in wanted if name not in names]
    raise SamplesError(
        f"samples {path} has {len(names)} columns and no {missing[0]!r}: give {', '.join(wanted[:2])}, … and "
        f"{wanted[-1]}, or these {len(wanted)} in order"
    )


def pieces_of(file: Any, names: Sequence[str], path: Path) -> Iterator[tuple[bytes, int]]:
    import pyarrow as pa
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    rows, size = 0, path.stat().st_size
    try:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(names)):
            columns = [as_text(batch.column(name), f"samples {path}", name, rows) for name in names]
            text = io.BytesIO()
            csv.write_csv(pa.RecordBatch.from_arrays(columns, list(names)), text, options)
            rows += len(batch)
            yield text.getvalue(), size * rows // file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise SamplesError(f"samples {path}, after row {rows}: {error}; correct it, or make the file again") from error
    finally:
        file.close()


def as_text(column: Any, where: str, name: str, rows: int) -> Any:
    """Return a column that is written as whole numbers or text; refuse numbers that are not whole."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_boolean(column.type):
        return column.cast(pa.int8())
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    if not pa.types.is_floating(column.type):
        return column
    whole = compute.fill_null(compute.equal(compute.floor(column), column), True)
    wrong = compute.index(whole, False).as_py()
    if wrong >= 0:
        raise SamplesError(
            f"{where}, row {rows + wrong + 1}, column {name} is {column[wrong].as_py()}, not a whole number: correct "
            "it, or leave it null where it is missing"
        )
    return column.cast(pa.int64())
