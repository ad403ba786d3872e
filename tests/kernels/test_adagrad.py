"""The step of row-wise Adagrad in one pass: torch's operations but for rounding, and the same bits everywhere."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_build import build
from host_library import HostKernels
from simulated_gpu.building import compiler
from torch import Tensor

from speedswap.kernels import step_adagrad

# As step_adagrad takes them, after the learning rate and eps.
SETTINGS = {
    "plain": (0.0, 1.0, math.inf, 0.0),
    "decay": (0.1, 1.0, math.inf, 0.0),
    "kept": (0.0, 0.9, math.inf, 0.0),
    "bound": (0.0, 1.0, 0.5, 0.0),
    "max_norm": (0.0, 1.0, math.inf, 1.5),
}
ALL = (0.3, 1e-3, 0.1, 0.9, 0.5, 1.5)
WIDTHS = [1, 7, 31, 32, 33, 100, 200]
ROWS = 37


def some(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, gradients with a row of zeros, and sums, all float32."""
    random = torch.Generator().manual_seed(width)
    weight, grad = (torch.randn(ROWS, width, generator=random) for _ in range(2))
    grad[3] = 0
    return weight, grad, torch.rand(ROWS, 1, generator=random)


def by_torch(weight: Tensor, grad: Tensor, sums: Tensor, settings: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return weights and sums after the step, computed in float64."""
    lr, eps, decay, kept, bound, max_norm = settings
    weight, grad, sums = (each.double() for each in (weight, grad, sums))
    grad = grad.clamp(-bound, bound) + decay * weight
    sums = sums + grad.square().mean(1, keepdim=True)
    weight = kept * weight - lr / (sums.sqrt() + eps) * grad
    scale = (max_norm or math.inf) / weight.norm(dim=1, keepdim=True)
    return weight * scale.clamp(max=1), sums


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("settings", [*((0.3, 1e-3, *each) for each in SETTINGS.values()), ALL], ids=[*SETTINGS, "all"])
def test_a_step_is_that_of_torchs_operations(settings: Sequence[float], width: int, device: str) -> None:
    weight, grad, sums = some(width)
    expected = by_torch(weight, grad, sums, settings)
    there = [each.to(device) for each in (weight, grad, sums)]
    assert step_adagrad(*there, settings)
    torch.testing.assert_close(there[0].cpu().double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(there[2].cpu().double(), expected[1], rtol=1e-6, atol=0.0)
    assert torch.equal(there[1].cpu(), grad)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_gpu_gives_the_bits_of_the_loop(width: int, device: str) -> None:
    ours = some(width)
    there = [each.to(device, copy=True) for each in ours]
    for rows in (ours, there):
        step_adagrad(*rows, ALL)
    for mine, theirs in zip(ours, there, strict=True):
        assert torch.equal(mine, theirs.cpu())


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("launch", [(1, 32), (3, 64), (2, 1024)])
def test_the_kernel_gives_the_bits_of_the_loop_in_every_launch(launch: tuple[int, int], width: int) -> None:
    ours = some(width)
    there = [each.numpy().copy() for each in ours]
    step_adagrad(*ours, ALL)
    numbers = array("q", [*(each.ctypes.data for each in there), ROWS, width])
    settings = array("f", ALL)
    HostKernels(build()).adagrad(*launch, numbers.tobytes() + settings.tobytes())
    for mine, theirs in zip(ours, there, strict=True):
        assert np.array_equal(mine.numpy(), theirs)


def test_every_instruction_set_gives_the_same_bits(run_with_isa: Callable[[str, str], str], tmp_path: Path) -> None:
    """Those that the processor has."""
    torch.save(some(100), tmp_path / "rows")
    program = f"""
import torch
from speedswap.kernels import step_adagrad
rows = torch.load({str(tmp_path / "rows")!r})
assert step_adagrad(*rows, {ALL})
print(rows[0].numpy().tobytes().hex())
"""
    assert len({run_with_isa(isa, program) for isa in ("sse2", "avx2", "avx512")}) == 1


def test_rows_that_are_not_finite_spread_no_further() -> None:
    weight, grad, sums = some(100)
    grad[5, 70] = math.nan
    expected = some(100)
    step_adagrad(weight, grad, sums, ALL)
    step_adagrad(*expected, ALL)
    assert weight[5].isnan().all()
    others = torch.arange(ROWS) != 5
    assert torch.equal(weight[others], expected[0][others])


LEFT_TO_TORCH: dict[str, Any] = {
    "float64": lambda weight, grad, sums: (weight.double(), grad, sums),
    "half sums": lambda weight, grad, sums: (weight, grad, sums.half()),
    "transposed": lambda weight, grad, sums: (weight.T.contiguous().T, grad, sums),
    "every other row": lambda weight, grad, sums: (weight[::2], grad[::2], sums[::2]),
    "a sum per item": lambda weight, grad, sums: (weight, grad, sums.expand_as(weight).contiguous()),
    "no rows": lambda weight, grad, sums: (weight[:0], grad[:0], sums[:0]),
    "a subclass": lambda weight, grad, sums: (weight.as_subclass(Ours), grad, sums),
    "on meta": lambda weight, grad, sums: (weight.to("meta"), grad.to("meta"), sums.to("meta")),
    "a negated view": lambda weight, grad, sums: (weight, torch._neg_view(grad), sums),
}


class Ours(Tensor):
    """A tensor with more to it than its memory."""


@pytest.mark.parametrize("change", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
def test_other_tensors_are_left_to_torch(change: Any) -> None:
    assert step_adagrad(*some(8), ALL)
    assert not step_adagrad(*change(*some(8)), ALL)


def test_a_step_counts_as_a_change_in_place() -> None:
    """Autograd, and the check that a step reached its table, go by the version."""
    weight, grad, sums = some(8)
    before = weight._version, grad._version, sums._version
    step_adagrad(weight, grad, sums, ALL)
    assert (weight._version, grad._version, sums._version) == (before[0] + 1, before[1], before[2] + 1)
