"""Let these tests import ``splitting.py``; sizes are found apart from what other processes leave of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from speedswap.batching import attempts, retry

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def _one_class_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory may cross a power of two at any time, and a size is tried again in a class that is new."""
    for module in (attempts, retry):
        monkeypatch.setattr(module, "memory_class", lambda device: 0)
