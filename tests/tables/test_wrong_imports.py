"""Files that are wrong in every way: refused with the reason, and nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedswap import Table, init
from speedswap.errors import TableFormatError
from speedswap.tables.formats import FORMATS

SUFFIXES = [form.suffixes[0] for form in FORMATS.values()]


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\0") -> bytes:
    size = struct.pack("<H", len(header)) if version == b"\x01\0" else struct.pack("<I", len(header))
    return b"\x93NUMPY" + version + size + header + data


def tensors(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as parts:
        parts.writestr("a.npy", b"")
    return file.getvalue()


F4 = b"{'descr': '<f4', 'fortran_order': %s, 'shape': %s}"
ONE = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
ROW = struct.pack("<2f", 1.0, 2.0)
NAN_ROW = struct.pack("<2f", 1.0, float("nan"))
WRONG = {
    "empty.npy": (b"", "not an array of numbers"),
    "archive.npy": (archive(), "not an array of numbers"),
    "objects.npy": (
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1)}", bytes(8)),
        "not an array of numbers",
    ),
    "texts.npy": (
        npy(b"{'descr': '<U2', 'fortran_order': False, 'shape': (1, 1)}", bytes(8)),
        "not an array of numbers",
    ),
    "fields.npy": (
        npy(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1, 1)}", bytes(4)),
        "not an array",
    ),
    "call.npy": (npy(b"__import__('os').abort()"), "not an array of numbers"),
    "nested.npy": (npy(b"(" * 5000 + b")" * 5000), "not an array of numbers"),
    "huge header.npy": (npy(b" " * 60_000), "not an array of numbers"),
    "fortran.npy": (npy(F4 % (b"True", b"(2, 3)"), bytes(24)), "columns first"),
    "flat.npy": (npy(F4 % (b"False", b"()"), bytes(4)), "no rows"),
    "cube.npy": (npy(F4 % (b"False", b"(1, 2, 3)"), bytes(24)), "rows of shape"),
    "no rows.npy": (npy(F4 % (b"False", b"(0, 3)")), "no rows"),
    "short.npy": (npy(F4 % (b"False", b"(2, 3)"), bytes(23)), "23 bytes of data"),
    "long.npy": (npy(F4 % (b"False", b"(2, 3)"), bytes(25)), "25 bytes of data"),
    "huge.npy": (npy(F4 % (b"False", b"(9999999999999, 9999999999999)"), bytes(24)), "24 bytes of data"),
    "negative.npy": (npy(F4 % (b"False", b"(-2, -3)"), bytes(24)), "no rows"),
    "nan.npy": (npy(F4 % (b"False", b"(2, 2)"), ROW + NAN_ROW), "row 1: 'weight' has a value that is not finite"),
    "short.safetensors": (b"\0" * 5, "begins with"),
    "huge.safetensors": (struct.pack("<Q", 2**60) + b"{" * 99, "damaged"),
    "no json.safetensors": (tensors(b"{{{"), "damaged"),
    "nested.safetensors": (tensors(b'{"a":' + b"[" * 100_000), "damaged"),
    "list.safetensors": (tensors([1]), "begins with"),
    "array.safetensors": (npy(F4 % (b"False", b"(1, 2)"), ROW), "NUMPY.*, not as a safetensors file: give one"),
    "none.safetensors": (tensors({}), "no tensor with rows"),
    "cut.safetensors": (tensors({"weight": ONE}, bytes(7)), "damaged"),
    "more.safetensors": (tensors({"weight": ONE}, bytes(9)), "damaged"),
    "overlap.safetensors": (tensors({"weight": ONE, "b": ONE}, ROW), "damaged"),
    "size.safetensors": (tensors({"weight": ONE | {"shape": [2**62, 2**62]}}, ROW), "damaged"),
    "dtype.safetensors": (tensors({"weight": ONE | {"dtype": "Q4"}}, ROW), "which is not read"),
    "nan.safetensors": (tensors({"weight": ONE}, NAN_ROW), "row 0: 'weight' has a value that is not finite"),
    "empty.txt": (b"", "begins with b''"),
    "glove.txt": (b"the 0.1 0.2\nof 0.3 0.4\n", "put that line in front of vectors of another program"),
    "gzip.txt": (b"\x1f\x8b\x08\0abc\n", "unpack a compressed file"),
    "none.txt": (b"0 2\n", "declares 0 rows"),
    "huge.txt": (b"1000000000000 300\na 1 2\n", "declares 1000000000000 rows of 300 values"),
    "wide.txt": (b"1 999999999999999999\na 1 2\n", "do not fit the 6 bytes"),
    "short.txt": (b"2 2\na 1 2\nb 1.5   \n", "line 3, has not a key and 2 values"),
    "missing.txt": (b"3 2\na 1 2\nb 1.5      3\n", "line 4, is missing: the file ends after 2 of 3 rows"),
    "ragged.txt": (b"2 2\na 1 2\nb 1 2 3\n", r"line 3, has not a key and 2 values \(b'b 1 2 3"),
    "more.txt": (b"1 2\na 1 2\nb 1 2\n", "there is more after its 1 rows"),
    "word.txt": (b"1 2\na 1 two\n", "line 2, has a value that float32 cannot hold"),
    "nan.txt": (b"2 2\na 1 2\nb nan 2\n", "row 1: 'weight' has a value that is not finite"),
    "keyless.txt": (b"2 2\na 1 2\n 1 2   \n", "line 3, has no key"),
    "twice.txt": (b"2 1\na 1\na 2\n", "key 'a' of row 1 is that of row 0 as well; give each row a different key"),
    "empty.bin": (b"", "begins with b''"),
    "short.bin": (b"2 2\na " + ROW + b"b " + ROW[:6] + b"", "do not fit"),
    "missing.bin": (b"2 2\naaaaaaa " + ROW + b"b " + ROW[:6], "row 1, is missing: the file ends after 1 of 2"),
    "more.bin": (b"1 2\na " + ROW + b"\nb " + ROW, "there is more after its 1 rows"),
    "keyless.bin": (b"2 2\na " + ROW + b"  " + ROW, "row 1, has no key, or one with whitespace"),
    "nan.bin": (b"1 2\na " + NAN_ROW, "row 0: 'weight' has a value that is not finite"),
    "twice.bin": (b"2 2\na " + ROW + b"a " + ROW, "key 'a' of row 1 is that of row 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_its_reason_and_leaves_nothing(name, tmp_path):
    content, message = WRONG[name]
    (tmp_path / name).write_bytes(content)
    for path in (None, tmp_path / "table"):
        with pytest.raises(TableFormatError, match=message):
            Table.from_file(tmp_path / name, path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_wrong_parquet_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wrong = {
        "ragged": ({"v": [[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]]}, "row 1: column 'v' has 1 values, and the first row 2"),
        "null": ({"v": [[1.0, 2.0], None]}, "column 'v' has 1 nulls"),
        "null within": ({"v": [[1.0, 2.0], [None, 1.0]]}, "column 'v' has 1 nulls"),
        "texts": ({"v": ["a"]}, "no column of numbers or of lists of them, but v"),
        "no rows": ({"v": pa.array([], pa.list_(pa.float32(), 2))}, "no rows"),
        "no values": ({"v": [[], []]}, "no column of numbers"),
        "keys": ({"key": ["a", "a"], "v": [[1.0], [2.0]]}, "key 'a' of row 1 is that of row 0"),
        "null key": ({"key": ["a", None], "v": [[1.0], [2.0]]}, "column 'key' has 1 nulls"),
        "nan": ({"v": [[1.0], [float("nan")]]}, "row 1: 'v' has a value that is not finite"),
        "bomb": ({"v": pa.array(np.zeros(20_000_000, np.float32))}, "more than 200 times its size"),
    }
    for name, (columns, message) in wrong.items():
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet", compression="zstd")
        with pytest.raises(TableFormatError, match=message):
            Table.from_file(tmp_path / f"{name}.parquet", tmp_path / "table")
    twice = pa.Table.from_arrays([pa.array([1.0])] * 2, ["v", "v"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(TableFormatError, match="has several columns 'v'; give each its own name"):
        Table.from_file(tmp_path / "twice.parquet")
    raw = (tmp_path / "nan.parquet").read_bytes()
    for name, content in (("cut", raw[:-9]), ("empty", b""), ("other", b"PAR1" + bytes(99) + b"PAR1")):
        (tmp_path / f"{name}.parquet").write_bytes(content)
        with pytest.raises(TableFormatError, match="is not a whole Parquet file"):
            Table.from_file(tmp_path / f"{name}.parquet")
    assert not (tmp_path / "table").exists()


def test_keys_of_a_type_that_is_not_read_are_refused_unless_dropped(tmp_path):
    """Never lost without a word."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, weight = tmp_path / "rows.parquet", pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1))
    for keys, kind in (
        (pa.array([5, 6], pa.uint64()), "uint64"),
        (pa.array([b"a", b"b"], pa.binary(1)), r"fixed_size_binary\[1\]"),
        (pa.array(["a", "b"], pa.string_view()), "string_view"),
        (pa.array([5.0, 6.0]), "double"),
    ):
        parquet.write_table(pa.table({"key": keys, "weight": weight}), path)
        for wanted in ("map", tmp_path / "words"):
            with pytest.raises(TableFormatError, match=f"column 'key' is {kind}.*cast it to int64 or string, or give"):
                Table.from_file(path, tmp_path / "table", keys=wanted)
        assert sorted(tmp_path.iterdir()) == [path]
        assert Table.from_file(path, keys="drop").read().tolist() == [[1.0], [2.0]]
    parquet.write_table(pa.table({"key": pa.array([5.0, 6.0]), "value": weight}), path)
    assert Table.from_file(path, columns=["key"]).read().tolist() == [[5.0], [6.0]]  # asked for as values
    parquet.write_table(pa.table({"key": weight, "note": ["x", "y"]}), path)
    assert Table.from_file(path).read().tolist() == [[1.0], [2.0]]  # vectors are no keys


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files_are_read_or_refused_and_leave_nothing(suffix, tmp_path):
    """Bytes changed, cut out and put in, anywhere."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    Table.create(9, 3, storage="pageable", init=init.normal(0.0, 1.0)).export(tmp_path / f"rows{suffix}")
    whole = (tmp_path / f"rows{suffix}").read_bytes()
    file = tmp_path / f"damaged{suffix}"

    @settings(max_examples=25 if suffix == ".parquet" else 60)
    @given(st.integers(0, len(whole)), st.integers(0, 5), st.binary(max_size=5))
    def damage(place, cut, put):
        file.write_bytes(whole[:place] + put + whole[place + cut :])
        with contextlib.suppress(TableFormatError, ValueError, TypeError), Table.from_file(file) as table:
            assert table.nbytes <= 4 * len(whole)
        file.unlink()

    damage()


FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_read_where_a_wider_dtype_is_asked_for(dtype, tmp_path):
    """Its scales are in another tensor, which tells nobody that they are needed."""
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    names = {torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}
    name = names.get(dtype, str(dtype).removeprefix("torch.").replace("float8_", "F8_").replace("fn", "FN", 1).upper())
    name = {"F8_E4M3FN": "F8_E4M3"}.get(name, name)
    header = {
        "weight": {"dtype": name, "shape": [2, 2], "data_offsets": [0, 4]},
        "other": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]},
    }
    raw = bytes(rows.to(dtype).view(torch.uint8).flatten().tolist()) + rows.numpy().tobytes()
    path = tmp_path / "w.safetensors"
    path.write_bytes(tensors(header, raw))
    with pytest.raises(TableFormatError, match=r"has 'weight' as torch.float8.*give dtype=torch.float32"):
        Table.from_file(path)
    assert torch.equal(Table.from_file(path, dtype=torch.float32).read(), rows)
    assert torch.equal(Table.from_file(path, columns=["other"]).read(), rows)


def test_a_dtype_that_is_not_read_is_not_called_damage(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(tensors({"weight": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, b"ab"))
    with pytest.raises(TableFormatError, match=r"w.safetensors: tensor 'weight' has dtype 'F4', which is not read"):
        Table.from_file(path)
