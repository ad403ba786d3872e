"""Parts shared by the tests of batching: models, and memory that runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def of_runs(run: Callable[[int], T], seeds: Iterable[int]) -> Iterator[T]:
    """Yield the results of many runs, quickly: they collect garbage after each failure, walking through all objects.

    Those that are there after the first run, with its imports, are left out from then on, and no messages are logged,
    which pytest keeps.
    """
    first, *others = seeds
    logging.disable()
    try:
        yield run(first)
        gc.collect()
        gc.freeze()  # for good: unfreezing would return what the session has frozen as well
        yield from map(run, others)
    finally:
        logging.disable(logging.NOTSET)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def state(model: nn.Module) -> list[Tensor]:
    """Return everything that a batch may change: gradients and buffers."""
    return [*gradients(model), *[buffer.clone() for buffer in model.buffers()]]


def relative_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert len(found) == len(wanted)
    assert wanted
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


def same_bits(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def classifier(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)).to(dtype)


class OutOfMemoryBeyond:
    """Runs out of memory as CUDA's allocator does when a function is called with too many samples.

    Args:
        function: called with the micro-batch.
        limit: samples that fit.
        calls: number of calls with too many samples that succeed anyway, so that the failure comes late in a batch.
    """

    def __init__(self, function: Callable[..., Any], limit: int, calls: int = 0) -> None:
        self.function = function
        self.limit = limit
        self.calls = calls
        self.sizes: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        samples = len(args[0])
        self.sizes.append(samples)
        result = self.function(*args, **kwargs)
        if samples > self.limit:
            self.calls -= 1
            if self.calls < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result
