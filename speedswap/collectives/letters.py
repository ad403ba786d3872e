"""Letters: rows that ranks send each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Letter", "Parcel", "as_bytes", "packed", "unpacked"]


class Letter(NamedTuple):
    """Rows to be sent, with the memory for those that come.

    Attributes:
        into: the rows that come.
        source, staged, target: the bytes that are sent, those that come, and those of ``into``.
        sent: how many go to each rank.
        received: how many come from each rank.
    """

    into: Tensor
    source: Tensor
    staged: Tensor
    target: Tensor
    sent: Sequence[int]
    received: Sequence[int]


def as_bytes(rows: Tensor) -> Tensor:
    """Return contiguous rows as bytes, shape (n, bytes of a row); gloo knows few dtypes."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


class Parcel(NamedTuple):
    """Rows that may travel beside others in one letter.

    Attributes:
        rows: shape (n, dim), those for the first rank first.
        sent: how many go to each rank.
        received: how many come from each rank.
    """

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()


def packed(parcels: Sequence[Parcel]) -> Parcel:
    """Return parcels as one: of bytes, shape (n, 1), those for a rank side by side, in the order of the parcels."""
    if len(parcels) == 1:
        return parcels[0]
    sent = [[count * each.row_bytes for count in each.sent] for each in parcels]
    received = [[count * each.row_bytes for count in each.received] for each in parcels]
    flat = [as_bytes(each.rows.detach().contiguous()).reshape(-1) for each in parcels]
    pieces = [torch.split(rows, sizes) for rows, sizes in zip(flat, sent, strict=True)]
    rows = torch.cat(list(chain.from_iterable(zip(*pieces, strict=True)))).unsqueeze(1)
    return Parcel(rows, *([sum(sizes) for sizes in zip(*each, strict=True)] for each in (sent, received)))


def unpacked(came: Tensor, parcels: Sequence[Parcel]) -> list[Tensor]:
    """Return the rows that have come for each of the parcels that were sent as one, those of the first rank first."""
    if len(parcels) == 1:
        return [came]
    ranks = range(len(parcels[0].received))
    pieces = torch.split(came.reshape(-1), [each.received[rank] * each.row_bytes for rank in ranks for each in parcels])
    return [
        torch.cat(pieces[place :: len(parcels)]).view(each.rows.dtype).view(-1, each.rows.shape[1])
        for place, each in enumerate(parcels)
    ]
