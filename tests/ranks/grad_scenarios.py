"""Norms and sums of gradients whose rows are spread over ranks, by the ways in which loops ask for them."""

from __future__ import annotations

import math

import torch
from places import owned

import speedswap
from speedswap.collectives import RankGroup

NORMS = {
    "vector_norm": torch.linalg.vector_norm,
    "vector_norm of order 1": lambda grad: torch.linalg.vector_norm(grad, 1),
    "all dimensions": lambda grad: torch.linalg.vector_norm(grad, dim=(0, 1)),
    "all dimensions, kept": lambda grad: torch.linalg.vector_norm(grad, math.inf, dim=(-1, 0), keepdim=True),
    "norm": lambda grad: grad.norm(),
    "norm of all dimensions": lambda grad: torch.norm(grad, dim=(0, 1)),
    "linalg.norm": torch.linalg.norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "detached": lambda grad: grad.detach().norm(),
    "data": lambda grad: grad.data.norm(),
    "copied": lambda grad: grad.clone().norm(3),
    "scaled": lambda grad: torch.linalg.norm(0.5 * grad),
    "as float": lambda grad: grad.float().norm().double(),
    "flat": lambda grad: torch.linalg.norm(grad.flatten(), 1),
    "reshaped": lambda grad: grad.reshape(-1).norm(),
    "distance": lambda grad: torch.dist(grad, torch.zeros_like(grad)),
    "total": lambda grad: torch.nn.utils.get_total_norm([grad]),
}

REDUCTIONS = {
    "sum": torch.sum,
    "sum of all dimensions": lambda grad: grad.sum(dim=(0, 1), keepdim=True),
    "norm by hand": lambda grad: grad.pow(2).sum().sqrt(),
    "mean": lambda grad: grad.mean(),
    "largest": lambda grad: grad.abs().max(),
    "smallest": torch.min,
    "amax": lambda grad: grad.detach().amax(),
    "amin of all dimensions": lambda grad: torch.amin(grad, (0, -1)),
    "any": lambda grad: (grad > 1).any(),
    "none": lambda grad: torch.isnan(grad).any(),
    "finite": lambda grad: torch.isfinite(grad).all(),
    "below": lambda grad: grad.lt(1).all(),
    "in double": lambda grad: torch.sum(grad.float(), dtype=torch.float64),
    "filled": lambda grad: grad.masked_fill(grad > 0, 2.0).sum(),
}


def norms(group, ids):
    """Return norms and sums of a gradient, by name, and the errors of those that no rank can compute."""
    items = speedswap.Embedding(20, 2, **settings_of(group, "sum"))
    items(torch.tensor(ids if group is None or group.rank() == 0 else [], dtype=torch.int64)).square().sum().backward()
    grad, said = items.weight.grad, []
    for norm in (lambda: torch.linalg.norm(grad, 2), lambda: torch.linalg.matrix_norm(grad, "nuc")):
        try:
            norm()
        except TypeError as error:
            said.append(str(error))
    own = grad.sum(1), grad.max(1).values, grad[:1].sum(), torch.max(grad, grad)  # of rows that this rank has
    assert [each.shape for each in own] == [(len(grad),), (len(grad),), (), grad.shape]
    return {name: norm(grad).squeeze() for name, norm in (NORMS | REDUCTIONS).items()}, said


def reduce_no_rows(group):
    """Return the sum of a gradient that has no rows on any rank, and what its largest value raises."""
    items = speedswap.Embedding(20, 2, **settings_of(group, "sum"))
    items(torch.empty(0, dtype=torch.int64)).sum().backward()
    grad, said = items.weight.grad, ""
    try:
        grad.max()
    except RuntimeError as error:
        said = str(error)
    return grad.sum().item(), said, items.read(torch.tensor([0])).shape


def clip_another(group, how):
    """Clip gradients that are not those of the backward pass: replaced, or by hand, with their detached norm."""
    items, dense = speedswap.Embedding(20, 2, **settings_of(group, "mean")), torch.nn.Linear(2, 1, dtype=torch.float64)
    torch.nn.init.ones_(dense.weight)
    parameters = [items.weight, *dense.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        dense(items(torch.arange(number, number + 5))).square().sum().backward()
        if how == "set":
            for each in parameters:
                each.grad = each.grad * 1.0
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        else:
            norm_of = {"by hand": torch.norm, "squares": lambda grad: grad.square().sum().sqrt()}[how]
            total = torch.stack([norm_of(each.grad.detach()) for each in parameters]).norm()
            for each in parameters:
                each.grad.mul_(0.1 / total)
        optimizer.step()
    return items.read(), dense.weight.detach()


FACTS = {
    "is None": lambda grad: grad is None,
    "dtype": lambda grad: grad.dtype,
    "device": lambda grad: grad.device,
    "layout": lambda grad: (grad.is_sparse, grad.layout, grad.is_cuda),
    "graph": lambda grad: (grad.grad_fn, grad.requires_grad),
    "zero_": lambda grad: grad.zero_(),
    "foreach zero_": lambda grad: torch._foreach_zero_([grad]),
}
USES = {
    "shape": lambda grad: grad.shape,
    "len": len,
    "numpy": lambda grad: grad.numpy(),
    "repr": repr,
    "item": lambda grad: grad[:1].sum(),
    "copy": lambda grad: grad.clone(),
    "in place": lambda grad: grad.mul_(2),
    "among others": lambda grad: torch._foreach_mul_([grad], 0.5),
    "into it": lambda grad: torch.mul(grad, 1, out=grad),
    "detach": lambda grad: grad.detach(),
}


def rounds_of_uses(group):
    """Return the rounds of the first uses of a gradient and of another table's, by name."""
    tables = [speedswap.Embedding(20, dim, **settings_of(group, "sum")) for dim in (2, 3)]
    optimizer = torch.optim.SGD([table.weight for table in tables], 0.1)
    lane, found = RankGroup.of(group).main, {}
    for name, use in (FACTS | USES).items():
        for table in tables:
            table(torch.arange(5)).sum().backward()
        rounds = lane.rounds
        for table in tables:
            use(table.weight.grad)
        found[name] = lane.rounds - rounds
        optimizer.zero_grad()
    return found


def kept_handles(group):
    """Take a gradient before its exchange and use it later; return what it holds at the end of each way."""
    items = speedswap.Embedding(20, 2, **settings_of(group, "sum"))
    optimizer, found = torch.optim.SGD(items.parameters(), 0.1), []

    def backward(factor):
        (factor * items(torch.arange(5))).sum().backward()
        return items.weight.grad

    grad = backward(1)  # used after the step, which exchanges it
    optimizer.step()
    found.append(grad.sum().item())
    optimizer.zero_grad()
    grad = backward(2)  # dropped, and then used
    optimizer.zero_grad()
    again = backward(3)
    found += [again.sum().item(), grad.sum().item()]
    handle = backward(4)  # added to that of an earlier exchange, which is the same tensor
    found += [float(handle is again), handle.sum().item(), again.sum().item()]
    backward(5)  # set to itself, while it waits
    items.weight.grad = items.weight.grad
    found.append(items.weight.grad.sum().item())
    items(torch.arange(5))  # a lookup without a backward pass
    found.append(items.weight.grad.sum().item())
    optimizer.zero_grad()
    found.append(float(items.weight.grad is None))
    return found


def settings_of(group, reduction):
    settings = {"seed": 1, "dtype": torch.float64}
    return settings if group is None else {**settings, "storage": owned(group, reduction=reduction)}
