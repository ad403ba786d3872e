"""Statistics of training, written where other tools read them: JSON lines, CSV, or a TensorBoard-style writer."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from speedswap._words import a_kind

__all__ = ["CsvWriter", "JsonLinesWriter", "ScalarWriter", "Writer", "make_writer", "write_csv"]


class Writer:
    """Takes the figures of one step at a time; a context manager that closes it."""

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the figures of a step: numbers, 0-d tensors, texts, or None."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is still to be written."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLinesWriter(Writer):
    """One JSON object a line, appended and flushed at each step; not-a-number and infinities are texts.

    Args:
        path: the file; an existing one is continued.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append a line."""
        row = {name: _finite(value) for name, value in as_plain(figures).items()}
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvWriter(Writer):
    """Rows of comma-separated values under a header, flushed at each step.

    A figure that was not there in earlier steps gets a column of its own; the file is then written anew, all at once.

    Args:
        path: the file; an existing one is continued.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._columns = ["step"]
        if self._path.exists() and self._path.stat().st_size:
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file))
        else:
            write_csv(self._path, [], self._columns)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append a row."""
        row = {"step": step, **as_plain(figures)}
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        csv.writer(self._file).writerow([_text(row.get(name)) for name in self._columns])
        self._file.flush()

    def _widen(self, names: list[str]) -> None:
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._columns += names
        replacement = self._path.with_name(self._path.name + ".new")
        write_csv(replacement, rows, self._columns)
        os.replace(replacement, self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TakesScalars(Protocol):
    """What TensorBoard's ``SummaryWriter`` and its like have in common."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take one figure of one step."""


class ScalarWriter(Writer):
    """Hands numbers on to anything with ``add_scalar``, such as ``torch.utils.tensorboard.SummaryWriter``.

    Args:
        target: the writer. It is not closed with this one: its owner does that.
        prefix: put before each figure's name, as in ``"train/"``.
    """

    def __init__(self, target: TakesScalars, *, prefix: str = "") -> None:
        self._target, self._prefix = target, prefix

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Hand each number on; texts and None are left out."""
        for name, value in as_plain(figures).items():
            if isinstance(value, (int, float)):
                self._target.add_scalar(self._prefix + name, value, step)

    def close(self) -> None:
        """Have the target write what it holds."""
        flush = getattr(self._target, "flush", None)
        if flush is not None:
            flush()


def make_writer(target: str | Path | Writer | TakesScalars) -> Writer:
    """A writer for a ``.jsonl`` or ``.csv`` file, or for something with ``add_scalar``; or the one given.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(target, Writer):
        return target
    if not isinstance(target, (str, Path)):
        if not callable(getattr(target, "add_scalar", None)):
            raise ValueError(f"target is {a_kind(target)}; it must be a path, a Writer, or have add_scalar")
        return ScalarWriter(target)
    suffix = Path(target).suffix
    if suffix == ".jsonl":
        return JsonLinesWriter(target)
    if suffix == ".csv":
        return CsvWriter(target)
    raise ValueError(f"target is {str(target)!r}; its name must end in .jsonl or .csv")


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: list[str] | None = None) -> None:
    """Write rows as CSV under a header, with a column for each name that any of them has."""
    rows = list(rows)
    columns = columns or list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_text(row.get(name)) for name in columns] for row in rows)


def as_plain(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as Python's own numbers and texts."""
    return {name: _plain(value) for name, value in figures.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        return value.item()  # NumPy's numbers
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> Any:
    return "" if value is None else value
