"""Batches of samples of different lengths on a device that fails at random: what comes out is the whole batch's."""

from __future__ import annotations

import random

import pytest
import torch
from splitting import gradients, of_runs, relative_error
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import speedswap
from speedswap.batching import Padded, PerSample
from speedswap.batching.rollback import DryRun


class FlakyDevice:
    """Raises out-of-memory for micro-batches that are too large, and now and then for others of several samples.

    So it does for single samples from a length on, unless a module of theirs runs again in the backward pass.
    """

    def __init__(self, generator: random.Random, most: float, power: int, too_long: float, module: nn.Module) -> None:
        self._generator, self._most, self._power = generator, most, power
        self._too_long, self._module = too_long, module
        self.failures, self.escalations = 0, 0

    def use(self, samples: int, longest: int) -> None:
        if any(isinstance(mode, DryRun) for mode in _get_current_dispatch_mode_stack()):
            return
        escalates = "forward" in vars(self._module)
        assert samples == 1 or not escalates
        self.escalations += escalates
        is_large = samples * longest**self._power > self._most
        is_alone = samples == 1 and longest >= self._too_long and torch.is_grad_enabled() and not escalates
        if is_alone or (samples > 1 and (is_large or self._generator.random() < 0.1)):
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FORMS = ("right", "left", "per sample", "jagged")


def batch_in(form: str, rows: list[Tensor], lengths: list[int]) -> object:
    """Return samples as an argument of one of the forms."""
    if form == "jagged":
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if form == "per sample":
        return PerSample(rows)
    return Padded(padded(rows, form), lengths, form)


def padded(rows: list[Tensor], side: str = "right") -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def run(seed: int) -> tuple[int, int]:
    """Train and evaluate one batch in one form against all of it at once; return failures and escalated calls."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [generator.randint(1, 9) for _ in range(generator.randint(1, 12))]
    rows = [torch.randn(length, 3, dtype=torch.float64) for length in lengths]
    form, power = generator.choice(FORMS), generator.choice([1, 2])
    reduction, counts_tokens = generator.choice([("mean", True), ("mean", False), ("sum", False), ("none", False)])
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    model = nn.Sequential(first, nn.Tanh(), second)
    most, too_long = generator.uniform(1, len(rows)) * max(lengths) ** power, generator.choice([5, 8, float("inf")])
    device = FlakyDevice(generator, most, power, too_long, first)

    def values(x: Tensor | list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the value of each token, 0 for padding, and which tokens are there."""
        x = padded(x) if isinstance(x, list) else x.to_padded_tensor(0) if x.is_nested else x
        device.use(*x.shape[:2])
        is_there = x.abs().sum(2) > 0
        return model(x)[:, :, 0].square() * is_there, is_there

    def loss_fn(x):
        tokens, is_there = values(x)
        losses = tokens.sum(1) / is_there.sum(1)
        loss = tokens.sum() / is_there.sum() if counts_tokens else losses if reduction == "none" else losses.mean()
        return loss * len(losses) if reduction == "sum" else loss, {"losses": losses, "length": is_there.sum(1)}

    def tokens_in(x) -> int:
        return (
            len(x.values())
            if isinstance(x, Tensor) and x.is_nested
            else sum(int((one != 0).any(-1).sum()) for one in x)
        )

    whole = batch_in(form, rows, lengths)
    splitter = speedswap.BatchSplitter(
        model,
        micro_batch_tokens="auto" if generator.random() < 0.8 else generator.randint(1, 5),
        reduction=reduction,
        normalizer=tokens_in if counts_tokens else None,
        grow_after=2,
        check=False,
        escalate=[first],
    )
    if splitter.micro_batch_size is not None:
        device._most = device._too_long = float("inf")
        device._generator = random.Random(0)
        device._generator.random = lambda: 1.0  # a fixed size cannot shrink
    for _ in range(3):
        model.zero_grad()
        loss, aux = splitter.backward(loss_fn, whole)
        found = gradients(model)
        evaluated = splitter.map(lambda x: loss_fn(x)[1], whole)

        each = torch.stack([model(row).square().sum() / len(row) for row in rows])
        of_tokens = torch.cat([model(row).square()[:, 0] for row in rows]).mean()
        wanted = of_tokens if counts_tokens else {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]
        model.zero_grad()
        wanted.sum().backward()
        assert relative_error(found, gradients(model)) <= 1e-12, seed
        assert torch.allclose(loss, wanted.detach(), rtol=1e-12), seed
        for results in (aux, evaluated):
            assert results["length"].tolist() == lengths, seed
            assert torch.allclose(results["losses"], each.detach(), rtol=1e-12), seed
    return device.failures, device.escalations


def test_results_are_those_of_the_whole_batch_whatever_fails():
    failures, escalations = map(sum, zip(*of_runs(run, range(100)), strict=True))
    assert failures > 250
    assert escalations > 150


@pytest.mark.release
@pytest.mark.parametrize("first", range(200, 10_200, 1000))
def test_results_are_those_of_the_whole_batch_whatever_fails_in_a_thousand_runs(first: int):
    failures, escalations = map(sum, zip(*of_runs(run, range(first, first + 1000)), strict=True))
    assert failures > 2500
    assert escalations > 1500
