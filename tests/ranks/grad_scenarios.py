"""Norms of gradients whose rows are spread over ranks, by the ways in which loops ask for them."""

from __future__ import annotations

import math

import torch

import speedswap

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


def norms(group, ids):
    """Return norms of a gradient, by name, and what those that no rank can know raise."""
    items = speedswap.Embedding(20, 2, **owned(group, "sum"))
    items(torch.tensor(ids if group is None or group.rank() == 0 else [], dtype=torch.int64)).square().sum().backward()
    grad, said = items.weight.grad, []
    for norm in (lambda: torch.linalg.norm(grad, 2), lambda: torch.linalg.matrix_norm(grad, "nuc")):
        try:
            norm()
        except TypeError as error:
            said.append(str(error))
    return {name: norm(grad).squeeze() for name, norm in NORMS.items()}, said


def clip_another(group, how):
    """Clip gradients that are not those of the backward pass: set anew, or by hand, with their detached norm."""
    items, dense = speedswap.Embedding(20, 2, **owned(group, "mean")), torch.nn.Linear(2, 1, dtype=torch.float64)
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
            total = torch.stack([each.grad.detach().norm() for each in parameters]).norm()
            for each in parameters:
                each.grad.mul_(0.1 / total)
        optimizer.step()
    return items.read(), dense.weight.detach()


def owned(group, reduction):
    settings = {"seed": 1, "dtype": torch.float64}
    return settings if group is None else {**settings, "process_group": group, "reduction": reduction}
