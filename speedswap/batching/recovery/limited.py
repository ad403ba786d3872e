"""Memory with a limit, on any machine: tensors are counted, or the GPU's allocator is given less."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from speedswap.errors import BatchError

__all__ = ["LimitedMemory", "as_bytes", "limited", "storages"]

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_AMOUNT = r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)"
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def as_bytes(name: str, amount: object) -> int:
    """Return an amount of memory in bytes.

    Args:
        name: of the argument.
        amount: bytes, or a text with a unit.

    Raises:
        BatchError: it is neither, or not positive.

    >>> as_bytes("memory", "2.5 MiB"), as_bytes("memory", 2**31), as_bytes("memory", "2GB")
    (2621440, 2147483648, 2000000000)
    """
    nbytes = amount
    if isinstance(amount, str) and (said := re.fullmatch(_AMOUNT, amount.strip().lower(), re.ASCII)):
        nbytes = int(float(said[1]) * _UNITS.get(said[2], 0))
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise BatchError(f"{name} is {amount!r}; give bytes, such as {2**31}, or a text with a unit, such as '2GiB'")
    return nbytes


class LimitedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A limit on the tensors made inside of it: one too many raises ``torch.OutOfMemoryError``.

    It works where torch calls its kernels, in the backward pass too. Tensors made outside are not counted; those made
    inside are, until they are freed, there or later. A kernel's own temporary memory is not seen.

    Args:
        limit_bytes: of the tensors alive at once; without one they are only counted.
        nbytes: returns the bytes of a tensor's memory; those of its storage by default.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most alive at once since :meth:`reset_peak`.
        looks_ahead: refuse an operation whose results will not fit before it runs, where their shapes can be known,
            rather than after; that takes longer.

    Example:
        >>> memory = LimitedMemory(limit_bytes=1000)
        >>> with memory:
        ...     kept = torch.ones(200)  # 800 bytes
        ...     view = kept.view(10, 20)  # a view takes no more
        ...     more = torch.ones(51)
        Traceback (most recent call last):
        torch.OutOfMemoryError: out of memory: 204 bytes more would make it 1,004, and the limit is 1,000
        >>> del kept, view
        >>> memory.live_bytes, memory.peak_bytes
        (0, 800)
    """

    def __init__(self, limit_bytes: int | None = None, nbytes: Callable[[Tensor], int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.looks_ahead = False
        self._nbytes = nbytes or _storage_bytes
        self._counted: dict[int, weakref.ref[UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the tensors alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.looks_ahead:
            results = _results_ahead(func, args, kwargs)
            self._require_room(sum(tensor.untyped_storage().nbytes() for tensor in results))
        made = func(*args, **kwargs)
        for tensor in _new_storages(made, (args, kwargs)).values():
            self.count(tensor.untyped_storage(), self._nbytes(tensor))
        return made

    def _require_room(self, nbytes: int) -> None:
        if self.limit_bytes is not None and self.live_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory: {nbytes:,} bytes more would make it {self.live_bytes + nbytes:,}, "
                f"and the limit is {self.limit_bytes:,}"
            )

    def count(self, storage: UntypedStorage, nbytes: int) -> None:
        """Count the memory of a tensor until it is freed, unless it is counted already."""
        key = storage._cdata
        if key in self._counted:
            return
        self._require_room(nbytes)
        self._counted[key] = weakref.ref(storage, lambda _: self._freed(key, nbytes))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int, nbytes: int) -> None:
        del self._counted[key]
        self.live_bytes -= nbytes


def _storage_bytes(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().nbytes()


def storages(values: Any) -> dict[int, Tensor]:
    """Return a tensor for each piece of memory in nested values."""
    found: dict[int, Tensor] = {}
    _add_storages(values, found)
    return found


def _add_storages(values: Any, found: dict[int, Tensor]) -> None:
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            found[values.untyped_storage()._cdata] = values
    elif isinstance(values, (tuple, list, dict)):
        for each in values.values() if isinstance(values, dict) else values:
            _add_storages(each, found)


def _new_storages(made: Any, given: Any) -> dict[int, Tensor]:
    """Return those of an operation's results that are neither views of its arguments nor written in place."""
    found = storages(made)
    before = storages(given) if found else {}
    return {key: tensor for key, tensor in found.items() if key not in before}


def _results_ahead(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Collection[Tensor]:
    """Return an operation's results without their memory; none where their shapes depend on values."""
    if "device" not in kwargs and not storages((args, kwargs)):
        return ()  # it would make them
    given = tree_map_only(Tensor, _without_memory, (args, kwargs))
    device = {"device": torch.device("meta")} if "device" in kwargs else {}
    try:
        return _new_storages(func(*given[0], **given[1] | device), given).values()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return ()


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def limited(
    nbytes: int, devices: Collection[torch.device], *, taken: int = 0, looks_ahead: bool = False
) -> Iterator[None]:
    """Limit what is allocated inside of it, beside what is allocated already.

    On GPUs torch's allocator gets no more from the driver, on each; without one, tensors are counted.

    Args:
        nbytes: the limit.
        devices: where the work is done.
        taken: bytes of it that are in use.
        looks_ahead: as of :class:`LimitedMemory`.
    """
    with ExitStack() as stack:
        gpus = {torch.device(device) for device in devices if device.type == "cuda"}
        for gpu in gpus:
            stack.enter_context(_allocator_limited(gpu, nbytes - taken))
        if not gpus:
            memory = stack.enter_context(LimitedMemory(nbytes))
            memory.live_bytes, memory.looks_ahead = taken, looks_ahead
        yield


@contextmanager
def _allocator_limited(gpu: torch.device, nbytes: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties(gpu).total_memory
    allowed = torch.cuda.memory_allocated(gpu) + nbytes
    if torch.cuda.memory_reserved(gpu) > allowed:
        torch.cuda.empty_cache()
    find = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # lacks in older releases
    before = 1.0 if find is None else float(find(gpu))
    torch.cuda.set_per_process_memory_fraction(min(before, allowed / total), gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, gpu)
