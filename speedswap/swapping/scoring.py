"""Rows of a table outside of training: copies of them, and the ones with the largest inner products."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind
from speedswap.swapping.excluded import Exclude, Excluded, Exclusions, Pieces, exclusions_of
from speedswap.swapping.graphs import outside_graphs
from speedswap.tables import Table
from speedswap.tables.record import count

__all__ = ["Scored", "as_matrix", "best_rows", "read_rows", "top_rows"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Independent of the free memory, so that the same call takes the same pieces. On the CPU they fit its caches.
_ROWS_BYTES = {"cpu": 16 * 2**20}
_SCORES_BYTES = {"cpu": 4 * 2**20}
_OTHER_BYTES = 64 * 2**20  # on any other device
_LEAST_ROWS = 4096  # a chunk of fewer rows is hardly a matrix product
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
        raise TypeError(f"ids has dtype {ids.dtype}; give whole numbers, as ids.long() or mask.nonzero() has them")
    kernels.require_memory(ids, "ids")
    wide = ids.long()
    kernels.check_ids(wide, table.num_embeddings, f"table {table.name!r}")
    rows = table.lease(wide.reshape(-1), columns=["weight"], device=ids.device).weight
    return rows.view(*ids.shape, table.embedding_dim)


@outside_graphs
@torch.no_grad()
def top_rows(
    table: Table, queries: Tensor, k: int, *, chunk: int | None, exclude: Exclude, padding_idx: int | None
) -> Scored:
    """Return the ``k`` rows of a table with the largest inner products; see :meth:`TableModule.score`.

    Source: exact search, in one pass; the best scores so far are the bound that later ones must pass.
    """
    many = as_matrix(table, queries)
    k = count("k", k)
    if k > table.num_embeddings:
        raise ValueError(f"k is {k}, but table {table.name!r} has {table.num_embeddings} rows; give at most as many")
    chunk = None if chunk is None else count("chunk", chunk)
    whole = Pieces(table.num_embeddings, len(many), table.num_embeddings, max(1, len(many)))
    left_out = exclusions_of(exclude, whole, many.device, padding_idx, table.name)
    best = best_rows(table, many, k, chunk, left_out)
    return best if queries.dim() == 2 else Scored(best.values[0], best.ids[0])


def best_rows(table: Table, queries: Tensor, k: int, chunk: int | None, left_out: Exclusions) -> Scored:
    """Return the best rows for queries, shape (q, embedding_dim), that are known to fit; as :func:`top_rows`."""
    best = Scored(
        torch.full((len(queries), k), -math.inf, dtype=table.dtype, device=queries.device),
        torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device),
    )
    if len(queries):
        pieces = _pieces(table, len(queries), k, queries.device, chunk)
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

    Of equal scores the lower id is better: rows come in ascending order, so a later score must be larger.

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
        # The k best are in the k blocks with the largest scores; of equal ones, in the first.
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


def _pieces(table: Table, num_queries: int, k: int, device: torch.device, chunk: int | None) -> Pieces:
    """Choose the rows per chunk, unless given, by the bytes of the rows and their scores."""
    item_bytes = table.dtype.itemsize
    scores = max(1, _SCORES_BYTES.get(device.type, _OTHER_BYTES) // item_bytes)
    if chunk is None:
        rows = _ROWS_BYTES.get(device.type, _OTHER_BYTES) // (table.embedding_dim * item_bytes)
        chunk = max(1, min(rows, max(_LEAST_ROWS, _ROWS_PER_PLACE * k, scores // max(1, num_queries))))
    chunk = min(chunk, table.num_embeddings)
    # With fewer queries than items in a row, products would wait for memory.
    group = max(1, min(num_queries, max(scores // chunk, table.embedding_dim)))
    return Pieces(table.num_embeddings, num_queries, chunk, group)


def as_matrix(table: Table, queries: Tensor) -> Tensor:
    """Return the queries with shape (q, embedding_dim) and the table's dtype."""
    kernels.require_dense(queries, "queries")
    if table.dtype.is_complex:
        raise TypeError(f"the rows of table {table.name!r} are {table.dtype}, whose inner products have no order")
    if not queries.is_floating_point():
        raise TypeError(f"queries has dtype {queries.dtype}; give vectors to multiply with rows of {table.dtype}")
    if queries.dim() not in (1, 2) or queries.shape[-1] != table.embedding_dim:
        raise ValueError(
            f"queries has shape {tuple(queries.shape)}, but the rows of table {table.name!r} have "
            f"{table.embedding_dim} items; give (q, {table.embedding_dim}), or ({table.embedding_dim},) for one query"
        )
    return queries.detach().to(table.dtype).reshape(-1, table.embedding_dim)
