"""Existing embeddings, as the tables of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.swapping.table_module import TableModule

__all__ = ["require_plain", "rows_of", "settings_of"]


def rows_of(module: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """Return an embedding's rows."""
    return module.table.read() if isinstance(module, TableModule) else module.weight.detach()


def settings_of(name: str, module: nn.Module, feature_names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a config that describes an embedding."""
    weight: Any = module.weight
    return {
        "name": name,
        "num_embeddings": module.num_embeddings,
        "embedding_dim": module.embedding_dim,
        "feature_names": feature_names,
        "padding_idx": module.padding_idx,
        "dtype": weight.dtype,
        "trainable": weight.requires_grad,
    }


def require_plain(name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise unless a module is an embedding that a collection can take over."""
    if not isinstance(module, kinds):
        wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise TypeError(f"module {name!r} is {a_kind(module)}; give an {wanted}, torch's or speedswap's")
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            f"module {name!r} has max_norm {module.max_norm} and scale_grad_by_freq {module.scale_grad_by_freq}, which "
            "a collection lacks; leave them out, scale the rows it returns, or weigh the loss by how often ids occur"
        )
