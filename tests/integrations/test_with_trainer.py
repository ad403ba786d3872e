"""The Trainer of transformers trains, saves and resumes converted models; its sharded checkpoints are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.pages import run_page

import speedswap

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]


def rows_of(model: Any) -> torch.Tensor:
    rows: torch.Tensor = model.get_input_embeddings().read()
    return rows


def test_page_runs_and_resumes_to_the_same_bits() -> None:
    page = run_page("trainer")
    for model in (page["resumed"], page["apart"]):
        assert torch.equal(rows_of(model), rows_of(page["model"]))
        assert torch.equal(model.lm_head.weight, page["model"].lm_head.weight)
    assert type(page["plain"].get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(page["plain"].get_input_embeddings().weight, rows_of(page["model"]))
    whole, apart = (os.path.getsize(f"{run}/checkpoint-4/optimizer.pt") for run in ("run", "apart"))
    assert whole - apart > 2 * 5000 * 16 * 4  # the rows' state


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lookahead_changes_nothing(accumulated: int) -> None:
    page = run_page("trainer", "def converted")

    class Ahead(transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            ids = {self.model.get_input_embeddings(): lambda batch: batch["input_ids"]}
            return speedswap.lookahead(super().get_train_dataloader(), ids)

    found = []
    for trainer in (transformers.Trainer, Ahead):
        model, arguments = page["converted"](), page["arguments"]("out", 4)
        arguments.gradient_accumulation_steps = accumulated
        trainer(model, arguments, train_dataset=page["data"]).train()
        found.append(rows_of(model))
    assert torch.equal(*found)


def test_shards_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    """By convert, into a model that was built without memory, and in place."""
    run = run_page("trainer", "def converted")
    config = run["converted"]().config
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with accelerate.init_empty_weights():
        ours = transformers.LlamaForCausalLM(config)
    ours = speedswap.convert(ours, checkpoint=tmp_path, min_rows=5000, storage="pageable")
    ids = torch.randint(5000, (2, 8))
    assert isinstance(ours.get_input_embeddings(), speedswap.Embedding)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    for file in (tmp_path, tmp_path / "model.safetensors.index.json"):
        items = speedswap.Embedding.from_file(file, name="model.embed_tokens.weight")
        assert torch.equal(items(ids), theirs.model.embed_tokens(ids))
