"""Growing id sets: a map from 64-bit or string keys to the rows of a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._process import Locked
from speedswap.errors import IdMapError, IdMapFullError
from speedswap.kernels import IdMapUndo
from speedswap.tables.files import keys_file
from speedswap.tables.files.damage import require, says_damaged
from speedswap.tables.files.keys_file import Sweep, joined
from speedswap.tables.keys import KINDS, Keys, as_keys
from speedswap.tables.record import whole_number

_EVICTS = (None, "lru", "lfu")
_MOST_ROWS = 2**31 - 1
_OF_FILES = (
    *("capacity", "keys", "admit_after", "evict", "num_rows", "part"),
    *("_map", "_token", "_stale", "_free_rows_are_stale", "_is_frozen"),
)


class IdMap(Locked):
    """A map from keys that are not known in advance, 64-bit integers or strings, to rows.

    Keys get rows 1 to ``capacity`` in order of first occurrence, so early and frequent keys are close together.
    Row 0 stands for every key without a row: in an embedding, ``Embedding(capacity, dim, id_map=map)``, it is the
    padding row: zeros, without a gradient. A training lookup adds keys; any other lookup does not. A row that passes
    from one key to another is reset, weight and optimizer state, to its initial values, which depend on the table's
    seed: to resume from a ``state_dict`` bit for bit, make the model with the same ``seed``.

    The result depends only on the batches and their order, not on the number of threads. A map is saved and restored
    with its table. It takes at most 24 bytes per key, on probation or not, plus 17 and the string for ``"exact"``, and
    grows with the number of keys. Any number of threads may use it. A copy in another process (a ``DataLoader`` worker)
    is frozen: it looks up keys but does not add any.

    Args:
        capacity: the number of rows for keys, 1 to 2**31 - 1.
        keys: ``"int64"``: integers, any values. ``"hashed"``: strings, kept as 64-bit hashes (XXH64): among n of them
            two share a row with odds of n² / 2**65: 1 in 370,000 for 10 million keys. ``"exact"``: strings, kept in
            full.
        admit_after: sightings before a key gets a row; until then it has row 0. Up to ``capacity`` keys are kept on
            probation; one more evicts the oldest, whose count starts again from zero.
        evict: what to do with a new key when every row is taken: None raises; ``"lru"`` takes the row of the least
            recently used key; ``"lfu"`` that of the key seen least often since it was admitted, and among those the
            least recently. Ties go in row order. A row of the same lookup is never taken.

    Attributes:
        num_rows: ``capacity + 1``, the table's number of rows.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import torch, speedswap
        >>> users = speedswap.IdMap(1000)
        >>> users.add(torch.tensor([-7, 2**60, -7]))[0]
        tensor([1, 2, 1])
        >>> users.lookup(torch.tensor([2**60, 5]))
        tensor([2, 0])
    """

    def __init__(self, capacity: int, *, keys: str = "int64", admit_after: int = 1, evict: str | None = None) -> None:
        super().__init__()
        remedy = "give a whole number of at least 1, at most 2**31 - 1"
        self.capacity = whole_number("capacity", capacity, 1, _MOST_ROWS, remedy=remedy)
        self.admit_after = whole_number("admit_after", admit_after, 1, _MOST_ROWS, remedy=remedy)
        if keys not in KINDS:
            raise ValueError(f"keys is {keys!r}; choose one of {', '.join(map(repr, KINDS))}")
        if evict not in _EVICTS:
            raise ValueError(f"evict is {evict!r}; choose None, 'lru' or 'lfu'")
        self.keys = keys
        self.evict = evict
        self.num_rows = self.capacity + 1
        self.version = 0
        self.holder: Callable[[], object] = lambda: None  # the store that holds the map
        self.successor: IdMap | None = None  # the ranks' map, if this map was given to their table
        self.part: keys_file.SavedMap | None = None  # the keys that one of several ranks owned, as read
        self._map = self._empty()
        self._token = object()  # replaced when the keys are
        self._ahead: list[AskedAhead] = []  # batches before their turn, whose keys are in the map
        self._stale = torch.empty(0, dtype=torch.int64, device="cpu")  # rows to reset when the next keys are added
        self._free_rows_are_stale = False
        self._is_frozen = False
        self._is_changing = False
        self._owner_pid = os.getpid()

    def _empty(self) -> kernels.KeyMap:
        return kernels.KeyMap(self.capacity, self.keys == "exact", self.admit_after, self.evict)

    # ------------------------------------------------------------------ description

    def stands_for(self, id_map: IdMap) -> bool:
        """Return whether a map given to this map's table is this one; ranks with a map from files also accept a new
        one."""
        return id_map is self

    def __len__(self) -> int:
        """Return the number of keys that have a row."""
        with self.lock, self._as_of_now():
            return self._map.cursor.used if self.part is None else self.part.cursor.used

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map takes."""
        return self._map.nbytes

    @property
    def frozen(self) -> bool:
        """True if keys can only be looked up: in a copy in another process, and after a fork."""
        return self._is_frozen or os.getpid() != self._owner_pid

    @property
    def waits(self) -> bool:
        """True while batches added ahead wait for their turn."""
        return bool(self._ahead)

    def __repr__(self) -> str:
        return (
            f"IdMap({self.capacity}, keys={self.keys!r}, admit_after={self.admit_after}, evict={self.evict!r}, "
            f"{len(self)} keys{', frozen' if self.frozen else ''})"
        )

    # ------------------------------------------------------------------ keys to rows

    def lookup(self, keys: Any) -> Tensor:
        """Return the row of each key, 0 for a key without one. Nothing is added or counted.

        Args:
            keys: integers, or strings for a map of strings: a tensor on any device, a list, a NumPy array of any shape,
                a pyarrow array, or a pandas or polars column. NumPy's fixed-width strings and pyarrow's are read
                without a copy per key.

        Returns:
            int64, of the keys' shape, on their device; on the CPU for strings.

        Raises:
            TypeError: ``keys`` is something else.
            ValueError: a key is missing: None, NaN, NaT, a null, or masked.
        """
        found = as_keys(keys, self.keys)
        with self._unbroken(), self._as_of_now():
            return _shaped(self._map.find(found.numbers, found.texts), found)

    def row_keys(self) -> Tensor | kernels.Texts:
        """Return the keys of rows 1 to ``len(self)``, in order.

        Returns:
            int64, shape (n,): the keys, or the hashes of ``"hashed"`` strings. For ``"exact"`` strings, their
            concatenated bytes, uint8, and the offsets at which each begins and the last ends, int64, shape (n + 1,).

        Example:
            >>> import torch, speedswap
            >>> users = speedswap.IdMap(10)
            >>> rows, _ = users.add(torch.tensor([7, -3, 7]))
            >>> users.row_keys()
            tensor([ 7, -3])
        """
        with self._unbroken(), self._as_of_now():
            saved = self._map.save(False)
        return saved.numbers if saved.texts is None else saved.texts

    def add(self, keys: Any) -> tuple[Tensor, Tensor]:
        """Return the row of each key, after assigning rows to new keys.

        Args:
            keys: as for :meth:`lookup`.

        Returns:
            The rows, int64, of the keys' shape, on their device (on the CPU for strings); and rows that belonged to
            another key and must be reset with :meth:`Table.reset_rows`, int64, shape (n,), on the CPU. An embedding
            with ``id_map`` resets them itself.

        Raises:
            IdMapFullError: more keys need a row than rows are free. Nothing was added or counted.
            IdMapError: the map is frozen.
            TypeError, ValueError: ``keys`` is something else.
        """
        found = as_keys(keys, self.keys)
        with self._changing():
            if not len(found):
                return _shaped(found.numbers, found), self._with_stale(found.numbers)
            with self._left_out():
                added = self._add(found)
                if added is None:
                    self._raise_full(found)
            rows, renewed = added
            return _shaped(rows, found), self._with_stale(renewed)

    def ask(self, keys: Any) -> AskedAhead:
        """Add a batch's keys ahead of its turn. Until its turn, every other call sees the map without them.

        Batches are added in the order of their turns; :meth:`begin` starts a batch's turn, :meth:`take_back` cancels
        it. Keys added out of turn count before them, and may change their rows.

        Raises:
            IdMapFullError, IdMapError, TypeError, ValueError: as for :meth:`add`.
        """
        return self.ask_all([self], [keys])[0]

    @staticmethod
    def ask_all(maps: Sequence[IdMap], keys: Sequence[Any]) -> list[AskedAhead]:
        """Add the keys of a batch to several maps ahead of its turn, as :meth:`ask` does, concurrently: to all or none.

        Raises:
            IdMapFullError, IdMapError, TypeError, ValueError: as for :meth:`ask`.
        """
        if len({*maps}) < len(maps):
            asked = []
            try:
                for each, some in zip(maps, keys, strict=True):
                    asked.append(each.ask(some))
            except BaseException:
                for each, one in zip(maps, asked, strict=False):
                    each.take_back([one])
                raise
            return asked
        found = [as_keys(some, each.keys) for each, some in zip(maps, keys, strict=True)]
        asked = [AskedAhead(some, some.numbers.view(some.shape), some.numbers) for some in found]
        batches = [(each, one) for each, one in zip(maps, asked, strict=True) if len(one.keys)]
        with ExitStack() as held:
            for each in sorted(maps, key=id):
                held.enter_context(each._changing())
            for each, _ in batches:
                each._bring_back()
            before = [each._map.cursor for each, _ in batches]
            try:
                rows, full = kernels.add_to_maps(
                    [each._map for each, _ in batches],
                    [(one.keys.numbers, one.keys.texts) for _, one in batches],
                    [one.undo for _, one in batches],
                )
                if full >= 0:
                    batches[full][0]._raise_full(batches[full][1].keys)
                for (each, one), own, cursor in zip(batches, rows, before, strict=True):
                    one.rows, one.renewed = own.view(one.keys.shape), each._renewed_since(cursor)
                    each._ahead.append(one)
            except BaseException:  # e.g. Ctrl-C, delivered as soon as the loops return
                for each, one in batches:
                    each._drop([one])
                    each._map.undo(one.undo)
                raise
        return asked

    def begin(self, asked: AskedAhead) -> Tensor:
        """Start the turn of a batch that was added ahead; return the rows to reset now, ascending.

        Raises:
            IdMapFullError: as for :meth:`add`, if keys added out of turn have taken the rows.
        """
        with self._changing():
            if self._ahead[:1] == [asked] and asked.undo.applied:
                self._drop([asked])
            elif len(asked.keys):
                with self._left_out():
                    self._drop([asked])
                    if not self._add_ahead(asked):
                        self._raise_full(asked.keys)
            return self._with_stale(asked.renewed)

    def take_back(self, batches: Collection[AskedAhead]) -> None:
        """Undo batches that were added ahead and have not had their turn."""
        if batches:
            with self._changing(), self._left_out():
                self._drop(batches)

    def renew_later(self, rows: Tensor) -> None:
        """Defer the reset of rows that could not be reset now until the next keys are added."""
        with self.lock:
            self._stale = _ascending([self._stale, rows])
            self.version += 1

    def _add(self, keys: Keys, undo: kernels.IdMapUndo | None = None) -> tuple[Tensor, Tensor] | None:
        before = self._map.cursor
        try:
            rows = self._map.add(keys.numbers, keys.texts, undo=undo)
            return None if rows is None else (rows, self._renewed_since(before))
        except BaseException:  # e.g. Ctrl-C, delivered as soon as the loops return
            if undo is not None:
                self._map.undo(undo)
            elif self._map.cursor.clock != before.clock:
                self.renew_later(self._renewed_since(before))
            raise

    def _renewed_since(self, before: kernels.Cursor) -> Tensor:
        """Return the rows assigned to the last batch that must be reset, ascending."""
        renewed = self._map.renewed
        if self._free_rows_are_stale:
            renewed = torch.cat([renewed, torch.arange(before.used + 1, self._map.cursor.used + 1)])
        return renewed.sort().values if len(renewed) > 1 else renewed

    def _add_ahead(self, asked: AskedAhead) -> bool:
        added = self._add(asked.keys, asked.undo)
        if added is not None:
            asked.rows, asked.renewed = added[0].view(asked.keys.shape), added[1]
        return added is not None

    def _drop(self, gone: Collection[AskedAhead]) -> None:
        """Wait for some batches no longer; the others stay in the map."""
        self._ahead = [each for each in self._ahead if each not in gone]

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Return the map to the current turn for the block; batches that wait are added again after it."""
        for asked in reversed(self._ahead):
            self._map.undo(asked.undo)
        try:
            yield
        finally:
            self._bring_back()

    def _bring_back(self) -> None:
        """Add the batches that are not in the map back; they get the same rows if the map has not changed.

        A batch that finds no rows stays out, and raises in its turn.
        """
        for asked in self._ahead:
            if not asked.undo.applied:
                before = asked.rows
                self._add_ahead(asked)
                if torch.equal(asked.rows, before):
                    asked.rows = before

    def _with_stale(self, renewed: Tensor) -> Tensor:
        if len(self._stale):
            renewed = _ascending([self._stale, renewed])
            self._stale = self._stale[:0]
        return renewed

    def _raise_full(self, keys: Keys) -> NoReturn:
        used = self._map.cursor.used
        if self.evict is None:
            raise IdMapFullError(
                f"keys has more new keys than the {self.capacity - used} rows left of {self.capacity}; give the map a "
                'greater capacity, or make it with evict="lru" or "lfu"; nothing was added'
            )
        raise IdMapFullError(
            f"keys has {len(keys)} keys, with more distinct ones than the {self.capacity} rows can hold at once; "
            "give the map a greater capacity, or make the batch smaller; nothing was added"
        )

    # ------------------------------------------------------------------ one caller at a time

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Hold the lock; raise if the map was being changed when this process was forked."""
        with self.lock:
            if self.successor is not None:
                raise IdMapError(
                    "the id map was given to an embedding with a process group, and its ranks own the keys; use "
                    "embedding.id_map, or collection.id_maps"
                )
            if self.part is not None:
                raise IdMapError("the id map has only one rank's keys; open or load the table of all ranks")
            if self._is_changing and os.getpid() != self._owner_pid:
                raise IdMapError(
                    f"the id map was being changed by process {self._owner_pid} when this one was forked from it; fork "
                    "at another time, or start workers with the method 'spawn'"
                )
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._unbroken():
            if self.frozen:
                whose = "is a frozen copy" if self._is_frozen else f"belongs to process {self._owner_pid}"
                raise IdMapError(
                    f"the id map {whose} and only looks up here; add keys in the process that trains, or to "
                    "copy.deepcopy(map)"
                )
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False
                self.version += 1

    @contextmanager
    def _as_of_now(self) -> Iterator[None]:
        """Leave out batches that have not had their turn, for the block."""
        if not self._ahead:
            yield
            return
        self._is_changing = True
        try:
            with self._left_out():
                yield
        finally:
            self._is_changing = False

    # ------------------------------------------------------------------ saving

    def to_bytes(self) -> Tensor:
        """Return the map as bytes, uint8, shape (n,), without batches that have not had their turn."""
        return keys_file.encode(self.changes(None)[0])

    def changes(self, before: Sweep | None) -> tuple[keys_file.SavedMap, Sweep]:
        """Return the changes since an earlier call, whose result is in a file, and the map's new state.

        Args:
            before: the state that the earlier call returned, of this map or of another; None for the first call.

        Returns:
            The whole map, or the changed cells and some unchanged ones; and the state.
        """
        if self.part is not None:
            return self.part, self.state
        with self._unbroken(), self._as_of_now():
            if before is None or not before.is_before(self._token, self._map.cursor):
                return self._saved(), self.state
            after, cells = before.step(self._map)
            return self._saved(cells), after

    @property
    def state(self) -> Sweep:
        """The state of a map that was read or saved whole and has not changed since."""
        cursor = self._map.cursor
        whole = cursor.used, cursor.probation_used
        return Sweep(self._token, cursor, whole, whole)

    def _saved(self, cells: tuple[Tensor, Tensor] | None = None) -> keys_file.SavedMap:
        """Return the map, or some of its rows and probation slots."""
        settings = {name: getattr(self, name) for name in ("capacity", "keys", "admit_after", "evict")}
        rows, probation = (self._map.save(bool(i), None if cells is None else cells[i]) for i in range(2))
        is_stale = self._free_rows_are_stale
        return keys_file.SavedMap(settings, self._map.cursor, rows, probation, self._stale, is_stale, cells=cells)

    def whole_bytes(self) -> Tensor:
        """Return the map as :meth:`to_bytes` does, with the keys of all ranks if ranks own them."""
        return self.to_bytes()

    @classmethod
    def from_bytes(cls, raw: Tensor, *, frozen: bool = False, what: str = "the id map") -> IdMap:
        """Return the map that :meth:`to_bytes` encoded.

        Args:
            raw: uint8, shape (n,).
            frozen: True for a map that only looks up.
            what: the bytes' place, for messages.

        Raises:
            TableFormatError: they are damaged.

        Example:
            >>> import torch, speedswap
            >>> users = speedswap.IdMap(10, keys="exact")
            >>> rows, _ = users.add(["ann", "bob"])
            >>> speedswap.IdMap.from_bytes(users.to_bytes()).lookup(["bob", "eve"])
            tensor([2, 0])
        """
        kernels.require_dense(raw, "raw")
        saved = keys_file.decode(raw.detach().cpu().contiguous(), what)
        return cls.of_saved(saved, frozen=frozen, what=what)

    @classmethod
    def of_saved(cls, saved: keys_file.SavedMap, *, frozen: bool = False, what: str = "the id map") -> IdMap:
        """Return a map that was read; arguments and errors are those of :meth:`from_bytes`."""
        found = cls(**saved.settings)
        if saved.own_rows is not None:
            found.part = saved
            return found
        found._adopt(saved, keys_file.restored(saved, what))
        found._is_frozen = frozen
        return found

    def restore(self, raw: Tensor | Iterable[Tensor], *, what: str = "the id map") -> None:
        """Replace the map's keys with those from :meth:`to_bytes`; arguments and errors as for `restoring`."""
        with self.restoring(raw, what=what):
            pass

    @contextmanager
    def restoring(self, raw: Tensor | Iterable[Tensor], *, what: str = "the id map") -> Iterator[None]:
        """Replace the map's keys with those from :meth:`to_bytes`, if the block ends without an error.

        Args:
            raw: uint8, shape (n,); if ranks owned the keys, one tensor per rank.
            what: the bytes' place, for messages.

        Raises:
            TableFormatError: they are damaged.
            ValueError: they are from a map with other settings. In both cases the block is not entered.
        """
        parts = []
        for each in [raw] if isinstance(raw, Tensor) else raw:
            kernels.require_dense(each, "raw")
            part = keys_file.decode(each.detach().cpu().contiguous(), what)
            self._require_settings(part.settings, what)
            parts.append(self._kept(part))
        saved, restored = self._restored(parts, what)
        yield
        with self._unbroken():
            self._adopt(saved, restored)

    def _require_settings(self, settings: Mapping[str, Any], what: str) -> None:
        for name, value in settings.items():
            if value != getattr(self, name):
                raise ValueError(
                    f"{what} was made with {name}={value!r}, but this map with {getattr(self, name)!r}; make the map "
                    "with the same settings"
                )

    def _kept(self, part: keys_file.SavedMap) -> keys_file.SavedMap:
        """Return the part of a saved map, or of a part of one, that this map keeps."""
        return part

    def _restored(self, parts: list[keys_file.SavedMap], what: str) -> tuple[keys_file.SavedMap, kernels.KeyMap]:
        """Join a map that was saved in parts; return it and its compiled map."""
        saved = parts[0] if len(parts) == 1 and parts[0].own_rows is None else joined(parts, self.capacity)
        if saved.own_rows is not None:
            with says_damaged(what, "; restore it from a copy"):
                is_whole = torch.equal(saved.own_rows.long(), torch.arange(1, len(saved.own_rows) + 1))
                require(is_whole, "the keys of some rows are missing")
        return saved, keys_file.restored(saved, what)

    def _adopt(self, saved: keys_file.SavedMap, restored: kernels.KeyMap) -> None:
        with self._left_out():
            self._map, self._token = restored, object()
            self._stale = saved.stale.clone()
            self._free_rows_are_stale = saved.free_rows_are_stale
        self.version += 1

    def become(self, found: IdMap) -> None:
        """Take over the contents of a map that another process has since saved with this map's table."""
        with self.lock:
            self._ahead, self._is_changing = [], False  # a fork may have interrupted them
            for name in _OF_FILES:
                setattr(self, name, getattr(found, name))
            self.version += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> IdMap:
        return type(self).from_bytes(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return (_frozen, (self.to_bytes().numpy().tobytes(),))


def _ascending(rows: list[Tensor]) -> Tensor:
    """Concatenate several tensors of rows and remove duplicates."""
    return kernels.unique(torch.cat(rows))[0]


def _shaped(rows: Tensor, keys: Keys) -> Tensor:
    return rows.view(keys.shape).to(keys.device)


def _frozen(raw: bytes) -> IdMap:
    """Return a frozen map, for unpickling."""
    return IdMap.from_bytes(torch.frombuffer(bytearray(raw), dtype=torch.uint8), frozen=True)


@dataclass(eq=False)
class AskedAhead:
    """A batch whose keys were added ahead of its turn; made by :meth:`IdMap.ask`.

    Attributes:
        keys: the batch's keys.
        rows: int64, of the keys' shape, in host memory; if the map changes out of turn, they become invalid and are
            replaced by a new tensor.
        renewed: rows to reset when the batch's turn begins: int64, shape (n,), in host memory.
    """

    keys: Keys
    rows: Tensor
    renewed: Tensor
    undo: IdMapUndo = field(default_factory=IdMapUndo)
