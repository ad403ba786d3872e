"""The ids that a part of a model asks an embedding for, without the lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Asked(BaseException):
    """The end of a function whose lookup is known; not an error that it could handle."""


@torch.no_grad()
def asked(embedding: nn.Module, function: Callable[[], Any]) -> Tensor:
    """Return the ids of the first lookup that a function makes in an embedding.

    For :func:`speedswap.lookahead`, where a model computes the ids of its memory itself, e.g. as hashes of tokens. The
    function ends at the lookup, which reads nothing.

    Args:
        embedding: a :class:`speedswap.Embedding`, or another module whose first argument is ids.
        function: calls the part of the model that looks up.

    Raises:
        ValueError: it returned without a lookup.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 16)
        >>> hashed = lambda tokens: items(tokens * 31 % 1000)
        >>> speedswap.asked(items, lambda: hashed(torch.tensor([7, 900])))
        tensor([217, 900])
    """
    found: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(given[0] if given else next(iter(named.values())))
        raise _Asked

    handle = embedding.register_forward_pre_hook(note, with_kwargs=True)
    try:
        function()
    except _Asked:
        return found[0]
    finally:
        handle.remove()
    raise ValueError(
        f"function looked nothing up in {embedding}; let it call the part of the model that uses the embedding"
    )
