"""Rows that an id map assigns to the keys of a module's lookups, possibly ahead of their batch's turn."""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from speedswap._words import warn_once
from speedswap.errors import IdMapError, TableBusyError
from speedswap.swapping.prefetched import GivenTensor
from speedswap.tables import AskedAhead, Commit, IdMap, Keys, Table, as_keys, select_texts

_Found = TypeVar("_Found")
_TRIES = 100


class AskedLookup:
    """A training lookup whose keys were added to the map ahead of its turn.

    Args:
        asked: the map's answer.
        lookup: the lookup.
        keys: the lookup's keys; they share the caller's memory if it has this form.

    Attributes:
        given: the caller's tensor, or the keys.
    """

    def __init__(self, asked: AskedAhead, lookup: KeyedLookup, keys: Keys) -> None:
        self.asked = asked
        self._device = lookup.device
        self._copied = asked.rows
        self._rows = asked.rows.to(lookup.device)
        self._is_tensor = isinstance(lookup.given, Tensor)
        self.given = GivenTensor(lookup.given if self._is_tensor else keys.numbers, lookup.device)

    @property
    def rows(self) -> Tensor:
        """The keys' rows; the same tensor as long as they do not change."""
        if self._copied is not self.asked.rows:
            self._copied = self.asked.rows
            self._rows = self._copied.to(self._device)
        return self._rows

    def matches(self, given: Any, kind: str) -> bool:
        """Return whether a lookup has these keys."""
        if self._is_tensor:
            return isinstance(given, Tensor) and self.given.equals(given)
        return _equal(as_keys(given, kind), self.asked.keys)


class KeyPass:
    """The keys of a training lookup, kept while it may still get a backward pass.

    The leaf of the lookup's rows holds this object, which holds those of later lookups.

    Attributes:
        asked: the keys of each id map, with their rows at the time.
        renewed: rows that were reset just before the lookup; in earlier lookups they belonged to other keys.
        following: the keys of the next lookup.
        is_made: True if the lookup was made.
        is_answered: True if its gradient has come.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[KeyedRows, Keys, Tensor]] = []
        self.renewed: list[Tensor] = []
        self.following: KeyPass | None = None
        self.is_made = self.is_answered = False

    def after(self) -> Iterator[KeyPass]:
        """Yield the passes of later lookups."""
        later = self.following
        while later is not None:
            yield later
            later = later.following

    def renewed_after(self) -> list[Tensor]:
        """Return the rows that were reset for later lookups."""
        return [rows for later in self.after() for rows in later.renewed]

    def counted_after(self) -> dict[KeyedRows, Tensor]:
        """Return the numbers of later lookups' keys, by id map."""
        asked = [each for later in self.after() for each in later.asked]
        return {
            table: torch.cat([keys.numbers for own, keys, _ in asked if own is table])
            for table in {own for own, _, _ in asked}
            if not table.is_over_ranks
        }


class KeysStep(Protocol):
    """The part of a training step (:class:`RowStep`) that its keys need."""

    lock: threading.RLock
    counted: dict[KeyedRows, Tensor]

    @property
    def key_passes(self) -> Iterable[KeyPass]: ...

    @property
    def lookaheads(self) -> int: ...

    def next_key_pass(self) -> KeyPass: ...

    def drop_gradient(self, rows: Tensor) -> None: ...


class KeyedRows:
    """The id map of a module's table.

    Args:
        id_map: keys to rows.
        table: its rows.
        step: the module's training step, which drops reset rows.
        first_row: the table's first row within the step's rows.

    Attributes:
        is_over_ranks: True if ranks own the keys; keys are then not added ahead of their batch's turn.
    """

    is_over_ranks = False

    def __init__(self, id_map: IdMap, table: Table, step: KeysStep, first_row: int = 0) -> None:
        self.id_map = id_map
        self.first_row = first_row
        self.step = step
        self._table = table
        # Lookups not made yet, inside a lookahead: of all batches, and of the current one.
        self._asked: list[AskedAhead] = []
        self._turn: list[AskedLookup] = []

    @property
    def is_followed(self) -> bool:
        """True if another process trains the table, so keys may change rows at its commits."""
        return self.id_map.evict is not None and self.id_map.frozen

    def follow(self) -> int:
        """Read the newest commit of the process that trains map and rows; return the map's version."""
        with self._table.lock:
            self._table.check_open()
            return self.id_map.version

    def ask(self, given: Any, device: torch.device) -> AskedLookup:
        """Add the keys of a training lookup ahead of its batch's turn."""
        return ask_all([KeyedLookup(self, given, device)])[0]

    def rows(self, given: Any, device: torch.device, *, adds: bool) -> Tensor:
        """Return the rows of a lookup's keys, on a device.

        Args:
            given: keys, as :meth:`speedswap.IdMap.lookup` takes them.
            device: where the rows are needed.
            adds: True for a training lookup. Rows that pass to another key are then reset in the table.
        """
        if not adds:
            return find_all([KeyedLookup(self, given, device)])[0]
        return take_all([self.lookup(given, device)])[0]

    def lookup(self, given: Any, device: torch.device) -> KeyedLookup:
        """Return a training lookup to be made now."""
        if self.id_map.waits:
            self.end()  # drops what abandoned loops have added
        in_turn = next((each for each in self._turn if each.matches(given, self.id_map.keys)), None)
        return KeyedLookup(self, given, device, in_turn)

    def _take_turn(self, lookup: AskedLookup, device: torch.device) -> Tensor:
        self._turn.remove(lookup)
        self._asked = [each for each in self._asked if each is not lookup.asked]
        self._take_asked(lookup.asked, device)
        return lookup.rows.to(device)

    def _take_asked(self, asked: AskedAhead, device: torch.device) -> Tensor:
        with self.step.lock, self._table.lock:  # no commit may contain the key without its row's new values
            self.renew(self.id_map.begin(asked), device)
        return asked.rows.to(device)

    def _add(self, keys: Keys, device: torch.device) -> Tensor:
        with self.step.lock, self._table.lock:  # in the order in which the end of a step takes them
            rows, renewed = self.id_map.add(keys)
            self.renew(renewed, device)
        return rows.to(device)

    def rows_of_pass(self, keys: Keys, device: torch.device) -> Tensor | None:
        """Return the rows that keys had in the forward pass of the current backward pass; None outside of one.

        Raises:
            IdMapError: later lookups have changed these keys' rows.
        """
        asked = [
            (each, rows)
            for each in self.step.key_passes
            for table, own, rows in each.asked
            if table is self and _equal(own, keys)
        ]
        found = [both for both in asked if not both[0].is_answered] or asked
        if not found:
            warn_once(
                "SW410",
                f"keys of table {self._table.name!r} are looked up for training only in a backward pass, as reentrant "
                "checkpointing does, and are not added; give checkpoint use_reentrant=False",
            )
            return None
        rows = found[0][1]
        renewed = [some for each, _ in found for some in each.renewed_after()]
        lost = torch.isin(torch.cat([rows.cpu().reshape(-1)[:0], *renewed]), rows.cpu() + self.first_row)
        if lost.any() or not all(torch.equal(own, rows) for _, own in found):
            raise IdMapError(
                f"a backward pass repeats a lookup of keys of table {self._table.name!r}, as a checkpoint does, but a "
                "later lookup of the same forward pass has changed their rows: leave these lookups out of the "
                "checkpoint, or look all keys up at once"
            )
        return rows.to(device)

    def uncounted(self, keys: Keys) -> Keys:
        """Return the keys that no earlier attempt at the batch has counted."""
        counted = self.step.counted.get(self, keys.numbers[:0])
        places = (~torch.isin(keys.numbers, counted)).nonzero()[:, 0]
        texts = None if keys.texts is None else select_texts(keys.texts, places)
        return Keys(keys.numbers[places], (len(places),), keys.device, texts)

    def begin(self, lookups: Sequence[AskedLookup]) -> None:
        """Begin a batch's turn, and undo lookups that the previous batch did not make."""
        self._take_back([lookup.asked for lookup in self._turn])
        self._turn = [*lookups]

    def end(self) -> None:
        """Undo batches that did not get their turn, unless a lookahead is under way."""
        if not self.step.lookaheads:
            self.begin([])
            self._take_back(self._asked)

    def _take_back(self, gone: list[AskedAhead]) -> None:
        self._asked = [each for each in self._asked if each not in gone]
        self.id_map.take_back(gone)

    @staticmethod
    def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        """Look up rows in tables of this kind; see :func:`find_all`."""
        for each in lookups:
            if each.table.id_map.frozen:
                each.table.follow()
        return [each.table.id_map.lookup(each.given).to(each.device) for each in lookups]

    @staticmethod
    def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        """Look up rows for training in tables of this kind; see :func:`take_all`."""
        takes: dict[int, Callable[[], Tensor]] = {}
        is_alone = len(lookups) == 1
        for place, (table, given, device, in_turn, _) in enumerate(lookups):
            if in_turn is not None:
                takes[place] = functools.partial(table._take_turn, in_turn, device)
            elif is_alone or table.id_map.waits:
                # Lookups out of turn precede waiting batches, so they cannot wait themselves.
                takes[place] = functools.partial(table._add, as_keys(given, table.id_map.keys), device)
        others = [place for place in range(len(lookups)) if place not in takes]
        maps = [lookups[n].table.id_map for n in others]
        asked = IdMap.ask_all(maps, [lookups[n].given for n in others]) if others else []
        for place, own in zip(others, asked, strict=True):
            takes[place] = functools.partial(lookups[place].table._take_asked, own, lookups[place].device)
        try:
            return [takes[place]() for place in range(len(lookups))]
        except BaseException:
            for place, own in zip(others, asked, strict=True):
                lookups[place].table.id_map.take_back([own])
            raise

    def renew(self, rows: Tensor, device: torch.device) -> None:
        """Reset rows in the table, and drop their gradient from earlier lookups."""
        if not len(rows):
            return
        try:
            with Commit() as commit:
                self._table.reset_rows(rows, device=device, commit=commit if self.step.lookaheads else None)
        except BaseException:
            self.id_map.renew_later(rows)
            raise
        self.step.drop_gradient(rows + self.first_row)


class KeyedLookup(NamedTuple):
    """A training lookup of one table.

    Attributes:
        table: the table's map.
        given: keys, as :meth:`speedswap.IdMap.lookup` takes them.
        device: where the rows are needed.
        in_turn: the current batch's lookup with these keys that was added ahead.
        parts: the number of keys per feature, if there are several features.
    """

    table: KeyedRows
    given: Any
    device: torch.device
    in_turn: AskedLookup | None = None
    parts: Sequence[int] | None = None

    def with_keys(self) -> KeyedLookup:
        """Return the lookup of the same keys as :class:`Keys`."""
        keys = as_keys(self.given, self.table.id_map.keys) if self.in_turn is None else self.in_turn.asked.keys
        return self._replace(given=keys)

    @property
    def rows(self) -> Tensor | None:
        """The rows, if they are known before the lookup is made."""
        return None if self.in_turn is None else self.in_turn.rows.to(self.device)


def ask_all(lookups: Sequence[KeyedLookup]) -> list[AskedLookup]:
    """Add the keys of training lookups ahead of their batch's turn: of all lookups or of none.

    Raises:
        IdMapFullError, IdMapError, TypeError, ValueError: as :meth:`speedswap.IdMap.ask` does.
    """
    keys = [as_keys(each.given, each.table.id_map.keys) for each in lookups]
    found = IdMap.ask_all([each.table.id_map for each in lookups], [own.copied() for own in keys])
    for each, asked in zip(lookups, found, strict=True):
        if len(asked.keys):
            each.table._asked.append(asked)
    return [*map(AskedLookup, found, lookups, keys)]


def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
    """Return the rows of lookups in several tables, without adding keys."""
    return lookups[0].table.find_all(lookups) if lookups else []


def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
    """Return the rows of training lookups in several tables, and reset rows that pass to another key.

    A backward pass that repeats a lookup, as activation checkpointing does, gets the same rows, and nothing is added or
    counted. When a batch is tried again, keys that it has already counted are only looked up.

    Raises:
        IdMapFullError, IdMapError, TypeError, ValueError: as :meth:`speedswap.IdMap.add` does; then no map has changed,
            except that a map with waiting batches may have gained keys that were looked up out of turn.
    """
    if not lookups:
        return []
    lookups = [each.with_keys() for each in lookups]
    if torch._C._current_graph_task_id() != -1:  # in a backward pass
        made = [each.table.rows_of_pass(each.given, each.device) for each in lookups]
        others = iter(find_all([each for each, rows in zip(lookups, made, strict=True) if rows is None]))
        return [next(others) if rows is None else rows for rows in made]
    take = lookups[0].table.take_all
    if any(each.table in each.table.step.counted for each in lookups):
        take([each._replace(given=each.table.uncounted(each.given), in_turn=None) for each in lookups])
        take = find_all
    rows = take(lookups)
    for each, some in zip(lookups, rows, strict=True):
        each.table.step.next_key_pass().asked.append((each.table, each.given, some))
    return rows


def of_one_commit(tables: Iterable[KeyedRows], look_up: Callable[[], _Found]) -> _Found:
    """Look up keys and then their rows, both from the same commit of the tables.

    Another process may assign a key's row to another key in between; then the lookup is repeated.

    Raises:
        TableBusyError: this happened on each of many attempts.
    """
    followed = [each for each in tables if each.is_followed]
    if not followed:
        return look_up()
    for _ in range(_TRIES):
        before = [each.follow() for each in followed]
        found = look_up()
        if [each.follow() for each in followed] == before:
            return found
    raise TableBusyError(
        errno.EBUSY,
        f"another process changed the rows of a lookup's keys during each of {_TRIES} attempts; "
        "look up fewer keys at once, or let the training commit less often (commit_seconds)",
    )


def rows_for(id_map: IdMap, num_embeddings: int, padding_idx: int | None) -> int:
    """Return the number of rows of an id map's table.

    Args:
        id_map: the table's id map.
        num_embeddings: the map's capacity, or its number of rows, which is one more.
        padding_idx: None, or row 0, which stands for keys without a row.

    Raises:
        ValueError: the table's other arguments do not fit the map.
    """
    if num_embeddings not in (id_map.capacity, id_map.num_rows):
        raise ValueError(
            f"num_embeddings is {num_embeddings}, but the id map has rows for {id_map.capacity} keys; give "
            f"{id_map.capacity}, its capacity"
        )
    if padding_idx not in (None, 0):
        raise ValueError(f"padding_idx is {padding_idx}, but row 0 is for keys without a row; leave it out")
    return id_map.num_rows


def _equal(ours: Keys, theirs: Keys) -> bool:
    if not torch.equal(ours.numbers, theirs.numbers):
        return False
    if ours.texts is None or theirs.texts is None:
        return True
    return all(torch.equal(mine, other) for mine, other in zip(ours.texts, theirs.texts, strict=True))
