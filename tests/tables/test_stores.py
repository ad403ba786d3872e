"""Custom stores behind the store interface: counting, delaying and failing ones train like any table."""

from __future__ import annotations

import copy
import functools
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import speedswap
from speedswap.kernels import Lookup
from speedswap.tables import LocalStore, Prefetched, RowStore, Table, WrappedStore, as_storage
from speedswap.tables.opening import open_store
from speedswap.tables.storage import copy_rows
from speedswap.tables.store import StoreFacts

ROWS, DIM = 30, 4


def test_the_door_is_narrow() -> None:
    """Each member has a line in the description of the architecture."""
    members = {name for name in {*dir(RowStore), *RowStore.__annotations__} if not name.startswith("_")}
    assert len(members) <= 18
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    lines = re.findall(r"^\| `(\w+)`", text.partition("## The door")[2].partition("\n## ")[0], re.MULTILINE)
    assert {*lines} == members


DOORS = (
    "gather",
    "scatter",
    "prefetch",
    "drain",
    "commit",
    "read",
    "write",
    "written_rows",
    "add_columns",
    "reset_columns",
)
DOORS += ("flush",)


class Watched(WrappedStore):
    """A store that does something before each call, including the taking of what was prefetched."""

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        for name in DOORS:
            setattr(self, name, functools.partial(self._call, name, getattr(inner, name)))

    def before(self, name: str) -> None:
        raise NotImplementedError

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.before(name)
        result = function(*args, **kwargs)
        return Taken(self, result) if name == "prefetch" else result


class Taken(Prefetched):
    """A prefetch from a watched store."""

    def __init__(self, store: Watched, inner: Prefetched) -> None:
        self._store, self._inner = store, inner

    def take(self) -> Any:
        self._store.before("take")
        return self._inner.take()


class Counting(Watched):
    """A store that counts its calls."""

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def before(self, name: str) -> None:
        self.calls[name] += 1


class Delaying(Watched):
    """A store that is slow, by a different time at each call."""

    calls = 0

    def before(self, name: str) -> None:
        self.calls += 1
        time.sleep(self.calls % 3 / 1000)


class StoreError(Exception):
    pass


class Failing(Watched):
    """A store whose call number ``fails_at`` raises before anything is done."""

    calls, fails_at, failed_in = 0, -1, ""

    def before(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            self.failed_in = name
            raise StoreError(name)


Kind = Callable[..., Any]
KINDS: dict[str, Kind] = {"embedding": speedswap.Embedding, "bag": speedswap.EmbeddingBag}


def batches(device: str, count: int = 6) -> list[Tensor]:
    return [
        torch.randint(ROWS, (5, 2), generator=torch.Generator().manual_seed(step)).to(device) for step in range(count)
    ]


def local(path: Path | None = None) -> RowStore:
    weight = speedswap.Column("weight", (DIM,), torch.float32, speedswap.init.normal())
    return as_storage("auto", path).create(ROWS, weight, seed=3, name="rows")


def module(kind: str, store: RowStore, device: str) -> Any:
    return KINDS[kind](ROWS, DIM, table=Table(store), device=device)


def adam(items: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    speedswap.attach(optimizer, items)
    return optimizer


def loop(items: Any, source: list[Tensor], ahead: bool) -> Iterable[Tensor]:
    return speedswap.lookahead(source, {items: lambda ids: ids}) if ahead else source


def step(items: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    items(ids).square().sum().backward()
    optimizer.step()


def train(items: Any, optimizer: torch.optim.Optimizer, source: list[Tensor], ahead: bool) -> None:
    for ids in loop(items, source, ahead):
        step(items, optimizer, ids)


def columns(table: Table) -> dict[str, list[Any]]:
    return {name: table.read(column=name).tolist() for name in table.columns}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_every_step_passes_the_door_once_each_way(kind: str, ahead: bool, device: str) -> None:
    """A gather or a prefetch, a scatter and a commit per step, and whole columns at the start and the end alone."""
    store = Counting(local())
    items = module(kind, store, device)
    optimizer = adam(items)
    assert store.calls == {"add_columns": 1}
    store.calls.clear()
    train(items, optimizer, batches(device), ahead)
    table = items.table.read()
    gathers = {"prefetch": 6, "take": 6, "drain": 1} if ahead else {"gather": 6}
    assert store.calls == {"scatter": 6, "commit": 6, "read": 1, **gathers}
    plain = module(kind, local(), device)
    train(plain, adam(plain), batches(device), ahead=False)
    assert torch.equal(table, plain.table.read())


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_slow_store_gives_the_same_bits(kind: str, ahead: bool, device: str) -> None:
    slow, plain = module(kind, Delaying(local()), device), module(kind, local(), device)
    train(slow, adam(slow), batches(device), ahead)
    train(plain, adam(plain), batches(device), ahead=False)
    assert columns(slow.table) == columns(plain.table)


def history(kind: str, device: str, source: list[Tensor]) -> list[dict[str, list[Any]]]:
    """Return the table before training and after each step."""
    items = module(kind, local(), device)
    optimizer = adam(items)
    seen = [columns(items.table)]
    for ids in source:
        step(items, optimizer, ids)
        seen.append(columns(items.table))
    return seen


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_failure_at_any_call_leaves_the_last_completed_step(kind: str, ahead: bool, device: str) -> None:
    """And training goes on with the batch whose step did not reach the table, to the same rows and state."""
    source = batches(device, 4)
    expected = history(kind, device, source)
    failed_in = set()
    for fails_at in range(1, 100):
        store = Failing(local())
        items = module(kind, store, device)
        optimizer = adam(items)
        store.calls, store.fails_at = 0, fails_at
        try:
            train(items, optimizer, source, ahead)
        except StoreError:
            failed_in.add(store.failed_in)
        if not store.failed_in:
            store.fails_at = -1  # nor when it is flushed at the end
            break
        done = items.table.writes  # one per completed step
        assert columns(items.table) == expected[done], store.failed_in
        train(items, optimizer, source[done:], ahead)
        assert columns(items.table) == expected[-1], store.failed_in
    assert failed_in == {"scatter", "commit", *(("prefetch", "take", "drain") if ahead else ("gather",))}


@pytest.mark.parametrize("wrap", [Counting, Delaying], ids=["counting", "delaying"])
def test_a_table_over_any_store_is_saved_and_loaded(
    wrap: Callable[[RowStore], RowStore], kind: str, device: str, tmp_path: Path
) -> None:
    """Into a directory and into a state_dict; and over a store in files, closed and opened again."""
    items = module(kind, wrap(local(tmp_path / "files")), device)
    optimizer = adam(items)
    train(items, optimizer, batches(device), ahead=True)
    found = columns(items.table)
    items.table.save(tmp_path / "saved")
    with Table.load(tmp_path / "saved") as loaded:
        assert columns(loaded) == found
    twin = module(kind, wrap(local()), device)
    twin.load_state_dict(items.state_dict())
    again = adam(twin)
    again.load_state_dict(optimizer.state_dict())
    assert columns(twin.table) == found
    items.table.close()
    with Table(wrap(open_store(tmp_path / "files"))) as opened:
        assert columns(opened) == found
        assert opened.attributes["optimizer"]["scalars"]["step"] == 6


def test_a_failed_save_leaves_nothing_and_the_table_whole(tmp_path: Path, device: str) -> None:
    store = Failing(local())
    items = module("embedding", store, device)
    train(items, adam(items), batches(device), ahead=False)
    before = columns(items.table)
    store.calls, store.fails_at = 0, 1
    with pytest.raises(StoreError, match="written_rows"):
        items.table.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    items.table.save(tmp_path / "saved")
    with Table.open(tmp_path / "saved") as saved:
        assert columns(saved) == before == columns(items.table)


class Cached(WrappedStore):
    """A store that keeps the rows it has gathered until they are written."""

    def __init__(self, inner: RowStore) -> None:
        super().__init__(inner)
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.misses = 0

    def gather(self, rows: Tensor, columns: Any = None, device: Any = None, out: Any = None) -> Any:
        missing = [row for row in rows.tolist() if row not in self.kept]
        self.misses += len(missing)
        block = self.inner.gather(torch.tensor(missing, dtype=torch.int64), None, torch.device("cpu"))
        for place, row in enumerate(missing):
            self.kept[row] = {name: values[place].clone() for name, values in block.columns.items()}
        target = rows.device if device is None else device
        names = self.columns if columns is None else columns
        found = {
            name: torch.stack([self.kept[row][name] for row in rows.tolist()]).to(target)
            if len(rows)
            else torch.empty(0, *self.columns[name].row_shape, dtype=self.columns[name].dtype, device=target)
            for name in names
        }
        return speedswap.tables.Block(rows, found)

    def scatter(self, block: speedswap.tables.Block, values: Any, transfers: Any = None) -> None:
        for row in block.rows.tolist():
            self.kept.pop(row, None)
        self.inner.scatter(block, values, transfers)

    def add_columns(self, columns: Any) -> None:
        self.kept.clear()
        self.inner.add_columns(columns)

    def reset_columns(self, columns: Any) -> None:
        self.kept.clear()
        self.inner.reset_columns(columns)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.kept.clear()
        self.inner.write(column, start, values)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_store_in_front_of_another_trains_to_the_same_bits(kind: str, ahead: bool, device: str) -> None:
    cached, plain = module(kind, Cached(local()), device), module(kind, local(), device)
    for items in (cached, plain):
        optimizer = adam(items)
        train(items, optimizer, batches(device), ahead)
        items.table.write(2, torch.ones(3, DIM))
        train(items, optimizer, batches(device), ahead)
    assert columns(cached.table) == columns(plain.table)
    store = cached.table.store
    before = store.misses
    for _ in range(3):
        cached.table.gather(torch.arange(5))
    assert store.misses <= before + 5


class Behind(Cached):
    """A store that writes rows when it is flushed."""

    def scatter(self, block: speedswap.tables.Block, values: Any, transfers: Any = None) -> None:
        for place, row in enumerate(block.rows.tolist()):
            self.kept[row] = {name: each[place].clone() for name, each in values.items()}

    def flush(self) -> None:
        for row, values in self.kept.items():
            rows = torch.tensor([row])
            self.inner.scatter(speedswap.tables.Block(rows, {}), {name: each[None] for name, each in values.items()})
        self.inner.flush()


def test_what_a_wrapper_holds_is_flushed_when_its_table_is_freed(tmp_path: Path) -> None:
    Table.create(ROWS, DIM, storage="disk", path=tmp_path / "files").close()
    table = Table(Behind(open_store(tmp_path / "files")))
    rows = torch.tensor([3, 5])
    table.scatter(rows, torch.ones(2, DIM))
    del table
    gc.collect()
    with Table.open(tmp_path / "files") as opened:
        assert torch.equal(opened.gather(rows).weight, torch.ones(2, DIM))


def test_a_wrapper_of_rows_that_ranks_own_is_refused() -> None:
    """Its table would train without the exchange between the ranks."""
    store = Counting(local())
    group: Any = object()
    store.facts = replace(store.facts, ranks=group)
    with pytest.raises(TypeError, match=r"store is a Counting in front of rows that ranks own; .*Ranks\(each=…\)"):
        Table(store)


class Plain(RowStore):
    """A store of another kind: one whole tensor per column, without prefetch or files."""

    def __init__(self, inner: RowStore) -> None:
        self.facts = replace(inner.facts, storage="plain", nbytes=None)
        self.kept = {name: (column, inner.read(name, 0, ROWS).clone()) for name, column in inner.columns.items()}

    columns = property(lambda self: {name: column for name, (column, _) in self.kept.items()})

    def gather(self, rows: Tensor, columns: Any = None, device: Any = None, out: Any = None) -> Any:
        names, target = self.columns if columns is None else columns, rows.device if device is None else device
        found = {name: self.kept[name][1][rows.cpu()].to(target) for name in names}
        for name, tensor in (out or {}).items():
            found[name] = tensor.copy_(found[name])
        return speedswap.tables.Block(rows, found)

    def scatter(self, block: speedswap.tables.Block, values: Any, transfers: Any = None) -> None:
        for name, tensor in values.items():
            self.kept[name][1][block.rows.cpu()] = tensor.detach().cpu()
        self.notes.writes += 1

    def read(self, column: str, start: int, stop: int, device: Any = None) -> Tensor:
        return self.kept[column][1][start:stop].to(device)

    def write(self, column: str, start: int, values: Tensor) -> None:
        self.kept[column][1][start : start + len(values)] = values

    def view(self, column: str) -> Tensor:
        return self.kept[column][1]

    def add_columns(self, columns: Any) -> None:
        with Table(local()) as table:
            table.add_columns(columns)
            self.kept |= {column.name: (column, table.read(column=column.name)) for column in columns}

    def reset_columns(self, columns: Any) -> None:
        self.add_columns(columns)

    def close(self) -> None:
        self.notes.closed = True


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_store_of_another_kind_trains_and_is_saved(kind: str, ahead: bool, device: str, tmp_path: Path) -> None:
    """A store without records and without prefetch gives the same bits."""
    other, usual = module(kind, Plain(local()), device), module(kind, local(), device)
    for items in (other, usual):
        train(items, adam(items), batches(device), ahead)
    assert columns(other.table) == columns(usual.table)
    assert torch.equal(other.read(torch.tensor([3, 1])), usual.read(torch.tensor([3, 1])))
    assert other.score(torch.ones(DIM), k=3).ids.tolist() == usual.score(torch.ones(DIM), k=3).ids.tolist()
    other.table.save(tmp_path / "saved")
    with Table.open(tmp_path / "saved") as saved:
        assert columns(saved) == columns(usual.table)
        assert saved.attributes["optimizer"]["scalars"]["step"] == 6
    assert columns(Table(copy_rows(other.table.store, "pageable"))) == columns(usual.table)
    assert columns(copy.deepcopy(other.table)) == columns(usual.table)
    with pytest.raises(TypeError, match=r"not in one memory; use Table.read\(\)"):
        RowStore.view(other.table.store, "weight")
    other.table.close()
    with pytest.raises(speedswap.errors.TableClosedError):
        other(batches(device)[0])


class Sharded(RowStore):
    """A store whose row ``i`` is row ``i // n`` of store ``i % n``."""

    def __init__(self, shards: list[LocalStore]) -> None:
        self.shards = shards
        num_rows = sum(shard.num_embeddings for shard in shards)
        self.facts = StoreFacts(num_rows, "sharded", seed=shards[0].seed, name="sharded")

    columns = property(lambda self: self.shards[0].columns)

    def split(self, ids: Tensor) -> list[tuple[LocalStore, int, Tensor]]:
        """Return the shards that have some of these ids, with their number and a mask of those ids."""
        masks = [ids % len(self.shards) == number for number in range(len(self.shards))]
        return [(self.shards[number], number, mask) for number, mask in enumerate(masks) if bool(mask.any())]

    def gather(self, rows: Tensor, columns: Any = None, device: Any = None, out: Any = None) -> Any:
        names, target = columns or [*self.columns], device or rows.device
        found = {name: (out or {}).get(name) for name in names}
        for name in (name for name in names if found[name] is None):
            column = self.columns[name]
            found[name] = torch.empty(len(rows), *column.row_shape, dtype=column.dtype, device=target)
        for shard, _, mask in self.split(rows):
            part = shard.gather(rows[mask] // len(self.shards), names, target)
            for name in names:
                found[name][mask.to(target)] = part[name]
        return speedswap.tables.Block(rows, found)

    def scatter(self, block: speedswap.tables.Block, values: Any, transfers: Any = None) -> None:
        for shard, _, mask in self.split(block.rows):
            some = {name: tensor[mask.to(tensor.device)] for name, tensor in values.items()}
            shard.scatter(speedswap.tables.Block(block.rows[mask] // len(self.shards), {}), some, transfers)
        self.notes.writes += 1

    def prefetch(self, lookup: Any, transfers: Any) -> Prefetched:
        flat, parts, device = lookup.ids.flatten().long(), [], lookup.device
        for shard, number, mask in self.split(flat):
            ids = flat[mask] // len(self.shards)
            part = shard.prefetch(Lookup(ids, shard.num_embeddings, device), transfers)
            parts.append((part, number, mask.to(device)))
        return Gathered(parts, lookup, len(self.shards))

    def drain(self) -> None:
        for shard in self.shards:
            shard.drain()

    def write(self, column: str, start: int, values: Tensor) -> None:
        for number, shard in enumerate(self.shards):
            first = start + (number - start) % len(self.shards)
            shard.write(column, first // len(self.shards), values[first - start :: len(self.shards)])

    def add_columns(self, columns: Any) -> None:
        for shard in self.shards:
            shard.add_columns([column for column in columns if column.name not in shard.columns])

    def reset_columns(self, columns: Any) -> None:
        for shard in self.shards:
            shard.reset_columns(columns)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self.notes.closed = True


class Gathered(Prefetched):
    """Rows of several shards, put together when they are taken."""

    def __init__(self, parts: list[tuple[Prefetched, int, Tensor]], lookup: Any, shards: int) -> None:
        self.parts, self.lookup, self.shards = parts, lookup, shards

    def take(self) -> Any:
        taken = [(part.take(), number, mask) for part, number, mask in self.parts]
        if any(found is None for found, _, _ in taken):
            return None
        rows, order = torch.cat([found[0].rows * self.shards + number for found, number, _ in taken]).sort()
        names = taken[0][0][0].columns
        block = {name: torch.cat([found[0][name] for found, _, _ in taken])[order] for name in names}
        local = torch.empty(self.lookup.ids.numel(), dtype=torch.int64, device=rows.device)
        first, place = 0, order.argsort()
        for found, _, mask in taken:
            local[mask] = place[found[1] + first]
            first += len(found[0].rows)
        return speedswap.tables.Block(rows, block), local.view(self.lookup.ids.shape)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "lookahead"])
def test_a_store_over_several_others_trains_and_is_saved(kind: str, ahead: bool, device: str, tmp_path: Path) -> None:
    """With prefetches and pending writes of each, to the same bits as one store that has all rows."""
    weight = speedswap.Column("weight", (DIM,), torch.float32, speedswap.init.normal())
    shards = [LocalStore.create(StoreFacts(ROWS // 2, "pageable", seed=3, name="rows"), weight) for _ in range(2)]
    other, usual = module(kind, Sharded(shards), device), module(kind, local(), device)
    other.table.write(0, usual.table.read())
    optimizers = [adam(items) for items in (other, usual)]
    for items, optimizer in zip((other, usual), optimizers, strict=True):
        train(items, optimizer, batches(device), ahead)
    found = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert columns(other.table) == columns(usual.table)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])
    assert other.score(torch.ones(DIM), k=3).ids.tolist() == usual.score(torch.ones(DIM), k=3).ids.tolist()
    with pytest.raises(speedswap.errors.IdError, match=r"ids\[0, 1\] is 30"):
        train(other, optimizers[0], [torch.tensor([[1, ROWS]], device=device)] * 2, ahead)
    other.table.save(tmp_path / "saved")
    with Table.open(tmp_path / "saved") as saved:
        assert columns(saved) == columns(usual.table)
        assert saved.attributes["optimizer"]["scalars"]["step"] == 6
    other.table.close()
    assert all(shard.notes.closed for shard in shards)


@pytest.mark.parametrize("order", ["failing first", "failing last"])
def test_a_store_that_cannot_commit_keeps_no_other_from_it(order: str, device: str) -> None:
    """All tables of the step are written, and the others have committed."""
    failing, counting = Failing(local()), Counting(local())
    stores = [failing, counting] if order == "failing first" else [counting, failing]
    both = [module("embedding", store, device) for store in stores]
    optimizer = torch.optim.Adam([*both[0].parameters(), *both[1].parameters()], lr=0.1)
    for items in both:
        speedswap.attach(optimizer, items)
    ids = batches(device)[0]
    torch.stack([items(ids).square().sum() for items in both]).sum().backward()
    counting.calls.clear()
    failing.calls, failing.fails_at = 0, 2  # a scatter, and the commit
    with pytest.raises(StoreError, match="commit"):
        optimizer.step()
    assert [items.table.writes for items in both] == [1, 1]
    assert counting.calls == {"scatter": 1, "commit": 1}
    expected = module("embedding", local(), device)
    step(expected, adam(expected), ids)
    assert all(columns(items.table) == columns(expected.table) for items in both)
