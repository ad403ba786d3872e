"""Safetensors files: written, read by name, and read in place, as tensors or as the rows of a table.

Source: https://github.com/huggingface/safetensors, section "Format". Nothing is pickled.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind, require_kind
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.kernels.cuda import pinning
from speedswap.tables.files.damage import is_int, require, says_damaged
from speedswap.tables.files.open_directory import OpenFile, write_all
from speedswap.tables.files.place import open_regular

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
        places: dict[str, TensorPlace] = {}
        end = 0
        # Widest items first, so that every tensor is aligned.
        for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
            places[name] = TensorPlace(dtype, tuple(shape), end)
            end += places[name].nbytes
        offsets = {name: [place.start, place.start + place.nbytes] for name, place in places.items()}
        self._entries = {
            name: {"dtype": DTYPES[place.dtype], "shape": list(place.shape), "data_offsets": offsets[name]}
            for name, place in places.items()
        }
        header = self._header(metadata)
        if len(header) > _MAX_HEADER:
            raise ValueError(f"{len(shapes)} tensors are more than one file describes; join some of them")
        self._first, self.nbytes = len(header), len(header) + end
        self.places = {name: place._replace(start=place.start + self._first) for name, place in places.items()}
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
        TableFormatError: it is damaged, or in another format.
    """

    def __init__(self, file: OpenFile, what: str) -> None:
        self.file = file
        self._what = what
        self.nbytes = os.fstat(file.fd).st_size
        begin = os.pread(file.fd, 9, 0)
        if begin[8:] != b"{":
            raise TableFormatError(
                f"{what} begins with {begin!r}, not as a safetensors file: give one (Table.from_file reads other "
                "formats), or copy it again"
            )
        with says_damaged(what):
            self.places = self._read_header()

    def _read_header(self) -> dict[str, TensorPlace]:
        length = int.from_bytes(os.pread(self.file.fd, 8, 0), "little")
        require(2 <= length <= min(_MAX_HEADER, self.nbytes - 8), f"its header would have {length} bytes")
        header = os.pread(self.file.fd, length, 8)
        self.digest = hashlib.blake2b(header, digest_size=16).hexdigest()
        entries, end = json.loads(header), 8 + length
        self.metadata = {str(name): str(text) for name, text in entries.pop("__metadata__", {}).items()}
        found = {name: _place(name, entry, end) for name, entry in entries.items()}
        self.others = {name: str(entries[name]["dtype"])[:20] for name, place in found.items() if place is None}
        places = {name: place for name, place in found.items() if place is not None}
        for (begin, last), name in sorted((tuple(entry["data_offsets"]), name) for name, entry in entries.items()):
            size = places[name].nbytes if name in places else last - begin
            follows = begin + 8 + length == end and last - begin == size >= 0
            require(follows, f"tensor {name[:100]!r} is not where the one before ends, or not of its size")
            end += size
        require(end == self.nbytes, f"it has {self.nbytes} bytes, and its tensors end at {end}")
        return places

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The file in memory; pages of it that are written are copied, and the file stays as it is."""
        return pinning.copied_on_write(self.file.fd)

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


def opened_tensors(path: str | os.PathLike[str]) -> TensorReader:
    """Open a file of tensors; errors are those of :class:`TensorReader`, and an OSError if it cannot be opened."""
    with open_regular(Path(path)) as handle:
        return TensorReader(OpenFile(os.dup(handle.fileno())), os.fspath(path))


def _place(name: str, entry: Any, first: int) -> TensorPlace | None:
    """Check a tensor's entry in the header; return its place, or None if torch has no such dtype."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    require(len(shape) <= _MAX_DIMS, f"tensor {name[:100]!r} has {len(shape)} dimensions")
    are_sizes = all(is_int(size, 0, 2**63 - 1) for size in (begin, end, *shape))
    require(are_sizes, f"tensor {name[:100]!r} has no proper sizes")
    return TensorPlace(_OF_NAME[dtype], tuple(shape), first + begin) if dtype in _OF_NAME else None


TensorSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A safetensors file, an index (``*.safetensors.index.json``), several files, or a folder.

Of a folder ``model.safetensors`` counts, or else ``model.safetensors.index.json``, its one index, or all of its files.
"""

_INDEX, _TENSORS = ".safetensors.index.json", ".safetensors"
_WHOLE = (f"model{_TENSORS}", f"model{_INDEX}")  # of a folder that may have other tensors, too; as in transformers
_MOST_INDEX_BYTES = 64 << 20
_SHOWN = 8


def absolute_paths(source: TensorSource) -> list[str]:
    """Return the paths that the user gave, absolute.

    Raises:
        TypeError: there are none.
    """
    files = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(files, Sequence) or not files:
        raise TypeError(f"file is {a_kind(source)}; give a safetensors file, a folder of them, or a list of files")
    return [os.path.abspath(file) for file in files]


class TensorFiles:
    """The tensors of one or several safetensors files, by name; files of an index are opened when they are needed.

    Args:
        source: the files.

    Attributes:
        what: the files, for messages.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has no safetensors files.
        TableFormatError: a file is damaged, or several of them have a tensor of the same name.
    """

    def __init__(self, source: TensorSource) -> None:
        files = [Path(path) for path in absolute_paths(source)]
        self.what = os.fspath(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        self._opened: dict[Path, TensorReader] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for path, listed in _described(file):
                names = [*(reader := self._open(path)).places, *reader.others] if listed is None else listed
                for name in names:
                    if self._file_of.setdefault(name, path) != path:
                        raise TableFormatError(
                            f"{path} has a tensor {name!r}, and so has {self._file_of[name]}; give only one of them"
                        )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def missing(self, name: str) -> str:
        """Return a message that no tensor has a name, with names like it."""
        near = difflib.get_close_matches(name, self._file_of, _SHOWN, 0.4) or [*self._file_of]
        more = f" and {len(near) - _SHOWN} more" if len(near) > _SHOWN else ""
        return f"{self.what} has no tensor {name!r}, but {', '.join(near[:_SHOWN])}{more}"

    def matching(self, name: str) -> list[str]:
        """Return the names that a pattern stands for, in natural order: ``shard_2`` before ``shard_10``.

        Args:
            name: a tensor's name, or a pattern, in which ``*`` stands for any characters.

        Raises:
            ValueError: no tensor has that name.
        """
        require_kind("names", name, str, "the names of tensors, or a pattern")
        if name in self:
            return [name]
        pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
        found = [each for each in self._file_of if pattern.fullmatch(each)]
        if not found:
            raise ValueError(self.missing(name))
        digits = re.compile(r"([0-9]+)")  # in turns with others
        return sorted(found, key=lambda each: [int(run) if run.isdigit() else run for run in digits.split(each)])

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return [*self._file_of]

    def path(self, name: str) -> Path:
        """Return the file that has a tensor; the name must be known."""
        return self._file_of[name]

    def has_dtype(self, name: str) -> bool:
        """Return whether torch has a dtype like a tensor's; the name must be known."""
        return name not in self._holder(name).others

    def reader(self, name: str) -> TensorReader:
        """Return the file that has a tensor.

        Raises:
            ValueError: no tensor has that name.
            TableFormatError: it is not in the file that the index says, or torch has no dtype like its.
        """
        if name not in self:
            raise ValueError(self.missing(name))
        path, reader = self._file_of[name], self._holder(name)
        if name in reader.others:
            raise TableFormatError(reader.unread(name))
        if name not in reader.places:
            raise TableFormatError(f"{path} has no tensor {name!r}, although its index says so; copy the files again")
        return reader

    def place(self, name: str) -> TensorPlace:
        """Return a tensor's dtype, shape and place in its file; errors are those of :meth:`reader`."""
        return self.reader(name).places[name]

    def mapped(self, name: str, *, at_random: bool = True) -> MappedTensor:
        """Return a tensor's bytes in place; errors are those of :meth:`reader`."""
        place, path = self.place(name), self._file_of[name]
        return MappedTensor(self._open(path), place, str(path), at_random=at_random)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor over the file, without a copy; errors are those of :meth:`reader`."""
        place = self.place(name)
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        return self.mapped(name, at_random=False).bytes.view(place.dtype).view(place.shape)

    def _holder(self, name: str) -> TensorReader:
        path = self._file_of[name]
        try:
            return self._open(path)
        except FileNotFoundError:
            raise TableFormatError(f"{path} is missing, where {name!r} should be; copy all of the files") from None

    def _open(self, path: Path) -> TensorReader:
        if path not in self._opened:
            self._opened[path] = opened_tensors(path)
        return self._opened[path]


def _described(path: Path) -> Iterable[tuple[Path, list[str] | None]]:
    """Return the files that a path stands for, each with the names of its tensors if an index has them."""
    if path.is_dir():
        if whole := [path / name for name in _WHOLE if (path / name).exists()]:
            return _described(whole[0])
        indices = [*path.glob(f"*{_INDEX}")]
        if len(indices) > 1:
            raise ValueError(f"{path} has {len(indices)} indices; give one of {', '.join(sorted(map(str, indices)))}")
        if not indices and not (files := sorted(path.glob(f"*{_TENSORS}"))):
            raise FileNotFoundError(f"{path} has no *{_TENSORS} files; give the folder that has them")
        return _described(indices[0]) if indices else [(file, None) for file in files]
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give a safetensors file, its index, or the folder that has them"
        )
    if path.suffix != ".json":
        return [(path, None)]
    with open_regular(path) as file:
        text = file.read(_MOST_INDEX_BYTES)
    names_of: dict[Path, list[str]] = {}
    try:
        for name, file_name in json.loads(text)["weight_map"].items():
            if Path(file_name).name != file_name:
                raise ValueError(f"it names {file_name!r}, which is not a file next to it")
            names_of.setdefault(path.parent / file_name, []).append(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TableFormatError(f"{path} is not an index of safetensors files: {error}") from None
    return names_of.items()


_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # a Python built for an old glibc has none


class MappedTensor:
    """A tensor's bytes in a file; pages of them that are written are copied, and the file stays as it is.

    Args:
        reader: the file, which has one mapping for all of its tensors.
        place: the tensor.
        what: the file, for messages.
        at_random: True to read a page at a time, and nothing around it but by :meth:`read_ahead`.

    Attributes:
        place: the tensor.
        bytes: uint8.
    """

    def __init__(self, reader: TensorReader, place: TensorPlace, what: str, *, at_random: bool = True) -> None:
        self._file, self.place, self._what = reader.file, place, what
        self._seen = self._now()
        self._mapping = reader.mapping
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8, count=place.nbytes, offset=place.start)
        if at_random:
            before = place.start % pinning.PAGE_BYTES
            self._mapping.madvise(mmap.MADV_RANDOM, place.start - before, before + place.nbytes)

    def _now(self) -> tuple[int, ...]:
        now = os.fstat(self._file.fd)
        return now.st_size, now.st_mtime_ns

    def check(self) -> None:
        """Raise TableClosedError if the file has been written since it was opened."""
        if self._now() != self._seen:
            raise TableClosedError(
                f"{self._what} was written after its rows were mapped, so they may have changed; open it again "
                "(if a file is replaced by renaming a new one to it, its readers keep the old rows)"
            )

    def is_cached(self, offsets: Sequence[int]) -> bool:
        """Return whether the system has these bytes in memory; False, too, where it does not say."""
        if _NOWAIT is None:
            return False
        byte = [bytearray(1)]
        try:
            for offset in offsets:
                os.preadv(self._file.fd, byte, self.place.start + offset, _NOWAIT)
        except OSError:  # it would wait; whatever else is wrong, reading the bytes reports
            return False
        return True

    def close(self) -> None:
        """Release the file; views of its bytes must no longer be used."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._file.close()
        with suppress(BufferError):  # unmapped with the last tensor over it
            self._mapping.close()


_CPU = torch.device("cpu")
_PIECE_BYTES = 16 << 20  # of rows on their way to another dtype or device
_TILES = tuple(1 << power for power in range(3, 11))
_SAMPLES, _SAMPLE_BYTES = 4, 64  # of a tensor's values, for the fingerprint
_PROBES = 256  # of many rows, to find out whether they are in memory
_SCALE_DTYPES = (torch.float32, getattr(torch, "float8_e8m0fnu", None))


class _Scales(NamedTuple):
    """The scales of a tensor's values.

    Attributes:
        tensor: the file's.
        values: float32, or uint8 for exponents, shape (row tiles, column tiles).
        tile: rows and columns that have one scale.
    """

    tensor: MappedTensor
    values: Tensor
    tile: tuple[int, int]


class _Segment(NamedTuple):
    """One of the tensors.

    Attributes:
        tensor: the file's.
        rows: uint8, shape (n, row_bytes).
        scales: of float8.
    """

    tensor: MappedTensor
    rows: Tensor
    scales: _Scales | None

    @property
    def tensors(self) -> list[MappedTensor]:
        return [self.tensor] if self.scales is None else [self.tensor, self.scales.tensor]

    def is_cached(self, ids: Tensor) -> bool:
        return self.tensor.is_cached((ids * self.rows.shape[1]).tolist())

    def read_ahead(self, ids: Tensor) -> None:
        kernels.read_ahead(self.rows, ids)
        if self.scales is not None:
            _, values, (tile_rows, _) = self.scales
            kernels.read_ahead(values.view(torch.uint8), ids // tile_rows)

    def read(self, ids: Tensor, out: Tensor) -> None:
        if self.scales is not None:
            kernels.decode_rows(self.rows, self.scales.values, self.scales.tile, ids, out)
            return
        place = self.rows.data_ptr(), self.rows.shape[1], len(self.rows)
        kernels.gather_records(kernels.Records(*place, self.rows.device, False, self.rows), ids, [kernels.Part(0, out)])


class TensorRows:
    """The rows of tensors in safetensors files, read in place; decoded with their scales if they are float8.

    Args:
        source: the files.
        names: names or patterns of the tensors, in the order of their rows.
        scales: names or patterns of as many tensors of scales; none for other dtypes than float8.
        block: the number of columns that have one scale, and of rows if scales are of tiles, where shapes do not say.

    Attributes:
        what: the files and tensors, for messages.
        paths: the files.
        num_embeddings: rows.
        embedding_dim: values in a row.
        dtype: the dtype on file.
        fingerprint: a hash of names, dtypes, shapes, the files' sizes and headers, and a sample of the values.

    Raises:
        ValueError: no tensor has a name, scales are missing or too many, or their shapes do not fit.
        TypeError: the tensors are not matrices of one width and floating-point dtype, or scales have another dtype.
        FileNotFoundError: a file does not exist.
        TableFormatError: a file is damaged, truncated, or not as its index says.
    """

    def __init__(
        self, source: TensorSource, names: Sequence[str], scales: Sequence[str] = (), block: int | None = None
    ) -> None:
        files = TensorFiles(source)
        found = [each for name in names for each in files.matching(name)]
        found_scales = [each for name in scales for each in files.matching(name)]
        if not found:
            raise ValueError(f"names is {names!r}; give the name of a tensor, several, or a pattern")
        places = [files.place(name) for name in found]
        self.paths = {files.path(name) for name in (*found, *found_scales)}
        self.what = f"{found[0]!r} of {files.what}" + (f" and {len(found) - 1} more tensors" if len(found) > 1 else "")
        self.dtype = _require_alike(places, found, files.what)
        is_float8 = self.dtype == torch.float8_e4m3fn
        if len(found_scales) != (len(found) if is_float8 else 0):
            wanted = "each needs one of scales: give scale=, their names" if is_float8 else "they have no scales"
            raise ValueError(
                f"scale is {found_scales[:3]}, {len(found_scales)} tensors, but {self.what} are {self.dtype}, and "
                f"{wanted}"
            )
        self.embedding_dim = places[0].shape[1]
        self._segments = [
            _segment(files, name, scale, block)
            for name, scale in zip_longest(found, found_scales)
            if files.place(name).nbytes
        ]
        self._tensors = [tensor for each in self._segments for tensor in each.tensors]
        firsts = [*accumulate((len(each.rows) for each in self._segments), initial=0)]
        self.num_embeddings, self._firsts = firsts[-1], torch.tensor(firsts, device=_CPU)
        self.fingerprint = self._fingerprint(files, [*found, *found_scales])

    def _fingerprint(self, files: TensorFiles, names: list[str]) -> str:
        readers = {name: files.reader(name) for name in names}
        described = [(name, str(place.dtype), place.shape) for name in names for place in [files.place(name)]]
        sizes = [(reader.nbytes, reader.digest) for reader in dict.fromkeys(readers.values())]
        digest = hashlib.blake2b(json.dumps([described, sizes]).encode(), digest_size=16)
        mapped = [tensor.bytes for tensor in self._tensors]
        samples = [
            each[at : at + _SAMPLE_BYTES] for each in mapped for at in range(0, len(each), -(-len(each) // _SAMPLES))
        ]
        for sample in samples:
            kernels.read_ahead(sample.unsqueeze(0), torch.zeros(1, dtype=torch.int64, device=_CPU))
        for sample in samples:
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()

    def read_ahead(self, ids: Tensor) -> None:
        """Start reading some of the rows, ascending ids as for :meth:`fill`.

        That takes a call of the system for each, and is left out if a sample of many is in memory.
        """
        parts = [(segment, some) for segment, some, _ in self._split(ids)]
        every = len(ids) // _PROBES
        if every >= 4 and all(segment.is_cached(some[::every]) for segment, some in parts):
            return
        for segment, some in parts:
            segment.read_ahead(some)

    def fill(self, into: Tensor, ids: Tensor) -> None:
        """Copy some of the rows, converted to another dtype where that is wanted.

        Args:
            into: shape (m, embedding_dim), floating-point, each row contiguous, on any device.
            ids: int64, shape (m,), ascending, in range, in host memory.

        Raises:
            TableClosedError: a file has been written since it was opened.
        """
        for tensor in self._tensors:
            tensor.check()
        self.read_ahead(ids)
        wanted = self.dtype
        if wanted == torch.float8_e4m3fn:
            wanted = into.dtype if into.dtype == torch.bfloat16 else torch.float32
        is_direct = into.is_cpu and into.is_contiguous() and into.dtype == wanted
        step = max(1, _PIECE_BYTES // (self.embedding_dim * wanted.itemsize))
        for some, rows in zip(torch.split(ids, step), torch.split(into, step), strict=True):
            out = rows if is_direct else torch.empty(len(some), self.embedding_dim, dtype=wanted, device=_CPU)
            for segment, local, places in self._split(some):
                segment.read(local, out[places])
            if not is_direct:
                rows.copy_(out)

    def _split(self, ids: Tensor) -> Iterator[tuple[_Segment, Tensor, slice]]:
        """Yield the segments that have some of the ids: the rows' numbers in it, and their places among the ids."""
        edges = torch.searchsorted(ids, self._firsts).tolist()
        for segment, first, (begin, end) in zip(self._segments, self._firsts.tolist(), pairwise(edges), strict=False):
            if begin < end:
                yield segment, ids[begin:end] - first, slice(begin, end)


def _require_alike(places: Sequence[TensorPlace], names: Sequence[str], what: str) -> torch.dtype:
    """Return the dtype of tensors whose rows can follow one another.

    Raises:
        TypeError: they are not matrices of one width and dtype, or the dtype is not a floating-point one.
    """
    first = places[0]
    for name, place in zip(names, places, strict=True):
        is_rows = place.dtype.is_floating_point and (place.dtype.itemsize > 1 or place.dtype == torch.float8_e4m3fn)
        if not is_rows or len(place.shape) != 2 or not place.shape[1]:
            raise TypeError(
                f"tensor {name!r} of {what} is {place.shape} of {place.dtype}; give names of matrices of "
                "floating-point numbers of 16 bits or more, or of float8_e4m3fn with scale="
            )
        if (place.dtype, place.shape[1]) != (first.dtype, first.shape[1]):
            raise TypeError(
                f"tensor {name!r} of {what} has rows of {place.shape[1]} × {place.dtype}, but those of {names[0]!r} "
                f"are {first.shape[1]} × {first.dtype}; give names of tensors of one width and dtype"
            )
    if not any(place.shape[0] for place in places):
        raise TypeError(f"tensor {names[0]!r} of {what} has no rows; give names of tensors that have some")
    return first.dtype


def _segment(files: TensorFiles, name: str, scale: str | None, block: int | None) -> _Segment:
    tensor = files.mapped(name)
    rows = tensor.bytes.view(tensor.place.shape[0], -1)
    if scale is None:
        return _Segment(tensor, rows, None)
    dtype, shape, _ = files.place(scale)
    if dtype not in _SCALE_DTYPES:
        raise TypeError(f"scale {scale!r} of {files.what} is {dtype}; scales are float32, or exponents (F8_E8M0)")
    tile = _tile(rows.shape[0], rows.shape[1], shape, block, f"scale {scale!r} of {files.what}")
    scales = files.mapped(scale)
    values = scales.bytes.view(torch.float32) if dtype == torch.float32 else scales.bytes
    return _Segment(tensor, rows, _Scales(scales, values.view((*shape, 1, 1)[:2]), tile))


def _tile(rows: int, width: int, shape: tuple[int, ...], block: int | None, what: str) -> tuple[int, int]:
    """Return how many rows and columns have one scale.

    Raises:
        ValueError: no number fits the shape of the scales, or several do.
    """
    known = [(1, width), (rows, width)]
    if block is None:
        known += [(tile, tile) for tile in _TILES]
        if len(shape) == 2 and shape[1] and width % shape[1] == 0:  # unless a last, narrower block is as likely
            known += [(1, columns) for columns in (width // shape[1], *_TILES)]
    elif block > 0:
        known += [(1, block), (block, block)]
    grid = (*shape, 1, 1)[:2]
    fits = {(min(a, rows), min(b, width)) for a, b in known if (-(-rows // a), -(-width // b)) == grid}
    if len(shape) > 2 or len(fits) != 1:
        raise ValueError(
            f"{what} is of shape {shape}, and block is {block}, but the rows are {rows} × {width}; give block=, the "
            "number of columns that have one scale, or of rows and columns in a tile"
        )
    return fits.pop()
