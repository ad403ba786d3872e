"""Rows outside the batch with ``idle_rows="dense"``, compared with ``nn.Embedding``, whose rows take every step."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from idle_training import BATCH, CLOSED, DIM, EVERY, REPLAYED, ROWS, Training, relative_error, warmup
from torch import nn, optim

import speedswap
from speedswap.errors import OptimizerError
from speedswap.swapping import idle_steps
from speedswap.swapping.idle_steps import MOST_REPLAYED, ReplayedSteps
from speedswap.tables.idle import LAST_STEP, ClosedSteps

PAGE = Path(__file__).parents[2] / "docs" / "idle-rows.md"


@pytest.mark.parametrize("name", EVERY)
def test_every_row_is_that_of_dense_training(name):
    """A schedule whose first rate is 0, a second parameter group and clipping by value."""
    training = Training(EVERY[name], schedule=warmup).steps(50, clip=1.5)
    training.check()
    assert type(training.missed) is (ClosedSteps if name in CLOSED else ReplayedSteps)


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "scale"),
    [*((name, 1.0) for name in EVERY), *((name, 10.0**-n) for name in ("AdamW", "AMSGrad", "RAdam") for n in (4, 8))],
)
def test_three_thousand_steps_are_those_of_dense_training(name, scale):
    """Saved and loaded after a third, with gradients down to the size of eps."""
    training = Training(EVERY[name], rows=400, schedule=warmup).steps(1000, scale=scale, clip=1.5 * scale)
    loaded = training.optimizers[1].state_dict()
    rows = training.ours.state_dict()
    training.ours.load_state_dict(rows)
    training.optimizers[1].load_state_dict(loaded)
    training.steps(2000, scale=scale, clip=1.5 * scale).check()


@pytest.mark.parametrize("scale", [1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize("name", ["AdamW", "AMSGrad", "RAdam"])
def test_gradients_of_the_size_of_eps_are_those_of_dense_training(name, scale):
    Training(CLOSED[name]).steps(60, scale=scale).check()


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Nesterov", "AMSGrad", "RMSprop"])
def test_float32_is_as_close_to_float64_as_dense_training_is(name):
    """From the same values, by the same gradients."""
    rounded = Training(CLOSED[name], torch.float32)
    exact = Training(CLOSED[name], start=rounded.ours.table.read().double())
    for training in (rounded, exact):
        training.steps(150)
    true = exact.dense.weight.detach()
    ours = (rounded.ours.table.read().double() - true).square().mean().sqrt()
    dense = (rounded.dense.weight.detach().double() - true).square().mean().sqrt()
    assert ours <= 1.05 * dense <= 1e-5


def test_a_row_is_up_to_date_wherever_it_is_read(tmp_path):
    training = Training(CLOSED["AdamW"]).steps(20)
    ours, wanted = training.ours, training.dense.weight.detach()
    close = {"rtol": 1e-12, "atol": 1e-13}
    ids = torch.tensor([59, 3, 59, 41])
    torch.testing.assert_close(ours.read(ids), wanted[ids], **close)
    torch.testing.assert_close(ours(ids).detach(), wanted[ids], **close)
    torch.testing.assert_close(ours.table.gather(ids).weight, wanted[ids], **close)
    query = torch.ones(DIM, dtype=torch.float64)
    torch.testing.assert_close(ours.score(query, k=ROWS).values, (wanted @ query).sort(descending=True).values, **close)
    assert training.missed.count == 20  # nothing of this has written a row
    torch.testing.assert_close(copy.deepcopy(ours).table.read(), wanted, **close)
    ours.table.export(tmp_path / "rows.npy")
    ours.table.save(tmp_path / "saved")
    for table in (speedswap.Table.from_file(tmp_path / "rows.npy"), speedswap.Table.load(tmp_path / "saved")):
        torch.testing.assert_close(table.read(), wanted, **close)
    assert LAST_STEP not in {**ours.table.columns, **speedswap.Table.load(tmp_path / "saved").columns}
    training.steps(20).check()


@pytest.mark.parametrize("name", ["momentum", "AdamW", "Adam with decay"])
def test_training_goes_on_from_a_saved_table(tmp_path, name):
    training = Training(EVERY[name]).steps(30)
    training.ours.table.save(tmp_path / "items")
    table = speedswap.Table.load(tmp_path / "items")
    training.ours = speedswap.Embedding(ROWS, DIM, table=table)
    training.optimizers[1] = EVERY[name]([{"params": [training.other[1]]}, {"params": [training.ours.weight]}])
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="dense")
    training.steps(30)
    assert relative_error(training.ours.table.read(), training.dense.weight.detach()) <= 1e-12


@pytest.mark.parametrize("name", ["Nesterov", "AdamW"])
def test_a_checkpoint_resumes_with_the_rows_of_dense_training(tmp_path, name):
    training = Training(CLOSED[name]).steps(25)
    for number in range(2):  # the second one with what has changed since
        speedswap.save_checkpoint(tmp_path / "saved", training.ours, training.optimizers[1])
        training.steps(5 * (1 - number))
    random = training.random.get_state()
    training.steps(10)
    fresh = Training(CLOSED[name])
    training.ours, training.optimizers[1], training.other[1] = fresh.ours, fresh.optimizers[1], fresh.other[1]
    speedswap.load_checkpoint(tmp_path / "saved", training.ours, training.optimizers[1])
    training.random.set_state(random)
    dense, optimizer = training.dense, training.optimizers[0]
    again = Training(CLOSED[name]).steps(30)
    dense.load_state_dict(again.dense.state_dict())
    optimizer.load_state_dict(again.optimizers[0].state_dict())
    training.steps(10)
    assert relative_error(training.ours.table.read(), dense.weight.detach()) <= 1e-12


@pytest.mark.parametrize("name", ["momentum", "AdamW", "Adam with decay"])
def test_lookahead_gives_the_bits_of_the_plain_loop(name):
    random = torch.Generator().manual_seed(5)
    batches = [torch.randint(ROWS, (BATCH,), generator=random) for _ in range(MOST_REPLAYED + 10)]
    results = []
    for depth in (0, 1, 3):
        items = speedswap.Embedding(ROWS, DIM, seed=4, dtype=torch.float64)
        optimizer = EVERY[name](items.parameters())
        speedswap.attach(optimizer, items, idle_rows="dense")
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}, depth=depth):
            optimizer.zero_grad()
            items(ids).square().sum().backward()
            optimizer.step()
        results.append(items.table.read())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tables_of_a_collection_are_those_of_dense_training():
    torch.manual_seed(0)
    dense = nn.ModuleDict({name: nn.Embedding(30, DIM, dtype=torch.float64) for name in ("user", "page")})
    configs = [
        speedswap.EmbeddingConfig(name=name, num_embeddings=30, embedding_dim=DIM, dtype=torch.float64)
        for name in dense
    ]
    ours = speedswap.EmbeddingCollection(configs)
    for name, module in dense.items():
        ours.embeddings[name].table.write(0, module.weight.detach())
    optimizers = [optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (dense, ours)]
    speedswap.attach(optimizers[1], ours, idle_rows="dense")
    random = torch.Generator().manual_seed(1)
    for _ in range(25):
        ids = {name: torch.randint(30, (4,), generator=random) for name in dense}
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = ours(ids)
        for name, some in ids.items():
            dense[name](some).square().sum().backward()
        sum(found[name].values().square().sum() for name in ids).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, module in dense.items():
        assert relative_error(ours.embeddings[name].read(), module.weight.detach()) <= 1e-12


@pytest.mark.parametrize("name", ["Nesterov", "AdamW", "Adam with decay"])
def test_rows_that_go_to_a_device_are_those_of_dense_training(device, name):
    training = Training(EVERY[name], device=device, storage="pinned" if device == "cuda" else "pageable")
    training.dense.to(device)
    training.other = [nn.Parameter(each.detach().to(device)) for each in training.other]
    both = zip(training.other, training.models, strict=True)
    groups = [[{"params": [other]}, {"params": [each.weight]}] for other, each in both]
    training.optimizers = [EVERY[name](each) for each in groups]
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="dense")
    training.steps(30)
    assert relative_error(training.ours.table.read(), training.dense.weight.detach().cpu()) <= 1e-12


def test_a_step_without_ids_moves_every_row():
    training = Training(CLOSED["AdamW"]).steps(5)
    for model, optimizer in zip(training.models, training.optimizers, strict=True):
        optimizer.zero_grad()
        model(torch.empty(0, dtype=torch.int64)).sum().backward()
        optimizer.step()
    training.check()


def test_a_gradient_of_zeros_is_a_step():
    training = Training(CLOSED["momentum"]).steps(5)
    for optimizer in training.optimizers:
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    training.check()


def test_a_failed_step_is_no_step():
    training = Training(CLOSED["AdamW"]).steps(5)
    optimizer = training.optimizers[1]
    optimizer.zero_grad()
    training.ours(torch.tensor([1])).sum().backward()
    group, optimizer.param_groups[1]["betas"] = optimizer.param_groups[1], None
    with pytest.raises(TypeError):
        optimizer.step()
    group["betas"] = (0.9, 0.999)
    training.steps(5).check()


def test_another_thread_reads_a_whole_step_or_none(monkeypatch):
    training = Training(EVERY["AdamW"])
    training.steps(1)
    seen, prepare = [], ClosedSteps.prepare
    reader = threading.Thread(target=lambda: seen.append(training.ours.table.read()))

    def prepare_to_read(steps, step):
        def count_once_read():
            reader.start()
            reader.join(0.3)  # it waits for the end of the step
            count()

        count = prepare(steps, step)
        return count_once_read

    monkeypatch.setattr(ClosedSteps, "prepare", prepare_to_read)
    training.steps(1)
    reader.join()
    assert torch.equal(seen[0], training.ours.table.read())
    training.check()


def test_another_thread_reads_while_the_step_is_examined(monkeypatch):
    """Reading takes missed steps by the twin of the optimizer that examines the new one."""
    training = Training(REPLAYED["Adam with decay"]).steps(5)
    before, seen, readers, step = training.ours.table.read(), [], [], idle_steps.step_unnoticed

    def read_and_step(optimizer, *args):
        if threading.current_thread() is threading.main_thread() and not seen:
            readers.append(threading.Thread(target=lambda: seen.append(training.ours.table.read())))
            readers[-1].start()
            readers[-1].join(0.3)
        step(optimizer, *args)

    monkeypatch.setattr(idle_steps, "step_unnoticed", read_and_step)
    training.steps(1)
    monkeypatch.undo()
    for reader in readers:
        reader.join()
    after = training.ours.table.read()
    assert [any(torch.equal(each, rows) for rows in (before, after)) for each in seen] == [True] * len(readers)
    training.steps(5).check()


def test_a_step_counts_after_another_thread_has_brought_every_row_up_to_date():
    training = Training(REPLAYED["Adam with decay"]).steps(5)
    column = speedswap.Column("more", (), torch.float32, speedswap.init.zeros())

    def add_column(*_):
        adder = threading.Thread(target=training.ours.table.add_columns, args=([column],))
        adder.start()
        adder.join()

    hook = training.optimizers[1].register_step_post_hook(add_column)  # called before the rows are written
    training.steps(1)
    hook.remove()
    training.steps(5).check()


def test_rows_that_are_written_or_reset_have_the_steps_so_far():
    training = Training(CLOSED["AdamW"]).steps(10)
    with torch.no_grad():
        training.dense.weight[7:9] = 0.5
    training.ours.table.write(7, torch.full((2, DIM), 0.5, dtype=torch.float64))
    training.steps(10).check()
    with torch.no_grad():
        training.dense.weight[[4, 40]] = 0.25
    training.ours.table.scatter(torch.tensor([4, 40]), torch.full((2, DIM), 0.25, dtype=torch.float64))
    training.steps(10).check()


def test_a_row_that_starts_over_takes_only_later_steps():
    """As one that an id map gives to another key."""
    training = Training(CLOSED["AdamW"])
    initial, rows = training.ours.table.read(), torch.tensor([2, 50])
    training.steps(10)
    training.ours.table.reset_rows(rows)
    state = training.optimizers[0].state[training.dense.weight]
    with torch.no_grad():
        training.dense.weight[rows] = initial[rows]
        for values in (state["exp_avg"], state["exp_avg_sq"]):
            values[rows] = 0
    training.check()
    training.steps(10).check()


def test_another_optimizer_begins_with_rows_that_are_up_to_date():
    training = Training(CLOSED["AdamW"]).steps(10)
    for place, model in enumerate(training.models):
        training.optimizers[place] = optim.SGD(
            [{"params": [training.other[place]]}, {"params": [model.weight]}], lr=0.1
        )
    training.steps(10)
    assert relative_error(training.ours.table.read(), training.dense.weight.detach()) <= 1e-12


def test_a_setting_changed_on_the_way_is_followed():
    """Decay within Adam has no closed form; steps before it have."""
    training = Training(CLOSED["Adam"]).steps(10)
    for decay in (0.1, 0.0):
        for optimizer in training.optimizers:
            optimizer.param_groups[1]["weight_decay"] = decay
        training.steps(10).check()


@pytest.mark.parametrize("name", ["AdamW", "Adam with decay"])
def test_all_rows_are_brought_up_to_date_when_too_many_steps_were_missed(monkeypatch, name):
    monkeypatch.setattr("speedswap.tables.idle.MOST_STEPS", 16)
    monkeypatch.setattr("speedswap.swapping.idle_steps.MOST_REPLAYED", 16)
    training = Training(EVERY[name]).steps(40)
    assert training.missed.count == 8
    training.check()


def test_weight_decay_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Training(CLOSED["AdamW"]).steps(1)


class Noisy(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.rand(()))  # the same for all rows


class Counting(optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step(closure)


def test_what_cannot_be_taken_again_is_refused(tmp_path):
    items = speedswap.Embedding(ROWS, DIM)
    optimizer = CLOSED["AdamW"](items.parameters())
    with pytest.raises(OptimizerError, match="Counting keeps 'steps' outside its param_groups"):
        speedswap.attach(Counting(items.parameters(), lr=0.1), items, idle_rows="dense")
    with pytest.raises(OptimizerError, match="random"):
        speedswap.attach(Noisy(items.parameters(), lr=0.1), items, idle_rows="dense")
    with pytest.raises(ValueError, match="idle_rows is 'Dense'; give 'lazy' or 'dense'"):
        speedswap.attach(optimizer, items, idle_rows="Dense")
    speedswap.attach(optimizer, items, idle_rows="dense")
    with pytest.raises(TypeError, match="not in one memory"):
        items.table.view()
    on_disk = speedswap.Embedding(ROWS, DIM, path=tmp_path / "items")
    for name in ("Adam with decay", "AdamW, far betas", "Rprop"):
        with pytest.raises(OptimizerError, match="which other processes read; use AdamW"):
            speedswap.attach(REPLAYED[name](on_disk.parameters()), on_disk, idle_rows="dense")


def test_idle_rows_follow_from_where_it_is_asked_for_to_where_it_ends():
    """Lazy steps before, which touch every row here, and after."""
    training = Training(CLOSED["AdamW"])
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="lazy")

    def all_rows():
        for model, optimizer in zip(training.models, training.optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.arange(ROWS)).square().sum().backward()
            optimizer.step()

    all_rows()
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="dense")
    training.steps(10)
    speedswap.attach(training.optimizers[1], training.ours)
    training.steps(10).check()
    speedswap.attach(training.optimizers[1], training.ours, idle_rows="lazy")
    assert training.ours._step.state.idle is None
    all_rows()
    training.check()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
def test_the_page_runs(code):
    exec(compile("import torch, speedswap\n" + code, PAGE.name, "exec"), {})
