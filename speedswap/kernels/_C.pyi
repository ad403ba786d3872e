"""The CPU loops (csrc/bindings.cpp). Pointers are integers; ids are int64; the caller keeps the memory alive."""

from collections.abc import Sequence

_Copied = tuple[int, int, int, int]  # offset, width, block, block_stride: bytes and a pointer
_Converted = tuple[int, int, int, int, int, bool, int]  # and form, stochastic, key
_Part = _Copied | _Converted
_Move = tuple[int, int, Sequence[_Part]]  # records, stride, parts

_Features = tuple[int, int, int, int, int]  # how many, and pointers to int64: begins or 0, counts, bases, limits
_Segments = tuple[int, int, int]  # index, offsets, num_segments: pointers to int64, and how many
_Factors = tuple[int, int]  # weights, divisors: pointers, 0 for none
_Layout = tuple[int, int]  # samples, step
_Matrix = tuple[int, int, int]  # pointer, bytes from a row to the next, items in a row

def isa() -> str: ...
def gather(records: int, stride: int, ids: int, count: int, parts: Sequence[_Part], threads: int) -> None: ...
def scatter(records: int, stride: int, ids: int, count: int, parts: Sequence[_Part], threads: int) -> None: ...
def round_rows(ids: int, count: int, part: _Part, threads: int) -> None: ...
def rounding_key(seed: int, column_key: int, write: int) -> int: ...
def check_ids(ids: int, count: int, num_rows: int, threads: int) -> int: ...
def first_fall(values: int, count: int, threads: int) -> int: ...
def first_duplicate(ids: int, count: int, num_rows: int) -> int: ...
def last_occurrences(ids: int, count: int, positions: int) -> int: ...
def unique(ids: int, count: int, rows: int, local: int, threads: int) -> int: ...
def merge_ids(
    ids: int, count: int, item_bytes: int, features: _Features, rows: int, num_rows: int, threads: int
) -> bool: ...
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
    segments: _Segments,
    values: _Matrix,
    factors: _Factors,
    layout: _Layout,
    out: _Matrix,
    item_bytes: int,
    threads: int,
) -> None: ...
def sum_segments_back(
    segments: _Segments,
    values: _Matrix,
    factors: _Factors,
    layout: _Layout,
    sums: _Matrix,
    num_rows: int,
    item_bytes: int,
    threads: int,
) -> int: ...
def dot_segments(
    segments: _Segments, values: _Matrix, others: _Matrix, products: int, item_bytes: int, threads: int
) -> None: ...
def max_segments(
    segments: _Segments, values: _Matrix, out: _Matrix, taken: int, item_bytes: int, threads: int
) -> None: ...
def sum_taken(
    segments: _Segments, entries: int, values: _Matrix, taken: int, out: _Matrix, item_bytes: int, threads: int
) -> None: ...

class Buffer:
    def __init__(self, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Job:
    def wait(self, threads: int = 1) -> None: ...
    def done(self) -> bool: ...

class PrefetchJob(Job):
    @property
    def outside(self) -> int: ...
    @property
    def distinct(self) -> int: ...
    def take(self) -> tuple[Buffer, Buffer, list[Buffer]]: ...

class WriteJob(Job): ...

def prefetch(ids: int, count: int, num_rows: int, moves: Sequence[_Move], threads: int) -> PrefetchJob: ...
def queue_scatter(ids: int, count: int, moves: Sequence[_Move], threads: int) -> WriteJob: ...
def use_own_pool() -> None: ...
def drain() -> None: ...
def forward(
    from_rows: int,
    from_count: int,
    to_rows: int,
    to_count: int,
    columns: Sequence[tuple[int, _Part]],  # from, to
    threads: int,
) -> int: ...
