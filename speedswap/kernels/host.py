"""Host side of the CPU loops: readable tensors, memory for results, threads, and deferred interrupts."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.kernels import _C

# From this size on, torch gets CPU memory from the system each time, and GPU memory in separate blocks.
LARGE_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10  # as in csrc/rows_cpu.cpp

# ---- arguments -------------------------------------------------------------------------------------------------------


def has_memory(tensor: Tensor) -> bool:
    """Return True if all items of a dense tensor lie in memory that may be read and written.

    False if its storage was resized, and for stand-ins: FakeTensors and tensors wrapped by ``torch.func``.
    """
    try:
        nbytes = tensor.nbytes
        if not nbytes:
            return True
        held, begin = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # no storage
        return False
    item_bytes = tensor.dtype.itemsize
    if not tensor.is_contiguous():
        nbytes = _extent(tensor) * item_bytes
    return begin != 0 and tensor.storage_offset() * item_bytes + nbytes <= held


def require_memory(tensor: Tensor, name: str) -> None:
    """Raise TypeError unless :func:`has_memory`."""
    if not has_memory(tensor):
        raise TypeError(
            f"{name}, of type {type(tensor).__name__} and shape {tuple(tensor.shape)}, has no memory for its items: "
            "its storage was resized, or it stands for another tensor, as FakeTensors and those inside torch.func do; "
            "pass the tensor itself, outside of these modes"
        )


def require_dense(tensor: object, name: str) -> None:
    """Raise TypeError unless a value is a strided tensor with memory for each of its items."""
    if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {a_kind(tensor)}; pass a tensor, as torch.as_tensor makes one")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; make it dense with {name}.to_padded_tensor(0), or pass its parts")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; make it dense with {name}.to_dense()")
    if not has_memory(tensor):
        require_memory(tensor, name)


def require_apart(written: Tensor, name: str, read: Tensor, read_name: str) -> None:
    """Raise ValueError if a tensor to write shares memory with one to read at the same time."""
    if written.device != read.device or not written.numel() or not read.numel():
        return
    if written.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
        return
    first, last = _span(written)
    read_first, read_last = _span(read)
    if first < read_last and read_first < last:
        raise ValueError(f"{name} shares memory with {read_name}; pass {name}.clone()")


def _span(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + _extent(tensor) * tensor.element_size()


def _extent(tensor: Tensor) -> int:
    """Return the distance in items from the first to past the last item, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def as_read(tensor: Tensor) -> Tensor:
    """Return a dense tensor as the CPU loops read its memory: contiguous, aligned, with signs resolved.

    A tensor may lie at any address (slices of NumPy's structured arrays), and torch negates and conjugates lazily: the
    gradient of a conjugate's imaginary part is a view of memory that holds the opposite numbers.

    Raises:
        TypeError: a copy has no memory, as under FakeTensorMode.
    """
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    if address(tensor) % tensor.dtype.itemsize:
        tensor = tensor.clone()
        address(tensor)
    return tensor


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors of one dtype have the same items; a NaN is the same as itself."""
    return one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = as_read(tensor.detach()).reshape(-1)
    if flat.stride(0) != 1:  # contiguous() would leave a single item as it is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def as_ids(ids: Tensor) -> Tensor:
    """Return ids as the CPU loops read them: int64, contiguous and aligned, in host memory. They are not negated."""
    return ids_at(ids)[1]


def ids_at(ids: Tensor) -> tuple[int, Tensor]:
    """Return the address of ids as :func:`as_ids` returns them, and the tensor that holds them."""
    if type(ids) is Tensor and ids.dtype is torch.int64 and ids.is_cpu and ids.is_contiguous():
        pointer = ids.data_ptr()
        if not pointer % 8:
            return pointer, ids
    ids = as_read(ids.as_subclass(Tensor).to("cpu", torch.int64))
    return ids.data_ptr(), ids


# ---- results ---------------------------------------------------------------------------------------------------------


def address(result: Tensor) -> int:
    """Return the address of a newly made result.

    Raises:
        TypeError: it has no memory: under FakeTensorMode, or inside ``torch.func``, torch makes stand-ins.
    """
    pointer = result.data_ptr()
    if not pointer and result.numel():
        raise TypeError(
            f"a result would be a {type(result).__name__} without memory; call this outside of FakeTensorMode and "
            "torch.func"
        )
    return pointer


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialized tensor; a large one in memory reused from earlier results.

    On the CPU, new memory is provided page by page at its first write, which takes several times as long as writing a
    batch's rows. Such a tensor is like any other, except that ``resize_`` cannot enlarge it. On a GPU, torch reuses
    memory, but batches differ slightly in their number of rows, so that few would fit into freed memory: sizes are
    rounded up by at most an eighth, and so repeat.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: the CPU by default.
    """
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes < LARGE_BYTES:
        result = torch.empty(shape, dtype=dtype, device=device or "cpu")
        if not result.data_ptr() and nbytes:
            address(result)  # raises
        return result
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return torch.frombuffer(_C.Buffer(nbytes), dtype=torch.uint8).view(dtype).view(tuple(shape))
    result = torch.empty((_rounded(shape[0]), *shape[1:]), dtype=dtype, device=device)[: shape[0]]
    address(result)
    return result


def from_buffer(buffer: _C.Buffer, dtype: torch.dtype) -> Tensor:
    """Return a buffer as a tensor that shares its memory, shape (n,)."""
    return torch.frombuffer(buffer, dtype=dtype) if memoryview(buffer).nbytes else torch.empty(0, dtype=dtype)


def _rounded(count: int) -> int:
    """Round up to one of eight steps from each power of two to the next."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


# ---- threads ---------------------------------------------------------------------------------------------------------

_MOST_THREADS = 2**31 - 1  # far more than ever start, but the loops count them in 32 bits


def _from_environment() -> int | None:
    text = os.environ.get("SPEEDSWAP_NUM_THREADS")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > len(str(_MOST_THREADS)) or not 1 <= int(text) <= _MOST_THREADS:
        raise ValueError(f"the environment's SPEEDSWAP_NUM_THREADS is {text!r}; set it to 1 or more, or unset it")
    return int(text)


_num_threads = _from_environment()


def get_num_threads() -> int:
    """Return the number of threads for moving rows: torch's own unless one was set."""
    return torch.get_num_threads() if _num_threads is None else _num_threads


def threads_for(nbytes: int) -> int:
    """Return the number of threads for work on ``nbytes`` bytes; the loops give each at least 256 KiB."""
    return 1 if nbytes <= _PIECE_BYTES else get_num_threads()


def set_num_threads(num_threads: int | None) -> None:
    """Use ``num_threads`` threads for moving rows; None follows ``torch.get_num_threads()`` again.

    The environment's ``SPEEDSWAP_NUM_THREADS`` sets the initial value.

    Raises:
        ValueError: num_threads is below 1, or above 2**31 - 1.

    >>> set_num_threads(2); get_num_threads()
    2
    >>> set_num_threads(None)
    """
    global _num_threads
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; use 1 or more, or None for torch's number")
    if num_threads is not None and num_threads > _MOST_THREADS:
        raise ValueError(f"num_threads is {num_threads}; use at most {_MOST_THREADS}, or None for torch's number")
    _num_threads = num_threads


class deferred_interrupts(_C.DeferredSignals):
    """Defer a Ctrl-C inside the block to its end, and SIGTERM and SIGHUP if they have handlers.

    Several tables, or weight and state, are then written as a whole. Ignored signals stay ignored, and signals that end
    the process at once, as SIGTERM does by default, still do. In threads other than the main one, which Python does not
    interrupt, this does nothing.
    """
