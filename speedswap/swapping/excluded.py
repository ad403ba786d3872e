"""Ids that a search leaves out, for all queries or for single ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.errors import IdError

__all__ = ["Exclude", "Excluded", "Exclusions", "Pieces", "exclusions_of"]

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
    """The rows that a search leaves out, as :class:`Excluded` takes them."""

    mask: Tensor | None
    ids: Tensor
    queries: Tensor
    theirs: Tensor


def exclusions_of(
    exclude: Exclude, pieces: Pieces, device: torch.device, padding_idx: int | None, table: str
) -> Exclusions:
    """Check the excluded ids, in any of their forms, and return them in one.

    Args:
        exclude: bool (num_rows,); or ids (n,) for every query; or ids (q, m), padded with -1; or q tensors of ids.
        pieces: the search's.
        device: the queries'.
        padding_idx: one more row excluded for all queries.
        table: name of the table, for messages.

    Raises:
        IdError: an id is outside the table.
        TypeError, ValueError: another dtype or shape.
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
        raise TypeError(f"{name} is {a_kind(ids)}; pass a tensor of ids, as torch.tensor makes one")
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
