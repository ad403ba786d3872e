"""The parts of ``torch.cuda`` missing from a CPU build, over the simulated device."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from simulated_gpu import device as simulated

DEVICE = torch.device("cuda", 0)
MULTIPROCESSORS = 4


def _require_this(device: Any) -> None:
    index = None
    if isinstance(device, int):
        index = device
    elif device is not None:
        wanted = device if isinstance(device, torch.device) else torch.device(device)
        if wanted.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {wanted}")
        index = wanted.index
    if index not in (None, 0, -1):
        raise RuntimeError("CUDA error: invalid device ordinal")


class Stream:
    """A queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        _require_this(device)
        self.priority = priority
        self.device = DEVICE
        self.cuda_stream: int = simulated.call("new_stream")

    @classmethod
    def of(cls, cuda_stream: int) -> Stream:
        stream = object.__new__(cls)
        stream.priority, stream.device, stream.cuda_stream = 0, DEVICE, cuda_stream
        return stream

    stream_id = property(lambda self: self.cuda_stream)
    device_index = 0
    device_type = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __ne__(self, other: object) -> bool:  # as torch's: False for None
        return other is not None and not self == other

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.cuda_stream:#x}> (simulated)"

    def synchronize(self) -> None:
        simulated.round_trip("synchronize a stream")
        simulated.call("synchronize", self.cuda_stream, simulated.call("record", self.cuda_stream))
        simulated.raise_fault()

    def query(self) -> bool:
        return bool(simulated.call("query", self.cuda_stream, simulated.call("record", self.cuda_stream)))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class ExternalStream(Stream):
    """A stream by its handle."""

    def __init__(self, stream_ptr: int, device: Any = None) -> None:
        _require_this(device)
        assert simulated.call("is_stream", stream_ptr), f"{stream_ptr:#x} is not a stream"
        self.priority, self.device, self.cuda_stream = 0, DEVICE, stream_ptr


class Event:
    """A moment in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError("the simulated GPU has no events between processes")
        self._timed = enable_timing
        self._seconds = 0.0
        self._at: tuple[int, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else _stream(stream)
        self._at = (stream.cuda_stream, simulated.call("record", stream.cuda_stream))
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else _stream(stream)
        if self._at is not None:
            simulated.call("wait", stream.cuda_stream, *self._at)

    def query(self) -> bool:
        return self._at is None or bool(simulated.call("query", *self._at))

    def synchronize(self) -> None:
        simulated.round_trip("synchronize an event")
        if self._at is not None:
            simulated.call("synchronize", *self._at)
        simulated.raise_fault()

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return max(1e-3, 1e3 * (end_event._seconds - self._seconds))


def _stream(stream: Any) -> Stream:
    if not isinstance(stream, Stream):
        raise TypeError(f"a torch.cuda.Stream is wanted, not {type(stream).__name__}")
    return stream


def current_stream(device: Any = None) -> Stream:
    _require_this(device)
    return Stream.of(simulated.call("current_stream"))


def current_raw_stream(device: int) -> int:
    return simulated.call("current_stream")  # type: ignore[no-any-return]


def default_stream(device: Any = None) -> Stream:
    _require_this(device)
    return Stream.of(0)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        simulated.call("exchange_stream", _stream(stream).cuda_stream)


class StreamContext:
    """``torch.cuda.stream``."""

    def __init__(self, stream: Stream | None) -> None:
        _current_device()  # torch asks for it even if there is no stream
        self.stream = None if stream is None else _stream(stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = current_stream()
            torch.cuda.set_stream(self.stream)  # torch's own calls it too, where a test may have replaced it

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self._before)


class Device:
    """``torch.cuda.device`` with a single device."""

    def __init__(self, device: Any) -> None:
        _require_this(device)
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return False


def _current_device() -> int:
    simulated.call("current_stream")  # which a forked child has none of
    return 0


def synchronize(device: Any = None) -> None:
    _require_this(device)
    simulated.round_trip("synchronize the device")
    simulated.synchronize()


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Replace ``Tensor.record_stream``."""
    _stream(stream)
    if tensor.device.type != "cuda":
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend.")
    if tensor.untyped_storage().nbytes():
        simulated.call("record_stream", tensor.untyped_storage().data_ptr(), stream.cuda_stream)


def _properties(device: Any = None) -> Any:
    _require_this(device)
    return SimpleNamespace(
        name="simulated GPU", major=9, minor=0, multi_processor_count=MULTIPROCESSORS, warp_size=32,
        max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, total_memory=simulated.Memory().capacity,
        uuid="00000000-0000-0000-0000-000000000000", is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip


def _memory_stats_nested(device: Any = None) -> dict[str, Any]:
    memory = simulated.Memory()

    def numbers(now: int, peak: int, ever: int) -> dict[str, dict[str, int]]:
        every = {"current": now, "peak": peak, "allocated": ever, "freed": ever - now}
        return {pool: dict(every) for pool in ("all", "small_pool", "large_pool")}

    by_bytes = numbers(memory.allocated, memory.peak, memory.bytes_allocated)
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return {
        **dict.fromkeys(kinds, by_bytes),
        "inactive_split_bytes": numbers(0, 0, 0),
        "allocation": numbers(0, 0, memory.allocations),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _memory_stats(device: Any = None) -> dict[str, int]:
    flat: dict[str, int] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        else:
            flat[prefix] = value

    walk("", _memory_stats_nested())
    return flat


def _allocated(device: Any = None) -> int:
    return simulated.Memory().allocated


def _peak(device: Any = None) -> int:
    return simulated.Memory().peak


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    _require_this(device)
    memory = simulated.Memory()
    return memory.free, memory.capacity


def _set_memory_fraction(fraction: float, device: Any = None) -> None:
    _require_this(device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    simulated.call("set_allowed", int(fraction * simulated.Memory().capacity))


def _nothing(*_: Any, **__: Any) -> None:
    return None


REPLACED: dict[str, Any] = {
    "is_available": lambda: True,  # in a forked child too: torch counts devices once
    "is_initialized": lambda: not simulated.forked(),
    "_lazy_init": _nothing,
    "init": _nothing,
    "device_count": lambda: 1,
    "current_device": _current_device,
    "set_device": _require_this,
    "device": Device,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": _properties,
    "can_device_access_peer": lambda device, peer: False,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "mem_get_info": _mem_get_info,
    "memory_allocated": _allocated,
    "memory_reserved": _allocated,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "reset_peak_memory_stats": lambda device=None: simulated.call("reset_peak"),
    "memory_stats": _memory_stats,
    "memory_stats_as_nested_dict": _memory_stats_nested,
    "empty_cache": _nothing,
    "set_per_process_memory_fraction": _set_memory_fraction,
    "ipc_collect": _nothing,
    "synchronize": synchronize,
    "Stream": Stream,
    "ExternalStream": ExternalStream,
    "Event": Event,
    "stream": StreamContext,
    "StreamContext": StreamContext,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
    "set_sync_debug_mode": simulated.set_sync_debug_mode,
    "get_sync_debug_mode": simulated.get_sync_debug_mode,
    "_sleep": lambda cycles: simulated.call("sleep"),
}
