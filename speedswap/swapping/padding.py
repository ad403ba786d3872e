"""Rows that get no gradient and count in no bag."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedswap import kernels

__all__ = ["Padding"]


class Padding:
    """Padding rows of a table: none, one, or one for each of the tables that it consists of.

    Args:
        rows: their numbers.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = tuple(sorted(set(rows)))
        self._on: dict[torch.device, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.rows)

    def among(self, ids: Tensor) -> Tensor:
        """Return a mask of the ids, on any device and of any shape, that are padding rows."""
        if len(self.rows) == 1:
            return ids == self.rows[0]
        rows = self._rows(ids.device)
        return rows[torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)] == ids

    def zero(self, grad: Tensor, rows: Tensor) -> None:
        """Zero the gradients of padding rows, in place.

        Args:
            grad: shape (n, dim).
            rows: their rows, int64, ascending without duplicates, shape (n,), on any device.
        """
        if grad.device.type != "cpu" or rows.device.type != "cpu":
            grad.masked_fill_(self.among(rows).to(grad.device).unsqueeze(1), 0)
        elif len(rows):
            places = kernels.places_among(rows, self._rows(rows.device))
            grad.index_fill_(0, places[places >= 0], 0)

    def _rows(self, device: torch.device) -> Tensor:
        rows = self._on.get(device)
        if rows is None:
            with torch.inference_mode(False):  # used later in other modes
                rows = self._on[device] = torch.tensor(self.rows, dtype=torch.int64, device=device)
        return rows
