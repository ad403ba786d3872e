"""accelerate prepares, saves and resumes models with tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integrations.pages import run_page

import speedswap

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _no_accelerator_before_or_after() -> Iterator[None]:
    """Its state is of the process, in which tests of other files may have run."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_page_runs_and_resumes_to_the_same_bits() -> None:
    page = run_page("accelerate")
    for model in (page["resumed"], page["again"]):
        assert torch.equal(model.items.read(), page["model"].items.read())
        assert torch.equal(model.last.weight, page["model"].last.weight)
    whole, apart = (os.path.getsize(f"{folder}/model.safetensors") for folder in ("state", "apart"))
    assert whole > 100_000 * 16 * 4 > 1000 * apart
    page["train"](page["again"], page["optimizer"], page["loader"])  # the optimizer is loaded as well
    page["accelerator"].free_memory()
    model, optimizer, loader = page["prepared"]()
    page["accelerator"].load_state("state")
    for _ in range(2):
        page["train"](model, optimizer, loader)
    assert torch.equal(page["again"].items.read(), model.items.read())


def test_windows_that_end_with_the_loader_are_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    items = speedswap.Embedding(10, 2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))
    with pytest.raises(ValueError, match=r"GradientAccumulationPlugin\(num_steps=2, sync_with_dataloader=False\)"):
        speedswap.lookahead(loader, {items: lambda batch: batch})


def test_averages_come_back(tmp_path: Path) -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, averaged: speedswap.optim.Averaged) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.tensor([3, 5])).square().mean())
        optimizer.step()
        averaged.update_parameters(model)

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, speedswap.optim.Averaged]:
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(speedswap.Embedding(10, 4, seed=1), torch.nn.Linear(4, 1))
        averaged = speedswap.optim.Averaged(model, decay=0.9)
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        accelerator.register_for_checkpointing(averaged)
        return model, optimizer, averaged

    accelerator = accelerate.Accelerator(cpu=True)
    training = made()
    for _ in range(3):
        step(*training)
    accelerator.save_state(str(tmp_path / "state"))
    step(*training)
    resumed = made()
    accelerator.load_state(str(tmp_path / "state"))
    step(*resumed)
    torch.testing.assert_close(resumed[2].module[0].read(), training[2].module[0].read())
    assert not torch.allclose(resumed[2].module[0].read(), resumed[0][0].read())
    assert torch.equal(resumed[2].module[1].weight, training[2].module[1].weight)
    assert int(resumed[2].n_averaged) == 4
