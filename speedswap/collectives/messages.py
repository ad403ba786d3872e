"""The messages between ranks: fixed-size lines of numbers that describe each rank's work, and rows."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from speedswap import kernels

_PIECE_BYTES = 8 << 20
_HASHED_BYTES = 1 << 10  # hashed together; the CPU loops' threads share the parts of a piece

ROOM = 2048  # ids per round, over all ranks
ANYTHING = -1  # the number of the object of a task without a table or map
OK, FAILED, TORN, CALLS = range(4)  # statuses
NO_COUNT = -1  # the amount of a line without one
ANYWHERE = -1  # the stage of a failed rank
NUMBERED = 1 << 40  # and the number of a batch

_EVALUATION = (
    "Ranks evaluate together: let the others make the call too, each with its own ids or none, e.g. "
    "items.read(torch.empty(0, dtype=torch.int64)). "
)
_SAVING = (
    "state_dict() and calls that save are calls of all ranks: make them on every rank, and write other files on one "
    "of them. "
)
_GRADIENT = "A norm or sum of a gradient covers all ranks' rows: compute it on every rank, and log it on one. "
_SPLITTING = "Every rank must call the splitter the same number of times, in the same order and with the same options. "


class Kind(enum.IntEnum):
    """The kind of a task, the same on all ranks.

    Attributes:
        text: its description, for messages.
        remedy: the remedy if only one rank is there.
    """

    text: str
    remedy: str

    def __new__(cls, text: str, remedy: str = "") -> Kind:
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_, kind.text, kind.remedy = len(cls.__members__), text, remedy
        return kind

    CALL = "a call"  # failed before it began a task
    # A table's rows
    LOOK_UP = "a training lookup"
    GATHER = "a lookup without a gradient", _EVALUATION
    SCATTER = "a write"
    RESET = "a reset of rows"
    READ = "read()", _EVALUATION
    SCORE = "score()", _EVALUATION
    MAKE = "the creation of a table"
    COMPARE = "the comparison of given rows"
    STATE = "state_dict() or load_state_dict()", _SAVING
    SAVE = "save()", _SAVING
    ALONE = "the writing of a file by one rank", _SAVING
    # A training step
    GRADIENTS = "the exchange of gradients"
    SHARES = "the exchange of a split batch's gradients"
    NORM = "a norm or sum of a gradient", _GRADIENT
    FINITE = "the check for infinite gradients"
    STEP = "the optimizer's step"
    # A batch that is split
    AT_OWN_PACE = "passes at each rank's own pace"
    BACKWARD = "BatchSplitter.backward()", _SPLITTING
    BACKWARD_COUPLED = "BatchSplitter.backward_coupled()", _SPLITTING
    FORWARD = "BatchSplitter.forward()", _SPLITTING
    BACKWARD_OF_SHARDS = "BatchSplitter.backward() of sharded modules"
    PASSES = "passes without a gradient", _EVALUATION
    # A lookahead
    BEGIN = "the beginning of a lookahead"
    MEET = "the beginning of a batch"
    ERRAND = "a lookup ahead of its step"
    END = "the end of a lookahead"
    # Keys
    KEYS = "a training lookup of keys"
    KNOWN_KEYS = "a lookup of keys without a gradient", _EVALUATION
    REOPENED = "the opening of an id map"
    PARTS = "the saving of an id map", _SAVING
    # The whole job
    CHECKPOINT = "save_checkpoint() or load_checkpoint()", _SAVING
    AGREE = "the agreement on a number"


IN_A_STEP = {Kind.GRADIENTS, Kind.SHARES, Kind.NORM, Kind.FINITE, Kind.STEP}
IN_ANY_BATCH = {
    Kind.GATHER, Kind.READ, Kind.SCORE, Kind.KNOWN_KEYS, Kind.PASSES, Kind.MAKE, Kind.COMPARE, Kind.STATE, Kind.SAVE,
    Kind.ALONE, Kind.REOPENED, Kind.PARTS, Kind.CHECKPOINT, Kind.AGREE, Kind.BEGIN,
}  # fmt: skip
"""Kinds of tasks that ranks may do together in different batches, since nothing depends on the batch."""
KINDS: tuple[Kind, ...] = (*Kind,)
"""The kinds by the numbers in lines."""


def purpose_of(kind: int, about: int) -> Kind:
    """Return a task's purpose: its kind, or, for passes at each rank's own pace, the kind of the passes."""
    return KINDS[about >> 32 if kind == Kind.AT_OWN_PACE else kind]


class Line(NamedTuple):
    """One rank's part of a round.

    Attributes:
        kind: the task's kind.
        about: the number of the task's object.
        part: the nested task's kind and object, packed; 0 outside of one.
        stage: number of rounds of the task so far.
        status: the rank's status, e.g. FAILED; or CALLS: it calls the others to a lookup that they may not come to.
        step: the rank's current batch: :attr:`Lane.ordinal`.
        amount: a count for the receiving rank, or NO_COUNT.
        note: a number for all ranks.
        pending: amount of work that the rank has begun and all ranks must finish together.
    """

    kind: int
    about: int
    part: int
    stage: int
    status: int
    step: int
    amount: int
    note: int
    pending: int


class Round(NamedTuple):
    """The lines of all ranks, as received by one of them.

    Attributes:
        counts: each rank's number for this one.
        notes: each rank's note.
    """

    counts: list[int]
    notes: list[int]


def digest_of(settings: object) -> int:
    """Return a digest of settings' text or of rows' bytes, as a note with which ranks compare them.

    A tensor is copied a piece at a time.
    """
    digest = hashlib.blake2b(digest_size=7)
    if isinstance(settings, Tensor):
        digest.update(repr((settings.shape, settings.dtype)).encode())
        row_bytes = settings[:1].nbytes
        for piece in torch.split(settings.detach(), max(1, _PIECE_BYTES // max(1, row_bytes))):
            content = as_bytes(piece.cpu().contiguous()).view(-1)
            ends = torch.arange(0, len(content) + _HASHED_BYTES, _HASHED_BYTES).clamp(max=len(content))
            digest.update(kernels.hash_texts((content, ends)).numpy().tobytes())
    else:
        digest.update(repr(settings).encode())
    return int.from_bytes(digest.digest(), "little")


# ---- the memory of rounds ------------------------------------------------------------------------------------------

_NUMBERS = len(Line._fields)
_LINE_BYTES = 8 * _NUMBERS


class Agreed(NamedTuple):
    """Rows to send along with the lines of the next round.

    Attributes:
        row_bytes: bytes per row.
        sent: how many go to each rank.
        received: how many come from each rank.
    """

    row_bytes: int
    sent: Sequence[int]
    received: Sequence[int]


class Sheet:
    """Lines to and from every rank, each followed by room for a few ids or for agreed rows.

    All ranks know each message's size in advance, whatever they send: a failed rank sends its line and meaningless
    bytes in the room.

    Args:
        size: the number of ranks.
        most: the largest room.

    Attributes:
        room: number of ids that fit after a line.
        line_bytes: bytes of a usual line with its room.
        agreed: rows of the next round, which replace ids; None for the usual room.
        came: the same for the last round.
    """

    def __init__(self, size: int, most: int = ROOM) -> None:
        self.room = min(ROOM // size, most)
        self.line_bytes = _LINE_BYTES + 8 * self.room
        self.agreed: Agreed | None = None
        self.came: Agreed | None = None
        with torch.inference_mode(False):  # inference tensors could not be changed outside of it
            self._mine, self._theirs = torch.zeros(2, size, _NUMBERS + self.room, dtype=torch.int64, device="cpu")
            self._rows_out, self._rows_in = torch.empty(2, 0, dtype=torch.uint8, device="cpu")

    def reserve(self, row_bytes: int) -> None:
        """Make room for rows of the given bytes."""
        wanted = len(self._mine) * (_LINE_BYTES + self.room * row_bytes)
        if wanted > len(self._rows_out):
            with torch.inference_mode(False):
                self._rows_out, self._rows_in = torch.empty(2, wanted, dtype=torch.uint8, device="cpu")

    def fill(self, lines: Sequence[Line], ids: Tensor | None = None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Write each rank's line.

        Args:
            lines: in the order of the ranks.
            ids: for each rank, its line's amount of ids, in rank order; ids that do not fit are dropped.

        Returns:
            The receive and send buffers, and the sizes of their parts, empty where all are equal.
        """
        given = torch.tensor(lines, device="cpu")
        if self.agreed is not None:
            row_bytes, sent, received = self.agreed
            out, into = _parts(self._rows_out, row_bytes, sent), _parts(self._rows_in, row_bytes, received)
            for part, line in zip(out, given.view(torch.uint8), strict=True):
                part[:_LINE_BYTES] = line
            coming, leaving = list(map(len, into)), list(map(len, out))
            return self._rows_in[: sum(coming)], self._rows_out[: sum(leaving)], coming, leaving
        self._mine[:, :_NUMBERS] = given
        if ids is not None:
            parts = torch.split(ids, [line.amount for line in lines])
            for own, some in zip(self._mine[:, _NUMBERS:], parts, strict=True):
                own[: len(some)] = some[: self.room]
        return self._theirs, self._mine, [], []

    def lines(self) -> list[Line]:
        """Return the lines of the last round."""
        came = self._theirs[:, :_NUMBERS]
        if self.came is not None:
            parts = _parts(self._rows_in, self.came.row_bytes, self.came.received)
            came = torch.stack([part[:_LINE_BYTES] for part in parts]).view(torch.int64)
        return [Line(*each) for each in came.tolist()]

    def ids_that_came(self, counts: Sequence[int]) -> Tensor:
        """Return the ids of the last round, ``counts`` per rank, in the order of ranks."""
        return torch.cat([line[_NUMBERS:][:count] for line, count in zip(self._theirs, counts, strict=True)])

    def put_rows(self, rows: Tensor) -> None:
        """Add the agreed rows to the next round: as bytes, in the order of ranks."""
        assert self.agreed is not None
        row_bytes, sent, _ = self.agreed
        for part, some in zip(_parts(self._rows_out, row_bytes, sent), torch.split(rows, list(sent)), strict=True):
            part[_LINE_BYTES:].view(-1, row_bytes).copy_(some)

    def rows_that_came(self) -> Tensor:
        """Return the rows of the last round as bytes, shape (n, bytes per row), in the order of ranks."""
        assert self.came is not None
        row_bytes, _, received = self.came
        parts = _parts(self._rows_in, row_bytes, received)
        return torch.cat([part[_LINE_BYTES:].view(-1, row_bytes) for part in parts])


def _parts(memory: Tensor, row_bytes: int, counts: Sequence[int]) -> Sequence[Tensor]:
    """Return each rank's message, with rows after its line."""
    sizes = [_LINE_BYTES + count * row_bytes for count in counts]
    return torch.split(memory[: sum(sizes)], sizes)


# ---- rows ----------------------------------------------------------------------------------------------------------


def as_bytes(rows: Tensor) -> Tensor:
    """Return contiguous rows as bytes, shape (n, row_bytes); gloo supports few dtypes."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


class Way(NamedTuple):
    """The three hops of rows from the requesting ranks to the owners, or back, if rows are merged by host.

    Attributes:
        turns: the order of the rows before each hop and after the last, int64 vectors.
        counts: for each hop, the number of rows to each peer and from each peer.
        sums: if rows are summed before the second hop, the number of sums; ``turns[1]`` then has the index of each
            row's sum.
    """

    turns: Sequence[Tensor]
    counts: Sequence[tuple[Sequence[int], Sequence[int]]]
    sums: int | None = None

    @property
    def back(self) -> Way:
        """The way back, on which the value of each sum is copied to the rows it was made of."""
        first, second, third, last = self.turns
        counts = [(received, sent) for sent, received in self.counts[::-1]]
        return Way([last.argsort(), third.argsort(), second, first.argsort()], counts)

    def on(self, device: torch.device) -> Way:
        """Return the way for rows on a device; indices are copied there without waiting."""
        turns = kernels.near(torch.cat([*self.turns]), device)
        return self._replace(turns=torch.split(turns, [*map(len, self.turns)]))

    def turned(self, hop: int, rows: Tensor) -> Tensor:
        """Return rows in the order in which a hop sends them, or in which they are received after the last."""
        turn = self.turns[hop]
        if hop == 1 and self.sums is not None:
            return kernels.sum_rows(rows, turn, self.sums)
        return rows.index_select(0, turn)


class Parcel(NamedTuple):
    """Rows that may be sent together with others in one message.

    Attributes:
        rows: shape (n, dim), in the order of the destination ranks.
        sent: how many go to each rank.
        received: how many come from each rank.
        way: their way, if those of a host are merged.
    """

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    way: Way | None = None

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()


def packed(parcels: Sequence[Parcel]) -> Parcel:
    """Merge parcels into one of bytes, shape (n, 1), grouped by rank and then in the order of the parcels."""
    if len(parcels) == 1:
        return parcels[0]
    sent = [[count * each.row_bytes for count in each.sent] for each in parcels]
    received = [[count * each.row_bytes for count in each.received] for each in parcels]
    flat = [as_bytes(each.rows.detach().contiguous()).reshape(-1) for each in parcels]
    pieces = [torch.split(rows, sizes) for rows, sizes in zip(flat, sent, strict=True)]
    rows = torch.cat(list(chain.from_iterable(zip(*pieces, strict=True)))).unsqueeze(1)
    return Parcel(rows, [*map(sum, zip(*sent, strict=True))], [*map(sum, zip(*received, strict=True))])


def unpacked(came: Tensor, parcels: Sequence[Parcel]) -> list[Tensor]:
    """Return the received rows of each of the merged parcels, in rank order."""
    if len(parcels) == 1:
        return [came]
    ranks = range(len(parcels[0].received))
    pieces = torch.split(came.reshape(-1), [each.received[rank] * each.row_bytes for rank in ranks for each in parcels])
    return [
        torch.cat(pieces[place :: len(parcels)]).view(each.rows.dtype).view(-1, each.rows.shape[1])
        for place, each in enumerate(parcels)
    ]


class Connections(Protocol):
    """Connections between ranks, for rows; see :class:`speedswap.collectives.Lane`."""

    ranks: list[int]
    rank: int
    payload_bytes: int

    def is_staged(self, rows: Tensor) -> bool:
        """Return whether rows go through host memory instead of directly between GPUs."""

    def exchange_rows(self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send rows to each rank and receive rows from each; both are bytes, shape (n, row_bytes)."""

    def connected(self) -> AbstractContextManager[Any]:
        """Provide the connections; any error in them means that another rank is unreachable."""
