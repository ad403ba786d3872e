"""One table of a collection, and all of them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn

from speedswap.collectives import RankGroup
from speedswap.swapping.collections.configs import EmbeddingConfig
from speedswap.swapping.collections.group import TableGroup
from speedswap.swapping.row_step import RowStep
from speedswap.swapping.table_module import TableModule, load_assigned, not_assigned
from speedswap.swapping.weight import TableRows
from speedswap.swapping.whole_rows import HandedOut
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
        self._handed_out: HandedOut | None = None
        self._awaits_rows = self._is_on_meta  # of a parameter that is assigned, as libraries load

    # They ask for the attributes and properties here alone.
    read: Any = TableModule.read
    score: Any = TableModule.score
    reset_parameters: Any = TableModule.reset_parameters
    _is_on_meta: Any = property(attrgetter("group._is_on_meta"))
    _save_to_state_dict: Any = TableModule._save_to_state_dict

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
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a process alone."""
        return self.group.ranks

    @property
    def weight(self) -> TableRows | nn.Parameter:
        """All rows, to be filled in place, as functions of ``torch.nn.init`` do; the parameter is the group's."""
        if self._is_on_meta:
            return nn.Parameter(self.group.weight.detach()[: self.num_embeddings])
        return TableRows(self.table)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name != "weight":
            super().register_parameter(name, param)
            return
        if param is None or param.is_meta or not self._awaits_rows:
            raise not_assigned(self)
        load_assigned(self, param)

    def _load_from_state_dict(self, *args: Any) -> None:
        TableModule._load_from_state_dict(cast(Any, self), *args)
        self._awaits_rows = False

    def _take_rows(self, rows: Tensor) -> bool:
        self.group._make_table(rows.device)
        return False

    @property
    def id_map(self) -> IdMap | None:
        """The map from keys to its rows; None where ids are rows."""
        return self.group.map_of(self.config.name)

    @property
    def _step(self) -> RowStep:
        return self.group._step

    @property
    def _init(self) -> initializers.Initializer | None:
        return None if self.group._init is None else self.table.columns["weight"].init

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, features {', '.join(self.config.feature_names)}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "_handed_out": None}  # a copy has the rows of its own group


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
