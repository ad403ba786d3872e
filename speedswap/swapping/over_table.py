"""A module over a table: how it gets the table, and is moved, copied and saved with it."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import speedswap.swapping.attach  # noqa: F401  (the optimizer hooks)
from speedswap import kernels
from speedswap._words import warn_once
from speedswap.collectives import RankGroup, of_all_ranks, surround_forward
from speedswap.errors import WeightError
from speedswap.swapping.arguments import (
    TorchsAttribute,
    check_dtypes,
    device_of_weights,
    refuse_place,
    refuse_torchs,
    require_flag,
    require_id_map,
    require_stored,
    require_table,
    row_among,
)
from speedswap.swapping.batch_rows import Padding
from speedswap.swapping.keyed import KeyedRows, rows_for
from speedswap.swapping.optimizer_state import OptimizerState
from speedswap.swapping.row_step import RowStep
from speedswap.swapping.weight import MetaWeight, TableWeight, as_plain, in_memory
from speedswap.swapping.whole_rows import (
    HandedOut,
    MapBytes,
    is_divided,
    read_all,
    rows_are_apart,
    says_checkpoint,
    write_all,
)
from speedswap.tables import IdMap, Storage, Table, as_storage
from speedswap.tables import init as initializers
from speedswap.tables.record import ROUNDINGS, count

_Self = TypeVar("_Self", bound="OverTable")


class OverTable(nn.Module):
    """A module that owns a table, the placeholder parameter for its rows, and their training step.

    The arguments are those of :class:`speedswap.Embedding`.
    """

    weight: nn.Parameter
    max_norm = TorchsAttribute()
    norm_type = TorchsAttribute()
    scale_grad_by_freq = TorchsAttribute()
    sparse = TorchsAttribute()
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
            padding_idx = row_among("padding_idx", padding_idx, num_embeddings)
        if id_map is None and table is not None:
            id_map = table.id_map
        if id_map is not None:
            num_embeddings = rows_for(id_map, num_embeddings, padding_idx)
            padding_idx = 0
        rows_dtype = table.dtype if table is not None else torch.get_default_dtype() if dtype is None else dtype
        check_dtypes(rows_dtype, state_dtype, lookup_dtype)
        place = device_of_weights(device)  # raises if the device does not exist, before a table is created
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
            usual = "stochastic" if stored_dtype in (torch.float16, torch.bfloat16) else "nearest"

            def make(rows: Tensor | None = None) -> Table:
                values = first_values if rows is None else initializers.GivenRows(weakref.ref(rows))
                own_seed = 0 if seed is None else seed
                if seed is None and rows is None:
                    own_seed = int(torch.randint(2**62, (), device="cpu").item())
                return Table.create(
                    num_embeddings,
                    embedding_dim,
                    dtype=rows_dtype,
                    storage=where,
                    init=values,
                    seed=own_seed,
                    name=name,
                    zero_row=padding_idx,
                    stored_dtype=stored_dtype,
                    rounding="nearest" if stored_dtype in (None, rows_dtype) else rounding or usual,
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
            require_stored(table, stored_dtype)
        self._begin(table, TableWeight(table, "cpu" if place.type == "meta" else place, self.lookup_dtype))

    def _begin(self, table: Table, weight: TableWeight) -> None:
        """Use the rows of a table for lookups and training from now on."""
        self.table = table
        self._parameters["weight"] = weight
        padding = Padding([] if self.padding_idx is None else [self.padding_idx])
        if (joint := table.joint) is not None:
            self._step = joint.make_step(table, weight, padding, *self._trained_as)
        else:
            self._step = RowStep(OptimizerState(table, weight, *self._trained_as), padding)
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

    @classmethod
    @of_all_ranks
    def _with_rows(
        cls: type[_Self], embeddings: Tensor, freeze: bool, padding_idx: int | None, **settings: Any
    ) -> _Self:
        """Return a module over a new table with the given rows, shape (num_embeddings, embedding_dim)."""
        require_flag("freeze", freeze)
        kernels.require_dense(embeddings, "embeddings")
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; give (num_embeddings, embedding_dim)")
        if not embeddings.is_floating_point() and not embeddings.is_complex():
            raise TypeError(
                f"embeddings is {embeddings.dtype}, but a module's weight is floating-point, frozen or not; give "
                "embeddings.float(), or look integers up with speedswap.gather_rows(embeddings, ids)"
            )
        if not freeze and settings.get("stored_dtype") == torch.int8:
            raise ValueError("stored_dtype is torch.int8 and freeze is False; int8 rows are for lookup: freeze them")
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

        with as_plain(), in_memory():
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
        try:
            with register(take):  # after all other hooks, which may change what is loaded
                nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
        finally:
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


def _rebuilt(
    cls: type[OverTable], table: Table, settings: dict[str, Any], training: bool, requires_grad: bool
) -> OverTable:
    """Return a module over its table, for unpickling."""
    module = cls(table.num_embeddings, table.embedding_dim, table=table, **settings)
    module.weight.requires_grad_(requires_grad)
    return module.train(training)
