"""A dry run leaves no trace, and tells its watcher what happens inside."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speedswap.batching.rollback import DryRun, Watcher


class Told(Watcher):
    """A record of what a watcher is told, in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def operation(self, func: Any, args: Any, kwargs: Any) -> None:
        self.heard.append(func.name())

    def made(self, func: Any, result: Any) -> None:
        self.heard.append(f"made {tuple(result.shape)}")

    def saved(self, tensor: Tensor) -> None:
        self.heard.append(f"saved {tuple(tensor.shape)}")

    def entered(self, module: nn.Module, args: Any) -> None:
        self.heard.append(f"into {type(module).__name__}")

    def left(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.heard.append(
            f"out of {type(module).__name__} with {sorted(kwargs)}, {'a result' if result is not None else None}"
        )


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_dry_run_leaves_no_trace(keeps_graph: bool) -> None:
    model, generator = nn.BatchNorm1d(2), torch.Generator().manual_seed(5)
    buffers = [buffer.clone() for buffer in model.buffers()]
    drawn = torch.get_rng_state(), np.random.get_state()[1].copy(), generator.get_state()  # noqa: NPY002
    with suppress(ZeroDivisionError), DryRun(Watcher(), keeps_graph=keeps_graph) as run:
        assert torch.is_grad_enabled() == keeps_graph
        assert not run.has_changed
        model(torch.zeros(4, 2) + 1)
        assert run.has_changed
        np.random.rand()  # noqa: NPY002
        torch.rand(2, generator=generator)
        warnings.warn("of few samples", stacklevel=1)  # an error here, unless it is ignored
        raise ZeroDivisionError
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert np.array_equal(np.random.get_state()[1], drawn[1])  # noqa: NPY002
    assert torch.equal(generator.get_state(), drawn[2])
    assert torch.is_grad_enabled()
    assert not torch.nn.modules.module._has_any_global_hook()
    loss = model(torch.randn(4, 2)).sum()
    loss.backward()  # nothing of this graph was dropped


def test_the_watcher_hears_of_operations_modules_and_what_is_saved() -> None:
    told, weight = Told(), torch.ones(3, 2, requires_grad=True)

    class Product(nn.Module):
        def forward(self, x: Tensor, *, by: Tensor) -> Tensor:
            return x @ by

    product, x = Product(), torch.ones(4, 3)
    with DryRun(told, keeps_graph=True):
        product(x, by=weight)
        with pytest.raises(RuntimeError):
            product(x, by=torch.ones(2, 2))
    assert told.heard[:4] == ["into Product", "saved (4, 3)", "aten::mm", "made (4, 2)"]
    assert told.heard[-3:] == ["into Product", "aten::mm", "out of Product with [], None"]
    told.heard.clear()
    with DryRun(told):
        product(x, by=weight)
    assert told.heard == ["into Product", "aten::mm", "made (4, 2)", "out of Product with ['by'], a result"]
