"""The common part of ``Embedding`` and ``EmbeddingBag``: lookups in the table of a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.collectives import of_all_ranks
from speedswap.errors import WeightError
from speedswap.swapping.arguments import refuse_copied, require_flag
from speedswap.swapping.graphs import constant_rows, in_transform, refuse_training
from speedswap.swapping.keyed import KeyedRows, of_one_commit
from speedswap.swapping.over_table import OverTable
from speedswap.swapping.prefetched import Announced, PrefetchedLookup, Request, ids_of
from speedswap.swapping.row_step import Loop
from speedswap.swapping.scoring import Exclude, Scored, Search, read_rows
from speedswap.swapping.weight import is_in_job, require_own_table
from speedswap.tables import Block, FileStore, Table, TensorFiles, TensorSource, is_single_key
from speedswap.tables import init as initializers

_Found = TypeVar("_Found")
_Self = TypeVar("_Self", bound="TableModule")


class TableModule(OverTable):
    """A module that looks rows of its table up, for training or for reading.

    The arguments are those of :class:`speedswap.Embedding`.
    """

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
        require_flag("freeze", freeze)
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
            id map they are rows too, of keys alone: row r has the key r - 1 of :meth:`speedswap.IdMap.row_keys`. Ties
            go to the lower id, whatever ``chunk`` is. (Products are rounded as in torch's matrix product; the last bit
            may depend on the shape.) The row of ``padding_idx`` is not returned. If fewer than k rows are left, the
            result is filled up with id -1 and value -inf; a row whose product is -inf counts as excluded. NaN comes
            first, as in ``torch.topk``, which reveals rows that have become NaN.

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
        with_keys = self.num_embeddings if self._keyed is None else 1 + len(self._keyed.id_map)
        return self._step.top_rows(self.table, Search(queries, k, chunk, exclude, self.padding_idx, with_keys))

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
        return all(each.transfer.has_turn() for each in lookups)

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
