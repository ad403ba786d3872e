"""The memory of a released model is fine-tuned to the same bits, whether the training is killed or not."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]


@pytest.mark.slow
def test_a_killed_training_ends_as_an_uninterrupted_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    import finetune_memory as example

    forked = multiprocessing.get_context("fork")  # spawned, each would import all of these
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forked)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    model = example.main(["--epochs", "2", "--output", str(killed)])
    assert "killed at step 12: exit code -9" in capfd.readouterr().out
    example.main(["--epochs", "2", "--output", str(straight), "--kill-at", "0"])
    found = [safetensors.load_file(each / "adapters/speedswap_rows.safetensors") for each in (killed, straight)]
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name])
    assert 500 < len(found[0]["model.embed_tokens_per_layer.ids"]) <= 1024  # words of the documents
    sizes = [
        (killed / name).stat().st_size for name in ("adapters/speedswap_rows.safetensors", "base/model.safetensors")
    ]
    assert sizes[0] < sizes[1] / 8
    batch = {name: values[None] for name, values in example.facts()[0].items()}
    untrained = transformers.AutoModelForCausalLM.from_pretrained(killed / "base")
    with torch.no_grad():
        assert model.eval()(**batch).loss < untrained(**batch).loss - 0.05
