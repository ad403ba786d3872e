"""Averages of a model's parameters over a training, the rows of its tables included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from speedswap.swapping.row_step import step_of
from speedswap.swapping.weight import with_tables
from speedswap.tables import Table
from speedswap.tables.averages import AveragesStore


class Averaged(AveragedModel):
    """A copy of a model whose parameters, rows of tables included, are averages over the updates.

    It is torch's ``AveragedModel`` for models with tables: call :meth:`update_parameters` after each optimizer step,
    and the copy itself to evaluate. An update of a table takes no time whatever its size: a row's average lies in its
    record, and takes the updates that it has missed when a step is about to change the row, and when it is read. The
    result is that of torch's, for every row.

    The copy's embeddings are frozen and look averages up; ``averaged.module.items.read()``, ``.score(…)`` and
    ``.table.export(…)`` are those of averages. The averages are saved with the model's tables; for the other
    parameters, save ``averaged.state_dict()``, which has both.

    Args:
        model: any module, before or during its training. The averages of each trained table become columns of it: as
            many bytes as its weights in their own dtype, and 4 per row.
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

    def __init__(self, model: nn.Module, decay: float | None = 0.999, *, use_buffers: bool = False) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to 1, or None for the mean of all updates")
        nn.Module.__init__(self)  # torch's would copy the tables
        self.decay, self.use_buffers = decay, use_buffers
        weights = [step for each in with_tables(model).parameters() if (step := step_of(each)) is not None]
        memo: dict[int, Any] = {id(step.table): step.table for step in weights}  # frozen ones are shared
        self._tables = []
        for step in weights:
            if step.weight.requires_grad:
                averages = step.state.average(decay)
                memo[id(step.table)] = Table(AveragesStore(step.table.store, averages))
                self._tables.append(averages)
        self.module = copy.deepcopy(model, memo)
        for step in weights:
            if step.table.id_map is not None:
                step.table.set_id_map(step.table.id_map)  # it stays that of the model's table
        for parameter in self.module.parameters():
            if step_of(parameter) is not None:
                parameter.requires_grad_(False)
        updates = max((each.count for each in self._tables), default=0)
        self.register_buffer("n_averaged", torch.tensor(updates, dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Let every average take the model's present parameters, after the optimizer's step.

        Args:
            model: the one that this was made of, or a wrapper of it with the same parameters.
        """
        updates = int(self.n_averaged)
        share = 1 / (updates + 1) if self.decay is None or not updates else 1 - self.decay
        averaged, present = ([*self._averaged_tensors(each)] for each in (self.module, model))
        for ours, theirs in zip(averaged, present, strict=True):
            if ours.is_floating_point() or ours.is_complex():
                ours.lerp_(theirs.to(ours.device), share)
            else:
                ours.copy_(ours + (theirs.to(ours.device) - ours) * share)
        for ours, theirs in zip(self.module.buffers(), () if self.use_buffers else model.buffers(), strict=False):
            ours.copy_(theirs)
        for each in self._tables:
            each.count += 1
        self.n_averaged += 1

    def _averaged_tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """Yield what is averaged here rather than in tables."""
        yield from (each for each in model.parameters() if step_of(each) is None)
        yield from model.buffers() if self.use_buffers else ()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for each in self._tables:  # before their rows, which count as of now
            each.count = int(self.n_averaged)
