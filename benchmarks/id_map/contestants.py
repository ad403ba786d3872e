"""Maps from keys to rows: ours, Python's dict, pandas and TorchRec, each verified before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import speedswap
from speedswap.apps.errors import WrongResultError

__all__ = ["Contestant", "contestants", "zipf_keys"]

_EXPONENT = 1.05
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # odd: keys all over 64 bits, one for each rank


class Contestant(NamedTuple):
    """A map that is built from scratch from batches of keys.

    Args:
        name: for tables.
        package: the library that it needs.
        job: ``"number"`` for every key, ``"evict"`` for as many as there are rows, ``"look up"`` in a full map.
        run: gives rows to batches of keys; returns the map.
        rows: asks a map for the rows of keys.
    """

    name: str
    package: str
    job: str
    run: Callable[[Sequence[Tensor]], Any]
    rows: Callable[[Any, Tensor], Tensor]


def zipf_keys(count: int, ranks: int) -> Tensor:
    """Draw keys by Zipf's law with exponent 1.05; int64, shape (count,)."""
    drawn = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    power = 1 - _EXPONENT
    rank = ((ranks**power - 1) * drawn + 1).pow_(1 / power).long() - 1
    return rank * _SPREAD


class _Numbers(dict[int, int]):
    """The fastest of Python's ways: a dict that numbers what it does not have."""

    def __missing__(self, key: int) -> int:
        number = self[key] = len(self) + 1
        return number


def _dict(batches: Sequence[Tensor]) -> _Numbers:
    numbers = _Numbers()
    for keys in batches:
        _dict_rows(numbers, keys)
    return numbers


def _dict_rows(numbers: _Numbers, keys: Tensor) -> Tensor:
    return torch.tensor(list(map(numbers.__getitem__, keys.tolist())))


def _ours(capacity: int, evict: str | None, batches: Sequence[Tensor]) -> speedswap.IdMap:
    found = speedswap.IdMap(capacity, evict=evict)
    for keys in batches:
        found.add(keys)
    return found


def _pandas(batches: Sequence[Tensor]) -> tuple[Any, Any]:
    import pandas

    codes, keys = pandas.factorize(torch.cat([*batches]).numpy())  # which has no state from batch to batch
    return codes, keys


def _pandas_rows(found: tuple[Any, Any], keys: Tensor) -> Tensor:
    order = np.argsort(found[1])
    return torch.from_numpy(order[np.searchsorted(found[1][order], keys.numpy())] + 1)


def _torchrec(capacity: int, interval: int, batches: Sequence[Tensor]) -> Any:
    from torchrec.modules import mc_modules

    policy = mc_modules.LFU_EvictionPolicy()
    found = mc_modules.MCHManagedCollisionModule(capacity, torch.device("cpu"), policy, interval)
    for keys in batches:
        _torchrec_rows(found, keys)
    return found


def _torchrec_rows(found: Any, keys: Tensor) -> Tensor:
    from torchrec.sparse.jagged_tensor import JaggedTensor

    mapped: Tensor = found({"key": JaggedTensor(keys, lengths=torch.ones_like(keys))})["key"].values()
    return mapped


def contestants(capacity: int, rows: int) -> list[Contestant]:
    """Return every contestant.

    Args:
        capacity: of maps that keep every key.
        rows: of maps that evict.
    """
    return [
        Contestant("speedswap", "speedswap", "number", lambda b: _ours(capacity, None, b), speedswap.IdMap.lookup),
        Contestant("dict", "python", "number", _dict, _dict_rows),
        Contestant("pandas.factorize, all at once", "pandas", "number", _pandas, _pandas_rows),
        Contestant("speedswap, lru", "speedswap", "evict", lambda b: _ours(rows, "lru", b), speedswap.IdMap.lookup),
        Contestant("speedswap, lfu", "speedswap", "evict", lambda b: _ours(rows, "lfu", b), speedswap.IdMap.lookup),
        Contestant("TorchRec, every batch", "torchrec", "evict", lambda b: _torchrec(rows, 1, b), _torchrec_rows),
        Contestant("TorchRec, every 16th", "torchrec", "evict", lambda b: _torchrec(rows, 16, b), _torchrec_rows),
    ]


def verify(one: Contestant, batches: Sequence[Tensor], capacity: int) -> None:
    """Raise WrongResultError unless a map numbers keys as a dict does; or, if it evicts, gives each its own row."""
    found = one.run(batches)
    if isinstance(found, torch.nn.Module):
        found.eval()
    keys = batches[-1]
    rows = one.rows(found, keys)
    if one.job == "number":
        is_right = torch.equal(rows, _dict_rows(_dict(batches), keys))
    else:
        distinct = keys.unique()
        of_distinct = one.rows(found, distinct)
        # TorchRec maps all keys without a row to the last row; ours maps them to 0.
        nowhere = capacity - 1 if isinstance(found, torch.nn.Module) else 0
        kept = of_distinct[of_distinct != nowhere]
        is_right = torch.equal(of_distinct[torch.searchsorted(distinct, keys)], rows) and 0 < len(kept)
        is_right = is_right and len(kept.unique()) == len(kept)
    if not is_right:
        raise WrongResultError(f"{one.name} gives keys other rows than a dict does")
