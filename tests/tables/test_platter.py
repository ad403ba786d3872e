"""The adversarial disk of the crash tests: synced bytes stay, everything else may be there, in part or not at all."""

from __future__ import annotations

import random

import pytest
from torture.platter import Platter

pytestmark = pytest.mark.release

OLD, NEW = b"o" * 1024, b"n" * 1024


def cuts(platter: Platter, count: int = 400) -> set[bytes]:
    return {platter.cut(random.Random(seed))["file"] for seed in range(count)}


def written(synced: bool) -> Platter:
    platter = Platter({"file": bytearray(OLD)})
    platter.write(1, "file", 0, NEW)
    platter.done(1)
    if synced:
        platter.sync(2, "file")
        platter.done(2)
    return platter


def test_synced_write_is_in_every_image():
    assert cuts(written(synced=True)) == {NEW}


def test_unsynced_sectors_arrive_in_any_combination():
    """Whole, one of two, none, and torn somewhere inside a sector."""
    found = cuts(written(synced=False))
    assert {NEW, OLD, NEW[:512] + OLD[512:], OLD[:512] + NEW[512:]} <= found
    assert any(image[:512] not in (OLD[:512], NEW[:512]) for image in found)


def test_sync_covers_only_writes_that_had_returned_and_only_their_file():
    platter = Platter({"file": bytearray(OLD), "other": bytearray(OLD)})
    platter.write(1, "file", 0, NEW)
    platter.write(2, "other", 0, NEW)
    platter.done(2)
    platter.sync(3, "file")
    platter.done(1)
    platter.done(3)
    assert {OLD, NEW} <= cuts(platter)
    assert OLD in {platter.cut(random.Random(seed))["other"] for seed in range(50)}


def test_write_during_a_sync_is_not_durable():
    platter = written(synced=False)
    platter.sync(2, "file")
    platter.write(3, "file", 512, b"x" * 512)
    platter.done(3)
    platter.done(2)
    assert {NEW, NEW[:512] + b"x" * 512} <= cuts(platter)
    assert all(image.startswith(NEW[:512]) for image in cuts(platter))


def test_earlier_of_two_writes_to_a_sector_may_be_the_one_that_arrives():
    platter = Platter({"file": bytearray(512)})
    for number, fill in enumerate((b"a", b"b"), start=1):
        platter.write(number, "file", 0, fill * 512)
        platter.done(number)
    assert {bytes(512), b"a" * 512, b"b" * 512} <= cuts(platter)


def test_room_that_was_allocated_may_be_there_or_not():
    platter = Platter({"file": bytearray(b"x")})
    platter.allocate(1, "file", 4096)
    platter.done(1)
    assert {len(image) for image in cuts(platter)} == {1, 4096}


def test_killed_process_leaves_what_it_wrote_and_that_may_still_be_lost():
    """The next process reads every write that had returned; none of them is durable by that."""
    platter = written(synced=False)
    platter.write(2, "file", 1024, NEW)  # does not return
    lengths = set()
    for seed in range(50):
        after, seen = platter.killed(random.Random(seed))
        assert seen["file"].startswith(NEW)
        assert seen["file"][1024:] == NEW[: len(seen["file"]) - 1024]
        lengths.add(len(seen["file"]))
        assert {OLD, NEW} <= {image[:1024] for image in cuts(after)}
        after.sync(3, "file")
        after.done(3)
        assert cuts(after, 20) == {seen["file"]}
    assert {1024, 2048} < lengths
