"""``nn.EmbeddingBag`` over a table outside the compute device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speedswap.collectives import of_all_ranks
from speedswap.swapping.bags import Bags, bags_of, keyed_bags
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.lookup import pool
from speedswap.swapping.table_module import TableModule

__all__ = ["EmbeddingBag"]

_MODES = ("sum", "mean", "max")


class EmbeddingBag(TableModule, nn.EmbeddingBag):  # type: ignore[misc]
    """The sum, mean or maximum over bags of rows, like ``nn.EmbeddingBag``, from a table outside the device.

    ``weight`` stands for the whole table: it has the table's shape, is the batch's rows within an optimizer's step, and
    refuses any other use as a tensor, as that of :class:`speedswap.Embedding` does.

    The rows of a bag are never side by side in memory: they are added up as they are read, forward and backward.
    With an id map, ``input`` holds keys, int32 or int64; those without a row count in no bag.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: items per row.
        max_norm, norm_type, scale_grad_by_freq, sparse: torch's; refused with an alternative.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: True if offsets have one more item, the number of ids.
        padding_idx: a row that starts as zeros, gets no gradient, and counts in no bag.
        arguments: the keyword arguments of :class:`speedswap.Embedding`.

    Shape:
        - input (bags, ids per bag), or (ids,) with offsets (bags,): each bag's start in input, ascending from 0.
          Both int32 or int64. A bag without ids gives zeros.
        - per_sample_weights, for mode "sum" only: input's shape and the table's dtype; a factor per id. Gradients go to
          it too.
        - → (bags, embedding_dim) on input's device.

        A TorchRec ``KeyedJaggedTensor`` may stand for all three, and so may anything else with its ``keys()``,
        ``values()``, ``stride()``, ``offsets()`` or ``lengths()`` and, if it likes, ``weights_or_none()``. Its keys are
        looked up in this one table: → (stride, keys · embedding_dim), key after key, as in TorchRec's ``KeyedTensor``.

    Raises:
        IdError: in the forward pass, for an id outside the table. Nothing was read.
        ValueError, TypeError: in the forward pass, for offsets or weights that do not fit. Nothing was read.
        LostUpdateError: in the forward pass, if the training step before could not reach the table.
        RanksError: in the forward pass, if it is to be trained in a job of several processes without ``local_to_rank``.

    Example:
        >>> import torch, speedswap
        >>> words = speedswap.EmbeddingBag(1000, 16, mode="sum")
        >>> words(torch.tensor([5, 7, 5, 999]), offsets=torch.tensor([0, 2, 2])).shape  # [5, 7], [], [5, 999]
        torch.Size([3, 16])
    """

    @of_all_ranks
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **arguments: Any,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f'mode is {mode!r}; choose "sum", "mean" or "max"')
        self.mode = mode
        self.include_last_offset = include_last_offset
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, **arguments
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> EmbeddingBag:
        """Return a bag over the given rows, as ``nn.EmbeddingBag.from_pretrained`` does.

        The arguments are those of :meth:`speedswap.Embedding.from_pretrained` and of the class.
        """
        return cls._with_rows(
            embeddings,
            freeze,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            mode=mode,
            include_last_offset=include_last_offset,
            **settings,
        )

    @outside_graphs
    def forward(
        self, input: Tensor | Any, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look bags up; the arguments' shapes and the errors are those of the class.

        Args:
            input: ids; or a ``KeyedJaggedTensor``, which has offsets and weights of its own.
            offsets: the start of each bag, for ids of one dimension.
            per_sample_weights: a factor per id.
        """
        keyed = None if isinstance(input, Tensor) else keyed_bags(input, offsets, per_sample_weights)
        bags = keyed.bags if keyed else bags_of(input, offsets, per_sample_weights, self.include_last_offset)
        self._check_weights(bags)
        num_keys = keyed.num_keys or 1 if keyed else 1
        pooled = self._of_one_commit(lambda: self._pooled(bags._replace(ids=self._rows_of(bags.ids)), num_keys))
        if keyed is None:
            return pooled
        # The view changes nothing unless there are no keys, and so no bags to lay out.
        return pooled.view(keyed.stride, keyed.num_keys * self.embedding_dim)

    def _check_weights(self, bags: Bags) -> None:
        if bags.weights is None:
            return
        if self.mode != "sum":
            raise ValueError(f'per_sample_weights are given, but mode is {self.mode!r}; they go with mode="sum"')
        if bags.weights.dtype != self.table.dtype:
            raise TypeError(
                f"per_sample_weights has dtype {bags.weights.dtype}, but the rows of table {self.table.name!r} are "
                f"{self.table.dtype}; convert it with per_sample_weights.to({self.table.dtype})"
            )

    def _pooled(self, bags: Bags, features: int) -> Tensor:
        weight, local = self._look_up(bags.ids)
        local, offsets, factors = local.reshape(-1), bags.offsets, bags.weights
        if self.padding_idx is not None:
            counts = bags.ids.reshape(-1) != self.padding_idx
            if counts.device.type != "cpu":
                return pool(weight, local, offsets, self.mode, factors, counts, features=features)
            local = local[counts]
            factors = None if factors is None else factors[counts]
            # Of the ids before a bag, those that count.
            before = torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])
            offsets = before[offsets]
        return pool(weight, local, offsets, self.mode, factors, features=features)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "mode": self.mode, "include_last_offset": self.include_last_offset}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
