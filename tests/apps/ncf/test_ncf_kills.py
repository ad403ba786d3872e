"""A run that is killed at any moment leaves complete checkpoints: its own, or those of the run before."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

import pytest
import torch
from children import run_script

from speedswap.apps.ncf import NcfSettings, load, train
from speedswap.apps.run import FOLDER

SMALL = {
    "users": 30,
    "items": 40,
    "interactions": 200,
    "factors": 2,
    "layers": (4, 2),
    "batch": 64,
    "test_negatives": 5,
    "device": "cpu",
    "optimizer": "adagrad",
}
OLDER, NEWER = {"seed": 1, "epochs": 3}, {"seed": 2, "epochs": 2}
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "truncate", "remove")
RUNS = """
import json, os, pathlib, shutil, signal, sys
import torch
from speedswap.apps.ncf import NcfSettings, train
import speedswap.tables

calls, folder, settings = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
settings["layers"] = tuple(settings["layers"])
torch.set_num_threads(1)

def run(output, last):
    made = 0
    def counted(real):
        def call(*args, **more):
            nonlocal made
            made += 1
            if made == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        return call
    for name in calls:
        setattr(os, name, counted(getattr(os, name)))
    train(NcfSettings(**settings), output=output, progress=False)
    return made

def child(output, last):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(run(output, last)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        made = said.read()
    os.waitpid(pid, 0)
    return int(made or 0)

shutil.copytree(folder / "older", folder / "whole")
made = child(folder / "whole", 0)
assert made > 50, made
for last in range(1, made + 1, max(1, made // 16)):
    shutil.copytree(folder / "older", folder / f"killed-{last:03}")
    assert child(folder / f"killed-{last:03}", last) == 0
"""


def rows(model):
    return [model.user.table.read(), model.item.table.read()]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A finished run's output, over copies of which others were killed at as many moments."""
    folder = tmp_path_factory.mktemp("killed")
    train(NcfSettings(**SMALL, **OLDER), output=folder / "older", progress=False)
    (folder / "older" / FOLDER / "notes.txt").write_text("mine")
    done = run_script(RUNS, json.dumps(CALLS), folder, json.dumps(SMALL | NEWER), seconds=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def models():
    """The states of both runs after each of their epochs."""
    return [
        rows(train(NcfSettings(**SMALL | settings | {"epochs": epochs}), progress=False).model)
        for settings in (OLDER, NEWER)
        for epochs in range(1, settings["epochs"] + 1)
    ]


@pytest.mark.release
def test_a_run_killed_at_any_moment_over_an_older_one_leaves_a_whole_model(killed, models):
    """Half of an old checkpoint is never taken for the last one, nor the old run's best epoch for the new one's."""
    outputs = sorted(killed.glob("killed-*"))
    assert len(outputs) >= 16
    found = set()
    for output in outputs:
        loaded = rows(load(output))
        epochs = [number for number, model in enumerate(models) if same(loaded, model)]
        assert epochs, output.name
        found.update(epochs)
    assert found & {0, 1, 2}, "choose moments before the new run's first checkpoint too"
    assert found & {3, 4}, "choose moments after it too"


def test_the_next_run_removes_what_killed_ones_left(killed, caplog):
    """All of it, and none of the user's own files."""
    removed = 0
    for output in sorted(killed.glob("killed-*"))[::4]:
        left = [path for path in (output / FOLDER).glob(".*") if path.name.startswith((".unfinished-", ".removed-"))]
        caplog.clear()
        train(NcfSettings(**SMALL, **NEWER), output=output, resume=False, progress=False)
        assert all(f"{path} was left behind by a process that was killed" in caplog.text for path in left)
        assert list((output / FOLDER).glob(".*")) == []
        assert (output / FOLDER / "notes.txt").read_text() == "mine"
        assert len(list((output / FOLDER).iterdir())) <= 3
        removed += len(left)
    assert removed


def test_a_killed_run_goes_on_to_the_same_end(killed, models):
    """Without being told; before its first checkpoint it starts over."""
    for output in sorted(killed.glob("killed-*"))[1::4]:
        train(NcfSettings(**SMALL, **NEWER), output=output, progress=False)
        assert any(same(rows(load(output)), model) for model in models[3:])


def test_checkpoints_on_a_disk_of_their_own_stay_there(tmp_path, models):
    """A mount point cannot change names with another folder: a new run's checkpoints are written into it."""
    mount = tmp_path / "output" / FOLDER
    mount.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        for settings in (OLDER, NEWER):
            train(NcfSettings(**SMALL, **settings), output=tmp_path / "output", progress=False)
        assert mount.is_mount()
        assert any(same(rows(load(tmp_path / "output")), model) for model in models[3:])
        assert len(list(mount.iterdir())) <= 2
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_checkpoints_behind_a_link_stay_there(tmp_path, models):
    """On a larger disk, say; a new run starts over there."""
    (tmp_path / "large").mkdir()
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / FOLDER).symlink_to(tmp_path / "large" / "kept")
    (tmp_path / "large" / "kept").mkdir()
    for settings in (OLDER, NEWER):
        train(NcfSettings(**SMALL, **settings), output=tmp_path / "output", progress=False)
    assert (tmp_path / "output" / FOLDER).is_symlink()
    assert any(same(rows(load(tmp_path / "output")), model) for model in models[3:])
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["kept"]


def test_tables_on_disk_of_a_killed_run_go_with_the_next_one(tmp_path, start_command, caplog):
    """They may take hundreds of gigabytes."""
    words = "--users 60 --items 130 --interactions 900 --factors 4 --layers 8,4 --device cpu --storage disk".split()
    process = start_command("ncf", *words, "--epochs", "1000000", "--scratch", tmp_path, "--output", tmp_path / "out")
    assert process.stdout.readline().startswith("epoch   1")
    (left,) = (path for path in tmp_path.iterdir() if path.name != "out")
    assert (left / "tables" / "users" / "MANIFEST").exists()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    result = train(NcfSettings(**SMALL, epochs=1, storage="disk", scratch=tmp_path), progress=False)
    assert f"removed {left}" in caplog.text
    result.model.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
