"""Callbacks of a splitter or a training loop: a record of each batch, and a progress bar."""

from __future__ import annotations

import csv
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.batching import Callback, Event
from speedswap.monitor.figures import default_device, import_optional, memory_snapshot

Row = dict[str, Any]


class TakesScalars(Protocol):
    """The common interface of TensorBoard's ``SummaryWriter`` and similar writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record one figure of one step."""


class SplitRecorder(Callback):
    """A splitter's callback that keeps one row per batch, and writes it to files or TensorBoard.

    A row has ``step``, ``seconds``, ``batch_size``, ``micro_batch_size`` (the largest part), ``micro_batches``,
    ``loss``, ``memory_bytes`` (the peak during the batch where the device's allocator reports it, else the process's
    resident memory), ``out_of_memory`` (failed attempts) and ``epoch`` (None unless a training loop reports it).

    Args:
        targets: written after each batch as well: paths (``.jsonl``, ``.csv``; existing files are continued) or
            anything with ``add_scalar``, such as ``torch.utils.tensorboard.SummaryWriter``, which the caller must
            close. In JSON, NaN and infinities are strings.
        device: the device whose memory is recorded; by default the current CUDA device, else the process's.
        limit: the number of rows that are kept; None for all.

    Attributes:
        rows: the rows.

    Raises:
        ValueError: a target is none of these.

    >>> recorder = SplitRecorder()
    >>> recorder.before_batch(Event(None, batch_size=8, micro_batch_sizes=(4, 4)))
    >>> recorder.after_batch(Event(None, batch_size=8, loss=torch.tensor(0.5)))
    >>> row = recorder.rows[0]
    >>> row["micro_batch_size"], row["micro_batches"], row["loss"]
    (4, 2, 0.5)
    """

    def __init__(
        self,
        *targets: str | Path | TakesScalars,
        device: torch.device | str | None = None,
        limit: int | None = 100_000,
    ) -> None:
        self.rows: list[Row] = []
        self._finish: list[Callable[[], Any]] = []
        self._writers = [self._writer(target) for target in targets]
        self._device = default_device() if device is None else torch.device(device)
        self._limit = limit
        self._begin = time.perf_counter()
        self._step = self._failures = 0
        self._sizes: tuple[int, ...] = ()
        self._attempted = False

    def _writer(self, target: str | Path | TakesScalars) -> Callable[[Row], Any]:
        if not isinstance(target, (str, Path)):
            if not callable(getattr(target, "add_scalar", None)):
                raise ValueError(f"target is {a_kind(target)}; it must be a path, or have add_scalar")
            self._finish.append(getattr(target, "flush", lambda: None))
            return functools.partial(_add_scalars, target)
        suffix = Path(target).suffix
        if suffix not in (".jsonl", ".csv"):
            raise ValueError(f"target is {str(target)!r}; its name must end in .jsonl or .csv")
        file = open(target, "a", buffering=1, newline="", encoding="utf-8")  # noqa: SIM115  (each line is flushed)
        self._finish.append(file.close)
        if suffix == ".jsonl":
            return lambda row: file.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
        return functools.partial(_write_csv, csv.writer(file), file)

    def before_batch(self, event: Event) -> None:
        """Note the sizes of an attempt."""
        self._sizes = event.micro_batch_sizes or ()
        if not self._attempted and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._attempted = True

    def on_out_of_memory(self, event: Event) -> None:
        """Count a failed attempt."""
        self._failures += 1

    def after_batch(self, event: Event) -> None:
        """Add the batch's row."""
        memory = memory_snapshot(self._device, synchronize=False)
        row = {
            "step": self._step,
            "seconds": time.perf_counter() - self._begin,
            "batch_size": event.batch_size,
            "micro_batch_size": max(self._sizes, default=event.batch_size),
            "micro_batches": len(self._sizes) or 1,
            "loss": None if event.loss is None else _number(event.loss),
            "memory_bytes": memory.peak if memory.source == "allocator" else memory.allocated,
            "out_of_memory": self._failures,
            "epoch": event.epoch,
        }
        self.rows.append(row)
        if self._limit is not None:
            del self.rows[: max(0, len(self.rows) - self._limit)]
        for write in self._writers:
            write(row)
        self._step += 1
        self._failures, self._attempted = 0, False

    def column(self, name: str) -> list[Any]:
        """Return one figure of every row, for plotting."""
        return [row[name] for row in self.rows]

    def close(self) -> None:
        """Close the files and flush the other targets; rows of later batches are kept, but written nowhere."""
        for finish in self._finish:
            finish()
        self._finish.clear()
        self._writers.clear()


class Progress(Callback):
    """A callback that shows the samples of each epoch on a tqdm bar, with the loss and the micro-batch size.

    Without a training loop that reports epochs, one bar lasts until ``close``.

    Args:
        **options: arguments of ``tqdm.auto.tqdm``, such as ``total``, the samples in an epoch.

    Raises:
        ImportError: tqdm is not installed.

    """

    def __init__(self, **options: Any) -> None:
        self._tqdm = import_optional("tqdm.auto").tqdm
        self._options = {"unit": " samples", **options}
        self._bar: Any = None
        self._sizes: tuple[int, ...] = ()

    def _opened(self) -> Any:
        if self._bar is None:
            self._bar = self._tqdm(**self._options)
        return self._bar

    def before_epoch(self, event: Event) -> None:
        """Begin a new bar."""
        self.close()
        if event.epoch is not None:
            self._opened().set_description(f"epoch {event.epoch + 1}")

    def before_batch(self, event: Event) -> None:
        """Note the sizes of an attempt."""
        self._sizes = event.micro_batch_sizes or ()

    def after_batch(self, event: Event) -> None:
        """Add the batch's samples."""
        figures = {} if event.loss is None else {"loss": _number(event.loss)}
        if self._sizes:
            figures["micro_batch_size"] = max(self._sizes)
        self._opened().set_postfix(figures, refresh=False)
        self._bar.update(event.batch_size or 0)

    def after_epoch(self, event: Event) -> None:
        """End the bar."""
        self.close()

    def close(self) -> None:
        """End the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _number(loss: Tensor) -> float:
    return float(loss.detach().float().mean())


def _write_csv(writer: Any, file: IO[str], row: Row) -> None:
    if not file.tell():
        writer.writerow(row)  # its names
    writer.writerow(row.values())


def _add_scalars(target: TakesScalars, row: Row) -> None:
    for name, value in row.items():
        if name != "step" and value is not None:
            target.add_scalar(name, value, row["step"])


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
