"""Scenarios of calls about whole tables: the best rows for queries, all rows, exports."""

from __future__ import annotations

import copy
import pickle

import torch
from places import owned

import speedswap
from speedswap.tables import Column

ROWS, WIDTH = 700, 3


def weights():
    """Return rows of small whole numbers, so that products are exact and many are equal; some are NaN."""
    generator = torch.Generator().manual_seed(4)
    found = torch.randint(-2, 3, (ROWS, WIDTH), generator=generator).float()
    found[13] = torch.nan
    return found


def queries_of(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(-3, 4, ([5, 0, 300][rank], WIDTH), generator=generator).float()


def excluded_by(rank, form):
    """Return what a rank leaves out, in one of the forms."""
    generator = torch.Generator().manual_seed(20 + rank)
    count = len(queries_of(rank))
    if form == "mask":
        return torch.rand(ROWS, generator=generator) < 0.7 if rank != 1 else None
    if form == "ids":
        return torch.randint(ROWS, (60,), generator=generator)
    if form == "padded":
        return torch.randint(-1, ROWS, (count, 90), generator=generator)
    if form == "list":
        return [torch.randint(ROWS, (i % 7,), generator=generator) for i in range(count)]
    return None


def score(group, form, chunk):
    """Return the best rows for this rank's queries, with another k on each rank."""
    rank = group.rank()
    items = speedswap.Embedding.from_pretrained(weights(), padding_idx=3, storage=owned(group))
    found = items.score(queries_of(rank), [6, 1, 40][rank], exclude=excluded_by(rank, form), chunk=chunk)
    single = items.score(torch.ones(WIDTH), 5)
    return found, single.ids.tolist()


def score_keys(group):
    """Return the best rows of a table with fewer keys than rows, with rows excluded in two forms."""
    items = speedswap.Embedding(300, WIDTH, id_map=speedswap.IdMap(300), seed=6, storage=owned(group))
    keys = torch.arange(90) * 7
    items(keys if group is None else keys.tensor_split(group.size())[group.rank()])
    forms = torch.arange(301) % 3 == 0, torch.tensor([1, 5, 299])
    return [items.score(queries_of(0), 100, exclude=form).ids for form in forms]


def score_in_collection(group):
    """Return the best rows of the second of two tables in one store, and of a table with fewer rows than ranks."""
    configs = [
        speedswap.EmbeddingConfig(name="first", num_embeddings=500, embedding_dim=WIDTH, seed=1),
        speedswap.EmbeddingConfig(name="second", num_embeddings=ROWS, embedding_dim=WIDTH, seed=2),
    ]
    tables = speedswap.EmbeddingCollection(configs, storage=owned(group))
    tables.tables["second"].write(0, weights())
    small = speedswap.Embedding.from_pretrained(torch.tensor([[1.0], [3.0]]), storage=owned(group))
    found = tables.embeddings["second"].score(queries_of(2)[:20], 9, exclude=excluded_by(0, "ids"))
    return found, small.score(torch.ones(1, 1), 2).ids.tolist()


def export(group, folder):
    """Write a table with keys in some formats, its part in a collection, and fail once where the file exists."""
    id_map = speedswap.IdMap(300, keys="exact")
    items = speedswap.Embedding(id_map.num_rows, WIDTH, id_map=id_map, seed=6, storage=owned(group))
    words = [f"word-{number}" for number in range(200)]
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    items(words[rank * 50 : 200 if rank == size - 1 else (rank + 1) * 50])
    for suffix in ("npy", "safetensors", "txt", "bin"):
        items.table.export(f"{folder}/{size}.{suffix}")
    config = speedswap.EmbeddingConfig(name="second", num_embeddings=90, embedding_dim=WIDTH, seed=2)
    before = speedswap.EmbeddingConfig(name="first", num_embeddings=80, embedding_dim=WIDTH, seed=1)
    tables = speedswap.EmbeddingCollection([before, config], storage=owned(group))
    tables.tables["second"].export(f"{folder}/{size}-part.npy")
    state = items.state_dict()["id_map"].tolist()
    try:
        items.table.export(f"{folder}/{size}.npy")
    except (FileExistsError, speedswap.errors.PeerError) as error:
        return type(error).__name__, items.read(torch.tensor([1])).tolist(), state


def export_while_splitting(group, path=None):
    """Train on split batches; the loss function may export the table in the second. Return the rows."""
    items = speedswap.Embedding(50, WIDTH, seed=2, dtype=torch.float64, storage=owned(group))
    optimizer = torch.optim.SGD(items.parameters(), 0.1)
    splitter = speedswap.BatchSplitter(items, micro_batch_size=2)
    batches = 0

    def loss_of(ids):
        if path is not None and batches == 1:
            items.table.export(path, overwrite=True)
        return items(ids).square().mean()

    for batches in range(3):
        splitter.backward(loss_of, torch.arange(6) + batches)
        optimizer.step()
        optimizer.zero_grad()
    return items.read()


def unknown_column_while_splitting(group):
    """Ask for a column that is not there while the ranks run passes at their own pace; return the error."""
    items = speedswap.Embedding(50, WIDTH, storage=owned(group), name="items")
    found = []

    def loss_of(ids):
        try:
            items.table.gather(ids, columns=["none"])
        except ValueError as error:
            found.append(str(error))
        return items(ids).square().mean()

    speedswap.BatchSplitter(items, micro_batch_size=2).backward(loss_of, torch.arange(6))
    return {*found}


def walk(group):
    """Call every method of a table, and return what it did: a value, or the error's name and message."""
    rank = group.rank()
    values = weights().nan_to_num()
    items = speedswap.Embedding.from_pretrained(values, storage=owned(group), name="walked")
    table, found = items.table, {}

    def call(name, function):
        try:
            found[name] = function()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    ids = torch.tensor([3, 500 + rank, 3])
    more = torch.ones(2, WIDTH)
    call("gather", lambda: torch.equal(table.gather(ids).weight, values[ids]))
    call("scatter", lambda: table.scatter(torch.tensor([rank, 100 + rank]), more))
    values[torch.tensor([0, 1, 2, 100, 101, 102])] = 1
    rows = torch.tensor([200 + rank, 500])
    call("lease", lambda: torch.equal(table.lease(rows).weight, values[rows]))
    call("give_back", lambda: table.give_back(table.lease(rows[:1]), {"weight": more[:1]}))
    values[torch.tensor([200, 201, 202])] = 1
    call("read", lambda: torch.equal(table.read(rank, 650), values[rank:650]))
    call("__array__", lambda: bool((table.__array__() == values.numpy()).all()))
    call("__dlpack__", lambda: torch.equal(torch.from_dlpack(table), values))
    call("__dlpack_device__", table.__dlpack_device__)
    call("write", lambda: table.write(690, torch.full((10, WIDTH), 7.0)))
    values[690:] = 7
    call("written", lambda: torch.equal(items.read(), values))
    call("add_columns", lambda: table.add_columns([Column("state", (WIDTH,), torch.float32, speedswap.init.normal())]))
    alone = speedswap.Table.create(ROWS, WIDTH, seed=table.seed)
    alone.add_columns([Column("state", (WIDTH,), torch.float32, speedswap.init.normal())])
    wanted = alone.read(column="state")
    call("columns", lambda: torch.equal(table.read(column="state"), wanted))
    call(
        "reset_columns", lambda: table.reset_columns([Column("state", (WIDTH,), torch.float32, speedswap.init.zeros())])
    )
    call("zeros", lambda: float(table.read(column="state").abs().sum()))
    call("reset_rows", lambda: table.reset_rows(torch.tensor([rank])))
    call("rows_between", lambda: _between(table, values))
    call("reserve", lambda: table.reserve(["weight"]))
    call("reserve_rows", lambda: table.reserve_rows(5))
    for name in ("drain", "commit", "flush", "check_open", "check_resettable", "__len__", "__repr__"):
        call(name, getattr(table, name))
    call("column_of", lambda: table.column_of("weight").width)
    call("is_backed_by", lambda: table.is_backed_by(values))
    call("note_change", lambda: table.note_change(None))
    call("check_rows", lambda: table.check_rows(torch.tensor([ROWS])))
    call("set_id_map", lambda: table.set_id_map(speedswap.IdMap(ROWS - 1)))
    call("view", table.view)
    call("__deepcopy__", lambda: copy.deepcopy(table))
    call("__reduce__", lambda: pickle.dumps(table))
    for name in PROPERTIES:
        call(name, lambda name=name: getattr(table, name))
    call("close", table.close)
    call("remove", table.remove)
    call("closed", lambda: table.read())
    return {name: value if isinstance(value, bool | float | int | str) else None for name, value in found.items()}


PROPERTIES = "embedding_dim dtype nbytes seed writes path pinned id_map lock version was_found commits".split()
PROPERTIES.append("local_to_rank")


def _between(table, values):
    with table.rows_between(10, 400, torch.device("cpu")) as rows:
        return torch.equal(rows, values[10:400])
