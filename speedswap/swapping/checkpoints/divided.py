"""Dense parameters, and their state, of which each rank has a part, as ``fully_shard`` divides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["divided_as", "whole"]


def whole(value: Any, *, is_kept: bool) -> Any:
    """Return nested data with the parts of all ranks put together, which each of them has to ask for.

    Args:
        value: dicts and lists, among whose values are DTensors.
        is_kept: False on ranks that need no whole tensors: there they are None.
    """
    if isinstance(value, Mapping):
        return {key: whole(each, is_kept=is_kept) for key, each in value.items()}
    if isinstance(value, list | tuple):
        found = [whole(each, is_kept=is_kept) for each in value]
        return found if isinstance(value, list) else tuple(found)
    if not hasattr(value, "full_tensor"):
        return value
    together = value.full_tensor()
    return together.cpu() if is_kept else None


def divided_as(like: Any, value: Any) -> Any:
    """Return this rank's part of a whole tensor that it has, divided as another one of its shape is.

    Args:
        like: a DTensor; anything else leaves the value as it is.
        value: a tensor, on every rank alike.
    """
    if not hasattr(like, "full_tensor") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
