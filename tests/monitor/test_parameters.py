"""Parameters are counted once, module by module, in elements, bytes and optimizer state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedswap.monitor import count_parameters


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, a scale at the root, and a frozen part in half precision."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.frozen = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids))) * self.scale.sum()


def test_counts_by_hand(device):
    count = count_parameters(Tied().to(device))
    assert count.model.trainable == 7 + 40 + (16 + 4) + (4 + 4) + 10
    assert count.model.frozen == 20
    assert count.model.buffers == 4 + 4 + 1
    assert count.model.shared == 0
    assert count.model.bytes_by_dtype == {torch.float32: 4 * 85, torch.bfloat16: 2 * 20}
    assert count.model.gradient_bytes == 4 * 85
    assert count.model.optimizer_bytes is None
    assert (count["body"].trainable, count["body.0"].trainable, count["body.1"].buffers) == (28, 20, 9)
    assert (count["head"].trainable, count["head"].shared, count["embedding"].shared) == (50, 40, 40)


def test_total_is_torchs():
    model = nn.Transformer(
        d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=32, batch_first=True
    )
    count = count_parameters(model)
    assert count.model.total == sum(p.numel() for p in model.parameters())
    assert [module.name for module in count] == [name for name, _ in model.named_modules()]


def test_a_module_used_twice_counts_once():
    layer = nn.Linear(3, 3)
    count = count_parameters(nn.Sequential(layer, layer))
    assert count.model.total == 12
    assert count["0"].shared == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    ],
)
def test_optimizer_state_is_foretold_exactly(make, device):
    model = Tied().to(device)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    before = count_parameters(model, optimizer)
    model(torch.tensor([1, 2, 3], device=device)).sum().backward()
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    after = count_parameters(model, optimizer)
    assert before.model.optimizer_bytes == after.model.optimizer_bytes == held
    assert after["head"].optimizer_bytes == before["head"].optimizer_bytes
    if held:
        assert not after.optimizer_estimated


def test_foretelling_changes_nothing():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.clone()
    count_parameters(model, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


def test_optimizer_that_needs_a_closure_is_not_foretold():
    model = nn.Linear(4, 4)
    count = count_parameters(model, torch.optim.LBFGS(model.parameters()))
    assert count.model.optimizer_bytes is None


def test_forward_is_timed_without_changing_the_model(device):
    model = Tied().to(device).train()
    model.body[1].eval()
    mean = model.body[1].running_mean.clone()
    count = count_parameters(model, example=torch.tensor([1, 2, 3], device=device))
    assert count.model.forward_seconds >= count["body"].forward_seconds >= count["body.0"].forward_seconds > 0
    assert count["frozen"].forward_seconds is None
    assert (model.training, model.body[1].training) == (True, False)
    assert torch.equal(model.body[1].running_mean, mean)
    assert not model._forward_hooks


def test_table_has_a_line_for_each_module():
    lines = str(count_parameters(Tied())).splitlines()
    assert len(lines) == 1 + 7
    assert lines[0].split() == ["module", "type", "trainable", "frozen", "shared", "bytes", "optimizer", "ms"]
    assert lines[1].split() == ["(model)", "Tied", "85", "20", "0", "380", "-", "-"]
