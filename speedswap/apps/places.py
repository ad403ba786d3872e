"""Where a run computes, keeps its tables and writes: checked before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from speedswap.apps.errors import SettingsError

__all__ = [
    "STATE_DTYPES",
    "STORAGES",
    "check_output",
    "check_scratch",
    "check_state_dtype",
    "check_storage",
    "compute_device",
]

STATE_DTYPES = ("float32", "bfloat16")
STORAGES = ("auto", "device", "pinned", "pageable", "memmap")


def compute_device(name: str | None) -> torch.device:
    """The device of a name; without one, CUDA where there is a GPU, else the CPU.

    Raises:
        SettingsError: there is no such device here.
    """
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    missing = "" if "cuda" in available else "; speedswap info says why there is no cuda"
    wrong = f"device is {name!r}: give one of {', '.join(available)}{missing}"
    try:
        device = torch.device(name or available[-1])
    except RuntimeError as error:
        raise SettingsError(wrong) from error
    if device.type not in available or (device.index or 0) >= max(torch.cuda.device_count(), 1):
        raise SettingsError(wrong)
    return device


def check_storage(storage: str) -> None:
    """Refuse a storage that there is not."""
    if storage not in STORAGES:
        raise SettingsError(f"storage is {storage!r}: give one of {', '.join(STORAGES)}")


def check_state_dtype(dtype: str) -> None:
    """Refuse a form that the optimizer's state cannot be stored in."""
    if dtype not in STATE_DTYPES:
        raise SettingsError(f"state_dtype is {dtype!r}: give one of {', '.join(STATE_DTYPES)}")


def check_scratch(scratch: Path | None) -> None:
    """Refuse a place for temporary files that is no directory."""
    if scratch is not None and not scratch.is_dir():
        raise SettingsError(f"scratch is {str(scratch)!r}: give a directory that exists")


def check_output(folder: Path) -> None:
    """Find out before the work whether its result can be written.

    Raises:
        SettingsError: the folder cannot be made, or not be written to.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise SettingsError(f"output is {str(folder)!r}, but {existing} is a file: give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingsError(f"output is {str(folder)!r}, but {existing} cannot be written to: give another directory")
