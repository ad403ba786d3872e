"""Sheets: the memory of a lane's rounds, a line for each rank with room beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap.collectives.lines import Line

__all__ = ["ROOM", "Agreed", "Sheet"]

ROOM = 2048  # ids of a round, over all ranks
_NUMBERS = len(Line._fields)
_LINE_BYTES = 8 * _NUMBERS


class Agreed(NamedTuple):
    """Rows that go along with the lines of the next round.

    Attributes:
        row_bytes: of a row.
        sent: how many go to each rank.
        received: how many come from each rank.
    """

    row_bytes: int
    sent: Sequence[int]
    received: Sequence[int]


class Sheet:
    """Lines to and from every rank, with room for a few ids beside each, or for rows that the ranks have agreed on.

    All ranks know the size of each message beforehand, whatever they send: a rank that fails sends its line, and
    meaningless bytes in the room.

    Args:
        size: the number of ranks.

    Attributes:
        room: ids that fit beside a line.
        agreed: rows of the next round, in place of ids; None for the usual room.
    """

    def __init__(self, size: int) -> None:
        self.room = ROOM // size
        self.agreed: Agreed | None = None
        with torch.inference_mode(False):  # which would make tensors that nothing outside of it may change
            self._mine, self._theirs = torch.zeros(2, size, _NUMBERS + self.room, dtype=torch.int64, device="cpu")
            self._rows_out, self._rows_in = torch.empty(2, 0, dtype=torch.uint8, device="cpu")

    @property
    def line_bytes(self) -> int:
        """The bytes of a usual line with its room."""
        return _LINE_BYTES + 8 * self.room

    def reserve(self, row_bytes: int) -> None:
        """Make room for as many rows as ids."""
        size = len(self._mine)
        wanted = size * (_LINE_BYTES + self.room * row_bytes)
        if wanted > len(self._rows_out):
            with torch.inference_mode(False):
                self._rows_out, self._rows_in = torch.empty(2, wanted, dtype=torch.uint8, device="cpu")

    def fill(self, lines: Sequence[Line], ids: Tensor | None = None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Write each rank's line.

        Args:
            lines: in the order of the ranks.
            ids: as many for each rank as its line's amount, those of the first one first; what is more than the room
                is lost.

        Returns:
            The memory for what comes, what is sent, and the sizes of the parts of both, none where all are equal.
        """
        given = torch.tensor(lines, device="cpu")
        if self.agreed is not None:
            sent, received = (_sizes(self.agreed.row_bytes, each) for each in (self.agreed.sent, self.agreed.received))
            out, into = self._rows_out[: sum(sent)], self._rows_in[: sum(received)]
            for part, line in zip(torch.split(out, sent), given.view(torch.uint8), strict=True):
                part[:_LINE_BYTES] = line
            return into, out, received, sent
        self._mine[:, :_NUMBERS] = given
        if ids is not None:
            parts = torch.split(ids, [line.amount for line in lines])
            for own, some in zip(self._mine[:, _NUMBERS:], parts, strict=True):
                own[: len(some)] = some[: self.room]
        return self._theirs, self._mine, [], []

    def lines(self, agreed: Agreed | None) -> list[Line]:
        """Return the lines of a round that was run with or without agreed rows."""
        if agreed is None:
            came = self._theirs[:, :_NUMBERS]
        else:
            received = _sizes(agreed.row_bytes, agreed.received)
            parts = torch.split(self._rows_in[: sum(received)], received)
            came = torch.stack([part[:_LINE_BYTES] for part in parts]).view(torch.int64)
        return [Line(*each) for each in came.tolist()]

    def ids_that_came(self, counts: Sequence[int]) -> Tensor:
        """Return the ids of the last round, so many of each rank, those of the first one first."""
        return torch.cat([line[_NUMBERS:][:count] for line, count in zip(self._theirs, counts, strict=True)])

    def rows_out(self, agreed: Agreed) -> list[Tensor]:
        """Return the room of each rank in the next round, for rows as bytes, shape (n, bytes of a row)."""
        return _rooms(self._rows_out, agreed.row_bytes, agreed.sent)

    def rows_that_came(self, agreed: Agreed) -> Tensor:
        """Return the rows of the last round as bytes, shape (n, bytes of a row), those of the first rank first."""
        return torch.cat(_rooms(self._rows_in, agreed.row_bytes, agreed.received))


def _sizes(row_bytes: int, counts: Sequence[int]) -> list[int]:
    return [_LINE_BYTES + count * row_bytes for count in counts]


def _rooms(memory: Tensor, row_bytes: int, counts: Sequence[int]) -> list[Tensor]:
    sizes = _sizes(row_bytes, counts)
    parts = torch.split(memory[: sum(sizes)], sizes)
    return [part[_LINE_BYTES:].view(-1, row_bytes) for part in parts]
