"""For tests of the engines: a table of random bytes in pinned memory, and blocks on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from speedswap.kernels import Fence, Part, Records
from speedswap.kernels.cuda.pinning import PinnedMemory

WAYS = {"zero_copy": 1.0, "staged": 0.0, "split": 0.4}


class Table:
    """Records of random bytes in pinned memory, and what they should be."""

    def __init__(self, num_rows: int, stride: int) -> None:
        self.memory = PinnedMemory(num_rows * stride)
        assert self.memory.failure is None
        self.fence = Fence()
        self.records = Records(
            self.memory.pointer, stride, num_rows, torch.device("cpu"), True, self.memory, fence=self.fence
        )
        self.expected = np.random.default_rng(1).integers(0, 256, (num_rows, stride), np.uint8)
        self.memory.bytes.view(num_rows, stride).numpy()[:] = self.expected

    def now(self) -> np.ndarray:
        self.fence.wait()
        return self.memory.bytes.view(self.expected.shape).numpy()


def blocks(columns: list[tuple[int, int]], count: int, gpu: torch.device) -> list[Part]:
    return [Part(offset, torch.zeros(count, width, dtype=torch.uint8, device=gpu)) for offset, width in columns]


def ascending(num_rows: int, count: int) -> torch.Tensor:
    return torch.randperm(num_rows)[:count].sort().values
