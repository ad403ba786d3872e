"""``nn.Embedding`` over a table outside the compute device."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap.swapping.attach  # noqa: F401  (the optimizer hooks)
from speedswap import kernels
from speedswap.swapping.step import RowStep
from speedswap.tables import Table
from speedswap.tables import init as initializers

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """A lookup table like ``nn.Embedding``, whose rows and optimizer state live in a :class:`speedswap.Table`.

    Forward gathers the batch's rows, weight and optimizer state together, to the device of the ids. The optimizer that
    holds ``weight`` attaches itself at its first step; nothing else in a training loop changes. Rows outside the batch
    are not touched: no decay, no momentum drift (for SGD and Adagrad that is the dense result; for Adam it is the idea
    of ``torch.optim.SparseAdam``).

    ``weight`` is a placeholder that receives the batch's rows and their gradient after the backward pass, for the
    optimizer, gradient clipping and gradient scaling to work on. ``state_dict`` has the whole table under its name, as
    ``nn.Embedding`` would.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: items in a row.
        padding_idx: a row that starts as zeros and gets no gradient.
        storage: where the table lives: ``device``, ``pinned``, ``pageable``, ``memmap`` or ``auto`` (see
            :meth:`speedswap.Table.create`).
        path: the directory of a memmap table.
        dtype: of the weights; torch's default dtype by default.
        init: initial values, one of :mod:`speedswap.init` or a function of ``torch.nn.init``; standard normal, as in
            ``nn.Embedding``, by default.
        seed: of the initial values; drawn from torch's random generator by default.
        name: of the table, for messages.
        table: an existing table to use; of the arguments above only the first three then matter.
        device: of the placeholder ``weight``, as ``.to(device)`` would set it; rows go to the device of the ids.

    Shape:
        ids of any shape, int32 or int64 → (*ids.shape, embedding_dim) on the ids' device.

    Raises:
        IdError: in the forward pass, for an id outside the table. Nothing was read.
        LostUpdateError: in the forward pass, if the training step before could not reach the table.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 16)
        >>> optimizer = torch.optim.Adam(items.parameters(), lr=0.01)
        >>> items(torch.tensor([[3, 997], [3, 4]])).square().sum().backward()
        >>> optimizer.step()
        >>> sorted(items.table.columns)
        ['exp_avg', 'exp_avg_sq', 'weight']
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        storage: str = "auto",
        path: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        init: initializers.Initializer | Callable[..., Any] | None = None,
        seed: int | None = None,
        name: str | None = None,
        table: Table | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx is {padding_idx}, but there are {num_embeddings} rows")
            padding_idx %= num_embeddings
        if table is None:
            table = Table.create(
                num_embeddings,
                embedding_dim,
                dtype=dtype or torch.get_default_dtype(),
                storage=storage,
                path=path,
                init=initializers.normal() if init is None else init,
                seed=int(torch.randint(2**62, ()).item()) if seed is None else seed,
                name=name,
                zero_row=padding_idx,
            )
        elif (table.num_embeddings, table.embedding_dim) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"table is {table!r}, but num_embeddings is {num_embeddings} and embedding_dim is {embedding_dim}; "
                "give the table's own"
            )
        if not table.dtype.is_floating_point and not table.dtype.is_complex:
            raise TypeError(f"dtype is {table.dtype}; an embedding is trained, so give a floating-point one")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.table = table
        self.weight = nn.Parameter(torch.zeros(1, embedding_dim, dtype=table.dtype, device=device))
        self._step = RowStep(table, self.weight, padding_idx)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        *,
        storage: str = "auto",
        path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> Embedding:
        """An embedding with the given rows, shape (num_embeddings, embedding_dim); as nn.Embedding has it."""
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; give (num_embeddings, embedding_dim)")
        module = cls(
            len(embeddings),
            embeddings.shape[1],
            padding_idx,
            storage=storage,
            path=path,
            dtype=embeddings.dtype,
            init=initializers.zeros(),
            seed=0,
            name=name,
        )
        module.table.write(0, embeddings.detach())
        module.weight.requires_grad_(not freeze)
        return module

    # The rows come from outside of any graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Tensor) -> Tensor:
        kernels.check_ids(ids, self.num_embeddings, f"table {self.table.name!r}")
        rows, local = kernels.unique(ids)
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return F.embedding(local, self.table._gather(rows, ["weight"], ids.device).weight)
        self._step.before_forward()
        block = self.table._gather(rows, None, ids.device)
        # A tensor of its own: a hook that led back to its leaf would keep both alive for ever.
        leaf = block.weight.detach().requires_grad_()
        receive = functools.partial(self._step.receive, block, self.table.version)
        leaf.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        return F.embedding(local, leaf)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process looks up in the table's files; a table in memory says that it cannot go there.
        return (_over, (self.table, self.padding_idx, self.training, self.weight.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        return copy.deepcopy(self.table, memo)  # type: ignore[return-value]  # which says what to do instead

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, table={self.table!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        if fn(torch.zeros(1, dtype=self.table.dtype)).dtype != self.table.dtype:
            raise TypeError(
                f"the rows of table {self.table.name!r} are {self.table.dtype} and stay so; give dtype= when the "
                "embedding is made, or convert what it returns"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.table.read()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        values = state_dict[key]
        wanted = (self.num_embeddings, self.embedding_dim)
        if tuple(values.shape) != wanted:
            error_msgs.append(f"size mismatch for {key}: the checkpoint has {tuple(values.shape)}, the table {wanted}")
            return
        self._step.abandon()
        self.table.write(0, values.detach().to(self.table.dtype))


def _over(table: Table, padding_idx: int | None, training: bool, requires_grad: bool) -> Embedding:
    """An embedding over a table that there is, as a pickled one is made again."""
    module = Embedding(table.num_embeddings, table.embedding_dim, padding_idx, table=table)
    module.weight.requires_grad_(requires_grad)
    return module.train(training)
