"""Tables of one width, dtype and storage, as one table with one parameter and one training step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from speedswap.swapping.collections.configs import EmbeddingConfig, GroupKey
from speedswap.swapping.keyed import KeyedRows
from speedswap.swapping.padding import Padding
from speedswap.swapping.prefetched import PrefetchedLookup
from speedswap.swapping.row_step import RowStep
from speedswap.swapping.table_module import TableModule
from speedswap.tables import IdMap, Table
from speedswap.tables import init as initializers
from speedswap.tables.part import PartStore
from speedswap.tables.ranges import InRanges, Range

__all__ = ["TableGroup"]

# Key of a group's attributes under which its tables' names and sizes are kept.
_ATTRIBUTE = "tables"


class TableGroup(TableModule):
    """The rows of several tables, one after the other, and their training step; :meth:`of` makes one.

    Args:
        num_embeddings, embedding_dim: rows of all tables, and items per row.
        configs: the tables.
        id_maps: the maps of some of them, by name; those that the rows have already count first.
        arguments: the others of :class:`speedswap.Embedding`.

    Attributes:
        keyed: the tables that have an id map, by name.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        configs: Sequence[EmbeddingConfig],
        id_maps: Mapping[str, IdMap] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **arguments)
        self.configs = tuple(configs)
        self.first_rows = _first_rows(configs)
        rows = zip(self.first_rows, self.configs, strict=True)
        self._step.padding = Padding(
            first + config.padding_idx for first, config in rows if config.padding_idx is not None
        )
        self.keyed = self._keyed_tables(id_maps or {})

    @classmethod
    def of(
        cls,
        key: GroupKey,
        configs: Sequence[EmbeddingConfig],
        *,
        table: Table | None = None,
        values: Mapping[str, Tensor] | None = None,
        id_maps: Mapping[str, IdMap] | None = None,
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
            id_maps: as for the class.
            name, path: of the new table.
            arguments: ``device`` and ``local_to_rank``.

        Raises:
            ValueError: ``table`` holds other tables.
        """
        num_rows = sum(config.num_embeddings for config in configs)
        arguments |= {"configs": configs, "id_maps": id_maps, "state_dtype": key.state_dtype, "rounding": key.rounding}
        if table is None:
            ranges = tuple(_range(config, values or {}) for config in configs)
            group = cls(
                num_rows,
                key.embedding_dim,
                init=InRanges(ranges),
                seed=ranges[0].seed,  # of stochastic rounding alone
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

    def _keyed_tables(self, id_maps: Mapping[str, IdMap]) -> dict[str, KeyedRows]:
        """Return the tables that have an id map, which is kept with the rows from now on."""
        keyed = {}
        for config, first_row in zip(self.configs, self.first_rows, strict=True):
            if config.name in id_maps or config.name in self.table.store.id_maps:
                table = Table(PartStore(self.table.store, first_row, config.num_embeddings, config.name))
                id_map = id_maps[config.name] if table.id_map is None else table.id_map
                table.set_id_map(id_map)
                keyed[config.name] = KeyedRows(id_map, table, cast(RowStep, _StepOfPart(self._step, first_row)))
        return keyed

    def begin_turn(self, lookups: list[PrefetchedLookup]) -> None:
        super().begin_turn(lookups)
        asked = [each for lookup in lookups for each in lookup.asked or ()]
        for keyed in self.keyed.values():
            keyed.begin([each.asked for each in asked if each.keyed is keyed])

    def end_lookahead(self) -> None:
        super().end_lookahead()
        for keyed in self.keyed.values():
            keyed.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.keyed)] = {}
        copied = super().__deepcopy__(memo)
        copied.keyed = copied._keyed_tables({})  # of its own rows
        return copied

    def _settings(self) -> dict[str, Any]:
        return {"configs": self.configs, "local_to_rank": self.local_to_rank}

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {len(self.configs)} tables, table={self.table!r}"

    # The tables save and load their own rows.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return None

    def _load_from_state_dict(self, *args: Any) -> None:
        return None


class _StepOfPart:
    """A group's training step, with the rows of one table numbered from 0."""

    def __init__(self, step: RowStep, first_row: int) -> None:
        self._step = step
        self._first_row = first_row

    @property
    def lookaheads(self) -> int:
        """The lookaheads under way."""
        return self._step.lookaheads

    def drop_gradient(self, rows: Tensor) -> None:
        """Let rows that have started anew lose the gradient of lookups before."""
        self._step.drop_gradient(rows + self._first_row)


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
