"""Rows outside the batch with ``idle_rows="dense"``, compared with ``nn.Embedding``, whose rows take every step."""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import speedswap
from speedswap.errors import OptimizerError
from speedswap.swapping.idle_steps import MOST_REPLAYED, ClosedSteps, ReplayedSteps
from speedswap.tables.idle import LAST_STEP

ROWS, DIM, BATCH = 60, 5, 6
PAGE = Path(__file__).parents[2] / "docs" / "idle-rows.md"

CLOSED = {
    "SGD": lambda weights: optim.SGD(weights, lr=0.1),
    "SGD with decay": lambda weights: optim.SGD(weights, lr=0.1, weight_decay=0.01),
    "momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9),
    "Nesterov": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "Adam": lambda weights: optim.Adam(weights, lr=0.01),
    "AdamW": lambda weights: optim.AdamW(weights, lr=0.01, weight_decay=0.1),
    "AdamW, other betas": lambda weights: optim.AdamW(weights, lr=0.01, betas=(0.8, 0.98)),
    "AMSGrad": lambda weights: optim.AdamW(weights, lr=0.01, amsgrad=True),
    "NAdam": lambda weights: optim.NAdam(weights, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda weights: optim.RAdam(weights, lr=0.01),
    "RMSprop": lambda weights: optim.RMSprop(weights, lr=0.01, momentum=0.9),
    "Adagrad": lambda weights: optim.Adagrad(weights, lr=0.1, lr_decay=0.01),
    "Adadelta": lambda weights: optim.Adadelta(weights),
    "ASGD": lambda weights: optim.ASGD(weights, lr=0.01, t0=10, lambd=0.01),
}
REPLAYED = {
    "Adam with decay": lambda weights: optim.Adam(weights, lr=0.01, weight_decay=0.1),
    "AdamW, far betas": lambda weights: optim.AdamW(weights, lr=0.01, betas=(0.95, 0.9)),
    "Adagrad with decay": lambda weights: optim.Adagrad(weights, lr=0.1, weight_decay=0.1, lr_decay=0.01),
    "RMSprop with decay": lambda weights: optim.RMSprop(weights, lr=0.01, weight_decay=0.1),
    "centered RMSprop": lambda weights: optim.RMSprop(weights, lr=0.01, centered=True),
    "NAdam with decay": lambda weights: optim.NAdam(weights, lr=0.01, weight_decay=0.1),
    "Adamax": lambda weights: optim.Adamax(weights, lr=0.01),
    "Adadelta with decay": lambda weights: optim.Adadelta(weights, weight_decay=0.1),
    "Rprop": lambda weights: optim.Rprop(weights, lr=0.01),
}
EVERY = {**CLOSED, **REPLAYED}


class Training:
    """The same training of ``nn.Embedding`` and of a table whose idle rows take every step."""

    def __init__(self, make, dtype=torch.float64, rows=ROWS, dim=DIM, schedule=None, start=None, **settings):
        self.ours = speedswap.Embedding(rows, dim, seed=1, dtype=dtype, **settings)
        if start is not None:
            self.ours.table.write(0, start)
        self.dense = nn.Embedding.from_pretrained(self.ours.table.read(), freeze=False)
        self.other = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
        groups = (
            [{"params": [other]}, {"params": [each.weight]}]
            for other, each in zip(self.other, self.models, strict=True)
        )
        self.optimizers = [make(group) for group in groups]
        speedswap.attach(self.optimizers[1], self.ours, idle_rows="dense")
        self.schedulers = [] if schedule is None else [schedule(each) for each in self.optimizers]
        self.random = torch.Generator().manual_seed(2)
        self.popularity = torch.arange(1, rows + 1.0) ** -1.2

    @property
    def models(self):
        return self.dense, self.ours

    def steps(self, count, *, scale=1.0, clip=None, batch=BATCH):
        for _ in range(count):
            ids = torch.multinomial(self.popularity, batch, replacement=True, generator=self.random)
            slope = torch.randn(batch, self.dense.embedding_dim, generator=self.random, dtype=torch.float32) * scale
            for model, optimizer, other in zip(self.models, self.optimizers, self.other, strict=True):
                optimizer.zero_grad()
                ((model(ids) * slope.to(model.weight.dtype)).sum() + other.square().sum()).backward()
                if clip is not None:
                    nn.utils.clip_grad_value_([model.weight], clip)
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
        return self

    def errors(self):
        """Return the largest difference of the weight, and of each state, relative to its largest value."""
        theirs = {"weight": self.dense.weight.detach(), **self.optimizers[0].state[self.dense.weight]}
        state = self.optimizers[1].state_dict()["state"].get(1, {})
        ours = {"weight": self.ours.table.read(), **state}
        assert theirs.keys() == ours.keys()
        return {name: relative_error(ours[name], values) for name, values in theirs.items()}

    def check(self, most=1e-12):
        errors = self.errors()
        assert max(errors.values()) <= most, errors

    @property
    def missed(self):
        return self.ours._step.state.idle.steps


def relative_error(ours, theirs):
    if not isinstance(theirs, torch.Tensor):
        return abs(ours - theirs)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


def warmup(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10) * (0.55 + 0.45 * math.cos(step / 20)))


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
    monkeypatch.setattr("speedswap.swapping.idle_steps.MOST_STEPS", 16)
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
    with pytest.raises(ValueError, match="idle_rows is 'dense', but Table"):
        speedswap.attach(CLOSED["AdamW"](on_disk.parameters()), on_disk, idle_rows="dense")


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
def test_the_page_runs(code, capsys):
    exec(compile("import torch, speedswap\n" + code, PAGE.name, "exec"), {})
    assert "error" not in code or "idle_rows is 'dense', but Table" in capsys.readouterr().out
