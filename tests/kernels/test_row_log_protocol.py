"""The row log's protocol as a model: every state keeps the promises, every part is needed, and the code agrees."""

from __future__ import annotations

import errno
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from row_log_model import Log
from row_log_protocol import FAULTS, Config, Memory, Model, Violation, play, search
from torture.log_lives import report
from torture.platter import Platter

SMALL = {
    "crashes": Config(lives=1, cleans=1),
    "held": Config(groups=1, chunks=1, writes=3, commits=3, holds=1),
    "records": Config(chunks=1, records=2, cleans=1),
    "rooms": Config(segments=2, chunks=1, cleans=1, rooms=1),
    "writes": Config(groups=1, segments=2, chunks=1, writes=3, lives=1),
}
LARGE = {
    "held": SMALL["held"],
    "lives": Config(groups=1, segments=2, commits=3, lives=2),
    "returns": Config(groups=1, chunks=1, lives=1, holds=2),
    "records": Config(chunks=1, records=2, commits=3, lives=1, cleans=1),
    "rooms": Config(segments=2, chunks=1, writes=3, cleans=1, rooms=1),
}
CAUGHT_BY = {
    "reuse at once": "writes",
    "free before HEAD sync": "writes",
    "held ignored": "held",
    "held slot not synced": "held",
    "moved not sealed": "records",
    "unwritten ignored": "writes",
    "cleaner takes room": "rooms",
    "promises ignored": "rooms",
}


def test_every_state_keeps_the_promises() -> None:
    states = {name: search(Model(SMALL[name])) for name in ("crashes", "records", "rooms")}
    assert sum(states.values()) > 100_000, states


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("config", LARGE.values(), ids=LARGE)
def test_every_state_of_larger_logs_keeps_the_promises(config: Config) -> None:
    assert search(Model(config)) > 40_000


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "no jump"])
def test_no_part_of_the_protocol_can_be_left_out(fault: str) -> None:
    with pytest.raises(Violation) as found:
        search(Model(SMALL[CAUGHT_BY.get(fault, "crashes")], fault))
    assert len(str(found.value).splitlines()) < 40


def test_sequence_numbers_have_to_jump() -> None:
    """A dead process's chunks, behind a segment's first one, would follow the one that is written there next."""
    steps = ["write group 0", "write group 1", "begin a commit", "append for the commit", "append for the commit"]
    steps += ["all is appended", "log: write", "log: write", "log: sync"]
    steps += ["head: write 0", "head: sync", "head: write 1", "head: sync"]
    steps += ["write group 0", "evict group 0", "write group 1", "evict group 1", "log: write", "log: write"]
    steps += ["kill", "open", "head: sync", "log: write", "is open"]
    for faults in ((), ("no jump",)):
        model = Model(Config(writes=5, lives=1, cleans=1), *faults)
        state = play(model, model.initial(), *steps)
        if not faults:
            assert search(model, state) > 500
        else:
            with pytest.raises(Violation, match=re.escape("a power cut leaves commit 2 as ()")):
                search(model, state)


# ---- the model and the code ------------------------------------------------------------------------------------------


class Pair:
    """A log and its model, in lockstep.

    Args:
        folder: for the log's files.
        faults: parts that both leave out, as the model and the log name them.
    """

    GROUP_BYTES, SLOT_BYTES = 4096, 65536

    def __init__(self, folder: Path, **faults: int) -> None:
        config = Config(segments=5, chunks=1, records=2, writes=99, commits=99, lives=99, holds=99)
        self.model = Model(config, *faults)
        self.states, self.calls, self.counts = [self.model.initial()], list[str](), [0]
        self.entries = list[tuple[str, str, int, Any]]()  # of the log's journal, over all of its lives
        self.log = Log(folder, 2, self.GROUP_BYTES, journal=True, faults=sum(faults.values()))
        self.first = -len(self.log.log.journal())  # entries of former lives; being opened for the first time is none
        self.files = {name: (folder / name).read_bytes() for name in ("log", "HEAD")}

    @property
    def memory(self) -> Memory:
        memory = self.states[-1].memory
        assert isinstance(memory, Memory)
        return memory

    def step(self, name: str) -> None:
        """Let the model take a step."""
        self.states.append(play(self.model, self.states[-1], name))
        self.calls += re.findall(r"(?:log|head): \w+(?: \d)?", name)
        self.counts.append(len(self.calls))

    def agree(self) -> None:
        """Require that the log makes the calls that the model makes, and no other ones."""
        deadline = time.monotonic() + 20
        while True:
            for file, call, at, data in self.log.log.journal():
                self.entries.append((file, call, at + self.first if call == "done" else at, data))
            made = [self._name(*entry) for entry in self.entries if entry[1] in ("write", "sync")]
            if len(made) >= len(self.calls) or time.monotonic() > deadline:
                assert made == self.calls
                return

    def _name(self, file: str, call: str, at: int, data: object) -> str:
        slot = f" {at // self.SLOT_BYTES}" if (file, call) == ("head", "write") else ""
        return f"{file}: {call}{slot}"

    def write(self, group: int) -> None:
        self.step(f"write group {group}")
        self.log.put(torch.tensor([group]), self.value(group, self.memory.groups[group].version))

    def value(self, group: int, version: int) -> int:
        return 100 + version if version else self.log.initial(group)

    def commit(self, *, hold: bool = False, fails: bool = False) -> None:
        """Commit; or, if it fails, until the log would be synced."""
        self.step("begin a held commit" if hold else "begin a commit")
        while self.memory.commits or self.memory.phase != "idle":
            names = [name for name, _ in self.model.successors(self.states[-1])]
            step = next(
                name for name in names if name.startswith(("append", "all", "log", "head: write", "head: sync", "no"))
            )
            if fails and step == "log: sync":
                self.log.log.fail("sync", 0, errno.EIO)
                break
            self.step(step)
        number = self.log.begin_commit(hold=hold)
        with pytest.raises(OSError, match="injected") if fails else nullcontext():
            self.log.log.wait(number)
        self.agree()

    def let_go(self) -> None:
        self.log.log.let_go(self.memory.held[0])
        self.step("let the held commit go; head: write 2")
        self.step("head: sync")
        self.agree()

    def reopen(self, *, returns: bool = False) -> None:
        """Let the writer be killed, and open the log again."""
        held = self.memory.held[0] if returns else None
        self.log.log.close()
        self.agree()
        self.first = len(self.entries)
        self.step("kill")
        self.step("return to the held commit" if returns else "open")
        while not isinstance(self.states[-1].memory, Memory):
            names = [name for name, _ in self.model.successors(self.states[-1])]
            self.step(next(name for name in names if name not in ("kill", "power cut")))
        self.log.open(commit=held)
        self.agree()
        assert (self.log.log.durable, tuple(self.log.log.held)) == (self.memory.durable, self.memory.held)
        versions = enumerate(group.version for group in self.memory.groups)
        self.log.rows = {group: self.value(group, version) for group, version in versions if version}
        self.log.check_all()

    def do_anything(self, draw: random.Random) -> None:
        """Run one of the possible operations."""
        ways: list[Callable[[], None]] = [lambda: self.write(draw.randrange(2))] * 3 + [self.commit, self.reopen]
        if self.model.has("no log sync"):
            ways.append(self.fail)
        if self.memory.held:
            ways += [self.let_go, lambda: self.reopen(returns=True)]
        else:
            ways.append(lambda: self.commit(hold=True))
        draw.choice(ways)()

    def fail(self) -> None:
        self.commit(fails=True)
        self.reopen()

    def images(self, draw: random.Random) -> Iterator[tuple[dict[str, bytes], set[tuple[int, tuple[int, ...]]]]]:
        """Yield what power cuts leave, and what the model allows them to: commits, and the values of the groups."""
        platter = Platter({"log": bytearray(self.files["log"]), "head": bytearray(self.files["HEAD"])})
        begun = done = 0
        for number, (_, call, _, _) in enumerate(self.entries):
            report(self.entries, number, platter)
            begun += call in ("write", "sync")
            done += call == "done"
            done -= call == "done" and self.entries[self.entries[number][2]][1] == "allocate"
            allowed = {
                (commit, tuple(self.value(group, version) for group, version in enumerate(versions)))
                for state, before, count in zip(self.states, [0, *self.counts], self.counts, strict=False)
                if done <= count and (count <= begun or before < begun)  # a step may make two calls
                for commit, versions, _ in self.model.outcomes(state.disk)
            }
            yield platter.cut(draw), allowed


@pytest.mark.parametrize("seed", range(6))
def test_the_log_does_what_the_model_does(tmp_path: Path, seed: int) -> None:
    """The same calls in the same order, the same rows after a kill, and an allowed image after a power cut."""
    draw, pair = random.Random(seed), Pair(tmp_path)
    for _ in range(14):
        pair.do_anything(draw)
    pair.log.close()
    found = Counter[int]()
    (tmp_path / "cut").mkdir()
    for image, allowed in pair.images(draw):
        for name, data in image.items():
            (tmp_path / "cut" / name.replace("head", "HEAD")).write_bytes(data)
        log = Log(tmp_path / "cut", 2, Pair.GROUP_BYTES, writable=False)
        with log.bring(torch.arange(2)) as bringing:
            values = tuple(log.cache[log.take(bringing)][:, 0].tolist())
        assert (log.log.durable, values) in allowed
        found[log.log.durable] += 1
        log.close()
    assert len(found) > 2


@pytest.mark.parametrize("faults", [{"no log sync": 1}, {"one HEAD": 4}, {"rejected stay": 8}], ids=str)
def test_the_log_leaves_out_what_the_model_leaves_out(tmp_path: Path, faults: dict[str, int]) -> None:
    draw, pair = random.Random(7), Pair(tmp_path, **faults)
    for _ in range(12):
        pair.do_anything(draw)
    pair.log.close()
