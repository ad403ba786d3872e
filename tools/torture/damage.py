"""Damaged and hostile log files: every row that is read or saved is one of a commit, or is named."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from speedswap.kernels import RowLogDamaged
from torture.attack import Attack, Broken
from torture.crashes import Story
from torture.log_lives import Log, Timeline
from torture.salvages import saved

__all__ = ["ATTACK", "damaged", "read_through"]

_SECTOR = 512


def _round(seed: int, folder: Path) -> Mapping[str, int]:
    draw = random.Random(seed)
    story = Story(draw)
    story.live(draw.choice([10, 40]))
    files = story.rest(draw.choice([10, 40]))
    counts: Counter[str] = Counter()
    for _ in range(40):
        way, hostile = damaged(files, draw)
        outcome = read_through(hostile, story.timeline, story.slots, writable=draw.random() < 0.3, what=way)
        counts[f"{way}: {outcome}"] += 1
    for _ in range(12):
        counts[saved(files, story.timeline, draw, folder)] += 1
    return counts


def damaged(files: dict[str, bytes], draw: random.Random) -> tuple[str, dict[str, bytes]]:
    """Return the files with one damage, and its name."""
    name = draw.choice(["log", "log", "head"])
    data = bytearray(files[name])
    way = draw.choice(["flip", "flip", "zeros", "noise", "cut", "longer", "moved", "junk"])
    at = _place(data, draw) if data else 0
    sector = slice(at // _SECTOR * _SECTOR, (at // _SECTOR + 1) * _SECTOR)
    if way == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif way == "zeros":
        data[sector] = bytes(len(data[sector]))
    elif way == "noise":
        data[sector] = draw.randbytes(len(data[sector]))
    elif way == "cut":
        del data[draw.choice([at, sector.start, len(data) - 1, 0]) :]
    elif way == "longer":
        data += draw.choice([bytes(3), draw.randbytes(70_000), bytes(1 << 20)])
    elif way == "moved":
        other = draw.randrange(len(data)) // 4096 * 4096
        data[other : other + 4096] = data[at // 4096 * 4096 : (at // 4096 + 1) * 4096]
    else:
        data = bytearray(draw.randbytes(draw.choice([0, 1, 4096, 100_000])))
    return f"{way} in {name}", {**files, name: bytes(data)}


def _place(data: bytearray, draw: random.Random) -> int:
    """Return a place in a file, most often one that is not zero, and then often one of the first bytes of a block."""
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    if len(used) and draw.random() < 0.3:
        used = used[used % 4096 < 80]
    return int(draw.choice(used)) if len(used) and draw.random() < 0.95 else draw.randrange(len(data))


def read_through(files: dict[str, bytes], timeline: Timeline, slots: int, *, writable: bool, what: str) -> str:
    """Open a log and read its groups one by one; return what was found.

    Raises:
        Broken: a group is that of no commit, or not of the one that was opened, and no error says so.
    """
    shape = timeline.shape
    try:
        log = Log(files, shape, slots=slots, writable=writable)
    except RowLogDamaged:
        return "refused"
    with log:
        found = next((one for one in timeline.commits if one.head == log.engine.head), None)
        if found is None:
            raise Broken(f"a damaged log opens at a commit that there never was\n{log.engine.head!r}; {what}")
        expected = found.state.in_shape(shape).content(shape)
        noticed = 0
        for group in range(shape.groups):
            try:
                with log.brought(np.array([group])) as (slot, memory):
                    wrong = not np.array_equal(memory[slot[0]], expected[group])
            except RowLogDamaged as error:
                if error.group != group:
                    raise Broken(f"the error does not name the damaged group {group}\n{error}; {what}") from error
                noticed += 1
                continue
            if wrong:
                raise Broken(
                    f"a damaged log gives other rows without an error\ngroup {group} of {found.head!r}; {what}"
                )
    older = "" if found is timeline.commits[-1] else ", an older commit"
    return ("noticed" if noticed else "as it was") + older


ATTACK = Attack(
    name="damage",
    promise="damage to a log is an error at open, or one that names the row, and never gives other rows; a new table "
    "of what is left has every row whose record is intact, and names the others",
    round=_round,
    seconds=120.0,
    quick=2,
)
