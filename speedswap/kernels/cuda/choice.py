"""Which way rows go: what was asked for, or what was fastest on this machine.

The rates are measured once, when a large table is made, and kept in a file of their own for each machine, GPU and
driver, in the folder that SPEEDSWAP_CACHE names, else in the user's cache (``~/.cache/speedswap``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from speedswap.kernels.cuda import modules, rates
from speedswap.kernels.cuda.engines import STAGED, ZERO_COPY, Way
from speedswap.kernels.cuda.rates import Direction, Rates

__all__ = ["cached", "describe", "measured", "prepare", "way"]

_log = logging.getLogger("speedswap")

# Raised when the engines change so that what was measured before says nothing any more.
_EDITION = 1

# Of a batch: less than this is there before a second way has begun.
_SMALL_BYTES = 2 << 20
# Of a table: for less it does not matter how rows go, and the measurement would take longer than they do.
_WORTH_MEASURING_BYTES = 256 << 20

_lock = threading.Lock()
_known: dict[int, Rates | None] = {}


def way(engine: str, device: int, direction: Direction, num_rows: int, row_bytes: int) -> Way:
    """How rows go between pinned memory and a GPU.

    Args:
        engine: one of :data:`speedswap.kernels.ENGINES`.
        device: the GPU's number.
        direction: ``in`` to the GPU, or ``out`` of it.
        num_rows: how many.
        row_bytes: of a row, as it is stored.
    """
    if engine == "staged":
        return STAGED
    known = cached(device)
    if known is None:
        return Way(0.5) if engine == "split" else ZERO_COPY
    if engine == "auto" and num_rows * row_bytes < _SMALL_BYTES:
        engine = "zero_copy"
    return known.way(engine, direction, row_bytes)


def prepare(engine: str, nbytes: int) -> None:
    """Measure now, if it was not before, what moving the rows of a new pinned table will be decided by.

    Args:
        engine: the table's.
        nbytes: of the table.
    """
    if engine in ("auto", "split") and nbytes >= _WORTH_MEASURING_BYTES:
        measured(torch.cuda.current_device())


def cached(device: int) -> Rates | None:
    """What was measured on this machine before, or None."""
    return _known[device] if device in _known else _stored(device)


def measured(device: int) -> Rates | None:
    """What was measured on this machine, now if it was not before; None where it cannot be."""
    with _lock:
        if device not in _known:
            _known[device] = _stored(device) or _measure(device)
        return _known[device]


def _measure(device: int) -> Rates | None:
    try:
        found = rates.measure(device)
    except (RuntimeError, OSError, MemoryError) as error:
        _log.warning("the ways to the GPU could not be measured (%s); rows go by zero_copy", error)
        return None
    _write(_path(device), _key(device), found)
    return found


def describe(found: Rates) -> dict[str, str]:
    """What was measured, for people: by direction, GB/s each way for rows of 64 B to 2 KiB, and which is taken."""
    lines = {}
    for name, some in (("to the GPU", found.into), ("from the GPU", found.out_of)):
        texts = []
        for rate in some:
            taken = rate.way("auto", found.multiprocessors)
            share = f" ({taken.share:.0%} directly)" if taken.engine == "split" else ""
            texts.append(
                f"{rate.row_bytes} B: zero_copy {rate.zero_copy / 1e9:.1f}, staged {rate.staged / 1e9:.1f}, "
                f"split {rate.split / 1e9:.1f} GB/s: {taken.engine}{share}"
            )
        lines[f"engine {name}"] = "; ".join(texts)
    lines["multiprocessors a copy takes"] = str(found.multiprocessors)
    return lines


# ---- the file --------------------------------------------------------------------------------------------------------


@functools.cache
def _key(device: int) -> str:
    """What the rates depend on."""
    properties = torch.cuda.get_device_properties(device)
    gpu = f"{properties.name}, {properties.total_memory >> 20} MiB, {getattr(properties, 'uuid', device)}"
    cores = len(os.sched_getaffinity(0))
    return f"edition {_EDITION}; {platform.node()}, {_processor()}, {cores} cores; {gpu}; driver {_driver()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError as error:
        _log.debug("the processor's name cannot be read: %s", error)
    return platform.machine()


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return str(modules.cupy().cuda.runtime.driverGetVersion())


def _path(device: int) -> Path:
    folder = os.environ.get("SPEEDSWAP_CACHE")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "speedswap")
    return Path(folder) / f"rates-{hashlib.sha256(_key(device).encode()).hexdigest()[:16]}.json"


@functools.cache
def _stored(device: int) -> Rates | None:
    return _read(_path(device), _key(device))


def _read(path: Path, key: str) -> Rates | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return Rates.from_json(found["rates"]) if found["key"] == key else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.info("%s is not what was written there (%s); the ways to the GPU are measured again", path, error)
        return None


def _write(path: Path, key: str, found: Rates) -> None:
    text = json.dumps({"key": key, "rates": found.to_json()}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        _log.info("%s cannot be written (%s); the ways to the GPU are measured again next time", path, error)
