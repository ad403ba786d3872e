"""Tables in files: what is written is there when they are opened again, and damage is an error."""

from __future__ import annotations

import gc
import json
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from children import answer, child, run_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import speedswap
from speedswap import Column, Table, init
from speedswap.errors import TableBusyError, TableClosedError, TableError, TableFormatError


def test_close_leaves_files_that_reopen_to_the_same_bytes(tmp_path: Path) -> None:
    table = Table.create(1000, 5, path=tmp_path / "t", init=init.normal(), seed=3, name="items")
    table.add_columns([Column("sum", (1,), torch.float32, init.constant(0.5))])
    table.scatter(torch.tensor([7, 999]), {"weight": torch.ones(2, 5), "sum": torch.full((2, 1), 3.0)})
    table.attributes["note"] = {"step": 12}
    expected = {name: table.read(column=name) for name in table.columns}
    shown = repr(table)
    table.close()
    for mode in ("r", "r+"):
        with Table.open(tmp_path / "t", mode) as again:
            assert repr(again) == shown
            assert again.attributes == {"note": {"step": 12}}
            for name, value in expected.items():
                assert torch.equal(again.read(column=name), value)


def test_flush_leaves_files_that_another_process_reads(tmp_path: Path) -> None:
    table = Table.create(100, 4, path=tmp_path / "t")
    table.scatter(torch.tensor([42]), torch.full((1, 4), 6.0))
    table.flush()
    code = "import sys, speedswap; print(speedswap.Table.open(sys.argv[1], 'r').read(42, 43).tolist())"
    result = run_script(code, tmp_path / "t")
    assert result.stdout.strip() == "[[6.0, 6.0, 6.0, 6.0]]", result.stderr


def test_a_table_of_any_size_takes_room_for_its_written_rows_alone(tmp_path: Path) -> None:
    rows = 10**10
    with Table.create(rows, 64, path=tmp_path / "t") as table:  # 2.3 TiB
        last = torch.tensor([rows - 1, 5, 2**33])
        table.scatter(last, torch.ones(3, 64))
        table.save(tmp_path / "saved")
    for name in ("t", "saved"):
        with Table.open(tmp_path / name, "r") as table:
            some = table.gather(torch.tensor([5, 6, rows - 1])).weight[:, 0]
            assert torch.equal(some, torch.tensor([1.0, 0.0, 1.0]))
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / name).iterdir()) < 2**26


def test_an_existing_path_is_not_overwritten(tmp_path: Path) -> None:
    Table.create(10, 4, path=tmp_path / "t").close()
    with pytest.raises(FileExistsError, match=r"exists; open it with Table\.open"):
        Table.create(10, 4, path=tmp_path / "t")


def test_a_failed_creation_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(chunk: torch.Tensor) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Table.create(10, 4, path=tmp_path / "t", init=fails)
    assert list(tmp_path.iterdir()) == []


def test_columns_are_added_before_the_first_write_and_after_it(tmp_path: Path) -> None:
    table = Table.create(10, 4, path=tmp_path / "t", init=init.normal())
    table.add_columns([Column("sum", (4,), torch.float32, init.zeros())])
    table.scatter(torch.tensor([1]), torch.ones(1, 4))
    table.add_columns([Column("late", (4,), torch.float32, init.zeros())])
    table.close()
    with Table.open(tmp_path / "t") as again:
        assert list(again.columns) == ["weight", "sum", "late"]
        assert torch.equal(again.read(1, 2), torch.ones(1, 4))


def test_a_table_that_was_not_closed_is_as_of_its_last_commit(tmp_path: Path) -> None:
    code = f"""
        import os, torch, speedswap
        table = speedswap.Table.create(10, 4, path={str(tmp_path / "t")!r}, init=speedswap.init.normal())
        table.scatter(torch.tensor([1]), torch.ones(1, 4))
        table.flush()
        table.scatter(torch.tensor([1, 2]), torch.zeros(2, 4))
        os._exit(0)
    """
    assert run_script(code).returncode == 0
    with Table.open(tmp_path / "t") as table:
        table.add_columns([Column("sum", (4,), torch.float32, init.zeros())])
        assert torch.equal(table.read(1, 2), torch.ones(1, 4))
        assert table.read(2, 3).all()


@pytest.mark.parametrize("mode", ["vjp", "fake", "meta", "inference"])
def test_a_table_freed_under_a_mode_of_torch_has_written_its_rows(mode: str, tmp_path: Path) -> None:
    """The garbage collector frees a table in a circle wherever it happens to run."""
    held: list[Any] = []

    def train() -> None:
        id_map = speedswap.IdMap(5, evict="lru")
        table = Table.create(6, 4, storage=speedswap.Disk(tmp_path / "t", commit_seconds=None))
        table.set_id_map(id_map)
        rows, _ = id_map.add(torch.tensor([7, 8]))
        table.scatter(rows, torch.ones(2, 4))
        held.append(table)

    def free(x: torch.Tensor) -> torch.Tensor:
        held.clear()
        gc.collect()
        return x * 2

    modes: dict[str, Callable[[], object]] = {
        "fake": FakeTensorMode,
        "meta": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
    }
    train()
    if mode == "vjp":
        torch.func.vjp(free, torch.ones(2))
    else:
        with cast(AbstractContextManager[object], modes[mode]()):
            free(torch.ones(2))
    with Table.open(tmp_path / "t") as table:
        assert table.id_map is not None
        assert torch.equal(table.gather(table.id_map.lookup(torch.tensor([8, 7]))).weight, torch.ones(2, 4))


# ---------------------------------------------------------------------------- one writer


def test_a_second_writer_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    table = Table.create(10, 4, path=tmp_path / "t")
    with pytest.raises(TableBusyError, match=f"process {os.getpid()}"):
        Table.open(tmp_path / "t")
    code = f"""
        import speedswap
        try:
            speedswap.Table.open({str(tmp_path / "t")!r})
        except speedswap.errors.TableBusyError as error:
            print(error)
        speedswap.Table.open({str(tmp_path / "t")!r}, "r").close()
    """
    result = run_script(code)
    assert result.returncode == 0, result.stderr
    assert f"open for writing in process {os.getpid()}" in result.stdout
    table.close()
    Table.open(tmp_path / "t").close()


def test_a_dead_writers_lock_is_free_at_once(tmp_path: Path) -> None:
    def works(connection: Connection) -> None:
        table = Table.create(10, 4, path=tmp_path / "t")
        connection.send("open")
        connection.recv()
        table.close()

    with child(works) as (pid, connection):
        assert answer(connection) == "open"
        with pytest.raises(TableBusyError, match=f"process {pid}"):
            Table.open(tmp_path / "t")
    Table.open(tmp_path / "t").close()  # the child was killed at the end of the block


def test_a_table_opened_for_reading_refuses_writes(tmp_path: Path) -> None:
    Table.create(10, 4, path=tmp_path / "t", init=init.normal()).close()
    with Table.open(tmp_path / "t", "r") as table:
        for write in (
            lambda: table.scatter(torch.tensor([1]), torch.ones(1, 4)),
            lambda: table.write(0, torch.ones(1, 4)),
            lambda: table.add_columns([Column("sum", (1,), torch.float32, init.zeros())]),
        ):
            with pytest.raises(TableClosedError, match="opened with mode='r'"):
                write()
    with pytest.raises(ValueError, match="mode is 'w'"):
        Table.open(tmp_path / "t", "w")


def test_a_pickled_table_is_its_path_opened_for_reading(tmp_path: Path) -> None:
    table = Table.create(1000, 64, path=tmp_path / "t", init=init.normal())
    payload = pickle.dumps(table)
    assert len(payload) < 1000
    again = pickle.loads(payload)
    assert torch.equal(again.read(), table.read())
    table.scatter(torch.tensor([1]), torch.ones(1, 64))
    table.flush()
    assert torch.equal(again.read(1, 2), torch.ones(1, 64))
    again.close()
    table.close()


# ---------------------------------------------------------------------------- save


@pytest.mark.parametrize("kind", ["pageable", "device", "disk"])
def test_save_writes_a_table_that_opens_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "source" if kind == "disk" else None
    table = Table.create(100_000, 5, storage=kind, path=path, init=init.normal(), name="items")
    table.scatter(torch.tensor([1]), torch.ones(1, 5))
    table.add_columns([Column("late", (5,), torch.float32, init.uniform(0, 1))])
    table.save(tmp_path / "saved")
    with Table.open(tmp_path / "saved") as again:
        assert again.name == "items"
        for name in table.columns:
            assert torch.equal(again.read(column=name), table.read(column=name))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        table.save(tmp_path / "saved")
    table.scatter(torch.tensor([2]), torch.ones(1, 5))
    table.save(tmp_path / "saved", overwrite=True)
    with Table.open(tmp_path / "saved", "r") as again:
        assert torch.equal(again.read(2, 3), torch.ones(1, 5))
    if kind == "disk":
        with pytest.raises(FileExistsError, match=r"already is; use flush\(\)"):
            table.save(tmp_path / "source", overwrite=True)
    assert not list(tmp_path.glob(".*"))
    table.close()


def test_save_replaces_only_tables(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("meow")
    with pytest.raises(TableFormatError, match="is not a table"):
        Table.create(3, 3).save(tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "cat").read_text() == "meow"


# ---------------------------------------------------------------------------- damage


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it a right checksum."""
    body = json.loads((path / "MANIFEST").read_bytes().partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    (path / "MANIFEST").write_bytes(b"%08x\n" % zlib.crc32(data) + data)


def test_no_table_and_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no table"):
        Table.open(tmp_path / "nowhere")
    with pytest.raises(TableFormatError, match="is not a table"):
        Table.open(tmp_path)
    (tmp_path / "MANIFEST").write_bytes(b"x" * (2 << 20))
    with pytest.raises(TableFormatError, match="longer than"):
        Table.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(num_embeddings=-1), "num_embeddings is -1"),
        (lambda m: m.update(num_embeddings=2**60), "are too many"),
        (lambda m: m.update(layouts=[]), "it has no layout"),
        (lambda m: m.update(group_rows=3), "group_rows is 3"),
        (lambda m: m.update(segment_bytes=2**40), "segment_bytes is"),
        (lambda m: m.update(salt=-1), "salt is -1"),
        (lambda m: m.update(scratch=1), "scratch is 1"),
        (lambda m: m.pop("seed"), "KeyError"),
        (lambda m: m["layouts"][0].update(number=1), "its layouts have the numbers"),
        (lambda m: m["layouts"][0].update(stride=0), "stride is 0"),
        (lambda m: m["layouts"][0].update(stride=2**30), "stride is 1073741824"),
        (lambda m: m["layouts"][0].update(held=[]), "the columns of a record are"),
        (lambda m: m["layouts"][0]["held"][0].__setitem__(0, 7), "a column is 7"),
        (lambda m: m["layouts"][0]["held"][0].__setitem__(1, 4), "does not fit its record"),
        (lambda m: m["layouts"][0]["held"][0].__setitem__(2, 1), "a column of layout 0 is of 1"),
        (lambda m: m["layouts"][0]["held"][0].__setitem__(4, "weight"), "column 'weight' is a copy of none"),
        (lambda m: m["columns"][0].update(name="a\nb"), "a column is"),
        (lambda m: m["columns"][0].update(name="other"), "its first layout has no weight"),
        (lambda m: m["columns"][0].update(row_shape=[2**40]), "have shape"),
        (lambda m: m["columns"][0].update(dtype="object"), "dtype 'object'"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    Table.create(10, 4, path=tmp_path / "t").close()
    rewrite(tmp_path / "t", change)
    with pytest.raises(TableFormatError, match=message):
        Table.open(tmp_path / "t")


@pytest.mark.parametrize("file", ["rows.log", "HEAD"])
def test_a_file_behind_a_link_is_refused(file: str, tmp_path: Path) -> None:
    Table.create(10, 4, path=tmp_path / "t").close()
    data = tmp_path / "t" / file
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TableFormatError, match="link"):
        Table.open(tmp_path / "t")


@pytest.mark.release
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 1000), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_manifests_are_errors_and_never_a_crash(position: int, byte: int, cut: bool, tmp_path: Path) -> None:
    path = tmp_path / "t"
    if not path.exists():
        Table.create(10, 4, path=path).close()
        (tmp_path / "good").write_bytes((path / "MANIFEST").read_bytes())
    good = (tmp_path / "good").read_bytes()
    position %= len(good)
    bad = good[:position] if cut else good[:position] + bytes([byte]) + good[position + 1 :]
    (path / "MANIFEST").write_bytes(bad)
    if bad == good:
        Table.open(path).close()
    else:
        with pytest.raises(TableError):
            Table.open(path)


@pytest.mark.release
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    key=st.sampled_from(
        "columns layouts group_rows segment_bytes salt scratch num_embeddings seed name version".split()
    ),
)
def test_hostile_manifests_are_errors_and_never_a_crash(value: object, key: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    if not path.exists():
        Table.create(10, 4, path=path).close()
        (tmp_path / "good").write_bytes((path / "MANIFEST").read_bytes())
    (path / "MANIFEST").write_bytes((tmp_path / "good").read_bytes())
    rewrite(path, lambda manifest: manifest.update({key: value}))
    try:
        Table.open(path).close()
    except TableError:
        pass
    else:
        is_positive = isinstance(value, int) and value > 0
        is_power = is_positive and value & (value - 1) == 0
        legal = {
            "num_embeddings": is_positive,  # of which the log has some
            "version": value == 1,
            "group_rows": is_power,
            "segment_bytes": is_power,
        }
        assert key in ("seed", "name", "scratch") or legal.get(key)


def test_larger_than_memory_tables_work(tmp_path: Path) -> None:
    """Twice the physical memory in a sparse file; only written rows take room."""
    rows = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 512
    embedding = speedswap.Embedding(rows, 128, path=tmp_path / "t", init=init.zeros(), seed=0)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    speedswap.attach(optimizer, embedding)
    ids = torch.randint(rows, (1000,))
    for _ in range(3):
        optimizer.zero_grad()
        (embedding(ids) - 1).square().sum().backward()
        optimizer.step()
    assert (embedding.table.gather(torch.unique(ids)).weight > 0).all()
    embedding.table.close()


def test_a_close_that_was_interrupted_goes_on_when_it_is_called_again(
    tmp_path: Path, interrupted_at: Callable[[int], AbstractContextManager[None]]
):
    """Ctrl-C at any line of close() leaves a table that a second close() closes, with everything written."""
    interrupted = 0
    for line in range(1, 400, 7):
        path = tmp_path / str(line)
        table = Table.create(10, 4, path=path)
        table.scatter(torch.tensor([3]), torch.full((1, 4), float(line)))
        try:
            with interrupted_at(line):
                table.close()
        except KeyboardInterrupt:
            interrupted += 1
        table.close()
        with Table.open(path) as again:
            assert again.gather(torch.tensor([3])).weight.tolist() == [[float(line)] * 4], line
    assert interrupted > 5


@pytest.mark.parametrize("name", ["exp-avg", "moment 1", "größe", "0"])
def test_a_column_of_any_name_is_there_when_the_table_is_opened_again(name: str, tmp_path: Path):
    """An optimizer may call its state what it likes."""
    with Table.create(4, 2, path=tmp_path / "t") as table:
        table.add_columns([Column(name, (1,), torch.float32, init.constant(3.0))])
    with Table.open(tmp_path / "t") as table:
        assert table.read(column=name).flatten().tolist() == [3.0] * 4


@pytest.mark.parametrize("name, shape", [("", (1,)), ("a\nb", (1,)), ("x" * 129, (1,)), ("c", (0,)), ("c", (1,) * 5)])
def test_a_column_that_files_could_not_name_is_refused(name: str, shape: tuple[int, ...]):
    """Before any table has it, in every storage."""
    with pytest.raises(ValueError, match=r"name is|row_shape of column"):
        Column(name, shape, torch.float32, init.zeros())
