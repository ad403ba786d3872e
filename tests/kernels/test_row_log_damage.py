"""The row log when its files are damaged, cut short or hostile."""

from __future__ import annotations

import errno
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from row_log_model import SEGMENT_BYTES, Log, crc32c

from speedswap.kernels import RowLogDamaged

HEAD_SLOT_BYTES = 64 << 10


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def find(path: Path, wanted: bytes) -> int:
    at = path.read_bytes().index(wanted)
    assert at >= 0
    return at


def test_a_flipped_bit_in_a_record_names_its_group(log: Log) -> None:
    """A damaged record raises when it is read, is found by verify, and leaves the other rows readable."""
    log.put(torch.tensor([123]), 251)
    log.commit()
    log.log.close()
    flip(log.folder / "log", find(log.folder / "log", bytes([251] * 200)) + 100)
    log.open()
    with log.bring(torch.tensor([5, 123])) as bringing, pytest.raises(RowLogDamaged, match="group 123") as raised:
        bringing.wait()
    assert raised.value.group == 123  # type: ignore[attr-defined]
    assert log.log.verify() == (log.log.touched - 1, [123])
    for read in (lambda: log.log.verify(strict=True), lambda: list(log.log.scan(10))):
        with pytest.raises(RowLogDamaged, match="group 123"):
            read()
    log.check(torch.arange(100, 116))


def test_a_read_that_fails_is_told_from_damage_by_a_strict_check(log: Log) -> None:
    """The other one goes on, and counts what it could not read, rows and headers alike."""
    log.log.fail("read", 0, errno.EIO, 10**6)
    assert -1 in log.log.verify()[1]
    with pytest.raises(OSError, match="Input/output error"):
        log.log.verify(strict=True)
    log.log.fail("read", 0, 0, 0)
    assert log.log.verify(strict=True) == (log.log.touched, [])


def test_a_flipped_bit_in_a_header_is_noticed_when_opening(log: Log) -> None:
    """No row silently returns to an older value because its newest record was not found."""
    log.log.close()
    for at in range(0, 64 + 4 * 20, 7):
        flip(log.folder / "log", at)
        with pytest.raises(RowLogDamaged, match="do not add up"):
            log.open()
        flip(log.folder / "log", at)
    log.open()
    log.check_all()


def test_either_copy_of_the_last_commit_can_be_damaged(log: Log) -> None:
    """One damaged slot of HEAD costs nothing; two are an error."""
    for slot in (0, 1):
        log.log.close()
        flip(log.folder / "HEAD", slot * HEAD_SLOT_BYTES + 20)
        log.open()
        assert log.log.durable == max(log.commits)
        log.check_all()
        log.put(torch.arange(9), slot)
        log.commit()
    log.log.close()
    for slot in (0, 1):
        flip(log.folder / "HEAD", slot * HEAD_SLOT_BYTES + 20)
    with pytest.raises(RowLogDamaged, match="no valid commit"):
        log.open()


@pytest.mark.parametrize("at", [16, 24], ids=["commit", "last"])
def test_numbers_that_could_not_be_counted_on_from_are_no_commit(log: Log, at: int) -> None:
    """With valid checksums: the commit after 2^64 - 1 would be 0, which is the empty log."""
    log.log.close()
    path = log.folder / "HEAD"
    for slot in (0, 1):
        raw = bytearray(path.read_bytes())
        header = raw[slot * HEAD_SLOT_BYTES : (slot + 1) * HEAD_SLOT_BYTES]
        struct.pack_into("<Q", header, at, 2**64 - 1)
        struct.pack_into("<I", header, 4, 0)
        struct.pack_into("<I", header, 4, crc32c(bytes(header[: 64 + struct.unpack_from("<I", header, 52)[0]])))
        raw[slot * HEAD_SLOT_BYTES : (slot + 1) * HEAD_SLOT_BYTES] = header
        path.write_bytes(raw)
        if slot == 0:
            log.open(writable=False)
            assert log.log.durable == max(log.commits)
            log.log.close()
    with pytest.raises(RowLogDamaged, match="no valid commit"):
        log.open()


def test_a_truncated_file_is_noticed(log: Log) -> None:
    """However much is missing at its end, the log does not open as if the rest had never existed."""
    log.log.close()
    whole = (log.folder / "log").read_bytes()
    for length in (0, 100, 4096, SEGMENT_BYTES, SEGMENT_BYTES + 5000):
        (log.folder / "log").write_bytes(whole[:length])
        with pytest.raises(RowLogDamaged):
            log.open()
    (log.folder / "log").write_bytes(whole)
    log.open()
    log.log.close()
    os.truncate(log.folder / "HEAD", 10)
    with pytest.raises(RowLogDamaged, match="no valid commit"):
        log.open()


def test_hostile_headers_neither_crash_nor_pass(log: Log) -> None:
    """Headers with valid checksums and any numbers in them are an error, or change nothing."""
    log.log.close()
    path, rng = log.folder / "log", random.Random(0)
    original = path.read_bytes()
    fields = {8: "Q", 16: "Q", 24: "I", 28: "I", 32: "I", 36: "I", 40: "Q", 64: "I", 68: "I"}
    for trial in range(60):
        header = bytearray(original[:4096])
        for at in rng.sample(sorted(fields), rng.randint(1, 3)):
            width = struct.calcsize(fields[at])
            value = rng.choice(
                [0, 1, 2, 1000, 1008, 1009, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, rng.getrandbits(64)]
            )
            header[at : at + width] = (value % 256**width).to_bytes(width, "little")
        header[4:8] = bytes(4)
        count = min(struct.unpack_from("<I", header, 28)[0], 1008)
        header[4:8] = struct.pack("<I", crc32c(bytes(header[: 64 + 4 * count])))
        path.write_bytes(bytes(header) + original[4096:])
        try:
            log.open(writable=bool(trial % 2))
        except RowLogDamaged:
            continue
        assert log.log.verify() == (log.log.touched, [])
        log.check_all()
        log.log.close()
