"""Checkpoints are good, damaged or unknown: what is damaged never counts, and nothing is let go for the unknown."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import CheckpointError, TableClosedError
from speedswap.swapping.checkpoints import files, folders, loading, saving
from speedswap.swapping.checkpoints.format import Manifest

ROWS = 600


class Run:
    """A small training with a table, whose rows after each saved step are known.

    Args:
        folder: where its checkpoints are, and its table unless it is in memory.
        on_disk: True for a table on disk, to whose commits checkpoints refer.
    """

    def __init__(self, folder: Path, *, on_disk: bool = True) -> None:
        self.folder = folder
        place: dict[str, Any] = {"path": folder / "table"} if on_disk else {"storage": "pageable"}
        self.items = speedswap.Embedding(ROWS, 8, seed=1, **place)
        self.model = nn.Sequential(self.items, nn.Linear(8, 40))
        self.model[1].requires_grad_(False)
        self.optimizer = torch.optim.Adagrad(self.items.parameters(), lr=0.1)
        self.rows: dict[int, Tensor] = {}

    def save(self, step: int, to: str = "saved", **settings: Any) -> Path:
        self.optimizer.zero_grad()
        self.model(torch.arange(20) + step).square().sum().add(1).backward()
        self.optimizer.step()
        self.rows[step] = self.items.read().clone()
        saved = speedswap.save_checkpoint(self.folder / to, self.model, self.optimizer, step=step, **settings)
        return saved.path

    def loads(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint is loaded, with the rows that it was saved with."""
        try:
            model = self.load(path)
        except CheckpointError:
            return False
        return torch.equal(model[0].read(), self.rows[step]) and torch.equal(model[1].weight, self.model[1].weight)

    @staticmethod
    def load(path: Path) -> nn.Sequential:
        model = nn.Sequential(speedswap.Embedding(ROWS, 8, seed=1), nn.Linear(8, 40))
        speedswap.load_checkpoint(path, model)
        return model


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def flip_row(log: Path, row: Tensor) -> None:
    """Flip a bit of a row in the log of a table."""
    place = log.read_bytes().rfind(row.numpy().tobytes())
    assert place > 0
    flip(log, place + 5)


def describe(folder: Path, file: str = "CHECKPOINT", **changes: Any) -> None:
    """Change the description of a checkpoint or a table, with a checksum that fits."""
    body = json.loads((folder / file).read_bytes().partition(b"\n")[2])
    text = json.dumps({**body, **changes}).encode()
    (folder / file).write_bytes(b"%08x\n" % zlib.crc32(text) + text)


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


# ---- what cannot be read now -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["EIO", "ESTALE", "EACCES", "EMFILE", "ENOMEM", "ETIMEDOUT", "MemoryError"])
@pytest.mark.parametrize("elsewhere", [True, False], ids=["other directory", "same directory"])
def test_an_error_that_passes_lets_nothing_go(
    failure: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While another checkpoint's description is read, as on a network disk that stalls."""
    run = Run(tmp_path)
    first = run.save(1)
    read, number = os.pread, getattr(errno, failure, 0)

    def fails(fd: int, nbytes: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == str(first / "CHECKPOINT"):
            raise OSError(number, os.strerror(number)) if number else MemoryError
        return read(fd, nbytes, at)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "speedswap"):
        patch.setattr(os, "pread", fails)
        second = run.save(2, "other" if elsewhere else "saved")
    assert run.loads(first, 1)
    assert run.loads(second, 2)
    assert str(first) in caplog.text
    run.save(3, "other" if elsewhere else "saved")
    assert first.exists() == elsewhere
    assert len(run.items.table.commits.held) == 1
    run.items.table.close()


def test_a_header_of_rows_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fails under the blocks that say which rows follow, after the table was opened."""
    run = Run(tmp_path, on_disk=False)
    paths = []
    for step in (1, 2):
        paths += [run.save(step, keep=2)]
        saving.copied.clear()  # so that each has its own copy
    open_part = files.open_part

    def opened(part: Any, folder: Path, *more: Any) -> Any:
        table = open_part(part, folder, *more)
        if folder == paths[1]:
            table.store.log.fail("read", 0, errno.EIO, 1000)
        return table

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "speedswap"):
        patch.setattr(files, "open_part", opened)
        paths += [run.save(3, keep=2)]
    assert f"no checkpoint in {tmp_path / 'saved'} is removed" in caplog.text
    assert os.strerror(errno.EIO) in caplog.text
    assert all(run.loads(path, step) for step, path in enumerate(paths, 1))
    paths += [run.save(4, keep=2)]
    assert names_in(tmp_path / "saved") == [path.name for path in paths[2:]]


def test_memory_that_runs_out_while_a_checkpoint_is_read_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, empty = Run(tmp_path, on_disk=False), torch.empty

    def save(step: int) -> Path:
        return run.save(step, keep=2, extra=torch.full((1, 2**16), step))

    def without_memory(*shape: Any, **settings: Any) -> Tensor:
        found = empty(*shape, **settings)
        is_read = found.nbytes == 2**19 and (tmp_path / "saved" / "000003-step-3").exists()
        return empty(2**60) if is_read else found

    paths = [save(1), save(2)]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "speedswap"):
        patch.setattr(torch, "empty", without_memory)
        paths += [save(3)]
    assert f"no checkpoint in {tmp_path / 'saved'} is removed" in caplog.text
    assert "allocate" in caplog.text
    assert all(run.loads(path, step) for step, path in enumerate(paths, 1))


def test_a_newer_format_is_not_taken_for_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    first = run.save(1)
    describe(first, version=2)
    with caplog.at_level(logging.WARNING, "speedswap"):
        run.save(2)
        run.save(3)
    assert first.exists()
    assert f"{first} cannot be read, but may be good: CHECKPOINT cannot be read: its version is 2" in caplog.text
    with pytest.raises(CheckpointError, match="use the one that wrote it, or a newer one"):
        speedswap.load_checkpoint(first, run.model)
    describe(first, version=1)
    assert run.loads(first, 1)
    run.items.table.close()


def save_around(run: Run, spoil: Callable[[Path], object]) -> tuple[Path, list[str]]:
    """Save four checkpoints, the last of which keeps two, and spoil the third; return its folder, and all names."""
    for step in (1, 2, 3):
        saving.copied.clear()  # so that each has other files
        folder = run.save(step, keep=None, extra=torch.full((9,), step), tables="copy" if step < 3 else "auto")
    spoil(folder)
    Run(run.folder, on_disk=False).save(4, keep=2)
    return folder, names_in(run.folder / "saved")


@pytest.mark.parametrize("on_disk", [True, False], ids=["reference", "copy"])
def test_a_table_of_a_newer_format_is_not_taken_for_damage(on_disk: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, on_disk=on_disk)

    def place(folder: Path) -> Path:
        return tmp_path / "table" if on_disk else folder / "table-3-0"

    def spoil(folder: Path) -> None:
        run.items.table.close()
        describe(place(folder), "MANIFEST", version=2)

    folder, names = save_around(run, spoil)
    assert len(names) == 4
    with pytest.raises(CheckpointError, match=r"may be good: the MANIFEST of .* cannot be read: its version is 2"):
        run.load(folder)
    describe(place(folder), "MANIFEST", version=1)
    assert run.loads(folder, 3)


@pytest.mark.parametrize("there", [True, False], ids=["", "dangling"])
@pytest.mark.parametrize("name", ["CHECKPOINT", "tensors-3.safetensors", "table-3-0", "table-3-0/rows.log"])
def test_a_link_in_place_of_a_file_is_no_damage(name: str, there: bool, tmp_path: Path) -> None:
    """As git-annex and DVC leave it."""
    run, away = Run(tmp_path, on_disk=False), tmp_path / "away"

    def spoil(folder: Path) -> None:
        shutil.move(folder / name, away)
        (folder / name).symlink_to(away if there else tmp_path / "off-line")

    folder, names = save_around(run, spoil)
    assert len(names) == 4
    with pytest.raises(CheckpointError, match=r"may be good: .* is a symbolic link|there is no checkpoint"):
        run.load(folder)
    (folder / name).unlink()
    shutil.move(away, folder / name)
    assert run.loads(folder, 3)


@pytest.mark.parametrize("version", [True, 1.0, "1", 0, -1, None])
def test_a_version_that_is_no_version_is_damage(version: object, tmp_path: Path) -> None:
    run = Run(tmp_path, on_disk=False)
    describe(run.save(1), version=version)
    with pytest.raises(CheckpointError, match="its version is"):
        speedswap.load_checkpoint(tmp_path / "saved", run.model)


@pytest.mark.parametrize("how", ["gone", "an empty directory", "half a folder"])
def test_a_directory_that_is_away_keeps_its_commit(how: str, tmp_path: Path) -> None:
    """As a disk that is not mounted, or one from which files are still being copied."""
    run = Run(tmp_path)
    first, away = run.save(1, "best"), tmp_path / "away"
    if how == "half a folder":
        away.mkdir()
        (first / "CHECKPOINT").rename(away / "CHECKPOINT")
    else:
        (tmp_path / "best").rename(away)
        if how == "an empty directory":
            (tmp_path / "best").mkdir()
    for step in (2, 3, 4):
        run.save(step)
    if how == "half a folder":
        (away / "CHECKPOINT").rename(first / "CHECKPOINT")
    else:
        shutil.rmtree(tmp_path / "best", ignore_errors=True)
        away.rename(tmp_path / "best")
    assert run.loads(first, 1)
    run.items.table.close()


def test_a_folder_without_a_description_is_left_alone(tmp_path: Path) -> None:
    """Its number is not given again, and what it may replace stays."""
    run = Run(tmp_path, on_disk=False)
    first = run.save(1)
    (tmp_path / "saved" / "000002-step-2").mkdir()
    (tmp_path / "saved" / "000002-step-2" / "part").write_text("")
    assert run.save(2).name == "000003-step-2"
    assert run.loads(first, 1)
    shutil.rmtree(tmp_path / "saved" / "000002-step-2")
    run.save(3)
    assert names_in(tmp_path / "saved") == ["000004-step-3"]


# ---- what is damaged -------------------------------------------------------------------------------------------------

PLACES: dict[str, tuple[str, int]] = {
    "a tensor": ("tensors-1.safetensors", -3),
    "a row": ("table-1-0/rows.log", 0),
    "a table's description": ("table-1-0/MANIFEST", 40),
    "a changed row": ("rows-2-0.safetensors", -3),
}


@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "copies"])
@pytest.mark.parametrize("what", PLACES)
def test_linked_files_are_read_back_and_written_again_from_memory(
    what: str, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save never passes on what the disk has lost, and never removes the last good checkpoint for it."""
    if not linked:

        def refuses(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuses)
    run, (name, place) = Run(tmp_path, on_disk=False), PLACES[what]
    last = run.save(1)
    if what == "a changed row":
        last = run.save(2)
    if what == "a row":
        flip_row(last / name, run.rows[1][5])
    else:
        flip(last / name, place)
    with caplog.at_level(logging.WARNING, "speedswap"):
        last = run.save(3)
    assert "written again" in caplog.text
    assert names_in(tmp_path / "saved") == [last.name]
    assert run.loads(last, 3)
    assert run.loads(run.save(4), 4)


def test_what_is_damaged_on_the_disk_alone_is_found_past_the_page_cache(tmp_path: Path) -> None:
    """Files that were read back are not left in the cache, from which a later check would read them."""
    run = Run(tmp_path, on_disk=False)
    dropped, advise = set[str](), os.posix_fadvise

    def notes(fd: int, *args: int) -> None:
        dropped.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        advise(fd, *args)

    os.posix_fadvise = notes
    try:
        run.save(1)
        first = {*dropped}
        dropped.clear()
        run.save(2)
    finally:
        os.posix_fadvise = advise
    assert {"tensors-1.safetensors", "rows.log", "HEAD", "MANIFEST"} <= first
    assert {"tensors-1.safetensors", "rows-2-0.safetensors", "rows.log"} <= dropped


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda folder: flip(next(folder.glob("tensors-2*")), -3),
    "an empty file": lambda folder: os.truncate(next(folder.glob("tensors-2*")), 0),
    "a missing file": lambda folder: next(folder.glob("tensors-2*")).unlink(),
    "a flipped row": lambda folder: flip_row(next(folder.glob("table-*")) / "rows.log", torch.full((8,), 7.0)),
    "a log that was cut": lambda folder: os.truncate(next(folder.glob("table-*")) / "rows.log", 4096),
    "no log": lambda folder: (next(folder.glob("table-*")) / "rows.log").unlink(),
    "the description": lambda folder: flip(folder / "CHECKPOINT", 30),
}


@pytest.mark.parametrize("keep", ["number", "steps"])
@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_ones_do_not_count_and_stay_until_there_are_good_ones(what: str, keep: str, tmp_path: Path) -> None:
    run = Run(tmp_path, on_disk=False)
    run.model[1].requires_grad_(True)  # so that each has other tensors

    def save(step: int, kept: Any) -> Path:
        with torch.no_grad():
            run.model[1].weight.fill_(step)
        run.items.table.write(500, torch.full((1, 8), 7.0))
        saving.copied.clear()  # and a table
        return run.save(step, keep=kept)

    numbers = keep == "number"
    save(1, None)
    second = save(2, 2 if numbers else None)
    DAMAGE[what](second)
    save(3, 2 if numbers else [2])
    left = names_in(tmp_path / "saved")
    assert left == (["000001-step-1", "000002-step-2", "000003-step-3"] if numbers else left)
    assert "000002-step-2" in left
    save(4, 2 if numbers else [3])
    left = names_in(tmp_path / "saved")
    assert left == ["000003-step-3", "000004-step-4"]


def test_a_damaged_row_is_found_before_the_first_is_written(tmp_path: Path) -> None:
    """Also in the second of two tables, into memory and to disk."""

    def make(folder: Path | None = None) -> nn.ModuleList:
        paths = [{"path": folder / name} if folder else {} for name in ("one", "other")]
        return nn.ModuleList([speedswap.Embedding(50_000, 16, seed=seed, **paths[seed]) for seed in (0, 1)])

    saved = make()
    for each in saved:
        each.table.write(0, torch.randn(50_000, 16))
    path = speedswap.save_checkpoint(tmp_path / "saved", saved).path
    flip_row(path / "table-1-1" / "rows.log", saved[1].read()[49_000])
    for model in (make(), make(tmp_path / "tables")):
        before = [each.read().clone() for each in model]
        with pytest.raises(CheckpointError, match=r"cannot be read \(.*not as written"):
            speedswap.load_checkpoint(tmp_path / "saved", model)
        for each, rows in zip(model, before, strict=True):
            assert torch.equal(each.read(), rows)
            each.table.close()


def test_a_damaged_row_of_a_table_that_is_referred_to_is_found_before_the_first_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.items.table.write(0, torch.randn(ROWS, 8))
    run.save(1)
    run.items.table.close()
    flip_row(tmp_path / "table" / "rows.log", run.rows[1][500])
    other = nn.Sequential(speedswap.Embedding(ROWS, 8), nn.Linear(8, 40))
    before = other[0].read().clone()
    with pytest.raises(CheckpointError, match="not as written"):
        speedswap.load_checkpoint(tmp_path / "saved", other)
    assert torch.equal(other[0].read(), before)


def test_a_leftover_that_cannot_be_removed_does_not_stop_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As another user's file, or one that a reader has open on a network disk."""
    run, remove = Run(tmp_path), shutil.rmtree

    def refuses(path: Any, *args: Any, **settings: Any) -> None:
        if str(path) == str(left):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        remove(path, *args, **settings)

    left = tmp_path / "saved" / f".removed-{run.save(1) and folders.Folders.known_sound}"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        assert [run.save(step).name for step in (2, 3)] == ["000002-step-2", "000003-step-3"]
    assert f"{left} cannot be removed" in caplog.text
    assert names_in(tmp_path / "saved") == [left.name, "000003-step-3"]
    assert len(run.items.table.commits.held) == 1
    run.save(4)
    assert names_in(tmp_path / "saved") == ["000004-step-4"]
    run.items.table.close()


def test_trainings_that_share_a_directory_release_their_commits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training removes the other's checkpoints, but not the proof that these are gone."""
    runs = [Run(tmp_path / name) for name in "ab"]
    for step in range(1, 6):
        for run in runs:
            path = run.save(step, "../saved")
            assert not [*path.glob("table-*")]
    assert "stays" not in caplog.text
    assert [run.items.table.commits.held for run in runs] == [[9], [9]]
    names = names_in(tmp_path / "saved")
    assert names[-1] == path.name
    assert [names_in(tmp_path / "saved" / name) for name in names[:-1]] == [["CHECKPOINT"]]
    runs[0].items.table.close()
    shutil.rmtree(tmp_path / "a")
    runs[1].save(6, "../saved")
    assert len(names_in(tmp_path / "saved")) == 1
    runs[1].items.table.close()


def test_a_leftover_that_cannot_be_read_now_stays_for_the_training_that_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, read = [Run(tmp_path / name) for name in "ab"], Manifest.read
    for step, run in enumerate(runs, 1):
        run.save(step, "../saved")

    def fails(directory: Any) -> Manifest:
        if directory.path.name.startswith(".removed"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(directory)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", fails)
        runs[1].save(3, "../saved")
    runs[0].save(4, "../saved")
    assert len(runs[0].items.table.commits.held) == 1
    for run in runs:
        run.items.table.close()


@pytest.mark.parametrize("where", ["entries", "choose", "load"])
@pytest.mark.parametrize("on_disk", [True, False], ids=["reference", "copy"])
def test_the_newest_that_is_removed_while_it_is_loaded_gives_way_to_the_next(
    on_disk: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an evaluator, while the training saves with keep=1."""
    run = Run(tmp_path, on_disk=on_disk)
    first, steps = run.save(1), [2, 3]
    owner: Any = loading.TableToLoad if where == "load" else folders.Folders
    original = getattr(owner, where)

    def saves(*args: Any) -> Any:
        found, now = None if where == "load" else original(*args), [*steps]
        steps.clear()
        for step in now:
            run.save(step)
        if now and where == "load":  # as a read of rows whose commit was released
            raise TableClosedError("the table was opened at a commit that its writer has released")
        return original(*args) if where == "load" else found

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, saves)
        assert run.loads(tmp_path / "saved", 3)
        if where == "load":
            steps.append(4)
            with pytest.raises(CheckpointError, match="was removed while it was loaded; load another"):
                run.load(tmp_path / "saved" / "000003-step-3")
    assert not first.exists()
    run.items.table.close()


# ---- what was moved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reopened", [False, True], ids=["by the same process", "by another"])
@pytest.mark.parametrize("how", ["moved", "moved to another disk", "hard links", "only hard links", "symbolic link"])
def test_a_folder_that_was_set_aside_keeps_its_commit(
    how: str, reopened: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    first = run.save(1)
    (tmp_path / "best").mkdir()
    aside = tmp_path / "best" / first.name
    if how in ("moved", "symbolic link"):
        first.rename(aside)
        if how == "symbolic link":
            first.symlink_to(aside)
    else:
        shutil.copytree(first, aside, copy_function=os.link if "links" in how else shutil.copy)
        if how != "hard links":
            shutil.rmtree(first)
    if reopened:
        run.items.table.close()
        run.items = speedswap.Embedding(ROWS, 8, table=speedswap.Table.open(tmp_path / "table"))
        run.model[0] = run.items
        run.optimizer = torch.optim.Adagrad(run.items.parameters(), lr=0.1)
    for step in (2, 3, 4):
        with caplog.at_level(logging.WARNING, "speedswap"):
            run.save(step)
        assert run.loads(aside, 1)
        assert run.loads(tmp_path / "saved", step)
    held = run.items.table.commits.held
    assert f"commit {held[0]} of table 'table' stays" in caplog.text
    assert f"{first} was moved" in caplog.text
    run.items.table.commits.let_go(held[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING, "speedswap"):
        run.save(5)
        run.save(6)
    assert not caplog.records
    assert len(run.items.table.commits.held) == 1
    run.items.table.close()


def test_a_table_that_was_moved_keeps_the_commit_of_its_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.save(1)
    run.items.table.close()
    (tmp_path / "new").mkdir()
    (tmp_path / "table").rename(tmp_path / "new" / "table")
    items = speedswap.Embedding(ROWS, 8, table=speedswap.Table.open(tmp_path / "new" / "table"))
    for step in (2, 3):
        items.table.write(step, torch.ones(1, 8))
        speedswap.save_checkpoint(tmp_path / "new" / "saved", items, step=step)
    items.table.close()
    (tmp_path / "new" / "table").rename(tmp_path / "table")
    assert run.loads(first, 1)


def test_a_folder_removed_by_hand_keeps_its_commit_until_it_is_released(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been moved to another disk, which looks the same."""
    run = Run(tmp_path)
    shutil.rmtree(run.save(1, keep=None))
    with caplog.at_level(logging.WARNING, "speedswap"):
        run.save(2, keep=None)
    (record,) = caplog.records
    assert "release the commit with table.commits.let_go(1)" in record.getMessage()
    commits = run.items.table.commits
    assert len(commits.held) == 2
    commits.let_go(1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "speedswap"):
        run.save(3, keep=None)
    assert not caplog.records
    assert 1 not in commits.held
    assert len(commits.held) == 2
    run.items.table.close()


def test_a_copy_of_a_folder_says_that_the_rows_were_the_tables(tmp_path: Path) -> None:
    """It is not known to the table, so that it can only be archived with its rows."""
    run = Run(tmp_path)
    for tables in ("auto", "copy"):
        shutil.copytree(run.save(1, tables=tables), tmp_path / "best" / tables)
    run.save(2)
    run.save(3)
    assert run.loads(tmp_path / "best" / "copy", 1)
    with pytest.raises(CheckpointError, match=r"no longer keeps commit 1, .*tables='copy'"):
        speedswap.load_checkpoint(tmp_path / "best" / "auto", run.model)
    run.items.table.close()


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_save_reads_each_description_and_each_byte_once(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many checkpoints share it; those to be removed are not read at all."""
    run = Run(tmp_path, on_disk=False)
    run.model[1].requires_grad_(True)

    def save(step: int) -> Path:
        with torch.no_grad():
            run.model[1].weight.fill_(step)
        return run.save(step, keep=keep, extra=torch.arange(2**16))

    for step in range(1, keep + 2):
        save(step)
    read, opened, descriptions, logs = Counter[int](), files.open_part, list[str](), list[str]()
    pread, preadv = os.pread, os.preadv

    def counted(fd: int, pieces: Any, at: int) -> int:
        count = preadv(fd, pieces, at)
        read[os.fstat(fd).st_ino] += count
        return count

    def noted(fd: int, nbytes: int, at: int) -> bytes:
        if (path := os.readlink(f"/proc/self/fd/{fd}")).endswith("CHECKPOINT"):
            descriptions.append(path)
        return pread(fd, nbytes, at)

    def noted_table(part: Any, *where: Any) -> Any:
        logs.append(part.copy)
        return opened(part, *where)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(os, "pread", noted)
    monkeypatch.setattr(files, "open_part", noted_table)
    last = save(keep + 2)
    monkeypatch.undo()
    sizes = {each.stat().st_ino: each.stat().st_size for each in (tmp_path / "saved").rglob("*.safetensors")}
    assert read.keys() <= sizes.keys()
    assert max(read.values()) > 2**19
    assert all(nbytes <= sizes[file] for file, nbytes in read.items())
    assert len(read) > keep
    assert len(descriptions) == keep + 2
    assert logs == ["table-1-0"]
    assert len(names_in(tmp_path / "saved")) == keep
    assert run.loads(last, keep + 2)


def test_a_save_at_the_end_of_python_needs_no_threads(tmp_path: Path) -> None:
    program = f"""
        import atexit, torch, speedswap
        torch.set_num_threads(2)
        model = torch.nn.Sequential(speedswap.Embedding(10, 4), torch.nn.Linear(4, 4))
        atexit.register(speedswap.save_checkpoint, {str(tmp_path / "saved")!r}, model, step=3)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    model = nn.Sequential(speedswap.Embedding(10, 4), nn.Linear(4, 4))
    assert speedswap.load_checkpoint(tmp_path / "saved", model).step == 3
