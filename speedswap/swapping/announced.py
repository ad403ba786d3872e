"""Ids that a later lookup will ask for, with their rows on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from speedswap.tables import Block, Table

__all__ = ["Announced"]


class Announced:
    """A lookup ahead of its time.

    Args:
        table: where the rows are.
        ids: int32 or int64, any shape, at least one.
        device: where the lookup will want its rows.
    """

    def __init__(self, table: Table, ids: Tensor, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._ids = ids
        self._ids_version = _version(ids)
        self._copy = ids.detach().clone()
        self._ahead = table._gather_ahead(self._copy, device)
        self._found: tuple[Block, Tensor] | None = None
        self._found_version = -1

    def matches(self, ids: Tensor) -> bool:
        """Whether these are the ids that were announced."""
        if ids.device != self._device or ids.numel() != self._copy.numel():
            return False
        if ids is self._ids and ids.device.type != "cpu" and self._ids_version == _version(ids) is not None:
            return True  # a comparison would wait for the GPU; memory of the CPU may be written past its tensors
        return torch.equal(ids.detach().reshape(-1).to(self._copy.dtype), self._copy.to(ids.device).reshape(-1))

    def take(self) -> tuple[Block, Tensor] | None:
        """The rows as the table has them now, and each id's place among them, of the announced shape.

        Returns:
            None where they are not current and have to be asked for again.
        """
        if self._found_version < 0:
            self._found = self._ahead.take(self._table.version)
            self._found_version = self._table.version
        return self._found if self._found_version == self._table.version else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
