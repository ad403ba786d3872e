"""The tensors of safetensors files by name, and their bytes in place."""

from __future__ import annotations

import difflib
import json
import os
import re
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

TensorSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A safetensors file, an index (``*.safetensors.index.json``), a folder with either, or several files."""

_INDEX, _TENSORS = ".safetensors.index.json", ".safetensors"
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
        self._opened: dict[Path, tuple[OpenFile, TensorReader]] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for path, listed in _described(file):
                names = [*(reader := self._open(path)[1]).places, *reader.others] if listed is None else listed
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
        if name in self:
            return [name]
        pattern = re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
        found = [each for each in self._file_of if pattern.fullmatch(each)]
        if not found:
            raise ValueError(self.missing(name))
        return sorted(found, key=lambda each: [int(run) if run.isdigit() else run for run in _runs(each)])

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return [*self._file_of]

    def path(self, name: str) -> Path:
        """Return the file that has a tensor; the name must be known."""
        return self._file_of[name]

    def reader(self, name: str) -> TensorReader:
        """Return the file that has a tensor.

        Raises:
            ValueError: no tensor has that name.
            TableFormatError: it is not in the file that the index says, or torch has no dtype like its.
        """
        if name not in self:
            raise ValueError(self.missing(name))
        path = self._file_of[name]
        try:
            reader = self._open(path)[1]
        except FileNotFoundError:
            raise TableFormatError(f"{path} is missing, where {name!r} should be; copy all of the files") from None
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
        return MappedTensor(self._open(path)[0], place, str(path), at_random=at_random)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor over the file, without a copy; errors are those of :meth:`reader`."""
        place = self.place(name)
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        return self.mapped(name, at_random=False).bytes.view(place.dtype).view(place.shape)

    def _open(self, path: Path) -> tuple[OpenFile, TensorReader]:
        if path not in self._opened:
            with open_regular(path) as handle:
                file = OpenFile(os.dup(handle.fileno()))
            self._opened[path] = file, TensorReader(file, str(path))
        return self._opened[path]


def _runs(name: str) -> list[str]:
    """Split a name into digits and others, in turns."""
    return re.split(r"([0-9]+)", name)


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


class MappedTensor:
    """A tensor's bytes in a file; pages of them that are written are copied, and the file stays as it is.

    Args:
        file: the open file.
        place: the tensor.
        what: the file, for messages.
        at_random: True to read a page at a time, and nothing around it but by :meth:`read_ahead`.

    Attributes:
        place: the tensor.
        bytes: uint8.
    """

    def __init__(self, file: OpenFile, place: TensorPlace, what: str, *, at_random: bool = True) -> None:
        self._file, self.place, self._what = file, place, what
        self._seen = self._now()
        self._mapping, self.bytes = pinning.copied_on_write(file.fd, place.start, place.nbytes, at_random=at_random)

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

    def close(self) -> None:
        """Release the file; views of its bytes must no longer be used."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._file.close()
        with suppress(BufferError):  # unmapped with the last tensor over it
            self._mapping.close()
