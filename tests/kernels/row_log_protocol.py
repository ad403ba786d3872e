"""The protocol of the row log as a model of a few groups and segments, small enough to visit every state.

It follows csrc/row_log*.cpp step by step: chunks of a few records in segments of a few chunks, a writer, the threads
that append, commit and clean, the page cache, and a disk that loses power. Between two syncs any of a sector's writes
may reach the disk, or none. In every state, every image that a power cut may leave is recovered, and must be a commit
as it was begun: the last that was acknowledged, or a later one; and every commit that HEAD holds can be opened. Groups
are read as they were written, and changes that were allowed find room. Left out are the bytes of rows, layouts,
readers, and files other than the log; there is one slot for a held commit instead of two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

__all__ = ["FAULTS", "Config", "Model", "State", "Violation", "play", "search"]

TORN = "torn"
JUMP = 100  # of sequence numbers, from one life to the next
UNUSED, OPEN, CLOSED, EMPTIED = range(4)

FAULTS = {
    "no log sync": "HEAD names chunks that are not durable",
    "no drain": "the log is synced before the commit's chunks have landed",
    "reuse at once": "a segment without live groups is written again at once",
    "free before HEAD sync": "what a commit makes superfluous is free before the commit is durable",
    "one HEAD": "commits have one slot, without a copy",
    "rejected stay": "chunks after the commit stay in the log when it is opened",
    "no jump": "sequence numbers go on where the last commit ended",
    "no sync of what was found": "a log is opened at a commit that only the page cache has, and goes on",
    "copy not synced": "the next commit is written over the first slot before the second is durable",
    "held ignored": "segments of held commits are written again",
    "held slot not synced": "what a held commit needed is free before its slot is durably cleared",
    "epochs ignored": "changes after a commit are appended before the commit's last chunk",
    "old version lost": "a group that a commit has yet to append is changed first",
    "moved not sealed": "a moved record may come after the change that follows it",
    "unwritten ignored": "a segment is written again while chunks are on their way to it",
    "cleaner takes room": "the cleaner takes the last segments, though changes that were allowed need them",
    "promises ignored": "writes take the room that another holds",
}


class Config(NamedTuple):
    """Sizes of the model, and limits on its operations."""

    groups: int = 2
    segments: int = 3
    chunks: int = 2  # of a segment
    records: int = 1  # of a chunk
    writes: int = 2
    commits: int = 2
    lives: int = 0
    cleans: int = 0
    holds: int = 0
    rooms: int = 0


class Group(NamedTuple):
    """A group in memory."""

    version: int = 0
    dirty: int = -1  # the epoch of its change; -1 if the log has it
    address: tuple[int, int, int] | None = None  # segment, chunk, record


class Segment(NamedTuple):
    state: int = UNUSED
    stamp: int = 0
    opened_at: int = 0
    emptied_at: int = 0


class Point(NamedTuple):
    """A place where groups are appended: a segment, the chunk that is being filled, and its records."""

    segment: int = -1
    chunk: int = 0
    records: tuple[tuple[int, int], ...] = ()  # group, version


class Write(NamedTuple):
    """A chunk on its way to the disk."""

    segment: int
    chunk: int
    seq: int
    stamp: int
    records: tuple[tuple[int, int], ...]


class Commit(NamedTuple):
    number: int
    hold: bool
    seq: int = -1  # once it is appended


class Memory(NamedTuple):
    """A writer's memory."""

    groups: tuple[Group, ...]
    segments: tuple[Segment, ...]
    seq: int
    durable: int
    epoch: int
    held: tuple[int, ...] = ()
    changed: Point = Point()
    moved: Point = Point()
    queue: tuple[Write, ...] = ()
    appending: bool = False
    commits: tuple[Commit, ...] = ()  # begun and not durable
    phase: str = "idle"  # of the thread that commits
    letting_go: int = -1  # a held commit whose slot is cleared, and not durably
    promised: int = 0
    stuck: bool = False


class Opening(NamedTuple):
    """A log that is being opened: its outstanding writes."""

    steps: tuple[Any, ...]
    then: Memory


class State(NamedTuple):
    """A state of everything.

    Attributes:
        disk: the values of each sector: the durable one, and all written since; the last is in the page cache.
        memory: of the writer; None without one.
        acked: the last commit that is known to be durable.
        held: commits that are known to be held.
        tables: the versions of all groups, by commit: of those that may be found.
        left: writes, commits, lives, cleanings, holds and rooms.
    """

    disk: tuple[tuple[Any, ...], ...]
    memory: Memory | Opening | None
    acked: int
    held: tuple[int, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    left: tuple[int, ...]


class Violation(AssertionError):
    """A state in which a promise is broken; the message has the way to it."""


class Model:
    """The protocol, with some of its parts left out.

    Args:
        config: sizes.
        faults: names of what is left out, of ``FAULTS``.
    """

    def __init__(self, config: Config, *faults: str) -> None:
        self.config = config
        self.faults = frozenset(faults)
        self.head = 2 * config.segments * config.chunks  # the sector of the first slot of HEAD; the third is held
        self.outcomes = cache(self._outcomes)
        self.recovered = cache(self._recovered)

    def initial(self) -> State:
        """Return an empty log that was just opened."""
        config = self.config
        disk = ((None,),) * self.head + (((0, 0),), ((0, 0),), (None,))
        groups, segments = (Group(),) * config.groups, (Segment(),) * config.segments
        memory = Memory(groups, segments, seq=JUMP, durable=0, epoch=1)
        left = (config.writes, config.commits, config.lives, config.cleans, config.holds, config.rooms)
        return State(disk, memory, 0, (), ((0, (0,) * config.groups),), left)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what may happen next, and the state after it."""
        memory, disk = state.memory, state.disk
        writes, commits, lives, cleans, holds, rooms = state.left
        if isinstance(memory, Opening):
            yield self._opened_further(state, memory)
        if memory is None:
            view = tuple(values[-1] for values in disk)
            yield "open", self._opening(state, view, None)
            if holds and view[self.head + 2] not in (None, TORN):
                yield "return to the held commit", self._opening(spent(state, 4), view, view[self.head + 2][0])
            return
        if lives:
            after = spent(state, 2)._replace(memory=None)
            yield "kill", after
            for image in self.images(disk):
                yield "power cut", after._replace(disk=tuple((value,) for value in image))
        if isinstance(memory, Opening):
            return
        if memory.queue:
            yield "log: write", self._landed(state, memory)
        if memory.commits or memory.phase != "idle":
            yield from self._committed(state, memory)
        for number in range(self.config.groups):
            group = memory.groups[number]
            if writes:
                if (written := self._written(memory, number, self.config.writes - writes + 1)) is not None:
                    yield f"write group {number}", spent(state, 0)._replace(memory=written)
                if memory.promised and (written := self._written(memory, number, -1, with_room=True)) is not None:
                    yield f"write group {number} with the room", spent(state, 0)._replace(memory=written)
            is_later = memory.appending and group.dirty == memory.epoch and self.has("epochs ignored")
            if group.dirty >= 0 and not is_later and (appended := self._appended(memory, number)) is not None:
                yield f"evict group {number}", state._replace(memory=appended)
            if cleans and (moved := self._moved(memory, number)) is not None:
                yield f"clean group {number}", spent(state, 3)._replace(memory=moved)
        if commits and not memory.appending:
            yield "begin a commit", self._begun(state, memory, hold=False)
            if holds and not memory.held and not any(commit.hold for commit in memory.commits):
                yield "begin a held commit", self._begun(spent(state, 4), memory, hold=True)
        if memory.held and memory.letting_go < 0:
            yield "let the held commit go; head: write 2", self._let_go(state, memory)
        if memory.letting_go >= 0:
            after = memory._replace(held=(), letting_go=-1)
            yield "head: sync", pruned(state._replace(disk=self._synced(disk, self.head), memory=after))
        if rooms and self._has_room(memory, 1):
            yield "make room", spent(state, 5)._replace(memory=memory._replace(promised=memory.promised + 1))

    def has(self, part: str) -> bool:
        """Return whether a part of the protocol is not left out."""
        return part not in self.faults

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _available(self, memory: Memory) -> list[int]:
        """Return the segments that may be written again."""
        commits = [memory.durable, *(commit.number for commit in memory.commits)]
        if not self.has("free before HEAD sync") and memory.phase == "sync":
            commits = [commit.number for commit in memory.commits]
        if self.has("held ignored"):
            commits += memory.held
        if not self.has("reuse at once"):
            commits = []
        unwritten = {write.segment for write in memory.queue} if self.has("unwritten ignored") else ()
        return [
            number
            for number, segment in enumerate(memory.segments)
            if segment.state == UNUSED
            or (
                segment.state == EMPTIED
                and number not in unwritten
                and not any(segment.opened_at <= commit < segment.emptied_at for commit in commits)
            )
        ]

    def _has_room(self, memory: Memory, groups: int, *, keeps: bool = True) -> bool:
        """Return whether more groups can become dirty, and all that are can be appended."""
        point = memory.changed
        left = (
            (self.config.chunks - point.chunk) * self.config.records - len(point.records) if point.segment >= 0 else 0
        )
        dirty = sum(group.dirty >= 0 for group in memory.groups)
        more = max(0, dirty + (memory.promised if keeps else 0) + groups - left)
        return -(-more // (self.config.chunks * self.config.records)) <= len(self._available(memory))

    def _put(self, memory: Memory, name: str, number: int) -> Memory | None:
        """Append a group's present version at a point; None if there is no segment."""
        point: Point = getattr(memory, name)
        if point.segment < 0:
            available = self._available(memory)
            if not available:
                return None
            segment = Segment(OPEN, memory.seq + 1, memory.epoch - memory.appending)
            point = Point(available[0])
            memory = memory._replace(segments=replaced(memory.segments, available[0], segment))
        group = memory.groups[number]
        address = (point.segment, point.chunk, len(point.records))
        point = point._replace(records=(*point.records, (number, group.version)))
        groups = replaced(memory.groups, number, Group(group.version, -1, address))
        memory = memory._replace(groups=groups, **{name: point})
        return self._sealed(memory, name) if len(point.records) == self.config.records else memory

    def _sealed(self, memory: Memory, name: str) -> Memory:
        """End a point's chunk, which goes to the disk with the next sequence number."""
        point: Point = getattr(memory, name)
        if not point.records:
            return memory
        seq = memory.seq + 1
        write = Write(point.segment, point.chunk, seq, memory.segments[point.segment].stamp, point.records)
        after = Point(point.segment, point.chunk + 1)
        memory = memory._replace(seq=seq, queue=(*memory.queue, write))
        if after.chunk < self.config.chunks:
            return memory._replace(**{name: after})
        segment = memory.segments[point.segment]._replace(state=CLOSED)
        memory = memory._replace(segments=replaced(memory.segments, point.segment, segment), **{name: Point()})
        return self._emptied(memory, point.segment)

    @staticmethod
    def _emptied(memory: Memory, number: int) -> Memory:
        """Note when a closed segment no longer has a live group."""
        segment = memory.segments[number]
        if segment.state != CLOSED or any(group.address and group.address[0] == number for group in memory.groups):
            return memory
        segment = segment._replace(state=EMPTIED, emptied_at=memory.epoch)
        return memory._replace(segments=replaced(memory.segments, number, segment))

    def _appended(self, memory: Memory, number: int) -> Memory | None:
        return self._put(memory, "changed", number)

    def _written(self, memory: Memory, number: int, version: int, *, with_room: bool = False) -> Memory | None:
        """Change a group; None if there is no room."""
        group = memory.groups[number]
        is_new = group.dirty != memory.epoch
        if is_new and not with_room and not self._has_room(memory, 1, keeps=self.has("promises ignored")):
            return None
        if memory.appending and group.dirty == memory.epoch - 1 and self.has("old version lost"):
            appended = self._appended(memory, number)
            if appended is None:
                return None
            memory, group = appended, appended.groups[number]
        if is_new and group.address is not None:
            memory = self._forgotten(memory, number)
        if is_new and with_room:
            memory = memory._replace(promised=memory.promised - 1)
        return memory._replace(groups=replaced(memory.groups, number, Group(version, memory.epoch)))

    def _forgotten(self, memory: Memory, number: int) -> Memory:
        """Drop a group's record."""
        group = memory.groups[number]
        assert group.address is not None
        segment, chunk, _ = group.address
        if (segment, chunk) == (memory.moved.segment, memory.moved.chunk) and self.has("moved not sealed"):
            memory = self._sealed(memory, "moved")
        memory = memory._replace(groups=replaced(memory.groups, number, group._replace(address=None)))
        return self._emptied(memory, segment)

    def _moved(self, memory: Memory, number: int) -> Memory | None:
        """Append the record of a group in a closed segment again, so that the segment empties."""
        address = memory.groups[number].address
        if address is None or memory.segments[address[0]].state != CLOSED:
            return None
        if any(write.segment == address[0] for write in memory.queue):
            return None
        if (
            memory.moved.segment < 0
            and self.has("cleaner takes room")
            and not self._has_room(memory, self._per_segment())
        ):
            return None
        memory = memory._replace(groups=replaced(memory.groups, number, memory.groups[number]._replace(address=None)))
        moved = self._put(memory, "moved", number)
        return None if moved is None else self._emptied(moved, address[0])

    def _per_segment(self) -> int:
        return self.config.chunks * self.config.records

    # ---- commits -----------------------------------------------------------------------------------------------------

    def _begun(self, state: State, memory: Memory, *, hold: bool) -> State:
        versions = tuple(group.version for group in memory.groups)
        after = memory._replace(
            commits=(*memory.commits, Commit(memory.epoch, hold)), epoch=memory.epoch + 1, appending=True
        )
        tables = (*state.tables, (memory.epoch, versions))
        return spent(state, 1)._replace(memory=after, tables=tables)

    def _committed(self, state: State, memory: Memory) -> Iterator[tuple[str, State]]:
        """Yield the next step of the thread that makes commits durable."""
        commit, disk = memory.commits[0] if memory.commits else None, state.disk
        if memory.phase == "idle":
            assert commit is not None
            late = [i for i, group in enumerate(memory.groups) if group.dirty == commit.number]
            if late:
                if (appended := self._appended(memory, late[0])) is not None:
                    yield "append for the commit", state._replace(memory=appended)
                return
            memory = self._sealed(self._sealed(memory, "changed"), "moved")
            commits = (commit._replace(seq=memory.seq), *memory.commits[1:])
            yield (
                "all is appended",
                state._replace(memory=memory._replace(commits=commits, appending=len(commits) > 1, phase="drain")),
            )
        elif memory.phase == "drain":
            assert commit is not None
            if not self.has("no drain") or all(write.seq > commit.seq for write in memory.queue):
                if self.has("no log sync"):
                    disk = self._synced(disk, 0, self.head)
                yield (
                    "log: sync" if self.has("no log sync") else "no sync",
                    state._replace(disk=disk, memory=memory._replace(phase="head")),
                )
        elif memory.phase == "head":
            assert commit is not None
            for slot in (0, 2) if commit.hold else (0,):
                disk = written(disk, self.head + slot, (commit.number, commit.seq))
            yield (
                "head: write 0; head: write 2" if commit.hold else "head: write 0",
                state._replace(disk=disk, memory=memory._replace(phase="sync")),
            )
        elif memory.phase == "sync":
            assert commit is not None
            phase = "copy" if self.has("one HEAD") else "idle"
            held = (commit.number,) if commit.hold else memory.held
            after = memory._replace(durable=commit.number, held=held, commits=memory.commits[1:], phase=phase)
            known = (commit.number,) if commit.hold else state.held
            yield (
                "head: sync",
                pruned(
                    state._replace(disk=self._synced(disk, self.head), memory=after, acked=commit.number, held=known)
                ),
            )
        elif memory.phase == "copy":
            newest = disk[self.head][-1]
            phase = "copy sync" if self.has("copy not synced") else "idle"
            after = memory._replace(phase=phase)
            yield "head: write 1", state._replace(disk=written(disk, self.head + 1, newest), memory=after)
        else:
            after = memory._replace(phase="idle")
            yield "head: sync", state._replace(disk=self._synced(disk, self.head), memory=after)

    def _let_go(self, state: State, memory: Memory) -> State:
        disk = written(state.disk, self.head + 2, None)
        if self.has("held slot not synced"):
            return state._replace(disk=disk, memory=memory._replace(letting_go=memory.held[0]), held=())
        return state._replace(disk=disk, memory=memory._replace(held=()), held=())

    def _landed(self, state: State, memory: Memory) -> State:
        write, *queue = memory.queue
        sector = 2 * (write.segment * self.config.chunks + write.chunk)
        numbers = tuple(number for number, _ in write.records)
        disk = written(state.disk, sector, (write.seq, write.stamp, numbers))
        disk = written(disk, sector + 1, (write.stamp, write.records))
        return state._replace(disk=disk, memory=memory._replace(queue=tuple(queue)))

    # ---- the disk ----------------------------------------------------------------------------------------------------

    def _synced(
        self, disk: tuple[tuple[Any, ...], ...], begin: int, end: int | None = None
    ) -> tuple[tuple[Any, ...], ...]:
        """Return a disk on which a file's last writes are durable."""
        return (
            *disk[:begin],
            *((values[-1:]) for values in disk[begin:end]),
            *(disk[end:] if end is not None else ()),
        )

    def images(self, disk: tuple[tuple[Any, ...], ...]) -> Iterator[tuple[Any, ...]]:
        """Yield what a power cut may leave: of each sector any of its values, or of HEAD a torn one."""
        kept = [values if at < self.head or len(values) == 1 else (*values, TORN) for at, values in enumerate(disk)]
        return product(*kept)

    def _outcomes(self, disk: tuple[tuple[Any, ...], ...]) -> frozenset[tuple[Any, Any, Any]]:
        """Return what is found after a power cut: the commit, its versions, and the held commit with its own."""
        found = set()
        for image in self.images(disk):
            held = image[self.head + 2]
            opened = self.recovered(image, None)
            kept = None if held in (None, TORN) else (held[0], self.recovered(image, held[0]).versions)
            found.add((opened.commit, opened.versions, kept))
        return frozenset(found)

    def _recovered(self, image: tuple[Any, ...], wanted: int | None) -> Recovered:
        """Return what opening finds: the newest commit, or the wanted one."""
        heads = [head for head in image[self.head :] if head not in (None, TORN)]
        if not heads:
            return Recovered(-1)
        newest = max(heads)
        commit, last = newest if wanted is None else next(head for head in heads if head[0] == wanted)
        chunks, rejected, highest, stamps = [], [], 0, [0] * self.config.segments
        for segment in range(self.config.segments):
            before = 0
            for chunk in range(self.config.chunks):
                at = 2 * (segment * self.config.chunks + chunk)
                if image[at] is None or image[at][0] <= before or (chunk and image[at][1] != stamps[segment]):
                    break
                before, stamp, numbers = image[at]
                highest = max(highest, before)
                if before > last:
                    rejected.append(at)
                    break
                stamps[segment] = stamp
                chunks.append((before, segment, chunk, numbers))
        if len({chunk[0] for chunk in chunks}) < len(chunks):
            return Recovered(commit, last, newest)  # their order is not known
        index: list[tuple[int, int, int] | None] = [None] * self.config.groups
        needed: frozenset[int] = frozenset()
        held = image[self.head + 2]
        is_held = held not in (None, TORN) and held[0] <= commit
        for seq, segment, chunk, numbers in [*sorted(chunks), (last + 1, -1, -1, ())]:
            if is_held and not needed and held[1] < seq:
                needed = frozenset(address[0] for address in index if address)
            for place, number in enumerate(numbers):
                index[number] = (segment, chunk, place)
        versions = []
        for number, address in enumerate(index):
            stamp, records = (
                (0, ()) if address is None else image[2 * (address[0] * self.config.chunks + address[1]) + 1] or (0, ())
            )
            is_sound = address is not None and stamp == stamps[address[0]] and address[2] < len(records)
            is_sound = is_sound and records[address[2]][0] == number  # type: ignore[index]
            versions.append(0 if address is None else records[address[2]][1] if is_sound else -1)
        is_copied = image[self.head + 1] not in (None, TORN) and image[self.head + 1][0] == newest[0]
        return Recovered(
            commit,
            last,
            newest,
            tuple(versions),
            tuple(index),
            tuple(rejected),
            highest,
            tuple(stamps),
            needed,
            (held[0],) if is_held else (),
            is_copied,
        )

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _opening(self, state: State, view: tuple[Any, ...], wanted: int | None) -> State:
        """Return a state in which a log is being opened, as the page cache has it."""
        found = self.recovered(view, wanted)
        commit, sync = found.commit, ("sync",)
        steps: list[Any] = [sync] if self.has("no sync of what was found") else []
        if not found.is_copied and self.has("one HEAD"):
            steps += [("head", 1, found.newest), sync]
        tables = state.tables
        if found.newest[0] > commit:  # a return is a commit
            tables = (*tables, (found.newest[0] + 1, dict(tables)[commit]))
            commit = found.newest[0] + 1
            steps += [("head", 0, (commit, found.last)), sync, ("head", 1, (commit, found.last)), sync]
        if self.has("rejected stay"):
            steps += [("zero", at) for at in found.rejected]
        live = {address[0] for address in found.index if address}
        segments = tuple(
            Segment(
                CLOSED if number in live else EMPTIED if number in found.needed else UNUSED,
                found.stamps[number],
                0 if number in found.needed else commit,
                commit,
            )
            for number in range(self.config.segments)
        )
        groups = tuple(
            Group(version, -1, address) for version, address in zip(found.versions, found.index, strict=True)
        )
        seq = max(found.highest, found.last) + JUMP if self.has("no jump") else found.last
        memory = Memory(groups, segments, seq, commit, commit + 1, found.held)
        return state._replace(memory=Opening(tuple(steps), memory), tables=tables)

    def _opened_further(self, state: State, opening: Opening) -> tuple[str, State]:
        if not opening.steps:
            memory = opening.then
            tables = tuple(each for each in state.tables if each[0] <= memory.durable)  # what was begun later is gone
            return "is open", pruned(
                state._replace(memory=memory, acked=memory.durable, held=memory.held, tables=tables)
            )
        (what, *about), *steps = opening.steps
        disk, label = state.disk, "head: sync"
        if what == "sync":
            disk = self._synced(disk, self.head)
        elif what == "head":
            disk, label = written(disk, self.head + about[0], about[1]), f"head: write {about[0]}"
        else:
            disk, label = written(disk, about[0], None), "log: write"
        return label, state._replace(disk=disk, memory=opening._replace(steps=tuple(steps)))

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def problem(self, state: State) -> str | None:
        """Return what is wrong in a state."""
        tables, memory = dict(state.tables), state.memory
        for commit, versions, held in self.outcomes(state.disk):
            if commit < state.acked or tables.get(commit) != versions:
                return f"a power cut leaves commit {commit} as {versions}, not one of {tables} from {state.acked} on"
            is_missing = state.held and (held is None or held[0] != state.held[0])
            if is_missing or (held is not None and held[0] <= commit and held[1] != tables.get(held[0])):
                return f"a power cut leaves held commit {held}, not {state.held} of {tables}"
        if not isinstance(memory, Memory):
            return None
        for number, group in enumerate(memory.groups):
            if group.address is not None and self._read(state.disk, memory, group.address) != (number, group.version):
                return f"group {number} is read as {self._read(state.disk, memory, group.address)}, not {group.version}"
        if self.config.records == 1 and not self._has_room(memory, 0):
            return "there is no room for changes that were allowed"
        return None

    def _read(self, disk: tuple[tuple[Any, ...], ...], memory: Memory, address: tuple[int, int, int]) -> Any:
        """Return the record at an address: from a buffer, or from the disk."""
        segment, chunk, place = address
        for point in (memory.changed, memory.moved):
            if (point.segment, point.chunk) == (segment, chunk):
                return point.records[place]
        for write in memory.queue:
            if (write.segment, write.chunk) == (segment, chunk):
                return write.records[place]
        stamp, records = disk[2 * (segment * self.config.chunks + chunk) + 1][-1] or (0, ())
        return records[place] if stamp == memory.segments[segment].stamp and place < len(records) else None


class Recovered(NamedTuple):
    """A log as opening finds it."""

    commit: int
    last: int = 0
    newest: tuple[int, int] = (0, 0)
    versions: tuple[int, ...] = ()  # -1 for a record that is not the right one
    index: tuple[tuple[int, int, int] | None, ...] = ()
    rejected: tuple[int, ...] = ()
    highest: int = 0
    stamps: tuple[int, ...] = ()
    needed: frozenset[int] = frozenset()  # segments, by the held commit
    held: tuple[int, ...] = ()
    is_copied: bool = False


def replaced(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def written(disk: tuple[tuple[Any, ...], ...], sector: int, value: Any) -> tuple[tuple[Any, ...], ...]:
    """Return a disk with one more value of a sector that is in the page cache."""
    values = disk[sector]
    return disk if values[-1] == value else replaced(disk, sector, (*values, value))


def spent(state: State, what: int) -> State:
    return state._replace(left=replaced(state.left, what, state.left[what] - 1))


def pruned(state: State) -> State:
    """Return a state without the tables of commits that can no longer be found."""
    memory = state.memory
    kept = {*state.held}
    if isinstance(memory, Memory):
        kept |= {*memory.held, memory.letting_go}
    return state._replace(tables=tuple(sorted({(c, v) for c, v in state.tables if c >= state.acked or c in kept})))


def search(model: Model, first: State | None = None) -> int:
    """Visit every state that can be reached, the nearest first; return how many there are.

    Args:
        model: of the protocol.
        first: a state of it; by default a log that was just made.

    Raises:
        Violation: in one of them a promise is broken.
    """
    first = first or model.initial()
    ways: dict[State, tuple[State | None, str]] = {first: (None, "")}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        for step, after in model.successors(state):
            if after in ways:
                continue
            ways[after] = (state, step)
            if (problem := model.problem(after)) is not None:
                raise Violation("\n".join([problem, *reversed(way(ways, after))]))
            waiting.append(after)
    return len(ways)


def way(ways: dict[State, tuple[State | None, str]], state: State) -> list[str]:
    """Return the steps to a state, the last one first."""
    steps, at = [], state
    while (before := ways[at][0]) is not None:
        steps.append(ways[at][1])
        at = before
    return steps


def play(model: Model, state: State, *steps: str) -> State:
    """Return the state after some steps, by their names."""
    for step in steps:
        state = next(after for name, after in model.successors(state) if name == step)
    return state
