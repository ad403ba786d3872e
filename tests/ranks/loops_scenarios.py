"""Training loops of many kinds over rows that ranks own; the same loops run in one process, on all ranks' samples."""

from __future__ import annotations

import torch
import torch.distributed as dist
from outcomes import error_of
from places import owned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, SparseAdam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import speedswap
from speedswap.collectives import RankGroup

ROWS, DIM, SAMPLES, STEPS = 40, 4, 6, 4


class Net(nn.Module):
    """An embedding, a bag and a layer."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(3)
        more = {"dtype": torch.float64, "seed": 3} | ({} if group is None else {"storage": owned(group)})
        self.users = speedswap.Embedding(ROWS, DIM, padding_idx=7, **more)
        self.words = speedswap.EmbeddingBag(ROWS, DIM, mode="sum", **more)
        self.layer = nn.Linear(DIM, 2, dtype=torch.float64)

    def forward(self, ids):  # (samples, 3)
        return self.layer(torch.tanh(self.users(ids[:, 0]) * self.words(ids)))

    def rows(self):
        return [self.users.weight, self.words.weight]


class Run:
    """A training of one process, or of one of the ranks.

    Attributes:
        net: the model; ``model`` is the same, under DistributedDataParallel on ranks.
    """

    def __init__(self, group, size):
        self.group, self.size = group, size
        self.net = self.model = Net(group)
        if group is not None:
            self.model = DistributedDataParallel(speedswap.ignore_in_ddp(self.net), process_group=group)

    def again(self):
        return Run(self.group, self.size)

    def batch(self, number):
        """Return ids and targets: a rank's, or those of all ranks."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(ROWS, (self.size * SAMPLES, 3), generator=generator)
        targets = torch.randn(len(ids), 2, dtype=torch.float64, generator=generator)
        if self.group is None:
            return ids, targets
        return tuple(each.chunk(self.size)[self.group.rank()] for each in (ids, targets))

    def loss(self, number):
        ids, targets = self.batch(number)
        return (self.model(ids) - targets).square().mean()

    def state(self):
        return [self.net.users.read(), self.net.words.read(), self.net.layer.weight.detach().clone()]

    def gathered(self, values):
        """Return the values of all ranks' samples."""
        if self.group is None:
            return values
        every = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(every, values.contiguous(), group=self.group)
        return torch.cat(every)


def train(run, optimizer, steps=range(STEPS)):
    for number in steps:
        optimizer.zero_grad()
        run.loss(number).backward()
        optimizer.step()


# ---------------------------------------------------------------------- loops, which return tensors and errors


def evaluates(run):
    """Look up under no_grad, in inference mode and in eval mode, between steps and between passes."""
    optimizer = Adam(run.model.parameters(), 0.05)
    found = []
    for number in range(STEPS):
        with torch.no_grad():
            found.append(run.gathered(run.net(run.batch(number + 50)[0])))
        run.loss(number).backward()
        with torch.inference_mode():
            found.append(run.gathered(run.net(run.batch(number + 60)[0]).clone()))
        run.net.eval()
        found.append(run.gathered(run.net(run.batch(number + 70)[0]).detach()))
        run.net.train()
        optimizer.step()
        optimizer.zero_grad()
    return found


def autocast(run):
    optimizer = SGD(run.model.parameters(), 0.05)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(number)
        loss.backward()
        optimizer.step()


def moves(run):
    said = [error_of(lambda to=to: run.net.to(to)) for to in (torch.float32, torch.half, "meta")]
    run.net.to("cpu").double()
    train(run, Adam(run.model.parameters(), 0.05))
    return said


def hooks(run):
    """Try hooks on rows' weights; then train with hooks on layers, optimizers and what is looked up."""
    weight, scaled = run.net.users.weight, []
    said = [error_of(lambda: weight.register_hook(print)),
            error_of(lambda: weight.register_post_accumulate_grad_hook(print))]  # fmt: skip
    run.net.layer.weight.register_hook(lambda grad: grad * 2)
    run.net.users.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad * 3) and None)
    optimizer = Adam(run.model.parameters(), 0.05)
    optimizer.register_step_pre_hook(lambda *_: scaled.append(weight.grad.mul_(0.5) is not None))
    train(run, optimizer)
    return [*said, torch.tensor(len(scaled))]


def zeros(run):
    optimizer = Adam(run.model.parameters(), 0.05)
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        run.loss(number).backward()
        optimizer.step()
        run.model.zero_grad(set_to_none=number % 2 == 0)


def refused(run):
    """Try optimizers that cannot train rows; then train with one that can."""
    said = []
    for make in (SparseAdam, LBFGS, Adafactor):
        optimizer = make([run.net.users.weight])

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = run.loss(0)
            loss.backward()
            return loss

        closure()
        said.append(error_of(lambda optimizer=optimizer, closure=closure: optimizer.step(closure)))
        run.model.zero_grad()
    train(run, Adam(run.model.parameters(), 0.05))
    return said


def groups(run):
    """Train with a learning rate for each table, one that is scheduled, and one that changes by hand."""
    users, words = ({"params": [weight], "lr": lr} for weight, lr in zip(run.net.rows(), (0.5, 0.02), strict=True))
    optimizer = Adam([users, {**words, "weight_decay": 0.1}, {"params": run.net.layer.parameters()}], 0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.5, 0.02, 0.05], total_steps=STEPS + 1)
    for number in range(STEPS):
        train(run, optimizer, [number])
        scheduler.step()
    optimizer.param_groups[0]["lr"] = 0.1
    train(run, optimizer, [STEPS])


def added_group(run):
    """Train the layer alone, and the rows from the third step on."""
    optimizer = Adam(run.net.layer.parameters(), 0.05)
    for module in (run.net.users, run.net.words):
        module.requires_grad_(False)
    train(run, optimizer, range(2))
    for module in (run.net.users, run.net.words):
        module.requires_grad_(True)
    optimizer.add_param_group({"params": run.net.rows(), "lr": 0.1})
    train(run, optimizer, range(2, 5))


def two_optimizers(run):
    dense, rows = SGD(run.net.layer.parameters(), 0.1), Adagrad(run.net.rows(), 0.1)
    for number in range(STEPS):
        dense.zero_grad()
        train(run, rows, [number])
        dense.step()


def averages(run):
    """Average the layer; a copy of the rows is refused on ranks."""
    optimizer = Adam(run.model.parameters(), 0.05)
    said = error_of(lambda: AveragedModel(run.net))
    averaged = AveragedModel(run.net.layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(STEPS):
        train(run, optimizer, [number])
        averaged.update_parameters(run.net.layer)
    return [None if run.group is None else said, averaged.module.weight.detach()]


def goes_on(run):
    """Take the state of model and optimizer to others, and train both."""
    optimizer = Adam(run.model.parameters(), 0.05)
    train(run, optimizer, range(2))
    again = run.again()
    other = Adam(again.model.parameters(), 0.05)
    again.net.load_state_dict(run.net.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(again, other, range(2, STEPS))
    train(run, optimizer, range(2, STEPS))
    return again.state()


def accumulates(run):
    """Accumulate gradients in an optimizer: those of rows are refused, as on one process, and those of layers not."""
    said = error_of(lambda: train(run, speedswap.batching.AccumulatingOptimizer(Adam(run.model.parameters()), 2)))
    run.model.zero_grad()
    dense, rows = (
        speedswap.batching.AccumulatingOptimizer(Adam(run.net.layer.parameters(), 0.05), 2),
        Adam(run.net.rows(), 0.05),
    )
    for number in range(STEPS):
        dense.zero_grad()
        train(run, rows, [number])
        dense.step()
    train(run, speedswap.batching.AccumulatingOptimizer(dense.optimizer, 1))
    return [said.partition("(")[0]]


LOOPS = {each.__name__: each for each in (
    evaluates, autocast, moves, hooks, zeros, refused, groups, added_group, two_optimizers, averages, goes_on,
    accumulates)}  # fmt: skip


def loops(group, size):
    """Return what each loop has found, and the state after it."""
    found = {}
    for name, each in LOOPS.items():
        run = Run(group, size)
        found[name] = (each(run) or [], run.state())
    return found


def begins_in_inference_mode(group, in_mode):
    """Make a lane, and look up for the first time, in inference mode; then train. Return all rows."""
    own = dist.new_group(dist.get_process_group_ranks(group))
    items = []
    with torch.inference_mode(in_mode):
        RankGroup.of(own)
    for dim in (2, 64):  # each row wider than those before
        items.append(speedswap.Embedding(40, dim, seed=dim, storage=owned(own)))
        with torch.inference_mode(in_mode):
            items[-1](torch.arange(5))
    optimizer = SGD([each.weight for each in items], 0.1)
    for number in range(2):
        for each in items:
            each(torch.arange(number, 9)).square().sum().backward()
        many = torch.arange(2000) % 40  # more than fits into a line
        items[0](many).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [each.read() for each in items]
    dist.destroy_process_group(own)
    return found
