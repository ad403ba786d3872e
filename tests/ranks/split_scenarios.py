"""Batches of several ranks that a splitter goes through, each rank at its own pace."""

from __future__ import annotations

import torch
from places import owned
from torch.nn.parallel import DistributedDataParallel

import speedswap

ROWS, DIM = 80, 4


class Net(torch.nn.Module):
    """Two tables and a layer, which counts its calls."""

    def __init__(self, group, dropout=0.0) -> None:
        super().__init__()
        more = {"dtype": torch.float64, "seed": 3, "storage": owned(group)}
        self.users = speedswap.Embedding(ROWS, DIM, name="users", padding_idx=7, **more)
        self.items = speedswap.Embedding(ROWS, DIM, name="items", **more)
        self.layer = torch.nn.Linear(DIM, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.fails = lambda samples: False

    def forward(self, ids):
        users = self.users(ids[:, 0])
        if self.fails(len(ids)):
            raise torch.OutOfMemoryError("simulated")
        return self.layer(torch.tanh(users * self.items(ids[:, 1])))


def batch_of(rank, number, size):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(ROWS, (size, 2), generator=generator)
    return ids, torch.randn(size, 3, generator=generator, dtype=torch.float64)


def parts(sizes, number):
    return [batch_of(rank, number, size) for rank, size in enumerate(sizes)]


def joined(batches):
    return tuple(torch.cat(each) for each in zip(*batches, strict=True))


def normalizer(ids, targets):
    return (targets[:, 0] > 0).sum()


def masked(out, targets):
    """Return the mean over samples that count."""
    counts = (targets[:, 0] > 0).double()
    return ((out - targets).square().sum(1) * counts).sum() / counts.sum()


def mean(out, targets):
    return (out - targets).square().mean()


def split_training(group, sizes, options):
    """Train over batches of these sizes by rank; return losses, micro-batch sizes, the rows and the layer.

    Args:
        sizes: samples of each rank.
        options: micro_batch_size; whether the loss is masked, the model wrapped, gradients accumulated over two
            batches; and the samples above which a rank runs out of memory, by rank.
    """
    net = Net(group)
    model = net
    if options.get("wrapped"):
        model = DistributedDataParallel(speedswap.ignore_in_ddp(net), process_group=group)
    loss = masked if options.get("masked") else mean
    splitter = speedswap.BatchSplitter(
        model,
        micro_batch_size=options.get("size", "auto"),
        normalizer=normalizer if options.get("masked") else None,
    )
    most = options.get("most", {}).get(group.rank())
    if most:
        net.fails = lambda samples: samples > most
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = []
    for number in range(4):
        batch = batch_of(group.rank(), number, sizes[group.rank()])
        losses.append(float(splitter.backward(lambda ids, targets: loss(model(ids), targets), *batch)))
        if options.get("accumulate") and number % 2 == 0:
            continue
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, splitter.micro_batch_size, net.users.read(), net.items.read(), net.layer.weight.detach()


def unsplit_training(sizes, options):
    """Return the same of one process, without a splitter."""
    net = Net(None)
    loss = masked if options.get("masked") else mean
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = []
    for number in range(4):
        ids, targets = joined(parts(sizes, number))
        value = loss(net(ids), targets)
        value.backward()
        losses.append(float(value.detach()))
        if options.get("accumulate") and number % 2 == 0:
            continue
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, None, net.users.read(), net.items.read(), net.layer.weight.detach()


def coupled_loss(out):
    return torch.logsumexp(out @ out.T, 1).mean()


def coupled_training(group, sizes, how):
    """Train on losses that compare the samples of a rank, in two passes or through a differentiable forward."""
    net = Net(group)
    splitter = speedswap.BatchSplitter(net, micro_batch_size=3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for number in range(3):
        ids, _ = batch_of(group.rank(), number, sizes[group.rank()])
        if how == "coupled":
            splitter.backward_coupled(net, coupled_loss, ids)
        else:
            coupled_loss(splitter.forward(net, ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = splitter.map(net, batch_of(group.rank(), 9, sizes[group.rank()])[0])
    return net.users.read(), net.items.read(), net.layer.weight.detach(), found


def coupled_alone(sizes):
    net = Net(None)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for number in range(3):
        sum(coupled_loss(net(ids)) / len(sizes) for ids, _ in parts(sizes, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [net(ids).detach() for ids, _ in parts(sizes, 9)]
    return net.users.read(), net.items.read(), net.layer.weight.detach(), found


def failing(group, sizes, stage):
    """Let one rank fail within a batch; then train, and return what all have said, and the rows."""
    net = Net(group)
    splitter = speedswap.BatchSplitter(net, micro_batch_size=3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    said = []
    for number in range(3):
        is_failing = number == 1 and group.rank() == 1
        calls = 0

        def loss(ids, targets, *, is_failing=is_failing):
            nonlocal calls
            calls += 1
            if is_failing and calls == 2 and stage == "forward":
                raise ValueError("forward")
            out = net(ids if not (is_failing and stage == "id") else ids + ROWS)
            if is_failing and stage == "memory" and calls > 1:
                raise torch.OutOfMemoryError
            if is_failing and stage == "backward":
                out.register_hook(lambda grad: [][0])
            return mean(out, targets)

        rows = net.users.read()
        try:
            splitter.backward(loss, *batch_of(group.rank(), number, sizes[group.rank()]))
            optimizer.step()
        except Exception as error:
            said.append(type(error).__name__)
        if len(said) == 1 and number == 1:
            assert torch.equal(net.users.read(), rows)
            assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.zero_grad()
    return said, net.users.read(), net.items.read(), net.layer.weight.detach()


def failing_alone(sizes):
    net = Net(None)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for number in (0, 2):
        ids, targets = joined(parts(sizes, number))
        mean(net(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.users.read(), net.items.read(), net.layer.weight.detach()


def mixed_training(group, size, looks):
    """Train on an ordinary pass and a split batch per step; return rows and layer.

    Args:
        group: the ranks; None for one process that has all their samples.
        size: samples of a rank in the ordinary pass; in the split one each rank has one more than the rank before.
        looks: whether the gradient is looked at between the two.
    """
    net = Net(group)
    ranks = range(2) if group is None else [group.rank()]
    model = net if group is None else DistributedDataParallel(speedswap.ignore_in_ddp(net), process_group=group)
    splitter = None if group is None else speedswap.BatchSplitter(model, micro_batch_size=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for number in range(3):
        ids, targets = joined([batch_of(rank, number, size) for rank in ranks])
        mean(model(ids), targets).backward()
        if looks:
            assert net.users.weight.grad is not None
        ids, targets = joined([batch_of(rank, 10 + number, size + rank) for rank in ranks])
        if splitter is None:
            mean(net(ids), targets).backward()
        else:
            splitter.backward(lambda ids, targets: mean(model(ids), targets), ids, targets)
        optimizer.step()
        optimizer.zero_grad()
    return net.users.read(), net.items.read(), net.layer.weight.detach()
