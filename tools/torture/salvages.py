"""A damaged log, saved as a table: rows whose records are intact are in the new one, and the others are named."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speedswap import Table
from torture.attack import Broken
from torture.log_lives import SALT, SEGMENT, Timeline
from torture.log_rows import Shape, content

__all__ = ["saved"]

_BLOCK, _SLOT, _HEADER = 4096, 65536, 64


def saved(files: dict[str, bytes], timeline: Timeline, draw: random.Random, folder: Path) -> str:
    """Damage a log, save it as a table, and compare; return what was found.

    Args:
        files: the log and its head, as the last commit of a timeline left them.
        timeline: of the log.
        draw: of the damage.
        folder: of tables, which are replaced.

    Raises:
        Broken: an intact row is not in the new table, or a lost one is not named.
    """
    shape, commit = timeline.shape, timeline.commits[-1]
    damage = {name: _damaged(files[name], draw) for name in ("log", "head")}
    for name in ("t", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "t").mkdir()
    for name, data in {
        "MANIFEST": _manifest(shape),
        "rows.log": damage["log"].data,
        "HEAD": damage["head"].data,
    }.items():
        (folder / "t" / name).write_bytes(data)
    found = Table.salvage(folder / "t", folder / "out")
    slots = [range(at, at + _HEADER + _word(files["head"], at + 52)) for at in (0, _SLOT)]
    if all(damage["head"].breaks(slot) for slot in slots):
        return "another commit, or none"
    what = f"{damage['log'].done} in the log, {damage['head'].done} in its head"
    if found.commit != commit.number:
        raise Broken(f"a commit is left, and another is saved\n{found.commit}, not {commit.number}; {what}")
    right = content(shape, np.arange(shape.groups), (steps := commit.state.in_shape(shape).steps))
    wrong = set[int]()
    with Table.open(folder / "out", "r") as table:
        for column in shape.layouts[-1]:
            at = shape.offset(len(shape.layouts) - 1, column)
            wanted = right[:, at : at + shape.columns[column]] * (steps[:, column, None] > 0)
            differ = (table.read(column=_name(column)).numpy() != wanted).any(axis=1)
            wrong |= {*np.flatnonzero(differ).tolist()}
    named = {*chain(*found.older, *found.initial)}
    if found.complete and not wrong <= named:
        raise Broken(f"a row is another one, and is not named\n{sorted(wrong - named)[:9]}; {what}")
    places = _places(files["log"], shape, struct.unpack_from("<Q", files["head"], 24)[0])
    broken = {each.segment for each in places if damage["log"].breaks(each.header)}
    hit = {each.group for each in places if damage["log"].touches(each.record)}
    hidden = {each.group for each in places if each.segment in broken}
    if not wrong <= hit | hidden:
        raise Broken(f"an intact row is not saved\n{sorted(wrong - hit - hidden)[:9]}; {what}")
    if not broken and (named != hit or not found.complete):
        raise Broken(f"other rows are named than those that are damaged\n{sorted(named ^ hit)[:9]}; {what}")
    return "saved as a whole" if found.whole or (not named and found.complete) else "saved, and named the rest"


class _Damage(NamedTuple):
    """The bytes of a file that was damaged, and in which bits they differ."""

    data: bytes
    differ: NDArray[np.uint8]
    done: list[str]

    def touches(self, span: range) -> bool:
        return bool(self.differ[span.start : span.stop].any())

    def breaks(self, span: range) -> bool:
        """Return whether more than a bit has flipped."""
        return int(np.unpackbits(self.differ[span.start : span.stop]).sum()) > 1


def _damaged(data: bytes, draw: random.Random) -> _Damage:
    after, done = bytearray(data), []
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    for _ in range(draw.choice([0, 1, 1, 2, 4, 30])):
        at = int(draw.choice(used)) if draw.random() < 0.7 else draw.randrange(len(data)) // _BLOCK * _BLOCK
        way, count = draw.choice(["flip"] * 4 + ["zeros", "noise"]), draw.choice([1, 8, 512])
        if way == "flip":
            at += draw.randrange(200)
        span = slice(at, min(len(data), at + (1 if way == "flip" else count)))
        if way == "flip" and span.start < span.stop:
            after[span.start] ^= 1 << draw.randrange(8)
        else:
            after[span] = draw.randbytes(span.stop - span.start) if way == "noise" else bytes(span.stop - span.start)
        done.append(f"{way} at {span.start} to {span.stop}")
    if draw.random() < 0.1:
        del after[draw.randrange(len(after)) :]
        done.append(f"cut at {len(after)}")
    there = np.frombuffer(bytes(after).ljust(len(data), b"\0"), np.uint8)
    return _Damage(bytes(after), there ^ np.frombuffer(data, np.uint8), done)


class _Place(NamedTuple):
    """The bytes of the log that a group's newest record takes, and those of the header of its chunk."""

    group: int
    segment: int
    header: range
    record: range


def _places(log: bytes, shape: Shape, last: int) -> list[_Place]:
    """Return where every group is that a commit has, given its last chunk."""
    found: dict[int, tuple[int, _Place]] = {}
    for segment in range(-(-len(log) // SEGMENT)):
        at, before = 0, (0, 0)
        while at + _BLOCK < SEGMENT and len(block := log[segment * SEGMENT + at :][:_BLOCK]) == _BLOCK:
            seq, layout, count, first = struct.unpack_from("<QIII", block, 16)
            stamp = struct.unpack_from("<Q", block, 40)[0]
            is_next = seq > before[0] and (before[1] in (0, stamp)) and seq <= last
            if block[:4] != b"SSWL" or _word(block, 36) != segment or not is_next:
                break
            header, stride = (
                range(segment * SEGMENT + at, segment * SEGMENT + at + _HEADER + 4 * count),
                _stride(shape, layout),
            )
            for i, group in enumerate(struct.unpack_from(f"<{count}I", block, _HEADER)):
                begin = segment * SEGMENT + (first + i) * stride
                place = _Place(group, segment, header, range(begin, begin + stride))
                found[group] = max(found.get(group, (-1, place)), (seq, place), key=lambda each: each[0])
            at, before = -(-(first + count) * stride // _BLOCK) * _BLOCK, (seq, stamp)
    return [place for _, place in found.values()]


def _stride(shape: Shape, layout: int) -> int:
    return shape.bytes_of(layout) + 4


def _word(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _name(column: int) -> str:
    return f"column {column}" if column else "weight"


def _manifest(shape: Shape) -> bytes:
    """Return the manifest of a table whose rows are the groups of a log."""
    columns = [
        {"name": _name(i), "row_shape": [size], "dtype": "uint8", "init": {"kind": "constant", "value": 0.0}}
        for i, size in enumerate(shape.columns)
    ]
    layouts = [
        {
            "number": number,
            "stride": shape.bytes_of(number),
            "held": [
                [column, shape.offset(number, column), min(shape.births[column], number), column, None, []]
                for column in order
            ],
        }
        for number, order in enumerate(shape.layouts)
    ]
    body = json.dumps(
        {
            "format": "speedswap-table",
            "version": 1,
            "name": "a log",
            "num_embeddings": shape.groups,
            "seed": 0,
            "group_rows": 1,
            "segment_bytes": SEGMENT,
            "salt": SALT,
            "scratch": False,
            "columns": [{**column, "zero_row": None} for column in columns],
            "layouts": layouts,
        }
    ).encode()
    return b"%08x\n" % zlib.crc32(body) + body
