"""The row log against a plain dictionary: it always holds what was last written or committed."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from row_log_model import SEGMENT_BYTES, Log
from torch import Tensor

from speedswap.kernels import RowLayout


def some_rows(log: Log, rng: random.Random) -> Tensor:
    count = log.groups * log.per_group
    wanted = rng.randint(1, max(1, min(log.log.num_slots // 4, count)))
    return torch.tensor(rng.sample(range(count), wanted))


def anything(log: Log, rng: random.Random) -> None:
    """Run one random operation."""
    rows, chance = some_rows(log, rng), rng.random()
    if chance < 0.25:
        log.check(torch.cat([rows, rows[:3]]))
    elif chance < 0.75:
        log.put(rows, rng.randrange(256), overwrite=log.per_group == 1 and rng.random() < 0.3)
    elif chance < 0.8:  # prefetched, written, then taken
        ahead = log.log.bring(rows, ahead=True)
        log.put(some_rows(log, rng), rng.randrange(256))
        if ahead is not None:
            with ahead:
                np.testing.assert_array_equal(log.cache[log.take(ahead)], log.expected(rows))
    elif chance < 0.92:
        if not log.log.appending:
            hold = rng.random() < 0.3
            if hold:
                log.log.wait(max(log.commits))
            commit = log.begin_commit(hold=hold and len(log.log.held) < 2)
            if rng.random() < 0.5:
                log.log.wait(commit)
    elif chance < 0.94:
        scanned = {}
        for groups, records, _ in log.log.scan(rng.choice([1, 50, 1000])):
            rows_of_groups = records.view(len(groups), log.per_group, log.row_bytes)
            assert (rows_of_groups == rows_of_groups[..., :1]).all()
            found = dict(zip(groups.tolist(), rows_of_groups[..., 0].tolist(), strict=True))
            assert not found.keys() & scanned.keys()
            scanned |= found
        assert {row: scanned[row // log.per_group][row % log.per_group] for row in log.rows} == log.rows
        for commit in log.log.held:
            then, (changed, moved) = log.commits[commit], log.log.changed_since(commit)
            found = {*changed.tolist(), *moved.tolist()}
            assert {row for row in log.rows if log.rows[row] != then.get(row)} <= found
    elif chance < 0.95:
        if log.log.held:
            log.go_back(rng.choice(log.log.held))
    elif chance < 0.965:
        for commit in log.log.held[: rng.randint(0, 2)]:
            log.log.let_go(commit)
    elif chance < 0.98:
        log.reopen()
    else:  # a crash, seen from a copy of the files; then on with the copy
        log.log.wait(max(log.commits))  # a copy made during a commit would be of several instants
        for name in ("HEAD", "log"):
            shutil.copy(log.folder / name, log.folder / f"{name}.copy")
        log.close()
        for name in ("HEAD", "log"):
            os.replace(log.folder / f"{name}.copy", log.folder / name)
        log.files = [os.open(log.folder / name, os.O_RDWR) for name in ("log", "HEAD")]
        log.open()
        log.return_to(log.log.durable)


SHAPES = [(40, 4, 64), (1000, 60, 4), (400, 129, 2), (3000, 512, 1), (300, 1501, 1), (100, 5000, 1), (9000, 300, 1)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("groups, row_bytes, per_group", SHAPES)
@pytest.mark.parametrize("direct", [True, False])
def test_any_sequence_of_calls_holds_what_a_dictionary_holds(
    tmp_path: Path, groups: int, row_bytes: int, per_group: int, direct: bool
) -> None:
    """Rows read back as written, and a reopened or crashed log returns to its last commit."""
    for seed in range(2):
        rng = random.Random(f"{row_bytes} {seed} {direct}")
        (tmp_path / str(seed)).mkdir()
        cache_bytes = rng.choice([16, 100, 4000]) * row_bytes * per_group
        log = Log(tmp_path / str(seed), groups, row_bytes, per_group, cache_bytes=cache_bytes, direct=direct)
        for _ in range(80):
            anything(log, rng)
        log.check_all()
        assert log.log.verify() == (log.log.touched, [])
        log.commit()
        log.reopen()
        log.check_all()
        for commit in reversed(log.log.held):
            log.reopen(commit=commit, writable=False)
            assert log.log.durable == commit
            log.check_all()
        log.close()


def test_the_file_stays_small_under_any_number_of_writes(tmp_path: Path) -> None:
    """Cleaning moves live groups together: the file is at most twice its rows, and a few segments."""
    log, rng = Log(tmp_path, 6000, 256, cache_bytes=600 * 256), random.Random(0)
    for _ in range(300):
        log.put(torch.tensor(rng.sample(range(6000), 100)), rng.randrange(256))
        if log.log.crowded or rng.random() < 0.1:
            log.commit()
    stats = log.log.stats()
    assert stats["segments_cleaned"] > 0
    assert stats["file_bytes"] <= 2 * log.log.touched * 260 + 24 * SEGMENT_BYTES
    assert stats["bytes_written"] <= 2.5 * 300 * 100 * 256
    log.check_all()
    log.close()


def test_a_held_commit_does_not_ask_for_others(tmp_path: Path) -> None:
    """Further commits would not free what it needs: every step after a checkpoint would commit."""
    log, rng = Log(tmp_path, 6000, 256, cache_bytes=600 * 256), random.Random(1)
    for rows in torch.arange(6000).split(500):
        log.put(rows, 1)
    log.commit(hold=True)
    asked = 0
    for _ in range(200):
        log.put(torch.tensor(rng.sample(range(6000), 100)), rng.randrange(256))
        if log.log.crowded:
            asked += 1
            log.commit()
    assert asked < 30
    assert log.log.stats()["emptied_bytes"] > 0.5 * 6000 * 256  # what the held one needs
    log.check_all()
    log.close()


def test_untouched_rows_take_no_room(tmp_path: Path) -> None:
    """A billion rows open at once, and the files hold only those that were written."""
    log = Log(tmp_path, 10**9, 1536, cache_bytes=1 << 20, segment_bytes=1 << 20)
    log.put(torch.tensor([0, 10**9 - 1, 12345]), 9)
    log.commit()
    assert os.stat(tmp_path / "log").st_blocks * 512 < 64 << 20
    log.reopen()
    log.check(torch.tensor([1, 10**9 - 1, 0, 10**9 - 2, 12345]))
    assert log.log.touched == 3
    log.close()


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_the_index_has_memory_for_rows_that_were_written(tmp_path: Path) -> None:
    """Rows that are far apart take a few bytes each; those that were only looked up take none once they are evicted."""
    groups, count, rng = 300_000_000, 200_000, torch.Generator().manual_seed(0)
    log = Log(tmp_path, groups, 256, cache_bytes=2048 * 256, segment_bytes=1 << 20)
    before = _anonymous_bytes()
    for rows in torch.randint(groups, (100, 2000), generator=rng):
        with log.log.bring(rows) as bringing:
            log.take(bringing)
    assert _anonymous_bytes() - before < 16 << 20
    written = torch.randint(groups, (count,), generator=rng).unique()
    for rows in written.split(2000):
        log.put(rows, 1, overwrite=True)
    assert _anonymous_bytes() - before < groups // 4 + 8 * count + (48 << 20)
    log.commit()
    log.reopen()
    assert log.log.touched == len(written)
    torch.testing.assert_close(log.log.written(0, groups), written, rtol=0, atol=0)
    log.close()


def _resident_bytes(pointer: int, nbytes: int) -> int:
    """Return how much of a range of memory the system has provided."""
    page = os.sysconf("SC_PAGESIZE")
    pages = (ctypes.c_ubyte * (nbytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes // page * page), pages) == 0
    return page * sum(page_is_there & 1 for page_is_there in pages)


def test_the_cache_gets_memory_a_little_before_it_is_used(tmp_path: Path) -> None:
    """32 MiB ahead of what was used, as soon as a core is idle, and no more; bytes that are there stay."""
    log = Log(tmp_path, groups=30_000, row_bytes=4_096, cache_bytes=30_000 * 4_096)
    rows, ahead = torch.arange(1000), 32 << 20
    log.put(rows, 7)
    deadline = time.monotonic() + 120
    while _resident_bytes(log.log.cache_pointer, log.cache.nbytes) < ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ahead <= _resident_bytes(log.log.cache_pointer, log.cache.nbytes) <= 4_096_000 + ahead + (4 << 20)
    log.check(rows)
    log.close()


def test_a_held_commit_can_be_opened_until_it_is_let_go(tmp_path: Path) -> None:
    """Nothing that a checkpoint refers to is written over, however much is written after it."""
    log, rng = Log(tmp_path, 500, 300), random.Random(1)

    def go_on() -> None:
        for _ in range(40):
            log.put(torch.tensor(rng.sample(range(500), 16)), rng.randrange(256))
        log.commit()

    go_on()
    held = log.commit(hold=True)
    for _ in range(4):
        go_on()
    assert log.log.held == [held]
    log.commit(hold=True)
    with pytest.raises(ValueError, match="two commits are held"):
        log.commit(hold=True)
    log.reopen(commit=held, writable=False)
    log.check_all()
    log.commits = {held: log.rows, 0: {}}
    log.log.close()
    with pytest.raises(ValueError, match=rf"commit \d+ is held, and later than {held}: release it first"):
        log.open(commit=held)
    log.open()
    log.log.let_go(max(log.log.held))
    log.log.close()
    log.open(commit=held)  # for writing: what came after it is dropped
    log.check_all()
    log.put(torch.arange(10), 77)
    log.commits[log.log.durable] = {}
    log.commit()
    log.reopen()
    log.check_all()
    assert held in log.log.held
    log.log.let_go(held)
    assert held not in log.log.held
    with pytest.raises(ValueError, match="is not held"):
        log.log.let_go(held)
    log.close()


def test_groups_of_an_older_layout_keep_their_columns(tmp_path: Path) -> None:
    """A new layout rewrites no row: what it keeps is copied when a group is brought, and the caller fills the rest."""
    log, rng = Log(tmp_path, 3000, 8), random.Random(2)
    log.put(torch.arange(0, 3000, 2)[:16], 5)
    for first in range(0, 3000, 16):
        log.put(torch.arange(first, min(first + 16, 3000), 2), first % 200)
    log.commit()
    log.log.close()
    layouts = [RowLayout(8, [(4, 2, 4)]), RowLayout(10)]  # bytes 4 to 7 become bytes 2 to 5
    log.options["layouts"] = layouts
    log.row_bytes = 10
    log.open()
    expected = {row: np.array([99, 99, *[value] * 4, *[99] * 4], np.uint8) for row, value in log.rows.items()}
    for step in range(400):
        rows = rng.sample(range(3000), 12)
        with log.bring(torch.tensor(rows)) as bringing:
            places, fresh = bringing.wait()
            for slot, group, layout in fresh.tolist():
                assert layout == (0 if group in expected else -1)
                log.cache[slot, [0, 1, 6, 7, 8, 9]] = 99
                if layout < 0:
                    log.cache[slot] = 1
            bringing.filled()
            for row, record in zip(rows, log.cache[places.numpy()], strict=True):
                np.testing.assert_array_equal(record, expected.get(row, np.full(10, 1, np.uint8)))
            if step % 2:
                log.log.write(places)
                log.cache[places.numpy()] = step % 251
                expected |= {row: np.full(10, step % 251, np.uint8) for row in rows}
        if step % 50 == 0:
            log.log.wait(log.log.begin_commit())
    scanned = {}
    for groups, records, layout in log.log.scan(100):
        if layout == 0:
            records[:, [0, 1, 6, 7, 8, 9]] = 99
        scanned |= dict(zip(groups.tolist(), records.numpy(), strict=True))
    assert scanned.keys() == expected.keys()
    assert all((scanned[row] == expected[row]).all() for row in expected)
    log.close()


@pytest.mark.parametrize("cached", [16, 400])
def test_a_log_goes_on_with_the_rows_of_another_one(tmp_path: Path, cached: int) -> None:
    """All rows, committed, held or not, while segments are cleaned; a crash returns to the last commit."""
    log, rng = Log(tmp_path, 400, 500, cache_bytes=cached * 500), random.Random(8)
    held = log.commit(hold=True)
    for layouts in range(2, 9):
        for step in range(60):
            log.put(torch.tensor(rng.sample(range(400), 4)), rng.randrange(256))
            if step % 20 == 10:
                log.commit()
        before, log.options["layouts"] = log.log, [RowLayout(500, [(0, 0, 500)])] * (layouts - 1) + [RowLayout(500)]
        for wrong in ({"segment_bytes": 2 * SEGMENT_BYTES}, {"num_groups": 401}, {"layouts": [RowLayout(600)]}):
            with pytest.raises(ValueError, match="do not fit"):
                log.open(before=before, **wrong)
        log.open(before=before)
        with pytest.raises(RuntimeError, match="goes on with the rows"):
            before.bring(torch.arange(3))
        log.check_all()
        assert held in log.log.held
        if layouts % 3 == 0:
            log.reopen()
            log.check_all()
    assert log.log.verify()[1] == []
    log.commit()
    log.reopen()
    log.check_all()
    log.log.close()
    log.open(commit=held, writable=False)
    log.rows = {}
    log.check_all()
    log.close()


def test_a_reader_follows_the_commits_of_a_writer(tmp_path: Path) -> None:
    """A reader has the rows of one commit at a time, also where the writer has written over what it would read."""
    log, rng = Log(tmp_path, 400, 500, cache_bytes=16 * 500), random.Random(3)
    log.put(torch.arange(4), 1)
    log.commit()
    reader = Log(tmp_path, 400, 500, cache_bytes=16 * 500, writable=False)
    size = (tmp_path / "log").stat().st_size
    followed = 0
    for _ in range(60):
        for _ in range(10):
            log.put(torch.tensor(rng.sample(range(400), 4)), rng.randrange(256))
        log.commit()
        before = reader.log.durable
        if rng.random() < 0.3:
            followed += reader.log.refresh()
        ahead = reader.log.bring(torch.arange(4), ahead=True)
        for _ in range(5):
            rows = torch.tensor(rng.sample(range(400), 4))
            with reader.bring(rows) as bringing:
                values = reader.cache[reader.take(bringing)]
                reader.rows = log.commits[reader.log.durable]
                np.testing.assert_array_equal(values, reader.expected(rows))
        assert reader.log.durable >= before
        if ahead is not None:
            ahead.release()
    assert followed
    assert reader.log.stats()["bytes_written"] == 0
    assert size <= (tmp_path / "log").stat().st_size
    reader.close()
    log.close()


def test_a_scratch_log_has_no_commits(tmp_path: Path) -> None:
    """Rows come and go through a small cache; nothing is promised, and space is used again at once."""
    log, rng = Log(tmp_path, 2000, 200, scratch=True, cache_bytes=200 * 200, journal=True), random.Random(4)
    log.log.journal()
    for _ in range(300):
        log.put(torch.tensor(rng.sample(range(2000), 50)), rng.randrange(256))
    log.check_all()
    assert log.log.begin_commit() == 0
    assert not any(op == "sync" or file == "head" for file, op, _, _ in log.log.journal())
    assert log.log.stats()["file_bytes"] < 3 * 2000 * 204 + 20 * SEGMENT_BYTES
    log.reopen()
    log.rows = {}
    log.check_all()
    log.close()


def test_prefetches_take_at_most_half_of_the_cache(tmp_path: Path) -> None:
    """Ahead of its step, a bringing is refused rather than waited for."""
    log = Log(tmp_path, 1000, 64, cache_bytes=64 * 64)
    first = log.log.bring(torch.arange(20), ahead=True)
    assert first is not None
    assert log.log.bring(torch.arange(100, 120), ahead=True) is None
    log.put(torch.arange(200, 216), 3)
    first.release()
    assert log.log.bring(torch.arange(100, 120), ahead=True) is not None
    with pytest.raises(ValueError, match="more rows than the cache"):
        log.log.bring(torch.arange(65))
    log.close()


def test_rows_in_use_stay_when_others_pass_through_once(tmp_path: Path) -> None:
    """A cache of 640 groups keeps 300 that every fourth batch uses, though 1,000 used once pass through in between."""
    groups, kept = 20_300, torch.arange(300)
    log = Log(tmp_path, groups, 512, cache_bytes=640 * 512)
    for rows in torch.arange(groups).split(100):
        log.put(rows, 1)
    passing = iter(torch.arange(300, groups).split(100))
    missed = []
    for _ in range(20):
        before = log.log.stats()["groups_missed"]
        for rows in kept.split(100):
            log.check(rows)
        missed.append(log.log.stats()["groups_missed"] - before)
        for _ in range(10):
            log.check(next(passing))
    assert sum(missed[12:]) < 0.1 * 8 * len(kept)
    log.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no reads of this kind")
def test_direct_reads_take_one_thread_and_not_one_each(tmp_path: Path) -> None:
    """Rows past the page cache are read by the kernel itself; the threads that wait for a read each never start."""
    script = f"""
import os, sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from row_log_model import Log
log = Log(Path({str(tmp_path)!r}), 1600, 512, cache_bytes=64 * 512)
for rows in torch.arange(1600).split(16):
    log.put(rows, int(rows[0]) % 251)
before = log.log.stats()["groups_read"], len(os.listdir("/proc/self/task"))
for rows in torch.arange(1200).split(16):
    log.check(rows)
print(int(log.log.direct), log.log.stats()["groups_read"] - before[0], len(os.listdir("/proc/self/task")) - before[1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    direct, read, threads = map(int, done.stdout.split())
    if not direct:
        pytest.skip("the file system has no O_DIRECT")
    assert read > 800
    assert threads <= 8


def test_threads_bring_and_write_their_own_rows_at_once(tmp_path: Path) -> None:
    """Each thread reads back what it wrote, while the others evict its rows and commits are made."""
    log = Log(tmp_path, 4000, 100, cache_bytes=200 * 100)
    errors: list[BaseException] = []
    writing = threading.Lock()  # a commit never begins between a write and the change of its bytes

    def train(own: int) -> None:
        rng, rows_of = random.Random(own), dict.fromkeys(range(own, 4000, 4), -1)
        try:
            for step in range(150):
                rows = rng.sample(sorted(rows_of), 12)
                with log.bring(torch.tensor(rows)) as bringing:
                    places = log.take(bringing)
                    expected = [log.initial(row) if rows_of[row] < 0 else rows_of[row] for row in rows]
                    assert (log.cache[places] == np.array(expected, np.uint8)[:, None]).all()
                    if step % 3:
                        with writing:
                            log.log.write(torch.from_numpy(places))
                            log.cache[places] = step
                        rows_of |= dict.fromkeys(rows, step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with writing:
            commit = log.log.begin_commit()
        log.log.wait(commit)
    for thread in threads:
        thread.join()
    assert not errors
    assert log.log.verify()[1] == []
    log.close()


def test_more_rows_than_can_be_brought_at_once_are_refused_at_once(tmp_path: Path) -> None:
    """Even if the cache could hold all of them, and even if releasing rows could not help."""
    groups = 20_000_000
    log = Log(tmp_path, groups, 1, cache_bytes=groups)
    assert (log.log.num_slots, log.log.most_rows) == (groups, 2**22)
    for count in (2**22 + 1, 2**24 + 1):
        with pytest.raises(ValueError, match="more rows than the cache"):
            log.log.bring(torch.zeros(count, dtype=torch.int64))
    log.check(torch.zeros(2**22, dtype=torch.int64)[:100])
    log.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system that does not say how it aligns reads")
def test_an_empty_log_is_not_taken_for_one_that_permits_any_alignment() -> None:
    """A read at the end of a file returns before its alignment is looked at."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        log = Log(Path(folder), 100, 600)
        if not log.log.direct:
            pytest.skip("the file system has no O_DIRECT")
        assert log.log.alignment == 4096
        log.put(torch.arange(16), 3)
        log.commit()
        log.reopen()
        log.check_all()
        log.close()
