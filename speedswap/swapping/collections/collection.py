"""Several tables in one module: ``EmbeddingCollection`` has a row per id, ``EmbeddingBagCollection`` pools them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from speedswap._words import a_kind
from speedswap.collectives import RankGroup, of_all_ranks, surround_forward
from speedswap.errors import IdError
from speedswap.kernels import near
from speedswap.swapping.collections.configs import EmbeddingBagConfig, EmbeddingConfig, checked, described_alike
from speedswap.swapping.collections.features import FeatureBatch, Slots, read_features
from speedswap.swapping.collections.group import (
    Group,
    TableInGroup,
    TablesByName,
    grouped,
    groups_of,
    is_finished,
    opened,
    require_finished,
    unfinished,
)
from speedswap.swapping.collections.jagged import JaggedTensor, KeyedTensor
from speedswap.swapping.collections.keyed_features import read
from speedswap.swapping.graphs import leaving_transforms, outside_graphs
from speedswap.swapping.keyed import of_one_commit
from speedswap.swapping.lookup import look_up, pool
from speedswap.swapping.prefetched import Announced, Request
from speedswap.swapping.table_module import TableModule
from speedswap.tables import IdMap, Storage, Table, as_storage, opened_place
from speedswap.tables.storage import saved_copy


class Pass(NamedTuple):
    """Slots of one group whose bags are pooled in one pass: sums and means together, maxima separately.

    Attributes:
        group: its index.
        start, stop: the slots.
        mode: "sum", "mean" or "max".
        has_padding: True if a table has a padding row, whose ids do not count.
        is_mean: if there are sums and means, bool, shape (slots, 1): True for a mean.
    """

    group: int
    start: int
    stop: int
    mode: str
    has_padding: bool
    is_mean: Tensor | None = None

    def pooled(self, found: FeatureBatch, weight: Tensor, local: Tensor) -> Tensor:
        """Return the slots' bags, shape (batch, slots · dim).

        Args:
            found: the batch.
            weight: the group's rows.
            local: each id's index among them, for all ids of the group.
        """
        features, offsets, factors = self.stop - self.start, found.offsets, found.weights
        if features < len(found.slots.features):  # else all ids of the batch are looked up here
            begin, end = found.bounds(self.group)
            first, last = found.span(range(self.start, self.stop))
            offsets = offsets[self.start * found.stride : self.stop * found.stride + 1]
            offsets = offsets - first if first else offsets
            if (first, last) != (begin, end):
                local = local.reshape(-1)[first - begin : last - begin]
            factors = None if factors is None else factors[first:last]
        factors = None if factors is None else factors.to(weight.dtype)
        counts, mode, is_mean = self._counting(found) if self.has_padding else None, self.mode, self.is_mean
        if found.is_single and counts is None and mode == "mean":
            mode, is_mean = "sum", None
        is_mean = None if is_mean is None else near(is_mean, offsets.device)
        pooled = pool(weight, local, offsets, mode, factors, counts, is_mean=is_mean, features=features)
        return pooled.to(found.slots.groups[self.group].lookup_dtype or pooled.dtype)

    def _counting(self, found: FeatureBatch) -> Tensor | None:
        """Return a mask of the ids, bool, shape (ids,): False for padding. None if the host knows that all count."""
        paddings = found.slots.paddings[self.start : self.stop]
        begin, _ = found.bounds(self.group)
        first, last = found.span(range(self.start, self.stop))
        rows = found.rows(self.group)[first - begin : last - begin]
        counts, paddings = found.asked.counts, near(paddings, rows.device)
        sizes = (found.offsets[:: found.stride].diff() if counts is None else counts)[self.start : self.stop]
        if counts is not None and int(sizes.min()) == int(sizes.max()):
            counting = (rows.view(len(sizes), -1) != paddings.unsqueeze(1)).view(-1)
        else:
            sizes = sizes if counts is None else near(sizes, rows.device)
            counting = rows != torch.repeat_interleave(paddings, sizes, output_size=len(rows))
        return None if rows.device.type == "cpu" and bool(counting.all()) else counting


class PooledColumns:
    """The passes of a collection, and the columns of its output.

    Args:
        slots: the lookups.
        configs: the tables, in the order of the output.

    Attributes:
        keys: the output's keys, in order.
        widths: columns per key.
        passes: the passes, in group order.
    """

    def __init__(self, slots: Slots, configs: Sequence[EmbeddingBagConfig]) -> None:
        self.passes = [each for group in range(len(slots.of_group)) for each in _passes(group, slots)]
        order = slots.in_order_of(configs)
        self.keys = [slots.keys[slot] for slot in order]
        self.widths = [slots.configs[slot].embedding_dim for slot in order]
        pass_of = [index for index, each in enumerate(self.passes) for _ in range(each.start, each.stop)]
        which = [pass_of[slot] for slot in order]
        # Columns of one pass that stay together: its index, and their number.
        runs = groupby(zip(which, self.widths, strict=True), key=itemgetter(0))
        self._runs = [(index, sum(width for _, width in run)) for index, run in runs]

    def joined(self, pooled: Sequence[Tensor]) -> Tensor:
        """Join the passes' results in output order; without a copy if there is only one pass.

        Args:
            pooled: each pass's result.
        """
        if len(self._runs) == 1:
            return pooled[0]
        widths = [[width for which, width in self._runs if which == index] for index in range(len(pooled))]
        pieces = [iter(torch.split(each, some, dim=1)) for each, some in zip(pooled, widths, strict=True)]
        return torch.cat([next(pieces[which]) for which, _ in self._runs], dim=1)


def _passes(group: int, slots: Slots) -> list[Pass]:
    """Return the passes of one group, maxima last."""
    some = slots.of_group[group]
    modes = [slots.configs[slot].pooling for slot in some]
    sums = len(modes) - modes.count("max")
    pads, passes = [row >= 0 for row in slots.paddings[some.start : some.stop].tolist()], []
    if sums:
        means = [mode == "mean" for mode in modes[:sums]]
        is_mean = torch.tensor(means).unsqueeze(1) if any(means) and not all(means) else None
        mode = "mean" if any(means) else "sum"
        passes.append(Pass(group, some.start, some.start + sums, mode, any(pads[:sums]), is_mean))
    if sums < len(modes):
        passes.append(Pass(group, some.start + sums, some.stop, "max", any(pads[sums:])))
    return passes


Config = TypeVar("Config", bound=EmbeddingConfig)
_Found = TypeVar("_Found")
_Self = TypeVar("_Self", bound="TableCollection[Any]")


class TableCollection(nn.Module, Generic[Config]):
    """A module that owns groups of tables, each group with one store, one parameter and one training step.

    The arguments are those of :class:`speedswap.EmbeddingBagCollection`.
    """

    config_type: ClassVar[type[Any]]
    module_types: ClassVar[tuple[type[nn.Module], ...]]  # the classes that from_modules takes
    tables_name: ClassVar[str]  # the attribute with the tables by name, which is their prefix in a state_dict

    @of_all_ranks
    def __init__(
        self,
        tables: Iterable[Config],
        *,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        storage: Storage | str = "auto",
        path: str | os.PathLike[str] | None = None,
        _existing: Sequence[Group] | None = None,  # all groups, with their tables
        _values: Mapping[str, Tensor] | None = None,  # rows by table, in place of initial values
    ) -> None:
        super().__init__()
        place = as_storage(storage, path)
        configs: tuple[Config, ...] = checked(tables, self.config_type)
        id_maps = {config.name: config.id_map for config in configs if config.id_map is not None}
        # Groups hold the maps, which are copied with them.
        self.configs = tuple(replace(config, id_map=None) for config in configs)
        self._is_weighted = is_weighted
        for config in self.configs if is_weighted else ():
            if (pooling := getattr(config, "pooling", None)) != "sum":
                raise ValueError(
                    f"is_weighted is True, but pooling of table {config.name!r} is {pooling!r}; weights go with "
                    'pooling="sum" in an EmbeddingBagCollection'
                )
        if (ranks := place.ranks) is not None:
            described = {key: text for config in self.configs for key, text in described_alike(config).items()}
            settings = {"tables": [config.name for config in self.configs], "is_weighted": is_weighted, **described}
            ranks.require_same_settings(type(self).__name__, settings)
        parts = grouped(self.configs, place) if _existing is None else _existing
        with nullcontext() if place.folder is None else unfinished(place.folder, [part.name for part in parts]):
            groups = groups_of(parts, _values, id_maps, device=device)
        self._group_names = [part.name for part in parts]
        self.groups = nn.ModuleList(groups)
        homes = {
            config.name: TableInGroup(group, config, first_row)
            for group in groups
            for config, first_row in zip(group.configs, group.first_rows, strict=True)
        }
        self.register_module(self.tables_name, TablesByName(homes[config.name] for config in self.configs))
        with torch.device("cpu"):
            self._slots = Slots(groups, pooling=lambda config: getattr(config, "pooling", None))
        surround_forward(self, ranks or next((group.ranks for group in groups), None))

    # ------------------------------------------------------------------ other ways to make one

    @classmethod
    @of_all_ranks
    def from_modules(
        cls: type[_Self],
        modules: Mapping[str, nn.Embedding | nn.EmbeddingBag],
        *,
        feature_names: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> _Self:
        """Return a collection with the rows and settings of existing embeddings, to replace them.

        Args:
            modules: torch's embeddings, or speedswap's, by the name of their table.
            feature_names: the features of some of the tables; by default one named like the table.
            settings: the keyword arguments of the class.

        Raises:
            TypeError: a module is not an embedding, or does not fit this class of collection.
            ValueError: it has an unsupported setting (``max_norm``, ``scale_grad_by_freq``).

        Example:
            >>> import torch, speedswap
            >>> old = {"user": torch.nn.EmbeddingBag(100, 8, mode="sum"), "item": torch.nn.EmbeddingBag(500, 8)}
            >>> new = speedswap.EmbeddingBagCollection.from_modules(old)
            >>> bool((new.tables["item"].read() == old["item"].weight).all())
            True
        """
        names = feature_names or {}
        for name in names:
            if name not in modules:
                raise ValueError(f"feature_names has {name!r}, which is not a module; there are {', '.join(modules)}")
        configs = [cls._config_of(name, module, names.get(name, ())) for name, module in modules.items()]
        values = {name: _rows_of(module) for name, module in modules.items()}
        settings.setdefault("device", next((module.weight.device for module in modules.values()), None))
        return cls(configs, _values=values, **settings)

    @classmethod
    def _config_of(cls, name: str, module: nn.Module, feature_names: Sequence[str]) -> Any:
        """Return the description of an embedding as a table of this collection."""
        if not isinstance(module, cls.module_types):
            wanted = " or ".join(f"nn.{kind.__name__}" for kind in cls.module_types)
            raise TypeError(f"module {name!r} is {a_kind(module)}; give an {wanted}, torch's or speedswap's")
        if isinstance(module, TableModule) and module.id_map is not None:
            raise ValueError(
                f"module {name!r} has an id map, whose rows start anew from their initial values, not from values "
                "taken over; give id_map= to the table's config, and load the module's state_dict"
            )
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(
                f"module {name!r} has max_norm {module.max_norm} and scale_grad_by_freq {module.scale_grad_by_freq}, "
                "which a collection lacks; leave them out, scale the rows it returns, or weigh the loss by how often "
                "ids occur"
            )
        weight: Any = module.weight
        stored = _stored_as(module) if isinstance(module, TableModule) else {}
        if "pooling" in {each.name for each in fields(cls.config_type)}:
            stored["pooling"] = getattr(module, "mode", "sum")
        return cls.config_type(
            name=name,
            num_embeddings=module.num_embeddings,
            embedding_dim=module.embedding_dim,
            feature_names=feature_names,
            padding_idx=module.padding_idx,
            dtype=module.table.dtype if isinstance(module, TableModule) else weight.dtype,
            trainable=weight.requires_grad and stored.get("stored_dtype") != torch.int8,
            **stored,
        )

    @classmethod
    def open(
        cls: type[_Self],
        tables: Iterable[Config],
        path: str | os.PathLike[str] | Storage,
        mode: str = "r+",
        *,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> _Self:
        """Open a collection on disk: one created with ``path``, or written by :meth:`save`.

        Args:
            tables: the configs it was created with, in the same order.
            path: its directory; or ``speedswap.Disk(directory, …)``, with settings for each group's cache and commits.
            mode: ``r+`` to read and write, as the only writer; ``r`` to read.
            is_weighted, device: as for the class.

        Raises:
            FileNotFoundError, TableFormatError, TableBusyError: as :meth:`speedswap.Table.open` does.
            ValueError: the files hold different tables.
        """
        place, settings = opened_place(path), {"is_weighted": is_weighted, "device": device}
        require_finished(place)
        return cls._over(tables, lambda name: Table.open(place.of_table(name), mode), settings)

    @classmethod
    def load(
        cls: type[_Self],
        tables: Iterable[Config],
        path: str | os.PathLike[str] | Storage,
        *,
        storage: Storage | str = "auto",
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> _Self:
        """Load a copy of a collection in files into memory.

        Args:
            storage: storage of the copy, as in :meth:`speedswap.Table.load`.
            tables, path, is_weighted, device: as for :meth:`open`; so are the errors.
        """
        source, place = opened_place(path), as_storage(storage)
        settings = {"is_weighted": is_weighted, "device": device}
        require_finished(source)
        return cls._over(tables, lambda name: Table.load(source.of_table(name), storage=place), settings)

    @classmethod
    def _over(
        cls: type[_Self], tables: Iterable[Config], table_of: Callable[[str], Table], settings: dict[str, Any]
    ) -> _Self:
        """Return a collection over existing tables, by group name."""
        configs = checked(tables, cls.config_type)
        with ExitStack() as unused:

            def opened_table(name: str) -> Table:
                table = table_of(name)
                unused.callback(table.close)
                return table

            found = cls(configs, _existing=opened(configs, opened_table), **settings)
            unused.pop_all()
        return found

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all tables, with the optimizer's state, to a directory that :meth:`open` and :meth:`load` read.

        Args:
            path: the directory; all tables are written before the first of them appears or is replaced. Of tables owned
                by ranks, each group appears complete or not at all.
            overwrite: replace existing tables.

        Raises:
            FileExistsError, TableBusyError, TableFullError: as :meth:`speedswap.Table.save` does.
        """
        tables = {
            Path(path) / name: group.table for group, name in zip(self._slots.groups, self._group_names, strict=True)
        }
        if self.ranks is not None:
            for place, table in tables.items():
                table.save(place, overwrite=overwrite)
            return
        is_there = any(map(os.path.lexists, tables)) and is_finished(Path(path))
        if is_there and not overwrite:
            raise FileExistsError(f"path is {os.fspath(path)!r}, which has tables; give overwrite=True to replace them")
        with nullcontext() if is_there else unfinished(Path(path), self._group_names), ExitStack() as copies:
            for place, table in tables.items():
                table.check_open()
                copies.enter_context(saved_copy(table.store, place, overwrite=overwrite))

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the tables together; None for a single process."""
        return self._slots.groups[0].ranks

    @property
    def id_maps(self) -> dict[str, IdMap]:
        """The id maps of the tables that have one, by table name."""
        return {name: keyed.id_map for group in self._slots.groups for name, keyed in group.keyed.items()}

    def close(self) -> None:
        """Close all tables: flush those in files, and release memory, files and locks."""
        with ExitStack() as rest:  # close each, even if an earlier one raises
            for group in self._slots.groups:
                rest.callback(group.table.close)

    # ------------------------------------------------------------------ the tables

    @property
    def tables(self) -> dict[str, Table]:
        """The tables' rows by name, each a :class:`speedswap.Table`."""
        return {name: self._homes()[name].table for name in self._homes()}

    def parameters_of(self, *names: str) -> list[nn.Parameter]:
        """Return the parameters of some tables, for a parameter group of an optimizer.

        Args:
            names: all tables of one or several groups; at least one name.

        Raises:
            ValueError: a table does not exist, none is named, or one shares its parameter with a table not named.

        Example:
            >>> import torch, speedswap
            >>> user = speedswap.EmbeddingConfig(name="user", num_embeddings=100, embedding_dim=8)
            >>> item = speedswap.EmbeddingConfig(name="item", num_embeddings=500, embedding_dim=8, group="slow")
            >>> tables = speedswap.EmbeddingCollection([user, item])
            >>> slow = {"params": tables.parameters_of("item"), "lr": 0.001}
            >>> optimizer = torch.optim.Adam([{"params": tables.parameters_of("user")}, slow], lr=0.1)
        """
        homes = self._homes()
        if not names:
            raise ValueError(f"names is empty; give some of {', '.join(homes)}, or take parameters() for all")
        for name in names:
            if name not in homes:
                raise ValueError(f"table {name!r} is not in the collection; there are {', '.join(homes)}")
        groups = list(dict.fromkeys(homes[name].group for name in names))
        for group in groups:
            others = [config.name for config in group.configs if config.name not in names]
            if others:
                named = [config.name for config in group.configs if config.name in names]
                raise ValueError(
                    f"table {named[0]!r} has its parameter in common with {', '.join(others)}; name these too, or "
                    "give its config a group= of its own"
                )
        return [group.weight for group in groups]

    def _homes(self) -> TablesByName:
        homes = self._modules[self.tables_name]
        assert isinstance(homes, TablesByName)
        return homes

    # ------------------------------------------------------------------ lookups

    @functools.cached_property
    def _has_keys(self) -> bool:
        """True if a table has an id map."""
        return any(group.keyed for group in self._slots.groups)

    def _of_one_commit(self, look_up: Callable[[Any], _Found], features: Any) -> _Found:
        """Return the result of a lookup of features, with keys and rows from the same commit."""
        if not self._has_keys:
            return look_up(features)
        keyed = [each for group in self._slots.groups for each in group.keyed.values()]
        return of_one_commit(keyed, lambda: look_up(features))

    @leaving_transforms
    def _given(self, features: Any) -> FeatureBatch:
        """Read forward's arguments."""
        if not self._has_keys:
            for group in self._slots.groups:
                for lookup in group._step.announced or ():
                    batch: FeatureBatch | None = lookup.batch
                    if batch is not None and batch.is_of(features):
                        return batch
            return read_features(features, self._slots, self._is_weighted)
        return read(features, self._slots, self._is_weighted, ahead=False)[0]

    def _look_up(self, found: FeatureBatch, index: int) -> tuple[Tensor, Tensor]:
        """Look up the rows of one group; see :meth:`TableModule._look_up`."""
        group, device = found.slots.groups[index], found.offsets.device
        is_ahead = group._step.announced is not None or group._step.is_sharded
        given = found.tensors(index, device) if is_ahead else ()
        try:
            ids_of = functools.partial(found.rows, index, checked=True)
            is_joint = found.slots.has_several_groups or found.room
            found_of = functools.partial(found.found, index) if is_joint else None
            request = Request(given, device, ids_of, found_of)
            if group._step.is_sharded and index == 0:
                groups = [*enumerate(found.slots.groups)][1:]
                request.followed_by = [(each._step, found.rows(place, checked=True)) for place, each in groups]
            return group._look_up(request)
        except IdError as error:
            unnamed = error.with_traceback(None)
        raise found.outside(unnamed)

    def lookups_of(self, features: Any) -> list[tuple[TableModule, Announced]]:
        """Return the lookups that forward makes with these features, for a lookahead: one per group of tables.

        Groups with keys owned by ranks are left out: they are looked up at the batch's turn.

        Args:
            features: as forward takes them.

        Raises:
            TypeError, ValueError: as forward does.
        """
        found, asked = read(features, self._slots, self._is_weighted, ahead=True)
        if not self._has_keys:
            found.remember(features)
        lookups: list[tuple[TableModule, Announced]] = []
        for index, group in enumerate(self._slots.groups):
            rows = found.rows(index)
            device = group._target(rows)
            if (rows.shape[0] or group._step.is_sharded) and not group.has_keys_of_ranks:
                given = found.tensors(index, device)
                known = found.found(index) if found.room else None
                sources = [found, *(each.asked.given for each in asked[index])]
                announced = Announced(group.table, given, device, rows, asked[index], found, known, sources)
                lookups.append((group, announced))
        return lookups

    def extra_repr(self) -> str:
        return f"tables={len(self.configs)}, stores={len(self.groups)}, lookups={len(self._slots)}"


def _rows_of(module: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    return module.table.read() if isinstance(module, TableModule) else module.weight.detach()


def _stored_as(module: TableModule) -> dict[str, Any]:
    """Return the config settings that describe an embedding table's compact columns, and what is looked up."""
    compact = {name: column for name, column in module.table.columns.items() if column.compact}
    dtypes = {name: column.stored for name, column in compact.items()}
    state_dtype, rounding = module._step.state._stored_as
    return {
        "stored_dtype": dtypes.pop("weight", None),
        "state_dtype": state_dtype or next(iter(dtypes.values()), None),
        "rounding": rounding or next((column.rounding for column in compact.values()), None),
        "lookup_dtype": module.lookup_dtype,
    }


class EmbeddingCollection(TableCollection[EmbeddingConfig]):
    """Lookups in several tables at once, with TorchRec's names.

    Tables of one width, dtype and storage lie in one store, each in its own range of rows. A step checks, sorts,
    gathers, trains and scatters their rows together, whatever the number of tables. Optimizers, ``attach``,
    ``lookahead``, the splitter and ``state_dict`` work as with a :class:`speedswap.Embedding` for each table, and the
    results are the same, bit for bit.

    Args:
        tables: a config for each.
        device: of the parameters, as ``.to(device)`` would set it; rows go to the device of the ids.
        storage: of the tables whose config has none, as for :class:`speedswap.Embedding`. A directory gets a
            subdirectory for each group of tables, each with its own cache; :meth:`open` opens it again.
        path: a directory for tables on disk, for short.

    Attributes:
        embeddings: the tables by name: ``embeddings["item"].read(ids)``, ``.score(queries)``, ``.weight`` to be filled
            in place; each is an entry of ``state_dict``.
        groups: the tables of one store each, with the ``weight`` that an optimizer trains.

    Shape:
        features, one of:

        - a mapping from every feature to its ids, int32 or int64: (batch,), one for each sample; (batch, n), filled up
          with the table's ``padding_idx``; (ids, offsets), as ``nn.EmbeddingBag`` has them without
          ``include_last_offset``; or a jagged tensor, of torch.nested or with the methods of TorchRec's;
        - a ``KeyedJaggedTensor``, TorchRec's or :class:`speedswap.KeyedJaggedTensor`, of these features.

        → a dict from each feature to a :class:`speedswap.JaggedTensor` with ``values()`` of shape (ids, embedding_dim).

    Raises:
        IdError: in the forward pass, for an id outside of its table. Nothing was read.
        ValueError, TypeError: in the forward pass, for a feature that is missing, unknown or does not fit.
        LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.

    Example:
        >>> import torch, speedswap
        >>> user = speedswap.EmbeddingConfig(name="user", num_embeddings=100, embedding_dim=8)
        >>> page = speedswap.EmbeddingConfig(
        ...     name="page", num_embeddings=500, embedding_dim=8, feature_names=["seen", "liked"]
        ... )
        >>> tables = speedswap.EmbeddingCollection([user, page])
        >>> optimizer = torch.optim.Adam(tables.parameters())
        >>> found = tables(
        ...     {
        ...         "user": torch.tensor([7, 99]),
        ...         "seen": torch.tensor([[4, 5, 6], [400, 401, 402]]),
        ...         "liked": (torch.tensor([5]), torch.tensor([0, 1])),
        ...     }
        ... )
        >>> found["seen"].to_padded_dense().shape, found["liked"].lengths().tolist()
        (torch.Size([2, 3, 8]), [1, 0])
    """

    config_type = EmbeddingConfig
    module_types = (nn.Embedding,)
    tables_name = "embeddings"

    @outside_graphs
    def forward(self, features: Mapping[str, Any] | Any) -> dict[str, JaggedTensor]:
        """Look all features up; the arguments' shapes and the errors are those of the class."""
        return self._of_one_commit(self._looked_up, features)

    def _looked_up(self, features: Any) -> dict[str, JaggedTensor]:
        found = self._given(features)
        slots = found.slots
        lengths = found.offsets.diff().view(len(slots), found.stride).unbind(0)
        results: dict[str, JaggedTensor] = {}
        for index, some in enumerate(slots.of_group):
            weight, local = self._look_up(found, index)
            counts = [stop - start for start, stop in pairwise(found.starts[some.start : some.stop + 1])]
            vectors = look_up(weight, local, slots.groups[index].lookup_dtype).split_with_sizes(counts)
            for own, slot in zip(vectors, some, strict=True):
                results[slots.keys[slot]] = JaggedTensor(own, lengths=lengths[slot])
        return (
            results
            if len(slots.groups) == 1
            else {slots.keys[slot]: results[slots.keys[slot]] for slot in slots.in_order_of(self.configs)}
        )

    def embedding_configs(self) -> tuple[EmbeddingConfig, ...]:
        """Return the description of each table."""
        return self.configs


class EmbeddingBagCollection(TableCollection[EmbeddingBagConfig]):
    """Sums, means or maxima over bags of rows of several tables at once, with TorchRec's names.

    Tables of one width, dtype and storage lie in one store, each in its own range of rows. A step checks, sorts,
    gathers, trains and scatters their rows together, whatever the number of tables. Optimizers, ``attach``,
    ``lookahead``, the splitter and ``state_dict`` work as with a :class:`speedswap.EmbeddingBag` for each table, and
    the results are the same, bit for bit.

    Args:
        tables: a config for each.
        is_weighted: True if every id is given with a weight, for tables with pooling ``"sum"``.
        device: of the parameters, as ``.to(device)`` would set it; rows go to the device of the ids.
        storage: of the tables whose config has none, as for :class:`speedswap.Embedding`. A directory gets a
            subdirectory for each group of tables, each with its own cache; :meth:`open` opens it again.
        path: a directory for tables on disk, for short.

    Attributes:
        embedding_bags: the tables by name: ``embedding_bags["item"].read(ids)``, ``.score(queries)``, ``.weight`` to be
            filled in place; each is an entry of ``state_dict``.
        groups: the tables of one store each, with the ``weight`` that an optimizer trains.

    Shape:
        features, one of:

        - a mapping from every feature to its ids, int32 or int64: (batch,), one for each sample; (batch, n), filled up
          with the table's ``padding_idx``; (ids, offsets) or (ids, offsets, weights), as ``nn.EmbeddingBag`` has them
          without ``include_last_offset``, or (ids, None, weights), as these; or a jagged tensor, of torch.nested
          or with the methods of TorchRec's;
        - a ``KeyedJaggedTensor``, TorchRec's or :class:`speedswap.KeyedJaggedTensor`, of these features.

        → a :class:`speedswap.KeyedTensor` with values of shape (batch, sum of the features' widths), table after table;
        zeros for a bag without ids.

    Raises:
        IdError: in the forward pass, for an id outside of its table. Nothing was read.
        ValueError, TypeError: in the forward pass, for a feature that is missing, unknown or does not fit.
        LostUpdateError, RanksError: as for :class:`speedswap.Embedding`.

    Example:
        >>> import torch, speedswap
        >>> user = speedswap.EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=8)
        >>> page = speedswap.EmbeddingBagConfig(
        ...     name="page", num_embeddings=500, embedding_dim=8, feature_names=["seen", "liked"], pooling="mean"
        ... )
        >>> tables = speedswap.EmbeddingBagCollection([user, page])
        >>> optimizer = torch.optim.Adagrad(tables.parameters(), lr=0.1)
        >>> pooled = tables(
        ...     {
        ...         "user": torch.tensor([7, 99]),
        ...         "seen": torch.tensor([[4, 5, 6], [400, 401, 402]]),
        ...         "liked": (torch.tensor([5]), torch.tensor([0, 1])),
        ...     }
        ... )
        >>> pooled.keys(), pooled.values().shape, pooled["liked"].shape
        (['user', 'seen', 'liked'], torch.Size([2, 24]), torch.Size([2, 8]))
    """

    config_type = EmbeddingBagConfig
    module_types = (nn.EmbeddingBag, nn.Embedding)
    tables_name = "embedding_bags"

    @functools.cached_property
    def _columns(self) -> PooledColumns:
        with torch.device("cpu"), torch.inference_mode(False):  # used later in other modes
            return PooledColumns(self._slots, self.configs)

    @outside_graphs
    def forward(self, features: Mapping[str, Any] | Any) -> KeyedTensor:
        """Pool all features; the arguments' shapes and the errors are those of the class."""
        return self._of_one_commit(self._pooled, features)

    def _pooled(self, features: Any) -> KeyedTensor:
        found, columns = self._given(features), self._columns
        gathered = [self._look_up(found, index) for index in range(len(found.slots.groups))]
        pooled = [each.pooled(found, *gathered[each.group]) for each in columns.passes]
        return KeyedTensor(columns.keys, columns.widths, columns.joined(pooled))

    def embedding_bag_configs(self) -> tuple[EmbeddingBagConfig, ...]:
        """Return the description of each table."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether every id has a weight."""
        return self._is_weighted
