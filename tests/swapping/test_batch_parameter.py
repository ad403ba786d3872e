"""During its step an optimizer holds the batch's rows as a plain parameter, in place of the weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import LostUpdateError

ROWS, DIM = 50, 4
IDS = torch.tensor([3, 7, 3, 11])


def paired() -> tuple[speedswap.Embedding, nn.Embedding]:
    ours, theirs = speedswap.Embedding(ROWS, DIM, seed=1), nn.Embedding(ROWS, DIM)
    with torch.no_grad():
        theirs.weight.copy_(ours.read())
    return ours, theirs


class Noting(torch.optim.SGD):
    """SGD that notes the parameters that it steps, and fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        self.noted = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.fails:
            raise RuntimeError("in the middle of the step")
        return super().step(closure)


@pytest.mark.parametrize("fails", [False, True])
def test_groups_hold_the_weight_again_after_a_step(fails: bool) -> None:
    items, optimizer = speedswap.Embedding(ROWS, DIM), None
    optimizer = Noting([items.weight, nn.Parameter(torch.ones(2))], lr=0.1)
    speedswap.attach(optimizer, items)
    items(IDS).sum().backward()
    optimizer.fails = fails
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            optimizer.step()
    else:
        optimizer.step()
    assert type(optimizer.noted[0]) is nn.Parameter
    assert optimizer.noted[0].shape == (3, DIM)
    assert optimizer.param_groups[0]["params"][0] is items.weight
    assert [*optimizer.state] == [items.weight]


class OwnList(torch.optim.Optimizer):
    """SGD over a list of parameters that it keeps itself, one after the other or together."""

    def __init__(self, parameters: Any, together: bool) -> None:
        super().__init__(parameters, {})
        self.own = [*self.param_groups[0]["params"]]
        self.together = together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.together:
            torch._foreach_add_(self.own, [parameter.grad for parameter in self.own], alpha=-0.5)
            return
        for parameter in self.own:
            assert parameter.shape == parameter.grad.shape
            parameter.add_(parameter.grad, alpha=-0.5)


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_with_its_own_list_steps_the_batchs_rows(together: bool) -> None:
    ours, theirs = paired()
    for items in (ours, theirs):
        optimizer = OwnList(items.parameters(), together)
        for _ in range(3):
            optimizer.zero_grad()
            items(IDS).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.read(), theirs.weight)


def test_a_state_dict_taken_within_a_step_is_of_before_it_and_changes_nothing() -> None:
    ours, theirs = paired()
    optimizers = [torch.optim.Adam(items.parameters(), lr=0.1) for items in (ours, theirs)]

    def train(steps: int) -> None:
        for items, optimizer in zip((ours, theirs), optimizers, strict=True):
            for _ in range(steps):
                optimizer.zero_grad()
                items(torch.arange(ROWS)).square().sum().backward()
                optimizer.step()

    train(2)
    before, taken = copy.deepcopy(optimizers[0].state_dict()), []
    hook = optimizers[0].register_step_post_hook(lambda optimizer, *_: taken.append(optimizer.state_dict()))
    train(1)
    hook.remove()
    for name, value in before["state"][0].items():
        assert torch.equal(taken[0]["state"][0][name], value), name
    train(1)
    assert torch.equal(ours.read(), theirs.weight)


def test_code_that_takes_the_weights_memory_without_asking_is_noticed() -> None:
    items = speedswap.Embedding(ROWS, DIM)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    items(IDS).sum().backward()
    weight: Tensor = items.weight
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch(), torch.no_grad():
        assert weight.shape == (3, DIM)
        weight.mul_(2)
    with pytest.raises(LostUpdateError, match="changed on the device without the optimizer's hooks"):
        items(IDS)
    items(IDS).sum().backward()
    optimizer.step()
