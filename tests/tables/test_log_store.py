"""Tables in a log on disk train, read and reopen with the bits of a table in memory."""

from __future__ import annotations

import dataclasses
import errno
import gc
import math
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import exit_status, peak_of_memory
from torch import Tensor
from torch.optim import Optimizer

import speedswap
from speedswap.errors import TableBusyError, TableClosedError, TableFormatError
from speedswap.tables import Column
from speedswap.tables import init as initializers
from speedswap.tables.disk.cache import LogCache
from speedswap.tables.storage import copy_rows

ROWS = 60
SMALL = 1  # bytes of cache: the minimum, less than a batch

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rowwise": lambda p: speedswap.optim.RowwiseAdagrad(p, lr=0.1),
}


def ids_of(step: int, size: int = 40) -> Tensor:
    """Return ids of which some occur again and again, and some hardly ever."""
    generator = torch.Generator().manual_seed(step)
    return (ROWS ** torch.rand(size, generator=generator)).long() - 1


def train(items: Any, optimizer: Optimizer, *, depth: int = 0, steps: range = range(6), device: str = "cpu") -> None:
    batches = [ids_of(step).to(device) for step in steps]
    for ids in speedswap.lookahead(batches, {items: lambda batch: batch}, depth=depth):
        items(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def columns(table: speedswap.Table) -> dict[str, Tensor]:
    return {name: table.read(column=name) for name in table.columns}


def assert_same(ours: speedswap.Table, other: speedswap.Table | dict[str, Tensor]) -> None:
    found, wanted = columns(ours), other if isinstance(other, dict) else columns(other)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., speedswap.Table]]:
    """Return a function that makes a table on disk."""
    made: list[speedswap.Table] = []

    def make(rows: int = ROWS, dim: int = 5, **settings: Any) -> speedswap.Table:
        settings = {"init": speedswap.init.normal(), "seed": 3, "cache_bytes": SMALL, **settings}
        of_disk = {name: settings.pop(name) for name in [*settings] if hasattr(speedswap.Disk, name)}
        place = speedswap.Disk(tmp_path / f"table-{len(made)}", **of_disk)
        made.append(speedswap.Table.create(rows, dim, storage=place, **settings))
        return made[-1]

    yield make
    for table in made:
        table.close()


def in_memory(rows: int = ROWS, dim: int = 5, **settings: Any) -> speedswap.Table:
    settings = {"init": speedswap.init.normal(), "seed": 3, **settings}
    return speedswap.Table.create(rows, dim, storage="pageable", **settings)


def of_torch(weight: Tensor) -> None:
    torch.nn.init.normal_(weight)


# ---- initial values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 5, 70])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init": None},
        {"init": speedswap.init.uniform(-1, 1), "dtype": torch.float64, "zero_row": 7},
        {"init": of_torch},
        {"stored_dtype": torch.bfloat16, "zero_row": 7},
        {"stored_dtype": torch.int8, "zero_row": 7},
        {"init": initializers.constant(2.5), "dtype": torch.int32},
    ],
    ids=["normal", "zeros", "uniform", "torch", "bfloat16", "int8", "integers"],
)
def test_untouched_rows_have_the_bits_of_a_table_in_memory(
    make: Callable[..., speedswap.Table], dim: int, settings: dict[str, Any]
) -> None:
    """Also in narrow rows, which are stored in groups, of which the last is not full."""
    ours, other = make(ROWS + 3, dim, **settings), in_memory(ROWS + 3, dim, **settings)
    rows = torch.tensor([62, 0, 7, 0, 31])
    assert torch.equal(ours.gather(rows).weight, other.gather(rows).weight)
    assert_same(ours, other)


def test_a_batch_of_untouched_rows_leaves_no_garbage(make: Callable[..., speedswap.Table]) -> None:
    """Its values are released with it, not when Python next collects garbage."""
    table = make()
    table.add_columns([Column("state", (5,), torch.float32, initializers.copy_of("weight"))])
    table.gather(torch.arange(10))
    gc.collect()
    gc.disable()
    try:
        table.gather(torch.arange(10, 20))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_table_of_10_9_rows_takes_neither_time_nor_room(tmp_path: Path) -> None:
    """With Adam's state, in rows of 1,536 bytes: its index of 4 GB is mapped, and only what is used becomes memory."""
    before, began = peak_of_memory(anew=True), time.process_time()
    items = speedswap.Embedding(10**9, 128, storage=speedswap.Disk(tmp_path / "table", cache_bytes=2**24), seed=1)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    ids = torch.tensor([0, 999_999_999, 123_456_789])
    first = items(ids)
    first.sum().backward()
    optimizer.step()
    items.table.flush()
    assert time.process_time() - began < 1.0
    assert peak_of_memory() - before < 64 << 20
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "table").iterdir()) < 64 * 2**20
    assert torch.allclose(items.read(ids), first.detach() - 0.1, atol=1e-4)  # Adam's first step is lr
    items.table.close()


def test_rows_that_were_given_are_written_at_once(tmp_path: Path) -> None:
    rows = torch.randn(ROWS, 5)
    items = speedswap.Embedding.from_pretrained(
        rows, storage=speedswap.Disk(tmp_path / "table", cache_bytes=SMALL), padding_idx=3
    )
    items.table.close()
    with speedswap.Table.open(tmp_path / "table", mode="r") as table:
        assert torch.equal(table.read(), rows)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dim", "depth", "cache_bytes"),
    [
        *((kind, 5, 1, SMALL) for kind in OPTIMIZERS),
        *(("adam", 70, depth, cache_bytes) for depth in (0, 1, 3) for cache_bytes in (SMALL, None)),
        ("adam", 5, 3, None),
        ("sgd", 70, 0, SMALL),
    ],
)
def test_training_has_the_bits_of_a_table_in_memory(
    tmp_path: Path, device: str, kind: str, dim: int, depth: int, cache_bytes: int | None
) -> None:
    """At any depth of lookahead, with caches smaller than a batch, in groups and alone, and reopened in between."""
    plain = speedswap.Embedding(ROWS, dim, storage="pageable", seed=3, padding_idx=4).to(device)
    optimizer = OPTIMIZERS[kind](plain.parameters())
    train(plain, optimizer, depth=depth, device=device)
    path = tmp_path / "table"
    items = speedswap.Embedding(
        ROWS, dim, storage=speedswap.Disk(path, cache_bytes=cache_bytes, commit_every=2), seed=3, padding_idx=4
    ).to(device)
    train(items, OPTIMIZERS[kind](items.parameters()), depth=depth, steps=range(4), device=device)
    items.table.close()
    table = speedswap.Table.open(speedswap.Disk(path, cache_bytes=cache_bytes))
    items = speedswap.Embedding(ROWS, dim, 4, table=table).to(device)
    train(items, OPTIMIZERS[kind](items.parameters()), depth=depth, steps=range(4, 6), device=device)
    assert_same(table, plain.table)
    assert table.writes == plain.table.writes
    table.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_bags_and_collections_train_with_the_bits_of_memory(tmp_path: Path, depth: int) -> None:
    def trained(**settings: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        configs = [
            speedswap.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=6, seed=seed)
            for seed, name in enumerate(("user", "page", "item"))
        ]
        tables = speedswap.EmbeddingBagCollection(configs, **settings)
        optimizer = torch.optim.Adam(tables.parameters(), lr=0.01)
        batches = [{c.name: ids_of(3 * step + i).view(10, 4) for i, c in enumerate(configs)} for step in range(4)]
        for batch in speedswap.lookahead(batches, {tables: lambda batch: batch}, depth=depth):
            tables(batch).values().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (group,) = tables.groups
        found = columns(group.table)
        if settings["storage"] != "pageable":
            tables.save(tmp_path / "saved")
            group.table.close()
            for path in (settings["storage"].path, tmp_path / "saved"):
                again = speedswap.EmbeddingBagCollection.open(configs, speedswap.Disk(path, cache_bytes=SMALL))
                assert_same(again.groups[0].table, found)
                assert torch.equal(again.embedding_bags["page"].read(torch.arange(ROWS)), found["weight"][60:120])
                again.groups[0].table.close()
        return found

    ours = trained(storage=speedswap.Disk(tmp_path / "tables", cache_bytes=SMALL))
    for name, values in trained(storage="pageable").items():
        assert torch.equal(ours[name], values), name


@pytest.mark.parametrize("depth", [0, 2])
def test_stochastic_rounding_draws_by_row_not_by_place(tmp_path: Path, device: str, depth: int) -> None:
    """It draws what a table in memory does, though a row's place in the cache is another every time."""

    def trained(**settings: Any) -> speedswap.Table:
        items = speedswap.Embedding(
            ROWS, 5, seed=3, stored_dtype=torch.bfloat16, state_dtype=torch.bfloat16, **settings
        ).to(device)
        train(items, torch.optim.Adam(items.parameters(), lr=0.01), depth=depth, device=device)
        return items.table

    ours = trained(storage=speedswap.Disk(tmp_path / "table", cache_bytes=SMALL))
    assert ours.columns["exp_avg"].rounding == "stochastic"
    assert_same(ours, trained(storage="pageable"))
    ours.close()


def test_an_id_map_is_committed_with_the_rows(tmp_path: Path) -> None:
    """Keys, rows and step count are those of one commit, also when a later step was never committed."""
    path = tmp_path / "table"

    def lookups(items: Any, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            items(ids_of(step) * 1000 + step // 4).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(**settings: Any) -> Any:
        id_map = speedswap.IdMap(50, evict="lru")
        return speedswap.Embedding(id_map.num_rows, 5, id_map=id_map, seed=3, **settings)

    plain, items = made(storage="pageable"), made(storage=speedswap.Disk(path, cache_bytes=SMALL))
    optimizer = torch.optim.Adam(items.parameters(), lr=0.01)
    lookups(plain, torch.optim.Adam(plain.parameters(), lr=0.01), range(6))
    lookups(items, optimizer, range(6))
    items.table.flush()
    keys = ids_of(5) * 1000 + 1
    wanted, rows = columns(items.table), items.id_map.lookup(keys)
    lookups(items, optimizer, range(6, 12))
    with speedswap.Table.open(path, mode="r") as table:
        assert_same(table, wanted)
        assert_same(table, plain.table)
        assert table.id_map is not None
        assert torch.equal(table.id_map.lookup(keys), rows)
        assert table.attributes["optimizer"]["scalars"]["step"] == 6
    items.table.close()


# ---- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [5, 70])
@pytest.mark.parametrize("kind", ["open", "reopened", "scratch"])
def test_columns_that_are_added_or_reset_keep_every_row(
    make: Callable[..., speedswap.Table], dim: int, kind: str
) -> None:
    """Rows written before have them at their initial values; those written after as written; copies as copied."""
    ours, other = make(dim=dim, scratch=kind == "scratch"), in_memory(dim=dim)

    def both(change: Callable[[speedswap.Table], object]) -> None:
        nonlocal ours
        for table in (ours, other):
            change(table)
        if kind == "reopened":
            path = ours.path
            ours.close()
            ours = speedswap.Table.open(speedswap.Disk(path, cache_bytes=SMALL))
        assert_same(ours, other)

    def write(step: int, names: list[str]) -> Callable[[speedswap.Table], object]:
        rows = torch.unique(ids_of(step))
        values = {name: torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(step)) for name in names}
        return lambda table: table.scatter(rows, values)

    wide, copied = Column("wide", (dim,), torch.float32, initializers.constant(0.5)), initializers.copy_of("weight")
    both(write(0, ["weight"]))
    both(lambda table: table.add_columns([wide, Column("copy", (dim,), torch.float32, copied)]))
    both(write(1, ["weight", "wide"]))
    both(write(2, ["copy"]))
    both(lambda table: table.reset_columns([Column("weight", (dim,), torch.float32, initializers.uniform())]))
    both(write(3, ["weight"]))
    both(lambda table: table.add_columns([Column("row", (), torch.float64, of_torch_init())]))
    both(lambda table: table.reset_columns([wide]))
    both(lambda table: table.write(3, torch.ones(20, dim), column="wide"))
    ours.close()


def test_a_zero_row_that_is_no_row_is_refused_before_it_is_written_down(make: Callable[..., speedswap.Table]) -> None:
    """The manifest would be refused when the table is opened the next time."""
    table = make()
    wrong = Column("late", (2,), torch.float32, initializers.zeros(), zero_row=ROWS)
    for change in (table.add_columns, table.reset_columns):
        with pytest.raises(ValueError, match=f"zero_row is {ROWS}; give one of the table's rows, 0 to {ROWS - 1}"):
            change([replace(wrong, name="weight") if change == table.reset_columns else wrong])
    table.close()
    with speedswap.Table.open(table.path) as opened:
        assert list(opened.columns) == ["weight"]


def test_rows_of_a_table_whose_weight_began_anew_come_along(make: Callable[..., speedswap.Table]) -> None:
    """Untouched rows have other initial values than those that the table was made with."""
    source, target = make(), make()
    source.scatter(torch.tensor([3]), torch.ones(1, 5))
    source.reset_columns([replace(source.columns["weight"], init=initializers.uniform())])
    source.scatter(torch.tensor([7]), torch.ones(1, 5))
    target.store.take_rows(source.store, ["weight"])
    assert_same(target, source)


@pytest.mark.parametrize("taken", ["rows", "block.rows"])
def test_ids_that_change_between_gather_and_scatter_are_taken_as_they_are_then(tmp_path: Path, taken: str) -> None:
    """A gather holds its rows in the cache for the scatter of the same rows, which a step does not change."""
    with speedswap.Table.create(1000, 64, path=tmp_path / "t") as table:
        rows = torch.arange(5)
        block = table.gather(rows)
        rows += 50
        table.scatter(rows if taken == "rows" else block.rows, block.weight + 1)
        assert table.read()[:, 0].nonzero().flatten().tolist() == [50, 51, 52, 53, 54]


def test_the_rows_of_a_lease_are_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with speedswap.Table.create(1000, 64, path=tmp_path / "t") as table:
        block = table.lease(torch.arange(5))
        with monkeypatch.context() as refused:
            refused.delattr(LogCache, "scatter")
            table.give_back(block, {"weight": block.weight + 1})
        assert table.read()[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def of_torch_init() -> Any:
    return initializers.from_torch(torch.nn.init.uniform_)


def test_rows_start_anew_with_their_first_bits(make: Callable[..., speedswap.Table]) -> None:
    ours, other, rows = make(), in_memory(), torch.tensor([3, 59, 0])
    for table in (ours, other):
        table.scatter(torch.arange(ROWS), torch.ones(ROWS, 5))
        table.reset_rows(rows)
    assert_same(ours, other)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [5, 70])
def test_copies_between_storages_have_every_row_and_attribute(
    make: Callable[..., speedswap.Table], tmp_path: Path, dim: int
) -> None:
    """From disk to disk, from disk to memory and back."""
    ours = make(dim=dim, stored_dtype=torch.bfloat16, rounding="stochastic")
    ours.scatter(torch.unique(ids_of(0)), torch.randn(len(torch.unique(ids_of(0))), dim))
    ours.add_columns([Column("state", (dim,), torch.float32, initializers.constant(1.0))])
    ours.attributes["epoch"] = 4
    ours.save(tmp_path / "saved")
    with speedswap.Table.load(tmp_path / "saved", storage="pageable") as loaded:
        assert_same(loaded, ours)
        assert (loaded.attributes, loaded.writes, loaded.seed) == ({"epoch": 4}, 1, 3)
        loaded.scatter(torch.tensor([1]), torch.ones(1, dim))
        loaded.save(tmp_path / "saved", overwrite=True)
        with speedswap.Table.open(speedswap.Disk(tmp_path / "saved", cache_bytes=SMALL)) as again:
            assert_same(again, loaded)
            assert (again.attributes, again.writes) == ({"epoch": 4}, 2)


def test_an_uncommitted_step_is_gone_and_the_commit_is_there(make: Callable[..., speedswap.Table]) -> None:
    """Rows, attributes and the number of writes return to the commit together."""
    table = make(cache_bytes=SMALL)
    table.attributes["step"] = 1
    table.scatter(torch.arange(ROWS), torch.ones(ROWS, 5))
    table.flush()
    table.attributes["step"] = 2
    table.scatter(torch.arange(ROWS), torch.zeros(ROWS, 5))
    with speedswap.Table.open(table.path, mode="r") as reader:
        assert torch.equal(reader.read(), torch.ones(ROWS, 5))
        assert (reader.attributes, reader.writes) == ({"step": 1}, 1)


@pytest.mark.parametrize("settings", [{"commit_every": 3, "commit_seconds": None}, {"commit_seconds": 0.2}])
def test_steps_commit_by_number_or_time(make: Callable[..., speedswap.Table], settings: dict[str, Any]) -> None:
    table = make(cache_bytes=None, **settings)
    for step in range(1, 4):
        if step == 3 and "commit_every" not in settings:
            time.sleep(0.3)
        while table.store.log.appending:  # type: ignore[attr-defined]  # a commit that is due would be a step late
            time.sleep(0.01)
        table.scatter(torch.tensor([step]), torch.full((1, 5), float(step)))
    deadline = time.monotonic() + 10
    with speedswap.Table.open(table.path, mode="r") as reader:
        while reader.writes < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
            reader.check_open()
        assert reader.writes == 3
        assert reader.read(1, 4)[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_reader_follows_commits_and_columns(make: Callable[..., speedswap.Table]) -> None:
    table = make()
    with speedswap.Table.open(speedswap.Disk(table.path, cache_bytes=SMALL), mode="r") as reader:
        assert_same(reader, table)
        table.scatter(torch.arange(0, ROWS, 2), torch.ones(ROWS // 2, 5))
        assert torch.equal(reader.read(), in_memory().read())  # not committed
        version = reader.version
        table.flush()
        assert_same(reader, table)
        assert reader.version > version
        table.add_columns([Column("state", (5,), torch.float32, initializers.constant(1.0))])
        table.scatter(torch.arange(5), {"state": torch.zeros(5, 5)})
        table.attributes["step"] = 7
        table.flush()
        reader.check_open()
        assert_same(reader, table)
        assert reader.attributes == {"step": 7}
        with pytest.raises(TableClosedError, match="mode='r'"):
            reader.write(0, torch.ones(1, 5))


def test_a_reader_has_the_attributes_of_the_rows_that_it_reads(make: Callable[..., speedswap.Table]) -> None:
    """Also if it was a read that has followed the writer, because a record was written over."""
    table = make()
    table.attributes["step"] = 1
    table.flush()
    with speedswap.Table.open(table.path, "r") as reader:
        table.scatter(torch.tensor([3]), torch.ones(1, 5))
        table.attributes["step"] = 2
        table.flush()
        assert reader.store.log.refresh()  # as a read does
        assert reader.read(3, 4).tolist() == [[1.0] * 5]
        assert reader.attributes["step"] == 2
    table.close()


def test_a_copy_beside_a_writer_is_of_one_commit(
    make: Callable[..., speedswap.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are written over during the walk over the log are read again, with all others; not without end."""
    table = make()
    table.write(0, torch.ones(ROWS, 5))
    table.attributes["step"] = 1
    table.flush()
    with speedswap.Table.open(table.path, "r") as reader:
        scan, scans = type(reader.store.log).scan, []

        def written_over(log: Any, groups_per_piece: int) -> Iterator[Any]:
            pieces = scan(log, groups_per_piece)
            yield next(pieces)
            scans.append(len(scans))
            if len(scans) < enough:
                table.write(0, torch.full((ROWS, 5), float(len(scans) + 1)))
                table.attributes["step"] = len(scans) + 1
                table.flush()
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            yield from pieces

        monkeypatch.setattr(type(reader.store.log), "scan", written_over)
        enough = 3
        copied = speedswap.Table(copy_rows(reader.store, "pageable"))
        assert copied.read().unique().tolist() == [float(copied.attributes["step"])] == [3.0]
        enough = 100
        with pytest.raises(TableBusyError, match="was written over by another process"):
            copy_rows(reader.store, "pageable")
    table.close()


def test_a_commit_that_is_held_can_be_opened_until_it_is_let_go(make: Callable[..., speedswap.Table]) -> None:
    table = make(cache_bytes=SMALL)
    table.scatter(torch.arange(ROWS), torch.ones(ROWS, 5))
    with table.lock:
        held = table.commits.hold()
    for value in range(2, 6):
        table.scatter(torch.arange(ROWS), torch.full((ROWS, 5), float(value)))
        table.flush()
    table.add_columns([Column("state", (5,), torch.float32, initializers.constant(1.0))])
    table.reset_columns([Column("weight", (5,), torch.float32, initializers.zeros())])
    with speedswap.Table.open(table.path, mode="r", commit=held) as reader:
        assert list(reader.columns) == ["weight"]
        assert torch.equal(reader.read(), torch.ones(ROWS, 5))
    table.close()
    with speedswap.Table.open(table.path, commit=held) as back:
        assert torch.equal(back.read(), torch.ones(ROWS, 5))
        back.commits.let_go(held)
        back.scatter(torch.tensor([3]), torch.zeros(1, 5))
        now = back.read()
    with speedswap.Table.open(table.path) as again:
        assert torch.equal(again.read(), now)


def test_a_reader_is_told_that_its_commit_was_released(make: Callable[..., speedswap.Table], tmp_path: Path) -> None:
    """Its rows are written over then: they are not damaged."""
    table = make(rows=2000, dim=64, cache_bytes=1)
    table.scatter(torch.arange(2000), torch.ones(2000, 64))
    with table.lock:
        held = table.commits.hold()
    table.flush()
    reads = {
        "gather": lambda reader: reader.gather(torch.arange(2000)),
        "save": lambda reader: reader.save(tmp_path / "copy"),
    }
    readers = [speedswap.Table.open(speedswap.Disk(table.path, cache_bytes=1), "r", commit=held) for _ in reads]
    with table.lock:
        table.commits.let_go(held)
    for value in range(2, 6):
        table.scatter(torch.arange(2000), torch.full((2000, 64), float(value)))
        table.flush()
    for reader, read in zip(readers, reads.values(), strict=True):
        with reader, pytest.raises(TableClosedError, match=f"commit {held} was released"):
            read(reader)
    with pytest.raises(ValueError, match=f"commit {held} is not in HEAD"):
        speedswap.Table.open(table.path, "r", commit=held)


def test_a_scratch_table_is_gone_with_its_process(tmp_path: Path) -> None:
    items = speedswap.Embedding(
        ROWS, 5, storage=speedswap.Disk(tmp_path / "table", scratch=True, cache_bytes=SMALL), seed=3
    )
    plain = speedswap.Embedding(ROWS, 5, storage="pageable", seed=3)
    for each in (items, plain):
        train(each, torch.optim.Adam(each.parameters(), lr=0.01))
    assert_same(items.table, plain.table)
    items.table.save(tmp_path / "kept")
    with pytest.raises(TableFormatError, match="scratch"):
        speedswap.Table.open(tmp_path / "table", mode="r")
    items.table.close()
    assert not (tmp_path / "table").exists()
    with speedswap.Table.open(tmp_path / "kept") as kept:
        assert_same(kept, plain.table)


@pytest.mark.parametrize("how", ["remove", "close", "remove twice"])
def test_a_scratch_table_ends_once(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often it is closed, and without a warning."""
    with speedswap.Table.create(ROWS, 5, storage=speedswap.Disk(tmp_path / "table", scratch=True)) as table:
        table.close() if how == "close" else table.remove()
        if how == "remove twice":
            table.remove()
    assert list(tmp_path.iterdir()) == []
    assert not caplog.text


def killed_scratch(path: Path) -> None:
    """Leave the files of a scratch table whose process was killed."""

    def work() -> None:
        table = speedswap.Table.create(ROWS, 5, storage=speedswap.Disk(path, scratch=True))
        os._exit(int(not table.path))

    assert exit_status(work) == 0
    assert path.is_dir()


def test_a_scratch_table_of_a_killed_process_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the next table at its path, however that is made."""
    path = tmp_path / "table"
    killed_scratch(path)
    with pytest.raises(TableFormatError, match=r"make a new one with Table\.create, or remove the directory"):
        speedswap.Table.open(path)
    with speedswap.Table.create(9, 3, path=path, init=initializers.constant(5.0)) as table:
        table.flush()
        assert (table.read() == 5.0).all()
    assert f"removed {path}, a scratch table that a killed process has left behind" in caplog.text
    with pytest.raises(FileExistsError, match=r"open it with Table\.open"):
        speedswap.Table.create(9, 3, storage=speedswap.Disk(path, scratch=True))
    assert [each.name for each in tmp_path.iterdir()] == ["table"]

    killed_scratch(tmp_path / "0")
    model = speedswap.convert(
        torch.nn.Sequential(torch.nn.Embedding(9, 3)), min_rows=1, storage=speedswap.Disk(tmp_path, scratch=True)
    )
    assert model[0].table.path == tmp_path / "0"
    killed_scratch(tmp_path / "rows")
    place = speedswap.Disk(tmp_path / "rows", scratch=True)
    switcher = speedswap.ModelFactory(torch.nn.Embedding(2, 3), 9, 3, storage=place)
    switcher.zerosInit()
    assert len(switcher.table) == 9


def test_a_scratch_table_that_is_not_only_a_leftover_stays(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with (
        speedswap.Table.create(
            ROWS, 5, storage=speedswap.Disk(path, scratch=True), init=initializers.constant(5.0)
        ) as table,
        pytest.raises(FileExistsError, match=f"a scratch table that is open in process {os.getpid()}.*another path"),
    ):
        speedswap.Table.create(9, 3, path=path)
    assert table.closed
    killed_scratch(path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"'notes\.txt' is among the table's files"):
        speedswap.Table.create(9, 3, path=path)
    assert (path / "notes.txt").read_text() == "mine"
    (path / "notes.txt").unlink()
    killed_scratch(tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / ".table.speedswap-new")  # as one that was killed while it was made
    speedswap.Table.create(9, 3, path=path).close()
    assert [each.name for each in tmp_path.iterdir()] == ["table"]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        *(
            ({"cache_bytes": value}, "give at least 1, a whole number of bytes, or None")
            for value in ("1G", 1.5, True, 0)
        ),
        *(({"commit_every": value}, "give at least 1 step, a whole number, or None") for value in (2.5, True, "3", 0)),
        *(({"commit_seconds": value}, "give a number, 0 or more, or None") for value in ("x", True, math.nan, -1)),
        ({"scratch": 1}, "give True or False"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    """Right ones may be numbers of any kind, for a table that is made and for one that is opened."""
    ((argument, value),) = settings.items()
    with pytest.raises(ValueError, match=re.escape(f"{argument} is {value!r}; {remedy}")):
        speedswap.Disk(tmp_path / "table", **settings)
    right = {"cache_bytes": np.int64(SMALL), "commit_every": np.int32(2), "commit_seconds": np.float32(9)}
    place = speedswap.Disk(tmp_path / "table", **right)
    speedswap.Table.create(5, 4, storage=place, seed=np.int64(3)).close()
    with speedswap.Table.open(dataclasses.replace(place, commit_seconds=Fraction(1, 2))) as table:
        assert table.seed == 3


# ---- processes and threads -------------------------------------------------------------------------------------------


def _reads(pickled: bytes, answer: Any) -> None:
    with pickle.loads(pickled) as table:
        answer.put((table.read().tolist(), table.attributes))


def test_a_pickled_table_is_read_in_another_process(make: Callable[..., speedswap.Table]) -> None:
    """In its state when pickled, which is committed first."""
    table = make()
    table.scatter(torch.arange(5), torch.ones(5, 5))
    table.attributes["step"] = 1
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_reads, args=(pickle.dumps(table), answer))
    process.start()
    assert answer.get(timeout=60) == (table.read().tolist(), {"step": 1})
    process.join()


def in_child(work: Callable[[], bool]) -> bool:
    """Return what some work returns in a forked child."""

    def with_one_thread() -> bool:
        torch.set_num_threads(1)
        return work()

    return exit_status(with_one_thread) == 0


def test_a_forked_child_reads_what_was_committed(make: Callable[..., speedswap.Table]) -> None:
    """And is told what to do if rows were not; it never writes, and its end leaves the parent's table alone."""
    table = make()
    table.scatter(torch.arange(5), torch.ones(5, 5))

    def is_refused(call: Callable[[], object], message: str) -> bool:
        try:
            call()
        except TableClosedError as error:
            return message in str(error)
        return False

    assert in_child(lambda: is_refused(table.read, "flush()"))
    table.flush()
    wanted = table.read()
    assert in_child(lambda: torch.equal(table.read(), wanted))
    assert in_child(lambda: is_refused(lambda: table.write(0, wanted), "only be read"))

    def reads_then_closes() -> bool:
        same = torch.equal(table.read(), wanted)
        table.close()
        return same

    assert in_child(reads_then_closes)
    table.scatter(torch.arange(5), torch.zeros(5, 5))
    table.close()
    with speedswap.Table.open(table.path, mode="r") as again:
        assert torch.equal(again.read(0, 5), torch.zeros(5, 5))
        assert torch.equal(again.read(5), wanted[5:])


def test_threads_see_all_of_a_scatter_or_nothing(make: Callable[..., speedswap.Table]) -> None:
    table = make(cache_bytes=SMALL)
    table.write(0, torch.zeros(ROWS, 5))
    torn, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            rows = table.gather(torch.arange(ROWS)).weight
            if rows.unique().numel() != 1:
                torn.append(rows)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(50):
        table.scatter(torch.randperm(ROWS), torch.full((ROWS, 5), float(step)))
    done.set()
    for thread in threads:
        thread.join()
    assert not torn


def test_a_cache_of_more_rows_than_can_be_brought_at_once_brings_them_in_pieces(tmp_path: Path) -> None:
    """A quarter of 17 million slots is more than one bringing takes."""
    with speedswap.Table.create(17_500_000, 64, storage=speedswap.Disk(tmp_path / "t", cache_bytes=5 << 30)) as table:
        cache = table.store._cache
        assert cache.log.num_slots == 17_500_000
        first = next(cache.pieces(17_500_000))
        with cache.brought(torch.zeros(first.stop, dtype=torch.int64)) as places:
            assert len(places) == 2**22
        assert cache.bring_ahead(torch.zeros(2**22 + 1, dtype=torch.int64)) is None
