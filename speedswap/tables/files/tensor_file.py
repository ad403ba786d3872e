"""Tensors in a safetensors file: a JSON header, then the tensors' bytes. Nothing is pickled.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap.errors import TableFormatError
from speedswap.tables.files.damage import is_int
from speedswap.tables.files.open_directory import OpenFile, write_all

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_ONLY_READ = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()} | _ONLY_READ
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _OF_NAME["F8_E8M0"] = torch.float8_e8m0fnu
_MAX_HEADER = 8 << 20
_MAX_DIMS = 64
_PIECE = 4 << 20


class TensorPlace(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> TensorPlace:
        """Return some of its rows."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return TensorPlace(self.dtype, (stop - start, *self.shape[1:]), self.start + start * row_bytes)


class TensorWriter:
    """A file being filled with tensors, whole or in pieces of rows, in any order.

    Args:
        file: a new and empty file, open for writing.
        shapes: dtype (one of ``DTYPES``) and shape of every tensor, by name.
        metadata: texts by name.

    Example:
        >>> import tempfile
        >>> file = OpenFile(tempfile.mkstemp()[0])
        >>> writer = TensorWriter(file, {"ids": (torch.int64, (3,))})
        >>> writer.write("ids", torch.tensor([7, 8, 9]))
        >>> TensorReader(file, "an example").read("ids")
        tensor([7, 8, 9])
    """

    def __init__(
        self,
        file: OpenFile,
        shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._file = file
        entries: dict[str, Any] = {}
        places: dict[str, TensorPlace] = {}
        end = 0
        # Widest items first, so that every tensor is aligned.
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
            places[name] = TensorPlace(dtype, tuple(shape), end)
            begin, end = end, end + places[name].nbytes
            entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        self._entries = entries
        header = self._header(metadata)
        if len(header) > _MAX_HEADER:
            raise ValueError(f"{len(shapes)} tensors are more than one file describes; join some of them")
        first = len(header)
        self.places = {name: place._replace(start=place.start + first) for name, place in places.items()}
        self._first, self.nbytes = first, first + end
        os.ftruncate(file.fd, self.nbytes)
        write_all(file.fd, header, 0)

    def _header(self, metadata: Mapping[str, str] | None) -> bytes:
        header = json.dumps(({"__metadata__": metadata} if metadata else {}) | self._entries).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header

    def describe(self, metadata: Mapping[str, str]) -> None:
        """Replace the metadata by as many bytes."""
        header = self._header(metadata)
        assert len(header) == self._first
        write_all(self._file.fd, header, 0)

    def write(self, name: str, values: Tensor, *, first_row: int = 0) -> None:
        """Write a tensor on any device, or some of its rows from ``first_row`` on."""
        place = self.places[name]
        if first_row or values.shape != place.shape:
            place = place.rows(first_row, first_row + len(values))
        assert (values.dtype, tuple(values.shape)) == (place.dtype, place.shape)
        raw = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        write_all(self._file.fd, raw.numpy().data, place.start)


class TensorReader:
    """The tensors of an untrusted file: sizes and shapes are checked before anything is allocated.

    Args:
        file: the file, open for reading.
        what: the file, for messages.

    Attributes:
        places: the tensors by name.
        others: the dtypes, by name, of tensors that torch has no dtype for, which are not read.
        metadata: texts by name.
        nbytes: the file's size.
        digest: a hash of its header.

    Raises:
        TableFormatError: it is damaged.
    """

    def __init__(self, file: OpenFile, what: str) -> None:
        self.file = file
        self._what = what
        self.nbytes = os.fstat(file.fd).st_size
        self.others: dict[str, str] = {}
        try:
            self.places = self._read_header()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise TableFormatError(f"{what} is damaged: {error}") from None

    def _read_header(self) -> dict[str, TensorPlace]:
        length = int.from_bytes(os.pread(self.file.fd, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER, self.nbytes - 8):
            raise ValueError(f"its header would have {length} bytes")
        header = os.pread(self.file.fd, length, 8)
        self.digest = hashlib.blake2b(header, digest_size=16).hexdigest()
        entries = json.loads(header)
        self.metadata = {str(name): str(text) for name, text in entries.pop("__metadata__", {}).items()}
        places = dict[str, TensorPlace]()
        for name, entry in entries.items():
            if (place := _place(name, entry, 8 + length)) is None:
                self.others[name] = str(entry["dtype"])[:20]
            else:
                places[name] = place
        end = 8 + length
        for (begin, last), name in sorted((tuple(entry["data_offsets"]), name) for name, entry in entries.items()):
            size = places[name].nbytes if name in places else last - begin
            if begin + 8 + length != end or last - begin != size or size < 0:
                raise ValueError(f"tensor {name[:100]!r} is not where the one before ends, or not of its size")
            end += size
        if end != self.nbytes:
            raise ValueError(f"it has {self.nbytes} bytes, and its tensors end at {end}")
        return places

    def unread(self, name: str) -> str:
        """Return the message for a tensor that is not read."""
        return f"{self._what}: tensor {name[:100]!r} has dtype {self.others[name]!r}, which is not read; save another"

    def read(self, name: str) -> Tensor:
        """Return a tensor in ordinary memory."""
        return self._read(self.places[name])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` of a tensor in ordinary memory."""
        return self._read(self.places[name].rows(start, stop))

    def _read(self, place: TensorPlace) -> Tensor:
        raw = torch.empty(place.nbytes, dtype=torch.uint8)
        rest, offset = raw.numpy().data, place.start
        while rest:
            count = os.preadv(self.file.fd, [rest[:_PIECE]], offset)
            if not count:
                raise TableFormatError(f"{self._what} is damaged: it was cut short as it was read")
            rest, offset = rest[count:], offset + count
        return raw.view(place.dtype).view(place.shape)


def _place(name: str, entry: Any, first: int) -> TensorPlace | None:
    """Check a tensor's entry in the header; return its place, or None if torch has no such dtype."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = [begin, end, *shape]
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"tensor {name[:100]!r} has {len(shape)} dimensions")
    if not all(is_int(size, 0, 2**63 - 1) for size in sizes):
        raise ValueError(f"tensor {name[:100]!r} has no proper sizes")
    return TensorPlace(_OF_NAME[dtype], tuple(shape), first + begin) if dtype in _OF_NAME else None
