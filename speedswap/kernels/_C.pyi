"""The CPU loops (csrc/bindings.cpp). Pointers are integers; ids are int64; the caller keeps the memory alive."""

from collections.abc import Callable, Sequence

from torch import Tensor, dtype

_Part = tuple[int, ...]  # block, a pointer; offset, width, block_stride in bytes; if converted, form, stochastic, key
_Move = tuple[int, int, Sequence[_Part]]  # records, stride, parts

_Features = tuple[int, int, int, int, int]  # how many, and pointers to int64: begins or 0, counts, bases, limits
_Segments = tuple[int, int, int]  # index, offsets, num_segments: pointers to int64, and how many
_Factors = tuple[int, int]  # weights, divisors: pointers, 0 for none
_Layout = tuple[int, int]  # samples, step
_Matrix = tuple[int, int, int]  # pointer, bytes from a row to the next, items in a row

_Keys = tuple[int, int, int, int]  # numbers, count, text, offsets; the pointers to texts are 0 unless keys are exact
_Saved = tuple[int, int, int, int, int]  # numbers, last, counts, offsets, text: pointers, 0 for none
_Vectors = tuple[int, int, int, int, int]  # width, rows at most, and pointers: values, keys, offsets

def isa() -> str: ...
def gather(records: int, stride: int, ids: int, count: int, parts: Sequence[_Part], threads: int) -> None: ...
def scatter(
    records: int, stride: int, ids: int, count: int, parts: Sequence[_Part], threads: int, rows_moved: int = 0
) -> None: ...
def round_rows(ids: int, count: int, part: _Part, threads: int) -> None: ...
def rounding_key(seed: int, column_key: int, write: int) -> int: ...
def check_ids(ids: int, count: int, num_rows: int, threads: int) -> int: ...
def first_fall(values: int, count: int, threads: int) -> int: ...
def first_duplicate(ids: int, count: int, num_rows: int) -> int: ...
def last_occurrences(ids: int, count: int, positions: int) -> int: ...
def by_owner(
    ids: int, count: int, bits: int, factor: int, world_size: int, ordered: int, places: int, counts: int
) -> None: ...
def unique(ids: int, count: int, rows: int, local: int, threads: int, num_rows: int = -1) -> int: ...
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
    rows: int = 0,
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
    rows: int = 0,
) -> None: ...
def pair_products(first: int, rest: int, count: int, others: int, width: int, out: int, threads: int) -> None: ...
def pair_gradients(
    first: int, rest: int, count: int, others: int, width: int, grad: int, grad_first: int, grad_rest: int, threads: int
) -> None: ...
def take_idle_steps(
    columns: Sequence[int],
    width: int,
    item_bytes: int,
    last: int,
    now: int,
    before: int,
    bends: bool,
    steps: int,
    count: int,
    threads: int,
) -> None: ...
def step_adagrad(rows: bytes, threads: int) -> None: ...
def read_lines(
    text: bytes, first: int, bases: str, missing: int, values: int, stride: int, most: int
) -> tuple[int, int, int, bool]: ...
def read_vectors(
    input: bytes | bytearray, first: int, last: int, as_text: bool, is_double: bool, rows: _Vectors
) -> tuple[int, int, int]: ...
def write_vectors(rows: _Vectors, as_text: bool, is_double: bool, out: int) -> tuple[int, int]: ...
def read_ahead(first: int, row_bytes: int, rows: int, count: int, threads: int) -> None: ...
def decode_rows(
    values: int,
    width: int,
    scales: int,
    exponents: bool,
    scales_per_row: int,
    tile: tuple[int, int],
    rows: int,
    count: int,
    out: int,
    bfloat16: bool,
    threads: int,
) -> None: ...
def prefault(pointer: int, nbytes: int, threads: int) -> None: ...
def group(local: int, count: int, num_rows: int, order: int, offsets: int) -> None: ...
def sum_rows(
    local: int, count: int, num_rows: int, values: _Matrix, sums: _Matrix, item_bytes: int, threads: int
) -> None: ...
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

class DeferredSignals:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...

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
def allow_captures_elsewhere() -> None: ...
def drain() -> None: ...
def forward(
    from_rows: int,
    from_count: int,
    to_rows: int,
    to_count: int,
    columns: Sequence[tuple[int, _Part]],  # from, to
    threads: int,
) -> int: ...

class IdMapUndo:
    def __init__(self) -> None: ...
    @property
    def applied(self) -> bool: ...

class IdMap:
    def __init__(self, capacity: int, exact: bool, admit_after: int, evict: int, most_on_probation: int) -> None: ...
    def find(self, keys: _Keys, rows: int, threads: int) -> None: ...
    def add(self, keys: _Keys, rows: int, undo: IdMapUndo | None, threads: int) -> bool: ...
    def renewed(self) -> Buffer: ...
    def undo(self, undo: IdMapUndo) -> None: ...
    def cursor(self) -> tuple[int, int, int, int]: ...
    def bytes(self) -> int: ...
    def changed(
        self, on_probation: bool, since: tuple[int, int, int, int], first: int, end: int
    ) -> Buffer: ...  # int32
    def text_bytes(self, on_probation: bool, cells: int, count: int) -> int: ...
    def save(self, on_probation: bool, cells: int, count: int, to: _Saved) -> None: ...
    def restore(self, cursor: tuple[int, int, int, int], rows: _Saved, probation: _Saved) -> bool: ...

def add_to_maps(batches: Sequence[tuple[IdMap, _Keys, IdMapUndo]], rows: int, threads: int) -> int: ...
def hash_texts(bytes: int, offsets: int, count: int, out: int, threads: int) -> None: ...
def texts_of(strings: Sequence[str | bytes]) -> tuple[Buffer, Buffer]: ...
def texts_of_fixed(strings: int, count: int, width: int, ucs4: bool) -> tuple[Buffer, Buffer]: ...

class RowLogDamaged(RuntimeError):
    group: int  # or -1; -2 if the commit that a reader stays at was released

_RowMove = tuple[int, int, int]  # from, to, bytes

def create_row_log(log_fd: int, head_fd: int, salt: int, head: bytes) -> None: ...

class Bringing:
    def wait(self) -> tuple[Buffer, Buffer]: ...  # int64: places; slot, group and layout of each fresh group
    def unwritten(self) -> Buffer: ...  # int64: groups, if others are being read
    def filled(self) -> None: ...
    def release(self) -> None: ...

class Room:
    @property
    def groups(self) -> int: ...
    def release(self) -> None: ...

def allocate(fd: int, at: int, count: int) -> None: ...
def crc32c(data: bytes) -> int: ...
def record_crcs(
    salt: int, stamp: int, groups: int, records: int, count: int, stride: int, crcs: int
) -> None: ...  # pointers to uint32, records with their checksums, uint32

class LogScan:
    def next(self) -> tuple[Buffer, Buffer, int] | None: ...  # groups, records, layout

class RowLog:
    def __init__(
        self,
        log_fd: int,
        head_fd: int,
        num_groups: int,
        rows_per_group: int,
        layouts: Sequence[tuple[int, Sequence[_RowMove]]],
        segment_bytes: int,
        salt: int,
        cache_bytes: int,
        writable: bool,
        commit: int,
        scratch: bool,
        direct: bool,
        journal: bool,
        faults: int,
        before: RowLog | None,
    ) -> None: ...
    def bring(self, rows: int, count: int, overwrite: bool, ahead: bool, seen: bool) -> Bringing | None: ...
    def write(self, places: int, count: int, room: Room | None) -> None: ...
    def make_room(self, groups: int, out_of: Room | None) -> Room: ...
    def find_unwritten(self, rows: int, count: int, out: int) -> None: ...
    def begin_commit(self, head: bytes, hold: bool, files: Sequence[tuple[int, int, int, int]]) -> int: ...
    def wait(self, commit: int) -> None: ...  # until it is durable; OSError if it failed: the log can only be closed
    def wait_for_cleaner(self) -> bool: ...
    def let_go(self, commit: int) -> None: ...  # a held commit, whose records may then be overwritten
    def written_rows(self, first: int, count: int, other: RowLog | None) -> Buffer: ...
    def changed_since(self, commit: int) -> tuple[Buffer, Buffer]: ...  # changed rows, and moved ones
    def refresh(self) -> bool: ...
    def scan(self, groups_per_piece: int) -> LogScan: ...
    def verify(self, advance: Callable[[int], object], strict: bool) -> tuple[int, list[int]]: ...
    def stats(self) -> dict[str, int]: ...  # counters since the log was opened, and sizes
    @property
    def touched(self) -> int: ...  # groups that were ever written
    @property
    def crowded(self) -> bool: ...  # the file is large for its rows: a commit would let much be written again
    def close(self) -> None: ...  # drops what was not committed
    @property
    def head(self) -> bytes: ...  # given with the last durable commit
    @property
    def durable(self) -> int: ...  # the last durable commit; when opened, that one
    @property
    def held(self) -> list[int]: ...  # durable commits
    def held_head(self, commit: int) -> bytes: ...
    @property
    def appending(self) -> bool: ...  # a commit is being written; the next one cannot begin
    @property
    def cache_pointer(self) -> int: ...
    @property
    def num_slots(self) -> int: ...  # groups that the cache holds
    @property
    def most_rows(self) -> int: ...  # at once: never more than 2**22, nor than the cache holds of any
    @property
    def direct(self) -> bool: ...  # read and written past the page cache
    @property
    def fallback(self) -> str: ...  # why through the page cache; empty if it is not
    @property
    def alignment(self) -> int: ...  # bytes that reads of the log are rounded to
    # The calls that change the files since the last time. An entry as a call begins: the file (log, head, or side for
    # any other); write, sync or allocate; its first byte; the bytes written, or the number allocated. And one once it
    # has returned without an error: the file; done; the number of the call's entry, from the first one on; nothing.
    def journal(self) -> list[tuple[str, str, int, bytes | int]]: ...
    def let_reads_go(self) -> None: ...  # lets reads begin that wait for it, for tests
    # For tests: fails `times` calls of op (read, write, sync or allocate), after the next `after` ones. With errno 0,
    # reads and writes are short instead, and a sync takes `seconds` longer and succeeds.
    def fail(self, op: str, after: int, errno: int, times: int, seconds: float) -> None: ...

Source = tuple[int, int, int, int]  # records, stride, ids, how many
Packed = tuple[int, Sequence[tuple[int, int, int]], int]  # bytes per record, its runs, rows at once
# kernel, grid, threads per block, stride, columns, (place of a block's address, bytes per row) for each, lanes
Launch = tuple[int, int, int, int, bytes, Sequence[tuple[int, int]], int]

# On a stream of a GPU. Arguments: numbers, of 8 bytes, and structures.
def launch(
    device: int,
    kernel: int,
    grid: int,
    threads: int,
    stream: int,
    arguments: tuple[int | float | bytes, ...],
) -> None: ...

# A move of copied columns. `rows` are the records' address and stride in words, and the ids' address and number;
# `layout` is the kernels' Columns without the blocks' addresses and the numbers of the cache of hot rows; `shifts`, if
# any, are added to the columns' offsets, in words.
def launch_move(
    device: int,
    kernel: int,
    grid: int,
    threads: int,
    stream: int,
    rows: tuple[int, int, int, int],
    layout: bytes,
    blocks: list[int],
    shifts: list[int],
    hot: tuple[int, ...],
    lanes: int,
) -> None: ...

# Queues count_keys, sum_counts and number_keys, and returns each lookup's answers, after waiting for them. `sorted` has
# the addresses of keys and order, and their number; `scratch` an address, and the number of pieces of keys; `lookups`
# the addresses of features and starts, and their number; `results` the addresses of found and local.
def number_keys(
    device: int,
    kernels: tuple[int, int, int],
    grid: int,
    threads: int,
    stream: int,
    sorted: tuple[int, int, int],
    scratch: tuple[int, int],
    lookups: tuple[int, int, int],
    results: tuple[int, int],
) -> list[tuple[int, int, int, int]]: ...

# Copies features for the kernels of lookups.cuh to 2 + 13 · count numbers on a GPU: a flag, starts, begins, features.
# Numbers of each are at the addresses, of which the last three may be 0. Bags are offsets, and whether the last is the
# number of ids. Returns the greatest end of the features' rows, and the number of ids.
def describe_features(
    device: int,
    stream: int,
    into: int,
    ids: Sequence[Tensor],
    count: int,
    bases: int,
    limits: int,
    outside: int,
    counts: int,
    begins: int,
    bags: Sequence[tuple[Tensor | None, bool]],
) -> tuple[int, int]: ...

# The kernels' Bags: by name, in order, tensors' addresses and numbers; 0 for None and for what is not given. The last
# is 1 if rows of `row_bytes`, in matrices of this dtype, are multiples of 16 bytes and begin at a multiple.
def describe_bags(
    names: tuple[str, ...], given: dict[str, Tensor | int | None], dtype: dtype, row_bytes: int
) -> bytes: ...

class StagingRing:
    def __init__(self, device: int, copies: int, kernels: int) -> None: ...
    def use(self, buffers: Sequence[tuple[int, int]]) -> None: ...
    def gather(self, source: Source, packed: Packed, places: int, launches: Sequence[Launch], threads: int) -> None: ...
    def scatter(
        self, source: Source, packed: Packed, ids_near: int, places: int, launches: Sequence[Launch], threads: int
    ) -> None: ...
