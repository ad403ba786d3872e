"""Every timed trainer agrees with torch; one that does not is found."""

from __future__ import annotations

import re
from dataclasses import replace

import fbgemm
import pytest
import torch

from speedswap.apps.bench import step
from speedswap.apps.bench.measure import zipf_batches
from speedswap.apps.bench.step import DENSE, OPTIMIZERS, Contestant, Ours, contestants, verify
from speedswap.apps.errors import WrongResultError
from speedswap.errors import OptimizerError


def torchs_refusal(optimizer, device):
    """Return torch's words for having no fused implementation of an optimizer; None if it has one."""
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        DENSE[optimizer]([weight], fused=True).step()
    except RuntimeError as error:
        return str(error).partition(" but ")[0]  # what follows names the parameter's dtype
    return None


def require_all_agree(optimizer, device):
    """Verify every contestant; those that are fused where torch is not must be refused in torch's words."""
    peers, refusal = fbgemm.step_peers(device), torchs_refusal(optimizer, device)
    everyone = [*contestants(optimizer, device), *fbgemm.contestants(optimizer, device)]
    everyone = [one for one in everyone if one.package not in peers or peers[one.package].present]
    assert {"speedswap", "torch"} <= {one.package for one in everyone}
    assert sum("fused" in one.name for one in everyone) == 2
    for one in everyone:
        if refusal is not None and "fused" in one.name:
            with pytest.raises((OptimizerError, RuntimeError), match=re.escape(refusal)):
                verify(optimizer, one, device)
        else:
            verify(optimizer, one, device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_every_contestant_trains_as_torch_does(optimizer, device):
    require_all_agree(optimizer, device)


class NotFused(torch.optim.Adagrad):
    """As torch 2.11 has it for a GPU."""

    def step(self, closure=None):
        if self.defaults["fused"]:
            parameter = self.param_groups[0]["params"][0]
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of supported devices: ['mps', 'xpu']"
                f" but {parameter.dtype} and {parameter.device.type}"
            )
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_contestants_that_torch_cannot_fuse_are_refused_in_its_words(monkeypatch):
    monkeypatch.setitem(DENSE, "adagrad", NotFused)
    assert torchs_refusal("adagrad", "cpu").endswith("of supported devices: ['mps', 'xpu']")
    require_all_agree("adagrad", "cpu")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_an_optimizer_without_a_fused_implementation_is_measured_without_it(monkeypatch):
    monkeypatch.setitem(DENSE, "adagrad", NotFused)
    plan = step.StepPlan(2000, 8, 512, 4, 1, {}, (), ())
    found = step.compare("adagrad", "cpu", plan, zipf_batches(2000, 512, 32, "cpu"))["trainers"]
    assert {name for name, entry in found.items() if "seconds" in entry} >= {"speedswap", "speedswap, lookahead"}
    for name in ("speedswap, fused", "speedswap, fused, lookahead"):
        assert "`fused=True` requires" in found[name]["skipped"]


class Forgetful(Ours):
    """Leaves the second batch out."""

    def steps(self, batches, grad):
        yield from super().steps([*batches[:1], *batches[2:]], grad)


class Hasty(Ours):
    """Takes all but one lookup's gradient."""

    def steps(self, batches, grad):
        grad = grad.clone()
        grad[-1] = 0
        yield from super().steps(batches, grad)


class Slow(Ours):
    """With a learning rate a thousandth smaller."""

    def steps(self, batches, grad):
        self.optimizer.param_groups[0]["lr"] *= 1 - 1e-3
        yield from super().steps(batches, grad)


@pytest.mark.parametrize("trainer", [Forgetful, Hasty, Slow])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_trainer_that_is_wrong_is_found(trainer, optimizer, device):
    with pytest.raises(WrongResultError, match=f"broken trains .* wrongly with {optimizer}: row "):
        verify(optimizer, Contestant("broken", "broken", trainer), device)


def test_a_dense_optimizer_drifts_and_says_so(device):
    """Dense Adam moves rows that a batch leaves out: it is verified after one step, and would fail after three."""
    (dense,) = (one for one in contestants("adam", device) if one.dense)
    verify("adam", dense, device)
    with pytest.raises(WrongResultError):
        verify("adam", replace(dense, dense=False), device)


def test_trainers_of_a_run_start_from_the_same_rows(device):
    first, second = (Ours(100, 8, "sgd", device) for _ in range(2))
    assert torch.equal(first.weights(), second.weights())
    assert first.weights().std() > 0.01  # nothing is timed on zeros
    for trainer in (first, second):
        trainer.close()
