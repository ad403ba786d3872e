"""Tables of one width, dtype and storage, as one table with one parameter and one training step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from speedswap.swapping.collections.configs import EmbeddingConfig, GroupKey
from speedswap.swapping.padding import Padding
from speedswap.swapping.table_module import TableModule
from speedswap.tables import Table
from speedswap.tables import init as initializers
from speedswap.tables.ranges import InRanges, Range

__all__ = ["TableGroup"]

# Key of a group's attributes under which its tables' names and sizes are kept.
_ATTRIBUTE = "tables"


class TableGroup(TableModule):
    """The rows of several tables, one after the other, and their training step; :meth:`of` makes one.

    Args:
        num_embeddings, embedding_dim: rows of all tables, and items per row.
        configs: the tables.
        arguments: the others of :class:`speedswap.Embedding`.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, configs: Sequence[EmbeddingConfig], **arguments: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **arguments)
        self.configs = tuple(configs)
        self.first_rows = _first_rows(configs)
        rows = zip(self.first_rows, self.configs, strict=True)
        self._step.padding = Padding(
            first + config.padding_idx for first, config in rows if config.padding_idx is not None
        )

    @classmethod
    def of(
        cls,
        key: GroupKey,
        configs: Sequence[EmbeddingConfig],
        *,
        table: Table | None = None,
        values: Mapping[str, Tensor] | None = None,
        name: str,
        path: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> TableGroup:
        """Return a group of tables with their initial values.

        Args:
            key: their common properties.
            configs: the tables.
            table: one that holds their rows already.
            values: rows for some of the tables, by name, in place of initial values.
            name, path: of the new table.
            arguments: ``device`` and ``local_to_rank``.

        Raises:
            ValueError: ``table`` holds other tables.
        """
        num_rows = sum(config.num_embeddings for config in configs)
        arguments |= {"configs": configs, "state_dtype": key.state_dtype, "rounding": key.rounding}
        if table is None:
            group = cls(
                num_rows,
                key.embedding_dim,
                init=InRanges(tuple(_range(config, values or {}) for config in configs)),
                seed=0,
                dtype=key.dtype,
                storage=key.storage,
                engine=key.engine,
                stored_dtype=key.stored_dtype,
                name=name,
                path=path,
                **arguments,
            )
            group.table.attributes[_ATTRIBUTE] = _contents(configs)
            if values:
                group._init = None
        else:
            found = table.attributes.get(_ATTRIBUTE, _contents(configs))
            if found != _contents(configs) or (table.num_embeddings, table.dtype) != (num_rows, key.dtype):
                raise ValueError(
                    f"table {table.name!r} holds {found}, but tables is {_contents(configs)} of {key.dtype}; give the "
                    "configs that it was made with, in their order"
                )
            group = cls(num_rows, key.embedding_dim, table=table, stored_dtype=key.stored_dtype, **arguments)
        group.weight.requires_grad_(key.trainable)
        return group

    def _settings(self) -> dict[str, Any]:
        return {"configs": self.configs, "local_to_rank": self.local_to_rank}

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {len(self.configs)} tables, table={self.table!r}"

    # The tables save and load their own rows.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return None

    def _load_from_state_dict(self, *args: Any) -> None:
        return None


def _first_rows(configs: Sequence[EmbeddingConfig]) -> tuple[int, ...]:
    return tuple(accumulate((config.num_embeddings for config in configs[:-1]), initial=0))


def _contents(configs: Sequence[EmbeddingConfig]) -> list[list[Any]]:
    """Return the tables' names and sizes, as plain data."""
    return [[config.name, config.num_embeddings] for config in configs]


def _range(config: EmbeddingConfig, values: Mapping[str, Tensor]) -> Range:
    """Return a table's initial values."""
    rows = values.get(config.name)
    if rows is not None:
        return Range(config.num_embeddings, initializers.GivenRows(weakref.ref(rows)))
    init = initializers.normal() if config.init is None else initializers.resolve(config.init)
    seed = int(torch.randint(2**62, ()).item()) if config.seed is None else config.seed
    return Range(config.num_embeddings, init, seed, config.padding_idx)
