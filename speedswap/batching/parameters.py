"""What a parameter is, as far as splitting and accumulating have to know."""

from __future__ import annotations

from torch import Tensor

__all__ = ["has_memory"]


def has_memory(parameter: Tensor) -> bool:
    """Whether a parameter has memory of its own; one that stands for rows elsewhere refuses to show any."""
    try:
        parameter.untyped_storage()
    except RuntimeError:
        return False
    return True
