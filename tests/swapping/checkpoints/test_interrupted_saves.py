"""A save that does not complete leaves the previous checkpoint."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import child, killed_at
from torch import nn

import speedswap
from speedswap.errors import CheckpointError, TableFullError

CHANGED = 10  # rows
SMALL_DISK = "64m"
CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync", "pwrite", "write", "link", "ftruncate")


def model(value: float) -> nn.ModuleList:
    items = speedswap.Embedding(40, 4, storage="pageable", init=speedswap.init.zeros(), name="items")
    changed = nn.ModuleList([items, nn.Linear(2, 2)])
    fill(changed, value)
    return changed


def fill(trained: nn.ModuleList, value: float) -> None:
    """Give some of the rows, and a dense parameter, a value."""
    trained[0].table.write(0, torch.full((CHANGED, 4), value))
    with torch.no_grad():
        trained[1].weight.fill_(value)


def value_in(path: Path) -> float:
    """Load the newest checkpoint, and return the one value that all of it has."""
    found = model(-1.0)
    step = speedswap.load_checkpoint(path, found).step
    values = {*found[0].read()[:CHANGED].unique().tolist(), *found[1].weight.unique().tolist(), float(step)}
    assert len(values) == 1, values
    return values.pop()


def save(path: Path, trained: nn.ModuleList, value: float) -> None:
    fill(trained, value)
    speedswap.save_checkpoint(path, trained, step=int(value))


def go_on(path: Path, value: float) -> None:
    """Load the checkpoint there, and save another after it."""
    trained = model(-1.0)
    speedswap.load_checkpoint(path, trained)
    save(path, trained, value)


@pytest.mark.usefixtures("one_thread")
def test_a_process_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The one before, or its own; the next save clears what is left."""
    speedswap.save_checkpoint(tmp_path / "first", model(1.0), step=1)
    found, step = [], 0
    while True:
        folder = tmp_path / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "first", folder)
        if not killed_at(step, lambda at=folder: go_on(at, 2.0), CALLS):
            break
        found.append(value_in(folder))
        if step % 9 == 0:
            go_on(folder, 3.0)
            assert value_in(folder) == 3.0
            assert [path.name for path in folder.iterdir()] == ["000002-step-3" if found[-1] == 1 else "000003-step-3"]
        step += 1
    assert len(found) > 20
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Path) -> None:
    trained = model(1.0)
    speedswap.save_checkpoint(small_disk, trained, step=1)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - (100 << 10)))
    trained.append(nn.Linear(300, 300))
    with pytest.raises(TableFullError, match=r"no room on the disk of .*; earlier checkpoints are intact"):
        speedswap.save_checkpoint(small_disk, trained, step=2)
    assert value_in(small_disk) == 1.0
    (small_disk / "other").unlink()
    speedswap.save_checkpoint(small_disk, trained, step=2)


def flip_a_bit(file: Path, place: int = 20) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def saved_in(path: Path, steps: Iterable[int], **settings: Any) -> list[str]:
    """Save some steps; return the names of the checkpoints that are left."""
    for step in steps:
        speedswap.save_checkpoint(path, model(float(step)), step=step, **settings)
    return sorted(each.name[-1] for each in path.iterdir())


def test_a_full_disk_leaves_what_loads_when_the_newest_is_damaged(small_disk: Path) -> None:
    saved_in(small_disk, [1, 2, 3], keep=None)
    flip_a_bit(small_disk / "000003-step-3" / "CHECKPOINT")
    trained = model(-1.0)
    speedswap.load_checkpoint(small_disk, trained, step=2)
    trained.append(nn.Linear(300, 300))
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - (100 << 10)))
    with pytest.raises(TableFullError):
        speedswap.save_checkpoint(small_disk, trained, step=4, keep=1)
    for step in (1, 2):
        assert speedswap.load_checkpoint(small_disk, model(-1.0), step=step).step == step


@pytest.mark.parametrize("keep, left", [(1, "5"), (2, "345"), (3, "2345"), ({1, 4}, "145"), ({2, 3}, "235")])
def test_a_damaged_checkpoint_counts_for_none(keep: Any, left: str, tmp_path: Path) -> None:
    """It is removed once enough newer ones exist."""
    saved_in(tmp_path, [1, 2, 3, 4], keep=None)
    flip_a_bit(tmp_path / "000004-step-4" / "CHECKPOINT")
    assert "".join(saved_in(tmp_path, [5], keep=keep)) == left


class Unwritable(nn.Module):
    """A module whose state no checkpoint holds."""

    def get_extra_state(self) -> Any:
        return lambda: None


def test_steps_kept_of_an_earlier_run_stay_until_another_is_saved(tmp_path: Path) -> None:
    """The steps that a run over them keeps say nothing about theirs."""
    assert "".join(saved_in(tmp_path, [3, 6, 9], keep={3})) == "39"
    with pytest.raises(TypeError, match="is a function"):
        speedswap.save_checkpoint(tmp_path, nn.Sequential(model(1.0), Unwritable()), step=1, keep=())
    assert speedswap.load_checkpoint(tmp_path, model(-1.0), step=3).step == 3
    assert "".join(saved_in(tmp_path, [1], keep=())) == "1"


def test_the_highest_number_is_not_the_end(tmp_path: Path) -> None:
    def renamed(number: int) -> None:
        (newest,) = tmp_path.iterdir()
        newest.rename(tmp_path / f"{number}-step-{value_in(tmp_path):.0f}")

    saved_in(tmp_path, [1])
    renamed(999_999_999)
    saved_in(tmp_path, [2])
    assert value_in(tmp_path) == 2.0
    renamed(10**18 - 1)
    with pytest.raises(
        CheckpointError, match=r"path has 999999999999999999-step-2, the largest checkpoint number; move it"
    ):
        saved_in(tmp_path, [3])
    assert value_in(tmp_path) == 2.0


@pytest.mark.parametrize("name", ["CHECKPOINT", "tensors-2.safetensors", "rows-2-0.safetensors", "rows.log"])
def test_a_disk_that_writes_other_bytes_leaves_the_checkpoint_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back before older checkpoints are removed."""
    trained, sync = model(1.0), os.fsync
    speedswap.save_checkpoint(tmp_path, trained, step=1)
    before = value_in(tmp_path)
    if name == "rows.log":
        trained[0] = model(2.0)[0]

    def damage(fd: int) -> None:
        sync(fd)
        file = Path(f"/proc/self/fd/{fd}").readlink()
        for written in [file] if file.name == name else file.glob(f"table-2-*/{name}"):
            flip_a_bit(written, -1 if "tensors" in name else 20)

    monkeypatch.setattr(os, "fsync", damage)
    fill(trained, 2.0)
    with pytest.raises(CheckpointError, match=r"the checkpoint written to .* cannot be read back .*; earlier"):
        speedswap.save_checkpoint(tmp_path, trained, step=2)
    monkeypatch.undo()
    assert value_in(tmp_path) == before
    save(tmp_path, trained, 3.0)
    assert value_in(tmp_path) == 3.0


def test_an_error_of_the_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model(1.0)
    speedswap.save_checkpoint(tmp_path, trained, step=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            save(tmp_path, trained, 2.0)
    assert value_in(tmp_path) == 1.0
    save(tmp_path, trained, 3.0)
    assert value_in(tmp_path) == 3.0


def test_rows_changed_before_a_failed_save_are_in_the_next(tmp_path: Path) -> None:
    trained = model(1.0)
    speedswap.save_checkpoint(tmp_path, trained, step=1)
    trained[0].table.write(0, torch.full((4, 4), 2.0))
    with pytest.raises(TypeError, match="extra is an object"):
        speedswap.save_checkpoint(tmp_path, trained, extra=object())
    trained[0].table.write(4, torch.full((CHANGED - 4, 4), 2.0))
    with torch.no_grad():
        trained[1].weight.fill_(2.0)
    speedswap.save_checkpoint(tmp_path, trained, step=2)
    assert value_in(tmp_path) == 2.0


def test_one_process_saves_at_a_time(tmp_path: Path) -> None:
    trained = model(1.0)

    def hold(connection: object) -> None:
        from speedswap.swapping.checkpoints.folders import Folders

        with Folders(tmp_path).locked():
            connection.send("locked")  # type: ignore[attr-defined]
            connection.recv()  # type: ignore[attr-defined]

    with child(hold) as (_, connection):
        assert connection.poll(30)
        with pytest.raises(CheckpointError, match="another process or thread is saving a checkpoint; give each"):
            speedswap.save_checkpoint(tmp_path, trained)
    speedswap.save_checkpoint(tmp_path, trained, step=1)


def test_ctrl_c_as_the_lock_is_given_back_leaves_it_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, lock = model(1.0), fcntl.flock

    def interrupted(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN and os.path.samestat(os.fstat(fd), os.stat(tmp_path)):
            raise KeyboardInterrupt
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        speedswap.save_checkpoint(tmp_path, trained, step=1)
    monkeypatch.undo()
    assert value_in(tmp_path) == 1.0
    save(tmp_path, trained, 2.0)
    assert value_in(tmp_path) == 2.0
