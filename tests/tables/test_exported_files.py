"""Tables written to files of other programs: bytes by hand, and as NumPy, safetensors, gensim and pyarrow read them."""

from __future__ import annotations

import json
import os
import struct
from functools import partial

import numpy as np
import pytest
import torch

import speedswap
from speedswap import Column, IdMap, Table, init
from speedswap.errors import TableFormatError, TableFullError
from speedswap.tables import whole_table
from speedswap.tables.formats import FORMATS, format_of, least_bytes, outgoing

VALUES = [[0.1, -2.0], [1e-7, 4.0], [3.0, 0.0]]
SUFFIXES = [form.suffixes[0] for form in FORMATS.values()]


@pytest.fixture(params=[1 << 20, 16], ids=["one piece", "a row at a time"])
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(whole_table, "PIECE_BYTES", request.param)


@pytest.fixture
def table():
    table = Table.create(3, 2, storage="pageable")
    table.write(0, torch.tensor(VALUES))
    return table


def test_npy_bytes(table, tmp_path, piece_bytes):
    table.export(tmp_path / "rows.npy")
    raw = (tmp_path / "rows.npy").read_bytes()
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }"
    assert raw == b"\x93NUMPY\x01\0\x76\0" + head.ljust(117) + b"\n" + struct.pack("<6f", *np.ravel(VALUES))
    assert np.array_equal(np.load(tmp_path / "rows.npy"), np.array(VALUES, np.float32))


def test_safetensors_bytes(table, tmp_path, piece_bytes):
    table.export(tmp_path / "rows.safetensors")
    raw = (tmp_path / "rows.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    assert json.loads(raw[8 : 8 + size]) == {"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}
    assert raw[8 + size :] == struct.pack("<6f", *np.ravel(VALUES))
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert load_file(tmp_path / "rows.safetensors")["weight"].tolist() == torch.tensor(VALUES).tolist()


def test_rows_on_the_device_are_exported(device, tmp_path, piece_bytes):
    storage = "pageable" if device == "cpu" else "device"
    table = Table.create(50, 3, storage=storage, stored_dtype=torch.int8, init=init.normal(0.0, 1.0))
    table.export(tmp_path / "rows.npy")
    assert np.array_equal(np.load(tmp_path / "rows.npy"), table.read().numpy())
    table.export(tmp_path / "rows.txt")
    again = Table.from_file(tmp_path / "rows.txt", storage=storage, keys="drop")
    assert torch.equal(again.read(), table.read())


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
def test_keys_that_occur_twice_are_written_and_read_back_without_them(table, tmp_path, suffix):
    table.export(tmp_path / f"rows{suffix}", keys=["a", "b", "a"])
    with pytest.raises(TableFormatError, match=r"key 'a' of row 2 is that of row 0 as well.* keys='drop'"):
        Table.from_file(tmp_path / f"rows{suffix}")
    assert torch.equal(Table.from_file(tmp_path / f"rows{suffix}", keys="drop").read(), table.read())


def test_word2vec_bytes(table, tmp_path, piece_bytes):
    """Rows' numbers are the keys where there are no others."""
    table.export(tmp_path / "rows.txt")
    assert (tmp_path / "rows.txt").read_text() == "3 2\n0 0.1 -2\n1 1e-07 4\n2 3 0\n"
    table.export(tmp_path / "rows.bin", keys=["a", "ö", "c"])
    packed = [struct.pack("<2f", *row) for row in VALUES]
    expected = b"3 2\na " + packed[0] + "\nö ".encode() + packed[1] + b"\nc " + packed[2] + b"\n"
    assert (tmp_path / "rows.bin").read_bytes() == expected


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
def test_gensim_reads_the_very_values(suffix, tmp_path, piece_bytes):
    keyed = pytest.importorskip("gensim.models").KeyedVectors
    table = Table.create(100, 5, storage="pageable", init=init.normal(0.0, 1.0))
    words = [f"wört{row}" for row in range(100)]
    table.export(tmp_path / f"rows{suffix}", keys=words)
    theirs = keyed.load_word2vec_format(str(tmp_path / f"rows{suffix}"), binary=suffix == ".bin")
    assert theirs.index_to_key == words
    assert np.array_equal(theirs.vectors, table.read().numpy())


def test_parquet_has_lists_of_fixed_size_in_row_groups_of_bounded_size(table, tmp_path, piece_bytes):
    parquet = pytest.importorskip("pyarrow.parquet")
    table.add_columns([Column("step", (), torch.int64, init.constant(7))])
    table.export(tmp_path / "rows.parquet", columns=["weight", "step"], keys="rows")
    file = parquet.ParquetFile(tmp_path / "rows.parquet")
    found = file.read()
    assert str(found.schema.field("weight").type) == "fixed_size_list<element: float>[2]"
    assert found.to_pydict() == {"key": [0, 1, 2], "weight": torch.tensor(VALUES).tolist(), "step": [7, 7, 7]}
    assert file.num_row_groups == (1 if whole_table.PIECE_BYTES > 16 else 3)


def test_columns_are_written_by_name(table, tmp_path):
    """One in .npy and word2vec's formats, any number in the others; the records hold more."""
    table.add_columns([Column("sum", (2,), torch.float64, init.constant(0.25))])
    table.export(tmp_path / "sum.npy", columns=["sum"])
    assert np.array_equal(np.load(tmp_path / "sum.npy"), np.full((3, 2), 0.25))
    table.export(tmp_path / "sum.vec", columns=["sum"])
    assert (tmp_path / "sum.vec").read_text().splitlines()[1] == "0 0.25 0.25"
    for name in ("two.npy", "two.txt", "two.bin"):
        with pytest.raises(ValueError, match="give a list of one name"):
            table.export(tmp_path / name, columns=["weight", "sum"])
    for wrong in ("weight", [], ["other"]):
        with pytest.raises(ValueError, match=r"columns is|is not in table 'table'; it has weight, sum"):
            table.export(tmp_path / "wrong.safetensors", columns=wrong)
    with pytest.raises(TypeError, match=r"holds torch\.float64, but the format float32"):
        table.export(tmp_path / "wrong.bin", columns=["sum"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sum.npy", "sum.vec"]


@pytest.mark.parametrize(
    "dtype, stored", [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, torch.int8)]
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_narrow_columns_are_written_as_the_values_that_a_lookup_gives(dtype, stored, suffix, tmp_path):
    table = Table.create(50, 3, dtype=dtype, stored_dtype=stored, storage="pageable", init=init.normal(0.0, 1.0))
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    file = tmp_path / f"rows{suffix}"
    table.export(file)
    again = Table.from_file(file, keys="drop")
    kept = suffix == ".safetensors" or dtype == torch.float32
    assert again.dtype == (dtype if kept else torch.float32)
    assert torch.equal(again.read().float(), table.gather(torch.arange(50)).weight.float())


@pytest.mark.parametrize("walks", ["read one by one", "in one walk", "in several walks"])
@pytest.mark.parametrize("dim, stored", [(3, None), (128, None), (5, torch.int8), (5, torch.bfloat16)])
def test_rows_of_a_log_come_in_order(dim, stored, walks, tmp_path, monkeypatch):
    """Written in any order, some of them never, and some before a column was added."""
    if walks != "in one walk":
        monkeypatch.setattr(whole_table, "_BYTES_FOR_A_READ", 0 if walks == "read one by one" else 1 << 40)
        monkeypatch.setattr(whole_table, "available_bytes", lambda: 4 * 37 * dim * 4)  # 37 rows in a window
    shuffled = torch.randperm(500)
    weight = {"init": init.normal(0.0, 1.0), "stored_dtype": stored}
    with Table.create(500, dim, path=tmp_path / "table", storage="disk", **weight) as table:
        for some in (shuffled[:100], shuffled[50:200]):
            table.scatter(some, torch.randn(len(some), dim))
        table.add_columns([Column("sum", (2,), torch.float64, init.constant(0.25))])
        table.scatter(shuffled[150:300], {"weight": torch.randn(150, dim), "sum": torch.randn(150, 2).double()})
        expected = {name: each.numpy() for name, each in table.gather(torch.arange(500)).columns.items()}
        for name, values in expected.items():
            table.export(tmp_path / f"{name}.npy", columns=[name])
            assert np.array_equal(np.load(tmp_path / f"{name}.npy"), values)
    with Table.open(tmp_path / "table", mode="r") as table:
        table.export(tmp_path / "table.safetensors", columns=["weight", "sum"])
    again = Table.from_file(tmp_path / "table.safetensors", columns=["weight", "sum"])
    for name, values in expected.items():
        assert np.array_equal(again.gather(torch.arange(500))[name].numpy(), values)


def test_rows_that_have_a_key_in_the_tables_map_are_written_with_it(tmp_path):
    for kind, keys, shown in (
        ("exact", ["b", "a"], ["b", "a"]),
        ("int64", torch.tensor([-7, 2**60]), ["-7", str(2**60)]),
    ):
        users = IdMap(5, keys=kind)
        table = Table.create(users.num_rows, 1, storage="pageable", init=init.constant(0.5))
        table.set_id_map(users)
        with pytest.raises(ValueError, match="no keys yet"):
            table.export(tmp_path / "none.txt")
        users.add(keys)
        table.export(tmp_path / f"{kind}.txt")
        assert (tmp_path / f"{kind}.txt").read_text() == f"2 1\n{shown[0]} 0.5\n{shown[1]} 0.5\n"
        table.export(tmp_path / f"{kind}-rows.txt", keys="rows")
        assert (tmp_path / f"{kind}-rows.txt").read_text().startswith("6 1\n0 0.5\n")
    hashed = IdMap(2, keys="hashed")
    hashed.add(["a"])
    with pytest.raises(ValueError, match="keeps hashes and not the keys; give keys"):
        table.export(tmp_path / "hashed.txt", keys=hashed)


def test_keys_of_a_vocabulary_file(table, tmp_path, piece_bytes):
    words = tmp_path / "words"
    words.write_bytes("\ufeffeins\r\nzwei\nölf".encode())
    table.export(tmp_path / "rows.txt", keys=words)
    assert [line.split()[0] for line in (tmp_path / "rows.txt").read_text().splitlines()[1:]] == ["eins", "zwei", "ölf"]
    words.write_text("eins\nzwei\n")
    with pytest.raises(ValueError, match=r"words' with 2 lines, but the table has 3 rows"):
        table.export(tmp_path / "short.txt", keys=words)
    words.write_text("eins\nzwei drei\nvier\n")
    with pytest.raises(ValueError, match="key 'zwei drei' is empty or has whitespace"):
        table.export(tmp_path / "space.txt", keys=words)
    words.write_text("x" * 70_000)
    with pytest.raises(ValueError, match="a line of more than 65536 bytes"):
        table.export(tmp_path / "long.txt", keys=words)
    for wrong, error in ((["a"], ValueError), (3, TypeError), (IdMap(99, keys="exact"), ValueError)):
        with pytest.raises(error, match=r"^keys is|^keys has"):
            table.export(tmp_path / "wrong.txt", keys=wrong)
    with pytest.raises(ValueError, match="npy holds no keys"):
        table.export(tmp_path / "wrong.npy", keys="rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.txt", "words"]


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(table, tmp_path):
    """Such as /dev/null, which root could lose."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (partial(table.export, pipe, format="npy"), partial(table.save_rows, pipe)):
        with pytest.raises(FileExistsError, match="a device, a pipe or a socket, which a file would replace"):
            write(overwrite=True)
        assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_file_is_replaced_only_when_asked_for(table, tmp_path):
    """Through a link, whose target is replaced."""
    path = tmp_path / "rows.npy"
    (tmp_path / "link.npy").symlink_to(path)
    table.export(path)
    for there in (path, tmp_path / "link.npy"):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            table.export(there)
    table.write(0, torch.ones(3, 2))
    table.export(tmp_path / "link.npy", overwrite=True)
    assert np.load(path).sum() == 6
    assert (tmp_path / "link.npy").is_symlink()
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(IsADirectoryError):
        table.export(tmp_path / "folder.npy", overwrite=True)
    with pytest.raises(FileNotFoundError, match="this folder does not exist"):
        table.export(tmp_path / "nowhere" / "rows.npy")
    with pytest.raises(ValueError, match="none of the suffixes of a format; give format, one of npy, safetensors"):
        table.export(tmp_path / "rows.hdf5")
    with pytest.raises(ValueError, match="format is 'hdf5'; choose one of npy"):
        table.export(tmp_path / "rows.npy", "hdf5")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_an_error_that_leaves_nothing(suffix, small_disk):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    table = Table.create(200_000, 16, storage="pageable")
    with pytest.raises(TableFullError, match=r"no room on the disk .*; nothing was left there: free space"):
        table.export(small_disk / f"rows{suffix}")
    assert [path.name for path in small_disk.iterdir() if path.name != "lost+found"] == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_that_cannot_fit_are_refused_before_any_is_read(suffix, small_disk, tmp_path):
    """A disk that is too small is noticed before it is full; the existing file stays."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    file = small_disk / f"rows{suffix}"
    file.write_bytes(b"of before")
    with Table.create(10**6, 16, path=tmp_path / "t", init=init.normal()) as table:
        with pytest.raises(TableFullError, match=r"the rows take at least \d+ bytes, and \d+ are free"):
            table.export(file, overwrite=True)
        assert table.store.log.stats()["rows_brought"] == 0
    assert [(path.name, path.read_bytes()) for path in small_disk.iterdir()] == [(file.name, b"of before")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_take_no_fewer_bytes_than_the_disk_is_asked_for(dtype, suffix, tmp_path):
    """Zeros and keys of one digit are the shortest."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    if suffix in (".txt", ".bin") and not (dtype.is_floating_point and (suffix == ".txt" or dtype.itemsize <= 4)):
        pytest.skip("the format does not hold the dtype")
    table = Table.create(5000, 64, dtype=dtype, storage="pageable")
    form = FORMATS[format_of(tmp_path / f"rows{suffix}", None)]
    keys = None if form.keys == "never" else ["1"] * 5000
    table.export(tmp_path / f"rows{suffix}", keys=keys)
    with outgoing(table.store, format_of(tmp_path / f"rows{suffix}", None), ["weight"], keys) as rows:
        least = least_bytes(form, rows)
    size = (tmp_path / f"rows{suffix}").stat().st_size
    assert size // 8 < least <= size


@pytest.mark.parametrize("name", ["HEAD", "MANIFEST", "rows.log", "LOCK"])
def test_no_file_of_a_table_or_of_a_checkpoint_is_overwritten(name, tmp_path, table):
    """An export over a file of its own table, of another, or of a checkpoint would destroy that."""
    own = Table.create(3, 2, path=tmp_path / "own")
    own.write(0, torch.tensor(VALUES))
    own.flush()
    items = speedswap.Embedding(3, 2, table=own)
    checkpoint = speedswap.save_checkpoint(tmp_path / "saved", items).path
    for source in (own, table):
        for file in (tmp_path / "own" / name, checkpoint / "CHECKPOINT"):
            with pytest.raises(FileExistsError, match=r"a file of a table or a checkpoint|inside the table"):
                source.export(file, "npy", overwrite=True)
    own.close()
    with Table.open(tmp_path / "own") as again:
        assert torch.equal(again.read(), torch.tensor(VALUES))
    speedswap.load_checkpoint(checkpoint, speedswap.Embedding(3, 2))
