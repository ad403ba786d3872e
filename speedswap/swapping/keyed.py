"""The rows that an id map gives the keys of a module's lookups, also ahead of their turn."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedswap.errors import TableBusyError
from speedswap.swapping.prefetched import GivenTensor
from speedswap.tables import AskedAhead, Commit, IdMap, Keys, Table, as_keys

if TYPE_CHECKING:
    from speedswap.swapping.row_step import RowStep

_Found = TypeVar("_Found")
_TRIES = 100


class AskedLookup:
    """A training lookup whose keys were given to the map ahead of its turn.

    Args:
        asked: the map's answer.
        given: the keys as they were given.
        device: where the rows are needed.
    """

    def __init__(self, asked: AskedAhead, given: Any, device: torch.device) -> None:
        self.asked = asked
        self._device = device
        self._copied = asked.rows
        self._rows = asked.rows.to(device)
        self._given = GivenTensor(given, device) if isinstance(given, Tensor) else None

    @property
    def rows(self) -> Tensor:
        """The keys' rows: the same tensor as long as they are the same."""
        if self._copied is not self.asked.rows:
            self._copied = self.asked.rows
            self._rows = self._copied.to(self._device)
        return self._rows

    def matches(self, given: Any, kind: str) -> bool:
        """Return whether a lookup is of these keys."""
        if self._given is not None:
            return isinstance(given, Tensor) and self._given.equals(given)
        return _equal(as_keys(given, kind), self.asked.keys)


class KeyedRows:
    """The id map of a module's table.

    Args:
        id_map: keys to rows.
        table: its rows.
        step: the module's training step, which rows that start anew leave.
        first_row: of the table, among those of the step.

    Attributes:
        is_over_ranks: whether ranks own the keys; these are not asked for ahead of their turn.
    """

    is_over_ranks = False

    def __init__(self, id_map: IdMap, table: Table, step: RowStep, first_row: int = 0) -> None:
        self.id_map = id_map
        self.first_row = first_row
        self.step = step
        self._table = table
        # Lookups that have not been made, inside a lookahead: of any batch, and of the present one.
        self._asked: list[AskedAhead] = []
        self._turn: list[AskedLookup] = []

    @property
    def is_followed(self) -> bool:
        """True if keys get other rows as another process trains, whose commits are read here."""
        return self.id_map.evict is not None and self.id_map.frozen

    def follow(self) -> int:
        """Bring map and rows up to date with another process that trains them; return the map's version."""
        with self._table.lock:
            self._table.check_open()
            return self.id_map.version

    def ask(self, given: Any, device: torch.device) -> AskedLookup:
        """Add the keys of a training lookup ahead of its turn."""
        return ask_all([KeyedLookup(self, given, device)])[0]

    def rows(self, given: Any, device: torch.device, *, adds: bool) -> Tensor:
        """Return the rows of a lookup's keys, on a device.

        Args:
            given: keys, as :meth:`speedswap.IdMap.lookup` takes them.
            device: where the rows are needed.
            adds: True for a training lookup. Rows that go to another key then start anew in the table.
        """
        if not adds:
            return find_all([KeyedLookup(self, given, device)])[0]
        if self.is_over_ranks:
            return take_all([KeyedLookup(self, given, device)])[0]
        in_turn = self.lookup(given, device).in_turn
        if in_turn is not None:
            return self._take_turn(in_turn, device)
        return self._add(as_keys(given, self.id_map.keys), device)

    def lookup(self, given: Any, device: torch.device) -> KeyedLookup:
        """Return a training lookup that is to be made now."""
        in_turn = next((each for each in self._turn if each.matches(given, self.id_map.keys)), None)
        return KeyedLookup(self, given, device, in_turn)

    def _take_turn(self, lookup: AskedLookup, device: torch.device) -> Tensor:
        self._turn.remove(lookup)
        self._asked = [each for each in self._asked if each is not lookup.asked]
        with self._table.lock:  # no commit has the key without its row's new values
            self.renew(self.id_map.begin(lookup.asked), device)
        return lookup.rows.to(device)

    def _take_asked(self, asked: AskedAhead, device: torch.device) -> Tensor:
        with self._table.lock:
            self.renew(self.id_map.begin(asked), device)
        return asked.rows.to(device)

    def _add(self, keys: Keys, device: torch.device) -> Tensor:
        with self._table.lock:
            rows, renewed = self.id_map.add(keys)
            self.renew(renewed, device)
        return rows.to(device)

    def begin(self, lookups: Sequence[AskedLookup]) -> None:
        """Let a batch have its turn; what the batch before did not look up never came."""
        self._take_back([lookup.asked for lookup in self._turn])
        self._turn = [*lookups]

    def end(self) -> None:
        """Leave a lookahead: batches that did not have their turn never came."""
        self.begin([])
        if not self.step.lookaheads:
            self._take_back(self._asked)

    def _take_back(self, gone: list[AskedAhead]) -> None:
        self._asked = [each for each in self._asked if each not in gone]
        self.id_map.take_back(gone)

    @staticmethod
    def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        """Return the rows of lookups in tables of this kind; see :func:`find_all`."""
        for each in lookups:
            if each.table.id_map.frozen:
                each.table.follow()
        return [each.table.id_map.lookup(each.given).to(each.device) for each in lookups]

    @staticmethod
    def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
        """Return the rows of training lookups in tables of this kind; see :func:`take_all`."""
        takes: dict[int, Callable[[], Tensor]] = {}
        for place, (table, given, device, in_turn, _) in enumerate(lookups):
            if in_turn is not None:
                takes[place] = functools.partial(table._take_turn, in_turn, device)
            elif table.id_map.waits:
                # What is looked up out of turn counts before the batches that wait: it cannot wait as well.
                takes[place] = functools.partial(table._add, as_keys(given, table.id_map.keys), device)
        others = [place for place in range(len(lookups)) if place not in takes]
        asked = IdMap.ask_all([lookups[n].table.id_map for n in others], [lookups[n].given for n in others])
        for place, own in zip(others, asked, strict=True):
            takes[place] = functools.partial(lookups[place].table._take_asked, own, lookups[place].device)
        try:
            return [takes[place]() for place in range(len(lookups))]
        except BaseException:
            for place, own in zip(others, asked, strict=True):
                lookups[place].table.id_map.take_back([own])
            raise

    def renew(self, rows: Tensor, device: torch.device) -> None:
        """Let rows start anew: in the table, and without the gradient of lookups before."""
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
        table: its map.
        given: keys, as :meth:`speedswap.IdMap.lookup` takes them.
        device: where the rows are needed.
        in_turn: the lookup of the present batch that was asked for ahead with these keys.
        parts: the number of keys of each feature, where there are several.
    """

    table: KeyedRows
    given: Any
    device: torch.device
    in_turn: AskedLookup | None = None
    parts: Sequence[int] | None = None

    @property
    def rows(self) -> Tensor | None:
        """The rows, where they are known before it is made."""
        return None if self.in_turn is None else self.in_turn.rows.to(self.device)


def ask_all(lookups: Sequence[KeyedLookup]) -> list[AskedLookup]:
    """Add the keys of training lookups ahead of their turn: of all, or of none.

    Raises:
        IdMapFullError, IdMapError, TypeError, ValueError: as :meth:`speedswap.IdMap.ask` does.
    """
    found = IdMap.ask_all([each.table.id_map for each in lookups], [each.given for each in lookups])
    for each, asked in zip(lookups, found, strict=True):
        if len(asked.keys):
            each.table._asked.append(asked)
    return [AskedLookup(asked, each.given, each.device) for each, asked in zip(lookups, found, strict=True)]


def find_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
    """Return the rows of lookups in several tables that give no key a row."""
    return lookups[0].table.find_all(lookups) if lookups else []


def take_all(lookups: Sequence[KeyedLookup]) -> list[Tensor]:
    """Return the rows of training lookups in several tables; those that go to another key start anew in their table.

    Raises:
        IdMapFullError, IdMapError, TypeError, ValueError: as :meth:`speedswap.IdMap.add` does; then no map has changed,
            but one in which batches wait for their turn may have keys that were looked up out of turn.
    """
    return lookups[0].table.take_all(lookups) if lookups else []


def of_one_commit(tables: Iterable[KeyedRows], look_up: Callable[[], _Found]) -> _Found:
    """Return what a lookup of keys, and then of their rows, finds in tables of which both are of one moment.

    Another process may give a key's row to another key between the two; then the lookup is repeated.

    Raises:
        TableBusyError: it happened each of many times.
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
        f"the keys of a lookup got other rows by another process each of {_TRIES} times that they were looked up; "
        "look up fewer at once, or let the training commit less often (commit_seconds)",
    )


def rows_for(id_map: IdMap, num_embeddings: int, padding_idx: int | None) -> int:
    """Return the number of rows of an id map's table.

    Args:
        id_map: of the table.
        num_embeddings: the map's capacity, or its number of rows, which is one more.
        padding_idx: None, or the row of keys without a row.

    Raises:
        ValueError: the table's other arguments do not fit the map.
    """
    if num_embeddings not in (id_map.capacity, id_map.num_rows):
        raise ValueError(
            f"num_embeddings is {num_embeddings}, but the id map has rows for {id_map.capacity} keys; give "
            f"{id_map.capacity}, its capacity"
        )
    if padding_idx not in (None, 0):
        raise ValueError(
            f"padding_idx is {padding_idx}, but the row of keys without a row of their own is 0; leave it out"
        )
    return id_map.num_rows


def _equal(ours: Keys, theirs: Keys) -> bool:
    if not torch.equal(ours.numbers, theirs.numbers):
        return False
    if ours.texts is None or theirs.texts is None:
        return True
    return all(torch.equal(mine, other) for mine, other in zip(ours.texts, theirs.texts, strict=True))
