"""``nn.Embedding`` and ``nn.EmbeddingBag`` over a table outside the compute device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedswap import kernels
from speedswap.collectives import of_all_ranks
from speedswap.swapping.arguments import refuse_torchs, require_flag
from speedswap.swapping.collections.jagged import keyed_features
from speedswap.swapping.graphs import in_transform, outside_graphs
from speedswap.swapping.lookup import look_up, pool
from speedswap.swapping.table_module import TableModule
from speedswap.tables.keys import as_keys


class Embedding(TableModule, nn.Embedding):  # type: ignore[misc]
    """A lookup table like ``nn.Embedding``, whose rows and optimizer state live in a :class:`speedswap.Table`.

    ``weight`` stands for the whole table: it has the table's shape, and initializers fill the table through it. Within
    an optimizer's step it is the batch's rows, and ``weight.grad`` their gradient. Any other use of it as a tensor
    raises :class:`~speedswap.errors.WeightError`, since the table's rows are not on the device.

    Forward gathers the batch's rows, weight and optimizer state together, to the device of the ids. The optimizer that
    holds ``weight`` attaches itself at its first step; nothing else in a training loop changes. Rows outside the batch
    are not touched: no weight decay, no momentum drift. For SGD without momentum and for Adagrad, without weight decay,
    the result equals dense training; for Adam it is like ``torch.optim.SparseAdam``. Weight decay triggers
    warning SW401. :func:`speedswap.attach` with ``idle_rows="dense"`` makes the result that of dense training.

    ``state_dict`` has the whole table as ``weight``, as in ``nn.Embedding``, which is the base class.

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
        torchs: ``max_norm``, ``norm_type``, ``scale_grad_by_freq`` and ``sparse``, by position or by name; each is
            refused with an alternative.
        storage: where the rows live: :class:`speedswap.Device`, :class:`speedswap.Pinned`, :class:`speedswap.Pageable`,
            :class:`speedswap.Disk`, or :class:`speedswap.Ranks` (the processes of a job own them together); or a
            place's name (see :meth:`speedswap.Table.create`). In a torch.distributed job, a table that ranks do not own
            together can be trained only if its place has ``local_to_rank=True``.
        path: shorthand for a table on disk in this directory.
        dtype: the weights' dtype; torch's default dtype by default.
        init: initial values, one of :mod:`speedswap.init` or a function of ``torch.nn.init``; standard normal, as in
            ``nn.Embedding``, by default.
        seed: of the initial values; drawn from torch's random generator by default.
        name: the table's name, for messages.
        table: an existing table to use; then only the first three arguments above matter. Pass a place or a path to
            :meth:`speedswap.Table.open` or :meth:`speedswap.Table.create` instead.
        device: the device of ``weight``, as ``.to(device)`` would set it; rows go to the device of the ids. On
            ``meta``, also by ``with torch.device("meta")`` or accelerate's ``init_empty_weights``, there is no table,
            and no memory is taken, until ``load_state_dict`` (or a library) loads rows, or ``to_empty`` draws the
            initial values.
        stored_dtype: ``torch.bfloat16`` or ``torch.float16``, to store float32 weights in half the bytes; or
            ``torch.int8``, with a scale per row, in a quarter, for lookup only. Looked-up rows are float32.
        lookup_dtype: ``torch.bfloat16`` or ``torch.float16``, for a model in that dtype whose rows are trained in
            float32: lookups return it, and ``weight.dtype`` reports it.
        state_dtype: as ``stored_dtype``, for the optimizer's float32 state, without int8; state of one number per row
            stays float32. ``torch.bfloat16`` suits Adam; the squares of small gradients are out of float16's range.
        rounding: how trained values are rounded to these dtypes: ``"stochastic"`` (the default: small updates survive
            on average) or ``"nearest"``.
        id_map: an :class:`speedswap.IdMap` from keys to rows; ``num_embeddings`` is its ``capacity``, and the table has
            one more row: row 0, the padding row, for keys without a row. A training lookup (in training mode, of a
            weight that requires a gradient, with gradients enabled) adds new keys. A row that passes to another key is
            reset, and its old key's gradient is dropped. The map is stored with the table: an existing ``table`` comes
            with its map.

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
        r"""Look rows up.

        Args:
            input: ids, int32 or int64, any shape, on the device that needs the rows; or keys, with an id map.

        Returns:
            Shape (\*input.shape, embedding_dim), of ``lookup_dtype``.

        Raises:
            IdError, LostUpdateError, RanksError: as for the class.
        """
        if self._keyed is None:
            return look_up(*self._look_up(input), self.lookup_dtype)
        found = self._of_one_commit(lambda: self._look_up(self._rows_of(input)))
        return look_up(*found, self.lookup_dtype)


_MODES = ("sum", "mean", "max")


class EmbeddingBag(TableModule, nn.EmbeddingBag):  # type: ignore[misc]
    """The sum, mean or maximum over bags of rows, like ``nn.EmbeddingBag``, from a table outside the device.

    ``weight`` stands for the whole table: it has the table's shape, is the batch's rows within an optimizer's step, and
    refuses any other use as a tensor, as that of :class:`speedswap.Embedding` does.

    A bag's rows are never materialized: they are summed as they are read, forward and backward. With an id map,
    ``input`` holds keys, of any kind that :class:`speedswap.Embedding` takes; keys without a row count in no bag.

    Args:
        num_embeddings: number of rows.
        embedding_dim: items per row.
        max_norm, norm_type, scale_grad_by_freq, sparse: torch's; refused, with an alternative in the error.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: True if offsets have one more item, the number of ids.
        padding_idx: a row that starts as zeros, gets no gradient, and counts in no bag.
        arguments: the keyword arguments of :class:`speedswap.Embedding`.

    Shape:
        - input (bags, ids per bag), or (ids,) with offsets (bags,): each bag's start in input, ascending from 0.
          Both int32 or int64. A bag without ids gives zeros.
        - per_sample_weights, for mode "sum" only: input's shape and ``weight.dtype``; a factor per id. Gradients go to
          it too.
        - → (bags, embedding_dim) on input's device.

        A TorchRec ``KeyedJaggedTensor`` may replace all three, and so may any object with its ``keys()``, ``values()``,
        ``stride()``, ``offsets()`` or ``lengths()`` and, optionally, ``weights_or_none()``. Its keys are looked up in
        this one table: → (stride, keys · embedding_dim), key by key, as in TorchRec's ``KeyedTensor``.

    Raises:
        IdError: in the forward pass, for an id outside the table. Nothing was read.
        ValueError, TypeError: in the forward pass, for offsets or weights that do not fit. Nothing was read.
        LostUpdateError: in the forward pass, if the training step before could not reach the table.
        RanksError: in a training forward pass, in a job of several processes without ``local_to_rank``.

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
        require_flag("include_last_offset", include_last_offset)
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
            input: ids, or keys; or a ``KeyedJaggedTensor``, which includes offsets and weights.
            offsets: the start of each bag, for ids of one dimension.
            per_sample_weights: a factor per id.
        """
        keys = input
        if self._keyed is not None and not hasattr(input, "stride"):
            keys = as_keys(input, self._keyed.id_map.keys)
            input = keys.numbers.new_empty(keys.shape, device=self.weight.device)
        if isinstance(input, Tensor):
            bags = bags_of(input, offsets, per_sample_weights, self.include_last_offset)
            num_keys, stride = 1, len(bags.offsets) - 1
        else:
            bags, num_keys, stride = keyed_bags(input, offsets, per_sample_weights)
            keys = bags.ids
        self._check_weights(bags)
        pooled = self._of_one_commit(lambda: self._pooled(bags._replace(ids=self._rows_of(keys)), num_keys or 1))
        # The view changes nothing unless there are no keys, and so no bags to lay out.
        return pooled if num_keys else pooled.view(stride, 0)

    def _check_weights(self, bags: Bags) -> None:
        if bags.weights is None:
            return
        if self.mode != "sum":
            raise ValueError(f'per_sample_weights are given, but mode is {self.mode!r}; they go with mode="sum"')
        if bags.weights.dtype != (wanted := self.lookup_dtype or self.table.dtype):
            raise TypeError(
                f"per_sample_weights has dtype {bags.weights.dtype}, but the rows of table {self.table.name!r} are "
                f"{wanted}; convert it with per_sample_weights.to({wanted})"
            )

    def _pooled(self, bags: Bags, features: int) -> Tensor:
        weight, local = self._look_up(bags.ids)
        counts = None if self.padding_idx is None else bags.ids.reshape(-1) != self.padding_idx
        factors = None if bags.weights is None else bags.weights.to(weight.dtype)
        pooled = pool(weight, local, bags.offsets, self.mode, factors, counts, features=features)
        return pooled.to(self.lookup_dtype or pooled.dtype)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "mode": self.mode, "include_last_offset": self.include_last_offset}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


_INDEX = (torch.int32, torch.int64)


class Bags(NamedTuple):
    """Ids of all bags, one after the other.

    Attributes:
        ids: shape (count,), or (bags, ids per bag).
        offsets: int64, shape (bags + 1,), ascending from 0 to count, on the ids' device.
        weights: shape (count,), or None.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


def bags_of(ids: Tensor, offsets: Tensor | None, weights: Tensor | None, include_last_offset: bool) -> Bags:
    """Read the arguments of ``nn.EmbeddingBag``.

    Raises:
        ValueError, TypeError: they do not fit together; the message says how.
    """
    _require_dense(ids, "input")
    if weights is not None:
        _require_dense(weights, "per_sample_weights")
        if weights.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights has shape {tuple(weights.shape)}, but input has {tuple(ids.shape)}; "
                "give one per id"
            )
        if weights.device != ids.device:
            raise ValueError(f"per_sample_weights is on {weights.device}, but input on {ids.device}; move one of them")
        weights = weights.reshape(-1)
    if ids.ndim == 2:
        if offsets is not None:
            raise ValueError(
                f"offsets is given, but input has shape {tuple(ids.shape)}, whose rows are the bags; omit one of them"
            )
        num_bags, size = ids.shape
        return Bags(ids, torch.arange(num_bags + 1, device=ids.device) * size, weights)
    if ids.ndim != 1:
        raise ValueError(f"input has shape {tuple(ids.shape)}; give (bags, ids per bag), or (ids,) with offsets")
    if offsets is None:
        raise ValueError("offsets is None, but input has one dimension; give the start of each bag in it")
    return Bags(ids, _checked(offsets, ids, include_last_offset), weights)


def keyed_bags(keyed: Any, offsets: Tensor | None, weights: Tensor | None) -> tuple[Bags, int, int]:
    """Read an object with the methods of TorchRec's KeyedJaggedTensor.

    Returns:
        The bags, key after key; the number of keys, and of bags of each.

    Raises:
        ValueError, TypeError: it lacks them, or their results do not fit together; the message says how.
    """
    found = keyed_features("input", keyed, "a tensor of ids")
    if offsets is not None or weights is not None:
        raise ValueError("input is keyed and has offsets and weights of its own; pass neither of them beside it")
    _require_dense(found.ids, "input.values()")
    bags = bags_of(found.ids, found.checked_offsets("input"), found.weights, True)
    return bags, len(found.keys), found.stride


def _require_dense(thing: Any, name: str) -> None:
    if not isinstance(thing, Tensor) or not in_transform():  # where torch's own operators get a stand-in
        kernels.require_dense(thing, name)


def _checked(offsets: Tensor, ids: Tensor, include_last_offset: bool) -> Tensor:
    """Return the start of each bag, and the number of ids, int64, after checking that they ascend from 0."""
    _require_dense(offsets, "offsets")
    if offsets.dtype not in _INDEX:
        raise TypeError(f"offsets has dtype {offsets.dtype}; convert it to torch.int64 or torch.int32")
    if offsets.ndim != 1:
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}; give one dimension: the start of each bag")
    if offsets.device != ids.device:
        raise ValueError(f"offsets is on {offsets.device}, but input on {ids.device}; move one of them")
    begins = offsets.long()
    if not include_last_offset:
        begins = torch.cat([begins, begins.new_full((1,), len(ids))])
    if len(begins) == 0:
        raise ValueError("offsets is empty, but include_last_offset is set; its last item is the number of ids")
    falls = begins[1:] < begins[:-1]
    first, last, falling = torch.stack([begins[0], begins[-1], falls.any().long()]).tolist()
    if first != 0 and len(begins) == 1 and not include_last_offset:
        raise ValueError(f"offsets is empty, but input has {len(ids)} ids; begin the first bag at 0")
    if first != 0:
        raise ValueError(f"offsets[0] is {first}; the first bag begins at 0")
    if falling:
        position = int(falls.nonzero()[0])
        if position + 1 == len(offsets):
            raise ValueError(
                f"offsets[{position}] is {int(begins[position])}, but input has {last} ids; a bag begins inside of them"
            )
        raise ValueError(
            f"offsets[{position + 1}] is {int(begins[position + 1])} after {int(begins[position])}; "
            "bags lie one after the other, so they ascend"
        )
    if last != len(ids):
        raise ValueError(
            f"offsets[{len(offsets) - 1}] is {last}, but input has {len(ids)} ids; "
            "with include_last_offset the last one is their number"
        )
    return begins
