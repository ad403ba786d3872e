"""A row log, and what it should hold."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap.kernels import Bringing, RowLayout, RowLog

SALT = 1234567
SEGMENT_BYTES = 64 << 10  # the least, so that segments fill and are cleaned all the time


class Log:
    """A row log in two files, and the rows and commits that it should hold.

    A row's bytes are all alike: the value last written to it, or its initial value.
    """

    def __init__(self, folder: Path, groups: int, row_bytes: int, per_group: int = 1, **options: object) -> None:
        self.folder, self.groups, self.row_bytes, self.per_group = folder, groups, row_bytes, per_group
        self.options: dict[str, object] = {"cache_bytes": 64 * row_bytes * per_group, **options}
        self.files = [os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("log", "HEAD")]
        if not os.fstat(self.files[1]).st_size:
            RowLog.create(*self.files, salt=SALT, head=b"new")
        self.rows: dict[int, int] = {}
        self.commits: dict[int, dict[int, int]] = {0: {}}
        self.open()

    def open(self, **options: object) -> None:
        layout = RowLayout(self.row_bytes * self.per_group)
        given = {"salt": SALT, "num_groups": self.groups, "layouts": [layout], "segment_bytes": SEGMENT_BYTES}
        given |= {"rows_per_group": self.per_group, **self.options, **options}
        self.log = RowLog(*self.files, **given)  # type: ignore[arg-type]

    def reopen(self, **options: object) -> None:
        self.log.close()
        self.open(**options)
        self.return_to(self.log.durable)

    def return_to(self, commit: int) -> None:
        self.rows = dict(self.commits[commit])
        self.commits = {number: rows for number, rows in self.commits.items() if number <= commit}

    def go_back(self, commit: int) -> None:
        """Rewrite rows that differ from a held commit, as a reader at that commit sees them."""
        then = self.commits[commit]
        reader = Log(self.folder, self.groups, self.row_bytes, self.per_group, writable=False, commit=commit)
        reader.rows = then
        unlike = reader.log.written(0, self.groups * self.per_group, unlike=self.log)
        is_unlike = {*unlike.tolist()}
        for row in self.rows | then:
            assert row in is_unlike or self.rows.get(row) == then.get(row)
        for rows in unlike.split(min(reader.log.num_slots, self.log.num_slots) // 4):
            reader.check(rows)
            with reader.bring(rows) as theirs, self.bring(rows) as ours:
                places, found = self.take(ours), reader.cache[reader.take(theirs)]
                self.log.write(torch.from_numpy(places))
                self.cache[places] = found
            self.rows |= {row: then.get(row, self.initial(row)) for row in rows.tolist()}
        reader.close()

    def close(self) -> None:
        self.log.close()
        for file in self.files:
            os.close(file)

    @property
    def cache(self) -> NDArray[np.uint8]:
        size = self.log.num_slots * self.per_group * self.row_bytes
        memory = (ctypes.c_char * size).from_address(self.log.cache_pointer)
        return np.frombuffer(memory, np.uint8).reshape(-1, self.row_bytes)

    def initial(self, row: int) -> int:
        return row * 7 % 251

    def expected(self, rows: Tensor) -> NDArray[np.uint8]:
        values = [self.rows.get(row, self.initial(row)) for row in rows.tolist()]
        return np.repeat(np.array(values, np.uint8), self.row_bytes).reshape(-1, self.row_bytes)

    def take(self, bringing: Bringing) -> NDArray[np.int64]:
        """Wait, and fill what is fresh; a newer layout is no longer than the ones before."""
        places, fresh = bringing.wait()
        for slot, group, layout in fresh.tolist():
            for i in range(self.per_group) if layout < 0 else ():
                self.cache[slot * self.per_group + i] = self.initial(group * self.per_group + i)
        bringing.filled()
        return places.numpy()

    def check(self, rows: Tensor) -> None:
        with self.bring(rows) as bringing:
            np.testing.assert_array_equal(self.cache[self.take(bringing)], self.expected(rows))

    def check_all(self) -> None:
        for rows in torch.arange(self.groups * self.per_group).split(max(self.log.num_slots // 4, 1)):
            self.check(rows)

    def bring(self, rows: Tensor, **how: bool) -> Bringing:
        bringing = self.log.bring(rows, **how)
        assert bringing is not None
        return bringing

    def put(self, rows: Tensor, value: int, *, overwrite: bool = False) -> None:
        with self.bring(rows, overwrite=overwrite) as bringing:
            places = self.take(bringing)
            if not overwrite:
                np.testing.assert_array_equal(self.cache[places], self.expected(rows))
            self.log.write(torch.from_numpy(places))
            self.cache[places] = value
        self.rows |= dict.fromkeys(rows.tolist(), value)

    def begin_commit(self, *, hold: bool = False) -> int:
        commit = self.log.begin_commit(b"commit", hold=hold)
        self.commits[commit] = dict(self.rows)
        return commit

    def commit(self, *, hold: bool = False) -> int:
        commit = self.begin_commit(hold=hold)
        self.log.wait(commit)
        return commit


def crc32c(data: bytes) -> int:
    """Compute the checksum bit by bit, as RFC 3720 has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
