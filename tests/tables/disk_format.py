"""The bytes of a table on disk, written as docs/design/disk-format.md has them: nothing here imports speedswap."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BLOCK, SLOT = 4096, 65536
MASK = 2**64 - 1
Record = tuple[int, bytes]  # a group, and its rows
Chunk = tuple[int, Sequence[Record]]  # a sequence number, and records


def _crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc32c_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def padded(data: bytes, multiple: int) -> bytes:
    return data + bytes(-len(data) % multiple)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def manifest(body: dict[str, Any]) -> bytes:
    text = json.dumps({"format": "speedswap-table", **body}).encode()
    return b"%08x\n" % zlib.crc32(text) + text


def column(name: str, row_shape: list[int], value: float, **more: Any) -> dict[str, Any]:
    """Return a float32 column that is constant in untouched rows."""
    init = {"kind": "constant", "value": value}
    return {"name": name, "row_shape": row_shape, "dtype": "float32", "init": init, "zero_row": None, **more}


def contents(layout: int, writes: int, attributes: dict[str, Any], id_maps: dict[str, Any]) -> bytes:
    return json.dumps({"layout": layout, "writes": writes, "attributes": attributes, "id_maps": id_maps}).encode()


# ---- HEAD ------------------------------------------------------------------------------------------------------------


def head_slot(salt: int, commit: int, last: int, index: tuple[int, int], body: bytes, *, held: bool = False) -> bytes:
    """Return a slot; `index` is its sum, and the number of groups that have a record."""

    def header(crc: int) -> bytes:
        return struct.pack("<4sIQQQQQIIQ", b"SSWH", crc, salt, commit, last, *index, held, len(body), 0)

    return padded(header(crc32c(header(0) + body)) + body, SLOT)


# ---- the log ---------------------------------------------------------------------------------------------------------


class LogBytes:
    """A log that is put together chunk by chunk.

    Args:
        salt: the table's.
        segment_bytes: of a segment.
        group_bytes: of a group's rows, in each layout.
    """

    def __init__(self, salt: int, segment_bytes: int, group_bytes: Sequence[int]) -> None:
        self.salt, self.segment_bytes = salt, segment_bytes
        self.strides = [each + 4 for each in group_bytes]
        self.data = bytearray()
        self._written: list[tuple[int, int, int, int]] = []  # seq, group, address, stamp
        self.records: list[tuple[int, int, range]] = []  # seq, group, bytes of the log

    def add(self, segment: int, at: int, stamp: int, layout: int, chunk: Chunk) -> int:
        """Write a chunk from byte `at` of a segment on; return where the next one begins."""
        seq, records = chunk
        places = self.segment_bytes // min(self.strides) + 1
        self._written = [one for one in self._written if one[2] // places != segment or one[3] == stamp]
        stride, begin = self.strides[layout], segment * self.segment_bytes
        first = -(-(at + BLOCK) // stride)
        groups = struct.pack(f"<{len(records)}I", *(group for group, _ in records))

        def header(crc: int) -> bytes:
            fields = layout, len(records), first, segment, stamp, 1
            return struct.pack("<4sIQQIIIIQI12x", b"SSWL", crc, self.salt, seq, *fields) + groups

        self._put(begin + at, padded(header(crc32c(header(0))), BLOCK))
        for place, (group, rows) in enumerate(records, first):
            assert len(rows) + 4 == stride
            crc = crc32c(struct.pack("<QQI", self.salt, stamp, group) + rows)
            self._put(begin + place * stride, rows + struct.pack("<I", crc))
            self.records.append((seq, group, range(begin + place * stride, begin + (place + 1) * stride)))
            self._written.append((seq, group, segment * places + place, stamp))
        return -(-(first + len(records)) * stride // BLOCK) * BLOCK

    def _put(self, at: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, -(-(at + len(data)) // BLOCK) * BLOCK - len(self.data))))
        self.data[at : at + len(data)] = data

    def index(self, last: int) -> tuple[int, int]:
        """Return the sum of the index of the commit whose last chunk this is, and the groups in it."""
        newest = {group: (group, address, stamp) for seq, group, address, stamp in sorted(self._written) if seq <= last}
        return sum(_mix(*each) for each in newest.values()) & MASK, len(newest)


def _mix(group: int, address: int, stamp: int) -> int:
    x = (group << 32 | address) + stamp * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


# ---- id maps ---------------------------------------------------------------------------------------------------------


def keys_piece(header: dict[str, Any], arrays: Iterable[bytes]) -> bytes:
    line = json.dumps(header).encode() + b"\n"
    body = padded(bytes(26) + line, 8)[26:] + b"".join(padded(each, 8) for each in arrays)
    body = padded(bytes(26) + body, BLOCK)[26:]
    return b"speedswap-keys 1 %08x\n" % zlib.crc32(body) + body


def xxh64(data: bytes) -> int:
    """Return XXH64 of fewer than 32 bytes, as its specification has it."""
    primes = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

    def rotated(x: int, bits: int) -> int:
        return (x << bits | (x & MASK) >> (64 - bits)) & MASK

    x, words = primes[4] + len(data) & MASK, len(data) // 8
    for (word,) in struct.iter_unpack("<Q", data[: 8 * words]):
        x = rotated(x ^ rotated(word * primes[1] & MASK, 31) * primes[0] & MASK, 27) * primes[0] + primes[3] & MASK
    rest = data[8 * words :]
    if len(rest) >= 4:
        x = rotated(x ^ int.from_bytes(rest[:4], "little") * primes[0] & MASK, 23) * primes[1] + primes[2] & MASK
        rest = rest[4:]
    for byte in rest:
        x = rotated(x ^ byte * primes[4] & MASK, 11) * primes[0] & MASK
    x = (x ^ x >> 33) * primes[1] & MASK
    x = (x ^ x >> 29) * primes[2] & MASK
    return x ^ x >> 32


def numbers(kind: str, *values: int) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def place_of(row: int, num_rows: int, ranks: int) -> tuple[int, int]:
    """Return the rank that owns a row, and its place in that rank's table."""
    bits = _bits(num_rows, ranks)
    golden, buckets = 0x9E3779B97F4A7C15, 1 << bits
    factor = golden >> (64 - bits) | 1
    bucket = (row % buckets * factor + ((row >> bits) * golden % 2**64 >> (64 - bits))) % buckets
    rank = next(rank for rank in range(ranks) if bucket < _first(rank + 1, ranks, buckets))
    return rank, (bucket - _first(rank, ranks, buckets)) * -(-num_rows // buckets) + row // buckets


def rows_of(rank: int, num_rows: int, ranks: int) -> int:
    buckets = 1 << _bits(num_rows, ranks)
    return (_first(rank + 1, ranks, buckets) - _first(rank, ranks, buckets)) * -(-num_rows // buckets)


def _bits(num_rows: int, ranks: int) -> int:
    return max(min(max(1, num_rows // 256).bit_length() - 1, 16), (ranks - 1).bit_length())


def _first(rank: int, ranks: int, buckets: int) -> int:
    return -(-rank * buckets // ranks)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


# ---- a table with everything that a log may have in it ---------------------------------------------------------------

SALT, SEGMENT = 0xFEDCBA9876543210, 65536
ROWS, DIM, GROUP = 30, 20, 4  # a row of 80 bytes, stored with three neighbours
GIVEN = {"version": 1, "name": "by hand", "num_embeddings": ROWS, "seed": 5, "group_rows": GROUP}
LAST = 9  # the sequence number of the last commit's last chunk
OF_RANKS, RANKS = 1000, 3  # rows of a table that ranks own
KEYS = {100: 1, 222: 2, 300: 3, 444: 4}
VALUES = {  # of rows that have records: weight and late, which are 0.5 and 0.25 in others
    **dict.fromkeys(range(4), (40.0, 50.0)),
    **{row: (6.0 + row, 0.25) for row in range(4, 8)},
    8: (2.0, 0.25),
    9: (2.25, 0.25),
    10: (2.0, 0.25),
    11: (3.0, 0.25),
    28: (20.0, 30.0),
    29: (21.0, 31.0),
}
OLDER = {  # of rows that have an older version
    **{row: (value, 0.25) for row, value in enumerate([0.0, 0.25, 2.0, 3.0])},
    **{row: (value, 0.25) for row, value in enumerate([1.0, 1.25, 2.0, 3.0], 4)},
}


def group_of(values: list[float], late: list[float] | None = None) -> bytes:
    """Return a group's rows, each with one value, or two with a second column."""
    rows = [
        [value] * DIM + [more] * DIM * (late is not None) for value, more in zip(values, late or values, strict=True)
    ]
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def numbers_piece(used: int, clock: int, keys: list[int], rows: list[int] | None = None) -> bytes:
    """Return a piece of an id map of numbers: all of it, or what some rows have."""
    header = {"capacity": 20, "keys": "int64", "admit_after": 1, "evict": "lru", "used": used, "clock": clock}
    header |= {"probation_used": 0, "last_place": 0, "text_bytes": [0, 0], "stale": 0, "free_rows_are_stale": False}
    arrays = [numbers("q", *keys), numbers("I", *[clock] * len(keys))]
    if rows is not None:
        header["cells"] = [len(rows), 0]
        arrays.append(numbers("i", *rows))
    return keys_piece(header, arrays)


def by_hand(path: Path) -> LogBytes:
    """Write a table; return its log."""
    log = LogBytes(SALT, SEGMENT, [GROUP * DIM * 4, GROUP * DIM * 8])
    former: Chunk = 3, [(6, group_of([9] * 4)), (7, group_of([9] * 4))]
    log.add(0, 3 * BLOCK, 2, 0, former)  # of an earlier use of the segment
    at = log.add(0, 0, 4, 0, (5, [(group, group_of([group, group + 0.25, 2, 3])) for group in range(3)]))
    at = log.add(0, at, 4, 0, (7, [(1, group_of([10, 11, 12, 13]))]))
    assert at == 4 * BLOCK
    newest: Chunk = LAST, [(7, group_of([20, 21, 99, 99], [30, 31, 99, 99])), (0, group_of([40] * 4, [50] * 4))]
    at = log.add(1, 0, 9, 1, newest)
    log.add(1, at, 9, 1, (12, [(2, group_of([60] * 4, [70] * 4))]))  # after the last commit
    log.data.extend(bytes(2 * SEGMENT + BLOCK - len(log.data)))
    body = contents(1, 8, {"step": 17}, {"": [["keys-5.bin", 2 * BLOCK]]})
    elsewhere = json.dumps({"file": "keys-40.bin", "crc32": zlib.crc32(body)}).encode()
    held = head_slot(SALT, 3, 7, log.index(7), contents(0, 4, {"step": 3}, {}), held=True)
    slots = [b"torn", head_slot(SALT, 4, LAST, log.index(LAST), elsewhere), held]
    columns = [column("weight", [DIM], 0.5), column("late", [DIM], 0.25)]
    layouts = [
        {"number": 0, "stride": 80, "held": [[0, 0, 0, 0, None, []]]},
        {"number": 1, "stride": 160, "held": [[0, 0, 0, 0, None, []], [1, 80, 1, 1, None, []]]},
    ]
    described = {**GIVEN, "segment_bytes": SEGMENT, "salt": SALT, "scratch": False, "log": 2, "later": "ignored"}
    pieces = numbers_piece(3, 1, [100, 200, 300]) + numbers_piece(4, 2, [222, 444], [2, 4])
    files = {
        "MANIFEST": manifest({**described, "columns": columns, "layouts": layouts}),
        "HEAD-2": b"".join(padded(each, SLOT) for each in slots),
        "rows-2.log": bytes(log.data),
        "keys-5.bin": pieces + b"of a commit that never was",
        "keys-40.bin": body,
    }
    write_files(path, files)
    return log


def ranks_by_hand(path: Path) -> None:
    """Write a table that ranks own: every seventh row holds its number."""
    salts, weight = [7, 8, 9], column("weight", [DIM], 0.5)
    body = {"version": 1, "name": "shared", "num_embeddings": OF_RANKS, "seed": 1, "weight": weight, "shards": salts}
    write_files(path, {"MANIFEST": manifest(body)})
    for rank, salt in enumerate(salts):
        own = {"kind": "owned", "init": weight["init"], "num_embeddings": OF_RANKS, "world_size": RANKS, "rank": rank}
        shard = {**GIVEN, "name": "shared", "num_embeddings": rows_of(rank, OF_RANKS, RANKS)}
        shard |= {"segment_bytes": SEGMENT, "salt": salt, "scratch": False}
        shard["columns"] = [{**weight, "init": {**own, "zero_row": None}}]
        shard["layouts"] = [{"number": 0, "stride": 80, "held": [[0, 0, 0, 0, None, []]]}]
        groups: dict[int, list[float]] = {}
        for row in range(0, OF_RANKS, 7):
            owner, place = place_of(row, OF_RANKS, RANKS)
            if owner == rank:
                groups.setdefault(place // GROUP, [0.5] * GROUP)[place % GROUP] = row
        log = LogBytes(salt, SEGMENT, [GROUP * 80])
        log.add(0, 0, 1, 0, (1, [(group, group_of(values)) for group, values in groups.items()]))
        slot = head_slot(salt, 1, 1, log.index(1), contents(0, 1, {}, {}))
        files = {"MANIFEST": manifest(shard), "HEAD": slot, "rows.log": bytes(log.data)}
        write_files(path / f"shard-{rank}-of-{RANKS}", files)
