"""Several tables in one store: the initial values of each range, and some rows as a separate table."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import speedswap
from speedswap import Column, Table, init
from speedswap.errors import IdError, TableClosedError
from speedswap.tables.init import InRanges, Range
from speedswap.tables.store import PartStore

DIM = 3
XAVIER = init.from_torch(torch.nn.init.xavier_uniform_)
# The second begins, and the third begins and ends, in the midst of the chunks in which a table is filled.
RANGES = (
    Range(5, init.normal(), 1, 2),
    Range(70_000, XAVIER, 2, 69_999),
    Range(66_000, init.uniform(-1, 1), 3),
    Range(7, init.zeros(), 4),
    Range(70_000, XAVIER, 5, 0),
)


def alone(each: Range, **arguments: Any) -> Table:
    return Table.create(each.num_rows, DIM, init=each.init, seed=each.seed, zero_row=each.zero_row, **arguments)


def together(ranges: tuple[Range, ...], **arguments: Any) -> Table:
    return Table.create(sum(each.num_rows for each in ranges), DIM, init=InRanges(ranges), **arguments)


def parts(table: Table, ranges: tuple[Range, ...]) -> list[Table]:
    firsts = [sum(each.num_rows for each in ranges[:i]) for i in range(len(ranges))]
    return [
        Table(PartStore(table.store, first, each.num_rows, f"part-{first}"))
        for first, each in zip(firsts, ranges, strict=True)
    ]


FORMS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"stored_dtype": torch.bfloat16},
    {"stored_dtype": torch.int8},
]


@pytest.mark.parametrize("arguments", FORMS, ids=str)
def test_each_range_starts_as_a_table_of_its_own(arguments: dict[str, Any]) -> None:
    table = together(RANGES, **arguments)
    for part, each in zip(parts(table, RANGES), RANGES, strict=True):
        expected = alone(each, **arguments)
        assert torch.equal(part.read(), expected.read())
        assert part.columns == expected.columns
        assert part.seed == each.seed


def test_a_file_knows_its_ranges(tmp_path: Path) -> None:
    """The rows, and what they start with, survive the file; columns are added next to an unwritten one."""
    ranges = (Range(4, init.normal(), 1, 3), Range(6, init.constant(0.5), 2**64 - 1))
    together(ranges, path=tmp_path / "t").close()
    with Table.open(tmp_path / "t") as table:
        assert table.columns["weight"].init == InRanges(ranges)
        table.add_columns([Column("exp_avg", (DIM,), torch.float32, init.zeros())])
        for part, each in zip(parts(table, ranges), ranges, strict=True):
            assert torch.equal(part.read(), alone(each).read())


@pytest.mark.parametrize(
    "damage",
    [
        {"ranges": {}},
        {"ranges": []},
        {"ranges": [3]},
        {"num_rows": 0},
        {"num_rows": 11},
        {"num_rows": True},
        {"seed": -1},
        {"zero_row": 10},
        {"init": {"kind": "ranges", "ranges": [{"num_rows": 10, "seed": 0, "zero_row": None, "init": {}}]}},
        {"init": 7},
    ],
    ids=str,
)
def test_damaged_ranges_are_not_believed(damage: dict[str, Any], tmp_path: Path) -> None:
    together((Range(10, init.normal(), 1),), path=tmp_path / "t").close()
    path = tmp_path / "t" / "MANIFEST"
    data = json.loads(path.read_bytes().partition(b"\n")[2])
    initial = data["columns"][0]["init"]
    if "ranges" in damage:
        initial.update(damage)
    else:
        initial["ranges"][0].update(damage)
    body = json.dumps(data).encode()
    path.write_bytes(b"%08x\n" % __import__("zlib").crc32(body) + body)
    with pytest.raises(speedswap.errors.TableFormatError):
        Table.open(tmp_path / "t")


def test_values_that_cannot_be_computed_again_count_as_written(tmp_path: Path) -> None:
    ranges = (Range(4, XAVIER, 1), Range(6, init.normal(), 2))
    with together(ranges, path=tmp_path / "t") as table:
        expected = table.read()
    with Table.open(tmp_path / "t") as table:
        table.add_columns([Column("sum", (DIM,), torch.float32, init.zeros())])
        assert torch.equal(table.read(), expected)


def three(**arguments: Any) -> tuple[Table, Table]:
    """Return a table of three ranges, and the part in the middle: rows 4 to 8."""
    ranges = (Range(4, init.normal(), 1), Range(5, init.normal(), 2, 1), Range(3, init.normal(), 3))
    table = together(ranges, name="all", **arguments)
    return table, parts(table, ranges)[1]


def test_a_part_reads_and_writes_the_rows_of_the_whole(device: str) -> None:
    table, part = three()
    before = table.read()
    assert (len(part), part.embedding_dim, part.nbytes) == (5, DIM, 5 * DIM * 4)
    assert torch.equal(part.read(1, 3), before[5:7])
    rows = torch.tensor([4, 0], device=device)
    block = part.gather(rows)
    assert torch.equal(block.rows, rows)
    assert torch.equal(block.weight.cpu(), before[[8, 4]])
    part.scatter(rows, block.weight * 2)
    part.write(2, torch.ones(1, DIM))
    part.view()[3] = 5.0
    expected = before.clone()
    expected[[8, 4]] *= 2
    expected[6], expected[7] = 1.0, 5.0
    assert torch.equal(table.read(), expected)
    with part.rows_between(1, 4, torch.device(device)) as weights:
        assert torch.equal(weights.cpu(), expected[5:8])
    part.reset_columns([part.columns["weight"]])
    assert torch.equal(part.read(), before[4:9])
    assert torch.equal(table.read(), torch.cat([expected[:4], before[4:9], expected[9:]]))


def test_rows_of_a_neighbour_are_out_of_range() -> None:
    table, part = three()
    before = table.read()
    for ids in ([5], [-1]):
        with pytest.raises(IdError, match="'part-4' has rows 0 to 4"):
            part.scatter(torch.tensor(ids), torch.zeros(1, DIM))
    with pytest.raises(IdError):
        part.write(3, torch.zeros(3, DIM))
    assert torch.equal(table.read(), before)


def test_parts_have_the_lock_and_the_version_of_the_whole() -> None:
    table, part = three()
    assert part.lock is table.lock
    for writer in (part, table):
        before = table.version
        assert part.version == before
        writer.write(0, torch.zeros(1, DIM))
        assert part.version == table.version > before
    seen = threading.Event()
    reader = threading.Thread(target=lambda: (part.read(), seen.set()))
    with table.lock:
        reader.start()
        assert not seen.wait(0.05)
    reader.join()
    assert seen.is_set()


def test_rows_that_are_held_notice_a_write_through_a_part() -> None:
    """A step whose rows were gathered before the write gathers them again."""
    table, part = three()
    items = speedswap.Embedding(12, DIM, table=table)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    items(torch.tensor([4])).sum().backward()
    part.write(0, torch.full((1, DIM), 9.0))
    optimizer.step()
    assert part.read(0, 1).tolist() == [[8.0] * DIM]


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_a_copy_is_a_table_of_the_part_alone(in_files: bool, tmp_path: Path) -> None:
    table, part = three(**({"path": tmp_path / "all"} if in_files else {}))
    items = speedswap.Embedding(12, DIM, table=table)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        items(torch.tensor([3, 4, 6])).sum().backward()
        optimizer.step()
    part.save(tmp_path / "saved")
    saved, copied = Table.open(tmp_path / "saved"), copy.deepcopy(part)
    for other in (saved, copied):
        assert (other.num_embeddings, other.name, other.seed) == (5, "part-4", 2)
        for name in table.columns:
            assert torch.equal(other.read(column=name), table.read(4, 9, column=name))
        assert other.attributes["optimizer"]["scalars"] == {"step": 3}
        assert other.columns["weight"].zero_row == 1
    # An optimizer goes on with the rows as with those of the whole.
    resumed = speedswap.Embedding(5, DIM, table=saved)
    its = torch.optim.Adam(resumed.parameters(), lr=0.1)
    for module, each, ids in ((items, optimizer, [4, 6]), (resumed, its, [0, 2])):
        each.zero_grad()
        module(torch.tensor(ids)).sum().backward()
        each.step()
    for name in table.columns:
        assert torch.equal(saved.read(column=name), part.read(column=name))
        assert not torch.equal(copied.read(column=name), part.read(column=name))


def test_a_part_has_no_life_of_its_own(tmp_path: Path) -> None:
    table, part = three(path=tmp_path / "t")
    with pytest.raises(TypeError, match="cannot have additional columns"):
        part.add_columns([Column("sum", (DIM,), torch.float32, init.zeros())])
    with pytest.raises(FileExistsError, match="already is"):
        part.save(tmp_path / "t")
    part.write(0, torch.zeros(1, DIM))
    part.close()
    with pytest.raises(TableClosedError):
        part.read()
    assert not table.closed
    table.close()
    with Table.open(tmp_path / "t") as again:
        assert again.read(4, 5).tolist() == [[0.0] * DIM]
    table, part = three()
    table.close()
    assert part.closed
