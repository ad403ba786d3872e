"""Averages of a model's parameters over a training, the rows of its tables included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from speedswap.collectives import of_all_ranks
from speedswap.swapping.row_step import RowStep, step_of
from speedswap.swapping.weight import with_tables
from speedswap.tables import Table
from speedswap.tables.averages import AveragesStore, TableAverages
from speedswap.tables.idle import IdleStore


class Averaged(AveragedModel):
    """A copy of a model whose parameters, rows of tables included, are averages over the updates.

    It is torch's ``AveragedModel`` for models with tables: call :meth:`update_parameters` after each optimizer step,
    and the copy itself to evaluate. An update of a table takes no time whatever its size: a row's average lies in its
    record, and takes the updates that it has missed when the row is about to change, and when it is read. The result
    is that of torch's, for every row. Rows that are reset, or written by ``load_rows``, start over with every column,
    also their average.

    The copy's embeddings are frozen and look averages up; ``averaged.module.items.read()``, ``.score(…)`` and
    ``.table.export(…)`` are those of averages. The averages are saved with the model's tables; for the other
    parameters, save ``averaged.state_dict()``, which has both. A model may have several averages. Those of a table that
    was opened from files, or got a checkpoint, go on in the next one of the same decay that is made.

    Args:
        model: any module, before or during its training. The averages of each trained table become columns of it: as
            many bytes as its weights in their own dtype, and 4 per row; those of a frozen one once it is trained or
            written.
        decay: the share of the average that an update keeps, as of ``get_ema_multi_avg_fn``; None to give all updates
            the same weight, as SWA does.
        use_buffers: average buffers too; by default they are copied.

    Raises:
        ValueError: the decay is not between 0 and 1; or ranks own a table, or its idle rows take steps
            (``idle_rows="dense"``): its averages would need every row at every step.

    Example:
        >>> import torch, speedswap
        >>> model = torch.nn.Sequential(speedswap.Embedding(1000, 16), torch.nn.Linear(16, 1))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> averaged = speedswap.optim.Averaged(model, decay=0.99)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.tensor([1, 2])).sum().backward()
        ...     optimizer.step()
        ...     averaged.update_parameters(model)
        >>> averaged(torch.tensor([1, 999])).shape
        torch.Size([2, 1])
    """

    @of_all_ranks
    def __init__(self, model: nn.Module, decay: float | None = 0.999, *, use_buffers: bool = False) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to 1, or None for the mean of all updates")
        nn.Module.__init__(self)  # torch's would copy the tables
        self.decay, self.use_buffers = decay, use_buffers
        steps = [step for each in with_tables(model).parameters() if (step := step_of(each)) is not None]
        for step in steps:
            if (why := _why_not(step)) and (_is_trained(step) or step.is_sharded or _has_averages(step)):
                raise ValueError(
                    f"table {step.table.name!r} cannot have averages: {why}, and a row's average is known only while "
                    "its weight stays as this process's steps leave it; leave one of the two out"
                )
        memo: dict[int, Any] = {id(step.table): step.table for step in steps}  # what cannot be averaged is shared
        for step in steps:
            if not _why_not(step):
                if isinstance(step.table.store, IdleStore):
                    step.table.store.bring_up_to_date()
                averages = TableAverages(decay).take_up(step.table)
                if step.weight.requires_grad:
                    averages.join(step.table)  # else once it is trained
                memo[id(step.table)] = Table(AveragesStore(step.table, averages))
        self.module = copy.deepcopy(model, memo)
        self._give_back_maps()
        for parameter in self.module.parameters():
            if step_of(parameter) is not None:
                parameter.requires_grad_(False)
        updates = max((each.averages.count for each in self._stores()), default=0)
        self.register_buffer("n_averaged", torch.tensor(updates, dtype=torch.long))

    def __deepcopy__(self, memo: dict[int, Any]) -> Averaged:
        for step in filter(None, map(step_of, self.module.parameters())):
            store = step.table.store
            if isinstance(store, AveragesStore) and (table := store.copied(memo)) is not None:
                memo[id(step.table)] = table
        reduced: Any = self.__reduce_ex__(4)
        twin: Averaged = reduced[0](*reduced[1])
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(reduced[2], memo))  # type: ignore[no-untyped-call]
        twin._give_back_maps()
        return twin

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Let every average take a model's present parameters, after the optimizer's step.

        Args:
            model: the one that this was made of, or a wrapper of it with the same parameters. Another one of the same
                shapes works too, as with torch's, in a pass over all rows of its tables.

        Raises:
            ValueError: its parameters are of other shapes; or it trains a table whose rows cannot be averaged. Nothing
                was changed.
        """
        updates = int(self.n_averaged)
        share = 1 / (updates + 1) if self.decay is None or not updates else 1 - self.decay
        averaged, present = ([*self._averaged_tensors(each)] for each in (self.module, with_tables(model)))
        pairs = [*zip_longest(averaged, present)]
        for ours, theirs in pairs:
            if ours is None or theirs is None or ours.shape != theirs.shape:
                shapes = [None if each is None else tuple(each.shape) for each in (ours, theirs)]
                raise ValueError(
                    f"model has a parameter of shape {shapes[1]} in place of {shapes[0]}; give one like this"
                )
            step, other = step_of(ours), step_of(theirs)
            if step is None or isinstance(step.table.store, AveragesStore):
                continue
            if other is None or other.table is not step.table or _is_trained(other):
                raise ValueError(
                    f"table {step.table.name!r} cannot have averages: {_why_not(step)}, and it was frozen when this "
                    "was made; make Averaged of a model without it, or leave it frozen"
                )
        for ours, theirs in pairs:
            step, other = step_of(ours), step_of(theirs)
            if step is not None and isinstance(store := step.table.store, AveragesStore):
                if other is not None and other.table.store.notes is store.notes:
                    store.averages.count += 1
                else:
                    store.update(other.table.read if other else partial(_between, theirs), share)
            elif step is None and (ours.is_floating_point() or ours.is_complex()):
                ours.lerp_(theirs.to(ours.device), share)
            elif step is None:
                ours.copy_(ours + (theirs.to(ours.device) - ours) * share)
        for ours, theirs in zip(self.module.buffers(), () if self.use_buffers else model.buffers(), strict=False):
            ours.copy_(theirs)
        self.n_averaged += 1

    def _averaged_tensors(self, model: nn.Module) -> Iterator[Tensor]:
        yield from model.parameters()
        yield from model.buffers() if self.use_buffers else ()

    def _stores(self) -> list[AveragesStore]:
        steps = filter(None, map(step_of, self.module.parameters()))
        return [step.table.store for step in steps if isinstance(step.table.store, AveragesStore)]

    def _give_back_maps(self) -> None:
        """Leave id maps, which the averages share, to the model's tables."""
        for each in self._stores():
            if (table := each.table()) is not None and table.id_map is not None:
                table.set_id_map(table.id_map)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for each in self._stores():  # before their rows, which count as of now
            each.averages.count = int(self.n_averaged)


def _is_trained(step: RowStep) -> bool:
    return step.weight.requires_grad and step.state.is_trainable


def _has_averages(step: RowStep) -> bool:
    return isinstance(step.table.store, AveragesStore)


def _why_not(step: RowStep) -> str:
    """Return why rows cannot be averaged; nothing if they can."""
    if step.group is not None:
        return "ranks own the rows"
    if not step.state.is_trainable:
        return "its weights are for lookup only"
    if _has_averages(step):
        return "its weights are averages"
    return "" if step.state.idle is None else "idle_rows is 'dense'"


def _between(weight: Tensor, start: int, stop: int) -> Tensor:
    return weight[start:stop]
