"""The simulated GPU, for tests that count what a step does there."""

from __future__ import annotations

import pytest
import simulated_gpu


@pytest.fixture
def gpu(device: str) -> str:
    if not simulated_gpu.is_on():
        pytest.skip("counted on the simulated GPU: SPEEDSWAP_TEST_DEVICE=simulated")
    return device
