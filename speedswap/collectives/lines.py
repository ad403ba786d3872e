"""Lines: the numbers that each rank sends to every other one in a round."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.collectives.letters import as_bytes

__all__ = ["ANYWHERE", "FAILED", "OK", "TORN", "Line", "Round", "digest_of", "note_of"]

_PIECE_BYTES = 8 << 20
_HASHED_BYTES = 1 << 10  # together: the threads of the CPU loops share a piece's parts

OK, FAILED, TORN = range(3)  # statuses
ANYWHERE = -1  # the stage of a rank that has failed


class Line(NamedTuple):
    """One rank's part of a round.

    Attributes:
        kind: of the task.
        about: the number of its object.
        part: of the task, which is a task's work by itself elsewhere; 0 outside of such.
        stage: rounds of the task so far.
        status: whether the rank has failed.
        step: of the training, as the rank counts: those completed by all, and those that it has begun and left.
        amount: for the rank that receives the line.
        note: for all.
        pending: things that the rank has begun, and that all ranks finish together.
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
    """The lines of all ranks, as one of them sees them.

    Attributes:
        counts: the numbers that each rank has for this one.
        notes: the note of each rank.
    """

    counts: list[int]
    notes: list[int]

    @property
    def numbers(self) -> list[float]:
        """The notes as the numbers that :func:`note_of` has made notes of."""
        return [struct.unpack("<d", struct.pack("<q", note))[0] for note in self.notes]


def note_of(number: float) -> int:
    """Return a number as a note, with all its bits."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def digest_of(settings: object) -> int:
    """Return a note that tells whether ranks have the same settings, or rows: a digest of their text, or bytes.

    Of a tensor no more is copied at once than a piece.
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
