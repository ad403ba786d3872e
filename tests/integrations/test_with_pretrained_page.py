"""The page on released models runs, and the models that it saves compute what they did."""

from __future__ import annotations

import os

import pytest
import torch
from integrations.pages import run_page

pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]

IDS = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(0))


def test_page_runs() -> None:
    page = run_page("pretrained")
    with torch.no_grad():
        assert torch.equal(page["both"].eval()(IDS).logits, page["tuned"].eval()(IDS).logits)
    rows = page["model"].model.embed_tokens_per_layer.read(), page["again"].model.embed_tokens_per_layer.read()
    assert not torch.equal(*rows)  # the adapters' training went on from the first one's
    for folder in ("run/checkpoint-4", "trained", "tuned/checkpoint-8", "adapters"):
        assert "speedswap_rows.safetensors" in os.listdir(folder)
    assert os.path.getsize("trained/model.safetensors") < os.path.getsize("gemma/model.safetensors") - 512 * 96 * 2
