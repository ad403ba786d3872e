"""The way of a batch's rows between the rank that asked for them and their owners."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives import SPARE_IDS, Agreed, Parcel, Task, as_bytes
from speedswap.tables.ranks.owners import Owners

__all__ = ["Route", "Wanted", "starts_of"]

# A note of a lookup: the number of rows; a digest of their columns, 0 for the weight alone; their bytes; and whether
# some line has no room for the ids.
_BITS = 32
_FEW = (1 << _BITS) - 1
_DIGEST_AT = 14
_DIGESTS = 1 << (_BITS - _DIGEST_AT)
_MOST_BYTES = 4096  # of a row beside a line


@dataclass(frozen=True)
class Wanted:
    """Rows that this rank asks for, owner after owner: in this order they travel, and lie here.

    Attributes:
        rows: ids, int64, shape (n,), on the CPU.
        sent: how many go to each rank.
    """

    rows: Tensor
    sent: list[int]

    @classmethod
    def of(cls, owners: Owners, rows: Tensor) -> tuple[Wanted, Tensor]:
        """Order rows by their owners.

        Args:
            owners: of the table's rows.
            rows: ids, shape (n,), on any device.

        Returns:
            The rows, and each given one's place among them, int64, shape (n,), on the CPU.
        """
        ordered, places, sent = owners.ordered(rows.detach().cpu().long())
        return cls(ordered, sent), places

    @classmethod
    def found(cls, owners: Owners, ids: Tensor, what: str) -> tuple[Wanted, Tensor]:
        """Check a batch's ids, and order their rows by owner.

        Args:
            owners: of the table's rows.
            ids: int32 or int64, any shape, on any device.
            what: the table, for messages.

        Returns:
            The rows, each once, and each id's place among them, of the ids' shape, on their device.

        Raises:
            IdError, TypeError: as :func:`speedswap.kernels.find_rows` does.
        """
        rows, local = kernels.find_rows(kernels.Asked(ids, owners.num_embeddings, what))
        wanted, places = cls.of(owners, rows)
        return wanted, places.to(local.device)[local]


@dataclass(frozen=True)
class Route:
    """The rows that this rank has asked for, and those that are asked for here.

    Attributes:
        wanted: by this rank.
        received: how many rows each rank asks for here.
        union: the places of these rows here, each once, ascending, int64, shape (m,).
        positions: of each row received among them, int64, shape (sum(received),).
        agreed: rows that go along with the next round; None if they take one of their own.
    """

    wanted: Wanted
    received: list[int]
    union: Tensor
    positions: Tensor
    agreed: Agreed | None = None

    @classmethod
    def of(
        cls,
        task: Task,
        owners: Owners,
        rank: int,
        wanted: Wanted,
        row_bytes: int = 0,
        columns: Sequence[str] = ("weight",),
    ) -> Route:
        """Ask the owners of rows for them, which every rank does at once.

        Args:
            task: the ranks' common one.
            owners: of the table's rows.
            rank: this one.
            wanted: by this rank.
            row_bytes: of the rows that :meth:`bring` is called for next, once, in host memory; 0 otherwise.
            columns: that are to travel, one after the other.

        Raises:
            ValueError: another rank has other columns.
        """
        lane, ids, agreed = task.lane, None, None
        sheet = lane.sheet
        row_bytes = row_bytes if row_bytes <= _MOST_BYTES else 0
        sheet.reserve(row_bytes)
        spills = max(wanted.sent) > sheet.room
        note = -(len(wanted.rows) << _BITS | _digest(columns) << _DIGEST_AT | row_bytes << 1 | spills)
        with task.promised():
            lines = task.round(wanted.sent, note=note, ids=wanted.rows)
            if any(note > 0 for note in lines.notes):  # others had rows that came ahead of their step
                lines = task.round(wanted.sent, note=note, ids=wanted.rows)
            has_come = not any(-note & 1 for note in lines.notes)
            if has_come and row_bytes and len(lane.ranks) > 1 and len({-note & _FEW for note in lines.notes}) == 1:
                agreed = sheet.agreed = Agreed(row_bytes, lines.counts, wanted.sent)
            if not has_come and sum(-note >> _BITS for note in lines.notes) <= SPARE_IDS:  # for which all have memory
                ids = task.post(task.letter(wanted.rows, wanted.sent, lines.counts, lane.spare(sum(lines.counts))))
        if len({(-note & _FEW) >> _DIGEST_AT for note in lines.notes}) > 1:
            task.finish()  # the others know
            raise ValueError(
                f"columns is {', '.join(columns)} here, and another rank has others; every rank of the group has to "
                "give the same ones"
            )
        if ids is None and has_come:
            ids = wanted.rows if len(lane.ranks) == 1 else sheet.ids_that_came(lines.counts)
        elif ids is None:
            ids = task.send(wanted.rows, wanted.sent, lines.counts)
        return replace(cls.asked(owners, rank, wanted, lines.counts, ids), agreed=agreed)

    @classmethod
    def asked(cls, owners: Owners, rank: int, wanted: Wanted, received: list[int], ids: Tensor) -> Route:
        """Return the way of rows that have been asked for.

        Args:
            owners, rank, wanted: as for :meth:`of`.
            received: how many rows each rank asks for here.
            ids: the rows asked for here, those of the first rank first.
        """
        union, positions = kernels.unique(owners.places(ids, rank))
        return cls(wanted, received, union, positions)

    def bring(self, task: Task, values: Tensor) -> Tensor:
        """Send the rows that are asked for here, and return those that were asked for from here.

        Args:
            task: the ranks' common one.
            values: of the union, shape (m, …), on any device.

        Returns:
            Shape (n, …), in the order of the rows wanted.
        """
        if self.agreed is not None:
            sheet, rows = task.lane.sheet, as_bytes(values.detach().contiguous())
            places = torch.split(self.positions, self.received)
            for into, some in zip(sheet.rows_out(self.agreed), places, strict=True):
                torch.index_select(rows, 0, some, out=into)
            task.round()
            came = sheet.rows_that_came(self.agreed).view(values.dtype)
            return came.view(len(self.wanted.rows), *values.shape[1:])
        return task.send(*self.parcel(values))

    def parcel(self, values: Tensor) -> Parcel:
        """Return the rows that are asked for here as those who ask get them; ``values`` as for :meth:`bring`."""
        asked = values.detach().index_select(0, self.positions.to(values.device))
        return Parcel(asked, self.received, self.wanted.sent)

    def add_up(self, came: Tensor) -> Tensor:
        """Return the sums over the ranks, in their order, of what has come for the rows that were asked for here.

        Args:
            came: shape (sum(received), dim), on any device.

        Returns:
            Shape (m, dim).
        """
        return kernels.sum_rows(came, self.positions.to(came.device), len(self.union))


def _digest(columns: Sequence[str]) -> int:
    """Return a number for some columns, which is 0 for the weight alone."""
    if list(columns) == ["weight"]:
        return 0
    digest = hashlib.blake2b(repr(list(columns)).encode(), digest_size=7).digest()
    return 1 + int.from_bytes(digest, "little") % (_DIGESTS - 1)


def starts_of(counts: Sequence[int]) -> Tensor:
    """Return where the rows of each rank begin, if those of the first come first."""
    ends = torch.tensor(counts).cumsum(0)
    return ends - torch.tensor(counts)
