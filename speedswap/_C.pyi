"""The CPU engine (csrc/bindings.cpp). Pointers are integers; the caller keeps the memory alive."""

from collections.abc import Sequence

_Part = tuple[int, int, int, int]  # offset, width, block, block_stride: bytes and a pointer

def isa() -> str: ...
def gather(
    records: int, stride: int, ids: int, id_bytes: int, count: int, parts: Sequence[_Part], threads: int
) -> None: ...
def scatter(
    records: int, stride: int, ids: int, id_bytes: int, count: int, parts: Sequence[_Part], threads: int
) -> None: ...
def check_ids(ids: int, id_bytes: int, count: int, num_rows: int, threads: int) -> int: ...
def first_duplicate(ids: int, id_bytes: int, count: int, num_rows: int) -> int: ...
def last_occurrences(ids: int, id_bytes: int, count: int, positions: int) -> int: ...
def unique(ids: int, id_bytes: int, count: int, rows: int, local: int, threads: int) -> int: ...
def fill_uniform(
    out: int,
    row_stride: int,
    first_row: int,
    num_rows: int,
    width: int,
    item_bytes: int,
    low: float,
    high: float,
    seed: int,
    column_key: int,
    threads: int,
) -> None: ...
def fill_normal(
    out: int,
    row_stride: int,
    first_row: int,
    num_rows: int,
    width: int,
    item_bytes: int,
    mean: float,
    std: float,
    seed: int,
    column_key: int,
    threads: int,
) -> None: ...
def prefault(pointer: int, nbytes: int, threads: int) -> None: ...
