"""The states of the random number generators that a training draws from: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["check_generator", "check_random_state", "random_state", "restore_random_state"]


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


def check_random_state(state: dict[str, Any]) -> None:
    """Raise an error if :func:`restore_random_state` would, or if a generator would draw from outside of its state."""
    python, numpy = state["python"], state["numpy"]
    random.Random().setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    _require(isinstance(python["gauss"], float | None), f"Python's gauss is {python['gauss']!r}")
    kind = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
    _require(numpy["bit_generator"] == kind, f"NumPy draws from {kind}, and not from {numpy['bit_generator']!r}")
    np.random.RandomState(getattr(np.random, kind)()).set_state(numpy)
    if kind == "MT19937":
        _require(numpy["state"]["key"].shape == (624,), "NumPy's generator has 624 numbers")
    if kind in ("MT19937", "Philox"):  # which read where this says, unchecked
        place, most = (numpy["state"]["pos"], 624) if kind == "MT19937" else (numpy["buffer_pos"], 4)
        _require(0 <= place <= most, f"NumPy would read number {place} of {most}")
    check_generator(torch.default_generator, state["torch"])
    for index, each in enumerate(state.get("cuda", ())):
        is_here = torch.cuda.is_available() and index < torch.cuda.device_count()
        _require(isinstance(each, Tensor) and each.dtype == torch.uint8, f"the state of GPU {index} must be bytes")
        if is_here:
            torch.Generator(torch.device("cuda", index)).set_state(each)


def check_generator(generator: torch.Generator, state: Tensor) -> None:
    """Raise an error if a generator would not take a state, or would draw from outside of it."""
    torch.Generator(generator.device).set_state(state)
    if generator.device.type == "cpu":
        left, place = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
        _require(left + place <= 625, f"torch would read number {left + place} of 624")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back to what :func:`random_state` has returned; those of GPUs as far as they are here."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(each, device)
