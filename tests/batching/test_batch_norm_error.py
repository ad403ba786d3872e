"""By how much BatchNorm's gradients change when a batch is split, and that no cheap second pass mends it."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import speedswap


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels, wider, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)])
        down = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))
        self.down = nn.Identity() if channels == wider else down

    def forward(self, images):
        inner = self.norms[0](self.first(images)).relu()
        return (self.norms[1](self.second(inner)) + self.down(images)).relu()


def resnet18(width=64):
    """Return ResNet18 (He et al. 2015) with its usual initialization."""
    blocks, channels = [], width
    for stage in range(4):
        for stride in (2 if stage else 1, 1):
            blocks.append(Block(channels, width * 2**stage, stride))
            channels = width * 2**stage
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model


def norms(model):
    return [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]


def collect(model, parts):
    """Have every BatchNorm normalize by mean and variance, as constants, of all that the parts send through it."""
    moments = {norm: [0, 0.0, 0.0] for norm in norms(model)}

    def add(norm, args, output):
        values = args[0].transpose(0, 1).flatten(1).double()
        count, total, squares = moments[norm]
        moments[norm] = [count + values.shape[1], total + values.sum(1), squares + values.square().sum(1)]

    hooks = [norm.register_forward_hook(add) for norm in moments]
    with torch.no_grad():
        for part in parts:
            model(part)
    for hook in hooks:
        hook.remove()
    for norm, (count, total, squares) in moments.items():
        norm.running_mean.copy_(total / count)
        norm.running_var.copy_(squares / count - (total / count).square())
        norm.eval()


@pytest.mark.release
@pytest.mark.slow
def test_gradients_through_batch_norm_are_as_far_off_as_is_said(caplog):
    """ResNet18, 48 images of 64 by 64 in micro-batches of 16; a second pass with fixed statistics mends nothing.

    Not even with the very statistics of the whole batch: the loss is then right, and the gradient lacks what goes
    through them.
    """
    torch.manual_seed(0)
    model = resnet18()
    images, labels = torch.randn(48, 3, 64, 64), torch.randint(10, (48,))

    def gradient(model, micro_batch_size):
        splitter = speedswap.BatchSplitter(model, micro_batch_size=micro_batch_size)
        loss = splitter.backward(lambda x, y: functional.cross_entropy(model(x), y), images, labels)
        return loss, torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    loss, wanted = gradient(copy.deepcopy(model), 48)
    _, split = gradient(copy.deepcopy(model), 16)
    whole_statistics, own_statistics = copy.deepcopy(model), copy.deepcopy(model)
    collect(whole_statistics, [images])
    collect(own_statistics, images.split(16))
    fixed_loss, fixed = gradient(whole_statistics, 16)
    _, cheap = gradient(own_statistics, 16)
    errors = [float((found - wanted).norm() / wanted.norm()) for found in (split, fixed, cheap)]
    assert 0.7 < errors[0] < 0.9
    assert min(errors) > 0.5
    assert torch.allclose(fixed_loss, loss, rtol=1e-4)
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("BatchNorm")]
    (percent,) = re.findall(r"(\d+) %", said)
    assert errors[0] == pytest.approx(int(percent) / 100, abs=0.1)
