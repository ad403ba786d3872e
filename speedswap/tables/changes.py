"""The rows of a store that have changed since a copy of it was made."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap import kernels

__all__ = ["ChangedRows"]


class ChangedRows:
    """A byte for each row of a store, set when the row is written; on each device that ids come from.

    Args:
        num_rows: of the store.

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
        """Note that rows change: ids, a range of rows, or all of them."""
        if rows is None or (isinstance(rows, range) and len(rows) == self._num_rows):
            self._all = True
            self._masks.clear()
        elif self._all:
            return
        elif isinstance(rows, range):
            self._mask(torch.device("cpu"))[rows.start : rows.stop] = 1
        elif rows.device.type == "cpu":
            self._mask(rows.device).numpy()[rows.numpy()] = 1  # in one thread: torch's several cost more than this
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
