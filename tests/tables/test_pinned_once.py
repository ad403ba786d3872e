"""Pinned memory: taken, filled and registered once, when it is needed, for all columns."""

from __future__ import annotations

import pytest
import torch
from two_gpus import TwoGpus

import speedswap
from speedswap import Column, Table, init
from speedswap.errors import TableTooLargeError
from speedswap.kernels.cuda import pinning
from speedswap.tables import local

INITS = {"normal": init.normal(), "zeros": init.zeros(), "torch's": init.from_torch(torch.nn.init.xavier_uniform_)}


@pytest.fixture
def registered(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece of memory that is registered."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    from cupy.cuda import runtime

    sizes, register = list[int](), runtime.hostRegister

    def noted(pointer: int, nbytes: int, flags: int) -> None:
        sizes.append(nbytes)
        register(pointer, nbytes, flags)

    monkeypatch.setattr(runtime, "hostRegister", noted)
    return sizes


@pytest.mark.parametrize("begins", ["step", "attach", "lookahead"])
def test_rows_are_pinned_once_together_with_the_optimizers_state(
    begins: str, device: str, registered: list[int]
) -> None:
    """Before the optimizer is known, its columns are not, and memory for the weights alone would be replaced."""
    items = speedswap.Embedding(3000, 16, storage="pinned", device=device)
    optimizer = torch.optim.Adam(items.parameters())
    if begins == "attach":
        speedswap.attach(optimizer, items)
    batches = [torch.arange(i, i + 100, device=device) for i in range(4)]
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}) if begins == "lookahead" else batches:
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert items.table.nbytes == 3000 * 16 * 4 * 3
    assert [nbytes for nbytes in registered if nbytes in (3000 * 16 * 4, items.table.nbytes)] == [items.table.nbytes]
    assert items.table.pinned


def test_int8_rows_are_pinned_once_together_with_columns_added_after_a_lookup(registered: list[int]) -> None:
    rows = torch.tensor([3, 49])
    with Table.create(50, 4, storage="pinned", init=init.normal(), stored_dtype=torch.int8) as table:
        weight = table.gather(rows).weight
        table.add_columns([Column("more", (4,), torch.float32, init.zeros())])
        assert registered == []
        assert torch.equal(table.read()[rows], weight)
        assert registered == []
        table.scatter(rows, weight[:0].new_ones(2, 4))
        assert registered == [table.nbytes]


@pytest.mark.parametrize("name", ["normal", "zeros"])
def test_rows_that_are_read_whole_before_the_optimizer_is_known_are_pinned_once(
    name: str, device: str, registered: list[int]
) -> None:
    items = speedswap.Embedding(3000, 16, storage="pinned", device=device, init=INITS[name], padding_idx=5)
    before = [items.table.read(), items.table.read(7, 20), items.state_dict()["weight"]]
    assert registered == []
    optimizer = torch.optim.Adam(items.parameters(), lr=0.0)
    for ids in (torch.arange(100, device=device), torch.arange(50, 150, device=device)):
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [nbytes for nbytes in registered if nbytes >= 3000 * 16 * 4] == [items.table.nbytes] == [3000 * 16 * 4 * 3]
    after = items.table.read()
    assert torch.equal(before[0], after)
    assert torch.equal(before[1], after[7:20])
    assert torch.equal(before[2], after)


def test_rows_are_pinned_by_way_of_the_gpu_that_moves_them(two_gpus: TwoGpus) -> None:
    """A rank may have set no GPU, so that another rank's is current."""
    with Table.create(50, 4, storage="pinned", init=init.normal()) as table:
        rows = table.gather(torch.tensor([3])).weight
        assert (table.pinned, two_gpus.in_use) == (True, set())
        table.store._take_all(torch.device("cuda", 1))
        assert list(two_gpus.registered.values()) == [1]
        assert [nbytes for _, nbytes in two_gpus.registered] == [table.nbytes]
        assert torch.equal(table.gather(torch.tensor([3])).weight, rows)
    assert two_gpus.in_use == {1}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("stored_dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", INITS)
def test_rows_have_the_same_bits_before_and_after_the_memory_is_filled(
    name: str, stored_dtype: torch.dtype | None, device: str
) -> None:
    rows, settings = torch.tensor([7, 3, 3, 49, 5]), {"init": INITS[name], "zero_row": 5, "stored_dtype": stored_dtype}
    with Table.create(50, 4, storage="pinned", seed=7, **settings) as table:
        table.add_columns([Column("copy", (4,), torch.float32, init.copy_of("weight"))])
        before, near, out = table.gather(rows), table.gather(rows.to(device)), torch.empty(5, 4, device=device)
        table.gather(rows.to(device), columns=["copy"], out={"copy": out})
        computed = {name: table.read(column=name) for name in table.columns}
        table.store._take_all()
        whole = {name: table.read(column=name) for name in table.columns}
        assert all(torch.equal(computed[name], column) for name, column in whole.items())
        after = table.gather(rows)
        for name, column in whole.items():
            assert torch.equal(before[name], column[rows])
            assert torch.equal(near[name].cpu(), column[rows])
            assert torch.equal(after[name], column[rows])
        assert torch.equal(out.cpu(), before["copy"])
        assert not whole["weight"][5].any()


def test_a_column_that_does_not_exist_is_named_before_memory_is_taken(registered: list[int]) -> None:
    with Table.create(50, 4, storage="pinned") as table, pytest.raises(ValueError, match="column 'sum' is not in"):
        table.gather(torch.tensor([3]), columns=["sum"])
    assert registered == []


def test_no_more_rows_are_computed_than_the_table_has(registered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    computed, initial_values = [], local.initial_values

    def counted(columns: object, rows: torch.Tensor, *others: object) -> object:
        computed.append(len(rows))
        return initial_values(columns, rows, *others)

    monkeypatch.setattr(local, "initial_values", counted)
    with Table.create(50, 4, storage="pinned", init=init.normal()) as table:
        for _ in range(20):
            table.gather(torch.arange(20))
        assert computed == [20, 20]
        assert registered == [table.nbytes]


@pytest.mark.usefixtures("registered")
def test_a_table_for_which_no_memory_comes_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([3, 49])
    with Table.create(50, 128, storage="pinned", init=init.normal()) as table:
        weight = table.gather(rows).weight
        with monkeypatch.context() as patch:
            patch.setattr(pinning, "available_bytes", lambda: 1 << 10)
            patch.setattr(pinning, "_PATIENCE_SECONDS", 0.01)
            patch.setattr(pinning, "anonymous", refuses_to_reserve(pinning.anonymous))
            for _ in range(2):
                with pytest.raises(TableTooLargeError, match=r"could not allocate .* GiB of pinned memory \(0\.00 GiB"):
                    table.scatter(rows, torch.ones(2, 128))
        assert torch.equal(table.gather(rows).weight, weight)
        table.scatter(rows, torch.ones(2, 128))
        assert torch.equal(table.gather(rows).weight, torch.ones(2, 128))


def refuses_to_reserve(real: object) -> object:
    """Return a function that maps memory as a machine does that has not been given enough yet."""

    def anonymous(nbytes: int, *, is_reserved: bool = True) -> object:
        if is_reserved:
            raise OSError("Cannot allocate memory")
        return real(nbytes, is_reserved=False)  # type: ignore[operator]

    return anonymous


def test_a_table_on_a_gpu_gives_its_memory_back_before_its_state_joins(device: str, monkeypatch: pytest.MonkeyPatch):
    """Otherwise torch keeps it for small tensors, and a table that fits by itself runs out of memory."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    table, done = Table.create(100, 8, storage="device"), []
    first, allocate = table.store.groups[0].memory, local.allocate
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"given back, {first.bytes.nbytes} bytes held"))
    monkeypatch.setattr(local, "allocate", lambda *words: done.append("taken") or allocate(*words))
    table.add_columns([Column("state", (8,), torch.float32, init.zeros())])
    assert done == ["given back, 0 bytes held", "taken"]
