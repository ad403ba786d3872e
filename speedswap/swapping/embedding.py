"""``nn.Embedding`` over a table outside the compute device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from speedswap.swapping.arguments import refuse_torchs
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.lookup import look_up
from speedswap.swapping.table_module import TableModule


class Embedding(TableModule, nn.Embedding):  # type: ignore[misc]
    """A lookup table like ``nn.Embedding``, whose rows and optimizer state live in a :class:`speedswap.Table`.

    ``weight`` stands for the whole table: it has the table's shape, and initializers fill the table through it. Within
    an optimizer's step it is the batch's rows, and ``weight.grad`` their gradient. Any other use of it as a tensor
    raises :class:`~speedswap.errors.WeightError`, since the table's rows are not on the device.

    Forward gathers the batch's rows, weight and optimizer state together, to the device of the ids. The optimizer that
    holds ``weight`` attaches itself at its first step; nothing else in a training loop changes. Rows outside the batch
    are not touched: no weight decay, no momentum drift. For SGD without momentum and for Adagrad, without weight decay,
    the result equals dense training; for Adam it is the idea of ``torch.optim.SparseAdam``. Weight decay triggers
    warning SW401. :func:`speedswap.attach` with ``idle_rows="dense"`` makes the result that of dense training.

    ``state_dict`` has the whole table as ``weight``, as for ``nn.Embedding``, of which this is a subclass:
    ``isinstance(items, nn.Embedding)``.

    A training step that does not reach the table is an error in the next training forward pass: the weight is in no
    optimizer although one has stepped since, or its rows were changed in place outside an optimizer's step. Changes
    that increment no version counter (C++ code that writes through a raw pointer) go undetected.

    Threads may train different modules, and look up in any module under ``torch.no_grad()``. A module must be trained
    by one thread at a time, as in torch: backward passes of several threads add up, and an operation that would undo
    another thread's optimizer step raises :class:`~speedswap.errors.ThreadError`.

    Args:
        num_embeddings: number of rows.
        embedding_dim: items per row.
        padding_idx: a row that starts as zeros and gets no gradient.
        torchs: ``max_norm``, ``norm_type``, ``scale_grad_by_freq`` and ``sparse``, by position or by name: refused,
            with an alternative in the error.
        storage: where the rows live: :class:`speedswap.Device`, :class:`speedswap.Pinned`, :class:`speedswap.Pageable`,
            :class:`speedswap.Disk`, or :class:`speedswap.Ranks`: the processes of a job, which own them together; or
            the name of one (see :meth:`speedswap.Table.create`). In a torch.distributed job, a table that the ranks
            do not own together is trained only if its place has ``local_to_rank=True``.
        path: shorthand for a table on disk in this directory.
        dtype: the weights' dtype; torch's default dtype by default.
        init: initial values, one of :mod:`speedswap.init` or a function of ``torch.nn.init``; standard normal, as in
            ``nn.Embedding``, by default.
        seed: of the initial values; drawn from torch's random generator by default.
        name: the table's name, for messages.
        table: an existing table to use; then only the first three arguments above matter, and a place or a path is
            refused: pass it to :meth:`speedswap.Table.open` or :meth:`speedswap.Table.create`.
        device: the device of ``weight``, as ``.to(device)`` would set it; rows go to the device of the ids. On
            ``meta``, also by ``with torch.device("meta")`` or accelerate's ``init_empty_weights``, there is no table,
            and no memory is taken, until ``load_state_dict`` (or a library) loads rows, or ``to_empty`` draws the
            initial values.
        stored_dtype: ``torch.bfloat16`` or ``torch.float16``, to store float32 weights in half the bytes; or
            ``torch.int8``, with a scale per row, in a quarter, for lookup only. Looked-up rows are float32.
        state_dtype: the same for the optimizer's float32 state, without int8; state of one number per row stays
            float32. ``torch.bfloat16`` suits Adam; the squares of small gradients are out of float16's range.
        rounding: how trained values are rounded to these dtypes: ``"stochastic"`` (the default: small updates survive
            on average) or ``"nearest"``.
        id_map: an :class:`speedswap.IdMap` from keys to rows; ``num_embeddings`` is its ``capacity``, and the table has
            one more row: row 0, the padding row, for keys without a row. A training lookup (in training mode, of a
            weight that requires a gradient, with gradients enabled) adds new keys. A row that passes to another key is
            reset, and drops out of a step under way for its old key. The map is kept with the table: an existing
            ``table`` comes with its map.

    Shape:
        input: ids of any shape, int32 or int64 → (*ids.shape, embedding_dim) on the ids' device. With an id map: keys,
        as :meth:`speedswap.IdMap.lookup` takes them; the rows of strings are on ``weight``'s device.

    Raises:
        IdError: in the forward pass, for an id outside the table. Nothing was read.
        IdMapError, IdMapFullError: in the forward pass, if the map is frozen, or has no row for a new key.
        LostUpdateError: in the forward pass, if the training step before could not reach the table.
        RanksError: in a training forward pass, in a job of several processes without ``local_to_rank``.

    Example:
        >>> import torch, speedswap
        >>> items = speedswap.Embedding(1000, 16)
        >>> optimizer = torch.optim.Adam(items.parameters(), lr=0.01)
        >>> items(torch.tensor([[3, 997], [3, 4]])).square().sum().backward()
        >>> optimizer.step()
        >>> sorted(items.table.columns)
        ['exp_avg', 'exp_avg_sq', 'weight']
    """

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        *torchs: object,
        **settings: Any,
    ) -> Embedding:
        """Return an embedding with the given rows, as ``nn.Embedding.from_pretrained`` does.

        Args:
            embeddings: the rows, shape (num_embeddings, embedding_dim), of a floating-point dtype.
            freeze: True if they are for lookup only.
            padding_idx: a row that gets no gradient.
            torchs: as for the class.
            settings: keyword arguments of the class: ``storage``, ``path``, ``name``, ``stored_dtype`` and so on. Ranks
                that own the rows together must pass the same ones.

        Raises:
            ValueError, TypeError: a torch argument is not supported, or the rows are not a floating-point matrix.
                Nothing was created.

        Example:
            >>> import torch, speedswap
            >>> rows = torch.tensor([[1.0, -2.0], [0.0, 0.1]])
            >>> small = speedswap.Embedding.from_pretrained(rows, stored_dtype=torch.int8)  # a quarter of the bytes
            >>> small(torch.tensor([1]))
            tensor([[0.0000, 0.1000]])
        """
        refuse_torchs("from_pretrained", torchs, settings)
        return cls._with_rows(embeddings, freeze, padding_idx, **settings)

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:
        """Look rows up.

        Args:
            input: ids, int32 or int64, any shape, on the device that needs the rows; or keys, with an id map.

        Returns:
            Shape (*input.shape, embedding_dim).

        Raises:
            IdError, LostUpdateError, RanksError: as for the class.
        """
        if self._keyed is None:
            return look_up(*self._look_up(input))
        return look_up(*self._of_one_commit(lambda: self._look_up(self._rows_of(input))))
