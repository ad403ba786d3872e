"""An id map's files grow by what has changed since the commit before, and every commit has all of its map."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import killed_at

import speedswap
from speedswap import kernels
from speedswap.errors import TableFormatError
from speedswap.tables.files import keys_file as key_parts
from speedswap.tables.files.keys_file import PIECE_BYTES

KINDS = [
    {},
    {"keys": "exact"},
    {"keys": "exact", "evict": "lfu", "admit_after": 2},
    {"evict": "lru"},
    {"evict": "lfu"},
    {"admit_after": 3},
    {"admit_after": 2, "evict": "lru"},
]


@pytest.fixture(autouse=True)
def _short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_parts, "_LEAST_CELLS", 3)


def table_of(path: Path, id_map: speedswap.IdMap, **options: Any) -> speedswap.Table:
    table = speedswap.Table.create(id_map.num_rows, 2, storage=speedswap.Disk(path, commit_seconds=None), **options)
    table.set_id_map(id_map)
    return table


def batch(draw: random.Random, kind: str, most: int, size: int) -> Any:
    numbers = [draw.randrange(most) for _ in range(draw.randrange(1, size))]
    return torch.tensor(numbers) if kind != "exact" else ["k" * (number % 7) + str(number) for number in numbers]


def files_of(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir() if file.name.startswith("keys")}


def is_as_in_files(path: Path, id_map: speedswap.IdMap) -> bool:
    with speedswap.Table.open(path, "r") as reader:
        assert reader.id_map is not None
        return torch.equal(reader.id_map.to_bytes(), id_map.to_bytes())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_any_batches_between_commits_are_found_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Also when batches were asked for ahead, when the map was restored, and over several processes."""
    draw, path = random.Random(str(settings)), tmp_path / "table"
    users = speedswap.IdMap(60, **settings)
    most = 60 if users.evict is None else 150
    table = table_of(path, users)
    for step in range(60):
        for _ in range(draw.randrange(4)):
            users.add(batch(draw, users.keys, most, 12))
        asked = [users.ask(batch(draw, users.keys, most, 6)) for _ in range(draw.randrange(3))]
        if step % 20 == 9:
            users.restore(users.to_bytes())
        if asked and draw.random() < 0.5:
            users.begin(asked.pop(0))
        table.flush()
        assert is_as_in_files(path, users)
        users.take_back(asked)
        if step % 20 == 19:
            table.close()
            table = speedswap.Table.open(speedswap.Disk(path, commit_seconds=None))
            assert table.id_map is not None
            assert torch.equal(table.id_map.to_bytes(), users.to_bytes())
            users = table.id_map
        assert len(files_of(path)) <= 4
    table.close()


def grown(tmp_path: Path, evict: str | None = None) -> tuple[Path, speedswap.Table, speedswap.IdMap]:
    """Return a table whose map of 3,000 keys was committed."""
    users = speedswap.IdMap(20_000, evict=evict)
    table = table_of(tmp_path / "table", users)
    users.add(torch.arange(3000))
    table.flush()
    return tmp_path / "table", table, users


@pytest.mark.parametrize("evict", [None, "lru"])
def test_a_commit_writes_what_has_changed(tmp_path: Path, evict: str | None) -> None:
    """Three keys take a block of the disk, of a map that takes several; not all of its keys."""
    path, table, users = grown(tmp_path, evict)
    whole = len(users.to_bytes())
    for step in range(4):
        before = table.store.log.stats()["bytes_written"]
        users.add(torch.tensor([10_000 + step, 5, 6]))
        table.flush()
        assert table.store.log.stats()["bytes_written"] - before < whole
        assert is_as_in_files(path, users)
    first, _ = sorted(files_of(path))
    assert files_of(path)[first] >= whole
    table.close()


def test_former_files_go_when_a_sweep_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay within about thrice the map, however long it is changed."""
    monkeypatch.setattr(key_parts, "_LEAST_CELLS", 300)
    path, table, users = grown(tmp_path, "lru")
    seen, largest = set(), 0
    for step in range(60):
        users.add(torch.arange(step, 3000, 7))
        table.flush()
        seen |= files_of(path).keys()
        largest = max(largest, sum(files_of(path).values()))
    assert is_as_in_files(path, users)
    assert len(seen) > 4
    assert largest < 4 * len(users.to_bytes()) + 2**18
    table.close()


def test_a_held_commit_keeps_its_map(tmp_path: Path) -> None:
    """The restored commit has the map of its time, whatever came after it, and takes new keys again."""
    path, table, users = grown(tmp_path)
    users.add(torch.tensor([10_000]))
    held, then = table.commits.hold(), users.to_bytes()
    for key in range(10_001, 10_010):
        users.add(torch.tensor([key]))
        table.flush()
    table.close()
    with speedswap.Table.open(speedswap.Disk(path, commit_seconds=None)) as table:
        table.commits.return_to(held)
        assert table.id_map is not None
        table.id_map.restore(then)
        table.id_map.add(torch.tensor([7_000_000]))
        table.flush()
        assert is_as_in_files(path, table.id_map)
        table.commits.return_to(held)
        table.id_map.restore(then)
    with speedswap.Table.open(path, "r") as table:
        assert table.id_map is not None
        assert torch.equal(table.id_map.to_bytes(), then)


def test_readers_follow_a_map_that_grows(tmp_path: Path) -> None:
    path, table, users = grown(tmp_path)
    with speedswap.Table.open(path, "r") as reader:
        for key in range(10_000, 10_004):
            users.add(torch.tensor([key]))
            table.flush()
            reader.read(0, 1)
            assert reader.id_map is not None
            assert torch.equal(reader.id_map.lookup(torch.tensor([key])), users.lookup(torch.tensor([key])))
    table.close()


def killed_between(path: Path, work: Any) -> Iterator[speedswap.IdMap]:
    step = 0
    while killed_at(step, work, ("open", "write", "posix_fallocate", "fsync", "unlink")):
        step += 1
        with speedswap.Table.open(speedswap.Disk(path, commit_seconds=None)) as table:
            assert table.id_map is not None
            yield table.id_map
    assert step > 3


@pytest.mark.release
def test_a_process_killed_anywhere_in_its_commits_leaves_one_of_them(tmp_path: Path) -> None:
    """Rows and keys are of one commit: row 0 of the table says which, and that commit's keys are all there."""
    path, table, _ = grown(tmp_path, "lru")
    table.write(0, torch.zeros(1, 2))
    table.close()

    def work() -> None:
        table = speedswap.Table.open(speedswap.Disk(path, commit_seconds=None))
        assert table.id_map is not None
        begun = int(table.read(0, 1)[0, 0])
        for commit in range(begun + 1, begun + 4):
            table.id_map.add(torch.tensor([10_000 + commit, commit]))
            table.write(0, torch.full((1, 2), float(commit)))
            table.flush()

    for _ in killed_between(path, work):
        with speedswap.Table.open(path, "r") as reader:
            assert reader.id_map is not None
            commit = int(reader.read(0, 1)[0, 0])
            rows = reader.id_map.lookup(torch.arange(10_000, 10_000 + commit + 4))
            assert len(reader.id_map) == 3000 + commit
            assert torch.equal(rows[1 : commit + 1], torch.arange(3001, 3001 + commit))
            assert not rows[commit + 1 :].any()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_flipped_bit_or_a_lost_end_of_any_piece_is_found(tmp_path: Path, mode: str) -> None:
    path, table, users = grown(tmp_path)
    for key in range(10_000, 10_003):
        users.add(torch.tensor([key]))
        table.flush()
    table.close()
    intact = {name: (path / name).read_bytes() for name in files_of(path)}
    for name, raw in intact.items():
        counted = [begin for begin in range(0, len(raw), PIECE_BYTES) if raw[begin : begin + 9] == b"speedswap"]
        for begin in counted:
            for damaged in (raw[: begin + 40] + bytes([raw[begin + 40] ^ 4]) + raw[begin + 41 :], raw[: begin + 40]):
                (path / name).write_bytes(damaged)
                with pytest.raises(TableFormatError, match="is damaged"):
                    speedswap.Table.open(path, mode)
        (path / name).write_bytes(raw)
    with speedswap.Table.open(path, mode) as opened:
        assert opened.id_map is not None
        assert torch.equal(opened.id_map.to_bytes(), users.to_bytes())


def test_what_a_full_disk_refused_is_in_the_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, table, users = grown(tmp_path)
    users.add(torch.tensor([10_000]))
    with monkeypatch.context() as patch:

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(kernels, "allocate", full)
        with pytest.raises(speedswap.errors.TableFullError):
            table.flush()
    users.add(torch.tensor([10_001]))
    table.flush()
    assert is_as_in_files(path, users)
    table.close()
