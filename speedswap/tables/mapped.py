"""Rows of safetensors files, read in place: the file is mapped privately, so only written rows take memory."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.errors import TableClosedError, TableFormatError
from speedswap.kernels.cuda import pinning
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_file import TensorPlace, TensorReader
from speedswap.tables.files.whole import open_regular
from speedswap.tables.init import Unknown
from speedswap.tables.local import LocalStore
from speedswap.tables.memory import Memory, RecordGroup
from speedswap.tables.record import Column, RecordLayout
from speedswap.tables.store import RowStore, StoreFacts

TensorSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A safetensors file, an index (``*.safetensors.index.json``), a folder with either, or several files."""

_INDEX, _TENSORS = ".safetensors.index.json", ".safetensors"
_MOST_INDEX_BYTES = 64 << 20
_SHOWN = 8


class TensorFiles:
    """The tensors of one or several safetensors files, by name; files of an index are opened when they are needed.

    Args:
        source: the files.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has no safetensors files.
        TableFormatError: a file is damaged, or several of them have a tensor of the same name.
    """

    def __init__(self, source: TensorSource) -> None:
        files = [source] if isinstance(source, str | os.PathLike) else source
        if not isinstance(files, Sequence) or not files:
            raise TypeError(f"file is {a_kind(source)}; give a safetensors file, a folder of them, or a list of files")
        self.what = os.fspath(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        self._opened: dict[Path, tuple[OpenFile, TensorReader]] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for path, names in _described(Path(file)):
                for name in self._open(path)[1].places if names is None else names:
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

    def place(self, name: str) -> TensorPlace:
        """Return a tensor's dtype, shape and place in its file.

        Raises:
            ValueError: no tensor has that name.
            TableFormatError: it is not in the file that the index says.
        """
        if name not in self:
            raise ValueError(self.missing(name))
        path = self._file_of[name]
        places = self._open(path)[1].places
        if name not in places:
            raise TableFormatError(f"{path} has no tensor {name!r}, although its index says so; copy the files again")
        return places[name]

    def memory(self, name: str, *, at_random: bool = True) -> FileMemory:
        """Return the bytes of a tensor as memory; errors are those of :meth:`place`."""
        place = self.place(name)
        return FileMemory(self._open(self._file_of[name])[0], place, str(self._file_of[name]), at_random=at_random)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor over the file, without a copy; errors are those of :meth:`place`."""
        place = self.place(name)
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        return self.memory(name, at_random=False).bytes.view(place.dtype).view(place.shape)

    def _open(self, path: Path) -> tuple[OpenFile, TensorReader]:
        if path not in self._opened:
            with open_regular(path) as handle:
                file = OpenFile(os.dup(handle.fileno()))
            self._opened[path] = file, TensorReader(file, str(path))
        return self._opened[path]


def _described(path: Path) -> Iterable[tuple[Path, list[str] | None]]:
    """Return the files that a path stands for, each with the names of its tensors if an index has them."""
    if path.is_dir():
        indices = [*path.glob(f"*{_INDEX}")]
        if len(indices) > 1:
            raise ValueError(f"{path} has {len(indices)} indices; give one of {', '.join(sorted(map(str, indices)))}")
        if not indices and not (files := sorted(path.glob(f"*{_TENSORS}"))):
            raise FileNotFoundError(f"{path} has no *{_TENSORS} files; give the folder that has them")
        return _described(indices[0]) if indices else [(file, None) for file in files]
    if path.suffix != ".json":
        return [(path, None)]
    with open_regular(path) as file:
        text = file.read(_MOST_INDEX_BYTES)
    try:
        names_of: dict[Path, list[str]] = {}
        for name, file_name in json.loads(text)["weight_map"].items():
            if Path(file_name).name != file_name:
                raise ValueError(f"it names {file_name!r}, which is not a file next to it")
            names_of.setdefault(path.parent / file_name, []).append(name)
        return names_of.items()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TableFormatError(f"{path} is not an index of safetensors files: {error}") from None


class FileMemory(Memory):
    """A tensor's bytes in a file; pages of them that are written are copied, and the file stays as it is.

    Args:
        file: the open file.
        place: the tensor.
        what: the file, for messages.
        at_random: True to read a page at a time, and nothing around it but by :meth:`read_ahead`.
    """

    def __init__(self, file: OpenFile, place: TensorPlace, what: str, *, at_random: bool = True) -> None:
        self._file, self._what = file, what
        self._seen = self._now()
        self._mapping, self.bytes = pinning.copied_on_write(file.fd, place.start, place.nbytes, at_random=at_random)
        self._first = place.start % pinning.PAGE_BYTES

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

    def read_ahead(self, start: int, stop: int) -> None:
        """Start reading some of the bytes, which are otherwise read a page at a time."""
        first = (self._first + start) // pinning.PAGE_BYTES * pinning.PAGE_BYTES
        pinning.read_ahead(self._mapping, first, self._first + stop - first)

    def close(self) -> None:
        super().close()
        self._file.close()
        with suppress(BufferError):  # unmapped with the last tensor over it
            self._mapping.close()


class FileStore(LocalStore):
    """Rows that are a tensor in a safetensors file, read in place; written rows and other columns are in memory.

    Args:
        files: the files.
        name: the tensor's name.

    Raises:
        ValueError: no tensor has that name.
        TypeError: it is not a matrix of floating-point rows.
        FileNotFoundError, TableFormatError: as for :class:`TensorFiles`.
    """

    written_rows = RowStore.written_rows  # which reads ahead

    def __init__(self, files: TensorFiles, name: str) -> None:
        place = files.place(name)
        if len(place.shape) != 2 or not place.nbytes or not place.dtype.is_floating_point or place.dtype.itemsize < 2:
            raise TypeError(
                f"tensor {name!r} of {files.what} is {place.shape} of {place.dtype}, but rows in place are a matrix of "
                "floating-point numbers of 16 bits or more; Table.from_file(file, columns=[name], dtype=…) copies them"
            )
        rows, width = place.shape
        super().__init__(StoreFacts(rows, "file", name=name), written=True)
        weight = Column("weight", (width,), place.dtype, Unknown('{"kind": "given"}'))
        self._memory = files.memory(name)
        self._hold(RecordGroup(RecordLayout((weight,), (0,), weight.row_bytes), self._memory, rows))

    def check(self, *, writing: bool = False) -> bool:
        self._memory.check()
        return super().check(writing=writing)

    def read(self, column: str, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        if column == "weight" and start < stop:
            stride = self.group_of(column).layout.stride
            self._memory.read_ahead(start * stride, stop * stride)
        return super().read(column, start, stop, device)
