"""Missed steps by the CPU loop, compared with torch's operations, which a GPU takes."""

from __future__ import annotations

import pytest
import torch

from speedswap.kernels import CURVE_TERMS, MissedSteps, take_missed_steps
from speedswap.kernels.rows import _by_torch

STEPS = 9
BEFORE = 100


def some(columns, rows, dim, dtype, *, curves=True):
    random = torch.Generator().manual_seed(0)
    values = [torch.rand(rows, dim, generator=random, dtype=torch.float64).to(dtype) for _ in range(columns)]
    values[columns // 2][::3] = 0  # as before the first gradient
    last = torch.randint(STEPS + 1, (rows,), generator=random, dtype=torch.int32)
    maps = torch.rand(STEPS + 1, columns, columns, generator=random, dtype=torch.float64)
    maps[:, 0, -1] = 0
    maps[STEPS] = torch.eye(columns)
    numbers = [maps.flatten(1)]
    if curves:
        sizes = 4.0 ** torch.arange(CURVE_TERMS)
        terms = torch.randn(STEPS + 1, CURVE_TERMS, generator=random, dtype=torch.float64) / sizes
        terms[STEPS] = 0
        numbers += [terms, torch.rand(STEPS + 1, 1, generator=random, dtype=torch.float64) + 0.1]
    return values, last, MissedSteps(torch.cat(numbers, 1).contiguous(), curves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 7, 32, 200])
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_the_loop_equals_torchs_operations(columns, dim, dtype):
    values, last, steps = some(columns, 50, dim, dtype, curves=columns > 2)
    expected = [each.clone() for each in values]
    last += BEFORE
    last[5] = BEFORE - 2  # a row that earlier steps have left alone
    _by_torch(expected, last, STEPS, steps, BEFORE)
    take_missed_steps(values, last, STEPS, steps, BEFORE)
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


def test_rows_with_every_step_keep_their_bits():
    values, last, steps = some(3, 40, 20, torch.float32)
    before = [each.clone() for each in values]
    take_missed_steps(values, torch.full_like(last, STEPS), STEPS, steps)
    for ours, theirs in zip(values, before, strict=True):
        assert torch.equal(ours, theirs)


def test_columns_of_another_shape_or_dtype_are_taken_by_torch():
    """State of one number per row, and half-precision weights."""
    weight, state = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 1)
    numbers = torch.tensor([[0.5, 0.0, 0.0, 0.25], [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    last = torch.tensor([0, 1], dtype=torch.int32)
    take_missed_steps([weight, state], last, 1, MissedSteps(numbers, bends=False))
    assert weight.tolist() == [[0.5] * 3, [1.0] * 3]
    assert state.tolist() == [[0.25], [1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("columns", "dim"), [(1, 3), (2, 1), (3, 32), (4, 7)])
def test_a_gpu_gives_the_bits_of_the_loop(device, columns, dim, dtype):
    values, last, steps = some(columns, 50, dim, dtype, curves=columns > 2)
    there = [each.to(device, copy=True) for each in values]
    last[5] -= 20  # a row that earlier steps have left alone
    take_missed_steps(values, last, STEPS, steps)
    take_missed_steps(there, last.to(device), STEPS, steps)
    for ours, theirs in zip(values, there, strict=True):
        assert torch.equal(ours, theirs.cpu())
