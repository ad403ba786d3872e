"""Notes shared by all tables over the same rows, including which rows have changed since a copy was made."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speedswap import kernels

if TYPE_CHECKING:
    from speedswap.tables.id_map import IdMap

PARTS = "tables"
"""The attribute of a store that names its parts; a copy of one of them is without it."""

IDLE_STEPS = "idle_steps"
"""The attribute for the steps that rows may have missed; a copy has the rows with these steps."""

IDLE_ROWS = "idle_rows"
"""The attribute that says how the optimizer that trained the rows last was attached; absent if lazily."""

AVERAGES = "averages"
"""The attribute for averages of the rows: updates and decay, by the name of their column."""


@dataclass(eq=False)
class Notes:
    """The notes kept with a store's rows. A store that wraps another shares the other's notes.

    Attributes:
        attributes: plain data kept with the rows.
        live_attributes: functions for attributes that change at every step, by name, called when attributes are saved;
            one that returns None leaves the attribute unchanged. They must not hold a reference to the table.
        id_maps: the id maps kept with the rows, by name.
        map_of: returns the map to keep for a given one: the same map, unless ranks own the rows.
        writes: the number of scatters so far, counted by the store.
        version: increases whenever rows or columns may have changed, through any table over these rows.
        adopted: increases whenever attributes are replaced with those of a commit.
        closed: True once the store is closed.
        pinned: True if CUDA kernels read and write the rows' host memory directly, or will once it is taken.
        hot: the cache of hot rows on a GPU; None if there is none.
        viewed: addresses of memory that tensors outside view; the rows there may change without a call.
        parts: the stores of parts of these rows, each the store of a table.
        listeners: called with the rows that are about to change.
        changes: the rows changed since :meth:`track_changes` was last called; None if unknown.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    live_attributes: dict[str, Callable[[], Any]] = field(default_factory=dict)
    id_maps: dict[str, IdMap] = field(default_factory=dict)
    map_of: Callable[[IdMap], IdMap] = field(default=lambda id_map: id_map)
    writes: int = 0
    version: int = 0
    adopted: int = 0
    closed: bool = False
    pinned: bool = False
    hot: kernels.HotRows | None = None
    viewed: set[int] = field(default_factory=set)
    parts: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    listeners: list[Callable[[Tensor | range | None], None]] = field(default_factory=list)
    changes: ChangedRows | None = None

    def up_to_date(self) -> dict[str, Any]:
        """Update the attributes from the live ones, and return them."""
        for name, source in self.live_attributes.items():
            value = source()
            if value is not None:
                self.attributes[name] = value
        return self.attributes

    def take_over(self, source: Notes, part: str = "", *, lacks_steps: bool = False) -> None:
        """Copy another store's current attributes, id maps and number of writes.

        Args:
            source: the other notes.
            part: the name of the part, if only a part's rows, and so only its map, were copied.
            lacks_steps: True if rows were copied without the steps that they may have missed.
        """
        live = {name: value for name, get in source.live_attributes.items() if (value := get()) is not None}
        self.attributes.update(copy.deepcopy({**source.attributes, **live}))
        if not lacks_steps:
            self.attributes.pop(IDLE_STEPS, None)
        self.writes = source.writes
        if not part:
            self.id_maps.update(source.id_maps)
            return
        self.attributes.pop(PARTS, None)
        if part in source.id_maps:
            self.id_maps[""] = source.id_maps[part]

    def note_change(self, rows: Tensor | range | None, *, as_stored: bool = True) -> None:
        """Record that rows are about to change: ids, a range of rows, or all rows and columns.

        Args:
            rows: the rows.
            as_stored: False if they only lack another step, which they take when they are read.
        """
        self.version += 1
        if as_stored and self.changes is not None:
            self.changes.add(rows)
        for listener in self.listeners:
            listener(rows)

    def track_changes(self, num_rows: int) -> ChangedRows | None:
        """Start recording which of ``num_rows`` rows change, dropping any earlier record; None if unknown."""
        self.changes = None if self.viewed else ChangedRows(num_rows)
        return self.changes


class ChangedRows:
    """A flag (byte) per row of a store, set when the row is written; one array per device that ids come from.

    Args:
        num_rows: the store's number of rows.

    Example:
        >>> changed = ChangedRows(10)
        >>> changed.add(torch.tensor([7, 2]))
        >>> changed.add(range(4, 6))
        >>> changed.rows()
        tensor([2, 4, 5, 7])
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._masks: dict[torch.device, Tensor] = {}
        self._all = False

    def add(self, rows: Tensor | range | None) -> None:
        """Record that rows change: ids, a range of rows, or all of them."""
        if rows is None or (isinstance(rows, range) and len(rows) == self._num_rows):
            self._all = True
            self._masks.clear()
        elif self._all:
            return
        elif isinstance(rows, range):
            self._mask(torch.device("cpu"))[rows.start : rows.stop] = 1
        elif rows.device.type == "cpu":
            self._mask(rows.device).numpy()[rows.numpy()] = 1  # in one thread: starting torch's threads costs more
        else:
            self._mask(rows.device)[rows.long()] = 1

    def _mask(self, device: torch.device) -> Tensor:
        if device not in self._masks:
            with torch.inference_mode(False):
                self._masks[device] = torch.zeros(self._num_rows, dtype=torch.uint8, device=device)
        return self._masks[device]

    def rows(self) -> Tensor | None:
        """Return the changed rows, ascending, int64, on the CPU; None for all rows."""
        if self._all:
            return None
        found = [mask.nonzero().squeeze(1).cpu() for mask in self._masks.values()]
        if not found:
            return torch.empty(0, dtype=torch.int64)
        return found[0] if len(found) == 1 else kernels.unique(torch.cat(found))[0]
