"""Training of one model by several ranks, and by one process on all their batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from places import owned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import speedswap
import speedswap.optim
from speedswap.errors import LostUpdateError
from speedswap.tables.owners import Owners

DIM = 4

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, 0.3),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda p: Adagrad(p, 0.1, initial_accumulator_value=0.01, lr_decay=0.1),
    "adam": lambda p: Adam(p, 0.01),
    "amsgrad": lambda p: Adam(p, 0.01, amsgrad=True, foreach=False),
    "foreach": lambda p: Adam(p, 0.01, foreach=True, weight_decay=0.1),
    "fused": lambda p: AdamW(p, 0.01, fused=True),
    "adamw": lambda p: AdamW(p, 0.01, foreach=False),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.5, centered=True),
    "groups": lambda p: AdamW([{"params": [p[0]], "lr": 0.05}, {"params": p[1:], "weight_decay": 0.3}], 0.01),
}


@dataclass(frozen=True)
class Case:
    """A run of a few steps.

    Attributes:
        rows: of the table.
        optimizer: one of ``OPTIMIZERS``, or ``rowwise``: that for the rows, and Adam for the other layers.
        model: its kind, see :class:`Model`.
        sizes: samples of each rank in each step, cycled.
        ids: ``any``, ``same`` on all ranks, or all ``owned`` by one rank.
        passes: backward passes in a step.
        ignoring: (step, rank) whose loss does not use the rows; rank -1 for all.
        clip: keyword arguments of ``clip_grad_norm_``, or ``value`` for ``clip_grad_value_``.
        dense: keeps the other layers alike: ``ddp``, ``manual``, or ``compiled`` under ``manual``.
        scaler: True for a ``GradScaler``, with an infinite loss on the last rank in step 2.
        closure: True to step with a closure.
        scheduled: True for a learning rate that falls.
        device: to compute on.
    """

    optimizer: str = "adam"
    rows: int = 60
    model: str = "two"
    sizes: tuple[tuple[int, ...], ...] = ((5, 5, 5, 5, 5),)
    ids: str = "any"
    passes: int = 1
    ignoring: tuple[tuple[int, int], ...] = ()
    clip: dict[str, Any] = field(default_factory=dict)
    dense: str = "ddp"
    scaler: bool = False
    closure: bool = False
    scheduled: bool = False
    reduction: str = "mean"
    padding_idx: int | None = 3
    dtype: torch.dtype = torch.float64
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 5
    seed: int = 1
    device: str = "cpu"


class Model(nn.Module):
    """Rows that go through a dense layer: of ``two`` lookups, ``one``, or bags; or their ``sum`` plus its output."""

    def __init__(self, case: Case, process_group: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        settings: dict[str, Any] = {"padding_idx": case.padding_idx, "dtype": case.dtype, "seed": 5, **case.settings}
        if process_group is not None:
            each = settings.get("storage", "auto")
            settings |= {"storage": owned(process_group, each=each, reduction=case.reduction)}
        self.kind = case.model
        if self.kind.startswith("bag"):
            self.items = speedswap.EmbeddingBag(case.rows, DIM, mode=self.kind.split()[1], **settings)
        else:
            self.items = speedswap.Embedding(case.rows, DIM, **settings)
        self.dense = nn.Sequential(nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, 1)).to(case.dtype)
        self.to(case.device)

    def forward(self, ids, factors, used):
        """Return an output for each sample; the rows of samples that are not used count as zeros."""
        if self.kind == "sum":  # whose gradient is one value in a larger shape
            return self.items(ids).sum((1, 2)) + self.dense(factors.mean(1, keepdim=True).expand(-1, DIM)).squeeze(1)
        if self.kind == "two":
            rows = self.items(ids[:, 0]) * self.items(ids[:, 1:]).sum(1)
        elif self.kind == "one":
            rows = self.items(ids).sum(1)
        elif self.kind == "bag sum weighted":
            rows = self.items(ids, per_sample_weights=factors)
        elif self.kind.endswith("ragged"):
            kept = (ids + torch.arange(3, device=ids.device)) % 3 > 0
            lengths = kept.sum(1)
            rows = self.items(ids[kept], offsets=lengths.cumsum(0) - lengths)
        else:
            rows = self.items(ids)
        rows = torch.zeros_like(rows).detach() if used is None else rows * used.unsqueeze(1)
        return self.dense(rows).squeeze(1)


@dataclass
class Batch:
    ids: torch.Tensor
    factors: torch.Tensor
    targets: torch.Tensor
    used: torch.Tensor | None
    scale: float
    is_infinite: bool = False

    def to(self, device):
        used = None if self.used is None else self.used.to(device)
        near = (each.to(device) for each in (self.ids, self.factors, self.targets))
        return Batch(*near, used, self.scale, self.is_infinite)


def batches(case, world_size):
    """Yield for each step, and each pass in it, every rank's batch, and their union for one process."""
    generator = torch.Generator().manual_seed(case.seed)
    owners = Owners(case.rows, world_size)
    owned = torch.arange(case.rows)
    owned = owned[owners.of(owned) == owners.of(torch.tensor([case.rows - 1]))]
    for step in range(case.steps):
        passes = []
        for part in range(case.passes):
            sizes = case.sizes[(step * case.passes + part) % len(case.sizes)][:world_size]
            some = []
            for rank, size in enumerate(sizes):
                ids = torch.randint(case.rows, (size, 3), generator=generator)
                if case.ids == "owned":
                    ids = owned[ids % len(owned)]
                if case.ids == "same":
                    ids = torch.arange(3 * size).view(size, 3) % case.rows
                factors = torch.rand(size, 3, dtype=case.dtype, generator=generator)
                targets = torch.randn(size, dtype=case.dtype, generator=generator)
                ignores = (step, rank) in case.ignoring or (step, -1) in case.ignoring
                used = torch.zeros(size, dtype=case.dtype) if ignores else torch.ones(size, dtype=case.dtype)
                some.append(Batch(ids, factors, targets, used, 1 / max(1, sum(sizes))))
            whole = Batch(*(torch.cat([getattr(each, name) for each in some])
                            for name in ("ids", "factors", "targets", "used")), 1 / max(1, sum(sizes)))  # fmt: skip
            for rank, each in enumerate(some):
                if (step, rank) in case.ignoring or (step, -1) in case.ignoring:
                    each.used = None
                if case.reduction == "mean":
                    each.scale *= world_size
            if all(each.used is None for each in some):
                whole.used = None
            whole.is_infinite = some[-1].is_infinite = case.scaler and step == 2
            passes.append((some, whole))
        yield passes


def loss_of(model, batch):
    loss = ((model(batch.ids, batch.factors, batch.used) - batch.targets) ** 2).sum() * batch.scale
    return loss * float("inf") if batch.is_infinite else loss


def optimizers_of(case, model):
    parameters = list(model.parameters())
    if case.optimizer == "rowwise":
        return [speedswap.optim.RowwiseAdagrad(parameters[:1], lr=0.1), Adam(parameters[1:], 0.01)]
    return [OPTIMIZERS[case.optimizer](parameters)]


def train(case, group=None, world_size=1):
    """Train a model: on a rank's batches, or on those of all ranks without a group.

    Returns:
        Its rows with the optimizer's state, by column; the other parameters; and the gradients' norms.
    """
    model, rank = Model(case, group), None if group is None else group.rank()
    wrapped = model
    if case.dense == "compiled":
        model.dense = torch.compile(model.dense, backend="eager")
    if group is not None and case.dense == "ddp":
        wrapped = DistributedDataParallel(speedswap.ignore_in_ddp(model), process_group=group)
    optimizers = optimizers_of(case, wrapped)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers if case.scheduled]
    scaler = torch.amp.GradScaler(case.device, init_scale=8.0, growth_interval=2, enabled=case.scaler)
    norms = []
    for passes in batches(case, world_size if group is None else group.size()):

        def evaluate(passes=passes):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for number, (some, whole) in enumerate(passes):
                if group is not None and case.dense == "ddp":
                    wrapped.require_backward_grad_sync = number == len(passes) - 1
                loss = loss_of(wrapped, (whole if rank is None else some[rank]).to(case.device))
                scaler.scale(loss).backward()
            if group is not None and case.dense != "ddp":
                for parameter in model.dense.parameters():
                    total = parameter.grad.cpu()
                    dist.all_reduce(total, group=group)
                    parameter.grad.copy_(total)
                    if case.reduction == "mean":
                        parameter.grad /= group.size()
            return loss.detach()

        if case.closure:
            optimizers[0].step(evaluate)
        else:
            evaluate()
            for optimizer in optimizers if case.scaler else []:
                scaler.unscale_(optimizer)
            if "value" in case.clip:
                nn.utils.clip_grad_value_(model.parameters(), case.clip["value"])
            elif case.clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, **case.clip))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
    table = model.items.table
    columns = {name: table.read(column=name) for name in table.columns} if rank is None else own_columns(model)
    dense = [parameter.detach().cpu().clone() for parameter in model.dense.parameters()]
    return columns, dense, [torch.as_tensor(norm).cpu() for norm in norms], scaler.get_scale()


def own_columns(model):
    """Return the columns of the rows that this rank owns, by id."""
    store = model.items.table.store
    places = torch.arange(len(store.own))
    ids = store.owners.ids(places, store.group.rank)
    used = ids < store.num_embeddings
    assert torch.equal(store.own.read()[used], model.items.read()[ids[used]])
    return {"ids": ids[used], **{name: store.own.read(column=name)[used] for name in store.own.columns}}


def train_all(group, cases):
    return [train(case, group) for case in cases]


def train_without_optimizer(group):
    """Step other layers alone, two of the ranks without the rows; return the error of the next lookup."""
    case = Case(dense="manual")
    model = Model(case, group)
    optimizer = Adam(model.dense.parameters())
    ((some, _),) = next(batches(case, group.size()))
    if group.rank():
        some[group.rank()].used = None
    loss_of(model, some[group.rank()]).backward()
    optimizer.step()
    try:
        loss_of(model, some[group.rank()])
    except LostUpdateError as error:
        return str(error)
