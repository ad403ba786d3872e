"""Softmax over all rows of a table, a chunk at a time, and the ranks of targets among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speedswap._words import a_kind
from speedswap.errors import WeightError
from speedswap.losses.sampled import IGNORE_INDEX, LossBatch, call_of_ranks, kept, wide
from speedswap.swapping.batch_rows import GradientOfAll
from speedswap.swapping.graphs import outside_graphs
from speedswap.swapping.lookup import look_up_with_all
from speedswap.swapping.scoring import Exclude, Excluded, Exclusions, Pieces, exclusions_of, pieces_for, read_rows
from speedswap.tables import Table
from speedswap.tables.record import count


@outside_graphs
def full_softmax(
    hidden: Tensor,
    targets: Tensor,
    items: Any,
    *,
    bias: Any = None,
    chunk: int | None = None,
    ignore_index: int | None = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    r"""Return the cross-entropy of the targets among all rows: ``F.cross_entropy(hidden @ all_rows.T, targets)``.

    Rows are copied a chunk at a time, in the forward pass and again in the backward pass, so that memory is bounded as
    for :meth:`speedswap.Embedding.score`. The gradient is exact. If the rows are trained, the next step of their
    optimizer moves all of them, a chunk at a time with its state: it computes a chunk's gradient from the rows, from
    ``hidden`` and from the loss's normalizers, so that the gradient of all rows never exists. ``weight.grad`` has the
    lookups' part alone, and must not be changed between ``backward()`` and ``step()``.

    Args:
        hidden: shape (\*samples, dim), of a floating-point dtype, converted to the table's; products of half precision
            are computed in float32.
        targets: ids, int32 or int64, shape (\*samples,), or (\*samples, n) for several targets per sample, each of the
            same probability.
        items: a :class:`speedswap.Embedding`, or a table of an :class:`speedswap.EmbeddingCollection`
            (``tables.embeddings["item"]``), whose ``padding_idx`` is left out of the sum: as a target it has the
            probability 0, so that the loss is inf (to skip such samples, give ``ignore_index=padding_idx``); or the
            :class:`speedswap.Table` of any, all of whose rows count, as constants.
        bias: the same, of width 1, for one bias per row; beside trained rows, a copy of it is kept until the step.
        chunk: rows to copy at a time; by default chosen from the bytes per row and the number of samples.
        ignore_index, reduction: as for :func:`sampled_softmax`.

    Returns:
        As :func:`sampled_softmax` does. Ranks that own the rows must call this together, and each reads every row.

    Raises:
        WeightError: the rows are trained, but ranks own them; or, in the backward pass, the table has changed since the
            forward pass.
        LostUpdateError, OptimizerError: in the optimizer's step, if the table or ``weight.grad`` has changed since the
            backward pass, or the optimizer cannot step rows one chunk after the other.
        ValueError, TypeError: a shape, dtype or setting does not fit, or ``items`` has an id map.
        IdError: a target is outside the table. In all cases nothing was changed.

    Source: the logarithm of a sum of exponentials, one chunk after the other, is that of Milakov and Gimelshein, Online
    normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, speedswap
        >>> from speedswap.losses import full_softmax
        >>> items = speedswap.Embedding.from_pretrained(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        >>> hidden, targets = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1])
        >>> full_softmax(hidden, targets, items)
        tensor(0.2513)
        >>> torch.nn.functional.cross_entropy(hidden @ items.read().T, targets)
        tensor(0.2513)
    """
    with call_of_ranks(items):
        batch = LossBatch.of(hidden, targets, items, ignore_index, reduction)
        rows = AllRows.of(items, bias, batch.hidden, chunk, trains=torch.is_grad_enabled())
        queries = rows.queries_of(batch.hidden)
        ids = targets[kept(targets, ignore_index).to(targets.device)].to(queries.device)
        gradients: list[list[GradientOfAll]] = [[] for _ in rows.tables]
        leaves, found = rows.look_up(ids, queries, gradients)
        of_targets = (found * batch.at_targets(queries)).sum(1)
        if rows.padding_idx is not None:  # which has no share of the sum: the probability 0
            of_targets = of_targets.masked_fill(ids == rows.padding_idx, -math.inf)
        total: Tensor = _LogSumExp.apply(queries, rows, gradients, *leaves)  # type: ignore[no-untyped-call]
        return batch.reduced(total - batch.mean_of_targets(of_targets), reduction)


@outside_graphs
@torch.no_grad()
def target_ranks(
    hidden: Tensor, targets: Tensor, items: Any, *, bias: Any = None, exclude: Exclude = None, chunk: int | None = None
) -> Tensor:
    r"""Return the rank of each sample's target among all rows by inner product, 1 for the largest, without a gradient.

    ``(1 / ranks).mean()`` is the mean reciprocal rank, ``(ranks <= k).float().mean()`` the hit rate at k. A row that
    ties with the target counts half, so that equal scores are no success.

    Args:
        hidden, items, bias, chunk: as for :func:`full_softmax`; rows may be trained.
        targets: ids, int32 or int64, shape (\*samples,).
        exclude: rows that do not compete, as for :meth:`speedswap.Embedding.score`, with one query per sample: of
            "filtered" ranks, every known answer. Targets may be among them.

    Returns:
        Shape (\*samples,), float32. A target whose score is NaN comes last.

    Raises:
        ValueError, TypeError, IdError: as for :func:`full_softmax`.

    Source: ties as in Berrendorf et al., On the ambiguity of rank-based evaluation of entity alignment or link
    prediction methods, 2020 ("realistic").

    Example:
        >>> import torch, speedswap
        >>> from speedswap.losses import target_ranks
        >>> items = speedswap.Embedding.from_pretrained(torch.tensor([[1.0], [3.0], [2.0], [5.0]]))
        >>> hidden, targets = torch.ones(2, 1), torch.tensor([3, 0])
        >>> target_ranks(hidden, targets, items), target_ranks(hidden, targets, items, exclude=torch.tensor([1, 3]))
        (tensor([1., 4.]), tensor([1., 2.]))
    """
    with call_of_ranks(items):
        batch = LossBatch.of(hidden, targets, items, None, "none")
        if targets.shape != batch.has_target.shape:
            raise ValueError(
                f"targets has shape {tuple(targets.shape)}; give {tuple(batch.has_target.shape)}, one each"
            )
        rows = AllRows.of(items, bias, batch.hidden, chunk, trains=False)
        queries, ids = rows.queries_of(batch.hidden), targets.reshape(-1)
        wanted = (rows.look_up(ids.to(queries.device), queries)[1] * queries).sum(1, keepdim=True)
        given = rows.left_out(exclude, hidden.device)
        own = torch.arange(len(ids), device=hidden.device), ids.long().to(hidden.device)
        given = Exclusions(*given[:2], *(torch.cat(pair) for pair in zip(given[2:], own, strict=True)))
        ranks = queries.new_ones(len(ids), dtype=torch.float32)
        for _, some, _, scores in rows.scores(queries, given):
            above = ~(scores <= wanted[some]) & (scores != -math.inf)  # NaN is above everything
            ranks[some] += above.sum(1) + (scores == wanted[some]).sum(1) / 2
        return ranks.view(hidden.shape[:-1])


class AllRows(NamedTuple):
    """All rows of a table, with their biases as one more item each; made by :meth:`of`.

    Attributes:
        tables: the rows; and their biases, of width 1, if there are any.
        trained: the embedding of each table, or the collection's table, if its rows are trained; else None.
        padding_idx: a row that is left out.
        pieces: the rows and queries whose scores exist at a time.
    """

    tables: tuple[Table, ...]
    trained: tuple[Any, ...]
    padding_idx: int | None
    pieces: Pieces

    @classmethod
    def of(cls, items: Any, bias: Any, queries: Tensor, chunk: int | None, *, trains: bool) -> AllRows:
        """Check items, bias and chunk of :func:`full_softmax`, for queries of shape (n, dim); rows may be trained."""
        given = {"items": items} if bias is None else {"items": items, "bias": bias}
        tables = tuple(_table_of(each, name) for name, each in given.items())
        trained = tuple(_trained(each, name) if trains else None for name, each in given.items())
        table = tables[0]
        for each in tables[1:]:
            if (len(each), each.embedding_dim) != (len(table), 1):
                raise ValueError(f"bias is {each!r}; give an embedding of width 1 with {len(table)} rows, as items has")
        chunk = None if chunk is None else count("chunk", chunk)
        if table.ranks is not None:  # they read the same chunks, whatever the number of their samples
            chunk = pieces_for(table, table.num_embeddings, 1, 1, queries.device, chunk).chunk
        pieces = pieces_for(table, table.num_embeddings, len(queries), 1, queries.device, chunk)
        return cls(tables, trained, getattr(items, "padding_idx", None), pieces)

    def queries_of(self, hidden: Tensor) -> Tensor:
        """Return hidden vectors in the dtype of scores, with an item of 1 for a bias."""
        return F.pad(wide(hidden.to(self.tables[0].dtype)), (0, len(self.tables) - 1), value=1.0)

    def look_up(
        self, ids: Tensor, like: Tensor, gradients: Sequence[list[GradientOfAll]] = ()
    ) -> tuple[list[Tensor | None], Tensor]:
        """Look rows up, on the ids' device.

        Args:
            ids: shape (n,).
            like: of the dtype to return.
            gradients: for each table, as for :func:`look_up_with_all`.

        Returns:
            The leaves of trained rows, or None; and the rows, shape (n, width), biases last.
        """
        leaves: list[Tensor | None] = []
        found = []
        for i, module in enumerate(self.trained):
            leaf, rows = (
                (None, read_rows(self.tables[i], ids))
                if module is None
                else look_up_with_all(module, ids, gradients[i])
            )
            leaves.append(leaf)
            found.append(rows.to(like.dtype))
        return leaves, torch.cat(found, 1)

    def gradient_of_all(self, place: int, of: Callable[[Tensor, Tensor], Tensor]) -> GradientOfAll:
        """Return the gradient of a table's rows, by its place among them, as its step takes it."""
        table = self.tables[place]
        first = table.store.facts.first_row  # of a collection's table among those that step together
        return GradientOfAll(range(first, first + len(table)), of, self.pieces.chunk, table.version)

    def left_out(self, exclude: Exclude, device: torch.device) -> Exclusions:
        """Return the rows that do not count: the padding row, and what the caller excludes."""
        return exclusions_of(exclude, self.pieces, device, self.padding_idx, self.tables[0].name)

    def scores(self, queries: Tensor, left_out: Exclusions) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Iterate over chunks of rows and groups of queries: the rows' and queries' numbers, the rows, the scores.

        Args:
            queries: shape (n, width), as :meth:`queries_of` returns them.
            left_out: rows whose scores are -inf.
        """
        excluded = Excluded(self.pieces, *left_out)
        for i, chunk in enumerate(self.pieces.chunks()):
            with ExitStack() as held, torch.autocast(queries.device.type, enabled=False):
                between = [each.rows_between(chunk.start, chunk.stop, queries.device) for each in self.tables]
                parts = [held.enter_context(each).to(queries.dtype) for each in between]
                weights = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                if weights.shape[1] == 1:  # a sum over items that lie apart, as they do in memory, has other last bits
                    weights = weights.contiguous()
                for j, some in enumerate(self.pieces.groups()):
                    scores = torch.mm(queries[some], weights.T)
                    excluded.blank(scores, i, j)
                    yield chunk, some, weights, scores


class _LogSumExp(torch.autograd.Function):
    """The logarithm of the sum of exponentials of all rows' scores; the backward pass computes the scores again.

    Args:
        queries, rows: as of :meth:`AllRows.scores`.
        gradients: gets the gradient of each table's rows in the backward pass.
        leaves: rows of the tables whose gradients arrive after the backward pass of this.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, rows: AllRows, gradients: Sequence[list[GradientOfAll]], *leaves: Tensor | None
    ) -> Tensor:
        total = queries.new_full((len(queries),), -math.inf)
        for _, some, _, scores in rows.scores(queries, rows.left_out(None, queries.device)):
            total[some] = torch.logaddexp(total[some], scores.logsumexp(1))
        ctx.save_for_backward(queries, total)
        ctx.rows, ctx.gradients, ctx.versions = rows, gradients, [table.version for table in rows.tables]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, total = (each.detach() for each in ctx.saved_tensors)
        rows: AllRows = ctx.rows
        if [table.version for table in rows.tables] != ctx.versions:
            remedy = "which reads rows in both; call backward() before the optimizer's step"
            raise WeightError(f"table {rows.tables[0].name!r} was written after full_softmax's forward pass, {remedy}")
        found = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        of_biases = queries.new_zeros(len(rows.tables[0])) if any(rows.trained[1:]) else None
        if found is not None or of_biases is not None:
            for chunk, some, weights, scores in rows.scores(queries, rows.left_out(None, queries.device)):
                shares = scores.sub_(total[some].unsqueeze(1)).exp_()
                if of_biases is not None:
                    of_biases[chunk].addmv_(shares.T, grad[some])
                if found is not None:
                    found[some].addmm_(shares, weights)
        if rows.trained[0] is not None:
            biases = rows.tables[1].read().to(queries) if len(rows.tables) > 1 else None
            of_items = _GradientOfItems(queries, total, grad, biases, rows.padding_idx, rows.pieces.group)
            ctx.gradients[0][:] = [rows.gradient_of_all(0, of_items.of)]
        if of_biases is not None:
            of_each = of_biases.to(rows.tables[1].dtype).unsqueeze(1)
            ctx.gradients[1][:] = [rows.gradient_of_all(1, lambda ids, _: of_each[ids])]
        return None if found is None else found.mul_(grad.unsqueeze(1)), None, None, *(None for _ in rows.tables)


class _GradientOfItems(NamedTuple):
    """The gradient of any rows of a table by the logarithm of the sum of exponentials of all rows' scores.

    Attributes:
        queries: shape (n, width).
        total, grad: that logarithm, and the gradient by it, shape (n,).
        biases: of all rows, shape (rows, 1), or None.
        padding_idx: a row that is left out.
        group: the number of queries whose scores exist at a time.
    """

    queries: Tensor
    total: Tensor
    grad: Tensor
    biases: Tensor | None
    padding_idx: int | None
    group: int

    def of(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the rows of ids, shape (n,), with these weights."""
        wanted = [weights.to(self.queries.dtype), *([] if self.biases is None else [self.biases[ids]])]
        rows, found = torch.cat(wanted, 1), self.queries.new_zeros(len(ids), self.queries.shape[1])
        with torch.autocast(weights.device.type, enabled=False):
            for start in range(0, len(self.queries), self.group):
                some = slice(start, start + self.group)
                shares = torch.mm(self.queries[some], rows.T).sub_(self.total[some].unsqueeze(1)).exp_()
                found.addmm_(shares.mul_(self.grad[some].unsqueeze(1)).T, self.queries[some])
        if self.padding_idx is not None:
            found[ids == self.padding_idx] = 0
        return found[:, : weights.shape[1]].to(weights.dtype)


def _table_of(given: Any, name: str) -> Table:
    """Return the table of an argument, all of whose rows count.

    Raises:
        ValueError: it has an id map, some of whose rows belong to no key.
        TypeError: it has no such rows, or complex ones.
    """
    table = getattr(given, "table", given)
    if not isinstance(table, Table) or table.dtype.is_complex:
        raise TypeError(f"{name} is {a_kind(given)}; give an embedding of speedswap's or a Table, of real numbers")
    if table is not given and given.id_map is not None:
        remedy = f"to count them, give {name}.id_map.lookup(keys) as targets and {name}.table"
        raise ValueError(f"{name} has an id map, and rows that are of no key yet; {remedy}")
    return table


def _trained(given: Any, name: str) -> Any:
    """Return an argument if its rows are trained, an embedding or a collection's table; else None.

    Raises:
        WeightError: ranks own them.
    """
    if isinstance(given, Table) or not getattr(given, "group", given).weight.requires_grad:
        return None
    if given.table.ranks is None:
        return given
    raise WeightError(
        f"{name} has rows that are trained, of table {given.table.name!r}, but ranks own them, and full_softmax trains "
        f"all rows in one process; train them by sampled_softmax, give {name}.table to train hidden alone, or call it "
        "under torch.no_grad()"
    )
