"""The memory of n-grams lowers the perplexity, trains as plain torch, and resumes bit for bit."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ngram_memory
import pytest
import torch
from torch import nn

import speedswap
from speedswap.tables import ngram_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ngram-memory.md"
pytestmark = pytest.mark.usefixtures("one_thread")  # for such small layers
SMALL = ["--dim", "16", "--layers", "2", "--length", "12", "--batch", "8", "--row-dim", "4"]


def test_memory_lowers_the_perplexity() -> None:
    """Two words settle the next one: rows learn that at once, a small transformer does not."""
    without, with_memory = (
        ngram_memory.main([*SMALL, "--batch", "16", "--steps", "60", "--lr", "0.003", "--rows", rows])
        for rows in ("0", "100000")
    )
    assert with_memory < without / 2


def test_model_trains_as_over_a_plain_embedding() -> None:
    """Prefetched rows and the optimizer's state in the table change nothing."""
    text = ngram_memory.Text(ngram_memory.read(None, 100)[0], rows=2000, length=12)
    batches = list(text.random_batches(8, range(6), seed=0))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ngram_memory.LanguageModel(32, 16, 2, 12, nn.Embedding(2000, 4)).double())
    ours, theirs = models
    for model, kind in ((ours, speedswap.Embedding), (theirs, nn.Embedding)):
        model.memory.table = kind.from_pretrained(torch.zeros(2000, 4, dtype=torch.float64), freeze=False)
    losses = list(ngram_memory.training(ours, ngram_memory.optimizers_of(ours, 0.01, 0.1), batches))
    optimizers = ngram_memory.optimizers_of(theirs, 0.01, 0.1)
    for batch, expected in zip(batches, losses, strict=True):
        loss = ngram_memory.loss_of(theirs, batch)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    rows = theirs.memory.table.weight.detach()
    torch.testing.assert_close(ours.memory.table.read(), rows, rtol=1e-10, atol=1e-14)
    assert int((rows != 0).any(1).sum()) > 500


def test_windows_have_the_rows_of_the_whole_text() -> None:
    """At the first token of a window too, and apart at the borders of documents."""
    text = ngram_memory.Text(ngram_memory.read(None, 100)[0][:400], rows=10**6, length=12)
    documents = (text.tokens == ngram_memory.BEGIN).cumsum(0)
    whole = ngram_rows(text.tokens, ngram_memory.ORDERS, ngram_memory.HEADS, num_rows=10**6, document_ids=documents)
    starts = torch.arange(0, 380, 7)
    batch = text.batch(starts)
    for number, start in enumerate(starts.tolist()):
        at = slice(start + 2, start + 14)  # after the tokens that the first trigram reaches back
        assert torch.equal(batch.rows[number], whole[at])
        assert torch.equal(batch.inputs[number], text.tokens[at])
        assert torch.equal(batch.targets[number], text.tokens[start + 3 : start + 15])


@pytest.mark.parametrize("storage", ["pageable", "disk"])
def test_training_that_was_stopped_resumes_bit_for_bit(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the step after its checkpoint's next one: rows in the files on disk are ahead of the layers then."""

    def arguments(name: str) -> list[str]:
        place = ["--path", str(tmp_path / f"{name}-rows")] if storage == "disk" else []
        saved = ["--checkpoints", str(tmp_path / name), "--save-every", "4"]
        return [*SMALL, "--rows", "20000", "--steps", "9", "--storage", storage, *place, *saved]

    uninterrupted = ngram_memory.main(arguments("whole"))
    training = ngram_memory.training

    def stopped(*given: Any) -> Iterator[float]:
        for step, loss in enumerate(training(*given), 1):
            if step == 6:
                raise KeyboardInterrupt
            yield loss

    with monkeypatch.context() as patched:
        patched.setattr(ngram_memory, "training", stopped)
        with pytest.raises(KeyboardInterrupt):
            ngram_memory.main(arguments("parts"))
    assert ngram_memory.main([*arguments("parts"), "--resume"]) == uninterrupted
    whole, parts = (saved_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert len(whole) > 20
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def saved_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all that the last checkpoint has of the model and its optimizers."""
    rows = speedswap.Embedding(20_000, 4)
    model = ngram_memory.LanguageModel(32, 16, 2, 12, rows)
    optimizers = ngram_memory.optimizers_of(model, 0, 0)
    assert speedswap.load_checkpoint(path, model, optimizers).step == 9
    found = {name: rows.table.read(column=name) for name in rows.table.columns}
    found |= model.state_dict()
    state = optimizers[0].state_dict()["state"]
    return found | {f"{place} {name}": value for place, each in state.items() for name, value in each.items()}


def test_text_is_read_from_files(tmp_path: Path) -> None:
    """Every twentieth line is held out, and words beyond the vocabulary are one token."""
    lines = ["a b b", *["c c c c"] * 19, "b c d", "a"]
    (tmp_path / "text").write_text("\n".join(lines))
    with gzip.open(tmp_path / "text.gz", "wt") as file:
        file.write("\n".join(lines))
    for name in ("text", "text.gz"):
        train, test, vocabulary = ngram_memory.read(tmp_path / name, 4)
        assert test.tolist() == [0, 3, 1, 1, 0, 1, 2, 1]
        assert train.tolist() == [0, 2, 2, 2, 2] * 19 + [0, 3]
        assert vocabulary == 4


@pytest.mark.parametrize("wrong", [["--path", "rows"], ["--storage", "disk"], ["--resume"]])
def test_arguments_that_need_others(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ngram_memory.main(wrong)
    assert "--path goes with --storage disk, and --resume with --checkpoints" in capsys.readouterr().err


def test_snippets_of_the_page_run() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(code) == 5
    names: dict[str, Any] = {}
    exec(compile("import torch, speedswap\n" + "\n".join(code), PAGE.name, "exec"), names)
    assert names["found"].shape == (4, 128, 128)
    assert names["classes"].tolist() == [0, 0, 0, 1, 1]
