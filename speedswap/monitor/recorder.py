"""Keeps what happened to split batches: micro-batch size, loss, memory and out-of-memory, step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from speedswap.batching import Callback, Event
from speedswap.monitor.snapshots import default_device, memory_snapshot
from speedswap.monitor.writers import TakesScalars, Writer, make_writer, write_csv

__all__ = ["SplitRecorder"]


class SplitRecorder(Callback):
    """A splitter's callback that keeps a row for each batch.

    A row has ``step``, ``seconds``, ``batch_size``, ``micro_batch_size`` (the largest part), ``micro_batches``,
    ``loss``, ``memory_bytes`` (the most in use during the batch where the device tells, else what the process has in
    memory), ``out_of_memory`` (attempts that failed) and ``epoch`` where a training loop says it.

    Args:
        writers: where each row goes as well: paths (``.jsonl``, ``.csv``), writers, or anything with ``add_scalar``.
        device: whose memory; by default the current CUDA device, or the process's.
        limit: how many rows are kept; None for all.

    Attributes:
        rows: the rows.

    >>> recorder = SplitRecorder()
    >>> recorder.before_batch(Event(None, batch_size=8, micro_batch_sizes=(4, 4)))
    >>> recorder.after_batch(Event(None, batch_size=8, loss=torch.tensor(0.5)))
    >>> row = recorder.rows[0]
    >>> row["micro_batch_size"], row["micro_batches"], row["loss"]
    (4, 2, 0.5)
    """

    def __init__(
        self,
        *writers: str | Path | Writer | TakesScalars,
        device: torch.device | str | None = None,
        limit: int | None = 100_000,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._writers = [make_writer(writer) for writer in writers]
        self._device = default_device() if device is None else torch.device(device)
        self._limit = limit
        self._begin = time.perf_counter()
        self._step = self._failures = 0
        self._sizes: tuple[int, ...] = ()
        self._attempted = False

    def before_batch(self, event: Event) -> None:
        """An attempt begins."""
        self._sizes = event.micro_batch_sizes or ()
        if not self._attempted and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._attempted = True

    def on_out_of_memory(self, event: Event) -> None:
        """An attempt failed."""
        self._failures += 1

    def after_batch(self, event: Event) -> None:
        """The batch is through."""
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
        }
        if event.epoch is not None:
            row["epoch"] = event.epoch
        self.rows.append(row)
        if self._limit is not None:
            del self.rows[: max(0, len(self.rows) - self._limit)]
        for writer in self._writers:
            writer.write(self._step, {name: value for name, value in row.items() if name != "step"})
        self._step += 1
        self._failures, self._attempted = 0, False

    def column(self, name: str) -> list[Any]:
        """One figure of all rows, to plot."""
        return [row.get(name) for row in self.rows]

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV."""
        write_csv(path, self.rows)

    def close(self) -> None:
        """Close the writers; rows of later batches are kept, but written nowhere."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()


def _number(loss: Any) -> float:
    return float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else float(loss)
