"""Keys in the form that an id map's compiled loops read: 64-bit numbers, and the bytes of strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speedswap import kernels
from speedswap._words import a_kind

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
        shape: the shape of the rows they map to.
        device: the device of those rows.
        texts: the bytes of exact strings.
    """

    numbers: Tensor
    shape: tuple[int, ...]
    device: torch.device
    texts: kernels.Texts | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def copied(self) -> Keys:
        """Return the same keys, with their numbers in separate memory."""
        return Keys(self.numbers.clone(), self.shape, self.device, self.texts)


_CPU = torch.device("cpu")


def as_keys(keys: Any, kind: str) -> Keys:
    """Return keys in the form that the map's loops read; keys in this form are returned unchanged.

    Args:
        keys: for ``"int64"``, integers of any shape: a tensor, or anything that NumPy turns into an array; otherwise
            strings: a sequence of str or bytes, a NumPy array of any shape, a pyarrow array, or a pandas or polars
            column. NumPy's fixed-width strings and pyarrow's are read in place.
        kind: ``"int64"``, ``"hashed"`` or ``"exact"``.

    Raises:
        TypeError: ``keys`` has another type.
        ValueError: a key is missing.
    """
    if isinstance(keys, Keys):
        return keys
    keys = _as_array(keys)
    if kind == "int64":
        return _as_numbers(keys)
    texts, shape = _as_text(keys)
    return Keys(kernels.hash_texts(texts), shape, _CPU, texts if kind == "exact" else None)


def is_single_key(value: Any) -> bool:
    """Return whether a value is a single (perhaps missing) key rather than several."""
    return value is None or isinstance(value, (str, bytes, int, float, np.generic)) or _is_missing(value)


def _as_array(keys: Any) -> Any:
    """Return an array or column of keys as a NumPy array; tensors and pyarrow strings are left as they are.

    Raises:
        ValueError: a key is missing, according to the mask of the array or column.
    """
    if isinstance(keys, (Tensor, list, tuple)):
        return keys
    if hasattr(keys, "combine_chunks"):
        keys = keys.combine_chunks()  # of a chunked array
    # pandas; then polars and pyarrow, whose arrays mostly know that nothing is missing.
    find_missing = getattr(keys, "isna", None) or (getattr(keys, "null_count", 1) and getattr(keys, "is_null", None))
    mask = np.asarray(find_missing()) if find_missing else np.ma.getmaskarray(keys) if np.ma.isMA(keys) else None
    if mask is not None and mask.any():
        _refuse_missing(np.argwhere(mask)[0], int(mask.sum()))
    return keys if _is_arrow_text(keys) or not hasattr(keys, "__array__") else np.asarray(keys)


def _is_arrow_text(keys: Any) -> bool:
    return str(getattr(keys, "type", "")) in _ARROW_STRINGS


def _is_missing(value: Any) -> bool:
    kind = type(value).__name__
    return value is None or kind in ("NAType", "NaTType") or (isinstance(value, (float, np.generic)) and value != value)


def _refuse_first_missing(keys: NDArray[Any]) -> None:
    place = next((place for place, key in np.ndenumerate(keys) if _is_missing(key)), None)
    if place is not None:
        _refuse_missing(place)


def _refuse_missing(place: Iterable[Any], count: int = 1) -> NoReturn:
    others = f", and {count - 1} more are" if count > 1 else ""
    raise ValueError(
        f"keys[{', '.join(map(str, place))}] is missing{others}; leave out what has no key, or give missing values "
        'one: with fillna("") or fillna(-1) in pandas, fill_null in polars and pyarrow'
    )


def _as_numbers(keys: Any) -> Keys:
    if isinstance(keys, (list, tuple, range, int)) or (isinstance(keys, np.ndarray) and keys.dtype.kind == "O"):
        given = keys.tolist() if isinstance(keys, np.ndarray) else keys
        keys = np.asarray(given)
        keys = _unsigned(keys, given) if keys.size else keys.astype(np.int64)
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu":
        keys = keys.astype(keys.dtype.newbyteorder("="), copy=False)
        keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys
        keys = torch.from_numpy(np.require(keys, requirements=["C", "W"]))  # torch warns about read-only memory
    if not isinstance(keys, Tensor):
        _refuse_numbers(keys)
    kernels.require_dense(keys, "keys")
    if keys.is_floating_point() or keys.is_complex() or keys.dtype in (torch.bool, torch.uint64):
        raise TypeError(f"keys has dtype {keys.dtype}; give integers, int64 or narrower")
    return Keys(kernels.as_ids(keys.detach()).reshape(-1), tuple(keys.shape), keys.device)


def _unsigned(keys: NDArray[Any], given: Any) -> NDArray[Any]:
    """Return whole numbers as unsigned if some exceed int64, where NumPy would make floats; otherwise ``keys``."""
    if keys.dtype == np.float64:
        whole = np.asarray(given, dtype=object)
        if all(isinstance(each, int | np.integer) and each >= 0 for each in whole.flat):
            return whole.astype(np.uint64)
    return keys


def _refuse_numbers(keys: Any) -> NoReturn:
    if not isinstance(keys, np.ndarray):
        raise TypeError(f'keys is {a_kind(keys)}; give integers, or make the map with keys="hashed" for strings')
    if keys.dtype.kind in "fmMO":
        _refuse_first_missing(keys)
    raise TypeError(
        f"keys has dtype {keys.dtype}; give integers, int64 or narrower, or for strings make the map with "
        'keys="hashed" or keys="exact"'
    )


def _as_text(keys: Any) -> tuple[kernels.Texts, tuple[int, ...]]:
    """Return the bytes of strings, and their shape."""
    if _is_arrow_text(keys):
        return _arrow_text(keys), (len(keys),)
    if isinstance(keys, np.ndarray):
        if keys.dtype.kind in "US" and keys.dtype.isnative:
            return kernels.texts_of_fixed(keys), keys.shape
        if keys.dtype.kind in "OT":
            return _texts_of(keys.reshape(-1).tolist(), keys.shape), keys.shape
    if isinstance(keys, (list, tuple)):
        return _texts_of(keys, (len(keys),)), (len(keys),)
    what = f"an array of {keys.dtype}" if isinstance(keys, np.ndarray) else a_kind(keys)
    raise TypeError(
        f'keys is {what}; give a list, an array or a column of strings, or for integers make the map with keys="int64"'
    )


def _texts_of(strings: Sequence[Any], shape: tuple[int, ...]) -> kernels.Texts:
    try:
        return kernels.texts_of(strings)
    except TypeError:
        found = np.empty(len(strings), object)
        found[:] = strings
        _refuse_first_missing(found.reshape(shape))
        raise


def _arrow_text(keys: Any) -> kernels.Texts:
    """Return the bytes of a pyarrow string array, which may be a slice of a longer one."""
    _, offsets, text = keys.buffers()
    dtype = _ARROW_STRINGS[str(keys.type)]
    if not len(keys):
        return torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    begins = torch.frombuffer(offsets, dtype=dtype, count=keys.offset + len(keys) + 1)[keys.offset :].long()
    first, last = int(begins[0]), int(begins[-1])
    nothing = torch.empty(0, dtype=torch.uint8)
    return (torch.frombuffer(text, dtype=torch.uint8)[first:last] if last > first else nothing), begins - first


def select_texts(texts: kernels.Texts, places: Tensor) -> kernels.Texts:
    """Select strings by their indices ``places``, int64, shape (n,), in that order.

    >>> text, offsets = select_texts(kernels.texts_of(["ab", "c", "def"]), torch.tensor([2, 0]))
    >>> bytes(text.numpy()), offsets.tolist()
    (b'defab', [0, 3, 5])
    """
    text, offsets = (each.numpy() for each in texts)
    begins, lengths = offsets[:-1][places.numpy()], np.diff(offsets)[places.numpy()]
    ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    shifts = np.repeat(begins - ends[:-1], lengths)
    return torch.from_numpy(text[shifts + np.arange(len(shifts))]), torch.from_numpy(ends)
