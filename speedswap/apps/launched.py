"""A process among those that torchrun has started: its place on the machine, and a store where one speaks for all."""

from __future__ import annotations

import os
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["another_has_spoken", "is_first_to_say", "is_launched", "local_gpu", "of_attempt", "share_of_machine"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STORE_SECONDS = timedelta(seconds=5)


def is_launched() -> bool:
    """Return whether torchrun, or a launcher like it, has started this process as one of several."""
    return all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def share_of_machine(nbytes: int) -> int:
    """Return the part of the bytes of a job's tables that the ranks of this machine hold."""
    if not is_launched():
        return nbytes
    return nbytes * int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) // int(os.environ["WORLD_SIZE"])


def local_gpu() -> int:
    """Return the number of the GPU for this process of several on the machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) % max(torch.cuda.device_count(), 1)


def is_first_to_say(message: str) -> bool:
    """Return whether no other rank of the job has said this; from now on one has."""
    store = _store()
    if store is None:
        return True
    store.add("spoken", 1)
    return bool(store.add(f"said/{zlib.crc32(message.encode())}", 1) == 1)


def another_has_spoken(seconds: float = 0.0) -> bool:
    """Return whether another rank of the job has said why it has failed, or does so within some seconds."""
    store, until = _store(), time.monotonic() + seconds
    while store is not None:
        if store.add("spoken", 0):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return False


def _store() -> Any:
    """Return the store of torchrun's own process, which outlives the ranks; None where there is none."""
    if not is_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(*address, timeout=_STORE_SECONDS)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return None
    return of_attempt(store)


def of_attempt(store: Any) -> Any:
    """Return a part of a store for the processes that torchrun has started last."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"speedswap/attempt-{attempt}", store)  # type: ignore[attr-defined]
