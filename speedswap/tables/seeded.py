"""Random numbers from a known seed that leave the caller's generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's default generators for the block, and put them back as they were.

    ``torch.manual_seed`` seeds those of every accelerator too; this touches the CPU's, and the device's own, alone.

    Args:
        seed: from -2**63 to 2**64 - 1.
        device: a CUDA device that the block may draw on.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda" and torch.cuda.default_generators:
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
