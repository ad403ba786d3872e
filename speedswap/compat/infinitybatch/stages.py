"""What happens in a training, passed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from speedswap.batching import Callback, Event

__all__ = ["Bridge"]


class Bridge(Callback):
    """Hands a splitter's events on.

    Args:
        tell: called with the moment's name and the event.
    """

    def __init__(self, tell: Callable[[str, Event], None]) -> None:
        self._tell = tell

    @staticmethod
    def placed(event: Event, source: Any, epoch: int, batch: int) -> Event:
        """An event with the training that it belongs to, its epoch and its batch."""
        return dataclasses.replace(
            event, source=source, epoch=epoch if epoch >= 0 else None, batch=batch if batch >= 0 else None
        )

    def before_batch(self, event: Event) -> None:
        """Handed on."""
        self._tell("before_batch", event)

    def after_batch(self, event: Event) -> None:
        """Handed on."""
        self._tell("after_batch", event)

    def before_micro_batch(self, event: Event) -> None:
        """Handed on."""
        self._tell("before_micro_batch", event)

    def before_backward(self, event: Event) -> None:
        """Handed on."""
        self._tell("before_backward", event)

    def after_micro_batch(self, event: Event) -> None:
        """Handed on."""
        self._tell("after_micro_batch", event)

    def on_out_of_memory(self, event: Event) -> None:
        """Handed on."""
        self._tell("on_out_of_memory", event)

    def on_resize(self, event: Event) -> None:
        """Handed on."""
        self._tell("on_resize", event)
