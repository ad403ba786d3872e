"""The simulated device's functions (device.cpp), typed, and queries for tests."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from simulated_gpu import building

POLICIES = {"eager": 0, "late": 1, "random": 2, "ahead": 3}

_i64, _u64, _pointer, _size, _int = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_CALLBACK = ctypes.CFUNCTYPE(_int, ctypes.c_char_p)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "policy": (None, [_int, _u64]),
    "on_round_trip": (None, [_CALLBACK]),
    "current_stream": (_i64, []),
    "exchange_stream": (_i64, [_i64]),
    "new_stream": (_i64, []),
    "is_stream": (_int, [_i64]),
    "record": (_u64, [_i64]),
    "wait": (None, [_i64, _i64, _u64]),
    "query": (_int, [_i64, _u64]),
    "synchronize": (None, [_i64, _u64]),
    "synchronize_all": (None, []),
    "pending": (_i64, []),
    "sleep": (None, []),
    "record_stream": (None, [_pointer, _i64]),
    "launch": (
        None,
        [_i64, _pointer, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(_pointer), ctypes.POINTER(_size), _int],
    ),
    "memcpy": (_int, [_pointer, _pointer, _size, _int, _i64]),
    "memset": (_int, [_pointer, _int, _size, _i64]),
    "memory_type": (_int, [_pointer]),
    "register": (_int, [_pointer, _size]),
    "unregister": (_int, [_pointer]),
    "memory": (None, [ctypes.POINTER(_u64)]),
    "reset_peak": (None, []),
    "set_capacity": (None, [_u64]),
    "set_allowed": (None, [_u64]),
    "kernel": (None, [_pointer, ctypes.POINTER(_size), _int]),
    "idle": (None, [_pointer]),
    "hold": (None, []),
    "held": (_int, []),
    "release": (None, []),
    "capture": (None, [_int]),
    "take_fault": (_int, [ctypes.c_char_p, _size]),
}


# torch's keep the interpreter lock too.
_BRIEF = {"current_stream", "exchange_stream", "record"}


class Memory:
    """Bytes of device memory, and how many kernels were launched."""

    def __init__(self) -> None:
        numbers = (_u64 * 7)()
        call("memory", numbers)
        self.allocated, self.peak, self.allocations, self.bytes_allocated, *ends = (int(n) for n in numbers)
        self.capacity, self.free, self.launches = ends


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the device, registered with torch for the rest of the process."""
    path = building.device_library()
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


@functools.cache
def function(name: str) -> Any:
    """Return one of the device's functions, which lets go of the GIL in each call unless it is brief."""
    library = loaded()
    if name in _BRIEF:
        library = ctypes.PyDLL(library._name)
    found = library[f"simulated_{name}"]  # not shared by both kinds
    found.restype, found.argtypes = _SIGNATURES[name]
    return found


_forked = False


def _has_forked() -> None:
    global _forked
    _forked = loaded.cache_info().currsize > 0


os.register_at_fork(after_in_child=_has_forked)


def forked() -> bool:
    """Return True in a child of a process that had the device: CUDA does not follow a fork."""
    return _forked


def call(name: str, *arguments: Any) -> Any:
    """Call one of the device's functions."""
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method (simulated)"
        )
    return function(name)(*arguments)


def raise_fault() -> None:
    """Raise what went wrong on the device, as a synchronizing call of CUDA's would."""
    text = ctypes.create_string_buffer(1000)
    if call("take_fault", text, len(text)):
        raise RuntimeError(f"CUDA error (simulated): {text.value.decode()}")


def synchronize() -> None:
    """Run all streams to their end."""
    call("synchronize_all")
    raise_fault()


# ---- when streams go on


_policy = ("late", 0)


def set_policy(name: str, seed: int = 0) -> None:
    """Choose when streams go on, from now on: see :func:`policy`."""
    global _policy
    _policy = (name, seed)
    call("policy", POLICIES[name], seed)


@contextlib.contextmanager
def policy(name: str, seed: int = 0) -> Iterator[None]:
    """Choose when streams go on.

    ``late``: when something needs them. ``ahead``: late, but for what torch computes, which is there at once, so that
    memory is reused as early as can be. ``random``: at moments that the seed chooses. ``eager``: at once.
    """
    before = _policy
    set_policy(name, seed)
    try:
        yield
    finally:
        set_policy(*before)


@contextlib.contextmanager
def held_up(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Hold up the driver's next copy, in C, until another Python thread has called a function."""

    def run() -> None:
        while (held := call("held")) == 0:
            time.sleep(0.001)
        if held == 1:
            meanwhile()
            call("release")

    call("hold")
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        call("release")
        thread.join()


# ---- what the host waits for, and what is allocated


@dataclass(frozen=True)
class RoundTrip:
    """A time at which the host waited for the device: for what, and the innermost line of Python."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


@dataclass
class Counts:
    """Events within :func:`counted`; the numbers are known at its end. ``launches`` are those of the package."""

    round_trips: list[RoundTrip] = field(default_factory=list)
    allocations: int = 0
    bytes_allocated: int = 0
    launches: int = 0


_counting: list[Counts] = []
_debug_mode = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count round trips and allocations of device memory, of all threads."""
    counts, before = Counts(), Memory()
    _counting.append(counts)
    _listen()
    try:
        yield counts
    finally:
        _counting.remove(counts)
        _listen()
        after = Memory()
        counts.allocations = after.allocations - before.allocations
        counts.bytes_allocated = after.bytes_allocated - before.bytes_allocated
        counts.launches = after.launches - before.launches


def set_sync_debug_mode(mode: int | str) -> None:
    """Set torch.cuda's sync debug mode: 0, 1 (warn) or 2 (raise) if an operation waits for the device."""
    global _debug_mode
    if isinstance(mode, str):
        if mode not in ("default", "warn", "error"):
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        mode = ("default", "warn", "error").index(mode)
    _debug_mode = mode
    _listen()


def get_sync_debug_mode() -> int:
    return _debug_mode


def round_trip(what: str) -> None:
    """Take note that the host waits, in Python."""
    for counts in _counting:
        counts.round_trips.append(RoundTrip(what, _where()))


def _where() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        ours = path.parent == building.HERE and not path.name.startswith("test_")
        if not ours and "torch" not in path.parts:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a thread of torch"


@_CALLBACK
def _on_round_trip(what: bytes) -> int:
    round_trip(what.decode())
    if _debug_mode == 1:
        warnings.warn(f"called a synchronizing CUDA operation ({what.decode()})", UserWarning, stacklevel=2)
    return _debug_mode < 2


def _listen() -> None:
    call("on_round_trip", _on_round_trip if _counting or _debug_mode else ctypes.cast(None, _CALLBACK))
