"""Files of runs appear complete or not at all, and the next run removes leftovers of killed ones."""

from __future__ import annotations

import logging
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from children import run_script

from speedswap.apps.errors import OutputError
from speedswap.apps.files import (
    SCRATCH,
    save_somewhere,
    scratch_folder,
    write_given,
    write_whole,
)
from speedswap.tables.files.place import UNFINISHED, remove_leftovers


@pytest.fixture
def killed():
    """Start a function in a process that is killed in the middle of it."""
    children = []

    def killed(work):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                work(lambda: (os.write(write, b"x"), signal.pause()))
            finally:
                os._exit(1)
        children.append(child)
        os.close(write)
        assert os.read(read, 1) == b"x"
        os.close(read)
        return child

    yield killed
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def end(child):
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


class Owner:
    """An owner of a temporary folder."""


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("before")
    with write_whole(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    with pytest.raises(TypeError), write_whole(path) as file:
        file.writelines([b"half", None])
    assert path.read_text() == "after"
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.txt"]


def test_a_file_that_cannot_be_written_says_why(tmp_path):
    message = r"nowhere/some\.txt cannot be written: No such file or directory; make room"
    with pytest.raises(OutputError, match=message), write_whole(tmp_path / "nowhere" / "some.txt"):
        pytest.fail("there is nothing to write to")


def test_links_are_replaced_not_followed(tmp_path):
    """A link planted under the result's name is replaced; its target stays."""
    precious, path = tmp_path / "precious", tmp_path / "some.txt"
    precious.write_text("precious")
    path.symlink_to(precious)
    with write_whole(path) as file:
        file.write(b"result")
    assert precious.read_text() == "precious"
    assert path.read_text() == "result"
    assert not path.is_symlink()


def test_new_files_have_the_rights_that_the_user_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with write_whole(tmp_path / "file"):
            pass
        scratch, remove = scratch_folder(Owner, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    remove()


def test_a_named_file_is_written_through_links_and_into_devices(tmp_path):
    """As by other programs: ``--json /dev/stdout``, or a link to where figures are kept."""
    (tmp_path / "link").symlink_to("kept")
    with write_given(tmp_path / "link") as file:
        file.write(b"figures")
    assert (tmp_path / "kept").read_text() == "figures"
    assert (tmp_path / "link").is_symlink()
    with write_given(os.devnull) as file:
        file.write(b"figures")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    read, written = os.pipe()
    with write_given(Path(f"/dev/fd/{written}")) as file:
        file.write(b"figures")
    os.close(written)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"figures"


def test_what_a_killed_run_left_goes_with_the_next_one_which_says_so(tmp_path, killed, caplog):
    """Two unfinished files; as long as their writer lives, they stay."""

    def write(wait):
        with write_whole(tmp_path / "file") as file, write_whole(tmp_path / "other") as other:
            file.write(b"half")
            other.write(b"half")
            wait()

    writer = killed(write)
    unfinished = sorted(tmp_path.iterdir())
    assert len(unfinished) == 2
    assert remove_leftovers(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == unfinished
    end(writer)
    with caplog.at_level(logging.WARNING, "speedswap"):
        assert remove_leftovers(tmp_path) == unfinished
    assert list(tmp_path.iterdir()) == []
    for path in unfinished:
        assert f"removed {path}, left behind by a killed run" in caplog.text


def test_a_temporary_folder_of_a_killed_run_goes_with_the_next_one(tmp_path, killed):
    def work(wait):
        folder, _ = scratch_folder(Owner, tmp_path)
        (folder / "table").mkdir()
        wait()

    first, second = killed(work), killed(work)
    end(first)
    folder, remove = scratch_folder(Owner, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # of the second, and our own
    end(second)
    assert len(remove_leftovers(tmp_path, SCRATCH)) == 1
    assert list(tmp_path.iterdir()) == [folder]
    remove()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_goes_with_its_owner(tmp_path):
    owner = Owner()
    folder, _ = scratch_folder(owner, tmp_path)
    assert folder.is_dir()
    del owner
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_temporary_folder_to_its_parent(tmp_path):
    """A worker that exits normally and runs its exit handlers."""
    program = """
import os, sys
from pathlib import Path
from speedswap.apps.files import scratch_folder
class Owner: pass
owner = Owner()
folder, _ = scratch_folder(owner, Path(sys.argv[1]))
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(folder.is_dir())
"""
    done = run_script(program, tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_file_or_folder_of_ours_is_left_alone(tmp_path):
    """A link with such a name is not followed, a pipe not waited for."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("")
    (tmp_path / f"{UNFINISHED}link").symlink_to(precious)
    os.mkfifo(tmp_path / f"{UNFINISHED}pipe")
    assert remove_leftovers(tmp_path) == []
    assert remove_leftovers(tmp_path / "nowhere") == []
    assert len(list(tmp_path.iterdir())) == 3
    assert (precious / "file").exists()


def test_what_only_begins_like_ours_stays(tmp_path):
    """A user's folder with a similar name is not taken for a leftover."""
    for name in (f"{SCRATCH}mine", f"{UNFINISHED}notes", f"{SCRATCH}0123456789ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("all of it")
    remove_leftovers(tmp_path)
    assert [path.name for path in remove_leftovers(tmp_path, SCRATCH)] == [f"{SCRATCH}0123456789ab"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{UNFINISHED}notes", f"{SCRATCH}mine"]


def test_a_place_that_cannot_be_found_does_not_hide_the_next(tmp_path, monkeypatch):
    """No temporary directory has room: results still go to the other places."""

    def no_temporary_directory():
        raise FileNotFoundError(2, "No usable temporary directory found")

    def save(folder: Path) -> list[Path]:
        if folder == tmp_path / "full":
            raise OutputError("full")
        (folder / "vectors.txt").write_text("dear")
        return []

    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_directory)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "cwd", no_temporary_directory)
    with pytest.raises(OutputError, match="saved in"):
        save_somewhere(tmp_path / "full", save)
    assert [path.name for path in tmp_path.glob("home/full-*/*")] == ["vectors.txt"]


def test_a_scratch_folder_goes_wherever_the_process_is(tmp_path, monkeypatch):
    """Its path is absolute."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rel").mkdir()
    _, remove = scratch_folder(killed, Path("rel"))  # some object
    monkeypatch.chdir("/")
    remove()
    assert not list((tmp_path / "rel").iterdir())
