"""Keys of an id map as its loops read them: 64-bit numbers, and the texts of strings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind

__all__ = ["KINDS", "Keys", "as_keys", "select_texts"]

KINDS = ("int64", "hashed", "exact")
_ARROW_STRINGS = {
    "string": torch.int32,
    "binary": torch.int32,
    "large_string": torch.int64,
    "large_binary": torch.int64,
}


class Keys(NamedTuple):
    """A batch of keys.

    Attributes:
        numbers: int64, shape (n,), in host memory: the keys themselves, or the hashes of strings.
        shape: of the rows that they are mapped to.
        device: where those are wanted.
        texts: of exact strings.
    """

    numbers: Tensor
    shape: tuple[int, ...]
    device: torch.device
    texts: kernels.Texts | None = None

    def __len__(self) -> int:
        return len(self.numbers)


_CPU = torch.device("cpu")


def as_keys(keys: Any, kind: str) -> Keys:
    """Return keys as the map's loops read them; once read, they stay as they are.

    Args:
        keys: for ``"int64"`` a tensor or an array of integers, any shape; else strings: a sequence of str or bytes, a
            NumPy array of them, any shape, or a pyarrow array. NumPy's and pyarrow's memory is read as it is.
        kind: ``"int64"``, ``"hashed"`` or ``"exact"``.

    Raises:
        TypeError: they are something else.
        ValueError: pyarrow's have nulls.
    """
    if isinstance(keys, Keys):
        return keys
    if kind == "int64":
        return _as_numbers(keys)
    texts, shape = _as_text(keys)
    return Keys(kernels.hash_texts(texts), shape, _CPU, texts if kind == "exact" else None)


def _as_numbers(keys: Any) -> Keys:
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu" and keys.dtype.isnative:
        keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys
        keys = torch.from_numpy(np.require(keys, requirements=["C", "W"]))  # torch warns of memory that is read-only
    if not isinstance(keys, Tensor):
        raise TypeError(f'keys is {a_kind(keys)}; give a tensor of integers, or make the map with keys="hashed"')
    kernels.require_dense(keys, "keys")
    if keys.is_floating_point() or keys.is_complex() or keys.dtype in (torch.bool, torch.uint64):
        raise TypeError(f"keys has dtype {keys.dtype}; give integers, int64 or narrower")
    return Keys(kernels.as_ids(keys.detach()).reshape(-1), tuple(keys.shape), keys.device)


def _as_text(keys: Any) -> tuple[kernels.Texts, tuple[int, ...]]:
    """Return the texts of strings, and their shape."""
    if hasattr(keys, "combine_chunks") and hasattr(keys, "type"):
        keys = keys.combine_chunks()  # of a chunked array
    if hasattr(keys, "buffers") and hasattr(keys, "type"):
        return _arrow_text(keys), (len(keys),)
    if isinstance(keys, np.ndarray):
        if keys.dtype.kind in "US" and keys.dtype.isnative:
            return kernels.texts_of_fixed(keys), keys.shape
        if keys.dtype.kind == "O":
            return kernels.texts_of(keys.reshape(-1).tolist()), keys.shape
    if isinstance(keys, (list, tuple)):
        return kernels.texts_of(keys), (len(keys),)
    raise TypeError(f"keys is {a_kind(keys)}; give a list of strings, or an array of them of NumPy or pyarrow")


def _arrow_text(keys: Any) -> kernels.Texts:
    """Return the texts of a pyarrow array, which may be a slice of a longer one."""
    if str(keys.type) not in _ARROW_STRINGS:
        raise TypeError(f"keys is a pyarrow array of {keys.type}; cast it to string")
    if keys.null_count:
        raise ValueError(f"keys has {keys.null_count} nulls; replace them with keys.fill_null('')")
    _, offsets, text = keys.buffers()
    dtype = _ARROW_STRINGS[str(keys.type)]
    if not len(keys):
        return torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    begins = torch.frombuffer(offsets, dtype=dtype, count=keys.offset + len(keys) + 1)[keys.offset :].long()
    first, last = int(begins[0]), int(begins[-1])
    nothing = torch.empty(0, dtype=torch.uint8)
    return (torch.frombuffer(text, dtype=torch.uint8)[first:last] if last > first else nothing), begins - first


def select_texts(texts: kernels.Texts, places: Tensor) -> kernels.Texts:
    """Return some texts, in the order of ``places``, int64, shape (n,).

    >>> text, offsets = select_texts(kernels.texts_of(["ab", "c", "def"]), torch.tensor([2, 0]))
    >>> bytes(text.numpy()), offsets.tolist()
    (b'defab', [0, 3, 5])
    """
    text, offsets = (each.numpy() for each in texts)
    begins, lengths = offsets[:-1][places.numpy()], np.diff(offsets)[places.numpy()]
    ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    shifts = np.repeat(begins - ends[:-1], lengths)
    return torch.from_numpy(text[shifts + np.arange(len(shifts))]), torch.from_numpy(ends)
