"""Tables over a base: rows that were never written are those of a checkpoint's tensors, in any place."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_script
from tensor_files import write
from torch import Tensor

import speedswap
from speedswap import Column, Disk, Table, init, kernels
from speedswap.errors import CheckpointError, TableClosedError, TableFormatError
from speedswap.tables import TensorFiles
from speedswap.tables.files import tensor_files
from speedswap.tables.init import InRanges, Range

ROWS, DIM, SHARDS = 250, 128, 12  # rows are wide enough to be stored one by one
NAME = "model.ngram.shard_*.weight"


def rows_of(dtype: torch.dtype = torch.bfloat16, seed: int = 1, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(folder: Path, rows: Tensor, *, files: int = 3) -> Path:
    """Write a model of several files and their index: shards of unequal sizes, in an order that is not theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = dict(enumerate(rows.split(-(-len(rows) // SHARDS))))
    weight_map = {}
    for file in range(files):
        held = {f"model.ngram.shard_{i}.weight": shards[i] for i in reversed(shards) if i % files == file}
        held[f"norm_{file}"] = torch.ones(3)
        name = f"model-{file + 1:05}-of-{files:05}.safetensors"
        write(folder / name, held)
        weight_map |= dict.fromkeys(held, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made(tmp_path / "model", rows_of())


PLACES: dict[str, Callable[[Path], Any]] = {
    "device": lambda path: speedswap.Device(),
    "pinned": lambda path: speedswap.Pinned(),
    "pageable": lambda path: speedswap.Pageable(),
    "disk": lambda path: Disk(path / "t"),
}


@pytest.mark.filterwarnings("ignore:SW405")  # without a GPU
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_untouched_rows_are_those_of_the_tensors(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In natural order, from a folder, in the dtype on file and in others; written rows stay, reset ones return."""
    base = init.of_tensors(made(tmp_path / "model", rows_of(dtype)), NAME)
    assert (base.num_embeddings, base.embedding_dim, base.dtype) == (ROWS, DIM, dtype)
    for column, more in ((dtype, {}), (torch.float64, {}), (torch.float32, {"stored_dtype": torch.bfloat16})):
        where = PLACES[place](tmp_path / f"{column}{len(more)}")
        table = Table.create(ROWS, DIM, init=base, dtype=column, storage=where, zero_row=7, **more)
        want = rows_of(dtype).to(column)
        want = want.bfloat16().float() if more else want
        assert torch.equal(table.read().cpu(), want)
        assert torch.equal(table.gather(torch.tensor([249, 0, 21])).weight.cpu(), want[[249, 0, 21]])
        ids = torch.tensor([0, 20, 249])
        table.scatter(ids, torch.full((3, DIM), 0.5, dtype=column))
        want[ids] = 0.5
        assert torch.equal(table.read().cpu(), want)
        table.reset_rows(torch.tensor([20]))
        want[20] = rows_of(dtype).to(column)[20].to(more.get("stored_dtype", column))
        assert torch.equal(table.read().cpu(), want)


def test_names_may_be_one_several_or_patterns_and_files_too(model: Path) -> None:
    """One tensor, a list in any order, a list of files; and the fingerprint is that of what is read, wherever it is."""
    parts = rows_of().split(-(-ROWS // SHARDS))
    one = init.of_tensors(model, "model.ngram.shard_3.weight")
    assert torch.equal(Table.create(len(parts[3]), DIM, init=one).read(), parts[3].float())
    names = ["model.ngram.shard_10.weight", "*.shard_0.weight"]
    two = init.of_tensors(sorted(model.glob("*.safetensors")), names)
    assert torch.equal(Table.create(two.num_embeddings, DIM, init=two).read(), torch.cat([parts[10], parts[0]]).float())
    again = shutil.copytree(model, model.parent / "again")
    whole = init.of_tensors(model / "model.safetensors.index.json", NAME)
    assert init.of_tensors(again, NAME).fingerprint == whole.fingerprint != two.fingerprint
    assert init.of_tensors(made(again, rows_of() * 2), NAME).fingerprint != whole.fingerprint


def test_training_over_a_base_is_that_over_a_copy_and_the_log_has_the_trained_rows(model: Path, tmp_path: Path) -> None:
    base = init.of_tensors(model, NAME)
    over = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16, init=base, storage=Disk(tmp_path / "t"))
    given = speedswap.Embedding.from_pretrained(rows_of().clone(), freeze=False)
    for items in (over, given):
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            items(torch.tensor([[3, 249], [3, 7 + step]])).float().square().sum().backward()
            optimizer.step()
    assert torch.equal(over.read(), given.read())
    over.table.flush()
    assert sorted(torch.cat([ids for ids, _ in over.table.store.written_rows()]).tolist()) == [3, 7, 8, 9, 249]
    over.table.save(tmp_path / "copy")
    with torch.no_grad():
        over(torch.arange(ROWS))
    assert not over.table.store.files.details()["touched_rows"] > 5
    over.table.close()
    for path in ("t", "copy"):
        with Table.open(tmp_path / path, "r") as table:
            assert torch.equal(table.read(), given.read())
        assert Table.load(tmp_path / path).read().equal(given.read())
    assert (tmp_path / "copy" / "rows.log").stat().st_size < 2**21


@pytest.mark.parametrize("dim", [DIM, 4])  # narrow rows are stored in groups
@pytest.mark.parametrize("dtype, more", [(torch.bfloat16, {}), (torch.float32, {"stored_dtype": torch.float16})])
def test_lookups_without_training_read_past_the_cache(dim: int, dtype: torch.dtype, more: Any, tmp_path: Path) -> None:
    """Only rows that were written come from there."""
    want = rows_of()[:, :dim].contiguous()
    write(tmp_path / "model.safetensors", {"weight": want})
    want = want.half().float() if more else want
    base, place = init.of_tensors(tmp_path / "model.safetensors", "weight"), Disk(tmp_path / "t", cache_bytes=1 << 20)
    items = speedswap.Embedding(ROWS, dim, dtype=dtype, init=base, storage=place, **more)
    table, trained = items.table, torch.tensor([3, 90, 248])
    group = table.store.manifest.group_rows
    untouched = (torch.arange(ROWS)[:, None] // group != trained // group).all(1).nonzero().squeeze(1)
    table.scatter(trained, torch.full((3, dim), 0.5, dtype=dtype))
    want[trained] = 0.5
    chosen = torch.tensor([0, 3, 3, 17, 90, 249, 249])
    for rows in (torch.arange(ROWS), chosen, chosen[1::3], torch.tensor([], dtype=torch.int64)):
        with torch.no_grad():
            assert torch.equal(items(rows.flip(0)), want[rows.flip(0)])
        assert torch.equal(table.gather(rows, columns=["weight"]).weight, want[rows])
        out = torch.full((len(rows), dim), 7.0, dtype=dtype)
        assert table.gather(rows, columns=["weight"], out={"weight": out}).weight is out
        assert torch.equal(out, want[rows])
    assert table.store._cache.log.unwritten(untouched).all()
    assert torch.equal(table.gather(chosen.flip(0), columns=["weight"]).weight, want[chosen.flip(0)])
    items(untouched[:1]).sum().backward()  # is about to be trained
    assert not table.store._cache.log.unwritten(untouched)[0]


HELD_READS = 512  # a fault of the log: its reads wait for let_reads_go


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("in_ranges", [False, True])
def test_rows_of_the_base_are_announced_while_the_log_reads_its_own(
    ahead: bool, in_ranges: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base: Any = init.of_tensors(model, NAME)
    if in_ranges:
        base = InRanges((Range(7, init.zeros()), Range(ROWS, base)))
    first, rows = (7, ROWS + 7) if in_ranges else (0, ROWS)
    place = Disk(tmp_path / "t", cache_bytes=1 << 20)
    with Table.create(rows, DIM, init=base, dtype=torch.bfloat16, storage=place) as table:
        table.scatter(torch.arange(20) + first, torch.ones(20, DIM, dtype=torch.bfloat16))
    announced, kernel = threading.Event(), kernels.read_ahead

    def read_ahead(rows: Tensor, ids: Tensor) -> None:
        kernel(rows, ids)
        if len(ids):
            announced.set()

    with monkeypatch.context() as opening:
        opening.setattr(kernels, "RowLog", partial(kernels.RowLog, faults=HELD_READS))
        table = Table.open(place)
    ids, found = torch.tensor([3, 19, 21, 249]) + first, []
    table.read(rows - 1)  # the base is open
    monkeypatch.setattr(kernels, "read_ahead", read_ahead)
    items = speedswap.Embedding(rows, DIM, table=table)

    def look_up() -> None:
        batches: Any = speedswap.lookahead([ids] * 2, {items: lambda ids: ids}, depth=1) if ahead else [ids]
        found.extend(items(ids).detach() for ids in batches)

    thread = threading.Thread(target=look_up)
    thread.start()
    try:
        assert announced.wait(30)
        assert not found
    finally:
        table.store.log.let_reads_go()
        thread.join()
    wanted = rows_of()[ids - first]
    wanted[:2] = 1
    assert len(found) == 1 + ahead
    assert all(torch.equal(each, wanted) for each in found)
    table.close()


@pytest.mark.parametrize("state", ["in memory", "on the disk", "unknown", "unknown to Python"])
def test_many_rows_are_announced_unless_they_are_in_memory(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each announcement is a call of the system; a look at some of the rows says whether any is needed."""
    rows, path, announced, kernel = rows_of(rows=6000), tmp_path / "f.safetensors", list[int](), kernels.read_ahead
    write(path, {f"w.{i:02}": some for i, some in enumerate(rows.split(500))})  # few rows are of one tensor
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if state == "on the disk":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
            says = "in memory"
        except BlockingIOError:
            says = "on the disk"
        except (OSError, AttributeError):
            says = "unknown"
    base, place = init.of_tensors(path, "w.*"), Disk(tmp_path / "t", cache_bytes=1 << 22)
    table = Table.create(len(rows), DIM, init=base, dtype=torch.bfloat16, storage=place)
    if state == "unknown to Python":
        monkeypatch.setattr(tensor_files, "_NOWAIT", None)
    elif state == "unknown":
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "not supported")))
    elif says != state:
        pytest.skip(f"the rows are {says} here")

    def read_ahead(rows: Tensor, ids: Tensor) -> None:
        kernel(rows, ids)
        announced.append(len(ids))

    monkeypatch.setattr(kernels, "read_ahead", read_ahead)
    ids = torch.arange(0, 6000, 5)
    assert torch.equal(table.gather(ids)["weight"], rows[ids])
    table.close()
    assert sum(announced) == (0 if state == "in memory" else len(ids))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which files are open")
def test_a_file_is_mapped_once_for_all_of_its_tensors(tmp_path: Path) -> None:
    """Each map takes an open file, of which a process may have 1,024: models have more tensors."""
    model, before = made(tmp_path / "model", rows_of(), files=1), len(os.listdir("/proc/self/fd"))
    base, files = init.of_tensors(model, NAME), TensorFiles(model)
    tensors = [files.tensor(name) for name in files.matching(NAME)]
    assert len(os.listdir("/proc/self/fd")) - before <= 4 < len(tensors)
    assert torch.equal(torch.cat(tensors), rows_of())
    table = Table.create(ROWS, DIM, init=base, dtype=torch.bfloat16, storage="pageable")
    assert torch.equal(table.read(), rows_of())


def test_default_device_does_not_matter(model: Path) -> None:
    """Models are often built on meta, their tables with them."""
    with torch.device("meta"):
        base = init.of_tensors(model, NAME)
        items = speedswap.Embedding(ROWS, DIM, init=base, dtype=torch.bfloat16)
        table = Table.create(ROWS, DIM, init=base, dtype=torch.bfloat16, storage="pageable")
    assert items.weight.is_meta
    assert torch.equal(items.to_empty(device="cpu").read(), rows_of())
    assert torch.equal(table.read(), rows_of())


def test_checkpoints_and_collections_over_a_base(model: Path, tmp_path: Path) -> None:
    """A checkpoint has the trained rows of a table on disk by reference, and all rows of one in memory."""
    base = init.of_tensors(model, NAME)
    for place in (Disk(tmp_path / "t"), "pageable"):
        items = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16, init=base, storage=place)
        train(items, range(2))
        want = items.read()
        speedswap.save_checkpoint(tmp_path / "saved", items, step=2)
        train(items, range(2, 4))
        assert not torch.equal(items.read(), want)
        speedswap.load_checkpoint(tmp_path / "saved", items)
        assert torch.equal(items.read(), want)
        items.table.close()
        shutil.rmtree(tmp_path / "saved")
    configs = [
        speedswap.EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name], init=each)
        for name, each in (("a", base), ("b", init.zeros()), ("c", init.of_tensors(model, NAME)))
    ]
    tables = speedswap.EmbeddingCollection(tables=configs, storage=Disk(tmp_path / "several"))
    for name, want in (("a", rows_of().float()), ("b", torch.zeros(ROWS, DIM)), ("c", rows_of().float())):
        assert torch.equal(tables.tables[name].read(), want)
    assert [*tables.state_dict()] == ["embeddings.b.weight"]


def test_a_state_dict_says_that_it_leaves_trained_rows_out(model: Path, tmp_path: Path) -> None:
    items = speedswap.Embedding(ROWS, DIM, init=init.of_tensors(model, NAME), name="left out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not items.state_dict()
    train(items, range(2))
    with pytest.warns(
        speedswap.errors.SpeedswapWarning, match="SW411: state_dict leaves out the rows of table 'left out'"
    ):
        assert not items.state_dict()


def test_initializer_is_copied_and_pickled_as_a_value(model: Path, tmp_path: Path) -> None:
    base = init.of_tensors(model, NAME)
    for twin in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert twin == base
        assert torch.equal(Table.create(ROWS, DIM, init=twin, dtype=torch.bfloat16).read(), rows_of())
    items = speedswap.Embedding(ROWS, DIM, init=base)
    assert torch.equal(copy.deepcopy(items).read(), rows_of().float())


def test_several_bases_in_one_store_and_a_later_column(model: Path, tmp_path: Path) -> None:
    """Ranges of a store's rows have a base each; a column added later has one, or copies the weight."""
    other = made(tmp_path / "other", rows_of(torch.float32, 2))
    one, two = init.of_tensors(model, NAME), init.of_tensors(other, NAME)
    both = InRanges((Range(ROWS, one), Range(3, init.zeros()), Range(ROWS, two)))
    table = Table.create(2 * ROWS + 3, DIM, init=both, path=tmp_path / "t")
    want = torch.cat([rows_of().float(), torch.zeros(3, DIM), rows_of(torch.float32, 2)])
    table.add_columns([Column("average", (DIM,), torch.float32, init.copy_of("weight"))])
    assert torch.equal(table.read(), want)
    assert torch.equal(table.read(column="average"), want)
    table.close()
    small = Table.create(ROWS, DIM, path=tmp_path / "s")
    small.scatter(torch.tensor([5]), torch.ones(1, DIM))
    small.add_columns([Column("state", (DIM,), torch.float32, one)])
    small.close()
    for path, column, expected in (("t", "average", want), ("s", "state", rows_of().float())):
        with Table.open(tmp_path / path) as table:
            assert torch.equal(table.read(column=column), expected)


FILLED = """
import json, sys
sys.path.append(sys.argv[2])
import torch, speedswap
from children import peak_of_memory

rows, dim = 40_000, 4096
header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, dim], "data_offsets": [0, rows * dim * 2]}}).encode()
header += b" " * (-len(header) % 8)
with open(sys.argv[1], "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + rows * dim * 2)  # 312 MiB of zeros, none of them on the disk
base = speedswap.init.of_tensors(sys.argv[1], "w")
speedswap.Table.create(rows, 1, init=speedswap.init.normal(), storage="pageable")  # starts threads
before = peak_of_memory(anew=True)
table = speedswap.Table.create(rows, dim, init=base, stored_dtype=torch.bfloat16, storage="pageable")
print((peak_of_memory() - before) / (rows * dim * 2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_filled_a_piece_at_a_time(tmp_path: Path) -> None:
    """The most that the process takes is the table, the file's pages in the system's cache, and pieces of the rows."""
    done = run_script(FILLED, tmp_path / "large.safetensors", Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.8  # with all float32 rows at once it is 4


# ---------------------------------------------------------------------- moved, changed, missing


def written(model: Path, path: Path) -> Tensor:
    """Make a table over a model, train a row, close it; return its rows."""
    with Table.create(ROWS, DIM, dtype=torch.bfloat16, init=init.of_tensors(model, NAME), path=path) as table:
        table.scatter(torch.tensor([5]), torch.ones(1, DIM, dtype=torch.bfloat16))
        return table.read()


def test_table_and_base_may_be_moved_together_or_apart(tmp_path: Path) -> None:
    want = written(made(tmp_path / "a" / "model", rows_of()), tmp_path / "a" / "t")
    shutil.move(tmp_path / "a", tmp_path / "b")
    with Table.open(tmp_path / "b" / "t") as table:
        assert torch.equal(table.read(), want)
    shutil.move(tmp_path / "b" / "t", tmp_path / "t")
    with pytest.raises(TableFormatError, match=r"a/model.*base="):
        Table.open(tmp_path / "t")
    with pytest.raises(TableFormatError, match="nowhere"):
        Table.open(tmp_path / "t", base=tmp_path / "nowhere")
    with Table.open(tmp_path / "t", "r", base=tmp_path / "b" / "model") as table:  # which records nothing
        assert torch.equal(table.read(), want)
    with pytest.raises(TableFormatError):
        Table.open(tmp_path / "t")
    with Table.open(Disk(tmp_path / "t"), base=sorted((tmp_path / "b" / "model").glob("*.safetensors"))) as table:
        assert torch.equal(table.read(), want)
        table.scatter(torch.tensor([6]), torch.ones(1, DIM, dtype=torch.bfloat16))
    with Table.open(tmp_path / "t") as table:
        assert torch.equal(table.read()[6], torch.ones(DIM, dtype=torch.bfloat16))


def changed_values(model: Path) -> None:
    made(model, rows_of(seed=3))


def shorter(model: Path) -> None:
    os.truncate(model / "model-00002-of-00003.safetensors", 900)


def gone(model: Path) -> None:
    (model / "model-00002-of-00003.safetensors").unlink()


def renamed(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("shard_11", "shard_99"))


def misplaced(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.ngram.shard_0.weight"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))


CHANGES = {
    changed_values: "has changed since",
    shorter: "model-00002-of-00003.safetensors is damaged",
    gone: "model-00002-of-00003.safetensors is missing",
    renamed: "has no tensor 'model.ngram.shard_99.weight', although its index says so",
    misplaced: "has no tensor 'model.ngram.shard_0.weight', although its index says so",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_base_is_refused_and_the_right_one_opens(change: Callable[[Path], None], tmp_path: Path) -> None:
    model = made(tmp_path / "model", rows_of())
    want, kept = written(model, tmp_path / "t"), shutil.copytree(model, tmp_path / "kept")
    change(model)
    for mode in ("r", "r+"):
        with pytest.raises(TableFormatError, match=CHANGES[change]) as refused:
            Table.open(tmp_path / "t", mode)
        assert "Table.open(path, base=…)" in str(refused.value)
    if change is not changed_values:
        with pytest.raises(TableFormatError, match=CHANGES[change]):
            init.of_tensors(model, NAME)
    with Table.open(tmp_path / "t", base=kept) as table:
        assert torch.equal(table.read(), want)


@pytest.mark.parametrize("place", ["pageable", "disk"])
def test_a_checkpoint_finds_the_base_where_the_models_table_has_it(place: str, tmp_path: Path) -> None:
    """Its copy of the table says where the base was as it was saved; later ones say where it is."""
    model = made(tmp_path / "model", rows_of())

    def over(folder: Path) -> speedswap.Embedding:
        more: Any = {"storage": place} if place == "pageable" else {"path": tmp_path / f"over {folder.name}"}
        return speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16, init=init.of_tensors(folder, NAME), **more)

    items = over(model)
    for step in range(2):
        train(items, [step])
        speedswap.save_checkpoint(tmp_path / "saved", items, step=step, tables="copy", keep=2)
    want = items.read()
    shutil.move(model, tmp_path / "moved")
    items = over(Path(shutil.copytree(tmp_path / "moved", tmp_path / "another copy")))
    speedswap.load_checkpoint(tmp_path / "saved", items)
    assert torch.equal(items.read(), want)
    for step in (2, 3):
        train(items, [step])
        speedswap.save_checkpoint(tmp_path / "saved", items, step=step, tables="copy", keep=2)
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["000003-step-2", "000004-step-3"]
    plain = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16)
    speedswap.load_checkpoint(tmp_path / "saved", plain)
    assert torch.equal(plain.read(), items.read())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_checkpoint_over_a_changed_base_may_be_good(change: Callable[[Path], None], tmp_path: Path) -> None:
    """It is not called damaged, or to be removed: it loads with the right base."""
    model = made(tmp_path / "model", rows_of())
    items = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16, init=init.of_tensors(model, NAME))
    train(items, [0])
    speedswap.save_checkpoint(tmp_path / "saved", items, step=1)
    change(model)
    plain = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"may be good: .*{CHANGES[change]}.*restore the files, or say where"):
        speedswap.load_checkpoint(tmp_path / "saved", plain)
    shutil.rmtree(model)
    made(model, rows_of())
    speedswap.load_checkpoint(tmp_path / "saved", plain)
    assert torch.equal(plain.read(), items.read())


def test_base_written_while_a_table_is_open_is_an_error_of_the_next_read(model: Path, tmp_path: Path) -> None:
    table = Table.create(ROWS, DIM, init=init.of_tensors(model, NAME), path=tmp_path / "t")
    table.gather(torch.tensor([3]))
    file = model / "model-00001-of-00003.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\7")
    os.utime(file, (1, 1))
    with pytest.raises(TableClosedError, match="was written after its rows were mapped"):
        table.gather(torch.tensor([200]))
    table.close()


def test_no_descriptors_left_is_not_a_damaged_base(model: Path, tmp_path: Path) -> None:
    written(model, tmp_path / "t")
    limits, found = resource.getrlimit(resource.RLIMIT_NOFILE), []
    for free in range(20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + free, limits[1]))
        try:
            Table.open(tmp_path / "t").close()
        except OSError as error:
            found.append(error.errno)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found[:9] == [errno.EMFILE] * 9
    assert {*found} == {errno.EMFILE}
    Table.open(tmp_path / "t").close()


@pytest.mark.parametrize("call", ["export", "save_rows"])
def test_files_of_the_base_are_not_replaced(call: str, model: Path, tmp_path: Path) -> None:
    """Neither by the table nor by a part of it; a table in memory has its rows."""
    other = Table.create(ROWS, DIM, init=init.of_tensors(model, NAME))
    (tmp_path / "link").symlink_to(model)
    file = tmp_path / "link" / "model-00002-of-00003.safetensors"
    of_base = {"num_embeddings": ROWS, "embedding_dim": DIM, "init": init.of_tensors(model, NAME)}
    plain = speedswap.EmbeddingConfig(name="plain", num_embeddings=9, embedding_dim=DIM, feature_names=["plain"])
    based = speedswap.EmbeddingConfig(name="based", feature_names=["based"], **of_base)
    tables = speedswap.EmbeddingCollection([plain, based], path=tmp_path / "c")
    with Table.create(**of_base, path=tmp_path / "t") as table:
        for each in (table, *tables.tables.values()):
            with pytest.raises(
                FileExistsError, match=r"from which the untouched rows of table .* are read; give another"
            ):
                getattr(each, call)(file, overwrite=True)
            getattr(each, call)(tmp_path / "new.safetensors", overwrite=True)
    tables.close()
    getattr(other, call)(file, overwrite=True)


def test_base_of_a_table_without_one_is_refused(model: Path, tmp_path: Path) -> None:
    Table.create(3, 2, path=tmp_path / "t").close()
    with pytest.raises(ValueError, match="has no base; leave it out"):
        Table.open(tmp_path / "t", base=model)
    Table.open(tmp_path / "t").close()


@pytest.mark.parametrize(
    ("tensors", "names", "error", "message"),
    [
        ({"emb.shard_0": rows_of()}, "emb.shards_*", ValueError, r"no tensor 'emb.shards_\*', but emb.shard_0"),
        ({"a": rows_of(), "b": rows_of().float()}, "*", TypeError, "'b'.*float32, but those of 'a'.*bfloat16"),
        ({"a": rows_of(), "b": rows_of()[:, :5].clone()}, "*", TypeError, "rows of 5 .* 'a' are 128"),
        ({"a": torch.ones(3)}, "a", TypeError, r"\(3,\) of torch.float32"),
        ({"a": torch.ones(3, 2, dtype=torch.int64)}, "a", TypeError, "int64"),
        ({"a": torch.ones(0, 2)}, "a", TypeError, "has no rows"),
        ({"a": rows_of()}, [], ValueError, "names"),
    ],
)
def test_wrong_tensors_are_refused(
    tensors: dict[str, Tensor], names: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.safetensors", tensors)
    with pytest.raises(error, match=message):
        init.of_tensors(tmp_path / "m.safetensors", names)


def test_table_of_another_size_or_dtype_is_refused_before_it_is_made(model: Path, tmp_path: Path) -> None:
    base = init.of_tensors(model, NAME)
    for size in ((ROWS + 1, DIM), (ROWS, DIM + 1)):
        with pytest.raises(ValueError, match=f"are {ROWS} × {DIM}; give init.num_embeddings"):
            Table.create(*size, init=base, path=tmp_path / "t")
    with pytest.raises(ValueError, match="give a floating-point"):
        Table.create(ROWS, DIM, init=base, dtype=torch.int32, path=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    table = Table.create(ROWS + 1, DIM, path=tmp_path / "t")
    with pytest.raises(ValueError, match=r"give init\.num_embeddings"):
        table.add_columns([Column("more", (DIM,), torch.float32, base)])
    assert [*table.columns] == ["weight"]


def test_manifest_that_claims_more_rows_reads_none_past_the_end(model: Path, tmp_path: Path) -> None:
    """Its author may be anyone."""
    Table.create(ROWS, DIM, init=init.of_tensors(model, NAME), path=tmp_path / "t").close()
    body = (tmp_path / "t" / "MANIFEST").read_bytes()[9:].replace(b'"num_embeddings": 250', b'"num_embeddings": 256')
    (tmp_path / "t" / "MANIFEST").write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    with Table.open(tmp_path / "t") as table, pytest.raises(ValueError, match="are 250 × 128"):
        table.gather(torch.tensor([255]))


# ---------------------------------------------------------------------- embeddings, kills


@pytest.mark.parametrize("kind", [speedswap.Embedding, speedswap.EmbeddingBag])
def test_modules_from_files_in_a_place(kind: Any, model: Path, tmp_path: Path) -> None:
    """Of a pattern, in the dtype on file by default, frozen or trained; a single tensor without a place is mapped."""
    ids = torch.tensor([[3, 249], [21, 0]])
    want = rows_of().float()[ids]
    want = want if kind is speedswap.Embedding else want.mean(1)
    items = kind.from_file(model, NAME, storage=Disk(tmp_path / "t"))
    assert not items.weight.requires_grad
    assert (items.table.storage, items.table.dtype) == ("disk", torch.bfloat16)
    assert torch.equal(items(ids), want.bfloat16())
    items.table.close()
    wide = kind.from_file(model, NAME, False, dtype=torch.float32, stored_dtype=torch.bfloat16, path=tmp_path / "w")
    wide(ids).sum().backward()
    torch.optim.SGD(wide.parameters(), lr=1.0).step()
    assert not torch.isclose(wide.read()[ids], rows_of().float()[ids]).any(-1).any()
    assert torch.equal(wide.read()[30:200], rows_of().float()[30:200])
    assert kind.from_file(model, "*.shard_3.weight").table.storage == "file"


def ids_of(step: int) -> Tensor:
    return torch.randint(ROWS, (20,), generator=torch.Generator().manual_seed(step))


def train(items: speedswap.Embedding, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or adam(items)
    for step in steps:
        optimizer.zero_grad()
        items(ids_of(step)).float().square().sum().backward()
        optimizer.step()


def adam(items: speedswap.Embedding) -> torch.optim.Optimizer:
    return torch.optim.AdamW(items.parameters(), lr=1e-2, weight_decay=0.0)


TRAINED = """
import itertools, os, signal, sys
sys.path[:0] = sys.argv[4:]
import torch, speedswap
from test_base import DIM, NAME, ROWS, train
torch.set_num_threads(1)
place = speedswap.Disk(sys.argv[2], commit_every=1, commit_seconds=None)
base = speedswap.init.of_tensors(sys.argv[1], NAME)
items = speedswap.Embedding(ROWS, DIM, dtype=torch.bfloat16, init=base, storage=place)
calls = itertools.count()
limit = int(sys.argv[3])

def count(*event):
    if next(calls) == limit:
        os.kill(os.getpid(), signal.SIGKILL)

sys.setprofile(count)
train(items, itertools.count())
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("point", range(20))
def test_killed_anywhere_leaves_a_commit_over_its_base(point: int, model: Path, tmp_path: Path) -> None:
    """Its rows are those after a step; it has written those that were trained, and goes on as an uninterrupted run."""
    calls = int(torch.randint(5_000, 40_000, (), generator=torch.Generator().manual_seed(point)))
    folders = str(Path(__file__).parent), str(Path(__file__).parents[1])
    ended = run_script(TRAINED, model, tmp_path / "t", calls, *folders)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    given = speedswap.Embedding.from_pretrained(rows_of().clone(), freeze=False)
    optimizer, steps = adam(given), 0
    with Table.open(tmp_path / "t") as table:
        found, written = table.read(), [ids for ids, _ in table.store.written_rows()]
        while not torch.equal(given.read(), found):
            assert steps < 1000, "the table has the rows of no step"
            train(given, [steps], optimizer)
            steps += 1
        trained = {*torch.cat([ids_of(step) for step in range(steps)]).tolist()} if steps else set()
        assert {*(torch.cat(written).tolist() if written else [])} == trained
        train(given, range(steps, steps + 5), optimizer)
        train(speedswap.Embedding(ROWS, DIM, table=table), range(steps, steps + 5))
        assert torch.equal(table.read(), given.read())
