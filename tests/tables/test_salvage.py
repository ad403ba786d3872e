"""Saving what is left of a damaged table: every intact row is saved bit for bit, and every other one is named."""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_format import (
    BLOCK,
    DIM,
    GROUP,
    KEYS,
    LAST,
    OF_RANKS,
    OLDER,
    RANKS,
    ROWS,
    SEGMENT,
    SLOT,
    VALUES,
    LogBytes,
    by_hand,
    head_slot,
    place_of,
    ranks_by_hand,
)

import speedswap
from speedswap import Column, Table, init
from speedswap.cli import main
from speedswap.errors import TableBusyError, TableFormatError
from speedswap.tables.disk import salvage
from speedswap.tables.disk.salvage import Salvaged
from speedswap.tables.files.damage import bytes_left

LOG, HEAD = "rows-2.log", "HEAD-2"


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def rows_of(ranges: Iterable[range]) -> set[int]:
    return set(itertools.chain.from_iterable(ranges))


def expected(older: set[int], initial: set[int]) -> dict[str, torch.Tensor]:
    """Return the columns of the table by hand with some rows in an older version, or as they were never written."""
    values = dict.fromkeys(range(ROWS), (0.5, 0.25)) | VALUES
    values |= {row: OLDER[row] for row in older} | dict.fromkeys(initial, (0.5, 0.25))
    columns = torch.tensor([values[row] for row in range(ROWS)])
    return {name: columns[:, i, None].expand(ROWS, DIM) for i, name in enumerate(("weight", "late"))}


def require_saved(found: Salvaged, *, attributes: bool = True, keys: bool = True) -> None:
    """Require the expected rows in the new table, given the rows reported as lost."""
    wanted = expected(rows_of(found.older), rows_of(found.initial))
    with Table.open(found.out) as table:
        for name, values in wanted.items():
            assert torch.equal(table.read(column=name), values), name
        assert table.name == "by hand"
        if attributes:
            assert (dict(table.attributes), table.writes) == ({"step": 17}, 8)
        if keys:
            assert table.id_map is not None
            assert table.id_map.lookup(torch.tensor([*KEYS, 200])).tolist() == [*KEYS.values(), 0]


class Damaged:
    """A table by hand, to be damaged and saved again and again."""

    def __init__(self, folder: Path) -> None:
        self.path, self.out = folder / "t", folder / "out"
        self.log = by_hand(self.path)
        self.files = {file.name: file.read_bytes() for file in self.path.iterdir()}

    def restore(self, name: str) -> None:
        (self.path / name).write_bytes(self.files[name])

    def save(self, **options: Any) -> Salvaged:
        shutil.rmtree(self.out, ignore_errors=True)
        before = {file.name: file.read_bytes() for file in self.path.iterdir()}
        found = Table.salvage(self.path, self.out, **options)
        assert {file.name: file.read_bytes() for file in self.path.iterdir()} == before
        return found


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path)


def lost_with(log: LogBytes, at: int) -> tuple[set[int], set[int]]:
    """Return the rows whose newest record has a byte of the log: those with an older version, and those without."""
    for seq, group, place in log.records:
        newest = max(other for other, same, _ in log.records if same == group and other <= LAST)
        if at in place and seq == newest and seq > 3:  # 3 is of an earlier use of the segment
            rows = {row for row in range(group * GROUP, (group + 1) * GROUP) if row < ROWS}
            return (rows, set()) if rows <= OLDER.keys() else (set(), rows)
    return set(), set()


# ---- flipped bits ----------------------------------------------------------------------------------------------------


def test_a_whole_table_is_saved_as_it_is(damaged: Damaged) -> None:
    found = damaged.save()
    assert found.whole
    assert (found.commit, found.rows, found.mended) == (4, ROWS, [])
    require_saved(found)


@pytest.mark.release
def test_a_flipped_bit_anywhere_in_the_log_costs_its_row_alone(damaged: Damaged) -> None:
    """In every byte: a record's own is noticed, and everything else is put back."""
    manifest = speedswap.tables.files.manifest.ManifestFile.load(
        speedswap.tables.files.open_directory.OpenDirectory(damaged.path)
    )[1]
    data, total = damaged.files[LOG], damaged.log.index(LAST)
    draw = random.Random(0)
    lost = set()
    for at in (at for at in range(len(data)) if data[at] or at % BLOCK < 80):
        flip(damaged.path / LOG, at, mask := 1 << draw.randrange(8))
        with (damaged.path / LOG).open("rb") as file:
            log = salvage.DamagedLog(manifest, file.fileno(), LAST, total)
            assert log.is_whole, at
            bad = {
                int(group)
                for chunk in log.chunks
                for group in chunk.groups[log.are_live(chunk) & ~log.are_intact(chunk, log.records(chunk))]
            }
        flip(damaged.path / LOG, at, mask)
        wanted = set.union(*lost_with(damaged.log, at))
        assert {row for group in bad for row in range(group * GROUP, (group + 1) * GROUP) if row < ROWS} == wanted, at
        lost |= wanted
    assert lost == VALUES.keys()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", [LOG, HEAD, "MANIFEST", "keys-5.bin", "keys-40.bin"])
def test_a_flipped_bit_in_any_file_leaves_everything_else(damaged: Damaged, name: str) -> None:
    """The table that is saved has every row as it was, or as is said; attributes and keys are put back."""
    data, draw = damaged.files[name], random.Random(name)
    used = [at for at in range(len(data)) if data[at] or at % BLOCK < 60]
    end = 2 * BLOCK if name == "keys-5.bin" else len(data)
    for at in draw.sample([at for at in used if at < end], 25):
        flip(damaged.path / name, at, 1 << draw.randrange(8))
        found = damaged.save()
        damaged.restore(name)
        older, initial = lost_with(damaged.log, at) if name == LOG else (set(), set())
        assert (rows_of(found.older), rows_of(found.initial)) == (older, initial), at
        assert found.complete
        assert not found.problems
        assert found.mended in ([], [name])
        require_saved(found)
    if name != LOG:
        assert "rows-2.log" not in found.mended


# ---- more than a bit -------------------------------------------------------------------------------------------------


def zeros(name: str, at: int, count: int) -> Callable[[Path], None]:
    return lambda path: overwrite(path / name, at, bytes(count))


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, length)


def flips(name: str, *places: int) -> Callable[[Path], None]:
    return lambda path: [flip(path / name, at) for at in places] and None


@pytest.mark.parametrize(
    "damage, older, initial, complete",
    [
        # A header's salt and seq; its checksum and the two groups: their records tell whose they are.
        (flips(LOG, 8, 17), (), (), True),
        (flips(LOG, 5, 64, 68), (), (), True),
        (flips(LOG, SEGMENT + 1, SEGMENT + 9, SEGMENT + 64), (), (), True),
        # The first chunk's header and one of its records, of group 2.
        (flips(LOG, 8, 17, BLOCK + 1000), (), range(8, 12), True),
        # All of a header but its groups: what it was is said by the chunk after it.
        (zeros(LOG, 0, 64), (), (), True),
        # All of it: no byte tells that groups 0 and 7 were in it.
        (zeros(LOG, SEGMENT, BLOCK), (), (), False),
        (cut(LOG, SEGMENT), (), (), False),
        (cut(LOG, SEGMENT + BLOCK + 100), range(4), (28, 29), True),
        # Room behind the last chunk, and the chunk after the commit.
        (cut(LOG, 2 * SEGMENT), (), (), True),
        (zeros(LOG, SEGMENT + 2 * BLOCK, BLOCK), (), (), True),
    ],
)
def test_more_damage_to_the_log(
    damaged: Damaged,
    damage: Callable[[Path], None],
    older: Iterable[int],
    initial: Iterable[int],
    complete: bool,
) -> None:
    damage(damaged.path)
    found = damaged.save()
    assert (rows_of(found.older), rows_of(found.initial)) == ({*older}, {*initial})
    assert found.complete is complete
    if complete:
        require_saved(found)
    else:
        assert "may be older than that commit" in found.lines()[-1]
        with Table.open(found.out) as table:
            right, wrong = expected(set(), set()), set()
            for name, values in right.items():
                wrong |= {*(table.read(column=name) != values).any(dim=1).nonzero().flatten().tolist()}
        assert wrong == {0, 1, 2, 3, 28, 29}  # those of the chunk that is gone, and no others


def test_rows_that_a_crash_left_behind_do_not_come_back(damaged: Damaged) -> None:
    """Neither from a chunk after the commit nor from an earlier use of a segment, even where others are gone."""
    overwrite(damaged.path / LOG, SEGMENT, bytes(BLOCK))
    overwrite(damaged.path / LOG, 0, bytes(BLOCK + 324))
    found = damaged.save()
    with Table.open(found.out) as table:
        assert not (table.read() == 60).any()
        assert not (table.read() == 9).any()


@pytest.mark.parametrize("body", [b'{"file": "keys-40.bin"}', b'{"file": "keys-40.bin", "crc32": "1"}', b'{"file": 1}'])
def test_a_HEAD_that_names_its_file_wrongly_leaves_the_rows(damaged: Damaged, body: bytes) -> None:
    log = damaged.log
    overwrite(damaged.path / HEAD, SLOT, head_slot(log.salt, 4, LAST, log.index(LAST), body))
    found = damaged.save()
    assert (found.commit, found.complete) == (4, True)
    assert "attributes and id maps are lost: the HEAD of table" in " ".join(found.problems)


def test_a_lost_HEAD_leaves_the_rows(damaged: Damaged) -> None:
    """Of the held commit, if that is left, with its attributes; else as they were written last."""
    overwrite(damaged.path / HEAD, SLOT, bytes(BLOCK))
    found = damaged.save()
    assert (found.commit, found.complete) == (3, True)
    assert "was held" in " ".join(found.problems)
    with Table.open(found.out) as table:
        assert dict(table.attributes) == {"step": 3}
        assert table.read(1, 2)[0, 0] == 0.25
    for lose in (lambda: overwrite(damaged.path / HEAD, 2 * SLOT, bytes(BLOCK)), (damaged.path / HEAD).unlink):
        lose()
        found = damaged.save()
        assert (found.commit, found.complete, found.older, found.initial) == (None, False, [], [])
        assert "no commit left" in " ".join(found.problems)
        with Table.open(found.out) as table:
            assert (table.read(0, 4) == 40).all()
            assert not table.attributes
            assert table.id_map is None


def test_a_lost_MANIFEST_is_replaced_by_that_of_a_like_table(damaged: Damaged, tmp_path: Path) -> None:
    """Its salt comes from the files."""
    overwrite(damaged.path / "MANIFEST", 20, b"XYZ")
    for lose in (lambda: None, (damaged.path / "MANIFEST").unlink):
        lose()
        with pytest.raises(TableFormatError, match="--manifest"):
            damaged.save()
    text = damaged.files["MANIFEST"][9:].replace(str(0xFEDCBA9876543210).encode(), b"7")
    (tmp_path / "other").write_bytes(b"%08x\n" % zlib.crc32(text) + text)
    found = damaged.save(manifest=tmp_path / "other")
    assert found.whole
    require_saved(found)


@pytest.mark.parametrize(
    "damage, problem, keys",
    [
        (zeros("keys-5.bin", BLOCK - 100, 50), "", KEYS),  # padding
        (flips("keys-5.bin", 224, 232), "rows 1 to 3 may be wrong", {222: 2, 444: 4}),
        (flips("keys-5.bin", BLOCK + 40, BLOCK + 41), "lost, or as they were before", {100: 1, 300: 3}),
        (cut("keys-5.bin", BLOCK), "its end", {100: 1, 300: 3}),
        (zeros("keys-5.bin", 0, 26), "its beginning", {}),
        (lambda path: (path / "keys-5.bin").unlink(), "cannot be read", {}),
        (flips("keys-40.bin", 3, 30), "attributes and id maps are lost", {}),
    ],
)
def test_more_damage_to_an_id_map(
    damaged: Damaged, damage: Callable[[Path], None], problem: str, keys: dict[int, int]
) -> None:
    """Rows are saved in any case, and the keys that are known with them."""
    damage(damaged.path)
    found = damaged.save()
    assert problem in " ".join(found.problems)
    require_saved(found, attributes="attributes" not in problem, keys=not problem)
    with Table.open(found.out) as table:
        assert (table.id_map is not None) is bool(keys)
        if table.id_map is not None:
            assert table.id_map.lookup(torch.tensor([*keys])).tolist() == [*keys.values()]


def test_strings_are_named_where_their_hashes_differ(tmp_path: Path) -> None:
    """In a damaged piece of exact strings the others are known to be right."""
    with Table.create(50, 64, path=tmp_path / "t") as table:
        table.set_id_map(speedswap.IdMap(49, keys="exact"))
        assert table.id_map is not None
        table.id_map.add(["apple", "banana", "cherry"])
    keys = tmp_path / "t" / "keys-0.bin"
    at = keys.read_bytes().index(b"applebanana")
    overwrite(keys, at + 5, b"B")
    overwrite(keys, at + 8, b"A")
    found = Table.salvage(tmp_path / "t", tmp_path / "out")
    assert "rows 2 to 2 may be wrong" in " ".join(found.problems)
    with Table.open(tmp_path / "out") as table:
        assert table.id_map is not None
        assert table.id_map.lookup(["apple", "banana", "cherry"]).tolist() == [1, 0, 3]


def test_bytes_that_a_disk_does_not_read_are_zeros() -> None:
    """Those around them are read: here of a process's memory, of which a part is not there (EIO)."""
    there = mmap.mmap(-1, 3 * BLOCK)
    there.write(b"x" * (3 * BLOCK))
    at = ctypes.addressof(ctypes.c_char.from_buffer(there))
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    assert bytes_left(fd, at + 100, BLOCK) == b"x" * BLOCK
    assert bytes_left(fd, 0, 2 * BLOCK + 7) == bytes(2 * BLOCK + 7)
    os.close(fd)


# ---- tables of every kind --------------------------------------------------------------------------------------------


def test_given_rows_that_are_lost_are_zeros(tmp_path: Path) -> None:
    """Their initial values cannot be computed, and a table must have some."""
    values = torch.randn(2000, 70)
    with Table.create(2000, 70, path=tmp_path / "t", init=lambda weight: weight.copy_(values)):
        pass
    log = (tmp_path / "t" / "rows.log").read_bytes()
    flip(tmp_path / "t" / "rows.log", log.index(values[33].numpy().tobytes()) + 7)
    at = log.index(values[1700].numpy().tobytes()) // SEGMENT * SEGMENT  # of which all is lost
    overwrite(tmp_path / "t" / "rows.log", at, bytes(SEGMENT))
    found = Table.salvage(tmp_path / "t", tmp_path / "out")
    assert not found.complete
    lost = rows_of(found.initial)
    assert {33, 1700} <= lost
    assert len(lost) < 300
    with Table.open(tmp_path / "out") as table:
        for row, saved in enumerate(table.read()):
            assert torch.equal(saved, torch.zeros(70) if row in lost else values[row])
        table.write(0, torch.ones(2000, 70))


def test_rows_after_kills_are_those_of_the_last_commit(tmp_path: Path) -> None:
    """Of many lives, with rows in cleaned segments, stochastic columns and an optimizer's state."""
    path, draw = tmp_path / "t", random.Random(1)
    Table.create(500, 70, path=path, init=init.normal(), seed=2).close()
    for life in range(6):
        with Table.open(speedswap.Disk(path, cache_bytes=1)) as table:
            if life == 2:
                table.add_columns([Column("state", (70,), torch.float32, init.normal(), stored=torch.bfloat16)])
            for _ in range(12):
                rows = torch.tensor(draw.sample(range(500), 100))
                table.scatter(rows, {name: torch.randn(100, 70) for name in table.columns})
            table.attributes["life"] = life
    with Table.open(path, "r") as table:
        wanted = {name: table.read(column=name) for name in table.columns}
    found = Table.salvage(path, tmp_path / "out")
    assert found.whole
    with Table.open(tmp_path / "out") as table:
        assert {name: torch.equal(table.read(column=name), values) for name, values in wanted.items()} == dict.fromkeys(
            wanted, True
        )
        assert dict(table.attributes) == {"life": 5}


def test_a_table_of_ranks_is_saved_as_one(tmp_path: Path) -> None:
    """Lost rows are named by their ids; a shard that is missing cannot be made up for."""
    ranks_by_hand(tmp_path / "t")
    shard = tmp_path / "t" / f"shard-1-of-{RANKS}"
    log = (shard / "rows.log").read_bytes()
    flip(shard / "rows.log", log.index(torch.full((DIM,), 308.0).numpy().tobytes()) + 5)
    flip(shard / "MANIFEST", 100)
    found = Table.salvage(tmp_path / "t", tmp_path / "out")
    places = [place_of(row, OF_RANKS, RANKS) for row in range(OF_RANKS)]
    group = [
        row for row, (owner, place) in enumerate(places) if (owner, place // GROUP) == (1, places[308][1] // GROUP)
    ]
    assert ([*itertools.chain(*found.initial)], found.complete, found.commit) == (group, True, 1)
    wanted = torch.full((OF_RANKS, DIM), 0.5)
    wanted[::7] = torch.arange(0, OF_RANKS, 7).float()[:, None]
    wanted[308] = 0.5
    with Table.open(tmp_path / "out", "r") as table:
        assert torch.equal(table.read(), wanted)
    shutil.rmtree(shard)
    with pytest.raises(TableFormatError, match="shard-1-of-3"):
        Table.salvage(tmp_path / "t", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# ---- what is refused, and the command --------------------------------------------------------------------------------


def test_nothing_is_changed_that_exists(damaged: Damaged, tmp_path: Path) -> None:
    damaged.out.mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        Table.salvage(damaged.path, damaged.out)
    with pytest.raises(ValueError, match="inside the damaged table"):
        Table.salvage(damaged.path, damaged.path / "out")
    with pytest.raises(FileNotFoundError, match="no table"):
        Table.salvage(tmp_path / "nothing", tmp_path / "other")
    (damaged.path / LOG).unlink()
    with pytest.raises(TableFormatError, match=r"rows-2\.log is missing"):
        Table.salvage(damaged.path, tmp_path / "other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "t"]


def test_a_table_that_is_being_written_is_refused(tmp_path: Path) -> None:
    with Table.create(10, 4, path=tmp_path / "t"), pytest.raises(TableBusyError, match=str(os.getpid())):
        Table.salvage(tmp_path / "t", tmp_path / "out")


def test_links_in_a_hostile_directory_are_not_followed(damaged: Damaged, tmp_path: Path) -> None:
    for name in (HEAD, "keys-5.bin"):
        (damaged.path / name).rename(tmp_path / name)
        (damaged.path / name).symlink_to(tmp_path / name)
    found = Table.salvage(damaged.path, damaged.out)
    assert "symbolic link" in " ".join(found.problems)
    assert found.commit is None
    (damaged.path / LOG).rename(tmp_path / LOG)
    os.mkfifo(damaged.path / LOG)
    with pytest.raises(TableFormatError, match="FIFO"):
        Table.salvage(damaged.path, tmp_path / "again")


@pytest.mark.parametrize("seed", range(2))
def test_noise_is_survived(damaged: Damaged, seed: int) -> None:
    """Files of any bytes give a table, or one of the errors that are promised."""
    draw = random.Random(seed)
    for name in damaged.files:
        for trial in range(6):
            data = bytearray(damaged.files[name])
            for _ in range(draw.choice([1, 3, 30])):
                at = draw.randrange(min(len(data), 3 * BLOCK))
                data[at : at + 40] = draw.randbytes(len(data[at : at + 40]))
            (damaged.path / name).write_bytes(data if trial % 3 else draw.randbytes(draw.choice([0, 100, 9000])))
            try:
                found = damaged.save()
            except TableFormatError:
                assert name == "MANIFEST"
                continue
            named = rows_of(found.older) | rows_of(found.initial)
            right, values = expected(set(), set()), found.complete and found.commit == 4
            with Table.open(found.out) as table:
                for row in {*range(ROWS)} - named if values else ():
                    assert torch.equal(table.read(row, row + 1), right["weight"][row : row + 1])
        damaged.restore(name)


def test_the_command_lists_what_is_lost(damaged: Damaged, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "out.salvaged.json"
    assert main(["salvage", str(damaged.path), str(damaged.out)]) == 0
    assert "every row is as of that commit" in capsys.readouterr().out
    assert not report.exists()
    shutil.rmtree(damaged.out)
    group = next(place for seq, group, place in damaged.log.records if (seq, group) == (LAST, 7))
    flip(damaged.path / LOG, group.start)
    assert main(["salvage", str(damaged.path), str(damaged.out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(report.read_text())
    assert (found["initial"], found["whole"], found["commit"]) == ([[28, 30]], False, 4)
    assert main(["salvage", str(damaged.path), str(tmp_path / "x")]) == 1
    assert "rows 28 to 29: initial values, since no version is intact" in capsys.readouterr().out
    for out in (damaged.out, tmp_path / "new"):
        shutil.copy(report, tmp_path / "new.salvaged.json")
        assert main(["salvage", str(damaged.path), str(out)]) == 2
        assert "exists" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look as another user")
def test_a_directory_that_may_only_be_read_is_enough(damaged: Damaged, tmp_path: Path) -> None:
    out = tmp_path / "free"
    out.mkdir(mode=0o777)
    for each in (*damaged.path.iterdir(), damaged.path):
        each.chmod(0o555 if each.is_dir() else 0o444)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    out.chmod(0o777)
    places = str(damaged.path), str(out / "o")
    program = f"import os, speedswap; os.setuid(65534); print(speedswap.Table.salvage(*{places}).whole)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert done.stdout == "True\n", done.stderr
