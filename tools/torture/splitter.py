"""Batches that are split while memory runs out at any call, and calls that fail otherwise."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import SpeedswapWarning
from torture.attack import Attack, Broken

__all__ = ["ATTACK"]

ROWS, DIM, LENGTH = 20, 3, 2


class Net(nn.Module):
    """A table, a layer, perhaps dropout, and a buffer that counts the calls."""

    def __init__(self, kind: str, dropout: float, seed: int) -> None:
        super().__init__()
        if kind == "bag":
            self.items: Any = speedswap.EmbeddingBag(ROWS, DIM, mode="sum", seed=seed, dtype=torch.float64)
        elif kind == "torch":
            self.items = nn.Embedding(ROWS, DIM, dtype=torch.float64)
            values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            self.items.weight.data.copy_(values)
        else:
            self.items = speedswap.Embedding(ROWS, DIM, seed=seed, dtype=torch.float64)
        self.layer = nn.Linear(DIM, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        found = self.items(ids)
        rows = found if found.dim() == 2 else found.sum(1)
        out: Tensor = self.layer(self.dropout(rows))
        return out

    def rows(self) -> Tensor:
        """Return every row of the table."""
        if isinstance(self.items, speedswap.Embedding | speedswap.EmbeddingBag):
            return self.items.table.read()
        return self.items.weight.detach().clone()


class Injected(Exception):
    """An error other than out of memory."""


@dataclass
class Faults:
    """The calls that fail: above a number of samples, and some regardless of their size."""

    limit: int = 10**9
    at: dict[int, tuple[str, type[BaseException]]] = field(default_factory=dict)
    place: str = "before"
    calls: int = 0

    def planned(self, samples: int) -> tuple[str, type[BaseException]] | None:
        self.calls += 1
        if self.calls in self.at:
            return self.at[self.calls]
        return (self.place, torch.OutOfMemoryError) if samples > self.limit else None


def _raise(error: type[BaseException]) -> Any:
    raise error("injected")


@dataclass
class Case:
    """Everything that is drawn."""

    kind: str
    reduction: str
    dropout: float
    coupled: bool
    normalized: bool
    offload: bool
    model: str
    size: int | str
    before: Tensor | None
    ids: Tensor
    target: Tensor
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {'coupled' if self.coupled else self.reduction}"

    def net(self) -> Net:
        """Return the net, with a gradient if there is one before."""
        net = Net(self.kind, self.dropout, self.seed)
        torch.manual_seed(self.seed)
        if self.before is not None:
            net(self.before).square().sum().backward()
            net.calls.zero_()
        return net

    def splitter(self, net: Net, size: int | str) -> speedswap.BatchSplitter:
        model: Any = {"none": None, "net": net, "list": [net.items, net.layer, net]}[self.model]
        normalizer = (lambda ids, target: target[:, 0].abs().sum()) if self.normalized else None
        reduction: Any = self.reduction
        return speedswap.BatchSplitter(
            model,
            micro_batch_size=size,  # type: ignore[arg-type]
            reduction=reduction,
            normalizer=normalizer,
            offload_activations=self.offload,
        )

    def loss(self, net: Net, ids: Tensor, target: Tensor) -> Tensor:
        return self.reduced(net(ids), target)

    def reduced(self, out: Tensor, target: Tensor) -> Tensor:
        each = (out - target).square().sum(1)
        if self.normalized:
            weights = target[:, 0].abs()
            return (each * weights).sum() / weights.sum()
        return {"mean": each.mean, "sum": each.sum, "none": each.clone}[self.reduction]()

    def call(self, splitter: speedswap.BatchSplitter, net: Net, faults: Faults) -> Tensor:
        """Let the splitter compute the batch's gradients."""

        def guarded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*args: Tensor) -> Tensor:
                fault = faults.planned(len(args[0]))
                if fault and fault[0] == "before":
                    _raise(fault[1])
                out = function(*args)
                if fault and fault[0] == "after":
                    _raise(fault[1])
                if fault and fault[0] == "backward" and out.requires_grad:
                    out.register_hook(lambda grad: _raise(fault[1]))
                return out

            return call

        if self.coupled:
            encode = guarded(lambda ids: net(ids))
            return splitter.backward_coupled(encode, guarded(_contrastive), self.ids)
        loss = guarded(lambda ids, target: self.loss(net, ids, target))
        return splitter.backward(loss, self.ids, self.target)


def _contrastive(out: Tensor) -> Tensor:
    return (out @ out.T).logsumexp(1).mean()


@dataclass
class State:
    """The state that a call must restore, or leave unchanged."""

    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rows: Tensor
    random: tuple[Any, ...]

    @classmethod
    def of(cls, net: Net) -> State:
        grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in net.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        return cls(grads, buffers, net.rows(), (torch.get_rng_state(), random.getstate()))

    def differences(self, other: State) -> list[str]:
        """List the values that are not equal to the last bit."""
        found = [f"grad of {name}" for name in self.grads if not _equal(self.grads[name], other.grads[name])]
        found += [f"buffer {name}" for name in self.buffers if not _equal(self.buffers[name], other.buffers[name])]
        found += [] if torch.equal(self.rows, other.rows) else ["rows of the table"]
        found += [] if torch.equal(self.random[0], other.random[0]) else ["torch's random numbers"]
        found += [] if self.random[1] == other.random[1] else ["Python's random numbers"]
        return found


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a, b)


def _case(rng: random.Random) -> Case:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    samples = rng.choice([1, 2, 5, 8, 13, 32])
    coupled = rng.random() < 0.3
    reduction = rng.choice(["mean", "sum", "none"])
    return Case(
        kind=rng.choice(["ours", "ours", "bag", "torch"]),
        reduction="mean" if coupled else reduction,
        dropout=rng.choice([0.0, 0.0, 0.5]),
        coupled=coupled,
        normalized=not coupled and reduction == "mean" and rng.random() < 0.3,
        offload=rng.random() < 0.15,
        model=rng.choice(["none", "none", "net", "list"]),
        size=rng.choice(["auto", "auto", "auto", rng.randrange(1, 9)]),
        before=torch.randint(ROWS, (4, LENGTH), generator=generator) if rng.random() < 0.5 else None,
        ids=torch.randint(ROWS, (samples, LENGTH), generator=generator),
        target=torch.randn(samples, 2, generator=generator, dtype=torch.float64),
        seed=rng.randrange(2**31),
    )


def _faults(rng: random.Random, samples: int) -> Faults:
    places = ["before", "after", "backward"]
    faults = Faults(place=rng.choice(places))
    if rng.random() < 0.6:
        faults.limit = rng.randrange(1, samples + 1)
    for _ in range(rng.choice([0, 1, 1, 2])):
        faults.at[rng.randrange(1, 12)] = (rng.choice(places), torch.OutOfMemoryError)
    if rng.random() < 0.3:
        error = rng.choice([Injected, KeyboardInterrupt, ValueError])
        faults.at[rng.randrange(1, 8)] = (rng.choice(places), error)
    return faults


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore", SpeedswapWarning)
    rng = random.Random(seed)
    case = _case(rng)
    faults = _faults(rng, len(case.ids))
    text = f"{case}, {faults}"
    net = case.net()
    splitter = case.splitter(net, case.size)
    before = State.of(net)
    try:
        loss = case.call(splitter, net, copy.deepcopy(faults))
        ending = "split" if splitter.micro_batch_size != len(case.ids) else "whole"
    except (Injected, KeyboardInterrupt, ValueError, torch.OutOfMemoryError) as error:
        if "injected" not in str(error):
            raise
        changed = before.differences(State.of(net))
        if changed:
            raise Broken(f"after {type(error).__name__}, {', '.join(changed)} changed: {text}") from error
        del error
        loss = case.call(splitter, net, Faults())
        ending = "failed"
    _require_same_as_asked_for(case, net, splitter.micro_batch_size, loss, text)
    if not case.dropout:
        _require_same_as_unsplit(case, net, loss, text)
    return f"{case.name}, {ending}"


def _require_same_as_asked_for(case: Case, net: Net, size: int | None, loss: Tensor, text: str) -> None:
    """Check that a batch that succeeded trains exactly as if the size that fitted had been given."""
    assert size is not None
    after, twin = State.of(net), case.net()
    expected = case.call(case.splitter(twin, size), twin, Faults())
    changed = after.differences(State.of(twin))
    if not torch.equal(loss, expected):
        changed.append(f"loss ({loss} for {expected})")
    if changed:
        raise Broken(f"{', '.join(changed)} is not what micro-batches of {size} give: {text}")


def _require_same_as_unsplit(case: Case, net: Net, loss: Tensor, text: str) -> None:
    """Check that gradients, and the step with them, are those of the whole batch."""
    twin = case.net()
    out = twin(case.ids)
    expected = _contrastive(out) if case.coupled else case.reduced(out, case.target)
    expected.sum().backward()
    for name, parameter in net.named_parameters():
        theirs = dict(twin.named_parameters())[name].grad
        if parameter.grad is None or theirs is None or not _close(parameter.grad, theirs):
            raise Broken(f"the gradient of {name} is {parameter.grad}, not {theirs}: {text}")
    for each in (net, twin):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    if not _close(net.rows(), twin.rows()) or not _close(loss, expected.detach()):
        raise Broken(f"rows after a step, or the loss, {loss}, are not the whole batch's: {text}")


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11)


ATTACK = Attack(
    name="splitter",
    promise="a split batch trains like the whole one, whatever runs out of memory; a failed one leaves nothing behind",
    round=_round,
    quick=4,
)
