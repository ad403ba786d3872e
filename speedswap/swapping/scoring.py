"""Rows of a table outside training: copies, and top-k inner products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.errors import IdError
from speedswap.swapping.graphs import outside_graphs
from speedswap.tables import Table
from speedswap.tables.record import count

Exclude: TypeAlias = "Tensor | Sequence[Tensor] | None"


class Pieces(NamedTuple):
    """Chunks of a table's rows and groups of queries; scores exist for one of each at a time."""

    num_rows: int
    num_queries: int
    chunk: int
    group: int

    def chunks(self) -> Iterator[slice]:
        """Iterate over the rows of each chunk."""
        return (slice(i, min(i + self.chunk, self.num_rows)) for i in range(0, self.num_rows, self.chunk))

    def groups(self) -> Iterator[slice]:
        """Iterate over the queries of each group."""
        return (slice(i, min(i + self.group, self.num_queries)) for i in range(0, self.num_queries, self.group))


class Excluded:
    """An index of the excluded rows by chunk of rows and group of queries.

    Args:
        pieces: the chunks and groups.
        mask: bool, shape (num_rows,): rows excluded for all queries; or None.
        ids: int64, shape (n,), in any order: further rows excluded for all queries.
        queries, theirs: int64, shape (m,), in any order: query ``queries[i]`` does not get row ``theirs[i]``.
    """

    def __init__(self, pieces: Pieces, mask: Tensor | None, ids: Tensor, queries: Tensor, theirs: Tensor) -> None:
        self._pieces = pieces
        self._mask = mask
        num_chunks = -(-pieces.num_rows // pieces.chunk)
        num_groups = max(1, -(-pieces.num_queries // pieces.group))
        self._num_groups = num_groups
        self._ids, _ = ids.sort()
        self._bounds = _bounds(self._ids // pieces.chunk, num_chunks)
        # The piece of each pair.
        keys, order = (theirs // pieces.chunk * num_groups + queries // pieces.group).sort()
        self._queries, self._theirs = queries[order], theirs[order]
        self._pair_bounds = _bounds(keys, num_chunks * num_groups) if len(keys) else None

    def blank(self, scores: Tensor, chunk: int, group: int) -> None:
        """Set the scores of excluded rows to -inf.

        Args:
            scores: the scores of one group's queries and one chunk's rows.
            chunk, group: their numbers.
        """
        start = chunk * self._pieces.chunk
        if self._mask is not None:
            columns = self._mask[start : start + scores.shape[1]].nonzero().squeeze(1)
            scores.index_fill_(1, columns, -math.inf)
        first, last = self._bounds[chunk : chunk + 2]
        if last > first:
            scores.index_fill_(1, self._ids[first:last] - start, -math.inf)
        if self._pair_bounds is not None:
            piece = chunk * self._num_groups + group
            pairs = slice(*self._pair_bounds[piece : piece + 2])
            if pairs.stop > pairs.start:
                scores[self._queries[pairs] - group * self._pieces.group, self._theirs[pairs] - start] = -math.inf


class Exclusions(NamedTuple):
    """The excluded rows of a search, as :class:`Excluded` takes them."""

    mask: Tensor | None
    ids: Tensor
    queries: Tensor
    theirs: Tensor


def exclusions_of(
    exclude: Exclude, pieces: Pieces, device: torch.device, padding_idx: int | None, table: str
) -> Exclusions:
    """Check excluded ids in any form, and return them in a single form.

    Args:
        exclude: bool (num_rows,); or ids (n,) for every query; or ids (q, m), padded with -1; or q tensors of ids.
        pieces: the search's.
        device: the queries'.
        padding_idx: a further row excluded for all queries.
        table: name of the table, for messages.

    Raises:
        IdError: an id is outside the table.
        TypeError, ValueError: the dtype or shape is wrong.
    """
    none = torch.empty(0, dtype=torch.int64, device=device)
    mask, ids, queries, theirs = None, none, none, none
    if isinstance(exclude, Tensor) and exclude.dtype == torch.bool:
        if tuple(exclude.shape) != (pieces.num_rows,):
            raise ValueError(
                f"exclude is a mask of shape {tuple(exclude.shape)}, but table {table!r} has {pieces.num_rows} rows; "
                f"give ({pieces.num_rows},), or ids"
            )
        mask = exclude.to(device)
    elif isinstance(exclude, Tensor) and exclude.dim() == 2:
        queries, theirs = _padded(exclude, pieces, device, table)
    elif isinstance(exclude, Tensor):
        ids = _checked(exclude, "exclude", pieces.num_rows, table).to(device)
    elif exclude is not None:
        queries, theirs = _listed(exclude, pieces, device, table)
    if padding_idx is not None:
        ids = torch.cat([ids, ids.new_tensor([padding_idx])])
    return Exclusions(mask, ids, queries, theirs)


def _padded(exclude: Tensor, pieces: Pieces, device: torch.device, table: str) -> tuple[Tensor, Tensor]:
    """Return pairs of query and id from a matrix padded with -1."""
    if len(exclude) != pieces.num_queries:
        raise ValueError(
            f"exclude has shape {tuple(exclude.shape)}, but there are {pieces.num_queries} queries; give a row of ids "
            "for each, padded with -1, or one-dimensional ids for all"
        )
    present = exclude != -1
    _checked(exclude.where(present, 0), "exclude", pieces.num_rows, table)
    queries = present.nonzero()[:, 0]
    return queries.to(device), exclude[present].long().to(device)


def _listed(exclude: Sequence[Tensor], pieces: Pieces, device: torch.device, table: str) -> tuple[Tensor, Tensor]:
    """Return pairs of query and id from one tensor of ids per query."""
    if isinstance(exclude, str) or not isinstance(exclude, Sequence):
        raise TypeError(f"exclude is {a_kind(exclude)}; pass a tensor, or a list with one for each query")
    if len(exclude) != pieces.num_queries:
        raise ValueError(
            f"exclude is a list of {len(exclude)}, but there are {pieces.num_queries} queries; give ids for each, or "
            "one tensor of ids for all"
        )
    found = [_checked(ids, f"exclude[{i}]", pieces.num_rows, table).to(device) for i, ids in enumerate(exclude)]
    lengths = torch.tensor([len(ids) for ids in found], dtype=torch.int64, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return torch.arange(len(found), device=device).repeat_interleave(lengths), torch.cat([none, *found])


def _checked(ids: Tensor, name: str, num_rows: int, table: str) -> Tensor:
    """Return the ids as int64 after checking that they are in the table."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} is {a_kind(ids)}; pass a tensor of ids, torch.tensor(…)")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {ids.dtype}; give ids as int32 or int64, or a mask as bool")
    if name != "exclude" and ids.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; give one-dimensional ids")
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; give ids (n,) for all queries, or (q, m), one row each")
    ids = ids.long()
    outside = (ids < 0) | (ids >= num_rows)
    if outside.any():
        position = outside.nonzero()[0].tolist()
        value = int(ids[tuple(position)])
        hint = "pad with -1" if ids.dim() == 2 else "leave it out"
        raise IdError(
            f"{name}[{', '.join(map(str, position))}] is {value}, but table {table!r} has rows 0 to {num_rows - 1}; "
            f"{hint} where there is nothing to exclude"
        )
    return ids


def _bounds(keys: Tensor, count: int) -> list[int]:
    """Return the first position of each of the keys 0 to ``count`` among ascending ones."""
    edges = torch.arange(count + 1, device=keys.device)
    found: list[int] = torch.searchsorted(keys, edges).tolist()
    return found


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Independent of free memory, so that the same call uses the same pieces. On the CPU they fit in its caches.
_ROWS_BYTES = {"cpu": 16 * 2**20}
_SCORES_BYTES = {"cpu": 4 * 2**20}
_OTHER_BYTES = 64 * 2**20  # on any other device
_LEAST_ROWS = 4096  # with fewer rows a matrix product is inefficient
_ROWS_PER_PLACE = 128  # rows in a chunk per one of the k; with fewer, merging takes longer than scoring
_BLOCK = 256  # scores that are skipped together if the largest is too small


class Scored(NamedTuple):
    """The best rows for each query, best first.

    Attributes:
        values: inner products, shape (q, k), or (k,) for a single query.
        ids: int64, of the same shape.
    """

    values: Tensor
    ids: Tensor

    def __repr__(self) -> str:
        return f"Scored(values and ids of shape {tuple(self.values.shape)})"


@torch.no_grad()
def read_rows(table: Table, ids: Tensor | int | None) -> Tensor:
    """Copy weights out of a table: all of them, or the rows of ids; see :meth:`TableModule.read`."""
    if ids is None:
        return table.read()
    if isinstance(ids, int) and not isinstance(ids, bool):
        ids = torch.tensor(ids)
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids is {a_kind(ids)}; pass a tensor of whole numbers, one number, or None for all")
    if ids.dtype not in _INTEGERS:
        raise TypeError(f"ids has dtype {ids.dtype}; give whole numbers, e.g. ids.long() or mask.nonzero()")
    kernels.require_memory(ids, "ids")
    wide = ids.long()
    kernels.check_ids(wide, table.num_embeddings, f"table {table.name!r}")
    rows = table.lease(wide.reshape(-1), columns=["weight"], device=ids.device).weight
    return rows.view(*ids.shape, table.embedding_dim)


class Search(NamedTuple):
    """The arguments of :meth:`TableModule.score`, with what a module adds to them.

    Attributes:
        queries, k, chunk, exclude: as given.
        padding_idx: a further row to leave out, if any.
        num_rows: only the first ones are searched.
    """

    queries: Tensor
    k: int
    chunk: int | None
    exclude: Exclude
    padding_idx: int | None
    num_rows: int


@outside_graphs
@torch.no_grad()
def top_rows(table: Table, asked: Search, best_of: Callable[..., Scored] | None = None) -> Scored:
    """Return the ``k`` rows of a table with the largest inner products.

    Exact search in one pass; later scores must exceed the best so far.

    Args:
        table: the table.
        asked: the arguments.
        best_of: searches for checked queries in place of :func:`best_rows`.

    Raises:
        ValueError, TypeError, IdError: as for :meth:`TableModule.score`.
    """
    queries = as_matrix(table, asked.queries)
    k = count("k", asked.k)
    if k > table.num_embeddings:
        raise ValueError(f"k is {k}, but table {table.name!r} has {table.num_embeddings} rows; give at most as many")
    chunk = None if asked.chunk is None else count("chunk", asked.chunk)
    whole = Pieces(table.num_embeddings, len(queries), table.num_embeddings, max(1, len(queries)))
    left_out = exclusions_of(asked.exclude, whole, queries.device, asked.padding_idx, table.name)
    best = (best_of or partial(best_rows, num_rows=asked.num_rows))(table, queries, k, chunk, left_out)
    return best if asked.queries.dim() == 2 else Scored(best.values[0], best.ids[0])


def best_rows(
    table: Table, queries: Tensor, k: int, chunk: int | None, left_out: Exclusions, *, num_rows: int
) -> Scored:
    """Return the best rows for checked queries, shape (q, embedding_dim), as :func:`top_rows` does."""
    best = Scored(
        torch.full((len(queries), k), -math.inf, dtype=table.dtype, device=queries.device),
        torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device),
    )
    if len(queries):
        pieces = pieces_for(table, num_rows, len(queries), k, queries.device, chunk)
        with torch.autocast(queries.device.type, enabled=False):
            _scan(table, queries, pieces, Excluded(pieces, *left_out), best)
    return best


def _scan(table: Table, queries: Tensor, pieces: Pieces, left_out: Excluded, best: Scored) -> None:
    """Read every chunk of rows once, and merge its scores into the best."""
    k, block = best.values.shape[1], _BLOCK
    while block > 1 and block * 4 * k > pieces.chunk:
        block //= 2
    room = queries.new_empty(pieces.group, -(-pieces.chunk // block) * block)
    for i, rows in enumerate(pieces.chunks()):
        with table.rows_between(rows.start, rows.stop, queries.device) as weights:
            for j, some in enumerate(pieces.groups()):
                scores = room[: some.stop - some.start, : rows.stop - rows.start]
                torch.mm(queries[some], weights.T, out=scores)
                left_out.blank(scores, i, j)
                blocks = room[: len(scores), : -(-scores.shape[1] // block) * block]
                blocks[:, scores.shape[1] :] = -math.inf
                _offer(blocks.view(len(scores), -1, block), rows.start, Scored(best.values[some], best.ids[some]))


def _offer(scores: Tensor, first_row: int, best: Scored) -> None:
    """Merge the scores of later rows into the best so far, in place.

    Ties go to the lower id: rows come in ascending order, so a later score must be larger.

    Args:
        scores: shape (q, blocks, rows per block).
        first_row: id of the first row.
        best: shape (q, k), best first.
    """
    k = best.values.shape[1]
    bound = best.values[:, -1:]
    largest = scores.amax(2)
    hit = _exceeds(largest, bound)
    floor = torch.full_like(bound, -math.inf)
    if hit.shape[1] > k:
        # The k best are in the k blocks with the largest scores; for ties, in the first of these.
        crowded = (hit.sum(1) > k).nonzero().squeeze(1)
        if len(crowded):
            ordered, order = largest[crowded].sort(dim=1, descending=True, stable=True)
            hit[crowded] = hit[crowded].scatter(1, order[:, k:], False)
            floor[crowded] = ordered[:, k - 1 : k]
    query, block = hit.nonzero(as_tuple=True)
    if not len(query):
        return
    candidates = scores[query, block]
    passes = _exceeds(candidates, bound[query]) & ~(candidates < floor[query])
    piece, place = passes.nonzero(as_tuple=True)
    ids = block[piece] * scores.shape[2] + place + first_row
    _merge(best, query[piece], Scored(candidates[piece, place], ids))


def _exceeds(values: Tensor, bound: Tensor) -> Tensor:
    """Return whether values are larger; NaN is larger than any number, as in ``torch.topk``."""
    return ~(values <= bound) & (bound == bound)


def _merge(best: Scored, query: Tensor, new: Scored) -> None:
    """Insert new rows, ordered by query and id, into the best of their queries."""
    k = best.values.shape[1]
    changed, owner, counts = torch.unique_consecutive(query, return_inverse=True, return_counts=True)
    values = torch.cat([best.values[changed].flatten(), new.values])
    ids = torch.cat([best.ids[changed].flatten(), new.ids])
    owners = torch.cat([torch.arange(len(changed), device=query.device).repeat_interleave(k), owner])
    order = values.sort(descending=True, stable=True).indices
    order = order[owners[order].sort(stable=True).indices]
    ends = (counts + k).cumsum(0)
    kept = order[(ends - counts - k).unsqueeze(1) + torch.arange(k, device=query.device)]
    best.values[changed] = values[kept]
    best.ids[changed] = ids[kept]


def pieces_for(
    table: Table, num_rows: int, num_queries: int, k: int, device: torch.device, chunk: int | None
) -> Pieces:
    """Choose the rows per chunk, unless given, by the bytes of the rows and their scores."""
    item_bytes = table.dtype.itemsize
    scores = max(1, _SCORES_BYTES.get(device.type, _OTHER_BYTES) // item_bytes)
    if chunk is None:
        rows = _ROWS_BYTES.get(device.type, _OTHER_BYTES) // (table.embedding_dim * item_bytes)
        chunk = max(1, min(rows, max(_LEAST_ROWS, _ROWS_PER_PLACE * k, scores // max(1, num_queries))))
    chunk = min(chunk, num_rows)
    # With fewer queries than items per row, products would be bound by memory.
    group = max(1, min(num_queries, max(scores // chunk, table.embedding_dim)))
    return Pieces(num_rows, num_queries, chunk, group)


def as_matrix(table: Table, queries: Tensor) -> Tensor:
    """Return the queries with shape (q, embedding_dim) and the table's dtype."""
    kernels.require_dense(queries, "queries")
    if table.dtype.is_complex:
        raise TypeError(
            f"the rows of table {table.name!r} are {table.dtype}; score real ones: complex products have no order"
        )
    if not queries.is_floating_point():
        raise TypeError(f"queries has dtype {queries.dtype}; give vectors to multiply with rows of {table.dtype}")
    if queries.dim() not in (1, 2) or queries.shape[-1] != table.embedding_dim:
        raise ValueError(
            f"queries has shape {tuple(queries.shape)}, but the rows of table {table.name!r} have "
            f"{table.embedding_dim} items; give (q, {table.embedding_dim}), or ({table.embedding_dim},) for one query"
        )
    return queries.detach().to(table.dtype).reshape(-1, table.embedding_dim)
