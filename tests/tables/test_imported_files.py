"""Tables made of files of other programs: the same values, keys and rows; and files that are wrong in every way."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from children import killed_at

from speedswap import Column, Table, init
from speedswap.errors import TableFormatError, TableFullError
from speedswap.tables import whole_table
from speedswap.tables.formats import FORMATS

SUFFIXES = [form.suffixes[0] for form in FORMATS.values()]


@pytest.fixture(params=[1 << 20, 32], ids=["one piece", "few rows at a time"])
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(whole_table, "PIECE_BYTES", request.param)
    monkeypatch.setattr("speedswap.tables.vectors.PIECE_BYTES", request.param)
    monkeypatch.setattr("speedswap.tables.vectors._KEY_BYTES", 60)


@pytest.mark.parametrize("there", ["in memory", "in files"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_comes_back_bit_for_bit(suffix, there, tmp_path, piece_bytes):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    table = Table.create(101, 7, storage="pageable", init=init.normal(0.0, 1.0), seed=3)
    file = tmp_path / f"rows{suffix}"
    table.export(file)
    again = Table.from_file(file, None if there == "in memory" else tmp_path / "again")
    if again.id_map is not None:  # row 0 is that of keys without one
        assert again.id_map.lookup(["0", "100", "101"]).tolist() == [1, 101, 0]
        assert again.read(0, 1).tolist() == [[0.0] * 7]
    assert torch.equal(again.read()[len(again) - 101 :], table.read())
    again.close()
    if there == "in files":
        with Table.open(tmp_path / "again") as opened:
            assert opened.name == "again"
            assert torch.equal(opened.read()[len(opened) - 101 :], table.read())
            assert opened.id_map is None or opened.id_map.lookup(["100"]).tolist() == [101]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [file.name, *(["again"] if there == "in files" else [])]
    )


def test_files_of_other_programs(tmp_path, piece_bytes):
    """With whatever they do differently: other versions, orders of bytes, blanks, types of lists and keys."""
    values = np.arange(6, dtype=np.float32).reshape(3, 2) / 3
    np.save(tmp_path / "swapped.npy", values.astype(">f4"))
    with open(tmp_path / "newer.npy", "wb") as file:
        np.lib.format.write_array(file, values.astype(np.float16), version=(2, 0))
    (tmp_path / "c.txt").write_text(
        "\ufeff3 2\n" + "".join(f"w{row} {a} {b} \n" for row, (a, b) in enumerate(values.tolist()))
    )
    packed = [row.tobytes() for row in values]
    (tmp_path / "c.bin").write_bytes(b"3 2\nw0 " + packed[0] + b"\nw1 " + packed[1] + b"w2 " + packed[2])
    for name in ("swapped.npy", "newer.npy", "c.txt", "c.bin"):
        found = Table.from_file(tmp_path / name, keys="drop").read()
        expected = values.astype(np.float16) if name == "newer.npy" else values
        assert np.array_equal(found.numpy(), expected), name


def test_parquet_of_other_programs(tmp_path, piece_bytes):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = [[0.5, 1.5], [2.5, -3.0], [4.0, 5.0]]
    lists = pa.array(values, pa.list_(pa.float32()))
    texts = pa.array(["b", "a", "ö"]).dictionary_encode()
    parquet.write_table(pa.table({"key": texts, "vector": lists, "note": ["x", "y", "z"]}), tmp_path / "lists.parquet")
    table = Table.from_file(tmp_path / "lists.parquet")
    assert table.gather(table.id_map.lookup(["ö", "b"])).weight.tolist() == [values[2], values[0]]
    numbers = pa.table(
        {"key": pa.array([7, -1, 2**62]), "a": pa.array(values, pa.list_(pa.float64(), 2)), "b": [1, 2, 3]}
    )
    parquet.write_table(numbers, tmp_path / "numbers.parquet")
    with pytest.raises(ValueError, match=r"columns a, b; say which is the weight: columns="):
        Table.from_file(tmp_path / "numbers.parquet")
    table = Table.from_file(tmp_path / "numbers.parquet", columns=["a", "b"], dtype=torch.bfloat16)
    assert table.dtype == torch.bfloat16
    assert table.id_map.lookup(torch.tensor([2**62])).tolist() == [3]
    assert table.read(3, 4, column="b").tolist() == [3]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary"])
def test_keys_of_parquet_may_be_strings_of_any_length(kind, tmp_path, piece_bytes):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    keys = pa.array([b"b", b"", b"aaa"]).cast(getattr(pa, kind)())
    weight = pa.array([[1.0], [2.0], [3.0]], pa.list_(pa.float32(), 1))
    parquet.write_table(pa.table({"key": keys, "weight": weight}), tmp_path / "rows.parquet")
    table = Table.from_file(tmp_path / "rows.parquet")
    assert table.id_map.lookup(["aaa", "b", ""]).tolist() == [3, 1, 2]
    assert table.read().tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_columns_of_an_optimizer_come_back_too(tmp_path):
    table = Table.create(10, 4, storage="pageable", init=init.normal(0.0, 1.0))
    table.add_columns(
        [Column("sum", (4,), torch.float64, init.constant(0.5)), Column("step", (1,), torch.int64, init.constant(3))]
    )
    table.export(tmp_path / "all.safetensors", columns=["weight", "sum", "step"])
    again = Table.from_file(tmp_path / "all.safetensors", tmp_path / "again", columns=["sum", "step"])
    assert list(again.columns) == ["weight", "step"]
    assert again.read().unique().tolist() == [0.5]
    again = Table.from_file(tmp_path / "all.safetensors", columns=["weight", "sum", "step"])
    for name in table.columns:
        assert torch.equal(again.read(column=name), table.read(column=name))


def test_stored_dtype_and_dtype_are_those_asked_for(tmp_path):
    values = np.random.default_rng(0).normal(size=(20, 8))
    np.save(tmp_path / "rows.npy", values)
    table = Table.from_file(tmp_path / "rows.npy", dtype=torch.float32, stored_dtype=torch.int8, name="small")
    assert (table.name, table.dtype, table.columns["weight"].stored_dtype) == ("small", torch.float32, torch.int8)
    assert np.abs(table.read().numpy() - values).max() <= np.abs(values).max() / 254 * 1.001
    assert Table.from_file(tmp_path / "rows.npy").dtype == torch.float64


def test_keys_become_a_vocabulary_file(tmp_path, piece_bytes):
    (tmp_path / "rows.txt").write_text("2 1\nölf 1\nzwei 2\n")
    table = Table.from_file(tmp_path / "rows.txt", keys=tmp_path / "words")
    assert (tmp_path / "words").read_text() == "ölf\nzwei\n"
    assert table.id_map is None
    assert table.read().tolist() == [[1.0], [2.0]]
    np.save(tmp_path / "rows.npy", np.ones((2, 2)))
    with pytest.raises(ValueError, match="have no keys; leave it out"):
        Table.from_file(tmp_path / "rows.npy", keys=tmp_path / "others")
    (tmp_path / "rows.txt").write_text("2 1\nölf 1\nölf 2\n")
    with pytest.raises(TableFormatError, match="key 'ölf' of row 1 is that of row 0 as well"):
        Table.from_file(tmp_path / "rows.txt", keys=tmp_path / "others")
    assert not (tmp_path / "others").exists()


def test_values_that_are_not_finite_are_taken_when_allowed(tmp_path):
    (tmp_path / "nan.txt").write_text("1 2\na nan -inf\n")
    assert Table.from_file(tmp_path / "nan.txt", allow_nan=True).read(1).isfinite().tolist() == [[False, False]]
    np.save(tmp_path / "wide.npy", np.array([[1e300]]))
    with pytest.raises(
        TableFormatError, match=r"is not finite, as torch.float32; correct it, or give allow_nan=True \(--allow-nan\)"
    ):
        Table.from_file(tmp_path / "wide.npy", dtype=torch.float32)


def test_wrong_arguments_are_refused(tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((2, 2), np.float32))
    (tmp_path / "table").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    refused = {
        FileExistsError: [{"path": tmp_path / "table"}],
        FileNotFoundError: [{"path": tmp_path / "no" / "where"}, {"file": tmp_path / "nothing.npy"}],
        OSError: [{"file": tmp_path / "pipe.npy"}, {"file": tmp_path / "table", "format": "npy"}],
        ValueError: [
            {"path": tmp_path / "t", "storage": "pinned"},
            {"columns": ["b"]},
            {"columns": "weight"},
            {"columns": []},
            {"format": "hdf5"},
        ],
        TypeError: [{"stored_dtype": torch.int32}],
    }
    for error, calls in refused.items():
        for call in calls:
            with pytest.raises(error):
                Table.from_file(**{"file": tmp_path / "rows.npy", **call})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe.npy", "rows.npy", "table"]


def test_a_full_disk_is_an_error_before_a_row_is_read_and_leaves_nothing(small_disk, tmp_path):
    np.save(tmp_path / "rows.npy", np.full((100_000, 16), np.nan, np.float32))
    with pytest.raises(TableFullError, match="free space there"):
        Table.from_file(tmp_path / "rows.npy", small_disk / "table")
    assert list(small_disk.iterdir()) == []


def test_a_killed_import_leaves_no_table_and_the_next_one_removes_its_leftovers(tmp_path):
    (tmp_path / "rows.txt").write_text("2 1\na 1\nb 2\n")

    def work():
        Table.from_file(tmp_path / "rows.txt", tmp_path / "table", keys=tmp_path / "words").close()

    step, kills = 0, 0
    while killed_at(step, work):
        kills += 1
        if (tmp_path / "table").exists():
            break
        step += 3
    assert kills > 5
    with Table.open(tmp_path / "table", mode="r") as table:
        assert table.read().tolist() == [[1.0], [2.0]]
    Table.from_file(tmp_path / "rows.txt", tmp_path / "other", keys=tmp_path / "words").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "rows.txt", "table", "words"]


def test_without_pyarrow_the_message_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="Parquet needs pyarrow: pip install 'pyarrow"):
        Table.create(1, 1, storage="pageable").export(tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []
