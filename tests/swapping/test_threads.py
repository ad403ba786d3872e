"""Modules in several threads: each trains its own, others look up meanwhile, and no step is lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import speedswap
from speedswap._process import all_held
from speedswap.errors import ThreadError
from speedswap.swapping.checkpoints import loading
from speedswap.swapping.checkpoints.files import NewFiles
from speedswap.tables.rows_file import save_rows


def in_threads(*functions: Callable[[], object]) -> None:
    """Run functions concurrently, one thread per function; raise the first error."""
    start, errors = threading.Barrier(len(functions)), list[BaseException]()

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait(60)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_threads_with_modules_of_their_own_lose_no_step(name: str):
    """An optimizer's first step, in which it is examined, does not keep another thread's step from its table."""

    def train(twin: torch.nn.Module, module: torch.nn.Module, steps: int) -> None:
        for each in (module, twin):
            optimizer = getattr(torch.optim, name)(each.parameters(), lr=0.1)
            for step in range(steps):
                optimizer.zero_grad()
                each(torch.arange(5)).square().sum().mul(step + 1).backward()
                optimizer.step()

    for seed in range(25):
        pairs = []
        for i in range(4):
            torch.manual_seed(10 * seed + i)
            values = torch.randn(5, 3)
            pairs.append((torch.nn.Embedding.from_pretrained(values.clone(), freeze=False),
                          speedswap.Embedding.from_pretrained(values, freeze=False)))  # fmt: skip
        in_threads(*[lambda pair=pair: train(*pair, steps=3) for pair in pairs])
        for twin, module in pairs:
            assert torch.equal(module.read(), twin.weight)


def test_examining_optimizers_in_several_threads_leaves_the_random_generator_alone():
    """After two probes at once the process draws the numbers that it would have drawn without them."""
    modules = [speedswap.Embedding(10, 4) for _ in range(6)]
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    in_threads(*[lambda m=m, o=o: speedswap.attach(o, m) for m, o in zip(modules, optimizers, strict=True)])
    assert torch.equal(torch.rand(3), expected)


def test_a_thread_that_trains_a_module_inside_anothers_step_is_refused_and_undoes_nothing():
    """While a thread is in optimizer.step(), forward, backward and step of another raise, and change nothing."""
    module = speedswap.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        slow = False

        def step(self, closure=None):
            if self.slow:
                inside.set()
                assert go_on.wait(60)
            return super().step(closure)

    optimizer = Slow(module.parameters(), lr=1.0)
    speedswap.attach(optimizer, module)
    begun = module(torch.tensor([2])).sum()
    module(torch.tensor([1])).sum().backward()
    Slow.slow = True
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(optimizer.step)
        assert inside.wait(60)
        try:
            for train in (lambda: module(torch.tensor([3])), begun.backward, optimizer.step):
                with pytest.raises(ThreadError, match="inside its optimizer's step in another thread"):
                    train()
            with torch.no_grad():
                assert module(torch.tensor([3])).tolist() == [[0.0, 0.0]]
        finally:
            go_on.set()
        step.result(60)
    assert module.read().tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    Slow.slow = False
    optimizer.zero_grad()
    module(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert module.read(3).tolist() == [-1.0, -1.0]


def two_tables_and_a_layer() -> tuple[torch.nn.ModuleList, torch.optim.Optimizer]:
    tables = [speedswap.Embedding(10, 2, seed=seed) for seed in (1, 2)]
    model = torch.nn.ModuleList([*tables, torch.nn.Linear(2, 1)])
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train_once(model: torch.nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model[2](model[0](torch.tensor([1])) + model[1](torch.tensor([2]))).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("where", ["thread", "hook"])
def test_checkpoints_are_neither_saved_nor_loaded_within_a_step(where: str, tmp_path: Path):
    """The dense half has been stepped, and the tables are about to be."""
    model, optimizer = two_tables_and_a_layer()
    train_once(model, optimizer)
    speedswap.save_checkpoint(tmp_path, model, optimizer)

    def save_and_load(*_: object) -> None:
        for call in (speedswap.save_checkpoint, speedswap.load_checkpoint):
            with pytest.raises(ThreadError, match="step of table 'table' is under way"):
                call(tmp_path, model, optimizer)

    hook = optimizer.register_step_post_hook(
        save_and_load if where == "hook" else lambda *_: in_threads(save_and_load)
    )  # called before the rows are written
    train_once(model, optimizer)
    hook.remove()
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = loaded_from(tmp_path)
    train_once(model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def loaded_from(path: Path) -> tuple[torch.nn.ModuleList, torch.optim.Optimizer]:
    model, optimizer = two_tables_and_a_layer()
    speedswap.load_checkpoint(path, model, optimizer)
    return model, optimizer


def test_a_step_of_another_thread_waits_for_a_checkpoint_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It does not reach the dense half before this is written."""
    model, optimizer = two_tables_and_a_layer()
    train_once(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    trainer, write = threading.Thread(target=train_once, args=(model, optimizer)), NewFiles.write_changed

    def write_beside_a_step(*arguments: Any) -> Any:
        trainer.start()
        trainer.join(0.3)
        return write(*arguments)

    monkeypatch.setattr(NewFiles, "write_changed", write_beside_a_step)
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    trainer.join()
    saved, _ = loaded_from(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved.state_dict().items())
    assert not torch.equal(model[0].read(), expected["0.weight"])


def test_a_step_of_another_thread_waits_for_a_checkpoint_to_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its rows and its layers are of the checkpoint."""
    model, optimizer = two_tables_and_a_layer()
    train_once(model, optimizer)
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    train_once(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    trainer, load = threading.Thread(target=train_once, args=(model, optimizer)), loading.load_dense

    def load_beside_a_step(*arguments: Any) -> None:
        trainer.start()
        trainer.join(0.3)
        load(*arguments)

    monkeypatch.setattr(loading, "load_dense", load_beside_a_step)
    speedswap.load_checkpoint(tmp_path, model, optimizer)
    trainer.join()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_is_saved_after_a_first_step_that_raised(tmp_path: Path):
    model, optimizer = two_tables_and_a_layer()
    expected = model[0].read()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        train_once(model, optimizer)
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(loaded_from(tmp_path)[0][0].read(), expected)


def test_gradients_of_one_module_from_two_threads_add_up():
    """Backward passes of several threads before one step are summed, as torch sums them in a parameter's gradient."""
    module = speedswap.Embedding.from_pretrained(torch.zeros(64, 2), freeze=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def accumulate(first: int) -> None:
        for i in range(50):
            module(torch.tensor([first, 40 + i % 8])).sum().backward()

    in_threads(*[lambda first=first: accumulate(first) for first in range(4)])
    optimizer.step()
    expected = torch.zeros(64, 2)
    expected[:4] = -50.0
    for i in range(50):
        expected[40 + i % 8] -= 4.0
    assert torch.equal(module.read(), expected)


def test_a_lookahead_in_each_of_several_threads_gives_the_rows_of_the_plain_loop():
    """Lookaheads over separate tables, in threads, train to the bits of the loop without them."""

    def train(seed: int, depth: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        batches = [torch.randint(50, (20,), generator=generator) for _ in range(15)]
        values = torch.randn(50, 4, generator=generator)
        module = speedswap.Embedding.from_pretrained(values, freeze=False)
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        for batch in speedswap.lookahead(batches, {module: lambda batch: batch}, depth=depth):
            optimizer.zero_grad()
            module(batch).square().sum().backward()
            optimizer.step()
        return module.read()

    found: dict[int, torch.Tensor] = {}
    in_threads(*[lambda seed=seed: found.update({seed: train(seed, 2)}) for seed in range(4)])
    for seed in range(4):
        assert torch.equal(found[seed], train(seed, 0))


@pytest.mark.parametrize("number", [0, 1], ids=["lookup", "backward pass"])
def test_rows_that_a_thread_writes_while_others_gather_them_are_stepped_from_there(monkeypatch, number: int):
    """A write after the rows were gathered, in the lookup or once more in the backward pass, but before either ends."""
    module = speedswap.Embedding(5, 3, seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    ids, gathers, lease = torch.tensor([1, 3]), [], speedswap.Table.lease

    def lease_before_a_write(table, *args, **settings):
        block = lease(table, *args, **settings)
        gathers.append(block)
        if len(gathers) == number + 1:
            in_threads(lambda: table.scatter(ids, torch.full((2, 3), 7.0)))
        return block

    monkeypatch.setattr(speedswap.Table, "lease", lease_before_a_write)
    rows = module(ids)
    if number:
        module.table.write(4, torch.zeros(1, 3))  # so that they are gathered once more
    rows.sum().backward()
    optimizer.step()
    assert torch.equal(module.read(ids), torch.full((2, 3), 6.5))


def test_keys_that_take_rows_while_a_step_is_written_wait_for_it(monkeypatch):
    """The step and the lookup need the same two locks."""
    id_map = speedswap.IdMap(4, evict="lru")
    module = speedswap.Embedding(4, 3, id_map=id_map, seed=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.tensor([1, 2, 3])).sum().backward()
    looked_up, give_back = [], speedswap.Table.give_back
    other = threading.Thread(target=lambda: looked_up.append(module(torch.tensor([4, 5]))), daemon=True)

    def give_back_during_a_lookup(*args, **settings):
        if not looked_up and not other.is_alive():
            other.start()
            other.join(0.3)  # it waits, or is refused
        give_back(*args, **settings)

    monkeypatch.setattr(speedswap.Table, "give_back", give_back_during_a_lookup)
    in_threads(optimizer.step)
    other.join(10)
    assert len(looked_up) == 1


def test_several_locks_are_taken_in_the_same_order_however_they_are_named():
    """So that a checkpoint of two tables and a lookahead over both never wait for each other."""

    class Lock:
        def __enter__(self):
            taken.append(self)

        def __exit__(self, *_):
            taken.remove(self)

    taken, locks, orders = [], [Lock() for _ in range(5)], []
    for named in (locks, locks[::-1], [*locks, *locks]):
        with all_held(named):
            orders.append([*taken])
        assert not taken
    assert orders[0] == orders[1] == orders[2]
    assert set(orders[0]) == set(locks)


def test_saving_and_prefetching_two_tables_in_two_threads_do_not_wait_for_each_other(tmp_path):
    modules = [speedswap.Embedding(50, 3, seed=seed) for seed in (1, 2)]
    stores = {str(i): each.table.store for i, each in enumerate(modules)}
    orders = [stores, dict([*stores.items()][::-1])]

    def save(number):
        for _ in range(30):
            save_rows(orders[number], tmp_path / f"{number}.safetensors", overwrite=True)

    def look_ahead():
        for ids in speedswap.lookahead([torch.tensor([1, 2])] * 100, {each: lambda ids: ids for each in modules}):
            for each in modules:
                each(ids)

    in_threads(lambda: save(0), lambda: save(1), look_ahead)
