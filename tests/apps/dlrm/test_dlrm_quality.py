"""The model on speedswap's tables compared with the same one on torch's: equal losses, equal AUC."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import speedswap
from speedswap.apps.dlrm import DLRM, DlrmSettings
from speedswap.apps.dlrm.stream import Data
from speedswap.apps.dlrm.training import evaluate, train_step

SIZES = {"ids": 300, "capacity": 1_000, "dim": 8, "bottom": (16,), "top": (16,), "batch": 256, "device": "cpu"}


def torch_embedding(rows):
    """Return torch's embedding, whose gradients are summed in the order of the samples."""
    return nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=0)


def torch_bag(rows):
    """Return torch's bag with sparse gradients, which it sums in another order."""
    return nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", sparse=True, padding_idx=0)


class TorchTables(nn.Module):
    """A vector per category from torch's own tables, with the initial rows and the numbering of ours."""

    def __init__(self, ours, table_of):
        super().__init__()
        tables = ours.collection.tables
        self.maps = {name: speedswap.IdMap(table.num_embeddings - 1) for name, table in tables.items()}
        self.tables = nn.ModuleList(table_of(table.read()) for table in tables.values())

    def forward(self, ids):
        vectors = []
        for id_map, table, some in zip(self.maps.values(), self.tables, ids, strict=True):
            rows = id_map.add(some)[0] if self.training else id_map.lookup(some)
            vectors.append(table(rows.unsqueeze(1)).flatten(1))
        return torch.stack(vectors, dim=1)


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def pair(settings, table_of):
    """Return the model and the same one on torch's tables."""
    ours = DLRM(settings)
    tables = TorchTables(ours.embeddings, table_of)
    return ours, DLRM(settings, embeddings=tables)


def losses_of(model, optimizer, batches):
    return [
        F.binary_cross_entropy_with_logits(train_step(model, optimizer, batch), batch.samples.labels)
        for batch in batches
    ]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_with_adagrad_every_loss_is_that_of_torch_to_the_bit(lookahead):
    """And so is every prediction afterwards, also of new ids."""
    settings = DlrmSettings(generate=5_000, **SIZES)
    data = Data(settings)
    ours, theirs = pair(settings, torch_embedding)
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.05)
    speedswap.attach(optimizer, ours)
    batches = ours.prefetched(data.batches(), torch.device("cpu"), lookahead)
    found = losses_of(ours, optimizer, batches)
    expected = losses_of(theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.05), data.batches())
    assert len(found) == 18
    assert torch.equal(torch.stack(found), torch.stack(expected))
    (tested,) = data.tested()
    assert ours.predict(tested).equal(theirs.predict(tested))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_auc_is_that_of_torch_with_sparse_adam(seed):
    """Adam on the batch's rows compared with SparseAdam: other bits, the same quality."""
    settings = DlrmSettings(generate=10_000, seed=seed, optimizer="adam", lr=4e-3, **SIZES)
    data = Data(settings)
    ours, theirs = pair(settings, torch_bag)
    optimizer = settings.make_optimizer(ours)
    speedswap.attach(optimizer, ours)
    losses_of(ours, optimizer, data.batches())
    tables = torch.optim.SparseAdam(theirs.embeddings.parameters(), lr=4e-3)
    layers = torch.optim.Adam(theirs.dense().values(), lr=4e-3)
    losses_of(theirs, Both(tables, layers), data.batches())
    found, expected = (evaluate(model, data.tested(), torch.device("cpu")) for model in (ours, theirs))
    assert found.auc == pytest.approx(expected.auc, abs=0.002)
    assert found.auc > 0.6
