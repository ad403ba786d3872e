"""The format of tables on disk is frozen: what its page says is what is read, and what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_format import (
    BLOCK,
    DIM,
    KEYS,
    OF_RANKS,
    ROWS,
    SEGMENT,
    SLOT,
    VALUES,
    LogBytes,
    by_hand,
    column,
    contents,
    head_slot,
    keys_piece,
    manifest,
    numbers,
    padded,
    ranks_by_hand,
    xxh64,
)

import speedswap
from speedswap import Column, Table, init
from speedswap.errors import TableFormatError


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_table_written_by_the_page_is_read(tmp_path: Path, mode: str) -> None:
    by_hand(tmp_path / "t")
    weight, late = torch.full((ROWS, DIM), 0.5), torch.full((ROWS, DIM), 0.25)
    for row, (value, more) in VALUES.items():
        weight[row], late[row] = value, more
    with Table.open(tmp_path / "t", mode) as table:
        assert torch.equal(table.read(), weight)
        assert torch.equal(table.read(column="late"), late)
        assert (table.name, table.seed, dict(table.attributes), table.writes) == ("by hand", 5, {"step": 17}, 8)
        assert table.id_map is not None
        assert table.id_map.lookup(torch.tensor([*KEYS, 200])).tolist() == [*KEYS.values(), 0]
        assert table.commits.held == [3]


def test_held_commit_written_by_the_page_is_read(tmp_path: Path) -> None:
    by_hand(tmp_path / "t")
    with Table.open(tmp_path / "t", "r", commit=3) as table:
        assert table.read().unique().tolist() == [0, 0.25, 0.5, 2, 2.25, 3, 10, 11, 12, 13]
        assert table.columns.keys() == {"weight"}
        assert dict(table.attributes) == {"step": 3}


def test_table_of_ranks_written_by_the_page_is_read(tmp_path: Path) -> None:
    ranks_by_hand(tmp_path / "t")
    with Table.open(tmp_path / "t", "r") as table:
        expected = torch.full((OF_RANKS, DIM), 0.5)
        expected[::7] = torch.arange(0, OF_RANKS, 7).float()[:, None]
        assert torch.equal(table.read(), expected)


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_another_version_is_refused_by_its_number(tmp_path: Path, version: object) -> None:
    path = tmp_path / "t"
    by_hand(path)
    body = json.loads((path / "MANIFEST").read_bytes()[9:])
    (path / "MANIFEST").write_bytes(manifest({**body, "version": version}))
    with pytest.raises(TableFormatError, match=f"version is {version!r}"):
        Table.open(path, "r")


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def assert_equal(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        same = zip(found[name], data, strict=False)
        assert (name, next((at for at, (a, b) in enumerate(same) if a != b), None)) == (name, None)
        assert len(found[name]) == len(data)


def test_every_byte_that_is_written_is_as_the_page_has_it(tmp_path: Path) -> None:
    """A new table; rows, attributes and keys in a commit; a column, and a commit that is held; another life."""
    path, rows = tmp_path / "golden", 64
    table = Table.create(rows, 64, storage=speedswap.Disk(path, commit_seconds=None), init=init.constant(0.5), seed=7)
    salt = json.loads((path / "MANIFEST").read_bytes()[9:])["salt"]
    weight, late = column("weight", [64], 0.5), column("late", [2], 4.0)
    layouts: list[dict[str, Any]] = [{"number": 0, "stride": 256, "held": [[0, 0, 0, 0, None, []]]}]
    described = {"version": 1, "name": "golden", "num_embeddings": rows, "seed": 7, "group_rows": 1}
    described |= {"segment_bytes": SEGMENT, "salt": salt, "scratch": False}
    files = {"MANIFEST": manifest({**described, "columns": [weight], "layouts": layouts}), "LOCK": b"", "rows.log": b""}
    empty = head_slot(salt, 0, 0, (0, 0), contents(0, 0, {}, {}))
    files["HEAD"] = empty + empty + bytes(2 * SLOT)
    found = files_of(path)
    assert re.fullmatch(rb"[0-9]+ on .+\n", found.pop("OWNER"))
    assert_equal(found, files)

    life = 2**32  # what a life adds to the sequence numbers
    log = LogBytes(salt, SEGMENT, [256, 288])
    table.set_id_map(speedswap.IdMap(rows - 1, keys="exact"))
    assert table.id_map is not None
    table.id_map.add(["cat", "à"])
    table.scatter(torch.tensor([4, 1]), torch.tensor([[1.0], [2.0]]).expand(2, 64))
    table.attributes["step"] = 1.5
    table.flush()
    log.add(0, 0, life + 1, 0, (life + 1, [(4, numbers("f", *[1] * 64)), (1, numbers("f", *[2] * 64))]))
    files["keys-0.bin"] = keys_of({"used": 2, "clock": 1}, ["cat", "à"])
    body = contents(0, 1, {"step": 1.5}, {"": [["keys-0.bin", BLOCK]]})
    slot = head_slot(salt, 1, life + 1, log.index(life + 1), body)
    files |= {"HEAD": slot + slot + bytes(2 * SLOT), "rows.log": padded(bytes(log.data), 5 * SEGMENT)}
    found = files_of(path)
    del found["OWNER"]
    assert_equal(found, files)

    table.add_columns([Column("late", (2,), torch.float32, init.constant(4.0))])
    table.scatter(torch.tensor([4]), {"weight": torch.full((1, 64), 3.0), "late": torch.full((1, 2), 5.0)})
    table.id_map.add(["bee"])
    assert table.commits.hold() == 3
    table.close()
    layouts.append({"number": 1, "stride": 288, "held": [[0, 0, 0, 0, None, []], [1, 256, 1, 1, None, []]]})
    files["MANIFEST"] = manifest({**described, "columns": [weight, late], "layouts": layouts})
    last = life + 2  # layouts are added within a life
    log.add(5, 0, last, 1, (last, [(4, numbers("f", *[3] * 64, 5, 5) + bytes(24))]))
    files["keys-1.bin"] = keys_of({"used": 3, "clock": 2}, ["cat", "à", "bee"], [1, 2, 3])
    body = contents(1, 2, {"step": 1.5}, {"": [["keys-1.bin", BLOCK]]})
    slot = head_slot(salt, 3, last, log.index(last), body, held=True)
    files |= {"HEAD": slot + slot + slot + bytes(SLOT), "rows.log": padded(bytes(log.data), 9 * SEGMENT)}
    del files["keys-0.bin"]
    assert_equal(files_of(path), files)


def keys_of(counters: dict[str, int], texts: list[str], cells: list[int] | None = None) -> bytes:
    """Return a piece of the id map of 63 exact strings."""
    encoded = [text.encode() for text in texts]
    header: dict[str, Any] = {"capacity": 63, "keys": "exact", "admit_after": 1, "evict": None, **counters}
    header |= {"probation_used": 0, "last_place": 0, "text_bytes": [sum(map(len, encoded)), 0], "stale": 0}
    header["free_rows_are_stale"] = False
    offsets = [sum(map(len, encoded[:count])) for count in range(len(encoded) + 1)]
    arrays = [numbers("Q", *map(xxh64, encoded)), numbers("q", *offsets), b"".join(encoded)]
    arrays.append(numbers("q", 0))
    if cells is not None:
        header["cells"] = [len(cells), 0]
        arrays.append(numbers("i", *cells))
    return keys_piece(header, arrays)
