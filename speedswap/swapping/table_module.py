"""A module over a table: the common part of ``Embedding`` and ``EmbeddingBag``."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

import speedswap.swapping.attach  # noqa: F401  (the optimizer hooks)
from speedswap import kernels
from speedswap._words import a_kind, warn_once
from speedswap.collectives import RankGroup, of_all_ranks, surround_forward
from speedswap.errors import WeightError
from speedswap.swapping.arguments import refuse_copied, refuse_place, refuse_torchs, require_id_map, require_table
from speedswap.swapping.batch_rows import Padding
from speedswap.swapping.graphs import constant_rows, in_transform, refuse_training
from speedswap.swapping.keyed import KeyedRows, of_one_commit, rows_for
from speedswap.swapping.optimizer_state import OptimizerState
from speedswap.swapping.prefetched import Announced, PrefetchedLookup, Request, ids_of
from speedswap.swapping.row_step import Loop, RowStep
from speedswap.swapping.scoring import Exclude, Scored, read_rows
from speedswap.swapping.weight import MetaWeight, TableWeight, as_plain
from speedswap.swapping.whole_rows import (
    HandedOut,
    MapBytes,
    is_divided,
    read_all,
    rows_are_apart,
    says_checkpoint,
    write_all,
)
from speedswap.swapping.wrappers import is_in_job, require_own_table
from speedswap.tables import (
    Block,
    FileStore,
    IdMap,
    Storage,
    Table,
    TensorFiles,
    TensorSource,
    as_storage,
    is_single_key,
)
from speedswap.tables import init as initializers
from speedswap.tables.record import ROUNDINGS, count, require_dtype

_Found = TypeVar("_Found")
_Self = TypeVar("_Self", bound="TableModule")


class TableModule(nn.Module):
    """A module that owns a table, the placeholder parameter for its rows, and their training step.

    The arguments are those of :class:`speedswap.Embedding`.
    """

    weight: nn.Parameter
    # Attributes of torch's embeddings, refused here.
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    lookup_dtype: torch.dtype | None = None  # of what is looked up, if it is not the table's
    # Of rows that state_dict leaves out: True if something keeps them, and the number of writes that a file has.
    saves_rows: bool = False
    saved_writes: int = 0
    _handed_out: HandedOut | None = None  # in the last state_dict
    # Until there is a table:
    _make: Callable[[Tensor | None], Table] | None = None
    _map_to_keep: IdMap | None = None
    _assigned: weakref.ref[nn.Parameter] | None = None  # the parameter that the rows came from

    @of_all_ranks
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *torchs: object,
        storage: Storage | str = "auto",
        path: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        init: initializers.Initializer | Callable[..., Any] | None = None,
        seed: int | None = None,
        name: str | None = None,
        table: Table | None = None,
        device: torch.device | str | None = None,
        stored_dtype: torch.dtype | None = None,
        lookup_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        rounding: str | None = None,
        id_map: IdMap | None = None,
        **torchs_by_name: Any,
    ) -> None:
        nn.Module.__init__(self)  # torch's embeddings would create a weight
        callee = type(self).__name__
        refuse_torchs(callee, torchs, torchs_by_name)
        for unknown in torchs_by_name:
            raise TypeError(f"{callee}() got an unexpected keyword argument {unknown!r}")
        if table is not None:
            require_table(table)
            refuse_place(table, storage, path)
        else:
            where = as_storage(storage, path)
        ranks = where.ranks if table is None else table.ranks
        if id_map is not None:
            require_id_map(id_map)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx is {padding_idx}, but there are {num_embeddings} rows")
            padding_idx %= num_embeddings
        if id_map is None and table is not None:
            id_map = table.id_map
        if id_map is not None:
            num_embeddings = rows_for(id_map, num_embeddings, padding_idx)
            padding_idx = 0
        rows_dtype = table.dtype if table is not None else dtype or torch.get_default_dtype()
        _check_dtypes(rows_dtype, state_dtype, lookup_dtype)
        place = _device_of_weights(device)  # raises if the device does not exist, before a table is created
        if rounding not in (None, *ROUNDINGS):
            raise ValueError(f"rounding is {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.lookup_dtype = None if lookup_dtype == rows_dtype else lookup_dtype
        self.local_to_rank = where.local_to_rank if table is None else table.local_to_rank
        if ranks is not None:
            # The name reveals ranks that create tables in a different order.
            settings = {"class": callee, "name": name, "rounding": rounding}
            state = {"state_dtype": state_dtype, "id_map": id_map is not None}
            ranks.require_same_settings(
                f"an embedding of {num_embeddings} rows", {**settings, **state, **self._alike()}
            )
        self._init: initializers.Initializer | None = None
        self._trained_as = state_dtype, rounding
        self._map_to_keep = id_map
        if table is None:
            first_values = self._init = initializers.normal() if init is None else initializers.resolve(init)
            compact = stored_dtype in (torch.float16, torch.bfloat16) and stored_dtype != dtype

            def make(rows: Tensor | None = None) -> Table:
                values = first_values if rows is None else initializers.GivenRows(weakref.ref(rows))
                is_drawn = seed is None and rows is None
                return Table.create(
                    num_embeddings,
                    embedding_dim,
                    dtype=rows_dtype,
                    storage=where,
                    init=values,
                    seed=int(torch.randint(2**62, (), device="cpu").item()) if is_drawn else seed or 0,
                    name=name,
                    zero_row=padding_idx,
                    stored_dtype=stored_dtype,
                    rounding=(rounding or "stochastic") if compact else "nearest",
                )

            self._make = make
            if place.type == "meta" and not first_values.is_given:
                shape = count("num_embeddings", num_embeddings), count("embedding_dim", embedding_dim)
                seen_as = self.lookup_dtype or rows_dtype
                self._parameters["weight"] = MetaWeight(torch.empty(shape, dtype=seen_as, device="meta"))
                return
            table = self._create()
        elif (table.num_embeddings, table.embedding_dim) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"table is {table!r}, but num_embeddings is {num_embeddings} and embedding_dim is {embedding_dim}; "
                "leave them out, or give the table's"
            )
        else:
            _require_stored(table, stored_dtype)
        self._begin(table, TableWeight(table, "cpu" if place.type == "meta" else place, self.lookup_dtype))

    @classmethod
    def from_file(
        cls: type[_Self],
        file: TensorSource,
        name: str | Sequence[str],
        freeze: bool = True,
        padding_idx: int | None = None,
        *,
        scale: str | Sequence[str] | None = None,
        block: int | None = None,
        **settings: Any,
    ) -> _Self:
        """Return a module over the rows of tensors in safetensors files, which are read in place.

        Looking rows up takes no memory except the system's cache of the file. With ``storage=``, the table is in that
        place, and rows that were never written are read from the files (:func:`speedswap.init.of_tensors`). Without, it
        is one tensor, mapped: rows that training or a write changes are copied, in pages (4 KiB); optimizer state takes
        memory as it is written; and what keeps trained rows (``table.save``, ``save_checkpoint``, ``state_dict``)
        writes a copy of every row. The files are never changed, and every call checks that they are as they were;
        truncating one during a read kills the process.

        Args:
            file: a safetensors file; an index (``model.safetensors.index.json``); a folder with one, or with
                safetensors files; or a list of files.
            name: the tensor's name, e.g. ``"model.embed_tokens.weight"``; with ``storage=`` also several, or a pattern.
            freeze: True if the rows are for lookup only.
            padding_idx: a row that gets no gradient.
            scale, block: as for :func:`speedswap.init.of_tensors`; they need ``storage=``.
            settings: keyword arguments of the class. Without ``storage=`` or ``path=``, those that do not require a
                copy: ``device``, ``state_dtype``, ``mode``… With one, ``dtype`` is by default the file's, or bfloat16
                for float8.

        Raises:
            ValueError: no tensor has that name; or several have, or scales are given, without ``storage=``.
            TypeError: it is not a matrix of floating-point numbers of at least 16 bits, or a setting requires a copy.
            FileNotFoundError: the file does not exist.
            TableFormatError: a file is damaged or truncated, or two files have a tensor of that name.
            TableClosedError: in any later call, if the file has been written since.

        Example:
            >>> import tempfile, torch, speedswap
            >>> file = tempfile.mkdtemp() + "/model.safetensors"
            >>> speedswap.Table.create(1000, 8, init=speedswap.init.constant(0.5)).export(file)
            >>> items = speedswap.Embedding.from_file(file, name="weight")
            >>> items.table
            Table('weight', 1,000 × 8 float32, file, under 0.01 GiB)
            >>> items(torch.tensor([997]))[0, :3]
            tensor([0.5000, 0.5000, 0.5000])
        """
        if settings.keys() & {"storage", "path"}:
            base = initializers.of_tensors(file, name, scale=scale, block=block)
            dtype = base.dtype if base.dtype.itemsize > 1 else torch.bfloat16
            shape = base.num_embeddings, base.embedding_dim
            module = cls(*shape, padding_idx=padding_idx, init=base, **{"dtype": dtype, **settings})
        else:
            refuse_copied(file, settings)
            files = TensorFiles(file)
            names = [found for each in ([name] if isinstance(name, str) else name) for found in files.matching(each)]
            if len(names) != 1 or scale is not None:
                raise ValueError(
                    f"name is {name!r}, {len(names)} tensors, and scale is {scale!r}; for other than one tensor of "
                    "rows as they are, give the place of the table: storage=speedswap.Disk(path)"
                )
            table = Table(FileStore(files, names[0]))
            module = cls(len(table), table.embedding_dim, padding_idx=padding_idx, table=table, **settings)
        module.weight.requires_grad_(not freeze)
        return module

    def _begin(self, table: Table, weight: TableWeight) -> None:
        """Use the rows of a table for lookups and training from now on."""
        self.table = table
        self._parameters["weight"] = weight
        padding = Padding([] if self.padding_idx is None else [self.padding_idx])
        self._step = _step_over(table, weight, padding, *self._trained_as)
        self._keyed = self._keyed_by(self._map_to_keep)
        self._make = self._map_to_keep = None
        surround_forward(self, table.ranks)

    # ------------------------------------------------------------------ without a table, on the meta device

    def _create(self, rows: Tensor | None = None) -> Table:
        """Create the table, with its initial values or the given rows."""
        assert self._make is not None
        with torch.device("cpu"):
            table = self._make(rows)
        if rows is not None and table.was_found:
            write_all(table, rows)
        return table

    @property
    def _is_on_meta(self) -> bool:
        """True if the table does not exist yet: it is created when rows are loaded."""
        return self._make is not None and self.weight.is_meta

    def _make_table(self, device: torch.device, rows: Tensor | None = None) -> None:
        """Create the table of a module on the meta device, from given rows or its initial values."""
        before, table = self.weight, self._create(rows)
        self._begin(table, TableWeight(table, device, self.lookup_dtype))
        self.weight.requires_grad_(before.requires_grad)
        vars(self.weight).update(vars(before))

    def _take_rows(self, rows: Tensor) -> bool:
        """Create the table of a module on the meta device; return whether it has the rows already.

        With an id map, later keys still need initial values; and each rank may have only part of the rows.
        """
        if self._map_to_keep is not None or is_divided(rows):
            self._make_table(rows.device)
            return False
        self._make_table(rows.device, rows)
        return True

    def _adopt(self) -> None:
        """Create the table from rows that replaced a weight on the meta device."""
        weight = self.weight
        if not isinstance(weight, MetaWeight) or weight.is_meta:
            raise WeightError(
                f"the {type(self).__name__} is on the meta device and has no rows yet; load a state_dict into it, or "
                'call to_empty(device="cpu") for its initial values'
            )
        rows = weight.detach()
        table = self._create(None if self._map_to_keep is not None else rows)
        if self._map_to_keep is not None:
            write_all(table, rows)
        self._begin(table, TableWeight.in_place_of(weight, table, self.lookup_dtype))

    # If the module has a table, its ``__dict__`` has these.
    @functools.cached_property
    def table(self) -> Table:
        """The rows."""
        self._adopt()
        return self.table

    @functools.cached_property
    def _step(self) -> RowStep:
        self._adopt()
        return self._step

    @functools.cached_property
    def _keyed(self) -> KeyedRows | None:
        self._adopt()
        return self._keyed

    # ------------------------------------------------------------------ with a table

    def _alike(self) -> dict[str, object]:
        """Return further settings that must be equal on all ranks that own the rows together."""
        return self._settings()

    def _keyed_by(self, id_map: IdMap | None) -> KeyedRows | None:
        if id_map is None:
            return None
        is_new = self.table.id_map is None
        self.table.set_id_map(id_map)
        if is_new and self.table.ranks is None:
            self.table.flush()  # a kill must not leave rows on disk without their map: keys would be used as ids
        assert self.table.id_map is not None
        return self._step.keyed(self.table.id_map, self.table)

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a single process."""
        return None if self._is_on_meta else self.table.ranks

    @property
    def id_map(self) -> IdMap | None:
        """The map from looked-up keys to rows; None if ids are rows."""
        if self._make is not None:
            return self._map_to_keep
        return None if self._keyed is None else self._keyed.id_map

    @of_all_ranks
    def reset_parameters(self, init: initializers.Initializer | Callable[..., Any] | None = None) -> None:
        """Reset every row to its initial values; the optimizer's state is unchanged.

        Args:
            init: one of :mod:`speedswap.init` or a function of ``torch.nn.init``; by default the embedding's
                initializer. The same initializer gives the same values again: they depend on the table's seed.

        Raises:
            ValueError: ``init`` is None, but the rows came with a table or from :meth:`from_pretrained`.

        Example:
            >>> import torch, speedswap
            >>> items = speedswap.Embedding(1000, 16)
            >>> items.reset_parameters(speedswap.init.from_torch(torch.nn.init.trunc_normal_, std=0.02))
        """
        values = self._init if init is None else initializers.resolve(init)
        if values is None:
            raise ValueError(
                f"init is None, but the rows of table {self.table.name!r} came from elsewhere; give one of "
                "speedswap.init or a function of torch.nn.init"
            )
        self.table.reset_columns([replace(self.table.columns["weight"], init=values)])

    @of_all_ranks
    def read(self, ids: Any = None) -> Tensor:
        r"""Copy rows out of the table, without a gradient; :meth:`forward` is for training.

        Args:
            ids: a tensor of any integer dtype and shape, on any device; or one number; by default all rows. With an id
                map these are rows too, and keys are given as a list, an array or a column, or as one string.

        Returns:
            Shape (\*ids.shape, embedding_dim) on the ids' device; (embedding_dim,) for one number or string; for all
            rows (num_embeddings, embedding_dim) in ordinary memory. Changing it does not change the table.

        Raises:
            IdError: an id is outside the table. Nothing was read.
            TableTooLargeError: all rows were requested, and do not fit in free memory.

        Example:
            >>> import torch, speedswap
            >>> items = speedswap.Embedding.from_pretrained(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            >>> items.read(torch.tensor([1, 1])).tolist()
            [[3.0, 4.0], [3.0, 4.0]]
        """
        keyed = self._keyed
        if keyed is None or ids is None or isinstance(ids, Tensor | int):
            return read_rows(self.table, ids)
        one = isinstance(ids, str | bytes)
        rows = of_one_commit([keyed], lambda: read_rows(self.table, keyed.id_map.lookup([ids] if one else ids)))
        return rows[0] if one else rows

    @of_all_ranks
    def score(self, queries: Tensor, k: int = 10, *, chunk: int | None = None, exclude: Exclude = None) -> Scored:
        """Find the rows with the largest inner products in the whole table: ``(queries @ all_rows.T).topk(k)``.

        Rows are copied once, a chunk at a time, from wherever they are stored to the queries' device. Memory is
        bounded: in addition to queries, result and ``exclude`` it takes about 32 MiB on the CPU and 128 MiB on a GPU,
        or twice the bytes of ``chunk`` rows. There is no gradient; :meth:`forward` is for training. Ranks that own the
        rows must call this together, each with any number of its own queries; each rank scores its own rows for all
        queries.

        Args:
            queries: shape (q, embedding_dim), or (embedding_dim,) for one; of a floating-point dtype, converted to the
                table's dtype, in which products are computed even under autocast.
            k: rows to return per query.
            chunk: rows to copy at a time; by default chosen from the bytes per row and the number of queries.
            exclude: rows to leave out of the result: a mask, bool, shape (num_embeddings,); or ids, int32 or int64:
                (n,) for all queries; (q, m) per query, padded with -1; or a list of q tensors of ids.

        Returns:
            ``values``, the inner products, shape (q, k), largest first, and ``ids``, int64; (k,) for one query. With an
            id map they are rows too: row r has the key r - 1 of :meth:`speedswap.IdMap.row_keys`. Ties go to the lower
            id, whatever ``chunk`` is. (Products are rounded as in torch's matrix product; the last bit may depend on
            the shape.) The row of ``padding_idx`` is not returned. If fewer than k rows are left, the result is filled
            up with id -1 and value -inf; a row whose product is -inf counts as excluded. NaN comes first, as in
            ``torch.topk``, which reveals rows that have become NaN.

        Raises:
            ValueError, TypeError: k, chunk, or a shape or dtype does not fit.
            IdError: an id of ``exclude`` is outside the table. Nothing was read in any of these cases.

        Example:
            >>> import torch, speedswap
            >>> items = speedswap.Embedding.from_pretrained(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]))
            >>> values, ids = items.score(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), k=2)
            >>> ids.tolist(), values.tolist()
            ([[2, 0], [2, 1]], [[3.0, 1.0], [3.0, 2.0]])
            >>> items.score(torch.tensor([1.0, 0.0]), k=2, exclude=torch.tensor([2])).ids.tolist()
            [0, 1]
        """
        return self._step.top_rows(self.table, queries, k, chunk=chunk, exclude=exclude, padding_idx=self.padding_idx)

    def lookups_of(self, given: Any) -> list[tuple[TableModule, Announced]]:
        """Return the lookups that forward makes with one or several tensors of ids, for a lookahead.

        Args:
            given: int32 or int64, any shape, on the lookup's device, or on the CPU with ``weight`` on that device. With
                an id map: keys, which get their rows now if the lookup is a training lookup.

        Returns:
            This module with each of its lookups; none for a tensor without ids, or for keys owned by ranks, which are
            looked up in the batch's turn.

        Raises:
            TypeError: ``given`` has another type.
            IdMapFullError: the map has no rows for the keys.
        """
        if self._keyed is not None and self._keyed.is_over_ranks:
            return []
        if given is None or not (self._is_one(given) or isinstance(given, Iterable)):
            raise TypeError(
                f"the ids of table {self.table.name!r} are {given!r}; let their function return a tensor, or a list "
                "with a tensor for each lookup"
            )
        announced = [self._announced(each) for each in ([given] if self._is_one(given) else given)]
        return [(self, lookup) for lookup in announced if lookup.ids.numel() or self._step.is_sharded]

    def _announced(self, given: Any) -> Announced:
        device, asked, sources = self._target(given), None, []
        if self._keyed is None:
            kernels.require_id_dtype(given)
            ids = given
        elif self._adds():
            asked = self._keyed.ask(given, device)
            ids, sources = asked.rows, [asked.given]
        else:
            ids = self._keyed.rows(given, device, adds=False)
        return Announced(self.table, (ids,), device, ids, asked, sources=sources)

    # ------------------------------------------------------------------ inside a lookahead

    @property
    def _all_keyed(self) -> Collection[KeyedRows]:
        """The module's tables that have id maps."""
        return () if self._keyed is None else (self._keyed,)

    def _begin_lookahead(self, loop: Loop, depth: int) -> None:
        """Begin to announce lookups; drop those of loops that were left."""
        for keyed in self._all_keyed:
            keyed.end()
        self._step.begin_lookahead(loop, depth)

    def _begin_turn(self, loop: Loop, lookups: list[PrefetchedLookup]) -> bool:
        """Begin the turn of a batch whose lookups were announced and prefetched.

        Returns:
            False if ranks own the rows and one of them has no more batches.
        """
        self._step.begin_turn(loop, lookups)
        if self._keyed is not None:
            self._keyed.begin([each.asked for each in lookups if each.asked is not None])
        return all(each.has_turn() for each in lookups)

    def _end_lookahead(self, loop: Loop) -> None:
        """Drop the lookups of batches that have not had their turn, and wait for pending writes."""
        self._step.end_lookahead(loop)
        for keyed in self._all_keyed:
            keyed.end()
        self.table.drain()

    # ------------------------------------------------------------------ a lookup

    def _is_one(self, given: Any) -> bool:
        """Return whether ids or keys are for one lookup, not for several."""
        if isinstance(given, Tensor):
            return True
        is_list_of_keys = isinstance(given, (list, tuple)) and (not given or is_single_key(given[0]))
        return self._keyed is not None and (is_list_of_keys or not isinstance(given, (list, tuple)))

    def _target(self, ids: Any) -> torch.device:
        """Return the device on which a lookup of ids or keys will need its rows."""
        is_there = isinstance(ids, Tensor) and ids.device.type != "cpu"
        return ids.device if is_there else self.weight.device

    def _adds(self) -> bool:
        """Return whether a lookup now is a training lookup, which assigns rows to new keys."""
        return self.training and self.weight.requires_grad and torch.is_grad_enabled()

    def _of_one_commit(self, look_up: Callable[[], _Found]) -> _Found:
        """Return the result of a lookup of ids or keys, with keys and rows from the same commit."""
        return look_up() if self._keyed is None else of_one_commit([self._keyed], look_up)

    def _rows_of(self, keys: Any) -> Tensor:
        """Return the rows of keys, on the lookup's device; without a map, ids are rows already."""
        if self._keyed is None:
            return cast(Tensor, keys)
        device = keys.device if isinstance(keys, Tensor) else self.weight.device
        return self._keyed.rows(keys, device, adds=self._adds())

    def _look_up(self, request: Request | Tensor) -> tuple[Tensor, Tensor]:
        """Return a lookup's rows and each id's index among them, as :meth:`RowStep.look_up` does.

        Args:
            request: ids on the device that needs the rows; or a lookup whose ids were checked.

        Raises:
            IdError: an id is outside the table. Nothing was read.
            TypeError: ids are not a dense int32 or int64 tensor.
            LostUpdateError: the previous training step did not reach the table.
            RanksError: rows are trained in a job of several processes without ``local_to_rank``.
            WeightError: the weight was replaced by a tensor that does not fit; or rows are trained inside
                ``torch.func``.
        """
        weight: Any = self._parameters["weight"]
        step = self._step
        if weight is not step.weight and self._is_replacement(weight):
            return self._in_place_of_table(weight, ids_of(request))
        trains = torch.is_grad_enabled() and step.batch.requires_grad
        if in_transform():
            if trains:
                refuse_training(self.table.name)
            return constant_rows(ids_of(request), self._constant)
        if type(request) is not Request:
            kernels.require_id_dtype(request)
        if self._handed_out is not None:
            self._handed_out.warn_if_changed(self.table)
        if trains:
            if self._assigned is not None:
                self._require_untied()
            if weight is not step.weight or is_in_job():
                require_own_table(self.table.name, weight, step.weight, self.local_to_rank or step.is_sharded)
        rows, local = step.look_up(request, trains=trains)
        if type(request) is not Request and local.shape != request.shape:  # the ids were announced in a different shape
            local = local.view(request.shape)
        return rows, local

    def _constant(self, ids: Tensor) -> tuple[Block, Tensor]:
        """Lease the distinct rows of ids for reading; return them and each id's index among them."""
        kernels.require_id_dtype(ids)
        return self._step.lease(ids, columns=["weight"])

    def _require_untied(self) -> None:
        """Raise WeightError if the parameter that the rows came from is still held, and would be trained separately."""
        if self._assigned is not None and self._assigned() is not None:
            raise WeightError(
                f"weight was assigned a parameter whose values are now in table {self.table.name!r}, but something "
                "else still holds it: it cannot be tied to another module's; drop it, or give that module a copy"
            )
        self._assigned = None

    def _is_replacement(self, weight: Tensor) -> bool:
        """Return whether to look up in a tensor that ``torch.func.functional_call`` substituted for the weight."""
        wanted = (self.num_embeddings, self.embedding_dim)
        is_parameter = isinstance(weight, nn.Parameter)
        if not is_parameter and tuple(weight.shape) == wanted:
            return True
        is_trained = is_parameter and weight.requires_grad and torch.is_grad_enabled()
        if is_trained or (is_in_job() and is_parameter and tuple(weight.shape) != wanted):
            return False  # distributed wrappers put placeholders there; training through them is refused
        raise WeightError(
            f"weight was replaced by {a_kind(weight)} of shape {tuple(weight.shape)}, which are not the rows of table "
            f"{self.table.name!r}; give a tensor of shape {wanted}, not an nn.Parameter, or leave it out to look up "
            "in the table"
        )

    def _in_place_of_table(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return all rows of a tensor that replaces the table's rows, and each id's index among them."""
        if not in_transform():  # torch's own lookup checks them
            kernels.require_id_dtype(ids)
            kernels.check_ids(ids.reshape(-1), self.num_embeddings, f"table {self.table.name!r}")
            kernels.require_dense(weight, "weight")
        if self._step.padding:
            is_padding = self._step.padding.among(torch.arange(self.num_embeddings, device=weight.device))
            weight = torch.where(is_padding.unsqueeze(1), weight.detach(), weight)
        return weight, ids.long().contiguous()

    @classmethod
    @of_all_ranks
    def _with_rows(
        cls: type[_Self], embeddings: Tensor, freeze: bool, padding_idx: int | None, **settings: Any
    ) -> _Self:
        """Return a module over a new table with the given rows, shape (num_embeddings, embedding_dim)."""
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; give (num_embeddings, embedding_dim)")
        if not embeddings.is_floating_point() and not embeddings.is_complex():
            raise TypeError(
                f"embeddings is {embeddings.dtype}, but a module's weight is floating-point, frozen or not; give "
                "embeddings.float(), or look integers up with speedswap.gather_rows(embeddings, ids)"
            )
        if not freeze and settings.get("stored_dtype") == torch.int8:
            raise ValueError("stored_dtype is torch.int8 and freeze is False; int8 rows are for lookup: freeze them")
        kernels.require_dense(embeddings, "embeddings")
        rows = embeddings.detach()
        module = cls(
            len(embeddings),
            embeddings.shape[1],
            padding_idx=padding_idx,
            init=initializers.GivenRows(weakref.ref(rows)),
            seed=0,
            **{"dtype": embeddings.dtype, **settings},
        )
        module._init = None
        module.weight.requires_grad_(not freeze)
        return module

    def _settings(self) -> dict[str, Any]:
        """Return the arguments, apart from the table, that make a module like this one."""
        return {"padding_idx": self.padding_idx, "lookup_dtype": self.lookup_dtype}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process looks up in the table's files; a table in memory refuses to be pickled.
        return (_rebuilt, (type(self), self.table, self._settings(), self.training, self.weight.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._make is not None:
            twin = memo[id(self)] = type(self).__new__(type(self))
            twin.__dict__ |= copy.deepcopy(self.__dict__, memo)
            return twin
        step = self._step.copied(memo)
        module = memo[id(self)] = type(self).__new__(type(self))
        module.__dict__ |= copy.deepcopy({**self.__dict__, "_keyed": None, "_handed_out": None}, memo)
        module._keyed = module._keyed_by(step.table.id_map)
        return module

    def extra_repr(self) -> str:
        settings = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        settings += "" if self.lookup_dtype is None else f", lookup_dtype={self.lookup_dtype}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{settings}, {self._rows_repr}, weight stands for the whole "
            "table: the batch's rows within optimizer.step(), no tensor otherwise"
        )

    @property
    def _rows_repr(self) -> str:
        return "no rows yet, on meta" if self._is_on_meta else f"table={self.table!r}"

    @of_all_ranks
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self._is_on_meta:
            after = fn(torch.empty(1, dtype=self.weight.dtype, device="meta"))
            if after.dtype == self.weight.dtype:
                if after.device.type != "meta":
                    self._make_table(after.device)
                weight, self._parameters["weight"] = self.weight, None
                try:
                    return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
                finally:
                    self._parameters["weight"] = weight
            raise TypeError(
                f"the rows of the {type(self).__name__} are {self.weight.dtype} and stay so; give dtype= as it is made"
            )
        weight = self.weight
        before = torch.zeros(1, dtype=weight.dtype)
        after = fn(before)
        if not torch._has_compatible_shallow_copy_type(before, after):
            raise TypeError(
                f"the rows of table {self.table.name!r} cannot be looked up on device {after.device}, and stay where "
                "they are; leave the embedding out when the model is moved there"
            )
        if after.device.type == "cpu" and after.is_shared():  # type: ignore[no-untyped-call]
            raise TypeError(
                f"the rows of table {self.table.name!r} cannot be shared between processes: each would train its own "
                "copy; call share_memory() of the other layers alone, or let processes train one "
                "table with storage=speedswap.Ranks()"
            )
        if after.dtype != weight.dtype:
            raise TypeError(
                f"the rows of table {self.table.name!r} are {weight.dtype} and stay so; give dtype= when "
                "the embedding is made, or convert what it returns"
            )

        def applied(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found.to(self.table.dtype) if tensor is weight or tensor is weight.grad else found

        with as_plain():
            super()._apply(applied, recurse)  # type: ignore[no-untyped-call]
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight" and self._is_on_meta and param is not None and not param.is_meta:
            self.weight.requires_grad_(param.requires_grad)
            load_assigned(self, param)
            vars(self.weight).update(vars(param))
            self._assigned = weakref.ref(param)
            return
        if name == "weight" and self._parameters.get("weight") is not None:
            raise not_assigned(self)
        super().register_parameter(name, param)

    @property
    def _is_apart(self) -> bool:
        return rows_are_apart(None if self._is_on_meta else self.table)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        if self._is_apart:
            destination.pop(prefix + "weight", None)
            if not rows_are_apart() and not self.saves_rows and self.table.store.notes.writes > self.saved_writes:
                warn_once(
                    "SW411",
                    f"state_dict leaves out the rows of table {self.table.name!r}, whose untouched rows are a "
                    "checkpoint's: keep the trained ones with speedswap.save_pretrained, RowsCallback, "
                    "save_checkpoint or table.save_rows",
                )
            return
        if self._is_on_meta:
            destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        else:
            is_lossless = self.lookup_dtype == self.table.columns["weight"].stored_dtype
            with says_checkpoint():
                rows = read_all(self.table, dtype=self.lookup_dtype if is_lossless else None)
            destination[prefix + "weight"] = rows
            if self._handed_out is not None:
                self._handed_out.warn_if_changed(self.table)
            self._handed_out = None if rows.is_inference() or is_divided(rows) else HandedOut(rows)
        if self.id_map is not None:
            destination[prefix + "id_map"] = self.id_map.whole_bytes().as_subclass(MapBytes)

    @of_all_ranks
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, strict, missing_keys, _, error_msgs = rest
        keys = [prefix + name for name in (["weight"] if self.id_map is None else ["weight", "id_map"])]
        given: dict[str, Any] = {}

        def take(_: nn.Module, found: dict[str, Any], *rest: Any) -> None:
            given.update({key: found.pop(key) for key in keys if key in found})

        register: Callable[..., Any] = self.register_load_state_dict_pre_hook
        last = register(take)  # after all other hooks, which may change what is loaded
        try:
            nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
        finally:
            last.remove()
            state_dict.update(given)
        missing = [key for key in keys if strict and key not in given and not self._is_apart]
        missing_keys[:] = [key for key in missing_keys if key not in keys or key in missing]
        missing_keys.extend(key for key in missing if key not in missing_keys)
        if keys[0] in given and not missing and not rows_are_apart():
            self._load_rows(given, prefix, error_msgs)

    def _load_rows(self, given: dict[str, Any], prefix: str, error_msgs: list[str]) -> None:
        """Load a state_dict's rows, and id map if any; add what does not fit to ``error_msgs``."""
        values, in_shape, failed = given[prefix + "weight"], nn.Module(), len(error_msgs)
        in_shape.register_buffer("weight", torch.empty(self.num_embeddings, self.embedding_dim, device="meta"))
        assigning = {"assign_to_params_buffers": True}  # torch then checks the rows but copies none
        nn.Module._load_from_state_dict(in_shape, given, prefix, assigning, False, [], [], error_msgs)
        if len(error_msgs) > failed:
            if self.ranks is not None:  # the other ranks load their rows
                raise ValueError(error_msgs.pop())
            return
        if self._is_on_meta and (values.is_meta or self._take_rows(values.detach())):
            return
        of_map: AbstractContextManager[None] = nullcontext()
        if self.id_map is not None and prefix + "id_map" in given:
            of_map = self.id_map.restoring(given[prefix + "id_map"], what=f"{prefix}id_map")
        self._handed_out = None
        with of_map:  # loads both map and rows, or neither
            write_all(self.table, values)
            if self.id_map is not None:  # the gradient's rows now belong to other keys
                self._step.abandon()


def not_assigned(module: Any) -> WeightError:
    """Return the error for a parameter that was assigned as the weight of a module over a table."""
    of = f"the {type(module).__name__}" if module._is_on_meta else f"table {module.table.name!r}"
    return WeightError(
        f"weight was assigned, but the rows of {of} cannot be tied to another tensor; copy values with "
        "embedding.weight.data.copy_(values) or embedding.table.write(0, values)"
    )


def load_assigned(module: Any, weight: nn.Parameter) -> None:
    """Load the rows of a parameter that was assigned as the weight of a module on the meta device."""
    errors: list[str] = []
    module._load_rows({"weight": weight}, "", errors)
    if errors:
        raise WeightError(f"weight was assigned: {errors[0]}")


def _device_of_weights(device: torch.device | str | None) -> torch.device:
    """Return the device of a module's parameters, even if accelerate has moved them to meta since."""
    module = nn.Module()
    try:
        module.weight = nn.Parameter(torch.empty(0, device=device))
    except RuntimeError as error:
        raise RuntimeError(f"device is {device!r}; give one that torch has here, such as 'cpu' ({error})") from error
    return module.weight.device


def _step_over(
    table: Table,
    weight: TableWeight,
    padding: Padding,
    state_dtype: torch.dtype | None,
    rounding: str | None,
) -> RowStep:
    """Return the training step of a table's rows, or of the rows that this rank owns."""
    if (joint := table.joint) is not None:
        step: RowStep = joint.make_step(table, weight, padding, state_dtype, rounding)
        return step
    return RowStep(OptimizerState(table, weight, state_dtype, rounding), padding)


def _check_dtypes(dtype: torch.dtype, state_dtype: torch.dtype | None, lookup_dtype: torch.dtype | None) -> None:
    """Raise TypeError unless rows of this dtype can be trained with state of ``state_dtype``, and rounded so."""
    require_dtype("dtype", dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        raise TypeError(f"dtype is {dtype}; an embedding is trained, so give a floating-point one")
    if state_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"state_dtype is {state_dtype!r}; give torch.bfloat16, torch.float16 or torch.float32")
    if state_dtype is not None and dtype != torch.float32:
        raise TypeError(f"state_dtype is {state_dtype}, but the rows are {dtype}; leave it out, or give float32 rows")
    if lookup_dtype not in (None, dtype) and (
        dtype != torch.float32 or lookup_dtype not in (torch.float16, torch.bfloat16)
    ):
        raise TypeError(
            f"lookup_dtype is {lookup_dtype!r}, but the rows are {dtype}; give torch.bfloat16 or torch.float16 with "
            "float32 rows, or leave it out"
        )


def _require_stored(table: Table, stored_dtype: torch.dtype | None) -> None:
    """Raise ValueError unless an existing table stores its weights as requested."""
    stored = table.columns["weight"].stored_dtype
    if stored_dtype not in (None, stored):
        raise ValueError(
            f"stored_dtype is {stored_dtype!r}, but table {table.name!r} stores its weights as {stored}; leave it out, "
            "or copy them to a new table"
        )


def _rebuilt(
    cls: type[TableModule], table: Table, settings: dict[str, Any], training: bool, requires_grad: bool
) -> TableModule:
    """Return a module over its table, for unpickling."""
    module = cls(table.num_embeddings, table.embedding_dim, table=table, **settings)
    module.weight.requires_grad_(requires_grad)
    return module.train(training)
