"""The rows that an id map gives the keys of a module's lookups, also ahead of their turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from speedswap.swapping.prefetched import Given
from speedswap.tables import AskedAhead, Commit, IdMap, Keys, Table, as_keys

if TYPE_CHECKING:
    from speedswap.swapping.row_step import RowStep

__all__ = ["AskedLookup", "Claim", "KeyedRows", "require_map"]


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
        self._given = Given(given, device) if isinstance(given, Tensor) else None

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


class Claim(NamedTuple):
    """A training lookup whose keys can have rows.

    Attributes:
        take: give the keys their rows, and return these; rows that go to another key start anew in the table.
        give_up: forget the lookup, as if it had not come.
    """

    take: Callable[[], Tensor]
    give_up: Callable[[], None]


def _nothing() -> None:
    return None


class KeyedRows:
    """The id map of a module's table.

    Args:
        id_map: keys to rows.
        table: its rows.
        step: the module's training step, which rows that start anew leave.
    """

    def __init__(self, id_map: IdMap, table: Table, step: RowStep) -> None:
        self.id_map = id_map
        self._table = table
        self._step = step
        # Lookups that have not been made, inside a lookahead: of any batch, and of the present one.
        self._asked: list[AskedAhead] = []
        self._turn: list[AskedLookup] = []

    def ask(self, given: Any, device: torch.device) -> AskedLookup:
        """Add the keys of a training lookup ahead of its turn."""
        asked = self.id_map.ask(given)
        if len(asked.keys):
            self._asked.append(asked)
        return AskedLookup(asked, given, device)

    def rows(self, given: Any, device: torch.device, *, adds: bool) -> Tensor:
        """Return the rows of a lookup's keys, on a device.

        Args:
            given: keys, as :meth:`speedswap.IdMap.lookup` takes them.
            device: where the rows are needed.
            adds: True for a training lookup. Rows that go to another key then start anew in the table.
        """
        if not adds:
            return self.id_map.lookup(given).to(device)
        return self.claim(given, device).take()

    def claim(self, given: Any, device: torch.device) -> Claim:
        """Make sure that the keys of a training lookup can have rows, without giving them any yet.

        Args:
            given, device: as for :meth:`rows`.

        Raises:
            IdMapFullError, IdMapError, TypeError, ValueError: they cannot. Nothing has changed.
        """
        for lookup in self._turn:
            if lookup.matches(given, self.id_map.keys):
                return Claim(functools.partial(self._take_turn, lookup, device), _nothing)
        keys = as_keys(given, self.id_map.keys)
        # Under a lookahead, what is looked up out of turn counts before the batches that wait: it cannot wait as well.
        if self.id_map.has_room(len(keys)) or self.id_map.waits:
            return Claim(functools.partial(self._add, keys, device), _nothing)
        asked = self.id_map.ask(keys)
        return Claim(
            functools.partial(self._take_asked, asked, device), functools.partial(self.id_map.take_back, [asked])
        )

    def _take_turn(self, lookup: AskedLookup, device: torch.device) -> Tensor:
        self._turn.remove(lookup)
        self._asked = [each for each in self._asked if each is not lookup.asked]
        self.renew(self.id_map.begin(lookup.asked), device)
        return lookup.rows.to(device)

    def _take_asked(self, asked: AskedAhead, device: torch.device) -> Tensor:
        self.renew(self.id_map.begin(asked), device)
        return asked.rows.to(device)

    def _add(self, keys: Keys, device: torch.device) -> Tensor:
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
        if not self._step.lookaheads:
            self._take_back(self._asked)

    def _take_back(self, gone: list[AskedAhead]) -> None:
        self._asked = [each for each in self._asked if each not in gone]
        self.id_map.take_back(gone)

    def renew(self, rows: Tensor, device: torch.device) -> None:
        """Let rows start anew: in the table, and without the gradient of lookups before."""
        if not len(rows):
            return
        try:
            with Commit() as commit:
                self._table.reset_rows(rows, device=device, pending=commit if self._step.lookaheads else None)
        except BaseException:
            self.id_map.renew_later(rows)
            raise
        self._step.drop_gradient(rows)


def require_map(id_map: IdMap, num_embeddings: int, padding_idx: int | None) -> None:
    """Raise ValueError unless a table of so many rows, with this padding row, can be an id map's."""
    if num_embeddings != id_map.num_rows:
        raise ValueError(
            f"num_embeddings is {num_embeddings}, but the id map has rows 0 to {id_map.capacity}; give id_map.num_rows"
        )
    if padding_idx not in (None, 0):
        raise ValueError(
            f"padding_idx is {padding_idx}, but the row of keys without a row of their own is 0; leave it out"
        )


def _equal(ours: Keys, theirs: Keys) -> bool:
    if not torch.equal(ours.numbers, theirs.numbers):
        return False
    if ours.texts is None or theirs.texts is None:
        return True
    return all(torch.equal(mine, other) for mine, other in zip(ours.texts, theirs.texts, strict=True))
