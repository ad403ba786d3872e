"""A disk that loses power: every image that it may hold afterwards, from a journal of the calls that were made."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

__all__ = ["Platter", "Write"]

_SECTORS = (512, 4096)


@dataclass(frozen=True)
class Write:
    """A write, or an allocation, that no completed sync covers.

    Attributes:
        number: that of the call in its journal.
        file: its name.
        offset: in bytes, from the start of the file.
        data: the bytes; none for an allocation.
        end: the size that the file has at least afterwards.
    """

    number: int
    file: str
    offset: int
    data: bytes
    end: int


@dataclass
class Platter:
    """Files on a disk, the bytes that are durable, and the calls whose effect may be lost, in part or as a whole.

    Calls are reported as they begin and as they return, each with a number: a write is durable once it has returned
    before a sync of its file began that has returned too.

    Args:
        durable: the present content of each file.
    """

    durable: dict[str, bytearray]
    unsynced: list[Write] = field(default_factory=list)
    _unfinished: set[int] = field(default_factory=set)
    _covered: dict[int, list[Write]] = field(default_factory=dict)

    def write(self, number: int, file: str, offset: int, data: bytes) -> None:
        """Record that a write begins."""
        self.unsynced.append(Write(number, file, offset, data, offset + len(data)))
        self._unfinished.add(number)

    def allocate(self, number: int, file: str, end: int) -> None:
        """Record that room is allocated, up to a size of the file."""
        self.unsynced.append(Write(number, file, end, b"", end))
        self._unfinished.add(number)

    def sync(self, number: int, file: str) -> None:
        """Record that a sync begins."""
        self._covered[number] = [
            one for one in self.unsynced if one.file == file and one.number not in self._unfinished
        ]

    def done(self, number: int) -> None:
        """Record that a call has returned without an error."""
        self._unfinished.discard(number)
        covered = self._covered.pop(number, [])
        for one in covered:
            _apply(self.durable[one.file], one)
        if covered:
            gone = {id(one) for one in covered}
            self.unsynced = [one for one in self.unsynced if id(one) not in gone]

    # the disk afterwards

    def killed(self, draw: random.Random) -> tuple[Platter, dict[str, bytes]]:
        """Return the disk after the process was killed, and the files as the next process reads them.

        Nothing but calls under way is lost, each from some byte on; nothing unsynced becomes durable by that.
        """
        after = Platter({name: bytearray(data) for name, data in self.durable.items()})
        seen = {name: bytearray(data) for name, data in self.durable.items()}
        for one in self.unsynced:
            if one.number in self._unfinished:
                if not one.data and draw.random() < 0.5:
                    continue
                kept = draw.choice([0, len(one.data), draw.randrange(len(one.data) + 1)])
                one = replace(one, data=one.data[:kept], end=one.offset + kept if one.data else one.end)
            _apply(seen[one.file], one)
            after.unsynced.append(replace(one, number=-1))
        return after, {name: bytes(data) for name, data in seen.items()}

    def cut(self, draw: random.Random) -> dict[str, bytes]:
        """Return what the files may hold if power is lost now: unsynced sectors in any combination, torn or not."""
        sector = draw.choice(_SECTORS)
        keeps, torn = _lottery(draw, self.unsynced), draw.choice([0.0, 0.0, 0.1, 0.5])
        images = {name: bytearray(data) for name, data in self.durable.items()}
        for name, image in images.items():
            ends = [one.end for one in self.unsynced if one.file == name and one.end > len(image)]
            if ends and (size := draw.choice([len(image), *ends, max(ends)])) > len(image):
                image.extend(bytes(size - len(image)))
        for one in self.unsynced:
            image = images[one.file]
            for start, end in _sectors(one, sector):
                if not keeps(one) or start >= len(image):
                    continue
                if draw.random() < torn:
                    start, end = _part(start, end, draw)
                end = min(end, len(image))
                image[start:end] = one.data[start - one.offset : end - one.offset]
        return {name: bytes(image) for name, image in images.items()}


def _apply(content: bytearray, one: Write) -> None:
    if one.end > len(content):
        content.extend(bytes(one.end - len(content)))
    content[one.offset : one.offset + len(one.data)] = one.data


def _sectors(one: Write, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sector of a write."""
    at, end = one.offset, one.offset + len(one.data)
    while at < end:
        until = min(end, (at // size + 1) * size)
        yield at, until
        at = until


def _part(start: int, end: int, draw: random.Random) -> tuple[int, int]:
    """Return the part of a torn sector that is new: its beginning, most often a short one, or its end."""
    middle = min(end, start + draw.randrange(1 << draw.randrange(1, 13)))
    return (start, middle) if draw.random() < 0.5 else (middle, end)


def _lottery(draw: random.Random, unsynced: list[Write]) -> Callable[[Write], bool]:
    """Return what decides, sector by sector, which writes reach the platter.

    Sectors alone leave few images in which one chunk arrived whole and the next did not; whole writes alone leave no
    torn chunk. So one of several ways is drawn for each cut.
    """
    way = draw.choice(["sectors", "sectors", "writes", "writes", "one file", "until", "all but one", "all"])
    if way == "sectors":
        share = draw.choice([0.1, 0.5, 0.9, 0.99])
        return lambda one: draw.random() < share
    if way == "writes":
        share = draw.choice([0.1, 0.5, 0.9])
        kept = {id(one) for one in unsynced if draw.random() < share}
        return lambda one: id(one) in kept
    if way == "one file":
        files = sorted({one.file for one in unsynced})
        file = draw.choice(files) if files else ""
        return lambda one: one.file == file
    if way == "until":
        last = draw.randrange(len(unsynced) + 1)
        early = {id(one) for one in unsynced[:last]}
        edge = id(unsynced[last]) if last < len(unsynced) else 0
        return lambda one: id(one) in early or (id(one) == edge and draw.random() < 0.5)
    if way == "all but one":
        lost = id(draw.choice(unsynced)) if unsynced else 0
        return lambda one: id(one) != lost
    return lambda one: True
