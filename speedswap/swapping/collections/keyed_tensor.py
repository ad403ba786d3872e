"""The output of pooled lookups: the vectors of several keys, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["KeyedTensor"]


class KeyedTensor:
    """One matrix whose columns belong to keys, with the methods of TorchRec's ``KeyedTensor``.

    Args:
        keys: names, in the order of the columns.
        length_per_key: columns of each.
        values: shape (batch, sum of the lengths).

    Example:
        >>> import torch, speedswap
        >>> pooled = speedswap.KeyedTensor(["user", "item"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["item"]
        tensor([[3.]])
        >>> {key: value.tolist() for key, value in pooled.to_dict().items()}
        {'user': [[1.0, 2.0]], 'item': [[3.0]]}
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        if len(keys) != len(length_per_key) or values.ndim != 2 or values.shape[1] != sum(length_per_key):
            raise ValueError(
                f"values has shape {tuple(values.shape)}, but {len(keys)} keys have {len(length_per_key)} lengths, "
                f"{sum(length_per_key)} in all; give a matrix with that many columns"
            )
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values
        self._parts: Sequence[Tensor] | None = None

    def keys(self) -> list[str]:
        """Return the keys, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """Return all columns, shape (batch, sum of the lengths)."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the keys lie: 1."""
        return 1

    def length_per_key(self) -> list[int]:
        """Return the columns of each key."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return the first column of each key, and the number of all."""
        return [0, *accumulate(self._lengths)]

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        """Return a key's columns, a view of shape (batch, length).

        Raises:
            KeyError: there is no such key.
        """
        if key not in self._keys:
            raise KeyError(f"{key!r} is not a key; there are {', '.join(self._keys)}")
        return self._split()[self._keys.index(key)]

    def to_dict(self) -> dict[str, Tensor]:
        """Return each key's columns, as views."""
        return dict(zip(self._keys, self._split(), strict=True))

    def _split(self) -> Sequence[Tensor]:
        if self._parts is None:
            self._parts = torch.split(self._values, self._lengths, dim=1)  # one node of a graph for all
        return self._parts

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return the columns of some keys side by side, for each group of keys.

        Args:
            keyed_tensors: each key is taken from the first of them that has it.
            groups: keys, in the order wanted.

        Raises:
            KeyError: no tensor has a key.
        """
        found: dict[str, Tensor] = {}
        for each in reversed(keyed_tensors):
            found |= each.to_dict()
        return [torch.cat([found[key] for key in group], dim=1) for group in groups]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Return the same keys with values on another device."""
        return KeyedTensor(self._keys, self._lengths, self._values.to(device, non_blocking=non_blocking))

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}: {length}" for key, length in zip(self._keys, self._lengths, strict=True))
        return f"KeyedTensor({{{keys}}}, values of shape {tuple(self._values.shape)})"
