"""Full disks in training: a step that finds no room moves nothing, and what fills tables changes them whole or not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_disks import KINDS, small_disk, used_bytes
from torch import Tensor, nn
from torture.folders import Disk

import speedswap
from speedswap.batching import AccumulatingOptimizer
from speedswap.errors import TableFullError
from speedswap.losses import full_softmax

ROWS, BATCH = 3000, 200


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with small_disk(request.param, tmp_path, 80 << 20) as mounted:
        yield mounted


class Training(NamedTuple):
    """A model, its tables and the optimizers that step it, in this order."""

    model: nn.Module
    tables: list[speedswap.Table]
    optimizers: list[Any]
    loss: Callable[[Tensor], Tensor]


def places_in(disk: Disk | None) -> Callable[[str], dict[str, Any]]:
    """Return the arguments that put a table on a disk, or in memory without one."""

    def place(name: str) -> dict[str, Any]:
        if disk is None:
            return {}
        return {"storage": speedswap.Disk(disk.path / name, commit_every=1, cache_bytes=1 << 16)}

    return place


def two_embeddings(place: Callable[[str], dict[str, Any]]) -> tuple[nn.ModuleList, list[speedswap.Table], Any]:
    torch.manual_seed(0)
    tables = [speedswap.Embedding(ROWS, width, seed=width, **place(str(width))) for width in (16, 64)]
    model = nn.ModuleList([*tables, nn.Linear(80, 1)])

    def loss(ids: Tensor) -> Tensor:
        return model[2](torch.cat([embedding(ids) for embedding in tables], dim=1)).square().sum()

    return model, [each.table for each in tables], loss


def one_optimizer(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, loss = two_embeddings(place)
    return Training(model, tables, [torch.optim.Adam(model.parameters(), lr=0.1)], loss)


def idle_rows(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, loss = two_embeddings(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    speedswap.attach(optimizer, model, idle_rows="dense")
    return Training(model, tables, [optimizer], loss)


def accumulating(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, loss = two_embeddings(place)
    return Training(model, tables, [AccumulatingOptimizer(torch.optim.Adam(model.parameters()), 1)], loss)


def an_optimizer_each(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, loss = two_embeddings(place)
    return Training(model, tables, [torch.optim.Adam(each.parameters(), lr=0.1) for each in model], loss)


def dense_half_first(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, loss = two_embeddings(place)
    parts = [model[2].parameters(), model[:2].parameters()]
    return Training(model, tables, [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in parts], loss)


def collection(place: Callable[[str], dict[str, Any]]) -> Training:
    torch.manual_seed(0)
    configs = [
        speedswap.EmbeddingConfig(num_embeddings=ROWS, embedding_dim=width, name=name, feature_names=[name])
        for name, width in (("a", 64), ("b", 64), ("c", 16))
    ]
    tables = speedswap.EmbeddingCollection(configs, **place("collection"))
    model = nn.ModuleList([tables, nn.Linear(144, 1)])

    def loss(ids: Tensor) -> Tensor:
        found = tables(dict.fromkeys(("a", "b", "c"), ids))
        return model[1](torch.cat([each.values() for each in found.values()], dim=-1)).square().sum()

    each = [tables.tables[name] for name in ("a", "b", "c")]
    return Training(model, each, [torch.optim.Adam(model.parameters(), lr=0.1)], loss)


def softmax_over_all_rows(place: Callable[[str], dict[str, Any]]) -> Training:
    model, tables, _ = two_embeddings(place)

    def loss(ids: Tensor) -> Tensor:
        hidden = model[1](ids) * model[2].weight[0, 16:]
        return full_softmax(hidden, ids, model[1], chunk=512).sum()

    model[0].weight.requires_grad_(False)
    return Training(model, tables, [torch.optim.SGD(model.parameters(), lr=0.1)], loss)


KINDS_OF_TRAINING = [one_optimizer, idle_rows, accumulating, an_optimizer_each, dense_half_first, collection]
KINDS_OF_TRAINING += [softmax_over_all_rows]


def step(training: Training, number: int, *, with_closure: bool = False) -> None:
    ids = torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(number))

    def closure() -> Tensor:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss = training.loss(ids)
        loss.backward()
        return loss

    if with_closure:
        training.optimizers[0].step(closure)
        return
    closure()
    for optimizer in training.optimizers:
        optimizer.step()


def state_of(training: Training) -> list[Tensor]:
    """Return rows, dense parameters and all state of the optimizers."""
    found = [table.read() for table in training.tables]
    found += [each.detach().clone() for each in training.model[-1].parameters()]  # type: ignore[index]
    for optimizer in training.optimizers:
        for state in optimizer.state_dict()["state"].values():
            found += [torch.as_tensor(value).clone() for _, value in sorted(state.items()) if value is not None]
    return found


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("make", KINDS_OF_TRAINING)
def test_a_step_that_finds_no_room_moves_nothing(
    make: Callable[[Callable[[str], dict[str, Any]]], Training], with_closure: bool, disk: Disk
) -> None:
    """Neither a table, nor the dense half, nor any optimizer; the batch is repeated once there is room."""
    training, in_memory = make(places_in(disk)), make(places_in(None))
    with_closure &= len(training.optimizers) == 1
    for number in (1, 2):
        step(training, number, with_closure=with_closure)
        step(in_memory, number, with_closure=with_closure)
    disk.fill(8192)
    number = 3
    with pytest.raises(TableFullError):  # noqa: PT012
        while True:
            step(training, number, with_closure=with_closure)
            step(in_memory, number, with_closure=with_closure)
            number += 1
    assert are_equal(state_of(training), state_of(in_memory))
    disk.make_room()
    for again in (number, number + 1):
        step(training, again, with_closure=with_closure)
        step(in_memory, again, with_closure=with_closure)
    assert are_equal(state_of(training), state_of(in_memory))
    for table in training.tables:
        table.close()


def test_a_step_can_be_taken_again_with_the_same_gradient(disk: Disk) -> None:
    training, in_memory = one_optimizer(places_in(disk)), one_optimizer(places_in(None))
    disk.fill(8192)
    number = 1
    with pytest.raises(TableFullError):  # noqa: PT012
        while True:
            step(training, number)
            step(in_memory, number)
            number += 1
    disk.make_room()
    training.optimizers[0].step()
    step(in_memory, number)
    assert are_equal(state_of(training), state_of(in_memory))
    for table in training.tables:
        table.close()


@pytest.mark.parametrize("commit", [{"commit_every": 1}, {"commit_seconds": 0}])
def test_a_step_whose_id_map_finds_no_room_in_its_commit_moves_nothing(disk: Disk, commit: dict[str, Any]) -> None:
    """The rows have room, and the new keys have not."""

    def training(place: dict[str, Any]) -> tuple[nn.ModuleList, Any]:
        torch.manual_seed(0)
        users = speedswap.Embedding(200_000, 4, id_map=speedswap.IdMap(199_999), **place)
        model = nn.ModuleList([users, nn.Linear(4, 1)])
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.ModuleList, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        keys = torch.arange(number * 2000, number * 2000 + 2000)
        model[1](model[0](keys)).square().sum().backward()
        optimizer.step()

    ours = training({"storage": speedswap.Disk(disk.path / "t", cache_bytes=1 << 24, **commit)})
    theirs = training({})
    table = ours[0][0].table
    train(*ours, 0)
    train(*theirs, 0)
    room = table.store.files.log.make_room(200_000)  # of the rows
    disk.fill(8192)
    number = 1
    with pytest.raises(TableFullError):  # noqa: PT012
        while True:
            train(*ours, number)
            train(*theirs, number)
            number += 1
    room.release()
    assert torch.equal(table.read(), theirs[0][0].table.read())
    assert torch.equal(ours[0][1].weight, theirs[0][1].weight)
    disk.make_room()
    for again in (number, number + 1):
        train(*ours, again)
        train(*theirs, again)
    table.close()
    with speedswap.Table.open(disk.path / "t") as opened:
        assert opened.id_map is not None
        assert len(opened.id_map) == (number + 2) * 2000
        assert torch.equal(opened.read(), theirs[0][0].table.read())


def test_a_switcher_finds_room_before_the_model_is_stepped(disk: Disk) -> None:
    """Rows and state are in two collections, which are written after the optimizer's step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1, 64), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    places = [speedswap.Disk(disk.path / name, commit_every=1, cache_bytes=1 << 16) for name in ("rows", "state")]
    rows = speedswap.ModelFactory(model[0], ROWS, 64, storage=places[0])
    rows.normalDistributionInit(0, 1)
    state = speedswap.OptimizerFactory(optimizer, ROWS, 64, model, "0", storage=places[1])
    state.optInit()

    def train(number: int) -> None:
        ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(number))[:BATCH]
        optimizer.zero_grad()
        rows.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        model(torch.arange(BATCH)).square().sum().backward()
        optimizer.step()
        rows.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)

    train(1)
    disk.fill(8192)
    with pytest.raises(TableFullError):  # noqa: PT012
        for number in range(2, 1000):
            before = [rows.table.read(), state.table.read(), model[1].weight.detach().clone()]
            train(number)
    assert are_equal(before, [rows.table.read(), state.table.read(), model[1].weight])
    disk.make_room()
    train(number)
    rows.table.close()
    state.table.close()


# ---------------------------------------------------------------------------- whole tables

MANY = 500_000  # of which the disk has room for a few
WHOLE = torch.ones(1, 64).expand(MANY, 64)

FILLS: dict[str, Callable[[speedswap.Embedding, Any, Path], object]] = {
    "load_state_dict": lambda items, _, __: items.load_state_dict({"weight": WHOLE}),
    "optimizer.load_state_dict": lambda _, optimizer, __: optimizer.load_state_dict(
        {
            **optimizer.state_dict(),
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": WHOLE, "exp_avg_sq": WHOLE}},
        }
    ),
    "write": lambda items, _, __: items.table.write(0, WHOLE),
    "scatter": lambda items, _, __: items.table.scatter(torch.arange(MANY), WHOLE),
    "copy_": lambda items, _, __: items.weight.data.copy_(WHOLE),
    "a range": lambda items, _, __: items.weight.data[1 : MANY - 1].copy_(WHOLE[2:]),
    "fill_": lambda items, _, __: items.weight.data.fill_(2.0),
    "mul_": lambda items, _, __: items.weight.data.mul_(2.0),
    "init": lambda items, _, __: nn.init.normal_(items.weight),
    "reset": lambda items, _, __: items.table.reset_rows(torch.arange(MANY)),
    "columns": lambda items, _, __: items.table.add_columns(
        [speedswap.Column("late", (64,), torch.float32, speedswap.init.from_torch(nn.init.trunc_normal_))]
    ),
    "from_pretrained": lambda _, __, path: speedswap.Embedding.from_pretrained(WHOLE, path=path / "new"),
    "convert": lambda _, __, path: speedswap.convert(
        nn.Sequential(nn.Embedding.from_pretrained(WHOLE)), path=path / "new", min_rows=1
    ),
    "export": lambda items, _, path: items.table.export(path / "new.npy"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fill", FILLS)
def test_what_has_no_room_leaves_rows_and_the_disk_as_they_were(fill: str, disk: Disk) -> None:
    path, ids = disk.path / "t", torch.arange(0, MANY, 50_000)
    items = speedswap.Embedding(MANY, 64, storage=speedswap.Disk(path, cache_bytes=1 << 20))
    optimizer = torch.optim.Adam(items.parameters())
    for _ in range(2):
        items(ids).sum().backward()
        optimizer.step()
    items.table.flush()
    rows, before = items.table.gather(ids), used_bytes(disk)
    names = sorted(os.listdir(disk.path))
    with pytest.raises(TableFullError):
        FILLS[fill](items, optimizer, disk.path)
    assert used_bytes(disk) == pytest.approx(before, abs=2**17)
    assert sorted(os.listdir(disk.path)) == names
    found = items.table.gather(ids)
    assert [*found.columns] == [*rows.columns]
    assert all(torch.equal(found[name], rows[name]) for name in rows.columns)
    items.table.close()
    with speedswap.Table.open(path) as table:
        assert torch.equal(table.gather(ids).weight, rows.weight)
    assert used_bytes(disk) == pytest.approx(before, abs=2**17)


def test_the_state_of_several_tables_is_loaded_into_all_or_none(disk: Disk) -> None:
    training = one_optimizer(places_in(disk))
    step(training, 1)
    whole = training.optimizers[0].state_dict()
    before = [table.read(column="exp_avg") for table in training.tables]
    for state in whole["state"].values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])
    disk.fill(2 << 20)  # enough for the narrow one
    with pytest.raises(TableFullError):
        training.optimizers[0].load_state_dict(whole)
    assert are_equal([table.read(column="exp_avg") for table in training.tables], before)
    disk.make_room()
    training.optimizers[0].load_state_dict(whole)
    assert all((table.read(column="exp_avg") == 1).all() for table in training.tables)
    for table in training.tables:
        table.close()


AS_ORDINARY_USER = """
    import os, sys, torch, speedswap
    table = speedswap.Table.create(500_000, 64, path=sys.argv[1] + "/t")
    table.write(0, torch.ones(1000, 64))
    for path, _, files in os.walk(sys.argv[1]):
        for file in (".", *files):
            os.chown(os.path.join(path, file), 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
    try:
        table.write(0, torch.ones(200_000, 64))
    except speedswap.errors.TableFullError:
        table.close()
        print("refused")
"""


def test_room_that_is_kept_from_this_user_is_given_back() -> None:
    """The disk shows more free blocks than a user may take, so that only taking them shows that they are too few."""
    with tempfile.TemporaryDirectory() as folder, small_disk("ext4", Path(folder), 80 << 20) as disk:
        Path(folder).chmod(0o755)
        device = subprocess.run(["findmnt", "-no", "SOURCE", str(disk.path)], capture_output=True, text=True).stdout
        if subprocess.run(["tune2fs", "-m", "50", device.strip()], capture_output=True).returncode:
            pytest.skip("may not keep blocks of a disk for root here")
        used = used_bytes(disk)
        command = [sys.executable, "-c", textwrap.dedent(AS_ORDINARY_USER), str(disk.path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout == "refused\n"
        assert used_bytes(disk) < used + (25 << 20)  # as the first write takes


# ---------------------------------------------------------------------------- checkpoints of sparse tables


@pytest.mark.parametrize("width", [4, 64])
def test_a_checkpoint_takes_room_for_the_rows_that_were_written_alone(tmp_path: Path, width: int) -> None:
    """Of a table far larger than its disk; rows that only the table has since written get their initial values."""
    with small_disk("tmpfs", tmp_path, 200 << 20) as disk:
        keep_checkpoints_of_a_sparse_table(disk, width)


def keep_checkpoints_of_a_sparse_table(disk: Disk, width: int) -> None:
    rows = 10**8 // width * 4
    items = speedswap.Embedding(rows, width, seed=1, storage=speedswap.Disk(disk.path / "t", cache_bytes=1 << 20))
    optimizer = torch.optim.Adam(items.parameters())
    expected = {}
    ids = [torch.randint(rows, (BATCH,), generator=torch.Generator().manual_seed(number)) for number in range(5)]
    for number in range(1, 4):
        optimizer.zero_grad()
        items(ids[number]).square().sum().backward()
        optimizer.step()
        expected[number] = items.read(torch.cat(ids)).clone()
        speedswap.save_checkpoint(disk.path / "checkpoints", items, optimizer, step=number, keep=3)
    for number in (3, 1, 2, 3):
        speedswap.load_checkpoint(disk.path / "checkpoints", items, optimizer, step=number)
        assert torch.equal(items.read(torch.cat(ids)), expected[number])
    items.table.close()
    other = speedswap.Embedding(rows, width, seed=1, path=disk.path / "other")
    with torch.no_grad():
        other.table.scatter(ids[4].unique(), torch.ones(len(ids[4].unique()), width))
    speedswap.load_checkpoint(disk.path / "checkpoints", other, torch.optim.Adam(other.parameters()), step=2)
    assert torch.equal(other.read(torch.cat(ids)), expected[2])
    other.table.close()
