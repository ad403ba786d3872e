"""A loop with lookahead gives, bit for bit, what the plain loop gives."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from children import exit_status, run_script
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import speedswap
from speedswap import kernels
from speedswap.errors import BatchError, IdError, LostUpdateError, SpeedswapWarning, TableClosedError
from speedswap.kernels.cuda import driver, engines
from speedswap.kernels.cuda.engines import Ring
from speedswap.tables import LocalStore

ROWS, DIM = 60, 5
MakeOptimizer = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def zipf(step: int, size: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (ROWS ** torch.rand(size, generator=generator)).long() - 1


def uniform(step: int, size: int = 20) -> Tensor:
    return torch.randint(ROWS, (size,), generator=torch.Generator().manual_seed(step))


def never_shared(step: int) -> Tensor:
    return torch.arange(10) + step % 6 * 10


def all_shared(step: int) -> Tensor:
    return torch.randperm(20, generator=torch.Generator().manual_seed(step))


OVERLAPS = {"zipf": zipf, "uniform": uniform, "none": never_shared, "all": all_shared}


def embedding(device: str = "cpu", **kwargs: Any) -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, seed=3, **kwargs).to(device)


def columns(items: speedswap.Embedding) -> dict[str, Tensor]:
    return {name: items.table.read(column=name) for name in items.table.columns}


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, values in plain.items():
        assert torch.equal(ours[name], values), name


def loss_of(rows: Tensor) -> Tensor:
    return (rows * torch.linspace(-1, 1, DIM, device=rows.device) - 0.3).square().sum()


def train(items: speedswap.Embedding, optimizer: Optimizer, batches: Iterable[Tensor]) -> list[float]:
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = loss_of(items(ids))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_both(
    device: str, make_optimizer: MakeOptimizer, batches: Sequence[Tensor], *, depth: int = 1, attach: bool = True
) -> tuple[tuple[list[float], dict[str, Tensor]], tuple[list[float], dict[str, Tensor]]]:
    """Return losses and table with lookahead, and without."""
    results = []
    batches = [ids.to(device) for ids in batches]
    for ahead in (True, False):
        items = embedding(device)
        optimizer = make_optimizer(items.parameters())
        if attach:
            speedswap.attach(optimizer, items)
        loop = speedswap.lookahead(batches, {items: lambda ids: ids}, depth=depth) if ahead else batches
        results.append((train(items, optimizer, loop), columns(items)))
    return results[0], results[1]


@pytest.fixture(params=["cpu-loops", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """The thread that transfers rows on the CPU; the threads that serve a GPU work without one too."""
    if request.param == "threads":
        monkeypatch.setattr(LocalStore, "_in_host_memory", lambda store, device: False)
    return str(request.param)


def test_three_literal_steps(device: str, way: str) -> None:
    items = embedding(device, init=speedswap.init.zeros())
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    batches = [torch.tensor(ids, device=device) for ids in ([0, 1], [1, 2], [1, 1])]
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):
        optimizer.zero_grad()
        items(ids).sum().backward()
        optimizer.step()
    assert items.table.read(0, 4)[:, 0].tolist() == [-1.0, -4.0, -1.0, 0.0]


@pytest.mark.sweep(45)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_and_overlap(name: str, overlap: str, device: str) -> None:
    batches = [OVERLAPS[overlap](step) for step in range(12)] + [uniform(99, size=7)]
    (losses, table), (plain_losses, plain_table) = by_both(device, OPTIMIZERS[name], batches)
    assert losses == plain_losses
    assert_same(table, plain_table)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "attaches-itself"])
def test_any_depth(depth: int, attach: bool, device: str, way: str) -> None:
    batches = [zipf(step) for step in range(20)]
    (losses, table), plain = by_both(device, OPTIMIZERS["adam"], batches, depth=depth, attach=attach)
    assert losses == plain[0]
    assert_same(table, plain[1])


@given(
    batches=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=12), max_size=8),
    depth=st.integers(1, 4),
    name=st.sampled_from(["sgd-momentum", "adagrad", "adam"]),
)
def test_any_batches(batches: list[list[int]], depth: int, name: str) -> None:
    ids = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
    (losses, table), plain = by_both("cpu", OPTIMIZERS[name], ids, depth=depth)
    assert losses == plain[0]
    assert_same(table, plain[1])


@pytest.mark.parametrize("storage", ["pageable", "pinned", "device", "disk", "small cache"])
@pytest.mark.filterwarnings("ignore:SW405:speedswap.errors.SpeedswapWarning")
def test_every_storage(storage: str, device: str, way: str, tmp_path: Path) -> None:
    plain = embedding(device)
    on_disk = {"disk": None, "small cache": 1}
    if storage in on_disk:
        ours = embedding(device, storage=speedswap.Disk(tmp_path / "table", cache_bytes=on_disk[storage]))
    else:
        ours = embedding(device, storage=storage)
    for items, ahead in ((ours, True), (plain, False)):
        optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
        speedswap.attach(optimizer, items)
        batches = [zipf(step).to(device) for step in range(10)]
        train(items, optimizer, speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches)
    assert_same(columns(ours), columns(plain))
    ours.table.close()


class Ratings(nn.Module):
    """Two tables, one of them asked twice a batch, and a layer that is torch's own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.users, self.items = embedding(device), embedding(device)
        self.layer = nn.Linear(2 * DIM, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)
        self.to(device)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        liked = self.layer(torch.cat([self.users(batch["user"]), self.items(batch["liked"])], dim=1))
        other = self.layer(torch.cat([self.users(batch["user"]), self.items(batch["other"])], dim=1))
        return nn.functional.softplus(other - liked).sum()

    def tables(self) -> dict[str, Tensor]:
        both = {"users": columns(self.users), "items": columns(self.items)}
        return {f"{side}.{name}": values for side, found in both.items() for name, values in found.items()}

    def ids_of(self) -> dict[Any, Any]:
        return {self.users: lambda b: b["user"], self.items: lambda b: [b["liked"], b["other"]]}


def rating_batches(device: str, steps: int = 12) -> list[dict[str, Tensor]]:
    sizes = [16] * (steps - 1) + [5]
    names = ("user", "liked", "other")
    return [
        {name: zipf(10 * step + place, size).to(device) for place, name in enumerate(names)}
        for step, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_lookups_and_accumulation(accumulate: int, set_to_none: bool, device: str, way: str) -> None:
    found = []
    for ahead in (True, False):
        model = Ratings(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        speedswap.attach(optimizer, model)
        batches = rating_batches(device)
        for step, batch in enumerate(speedswap.lookahead(batches, model.ids_of()) if ahead else batches):
            model(batch).backward()
            if (step + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        found.append(model.tables())
    assert_same(*found)


def test_two_steps_in_one_batch(device: str, way: str) -> None:
    found = []
    for ahead in (True, False):
        items = embedding(device)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.05)
        batches = [zipf(step).to(device) for step in range(8)]
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches:
            for _ in range(2):
                train(items, optimizer, [ids])
        found.append(columns(items))
    assert_same(*found)


def test_a_closure_is_looked_up_again(device: str) -> None:
    found = []
    for ahead in (True, False):
        items = embedding(device)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.05)
        batches = [zipf(step).to(device) for step in range(8)]
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches:

            def closure(ids: Tensor = ids, items: Any = items, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(items(ids))
                loss.backward()
                return loss

            optimizer.step(closure)
        found.append(columns(items))
    assert_same(*found)


def test_evaluation_in_between(device: str, way: str) -> None:
    """Without gradients any ids may be looked up, prefetched or not, and see every completed step."""
    seen: list[list[Tensor]] = []
    for ahead in (True, False):
        items = embedding(device)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.05)
        batches = [zipf(step).to(device) for step in range(8)]
        looks = []
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches:
            with torch.no_grad():
                looks.append(items(ids))
            train(items, optimizer, [ids])
            with torch.no_grad():
                looks += [items(torch.arange(ROWS, device=device)), items(ids)]
            looks.append(items.table.gather(torch.arange(ROWS)).weight)
            looks.append(items.state_dict()["weight"])
        seen.append(looks)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_ids_that_were_not_prefetched_are_right_and_warned_of_once(
    device: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedswap._words._said", set())
    found = []
    for ahead in (True, False):
        items = embedding(device)
        optimizer = torch.optim.Adam(items.parameters(), lr=0.05)
        speedswap.attach(optimizer, items)
        batches = [zipf(step).to(device) for step in range(6)]
        others = [uniform(step).to(device) for step in range(6)]
        loop = speedswap.lookahead(batches, {items: lambda ids: ids}) if ahead else batches

        def body(loop: Iterable[Tensor] = loop, others: list[Tensor] = others, items: Any = items) -> Iterator[Tensor]:
            for ids, other in zip(loop, others, strict=True):
                yield loss_of(items(ids)) + loss_of(items(other))

        def run(body: Callable[[], Iterator[Tensor]] = body, optimizer: Optimizer = optimizer) -> None:
            for loss in body():
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        if ahead:
            with pytest.warns(SpeedswapWarning, match="without having been announced to the lookahead") as warned:
                run()
            assert len(warned) == 1
        else:
            run()
        found.append(columns(items))
    assert_same(*found)


def test_ids_that_change_after_they_were_prefetched(device: str) -> None:
    items = embedding(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    before = items.table.read()
    batches = [torch.tensor([1, 2], device=device), torch.tensor([3, 4], device=device)]

    def changing() -> Iterator[Tensor]:
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):
            batches[1].fill_(7)
            yield ids

    with pytest.raises(BatchError, match="changed before its turn"):
        train(items, optimizer, changing())
    changed = (items.table.read() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equal_ids_in_another_tensor_are_the_prefetched_ones(dtype: torch.dtype, device: str) -> None:
    items = embedding(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    batches = [zipf(step).view(4, 5) for step in range(4)]
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):  # a warning would be an error
        train(items, optimizer, [ids.to(device, dtype).flatten()])


def test_a_table_that_is_written_in_between(device: str, way: str) -> None:
    found = []
    for ahead in (True, False):
        items = embedding(device)
        optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
        batches = [zipf(step).to(device) for step in range(9)]
        for step, ids in enumerate(
            speedswap.lookahead(batches, {items: lambda ids: ids}, depth=2) if ahead else batches
        ):
            if step == 3:
                items.table.write(0, torch.ones(5, DIM))
            if step == 5:
                items.table.scatter(torch.tensor([2, 0]), torch.full((2, DIM), 2.0))
            if step == 7:
                items.table.view()[:4] = 3.0
            train(items, optimizer, [ids])
        found.append(columns(items))
    assert_same(*found)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["loader", "ids", "body", "backward", "after step", "break"])
def test_stopping_anywhere_keeps_every_completed_step(
    place: str, error: type[BaseException], device: str, way: str
) -> None:
    """The loop is stopped in step 4: the table is that of four steps, and trains on."""

    def loader(here: bool) -> Iterator[Tensor]:
        for step in range(8):
            if here and place == "loader" and step == 4:
                raise error
            yield zipf(step).to(device)

    def ids_of(ids: Tensor) -> Tensor:
        if place == "ids" and torch.equal(ids.cpu(), zipf(4)):
            raise error
        return ids

    def stop(at: str, step: int) -> None:
        if at == place and step == 4:
            raise error

    items, plain = embedding(device), embedding(device)
    optimizer, plain_optimizer = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (items, plain))
    speedswap.attach(optimizer, items)
    speedswap.attach(plain_optimizer, plain)
    completed = 0
    try:
        for step, ids in enumerate(speedswap.lookahead(loader(True), {items: ids_of})):
            if place == "break" and step == 4:
                break
            stop("body", step)
            optimizer.zero_grad()
            loss = loss_of(items(ids))
            stop("backward", step)
            loss.backward()
            optimizer.step()
            completed += 1
            stop("after step", step)
    except error:
        pass
    else:
        assert place == "break"
    early = issubclass(error, KeyboardInterrupt) and place in ("loader", "ids")  # Ctrl-C does not wait for its turn
    assert completed == (5 if place == "after step" else 3 if early else 4)
    train(plain, plain_optimizer, [zipf(step).to(device) for step in range(completed)])
    assert_same(columns(items), columns(plain))
    if place == "backward":
        optimizer.zero_grad()
    for module, its_optimizer in ((items, optimizer), (plain, plain_optimizer)):
        train(module, its_optimizer, [zipf(step).to(device) for step in range(20, 24)])
    assert_same(columns(items), columns(plain))


def test_an_id_out_of_range_is_an_error_in_its_own_step(device: str, way: str) -> None:
    items, plain = embedding(device), embedding(device)
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (items, plain))
    batches = [zipf(0).to(device), torch.tensor([3, ROWS], device=device), zipf(2).to(device)]
    with pytest.raises(IdError, match=rf"ids\[1\] is {ROWS}"):
        train(items, optimizer, speedswap.lookahead(batches, {items: lambda ids: ids}))
    train(plain, plain_optimizer, batches[:1])
    assert_same(columns(items), columns(plain))


def test_clamping_the_weight_after_a_step_clamps_the_table(device: str) -> None:
    """As in the plain loop, though the next rows are on their way already and the last ones may not be written yet."""
    found = []
    for depth in (0, 1):
        items = embedding(device)
        optimizer = torch.optim.SGD(items.parameters(), lr=0.05)
        batches = [zipf(number).to(device) for number in range(3)]

        def clamping(items: speedswap.Embedding, batches: list[Tensor], depth: int) -> Iterator[Tensor]:
            for ids in speedswap.lookahead(batches, {items: lambda ids: ids}, depth=depth):
                yield ids
                items.weight.data.clamp_(-0.1, 0.1)

        train(items, optimizer, clamping(items, batches, depth))
        assert items.table.read().abs().max() == 0.1
        found.append(columns(items))
    assert_same(*found)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_loop_held_is_free_when_it_ends(depth: int, fails: bool) -> None:
    """Without the garbage collector: a model may hold most of a machine's memory."""

    def loop(batches: list[Tensor]) -> weakref.ref[nn.Module]:
        model = speedswap.Embedding(20, 2)
        with suppress(IdError):
            for batch in speedswap.lookahead(batches, {model: lambda batch: batch}, depth=depth):
                model(batch)
        return weakref.ref(model)

    batches = [*[torch.tensor([1, 2])] * 3, *[torch.tensor([20])] * fails]
    gc.collect()
    gc.disable()
    try:
        assert loop(batches)() is None
    finally:
        gc.enable()


def test_a_change_of_the_rows_behind_torchs_back_is_an_error(device: str) -> None:
    """By a C++ extension, say, that knows nothing of torch functions."""
    items = embedding(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.05)

    def clamping() -> Iterator[Tensor]:
        for ids in speedswap.lookahead([zipf(0).to(device), zipf(1).to(device)], {items: lambda ids: ids}):
            yield ids
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
                items.weight.clamp_(-0.1, 0.1)

    with pytest.raises(LostUpdateError, match="changed on the device after the optimizer's step"):
        train(items, optimizer, clamping())


def test_closing_and_saving_inside_the_loop(device: str, way: str, tmp_path: Path) -> None:
    items = embedding(device, path=tmp_path / "table")
    optimizer = torch.optim.Adam(items.parameters(), lr=0.05)
    saved = []

    def saving() -> Iterator[Tensor]:
        batches = [zipf(step).to(device) for step in range(6)]
        for step, ids in enumerate(speedswap.lookahead(batches, {items: lambda ids: ids})):
            yield ids
            items.table.save(tmp_path / "copy", overwrite=True)
            with speedswap.Table.open(tmp_path / "copy", mode="r") as copy:
                saved.append(copy.read())
            assert torch.equal(saved[-1], items.table.read())
            if step == 3:
                items.table.close()

    with pytest.raises(TableClosedError):
        train(items, optimizer, saving())
    assert len(saved) == 4
    with speedswap.Table.open(tmp_path / "table", mode="r") as table:
        assert torch.equal(table.read(), saved[-1])


def test_rows_behind_the_last_step_are_written_when_the_process_ends(tmp_path: Path) -> None:
    program = f"""
    import torch, speedswap
    items = speedswap.Embedding(50_000, 64, path={str(tmp_path / "table")!r}, init=speedswap.init.zeros())
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    loop = iter(speedswap.lookahead([torch.arange(50_000)] * 2, {{items: lambda ids: ids}}))
    ids = next(loop)
    items(ids).sum().backward()
    optimizer.step()
    """
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    with speedswap.Table.open(tmp_path / "table", mode="r") as table:
        assert bool((table.read() == -1).all())


def test_worker_processes_of_a_data_loader() -> None:
    items, plain = embedding(), embedding()
    batches = [zipf(step) for step in range(8)]
    for module, ahead in ((items, True), (plain, False)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        loader = DataLoader(batches, batch_size=None, num_workers=1)
        train(module, optimizer, speedswap.lookahead(loader, {module: lambda ids: ids}) if ahead else loader)
    assert_same(columns(items), columns(plain))


def test_the_loop_may_be_run_again_and_knows_its_length() -> None:
    items, plain = embedding(), embedding()
    batches = [zipf(step) for step in range(5)]
    loop = speedswap.lookahead(batches, {items: lambda ids: ids})
    assert len(loop) == 5
    for module, epochs in ((items, [loop, loop]), (plain, [batches, batches])):
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.05)
        for epoch in epochs:
            train(module, optimizer, epoch)
    assert_same(columns(items), columns(plain))


def test_what_is_wrong_with_the_arguments_is_said() -> None:
    items = embedding()
    with pytest.raises(TypeError, match="loader is an int"):
        speedswap.lookahead(3, {items: lambda ids: ids})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ids is empty"):
        speedswap.lookahead([], {})
    with pytest.raises(TypeError, match="a key of ids is a Linear"):
        speedswap.lookahead([], {nn.Linear(1, 1): lambda ids: ids})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="give a function"):
        speedswap.lookahead([], {items: "ids"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="depth is -1"):
        speedswap.lookahead([], {items: lambda ids: ids}, depth=-1)
    with pytest.raises(TypeError, match=r"ids has dtype torch\.float32"):
        next(iter(speedswap.lookahead([torch.ones(2)], {items: lambda ids: ids})))


def test_child_forked_while_rows_are_written_is_refused_until_it_opens_the_table_itself() -> None:
    """They never arrive in the child; it does not take the old ones for the table's, however often it asks."""
    rows = 100_000  # enough that the write takes longer than the fork
    items = speedswap.Embedding(rows, 64, storage="pageable", init=speedswap.init.zeros())
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    every, outcomes = torch.arange(rows), set()
    for step, ids in enumerate(speedswap.lookahead([every, every, every], {items: lambda ids: ids})):
        optimizer.zero_grad()
        (-items(ids).sum()).backward()
        optimizer.step()  # adds 1 to every value
        outcomes.add(exit_status(functools.partial(are_found, items, step + 1.0)))
    assert outcomes <= {0, 1}  # found, refused
    assert torch.equal(items.table.read(), torch.full((rows, 64), 3.0))


def are_found(items: speedswap.Embedding, now: float) -> bool:
    """Look rows up in three ways: return whether all return current values, or all are refused."""
    ids = torch.tensor([0, len(items.table) - 1])
    ways = [
        lambda: items.table.gather(ids).weight,
        lambda: items(ids),
        lambda: next(iter(speedswap.lookahead([ids], {items: lambda ids: ids})), None) is not None and items(ids),
        lambda: items.table.gather(ids).weight,
    ]
    outcomes = set()
    with torch.no_grad():
        for look_up in ways:
            try:
                assert (look_up() == now).all()
                outcomes.add(True)
            except TableClosedError:
                outcomes.add(False)
    (outcome,) = outcomes
    return outcome


def test_a_pending_write_that_fails_is_an_error_at_the_latest_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps come after it."""
    monkeypatch.setattr(LocalStore, "_in_host_memory", lambda store, device: False)
    scatter, calls = kernels.scatter_blocks, []

    def fails_once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room for a staging buffer")
        scatter(*arguments)

    items = embedding("cpu")
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    monkeypatch.setattr(kernels, "scatter_blocks", fails_once)
    steps = []

    def loop() -> None:
        for ids in speedswap.lookahead([zipf(step) for step in range(6)], {items: lambda ids: ids}):
            optimizer.zero_grad()
            items(ids).sum().backward()
            optimizer.step()
            kernels.finish_transfers()
            steps.append(ids)

    with pytest.raises(MemoryError, match="no room for a staging buffer"):
        loop()
    assert len(steps) == 6


@pytest.mark.parametrize("engine", ["auto", "staged"])
def test_a_gpu_has_a_queue_for_every_stream(engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the computation's queue: with more than 8, independent streams would share one."""
    if device != "cuda":
        pytest.skip("is about a GPU")
    made: dict[tuple[int, str], torch.cuda.Stream] = {}
    monkeypatch.setattr(driver, "_streams", made)
    rings = functools.cache(Ring)
    monkeypatch.setattr(engines, "ring", rings)
    items = embedding(device, storage=speedswap.Pinned(engine))
    optimizer = torch.optim.Adam(items.parameters(), lr=0.01)
    speedswap.attach(optimizer, items)
    batches = [uniform(step).to(device) for step in range(5)]
    train(items, optimizer, speedswap.lookahead(batches, {items: lambda ids: ids}))
    torch.cuda.synchronize()
    assert len(made) == {"auto": 3, "staged": 7}[engine]


class PreparedLoader(list[Any]):
    """A loader as accelerate's ``prepare`` returns it."""

    def __init__(self, num_steps: int, sync_with_dataloader: bool) -> None:
        super().__init__([torch.tensor([1])])
        self.gradient_state = SimpleNamespace(num_steps=num_steps, sync_with_dataloader=sync_with_dataloader)


def test_a_loader_that_ends_windows_by_its_last_batch_is_refused() -> None:
    """It would end them a batch early, and leave the last batch's gradients to the next epoch."""
    items = speedswap.Embedding(10, 2)
    ids = {items: lambda batch: batch}
    with pytest.raises(ValueError, match=r"GradientAccumulationPlugin\(num_steps=2, sync_with_dataloader=False\)"):
        speedswap.lookahead(PreparedLoader(2, True), ids)
    for loader, depth in ((PreparedLoader(2, False), 1), (PreparedLoader(1, True), 1), (PreparedLoader(2, True), 0)):
        assert len(list(speedswap.lookahead(loader, ids, depth=depth))) == 1


# ---------------------------------------------------------------------- loaders that fill the same memory again


def refilled(kind: str) -> Iterator[Any]:
    """Yield five batches of ids in the same memory, which each later one overwrites."""
    buffer = np.zeros(6, np.int64)
    tensor = torch.from_numpy(buffer)
    for k in range(5):
        if kind == "copy_":
            tensor.copy_(torch.arange(6) + k)
        else:
            buffer[:] = np.arange(6) + k
        yield buffer if kind == "array" else tensor


def bags() -> Any:
    configs = [speedswap.EmbeddingBagConfig(name="a", num_embeddings=64, embedding_dim=4)]
    return speedswap.EmbeddingBagCollection(configs)


def keyed_batch(ids: Tensor) -> Any:
    return speedswap.KeyedJaggedTensor(["a"], ids, lengths=torch.ones(6, dtype=torch.int64))


OVERWRITTEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "ids": (lambda: speedswap.Embedding(64, 4), lambda ids: ids),
    "a view": (lambda: speedswap.EmbeddingBag(64, 4), lambda ids: ids.view(3, 2)),
    "features": (bags, lambda ids: {"a": ids}),
    "a keyed batch": (bags, keyed_batch),
    "keys": (lambda: speedswap.Embedding(64, 4, id_map=speedswap.IdMap(64)), lambda ids: ids),
    "keys of an array": (lambda: speedswap.Embedding(64, 4, id_map=speedswap.IdMap(64)), lambda ids: ids),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["copy_", "numpy"])
@pytest.mark.parametrize("given", OVERWRITTEN)
def test_ids_that_the_loader_overwrites_before_their_turn_are_an_error(given: str, kind: str, depth: int) -> None:
    make, form = OVERWRITTEN[given]
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tables = [each.table for each in module.modules() if isinstance(getattr(each, "table", None), speedswap.Table)]
    before = [table.read() for table in tables]
    source = refilled("array" if given == "keys of an array" else kind)

    def train() -> None:
        for batch in speedswap.lookahead(source, {module: form}, depth=depth):
            out = module(form(batch))
            (out if isinstance(out, Tensor) else out.values()).sum().backward()
            optimizer.step()

    with pytest.raises(BatchError, match=r"overwrote a tensor.*yield new tensors \(buffer.clone\(\)\)"):
        train()
    assert all(torch.equal(table.read(), rows) for table, rows in zip(tables, before, strict=True))
    if getattr(module, "id_map", None) is not None:
        assert len(module.id_map) == 0


def test_ids_that_change_in_their_turn_are_looked_up_as_they_are() -> None:
    """As where items are masked just before the forward pass."""
    ends = []
    for ahead in (True, False):
        module = speedswap.Embedding(64, 4, seed=0)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        loader: Iterable[Tensor] = [torch.arange(6) + k for k in range(5)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpeedswapWarning)
            for ids in speedswap.lookahead(loader, {module: lambda ids: ids}) if ahead else loader:
                ids[::2] = 63
                module(ids).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(module.read())
    assert torch.equal(*ends)


WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)


@pytest.mark.parametrize("looked_up", [*WHOLE, torch.uint64, torch.float32, torch.bool])
@pytest.mark.parametrize(
    ("announced", "keyed"), [(torch.int32, False), (torch.int64, False), *((each, True) for each in WHOLE)]
)
def test_a_lookup_in_another_dtype_than_announced_is_that_of_the_plain_loop(
    announced: torch.dtype, looked_up: torch.dtype, keyed: bool
) -> None:
    """The least value that one of the two dtypes cannot hold, and small ones."""
    shifts = [0, 2**8, 2**16, 2**32]
    for shift in shifts:
        ends = []
        for ahead in (True, False):
            module = speedswap.Embedding(50, 2, seed=0, id_map=speedswap.IdMap(50) if keyed else None)
            ids = torch.tensor([1, 2])
            loop: Iterable[Tensor] = [ids]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SpeedswapWarning)
                for batch in speedswap.lookahead([ids], {module: lambda ids: ids.to(announced)}) if ahead else loop:
                    try:
                        out: object = module((batch + shift).to(looked_up)).tolist()
                    except (TypeError, speedswap.errors.IdError) as error:
                        out = type(error)
            every = torch.tensor([*range(3), *(each + k for k in (1, 2) for each in shifts[1:])])
            ends.append((out, module.id_map.lookup(every).tolist() if module.id_map is not None else None))
        assert ends[0] == ends[1], shift


def test_the_number_of_an_epoch_goes_to_the_loader() -> None:
    """From transformers' Trainer, whose resumed runs have the order of their epoch."""

    class Loader(list[torch.Tensor]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader, items = Loader([torch.tensor([1])]), speedswap.Embedding(10, 2)
    speedswap.lookahead(loader, {items: lambda ids: ids}).set_epoch(3)
    assert loader.epoch == 3
    speedswap.lookahead([torch.tensor([1])], {items: lambda ids: ids}).set_epoch(3)  # takes none
