"""Jagged tensors alone: what TorchRec's users call, with the results that TorchRec gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from speedswap import JaggedTensor, KeyedJaggedTensor

VALUES, LENGTHS = torch.arange(10, 16), torch.tensor([2, 0, 1, 1, 0, 2])


@pytest.mark.parametrize("make", [JaggedTensor, lambda *args, **more: KeyedJaggedTensor(["a"], *args, **more)])
@pytest.mark.parametrize("name", ["lengths", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_lengths_and_offsets_are_integers(make: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    """Lengths of 1.5 would be taken for 1."""
    with pytest.raises(TypeError, match=f"{name} has dtype {dtype}; give integers"):
        make(VALUES, **{name: torch.tensor([1.5, 2.5]).to(dtype)})
    make(VALUES[:0], lengths=torch.empty(0))  # of no samples, as torch makes it by default
    make(VALUES, lengths=LENGTHS.to(torch.uint8))
