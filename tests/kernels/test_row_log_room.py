"""Room in a row log: reserved writes succeed on a full disk, whatever else happens to the log."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
import torch
from row_log_model import SEGMENT_BYTES, Log
from torch import Tensor

from speedswap.kernels import Room


def overwrite(log: Log, rows: Tensor, value: int, room: Room | None) -> None:
    with log.bring(rows, overwrite=True) as bringing:
        places = bringing.wait()[0]
        log.log.write(places, room)
        log.cache[places.numpy()] = value
    log.rows |= dict.fromkeys(rows.tolist(), value)


def fill_disk(log: Log) -> None:
    log.log.fail("allocate", 0, errno.ENOSPC, times=10**9)


@pytest.mark.parametrize(
    "groups, row_bytes, segment_bytes, cached, step",
    [(3000, 1000, SEGMENT_BYTES, 100, 7), (5000, 1000, 1 << 20, 400, 100), (20_000, 300, 4 << 20, 400, 100)],
)
def test_a_new_log_takes_all_rows_that_room_was_made_for(
    tmp_path: Path, groups: int, row_bytes: int, segment_bytes: int, cached: int, step: int
) -> None:
    """In segments of one chunk and of many, and in any number of calls."""
    log = Log(tmp_path, groups, row_bytes, cache_bytes=cached * row_bytes, segment_bytes=segment_bytes)
    with log.log.make_room(groups) as room:
        fill_disk(log)
        for rows in torch.arange(groups).split(step):
            overwrite(log, rows, 7, room)
        assert room.groups == 0
    log.check_all()
    log.commit()
    log.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_cleaner_takes_no_room_that_was_promised(tmp_path: Path, seed: int) -> None:
    """Rows of a full log are all written again, while cleaning finds ever more holes."""
    groups = torch.tensor(random.Random(seed).sample(range(3000), 3000))
    log = Log(tmp_path, 3000, 1000, cache_bytes=100_000)
    for rows in torch.arange(3000).split(100):
        overwrite(log, rows, 1, None)
    log.commit()
    with log.log.make_room(3000) as room:
        fill_disk(log)
        for rows in groups.split(50):
            overwrite(log, rows, 2, room)
            log.log.wait_for_cleaner()
    log.check_all()
    log.commit()
    log.close()


def test_other_writes_take_no_room_that_was_promised(log: Log) -> None:
    """They find the disk full and change nothing; released room is theirs."""
    with log.log.make_room(400) as room:
        fill_disk(log)
        with pytest.raises(OSError, match="No space"):  # noqa: PT012
            for rows in torch.arange(400, 1000).repeat(20).split(16):
                overwrite(log, rows, 3, None)
        for rows in torch.arange(400).split(16):
            overwrite(log, rows, 4, room)
        half = log.log.make_room(0)
    with pytest.raises(OSError, match="No space"):
        log.log.make_room(400)
    log.commit()
    overwrite(log, torch.arange(16), 5, half)  # as without any
    log.check_all()


def test_room_is_made_out_of_what_was_reserved(log: Log) -> None:
    """A part of it serves one call, though the disk is full; the unused rest is released."""
    reserved = log.log.make_room(300)
    fill_disk(log)
    with log.log.make_room(200, out_of=reserved) as room:
        assert (room.groups, reserved.groups) == (200, 100)
        overwrite(log, torch.arange(16), 9, room)
        assert room.groups == 184
    with pytest.raises(OSError, match="No space"):
        log.log.make_room(10**4, out_of=reserved)
    assert (room.groups, reserved.groups) == (0, 100)
    room.release()
    reserved.release()
    log.check_all()


def test_room_of_another_log_is_refused(log: Log, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Log(tmp_path / "other", 10, 200)
    with other.log.make_room(5) as room:
        with pytest.raises(ValueError, match="of another row log"):
            overwrite(log, torch.arange(3), 9, room)
        with pytest.raises(ValueError, match="of another row log"):
            log.log.make_room(5, out_of=room)
    with pytest.raises(ValueError, match="0 or more"):
        log.log.make_room(-1)
    other.close()
