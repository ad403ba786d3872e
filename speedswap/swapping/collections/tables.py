"""One table of a collection, and all of them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from speedswap.swapping.collections.configs import EmbeddingConfig
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.row_step import RowStep
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.weight import TableRows
from speedswap.tables import IdMap, Table
from speedswap.tables import init as initializers
from speedswap.tables.part import PartStore

__all__ = ["TableInGroup", "TablesByName"]


class TableInGroup(nn.Module):
    """One table of a collection: to read, to score, to fill, and to save. The collection looks up in it.

    Args:
        group: the tables among which it lies.
        config: its description.
        first_row: of the group's rows, the one that is its row 0.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: those of the config.
    """

    def __init__(self, group: TableGroup, config: EmbeddingConfig, first_row: int) -> None:
        super().__init__()
        self.config = config
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.padding_idx = config.padding_idx
        self._home = (group,)  # not a submodule: the collection has it already
        self._first_row = first_row
        self._table: Table | None = None

    # They ask for the attributes and properties here alone.
    read: Any = TableModule.read
    score: Any = TableModule.score
    reset_parameters: Any = TableModule.reset_parameters
    _save_to_state_dict: Any = TableModule._save_to_state_dict
    _load_from_state_dict: Any = TableModule._load_from_state_dict

    @property
    def group(self) -> TableGroup:
        """The tables among which it lies."""
        return self._home[0]

    @property
    def table(self) -> Table:
        """Its rows, which a step writes through the group."""
        if self._table is None:
            part = PartStore(self.group.table.store, self._first_row, self.num_embeddings, self.config.name)
            self._table = Table(part)
        return self._table

    @property
    def weight(self) -> TableRows:
        """All rows, to be filled in place, as functions of ``torch.nn.init`` do; the parameter is the group's."""
        return TableRows(self.table)

    @property
    def id_map(self) -> IdMap | None:
        """The map from keys to its rows; None where ids are rows."""
        keyed = self.group.keyed.get(self.config.name)
        return None if keyed is None else keyed.id_map

    @property
    def _step(self) -> RowStep:
        return self.group._step

    @property
    def _init(self) -> initializers.Initializer | None:
        return None if self.group._init is None else self.table.columns["weight"].init

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, features {', '.join(self.config.feature_names)}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}  # a copy has the rows of its own group


class TablesByName(nn.Module):
    """The tables of a collection, by name. A table may have any name, also that of a method."""

    def __init__(self, tables: Iterable[TableInGroup]) -> None:
        super().__init__()
        for each in tables:
            self._modules[each.config.name] = each

    def __getitem__(self, name: str) -> TableInGroup:
        """Return a table.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self._modules:
            raise KeyError(f"{name!r} is not a table; there are {', '.join(self._modules)}")
        return self._modules[name]  # type: ignore[return-value]

    def keys(self) -> list[str]:
        """Return the names."""
        return list(self._modules)

    def values(self) -> list[TableInGroup]:
        """Return the tables."""
        return [self[name] for name in self._modules]

    def items(self) -> list[tuple[str, TableInGroup]]:
        """Return names and tables."""
        return [(name, self[name]) for name in self._modules]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules
