"""A row log on a disk that may lose power at any instant, and the commits at which it may reopen."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from speedswap import kernels
from speedswap.errors import SpeedswapError
from torture.attack import Broken
from torture.log_rows import Shape, State, content
from torture.platter import Platter

__all__ = ["Commit", "Entry", "Hold", "Log", "Timeline", "check", "contents", "created", "report"]

SEGMENT = 64 << 10
SALT = 0x5A17
Entry = tuple[str, str, int, Any]


class Log:
    """A row log in files in memory.

    Args:
        files: their content, by name.
        shape: of its groups.
        slots: groups that the cache holds.
        options: of the engine.
    """

    def __init__(self, files: dict[str, bytes], shape: Shape, *, slots: int, **options: Any) -> None:
        self._options = {"slots": slots, **options}
        self._entries: list[Entry] = []
        self._base = 0  # entries of engines before this one
        self.fds = {name: _in_memory(name, data) for name, data in files.items()}
        try:
            self._open(shape, **self._options)
        except BaseException:
            self._close_files()
            raise

    def _open(self, shape: Shape, *, slots: int, **options: Any) -> None:
        self.engine, self.shape = (
            kernels.RowLog(
                self.fds["log"],
                self.fds["head"],
                num_groups=shape.groups,
                layouts=[
                    kernels.RowLayout(shape.bytes_of(layout), shape.moves(layout))
                    for layout in range(len(shape.layouts))
                ],
                segment_bytes=SEGMENT,
                salt=SALT,
                cache_bytes=slots * shape.group_bytes,
                **options,
            ),
            shape,
        )

    def change(self, shape: Shape) -> None:
        """Continue in a new shape, with committed and uncommitted changes."""
        before = self.engine
        self._open(shape, before=before, **self._options)
        self._note(before.journal())
        self._base = len(self._entries)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *unused: object) -> None:
        try:
            self.engine.close()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for fd in self.fds.values():
            os.close(fd)

    @contextmanager
    def brought(
        self, groups: NDArray[np.int64], *, overwrite: bool = False
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield the slots of some groups, which are pinned for the block, and the cache's bytes by slot."""
        with self.engine.bring(torch.from_numpy(groups), overwrite=overwrite) as bringing:
            slots, fresh = bringing.wait()
            if len(fresh):
                self._fill(fresh.numpy())
                bringing.filled()
            yield slots.numpy(), self.memory()

    def _fill(self, fresh: NDArray[np.int64]) -> None:
        """Give groups that were never written their initial values, and those of older layouts the newer columns'."""
        shape, memory = self.shape, self.memory()
        initial = content(shape, fresh[:, 1], np.zeros((len(fresh), len(shape.columns)), np.int64))
        for column in shape.layouts[-1]:
            at = shape.offset(len(shape.layouts) - 1, column)
            until = at + shape.columns[column]
            is_new = shape.births[column] > fresh[:, 2]
            memory[fresh[is_new, 0], at:until] = initial[is_new, at:until]

    def memory(self) -> NDArray[np.uint8]:
        """Return the cache's bytes by slot."""
        engine, nbytes = self.engine, self.shape.group_bytes
        cells = (ctypes.c_uint8 * (engine.num_slots * nbytes)).from_address(engine.cache_pointer)
        return np.ctypeslib.as_array(cells).reshape(engine.num_slots, nbytes)

    def write(self, groups: NDArray[np.int64], step: int, *, overwrite: bool = False) -> None:
        """Let a step write whole groups."""
        steps = np.full((len(groups), len(self.shape.columns)), step)
        with self.brought(groups, overwrite=overwrite) as (slots, memory):
            self.engine.write(torch.from_numpy(slots))
            memory[slots] = content(self.shape, groups, steps)

    def compare(self, groups: NDArray[np.int64], state: State) -> None:
        """Raise unless groups are as in a state."""
        with self.brought(groups) as (slots, memory):
            wrong = (memory[slots] != content(self.shape, groups, state.steps[groups])).any(axis=1)
            if wrong.any():
                raise Broken(f"an open log gives other rows than were written\ngroups {groups[wrong]}")

    def journal(self) -> list[Entry]:
        """Return every write, sync and allocation so far."""
        self._note(self.engine.journal())
        return self._entries

    def _note(self, entries: list[Entry]) -> None:
        self._entries += [
            (file, call, at + self._base if call == "done" else at, data) for file, call, at, data in entries
        ]

    def read(self) -> NDArray[np.uint8]:
        """Return every group's bytes."""
        found = np.empty((self.shape.groups, self.shape.group_bytes), np.uint8)
        piece = max(1, self.engine.num_slots // 4)
        for first in range(0, self.shape.groups, piece):
            groups = np.arange(first, min(self.shape.groups, first + piece))
            with self.brought(groups) as (slots, memory):
                found[groups] = memory[slots]
        return found


def created(head: bytes) -> dict[str, bytes]:
    """Return the files of a log at its commit 0."""
    fds = {name: _in_memory(name, b"") for name in ("log", "head")}
    kernels.RowLog.create(fds["log"], fds["head"], salt=SALT, head=head)
    files = contents(fds)
    for fd in fds.values():
        os.close(fd)
    return files


def contents(fds: Mapping[str, int]) -> dict[str, bytes]:
    """Return the bytes of files."""
    return {name: os.pread(fd, os.fstat(fd).st_size, 0) for name, fd in fds.items()}


def report(entries: Sequence[Entry], number: int, platter: Platter) -> None:
    """Tell a disk of one entry of a journal."""
    file, call, at, data = entries[number]
    if call == "write":
        platter.write(number, file, at, data)
    elif call == "allocate":
        platter.allocate(number, file, at + data)
    elif call == "sync":
        platter.sync(number, file)
    else:
        platter.done(at)


def _in_memory(name: str, data: bytes) -> int:
    fd = os.memfd_create(name)
    os.write(fd, data)
    return fd


@dataclass
class Commit:
    """A commit of a log.

    Attributes:
        head: the bytes that it was begun with, which no other commit has.
        number: as the engine counts it.
        state: of the rows.
        pieces: the bytes that it refers to in the file next to the log, by offset.
        begun: the length of the journal before it was begun.
        acknowledged: the length of the journal after the engine had said that it is durable; None before.
    """

    head: bytes
    number: int
    state: State
    pieces: dict[int, bytes] = field(default_factory=dict)
    begun: int = 0
    acknowledged: int | None = None


@dataclass
class Hold:
    """A commit that can be opened by its number, between two lengths of the journal."""

    commit: Commit
    since: int
    until: float = float("inf")


@dataclass
class Timeline:
    """The commits of a log during one life, and the shapes that it has, by the length of its journal.

    Args:
        commits: the oldest first; the first one is durable from the start.
        shapes: (length of the journal, shape).
        holds: of this life and of earlier ones.
    """

    commits: list[Commit]
    shapes: list[tuple[int, Shape]]
    holds: list[Hold] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.shapes[-1][1]

    def shape_at(self, length: int) -> Shape:
        return next(shape for since, shape in reversed(self.shapes) if since <= length)

    def allowed_at(self, length: int) -> list[Commit]:
        """Return the commits at which the log may reopen after a crash at a length of the journal."""
        begun = [commit for commit in self.commits if commit.begun <= length]
        least = max(i for i, one in enumerate(begun) if one.acknowledged is not None and one.acknowledged <= length)
        return begun[least:]

    def held_at(self, length: int) -> list[Commit]:
        """Return the commits that can be opened by their number after a crash at a length of the journal."""
        return [hold.commit for hold in self.holds if hold.since <= length < hold.until]

    def after_crash(self, length: int) -> Timeline:
        """Return the timeline of the life that begins with a crash at a length of the journal."""
        commits = [replace(one, begun=0, acknowledged=None) for one in self.allowed_at(length)]
        commits[0].acknowledged = 0
        return Timeline(commits, [(0, self.shape_at(length))], [Hold(one, 0) for one in self.held_at(length)])

    def opened(self, head: bytes, length: int) -> Commit:
        """Record which commit a log was opened at; it is durable from now on, and later ones are gone."""
        place = next((i for i in reversed(range(len(self.commits))) if self.commits[i].head == head), None)
        if place is None:
            raise Broken(f"the log opens at a commit that is none of those expected\n{head!r}, not {self.commits}")
        del self.commits[place + 1 :]
        if self.commits[place].acknowledged is None:
            self.commits[place].acknowledged = length
        return self.commits[place]


def check(
    files: dict[str, bytes],
    timeline: Timeline,
    length: int,
    slots: int,
    *,
    commit: Commit | None = None,
    **options: Any,
) -> list[Any]:
    """Open the files and raise unless they are exactly one of the commits that a timeline allows.

    Args:
        length: that of the journal at the crash.
        commit: the one to open, instead of the last.
        options: of the engine.

    Returns:
        The journal of the engine that opened them.

    Raises:
        Broken: they are not, or they do not open.
    """
    shape = timeline.shape_at(length)
    try:
        with Log(files, shape, slots=slots, commit=commit.number if commit else None, **options) as log:
            allowed = [commit] if commit else timeline.allowed_at(length)
            found = next((one for one in allowed if one.head == log.engine.head), None)
            if found is None:
                raise Broken(f"the log is at another commit\n{log.engine.head!r}, not {[one.head for one in allowed]}")
            wrong = (log.read() != found.state.in_shape(shape).content(shape)).any(axis=1)
            if wrong.any():
                raise Broken(f"groups are not those of their commit\n{np.flatnonzero(wrong)} of {found.head!r}")
            lost = [at for at, piece in found.pieces.items() if files["side"][at : at + len(piece)] != piece]
            if lost:
                raise Broken(f"a file beside the log is not as its commit had it\nat {lost} of {found.head!r}")
            return log.journal()
    except (OSError, SpeedswapError, RuntimeError, ValueError) as error:
        raise Broken(f"the log does not open, or cannot be read\n{type(error).__name__}: {error}") from error
