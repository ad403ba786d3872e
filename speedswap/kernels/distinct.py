"""Distinct ids on a device: of any number of lookups with one sort, and one wait for what the host has to know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from speedswap.kernels.mailbox import ask
from speedswap.kernels.memory import empty

__all__ = ["distinct"]


def distinct(lookups: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor] | None]:
    """Return each lookup's rows, and where each of its ids is among them.

    The ids of all lookups are sorted together, as keys: lookup after lookup, an id above its lookup's base. An id out
    of range becomes one of two keys beside those of its lookup's rows, and so the smallest or greatest of them.

    Args:
        lookups: int32 or int64, any shapes, on one device.
        num_rows: for each lookup: its ids must be 0 to that less one. Without, there is one lookup, of any ids.

    Returns:
        For each lookup as :func:`speedswap.kernels.unique` does; None where an id is out of range.
    """
    ends = list(accumulate(ids.numel() for ids in lookups))
    begins = [0, *ends[:-1]]
    keys, bases = _keys(lookups, begins, ends, num_rows)
    some = [i for i, ids in enumerate(lookups) if ids.numel()]
    nothing = torch.empty(0, dtype=torch.int64, device=keys.device)
    results = [None if ids.numel() else (nothing, nothing.view(ids.shape)) for ids in lookups]
    if not some:
        return results
    ordered, order = torch.sort(keys)
    is_new = torch.empty(len(keys), dtype=torch.bool, device=keys.device)
    is_new[:1].fill_(False)
    torch.ne(ordered[1:], ordered[:-1], out=is_new[1:])
    places = torch.cumsum(is_new, 0)
    local = torch.empty_like(places).scatter_(0, order, places)
    # Equal keys write equal values to one place; how many places there are need not be known for that.
    found = torch.empty_like(ordered).scatter_(0, places, ordered)
    place, key = ask([begins[i] for i in some] + [ends[i] - 1 for i in some], places, ordered)
    for first, i in enumerate(some):
        last = first + len(some)
        if num_rows is not None and not bases[i] <= key[first] <= key[last] < bases[i] + num_rows[i]:
            continue
        rows = empty((place[last] + 1 - place[first],), torch.int64, keys.device)
        torch.sub(found[place[first] : place[last] + 1], bases[i], out=rows)
        results[i] = (rows, local[begins[i] : ends[i]].sub_(place[first]).view(lookups[i].shape))
    return results


def _keys(
    lookups: Sequence[Tensor], begins: Sequence[int], ends: Sequence[int], num_rows: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """All ids as keys, and each lookup's base. Narrow keys are sorted in half the time."""
    flat = [ids.detach().reshape(-1) for ids in lookups]
    if num_rows is None:
        (ids,) = flat
        return ids, [0]
    bases = list(accumulate((count + 2 for count in num_rows), initial=0))
    dtype = torch.int32 if bases[-1] < 2**31 else torch.int64
    if len(flat) == 1 and flat[0].dtype == dtype:
        return flat[0], bases
    keys = torch.empty(ends[-1], dtype=dtype, device=flat[0].device)
    for ids, begin, end, base, count in zip(flat, begins, ends, bases, num_rows, strict=False):
        known = ids.clamp(-1, min(count, torch.iinfo(ids.dtype).max))
        if ids.dtype == torch.int64:
            torch.add(known, base, out=keys[begin:end])
        else:  # which cannot hold every base
            keys[begin:end].copy_(known).add_(base)
    return keys, bases
