"""Two processes under torchrun own the tables of Lightning's, Fabric's, accelerate's and Trainer's models."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import torchrun
from integrations.pages import code_of

pytestmark = pytest.mark.release  # each takes some ten seconds

LIGHTNING = """
two = dict(strategy="ddp", devices=2, enable_progress_bar=False)
fit(SharedScores(), 1, **two)
resumed, through = SharedScores(), SharedScores()
fit(resumed, 2, "apart.ckpt", **two)
fit(through, 2, **two)
"""
FABRIC = """
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
data = TensorDataset(torch.arange(2000) * 37, torch.arange(2000) % 2.0)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=250))
through, optimizer = made_by_ranks()
train(through, optimizer)
speedswap.save_checkpoint("tables", through.module, optimizer)
train(through, optimizer)
resumed, optimizer = made_by_ranks()
speedswap.load_checkpoint("tables", resumed.module, optimizer)
train(resumed, optimizer)
through, resumed = through.module, resumed.module
through.items, resumed.items = through[0], resumed[0]
"""
ACCELERATE = """
class SharedScores(Scores):
    def __init__(self):
        super().__init__()
        self.items = speedswap.Embedding(100_000, 16, seed=1, storage=speedswap.Ranks())

def prepared():
    model = speedswap.ignore_in_ddp(SharedScores())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, *accelerator.prepare(model, optimizer, DataLoader(data, batch_size=250))

def train(model, parallel, optimizer, loader):
    for ids, labels in speedswap.lookahead(loader, {model.items: lambda batch: batch[0]}):
        with accelerator.accumulate(parallel):
            accelerator.backward(torch.nn.functional.mse_loss(parallel(ids), labels))
            accelerator.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

through, parallel, optimizer, loader = prepared()
train(through, parallel, optimizer, loader)
save("apart", parallel, optimizer)
train(through, parallel, optimizer, loader)
accelerator.free_memory()
resumed, parallel, optimizer, loader = prepared()
load("apart", parallel, optimizer)
train(resumed, parallel, optimizer, loader)
"""
TRAINER = """
def sharded():
    model = speedswap.ignore_in_ddp(converted(speedswap.Ranks()))
    return model

arguments("apart", 8)  # the processes meet
through, resumed = sharded(), sharded()
train(through)
train(resumed, "apart/checkpoint-4")
through, resumed = through.model, resumed.model
through.items, resumed.items = through.embed_tokens, resumed.embed_tokens
"""
SAME = """
ids = torch.arange(5000)
print("tables agree" if torch.equal(resumed.items.read(ids), through.items.read(ids)) else "other", flush=True)
"""


def test_lightnings_ddp_saves_and_resumes(tmp_path: Path, in_a_folder: None) -> None:
    pytest.importorskip("lightning")
    code = code_of("lightning", "class Scores(", "class TableCheckpoints", "class SharedScores")
    (tmp_path / "train.py").write_text(code + LIGHTNING + SAME)
    assert torchrun(2, ["train.py"]).count("tables agree") == 2


def test_fabrics_processes_save_and_resume(tmp_path: Path, in_a_folder: None) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(code_of("fabric", "def train(", "def made_by_ranks(") + FABRIC + SAME)
    assert torchrun(2, ["train.py"]).count("tables agree") == 2


def test_accelerates_processes_save_and_resume(tmp_path: Path, in_a_folder: None) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(code_of("accelerate", "class Scores(", "def save(") + ACCELERATE + SAME)
    assert torchrun(2, ["train.py"]).count("tables agree") == 2


def test_trainers_processes_save_and_resume(tmp_path: Path, in_a_folder: None) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(code_of("trainer", "def converted", "class TableCheckpoints") + TRAINER + SAME)
    assert torchrun(2, ["train.py"]).count("tables agree") == 2
