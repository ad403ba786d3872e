"""Tell people how training goes, on the screen or wherever the printer puts it."""

from __future__ import annotations

from collections.abc import Callable

from speedswap.batching import Callback, Event

__all__ = ["Progress"]


class Progress(Callback):
    """A callback of a splitter or a training loop that prints one line now and then.

    Args:
        printer: takes each line; ``print`` by default. ``tqdm.write`` or a logger's ``info`` do as well.
        every: batches between two lines; 0 for none but epochs and changes of size.

    >>> progress = Progress(every=2)
    >>> progress.before_epoch(Event(None, epoch=0))
    >>> progress.after_batch(Event(None, batch_size=8, batch=0))
    >>> progress.after_batch(Event(None, batch_size=4, batch=1))
    epoch 1, batch 2: 12 samples
    """

    def __init__(self, printer: Callable[[str], object] = print, *, every: int = 1) -> None:
        self._print, self._every = printer, every
        self._epoch: int | None = None
        self._batches = self._samples = 0

    def before_epoch(self, event: Event) -> None:
        """Count anew."""
        self._epoch, self._batches, self._samples = event.epoch, 0, 0

    def after_batch(self, event: Event) -> None:
        """Say where training is, if it is time."""
        self._batches += 1
        self._samples += event.batch_size or 0
        if self._every and self._batches % self._every == 0:
            self._say(f"batch {self._batches}: {self._samples} samples", event)

    def on_resize(self, event: Event) -> None:
        """Say that the micro-batch size changes."""
        self._say(f"micro-batch size {event.old_size} → {event.new_size}", Event(event.source))

    def after_epoch(self, event: Event) -> None:
        """Say how much the epoch was."""
        self._say(f"done: {self._batches} batches, {self._samples} samples", event)

    def _say(self, what: str, event: Event) -> None:
        where = "" if self._epoch is None else f"epoch {self._epoch + 1}, "
        loss = "" if event.loss is None else f", loss {float(event.loss.detach().float().mean()):.4g}"
        self._print(f"{where}{what}{loss}")
