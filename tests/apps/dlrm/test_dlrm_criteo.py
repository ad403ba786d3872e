"""Files in Criteo's format: every number as Python reads it, positions to go on from, an error for every mistake."""

from __future__ import annotations

import gzip
import random

import pytest
import torch

from speedswap.apps.dlrm import SampleFiles
from speedswap.apps.dlrm import criteo as module
from speedswap.apps.dlrm.criteo import MISSING, NAMES, SamplePosition, find_files
from speedswap.apps.errors import CheckpointError, SamplesError


def lines_of(count, seed=0, labelled=True):
    """Make lines of random fields, a tenth of them empty."""
    rng = random.Random(seed)

    def field(text):
        return "" if rng.random() < 0.1 else text

    for _ in range(count):
        integers = [field(str(rng.randrange(-3, 10 ** rng.randrange(1, 9)))) for _ in range(13)]
        ids = [field(f"{rng.randrange(1000) * 4_000_037 % 2**32:08x}") for _ in range(26)]
        yield "\t".join([*([str(rng.randrange(2))] if labelled else []), *integers, *ids])


def by_python(lines):
    """Return what a file's lines say: labels, integers and ids, a list per line."""
    rows = [line.split("\t") for line in lines]
    labels = [float(row[0]) for row in rows if len(row) == 40]
    integers = [[int(text or 0) for text in row[-39:-26]] for row in rows]
    return labels, integers, [[int(text, 16) if text else MISSING for text in row[-26:]] for row in rows]


def as_lists(parts):
    """Return the contents of pieces of samples."""
    labels = [label for part in parts for label in part.labels.tolist()]
    return labels, *([row for part in parts for row in part[place].T.tolist()] for place in (1, 2))


def read_all(source, size=64):
    parts = []
    while (part := source.read(size)).size:
        parts.append(part)
    return parts


@pytest.fixture
def written(tmp_path):
    """Three files, one of them gzip and one without a last newline, and their lines."""
    lines = list(lines_of(500))
    (tmp_path / "day_2.txt").write_text("\n".join(lines[:130]))
    (tmp_path / "day_9.gz").write_bytes(gzip.compress("\n".join([*lines[130:300], "", ""]).encode()))
    (tmp_path / "day_10.txt").write_bytes("\r\n".join([*lines[300:], ""]).encode())
    return tmp_path, lines


@pytest.mark.parametrize("size", [1, 64, 1000])
def test_every_field_of_every_file_is_read_in_order(written, size, monkeypatch):
    """Also in small pieces; files of one pattern come by their numbers."""
    folder, lines = written
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    source = SampleFiles(find_files([folder / "day_*"]))
    parts = read_all(source, size)
    assert as_lists(parts) == by_python(lines)
    assert [part.size for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert source.done == source.total == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_passed_over(packed, tmp_path):
    lines = list(lines_of(3))
    content = "\ufeff" + "\r\n".join(lines)
    (tmp_path / "day_0").write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    for labelled in (True, None):
        source = SampleFiles([tmp_path / "day_0"], labelled=labelled)
        assert as_lists(read_all(source)) == by_python(lines)


WIDE = [
    "8000000000000000",
    "7fffffffffffffff",
    "fffffffffffffffe",
    "0123456789abcdef",
    "FEDCBA9876543210",
    "1",
    "0",
    "",
]


@pytest.mark.parametrize("form", ["text", "Parquet", "numbers in Parquet"])
def test_categories_of_64_bits_stay_different(form, tmp_path):
    """Each is taken as its bits; the one that would be that of an empty field is refused."""
    path = tmp_path / "day_0"

    def written(categories):
        lines = ["\t".join(["1", *["2"] * 13, each, *["a"] * 25]) for each in categories]
        if form == "text":
            path.write_text("\n".join(lines))
            return
        pa = pytest.importorskip("pyarrow")
        values = categories if form == "Parquet" else [int(each, 16) if each else None for each in categories]
        kind = pa.string() if form == "Parquet" else pa.uint64()
        parquet_of(lines, path, change=lambda columns: columns | {"C1": pa.array(values, kind)})

    written(WIDE)
    (samples,) = read_all(SampleFiles([path]))
    bits = [int(each, 16) if each else 2**64 + MISSING for each in WIDE]
    assert samples.ids[0].tolist() == [each - 2**64 if each >= 2**63 else each for each in bits]
    written(["1", "FFFFFFFFFFFFFFFF"])
    with pytest.raises(SamplesError, match=r"C1.* is .*, not a hexadecimal number of up to 16 digits, not all f"):
        read_all(SampleFiles([path]))


def test_progress_is_that_of_the_files_on_disk(written):
    folder, _ = written
    files = find_files([folder / "day_*"])
    source = SampleFiles(files)
    source.read(200)
    sizes = [path.stat().st_size for path in files]
    assert sizes[0] < source.done <= sizes[0] + sizes[1] < source.total


@pytest.mark.parametrize("before", [0, 1, 130, 131, 299, 300, 500])
def test_reading_goes_on_from_any_position(written, before):
    folder, lines = written
    files = find_files([folder / "day_*"])
    first = SampleFiles(files)
    first.read(before)
    again = SampleFiles(files)
    again.seek(SamplePosition(*first.position))
    assert as_lists(read_all(again, 77)) == by_python(lines[before:])


def test_a_position_in_other_samples_is_refused(written):
    folder, lines = written
    files = find_files([folder / "day_*"])
    source = SampleFiles(files)
    source.read(200)
    position = source.position
    (folder / "day_10.txt").write_text(lines[0])  # not yet read: it may change
    SampleFiles(files).seek(position)
    second = (folder / "day_9.gz").read_bytes()
    (folder / "day_9.gz").write_bytes(gzip.compress("\n".join(reversed(lines[130:300])).encode()))
    for found in (files, files[:1], [files[0], files[2]]):
        with pytest.raises(CheckpointError, match="not those of the checkpoint, which had read 70 of file 2: give the"):
            SampleFiles(found).seek(position)
    (folder / "day_9.gz").write_bytes(second)
    SampleFiles(files).seek(position)
    (folder / "day_2.txt").write_text("\n".join(lines[:129]))
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        SampleFiles(files).seek(position)


def test_the_end_of_other_samples_is_refused(written):
    """None of their lines is read again: file sizes distinguish them."""
    folder, lines = written
    source = SampleFiles([folder / "day_2.txt"])
    read_all(source)
    (folder / "other").write_text("\n".join(lines[:50]))
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        SampleFiles([folder / "other"]).seek(source.position)
    SampleFiles([folder / "day_2.txt"]).seek(source.position)


def test_rows_without_labels_are_told_by_the_first(tmp_path):
    lines = list(lines_of(20, labelled=False))
    (tmp_path / "rows").write_text("\n".join(lines))
    (part,) = read_all(SampleFiles([tmp_path / "rows"], labelled=None))
    assert part.labels.shape == (0,)
    assert as_lists([part]) == by_python(lines)
    (tmp_path / "rows").write_text("\n".join(lines_of(20)))
    assert SampleFiles([tmp_path / "rows"], labelled=None).read(9).labels.shape == (9,)


@pytest.mark.parametrize("labelled", [True, False])
def test_an_empty_file_does_not_tell_whether_rows_have_labels(labelled, tmp_path):
    (tmp_path / "empty").write_text("\n")
    lines = list(lines_of(20, labelled=labelled))
    (tmp_path / "rows").write_text("\n".join(lines))
    source = SampleFiles([tmp_path / "empty", tmp_path / "rows", tmp_path / "empty"], labelled=None)
    assert as_lists(read_all(source)) == by_python(lines)
    assert SampleFiles([tmp_path / "empty"], labelled=None).read(9).size == 0


WRONG = {
    "short": ("0\t1\t2", "has 3 columns: give 40, divided by tabs: a label, 13 integers and 26 categories, empty"),
    "27 categories": ("\t".join(["0"] * 41), "has 41 columns: give 40"),
    "no label": ("\t".join(["0"] * 39), "has 39 columns: give 40"),
    "commas": (",".join(["0"] * 40), "has 1 columns: give 40"),
    "empty label": ("\t".join([""] * 40), r"column 1 \(label\) is '', neither 0 nor 1: correct it"),
    "label 2": ("\t".join(["2"] * 40), r"column 1 \(label\) is '2', neither"),
    "NaN": ("\t".join(["0", "1", "nan"] + ["1"] * 37), r"column 3 \(I2\) is 'nan', not a whole number of up to 18"),
    "fraction": ("\t".join(["0"] * 13 + ["1.5"] + ["1"] * 26), r"column 14 \(I13\) is '1.5', not a whole number"),
    "too large": ("\t".join(["0", "9" * 99] + ["1"] * 38), r"column 2 \(I1\) is '9999"),
    "not hexadecimal": ("\t".join(["0"] * 39 + ["xyz"]), r"column 40 \(C26\) is 'xyz', not a hexadecimal number of"),
    "two carriage returns": ("\t".join(["0"] * 40) + "\r\r", r"column 40 \(C26\) is '0\\r', not a hexadecimal"),
    "NUL": ("\t".join(["0"] * 14 + ["\0"] + ["1"] * 25), r"column 15 \(C1\) is '\\x00', not a hexadecimal"),
    "not text": ("\t".join(["0"] * 14 + ["é"] + ["1"] * 25), r"column 15 \(C1\) is 'é', not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_line_is_named_with_its_column_and_remedy(name, tmp_path):
    """The lines before it can be read, and blank lines count."""
    line, message = WRONG[name]
    good = list(lines_of(30))
    path = tmp_path / "some.txt"
    path.write_bytes("\n".join([*good[:20], "", line, *good[20:]]).encode())
    source = SampleFiles([path])
    assert source.read(20).size == 20
    with pytest.raises(SamplesError, match=f"samples {path}, line 22,? {message}"):
        source.read(20)


def test_files_that_cannot_be_read(tmp_path):
    packed = gzip.compress("\n".join(lines_of(300)).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "endless").write_bytes(b"\0" * (1 << 23))
    for given, message in (
        (["missing.txt"], "samples missing.txt cannot be read: No such file"),
        (["a" * 5000], "samples aaaa.* cannot be read: File name too long"),
        (["a\0b"], "cannot be read: .*null"),
        ([""], "samples has an empty name: give files"),
        ([tmp_path], f"samples {tmp_path} is a directory: give its files, as in '{tmp_path}/\\*'"),
        ([tmp_path / "*.csv"], r"\*.csv matches no file: give files, or patterns such as 'day_\*.gz'"),
        ([tmp_path / "cut.gz"], "is not a whole gzip file"),
        ([tmp_path / "endless"], "line 1 has no end: is it text"),
    ):
        with pytest.raises(SamplesError, match=message):
            read_all(SampleFiles(find_files(given)))


def test_real_lines_are_read_as_python_reads_them(shared_data):
    path = shared_data / "criteo-sample.txt"
    (part,) = read_all(SampleFiles([path]), 1000)
    assert part.size == 200
    assert as_lists([part]) == by_python(path.read_text().splitlines())
    assert (part.integers < 0).any()


# ---- Parquet --------------------------------------------------------------------------------------------------------


def parquet_of(lines, path, *, change=None, **more):
    """Write lines as Parquet: integers as numbers, categories as text, null where empty."""
    pa = pytest.importorskip("pyarrow")
    columns = {}
    for name, texts in zip(NAMES, zip(*(line.split("\t") for line in lines), strict=True), strict=True):
        values = [text or None for text in texts]
        columns[name] = values if name.startswith("C") else [int(text) if text else None for text in values]
    table = pa.table((change or dict)(columns))
    pytest.importorskip("pyarrow.parquet").write_table(table, path, **more)


def floats(columns):
    return {name: [None if v is None else float(v) for v in values] for name, values in columns.items() if "I" in name}


def viewed(columns):
    pa = pytest.importorskip("pyarrow")
    return {name: pa.array(columns[name], pa.string_view()) for name in ("C1", "C26")}


@pytest.mark.parametrize(
    "change",
    [
        dict,
        lambda columns: columns | floats(columns) | viewed(columns),
        lambda columns: {"day": [1] * 300} | dict(reversed(columns.items())),
    ],
    ids=["as it is", "fractions and views", "other columns, another order"],
)
def test_parquet_has_the_same_samples_as_text(tmp_path, change, monkeypatch):
    lines = list(lines_of(300))
    parquet_of(lines, tmp_path / "some", change=change, row_group_size=70)
    monkeypatch.setattr("speedswap.apps.dlrm.criteo.ROWS_AT_ONCE", 50)
    first = SampleFiles([tmp_path / "some"])
    assert as_lists([first.read(120)]) == by_python(lines[:120])
    assert 0 < first.done < first.total
    again = SampleFiles([tmp_path / "some"])
    again.seek(first.position)
    assert as_lists(read_all(again)) == by_python(lines[120:])


def test_parquet_categories_may_be_whole_numbers(tmp_path):
    lines = list(lines_of(50))
    expected = by_python(lines)

    def numbered(columns):
        return {
            name: [None if v is None else int(v, 16) for v in values] if name.startswith("C") else values
            for name, values in columns.items()
        }

    parquet_of(lines, tmp_path / "some", change=numbered)
    assert as_lists(read_all(SampleFiles([tmp_path / "some"]))) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda columns: columns | {"I2": [float("nan")] + [1.0] * 29}, "row 1, column I2 is nan, not a whole number"),
        (lambda columns: columns | {"I2": [1.0] * 20 + [0.5] * 10}, "row 21, column I2 is 0.5, not a whole number"),
        (lambda columns: columns | {"C3": ["xyz"] * 30}, "row 1, column C3 is 'xyz', not a hexadecimal"),
        (lambda columns: columns | {"C3": ["a\tb"] * 30}, r"row 1, column C3 is 'a\\tb', not a hexadecimal"),
        (lambda columns: columns | {"label": [2] * 30}, "row 1, column label is 2, neither"),
        (lambda columns: columns | {"I2": [[1]] * 30}, "column I2 has list<.*>: give whole numbers or text"),
        (lambda columns: dict(list(columns.items())[:30]), "has 30 columns and no 'C17': give label, I1, … and C26"),
    ],
)
def test_parquet_with_mistakes_is_refused(tmp_path, change, message):
    parquet_of(list(lines_of(30)), tmp_path / "some", change=change)
    with pytest.raises(SamplesError, match=message):
        read_all(SampleFiles([tmp_path / "some"]))


def test_parquet_with_two_columns_of_a_name_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet_of(list(lines_of(30)), tmp_path / "some")
    table = parquet.read_table(tmp_path / "some")
    parquet.write_table(table.append_column("C3", table["C4"]), tmp_path / "some")
    with pytest.raises(SamplesError, match="has 2 columns 'C3': give each its own name"):
        SampleFiles([tmp_path / "some"]).read(1)


def test_parquet_without_its_end_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "some").write_bytes(b"PAR1" + b"\0" * 100)
    with pytest.raises(SamplesError, match="is not a whole Parquet file"):
        SampleFiles([tmp_path / "some"]).read(1)


def test_parquet_without_pyarrow_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "some").write_bytes(b"PAR1")
    with pytest.raises(SamplesError, match=r"is Parquet: .*pip install .*pyarrow"):
        SampleFiles([tmp_path / "some"]).read(1)


def test_samples_move_and_are_taken_together():
    samples = module.Samples(torch.ones(3), torch.arange(39).view(13, 3), torch.arange(78).view(26, 3))
    some = samples.to(torch.device("cpu")).take(torch.tensor([2, 0]))
    assert some.size == 2
    assert some.ids[0].tolist() == [2, 0]
    assert samples._replace(labels=torch.zeros(0)).take(torch.tensor([1])).labels.shape == (0,)
