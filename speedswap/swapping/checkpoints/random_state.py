"""The states of the random number generators that a training draws from: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["random_state", "restore_random_state"]


def random_state() -> dict[str, Any]:
    """Return the states of the global generators."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (what others draw from)
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back to what :func:`random_state` has returned; those of GPUs as far as they are here."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(each, device)
