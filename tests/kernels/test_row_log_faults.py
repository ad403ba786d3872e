"""The row log's files: the order of writes, failures of the disk, and processes that fork or end."""

from __future__ import annotations

import errno
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from children import exit_status, run_script
from row_log_model import SALT, SEGMENT_BYTES, Log, crc32c

from speedswap.kernels import RowLayout, RowLog, RowLogDamaged

HEAD_SLOT_BYTES = 64 << 10


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_records_are_synced_before_the_commit_that_names_them(log: Log) -> None:
    """Records, sync, the commit, sync, its copy, sync: in this order, and head bytes come back."""
    log.reopen()
    log.log.journal()
    log.put(torch.arange(5), 3)
    log.log.wait(log.log.begin_commit(b"contents"))
    assert log.log.head == b"contents"
    log.log.close()
    steps = [(file, op, at) for file, op, at, _ in log.log.journal() if op not in ("allocate", "done")]
    assert steps[0][:2] == ("log", "write")
    assert steps[1:] == [
        ("log", "sync", 0),
        ("head", "write", 0),
        ("head", "sync", 0),
        ("head", "write", HEAD_SLOT_BYTES),
        ("head", "sync", 0),
    ]


def test_files_beside_the_log_are_durable_before_the_commit(log: Log) -> None:
    """Their bytes are in place and synced before HEAD is written; a directory is only synced."""
    log.log.journal()
    piece, nothing = torch.arange(50, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    with open(log.folder / "side", "w+b") as side:
        folder = os.open(log.folder, os.O_RDONLY)
        commit = log.log.begin_commit(files=[(folder, 0, nothing), (side.fileno(), 4096, piece)])
        os.close(folder)
    piece.zero_()
    log.log.wait(commit)
    assert (log.folder / "side").read_bytes() == bytes(4096) + bytes(range(50))
    steps = [(file, op, at) for file, op, at, _ in log.log.journal() if op != "done"]
    before = steps[: steps.index(("head", "write", 0))]
    assert [each for each in before if each[0] == "side"] == [
        ("side", "sync", 0),
        ("side", "write", 4096),
        ("side", "sync", 0),
    ]


def test_checksums_are_crc32c(log: Log) -> None:
    """A record's checksum covers the log, the segment's stamp, the group and the bytes; the value is the RFC's."""
    assert crc32c(b"123456789") == 0xE3069283
    data = (log.folder / "log").read_bytes()
    magic, _, salt, seq, layout, count, first_place, segment, stamp = struct.unpack_from("<IIQQIIIIQ", data)
    group = struct.unpack_from("<I", data, 64)[0]
    record = data[first_place * 204 :][:204]
    assert (magic, salt, layout, segment) == (0x4C575353, SALT, 0, 0)
    assert seq > 0
    assert count > 0
    assert struct.unpack("<I", record[200:])[0] == crc32c(struct.pack("<QQI", salt, stamp, group) + record[:200])


# ---- failures of the disk --------------------------------------------------------------------------------------------


def test_a_full_disk_changes_nothing_and_the_log_goes_on_when_there_is_room(log: Log) -> None:
    """A write that finds no room raises before anything changes; what was written can be committed."""
    log.log.fail("allocate", 0, errno.ENOSPC, times=10**9)
    refused = 0
    for step in range(600):
        rows = torch.tensor(random.Random(step).sample(range(1000), 16))
        try:
            log.put(rows, step % 250)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            refused += 1
            log.check(rows)
            if refused % 3 == 0:
                log.commit()  # lets emptied segments be written again
    assert refused
    assert log.rows
    log.check_all()
    log.commit()
    log.log.fail("allocate", 0, 0, times=0)
    log.put(torch.arange(16), 5)
    log.commit()
    log.reopen()
    log.check_all()


@pytest.mark.parametrize("op, after", [("sync", 0), ("sync", 1), ("write", 0), ("write", 1)])
def test_a_failed_write_or_sync_ends_the_log_at_its_last_commit(log: Log, op: str, after: int) -> None:
    """A commit that fails raises, and so does everything after it; the files hold the commit before."""
    log.put(torch.arange(0, 30, 2), 9)
    log.log.fail(op, after, errno.EIO)
    commit = log.log.begin_commit()
    with pytest.raises(OSError, match="injected") as raised:
        log.log.wait(commit)
    assert raised.value.errno == errno.EIO
    for call in (lambda: log.log.bring(torch.arange(3)), lambda: log.log.begin_commit(), lambda: log.log.touched):
        with pytest.raises(OSError, match="injected"):
            call()
    log.log.close()
    log.open()
    after_all = log.log.durable
    assert after_all == max(log.commits) or (after_all == commit and (op, after) == ("sync", 1))
    if after_all != commit:
        log.return_to(after_all)
    log.check_all()


def test_a_failed_read_raises_and_loses_nothing(log: Log) -> None:
    """The rows can be read again once the disk reads again."""
    log.reopen()
    log.log.fail("read", 0, errno.EIO)
    with log.bring(torch.arange(16)) as bringing, pytest.raises(OSError, match="Input/output"):
        bringing.wait()
    log.check_all()


def test_short_reads_and_writes_are_continued(log: Log) -> None:
    """A second call does the part that the system left."""
    for op in ("read", "write", "write"):
        log.log.fail(op, 0, 0, times=5)
        log.put(torch.arange(3, 19), 44)
        log.commit()
        log.reopen()
        log.check_all()


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_log_alone(log: Log) -> None:
    """The child's calls raise, its exit neither hangs nor writes, and the parent goes on."""
    log.put(torch.arange(20, 36), 8)
    bringing = log.bring(torch.arange(4))

    def child() -> None:
        nonlocal bringing
        with pytest.raises(RuntimeError, match="forked"):
            log.log.bring(torch.arange(3))
        del bringing
        del log.log

    assert exit_status(child) == 0
    bringing.release()
    log.commit()
    log.reopen()
    log.check_all()


def test_the_interpreter_ends_while_a_log_is_at_work(tmp_path: Path) -> None:
    """Threads that read, write and commit do not keep it, and the next process finds a commit."""
    program = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import torch
from pathlib import Path
from row_log_model import Log
log = Log(Path({str(tmp_path)!r}), 20000, 400, cache_bytes=1 << 20)
log.commit()
for first in range(0, 8000, 400):
    with log.bring(torch.arange(first, first + 400), overwrite=True) as bringing:
        log.log.write(bringing.wait()[0])
log.log.begin_commit()
kept = log.bring(torch.arange(0, 8000, 100))
"""
    done = run_script(program, imported=("torch",))
    assert done.returncode == 0, done.stderr
    files = [os.open(tmp_path / name, os.O_RDWR) for name in ("log", "HEAD")]
    log = RowLog(
        *files, num_groups=20000, layouts=[RowLayout(400)], salt=SALT, segment_bytes=SEGMENT_BYTES, cache_bytes=1 << 20
    )
    assert log.durable in (1, 2)
    assert log.verify()[1] == []
    log.close()


def test_closed_logs_and_wrong_arguments_are_errors(log: Log) -> None:
    """Nothing hangs, and the message says what to change."""
    with pytest.raises(ValueError, match="has not begun"):
        log.log.wait(99)
    with pytest.raises(ValueError, match="65,472"):
        log.log.begin_commit(bytes(70000))
    bringing = log.bring(torch.arange(5))
    bringing.wait()
    bringing.release()
    for call in (bringing.wait, bringing.filled):
        with pytest.raises(RuntimeError, match="was released"):
            call()
    bringing = log.bring(torch.arange(5))
    log.log.close()
    log.log.close()
    for call in (lambda: log.log.bring(torch.arange(3)), bringing.wait, lambda: log.log.verify()):
        with pytest.raises(RuntimeError, match="was closed"):
            call()
    bringing.release()
    for wrong, message in [
        ({"segment_bytes": 1000}, "segment_bytes"),
        ({"layouts": [RowLayout(10**5)]}, "group_bytes"),
        ({"layouts": [RowLayout(8, [(0, 4, 8)]), RowLayout(8)]}, "moves bytes outside"),
        ({"num_groups": 0}, "num_groups"),
        ({"rows_per_group": 3}, "power of two"),
        ({"commit": 77}, "not in HEAD"),
    ]:
        with pytest.raises(ValueError, match=message):
            log.open(**wrong)
    with pytest.raises(RowLogDamaged, match="no valid commit"):
        log.open(salt=SALT + 1)
    log.open(writable=False)
    for call in (lambda: log.log.begin_commit(), lambda: log.log.write(torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(RuntimeError, match="open for reading"):
            call()
    np.testing.assert_array_equal(log.expected(torch.tensor([1]))[0, 0], log.initial(1))
