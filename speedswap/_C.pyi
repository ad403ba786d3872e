"""The CPU engine (csrc/bindings.cpp). Pointers are integers; the caller keeps the memory alive."""

from collections.abc import Sequence

_Part = tuple[int, int, int, int]  # offset, width, block, block_stride: bytes and a pointer
_Move = tuple[int, int, Sequence[_Part]]  # records, stride, parts

_Segments = tuple[int, int, int]  # index, offsets, num_segments: pointers to int64, and how many
_Matrix = tuple[int, int, int]  # pointer, bytes from a row to the next, items in a row

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
def group(local: int, count: int, num_rows: int, order: int, offsets: int) -> None: ...
def sum_segments(
    segments: _Segments, values: _Matrix, weights: int, out: _Matrix, item_bytes: int, threads: int
) -> None: ...
def dot_segments(
    segments: _Segments, values: _Matrix, others: _Matrix, products: int, item_bytes: int, threads: int
) -> None: ...
def max_segments(
    segments: _Segments, values: _Matrix, out: _Matrix, taken: int, item_bytes: int, threads: int
) -> None: ...
def sum_taken(
    segments: _Segments, entries: int, values: _Matrix, taken: int, out: _Matrix, item_bytes: int, threads: int
) -> None: ...
def advise_huge_pages(pointer: int, nbytes: int) -> None: ...

class Buffer:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Job:
    def wait(self) -> None: ...
    def done(self) -> bool: ...

class GatherJob(Job):
    @property
    def outside(self) -> int: ...
    @property
    def distinct(self) -> int: ...
    def take(self) -> tuple[Buffer, Buffer, list[Buffer]]: ...

class ScatterJob(Job): ...

def gather_ahead(
    ids: int, id_bytes: int, count: int, num_rows: int, moves: Sequence[_Move], threads: int
) -> GatherJob: ...
def scatter_behind(ids: int, id_bytes: int, count: int, moves: Sequence[_Move], threads: int) -> ScatterJob: ...
def finish_jobs() -> None: ...
def hand_over(
    from_rows: int,
    from_count: int,
    to_rows: int,
    to_count: int,
    columns: Sequence[tuple[int, int, int]],  # from, to, row_bytes
    threads: int,
) -> int: ...
