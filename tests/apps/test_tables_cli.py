"""Tables at the command line: described, checked, exported and imported; as text, as JSON, and by the exit status."""

from __future__ import annotations

import errno
import json
import re
import shutil

import numpy as np
import pytest
import torch
from children import child, killed_at

from speedswap import Column, IdMap, Table, init
from speedswap.cli import main


@pytest.fixture
def path(tmp_path):
    """A table of 1,000 rows with an optimizer's column, an id map and attributes."""
    users = IdMap(999, keys="exact")
    users.add(["a", "b"])
    weight = {"stored_dtype": torch.bfloat16, "init": init.normal(0.0, 1.0)}
    with Table.create(1000, 4, path=tmp_path / "users", **weight) as table:
        table.add_columns([Column("sum", (4,), torch.float32, init.zeros())])
        table.set_id_map(users)
        table.write(0, torch.ones(1000, 4))
        table.attributes["step"] = 7
    return tmp_path / "users"


def test_info_of_a_table(path, capsys):
    assert main(["info", str(path)]) == 0
    text = re.sub(" +", " ", capsys.readouterr().out)
    for line in (
        "table 'users'\n",
        " rows 1,000\n",
        " weight 4 float32 stored as bfloat16, rounded nearest, 8 bytes\n",
        " sum 4 float32, 16 bytes\n",
        " open for writing no\n",
        " id map used 2, keys exact, capacity 999, admit_after 1, evict none\n",
        " attributes step 7\n",
        " held commits none\n",
    ):
        assert line in text
    assert main(["info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == 1000
    assert facts["columns"]["weight"] == {
        "row_shape": [4],
        "dtype": "float32",
        "row_bytes": 8,
        "stored_dtype": "bfloat16",
        "rounding": "nearest",
    }
    assert facts["attributes"] == {"step": 7}
    assert facts["id_maps"][""]["used"] == 2
    assert (facts["open_for_writing_in"], facts["left_open"]) == (None, False)
    assert (facts["format"], facts["touched_rows"], facts["rows_stored_as_one"]) == (1, 1000, 16)
    assert facts["last_commit"] >= 1
    assert facts["access"].startswith(("O_DIRECT in blocks of ", "page cache: the file system "))
    assert facts["bytes_on_disk"] == sum(file.stat().st_blocks * 512 for file in path.iterdir())


def test_info_names_the_process_that_has_it_open(path, capsys):
    """While it lives; afterwards it has not closed the table."""

    def work(connection):
        with Table.open(path):
            connection.send("open")
            connection.recv()

    with child(work) as (pid, connection):
        assert connection.recv() == "open"
        before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
        assert main(["info", str(path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["open_for_writing_in"].startswith(f"{pid} on ")
        assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert main(["info", str(path)]) == 0
    assert "no; its last writer did not close it" in capsys.readouterr().out


def test_info_without_a_table_is_of_the_machine(capsys):
    assert main(["info"]) == 0
    assert "kernels" in capsys.readouterr().out
    assert main(["info", "--json"]) == 2
    assert "give its directory" in capsys.readouterr().err


def test_a_whole_table_is_verified(path, capsys):
    assert main(["verify", str(path)]) == 0
    found = capsys.readouterr().out
    assert f"{path} is whole: 1,000 rows, 1,000 of them written; " in found
    assert "every checksum matches" in found
    assert main(["verify", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["rows"], found["damaged_rows"], found["problems"]) == (True, 1000, [], [])


@pytest.mark.parametrize("file", ["MANIFEST", "keys", "rows.log"])
def test_damage_is_exit_status_1(file, path, capsys):
    """A flipped bit in the manifest or an id map; truncated rows. An intact table next to it is reported as intact."""
    shutil.copytree(path, path.with_name("whole"))
    victim = max((found for found in path.iterdir() if found.name.startswith(file)), key=lambda found: found.name)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw[: 4096 + 100] if file == "rows.log" else raw)
    assert main(["verify", str(path), str(path.with_name("whole"))]) == 1
    damaged, whole = capsys.readouterr().out.splitlines()
    assert "is damaged" in damaged or "not as written" in damaged
    assert "is whole" in whole
    assert main(["verify", "--json", str(path)]) == 1
    assert not json.loads(capsys.readouterr().out)["whole"]


def test_damaged_rows_are_named(tmp_path, capsys):
    """A bit in each of two rows of a log, behind a header of 4,096 bytes: records of 512 bytes and a checksum."""
    with Table.create(100, 128, path=tmp_path / "table", storage="disk") as table:
        table.write(10, torch.ones(50, 128))
    raw = bytearray((tmp_path / "table" / "rows.log").read_bytes())
    first = raw.index(torch.ones(128).numpy().tobytes())
    for row in (3, 4, 20):
        raw[first + 516 * row + 77] ^= 16
    (tmp_path / "table" / "rows.log").write_bytes(raw)
    assert main(["verify", "--json", str(tmp_path / "table")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["damaged_rows"] == [[13, 15], [30, 31]]
    assert found["problems"] == [
        "rows 13 to 14 are not as written, or cannot be read",
        "row 30 is not as written, or cannot be read",
    ]
    assert main(["verify", str(tmp_path / "table")]) == 1
    assert f"{tmp_path / 'table'}: row 30 is not" in capsys.readouterr().out


def test_a_sector_that_is_read_at_the_second_try_is_no_damage(tmp_path):
    with Table.create(100, 128, path=tmp_path / "table", storage="disk") as table:
        table.write(0, torch.ones(100, 128))
        table.flush()
        table.store.log.fail("read", 0, errno.EIO)
        checked = table.store.files.verify(lambda rows: None)
    assert (checked.rows, checked.damaged, checked.problems) == (100, [], [])


def test_what_is_not_there_cannot_be_verified(path, capsys):
    assert main(["verify", str(path.with_name("nowhere")), str(path)]) == 2
    out, err = capsys.readouterr()
    assert "nowhere cannot be looked at" in err
    assert "is whole" in out


@pytest.mark.sweep(2)
@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".txt"])
@pytest.mark.parametrize("command", ["export", "import"])
def test_commands_killed_anywhere_leave_what_is_whole_or_nothing(command, suffix, tmp_path):
    """Before each change that they make to files; the next run removes what a killed one left."""
    given, rows = tmp_path / "given", torch.arange(600.0).view(300, 2)
    given.mkdir()
    with Table.create(300, 2, path=given / "table") as table:
        table.write(0, rows)
        table.export(given / f"rows{suffix}")
    source, made = ("table", f"rows{suffix}") if command == "export" else (f"rows{suffix}", "table")
    words = [command, str(given / source), str(tmp_path / "made" / made)]
    words += ["--keys", "drop"] if command == "import" else []
    before = {path: path.read_bytes() for path in given.rglob("*") if path.is_file()}
    expected, seen, step = (given / made), set(), 0
    (tmp_path / "made").mkdir()

    def is_whole():
        there = tmp_path / "made" / made
        if command == "export":
            return there.read_bytes() == expected.read_bytes()
        with Table.open(there, mode="r") as found:
            return torch.equal(found.read(), rows)

    while killed_at(step, lambda: main(words)):
        step += 1
        seen.add((tmp_path / "made" / made).exists())
        if (tmp_path / "made" / made).exists():
            assert is_whole()
            shutil.rmtree(tmp_path / "made")
            (tmp_path / "made").mkdir()
    assert step > 3
    assert False in seen
    assert is_whole()
    assert [path.name for path in (tmp_path / "made").iterdir()] == [made]
    assert {path: path.read_bytes() for path in given.rglob("*") if path.is_file()} == before


def test_export_and_import(path, tmp_path, capsys):
    assert main(["export", str(path), str(tmp_path / "rows.txt")]) == 0
    assert (tmp_path / "rows.txt").read_text() == "2 4\na 1 1 1 1\nb 1 1 1 1\n"
    assert main(["import", str(tmp_path / "rows.txt"), str(tmp_path / "again"), "--stored-dtype", "int8"]) == 0
    assert "saved Table('again', 3 × 4 float32 as int8" in capsys.readouterr().out
    with Table.open(tmp_path / "again") as table:
        assert table.id_map.lookup(["b", "c"]).tolist() == [2, 0]
        assert table.read()[:, 0].tolist() == [0, 1, 1]
    words = tmp_path / "words"
    assert (
        main(["import", str(tmp_path / "rows.txt"), str(tmp_path / "bare"), "--keys", str(words), "--dtype", "float64"])
        == 0
    )
    assert words.read_text() == "a\nb\n"
    assert main(["export", str(tmp_path / "bare"), str(tmp_path / "bare.vec"), "--keys", str(words)]) == 0
    assert (tmp_path / "bare.vec").read_bytes() == (tmp_path / "rows.txt").read_bytes()
    assert main(["export", str(path), str(tmp_path / "all.safetensors"), "--columns", "all"]) == 0
    assert main(["import", str(tmp_path / "all.safetensors"), str(tmp_path / "sum"), "--columns", "sum,weight"]) == 2
    assert main(["import", str(tmp_path / "all.safetensors"), str(tmp_path / "sum"), "--columns", "sum"]) == 0
    with Table.open(tmp_path / "sum") as table:
        assert (table.num_embeddings, table.read().count_nonzero()) == (1000, 0)


def test_mistakes_are_one_line(path, tmp_path, capsys):
    np.save(tmp_path / "nan.npy", np.array([[np.nan]]))
    (tmp_path / "bad.txt").write_text("2 2\na 1 2\nb 1\nc 1 2\n")
    for words, message in {
        ("export", path, tmp_path / "nan.npy"): "give overwrite=True (--overwrite) to replace it",
        ("export", path, tmp_path / "rows.xyz"): "none of the suffixes of a format",
        ("export", path, tmp_path / "rows.npy", "--columns", "other"): "column 'other' is not in table 'users'",
        ("export", tmp_path / "nowhere", tmp_path / "rows.npy"): "there is no table",
        ("import", tmp_path / "nan.npy", tmp_path / "t"): "row 0: 'weight' has a value that is not finite",
        ("import", tmp_path / "bad.txt", tmp_path / "t"): "line 3, has not a key and 2 values",
        ("import", tmp_path / "nothing.npy", tmp_path / "t"): "No such file or directory",
        ("import", tmp_path / "bad.txt", path): "which exists; give another path",
    }.items():
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "t").exists()
    assert main(["import", str(tmp_path / "nan.npy"), str(tmp_path / "t"), "--allow-nan"]) == 0


def test_a_directory_that_is_no_table_could_not_be_looked_at(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"speedswap: {tmp_path} cannot be looked at: path is {str(tmp_path)!r}, where there is no table\n"
    )


def test_a_problem_of_a_whole_directory_names_it_once(tmp_path, capsys):
    (tmp_path / "LOCK").touch()
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count(str(tmp_path)) == 1
