"""Lightning trains, saves and resumes models with tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.pages import run_page

import speedswap
from speedswap import _words
from speedswap.errors import WeightError

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'speedswap[integrations]'")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def test_page_runs_and_resumes_to_the_same_bits() -> None:
    page = run_page("lightning")
    through = page["Scores"]()
    fitted(through, max_epochs=2)
    for model in (page["resumed"], page["apart"]):
        assert torch.equal(model.items.read(), through.items.read())
        assert torch.equal(model.last.weight, through.last.weight)
    assert not torch.equal(page["model"].items.read(), through.items.read())
    whole, apart = (os.path.getsize(name) for name in ("one.ckpt", "apart.ckpt"))
    assert whole > 2 * 100_000 * 16 * 4 > 100 * apart  # rows and their state, or neither


def fitted(model: torch.nn.Module, **settings: object) -> None:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    lightning.Trainer(enable_checkpointing=False, **options, **settings).fit(model)


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16-mixed"}, {"gradient_clip_val": 1e-3}, {"accumulate_grad_batches": 3}], ids=str
)
def test_lookahead_changes_nothing(settings: dict[str, object]) -> None:
    page = run_page("lightning", "class Scores(")
    ahead, plain = page["Scores"](), page["Scores"]()
    plain.train_dataloader = lambda: page["Scores"].train_dataloader(plain)._loader
    for model in (ahead, plain):
        fitted(model, max_epochs=1, **settings)
    assert torch.equal(ahead.items.read(), plain.items.read())


def test_a_loader_without_a_length_is_not_looked_ahead_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes a batch more to see the end: the results are those of the plain loop, with a warning."""
    monkeypatch.setattr(_words, "_said", set())  # tests of other files may have said it
    page = run_page("lightning", "class Scores(")
    ahead, plain = page["Scores"](), page["Scores"]()
    loader = plain.train_dataloader()._loader

    class WithoutLength:
        def __iter__(self) -> Iterator[object]:
            return iter(loader)

    plain.train_dataloader = lambda: loader
    ahead.train_dataloader = lambda: speedswap.lookahead(WithoutLength(), {ahead.items: lambda batch: batch[0]})
    fitted(plain, max_epochs=1)
    with pytest.warns(speedswap.errors.SpeedswapWarning, match="SW407: .* train on each batch before taking the next"):
        fitted(ahead, max_epochs=1)
    assert torch.equal(ahead.items.read(), plain.items.read())


def test_averages_of_lightning_are_refused_with_ours() -> None:
    page = run_page("lightning", "class Scores(")
    with pytest.raises(WeightError, match=r"speedswap\.optim\.Averaged\(model\)"):
        fitted(page["Scores"](), max_epochs=1, callbacks=[lightning.pytorch.callbacks.EMAWeightAveraging()])


def test_fabrics_page_resumes_to_the_same_bits() -> None:
    page = run_page("fabric")
    through, resumed = page["model"].module, page["resumed"].module
    assert torch.equal(resumed[0].read(), through[0].read())
    assert torch.equal(resumed[1].weight, through[1].weight)
    untrained = page["made"]()[0].module
    assert not torch.equal(untrained[0].read(), through[0].read())


def test_fabric_saves_and_resumes() -> None:
    """In its own files, and in checkpoints of ours, which an optimizer that Fabric has not wrapped loads too."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(speedswap.Embedding(100, 4), torch.nn.Linear(4, 1))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def run(model: Any, optimizer: Any, steps: range) -> torch.Tensor:
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(model(torch.tensor([step, 2 * step + 1])).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
        rows: torch.Tensor = model.module[0].read()
        return rows

    model, optimizer = fabric.setup(*made())
    run(model, optimizer, range(3))
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    speedswap.save_checkpoint("ours", model.module, optimizer)
    through = run(model, optimizer, range(3, 6))
    theirs, ours = fabric.setup(*made()), made()
    fabric.load("fabric.ckpt", {"model": theirs[0], "optimizer": theirs[1]})
    speedswap.load_checkpoint("ours", *ours)
    for again in (theirs, fabric.setup(*ours)):
        assert torch.equal(run(*again, range(3, 6)), through)
