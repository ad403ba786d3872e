"""Operations on all rows of a table: those that changed; copies as a tensor or an array, or in pieces to files."""

from __future__ import annotations

import errno
import math
import os
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from speedswap import kernels
from speedswap._machine import available_bytes
from speedswap._words import AVERAGE_OTHERS, a_kind
from speedswap.errors import IdError, TableFormatError, TableTooLargeError
from speedswap.kernels import Texts
from speedswap.tables.disk.store import LogStore
from speedswap.tables.files.manifest import part_of_ranks
from speedswap.tables.files.place import open_regular
from speedswap.tables.id_map import IdMap
from speedswap.tables.idle import IdleStore
from speedswap.tables.init import CHUNK_ROWS, chunks_of
from speedswap.tables.keys import Keys
from speedswap.tables.record import (
    Column,
    RecordLayout,
    column_among,
    initial_values,
    is_lazy,
    require_dtype,
    with_sources,
)
from speedswap.tables.store import (
    CHECKPOINT,
    CHECKPOINT_FOLDER,
    Commits,
    JointRows,
    RowStore,
    StoreFacts,
    WrappedStore,
    innermost,
)

CHUNK_BYTES = 64 * 2**20
_CPU = torch.device("cpu")


def read_rows(store: RowStore, start: int, stop: int | None, column: str, dtype: torch.dtype | None) -> Tensor:
    """Copy rows of a column into ordinary memory; arguments and errors are those of :meth:`Table.read`."""
    facts = store.facts
    for name, bound in (("start", start), ("stop", stop)):
        if getattr(bound, "shape", ()) or not isinstance(bound, SupportsIndex | None):
            raise TypeError(
                f"{name} is {a_kind(bound)}, but Table.read copies the rows between two numbers; for ids call "
                "Embedding.read(ids) or Table.gather(ids), and for another column than the weight give column="
            )
    start, stop, _ = slice(start, stop).indices(facts.num_embeddings)
    stop, found = max(start, stop), column_among(store.columns, column, facts.name)
    if dtype is not None:
        require_dtype("dtype", dtype)
    require_memory(
        (stop - start) * found.width * (dtype or found.dtype).itemsize,
        f"rows {start} to {stop - 1} of column {column!r} of table {facts.name!r}",
    )
    if dtype in (None, found.dtype):
        is_copy = found.compact or facts.reads_copies
        return store.read(column, start, stop).to("cpu", copy=not is_copy).contiguous()
    rows = torch.empty(stop - start, *found.row_shape, dtype=dtype, device="cpu")
    for some in chunks_of(len(rows)):
        rows[some.start : some.stop] = store.read(column, start + some.start, start + some.stop)
    return rows


def require_rows(facts: StoreFacts, start: int, count: int) -> None:
    """Raise IdError or TypeError unless a table has ``count`` rows from ``start`` on."""
    if not isinstance(start, SupportsIndex):
        raise TypeError(f"start is {start!r}; give the first row's number, and the column as column=")
    if start < 0 or start + count > facts.num_embeddings:
        raise IdError(
            f"rows {start} to {start + count - 1} were to be written, but table {facts.name!r} has rows 0 to "
            f"{facts.num_embeddings - 1}"
        )


def described(store: RowStore, *, closed: bool) -> str:
    """Return a table's ``repr()``."""
    facts, weight = store.facts, store.columns["weight"]
    part = part_of_ranks(weight)
    state = ("" if part is None else f"{part}, ") + ("closed" if closed else facts.storage)
    columns = "".join(f" + {name}" for name in store.columns if name != "weight")
    dtype = str(weight.dtype).removeprefix("torch.")
    if weight.compact:
        dtype += f" as {str(weight.stored_dtype).removeprefix('torch.')}"
    nbytes = bytes_of(store)
    size = f"{nbytes / 2**30:.2f} GiB" if nbytes > 2**30 // 200 else "under 0.01 GiB"
    return f"Table({facts.name!r}, {facts.num_embeddings:,} × {weight.width} {dtype}{columns}, {state}, {size})"


def bytes_of(store: RowStore) -> int:
    """Return the bytes of all rows as stored."""
    known, columns = store.facts.nbytes, store.columns.values()
    return store.facts.num_embeddings * RecordLayout.of([*columns]).stride if known is None else known


def to_numpy(
    store: RowStore, read: Callable[[int, int], Tensor], dtype: DTypeLike | None, copy: bool | None
) -> NDArray[Any]:
    """Copy all weights into an array, for ``np.asarray(table)``.

    Args:
        store: the table's store.
        read: :meth:`Table.read`.
        dtype: the array's dtype; by default the weights'.
        copy: must not be False: only :meth:`Table.view` shares the table's memory.

    Returns:
        An array (num_embeddings, embedding_dim).

    Raises:
        TableTooLargeError: it does not fit into free memory.
        TypeError: NumPy lacks the dtype (bfloat16), and no other was requested.
        ValueError: ``copy`` is False.
    """
    num_rows, name, weight = store.facts.num_embeddings, store.facts.name, store.columns["weight"]
    if copy is False:
        raise ValueError(f"copy is False, but the rows of table {name!r} are always copied; use Table.view()")
    known = numpy_dtype(weight.dtype)
    wanted = known if dtype is None else np.dtype(dtype)
    if wanted is None or (known is None and not weight.dtype.is_floating_point):
        raise TypeError(
            f"table {name!r} holds {weight.dtype}, which NumPy does not have; give a dtype that it has, e.g. "
            "np.asarray(table, dtype=np.float32), or use Table.read() for a tensor"
        )
    if known is not None and wanted == known:  # np.dtype(float) == None is True
        return read(0, num_rows).numpy()
    require_memory(num_rows * weight.width * wanted.itemsize, f"rows 0 to {num_rows - 1} of table {name!r} as {wanted}")
    out = np.empty((num_rows, weight.width), wanted)
    for rows in chunks_of(num_rows, max(1, CHUNK_BYTES // (weight.width * weight.dtype.itemsize))):
        out[rows.start : rows.stop] = as_numpy(read(rows.start, rows.stop))
    return out


def not_pickled(name: str, storage: str) -> TypeError:
    """Return the error for pickling a table in memory."""
    remedy = "save torch.save(model.state_dict(), …), or speedswap.save_checkpoint(path, model); for another "
    remedy += "process use Table.save(path), and Table.open(path, mode='r') there"
    if get_spawning_popen() is not None:
        remedy = "to read its rows in a worker, start that with fork (multiprocessing_context='fork'), or make the "
        remedy += "table on disk (path=), which opens there; to train it in several processes, make it in each "
        remedy += "of them with storage=speedswap.Ranks()"
    return TypeError(f"table {name!r} is {storage} memory and cannot be pickled; {remedy}")


def require_copyable(store: RowStore) -> None:
    """Raise TypeError unless only this process's memory holds the rows, so a copied model can have separate rows."""
    name, ranks, files = store.facts.name, store.facts.ranks, store.files
    if files is not None and files.path is not None and not store.facts.part_name:
        raise TypeError(
            f"table {name!r} lies in files, which are not copied implicitly; copy it with Table.save(path) "
            f"and Table.open(path), or into memory with Table.load(path); {AVERAGE_OTHERS}"
        )
    if ranks is not None:
        raise TypeError(
            f"table {name!r} is owned by {len(ranks)} ranks, and cannot be copied; save it, or make "
            "another model with storage=speedswap.Ranks() that loads this one's state_dict(). To average dense "
            "layers (AveragedModel), take a module without the embedding"
        )


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the NumPy equivalent of a torch dtype, or None if there is none, as for bfloat16."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def as_numpy(values: Tensor) -> NDArray[Any]:
    """Return values as an array; bfloat16 and float8, which NumPy lacks, as float32, which is exact.

    Raises:
        TypeError: no NumPy dtype can hold them.
    """
    values = values.detach().cpu()
    if numpy_dtype(values.dtype) is None:
        if not values.is_floating_point():
            raise TypeError(f"values hold {values.dtype}, which NumPy does not have; take them as a tensor")
        values = values.float()
    found: NDArray[Any] = values.numpy()
    return found


def require_memory(nbytes: int, what: str) -> None:
    """Raise TableTooLargeError, naming ``what``, if a copy does not fit in free memory."""
    free = available_bytes()
    if nbytes > 0.9 * free:
        raise TableTooLargeError(
            f"{what} are {nbytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of memory are free; read fewer rows, or "
            "use Table.save(path)"
        )


# ---- rows that have changed


def _commits_of(store: RowStore) -> Commits:
    """Return the held commits of a table's store.

    Raises:
        TypeError: it keeps none.
    """
    commits = None if store.files is None else store.files.commits
    if commits is None:
        raise TypeError(
            f"table {store.facts.name!r} keeps no commits to compare with (storage {store.facts.storage!r}); put "
            "it on disk with storage=speedswap.Disk(path), without scratch and without ranks"
        )
    return commits


def hold_commit(store: RowStore) -> int:
    """Commit a table on disk durably, and hold the commit; see :meth:`speedswap.Table.hold`."""
    commits = _commits_of(store)
    for name in (CHECKPOINT, CHECKPOINT_FOLDER):  # whose end would release the commit
        store.notes.attributes.pop(name, None)
    _take_missed_steps(store)
    commit = commits.hold()
    store.flush()
    return commit


def changed_rows(store: RowStore, columns: Sequence[str], since: int | None = None) -> Tensor:
    """Return the rows that were changed since a held commit, or that may differ from their initial values.

    Args:
        store: the table's; of ranks that own the rows together, every one must call this.
        columns: the columns to compare with initial values, where no log knows the rows that were written.
        since: the number of the commit; None for initial values.

    Returns:
        Ids, int64, ascending. Every row, if initial values cannot be computed again.

    Raises:
        TypeError, ValueError: the table keeps no commits, or not this one.
    """
    facts, log, idle = store.facts, innermost(store), _idle(store)
    if isinstance(log, JointRows) and since is None:
        return log.changed_rows(columns)
    rows = range(facts.first_row, facts.first_row + facts.num_embeddings)
    missed = idle is not None and idle.steps is not None and idle.steps.count > 0
    if since is not None:
        _commits_of(store)
        assert isinstance(log, LogStore)
        _take_missed_steps(store)
        return log.changed_since(since, rows) - rows.start
    if not all(is_lazy(store.columns[name]) for name in columns):
        return torch.arange(facts.num_embeddings)
    if isinstance(log, LogStore) and not missed:
        ids = log.log.written(rows.start, rows.stop) - rows.start
        if log.manifest.group_rows == 1:
            return ids
        pieces: Iterator[Tensor] = iter(torch.split(ids, CHUNK_ROWS))
    else:
        pieces = (torch.arange(some.start, some.stop) for some in chunks_of(facts.num_embeddings))
    compared = {name: store.columns[name] for name in columns}
    return torch.cat([ids[_differ(store, compared, ids)] for ids in pieces if len(ids)] or [torch.arange(0)])


def _take_missed_steps(store: RowStore) -> None:
    """Write every row of a table with the steps that it has missed, so that its log has them."""
    if (idle := _idle(store)) is not None:
        idle.bring_up_to_date()


def _idle(store: RowStore) -> IdleStore | None:
    while isinstance(store, WrappedStore):
        if isinstance(store, IdleStore):
            return store
        store = store.inner
    return None


def _differ(store: RowStore, columns: dict[str, Column], ids: Tensor) -> Tensor:
    """Return a mask of the rows whose bits differ from their initial values."""
    found, facts = store.gather(ids, [*columns], _CPU), store.facts
    initial = initial_values(with_sources(store.columns, columns), ids, facts.seed, facts.num_embeddings)
    differ = torch.zeros(len(ids), dtype=torch.bool)
    for name, column in columns.items():
        ours, theirs = (_as_bytes(each) for each in (found[name], column.as_read(initial[name])))
        differ |= (ours != theirs).any(1)
    return differ


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(len(rows), rows[:1].numel()).view(torch.uint8)


# ---- in pieces, to a file and from one

KeySource = str | os.PathLike[str] | IdMap | Sequence[str]
"""``"rows"``, the path of a vocabulary, an id map, or the keys themselves."""

_LINE_BYTES = 1 << 16


class RowKeys:
    """The keys of some rows of a table, in order.

    Attributes:
        rows: the rows.
        kind: ``"int64"`` or ``"exact"``.
    """

    def __init__(self, rows: range, keys: Tensor | Texts | Sequence[str] | None) -> None:
        self.rows = rows
        self._keys = keys
        self.kind = "int64" if keys is None or isinstance(keys, Tensor) else "exact"

    def take(self, start: int, stop: int) -> Tensor | Texts:
        """Return the keys of ``rows[start:stop]``; calls take consecutive pieces."""
        keys = self._keys
        if keys is None:
            return torch.arange(self.rows[start], self.rows[stop - 1] + 1)
        if isinstance(keys, Tensor):
            return keys[start:stop]
        if isinstance(keys, tuple):
            text, offsets = keys
            first, last = int(offsets[start]), int(offsets[stop])
            return text[first:last], offsets[start : stop + 1] - first
        return kernels.texts_of(keys[start:stop])


class _Vocabulary(RowKeys):
    """Keys read from the lines of a file as they are taken."""

    def __init__(self, rows: range, file: BinaryIO, path: Path) -> None:
        super().__init__(rows, ())
        self._file = file
        count = sum(1 for _ in self._lines(path))
        if count != len(rows):
            raise ValueError(f"keys is {str(path)!r} with {count} lines, but the table has {len(rows)} rows")
        self._taken = self._lines(path)

    def _lines(self, path: Path) -> Iterator[bytes]:
        self._file.seek(0)
        if self._file.read(len(BOM_UTF8)) != BOM_UTF8:
            self._file.seek(0)
        while line := self._file.readline(_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) == _LINE_BYTES:
                raise ValueError(f"keys is {str(path)!r}, which has a line of more than {_LINE_BYTES} bytes")
            yield line.rstrip(b"\r\n")

    def take(self, start: int, stop: int) -> Texts:
        return kernels.texts_of([*islice(self._taken, stop - start)])


@contextmanager
def opened_keys(given: KeySource | RowKeys, num_rows: int) -> Iterator[RowKeys]:
    """Provide the keys of a table's rows.

    Args:
        given: ``"rows"`` for the rows' numbers; an id map, which selects the rows that have a key; the path of a text
            file with a key per line; or a sequence of keys, one per row.
        num_rows: the table's number of rows.

    Raises:
        ValueError, TypeError: they do not match the table, or are unknown.
        OSError: the file cannot be read.
    """
    if isinstance(given, RowKeys):
        yield given
    elif isinstance(given, IdMap):
        yield keys_of_map(given, num_rows)
    elif isinstance(given, str) and given == "rows":
        yield RowKeys(range(num_rows), None)
    elif isinstance(given, str | os.PathLike):
        with open_regular(Path(given)) as file:
            yield _Vocabulary(range(num_rows), file, Path(given))
    elif isinstance(given, Sequence):
        if len(given) != num_rows:
            raise ValueError(f"keys has {len(given)} keys, but the table has {num_rows} rows")
        yield RowKeys(range(num_rows), given)
    else:
        raise TypeError(f'keys is {a_kind(given)}; give "rows", a path, an IdMap or a list of strings')


def keys_of_map(id_map: IdMap, num_rows: int) -> RowKeys:
    """Return the keys of a map's rows; errors are those of :func:`opened_keys`."""
    if id_map.keys == "hashed":
        raise ValueError(
            'the id map keeps hashes and not the keys; give keys, a file with a key per row, or keys="rows"'
        )
    if id_map.num_rows > num_rows:
        raise ValueError(f"keys is a map to rows 0 to {id_map.capacity}, but the table has {num_rows} rows")
    keys = id_map.row_keys()
    count = len(keys) if isinstance(keys, Tensor) else len(keys[1]) - 1
    if not count:
        raise ValueError("the id map has no keys yet, so that no row has one; train first, or give keys")
    return RowKeys(range(1, count + 1), keys)


class KeySink:
    """Collects the keys of a file's rows, and refuses duplicates.

    Args:
        kind: ``"exact"`` or ``"int64"``.
        num_rows: the number of keys to expect.
        vocabulary: a file that gets a line per key; None if the keys go only to the map.
        what: the file, for messages.
    """

    def __init__(self, kind: str, num_rows: int, vocabulary: BinaryIO | None, what: str) -> None:
        self.id_map = IdMap(num_rows, keys=kind)
        self._vocabulary = vocabulary
        self._what = what

    def add(self, start: int, keys: Tensor | Texts) -> None:
        """Add the keys of rows from ``start`` on.

        Raises:
            TableFormatError: one of them occurs twice, or cannot be a line of a vocabulary.
        """
        texts = None if isinstance(keys, Tensor) else keys
        numbers = keys if isinstance(keys, Tensor) else kernels.hash_texts(keys)
        rows, _ = self.id_map.add(Keys(numbers, tuple(numbers.shape), numbers.device, texts))
        wrong = (rows != torch.arange(start + 1, start + 1 + len(rows))).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise TableFormatError(
                f"{self._what} is damaged: key {key_at(keys, place)!r} of row {start + place} is that of row "
                f"{int(rows[place]) - 1} as well; give each row a different key, or leave the keys "
                "out with keys='drop' (--keys drop)"
            )
        if self._vocabulary is not None:
            text, offsets = as_texts(keys)
            raw, ends = text.numpy().tobytes(), offsets.tolist()
            lines = [raw[first:last] for first, last in pairwise(ends)]
            for place, line in enumerate(lines):
                if b"\n" in line or b"\r" in line:
                    raise TableFormatError(
                        f"{self._what}: key {line[:60]!r} of row {start + place} has several lines, which a file "
                        "with a key per line cannot hold"
                    )
            self._vocabulary.write(b"".join(line + b"\n" for line in lines))


def as_texts(keys: Tensor | Texts) -> Texts:
    """Return keys as strings, numbers in decimal."""
    return kernels.texts_of([*map(str, keys.tolist())]) if isinstance(keys, Tensor) else keys


def key_at(keys: Tensor | Texts, place: int) -> str | int:
    """Return one key, for messages."""
    if isinstance(keys, Tensor):
        return int(keys[place])
    text, offsets = keys
    raw = bytes(text[int(offsets[place]) : int(offsets[place + 1])].numpy())
    return raw.decode(errors="backslashreplace")[:60]


PIECE_BYTES = 8 << 20
_SHARE = 4  # a window takes one part in this many of free memory
_BYTES_FOR_A_READ = 16 << 10  # bytes that a disk reads sequentially in the time of one random read
_ROWS_AT_ONCE = 1 << 16


class ColumnForm(NamedTuple):
    """The dtype and shape of a column's rows."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Items in a row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class FilePiece:
    """A piece of consecutive rows.

    Attributes:
        start: the first row's number.
        values: by column, shape (n, ...), in ordinary memory.
        keys: numbers, int64, shape (n,), or texts; None where rows have none.
    """

    start: int
    values: dict[str, Tensor]
    keys: Tensor | Texts | None = None

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))


def rows_in_piece(forms: Sequence[ColumnForm | Column]) -> int:
    """Return the number of rows in a piece of some columns."""
    return max(1, PIECE_BYTES // max(1, sum(form.row_bytes for form in forms)))


class Outgoing:
    """Rows of a store being written to a file, while the table's lock is held.

    Args:
        store: the rows.
        columns: names.
        keys: the rows' keys, which select the rows; None for all rows, without keys.
    """

    def __init__(self, store: RowStore, columns: Sequence[str], keys: RowKeys | None) -> None:
        self.keys = keys
        self.rows = range(store.facts.num_embeddings) if keys is None else keys.rows
        self.forms = {name: ColumnForm(store.columns[name].dtype, store.columns[name].row_shape) for name in columns}
        self._store = store

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self) -> Iterator[FilePiece]:
        """Yield the rows in order, numbered from 0."""
        step = rows_in_piece([*self.forms.values()])
        most = _window_rows(self._store, sum(form.row_bytes for form in self.forms.values()), len(self))
        for begin in range(0, len(self), most or step):
            rows = self.rows[begin : begin + (most or step)]
            if most is None:
                read = self._store.read
                values = {name: read(name, rows.start, rows.stop).cpu().contiguous() for name in self.forms}
            else:
                values = _window(self._store, self.forms, rows)
            for start in range(0, len(rows), step):
                first, last = begin + start, begin + min(start + step, len(rows))
                keys = None if self.keys is None else self.keys.take(first, last)
                yield FilePiece(first, {name: each[start : start + step] for name, each in values.items()}, keys)


class Incoming(ABC):
    """The rows of a file whose head has been checked: its sizes match the file.

    Attributes:
        num_rows: rows.
        columns: forms by name; the first is the weight unless columns are given.
        key_kind: ``"exact"`` for string keys, ``"int64"`` for numbers; None if rows have no keys.
    """

    num_rows: int
    columns: Mapping[str, ColumnForm]
    key_kind: str | None = None

    def require_readable_keys(self, columns: Sequence[str]) -> None:
        """Raise TableFormatError if keys have an unsupported type, unless they are among ``columns``."""
        return None

    def choose(self, columns: Sequence[str]) -> None:
        """Set the number of rows from the chosen columns, if it depends on them.

        Raises:
            TableFormatError: the columns differ in length.
        """
        return None

    @abstractmethod
    def pieces(self, columns: Sequence[str]) -> Iterator[FilePiece]:
        """Yield some columns of all rows, in order.

        Raises:
            TableFormatError: the file is damaged at this point.
        """


def _window_rows(store: RowStore, row_bytes: int, num_rows: int) -> int | None:
    """Return the number of rows in a window; None if rows are better read one by one.

    Each window scans the whole log. That pays if the scans take less time than one read per group.
    """
    if not isinstance(store, LogStore):
        return None
    most = max(1, available_bytes() // _SHARE // row_bytes)
    walks = -(-num_rows // most)
    return most if walks * store.log.stats()["record_bytes"] <= _BYTES_FOR_A_READ else None


def _window(store: RowStore, forms: Mapping[str, ColumnForm], rows: range) -> dict[str, Tensor]:
    """Return rows by column, in ordinary memory."""
    values = {name: torch.empty(len(rows), *each.row_shape, dtype=each.dtype) for name, each in forms.items()}
    missing = torch.ones(len(rows), dtype=torch.bool)
    try:
        for found, held in store.written_rows():
            inside = (found >= rows.start) & (found < rows.stop)
            places = found[inside] - rows.start
            for name in forms:
                values[name][places] = store.columns[name].decode(held[name][inside])
            missing[places] = False
    except OSError as error:
        if error.errno != errno.ESTALE:  # another process has overwritten some of them
            raise
        missing[:] = True
    for places in torch.split(missing.nonzero().flatten(), _ROWS_AT_ONCE):
        block = store.gather(places + rows.start, [*forms], _CPU)
        for name in forms:
            values[name][places] = block.columns[name]
    return values
