"""Nested data as JSON beside tensors: what a ``state_dict`` holds, written without pickle.

JSON's own values stand for themselves. Whatever else there is, is an object with one key that begins with ``$``.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedswap._words import a_kind
from speedswap.tables.files.tensor_file import DTYPES

__all__ = ["Decoder", "Encoder"]

_MOST_NESTED = 100
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Encoder:
    """A writer of nested data, which collects its tensors.

    Attributes:
        tensors: by name, detached, of dtypes that a file of tensors holds.

    Example:
        >>> encoder = Encoder()
        >>> encoder.encode({"lr": 0.1, "betas": (0.9, 0.99), "sum": torch.ones(2)}, "optimizer")
        {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'sum': {'$tensor': 'optimizer.sum'}}
        >>> list(encoder.tensors)
        ['optimizer.sum']
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return a value as JSON can hold it.

        Args:
            value: numbers, text, None, dicts, lists, tuples, tensors and arrays, and objects that have a
                ``state_dict``, or are generators of random numbers.
            name: of the value, for messages and its tensors.
            depth: of the value, in other values.

        Raises:
            TypeError: it holds something else; the message says where.
            ValueError: it contains itself, or is nested too deeply to be read again.
        """
        if depth > _MOST_NESTED:
            raise ValueError(
                f"{name[:40]}… contains itself, or is nested more than {_MOST_NESTED} deep; give flatter data"
            )
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), name, scalar=isinstance(value, np.generic))
        if isinstance(value, bytes | bytearray):
            return {"$bytes": self._tensor(torch.tensor(list(value), dtype=torch.uint8), name)}
        if isinstance(value, Mapping):
            return self._mapping(value, name, depth)
        if isinstance(value, list | tuple):
            encoded = [self.encode(each, f"{name}.{place}", depth + 1) for place, each in enumerate(value)]
            return encoded if isinstance(value, list) else {"$tuple": encoded}
        if isinstance(value, torch.dtype | torch.device):
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            return self.encode(value.get_state(), name)
        if callable(getattr(value, "state_dict", None)):
            return self.encode(value.state_dict(), name, depth + 1)
        raise TypeError(
            f"{name} is {a_kind(value)}, which a checkpoint cannot hold without pickle; give plain data, tensors, or "
            "an object with state_dict() and load_state_dict()"
        )

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int) -> dict[str, Any]:
        pairs = [(key, self.encode(each, f"{name}.{key}", depth + 1)) for key, each in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[self.encode(key, name), each] for key, each in pairs]}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[self.encode(key, name), each] for key, each in pairs]}

    def _tensor(self, value: Tensor, name: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}, on {value.device}"
            raise TypeError(f"{name} is {kind}; give a dense one")
        while name in self.tensors:
            name += "'"
        value = value.detach().resolve_conj().resolve_neg()
        encoded = {"$tensor": name}
        if value.dtype not in DTYPES:  # as bytes, with a dimension more
            encoded["dtype"] = str(value.dtype).removeprefix("torch.")
            value = value.contiguous().unsqueeze(-1).view(torch.uint8)
        self.tensors[name] = value
        return encoded

    def _array(self, value: np.ndarray[Any, Any], name: str, *, scalar: bool) -> Any:
        if scalar and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return self.encode(value.item(), name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an array that may not be written is only read
                found = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
            return {"$array": self._tensor(found, name)}
        except TypeError:
            raise TypeError(f"{name} is an array of {value.dtype}, which no tensor holds; give numbers") from None


class Decoder:
    """A reader of what :class:`Encoder` has written.

    Args:
        tensor: returns the tensor of a name.
    """

    def __init__(self, tensor: Callable[[str], Tensor]) -> None:
        self._tensor = tensor

    def decode(self, value: Any) -> Any:
        """Return the data.

        Raises:
            ValueError, KeyError, TypeError: nothing that was written.
        """
        if isinstance(value, list):
            return [self.decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        key = next(iter(value), "")
        if not key.startswith("$"):
            return {name: self.decode(each) for name, each in value.items()}
        return self._special(key, value[key], value)

    def _special(self, key: str, given: Any, value: dict[str, Any]) -> Any:
        if key == "$tensor":
            found = self._tensor(given)
            return found if "dtype" not in value else found.view(_DTYPES[value["dtype"]]).squeeze(-1)
        if key == "$array":
            return self.decode(given).numpy()
        if key == "$bytes":
            return self.decode(given).numpy().tobytes()
        if key == "$tuple":
            return tuple(self.decode(given))
        if key == "$float" and given in ("inf", "-inf", "nan"):
            return float(given)
        if key in ("$dict", "$counter"):
            pairs = {self.decode(name): self.decode(each) for name, each in given}
            return pairs if key == "$dict" else Counter(pairs)
        if key == "$dtype":
            return _DTYPES[given]
        if key == "$device":
            return torch.device(given)
        raise ValueError(f"{key[:40]!r} is nothing that a checkpoint holds")
