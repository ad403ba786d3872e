"""A Keras model that trains with elastic batches."""

from __future__ import annotations

from typing import Any

from speedswap._words import a_kind
from speedswap.compat.aikit import elastic
from speedswap.compat.aikit.ga.TF import hooks, optimizers
from speedswap.compat.aikit.keras_extra import keras

__all__ = ["Model"]


class Model:
    """A Keras model whose ``compile`` and ``fit`` accumulate as ``elastic.TF.init`` has worked out.

    All else is the model's own. ``fit`` feeds arrays in batches of ``elastic.loader_batch_size``, and updates with what
    is left of a window at the end of each epoch. Where the sizes of a plan differ, all batches have the largest, so an
    update sees up to ``steps`` samples more; feed ``elastic.micro_batch_sizes`` yourself where that matters.

    Args:
        model: the Keras model; it stays available as ``Model.model``.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(f"model is {a_kind(model)}; give a keras.Model")
        self.model = model

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """As ``keras.Model.compile``, with an optimizer that accumulates ``elastic.steps`` micro-batches."""
        optimizer = optimizers.Optimizer(optimizer, elastic.steps)
        self.model.compile(optimizer, *args, **kwargs)

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, **kwargs: Any) -> Any:
        """As ``keras.Model.fit``; arrays come in batches of the elastic size, and only the master process reports."""
        if batch_size is None and (hasattr(x, "shape") or isinstance(x, (list, tuple, dict))):
            batch_size = elastic.loader_batch_size
        if not elastic.master:
            kwargs.setdefault("verbose", 0)
        callbacks = kwargs.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks)
        return self.model.fit(x, y, batch_size=batch_size, callbacks=[hooks.Flush(), *callbacks], **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)
