"""Values that a loss function returns beside its loss, such as logits or metrics, over all parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedswap.batching.nested import PerSample, Whole, is_plain_list, joined_fields
from speedswap.errors import BatchError

__all__ = ["NO_AUX", "joined", "kept", "parted"]

NO_AUX: Any = object()
"""Stands for the aux of a loss function that returns a loss alone; None may be an aux."""


def parted(result: Any) -> tuple[Any, Any]:
    """Split what a loss function returned into its loss and its aux.

    >>> parted(torch.tensor(1.0))[1] is NO_AUX
    True
    >>> parted((torch.tensor(1.0), {"accuracy": 0.5}))[1]
    {'accuracy': 0.5}
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        return result
    return result, NO_AUX


def kept(aux: Any) -> Any:
    """Return an aux without its graph, and without the memory of larger tensors that it has views of."""
    if isinstance(aux, Tensor):
        aux = aux.detach()
        is_view = aux.layout == torch.strided and aux.untyped_storage().nbytes() > aux.nbytes
        return aux.clone() if is_view else aux
    if isinstance(aux, Whole):
        return Whole(kept(aux.value))
    if isinstance(aux, PerSample):
        return PerSample([kept(item) for item in aux.items])
    return joined_fields([aux], lambda column: kept(column[0]), aux)


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the micro-batches' aux in the order of the samples.

    Tensors and arrays are concatenated along their first dimension, and 0-d tensors stacked, one for each micro-batch.
    The lists of :class:`PerSample`, and lists without tensors that have one item for each sample, are joined to one.
    Dictionaries, tuples, dataclasses and lists are looked into. Anything else, and what is wrapped in :class:`Whole`,
    becomes a list with one item for each micro-batch; None stays None.

    Args:
        parts: what the micro-batches returned, detached.
        sizes: samples in each.

    Raises:
        BatchError: the micro-batches returned different structures, or tensors that cannot be concatenated.

    >>> joined([(torch.tensor([1, 2]), 0.5), (torch.tensor([3]), 1.0)], [2, 1])
    (tensor([1, 2, 3]), [0.5, 1.0])
    """
    if any(part is NO_AUX for part in parts):
        raise BatchError("loss_fn returned (loss, aux) for one micro-batch and a loss alone for another")
    return _joined(list(parts), sizes, "aux")


def _joined(parts: list[Any], sizes: Sequence[int], path: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        names = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise BatchError(f"{path} is of different types in the micro-batches: {names}; return one type always")
    if first is None:
        return None
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return torch.stack(parts)
        return parts[0] if len(parts) == 1 else _concatenated(torch.cat, parts, path)
    if isinstance(first, np.ndarray) and first.ndim:
        return _concatenated(np.concatenate, parts, path)
    if isinstance(first, Whole):
        return [part.value for part in parts]
    if isinstance(first, PerSample):
        return [item for part in parts for item in part.items]
    if is_plain_list(first) and all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return [item for part in parts for item in part]
    if is_plain_list(first):
        return parts
    return joined_fields(parts, lambda column: _joined(column, sizes, f"an item of {path}"), parts)


def _concatenated(concatenate: Any, parts: list[Any], path: str) -> Any:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise BatchError(
            f"{path} has shapes {shapes} in the micro-batches, which cannot be concatenated; return it as "
            "speedswap.batching.PerSample with one tensor for each sample, or as speedswap.batching.Whole"
        )
    return concatenate(parts)
