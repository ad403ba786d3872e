"""InfinityBatch's batches: their form, their devices, and the loader that yields them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from speedswap._words import a_kind
from speedswap.batching.nested import replace_tensors
from speedswap.compat.infinitybatch.codes import InfinityBatchError

_TARGET_KEYS = ("targets", "target", "labels", "label", "y")


def unpack(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    A tuple or list has the targets last; a mapping has them under ``targets``, ``target``, ``labels``, ``label`` or
    ``y``. Several inputs stay a tuple, named ones a dictionary.

    Raises:
        InfinityBatchError: the batch has another form.

    >>> unpack(("pixels", "lengths", "digits"))
    (('pixels', 'lengths'), 'digits')
    >>> unpack({"pixels": 1, "labels": 2})
    ({'pixels': 1}, 2)
    """
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, batch[key]
        raise InfinityBatchError(
            f"a batch has the keys {', '.join(map(str, batch))}, none of which is {', '.join(_TARGET_KEYS)}; give "
            "InfinityBatch unpack=, which returns inputs and targets"
        )
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise InfinityBatchError(
        f"a batch is {a_kind(batch)}, not inputs and targets; give InfinityBatch unpack=, which returns both"
    )


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return a model's outputs; a mapping is its named arguments, a tuple or list several positional ones."""
    if isinstance(inputs, MutableMapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def moved(value: Any, device: torch.device | None) -> Any:
    """Return a nested value with its tensors on a device."""
    if device is None:
        return value
    waits = device.type == "cpu"  # else data from a GPU would be read before it has arrived
    return replace_tensors(value, lambda tensor: tensor.to(device, non_blocking=not waits))


def samples_first(outputs: Any, size: int) -> Any:
    """Return outputs of ``size`` samples, with a first dimension for a single sample's that were squeezed to 0-d."""
    if size > 1:
        return outputs
    return replace_tensors(outputs, lambda tensor: tensor.reshape(1) if tensor.dim() == 0 else tensor)


class WatchedLoader:
    """A data loader whose batches are watched as they are yielded; in all else it is the loader.

    Args:
        loader: the loader.
        watched: called with the loader; yields its batches.
    """

    def __init__(self, loader: Any, watched: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        self._watched = watched

    def __iter__(self) -> Iterator[Any]:
        return self._watched(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: Any) -> Any:
        return self.loader[index]

    def __eq__(self, other: object) -> bool:
        return self.loader is (other.loader if isinstance(other, WatchedLoader) else other)

    def __hash__(self) -> int:
        return hash(id(self.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def named(value: Any) -> dict[Any, Any]:
    """Return one object, a list or a dictionary as a dictionary; a list's keys are its positions."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {0: value}


def as_list(value: Any) -> list[Any]:
    """Return one object, a list or a dictionary as a list."""
    return list(named(value).values())
