"""Existing embeddings, as the tables of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
    stored = stored_as(module) if isinstance(module, TableModule) else {}
    return {
        "name": name,
        "num_embeddings": module.num_embeddings,
        "embedding_dim": module.embedding_dim,
        "feature_names": feature_names,
        "padding_idx": module.padding_idx,
        "dtype": weight.dtype,
        "trainable": weight.requires_grad and stored.get("stored_dtype") != torch.int8,
        **stored,
    }


def stored_as(module: TableModule) -> dict[str, Any]:
    """Return the settings of a config that describe the compact columns of an embedding's table."""
    columns = module.table.columns
    dtypes = {name: column.stored for name, column in columns.items() if column.compact}
    state_dtype, rounding = module._step.state._stored_as
    return {
        "stored_dtype": dtypes.pop("weight", None),
        "state_dtype": state_dtype or next(iter(dtypes.values()), None),
        "rounding": rounding or next((column.rounding for column in columns.values() if column.compact), None),
    }


def require_plain(name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise unless a module is an embedding that a collection can take over."""
    if not isinstance(module, kinds):
        wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise TypeError(f"module {name!r} is {a_kind(module)}; give an {wanted}, torch's or speedswap's")
    if isinstance(module, TableModule) and module.id_map is not None:
        raise ValueError(
            f"module {name!r} has an id map, whose rows start anew from their initial values, not from values taken "
            "over; give id_map= to the table's config, and load the module's state_dict"
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            f"module {name!r} has max_norm {module.max_norm} and scale_grad_by_freq {module.scale_grad_by_freq}, which "
            "a collection lacks; leave them out, scale the rows it returns, or weigh the loss by how often ids occur"
        )
