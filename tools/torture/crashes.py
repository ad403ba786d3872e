"""Row logs on a disk that loses power at any instant, repeatedly: each reopens at a complete commit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torture.attack import Attack, Broken
from torture.log_lives import Commit, Entry, Hold, Log, Timeline, check, created, report
from torture.log_rows import Shape, State
from torture.platter import Platter

__all__ = ["ATTACK", "Story"]

_SECTOR = 4096
_MOST_BYTES = 7000  # of a group, so that it stays below an eighth of a segment


class Story:
    """A log through several lives, each of which ends in a kill or a power cut.

    Args:
        draw: of everything.
        faults: parts of the protocol that are switched off.
        looks: crashes per life whose images are opened, besides the one that ends it.

    Attributes:
        counts: lives, and images that were opened, by kind.
    """

    def __init__(self, draw: random.Random, *, faults: int = 0, looks: int = 12) -> None:
        self.draw, self.faults, self.looks = draw, faults, looks
        self.counts: Counter[str] = Counter()
        self.clock = 0  # of steps and commits, over all lives
        self.slots = draw.choice([12, 20, 60])
        shape = _shape(draw)
        self.files = created(b"commit 0") | {"side": b""}
        self.platter = Platter({name: bytearray(data) for name, data in self.files.items()})
        self.timeline = Timeline([Commit(b"commit 0", 0, State.initial(shape), acknowledged=0)], [(0, shape)])

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def rest(self, deeds: int) -> dict[str, bytes]:
        """Run without a crash, and commit; return the files."""
        events = self._life(deeds, closing=True)
        for number in range(len(events)):
            report(events, number, self.platter)
        return self.platter.killed(self.draw)[1]

    def live(self, deeds: int) -> None:
        """Run until a crash; check the images of other possible crashes, and of this one."""
        events = self._life(deeds)
        crash = self.draw.randrange(len(events) + 1) if self.draw.random() < 0.7 else len(events)
        looks = sorted(self.draw.choices(range(crash + 1), k=self.looks))
        for length in range(crash + 1):
            if length:
                report(events, length - 1, self.platter)
            while looks and looks[0] == length:
                self._look(self.platter.cut(self.draw), length)
                looks.pop(0)
        if self.draw.random() < 0.4:
            self.platter, self.files = self.platter.killed(self.draw)
        else:
            self.files = self.platter.cut(self.draw)
            self.platter = Platter({name: bytearray(data) for name, data in self.files.items()})
        self._look(self.files, crash)
        self.timeline = self.timeline.after_crash(crash)
        self.counts["lives"] += 1

    def _life(self, deeds: int, *, closing: bool = False) -> list[Entry]:
        """Live; return the journal."""
        try:
            return _Life(self).played(deeds, closing=closing)
        except (OSError, RuntimeError, ValueError) as error:
            raise Broken(f"a log fails while nothing is wrong\n{type(error).__name__}: {error}") from error

    def _look(self, files: dict[str, bytes], length: int) -> None:
        """Open an image, and sometimes the image of a crash inside its recovery."""
        options: dict[str, Any] = {"slots": self.slots, "faults": self.faults}
        held = self.timeline.held_at(length)
        if held and self.draw.random() < 0.3:
            one = self.draw.choice(held)
            check(files, self.timeline, length, commit=one, writable=False, **options)
            self.counts["held commits"] += 1
        elif self.draw.random() < 0.5:
            check(files, self.timeline, length, writable=False, **options)
            self.counts["images, read"] += 1
        else:
            events = check(files, self.timeline, length, writable=True, journal=True, **options)
            self.counts["images, written"] += 1
            again = Platter({name: bytearray(data) for name, data in files.items()})
            for number in range(self.draw.randrange(len(events) + 1)):
                report(events, number, again)
            check(again.cut(self.draw), self.timeline, length, writable=False, **options)
            self.counts["crashes in recovery"] += 1


class _Life:
    """One life of a story's log: its operations, and their records in the timeline."""

    def __init__(self, story: Story) -> None:
        self.story, self.draw, self.timeline = story, story.draw, story.timeline
        if self.draw.random() < 0.15:
            self.timeline.shapes = [(0, self._changed())]
        back = self.draw.choice(self.timeline.holds) if self.timeline.holds and self.draw.random() < 0.2 else None
        self.log = self._opened() if back is None else self._opened_at(back.commit)
        base = self.timeline.opened(self.log.engine.head, self.length)
        self.state = base.state.in_shape(self.timeline.shape)
        self.pieces = base.pieces
        self.end = len(story.files["side"])
        self.open: Commit | None = None  # the commit that has been begun last and is not known to be durable
        self.hold: Commit | None = None
        known = {hold.commit.number for hold in self.timeline.holds}
        for number in self.log.engine.held:
            if number not in known:
                self.log.engine.let_go(number)

    def _changed(self) -> Shape:
        """Return a shape with one more column, or with a column that starts over."""
        shape = self.timeline.shape
        is_wider = shape.group_bytes < _MOST_BYTES and self.draw.random() < 0.6
        return shape.grown(8 * self.draw.randrange(1, 40)) if is_wider else shape.reborn(0)

    @property
    def length(self) -> int:
        return len(self.log.journal())

    def _opened(self, **options: Any) -> Log:
        story, shape = self.story, self.timeline.shape
        given = {"slots": story.slots, "writable": True, "journal": True, "faults": story.faults, **options}
        return Log(story.files, shape, **given)

    def _opened_at(self, one: Commit) -> Log:
        """Open the log at a held commit, unless a later one is held; then at its last."""
        with self._opened() as log:
            held = log.engine.held
        if max(held) <= one.number:
            self.timeline.commits.append(replace(one, begun=0, acknowledged=None))
            return self._opened(commit=one.number)
        with suppress(ValueError), self._opened(commit=one.number):
            raise Broken("a log is opened for writing at a commit before one that is held")
        return self._opened()

    def played(self, deeds: int, *, closing: bool) -> list[Entry]:
        """Do something many times, and return the journal."""
        ways = (
            [self.write] * 6
            + [self.look] * 2
            + [self.commit] * 2
            + [self.begin] * 2
            + [self.burst, self.held, self.let_go, self.change]
        )
        with self.log:
            for _ in range(deeds):
                self.draw.choice(ways)()
                if self.open is not None and self.log.engine.durable >= self.open.number:
                    self._acknowledged()
            if closing:
                self.commit()
            self.story.counts["segments cleaned"] += self.log.engine.stats()["segments_cleaned"]
        return self.log.journal()

    def write(self) -> None:
        groups, step = self.state.drawn(self.draw, self.most), self.story.tick()
        self.log.write(groups, step)
        self.state.steps[groups] = step

    @property
    def most(self) -> int:
        return max(1, self.log.engine.num_slots // 4)

    def look(self) -> None:
        groups = self.state.drawn(self.draw, self.most)
        self.log.compare(groups, self.state)

    def burst(self) -> None:
        """Commit a few groups many times, so that segments empty and are cleaned."""
        for _ in range(6):
            self.write()
            self.commit()

    def begin(self, hold: bool = False) -> None:
        """Begin a commit, and go on while it is written."""
        self.wait()
        head = b"commit %d" % self.story.tick()
        writes = [] if self.draw.random() < 0.3 else [self.piece(head)]
        one = Commit(head, 0, State(self.state.steps.copy(), self.state.layout), self.pieces, begun=self.length)
        self.timeline.commits.append(one)
        one.number = self.log.engine.begin_commit(head, hold=hold, files=writes)
        self.open, self.hold = one, one if hold else None

    def piece(self, head: bytes) -> tuple[int, int, Tensor]:
        """Return what the next commit writes outside the log, in separate sectors."""
        at, piece = -(-self.end // _SECTOR) * _SECTOR, head * self.draw.choice([1, 30, 2000])
        self.pieces, self.end = {**self.pieces, at: piece}, at + len(piece)
        return self.log.fds["side"], at, torch.frombuffer(bytearray(piece), dtype=torch.uint8)

    def wait(self) -> None:
        if self.open is not None:
            self.log.engine.wait(self.open.number)
            self._acknowledged()

    def _acknowledged(self) -> None:
        assert self.open is not None
        self.open.acknowledged = self.length
        if self.hold is not None:
            self.timeline.holds.append(Hold(self.hold, self.length))
        self.open = self.hold = None

    def change(self) -> None:
        """Continue in a new shape, while a commit may be under way."""
        self.timeline.shapes.append((self.length, self._changed()))
        self.log.change(self.timeline.shape)
        self.state = self.state.in_shape(self.timeline.shape)

    def commit(self) -> None:
        self.begin()
        self.wait()

    def held(self) -> None:
        """Hold a commit; release the previous one when two are held."""
        self.wait()
        if len(self.log.engine.held) == 2:
            self.let_go()
        self.begin(hold=True)
        self.wait()

    def let_go(self) -> None:
        self.wait()
        held = [hold for hold in self.timeline.holds if hold.until == float("inf")]
        if held:
            held[0].until = self.length
            self.log.engine.let_go(held[0].commit.number)


def _shape(draw: random.Random) -> Shape:
    columns = draw.choice([(256,), (264, 40), (1032,), (512, 512, 512), (4096,)])
    return Shape(draw.choice([3, 10, 40, 150]), columns, (0,) * len(columns), (tuple(range(len(columns))),))


def _round(seed: int, folder: Path) -> Mapping[str, int]:
    story = Story(random.Random(seed))
    for _ in range(4):
        story.live(story.draw.choice([5, 20, 60]))
    return story.counts


ATTACK = Attack(
    name="crashes",
    promise="a log of rows is found at its last durable commit, or a later one, as a whole, wherever power was lost",
    round=_round,
    seconds=120.0,
    quick=4,
)
