"""Tables of the same width, dtype and storage as one table with one parameter and training step; and each alone.

While groups are being created in a directory, a file there names them, so that a kill leaves all or none: the next
process that creates a collection there removes the groups it names.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from speedswap import kernels
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import TableBusyError
from speedswap.swapping.batch_rows import Padding
from speedswap.swapping.collections.configs import EmbeddingConfig
from speedswap.swapping.graphs import leaving_transforms, outside_graphs
from speedswap.swapping.keyed import KeyedRows, of_one_commit
from speedswap.swapping.lookup import look_up
from speedswap.swapping.over_table import load_assigned, not_assigned
from speedswap.swapping.prefetched import PrefetchedLookup
from speedswap.swapping.row_step import Loop, RowStep
from speedswap.swapping.table_module import TableModule
from speedswap.swapping.weight import TableRows, TableWeight
from speedswap.swapping.whole_rows import HandedOut
from speedswap.tables import IdMap, Storage, Table, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.locks import locked
from speedswap.tables.files.open_directory import OpenDirectory, OpenFile, says_if_full
from speedswap.tables.files.place import Place, refuse_within_table
from speedswap.tables.init import InRanges, Range
from speedswap.tables.many import discard
from speedswap.tables.store import PARTS, PartStore

_log = logging.getLogger("speedswap")

_UNFINISHED = ".speedswap-groups"


class GroupKey(NamedTuple):
    """The properties shared by tables in one store."""

    embedding_dim: int
    dtype: torch.dtype
    stored_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    rounding: str | None
    lookup_dtype: torch.dtype | None
    storage: Storage
    group: str
    trainable: bool

    @classmethod
    def of(cls, config: EmbeddingConfig, storage: Storage) -> GroupKey:
        """Return the key of a table's group, with the collection's storage unless its config names one."""
        return cls(
            config.embedding_dim,
            config.dtype or torch.get_default_dtype(),
            config.stored_dtype,
            config.state_dtype,
            config.rounding,
            config.lookup_dtype,
            storage if config.storage is None else storage.of_table(config.name, config.storage),
            config.group,
            config.trainable,
        )

    @property
    def name(self) -> str:
        """A name for messages and files, without a dot, from all properties but storage."""
        words = [str(self.embedding_dim), _word(self.dtype)]
        words += ["as", _word(self.stored_dtype)] if self.stored_dtype else []
        words += ["state", _word(self.state_dtype)] if self.state_dtype else []
        words += [self.rounding] if self.rounding else []
        words += ["lookup", _word(self.lookup_dtype)] if self.lookup_dtype else []
        words += [self.group] if self.group else []
        words += [] if self.trainable else ["frozen"]
        return "-".join(words)


class Group(NamedTuple):
    """Tables that share a store.

    Attributes:
        key: their common properties.
        name: for messages and files.
        configs: the tables, in their order.
        table: an existing table that holds their rows.
    """

    key: GroupKey
    name: str
    configs: list[EmbeddingConfig]
    table: Table | None = None


def grouped(configs: Sequence[EmbeddingConfig], storage: Storage) -> list[Group]:
    """Return the groups of new tables, in a collection with this storage."""
    found: dict[GroupKey, list[EmbeddingConfig]] = {}
    for config in configs:
        found.setdefault(GroupKey.of(config, storage), []).append(config)
    groups: list[Group] = []
    for key, some in found.items():
        number = 1 + sum(group.key.name == key.name for group in groups)
        groups.append(Group(key, _numbered(key.name, number), some))
    return groups


def opened(configs: Sequence[EmbeddingConfig], table_of: Callable[[str], Table]) -> list[Group]:
    """Return the groups of tables on disk, of a collection that may have had any storage and engine.

    Args:
        configs: the tables.
        table_of: opens a group's table, by the group's name; its caller closes what was opened if this raises.

    Raises:
        ValueError: a file holds different tables.
    """
    groups: list[Group] = []
    # The tables determine maps and storage.
    plain = [replace(config, id_map=None, storage=None) for config in configs]
    for key, _, some, _ in grouped(plain, as_storage("auto")):
        number = 0
        while some:
            number += 1
            table = table_of(_numbered(key.name, number))
            names = {each[0] for each in table.attributes.get(PARTS, contents_of(some))}
            here = [config for config in some if config.name in names]
            if not here:
                raise ValueError(
                    f"table {table.name!r} holds {', '.join(sorted(names))}, but not {some[0].name!r}; give the "
                    "configs that it was made with"
                )
            groups.append(Group(key, _numbered(key.name, number), here, table))
            some = [config for config in some if config.name not in names]
    return groups


def contents_of(configs: Sequence[EmbeddingConfig]) -> list[list[object]]:
    """Return the tables' names and sizes, as plain data."""
    return [[config.name, config.num_embeddings] for config in configs]


@contextmanager
def unfinished(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Create a directory for the block to create groups in; remove it if the block raises and leaves it empty.

    Args:
        path: the collection's directory, which may exist.
        names: the groups' names.

    Raises:
        FileExistsError: a group exists, or the directory is a table's or inside one.
        TableBusyError: another process is creating groups there.
    """
    refuse_within_table(path / "groups")
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with says_if_full(path):
        path.mkdir(parents=True, exist_ok=True)
    busy = f"path is {str(path)!r}, where another process is making a collection; wait for it"
    try:
        with closing(OpenDirectory(path)) as directory, locked(directory, TableBusyError(errno.EBUSY, busy)):
            _discard_leftovers(directory)
            for name in names:
                TableDirectory.discard_scratch(path / name)
                Place(path / name).refuse_existing()
            try:
                with says_if_full(path):
                    file = OpenFile(directory.create(_UNFINISHED))
                    os.pwrite(file.fd, json.dumps(names).encode(), 0)
                    os.fsync(file.fd)
                    directory.sync()
                yield
            except BaseException:
                if not any(os.path.lexists(path / name) for name in names):
                    directory.remove(_UNFINISHED)
                raise
            directory.remove(_UNFINISHED)
            directory.sync()  # it must not reappear once the groups were trained
    except BaseException:
        with suppress(OSError):  # it has other files
            for each in missing:
                each.rmdir()
        raise


def require_finished(place: Storage) -> None:
    """Raise FileNotFoundError unless all groups in a directory were completed."""
    if not is_finished(path := place.folder or Path()):
        raise FileNotFoundError(
            f"path is {str(path)!r}, where a collection was not finished by the process that made it; make it again"
        )


def is_finished(path: Path) -> bool:
    """Return whether no process was killed in a directory before it completed all groups."""
    file = path / _UNFINISHED
    return not file.exists() or not file.stat().st_size


def _discard_leftovers(directory: OpenDirectory) -> None:
    """Remove the groups that a killed process left, and the file that names them."""
    if directory.status(_UNFINISHED) is None:
        return
    file = OpenFile(directory.open(_UNFINISHED))
    with suppress(ValueError):  # it was killed before it began the first one
        for name in json.loads(os.pread(file.fd, 1 << 20, 0)):
            if Path(name).name == name and (directory.path / name).exists():
                Table.open(directory.path / name).remove()
                _log.warning("removed %s, left behind by a process that was killed", directory.path / name)
    directory.remove(_UNFINISHED)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TableGroup(TableModule):
    """The consecutive rows of several tables, and their training step; made by :meth:`of`.

    Args:
        num_embeddings, embedding_dim: number of rows over all tables, and items per row.
        configs: the tables.
        id_maps: the maps of some of them, by name; maps that the rows already have take precedence.
        arguments: other arguments of :class:`speedswap.Embedding`.
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
        self.configs = tuple(configs)
        self.first_rows = tuple(accumulate((config.num_embeddings for config in configs[:-1]), initial=0))
        self._maps_to_keep = dict(id_maps or {})
        super().__init__(num_embeddings, embedding_dim, **arguments)

    def _create(self, rows: Tensor | None = None) -> Table:
        table = super()._create(rows)
        if table.was_found:
            try:
                _require_contents(table, self.configs)
            except ValueError:
                table.close()
                raise
        table.attributes[PARTS] = contents_of(self.configs)
        return table

    def _begin(self, table: Table, weight: TableWeight) -> None:
        super()._begin(table, weight)
        rows = zip(self.first_rows, self.configs, strict=True)
        self._step.padding = Padding(
            first + config.padding_idx for first, config in rows if config.padding_idx is not None
        )
        self.keyed = self._keyed_tables(self._maps_to_keep)
        self._maps_to_keep = {}

    @functools.cached_property
    def keyed(self) -> dict[str, KeyedRows]:
        """The tables that have an id map, by name."""
        self._adopt()
        return self.keyed

    def map_of(self, name: str) -> IdMap | None:
        """Return a table's id map; None if ids are rows."""
        if self._make is not None:
            return self._maps_to_keep.get(name)
        keyed = self.keyed.get(name)
        return None if keyed is None else keyed.id_map

    def _alike(self) -> dict[str, object]:
        return {}  # the collection has checked them

    @classmethod
    def of(
        cls,
        group: Group,
        *,
        values: Mapping[str, Tensor] | None = None,
        id_maps: Mapping[str, IdMap] | None = None,
        **arguments: Any,
    ) -> TableGroup:
        """Return a group of tables with their initial values, or over an existing table that holds their rows.

        Args:
            group: the tables.
            values: rows for some of the tables, by name, in place of initial values.
            id_maps: as for the class.
            arguments: ``device``.

        Raises:
            ValueError: the existing table holds different tables.
        """
        key, name, configs, table = group
        num_rows = sum(config.num_embeddings for config in configs)
        arguments |= {"configs": configs, "id_maps": id_maps, "state_dtype": key.state_dtype, "rounding": key.rounding}
        arguments["lookup_dtype"] = key.lookup_dtype
        if table is None:
            with torch.device("cpu"):  # also while a model is built on meta
                ranges = tuple(_range(config, values or {}) for config in configs)
                if (ranks := key.storage.ranks) is not None:
                    ranges = tuple(replace(each, seed=ranks.agree_on_seed(each.seed)) for each in ranges)
            module = cls(
                num_rows,
                key.embedding_dim,
                init=InRanges(ranges),
                seed=ranges[0].seed,  # only for stochastic rounding
                dtype=key.dtype,
                storage=key.storage.of_table(name),
                stored_dtype=key.stored_dtype,
                name=name,
                **arguments,
            )
            if values:
                module._init = None
        else:
            _require_contents(table, configs, key.dtype)
            module = cls(num_rows, key.embedding_dim, table=table, stored_dtype=key.stored_dtype, **arguments)
        module.weight.requires_grad_(key.trainable)
        return module

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:
        r"""Look up rows of all tables at once, as :class:`speedswap.Embedding` does.

        Args:
            input: rows, int32 or int64, any shape, on the device that needs them. Those of a table are numbered from
                its entry in ``first_rows``; ids of a table with an id map are not keys here.

        Returns:
            Shape (\*input.shape, embedding_dim), of ``lookup_dtype``.

        Raises:
            IdError, LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.
        """
        return look_up(*self._look_up(input), self.lookup_dtype)

    def reset_parameters(self, init: initializers.Initializer | Callable[..., Any] | None = None) -> None:
        if init is not None:  # one per table; padding rows stay zero
            values, had = initializers.resolve(init), self.table.columns["weight"].init
            seeds = [each.seed for each in had.ranges] if isinstance(had, InRanges) else [0] * len(self.configs)
            init = InRanges(
                tuple(
                    Range(config.num_embeddings, values, seed, config.padding_idx)
                    for config, seed in zip(self.configs, seeds, strict=True)
                )
            )
        super().reset_parameters(init)

    def _keyed_tables(self, id_maps: Mapping[str, IdMap]) -> dict[str, KeyedRows]:
        """Return the tables that have an id map, and keep the map with the rows from now on."""
        keyed = {}
        for config, first_row in zip(self.configs, self.first_rows, strict=True):
            if config.name in id_maps or config.name in self.table.store.notes.id_maps:
                table = Table(PartStore(self.table.store, first_row, config.num_embeddings, config.name))
                table.set_id_map(id_maps[config.name] if table.id_map is None else table.id_map)
                assert table.id_map is not None
                keyed[config.name] = self._step.keyed(table.id_map, table, first_row)
        return keyed

    @property
    def has_keys_of_ranks(self) -> bool:
        """True if ranks own a table's keys, so that its lookups wait for their turn."""
        return any(keyed.is_over_ranks for keyed in self.keyed.values())

    @property
    def _all_keyed(self) -> Collection[KeyedRows]:
        return self.keyed.values()

    def _begin_turn(self, loop: Loop, lookups: list[PrefetchedLookup]) -> bool:
        asked = [each for lookup in lookups for each in lookup.asked or ()]
        for keyed in self.keyed.values():
            keyed.begin([each.asked for each in asked if each.keyed is keyed])
        return super()._begin_turn(loop, lookups)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._make is not None:
            return super().__deepcopy__(memo)
        memo[id(self.keyed)] = {}
        copied = super().__deepcopy__(memo)
        copied.keyed = copied._keyed_tables({})  # of the copied rows
        return copied

    def _settings(self) -> dict[str, Any]:
        return {"configs": self.configs}

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {len(self.configs)} tables, {self._rows_repr}"

    # The tables save and load their own rows.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        return None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        _, _, _, unexpected_keys, _ = rest
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix))


def _require_contents(table: Table, configs: Sequence[EmbeddingConfig], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError if a table holds different tables, or another dtype."""
    wanted, dtype = contents_of(configs), dtype or table.dtype
    found = table.attributes.get(PARTS, wanted)
    num_rows = sum(config.num_embeddings for config in configs)
    if found != wanted or (table.num_embeddings, table.dtype) != (num_rows, dtype):
        raise ValueError(
            f"table {table.name!r} holds {found}, but tables is {wanted} of {dtype}; give the configs that it was made "
            "with, in their order"
        )


def groups_of(
    groups: Sequence[Group],
    values: Mapping[str, Tensor] | None,
    id_maps: Mapping[str, IdMap],
    **arguments: Any,
) -> list[TableGroup]:
    """Return all groups of a collection; if one cannot be created, remove new tables and keep existing ones.

    Args:
        groups: the tables.
        values, id_maps, arguments: as for :meth:`TableGroup.of`.
    """
    made: list[TableGroup] = []
    try:
        for group in groups:
            made.append(TableGroup.of(group, values=values, id_maps=id_maps, **arguments))
    except BaseException:
        for module, group in zip(made, groups, strict=False):
            if group.table is None:
                discard(module.table)
        raise
    return made


def _range(config: EmbeddingConfig, values: Mapping[str, Tensor]) -> Range:
    """Return a table's initial values."""
    rows = values.get(config.name)
    if rows is not None:
        return Range(config.num_embeddings, initializers.GivenRows(weakref.ref(rows)))
    init = initializers.normal() if config.init is None else initializers.resolve(config.init)
    seed = int(torch.randint(2**62, ()).item()) if config.seed is None else config.seed
    return Range(config.num_embeddings, init, seed, config.padding_idx)


class TableInGroup(nn.Module):
    """One table of a collection, to read, score, fill, save and look up alone; the collection looks up all at once.

    Args:
        group: the group that contains it.
        config: its config.
        first_row: the group's row that is its row 0.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: those of the config.
    """

    def __init__(self, group: TableGroup, config: EmbeddingConfig, first_row: int) -> None:
        super().__init__()
        self.config = config
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.padding_idx = config.padding_idx
        self._home = (group,)  # not a submodule: the collection already contains it
        self._first_row = first_row
        self._table: Table | None = None
        self._handed_out: HandedOut | None = None
        self._awaits_rows = self._is_on_meta  # for an assigned parameter, as libraries load

    # They use only the attributes and properties defined here.
    saves_rows, saved_writes = False, 0
    lookup_dtype: Any = property(attrgetter("group.lookup_dtype"))
    read: Any = TableModule.read
    score: Any = TableModule.score
    reset_parameters: Any = TableModule.reset_parameters
    _is_on_meta: Any = property(attrgetter("group._is_on_meta"))
    _is_apart: Any = TableModule._is_apart
    _save_to_state_dict: Any = TableModule._save_to_state_dict
    _load_from_state_dict: Any = TableModule._load_from_state_dict

    @property
    def group(self) -> TableGroup:
        """The group that contains it."""
        return self._home[0]

    @property
    def table(self) -> Table:
        """The table's rows, which a step writes through the group."""
        if self._table is None:
            part = PartStore(self.group.table.store, self._first_row, self.num_embeddings, self.config.name)
            self._table = Table(part)
        return self._table

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a process alone."""
        return self.group.ranks

    @of_all_ranks
    @outside_graphs
    def forward(self, input: Any) -> Tensor:
        """Look rows of this table up alone, as :class:`speedswap.Embedding` does; a lookahead does not prefetch them.

        Args:
            input: ids, int32 or int64, any shape, on the device that needs the rows; or keys, with an id map.

        Returns:
            Shape (*input.shape, embedding_dim), with gradients for the collection's parameter.

        Raises:
            IdError, LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.
        """
        group, keyed = self.group, self._keyed
        if keyed is None:
            return look_up(*self._look_up(input), self.lookup_dtype)
        device = input.device if isinstance(input, Tensor) else group.weight.device
        rows = functools.partial(keyed.rows, input, device, adds=group._adds())
        return look_up(*of_one_commit([keyed], lambda: self._look_up(rows())), self.lookup_dtype)

    def _look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.group._look_up(self._in_group(ids))

    @leaving_transforms
    def _in_group(self, ids: Tensor) -> Tensor:
        kernels.check_ids(ids, self.num_embeddings, f"table {self.config.name!r}")
        return ids.long() + self._first_row

    @property
    def weight(self) -> TableRows | nn.Parameter:
        """All rows, which functions of ``torch.nn.init`` can fill in place; the parameter is the group's."""
        if self._is_on_meta:
            return nn.Parameter(self.group.weight.detach()[: self.num_embeddings])
        return TableRows(self.table, self.lookup_dtype or self.table.dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name != "weight":
            super().register_parameter(name, param)
            return
        if param is None or param.is_meta or not self._awaits_rows:
            raise not_assigned(self)
        load_assigned(self, param)

    def _load_rows(self, *args: Any) -> None:
        TableModule._load_rows(cast(Any, self), *args)
        self._awaits_rows = False

    def _take_rows(self, rows: Tensor) -> bool:
        self.group._make_table(rows.device)
        return False

    @property
    def _keyed(self) -> KeyedRows | None:
        return self.group.keyed.get(self.config.name)

    @property
    def id_map(self) -> IdMap | None:
        """The table's id map; None if ids are rows."""
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


class TablesByName(nn.ModuleDict):
    """The tables of a collection by name, which may be any name, even that of a method."""

    def __init__(self, tables: Iterable[TableInGroup]) -> None:
        super().__init__()
        self._modules.update({each.config.name: each for each in tables})

    def __getitem__(self, name: str) -> TableInGroup:
        """Return a table.

        Raises:
            KeyError: no table has that name.
        """
        if name not in self._modules:
            raise KeyError(f"{name!r} is not a table; there are {', '.join(self._modules)}")
        return self._modules[name]  # type: ignore[return-value]
